# SPDX-License-Identifier: Apache-2.0
"""The table: every attribute and metric of this package is one row here.

Instruments, docs/METRICS.md and docs/registry/ are made from the rows; to add a signal, add a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .allocator.snapshot import ABSENT
from .allocator.verdict import VERDICTS
from .guard.machine import STATES, TRANSITIONS
from .guard.steps import STEPS as GUARD_STEPS
from .telemetry import REASONS, STEPS


@dataclass(frozen=True, slots=True)
class Attribute:
    """A row for an attribute key."""

    name: str
    about: str
    type: str = "string"
    """``string``, ``int``, ``double`` or ``boolean``."""
    members: Mapping[str, str] | None = None
    """For an enumeration: value -> meaning."""
    examples: tuple[str | int | float | tuple[str, ...], ...] = ()
    required: str = "required"
    """The requirement level on the signals that carry it; or in words, when it is there."""


class Kind(Enum):
    """What a metric is: the instrument that OpenTelemetry keeps for it."""

    COUNTER = "counter"
    UP_DOWN_COUNTER = "updowncounter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Per(Enum):
    """What a metric is told for, hence what its row reads."""

    DEVICE = "device"
    """Each used device: a ``DeviceState``."""
    HOST = "host"
    """The process's pinned host memory: a ``HostReading``."""
    PROCESS = "process"
    """The process's allocator: a ``Collection``."""
    PACKAGE = "package"
    """This package's own work: ``OwnTelemetry``."""
    OOM = "oom"
    """Each used device's out of memory errors: their number by verdict."""
    TARGET = "target"
    """Each target's requests in flight: their number."""
    GUARD = "guard"
    """The guard, where the user has made one: its ``Figures``."""


Figure = int | float | Mapping[str, int] | Mapping[str, float] | None
"""A value, a value for each member of the row's ``by``, or None: cannot be known here, so not told."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row for a metric."""

    name: str
    kind: Kind
    unit: str
    about: str
    of: Callable[[Any], Figure]
    """The figure, from what ``per`` reads."""
    per: Per = Per.DEVICE
    by: Attribute | None = None
    also: tuple[tuple[Attribute, Callable[[Any], str | int | float | bool | None]], ...] = ()
    """Attributes beside the value, each with where it comes from; None is left out."""

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """Every attribute that a point of this metric may carry."""
        by = () if self.by is None else (self.by,)
        return (*CARRIED.get(self.per, ()), *by, *(attribute for attribute, _ in self.also))


@dataclass(frozen=True, slots=True)
class RequestMetric:
    """A row for a metric that is recorded once for a request, inside its span: exemplars carry the trace."""

    name: str
    kind: Kind
    unit: str
    about: str
    attributes: tuple[Attribute, ...]
    boundaries: tuple[float, ...] | None = None
    """Of a histogram's buckets, in its unit."""


@dataclass(frozen=True, slots=True)
class Span:
    """A row for a span."""

    name: str
    about: str
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """A row for an event: on the active span, and as a log record."""

    name: str
    about: str
    attributes: tuple[Attribute, ...]


DEVICE = Attribute("torch.device", "The device as torch names it.", examples=("cuda:0",))
HARDWARE_ID = Attribute(
    "hw.id",
    "The device as NVML and DCGM print it: joins to dcgm-exporter and the hardware collectors.",
    examples=("GPU-3ad7d3b1-7a2b-4c64-8b2f-1b8b0a1d3f10",),
    required="when torch can tell it: from 2.4 on, not on ROCm",
)
POOL = Attribute(
    "torch.memory.pool",
    "The allocator's pool: small serves requests up to 1 MiB.",
    members={"small": "Requests up to 1 MiB.", "large": "Requests above 1 MiB."},
    required="when the backend tells its pools apart: native does, cudaMallocAsync does not",
)
STATE = Attribute(
    "torch.memory.state",
    "Where a byte of the device is. The states are disjoint and sum to the limit.",
    members={
        "allocated": "In tensors.",
        "pending_free": "Freed, but a recorded stream has not been seen to be done with it.",
        "split_free": "Free, but trapped: in partly used segments, or in the pools of live CUDA graphs and "
        "MemPools.",
        "cached_free": "Wholly free segments: empty_cache, or the allocator's own retry, returns them.",
        "cached": "split_free and cached_free together, where a reading cannot tell them apart.",
        "external": "In use on the device and not held by this process's allocator: the CUDA context, "
        "NCCL, other libraries, other processes.",
        "free": "Free for anybody.",
    },
)
STEP = Attribute(
    "torch.memory.telemetry.step",
    "A part of this package's work.",
    members=STEPS,
)
ABSENCE = Attribute(
    "torch.memory.telemetry.absence",
    "Why a figure of the last snapshot is absent, or less than it might be.",
    members=ABSENT,
)
REASON = Attribute("torch.memory.telemetry.reason", "Why something was not done.", members=REASONS)

