# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine: disk, clock, memory, signals, an interpreter that ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from faults.served import MIB, Served, TorchMemInstrumentor, at_each_reading, take, track

# ---- a full disk


def on_a_full_disk(directory: str, limit: int) -> dict:
    import torch

    blocks = [take(0.001) for _ in range(1000)]
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    served = Served(oom_dump_dir=directory)

    @track("answer")
    def answer(mib: int) -> int:
        return take(mib).numel()

    errors = []
    for _ in range(2):
        try:
            answer(5000)
        except torch.OutOfMemoryError as error:
            errors.append(type(error).__name__)
    served.collect()
    events = [
        event
        for span in served.spans
        for event in span.events
        if "torch.memory.oom.ledger" in event.attributes
    ]
    return {
        "errors": errors,
        "answer": answer(1),
        "evidence": [event.attributes["torch.memory.oom.verdict"] for event in events],
        "dumps": [event.attributes.get("torch.memory.oom.dump") for event in events],
        "skipped": served.skipped,
        "lines": served.lines,
        "files": os.listdir(directory),
        "blocks": len(blocks),
    }


def test_a_full_disk_costs_the_dump_and_leaves_nothing_behind(gpu, tmp_path):
    if mount := os.system("unshare -rm true 2>/dev/null") == 0:
        # a filesystem of its own, full, in a namespace that goes with the process
        body = "import json, faults.test_host as t; print(json.dumps(t.on_a_full_disk('.', 0)))"
        mounted = f"mount -t tmpfs -o size=16k none {tmp_path} && cd {tmp_path}"
        command = f'{mounted} && exec "{sys.executable}" -c "{body}"'
        process = gpu.popen(
            ["unshare", "-rm", "sh", "-c", command],
            memory="1GiB",
            env={
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
                )
            },
            stdout=subprocess.PIPE,
        )
        got = json.loads(process.communicate(timeout=60)[0])
    else:  # not everywhere may one be mounted: to who writes, a limit on the size of files is the same
        got = gpu.run(on_a_full_disk, args=[str(tmp_path), 16_384], memory="1GiB")
    assert got["errors"] == ["OutOfMemoryError"] * 2
    assert got["answer"] == MIB
    assert (got["evidence"], got["dumps"]) == (["full"], [None])
    assert got["skipped"] == {"dump": 1}
    (line,) = got["lines"]
    assert ("No space left on device" if mount else "File too large") in line
    assert got["files"] == []


# ---- a clock that jumps


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def with_a_clock_that_jumps() -> dict:
    ahead = ctypes.c_long.in_dll(ctypes.CDLL(None), "clock_ahead")
    served = Served(max_reading_age=5.0)
    kept = take(30)

    @track("answer")
    def answer(jump: int) -> int:
        ahead.value += jump
        return jump

    jumps = [0, 3600, -7200, 86400 * 400, -86400 * 800]
    began, monotonic = time.time(), time.monotonic()
    answers, ages = [], []
    for jump in jumps:
        answers.append(answer(jump))
        with track("waits"):
            ahead.value += 100_000
            served.collect()
        ages.append(served.exported.value("torch.memory.reading.age"))
        ages.append(served.exported.value("torch.memory.snapshot.age") or 0)
    seconds = [point.sum for point in served.exported.points("torch.memory.request.duration")]
    return {
        "moved": abs((time.time() - began) - (time.monotonic() - monotonic)) > 86400,
        "answers": answers,
        "durations": served.durations,
        "longest": max(seconds),
        "ages": [min(ages), max(ages)],
        "spent": [point.value for point in served.exported.points("torch.memory.telemetry.duration")],
        "lines": served.lines,
        "allocated": served.exported.value("torch.memory.allocated"),
        "took": time.monotonic() - monotonic,
        "kept": kept.numel(),
    }


@pytest.mark.needs_emulation
def test_a_wall_clock_that_jumps_changes_no_duration_and_no_age(gpu, clock):
    preload = gpu.environment()["LD_PRELOAD"]
    got = gpu.run(with_a_clock_that_jumps, env={"LD_PRELOAD": f"{clock}:{preload}"})
    assert got["moved"]
    assert got["answers"] == [0, 3600, -7200, 86400 * 400, -86400 * 800]
    assert got["durations"] == 9  # the last block is told at the next collection
    assert 0 < got["longest"] <= got["took"]
    assert got["ages"][0] >= 0
    assert got["ages"][1] <= got["took"]
    assert all(0 <= spent <= got["took"] for spent in got["spent"])
    assert (got["allocated"], got["lines"]) == (30 * MIB, [])


# ---- signals


