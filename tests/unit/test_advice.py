# SPDX-License-Identifier: Apache-2.0
"""The rules of advice, on evidence made by hand: bounds, figures, and what is said of what is on already."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentelemetry_instrumentation_torchmem.advice import (
    Activity,
    DriverTimes,
    Evidence,
    Overhead,
    Tier,
    advise,
    times_of_trace,
)
from opentelemetry_instrumentation_torchmem.advice import rules as advice_rules
from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
from opentelemetry_instrumentation_torchmem.allocator.rules import Rules
from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits
from opentelemetry_instrumentation_torchmem.allocator.windows import NOTHING_KNOWN

MIB = 1 << 20
TOTAL = 10_000 * MIB
ON = "expandable_segments:True"


def segment(*blocks: tuple[str, float], address: int = 1 << 40, **more: Any) -> dict[str, Any]:
    """Of blocks ``(state, MiB)``: ``a`` allocated, ``p`` pending, ``f`` free."""
    states = {"a": "active_allocated", "p": "active_pending_free", "f": "inactive"}
    at, made = address, []
    for state, mib in blocks:
        size = int(mib * MIB)
        made.append({"address": at, "size": size, "requested_size": size, "state": states[state]})
        at += size
    sizes = {state: sum(int(mib * MIB) for each, mib in blocks if each == state) for state in states}
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "allocated_size": sizes["a"],
        "active_size": sizes["a"] + sizes["p"],
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": made,
    } | more


def evidence(*segments: dict[str, Any], settings: str = "", **more: Any) -> Evidence:
    reserved = sum(each["total_size"] for each in segments)
    limits = Limits(DriverMemory(TOTAL - reserved, TOTAL), 1.0, reserved)
    variables = {"PYTORCH_ALLOC_CONF": settings} if settings else {}
    options: dict[str, Any] = {"limits": limits, "variables": variables, "release": (2, 15)} | more
    return Evidence(0, AllocatorSettings.parse(settings, "x"), list(segments), **options)


def codes(of: Evidence) -> list[str]:
    return [each.code for each in advise(of)]


# ---- bounds ----


def test_what_is_trapped_must_be_worth_a_change():
    just_below = segment(("a", 10), ("f", 299), ("a", 10))
    enough = segment(("a", 10), ("f", 300), ("a", 10))
    assert codes(evidence(just_below)) == []
    (advice,) = advise(evidence(enough))
    assert (advice.code, advice.weight, advice.figures["trapped"]) == ("expandable_segments", 0.03, 300 * MIB)
    assert advice.change == "Set PYTORCH_ALLOC_CONF=expandable_segments:True."
    assert advice.why == "300 MiB of 9.77 GiB (3%) are free, but trapped in partly used segments."


def test_cache_is_no_trouble_until_it_had_to_be_flushed():
    cached = segment(("f", 900))
    assert codes(evidence(cached)) == []
    assert codes(evidence(cached, activity=Activity(retries=0, ooms=0))) == []
    assert codes(evidence(cached, activity=Activity(retries=1, ooms=0))) == ["expandable_segments"]


def test_what_is_set_beside_is_kept_in_what_is_advised():
    of = evidence(
        segment(("a", 10), ("f", 900), ("a", 10)),
        settings="roundup_power2_divisions:[256:1,512:2],expandable_segments:False",
    )
    assert advise(of)[0].change == (
        "Set PYTORCH_ALLOC_CONF=roundup_power2_divisions:[256:1,512:2],expandable_segments:True."
    )


def test_nothing_is_advised_that_is_on_already_or_cannot_be():
    trapped = segment(("a", 10), ("f", 900), ("a", 10))
    assert codes(evidence(trapped, expandable_blocked="not here")) == ["compaction"]
    expandable = segment(("a", 2), *[("f", 10), ("a", 2)] * 60, ("a", 58), is_expandable=True)
    assert codes(evidence(expandable, settings=ON)) == ["compaction"]
    assert codes(evidence(expandable, settings=f"{ON},large_segment_size_mb:12")) == ["compaction"]


def test_nothing_is_advised_that_this_release_does_not_know():
    trapped = segment(("a", 10), ("f", 900), ("a", 10))
    for release in ((2, 9), None):
        (advice,) = advise(evidence(trapped, release=release))
        assert advice.change == "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    holes = segment(("a", 2), *[("f", 26), ("a", 2)] * 40, ("a", 18), is_expandable=True, address=0)
    for release, expected in (((2, 12), "large_segment_size"), ((2, 11), "compaction"), (None, "compaction")):
        assert codes(evidence(holes, settings=ON, release=release))[0] == expected


def test_a_split_limit_comes_last_and_only_where_nothing_else_can_be_done():
    trapped = segment(("a", 10), ("f", 900), ("a", 10))
    found = advise(evidence(trapped, expandable_blocked="not here", activity=Activity(retries=3)))
    assert [each.code for each in found] == ["compaction", "split_limit"]
    assert found[-1].tier == Tier.LAST
    assert "far worse" in found[-1].change
    assert "split_limit" not in codes(evidence(trapped, activity=Activity(retries=3)))


# ---- settings that undo themselves ----


def test_the_bad_pair_is_told_even_where_it_has_done_no_harm_yet():
    assert codes(evidence(segment(("a", 100)), settings=f"max_split_size_mb:32,{ON}")) == [
        "split_with_expandable"
    ]


def test_a_split_limit_is_told_where_blocks_above_it_lie_idle():
    big = [segment(("f", 100), address=number << 40) for number in range(1, 8)]
    assert codes(evidence(*big, settings="max_split_size_mb:64")) == ["max_split"]
    assert codes(evidence(*big, settings="max_split_size_mb:200")) == []


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, ["gc_threshold_inert"]), (0.9, [])])
def test_a_threshold_is_inert_without_a_fraction_below_1(fraction, expected):
    limits = Limits(DriverMemory(TOTAL, TOTAL), fraction, 0)
    assert codes(evidence(settings="garbage_collection_threshold:0.8", limits=limits)) == expected


def test_a_hidden_variable_is_merged_and_what_both_say_stays_as_it_is_in_force():
    variables = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,roundup_power2_divisions:[64:8,>:1]",
        "PYTORCH_ALLOC_CONF": f"{ON},max_split_size_mb:999",
    }
    (advice,) = advise(evidence(variables=variables))
    assert advice.change == (
        "Say it all in one variable: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,"
        f"roundup_power2_divisions:[64:8,>:1],{ON}, and unset PYTORCH_ALLOC_CONF."
    )
    pair = {"PYTORCH_CUDA_ALLOC_CONF": ON, "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert codes(evidence(settings=ON, variables=pair)) == []  # nothing good is lost
    same = {"PYTORCH_CUDA_ALLOC_CONF": ON, "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    assert codes(evidence(settings=ON, variables=same)) == []


def test_a_fraction_is_told_only_where_memory_runs_short():
    half = Limits(DriverMemory(TOTAL, TOTAL), 0.5, 0)
    assert codes(evidence(limits=half)) == []
    assert codes(evidence(limits=half, activity=Activity(ooms=1))) == ["memory_fraction"]
    assert codes(evidence(limits=half, need=6000 * MIB)) == ["memory_fraction"]
    assert codes(evidence(limits=half, need=4000 * MIB)) == []


# ---- where free memory is ----


def test_the_stream_that_holds_most_is_home_and_what_is_free_on_others_is_lost_to_it():
    home = segment(("a", 900), stream=7)
    other = segment(("f", 400), address=2 << 40, stream=0)
    (advice,) = advise(evidence(home, other))
    assert (advice.code, advice.figures["free"], advice.figures["streams"]) == ("other_streams", 400 * MIB, 1)
    assert codes(evidence(segment(("a", 900)), segment(("f", 200), address=2 << 40, stream=7))) == []


def test_graphs_are_to_share_a_pool_and_a_pool_that_is_shared_is_not_idle():
    graphs = [segment(("f", 300), address=number << 40, segment_pool_id=(number, 0)) for number in (1, 2, 3)]
    (advice,) = advise(evidence(*graphs))
    assert (advice.code, advice.figures["spared"]) == ("graph_pools", 600 * MIB)
    shared = segment(("f", 900), segment_pool_id=(0, 1))
    assert codes(evidence(shared, graph_pools=frozenset({(0, 1)}))) == []
    assert codes(evidence(shared, graph_pools=frozenset())) == ["idle_pools"]
    assert codes(evidence(shared)) == []  # nobody says whose it is


def test_smaller_pages_are_advised_with_what_they_would_free():
    holes = segment(("a", 2), *[("f", 26), ("a", 2)] * 40, ("a", 18), is_expandable=True, address=0)
    found = advise(evidence(holes, settings=ON))
    assert [each.code for each in found] == ["large_segment_size", "compaction"]
    now, estimate = found[0].figures["trapped"], found[0].figures["estimate"]

    def by_hand(page: int) -> int:
        pages = range(0, 40 * 28, page)
        return sum(
            26 - page * sum(2 + hole * 28 <= at and at + page <= (hole + 1) * 28 for at in pages)
            for hole in range(40)
        )

    assert (now, estimate) == (by_hand(20) * MIB, by_hand(12) * MIB)


@given(st.integers(1, 1 << 36), st.sampled_from([2, 4, 8, 16]))
def test_estimates_round_as_the_allocator_does(asked, divisions):
    rules = Rules.of(AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}", "x"))
    rounded = advice_rules._rounded(asked, divisions)
    assert rounded >= asked
    assert rules.round_down(rounded) == rounded
    assert rules.round_down(rounded - 1) < asked


# ---- the order, and the rest ----


def test_advice_comes_in_the_order_of_its_effect():
    of = evidence(
        segment(("a", 900), ("f", 400), ("a", 1)),
        segment(("f", 800), address=2 << 40, stream=9),
        segment(("p", 600), address=3 << 40),
    )
    found = advise(of)
    assert [each.code for each in found] == ["other_streams", "pending_frees", "expandable_segments"]
    assert [round(each.weight, 3) for each in found] == [0.08, 0.06, 0.04]


def test_that_nothing_helps_is_said_only_where_nothing_does():
    full = segment(("a", 9_900))
    assert codes(evidence(full)) == []
    assert codes(evidence(full, need=600 * MIB)) == ["full"]
    assert codes(evidence(full, segment(("f", 400), address=2 << 40, stream=3), need=600 * MIB)) == [
        "other_streams"
    ]


def test_a_cache_that_is_emptied_by_hand_is_told_by_its_share_of_time_where_that_is_known():
    busy = Activity(100.0, 10_000, 2_000, 2_000, 1_000, 0, 0)
    (advice,) = advise(evidence(activity=busy))
    assert (advice.code, advice.weight) == ("empty_cache", 0.2)
    times = DriverTimes(0.001, 0.001, 0.001, "a measurement")
    (advice,) = advise(evidence(activity=busy, times=times))
    assert (advice.code, round(advice.weight, 3), advice.figures["overhead"]) == ("empty_cache", 0.05, 0.05)
    assert "an estimated 5.0% of the time (50 calls a second, by a measurement)" in advice.why
    cheap = DriverTimes(0.0001, 0.0001, 0.0001)
    assert codes(evidence(activity=busy, times=cheap)) == []
    captures = Activity(100.0, 10_000, 300, 300, 40, 0, 0)  # as many graphs do at the start
    assert codes(evidence(activity=captures)) == []


# ---- the cost of reallocation ----


def test_overhead_is_counts_times_measured_times_as_a_share():
    activity = Activity(seconds=10.0, device_allocations=100, device_frees=100, syncs=10)
    found = Overhead.of(activity, DriverTimes(0.001, 0.0005, 0.002))
    assert found == Overhead(pytest.approx(0.17), pytest.approx(0.017), 210, 21.0)
    assert Overhead.of(activity, DriverTimes(None, None)) is None
    assert Overhead.of(Activity(10.0), DriverTimes(1, 1, 1)) is None
    assert Overhead.of(Activity(None, device_allocations=3), DriverTimes(1, 1, 1)) is None
    assert Overhead.of(Activity(0.001, device_allocations=3), DriverTimes(1, 1, 1)).share == 1.0


def test_the_overhead_of_a_request_counts_what_its_window_knows():
    change = NOTHING_KNOWN._replace(device_allocations=4, device_syncs=1)
    found = Overhead.of(Activity.of_request(change, 0.5), DriverTimes(0.01, 9.0, 0.06))
    assert (found.calls, found.seconds) == (5, pytest.approx(0.1))
    assert found.share == pytest.approx(0.2)
    assert Overhead.of(Activity.of_request(NOTHING_KNOWN, 0.5), DriverTimes(1, 1, 1)) is None


def test_a_memory_history_without_a_flush_tells_no_times():
    def entries(*actions: tuple[str, int]) -> list[dict[str, Any]]:
        return [{"action": action, "time_us": at} for action, at in actions]

    assert times_of_trace(entries(("segment_alloc", 0), ("alloc", 5), ("segment_alloc", 900))) is None
    assert times_of_trace(entries(("segment_free", 0), ("alloc", 500))) is None
    flush = entries(
        ("segment_free", 0), ("segment_free", 300), ("segment_free", 700), ("segment_alloc", 1_500)
    )
    found = times_of_trace(flush)
    assert (found.free, found.allocation, found.sync) == (0.00035, pytest.approx(0.00045), None)