TORCH_VERSION = Attribute("torch.version", "The release of torch.", examples=("2.15.0+cu132",))
BACKEND = Attribute(
    "torch.memory.backend",
    "The allocator in use; it decides which figures there are.",
    members={
        "native": "torch's caching allocator: every figure.",
        "cudaMallocAsync": "CUDA's own pool allocator: allocated, reserved and active alone.",
        "pluggable": "An allocator of the user's own: it tells nothing.",
        "uncached": "PYTORCH_NO_CUDA_MEMORY_CACHING is set: nothing is kept, so nothing is told.",
    },
)
EXPANDABLE = Attribute("torch.memory.expandable_segments", "Whether expandable segments are on.", "boolean")
MAX_SPLIT = Attribute(
    "torch.memory.max_split_size",
    "Bytes above which a block is never split.",
    "int",
    examples=(67108864,),
    required="when the option is set",
)
ROUNDUP = Attribute(
    "torch.memory.roundup_power2_divisions",
    "The rounding option as written.",
    examples=("8", "[256:1,512:2]"),
    required="when the option is set",
)
GC_THRESHOLD = Attribute(
    "torch.memory.garbage_collection_threshold",
    "The garbage collection option: inert unless a memory fraction is set.",
    "double",
    examples=(0.8,),
    required="when the option is set",
)

OPERATION = Attribute(
    "torch.operation",
    "What the call does: the target's operation or the name the user gave.",
    examples=("generate", "forward", "step", "rerank"),
)
FUNCTION = Attribute(
    "code.function.name",
    "The target: the function that is measured, fully qualified.",
    examples=("transformers.GenerationMixin.generate",),
    required="when the target is a function: a `with track(...)` block is none",
)
ERROR_TYPE = Attribute(
    "error.type",
    "The class of the exception that ended the call.",
    examples=("OutOfMemoryError",),
    required="when the call failed",
)
_OWN_OPERATION, _OWN_FUNCTION = (
    replace(OPERATION, required="on a span of the call's own: not on one that is enriched"),
    replace(FUNCTION, required="on a span of the call's own, when the target is a function: a block is none"),
)
_ON_A_DEVICE = "when the process has reserved memory on a device"
_COUNTED = "when the backend counts, and the user's code did not reset the counters meanwhile"
DEVICES = Attribute(
    "torch.device",
    "The device as torch names it; on a span that touched several, all of them with commas between.",
    examples=("cuda:0", "cuda:0,cuda:1"),
    required=_ON_A_DEVICE,
)
EXCLUSIVE = Attribute(
    "torch.memory.exclusive",
    "Whether no other request was open during this one: what happened, it did.",
    "boolean",
    required=_ON_A_DEVICE,
)
CONCURRENT = Attribute(
    "torch.memory.requests.concurrent",
    "The most requests that were open at one time during this one, itself included.",
    "int",
    examples=(1, 4),
    required=_ON_A_DEVICE,
)


def _bytes(name: str, about: str, required: str = _ON_A_DEVICE) -> Attribute:
    return Attribute(name, about, "int", examples=(20971520,), required=required)


def _count(name: str, about: str) -> Attribute:
    return Attribute(name, about, "int", examples=(1,), required=_COUNTED)


