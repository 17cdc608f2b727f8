# SPDX-License-Identifier: Apache-2.0
"""Out of memory errors of the real allocator: each verdict, the evidence, and what stays the user's."""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import time
from collections import Counter

import pytest
from exported import Exported, Logged, Traced
from together import in_a_copy
from watched import Clock

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, oom, wiring
from opentelemetry_instrumentation_torchmem.requests.track import track

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
EVENT = "torch.memory.oom.evidence"
VERDICTS = "torch.memory.oom.verdicts"


class Watched:
    """Instrumented, with what the SDK received in memory."""

    def __init__(self, **options) -> None:
        self.exported = Exported()
        self.traced = Traced()
        self.logged = Logged()
        self.instrument(**options)

    def instrument(self, **options) -> None:
        TorchMemInstrumentor().instrument(
            meter_provider=self.exported.provider,
            tracer_provider=self.traced.provider,
            logger_provider=self.logged.provider,
            **options,
        )

    @property
    def events(self) -> list[dict]:
        """Of the spans that have ended."""
        spans = self.traced.spans
        return [told(event.attributes) for span in spans for event in span.events if event.name == EVENT]

    @property
    def records(self) -> list:
        return self.logged.records

    @property
    def verdicts(self) -> dict[str, int]:
        """By the counter, those that are not 0."""
        points = self.exported.collect().all(VERDICTS)
        return {labels["torch.memory.oom.verdict"]: value for labels, value in points if value}


def told(attributes) -> dict:
    return {
        name.removeprefix("torch.memory.oom."): list(value) if isinstance(value, tuple) else value
        for name, value in attributes.items()
    }


def take(size, stream=None):
    import torch

    with torch.cuda.stream(stream):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def fail(size, stream=None) -> Exception:
    import torch

    try:
        take(size, stream)
    except torch.cuda.OutOfMemoryError as error:
        return error
    raise AssertionError("it fitted")


def verdict_of(watched: Watched, size: int, stream=None) -> dict:
    """The evidence of a request that fails; the event, the record and the counter agree."""
    with track("answer"):
        fail(size, stream)
    (event,) = watched.events
    (record,) = watched.records
    assert told(record.attributes) == event
    assert record.body == event["summary"]
    assert watched.verdicts == {event["verdict"]: 1}
    return event


# ---- each verdict ----


def over_the_fraction() -> dict:
    import torch

    watched = Watched()
    torch.cuda.set_per_process_memory_fraction(0.5)
    kept = take(400 * MIB)
    event = verdict_of(watched, 200 * MIB)
    return event | {"kept": kept.numel()}


def with_pending_frees(read_before: bool) -> dict:
    import torch
    from emulator import control

    watched = Watched()
    side = torch.cuda.Stream()
    filler = take(1004 * MIB)
    beside, freed = take(8 * MIB), take(12 * MIB)  # one segment of 20 MiB
    control.hold(side)

    def free_it():
        nonlocal freed
        with torch.cuda.stream(side):
            torch.cuda._sleep(1)
        freed.record_stream(side)
        freed = None

    if read_before:
        free_it()
    with track("answer"):
        if not read_before:
            free_it()
        fail(12 * MIB)
    (event,) = watched.events
    assert take(12 * MIB).numel() == 12 * MIB  # it fits now, as the verdict says
    return event | {"kept": filler.numel() + beside.numel()}


