# SPDX-License-Identifier: Apache-2.0
"""Targets that are built in, against the released libraries themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.requests.specs import BUILT_IN

TESTS = Path(__file__).parents[1]
NAMED_THERE = "(from OTEL_PYTHON_TORCHMEM_TARGETS)"
PREPARED = """
import json, sys
sys.path.insert(0, {tests!r})
from exported import Traced
from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

traced = Traced()

def instrument(**options):
    TorchMemInstrumentor().instrument(tracer_provider=traced.provider, **options)

def everything(root):
    found, waiting = {{root: None}}, [root]
    while waiting:
        for each in type.__subclasses__(waiting.pop()):
            if each not in found:
                found[each] = None
                waiting.append(each)
    return list(found)

def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=50,
                         num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    return LlamaForCausalLM(config), torch.ones(1, 8, dtype=torch.long)

def finished():
    spans = [{{"name": s.name, "kind": s.kind.name, **s.attributes}} for s in traced.spans]
    traced.exporter.clear()
    return spans
"""


def run(body: str, **environment: str) -> Any:
    """What a script prints last, as JSON: each runs in a process of its own, as imports cannot be undone."""
    script = PREPARED.format(tests=str(TESTS)) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True, scope="module")
def _libraries() -> None:
    for package in ("torch", "transformers", "diffusers", "sentence_transformers"):
        pytest.importorskip(package)


EXPECTED = {
    "name": "generate LlamaForCausalLM",
    "kind": "INTERNAL",
    "torch.operation": "generate",
    "code.function.name": "transformers.GenerationMixin.generate",
    "torch.input.shapes": ["1x8"],
    "torch.input.dtypes": ["int64"],
}
"""All that there is on a CPU: nothing of a device."""


def test_a_llama_generates_in_one_span_imported_after():
    assert run("""
        instrument()
        assert not {"torch", "transformers", "diffusers"} & set(sys.modules), "nothing is imported for it"
        model, ids = llama()
        model.generate(ids, max_new_tokens=3)
        print(json.dumps(finished()))
    """) == [EXPECTED]


def test_a_llama_generates_in_one_span_imported_before_and_the_tokens_are_the_same():
    assert run("""
        model, ids = llama()
        import torch
        plain = model.generate(ids, max_new_tokens=3, do_sample=False)
        instrument()
        measured = model.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(plain, measured)
        print(json.dumps(finished()))
    """) == [EXPECTED]


def test_every_generate_in_transformers_is_wrapped_with_its_signature_and_put_back():
    figures = run("""
        import importlib, inspect, pkgutil
        instrument()
        import transformers, transformers.models as models
        imported = failed = 0
        for package in pkgutil.iter_modules(models.__path__):
            for module in pkgutil.iter_modules([f"{models.__path__[0]}/{package.name}"]):
                if module.name.startswith(("modeling_", "generation_")):
                    try:
                        importlib.import_module(f"transformers.models.{package.name}.{module.name}")
                        imported += 1
                    except Exception:  # wants a package that is not there
                        failed += 1
        classes = everything(transformers.PreTrainedModel) + everything(transformers.GenerationMixin)
        classes += everything(transformers.ContinuousMixin)
        classes = list(dict.fromkeys(classes))
        own = [cls for cls in classes if "generate" in vars(cls)]
        wrapped = {cls: vars(cls)["generate"] for cls in own}
        wrapped = {cls: entry for cls, entry in wrapped.items() if hasattr(entry, "__torchmem__")}
        missing = [cls.__name__ for cls in own if cls not in wrapped]
        able = [cls for cls in classes if callable(getattr(cls, "generate", None))]
        unmeasured = [cls.__name__ for cls in able if not hasattr(cls.generate, "__torchmem__")]
        for cls, function in wrapped.items():
            assert inspect.signature(function) == inspect.signature(function.__wrapped__), cls
        TorchMemInstrumentor().uninstrument()
        left = [f"{cls.__name__}.{name}" for cls in classes for name, entry in vars(cls).items()
                if hasattr(getattr(entry, "__func__", entry), "__torchmem__")]
        print(json.dumps({"imported": imported, "failed": failed, "wrapped": len(wrapped), "able": len(able),
                          "missing": missing, "unmeasured": unmeasured, "left": left}))
    """)
    print(figures)
    assert figures["imported"] > 300
    assert figures["wrapped"] > 50
    assert figures["able"] > 300
    assert figures["missing"] == figures["unmeasured"] == figures["left"] == []


def test_the_classes_of_transformers_are_after_undo_what_they_were_before():
    assert run("""
        import transformers
        from transformers import LlamaForCausalLM, MusicgenForConditionalGeneration, BarkModel
        from transformers import SpeechT5ForTextToSpeech, WhisperForConditionalGeneration
        classes = everything(transformers.PreTrainedModel) + everything(transformers.ContinuousMixin)
        classes = list(dict.fromkeys(classes))
        before = {cls: dict(vars(cls)) for cls in classes}
        instrument()
        touched = [cls.__name__ for cls in classes if dict(vars(cls)) != before[cls]]
        TorchMemInstrumentor().uninstrument()
        different = [cls.__name__ for cls in classes
                     if list(vars(cls)) != list(before[cls])
                     or any(vars(cls)[name] is not entry for name, entry in before[cls].items())]
        print(json.dumps([sorted(touched), different]))
    """) == [
        sorted(
            {
                "BarkCoarseModel", "BarkFineModel", "BarkModel", "BarkSemanticModel", "ContinuousMixin",
                "GenerationMixin", "MusicgenForCausalLM", "MusicgenForConditionalGeneration",
                "PreTrainedModel", "SpeechT5ForTextToSpeech", "WhisperGenerationMixin",
            }
        ),
        [],
    ]  # fmt: skip


def test_an_override_that_calls_super_counts_once_and_a_later_subclass_is_followed():
    spans = run("""
        instrument()
        model, ids = llama()
        from transformers import LlamaForCausalLM
        class Mine(LlamaForCausalLM):
            def generate(self, *args, **kwargs):
                return super().generate(*args, **kwargs)
        Mine(model.config).generate(ids, max_new_tokens=3)
        print(json.dumps(finished()))
    """)
    assert [(span["name"], span["code.function.name"]) for span in spans] == [
        ("generate Mine", "transformers.GenerationMixin.generate")
    ]


def test_a_class_named_by_the_lazy_top_package_is_found_where_it_is_defined():
    spans = run("""
        instrument(targets=["transformers:LlamaForCausalLM.forward"], disabled_targets="transformers.*")
        model, ids = llama()
        model(ids)
        print(json.dumps(finished()))
    """)
    assert [(span["name"], span["code.function.name"]) for span in spans] == [
        ("forward LlamaForCausalLM", "transformers.LlamaForCausalLM.forward")
    ]


def test_a_built_in_target_takes_options_by_its_label():
    spans = run("""
        instrument(targets=[
            {"target": "transformers.GenerationMixin.generate", "operation": "chat", "span": "enrich"},
        ])
        model, ids = llama()
        with traced.provider.get_tracer("server").start_as_current_span("POST /chat"):
            model.generate(ids, max_new_tokens=3)
        print(json.dumps(finished()))
    """)
    assert [span["name"] for span in spans] == ["POST /chat"]
    assert spans[0]["torch.input.shapes"] == ["1x8"]


def test_continuous_batching_is_measured_as_a_batch_and_as_a_stream():
    spans = run("""
        instrument()
        model, ids = llama()
        from transformers import ContinuousBatchingConfig, GenerationConfig
        model = model.eval()
        # left alone, its cache takes most of the host's memory
        batching = ContinuousBatchingConfig(max_memory_percent=0.05, max_batch_tokens=64)
        model.set_attn_implementation("sdpa")
        config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = model.generate_batch(
            [[1, 2, 3], [4, 5]], generation_config=config, continuous_batching_config=batching
        )
        assert [len(result.generated_tokens) for result in results.values()] == [3, 3]
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching
        ) as manager:
            request = manager.add_request([1, 2, 3], max_new_tokens=3, streaming=True)
            lengths = [len(result.generated_tokens) for result in manager.request_id_iter(request)]
        assert lengths == [1, 2, 3]
        print(json.dumps(finished()))
    """)
    assert [(span["name"], span["code.function.name"]) for span in spans] == [
        ("generate LlamaForCausalLM", "transformers.ContinuousMixin.generate_batch"),
        ("generate ContinuousBatchingManager", "transformers.ContinuousBatchingManager.request_id_iter"),
    ]


def test_pipelines_of_diffusers_are_wrapped_modular_ones_too_whenever_they_come():
    figures = run("""
        import inspect
        from diffusers import StableDiffusionPipeline
        plain = inspect.signature(StableDiffusionPipeline.__call__)
        before = vars(StableDiffusionPipeline)["__call__"]
        instrument()
        assert inspect.signature(StableDiffusionPipeline.__call__) == plain
        from diffusers import DiffusionPipeline, FluxPipeline, ModularPipeline, StableDiffusionXLPipeline
        class Mine(StableDiffusionPipeline):
            def __call__(self, n):
                return n
        class Simple(DiffusionPipeline):
            def __call__(self, n):
                return [n]
        assert Simple()(3) == [3]
        labels = {cls.__name__: vars(cls)["__call__"].__torchmem__.target.function
                  for cls in (StableDiffusionPipeline, FluxPipeline, StableDiffusionXLPipeline, Mine,
                              ModularPipeline)}
        spans = finished()
        TorchMemInstrumentor().uninstrument()
        assert vars(StableDiffusionPipeline)["__call__"] is before
        classes = everything(DiffusionPipeline) + everything(ModularPipeline)
        left = [cls.__name__ for cls in classes for entry in vars(cls).values()
                if hasattr(getattr(entry, "__func__", entry), "__torchmem__")]
        print(json.dumps([labels, spans, left]))
    """)
    labels, spans, left = figures
    assert labels.pop("ModularPipeline") == "diffusers.ModularPipeline.__call__"
    assert set(labels.values()) == {"diffusers.DiffusionPipeline.__call__"}
    assert [(span["name"], span["torch.operation"]) for span in spans] == [("generate Simple", "generate")]
    assert left == []


def test_encoders_of_sentence_transformers_are_wrapped():
    figures = run("""
        instrument()
        import torch
        from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = Whitespace()
        model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)], device="cpu")
        assert model.encode(["a b", "b"]).shape == (2, 4)
        model.encode_query("a")
        labels = [cls.encode.__torchmem__.target.function
                  for cls in (SentenceTransformer, SparseEncoder, MultiVectorEncoder)]
        labels.append(CrossEncoder.predict.__torchmem__.target.function)
        print(json.dumps([labels, finished()]))
    """)
    labels, spans = figures
    assert labels == [
        "sentence_transformers.SentenceTransformer.encode",
        "sentence_transformers.SparseEncoder.encode",
        "sentence_transformers.MultiVectorEncoder.encode",
        "sentence_transformers.CrossEncoder.predict",
    ]
    assert [(span["name"], span["torch.operation"]) for span in spans] == [
        ("encode SentenceTransformer", "encode")
    ] * 2


def test_every_row_names_a_class_and_a_method_that_the_installed_releases_have():
    rows = [
        (row.module, row.owner, row.method)
        for row in BUILT_IN
        if row.module.partition(".")[0] not in ("vllm", "sglang")  # these cannot be installed beside them
    ]
    assert len(rows) == 10
    assert (
        run(f"""
        import importlib
        from diffusers import FluxPipeline
        from transformers import SpeechT5ForTextToSpeech
        missing = []
        for module, owner, method in {rows!r}:
            cls = getattr(importlib.import_module(module), owner)
            if not any(method in vars(each) for each in everything(cls)):
                missing.append((owner, method))
        print(json.dumps(missing))
    """)
        == []
    )


@pytest.mark.parametrize(
    ("module", "owner", "method", "label"),
    [
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "execute_model", "vllm.GPUModelRunner"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "execute_model", "vllm.GPUModelRunner"),
        ("vllm.worker.model_runner_base", "ModelRunnerBase", "execute_model", "vllm.ModelRunnerBase"),
        ("sglang.srt.model_executor.model_runner", "ModelRunner", "forward", "sglang.ModelRunner"),
    ],
)
def test_an_engines_step_is_measured_in_packages_of_the_same_shape(tmp_path, module, owner, method, label):
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(
        f"import torch\nclass {owner}:\n    def {method}(self, batch): return batch\n"
        f"class Special({owner}):\n    def {method}(self, batch): return super().{method}(batch)\n"
    )
    spans = run(f"""
        sys.path.insert(0, {str(tmp_path)!r})
        instrument()
        import importlib
        module = importlib.import_module({module!r})
        module.{owner}().{method}(1)
        module.Special().{method}(1)
        print(json.dumps(finished()))
    """)
    assert [(span["name"], span["code.function.name"]) for span in spans] == [
        (f"step {owner}", f"{label}.{method}"),
        ("step Special", f"{label}.{method}"),
    ]


# programs that know nothing of it


def launch(tmp_path: Path, script: str, targets: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """A script under `opentelemetry-instrument`, its spans on the console; with what it logged."""
    (tmp_path / "serve.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "opentelemetry-instrument"),
            *("--traces_exporter", "console", "--metrics_exporter", "none", "--logs_exporter", "none"),
            *("--torchmem_targets", targets),
            *(sys.executable, str(tmp_path / "serve.py")),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    decoder, spans, text = json.JSONDecoder(), [], done.stdout
    while (start := text.find("{")) >= 0:
        span, end = decoder.raw_decode(text[start:])
        spans.append(span)
        text = text[start + end :]
    return spans, done.stderr


ENGINE = """
    class Engine:
        def generate(self, prompt):
            return prompt
        class Decoder:
            @classmethod
            def decode(cls, n): return n
