# SPDX-License-Identifier: Apache-2.0
"""The user's resets, in any order between collections, never make a counter fall."""

from __future__ import annotations

import contextlib
import random

import pytest
from exported import Exported

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

MIB = 1 << 20
COUNTERS = {
    "torch.memory.allocation.retries": "num_alloc_retries",
    "torch.memory.ooms": "num_ooms",
    "torch.memory.device.allocations": "num_device_alloc",
    "torch.memory.device.frees": "num_device_free",
    "torch.memory.device.syncs": "num_sync_all_streams",
    "torch.memory.allocations": "allocation.all.allocated",
    "torch.memory.turnover": "allocated_bytes.all.allocated",
}


def random_lives(seed: int, runs: int, delta: bool) -> dict:
    """Runs of random steps; returns how often a total fell and how far each ended from what happened."""
    import torch

    choose = random.Random(seed)
    exported = Exported(delta=delta)
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    kept = [torch.empty(MIB, dtype=torch.uint8, device="cuda")]
    totals = dict.fromkeys(COUNTERS, 0)
    fell, collections, resets = [], 0, 0

    def collect() -> None:
        nonlocal collections
        collections += 1
        exported.collect()
        for name in COUNTERS:
            value = exported.value(name)
            if value is None:
                continue
            if delta:
                if value < 0:
                    fell.append([name, value])
                totals[name] += value
            else:
                if value < totals[name]:
                    fell.append([name, totals[name], value])
                totals[name] = value

    truth = dict.fromkeys(COUNTERS, 0)

    def true_totals() -> dict:
        stats = torch.cuda.memory_stats(0)
        return {name: truth[name] + stats[key] for name, key in COUNTERS.items()}

    def reset_counters() -> None:
        nonlocal resets
        resets += 1
        truth.update(true_totals())
        torch.cuda.reset_accumulated_memory_stats()

    def out_of_memory() -> None:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            torch.empty(10 << 30, dtype=torch.uint8, device="cuda")

    steps = [
        lambda: kept.append(torch.empty(choose.randrange(1, 8 * MIB), dtype=torch.uint8, device="cuda")),
        lambda: kept and kept.pop(choose.randrange(len(kept))),
        lambda: kept.clear(),
        torch.cuda.empty_cache,
        out_of_memory,
        torch.cuda.reset_peak_memory_stats,
        reset_counters,
    ]
    for _ in range(runs):
        for _ in range(choose.randrange(12)):
            choose.choices(steps, weights=[8, 6, 1, 1, 1, 1, 1])[0]()
        if choose.random() < 0.5:
            collect()  # so that nothing is lost at the reset that follows
            reset_counters()
        collect()
    # From here each reset follows a collection, so that every total must gain exactly what happened. What is
    # live differs from reset to reset: two with the same bytes live and more happening after the second than
    # before it look, in every figure there is, like none.
    collect()
    started, began = dict(totals), true_totals()
    for _ in range(runs):
        for _ in range(choose.randrange(12)):
            choose.choices(steps[:6], weights=[8, 6, 1, 1, 1, 1])[0]()
        kept.append(torch.empty(choose.randrange(1, 8 * MIB), dtype=torch.uint8, device="cuda"))
        collect()
        if choose.random() < 0.5:
            reset_counters()
    collect()
    ended = true_totals()
    return {
        "fell": fell,
        "gained": {name: totals[name] - started[name] for name in COUNTERS},
        "happened": {name: ended[name] - began[name] for name in COUNTERS},
        "collections": collections,
        "resets": resets,
    }


@pytest.mark.parametrize("delta", [False, True], ids=["cumulative", "delta"])
@pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])
def test_no_total_falls_and_none_loses_what_was_collected(gpu, delta, expandable):
    conf = "expandable_segments:True" if expandable else None
    got = gpu.run(random_lives, args=[7, 300, delta], memory="1GiB", alloc_conf=conf, timeout=120)
    assert got["fell"] == []
    assert got["gained"] == got["happened"]
    assert got["happened"]["torch.memory.allocation.retries"] > 0
    assert got["collections"] > 700
    assert got["resets"] > 200
