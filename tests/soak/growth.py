# SPDX-License-Identifier: Apache-2.0
"""Whether a process grows: its second quarter against its last.

The first quarter is for warming up. Of each figure the medians of the two quarters are compared: what comes
and goes (an outage's queue, a burst of connections) moves a median little, and a leak moves it by all that
leaked in half of the run. Of objects it is the least, each time counted after a collection. What may be
between them is ``BOUNDS``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BOUNDS = {
    "memory": 32 << 20,
    "threads": 6,
    "descriptors": 8,
    "series": 24,
    "objects": 40_000,
}
"""Bytes, and counts. In clean runs of ten minutes the medians differed by up to 9 MiB of memory, 2 threads, 2
descriptors, 2 series, and the least of the objects by 15,000 of two million. In a short run rare labels come
late (an operation that runs out of memory beside no other)."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    """Seconds, of the wall clock."""
    memory: int
    """Resident bytes, but for what stands for the device's memory."""
    threads: int
    descriptors: int


def sample(pid: int) -> Sample:
    """What a process holds now.

    The emulated device's memory is address space without a reservation (``nr``), resident where it was
    written to, and no memory of the process's: with MALLOC_ARENA_MAX=1 nothing else has that flag.
    """
    process = Path("/proc") / str(pid)
    memory = resident = 0
    for line in (process / "smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            resident = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "nr" not in line.split():
            memory += resident
    threads = len(list((process / "task").iterdir()))
    return Sample(time.time(), memory, threads, len(list((process / "fd").iterdir())))


def quarter(number: int, began: float, ended: float) -> tuple[float, float]:
    """When the first (1) to last (4) of them was."""
    length = (ended - began) / 4
    return began + (number - 1) * length, began + number * length


def compared(
    figures: Sequence[tuple[float, float]], began: float, ended: float, of: Callable[[list[float]], float]
) -> tuple[float, float]:
    """Of a figure over time, its median say: in the second quarter, and in the last."""
    second, last = (
        of([figure for at, figure in figures if first <= at <= until])
        for first, until in (quarter(2, began, ended), quarter(4, began, ended))
    )
    return second, last


def grown(figures: dict[str, tuple[float, float]]) -> list[str]:
    """What has grown beyond its bound, in words."""
    return [
        f"{name} grew from {before:,.0f} to {after:,.0f}: more than {BOUNDS[name]:,} in half of the run"
        for name, (before, after) in figures.items()
        if after - before > BOUNDS[name]
    ]
