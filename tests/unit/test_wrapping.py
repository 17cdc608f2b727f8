# SPDX-License-Identifier: Apache-2.0
"""What is wrapped is measured, and otherwise what it was."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import subprocess
import sys
import threading
import types
import typing
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import wrapt
from opentelemetry import context, trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from opentelemetry_instrumentation_torchmem.allocator.sampler import Sampler
from opentelemetry_instrumentation_torchmem.requests.probe import MAX_TARGETS, Target
from opentelemetry_instrumentation_torchmem.requests.wrapping import wrap, wrap_attribute


def plain(prompt: str, *more: int, limit: int = 3, **options: bool) -> Late:
    """Says what it does."""
    return (prompt, more, limit, options)


async def coroutine(prompt: str, limit: int = 3) -> Late:
    """Waits."""
    await asyncio.sleep(0)
    return (prompt, limit)


def generator(prompt: str, limit: int = 3):
    """Streams."""
    yield from (prompt, limit)


async def async_generator(prompt: str, limit: int = 3):
    """Streams and waits."""
    for each in (prompt, limit):
        await asyncio.sleep(0)
        yield each


class Late:
    """An annotation that is text until somebody asks."""


KINDS = [plain, coroutine, generator, async_generator]
PREDICATES = [
    inspect.isfunction,
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
    asyncio.iscoroutinefunction,
]


def run(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """What a function of any kind gives in the end."""

    async def settled(result: Any) -> tuple[Any, BaseException | None]:
        try:
            return ([each async for each in result] if inspect.isasyncgen(result) else await result), None
        except BaseException as error:  # before 3.11 the loop makes another CancelledError of one
            return None, error

    result = function(*arguments, **keywords)
    if inspect.isgenerator(result):
        return list(result)
    if inspect.isasyncgen(result) or inspect.iscoroutine(result):
        result, error = asyncio.run(settled(result))
        if error is not None:
            raise error
    return result


@pytest.mark.parametrize("function", KINDS)
def test_a_wrapped_function_looks_like_the_bare_one(measured, function):
    wrapped = measured.wrap(function)
    assert type(wrapped) is types.FunctionType
    for predicate in PREDICATES:
        assert predicate(wrapped) == predicate(function), predicate
    assert inspect.signature(wrapped) == inspect.signature(function)
    assert wrapped.__signature__ == inspect.signature(function)  # also for who does not follow __wrapped__
    assert inspect.getfullargspec(wrapped) == inspect.getfullargspec(function)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(wrapped, name) == getattr(function, name), name
    assert typing.get_type_hints(wrapped) == typing.get_type_hints(function)
    assert wrapped.__globals__ is function.__globals__
    assert inspect.unwrap(wrapped) is function


@pytest.mark.parametrize("function", KINDS)
def test_a_call_has_one_span_and_the_bare_result(measured, function):
    wrapped = measured.wrap(function)
    assert run(wrapped, "hello", limit=2) == run(function, "hello", limit=2)
    (span,) = measured.spans()
    assert (span.name, span.kind) == (function.__name__, trace.SpanKind.INTERNAL)
    assert span.attributes["code.function.name"] == f"{__name__}.{function.__name__}"
    assert [point.count for point in measured.points("torch.memory.request.duration")] == [1]


# what comes back


class Sequenced:
    """As tensors, lists and model outputs are."""

    def __iter__(self):
        return iter((1, 2))

    def __len__(self):
        return 2


def a_future() -> asyncio.Future[int]:
    return asyncio.new_event_loop().create_future()


@types.coroutine
def old_coroutine():
    got = yield "waiting"
    return got


@pytest.mark.parametrize(
    "make",
    [Sequenced, list, lambda: None, lambda: iter([1]), lambda: map(str, [1]), a_future, old_coroutine, range],
)
def test_what_is_no_stream_is_the_callers_own(measured, make):
    result = make(1) if make is range else make()
    assert measured.wrap(lambda: result, "get")() is result
    assert len(measured.spans()) == 1


@pytest.mark.parametrize("iterator", [False, True])
@pytest.mark.parametrize("function", [coroutine, generator, async_generator])
def test_a_stream_that_a_plain_function_returns_is_followed(measured, function, iterator):
    @functools.wraps(function)
    def decorated(*arguments: Any) -> Any:
        inside.append(trace.get_current_span().name)
        return function(*arguments)

    inside: list[str] = []
    before = context.get_current()
    result, bare = measured.wrap(decorated, iterator=iterator)("hello", 2), function("hello", 2)
    assert type(result) is type(bare)
    assert (result.__name__, result.__qualname__) == (bare.__name__, bare.__qualname__)
    run(lambda: bare)
    assert context.get_current() == before
    assert measured.spans() == []  # it has begun, and goes on
    assert run(lambda: result) == run(function, "hello", 2)
    assert inside == [function.__name__] == [span.name for span in measured.spans()]


def test_a_returned_stream_that_nobody_starts_has_ended_when_it_is_gone(measured):
    result = measured.wrap(lambda: generator("hello"), "generate")()
    assert measured.spans() == []
    del result
    assert [span.name for span in measured.spans()] == ["generate <lambda>"]


def test_a_coroutine_made_of_a_generator_can_still_be_awaited(measured):
    async def body() -> Any:
        return await wrapped()

    wrapped = measured.wrap(old_coroutine)
    running = body()
    assert running.send(None) == "waiting"
    with pytest.raises(StopIteration) as end:
        running.send(5)
    assert end.value.value == 5
    assert [span.name for span in measured.spans()] == ["old_coroutine"]


# iterators, on request


class Streamer:
    """As the streamers of transformers are."""

    def __init__(self, fail: bool = False):
        self.items = ["a", "b"]
        self.fail = fail
        self.inside: list[str] = []

    def __iter__(self):
        return self

    def __next__(self):
        self.inside.append(getattr(trace.get_current_span(), "name", None))
        if self.items:
            return self.items.pop(0)
        if self.fail:
            raise TimeoutError("queue is empty")
        raise StopIteration


class AsyncStreamer(Streamer):
    __iter__ = __next__ = None

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        try:
            return Streamer.__next__(self)
        except StopIteration:
            raise StopAsyncIteration from None


def test_an_iterator_is_followed_on_request(measured):
    bare = Streamer()
    result = measured.wrap(lambda: bare, "stream", iterator=True)()
    assert isinstance(result, Streamer)
    assert not isinstance(result, typing.AsyncIterable)  # else an ASGI server awaits it
    assert iter(result) is result
    assert next(result) == "a"
    assert trace.get_current_span() is trace.INVALID_SPAN
    result.note = "kept"
    assert bare.note == "kept"
    assert list(result) == ["b"]
    assert bare.inside == ["stream <lambda>"] * 3
    assert [span.name for span in measured.spans()] == ["stream <lambda>"]
    assert next(result, "over") == "over"
    assert bare.inside[-1] is None
    assert len(measured.spans()) == 1


def test_an_async_iterator_is_followed_on_request(measured):
    bare = AsyncStreamer()
    result = measured.wrap(lambda: bare, "stream", iterator=True)()
    assert isinstance(result, AsyncStreamer)

    async def body() -> list[str]:
        seen = []
        async for item in result:
            assert trace.get_current_span() is trace.INVALID_SPAN
            seen.append(item)
        return seen

    assert asyncio.run(body()) == ["a", "b"]
    assert bare.inside == ["stream <lambda>"] * 3
    assert len(measured.spans()) == 1


@pytest.mark.parametrize("kind", [Streamer, AsyncStreamer])
def test_an_iterator_that_fails_or_is_dropped_has_one_span(measured, kind):
    async def consume(result: Any) -> None:
        if kind is Streamer:
            list(result)
        else:
            [each async for each in result]

    failing = measured.wrap(lambda: kind(fail=True), "stream", iterator=True)()
    with pytest.raises(TimeoutError):
        asyncio.run(consume(failing))
    (span,) = measured.spans()
    assert span.attributes["error.type"] == "TimeoutError"
    dropped = measured.wrap(lambda: kind(), "stream", iterator=True)()
    assert len(measured.spans()) == 1
    del dropped
    assert [span.status.status_code.name for span in measured.spans()] == ["ERROR", "UNSET"]


class Opened(Streamer):
    """As the streams of clients are."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object):
        self.closed = True

    def close(self):
        self.closed = True


