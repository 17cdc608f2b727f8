# SPDX-License-Identifier: Apache-2.0
"""Which functions are measured: those built in, and those the user names.

A target is written

- ``module:Class.method``: also inherited, static and class methods, ``__call__``, and those of nested classes
  (``module:Outer.Inner.run``). Subclasses that override it, those of today and those of tomorrow, are
  followed, and a call that reaches several of them counts once.
- ``module:Net*.forward``: each class that the module defines and whose name (``Outer.Inner`` for a nested
  one) the pattern matches, with its subclasses. Only classes that are there once the module is imported.
- ``module:function``: replaced in its module. It is measured where it is looked up there: by
  ``module.function()``, by the module's own code and by a ``from module import function`` that runs after the
  module's import. A copy taken before (in a registry, as a default argument, in a closure) cannot be reached.
- ``__main__:Class.method``, or a pattern: in the script itself, also in the processes that multiprocessing
  spawns of it. Its functions cannot be reached, as they come into being while the script already runs:
  decorate them with ``@track``.

Nothing is imported for a target: it waits for the user's own import, and takes what is imported already. A
target that is not there is logged once, by name, and counted; one that may still come is logged at the first
collection after a minute, as a process that is killed has no end to tell it at, and counted at the end.

Out of reach: properties; objects that are callable but no functions; methods that an instance holds itself;
a future subclass whose bases have an ``__init_subclass__`` that does not call ``super``; a module imported a
second time or reloaded.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

from ..imports import when_imported
from .probe import Requests, Target
from .specs import BUILT_IN, BUILT_IN_LABELS, TargetSpec
from .wrapping import wrap_attribute

LATE = 60.0
"""Seconds after which a target that is not there yet is told, at the next collection."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A target to be found, built in or named."""

    module: str
    owner: str
    """The class's path in the module, or a pattern; empty for a function."""
    name: str
    target: Target
    named: str | None = None
    """As the user wrote it; None for one built in, whose absence is no news."""
    origin: str = ""
    """Where the user wrote it."""

    @property
    def pattern(self) -> bool:
        return not {"*", "?", "["}.isdisjoint(self.owner)


