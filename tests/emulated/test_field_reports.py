# SPDX-License-Identifier: Apache-2.0
"""Reports from the field, each one's shape small on the real allocator: what would have shown it in time.

Each report is a body that runs the shape to its failure and tells what was exported on the way, and a check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from together import Together
from watched import Clock, Watched, take

from opentelemetry_instrumentation_torchmem.requests.track import track

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
TOTAL = 1 << 30
MODES = {
    "native": Together(memory="1GiB", timeout=150),
    "expandable": Together(memory="1GiB", alloc_conf="expandable_segments:True", timeout=150),
}

Told = dict[str, Any]
Check = Callable[[Told], None]
_reports: list[tuple[str, str, Callable[[], Told], Check]] = []


def report(name: str, check: Check, modes: tuple[str, ...] = ("native", "expandable")):
    """A body that reproduces a report's shape, and what must have been seen of it."""

    def registered(body: Callable[[], Told]) -> Callable[[], Told]:
        for mode in modes:
            MODES[mode].body(body)
            _reports.append((name, mode, body, check))
        return body

    return registered


class Seen:
    """What was exported, collection by collection, a minute apart: each with a snapshot of its own."""

    def __init__(self, **options) -> None:
        self.clock = Clock()
        self.watched = Watched(**options)

    def look(self) -> Told:
        self.clock.pass_by(3600)
        assert self.watched.takes_one()
        return self.watched.figures()


def verdicts(seen: Seen) -> dict[str, int]:
    points = seen.watched.all("torch.memory.oom.verdicts")
    return {labels["torch.memory.oom.verdict"]: count for labels, count in points if count}


def fails(size: int, stream=None) -> bool:
    import torch

    try:
        take(size, stream)
    except torch.cuda.OutOfMemoryError:
        return True
    return False


# ---- no block is large enough ----


def half_unusable_seen(got: Told) -> None:
    before = got["before"]
    assert got["failed"]
    assert before["split_free"] == 450 * MIB
    if got["mode"] == "native":
        assert before["inactive_split"] == 450 * MIB
    assert before["largest"] == 18 * MIB  # against those 450
    assert before["headroom"] < got["wanted"] < before["split_free"] + before["free"]
    assert got["before the holes"]["headroom"] >= got["wanted"]


@report("pytorch#35901: half the device unusable, a big segment split by small blocks", half_unusable_seen)
def half_unusable() -> Told:
    seen = Seen()
    wanted = 600 * MIB
    take(500 * MIB)  # one big segment, free again
    first = seen.look()
    kept = [take(size * MIB) for _ in range(25) for size in (2, 18)]
    del kept[1::2]
    return {
        "mode": "native" if seen.watched.value("torch.memory.inactive_split") is not None else "expandable",
        "before the holes": first,
        "before": seen.look(),
        "wanted": wanted,
        "failed": fails(wanted),
        "kept": len(kept),
    }


def in_pieces_seen(got: Told) -> None:
    before = got["before"]
    unallocated = before["free"] + before["split_free"] + before["cached_free"]
    assert got["failed"]
    assert unallocated > got["wanted"]
    assert before["largest"] == before["headroom"] == got["fitted"]
    assert got["fitted"] < 12 * MIB < got["wanted"]
    assert before["ooms"] == 0


@report(
    "vLLM#27466, vLLM PR 37428, kaito#976, Mask2DiT#4: more unallocated than wanted, in pieces",
    in_pieces_seen,
)
def in_pieces() -> Told:
    import torch
    from emulator import control

    seen = Seen()
    kept = [take(9 * MIB) for _ in range(100)]
    del kept[1::2]
    free, _ = torch.cuda.mem_get_info()
    control.external_malloc(0, free - 4 * MIB)
    before = seen.look()
    fitted = before["headroom"]
    return {
        "before": before,
        "wanted": 384 * MIB,
        "failed": fails(384 * MIB),
        "fitted": fitted if control.would_fit(fitted) and not control.would_fit(fitted + 1) else None,
        "kept": len(kept),
    }


