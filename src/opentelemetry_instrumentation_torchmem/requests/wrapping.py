# SPDX-License-Identifier: Apache-2.0
"""Functions that are measured and otherwise the same: plain, coroutine and generator functions of both kinds.

A stream's call ends when the stream does. Knows the probe's handle, and of torch only whether it compiles.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager, suppress
from threading import Lock
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import wrapt

from ..allocator.source import tracing_call
from .names import SpanName, span_name
from .probe import Guard, Probe, Requests, Target

_Proxy: Any = wrapt.ObjectProxy
Function = Callable[..., Any]


def wrap(function: Function, target: Target, requests: Requests, name: SpanName | None = None) -> Function:
    """A plain function of the same kind, name and signature that measures each call of ``function``.

    A generator, coroutine or async generator that a plain function returns is followed to its end, and with
    ``target.iterator`` any iterator; everything else that it returns is the caller's, untouched. Without a
    ``name`` the span is called after the operation and the class that the call is on.
    """
    return _wrap(function, target, requests, name)[0]


def wrap_attribute(
    owner: type | ModuleType, attribute: str, target: Target, requests: Requests
) -> Callable[[], None]:
    """Measure a method of a class, its own or inherited, or a function of a module; returns the undo.

    Static and class methods stay what they are. The undo puts back what was there, unless somebody has
    wrapped ours since: then ours stays and passes straight through. What is measured already stays as it is.

    Raises:
        AttributeError: there is no such attribute.
        TypeError: it is no function or method (but a property, a class); or the owner cannot be changed.

    Example:
        >>> undo = wrap_attribute(Engine, "generate", Target("app.Engine.generate", "generate"), requests)
        >>> undo()
    """
    entry: object = _entry(owner, attribute)
    own = attribute in vars(owner)
    kind: type[Any] = type(entry)
    static_or_class = issubclass(kind, (staticmethod, classmethod))
    function: Any = cast("Any", entry).__func__ if static_or_class else entry
    if not _is_function(function):
        where = f"{owner.__name__}.{attribute}"
        raise TypeError(
            f"{where} is a {type(function).__qualname__}: only functions and methods are measured"
        )
    if own and function in _asking:
        return _nothing_to_undo
    if attribute in STEPS and isinstance(owner, type) and not owner.__weakrefoffset__:
        raise TypeError(
            f"an iterator of {owner.__name__} is not followed: __weakref__ is not in its __slots__"
        )
    call = function
    bound = isinstance(owner, type) and not isinstance(entry, staticmethod) and hasattr(kind, "__get__")
    if isinstance(owner, type) and not isinstance(entry, staticmethod):
        if not own:
            call = _next_in_line(owner, attribute, function)
        elif type(function) is not FunctionType and hasattr(kind, "__get__"):
            call = _bound_by(entry)
    wrapper, asking = _wrap(function, target, requests, None, call, bound=bound)
    made: Any = wrapper
    if static_or_class:
        made = cast("Any", kind)(wrapper)
    elif isinstance(owner, type) and not hasattr(kind, "__get__"):
        made = staticmethod(wrapper)  # a builtin is not bound to instances: no more is ours
    setattr(owner, attribute, made)

    def undo() -> None:
        asking.begin = _measure_nothing
        if vars(owner).get(attribute) is not made:
            return
        if own:
            setattr(owner, attribute, entry)
        else:
            delattr(owner, attribute)

    return undo


# the compiler


def compiling() -> bool:
    """Whether the compiler or an export is tracing this very call; this stands in until torch is imported."""
    return False


def tracing() -> bool:
    """Whether ``torch.jit.trace`` is; likewise."""
    return False


_before_torch = compiling
dynamo_compiling = compiling
"""Whether the compiler is, as ``compiling`` but for what ``flags`` say: together they take half its time."""
flags: Any = SimpleNamespace(_is_compiling_flag=False)


def torch_imported(torch: Any) -> None:
    """From now on pass through what torch compiles, exports or traces. Owner of the switch: the instrumentor.

    The compiler knows ``torch.compiler.is_compiling`` by identity and folds it to a constant, so that a
    wrapper leaves nothing in the graph, as long as it is asked first. Once set it stays: the compiled code of
    others depends on it.
    """
    global dynamo_compiling, flags
    is_compiling = getattr(torch.compiler, "is_compiling", None)
    if is_compiling is not None:
        _pass_through_when(is_compiling, tracing_call(torch))
        if hasattr(torch.compiler, "is_dynamo_compiling") and hasattr(torch.compiler, "_is_compiling_flag"):
            dynamo_compiling, flags = torch.compiler.is_dynamo_compiling, torch.compiler
    else:  # before 2.3 it is in the compiler itself, which most processes never import
        wrapt.register_post_import_hook(
            lambda dynamo: _pass_through_when(dynamo.is_compiling, torch.jit.is_tracing), "torch._dynamo"
        )


def _pass_through_when(is_compiling: Callable[[], bool], is_tracing: Callable[[], bool]) -> None:
    global compiling, tracing, dynamo_compiling
    if compiling is _before_torch:
        compiling, tracing = is_compiling, is_tracing
        dynamo_compiling = is_compiling


_may_enter_to_close = sys.version_info >= (3, 12)
"""What is closed may be so by the collector. Before 3.12 that runs within any allocation, and a context
variable that is set from in there while another one is being set makes their context lose some, the user's
too."""


_here = sys.modules[__name__]
"""Wrappers reach this module so: their own globals are the user's (``_at_home``)."""


