# SPDX-License-Identifier: Apache-2.0
"""The evidence of an out of memory error: taken on the failing thread, told as an event, a log record and a
counter.

Knows the allocator's room and the table. The user's exception stays as it is: nothing of ours raises into it.
What a signal handler of theirs raises meanwhile, as timeouts do, takes its place: kept back it would be lost.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, time_ns
from typing import Any, NamedTuple, TypeVar

from opentelemetry import trace
from opentelemetry._logs import Logger, LoggerProvider, SeverityNumber, get_logger
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span

from . import signals
from .allocator.captures import CaptureWatch
from .allocator.dump import DumpDirectory, NotWrittenError, as_torch_writes_it
from .allocator.reading import POOLS, AllocatorReading, DriverMemory, external
from .allocator.recorder import Brief, in_brief, thinned
from .allocator.rules import LARGE, Rules
from .allocator.sampler import Sampler
from .allocator.settings import AllocatorSettings, settings_at
from .allocator.snapshot import DEFAULT_POOL, DeviceMap, Limits, PoolId, PoolOn, analyse
from .allocator.source import NATIVE, Device, Source, attach_oom_observer, initialised_torch, when_initialised
from .allocator.state import DeviceState
from .allocator.verdict import (
    REFUSED,
    VERDICTS,
    Failure,
    FreeBlocks,
    free_blocks,
    kind_of,
    usable_below,
    verdict,
)
from .interrupted import is_a_signal_handlers
from .package import NAME
from .telemetry import OwnTelemetry
from .version import __version__

INTERVAL = 10.0
"""Seconds between two that are examined on a device, at least; those between are counted."""
SHARE = 0.01
"""Of one core's time that examining a device takes, at most: after a costly one the next is later."""
READINGS, LOOK_BACK = 16, 300.0
"""How many of the readings before an error are told, and of how many seconds."""
TENTH = 10
"""Of the device: if others hold less than that, it is not worth a word."""
TRIES = 3
"""To read the allocator and ask the driver while what is held stays the same."""
REQUESTS = 16
"""How many of the requests in flight are told, those first that grew most."""

Attributes = dict[str, Any]
T = TypeVar("T")
DEFAULT_STREAM = 0
"""As a snapshot's segments name it."""
_ASKED = re.compile(r"(?:Requested size:|Tried to allocate) (\d{1,9}(?:\.\d{1,9})? (?:bytes|[KMGT]iB))\b")
_NO_POOL: PoolId = (-1, -1)
"""One that holds nothing."""


