# SPDX-License-Identifier: Apache-2.0
"""What a request's span and metrics say, against the real allocator's own figures before and after."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading

import pytest
from exported import Exported, Traced

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

MIB = 1 << 20
OF_CALLS = {"torch.operation", "code.function.name"}
SCALARS = {
    "torch.memory.allocation.retries": "num_alloc_retries",
    "torch.memory.ooms": "num_ooms",
    "torch.memory.device.allocations": "num_device_alloc",
    "torch.memory.device.syncs": "num_sync_all_streams",
    "torch.memory.turnover": "allocated_bytes.all.allocated",
}


def instrumented(**options) -> tuple[Exported, Traced]:
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider, tracer_provider=traced.provider, **options
    )
    return exported, traced


def told(span) -> dict:
    """The span's attributes, as JSON carries them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in span.attributes.items()}


def exceptions(span) -> list:
    return [event for event in span.events if event.name == "exception"]


def statistics() -> list[dict]:
    import torch

    return [dict(torch.cuda.memory_stats(index)) for index in range(torch.cuda.device_count())]


def expected(before: list[dict], after: list[dict], without: tuple[str, ...] = ()) -> dict:
    """A span's figures as the public statistics before and after give them: sums over devices."""

    def grown(key: str) -> int:
        return sum(later[key] - earlier[key] for earlier, later in zip(before, after, strict=True))

    figures = {name: grown(key) for name, key in SCALARS.items()}
    for name in ("reserved", "allocated"):
        figures[f"torch.memory.{name}.before"] = sum(each[f"{name}_bytes.all.current"] for each in before)
        figures[f"torch.memory.{name}.delta"] = grown(f"{name}_bytes.all.current")
    if growth := grown("allocated_bytes.all.peak"):
        figures["torch.memory.peak_growth"] = growth
    figures["torch.memory.fragmentation"] = sum(
        each["inactive_split_bytes.all.current"] for each in after
    ) / sum(each["reserved_bytes.all.current"] for each in after)
    return {name: figure for name, figure in figures.items() if name not in without}


def histogram(exported: Exported, name: str) -> list:
    """`[[attributes, count, sum], ...]`"""
    return [[dict(point.attributes), point.count, point.sum] for point in exported.points(name)]


# ---- one device


def three_segments_and_a_retry() -> dict:
    import torch
    from emulator import control

    exported, traced = instrumented()
    weights = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")

    @track("paint")
    def request(image):
        control.fail("cudaMalloc", 2)
        kept = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
        return kept[:1]

    image = torch.empty((1, 2048), dtype=torch.int64)
    before = statistics()
    kept = request(image)
    after = statistics()
    exported.collect()
    (span,) = traced.spans
    return {
        "told": told(span),
        "name": span.name,
        "kind": span.kind.name,
        "status": span.status.status_code.name,
        "before": before,
        "after": after,
        "growth": histogram(exported, "torch.memory.request.reserved_growth"),
        "peak": histogram(exported, "torch.memory.request.peak_growth"),
        "duration": histogram(exported, "torch.memory.request.duration"),
        "seconds": (span.end_time - span.start_time) / 1e9,
        "retries": exported.all("torch.memory.request.retries"),
        "active": exported.all("torch.memory.requests.active"),
        "alive": len(weights) + len(kept),
    }


