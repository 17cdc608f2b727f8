# SPDX-License-Identifier: Apache-2.0
"""Which signals this machine can give, and why the others are absent: asked of the table's own rows.

Each row is given a reading that has every figure; what a release, backend or option cannot give is then taken
away, one after another, and a row that has nothing to say any more is absent for that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..allocator.reading import AllocatorReading, DriverMemory, HostReading
from ..allocator.rules import Between
from ..allocator.sampler import COUNTERS, Collection
from ..allocator.settings import AllocatorSettings
from ..allocator.snapshot import Limits, analyse
from ..allocator.source import ASYNC, NATIVE, PLUGGABLE, UNCACHED
from ..allocator.state import DeviceState
from ..config import Config
from ..signals import METRICS, REQUEST_METRICS, Metric, Per
from ..telemetry import OwnTelemetry

_FAMILIES = (
    "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes",
    "inactive_split", "segment", "active", "allocation",
)  # fmt: skip
_SCALARS = (
    "num_alloc_retries", "num_ooms", "num_oom_rejections", "num_device_alloc", "num_device_free",
    "num_sync_all_streams",
)  # fmt: skip
_MIB = 1 << 20
_OF_GPUS = (Per.DEVICE, Per.HOST, Per.PROCESS, Per.OOM)
"""What is told only once CUDA is initialised."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which figures there are."""

    torch: tuple[int, int] | None
    """The release; None where torch is not installed."""
    backend: str
    settings: AllocatorSettings
    config: Config
    tells_fraction: bool = True
    """Whether this release tells the process's memory fraction."""
    without_gpu: str = ""
    """Why there is no GPU here, in words; empty where there is one."""


@dataclass(frozen=True, slots=True)
class _Ingredients:
    """What the rows are made of, by what they are told for; None or nothing: not to be had."""

    device: DeviceState
    host: HostReading | None
    collection: Collection | None
    observed: bool = True
    """Whether the allocator has observers of its out of memory errors."""

    def of(self, row: Metric) -> Any:
        return {
            Per.DEVICE: self.device,
            Per.HOST: self.host,
            Per.PROCESS: self.collection,
            Per.PACKAGE: OwnTelemetry(),
            Per.OOM: {"fragmented": 1} if self.observed else None,
            Per.TARGET: 1,
        }.get(row.per, 1)


def absences(machine: Machine) -> dict[str, str]:
    """The metrics that are absent on this machine, in the table's order, and why."""
    found: dict[str, str] = {}
    if machine.torch is None:
        return {row.name: "torch is not installed" for row in (*METRICS, *REQUEST_METRICS)}
    if machine.without_gpu:
        found = {row.name: machine.without_gpu for row in METRICS if row.per in _OF_GPUS}
    ingredients = _everything()
    for applies, why, without in _LOSSES:
        if applies(machine):
            ingredients = without(ingredients)
            for row in METRICS:
                if row.name not in found and not _tells(row, ingredients):
                    found[row.name] = why
    for row in (*METRICS, *REQUEST_METRICS):
        if machine.config.excludes(row.name):
            found[row.name] = "excluded_metrics names it"
        elif row in REQUEST_METRICS and not machine.config.request_metrics:
            found[row.name] = "request_metrics is off"
    return {row.name: found[row.name] for row in (*METRICS, *REQUEST_METRICS) if row.name in found}


def _tells(row: Metric, ingredients: _Ingredients) -> bool:
    given = ingredients.of(row)
    return given is not None and row.of(given) is not None


def _everything() -> _Ingredients:
    figures = {"current": 2 * _MIB, "peak": 2 * _MIB, "allocated": 2 * _MIB, "freed": 0}
    kinds = dict.fromkeys(("all", "small_pool", "large_pool"), figures)
    statistics: dict[str, Any] = {**dict.fromkeys(_FAMILIES, kinds), **dict.fromkeys(_SCALARS, 0)}
    statistics["inactive_split_bytes"] = dict.fromkeys(kinds, figures | {"current": 0})
    reading = AllocatorReading(0, 0.0, statistics)
    settings = AllocatorSettings.parse("", "default")
    limits = Limits(DriverMemory(_MIB, 8 * _MIB), 1.0)
    of_device = replace(
        analyse([], settings, {0: limits})[0],
        reserved=2 * _MIB,
        allocated=2 * _MIB,
        cached=Between(0, 0),
        headroom=Between(_MIB, _MIB),
        free_block_largest={"small": Between(1, 1), "large": Between(1, 1)},
        absent={},
    )
    state = DeviceState(reading, 0.0, dict.fromkeys(COUNTERS, 0), 8 * _MIB, _MIB, of_device, 0.0, True)
    return _Ingredients(state, HostReading(0, 0), Collection("", NATIVE, settings, (), None))