"""


def test_a_users_class_named_in_the_environment_is_measured_without_a_change(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "engine.py").write_text(textwrap.dedent(ENGINE))
    spans, said = launch(
        tmp_path,
        """
        import torch
        from app.engine import Engine
        Engine().generate(torch.ones(2, 3))
        Engine.Decoder.decode(1)
        """,
        "app.engine:Engine.generate, app.engine:Engine.Decoder.decode, app.gone:Engine.generate, nonsense",
    )
    assert [(span["name"], span["attributes"]["code.function.name"]) for span in spans] == [
        ("generate Engine", "app.engine.Engine.generate"),
        ("decode Decoder", "app.engine.Engine.Decoder.decode"),
    ]
    assert spans[0]["attributes"]["torch.input.shapes"] == ["2x3"]
    assert (
        said.count(f"app.gone:Engine.generate {NAMED_THERE} is not measured: app.gone was never imported")
        == 1
    )
    assert said.count(f"target nonsense {NAMED_THERE} is not measured: a target is module:Class.method") == 1


def test_a_class_of_the_script_itself_is_measured(tmp_path):
    spans, said = launch(
        tmp_path,
        """
        import torch
        from dataclasses import dataclass

        class Engine:
            def generate(self, prompt):
                return prompt

        class NetA:
            def forward(self): return 1

        @dataclass(slots=True)
        class Loud(Engine):
            n: int = 0
            def generate(self, prompt):
                return Engine.generate(self, prompt).upper()

        def call(): return 1

        if __name__ == "__main__":
            Loud().generate("a")
            NetA().forward()
            call()
        """,
        "__main__:Engine.generate,__main__:Net*.forward,__main__:call,__main__:Gone.run,serve:Engine.generate",
    )
    assert [(span["name"], span["attributes"]["code.function.name"]) for span in spans] == [
        ("generate Loud", "__main__.Engine.generate"),
        ("forward NetA", "__main__.NetA.forward"),
    ]
    assert (
        f"target __main__:call {NAMED_THERE} is not measured: a function of the script comes too late" in said
    )
    assert f"target __main__:Gone.run {NAMED_THERE} is not measured: __main__ never had a class Gone" in said
    assert "it is the script itself: write __main__ for serve" in said


def test_a_helper_process_without_torch_does_not_complain(tmp_path):
    assert launch(tmp_path, "print()", "app.engine:Engine.generate") == ([], "")


def test_the_builder_of_classes_is_put_back_once_the_last_class_is_there(tmp_path):
    spans, said = launch(
        tmp_path,
        """
        import builtins
        import torch
        assert type(builtins.__build_class__) is not type(len)
        class Engine:
            def generate(self): return 1
        assert type(builtins.__build_class__) is type(len), "put back"
        Engine().generate()
        """,
        "__main__:Engine.generate",
    )
    assert [span["name"] for span in spans] == ["generate Engine"]
    assert "not measured" not in said


STREAMED = """
    from threading import Thread
    from types import SimpleNamespace
    from opentelemetry.trace import get_current_span

    # all that a streamer asks of a tokenizer
    words = SimpleNamespace(decode=lambda tokens, **_: f"{tokens}" + chr(10))

    def generate(model, ids, streamer):
        thread = Thread(target=model.generate, args=(ids,), kwargs={
            "streamer": streamer, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None})
        thread.start()
        return thread
