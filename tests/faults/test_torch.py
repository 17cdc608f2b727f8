# SPDX-License-Identifier: Apache-2.0
"""Faults in what torch is, or does: no GPU, other allocators, captures, resets, out of memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from faults.served import MIB, Served, TorchMemInstrumentor, elsewhere, take, track, until

# ---- no CUDA


def a_call_without_cuda() -> dict:
    import torch

    served = Served()

    @track("double")
    def double(given: Any) -> Any:
        return given * 2

    result = double(torch.ones(3)).tolist()
    served.collect()
    return {
        "cuda": [torch.cuda.is_available(), torch.cuda.is_initialized()],
        "result": result,
        "names": served.names,
        "attributes": sorted(served.spans[0].attributes),
        "skipped": served.skipped,
        "lines": served.lines,
    }


OF_REQUESTS = ["request.duration", "request.retries", "requests.active"]
OF_PACKAGE = ["telemetry.duration", "telemetry.skipped"]
OF_CALLS = ["code.function.name", "torch.input.dtypes", "torch.input.shapes", "torch.operation"]


def test_on_the_cpu_a_call_is_timed_and_nothing_is_told_of_memory(gpu):
    no_driver = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None, "CUDA_VISIBLE_DEVICES": ""}
    got = gpu.run(a_call_without_cuda, env=no_driver)
    assert got["cuda"] == [False, False]
    assert got["result"] == [2, 2, 2]
    assert got["names"] == OF_REQUESTS + OF_PACKAGE
    assert got["attributes"] == OF_CALLS
    assert (got["skipped"], got["lines"]) == ({}, [])


def before_cuda_is_initialised() -> dict:
    from emulator import control

    got = a_call_without_cuda()
    got["contexts"] = control.contexts_made()
    TorchMemInstrumentor().uninstrument()
    got["after uninstrument"] = control.contexts_made()
    served = Served()
    kept = take(30)
    got["later"] = [served.collect().value("torch.memory.allocated"), kept.numel()]
    return got


@pytest.mark.needs_emulation
def test_an_uninitialised_cuda_stays_so_until_the_user_wants_it(gpu):
    got = gpu.run(before_cuda_is_initialised)
    assert got["cuda"] == [True, False]
    assert (got["contexts"], got["after uninstrument"]) == (0, 0)
    assert got["result"] == [2, 2, 2]
    assert got["names"] == OF_REQUESTS + OF_PACKAGE
    assert got["attributes"] == OF_CALLS
    assert (got["skipped"], got["lines"]) == ({}, [])
    assert got["later"] == [30 * MIB, 30 * MIB]


# ---- other allocators


def on_another_allocator(library: str | None, instrumented: bool) -> dict:
    import torch

    if library is not None:
        torch.cuda.memory.change_current_allocator(
            torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
        )
    served = Served() if instrumented else None
    observed, error = "", None
    try:
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: None)
    except RuntimeError as refused:
        observed = str(refused).partition("\n")[0]

    @track("generate")
    def generate(mib: float) -> Any:
        return take(mib)

    held = take(1)
    kept = generate(30)
    try:
        generate(1 << 20)
    except RuntimeError as raised:
        error = type(raised).__name__
    got = {"error": error, "observer": observed, "kept": kept.numel() + held.numel()}
    if served is None:
        return got
    served.collect()
    got["names"] = [name for name in served.names if not name.startswith(("request", "telemetry"))]
    got["told"] = [
        {key: value for key, value in span.attributes.items() if key.startswith("torch.memory.")}
        for span in served.spans
    ]
    got["skipped"], got["lines"] = served.skipped, served.lines
    got["limit"] = served.exported.value("torch.memory.limit")
    return got


def on_it_with_and_without_us(gpu: Any, library: str | None = None, **options: Any) -> dict:
    """What is told; to the user it is the same either way."""
    got = gpu.run(on_another_allocator, args=[library, True], memory="1GiB", **options)
    bare = gpu.run(on_another_allocator, args=[library, False], memory="1GiB", **options)
    assert {key: got[key] for key in bare} == bare
    return got


@pytest.mark.needs_emulation
def test_cuda_malloc_async_loses_figures_and_no_call(gpu):
    got = on_it_with_and_without_us(gpu, alloc_conf="backend:cudaMallocAsync")
    assert got["names"] == [
        "active", "allocated", "allocated_peak", "allocator.info", "host.allocated", "host.reserved",
        "limit", "reading.age", "reserved", "reserved_peak", "slack", "usage",
    ]  # fmt: skip
    assert got["error"] == "OutOfMemoryError"
    served, failed = got["told"]
    assert served["torch.memory.allocated.delta"] == 30 * MIB
    assert not {"torch.memory.allocation.retries", "torch.memory.ooms"} & {*served, *failed}  # 0 for ever
    assert (got["skipped"], got["lines"]) == ({}, [])


@pytest.mark.needs_emulation
def test_a_pluggable_allocator_loses_figures_and_no_call(gpu, pluggable):
    got = on_it_with_and_without_us(gpu, pluggable)
    assert got["names"] == ["allocator.info", "host.allocated", "host.reserved", "limit", "reading.age"]
    assert got["limit"] == 1 << 30
    for told in got["told"]:
        assert set(told) == {"torch.memory.exclusive", "torch.memory.requests.concurrent"}
    assert (got["skipped"], got["lines"]) == ({}, [])


# ---- captures


def requests_around_a_capture() -> dict:
    import torch

    served = Served(snapshot_share=0.1)
    kept = [take(30)]
    graph, held = torch.cuda.CUDAGraph(), torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    capturing, captured, others = threading.Event(), threading.Event(), []

    @track("step")
    def step() -> int:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            kept.append(held + 1)
            capturing.set()
            assert captured.wait(30)
        graph.replay()
        return 1

    @track("other")
    def other(turn: int) -> int:
        return turn

    thread = elsewhere(lambda: others.append(step()))
    assert capturing.wait(30)
    took = 0.0
    for turn in range(20):
        others.append(other(turn))
        exported = served.collect()
        took = exported.value("torch.memory.telemetry.duration", step="snapshot")
    skipped = served.skipped
    captured.set()
    thread.join(30)
    until(lambda: (served.collect().value("torch.memory.headroom")) is not None, 5)
    return {
        "results": others,
        "snapshots during": took,
        "skipped": skipped,
        "allocated": exported.value("torch.memory.allocated") > 30 * MIB,
        "spans": sorted({span.name for span in served.spans}),
        "failed": [span.name for span in served.spans if span.status.status_code.name == "ERROR"],
        "later": served.exported.value("torch.memory.headroom") is not None,
        "lines": served.lines,
    }


def test_a_graph_is_captured_and_replayed_with_requests_and_collections_around_it(gpu):
    got = gpu.run(requests_around_a_capture, memory="1GiB")
    assert got["results"] == [*range(20), 1]
    assert (got["snapshots during"], got["skipped"]) == (0, {"snapshot_capture": 20})
    assert got["allocated"]
    assert (got["spans"], got["failed"], got["lines"]) == (["other", "step"], [], [])
    assert got["later"]


# ---- the user's resets


def the_users_resets(instrumented: bool) -> dict:
    import torch

    served = Served(snapshot_share=0) if instrumented else None
    users, exported = [], []

    @track("generate")
    def generate(mib: int) -> None:
        take(mib)

    def look() -> None:
        stats = torch.cuda.memory_stats(0)
        users.append([stats["num_ooms"], stats["num_device_alloc"], stats["allocated_bytes.all.allocated"]])
        users[-1] += [torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0)]
        if served is not None:
            served.collect()
            names = ("ooms", "device.allocations", "turnover")
            exported.append([served.exported.value(f"torch.memory.{name}") for name in names])

    for mib in (100, 40, 30, 20, 10):
        generate(mib)
        look()
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.reset_peak_memory_stats()
        try:
            generate(1 << 20)
        except torch.OutOfMemoryError:
            look()
    return {"users": users, "exported": exported}


def test_peaks_and_counters_are_the_users_own_and_ours_never_fall(gpu):
    got = gpu.run(the_users_resets, args=[True], memory="1GiB")
    bare = gpu.run(the_users_resets, args=[False], memory="1GiB")
    assert got["users"] == bare["users"]
    ooms, _, turnover = zip(*got["exported"], strict=True)
    assert list(ooms) == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert turnover[0] == 100 * MIB
    assert turnover[-1] == 200 * MIB
    for column in zip(*got["exported"], strict=True):
        assert list(column) == sorted(column)


# ---- out of memory


def observers_beside_a_telemetry_that_fails(instrumented: bool) -> dict:
    import torch
    from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor

    class Broken(LogRecordProcessor):
        def on_emit(self, log_record: Any) -> None:
            raise SystemError("the user's log processor")

        def shutdown(self) -> None: ...
        def force_flush(self, timeout_millis: int = 0) -> bool:
            return True

    logs = LoggerProvider()
    logs.add_log_record_processor(Broken())
    seen: list[Any] = []
    torch.cuda.init()
    torch._C._cuda_attach_out_of_memory_observer(lambda *given: seen.append(["earlier", *given]))
    served = Served(logger_provider=logs) if instrumented else None
    torch._C._cuda_attach_out_of_memory_observer(lambda *given: seen.append(["later", *given]))

    @track("answer")
    def answer(mib: int) -> Any:
        return take(mib)

    kept, errors = take(1), []
    for _ in range(3):
        try:
            answer(5000)
        except Exception as error:
            errors.append([type(error).__name__, str(error), repr(error.__cause__), repr(error.__context__)])
    got: dict[str, Any] = {"seen": seen, "errors": errors, "kept": kept.numel()}
    if served is not None:
        served.collect()
        got["verdicts"] = served.exported.value("torch.memory.oom.verdicts")
        got["events"] = [event.name for span in served.spans for event in span.events]
        got["skipped"], got["lines"] = served.skipped, served.lines
    return got


def test_the_users_observers_and_exception_stand_though_telling_the_evidence_fails(gpu):
    got = gpu.run(observers_beside_a_telemetry_that_fails, args=[True], memory="1GiB")
    bare = gpu.run(observers_beside_a_telemetry_that_fails, args=[False], memory="1GiB")
    assert [got["seen"], got["errors"]] == [bare["seen"], bare["errors"]]
    assert [who for who, *_ in got["seen"]] == ["earlier", "later"] * 3
    assert [kind for kind, *_ in got["errors"]] == ["OutOfMemoryError"] * 3
    assert got["verdicts"] == 3
    assert got["events"].count("exception") == 3
    assert got["skipped"] == {"error": 1}
    assert len(got["lines"]) == 1
