# SPDX-License-Identifier: Apache-2.0
"""Streams, followed to their end: generators, coroutines and asynchronous generators.

A wrapper's own globals are the user's: what it needs of this room it has in its closure.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, cast
from weakref import ref

from . import compiler as _compiler
from .asking import Asking, Function
from .probe import Guard, Probe

_may_enter_to_close = sys.version_info >= (3, 12)
"""What is closed may be so by the collector. Before 3.12 that runs within any allocation, and a context
variable that is set from in there while another one is being set makes their context lose some, the user's
too."""


# functions that make them


def _never() -> bool:
    return False


def coroutine(function: Function, asking: Asking) -> Function:
    """A coroutine function, measured."""
    compiler, steps, as_one, kind = _compiler, in_steps, as_coroutine, cast("Any", CoroutineType)

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiler.compiling():
            result: Any = function(*args, **kwargs)
            # the compiler runs through a coroutine as if it were a plain function
            return await result if type(result) is kind else result
        probe = asking.begin(args, kwargs)
        try:
            inner = function(*args, **kwargs)
            del args, kwargs  # they are the function's: it may want their memory back before it ends
            if probe is None:
                return await inner
            result = await steps(as_one(inner), probe)
        except BaseException as error:
            if probe is None:
                raise
            probe.fail(error)
            raise
        probe.stop(result)
        return result

    return wrapper


def generator(
    function: Callable[..., Generator[Any, Any, Any]],
    asking: Asking,
    dropped: Callable[[], bool] = _never,
) -> Function:
    """A generator function, measured; ``dropped`` says, as it is closed, whether nobody has it any more."""
    compiler, unmeasured, as_one, may_enter = _compiler, _UNMEASURED, _as_generator, _may_enter_to_close

    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if compiler.compiling() or compiler.tracing():
            return (yield from function(*args, **kwargs))
        probe = asking.begin(args, kwargs) or unmeasured
        closing = False
        held: list[Any] = []
        try:
            inner = as_one(function(*args, **kwargs))
            del args, kwargs
            step, value = inner.send, None
            while True:
                try:
                    held.append(step(value))
                finally:
                    value = None  # an exception that was thrown in must not be kept by its own traceback
                probe.leave()
                # not `yield from`: it would turn throw(GeneratorExit) into close(), whose result it loses
                try:
                    value = yield held.pop()  # nor is an item kept while the next one is made
                    step, closing = inner.send, False
                except BaseException as error:
                    closing = isinstance(error, GeneratorExit)
                    if closing and dropped():
                        if may_enter:
                            probe.enter()
                        step = inner = None  # that closes it, unless it is somebody else's as well
                        raise
                    step, value = inner.throw, error
                if not closing or may_enter:
                    probe.enter()
        except StopIteration as end:
            if closing:
                probe.abandon()
            else:
                probe.stop(end.value)
            return end.value
        except BaseException as error:
            if closing:
                probe.abandon(error)
            else:
                probe.fail(error)
            raise

    return wrapper


def async_generator(
    function: Function, asking: Asking, dropped: Callable[[], bool] = _never, shared: bool = False
) -> Function:
    """An asynchronous generator function, measured; ``shared`` if others may have the generator too."""
    compiler, unmeasured, steps, as_one, first = _compiler, _UNMEASURED, in_steps, _as_async_generator, _first
    nothing, guard, always, hooks = _Nothing(), Guard, _may_enter_to_close, sys.get_asyncgen_hooks
    references, alone, give_back = sys.getrefcount, _ALONE, _to_the_loop

    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        if compiler.compiling():
            async for _ in nothing:  # what the compiler cannot do it must find before anything else
                yield
            async for item in function(*args, **kwargs):
                yield item
            return
        guarded = guard(asking.begin(args, kwargs) or unmeasured)  # nobody closes it once its loop has closed
        probe = guarded.probe
        closing = False
        # a loop closes it in a task, never the collector
        may_enter = always or hooks().finalizer is not None
        held: list[Any] = []
        try:
            inner = as_one(function(*args, **kwargs))
            del args, kwargs
            step, value = first(inner, shared), None
            while True:
                try:
                    held.append(await steps(step(value), probe))
                finally:
                    value = None
                probe.leave()
                try:
                    value = yield held.pop()
                    step, closing = inner.asend, False
                except BaseException as error:
                    closing = isinstance(error, GeneratorExit)
                    if dropped():  # the loop closes it, or cancels that
                        step = None
                        if references(inner) > alone:  # it is somebody else's as well
                            give_back(inner)
                            inner = None
                            raise
                    step, value = inner.athrow, error
                if not closing or may_enter:
                    probe.enter()
        except StopAsyncIteration:
            if closing:
                probe.abandon()
            else:
                probe.stop()
        except BaseException as error:
            if closing:
                probe.abandon(error)
            else:
                probe.fail(error)
            raise

    return wrapper


@types.coroutine
def in_steps(inner: Any, probe: Probe) -> Generator[Any, Any, Any]:
    """``await inner``, with the call's context current in each step and not in whoever drives it."""
    step, value = inner.send, None
    held: list[Any] = []
    while True:
        try:
            held.append(step(value))
        except StopIteration as end:
            return end.value
        finally:
            value = None
        probe.leave()
        try:
            value = yield held.pop()  # a future may hold what the awaiting one is done with by its next step
            step = inner.send
        except GeneratorExit:
            if _may_enter_to_close:
                probe.enter()
            try:
                inner.close()
            except BaseException as error:
                probe.abandon(error)
                raise
            probe.abandon()  # whatever comes now comes out of a finalizer, perhaps
            raise
        except BaseException as error:
            step, value = inner.throw, error
        probe.enter()