def after_a_clean_warm_up_seen(got: Told) -> None:
    warm, *minutes = got["minutes"]
    assert got["failed"]
    assert warm["headroom"] >= got["wanted"]
    idle = [minute["reserved"] - minute["active"] for minute in minutes]
    assert idle == sorted(set(idle))
    assert idle[-1] > 0.5 * TOTAL
    assert minutes[-1]["slack"] > 0.9
    assert minutes[-1]["active"] < 0.05 * TOTAL  # what the requests themselves hold
    assert minutes[-1]["headroom"] < got["wanted"]
    below = [minute["headroom"] < got["wanted"] for minute in minutes]
    assert below == sorted(below)  # once it is below it stays
    assert sum(below) >= 3  # collections before it fails


@report("TGI PR 557, TGI#2744: out of memory after a clean warm-up", after_a_clean_warm_up_seen, ("native",))
def after_a_clean_warm_up() -> Told:
    import torch

    seen = Seen()
    wanted = 300 * MIB
    take(wanted)  # the warm-up, and the clean slate after it
    torch.cuda.empty_cache()
    take(2 * MIB)
    kept, minutes = [], [seen.look()]
    for step in range(16):
        longest = 40 + 2 * step
        take(longest * MIB)  # each batch a little longer than all before
        batch = take((longest - 2) * MIB)
        kept.append(take(2 * MIB))  # and something of it stays: in the remainder
        del batch
        minutes.append(seen.look())
    return {"minutes": minutes, "wanted": wanted, "failed": fails(wanted), "kept": len(kept)}


# ---- freed, and not yet free ----


def held_by_a_side_stream_seen(got: Told) -> None:
    for step, minute in enumerate(got["minutes"], 1):
        assert minute["allocated"] == 0
        assert minute["reserved"] == minute["active"] == minute["pending_free"] == step * 100 * MIB
        assert minute["slack"] == 0  # it is no cache
    after = got["after"]
    assert (after["pending_free"], after["active"]) == (0, 0)
    assert after["cached_free"] == after["reserved"] == 700 * MIB


@report(
    "pytorch#71616, pytorch#147168: allocated far under reserved, by record_stream",
    held_by_a_side_stream_seen,
)
def held_by_a_side_stream() -> Told:
    import torch
    from emulator import control

    seen = Seen()
    side = torch.cuda.Stream()
    control.hold(side)
    minutes = []
    for _ in range(7):
        tensor = take(100 * MIB)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1)
        tensor.record_stream(side)
        del tensor
        minutes.append(seen.look())
    control.release(side)
    take(100 * MIB)  # the allocator looks at its events when it is asked for memory
    return {"minutes": minutes, "after": seen.look()}


def fitting_block_pending_seen(got: Told) -> None:
    before = got["before"]
    assert got["failed"]
    assert got["fits"] == [False, True]  # until the events are seen to have completed
    assert before["pending_free"] == got["wanted"]
    assert before["headroom"] < got["wanted"]
    assert got["verdicts"] == {"pending_frees": 1}


