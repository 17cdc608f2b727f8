# SPDX-License-Identifier: Apache-2.0
"""The doctor's advice on real situations: the first of it is right, since the same work then goes better."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from together import in_a_copy

from opentelemetry_instrumentation_torchmem.advice import live

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
MEMORY = 2048 * MIB
ON = "expandable_segments:True"
CUDA_CONF, CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
keeping: list[Any] = []
"""What lives until the process ends."""


def take(mib: float, stream=None):
    import torch

    with torch.cuda.stream(stream):
        return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")


@dataclass(frozen=True)
class Situation:
    """Something that servers do wrong, and what they do once they follow the advice."""

    first: str
    """The code of the advice that must come first."""
    work: Callable[[bool], object]
    """Called with whether the advice is followed."""
    figure: str
    lower: bool = True
    """Whether less of the figure is better."""
    by: float = 0.25
    """How much better it must be at least, as a share of what it was."""
    settings: dict[str, str] = field(default_factory=dict)
    advised: dict[str, str] | None = None
    """The settings that the advice is about; None where it is about the work."""
    need: int | None = None


# ---- the work ----


def fragmenting(_: bool) -> None:
    """Sessions that last, among big buffers that come and go."""
    chance = random.Random(1)
    keeping.append(take(300))
    for _ in range(50):
        buffers = [take(chance.randrange(15, 50)) for _ in range(3)]
        keeping.append(take(chance.randrange(2, 9)))
        del buffers


def growing(_: bool) -> None:
    """A cache that grows by concatenation: each time it takes a larger block."""
    keeping.append(take(300))
    for _ in range(3):
        cache = take(20)
        for size in range(26, 300, 6):
            larger = take(size)
            cache = larger
        del cache, larger


def random_sizes(_: bool) -> None:
    chance = random.Random(2)
    held: list[Any] = []
    for _ in range(2000):
        if len(held) > 12 or (held and chance.random() < 0.5):
            held.pop(chance.randrange(len(held)))
        else:
            held.append(take(chance.randrange(1, 60)))
    keeping.extend(held)


def cache_piles_up(_: bool) -> None:
    for size in range(20, 56):
        take(size)


def fraction_of_half(advised: bool) -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(0.9 if advised else 0.5)
    keeping.append(take(800))
    with contextlib.suppress(torch.OutOfMemoryError):
        keeping.append(take(400))


def gc_with_fraction(advised: bool) -> None:
    import torch

    if advised:
        torch.cuda.set_per_process_memory_fraction(0.8)
    cache_piles_up(advised)


def two_streams(advised: bool) -> None:
    import torch

    side = None if advised else torch.cuda.Stream()
    keeping.append(take(600))
    for stream in (side, None):
        parts = [take(40, stream) for _ in range(10)]
        del parts


def graphs(advised: bool) -> None:
    import torch

    pool = torch.cuda.graph_pool_handle() if advised else None
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            inner = [take(50), take(50)]
            del inner
        keeping.append(graph)


def idle_pool(advised: bool) -> None:
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        take(300)
    if advised:
        del pool
        torch.cuda.empty_cache()
    else:
        keeping.append(pool)


def recorded_streams(advised: bool) -> None:
    import torch
    from emulator import control

    side = torch.cuda.Stream()
    control.hold(side)
    for _ in range(6):
        buffer = take(50)
        with torch.cuda.stream(side):
            buffer.zero_()
        if advised:
            torch.cuda.current_stream().wait_stream(side)
        else:
            buffer.record_stream(side)
        del buffer


def odd_sizes(_: bool) -> None:
    keeping.extend(take(70) for _ in range(8))


def holes_below_a_page(_: bool) -> None:
    """Small live blocks, 26 MiB apart: few whole pages of 20 MiB between them, many of 12."""
    holes = []
    for _ in range(40):
        holes.append(take(26))
        keeping.append(take(2))
    del holes


def empties_its_cache(advised: bool) -> None:
    import torch

    keeping.append(take(300))
    for _ in range(100):
        request = [take(64), take(100)]
        del request
        if not advised:
            torch.cuda.empty_cache()


def requests(_: bool) -> None:
    keeping.append(take(300))
    for _ in range(100):
        request = [take(64), take(100)]
        del request


def refused_early(_: bool) -> int:
    import torch

    keeping.append(take(800))
    buffers = [take(100 + step) for step in range(9)]
    del buffers
    failed = 0
    for _ in range(5):
        try:
            take(700)
        except torch.OutOfMemoryError:
            failed += 1
    return failed


def pluggable_pool(_: bool) -> None:
    """A pool with an allocator of its own forbids expandable segments."""
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(os.environ["PLUGGABLE"], "take", "give")
    keeping.extend((allocator, torch.cuda.MemPool(allocator.allocator())))


def growing_beside_a_pluggable_pool(advised: bool) -> None:
    pluggable_pool(advised)
    keeping.append(take(1200))
    for _ in range(5):
        cache = take(20)
        for size in range(21, 60):
            larger = take(size)
            cache = larger
        del cache, larger


def weights_with_holes(advised: bool) -> None:
    """Small live blocks, 10 MiB apart: no page lies between them, of whatever size."""
    from opentelemetry_instrumentation_torchmem.compaction import Compaction

    holes = []
    for _ in range(80):
        holes.append(take(10))
        keeping.append(take(2))
    del holes
    if advised:
        outcome = Compaction(keeping)()
        assert outcome.won, outcome


def scattered_buffers(advised: bool) -> None:
    """Buffers of any size, with sessions that last between them; or all taken once, at the start."""
    chance = random.Random(4)
    count, least, most = 60, 3, 18
    arena = [take(most) for _ in range(count)] if advised else []
    for _ in range(12):
        buffers = []
        for index in range(count):
            size = chance.randrange(least, most)
            buffers.append(arena[index][: size * MIB] if advised else take(size))
            session = take(chance.randrange(1, 5))
            if chance.random() < 0.05:
                keeping.append(session)
        del buffers, session


def beside_another_process(advised: bool) -> None:
    from emulator import control

    control.external_malloc(0, 900 * MIB)
    keeping.append(take(600))
    if advised:
        control.external_free(0, 900 * MIB)


def too_large(advised: bool) -> None:
    keeping.extend(take(100) for _ in range(9 if advised else 18))


SITUATIONS = {
    "sessions among big buffers": Situation(
        "expandable_segments", fragmenting, "trapped", advised={CUDA_CONF: ON}
    ),
    "a cache that grows": Situation(
        "expandable_segments", growing, "reserved_peak", advised={CUDA_CONF: ON}
    ),
    "a split limit": Situation(
        "max_split", random_sizes, "reserved_peak", by=0.4,
        settings={CUDA_CONF: "max_split_size_mb:32"}, advised={},
    ),
    "a split limit with expandable segments": Situation(
        "split_with_expandable", random_sizes, "reserved_peak", by=0.5,
        settings={CUDA_CONF: f"max_split_size_mb:32,{ON}"}, advised={CUDA_CONF: ON},
    ),
    "a threshold without a fraction": Situation(
        "gc_threshold_inert", gc_with_fraction, "reserved",
        settings={CUDA_CONF: "garbage_collection_threshold:0.4"},
    ),
    "a variable that hides another": Situation(
        "hidden_variable", fragmenting, "trapped",
        settings={CUDA_CONF: "roundup_power2_divisions:16", CONF: ON},
        advised={CUDA_CONF: f"roundup_power2_divisions:16,{ON}"},
    ),
    "a fraction of half the device": Situation("memory_fraction", fraction_of_half, "ooms"),
    "a second stream": Situation("other_streams", two_streams, "reserved"),
    "graphs with pools of their own": Situation("graph_pools", graphs, "private", by=0.5),
    "a pool that is not used any more": Situation("idle_pools", idle_pool, "reserved", by=0.9),
    "tensors recorded on a busy stream": Situation("pending_frees", recorded_streams, "pending", by=0.9),
    "coarse rounding": Situation(
        "rounding", odd_sizes, "rounding", by=0.8,
        settings={CUDA_CONF: "roundup_power2_divisions:2"},
        advised={CUDA_CONF: "roundup_power2_divisions:16"},
    ),
    "holes smaller than a page": Situation(
        "large_segment_size", holes_below_a_page, "headroom", lower=False,
        settings={CUDA_CONF: ON}, advised={CUDA_CONF: f"{ON},large_segment_size_mb:12"},
    ),
    "a cache emptied at each request": Situation("empty_cache", empties_its_cache, "driver_calls", by=0.9),
    "no cache at all": Situation(
        "uncached", requests, "driver_calls", by=0.9,
        settings={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, advised={},
    ),
    "refused before the flush": Situation(
        "refused_early", refused_early, "returned", by=1.0,
        settings={CUDA_CONF: "throw_on_cudamalloc_oom:True"}, advised={},
    ),
    "a cache that grows where segments cannot expand": Situation(
        "roundup", growing_beside_a_pluggable_pool, "retries", by=0.5,
        advised={CUDA_CONF: "roundup_power2_divisions:4"},
    ),
    "weights with holes between": Situation(
        "compaction", weights_with_holes, "headroom", lower=False, settings={CUDA_CONF: ON}
    ),
    "buffers of any size": Situation(
        "bucket_sizes", scattered_buffers, "headroom", lower=False, by=0.05,
        settings={CUDA_CONF: ON}, need=1900 * MIB
    ),
    "another process on the device": Situation(
        "outside_pytorch", beside_another_process, "headroom", lower=False, need=1000 * MIB
    ),
    "more than fits": Situation("full", too_large, "headroom", lower=False, need=500 * MIB),
}  # fmt: skip


# ---- healthy servers ----


def steady(_: bool) -> None:
    keeping.append(take(800))
    for _ in range(50):
        request = [take(64), take(100), take(0.5), take(5)]
        del request


def steady_with_sessions(_: bool) -> None:
    chance = random.Random(5)
    keeping.append(take(600))
    sessions: list[Any] = []
    for _ in range(200):
        request = [take(64), take(100)]
        sessions.append(take(chance.choice([2, 4, 8])))
        if len(sessions) > 20:
            sessions.pop(0)
        del request
    keeping.extend(sessions)


def steady_within_a_fraction(_: bool) -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(0.9)
    steady(False)


def steady_with_graphs(_: bool) -> None:
    steady(False)
    graphs(True)


def steady_with_a_copy_stream(_: bool) -> None:
    import torch

    steady(False)
    side = torch.cuda.Stream()
    for _ in range(20):
        take(16, side)


def warmed_up(_: bool) -> None:
    """A large cache is no trouble."""
    keeping.append(take(500))
    warm = [take(300), take(300), take(200)]
    del warm


HEALTHY = {
    "steady": (steady, {}),
    "steady, expandable": (steady, {CUDA_CONF: ON}),
    "sessions, expandable": (steady_with_sessions, {CUDA_CONF: ON}),
    "rounding": (steady, {CUDA_CONF: "roundup_power2_divisions:8"}),
    "within a fraction": (steady_within_a_fraction, {CUDA_CONF: "garbage_collection_threshold:0.8"}),
    "graphs that share a pool": (steady_with_graphs, {}),
    "a stream for copies": (steady_with_a_copy_stream, {}),
    "a large cache": (warmed_up, {}),
    "one setting, said twice": (steady, {CUDA_CONF: ON, CONF: ON}),
}  # fmt: skip


# ---- in the process on the GPU ----


def examined(
    work: Callable[[bool], object], settings: dict, advised: bool, need: int | None
) -> dict[str, Any]:
    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem.advice import examine
    from opentelemetry_instrumentation_torchmem.allocator.settings import ENVIRONMENT

    os.environ.update(settings)
    in_force = next((os.environ[name] for name in ENVIRONMENT if name in os.environ), None)
    if in_force is not None:
        torch._C._accelerator_setAllocatorSettings(in_force)
    torch.cuda.init()
    returned = work(advised)
    found = examine(need=need)
    evidence = found[0].evidence if found else None
    calls = sum(map(control.count, ("cudaMalloc", "cudaFree", "cuMemCreate", "cuMemRelease")))
    figures: dict[str, Any] = {"driver_calls": calls, "returned": returned}
    if evidence is not None and evidence.activity is not None:
        figures |= {
            "trapped": evidence.trapped,
            "headroom": evidence.headroom,
            "reserved": evidence.map.reserved,
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "pending": evidence.map.pending_free,
            "private": evidence.map.private_reserved,
            "rounding": sum(block - asked for asked, block in evidence.live),
            "retries": evidence.activity.retries,
            "ooms": evidence.activity.ooms,
            "rejections": evidence.activity.rejections,
        }
    return {
        "advice": [[advice.code, advice.change, advice.why, advice.weight] for advice in found[0].advice],
        "figures": figures,
    }


def all_situations(pluggable: str) -> dict[str, Any]:
    import torch

    assert not torch.cuda.is_initialized()
    os.environ["PLUGGABLE"] = pluggable
    told: dict[str, Any] = {}
    for name, situation in SITUATIONS.items():
        after = situation.settings if situation.advised is None else situation.advised
        told[name] = [
            in_a_copy(examined, situation.work, settings, advised, situation.need)
            for settings, advised in ((situation.settings, False), (after, True))
        ]
    for name, (work, settings) in HEALTHY.items():
        told[name] = [in_a_copy(examined, work, settings, False, None)]
    return told


_told: dict[str, Any] = {}


@pytest.fixture
def told(gpu, pluggable) -> dict[str, Any]:
    if not _told:
        _told.update(gpu.run(all_situations, args=[pluggable], memory=MEMORY, timeout=280))
    return _told


def value_of(outcome: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in outcome, outcome["error"]
    return outcome["value"]


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_first_advice_is_right_since_the_same_work_goes_better_with_it(told, name):
    situation = SITUATIONS[name]
    before, after = map(value_of, told[name])
    for code, change, why, weight in before["advice"]:
        print(f"{code} ({weight:.3f}): {change}\n    {why}")
    was, now = before["figures"][situation.figure], after["figures"][situation.figure]
    print(f"{situation.figure}: {was} -> {now}; then {[code for code, *_ in after['advice']]}")
    assert before["advice"][0][0] == situation.first
    if situation.lower:
        assert now <= (1 - situation.by) * was
        assert now < was
    else:
        assert now >= (1 + situation.by) * was
        assert now > was
    assert situation.first not in [code for code, *_ in after["advice"]]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_server_is_told_nothing(told, name):
    (outcome,) = told[name]
    assert value_of(outcome)["advice"] == []


# ---- a process's own dump, and the command ----

RUN = "import sys; from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main(sys.argv[1:]))"


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def dumped(file: str, plain: str) -> list[list[str]]:
    """A process that works badly writes itself down, beside torch's own snapshot of the same moment."""
    import torch

    from opentelemetry_instrumentation_torchmem import advice

    fragmenting(False)
    growing(False)
    advice.dump(file)
    torch.cuda.memory._dump_snapshot(plain)
    return [[each.code, each.change, each.why] for each in advice.examine()[0].advice]