@pytest.mark.needs_emulation
def test_three_segments_one_retry_and_a_new_peak_are_on_the_span_exactly(gpu):
    got = gpu.run(three_segments_and_a_retry, memory="1GiB")
    told = got["told"]
    labels = {key: told.pop(key) for key in OF_CALLS}
    assert labels["torch.operation"] == "paint"
    assert labels["code.function.name"].endswith("three_segments_and_a_retry.<locals>.request")
    assert told.pop("torch.input.shapes") == ["1x2048"]
    assert told.pop("torch.input.dtypes") == ["int64"]
    assert told.pop("torch.device") == "cuda:0"
    assert (told.pop("torch.memory.exclusive"), told.pop("torch.memory.requests.concurrent")) == (True, 1)
    assert told == expected(got["before"], got["after"])
    assert told == told | {
        "torch.memory.reserved.before": 50 * MIB,
        "torch.memory.reserved.delta": 3 * 30 * MIB,
        "torch.memory.allocated.delta": 30 * MIB,
        "torch.memory.peak_growth": 3 * 30 * MIB,
        "torch.memory.allocation.retries": 1,
        "torch.memory.device.allocations": 3,
        "torch.memory.ooms": 0,
        "torch.memory.turnover": 90 * MIB,
        "torch.memory.fragmentation": 0.0,
    }
    assert (got["name"], got["kind"], got["status"]) == ("paint request", "INTERNAL", "UNSET")
    alone = labels | {"torch.memory.exclusive": True}
    assert got["growth"] == got["peak"] == [[alone, 1, 90 * MIB]]
    ((of_duration, count, seconds),) = got["duration"]
    assert (of_duration, count) == (alone, 1)
    assert seconds == pytest.approx(got["seconds"], abs=0.05)
    assert got["retries"] == [[labels, 1]]
    assert got["active"] == [[labels, 0]]


def a_flush_of_the_cache() -> dict:
    """The device is full of cache: the allocator gives it back to serve the request."""
    import torch

    _, traced = instrumented()
    weights = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(14)]
    del weights[::2]
    cache = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    del cache

    @track("paint")
    def request():
        return torch.empty(120 * MIB, dtype=torch.uint8, device="cuda")

    before = statistics()
    image = request()
    after = statistics()
    return {
        "told": told(traced.spans[0]),
        "before": before,
        "after": after,
        "alive": len(weights) + len(image),
    }


@pytest.mark.needs_emulation
@pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])
def test_a_real_retry_that_flushes_the_cache(gpu, expandable):
    conf = "expandable_segments:True" if expandable else None
    got = gpu.run(a_flush_of_the_cache, memory="200MiB", alloc_conf=conf)
    absent = ("torch.memory.fragmentation",) if expandable else ()
    figures = expected(got["before"], got["after"], without=absent)
    assert figures["torch.memory.allocation.retries"] == (0 if expandable else 1)
    assert figures["torch.memory.reserved.delta"] != 0
    told = {key: value for key, value in got["told"].items() if key not in OF_CALLS}
    assert told == figures | {
        "torch.device": "cuda:0",
        "torch.memory.exclusive": True,
        "torch.memory.requests.concurrent": 1,
    }
    if not expandable:
        assert told["torch.memory.fragmentation"] > 0


def out_of_memory() -> dict:
    import torch

    exported, traced = instrumented()
    raised: list[BaseException] = []

    class Engine:
        @track("generate")
        def generate(self, size):
            try:
                torch.empty(size, dtype=torch.uint8, device="cuda")
            except BaseException as error:
                raised.append(error)
                raise

    warm = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    before = statistics()
    try:
        Engine().generate(10 << 30)
    except torch.cuda.OutOfMemoryError as error:
        same = error is raised[0]
        frames = []
        step = error.__traceback__
        while step is not None:
            frames.append(step.tb_frame.f_code.co_name)
            step = step.tb_next
    after = statistics()
    Engine().generate(MIB)
    exported.collect()
    failed, fine = traced.spans
    return {
        "same": same,
        "type": type(raised[0]).__name__,
        "module": type(raised[0]).__module__,
        "frames": frames,
        "name": failed.name,
        "told": told(failed),
        "figures": expected(before, after),
        "status": [
            failed.status.status_code.name,
            failed.status.description[:40],
            fine.status.status_code.name,
        ],
        "events": [event.attributes["exception.type"] for event in exceptions(failed)],
        "message": exceptions(failed)[0].attributes["exception.message"] == str(raised[0]),
        "durations": histogram(exported, "torch.memory.request.duration"),
        "alive": len(warm),
    }


