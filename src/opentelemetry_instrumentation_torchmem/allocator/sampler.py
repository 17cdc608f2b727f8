# SPDX-License-Identifier: Apache-2.0
"""Who reads when: one collection's picture of this process's memory, and counters that never fall."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import Any

from ..telemetry import OwnTelemetry
from .pools import PoolWatch
from .reading import AllocatorReading, DeviceState, HostReading, external
from .settings import AllocatorSettings
from .source import Device, Source, initialised_torch

COUNTERS = (
    "retries",
    "ooms",
    "device_allocations",
    "device_frees",
    "device_syncs",
    "allocations",
    "turnover",
)
"""The figures of a reading that only grow, until the user resets them."""


@dataclass(frozen=True, slots=True)
class Collection:
    """All that one collection knows of this process."""

    torch_version: str
    backend: str
    settings: AllocatorSettings
    devices: tuple[tuple[Device, DeviceState], ...]
    host: HostReading | None


class Sampler:
    """Takes the readings of a collection. Long-lived, one owner: the instrumentor."""

    def __init__(
        self,
        telemetry: OwnTelemetry,
        pools: PoolWatch,
        *,
        sampling: str = "auto",
    ) -> None:
        self._telemetry = telemetry
        self._pools = pools
        self._always = sampling == "always"
        self._source: Source | None = None
        self._totals: dict[int, Totals] = {}

    def source(self) -> Source | None:
        """The source, or None while this process has no CUDA of its own to read."""
        torch = initialised_torch()
        if torch is None:
            return None
        if self._source is None:
            self._source = Source(torch)
        return self._source

    def collect(self) -> Collection | None:
        """Read every used device, or None while there is nothing that may be read."""
        source = self.source()
        if source is None:
            return None
        settings = source.settings()  # first: the readings after it know whether segments are expandable
        may_read = self._always or not self._pools.suspect
        devices: list[tuple[Device, DeviceState]] = []
        for index in source.used_devices(may_read):
            state = self._attempt(self._state, source, index, may_read)
            if state is not None:
                devices.append((source.device(index), state))
        began = perf_counter()
        host = self._attempt(source.host)
        self._telemetry.spent("device", perf_counter() - began)
        return Collection(source.version, source.backend, settings, tuple(devices), host)

    def _state(self, source: Source, index: int, may_read: bool) -> DeviceState:
        began = perf_counter()
        if may_read:
            reading = source.read(index)
        else:
            self._telemetry.skip("pluggable_pool")
            reading = AllocatorReading(index, monotonic(), {})
        read = perf_counter()
        driver = source.driver_memory(index)
        done = perf_counter()
        self._telemetry.spent("stats", read - began)
        self._telemetry.spent("device", done - read)
        totals = self._totals.setdefault(index, Totals())
        return DeviceState(
            reading=reading,
            age=max(0.0, monotonic() - reading.at),
            totals=totals.of(reading),
            limit=driver.total,
            external=external(reading, driver),
        )

    def _attempt(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """A part of a collection that raises is absent from it, told once and counted."""
        try:
            return part(*arguments)
        except Exception as error:  # a broken CUDA context raises anything, at every call
            self._telemetry.skip("error")
            self._telemetry.say_once(
                f"collect {type(error).__name__}", "torchmem: a reading failed and is left out: %s", error
            )
            return None


class Totals:
    """The counters of one device, monotonic through the user's ``reset_accumulated_memory_stats``.

    What happened between the last reading and a reset is lost; nothing is counted twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._as_of = -inf
        self._base: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._live_at_reset: tuple[int, ...] = ()
        self._totals: Mapping[str, int] = {}

    def of(self, reading: AllocatorReading) -> Mapping[str, int]:
        """The totals up to a reading, or up to the last one fed where this one is not surely newer."""
        with self._lock:
            if reading.at < self._as_of:
                return self._totals
            figures = {name: figure for name in COUNTERS if (figure := getattr(reading, name)) is not None}
            if not figures:
                return figures
            live_at_reset = _live_at_reset(reading)
            if live_at_reset != self._live_at_reset or any(
                figure < self._last.get(name, 0) for name, figure in figures.items()
            ):
                for name, last in self._last.items():
                    self._base[name] = self._base.get(name, 0) + last
            self._last, self._live_at_reset = figures, live_at_reset
            self._totals = {name: self._base.get(name, 0) + figure for name, figure in figures.items()}
            self._as_of = monotonic()
            return self._totals


def _live_at_reset(reading: AllocatorReading) -> tuple[int, ...]:
    """What was live at the last reset: current - (allocated - freed). All zero until the first.

    It tells a reset even after more has happened since than before it.
    """
    return tuple(
        whole["current"] - whole["allocated"] + whole["freed"]
        for family in ("allocated_bytes", "reserved_bytes")
        if "freed" in (whole := reading.statistics.get(family, {}).get("all", {}))
    )