def healthy_dumped(file: str) -> None:
    from opentelemetry_instrumentation_torchmem import advice

    steady(False)
    advice.dump(file)


def test_the_command_says_of_a_dump_what_the_process_says_of_itself(gpu, tmp_path):
    file, plain = tmp_path / "app.pickle", tmp_path / "plain.pickle"
    said = gpu.run(dumped, args=[str(file), str(plain)], memory=MEMORY)
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [file, plain]
    text = command("doctor", "--snapshot", file)
    assert (text.returncode, text.stderr) == (1, "")
    for number, (code, change, why) in enumerate(said, 1):
        assert f"  {number}. {change}  [{code}]\n     {why}\n" in text.stdout
    (device,) = json.loads(command("doctor", "--snapshot", file, "--json").stdout)["devices"]
    assert [[each["code"], each["change"], each["why"]] for each in device["advice"]] == said
    assert device["device"] == "cuda:0"
    assert device["figures"]["total"] == MEMORY
    assert device["activity"]["retries"] > 0
    # torch's own snapshot tells less, and the same of what it does tell
    (alone,) = json.loads(command("doctor", "--snapshot", plain, "--json").stdout)["devices"]
    assert alone["figures"]["total"] is alone["figures"]["headroom"] is alone["activity"] is None
    assert alone["figures"]["trapped"] == device["figures"]["trapped"]
    assert alone["advice"][0]["code"] == said[0][0] == "expandable_segments"
    # the file is a snapshot like any other
    summary = command("snapshot", file, "--no-picture")
    assert (summary.returncode, summary.stderr) == (0, "")
    assert {"segments", "device_traces"} <= set(pickle.loads(file.read_bytes()))


