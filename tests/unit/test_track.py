# SPDX-License-Identifier: Apache-2.0
"""What the user measures in code: blocks, functions of every kind, one model; whoever measures, or nobody."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from opentelemetry_instrumentation_torchmem.requests import compiler
from opentelemetry_instrumentation_torchmem.requests.track import (
    activate,
    deactivate,
    instrument_model,
    track,
    uninstrument_model,
)


class Off:
    """Nobody measures until `on()`."""

    def __init__(self, measured: Any) -> None:
        self.measured = measured

    def on(self, default_span: str = "new") -> None:
        activate(self.measured.requests, default_span)

    @property
    def spans(self) -> list[Any]:
        """The spans since the last look."""
        spans = self.measured.spans()
        self.measured.exporter.clear()
        return spans

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]


@pytest.fixture
def off(measured: Any) -> Iterator[Off]:
    yield Off(measured)
    deactivate()


@pytest.fixture
def measuring(off: Off) -> Off:
    off.on()
    return off


# blocks


def test_a_block_is_one_span_with_the_attributes_it_is_given(measuring):
    with track("rerank") as request:
        request.set_attribute("app.documents", 40)
    [span] = measuring.spans
    assert span.name == "rerank"
    assert dict(span.attributes) == {"torch.operation": "rerank", "app.documents": 40}


def test_a_block_that_raises_is_an_error_and_the_error_goes_on(measuring):
    error = KeyError("gone")
    with pytest.raises(KeyError) as raised, track("rerank"):
        raise error
    assert raised.value is error
    [span] = measuring.spans
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "KeyError"


def test_a_failure_under_an_enriched_span_is_named_there_and_recorded_by_its_owner_alone(measuring):
    @track("rerank", span="enrich")
    def rerank():
        raise TimeoutError("too late")

    for handled in (True, False):
        with suppress(TimeoutError), measuring.measured.tracer.start_as_current_span("server"):
            try:
                rerank()
            except TimeoutError:
                if not handled:
                    raise
    passed_over, failed = measuring.spans
    assert passed_over.attributes["error.type"] == failed.attributes["error.type"] == "TimeoutError"
    assert (passed_over.status.status_code.name, len(passed_over.events)) == ("UNSET", 0)
    assert (failed.status.status_code.name, len(failed.events)) == ("ERROR", 1)


def test_a_block_enriches_the_current_span_or_makes_none(measuring):
    with measuring.measured.tracer.start_as_current_span("GET /"):
        with track("rerank", span="enrich") as request:
            request.set_attribute("app.documents", 40)
        with track("rerank", span="off") as request:
            request.set_attribute("app.lost", 1)
    [span] = measuring.spans
    assert span.name == "GET /"
    assert dict(span.attributes) == {"app.documents": 40}


def test_the_default_mode_is_that_of_whoever_measures(off):
    @track("chat")
    def chat():
        return 1

    @track("told", span="new")
    def told():
        return 2

    off.on("off")
    with track("rerank"):
        pass
    chat()
    told()
    assert off.names == ["told"]


def test_an_asynchronous_block_is_a_block(measuring):
    async def work() -> None:
        async with track("rerank") as request:
            request.set_attribute("app.documents", 40)
            await asyncio.sleep(0)
        with suppress(KeyError):
            async with track("failing"):
                raise KeyError

    asyncio.run(work())
    rerank, failing = measuring.spans
    assert dict(rerank.attributes) == {"torch.operation": "rerank", "app.documents": 40}
    assert failing.attributes["error.type"] == "KeyError"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_call_during_which_the_process_forks_is_the_parents_alone():
    """And what the child calls then is measured, though it began within that call."""
    script = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from exported import Traced
from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track
import torch

traced = Traced()
TorchMemInstrumentor().instrument(tracer_provider=traced.provider)

@track("stream")
def stream():
    yield 1
    yield 2

running = stream()
next(running)
with track("parent"):
    child = os.fork() == 0
    if child:
        with track("child"):
            pass
list(running)
os.write(1, (json.dumps(sorted(span.name for span in traced.spans)) + "\\n").encode())
if child:
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert sorted(done.stdout.splitlines()) == ['["child"]', '["parent", "stream"]'], done.stderr


def test_blocks_inside_one_another_count_once_unless_asked(measuring):
    with track("outer"):
        with track("inner"):
            pass
        with track("wanted", nested=True):
            pass
    assert measuring.names == ["wanted", "outer"]


def test_a_block_may_be_entered_again_and_inside_itself(measuring):
    again = track("again", nested=True)
    with again, again:
        pass
    with again:
        pass
    assert measuring.names == ["again"] * 3


def test_blocks_in_tasks_belong_to_their_task(measuring):
    async def task(name: str) -> None:
        with track(name) as request:
            await asyncio.sleep(0.01)
            request.set_attribute("app.name", name)

    async def main() -> None:
        await asyncio.gather(*(task(f"t{i}") for i in range(3)))

    asyncio.run(main())
    assert sorted((span.name, span.attributes["app.name"]) for span in measuring.spans) == [
        (f"t{i}", f"t{i}") for i in range(3)
    ]


# functions


def test_one_object_serves_many_tasks_each_with_its_own_time(measuring):
    shared = track("shared")

    async def life(seconds: float) -> None:
        with shared as request:
            request.set_attribute("app.seconds", seconds)
            await asyncio.sleep(seconds)

    async def main() -> None:
        await asyncio.gather(life(0.3), life(0.1))

    asyncio.run(main())
    times = {
        span.attributes["app.seconds"]: (span.end_time - span.start_time) / 1e9 for span in measuring.spans
    }
    assert times[0.3] >= 0.3
    assert 0.1 <= times[0.1] < times[0.3]


def test_functions_of_every_kind_are_measured_and_stay_of_their_kind(measuring):
    @track
    def plain(a, *, b=2):
        "Adds."
        return a + b

    @track("chat")
    async def coroutine(n):
        await asyncio.sleep(0)
        return n

    @track
    def stream(n):
        yield from range(n)

    @track(span="new")
    async def astream(n):
        for i in range(n):
            yield i

    async def main():
        return await coroutine(3), [i async for i in astream(2)]

    assert plain(1, b=4) == 5
    assert asyncio.run(main()) == (3, [0, 1])
    assert list(stream(2)) == [0, 1]
    assert str(inspect.signature(plain)) == "(a, *, b=2)"
    assert plain.__doc__ == "Adds."
    assert inspect.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(stream)
    assert inspect.isasyncgenfunction(astream)
    here = f"{__name__}.test_functions_of_every_kind_are_measured_and_stay_of_their_kind.<locals>"
    assert [
        (span.attributes["torch.operation"], span.attributes["code.function.name"])
        for span in measuring.spans
    ] == [
        ("plain", f"{here}.plain"),
        ("chat", f"{here}.coroutine"),
        ("astream", f"{here}.astream"),
        ("stream", f"{here}.stream"),
    ]


def test_methods_are_measured_static_and_class_methods_on_either_side(measuring):
    class Engine:
        @track("run")
        def run(self):
            return 1

        @track
        @staticmethod
        def fixed():
            return 2

        @classmethod
        @track
        def made(cls):
            return cls

    assert (Engine().run(), Engine.fixed(), Engine().fixed(), Engine.made()) == (1, 2, 2, Engine)
    assert [span.attributes["torch.operation"] for span in measuring.spans] == [
        "run",
        "fixed",
        "fixed",
        "made",
    ]


def test_a_function_decorated_before_instrumenting_is_measured_while_there_is_somebody(off):
    @track
    def work():
        return 1

    assert work() == 1
    with track("block") as request:
        request.set_attribute("a", 1)
    assert off.names == []
    off.on()
    work()
    assert off.names == ["work"]
    deactivate()
    work()
    assert off.names == []
    off.on()
    work()
    assert off.names == ["work"]


def test_a_decorated_function_has_its_counters_from_the_start(off):
    @track("early")
    def early():
        return 1

    off.on()

    @track("late")
    def late():
        return 1

    operations = {labels["torch.operation"] for _, labels in off.measured.requests.active()}
    assert {"early", "late"} <= operations


@pytest.mark.parametrize(
    ("misuse", "error", "why"),
    [
        (lambda: track("x", span="old"), ValueError, "span='old' is not allowed"),
        (lambda: track(""), ValueError, "is not allowed"),
        (lambda: track(7), TypeError, "track decorates functions"),
        (lambda: track(int), TypeError, "track decorates functions"),
        (lambda: track("x")(property(lambda self: 1)), TypeError, "track decorates functions"),
        (lambda: instrument_model(7), TypeError, "instrument_model measures"),
        (lambda: instrument_model(dict), TypeError, "instrument_model measures"),
        (lambda: instrument_model(len), TypeError, "instrument_model measures"),
        (lambda: instrument_model(Net(), span="old"), ValueError, "span='old' is not allowed"),
    ],
)
def test_misuse_is_an_error_where_it_is_written(misuse, error, why):
    with pytest.raises(error, match=why):
        misuse()


# models

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _compiler():
    compiler.torch_imported(torch)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Parent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x):
        return self.second(self.first(x))


X = torch.ones(2, 4)


def test_calls_of_one_model_are_measured_and_of_no_other(measuring):
    model, other = Net(), Net()
    stop = instrument_model(model, "rerank")
    model(X)
    other(X)
    copy.deepcopy(model)(X)
    [span] = measuring.spans
    assert span.name == "rerank Net"
    assert span.attributes["code.function.name"] == f"{__name__}.Net.__call__"
    assert span.attributes["torch.input.shapes"] == ("2x4",)
    stop()
    stop()
    model(X)
    assert measuring.spans == []
    assert "__call__" not in vars(Net)


def test_a_model_is_measured_whenever_there_is_somebody_and_its_class_is_left_alone_otherwise(off):
    before = dict(vars(Net))
    model = Net()
    instrument_model(model)
    assert dict(vars(Net)) == before
    model(X)
    off.on()
    model(X)
    deactivate()
    assert dict(vars(Net)) == before
    model(X)
    off.on("off")
    model(X)
    deactivate()
    uninstrument_model(model)
    off.on()
    model(X)
    assert off.names == ["forward Net"]
    assert dict(vars(Net)) == before


def test_two_models_of_a_class_each_have_their_name_and_one_may_go(measuring):
    query, document = Net(), Net()
    instrument_model(query, "query")
    instrument_model(document, "document")
    query(X)
    document(X)
    uninstrument_model(query)
    uninstrument_model(query)
    query(X)
    document(X)
    assert measuring.names == ["query Net", "document Net", "document Net"]
    del document
    gc.collect()
    query(X)
    uninstrument_model(Net())
    assert measuring.names == []


def test_a_model_that_is_collected_is_not_mistaken_for_the_next(measuring):
    for _ in range(50):
        instrument_model(Net())
        Net()(X)
    assert measuring.names == []


@pytest.mark.parametrize("ended", [0, 1])
def test_of_a_model_that_is_instrumented_again_the_latest_counts_that_has_not_been_ended(measuring, ended):
    model = Net()
    stops = [instrument_model(model, name) for name in ("first", "second")]
    model(X)
    stops[ended]()
    stops[ended]()
    model(X)
    assert measuring.names == ["second Net", ["second Net", "first Net"][ended]]
    stops[1 - ended]()
    assert "__call__" not in vars(Net)
    for name in ("first", "second"):
        instrument_model(model, name)
    uninstrument_model(model)
    model(X)
    assert measuring.names == []
    assert "__call__" not in vars(Net)


def test_a_class_with_its_own_call_keeps_it(measuring):
    class Callable:
        def __call__(self, x, *, n=1):
            "Calls."
            return x * n

    own = vars(Callable)["__call__"]
    model = Callable()
    stop = instrument_model(model)
    assert model(2, n=3) == 6
    assert str(inspect.signature(model)) == "(x, *, n=1)"
    assert measuring.names == ["forward Callable"]
    stop()
    assert vars(Callable)["__call__"] is own


def test_models_of_a_class_and_of_its_subclass_are_told_apart(measuring):
    class Special(Net):
        pass

    base, special = Net(), Special()
    stop, stop_special = instrument_model(base), instrument_model(special)
    base(X)
    special(X)
    Special()(X)
    assert measuring.names == ["forward Net", "forward Special"]
    stop()
    special(X)
    assert measuring.names == ["forward Special"]
    stop_special()


def test_a_measured_model_is_pickled_saved_and_copied_as_ever(measuring):
    model = Net()
    stop = instrument_model(model)
    again = pickle.loads(pickle.dumps(model))
    assert vars(again).keys() == vars(Net()).keys()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(X), again(X))
    assert measuring.names == []
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert measuring.names == ["forward Net"]
    stop()


def test_what_torch_compile_returned_is_measured_outside_the_region(measuring):
    model = Net()
    # torch 2.2 makes a model of its own of what the backend "eager" returns, and then compiles its call
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    stop = instrument_model(compiled)
    assert torch.equal(compiled(X), model(X))
    compiled(X)
    [span, _] = measuring.spans
    assert span.name == "forward Net"
    assert span.attributes["code.function.name"] == f"{__name__}.Net.__call__"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    stop()


def test_a_model_whose_compile_was_called_is_measured_outside_the_region(measuring):
    model = Net()
    stop = instrument_model(model)
    model.compile(backend="eager", fullgraph=True)
    model(X)
    model(X)
    assert measuring.names == ["forward Net"] * 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    stop()


def test_a_model_is_measured_whose_compile_is_called_afterwards(measuring):
    model = torch.nn.Linear(3, 3)
    stop = instrument_model(model, "rank")
    model.compile(backend="eager", fullgraph=True)
    model(torch.ones(1, 3))
    assert measuring.names == ["rank Linear"]
    stop()


def test_a_measured_child_breaks_no_graph_of_its_parent(measuring):
    parent = Parent()
    stop = instrument_model(parent.first)
    plain = parent(X)
    assert measuring.names == ["forward Net"]
    compiled = torch.compile(parent, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(X), plain)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["graph_break"] == {}
    assert measuring.names == [], "inside a compiled region nothing is measured"
    stop()


def test_a_parent_with_a_measured_child_is_exported_scripted_and_traced(measuring):
    parent = Parent().eval()
    plain = parent(X)
    stop = instrument_model(parent.first)
    exported = torch.export.export(parent, (X,))
    assert torch.equal(exported.module()(X), plain)
    assert torch.equal(torch.jit.trace(parent, X)(X), plain)
    assert torch.equal(torch.jit.script(parent)(X), plain)
    assert torch.equal(torch.fx.symbolic_trace(parent)(X), plain)
    stop()


def test_a_tracked_function_is_compiled_whole_also_where_nobody_measures(off):
    @track("step")
    def step(x):
        return x.relu() + 1

    compiled = torch.compile(lambda x: step(x) * 2, backend="eager", fullgraph=True)
    expected = (X.relu() + 1) * 2
    assert torch.equal(compiled(X), expected)
    off.on()
    assert torch.equal(compiled(X), expected)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert off.names == []


def enters_what_was_made_before() -> bool:
    """Whether this torch compiles a block whose manager was made outside the region."""
    kept = _Manager()

    def step(x):
        with kept:
            return x + 1

    try:
        torch.compile(step, backend="eager", fullgraph=True)(X)
    except torch._dynamo.exc.Unsupported:
        return False
    return True


class _Manager:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_a_tracked_block_is_compiled_whole_also_where_nobody_measures(off):
    kept = track("kept")

    def made_inside(x):
        with track("made") as request:
            request.set_attribute("app.rows", 3)
            y = x.relu()
        with track("kept"):
            return y + 1

    def made_before(x):
        with track("made") as request:
            request.set_attribute("app.rows", 3)
            y = x.relu()
        with kept:
            return y + 1

    step = made_before if enters_what_was_made_before() else made_inside
    for measured in (False, True):
        if measured:
            off.on()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), X.relu() + 1)
        stats = torch._dynamo.utils.counters["stats"]
        assert (stats["unique_graphs"], stats["calls_captured"]) == (1, 2)
        assert off.names == []
    assert torch.equal(step(X), X.relu() + 1)
    assert off.names == ["made", "kept"]


def test_a_class_that_is_pickled_by_value_takes_nothing_of_ours_along(measuring):
    cloudpickle = pytest.importorskip("cloudpickle")

    class Own:
        def __call__(self, x):
            return x * 2

    class Inherits(torch.nn.Module):
        def forward(self, x):
            return x + 1

    @track
    def tracked(x):
        return x - 1

    models = Own(), Inherits()
    stops = [instrument_model(model) for model in models]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import pickle, sys\n"
            "own, inherits, function = pickle.load(sys.stdin.buffer)\n"
            "print(own(2), inherits(2), function(2))",
        ],
        input=cloudpickle.dumps((*models, tracked)),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == [b"4", b"3", b"1"], done.stderr.decode()
    for stop in stops:
        stop()


def test_a_class_whose_last_model_went_is_as_before(measuring):
    before = dict(vars(Net))
    stop = instrument_model(Net())
    assert dict(vars(Net)) != before
    stop()
    uninstrument_model(Net())
    instrument_model(model := Net())
    uninstrument_model(model)
    assert dict(vars(Net)) == before
