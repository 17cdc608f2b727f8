# SPDX-License-Identifier: Apache-2.0
"""The board: which processes report, their devices, the latest figures and a short history.

Pure state fed with OTLP metric messages, from any number of threads. It knows nothing of transports and
screens. A figure that was not sent is ``None``, never 0.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, NumberDataPoint, ResourceMetrics

STATES = ("allocated", "pending_free", "split_free", "cached_free", "cached", "external", "free")
"""The ledger's states, in the order in which a bar shows them."""

MAX_PROCESSES = 64
"""Processes kept unless the caller says otherwise."""
MAX_DEVICES = 64
"""Devices kept for one process; further ones are ignored."""
MAX_SAMPLES = 300
"""Samples of reserved memory kept for one device."""
HISTORY_SECONDS = 600.0
"""How far back the history shown reaches."""
RECENT_SECONDS = 60.0
"""What "recent" means for retries and out-of-memory errors."""
DEFAULT_INTERVAL = 60.0
"""Seconds between exports of a process seen only once: the SDK's default."""
GONE_AFTER = 15.0
"""A process is never called gone before so many seconds of silence; else after three of its intervals."""
FORGET_AFTER = 300.0
"""Seconds for which a process that is gone stays on the board."""

_USAGE = "torch.memory.usage"
_LEVELS = {
    _USAGE: "ledger",
    "torch.memory.limit": "limit",
    "torch.memory.reserved": "reserved",
    "torch.memory.allocated": "allocated",
    "torch.memory.fragmentation": "fragmentation",
    "torch.memory.slack": "slack",
    "torch.memory.headroom": "headroom",
    "torch.memory.reading.age": "reading_age",
}
_COUNTERS = {
    "torch.memory.allocation.retries": "retries",
    "torch.memory.ooms": "ooms",
    "torch.memory.device.allocations": "device_allocations",
}
METRICS = (*_LEVELS, *_COUNTERS)
"""The metrics the board reads; all others are ignored."""

_SECOND = 1_000_000_000
# Points of one collection carry one time in Python's SDK and times microseconds apart in others.
_SAME_CYCLE = _SECOND // 5
# An older point is late or repeated, unless older by more than this: then the sender's clock was set back.
_LATE = 300 * _SECOND
# A process keeps its place until it has missed an export; see Board._admit.
_MISSED = 1.5
_TURNED_AWAY_KEPT = 4096
_TEXT_KEPT = 120
# Bytes; no device has more, and sums of such figures stay finite.
_MOST = 2.0**63

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Count:
    """A counter as it stands."""

    total: float
    """What the sender counted, carried on over resets; with delta temporality, what came since."""
    rate: float | None
    """Per second over the last interval; ``None`` until two points have come (one, if it is a delta)."""
    recent: float
    """The increase seen within the last ``RECENT_SECONDS``."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device of one process. Sizes in bytes, shares between 0 and 1, ages in seconds."""

    name: str
    hw_id: str | None
    ledger: Mapping[str, float]
    """Bytes by state, in the order of ``STATES``; only the states that were sent."""
    limit: float | None
    reserved: float | None
    allocated: float | None
    fragmentation: float | None
    slack: float | None
    headroom: float | None
    reading_age: float | None
    retries: Count | None
    ooms: Count | None
    device_allocations: Count | None
    history: tuple[tuple[float, float], ...]
    """(seconds on the sender's clock, bytes reserved), oldest first, at most ``HISTORY_SECONDS`` long."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process as it stands now."""

    service: str
    pid: int | None
    instance: str | None
    silent: float
    """Seconds since its last memory point arrived."""
    interval: float | None
    """Seconds between its exports, once two have come."""
    gone: bool
    devices: tuple[DeviceView, ...]


@dataclass(frozen=True, slots=True)
class BoardView:
    """Everything a screen needs, as of one moment."""

    processes: tuple[ProcessView, ...]
    """Ordered by service and process id, those that are gone last."""
    exports: int
    """Metric exports received."""
    strangers: int
    """Resources received that carried none of ``METRICS``."""
    stranger: str | None
    """The service name of the last of them."""
    dropped: int
    """Processes dropped or turned away because the board was full."""


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """What one device went through while it was watched. Sizes in bytes."""

    device: str
    hw_id: str | None
    points: int
    reserved_first: float | None
    reserved_last: float | None
    reserved_max: float | None
    fragmentation_max: float | None
    retries: float | None
    ooms: float | None


@dataclass(frozen=True, slots=True)
class ProcessSummary:
    """What one process went through while it was watched."""

    service: str
    pid: int | None
    instance: str | None
    devices: tuple[DeviceSummary, ...]


