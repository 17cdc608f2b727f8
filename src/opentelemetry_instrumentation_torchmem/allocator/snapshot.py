# SPDX-License-Identifier: Apache-2.0
"""A memory snapshot's segments and blocks -> what of a device is free, trapped and still to be had.

Pure functions over what ``torch.cuda.memory_snapshot()`` returns: no torch, no clock, no OpenTelemetry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .reading import AllocatorReading, DriverMemory
from .rules import LARGE, SMALL, Between, FreeBlock, Rules, address_range
from .settings import AllocatorSettings

PoolId = tuple[int, int]
DEFAULT_POOL: Final[PoolId] = (0, 0)

# Why a figure is absent, or not known to the byte.
DAMAGED = "damaged_snapshot"
"""The snapshot contradicts itself or the statistics: the allocator moved on in between, or is broken."""
RELEASE = "torch_release"
"""This release's snapshots do not tell private pools, or expandable segments, from others."""
PRIVATE_POOLS = "private_pools"
"""Whether a private pool that holds free memory still has an owner is in no snapshot."""
DRIVER = "driver_memory"
FRACTION = "memory_fraction"
PENDING = "pending_frees"
"""Whether the events that freed blocks wait for have completed is in no snapshot."""
MAX_SPLIT = "max_split_size"
"""Which block serves depends on unmapped addresses, which are in no snapshot."""
PAGE_SIZE = "page_size"
"""Expandable segments were made under another ``large_segment_size``."""
UNMAPPED = "unmapped_addresses"
"""Memory mapped beside free memory would be one block with it; where it would be mapped is unknown."""

ABSENT: Mapping[str, str] = {
    DAMAGED: "The snapshot contradicts itself or the statistics: the allocator moved on in between.",
    RELEASE: "This release's snapshots do not tell private pools or expandable segments from others.",
    PRIVATE_POOLS: "Whether a private pool that holds free memory still has an owner is in no snapshot.",
    DRIVER: "The driver's figures of the device are not to be had.",
    FRACTION: "The process's memory fraction is not to be had.",
    PENDING: "Whether the events that freed blocks wait for have completed is in no snapshot.",
    MAX_SPLIT: "Which block serves depends on unmapped addresses, which are in no snapshot.",
    PAGE_SIZE: "Expandable segments were made under another large_segment_size.",
    UNMAPPED: "Where memory would be mapped beside free memory is in no snapshot.",
}
"""Why a figure is absent, or not known to the byte -> what that means."""