RESERVED_BEFORE = _bytes("torch.memory.reserved.before", "Bytes held from the driver when the call began.")
RESERVED_DELTA = _bytes("torch.memory.reserved.delta", "How they changed during the call.")
ALLOCATED_BEFORE = _bytes("torch.memory.allocated.before", "Bytes in tensors when the call began.")
ALLOCATED_DELTA = _bytes(
    "torch.memory.allocated.delta", "How they changed during the call.", "when the call was exclusive"
)
PEAK_GROWTH = _bytes(
    "torch.memory.peak_growth",
    "How far the process's peak of allocated bytes rose during the call.",
    "when the call was exclusive and a new peak happened in it",
)
RETRIES = _count("torch.memory.allocation.retries", "The allocator's retries on the device during the call.")
OOMS = _count("torch.memory.ooms", "Out of memory errors on the device during the call.")
REJECTIONS = Attribute(
    "torch.memory.oom.rejections",
    "Requests of memory refused early on the device during the call, also those that the code caught.",
    "int",
    examples=(1,),
    required="when there were some",
)
DEVICE_ALLOCATIONS = _count(
    "torch.memory.device.allocations", "Requests of memory to the driver during the call."
)
DEVICE_SYNCS = _count("torch.memory.device.syncs", "Waits for all streams during the call.")
TURNOVER = _count("torch.memory.turnover", "Bytes handed out on the device during the call.")
FRAGMENTATION = Attribute(
    "torch.memory.fragmentation",
    "The trapped share of what is held when the call ended.",
    "double",
    examples=(0.12,),
    required="when it can be known: not under expandable segments, nor while a CUDA graph or a MemPool "
    "lives, whose free memory a reading does not count",
)
RESERVED_BY_DEVICE = Attribute(
    "torch.memory.reserved.delta_by_device",
    "The change of reserved on each device, `device=bytes`.",
    "string[]",
    examples=(("cuda:0=20971520", "cuda:1=0"),),
    required="when several devices were touched and differ",
)
ALLOCATED_BY_DEVICE = Attribute(
    "torch.memory.allocated.delta_by_device",
    "The change of allocated on each device, `device=bytes`.",
    "string[]",
    examples=(("cuda:0=20971520", "cuda:1=0"),),
    required="when several devices were touched and differ, and the call was exclusive",
)
SHAPES = Attribute(
    "torch.input.shapes",
    "The shapes of the first tensors among the arguments: never a value.",
    "string[]",
    examples=(("1x2048",),),
    required="when there are tensors among the arguments",
)
DTYPES = Attribute(
    "torch.input.dtypes",
    "Their types, in the same order.",
    "string[]",
    examples=(("int64",),),
    required="when there are tensors among the arguments",
)

OOM_VERDICT = Attribute(
    "torch.memory.oom.verdict", "Why an allocation failed, by arithmetic on what was held.", members=VERDICTS
)
_EXAMINED = "when it was examined and the allocator could be read"
OOM_SUMMARY = Attribute(
    "torch.memory.oom.summary",
    "The verdict in words, with its figures.",
    examples=(
        "cuda:0 is out of memory: 512.0 MiB asked of the driver, 96.0 MiB free of 16.00 GiB. Fragmented: "
        "enough free in all, in no block that was large enough (1.25 GiB held and free, the largest block of "
        "use 300.0 MiB).",
    ),
)


def _oom(name: str, about: str, required: str = _EXAMINED) -> Attribute:
    return Attribute(f"torch.memory.oom.{name}", about, "int", examples=(536870912,), required=required)


