# SPDX-License-Identifier: Apache-2.0
"""One collection of every metric, against the raw readings and the SDK with as many no-op instruments."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from typing import Any

import torch
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor
from opentelemetry_instrumentation_torchmem.signals import METRICS

from . import harness
from .harness import Figure, child, environment, figures_of, interleaved, print_figures, ratio

DEAD_POOLS = 1000


def figures(quick: bool) -> list[Figure]:
    rounds = "100" if quick else "400"
    return [
        *figures_of("collection", "--used", "1", "--rounds", rounds),
        *figures_of("collection", "--used", "1", "--rounds", rounds, devices=8),
        *figures_of("collection", "--used", "8", "--rounds", rounds, devices=8),
        dead_pools(10 if quick else 40),
    ]


def dead_pools(rounds: int) -> Figure:
    """Two processes take turns, one of which made 1,000 memory pools and dropped them."""
    processes = {
        pools: subprocess.Popen(
            child("collection", "--pools", str(pools)),
            env=environment(),
            cwd=harness.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for pools in (DEAD_POOLS, 0)
    }
    times: harness.Times = {"with": [], "without": []}

    def ask(process: subprocess.Popen[str]) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    try:
        for process in processes.values():
            ask(process)  # it has warmed up
        for _ in range(rounds):
            times["with"].append(ask(processes[DEAD_POOLS]))
            times["without"].append(ask(processes[0]))
    finally:
        for process in processes.values():
            process.communicate()  # the end of its input ends it
    name = f"a collection with {DEAD_POOLS:,} dead private pools"
    return ratio(name, "one without", times, "with", "without", 1.2)


def answer(pools: int) -> None:
    """The median time of 50 collections, for each line of standard input."""
    memory = harness.fragmented(torch, 1)
    for _ in range(pools):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            block = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        del block, pool
    torch.cuda.empty_cache()
    reader = instrumented()
    for _ in range(50):
        reader.collect()
    for _ in sys.stdin:
        times: list[int] = []
        for _ in range(50):
            began = thread_time_ns()
            reader.collect()
            times.append(thread_time_ns() - began)
        print(median(times) / 1000, flush=True)
    del memory


def compare(used: int, rounds: int) -> list[Figure]:
    memory = harness.fragmented(torch, used)
    reader = instrumented()
    ready, nothing = floor(reader, used, ready=True), floor(reader, used, ready=False)
    times = interleaved(
        {"ours": reader.collect, "ready": ready, "nothing": nothing, "raw": lambda: raw(used)}, rounds
    )
    del memory
    visible = torch.cuda.device_count()
    name = f"a collection, {used} device{'s' if used > 1 else ''}"
    name += "" if visible == used else f" of {visible}"
    points = "raw readings + as many no-op instruments with as many ready-made points"
    nothing = "raw readings + as many no-op instruments that yield nothing"
    return [
        ratio(name, points, times, "ours", "ready", 2),
        ratio(name, nothing, times, "ours", "nothing", None),
        ratio("that floor with ready-made points", nothing, times, "ready", "nothing", None),
    ]


def instrumented(**options: Any) -> InMemoryMetricReader:
    reader = InMemoryMetricReader()
    TorchMemInstrumentor().instrument(meter_provider=MeterProvider([reader]), **options)
    return reader


def raw(devices: int) -> None:
    """The cheapest calls that give what a collection needs."""
    for index in range(devices):
        torch._C._accelerator_getDeviceStats(index)
        torch.cuda.mem_get_info(index)


def floor(reader: InMemoryMetricReader, devices: int, *, ready: bool) -> Callable[[], None]:
    """Raw readings, then a collection of as many instruments; ``ready``: with the points of ``reader``."""
    points = exported(reader)
    of_floor = InMemoryMetricReader()
    meter = MeterProvider([of_floor]).get_meter("floor")
    for row in METRICS:
        observations = points.get(row.name, []) if ready else []
        create = getattr(meter, f"create_observable_{row.kind.name.lower()}")
        create(row.name, [lambda _, told=observations: told], unit=row.unit, description=row.about)

    def collect() -> None:
        raw(devices)
        of_floor.collect()

    return collect


def exported(reader: InMemoryMetricReader) -> dict[str, list[Observation]]:
    data: Any = reader.get_metrics_data()
    return {
        metric.name: [Observation(point.value, dict(point.attributes)) for point in metric.data.data_points]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--used", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--pools", type=int)
    options = parser.parse_args()
    if options.pools is None:
        print_figures(compare(options.used, options.rounds))
    else:
        answer(options.pools)


if __name__ == "__main__":
    main()