def _first(inner: Any, shared: bool) -> Callable[[Any], Any]:
    """``asend`` for an async generator's first step, at which it asks the event loop who will close it: the
    loop closes ours, which closes it. Both at once would be an error. One that others may have too is closed
    when nobody has it any more."""

    def asend(value: Any) -> Any:
        hooks = sys.get_asyncgen_hooks()
        finalizer = (hooks.finalizer if shared else None) or _left_to_ours
        sys.set_asyncgen_hooks(firstiter=None, finalizer=finalizer)
        try:
            return inner.asend(value)
        finally:
            sys.set_asyncgen_hooks(*hooks)

    return asend


def _left_to_ours(_: Any) -> None:
    """The finalizer of an async generator that ours closes."""


def _to_the_loop(inner: Any) -> None:
    """Have the loop close an async generator in its own end, as it would have without ours."""
    known = sys.get_asyncgen_hooks().firstiter
    if known is not None:
        known(inner)


def _references_of_a_variable() -> int:
    alone = object()
    return sys.getrefcount(alone)


_ALONE = _references_of_a_variable()


class _Nothing:
    """An asynchronous iterator without items."""

    def __aiter__(self) -> _Nothing:
        return self

    async def __anext__(self) -> None:
        raise StopAsyncIteration


class _Unmeasured:
    """Stands where there is no probe, in a stream."""

    open = False

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def stop(self, result: object = None) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def abandon(self, error: BaseException | None = None) -> None: ...


_UNMEASURED = cast("Probe", _Unmeasured())


# what a function is said to return, and does not: another package's proxy passes for the function in it


def _as_generator(result: object) -> Any:
    if type(result) is GeneratorType:
        return cast("Any", result)

    def delegating(iterable: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        return (yield from iterable)

    return delegating(cast("Any", result))


def as_coroutine(result: object) -> Any:
    """What is awaited, as a coroutine that can be driven step by step."""
    if type(result) is CoroutineType:
        return cast("Any", result)

    async def delegating(awaitable: Any) -> Any:
        return await awaitable

    return delegating(result)


def _as_async_generator(result: object) -> Any:
    if type(result) is AsyncGeneratorType:
        return cast("Any", result)

    async def delegating(iterable: Any) -> AsyncGenerator[Any, None]:
        async for item in iterable:
            yield item

    return delegating(result)


# what a call has returned


STREAMS = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})


def followed_stream(probe: Probe, stream: object) -> Any:
    """One of ``STREAMS`` that a measured call has returned, as its caller gets it: its end is the call's."""
    kind = type(stream)
    if kind is GeneratorType:
        if cast("Any", stream).gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:  # ours could not be awaited
            probe.stop(stream)
            return stream
        return _followed_while_had(probe, stream, generator)
    if kind is AsyncGeneratorType:
        return _followed_while_had(probe, stream, functools.partial(async_generator, shared=True))
    probe.leave()
    return _named_as(coroutine(lambda: stream, Asking(_Again(probe)))(), stream)


def _followed_while_had(probe: Probe, stream: Any, make: Callable[..., Function]) -> Any:
    """One that others may have too: to drop ours must not close theirs."""
    again = _Again(probe)
    probe.leave()
    followed = make([stream].pop, Asking(again), again.dropped)()  # pop: ours is one reference
    again.stream = ref(followed)
    return _named_as(followed, stream)


def _named_as(outer: Any, inner: Any) -> Any:
    outer.__name__, outer.__qualname__ = inner.__name__, inner.__qualname__
    return outer


class _Again(Guard):
    """A call that has begun goes on, in the first step of what it returned."""

    __slots__ = ("stream",)

    stream: Callable[[], object]
    """A weak reference to what follows the generator."""

    def __call__(self, *_: Any) -> Probe:
        self.probe.enter()
        return self.probe

    def dropped(self) -> bool:
        """Whether what follows the generator is closed because nobody has it any more."""
        return self.stream() is None
