# SPDX-License-Identifier: Apache-2.0
"""Targets by name: found whenever they come, followed into subclasses, and put back without a trace."""

from __future__ import annotations

import builtins
import gc
import importlib
import inspect
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.requests import targets as targets_module
from opentelemetry_instrumentation_torchmem.requests.specs import TargetSpec, parse_targets
from opentelemetry_instrumentation_torchmem.requests.targets import Targets

LOGGER = "opentelemetry_instrumentation_torchmem"


class Measuring:
    """Targets on the rooms they need, and what came of them."""

    def __init__(self, measured: Any, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._measured = measured
        self._installed: list[Targets] = []
        self.requests = measured.requests

    def install(self, *targets: Any, **options: Any) -> Targets:
        made = Targets(self.requests, parse_targets(list(targets)), **{"disabled": ("*",), **options})
        self._installed.append(made)
        made.install()
        return made

    def close(self) -> None:
        for targets in self._installed:
            targets.undo()

    @property
    def spans(self) -> list[tuple[str, str]]:
        """The spans since the last look, as (name, code.function.name)."""
        spans = [(span.name, span.attributes.get("code.function.name")) for span in self._measured.spans()]
        self._measured.exporter.clear()
        return spans

    @property
    def said(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == LOGGER]

    @property
    def skipped(self) -> int:
        return self._measured.telemetry.skipped["target"]


@pytest.fixture
def measuring(measured: Any, caplog: pytest.LogCaptureFixture) -> Iterator[Measuring]:
    caplog.set_level(logging.INFO, LOGGER)
    measuring = Measuring(measured, caplog)
    yield measuring
    measuring.close()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Write a module that can be imported: ``write("app_engine", "class Engine: ...")``."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def written(name: str, source: str) -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    yield written
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def load(name: str) -> Any:
    return importlib.import_module(name)


def entries(*places: type | ModuleType) -> list[dict[str, Any]]:
    return [dict(vars(place)) for place in places]


ENGINE = """
    class Base:
        def warm(self, n=1):
            return ("warm", n)

    class Engine(Base):
        def generate(self, prompt, *, n=1):
            "Generates."
            return prompt * n

        @staticmethod
        def fixed(n):
            return n

        @classmethod
        def made(cls, n):
            return cls, n

        @property
        def size(self):
            return 3

        class Inner:
            def run(self):
                return "ran"

    class Loud(Engine):
        def generate(self, prompt, *, n=1):
            return super().generate(prompt, n=n).upper()

    class Own(Engine):
        def generate(self, prompt, *, n=1):
            return "own"

    def call(n):
        return n + 1

    def through(n):
        return call(n)

    engine = Engine()
"""


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_method_is_measured_whenever_its_module_is_imported(measuring, write, imported):
    name = write("app_engine", ENGINE)
    if imported == "before":
        load(name)
    measuring.install("app_engine:Engine.generate")
    assert imported == "before" or name not in sys.modules, "nothing is imported for a target"
    assert load(name).Engine().generate("ab", n=2) == "abab"
    assert measuring.spans == [("generate Engine", "app_engine.Engine.generate")]
    assert measuring.said == []


def test_overrides_are_followed_and_one_that_calls_super_counts_once(measuring, write):
    app = load(write("app_engine", ENGINE))
    measuring.install("app_engine:Engine.generate")

    class Later(app.Loud):
        def generate(self, prompt, *, n=1):
            return super().generate(prompt, n=n) + "!"

    class Silent(app.Own):
        pass

    assert [cls().generate("a") for cls in (app.Loud, app.Own, Later, Silent)] == ["A", "own", "A!", "own"]
    assert measuring.spans == [
        (f"generate {cls}", "app_engine.Engine.generate") for cls in ("Loud", "Own", "Later", "Silent")
    ]


def test_what_a_method_is_stays_what_it_is(measuring, write):
    app = load(write("app_engine", ENGINE))
    before = inspect.signature(app.Engine.generate), app.Engine.__mro__, app.Loud.__mro__
    measuring.install("app_engine:Engine.generate", "app_engine:Engine.fixed", "app_engine:Engine.made")
    assert (inspect.signature(app.Engine.generate), app.Engine.__mro__, app.Loud.__mro__) == before
    assert app.Engine.generate.__doc__ == "Generates."
    assert isinstance(inspect.getattr_static(app.Engine, "fixed"), staticmethod)
    assert isinstance(inspect.getattr_static(app.Engine, "made"), classmethod)
    assert app.Engine.fixed(4) == app.Engine().fixed(4) == 4
    assert app.Own.made(1) == (app.Own, 1)
    assert measuring.spans == [
        ("fixed Engine", "app_engine.Engine.fixed"),
        ("fixed Engine", "app_engine.Engine.fixed"),
        ("made Own", "app_engine.Engine.made"),
    ]


def test_an_inherited_method_is_measured_on_the_named_class_alone(measuring, write):
    app = load(write("app_engine", ENGINE))
    targets = measuring.install("app_engine:Engine.warm")
    assert app.Engine().warm(2) == ("warm", 2)
    assert app.Base().warm() == ("warm", 1)
    assert measuring.spans == [("warm Engine", "app_engine.Engine.warm")]

    class Other(app.Base):
        def warm(self, n=1):
            return "other", super().warm(n)

    class Both(app.Engine, Other):
        pass

    assert Both().warm() == ("other", ("warm", 1)), "whoever comes next in the MRO is still reached"
    assert measuring.spans == [("warm Both", "app_engine.Engine.warm")]
    targets.undo()
    assert "warm" not in vars(app.Engine)


def test_an_override_that_comes_from_outside_the_family_is_followed(measuring, write):
    app = load(write("app_engine", ENGINE))
    measuring.install("app_engine:Engine.generate")

    class Mixin:
        def generate(self, prompt, *, n=1):
            return "mixed"

    class Mixed(Mixin, app.Engine):
        pass

    assert Mixed().generate("a") == "mixed"
    assert Mixin().generate("a") == "mixed"
    assert measuring.spans == [("generate Mixed", "app_engine.Engine.generate")]


def test_a_nested_class_and_a_class_by_another_modules_name(measuring, write):
    write("app_engine", ENGINE)
    name = write("app_api", "from app_engine import Engine as Motor")
    measuring.install("app_engine:Engine.Inner.run", "app_api:Motor.generate")
    app = load(name)
    app.Motor.Inner().run()
    app.Motor().generate("a")
    assert measuring.spans == [
        ("run Inner", "app_engine.Engine.Inner.run"),
        ("generate Engine", "app_api.Motor.generate"),
    ]


def test_a_function_is_measured_where_it_is_looked_up_through_its_module(measuring, write):
    write("app_engine", ENGINE)
    user = write("app_user", "import app_engine\nfrom app_engine import call\n")
    measuring.install("app_engine:call")
    app, user = load("app_engine"), load(user)
    assert (app.call(1), app.through(2), user.call(3)) == (2, 3, 4)
    assert measuring.spans == [("call", "app_engine.call")] * 3


def test_a_copy_of_a_function_taken_before_is_out_of_reach(measuring, write):
    write("app_engine", ENGINE)
    user = load(write("app_user", "from app_engine import call\n"))
    measuring.install("app_engine:call")
    assert user.call(1) == 2
    assert measuring.spans == []


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_pattern_takes_the_classes_that_the_module_defines(measuring, write, imported):
    write("app_engine", ENGINE)
    name = write(
        "app_model",
        """
        from app_engine import Engine as NetElsewhere
        class NetA:
            def forward(self): return "a"
        class NetB(NetA):
            def forward(self): return "b" + super().forward()
        class NetC(NetA): pass
        class NetConfig: pass
        class Other:
            def forward(self): return "other"
            class NetInner:
                def forward(self): return "inner"
        """,
    )
    if imported == "before":
        load(name)
    measuring.install("app_model:Net*.forward")
    app = load(name)

    class Later(app.NetA):
        def forward(self):
            return "later"

    for cls in (app.NetA, app.NetB, app.NetC, app.Other, app.Other.NetInner, Later):
        cls().forward()
    assert measuring.spans == [
        ("forward NetA", "app_model.NetA.forward"),
        ("forward NetB", "app_model.NetB.forward"),
        ("forward NetC", "app_model.NetA.forward"),
        ("forward Later", "app_model.NetA.forward"),
    ]
    measuring.install("app_model:*.NetInner.forward")
    app.Other.NetInner().forward()
    assert measuring.spans == [("forward NetInner", "app_model.Other.NetInner.forward")]
    assert measuring.said == []


def test_a_torch_module_without_a_forward_is_no_match(measuring, write):
    pytest.importorskip("torch")
    name = write(
        "app_model",
        """
        import torch
        class Container(torch.nn.Module): pass
        class Net(torch.nn.Linear): pass
        """,
    )
    targets = measuring.install("app_model:*.forward")
    app = load(name)
    assert "forward" not in vars(app.Container)
    import torch

    app.Net(2, 2)(torch.ones(3, 2))
    assert measuring.spans == [("forward Net", "app_model.Net.forward")]
    targets.undo()
    assert "forward" not in vars(app.Net)


def test_undo_leaves_every_class_and_module_as_it_was(measuring, write):
    app = load(write("app_engine", ENGINE))
    places = [app, app.Base, app.Engine, app.Loud, app.Own, app.Engine.Inner]
    before = entries(*places)
    targets = measuring.install(
        *(f"app_engine:Engine.{name}" for name in ("generate", "fixed", "made", "warm", "Inner.run")),
        "app_engine:call",
        "app_engine:*.generate",
    )

    class Later(app.Engine):
        def generate(self, prompt, *, n=1):
            return "later"

    later = vars(Later)["generate"].__wrapped__
    assert entries(*places) != before
    targets.undo()
    for place, was in zip(places, before, strict=True):
        now = dict(vars(place))
        assert list(now) == list(was)
        assert {name for name in was if now[name] is not was[name]} == set()
    assert vars(Later)["generate"] is later
    assert "__init_subclass__" not in vars(Later)

    class Afterwards(app.Engine):
        def generate(self, prompt, *, n=1):
            return "afterwards"

    assert not hasattr(vars(Afterwards)["generate"], "__wrapped__")
    Afterwards().generate("a")
    Later().generate("a")
    assert measuring.spans == []


def test_undo_with_a_request_in_flight_lets_it_finish(measuring, write):
    app = load(
        write(
            "app_stream",
            """
            class Engine:
                def stream(self):
                    yield 1
                    yield 2
            """,
        )
    )
    before = dict(vars(app.Engine))
    targets = measuring.install("app_stream:Engine.stream")
    stream = app.Engine().stream()
    assert next(stream) == 1
    targets.undo()
    assert dict(vars(app.Engine)) == before
    assert list(stream) == [2]
    assert measuring.spans == [("stream Engine", "app_stream.Engine.stream")]


def test_a_hook_that_waits_is_inert_after_undo(measuring, write):
    name = write("app_engine", ENGINE)
    targets = measuring.install("app_engine:Engine.generate")
    targets.undo()
    app = load(name)
    app.Engine().generate("a")
    assert not hasattr(app.Engine.generate, "__wrapped__")
    assert measuring.spans == []


def test_instrumenting_again_measures_again_and_once(measuring, write):
    app = load(write("app_engine", ENGINE))
    before = entries(app.Engine, app.Loud)
    for _ in range(3):
        targets = measuring.install("app_engine:Engine.generate")
        app.Loud().generate("a")
        assert measuring.spans == [("generate Loud", "app_engine.Engine.generate")]
        targets.undo()
    assert entries(app.Engine, app.Loud) == before


def test_a_class_with_its_own_init_subclass_keeps_it(measuring, write):
    app = load(
        write(
            "app_plugins",
            """
            registered = []
            class Plugin:
                def __init_subclass__(cls, /, name=None, **keywords):
                    super().__init_subclass__(**keywords)
                    registered.append((cls.__name__, name))
                def run(self): return "base"
            """,
        )
    )
    own = vars(app.Plugin)["__init_subclass__"]
    signature = inspect.signature(app.Plugin.__init_subclass__)
    targets = measuring.install("app_plugins:Plugin.run")
    assert inspect.signature(app.Plugin.__init_subclass__) == signature

    class Fast(app.Plugin, name="fast"):
        def run(self):
            return "fast"

    class Left(app.Plugin):
        def __init_subclass__(cls, **keywords):
            super().__init_subclass__(**keywords)

    class Faster(Left, name="faster"):
        def run(self):
            return "faster"

    assert app.registered == [("Fast", "fast"), ("Left", None), ("Faster", "faster")]
    Fast().run()
    Faster().run()
    assert measuring.spans == [
        ("run Fast", "app_plugins.Plugin.run"),
        ("run Faster", "app_plugins.Plugin.run"),
    ]
    targets.undo()
    assert vars(app.Plugin)["__init_subclass__"] is own
    with pytest.raises(TypeError, match="no keyword arguments"):

        class Wrong(app.Plugin, nonsense=1):
            pass


def test_a_class_that_a_decorator_makes_anew_is_measured_and_restored(measuring, write):
    app = load(write("app_engine", ENGINE))
    targets = measuring.install("app_engine:Engine.generate")
    from dataclasses import dataclass

    @dataclass(slots=True)
    class Made(app.Engine):
        n: int = 0

        def generate(self, prompt, *, n=1):
            return "made"

    Made().generate("a")
    assert measuring.spans == [("generate Made", "app_engine.Engine.generate")]
    targets.undo()
    assert not hasattr(vars(Made)["generate"], "__wrapped__")


def test_classes_that_come_and_go_are_not_kept(measuring, write):
    app = load(write("app_engine", ENGINE))
    targets = measuring.install("app_engine:Engine.generate")

    class Passing(app.Engine):
        def generate(self, prompt, *, n=1):
            return super().generate(prompt, n=n)

    Passing().generate("a")
    gone = weakref.ref(Passing)
    del Passing
    gc.collect()
    assert gone() is None
    targets.undo()


def test_somebody_elses_wrapper_around_ours_survives_undo_and_ours_passes_through(measuring, write):
    import wrapt

    app = load(write("app_engine", ENGINE))
    targets = measuring.install("app_engine:Engine.generate")
    theirs = []

    def note(wrapped, instance, args, kwargs):
        theirs.append(args)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(app.Engine, "generate", note)
    targets.undo()
    measuring.requests.close()
    measuring.spans.clear()
    assert app.Engine().generate("a") == "a"
    assert theirs == [("a",)]
    assert measuring.spans == []


def test_a_method_that_another_package_has_wrapped_is_measured(measuring, write):
    import wrapt

    app = load(write("app_engine", ENGINE))
    seen = []

    def note(wrapped, instance, args, kwargs):
        seen.append(type(instance).__name__)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(app.Engine, "generate", note)
    theirs = vars(app.Engine)["generate"]
    targets = measuring.install("app_engine:Engine.generate")
    assert app.Engine().generate("a", n=2) == "aa"
    assert seen == ["Engine"]
    assert measuring.spans == [("generate Engine", "app_engine.Engine.generate")]
    targets.undo()
    assert vars(app.Engine)["generate"] is theirs


def test_a_class_that_is_pickled_by_value_takes_nothing_of_ours_along(measuring, write):
    cloudpickle = pytest.importorskip("cloudpickle")
    app = load(write("app_engine", ENGINE))
    cloudpickle.register_pickle_by_value(app)
    measuring.install("app_engine:Engine.generate")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import pickle, sys\n"
            "Loud = pickle.load(sys.stdin.buffer)\n"
            "class Later(Loud):\n"
            "    def generate(self, prompt, *, n=1): return super().generate(prompt, n=n) + '!'\n"
            "print(Later().generate('a'))",
        ],
        input=cloudpickle.dumps(app.Loud),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [b"A!"], done.stderr.decode()


