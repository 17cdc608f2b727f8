# SPDX-License-Identifier: Apache-2.0
"""What is compiled is measured outside the compiled region, whichever came first: measuring or compiling."""

# ruff: noqa: E402 - torch may not be there

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, instrument_model, track


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.linear(x).relu() * scale


class Special(Net):
    def forward(self, x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
        return super().forward(x, scale) + 1


class Parent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Breaking(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


class Engine:
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


def step(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


X = torch.ones(2, 4)
FORWARD = f"{__name__}:Net.forward"


class Instrumented:
    """``on(targets)``, ``off()``, and the names of the spans since the last look."""

    def __init__(self, measured: Any) -> None:
        self._measured = measured

    def on(self, *targets: Any, **options: Any) -> None:
        TorchMemInstrumentor().instrument(
            tracer_provider=self._measured.tracers,
            meter_provider=self._measured.meters,
            targets=list(targets),
            **options,
        )

    def off(self) -> None:
        TorchMemInstrumentor().uninstrument()

    @property
    def names(self) -> list[str]:
        spans = self._measured.exporter.get_finished_spans()
        self._measured.exporter.clear()
        return [span.name for span in spans]


@pytest.fixture
def instrumented(measured: Any) -> Iterator[Instrumented]:
    torch._dynamo.reset()
    counters.clear()
    handle = Instrumented(measured)
    yield handle
    if TorchMemInstrumentor().is_instrumented_by_opentelemetry:
        handle.off()


def by_function(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


def by_method(model: torch.nn.Module) -> Any:
    model.compile(backend="eager", fullgraph=True)
    return model


def by_forward(model: torch.nn.Module) -> Any:
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    return model


def by_call(model: torch.nn.Module) -> Any:
    return torch.compile(model.__call__, backend="eager", fullgraph=True)


def by_decorator(model: torch.nn.Module) -> Any:
    return torch.compile(backend="eager", fullgraph=True)(model)


WAYS = [by_function, by_method, by_forward, by_call, by_decorator]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
nestings = pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])


def compiler_did(call: Callable[[], Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    call()
    return {
        "stats": {name: counters["stats"][name] for name in ("calls_captured", "unique_graphs")},
        "graph breaks": dict(counters["graph_break"]),
        "recompilations": [bool(each.recompile_reason) for each in get_compilation_metrics()],
    }


@ways
@nestings
@pytest.mark.parametrize("model_class", [Net, Special], ids=lambda each: each.__name__)
def test_a_class_target_is_measured_once_a_call_where_its_model_is_compiled_later(
    instrumented, way, nested, model_class
):
    bare = model_class()
    expected = bare(X)
    instrumented.on({"target": FORWARD, "nested": nested})
    compiled = way(bare)
    for _ in range(3):
        assert torch.equal(compiled(X), expected)
    assert instrumented.names == [f"forward {model_class.__name__}"] * 3
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("way", WAYS[:3], ids=lambda way: way.__name__)
@nestings
def test_a_class_target_is_measured_where_its_model_was_compiled_before(instrumented, way, nested):
    model = Net()
    expected = model(X)
    compiled = way(model)
    assert torch.equal(compiled(X), expected)
    before = {name: vars(model).get(name) for name in ("forward", "_compiled_call_impl")}
    for _ in range(2):  # and again
        instrumented.on({"target": FORWARD, "nested": nested})
        assert torch.equal(compiled(X), expected)
        assert torch.equal(compiled(X), expected)
        assert instrumented.names == ["forward Net"] * 2
        instrumented.off()
        assert torch.equal(compiled(X), expected)
        assert instrumented.names == []
        assert {name: vars(model).get(name) for name in before} == before
    assert not counters["graph_break"]


def test_a_wrapper_around_what_was_compiled_before_is_measured_too(instrumented):
    model = by_forward(Net())
    compiled = model.forward

    @functools.wraps(compiled)
    def wrapper(*args: Any) -> Any:
        return compiled(*args)

    model.forward = wrapper
    instrumented.on(FORWARD)
    model(X)
    assert instrumented.names == ["forward Net"]
    instrumented.off()
    assert model.forward is wrapper


def test_to_instrument_beside_threads_that_build_tuples_breaks_none_of_them(instrumented):
    kept = by_forward(Net())
    wrong: list[BaseException] = []
    ended = threading.Event()

    def build() -> None:
        while not ended.is_set():
            try:
                tuple(time.sleep(0) for _ in range(50))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        instrumented.on(FORWARD)
        kept(X)
        instrumented.off()
    ended.set()
    for thread in threads:
        thread.join()
    assert instrumented.names == ["forward Net"] * 5
    assert wrong == []


@ways
def test_one_model_is_measured_where_it_is_compiled_later(instrumented, way):
    model, other = Net(), Net()
    expected = model(X)
    instrumented.on()
    stop = instrument_model(model, "rank")
    compiled, other = way(model), way(other)
    other(X)
    for _ in range(2):
        assert torch.equal(compiled(X), expected)
    if way is by_forward:
        assert torch.equal(model(X), expected)
        assert instrumented.names == ["rank Net"] * 3
    else:
        assert instrumented.names == ["rank Net"] * 2
    assert not counters["graph_break"]
    stop()
    compiled(X)
    assert instrumented.names == []


def test_one_model_is_measured_where_it_was_compiled_before(instrumented):
    model = Net()
    compiled = by_function(model)
    compiled(X)
    instrumented.on()
    stop = instrument_model(model, "rank")
    compiled(X)
    stop()
    compiled(X)
    assert instrumented.names == ["rank Net"]


def test_the_compiled_and_the_model_it_was_made_of_count_once_and_undo_in_either_order(instrumented):
    from torch._dynamo.eval_frame import OptimizedModule

    before = dict(vars(OptimizedModule))
    for first in (0, 1):
        instrumented.on()
        model = Net()
        compiled = by_function(model)
        stops = [instrument_model(model, "inner"), instrument_model(compiled, "outer")]
        compiled(X)
        assert instrumented.names == ["outer Net"]
        stops[first]()
        compiled(X)
        assert instrumented.names == [("outer Net", "inner Net")[first]]
        stops[1 - first]()
        compiled(X)
        assert instrumented.names == []
        instrumented.off()
        assert dict(vars(OptimizedModule)) == before


def test_a_compiled_model_instrumented_before_anybody_measures_leaves_nothing_behind(instrumented):
    from torch._dynamo.eval_frame import OptimizedModule

    before = dict(vars(OptimizedModule))
    compiled = by_function(Net())
    stop = instrument_model(compiled, "early")
    assert dict(vars(OptimizedModule)) == before
    instrumented.on(FORWARD)
    compiled(X)
    assert instrumented.names == ["early Net"]
    stop()
    compiled(X)
    assert instrumented.names == ["forward Net"]
    instrumented.off()
    assert dict(vars(OptimizedModule)) == before


def test_what_torch_offers_is_as_it_was_after_uninstrument(instrumented):
    from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext

    by_function(Net())(X)  # the compiler's first call changes nn.Module by itself
    touched = OptimizedModule, _TorchDynamoContext, torch.nn.Module
    compile_, before = torch.compile, [dict(vars(each)) for each in touched]
    instrumented.on("torch._dynamo.eval_frame:OptimizedModule.__call__")
    by_function(Net())(X)
    assert instrumented.names == ["call OptimizedModule"]
    assert torch.compile is compile_  # the compiler knows it by identity
    assert [dict(vars(each)) == entries for each, entries in zip(touched, before, strict=True)] == [
        False,
        False,
        True,
    ]
    instrumented.off()
    assert [dict(vars(each)) for each in touched] == before


@ways
def test_the_compiler_does_what_it_does_without_us(instrumented, way):
    def run() -> None:
        torch.manual_seed(0)
        compiled = way(Net())
        for rows in (2, 2, 3, 5):
            compiled(torch.ones(rows, 4))

    bare = compiler_did(run)
    assert bare["recompilations"] == [False, True]
    instrumented.on(FORWARD, f"{__name__}:Parent.forward")
    assert compiler_did(run) == bare
    assert len(instrumented.names) == 4


@ways
def test_a_compiled_child_leaves_its_compiled_parent_whole(instrumented, way):
    def run() -> None:
        parent = Parent()
        parent.first = way(parent.first) if way is not by_call else parent.first
        parent.second.compile(backend="eager", fullgraph=True)
        compiled = torch.compile(parent, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(X)

    bare = compiler_did(run)
    instrumented.on(FORWARD, f"{__name__}:Parent.forward")
    assert compiler_did(run) == bare
    assert instrumented.names == ["forward Parent"] * 3


def test_a_model_that_breaks_its_graph_is_one_span_a_call(instrumented):
    instrumented.on({"target": f"{__name__}:Breaking.forward", "nested": True})
    compiled = torch.compile(Breaking(), backend="eager")
    for _ in range(3):
        compiled(X)
    assert instrumented.names == ["forward Breaking"] * 3


def failing_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such kernel")


@nestings
def test_a_model_that_falls_back_to_eager_is_one_span_a_call(instrumented, nested):
    instrumented.on({"target": FORWARD, "nested": nested})
    model = Net()
    expected = model(X)
    instrumented.names.clear()
    compiled = torch.compile(model, backend=failing_backend)
    with torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(2):
            assert torch.equal(compiled(X), expected)
    assert instrumented.names == ["forward Net"] * 2


@nestings
@pytest.mark.parametrize("disabled", ["the compiler", "the call"])
def test_a_model_that_is_not_compiled_after_all_is_one_span_a_call(instrumented, nested, disabled):
    instrumented.on({"target": FORWARD, "nested": nested})
    model = Net()
    expected = model(X)
    instrumented.names.clear()
    if disabled == "the call":
        compiled = torch.compile(torch.compiler.disable(model), backend="eager")
    else:
        compiled = torch.compile(model, backend="eager", disable=True)
    for _ in range(2):
        assert torch.equal(compiled(X), expected)
    assert instrumented.names == ["forward Net"] * 2


def test_nested_targets_inside_what_falls_back_are_each_told(instrumented):
    instrumented.on(
        {"target": FORWARD, "nested": True}, {"target": f"{__name__}:Parent.forward", "nested": True}
    )
    compiled = torch.compile(Parent(), backend="eager", disable=True)
    compiled(X)
    assert instrumented.names == ["forward Net", "forward Net", "forward Parent"]


def test_an_error_in_a_compiled_model_is_its_spans(instrumented, measured):
    instrumented.on(FORWARD)
    compiled = by_function(Net())
    with pytest.raises(Exception, match=r"shape|size|mat"):
        compiled(torch.ones(2, 7))
    (span,) = measured.exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"


@pytest.mark.parametrize("way", [by_function, by_method], ids=lambda way: way.__name__)
def test_a_compiled_model_is_copied_and_pickled_as_ever(instrumented, way):
    instrumented.on(FORWARD)
    compiled = way(Net())
    expected = compiled(X)
    copied = copy.deepcopy(compiled)
    data = pickle.dumps(compiled if way is by_method else compiled._orig_mod)
    assert b"torchmem" not in data
    assert torch.equal(copied(X), expected)
    assert torch.equal(pickle.loads(data)(X), expected)
    assert instrumented.names == ["forward Net"] * 3


def test_models_that_were_compiled_are_not_kept(instrumented):
    import weakref

    instrumented.on(FORWARD)
    gone = []
    for way in (by_function, by_method, by_forward):
        model = Net()
        way(model)
        gone.append(weakref.ref(model))
        del model
    gc.collect()
    assert [each() for each in gone] == [None] * 3


# functions


def test_a_function_is_measured_where_it_is_compiled_later(instrumented):
    instrumented.on(f"{__name__}:step")
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(X), X + 1)
    assert instrumented.names == ["step"] * 2
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(
        torch.compile(lambda x: compiled(x) * 2, backend="eager", fullgraph=True)(X), X * 2 + 2
    )
    assert instrumented.names == []
    instrumented.off()
    assert torch.equal(compiled(X), X + 1)
    assert instrumented.names == []


def test_a_tracked_function_is_measured_where_it_is_compiled_whenever_somebody_measures(instrumented):
    @torch.compile(backend="eager", fullgraph=True)
    @track("early")
    def early(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    instrumented.on()

    @torch.compile(backend="eager", fullgraph=True)
    @track("late", nested=True)
    def late(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    late(X)
    assert instrumented.names == ["late"]
    instrumented.off()
    late(X)
    instrumented.on()
    late(X)
    early(X)  # compiled while nobody measured: a copy that was taken before
    assert instrumented.names == ["late"]


def test_a_function_that_is_compiled_twice_counts_once(instrumented):
    instrumented.on({"target": f"{__name__}:step", "nested": True})
    once = torch.compile(step, backend="eager", fullgraph=True)
    twice = torch.compile(once, backend="eager", fullgraph=True)
    assert torch.equal(twice(X), X + 1)
    assert instrumented.names == ["step"]


def test_a_method_is_measured_where_it_is_compiled_later(instrumented):
    instrumented.on(f"{__name__}:Engine.step")
    engine = Engine()
    compiled = torch.compile(engine.step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), X + 1)
    assert instrumented.names == ["step Engine"]


def test_what_the_compiler_puts_on_a_function_is_there(instrumented):
    bare = torch.compile(step, backend="eager", fullgraph=True)
    instrumented.on(f"{__name__}:step")
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert vars(compiled).keys() >= vars(bare).keys()
    assert (compiled.__name__, compiled.__doc__) == (bare.__name__, bare.__doc__)
    assert torch.equal(torch.compiler.disable(compiled)(X), X + 1)


def test_what_compiles_inside_a_compiled_function_leaves_it_whole(instrumented):
    def inside(x: torch.Tensor) -> torch.Tensor:
        return torch.compile(step, backend="eager")(x) * 2

    bare = compiler_did(lambda: torch.compile(inside, backend="eager", fullgraph=True)(X))
    instrumented.on(f"{__name__}:step")
    assert compiler_did(lambda: torch.compile(inside, backend="eager", fullgraph=True)(X)) == bare


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_exporting_is_no_call(instrumented, strict):
    instrumented.on(FORWARD)
    model = Net()
    program = torch.export.export(model, (X,), strict=strict)
    assert torch.equal(program.module()(X), model(X))
    assert instrumented.names == ["forward Net"]


def test_a_compiled_method_of_a_model_is_measured_again_when_instrumented_again(instrumented):
    model = by_forward(Net())
    for _ in range(2):
        instrumented.on(FORWARD)
        model(X)
        later = by_forward(Net())
        later(X)
        assert instrumented.names == ["forward Net"] * 2
        instrumented.off()
        model(X)
        later(X)
    instrumented.on(FORWARD)
    later(X)
    assert instrumented.names == ["forward Net"]


def test_a_hook_that_took_the_place_of_forward_and_calls_it_is_compiled_around(instrumented):
    """As accelerate does it."""
    import functools

    instrumented.on(FORWARD)
    model = Net()
    bare = model.forward
    model.forward = functools.update_wrapper(functools.partial(lambda x: bare(x) + 1), bare)
    expected = model(X)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(X), expected)
    model.forward = lambda x: x  # it is not what was named
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    assert instrumented.names == ["forward Net"] * 2


def test_targets_of_the_call_and_of_forward_each_measure_what_is_compiled(instrumented):
    instrumented.on({"target": FORWARD, "nested": True}, f"{__name__}:Net.__call__")
    stop = instrument_model(model := Net(), "one")
    by_function(model)(X)
    assert instrumented.names == ["forward Net", "one Net"]  # what is called twice on the way counts once
    stop()
    by_function(model)(X)
    assert instrumented.names == ["forward Net", "call Net"]


# coroutines, which the compiler runs through as if they were plain functions, and streams


async def rescaled(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


async def rows(x: torch.Tensor):
    for row in x:
        yield row + 1


class Async(torch.nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def makes_rows(x: torch.Tensor) -> Any:
    return rows(x + 1)


async def all_of(stream: Any) -> list[torch.Tensor]:
    return [each async for each in stream]


COROUTINES: dict[str, Callable[[], Any]] = {
    "a coroutine": lambda: asyncio.run(torch.compile(rescaled, backend="eager")(X)),
    "a whole coroutine": lambda: asyncio.run(torch.compile(rescaled, backend="eager", fullgraph=True)(X)),
    "an async generator": lambda: asyncio.run(all_of(torch.compile(rows, backend="eager")(X))),
    "one made inside": lambda: asyncio.run(all_of(torch.compile(makes_rows, backend="eager")(X))),
    "an async forward": lambda: asyncio.run(torch.compile(Async(), backend="eager", fullgraph=True)(X)),
}


@pytest.mark.parametrize("name", COROUTINES)
@pytest.mark.parametrize("state", ["measured", "decorated, and nobody measures"])
def test_what_is_compiled_of_coroutines_is_what_is_compiled_of_the_bare(
    instrumented, state, name, monkeypatch
):
    results: list[Any] = []
    call = lambda: results.append(COROUTINES[name]())  # noqa: E731
    bare = compiler_did(call)
    if state == "measured":
        instrumented.on(f"{__name__}:rescaled", f"{__name__}:rows", f"{__name__}:Async.forward")
    else:
        monkeypatch.setitem(globals(), "rescaled", track(rescaled))
        monkeypatch.setitem(globals(), "rows", track(rows))
        monkeypatch.setattr(Async, "forward", track(Async.forward))
    ours = compiler_did(call)
    assert (ours["stats"], ours["recompilations"]) == (bare["stats"], bare["recompilations"])
    assert [torch.stack(list(each)).tolist() for each in results] == [
        torch.stack(list(results[0])).tolist()
    ] * 2
