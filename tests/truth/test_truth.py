# SPDX-License-Identifier: Apache-2.0
"""What the snapshot analysis says, held against what the real allocator then does.

A few random states of each mode; ``python tests/truth/run.py`` judges as many as one likes.
"""

from __future__ import annotations

import pytest

from truth import states

pytestmark = pytest.mark.needs_emulation

FAMILIES = {
    "native": [
        mode for mode, what in states.MODES.items() if states.ON not in what.conf and not what.switched
    ],
    "expandable": [mode for mode, what in states.MODES.items() if states.ON in what.conf],
    "switched": [mode for mode, what in states.MODES.items() if what.switched],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_states_are_told_as_the_allocator_shows_them(gpu, family):
    seeds = list(range(6 if family == "switched" else 3))
    tallies = gpu.run(
        states.judged,
        args=[FAMILIES[family], seeds, 3],
        memory=states.MEMORY,
        devices=states.DEVICES,
        timeout=280,
        env={"TRUTH_EXPORTED": "1"},
    )
    wrong = [mismatch for tally in tallies.values() for mismatch in tally["mismatches"]]
    assert not wrong, "\n".join(wrong[:5])
    assert all(tally["states"] for tally in tallies.values())


def a_pool_dropped_too_early() -> dict:
    """Where torch may unmap this pool's memory twice (2.14.1, 2.15.0), a snapshot can hold garbage."""
    import os

    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
    from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
    from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits, analyse

    def empty(mib):
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

    kept = empty(50)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = empty(30)
    del pool
    before = torch.cuda.memory_snapshot()
    del inside
    torch.cuda.empty_cache()
    told = []
    for segments in (before, torch.cuda.memory_snapshot()):
        limits = Limits(
            DriverMemory(*torch.cuda.mem_get_info()),
            torch.cuda.get_per_process_memory_fraction(),
            torch.cuda.memory_reserved(),
        )
        settings = AllocatorSettings.of_snapshot(
            torch.cuda.memory._snapshot()["allocator_settings"], os.environ
        )
        told.append(analyse(segments, settings, {0: limits})[0].headroom)
    return {
        "fits": all(headroom is None or control.would_fit(headroom.least) for headroom in told),
        "kept": kept.numel(),
    }


def test_a_pool_dropped_while_its_memory_is_in_use_is_told_truly_or_not_at_all(gpu):
    assert gpu.run(a_pool_dropped_too_early, memory="640MiB", alloc_conf=states.ON)["fits"]


def a_history(leading_pages: bool) -> dict:
    """Pages that were unmapped lie before all that is mapped, or nowhere; no snapshot shows them."""
    import os

    import torch
    from emulator import control

    from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
    from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
    from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits, analyse

    mib = 1 << 20

    def empty(size):
        return torch.empty(size * mib, dtype=torch.uint8, device="cuda")

    highest = [empty(100) for _ in range(4)]  # so that no peak tells the two apart
    highest.clear()
    torch.cuda.empty_cache()
    first = empty(160)
    if leading_pages:
        torch.cuda.empty_cache()  # nothing, but it is counted
    else:
        del first
        torch.cuda.empty_cache()
    kept = [empty(21), empty(19 + 100 + 18), empty(2)]
    first = None
    del kept[1]
    torch.cuda.empty_cache()
    control.external_malloc(0, torch.cuda.mem_get_info()[0] - 100 * mib)

    segments = torch.cuda.memory_snapshot()
    settings = AllocatorSettings.of_snapshot(torch.cuda.memory._snapshot()["allocator_settings"], os.environ)
    limits = Limits(DriverMemory(*torch.cuda.mem_get_info()), torch.cuda.get_per_process_memory_fraction())
    told = analyse(segments, settings, {0: limits})[0]
    begin = min(segment["address"] for segment in segments)
    shape = [
        (
            segment["address"] - begin,
            [(block["address"] - begin, block["size"], block["state"]) for block in segment["blocks"]],
        )
        for segment in segments
    ]
    succeed = [size for size in (100, 101, 120, 121, 137, 138) if control.would_fit(size * mib)]
    return {
        "told": told.headroom.least // mib,
        "why": told.absent["headroom"],
        "succeed": succeed,
        "looks": [shape, torch.cuda.mem_get_info(), torch.cuda.memory_stats()],
        "kept": len(kept),
    }


def test_what_looks_the_same_may_end_more_than_a_page_apart_and_the_lesser_is_told(gpu):
    """Nobody can tell a figure from a snapshot that always succeeds and that a page more always fails of."""
    hidden, none = (
        gpu.run(a_history, args=[leading], memory="640MiB", alloc_conf=states.ON) for leading in (True, False)
    )
    assert hidden["looks"] == none["looks"]
    assert hidden["succeed"] == [100]
    assert none["succeed"] == [100, 101, 120, 121, 137]  # the free bytes on both sides of the unmapped pages
    assert hidden["told"] == none["told"] == 100
    assert hidden["why"] == none["why"] == "unmapped_addresses"