class InFlight(NamedTuple):
    """A request that was open when memory ran out: never what it was about."""

    operation: str
    age: float
    """Seconds."""
    reserved_growth: int | None
    """Bytes held from the driver on that device, against when it began: after the allocator's own flush."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was known of one out of memory error. Bytes; None where it cannot be known."""

    device: Device
    failure: Failure | None
    """None for a request that was refused early: what it asked for is not told."""
    verdict: str
    at: float
    """Monotonic seconds."""
    state: DeviceState | None = None
    map: DeviceMap | None = None
    recent: Sequence[Brief] = ()
    """Readings from before the allocator's flush, the oldest first."""
    requests: Sequence[InFlight] = ()
    settings: AllocatorSettings | None = None
    capturing: bool | None = None
    unflushed: bool = False
    """For sure: the allocator has given nothing back before it failed."""
    in_default_pool: bool = True
    """Whether the request was in that, as what headroom tells of is."""
    more: int = 0
    """Others on the device since the last one that was examined."""
    dump: str | None = None
    said: str | None = None
    """What the exception says was asked for, where no observer told."""

    @property
    def allowed(self) -> int | None:
        """Of a request that was refused early, what the process may hold."""
        limits = None if self.map is None else self.map.limits
        if limits is None or limits.driver is None or limits.fraction is None:
            return None
        return int(limits.fraction * limits.driver.total)

    @property
    def summary(self) -> str:
        """The verdict in words, with its figures."""
        failure = self.failure
        if failure is None:
            asked = "" if self.said is None else f"{self.said} asked for. "
            return (
                f"{self.device.name} is out of memory: {asked}{VERDICTS[self.verdict]}{self._when_it_ended}"
            )
        said = (
            f"{self.device.name} is out of memory: {_size(failure.asked)} asked of the driver, "
            f"{_size(failure.free)} free"
        )
        if failure.total is not None:
            said += f" of {_size(failure.total)}"
        said += f". {VERDICTS[self.verdict].rstrip('.')}{_figures(self.verdict, failure)}."
        if failure.pending_before and failure.may_fit and failure.blocks is not None:
            most = _size(failure.blocks.largest)
            said += (
                f" {_size(failure.pending_before)} were pending before: a request of up to {most} fits now."
            )
        if self.capturing and self.unflushed:
            said += " A graph was being captured: the allocator could not flush its cache"
            kept = None if self.map is None else self.map.releasable
            said += f", {_size(kept.least)}." if kept is not None and kept.least else "."
        if self.more:
            said += f" {self.more} more since the last one that was examined."
        return said

    @property
    def _when_it_ended(self) -> str:
        """A request that was refused early is looked at when it has ended."""
        reading = None if self.state is None else self.state.reading
        if reading is None or reading.reserved is None or reading.cached is None:
            return ""
        held = f" Now {_size(reading.reserved)} are held, {_size(reading.cached)} of them in no use"
        return f"{held}." if self.allowed is None else f"{held}; {_size(self.allowed)} are allowed."

    def attributes(self) -> Attributes:
        """The event's attributes; what is not known is left out."""
        told: Attributes = {
            signals.DEVICE.name: self.device.name,
            signals.HARDWARE_ID.name: self.device.hardware_id,
            signals.OOM_VERDICT.name: self.verdict,
            signals.OOM_SUMMARY.name: self.summary,
            signals.OOM_CAPTURING.name: self.capturing,
            signals.OOM_MORE.name: self.more or None,
            signals.OOM_DUMP.name: self.dump,
        }
        failure = self.failure
        if failure is not None:
            told[signals.OOM_ASKED.name] = failure.asked
            told[signals.OOM_DEVICE_FREE.name] = failure.free
            told[signals.OOM_DEVICE_TOTAL.name] = failure.total
            told[signals.OOM_RESERVED.name] = failure.reserved
            told[signals.OOM_PENDING_BEFORE.name] = failure.pending_before or None
            if failure.allowed != failure.total:
                told[signals.OOM_ALLOWED.name] = failure.allowed
            if failure.external is not None and failure.baseline is not None:
                told[signals.OOM_EXTERNAL_GROWTH.name] = max(0, failure.external - failure.baseline)
            if failure.blocks is not None:
                told[signals.OOM_OWN_FREE.name] = failure.blocks.own
                told[signals.OOM_OWN_LARGEST.name] = failure.blocks.largest
                told[signals.OOM_OTHER_STREAMS.name] = failure.blocks.other_streams
                told[signals.OOM_PRIVATE_POOLS.name] = failure.blocks.private_pools
        elif self.state is not None and self.allowed != self.state.limit:
            told[signals.OOM_ALLOWED.name] = self.allowed
        if self.map is not None:
            # it counts on a flush, too
            if self.map.headroom is not None and self.in_default_pool and not self.unflushed:
                told[signals.OOM_HEADROOM.name] = self.map.headroom.least
            told[signals.OOM_FRAGMENTATION.name] = self.map.fragmentation
        ledger = None if self.state is None else self.state.ledger
        if ledger is not None and self.state is not None:
            if failure is None:
                told[signals.OOM_DEVICE_FREE.name] = ledger["free"]
                told[signals.OOM_DEVICE_TOTAL.name] = self.state.limit
                told[signals.OOM_RESERVED.name] = self.state.reading.reserved
            told[signals.OOM_LEDGER.name] = [f"{state}={size}" for state, size in ledger.items()]
        if self.recent:
            told[signals.OOM_READINGS.name] = [_reading_line(brief, self.at) for brief in self.recent]
        if self.requests:
            told[signals.OOM_IN_FLIGHT.name] = len(self.requests)
            told[signals.OOM_REQUESTS.name] = [_request_line(request) for request in self.requests[:REQUESTS]]
        if self.settings is not None and self.settings.text:
            told[signals.OOM_SETTINGS.name] = self.settings.text
        return {name: value for name, value in told.items() if value is not None}


