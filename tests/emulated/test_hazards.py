# SPDX-License-Identifier: Apache-2.0
"""A reading waits for the allocator's mutex with the interpreter in hand: what that must never do."""

from __future__ import annotations

import threading
import time

import pytest
from exported import Exported

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

MIB = 1 << 20


def beside_slow_mallocs(seconds: float) -> dict:
    import torch
    from emulator import control
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        MetricExporter,
        MetricExportResult,
        PeriodicExportingMetricReader,
    )

    cycles: list[set[str]] = []

    class Kept(MetricExporter):
        def export(self, data, timeout_millis=0, **_):
            names = {m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
            cycles.append(names)
            return MetricExportResult.SUCCESS

        def shutdown(self, timeout_millis=0, **_):
            pass

        def force_flush(self, timeout_millis=0):
            return True

    provider = MeterProvider([PeriodicExportingMetricReader(Kept(), export_interval_millis=250)])
    for name in ("users.before", "users.after"):
        if name == "users.after":
            TorchMemInstrumentor().instrument(meter_provider=provider)
        provider.get_meter("user").create_observable_gauge(name, [lambda _: [Observation(1)]])
    torch.empty(1, device="cuda")
    control.pause("cudaMalloc", 0, 300)
    stop = threading.Event()
    mallocs = 0

    def slow() -> None:
        nonlocal mallocs
        while not stop.is_set():
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            mallocs += 1
            torch.cuda.empty_cache()

    thread = threading.Thread(target=slow)
    longest = 0.0
    thread.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        time.sleep(0.001)
        longest = max(longest, time.perf_counter() - began)
    stop.set()
    thread.join()
    before = cycles[:]  # one that is under way at `uninstrument` may have some of ours
    TorchMemInstrumentor().uninstrument()
    provider.shutdown()
    whole = {"users.before", "users.after", "torch.memory.usage", "torch.memory.telemetry.skipped"}
    return {
        "cycles": len(before),
        "whole": sum(whole <= names for names in before),
        "mallocs": mallocs,
        "longest": longest,
    }


@pytest.mark.needs_emulation
def test_beside_slow_mallocs_no_cycle_and_no_other_instruments_point_is_lost(gpu):
    got = gpu.run(beside_slow_mallocs, args=[6.0], memory="2GiB")
    assert got["mallocs"] > 10
    assert got["cycles"] >= 10  # 24 were due, some late by a malloc
    assert got["whole"] == got["cycles"]
    print(f"longest hold-up of another thread without instrumented requests: {got['longest'] * 1000:.0f} ms")


def a_pool_that_needs_the_interpreter(library: str, sampling: str, made_before: bool) -> dict:
    import torch

    torch.cuda.init()
    exported = Exported()
    options = {"meter_provider": exported.provider, "sampling": sampling, "max_reading_age": 1}
    if not made_before:
        TorchMemInstrumentor().instrument(**options)
    ordinary = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    if not made_before:
        exported.collect()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "take_with_interpreter", "give_with_interpreter"
    )
    pool = torch.cuda.MemPool(allocator.allocator())
    if made_before:
        TorchMemInstrumentor().instrument(**options)
    stop = threading.Event()
    allocated = 0

    def allocate() -> None:
        nonlocal allocated
        with torch.cuda.use_mem_pool(pool):
            while not stop.is_set():
                torch.empty((20 + allocated % 200) * MIB, dtype=torch.uint8, device="cuda")
                allocated += 1

    thread = threading.Thread(target=allocate)
    thread.start()
    end = time.monotonic() + (15 if sampling == "always" else 3)
    collections = 0
    while time.monotonic() < end:
        exported.collect()
        collections += 1
    stop.set()
    thread.join()
    exported.collect()
    return {
        "collections": collections,
        "allocated": allocated,
        "skipped": exported.value("torch.memory.telemetry.skipped", reason="pluggable_pool"),
        "names": sorted(exported.names),
        "kept": ordinary.numel(),
    }


@pytest.mark.needs_emulation
def test_without_the_protection_such_a_pool_hangs_the_process(gpu, pluggable):
    with pytest.raises(gpu.Hung):
        gpu.run(a_pool_that_needs_the_interpreter, args=[pluggable, "always", False], timeout=25)


@pytest.mark.needs_emulation
@pytest.mark.parametrize("made_before", [False, True])
def test_beside_such_a_pool_nothing_is_read_and_that_is_counted(gpu, pluggable, made_before):
    got = gpu.run(
        a_pool_that_needs_the_interpreter, args=[pluggable, "auto", made_before], memory="2GiB", timeout=60
    )
    assert got["collections"] > 100
    assert got["allocated"] > 10
    assert got["skipped"] >= got["collections"]
    assert "torch.memory.reserved" not in got["names"]
    assert "torch.memory.host.reserved" in got["names"]
    assert ("torch.memory.limit" in got["names"]) is not made_before  # the device was known before the pool


def a_dead_pool_of_earlier(library: str, made_between: bool) -> dict:
    """Its memory goes back through its allocator, while somebody collects."""
    import torch

    torch.cuda.init()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "take_with_interpreter", "give_with_interpreter"
    )
    exported = Exported()
    instrumentor = TorchMemInstrumentor()
    instrumentor.instrument(meter_provider=exported.provider)
    if made_between:
        instrumentor.uninstrument()
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        kept = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(60)]
    del pool
    if not made_between:
        instrumentor.uninstrument()
    instrumentor.instrument(meter_provider=exported.provider)
    done = threading.Event()

    def let_go() -> None:
        while kept:
            kept.pop()
            torch.cuda.empty_cache()
        done.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    collections = 0
    while not done.is_set() or collections < 10:
        exported.collect()
        collections += 1
    thread.join()
    return {"left": torch.cuda.memory_reserved(), "names": sorted(exported.collect().names)}


@pytest.mark.needs_emulation
@pytest.mark.parametrize("made_between", [False, True])
def test_a_dead_pool_of_before_an_uninstrument_is_not_forgotten(gpu, pluggable, made_between):
    got = gpu.run(a_dead_pool_of_earlier, args=[pluggable, made_between], memory="4GiB", timeout=40)
    assert got["left"] == 0
    assert "torch.memory.reserved" not in got["names"]


def an_ordinary_pool() -> list:
    import torch

    exported = Exported()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    exported.collect()
    skipped = exported.value("torch.memory.telemetry.skipped", reason="pluggable_pool")
    return [exported.value("torch.memory.allocated"), skipped, kept.numel()]


def test_a_pool_without_an_allocator_of_its_own_is_read_as_ever(gpu):
    allocated, skipped, _ = gpu.run(an_ordinary_pool)
    assert allocated == 10 * MIB
    assert skipped == 0


def a_thousand_dead_pools() -> list:
    import torch

    exported = Exported()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    for _ in range(1000):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            block = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        del block, pool
    exported.collect()
    before = exported.value("torch.memory.telemetry.duration", step="stats")
    exported.collect()
    spent = exported.value("torch.memory.telemetry.duration", step="stats") - before
    began = time.perf_counter()
    keys = len(torch.cuda.memory_stats(0))
    return [keys, spent, time.perf_counter() - began]


def test_dead_pools_do_not_make_readings_grow(gpu):
    keys, spent, public = gpu.run(a_thousand_dead_pools)
    if keys < 1000:
        pytest.skip("this release of torch forgets dead pools")
    assert spent < public / 10
