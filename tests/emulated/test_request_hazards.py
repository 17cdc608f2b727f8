# SPDX-License-Identifier: Apache-2.0
"""Requests beside a slow driver, beside pools that need the interpreter, and with what is wrong or raises."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import Counter
from typing import Any

import pytest
from exported import Exported, Traced

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

MIB = 1 << 20
DEVICE_FIGURES = {"torch.memory.reserved", "torch.memory.usage", "torch.memory.turnover"}


def observed_statistics() -> Counter:
    """Each call of the allocator's statistics from now on, by the thread that makes it."""
    import torch

    calls: Counter = Counter()
    for name in ("_accelerator_getDeviceStats", "_cuda_memoryStats"):
        given = getattr(torch._C, name, None)
        if given is not None:

            def counted(index: int, given: Any = given) -> Any:
                calls[threading.current_thread().name] += 1
                return given(index)

            setattr(torch._C, name, counted)
    return calls


def said_by_us() -> list[str]:
    """Our log lines from now on, those above debug."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    return lines


def skipped(exported: Exported) -> dict[str, int]:
    exported.collect()
    return {
        labels["torch.memory.telemetry.reason"]: value
        for labels, value in exported.all("torch.memory.telemetry.skipped")
        if value and "snapshot" not in labels["torch.memory.telemetry.reason"]  # a matter of time
    }


# ---- a target that sits in cudaMalloc


def beside_a_target_in_cuda_malloc(seconds: float, rounds: int, sampling: str) -> dict:
    import torch
    from emulator import control
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        MetricExporter,
        MetricExportResult,
        PeriodicExportingMetricReader,
    )

    cycles: list[dict[str, Any]] = []

    class Kept(MetricExporter):
        def export(self, metrics_data, timeout_millis=0, **_):
            cycles.append(
                {
                    metric.name: metric.data.data_points
                    for resource in metrics_data.resource_metrics
                    for scope in resource.scope_metrics
                    for metric in scope.metrics
                }
            )
            return MetricExportResult.SUCCESS

        def shutdown(self, timeout_millis=0, **_): ...
        def force_flush(self, timeout_millis=0):
            return True

    class Engine:
        @track("generate")
        def generate(self):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda.empty_cache()

    calls = observed_statistics()
    torch.empty(1, device="cuda")
    gc.freeze()  # as servers do: the garbage collector takes longer over all of torch than a malloc takes
    control.pause("cudaMalloc", 0, 300)
    stop, mallocs = threading.Event(), 0

    def serve() -> None:
        nonlocal mallocs
        while not stop.is_set():
            Engine().generate()
            mallocs += 1

    server = threading.Thread(target=serve, name="server")
    server.start()

    def longest_tick() -> float:
        longest, end = 0.0, time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            time.sleep(0.001)
            longest = max(longest, time.perf_counter() - began)
        return longest

    without, with_us = [], []
    traced = Traced()
    for _ in range(rounds):
        without.append(longest_tick())
        ended = len(traced.spans)
        meters = MeterProvider([PeriodicExportingMetricReader(Kept(), export_interval_millis=50)])
        TorchMemInstrumentor().instrument(
            meter_provider=meters, tracer_provider=traced.provider, sampling=sampling
        )
        while len(traced.spans) == ended:  # the request in flight began before us, so nobody knows of it
            time.sleep(0.01)
        cycles.clear()
        before = calls.total() - calls["server"]
        with_us.append(longest_tick())
        kept, by_others = cycles.copy(), calls.total() - calls["server"] - before
        TorchMemInstrumentor().uninstrument()
        meters.shutdown()
    stop.set()
    server.join()
    return {
        "without": without,
        "with us": with_us,
        "cycles": len(kept),
        "ledgers": [
            sum(point.value for point in cycle["torch.memory.usage"])
            for cycle in kept
            if "torch.memory.usage" in cycle
        ],
        "whole": sum(DEVICE_FIGURES | {"torch.memory.reading.age"} <= set(cycle) for cycle in kept),
        "ages": [point.value for cycle in kept for point in cycle.get("torch.memory.reading.age", ())],
        "reserved": [
            sum(point.value for point in cycle["torch.memory.reserved"])
            for cycle in kept
            if "torch.memory.reserved" in cycle
        ],
        "mallocs": mallocs,
        "spans": [
            [
                span.attributes.get("torch.memory.device.allocations"),
                span.attributes.get("torch.memory.exclusive"),
                (span.end_time - span.start_time) / 1e9,
            ]
            for span in traced.spans
        ],
        "reads by others": by_others,
    }


@pytest.mark.needs_emulation
def test_beside_a_target_in_cuda_malloc_no_thread_is_held_up_and_collections_go_on(gpu):
    got = gpu.run(beside_a_target_in_cuda_malloc, args=[3.0, 5, "auto"], memory="2GiB", timeout=180)
    print({name: [f"{value * 1000:.1f} ms" for value in got[name]] for name in ("without", "with us")})
    assert got["mallocs"] > 20
    # a busy machine holds up any thread now and then; a reading that waits would be 200 ms in most rounds
    assert sorted(got["with us"])[-2] <= max(got["without"]) + 0.020
    assert got["cycles"] >= 10
    assert got["whole"] == got["cycles"]
    assert set(got["ledgers"]) == {2 << 30}
    assert 0.2 < max(got["ages"]) < 1.0  # a malloc old
    assert set(got["reserved"]) <= {0, 2 * MIB, 30 * MIB, 32 * MIB}
    assert len(got["spans"]) > 10
    for mallocs, exclusive, duration in got["spans"][1:]:
        assert (mallocs, exclusive) == (1, True)
        assert duration > 0.29
    # who collects reads in the moment between two requests at most
    assert got["reads by others"] <= 0.2 * got["cycles"]


@pytest.mark.needs_emulation
def test_a_collection_that_always_reads_would_hold_them_up(gpu):
    got = gpu.run(beside_a_target_in_cuda_malloc, args=[2.0, 1, "always"], memory="2GiB", timeout=120)
    assert max(got["with us"]) > max(got["without"]) + 0.1


# ---- who reads


def who_reads(sampling: str, max_reading_age: float) -> dict:
    import torch

    calls = observed_statistics()
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider,
        tracer_provider=traced.provider,
        sampling=sampling,
        max_reading_age=max_reading_age,
        snapshot_share=0,
    )
    begun, go = threading.Event(), threading.Event()

    @track("generate")
    def generate():
        more = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
        begun.set()
        go.wait(30)
        return more

    def read_by(what: str, collections: int) -> list:
        """How often the collecting thread read in so many collections; then what it told."""
        before = calls["MainThread"]
        for _ in range(collections):
            exported.collect()
        reserved, age = exported.value("torch.memory.reserved"), exported.value("torch.memory.reading.age")
        return [what, calls["MainThread"] - before, reserved, age]

    told = [read_by("idle at first", 1), read_by("idle", 5)]
    request = threading.Thread(target=generate, name="request")
    request.start()
    begun.wait(30)
    told.append(read_by("in flight", 10))
    time.sleep(max_reading_age + 0.05)
    told.append(read_by("in flight, too old", 1))
    told.append(read_by("in flight, read by us", 10))
    go.set()
    request.join()
    told.append(read_by("idle again", 5))
    time.sleep(max_reading_age + 0.05)
    told.append(read_by("idle, too old", 5))
    limit = exported.value("torch.memory.limit")
    return {
        "told": {what: rest for what, *rest in told},
        "by requests": calls["request"],
        "skipped": skipped(exported),
        "limit": limit,
        "kept": kept.numel(),
    }


@pytest.mark.needs_emulation
def test_a_collection_beside_a_request_reads_only_what_is_too_old(gpu):
    got = gpu.run(who_reads, args=["auto", 2.0], memory="1GiB")
    told = got["told"]
    # which call it is, whether the device is in use, the reading, and whether the driver's word goes with it
    assert told["idle at first"][0] <= 4
    assert told["idle"][:2] == [5, 30 * MIB]
    reads, reserved, age = told["in flight"]
    assert (reads, reserved) == (0, 30 * MIB)  # as it was when the request began
    assert 0 < age < 2.0
    reads, reserved, age = told["in flight, too old"]
    assert (reads, reserved) == (1, 80 * MIB)
    assert age < 0.5
    assert told["in flight, read by us"][:2] == [0, 80 * MIB]
    assert told["idle again"][0] == told["idle, too old"][0] == 5
    assert 2 <= got["by requests"] <= 3  # one more to look for devices
    assert got["skipped"] == {}


@pytest.mark.needs_emulation
def test_sampling_request_leaves_every_reading_to_the_requests(gpu):
    got = gpu.run(who_reads, args=["request", 1.0], memory="1GiB")
    told = got["told"]
    assert {reads for reads, *_ in told.values()} == {0}
    assert told["idle"][1] is None
    assert told["in flight"][1] == 30 * MIB
    assert told["in flight, too old"][1:] == [None, told["in flight, too old"][2]]
    assert told["idle again"][1] == 80 * MIB
    assert told["idle, too old"][1] is None
    assert got["limit"] == 1 << 30
    assert got["skipped"]["sampling"] >= 6


@pytest.mark.needs_emulation
def test_sampling_always_reads_at_each_collection(gpu):
    got = gpu.run(who_reads, args=["always", 2.0], memory="1GiB")
    told = got["told"]
    assert [told[what][0] for what in ("idle", "in flight", "in flight, too old", "idle again")] == [
        5,
        10,
        1,
        5,
    ]
    assert told["in flight"][1] == 80 * MIB


# ---- a pool whose allocator needs the interpreter


def requests_in_such_a_pool(library: str, first: str | None) -> dict:
    """Requests of the one thread that allocates in the pool; and of another that leaves the device alone, for
    torch itself would hang with two that use it (a tensor is freed with the interpreter in hand)."""
    import torch

    counted = observed_statistics()
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    kept = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    exported.collect()
    counted.clear()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "take_with_interpreter", "give_with_interpreter"
    )
    pool = torch.cuda.MemPool(allocator.allocator())
    stop, begun = threading.Event(), {name: threading.Event() for name in ("engine", "web")}

    @track("step")
    def step(turn):
        begun["engine"].set()
        return torch.empty((20 + turn) * MIB, dtype=torch.uint8, device="cuda").numel()

    @track("rerank")
    def rerank():
        begun["web"].set()
        time.sleep(0.001)

    def engine() -> None:
        if first == "web":
            begun["web"].wait(20)
        with torch.cuda.use_mem_pool(pool):
            for turn in range(200):
                step(turn)
        stop.set()

    def web() -> None:
        if first == "engine":
            begun["engine"].wait(20)
        while not stop.is_set():
            rerank()

    def collect() -> None:
        while not stop.is_set():
            exported.collect()
            time.sleep(0.001)

    threads = [threading.Thread(target=each, name=each.__name__) for each in (engine, collect)]
    if first is not None:
        threads.append(threading.Thread(target=web, name="web"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = [span.attributes for span in traced.spans]
    return {
        "steps": sum(told["torch.operation"] == "step" for told in spans),
        "told": sum("torch.memory.reserved.delta" in told for told in spans),
        "others": sum(told["torch.operation"] == "rerank" for told in spans),
        "mallocs": sum(told.get("torch.memory.device.allocations", 0) for told in spans),
        "readers": dict(counted),
        "skipped": skipped(exported).get("pluggable_pool", 0),
        "kept": kept.numel(),
    }


@pytest.mark.needs_emulation
def test_beside_such_a_pool_the_one_thread_that_makes_requests_reads(gpu, pluggable):
    got = gpu.run(requests_in_such_a_pool, args=[pluggable, None], memory="64GiB")
    assert got["steps"] == got["told"] == 200
    assert got["mallocs"] > 50
    assert set(got["readers"]) == {"engine"}
    assert got["skipped"] > 0  # the collections


@pytest.mark.needs_emulation
@pytest.mark.parametrize("first", ["web", "engine"])
def test_beside_such_a_pool_a_second_thread_that_makes_requests_hangs_nothing(gpu, pluggable, first):
    got = gpu.run(requests_in_such_a_pool, args=[pluggable, first], memory="64GiB")
    assert got["steps"] == 200
    assert got["others"] > 0
    assert got["told"] < 200 + got["others"]
    assert got["skipped"] >= got["steps"] + got["others"] - got["told"]
    assert set(got["readers"]) <= {first}  # until the other one came


# ---- what is wrong, or raises


def hooks_that_raise() -> dict:
    import torch

    lines = said_by_us()
    seen: list[list[Any]] = []

    def request_hook(span, operation, arguments, keywords):
        seen.append(["request", operation, len(arguments), sorted(keywords), span.is_recording()])
        span.set_attribute("app.seen", True)
        raise ValueError("request hook")

    def response_hook(span, operation, result):
        seen.append(["response", operation, result, [], span.is_recording()])
        raise ZeroDivisionError("response hook")

    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider,
        tracer_provider=traced.provider,
        request_hook=request_hook,
        response_hook=response_hook,
    )
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")

    @track("generate")
    def generate(prompt, *, size):
        return f"{prompt} {size}"

    results = [generate("a", size=number) for number in range(3)]
    return {
        "results": results,
        "seen": seen,
        "lines": lines,
        "skipped": skipped(exported),
        "spans": [
            [
                span.attributes["app.seen"],
                span.attributes["torch.memory.exclusive"],
                span.status.status_code.name,
            ]
            for span in traced.spans
        ],
        "kept": kept.numel(),
    }


def test_a_hook_that_raises_is_named_once_counted_each_time_and_costs_nothing_else(gpu):
    got = gpu.run(hooks_that_raise)
    assert got["results"] == ["a 0", "a 1", "a 2"]
    assert got["seen"][:2] == [
        ["request", "generate", 1, ["size"], True],
        ["response", "generate", "a 0", [], True],
    ]
    assert len(got["seen"]) == 6
    assert got["skipped"] == {"hook": 6}
    first, second = got["lines"]
    assert "request_hook" in first
    assert "ValueError('request hook')" in first
    assert "response_hook" in second
    assert got["spans"] == [[True, True, "UNSET"]] * 3


def targets_that_are_wrong() -> dict:
    import json as a_module

    import torch  # noqa: F401 - without it a target that is never imported is no news

    lines = said_by_us()
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider,
        tracer_provider=traced.provider,
        targets=[
            "no colon",
            "json:Nowhere.encode",
            "json:JSONEncoder.nothing",
            "json:loads",
            {"target": "json:dumps", "span": "loud"},
            "never.imported:Engine.generate",
            17,
        ],
    )
    loaded = a_module.loads("[1]")
    TorchMemInstrumentor().uninstrument()
    return {
        "lines": lines,
        "loaded": loaded,
        "spans": [span.name for span in traced.spans],
        "kinds": type(a_module.JSONEncoder.encode).__name__,
    }


def test_each_target_that_is_wrong_is_named_once_and_the_others_are_measured(gpu):
    got = gpu.run(targets_that_are_wrong)
    for name in ("no colon", "json:Nowhere.encode", "json:JSONEncoder.nothing", "json:dumps", "17",
                 "never.imported:Engine.generate"):  # fmt: skip
        (line,) = [line for line in got["lines"] if f"target {name} " in line]
        assert line.startswith("torchmem: target ")
    assert len(got["lines"]) == 6
    assert got["loaded"] == [1]
    assert got["spans"] == ["loads"]


def arguments_that_raise() -> dict:
    import torch

    lines = said_by_us()
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")

    class Shapeless(torch.Tensor):
        @property
        def shape(self):
            raise RuntimeError("no shape")

    class Closed(dict):
        def values(self):
            raise LookupError("no values")

    class Masked:
        @property
        def __class__(self):
            raise TypeError("no class")

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    class Nameless(type):
        def __getattribute__(cls, name):
            if name == "__name__":
                raise AttributeError("no name")
            return super().__getattribute__(name)

    class Engine(metaclass=Nameless):
        @track("generate")
        def generate(self, argument):
            return argument

    @track("encode")
    def encode(argument):
        return argument

    @track("fail")
    def fail(error):
        raise error

    arguments = [torch.zeros(2).as_subclass(Shapeless), Closed(a=1), Masked()]
    results = [encode(argument) is argument for argument in arguments for _ in range(2)]
    results.append(Engine().generate(kept) is kept)
    unprintable = Unprintable()
    try:
        fail(unprintable)
    except Unprintable as error:
        results.append(error is unprintable)
    with track("attributes") as request:
        request.set_attribute("app.fine", 1)
        request.set_attribute("app.wrong", object())
    exported.collect()
    return {
        "results": results,
        "lines": lines,
        "skipped": skipped(exported),
        "spans": [
            [
                span.name,
                span.attributes.get("torch.memory.exclusive"),
                span.status.status_code.name,
                span.attributes.get("error.type"),
            ]
            for span in traced.spans
        ],
        "described": [
            key for span in traced.spans for key in span.attributes if key.startswith("torch.input")
        ],
        "durations": sum(point.count for point in exported.points("torch.memory.request.duration")),
        "kept": kept.numel(),
    }


def test_arguments_and_exceptions_that_raise_when_looked_at_never_reach_the_caller(gpu):
    got = gpu.run(arguments_that_raise)
    assert got["results"] == [True] * len(got["results"])
    about_encode = [line for line in got["lines"] if "encode" in line]
    assert len(about_encode) == 3  # one for each way to fail
    for line, words in zip(about_encode, ("no shape", "no values", "no class"), strict=True):
        assert words in line
        assert "inputs" in line
    assert [line for line in got["lines"] if "fail" in line and "no words" in line]
    assert got["skipped"]["request"] >= 7
    named = [span for span in got["spans"] if span[0] == "encode"]
    assert named == [["encode", True, "UNSET", None]] * 6  # measured all the same
    (failed,) = [span for span in got["spans"] if span[0] == "fail"]
    assert failed == ["fail", True, "ERROR", "test_request_hazards.Unprintable".rpartition(".")[2]] or (
        failed[2:] == ["ERROR", "arguments_that_raise.<locals>.Unprintable"]
    )
    assert got["durations"] >= 8


def readings_that_raise() -> dict:
    import torch

    lines = said_by_us()
    broken = False
    given = torch._C._accelerator_getDeviceStats

    def statistics(index: int) -> Any:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return given(index)

    torch._C._accelerator_getDeviceStats = statistics
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")

    @track("generate")
    def generate(number):
        time.sleep(0.02)
        return number

    results = [generate(0)]
    exported.collect()
    broken = True
    results += [generate(1), generate(2)]
    exported.collect()
    names = sorted(exported.names)
    broken = False
    results.append(generate(3))
    with contextlib.suppress(KeyError):
        del kept
    return {
        "results": results,
        "lines": lines,
        "skipped": skipped(exported),
        "names": names,
        "spans": [
            ["torch.memory.reserved.delta" in span.attributes, (span.end_time - span.start_time) / 1e9]
            for span in traced.spans
        ],
        "durations": sum(point.count for point in exported.points("torch.memory.request.duration")),
        "active": exported.value("torch.memory.requests.active"),
    }


def test_a_broken_device_costs_figures_and_no_call(gpu):
    got = gpu.run(readings_that_raise)
    assert got["results"] == [0, 1, 2, 3]
    assert [told for told, _ in got["spans"]] == [True, False, False, True]
    assert min(seconds for _, seconds in got["spans"]) > 0.015  # the whole call, measured or not
    assert got["durations"] == 4
    assert got["skipped"]["request"] == 4
    assert got["skipped"]["error"] >= 1
    assert "torch.memory.reserved" not in got["names"]
    assert "torch.memory.telemetry.skipped" in got["names"]
    assert got["active"] == 0
    assert len([line for line in got["lines"] if "generate" in line]) == 1


def a_processor_that_raises() -> list:
    import torch
    from opentelemetry.sdk.trace import SpanProcessor

    lines = said_by_us()

    class Broken(SpanProcessor):
        def on_start(self, span, parent_context=None):
            raise OSError("on start")

        def on_end(self, span):
            raise OSError("on end")

    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")

    @track("generate")
    def generate(number):
        return number

    results = [generate(0)]
    traced.provider.add_span_processor(Broken())
    results += [generate(1), generate(2)]
    exported.collect()
    active = exported.value("torch.memory.requests.active")
    return [results, [line for line in lines if "torchmem" in line], skipped(exported), active, kept.numel()]


def test_a_span_processor_that_raises_never_reaches_the_caller(gpu):
    results, lines, counted, active, _ = gpu.run(a_processor_that_raises)
    assert results == [0, 1, 2]
    assert len(lines) == 1
    assert "generate" in lines[0]
    assert counted["request"] >= 2
    assert active == 0
