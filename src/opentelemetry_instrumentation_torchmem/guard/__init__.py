# SPDX-License-Identifier: Apache-2.0
"""The server that heals before it dies: sick for a while, not ready, drained, cleared, measured again.

Off unless one is made::

    guard = MemoryGuard()
    app.add_middleware(MemoryGuardMiddleware, guard=guard)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .health import grpc_health
    from .machine import State, Timing
    from .middleware import MemoryGuardMiddleware, endpoint
    from .places import Places
    from .policy import DeviceReadings, Headroom, Policy, Readings, Slack, Verdict
    from .steps import Compact, CompactionOutcome
    from .watch import MemoryGuard, ShutError

_HOMES = {
    "Compact": "steps",
    "CompactionOutcome": "steps",
    "DeviceReadings": "policy",
    "Headroom": "policy",
    "MemoryGuard": "watch",
    "MemoryGuardMiddleware": "middleware",
    "Places": "places",
    "Policy": "policy",
    "Readings": "policy",
    "ShutError": "watch",
    "Slack": "policy",
    "State": "machine",
    "Timing": "machine",
    "Verdict": "policy",
    "endpoint": "middleware",
    "grpc_health": "health",
}

__all__ = [
    "Compact",
    "CompactionOutcome",
    "DeviceReadings",
    "Headroom",
    "MemoryGuard",
    "MemoryGuardMiddleware",
    "Places",
    "Policy",
    "Readings",
    "ShutError",
    "Slack",
    "State",
    "Timing",
    "Verdict",
    "endpoint",
    "grpc_health",
]


def __getattr__(name: str) -> Any:
    """What is asked for by name comes when it is: the table of signals imports a part of this."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