# options of a target


def test_a_target_has_its_own_operation_span_mode_and_nesting(measuring, write):
    app = load(
        write(
            "app_engine",
            """
            class Engine:
                def outer(self): return [self.inner(), self.quiet()]
                def inner(self): return 1
                def quiet(self): return 2
            """,
        )
    )
    measuring.install(
        "app_engine:Engine.outer",
        {"target": "app_engine:Engine.inner", "operation": "chat", "nested": True},
        {"target": "app_engine:Engine.quiet", "nested": True, "span": False},
    )
    app.Engine().outer()
    assert measuring.spans == [
        ("chat Engine", "app_engine.Engine.inner"),
        ("outer Engine", "app_engine.Engine.outer"),
    ]


def test_the_default_span_mode_holds_for_targets_that_say_nothing(measuring, write):
    app = load(write("app_engine", ENGINE))
    measuring.install(
        "app_engine:Engine.generate", {"target": "app_engine:call", "span": "new"}, default_span="off"
    )
    app.Engine().generate("a")
    app.call(1)
    assert measuring.spans == [("call", "app_engine.call")]


def test_an_iterator_is_followed_on_request(measuring, write):
    app = load(
        write(
            "app_engine",
            """
            class Engine:
                def stream(self): return iter([1, 2])
            """,
        )
    )
    measuring.install({"target": "app_engine:Engine.stream", "iterator": True})
    stream = app.Engine().stream()
    assert next(stream) == 1
    assert measuring.spans == []
    assert list(stream) == [2]
    assert measuring.spans == [("stream Engine", "app_engine.Engine.stream")]