def _figures(verdict: str, failure: Failure) -> str:
    blocks = failure.blocks
    if verdict == "fraction" and failure.allowed is not None:
        return f" ({_size(failure.reserved or 0)} held, {_size(failure.allowed)} allowed)"
    if blocks is None:
        return ""
    if verdict == "pending_frees" and blocks.pending > blocks.largest:
        return f" (the largest free block will be {_size(blocks.pending)})"
    if verdict in ("pending_frees", "changed_meanwhile"):
        return f" (the largest free block is {_size(blocks.largest)} now)"
    if verdict == "private_pools":
        shared = f", and {_size(blocks.default_pool)} in the default pool" if blocks.default_pool else ""
        return f" ({_size(blocks.private_pools)}{shared})"
    if verdict == "another_stream":
        return f" ({_size(blocks.largest_elsewhere)})"
    if verdict == "fragmented":
        held = blocks.own + blocks.other_streams + blocks.elsewhere
        return f" ({_size(held)} held and free, the largest block of use {_size(blocks.largest)})"
    if verdict == "outside_pytorch" and failure.external is not None and failure.baseline is not None:
        return f" ({_size(failure.external - failure.baseline)} more than at the least seen)"
    if verdict == "full" and failure.external and failure.external * TENTH >= (failure.total or 0):
        return f" (others hold {_size(failure.external)} of the device)"
    return ""


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _reading_line(brief: Brief, at: float) -> str:
    told = {
        "age": f"{at - brief.at:.1f}",
        "allocated": brief.allocated,
        "pending_free": brief.pending_free,
        "reserved": brief.reserved,
        "retries": brief.retries,
        "external": brief.external,
    }
    return " ".join(f"{name}={value}" for name, value in told.items() if value is not None)


def _request_line(request: InFlight) -> str:
    growth = "" if request.reserved_growth is None else f" reserved_growth={request.reserved_growth}"
    return f"operation={request.operation} age={request.age:.3f}{growth}"


def _said(error: BaseException | None) -> str | None:
    """What an exception of torch's says was asked for: ``500.00 MiB``."""
    found = None if error is None else _ASKED.search(str(error))
    return None if found is None else found[1]


def _none_yet() -> dict[str, int]:
    return {found: 0 for found in VERDICTS if found != REFUSED}


def _none_in_force(_: int) -> PoolId | None:
    return None


class _Storm:
    """What was seen on one device."""

    __slots__ = ("examined_at", "last_verdict", "more", "not_before")

    def __init__(self) -> None:
        self.not_before = 0.0
        self.more = 0
        self.examined_at = 0.0
        self.last_verdict: str | None = None
        """None while it is being examined."""


class Verdicts:
    """The errors by device and verdict, whichever watch saw them: what was exported must not fall."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """As if there had been none; in a forked child the parent's lock may be held."""
        # reentrant: a signal handler may run out of memory in the middle of one
        self._lock = threading.RLock()
        self._counts: dict[int, dict[str, int]] = {}

    def add(self, device: int, verdict: str) -> None:
        """Count an error."""
        with self._lock:
            self._counts.setdefault(device, _none_yet())[verdict] += 1

    def of(self, device: int) -> Mapping[str, int]:
        """Those on a device so far."""
        with self._lock:
            return dict(self._counts.get(device) or _none_yet())