"""


def test_a_streamers_steps_are_one_call_beside_the_generate_that_feeds_it():
    """As transformers' own example has it: ``generate`` in a thread, the streamer in the consumer's."""
    spans, pieces = run(
        STREAMED
        + """
    instrument(targets=["transformers.generation.streamers:TextIteratorStreamer.__next__"])
    from transformers import TextIteratorStreamer
    model, ids = llama()
    with traced.provider.get_tracer("test").start_as_current_span("GET /") as consumer:
        streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
        thread = generate(model, ids, streamer)
        pieces = []
        for piece in streamer:
            assert get_current_span() is consumer
            pieces.append(piece)
        thread.join()
    spans = {span.name: span for span in traced.spans}
    stream, generated = spans["next TextIteratorStreamer"], spans["generate LlamaForCausalLM"]
    assert len(traced.spans) == 3
    assert stream.parent.span_id == spans["GET /"].context.span_id
    assert generated.parent is None, "a thread has no parent"
    assert stream.start_time < generated.end_time
    print(json.dumps([sorted(spans), len(pieces)]))
    """
    )
    assert spans == ["GET /", "generate LlamaForCausalLM", "next TextIteratorStreamer"]
    assert pieces == 5  # the last one is empty


def test_an_async_streamer_that_an_endpoint_returns_is_followed_to_its_end():
    assert run(
        STREAMED
        + """
    import asyncio
    from transformers import AsyncTextIteratorStreamer
    from opentelemetry_instrumentation_torchmem import track
    instrument()
    model, ids = llama()

    @track("chat", iterator=True)
    def chat():
        streamer = AsyncTextIteratorStreamer(words, skip_prompt=True, timeout=60)
        threads.append(generate(model, ids, streamer))
        return streamer

    async def main():
        stream = chat()
        assert isinstance(stream, AsyncTextIteratorStreamer)
        return [piece async for piece in stream]

    threads = []
    pieces = asyncio.run(main())
    threads[0].join()
    print(json.dumps([sorted(span["name"] for span in finished()), len(pieces)]))
    """
    ) == [["chat", "generate LlamaForCausalLM"], 5]
