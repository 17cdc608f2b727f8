# SPDX-License-Identifier: Apache-2.0
"""The advice: a table of rules, each of which looks at the evidence and says what to change, or nothing.

Pure arithmetic: no torch, no OpenTelemetry. A rule never advises what is on already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..allocator.settings import AllocatorSettings
from ..allocator.source import UNCACHED
from .evidence import MIB, Evidence

_MANY = 8
"""Distinct sizes that are many."""
_PAGES = (12 * MIB,)
"""Pages smaller than the default that torch takes: they must be larger than 10 MiB."""
_NEW_VARIABLE, _LARGE_SEGMENT = (2, 10), (2, 12)
"""The releases that read PYTORCH_ALLOC_CONF, and that take large_segment_size_mb."""
_DIVISIONS = (16, 8, 4, 2)
"""Roundings from the finest on; 1 wastes up to half of a block."""
_WASTE = 0.1
"""Of what is live, lost to rounding: less is what rounding is for."""
_FLUSHES = 50
"""Calls of empty_cache that are no longer a start's."""
_CALLS_SHARE = 0.02
"""Of the blocks handed out, those that the driver was asked for: less is cheap."""
_TIME_SHARE = 0.01
"""Of the time, spent in the driver: less is cheap."""


class Tier(IntEnum):
    """What is tried first, whatever its effect."""

    CHANGE = 0
    WINDOW = 1
    """What has to be done again and again, in planned windows."""
    LAST = 2
    """What can make things worse."""
    NOTHING_ELSE = 3
    """What no setting helps: told only where memory runs short and nothing else is to be said."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    code: str
    """A name for scripts: the rule's."""
    change: str
    """What to do."""
    why: str
    """With the figure that says so."""
    weight: float
    """The share of the device's memory, or of time, that it is about: 0 to 1."""
    figures: dict[str, int | float] = field(default_factory=dict[str, "int | float"])
    """Bytes, counts and shares by name."""
    tier: Tier = Tier.CHANGE
    answers: tuple[str, ...] = ()
    """Advice that would only say once more what this is about."""


def advise(evidence: Evidence) -> list[Advice]:
    """What to change, the most effective first; nothing where all is well."""
    found = _given([rule(evidence) for rule in RULES])
    answered = {code for advice in found for code in advice.answers}
    found = [advice for advice in found if advice.code not in answered]
    if any(advice.tier < Tier.NOTHING_ELSE for advice in found):
        found = [advice for advice in found if advice.tier < Tier.NOTHING_ELSE]
    return sorted(found, key=lambda advice: (advice.tier, -advice.weight))


def _given(found: Sequence[Advice | None]) -> list[Advice]:
    return [advice for advice in found if advice is not None]


def size(value: float) -> str:
    """Bytes, for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}" if scale > MIB else f"{value / scale:.0f} {unit}"
    return f"{value:.0f} B"


def _share(evidence: Evidence, value: float) -> float:
    return min(1.0, max(0.0, value) / evidence.limit) if evidence.limit else 0.0


def _of(evidence: Evidence, value: float) -> str:
    return f"{size(value)} of {size(evidence.limit)} ({_share(evidence, value):.0%})"


def _variable(evidence: Evidence) -> str:
    """The one that is set, else the newest that this release reads."""
    new = evidence.release is not None and evidence.release >= _NEW_VARIABLE
    return next(iter(evidence.variables), "PYTORCH_ALLOC_CONF" if new else "PYTORCH_CUDA_ALLOC_CONF")


# ---- settings that undo themselves ----


def _hidden_variable(evidence: Evidence) -> Advice | None:
    names = list(evidence.variables)
    if len(names) < 2:
        return None
    first, *others = names
    in_force = evidence.variables[first]
    lost = [
        option
        for name in others
        for option in _options(evidence.variables[name])
        if _name(option) not in {_name(each) for each in _options(in_force)}
    ]
    whole = AllocatorSettings.parse(",".join([*_options(in_force), *lost]), first)
    if whole.expandable_segments and whole.max_split_size is not None:  # together they do harm
        lost = [option for option in lost if _name(option) != "max_split_size_mb"]
    if not lost:
        return None
    merged = ",".join([*_options(in_force), *lost])
    wanted = AllocatorSettings.parse(",".join(lost), first)
    gains = (
        evidence.trapped if wanted.expandable_segments and not evidence.settings.expandable_segments else 0
    )
    return Advice(
        "hidden_variable",
        f"Say it all in one variable: {first}={merged}, and unset {', '.join(others)}.",
        f"{first} replaces {', '.join(others)} wholly: {','.join(lost)} is not in force.",
        max(_share(evidence, gains), 0.001),
        {"trapped": evidence.trapped},
        answers=("expandable_segments",) if wanted.expandable_segments else (),
    )


def _options(text: str) -> list[str]:
    """The options of a settings string; commas within brackets do not part them."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and parts[-1].count("[") > parts[-1].count("]"):
            parts[-1] += f",{part}"
        elif part.strip():
            parts.append(part.strip())
    return parts