OOM_ASKED = _oom(
    "asked",
    "Bytes asked of the driver: the request, rounded up to what a segment of its kind takes.",
    "when it was examined and the driver was asked",
)
OOM_DEVICE_FREE = _oom(
    "device_free", "Bytes free on the device, as the driver said.", "when the driver was asked"
)
OOM_DEVICE_TOTAL = _oom("device_total", "The device's total.")
OOM_ALLOWED = _oom("allowed", "Bytes that the process may hold.", "when a memory fraction is set")
OOM_RESERVED = _oom("reserved", "Bytes held from the driver after the allocator's own flush.")
OOM_OWN_FREE = _oom(
    "own_free", "Bytes held and free that the failing thread's stream may use, in the pool of its requests."
)
OOM_OWN_LARGEST = _oom("own_largest", "The largest block of these that serves a request of that kind.")
OOM_OTHER_STREAMS = _oom("other_streams_free", "Bytes held and free that only other streams may use.")
OOM_PRIVATE_POOLS = _oom(
    "private_pools_free",
    "Bytes held and free in the pools of CUDA graphs and MemPools, but in the request's own.",
)
OOM_PENDING_BEFORE = _oom(
    "pending_before",
    "Freed bytes of the request's kind that were seen shortly before to wait for a recorded stream.",
    "when there were any",
)
OOM_EXTERNAL_GROWTH = _oom(
    "external_growth",
    "Bytes that others use on the device, more than the least that was ever seen.",
    "when it was seen before",
)
OOM_HEADROOM = _oom(
    "headroom",
    "The largest request of the failing thread's stream, in the default pool, that would have succeeded when "
    "it was examined.",
    "when it was examined, the request was in the default pool and the allocator had flushed its cache",
)
OOM_FRAGMENTATION = Attribute(
    "torch.memory.oom.fragmentation",
    "The trapped share of what is held after the flush.",
    "double",
    examples=(0.3,),
    required=_EXAMINED,
)
OOM_LEDGER = Attribute(
    "torch.memory.oom.ledger",
    "Where every byte of the device was after the flush, `state=bytes`: see torch.memory.usage.",
    "string[]",
    examples=(("allocated=8589934592", "split_free=1342177280"),),
    required=_EXAMINED,
)
OOM_READINGS = Attribute(
    "torch.memory.oom.readings",
    "The readings of the last minutes, from before the flush, in brief: the oldest first, ages in seconds.",
    "string[]",
    examples=(("age=12.3 allocated=8589934592 pending_free=0 reserved=10737418240 retries=3",),),
    required="when there are any",
)
OOM_REQUESTS = Attribute(
    "torch.memory.oom.requests",
    "The measured requests in flight, those first that grew most: never what they were about.",
    "string[]",
    examples=(("operation=generate age=1.250 reserved_growth=536870912",),),
    required="when there are any",
)
OOM_IN_FLIGHT = Attribute(
    "torch.memory.oom.requests_in_flight",
    "How many there are.",
    "int",
    examples=(3,),
    required="when there are any",
)
OOM_SETTINGS = Attribute(
    "torch.memory.oom.settings",
    "The allocator's settings in force, as written.",
    examples=("expandable_segments:True",),
    required="when there are any",
)
OOM_CAPTURING = Attribute(
    "torch.memory.oom.capturing",
    "Whether a CUDA graph was being captured, on any thread. Where the allocator could not flush its cache "
    "for that, the summary says so.",
    "boolean",
    required=_EXAMINED,
)
OOM_MORE = Attribute(
    "torch.memory.oom.more",
    "Others on the device since the last one that was examined.",
    "int",
    examples=(812,),
    required="when there were any",
)
OOM_DUMP = Attribute(
    "torch.memory.oom.dump",
    "The file that a snapshot was written to.",
    examples=("/var/lib/app/oom/torchmem-oom-20250101T120000Z-4711-9f86d081884c7d65.pickle",),
    required="when `oom_dump_dir` is set and there was room",
)

