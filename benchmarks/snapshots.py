# SPDX-License-Identifier: Apache-2.0
"""The analysis of a memory snapshot against the snapshot itself; what taking snapshots costs a server."""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Callable, Iterable
from statistics import median, quantiles
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor
from opentelemetry_instrumentation_torchmem.allocator import survey
from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits, analyse
from opentelemetry_instrumentation_torchmem.requests.track import track

from .harness import Figure, Times, figures_of, interleaved, of, print_figures, ratio
from .requests import Bench

BLOCKS = (1_000, 10_000, 100_000)


INTERVAL = 10
"""Seconds from one export to the next."""
REQUESTS = 100 * INTERVAL
ARRIVALS = 0.002
"""Seconds from one request to the next, where its wait is looked at."""
MODES = {"native": "expandable_segments:False", "expandable": "expandable_segments:True"}


def figures(quick: bool) -> list[Figure]:
    rounds, few = ("10", "5") if quick else ("40", "20")
    asked = [("--analysis", str(blocks), rounds) for blocks in BLOCKS]
    asked += [("--server", "10000", few), ("--sampled_out", "10000", few)]
    asked += [("--pause", "100000", few)]
    return [
        figure
        for what, blocks, times in asked
        for mode in MODES
        for figure in figures_of("snapshots", what, blocks, "--mode", mode, "--rounds", times)
    ]


def analysis(blocks: int, mode: str, rounds: int) -> list[Figure]:
    memory = holes(blocks)
    settings = AllocatorSettings.parse(MODES[mode], "runtime")
    limits = {0: Limits(DriverMemory(*torch.cuda.mem_get_info(0)), fraction=1.0)}
    latest: list[Any] = []

    def snapshot() -> None:
        latest[:] = torch.cuda.memory_snapshot(include_traces=False)

    snapshot()
    count = sum(len(segment["blocks"]) for segment in latest)
    times = interleaved({"snapshot": snapshot, "ours": lambda: analyse(latest, settings, limits)}, rounds)
    del memory
    name = f"the analysis of {count:,} blocks, {mode}"
    return [ratio(name, "the snapshot call", times, "ours", "snapshot", 0.5)]


def server(blocks: int, mode: str, rounds: int, sampler: Sampler = ALWAYS_ON) -> list[Figure]:
    """Each round is one interval: its requests, and a collection with a snapshot."""
    memory = holes(blocks)
    traced = sampler is ALWAYS_ON
    bench = Bench(sampler)
    answer = bench.ours(snapshot_share=0.1)
    answer_by_hand = Bench().floor(span=traced, records=True)
    now = monotonic()
    taken = 0
    survey.monotonic = lambda: now

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        taken += 1
        return analyse(*arguments, **options)

    survey.analyse = counted

    def export() -> None:
        nonlocal now
        now += INTERVAL
        bench.reader.collect()

    def ours() -> None:
        for _ in range(REQUESTS):
            answer()
        export()

    def by_hand() -> None:
        for _ in range(REQUESTS):
            answer_by_hand()

    def reads() -> None:
        read = torch._C._accelerator_getDeviceStats
        for _ in range(REQUESTS):
            read(0)
            read(0)

    times = interleaved({"ours": ours, "by hand": by_hand, "reads": reads, "export": export}, rounds)
    del memory
    kind = "traced" if traced else "metrics alone"
    name = f"a core's share, 100 requests/s, {kind}, {blocks:,} blocks, {mode}"
    made = "span and records" if traced else "records"
    readings = "two raw readings a request"
    of_export = f"{median(times['export']) / 1000:.1f} ms; {taken} snapshots in {2 * rounds + 6} intervals"
    return [
        _share(name, readings, times, "ours", "reads", 0.5),
        _share(f"of it the SDK's own, the same {made} by hand", readings, times, "by hand", "reads"),
        _share("of it this package's", f"{readings}, {made} by hand", times, "ours", "by hand", 0.5),
        of("of that the export and its snapshot", "nothing", _shares(times["export"]), "%", None, of_export),
    ]


def _share(name: str, against: str, times: Times, side: str, floor: str, goal: float | None = None) -> Figure:
    above = [a - b for a, b in zip(times[side], times[floor], strict=True)]
    detail = f"{median(times[side]) / 1000:.1f} against {median(times[floor]) / 1000:.1f} ms"
    return of(name, against, _shares(above), "%", goal, detail)


def _shares(times: Iterable[float]) -> list[float]:
    """Percent of a core, of microseconds in an interval."""
    return [each / INTERVAL / 1e4 for each in times]


def sampled_out(blocks: int, mode: str, rounds: int) -> list[Figure]:
    """The same without spans."""
    return server(blocks, mode, rounds, ALWAYS_OFF)


def pause(blocks: int, mode: str, rounds: int) -> list[Figure]:
    """How much later than it should a request ends that comes while a snapshot is taken elsewhere."""
    memory = holes(blocks)
    collect = instrumented()
    with_one: list[float] = []
    without: list[float] = []
    now = monotonic()
    survey.monotonic = lambda: now
    for turn in range(2 * rounds + 2):
        due = turn % 2 == 0
        now += 3600 * due
        waits = with_one if due else without
        waits.append(longest_wait(collect) * 1000)
    del memory, with_one[0], without[0]
    low, _, high = quantiles(with_one, n=4)
    detail = f"median {median(with_one):.0f} ms; beside a collection without one {max(without):.0f} ms"
    name = f"a request's longest wait for a snapshot of {blocks:,} blocks, {mode}"
    return [
        Figure(
            name, f"the moment it was due; {rounds} snapshots", max(with_one), "ms", None, low, high, detail
        )
    ]


def longest_wait(collect: Callable[[], object]) -> float:
    """Seconds; of the requests that are due while another thread collects."""
    collector = threading.Thread(target=collect)
    longest = 0.0
    due = perf_counter()
    collector.start()
    last = False
    while not last:
        last = not collector.is_alive()
        due = max(due + ARRIVALS, perf_counter()) if last else due + ARRIVALS
        sleep(max(0.0, due - perf_counter()))
        with track("answer"):
            pass
        longest = max(longest, perf_counter() - due)
    return longest


def instrumented() -> Callable[[], object]:
    """Traced and metered; what collects."""
    reader, tracers = InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SpanProcessor())
    TorchMemInstrumentor().instrument(meter_provider=MeterProvider([reader]), tracer_provider=tracers)
    return reader.collect


def holes(blocks: int) -> list[Any]:
    """About so many blocks of all sizes, every second one free."""
    chance = random.Random(blocks)
    sizes = [
        chance.choice([chance.randrange(1, 1 << 14), chance.randrange(1, 1 << 14), 1 << 15])
        if index % 200
        else chance.randrange(1 << 20, 3 << 20)
        for index in range(blocks)
    ]
    kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    return kept[::2]


SIDES = {each.__name__: each for each in (analysis, server, sampled_out, pause)}


def main() -> None:
    parser = argparse.ArgumentParser()
    for what in SIDES:
        parser.add_argument(f"--{what}", metavar="BLOCKS", type=int)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    torch._C._accelerator_setAllocatorSettings(MODES[options.mode])
    for what, measure in SIDES.items():
        blocks = getattr(options, what)
        if blocks is not None:
            print_figures(measure(blocks, options.mode, options.rounds))


if __name__ == "__main__":
    main()
