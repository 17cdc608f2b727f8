# SPDX-License-Identifier: Apache-2.0
"""Who reads when: one collection's picture of this process's memory, and counters that never fall."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import inf
from threading import get_ident
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, TypeVar

from ..telemetry import OwnTelemetry
from .pools import LIVING, OWNERSHIP, PoolWatch
from .reading import AllocatorReading, DriverMemory, HostReading, RawReading, external
from .recorder import Recorder
from .settings import AllocatorSettings
from .snapshot import DeviceMap
from .source import Device, Source, initialised_torch
from .state import DeviceState
from .survey import NoSnapshotError, Survey, Surveyed
from .windows import OpenWindows

COUNTERS = (
    "retries",
    "ooms",
    "oom_rejections",
    "device_allocations",
    "device_frees",
    "device_syncs",
    "allocations",
    "turnover",
)
"""The figures of a reading that only grow, until the user resets them."""


Readings = tuple[RawReading, ...]
_T = TypeVar("_T")

_NOBODY = -1
"""No thread's identity."""
_LAST_COLLECTION = 5.0
"""Seconds that a pause waits at most for a collection that is under way."""


class Collection(NamedTuple):
    """All that one collection knows of this process."""

    torch_version: str
    backend: str
    settings: AllocatorSettings
    devices: tuple[tuple[Device, DeviceState], ...]
    host: HostReading | None