def _name(option: str) -> str:
    return option.partition(":")[0].strip()


def _split_with_expandable(evidence: Evidence) -> Advice | None:
    settings = evidence.settings
    if not settings.expandable_segments or settings.max_split_size is None:
        return None
    idle = evidence.home.free
    return Advice(
        "split_with_expandable",
        f"Take max_split_size_mb out of {_variable(evidence)}: with expandable_segments:True it does harm.",
        "Together what is held can grow without bound (pytorch#123548): "
        f"{_of(evidence, idle)} are held and in no use, {size(evidence.map.allocated)} are in tensors.",
        max(_share(evidence, idle), 0.001),
        {"idle": idle, "allocated": evidence.map.allocated, "max_split_size": settings.max_split_size},
        answers=("compaction", "large_segment_size", "bucket_sizes"),
    )


def _max_split(evidence: Evidence) -> Advice | None:
    settings = evidence.settings
    if settings.max_split_size is None or settings.expandable_segments:
        return None
    idle = evidence.home.free
    unsplit = sum(
        block for place in evidence.home.places for block in place.free if block >= settings.max_split_size
    )
    if not evidence.matters(idle) or 2 * unsplit < idle:
        return None
    return Advice(
        "max_split",
        f"Take max_split_size_mb out of {_variable(evidence)}.",
        f"{_of(evidence, idle)} are held and in no use, {size(unsplit)} of it in blocks above the limit of "
        f"{size(settings.max_split_size)}, which are never split: only requests of nearly their size fit.",
        _share(evidence, idle),
        {"idle": idle, "unsplit": unsplit, "max_split_size": settings.max_split_size},
        answers=("roundup", "split_limit", "expandable_segments"),
    )


def _gc_threshold_inert(evidence: Evidence) -> Advice | None:
    threshold = evidence.settings.garbage_collection_threshold
    fraction = evidence.limits.fraction
    if not threshold or (fraction is not None and fraction < 1.0):
        return None
    if fraction is None and evidence.total is not None:
        return None  # this release does not tell the fraction
    return Advice(
        "gc_threshold_inert",
        "Set a memory fraction below 1, as torch.cuda.set_per_process_memory_fraction(0.95), or take "
        f"garbage_collection_threshold out of {_variable(evidence)}.",
        f"garbage_collection_threshold:{threshold:g} does nothing without a memory fraction below 1; "
        f"{_of(evidence, evidence.cached)} are cache that it was meant to give back.",
        max(_share(evidence, evidence.cached), 0.001),
        {"cached": evidence.cached, "threshold": threshold},
    )


def _refused_early(evidence: Evidence) -> Advice | None:
    rejections = evidence.activity.rejections if evidence.activity else None
    if not evidence.settings.throw_on_cudamalloc_oom or not rejections:
        return None
    idle = evidence.home.free
    return Advice(
        "refused_early",
        f"Take throw_on_cudamalloc_oom out of {_variable(evidence)}.",
        f"{rejections} requests were refused before the cache was flushed, while {_of(evidence, idle)} were "
        "held and in no use.",
        max(_share(evidence, idle), 0.001),
        {"rejections": rejections, "idle": idle},
    )


def _fraction(evidence: Evidence) -> Advice | None:
    fraction, room, driver = evidence.limits.fraction, evidence.room, evidence.limits.driver
    if fraction is None or fraction >= 1.0 or room is None or driver is None or not evidence.short:
        return None
    barred = driver.free - max(0, room)
    if not evidence.matters(barred):
        return None
    return Advice(
        "memory_fraction",
        f"Raise the memory fraction of {fraction:g} (torch.cuda.set_per_process_memory_fraction, "
        "per_process_memory_fraction).",
        f"Memory runs short although {_of(evidence, barred)} are free on the device that this process may "
        "not take.",
        _share(evidence, barred),
        {"barred": barred, "fraction": fraction},
    )


# ---- where free memory is ----


