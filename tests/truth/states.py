# SPDX-License-Identifier: Apache-2.0
"""Random states of the real allocator, and the judge: what the analysis says against what then happens.

A walk is a process of its own, forked from one that has imported torch and not touched CUDA. It allocates,
frees, captures and so on at random, stops a few times and has each stop judged. The judge asks the allocator
itself, in forked copies that leave the state as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emulator import control

MIB = 1 << 20
HUGE = 2 * MIB
MEMORY = "640MiB"
DEVICES = 2
EXPORTED = float(os.environ.get("TRUTH_EXPORTED", "0.3"))
"""The share of the states in which what the SDK exports is judged too."""
_NO_POOLS = {(device, (0, 0)) for device in range(DEVICES)}


@dataclass(frozen=True)
class Mode:
    conf: str = ""
    fraction: bool = False
    """The process's share of the device changes now and then."""
    switched: tuple[str, ...] = ()
    """Settings that come into force at run time."""


ON, OFF = "expandable_segments:True", "expandable_segments:False"

MODES = {
    "native": Mode(),
    "expandable": Mode(ON),
    "switched": Mode(switched=(ON, OFF)),
    "switched, large segments": Mode("large_segment_size_mb:32", switched=(ON, OFF)),
    "switched, split limit": Mode("max_split_size_mb:24", switched=(ON, OFF, "max_split_size_mb:40")),
    "split limit": Mode("max_split_size_mb:24"),
    "split limit, rounding": Mode("max_split_size_mb:32,max_non_split_rounding_mb:48"),
    "split limit, roundup": Mode("max_split_size_mb:24,roundup_power2_divisions:2"),
    "split limit, expandable": Mode(f"max_split_size_mb:24,{ON}"),
    "split limit, roundup, expandable": Mode(f"max_split_size_mb:24,roundup_power2_divisions:2,{ON}"),
    "roundup": Mode("roundup_power2_divisions:4"),
    "roundup list": Mode("roundup_power2_divisions:[1:2,8:4,32:1,>:8]"),
    "roundup, expandable": Mode(f"roundup_power2_divisions:[1:4,16:2,>:4],{ON}"),
    "fraction": Mode(fraction=True),
    "fraction, expandable": Mode(ON, fraction=True),
    "gc": Mode("garbage_collection_threshold:0.3", fraction=True),
    "gc, expandable": Mode(f"garbage_collection_threshold:0.3,{ON}", fraction=True),
    "large segments of 12": Mode("large_segment_size_mb:12"),
    "large segments of 64": Mode("large_segment_size_mb:64"),
    "large segments of 12, expandable": Mode(f"large_segment_size_mb:12,{ON}"),
    "large segments of 64, expandable": Mode(f"large_segment_size_mb:64,{ON}"),
    "throw": Mode("throw_on_cudamalloc_oom:True"),
    "throw, expandable": Mode(f"throw_on_cudamalloc_oom:True,{ON}"),
    "throw, fraction": Mode("throw_on_cudamalloc_oom:True", fraction=True),
    "reserve": Mode(f"expandable_segments_reserve:0.25,{ON}"),
    "switched, large segments changed": Mode(
        switched=("large_segment_size_mb:40", "large_segment_size_mb:12", "large_segment_size_mb:20", ON, OFF)
    ),
    "throw, changed": Mode(
        "large_segment_size_mb:32",
        switched=("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom:False", OFF),
    ),
}


@dataclass
class Tally:
    """What came of some states of one mode."""

    states: int = 0
    exact: int = 0
    untouched: int = 0
    """Nothing was ever unmapped before them."""
    absent: dict[str, int] = field(default_factory=dict)
    below: list[int] = field(default_factory=list)
    """How far the headroom lay below the truth, where it was not exact and this was measured."""
    beyond: int = 0
    """States where it lay more than a page below the truth."""
    exported: int = 0
    """States whose export was judged."""
    mismatches: list[str] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        self.states += other["states"]
        self.exact += other["exact"]
        self.untouched += other["untouched"]
        self.below += other["below"]
        self.beyond += other["beyond"]
        self.exported += other["exported"]
        self.mismatches += other["mismatches"]
        for reason, count in other["absent"].items():
            self.absent[reason] = self.absent.get(reason, 0) + count


