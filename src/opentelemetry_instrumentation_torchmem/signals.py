# SPDX-License-Identifier: Apache-2.0
"""The table: every attribute and metric of this package is one row here.

Instruments, docs/METRICS.md and docs/registry/ are made from the rows; to add a signal, add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

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
    examples: tuple[str | int | float, ...] = ()
    required: str = "required"
    """The requirement level on the signals that carry it; or in words, when it is there."""


class Kind(Enum):
    """What a metric is: the instrument that OpenTelemetry keeps for it."""

    COUNTER = "counter"
    UP_DOWN_COUNTER = "updowncounter"
    GAUGE = "gauge"


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
        device = (DEVICE, HARDWARE_ID) if self.per is Per.DEVICE else ()
        by = () if self.by is None else (self.by,)
        return (*device, *by, *(attribute for attribute, _ in self.also))


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
        "split_free": "Free, but trapped in partly used segments.",
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
EXPANDABLE = Attribute(
    "torch.memory.expandable_segments", "Whether expandable segments are on.", "boolean", examples=("true",)
)
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
           "The trapped share of what is held: split_free / reserved. Absent under expandable segments "
           "and while nothing is reserved.",
           lambda d: d.reading.fragmentation),
    Metric("torch.memory.slack", Kind.GAUGE, "1",
           "The unused share of what is held: 1 - active / reserved. Valid in every mode; cache is in it.",
           lambda d: d.reading.slack),
    Metric("torch.memory.rounding", Kind.UP_DOWN_COUNTER, "By",
           "Bytes lost to rounding: active - requested.", lambda d: d.reading.rounding),
    Metric("torch.memory.segments", Kind.UP_DOWN_COUNTER, "{segment}",
           "Segments held from the driver. Absent under expandable segments.", _pooled("segment"), by=POOL),
    Metric("torch.memory.blocks", Kind.UP_DOWN_COUNTER, "{block}",
           "Blocks in use or freed with a recorded stream still pending.", _pooled("active"), by=POOL),
    # what happened
    Metric("torch.memory.allocation.retries", Kind.COUNTER, "{retry}",
           "Times the allocator freed all its cache and asked the driver again.", _total("retries")),
    Metric("torch.memory.ooms", Kind.COUNTER, "{error}", "Out of memory errors raised.", _total("ooms")),
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
    Metric("torch.memory.telemetry.skipped", Kind.COUNTER, "{skip}",
           "What this package chose not to do, or could not.",
           lambda t: t.skipped, per=Per.PACKAGE, by=REASON),
)  # fmt: skip