def beside_another_thread(body: str) -> dict:
    """Which might free something itself."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        return globals()[body](read_before=False)
    finally:
        ends.set()
        thread.join()


def a_block_that_was_there(how: str) -> dict:
    """64.5 MiB free, 66 asked of the driver, for 65.5."""
    import torch
    from emulator import control

    watched = Watched()
    side = torch.cuda.Stream()
    control.hold(side)

    def free_slowly(block) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(1)
        block.record_stream(side)

    waits = take(20 * MIB)
    kept = [take(880 * MIB), take(4096)]
    size = 65 * MIB + MIB // 2
    if how == "made within":
        with track("answer"):
            take(66 * MIB)
            kept.append(take(MIB + MIB // 2))
            fail(size)
        return watched.events[0]
    take(66 * MIB)
    kept.append(take(MIB + MIB // 2))
    if how == "a small one pending":
        free_slowly(kept.pop(1))
    if how == "another pending":
        free_slowly(waits)
        del waits
    with track("answer"):
        if how == "another pending":
            control.release()
            kept.append(take(20 * MIB))
        fail(size)
    return watched.events[0]


def a_block_of_the_same_page() -> dict:
    watched = Watched()
    kept = [take(1004 * MIB)]
    with track("answer"):
        kept += take(2 * MIB), take(15 * MIB)
        fail(5 * MIB)
    return watched.events[0]


def freed_by_another_thread(measured: bool) -> dict:
    """In a request of its own or in none, between the failure and our look at it."""
    import torch

    torch.cuda.init()
    holding, failed, freed, told = (threading.Event() for _ in range(4))

    def frees() -> None:
        with track("another") if measured else contextlib.nullcontext():
            kept = take(700 * MIB)
            holding.set()
            failed.wait(30)
            del kept
            freed.set()
            told.wait(30)

    def in_between(*_) -> None:
        failed.set()
        freed.wait(30)

    torch._C._cuda_attach_out_of_memory_observer(in_between)  # before ours
    watched = Watched()
    thread = threading.Thread(target=frees)
    thread.start()
    holding.wait(30)
    event = verdict_of(watched, 500 * MIB)
    told.set()
    thread.join()
    return event


def for_a_stream_that_it_names() -> dict:
    import torch

    watched = Watched()
    kept = [hole(), take(424 * MIB)]
    with track("answer"), contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.cuda.caching_allocator_alloc(300 * MIB, stream=torch.cuda.Stream())
    return watched.events[0] | {"kept": len(kept)}


def held_by_a_pool() -> dict:
    import torch

    watched = Watched()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        in_pool = [take(100 * MIB) for _ in range(6)]
    del in_pool
    kept = take(200 * MIB)
    event = verdict_of(watched, 300 * MIB)
    return event | {"kept": kept.numel(), "pool": str(pool.id)}


def held_by_a_graph() -> dict:
    import torch

    watched = Watched()
    kept = take(200 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            inside = [take(100 * MIB) for _ in range(6)]
            del inside
    event = verdict_of(watched, 300 * MIB)
    del graph
    return event | {"kept": kept.numel()}


def split(stream=None, segments: int = 20) -> list:
    """2 of each 20 MiB in use: 360 MiB free, no block larger than 18."""
    pairs = [(take(2 * MIB, stream), take(9 * MIB, stream), take(9 * MIB, stream)) for _ in range(segments)]
    return [first for first, *_ in pairs]


def hole(stream=None) -> list:
    """12 of 360 MiB in use."""
    whole = take(360 * MIB, stream)
    del whole
    return [take(12 * MIB, stream)]


def held_by_another_stream() -> dict:
    import torch

    watched = Watched()
    kept = hole(torch.cuda.Stream())
    filler = take(424 * MIB)
    event = verdict_of(watched, 300 * MIB)
    return event | {"kept": len(kept) + filler.numel()}


def fragmented_on_another_stream() -> dict:
    """No block there that would have served it either."""
    import torch

    watched = Watched()
    kept = split(torch.cuda.Stream())
    filler = take(424 * MIB)
    event = verdict_of(watched, 300 * MIB)
    return event | {"kept": len(kept) + filler.numel()}


def too_little_beside_a_large_neighbour() -> dict:
    from emulator import control

    control.external_malloc(0, 300 * MIB)
    watched = Watched()
    kept = take(200 * MIB)
    watched.exported.collect()
    event = verdict_of(watched, 600 * MIB)
    return event | {"kept": kept.numel()}


def inside_a_pool() -> dict:
    import torch

    watched = Watched()
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(other):
        take(50 * MIB)
    with torch.cuda.use_mem_pool(pool):
        blocks = [take(100 * MIB) for _ in range(6)]
        with torch.cuda.use_mem_pool(other), contextlib.suppress(ZeroDivisionError):
            raise ZeroDivisionError
        del blocks[1:]
        event = verdict_of(watched, 450 * MIB)
    assert "headroom" not in event  # it would be that of the default pool
    return event | {"pools": [str(pool.id), str(other.id)]}


def in_a_graph_that_shares_its_pool(size: int) -> dict:
    """The pool's owner is an earlier graph, and what it left free serves the later one."""
    import torch

    watched = Watched()
    shared, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=shared, stream=side):
        take(400 * MIB)
    kept = [take(300 * MIB)]
    with torch.cuda.graph(second, pool=shared, stream=side):
        kept.append(take(200 * MIB))
        with track("answer"):
            fail(size)
        held = torch.cuda.memory_reserved()
        kept.append(take(200 * MIB))
        assert torch.cuda.memory_reserved() == held
    (event,) = watched.events
    assert (event["own_free"], event["private_pools_free"]) == (200 * MIB, 0)
    return event | {"kept": len(kept)}


def inside_an_empty_pool() -> dict:
    """What keeps it from memory is another pool's."""
    import torch

    watched = Watched()
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(other):
        take(600 * MIB)
    with torch.cuda.use_mem_pool(pool):
        event = verdict_of(watched, 500 * MIB)
    return event | {"pools": [str(pool.id), str(other.id)]}


def an_observer_that_makes_room() -> dict:
    """The user's, before ours: what it gave back is nobody else's."""
    import torch

    torch.cuda.init()
    ballast = [take(300 * MIB)]

    def let_go(*_) -> None:
        ballast.clear()
        torch.cuda.empty_cache()

    torch._C._cuda_attach_out_of_memory_observer(let_go)
    watched = Watched()
    watched.exported.collect()
    kept = take(100 * MIB)
    event = verdict_of(watched, 950 * MIB)
    assert "external=0" in event["ledger"]
    assert (event["external_growth"], event["headroom"]) == (0, 924 * MIB)  # it has room now
    return event | {"kept": kept.numel()}


def while_the_driver_was_asked() -> dict:
    """Another thread gives memory back between a collection's reading and the driver's word."""
    import torch
    from emulator import control

    control.external_malloc(0, 300 * MIB)
    watched = Watched()
    kept = take(50 * MIB)
    watched.exported.collect()
    take(400 * MIB)
    control.pause("cudaMemGetInfo", 1, 600)

    def give_back() -> None:
        while not control.inside("cudaMemGetInfo"):
            time.sleep(0.005)
        torch.cuda.empty_cache()

    thread = threading.Thread(target=give_back)
    thread.start()
    told_then = watched.exported.collect().ledger()
    thread.join()
    assert told_then["external"] == 300 * MIB
    event = verdict_of(watched, 800 * MIB)
    assert f"external={300 * MIB}" in event["ledger"]
    return event | {"kept": kept.numel()}


def pending_elsewhere_during_a_capture() -> dict:
    """It is not for the graph, whatever becomes of it."""
    import torch
    from emulator import control

    watched = Watched()
    side = torch.cuda.Stream()
    freed, graph = take(700 * MIB), torch.cuda.CUDAGraph()
    control.hold(side)
    freed.record_stream(side)
    del freed
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        event = verdict_of(watched, 500 * MIB)
        control.release()
        fail(500 * MIB)  # nor now
        graph.capture_end()
    return event


def fragmented() -> dict:
    watched = Watched()
    kept = split()
    filler = take(424 * MIB)
    event = verdict_of(watched, 300 * MIB)
    return event | {"kept": len(kept) + filler.numel()}


def held_for_another_stream() -> dict:
    """The failing thread's stream is not the default one: what is free on the default one is another's."""
    import torch

    watched = Watched()
    kept = hole()
    side = torch.cuda.Stream()
    filler = take(424 * MIB)
    event = verdict_of(watched, 300 * MIB, side)
    return event | {"kept": len(kept) + filler.numel()}


def memory_outside() -> dict:
    from emulator import control

    watched = Watched()
    control.external_malloc(0, 100 * MIB)
    kept = take(200 * MIB)
    watched.exported.collect()
    control.external_malloc(0, 400 * MIB)
    event = verdict_of(watched, 500 * MIB)
    return event | {"kept": kept.numel()}


