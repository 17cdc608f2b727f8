# SPDX-License-Identifier: Apache-2.0
"""Each metric against the real allocator's own figures, in each mode."""

from __future__ import annotations

import os
import sys

import pytest
from exported import Exported

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

MIB = 1 << 20
DEVICE_SERIES = {
    "usage", "limit", "allocated", "reserved", "active", "requested", "inactive_split", "allocated_peak",
    "reserved_peak", "fragmentation", "slack", "rounding", "segments", "blocks", "allocation.retries", "ooms",
    "device.allocations", "device.frees", "device.syncs", "allocations", "turnover", "reading.age",
    "headroom", "free_block.largest", "private_pool.reserved", "snapshot.age",
    "oom.verdicts",
}  # fmt: skip
PROCESS_SERIES = {
    "host.allocated", "host.reserved", "allocator.info", "telemetry.duration", "telemetry.skipped",
}  # fmt: skip
SEGMENT_SERIES = {"inactive_split", "segments"}
SNAPSHOT_SERIES = {"headroom", "free_block.largest", "private_pool.reserved", "snapshot.age"}


def instrumented(**options) -> Exported:
    exported = Exported()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, **options)
    return exported


def short(names) -> set[str]:
    return {name.removeprefix("torch.memory.") for name in names}


def fragment(torch, device: int = 0):
    """Live and freed blocks of both pools, and a freed block that a side stream is not done with."""
    blocks = [torch.empty(3 * MIB, dtype=torch.uint8, device=device) for _ in range(20)]
    small = [torch.empty(1000, dtype=torch.uint8, device=device) for _ in range(100)]
    wholly = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)
    pending = torch.empty(5 * MIB, dtype=torch.uint8, device=device)
    pending.record_stream(side)
    return blocks[::2], small[::3], wholly, side, pending