# the wrappers


class Asking:
    """How a wrapper asks for a probe; one that was undone, or came out of a pickle, asks for nothing."""

    __slots__ = ("begin", "nested", "plain")

    def __init__(
        self, begin: Callable[..., Probe | None] | None = None, nested: bool = False, plain: bool = False
    ) -> None:
        self.begin = begin or _measure_nothing
        self.nested = nested
        """Whether it asks inside another measured call too."""
        self.plain = plain
        """Whether the call ends when the function returns, unless with a stream."""

    def __reduce__(self) -> tuple[type[Asking], tuple[()]]:
        return Asking, ()


def _measure_nothing(*_: Any) -> None:
    return None


def _nothing_to_undo() -> None:
    return None


def _never() -> bool:
    return False


_asking: WeakKeyDictionary[Function, Asking] = WeakKeyDictionary()
"""Every wrapper there is: an attribute would be copied by whoever wraps ours with ``functools.wraps``."""


def asking_of(function: object) -> Asking | None:
    """How a wrapper asks; None for what is no wrapper of ours."""
    return _asking.get(function) if type(function) is FunctionType else None


def _wrap(
    function: Function,
    target: Target,
    requests: Requests,
    name: SpanName | None,
    call: Function | None = None,
    *,
    bound: bool = False,
) -> tuple[Function, Asking]:
    """``call`` is called, ``function`` is what it looks like; ``bound`` if its first argument is what it is
    called on."""
    calls = requests.calls(target, name or span_name(function, target.operation), bound=bound)
    asking = Asking(calls.begin, target.nested)
    call = call or function
    steps = STEPS.get(getattr(function, "__name__", ""))
    if steps is not None:
        wrapper = steps(call, asking)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(call, asking)
    elif inspect.isasyncgenfunction(function):
        wrapper = _async_generator(call, asking)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(call, asking)
    else:
        asking.plain = True
        wrapper = _plain(call, asking, target.iterator)
    wrapper = _at_home(wrapper, function)
    functools.update_wrapper(wrapper, function)
    with suppress(TypeError, ValueError):  # a builtin that has none
        wrapper.__signature__ = inspect.signature(function)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE:
        wrapper = types.coroutine(wrapper)
    _asking[wrapper] = asking
    return wrapper, asking