def full() -> dict:
    watched = Watched()
    kept = take(700 * MIB)
    event = verdict_of(watched, 500 * MIB)
    return event | {"kept": kept.numel()}


def small_and_full() -> dict:
    watched = Watched()
    kept = take(1024 * MIB)
    event = verdict_of(watched, 1000)
    return event | {"kept": kept.numel()}


def changed_by_the_driver() -> dict:
    from emulator import control

    watched = Watched()
    kept = take(100 * MIB)
    control.fail("cudaMalloc", 1)
    control.fail("cudaMalloc", 2)
    event = verdict_of(watched, 500 * MIB)
    return event | {"kept": kept.numel()}


EXPECTED = [
    (over_the_fraction, (), "fraction", "Over the fraction", "(400.0 MiB held, 512.0 MiB allowed)"),
    (with_pending_frees, (True,), "pending_frees", "Pending frees", "largest free block is 12.0 MiB now"),
    (with_pending_frees, (False,), "pending_frees", "Pending frees", "largest free block is 12.0 MiB now"),
    (
        beside_another_thread,
        (with_pending_frees.__name__,),
        "changed_meanwhile",
        "Pending frees ended,",
        "12.0 MiB now",
    ),
    (a_block_that_was_there, ("made within",), "fragmented", "Fragmented", "block of use 64.5 MiB)"),
    (a_block_that_was_there, ("a small one pending",), "fragmented", "Fragmented", "block of use 64.5 MiB)"),
    (
        a_block_that_was_there,
        ("another pending",),
        "fragmented",
        "Fragmented",
        "20.0 MiB were pending before: a request of up to 64.5 MiB fits now.",
    ),
    (a_block_of_the_same_page, (), "full", "Full: less was free in all than was asked", "20.0 MiB asked"),
    (freed_by_another_thread, (False,), "changed_meanwhile", "another thread", "is 700.0 MiB now"),
    (for_a_stream_that_it_names, (), "changed_meanwhile", "named another stream", "is 348.0 MiB now"),
    (held_by_a_pool, (), "private_pools", "Held by private pools", "(600.0 MiB)"),
    (held_by_a_graph, (), "private_pools", "Held by private pools", "(600.0 MiB)"),
    (held_by_another_stream, (), "another_stream", "Held by another stream", "(348.0 MiB)"),
    (held_for_another_stream, (), "another_stream", "Held by another stream", "(348.0 MiB)"),
    (fragmented_on_another_stream, (), "fragmented", "Fragmented", "(360.0 MiB held and free, the largest"),
    (
        inside_a_pool,
        (),
        "fragmented",
        "Fragmented",
        "(550.0 MiB held and free, the largest block of use 100.0",
    ),
    (in_a_graph_that_shares_its_pool, (500 * MIB,), "fragmented", "Fragmented", "(200.0 MiB held and free"),
    (in_a_graph_that_shares_its_pool, (900 * MIB,), "full", "Full", "not flush its cache."),
    (an_observer_that_makes_room, (), "full", "Full", "950.0 MiB asked of the driver, 624.0 MiB free"),
    (while_the_driver_was_asked, (), "full", "Full", "(others hold 300.0 MiB of the device)"),
    (inside_an_empty_pool, (), "private_pools", "in other pools than the request's", "(600.0 MiB)"),
    (
        pending_elsewhere_during_a_capture,
        (),
        "full",
        "could not flush its cache, 700.0 MiB",
        "324.0 MiB free",
    ),
    (too_little_beside_a_large_neighbour, (), "full", "Full", "(others hold 300.0 MiB of the device)"),
    (
        fragmented,
        (),
        "fragmented",
        "Fragmented",
        "(360.0 MiB held and free, the largest block of use 18.0 MiB)",
    ),
    (
        memory_outside,
        (),
        "outside_pytorch",
        "Memory outside PyTorch",
        "(400.0 MiB more than at the least seen)",
    ),
    (full, (), "full", "Full", "500.0 MiB asked of the driver, 324.0 MiB free of 1.00 GiB"),
    (small_and_full, (), "full", "Full", "2.0 MiB asked of the driver, 0 B free of 1.00 GiB"),
    (freed_by_another_thread, (True,), "changed_meanwhile", "Changed meanwhile", "is 700.0 MiB now"),
    (changed_by_the_driver, (), "changed_meanwhile", "Changed meanwhile", "924.0 MiB free of 1.00 GiB"),
]


@pytest.mark.parametrize(
    ("body", "args", "expected", "words", "figures"),
    EXPECTED,
    ids=[f"{row[0].__name__}{row[1] or ''}" for row in EXPECTED],
)
def test_each_verdict_is_reached_from_a_real_error(gpu, body, args, expected, words, figures):
    event = gpu.run(body, args=args, memory="1GiB")
    assert event["verdict"] == expected
    assert words in event["summary"]
    assert figures in event["summary"]
    ledger = dict(line.split("=") for line in event["ledger"])
    assert sum(map(int, ledger.values())) == event["device_total"] == 1 << 30
    assert event["requests_in_flight"] == (2 if (body, args) == (freed_by_another_thread, (True,)) else 1)
    print(event["summary"])


@pytest.mark.parametrize(
    ("body", "expected"),
    [(over_the_fraction, "fraction"), (full, "full"), (memory_outside, "outside_pytorch")],
)
def test_verdicts_under_expandable_segments(gpu, body, expected):
    event = gpu.run(body, memory="1GiB", alloc_conf="expandable_segments:True")
    assert event["verdict"] == expected
    assert event["settings"] == "expandable_segments:True"


def fragmented_expandable() -> dict:
    watched = Watched()
    blocks = [take(19 * MIB) for _ in range(50)]  # pages of 20 MiB, none of them wholly free after
    del blocks[1::2]
    event = verdict_of(watched, 400 * MIB)
    return event | {"kept": len(blocks)}