def judged(modes: list[str], seeds: list[int], stops: int = 4) -> dict[str, dict[str, Any]]:
    """Walks with these seeds. The settings are those of the environment, or are made now if it has none."""
    import torch

    assert not torch.cuda.is_initialized()
    into_huge_pages()
    tallies = {mode: Tally() for mode in modes}
    for mode, tally in tallies.items():
        for seed in seeds:
            for line in _forked(lambda mode=mode, seed=seed: _walk(mode, seed, stops)):
                tally.add(json.loads(line))
    return {mode: vars(tally) for mode, tally in tallies.items()}


def into_huge_pages() -> None:
    """What has been imported, where the kernel can: to copy its page tables is most of what a probe costs."""
    gc.freeze()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = f"{line} -".split(maxsplit=5)
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if rights == "rw-p" and name.strip(" -") in ("", "[heap]") and 0 < end - begin < 1 << 29:
            madvise(begin, end - begin, 25)  # MADV_COLLAPSE, Linux 6.1 or later


def _forked(body: Callable[[], Iterator[dict[str, Any]]]) -> list[str]:
    """What a forked copy yields, as lines of JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as out:
            try:
                for each in body():
                    out.write(json.dumps(each) + "\n")
            except BaseException:
                out.write(json.dumps({**vars(Tally()), "mismatches": [traceback.format_exc()]}) + "\n")
            out.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        said = list(lines)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        said.append(json.dumps({**vars(Tally()), "mismatches": [f"the walk ended with {code}"]}))
    return said


class EndedError(Exception):
    """The walk cannot go on."""


class Walk:
    """One process's random doings."""

    def __init__(self, mode: Mode, chance: random.Random) -> None:
        import torch
        from watched import Clock, Watched

        from opentelemetry_instrumentation_torchmem.allocator.captures import CaptureWatch
        from opentelemetry_instrumentation_torchmem.allocator.pools import PoolWatch

        self.torch = torch
        self.clock = Clock()
        self.watched = Watched(snapshot_share=1e-5)  # none between a snapshot that was due and a change
        self.mode = mode
        self.watches = PoolWatch(), CaptureWatch()
        self.watches[0].install(torch.cuda.memory)
        self.watches[1].install(torch.cuda.graphs)
        self.chance = chance
        self.devices = range(torch.cuda.device_count())
        self.streams = {
            device: [
                torch.cuda.default_stream(device),
                *(torch.cuda.Stream(device) for _ in range(chance.randrange(3))),
            ]
            for device in self.devices
        }
        self.kept: list[Any] = []
        self.pools: list[tuple[int, Any, list[Any]]] = []
        self.graphs: list[tuple[int, Any, list[Any]]] = []
        self.external = dict.fromkeys(self.devices, 0)
        self.lends = False
        """A MemPool has been made that serves what fails elsewhere."""
        self.scale = chance.choice([1, 4, 16])
        self.doings = [
            (self.allocate, 40),
            (self.free, 22),
            (self.free_pending, 8 if chance.random() < 0.5 else 0),
            (self.complete, 2),
            (self.pool, 2 if chance.random() < 0.4 else 0),
            (self.in_pool, 4),
            (self.drop_pool, 1),
            (self.graph, 1 if chance.random() < 0.3 else 0),
            (self.drop_graph, 1),
            (self.others, 2),
            (self.empty_cache, 1 if chance.random() < 0.4 else 0),
            (self.too_much, 1 if chance.random() < 0.4 else 0),
            (self.fraction, 2 if mode.fraction else 0),
            (self.switch, 3 if mode.switched else 0),
        ]
        if mode.fraction:
            for device in self.devices:
                torch.cuda.set_per_process_memory_fraction(chance.choice([0.4, 0.7, 0.9]), device)

    def go(self, steps: int) -> None:
        doings, weights = zip(*self.doings, strict=True)
        for doing in self.chance.choices(doings, weights, k=steps):
            with contextlib.suppress(self.torch.OutOfMemoryError):
                doing()

    # ---- what it does ----

    def size(self) -> int:
        chance = self.chance
        size = chance.choice(
            [
                chance.randrange(1, MIB),
                chance.randrange(MIB, 10 * MIB),
                chance.randrange(MIB, 24 * MIB),
                chance.randrange(10 * MIB, 120 * MIB) // chance.choice([1, self.scale]),
                chance.randrange(1, 30) * MIB,
                chance.randrange(1, 6) * 20 * MIB,
            ]
        )
        return max(1, size + chance.choice([0, 0, 0, 1, -1, 512]))

    def empty(self, size: int, device: int, stream: Any) -> Any:
        torch = self.torch
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")

    def allocate(self) -> None:
        device = self.chance.choices(self.devices, [3, 1])[0]
        stream = self.chance.choice(self.streams[device])
        for _ in range(self.chance.choice([1, 1, 3, 8])):
            self.kept.append(self.empty(self.size(), device, stream))

    def free(self) -> None:
        for _ in range(self.chance.choice([1, 2, 5])):
            if self.kept:
                self.kept.pop(self.chance.randrange(len(self.kept)))

    def free_pending(self) -> None:
        if not self.kept:
            return
        tensor = self.kept.pop(self.chance.randrange(len(self.kept)))
        other = self.chance.choice(self.streams[tensor.device.index])
        if self.chance.random() < 0.7:
            control.hold(other)
        tensor.record_stream(other)

    def complete(self) -> None:
        if self.chance.random() < 0.5:
            control.complete()
        else:
            control.release()

    def pool(self) -> None:
        if len(self.pools) < 2:
            device = self.chance.choice(self.devices)
            lends = self.chance.random() < 0.3
            self.lends = self.lends or lends
            with self.torch.cuda.device(device):
                pool = self.torch.cuda.MemPool(use_on_oom=lends, no_split=self.chance.random() < 0.2)
            self.pools.append((device, pool, []))
            self.in_pool()

    def in_pool(self) -> None:
        if not self.pools:
            return
        device, pool, kept = self.chance.choice(self.pools)
        if kept and self.chance.random() < 0.5:
            kept.pop()
            return
        with self.torch.cuda.device(device), self.torch.cuda.use_mem_pool(pool):
            kept.append(self.torch.empty(self.size(), dtype=self.torch.uint8, device=f"cuda:{device}"))

    def drop_pool(self) -> None:
        if not self.pools:
            return
        _, pool, kept = self.pools.pop(self.chance.randrange(len(self.pools)))
        expandable = bool(self.torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
        if not expandable and not self.mode.switched and self.chance.random() < 0.5:
            self.kept += kept  # with expandable segments torch unmaps these twice
            kept = []
        kept.clear()
        del pool

    def graph(self) -> None:
        torch = self.torch
        if len(self.graphs) >= 2:
            return
        control.release()
        device = self.chance.choice(self.devices)
        kept: list[Any] = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph, stream=stream), contextlib.suppress(torch.OutOfMemoryError):
                    for _ in range(self.chance.randrange(1, 5)):
                        kept.append(torch.empty(self.size(), dtype=torch.uint8, device=f"cuda:{device}"))
                        if self.chance.random() < 0.5:
                            kept.pop(self.chance.randrange(len(kept)))
            except torch.AcceleratorError as error:
                raise EndedError from error  # memory ran short, and what torch did about it broke the capture
        self.graphs.append((device, graph, kept))

    def drop_graph(self) -> None:
        if self.graphs:
            _, graph, kept = self.graphs.pop(self.chance.randrange(len(self.graphs)))
            kept.clear()
            graph.reset()

    def others(self) -> None:
        """Another process takes or gives back memory."""
        device = self.chance.choice(self.devices)
        taken = self.external[device]
        if taken and self.chance.random() < 0.4:
            control.external_free(device, taken)
            self.external[device] = 0
            return
        size = self.chance.choice([self.chance.randrange(1, 200 * MIB), self.chance.randrange(1, 100) * MIB])
        with contextlib.suppress(MemoryError):
            control.external_malloc(device, size)
            self.external[device] += size

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()

    def too_much(self) -> None:
        device = self.chance.choice(self.devices)
        self.empty(self.chance.randrange(200, 1000) * MIB, device, self.streams[device][0])

    def fraction(self) -> None:
        device = self.chance.choice(self.devices)
        share = self.chance.choice([1.0, 0.9, 0.5, self.chance.uniform(0.2, 1)])
        self.torch.cuda.set_per_process_memory_fraction(share, device)

    def switch(self) -> None:
        set_settings(self.torch, self.chance.choice(self.mode.switched))

    @property
    def live_pools(self) -> set[tuple[int, tuple[int, int]]]:
        """With the device that each was made on."""
        made = {(device, pool.id) for device, pool, _ in self.pools}
        return made | {(device, graph.pool()) for device, graph, _ in self.graphs}


