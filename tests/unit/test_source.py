# SPDX-License-Identifier: Apache-2.0
"""Readings of releases that count less, by statistics built by hand."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.allocator.source import Source

MIB = 1 << 20
POOLS = ("small_pool", "large_pool")


def statistics(segments: dict[str, int], reserved: dict[str, int], **scalars: int) -> dict[str, Any]:
    """Of so many cudaMalloc segments, and with so many MiB held, in the small and large pool."""

    def family(of: dict[str, int], unit: int = 1) -> dict[str, Any]:
        figures = {**of, "all": sum(of.values())}
        return {
            pool: {"current": figure * unit, "peak": figure * unit, "allocated": figure * unit, "freed": 0}
            for pool, figure in figures.items()
        }

    return {
        "segment": family(segments),
        "reserved_bytes": family(reserved, MIB),
        "inactive_split": family(dict.fromkeys(POOLS, 0)),
        "inactive_split_bytes": family(dict.fromkeys(POOLS, 0)),
        "num_alloc_retries": 0,
        **scalars,
    }


class OldTorch:
    """As much of torch 2.3 as is asked: it neither counts what is mapped nor tells its settings."""

    def __init__(self, given: dict[str, Any], segments: list[dict[str, Any]] | None = None) -> None:
        self.__version__ = "2.3.1+cu121"
        self.cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            get_allocator_backend=lambda: "native",
            memory=SimpleNamespace(_snapshot=lambda: {"segments": segments, "device_traces": []}),
        )
        self._C = SimpleNamespace(
            _cuda_memoryStats=lambda _: dict(given), _cuda_hasPrimaryContext=lambda _: True
        )


@pytest.mark.parametrize(
    ("segments", "reserved", "told"),
    [
        ((1, 2), (2, 60), 0),  # all of it cudaMalloc's
        ((0, 0), (0, 0), 0),
        ((0, 0), (0, 60), None),  # all of it mapped
        ((3, 0), (6, 60), None),  # switched on before the first large request
        ((2, 3), (6, 90), None),  # a small segment mapped beside two of cudaMalloc's
    ],
)
def test_before_2_4_what_is_mapped_is_seen_by_segments_that_no_cudamalloc_made(segments, reserved, told):
    given = statistics(dict(zip(POOLS, segments, strict=True)), dict(zip(POOLS, reserved, strict=True)))
    assert Source(OldTorch(given)).read(0).inactive_split == told


def test_before_2_4_a_snapshot_shows_what_the_statistics_cannot():
    given = statistics({"small_pool": 1, "large_pool": 2}, {"small_pool": 2, "large_pool": 100})
    source = Source(OldTorch(given, [{"is_expandable": False}, {"is_expandable": True}]))
    assert source.read(0).inactive_split == 0
    assert source.snapshot()["segments"]
    assert source.read(0).inactive_split is None


def test_from_2_4_on_the_allocators_own_count_of_allocations_tells():
    segments, reserved = {"small_pool": 1, "large_pool": 1}, {"small_pool": 2, "large_pool": 60}
    for allocations, told in ((2, 0), (3, None)):
        given = statistics(segments, reserved, num_device_alloc=allocations)
        assert Source(OldTorch(given)).read(0).inactive_split == told


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_within_a_snapshot_and_the_users_choice_stays(collects):
    torch = OldTorch(statistics({"small_pool": 0, "large_pool": 0}, {"small_pool": 0, "large_pool": 0}), [])
    seen = []

    def snapshot() -> dict[str, Any]:
        seen.append(gc.isenabled())
        if len(seen) > 1:
            raise RuntimeError("CUDA error")
        return {"segments": []}

    torch.cuda.memory._snapshot = snapshot
    source = Source(torch)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        source.snapshot()
        after = gc.isenabled()
        with pytest.raises(RuntimeError):
            source.snapshot()
        assert (seen, after, gc.isenabled()) == ([False, False], collects, collects)
    finally:
        (gc.enable if before else gc.disable)()