def _is_late(time_: int, last: int) -> bool:
    return last - _LATE < time_ < last


@dataclass(slots=True)
class _Level:
    """The latest points of one metric: by state, by pool, or one without either (part ``""``)."""

    time: int = 0
    cycle: int = 0
    parts: dict[str, float] = field(default_factory=dict[str, float])

    def put(self, part: str, value: float | None, time_: int, cycle: int) -> None:
        if _is_late(time_, self.time - _SAME_CYCLE):
            return
        if abs(time_ - self.time) > _SAME_CYCLE:
            # A new collection replaces the whole: a state that is not observed again must disappear.
            self.parts.clear()
            self.time = time_
        self.cycle = cycle
        if value is None:
            self.parts.pop(part, None)
        else:
            self.parts[part] = value

    def total(self) -> float | None:
        pools = [value for part, value in self.parts.items() if part]
        return sum(pools) if pools else self.parts.get("")


@dataclass(slots=True)
class _Counter:
    """One monotonic counter, from either temporality, across resets."""

    total: float = 0
    rate: float | None = None
    cycle: int = 0
    start: int = 0
    time: int = 0
    value: float | None = None
    rises: deque[tuple[int, float]] = field(default_factory=lambda: deque[tuple[int, float]](maxlen=600))

    def put(self, value: float, start: int, time_: int, cycle: int, *, delta: bool) -> None:
        if value < 0 or time_ == self.time or _is_late(time_, self.time):
            return  # a negative count is nonsense; a repeated delta must not count twice
        if time_ < self.time:
            self.time = 0  # the sender's clock was set back: nothing to take a rate from
            self.rises.clear()
        if delta:
            increase, since = value, start or self.time
        elif self.value is None:
            increase, since = None, 0
        elif value < self.value or 0 < self.start < start:
            increase, since = value, max(start, self.time)
        else:
            increase, since = value - self.value, self.time
        self.total += value if increase is None else increase
        self.rate = None
        if increase is not None and 0 < since < time_:
            self.rate = increase * _SECOND / (time_ - since)
        if increase:
            self.rises.append((time_, increase))
        if not delta:
            self.value = value
        self.start, self.time, self.cycle = start, time_, cycle

    def view(self) -> Count:
        horizon = self.time - RECENT_SECONDS * _SECOND
        return Count(self.total, self.rate, sum(increase for at, increase in self.rises if at > horizon))


@dataclass(slots=True)
class _Device:
    name: str
    hw_id: str | None = None
    cycle: int = 0
    points: int = 0
    levels: dict[str, _Level] = field(default_factory=lambda: {name: _Level() for name in _LEVELS.values()})
    counters: dict[str, _Counter] = field(default_factory=dict[str, _Counter])
    history: deque[tuple[int, float]] = field(
        default_factory=lambda: deque[tuple[int, float]](maxlen=MAX_SAMPLES)
    )
    reserved_first: float | None = None
    reserved_max: float | None = None
    fragmentation_max: float | None = None

    def sample(self) -> None:
        """Takes the message just read into the history and the extremes."""
        level = self.levels["reserved"]
        reserved = level.total()
        if reserved is not None:
            if self.history and level.time < self.history[-1][0]:
                self.history.clear()
            if self.history and level.time - self.history[-1][0] <= _SAME_CYCLE:
                self.history.pop()
            self.history.append((level.time, reserved))
            if self.reserved_first is None:
                self.reserved_first = reserved
            self.reserved_max = max(reserved, self.reserved_max or 0)
        fragmentation = self.levels["fragmentation"].total()
        if fragmentation is not None:
            self.fragmentation_max = max(fragmentation, self.fragmentation_max or 0)

    def view(self, cycle: int) -> DeviceView:
        """The device as of its process's collection number ``cycle``.

        One collection of grace: a sender may split a collection over several requests.
        """

        def parts(name: str) -> Mapping[str, float]:
            level = self.levels[name]
            return level.parts if level.cycle >= cycle - 1 else {}

        def level(name: str) -> float | None:
            return self.levels[name].total() if self.levels[name].cycle >= cycle - 1 else None

        def count(name: str) -> Count | None:
            counter = self.counters.get(name)
            return counter.view() if counter is not None and counter.cycle >= cycle - 1 else None

        ledger = parts("ledger")
        horizon = self.history[-1][0] - HISTORY_SECONDS * _SECOND if self.history else 0
        return DeviceView(
            name=self.name,
            hw_id=self.hw_id,
            ledger={state: ledger[state] for state in STATES if state in ledger},
            limit=level("limit"),
            reserved=level("reserved"),
            allocated=level("allocated"),
            fragmentation=level("fragmentation"),
            slack=level("slack"),
            headroom=level("headroom"),
            reading_age=level("reading_age"),
            retries=count("retries"),
            ooms=count("ooms"),
            device_allocations=count("device_allocations"),
            history=tuple((at / _SECOND, reserved) for at, reserved in self.history if at >= horizon),
        )

    def summary(self) -> DeviceSummary:
        def total(name: str) -> float | None:
            counter = self.counters.get(name)
            return None if counter is None else counter.total

        return DeviceSummary(
            device=self.name,
            hw_id=self.hw_id,
            points=self.points,
            reserved_first=self.reserved_first,
            reserved_last=self.history[-1][1] if self.history else None,
            reserved_max=self.reserved_max,
            fragmentation_max=self.fragmentation_max,
            retries=total("retries"),
            ooms=total("ooms"),
        )