class OomWatch:
    """Sees each out of memory error of this process, from one ``instrument()`` to its ``uninstrument()``."""

    def __init__(
        self,
        sampler: Sampler,
        telemetry: OwnTelemetry,
        captures: CaptureWatch,
        tell: Callable[[str, Attributes, Context | None], None],
        dumps: DumpDirectory | None = None,
        dumps_option: str = "oom_dump_dir",
        in_flight: Callable[[], Sequence[tuple[str, float, Sequence[AllocatorReading]]]] = list,
        live_pools: Callable[[], Collection[PoolOn]] = tuple,
        pool_in_force: Callable[[int], PoolId | None] = _none_in_force,
        verdicts: Verdicts | None = None,
    ) -> None:
        self._pool_in_force = pool_in_force
        self._sampler = sampler
        self._requests = in_flight
        self._live_pools = live_pools
        self._telemetry = telemetry
        self._captures = captures
        self._tell = tell
        self._dumps = dumps
        self._verdicts = Verdicts() if verdicts is None else verdicts
        self._unlock()
        self._this_thread = threading.local()
        if dumps is not None:
            try:
                dumps.check()
            except NotWrittenError as error:
                self._cannot_dump(error, dumps_option)

    def begin_anew(self) -> None:
        """As if nothing had been seen; in a forked child the parent's lock may be held."""
        self._verdicts.begin_anew()
        self._unlock()

    def _unlock(self) -> None:
        self._lock = threading.RLock()  # reentrant, as that of the verdicts
        self._storms: dict[int, _Storm] = {}
        self._refusals_told: dict[int, int] = {}
        """By device, up to which of the allocator's count."""

    def cannot_see(self, error: Exception) -> None:
        """There are no observers here."""
        self._telemetry.say_once(
            "oom observer", "torchmem: out of memory errors are not examined: %s", error, level=logging.DEBUG
        )

    def counts(self, device: int) -> Mapping[str, int] | None:
        """The errors on a device by verdict; None where the allocator has no observers."""
        source = self._sampler.source()
        if _watch is not self or not _attached or source is None:
            return None
        if source.backend != NATIVE:  # without caching observers are taken, and never called
            return None
        return self._verdicts.of(device)

    def seen(self, device: int, asked: int, allowed: int, free: int) -> None:
        """Take an error's evidence and tell it. Raises nothing of ours."""
        this = self._this_thread
        if getattr(this, "busy", False):  # memory ran out while it was looked at
            return
        this.busy = True
        try:
            this.at = monotonic()
            self._see(device, (asked, allowed, free), trace.get_current_span(), None)
        except Exception as error:
            self._failed(error)
        finally:
            this.busy = False

    def request_failed(
        self,
        began: float,
        before: Sequence[AllocatorReading],
        after: Sequence[AllocatorReading],
        span: Span,
        context: Context,
    ) -> None:
        """A request has ended with an OutOfMemoryError. Of an allocation that was refused early, as
        ``throw_on_cudamalloc_oom`` has it, no observer is told: if it was that, tell it now. Raises nothing
        of ours."""
        try:
            if getattr(self._this_thread, "at", 0.0) >= began:  # it was told when it happened
                return
            for reading in self._refused_within(before, after):
                self._see(reading.device, None, span, context)
        except Exception as error:
            self._failed(error)

    def request_was_refused(
        self,
        before: Sequence[AllocatorReading],
        after: Sequence[AllocatorReading],
        span: Span,
        context: Context,
        exclusive: bool,
    ) -> None:
        """Allocations were refused early while a request was in flight, and it has ended without that error:
        it, or under overlap somebody, caught it. Told once, on its span if it was its own. Raises nothing of
        ours."""
        try:
            told = dict(self._refusals_told)
            for reading in self._refused_within(before, after):
                if (reading.oom_rejections or 0) > told.get(reading.device, 0):
                    self._see(reading.device, None, *((span, context) if exclusive else (INVALID_SPAN, None)))
        except Exception as error:
            self._failed(error)

    def _refused_within(
        self, before: Sequence[AllocatorReading], after: Sequence[AllocatorReading]
    ) -> Sequence[AllocatorReading]:
        """The later readings of the devices on which that happened; they are told from now on."""
        earlier = {reading.device: reading.oom_rejections for reading in before}
        rose: list[AllocatorReading] = []
        for reading in after:
            then, now = earlier.get(reading.device, 0), reading.oom_rejections
            if then is not None and now is not None and now > then:
                rose.append(reading)
                self._refusals_told[reading.device] = now
        return rose

    def _see(
        self, device: int, given: tuple[int, int, int] | None, span: Span, context: Context | None
    ) -> None:
        began = monotonic()
        with self._lock:
            storm = self._storms.get(device)
            if storm is None:
                storm = self._storms[device] = _Storm()
            due = began >= storm.not_before
            if due:
                more, storm.more = storm.more, 0
                storm.not_before = began + INTERVAL
                storm.examined_at, storm.last_verdict = began, None
            else:
                more = storm.more = storm.more + 1
        if not due:
            if given is not None:
                self._verdicts.add(device, "unexamined")
            self._mention(device, storm, "unexamined" if given is not None else REFUSED, span)
            return
        found = "unknown"
        try:
            evidence = self._examine(device, given, more)
            found = evidence.verdict
            attributes = evidence.attributes()
            if span.is_recording():
                self._this_thread.told = span.get_span_context().span_id
                span.add_event(signals.OOM_EVENT.name, attributes)
            self._tell(evidence.summary, attributes, context)
        finally:
            cost = monotonic() - began
            self._telemetry.spent("oom", cost)
            if given is not None:
                self._verdicts.add(device, found)
            with self._lock:
                storm.last_verdict = found
                storm.not_before = max(storm.not_before, began + cost / SHARE)

    def _mention(self, device: int, storm: _Storm, found: str, span: Span) -> None:
        """On the span of an error that was only counted: which one was examined. Once in a row for each span,
        whose events have a limit too."""
        if not span.is_recording():
            return
        identity = span.get_span_context().span_id
        if getattr(self._this_thread, "told", None) == identity:
            return
        self._this_thread.told = identity
        meaning = VERDICTS[found].rstrip(".")
        ago = f"one of {monotonic() - storm.examined_at:.1f} s before"
        that = "is being examined" if storm.last_verdict is None else f"was {storm.last_verdict}"
        span.add_event(
            signals.OOM_EVENT.name,
            {
                signals.DEVICE.name: f"cuda:{device}",
                signals.OOM_VERDICT.name: found,
                signals.OOM_SUMMARY.name: f"cuda:{device} is out of memory. {meaning}: {ago} {that}.",
            },
        )

    def _examine(self, device: int, given: tuple[int, int, int] | None, more: int) -> Evidence:
        at = monotonic()
        named = Device(device, f"cuda:{device}", None)
        recent = self._attempt(self._recent, device, at) or ()
        source = self._sampler.failing_threads_source()
        if source is None:  # to read could hang the process
            failure = None if given is None else Failure(given[0], given[2], None, given[1])
            found = REFUSED if failure is None else verdict(failure)
            return Evidence(named, failure, found, at, recent=recent, more=more)
        attempt = self._attempt
        named = attempt(source.device, device) or named
        settings = told = attempt(source.settings)
        reading, driver, together = self._of_one_moment(source, device)
        snapshot = attempt(source.snapshot)
        if snapshot is not None and settings is not None:
            settings = attempt(settings_at, snapshot, settings)
        after = attempt(source.read, device)  # what is freed from now on can be in no block of the snapshot
        stream = attempt(source.current_stream, device)
        before = self._sampler.latest(device)
        fraction = attempt(source.memory_fraction, device)
        if fraction is None and given is not None and driver is not None:  # before torch could tell
            fraction = 1.0 if given[1] >= driver.total else (given[1] + 0.5) / driver.total
        device_map = failure = None
        live_pools: Collection[PoolOn] = ()
        if snapshot is not None and settings is not None and stream is not None and reading is not None:
            limits = Limits(driver, fraction, reading.reserved)
            live_pools = attempt(self._live_pools) or ()
            device_map = attempt(_map, snapshot, settings, device, limits, stream, live_pools)
            if stream != DEFAULT_STREAM:
                later = attempt(_map, snapshot, settings, device, limits, DEFAULT_STREAM, live_pools)
            else:
                later = device_map
            if later is not None and told is not None:
                self._sampler.take_over(later, reading, told)
        captured = bool(attempt(source.is_capturing, device))
        pools = attempt(self._pools_in_force, source, device_map, stream, live_pools) or (DEFAULT_POOL,)
        requests = attempt(self._in_flight, device, reading) or ()
        if given is not None:
            pending_before, freed_otherwise = _freed_before(before, after, POOLS[kind_of(given[0])])
            failure = Failure(
                asked=given[0],
                free=given[2],
                total=None if driver is None else driver.total,
                allowed=given[1],
                reserved=None if reading is None else reading.reserved,
                blocks=attempt(_blocks, device_map, settings, stream, given[0], pools),
                free_now=None if driver is None else driver.free,
                external=external(reading, driver) if reading and driver and together else None,
                pending_before=pending_before,
                freed_otherwise=freed_otherwise,
                nobody_else=_is_the_only_thread(),
                baseline=self._sampler.recorder.least_external(device),
                page=_page(settings),
                expandable=settings is not None and settings.expandable_segments,
            )
        return Evidence(
            device=named,
            failure=failure,
            verdict=REFUSED if failure is None else verdict(failure),
            at=at,
            state=_state(reading, driver, together, device_map),
            map=device_map,
            recent=recent,
            requests=requests,
            settings=settings,
            capturing=self._captures.under_way or captured,
            unflushed=captured or (before is not None and reading is not None and _no_retry(before, reading)),
            in_default_pool=DEFAULT_POOL in pools,
            more=more,
            dump=self._dump(snapshot),
            said=_said(sys.exc_info()[1]) if failure is None else None,
        )

    def _of_one_moment(
        self, source: Source, device: int
    ) -> tuple[AllocatorReading | None, DriverMemory | None, bool]:
        """What the allocator and the driver say, and whether as much was held at the one as at the other."""
        reading = driver = None
        for _ in range(TRIES):
            reading = self._attempt(source.read, device)
            driver = self._attempt(source.driver_memory, device)
            if reading is None or driver is None:
                return reading, driver, False
            if self._attempt(source.holds_as_much, reading):
                return reading, driver, True
        return reading, driver, False

    def _pools_in_force(
        self,
        source: Source,
        device_map: DeviceMap | None,
        stream: int | None,
        live_pools: Collection[PoolOn],
    ) -> Collection[PoolId]:
        """The pools that serve the failing thread: with its stream captured, that of the graph, which unless
        it was given one has no owner before the capture has ended."""
        if device_map is None:
            return ()
        entered = self._pool_in_force(device_map.device)
        if entered is not None:
            return (entered,)
        if stream is None or not source.is_capturing(device_map.device):
            return ()
        given = self._captures.pool_given(device_map.device, stream)
        if given is not None:
            return (given,)
        return {
            place.pool
            for place in device_map.places
            if place.pool not in (None, DEFAULT_POOL)
            and place.stream == stream
            and (device_map.device, place.pool) not in live_pools
        } or (_NO_POOL,)

    def _recent(self, device: int, at: float) -> Sequence[Brief]:
        """What is known of the time before the flush, the latest reading of all among it."""
        recent = [brief for brief in self._sampler.recorder.recent(device) if at - brief.at <= LOOK_BACK]
        latest = self._sampler.latest(device)
        brief = None if latest is None else in_brief(latest)
        if brief is not None and (not recent or brief.at > recent[-1].at):
            recent.append(brief)
        return thinned(recent, READINGS)

    def _in_flight(self, device: int, reading: AllocatorReading | None) -> Sequence[InFlight]:
        now = monotonic()
        requests: list[InFlight] = []
        held = None if reading is None else reading.reserved
        for operation, began, before in self._requests():
            held_then = next((each.reserved for each in before if each.device == device), None)
            growth = None if held_then is None or held is None else held - held_then
            requests.append(InFlight(operation, now - began, growth))
        return sorted(requests, key=lambda request: -(request.reserved_growth or 0))

    def _dump(self, snapshot: Any) -> str | None:
        if self._dumps is None or snapshot is None:
            return None
        try:
            return self._dumps.write(as_torch_writes_it(snapshot))
        except NotWrittenError as error:
            self._not_dumped(error)
        except Exception as error:  # a recursion limit, no memory on the host
            self._failed(error)
        return None

    def _cannot_dump(self, error: NotWrittenError, option: str) -> None:
        """Say, before there is any error of memory, that its snapshot would not be written."""
        cause = error.__cause__
        why = cause.strerror or cause if isinstance(cause, OSError) else error
        parent = "; its parent must exist" if isinstance(cause, FileNotFoundError) else ""
        self._telemetry.skip("dump")
        self._telemetry.say_once(
            f"dump {option}",
            "torchmem: %s cannot be written (%s%s): no snapshots will be written",
            option,
            why,
            parent,
        )

    def _not_dumped(self, error: NotWrittenError) -> None:
        self._telemetry.skip("dump")
        self._telemetry.say_once(f"dump {error}", "torchmem: no dump of an out of memory error: %s", error)

    def _attempt(self, part: Callable[..., T], *arguments: Any) -> T | None:
        """A part of the evidence that raises is absent from it."""
        try:
            return part(*arguments)
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        if is_a_signal_handlers(error):
            raise error
        self._telemetry.skip("error")
        self._telemetry.say_once(
            f"oom {type(error).__name__}",
            "torchmem: evidence of an out of memory error is incomplete: %r",
            error,
        )