def _without_statistics(*gone: str) -> Callable[[_Ingredients], _Ingredients]:
    def without(given: _Ingredients) -> _Ingredients:
        state = given.device
        kept = {name: value for name, value in state.reading.statistics.items() if name not in gone}
        totals = {name: value for name, value in state.totals.items() if _COUNTED_BY.get(name) not in gone}
        reading = state.reading._replace(statistics=kept)
        return replace(given, device=state._replace(reading=reading, totals=totals))

    return without


_COUNTED_BY = {
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
    "oom_rejections": "num_oom_rejections",
    "device_allocations": "num_device_alloc",
    "device_frees": "num_device_free",
    "device_syncs": "num_sync_all_streams",
    "allocations": "allocation",
    "turnover": "allocated_bytes",
}
"""A counter of the package's -> the statistic that it needs."""


def _without_map(given: _Ingredients) -> _Ingredients:
    return replace(given, device=given.device._replace(map=None, map_age=None, map_is_current=False))


def _without_headroom(given: _Ingredients) -> _Ingredients:
    of_device = given.device.map
    less = None if of_device is None else replace(of_device, headroom=None)
    return replace(given, device=given.device._replace(map=less))


def _async_alone(given: _Ingredients) -> _Ingredients:
    kept = {"allocated_bytes", "active_bytes", "reserved_bytes"}
    gone = [name for name in given.device.reading.statistics if name not in kept]
    less = _without_map(_without_statistics(*gone)(given))
    return replace(less, observed=False, device=less.device._replace(totals={}))


def _nothing(given: _Ingredients) -> _Ingredients:
    less = _without_map(_without_statistics(*_FAMILIES, *_SCALARS)(given))
    return replace(less, observed=False, device=less.device._replace(totals={}))


def _before(*release: int) -> Callable[[Machine], bool]:
    return lambda machine: machine.torch is not None and machine.torch < release


def _without_observer(given: _Ingredients) -> _Ingredients:
    return replace(given, observed=False)


_LOSSES: tuple[tuple[Callable[[Machine], bool], str, Callable[[_Ingredients], _Ingredients]], ...] = (
    (
        lambda machine: machine.backend in (PLUGGABLE, UNCACHED),
        "the allocator keeps no figures: it is pluggable, or caching is off",
        _nothing,
    ),
    (lambda machine: machine.backend == ASYNC, "cudaMallocAsync does not keep it", _async_alone),
    (_before(2, 4), "torch keeps it from 2.4 on", _without_statistics(
        "num_device_alloc", "num_device_free", "num_sync_all_streams"
    )),
    (_before(2, 12), "torch keeps it from 2.12 on", _without_statistics("num_oom_rejections")),
    (_before(2, 7), "torch keeps it from 2.7 on", lambda given: replace(given, host=None)),
    (
        lambda machine: not machine.settings.throw_on_cudamalloc_oom,
        "throw_on_cudamalloc_oom is not set",
        _without_statistics("num_oom_rejections"),
    ),
    (
        lambda machine: machine.settings.expandable_segments,
        "the allocator does not keep it under expandable segments",
        _without_statistics("inactive_split", "inactive_split_bytes", "segment"),
    ),
    (lambda machine: not machine.tells_fraction, "this release tells no fraction", _without_headroom),
    (lambda machine: not machine.config.snapshot_share, "snapshot_share is 0", _without_map),
    (lambda machine: not machine.config.oom_evidence, "oom_evidence is off", _without_observer),
)  # fmt: skip
"""When something is not to be had, why, and what is left then."""