def test_the_nearest_class_decides_what_a_method_belongs_to(measuring, write):
    app = load(write("app_engine", ENGINE))
    before = entries(app.Engine, app.Loud, app.Own)
    targets = measuring.install("app_engine:Engine.generate", "app_engine:Loud.generate")

    class Louder(app.Loud):
        def generate(self, prompt, *, n=1):
            return super().generate(prompt, n=n) + "!"

    for cls in (app.Engine, app.Loud, app.Own, Louder):
        cls().generate("a")
    assert measuring.spans == [
        ("generate Engine", "app_engine.Engine.generate"),
        ("generate Loud", "app_engine.Loud.generate"),
        ("generate Own", "app_engine.Engine.generate"),
        ("generate Louder", "app_engine.Loud.generate"),
    ]
    targets.undo()
    assert entries(app.Engine, app.Loud, app.Own) == before


# what is wrong


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("app_engine:Engine.missing", "Engine has no missing"),
        ("app_engine:Missing.generate", "app_engine has no Missing"),
        ("app_engine:Engine.Missing.run", "app_engine has no Engine.Missing"),
        ("app_engine:missing", "app_engine has no missing"),
        ("app_engine:Engine.size", "a property cannot be measured, functions and methods can"),
        ("app_engine:Engine.Inner", "it is a class: name its method, as app_engine:Engine.Inner."),
        ("app_engine:Engine", "it is a class: name its method, as app_engine:Engine.generate"),
        ("app_engine:engine", "a Engine cannot be measured"),
        ("app_engine:engine.generate", "engine is no class but a Engine"),
        (
            "app_engine:Nothing*.generate",
            "no class that app_engine defines matches Nothing* and has generate",
        ),
        ("app_engine:Engine.__new__", "of the special methods only __call__"),
        ("app_engine.Engine.generate", "a target is module:Class.method"),
        ("app_engine:", "a target is module:Class.method"),
        (":Engine.generate", "a target is module:Class.method"),
        ("app engine:Engine.generate", "a target is module:Class.method"),
        ("app_engine:Engine.gen*", "a target is module:Class.method"),
        ("app_*:Engine.generate", "a target is module:Class.method"),
        ({"target": "app_engine:call", "span": "old"}, "span='old' is not allowed (one of new, enrich, off)"),
        ({"target": "app_engine:call", "nested": "yes"}, "nested='yes' is not allowed (true or false)"),
        ({"target": "app_engine:call", "operation": ""}, "operation='' is not allowed"),
        (
            {"target": "app_engine:call", "nestled": True},
            "'nestled' is no option of a target (iterator, nested",
        ),
        ({"span": "new"}, "target {'span': 'new'} is not measured: a target is module:Class.method"),
        (7, "target 7 is not measured: a target is module:Class.method"),
        (None, "target None is not measured: a target is module:Class.method"),
        ({"target": None}, "target {'target': None} is not measured: a target is module:Class.method"),
        (textwrap.dedent, "here textwrap:dedent, as a text"),
    ],
)
def test_a_wrong_target_is_told_once_by_name_and_costs_only_itself(measuring, write, target, why):
    app_name = write("app_engine", ENGINE)
    measuring.install(target, "app_engine:Own.generate")
    app = load(app_name)  # no error reaches the import
    app.Own().generate("a")
    assert measuring.spans == [("generate Own", "app_engine.Own.generate")]
    measuring.close()
    assert measuring.skipped == 1
    [line] = measuring.said
    assert why in line
    name = target["target"] if isinstance(target, dict) and "target" in target else target
    assert str(name) in line or repr(name) in line


