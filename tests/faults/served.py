# SPDX-License-Identifier: Apache-2.0
"""In a test's process: this package instrumented, what it exports, and every line that it logs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from exported import Exported, Traced

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

MIB = 1 << 20


class Served:
    """Instrumented from the start on, with providers in memory; what the log says of it."""

    def __init__(self, **options: Any) -> None:
        self.lines: list[str] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.lines.append(record.getMessage())
        logging.getLogger("opentelemetry_instrumentation_torchmem").addHandler(handler)
        self.exported, self.traced = Exported(), Traced()
        self.instrument(**options)

    def instrument(self, **options: Any) -> None:
        TorchMemInstrumentor().instrument(
            **{
                "meter_provider": self.exported.provider,
                "tracer_provider": self.traced.provider,
                **options,
            }
        )

    def collect(self) -> Exported:
        return self.exported.collect()

    @property
    def spans(self) -> list[Any]:
        return self.traced.spans

    @property
    def names(self) -> list[str]:
        """Of the last collection, without the prefix."""
        return sorted(
            name.removeprefix("torch.memory.")
            for name in self.exported.names
            if name.startswith("torch.memory.")
        )

    @property
    def skipped(self) -> dict[str, int]:
        """By reason in the last collection, but for what is a matter of time."""
        return {
            labels["torch.memory.telemetry.reason"]: count
            for labels, count in self.exported.all("torch.memory.telemetry.skipped")
            if count and labels["torch.memory.telemetry.reason"] not in ("snapshot_budget", "snapshot_busy")
        }

    @property
    def durations(self) -> int:
        """How many requests the last collection told."""
        return sum(point.count for point in self.exported.points("torch.memory.request.duration"))

    @property
    def active(self) -> int | None:
        return self.exported.value("torch.memory.requests.active")


def take(mib: float) -> Any:
    import torch

    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")


def at_each_reading(act: Callable[[], Any]) -> None:
    """Have something done before each call of the allocator's statistics, by this package or others."""
    import torch

    for name in ("_accelerator_getDeviceStats", "_cuda_memoryStats"):  # which of them depends on the release
        given = getattr(torch._C, name, None)
        if given is not None:

            def reads(index: int, given: Any = given) -> Any:
                act()
                return given(index)

            setattr(torch._C, name, reads)


def until(true: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Wait for something; whether it came."""
    end = time.monotonic() + seconds
    while not (came := bool(true())) and time.monotonic() < end:
        time.sleep(0.01)
    return came


def timed(calls: int, call: Callable[[int], Any]) -> tuple[float, list[Any]]:
    """The median seconds of a call, and what the calls gave."""
    took, gave = [], []
    for number in range(calls):
        began = time.perf_counter()
        gave.append(call(number))
        took.append(time.perf_counter() - began)
    return sorted(took)[calls // 2], gave


def elsewhere(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


__all__ = [
    "MIB",
    "Exported",
    "Served",
    "TorchMemInstrumentor",
    "Traced",
    "at_each_reading",
    "elsewhere",
    "take",
    "timed",
    "track",
    "until",
]