def _at_home(wrapper: Any, function: Function) -> Any:
    """The wrapper with the user's module for its globals: TorchScript, ``torch.fx`` and readers of string
    annotations look up there what the user's function names."""
    return _of_its_own(wrapper, function, getattr(inspect.unwrap(function), "__globals__", globals()))


def _of_its_own(made: Any, function: Function, names: dict[str, Any]) -> Any:
    """A function with a code object that no other has, by identity and by name: the compiler keeps by the
    one what it has compiled, up to a limit, and by the other the shapes that it has seen."""
    name = ".".join(str(getattr(function, part, "?")) for part in ("__module__", "__qualname__"))
    code = made.__code__.replace(co_name=name)
    return FunctionType(code, names, made.__name__, made.__defaults__, made.__closure__)


def _holder(asking: Asking) -> Any:
    """A function that holds it: the compiler must know what is in each cell of a method of an object that is
    made within the compiled region, and it knows functions."""

    def holder() -> None: ...

    holder.held = asking  # type: ignore[attr-defined]
    return holder


def _plain(function: Function, asking: Asking, follows: bool) -> Function:
    here, returned, holder = _here, _returned, _holder(asking)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if here.dynamo_compiling() or here.flags._is_compiling_flag or here.tracing():  # noqa: SLF001
            return function(*args, **kwargs)
        probe = holder.held.begin(args, kwargs)
        if probe is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            probe.fail(error)
            raise
        if follows or type(result) in here._STREAMS:  # noqa: SLF001
            return returned(probe, result)
        try:
            probe.stop(result)
        except BaseException:  # of a signal handler, before it has begun
            probe.abandon()
            raise
        return result

    return wrapper


def _coroutine(function: Function, asking: Asking) -> Function:
    here, steps, as_coroutine, coroutine = _here, _steps, _as_coroutine, cast("Any", CoroutineType)

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if here.compiling():
            result: Any = function(*args, **kwargs)
            # the compiler runs through a coroutine as if it were a plain function
            return await result if type(result) is coroutine else result
        probe = asking.begin(args, kwargs)
        try:
            inner = function(*args, **kwargs)
            del args, kwargs  # they are the function's: it may want their memory back before it ends
            if probe is None:
                return await inner
            result = await steps(as_coroutine(inner), probe)
        except BaseException as error:
            if probe is None:
                raise
            probe.fail(error)
            raise
        probe.stop(result)
        return result

    return wrapper


def _generator(
    function: Callable[..., Generator[Any, Any, Any]],
    asking: Asking,
    dropped: Callable[[], bool] = _never,
) -> Function:
    here, unmeasured, as_generator = _here, _UNMEASURED, _as_generator

    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if here.compiling() or here.tracing():
            return (yield from function(*args, **kwargs))
        probe = asking.begin(args, kwargs) or unmeasured
        closing = False
        held: list[Any] = []
        try:
            inner = as_generator(function(*args, **kwargs))
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
                        if here._may_enter_to_close:  # noqa: SLF001
                            probe.enter()
                        step = inner = None  # that closes it, unless it is somebody else's as well
                        raise
                    step, value = inner.throw, error
                if not closing or here._may_enter_to_close:  # noqa: SLF001
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


def _async_generator(
    function: Function, asking: Asking, dropped: Callable[[], bool] = _never, shared: bool = False
) -> Function:
    unmeasured, steps, as_async_generator, first = _UNMEASURED, _steps, _as_async_generator, _first
    here, nothing, guard = _here, _Nothing(), Guard
    references, alone, give_back, hooks = sys.getrefcount, _ALONE, _to_the_loop, sys.get_asyncgen_hooks

    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        if here.compiling():
            async for _ in nothing:  # what the compiler cannot do it must find before anything else
                yield
            async for item in function(*args, **kwargs):
                yield item
            return
        guarded = guard(asking.begin(args, kwargs) or unmeasured)  # nobody closes it once its loop has closed
        probe = guarded.probe
        closing = False
        # a loop closes it in a task, never the collector
        may_enter_to_close = here._may_enter_to_close or hooks().finalizer is not None  # noqa: SLF001
        held: list[Any] = []
        try:
            inner = as_async_generator(function(*args, **kwargs))
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
                if not closing or may_enter_to_close:
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
def _steps(inner: Any, probe: Probe) -> Generator[Any, Any, Any]:
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