def _map(
    snapshot: Mapping[str, Any],
    settings: AllocatorSettings,
    device: int,
    limits: Limits,
    stream: int,
    live_pools: Collection[PoolOn],
) -> DeviceMap:
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    return analyse(segments, settings, {device: limits}, stream=stream, live_pools=live_pools)[device]


def _page(settings: AllocatorSettings | None) -> int:
    return Rules.of(settings or AllocatorSettings.parse("", "default")).page(LARGE)


def _blocks(
    device_map: DeviceMap | None,
    settings: AllocatorSettings | None,
    stream: int | None,
    asked: int,
    pools: Collection[PoolId],
) -> FreeBlocks | None:
    if device_map is None or settings is None or stream is None:
        return None
    if any(place.pool is None for place in device_map.places):  # the release does not tell pools apart
        return None
    rules = Rules.of(settings)
    below = usable_below(asked, rules.page(LARGE), rules.max_split, rules.non_split_rounding)
    return free_blocks(
        device_map.places,
        stream,
        kind_of(asked),
        pools=pools,
        below=below,
        expandable=settings.expandable_segments,
    )


def _is_the_only_thread() -> bool:
    """Whether nobody but this thread can have freed a tensor: none runs but OpenTelemetry's and ours."""
    others = (each for each in threading.enumerate() if each.ident != threading.get_ident())
    return all(each.name.startswith(("Otel", "torchmem-")) for each in others)


