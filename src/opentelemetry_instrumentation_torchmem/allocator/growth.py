# SPDX-License-Identifier: Apache-2.0
"""What requests have lately needed: the largest growth of one, on each device. Pure but for its clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from .reading import AllocatorReading
from .windows import Change

SPAN = 3600.0
"""Seconds for which a growth is remembered."""
_PARTS = 12


class Growth:
    """Remembers maxima by parts of an hour. Nothing is locked: of two noted at once one may be forgotten."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._largest: dict[int, dict[int, int]] = {}
        """Device -> part of time -> bytes."""

    def begin_anew(self) -> None:
        """As if nothing had been measured."""
        self._largest = {}

    def note(self, after: Sequence[AllocatorReading], changes: Sequence[Change], concurrent: int) -> None:
        """A request has ended: what it took for its own time, not what it left behind, as a model that is
        loaded at first use. Of several that overlapped each took its share."""
        for reading, change in zip(after, changes, strict=False):
            kept = max(0, change.allocated_delta or 0)
            taken = max(change.reserved_delta or 0, change.peak_growth or 0) - kept
            if taken > 0:
                self._note(reading.device, taken // max(1, concurrent))

    def _note(self, device: int, size: int) -> None:
        part = int(self._clock() // (SPAN / _PARTS))
        parts = self._largest.setdefault(device, {})
        if size > parts.get(part, 0):
            parts[part] = size
        for old in [each for each in tuple(parts) if each <= part - _PARTS]:
            parts.pop(old, None)

    def largest(self, device: int) -> int | None:
        """Of the last hour; None where no request grew."""
        oldest = int(self._clock() // (SPAN / _PARTS)) - _PARTS
        sizes = [size for part, size in tuple(self._largest.get(device, {}).items()) if part > oldest]
        return max(sizes, default=None)