def test_the_command_says_that_a_healthy_process_is_healthy_and_nothing_else(gpu, tmp_path):
    file = tmp_path / "app.pickle"
    gpu.run(healthy_dumped, args=[str(file)], memory=MEMORY)
    text = command("doctor", "--snapshot", file)
    assert text.returncode == 0
    first, *others = text.stdout.splitlines()
    assert first.startswith("cuda:0: ")
    assert others == ["  Nothing to change."]
    # unless more is needed than there is
    needed = command("doctor", "--snapshot", file, "--need", "1.9GiB")
    assert needed.returncode == 1
    assert "[full]" in needed.stdout


def nothing_to_see() -> list[str]:
    import torch

    from opentelemetry_instrumentation_torchmem import advice

    said = []
    try:
        advice.examine()
    except advice.NothingToSeeError as error:
        said.append(str(error))
    return [*said, str(torch.cuda.is_initialized())]


def test_a_process_without_cuda_has_nothing_to_examine_and_gets_none(gpu):
    assert gpu.run(nothing_to_see, memory=MEMORY) == ["CUDA is not initialised in this process", "False"]


# ---- the cost of reallocation ----


def costs(calls: dict[str, int]) -> dict[str, Any]:
    """Calls of the driver take so many milliseconds. What is measured of them, and what a workload loses."""
    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem.advice import Activity, Overhead, examine, measure
    from opentelemetry_instrumentation_torchmem.allocator.source import Source
    from opentelemetry_instrumentation_torchmem.allocator.windows import change

    take(1)
    for call, milliseconds in calls.items():
        control.pause(call, 0, milliseconds)
    times = measure(torch, 0, repeat=5)
    source = Source(torch)
    lost = 0.0
    before = source.read(0)
    for _ in range(10):
        began = time.perf_counter()
        request = [take(64), take(100)]
        del request
        torch.cuda.empty_cache()
        lost += time.perf_counter() - began
        time.sleep(0.05)  # what the request is there for
    after = source.read(0)
    estimate = Overhead.of(Activity.between(before, after), times)
    assert estimate is not None
    told = examine(times=times)[0].evidence.overhead
    opened = source.read(0)
    keeping.append([take(64), take(100)])  # the cache is empty
    closed = source.read(0)
    of_request = Overhead.of(Activity.of_request(change(opened, closed), closed.at - opened.at), times)
    assert of_request is not None
    return {
        "request": [of_request.share, of_request.calls],
        "allocation": times.allocation,
        "free": times.free,
        "estimate": estimate.share,
        "truth": lost / (after.at - before.at),
        "calls": estimate.calls,
        "since_start": told is not None,
    }


