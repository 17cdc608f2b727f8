# SPDX-License-Identifier: Apache-2.0
"""Requests of unmodified programs under `opentelemetry-instrument`: spans and exemplars over real OTLP."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

MIB = 1 << 20
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCHER = Path(sys.executable).with_name("opentelemetry-instrument")
ON_CPU = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None, "CUDA_VISIBLE_DEVICES": ""}
FIGURES = {
    "torch.memory.reserved.delta": "reserved_bytes.all.current",
    "torch.memory.allocated.delta": "allocated_bytes.all.current",
    "torch.memory.turnover": "allocated_bytes.all.allocated",
    "torch.memory.allocation.retries": "num_alloc_retries",
    "torch.memory.ooms": "num_ooms",
    "torch.memory.device.allocations": "num_device_alloc",
    "torch.memory.device.syncs": "num_sync_all_streams",
}


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    kind: str
    scope: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    status: str
    exceptions: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Exemplar:
    value: float
    trace: str
    span: str
    bucket: int
    """How many recorded values lie in the bucket that it is of."""


class Received(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver over gRPC, and what came."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metrics: list[Any] = []
        """Each metric of each export, in the order of arrival."""

    @contextmanager
    def listening(self) -> Iterator[str]:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, server)
        metrics = type(
            "Metrics", (metrics_service_pb2_grpc.MetricsServiceServicer,), {"Export": self._metrics}
        )
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop(None)

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            span.name,
                            {1: "INTERNAL", 2: "SERVER"}.get(span.kind, str(span.kind)),
                            scope.scope.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            plain(span.attributes),
                            {0: "UNSET", 1: "OK", 2: "ERROR"}[span.status.code],
                            tuple(
                                plain(event.attributes) for event in span.events if event.name == "exception"
                            ),
                        )
                    )
        return trace_service_pb2.ExportTraceServiceResponse()

    def _metrics(self, request, context):
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics.extend(scope.metrics)
        return metrics_service_pb2.ExportMetricsServiceResponse()

    @property
    def ours(self) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.scope == "opentelemetry_instrumentation_torchmem"]
        return sorted(found, key=lambda span: span.start)

    def span(self, **wanted: Any) -> ReceivedSpan:
        (found,) = [
            span for span in self.spans if all(getattr(span, key) == value for key, value in wanted.items())
        ]
        return found

    def exports(self, name: str) -> list[list[Any]]:
        """The data points of a metric, export by export."""
        found = [metric for metric in self.metrics if metric.name == name]
        return [list(getattr(metric, metric.WhichOneof("data")).data_points) for metric in found]

    def exemplars(self, name: str) -> list[Exemplar]:
        """All exemplars of a histogram that stand in the cumulative points, the last of each first."""
        found = []
        for points in self.exports(name):
            for point in points:
                for exemplar in point.exemplars:
                    value = getattr(exemplar, exemplar.WhichOneof("value"))
                    index = sum(value > bound for bound in point.explicit_bounds)
                    found.append(
                        Exemplar(
                            value, exemplar.trace_id.hex(), exemplar.span_id.hex(), point.bucket_counts[index]
                        )
                    )
        return found


def plain(attributes: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(each) for each in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {each.key: value(each.value) for each in attributes}


def settings(address: str, **more: str | None) -> dict[str, str | None]:
    return {
        "OTEL_SERVICE_NAME": "app",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        "OTEL_METRIC_EXPORT_INTERVAL": "400",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        **more,
    }


def launched(
    gpu: Any, folder: Path, program: str, memory: str | None = "1GiB", **env: str | None
) -> tuple[Received, Any]:
    """Run a program under the launcher; what came over OTLP, and what it printed last as JSON."""
    received = Received()
    (folder / "app.py").write_text(program)
    with received.listening() as address:
        done = subprocess.run(
            [LAUNCHER, sys.executable, "app.py"],
            cwd=folder,
            env=gpu.environment(memory=memory, env=settings(address, **env)),
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return received, json.loads(done.stdout.splitlines()[-1])


# ---- diffusers

PIPELINE = f"""
import json, sys, traceback
sys.path.insert(0, {str(EXAMPLES)!r})
import serve, torch
torch.backends.cudnn.enabled = False
options = serve.options_from(serve.option_parser().parse_args([]))
pipeline = serve.load_images(options)
calls, kept = [], []
def paint(width, height):
    before = torch.cuda.memory_stats()
    failure = None
    try:
        image = pipeline("a cat", width=width, height=height, num_inference_steps=2).images[0]
        assert image.size == (width, height)
    except torch.OutOfMemoryError as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        failure = {{"type": type(error).__qualname__, "message": str(error), "in torch": "torch" in last,
                   "said by us": "torchmem" in str(error)}}
    calls.append([before, torch.cuda.memory_stats(), failure, [width, height]])