def test_fragmented_under_expandable_segments(gpu):
    event = gpu.run(fragmented_expandable, memory="1GiB", alloc_conf="expandable_segments:True")
    assert event["verdict"] == "fragmented"
    assert event["fragmentation"] > 0.3
    assert event["headroom"] < 400 * MIB
    ledger = {state: int(size) for state, size in (line.split("=") for line in event["ledger"])}
    assert ledger["split_free"] / event["reserved"] == event["fragmentation"]


# ---- what the evidence holds ----


def evidence(dumps: str) -> dict:
    import torch
    from opentelemetry import trace

    watched = Watched(oom_dump_dir=dumps)
    kept = split()
    for _ in range(3):
        watched.exported.collect()
        time.sleep(1.05)
    filler = take(424 * MIB)
    before = torch.cuda.memory_reserved()
    more = None

    def other_request(started: threading.Event, done: threading.Event) -> None:
        nonlocal more
        with track("warm up"):
            more = take(20 * MIB)
            started.set()
            done.wait(30)

    started, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=other_request, args=(started, done))
    thread.start()
    started.wait(30)
    with track("answer"):
        span = trace.get_current_span().get_span_context()
        fail(300 * MIB)
        after = torch.cuda.memory_snapshot(include_traces=False)
    done.set()
    thread.join()
    (event,) = watched.events
    (record,) = watched.records
    return {
        "event": event,
        "record": [record.event_name, record.severity_text, record.trace_id, record.span_id],
        "span": [span.trace_id, span.span_id],
        "reserved": torch.cuda.memory_reserved(),
        "before": before,
        "after": pickle.dumps(after).hex(),
        "kept": len(kept) + filler.numel(),
    }


def test_the_evidence_is_whole_and_carries_the_trace(gpu, tmp_path):
    got = gpu.run(evidence, args=[str(tmp_path)], memory="1GiB")
    event = got["event"]
    assert got["record"] == [EVENT, "WARN", *got["span"]]
    assert event["asked"] == 300 * MIB
    assert event["device_free"] == (1024 - 400 - 424 - 20) * MIB
    assert event["reserved"] == got["reserved"] == got["before"] + 20 * MIB
    assert event["own_free"] == 360 * MIB
    assert event["own_largest"] == 18 * MIB
    assert event["headroom"] == event["device_free"]
    assert event["fragmentation"] == pytest.approx(360 / 844)
    assert event["external_growth"] == 0
    assert event["other_streams_free"] == event["private_pools_free"] == 0
    assert event["capturing"] is False
    assert event["torch.device"] == "cuda:0"
    assert event["hw.id"].startswith("GPU-")
    assert "more" not in event
    assert "allowed" not in event
    assert "settings" not in event  # nobody set any
    readings = [dict(part.split("=") for part in line.split()) for line in event["readings"]]
    assert len(readings) >= 4
    ages = [float(reading["age"]) for reading in readings]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] > 2
    assert int(readings[0]["allocated"]) == 40 * MIB
    assert int(readings[-1]["allocated"]) == (40 + 424 + 20) * MIB
    requests = [dict(part.rsplit("=", 1) for part in line.split(" ")[-2:]) for line in event["requests"]]
    assert event["requests_in_flight"] == 2
    assert [line.split(" age=")[0] for line in event["requests"]] == ["operation=warm up", "operation=answer"]
    assert [int(request["reserved_growth"]) for request in requests] == [20 * MIB, 0]
    assert all(0 <= float(request["age"]) < 60 for request in requests)


def looked_at_for_the_evidence(on_a_stream: bool) -> dict:
    import torch
    from emulator import control

    watched = Watched()
    clock = Clock()
    kept = [take(100 * MIB)]
    watched.exported.collect()
    with track("stream"):  # never idle
        clock.pass_by(5)
        kept += [take(300 * MIB), take(19 * MIB)]
        fail(900 * MIB, torch.cuda.Stream() if on_a_stream else None)
        watched.exported.collect()
        headroom = watched.exported.value("torch.memory.headroom")
        age = watched.exported.value("torch.memory.snapshot.age")
        fits = [control.would_fit(headroom), control.would_fit(headroom + MIB)]
    return {"fits": fits, "age": age, "kept": len(kept)}


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_the_snapshot_of_the_evidence_serves_the_next_export(gpu, on_a_stream):
    got = gpu.run(looked_at_for_the_evidence, args=[on_a_stream], memory="1GiB")
    assert got["fits"] == [True, False]
    assert got["age"] < 5


class PlainDataOnly(pickle._Unpickler):
    def find_class(self, module: str, name: str):
        raise AssertionError(f"{module}.{name} in a dump")


def test_the_dump_is_plain_data_that_torchs_tools_open(gpu, tmp_path):
    got = gpu.run(evidence, args=[str(tmp_path)], memory="1GiB")
    (path,) = tmp_path.iterdir()
    assert got["event"]["dump"] == str(path)
    with open(path, "rb") as file:
        dump = PlainDataOnly(file).load()
    assert dump["segments"] == pickle.loads(bytes.fromhex(got["after"]))
    assert dump["device_traces"] == [[]]
    assert dump["allocator_settings"]["expandable_segments"] is False
    from torch.cuda import _memory_viz

    assert "20.0MiB" in _memory_viz.segsum(dump)
    assert len(_memory_viz.segment_plot(dump)) > 1000


# ---- what stays the user's ----


def the_users_own(instrumented: bool, first: bool) -> dict:
    import torch

    seen = []
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    if first:
        torch.cuda.init()
        torch._C._cuda_attach_out_of_memory_observer(lambda *given: seen.append(given))
    watched = Watched() if instrumented else None
    kept = take(700 * MIB)
    if not first:
        torch._C._cuda_attach_out_of_memory_observer(lambda *given: seen.append(given))
    with track("answer"):
        error = fail(500 * MIB)
    snapshot = torch.cuda.memory._snapshot()
    return {
        "seen": seen,
        "error": [
            type(error) is torch.cuda.OutOfMemoryError,
            str(error).split(" GPU ")[0],
            error.args == (str(error),),
        ],
        "chain": [error.__cause__, error.__context__, getattr(error, "__notes__", None)],
        "history": Counter(entry["action"] for entry in snapshot["device_traces"][0]),
        "frames": any(block["frames"] for segment in snapshot["segments"] for block in segment["blocks"]),
        "told": None if watched is None else watched.verdicts,
        "kept": kept.numel(),
    }


