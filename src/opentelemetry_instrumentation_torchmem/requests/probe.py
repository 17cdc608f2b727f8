# SPDX-License-Identifier: Apache-2.0
"""One handle for each measured call: ``begin`` -> ``stop``, ``fail`` or ``abandon``.

Two readings and arithmetic on the caller's thread, then a span and four records. What is the same for each
call of a target is decided once, in its ``Calls``. A fault of ours never reaches the caller: each entry
guards itself once, as a whole.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from queue import SimpleQueue
from threading import get_ident
from time import monotonic, sleep, time_ns
from typing import Any, cast
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,  # pyright: ignore[reportPrivateUsage] - as instrumentation.utils has it
    Context,
    attach,
    create_key,
    detach,
    get_current,
)
from opentelemetry.metrics import _internal as metrics_api
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode

from .. import signals
from ..allocator.reading import AllocatorReading
from ..allocator.sampler import Readings as RawReadings
from ..allocator.sampler import Sampler
from ..allocator.windows import NOTHING_KNOWN, Change, OpenWindows, Window, total
from ..interrupted import is_a_signal_handlers
from ..telemetry import OwnTelemetry
from .names import SpanName
from .shapes import NO_INPUTS, Inputs, described, inputs_of
from .story import Stay, attributes_of, changes_of, name_of, refused_within, steady

Labels = dict[str, str | bool]
Hook = Callable[..., object]
Readings = Sequence[AllocatorReading]
OutOfMemory = Callable[[float, Readings, Readings, Span, Context], object]
Refused = Callable[[Readings, Readings, Span, Context, bool], object]
Records = Mapping[str, Any]
"""The synchronous instruments by the names of their rows."""

_token = attach(get_current())
_context: ContextVar[Context] = _token.var
"""Where the API keeps the current context: asked directly, it takes a third of the time."""
detach(_token)

_WINDOW = create_key("torchmem-window")
(_SPAN,) = trace.set_span_in_context(INVALID_SPAN, Context())  # two marks in one copy of a context
_NO_SPAN = Context({_WINDOW: None})  # an empty one would mean the current one
"""Where a growth of 0 is recorded: an exemplar of it would lead nowhere, and cost a fifth of a record."""
_SUPPRESSED = "suppress_instrumentation"
_NO_KEYWORDS: Mapping[str, Any] = {}

_OTHER = ("other", None)
_CANCELLED = frozenset({"CancelledError", "Cancelled", "GreenletExit"})
"""By name: asyncio's, trio's and gevent's."""

_LAST_WORDS = 1.0
"""Seconds that ``close`` waits at most."""

MAX_TARGETS = 200
"""Label sets of targets; in the metrics what comes later counts under the operation ``other``."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured, and how."""

    function: str | None
    """``code.function.name``: fully qualified; None for a block."""
    operation: str
    """``torch.operation``: generate, forward, step, or the name the user gave."""
    span: str = "new"
    """``new`` span, ``enrich`` the current one, or ``off``: metrics alone."""
    nested: bool = False
    """Whether it is measured inside another measured call too."""
    iterator: bool = False
    """Whether an iterator that it returns is followed to its end, as generators always are."""


def _providers_set() -> tuple[object, object]:
    """The global providers that are set. To ask the API for them costs 1.4 µs while there are none."""
    return trace._TRACER_PROVIDER, metrics_api._METER_PROVIDER  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


if not (hasattr(trace, "_TRACER_PROVIDER") and hasattr(metrics_api, "_METER_PROVIDER")):  # another API

    def _providers_set() -> tuple[object, object]:
        return trace.get_tracer_provider(), metrics_api.get_meter_provider()


