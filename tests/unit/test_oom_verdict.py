# SPDX-License-Identifier: Apache-2.0
"""The verdict's arithmetic, and the flight recorder it draws on."""

from __future__ import annotations

from itertools import pairwise

import pytest

from opentelemetry_instrumentation_torchmem.allocator.reading import AllocatorReading
from opentelemetry_instrumentation_torchmem.allocator.recorder import LENGTH, Recorder, thinned
from opentelemetry_instrumentation_torchmem.allocator.snapshot import Place
from opentelemetry_instrumentation_torchmem.allocator.verdict import (
    VERDICTS,
    Failure,
    FreeBlocks,
    free_blocks,
    kind_of,
    sizes,
    usable_below,
    verdict,
)
from opentelemetry_instrumentation_torchmem.oom import _freed_before

MIB = 1 << 20
NOTHING_FREE = FreeBlocks(0, 0, 0, 0, 0)


def failed(asked=64, free=10, total=1000, allowed=None, reserved=980, blocks=NOTHING_FREE, **known):
    """A failure, in MiB."""
    for name in ("free_now", "pending_before", "freed_otherwise", "external", "baseline", "page"):
        if name in known:
            known[name] *= MIB
    return Failure(
        asked * MIB,
        free * MIB,
        total * MIB,
        (total if allowed is None else allowed) * MIB,
        reserved * MIB,
        FreeBlocks(*(size * MIB for size in blocks)) if blocks is not None else None,
        **known,
    )


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        # over the fraction: the device has enough
        (failed(free=500, allowed=500, reserved=450), "fraction"),
        (failed(free=63, allowed=500, reserved=450), "full"),  # it has not
        (failed(free=500, allowed=500, reserved=436, free_now=500), "changed_meanwhile"),  # allowed to a byte
        (failed(free=500, allowed=500, reserved=437), "fraction"),
        # pending frees: a block fits now, and nothing but what was pending came free
        (failed(blocks=(64, 64, 0, 0, 0), pending_before=64, freed_otherwise=0), "pending_frees"),
        (failed(blocks=(64, 64, 0, 0, 0), pending_before=1, freed_otherwise=0), "pending_frees"),  # joined
        (failed(blocks=(64, 64, 0, 0, 0), pending_before=64, freed_otherwise=1), "changed_meanwhile"),
        (failed(blocks=(64, 64, 0, 0, 0), pending_before=64), "changed_meanwhile"),  # the counters were reset
        (failed(blocks=(64, 64, 0, 0, 0), freed_otherwise=64, nobody_else=True), "pending_frees"),
        (failed(blocks=(64, 64, 0, 0, 0), nobody_else=True), "pending_frees"),  # there is no earlier reading
        (failed(blocks=(64, 64, 0, 0, 0), freed_otherwise=0, nobody_else=True), "changed_meanwhile"),
        (
            failed(blocks=(64, 64, 0, 0, 0), freed_otherwise=0),
            "changed_meanwhile",
        ),  # it was there
        (failed(blocks=(64, 64, 0, 0, 0)), "changed_meanwhile"),
        # ... of one within what the request can have been it is not known whether it fits
        (failed(blocks=(63, 63, 0, 0, 0), pending_before=64, freed_otherwise=0), "fragmented"),
        (failed(blocks=(62, 62, 0, 0, 0), pending_before=64, freed_otherwise=0), "fragmented"),
        (failed(blocks=(0, 0, 0, 0, 64)), "pending_frees"),  # in a capture they stay pending
        (failed(blocks=(10, 10, 0, 0, 63)), "full"),  # no such block will be free
        (failed(asked=20, blocks=(5, 5, 0, 0, 0), pending_before=8, freed_otherwise=0), "full"),  # 1 to 20
        (failed(asked=20, blocks=(19, 19, 0, 0, 0), pending_before=8, freed_otherwise=0), "fragmented"),
        (failed(asked=20, blocks=(20, 20, 0, 0, 0), pending_before=8, freed_otherwise=0), "pending_frees"),
        # changed meanwhile: the driver could give it now
        (failed(free_now=64), "changed_meanwhile"),
        (failed(free_now=63), "full"),
        # private pools, before another stream, before fragmented
        (failed(blocks=(0, 0, 0, 54, 0)), "private_pools"),
        (failed(blocks=(0, 0, 0, 53, 0)), "full"),
        (failed(blocks=(200, 30, 54, 54, 0)), "private_pools"),
        (failed(blocks=(0, 0, 0, 10, 0, 0, 44)), "private_pools"),  # with the default pool, for a pool's
        (failed(blocks=(200, 30, 70, 53, 0, 64)), "another_stream"),
        (failed(blocks=(200, 30, 70, 53, 0, 63)), "fragmented"),  # no block there either
        (failed(blocks=(54, 30, 53, 0, 0)), "fragmented"),
        (failed(blocks=(18, 18, 18, 18, 0)), "fragmented"),  # none of them alone
        (failed(blocks=(17, 17, 18, 18, 0)), "full"),
        # memory outside PyTorch: what others took since
        (failed(external=490, baseline=436), "outside_pytorch"),  # 54 more, and 10 are free
        (failed(external=490, baseline=437), "full"),
        (failed(baseline=0), "full"),  # it could not be read in one moment
        (failed(external=490), "full"),  # what was there from the beginning is unknown
        # expandable segments are mapped in whole pages
        (failed(asked=32, free=34, free_now=34), "changed_meanwhile"),
        (failed(asked=32, free=34, free_now=34, expandable=True), "fragmented"),
        (failed(asked=32, free=34, free_now=40, expandable=True), "changed_meanwhile"),
        (failed(asked=2, free=2, free_now=2, expandable=True), "changed_meanwhile"),
        (failed(asked=32, free=10, blocks=(0, 0, 0, 29, 0), expandable=True), "fragmented"),
        (failed(asked=32, free=10, blocks=(0, 0, 0, 30, 0), expandable=True), "private_pools"),
        # full
        (failed(blocks=(50, 50, 0, 0, 0)), "full"),
        (failed(blocks=None), "unknown"),
        (failed(free=500, allowed=500, reserved=450, blocks=None), "fraction"),
        (Failure(64 * MIB, 10 * MIB, None, 1000 * MIB), "unknown"),
    ],
)
def test_each_verdict_is_the_first_that_the_arithmetic_bears_out(failure, expected):
    assert verdict(failure) == expected
    assert expected in VERDICTS