class AsyncOpened(AsyncStreamer):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_: object):
        self.closed = True

    async def aclose(self):
        self.closed = True


@pytest.mark.parametrize("by", ["a with", "close"])
def test_an_iterator_that_is_closed_has_ended_then(measured, by):
    bare = Opened()
    result = measured.wrap(lambda: bare, "stream", iterator=True)()
    if by == "a with":
        with result as stream:
            assert stream is result
            assert next(stream) == "a"
    else:
        assert next(result) == "a"
        result.close()
    assert bare.inside == ["stream <lambda>"]
    assert bare.closed
    assert [span.status.status_code.name for span in measured.spans()] == ["UNSET"]


@pytest.mark.parametrize("by", ["a with", "close"])
def test_an_async_iterator_that_is_closed_has_ended_then(measured, by):
    bare = AsyncOpened()
    result = measured.wrap(lambda: bare, "stream", iterator=True)()

    async def consume() -> None:
        if by == "a with":
            async with result as stream:
                assert stream is result
                assert await anext(stream) == "a"
        else:
            assert await anext(result) == "a"
            await result.aclose()

    asyncio.run(consume())
    assert bare.inside == ["stream <lambda>"]
    assert bare.closed
    assert [span.status.status_code.name for span in measured.spans()] == ["UNSET"]


