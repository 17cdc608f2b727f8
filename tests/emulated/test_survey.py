# SPDX-License-Identifier: Apache-2.0
"""Who takes snapshots when, and what of them is told: on the real allocator."""

from __future__ import annotations

import ctypes
import functools
import math
import random
import threading
import time
from types import SimpleNamespace

import pytest
from exported import Traced
from together import Together
from watched import Clock, Watched, take

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, rooms
from opentelemetry_instrumentation_torchmem.allocator import captures, pools, sampler, source, survey
from opentelemetry_instrumentation_torchmem.requests.track import track

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"
native = Together(memory="1GiB", timeout=150)
expandable = Together(memory="1GiB", alloc_conf=EXPANDABLE, timeout=150)
both_modes = pytest.mark.parametrize("together", [native, expandable], ids=["native", "expandable"])


def fragment():
    """Live blocks of both pools with holes between them, and a wholly free segment."""
    large = [take(3 * MIB) for _ in range(20)]
    small = [take(1000) for _ in range(100)]
    take(64 * MIB)
    return large[::2], small[::3]


class Elsewhere:
    """Does something on a thread of its own and stays in the middle of it, from `with` to its end."""

    def __init__(self, body) -> None:
        self.there, self.go_on = threading.Event(), threading.Event()
        self._body = body
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._body(self)
        except BaseException as error:
            self._error = error
        finally:
            self.there.set()

    def stay(self) -> None:
        """In the body: until the other thread is done with what it does meanwhile."""
        self.there.set()
        assert self.go_on.wait(30)

    def __enter__(self):
        self._thread.start()
        assert self.there.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self.go_on.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def request_elsewhere() -> Elsewhere:
    def body(self):
        with track("answer"):
            self.stay()

    return Elsewhere(body)


# ---- the budget ----


@native.body
def on_a_budget() -> dict:
    watched = Watched(snapshot_share=0.003)
    kept = fragment()
    began = time.monotonic()
    taken, costs, told, spent = [], [], [], 0.0
    while len(costs) < 3 and len(taken) < 5000:
        taken.append(watched.takes_one())
        if taken[-1]:
            costs.append(watched.spent - spent)
            spent = watched.spent
        told.append([watched.headroom, watched.age])
        time.sleep(0.005)
    return {
        "taken": taken,
        "seconds": time.monotonic() - began,
        "costs": costs,
        "skipped": watched.skipped,
        "told": told,
        "kept": len(kept),
    }


def test_one_at_the_first_collection_and_the_next_no_sooner_than_its_share_of_time_allows(gpu):
    got = native(gpu, on_a_budget)
    assert got["taken"][0]
    assert got["skipped"] == {"budget": got["taken"].count(False)}
    assert got["taken"].count(False) > 3
    first, second, _ = got["costs"]
    assert got["seconds"] >= (first + second) / 0.003
    # between them the figures are those of the last one, and older each time
    (headroom,) = {headroom for headroom, _ in got["told"]}
    assert headroom > 0
    for taken, (_, before), (_, age) in zip(got["taken"][1:], got["told"], got["told"][1:], strict=False):
        assert taken or age > before


@expandable.body
def stale_figures() -> dict:
    clock = Clock()
    watched = Watched()
    torch_pool_kept = fragment()
    watched.collect()
    fresh = {"headroom": watched.headroom, "age": watched.age}
    survey.Survey._may_look = lambda self, *_: self._not_now("snapshot_budget")
    told = []
    for seconds in (200, 99, 2):
        clock.pass_by(seconds)
        watched.collect()
        told.append([watched.age is not None and round(watched.age), watched.headroom == fresh["headroom"]])
    return {"told": told, "names": sorted(watched.names), "kept": len(torch_pool_kept)}


def test_figures_older_than_five_minutes_are_absent(gpu):
    got = expandable(gpu, stale_figures)
    assert got["told"] == [[200, True], [299, True], [301, False]]  # how old it is stays known
    names = {name.removeprefix("torch.memory.") for name in got["names"]}
    gone = {"headroom", "free_block.largest", "private_pool.reserved", "fragmentation"}
    assert not gone & names
    assert {"usage", "slack", "reserved"} <= names


