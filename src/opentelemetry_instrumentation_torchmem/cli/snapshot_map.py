# SPDX-License-Identifier: Apache-2.0
"""Where a snapshot's free bytes lie: the geometry behind the picture. Figures are `allocator.snapshot`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..allocator.rules import Rules
from ..allocator.snapshot import DEFAULT_POOL, DeviceMap
from .snapshot_file import FREE, Block, Segment

SPLIT_FREE, CACHED_FREE, UNTOLD_FREE = "split_free", "cached_free", "untold_free"
DEFAULT_STREAM = 0


class Place(NamedTuple):
    """What blocks have in common that serve the same requests."""

    device: int
    stream: int
    pool: tuple[int, int] | None
    kind: str
    expandable: bool

    @property
    def label(self) -> str:
        """``default pool, default stream, large``."""
        return place_label(self.pool, self.stream, self.kind, self.expandable)


@dataclass(slots=True)
class Group:
    """The segments of one place."""

    place: Place
    segments: list[Segment] = field(default_factory=list[Segment])
    blocks: int = 0
    rules: Rules | None = None
    """Those that say which free blocks could be given back; None where that is not known."""
    reserved: int = 0
    largest: Block | None = None
    """The largest free block."""


def place_label(pool: tuple[int, int] | None, stream: int, kind: str, expandable: bool) -> str:
    """A place in words; a pool that the release does not tell apart is left out."""
    words = [] if pool is None else ["default pool" if pool == DEFAULT_POOL else f"pool {pool[0]}:{pool[1]}"]
    words.append("default stream" if stream == DEFAULT_STREAM else f"stream {stream:#x}")
    words.append(f"{kind}, expandable" if expandable else kind)
    return ", ".join(words)


def groups(segments: Iterable[Segment], devices: Mapping[int, DeviceMap]) -> list[Group]:
    """By device, the default pool and the default stream first, large before small.

    ``devices`` are the analysis of the same segments.
    """
    found: dict[Place, Group] = {}
    for segment in segments:
        place = Place(segment.device, segment.stream, segment.pool, segment.kind, segment.expandable)
        group = found.get(place)
        if group is None:
            device = devices[segment.device]
            group = found[place] = Group(place, rules=None if device.cached is None else device.rules)
        group.segments.append(segment)
        group.blocks += len(segment.blocks)
        group.reserved += segment.size
        for block in segment.blocks:
            if block.state == FREE and (group.largest is None or block.size > group.largest.size):
                group.largest = block
    return sorted(found.values(), key=lambda group: _order(group.place))


def _order(place: Place) -> tuple[object, ...]:
    pool, stream = place.pool or DEFAULT_POOL, place.stream != DEFAULT_STREAM
    return place.device, pool != DEFAULT_POOL, pool, stream, place.stream, place.kind, place.expandable


def pieces(segment: Segment, rules: Rules | None) -> Iterator[tuple[int, int, str]]:
    """(address, size, look) in the order of addresses, the segment filled.

    Without ``rules`` it is not known which free blocks could be given back.

    A free block is cached_free where it is a whole segment, or in an expandable one whole pages, counted from
    the segment's begin: what `empty_cache()` gives back, unless it is in a private pool that has an owner.
    """
    if rules is None:
        for address, size, state in segment.blocks:
            yield address, size, UNTOLD_FREE if state == FREE else state
        return
    base = segment.address
    page = max(rules.page(segment.kind), 1) if segment.expandable else segment.size
    for address, size, state in segment.blocks:
        if state != FREE:
            yield address, size, state
            continue
        end = address + size
        first = base - (base - address) // page * page  # the page that begins in it, or after it
        last = base + (end - base) // page * page
        if first >= last:
            yield address, size, SPLIT_FREE
            continue
        if address < first:
            yield address, first - address, SPLIT_FREE
        yield first, last - first, CACHED_FREE
        if last < end:
            yield last, end - last, SPLIT_FREE