def _freed_before(
    before: AllocatorReading | None, after: AllocatorReading | None, pool: str
) -> tuple[int, int | None]:
    """Bytes of a pool that were seen pending, by the latest reading before or by a peak that is new since;
    and those that may have been freed since in another way, None where that is not known.

    At the moment of the peak of what was active, no more was in tensors than at the peak of that.
    """
    if before is None or after is None:
        return 0, None
    try:
        active_then, active = (each.statistics["active_bytes"][pool] for each in (before, after))
        allocated_then, allocated = (each.statistics["allocated_bytes"][pool] for each in (before, after))
        pending = seen = active_then["current"] - allocated_then["current"]
        if active["peak"] > active_then["peak"]:
            seen = max(seen, active["peak"] - allocated["peak"])
        freed = allocated["freed"] - allocated_then["freed"]
    except KeyError:  # a backend that counts less
        return 0, None
    # of what was freed since, so much became pending for sure
    return seen, None if freed < 0 else max(0, freed - (seen - pending))


def _no_retry(before: AllocatorReading, after: AllocatorReading) -> bool:
    """Whether the allocator has not asked the driver again, as it does after each flush."""
    return after.retries is not None and after.retries == before.retries


def _state(
    reading: AllocatorReading | None,
    driver: DriverMemory | None,
    together: bool,
    device_map: DeviceMap | None,
) -> DeviceState | None:
    if reading is None or driver is None:
        return None
    current = device_map is not None and device_map.is_of(reading)
    used_elsewhere = external(reading, driver) if together else None
    return DeviceState(reading, 0.0, {}, driver.total, used_elsewhere, device_map, map_is_current=current)