def test_what_is_said_of_a_method_says_where_it_was_named(measuring, write):
    load(write("app_engine", ENGINE))
    specs = [replace(spec, origin="a variable") for spec in parse_targets("app_engine:Engine.size")]
    measuring.install(*specs)
    made = Targets(measuring.requests, specs, disabled=("*",))
    made.install()
    made.undo()
    assert [line.partition(" is not measured")[0] for line in measuring.said] == [
        "torchmem: target app_engine:Engine.size",
        "torchmem: target app_engine:Engine.size (from a variable)",
    ]


def test_what_a_modules_getattr_makes_is_told_to_be_named_where_it_is(measuring, write):
    load(write("app_engine", "def __getattr__(name): raise AttributeError(name)"))
    measuring.install("app_engine:Engine.run", "app_engine:call")
    assert [line.partition(": ")[2].partition("if its")[1] for line in measuring.said] == ["if its"] * 2


def test_a_function_that_cython_compiled_is_measured(measuring):
    module = pytest.importorskip("sklearn.utils._openmp_helpers")
    bare = module._openmp_effective_n_threads
    made = measuring.install("sklearn.utils._openmp_helpers:_openmp_effective_n_threads")
    assert module._openmp_effective_n_threads(n_threads=3) == 3
    assert inspect.signature(module._openmp_effective_n_threads) == inspect.signature(bare)
    assert measuring.said == []
    assert len(measuring.spans) == 1
    made.undo()
    assert module._openmp_effective_n_threads is bare