GUARD_STATE = Attribute("torch.memory.guard.state", "Where the guard is, or has come to.", members=STATES)
GUARD_PREVIOUS_STATE = Attribute("torch.memory.guard.previous_state", "Where it came from.", members=STATES)
GUARD_TRANSITION = Attribute(
    "torch.memory.guard.transition", "What led from one state to another.", members=TRANSITIONS
)
GUARD_STEP = Attribute(
    "torch.memory.guard.step", "A part of a cycle, told apart by what it won.", members=GUARD_STEPS
)
GUARD_REASON = Attribute(
    "torch.memory.guard.reason",
    "Why, in words, with the figures.",
    examples=("cuda:0: headroom of 180 MiB is below the need of 512 MiB",),
)
GUARD_STEERS = Attribute(
    "torch.memory.guard.steers",
    "Whether readiness steers the traffic. Where workers share a listening socket, or all are sick, it does "
    "not: the server stays ready, and arrivals wait at the gate.",
    "boolean",
)
GUARD_IN_FLIGHT = Attribute(
    "torch.memory.guard.requests",
    "The requests that the guard's middleware counts in flight.",
    "int",
    examples=(3,),
)
GUARD_OUTCOME = Attribute(
    "torch.memory.guard.outcome", "How the cycle has ended: its last transition.", members=TRANSITIONS
)
_TAKEN = "when the step was taken and could be measured"
GUARD_HEADROOM_WON = Attribute(
    "torch.memory.guard.headroom_by_step",
    "By how many bytes each step changed headroom, summed over devices, `step=bytes`.",
    "string[]",
    examples=(("drain=268435456", "clear=0", "compaction=1073741824"),),
    required=_TAKEN,
)
GUARD_RELEASED = Attribute(
    "torch.memory.guard.released_by_step",
    "How many bytes held from the driver each step gave back, summed over devices, `step=bytes`.",
    "string[]",
    examples=(("drain=0", "clear=1610612736", "compaction=0"),),
    required=_TAKEN,
)
GUARD_SECONDS = Attribute(
    "torch.memory.guard.seconds_by_step",
    "How long each step took, `step=seconds`.",
    "string[]",
    examples=(("drain=31.204", "clear=0.557"),),
    required=_TAKEN,
)
GUARD_REFUSED = Attribute(
    "torch.memory.guard.compaction_refused",
    "Why nothing was compacted.",
    examples=("a captured graph holds addresses",),
    required="when a compaction was asked for and refused",
)

CARRIED: Mapping[Per, tuple[Attribute, ...]] = {
    Per.DEVICE: (DEVICE, HARDWARE_ID),
    Per.OOM: (DEVICE, HARDWARE_ID),
    Per.TARGET: (OPERATION, FUNCTION),
}
"""The attributes that every point of a kind of metric carries."""


def _total(name: str) -> Callable[[Any], Figure]:
    """A counter's row reads the monotonic total, not the figure that the user's reset makes fall."""
    return lambda d: d.totals.get(name)


def _pooled(family: str) -> Callable[[Any], Figure]:
    return lambda d: d.reading.by_pool(family)


