# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry instrumentation for the GPU memory of PyTorch's caching allocator.

With no change in code::

    opentelemetry-instrument --metrics_exporter otlp --traces_exporter otlp python serve.py

In code::

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

    TorchMemInstrumentor().instrument()

The server that heals before it dies::

    guard = MemoryGuard()
    app.add_middleware(MemoryGuardMiddleware, guard=guard)

Importing this package does not import torch.
"""

from typing import TYPE_CHECKING, Any

from .instrumentor import TorchMemInstrumentor
from .requests.specs import TargetSpec
from .version import __version__

if TYPE_CHECKING:
    from .guard.middleware import MemoryGuardMiddleware
    from .guard.watch import MemoryGuard
    from .requests.track import instrument_model, track, uninstrument_model

__all__ = [
    "MemoryGuard",
    "MemoryGuardMiddleware",
    "TargetSpec",
    "TorchMemInstrumentor",
    "__version__",
    "instrument_model",
    "track",
    "uninstrument_model",
]


def __getattr__(name: str) -> Any:
    """What code asks for by name comes when it does: every process with the launcher imports this package."""
    if name in ("MemoryGuard", "MemoryGuardMiddleware"):
        from . import guard

        return getattr(guard, name)
    if name in __all__:
        from .requests import track

        return getattr(track, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