for size in ((256, 256), (512, 320), (640, 640), (256, 256), (2048, 2048), (512, 512)):
    paint(*size)
print(json.dumps(calls))
"""


@pytest.mark.needs_emulation
def test_each_image_of_a_diffusers_pipeline_is_a_span_with_the_allocators_own_figures(gpu, tmp_path):
    received, calls = launched(gpu, tmp_path, PIPELINE)
    spans = received.ours
    assert [span.name for span in spans] == ["generate StableDiffusionPipeline"] * 6
    for span, (before, after, failure, size) in zip(spans, calls, strict=True):
        told = span.attributes
        assert told["torch.operation"] == "generate"
        assert told["code.function.name"] == "diffusers.DiffusionPipeline.__call__"
        assert told["torch.device"] == "cuda:0"
        assert told["torch.memory.exclusive"] is True
        for name, key in FIGURES.items():
            if failure is None or name != "torch.memory.allocated.delta":  # the exception held what it had
                assert told[name] == after[key] - before[key], (size, name)
        growth = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.peak"]
        assert told.get("torch.memory.peak_growth", 0) == growth, size
        assert told["torch.memory.reserved.before"] == before["reserved_bytes.all.current"]
    told = [span.attributes for span in spans]
    assert told[0]["torch.memory.peak_growth"] > 0
    assert told[2]["torch.memory.reserved.delta"] > 0
    assert "torch.memory.peak_growth" not in told[3]  # a small one after a large one
    assert told[3]["torch.memory.turnover"] == told[0]["torch.memory.turnover"] > 0

    failed, (_, _, failure, _) = spans[4], calls[4]
    assert failure["type"] == "OutOfMemoryError"
    assert failure["in torch"]
    assert not failure["said by us"]
    assert failed.status == "ERROR"
    assert failed.attributes["error.type"] == "OutOfMemoryError"
    assert failed.attributes["torch.memory.ooms"] >= 1
    (exception,) = failed.exceptions
    assert exception["exception.message"] == failure["message"]
    assert exception["exception.type"] == "torch.OutOfMemoryError"
    assert [span.status for span in spans if span is not failed] == ["UNSET"] * 5


# ---- transformers, without a GPU

TEXT = f"""
import json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import serve, torch
model, tokenizer = serve.small_llama()
model.eval()
tokens = torch.tensor([tokenizer("Once upon a time").input_ids])
lengths = [model.generate(tokens, max_new_tokens=number, do_sample=False).shape[1] for number in (1, 5)]
print(json.dumps([torch.cuda.is_initialized(), tokens.shape[1], lengths]))
"""


def test_generate_of_a_transformers_model_on_the_cpu_has_no_device_attributes(gpu, tmp_path):
    received, (initialised, prompt, lengths) = launched(gpu, tmp_path, TEXT, memory=None, **ON_CPU)
    assert initialised is False
    assert lengths == [prompt + 1, prompt + 5]
    first, second = received.ours
    for span in (first, second):
        assert (span.name, span.kind, span.parent) == ("generate LlamaForCausalLM", "INTERNAL", "")
        assert span.attributes == {
            "torch.operation": "generate",
            "code.function.name": "transformers.GenerationMixin.generate",
            "torch.input.shapes": [f"1x{prompt}"],
            "torch.input.dtypes": ["int64"],
        }
    (*_, durations) = received.exports("torch.memory.request.duration")
    assert [point.count for point in durations] == [2]
    assert received.exports("torch.memory.request.reserved_growth") == []


# ---- the user's own

ENGINE = """
import torch

class Engine:
    def __init__(self):
        self.kept = []

    def generate(self, mib):
        self.kept.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))

class Faster(Engine):
    def generate(self, mib):
        return super().generate(mib)

def rerank(mib):
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
"""
OWN = """
import json, time, torch
from engine import Engine, Faster
import engine

class Net(torch.nn.Module):
    def forward(self, images):
        return images

torch.empty(1, device="cuda")
time.sleep(1.0)  # a collection with nothing recorded yet
everything = Engine(), Faster()
everything[0].generate(24)
for mib in (2, 2, 2):
    everything[1].generate(mib)