def set_settings(torch: Any, text: str) -> None:
    name = "_accelerator_setAllocatorSettings"
    setter = getattr(torch._C, name, None) or torch._C._cuda_cudaCachingAllocator_set_allocator_settings
    setter(text)


def _walk(mode: str, seed: int, stops: int) -> Iterator[dict[str, Any]]:
    import torch

    of_mode = MODES[mode]
    if of_mode.conf and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = of_mode.conf
        set_settings(torch, of_mode.conf)
    chance = random.Random(f"{mode}/{seed}")
    walk = Walk(of_mode, chance)
    ended = False
    for stop in range(stops):
        try:
            walk.go(chance.choice([4, 12, 30]))
        except EndedError:
            return
        except torch.AcceleratorError:
            if of_mode.switched and "max_split" in f"{of_mode.conf} {of_mode.switched}":
                return  # torch calls cudaFree for a block that is no cudaMalloc of its own
            raise
        device = chance.choices(walk.devices, [3, 1])[0]
        known = "all" if (lot := chance.random()) < 0.5 else "owned" if lot < 0.8 else "none"
        where = f"{mode}, seed {seed}, stop {stop}, cuda:{device}, pools known: {known}"
        tally = Judge(walk, device, known, where).tally
        if chance.random() < EXPORTED:
            exported = ExportJudge(walk, device, where)
            ended = exported.judge_all()
            tally.add(vars(exported.tally))
        yield vars(tally)
        if ended:
            return


