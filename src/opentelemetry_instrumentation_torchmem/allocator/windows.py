# SPDX-License-Identifier: Apache-2.0
"""Requests as windows on the allocator: what changed between two readings, and which windows overlapped.

Pure arithmetic and one small registry; knows neither torch nor OpenTelemetry.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from .peaks import RESETS
from .reading import RawReading

_T = TypeVar("_T")
_W = TypeVar("_W", bound="Window")
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
    def idle(self) -> bool:
        """Whether nothing happened, for sure: not that what happened is not known."""
        happened = (
            self.reserved_delta, self.allocated_delta, self.retries, self.ooms,
            self.device_allocations, self.device_syncs,
        )  # fmt: skip
        return self.turnover == 0 and not any(happened)

    @property
    def fragmentation(self) -> float | None:
        """The trapped share of what is held at the end, 0 to 1."""
        return (
            self.inactive_split / self.reserved if self.reserved and self.inactive_split is not None else None
        )


NOTHING_KNOWN = Change(*[None] * len(Change._fields))


def change(before: RawReading, after: RawReading) -> Change:
    """The change on one device from one reading to a later one."""
    b, a = before[2], after[2]
    try:
        reserved_b: int = b["reserved_bytes"]["all"]["current"]
        reserved: int = a["reserved_bytes"]["all"]["current"]
        allocated_b, allocated = b["allocated_bytes"]["all"], a["allocated_bytes"]["all"]
    except KeyError:
        return NOTHING_KNOWN
    current_b: int = allocated_b["current"]
    delta: int = allocated["current"] - current_b
    peak_growth: int | None = allocated["peak"] - allocated_b["peak"]
    if RESETS.last >= before[1] or (peak_growth and (peak_growth < 0 or _peaks_were_reset(b, a))):
        peak_growth = None
    try:
        retries = a["num_alloc_retries"] - b["num_alloc_retries"]
    except KeyError:  # cudaMallocAsync counts nothing
        known = (reserved_b, reserved - reserved_b, current_b, delta, peak_growth)
        return Change(*known, None, None, None, None, None, None, reserved)
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
        retries,
        a["num_ooms"] - b["num_ooms"],
        None if device_allocations is None else device_allocations - b["num_device_alloc"],
        None if syncs is None else syncs - b["num_sync_all_streams"],
        turnover,
        inactive_split,
        reserved,
    )


def nothing_held(later: RawReading) -> RawReading:
    """The reading of a device before it was first used, in the shape of one after."""
    index, at, statistics = later
    return index, at, _zeros(statistics)


def _zeros(statistics: Any) -> Any:
    return {name: _zeros(figure) if isinstance(figure, dict) else 0 for name, figure in statistics.items()}


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
    """One request's stay: where it stands among the others, from ``OpenWindows.open`` on."""

    __slots__ = ("beside", "inner", "most", "open", "outer", "sequence", "since")

    def __init__(self) -> None:
        self.open = True
        self.outer = self.inner = None
        self.beside = self.most = 0

    open: bool
    """Until its request has ended; the context of a task that was started in it may live longer."""
    outer: Window | None
    """The one that it is nested in."""
    # for ``OpenWindows`` alone
    inner: list[Window] | None
    """Of one that is not nested: all that are nested in it, at whatever depth."""
    beside: int
    """How many run beside it within the same outer one."""
    sequence: int
    since: int
    """How many were open when it, or ``beside``, came to be as it is."""
    most: int
    """The most until then."""

    def still_open(self) -> Window | None:
        """This one, or the nearest it is nested in, if it is open still."""
        window: Window | None = self
        while window is not None and not window.open:
            window = window.outer
        return window