@pytest.mark.needs_emulation
def test_an_out_of_memory_error_is_told_once_and_travels_on_as_it_is(gpu):
    got = gpu.run(out_of_memory, memory="1GiB")
    assert got["same"] is True
    assert got["frames"][-1] == "generate"
    assert got["name"] == "generate Engine"
    assert got["told"]["error.type"] == got["type"] == "OutOfMemoryError"
    assert got["told"]["torch.memory.ooms"] == got["figures"]["torch.memory.ooms"] == 1
    assert got["told"]["torch.memory.allocation.retries"] == 1
    assert got["status"][0] == "ERROR"
    assert got["status"][1].startswith("OutOfMemoryError: CUDA out of memory")
    assert got["status"][2] == "UNSET"
    assert got["events"] == [f"{got['module']}.OutOfMemoryError"]
    assert got["message"] is True
    counts = {attributes.get("error.type"): count for attributes, count, _ in got["durations"]}
    assert counts == {"OutOfMemoryError": 1, None: 1}


# ---- several devices


def on_two_devices() -> list:
    import torch

    _, traced = instrumented()
    warm = [torch.empty(10 * MIB, dtype=torch.uint8, device=index) for index in (0, 1)]

    @track("shard")
    def request(*sizes):
        return [torch.empty(size * MIB, dtype=torch.uint8, device=f"cuda:{device}") for device, size in sizes]

    kept, figures = [], []
    for sizes in ([(0, 30), (0, 30), (1, 20)], [(1, 50)], [(0, 40), (1, 40)], []):
        before = statistics()
        kept += request(*sizes)
        figures.append([before, statistics()])
    return [[told(span) for span in traced.spans], figures, len(warm) + len(kept)]


@pytest.mark.needs_emulation
@pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])
def test_several_devices_are_sums_and_pairs_where_they_differ(gpu, expandable):
    conf = "expandable_segments:True" if expandable else None
    spans, figures, _ = gpu.run(on_two_devices, memory="1GiB", devices=2, alloc_conf=conf)
    absent = ("torch.memory.fragmentation",) if expandable else ()
    both, second, alike, neither = spans
    for span, (before, after) in zip(spans, figures, strict=True):
        touched = [1] if span is second else [0, 1]
        sums = expected([before[i] for i in touched], [after[i] for i in touched], without=absent)
        assert span == span | sums
        assert span["torch.memory.exclusive"] is True
    assert [span["torch.device"] for span in spans] == [
        "cuda:0,cuda:1",
        "cuda:1",
        "cuda:0,cuda:1",
        "cuda:0,cuda:1",
    ]
    before, after = figures[0]
    grown = [later["reserved_bytes.all.current"] - earlier["reserved_bytes.all.current"]
             for earlier, later in zip(before, after, strict=True)]  # fmt: skip
    assert both["torch.memory.reserved.delta_by_device"] == [f"cuda:{i}={grown[i]}" for i in (0, 1)]
    assert both["torch.memory.allocated.delta_by_device"] == [f"cuda:0={60 * MIB}", f"cuda:1={20 * MIB}"]
    if not expandable:
        assert grown == [60 * MIB, 20 * MIB]
    for span in (second, alike, neither):
        assert not [key for key in span if key.endswith("_by_device")]
    assert second["torch.memory.allocated.delta"] == 50 * MIB
    assert alike["torch.memory.allocated.delta"] == 80 * MIB
    assert neither["torch.memory.turnover"] == neither["torch.memory.reserved.delta"] == 0


def a_device_first_used_later() -> list:
    import torch

    _, traced = instrumented()
    torch.cuda.init()

    @track("load")
    def request(device):
        return torch.empty(30 * MIB, dtype=torch.uint8, device=device)

    kept = [request(0), request(0), request(1), request(1)]
    return [[told(span) for span in traced.spans], len(kept)]


@pytest.mark.needs_emulation
def test_the_call_that_first_uses_a_device_tells_all_that_happened_on_it(gpu):
    spans, _ = gpu.run(a_device_first_used_later, memory="1GiB", devices=2)
    for span, device, before in zip(
        spans, ("cuda:0", "cuda:0", "cuda:1", "cuda:1"), (0, 30, 0, 30), strict=True
    ):
        told = [span[key] for key in (
            "torch.device", "torch.memory.exclusive", "torch.memory.reserved.before",
            "torch.memory.reserved.delta", "torch.memory.allocated.delta", "torch.memory.device.allocations",
            "torch.memory.peak_growth",
        )]  # fmt: skip
        assert told == [device, True, before * MIB, 30 * MIB, 30 * MIB, 1, 30 * MIB]