class Oracle:
    """Asks the allocator, in forked copies of the process, about one device's state."""

    def __init__(self, walk: Walk, device: int, where: str) -> None:
        self.torch, self.walk, self.device, self.chance, self.where = (
            walk.torch,
            walk,
            device,
            walk.chance,
            where,
        )
        self.tally = Tally()

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.tally.mismatches.append(f"{self.where}: {what}; {self.describe()}")

    def describe(self) -> str:
        raise NotImplementedError

    def copy(self, body: Callable[[], int]) -> int:
        """What the body returns in a forked copy."""
        from opentelemetry_instrumentation_torchmem import oom

        reading, writing = os.pipe()
        child = control._call("emu_fork")
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            oom.deactivate()  # it would examine what fails here
            try:
                os.write(writing, str(body()).encode())
            except BaseException as error:
                os.write(writing, repr(error).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            said = lines.read()
        os.waitpid(child, 0)
        return int(said)

    def attempts(self, *sizes: int) -> list[tuple[bool, bool]]:
        """Of one request after the other, each freed at once: whether it succeeds, and without a call of the
        driver. All but the last are to be served by a free block, which leaves the state as it was."""
        torch = self.torch

        def asked() -> int:
            retries = torch.cuda.memory_stats_as_nested_dict(self.device)["num_alloc_retries"]
            return retries + sum(map(control.count, ("cudaMalloc", "cuMemCreate")))

        def body() -> int:
            answer = 0
            for size in sizes:
                before = asked()
                try:
                    torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.device}")
                except RuntimeError:  # out of memory, or a fault of torch's on the way there
                    answer = 3 * answer
                else:
                    answer = 3 * answer + (2 if asked() == before else 1)
            return answer

        answer = self.copy(body)
        found: list[tuple[bool, bool]] = []
        for _ in sizes:
            answer, digit = divmod(answer, 3)
            found.insert(0, (digit > 0, digit == 2))
        return found

    def attempt(self, size: int) -> tuple[bool, bool]:
        return self.attempts(size)[0]

    def left_trapped(self) -> int:
        """What is neither in use nor given back when all that can be is."""
        torch, device = self.torch, self.device

        def body() -> int:
            torch.cuda.empty_cache()
            left = torch.cuda.memory_stats_as_nested_dict(device)
            return left["reserved_bytes"]["all"]["current"] - left["active_bytes"]["all"]["current"]

        return self.copy(body)