class Sampler:
    """Takes the readings of a collection and of requests. Long-lived, one owner: the instrumentor."""

    def __init__(
        self,
        telemetry: OwnTelemetry,
        pools: PoolWatch,
        windows: OpenWindows,
        *,
        sampling: str = "auto",
        max_reading_age: float = 15.0,
        survey: Survey | None = None,
        totals: dict[int, Totals] | None = None,
    ) -> None:
        self._survey = survey
        self._telemetry = telemetry
        self._pools = pools
        self._windows = windows
        self._sampling = sampling
        self._max_age = max_reading_age
        self._source: Source | None = None
        self._totals: dict[int, Totals] = {} if totals is None else totals
        self.recorder = Recorder()
        self.last: dict[int, RawReading] = {}
        """The latest reading of each device, whoever took it."""
        self._external: dict[int, tuple[int | None, int]] = {}
        self._external_at: dict[int, float] = {}
        self._request_devices: tuple[list[int], list[int]] = [], []
        """Those with a context and those without, of one look: no thread may see halves of two."""
        self.only: tuple[int, Callable[[int], dict[str, Any]]] | None = None
        """The only device there is and the call that reads it, where nothing speaks against it."""
        pools.when_suspect = self._read_with_care
        self.look_again = -inf
        self._sole_reader: int | None = None
        self._thread = threading.local()
        """``serves`` on a thread that requests run on, as seen once a second."""
        self._reading_alone = threading.RLock()  # reentrant: a finalizer may end a request within a reading
        self._paused = False
        self._collecting: set[int] = set()
        """The threads that collect now."""

    def begin_anew(self) -> None:
        """In a forked child: the parent's locks may be held, and its readings are not this process's."""
        self._reading_alone = threading.RLock()
        self.last, self._external, self._external_at = {}, {}, {}
        self._request_devices, self.only = ([], []), None
        self.look_again, self._sole_reader = -inf, None
        self._paused, self._collecting = False, set()
        self._totals.clear()
        if self._survey is not None:
            self._survey.begin_anew()

    def source(self) -> Source | None:
        """The source, or None while this process has no CUDA of its own to read."""
        if self._source is not None:
            return self._source if self._source.is_alive() else None
        torch = initialised_torch()
        if torch is not None:
            self._source = Source(torch)
        return self._source

    def request_readings(self, at: float) -> Readings | None:
        """A reading, at ``monotonic``'s time now, of each device that may be in use, on a request's thread:
        elsewhere nothing is held, nor ever was. None where that cannot be said, because nobody may read now.

        Where there is an ``only``, and it is not yet time to ``look_again``, a probe does for itself what
        this would come to: two calls less on the path of every request.
        """
        if self._paused:
            return None
        source = self.source()
        if source is None:
            return ()
        if self._pools.suspect:
            with self._reading_alone:  # a second thread waits here, and not in the allocator
                return (
                    self._readings_of_those_used_now(source, monotonic()) if self._is_sole_reader() else None
                )
        devices, unused = self._request_devices
        if at > self.look_again or not devices or (unused and any(map(source.has_context, unused))):
            return self._readings_of_those_used_now(source, at)
        return tuple([self._request_reading(source, index) for index in devices])

    def _read_with_care(self) -> None:
        """Have the next request's reading look whether and what it may read."""
        self.only = None

    def _readings_of_those_used_now(self, source: Source, now: float) -> Readings:
        known, _ = self._request_devices
        self._request_devices = devices, unused = source.by_context()
        readings = tuple([self._request_reading(source, index) for index in devices])
        read = source.raw_statistics
        self.only = None if unused or len(devices) != 1 or read is None else (devices[0], read)
        if self._paused or self._pools.suspect:  # once it is set: of two threads the later one unsets it
            self.only = None
        if now > self.look_again or len(devices) > len(known):  # what follows is not for each request
            self._thread.serves = True
            self.look_again = now + 1.0
            used = source.used_devices()
            for reading in map(AllocatorReading._make, readings):
                if reading.device in used:
                    self.recorder.note(reading, self._external_at_times(source, reading))
        return readings

    def _request_reading(self, source: Source, index: int) -> RawReading:
        self.last[index] = reading = index, monotonic(), source.statistics(index)
        return reading

    def _external_at_times(self, source: Source, reading: AllocatorReading) -> int | None:
        """What others use on a device, when that is not known or too old: under requests without end no
        collection comes to ask for it."""
        if reading.at - self._external_at.get(reading.device, -inf) < self._max_age:
            return None
        return self._driver(source, reading.device, reading, source.holds_as_much)[0]

    def latest(self, device: int) -> AllocatorReading | None:
        """The latest reading of a device, whoever took it."""
        latest = self.last.get(device)
        return None if latest is None else AllocatorReading._make(latest)

    def take_over(
        self, device_map: DeviceMap, reading: AllocatorReading, settings: AllocatorSettings
    ) -> None:
        """A map of the default stream that somebody else has made, and the reading and the settings just
        before it."""
        if self._survey is not None:
            found = Surveyed(device_map, reading.at, reading, settings, OWNERSHIP.changes)
            self._survey.take_over(device_map.device, found)

    def failing_threads_source(self) -> Source | None:
        """The source, on a thread whose allocation has just failed; None where a reading could hang it."""
        source = self.source()
        if source is None or self._paused or (self._pools.suspect and not self._is_sole_reader()):
            return None
        return source

    @contextmanager
    def paused(self) -> Generator[None]:
        """Nobody reads while the block runs: a reading would wait for the allocator's lock with the
        interpreter in hand. A collection under way ends first. Requests read only while their window is open,
        so who enters this must then see that none is."""
        self._paused = True
        self._read_with_care()
        try:
            began = monotonic()
            while self._collecting - {get_ident()} and monotonic() - began < _LAST_COLLECTION:
                sleep(0.001)
            yield
        finally:
            self._paused = False

    def asked(self, take: Callable[[], _T]) -> _T:
        """What an act takes that needs a snapshot, for somebody who has asked this process for it.

        Raises:
            NoSnapshotError: there is none, or it may not be taken.
        """
        source, thread = self.source(), get_ident()
        if source is None or self._survey is None:
            raise NoSnapshotError("it uses no CUDA device")
        if self._pools.suspect and self._sampling != "always":
            raise NoSnapshotError(
                "a snapshot could hang it: it has a memory pool with an allocator of its own"
            )
        self._collecting.add(thread)
        try:
            if self._paused:
                raise NoSnapshotError("its guard is giving memory back")
            return self._survey.asked(source, take)
        finally:
            self._collecting.discard(thread)

    def collect(self, *, fresh: bool = False) -> Collection | None:
        """What is known of every used device, or None while there is nothing that may be read.

        ``fresh`` has a snapshot taken whatever the ones before have cost, where one may be taken at all.
        """
        thread = get_ident()
        self._collecting.add(thread)
        try:
            return self._collect(fresh)
        finally:
            self._collecting.discard(thread)

    def _collect(self, fresh: bool) -> Collection | None:
        source = self.source()
        if source is None:
            return None
        settings = source.settings()  # first: the readings after it know whether segments are expandable
        if source.raw_statistics is None:
            self._read_with_care()
        may_read = self._may_read()
        devices: list[tuple[Device, DeviceState]] = []
        surveyed: Mapping[int, Surveyed] = {}
        # looking for newly used devices reads them: not beside a request, which has looked itself
        looked = self._windows.while_none_open(source.used_devices) if may_read else None
        used = source.used_devices(look=False) if looked is None else looked
        if not used and self._pools.suspect:
            self._telemetry.skip("pluggable_pool")
        if self._survey is not None:
            serving = getattr(self._thread, "serves", False)
            of = self._survey.of
            surveyed = (
                self._attempt(
                    "the snapshot", of, source, settings, used, may_read, serving, fresh, self.latest
                )
                or surveyed
            )
            settings = self._survey.settings(settings)
        for index in used:
            name = source.device(index).name
            state = self._attempt(name, self._state, source, index, may_read, surveyed.get(index))
            if state is not None:
                devices.append((source.device(index), state))
        began = perf_counter()
        host = self._attempt("the host", source.host)
        self._telemetry.spent("device", perf_counter() - began)
        return Collection(source.version, source.backend, settings, tuple(devices), host)

    def _may_read(self) -> bool:
        """Whether a collection may read for itself at all. Beside a pool whose allocator may need the
        interpreter it would hang the process."""
        if self._paused:
            return False
        if self._sampling == "always":
            return True
        return self._sampling == "auto" and not self._pools.suspect

    def _is_sole_reader(self) -> bool:
        """Beside such a pool the thread that opens windows reads while there is only one: it cannot be inside
        the allocator at the same time. From a second one on nobody does."""
        if self._sampling == "always":
            return True
        if self._sole_reader is None:
            self._sole_reader = get_ident()
        if self._sole_reader == get_ident():
            return True
        self._sole_reader = _NOBODY
        self._telemetry.skip("pluggable_pool")
        return False

    def _state(self, source: Source, index: int, may_read: bool, surveyed: Surveyed | None) -> DeviceState:
        if self._pools.suspect and not may_read:
            self._telemetry.skip("pluggable_pool")
        latest = self.latest(index)
        if latest is not None and self._serves(latest, may_read):
            used_elsewhere, limit = self._external.get(index) or (None, self._limit(source, index))
            return self._device_state(latest, limit, used_elsewhere, surveyed)
        if not may_read:
            if not self._pools.suspect:
                self._telemetry.skip("sampling")
            nothing = AllocatorReading(index, monotonic(), {})
            return self._device_state(nothing, self._limit(source, index), None, surveyed)
        began = perf_counter()
        reading = self._read(source, index)
        if reading is None:  # a request has begun meanwhile: what it read serves
            return self._state(source, index, may_read, surveyed)
        self.last[index] = reading
        self._telemetry.spent("stats", perf_counter() - began)
        used_elsewhere, limit = self._driver(source, index, reading, lambda read: self._still(source, read))
        self.recorder.note(reading, used_elsewhere)
        return self._device_state(reading, limit, used_elsewhere, surveyed)

    def _read(self, source: Source, index: int) -> AllocatorReading | None:
        """A collection's own reading; None if a request has begun meanwhile, whose reading serves."""
        if self._sampling == "always":
            return source.read(index)
        reading = self._windows.while_none_open(lambda: source.read(index))
        if reading is None:
            latest = self.latest(index)
            if latest is None or not self._serves(latest, may_read=True):
                return source.read(index)
        return reading

    def _serves(self, latest: AllocatorReading, may_read: bool) -> bool:
        """Whether a request's reading serves a collection.

        While requests are in flight it must, unless it is too old: a reading of one's own would wait for
        the allocator with the interpreter in hand whenever a request is inside the driver.
        """
        if self._sampling == "always":
            return False
        return monotonic() - latest.at <= self._max_age and (self._windows.count > 0 or not may_read)

    def _still(self, source: Source, reading: AllocatorReading) -> bool:
        """Whether as much is held as a collection has read; no if that cannot be asked beside a request."""
        if self._sampling == "always":
            return source.holds_as_much(reading)
        return bool(self._windows.while_none_open(lambda: source.holds_as_much(reading)))

    def _driver(
        self,
        source: Source,
        index: int,
        reading: AllocatorReading,
        still: Callable[[AllocatorReading], bool],
    ) -> tuple[int | None, int | None]:
        """What others use on the device, and its limit, from the driver right after a reading. Where it looks
        otherwise than before the reading must ``still`` hold; else what was known of the others stands.

        Kept for the collections that a request's reading serves: from a reading and a driver's figure of
        different times, what the allocator won in between would look like somebody else's.
        """
        driver = self._driver_memory(source, index)
        if driver is None:
            self._external.pop(index, None)
            return None, None
        before, _ = self._external.get(index, (None, None))
        used = external(reading, driver)
        if used != before and not still(reading):
            return before, driver.total
        self._external_at[index] = reading.at
        self._external[index] = used, driver.total
        return used, driver.total

    def _limit(self, source: Source, index: int) -> int | None:
        driver = self._driver_memory(source, index)
        return None if driver is None else driver.total

    def _driver_memory(self, source: Source, index: int) -> DriverMemory | None:
        """What the driver tells of a device. Where it fails the allocator's own figures stand without it."""
        began = perf_counter()
        try:
            return self._attempt(f"what the driver knows of cuda:{index}", source.driver_memory, index)
        finally:
            self._telemetry.spent("device", perf_counter() - began)

    def _device_state(
        self,
        reading: AllocatorReading,
        limit: int | None,
        used_elsewhere: int | None,
        surveyed: Surveyed | None,
    ) -> DeviceState:
        totals = self._totals.setdefault(reading.device, Totals())
        return DeviceState(
            reading=reading,
            age=max(0.0, monotonic() - reading.at),
            totals=totals.of(reading),
            limit=limit,
            external=used_elsewhere,
            map=None if surveyed is None else surveyed.map,
            map_age=None if surveyed is None else max(0.0, monotonic() - surveyed.at),
            map_is_current=surveyed is not None and surveyed.is_of(reading),
            private_pools=bool(LIVING),
            hidden=0 if surveyed is None else surveyed.hidden(reading, bool(LIVING)),
            cut_up=0 if surveyed is None else surveyed.cut_up(reading),
        )

    def _attempt(self, what: str, part: Callable[..., Any], *arguments: Any) -> Any:
        """A part of a collection that raises is absent from it, told once and counted."""
        try:
            return part(*arguments)
        except Exception as error:  # a broken CUDA context raises anything, at every call
            self._telemetry.skip("error")
            self._telemetry.say_once(
                f"collect {what} {type(error).__name__}", "torchmem: %s is left out: %r", what, error
            )
            return None