@report("pytorch#189504: out of memory although a fitting block is pending", fitting_block_pending_seen)
def fitting_block_pending() -> Told:
    import torch
    from emulator import control

    seen = Seen()
    wanted = 12 * MIB
    side = torch.cuda.Stream()
    filler = take(1000 * MIB)
    take(20 * MIB)  # one segment, or one page
    freed, beside = take(wanted), take(8 * MIB)
    rest = torch.cuda.mem_get_info()[0]
    control.external_malloc(0, rest - 2 * MIB)
    control.hold(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
    freed.record_stream(side)
    del freed
    before = seen.look()
    fits = [control.would_fit(wanted)]
    failed = fails(wanted)
    fits.append(control.would_fit(wanted))
    seen.look()
    return {
        "before": before,
        "wanted": wanted,
        "fits": fits,
        "failed": failed,
        "verdicts": verdicts(seen),
        "kept": filler.numel() + beside.numel(),
    }


# ---- retries ----


def recovered_seen(got: Told) -> None:
    retries = [minute["allocation.retries"] for minute in got["minutes"]]
    assert retries == [0, 5, 10, 15]
    for minute in got["minutes"]:
        assert (minute["ooms"], minute["verdicts"]) == (0, 0)
    assert got["told"] == []  # nothing in the log either


@report("pytorch#193195: recoverable failures flood the log", recovered_seen)
def recovered() -> Told:
    import logging

    import torch

    told: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    logging.getLogger().addHandler(Kept())
    seen = Seen()
    streams = [None, torch.cuda.Stream()]
    take(700 * MIB, streams[1])
    minutes = [seen.look()]
    for turn in range(15):  # each finds the device full of the other's cache
        take(700 * MIB, streams[turn % 2])
        if turn % 5 == 4:
            minutes.append(seen.look())
    return {"minutes": minutes, "told": told}


def throughput_seen(got: Told) -> None:
    well, ill = got["well"], got["ill"]
    assert well["requests"] == ill["requests"] == 10
    assert (well["retries"], ill["retries"]) == (0, 10)  # in the requests, and on the device
    assert ill["device"] == 10
    assert ill["seconds"] > 3 * well["seconds"]
    assert ill["ooms"] == 0


@report("composer PR 1998: throughput collapses under retries", throughput_seen)
def throughput() -> Told:
    import torch
    from emulator import control

    seen = Seen()
    streams = [None, torch.cuda.Stream()]
    control.pause("cudaMalloc", 0, 40)  # waiting for the driver is what a retry costs
    control.pause("cuMemCreate", 0, 2)

    def minute(sizes) -> Told:
        def totals() -> list:
            seen.look()
            points = seen.watched.points("torch.memory.request.duration")
            return [
                sum(point.count for point in points),
                sum(point.sum for point in points),
                seen.watched.value("torch.memory.request.retries") or 0,
                seen.watched.value("torch.memory.allocation.retries"),
                seen.watched.value("torch.memory.ooms"),
            ]

        before = totals()
        for turn, size in enumerate(sizes):
            with track("answer"):
                take(size * MIB, streams[turn % 2])
        changed = [now - then for then, now in zip(before, totals(), strict=True)]
        return dict(zip(("requests", "seconds", "retries", "device", "ooms"), changed, strict=True))

    for stream in streams:
        take(400 * MIB, stream)
    well = minute([400] * 10)
    take(700 * MIB, streams[1])
    return {"well": well, "ill": minute([700] * 10)}


# ---- held by private pools ----


def graphs_seen(got: Told) -> None:
    held = [minute["private_pool.reserved"] for minute in got["minutes"]]
    assert held[0] == 0
    assert held == sorted(set(held))  # each capture adds
    assert held[-1] >= 600 * MIB
    last = got["minutes"][-1]
    assert got["failed"]
    assert last["headroom"] < got["wanted"] <= got["minutes"][0]["headroom"]
    assert last["reserved"] - last["allocated"] >= 500 * MIB  # which looks free, and is not


@report("pytorch#121932, vLLM PR 41268: gigabytes in private pools", graphs_seen)
def graphs() -> Told:
    import torch

    seen = Seen()
    wanted = 600 * MIB
    take(2 * MIB)
    minutes, kept = [seen.look()], []
    for _ in range(6):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            take(100 * MIB, torch.cuda.current_stream())
        kept.append(graph)
        minutes.append(seen.look())
    return {"minutes": minutes, "wanted": wanted, "failed": fails(wanted), "kept": len(kept)}


def in_a_pool_seen(got: Told) -> None:
    before = got["before"]
    assert got["failed"]
    assert got["fits elsewhere"]  # in a pool of its own making the same request succeeds
    assert before["private_pool.reserved"] == 600 * MIB
    assert before["allocated"] == 0  # all of it is free, and stays the pool's
    assert before["headroom"] == before["free"] < got["wanted"] < before["free"] + 600 * MIB
    assert got["verdicts"] == {"fragmented": 1}  # of the pool that the request asked


@report("pytorch#159674: out of memory under use_mem_pool, its own cache kept", in_a_pool_seen, ("native",))
def in_a_pool() -> Told:
    import torch

    seen = Seen()
    wanted = 700 * MIB
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        take(600 * MIB)
        before = seen.look()
        failed = fails(wanted)
        seen.look()
    told = {"before": before, "wanted": wanted, "failed": failed, "verdicts": verdicts(seen)}
    del pool
    return {**told, "fits elsewhere": not fails(wanted)}


# ---- outside of PyTorch ----


def nccl_seen(got: Told) -> None:
    taken = [minute["external"] for minute in got["minutes"]]
    assert [size - taken[0] for size in taken] == [step * 90 * MIB for step in range(7)]
    assert len({minute["reserved"] for minute in got["minutes"]}) == 1  # while PyTorch's own is flat
    assert len({minute["allocated"] for minute in got["minutes"]}) == 1
    last = got["minutes"][-1]
    assert got["failed"]
    assert last["headroom"] < got["wanted"] <= got["minutes"][0]["headroom"]
    assert last["ooms"] == 0


@report("nccl#1234, vLLM PR 5091: memory that NCCL takes", nccl_seen)
def nccl() -> Told:
    from emulator import control

    seen = Seen()
    wanted = 300 * MIB
    kept = take(300 * MIB)
    minutes = [seen.look()]
    for _ in range(6):
        control.external_malloc(0, 90 * MIB)
        minutes.append(seen.look())
    return {"minutes": minutes, "wanted": wanted, "failed": fails(wanted), "kept": kept.numel()}


# ---- only cache ----


def only_cache_seen(got: Told) -> None:
    minutes = got["minutes"]
    reserved = [minute["reserved"] for minute in minutes]
    assert reserved == sorted(reserved)  # it ratchets
    assert len({minute["allocated"] for minute in minutes}) == 1
    for minute in minutes:
        assert minute["cached_free"] == minute["reserved"] - 200 * MIB
        assert (minute["split_free"], minute["pending_free"], minute["external"]) == (0, 0, 0)
        assert minute["fragmentation"] == 0
        assert minute["headroom"] >= 800 * MIB  # as good as ever: nothing leaks
    assert minutes[-1]["cached_free"] > 3 * minutes[0]["cached_free"]
    assert not got["failed"]


@report(
    "diffusers#867, transformers#37118, serve#3253: growth per request that is only cache", only_cache_seen
)
def only_cache() -> Told:
    seen = Seen()
    weights = take(200 * MIB)
    minutes = []
    for step in range(8):
        take((30 + 15 * step) * MIB)
        minutes.append(seen.look())
    return {"minutes": minutes, "failed": fails(800 * MIB), "kept": weights.numel()}


def high_water_seen(got: Told) -> None:
    peak, later = got["peak"], got["later"]
    assert peak["reserved"] == later["reserved"]  # it never returns
    assert later["allocated"] == 218 * MIB
    split = {state: later[state] for state in ("allocated", "pending_free", "split_free", "cached_free")}
    assert sum(split.values()) == later["reserved"]
    assert split["split_free"] == got["left"]
    assert split["cached_free"] == later["reserved"] - later["allocated"] - got["left"] > 0
    assert sum(later[state] for state in (*split, "external", "free")) == later["limit"] == TOTAL
    assert got["syncs"] == got["syncs without"]
    assert got["snapshots during requests"] == 0


@report("roboflow/inference#2657, #2635: the high-water mark of reserved never returns", high_water_seen)
def high_water() -> Told:
    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

    def syncs() -> dict[str, int]:
        return {name: count for name, count in control.counts().items() if "Synchronize" in name}

    def requests() -> Told:
        before = syncs()
        for _ in range(50):
            with track("answer"):
                take(30 * MIB)
        return {name: count - before.get(name, 0) for name, count in syncs().items()}

    seen = Seen()
    weights = take(200 * MIB)
    batch = [take(9 * MIB) for _ in range(40)]
    take(30 * MIB)
    peak = seen.look()
    batch = batch[:2]
    spent = seen.watched.spent
    during = requests()
    snapshots = seen.watched.collect().spent - spent
    later = seen.look()
    TorchMemInstrumentor().uninstrument()
    without = requests()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return {
        "peak": peak,
        "later": later,
        "syncs": during,
        "syncs without": without,
        "snapshots during requests": snapshots,
        "left": left,
        "kept": weights.numel() + len(batch),
    }


@pytest.mark.parametrize(
    ("mode", "body", "check"),
    [pytest.param(mode, body, check, id=f"{name} [{mode}]") for name, mode, body, check in _reports],
)
def test_what_was_exported_shows_it_in_time(gpu, mode, body, check):
    check(MODES[mode](gpu, body))
