# SPDX-License-Identifier: Apache-2.0
"""All that one collection knows of one device: its reading, the driver's word and the last snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .reading import AllocatorReading
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

    @property
    def fragmentation(self) -> float | None:
        """The trapped share of what is held, 0 to 1: from the reading, else from the snapshot."""
        if self.map is None or self._reading_tells:
            return self.reading.fragmentation
        return self.map.fragmentation

    @property
    def _reading_tells(self) -> bool:
        """Whether ``inactive_split`` is all that is trapped, as far as the last snapshot knows."""
        return self.reading.inactive_split is not None and (self.map is None or not self.map.private_idle)

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
        if self.limit is None or self.external is None:
            return None
        free = self.limit - reserved - self.external
        if free < 0:  # held beyond the device, as managed memory is: no split of the limit is true
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
