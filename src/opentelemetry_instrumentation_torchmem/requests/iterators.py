# SPDX-License-Identifier: Apache-2.0
"""Iterators that are no streams, followed to their end: those that a call has returned, and a class's own."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast
from weakref import ref

import wrapt

from . import compiler as _compiler
from .asking import Asking, Function
from .probe import Guard, Probe
from .streams import STREAMS, as_coroutine, followed_stream, in_steps

_Proxy: Any = wrapt.ObjectProxy


def followed(probe: Probe, result: object) -> Any:
    """What a measured call has returned, as its caller gets it: a stream is followed to its end, and with
    ``target.iterator`` any iterator."""
    kind = type(result)
    if kind in STREAMS:
        return followed_stream(probe, result)
    if probe.calls.target.iterator and (follower := _follower(kind)) is not None:
        probe.leave()
        return follower(result, probe)
    probe.stop(result)
    return result


class _Steps:
    """The steps of an iterator: a call that lasts until one of them says it is over, or nobody has it."""

    __slots__ = ("_guard", "_one", "probe")

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._guard = Guard(probe)
        self._one = Lock()

    def next(self, step: Function, *arguments: Any) -> Any:
        """One step, within the call unless it is over or another thread is at one."""
        probe = self.probe
        if not probe.open or not self._one.acquire(blocking=False):
            return step(*arguments)
        try:
            probe.enter()
            try:
                item = step(*arguments)
            except StopIteration as end:
                probe.stop(end.value)
                raise
            except BaseException as error:
                probe.fail(error)
                raise
            probe.leave()
            return item
        finally:
            self._one.release()

    @contextmanager
    def ending(self) -> Generator[None]:
        """What ends the iteration, if it is not over: it is given up."""
        try:
            yield
        except BaseException as error:
            self.probe.fail(error)
            raise
        self.probe.abandon()

    async def anext(self, step: Function, *arguments: Any) -> Any:
        """One step of an asynchronous iterator; likewise of tasks."""
        probe = self.probe
        if not probe.open or not self._one.acquire(blocking=False):
            return await step(*arguments)
        try:
            probe.enter()
            try:
                item = await in_steps(as_coroutine(step(*arguments)), probe)
            except StopAsyncIteration:
                probe.stop()
                raise
            except BaseException as error:
                probe.fail(error)
                raise
            probe.leave()
            return item
        finally:
            self._one.release()


# a class's own


class _Iterations:
    """The iterators of a measured ``__next__`` that are under way."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._known: dict[int, tuple[ref[object], _Steps]] = {}

    def __reduce__(self) -> tuple[type[_Iterations], tuple[Asking]]:
        return _Iterations, (self._asking,)

    def of(self, iterator: object) -> _Steps | None:
        """The steps of an iterator; None where it is not measured."""
        key, known = id(iterator), self._known
        found = known.get(key)
        if found is not None and found[1].probe.open and found[0]() is iterator:
            return found[1]

        def collected(gone: ref[object]) -> None:
            if key in known and known[key][0] is gone:
                del known[key]  # and with it the guard, which gives up the call

        try:
            reference = ref(iterator, collected)
        except TypeError:  # nobody would know when it is gone
            return None
        probe = self._asking.begin((iterator,), {})
        if probe is None:
            return None
        probe.leave()
        steps = _Steps(probe)
        known[key] = reference, steps
        return steps

    def over(self, iterator: object) -> None:
        """Forget one that has come to its end."""
        found = self._known.get(id(iterator))
        if found is not None and not found[1].probe.open:
            self._known.pop(id(iterator), None)


def _next(function: Function, asking: Asking) -> Function:
    compiler, iterations = _compiler, _Iterations(asking)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiler.compiling() or compiler.tracing():
            return function(*args, **kwargs)
        steps = iterations.of(args[0]) if args else None
        if steps is None:
            return function(*args, **kwargs)
        try:
            return steps.next(function, *args)
        finally:
            iterations.over(args[0])

    return wrapper


def _anext(function: Function, asking: Asking) -> Function:
    iterations = _Iterations(asking)

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        steps = iterations.of(args[0]) if args else None
        if steps is None:
            return await function(*args, **kwargs)
        try:
            return await steps.anext(function, *args)
        finally:
            iterations.over(args[0])

    return wrapper


STEPS = {"__next__": _next, "__anext__": _anext}
"""Methods of which many calls are one: from an iterator's first step to its end."""


# those that a call has returned


class _Followed(_Proxy):
    """What follows an iterator: the iterator in all but its identity."""

    def __init__(self, iterator: Any, probe: Probe) -> None:
        _Proxy.__init__(self, iterator)
        self._self_steps = _Steps(probe)


class _Iterated(_Followed):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._self_steps.next(next, self.__wrapped__)


class _AsyncIterated(_Followed):
    def __aiter__(self) -> Any:
        return self

    def __anext__(self) -> Any:
        return self._self_steps.anext(self.__wrapped__.__anext__)


class _Entered(_Followed):
    def __enter__(self) -> Any:
        entered = self.__wrapped__.__enter__()
        return self if entered is self.__wrapped__ else entered

    def __exit__(self, *error: object) -> Any:
        with self._self_steps.ending():
            return self.__wrapped__.__exit__(*error)


class _AsyncEntered(_Followed):
    async def __aenter__(self) -> Any:
        entered = await self.__wrapped__.__aenter__()
        return self if entered is self.__wrapped__ else entered

    async def __aexit__(self, *error: object) -> Any:
        with self._self_steps.ending():
            return await self.__wrapped__.__aexit__(*error)


class _Closed(_Followed):
    def close(self, *args: Any, **kwargs: Any) -> Any:
        with self._self_steps.ending():
            return self.__wrapped__.close(*args, **kwargs)


class _AsyncClosed(_Followed):
    async def aclose(self, *args: Any, **kwargs: Any) -> Any:
        with self._self_steps.ending():
            return await self.__wrapped__.aclose(*args, **kwargs)


_PARTS = {
    "__next__": _Iterated,
    "__anext__": _AsyncIterated,
    "__enter__": _Entered,
    "__aenter__": _AsyncEntered,
    "close": _Closed,
    "aclose": _AsyncClosed,
}


def _follower(kind: type) -> type[_Followed] | None:
    """What follows iterators of a class, and has of these methods what they have; None for no iterators."""
    methods = tuple(name for name in _PARTS if getattr(kind, name, None) is not None)
    return None if STEPS.keys().isdisjoint(methods) else _made_of(methods)


@functools.cache
def _made_of(methods: tuple[str, ...]) -> type[_Followed]:
    return cast("Any", type)("Followed", tuple(_PARTS[name] for name in methods), {})
