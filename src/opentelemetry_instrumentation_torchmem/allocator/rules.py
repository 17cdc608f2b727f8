# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's caching allocator does with a request: how it rounds, which free block serves it, what it
asks of the driver. Arithmetic alone, held against the real allocator by ``tests/truth``.

Sizes are bytes. "Small" requests, up to 1 MiB when rounded, and "large" ones have pools of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .settings import AllocatorSettings

SMALL, LARGE = "small", "large"

_MIB = 1 << 20
_STEP = 512
_SMALL_MOST = _MIB
SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # from here on a request gets a segment of its own
_OWN_STEP = 2 * _MIB
_NON_SPLIT_ROUNDING = 20 * _MIB


class Between(NamedTuple):
    """A figure as far as it is known: the truth is neither below ``least`` nor above ``most``."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        return self.least == self.most


class FreeBlock(NamedTuple):
    """In the order in which the allocator looks for the best fit."""

    size: int
    fixed: bool = True
    """It cannot grow: no unmapped addresses follow it, as they do the last block of an expandable range."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The allocator's rules under its settings.

    Example:
        >>> Rules.of(AllocatorSettings.parse("", "default")).largest_asking(limit=25 << 20) >> 20
        24
    """

    expandable: bool
    divisions: tuple[int, ...] | None
    large_segment: int
    max_split: int | None
    non_split_rounding: int
    refuses_early: bool
    """The request is refused, before anything is given back, if it would exceed the device's total."""

    @classmethod
    def of(cls, settings: AllocatorSettings) -> Rules:
        return cls(
            settings.expandable_segments,
            settings.divisions,
            settings.large_segment_size or _LARGE_SEGMENT,
            settings.max_split_size,
            settings.max_non_split_rounding or _NON_SPLIT_ROUNDING,
            settings.throw_on_cudamalloc_oom,
        )

    @property
    def small_most(self) -> int:
        """The largest small request."""
        return _SMALL_MOST

    def page(self, kind: str) -> int:
        """What is mapped and unmapped as a whole in an expandable segment."""
        return SMALL_SEGMENT if kind == SMALL else self.large_segment

    def round_down(self, size: int) -> int:
        """The largest size up to this one that rounding leaves as it is."""
        size -= size % _STEP
        if self.divisions is not None and size:
            divisions = self.divisions[min(max(size.bit_length() - 21, 0), len(self.divisions) - 1)]
            if divisions > 1 and size > _STEP * divisions:
                size -= size % ((1 << (size.bit_length() - 1)) // divisions)
        return size

    def asked(self, size: int) -> int:
        """What is asked of the driver for a rounded request that no free block serves."""
        if size <= _SMALL_MOST:
            return SMALL_SEGMENT
        if size < _OWN_SEGMENT:
            return self.large_segment
        return -(-size // _OWN_STEP) * _OWN_STEP

    def largest_asking(self, limit: int, above: int = 0, upto: int | None = None) -> int:
        """The largest request, more than ``above`` and no more than ``upto``, that asks for no more than
        the limit; 0 if there is none. More can fail while less succeeds: 12 MiB ask for 12, 5 MiB for 20.
        """
        bounds = (limit - limit % _OWN_STEP, _OWN_SEGMENT - _STEP, _SMALL_MOST)
        for bound in bounds:
            size = self.round_down(bound if upto is None or bound < upto else upto)
            if above < size and self.asked(size) <= limit:
                return size
        return 0

    def largest_served(self, kind: str, block: int) -> int:
        """The largest request of a kind that fits into a block."""
        if kind == SMALL:
            return self.round_down(min(block, _SMALL_MOST))
        size = self.round_down(block)
        return size if size > _SMALL_MOST else 0

    def served(
        self, kind: str, fixed: Sequence[int], growing: Sequence[int], perhaps: Sequence[FreeBlock] = ()
    ) -> Between:
        """The largest request that free blocks of these sizes serve, where others may be free beside them.

        Of two blocks that can grow the allocator takes the one that can grow less, even if it is larger
        now; how far each can is not known. If it is refused, as ``max_split`` has it, one that can grow
        may serve yet, as the place where new memory would be mapped.
        """
        largest = max((*fixed, *growing, *(block.size for block in perhaps)), default=0)
        near = self.largest_served(kind, largest)
        if near == largest and not perhaps:
            return Between(near, near)
        # Mostly one of the few blocks that are large enough for the most that is possible serves it.
        found = self._served(kind, [size for size in fixed if size >= near], growing, perhaps)
        return found if found.least else self._served(kind, fixed, growing, perhaps)

    def _served(
        self, kind: str, fixed: Iterable[int], growing: Iterable[int], perhaps: Iterable[FreeBlock]
    ) -> Between:
        sure = {FreeBlock(size) for size in fixed}
        sure.update(FreeBlock(size, fixed=False) for size in growing)
        ordered = sorted(sure.union(perhaps))
        most = 0
        for index in range(len(ordered) - 1, -1, -1):
            below = ordered[index - 1].size if index else 0
            size = self.largest_served(kind, ordered[index].size)
            if size <= below:  # a smaller block is the best fit
                continue
            ends, certain = _may_take(ordered, index, sure)
            allowed = [self._allows(size, block.size) for block in ends]
            if any(allowed) or any(not block.fixed for block in ordered[index:]):
                most = most or size
            if certain and all(allowed):
                return Between(size, most)
        return Between(0, most)

    def _allows(self, size: int, block: int) -> bool:
        if self.max_split is None:
            return True
        if size < self.max_split:
            return block < self.max_split
        return block < size + self.non_split_rounding


def address_range(settings: AllocatorSettings, total: int, page: int) -> Between:
    """The bytes of addresses that an expandable segment spans: no single request exceeds them. Those by class
    are of streams that were given one; whether this one was is not known."""
    full = _reserve(settings.expandable_segments_reserve or "", total) or total + total // 8
    by_class = (settings.expandable_segments_reserve_by_class or "").strip("[] ").split(",")
    each = [full, *filter(None, (_reserve(item.rpartition(":")[2], total) for item in by_class))]
    return Between(-(-min(each) // page) * page, -(-max(each) // page) * page)


def _reserve(text: str, total: int) -> int:
    """``0.5`` of the device or ``40G``; 0 where torch would not take it."""
    text = text.strip()
    try:
        size = float(text[:-1]) * (1 << 30) if text.endswith("G") else float(text) * total
        return max(0, int(size))
    except (ValueError, OverflowError):
        return 0


def _may_take(
    ordered: Sequence[FreeBlock], index: int, sure: Collection[FreeBlock]
) -> tuple[list[FreeBlock], bool]:
    """The blocks that a search may end at that begins here, and whether it is sure to find one."""
    taken: list[FreeBlock] = []
    found = False
    for block in ordered[index:]:
        taken.append(block)
        found = found or block in sure
        if block.fixed and block in sure:
            break
    return taken, found