class Totals:
    """The counters of one device, monotonic through the user's ``reset_accumulated_memory_stats``.

    What happened between the last reading and a reset is lost; nothing is counted twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._as_of = -inf
        self._base: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._live_at_reset: tuple[int, ...] = ()
        self._totals: Mapping[str, int] = {}

    def of(self, reading: AllocatorReading) -> Mapping[str, int]:
        """The totals up to a reading, or up to the last one fed where this one is not surely newer."""
        with self._lock:
            if reading.at < self._as_of:
                return self._totals
            figures = {name: figure for name in COUNTERS if (figure := getattr(reading, name)) is not None}
            if not figures:
                return figures
            live_at_reset = _live_at_reset(reading)
            if live_at_reset != self._live_at_reset or any(
                figure < self._last.get(name, 0) for name, figure in figures.items()
            ):
                for name, last in self._last.items():
                    self._base[name] = self._base.get(name, 0) + last
            self._last, self._live_at_reset = figures, live_at_reset
            self._totals = {name: self._base.get(name, 0) + figure for name, figure in figures.items()}
            self._as_of = monotonic()
            return self._totals


def _live_at_reset(reading: AllocatorReading) -> tuple[int, ...]:
    """What was live at the last reset: current - (allocated - freed). All zero until the first.

    It tells a reset even after more has happened since than before it.
    """
    return tuple(
        whole["current"] - whole["allocated"] + whole["freed"]
        for family in ("allocated_bytes", "reserved_bytes")
        if "freed" in (whole := reading.statistics.get(family, {}).get("all", {}))
    )
