# SPDX-License-Identifier: Apache-2.0
"""The analysis of a memory snapshot against the snapshot itself."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch

from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits, analyse

from .harness import Figure, figures_of, interleaved, print_figures, ratio

BLOCKS = (1_000, 10_000, 100_000)


def figures(quick: bool) -> list[Figure]:
    return [
        figure
        for blocks in BLOCKS
        for conf in ("expandable_segments:False", "expandable_segments:True")
        for figure in figures_of(
            "snapshots", "--blocks", str(blocks), "--conf", conf, "--rounds", "10" if quick else "40"
        )
    ]


def compare(blocks: int, conf: str, rounds: int) -> list[Figure]:
    torch._C._accelerator_setAllocatorSettings(conf)
    memory = holes(blocks)
    settings = AllocatorSettings.parse(conf, "runtime")
    limits = {0: Limits(DriverMemory(*torch.cuda.mem_get_info(0)), fraction=1.0)}
    latest: list[Any] = []

    def snapshot() -> None:
        latest[:] = torch.cuda.memory_snapshot(include_traces=False)

    snapshot()
    count = sum(len(segment["blocks"]) for segment in latest)
    times = interleaved({"snapshot": snapshot, "ours": lambda: analyse(latest, settings, limits)}, rounds)
    del memory
    mode = "expandable" if conf.endswith("True") else "native"
    name = f"the analysis of {count:,} blocks, {mode}"
    return [ratio(name, "the snapshot call", times, "ours", "snapshot", 0.5)]


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--conf")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    print_figures(compare(options.blocks, options.conf, options.rounds))


if __name__ == "__main__":
    main()
