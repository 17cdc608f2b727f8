# SPDX-License-Identifier: Apache-2.0
"""The guard on the real allocator: what it waits for, what waits for it, and what each step wins."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from exported import Exported
from together import Together
from watched import take

from opentelemetry_instrumentation_torchmem import MemoryGuard, TorchMemInstrumentor, track
from opentelemetry_instrumentation_torchmem.guard import Headroom, Slack
from opentelemetry_instrumentation_torchmem.guard.machine import State, Timing

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
native = Together(memory="2GiB", timeout=200)
expandable = Together(memory="2GiB", alloc_conf="expandable_segments:True", timeout=200)

AT_ONCE = Timing(
    sick_for=0, cool_down=0, probe_period=0, probe_failures=1, drain_limit=600, hold_limit=0, min_uptime=0
)


def guarded(policy: Any = lambda readings: not readings.cleared, **options: Any) -> MemoryGuard:
    return MemoryGuard(policy, timing=AT_ONCE, steers=True, **options)


def instrumented() -> Exported:
    exported = Exported()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, snapshot_share=0.1)
    return exported


def cache(mib: int) -> None:
    kept = [take(20 * MIB) for _ in range(mib // 20)]
    del kept


def cycle(guard: MemoryGuard) -> str:
    """From serving until it serves again, or wants a restart."""
    guard.tick()
    assert guard.state is State.DRAINING, guard.state
    guard.tick()
    guard._clearing.join()
    return guard.state.value


def won(guard: MemoryGuard) -> dict[str, dict[str, int]]:
    figures = guard._figures
    return {
        step: {"headroom": figures.headroom_won[step] // MIB, "released": figures.released[step] // MIB}
        for step in ("drain", "clear")
    }


# what each step wins


@native.body
def need_of_a_device_that_is_not_there():
    instrumented()
    take(20 * MIB)
    told = Told()
    logging.getLogger("opentelemetry_instrumentation_torchmem").addHandler(told)
    guard = guarded(Headroom(need={"cuda:7": MIB, "cuda:0": MIB}))
    guard.tick()
    guard.tick()
    return told.lines


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_need_of_a_device_that_is_not_there_is_told_once(gpu):
    assert native(gpu, need_of_a_device_that_is_not_there) == [
        "torchmem: need names cuda:7, and there is cuda:0"
    ]


@native.body
@expandable.body
def held_by_requests_in_flight():
    instrumented()
    guard = guarded(Headroom(need=1000 * MIB))
    weights = take(200 * MIB)
    held = [(take(8 * MIB), take(8 * MIB)) for _ in range(90)]
    held = [kept for kept, _ in held]
    guard.tick()
    assert guard.state is State.DRAINING
    held.clear()
    guard.tick()
    guard._clearing.join()
    del weights
    return {"state": guard.state.value, **won(guard)}


@pytest.mark.parametrize("mode", [native, expandable], ids=["native", "expandable"])
def test_headroom_comes_back_with_the_end_of_what_held_it_and_clearing_wins_none(gpu, mode):
    told = mode(gpu, held_by_requests_in_flight)
    assert told["state"] == "serving"
    assert told["drain"]["headroom"] > 500
    assert told["drain"]["released"] == 0
    assert abs(told["clear"]["headroom"]) <= 20
    assert told["clear"]["released"] > 1000


@native.body
def trapped_for_good():
    instrumented()
    reasons: list[str] = []
    guard = guarded(Headroom(need=1000 * MIB), on_restart=reasons.append)
    held = [(take(8 * MIB), take(8 * MIB)) for _ in range(90)]
    held = [kept for kept, _ in held]
    state = cycle(guard)
    return {"state": state, "reasons": reasons, "alive": guard.alive(), **won(guard), "held": len(held)}


def test_what_is_trapped_stays_so_and_a_restart_is_wanted(gpu):
    told = native(gpu, trapped_for_good)
    assert told["state"] == "restart_wanted"
    assert not told["alive"]
    assert len(told["reasons"]) == 1
    assert told["reasons"][0].endswith("is below the need of 1000 MiB")
    assert told["clear"] == {"headroom": 0, "released": 0}


@native.body
def the_need_is_what_requests_took():
    instrumented()
    guard = guarded(Headroom())
    take(MIB)
    guard.tick()
    nobody_asked = guard._figures.needs
    with track("large"):
        take(700 * MIB)
    import torch

    torch.cuda.empty_cache()
    guard.tick()
    enough = guard.state
    kept = take(1500 * MIB)
    end = time.monotonic() + 30
    while guard.state is State.SERVING and time.monotonic() < end:  # until a snapshot is within its budget
        guard.tick()
        time.sleep(0.05)
    short = guard.state
    reason = guard._machine.reason
    del kept
    return [nobody_asked, enough.value, short.value, reason, guard._figures.needs]


def test_the_need_is_the_largest_growth_of_a_measured_request(gpu):
    nobody_asked, enough, short, reason, needs = native(gpu, the_need_is_what_requests_took)
    assert nobody_asked in (None, {})
    assert needs == {"cuda:0": 700 * MIB}
    assert (enough, short) == ("serving", "draining")
    assert "is below the need of 700 MiB" in reason


@native.body
def not_instrumented():
    guard = guarded(Slack())
    weights = take(400 * MIB)
    cache(800)
    state = cycle(guard)
    del weights
    return {"state": state, **won(guard)}


def test_it_needs_no_instrumentor(gpu):
    told = native(gpu, not_instrumented)
    assert told["state"] == "serving"
    assert told["clear"]["released"] == 800


@native.body
def some_excluded():
    exported = Exported()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider, excluded_metrics=["torch.memory.guard.h*"]
    )
    guard = guarded(meter_provider=exported.provider)
    take(MIB)
    names = sorted(name for name in exported.collect().names if "guard" in name)
    return [names, guard.state.value]


def test_its_metrics_can_be_excluded_like_all_others(gpu):
    names, _ = native(gpu, some_excluded)
    assert names == [
        f"torch.memory.guard.{name}"
        for name in ("duration", "in_flight", "released", "status", "transitions")
    ]


@native.body
def before_cuda_is_initialised():
    import torch

    guard = guarded(Headroom(need=MIB))
    guard.tick()
    return [guard.state.value, torch.cuda.is_initialized()]


def test_it_does_not_initialise_cuda(gpu):
    assert native(gpu, before_cuda_is_initialised) == ["serving", False]


# what it waits for


@native.body
def work_that_outlived_its_request():
    exported = instrumented()
    guard = guarded()
    cache(200)
    release, entered = threading.Event(), threading.Event()

    def work() -> None:
        with track("outlives"):
            entered.set()
            release.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    guard.tick()
    for _ in range(3):
        guard.tick()
    meanwhile = [guard.state.value, guard._clearing is None]
    release.set()
    thread.join()
    guard.tick()
    guard._clearing.join()

    def stream():
        with track("given up"):
            yield 1
            yield 2

    given_up = stream()
    next(given_up)
    del given_up, exported
    guard.tick()
    guard.tick()
    guard._clearing.join()
    return [*meanwhile, guard.state.value]


def test_measured_calls_that_outlive_their_request_are_waited_for_and_given_up_streams_are_not(gpu):
    assert native(gpu, work_that_outlived_its_request) == ["draining", True, "serving"]


@native.body
def a_graph_is_captured():
    import torch

    instrumented()
    guard = guarded()
    take(MIB)
    cache(200)
    began, end = threading.Event(), threading.Event()
    outcome: list[Any] = []

    def capture() -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        source, target = take(MIB), take(MIB)
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                began.set()
                end.wait(30)
                target.copy_(source)
                graph.capture_end()
            graph.replay()
            outcome.append("captured")
        except Exception as error:
            outcome.append(repr(error))

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait(30)
    guard.tick()
    for _ in range(3):
        guard.tick()
    meanwhile = guard.state.value
    end.set()
    thread.join()
    guard.tick()
    guard._clearing.join()
    return [meanwhile, outcome, guard.state.value, won(guard)["clear"]["released"]]


def test_it_never_clears_while_a_graph_is_being_captured(gpu):
    meanwhile, outcome, state, released = native(gpu, a_graph_is_captured)
    assert meanwhile == "draining"
    assert outcome == ["captured"]
    assert (state, released >= 180) == ("serving", True)


# what waits for it


@native.body
def everything_at_once_while_it_clears():
    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem import rooms

    exported = instrumented()
    guard = guarded()
    with track("warm up"):
        take(MIB)
    exported.collect()
    cache(400)
    source = rooms.wired().sampler.source()
    reads: list[float] = []
    cleared: list[float] = []

    def counted(call: Any) -> Any:
        def read(*arguments: Any) -> Any:
            reads.append(time.monotonic())
            return call(*arguments)

        return read

    def timed() -> None:
        cleared.append(time.monotonic())
        torch.cuda.empty_cache()
        cleared.append(time.monotonic())

    source.read, source.snapshot, source.empty_cache = counted(source.read), counted(source.snapshot), timed
    ended = threading.Event()
    gaps: list[float] = []
    collections: list[float] = []
    tracked: list[float] = []
    captured: list[float] = []

    def beat() -> None:
        last = time.monotonic()
        while not ended.is_set():
            time.sleep(0.005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    def collect() -> None:
        while not ended.is_set():
            exported.collect()
            collections.append(time.monotonic())
            time.sleep(0.005)

    def request() -> None:
        with track("a stray one"):
            tracked.append(time.monotonic())

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            captured.append(time.monotonic())
            graph.capture_end()

    guard.tick()
    control.pause("cudaFree", 1, 1500)
    threads = [threading.Thread(target=each) for each in (beat, collect)]
    for thread in threads:
        thread.start()
    guard.tick()
    while not control.inside("cudaFree"):
        time.sleep(0.001)
    for each in (request, capture):
        threads.append(threading.Thread(target=each))
        threads[-1].start()
    guard._clearing.join()
    inside, out = cleared
    while not (tracked and captured):
        time.sleep(0.005)
    ended.set()
    for thread in threads:
        thread.join()
    exported.collect()  # on an idle machine the thread's own may not have come again
    return {
        "lasted": out - inside,
        "reads": sum(inside < at < out for at in reads),
        "read afterwards": any(at > out for at in reads),
        "collections": sum(inside < at < out for at in collections),
        "longest gap": max(gaps),
        "tracked": min(tracked) >= out,
        "captured": min(captured) >= out,
        "state": guard.state.value,
    }


def test_while_it_clears_nobody_reads_the_interpreter_goes_on_and_captures_and_stray_calls_wait(gpu):
    told = native(gpu, everything_at_once_while_it_clears)
    assert told["lasted"] > 1
    assert told["reads"] == 0
    assert told["read afterwards"]
    assert told["collections"] > 5, "they go on, without a reading"
    assert told["longest gap"] < told["lasted"] / 2
    assert told["tracked"]
    assert told["captured"]
    assert told["state"] == "serving"