METRICS: tuple[Metric, ...] = (
    # the device
    Metric("torch.memory.usage", Kind.UP_DOWN_COUNTER, "By",
           "The ledger: every byte of the device in one state; the states sum to torch.memory.limit.",
           lambda d: d.ledger, by=STATE),
    Metric("torch.memory.limit", Kind.UP_DOWN_COUNTER, "By", "The device's total memory.", lambda d: d.limit),
    # what the allocator holds
    Metric("torch.memory.allocated", Kind.UP_DOWN_COUNTER, "By",
           "Bytes in tensors, rounded as the allocator rounds; falls when the free is asked for.",
           _pooled("allocated_bytes"), by=POOL),
    Metric("torch.memory.reserved", Kind.UP_DOWN_COUNTER, "By",
           "Bytes the allocator holds from the driver.", _pooled("reserved_bytes"), by=POOL),
    Metric("torch.memory.active", Kind.UP_DOWN_COUNTER, "By",
           "Bytes in tensors or freed with a recorded stream still pending.",
           _pooled("active_bytes"), by=POOL),
    Metric("torch.memory.requested", Kind.UP_DOWN_COUNTER, "By",
           "Bytes asked for, before rounding, of what is active.", _pooled("requested_bytes"), by=POOL),
    Metric("torch.memory.inactive_split", Kind.UP_DOWN_COUNTER, "By",
           "Free bytes trapped in partly used segments. Absent under expandable segments.",
           _pooled("inactive_split_bytes"), by=POOL),
    Metric("torch.memory.allocated_peak", Kind.GAUGE, "By",
           "The most bytes in tensors since the start or the user's last reset of the peaks.",
           lambda d: d.reading.allocated_peak),
    Metric("torch.memory.reserved_peak", Kind.GAUGE, "By",
           "The most bytes held since the start or the user's last reset of the peaks.",
           lambda d: d.reading.reserved_peak),
    Metric("torch.memory.fragmentation", Kind.GAUGE, "1",
           "The trapped share of what is held: split_free / reserved; under expandable segments, and where "
           "CUDA graphs' pools or MemPools hold free memory, from the last snapshot. Absent while nothing is "
           "reserved.",
           lambda d: d.fragmentation),
    Metric("torch.memory.slack", Kind.GAUGE, "1",
           "The unused share of what is held: 1 - active / reserved. Valid in every mode; cache is in it. "
           "Absent while nothing is reserved.",
           lambda d: d.reading.slack),
    Metric("torch.memory.rounding", Kind.UP_DOWN_COUNTER, "By",
           "Bytes lost to rounding: active - requested.", lambda d: d.reading.rounding),
    Metric("torch.memory.segments", Kind.UP_DOWN_COUNTER, "{segment}",
           "Segments held from the driver. Absent under expandable segments.", _pooled("segment"), by=POOL),
    Metric("torch.memory.blocks", Kind.UP_DOWN_COUNTER, "{block}",
           "Blocks in use or freed with a recorded stream still pending.", _pooled("active"), by=POOL),
    # what a snapshot tells
    Metric("torch.memory.headroom", Kind.GAUGE, "By",
           "The largest single request on the default stream and pool that is sure to succeed, the "
           "allocator's own flush allowed: never above the truth. What others take meanwhile is not in it. "
           "From the last snapshot, torch.memory.snapshot.age old, and never more than this cycle's reading "
           "leaves: between two snapshots it may be too small, and is too large only where it stands on a "
           "free block that has been used or given back since, while as much is free elsewhere.",
           lambda d: d.headroom),
    Metric("torch.memory.free_block.largest", Kind.GAUGE, "By",
           "The largest request on the default stream and pool that is served without asking the driver: as "
           "of the last snapshot, and never more than this cycle's reading shows in no use.",
           lambda d: d.free_block_largest, by=POOL),
    Metric("torch.memory.private_pool.reserved", Kind.UP_DOWN_COUNTER, "By",
           "Bytes held by the pools of CUDA graphs and by MemPools.",
           lambda d: d.map and d.map.private_reserved),
    Metric("torch.memory.snapshot.age", Kind.GAUGE, "s",
           "How old the last snapshot is. This cycle's figures of free blocks come from it; after 300 s they "
           "are absent, and this is told on.",
           lambda d: d.map_age),
    # what happened
    Metric("torch.memory.allocation.retries", Kind.COUNTER, "{retry}",
           "Times the allocator freed all its cache and asked the driver again.", _total("retries")),
    Metric("torch.memory.ooms", Kind.COUNTER, "{error}", "Out of memory errors raised.", _total("ooms")),
    Metric("torch.memory.oom.verdicts", Kind.COUNTER, "{error}",
           "Out of memory errors by what explains them; those `refused` are in torch.memory.oom.rejections. "
           "Absent where the allocator has no observers.",
           lambda counts: counts, per=Per.OOM, by=OOM_VERDICT),
    Metric("torch.memory.oom.rejections", Kind.COUNTER, "{error}",
           "Requests refused before the driver was asked. Absent unless throw_on_cudamalloc_oom is set.",
           _total("oom_rejections")),
    Metric("torch.memory.device.allocations", Kind.COUNTER, "{allocation}",
           "Successful requests of memory to the driver: each costs time and may synchronise.",
           _total("device_allocations")),
    Metric("torch.memory.device.frees", Kind.COUNTER, "{free}",
           "Memory given back to the driver: each synchronises.", _total("device_frees")),
    Metric("torch.memory.device.syncs", Kind.COUNTER, "{sync}",
           "Waits for all streams: retries, empty_cache, and entries to torch.cuda.graph.",
           _total("device_syncs")),
    Metric("torch.memory.allocations", Kind.COUNTER, "{allocation}",
           "Blocks handed out, from the cache or not.", _total("allocations")),
    Metric("torch.memory.turnover", Kind.COUNTER, "By", "Bytes handed out.", _total("turnover")),
    Metric("torch.memory.reading.age", Kind.GAUGE, "s",
           "How old the reading is that this cycle's points of the device come from.", lambda d: d.age),
    # requests
    Metric("torch.memory.requests.active", Kind.UP_DOWN_COUNTER, "{request}",
           "Requests in flight.", lambda count: count, per=Per.TARGET),
    # the host
    Metric("torch.memory.host.allocated", Kind.UP_DOWN_COUNTER, "By",
           "Pinned host memory in tensors.", lambda h: h.allocated, per=Per.HOST),
    Metric("torch.memory.host.reserved", Kind.UP_DOWN_COUNTER, "By",
           "Pinned host memory held by torch, in use or kept for later.", lambda h: h.reserved, per=Per.HOST),
    # the allocator itself
    Metric("torch.memory.allocator.info", Kind.GAUGE, "",
           "Always 1; its attributes are the allocator's release, backend and settings in force.",
           lambda _: 1, per=Per.PROCESS,
           also=(
               (TORCH_VERSION, lambda c: c.torch_version),
               (BACKEND, lambda c: c.backend),
               (EXPANDABLE, lambda c: c.settings.expandable_segments),
               (MAX_SPLIT, lambda c: c.settings.max_split_size),
               (ROUNDUP, lambda c: c.settings.roundup_power2_divisions),
               (GC_THRESHOLD, lambda c: c.settings.garbage_collection_threshold),
           )),
    # this package
    Metric("torch.memory.telemetry.duration", Kind.COUNTER, "s",
           "Time that this package spent reading; its rate is the share of one core it costs.",
           lambda t: t.seconds, per=Per.PACKAGE, by=STEP),
    Metric("torch.memory.telemetry.absent", Kind.GAUGE, "{figure}",
           "Figures of snapshots that are absent, or less than they might be, by why.",
           lambda d: d.map and dict(Counter(d.map.absent.values())), by=ABSENCE),
    Metric("torch.memory.telemetry.skipped", Kind.COUNTER, "{skip}",
           "What this package chose not to do, or could not.",
           lambda t: t.skipped, per=Per.PACKAGE, by=REASON),
)  # fmt: skip