_INACTIVE = "inactive"
_PENDING = frozenset({"active_pending_free", "active_awaiting_free"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a device's memory and is in no snapshot; None where the caller cannot tell."""

    driver: DriverMemory | None = None
    fraction: float | None = None
    """``torch.cuda.get_per_process_memory_fraction``."""
    reserved: int | None = None
    """From statistics read beside the snapshot: one that differs was taken in another state."""
    untouched: bool = False
    """The allocator has never given anything back on this device: see ``never_released``."""


@dataclass(frozen=True, slots=True)
class Place:
    """The segments that serve the same requests: of one stream, pool and kind."""

    stream: int
    pool: PoolId | None
    """None where the release does not tell."""
    kind: str
    """``small`` or ``large``."""
    expandable: bool
    reserved: int
    allocated: int
    pending_free: int
    free: Sequence[int]
    """The size of each free block."""

    @property
    def by_size(self) -> list[tuple[int, int, int]]:
        """``(size, blocks, bytes)`` of the free blocks from each power of two up to the next."""
        counts = Counter(map(int.bit_length, self.free))
        held = dict.fromkeys(counts, 0)
        for size in self.free:
            held[size.bit_length()] += size
        return [(1 << bits >> 1, counts[bits], held[bits]) for bits in sorted(counts)]


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """What one snapshot says of one device. Bytes.

    A figure between bounds is told where they meet; else the smaller one is, or none where smaller is
    not safer. ``absent`` says why.
    """

    device: int
    places: tuple[Place, ...]
    reserved: int
    allocated: int
    pending_free: int
    private_reserved: int | None
    """Held by CUDA graphs' pools and MemPools."""
    other_streams_reserved: int | None
    """Held in the default pool by streams other than the one that was asked for: of no use to it."""
    cached: Between | None
    """What ``empty_cache`` gives back of the free bytes, were the pending ones still in use."""
    releasable: Between | None
    """What ``empty_cache``, or the allocator before it fails, gives back: the pending frees end first."""
    free_block_largest: Mapping[str, Between] | None
    """By kind: the largest request that is served without asking the driver."""
    headroom: Between | None
    """The largest request that succeeds, when the allocator has given back what it can.

    What another process, NCCL or another thread takes meanwhile is not in it, and while memory is being
    captured into a graph or allocated into a MemPool, on any thread, nothing is given back.
    """
    absent: Mapping[str, str]
    """Figure -> why it is absent, or less than it might be."""

    @property
    def free(self) -> int:
        return self.reserved - self.allocated - self.pending_free

    @property
    def trapped(self) -> Between | None:
        """Bytes in no use that remain reserved whatever is given back."""
        return _rest(self.free + self.pending_free, self.releasable)

    @property
    def split_free(self) -> int | None:
        """The ledger's: free but trapped in partly used segments, were the pending frees still in use."""
        return _exact(_rest(self.free, self.cached))

    @property
    def cached_free(self) -> int | None:
        """The ledger's: free, and ``empty_cache`` returns it."""
        return _exact(self.cached)

    @property
    def fragmentation(self) -> float | None:
        """The trapped share of what is held, 0 to 1, in every mode."""
        trapped = _exact(self.trapped)
        return None if trapped is None or not self.reserved else trapped / self.reserved

    def is_of(self, reading: AllocatorReading) -> bool:
        """Whether a reading shows the very state that the snapshot was taken in."""
        return (self.reserved, self.allocated, self.pending_free) == (
            reading.reserved,
            reading.allocated,
            reading.pending_free,
        )

    @property
    def largest_hole(self) -> int:
        """The largest free block, whoever may use it."""
        return max((max(place.free, default=0) for place in self.places), default=0)


def never_released(statistics: Mapping[str, Any]) -> bool:
    """Whether these statistics say that nothing was ever unmapped: no address range hides from a snapshot.

    They are as good as new only if they were never reset.
    """
    reserved = statistics.get("reserved_bytes", {}).get("all", {})
    return (
        all(statistics.get(key) == 0 for key in ("num_device_free", "num_alloc_retries", "num_ooms"))
        and reserved.get("current") is not None
        and reserved["current"] == reserved.get("allocated")
    )


def analyse(
    segments: Iterable[Mapping[str, Any]],
    settings: AllocatorSettings,
    limits: Mapping[int, Limits],
    *,
    stream: int = 0,
    live_pools: Collection[PoolId] | None = None,
) -> dict[int, DeviceMap]:
    """A map of each device that the snapshot or the limits name.

    The largest block and the headroom are those of requests on one stream, in the default pool.
    ``live_pools`` are the private pools that have an owner, where the caller knows them all.

    Example:
        >>> segment = dict(device=0, address=0, total_size=100 << 20, allocated_size=40 << 20,
        ...     active_size=40 << 20, stream=0, segment_pool_id=(0, 0), segment_type="large",
        ...     is_expandable=False, blocks=[dict(address=0, size=40 << 20, state="active_allocated"),
        ...     dict(address=40 << 20, size=60 << 20, state="inactive")])
        >>> device = analyse([segment], AllocatorSettings.parse("", "default"),
        ...     {0: Limits(DriverMemory(free=30 << 20, total=200 << 20), fraction=1.0)})[0]
        >>> device.fragmentation, device.headroom.least >> 20
        (0.6, 60)
    """
    rules = Rules.of(settings)
    groups: dict[tuple[Any, ...], _Group] = {}
    damaged: set[int | None] = set()
    for segment in segments:
        device = None
        try:
            device = segment["device"]
            key = (
                device,
                segment["stream"],
                segment.get("segment_pool_id"),
                segment["segment_type"],
                segment.get("is_expandable"),
            )
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(key, rules, stream)
            if not group.add(segment):
                damaged.add(device)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):  # no snapshot of torch's
            damaged.add(device)

    by_device: dict[int, list[_Group]] = {device: [] for device in limits}
    for group in groups.values():
        by_device.setdefault(group.device, []).append(group)
    return {
        device: _device_map(
            device,
            of_device,
            rules,
            settings,
            limits.get(device, _NO_LIMITS),
            stream,
            live_pools,
            broken=device in damaged or None in damaged,
        )
        for device, of_device in by_device.items()
    }


_NO_LIMITS = Limits()


class _Range(NamedTuple):
    """A contiguous mapped part of an expandable segment."""

    address: int
    size: int
    stretches: Sequence[tuple[int, int]] = ()
    """Offset and size of what is free when the pending blocks are: where pages can be unmapped, or mapped
    beside it."""
    tail: int = 0
    """What is free now at its end: unmapped addresses follow."""


class _Group:
    """The segments of one place while they are added up: the loops here are what an analysis costs."""

    __slots__ = (
        "_at_home",
        "_detailed",
        "_page",
        "active",
        "after",
        "allocated",
        "cached",
        "device",
        "expandable",
        "free",
        "kind",
        "odd",
        "pool",
        "ranges",
        "releasable",
        "reserved",
        "stream",
        "stuck",
        "within",
    )

    def __init__(self, key: tuple[Any, ...], rules: Rules, stream: int) -> None:
        self.device, self.stream, self.pool, self.kind, self.expandable = key
        if self.kind not in (SMALL, LARGE):
            raise ValueError(self.kind)
        self.reserved = self.active = self.allocated = 0
        self.cached = self.releasable = 0
        """Bytes of wholly free segments or pages: were pending blocks in use, and free."""
        self.free: list[int] = []
        """Sizes of the free blocks of segments without pending blocks."""
        self.within: list[FreeBlock] = []
        """Those of segments with pending ones, and of all where the details count."""
        self.after: list[FreeBlock] = []
        """The same when the pending blocks are free."""
        self.ranges: list[_Range] = []
        """Of the segments that can grow for the stream asked for."""
        self.stuck = 0
        """The largest free block, of the stream asked for, that no cudaFree gives back."""
        self.odd = False
        """Some segment is no whole number of pages."""
        self._page = rules.page(self.kind) if self.expandable else 0
        home = self.stream == stream and self.pool == DEFAULT_POOL
        self._at_home = home and bool(rules.expandable and self.expandable)
        self._detailed = home and rules.max_split is not None

    def add(self, segment: Mapping[str, Any]) -> bool:
        """False if the segment contradicts itself."""
        total: int = segment["total_size"]
        active: int = segment["active_size"]
        allocated: int = segment["allocated_size"]
        self.reserved += total
        self.active += active
        self.allocated += allocated
        if self._page and total % self._page:
            self.odd = True
        if allocated == total:
            if self._at_home:
                self.ranges.append(_Range(segment["address"], total))
            return True
        if active != allocated or self._detailed:
            return self._add_stretches(segment, total, active, allocated)

        blocks = segment["blocks"]
        free = [block["size"] for block in blocks if block["state"] == _INACTIVE]
        if sum(free) != total - active:
            return False
        self.free += free
        if not self.expandable:
            if not active:
                self.cached += total
                self.releasable += total
            return True
        page = self._page
        base = segment["address"]
        largest = max(free)
        stretches: list[tuple[int, int]] = []
        if largest >= page:
            stretches = [
                (block["address"] - base, block["size"])
                for block in blocks
                if block["size"] >= page and block["state"] == _INACTIVE
            ]
            pages = sum(_pages(offset, size, page) for offset, size in stretches)
            self.cached += pages
            self.releasable += pages
        if self._at_home:
            tail = 0
            for block in (blocks[0], blocks[-1]):  # what has unmapped addresses beside it
                tail = block["size"] if block["state"] == _INACTIVE else 0
                if 0 < tail < page:
                    stretches.append((block["address"] - base, tail))
            self.ranges.append(_Range(base, total, stretches, tail))
        return True

    def _add_stretches(self, segment: Mapping[str, Any], total: int, active: int, allocated: int) -> bool:
        """Block by block: where frees are pending, or where each block counts."""
        base = segment["address"]
        offset = free = pending = 0
        stretch = -1  # where what is free or pending began
        stretches: list[tuple[int, int]] = []
        within: list[tuple[int, int]] = []
        for block in segment["blocks"]:
            size = block["size"]
            state = block["state"]
            if state == _INACTIVE:
                free += size
                within.append((offset, size))
            elif state in _PENDING:
                pending += size
            else:
                if stretch >= 0:
                    stretches.append((stretch, offset - stretch))
                    stretch = -1
                offset += size
                continue
            if stretch < 0:
                stretch = offset
            offset += size
        if stretch >= 0:
            stretches.append((stretch, offset - stretch))
        if offset != total or free != total - active or pending != active - allocated:
            return False

        expandable = bool(self.expandable)
        for blocks, found in ((self.within, within), (self.after, stretches)):
            for start, size in found:
                blocks.append(FreeBlock(size, base + start, expandable and start + size == total))
        if self._detailed:
            whole = 0 if expandable else total
            self.stuck = max([self.stuck, *(size for _, size in within + stretches if size != whole)])
        if not expandable:
            self.cached += 0 if active else total
            self.releasable += 0 if allocated else total
            return True
        page = self._page
        self.cached += sum(_pages(start, size, page) for start, size in within)
        self.releasable += sum(_pages(start, size, page) for start, size in stretches)
        if self._at_home:
            tail = within[-1][1] if within and sum(within[-1]) == total else 0
            self.ranges.append(_Range(base, total, stretches, tail))
        return True

    @property
    def place(self) -> Place:
        sizes = self.free + [block.size for block in self.within] if self.within else self.free
        return Place(
            self.stream,
            self.pool,
            self.kind,
            bool(self.expandable),
            self.reserved,
            self.allocated,
            self.active - self.allocated,
            sizes,
        )


def _device_map(
    device: int,
    groups: Sequence[_Group],
    rules: Rules,
    settings: AllocatorSettings,
    limits: Limits,
    stream: int,
    live_pools: Collection[PoolId] | None,
    *,
    broken: bool,
) -> DeviceMap:
    reserved = sum(group.reserved for group in groups)
    allocated = sum(group.allocated for group in groups)
    absent: dict[str, str] = {}
    shared = [group for group in groups if group.pool == DEFAULT_POOL]
    private = [group for group in groups if group.pool != DEFAULT_POOL]

    why = None
    if broken or (limits.reserved is not None and limits.reserved != reserved):
        why = DAMAGED
    elif any(group.pool is None or (group.expandable is None and rules.expandable) for group in groups):
        why = RELEASE

    cached = releasable = headroom = None
    blocks: dict[str, Between] | None = None
    if why is None:
        blocks = _free_blocks(shared, rules, stream, absent)
        if any(group.odd for group in groups):
            why = PAGE_SIZE
        else:
            kept: list[_Group] = private if live_pools is None else []
            given = shared + [
                group for group in private if live_pools is not None and group.pool not in live_pools
            ]
            cached = _between(given, kept, "cached")
            releasable = _between(given, kept, "releasable")
            if not releasable.exact or not cached.exact:
                absent["fragmentation"] = absent["split_free"] = PRIVATE_POOLS
            driver, fraction = limits.driver, limits.fraction
            if driver is None or fraction is None:
                absent["headroom"] = DRIVER if driver is None else FRACTION
            else:
                bounds = _Bounds.of(driver, fraction, rules, reserved, releasable)
                new = _NewMemory(rules, settings, groups, driver.total, limits.untouched)
                headroom = _headroom(groups, rules, bounds, blocks, stream, new, absent)
    if why is not None:
        absent |= dict.fromkeys(("fragmentation", "split_free", "headroom"), why)
        if blocks is None:
            absent["free_block.largest"] = why

    told = why not in (DAMAGED, RELEASE)
    return DeviceMap(
        device=device,
        places=tuple(group.place for group in groups),
        reserved=reserved,
        allocated=allocated,
        pending_free=sum(group.active for group in groups) - allocated,
        private_reserved=sum(group.reserved for group in private) if told else None,
        other_streams_reserved=(
            sum(group.reserved for group in shared if group.stream != stream) if told else None
        ),
        cached=cached,
        releasable=releasable,
        free_block_largest=blocks,
        headroom=headroom,
        absent=absent,
    )


def _free_blocks(
    shared: Sequence[_Group], rules: Rules, stream: int, absent: dict[str, str]
) -> dict[str, Between]:
    """What the free blocks serve, whether or not the events that pending ones wait for have completed."""
    found: dict[str, Between] = {}
    for kind in (SMALL, LARGE):
        groups = [
            group
            for group in shared
            if group.stream == stream and group.kind == kind and (rules.expandable or not group.expandable)
        ]
        if rules.max_split is None:  # the largest block counts alone
            least, most = (
                rules.largest_served(kind, (_largest(group.free, getattr(group, name)) for group in groups))
                for name in ("within", "after")
            )
            found[kind] = Between(least, most)
        else:
            now = {block for group in groups for block in group.within}
            then = {block for group in groups for block in group.after}
            free = (FreeBlock(size, 0) for group in groups for size in group.free)
            found[kind] = rules.served(kind, (now & then).union(free), now ^ then)
        if not found[kind].exact:
            pending = any(group.active != group.allocated for group in groups)
            absent["free_block.largest"] = PENDING if pending else MAX_SPLIT
    return found


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What the driver can still give and may be asked for, once the allocator has given back what it can."""

    free: Between
    asked: Between
    free_now: int
    asked_now: int
    """Before it gives back anything."""

    @classmethod
    def of(
        cls, driver: DriverMemory, fraction: float, rules: Rules, reserved: int, releasable: Between
    ) -> _Bounds:
        now = int(fraction * driver.total) - reserved
        least, most = now + releasable.least, now + releasable.most
        if fraction == 1.0:  # set, or the default, which binds nothing
            least = min(least, now) if rules.refuses_early else least
            most = most if rules.refuses_early else max(most, _UNBOUNDED)
        free = Between(driver.free + releasable.least, driver.free + releasable.most)
        return cls(free, Between(least, most), driver.free, now)


_UNBOUNDED = 1 << 62


def _headroom(
    groups: Sequence[_Group],
    rules: Rules,
    bounds: _Bounds,
    blocks: Mapping[str, Between],
    stream: int,
    new: _NewMemory,
    absent: dict[str, str],
) -> Between:
    driver = new.least(bounds.free.least, bounds.asked.least)
    # With max_split torch first gives back a block above it, and fails at one that is not the driver's own.
    if rules.max_split is not None:
        stuck = max((group.stuck for group in groups), default=0)
        if stuck >= max(driver, rules.max_split):
            driver = new.least(bounds.free_now, min(bounds.asked.least, bounds.asked_now))
    least = max(driver, *(block.least for block in blocks.values()))
    most = max(
        new.most(bounds.free.most, bounds.asked.most), least, *(block.most for block in blocks.values())
    )
    # A MemPool made with use_on_oom serves what fails elsewhere; whether it was is in no snapshot.
    pools = [group for group in groups if group.stream == stream and group.pool[1]]
    spare = max((_largest(group.free, group.after) for group in pools), default=0)
    if least < max(most, spare):
        if spare > most or not bounds.free.exact:
            absent["headroom"] = PRIVATE_POOLS
        elif "free_block.largest" in absent:
            absent["headroom"] = absent["free_block.largest"]
        else:
            absent["headroom"] = UNMAPPED if rules.expandable else FRACTION
    return Between(least, max(most, spare))


class _NewMemory:
    """The largest request that gets new memory, cudaMalloc's or mapped pages, on one stream."""

    def __init__(
        self, rules: Rules, settings: AllocatorSettings, groups: Sequence[_Group], total: int, untouched: bool
    ) -> None:
        self._rules = rules
        self._page = page = rules.page(LARGE)
        self._span = span = address_range(settings, total, page)
        self._ranges = sorted(each for group in groups if group.kind == LARGE for each in group.ranges)
        self._gaps = _gaps(self._ranges, page, span) if untouched else None

    def least(self, free: int, asked: int) -> int:
        """What is sure to succeed with so much free on the device, and if so much may be asked for."""
        rules = self._rules
        if not rules.expandable:
            return rules.largest_asking(min(free, asked))
        # Wherever it is mapped, so much is enough; beside what is free already, less may be.
        upto = min(free // self._page * self._page, self._span)
        sure = max(rules.largest_asking(asked, rules.small_most, upto), self._small(free, asked))
        if self._gaps is None:
            return sure
        # What no range has addresses for before the flush gets a new one, which may lie before the others.
        room = max((each.tail + self._span - each.size for each in self._ranges), default=0)
        return max(sure, self._first_fit(self._gaps, free, asked, room))

    def most(self, free: int, asked: int) -> int:
        """What no larger request than this can exceed."""
        rules = self._rules
        if not rules.expandable:
            return rules.largest_asking(min(free, asked))
        pages = free // self._page
        if self._gaps is not None:
            large = self._first_fit(self._gaps, free, asked, self._span)
        else:
            upto = min(pages * self._page + _beside(self._ranges, self._page), self._span)
            large = rules.largest_asking(asked, rules.small_most, upto) if pages else 0
        return max(large, self._small(free, asked))

    def _small(self, free: int, asked: int) -> int:
        rules = self._rules
        return rules.largest_asking(asked, upto=rules.small_most) if free >= rules.page(SMALL) else 0

    def _first_fit(self, gaps: Sequence[tuple[int, int, int]], free: int, asked: int, room: int) -> int:
        """The largest large request, up to ``room``: it goes into the first gap with addresses enough, be
        there pages enough or not, else into a new range."""
        page = self._page
        pages = free // page
        best, reach = 0, self._rules.small_most
        for before, count, after in [*gaps, (0, self._span // page, 0)]:
            whole = before + count * page + after
            if whole > reach:
                upto = whole if count <= pages else before + pages * page
                best = max(best, self._rules.largest_asking(asked, reach, min(upto, room)))
                reach = whole
        return best


def _gaps(ranges: Sequence[_Range], page: int, span: int) -> list[tuple[int, int, int]]:
    """Where pages can be mapped after the flush, in the order of the search, if nothing was ever unmapped:
    the free bytes just before the gap, its pages, the free bytes just after it."""
    gaps: list[tuple[int, int, int]] = []
    for _, total, stretches, _ in ranges:
        before, end = 0, total
        for offset, size in sorted(stretches):
            first, last = _whole_pages(offset, size, page)
            if offset + size == total:
                before, end = min(first, total) - offset, min(first, total)
            elif first < last:
                gaps.append((first - offset, (last - first) // page, offset + size - last))
        if end:  # else all of it is given back, and its addresses with it
            gaps.append((before, (span - end) // page, 0))
    return gaps


def _beside(ranges: Sequence[_Range], page: int) -> int:
    """The most free bytes that can lie before and after a gap which pages are mapped into."""
    before = after = 0
    for _, total, stretches, _ in ranges:
        for offset, size in stretches:
            first, last = _whole_pages(offset, size, page)
            end = offset + size
            if first < last:
                before = max(before, first - offset)
                after = max(after, end - last)
            else:
                before = max(before, size if end == total else 0)
                after = max(after, size if offset == 0 else 0)
    return before + after


def _whole_pages(offset: int, size: int, page: int) -> tuple[int, int]:
    """Where the pages that lie wholly in a stretch begin and end."""
    return -(-offset // page) * page, (offset + size) // page * page


def _pages(offset: int, size: int, page: int) -> int:
    first, last = _whole_pages(offset, size, page)
    return max(0, last - first)


def _largest(sizes: Iterable[int], blocks: Iterable[FreeBlock]) -> int:
    return max(max(sizes, default=0), max((block.size for block in blocks), default=0))


def _between(given: Iterable[_Group], perhaps: Iterable[_Group], name: str) -> Between:
    least = sum(getattr(group, name) for group in given)
    return Between(least, least + sum(getattr(group, name) for group in perhaps))


def _rest(whole: int, part: Between | None) -> Between | None:
    return None if part is None else Between(whole - part.most, whole - part.least)


def _exact(figure: Between | None) -> int | None:
    return figure.least if figure is not None and figure.exact else None