engine.rerank(100)
Net()(torch.empty(3, 4, device="cuda"))
stats = torch.cuda.memory_stats()
time.sleep(0.6)
print(json.dumps([stats["num_device_alloc"], stats["reserved_bytes.all.current"]]))
"""


@pytest.fixture(scope="module")
def own(request, real_gpu, tmp_path_factory):
    from emulator.gpu import Gpu

    folder = tmp_path_factory.mktemp("own")
    (folder / "engine.py").write_text(ENGINE)
    gpu = Gpu(lambda: request.getfixturevalue("emulation"), real=real_gpu)
    targets = "engine:Engine.generate, engine:rerank,__main__:Net.forward"
    return launched(gpu, folder, OWN, OTEL_PYTHON_TORCHMEM_TARGETS=targets)


def test_the_users_classes_and_functions_named_in_the_environment_are_measured(own):
    received, (_, reserved) = own
    told = [
        [
            span.name,
            span.attributes["code.function.name"],
            span.attributes["torch.memory.reserved.delta"] // MIB,
        ]
        for span in received.ours
    ]
    assert told == [
        ["generate Engine", "engine.Engine.generate", 24],
        ["generate Faster", "engine.Engine.generate", 20],  # small ones share a segment
        ["generate Faster", "engine.Engine.generate", 0],
        ["generate Faster", "engine.Engine.generate", 0],
        ["rerank", "engine.rerank", 100],
        ["forward Net", "__main__.Net.forward", 0],
    ]
    assert sum(delta for *_, delta in told) * MIB + 2 * MIB == reserved
    assert received.ours[-1].attributes["torch.input.shapes"] == ["3x4"]


def test_an_exemplar_leads_to_the_trace_of_the_request_that_grew(own):
    received, _ = own
    by_growth = {span.attributes["torch.memory.reserved.delta"]: span for span in received.ours}
    exemplars = received.exemplars("torch.memory.request.reserved_growth")
    alone = [each for each in exemplars if each.value == 100 * MIB]  # in a bucket of its own
    assert alone
    for exemplar in alone:
        span = by_growth[100 * MIB]
        assert exemplar.bucket == 1
        assert (exemplar.trace, exemplar.span) == (span.trace, span.id)
        assert span.name == "rerank"
    for exemplar in exemplars:  # and each of the others to one that grew by just that
        (span,) = [span for span in received.ours if span.id == exemplar.span]
        assert (span.trace, span.attributes["torch.memory.reserved.delta"]) == (
            exemplar.trace,
            exemplar.value,
        )
    growths = [*exemplars, *received.exemplars("torch.memory.request.peak_growth")]
    assert all(each.value for each in growths), "what grew by nothing leads nowhere"
    durations = {each.span for each in received.exemplars("torch.memory.request.duration")}
    assert durations <= {span.id for span in received.ours}
    assert durations


def test_the_counters_of_each_target_begin_at_zero(own):
    received, _ = own
    first: dict[str, int] = {}
    for points in received.exports("torch.memory.request.retries"):
        for point in points:
            first.setdefault(plain(point.attributes)["code.function.name"], point.as_int)
    assert first == dict.fromkeys(["engine.Engine.generate", "engine.rerank", "__main__.Net.forward"], 0)
    before_any_request = received.exports("torch.memory.request.retries")[0]
    assert len(before_any_request) == 3
    assert {
        point.as_int for points in received.exports("torch.memory.requests.active") for point in points
    } == {0}


# ---- FastAPI


@contextmanager
def serving(gpu: Any, folder: Path, command: list[str], **env: str | None) -> Iterator[Any]:
    """A server under the launcher, on a port of its own choice, and what came over OTLP once it has ended."""
    received = Received()
    log = folder / "server.log"
    with received.listening() as address, log.open("w") as output:
        process = gpu.popen(
            [str(LAUNCHER), sys.executable, *command],
            memory="2GiB",
            env=settings(address, **env),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + 120
        while (at := re.search(r"running on (http://[\d.:]+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        with httpx.Client(base_url=at[1], timeout=60) as client:
            yield client, received
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert "Traceback" not in log.read_text().replace("KeyboardInterrupt", ""), log.read_text()


def streamed(client: httpx.Client, tokens: int, most: int | None = None) -> list[float]:
    """When each event of a stream came; after ``most`` of them the client hangs up."""
    came = []
    with client.stream("POST", "/generate/stream", json={"max_new_tokens": tokens}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data:"):
                came.append(time.time())
                if most is not None and len(came) >= most:
                    break
    return came


@pytest.mark.needs_emulation
def test_the_example_servers_requests_are_children_of_fastapis_spans(gpu, tmp_path):
    command = [str(EXAMPLES / "serve.py"), "--port", "0", "--cudnn", "0"]
    targets = "__main__:Writer.stream"
    with serving(gpu, tmp_path, command, OTEL_PYTHON_TORCHMEM_TARGETS=targets) as (client, received):
        assert client.post("/generate", json={"max_new_tokens": 4}).status_code == 200
        assert client.post("/images", json={"width": 256, "height": 256}).status_code == 200
        whole = streamed(client, 60)
        streamed(client, 1000, most=3)
        broken_off = time.time()
        assert client.post("/images", json={"width": 4096, "height": 4096}).status_code == 503
    servers = {(span.trace, span.id): span for span in received.spans if span.kind == "SERVER"}
    text, image, stream, left, failed = received.ours
    for span, name, route in (
        (text, "generate LlamaForCausalLM", "/generate"),
        (image, "generate StableDiffusionPipeline", "/images"),
        (stream, "stream Writer", "/generate/stream"),
        (left, "stream Writer", "/generate/stream"),
        (failed, "generate StableDiffusionPipeline", "/images"),
    ):
        server = servers[span.trace, span.parent]
        assert span.name == name
        assert server.attributes["http.route"] == route
        assert server.start <= span.start < span.end <= server.end + 0.001 or span is left
        assert span.attributes["torch.device"] == "cuda:0"
        assert span.attributes["torch.memory.turnover"] > 0
        assert not [key for key in server.attributes if key.startswith("torch.")]
    assert len(whole) == 61  # with the last word
    assert stream.end >= whole[-2] - 0.05  # not before its last token was on its way
    assert stream.end - stream.start > 0.9 * (whole[-2] - whole[0])
    assert left.status == "UNSET"
    assert left.end < broken_off + 5
    assert "error.type" not in left.attributes
    assert (failed.status, failed.attributes["error.type"]) == ("ERROR", "OutOfMemoryError")
    assert len(failed.exceptions) == 1


TWICE = """
import asyncio, torch, uvicorn
from fastapi import FastAPI