def _expandable_segments(evidence: Evidence) -> Advice | None:
    if evidence.settings.expandable_segments or evidence.expandable_blocked is not None:
        return None
    # where the cache had to be flushed, whole segments were free and too small to be of use
    gained = evidence.trapped + (evidence.cached if evidence.flushed else 0)
    if not evidence.matters(gained):
        return None
    why = f"{_of(evidence, evidence.trapped)} are free, but trapped in partly used segments"
    if evidence.flushed and evidence.cached:
        retries = evidence.activity.retries if evidence.activity else None
        why += (
            f"; {size(evidence.cached)} more are in whole segments, and memory ran short ({retries} retries)"
        )
    return Advice(
        "expandable_segments",
        f"Set {_variable(evidence)}={_with(evidence, 'expandable_segments:True')}.",
        why + ".",
        _share(evidence, gained),
        {"trapped": evidence.trapped, "cached": evidence.cached, "reserved": evidence.map.reserved},
    )


def _with(evidence: Evidence, option: str) -> str:
    """What is set now, with this option beside it or in place of what it says."""
    before = next(iter(evidence.variables.values()), evidence.settings.text)
    return ",".join([*(each for each in _options(before) if _name(each) != _name(option)), option])


def _other_streams(evidence: Evidence) -> Advice | None:
    streams: set[int] = set()
    free = reserved = 0
    for place in evidence.map.places:
        if place.pool == (0, 0) and place.stream != evidence.stream:
            streams.add(place.stream)
            free += sum(place.free)
            reserved += place.reserved
    if not evidence.matters(free):
        return None
    return Advice(
        "other_streams",
        "Allocate on one stream: make tensors before entering torch.cuda.stream(...), or run the work of the "
        "others on it. Memory that was freed on one stream serves no other.",
        f"{_of(evidence, free)} are free on {len(streams)} stream(s) beside the one that holds most.",
        _share(evidence, free),
        {"free": free, "reserved": reserved, "streams": len(streams)},
    )


def _graph_pools(evidence: Evidence) -> Advice | None:
    graphs = evidence.graph_pools or ()
    held = [reserved for pool, (reserved, _) in evidence.pools.items() if pool[0] or pool in graphs]
    if len(held) < 2 or not evidence.matters(sum(held) - max(held)):
        return None
    spared = sum(held) - max(held)
    return Advice(
        "graph_pools",
        "Capture the CUDA graphs into one pool: torch.cuda.graph(graph, pool=handle), with the same "
        "torch.cuda.graph_pool_handle() for all that never run at the same time; the largest first.",
        f"{len(held)} graphs have pools of their own with {_of(evidence, sum(held))}; the largest has "
        f"{size(max(held))}, and shared it could serve all.",
        _share(evidence, spared),
        {"pools": len(held), "reserved": sum(held), "spared": spared},
    )


def _idle_pools(evidence: Evidence) -> Advice | None:
    if evidence.graph_pools is None:  # what is free in a graph's pool is in use at each replay
        return None
    idle = [
        free for pool, (_, free) in evidence.pools.items() if not pool[0] and pool not in evidence.graph_pools
    ]
    if not evidence.matters(sum(idle)):
        return None
    return Advice(
        "idle_pools",
        "Drop the torch.cuda.MemPool objects that are not in use, or make what they are for smaller: what is "
        "free in them serves nobody else.",
        f"{_of(evidence, sum(idle))} are free within {len(idle)} memory pool(s).",
        _share(evidence, sum(idle)),
        {"free": sum(idle), "pools": len(idle)},
    )


def _pending_frees(evidence: Evidence) -> Advice | None:
    pending = evidence.map.pending_free
    if not evidence.matters(pending):
        return None
    return Advice(
        "pending_frees",
        "Free on the stream that made it instead of record_stream: have that stream wait for the other "
        "(stream.wait_stream) before the tensor goes.",
        f"{_of(evidence, pending)} were freed, but a recorded stream was not seen to be done with them: no "
        "request can use them until a later one looks.",
        _share(evidence, pending),
        {"pending": pending},
    )


def _rounding(evidence: Evidence) -> Advice | None:
    divisions = evidence.settings.divisions
    if divisions is None:
        return None
    lost = sum(block - asked for asked, block in evidence.live)
    if not evidence.matters(lost) or lost < _WASTE * sum(block for _, block in evidence.live):
        return None
    finest = _DIVISIONS[0]
    estimate = sum(_rounded(asked, finest) - asked for asked, _ in evidence.live)
    return Advice(
        "rounding",
        f"Set roundup_power2_divisions:{finest} in {_variable(evidence)}, or take it out.",
        f"{_of(evidence, lost)} are lost to roundup_power2_divisions "
        f"({', '.join(map(str, sorted(set(divisions))))}); an estimated {size(estimate)} with {finest}.",
        _share(evidence, lost - estimate),
        {"lost": lost, "estimate": estimate},
    )


