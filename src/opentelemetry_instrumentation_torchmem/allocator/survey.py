# SPDX-License-Identifier: Apache-2.0
"""Who takes snapshots when.

A snapshot holds the interpreter for its whole length, so it runs on a budget, in a moment without a request
where one comes soon enough, and what it found grows old in the open. Beside requests it is taken the sooner
the less it costs, and at once where the allocator has flushed since; never on a thread that serves while
there are any, nor during a capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from time import monotonic, perf_counter, sleep
from typing import NamedTuple, TypeVar

from ..telemetry import OwnTelemetry
from .captures import CaptureWatch
from .pools import OWNERSHIP
from .reading import POOLS, AllocatorReading
from .settings import AllocatorSettings, settings_at
from .snapshot import DeviceMap, Limits, PoolOn, analyse, never_released
from .source import NATIVE, Source
from .windows import OpenWindows

_T = TypeVar("_T")

IDLE_WAIT = 0.1
"""Seconds that a collection waits for a moment without a request, the interpreter free meanwhile."""
OVERDUE = 60.0
"""Seconds without such a moment after which a snapshot is taken beside requests."""
SOON, CHEAP = 10.0, 0.01
"""The same where the last one took no longer than so many seconds: no request notices one of these."""


ASKED_WAIT = 5.0
"""Seconds that somebody who has asked for a snapshot waits for an idle moment."""


class NoSnapshotError(Exception):
    """There is none to be had; the message says why."""


def _nothing_read(_: int) -> AllocatorReading | None:
    return None


class Surveyed(NamedTuple):
    """What the last snapshot said of one device."""

    map: DeviceMap | None
    """None once it is too old."""
    at: float
    """Monotonic seconds."""
    reading: AllocatorReading
    """Taken just before it."""
    settings: AllocatorSettings | None = None
    """As the runtime told them then."""
    ownership: int = 0
    """How often pools had won or lost an owner."""

    def under(self, settings: AllocatorSettings, fraction: float | None) -> Surveyed:
        """The same where the settings and the process's fraction are others by now: neither is in any
        statistics, and both decide what succeeds."""
        same = self.settings is not None and settings.in_force == self.settings.in_force
        if self.map is None or (same and fraction == self.map.limits.fraction):
            return self
        if not same:
            return self._replace(map=self.map.under_other_settings())
        return self._replace(map=self.map.under_fraction(fraction, self.reading))

    def is_of(self, reading: AllocatorReading) -> bool:
        """Whether nothing has happened in between: equal sums alone may lie in other places by now."""
        return self.ownership == OWNERSHIP.changes and reading.statistics == self.reading.statistics

    def hidden(self, latest: AllocatorReading, private_pools: bool) -> int:
        """Bytes that may have become idle in private pools since: what was in use in them, and all that was
        won from the driver meanwhile. ``private_pools``: some live."""
        found = self.map
        if found is None or not (private_pools or found.private_busy or found.private_idle):
            return 0
        return found.private_busy + _since(self.reading, latest, "reserved_bytes", "all", "allocated")

    def cut_up(self, latest: AllocatorReading) -> int:
        """Bytes of expandable segments that may have become trapped since, which no reading counts: each
        request cuts up less than a page, each free leaves less than one on either side."""
        if self.map is None or self.map.rules is None or latest.inactive_split is not None:
            return 0
        return sum(
            self.map.rules.page(kind)
            * (
                _since(self.reading, latest, "active", pool, "allocated")
                + 2 * _since(self.reading, latest, "active", pool, "freed")
            )
            for kind, pool in POOLS.items()
        )

    def is_overtaken(self, latest: AllocatorReading) -> bool:
        """Whether the allocator has flushed since, or failed: little is where it was."""
        then = self.reading
        return (latest.retries or 0) > (then.retries or 0) or (latest.ooms or 0) > (then.ooms or 0)


def _since(then: AllocatorReading, latest: AllocatorReading, family: str, pool: str, what: str) -> int:
    """How much a counter rose; more than is ever held where that is not known, as after the user's reset."""
    before, now = (reading.statistics.get(family, {}).get(pool, {}).get(what) for reading in (then, latest))
    return _ALL if before is None or now is None or now < before else now - before


_ALL = 1 << 62