def freed_and_refused_on_devices() -> list:
    import torch

    _, traced = instrumented()

    def take(device, mib):
        return torch.empty(mib * MIB, dtype=torch.uint8, device=device)

    held = {device: take(device, 100) for device in range(3)}
    figures = []

    @track("work")
    def request(frees, takes=None, too_much=None):
        for device in frees:
            del held[device]
        if takes is not None:
            held[takes] = take(takes, 50)
        if too_much is not None:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                take(too_much, 4096)

    for call in ([[1]], [[0], 1], [[], 0, 2], [[]]):
        before = statistics()
        request(*call)
        figures.append([before, statistics()])
    return [[told(span) for span in traced.spans], figures]


@pytest.mark.needs_emulation
def test_a_device_that_was_only_freed_on_or_refused_is_in_the_sums(gpu):
    spans, figures = gpu.run(freed_and_refused_on_devices, memory="1GiB", devices=3)
    devices = [[1], [0, 1], [0, 2], [0, 1, 2]]
    for span, touched, (before, after) in zip(spans, devices, figures, strict=True):
        assert span["torch.device"] == ",".join(f"cuda:{index}" for index in touched)
        sums = expected([before[index] for index in touched], [after[index] for index in touched])
        assert span == span | sums
    assert [span["torch.memory.allocated.delta"] for span in spans] == [-100 * MIB, -50 * MIB, 50 * MIB, 0]
    assert spans[1]["torch.memory.allocated.delta_by_device"] == [
        f"cuda:0={-100 * MIB}",
        f"cuda:1={50 * MIB}",
    ]
    assert [span["torch.memory.ooms"] for span in spans] == [0, 0, 1, 0]


def used_beside_and_before() -> list:
    import torch

    _, traced = instrumented()

    def take(device):
        return torch.empty(30 * MIB, dtype=torch.uint8, device=device)

    with track("cold"):  # it initialises CUDA
        kept = [take(0)]
    with track("warm"):
        pass
    kept.append(take(1))  # by nobody's call, and within the second that devices are looked for once
    with track("after"):
        kept.append(take(1))
    return [[told(span) for span in traced.spans], len(kept)]


@pytest.mark.needs_emulation
def test_a_call_that_initialises_cuda_tells_all_and_one_after_another_use_its_own_alone(gpu):
    spans, _ = gpu.run(used_beside_and_before, memory="1GiB", devices=2)
    figures = [
        (span["torch.device"], span["torch.memory.reserved.before"], span["torch.memory.reserved.delta"])
        for span in spans
    ]
    assert figures == [
        ("cuda:0", 0, 30 * MIB), ("cuda:0", 30 * MIB, 0), ("cuda:1", 30 * MIB, 30 * MIB),
    ]  # fmt: skip


# ---- what cannot be known is absent


def resets_by_the_user() -> dict:
    import torch

    exported, traced = instrumented()
    weights = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    high = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    del high
    torch.cuda.empty_cache()

    @track("peaks")
    def of_the_peaks():
        torch.cuda.reset_peak_memory_stats()
        torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")

    @track("counters")
    def of_the_counters():
        torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.reset_accumulated_memory_stats()
        return torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")

    @track("after")
    def after():
        return torch.empty(70 * MIB, dtype=torch.uint8, device="cuda")

    of_the_peaks()
    kept = [of_the_counters(), after()]
    exported.collect()
    return {
        **{span.attributes["torch.operation"]: told(span) for span in traced.spans},
        "peaks recorded": [
            attributes["torch.operation"]
            for attributes, *_ in histogram(exported, "torch.memory.request.peak_growth")
        ],
        "retries": [value for _, value in exported.all("torch.memory.request.retries")],
        "alive": len(weights) + len(kept),
    }