def test_what_follows_an_iterator_can_do_no_more_than_it(measured):
    def attributes(thing: Any) -> set[str]:
        return {name for name in ("close", "aclose", "__anext__", "__next__") if hasattr(thing, name)}

    for bare in (Streamer(), AsyncOpened(), Opened()):
        result = measured.wrap(lambda bare=bare: bare, "stream", iterator=True)()
        assert attributes(result) == attributes(bare) | attributes(type(bare))


# iterators by their own steps


def measured_steps(measured: Any, kind: type) -> type:
    class Mine(kind):
        pass

    name = "__next__" if kind is Streamer else "__anext__"
    setattr(Mine, name, getattr(kind, name))
    wrap_attribute(Mine, name, Target(f"app.{name}", "stream"), measured.requests)
    return Mine


async def next_of(iterator: Any) -> Any:
    return next(iterator) if isinstance(iterator, Streamer) and iterator.__next__ else await anext(iterator)


async def all_of(iterator: Any) -> list[Any]:
    return list(iterator) if type(iterator).__next__ else [each async for each in iterator]


@pytest.mark.parametrize("kind", [Streamer, AsyncStreamer])
def test_the_steps_of_an_iterator_are_one_call(measured, kind):
    made = measured_steps(measured, kind)
    one, other = made(), made()

    async def consume() -> None:
        with measured.tracer.start_as_current_span("consumer"):
            assert await next_of(one) == "a"
            assert trace.get_current_span().name == "consumer"
            assert await all_of(other) == ["a", "b"]
            assert [span.name for span in measured.spans()] == ["stream Mine"]
            assert await all_of(one) == ["b"]
            one.items = ["again"]
            assert await all_of(one) == ["again"]

    asyncio.run(consume())
    assert one.inside == ["stream Mine"] * 5
    *ours, consumer = measured.spans()
    assert [span.parent.span_id for span in ours] == [consumer.context.span_id] * 3


