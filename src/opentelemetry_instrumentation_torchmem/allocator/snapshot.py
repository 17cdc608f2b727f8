# SPDX-License-Identifier: Apache-2.0
"""A memory snapshot's segments and blocks -> what of a device is free, trapped and still to be had.

Pure functions over what ``torch.cuda.memory_snapshot()`` returns: no torch, no clock, no OpenTelemetry.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple

from .reading import AllocatorReading, DriverMemory, share
from .rules import LARGE, SMALL, Between, FreeBlock, Rules, address_range
from .settings import AllocatorSettings

PoolId = tuple[int, int]
DEFAULT_POOL: Final[PoolId] = (0, 0)
PoolOn = tuple[int, PoolId]
"""A private pool on a device: the same one may have an owner on one device and none on another."""
Stretch = tuple[int, int]
"""Offset in its segment, and size."""

# Why a figure is absent, or not known to the byte.
DAMAGED = "damaged_snapshot"
"""The snapshot contradicts itself or the statistics: the allocator moved on in between, or is broken."""
RELEASE = "torch_release"
"""This release's snapshots do not tell private pools, or expandable segments, from others."""
PRIVATE_POOLS = "private_pools"
"""Whether a private pool that holds free memory still has an owner is in no snapshot, and nobody knows."""
DRIVER = "driver_memory"
FRACTION = "memory_fraction"
"""It is not to be had; or it is 1, which bounds new memory only where it was set."""
PENDING = "pending_frees"
"""Whether the events that freed blocks wait for have completed is in no snapshot."""
MAX_SPLIT = "max_split_size"
"""Which block serves, or is given back, depends on unmapped addresses or is decided wrongly by torch."""
PAGE_SIZE = "page_size"
"""Expandable segments were made under another ``large_segment_size``."""
SETTINGS = "allocator_settings"
"""Some were set at run time, since the snapshot or unseen: torch tells the last string, and keeps most of
those before it."""
UNMAPPED = "unmapped_addresses"
"""Memory mapped beside free memory would be one block with it; where it would be mapped is unknown."""

ABSENT: Mapping[str, str] = {
    DAMAGED: "The snapshot contradicts itself or the statistics: the allocator moved on in between.",
    RELEASE: "This release's snapshots do not tell private pools or expandable segments from others.",
    PRIVATE_POOLS: "Whether a private pool that holds free memory still has an owner is not known.",
    DRIVER: "The driver's figures of the device are not to be had.",
    FRACTION: "The process's memory fraction is not to be had, or whether a fraction of 1 was ever set.",
    PENDING: "Whether the events that freed blocks wait for have completed is in no snapshot.",
    MAX_SPLIT: "Which block serves depends on unmapped addresses, which are in no snapshot.",
    PAGE_SIZE: "Expandable segments were made under another large_segment_size.",
    SETTINGS: "Allocator settings or the memory fraction were set at run time, since the snapshot or unseen.",
    UNMAPPED: "Where memory would be mapped beside free memory is in no snapshot.",
}
"""Why a figure is absent, or not known to the byte -> what that means."""

