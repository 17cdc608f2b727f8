# SPDX-License-Identifier: Apache-2.0
"""The snapshot analysis on snapshots made by hand. ``tests/truth`` holds it against the real allocator."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.allocator import snapshot
from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
from opentelemetry_instrumentation_torchmem.allocator.rules import Between, Rules, address_range
from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits, analyse, never_released

MIB = 1 << 20
ON = "expandable_segments:True"
STATES = {"a": "active_allocated", "p": "active_pending_free", "f": "inactive"}

addresses = count(1 << 40, 1 << 34)


def segment(blocks: str, *, expandable: bool = False, **other: Any) -> dict[str, Any]:
    """``a10 f20 p5``: blocks in MiB, allocated, free and pending."""
    at = base = other.pop("address", None) or next(addresses)
    made: list[dict[str, Any]] = []
    for word in blocks.split():
        size = int(float(word[1:]) * MIB)
        made.append(
            {"address": at, "size": size, "requested_size": size, "state": STATES[word[0]], "frames": []}
        )
        at += size
    sizes = {state: sum(each["size"] for each in made if each["state"] == state) for state in STATES.values()}
    allocated = sizes["active_allocated"]
    return {
        "device": 0,
        "address": base,
        "total_size": at - base,
        "allocated_size": allocated,
        "active_size": allocated + sizes["active_pending_free"],
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": made,
        **other,
    }


def seen(
    *segments: dict[str, Any],
    conf: str = "",
    free: int = 0,
    total: int = 1000,
    fraction: float | None = 1.0,
    **other: Any,
) -> snapshot.DeviceMap:
    pools = {name: other.pop(name, ()) for name in ("live_pools", "dropped_pools")}
    limits = Limits(DriverMemory(free * MIB, total * MIB), fraction, **other)
    settings = AllocatorSettings.parse(conf, "test")
    return analyse(segments, settings, {0: limits}, **pools)[0]


def exactly(mib: float) -> Between:
    return Between(int(mib * MIB), int(mib * MIB))


# ---- rounding and asking ----


@pytest.mark.parametrize(
    ("conf", "size", "rounded"),
    [
        ("", 1000, 512),
        ("roundup_power2_divisions:4", 15 * MIB, 14 * MIB),
        ("roundup_power2_divisions:4", 2000, 1536),  # up to 512 times the divisions: steps of 512
        ("roundup_power2_divisions:[8:1,16:2,>:4]", 15 * MIB + 512, 15 * MIB + 512),
        ("roundup_power2_divisions:[8:1,16:2,>:4]", 31 * MIB, 24 * MIB),
        ("roundup_power2_divisions:[8:1,16:2,>:4]", 63 * MIB, 56 * MIB),
    ],
)
def test_the_largest_size_that_rounding_leaves_as_it_is(conf, size, rounded):
    assert Rules.of(AllocatorSettings.parse(conf, "test")).round_down(size) == rounded


@pytest.mark.parametrize(("left", "headroom"), [(25, 24), (20, 20), (12, 12), (9, 1), (2, 1), (1, 0)])
def test_more_can_succeed_where_less_fails(left, headroom):
    """With 12 MiB left, 12 MiB succeed and 5 MiB, for which 20 are asked, fail."""
    assert seen(free=left).headroom == exactly(headroom)


def test_large_segments_of_another_size_are_asked_for():
    assert seen(conf="large_segment_size_mb:12", free=9).headroom == exactly(1)
    assert seen(conf=f"large_segment_size_mb:12,{ON}", free=30, untouched=True).headroom == exactly(24)


@pytest.mark.parametrize(
    ("conf", "mib"),
    [
        ("", (1140, 1140)),
        ("expandable_segments_reserve:0.5", (500, 500)),
        ("expandable_segments_reserve:0.25G", (260, 260)),
        ("expandable_segments_reserve:-1", (1140, 1140)),
        ("expandable_segments_reserve_by_class:[a:0.1]", (100, 1140)),
        ("expandable_segments_reserve:0.5,expandable_segments_reserve_by_class:[a:0.1,b:0.7]", (100, 700)),
    ],
)
def test_an_address_range_is_as_long_as_the_settings_say(conf, mib):
    found = address_range(AllocatorSettings.parse(conf, "test"), 1000 * MIB, 20 * MIB)
    assert (found.least // MIB, found.most // MIB) == mib


# ---- free, trapped, given back ----


def test_a_wholly_free_segment_is_cache_and_a_partly_free_one_is_trapped():
    found = seen(segment("f40"), segment("a10 f50"))
    assert (found.cached_free, found.split_free) == (40 * MIB, 50 * MIB)
    assert found.fragmentation == 0.5


def test_expandable_segments_give_back_the_whole_pages_of_a_free_stretch():
    found = seen(segment("a5 f60 a5 f30", expandable=True), conf=ON)
    assert found.cached_free == 60 * MIB  # 20 to 60, 80 to 100
    assert found.split_free == 30 * MIB


def test_pages_begin_at_the_address_of_the_segment():
    found = seen(segment("a10 f30", expandable=True, address=(1 << 40) + 7 * MIB), conf=ON)
    assert found.cached_free == 20 * MIB


def test_what_pending_frees_join_is_given_back_with_them():
    found = seen(segment("f10 p20 f10"), segment("a5 f10 p15 f10", expandable=True))
    assert found.pending_free == 35 * MIB
    assert (found.cached_free, found.releasable) == (0, exactly(60))
    assert found.trapped == exactly(15)


def test_fragmentation_is_the_ledgers_share_whatever_pending_frees_will_leave():
    """As in the statistics, whose ``inactive_split`` has no pending frees in it either."""
    found = seen(segment("a10 f10 p20"), segment("p60"))
    assert (found.split_free, found.pending_free, found.fragmentation) == (10 * MIB, 80 * MIB, 0.1)
    assert found.trapped == exactly(30)


def test_the_states_add_up_to_what_is_reserved():
    found = seen(segment("a10 f5 p5"), segment("f30"), segment("a1 f41 p18", expandable=True))
    assert found.split_free is not None
    assert found.cached_free is not None
    parts = found.allocated + found.pending_free + found.split_free + found.cached_free
    assert parts == found.reserved


def test_free_memory_of_a_private_pool_is_given_back_only_if_the_pool_has_no_owner():
    segments = segment("a10 f10"), segment("f40", segment_pool_id=(3, 0))
    unknown = seen(*segments)
    assert unknown.fragmentation is None
    assert unknown.absent["fragmentation"] == unknown.absent["split_free"] == snapshot.PRIVATE_POOLS
    assert seen(*segments, live_pools={(0, (3, 0))}).split_free == 50 * MIB
    assert seen(*segments, live_pools={(1, (3, 0))}).split_free is None  # it has an owner on another device
    assert seen(*segments, dropped_pools={(0, (3, 0))}).split_free == 10 * MIB
    assert unknown.private_reserved == 40 * MIB


def test_the_smaller_headroom_is_told_where_a_private_pool_may_give_back():
    found = seen(segment("f40", segment_pool_id=(3, 0)), free=20)
    assert found.headroom == Between(20 * MIB, 60 * MIB)
    assert found.absent["headroom"] == snapshot.PRIVATE_POOLS


def test_a_segment_mapped_in_pages_of_another_size_leaves_what_pages_give_back_untold():
    found = seen(segment("a10 f20", expandable=True), conf=ON, free=100)
    assert found.fragmentation is found.headroom is None
    assert found.absent["headroom"] == snapshot.PAGE_SIZE
    assert found.free_block_largest is not None


# ---- the largest free block ----


def test_the_largest_block_is_that_of_the_default_stream_and_pool():
    found = seen(
        segment("a1 f30"),
        segment("a1 f50", stream=7),
        segment("a1 f60", segment_pool_id=(0, 2)),
        segment("a1 f0.5", segment_type="small"),
    )
    assert found.free_block_largest == {"small": exactly(0.5), "large": exactly(30)}
    assert found.largest_hole == 60 * MIB
    assert found.other_streams_reserved == 51 * MIB


def test_expandable_segments_serve_only_while_the_mode_is_on():
    segments = segment("a2 f38", expandable=True), segment("a1 f30")
    assert seen(*segments).free_block_largest["large"] == exactly(30)
    assert seen(*segments, conf=ON).free_block_largest["large"] == exactly(38)


def test_a_small_request_is_1_mib_at_most_and_a_large_one_is_more():
    found = seen(segment("f2", segment_type="small"), segment("a19 f1"))
    assert found.free_block_largest == {"small": exactly(1), "large": exactly(0)}


def test_blocks_beside_pending_ones_are_told_as_they_are_now():
    found = seen(segment("a1 f10 p20 f10 a1"))
    assert found.free_block_largest["large"] == Between(10 * MIB, 40 * MIB)
    assert found.absent["free_block.largest"] == snapshot.PENDING


def test_a_block_above_the_split_limit_serves_no_request_below_it():
    conf = "max_split_size_mb:40,roundup_power2_divisions:2"
    found = seen(segment("f47"), segment("a1 f20"), conf=conf)  # 47 rounds down to 32, below the limit
    assert found.free_block_largest["large"] == exactly(16)


def test_a_block_that_may_serve_as_the_place_to_grow_is_no_certain_one():
    conf = f"max_split_size_mb:24,roundup_power2_divisions:2,{ON}"
    found = seen(segment("f8 a6 f126", expandable=True), conf=conf)
    assert found.free_block_largest["large"] == Between(8 * MIB, 96 * MIB)
    assert found.absent["free_block.largest"] == snapshot.MAX_SPLIT


# ---- headroom ----


def test_headroom_is_the_larger_of_a_free_block_and_what_the_driver_can_give_after_the_flush():
    assert seen(segment("a1 f50"), segment("f20"), free=10).headroom == exactly(50)
    assert seen(segment("a1 f50"), segment("f40"), free=30).headroom == exactly(70)


def test_a_share_of_the_device_bounds_headroom():
    assert seen(segment("a40 f60"), segment("f20"), free=500, fraction=0.3).headroom == exactly(200)


def test_an_early_refusal_bounds_headroom_by_what_is_reserved_now():
    found = seen(segment("a300"), segment("f600"), free=100, conf="throw_on_cudamalloc_oom:True")
    assert found.headroom.least == 600 * MIB  # the free block; 700 of new memory would be refused
    assert found.absent["headroom"] == snapshot.FRACTION


def test_memory_is_mapped_beside_what_is_free_where_nothing_was_ever_unmapped():
    inside = segment("a131 f149", expandable=True)
    assert seen(inside, conf=ON, free=360, untouched=True).headroom == exactly(509)
    unknown = seen(inside, conf=ON, free=360)
    assert unknown.headroom == Between(500 * MIB, 509 * MIB)
    assert unknown.absent["headroom"] == snapshot.UNMAPPED


def test_a_range_without_addresses_left_takes_nothing_more():
    """What then gets a new range may be mapped there and not beside the free memory."""
    inside = segment("a131 p143 f6", expandable=True)
    found = seen(inside, conf=ON, free=360, total=640, untouched=True)
    assert found.headroom == Between(500 * MIB, 509 * MIB)


def test_without_free_memory_beside_new_pages_headroom_is_exact_in_any_history():
    assert seen(segment("a40", expandable=True), conf=ON, free=95).headroom == exactly(80)


def test_a_pool_that_may_lend_leaves_headroom_open_above():
    found = seen(segment("a1 f100", segment_pool_id=(0, 1)), free=20)
    assert found.headroom == Between(20 * MIB, 100 * MIB)


def test_a_free_block_that_torch_fails_to_give_back_leaves_what_needs_no_flush():
    """With a split limit torch first calls cudaFree for a block above it, whatever that is."""
    stuck = segment("a10 f39 a11", expandable=True)
    found = seen(stuck, conf="max_split_size_mb:30", free=12)
    assert found.headroom == Between(12 * MIB, 32 * MIB)


@pytest.mark.parametrize(
    ("blocks", "most"),
    [
        ("a10 f39 a11", 68),  # cudaFree of what is no start of a segment fails
        ("f39 a21", 1000),  # and of its start frees all of it, under what lives in the rest
    ],
)
def test_a_part_of_a_segment_above_a_split_limit_that_was_lowered_leaves_what_needs_no_flush(blocks, most):
    """Torch takes it for a whole segment, and gives back several such, the largest first."""
    found = seen(segment(blocks), segment("f60"), conf="max_split_size_mb:30", free=8)
    assert found.headroom == Between(60 * MIB, most * MIB)
    assert found.absent["headroom"] == snapshot.MAX_SPLIT


# ---- what cannot be known ----


def test_without_the_drivers_figures_or_the_fraction_headroom_is_absent():
    settings = AllocatorSettings.parse("", "test")
    assert analyse([segment("f2")], settings, {})[0].absent["headroom"] == snapshot.DRIVER
    assert seen(segment("f2"), fraction=None).absent["headroom"] == snapshot.FRACTION


def test_statistics_of_another_state_leave_everything_absent():
    found = seen(segment("a1 f50"), reserved=52 * MIB)
    assert found.headroom is found.free_block_largest is found.fragmentation is None
    assert set(found.absent.values()) == {snapshot.DAMAGED}


@pytest.mark.parametrize("missing", ["segment_pool_id", "is_expandable"])
def test_an_older_release_that_does_not_tell_is_not_guessed_at(missing):
    old = segment("a1 f50")
    del old[missing]
    found = seen(old, conf=ON, free=100)
    assert found.headroom is found.free_block_largest is found.fragmentation is found.private_reserved is None
    assert set(found.absent.values()) == {snapshot.RELEASE}


def test_an_older_release_is_understood_where_nothing_is_expandable():
    old = segment("a1 f50")
    del old["is_expandable"]
    assert seen(old, free=10).headroom == exactly(50)


def test_garbage_for_a_pool_counts_as_a_private_pool():
    found = seen(segment("a1 f50", segment_pool_id=(2**63 - 5, 94560086406288)), free=20)
    assert found.headroom.least == 20 * MIB
    assert found.free_block_largest["large"] == exactly(0)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        None,
        {"device": 0},
        segment("a1 f50") | {"active_size": 7},
        segment("a1 f50") | {"blocks": []},
        segment("a1 f50") | {"blocks": [{}]},
        segment("a1 f50") | {"segment_type": "other"},
        segment("a1 f50") | {"segment_pool_id": [0, 0]},
        segment("a1 p50 f2") | {"active_size": 2 * MIB},
        segment("a20 f20", expandable=True) | {"blocks": None},
    ],
)
def test_what_is_no_snapshot_makes_every_figure_absent_and_raises_nothing(broken):
    found = seen(broken, segment("a1 f50"), conf=ON, free=100)
    assert found.headroom is found.free_block_largest is found.fragmentation is None
    assert set(found.absent.values()) == {snapshot.DAMAGED}


def test_devices_are_told_apart():
    settings = AllocatorSettings.parse("", "test")
    maps = analyse([segment("f10"), segment("f20", device=1)], settings, {2: Limits()})
    assert {device: each.reserved // MIB for device, each in maps.items()} == {0: 10, 1: 20, 2: 0}
    assert maps[2].fragmentation is None


def test_free_blocks_are_counted_by_powers_of_two():
    (place,) = seen(segment("a1 f1 a1 f1.5 a1 f3")).places
    assert place.by_size == [(MIB, 2, int(2.5 * MIB)), (2 * MIB, 1, 3 * MIB)]


def test_a_reset_or_anything_given_back_is_noticed():
    fresh: dict[str, Any] = {
        "num_device_free": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "reserved_bytes": {"all": {"current": 9, "allocated": 9}},
    }
    assert never_released(fresh)
    assert not never_released(fresh | {"num_device_free": 1})
    assert not never_released(fresh | {"reserved_bytes": {"all": {"current": 9, "allocated": 0}}})
    assert not never_released({key: value for key, value in fresh.items() if key != "num_device_free"})