Emit = Callable[[str, Attributes, Context | None, SeverityNumber], None]


class OomLog:
    """Emits an event through OpenTelemetry's logs API, or through that of events where the API is old."""

    def __init__(self, provider: LoggerProvider | None = None, event: str = signals.OOM_EVENT.name) -> None:
        self._event = event
        self._emit = (
            self._emitter(provider)
            if "event_name" in inspect.signature(Logger.emit).parameters
            else self._event_emitter()
        )

    def __call__(
        self,
        summary: str,
        attributes: Attributes,
        context: Context | None,
        # not an error: frameworks catch it and try less, and whether the request failed its span says
        severity: SeverityNumber = SeverityNumber.WARN,
    ) -> None:
        self._emit(summary, attributes, context, severity)

    def _emitter(self, provider: LoggerProvider | None) -> Emit:
        logger = get_logger(NAME, __version__, provider)

        def emit(
            summary: str, attributes: Attributes, context: Context | None, severity: SeverityNumber
        ) -> None:
            logger.emit(
                timestamp=time_ns(),
                context=context,
                severity_number=severity,
                severity_text=severity.name,
                body=summary,
                attributes=attributes,
                event_name=self._event,
            )

        return emit

    def _event_emitter(self) -> Emit:
        try:
            events: Any = importlib.import_module("opentelemetry._events")
        except ImportError:
            return _emit_nothing
        logger = events.get_event_logger(NAME, __version__)

        def emit(
            summary: str, attributes: Attributes, context: Context | None, severity: SeverityNumber
        ) -> None:
            at = trace.get_current_span(context).get_span_context()
            logger.emit(
                events.Event(
                    self._event,
                    timestamp=time_ns(),
                    trace_id=at.trace_id,
                    span_id=at.span_id,
                    trace_flags=at.trace_flags,
                    body=summary,
                    severity_number=severity,
                    attributes=attributes,
                )
            )

        return emit