class Targets:
    """Finds the targets, wraps them, and puts everything back. Owner: the instrumentor.

    A method belongs to the target that the nearest watched class in its class's ``__mro__`` names: so it does
    not matter which class comes first, and looking again changes nothing.
    """

    def __init__(
        self,
        requests: Requests,
        specs: Sequence[TargetSpec] = (),
        *,
        disabled: Iterable[str] = (),
        default_span: str = "new",
    ) -> None:
        """``disabled`` are globs over the labels of built-in targets: ``transformers.*``; ``*`` for all."""
        self._requests = requests
        self._specs = specs
        self._disabled = tuple(disabled)
        self._default_span = default_span
        self._undone = False
        self._waiting: dict[str, list[_Wanted]] = {}
        """By the module that has not been imported yet."""
        self._late: dict[tuple[str, str], list[_Wanted]] = {}
        self._late_patterns: list[_Wanted] = []
        """By module and class: those in modules that run already, where each class body may be the one."""
        self._running: set[str] = set()
        """The modules of which something is or was late."""
        self._watched: WeakKeyDictionary[type, dict[str, Target]] = WeakKeyDictionary()
        self._origins: dict[Target, str] = {}
        """Where the user wrote those of the watched, for the log."""
        self._patched: WeakSet[type] = WeakSet()
        self._functions: list[tuple[ModuleType, str]] = []
        self._ours: WeakSet[Any] = WeakSet()
        """Our functions."""
        self._matched: set[_Wanted] = set()
        """The patterns among them that a class has matched."""
        self._class_builders: tuple[Any, Any] | None = None
        """The real ``__build_class__`` and ours."""
        self._asked_at: float | None = None
        """Monotonic seconds; None while there is nothing to be told at a collection."""
        self._told: set[_Wanted] = set()
        """Those that a collection has told."""

    def install(self) -> None:
        """Wrap what is imported already, and wait for the rest. Never raises."""
        for wanted in self._all_wanted():
            self._waiting.setdefault(wanted.module, []).append(wanted)
        atexit.register(self._tell_missing)
        for module in tuple(self._waiting):
            self._await(module)
        self._asked_at = monotonic()

    def undo(self) -> None:
        """Put everything back, also with requests in flight. Never raises."""
        self._undone = True
        self._asked_at = None
        atexit.unregister(self._tell_missing)
        self._tell_missing()
        self._stop_building()
        for module, name in self._functions:
            self._restore(module, name)
        classes = [*self._patched]
        for module in self._running:  # a decorator may have made a second class from a patched one
            classes.extend(_classes_of(sys.modules.get(module)))
        for cls in classes:
            for name in tuple(vars(cls)):
                self._restore(cls, name)

    # what is wanted

    def _all_wanted(self) -> Iterator[_Wanted]:
        named: dict[str, TargetSpec] = {}
        for spec in self._specs:
            if spec.problem is not None:
                self._refuse(spec.named, spec.problem)
            else:
                named[spec.target] = spec
        for row in BUILT_IN:
            spec = named.get(row.label) or TargetSpec(row.label)
            if row.label not in named and any(fnmatchcase(row.label, glob) for glob in self._disabled):
                continue
            target = self._target(spec, row.label, row.operation)
            yield _Wanted(row.module, row.owner, row.method, target)
        for spec in named.values():
            if spec.target not in BUILT_IN_LABELS:
                owner, _, name = spec.path.rpartition(".")
                target = self._target(spec, spec.target.replace(":", "."), name.strip("_") or name)
                yield _Wanted(spec.module, owner, name, target, spec.named, spec.origin)

    def _target(self, spec: TargetSpec, label: str, operation: str) -> Target:
        return Target(
            label, spec.operation or operation, spec.span or self._default_span, spec.nested, spec.iterator
        )

    # when it is there

    def _await(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is not None and (name == "__main__" or _is_being_imported(module)):
            self._take(name, module, runs=True)
            return
        when_imported(name, self._imported)

    def _imported(self, name: str, module: ModuleType) -> None:
        if not self._undone:
            # a lazy package puts another object in its own place
            self._take(name, sys.modules.get(name, module), runs=False)

    def _take(self, name: str, module: ModuleType, *, runs: bool) -> None:
        """Wrap what is wanted of a module. Never raises: it would fail the user's import."""
        for wanted in self._waiting.pop(name, ()):
            self._look_for(module, wanted, runs)

    def _look_for(self, module: ModuleType, wanted: _Wanted, runs: bool) -> None:
        try:
            problem = self._found(module, wanted, runs)
        except Exception as error:
            self._refuse(wanted.named or str(wanted.target.function), f"it cannot be wrapped: {error!r}")
        else:
            if problem is not None and wanted.named is not None:
                self._refuse(wanted.named, problem)

    def _found(self, module: ModuleType, wanted: _Wanted, runs: bool) -> str | None:
        if wanted.pattern:
            found = self._watch(
                (cls, wanted)
                for cls in _classes_of(module)
                if fnmatchcase(cls.__qualname__, wanted.owner) and _definer(cls, wanted.name) is not None
            )
            if runs:
                self._expect(wanted)
                self._matched.update([wanted] if found else ())
            elif not found:
                return f"no class that {wanted.module} defines matches {wanted.owner} and has {wanted.name}"
            return None
        first, *rest = (wanted.owner or wanted.name).split(".")
        value: Any = vars(module).get(first)
        if value is None and (source := _lazily_from(module, first)) is not None:
            self._waiting.setdefault(source, []).append(wanted)
            self._await(source)
            return None
        for part in rest:
            value = inspect.getattr_static(value, part, None)
        if value is None and runs and (wanted.owner or wanted.name.lstrip("_")[:1].isupper()):
            self._expect(wanted)
            return None
        if value is None:
            if wanted.module == "__main__":
                return "a function of the script comes too late to be wrapped: decorate it with @track"
            if runs:
                return (
                    f"{wanted.module} was still being imported, and had no {wanted.name} yet: "
                    f"import torch before {wanted.module}, or decorate it with @track"
                )
            maker = "__getattr__" in vars(module) and not rest
            hint = "; if its __getattr__ makes it, name the module that defines it" if maker else ""
            return f"{wanted.module} has no {wanted.owner or wanted.name}{hint}"
        if not wanted.owner:
            return self._put(module, wanted.name, wanted.target, value)
        if not isinstance(value, type):
            return (
                f"{wanted.owner} is no class but a {type(value).__qualname__}: name the method of its class"
            )
        if not self._watch([(value, wanted)]):
            return f"{wanted.owner} has no {wanted.name}"
        return None

    def before_collection(self) -> None:
        """Name what is not there by now: a process that is killed has no end to tell it at."""
        asked_at = self._asked_at
        if asked_at is None or monotonic() - asked_at < LATE:
            return
        self._asked_at = None
        for wanted, module in self._missing():
            what = f"{wanted.module} has no class {wanted.owner or wanted.name}"
            if module is not None:
                what = f"{module} has not been imported{_hint(module)}"
            self._told.add(wanted)
            self._requests.telemetry.say_once(
                f"target {wanted.named} so far",
                "torchmem: target %s is not measured so far: %s",
                wanted.named,
                what,
            )

    def _missing(self) -> Iterator[tuple[_Wanted, str | None]]:
        """What the user named and is not there yet, with the module that it waits for; None where the class
        is missing."""
        for module, missing in tuple(self._waiting.items()):  # other threads import meanwhile
            yield from ((each, module) for each in tuple(missing) if each.named is not None)
        late = [each for found in tuple(self._late.values()) for each in tuple(found)]
        for wanted in (*late, *self._late_patterns):
            if wanted.named is not None and wanted not in self._matched:
                yield wanted, None

    def _tell_missing(self) -> None:
        """Name what was never found: at ``undo`` or when the interpreter ends."""
        # helper processes (multiprocessing's resource tracker, say) have the same environment, and no torch
        level = logging.WARNING if "torch" in sys.modules else logging.INFO
        for wanted, module in self._missing():
            if wanted in self._told:
                self._requests.telemetry.skip("target")
            elif module is not None:
                self._refuse(str(wanted.named), f"{module} was never imported{_hint(module)}", level)
            else:
                missing = wanted.owner or wanted.name
                self._refuse(str(wanted.named), f"{wanted.module} never had a class {missing}", level)
        self._waiting.clear()
        self._late.clear()
        self._late_patterns.clear()

    def _refuse(self, named: str, problem: str, level: int = logging.WARNING) -> None:
        telemetry = self._requests.telemetry
        telemetry.skip("target")
        telemetry.say_once(
            f"target {named}", "torchmem: target %s is not measured: %s", named, problem, level=level
        )

    # classes that are still to come

    def _expect(self, wanted: _Wanted) -> None:
        self._running.add(wanted.module)
        if wanted.pattern:
            self._late_patterns.append(wanted)
        else:
            self._late.setdefault((wanted.module, wanted.owner or wanted.name), []).append(wanted)
        if self._class_builders is not None:
            return
        real = builtins.__build_class__

        def build_class(body: Any, name: str, /, *bases: Any, **keywords: Any) -> Any:
            cls = real(body, name, *bases, **keywords)
            if isinstance(cls, type):
                self._built(cls)
            return cls

        self._class_builders = real, build_class
        builtins.__build_class__ = build_class

    def _built(self, cls: type) -> None:
        try:
            module = _module_of(cls)
            if self._undone or module not in self._running:
                return
            path = cls.__qualname__
            matching = [
                each
                for each in self._late_patterns
                if each.module == module
                and fnmatchcase(path, each.owner)
                and _definer(cls, each.name) is not None
            ]
            self._matched.update(matching)
            matching += self._late.pop((module, path), ())
            for wanted in matching:
                if not wanted.owner:
                    self._refuse(wanted.named or path, _is_a_class(f"{wanted.module}:{path}", cls))
                elif not self._watch([(cls, wanted)]) and wanted.named is not None:
                    self._refuse(wanted.named, f"{wanted.owner} has no {wanted.name}")
            if not (self._late or self._late_patterns):
                self._stop_building()
        except Exception as error:
            self._refuse(f"in {cls!r}", f"it cannot be wrapped: {error!r}")

    def _stop_building(self) -> None:
        builders, self._class_builders = self._class_builders, None
        if builders is not None and builtins.__build_class__ is builders[1]:
            builtins.__build_class__ = builders[0]

    # wrapping

    def _watch(self, found: Iterable[tuple[type, _Wanted]]) -> bool:
        """Follow methods of classes; whether any of them is there, in the classes or below."""
        pairs = list(found)
        for cls, wanted in pairs:
            names = self._watched.setdefault(cls, {})
            if wanted.name in names and wanted.named is None:
                continue  # what the user says of it holds
            target = wanted.target
            if wanted.pattern:
                target = replace(target, function=f"{wanted.module}.{cls.__qualname__}.{wanted.name}")
            if not names:
                self._follow_subclasses(cls)
            names[wanted.name] = target
            if wanted.origin:
                self._origins[target] = f" (from {wanted.origin})"
        there = [self._wrap_method(each, wanted.name) for cls, wanted in pairs for each in (cls, *below(cls))]
        return any(there)

    def _follow_subclasses(self, cls: type) -> None:
        """Hear of each class that will be derived from one."""
        own = vars(cls).get("__init_subclass__")
        heard = _Heard(self._born)

        def __init_subclass__(born: type, *arguments: Any, **keywords: Any) -> None:  # noqa: N807
            if own is None:
                cast("Any", super(cls, born)).__init_subclass__(*arguments, **keywords)
            else:
                own.__get__(None, born)(*arguments, **keywords)
            heard.born(born)

        if own is not None:
            functools.update_wrapper(__init_subclass__, function_in(own))
        cast("Any", cls).__init_subclass__ = classmethod(__init_subclass__)
        self._stands(cls, "__init_subclass__", _ABSENT if own is None else own, None)

    def _born(self, cls: type) -> None:
        if self._undone:
            return
        try:
            for name in {name for base in cls.__mro__ for name in self._watched.get(base, ())}:
                self._wrap_method(cls, name)
        except Exception as error:
            self._refuse(f"in {cls!r}", f"it cannot be wrapped: {error!r}")

    def _wrap_method(self, cls: type, name: str) -> bool:
        """See to it that a class's method is measured; False where there is none."""
        definer = _definer(cls, name)
        if definer is None:
            return False
        target = next(names[name] for base in cls.__mro__ if name in (names := self._watched.get(base, {})))
        own: Any = vars(cls).get(name, _ABSENT)
        standing = self._standing(own)
        if standing is not None and standing.target == target:
            self._patched.add(cls)  # perhaps the copy of a class that a decorator has made
        elif standing is not None:
            self._restore(cls, name)
            return self._wrap_method(cls, name)
        elif definer is cls or not any(name in self._watched.get(base, ()) for base in definer.__mro__):
            problem = self._put(cls, name, target, vars(definer)[name])
            if problem is not None:
                origin = self._origins.get(target, "")
                self._refuse(f"{_module_of(cls)}:{cls.__qualname__}.{name}{origin}", problem)
        return True

    def _put(self, place: type | ModuleType, name: str, target: Target, entry: Any) -> str | None:
        """Wrap a function where it is; what stands against that."""
        function = function_in(entry)
        if function is None:  # a class that says it has no such method
            return None
        if isinstance(function, type):
            path = f"{_module_of(place)}:{place.__qualname__}" if isinstance(place, type) else place.__name__
            return _is_a_class(f"{path}{'.' if isinstance(place, type) else ':'}{name}", function)
        if not (isinstance(function, _FUNCTIONS) or type(function).__name__ == _CYTHON):
            return f"a {type(function).__qualname__} cannot be measured, functions and methods can"
        before = vars(place).get(name, _ABSENT)
        try:
            wrap_attribute(place, name, target, self._requests)
        except Exception as error:
            return f"it cannot be wrapped: {error!r}"
        if vars(place)[name] is not before:  # else it is measured already: decorated with @track
            self._stands(place, name, before, target)
            self._requests.series(target)  # its counters exist from now on
        return None

    def _stands(self, place: type | ModuleType, name: str, entry: Any, target: Target | None) -> None:
        """Remember what one of ours stands for, on itself: a table of that would keep classes alive."""
        function = function_in(vars(place)[name])
        vars(function)["__torchmem__"] = _Standing(entry, target)
        self._ours.add(function)
        if isinstance(place, type):
            self._patched.add(place)
        else:
            self._functions.append((place, name))

    def _standing(self, entry: Any) -> _Standing | None:
        function = function_in(entry)
        if type(function) is not FunctionType or function not in self._ours:
            return None  # a wrapper around ours has the attribute as well
        return vars(function)["__torchmem__"]

    def _restore(self, place: type | ModuleType, name: str) -> None:
        while (standing := self._standing(vars(place).get(name))) is not None:
            if standing.entry is _ABSENT:
                delattr(place, name)
            else:
                setattr(place, name, standing.entry)


class _Heard:
    """Who hears of a new class: nobody in the processes that a class of the script is pickled for."""

    __slots__ = ("born",)

    def __init__(self, born: Callable[[type], object] = id) -> None:
        self.born = born

    def __reduce__(self) -> tuple[type[_Heard], tuple[()]]:
        return _Heard, ()


@dataclass(frozen=True, slots=True)
class _Standing:
    """What one of our functions stands for."""

    entry: Any
    """What was in its place."""
    target: Target | None


_ABSENT = object()
"""There was nothing: it is deleted in the end."""


def function_in(entry: Any) -> Any:
    """The function of a static or class method, else the entry itself."""
    return entry.__func__ if issubclass(type(entry), (staticmethod, classmethod)) else entry


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
"""Another package's proxy around a function passes for one."""
_CYTHON = "cython_function_or_method"
"""A class of each release of Cython's own."""


def _definer(cls: type, name: str) -> type | None:
    """The class that a method comes from; None where there is none but the stub of ``object`` or torch."""
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    if definer is object or definer is None:
        return None
    stub = getattr(vars(definer)[name], "__name__", None) == "_forward_unimplemented"
    return None if stub else definer


def below(cls: type) -> Iterator[type]:
    """Every subclass there is."""
    seen: set[type] = set()
    waiting = [cls]
    while waiting:
        for each in type.__subclasses__(waiting.pop()):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
                yield each


def _classes_of(module: ModuleType | None) -> list[type]:
    """The classes that a module defines, those inside classes too, in the order of definition."""
    found: dict[type, None] = {}
    places: list[ModuleType | type] = [] if module is None else [module]
    for place in places:
        values: list[object] = list(vars(place).values())
        inside = [each for each in values if isinstance(each, type) and each not in found]
        inside = [each for each in inside if module and _module_of(each) == _alias(module.__name__)]
        found.update(dict.fromkeys(inside))
        places.extend(inside)
    return list(found)


def _module_of(cls: type) -> str:
    return _alias(str(cls.__module__))


def _alias(module: str) -> str:
    """The script keeps its name in the processes that multiprocessing spawns."""
    return "__main__" if module == "__mp_main__" else module


def _is_a_class(written: str, cls: type) -> str:
    """What is wrong with a class as a target, with a method of it that could be one."""
    methods = [name for name, entry in vars(cls).items() if type(function_in(entry)) is FunctionType]
    method = next((name for name in methods if not name.startswith("_")), "__call__")
    return f"it is a class: name its method, as {written}.{method}"


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _lazily_from(module: ModuleType, name: str) -> str | None:
    """The module that a lazy package of Hugging Face's would import a name from."""
    submodules: dict[str, str] = getattr(module, "_class_to_module", {})
    return f"{module.__name__}.{submodules[name]}" if name in submodules else None


def _hint(module: str) -> str:
    """Whether the module is the script itself, which runs as ``__main__``."""
    spec: Any = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = getattr(spec, "name", None) or Path((sys.argv or [""])[0]).stem  # __file__ is gone at the end
    return f"; it is the script itself: write __main__ for {module}" if script == module else ""
