# SPDX-License-Identifier: Apache-2.0
"""One handle for each measured call: ``begin`` -> ``stop``, ``fail`` or ``abandon``.

Two readings and arithmetic on the caller's thread, then a span and four records. A fault of ours never
reaches the caller: each entry guards itself once, as a whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import Token
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import get_ident, main_thread
from time import perf_counter, time_ns
from traceback import walk_tb
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import trace
from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,  # pyright: ignore[reportPrivateUsage] - as instrumentation.utils has it
    Context,
    attach,
    create_key,
    get_current,
)
from opentelemetry.metrics import _internal as metrics_api
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode

from .. import signals
from ..allocator.reading import AllocatorReading
from ..allocator.sampler import Sampler
from ..allocator.windows import NOTHING_KNOWN, Change, OpenWindows, Window, change, followed, total
from ..telemetry import OwnTelemetry
from .shapes import described

Labels = dict[str, str | bool]
Hook = Callable[..., object]
Readings = Sequence[AllocatorReading]
Records = Mapping[str, Any]
"""The synchronous instruments by the names of their rows."""

_WINDOW = create_key("torchmem-window")
(_SPAN,) = trace.set_span_in_context(INVALID_SPAN, Context())  # two marks in one copy of a context
_SUPPRESSED = "suppress_instrumentation"
_NO_KEYWORDS: Mapping[str, Any] = {}
_NOTHING: dict[str, Any] = {}

# the keys of a span's attributes: each look at a row takes its time on the path of every request
_DEVICES = signals.DEVICES.name
_CONCURRENT = signals.CONCURRENT.name
_EXCLUSIVE = signals.EXCLUSIVE.name
_RESERVED_BEFORE = signals.RESERVED_BEFORE.name
_RESERVED_DELTA = signals.RESERVED_DELTA.name
_RESERVED_BY_DEVICE = signals.RESERVED_BY_DEVICE.name
_ALLOCATED_BEFORE = signals.ALLOCATED_BEFORE.name
_ALLOCATED_DELTA = signals.ALLOCATED_DELTA.name
_ALLOCATED_BY_DEVICE = signals.ALLOCATED_BY_DEVICE.name
_PEAK_GROWTH = signals.PEAK_GROWTH.name
_RETRIES = signals.RETRIES.name
_OOMS = signals.OOMS.name
_DEVICE_ALLOCATIONS = signals.DEVICE_ALLOCATIONS.name
_DEVICE_SYNCS = signals.DEVICE_SYNCS.name
_TURNOVER = signals.TURNOVER.name
_FRAGMENTATION = signals.FRAGMENTATION.name
_SHAPES = signals.SHAPES.name
_DTYPES = signals.DTYPES.name

MAX_TARGETS = 200
"""Label sets of targets; what comes later counts under the operation ``other``."""


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
        request_hook: Hook | None = None,
        response_hook: Hook | None = None,
        out_of_memory: Callable[[float, Readings, Readings, Span, Context], object] | None = None,
        grown: Callable[[Readings, Sequence[Change], int], object] | None = None,
    ) -> None:
        self.telemetry = telemetry
        self._grown = grown
        self._out_of_memory = out_of_memory
        self._in_flight: dict[Window, tuple[float, Readings]] = {}
        self._tracer = tracer
        self.sampler = sampler
        self.windows = windows
        self._duration, self._reserved_growth, self._peak_growth, self._retries = (
            records[row.name] for row in signals.REQUEST_METRICS
        )
        self._awake = awake
        self._traced = self._metered = False
        self._seen: tuple[object, object] | None = None
        self._request_hook = request_hook
        self._response_hook = response_hook
        self._closed = False
        self._abandoned: SimpleQueue[tuple[Probe, BaseException | None] | None] = SimpleQueue()
        self._telling: set[int] = set()
        """The threads within ``finish``."""
        self._recording = threading.RLock()  # reentrant: a signal handler may end a request within one
        self._series: dict[tuple[str, str | None], _Series] = {}
        self._enriched: WeakKeyDictionary[Span, _Story] = WeakKeyDictionary()

    def begin_anew(self) -> None:
        """In a forked child: the parent's locks may be held, and its requests are not this process's."""
        self._recording = threading.RLock()
        self._abandoned = SimpleQueue()
        self._telling = set()
        for series in self._series.values():
            series.zeroed = False

    def begin(
        self,
        target: Target,
        name: str | Callable[[Sequence[Any]], str],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] = _NO_KEYWORDS,
    ) -> Probe | None:
        """A probe of a call that starts now, its context attached; None where nothing is wanted.

        ``name`` is the span's, or makes it from the arguments. Never raises.
        """
        probe = None
        try:
            if self._closed:
                return None
            traced, metered = self._traced, self._metered
            if not (traced and metered):
                providers = _providers_set()
                if providers != self._seen:
                    self._seen = providers
                    traced, metered = self._traced, self._metered = self._awake()
                if not (traced or metered):
                    return None
            context = get_current()
            outer: Any = None
            if context:
                if context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get(_SUPPRESSED):
                    return None
                outer = context.get(_WINDOW)
                if outer is not None:
                    outer = outer.still_open()
                    if outer is not None and not target.nested:
                        return None
            mode = target.span
            series = self._series.get((target.operation, target.function)) or self.series(target)
            span = INVALID_SPAN
            if traced and mode != "off":
                if mode == "new":
                    if not isinstance(name, str):
                        name = name(arguments)
                    span = self._tracer.start_span(name, context, attributes=series.labels)
                else:
                    span = trace.get_current_span(context)
            recording = span.is_recording()
            if not recording and not metered:
                if mode != "new" or _SPAN in context:
                    return None  # what comes under the dropped parent is dropped as well
                probe = Probe(self, target, series, span, Context(context | {_SPAN: span}))
                probe.token = attach(probe.context)
                return probe
            if not self._abandoned.empty():
                self.drain()
            probe = Probe(self, target, series, span, context)
            if recording:
                probe.recording = True
                self._describe(probe, arguments, keywords)
            probe.window = window = self.windows.open(series, outer)
            # the window, not the probe: one in its own context would only be seen dropped by the collector
            marks: dict[str, Any] = {_SPAN: span, _WINDOW: window} if mode == "new" else {_WINDOW: window}
            probe.context = context = Context(context | marks)
            try:
                probe.before = self.sampler.request_readings()
            except Exception as error:
                self.fault(target, error)
            probe.began = began = perf_counter()
            self._in_flight[window] = began, probe.before
            probe.token = attach(context)
            if recording and self._request_hook is not None:
                self._hook(self._request_hook, "request_hook", span, target.operation, arguments, keywords)
            return probe
        except Exception as error:
            if probe is not None:
                probe.stop()
            self.fault(target, error)
            return None
        except BaseException:  # of a signal handler
            if probe is not None:
                probe.abandon()
            raise

    def series(self, target: Target) -> _Series:
        """The label set of a target; of ``other`` beyond ``MAX_TARGETS``."""
        key = (target.operation, target.function)
        known = self._series.get(key)
        if known is not None:
            return known
        if len(self._series) >= MAX_TARGETS:
            self.telemetry.skip("overflow")
            key = ("other", None)
        return self._series.setdefault(key, _Series(*key))

    def active(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each target's requests in flight, with its labels."""
        counts = self.windows.by_key
        return [(counts.get(series, 0), series.labels) for series in tuple(self._series.values())]

    def in_flight(self) -> list[tuple[str, float, Readings]]:
        """The operation of each request in flight, when it began by ``perf_counter``, and the readings then;
        not of those nested in another."""
        return [
            (window.key.operation, *began)
            for window, began in tuple(self._in_flight.items())
            if window.outer is None and isinstance(window.key, _Series)
        ]

    def before_collection(self) -> None:
        """What each collection needs of us: ended streams ended, and counters that start at 0."""
        self.drain()
        if not (self._metered or self._awake()[1]):
            return
        for series in tuple(self._series.values()):
            if series.zeroed:
                continue
            with self._recording:
                if not self._closed:
                    series.zeroed = True
                    self._retries.add(0, series.labels)  # a first retry must be an increase

    def drain(self) -> None:
        """Finish what was abandoned in a finalizer, where nothing may be recorded or locked."""
        while get_ident() not in self._telling:
            try:
                abandoned = self._abandoned.get_nowait()
            except Empty:
                return
            if abandoned is not None:
                self.finish(*abandoned, None)

    def abandoned(self, probe: Probe) -> None:
        """Take a probe from a finalizer: takes no lock that this thread may hold already."""
        self._abandoned.put((probe, None))

    def close(self) -> None:
        """Measure nothing that begins from now on; the spans of what is in flight end as they would have."""
        with self._recording:  # what is being recorded now comes before the end, the rest not at all
            self._closed = True
        self.drain()
        if self.windows.any_open:
            try:
                threading.Thread(
                    target=self._wait_for_the_last, name="torchmem-in-flight", daemon=True
                ).start()
            except RuntimeError as error:  # the interpreter ends
                self.telemetry.say_once("in flight", "torchmem: streams in flight may not end: %r", error)

    def _wait_for_the_last(self) -> None:
        """Finish the streams that are given up from now on: no call and no collection comes to do it."""
        while self.windows.any_open:
            abandoned = self._abandoned.get()
            if abandoned is not None:
                self.finish(*abandoned, None)

    def finish(self, probe: Probe, error: BaseException | None, result: object) -> None:
        """The end of a call, once: its span told and ended, its metrics recorded. Never raises."""
        thread, inner = get_ident(), True
        try:
            inner = thread in self._telling
            if inner:  # a signal handler's, within the SDK, whose locks are not reentrant
                self._abandoned.put((probe, error))
                return
            self._telling.add(thread)
            try:
                if probe.window is not None:
                    self._tell(probe, probe.window, error, result)
            finally:
                if probe.target.span == "new":
                    probe.span.end(probe.ended_at)
        except Exception as fault:  # a span processor of the user's may raise too
            self.fault(probe.target, fault)
        finally:
            if not inner:
                if probe.window is not None and probe.window.counted:  # a signal's exception came between
                    self.windows.close(probe.window)
                self._telling.discard(thread)
        if self._closed:
            self._abandoned.put(None)  # wakes who waits for the last one

    def _tell(self, probe: Probe, window: Window, error: BaseException | None, result: object) -> None:
        target, span = probe.target, probe.span
        if error is not None and self._out_of_memory is not None and _is_out_of_memory(error):
            self._out_of_memory(probe.began, probe.before, probe.after, probe.span, probe.context)
        self._in_flight.pop(window, None)
        concurrent = self.windows.close(window)
        before, after = probe.before, probe.after
        if len(before) == 1 == len(after) and before[0].device == after[0].device:
            whole = change(before[0], after[0])
            changes = [whole]
        else:
            changes, after = _changes(before, after)
            whole = total(changes) if changes else NOTHING_KNOWN
        if self._grown is not None and ((whole.reserved_delta or 0) > 0 or whole.peak_growth):
            self._grown(after, changes, concurrent)
        failure = None if error is None or not isinstance(error, Exception) else type(error).__qualname__
        if probe.recording and span.is_recording():
            names = [reading.name for reading in after]
            if target.span == "enrich":
                self._enrich(span, _Story(names, changes, whole, concurrent), probe.described)
            else:
                attributes = _attributes(names, changes, whole, concurrent)
                attributes.update(probe.described)
                if failure is not None:
                    attributes[signals.ERROR_TYPE.name] = failure
                span.set_attributes(attributes)
            if self._response_hook is not None:
                self._hook(self._response_hook, "response_hook", span, target.operation, result)
            if isinstance(error, Exception) and target.span == "new":
                self._tell_failure(target, span, error)
        if self._metered:
            with self._recording:
                if not self._closed:
                    self._record(probe, whole, concurrent == 1 if changes else None, failure)

    def _enrich(self, span: Span, story: _Story, described: dict[str, Any]) -> None:
        """Tell this call's story, added to those of earlier calls under the same span."""
        with self._recording:  # they may end at the same time
            known = self._enriched.get(span)
            self._enriched[span] = story = story if known is None else known.then(story)
            attributes = story.attributes()
            if known is not None:
                _take_back(span, known.attributes().keys() - attributes.keys())
            span.set_attributes(attributes | described)

    def _tell_failure(self, target: Target, span: Span, error: Exception) -> None:
        description = type(error).__qualname__
        try:
            span.record_exception(error)
            description = f"{description}: {error}"
        except Exception as fault:  # an exception of the user's that cannot be printed
            self.fault(target, fault, "what %s raised cannot be told: %r")
        span.set_status(Status(StatusCode.ERROR, description))

    def _record(self, probe: Probe, whole: Change, exclusive: bool | None, failure: str | None) -> None:
        series, context = probe.series, probe.context
        labels = series.by_exclusive[exclusive]
        timed = labels if failure is None else {**labels, signals.ERROR_TYPE.name: failure}
        self._duration.record(probe.ended - probe.began, timed, context)
        if whole.reserved_delta is not None:
            self._reserved_growth.record(max(0, whole.reserved_delta), labels, context)
        if exclusive and whole.peak_growth is not None:
            self._peak_growth.record(whole.peak_growth, labels, context)
        if whole.retries:
            self._retries.add(whole.retries, series.labels, context)

    def _describe(self, probe: Probe, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        try:
            shapes, dtypes = described(arguments, keywords)
        except Exception as error:  # the user's own mappings may raise; the call is measured still
            self.fault(probe.target, error, "the inputs of %s cannot be described: %r")
            return
        if shapes:
            told: dict[str, Any] = {_SHAPES: shapes, _DTYPES: dtypes}
            if self._request_hook is None:
                probe.described = told  # with the rest, at the end: a call of its own costs as much again
            else:
                probe.span.set_attributes(told)  # the hook may want to change them

    def _hook(self, hook: Hook, name: str, *arguments: object) -> None:
        try:
            hook(*arguments)
        except Exception as error:
            if _is_a_signal_handlers(error):
                raise
            self.telemetry.skip("hook")
            self.telemetry.say_once(name, "torchmem: %s %r raised and is passed over: %r", name, hook, error)

    def fault(
        self, target: Target, error: Exception, what: str = "a call of %s could not be measured: %r"
    ) -> None:
        """A fault of ours: counted, told once for each target and kind, and kept from the caller; what a
        signal handler of the user's raised meanwhile is none, and goes on to them."""
        if _is_a_signal_handlers(error):
            raise error
        self.telemetry.skip("request")
        self.telemetry.say_once(
            f"request {target} {type(error)} {what}",
            f"torchmem: {what}",
            target.function or target.operation,
            error,
        )


def _changes(
    before: Sequence[AllocatorReading], after: Sequence[AllocatorReading]
) -> tuple[list[Change], Sequence[AllocatorReading]]:
    """What changed on each device that was read before and after, and the later readings of those."""
    later = {reading.device: reading for reading in after}
    pairs = [(reading, later[reading.device]) for reading in before if reading.device in later]
    return [change(*pair) for pair in pairs], [reading for _, reading in pairs]


def _is_a_signal_handlers(error: Exception) -> bool:
    """Whether a signal handler has raised it, as timeouts do, wherever the main thread was."""
    if get_ident() != main_thread().ident:
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _take_back(span: Any, keys: Iterable[str]) -> None:
    """Take figures of earlier calls off a span, because a later call made them unknown.

    The API has no way to do that. Where the span is not the SDK's as it is known, they stay.
    """
    attributes: Any = getattr(span, "_attributes", None)
    for key in keys:
        with suppress(TypeError, KeyError):
            del attributes[key]


def _is_out_of_memory(error: BaseException) -> bool:
    """By its name: torch's own has had several homes."""
    return any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


class _Series:
    """The labels of one target's metrics, made once."""

    __slots__ = ("by_exclusive", "labels", "operation", "zeroed")

    def __init__(self, operation: str, function: str | None) -> None:
        self.operation = operation
        self.labels: Labels = {signals.OPERATION.name: operation}
        if function is not None:
            self.labels[signals.FUNCTION.name] = function
        exclusive = signals.EXCLUSIVE.name
        self.by_exclusive: Mapping[bool | None, Labels] = {
            None: self.labels,
            True: {**self.labels, exclusive: True},
            False: {**self.labels, exclusive: False},
        }
        self.zeroed = False


class Probe:
    """The handle of one call. ``stop``, ``fail`` and ``abandon`` are its only exits; the first one counts."""

    __slots__ = (
        "_requests",
        "after",
        "before",
        "began",
        "context",
        "described",
        "ended",
        "ended_at",
        "open",
        "recording",
        "series",
        "span",
        "target",
        "token",
        "window",
    )

    def __init__(
        self, requests: Requests, target: Target, series: _Series, span: Span, context: Context
    ) -> None:
        self._requests = requests
        self.target = target
        self.series = series
        self.span = span
        self.open = True
        self.recording = False
        self.window: Window | None = None
        self.before: Readings = ()
        self.after: Readings = ()
        self.ended_at: int | None = None
        self.began = self.ended = 0.0
        self.context = context
        self.described: dict[str, Any] = _NOTHING
        self.token: Token[Context] | None = None

    def enter(self) -> None:
        """Make the call's context current on this thread or task."""
        self.token = attach(self.context)

    def leave(self) -> None:
        """Make the caller's context current again, and keep the call's as it is now for the next step."""
        token = self.token
        if token is None:
            return
        self.token = None
        current = get_current()
        try:
            token.var.reset(token)
            self.context = current
        except ValueError:  # left on another thread or task than entered: that one's context ends with it
            pass

    def stop(self, result: object = None) -> None:
        """The call has returned."""
        if self._close():
            self._requests.finish(self, None, result)

    def fail(self, error: BaseException) -> None:
        """The call has raised; a ``GeneratorExit`` means that a stream was given up."""
        if isinstance(error, GeneratorExit):
            self.abandon()
        elif self._close():
            self._requests.finish(self, error, None)

    def abandon(self) -> None:
        """The call was given up in a finalizer, perhaps in the middle of the SDK on this very thread:
        take no lock, record nothing, end nothing; it is finished at the next call or collection."""
        if self._close():
            self._requests.abandoned(self)

    def _close(self) -> bool:
        """Make the caller's context current again and take the readings after; False if there is nothing
        more to be told."""
        if not self.open:
            return False
        token, window = self.token, self.window
        try:
            self.open = False
            if token is not None:
                self.token = None
                try:  # noqa: SIM105 - costs nothing
                    token.var.reset(token)
                except ValueError:  # as in `leave`
                    pass
            if window is None:
                return self.recording
            self.ended = perf_counter()
            self.ended_at = time_ns()
            window.open = False
            try:
                self.after = self._requests.sampler.request_readings()
            except Exception as error:
                self._requests.fault(self.target, error)
        except BaseException:  # of a signal handler
            if window is not None:
                window.open = False
            with suppress(ValueError, RuntimeError):  # it was reset
                if token is not None:
                    token.var.reset(token)
            self._requests.abandoned(self)
            raise
        return True

    def __del__(self) -> None:
        if getattr(self, "open", False):  # a stream that nobody started, or whose loop has closed
            self.abandon()


class _Story:
    """What a span says of one call, or of several under it."""

    __slots__ = ("changes", "concurrent", "devices", "whole")

    def __init__(self, devices: list[str], changes: list[Change], whole: Change, concurrent: int) -> None:
        self.devices = devices
        self.changes = changes
        self.whole = whole
        self.concurrent = concurrent

    def then(self, later: _Story) -> _Story:
        """Two calls one after another: what happened adds up, from the first one's start."""
        merged = {
            name: followed(self.changes[self.devices.index(name)], change_)
            if name in self.devices
            else change_
            for name, change_ in zip(later.devices, later.changes, strict=True)
        }
        for name, change_ in zip(self.devices, self.changes, strict=True):
            merged.setdefault(name, change_)
        changes = list(merged.values())
        whole = total(changes) if changes else NOTHING_KNOWN
        return _Story(list(merged), changes, whole, max(self.concurrent, later.concurrent))

    def attributes(self) -> dict[str, Any]:
        """The attributes of the span."""
        return _attributes(self.devices, self.changes, self.whole, self.concurrent)


def _attributes(
    names: Sequence[str], changes: Sequence[Change], whole: Change, concurrent: int
) -> dict[str, Any]:
    """What a span says; what cannot be known, or means nothing under overlap, is left out."""
    if not changes:
        return {}
    several = len(changes) > 1
    if several:
        touched = [i for i, each in enumerate(changes) if each.turnover or each.reserved_delta]
        if touched and len(touched) < len(changes):
            names, changes = [names[i] for i in touched], [changes[i] for i in touched]
            whole = total(changes)
    exclusive = concurrent == 1
    told: dict[str, Any] = {
        _DEVICES: ",".join(names),
        _CONCURRENT: concurrent,
        _EXCLUSIVE: exclusive,
        _RESERVED_BEFORE: whole.reserved_before,
        _RESERVED_DELTA: whole.reserved_delta,
        _ALLOCATED_BEFORE: whole.allocated_before,
        _RETRIES: whole.retries,
        _OOMS: whole.ooms,
        _DEVICE_ALLOCATIONS: whole.device_allocations,
        _DEVICE_SYNCS: whole.device_syncs,
        _TURNOVER: whole.turnover,
        _FRAGMENTATION: whole.fragmentation,
    }
    if exclusive:
        told[_ALLOCATED_DELTA] = whole.allocated_delta
        if whole.peak_growth:
            told[_PEAK_GROWTH] = whole.peak_growth
    if several:
        pairs = [(_RESERVED_BY_DEVICE, [each.reserved_delta for each in changes])]
        if exclusive:
            pairs.append((_ALLOCATED_BY_DEVICE, [each.allocated_delta for each in changes]))
        for key, deltas in pairs:
            if None not in deltas and len(set(deltas)) > 1:
                told[key] = [f"{name}={delta}" for name, delta in zip(names, deltas, strict=True)]
    if None in whole or not whole.reserved:
        return {key: value for key, value in told.items() if value is not None}
    return told