GUARD_METRICS: tuple[Metric, ...] = (
    Metric("torch.memory.guard.status", Kind.UP_DOWN_COUNTER, "{guard}",
           "1 for the state that the guard is in, 0 for the others: summed over processes, how many are in "
           "each.", lambda g: g.status, per=Per.GUARD, by=GUARD_STATE),
    Metric("torch.memory.guard.transitions", Kind.COUNTER, "{transition}",
           "What the guard did.", lambda g: g.transitions, per=Per.GUARD, by=GUARD_TRANSITION),
    Metric("torch.memory.guard.headroom_won", Kind.COUNTER, "By",
           "By how much headroom rose in each step, summed over devices; a fall is not taken off.",
           lambda g: g.headroom_won, per=Per.GUARD, by=GUARD_STEP),
    Metric("torch.memory.guard.released", Kind.COUNTER, "By",
           "Bytes held from the driver that each step gave back, summed over devices.",
           lambda g: g.released, per=Per.GUARD, by=GUARD_STEP),
    Metric("torch.memory.guard.duration", Kind.COUNTER, "s",
           "Time spent in each step; that of clear and compaction is what arrivals had to wait for.",
           lambda g: g.seconds, per=Per.GUARD, by=GUARD_STEP),
    Metric("torch.memory.guard.held", Kind.COUNTER, "{request}",
           "Arrivals that waited at the closed gate.", lambda g: g.held, per=Per.GUARD),
    Metric("torch.memory.guard.in_flight", Kind.UP_DOWN_COUNTER, "{request}",
           "Requests that the guard counts in flight.", lambda g: g.in_flight, per=Per.GUARD),
    Metric("torch.memory.guard.need", Kind.GAUGE, "By",
           "The need that headroom is compared with. Absent while it is not known, and under a policy that "
           "has none.", lambda g: g.needs, per=Per.GUARD, by=DEVICE),
)  # fmt: skip