@pytest.mark.parametrize("kind", [Streamer, AsyncStreamer])
def test_steps_that_fail_or_are_given_up_are_one_call(measured, kind):
    made = measured_steps(measured, kind)
    with pytest.raises(TimeoutError):
        asyncio.run(all_of(made(fail=True)))
    given_up = made()
    asyncio.run(next_of(given_up))
    assert len(measured.spans()) == 1
    del given_up
    assert [span.attributes.get("error.type") for span in measured.spans()] == ["TimeoutError", None]


def test_an_iterator_that_threads_share_leaves_no_context_behind(measured):
    ready, go = threading.Barrier(2), threading.Event()

    class Slow(Streamer):
        def __next__(self):
            ready.wait(10)
            go.wait(10)
            return "a"

    iterator = Slow()
    result = measured.wrap(lambda: iterator, "stream", iterator=True)()
    seen: list[Any] = []

    def consume() -> None:
        next(result)
        seen.append(trace.get_current_span())

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert seen == [trace.INVALID_SPAN] * 2


def test_an_iterator_that_cannot_be_known_to_be_gone_is_refused(measured):
    class Slotted:
        __slots__ = ("items",)

        def __next__(self):
            return 1

    with pytest.raises(TypeError, match="__weakref__ is not in its __slots__"):
        wrap_attribute(Slotted, "__next__", Target("app.next", "next"), measured.requests)


# exceptions


class Stopped(BaseException):
    """As some packages' timeouts are."""


class Cancelled(BaseException):
    """As trio's is called."""


NO_FAILURES = (GeneratorExit, asyncio.CancelledError, Cancelled)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"), MemoryError(), KeyboardInterrupt(), SystemExit(3), Stopped("now"),
        GeneratorExit(), asyncio.CancelledError(), Cancelled(),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["plain", "coroutine", "generator", "async_generator"])
def test_an_exception_travels_on_unchanged(measured, kind, error):
    def plain():
        raise error from cause

    async def coroutine():
        plain()

    def generator():
        yield 1
        plain()

    async def async_generator():
        yield 1
        plain()

    cause = RuntimeError("the cause")
    with pytest.raises(type(error)) as caught:
        run(measured.wrap(locals()[kind]))
    assert caught.value is error
    assert caught.value.__cause__ is cause
    assert caught.value.__context__ is None
    names = [frame.name for frame in caught.traceback]
    assert names[-1] == "plain"
    (span,) = measured.spans()
    failed = not isinstance(error, NO_FAILURES)
    assert span.status.status_code.name == ("ERROR" if failed else "UNSET")
    assert span.attributes.get("error.type") == (type(error).__qualname__ if failed else None)
    assert len(span.events) == failed
    assert span.attributes.get("error.type") == (type(error).__name__ if failed else None)
    assert len(span.events) == failed


# faults of ours


class FailingProcessor(SpanProcessor):
    def __init__(self, at: str):
        self.at = at

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.at == "start":
            raise RuntimeError("on_start")

    def on_end(self, span: Any) -> None:
        if self.at == "end":
            raise RuntimeError("on_end")


class Unreadable(Mapping):
    def __getitem__(self, key):
        raise RuntimeError("getitem")

    def __iter__(self):
        raise RuntimeError("iter")

    def __len__(self):
        return 1


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("str")


def failing(*_: Any) -> Any:
    raise RuntimeError("ours")


FAULTS = {
    "nothing": ({}, None),
    "the tracer": ({"tracer": types.SimpleNamespace(start_span=failing)}, "request"),
    "a processor at the start": ({"processor": "start"}, "request"),
    "a processor at the end": ({"processor": "end"}, "request"),
    "the request hook": ({"request_hook": failing}, "hook"),
    "the response hook": ({"response_hook": failing}, "hook"),
    "the name": ({"name": failing}, "request"),
    "an argument": ({"argument": Unreadable()}, "request"),
    "a record": ({"record": True}, "request"),
    "a reading": ({"readings": True}, "request"),
}