_ALLOCATED, _INACTIVE = "active_allocated", "inactive"
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
    after: Sequence[int] = ()
    """Those of the free blocks that come of pending ones and those beside them."""

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
    private_idle: int
    """In wholly free cudaMalloc segments of private pools that may have an owner: the statistics do not count
    them as split, and ``empty_cache`` does not return them."""
    private_busy: int
    """What is more in such pools, and in use: it may become idle, and no statistics tell where."""
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

    With expandable segments the truth can lie above ``least`` by what is free before and after the place
    where memory will be mapped: less than a page on either side, so mostly within one, always below two.

    What another process, NCCL or another thread takes meanwhile is not in it. While a CUDA graph is captured,
    on any thread, and in some releases while a MemPool is in use, nothing is given back: less succeeds.
    """
    absent: Mapping[str, str]
    """Figure -> why it is absent, or less than it might be."""
    limits: Limits = Limits()
    """What it was reckoned with."""
    rules: Rules | None = None
    stuck: bool = False
    """Nothing may be given back: with a split limit torch tries a part of a segment, which fails."""

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
        """The share of ``split_free`` in what is held, 0 to 1, in every mode.

        Pending frees are not in it, as they are not in the statistics' ``inactive_split``: what they leave
        trapped when they end is in ``trapped``.
        """
        return share(self.split_free, self.reserved)

    def is_of(self, reading: AllocatorReading) -> bool:
        """Whether a reading shows the very state that the snapshot was taken in."""
        return (self.reserved, self.allocated, self.pending_free) == (
            reading.reserved,
            reading.allocated,
            reading.pending_free,
        )

    def headroom_at(
        self, reading: AllocatorReading, total: int, free: int, hidden: int = 0, cut_up: int = 0
    ) -> int | None:
        """Headroom as far as this map bears it out in a later state: with so much free on the device now, and
        where what is not trapped is to be had; ``hidden`` bytes may have become idle in private pools since,
        and so many of expandable segments ``cut_up``.

        The smaller of two figures that differ: neither more than was found, nor more than is left. Blocks
        that are pending now may be so for long, and are not counted on. None where it was not found, or the
        reading does not say what is held.
        """
        held, rules = reading.cached, self.rules
        if self.headroom is None or rules is None or held is None or reading.reserved is None:
            return None
        trapped = reading.inactive_split
        if trapped is None:
            rest = _rest(self.free, self.cached)
            trapped = held if rest is None else min(held, rest.most)
        else:
            trapped += self.private_idle
        trapped = held if self.stuck else min(held, trapped + hidden + cut_up)
        fraction = 1.0 if self.limits.fraction is None else self.limits.fraction
        allowed = int(fraction * total) - reading.reserved
        given_back = held - trapped
        asked = allowed if rules.refuses_early else allowed + given_back
        served = self.free_blocks_at(reading, hidden) or {}
        left = max(_new_memory(rules, free + given_back, max(0, asked), total), *served.values(), 0)
        return min(self.headroom.least, left)

    def under_other_settings(self) -> DeviceMap:
        """The same map once others have come into force: what succeeds is not known before the next one."""
        absent = {**self.absent, "headroom": SETTINGS, "free_block.largest": SETTINGS}
        return replace(self, headroom=None, free_block_largest=None, absent=absent)

    def under_fraction(self, fraction: float | None, reading: AllocatorReading) -> DeviceMap:
        """The same map once the process may hold another share of the device; ``reading`` is that of its own
        state."""
        absent = {**self.absent, "headroom": SETTINGS}
        later = replace(self, limits=replace(self.limits, fraction=fraction), absent=absent)
        driver, found = self.limits.driver, self.headroom
        if driver is None or found is None or fraction is None:
            return replace(later, headroom=None)
        least = later.headroom_at(reading, driver.total, driver.free)
        return replace(later, headroom=None if least is None else Between(least, max(least, found.most)))

    def free_blocks_at(self, reading: AllocatorReading, hidden: int = 0) -> Mapping[str, int] | None:
        """By kind: the largest request that is served without asking the driver, were the block still free
        that this map found, as far as there is as much in no use in a later state. None as for headroom."""
        rules, blocks = self.rules, self.free_block_largest
        reserved, active = reading.by_pool("reserved_bytes"), reading.by_pool("active_bytes")
        if rules is None or blocks is None or not isinstance(reserved, Mapping):
            return None
        if not isinstance(active, Mapping):
            return None
        return {
            kind: min(block.least, rules.largest_served(kind, max(0, reserved[kind] - active[kind] - hidden)))
            for kind, block in blocks.items()
        }

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
    live_pools: Collection[PoolOn] = (),
    dropped_pools: Collection[PoolOn] = (),
) -> dict[int, DeviceMap]:
    """A map of each device that the snapshot or the limits name.

    The largest block and the headroom are those of requests on one stream, in the default pool.
    ``live_pools`` are private pools that have an owner for sure, ``dropped_pools`` those that have none for
    sure; of others both is reckoned with.

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
    places: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    damaged: set[int | None] = set()
    for segment in segments:
        try:
            key = _key_of(segment)
            if key in places:
                places[key].append(segment)
            else:
                places[key] = [segment]
        except _NO_SNAPSHOT:  # noqa: PERF203 - free where nothing is raised
            damaged.add(None)
    groups: list[_Group] = []
    for key, of_place in places.items():
        group = _Group(key, rules, stream)
        groups.append(group)
        try:
            sound = group.add(of_place)
        except _NO_SNAPSHOT:
            sound = False
        if not sound:
            damaged.add(group.device)

    by_device: dict[int, list[_Group]] = {device: [] for device in limits}
    for group in groups:
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
            dropped_pools,
            broken=device in damaged or None in damaged,
        )
        for device, of_device in by_device.items()
    }