def _rounded(asked: int, divisions: int) -> int:
    """As the allocator rounds a request with so many steps between two powers of two."""
    step = 512
    if divisions > 1 and asked > step * divisions:
        step = (1 << (asked.bit_length() - 1)) // divisions
    return -(-asked // step) * step


def _large_segment(evidence: Evidence) -> Advice | None:
    settings = evidence.settings
    if evidence.release is None or evidence.release < _LARGE_SEGMENT:  # another would refuse to start
        return None
    if not settings.expandable_segments or settings.max_split_size is not None:
        return None
    page = evidence.page
    smaller = [each for each in _PAGES if each < page]
    if not smaller:
        return None
    now, left = evidence.trapped_with(page), evidence.trapped_with(smaller[0])
    if not evidence.matters(now - left):
        return None
    return Advice(
        "large_segment_size",
        f"Set {_variable(evidence)}={_with(evidence, f'large_segment_size_mb:{smaller[0] // MIB}')}.",
        f"{_of(evidence, now)} are free in pieces that hold no whole page of {size(page)}; with pages of "
        f"{size(smaller[0])} an estimated {size(left)} would be.",
        _share(evidence, now - left),
        {"trapped": now, "estimate": left, "page": smaller[0]},
    )


# ---- requests that do not fit what was freed ----


def _roundup(evidence: Evidence) -> Advice | None:
    if evidence.settings.divisions is not None or evidence.settings.expandable_segments:
        return None
    idle = evidence.trapped + evidence.cached
    if evidence.expandable_blocked is None or not evidence.flushed or not evidence.matters(idle):
        return None
    distinct = len(set(evidence.sizes))
    if distinct < _MANY:
        return None
    for divisions in _DIVISIONS:
        rounded = [_rounded(each, divisions) for each in evidence.sizes]
        if 2 * len(set(rounded)) <= distinct:
            break
    else:
        return None
    waste = sum(rounded) / max(1, sum(evidence.sizes)) - 1
    cost = int(waste * evidence.map.allocated)
    if not evidence.matters(idle - cost):
        return None
    return Advice(
        "roundup",
        f"Set {_variable(evidence)}={_with(evidence, f'roundup_power2_divisions:{divisions}')}.",
        f"{_of(evidence, idle)} are free in blocks that later requests did not fit, of {distinct} sizes; "
        f"rounded they would be {len(set(rounded))}, for an estimated {waste:.0%} of waste. "
        f"(Expandable segments: {evidence.expandable_blocked}.)",
        _share(evidence, idle - cost),
        {"idle": idle, "sizes": distinct, "rounded_sizes": len(set(rounded)), "waste": round(waste, 4)},
    )


def _bucket_sizes(evidence: Evidence) -> Advice | None:
    if not evidence.settings.expandable_segments and evidence.expandable_blocked is None:
        return None  # they come first
    sizes = sorted(set(evidence.sizes))
    idle = evidence.home.free
    if len(sizes) < _MANY or not evidence.short or not evidence.matters(idle):
        return None
    buckets = sorted({1 << (each - 1).bit_length() for each in sizes})
    named = ", ".join(size(each) for each in buckets[-6:])
    return Advice(
        "bucket_sizes",
        f"Allocate the largest of these buffers once ({size(sizes[-1])}) and take parts of it, or pad what "
        f"is asked for to a few sizes ({named}).",
        f"Memory runs short while {_of(evidence, idle)} are free in pieces: {len(sizes)} sizes from "
        f"{size(sizes[0])} to {size(sizes[-1])} are seen.",
        0.9 * _share(evidence, idle),
        {"idle": idle, "sizes": len(sizes), "smallest": sizes[0], "largest": sizes[-1]},
    )


# ---- the driver ----


def _uncached(evidence: Evidence) -> Advice | None:
    if evidence.backend != UNCACHED:
        return None
    return Advice(
        "uncached",
        "Unset PYTORCH_NO_CUDA_MEMORY_CACHING.",
        "Nothing is cached: each tensor is a cudaMalloc and a cudaFree, which waits for the device.",
        1.0,
    )


def _empty_cache(evidence: Evidence) -> Advice | None:
    activity = evidence.activity
    if activity is None or not activity.flushes or activity.flushes < _FLUSHES:
        return None
    overhead = evidence.overhead
    asked, frees = activity.device_allocations or 0, activity.device_frees or 0
    share = asked / activity.allocations if activity.allocations else 0.0
    costly = share >= _CALLS_SHARE if overhead is None else overhead.share >= _TIME_SHARE
    if not costly or frees < activity.flushes:
        return None
    return Advice(
        "empty_cache",
        "Do not call torch.cuda.empty_cache() while serving: it gives back what the next request takes "
        "again, and waits for the device.",
        f"The cache was emptied {activity.flushes} times by hand; {asked} of {activity.allocations} blocks "
        f"({share:.0%}) had to be asked of the driver{_in_time(evidence)}.",
        overhead.share if overhead is not None else share,
        {"flushes": activity.flushes, "device_allocations": asked, "share_of_allocations": round(share, 4)}
        | _cost(evidence),
    )


def _retries(evidence: Evidence) -> Advice | None:
    activity, overhead = evidence.activity, evidence.overhead
    if activity is None or not activity.retries or overhead is None or overhead.share < _TIME_SHARE:
        return None
    return Advice(
        "retries",
        "Give it less to do at once (batch, context length, concurrency), or more memory: the cache is "
        "flushed for request after request.",
        f"{activity.retries} retries{_in_time(evidence)}.",
        overhead.share,
        {"retries": activity.retries} | _cost(evidence),
        tier=Tier.WINDOW,
    )


def _in_time(evidence: Evidence) -> str:
    overhead, times = evidence.overhead, evidence.times
    if overhead is None or times is None:
        return ""
    return (
        f"; trips to the driver take an estimated {overhead.share:.1%} of the time "
        f"({overhead.calls_per_second:.3g} calls a second, by {times.origin})"
    )


def _cost(evidence: Evidence) -> dict[str, int | float]:
    overhead = evidence.overhead
    if overhead is None:
        return {}
    return {"overhead": round(overhead.share, 4), "calls_per_second": round(overhead.calls_per_second, 2)}


# ---- what no setting helps ----


def _compaction(evidence: Evidence) -> Advice | None:
    settings = evidence.settings
    if not settings.expandable_segments and evidence.expandable_blocked is None:
        return None
    if not evidence.matters(evidence.trapped):
        return None
    return Advice(
        "compaction",
        "Compact in a planned window: MemoryGuard(compact=Compaction(model)), or restart.",
        f"{_of(evidence, evidence.trapped)} are free between live blocks, and no setting moves these.",
        _share(evidence, evidence.trapped),
        {"trapped": evidence.trapped},
        tier=Tier.WINDOW,
    )


def _split_limit(evidence: Evidence) -> Advice | None:
    settings = evidence.settings
    if evidence.expandable_blocked is None or settings.expandable_segments or not evidence.flushed:
        return None
    if settings.max_split_size is not None or not evidence.matters(evidence.trapped):
        return None
    largest = max((asked for asked, _ in evidence.live), default=0)
    return Advice(
        "split_limit",
        f"As a last resort, and only measured: {_variable(evidence)}="
        f"{_with(evidence, f'max_split_size_mb:{max(64, -(-largest // MIB))}')}. It keeps small "
        "requests out of large blocks, and can make things far worse.",
        f"{_of(evidence, evidence.trapped)} are trapped in partly used segments. (Expandable segments: "
        f"{evidence.expandable_blocked}.)",
        _share(evidence, evidence.trapped),
        {"trapped": evidence.trapped},
        tier=Tier.LAST,
    )


def _others(evidence: Evidence) -> Advice | None:
    external = evidence.external
    if external is None or not evidence.short or external < 0.2 * evidence.limit:
        return None
    return Advice(
        "outside_pytorch",
        "Look who else is on the device (nvidia-smi): other processes, NCCL, other libraries.",
        f"Memory runs short while {_of(evidence, external)} are in use that this process's allocator does "
        "not hold.",
        _share(evidence, external),
        {"external": external},
    )


def _full(evidence: Evidence) -> Advice | None:
    if not evidence.short:
        return None
    return Advice(
        "full",
        "Give it less to do at once, or more memory: quantise, shorten the cache, shard.",
        f"Memory runs short, and {_of(evidence, evidence.map.allocated)} are in tensors: there is nothing to "
        "be won by settings.",
        _share(evidence, evidence.map.allocated),
        {"allocated": evidence.map.allocated},
        tier=Tier.NOTHING_ELSE,
    )


RULES: tuple[Callable[[Evidence], Advice | None], ...] = (
    _uncached,
    _hidden_variable,
    _split_with_expandable,
    _max_split,
    _gc_threshold_inert,
    _refused_early,
    _fraction,
    _expandable_segments,
    _other_streams,
    _graph_pools,
    _idle_pools,
    _pending_frees,
    _rounding,
    _large_segment,
    _roundup,
    _bucket_sizes,
    _empty_cache,
    _retries,
    _others,
    _compaction,
    _split_limit,
    _full,
)
"""In the order in which they are told where their weights are equal."""