def faulty(measured: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any, str | None]:
    """Requests with a fault, an argument and a name for the call, and the reason it is counted under."""
    options, reason = FAULTS[fault]
    requests = measured.make(
        **{key: options[key] for key in ("tracer", "request_hook", "response_hook") if key in options}
    )
    if "processor" in options:
        measured.tracers.add_span_processor(FailingProcessor(options["processor"]))
    if "record" in options:
        monkeypatch.setattr(requests, "_record", failing)
    if "readings" in options:
        monkeypatch.setattr(Sampler, "request_readings", failing)
    if "argument" in options:
        pytest.importorskip("torch")  # without it no argument is looked at
    return requests, options.get("argument", "hello"), options.get("name"), reason


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("function", KINDS)
def test_no_fault_of_ours_reaches_the_call(measured, function, fault, monkeypatch, caplog):
    requests, argument, name, reason = faulty(measured, fault, monkeypatch)
    calls: list[Any] = []

    @functools.wraps(function)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **keywords)

    before = context.get_current()
    wrapped = wrap(counted, Target("app.counted", "counted"), requests, name)
    assert run(wrapped, argument, limit=2) == run(function, argument, limit=2)
    assert run(wrapped, argument, limit=2) == run(function, argument, limit=2)
    assert calls == [(argument,)] * 2
    assert context.get_current() == before
    skipped = {reason: count for reason, count in measured.telemetry.skipped.items() if count}
    assert list(skipped) == ([reason] if reason else [])
    ours = [
        record
        for record in caplog.records
        if record.name.startswith("opentelemetry_instrumentation_torchmem")
    ]
    assert len([record for record in ours if record.levelname == "WARNING"]) == len(skipped)  # told once


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_ours_replaces_the_calls_own_exception(measured, fault, monkeypatch):
    requests, *_ = faulty(measured, fault, monkeypatch)
    error = Unspeakable()

    def function() -> None:
        raise error

    with pytest.raises(Unspeakable) as caught:
        wrap(function, Target("app.function", "function"), requests)()
    assert caught.value is error
    assert trace.get_current_span() is trace.INVALID_SPAN


# passing straight through


@pytest.mark.parametrize("function", KINDS)
def test_a_hook_that_changes_what_it_is_given_does_not_change_the_call(measured, function):
    def hook(span, operation, arguments, keywords):
        keywords["limit"] = 0
        keywords["unknown"] = True

    requests = measured.make(request_hook=hook)
    wrapped = wrap(function, Target(None, "hooked"), requests)
    assert run(wrapped, "hello", limit=2) == run(function, "hello", limit=2)
    assert [span.name for span in measured.spans()] == [f"hooked {function.__name__}"]


def test_what_a_response_hook_calls_is_not_measured(measured):
    called = []

    def hook(span, operation, result):
        called.append(operation)
        inner("from the hook")
        inner_nested("from the hook")

    requests = measured.make(response_hook=hook)
    inner = wrap(plain, Target(None, "inner"), requests)
    inner_nested = wrap(plain, Target(None, "inner", nested=True), requests)
    outer = wrap(plain, Target(None, "outer"), requests)
    nested = wrap(plain, Target(None, "nested", nested=True), requests)
    for function in (outer, nested):
        function("hello")
    for _ in range(3):
        requests.drain()
    assert called == ["outer", "nested"]
    assert [span.attributes["torch.operation"] for span in measured.spans()] == called
    assert not requests.windows.any_open


def test_beyond_the_cap_of_targets_spans_keep_their_names_and_each_request_is_counted(measured):
    wrapped = [
        wrap(plain, Target(f"app.{number}", f"operation {number}"), measured.requests)
        for number in range(MAX_TARGETS + 3)
    ]
    for function in (*wrapped, wrapped[-1]):
        function("hello")
    last = measured.spans()[-1].attributes
    assert (last["torch.operation"], last["code.function.name"]) == (
        f"operation {MAX_TARGETS + 2}",
        f"app.{MAX_TARGETS + 2}",
    )
    counted = {
        point.attributes["torch.operation"]: point.count
        for point in measured.points("torch.memory.request.duration")
    }
    assert len(counted) == MAX_TARGETS + 1
    assert counted["other"] == 4
    skipped = {
        point.attributes["torch.memory.telemetry.reason"]: point.value
        for point in measured.points("torch.memory.telemetry.skipped")
    }
    assert skipped["overflow"] == 4