class Engine:
    kept = []
    def step(self, mib):
        self.kept.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))
    async def stream(self):
        for mib in (50, 60):
            self.kept.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))
            yield f"{mib}\\n"
            await asyncio.sleep(0.01)

engine = Engine()
torch.empty(1, device="cuda")
app = FastAPI()

@app.get("/twice")
def twice():
    engine.step(30)
    engine.kept.append(torch.empty(200 << 20, dtype=torch.uint8, device="cuda"))
    engine.step(40)

@app.get("/soon")
async def soon():
    await asyncio.sleep(0)
    engine.step(24)
    return [line async for line in engine.stream()]

@app.get("/nothing")
def nothing():
    return 1

uvicorn.run(app, port=0)
"""


@pytest.mark.needs_emulation
def test_the_enrich_mode_puts_it_all_on_fastapis_own_span(gpu, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    env = {
        "OTEL_PYTHON_TORCHMEM_TARGETS": "__main__:Engine.step,__main__:Engine.stream",
        "OTEL_PYTHON_TORCHMEM_SPAN": "enrich",
    }
    with serving(gpu, tmp_path, ["twice.py"], **env) as (client, received):
        for path in ("/twice", "/soon", "/nothing"):
            assert client.get(path).status_code == 200
    assert received.ours == []
    twice, soon, nothing = (
        received.span(name=f"GET {path}", kind="SERVER").attributes
        for path in ("/twice", "/soon", "/nothing")
    )
    assert twice == twice | {
        "torch.memory.reserved.delta": 70 * MIB,  # and not the 200 in between
        "torch.memory.turnover": 70 * MIB,
        "torch.memory.device.allocations": 2,
        "torch.memory.exclusive": True,
        "torch.memory.requests.concurrent": 1,
        "http.route": "/twice",
    }
    assert soon["torch.memory.turnover"] == (24 + 50 + 60) * MIB
    assert not [key for key in nothing if key.startswith("torch.")]
    (*_, durations) = received.exports("torch.memory.request.duration")
    counts = {plain(point.attributes)["code.function.name"]: point.count for point in durations}
    assert counts == {"__main__.Engine.step": 3, "__main__.Engine.stream": 1}