class Judge(Oracle):
    """Holds one device's state against what its analysis says."""

    def __init__(self, walk: Walk, device: int, known: str, where: str) -> None:
        from opentelemetry_instrumentation_torchmem.allocator import snapshot
        from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
        from opentelemetry_instrumentation_torchmem.allocator.settings import SEEN, AllocatorSettings

        super().__init__(walk, device, where)
        torch = walk.torch
        self.tally.states = 1
        whole = torch.cuda.memory._snapshot()
        self.settings = AllocatorSettings.of_snapshot(whole["allocator_settings"], os.environ, SEEN)
        self.segments = torch.cuda.memory_snapshot()
        self.statistics = torch.cuda.memory_stats_as_nested_dict(device)
        limits = snapshot.Limits(
            driver=DriverMemory(*torch.cuda.mem_get_info(device)),
            fraction=torch.cuda.get_per_process_memory_fraction(device),
            reserved=self.statistics["reserved_bytes"]["all"]["current"],
            untouched=snapshot.never_released(self.statistics),
        )
        self.untouched = limits.untouched
        owned = walk.watches[0].owned() | walk.watches[1].owned()
        self.expect(owned == walk.live_pools, f"the owners seen are {owned}, not {walk.live_pools}")
        held = {(each["device"], each["segment_pool_id"]) for each in self.segments}
        self.map = snapshot.analyse(
            self.segments,
            self.settings,
            {device: limits},
            live_pools=() if known == "none" else owned,
            dropped_pools=held - owned if known == "all" else (),
        )[device]
        self.pools_known = known == "all" or (known == "owned" and owned >= held - _NO_POOLS)
        self.ledger()
        self.trapped()
        self.free_blocks()
        self.headroom()
        for figure, reason in self.map.absent.items():
            key = f"{figure}: {reason}"
            self.tally.absent[key] = self.tally.absent.get(key, 0) + 1
        self.tally.untouched = int(limits.untouched)

    def describe(self) -> str:
        found = self.map
        return (
            f"headroom {found.headroom}, blocks {found.free_block_largest}, trapped {found.trapped}, "
            f"untouched {self.untouched}, absent {dict(found.absent)}"
        )

    # ---- what must hold ----

    def ledger(self) -> None:
        found, figures = self.map, self.statistics
        current = {
            key: value["all"]["current"]
            for key, value in figures.items()
            if isinstance(value, dict) and "all" in value
        }
        self.expect(found.reserved == current["reserved_bytes"], "reserved")
        self.expect(found.allocated == current["allocated_bytes"], "allocated")
        self.expect(
            found.pending_free == current["active_bytes"] - current["allocated_bytes"], "pending frees"
        )
        self.expect(
            sum(sum(place.free) for place in found.places) == found.free,
            "the free blocks are not what is free",
        )
        if found.split_free is not None:
            self.expect(found.split_free + (found.cached_free or 0) == found.free, "the ledger has a gap")
            if not found.pending_free:
                self.expect(
                    (found.split_free, found.split_free) == found.trapped, "split_free is not trapped"
                )
            if not any(place.expandable for place in found.places):
                split = current["inactive_split_bytes"] + found.private_idle
                # torch's own count goes wrong where a split limit was lowered: more than is free it is not
                if split <= found.free:
                    self.expect(found.split_free == split, "split_free is not what the statistics say")

    def trapped(self) -> None:
        found = self.map.trapped
        if found is None:
            return
        left = self.left_trapped()
        self.expect(found.least <= left <= found.most, f"{left} remained trapped")
        if self.pools_known:
            self.expect(found.exact, "trapped is not exact with the pools known")

    def free_blocks(self) -> None:
        blocks = self.map.free_block_largest
        if blocks is None:
            return
        # A pool that lends takes over from a fraction that refuses: no call of the driver either.
        lent = self.walk.lends and self.walk.mode.fraction
        served = {kind: bounds.least for kind, bounds in blocks.items() if bounds.least}
        above = {"small": blocks["small"].most + 1, "large": max(blocks["large"].most, MIB) + 1}
        if above["small"] > MIB:
            del above["small"]
        for kind, size in above.items():
            *answers, beyond = self.attempts(*served.values(), size)
            for of_kind, answer in zip(served, answers, strict=True):
                self.expect(answer == (True, True), f"{served[of_kind]} is not served by a {of_kind} block")
            served = {}
            self.expect(lent or not beyond[1], f"{size} is served by a {kind} block")

    def headroom(self) -> None:
        if self.map.headroom is None:
            return
        least, most = self.map.headroom
        self.tally.exact = int(least == most)
        if least:
            self.expect(self.attempt(least)[0], f"{least} fails")
        total = self.torch.cuda.get_device_properties(self.device).total_memory
        larger = [most + 2 * MIB, most + 20 * MIB, self.chance.randrange(most + 1, 2 * total), MIB, 10 * MIB]
        larger += [block["size"] for each in self.segments for block in each["blocks"]]
        larger = sorted({size for size in larger if size > most + 1})
        for size in (most + 1, *self.chance.sample(larger, min(1, len(larger)))):
            self.expect(not self.attempt(size)[0], f"{size} succeeds")
        reason = None if least == most else self.map.absent["headroom"]
        if (
            reason == "memory_fraction"
            and self.settings.throw_on_cudamalloc_oom
            and not self.walk.mode.fraction
        ):
            self.expect(not self.attempt(least + 1)[0], f"{least + 1} succeeds, and no fraction is set")
        if reason not in ("memory_fraction", "unmapped_addresses") or not self.settings.expandable_segments:
            return
        if self.settings.divisions:  # one step of rounding may be larger
            return
        page = self.settings.large_segment_size or 20 * MIB
        # The free bytes before what is mapped and those after it are each less than a page: together they may
        # be more than one, never two.
        self.expect(not self.attempt(least + 2 * page)[0], "two pages more succeed")
        self.tally.beyond = int(self.attempt(least + page + 1)[0])
        if self.chance.random() < 0.3 or self.tally.beyond:
            low, high = least // 512, most // 512
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.attempt(middle * 512)[0] else (low, middle - 1)
            self.tally.below.append(low * 512 - least)


