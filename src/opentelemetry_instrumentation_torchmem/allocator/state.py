# SPDX-License-Identifier: Apache-2.0
"""All that one collection knows of one device: its reading, the driver's word and the last snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .reading import AllocatorReading, share
from .snapshot import DeviceMap


class DeviceState(NamedTuple):
    """All that one collection knows of one device."""

    reading: AllocatorReading
    age: float
    """Seconds between the reading and the collection."""
    totals: Mapping[str, int]
    """The counters by their name in the reading, monotonic through the user's resets."""
    limit: int | None
    """The device's total, in bytes."""
    external: int | None
    """Bytes used on the device that this process's allocator does not hold."""
    map: DeviceMap | None = None
    """What the last snapshot said, if it is not too old."""
    map_age: float | None = None
    """Seconds between that snapshot and the collection."""
    map_is_current: bool = False
    """Whether nothing has happened between that snapshot and the reading."""
    private_pools: bool = False
    """Whether some are known to live: the reading does not count what is wholly free in them as split."""
    hidden: int = 0
    """Bytes that may have become idle in them since the snapshot."""
    cut_up: int = 0
    """Bytes that may have become trapped since, which the reading does not count."""

    @property
    def fragmentation(self) -> float | None:
        """The trapped share of what is held, 0 to 1: from the reading, else from the snapshot, as far as
        there still is as much in no use."""
        if self._reading_tells:
            return self.reading.fragmentation
        if self.map is None:
            return None
        split, cached = self.map.split_free, self.reading.cached
        if split is None or cached is None:
            return None
        return share(min(split, cached), self.reading.reserved)

    @property
    def headroom(self) -> int | None:
        """What the snapshot found, and never more than this reading and the driver's last word leave."""
        if self.map is None or self.map.headroom is None:
            return None
        free = self._free
        driver = self.map.limits.driver
        if self.map_is_current and (free is None or driver is None or free >= driver.free):
            return self.map.headroom.least
        if free is None or self.limit is None:
            return None
        return self.map.headroom_at(self.reading, self.limit, max(0, free), self.hidden, self.cut_up)

    @property
    def free_block_largest(self) -> Mapping[str, int] | None:
        """What the snapshot found, and never more than is in no use by this reading."""
        if self.map is None or self.map.free_block_largest is None:
            return None
        if self.map_is_current:
            return {kind: block.least for kind, block in self.map.free_block_largest.items()}
        return self.map.free_blocks_at(self.reading, self.hidden)

    @property
    def _free(self) -> int | None:
        """On the device, for anybody; below 0 where more is held than it has, as managed memory is."""
        reserved = self.reading.reserved
        if reserved is None or self.limit is None or self.external is None:
            return None
        return self.limit - reserved - self.external

    @property
    def _reading_tells(self) -> bool:
        """Whether ``inactive_split`` is all that is trapped: by a snapshot of the same moment, else where
        there are no private pools. More than is in no use it cannot be: torch's own count of it goes wrong
        where a split limit was lowered at run time."""
        idle = self.map is not None and self.map.private_idle
        if not self.map_is_current:
            idle = idle or self.private_pools
        split, cached = self.reading.inactive_split, self.reading.cached
        return split is not None and not idle and (cached is None or split <= cached)

    @property
    def ledger(self) -> Mapping[str, int] | None:
        """Disjoint states whose sum is the limit; None where they cannot be told or do not add up.

        ``split_free`` and ``cached_free`` where the statistics tell them apart, or a snapshot of the same
        moment does, else their sum ``cached``.
        """
        reading = self.reading
        allocated, active, reserved = reading.allocated, reading.active, reading.reserved
        if allocated is None or active is None or reserved is None:
            return None
        free = self._free
        if free is None or self.external is None or free < 0:  # no split of the limit is true
            return None
        split = reading.inactive_split if self._reading_tells else None
        if split is None and self.map is not None and self.map_is_current and self.map.is_of(reading):
            split = self.map.split_free
        idle = (
            {"cached": reserved - active}
            if split is None
            else {"split_free": split, "cached_free": reserved - active - split}
        )
        # cudaMallocAsync counts nothing and calls what is allocated active: it cannot tell what is pending
        pending = {} if reading.retries is None else {"pending_free": active - allocated}
        return {
            "allocated": allocated,
            **pending,
            **idle,
            "external": self.external,
            "free": free,
        }