def test_a_module_that_is_never_imported_is_told_at_the_end(measuring):
    targets = measuring.install("app_never:Engine.generate")
    assert measuring.said == []
    targets.undo()
    assert measuring.said == [
        "torchmem: target app_never:Engine.generate is not measured: app_never was never imported"
    ]
    assert measuring.skipped == 1
    targets.undo()
    assert measuring.skipped == 1


def test_what_is_not_there_after_a_minute_is_told_at_a_collection_and_not_again(
    measuring, write, monkeypatch
):
    sys.modules["app_install"] = installer = ModuleType("app_install")
    specs = [
        replace(spec, origin="a variable")
        for spec in parse_targets("app_gone:Engine.generate,app_late:Engine.generate,app_self:Gone.run")
    ]
    targets = Targets(measuring.requests, specs, disabled=("*",))
    installer.install = targets.install
    try:
        load(write("app_self", "import app_install; app_install.install()"))
    finally:
        del sys.modules["app_install"]
    now = targets_module.monotonic()
    monkeypatch.setattr(targets_module, "monotonic", lambda: now + passed)
    for passed in (59.0, 61.0, 130.0):
        targets.before_collection()
        assert len(measuring.said) == (0 if passed < 60 else 3)
    app = load(write("app_late", ENGINE))
    app.Engine().generate("a")
    assert measuring.spans == [("generate Engine", "app_late.Engine.generate")]
    assert measuring.skipped == 0
    targets.undo()
    said = "torchmem: target %s (from a variable) is not measured so far: %s"
    assert measuring.said == [
        said % ("app_gone:Engine.generate", "app_gone has not been imported"),
        said % ("app_late:Engine.generate", "app_late has not been imported"),
        said % ("app_self:Gone.run", "app_self has no class Gone"),
    ]
    assert measuring.skipped == 2