def test_reallocation_overhead_is_estimated_near_the_truth_where_calls_take_long(gpu):
    got = gpu.run(costs, args=[{"cudaMalloc": 20, "cudaFree": 30}], memory=MEMORY)
    print(got)
    assert got["allocation"] >= 0.020
    assert got["free"] >= 0.030
    assert got["calls"] == 20 + 20 + 10  # allocations, frees, and a wait for each flush
    assert 0.8 * got["truth"] <= got["estimate"] <= 1.25 * got["truth"]
    assert got["truth"] > 0.5
    assert got["since_start"]
    share, calls = got["request"]
    assert calls == 2
    assert share > 0.8  # all that it did was to wait for them


def of_history() -> dict[str, Any]:
    """What a memory history tells of the time that calls take: where the cache is flushed."""
    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem.advice import times_of_trace

    torch.cuda.memory._record_memory_history(stacks="python")
    buffers = [take(200 + step) for step in range(8)]
    del buffers
    control.pause("cudaFree", 0, 30)
    control.pause("cudaMalloc", 0, 90)
    take(900)  # flushes
    found = times_of_trace(torch.cuda.memory._snapshot()["device_traces"][0])
    assert found is not None
    return {"free": found.free, "allocation": found.allocation}


def test_a_memory_history_tells_what_calls_took_where_the_cache_was_flushed(gpu):
    got = gpu.run(of_history, memory=MEMORY)
    assert got["free"] >= 0.030
    assert got["allocation"] >= 0.080


