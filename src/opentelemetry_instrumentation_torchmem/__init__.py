# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry instrumentation for the GPU memory of PyTorch's caching allocator.

With no change in code::

    opentelemetry-instrument --metrics_exporter otlp --traces_exporter otlp python serve.py

In code::

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

    TorchMemInstrumentor().instrument()

Importing this package does not import torch.
"""

from .instrumentor import TorchMemInstrumentor
from .requests.targets import TargetSpec
from .requests.track import instrument_model, track, uninstrument_model
from .version import __version__

__all__ = [
    "TargetSpec",
    "TorchMemInstrumentor",
    "__version__",
    "instrument_model",
    "track",
    "uninstrument_model",
]