def test_what_was_asked_of_the_driver_bounds_the_request():
    assert sizes(2 * MIB) == (512, MIB)
    assert sizes(20 * MIB) == (MIB + 512, 20 * MIB)
    assert sizes(12 * MIB) == (10 * MIB + 512, 12 * MIB)
    assert sizes(64 * MIB, page=64 * MIB) == (MIB + 512, 64 * MIB)
    assert [kind_of(2 * MIB), kind_of(20 * MIB)] == ["small", "large"]


def test_of_a_block_within_what_a_request_can_have_been_it_may_fit():
    of = [(62, 64), (63, 64), (64, 64), (1, 20), (2, 20), (19, 20)]
    may = [failed(asked=asked, blocks=(size, size, 0, 0, 0)).may_fit for size, asked in of]
    assert may == [False, True, False, False, True, True]


def counted(at, active, allocated, freed, peaks=(100, 100), pool="large_pool"):
    families = {
        "active_bytes": {"current": active, "peak": peaks[0]},
        "allocated_bytes": {"current": allocated, "peak": peaks[1], "freed": freed},
    }
    return AllocatorReading(0, at, {key: {pool: value} for key, value in families.items()})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (counted(0, 40, 30, 200), counted(1, 30, 30, 200), (10, 0)),
        (counted(0, 40, 30, 200), counted(1, 30, 30, 207), (10, 7)),
        (counted(0, 40, 30, 200), counted(1, 30, 30, 3), (10, None)),  # reset
        (counted(0, 40, 30, 200), counted(1, 30, 30, 200, pool="small_pool"), (0, None)),
        # of what was freed since, 25 - 10 waited for a stream
        (counted(0, 40, 30, 200), counted(1, 30, 30, 215, peaks=(125, 100)), (25, 0)),
        (counted(0, 40, 30, 200), counted(1, 30, 30, 216, peaks=(125, 100)), (25, 1)),
        (counted(0, 40, 30, 200), counted(1, 30, 30, 215, peaks=(100, 75)), (10, 15)),  # of an old peak
        (None, counted(1, 30, 30, 200), (0, None)),
        (counted(0, 40, 30, 200), None, (0, None)),
    ],
)
def test_what_was_freed_with_no_stream_to_wait_for_is_bounded_by_the_counters(before, after, expected):
    assert _freed_before(before, after, "large_pool") == expected