def _emit_nothing(
    summary: str, attributes: Attributes, context: Context | None, severity: SeverityNumber
) -> None: ...


# torch has no way to take an observer back: there is one for the life of the process, and it does nothing
# while nobody watches
_watch: OomWatch | None = None
_attached = False
_waiting = False
_attaching = threading.Lock()


def activate(watch: OomWatch) -> None:
    """Have this one see the errors from now on."""
    global _watch
    _watch = watch


def deactivate() -> None:
    """See no more errors."""
    global _watch
    _watch = None


def torch_imported(torch: Any) -> None:
    """Attach the observer once CUDA is initialised, at once if it is: before, it would initialise it."""
    global _waiting
    if initialised_torch() is not None:
        _attach(torch)
    elif not _waiting:
        _waiting = True
        when_initialised(torch, lambda: _attach(torch))


def _attach(torch: Any) -> None:
    """Never raises: what does would fail CUDA's initialisation."""
    global _attached
    try:
        watch = _watch
        with _attaching:
            if watch is None or _attached:
                return
            try:
                attach_oom_observer(torch, _observe)
                _attached = True
            except (RuntimeError, AttributeError) as error:
                watch.cannot_see(error)
    except Exception:
        pass


def _observe(device: int, asked: int, allowed: int, free: int) -> None:
    """Raises nothing of ours: it would take the place of the user's OutOfMemoryError."""
    try:
        watch = _watch
        if watch is not None:
            watch.seen(device, asked, allowed, free)
    except Exception as error:
        if is_a_signal_handlers(error):
            raise
