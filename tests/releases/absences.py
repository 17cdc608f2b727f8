# SPDX-License-Identifier: Apache-2.0
"""Why a signal is absent with a release or in a mode: one row for each reason, and no signal without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

Release = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Absence:
    """Signals, by glob, and when they are absent."""

    signals: tuple[str, ...]
    when: Callable[[Release, str], bool]
    """Of torch's release and the mode."""
    why: str


NO_GPU, EXPANDABLE, ASYNC = "no GPU", "expandable", "cudaMallocAsync"

OF_THE_ALLOCATOR = (
    "active", "allocated", "allocated_peak", "allocation.retries", "allocations", "allocator.info", "blocks",
    "device.*", "fragmentation", "free_block.largest", "headroom", "host.*", "inactive_split", "limit",
    "oom.verdicts", "ooms", "private_pool.reserved", "reading.age", "request.peak_growth",
    "request.reserved_growth", "requested", "reserved", "reserved_peak", "rounding", "segments", "slack",
    "snapshot.age", "telemetry.absent", "turnover", "usage",
)  # fmt: skip
OF_THE_NATIVE_ONE = (
    "allocation.retries", "allocations", "blocks", "device.*", "fragmentation", "free_block.largest",
    "headroom", "inactive_split", "oom.verdicts", "ooms", "private_pool.reserved", "requested", "rounding",
    "segments",
    "snapshot.age", "telemetry.absent", "turnover",
)  # fmt: skip
ERRORS = ("event *", "log *", "metric torch.memory.oom.verdicts")

ABSENCES = (
    Absence(
        (*(f"metric torch.memory.{name}" for name in OF_THE_ALLOCATOR),
         *(f"metric torch.memory.{name} by *" for name in OF_THE_ALLOCATOR),
         "attribute *", "span torch.device", "span torch.memory.*", *ERRORS),
        lambda _, mode: mode == NO_GPU,
        "CUDA is not initialised: there is no allocator to read, and it is never initialised for it",
    ),
    Absence(
        ("metric torch.memory.device.*", "span torch.memory.device.*"),
        lambda torch, _: torch < (2, 4),
        "torch counts its calls of the driver from 2.4 on",
    ),
    Absence(
        ("attribute hw.id", "event hw.id"),
        lambda torch, _: torch < (2, 4),
        "torch tells a device's UUID from 2.4 on",
    ),
    Absence(
        ("metric torch.memory.host.*",),
        lambda torch, _: torch < (2, 7),
        "torch keeps statistics of pinned host memory from 2.7 on",
    ),
    Absence(
        ERRORS,
        lambda torch, mode: mode == "two devices" and torch < (2, 4),
        "before 2.4 an observer of out of memory errors would break those of every device but the first, so "
        "with several none is attached",
    ),
    Absence(
        (*(f"metric torch.memory.{name}" for name in OF_THE_NATIVE_ONE),
         "metric torch.memory.usage by torch.memory.state *_free", "metric * by torch.memory.pool",
         "span torch.memory.allocation.retries", "span torch.memory.device.*",
         "span torch.memory.fragmentation", "span torch.memory.ooms", "span torch.memory.turnover", *ERRORS),
        lambda _, mode: mode == ASYNC,
        "CUDA's own pool allocator keeps no counters, no segments and no pools, and has neither snapshots "
        "nor observers of errors",
    ),
    Absence(
        ("metric torch.memory.headroom",),
        lambda torch, _: torch < (2, 6),
        "torch does not tell the memory fraction before 2.6, and what may be had depends on it",
    ),
    Absence(
        ("metric torch.memory.inactive_split*", "metric torch.memory.segments*",
         "span torch.memory.fragmentation"),
        lambda _, mode: mode == EXPANDABLE,
        "torch does not keep the statistic under expandable segments; the metric of fragmentation comes from "
        "snapshots there",
    ),
    Absence(
        ("span *_by_device",),
        lambda _, mode: mode != "two devices",
        "told where several devices were touched",
    ),
    Absence(
        ("event torch.memory.oom.settings",),
        lambda _, mode: mode != EXPANDABLE,
        "told where there are any",
    ),
)  # fmt: skip


def release_of(version: str) -> Release:
    """``2.5.1+cu124`` -> (2, 5)."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def why(signal: str, torch: Release, mode: str) -> str | None:
    """Why a signal is absent; None where no reason is known."""
    for absence in ABSENCES:
        if absence.when(torch, mode) and any(fnmatch(signal, glob) for glob in absence.signals):
            return absence.why
    return None
