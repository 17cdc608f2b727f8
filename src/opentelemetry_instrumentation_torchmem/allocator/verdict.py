# SPDX-License-Identifier: Apache-2.0
"""Why an allocation failed: pure arithmetic on what was held after the allocator's last resort.

Knows neither torch nor OpenTelemetry. The order of the verdicts is that of what can be done about them: what
a setting, a wait or the end of another user of the memory would have cured comes before what nothing cures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from .rules import LARGE, SMALL
from .snapshot import DEFAULT_POOL, Place, PoolId

MIB = 1 << 20

VERDICTS: Mapping[str, str] = {
    "fraction": "Over the fraction: the device had enough, the process's memory fraction did not allow it.",
    "pending_frees": "Pending frees: a block was freed that would have served the request, but a recorded "
    "stream was not seen to be done with it until the allocator had given up.",
    "changed_meanwhile": "Changed meanwhile: what was there a moment later would have served. Pending frees "
    "ended, another thread or process freed memory, the driver refused what it said was free, or the request "
    "named another stream than its thread's.",
    "private_pools": "Held by private pools: free, but in other pools than the request's: those of CUDA "
    "graphs and MemPools serve only what is made in them, and that gets nothing from elsewhere.",
    "another_stream": "Held by another stream: free in one block, which only the stream it was made on may "
    "use.",
    "fragmented": "Fragmented: enough free in all, in no block that was large enough.",
    "outside_pytorch": "Memory outside PyTorch: what others on the device use now, more than the least they "
    "were seen to use, would have been enough.",
    "full": "Full: less was free in all than was asked of the driver.",
    "refused": "Refused early by throw_on_cudamalloc_oom: neither was the driver asked nor anything flushed.",
    "unknown": "What was held could not be read.",
    "unexamined": "Counted alone: another was examined shortly before.",
}
"""``torch.memory.oom.verdict``: value -> meaning."""

REFUSED = "refused"
"""The verdict of no observer's: a request that failed tells it, and torch.memory.oom.rejections counts it."""


class FreeBlocks(NamedTuple):
    """Where the free bytes are that the allocator kept through its last resort, on one device."""

    own: int
    """On the failing thread's stream, in the pool of its requests: the default one, unless it is in one of
    its own."""
    largest: int
    """The largest block of these that may serve a request of that kind."""
    other_streams: int
    """On other streams, in that pool."""
    private_pools: int
    """In the pools of other CUDA graphs and MemPools."""
    pending: int
    """The largest block of its own that there will be when the pending frees have ended: only where nothing
    could be flushed, as during a graph's capture."""
    largest_elsewhere: int = 0
    """The largest block of other streams that might have served a request of that kind."""
    default_pool: int = 0
    """In the default pool, where the requests are in one of their own."""

    @property
    def elsewhere(self) -> int:
        """In pools that serve no such request."""
        return self.private_pools + self.default_pool