def test_with_max_split_a_block_may_be_too_large_to_serve():
    assert usable_below(64 * MIB, 20 * MIB, None) is None
    assert usable_below(64 * MIB, 20 * MIB, 200 * MIB) == 84 * MIB
    assert usable_below(64 * MIB, 20 * MIB, 70 * MIB) == 70 * MIB
    assert usable_below(64 * MIB, 20 * MIB, 32 * MIB) == 62 * MIB + 512 + 20 * MIB


def place(free, *, stream=0, pool=(0, 0), kind="large", expandable=False, pending=()):
    free, pending = [size * MIB for size in free], [size * MIB for size in pending]
    return Place(stream, pool, kind, expandable, sum(free), 0, sum(pending), free, pending)


def test_free_blocks_are_told_apart_by_who_may_use_them():
    places = [
        place([5, 30], pending=[8, 40]),
        place([1], kind="small"),
        place([50], expandable=True),
        place([70], stream=7),
        place([90, 2], pool=(0, 3)),
        place([11], pool=(4, 0), stream=7, pending=[80]),
        place([]),
    ]
    found = free_blocks(places, 0, "large")
    assert found == FreeBlocks(86 * MIB, 50 * MIB, 70 * MIB, 103 * MIB, 40 * MIB, 70 * MIB)
    inside = free_blocks(places, 0, "large", pools={(4, 0)})
    assert inside == FreeBlocks(0, 0, 11 * MIB, 92 * MIB, 0, 11 * MIB, 156 * MIB)
    assert free_blocks(places, 0, "large", expandable=False).largest == 30 * MIB
    assert free_blocks(places, 0, "large", below=50 * MIB).largest == 30 * MIB
    assert free_blocks(places, 0, "small").largest == MIB
    assert free_blocks(places, 7, "large").largest == 70 * MIB


def reading(at, allocated=10, active=12, reserved=20):
    families = {"allocated_bytes": allocated, "active_bytes": active, "reserved_bytes": reserved}
    return AllocatorReading(0, at, {key: {"all": {"current": value}} for key, value in families.items()})


def test_the_recorder_keeps_one_reading_a_second_and_no_more_than_its_length():
    recorder = Recorder()
    for tick in range(10 * LENGTH):
        recorder.note(reading(tick / 4))
    kept = recorder.recent(0)
    assert len(kept) == LENGTH
    assert kept[-1].at - kept[0].at == LENGTH - 1
    assert all(later.at - earlier.at == 1.0 for earlier, later in pairwise(kept))
    assert (kept[-1].pending_free, kept[-1].idle) == (2, 8)
    assert recorder.recent(1) == ()


def test_the_recorder_knows_the_least_that_others_used():
    recorder = Recorder()
    assert recorder.least_external(0) is None
    for moment, external in ((0.0, 50), (0.1, 30), (0.2, None), (5.0, 40)):
        recorder.note(reading(moment), external)
    assert recorder.least_external(0) == 30
    assert [brief.external for brief in recorder.recent(0)] == [50, 40]


def test_a_backend_that_cannot_say_is_not_recorded():
    recorder = Recorder()
    recorder.note(AllocatorReading(0, 1.0, {}), 5)
    assert recorder.recent(0) == ()


def test_a_thinned_row_keeps_its_ends():
    assert thinned(range(5), 16) == range(5)
    few = thinned(range(240), 16)
    assert len(few) == 16
    assert (few[0], few[-1]) == (0, 239)
