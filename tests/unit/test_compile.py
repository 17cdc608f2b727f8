# SPDX-License-Identifier: Apache-2.0
"""A model whose forward is measured compiles, exports, scripts, traces, pickles and copies as a bare one."""

# ruff: noqa: E402 - torch may not be there

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import sqrt
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from opentelemetry_instrumentation_torchmem.requests import compiler
from opentelemetry_instrumentation_torchmem.requests.probe import Target
from opentelemetry_instrumentation_torchmem.requests.track import track
from opentelemetry_instrumentation_torchmem.requests.wrapping import wrap_attribute


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


class Block(torch.nn.Module):
    """Names its module's globals, and has a default that is used."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bias: float = 0.5, sharp: bool = True) -> torch.Tensor:
        x = F.relu(self.linear(scaled(x)))
        return x + bias if sharp else x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum(dim=-1)


class Inheriting(Net):
    """Its forward is wrapped where it is looked for, which is not where it is defined."""


class Calling(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.fixture(autouse=True)
def pass_through_known() -> Iterator[None]:
    before = compiler.compiling, compiler.tracing
    compiler.torch_imported(torch)
    yield
    compiler.compiling, compiler.tracing = before


def test_before_torch_2_3_the_compilers_own_answer_is_taken(monkeypatch):
    """It comes with the compiler, which most processes never import."""
    monkeypatch.setattr(compiler, "compiling", compiler._before_torch)
    answers = [False, True]
    monkeypatch.setattr(torch._dynamo, "is_compiling", lambda: answers.pop(0))
    older = types.SimpleNamespace(compiler=types.SimpleNamespace(), jit=torch.jit)
    compiler.torch_imported(older)
    assert [compiler.compiling(), compiler.compiling()] == [False, True]


@contextmanager
def all_measured(measured: Any, *classes: type) -> Iterator[None]:
    undo = [
        wrap_attribute(
            each, "forward", Target(f"app.{each.__name__}.forward", "forward", nested=True), measured.requests
        )
        for each in classes
    ]
    try:
        yield
    finally:
        for each in undo:
            each()


def made(model_class: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return model_class().eval()


def x(rows: int = 3) -> torch.Tensor:
    return torch.arange(rows * 8, dtype=torch.float32).reshape(rows, 8) / 10


MODELS = [(Net, (Net, Block)), (Inheriting, (Inheriting, Block)), (Calling, (Calling, Net, Block))]


def compiled(model: torch.nn.Module, *calls: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    """What the compiler did for some calls, by its own counters, with what they returned."""
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        # an input is named after the frame's own name for it
        graphs.append(
            [node.op if node.op == "placeholder" else str(node.target) for node in graph.graph.nodes]
        )
        return graph.forward

    module = torch.compile(model, backend=backend, **options)
    results = [call(module) for call in calls]
    return {
        "results": results,
        "graphs": graphs,
        "stats": {name: counters["stats"][name] for name in ("calls_captured", "unique_graphs")},
        "graph breaks": dict(counters["graph_break"]),
        "recompilations": [bool(metrics.recompile_reason) for metrics in get_compilation_metrics()],
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize(("model_class", "wrapped"), MODELS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_measured_model_compiles_whole(measured, model_class, wrapped):
    calls = [
        lambda model: model(x()),
        lambda model: model(x()),
        lambda model: model(x(5)),
        lambda model: model(x(7)),
    ]
    bare = compiled(made(model_class), *calls, fullgraph=True)
    assert bare["recompilations"] == [False, True]  # the second shape makes it dynamic
    with all_measured(measured, *wrapped):
        assert equal(compiled(made(model_class), *calls, fullgraph=True), bare)
        assert measured.spans() == []
        made(model_class)(x())
        assert len(measured.spans()) == len(wrapped) + 1  # a block twice


def test_a_compiled_model_inside_a_measured_call_is_measured_outside_the_region(measured):
    class Engine:
        def generate(self):
            return self.model(x())

    wrap_attribute(Engine, "generate", Target("app.Engine.generate", "generate"), measured.requests)
    engine = Engine()
    bare = compiled(made(Net), lambda model: model(x()), fullgraph=True)
    with all_measured(measured, Net, Block):

        def call(model: Any) -> Any:
            engine.model = model
            return engine.generate()

        assert equal(compiled(made(Net), call, fullgraph=True), bare)
    assert [span.name for span in measured.spans()] == ["generate Engine"]


class Breaking(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


def test_a_model_that_breaks_its_graph_breaks_it_as_often(measured):
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Breaking()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) - 3

    calls = [lambda model: model(x()), lambda model: model(x())]
    bare = compiled(made(Outer), *calls)
    with all_measured(measured, Breaking, Outer):
        told = compiled(made(Outer), *calls)
    assert equal(told["results"], bare["results"])
    assert told["graphs"] == bare["graphs"]
    assert told["stats"] == bare["stats"]
    # a frame that calls what breaks is a frame of its own: one more for each wrapper, and none again
    assert told["recompilations"] == [False] * (len(bare["recompilations"]) + 2)
    assert measured.spans() == []


def test_many_measured_models_do_not_share_the_compilers_limit(measured):
    """It keeps what it compiles, and the shapes it has seen, by the code of a function."""
    rows = range(2, 2 + getattr(torch._dynamo.config, "recompile_limit", 8) + 3)

    def class_of(number: int) -> type[torch.nn.Module]:
        class Small(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + number

        Small.__qualname__ = f"Small{number}"
        Small.forward.__qualname__ = f"Small{number}.forward"
        return Small

    def all_compiled(classes: list[type]) -> Any:
        torch._dynamo.reset()
        clear_compilation_metrics()
        shapes: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            shapes.append([str(each.shape) for each in inputs if isinstance(each, torch.Tensor)])
            return graph.forward

        for each, size in zip(classes, rows, strict=True):
            torch.compile(each(), backend=backend)(x(size))
        return shapes, [bool(metrics.recompile_reason) for metrics in get_compilation_metrics()]

    classes = [class_of(number) for number in rows]
    with all_measured(measured, *classes):
        shapes, again = all_compiled(classes)
    assert again == [False] * len(rows)
    assert shapes == [[f"torch.Size([{size}, 8])"] for size in rows]  # static, not guessed from another's
    assert measured.spans() == []


def test_wrapping_and_undoing_recompile_once_and_no_more(measured):
    """The function changes, so its guard fails: that is torch's rule, and once is what it costs."""
    model = made(Net)
    torch._dynamo.reset()
    counters.clear()
    module = torch.compile(model, backend="eager", fullgraph=True)
    expected = module(x())
    with all_measured(measured, Net, Block):
        assert torch.equal(module(x()), expected)
        assert torch.equal(module(x()), expected)
    assert torch.equal(module(x()), expected)
    assert counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize(("model_class", "wrapped"), MODELS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_measured_model_exports(measured, model_class, wrapped, strict):
    def exported() -> Any:
        rows = torch.export.Dim("rows", min=2, max=64)
        program = torch.export.export(
            made(model_class), (x(),), dynamic_shapes={"x": {0: rows}}, strict=strict
        )
        return [(node.op, str(node.target)) for node in program.graph.nodes], program.module()(x(6))

    bare = exported()
    with all_measured(measured, *wrapped):
        assert equal(exported(), bare)
    assert measured.spans() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("model_class", "wrapped"), MODELS[:2], ids=lambda each: getattr(each, "__name__", "")
)
def test_a_measured_model_scripts(measured, model_class, wrapped):
    bare = torch.jit.script(made(model_class))
    with all_measured(measured, *wrapped):
        scripted = torch.jit.script(made(model_class))
    assert unmangled(scripted.code) == unmangled(bare.code)
    assert unmangled(scripted.first.code) == unmangled(bare.first.code)
    assert torch.equal(scripted(x(4)), bare(x(4)))
    assert measured.spans() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_measured_function_scripts(measured):
    assert measured.wrap(scaled).__globals__ is scaled.__globals__
    scripted = torch.jit.script(measured.wrap(scaled))
    assert torch.equal(scripted(x()), x() * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("model_class", "wrapped"), MODELS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_measured_model_traces_without_a_word(measured, model_class, wrapped):
    """A shape that is looked at while tracing is a tensor, and warns."""
    bare = torch.jit.trace(made(model_class), (x(),))
    with all_measured(measured, *wrapped), warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(made(model_class), (x(),), check_trace=False)
    assert unmangled(traced.graph) == unmangled(bare.graph)
    assert torch.equal(traced(x(5)), bare(x(5)))
    assert measured.spans() == []


def unmangled(text: object) -> str:
    """TorchScript numbers the classes of one name, and notes where the code is."""
    return re.sub(r"___torch_mangle_\d+\.|#.*", "", str(text))


class Rooted(torch.nn.Module):
    """``torch.fx`` knows the functions of ``math`` by the globals of the forward that it traces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / sqrt(x.size(-1))


@pytest.mark.parametrize(
    ("model_class", "wrapped"), [*MODELS, (Rooted, (Rooted,))], ids=lambda each: getattr(each, "__name__", "")
)
def test_a_measured_model_traces_with_fx(measured, model_class, wrapped):
    def traced() -> Any:
        module = torch.fx.GraphModule(
            made(model_class), torch.fx.Tracer(autowrap_functions=()).trace(made(model_class))
        )
        return module.code, module(x())

    bare = traced()
    with all_measured(measured, *wrapped):
        assert equal(traced(), bare)


# copies


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save", "state_dict", "replica"])
def test_a_measured_model_copies(measured, copied):
    with all_measured(measured, Net, Block):
        model = made(Net)
        expected = model(x())
        if copied == "deepcopy":
            copy_ = copy.deepcopy(model)
        elif copied == "pickle":
            copy_ = pickle.loads(pickle.dumps(model))
        elif copied == "save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copy_ = torch.load(file, weights_only=False)
        elif copied == "state_dict":
            copy_ = Net().eval()
            assert list(model.state_dict()) == list(copy_.state_dict())
            copy_.load_state_dict(model.state_dict())
        else:
            copy_ = model._replicate_for_data_parallel()
            copy_._modules = {
                name: child._replicate_for_data_parallel() for name, child in model._modules.items()
            }
            for name, child in copy_._modules.items():
                child._modules = dict(model._modules[name]._modules)
        assert torch.equal(copy_(x()), expected)
        if copied != "replica":
            with torch.no_grad():
                copy_.first.linear.weight.zero_()
            assert not torch.equal(copy_(x()), expected)  # its own weights, not the original's
            assert torch.equal(model(x()), expected)
    assert {span.name for span in measured.spans()} == {"forward Net", "forward Block"}


def test_a_model_pickled_while_measured_loads_where_nothing_is(measured):
    with all_measured(measured, Net, Block):
        data = pickle.dumps(made(Net))
    assert b"torchmem" not in data
    assert torch.equal(pickle.loads(data)(x()), made(Net)(x()))
    assert measured.spans() == []


def test_the_signature_is_the_bare_one(measured):
    bare = inspect.signature(Block.forward), inspect.getfullargspec(Block.forward)
    with all_measured(measured, Block):
        assert (inspect.signature(Block.forward), inspect.getfullargspec(Block.forward)) == bare
        assert list(inspect.signature(Block().forward).parameters) == ["x", "bias", "sharp"]
        assert Block.forward.__qualname__ == "Block.forward"
        assert Block.forward.__module__ == __name__


def test_subclasses_made_after_the_wrap_are_themselves(measured):
    with all_measured(measured, Net):

        class Super(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * 2

        class Own(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.first(x)

        expected = made(Net)(x())
        assert torch.equal(made(Super)(x()), expected * 2)
        assert torch.equal(made(Own)(x()), made(Net).first(x()))
        assert [span.name for span in measured.spans()] == ["forward Net", "forward Super"]


def test_a_base_that_comes_between_is_still_called(measured):
    """The wrapper on a class that inherits its forward must not hide a sibling's."""

    class Left(Net):
        pass

    class Right(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 100

    class Both(Left, Right):
        pass

    expected = made(Both)(x())
    assert torch.equal(expected, made(Net)(x()) + 100)
    with all_measured(measured, Left):
        assert torch.equal(made(Both)(x()), expected)
        bare = compiled(made(Both), lambda model: model(x()), fullgraph=True)
        assert torch.equal(bare["results"][0], expected)
        assert bare["stats"]["unique_graphs"] == 1


# a real model


@pytest.fixture(scope="module")
def llama() -> Callable[[], Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )

    def make() -> Any:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()

    return make


def llama_classes() -> tuple[type, ...]:
    from transformers.models.llama import modeling_llama as llama

    return llama.LlamaForCausalLM, llama.LlamaModel, llama.LlamaDecoderLayer, llama.LlamaAttention


def tokens(length: int = 5) -> torch.Tensor:
    return torch.arange(length).unsqueeze(0) % 64


def test_a_llama_compiles_whole_with_every_layer_measured(measured, llama):
    def call(model: Any) -> Any:
        with torch.no_grad():
            return model(tokens(), use_cache=False).logits

    bare = compiled(llama(), call, call, fullgraph=True)
    assert bare["stats"]["unique_graphs"] == 1
    with all_measured(measured, *llama_classes()):
        assert equal(compiled(llama(), call, call, fullgraph=True), bare)
        assert measured.spans() == []
        assert torch.equal(call(llama()), bare["results"][0])
    names = [span.name for span in measured.spans()]
    assert names.count("forward LlamaAttention") == names.count("forward LlamaDecoderLayer") == 2


def test_a_llama_exports_with_every_layer_measured(measured, llama):
    def exported(strict: bool) -> Any:
        with torch.no_grad():
            program = torch.export.export(
                llama(), (), {"input_ids": tokens(), "use_cache": False}, strict=strict
            )
        return [str(node.target) for node in program.graph.nodes]

    for strict in (True, False):
        bare = exported(strict)
        with all_measured(measured, *llama_classes()):
            assert exported(strict) == bare
    assert measured.spans() == []


def test_a_llama_generates_with_its_forward_measured(measured, llama):
    """``generate`` reads the signature of ``forward`` to know what it may pass."""
    model = llama()
    generate = lambda: model.generate(tokens(), max_new_tokens=3, do_sample=False)  # noqa: E731
    bare = generate()
    with all_measured(measured, *llama_classes()[:1]):
        assert torch.equal(generate(), bare)
    assert [span.name for span in measured.spans()] == ["forward LlamaForCausalLM"] * 3


def test_nothing_of_ours_is_left(measured):
    """By the class's own entries, which are the very same objects again."""
    before = {each: dict(vars(each)) for each in (Net, Inheriting, Block)}
    with all_measured(measured, *before):
        assert all(vars(each)["forward"] is not before[each].get("forward") for each in before)
    for each, entries in before.items():
        assert list(vars(each)) == list(entries)
        assert all(vars(each)[name] is entry for name, entry in entries.items() if name != "__dict__")


class Made:
    """Made within the compiled region."""

    def by(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @track
    def tracked(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class MadeToo(Made):
    def by(self, x: torch.Tensor) -> torch.Tensor:
        return super().by(x) + 1


def test_a_measured_method_of_an_object_made_in_the_region_compiles_whole(measured):
    def region(x: torch.Tensor) -> torch.Tensor:
        by = Made().by
        return by(x) + MadeToo().by(x) + Made().tracked(x)

    undo = wrap_attribute(Made, "by", Target("test.Made.by", "by"), measured.requests)
    try:
        torch._dynamo.reset()
        told = torch.compile(region, backend="eager", fullgraph=True)(torch.ones(3))
    finally:
        undo()
    assert told.tolist() == [8.0] * 3
    assert not measured.spans()
