# SPDX-License-Identifier: Apache-2.0
"""One immutable reading of one device, and the arithmetic on it.

Pure data: no torch, no clock, no OpenTelemetry. A test builds a reading by hand from a nested dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, overload

Statistics = Mapping[str, Any]
"""The allocator's nested statistics, less what this backend, mode or release cannot give."""

POOLS = {"small": "small_pool", "large": "large_pool"}
"""``torch.memory.pool`` as we name it -> as the statistics name it."""


class _Figure:
    """One figure of the statistics, or None where it is absent."""

    def __init__(self, family: str, of: str = "current") -> None:
        self._family, self._of = family, of

    @overload
    def __get__(self, reading: None, owner: type) -> _Figure: ...
    @overload
    def __get__(self, reading: AllocatorReading, owner: type) -> int | None: ...
    def __get__(self, reading: AllocatorReading | None, owner: type) -> int | _Figure | None:
        if reading is None:
            return self
        family = reading.statistics.get(self._family)
        return None if family is None else family["all"].get(self._of)


class _Scalar(_Figure):
    """A figure that the allocator keeps once for the device, without pools."""

    def __init__(self, key: str) -> None:
        self._key = key

    @overload
    def __get__(self, reading: None, owner: type) -> _Scalar: ...
    @overload
    def __get__(self, reading: AllocatorReading, owner: type) -> int | None: ...
    def __get__(self, reading: AllocatorReading | None, owner: type) -> int | _Scalar | None:
        return self if reading is None else reading.statistics.get(self._key)


class AllocatorReading(NamedTuple):
    """What the caching allocator said of one device in one call.

    Bytes are bytes, counts are counts; None means that this backend, mode or release cannot say.
    Counts that only grow are as the allocator has them: the user's own
    ``reset_accumulated_memory_stats`` makes them fall (see ``sampler.Totals``).

    Example:
        >>> reading = AllocatorReading(0, at=0.0, statistics={
        ...     "active_bytes": {"all": {"current": 30}}, "reserved_bytes": {"all": {"current": 40}}})
        >>> reading.slack, reading.fragmentation
        (0.25, None)
    """

    device: int
    at: float
    """Monotonic seconds just before the call: what happened later may not be in it."""
    statistics: Statistics

    @property
    def name(self) -> str:
        """The device as torch names it: ``cuda:0``."""
        return f"cuda:{self.device}"

    allocated = _Figure("allocated_bytes")
    allocated_peak = _Figure("allocated_bytes", "peak")
    turnover = _Figure("allocated_bytes", "allocated")
    active = _Figure("active_bytes")
    active_peak = _Figure("active_bytes", "peak")
    requested = _Figure("requested_bytes")
    reserved = _Figure("reserved_bytes")
    reserved_peak = _Figure("reserved_bytes", "peak")
    inactive_split = _Figure("inactive_split_bytes")
    allocations = _Figure("allocation", "allocated")
    retries = _Scalar("num_alloc_retries")
    ooms = _Scalar("num_ooms")
    oom_rejections = _Scalar("num_oom_rejections")
    device_allocations = _Scalar("num_device_alloc")
    device_frees = _Scalar("num_device_free")
    device_syncs = _Scalar("num_sync_all_streams")

    @property
    def pending_free(self) -> int | None:
        """Freed bytes whose ``record_stream`` events have not been seen to complete."""
        return _difference(self.active, self.allocated)

    @property
    def rounding(self) -> int | None:
        """Bytes lost to rounding: requested follows *active*, not allocated."""
        return _difference(self.active, self.requested)

    @property
    def cached(self) -> int | None:
        """Bytes held from the driver and in no use: split remainders and wholly free segments."""
        return _difference(self.reserved, self.active)

    @property
    def slack(self) -> float | None:
        """The unused share of what is held, 0 to 1, in every mode; cache is in it."""
        return share(self.cached, self.reserved)

    @property
    def fragmentation(self) -> float | None:
        """The trapped share of what is held, 0 to 1; None under expandable segments."""
        return share(self.inactive_split, self.reserved)

    def by_pool(self, family: str) -> Mapping[str, int] | int | None:
        """The current figure of a family for each pool; the sum alone where pools are not told apart."""
        figures = self.statistics.get(family)
        if figures is None:
            return None
        if "small_pool" not in figures:
            return figures["all"]["current"]
        return {pool: figures[key]["current"] for pool, key in POOLS.items()}


RawReading = tuple[int, float, Statistics]
"""What an ``AllocatorReading`` is made of, for the path of every request: to make one costs as much as all
else about it."""


class DriverMemory(NamedTuple):
    """What the driver says of the whole device, whoever uses it. Bytes."""

    free: int
    total: int


class HostReading(NamedTuple):
    """Pinned host memory of torch's caching host allocator. Bytes."""

    allocated: int
    """In use by tensors."""
    reserved: int
    """Pinned, whether in use or kept for later."""


def external(reading: AllocatorReading, driver: DriverMemory) -> int | None:
    """Bytes in use on the device beyond what this allocator holds; never below 0.

    The two figures come from two calls: memory that the allocator won in between would make the
    difference negative.
    """
    held = reading.reserved
    return None if held is None else max(0, driver.total - driver.free - held)


def _difference(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def share(part: int | None, whole: int | None) -> float | None:
    """A part of a whole, 0 to 1; None where either is unknown or the whole is nothing."""
    return part / whole if part is not None and whole else None