def signals_in_the_middle(seconds: float) -> dict:
    served = Served()
    kept = take(30)
    handled, wrong = [0], []

    @track("in the handler")
    def in_the_handler(given: int) -> int:
        return given + 1

    @track("answer")
    def answer(given: int) -> int:
        return given + 1

    def handler(*_: Any) -> None:
        handled[0] += 1
        given = handled[0]
        if in_the_handler(given) != given + 1:  # the next signal may come in the middle of this one
            wrong.append(given)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
    calls, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        calls += 1
        if answer(calls) != calls + 1:
            wrong.append(calls)
    signal.setitimer(signal.ITIMER_REAL, 0)
    served.collect()
    return {
        "wrong": wrong,
        "calls": calls,
        "handled": handled[0],
        "spans": len(served.spans),
        "durations": served.durations,
        "active": served.active,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def test_a_signal_handler_may_make_requests_in_the_middle_of_one(gpu):
    got = gpu.run(signals_in_the_middle, args=[4.0], timeout=60)
    assert got["wrong"] == []
    assert got["handled"] > 500
    told = got["calls"] + got["handled"]
    # a handler that comes within a measured call counts with that call
    assert got["calls"] <= got["durations"] == got["spans"] <= told
    assert (got["active"], got["lines"]) == (0, [])


def a_handler_that_raises() -> dict:
    served = Served(snapshot_share=0)
    kept = take(30)
    at: list[int] = []  # the readings in whose middle the signal comes

    def interrupted() -> None:
        if at and at.pop(0):
            signal.raise_signal(signal.SIGALRM)

    class Limit:
        def reached(self, *_: Any) -> None:
            raise TimeoutError("the user's time is up")

    @track("answer")
    def answer(given: int) -> int:
        return given + 1

    answer(0)
    at_each_reading(interrupted)
    TorchMemInstrumentor().uninstrument()
    served.instrument(snapshot_share=0)
    signal.signal(signal.SIGALRM, Limit().reached)
    answers = [answer(0)]
    for where in ([1], [0, 1], [0, 0, 1]):  # before the call, after it, before the next one
        at[:] = where
        try:
            answers.append(answer(1))
            answers.append(answer(2))
        except TimeoutError as error:
            answers.append(str(error))
        at.clear()
    answers.append(answer(3))
    served.collect()
    return {
        "answers": answers,
        "active": served.active,
        "exclusive": served.spans[-1].attributes["torch.memory.exclusive"],
        "unended": served.spans[-1].parent is not None,
        "durations": served.durations,
        "skipped": served.skipped,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def test_what_a_signal_handler_raises_within_a_measurement_reaches_the_user(gpu):
    got = gpu.run(a_handler_that_raises)
    up = "the user's time is up"
    assert got["answers"] == [1, up, up, 2, up, 4]
    assert (got["active"], got["exclusive"], got["unended"]) == (0, True, False)
    assert (got["skipped"], got["lines"]) == ({}, [])
    assert got["durations"] >= 3


def a_handler_that_raises_while_an_error_is_examined() -> dict:
    from opentelemetry_instrumentation_torchmem.allocator.source import Source

    served = Served(snapshot_share=0)
    kept = take(700)
    whole, due = Source.snapshot, [True]

    def interrupted(source: Source) -> dict:
        if due and due.pop():
            signal.raise_signal(signal.SIGALRM)
        return whole(source)

    def reached(*_: Any) -> None:
        raise TimeoutError("the user's time is up")

    Source.snapshot = interrupted
    signal.signal(signal.SIGALRM, reached)

    @track("answer")
    def answer(mib: int) -> int:
        return take(mib).numel()

    answers: list[Any] = []
    for mib in (500, 100, 500):
        try:
            answers.append(answer(mib))
        except Exception as error:
            answers.append([type(error).__name__, str(error)[:21]])
    seen = served.collect()
    return {
        "answers": answers,
        "errors": [span.attributes.get("error.type") for span in served.spans],
        "verdicts": {
            labels["torch.memory.oom.verdict"]: count
            for labels, count in seen.all("torch.memory.oom.verdicts")
            if count
        },
        "active": served.active,
        "skipped": served.skipped,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def test_what_a_signal_handler_raises_while_an_error_is_examined_reaches_the_user(gpu):
    got = gpu.run(a_handler_that_raises_while_an_error_is_examined, memory="1GiB")
    up = ["TimeoutError", "the user's time is up"]
    assert got["answers"] == [up, 100 * MIB, ["OutOfMemoryError", "CUDA out of memory. T"]]
    assert got["errors"] == ["TimeoutError", None, "OutOfMemoryError"]
    assert got["verdicts"] == {"unknown": 1, "unexamined": 1}
    assert (got["active"], got["skipped"], got["lines"]) == (0, {}, [])


# ---- the interpreter ends


ENDING = """
import sys, threading, time
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

def out(metric):
    points = {m.name: [getattr(p, "count", 0) for p in m.data.data_points]
              for r in metric.resource_metrics for s in r.scope_metrics for m in s.metrics}
    return "DURATIONS %d\\n" % sum(points.get("torch.memory.request.duration", [0]))

provider = MeterProvider([PeriodicExportingMetricReader(
    ConsoleMetricExporter(formatter=out), export_interval_millis=3600_000)])
instrumentor = TorchMemInstrumentor()
instrumentor.instrument(meter_provider=provider)

@track("answer")
def answer():
    return torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

@track("stream")
def stream():
    while True:
        yield answer()

@track("hangs")
def hangs():
    time.sleep(3600)

kept = [stream() for _ in range(3)]
for each in kept:
    next(each)
for _ in range(5):
    answer()
@track("counts")
def counts():  # a thread within torch is more than torch's own end survives, also without us
    return sum(range(1000))

def serves():
    while True:
        counts()

for target in (hangs, serves):
    threading.Thread(target=target, daemon=True).start()
time.sleep(0.2)
if sys.argv[1] == "uninstrumented":
    instrumentor.uninstrument()
    print("UNINSTRUMENTED")
if sys.argv[1] == "interrupted":
    signal = __import__("signal")
    signal.raise_signal(signal.SIGINT)
print("SERVED", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("plainly", 0), ("uninstrumented", 0), ("interrupted", -2)])
def test_the_interpreter_ends_with_work_in_flight_and_tells_what_was_done(gpu, tmp_path, how, code):
    (tmp_path / "app.py").write_text(ENDING)
    process = gpu.popen(
        [sys.executable, "app.py", how],
        memory="1GiB",
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("it does not end")
    assert process.returncode == code
    assert ("SERVED" in out) == (how != "interrupted")
    durations = [int(line.split()[1]) for line in out.splitlines() if line.startswith("DURATIONS")]
    assert durations[-1] >= 5 if how != "uninstrumented" else durations[-1:] in ([], [0])
    assert "torchmem" not in said.replace("opentelemetry_instrumentation_torchmem", ""), said
    assert said.count("Traceback") == (how == "interrupted")


# ---- no memory left on the host


def without_memory_on_the_host(room: int) -> dict:
    import torch

    served = Served(snapshot_share=0.1)
    blocks = [take(0.001) for _ in range(20_000)]

    @track("answer")
    def answer(mib: float) -> int:
        return take(mib).numel()

    @track("stream")
    def stream() -> Any:
        yield from range(3)

    served.collect()
    answers, errors = [answer(1)], []
    open_stream = stream()
    answers.append(next(open_stream))
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (pages, limits[1]))
    hoard: dict[int, Any] = {}
    for size in (1 << 20, 1 << 16, 1 << 12, 400, 100, 16):  # what malloc and Python keep for themselves too
        kept = None
        with contextlib.suppress(MemoryError):
            while True:
                kept = bytes(size), kept
        hoard[size] = kept
    for size, node in hoard.items():  # enough for a call
        for _ in range(room // size // 4):
            node = node[1] if node else None
        hoard[size] = node
    node = kept = None
    for _ in range(3):
        try:
            answers.append(answer(0.001))
            answer(100_000)
        except BaseException as error:
            errors.append(type(error).__name__)
    served.collect()
    during = served.exported.value("torch.memory.allocated")
    TorchMemInstrumentor().uninstrument()  # with a stream open: a thread would wait for its end
    answers.append(next(open_stream))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    while hoard:  # not all at once: it is nested deeply
        _, node = hoard.popitem()
        while node:
            node = node[1]
    served.instrument(snapshot_share=0.1)
    answers.append(answer(1))
    return {
        "answers": answers,
        "errors": errors,
        "events": sum("torch.memory.oom.verdict" in e.attributes for s in served.spans for e in s.events),
        "later": served.collect().value("torch.memory.allocated") > 0,
        "during": during,
        "ooms": torch.cuda.memory_stats()["num_ooms"],
        "lines": served.lines,
        "blocks": len(blocks),
    }


def test_without_memory_on_the_host_telemetry_is_lost_before_any_call(gpu):
    got = gpu.run(without_memory_on_the_host, args=[1 << 18], memory="1GiB", timeout=120)
    assert got["answers"] == [MIB, 0, 1048, 1048, 1048, 1, MIB]
    assert got["errors"] == ["OutOfMemoryError"] * 3
    assert got["later"]
    assert got["events"] == 3
    assert any("evidence of an out of memory error is incomplete" in line for line in got["lines"])