@dataclass(slots=True)
class _Process:
    service: str
    instance: str | None
    pid: int | None
    seen: float
    time: int = 0
    cycle: int = 0
    gaps: deque[float] = field(default_factory=lambda: deque[float](maxlen=5))
    devices: dict[str, _Device] = field(default_factory=dict[str, _Device])

    def interval(self) -> float | None:
        # The median: one flush at shutdown or one outage says nothing of the rhythm.
        return statistics.median(self.gaps) if self.gaps else None

    def patience(self) -> float:
        return max(GONE_AFTER, 3 * (self.interval() or DEFAULT_INTERVAL))

    def overdue(self, now: float) -> float:
        return (now - self.seen) / (self.interval() or DEFAULT_INTERVAL)

    def tick(self, time_: int) -> None:
        """Notes the time of a point; one clearly later than the last collection opens a new one."""
        if time_ > self.time + _SAME_CYCLE:
            if self.time:
                self.gaps.append((time_ - self.time) / _SECOND)
            self.time, self.cycle = time_, self.cycle + 1
        elif time_ <= self.time - _LATE:
            self.time, self.cycle = time_, self.cycle + 1

    def device(self, name: str) -> _Device | None:
        device = self.devices.get(name)
        if device is None and len(self.devices) < MAX_DEVICES:
            device = self.devices[name] = _Device(name)
        return device

    def view(self, now: float) -> ProcessView:
        silent = now - self.seen
        return ProcessView(
            service=self.service,
            pid=self.pid,
            instance=self.instance,
            silent=silent,
            interval=self.interval(),
            gone=silent > self.patience(),
            devices=tuple(
                device.view(self.cycle)
                for _, device in sorted(self.devices.items(), key=lambda item: _natural(item[0]))
                if device.cycle >= self.cycle - 1
            ),
        )

    def summary(self) -> ProcessSummary:
        return ProcessSummary(
            service=self.service,
            pid=self.pid,
            instance=self.instance,
            devices=tuple(device.summary() for device in self.devices.values()),
        )


