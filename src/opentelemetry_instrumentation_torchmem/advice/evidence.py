# SPDX-License-Identifier: Apache-2.0
"""All that advice is given from: one device's snapshot, the settings in force, what is known beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..allocator.rules import LARGE, Rules
from ..allocator.settings import ENVIRONMENT, AllocatorSettings
from ..allocator.snapshot import DEFAULT_POOL, DeviceMap, Limits, PoolId, analyse
from ..allocator.source import NATIVE
from .overhead import Activity, DriverTimes, Overhead

MIB = 1 << 20
FLOOR = 32 * MIB
SHARE = 0.03
"""Of the device: bytes below both are not worth a change."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one device of one process; what is not is None.

    Example:
        >>> Evidence(0, AllocatorSettings.parse("", "default"), segments=[]).limit
        0
    """

    device: int
    settings: AllocatorSettings
    segments: Sequence[Mapping[str, Any]]
    """A snapshot's, of this device or of all."""
    limits: Limits = field(default_factory=Limits)
    backend: str = NATIVE
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """The variables of ``settings.ENVIRONMENT`` that are set."""
    activity: Activity | None = None
    times: DriverTimes | None = None
    need: int | None = None
    """The largest request that must succeed, in bytes."""
    expandable_blocked: str | None = None
    """Why expandable segments cannot be used, in words."""
    asked: Sequence[int] = ()
    """The sizes of requests by the memory history, where one was recorded."""
    release: tuple[int, int] | None = None
    """Of torch."""
    graph_pools: frozenset[PoolId] | None = None
    """The private pools that CUDA graphs live in; None where that is not known."""

    @property
    def page(self) -> int:
        """What is mapped as a whole for large blocks, where segments expand."""
        return Rules.of(self.settings).large_segment

    @cached_property
    def of_device(self) -> list[Mapping[str, Any]]:
        return [segment for segment in self.segments if segment["device"] == self.device]

    @cached_property
    def map(self) -> DeviceMap:
        return analyse(self.of_device, self.settings, {self.device: self.limits}, stream=self.stream)[
            self.device
        ]

    @cached_property
    def stream(self) -> int:
        """The stream that holds most, in the default pool."""
        held: dict[int, int] = {}
        for segment in self.of_device:
            if pool_of(segment) == DEFAULT_POOL:
                held[segment["stream"]] = held.get(segment["stream"], 0) + segment["total_size"]
        return max(held, key=lambda stream: (held[stream], stream == 0), default=0)

    @cached_property
    def home(self) -> DeviceMap:
        """What this stream holds in the default pool, alone."""
        return analyse(self.at_home, self.settings, {self.device: Limits()}, stream=self.stream)[self.device]

    @cached_property
    def at_home(self) -> list[Mapping[str, Any]]:
        """The segments of this stream in the default pool."""
        return [
            segment
            for segment in self.of_device
            if segment["stream"] == self.stream and pool_of(segment) == DEFAULT_POOL
        ]

    def trapped_with(self, page: int) -> int:
        """What would be trapped of the same large blocks if pages had this size: an estimate."""
        trapped = 0
        for segment in self.at_home:
            if segment["segment_type"] != LARGE:
                continue
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    begin = block["address"] - segment["address"]
                    end = begin + block["size"]
                    trapped += block["size"] - max(0, end // page * page - -(-begin // page) * page)
        return trapped

    @cached_property
    def trapped(self) -> int:
        """Free bytes of that stream's that stay reserved whatever is given back, at least."""
        trapped = self.home.trapped
        return 0 if trapped is None else trapped.least

    @cached_property
    def cached(self) -> int:
        """Free bytes of that stream's that a flush would give back."""
        return self.home.free - min(self.trapped, self.home.free)

    @property
    def total(self) -> int | None:
        return None if self.limits.driver is None else self.limits.driver.total

    @property
    def limit(self) -> int:
        """What shares are of: the device, or what is held where its size is not known."""
        return self.total or self.map.reserved

    @property
    def external(self) -> int | None:
        """Bytes that others use on the device."""
        driver = self.limits.driver
        return None if driver is None else max(0, driver.total - driver.free - self.map.reserved)

    @property
    def room(self) -> int | None:
        """Bytes that the process may still take, by its memory fraction."""
        if self.total is None or self.limits.fraction is None:
            return None
        return int(self.limits.fraction * self.total) - self.map.reserved

    @property
    def headroom(self) -> int | None:
        return None if self.map.headroom is None else self.map.headroom.least

    @property
    def overhead(self) -> Overhead | None:
        """Of trips to the driver, by estimate."""
        if self.activity is None or self.times is None:
            return None
        return Overhead.of(self.activity, self.times)

    def matters(self, size: int) -> bool:
        """Whether so many bytes are worth a change."""
        return size >= max(FLOOR, SHARE * self.limit)

    @property
    def flushed(self) -> bool:
        """Whether memory ran short: the allocator had to flush its cache, or failed."""
        activity = self.activity
        return activity is not None and bool(activity.retries or activity.ooms or activity.rejections)

    @property
    def short(self) -> bool:
        """Whether memory runs short: it did, or what is needed would not succeed now."""
        headroom = self.headroom
        return self.flushed or (self.need is not None and headroom is not None and headroom < self.need)

    @cached_property
    def sizes(self) -> list[int]:
        """Of large requests, by the history, or by the blocks in use or left free, as far as these tell."""
        return [size for size in self.asked if size > MIB] or [
            block.get("requested_size", block["size"])
            if block["state"] == "active_allocated"
            else block["size"]
            for segment in self.of_device
            if segment["segment_type"] == LARGE
            for block in segment["blocks"]
        ]

    @cached_property
    def live(self) -> list[tuple[int, int]]:
        """Of blocks in use: what was asked for, and what the block takes."""
        return [
            (block["requested_size"], block["size"])
            for segment in self.of_device
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and block.get("requested_size")
        ]

    @cached_property
    def pools(self) -> Mapping[PoolId, tuple[int, int]]:
        """Of each private pool: the bytes it holds, and those of them that are free."""
        held: dict[PoolId, tuple[int, int]] = {}
        for segment in self.of_device:
            pool = pool_of(segment)
            if pool != DEFAULT_POOL:
                reserved, free = held.get(pool, (0, 0))
                held[pool] = (
                    reserved + segment["total_size"],
                    free + segment["total_size"] - segment["active_size"],
                )
        return held


def pool_of(segment: Mapping[str, Any]) -> PoolId:
    first, second = segment.get("segment_pool_id", DEFAULT_POOL)
    return first, second


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that set the allocator, in the order of precedence."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}