class Failure(NamedTuple):
    """What is known of one failed allocation. Bytes; None where it could not be read.

    Example:
        >>> verdict(Failure(asked=64 * MIB, free=10 * MIB, total=1000 * MIB, allowed=1000 * MIB,
        ...                 reserved=980 * MIB, blocks=FreeBlocks(90 * MIB, 30 * MIB, 0, 0, 0)))
        'fragmented'
    """

    asked: int
    """Of the driver: the request, rounded up to what a segment of its kind takes."""
    free: int
    """On the device, as the driver said at the failure."""
    total: int | None
    """The device's."""
    allowed: int | None
    """What the process may reserve: the total where no fraction is set."""
    reserved: int | None = None
    """After the allocator's own flush."""
    blocks: FreeBlocks | None = None
    free_now: int | None = None
    """On the device, when the rest was read."""
    pending_before: int = 0
    """Pending frees of the request's kind that were seen before."""
    freed_otherwise: int | None = None
    """Bytes of that kind that may have been freed since then with no stream to wait for, by anybody; None
    where the counters do not tell."""
    nobody_else: bool = False
    """Whether the program has no other thread: what came free meanwhile had waited for a stream."""
    external: int | None = None
    """Bytes that others used on the device, when it was read: the CUDA context, NCCL, other processes."""
    baseline: int | None = None
    """The least that others were ever seen to use on the device."""
    page: int = 20 * MIB
    """What is asked of the driver for requests of 1 to 10 MiB."""
    expandable: bool = False
    """Whether memory is mapped in such pages."""

    @property
    def needed(self) -> int:
        """What the driver must have for it to be sure to succeed: whole pages where it is mapped in pages."""
        if not self.expandable or kind_of(self.asked) == SMALL:
            return self.asked
        return -(-self.asked // self.page) * self.page

    @property
    def may_fit(self) -> bool:
        """Whether the largest free block is such that the request, which is not told, might fit into it."""
        least, most = sizes(self.asked, self.page)
        return self.blocks is not None and least <= self.blocks.largest < most


def verdict(failure: Failure) -> str:
    """The first of the explanations that the arithmetic bears out."""
    asked, needed = failure.asked, failure.needed
    free, reserved, blocks = failure.free, failure.reserved, failure.blocks
    if reserved is None:
        return "unknown"
    allowed = failure.allowed
    over = allowed is not None and allowed != failure.total and reserved + asked > allowed
    if over and needed <= free:
        return "fraction"
    _, most = sizes(asked, failure.page)  # of a block below that it is not known whether it would do
    if blocks is not None and blocks.largest >= most:
        freed = bool(failure.pending_before) or failure.freed_otherwise != 0
        only_pending = freed and (failure.nobody_else or failure.freed_otherwise == 0)
        return "pending_frees" if only_pending else "changed_meanwhile"
    if blocks is not None and blocks.pending >= most:
        return "pending_frees"
    if failure.free_now is not None and needed <= failure.free_now and not over:
        return "changed_meanwhile"
    if blocks is None:
        return "unknown"
    if blocks.elsewhere and blocks.elsewhere + free >= needed:
        return "private_pools"
    if blocks.largest_elsewhere >= most:
        return "another_stream"
    if blocks.own + blocks.other_streams + blocks.elsewhere + free >= asked:
        return "fragmented"
    external = failure.external
    grown = 0 if external is None or failure.baseline is None else external - failure.baseline
    if grown > 0 and grown + free >= needed:
        return "outside_pytorch"
    return "full"


def sizes(asked: int, page: int = 20 * MIB) -> tuple[int, int]:
    """The least and the most that a request can have been, rounded, for which this was asked of the driver.

    Example:
        >>> sizes(64 * MIB) == (62 * MIB + 512, 64 * MIB)
        True
    """
    if asked <= 2 * MIB:
        return 512, MIB
    return (MIB if asked == page else asked - 2 * MIB) + 512, asked


def kind_of(asked: int) -> str:
    """The pool of a request for which this was asked of the driver."""
    return SMALL if asked <= 2 * MIB else LARGE


def usable_below(asked: int, page: int, max_split: int | None, slack: int = 20 * MIB) -> int | None:
    """The size below which a free block may serve such a request; None: any size.

    With a finite ``max_split`` a smaller request may not take a block that large, and a larger one none
    that exceeds it by ``slack`` (``max_non_split_rounding_mb``).
    """
    if max_split is None:
        return None
    least, most = sizes(asked, page)
    return least + slack if least >= max_split else min(max_split, most + slack)


def free_blocks(
    places: Iterable[Place],
    stream: int,
    kind: str,
    *,
    pools: Collection[PoolId] = (DEFAULT_POOL,),
    below: int | None = None,
    expandable: bool = True,
) -> FreeBlocks:
    """Where the free bytes of a device are, by the map of a snapshot, for a request of a kind on a stream.

    ``pools`` are those that serve it. Blocks of expandable segments serve a request only while that mode is
    on.
    """
    own = other_streams = private_pools = default_pool = 0
    largest = pending = elsewhere = 0

    def fitting(sizes: Iterable[int]) -> int:
        return max((size for size in sizes if below is None or size < below), default=0)

    for place in places:
        free = sum(place.free)
        serves = place.kind == kind and (expandable or not place.expandable)
        if place.pool not in pools:
            if place.pool == DEFAULT_POOL:
                default_pool += free
            else:
                private_pools += free
        elif place.stream != stream:
            other_streams += free
            if serves:
                elsewhere = max(elsewhere, fitting(place.free))
        else:
            own += free
            if serves:
                largest = max(largest, fitting(place.free))
                pending = max(pending, fitting(place.after))
    return FreeBlocks(own, largest, other_streams, private_pools, pending, elsewhere, default_pool)
