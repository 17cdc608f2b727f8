# SPDX-License-Identifier: Apache-2.0
"""What the user measures in code: ``track`` a block or a function, ``instrument_model`` one model.

Each may be used before ``instrument()`` and outlives ``uninstrument()``: whoever measures at the time of a
call measures it, and where nobody does, nothing happens.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, MethodType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast, overload
from weakref import WeakSet, ref

import wrapt
from opentelemetry.trace import INVALID_SPAN
from opentelemetry.util.types import AttributeValue

from . import compiler
from .asking import Asking, asking_of
from .names import SpanName
from .probe import Calls, Guard, Probe, Requests, Target
from .specs import SPANS
from .targets import function_in
from .wrapping import wrap

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_KEYWORDS: Mapping[str, Any] = {}


class _Active:
    """Who measures now. The instrumentor alone writes here; whoever decorates does so before it exists."""

    requests: Requests | None = None
    default_span = "new"


def _torch_imported(torch: Any) -> None:
    with suppress(Exception):  # what escapes would fail the user's import
        compiler.torch_imported(torch)


wrapt.register_post_import_hook(
    _torch_imported, "torch"
)  # what is decorated is compiled also where nobody measures


def activate(requests: Requests, default_span: str = "new") -> None:
    """From now on what is tracked is measured. Called by the instrumentor."""
    _Active.requests, _Active.default_span = requests, default_span
    for measured in tuple(_named):
        measured.forget()
        requests.series(measured.target)  # their counters exist from now on
    for calls in tuple(_models.values()):
        calls.install()


def deactivate() -> None:
    """From now on nothing that is tracked is measured, and no class is touched."""
    _Active.requests = None
    for measured in tuple(_named):
        measured.forget()
    for calls in tuple(_models.values()):
        calls.remove()


class _Measured:
    """The calls of a target, for whoever measures at their time: what ``wrap`` needs of ``Requests``."""

    def __init__(self, target: Target, span: str | None) -> None:
        self.target = target if span is None else replace(target, span=span)
        self._follows_the_default = span is None
        self._name: SpanName = target.operation
        self._bound = False
        self._calls: Calls | None = None

    def calls(self, target: Target, name: SpanName, *, bound: bool = False) -> _Measured:
        """Itself, from now on under the name."""
        self.target, self._name, self._bound = target, name, bound
        return self

    def begin(
        self, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] = _NO_KEYWORDS
    ) -> Probe | None:
        """A probe from whoever measures now."""
        calls = self._calls
        if calls is None:
            requests = _Active.requests
            if requests is None:
                return None
            target = self.target
            if self._follows_the_default and target.span != _Active.default_span:
                target = replace(target, span=_Active.default_span)
            calls = requests.calls(target, self._name, bound=self._bound)
            if self in _named:
                self._calls = calls
        return calls.begin(arguments, keywords)

    def forget(self) -> None:
        """Keep nothing of who measured until now."""
        self._calls = None

    def wrap(self, function: Callable[..., Any], name: SpanName | None = None) -> Callable[..., Any]:
        """The function, measured."""
        return wrap(function, self.target, cast("Requests", self), name)


_named: WeakSet[_Measured] = WeakSet()
"""Decorated functions, and models."""


@overload
def track(name: Callable[_P, _R], /) -> Callable[_P, _R]: ...
@overload
def track(
    name: str | None = None, *, span: str | None = None, nested: bool = False, iterator: bool = False
) -> Tracked: ...
def track(
    name: Callable[..., Any] | str | None = None,
    *,
    span: str | None = None,
    nested: bool = False,
    iterator: bool = False,
) -> Any:
    """Measure a block, or each call of a function: plain, coroutine, generator or asynchronous generator.

    ``name`` becomes ``torch.operation``; a function's own name is its default. ``span`` is ``new``,
    ``enrich`` or ``off``, where left out what the options say; ``nested`` measures it inside another measured
    call too; ``iterator`` follows an iterator that the function returns to its end.

    Raises:
        TypeError: what is decorated is no function.
        ValueError: ``name`` or ``span`` is not allowed.

    Example:
        >>> with track("rerank") as request:  # or async with
        ...     request.set_attribute("app.documents", 40)
        >>> @track
        ... def embed(texts):
        ...     return texts
        >>> @track("chat", span="enrich")
        ... async def stream(prompt):
        ...     yield "token"
    """
    if name is None or isinstance(name, str):
        return Tracked(name, span, nested, iterator)
    return Tracked(None, span, nested, iterator)(name)


class Tracked:
    """What ``track("name")`` gives: ``with`` it or decorate with it."""

    def __init__(self, name: str | None, span: str | None, nested: bool, iterator: bool) -> None:
        if name == "":
            raise ValueError("track('') is not allowed: a name, or the function that is decorated")
        if span is not None and span not in SPANS:
            raise ValueError(f"span={span!r} is not allowed (one of {', '.join(SPANS)})")
        self._name = name
        self._span = span
        self._nested = nested
        self._iterator = iterator
        self._guards: dict[tuple[int, int], list[Guard | None]] = {}
        """Of the blocks that are open, by who is in them: one object may serve many threads and tasks."""

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a function, or a static or class method."""
        given: Any = function
        kind: Any = given.__class__
        inner = function_in(given)
        if inner is not given:
            return kind(self(inner))
        if not isinstance(given, FunctionType):
            raise TypeError(f"track decorates functions, and {given!r} is a {kind.__qualname__}")
        label = f"{given.__module__}.{given.__qualname__}"
        measured = self._measured(label, self._name or given.__name__)
        _declare(measured)
        return measured.wrap(given)

    async def __aenter__(self) -> Request:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __enter__(self) -> Request:
        if compiler.compiling() or compiler.tracing():
            return Request(None)
        who = _who()
        probe = self._measured(None, self._name or "block").begin()
        try:
            request, guard = Request(probe), None if probe is None else Guard(probe)
            self._guards.setdefault(who, []).append(guard)
        except BaseException:  # of a signal handler
            if probe is not None:
                probe.abandon()
            raise
        return request

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if compiler.compiling() or compiler.tracing() or not self._guards:  # entered in a compiled region
            return
        who = _who()
        if who not in self._guards:  # left on another thread or task than entered
            who = next(reversed(self._guards))
        guard = self._guards[who].pop()
        if not self._guards[who]:
            del self._guards[who]
        if guard is None:
            return
        try:
            if error is None:
                guard.probe.stop()
            else:
                guard.probe.fail(error)
        except BaseException:  # of a signal handler, before that has begun
            guard.probe.abandon()
            raise

    def _measured(self, label: str | None, operation: str) -> _Measured:
        return _Measured(Target(label, operation, "new", self._nested, self._iterator), self._span)