@pytest.mark.parametrize("first", [False, True])
def test_the_users_observer_history_and_exception_are_as_without(gpu, first):
    with_us = gpu.run(the_users_own, args=[True, first], memory="1GiB")
    without = gpu.run(the_users_own, args=[False, first], memory="1GiB")
    assert with_us.pop("told") == {"full": 1}
    assert without.pop("told") is None
    with_us["history"].pop("snapshot", None)
    without["history"].pop("snapshot", None)
    assert with_us == without
    assert len(with_us["seen"]) == 1
    assert with_us["chain"] == [None, None, None]
    assert with_us["history"]["oom"] == 1


def an_exception_passes_through() -> list:
    import torch

    Watched()
    kept = take(700 * MIB)
    raised = []

    def inner() -> None:
        try:
            take(500 * MIB)
        except torch.cuda.OutOfMemoryError as error:
            raised.append(error)
            raise

    try:
        with track("answer"):
            inner()
    except torch.cuda.OutOfMemoryError as error:
        return [error is raised[0], len(raised), kept.numel()]
    return []


def test_the_exception_is_the_same_object(gpu):
    assert gpu.run(an_exception_passes_through, memory="1GiB") == [True, 1, 700 * MIB]


def faults_of_ours() -> dict:
    watched = Watched()
    kept = take(700 * MIB)

    def broken(*_):
        raise SystemError("ours")

    whole = oom.OomWatch._examine
    oom.OomWatch._examine = broken
    error = fail(500 * MIB)
    oom.OomWatch._examine = whole
    oom.OomWatch.seen = broken
    again = fail(500 * MIB)
    return {
        "errors": [type(error).__name__, type(again).__name__],
        "verdicts": watched.verdicts,
        "skipped": watched.exported.value("torch.memory.telemetry.skipped", reason="error"),
        "kept": kept.numel(),
    }


def test_a_fault_of_ours_does_not_take_the_place_of_the_exception(gpu):
    got = gpu.run(faults_of_ours, memory="1GiB")
    assert got["errors"] == ["OutOfMemoryError", "OutOfMemoryError"]
    assert got["verdicts"] == {"unknown": 1}
    assert got["skipped"] == 1
    assert gpu.last.stderr.count("evidence of an out of memory error is incomplete") == 1


def out_of_memory_while_it_is_told() -> dict:
    watched = Watched()

    class Greedy:
        def on_emit(self, _):
            fail(600 * MIB)
            nested.append(1)

        emit = on_emit  # as it was called

        def shutdown(self): ...
        def force_flush(self, timeout_millis=0): ...

    nested = []
    watched.logged.provider.add_log_record_processor(Greedy())
    kept = take(700 * MIB)
    with track("answer"):
        fail(500 * MIB)
    return {
        "nested": nested,
        "events": [event["verdict"] for event in watched.events],
        "records": len(watched.records),
        "kept": kept.numel(),
    }


def test_an_error_while_one_is_told_ends(gpu):
    got = gpu.run(out_of_memory_while_it_is_told, memory="1GiB", timeout=60)
    assert got == {"nested": [1], "events": ["full"], "records": 1, "kept": 700 * MIB}


# ---- when it is attached ----


def the_very_first_request() -> dict:
    from emulator import control

    watched = Watched()
    import torch

    before = [torch.cuda.is_initialized(), control.contexts_made()]
    with track("answer"):
        fail(2000 * MIB)
    return {
        "before": before,
        "events": watched.events,
        "records": len(watched.records),
        "verdicts": watched.verdicts,
        "ooms": watched.exported.value("torch.memory.ooms"),
    }


def test_the_first_request_of_a_process_is_seen_and_no_context_is_made_before(gpu):
    got = gpu.run(the_very_first_request, memory="1GiB")
    assert got["before"] == [False, 0]
    assert [event["verdict"] for event in got["events"]] == ["full"]
    assert got["records"] == 1
    assert got["verdicts"] == {"full": 1}
    assert got["ooms"] == 1


def on_and_off() -> list:
    import torch

    watched = Watched()
    kept = take(700 * MIB)
    told = []

    def look() -> None:
        with track("answer"):
            fail(500 * MIB)
        told.append([len(watched.records), watched.verdicts.get("full", 0)])

    look()
    TorchMemInstrumentor().uninstrument()
    look()
    for _ in range(3):
        watched.instrument()
        TorchMemInstrumentor().uninstrument()
    watched.instrument(oom_evidence=False)
    look()
    TorchMemInstrumentor().uninstrument()
    watched.instrument()
    look()
    return [told, kept.numel(), torch.cuda.is_initialized()]


def test_uninstrumented_it_is_silent_and_comes_alive_again_once(gpu):
    told, *_ = gpu.run(on_and_off, memory="1GiB")
    assert told == [[1, 1], [1, 0], [1, 0], [2, 2]]  # the counter goes on


def instrumented_only_before_initialisation() -> list:
    import torch

    watched = Watched()
    TorchMemInstrumentor().uninstrument()
    torch.cuda.init()
    fail(2000 * MIB)
    silent = len(watched.records)
    watched.instrument()
    fail(2000 * MIB)
    return [silent, len(watched.records)]


def test_what_was_taken_back_before_initialisation_attaches_nothing_until_it_is_wanted(gpu):
    assert gpu.run(instrumented_only_before_initialisation, memory="1GiB") == [0, 1]


def on_each_of_several_devices() -> dict:
    import torch

    watched = Watched()
    raised = []
    for index in range(3):
        kept = torch.empty(MIB, dtype=torch.uint8, device=index)
        with torch.cuda.device(index), track("answer"):
            raised.append(type(fail(3000 * MIB)).__name__)
        del kept
    seen = [event["torch.device"] for event in watched.events] if hasattr(torch, "OutOfMemoryError") else None
    return {"raised": raised, "seen": seen}