@pytest.mark.needs_emulation
def test_the_users_own_resets_leave_figures_out_and_never_make_them_wrong(gpu):
    got = gpu.run(resets_by_the_user, memory="1GiB")
    peaks, counters, after = got["peaks"], got["counters"], got["after"]
    counted = set(SCALARS)
    assert "torch.memory.peak_growth" not in peaks
    assert counted <= set(peaks)  # the counters go on
    assert peaks["torch.memory.reserved.delta"] == 90 * MIB
    assert not counted & set(counters)
    assert counters["torch.memory.reserved.delta"] == 0  # from the cache
    assert counters["torch.memory.allocated.delta"] == 30 * MIB
    assert after["torch.memory.turnover"] == 70 * MIB
    assert after["torch.memory.allocated.delta"] == 70 * MIB
    assert got["peaks recorded"] == ["counters", "after"]
    assert got["retries"] == [0, 0, 0]


def resets_of_the_peak_in_between() -> dict:
    import torch

    own = torch._C._cuda_resetPeakMemoryStats
    exported, traced = instrumented()

    def take(mib):
        return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    weights = take(100)

    def high_reset_then(more):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        take(300)
        torch.cuda.reset_peak_memory_stats()
        if more:
            take(more)

    high = take(1)
    for more in (200, 10, 0):
        torch.cuda.reset_peak_memory_stats()
        with track(f"reset, then {more} MiB"):
            high_reset_then(more)
    torch.cuda.reset_peak_memory_stats()
    with track("none"):
        take(5)
    exported.collect()
    TorchMemInstrumentor().uninstrument()
    return {
        "grown": {span.name: span.attributes.get("torch.memory.peak_growth") for span in traced.spans},
        "recorded": [
            attributes["torch.operation"]
            for attributes, *_ in histogram(exported, "torch.memory.request.peak_growth")
        ],
        "left": torch._C._cuda_resetPeakMemoryStats is not own,
        "alive": len(weights) + len(high),
    }


@pytest.mark.needs_emulation
def test_a_peak_that_the_user_reset_is_left_out_also_where_the_new_one_is_as_high(gpu):
    got = gpu.run(resets_of_the_peak_in_between, memory="1GiB")
    assert got["grown"] == {
        "reset, then 200 MiB": None,
        "reset, then 10 MiB": None,
        "reset, then 0 MiB": None,
        "none": 5 * MIB,
    }
    assert got["recorded"] == ["none"]
    assert got["left"] is False


def with_a_backend(library: str | None = None) -> dict:
    import torch

    if library is not None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
        torch.cuda.memory.change_current_allocator(allocator)
    exported, traced = instrumented()
    if torch.cuda.is_available():
        weights = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")

    @track("paint")
    def request(image):
        on = (
            image
            if not torch.cuda.is_available()
            else torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        )
        return on, weights if torch.cuda.is_available() else None

    kept = request(torch.empty(3, 4))
    exported.collect()
    (span,) = traced.spans
    return {
        "told": told(span),
        "growth": histogram(exported, "torch.memory.request.reserved_growth"),
        "durations": [
            [labels, count] for labels, count, _ in histogram(exported, "torch.memory.request.duration")
        ],
        "retries": [value for _, value in exported.all("torch.memory.request.retries")],
        "alive": len(kept),
    }


ALWAYS = OF_CALLS | {"torch.input.shapes", "torch.input.dtypes"}
OVERLAP = {"torch.device", "torch.memory.exclusive", "torch.memory.requests.concurrent"}


@pytest.mark.needs_emulation
def test_cuda_malloc_async_tells_what_it_keeps_and_no_zeros(gpu):
    got = gpu.run(with_a_backend, memory="1GiB", alloc_conf="backend:cudaMallocAsync")
    told = got["told"]
    assert set(told) == ALWAYS | OVERLAP | {
        "torch.memory.reserved.before", "torch.memory.reserved.delta",
        "torch.memory.allocated.before", "torch.memory.allocated.delta", "torch.memory.peak_growth",
    }  # fmt: skip
    assert told["torch.memory.allocated.before"] == 50 * MIB
    assert told["torch.memory.allocated.delta"] == told["torch.memory.peak_growth"] == 30 * MIB
    assert [count for _, count, _ in got["growth"]] == [1]