def _who() -> tuple[int, int]:
    """The thread, and the task that it runs."""
    asyncio = sys.modules.get("asyncio")
    try:
        return get_ident(), 0 if asyncio is None else id(asyncio.current_task())
    except RuntimeError:  # no loop runs here
        return get_ident(), 0


class Request:
    """What is measured in a ``with track(...)``."""

    __slots__ = ("_span",)

    def __init__(self, probe: Probe | None) -> None:
        self._span = INVALID_SPAN if probe is None else probe.span

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Add to the span, where there is one."""
        self._span.set_attribute(key, value)


def instrument_model(
    model: object, name: str | None = None, *, span: str | None = None, nested: bool = False
) -> Callable[[], None]:
    """Measure each call of this one model; returns what ends that, as ``uninstrument_model`` does.

    The model itself is not touched, so it can be pickled, copied, compiled, exported and scripted as before;
    a copy is not measured. ``name`` becomes ``torch.operation``, ``forward`` where left out. Where it is said
    again of the same model, the latest that has not been ended counts; ``uninstrument_model`` ends them all.

    Inside another measured call, as a ``generate`` is, it counts with that one unless ``nested`` is true.

    A compiled model is measured outside the compiled region, whether it or what ``torch.compile`` returned is
    given here, before or after; inside a larger region nothing is measured.

    Raises:
        TypeError: it is no object that can be called and weakly referred to.
        ValueError: ``span`` is not allowed.

    Example:
        >>> stop = instrument_model(model, "rerank")  # doctest: +SKIP
    """
    cls = type(model)
    if not callable(model) or isinstance(model, (type, FunctionType, BuiltinFunctionType, MethodType)):
        raise TypeError(f"instrument_model measures an object that can be called, not a {cls.__qualname__}")
    if span is not None and span not in SPANS:
        raise ValueError(f"span={span!r} is not allowed (one of {', '.join(SPANS)})")
    inner = cast("type", type(getattr(model, "_orig_mod", model)))  # what torch.compile was given
    target = Target(f"{inner.__module__}.{inner.__qualname__}.__call__", name or "forward", nested=nested)
    measured = _declare(_Measured(target, span))
    return calls_of(cls).add(model, measured, f"{target.operation} {inner.__name__}")


def uninstrument_model(model: object) -> None:
    """End what ``instrument_model`` began; nothing happens where it did not."""
    calls = _models.get(type(model))
    if calls is not None:
        calls.discard(id(model))


_Model = tuple[ref[object], Callable[..., Any]]


class ModelCalls:
    """The measured models of one class, whose ``__call__`` looks for them: an instance's is never called."""

    def __init__(self, cls: type, own: Any = None) -> None:
        self._cls = cls
        self._measured: dict[int, list[_Model]] = {}
        """The latest last: it alone measures."""
        self.own = own
        """What the class itself has without us, if anything."""
        self.wrapped: Callable[[Any], Callable[..., Any]] = self._wrapped
        """What measures a call of the model, or what only passes it on."""
        self._looks_inside = False
        self._made: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        # a class of the script is pickled by value for other processes, with our `__call__` on it
        return ModelCalls, (self._cls, self.own)

    def add(self, model: object, measured: _Measured, name: str) -> Callable[[], None]:
        """Measure a model of the class; returns what ends that."""
        key = id(model)

        def collected(gone: ref[object]) -> None:
            if any(each[0] is gone for each in self._measured.get(key, ())):
                del self._measured[key]  # in a finalizer, so the class is left for later

        def stop() -> None:
            models = self._measured.get(key, [])
            if known in models:
                models.remove(known)
                if not models:
                    self.discard(key)

        known = ref(model, collected), measured.wrap(self.pass_on, name)
        if not self._is(model):
            self._measured[key] = []
        self._measured[key].append(known)
        if _Active.requests is not None:
            self.install()
        return stop

    def discard(self, key: int) -> None:
        """Measure a model no more."""
        self._measured.pop(key, None)
        self._let_go()

    def look_inside(self, inside: Callable[..., Any] | None) -> None:
        """Have ``inside(self, model, …)`` measure each call by what is in the model, or no longer so."""
        self._looks_inside = inside is not None
        if inside is not None:
            measured = functools.partial(inside, self)
            self.wrapped = lambda _: measured
            self.install()
            return
        self.wrapped = self._wrapped
        if _Active.requests is None:
            self.remove()
        self._let_go()

    def asking(self, model: object) -> Asking | None:
        """How a model's calls are asked for; None for one that is not measured."""
        found = self._measured.get(id(model))
        return asking_of(found[-1][1]) if found else None

    def stands_for(self, entry: object) -> bool:
        """Whether a class's entry is our ``__call__``."""
        return entry is not None and entry is self._made

    def _let_go(self) -> None:
        if not self._measured and not self._looks_inside:
            self.remove()
            _models.pop(self._cls, None)

    def install(self) -> None:
        """Put our ``__call__`` on the class."""
        if self._made is not None:
            return
        calls = self

        def call(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if compiler.compiling() or compiler.tracing():
                return calls.pass_on(model, *args, **kwargs)
            return calls.wrapped(model)(model, *args, **kwargs)

        self.own = vars(self._cls).get("__call__")
        self._made = functools.update_wrapper(call, self._cls.__call__)
        cast("Any", self._cls).__call__ = self._made

    def remove(self) -> None:
        """Put back what the class had, unless somebody has wrapped ours since: that one passes through."""
        if self._made is None or vars(self._cls).get("__call__") is not self._made:
            return
        self._made = None
        if self.own is None:
            del self._cls.__call__
        else:
            self._cls.__call__ = self.own

    def _wrapped(self, model: Any) -> Callable[..., Any]:
        found = self._measured.get(id(model))
        return found[-1][1] if found else self.pass_on

    def pass_on(self, model: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What the class does without us."""
        if self.own is None:
            return cast("Any", super(self._cls, model)).__call__(*args, **kwargs)
        return self.own.__get__(model, type(model))(*args, **kwargs)

    def _is(self, model: object) -> bool:
        """Whether what is known by its id is this very model, and none that is gone."""
        known = self._measured.get(id(model))
        return bool(known) and known[0][0]() is model


_models: dict[type, ModelCalls] = {}


def known_calls_of(cls: type) -> ModelCalls | None:
    """What measures models of a class, if any is measured."""
    return _models.get(cls)


def calls_of(cls: type) -> ModelCalls:
    """What measures models of a class."""
    return _models.get(cls) or _models.setdefault(cls, ModelCalls(cls))


def _declare(measured: _Measured) -> _Measured:
    _named.add(measured)
    if _Active.requests is not None:
        _Active.requests.series(measured.target)
    return measured