def on_two_devices() -> list[list[Any]]:
    import torch

    from opentelemetry_instrumentation_torchmem import advice

    with torch.cuda.device(1):
        fragmenting(False)
    steady(False)
    return [[each.evidence.device, [found.code for found in each.advice]] for each in advice.examine()]


def test_each_device_is_told_for_itself(gpu):
    assert gpu.run(on_two_devices, memory=MEMORY, devices=2) == [[0, []], [1, ["expandable_segments"]]]


def to_nowhere(file: str) -> str:
    from opentelemetry_instrumentation_torchmem import advice

    take(1)
    try:
        advice.dump(file)
    except OSError as error:
        return type(error).__name__
    return ""


def test_a_dump_that_cannot_be_written_says_so_and_leaves_nothing(gpu, tmp_path):
    assert gpu.run(to_nowhere, args=[str(tmp_path / "none" / "x")], memory=MEMORY) == "FileNotFoundError"
    (tmp_path / "directory").mkdir()
    assert gpu.run(to_nowhere, args=[str(tmp_path / "directory")], memory=MEMORY) == "IsADirectoryError"
    assert [each.name for each in tmp_path.iterdir()] == ["directory"]


def test_the_command_measures_the_driver_where_it_is_asked_to(gpu, tmp_path):
    file = tmp_path / "app.pickle"
    gpu.run(healthy_dumped, args=[str(file)], memory=MEMORY)
    arguments = [sys.executable, "-c", RUN, "doctor", "--measure", "--snapshot", str(file)]
    measured = gpu.popen(arguments, memory=MEMORY, stdout=subprocess.PIPE, text=True)
    out, _ = measured.communicate(timeout=120)
    assert measured.returncode == 0
    _, cost, verdict = out.splitlines()
    assert cost.startswith("  Trips to the driver take an estimated 0.")
    assert cost.endswith(" calls a second, by 10 calls for 32 MiB on cuda:0 while it was idle.")
    assert verdict == "  Nothing to change."


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_that_it_cannot_measure():
    got = command("doctor", "--measure")
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr.startswith("torchmem doctor: error: --measure: ")
    assert got.stderr.count("\n") == 1


def set_one_after_another(file: str) -> list:
    import torch

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, advice

    TorchMemInstrumentor().instrument()
    for text in ("large_segment_size_mb:40", "expandable_segments:True", "expandable_segments:False"):
        torch._C._accelerator_setAllocatorSettings(text)
    kept = torch.empty(996 << 20, dtype=torch.uint8, device="cuda")
    advice.dump(file)
    (device,) = advice.examine()
    return [device.evidence.headroom, device.evidence.settings.large_segment_size, kept.numel()]


def test_options_that_torch_tells_no_more_are_in_the_figures(gpu, tmp_path):
    headroom, segment, _ = gpu.run(set_one_after_another, args=[str(tmp_path / "here")], memory="1GiB")
    assert (headroom, segment) == (28 << 20, 40 << 20)
    (evidence,) = live.evidences(pickle.loads((tmp_path / "here").read_bytes()))
    assert (evidence.headroom, evidence.settings.pages_changed) == (28 << 20, True)
    assert evidence.settings.large_segment_size == 40 << 20