_SIZES = (0.0, *(float(2**power) for power in range(20, 37)))
"""0, then 1 MiB to 64 GiB in powers of two."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

REQUEST_DURATION = RequestMetric(
    "torch.memory.request.duration", Kind.HISTOGRAM, "s",
    "How long requests took.", (OPERATION, FUNCTION, EXCLUSIVE, ERROR_TYPE), _SECONDS,
)  # fmt: skip
REQUEST_RESERVED_GROWTH = RequestMetric(
    "torch.memory.request.reserved_growth", Kind.HISTOGRAM, "By",
    "How far reserved grew during a request, 0 where it did not. A sum is exact over the exclusive ones.",
    (OPERATION, FUNCTION, EXCLUSIVE), _SIZES,
)  # fmt: skip
REQUEST_PEAK_GROWTH = RequestMetric(
    "torch.memory.request.peak_growth", Kind.HISTOGRAM, "By",
    "How far the peak of allocated bytes rose during an exclusive request, 0 where it did not.",
    (OPERATION, FUNCTION, EXCLUSIVE), _SIZES,
)  # fmt: skip
REQUEST_RETRIES = RequestMetric(
    "torch.memory.request.retries", Kind.COUNTER, "{retry}",
    "Retries inside requests' windows: requests that overlap each count the same retry.",
    (OPERATION, FUNCTION),
)  # fmt: skip
REQUEST_METRICS = (REQUEST_DURATION, REQUEST_RESERVED_GROWTH, REQUEST_PEAK_GROWTH, REQUEST_RETRIES)

REQUEST_SPAN = Span(
    "torch.request",
    "One call of a target: INTERNAL, named `{torch.operation} {class}` for a method, `{torch.operation} "
    "{function}` for a function, without what would be there twice. In the mode `enrich` the attributes, but "
    "`torch.operation` and `code.function.name`, go on the current span, and several calls under it add up.",
    (_OWN_OPERATION, _OWN_FUNCTION, DEVICES, RESERVED_BEFORE, RESERVED_DELTA, RESERVED_BY_DEVICE,
     ALLOCATED_BEFORE, ALLOCATED_DELTA, ALLOCATED_BY_DEVICE, PEAK_GROWTH, RETRIES, OOMS, REJECTIONS,
     DEVICE_ALLOCATIONS, DEVICE_SYNCS, TURNOVER, FRAGMENTATION, CONCURRENT, EXCLUSIVE, SHAPES, DTYPES,
     ERROR_TYPE),
)  # fmt: skip
GUARD_SPAN = Span(
    "torch.memory.guard",
    "One cycle of the guard, from being sick for long enough to serving again or to wanting a restart: "
    "INTERNAL, with an event for each transition.",
    (GUARD_REASON, GUARD_STEERS, GUARD_OUTCOME, GUARD_HEADROOM_WON, GUARD_RELEASED, GUARD_SECONDS,
     GUARD_REFUSED),
)  # fmt: skip
SPANS = (REQUEST_SPAN, GUARD_SPAN)

OOM_EVENT = Event(
    "torch.memory.oom.evidence",
    "Memory ran out on a device: an event on the active span and a log record of severity WARN. Of a "
    "device's errors one in 10 seconds is examined at most; the rest is counted, and told on its spans as "
    "`unexamined`.",
    (DEVICE, HARDWARE_ID, OOM_VERDICT, OOM_SUMMARY, OOM_ASKED, OOM_DEVICE_FREE, OOM_DEVICE_TOTAL, OOM_ALLOWED,
     OOM_RESERVED, OOM_OWN_FREE, OOM_OWN_LARGEST, OOM_OTHER_STREAMS, OOM_PRIVATE_POOLS, OOM_PENDING_BEFORE,
     OOM_EXTERNAL_GROWTH, OOM_HEADROOM, OOM_FRAGMENTATION, OOM_LEDGER, OOM_READINGS, OOM_IN_FLIGHT,
     OOM_REQUESTS, OOM_SETTINGS, OOM_CAPTURING, OOM_MORE, OOM_DUMP),
)  # fmt: skip
GUARD_EVENT = Event(
    "torch.memory.guard.transition",
    "The guard has gone from one state to another: an event on the cycle's span and a log record of severity "
    "INFO, or WARN where something was given up or a restart is wanted.",
    (GUARD_TRANSITION, GUARD_PREVIOUS_STATE, GUARD_STATE, GUARD_REASON, GUARD_STEERS, GUARD_IN_FLIGHT),
)  # fmt: skip
EVENTS = (OOM_EVENT, GUARD_EVENT)
