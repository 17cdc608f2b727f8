# SPDX-License-Identifier: Apache-2.0
"""Functions, and attributes of classes and modules, replaced by what measures their calls, and put back."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, cast

from . import compiler as _compiler
from . import streams as _streams
from .asking import Asking, Function, asking_of, wrappers
from .iterators import STEPS, followed
from .names import SpanName, span_name
from .probe import Requests, Target


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
    if own and asking_of(function) is not None:
        return _nothing_to_undo
    if attribute in STEPS and isinstance(owner, type) and not owner.__weakrefoffset__:
        raise TypeError(
            f"an iterator of {owner.__name__} is not followed: __weakref__ is not in its __slots__"
        )
    method = isinstance(owner, type) and not isinstance(entry, staticmethod)
    bound = method and hasattr(kind, "__get__")
    call = function
    if method and not own:
        call = _next_in_line(cast("type", owner), attribute, function)
    elif bound and type(function) is not FunctionType:
        call = _bound_by(entry)
    wrapper, asking = _wrap(function, target, requests, None, call, bound=bound)
    made: Any = wrapper
    if static_or_class:
        made = cast("Any", kind)(wrapper)
    elif method and not bound:
        made = staticmethod(wrapper)  # a builtin is not bound to instances: no more is ours
    setattr(owner, attribute, made)

    def undo() -> None:
        asking.no_more()
        if vars(owner).get(attribute) is not made:
            return
        if own:
            setattr(owner, attribute, entry)
        else:
            delattr(owner, attribute)

    return undo


def _nothing_to_undo() -> None:
    return None


# functions


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
        wrapper = _streams.coroutine(call, asking)
    elif inspect.isasyncgenfunction(function):
        wrapper = _streams.async_generator(call, asking)
    elif inspect.isgeneratorfunction(function):
        wrapper = _streams.generator(call, asking)
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
    wrappers[wrapper] = asking
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
    compiler, streams, holder = _compiler, _streams, _holder(asking)  # its own globals are the user's
    follow_stream, follow = streams.followed_stream, followed

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiler.dynamo_compiling() or compiler.flags._is_compiling_flag or compiler.tracing():  # noqa: SLF001
            return function(*args, **kwargs)
        probe = holder.held.begin(args, kwargs)
        if probe is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            probe.fail(error)
            raise
        if type(result) in streams.STREAMS:
            return follow_stream(probe, result)
        if follows:
            return follow(probe, result)
        try:
            probe.stop(result)
        except BaseException:  # of a signal handler, before it has begun
            probe.abandon()
            raise
        return result

    return wrapper


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
