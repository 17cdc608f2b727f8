# SPDX-License-Identifier: Apache-2.0
"""In a process on the emulated GPU: the instrumentor, its last export, a clock that a test moves."""

from __future__ import annotations

import time
from typing import Any

from exported import Exported

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, oom
from opentelemetry_instrumentation_torchmem.allocator import sampler, source, survey


class Clock:
    """Monotonic seconds that a test moves: budgets and ages pass without a wait."""

    def __init__(self) -> None:
        self.ahead = 0.0
        for module in (survey, sampler, source, oom):
            module.monotonic = self

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def pass_by(self, seconds: float) -> None:
        self.ahead += seconds


class Watched(Exported):
    """Instrumented; what the last collection did with snapshots."""

    def __init__(self, **options) -> None:
        super().__init__()
        TorchMemInstrumentor().instrument(meter_provider=self.provider, **options)

    @property
    def spent(self) -> float:
        """Seconds that snapshots have taken in all."""
        return self.value("torch.memory.telemetry.duration", step="snapshot")

    @property
    def skipped(self) -> dict[str, int]:
        """By reason, without the prefix; those that are not 0."""
        points = self.all("torch.memory.telemetry.skipped")
        reasons = {labels["torch.memory.telemetry.reason"]: count for labels, count in points if count}
        return {reason.removeprefix("snapshot_"): count for reason, count in reasons.items()}

    @property
    def headroom(self) -> int | None:
        return self.value("torch.memory.headroom")

    @property
    def age(self) -> float | None:
        return self.value("torch.memory.snapshot.age")

    def figures(self) -> dict[str, Any]:
        """Of the last collection, what an engineer on call would look at; None is absent. Bytes."""
        told: dict[str, Any] = {
            name: self.value(f"torch.memory.{name}")
            for name in (
                "allocated", "active", "reserved", "inactive_split", "slack", "fragmentation", "headroom",
                "private_pool.reserved", "allocation.retries", "ooms", "device.syncs", "limit",
            )
        }  # fmt: skip
        told["largest"] = self.value("torch.memory.free_block.largest", pool="large")
        told["verdicts"] = self.value("torch.memory.oom.verdicts")
        return {**told, **self.ledger()}

    def takes_one(self) -> bool:
        """Collects; whether that took a snapshot."""
        before = self.spent if self.metrics else 0.0
        return self.collect().spent > before


def take(size, stream=None):
    import torch

    with torch.cuda.stream(stream):
        return torch.empty(size, dtype=torch.uint8, device="cuda")
