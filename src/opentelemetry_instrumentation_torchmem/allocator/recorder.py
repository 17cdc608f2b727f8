# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: what the last minutes' readings said, in brief.

An out of memory error is told only after the allocator has flushed its cache: what was before is in here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .reading import AllocatorReading

LENGTH = 240
"""Readings kept for each device: four minutes of a busy server, hours of one that collections alone read."""
INTERVAL = 1.0
"""Seconds between two that are kept, at least."""


class Brief(NamedTuple):
    """One reading, in brief. Bytes; None where the backend cannot say."""

    at: float
    """Monotonic seconds."""
    allocated: int
    active: int
    reserved: int
    retries: int | None
    external: int | None
    """In use on the device beyond what this allocator held; None where the driver was not asked."""

    @property
    def pending_free(self) -> int:
        return self.active - self.allocated

    @property
    def idle(self) -> int:
        """Held and in no use."""
        return self.reserved - self.active


class Recorder:
    """Keeps a few integers of a reading a second for each device. Nothing is locked: who looks while another
    thread notes sees the state before or after."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Brief]] = {}
        self._least_external: dict[int, int] = {}

    def note(self, reading: AllocatorReading, external: int | None = None) -> None:
        """Keep a reading, with what others used on its device at that moment, if it is time for one."""
        if external is not None:
            known = self._least_external.get(reading.device)
            if known is None or external < known:
                self._least_external[reading.device] = external
        kept = self._kept.get(reading.device)
        if kept is None:
            kept = self._kept.setdefault(reading.device, deque(maxlen=LENGTH))
        if kept and reading.at - kept[-1].at < INTERVAL:
            return
        brief = in_brief(reading, external)
        if brief is not None:
            kept.append(brief)

    def recent(self, device: int) -> Sequence[Brief]:
        """What is kept of a device, the oldest first."""
        return tuple(self._kept.get(device, ()))

    def least_external(self, device: int) -> int | None:
        """The least that others were ever seen to use on a device: what was there from the beginning."""
        return self._least_external.get(device)


def in_brief(reading: AllocatorReading, external: int | None = None) -> Brief | None:
    """The brief of a reading; None where the backend cannot say what it would hold."""
    allocated, active, reserved = reading.allocated, reading.active, reading.reserved
    if allocated is None or active is None or reserved is None:
        return None
    return Brief(reading.at, allocated, active, reserved, reading.retries, external)


def thinned(briefs: Sequence[Brief], most: int) -> Sequence[Brief]:
    """No more than ``most`` of them, spread evenly, the first and the last among them."""
    if len(briefs) <= most:
        return briefs
    step = (len(briefs) - 1) / (most - 1)
    return [briefs[round(index * step)] for index in range(most)]
