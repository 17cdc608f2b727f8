# SPDX-License-Identifier: Apache-2.0
"""Faults of processes: forks, spawned workers, servers that make workers, an interpreter within another."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faults.collector import Collector
from faults.served import MIB, Exported, Served, TorchMemInstrumentor, elsewhere, take, track, until

LAUNCHER = Path(sys.executable).with_name("opentelemetry-instrument")


def in_a_child(body: Any) -> Any:
    """What a body gives in a forked child; a child that hangs for 10 s dies of it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            said = json.dumps(body())
        except BaseException as error:
            said = json.dumps(repr(error))
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(said) if said else signal.Signals(status).name


# ---- forks


def forked_after_initialisation() -> dict:
    import torch

    served = Served()
    kept = take(30)

    @track("answer")
    def answer(given: int) -> int:
        return given + 1

    served.collect()
    answers = [answer(1), answer(2)]
    at_the_fork = len(served.spans)

    def child() -> list[Any]:
        gave = answer(3)
        exported = served.collect()
        figures = [name for name in served.names if not name.startswith(("request", "telemetry"))]
        (span,) = served.spans[at_the_fork:]
        told = sorted(name for name in span.attributes if name.startswith("torch.memory."))
        counted = [served.durations, exported.value("torch.memory.requests.active")]
        return [gave, figures, told, counted, torch.cuda.is_initialized()]

    in_child = in_a_child(child)
    answers.append(answer(4))
    served.collect()
    return {
        "child": in_child,
        "answers": answers,
        "allocated": served.exported.value("torch.memory.allocated"),
        "durations": served.durations,
        "kept": kept.numel(),
    }


def test_a_child_forked_after_initialisation_serves_and_tells_nothing_of_its_parents_memory(gpu):
    got = gpu.run(forked_after_initialisation)
    assert got["child"] == [4, [], [], [1, 0], False]
    assert got["answers"] == [2, 3, 5]
    assert (got["allocated"], got["durations"]) == (30 * MIB, 3)


def forked_during_a_collection() -> dict:
    from emulator import control

    served = Served()
    kept = take(30)

    @track("answer")
    def answer(given: int) -> int:
        return given + 1

    control.pause("cudaMemGetInfo", 1, 1500)  # in the collection, beside the locks that it holds
    collecting = elsewhere(served.collect)
    assert until(lambda: control.inside("cudaMemGetInfo"))

    def child() -> list[Any]:
        gave = [answer(given) for given in range(3)]
        own = Exported()
        TorchMemInstrumentor().uninstrument()
        TorchMemInstrumentor().instrument(meter_provider=own.provider)
        gave.append(answer(3))
        own.collect()
        return [gave, sum(point.count for point in own.points("torch.memory.request.duration"))]

    in_child = in_a_child(child)
    still = control.inside("cudaMemGetInfo")
    collecting.join(30)
    return {
        "child": in_child,
        "forked in the middle": still,
        "parent": [answer(1), served.exported.value("torch.memory.allocated"), kept.numel()],
        "lines": served.lines,
    }


@pytest.mark.needs_emulation
def test_a_child_forked_during_a_collection_serves_and_can_export(gpu):
    got = gpu.run(forked_during_a_collection, timeout=90)
    assert got["child"] == [[1, 2, 3, 4], 1]
    assert got["forked in the middle"] == 1
    assert got["parent"] == [2, 30 * MIB, 30 * MIB]
    assert got["lines"] == []


# ---- workers

SPAWNING = """
import json, multiprocessing, os
import torch

class Engine:
    def generate(self, mib):
        self.kept = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        return self.kept.numel() >> 20

def work(mib, answers):
    engine = Engine()
    answers.put([os.getpid(), engine.generate(mib)])

if __name__ == "__main__":
    Engine().generate(10)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=work, args=(mib, answers)) for mib in (20, 30)]
    for worker in workers:
        worker.start()
    told = dict(answers.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    print(json.dumps([os.getpid(), told, [worker.exitcode for worker in workers]]))
"""


def launched(argv: list[str], gpu: Any, collector: Collector, directory: Path, **env: str) -> Any:
    """A command under the launcher, exporting to the collector."""
    return gpu.popen(
        [str(LAUNCHER), *argv],
        memory="1GiB",
        env={
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "process",
            **env,
        },
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=open(directory / "said", "wb"),
    )


@pytest.mark.needs_emulation
def test_spawned_workers_are_measured_each_for_itself(gpu, tmp_path):
    (tmp_path / "app.py").write_text(SPAWNING)
    with Collector(tmp_path / "came") as collector:
        process = launched(
            [sys.executable, "app.py"],
            gpu,
            collector,
            tmp_path,
            OTEL_PYTHON_TORCHMEM_TARGETS="__main__:Engine.generate",
        )
        out, _ = process.communicate(timeout=120)
    parent, told, codes = json.loads(out)
    assert (sorted(told.values()), codes) == ([20, 30], [0, 0])
    wanted = {parent: 10, **{int(pid): mib for pid, mib in told.items()}}
    assert collector.last("torch.memory.allocated_peak") == {pid: mib * MIB for pid, mib in wanted.items()}
    assert {of["process.pid"]: span.name for of, span in collector.spans()} == dict.fromkeys(
        wanted, "generate Engine"
    )