@pytest.mark.needs_emulation
@pytest.mark.parametrize("backend", ["pluggable", "uncached"])
def test_a_backend_that_tells_nothing_leaves_the_call_alone_on_the_span(gpu, pluggable, backend):
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if backend == "uncached" else None
    got = gpu.run(
        with_a_backend, args=[pluggable if backend == "pluggable" else None], memory="1GiB", env=env
    )
    assert set(got["told"]) == ALWAYS | OVERLAP
    assert got["growth"] == []
    assert [count for _, count in got["durations"]] == [1]


def test_without_a_gpu_a_span_has_no_device_attributes(gpu):
    no_driver = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None, "CUDA_VISIBLE_DEVICES": ""}
    got = gpu.run(with_a_backend, env=no_driver)
    assert set(got["told"]) == ALWAYS
    assert got["growth"] == []
    ((labels, count),) = got["durations"]
    assert (set(labels), count) == (OF_CALLS, 1)
    assert got["retries"] == [0]


# ---- under somebody else's span


def enriched() -> dict:
    import torch

    exported, traced = instrumented(span="enrich")
    weights = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    tracer = traced.provider.get_tracer("user")

    @track("step")
    def step(size):
        return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")

    kept = []
    with tracer.start_as_current_span("POST /generate"):
        before = statistics()
        for size in (30, 40, 20):
            kept.append(step(size))
            unmeasured = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            kept.append(unmeasured)
    kept.append(step(10))  # no span to enrich
    with tracer.start_as_current_span("failing"), contextlib.suppress(torch.cuda.OutOfMemoryError):
        step(1 << 20)
    exported.collect()
    return {
        "spans": [
            [span.name, told(span), span.status.status_code.name, len(exceptions(span))]
            for span in traced.spans
        ],
        "reserved": before[0]["reserved_bytes.all.current"],
        "durations": sum(count for _, count, _ in histogram(exported, "torch.memory.request.duration")),
        "alive": len(weights) + len(kept),
    }


@pytest.mark.needs_emulation
def test_calls_under_an_enriched_span_add_up_on_it(gpu):
    got = gpu.run(enriched, memory="1GiB")
    (name, told, status, events), (_, failed, failed_status, failed_events) = got["spans"]
    assert (name, status, events) == ("POST /generate", "UNSET", 0)
    assert told == told | {
        "torch.memory.reserved.before": got["reserved"],
        "torch.memory.reserved.delta": 90 * MIB,  # what happened between the calls is not theirs
        "torch.memory.allocated.delta": 90 * MIB,
        "torch.memory.turnover": 90 * MIB,
        "torch.memory.device.allocations": 3,
        "torch.memory.requests.concurrent": 1,
        "torch.memory.exclusive": True,
    }
    assert failed["torch.memory.ooms"] == 1
    assert (failed_status, failed_events) == ("UNSET", 0)  # its owner saw nothing fail
    assert got["durations"] == 5


def enriched_by_many() -> dict:
    """One span, and under it calls on several threads: none may be lost, nothing stale may stay."""
    import contextvars

    import torch

    _, traced = instrumented(span="enrich")
    weights = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    tracer = traced.provider.get_tracer("user")

    @track("step")
    def step(size, meet=None):
        made = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        if meet is not None:
            meet.wait()
        return made

    kept = []
    with tracer.start_as_current_span("alone, then together"):
        kept.append(step(30))
        meet = threading.Barrier(2)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(lambda: kept.append(step(20, meet)),)
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with tracer.start_as_current_span("a reset in the second call"):
        step(1)
        with track("reset"):
            step(1)
            torch.cuda.reset_accumulated_memory_stats()
    with tracer.start_as_current_span("many"):
        before = statistics()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(lambda: [step(1) for _ in range(200)],)
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {
        "spans": {span.name: told(span) for span in traced.spans},
        "handed out": expected(before, statistics())["torch.memory.turnover"],
        "alive": len(weights) + len(kept),
    }