class Board:
    """The processes that report, at most ``max_processes`` of them.

    When the board is full, a new process takes the place of the one most overdue. Processes that still
    report keep their places, and the new one is turned away: with more senders than places they would
    otherwise throw each other off at every export, and nobody would have a rate or a history. Both kinds
    count as dropped.

    Args:
        max_processes: how many processes are kept.
        clock: seconds, monotonic; decides only who is silent. All else goes by the senders' times.
    """

    def __init__(
        self, *, max_processes: int = MAX_PROCESSES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_processes = max_processes
        self._clock = clock
        self._lock = threading.Lock()
        self._processes: dict[_Key, _Process] = {}
        self._ended: deque[ProcessSummary] = deque(maxlen=max_processes)
        self._turned_away: set[_Key] = set()
        self._dropped = 0
        self._exports = 0
        self._strangers = 0
        self._stranger: str | None = None

    def receive(self, request: ExportMetricsServiceRequest, peer: str = "") -> None:
        """Takes one export in. Unknown metrics, attributes and kinds of points are passed over.

        ``peer``, the sender's address, tells apart those that say neither ``service.instance.id`` nor
        ``process.pid``: older SDKs say neither by themselves.
        """
        with self._lock:
            now = self._clock()
            self._forget(now)
            self._exports += 1
            for resource_metrics in request.resource_metrics:
                self._take(resource_metrics, now, peer)

    def view(self) -> BoardView:
        """The board as it stands now; later exports do not change it."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            processes = [process.view(now) for process in self._processes.values()]
            return BoardView(
                processes=tuple(
                    sorted(processes, key=lambda p: (p.gone, p.service, p.pid or 0, p.instance or ""))
                ),
                exports=self._exports,
                strangers=self._strangers,
                stranger=self._stranger,
                dropped=self._dropped + len(self._turned_away),
            )

    def summary(self) -> tuple[ProcessSummary, ...]:
        """What each process went through, those that left the board first."""
        with self._lock:
            return (*self._ended, *(process.summary() for process in self._processes.values()))

    def _take(self, resource_metrics: ResourceMetrics, now: float, peer: str) -> None:
        resource = _texts(resource_metrics.resource.attributes)
        service = resource.get("service.name", "unknown_service")
        instance = resource.get("service.instance.id")
        pid = resource.get("process.pid", "")
        key = (service, instance or f"{resource.get('host.name', '')}/{pid or peer}")
        process: _Process | None = None
        touched: dict[str, _Device] = {}
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                if metric.name not in _LEVELS and metric.name not in _COUNTERS:
                    continue
                for point, delta in _points(metric):
                    attributes = _texts(point.attributes)
                    name = attributes.get("torch.device")
                    if name is None:
                        continue
                    if process is None:
                        process = self._admit(key, now)
                        if process is None:
                            return
                        process.pid = int(pid) if pid.isdecimal() else None
                        process.instance = instance
                        process.seen = now
                    device = process.device(name)
                    if device is None:
                        continue
                    touched[name] = device
                    time_ = point.time_unix_nano or int(now * _SECOND)
                    process.tick(time_)
                    device.cycle = process.cycle
                    device.points += 1
                    device.hw_id = attributes.get("hw.id", device.hw_id)
                    _put(device, metric.name, attributes, point, time_, delta=delta)
        for device in touched.values():
            device.sample()
        if process is None:
            self._strangers += 1
            self._stranger = service

    def _admit(self, key: _Key, now: float) -> _Process | None:
        process = self._processes.get(key)
        if process is not None:
            return process
        if len(self._processes) >= self._max_processes:
            worst = max(self._processes, key=lambda other: self._processes[other].overdue(now))
            if self._processes[worst].overdue(now) <= _MISSED:
                if len(self._turned_away) < _TURNED_AWAY_KEPT:
                    self._turned_away.add(key)
                return None
            self._ended.append(self._processes.pop(worst).summary())
            self._dropped += 1
        self._turned_away.discard(key)
        process = self._processes[key] = _Process(key[0], None, None, now)
        return process

    def _forget(self, now: float) -> None:
        for key, process in list(self._processes.items()):
            if now - process.seen > process.patience() + FORGET_AFTER:
                self._ended.append(process.summary())
                del self._processes[key]


def _points(metric: Metric) -> Iterable[tuple[NumberDataPoint, bool]]:
    """The number points of a metric, each with whether it is a delta."""
    kind = metric.WhichOneof("data")
    if kind == "gauge":
        return [(point, False) for point in metric.gauge.data_points]
    if kind == "sum":
        delta = metric.sum.aggregation_temporality == 1  # AGGREGATION_TEMPORALITY_DELTA
        return [(point, delta) for point in metric.sum.data_points]
    return []


def _put(
    device: _Device,
    metric: str,
    attributes: Mapping[str, str],
    point: NumberDataPoint,
    time_: int,
    *,
    delta: bool,
) -> None:
    value = _number(point)
    counter_name = _COUNTERS.get(metric)
    if counter_name is not None:
        if value is not None:
            counter = device.counters.setdefault(counter_name, _Counter())
            counter.put(value, point.start_time_unix_nano, time_, device.cycle, delta=delta)
        return
    if delta:
        return  # a level sent as changes: where it began is not known
    part = attributes.get("torch.memory.state" if metric == _USAGE else "torch.memory.pool", "")
    if metric == _USAGE and part not in STATES:
        return
    if part and metric != _USAGE and part not in ("small", "large"):
        return
    device.levels[_LEVELS[metric]].put(part, value, time_, device.cycle)


def _number(point: NumberDataPoint) -> float | None:
    if point.flags & 1:  # DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
        return None
    kind = point.WhichOneof("value")
    if kind == "as_int":
        return point.as_int
    if kind == "as_double" and abs(point.as_double) <= _MOST:  # neither NaN nor infinite is
        return point.as_double
    return None


def _texts(attributes: Iterable[KeyValue]) -> dict[str, str]:
    """Text and whole-number attributes, made safe to print: short, without control characters."""
    texts: dict[str, str] = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        if kind == "string_value":
            text = attribute.value.string_value[:_TEXT_KEPT]
            texts[attribute.key] = "".join(letter if letter.isprintable() else "?" for letter in text)
        elif kind == "int_value":
            texts[attribute.key] = str(attribute.value.int_value)
    return texts


def _natural(device: str) -> tuple[str, int, str]:
    """Orders cuda:2 before cuda:10."""
    kind, _, index = device.partition(":")
    return (kind, int(index), "") if index.isdecimal() else (kind, -1, index)