_NO_LIMITS = Limits()
_NO_SNAPSHOT = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What something else than a snapshot of torch's gives rise to."""
_KEY = itemgetter("device", "stream", "segment_pool_id", "segment_type", "is_expandable")
_TOTAL, _IN_USE, _HELD, _SIZE = map(itemgetter, ("total_size", "active_size", "allocated_size", "size"))
_OFFSET: Callable[[Stretch], int] = itemgetter(0)


def _key_of(segment: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        return _KEY(segment)
    except KeyError:  # a release that does not tell them all
        return (
            segment["device"],
            segment["stream"],
            segment.get("segment_pool_id"),
            segment["segment_type"],
            segment.get("is_expandable"),
        )


class _Range(NamedTuple):
    """A contiguous mapped part of an expandable segment."""

    address: int
    size: int
    stretches: Sequence[Stretch] = ()
    """What is free when the pending blocks are: where pages can be unmapped, or mapped beside it."""
    tail: int = 0
    """What is free now at its end: unmapped addresses follow."""


class _Group:
    """The segments of one place, added up: the loops here are what an analysis costs."""

    __slots__ = (
        "_grows",
        "_page",
        "_split",
        "active",
        "after",
        "allocated",
        "cached",
        "cut",
        "cut_first",
        "device",
        "expandable",
        "fixed",
        "free",
        "growing",
        "kind",
        "largest",
        "odd",
        "perhaps",
        "pool",
        "ranges",
        "releasable",
        "reserved",
        "stream",
        "stuck",
    )

    def __init__(self, key: tuple[Any, ...], rules: Rules, stream: int) -> None:
        self.device, self.stream, self.pool, self.kind, self.expandable = key
        self.reserved = self.active = self.allocated = 0
        self.cached = self.releasable = 0
        """Bytes of wholly free segments or pages: were pending blocks in use, and free."""
        self.free: list[int] = []
        """The size of each free block."""
        self.largest = 0
        """The largest of them."""
        self.after: list[int] = []
        """The sizes of the free blocks that come of pending ones and those beside them."""
        self.ranges: list[_Range] = []
        """Of the segments that can grow for the stream asked for."""
        self.odd = False
        """Some segment is no whole number of pages."""
        self._page = rules.page(self.kind) if self.expandable else 0
        home = self.stream == stream and self.pool == DEFAULT_POOL
        self._grows = home and bool(rules.expandable and self.expandable)
        self._split = rules.max_split if home else None
        self.fixed: list[int] = []
        """With a split limit, of the stream asked for: free blocks that are so whatever is pending."""
        self.growing: list[int] = []
        """Those that unmapped addresses follow."""
        self.perhaps: list[FreeBlock] = []
        """Those that are free now or when what is pending is free, not both."""
        self.stuck = 0
        """The largest, now or then, that no cudaFree gives back."""
        self.cut = False
        """A part of a cudaMalloc segment is above the limit, another one than when it was cut: torch takes it
        for a whole one."""
        self.cut_first = False
        """The first part of one: torch gives the whole segment back, whatever lives in the rest."""

    def add(self, segments: Sequence[Mapping[str, Any]]) -> bool:
        """False if they contradict themselves."""
        self.reserved = sum(map(_TOTAL, segments))
        self.active = sum(map(_IN_USE, segments))
        self.allocated = sum(map(_HELD, segments))
        pending = self._add_expandable(segments) if self.expandable else self._add_native(segments)
        return (
            self.kind in (SMALL, LARGE)
            and sum(self.free) == self.reserved - self.active
            and pending == self.active - self.allocated
        )

    def _add_native(self, segments: Sequence[Mapping[str, Any]]) -> int:
        """Returns the pending bytes."""
        self.cached = sum([segment["total_size"] for segment in segments if not segment["active_size"]])
        self.releasable = self.cached
        pending = 0
        quiet = segments
        if self.active != self.allocated:
            self.releasable = sum(
                [segment["total_size"] for segment in segments if not segment["allocated_size"]]
            )
            quiet = [segment for segment in segments if segment["active_size"] == segment["allocated_size"]]
            free: list[Mapping[str, Any]] = []
            merged: list[Stretch] = []
            for segment in segments:
                if segment["active_size"] != segment["allocated_size"]:
                    pending += _merge(segment["blocks"], segment["address"], free, merged)
            self.free = list(map(_SIZE, free))
            self.after = [size for _, size in merged]
        self.free += [
            block["size"] for segment in quiet for block in segment["blocks"] if block["state"] == _INACTIVE
        ]
        self.largest = max(self.free, default=0)
        if self._split is not None:
            if not pending and self.largest < self._split:
                self.fixed = self.free
                return 0
            for segment in segments:
                free, merged = [], []
                _merge(segment["blocks"], segment["address"], free, merged)
                self._note(segment["address"], -1, segment["total_size"], free, merged)
        return pending

    def _add_expandable(self, segments: Sequence[Mapping[str, Any]]) -> int:
        """Returns the pending bytes."""
        page = self._page
        pending = 0
        for segment in segments:
            base: int = segment["address"]
            total: int = segment["total_size"]
            if total % page:
                self.odd = True
            if segment["allocated_size"] == total:
                if self._grows:
                    self.ranges.append(_Range(base, total))
                continue
            blocks = segment["blocks"]
            free: list[Mapping[str, Any]] = []
            merged: list[Stretch] = []
            if segment["active_size"] != segment["allocated_size"]:
                pending += _merge(blocks, base, free, merged)
            else:
                free = [block for block in blocks if block["state"] == _INACTIVE]
            sizes = list(map(_SIZE, free))
            self.free += sizes
            largest = max(sizes, default=0)
            if largest > self.largest:
                self.largest = largest
            stretches = []
            if largest >= page:
                stretches = [
                    (block["address"] - base, size)
                    for block, size in zip(free, sizes, strict=True)
                    if size >= page
                ]
                self.cached += sum([_pages(offset, size, page) for offset, size in stretches])
            if merged:
                self.after += [size for _, size in merged]
                stretches = [stretch for stretch in stretches if not _within(stretch, merged)]
                stretches += merged
            self.releasable += sum([_pages(offset, size, page) for offset, size in stretches if size >= page])
            if self._grows:
                tail = 0
                for block in (blocks[0], blocks[-1]):  # what has unmapped addresses beside it
                    tail = block["size"] if block["state"] == _INACTIVE else 0
                    stretch = (block["address"] - base, tail)
                    if 0 < tail < page and not _within(stretch, merged):
                        stretches.append(stretch)
                self.ranges.append(_Range(base, total, stretches, tail))
            if self._split is not None:
                self._note(base, total if self._grows else -1, 0, free, merged)
        return pending

    def _note(
        self, base: int, end: int, whole: int, free: Sequence[Mapping[str, Any]], merged: Sequence[Stretch]
    ) -> None:
        """What a split limit makes count: which blocks can grow, those that reach the end, and which are
        there for sure; and those that no cudaFree gives back, for it gives back whole segments only."""
        kept = free
        if merged:
            stretches = [(block["address"] - base, block["size"]) for block in free]
            kept = [
                block for block, stretch in zip(free, stretches, strict=True) if not _within(stretch, merged)
            ]
            gone = [stretch for stretch in stretches if _within(stretch, merged)]
            self.perhaps += [FreeBlock(size, offset + size != end) for offset, size in (*merged, *gone)]
        sizes = list(map(_SIZE, kept))
        stuck = [size for size in (*map(_SIZE, free), *(size for _, size in merged)) if size != whole]
        self.stuck = max(self.stuck, *stuck, 0)
        if whole and self._split is not None:
            parts = [*((block["address"] - base, block["size"]) for block in free), *merged]
            offsets = [offset for offset, size in parts if self._split <= size != whole]
            self.cut = self.cut or bool(offsets)
            self.cut_first = self.cut_first or 0 in offsets
        if kept and kept[-1]["address"] - base + sizes[-1] == end:
            self.growing.append(sizes.pop())
        self.fixed += sizes

    @property
    def place(self) -> Place:
        return Place(
            self.stream,
            self.pool,
            self.kind,
            bool(self.expandable),
            self.reserved,
            self.allocated,
            self.active - self.allocated,
            self.free,
            self.after,
        )


def _merge(
    blocks: Sequence[Mapping[str, Any]], base: int, free: list[Mapping[str, Any]], merged: list[Stretch]
) -> int:
    """The pending bytes; finds the free blocks, and what becomes of pending ones with those beside them."""
    pending = waits = 0
    begin: int | None = None
    for block in blocks:
        state = block["state"]
        if state == _ALLOCATED or (state != _INACTIVE and state not in _PENDING):
            if waits and begin is not None:
                merged.append((begin - base, block["address"] - begin))
                pending += waits
                waits = 0
            begin = None
            continue
        if begin is None:
            begin = block["address"]
        if state == _INACTIVE:
            free.append(block)
        else:
            waits += block["size"]
    if waits and begin is not None:
        merged.append((begin - base, blocks[-1]["address"] + blocks[-1]["size"] - begin))
    return pending + waits


def _within(stretch: Stretch, merged: Sequence[Stretch]) -> bool:
    """Whether a free stretch goes into one of those, which are in order."""
    at = bisect_right(merged, stretch[0], key=_OFFSET)
    return at > 0 and stretch[0] < sum(merged[at - 1])


def _device_map(
    device: int,
    groups: Sequence[_Group],
    rules: Rules,
    settings: AllocatorSettings,
    limits: Limits,
    stream: int,
    live_pools: Collection[PoolOn],
    dropped_pools: Collection[PoolOn],
    *,
    broken: bool,
) -> DeviceMap:
    reserved = allocated = active = cached_least = cached_most = releasable_least = releasable_most = 0
    shared: list[_Group] = []
    private: list[_Group] = []
    private_idle = private_busy = 0
    told, whole = True, True
    for group in groups:
        reserved += group.reserved
        allocated += group.allocated
        active += group.active
        if group.pool == DEFAULT_POOL:
            shared.append(group)
            sure = perhaps = True
        else:
            private.append(group)
            perhaps = (device, group.pool) not in live_pools
            sure = (device, group.pool) in dropped_pools
            if not sure:
                idle = 0 if group.expandable else group.cached
                private_idle += idle
                private_busy += group.active if group.expandable else group.reserved - idle
        if perhaps:
            cached_most += group.cached
            releasable_most += group.releasable
        if sure:
            cached_least += group.cached
            releasable_least += group.releasable
        told = told and group.pool is not None and not (group.expandable is None and rules.expandable)
        whole = (
            whole
            and not group.odd
            and not (settings.pages_changed and group.expandable and group.kind == LARGE)
        )
    absent: dict[str, str] = {}

    why = None
    if broken or (limits.reserved is not None and limits.reserved != reserved):
        why = DAMAGED
    elif not told:
        why = RELEASE

    cached = releasable = headroom = None
    stuck = False
    blocks: dict[str, Between] | None = None
    if why is None:
        if not (settings.in_doubt and rules.max_split is not None):
            blocks = _free_blocks(shared, rules, stream, absent)
        if not whole:
            why = PAGE_SIZE
        elif settings.in_doubt and any(group.expandable for group in groups):  # in pages of an unknown size
            why = SETTINGS
        else:
            cached = Between(cached_least, cached_most)
            releasable = Between(releasable_least, releasable_most)
            if not cached.exact:
                absent["fragmentation"] = absent["split_free"] = PRIVATE_POOLS
            driver, fraction = limits.driver, limits.fraction
            if blocks is None or settings.in_doubt:
                absent["headroom"] = SETTINGS
            elif driver is None or fraction is None:
                absent["headroom"] = DRIVER if driver is None else FRACTION
            else:
                bounds = _Bounds.of(driver, fraction, rules, reserved, releasable)
                new = _NewMemory(rules, settings, groups, driver.total, limits.untouched)
                headroom, stuck = _headroom(groups, rules, bounds, blocks, stream, new, driver.total, absent)
    if why is not None:
        absent |= dict.fromkeys(("fragmentation", "split_free", "headroom"), why)
    if blocks is None:
        absent["free_block.largest"] = why or SETTINGS

    told = why not in (DAMAGED, RELEASE)
    return DeviceMap(
        device=device,
        places=tuple(group.place for group in groups),
        reserved=reserved,
        allocated=allocated,
        pending_free=active - allocated,
        private_reserved=sum(group.reserved for group in private) if told else None,
        private_idle=private_idle,
        private_busy=private_busy,
        other_streams_reserved=(
            sum(group.reserved for group in shared if group.stream != stream) if told else None
        ),
        cached=cached,
        releasable=releasable,
        free_block_largest=blocks,
        headroom=headroom,
        absent=absent,
        limits=limits,
        rules=rules,
        stuck=stuck,
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
            now = then = 0
            for group in groups:
                now = max(now, group.largest)
                then = max(then, group.largest, *group.after)
            found[kind] = Between(rules.largest_served(kind, now), rules.largest_served(kind, then))
        else:
            found[kind] = rules.served(
                kind,
                [size for group in groups for size in group.fixed],
                [size for group in groups for size in group.growing],
                [block for group in groups for block in group.perhaps],
            )
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
    total: int,
    absent: dict[str, str],
) -> tuple[Between, bool]:
    """And whether nothing is given back."""
    driver = new.least(bounds.free.least, bounds.asked.least)
    # With a split limit torch first gives back a block above it, even a part of a segment, which fails.
    # Without a block that is large enough it gives back all above it, the largest first.
    stuck = any(group.cut for group in groups) or (
        rules.max_split is not None
        and max((group.stuck for group in groups), default=0) >= max(driver, rules.max_split)
    )
    if stuck:
        driver = new.least(bounds.free_now, min(bounds.asked.least, bounds.asked_now))
    least = max(driver, *(block.least for block in blocks.values()))
    most = max(
        new.most(bounds.free.most, bounds.asked.most), least, *(block.most for block in blocks.values())
    )
    if any(group.cut_first for group in groups):
        most = max(most, total)
    # A MemPool made with use_on_oom serves what fails elsewhere; whether it was is in no snapshot.
    pools = [group for group in groups if group.stream == stream and group.pool[1]]
    spare = max((max(group.largest, *group.after, 0) for group in pools), default=0)
    if least < max(most, spare):
        if spare > most or not bounds.free.exact:
            absent["headroom"] = PRIVATE_POOLS
        elif stuck:
            absent["headroom"] = MAX_SPLIT
        elif "free_block.largest" in absent:
            absent["headroom"] = absent["free_block.largest"]
        elif new.most(bounds.free.most, bounds.asked.least) <= least:
            absent["headroom"] = FRACTION
        else:
            absent["headroom"] = UNMAPPED
    return Between(least, max(most, spare)), stuck


def _new_memory(rules: Rules, free: int, asked: int, span: int) -> int:
    """The largest request that gets new memory for sure, wherever it would be mapped, with so much free on
    the device, where so much may be asked for; an address range spans no more than ``span``."""
    if not rules.expandable:
        return rules.largest_asking(min(free, asked))
    upto = min(free - free % rules.page(LARGE), span)
    return rules.largest_asking(asked, rules.small_most, upto) or _small_new_memory(rules, free, asked)


def _small_new_memory(rules: Rules, free: int, asked: int) -> int:
    return rules.largest_asking(asked, upto=rules.small_most) if free >= rules.page(SMALL) else 0


class _NewMemory:
    """The largest request that gets new memory, cudaMalloc's or mapped pages, on one stream."""

    def __init__(
        self, rules: Rules, settings: AllocatorSettings, groups: Sequence[_Group], total: int, untouched: bool
    ) -> None:
        self._rules = rules
        self._page = page = rules.page(LARGE)
        self._spans = spans = address_range(settings, total, page)
        self._ranges = sorted(each for group in groups if group.kind == LARGE for each in group.ranges)
        self._gaps = _gaps(self._ranges, page, spans.least) if untouched and spans.exact else None

    def least(self, free: int, asked: int) -> int:
        """What is sure to succeed with so much free on the device, and if so much may be asked for."""
        # Wherever it is mapped, so much is enough; beside what is free already, less may be.
        sure = _new_memory(self._rules, free, asked, self._spans.least)
        if self._gaps is None or not self._rules.expandable:
            return sure
        # What no range has addresses for before the flush gets a new one, which may lie before the others.
        room = max((each.tail + self._spans.least - each.size for each in self._ranges), default=0)
        return max(sure, self._first_fit(self._gaps, free, asked, room))

    def most(self, free: int, asked: int) -> int:
        """What no larger request than this can exceed."""
        rules = self._rules
        if not rules.expandable:
            return rules.largest_asking(min(free, asked))
        span, pages = self._spans.most, free // self._page
        if self._gaps is not None:
            large = self._first_fit(self._gaps, free, asked, span)
        else:
            upto = min(pages * self._page + _beside(self._ranges, self._page), span)
            large = rules.largest_asking(asked, rules.small_most, upto) if pages else 0
        return large or _small_new_memory(rules, free, asked)

    def _first_fit(self, gaps: Sequence[tuple[int, int, int]], free: int, asked: int, room: int) -> int:
        """The largest large request, up to ``room``: it goes into the first gap with addresses enough, be
        there pages enough or not, else into a new range."""
        page = self._page
        pages = free // page
        best, reach = 0, self._rules.small_most
        for before, count, after in [*gaps, (0, self._spans.least // page, 0)]:
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


def _rest(whole: int, part: Between | None) -> Between | None:
    return None if part is None else Between(whole - part.most, whole - part.least)


def _exact(figure: Between | None) -> int | None:
    return figure.least if figure is not None and figure.exact else None
