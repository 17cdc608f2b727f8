# SPDX-License-Identifier: Apache-2.0
"""What the allocator's trips to the driver cost, as a share of time: counts times what one takes.

An estimate, and named so: the counts are exact, the times are those of calls measured at another moment. A
synchronisation waits for whatever the device still has to do, so on a busy one the truth lies above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from ..allocator.reading import AllocatorReading
from ..allocator.windows import Change

_GIVEN_BACK = ("segment_free", "segment_unmap")
_TAKEN = ("segment_alloc", "segment_map")


@dataclass(frozen=True, slots=True)
class Activity:
    """What the allocator of one device did over a time. None where it cannot be known."""

    seconds: float | None = None
    allocations: int | None = None
    """Blocks handed out, from the cache or not."""
    device_allocations: int | None = None
    device_frees: int | None = None
    syncs: int | None = None
    """Waits for all streams: retries, empty_cache, and entries to ``torch.cuda.graph``."""
    retries: int | None = None
    ooms: int | None = None
    rejections: int | None = None

    @classmethod
    def between(cls, before: AllocatorReading, after: AllocatorReading) -> Activity:
        """From one reading to a later one of the same device."""

        def grown(was: int | None, now: int | None) -> int | None:
            return None if was is None or now is None or now < was else now - was

        return cls(
            after.at - before.at,
            grown(before.allocations, after.allocations),
            grown(before.device_allocations, after.device_allocations),
            grown(before.device_frees, after.device_frees),
            grown(before.device_syncs, after.device_syncs),
            grown(before.retries, after.retries),
            grown(before.ooms, after.ooms),
            grown(before.oom_rejections, after.oom_rejections),
        )

    @classmethod
    def since_start(cls, reading: AllocatorReading, seconds: float | None) -> Activity:
        """Since the process began ``seconds`` ago, or since the user's last reset of the statistics."""
        return cls(
            seconds,
            reading.allocations,
            reading.device_allocations,
            reading.device_frees,
            reading.device_syncs,
            reading.retries,
            reading.ooms,
            reading.oom_rejections,
        )

    @classmethod
    def of_request(cls, change: Change, seconds: float) -> Activity:
        """During one request's window. What is given back to the driver is not counted there."""
        return cls(
            seconds,
            device_allocations=change.device_allocations,
            syncs=change.device_syncs,
            retries=change.retries,
            ooms=change.ooms,
        )

    @property
    def flushes(self) -> int | None:
        """Waits for all streams that no retry explains: calls of ``empty_cache``, and captures."""
        return None if self.syncs is None or self.retries is None else max(0, self.syncs - self.retries)


@dataclass(frozen=True, slots=True)
class DriverTimes:
    """What one call of the driver takes, in seconds; None where that was not measured."""

    allocation: float | None
    free: float | None
    sync: float | None = None
    origin: str = ""
    """Where they were measured, in words."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """The estimated cost of reallocation.

    Example:
        >>> activity = Activity(seconds=10.0, device_allocations=100, device_frees=100, syncs=10)
        >>> Overhead.of(activity, DriverTimes(0.001, 0.0005, 0.002)).share
        0.017
    """

    seconds: float
    """Spent in the driver, by estimate."""
    share: float
    """Of the time, 0 to 1."""
    calls: int
    """That were counted."""
    calls_per_second: float

    @classmethod
    def of(cls, activity: Activity, times: DriverTimes) -> Overhead | None:
        """None where the counts, the time or what a call takes is not known."""
        if not activity.seconds or activity.device_allocations is None:
            return None
        pairs = (
            (activity.device_allocations, times.allocation),
            (activity.device_frees, times.free),
            (activity.syncs, times.sync),
        )
        known = [(count, each) for count, each in pairs if count is not None and each is not None]
        if not known:
            return None
        spent = sum(count * each for count, each in known)
        calls = sum(count for count, _ in known)
        return cls(spent, min(1.0, spent / activity.seconds), calls, calls / activity.seconds)


def times_of_trace(entries: Iterable[Mapping[str, Any]]) -> DriverTimes | None:
    """What calls took, by one device's memory history: where the allocator makes one after another.

    While it flushes its cache nothing else happens between two entries, and each free is noted before it is
    made: the time between two is that of the first. None where the history holds no such flush.
    """
    frees: list[float] = []
    both: list[float] = []
    """The last free of a flush, and the allocation that it was for."""
    for before, after in pairwise(entries):
        if before.get("action") in _GIVEN_BACK:
            took = (after["time_us"] - before["time_us"]) / 1e6
            if after.get("action") in _GIVEN_BACK:
                frees.append(took)
            elif after.get("action") in _TAKEN:
                both.append(took)
    if not frees:
        return None
    free = median(frees)
    return DriverTimes(
        max(0.0, median(both) - free) if both else None, free, origin="the flushes in the memory history"
    )


def measure(torch: Any, device: int, size: int = 32 << 20, repeat: int = 10) -> DriverTimes:
    """What calls take on this device now: takes ``size`` bytes from the driver and gives them back.

    It empties the process's cache each time, and waits for the device: for a quiet moment, or a process of
    its own. Medians.
    """
    taken: list[float] = []
    given: list[float] = []
    waited: list[float] = []
    for _ in range(repeat):
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        began = perf_counter()
        held = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        taken.append(perf_counter() - began)
        del held
        began = perf_counter()
        torch.cuda.synchronize(device)
        waited.append(perf_counter() - began)
        began = perf_counter()
        torch.cuda.empty_cache()
        given.append(perf_counter() - began)
    return DriverTimes(
        median(taken),
        median(given),
        median(waited),
        f"{repeat} calls for {size >> 20} MiB on cuda:{device} while it was idle",
    )