def test_an_error_on_each_of_several_devices_stays_the_users_and_is_seen(gpu):
    got = gpu.run(on_each_of_several_devices, memory="1GiB", devices=3)
    assert got["raised"] == ["OutOfMemoryError"] * 3
    assert got["seen"] in (["cuda:0", "cuda:1", "cuda:2"], None), "before torch 2.4 nothing can see them"


def on_another_backend() -> dict:
    watched = Watched()
    error = None
    try:
        with track("answer"):
            take(3000 * MIB)
    except RuntimeError as raised:
        error = type(raised).__name__
    watched.exported.collect()
    return {"error": error, "records": len(watched.records), "told": VERDICTS in watched.exported.names}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"alloc_conf": "backend:cudaMallocAsync"}, "OutOfMemoryError"),
        ({"env": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, "AcceleratorError"),
    ],
    ids=["cudaMallocAsync", "uncached"],
)
def test_a_backend_without_observers_is_left_alone(gpu, settings, error):
    got = gpu.run(on_another_backend, memory="1GiB", **settings)
    assert got == {"error": error, "records": 0, "told": False}
    assert "torchmem" not in gpu.last.stderr


def on_a_pluggable_allocator(library: str) -> dict:
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
    torch.cuda.memory.change_current_allocator(allocator)
    watched = Watched()
    kept = take(10 * MIB)
    watched.exported.collect()
    return {"told": VERDICTS in watched.exported.names, "kept": kept.numel()}


def test_a_pluggable_allocator_is_left_alone(gpu, pluggable):
    got = gpu.run(on_a_pluggable_allocator, args=[pluggable], memory="1GiB")
    assert got == {"told": False, "kept": 10 * MIB}
    assert "torchmem" not in gpu.last.stderr


def beside_a_pool_that_needs_the_interpreter(library: str) -> dict:
    import torch

    watched = Watched()
    kept = take(700 * MIB)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        library, "take_with_interpreter", "give_with_interpreter"
    )
    pool = torch.cuda.MemPool(allocator.allocator())

    with track("first"):  # the one thread that reads from now on
        pass
    thread = threading.Thread(target=lambda: fail(500 * MIB))
    thread.start()
    thread.join()
    (record,) = watched.records
    return {"record": told(record.attributes), "kept": kept.numel(), "pool": str(pool.id)}


def test_where_a_reading_could_hang_nothing_is_read(gpu, pluggable):
    got = gpu.run(beside_a_pool_that_needs_the_interpreter, args=[pluggable], memory="1GiB")
    record = got["record"]
    assert record["verdict"] == "unknown"
    assert record["asked"] == 500 * MIB
    assert record["device_free"] == 324 * MIB
    assert "reserved" not in record


def during_a_capture() -> dict:
    import torch

    watched = Watched()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        cache = take(600 * MIB)
        graph.capture_begin()
        del cache  # a wholly free segment, which a flush would give back
        with track("answer"):
            fail(500 * MIB)
        graph.capture_end()
    return watched.events[0]


def test_an_error_during_a_capture_says_that_nothing_could_be_flushed(gpu):
    event = gpu.run(during_a_capture, memory="1GiB", env={"PYTHONWARNINGS": "ignore"})
    assert event["capturing"] is True
    assert (
        "A graph was being captured: the allocator could not flush its cache, 600.0 MiB." in event["summary"]
    )
    assert "headroom" not in event  # it would count on a flush


def beside_a_capture(where: str) -> dict:
    """The allocator has flushed what it could: the failing stream is not the captured one."""
    import torch

    watched = Watched()
    device = 1 if where == "another device" else 0
    kept = torch.empty(100 * MIB, dtype=torch.uint8, device=device)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    capturing, done = threading.Event(), threading.Event()

    def capture() -> None:
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="relaxed")
            capturing.set()
            if where == "another thread":
                done.wait(30)
            else:
                run_out()
            graph.capture_end()

    def run_out() -> None:
        stream = torch.cuda.Stream(device) if where == "another stream" else None
        with torch.cuda.stream(stream):
            torch.empty(300 * MIB, dtype=torch.uint8, device=device)
            with contextlib.suppress(torch.cuda.OutOfMemoryError), track("answer"):
                torch.empty(950 * MIB, dtype=torch.uint8, device=device)

    thread = threading.Thread(target=capture)
    thread.start()
    if where == "another thread":
        capturing.wait(30)
        run_out()
        done.set()
    thread.join()
    return watched.events[0] | {"kept": kept.numel()}


@pytest.mark.parametrize("where", ["another thread", "another stream", "another device"])
def test_an_error_beside_a_capture_does_not_say_that_nothing_was_flushed(gpu, where):
    event = gpu.run(
        beside_a_capture, args=[where], memory="1GiB", devices=2, env={"PYTHONWARNINGS": "ignore"}
    )
    assert event["capturing"] is True
    assert event["reserved"] == 100 * MIB
    assert "could not flush" not in event["summary"]
    assert event["headroom"] == 924 * MIB


def on_two_devices() -> dict:
    import torch

    watched = Watched()
    kept = [
        torch.empty(size * MIB, dtype=torch.uint8, device=f"cuda:{n}") for n, size in enumerate((700, 100))
    ]
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        with contextlib.suppress(torch.cuda.OutOfMemoryError), track("answer"):
            torch.empty(1000 * MIB, dtype=torch.uint8, device=device)
    points = watched.exported.collect().all(VERDICTS)
    return {
        "events": watched.events,
        "points": [
            [labels["torch.device"], labels["torch.memory.oom.verdict"], value]
            for labels, value in points
            if value
        ],
        "zeros": sum(not value for _, value in points),
        "kept": sum(block.numel() for block in kept),
    }