class ExportJudge(Oracle):
    """Holds what is exported in one device's state against what the allocator then does."""

    changed_private = False

    def judge_all(self) -> bool:
        """Whether a change has ended the walk."""
        try:
            self.judge()
        except EndedError:
            return True
        return False

    def judge(self) -> None:
        self.tally.exported = 1
        self.walk.clock.pass_by(10_000)
        self.collect()
        self.expect(
            self.figure("snapshot.age") in (None, 0) or self.figure("snapshot.age") < 60, "an old snapshot"
        )
        if not self.expect_seen():
            return
        self.ledger(sure=True)
        self.served(sure=not self.absent)
        given_back = self.given_back()
        for _ in range(2):
            self.change(given_back)

    def collect(self) -> None:
        self.watched = self.walk.watched.collect()
        self.absent = {
            labels["torch.memory.telemetry.absence"]: count
            for labels, count in self.points("telemetry.absent")
        }

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        told = self.watched.all(f"torch.memory.{name}")
        return [(labels, value) for labels, value in told if labels["torch.device"] == f"cuda:{self.device}"]

    def figure(self, name: str) -> Any:
        return next((value for _, value in self.points(name)), None)

    def describe(self) -> str:
        names = ("headroom", "fragmentation", "reserved", "active", "allocated", "snapshot.age")
        told = {name: self.figure(name) for name in names}
        return f"exported {told}, ledger {self.watched.ledger(f'cuda:{self.device}')}, absent {self.absent}"

    def expect_seen(self) -> bool:
        """Whether anything is told of the device; a device that was never used has nothing."""
        told = self.figure("reserved") is not None
        reserved = self.torch.cuda.memory_stats_as_nested_dict(self.device)["reserved_bytes"]["all"]
        self.expect(told or not reserved["peak"], "nothing is exported of a device that is used")
        return told

    def ledger(self, sure: bool) -> None:
        figures = self.torch.cuda.memory_stats_as_nested_dict(self.device)
        held, allocated, active = (
            figures[family]["all"]["current"]
            for family in ("reserved_bytes", "allocated_bytes", "active_bytes")
        )
        free, total = self.torch.cuda.mem_get_info(self.device)
        states = self.watched.ledger(f"cuda:{self.device}")
        self.expect(sum(states.values()) == total == self.figure("limit"), "the ledger is not the limit")
        self.expect(states.get("allocated") == allocated, f"{allocated} are allocated")
        self.expect(states.get("pending_free") == active - allocated, f"{active - allocated} are pending")
        self.expect(states.get("free") == free, f"{free} are free")
        self.expect(states.get("external") == total - free - held, f"{total - free - held} are of others")
        split, fragmentation = states.get("split_free"), self.figure("fragmentation")
        self.expect(
            split is not None or not sure or bool(self.absent), "split_free is absent without a reason"
        )
        if active != allocated:
            return
        trapped = self.left_trapped()
        self.expect(split in (None, trapped), f"{trapped} remain trapped")
        if held and fragmentation is not None and split is not None:
            self.expect(fragmentation == trapped / held, f"{trapped / held} of what is held is trapped")

    def served(self, sure: bool, blocks: bool = True) -> None:
        """What is told to succeed does, and where nothing is left open no more does; ``blocks`` if those that
        the snapshot found are still there."""
        headroom = self.figure("headroom")
        self.expect(headroom is not None or bool(self.absent), "headroom is absent without a reason")
        if headroom:
            self.expect(self.attempt(headroom)[0], f"{headroom} fails")
        if headroom is not None and sure:
            self.expect(not self.attempt(headroom + 1)[0], f"{headroom + 1} succeeds")
        lends = self.walk.lends and self.walk.mode.fraction
        for labels, size in self.points("free_block.largest") if blocks else ():
            if size:
                self.expect(self.attempt(size) == (True, True), f"no block serves {size}, {labels}")
            larger = max(size, MIB) + 1 if labels["torch.memory.pool"] == "large" else size + 1
            if sure and not lends and (labels["torch.memory.pool"] == "large" or larger <= MIB):
                self.expect(not self.attempt(larger)[1], f"a block serves {larger}, {labels}")

    def given_back(self) -> int:
        return self.torch.cuda.memory_stats_as_nested_dict(self.device)["num_device_free"]

    def change(self, given_back: int) -> None:
        """What bounds the process changes, or what lies in private pools, and no snapshot is due."""
        walk = self.walk
        private = [walk.graph, walk.drop_graph, walk.pool, walk.in_pool]
        bounds = [walk.others, walk.others]
        bounds += [walk.fraction] * 2 * walk.mode.fraction + [walk.switch] * 2 * bool(walk.mode.switched)
        change = self.chance.choice(private + bounds)
        self.changed_private = self.changed_private or change in private
        with contextlib.suppress(self.torch.OutOfMemoryError):
            change()
        self.where += f", then {change.__name__}"
        self.collect()
        if self.expect_seen():
            self.ledger(sure=False)
            if self.given_back() == given_back:  # else the free block may be gone that headroom stands on
                self.served(sure=False, blocks=not self.changed_private)


if __name__ == "__main__":  # one mode in one process: run.py starts it on the emulated GPU
    mode, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps(judged([mode], list(range(first, last)))[mode]))