def test_what_is_inside_a_measured_call_counts_once_unless_asked_for(measured):
    inner = measured.wrap(lambda: 1, "inner")
    asked_for = measured.wrap(lambda: 2, "asked_for", nested=True)
    assert measured.wrap(lambda: (inner(), asked_for()), "outer")() == (1, 2)
    names = [span.name.split()[0] for span in measured.spans()]
    assert names == ["asked_for", "outer"]


@pytest.mark.parametrize("state", ["suppressed", "uninstrumented", "asleep"])
@pytest.mark.parametrize("function", KINDS)
def test_a_call_passes_straight_through(measured, function, state):
    wrapped = measured.wrap(function)
    measured.awake = (False, False) if state == "asleep" else (True, True)
    if state == "uninstrumented":
        measured.requests.close()
    token = context.attach(context.set_value("suppress_instrumentation", state == "suppressed"))
    assert run(wrapped, "hello") == run(function, "hello")
    context.detach(token)
    assert measured.spans() == []
    assert measured.points("torch.memory.request.duration") == []


def test_what_is_in_flight_ends_as_it_would_have(measured):
    running = measured.wrap(generator)("hello", 2)
    next(running)
    measured.requests.close()
    assert list(running) == [2]
    assert [span.name for span in measured.spans()] == ["generator"]
    assert list(measured.wrap(generator)("hello", 2)) == ["hello", 2]
    assert len(measured.spans()) == 1


