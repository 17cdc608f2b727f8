# SPDX-License-Identifier: Apache-2.0
"""Requests as windows on the allocator: what changed between two readings, and which windows overlapped.

Pure arithmetic and one small registry; knows neither torch nor OpenTelemetry.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .reading import AllocatorReading

_PEAKS = ("active_bytes", "reserved_bytes", "requested_bytes", "allocation", "active", "segment")
"""Families whose peaks fall with the allocated peak when the user resets the peaks."""


class Change(NamedTuple):
    """What happened on one device, or on several in sum, while a window was open.

    Bytes and counts; None means that it cannot be known: a backend that does not say, or the user's own
    reset of the statistics inside the window.
    """

    reserved_before: int | None
    reserved_delta: int | None
    allocated_before: int | None
    allocated_delta: int | None
    peak_growth: int | None
    """How far the allocated peak rose: 0 says that the window stayed at or below the old one."""
    retries: int | None
    ooms: int | None
    device_allocations: int | None
    device_syncs: int | None
    turnover: int | None
    inactive_split: int | None
    """At the end of the window."""
    reserved: int | None
    """At the end of the window."""

    @property
    def fragmentation(self) -> float | None:
        """The trapped share of what is held at the end, 0 to 1."""
        return (
            self.inactive_split / self.reserved if self.reserved and self.inactive_split is not None else None
        )


NOTHING_KNOWN = Change(*[None] * len(Change._fields))


def change(before: AllocatorReading, after: AllocatorReading) -> Change:
    """The change on one device from one reading to a later one. On the path of every request."""
    b, a = before.statistics, after.statistics
    if "reserved_bytes" not in a or "reserved_bytes" not in b:
        return NOTHING_KNOWN
    reserved_b: int = b["reserved_bytes"]["all"]["current"]
    reserved: int = a["reserved_bytes"]["all"]["current"]
    allocated_b, allocated = b["allocated_bytes"]["all"], a["allocated_bytes"]["all"]
    current_b, current = allocated_b["current"], allocated["current"]
    peak_growth = allocated["peak"] - allocated_b["peak"]
    if peak_growth and (peak_growth < 0 or _peaks_were_reset(b, a)):
        peak_growth = None
    retries = a.get("num_alloc_retries")
    if retries is None:  # cudaMallocAsync counts nothing
        return NOTHING_KNOWN._replace(
            reserved_before=reserved_b,
            reserved_delta=reserved - reserved_b,
            allocated_before=current_b,
            allocated_delta=current - current_b,
            peak_growth=peak_growth,
            reserved=reserved,
        )
    delta = current - current_b
    turnover = allocated["allocated"] - allocated_b["allocated"]
    split = a.get("inactive_split_bytes")
    inactive_split = None if split is None else split["all"]["current"]
    if turnover < 0 or delta != turnover - allocated["freed"] + allocated_b["freed"]:
        # the user reset the counters in between
        known = (reserved_b, reserved - reserved_b, current_b, delta, peak_growth)
        return Change(*known, None, None, None, None, None, inactive_split, reserved)
    device_allocations, syncs = a.get("num_device_alloc"), a.get("num_sync_all_streams")
    return Change(
        reserved_b,
        reserved - reserved_b,
        current_b,
        delta,
        peak_growth,
        retries - b["num_alloc_retries"],
        a["num_ooms"] - b["num_ooms"],
        None if device_allocations is None else device_allocations - b["num_device_alloc"],
        None if syncs is None else syncs - b["num_sync_all_streams"],
        turnover,
        inactive_split,
        reserved,
    )


def total(changes: Sequence[Change]) -> Change:
    """The sum over devices; a figure that one device cannot tell has no sum."""
    return changes[0] if len(changes) == 1 else Change(*map(_sum, zip(*changes, strict=True)))


def followed(earlier: Change, later: Change) -> Change:
    """Two windows on one device, one after another, as one: what changed in each adds up."""
    return total([earlier, later])._replace(
        reserved_before=earlier.reserved_before,
        allocated_before=earlier.allocated_before,
        inactive_split=later.inactive_split,
        reserved=later.reserved,
    )


def _sum(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


def _peaks_were_reset(b: Any, a: Any) -> bool:
    return any(
        a[family]["all"]["peak"] < b[family]["all"]["peak"]
        for family in _PEAKS
        if family in a and family in b
    )


class Window:
    """One request's stay: where it stands among the others. Made by ``OpenWindows.open``."""

    __slots__ = ("count_at_birth", "key", "nested", "open", "sequence")

    def __init__(self, key: Hashable, sequence: int, count_at_birth: int, nested: bool) -> None:
        self.key = key
        self.sequence = sequence
        self.count_at_birth = count_at_birth
        self.nested = nested
        self.open = True
        """Until its request has ended; the context of a task that was started in it may live longer."""


class OpenWindows:
    """The windows open now, and how many overlapped each: constant work however many are open.

    A window that is nested in another (a ``forward`` inside a ``generate``) is not counted: it belongs to the
    outer one and does not overlap it.
    """

    def __init__(self) -> None:
        # reentrant: a signal handler may make a request in the middle of one
        self._lock = threading.RLock()
        self._sequence = 0
        self._open = 0
        self.count = 0
        """Those open now, the nested ones not counted."""
        self.by_key: dict[Hashable, int] = {}
        """The windows open now of each key ever seen, the nested ones too."""
        # the largest counts still to be seen by a window that is open: sequences rise, counts fall
        self._sequences: list[int] = []
        self._counts: list[int] = []

    @property
    def any_open(self) -> bool:
        """Whether any is open, the nested ones too."""
        return self._open > 0

    def open(self, key: Hashable = None, nested: bool = False) -> Window:
        """A window from now on; the key is the caller's own, to count by."""
        with self._lock:
            self.by_key[key] = self.by_key.get(key, 0) + 1
            self._open += 1
            if nested:
                return Window(key, self._sequence + 1, self.count, nested)
            self._sequence = sequence = self._sequence + 1
            self.count = count = self.count + 1
            if self._open > 1:  # else nobody is there whom it overlaps
                while self._counts and self._counts[-1] <= count:
                    self._counts.pop()
                    self._sequences.pop()
                self._counts.append(count)
                self._sequences.append(sequence)
            return Window(key, sequence, count, nested)

    def close(self, window: Window) -> int:
        """The most windows that were open at one time during this one, itself (or its outer one) included."""
        with self._lock:
            self.by_key[window.key] -= 1
            self._open -= 1
            if not window.nested:
                self.count -= 1
            most = window.count_at_birth or 1
            if self._counts:
                at = bisect_left(self._sequences, window.sequence)
                if at < len(self._counts):
                    most = max(most, self._counts[at])
                if self._open == 0:
                    self._sequences.clear()
                    self._counts.clear()
            return most