@native.body
def two_at_once() -> dict:
    from opentelemetry_instrumentation_torchmem.allocator.pools import PoolWatch
    from opentelemetry_instrumentation_torchmem.allocator.windows import OpenWindows, Window
    from opentelemetry_instrumentation_torchmem.telemetry import OwnTelemetry

    survey.IDLE_WAIT = 20.0
    kept = fragment()
    telemetry, windows = OwnTelemetry(), OpenWindows()
    taking = survey.Survey(telemetry, windows, captures.CaptureWatch())
    collecting = sampler.Sampler(telemetry, PoolWatch(), windows, survey=taking)
    looks = []
    look = survey.Survey._look

    def noted(self, *arguments):
        looks.append(1)
        look(self, *arguments)

    survey.Survey._look = noted
    collecting.request_readings(time.monotonic())  # so it knows the device
    window = windows.open(Window())
    threads = [threading.Thread(target=collecting.collect) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # one is where it waits for a moment without a request
    windows.close(window)
    for thread in threads:
        thread.join()
    return {"looks": len(looks), "skipped": telemetry.skipped["snapshot_budget"], "kept": len(kept)}


def test_collections_at_the_same_time_take_one(gpu):
    got = native(gpu, two_at_once)
    assert (got["looks"], got["skipped"]) == (1, 2)


@native.body
def one_that_fails() -> dict:
    clock = Clock()
    watched = Watched()
    kept = fragment()
    snapshot = source.Source.snapshot

    def broken(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    source.Source.snapshot = broken
    told = []
    for _ in range(2):
        watched.collect()
        told.append([watched.skipped, watched.headroom, sum(watched.ledger().values())])
    source.Source.snapshot = snapshot
    clock.pass_by(3600)
    return {"told": told, "then": watched.takes_one(), "headroom": watched.headroom, "kept": len(kept)}


def test_one_that_fails_is_counted_costs_its_budget_and_leaves_the_rest_of_the_collection(gpu):
    got = native(gpu, one_that_fails)
    assert got["told"] == [[{"error": 1}, None, 1 << 30], [{"error": 1, "budget": 1}, None, 1 << 30]]
    assert got["then"]
    assert got["headroom"] > 0


# ---- requests in flight ----


def one_that_retries(_) -> None:
    with track("answer"):
        take(400 * MIB)
        take(800 * MIB)


@native.body
def beside_requests() -> dict:
    clock = Clock()
    watched = Watched(snapshot_share=0.1)
    kept = fragment()
    got: dict = {}

    survey.CHEAP = 0.0
    with request_elsewhere():
        began = time.perf_counter()
        got["busy"] = [watched.takes_one(), watched.skipped, watched.headroom]
        got["waited"] = time.perf_counter() - began
        clock.pass_by(9)
        got["not yet"] = watched.takes_one()
        clock.pass_by(2)  # what it costs is not known: some seconds since it was first wanted
        began = time.perf_counter()
        got["overdue"] = [watched.takes_one(), watched.headroom is not None]
        clock.pass_by(30)
        got["after half a minute"] = [watched.takes_one(), watched.skipped["busy"]]
        clock.pass_by(31)
        got["after a minute"] = watched.takes_one()
        survey.CHEAP = math.inf
        clock.pass_by(9)
        got["cheap, too soon"] = watched.takes_one()
        clock.pass_by(2)
        got["cheap"] = watched.takes_one()
        clock.pass_by(5)
        got["once more"] = watched.takes_one()
        with Elsewhere(one_that_retries):
            pass
        got["overtaken"] = watched.takes_one()
        clock.pass_by(5)
        got["and not again"] = watched.takes_one()
    clock.pass_by(50)
    got["idle"] = watched.takes_one()

    survey.IDLE_WAIT, survey.CHEAP = 20.0, 0.0
    clock.pass_by(50)
    turns = [0]

    def briefly(self):
        with track("answer"):
            self.there.set()
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                turns[0] += 1
                time.sleep(0.001)

    with Elsewhere(briefly):
        began = time.perf_counter()
        got["a moment later"] = [watched.takes_one(), turns[0]]
        got["waited for it"] = time.perf_counter() - began
    return {**got, "kept": len(kept)}


def test_beside_requests_it_waits_for_an_idle_moment_and_goes_without_the_later_the_more_it_costs(gpu):
    got = native(gpu, beside_requests)
    assert (got["cheap, too soon"], got["cheap"]) == (False, True)
    # a retry since: nothing is where it was
    assert (got["once more"], got["overtaken"], got["and not again"]) == (False, True, False)
    assert got["busy"] == [False, {"busy": 1}, None]
    assert 0.1 <= got["waited"] < 5
    assert not got["not yet"]
    assert got["overdue"] == [True, True]
    assert got["after half a minute"] == [False, 3]
    assert got["after a minute"]
    assert got["idle"]
    taken, turns = got["a moment later"]
    assert taken
    assert turns > 20  # the request ran on meanwhile
    assert got["waited for it"] < 15


@native.body
@expandable.body
def never_idle_and_filling_up() -> list:
    import torch
    from emulator import control

    survey.OVERDUE, survey.SOON = math.inf, math.inf  # one look, before there are requests
    clock = Clock()
    watched = Watched()
    kept = [take(40 * MIB)]
    assert watched.takes_one()
    told = []
    with track("stream"):
        for size in (120, 120, 9, 120, 120, 120, 120, 120, 9, 120, 120):
            clock.pass_by(20)
            try:
                with track("answer"):
                    kept.append(take(size * MIB))
                    if len(kept) % 3 == 0:
                        kept[-2] = take(2 * MIB)  # leaves a wholly free segment, or pages
            except torch.OutOfMemoryError:
                kept.append(take(MIB))
            watched.collect()
            told.append([control.would_fit(watched.headroom), watched.figures()])
    return told


@both_modes
def test_while_no_snapshot_can_be_taken_nothing_is_told_that_the_same_export_disproves(gpu, together):
    told = together(gpu, never_idle_and_filling_up)
    assert told[0][1]["headroom"] > 800 * MIB
    assert 0 < told[-1][1]["headroom"] < 400 * MIB
    for fits, figures in told:
        assert fits or together is expandable, figures  # there what is trapped is in no reading
        idle = figures["reserved"] - figures["active"]
        assert figures["headroom"] <= figures["free"] + idle
        assert figures["headroom"] > figures["free"] - 20 * MIB  # and no less than need be
        assert figures["largest"] <= idle


@native.body
def memory_taken_by_others() -> dict:
    from emulator import control

    clock = Clock()
    watched = Watched()
    kept = take(40 * MIB)
    assert watched.takes_one()
    control.external_malloc(0, 500 * MIB)
    clock.pass_by(0.1)
    assert not watched.takes_one()
    return {**watched.figures(), "kept": kept.numel()}


def test_what_others_have_taken_since_a_snapshot_is_not_headroom(gpu):
    got = native(gpu, memory_taken_by_others)
    assert got["headroom"] == got["free"] == (1024 - 40 - 500) * MIB


@native.body
@expandable.body
def private_memory_since() -> dict:
    import torch
    from emulator import control

    watched = Watched(snapshot_share=1e-6)
    kept = [take(30 * MIB), take(3 * MIB)]
    got = {}
    for how in ("pool", "graph"):
        if how == "pool":
            assert watched.takes_one()
            pool = torch.cuda.MemPool()
            kept.append(pool)
            with torch.cuda.use_mem_pool(pool):
                private = take(200 * MIB)
        else:
            graph = torch.cuda.CUDAGraph()
            kept.append(graph)
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                private = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        del private  # it is idle, and the pool that lives keeps it
        assert not watched.takes_one()
        told = watched.figures()
        fits = control.would_fit(told["headroom"]), control.would_fit(told["headroom"] + 20 * MIB + 1)
        got[how] = [fits, "cached_free" in told, told["cached"]]
    graph.reset()  # in no statistics
    watched.collect()
    return {**got, "reset": watched.figures().get("split_free"), "kept": len(kept)}


@both_modes
def test_what_private_pools_hold_since_the_snapshot_is_neither_headroom_nor_cache_that_comes_back(
    gpu, together
):
    got = together(gpu, private_memory_since)
    pool, graph = got["pool"], got["graph"]
    assert pool[0] == graph[0] == [True, False]
    assert (pool[1], graph[1]) == (False, False)
    assert graph[2] - pool[2] >= 200 * MIB
    assert got["reset"] is None


@expandable.body
def cut_up_since() -> dict:
    from emulator import control

    watched = Watched(snapshot_share=1e-6)
    holes, kept = [], []
    for _ in range(5):
        holes.append(take(40 * MIB))
        kept.append(take(20 * MIB))
    holes.clear()
    assert watched.takes_one()
    before = watched.headroom
    kept += [take(25 * MIB) for _ in range(5)]  # of each hole less than a page remains
    assert not watched.takes_one()
    return {
        "before": before,
        "then": watched.headroom,
        "fits": control.would_fit(watched.headroom),
        "kept": len(kept),
    }


def test_of_pages_that_requests_have_cut_up_since_the_snapshot_none_is_counted_on(gpu):
    got = expandable(gpu, cut_up_since)
    assert got["before"] == (1024 - 5 * 20 - 4) * MIB  # less what is no whole page
    assert got["fits"]
    assert got["then"] == (1024 - 5 * 60 - 4) * MIB


@expandable.body
def less_than_a_page_left() -> dict:
    from emulator import control

    watched = Watched(snapshot_share=1e-6)
    kept = take(40 * MIB)
    assert watched.takes_one()
    control.external_malloc(0, watched.figures()["free"] - 19 * MIB)
    assert not watched.takes_one()
    return {"told": watched.headroom, "fits": control.would_fit(watched.headroom), "kept": kept.numel()}


def test_what_others_leave_is_no_headroom_where_it_is_no_whole_page(gpu):
    got = expandable(gpu, less_than_a_page_left)
    assert (got["told"], got["fits"]) == (MIB, True)


@native.body
def on_a_requests_thread() -> dict:
    survey.SOON, survey.IDLE_WAIT = 150.0, 30.0
    clock = Clock()
    watched = Watched()
    kept = fragment()
    first = watched.takes_one()
    clock.pass_by(100)
    began = time.perf_counter()
    with track("answer"):
        inside = [watched.takes_one(), watched.skipped]
        with request_elsewhere():
            inside.append(watched.takes_one())
        clock.pass_by(100)
        inside.append(watched.takes_one())
    seconds = time.perf_counter() - began
    clock.pass_by(100)
    return {"first": first, "in": inside, "seconds": seconds, "then": watched.takes_one(), "kept": len(kept)}


def test_a_request_that_flushes_its_telemetry_is_not_held_up(gpu):
    got = native(gpu, on_a_requests_thread)
    assert got["first"]
    assert got["in"] == [False, {"busy": 1}, False, False]
    assert got["seconds"] < 20  # not held up either
    assert got["then"]


# ---- captures ----


@native.body
@expandable.body
def beside_captures() -> dict:
    import torch

    clock = Clock()
    graphs = torch.cuda.graphs.CUDAGraph
    untouched = dict(vars(graphs))
    watched = Watched()
    replaced = sorted(name for name, entry in vars(graphs).items() if untouched.get(name) is not entry)
    kept = [fragment(), take(MIB)]
    got: dict = {"replaced": replaced}

    def capture(self, broken_by=None):
        graph = torch.cuda.CUDAGraph()
        kept.append(graph)  # one that was broken off may stay
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            kept.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
            self.stay()
            if broken_by is not None:
                raise broken_by

    with Elsewhere(capture):
        got["during"] = [watched.takes_one(), watched.skipped, watched.value("torch.memory.allocated") > 0]
        clock.pass_by(1000)
        got["long"] = watched.takes_one()
    got["after"] = watched.takes_one()

    def broken_off(self):
        try:
            capture(self, KeyError("the user's"))
        except KeyError:
            got["raised"] = True

    clock.pass_by(1000)
    with Elsewhere(broken_off):
        got["during a second"] = watched.takes_one()
        with request_elsewhere():  # it is overdue too
            got["beside a request"] = watched.takes_one()
    got["broken off"] = watched.takes_one()

    def invalidated(self):
        try:
            capture(self)
        except RuntimeError as error:
            got["invalidated"] = type(error).__name__

    clock.pass_by(1000)
    with Elsewhere(invalidated):
        # a cudaMalloc of another thread: no capture survives it
        ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(MIB))
        got["during a third"] = watched.takes_one()
    got["after an invalid one"] = watched.takes_one()

    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin()
    except RuntimeError:
        got["not on the default stream"] = True
    clock.pass_by(1000)
    got["never begun"] = watched.takes_one()

    # one that begins while a collection waits
    survey.IDLE_WAIT, survey.OVERDUE, survey.SOON = 20.0, math.inf, math.inf

    def meanwhile(self):
        request = track("answer")
        request.__enter__()
        self.there.set()
        time.sleep(0.3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            request.__exit__(None, None, None)
            assert self.go_on.wait(30)

    clock.pass_by(1000)
    captures_before = watched.skipped["capture"]
    with Elsewhere(meanwhile):
        got["meanwhile"] = [watched.takes_one(), watched.skipped["capture"] - captures_before]

    with Elsewhere(capture):  # uninstrumented in the middle of one
        TorchMemInstrumentor().uninstrument()
        got["restored"] = dict(vars(graphs)) == untouched
        TorchMemInstrumentor().instrument(meter_provider=watched.provider)
    clock.pass_by(1000)
    got["again"] = watched.collect().headroom is not None
    captures_before = watched.skipped["capture"]
    with Elsewhere(capture):
        clock.pass_by(1000)
        watched.collect()
        got["again during"] = watched.skipped["capture"] - captures_before
    TorchMemInstrumentor().uninstrument()
    got["restored again"] = dict(vars(graphs)) == untouched
    return got


@both_modes
def test_never_during_a_capture_on_any_thread_and_none_that_was_broken_off_is_in_the_way(gpu, together):
    got = together(gpu, beside_captures)
    assert {"capture_begin", "capture_end"} <= set(got["replaced"])
    assert got["during"] == [False, {"capture": 1}, True]
    assert (got["long"], got["after"]) == (False, True)
    assert got["raised"]
    assert (got["during a second"], got["beside a request"], got["broken off"]) == (False, False, True)
    assert got["invalidated"]
    assert (got["during a third"], got["after an invalid one"]) == (False, True)
    assert got["not on the default stream"]
    assert got["never begun"]
    assert got["meanwhile"] == [False, 1]
    assert got["restored"]
    assert got["again"]
    assert got["again during"] == 1
    assert got["restored again"]


@native.body
def a_capture_that_begins_late() -> dict:
    import torch

    clock = Clock()
    watched = Watched()
    kept = [fragment()]

    def capture(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            self.stay()
        kept.append(graph)

    elsewhere = Elsewhere(capture)
    fraction, snapshot, taken = source.Source.memory_fraction, source.Source.snapshot, []

    def lets_another_thread_in(self, index):
        if not elsewhere.there.is_set():
            elsewhere.__enter__()
        return fraction(self, index)

    def counted(self):
        taken.append(elsewhere.go_on.is_set())
        return snapshot(self)

    source.Source.memory_fraction, source.Source.snapshot = lets_another_thread_in, counted
    during = [watched.collect().headroom, watched.skipped]
    elsewhere.__exit__()
    clock.pass_by(1000)
    then = watched.collect().headroom
    source.Source.memory_fraction, source.Source.snapshot = fraction, snapshot
    return {"during": during, "then": then is not None, "taken": taken}


def test_a_capture_that_begins_just_before_a_snapshot_has_it_put_off(gpu):
    got = native(gpu, a_capture_that_begins_late)
    assert got == {"during": [None, {"capture": 1}], "then": True, "taken": [True]}


def set_unseen(told: bool) -> list:
    """Options that were set before anybody looked, where the runtime tells the last string and where not."""
    import torch

    kept = take(1)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.9")
    if not told:
        del torch._C._accelerator_getAllocatorSettings
    watched = Watched()
    grown = take(30 * MIB)
    return [watched.collect().all("torch.memory.allocator.info")[0][0], kept.numel() + grown.numel()]


@pytest.mark.parametrize("told", [True, False], ids=["told", "by a release that does not tell"])
def test_settings_that_were_set_unseen_are_told_by_the_snapshots_word(gpu, told):
    info, _ = gpu.run(set_unseen, args=[told], memory="1GiB")
    assert info["torch.memory.expandable_segments"] is True
    assert info["torch.memory.garbage_collection_threshold"] == 0.9


def made_graph_class():
    class CUDAGraph:
        def capture_begin(self, fails=False):
            if fails:
                raise RuntimeError("begin")

        def capture_end(self, fails=False):
            if fails:
                raise RuntimeError("end")

    return CUDAGraph


def test_a_capture_ends_however_it_ends():
    graphs = SimpleNamespace(CUDAGraph=made_graph_class())
    watch = captures.CaptureWatch()
    watch.install(graphs)
    graph, other = graphs.CUDAGraph(), graphs.CUDAGraph()
    graph.capture_begin()
    other.capture_begin()
    assert watch.under_way
    graph.capture_end()
    assert watch.under_way
    with pytest.raises(RuntimeError, match="end"):
        other.capture_end(fails=True)
    assert not watch.under_way
    with pytest.raises(RuntimeError, match="begin"):
        graph.capture_begin(fails=True)
    assert not watch.under_way
    graph.capture_begin()
    del graph  # never ended, and gone
    assert not watch.under_way


def test_what_somebody_has_wrapped_since_stays_theirs():
    graphs = SimpleNamespace(CUDAGraph=made_graph_class())
    entries = dict(vars(graphs.CUDAGraph))
    watch = captures.CaptureWatch()
    watch.install(graphs)
    watch.install(graphs)  # twice is once
    ours = vars(graphs.CUDAGraph)["capture_begin"]

    @functools.wraps(ours)
    def theirs(self, *arguments):
        return ours(self, *arguments)

    graphs.CUDAGraph.capture_begin = theirs
    watch.remove()
    assert vars(graphs.CUDAGraph)["capture_begin"] is theirs
    assert vars(graphs.CUDAGraph)["capture_end"] is entries["capture_end"]
    graph = graphs.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()


@pytest.mark.parametrize("graphs", [SimpleNamespace(), SimpleNamespace(CUDAGraph=type("CUDAGraph", (), {}))])
def test_a_release_without_these_ends_is_left_alone(graphs):
    watch = captures.CaptureWatch()
    watch.install(graphs)
    assert not watch.under_way
    watch.remove()


# ---- pools with an allocator of their own ----


def beside_a_pluggable_pool(library: str, sampling: str) -> dict:
    import torch

    clock = Clock()
    watched = Watched(sampling=sampling)
    kept = fragment()
    first, headroom = watched.takes_one(), watched.headroom
    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
    pool = torch.cuda.MemPool(allocator.allocator())
    told = []
    for _ in range(6):
        clock.pass_by(100)
        told.append([watched.takes_one(), watched.headroom == headroom, watched.age is not None])
    return {"first": first, "told": told, "skipped": watched.skipped, "kept": [len(kept), str(pool.id)]}


def test_never_beside_a_pool_with_an_allocator_of_its_own(gpu, pluggable):
    got = gpu.run(beside_a_pluggable_pool, args=[pluggable, "auto"], memory="2GiB")
    assert got["first"]
    # nothing that could be read bears out what was known until then
    assert got["told"] == [[False, False, True]] * 6
    assert got["skipped"]["unsafe"] == 6


def pools_made_before() -> list:
    import torch

    from opentelemetry_instrumentation_torchmem.allocator.pools import PoolWatch

    class OlderPool:
        """Before torch 2.9 one told its allocator."""

        def __init__(self, allocator=None) -> None:
            self.allocator = allocator

    torch.cuda.init()
    kept = [take(MIB), OlderPool()]
    told = []
    for allocator in (None, object()):
        kept.append(OlderPool(allocator))
        watch = PoolWatch()
        watch.install(SimpleNamespace(MemPool=OlderPool))
        captures.note_older(watch)
        told.append(watch.suspect)
        watch.remove()
    watched = Watched()
    kept.append(torch.cuda.MemPool())
    TorchMemInstrumentor().uninstrument()
    watched = Watched()
    told.append(watched.collect().headroom is None)
    TorchMemInstrumentor().uninstrument()
    kept.append(torch.cuda.MemPool())
    told.append(Watched().collect().headroom is None)
    return [told, len(kept)]


def test_a_pool_made_before_is_suspect_unless_it_was_seen_or_tells_that_it_has_no_allocator(gpu):
    told, _ = gpu.run(pools_made_before, memory="1GiB")
    assert told == [False, True, False, True]


def one_walk() -> list:
    import gc

    import torch

    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    with torch.cuda.graph(graph, pool=pool.id):
        kept = take(MIB)
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        kept = [kept, take(MIB)]
    walks = []
    walk = gc.get_referrers

    def counted(*classes):
        walks.append([each.__name__ for each in classes])
        return walk(*classes)

    gc.get_referrers = counted
    TorchMemInstrumentor().instrument()
    gc.get_referrers = walk
    owned = rooms.wired().captures.owned()
    known = {reference() for reference in pools.LIVING}
    return [walks, owned == {(0, graph.pool()), (0, other.pool())}, known == {graph, other, pool}, len(kept)]


def test_what_was_made_before_is_found_in_one_walk_over_the_heap(gpu):
    walks, owned, known, _ = gpu.run(one_walk, memory="1GiB")
    assert walks == [["MemPool", "_CUDAAllocator", "CUDAPluggableAllocator", "CUDAGraph"]]
    assert owned
    assert known


def test_beside_such_a_pool_the_user_may_insist(gpu, pluggable):
    got = gpu.run(beside_a_pluggable_pool, args=[pluggable, "always"], memory="2GiB")
    assert got["first"]
    assert got["told"] == [[True, True, True]] * 6
    assert "unsafe" not in got["skipped"]


# ---- the user's memory history ----


def entries() -> int:
    import torch

    traces = torch.cuda.memory._snapshot()["device_traces"]
    return sum(entry["action"] != "snapshot" for trace in traces for entry in trace)


@native.body
def beside_a_memory_history() -> dict:
    import torch

    clock = Clock()
    watched = Watched()
    kept = [take(1000) for _ in range(2000)]
    got: dict = {"without": watched.takes_one(), "headroom": watched.headroom}
    got["switched on"] = entries()

    def least(times: int = 7) -> float:
        costs = []
        for _ in range(times):
            clock.pass_by(3600)
            before = watched.spent
            costs.append(watched.collect().spent - before)
        return min(costs)

    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    kept += [take(1000) for _ in range(2000)]
    clock.pass_by(3600)
    before = watched.spent
    watched.collect()
    got["first"] = watched.spent - before
    clock.pass_by(survey.OVERDUE + 1)
    got["a minute later"] = watched.takes_one()
    got["few"] = least()
    own = entries()
    for _ in range(20_000):
        take(1000)
    got["many entries"] = entries()
    got["expected"] = own + 60_000
    got["many"] = least()
    began = time.perf_counter()
    got["after"] = entries()
    got["whole"] = time.perf_counter() - began
    take(1000)
    got["still on"] = entries() - got["after"]
    torch.cuda.memory._record_memory_history(enabled=None)
    clock.pass_by(3600)
    got["then"] = watched.takes_one()
    before = entries()
    take(1000)
    got["off"] = entries() - before
    return {**got, "kept": len(kept)}


def test_the_users_memory_history_is_neither_switched_nor_copied(gpu):
    got = native(gpu, beside_a_memory_history)
    print({name: got[name] for name in ("first", "few", "many", "whole")})
    assert got["without"]
    assert got["headroom"] > 0
    assert got["switched on"] == 0
    assert got["a minute later"]  # whatever torch had to import for the first stacks
    assert got["many entries"] == got["after"] == got["expected"]
    assert got["still on"] == 3
    assert got["then"]
    assert got["off"] == 0
    assert got["many"] < 2 * got["few"] + 0.005
    assert got["many"] < got["whole"] / 5


# ---- the figures ----


def shuffled(seed: int, states: int):
    """Random states, one after another: each is yielded once it is there."""
    import torch

    choose = random.Random(seed)
    side = torch.cuda.Stream()
    kept = []
    for _ in range(states):
        for _ in range(choose.randrange(5, 40)):
            if kept and choose.random() < 0.48:
                kept.pop(choose.randrange(len(kept)))
                continue
            size = choose.choice([choose.randrange(1, MIB), choose.randrange(MIB, 40 * MIB)])
            try:
                kept.append(take(size, side if choose.random() < 0.15 else None))
            except torch.OutOfMemoryError:
                kept = kept[::2]
        yield


@native.body
@expandable.body
def headroom_against_the_allocator() -> list:
    from emulator import control

    clock = Clock()
    watched = Watched()
    control.external_malloc(0, 100 * MIB)
    told = []
    for _ in shuffled(3, 20):
        clock.pass_by(3600)
        assert watched.takes_one()
        headroom = watched.headroom
        more = [headroom + 1, headroom + 20 * MIB + 1]
        told.append([headroom, control.would_fit(headroom), *map(control.would_fit, more)])
    return told


@both_modes
def test_a_request_of_the_headroom_succeeds_and_one_of_a_page_more_fails(gpu, together):
    told = together(gpu, headroom_against_the_allocator)
    assert len({headroom for headroom, *_ in told}) > 10
    assert all(fits for _, fits, _, _ in told)
    assert not any(page_more for *_, page_more in told)
    if together is native:
        assert not any(byte_more for _, _, byte_more, _ in told)


@native.body
@expandable.body
def ledger_against_empty_cache() -> list:
    import torch

    clock = Clock()
    watched = Watched()
    told = []
    for _ in shuffled(5, 40):
        clock.pass_by(3600)
        assert watched.takes_one()
        ledger = watched.ledger()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        statistics = torch.cuda.memory_stats()
        left = torch.cuda.memory_reserved() - statistics["active_bytes.all.current"]
        told.append(
            {
                "split_free": [ledger["split_free"], left],
                "cached_free": [ledger["cached_free"], reserved - torch.cuda.memory_reserved()],
                "fragmentation": [watched.value("torch.memory.fragmentation"), left / reserved],
                "states": [sum(ledger.values()), 1 << 30],
            }
        )
    return told


@both_modes
def test_the_ledger_and_fragmentation_are_what_empty_cache_leaves_and_gives_back(gpu, together):
    told = together(gpu, ledger_against_empty_cache)
    assert sum(state["split_free"][1] > 0 for state in told) > 30
    assert sum(state["cached_free"][1] > 0 for state in told) > 20
    for state in told:
        assert all(ours == theirs for ours, theirs in state.values()), state


@expandable.body
def the_same_sums_elsewhere() -> list:
    import torch

    clock = Clock()
    watched = Watched()
    first, second, third = take(10 * MIB), take(10 * MIB), take(20 * MIB)  # two pages
    del third
    told = [watched.collect().ledger()]
    del second
    across = take(20 * MIB)  # from the middle of the first page to that of the second
    del first
    told.append(watched.collect().ledger())
    clock.pass_by(3600)
    told.append(watched.collect().ledger())
    torch.cuda.empty_cache()
    return [*told, torch.cuda.memory_reserved(), across.numel()]


def test_a_snapshot_of_the_same_sums_and_another_moment_splits_no_ledger(gpu):
    told = expandable(gpu, the_same_sums_elsewhere)
    before, moved, looked, reserved, allocated = told
    sums = {"allocated": 20 * MIB, "pending_free": 0, "external": 0, "free": (1024 - 40) * MIB}
    assert before == {**sums, "split_free": 0, "cached_free": 20 * MIB}
    assert moved == {**sums, "cached": 20 * MIB}
    assert looked == {**sums, "split_free": 20 * MIB, "cached_free": 0}
    assert reserved - allocated == 20 * MIB


# ---- private pools, settings ----


def absences(watched) -> list[str]:
    points = watched.all("torch.memory.telemetry.absent")
    return sorted(labels["torch.memory.telemetry.absence"] for labels, count in points if count)


@native.body
@expandable.body
def pools_with_owners() -> dict:
    import torch

    before = take(70 * MIB)
    older = torch.cuda.CUDAGraph()  # captured before anybody watched
    with torch.cuda.graph(older):
        take(60 * MIB, torch.cuda.current_stream())
    clock = Clock()
    watched = Watched()

    def look() -> dict:
        clock.pass_by(3600)
        assert watched.takes_one()
        return {**watched.figures(), "absent": absences(watched)}

    def left() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - torch.cuda.memory_stats()["active_bytes.all.current"]

    told = {"older": [look(), left()]}
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    with torch.cuda.graph(graph):
        take(80 * MIB, torch.cuda.current_stream())
    with torch.cuda.use_mem_pool(pool):
        inside = take(20 * MIB)
        take(40 * MIB)
    holes = [take(3 * MIB) for _ in range(10)][::2]
    told["owned"] = [look(), left()]
    graph.reset()
    told["reset"] = [look(), left()]
    told["flushed"] = [look(), left()]
    return {**told, "kept": [len(holes), inside.numel(), before.numel(), pool.use_count()]}


@both_modes
def test_free_memory_of_graphs_and_pools_that_live_is_trapped_and_of_others_it_is_not_said(gpu, together):
    got = together(gpu, pools_with_owners)
    for name in ("older", "owned", "flushed"):
        told, left = got[name]
        assert left >= 60 * MIB
        assert (told["split_free"], told["fragmentation"]) == (left, left / told["reserved"]), name
        assert "private_pools" not in told["absent"]
    told, _ = got["reset"]
    assert told["fragmentation"] is told.get("split_free") is None
    assert told["cached"] == told["reserved"] - told["active"]
    assert "private_pools" in told["absent"]
    assert told["headroom"] >= told["free"] - 20 * MIB


def free_memory_of_a_pool(snapshot_share: float) -> list:
    import torch

    clock, traced = Clock(), Traced()
    watched = Watched(snapshot_share=snapshot_share, tracer_provider=traced.provider)
    pool = torch.cuda.MemPool()
    kept = take(100 * MIB)
    with torch.cuda.use_mem_pool(pool):
        take(400 * MIB)
    told = []
    for size in (10 * MIB, 100 * MIB):
        with track("answer"):
            take(size)
        clock.pass_by(30)
        watched.collect()
        told.append([traced.spans[-1].attributes.get("torch.memory.fragmentation"), watched.figures()])
        pool = None
    return [*told, kept.numel()]


@pytest.mark.parametrize("snapshot_share", [0.001, 0])
def test_free_memory_of_a_pool_in_use_is_in_every_figure_of_fragmentation_or_in_none(gpu, snapshot_share):
    (span, with_pool), (span_after, without), _ = gpu.run(
        free_memory_of_a_pool, args=[snapshot_share], memory="1GiB"
    )
    assert span is None
    if snapshot_share:
        trapped = with_pool["split_free"]
        assert trapped >= 400 * MIB
        assert with_pool["fragmentation"] == trapped / with_pool["reserved"]
    else:
        assert with_pool["fragmentation"] is None
        assert with_pool["cached"] == with_pool["reserved"] - with_pool["active"]
    assert span_after == without["fragmentation"] == without["split_free"] == 0


def on_two_devices() -> dict:
    import torch

    older = torch.cuda.MemPool()  # of which device it is nobody can tell
    clock = Clock()
    watched = Watched(sampling="always")
    pool = torch.cuda.MemPool()
    kept = []
    for device in (0, 1):
        with torch.cuda.use_mem_pool(pool, device=device):
            kept.append(torch.empty(20 * MIB, dtype=torch.uint8, device=f"cuda:{device}"))
            torch.empty(20 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
    clock.pass_by(3600)
    watched.collect()
    told = [watched.ledger(f"cuda:{device}").get("split_free") for device in (0, 1)]
    with torch.cuda.use_mem_pool(older, device=0):
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    clock.pass_by(3600)
    watched.collect()
    return {"told": told, "then": watched.ledger("cuda:0").get("split_free"), "kept": len(kept)}


def test_a_pool_has_an_owner_on_the_device_it_was_made_on_alone(gpu):
    got = gpu.run(on_two_devices, memory="1GiB", devices=2, alloc_conf=EXPANDABLE)
    assert got["told"] == [20 * MIB, None]
    assert got["then"] is None


@native.body
def settings_at_run_time() -> list:
    import torch
    from emulator import control

    clock = Clock()
    watched = Watched()
    told = []
    for text in ("expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"):
        torch._C._accelerator_setAllocatorSettings(text)
        kept = [take(30 * MIB) for _ in range(3)]
        del kept[::2]
        clock.pass_by(3600)
        assert watched.takes_one()
        told.append(
            [watched.headroom, *map(control.would_fit, (watched.headroom, watched.headroom + 40 * MIB))]
        )
    return told


def test_settings_that_came_one_after_another_at_run_time_are_all_reckoned_with(gpu):
    """The runtime tells the string that was set last: by that alone expandable segments would be off."""
    told = native(gpu, settings_at_run_time)
    assert [fits for _, *fits in told] == [[True, False]] * 3
    assert all(headroom > 800 * MIB for headroom, *_ in told)


@native.body
def options_that_no_snapshot_holds() -> list:
    import torch
    from emulator import control

    clock = Clock()
    watched = Watched()
    told = []
    for text in ("large_segment_size_mb:40", "garbage_collection_threshold:0.9"):
        torch._C._accelerator_setAllocatorSettings(text)
        kept = take(996 * MIB)
        clock.pass_by(3600)
        assert watched.takes_one()
        told.append([watched.headroom, *map(control.would_fit, (watched.headroom, 5 * MIB))])
        del kept
        torch.cuda.empty_cache()
    return told


def test_a_segment_size_that_was_set_at_run_time_counts_after_other_settings_too(gpu):
    """In 28 MiB that are left fit 28, and not 5, which ask for 40 then."""
    assert native(gpu, options_that_no_snapshot_holds) == [[28 * MIB, True, False]] * 2


def bounds_that_changed(how: str) -> list:
    """Told at a snapshot, and told again when only what bounds the process has changed."""
    import torch
    from emulator import control

    clock = Clock()
    watched = Watched()
    if how != "fraction":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    blocks = [take(100 * MIB) for _ in range(8)]
    clock.pass_by(3600)
    del blocks[1::2]
    assert watched.takes_one()
    before = watched.headroom, watched.value("torch.memory.free_block.largest", pool="large")
    if how == "fraction":
        torch.cuda.set_per_process_memory_fraction(0.85)
    else:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert not watched.takes_one()
    after = watched.headroom, watched.value("torch.memory.free_block.largest", pool="large")
    absences = [
        labels["torch.memory.telemetry.absence"] for labels, _ in watched.all("torch.memory.telemetry.absent")
    ]
    fits = [None if size is None else control.would_fit(size) for size in after]
    clock.pass_by(3600)
    assert watched.takes_one()
    return [before, after, fits, absences, watched.headroom, control.would_fit(watched.headroom)]


def test_a_fraction_that_was_set_since_the_snapshot_counts_at_once(gpu):
    before, after, fits, absences, later, later_fits = gpu.run(
        bounds_that_changed, args=["fraction"], memory="1GiB"
    )
    assert before == [624 * MIB, 100 * MIB]
    assert after == [470 * MIB, 100 * MIB]
    assert fits == [True, True]
    assert absences == ["allocator_settings"]
    assert (later, later_fits) == (470 * MIB, True)


def test_after_a_change_of_settings_nothing_is_told_to_succeed_before_the_next_snapshot(gpu):
    before, after, _, absences, later, later_fits = gpu.run(
        bounds_that_changed, args=["settings"], memory="1GiB"
    )
    assert before[1] == 100 * MIB
    assert after == [None, None]
    assert "allocator_settings" in absences
    assert later_fits
    assert later > 0


@native.body
def settings_made_before() -> list:
    import torch

    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:40")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    watched = Watched()
    kept = take(30 * MIB)
    assert watched.takes_one()
    return [
        watched.headroom,
        watched.figures()["fragmentation"],
        kept.numel(),
        watched.all("torch.memory.telemetry.absent"),
    ]


def test_settings_that_nobody_saw_leave_the_headroom_out_and_say_so(gpu):
    headroom, fragmentation, _, absent = native(gpu, settings_made_before)
    assert headroom is None
    assert fragmentation == 0
    assert [(labels["torch.memory.telemetry.absence"], count) for labels, count in absent] == [
        ("allocator_settings", 1)
    ]


# ---- other backends ----


def on_another_backend(library: str | None) -> dict:
    import torch

    if library is not None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
        torch.cuda.memory.change_current_allocator(allocator)
    watched = Watched()
    kept = take(30 * MIB)
    with request_elsewhere():
        watched.collect()
    watched.collect()
    return {
        "backend": watched.all("torch.memory.allocator.info")[0][0]["torch.memory.backend"],
        "spent": watched.spent,
        "skipped": watched.skipped,
        "names": sorted(watched.names),
        "kept": kept.numel(),
    }


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable", "uncached"])
def test_other_backends_have_no_snapshots_and_count_none(gpu, pluggable, backend):
    got = gpu.run(
        on_another_backend,
        args=[pluggable if backend == "pluggable" else None],
        memory="2GiB",
        alloc_conf="backend:cudaMallocAsync" if backend == "cudaMallocAsync" else None,
        env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1" if backend == "uncached" else None},
    )
    assert got["backend"] == backend
    assert (got["spent"], got["skipped"]) == (0, {})
    names = {name.removeprefix("torch.memory.") for name in got["names"]}
    of_snapshots = {"headroom", "free_block.largest", "private_pool.reserved", "snapshot.age"}
    assert not names & (of_snapshots | {"fragmentation", "telemetry.absent"})