def test_what_is_sampled_out_keeps_its_children_out(measured):
    measured.tracers.sampler = ALWAYS_OFF
    inside: list[Any] = []
    tracer = measured.tracers.get_tracer("sampled out")
    requests = measured.make(tracer=tracer)
    measured.awake = (True, False)
    wrapped = wrap(lambda: inside.append(trace.get_current_span()), Target("app.get", "get"), requests, "get")
    wrapped()
    assert inside[0].get_span_context().is_valid
    assert not inside[0].is_recording()
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_threads_do_not_see_each_other(measured):
    barrier = threading.Barrier(4)

    def work(number: int) -> tuple[int, int]:
        barrier.wait(10)
        return number, trace.get_current_span().get_span_context().span_id

    wrapped = measured.wrap(work)
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: seen.append(wrapped(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number for number, _ in seen} == set(range(4))
    assert {span_id for _, span_id in seen} == {span.context.span_id for span in measured.spans()}


# attributes


class Engine:
    def generate(self, prompt):
        return (self, prompt)

    @staticmethod
    def fixed(prompt):
        return prompt

    @classmethod
    def built(cls, prompt):
        return (cls, prompt)

    async def stream(self, prompt):
        yield (self, prompt)

    @property
    def size(self):
        return 7

    @functools.cached_property
    def weight(self):
        return 8

    class Part:
        pass

    number = 3
    handler = functools.partial(lambda prompt: ("handled", prompt))
    counted = len
    foreign = wrapt.FunctionWrapper(
        lambda self, prompt: (self, prompt),
        lambda wrapped, instance, args, kwargs: ("foreign", instance, *wrapped(*args, **kwargs)),
    )


class Small(Engine):
    pass


METHODS = ["generate", "fixed", "built", "stream", "counted", "foreign"]


def outcomes(cls: type[Engine]) -> list[Any]:
    engine = cls()
    results = [run(getattr(engine, name), "hello") for name in METHODS] + [
        run(cls.fixed, "hello"),
        run(cls.built, "hello"),
        run(cls.generate, engine, "hello"),
    ]
    return [
        tuple("self" if each is engine else each for each in result)
        if isinstance(result, tuple)
        else [tuple("self" if each is engine else each for each in item) for item in result]
        if isinstance(result, list)
        else result
        for result in results
    ]


def patched(owner: Any, name: str, requests: Any, **options: Any) -> Any:
    return wrap_attribute(owner, name, Target(f"app.{name}", name, **options), requests)


@pytest.mark.parametrize("owner", [Engine, Small], ids=["its own", "inherited"])
def test_methods_stay_what_they_are_and_come_back(measured, owner):
    before = {cls: dict(vars(cls)) for cls in (Engine, Small)}
    bare = outcomes(Engine), outcomes(Small)
    undo = [patched(owner, name, measured.requests) for name in METHODS]
    for name in METHODS:
        kind = type(before[Engine][name])
        kind = kind if kind in (staticmethod, classmethod) else types.FunctionType
        assert type(vars(owner)[name]) is (staticmethod if name == "counted" else kind)
    assert (outcomes(Engine), outcomes(Small)) == bare
    calls = 2 * len(bare[0]) if owner is Engine else len(bare[0])
    spans = measured.spans()
    assert len(spans) == calls
    assert {span.name for span in spans if span.attributes["torch.operation"] in ("generate", "built")} == (
        {"generate Engine", "built Engine", "generate Small", "built Small"}
        if owner is Engine
        else {"generate Small", "built Small"}
    )
    for each in undo:
        each()
    for cls, entries in before.items():
        assert list(vars(cls)) == list(entries)
        assert all(vars(cls)[name] is entries[name] for name in METHODS if name in entries)
    assert (outcomes(Engine), outcomes(Small)) == bare
    assert len(measured.spans()) == calls


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("size", "size is a property: only functions and methods are measured"),
        ("weight", "weight is a cached_property: only"),
        ("number", "number is a int: only"),
        ("Part", "Part is a type: only"),
        ("handler", "handler is a partial: only"),  # whether it is bound depends on the release
    ],
)
def test_what_is_not_called_is_refused(measured, name, said):
    entry = vars(Engine)[name]
    with pytest.raises(TypeError, match=f"Engine.{said}"):
        patched(Engine, name, measured.requests)
    with pytest.raises(TypeError, match=f"Small.{said}"):
        patched(Small, name, measured.requests)
    assert vars(Engine)[name] is entry
    assert name not in vars(Small)


def test_what_is_not_there_or_cannot_change_is_refused(measured):
    with pytest.raises(AttributeError, match=r"Engine has no missing"):
        patched(Engine, "missing", measured.requests)
    with pytest.raises(AttributeError, match=r"Engine has no mro"):  # its metaclass has
        patched(Engine, "mro", measured.requests)
    with pytest.raises(TypeError, match="immutable type"):
        patched(list, "append", measured.requests)


def test_a_function_of_a_module_is_measured_and_comes_back(measured):
    module = types.ModuleType("app")
    module.generate = plain
    undo = patched(module, "generate", measured.requests)
    assert module.generate("hello") == plain("hello")
    assert [span.name for span in measured.spans()] == ["generate plain"]
    undo()
    assert module.generate is plain


def test_a_lazy_module_is_lazy_again(measured):
    module = types.ModuleType("app")
    module.__getattr__ = lambda name: plain
    undo = patched(module, "generate", measured.requests)
    assert module.generate("hello") == plain("hello")
    assert len(measured.spans()) == 1
    undo()
    assert "generate" not in vars(module)
    assert module.generate is plain


def test_what_is_measured_already_is_not_measured_twice(measured):
    undo = patched(Engine, "generate", measured.requests)
    ours = vars(Engine)["generate"]
    again = patched(Engine, "generate", measured.requests, nested=True)
    assert vars(Engine)["generate"] is ours
    Engine().generate("hello")
    assert len(measured.spans()) == 1
    again()
    assert vars(Engine)["generate"] is ours
    undo()
    undo()
    assert vars(Engine)["generate"] is not ours