SERVER = """
import os, threading
import torch
from opentelemetry_instrumentation_torchmem import track

@track("answer")
def answer(mib):
    kept = torch.empty(mib << 20, dtype=torch.uint8, device="cuda") if mib else None
    return str(os.getpid()).encode()

answer(0)  # a warm-up at import: in gunicorn's master, if it preloads

def wsgi(environ, start_response):
    body = answer(8)
    start_response("200 OK", [("content-length", str(len(body)))])
    return [body]

async def asgi(scope, receive, send):
    if scope["type"] != "http":
        return
    body = answer(8)
    await send({"type": "http.response.start", "status": 200,
                "headers": [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
"""


def answers_of(
    argv: list[str], gpu: Any, collector: Collector, directory: Path, warm_ups: int
) -> dict[int, int]:
    """A server under the launcher, asked until two workers have answered; who answered how often."""
    (directory / "app.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = launched([part.format(port=port) for part in argv], gpu, collector, directory)

    def ask(_: int = 0) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
            return int(answer.read())

    def up() -> bool:
        assert process.poll() is None, (directory / "said").read_text()
        try:
            counted.append(ask())
        except OSError:
            return False
        return True

    counted: list[int] = []
    assert until(up, 120), (directory / "said").read_text()
    with ThreadPoolExecutor(8) as clients:
        until(lambda: counted.extend(clients.map(ask, range(16))) or len(set(counted)) == 2, 60)

    def told() -> float:
        return sum(collector.last("torch.memory.request.duration", by="service.instance.id").values())

    # uvicorn's workers end by the signal itself, without a last export
    until(lambda: told() >= len(counted) + warm_ups, 30)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    return {pid: counted.count(pid) for pid in set(counted)}


GUNICORN = [
    str(Path(sys.executable).with_name("gunicorn")),
    *("--preload", "--workers", "2", "--threads", "4", "--timeout", "60"),
    *("--bind", "127.0.0.1:{port}", "app:wsgi"),
]
UVICORN = [sys.executable, "-m", "uvicorn", "--workers", "2", "--port", "{port}", "app:asgi"]


@pytest.mark.needs_emulation
def test_gunicorns_workers_tell_their_own_requests_and_none_of_the_masters(gpu, tmp_path):
    with Collector(tmp_path / "came") as collector:
        answered = answers_of(GUNICORN, gpu, collector, tmp_path, warm_ups=1)
    told = collector.last("torch.memory.request.duration", by="service.instance.id")
    assert len(answered) == 2
    assert sorted(told.values()) == sorted([1, *answered.values()])  # the master's warm-up is its own
    assert "Traceback" not in (tmp_path / "said").read_text()


@pytest.mark.needs_emulation
def test_uvicorns_workers_are_measured_and_its_supervisor_tells_nothing(gpu, tmp_path):
    with Collector(tmp_path / "came") as collector:
        answered = answers_of(UVICORN, gpu, collector, tmp_path, warm_ups=2)
    told = collector.last("torch.memory.request.duration")
    assert len(answered) == 2
    assert told == {pid: count + 1 for pid, count in answered.items()}  # each has imported the application
    assert "Traceback" not in (tmp_path / "said").read_text()


# ---- an interpreter within another

WITHIN = """
import sys
sys.path[:] = {path}
from exported import Exported, Traced
from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track
exported, traced = Exported(), Traced()
TorchMemInstrumentor().instrument(
    meter_provider=exported.provider, tracer_provider=traced.provider, skip_dep_check=True)

@track
def answer(given):
    return given + 1

answers = [answer(given) for given in range(3)]
assert answers == [1, 2, 3], answers
assert not exported.collect().names, exported.names
TorchMemInstrumentor().uninstrument()
assert "torch" not in sys.modules
with open({told!r}, "w") as file:
    file.write(f"{{answers}}")
"""


def beside_another_interpreter(told: str) -> dict:
    served = Served()
    kept = take(30)

    @track("answer")
    def answer(given: int) -> int:
        return given + 1

    answers = [answer(0)]
    _within(WITHIN.format(path=sys.path, told=told))
    answers.append(answer(1))
    served.collect()
    return {
        "within": Path(told).read_text(),
        "answers": answers,
        "durations": served.durations,
        "allocated": served.exported.value("torch.memory.allocated"),
        "lines": served.lines,
        "kept": kept.numel(),
    }


def _within(code: str) -> None:
    """Run code in an interpreter of its own; what it raises is raised here."""
    try:
        import _interpreters as interpreters
    except ImportError:  # before Python 3.13
        import _xxsubinterpreters as interpreters

        inner = interpreters.create(isolated=False)  # else no thread could start in it
        interpreters.run_string(inner, code)
    else:
        inner = interpreters.create()
        failed = interpreters.exec(inner, code)
        assert failed is None, failed.formatted
    interpreters.destroy(inner)


def test_in_an_interpreter_without_torch_calls_pass_and_nothing_is_told(gpu, tmp_path):
    got = gpu.run(beside_another_interpreter, args=[str(tmp_path / "told")])
    assert got["within"] == "[1, 2, 3]"
    assert got["answers"] == [1, 2]
    assert (got["durations"], got["allocated"], got["lines"]) == (2, 30 * MIB, [])
