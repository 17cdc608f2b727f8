# SPDX-License-Identifier: Apache-2.0
"""Calls of what ``torch.compile`` gives, measured around the compiled region.

Inside the region our wrappers pass straight through; outside, the same targets measure that the bare model or
function has. Knows the wrappers, and of the compiler what makes and what is a compiled thing.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

from . import compiler, track
from .asking import Asking, Function, asking_of
from .iterators import followed

COMPILER = "torch._dynamo.eval_frame"
"""The module that is waited for: most processes never import it."""

_CALL = "_call_impl"
_HOLDING = ("_compiled_call_impl", "forward")
"""Where a model holds what was compiled of it: ``model.compile()``, ``model.forward = torch.compile(…)``."""
_NO_KEYWORDS: Mapping[str, Any] = {}


class CompiledCalls:
    """Has them measured, until ``remove``. Owner: the instrumentor."""

    def __init__(self) -> None:
        self._came_first = COMPILER in sys.modules
        self._context: Any = None
        """The compiler's class that compiles a function, whose ``__call__`` is ours meanwhile."""
        self._own: Any = None
        self._made: Any = None
        self._models: track.ModelCalls | None = None
        """Those of what ``torch.compile(model)`` gives."""
        self._holders: dict[int, ref[Any]] = {}
        """The models that hold what was compiled, by their ids."""

    def install(self, dynamo: ModuleType) -> None:
        """Measure what is compiled from now on, and what models hold that were compiled before."""
        optimized: Any = vars(dynamo)["OptimizedModule"]
        self._models = track.calls_of(optimized)
        self._models.look_inside(_call_of_compiled)
        self._hear(vars(dynamo)["_TorchDynamoContext"], getattr(optimized, "_initialize", None))
        if self._came_first:
            for model in _holding_compiled(self._own, sys.modules["torch"].nn.Module):
                if not isinstance(model, optimized):
                    self._take_hold(model)

    def remove(self) -> None:
        """Put everything back; what is compiled stays so."""
        if self._context is not None and self._context.__call__ is self._made:
            self._context.__call__ = self._own
        if self._models is not None:
            self._models.look_inside(None)
        for known in tuple(self._holders.values()):
            model = known()
            for name in () if model is None else _HOLDING:
                standing = _standing(vars(model).get(name))
                if standing is not None:
                    vars(model)[name] = standing.compiled
        self._holders.clear()

    def _hear(self, context: Any, initialize: Any) -> None:
        """Hear of each function that is compiled."""
        own: Any = context.__call__
        inside: Any = getattr(initialize, "__code__", None)  # of a model, whose calls are looked into
        heard = self._heard

        def call(compiling: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            made = own(compiling, function, *args, **kwargs)
            if getattr(compiling, "export", False) or sys._getframe(1).f_code is inside:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                return made
            return heard(function, made)

        self._context, self._own, self._made = context, own, functools.update_wrapper(call, own)
        context.__call__ = self._made

    def _heard(self, function: Any, made: Any) -> Any:
        try:
            outside = _measured_outside(function, made)
            if outside is not made and isinstance(function, MethodType) and function.__name__ == _CALL:
                self._remember(function.__self__)
            return outside
        except Exception:  # what was compiled is the user's all the same
            return made

    def _take_hold(self, model: Any) -> None:
        held: dict[str, Any] = getattr(model, "__dict__", {})
        for name in _HOLDING:
            made: Any = held.get(name)
            if _is_compiled(made):
                held[name] = _outside_of_model(made, ref(model))
                self._remember(model)

    def _remember(self, model: Any) -> None:
        key, holders = id(model), self._holders

        def collected(gone: ref[Any]) -> None:
            if holders.get(key) is gone:
                del holders[key]

        holders[key] = ref(model, collected)


# around the region


def _modules_of(model: object) -> dict[str, Any]:
    return cast("dict[str, Any]", vars(model).get("_modules", {}))


class _Standing:
    """What one of our functions stands for; on itself, as a table of that would keep models alive."""

    __slots__ = ("askings", "compiled", "first", "function")

    def __init__(
        self,
        function: Function,
        compiled: Function,
        askings: Callable[[], Sequence[Asking]],
        first: Callable[[], Any] | None,
    ) -> None:
        self.function = ref(function)
        self.compiled = compiled
        self.askings = askings
        self.first = first


def _standing(thing: object) -> _Standing | None:
    found = vars(thing).get("__torchmem__") if type(thing) is FunctionType else None
    # a wrapper around ours has the attribute as well
    return found if isinstance(found, _Standing) and found.function() is thing else None


def _measured_outside(function: Any, made: Any) -> Any:
    """What was made of a function, measured; or itself, where the function is no target."""
    if type(made) is not FunctionType:
        return made
    if not isinstance(
        function, (FunctionType, MethodType)
    ):  # the compiler looks into what is compiled already
        function = vars(made).get("_torchdynamo_orig_callable")
    before = _standing(function)
    if before is not None:  # compiled once more
        return _outside(made, before.askings, before.first)
    bound = isinstance(function, MethodType)
    me: Any = function.__self__ if bound else None
    if bound and callable(getattr(me, _CALL, None)) and hasattr(me, "forward"):  # a model's
        if function.__name__ in (_CALL, "forward"):
            return _outside_of_model(made, ref(me))
        if function == me.__call__:
            return _outside_of_model(made, ref(me), called=True)
    asking = _nearest_asking(function)
    if asking is None:
        return made
    return _outside(made, lambda: (asking,), (lambda: me) if bound else None)


def _outside_of_model(made: Function, model: ref[Any], called: bool = False) -> Function:
    return _outside(made, lambda: _askings_of(model(), called), model)


def _outside(
    compiled: Function, askings: Callable[[], Sequence[Asking]], first: Callable[[], Any] | None = None
) -> Function:
    """A compiled function, measured by the targets of the bare one at the time of a call; ``first`` is what
    it is bound to."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiler.compiling() or compiler.tracing():
            return compiled(*args, **kwargs)
        seen = args if first is None else (first(), *args)
        return _around(askings(), compiled, seen, args, kwargs)

    made: Any = functools.update_wrapper(wrapper, compiled)
    if "_torchdynamo_wrapper_id" in vars(made):  # else the compiler takes ours for another function's copy
        made._torchdynamo_wrapper_id = id(made)  # noqa: SLF001
    made.__torchmem__ = _Standing(made, compiled, askings, first)
    return made


def _call_of_compiled(calls: track.ModelCalls, made: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A call of what ``torch.compile(model)`` gave."""
    model = _modules_of(made).get("_orig_mod")  # to ask for it takes the time of all the rest
    if model is None:
        model = made._orig_mod  # noqa: SLF001
    own = calls.asking(made)
    askings = [*(() if own is None else (own,)), *_askings_of(model, called=True)]
    return _around(askings, functools.partial(calls.pass_on, made), (model, *args), args, kwargs)


def _around(
    askings: Sequence[Asking],
    function: Function,
    seen: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """A call, measured by the first target and within that by the next: as the bare one would be."""
    if not askings:
        return function(*args, **kwargs)
    asking, token = askings[0], None
    probe = asking.begin(seen, kwargs)
    try:
        if asking.nested:
            token = _expect(asking, seen)
        result = _around(askings[1:], function, seen, args, kwargs)
    except BaseException as error:
        if probe is not None:
            probe.fail(error)
        raise
    finally:
        if token is not None:
            _expected.reset(token)
    return result if probe is None else followed(probe, result)


# what runs in eager mode after all


class _Expected:
    """A call that is measured outside, and would measure itself where it is not compiled."""

    __slots__ = ("asking", "first", "pending")

    def __init__(self, asking: Asking, first: object) -> None:
        self.asking, self.first, self.pending = asking, first, True


_expected: ContextVar[tuple[_Expected, ...]] = ContextVar("torchmem-compiled", default=())


def _expect(asking: Asking, seen: Sequence[Any]) -> Any:
    """Have the next call of it pass through: a target that is measured inside others counts once as well."""
    if not isinstance(asking.begin, _OnceOutside):
        asking.begin = _OnceOutside(asking)
    return _expected.set((*_expected.get(), _Expected(asking, seen[0] if seen else None)))


class _OnceOutside:
    """Begins a call, but for one that is expected."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._begin = asking.begin

    def __call__(self, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] = _NO_KEYWORDS) -> Any:
        first = arguments[0] if arguments else None
        for each in reversed(_expected.get()):
            if each.pending and each.asking is self._asking and each.first is first:
                each.pending = False
                return None
        return self._begin(arguments, keywords)


# which targets


def _askings_of(model: object, called: bool) -> list[Asking]:
    """The targets that measure a call of a model, or of its ``forward`` alone, the outermost first."""
    cls = type(model)
    methods = _methods_of(cls)
    found: list[Asking | None] = []
    if called:
        calls = track.known_calls_of(cls)
        found.append(None if calls is None else calls.asking(model))
        found.append(methods.call)
    if methods.forward is not None:
        own = getattr(model, "__dict__", {}).get("forward")
        if own is None or _innermost(own) is _innermost(_method(cls, "forward")):  # a hook's, or compiled
            found.append(methods.forward)
    return [asking for asking in found if asking is not None]


class _Methods:
    """How the methods of a class ask, as long as they are these."""

    __slots__ = ("_are", "call", "forward")

    def __init__(self, cls: Any) -> None:
        self._are = _reference(cls.__call__), _reference(getattr(cls, "forward", None))
        self.call = _nearest_asking(_method(cls, "__call__"))
        self.forward = _nearest_asking(_method(cls, "forward"))

    def hold(self, cls: Any) -> bool:
        """Whether they are."""
        call, forward = self._are
        return call() is cls.__call__ and forward() is getattr(cls, "forward", None)


_methods: WeakKeyDictionary[type, _Methods] = WeakKeyDictionary()


def _methods_of(cls: type) -> _Methods:
    known = _methods.get(cls)
    if known is None or not known.hold(cls):
        known = _methods[cls] = _Methods(cls)
    return known


def _reference(function: object) -> Callable[[], object]:
    """One that keeps nothing alive: a method may refer to its class."""
    return ref(function) if type(function) is FunctionType else lambda: None


def _method(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        entry = vars(base).get(name)
        calls = track.known_calls_of(base)
        if name == "__call__" and calls is not None and calls.stands_for(entry):
            entry = calls.own
        if entry is not None:
            return entry
    return None


def _nearest_asking(function: Any) -> Asking | None:
    """That of a function, or of the one that it wraps."""
    for each in _chain(function):
        asking = asking_of(each)
        if asking is not None:
            return asking if asking.plain else None  # streams are not compiled
    return None


def _innermost(function: Any) -> Any:
    return ([*_chain(function)] or [None])[-1]


def _chain(function: Any) -> Iterator[Any]:
    for _ in range(100):
        while isinstance(function, MethodType):
            function = function.__func__
        if function is None:
            return
        yield function
        function = getattr(function, "__dict__", {}).get("__wrapped__")


# what was compiled before


def _is_compiled(thing: object) -> bool:
    return type(thing) is FunctionType and "_torchdynamo_orig_callable" in vars(thing)


def _holding_compiled(compiles: Function, model_class: type) -> list[Any]:
    """The models that hold a compiled function, or a wrapper around one, in their own dictionaries.

    From what refers to the code that the compiler makes its functions of: one look, if nothing was compiled.
    A walk over all objects, ``gc.get_objects``, would touch tuples that other threads are still building, and
    those then fail.
    """
    codes = list(_codes_within(inspect.unwrap(compiles).__code__))
    found: dict[int, Any] = {}
    compiled = [each for each in gc.get_referrers(*codes) if _is_compiled(each)]
    known = set(map(id, compiled))
    while compiled:
        dictionaries: list[Any] = [each for each in gc.get_referrers(*compiled) if type(each) is dict]
        owners = gc.get_referrers(*dictionaries) if dictionaries else []
        found.update((id(each), each) for each in owners if issubclass(type(each), model_class))
        compiled = [each for each in owners if _is_compiled(each) and id(each) not in known]
        known.update(map(id, compiled))
    return list(found.values())


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_within(each)