@pytest.mark.needs_emulation
def test_an_enriched_span_keeps_no_figure_that_a_later_call_made_unknown(gpu):
    got = gpu.run(enriched_by_many, memory="1GiB")
    together = got["spans"]["alone, then together"]
    assert together["torch.memory.exclusive"] is False
    assert together["torch.memory.requests.concurrent"] == 2
    assert not {"torch.memory.allocated.delta", "torch.memory.peak_growth"} & set(together)
    assert not set(SCALARS) & set(got["spans"]["a reset in the second call"])
    # each of those that overlap saw what the others did too: together they count it once
    assert got["spans"]["many"]["torch.memory.turnover"] == got["handed out"] == 800 * MIB


# ---- a step of an instrumentation's life: it ends with requests in flight


def ended_in_flight() -> dict:
    import asyncio

    import torch

    class Engine:
        def generate(self, go, in_it):
            in_it.set()
            go.wait(20)
            return torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")

        def stream(self):
            for _ in range(3):
                yield torch.empty(MIB, dtype=torch.uint8, device="cuda")

        async def astream(self):
            for _ in range(3):
                yield torch.empty(MIB, dtype=torch.uint8, device="cuda")

        @staticmethod
        def helper():
            return 1

    class Turbo(Engine):
        def generate(self, go, in_it):
            return super().generate(go, in_it)

    import sys

    module = type(sys)("engine_in_flight")
    for cls in (Engine, Turbo):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    sys.modules[module.__name__] = module
    untouched = {cls: dict(vars(cls)) for cls in (Engine, Turbo)}
    targets = [f"{module.__name__}:Engine.{name}" for name in ("generate", "stream", "astream", "helper")]
    exported, traced = instrumented(targets=targets)
    wiring = TorchMemInstrumentor()._instrumented._wiring
    windows = wiring._requests.windows
    threads_before = set(threading.enumerate())
    kept = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    engine, turbo = Engine(), Turbo()
    loop = asyncio.new_event_loop()

    go, results = threading.Event(), []
    in_it = [threading.Event(), threading.Event()]
    workers = [
        threading.Thread(target=lambda i=i, each=each: results.append(each.generate(go, in_it[i]).numel()))
        for i, each in enumerate((engine, turbo))
    ]
    for worker in workers:
        worker.start()
    for event in in_it:
        assert event.wait(20)
    names = ("exhausted", "closed", "dropped")
    streams = {name: engine.stream() for name in names}
    astreams = {name: engine.astream() for name in names}
    for name in names:
        next(streams[name])
        loop.run_until_complete(anext(astreams[name]))
    exported.collect()
    active = {
        attributes["code.function.name"].rpartition(".")[2]: value
        for attributes, value in exported.all("torch.memory.requests.active")
    }
    request_metrics = {name for name in exported.names if ".request" in name}

    TorchMemInstrumentor().uninstrument()
    left = [
        f"{cls.__name__}.{name}"
        for cls in (Engine, Turbo)
        for name in {**vars(cls), **untouched[cls]}
        if vars(cls).get(name) is not untouched[cls].get(name)
    ]
    at_once = sorted(name for name in exported.collect().names if name.startswith("torch."))
    ended_at_once = len(traced.spans)

    go.set()
    for worker in workers:
        worker.join()
    items = [len(list(streams["exhausted"]))]

    async def rest(stream):
        return len([item async for item in stream])

    items.append(loop.run_until_complete(rest(astreams["exhausted"])))
    streams["closed"].close()
    loop.run_until_complete(astreams["closed"].aclose())
    del streams, astreams
    gc.collect()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    deadline = threading.Event()
    for _ in range(200):
        if len(traced.spans) == 8:
            break
        deadline.wait(0.05)
    for _ in range(200):
        if set(threading.enumerate()) <= threads_before:
            break
        deadline.wait(0.05)
    later = sorted(name for name in exported.collect().names if name.startswith("torch."))
    engine.generate(go, in_it[0])  # nobody measures it
    return {
        "active": active,
        "request metrics": sorted(request_metrics),
        "left": left,
        "hidden": [
            f"{cls.__name__}.{name}"
            for cls in (Engine, Turbo)
            for name, value in vars(cls).items()
            if "torchmem" in name or hasattr(value, "__torchmem__")
        ],
        "at once": at_once,
        "ended at once": ended_at_once,
        "results": results,
        "items": items,
        "later": later,
        "spans": sorted(span.name for span in traced.spans),
        "figures": [span.attributes.get("torch.memory.reserved.before") is not None for span in traced.spans],
        "open": [windows.count, len(windows.all_open())],
        "threads": [thread.name for thread in set(threading.enumerate()) - threads_before],
        "alive": kept.numel(),
    }