def figures_against_the_allocators() -> dict:
    import torch
    from emulator import control

    exported = instrumented()
    kept = fragment(torch)
    blocks, small, wholly, side, pending = kept
    control.hold(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
    del kept, wholly, pending
    control.external_malloc(0, 100 * MIB)
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    exported.collect()
    free, total = torch.cuda.mem_get_info(0)
    told = {
        f"{name}/{pool}": exported.value(f"torch.memory.{name}", pool=pool)
        for name in ("allocated", "reserved", "active", "requested", "inactive_split", "segments", "blocks")
        for pool in ("small", "large")
    }
    told |= {
        name: exported.value(f"torch.memory.{name}")
        for name in sorted((DEVICE_SERIES | PROCESS_SERIES) - {"usage", "reading.age", "telemetry.duration"})
    }
    return {
        "told": told,
        "stats": dict(torch.cuda.memory_stats(0)),
        "host": dict(torch.cuda.host_memory_stats()),
        "ledger": exported.ledger(),
        "free": free,
        "total": total,
        "names": sorted(exported.names),
        "device": exported.all("torch.memory.limit")[0][0],
        "uuid": str(torch.cuda.get_device_properties(0).uuid),
        "info": exported.all("torch.memory.allocator.info")[0],
        "live": len(blocks) + len(small) + pinned.numel(),
    }


@pytest.mark.needs_emulation
def test_every_figure_equals_the_allocators_own(gpu):
    got = gpu.run(figures_against_the_allocators, memory="4GiB")
    told, stats = got["told"], got["stats"]
    families = {
        "allocated": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes",
        "requested": "requested_bytes", "inactive_split": "inactive_split_bytes", "segments": "segment",
        "blocks": "active",
    }  # fmt: skip
    for name, family in families.items():
        for pool in ("small", "large"):
            assert told[f"{name}/{pool}"] == stats[f"{family}.{pool}_pool.current"], (name, pool)
        assert told[name] == stats[f"{family}.all.current"], name
    assert told["inactive_split"] > 0
    assert told["allocated_peak"] == stats["allocated_bytes.all.peak"]
    assert told["reserved_peak"] == stats["reserved_bytes.all.peak"]
    assert (
        told["fragmentation"]
        == stats["inactive_split_bytes.all.current"] / stats["reserved_bytes.all.current"]
    )
    assert told["slack"] == 1 - stats["active_bytes.all.current"] / stats["reserved_bytes.all.current"]
    rounding = stats["active_bytes.all.current"] - stats["requested_bytes.all.current"]
    assert told["rounding"] == rounding > 0
    counters = {
        "allocation.retries": "num_alloc_retries", "ooms": "num_ooms",
        "device.allocations": "num_device_alloc",
        "device.frees": "num_device_free", "device.syncs": "num_sync_all_streams",
        "allocations": "allocation.all.allocated", "turnover": "allocated_bytes.all.allocated",
    }  # fmt: skip
    for name, key in counters.items():
        assert told[name] == stats[key], name
    assert told["limit"] == got["total"]
    assert told["host.allocated"] == got["host"]["active_bytes.current"] == 4 * MIB
    assert told["host.reserved"] == got["host"]["allocated_bytes.current"]
    assert short(got["names"]) == DEVICE_SERIES | PROCESS_SERIES
    assert got["device"] == {"torch.device": "cuda:0", "hw.id": f"GPU-{got['uuid']}"}
    assert got["info"] == [
        {
            "torch.version": __import__("torch").__version__,
            "torch.memory.backend": "native",
            "torch.memory.expandable_segments": False,
        },
        1,
    ]


@pytest.mark.needs_emulation
def test_the_ledger_tells_each_state_from_the_others(gpu):
    got = gpu.run(figures_against_the_allocators, memory="4GiB")
    stats, ledger = got["stats"], got["ledger"]
    active, reserved = stats["active_bytes.all.current"], stats["reserved_bytes.all.current"]
    assert ledger == {
        "allocated": stats["allocated_bytes.all.current"],
        "pending_free": 5 * MIB,
        "split_free": stats["inactive_split_bytes.all.current"],
        "cached_free": reserved - active - stats["inactive_split_bytes.all.current"],
        "external": 100 * MIB,
        "free": got["free"],
    }
    assert ledger["cached_free"] >= 64 * MIB
    assert sum(ledger.values()) == got["total"] == 4 << 30


def two_ledgers() -> list:
    import torch
    from emulator import control

    exported = instrumented()
    kept = []
    for device in (0, 1):
        *kept_of_device, wholly, side, pending = fragment(torch, device)
        control.hold(side)
        with torch.cuda.stream(side):
            torch.cuda._sleep(1)
        kept.append(kept_of_device)
        del wholly, pending
        control.external_malloc(device, (device + 1) * 50 * MIB)
    exported.collect()
    limits = {labels["torch.device"]: value for labels, value in exported.all("torch.memory.limit")}
    ids = {labels["hw.id"] for labels, _ in exported.all("torch.memory.limit")}
    return [exported.ledger("cuda:0"), exported.ledger("cuda:1"), limits, len(ids), sorted(exported.names)]


@pytest.mark.needs_emulation
@pytest.mark.parametrize("expandable", [False, True])
def test_the_ledger_sums_to_the_limit_on_two_devices(gpu, expandable):
    conf = "expandable_segments:True" if expandable else None
    first, second, limits, ids, names = gpu.run(two_ledgers, memory="2GiB", devices=2, alloc_conf=conf)
    assert limits == {"cuda:0": 2 << 30, "cuda:1": 2 << 30}
    assert ids == 2
    for ledger, used_elsewhere in ((first, 50 * MIB), (second, 100 * MIB)):
        assert set(ledger) == {
            "allocated", "pending_free", "split_free", "cached_free", "external", "free",
        }  # fmt: skip
        assert sum(ledger.values()) == 2 << 30
        assert ledger["external"] == used_elsewhere
        assert ledger["pending_free"] == 5 * MIB
        assert ledger["split_free"] > 0
    told = short(names) - {"telemetry.absent"}  # the pending frees leave a figure of the snapshot open
    assert told == (DEVICE_SERIES | PROCESS_SERIES) - (SEGMENT_SERIES if expandable else set())


def without_snapshots() -> list:
    import torch

    exported = instrumented(snapshot_share=0)
    kept = fragment(torch)
    exported.collect()
    return [exported.ledger(), sorted(exported.names), len(kept)]


def test_without_snapshots_expandable_segments_have_one_state_cached(gpu):
    ledger, names, _ = gpu.run(without_snapshots, memory="2GiB", alloc_conf="expandable_segments:True")
    assert set(ledger) == {"allocated", "pending_free", "cached", "external", "free"}
    assert sum(ledger.values()) == 2 << 30
    assert ledger["cached"] > 0
    absent = SEGMENT_SERIES | SNAPSHOT_SERIES | {"fragmentation"}
    assert short(names) == (DEVICE_SERIES | PROCESS_SERIES) - absent


def expandable_turned_on_later() -> list:
    import torch

    exported = instrumented()
    kept = fragment(torch)
    before = short(exported.collect().names)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    more = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    after = short(exported.collect().names)
    return [sorted(before), sorted(after), sum(exported.ledger().values()), len(kept) + more.numel()]


def test_segments_made_expandable_at_run_time_are_noticed_even_if_turned_off_again(gpu):
    before, after, total, _ = gpu.run(expandable_turned_on_later, memory="2GiB")
    assert set(before) - set(after) == SEGMENT_SERIES
    if gpu.emulated:
        assert total == 2 << 30


def series_of_a_backend() -> dict:
    import torch
    from emulator import control

    torch.cuda.init()
    exported = instrumented()
    nothing_yet = sorted(exported.collect().names)
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0")
    exported.collect()
    return {
        "before": nothing_yet,
        "names": sorted(short(exported.names)),
        "backend": exported.all("torch.memory.allocator.info")[0][0]["torch.memory.backend"],
        "ledger": exported.ledger(),
        "reserved": exported.all("torch.memory.reserved"),
        "allocated": exported.value("torch.memory.allocated"),
        "contexts": [control.has_context(index) for index in range(3)],
        "kept": kept.numel(),
    }


@pytest.mark.needs_emulation
def test_cuda_malloc_async_gives_three_figures_and_no_more(gpu):
    got = gpu.run(series_of_a_backend, devices=3, memory="2GiB", alloc_conf="backend:cudaMallocAsync")
    assert got["backend"] == "cudaMallocAsync"
    assert set(got["names"]) == PROCESS_SERIES | {
        "usage", "limit", "allocated", "reserved", "active", "allocated_peak", "reserved_peak", "slack",
        "reading.age",
    }  # fmt: skip
    assert got["allocated"] == 30 * MIB
    assert len(got["reserved"]) == 1
    assert "torch.memory.pool" not in got["reserved"][0][0]
    assert set(got["ledger"]) == {"allocated", "cached", "external", "free"}
    assert sum(got["ledger"].values()) == 2 << 30
    assert got["contexts"] == [True, False, False]


@pytest.mark.needs_emulation
def test_without_caching_nothing_is_told_of_what_is_not_kept(gpu):
    got = gpu.run(series_of_a_backend, devices=3, memory="2GiB", env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert got["backend"] == "uncached"
    assert set(got["names"]) == PROCESS_SERIES | {"limit", "reading.age"}
    assert got["contexts"] == [True, False, False]


def backend_told() -> list:
    import torch

    exported = instrumented()
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:0")
    exported.collect()
    backend = exported.all("torch.memory.allocator.info")[0][0]["torch.memory.backend"]
    return [backend, torch.cuda.memory_reserved() > 0, kept.numel()]


@pytest.mark.needs_emulation
@pytest.mark.parametrize("value", ["0", "false"])
def test_whether_caching_is_off_is_asked_of_torch_not_of_the_variable(gpu, value):
    backend, caches, _ = gpu.run(backend_told, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": value})
    assert backend == ("native" if caches else "uncached")


def series_of_a_pluggable_allocator(library: str) -> dict:
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
    torch.cuda.memory.change_current_allocator(allocator)
    return series_of_a_backend()


@pytest.mark.needs_emulation
def test_a_pluggable_allocator_tells_nothing_of_itself(gpu, pluggable):
    got = gpu.run(series_of_a_pluggable_allocator, args=[pluggable], devices=3, memory="2GiB")
    assert got["backend"] == "pluggable"
    assert set(got["names"]) == PROCESS_SERIES | {"limit", "reading.age"}
    assert got["contexts"] == [True, False, False]


def untouched_devices() -> list:
    import torch
    from emulator import control

    exported = instrumented()
    at_import = sorted(exported.collect().names)
    torch.cuda.init()
    at_init = sorted(short(exported.collect().names))
    contexts = [control.has_context(index) for index in range(3)]
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
    exported.collect()
    devices = sorted({labels["torch.device"] for labels, _ in exported.all("torch.memory.limit")})
    after = [control.has_context(index) for index in range(3)]
    del kept
    torch.cuda.empty_cache()
    exported.collect()
    return [at_import, at_init, contexts, devices, after, exported.value("torch.memory.reserved")]


@pytest.mark.needs_emulation
def test_only_devices_with_reserved_memory_are_told_and_no_context_is_made(gpu):
    at_import, at_init, contexts, devices, after, emptied = gpu.run(untouched_devices, devices=3)
    assert at_import == []
    assert set(at_init) == PROCESS_SERIES
    assert contexts[1:] == [False, False]
    assert devices == ["cuda:1"]
    assert after[2] is False
    assert emptied == 0  # a device once used stays told: 0 is what it holds now


def without_a_gpu() -> list:
    import torch

    exported = instrumented()
    return [torch.cuda.is_available(), sorted(exported.collect().names)]


def test_without_a_gpu_there_are_no_series(gpu):
    no_driver = {"LD_PRELOAD": None, "LD_LIBRARY_PATH": None, "CUDA_VISIBLE_DEVICES": ""}
    assert gpu.run(without_a_gpu, env=no_driver) == [False, []]


def in_a_forked_child() -> list:
    import torch

    exported = instrumented()
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    in_parent = len(exported.collect().names)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(sorted(exported.collect().names)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return [in_parent, os.read(read, 4096).decode(), len(exported.collect().names), kept.numel()]


def test_a_forked_child_exports_nothing_of_its_parents_gpu(gpu):
    in_parent, in_child, later, _ = gpu.run(in_a_forked_child)
    assert in_parent == later == len(DEVICE_SERIES | PROCESS_SERIES)
    assert in_child == "[]"


def forked_before_cuda() -> list:
    import torch

    exported = instrumented()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        os.write(write, str(exported.collect().value("torch.memory.allocated")).encode())
        del kept
        os._exit(0)
    os.waitpid(child, 0)
    return [os.read(read, 4096).decode(), sorted(exported.collect().names)]


def test_a_child_forked_before_cuda_exports_its_own(gpu):
    assert gpu.run(forked_before_cuda) == [str(30 * MIB), []]


def worker(queue) -> None:
    import torch

    exported = instrumented()
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    queue.put([exported.collect().value("torch.memory.allocated"), len(exported.names), kept.numel()])


def spawned() -> list:
    import multiprocessing

    import torch

    kept = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    sys.path.insert(0, os.path.dirname(__file__))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    told = queue.get(timeout=40)
    process.join()
    return [*told, kept.numel()]


def test_a_spawned_worker_exports_its_own(gpu):
    allocated, names, *_ = gpu.run(spawned)
    assert allocated == 30 * MIB
    assert names == len(DEVICE_SERIES | PROCESS_SERIES)