def test_who_wraps_ours_keeps_it_and_it_passes_through(measured):
    original = vars(Engine)["generate"]
    undo = patched(Engine, "generate", measured.requests)
    ours = vars(Engine)["generate"]

    @functools.wraps(ours)  # copies every attribute of ours
    def theirs(self, prompt):
        return ("theirs", ours(self, prompt)[1])

    Engine.generate = theirs
    try:
        undo()
        assert vars(Engine)["generate"] is theirs
        assert Engine().generate("hello") == ("theirs", "hello")
        assert measured.spans() == []
        undo = patched(Engine, "generate", measured.requests)  # instrumented anew: around theirs
        assert Engine().generate("hello") == ("theirs", "hello")
        assert len(measured.spans()) == 1
        undo()
        assert vars(Engine)["generate"] is theirs
    finally:
        Engine.generate = original


def test_an_override_that_calls_super_counts_once(measured):
    class Big(Engine):
        def generate(self, prompt):
            return super().generate(prompt)

    undo = [patched(cls, "generate", measured.requests) for cls in (Engine, Big)]
    Big().generate("hello")
    for each in undo:
        each()
    assert [span.name for span in measured.spans()] == ["generate Big"]


def test_a_sibling_that_comes_first_is_still_called(measured):
    class Left(Engine):
        pass

    class Right(Engine):
        def generate(self, prompt):
            return ("right", super().generate(prompt)[1])

        @classmethod
        def built(cls, prompt):
            return ("right", super().built(prompt)[1])

    class Both(Left, Right):
        pass

    undo = [patched(Left, name, measured.requests) for name in ("generate", "built")]
    assert Both().generate("hello") == ("right", "hello") == Both.built("hello")
    assert Left.generate("not an engine", "hello") == ("not an engine", "hello")
    for each in undo:
        each()
    assert [span.name for span in measured.spans()] == ["generate Both", "built Both", "generate Engine"]


# names


def test_a_span_is_called_after_the_class_that_the_call_is_on(measured):
    class Other(Small):
        pass

    wrapped = measured.wrap(Engine.generate)
    for cls in (Engine, Small, Other, Engine):
        wrapped(cls(), "hello")
    wrapped(self=Small(), prompt="hello")
    operation = measured.wrap(Engine.generate, "chat")
    operation(Small(), "hello")
    assert [span.name for span in measured.spans()] == [
        "generate Engine",
        "generate Small",
        "generate Other",
        "generate Engine",
        "generate Engine",
        "chat Small",
    ]


def test_a_class_that_cannot_be_hashed_has_a_name_too(measured):
    class Odd(type):
        __hash__ = None

        def __eq__(cls, other):
            raise RuntimeError("not to be compared")

    class Strange(metaclass=Odd):
        def generate(self):
            return 1

    assert measured.wrap(Strange.generate)(Strange()) == 1
    assert [span.name for span in measured.spans()] == ["generate Strange"]


def test_classes_that_come_and_go_are_not_kept(measured):
    wrapped = measured.wrap(Engine.generate)
    gone: list[int] = []

    def one(number: int) -> None:
        cls = type(f"Made{number}", (Engine,), {})
        kept.append(weakref.ref(cls, lambda _: gone.append(number)))
        wrapped(cls(), "hello")

    kept: list[Any] = []
    for number in range(1500):
        one(number)
    gc.collect()
    assert len(gone) >= 1000  # what is kept is bounded
    assert measured.spans()[-1].name == "generate Made1499"


# without torch


def test_wrapping_imports_no_torch():
    code = (
        "import sys, opentelemetry_instrumentation_torchmem.requests.wrapping;"
        "from opentelemetry_instrumentation_torchmem.requests import compiler;"
        "print('torch' in sys.modules, compiler.compiling(), compiler.tracing())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False", "False"]