def test_uninstrument_with_requests_in_flight_lets_them_end_and_leaves_nothing(gpu):
    got = gpu.run(ended_in_flight, memory="1GiB", timeout=120)
    assert got["active"] == {"generate": 2, "stream": 3, "astream": 3, "helper": 0}
    assert "torch.memory.request.retries" in got["request metrics"]
    assert got["left"] == got["hidden"] == []
    assert got["at once"] == got["later"] == []
    assert got["ended at once"] == 0
    assert got["results"] == [30 * MIB, 30 * MIB]
    assert got["items"] == [2, 2]
    assert got["spans"] == [
        *["astream Engine"] * 3,
        "generate Engine",
        "generate Turbo",
        *["stream Engine"] * 3,
    ]
    assert got["figures"] == [True] * 8
    assert got["open"] == [0, 0]
    assert got["threads"] == []


def points_after_the_end() -> dict:
    """A request that ends between the last look of `uninstrument` and its own records brings nothing back."""
    import torch

    exported, traced = instrumented()
    kept = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    stop = threading.Event()
    calls = 0

    @track("busy")
    def request():
        return torch.empty(MIB, dtype=torch.uint8, device="cuda")

    def work() -> None:
        nonlocal calls
        while not stop.is_set():
            request()
            calls += 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    came_back = []
    for _ in range(40):
        stop.wait(0.01)
        TorchMemInstrumentor().uninstrument()
        stop.wait(0.005)
        came_back += [name for name in exported.collect().names if name.startswith("torch.")]
        TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    stop.set()
    for thread in threads:
        thread.join()
    request()
    exported.collect()
    return {
        "came back": came_back,
        "calls": calls,
        "spans": len(traced.spans),
        "names": sorted(name for name in exported.names if ".request" in name),
        "alive": kept.numel(),
    }


def test_no_point_comes_back_from_requests_that_end_beside_uninstrument(gpu):
    got = gpu.run(points_after_the_end, memory="1GiB", timeout=120)
    assert got["came back"] == []
    assert 100 < got["spans"] <= got["calls"] + 1
    assert "torch.memory.request.duration" in got["names"]


# ---- counters from the first collection


def counters_of_each_target() -> dict:
    import sys

    import torch

    module = type(sys)("engine_of_counters")

    class Engine:
        def generate(self): ...
        def encode(self): ...

    Engine.__module__, Engine.__qualname__ = module.__name__, "Engine"
    module.Engine = Engine
    sys.modules[module.__name__] = module

    @track("rerank")
    def decorated(): ...

    names = [f"{module.__name__}:Engine.generate", f"{module.__name__}:Engine.encode"]
    exported, _ = instrumented(targets=names)
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    exported.collect()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    return {
        "first": exported.all("torch.memory.request.retries"),
        "active": exported.all("torch.memory.requests.active"),
        "again": exported.collect().all("torch.memory.request.retries"),
        "said": said,
        "kept": kept.numel(),
    }


def test_the_request_counters_of_each_wrapped_target_are_zero_from_the_first_collection(gpu):
    got = gpu.run(counters_of_each_target)
    assert [value for _, value in got["first"]] == [0, 0, 0]
    assert sorted(labels["torch.operation"] for labels, _ in got["first"]) == ["encode", "generate", "rerank"]
    assert got["first"] == got["again"]
    assert sorted(map(str, got["active"])) == sorted(map(str, got["first"]))
    assert got["said"] == []