def test_each_device_has_evidence_and_counts_of_its_own(gpu):
    got = gpu.run(on_two_devices, memory="1GiB", devices=2)
    assert [
        (event["torch.device"], event["verdict"], event.get("reserved", 0) // MIB) for event in got["events"]
    ] == [
        ("cuda:1", "full", 100),
        ("cuda:0", "full", 700),
        ("cuda:1", "unexamined", 0),
    ]
    assert sorted(got["points"]) == [
        ["cuda:0", "full", 1],
        ["cuda:1", "full", 1],
        ["cuda:1", "unexamined", 1],
    ]
    assert got["zeros"] == 2 * 10 - 3  # a first error of any verdict is an increase


def without_a_place_for_dumps(path: str) -> dict:
    watched = Watched(oom_dump_dir=path)
    oom.INTERVAL, oom.SHARE = 0.0, 1e9
    kept = take(700 * MIB)
    for _ in range(3):
        with track("answer"):
            fail(500 * MIB)
    return {
        "verdicts": watched.verdicts,
        "dumps": [event.get("dump") for event in watched.events],
        "skipped": watched.exported.value("torch.memory.telemetry.skipped", reason="dump"),
        "kept": kept.numel(),
    }


def test_what_cannot_be_dumped_costs_a_log_line(gpu, tmp_path):
    (tmp_path / "file").touch()
    got = gpu.run(without_a_place_for_dumps, args=[str(tmp_path / "file")], memory="1GiB")
    assert got["verdicts"] == {"full": 3}
    assert got["dumps"] == [None, None, None]
    assert got["skipped"] == 4  # it was looked at before, too
    assert gpu.last.stderr.count("torchmem: no dump of an out of memory error") == 1
    assert (
        f"torchmem: oom_dump_dir={str(tmp_path / 'file')!r} (from an argument) cannot be written "
        "(Not a directory): no snapshots will be written\n"
    ) in gpu.last.stderr


def test_a_directory_for_dumps_without_a_parent_is_told_at_the_start_with_its_option(gpu, tmp_path):
    path = str(tmp_path / "gone" / "dumps")
    named = {"OTEL_PYTHON_TORCHMEM_OOM_DUMP_DIR": path}
    gpu.run(with_no_error_of_memory, memory="1GiB", env=named)
    assert [line for line in gpu.last.stderr.splitlines() if line.startswith("torchmem")] == [
        f"torchmem: oom_dump_dir={path!r} (from OTEL_PYTHON_TORCHMEM_OOM_DUMP_DIR) cannot be written "
        "(No such file or directory; its parent must exist): no snapshots will be written"
    ]


def with_no_error_of_memory() -> dict:
    return {"events": len(Watched().events), "kept": take(MIB).numel()}


def with_a_limit_on_files(path: str) -> dict:
    import resource

    blocks = [take(1000) for _ in range(1000)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    got = without_a_place_for_dumps(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return got | {"blocks": len(blocks)}


def test_a_full_disk_costs_a_log_line(gpu, tmp_path):
    got = gpu.run(with_a_limit_on_files, args=[str(tmp_path)], memory="1GiB")
    assert got["verdicts"] == {"full": 3}
    assert got["dumps"] == [None, None, None]
    assert got["skipped"] == 3
    assert gpu.last.stderr.count("torchmem: no dump of an out of memory error") == 1
    assert "File too large" in gpu.last.stderr
    assert list(tmp_path.iterdir()) == []


# ---- early rejections ----


def refused_early() -> dict:
    import torch

    watched = Watched()
    kept = take(700 * MIB)
    with contextlib.suppress(torch.cuda.OutOfMemoryError), track("answer"):
        take(500 * MIB)
    fail(500 * MIB)  # outside of any request
    watched.exported.collect()
    return {
        "events": watched.events,
        "records": [told(record.attributes)["verdict"] for record in watched.records],
        "trace": [record.trace_id for record in watched.records]
        == [watched.traced.spans[0].context.trace_id],
        "verdicts": watched.verdicts,
        "rejections": watched.exported.value("torch.memory.oom.rejections"),
        "ooms": watched.exported.value("torch.memory.ooms"),
        "kept": kept.numel(),
    }


def test_an_early_rejection_is_counted_and_told_by_its_request(gpu):
    got = gpu.run(refused_early, memory="1GiB", alloc_conf="throw_on_cudamalloc_oom:True")
    (event,) = got["events"]
    assert event["verdict"] == "refused"
    assert "500.00 MiB asked for. Refused early" in event["summary"]
    assert "Now 700.0 MiB are held, 0 B of them in no use; 1.00 GiB are allowed." in event["summary"]
    assert "allowed" not in event  # no fraction is set
    assert event["device_free"] == 324 * MIB
    assert event["requests_in_flight"] == 1
    assert got["records"] == ["refused"]
    assert got["trace"]
    assert got["verdicts"] == {}
    assert got["rejections"] == 2
    assert got["ooms"] == 0


def refused_and_caught() -> dict:
    from threading import Event, Thread

    clock = Clock()
    watched = Watched()
    kept = take(700 * MIB)
    with track("answer"):
        kept = kept, take(MIB)
    with track("answer"):
        fail(500 * MIB)
        fail(500 * MIB)
    alone = watched.traced.spans[1]
    with track("answer"):  # nothing was refused in this one
        kept = kept, take(MIB)
    clock.pass_by(3600)
    inside, done = Event(), Event()

    def answer() -> None:
        with track("answer"):
            inside.set()
            done.wait(30)

    other = Thread(target=answer)
    other.start()
    inside.wait(30)
    with track("answer"):
        fail(500 * MIB)
    done.set()
    other.join(30)
    spans = watched.traced.spans
    return {
        "refused": [span.attributes.get("torch.memory.oom.rejections") for span in spans],
        "events": [[told(event.attributes)["verdict"] for event in span.events] for span in spans],
        "statuses": [span.status.status_code.name for span in spans],
        "records": [told(each.attributes)["verdict"] for each in watched.records],
        "on the span": [each.span_id == alone.context.span_id for each in watched.records],
        "rejections": watched.exported.collect().value("torch.memory.oom.rejections"),
        "kept": len(kept),
    }


def test_an_early_rejection_that_the_code_caught_is_told_by_its_request(gpu):
    """Under overlap nobody knows whose it was: it is told once, and on no span."""
    got = gpu.run(refused_and_caught, memory="1GiB", alloc_conf="throw_on_cudamalloc_oom:True")
    assert got["refused"] == [None, 2, None, 1, 1]
    assert got["events"] == [[], ["refused"], [], [], []]
    assert got["statuses"] == ["UNSET"] * 5
    assert got["records"] == ["refused", "refused"]
    assert got["on the span"] == [True, False]
    assert got["rejections"] == 3


def errors_of_the_users_own() -> dict:
    import torch

    class OutOfMemoryError(RuntimeError):
        pass

    watched = Watched()
    kept = take(700 * MIB)
    errors = [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        torch.cuda.OutOfMemoryError("Speicher voll: " + "ü" * 100_000),
        torch.cuda.OutOfMemoryError(),
        OutOfMemoryError(b"\xff"),
        torch.AcceleratorError("CUDA error: out of memory"),
        MemoryError(),
    ]
    for error in errors:
        with contextlib.suppress(Exception), track("answer"):
            raise error
    told_of_those = [watched.events, len(watched.records), watched.verdicts]
    with contextlib.suppress(torch.cuda.OutOfMemoryError), track("answer"):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            take(500 * MIB)
        raise torch.cuda.OutOfMemoryError("Tried to allocate 5 hunter2 of /home/somebody")
    return {"none": told_of_those, "summary": watched.events[0]["summary"], "kept": kept.numel()}


def test_errors_that_the_users_code_raises_itself_have_no_verdict_and_tell_nothing_of_their_words(gpu):
    got = gpu.run(errors_of_the_users_own, memory="1GiB", alloc_conf="throw_on_cudamalloc_oom:True")
    assert got["none"] == [[], 0, {}]
    assert got["summary"].startswith("cuda:0 is out of memory: Refused early")
    assert "hunter2" not in got["summary"]


def test_without_the_option_rejections_are_absent(gpu):
    assert gpu.run(refused_early, memory="1GiB")["rejections"] is None


# ---- storms ----


def storm(times: int) -> dict:
    import torch
    from opentelemetry import trace

    watched = Watched()
    kept = take(700 * MIB)
    tracer = watched.traced.provider.get_tracer("test")
    fail(500 * MIB)
    TorchMemInstrumentor().uninstrument()
    began = time.perf_counter()
    for _ in range(times):
        fail(500 * MIB)
    bare = time.perf_counter() - began
    watched.instrument()
    oom.INTERVAL = 3600.0
    watched.logged.exporter.clear()
    with tracer.start_as_current_span("one long request"):
        began = time.perf_counter()
        for _ in range(times):
            fail(500 * MIB)
        seen = time.perf_counter() - began
    with tracer.start_as_current_span("another"):
        fail(500 * MIB)
        trace.get_current_span().set_attribute("x", 1)
    during = [len(watched.records), watched.verdicts]
    oom._watch._storms[0].not_before = 0.0
    fail(500 * MIB)
    return {
        "during": during,
        "after": told(watched.records[-1].attributes),
        "spans": {
            span.name: [told(event.attributes) for event in span.events] for span in watched.traced.spans
        },
        "verdicts": watched.verdicts,
        "bare": bare / times * 1e6,
        "seen": seen / times * 1e6,
        "retries": torch.cuda.memory_stats()["num_ooms"],
        "kept": kept.numel(),
    }


def test_a_storm_is_examined_once_counted_and_summed_up(gpu):
    got = gpu.run(storm, args=[1000], memory="1GiB", timeout=120)
    assert got["during"] == [1, {"full": 2, "unexamined": 1000}]  # the first was before the uninstrument()
    assert got["after"]["more"] == 1000
    assert "1000 more since" in got["after"]["summary"]
    assert got["verdicts"] == {"full": 3, "unexamined": 1000}
    (examined,) = got["spans"]["one long request"]
    assert examined["verdict"] == "full"
    (only,) = got["spans"]["another"]
    assert only["verdict"] == "unexamined"
    assert re.search(r"one of \d+\.\d s before was full\.$", only["summary"])
    print(f"an OutOfMemoryError: {got['bare']:.0f} µs, in a storm {got['seen']:.0f} µs")
    assert got["seen"] < 2 * got["bare"] + 100


def storm_on_threads(threads: int, times: int) -> dict:
    watched = Watched()
    kept = take(700 * MIB)

    def one() -> None:
        for _ in range(times):
            with track("answer"):
                fail(500 * MIB)

    workers = [threading.Thread(target=one) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {
        "records": len(watched.records),
        "verdicts": watched.verdicts,
        "events": Counter(
            len([event for event in span.events if event.name == EVENT]) for span in watched.traced.spans
        ),
        "kept": kept.numel(),
    }


def test_a_storm_on_many_threads_loses_none(gpu):
    got = gpu.run(storm_on_threads, args=[8, 100], memory="1GiB", timeout=120)
    assert got["records"] <= 1 + gpu.last.seconds / 10
    assert sum(got["verdicts"].values()) == 800
    assert got["events"] == {"1": 800}  # each request's span says what became of it


def instrumented_again(rounds: int) -> list:
    kept = take(700 * MIB)
    watched = Watched()
    counted = []
    for _ in range(rounds):
        fail(500 * MIB)
        counted.append(watched.verdicts)
        TorchMemInstrumentor().uninstrument()
        fail(500 * MIB)  # nobody sees it
        watched.instrument()
        counted.append(watched.verdicts)
    return [*counted, kept.numel()]


def test_the_verdicts_go_on_counting_where_it_is_instrumented_again(gpu):
    *counted, _ = gpu.run(instrumented_again, args=[3], memory="1GiB")
    assert counted == [{"full": count} for count in (1, 1, 2, 2, 3, 3)]


def verdicts_of_a_child() -> list:
    kept = take(700 * MIB)
    watched = Watched()
    fail(500 * MIB)
    before = watched.verdicts
    child = in_a_copy(lambda: wiring._verdicts.of(0)["full"])
    return [before, child["value"], watched.verdicts, kept.numel()]


def test_a_forked_child_counts_none_of_its_parents_errors(gpu):
    assert gpu.run(verdicts_of_a_child, memory="1GiB")[:3] == [{"full": 1}, 0, {"full": 1}]