class OpenWindows:
    """The windows open now, and how many overlapped each: constant work however many are open.

    A window that is nested in another (a ``forward`` inside a ``generate``) is not counted: it belongs to the
    outer one and does not overlap it. It does overlap what else runs within that one at the same time, and
    what outlives its outer one stands for itself from then on.

    Two windows overlap wherever their requests ran: which device a request will use is not known before, and
    what happened on one is not known to be its doing after.
    """

    def __init__(self) -> None:
        self.opened: dict[Window, None] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """As if none had ever been opened: in a forked child the parent's end in the parent alone."""
        for window in self.opened:
            window.open = False
        self.lock = threading.RLock()
        """Held where windows open and close. Reentrant: a signal handler may make a request in the middle."""
        self.sequence = 0
        self.opened = {}
        self.count = 0
        """Those open now, the nested ones not counted."""
        # the largest counts still to be seen by a window that is open: sequences rise, counts fall
        self._sequences: list[int] = []
        self.counts: list[int] = []

    @property
    def any_open(self) -> bool:
        """Whether any is open, the nested ones too."""
        return bool(self.opened)

    def all_open(self) -> tuple[Window, ...]:
        """Those open now, the nested ones too, the earliest first."""
        return tuple(self.opened)

    def while_none_open(self, act: Callable[[], _T]) -> _T | None:
        """What a short act gives, before any window opens; None without it while one is open."""
        with self.lock:
            return None if self.count else act()

    def open(self, window: _W, outer: Window | None = None) -> _W:
        """Open a window now, within another or not; returns it."""
        with self.lock:
            if not self.opened:  # nobody is there whom it overlaps
                window.since = self.count = 1
                window.sequence = self.sequence
            elif outer is None or not self._nest(window, outer):
                window.since = self.count = self.count + 1
                window.sequence = self.sequence = self.sequence + 1
                self._counted_now()
            self.opened[window] = None
            return window

    def close(self, window: Window) -> int:
        """The most windows that were open at one time during this one, itself (or its outer one) included; 1
        of one that is not open here, as in a forked child the parent's."""
        with self.lock:
            opened = self.opened
            if window not in opened:
                return 1
            del opened[window]
            most = self._most(window) if self.counts or window.most else window.beside + window.since
            if window.outer is not None:
                self._unnest(window, window.outer)
            else:
                self.count -= 1
                if window.inner:
                    self._set_free(window, window.inner)
            if self.counts and not opened:
                self._sequences.clear()
                self.counts.clear()
            return most

    def _counted_now(self) -> None:
        while self.counts and self.counts[-1] <= self.count:
            self.counts.pop()
            self._sequences.pop()
        self.counts.append(self.count)
        self._sequences.append(self.sequence)

    def _most(self, window: Window) -> int:
        at = bisect_left(self._sequences, window.sequence)
        later = self.counts[at] if at < len(self.counts) else 0
        return max(window.most, window.beside + max(window.since, later))

    # within one that is not nested

    def _nest(self, window: Window, outer: Window | None) -> bool:
        """Put a window within the nearest that is open still; False where none is."""
        while outer is not None and outer not in self.opened:
            outer = outer.outer
        if outer is None:
            return False
        window.outer, window.sequence, window.since = outer, self.sequence + 1, self.count
        root, depth = window, 0
        while root.outer is not None:
            root, depth = root.outer, depth + 1
        if root.inner is None:
            root.inner = []
        root.inner.append(window)
        if len(root.inner) > depth:  # else each is nested in the one before
            self._look_beside(root.inner)
        return True

    def _unnest(self, window: Window, outer: Window) -> None:
        root = outer
        while root.outer is not None:
            root = root.outer
        inner = root.inner or []
        inner.remove(window)
        for each in inner:
            if each.outer is window:
                each.outer = outer
        self._look_beside(inner)

    def _set_free(self, window: Window, inner: list[Window]) -> None:
        """What was nested directly in one that has ended stands for itself."""
        for each in inner:
            each.most = self._most(each)
        free = [each for each in inner if each.outer is window]
        self.count += len(free)
        self.sequence += 1
        self._counted_now()
        for root in free:
            root.outer, root.beside, root.inner = None, 0, [each for each in inner if _is_within(each, root)]
            for each in root.inner:
                each.beside = _beside(each, root.inner)
        for each in inner:
            each.sequence, each.since = self.sequence, self.count

    def _look_beside(self, inner: list[Window]) -> None:
        for each in inner:
            beside = _beside(each, inner)
            if beside != each.beside:
                each.most = self._most(each)
                each.beside, each.sequence, each.since = beside, self.sequence + 1, self.count


def _beside(window: Window, inner: list[Window]) -> int:
    """How many run beside it: of those within one another, one."""
    line = {window}
    outer = window.outer
    while outer is not None:
        line.add(outer)
        outer = outer.outer
    return sum(each not in line and each.outer is not window and each.outer in line for each in inner)


def _is_within(window: Window, other: Window) -> bool:
    outer = window.outer
    while outer is not None and outer is not other:
        outer = outer.outer
    return outer is other