def _as_coroutine(result: object) -> Any:
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


# what a plain function returns


_STREAMS = frozenset({GeneratorType, CoroutineType, AsyncGeneratorType})


def followed(probe: Probe, result: Any) -> Any:
    """What a measured call has returned, as its caller gets it: a stream is followed to its end."""
    if probe.calls.target.iterator or type(result) in _STREAMS:
        return _returned(probe, result)
    probe.stop(result)
    return result


def _returned(probe: Probe, result: object) -> Any:
    kind = type(result)
    if kind is GeneratorType:
        if cast("Any", result).gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:  # ours could not be awaited
            probe.stop(result)
            return result
        return _followed_while_had(probe, result, _generator)
    if kind is AsyncGeneratorType:
        return _followed_while_had(probe, result, functools.partial(_async_generator, shared=True))
    if kind is CoroutineType:
        probe.leave()
        return _named_as(_coroutine(lambda: result, Asking(_Again(probe)))(), result)
    if probe.calls.target.iterator and (stream := _stream_kind(kind)) is not None:
        probe.leave()
        return stream(result, probe)
    probe.stop(result)
    return result


def _followed_while_had(probe: Probe, result: Any, make: Callable[..., Function]) -> Any:
    """A stream that others may have too: to drop ours must not close theirs."""
    again = _Again(probe)
    probe.leave()
    followed = make([result].pop, Asking(again), again.dropped)()  # pop: ours is one reference
    again.stream = ref(followed)
    return _named_as(followed, result)


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
                item = await _steps(_as_coroutine(step(*arguments)), probe)
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
    here, iterations = _here, _Iterations(asking)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if here.compiling() or here.tracing():
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


def _stream_kind(kind: type) -> type[_Followed] | None:
    """What follows iterators of a class, and has of these methods what they have; None for no iterators."""
    methods = tuple(name for name in _PARTS if getattr(kind, name, None) is not None)
    return None if STEPS.keys().isdisjoint(methods) else _made_of(methods)


@functools.cache
def _made_of(methods: tuple[str, ...]) -> type[_Followed]:
    return cast("Any", type)("Followed", tuple(_PARTS[name] for name in methods), {})


# attributes


def _is_function(thing: object) -> bool:
    # from 3.13 on a partial has the looks of a method, and later it is one
    return not issubclass(type(thing), functools.partial) and callable(thing) and inspect.isroutine(thing)


def _entry(owner: type | ModuleType, attribute: str) -> Any:
    """What an attribute is before it is bound to anything."""
    if not isinstance(owner, type):
        return getattr(owner, attribute)
    for base in owner.__mro__:
        if attribute in vars(base):
            return vars(base)[attribute]
    raise AttributeError(f"{owner.__module__}.{owner.__qualname__} has no {attribute}")


def _next_in_line(owner: type, attribute: str, function: Function) -> Function:
    """An inherited method as ``owner`` would find it: in a subclass another base may come first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not args or not _is_of(args[0], owner):
            return function(*args, **kwargs)
        return getattr(cast("Any", super(owner, args[0])), attribute)(*args[1:], **kwargs)

    return _of_its_own(call, function, globals())


def _is_of(first: object, owner: type) -> bool:
    return issubclass(first, owner) if isinstance(first, type) else isinstance(first, owner)


def _bound_by(entry: Any) -> Function:
    """Another package's method object, bound as Python would bind it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return entry.__get__(args[0], type(args[0]))(*args[1:], **kwargs)

    return _of_its_own(call, entry, globals())