KILLED = """
import os, signal, sys
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor
reader = InMemoryMetricReader()
TorchMemInstrumentor().instrument(meter_provider=MeterProvider([reader]))
import torch
from opentelemetry_instrumentation_torchmem.requests import targets
reader.get_metrics_data()
print("a minute later", file=sys.stderr, flush=True)
targets.LATE = 0.0
reader.get_metrics_data()
reader.get_metrics_data()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_is_killed_has_told_its_misspelt_target():
    named = {"OTEL_PYTHON_TORCHMEM_TARGETS": "app.engin:Engine.generate"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=os.environ | named,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [line for line in killed.stderr.splitlines() if line.startswith(("torchmem", "a minute"))] == [
        "a minute later",
        "torchmem: target app.engin:Engine.generate (from OTEL_PYTHON_TORCHMEM_TARGETS) is not measured "
        "so far: app.engin has not been imported",
    ]


def test_a_target_that_came_late_and_is_wrong_is_told_again(measuring, write, monkeypatch):
    targets = measuring.install("app_late:Engine.missing")
    now = targets_module.monotonic()
    monkeypatch.setattr(targets_module, "monotonic", lambda: now + 61)
    targets.before_collection()
    load(write("app_late", ENGINE))
    assert [line.rpartition(": ")[2] for line in measuring.said] == [
        "app_late has not been imported",
        "Engine has no missing",
    ]


def test_a_class_or_a_function_of_a_module_that_is_still_being_imported_is_told_as_what_it_is(
    measuring, write
):
    sys.modules["app_install"] = installer = ModuleType("app_install")
    installer.install = lambda: measuring.install("app_self:Engine", "app_self:call")
    try:
        load(write("app_self", "import app_install; app_install.install()" + textwrap.dedent(ENGINE)))
    finally:
        del sys.modules["app_install"]
    assert [line.partition(" is not measured: ")[2] for line in measuring.said] == [
        "app_self was still being imported, and had no call yet: import torch before app_self, or decorate "
        "it with @track",
        "it is a class: name its method, as app_self:Engine.generate",
    ]


def test_a_metaclass_that_resists_reaches_nobody(measuring, write):
    name = write(
        "app_strict",
        """
        class Frozen(type):
            def __setattr__(cls, name, value): raise RuntimeError("frozen")
        class Engine(metaclass=Frozen):
            def generate(self): return 1
        """,
    )
    measuring.install("app_strict:Engine.generate")
    assert load(name).Engine().generate() == 1
    [line] = measuring.said
    assert "frozen" in line


def test_a_module_that_instruments_while_it_is_imported_is_waited_for(measuring, write):
    sys.modules["app_install"] = installer = ModuleType("app_install")
    installer.install = lambda: measuring.install("app_self:Engine.generate", "app_self:Gone.run")
    name = write(
        "app_self",
        """
        import app_install
        app_install.install()
        class Engine:
            def generate(self): return 1
        """,
    )
    builder = builtins.__build_class__
    try:
        app = load(name)
    finally:
        del sys.modules["app_install"]
    app.Engine().generate()
    assert measuring.spans == [("generate Engine", "app_self.Engine.generate")]
    measuring.close()
    assert builtins.__build_class__ is builder
    [line] = measuring.said
    assert "app_self never had a class Gone" in line


def test_a_targets_counters_exist_at_0_as_soon_as_it_is_wrapped(measuring, write, measured):
    name = write("app_engine", ENGINE)
    measuring.install("app_engine:Engine.generate")
    assert measured.points("torch.memory.request.retries") == []
    load(name)
    [point] = measured.points("torch.memory.request.retries")
    assert (point.value, dict(point.attributes)) == (
        0,
        {"torch.operation": "generate", "code.function.name": "app_engine.Engine.generate"},
    )


# parsing


def test_text_a_list_and_mappings_are_read_alike():
    text = parse_targets(" app.engine:Engine.generate , app.model:Net*.forward,")
    assert text == parse_targets(["app.engine:Engine.generate", {"target": "app.model:Net*.forward"}])
    assert text == parse_targets(text)
    assert text[0] == TargetSpec("app.engine:Engine.generate")
    assert parse_targets([{"target": "a:B.c", "span": "enrich", "operation": "chat", "nested": True}]) == (
        TargetSpec("a:B.c", span="enrich", operation="chat", nested=True),
    )
    assert parse_targets("") == ()


@pytest.mark.parametrize("value", [7, None, {"target": "a:B.c"}, 1.5, object()])
def test_what_is_no_list_of_targets_is_an_error_that_says_what_is_allowed(value):
    with pytest.raises(ValueError, match="comma-separated text or a list"):
        parse_targets(value)


def test_a_spec_made_by_hand_is_looked_at_too():
    assert parse_targets([TargetSpec("nonsense")])[0].problem is not None


# cost


def test_targets_cost_in_proportion_to_their_number(measuring, write):
    def cost(classes: int) -> float:
        """CPU seconds for 20 targets a class, as many that never come, and 200 classes born later."""
        name = write(
            f"app_of_{classes}",
            "\n".join(
                f"class C{i}:\n" + "".join(f"    def m{j}(self): return {j}\n" for j in range(20))
                for i in range(classes)
            ),
        )
        app = load(name)
        targets = [f"{name}:C{i}.m{j}" for i in range(classes) for j in range(20)]
        never = [f"{name}_never_{i}:C.m" for i in range(20 * classes)]
        began = time.process_time()
        measuring.install(*parse_targets(",".join(targets + never)))
        for _ in range(200):
            type("Sub", (app.C0,), {"m0": lambda self: 1})
        return time.process_time() - began

    few, many = cost(25), cost(100)
    assert many < 10 * few  # four times as many: 4 in proportion, 16 for the square
    load("app_of_25").C5().m7()
    assert measuring.spans == [("m7 C5", "app_of_25.C5.m7")]


@pytest.mark.skipif(os.name == "nt", reason="the sizes of processes are told otherwise there")
def test_no_thread_and_no_import_comes_of_waiting(measuring):
    import threading

    threads, modules = threading.active_count(), set(sys.modules)
    measuring.install("app_never:Engine.generate", disabled=())
    assert threading.active_count() == threads
    assert {name for name in set(sys.modules) - modules if not name.startswith("encodings")} == set()
