# SPDX-License-Identifier: Apache-2.0
"""A reading and what follows from it, built by hand."""

from __future__ import annotations

from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.allocator.reading import (
    AllocatorReading,
    DriverMemory,
    external,
)
from opentelemetry_instrumentation_torchmem.allocator.sampler import Totals
from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import analyse
from opentelemetry_instrumentation_torchmem.allocator.state import DeviceState


def reading(at: float = 0.0, **current: int) -> AllocatorReading:
    names = ("allocated", "active", "requested", "reserved", "inactive_split")
    statistics = {
        f"{name}_bytes": {
            "all": {"current": current[name], "peak": 0, "allocated": 0, "freed": -current[name]}
        }
        for name in names
        if name in current
    }
    return AllocatorReading(0, at, {**statistics, "num_alloc_retries": 0})


def state(of: AllocatorReading, limit: int | None = 1000, used_elsewhere: int | None = 100) -> DeviceState:
    return DeviceState(of, age=0.0, totals={}, limit=limit, external=used_elsewhere)


def test_derived_figures():
    got = reading(allocated=50, active=60, requested=55, reserved=100, inactive_split=25)
    assert (got.pending_free, got.rounding, got.cached) == (10, 5, 40)
    assert (got.slack, got.fragmentation) == (0.4, 0.25)


def test_what_a_backend_cannot_give_is_absent():
    nothing = AllocatorReading(0, 0.0, {})
    figures = ("allocated", "retries", "turnover", "pending_free", "rounding", "slack", "fragmentation")
    assert [getattr(nothing, figure) for figure in figures] == [None] * len(figures)
    assert nothing.by_pool("reserved_bytes") is None


def test_nothing_reserved_is_neither_fragmented_nor_slack():
    empty = reading(allocated=0, active=0, requested=0, reserved=0, inactive_split=0)
    assert (empty.slack, empty.fragmentation) == (None, None)


def test_the_ledger_sums_to_the_limit():
    got = state(reading(allocated=50, active=60, reserved=100, inactive_split=25)).ledger
    assert got == {
        "allocated": 50,
        "pending_free": 10,
        "split_free": 25,
        "cached_free": 15,
        "external": 100,
        "free": 800,
    }


def test_the_ledger_has_one_state_cached_where_splits_are_not_told():
    got = state(reading(allocated=50, active=60, reserved=100)).ledger
    assert got == {"allocated": 50, "pending_free": 10, "cached": 40, "external": 100, "free": 800}


def test_a_private_pools_wholly_free_segments_are_trapped_though_the_statistics_do_not_count_them():
    of = reading(allocated=10, active=10, reserved=100, inactive_split=20)

    def segment(pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
        starts = [sum(size for size, _ in blocks[:index]) for index in range(len(blocks))]
        active = sum(size for size, state in blocks if state != "inactive")
        return {
            "device": 0, "address": 0, "total_size": sum(size for size, _ in blocks), "stream": 0,
            "active_size": active, "allocated_size": active, "segment_pool_id": pool,
            "segment_type": "large", "is_expandable": False,
            "blocks": [
                {"address": start, "size": size, "state": state}
                for start, (size, state) in zip(starts, blocks, strict=True)
            ],
        }  # fmt: skip

    segments = [
        segment((0, 0), (10, "active_allocated"), (20, "inactive")),
        segment((0, 0), (30, "inactive")),
        segment((1, 0), (40, "inactive")),
    ]
    settings = AllocatorSettings.parse("", "test")
    owned = analyse(segments, settings, {}, live_pools={(0, (1, 0))})[0]
    unknown = analyse(segments, settings, {})[0]
    told = state(of)._replace(map=owned, map_is_current=True)
    assert told.fragmentation == 0.6
    assert (told.ledger["split_free"], told.ledger["cached_free"]) == (60, 30)
    assert told._replace(map_is_current=False).ledger["cached"] == 90
    assert told._replace(map=unknown).fragmentation is None
    assert told._replace(map=unknown).ledger["cached"] == 90
    assert state(of).fragmentation == 0.2  # without a snapshot nobody knows of the pool


def test_a_backend_that_counts_nothing_cannot_tell_what_is_pending():
    told = reading(allocated=60, active=60, reserved=100)
    of_async = {name: figure for name, figure in told.statistics.items() if name != "num_alloc_retries"}
    got = state(AllocatorReading(0, 0.0, of_async)).ledger
    assert got == {"allocated": 60, "cached": 40, "external": 100, "free": 800}


@pytest.mark.parametrize(
    "lacking",
    [
        {"limit": None},
        {"used_elsewhere": None},
        {"limit": 150},  # managed memory: more is held than the device has
    ],
)
def test_a_ledger_that_cannot_be_true_is_absent(lacking):
    assert state(reading(allocated=50, active=60, reserved=100), **lacking).ledger is None


def test_what_others_use_is_never_below_nothing():
    held = reading(reserved=300)
    assert external(held, DriverMemory(free=600, total=1000)) == 100
    assert external(held, DriverMemory(free=800, total=1000)) == 0  # won between the two calls
    assert external(AllocatorReading(0, 0.0, {}), DriverMemory(free=800, total=1000)) is None


def test_an_older_reading_does_not_look_like_a_reset():
    def turned_over(at: float, grown: int) -> AllocatorReading:
        figures = {"current": 0, "peak": 0, "allocated": grown, "freed": grown}
        return AllocatorReading(0, at, {"allocated_bytes": {"all": figures}})

    totals = Totals()
    assert totals.of(turned_over(1e12, 70)) == {"turnover": 70}
    assert totals.of(turned_over(0.0, 50)) == {"turnover": 70}
    assert totals.of(turned_over(2e12, 20)) == {"turnover": 90}
    assert totals.of(AllocatorReading(0, 3e12, {})) == {}
    assert totals.of(turned_over(4e12, 30)) == {"turnover": 100}