class Survey:
    """Takes the snapshots. Long-lived, one owner: the sampler's."""

    def __init__(
        self,
        telemetry: OwnTelemetry,
        windows: OpenWindows,
        captures: CaptureWatch,
        *,
        live_pools: Callable[[], Collection[PoolOn]] = tuple,
        share: float = 0.001,
        max_age: float = 300.0,
    ) -> None:
        """``live_pools`` tells the private pools that have an owner for sure. ``share`` of time is what all
        snapshots together may take, 0 for none; figures older than ``max_age`` seconds are absent."""
        self._telemetry = telemetry
        self._windows = windows
        self._captures = captures
        self._live_pools = live_pools
        self._share = share
        self._max_age = max_age
        self.begin_anew()

    def begin_anew(self) -> None:
        """As if nothing had been looked at; in a forked child the parent's lock may be held."""
        self._surveyed: dict[int, Surveyed] = {}
        self._settings: tuple[AllocatorSettings, AllocatorSettings] | None = None
        """As the runtime told them at the last snapshot, and by that."""
        self._not_before = -inf
        self._taken_at = -inf
        self._cost = 0.0
        """Seconds that the last one took."""
        self._looking = threading.Lock()
        """Never waited for: two readers of one provider may collect at the same time."""

    def of(
        self,
        source: Source,
        settings: AllocatorSettings,
        used: Sequence[int],
        may_read: bool,
        serving: bool,
        fresh: bool = False,
        latest: Callable[[int], AllocatorReading | None] = _nothing_read,
    ) -> Mapping[int, Surveyed]:
        """What is known of each used device, looked at now if that is due and may be; without a map that is
        too old.

        ``serving`` says that the calling thread is one that requests run on; ``fresh`` that the budget does
        not count; ``latest`` tells the latest reading of a device.
        """
        if used and self._share and source.backend == NATIVE:
            if self._looking.acquire(blocking=False):
                try:
                    if self._may_look(may_read, serving, fresh, latest):
                        self._look(source, settings, used, latest)
                finally:
                    self._looking.release()
            else:
                self._not_now("snapshot_budget")
        oldest = monotonic() - self._max_age
        return {
            index: found.under(settings, source.memory_fraction(index))
            if found.at >= oldest
            else found._replace(map=None)
            for index, found in self._surveyed.items()
        }

    def asked(self, source: Source, take: Callable[[], _T]) -> _T:
        """What an act takes that needs a snapshot, for somebody who has asked for it: in a moment without a
        request where one comes soon enough, else beside them. It is not of the budget.

        Raises:
            NoSnapshotError: the backend has none, or a capture does not end.
        """
        if source.backend != NATIVE:
            raise NoSnapshotError(f"the allocator's backend is {source.backend}, which has no snapshots")
        until = monotonic() + ASKED_WAIT
        while (self._captures.under_way or self._windows.count) and monotonic() < until:
            sleep(IDLE_WAIT / 20)
        began = perf_counter()
        taken = self._captures.while_none(take)
        if taken is None:
            raise NoSnapshotError("it captures a CUDA graph")
        self._telemetry.spent("snapshot", perf_counter() - began)
        return taken

    def settings(self, told: AllocatorSettings) -> AllocatorSettings:
        """Those in force, where the runtime tells this: the last snapshot's word on that, which knows what
        was set unseen, and in releases that do not tell."""
        known = self._settings
        return told if known is None or known[0] != told else known[1]

    def take_over(self, device: int, found: Surveyed) -> None:
        """Someone else's look at a device: an out of memory error's. As fresh as one of our own."""
        if self._share:
            self._surveyed = {**self._surveyed, device: found}

    def _may_look(
        self,
        may_read: bool,
        serving: bool,
        fresh: bool,
        latest: Callable[[int], AllocatorReading | None],
    ) -> bool:
        now = monotonic()
        if now < self._not_before and not fresh:
            return self._not_now("snapshot_budget")
        if not may_read:
            return self._not_now("snapshot_unsafe")
        if self._captures.under_way:
            return self._not_now("snapshot_capture")
        while self._windows.count:
            if not serving and self._overdue(now, latest):
                return True
            # of a thread that serves the request would wait for itself
            if serving or monotonic() - now >= IDLE_WAIT:
                if self._taken_at == -inf:
                    self._taken_at = now  # from here on it can be overdue
                return self._not_now("snapshot_busy")
            sleep(IDLE_WAIT / 20)
        return not self._captures.under_way or self._not_now("snapshot_capture")

    def _overdue(self, now: float, latest: Callable[[int], AllocatorReading | None]) -> bool:
        if self._taken_at == -inf:
            return False
        cheap = self._cost <= CHEAP
        overtaken = any(
            found.is_overtaken(reading)
            for index, found in self._surveyed.items()
            if (reading := latest(index)) is not None
        )
        patience = OVERDUE if not (cheap or overtaken) else 0.0 if cheap and overtaken else SOON
        return now - self._taken_at >= patience

    def _not_now(self, reason: str) -> bool:
        self._telemetry.skip(reason)
        return False

    def _look(
        self,
        source: Source,
        settings: AllocatorSettings,
        used: Sequence[int],
        latest: Callable[[int], AllocatorReading | None],
    ) -> None:
        modules = len(sys.modules)
        began = perf_counter()
        at = monotonic()
        limits: dict[int, Limits] = {}
        readings: dict[int, AllocatorReading] = {}

        def read() -> bool:
            for index in used:
                reading = readings[index] = source.read(index)
                limits[index] = Limits(
                    driver=source.driver_memory(index),
                    fraction=source.memory_fraction(index),
                    reserved=reading.reserved,
                    untouched=never_released(reading.statistics),
                )
            return True

        try:
            # a request that began meanwhile may be in the driver: a snapshot would wait for it with the
            # interpreter in hand
            alone = self._windows.while_none_open(read) and not self._windows.count
            if not alone:
                if not self._overdue(at, latest):
                    self._not_now("snapshot_busy")
                    return
                read()
            snapshot = self._captures.while_none(source.snapshot)
            if snapshot is None:  # one has begun since
                self._not_now("snapshot_capture")
                return
            self._settings = settings, settings_at(snapshot, settings)
            ownership = OWNERSHIP.changes
            maps = analyse(
                snapshot["segments"],
                self._settings[1],
                limits,
                live_pools=self._live_pools(),  # after it: what is alive now was so then
            )
            self._surveyed = {
                index: Surveyed(maps[index], at, readings[index], settings, ownership)
                for index in used
                if index in maps
            }
        finally:
            cost = perf_counter() - began
            self._telemetry.spent("snapshot", cost)
            self._taken_at = at
            self._cost = cost
            wait = cost / self._share
            # Of the stacks of the user's memory history torch makes text, and imports half of itself for the
            # first one: the next costs nothing like it.
            self._not_before = monotonic() + (wait if len(sys.modules) == modules else min(wait, OVERDUE))