class Requests:
    """Measures calls, from one ``instrument()`` to its ``uninstrument()``. Owner: the instrumentor."""

    def __init__(
        self,
        tracer: trace.Tracer,
        records: Records,
        sampler: Sampler,
        windows: OpenWindows,
        telemetry: OwnTelemetry,
        *,
        awake: Callable[[], tuple[bool, bool]],
        request_metrics: bool = True,
        request_hook: Hook | None = None,
        response_hook: Hook | None = None,
        out_of_memory: OutOfMemory | None = None,
        refused: Refused | None = None,
        grown: Callable[[Readings, Sequence[Change], int], object] | None = None,
    ) -> None:
        """``awake`` says whether spans and whether metrics go anywhere now."""
        self.telemetry = telemetry
        self.tracer = tracer
        self.sampler = sampler
        self.windows = windows
        self.request_hook = request_hook
        self.abandoned: deque[tuple[Probe, BaseException | None]] = deque()
        """Ended, and not told yet."""
        self.traced = self.metered = False
        self.settled = False
        """Whether all that is wanted goes somewhere; that stays so until ``close``."""
        self._out_of_memory = out_of_memory
        self._refused = refused
        self._grown = grown
        self.record_duration = records[signals.REQUEST_DURATION.name].record
        self.record_growth = records[signals.REQUEST_RESERVED_GROWTH.name].record
        self.record_peak = records[signals.REQUEST_PEAK_GROWTH.name].record
        self.add_retries = records[signals.REQUEST_RETRIES.name].add
        self._awake = awake
        self._request_metrics = request_metrics
        self._seen: tuple[object, object] | None = None
        self.response_hook = response_hook
        self.closed = False
        self.telling: set[int] = set()
        """The threads within ``finish``."""
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.watches_streams = False
        self.unfinished: dict[Probe, None] = {}
        """Those given up that are being finished now."""
        self.recording = threading.RLock()  # reentrant: a signal handler may end a request within one
        self._series: dict[tuple[str, str | None], _Series] = {}
        self._enriched: WeakKeyDictionary[Span, Stay] = WeakKeyDictionary()

    def begin_anew(self) -> None:
        """In a forked child: the parent's locks may be held, and its requests are not this process's."""
        self.recording = threading.RLock()
        self._wake = SimpleQueue()
        self.watches_streams = False
        self.abandoned.clear()
        self.unfinished.clear()
        self.telling = set()
        for series in self._series.values():
            series.zeroed = False

    def calls(self, target: Target, name: SpanName, *, bound: bool = False) -> Calls:
        """What measures the calls of a target; ``bound`` if the first argument is the object that a method is
        called on, and no input."""
        return Calls(self, target, name, bound)

    def wanted(self) -> bool:
        """Whether anything is to be measured, while it is not settled."""
        if self.closed:
            return False
        providers = _providers_set()
        if providers != self._seen:
            self._seen = providers
            self.traced, self.metered = self._awake()
            self.settled = self.traced and (self.metered or not self._request_metrics)
        return self.traced or self.metered

    def series(self, target: Target) -> _Series:
        """The label set of a target; of ``other`` beyond ``MAX_TARGETS``."""
        key = (target.operation, target.function)
        known = self._series.get(key)
        if known is not None:
            return known
        if len(self._series) >= MAX_TARGETS:
            series = self._series.setdefault(_OTHER, _Series(*_OTHER))
            series.is_other = True
            return series
        return self._series.setdefault(key, _Series(*key))

    def active(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each target's requests in flight, with its labels."""
        counts = Counter(probe.series for probe in self._open())
        return [(counts[series], series.labels) for series in tuple(self._series.values())]

    def in_flight(self) -> list[tuple[str, float, Readings]]:
        """The operation of each request in flight, when it began by ``monotonic``, and the readings then;
        not of those nested in another."""
        return [
            (probe.calls.target.operation, probe.began, _whole(probe.before))
            for probe in self._open()
            if probe.outer is None and probe.began
        ]

    def _open(self) -> Iterable[Probe]:
        return cast("tuple[Probe, ...]", self.windows.all_open())

    def before_collection(self) -> None:
        """What each collection needs of us: ended streams ended, and counters that start at 0."""
        self.drain()
        if not (self.metered or self._awake()[1]):
            return
        for series in tuple(self._series.values()):
            if series.zeroed:
                continue
            with self.recording:
                if not self.closed:
                    series.zeroed = True
                    self.add_retries(0, series.labels)  # a first retry must be an increase

    # what finalizers gave up

    def abandon(self, probe: Probe, error: BaseException | None = None) -> None:
        """Take a probe from a finalizer: takes no lock that this thread may hold already."""
        self.abandoned.append((probe, error))
        self._wake.put(None)

    def drain(self) -> None:
        """Finish what was abandoned, in a finalizer perhaps, where nothing may be recorded or locked."""
        while self.abandoned and get_ident() not in self.telling:
            with self.windows.lock:  # no window opens before theirs are closed
                if not self.abandoned:
                    return
                probe, error = self.abandoned.popleft()
                self.unfinished[probe] = None
                concurrent = self.windows.close(probe) if probe.measured else 0
            try:
                self.finish(probe, error, None, concurrent)
            finally:
                del self.unfinished[probe]

    def watch_streams(self) -> None:
        """From now on finish what is abandoned at once, on a thread of our own."""
        with self.windows.lock:
            if self.watches_streams:
                return
            self.watches_streams = True
        try:
            threading.Thread(target=self._watch, name="torchmem-streams", daemon=True).start()
        except RuntimeError as error:  # the interpreter ends
            self.telemetry.say_once("streams", "torchmem: streams that are given up end late: %r", error)

    def wake(self) -> None:
        """Have that thread look whether there is anything to be done: after the end, it may be the last."""
        self._wake.put(None)

    def _watch(self) -> None:
        while not self.closed or self.windows.any_open:
            self._wake.get()
            self.drain()

    def close(self) -> None:
        """Measure nothing that begins from now on; the spans of what is in flight end as they would have."""
        with self.recording:
            self.closed = True
            self.settled = False
        self._until_told()  # what is being recorded now comes before the end, the rest not at all
        self.drain()
        if self.watches_streams:
            self._wake.put(None)
        elif self.windows.any_open:
            self.watch_streams()  # no call and no collection comes to finish what is given up from now on

    def _until_told(self) -> None:
        """Wait for the threads that are within ``finish``; not long, for one may export from in there."""
        began, here = monotonic(), {get_ident()}
        while self.telling - here and monotonic() - began < _LAST_WORDS:
            sleep(0.001)

    # the end of a call

    def finish(self, probe: Probe, error: BaseException | None, result: object, concurrent: int = 0) -> None:
        """The end of a call, once: its span told and ended, its metrics recorded. Raises nothing of ours."""
        thread, telling = get_ident(), self.telling
        if thread in telling:  # a signal handler's, within the SDK, whose locks are not reentrant
            self.abandon(probe, error)
            return
        calls, span = probe.calls, probe.span
        try:
            try:
                telling.add(thread)
                if probe.measured:
                    if error is not None and self._out_of_memory is not None and _is_out_of_memory(error):
                        self._tell_out_of_memory(self._out_of_memory, probe)
                    concurrent = concurrent or self.windows.close(probe)
                    self.tell(probe, concurrent, error, result)
            finally:
                if probe.measured and not concurrent:
                    self.windows.close(probe)  # a signal's exception came between
                if calls.new:
                    span.end(probe.ended_at)
        except Exception as fault:  # a span processor of the user's may raise too
            self.fault(calls.target, fault)
        finally:
            telling.discard(thread)
            probe.before = probe.after = probe.context = None  # a context that somebody keeps holds its probe
            if self.closed:
                self.wake()

    def tell(self, probe: Probe, concurrent: int, error: BaseException | None, result: object) -> None:
        """Tell of a call what there is to be told."""
        calls, span, before, after = probe.calls, probe.span, probe.before, probe.after
        changes, after = changes_of(before, after)
        whole = total(changes) if changes else NOTHING_KNOWN
        failure = None if error is None or _is_no_failure(error) else error
        refused = refused_within(before, after)
        if refused and self._refused is not None and not (error and _is_out_of_memory(error)):
            self._refused(_whole(before), _whole(after), span, probe.context, concurrent == 1)
        if self._grown is not None and (whole.peak_growth or (whole.reserved_delta or 0) > 0):
            self._grown(_whole(after), changes, concurrent)
        if probe.recording and span.is_recording():
            if calls.enriches:
                self._enrich(probe, concurrent)
            else:
                told = attributes_of([name_of(each) for each in after], changes, concurrent)
                told.update(described(probe.inputs))
                span.set_attributes(told)
            if refused:
                span.set_attribute(signals.REJECTIONS.name, refused)
            if failure is not None:
                span.set_attribute(signals.ERROR_TYPE.name, type(failure).__qualname__)
            if self.response_hook is not None:
                token = _context.set(Context({**_context.get(), _WINDOW: _HOOKS}))
                try:
                    self.call_hook(self.response_hook, "response_hook", span, calls.target.operation, result)
                finally:
                    _context.reset(token)
            if failure is not None and calls.new:
                self._tell_failure(calls.target, span, failure)
        if self.metered:
            with self.recording:
                if not self.closed:
                    self._record(probe, whole, concurrent == 1 if changes else None, failure)

    def _record(
        self, probe: Probe, whole: Change, exclusive: bool | None, failure: BaseException | None
    ) -> None:
        series, context = probe.calls.series, probe.context
        if series.is_other:
            self.telemetry.skip("overflow")
        labels = series.by_exclusive[exclusive]
        timed = labels
        if failure is not None:
            timed = {**labels, signals.ERROR_TYPE.name: type(failure).__qualname__}
        self.record_duration(probe.ended - probe.began, timed, context)
        if whole.reserved_delta is not None:
            grown = max(0, whole.reserved_delta)
            self.record_growth(grown, labels, context if grown else _NO_SPAN)
        if exclusive and whole.peak_growth is not None:
            self.record_peak(whole.peak_growth, labels, context if whole.peak_growth else _NO_SPAN)
        if whole.retries:
            self.add_retries(whole.retries, series.labels, context)

    def _tell_out_of_memory(self, tell: OutOfMemory, probe: Probe) -> None:
        tell(probe.began, _whole(probe.before), _whole(probe.after), probe.span, probe.context)

    def enriching(self, probe: Probe) -> None:
        """A call under a span that it enriches has begun."""
        with self.recording:
            stay = self._enriched.get(probe.span)
            if stay is None:
                stay = self._enriched[probe.span] = Stay()
            stay.one_began(probe.before)

    def _enrich(self, probe: Probe, concurrent: int) -> None:
        """Tell this call's story, added to those of the other calls under the same span."""
        span = probe.span
        with self.recording:  # they may end at the same time
            stay = self._enriched[span]
            earlier = stay.told
            attributes = stay.one_ended(probe.after, concurrent)
            _take_back(span, earlier - attributes.keys())
            span.set_attributes({**attributes, **described(probe.inputs)})

    def _tell_failure(self, target: Target, span: Span, error: BaseException) -> None:
        description = type(error).__qualname__
        try:
            span.record_exception(error)
            description = f"{description}: {error}"
        except Exception as fault:  # an exception of the user's that cannot be printed
            self.fault(target, fault, "what %s raised cannot be told: %r")
        span.set_status(Status(StatusCode.ERROR, description))

    def call_hook(self, hook: Hook, name: str, *arguments: object) -> None:
        """Call a hook of the user's; one that raises is passed over."""
        try:
            hook(*arguments)
        except Exception as error:
            if is_a_signal_handlers(error):
                raise
            self.telemetry.skip("hook")
            self.telemetry.say_once(name, "torchmem: %s %r raised and is passed over: %r", name, hook, error)

    def fault(
        self, target: Target, error: Exception, what: str = "a call of %s could not be measured: %r"
    ) -> None:
        """A fault of ours: counted, told once for each target and kind, and kept from the caller; what a
        signal handler of the user's raised meanwhile is none, and goes on to them."""
        if is_a_signal_handlers(error):
            raise error
        self.telemetry.skip("request")
        self.telemetry.say_once(
            f"request {target} {type(error)} {what}",
            f"torchmem: {what}",
            target.function or target.operation,
            error,
        )


class Calls:
    """The calls of one target, as one ``Requests`` measures them: what is decided before the first one."""

    __slots__ = (
        "_bound", "_labels", "_name", "_names", "_nested", "_start_span", "_told", "enriches", "exclusive",
        "new", "plain", "requests", "sampler", "series", "shared", "target", "windows",
    )  # fmt: skip

    def __init__(self, requests: Requests, target: Target, name: SpanName, bound: bool) -> None:
        self.requests = requests
        self._bound = bound
        self.target = target
        self.series = requests.series(target)
        shared = self.series.is_other
        self._labels = _labels(target.operation, target.function) if shared else self.series.labels
        """Of its spans."""
        self.new = target.span == "new"
        self.enriches = target.span == "enrich"
        self._told = self.new or self.enriches
        self._name, self._names = (name, None) if isinstance(name, str) else (None, name)
        self._nested = target.nested
        self._start_span = requests.tracer.start_span
        self.sampler = requests.sampler
        self.windows = requests.windows
        self.exclusive, self.shared = self.series.by_exclusive[True], self.series.by_exclusive[False]
        """The labels of the metrics."""
        self.plain = not (self.enriches or shared or requests.request_hook or requests.response_hook)

    def begin(
        self, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Probe | None:
        """A probe of a call that starts now, its context attached; None where nothing is wanted. Never
        raises."""
        requests = self.requests
        probe = outside = None
        try:
            if not requests.settled and not requests.wanted():
                return None
            context = outside = _context.get()
            outer: Any = None
            if context:
                if context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get(_SUPPRESSED):
                    return None
                outer = context.get(_WINDOW)
                if outer is not None:
                    outer = outer.still_open()
                    if outer is not None and (not self._nested or outer is _HOOKS):
                        return None
            made = False
            if self._told and requests.traced:
                if self.new:
                    name = self._name
                    if name is None:
                        names: Any = self._names
                        known = names.known.get(type(arguments[0]).__name__) if arguments else None
                        name = known or names.of(arguments)
                    span = self._start_span(name, context, attributes=self._labels)
                    made = True
                else:
                    span = trace.get_current_span(context)
                recording = span.is_recording()
                if not recording and not requests.metered:
                    if not made or _SPAN in context:
                        return None  # what comes under the dropped parent is dropped as well
                    probe = Probe(self, span, False)
                    probe.context = context = Context({**context, _SPAN: span})
                    probe.token = _context.set(context)
                    return probe
            elif requests.metered:
                span, recording = INVALID_SPAN, False
            else:
                return None
            if requests.abandoned:
                requests.drain()
            probe = Probe(self, span, recording)
            if recording:
                try:
                    probe.inputs = inputs_of(arguments[1:] if self._bound else arguments, keywords)
                except Exception as error:  # the user's own mappings may raise; the call is measured still
                    requests.fault(self.target, error, "the inputs of %s cannot be described: %r")
            windows = self.windows
            probe.measured = True
            with windows.lock:
                if windows.opened:
                    windows.open(probe, outer)
                else:  # in line what it does of one that is alone
                    probe.since = windows.count = 1
                    probe.sequence = windows.sequence
                    windows.opened[probe] = None
            if made:
                context = Context({**context, _WINDOW: probe, _SPAN: span})
            else:
                context = Context({**context, _WINDOW: probe})
            probe.context = context
            try:
                at, sampler = monotonic(), self.sampler
                only = sampler.only
                if only is None or at > sampler.look_again:
                    probe.before = sampler.request_readings(at)
                else:
                    index, read = only
                    statistics = read(index)  # as long as `is_mapped` says no of them
                    if statistics["num_device_alloc"] > statistics["segment"]["all"]["allocated"]:
                        probe.before = sampler.request_readings(at)
                    else:
                        sampler.last[index] = reading = index, at, statistics
                        probe.before = (reading,)
            except Exception as error:
                requests.fault(self.target, error)
            probe.began = monotonic()
            probe.token = _context.set(context)
            if not self.plain:
                self._greet(probe, arguments, keywords)
            return probe
        except Exception as error:
            if probe is not None:
                probe.interrupted_at_its_begin(outside)
                probe.stop()
            requests.fault(self.target, error)
            return None
        except BaseException:  # of a signal handler
            if probe is not None:
                probe.interrupted_at_its_begin(outside)
                probe.abandon()
            raise

    def _greet(self, probe: Probe, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        requests = self.requests
        if self.enriches and probe.recording:
            requests.enriching(probe)
        hook = requests.request_hook
        if hook is not None and probe.recording:
            if probe.inputs:
                probe.span.set_attributes(described(probe.inputs))  # the hook may want to change them
                probe.inputs = NO_INPUTS
            keywords = dict(keywords)  # the call keeps its own, whatever the hook does to them
            requests.call_hook(hook, "request_hook", probe.span, self.target.operation, arguments, keywords)


_HOOKS = Window()
"""What a response hook calls is within this one, and not measured: its end would call the hook again."""


def _whole(readings: RawReadings | None) -> Readings:
    return [AllocatorReading._make(reading) for reading in readings or ()]


def _take_back(span: Any, keys: Iterable[str]) -> None:
    """Take figures of earlier calls off a span, because a later call made them unknown.

    The API has no way to do that. Where the span is not the SDK's as it is known, they stay.
    """
    attributes: Any = getattr(span, "_attributes", None)
    for key in keys:
        with suppress(TypeError, KeyError):
            del attributes[key]


def _is_no_failure(error: BaseException) -> bool:
    """Whether it says that nobody wants the result any more."""
    if isinstance(error, Exception):
        return False
    return isinstance(error, GeneratorExit) or any(
        kind.__name__ in _CANCELLED for kind in type(error).__mro__
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """By its name: torch's own has had several homes."""
    return any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def _labels(operation: str, function: str | None) -> Labels:
    labels: Labels = {signals.OPERATION.name: operation}
    if function is not None:
        labels[signals.FUNCTION.name] = function
    return labels


class _Series:
    """The labels of one target's metrics, made once."""

    __slots__ = ("by_exclusive", "is_other", "labels", "zeroed")

    def __init__(self, operation: str, function: str | None) -> None:
        self.labels = _labels(operation, function)
        exclusive = signals.EXCLUSIVE.name
        self.by_exclusive: Mapping[bool | None, Labels] = {
            None: self.labels,
            True: {**self.labels, exclusive: True},
            False: {**self.labels, exclusive: False},
        }
        self.zeroed = False
        self.is_other = False


class Probe(Window):
    """The handle of one call. ``stop``, ``fail`` and ``abandon`` are its only exits; the first one counts."""

    __slots__ = (
        "after",
        "before",
        "began",
        "calls",
        "context",
        "ended",
        "ended_at",
        "inputs",
        "measured",
        "recording",
        "span",
        "token",
    )

    def __init__(self, calls: Calls, span: Span, recording: bool) -> None:
        self.calls = calls
        self.span = span
        self.recording = recording
        self.open = True
        self.measured = False
        self.inputs = NO_INPUTS
        self.outer = self.inner = self.before = self.context = self.token = None
        self.beside = self.most = 0
        self.began = 0.0

    # plain slots: each one that is set for nothing is paid for by every request
    measured: bool
    """Whether it has a window, and readings; else its span is only kept current."""
    before: RawReadings | None
    """Of what is measured; None where nobody could read."""
    inputs: Inputs
    began: float
    """By ``monotonic``; 0 until it has begun."""
    context: Any
    token: Token[Context] | None
    # from its end on, and not before
    after: RawReadings | None
    ended: float
    """By ``monotonic``, of what is measured."""
    ended_at: int
    """By ``time_ns``."""

    @property
    def series(self) -> _Series:
        """The labels of its metrics."""
        return self.calls.series

    def enter(self) -> None:
        """Make the call's context current on this thread or task, while it is open."""
        if self.open:
            self.token = _context.set(self.context)

    def leave(self) -> None:
        """Make the caller's context current again, and keep the call's as it is now for the next step."""
        token = self.token
        if token is None:
            return
        self.token = None
        current = _context.get()
        try:
            _context.reset(token)
            self.context = current
        except ValueError:  # left on another thread or task than entered: that one's context ends with it
            pass
        requests = self.calls.requests
        if not requests.watches_streams:
            requests.watch_streams()

    def stop(self, result: object = None) -> None:
        """The call has returned. All in line: it is on the path of every request."""
        token, calls = self.token, self.calls
        requests = calls.requests
        try:
            if token is not None:
                self.token = None
                try:  # noqa: SIM105 - costs nothing
                    _context.reset(token)
                except ValueError:  # as in `leave`
                    pass
            if not self.open:
                return
            self.open = False
            self.ended_at = time_ns()
            if self.measured:
                self.ended = ended = monotonic()
                try:  # as at its begin
                    sampler = calls.sampler
                    only = sampler.only
                    if only is None or ended > sampler.look_again:
                        self.after = sampler.request_readings(ended)
                    else:
                        index, read = only
                        statistics = read(index)
                        if statistics["num_device_alloc"] > statistics["segment"]["all"]["allocated"]:
                            self.after = sampler.request_readings(ended)
                        else:
                            sampler.last[index] = reading = index, ended, statistics
                            self.after = (reading,)
                except Exception as error:
                    self.after = None
                    requests.fault(calls.target, error)
            elif not self.recording:
                return
            thread, telling, windows, concurrent = get_ident(), requests.telling, calls.windows, 0
        except BaseException:  # of a signal handler
            self._interrupted(token)
            raise
        if not calls.plain or not self.measured or thread in telling:
            requests.finish(self, None, result)
            return
        # what follows is `finish` for a call that left nothing new, as those of a server do that is warm
        try:
            try:
                telling.add(thread)
                with windows.lock:
                    opened = windows.opened
                    if windows.counts or len(opened) > 1 or self not in opened:
                        concurrent = windows.close(self)
                    else:  # in line what it does of one that was alone
                        del opened[self]
                        windows.count = 0
                        concurrent = 1
                span, recording = self.span, self.recording
                told = steady(self.before, self.after, concurrent, recording, self.inputs)
                if told is None:
                    requests.tell(self, concurrent, None, result)
                else:
                    if recording:
                        span.set_attributes(told)
                    if requests.metered and not requests.closed:
                        labels, context = calls.exclusive if concurrent == 1 else calls.shared, self.context
                        requests.record_duration(self.ended - self.began, labels, context)
                        requests.record_growth(0, labels, _NO_SPAN)
                        if concurrent == 1:
                            requests.record_peak(0, labels, _NO_SPAN)
            finally:
                if not concurrent:
                    windows.close(self)
                if calls.new:
                    self.span.end(self.ended_at)
        except Exception as fault:  # a span processor of the user's may raise too
            requests.fault(calls.target, fault)
        finally:
            telling.discard(thread)
            self.before = self.after = self.context = None  # a context that somebody keeps holds its probe
            if requests.closed:
                requests.wake()

    def fail(self, error: BaseException) -> None:
        """The call has raised; a ``GeneratorExit`` means that a stream was given up."""
        if isinstance(error, GeneratorExit):
            self.abandon()
        elif self._over():
            self.calls.requests.finish(self, error, None)

    def abandon(self, error: BaseException | None = None) -> None:
        """The call was given up in a finalizer, perhaps in the middle of the SDK on this very thread:
        take no lock, record nothing, end nothing; that is left to another thread. ``error`` is what came of
        it."""
        if self._over():
            if isinstance(
                error, GeneratorExit
            ):  # it says no more, and its traceback keeps the stream's frame
                error = None
            self.calls.requests.abandon(self, error)

    def _over(self) -> bool:
        """Make the caller's context current again and take the readings after; False if there is nothing
        more to be told."""
        token = self.token
        try:
            if token is not None:
                self.token = None
                try:  # noqa: SIM105 - costs nothing
                    _context.reset(token)
                except ValueError:  # as in `leave`
                    pass
            if not self.open:
                return False
            self.open = False
            self.ended_at = time_ns()
            if not self.measured:
                return self.recording
            self.ended = ended = monotonic()
            try:
                self.after = self.calls.sampler.request_readings(ended)
            except Exception as error:
                self.after = None
                self.calls.requests.fault(self.calls.target, error)
        except BaseException:  # of a signal handler
            self._interrupted(token)
            raise
        return True

    def interrupted_at_its_begin(self, outside: Any) -> None:
        """A signal handler has raised before the user's call began; ``outside`` is the caller's context."""
        self.began = self.began or monotonic()
        if self.token is None and self.context is not None and _context.get() is self.context:
            _context.set(outside)  # between the setting of it and the keeping of its token

    def _interrupted(self, token: Token[Context] | None) -> None:
        self.open = False
        self.after, self.ended, self.ended_at = None, monotonic(), time_ns()
        with suppress(ValueError, RuntimeError):  # it was reset
            if token is not None:
                _context.reset(token)
        if self.measured or self.recording:
            self.calls.requests.abandon(self)


class Guard:
    """Held by a stream alone: gone with it, it gives up the call of one that nobody started, or whose loop
    has closed."""

    __slots__ = ("probe",)

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def __del__(self) -> None:
        probe = getattr(self, "probe", None)  # not even that, where a signal handler has raised in between
        if probe is not None and probe.open:
            probe.abandon()
