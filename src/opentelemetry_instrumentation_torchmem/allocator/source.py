# SPDX-License-Identifier: Apache-2.0
"""Where readings come from: torch's allocator in this process, its backend and release probed once.

Nothing here imports torch, makes a context or initialises CUDA: the gate is ``torch.cuda.is_initialized()``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from time import monotonic
from typing import Any

from .reading import POOLS, AllocatorReading, DriverMemory, HostReading
from .rules import SMALL_SEGMENT
from .settings import AllocatorSettings, settings_in_force

NATIVE, ASYNC, PLUGGABLE, UNCACHED = "native", "cudaMallocAsync", "pluggable", "uncached"

_SEGMENT_FAMILIES = ("inactive_split", "inactive_split_bytes", "segment")
"""Kept for cudaMalloc segments only: 0 under expandable segments, whatever is free (pytorch#159564)."""
_ASYNC_FAMILIES = ("allocated_bytes", "active_bytes", "reserved_bytes")
"""All that cudaMallocAsync keeps; every other figure of it is 0 for ever."""


def initialised_torch() -> Any | None:
    """The torch module once its CUDA is initialised in this process, else None.

    False in a forked child that inherited an initialised CUDA: what the allocator says there is
    the parent's stale state, or nothing ever, if the fork caught its mutex held.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return sys.modules["torch"] if is_initialized is not None and is_initialized() else None


@dataclass(frozen=True, slots=True)
class Device:
    """One device, by the names that join it to other telemetry."""

    index: int
    name: str
    """``cuda:0``"""
    hardware_id: str | None
    """``GPU-<uuid>`` or ``MIG-<uuid>`` as NVML and DCGM print it; None where torch cannot tell."""


class Source:
    """The door to torch's statistics. Made once CUDA is initialised, on the module that
    ``initialised_torch`` gives; whoever reads asks that, or ``is_alive``, first, each time."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.is_alive: Callable[[], bool] = torch.cuda.is_initialized
        """False in a forked child, as ``initialised_torch`` says."""
        self.is_forked: Callable[[], bool] = getattr(
            torch._C, "_cuda_isInBadFork", lambda: not torch.cuda.is_initialized()
        )
        """The same, the other way round, in a tenth of the time."""
        self.version = str(torch.__version__)
        self.backend = _backend(torch)
        self._host_statistics: Callable[[], Any] | None = getattr(torch._C, "_cuda_hostMemoryStats", None)
        self.has_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext
        """Whether this process may have used a device: without a context nothing is held there. 0.1 µs."""
        self._count: int = torch.cuda.device_count()
        self._snapshot = _snapshot_call(torch)
        self._used: set[int] = set()
        self._devices: dict[int, Device] = {}
        self._expandable = False
        self._counts_rejections = False
        self.raw_statistics: Callable[[int], dict[str, Any]] | None = None
        """What ``statistics`` would give, without a look at it: as long as `is_mapped` says no of it. For the
        path of every request."""
        self.settings()

    @cached_property
    def _statistics(self) -> Callable[[int], dict[str, Any]]:
        """Found at the first reading, not before: to find it reads."""
        # cudaMallocAsync's statistics make a context where there is none
        safe = next((index for index in range(self._count) if self.has_context(index)), 0)
        return _statistics_call(self._torch, safe)

    def used_devices(self, look: bool = True) -> list[int]:
        """Devices this process has ever reserved memory on, or tried to in vain, or has a context on where
        the backend keeps no statistics. Without ``look`` those known by now: nothing is read."""
        if look:
            self._used.update(
                index for index in range(self._count) if index not in self._used and self._is_used(index)
            )
        return sorted(self._used)

    def by_context(self) -> tuple[list[int], list[int]]:
        """The devices that have a context, and those that do not."""
        sides: tuple[list[int], list[int]] = [], []
        for index in range(self._count):
            sides[not self.has_context(index)].append(index)
        return sides

    def read(self, index: int) -> AllocatorReading:
        """One call of the allocator for one device. Holds the interpreter while it waits for the allocator's
        mutex."""
        return AllocatorReading(index, monotonic(), self.statistics(index))

    def holds_as_much(self, reading: AllocatorReading) -> bool:
        """Whether nothing was taken from the driver or given back since a reading: what the driver has said
        meanwhile is of the same moment."""
        held = reading.statistics.get("reserved_bytes")
        return held is not None and held == self.statistics(reading.device).get("reserved_bytes")

    def statistics(self, index: int) -> dict[str, Any]:
        """A reading without the time. Figures that this backend, mode or release cannot give are left out."""
        if self.backend == NATIVE:
            statistics = self._statistics(index)
            if self._expandable or is_mapped(statistics):
                self._expandable = True  # for good: what was once mapped may still be there
                self.raw_statistics = None
                for family in _SEGMENT_FAMILIES:
                    statistics.pop(family, None)
            elif "num_device_alloc" in statistics:
                self.raw_statistics = self._statistics
            return statistics
        if self.backend == ASYNC:
            given = self._statistics(index)
            return {
                family: {"all": {of: given[family]["all"][of] for of in ("current", "peak")}}
                for family in _ASYNC_FAMILIES
            }
        return {}

    def snapshot(self) -> dict[str, Any]:
        """The segments and blocks of every device, with the settings, as torch's own snapshots have them but
        without the traces of the user's memory history. Native alone; holds the interpreter throughout."""
        collects = gc.isenabled()
        gc.disable()  # the many new dicts would set it off over and over: a pause four times as long
        try:
            snapshot = self._snapshot()
        finally:
            if collects:
                gc.enable()
        if not self._expandable and any(segment.get("is_expandable") for segment in snapshot["segments"]):
            self._expandable = True  # before 2.4 the statistics cannot tell it of every state
        return snapshot

    def empty_cache(self) -> None:
        """Give the driver back what is wholly free, on every device. Releases the interpreter; allocations
        wait for it, and so would a reading, with the interpreter in hand."""
        self._torch.cuda.empty_cache()

    def memory_fraction(self, index: int) -> float | None:
        """The share of the device that this process may reserve, 1 where none is set; None where torch cannot
        tell."""
        fraction = getattr(self._torch.cuda, "get_per_process_memory_fraction", None)
        return None if fraction is None else float(fraction(index))

    def current_stream(self, index: int) -> int:
        """The stream of the calling thread on a device, as a snapshot's segments name theirs."""
        return self._torch.cuda.current_stream(index).cuda_stream

    def is_capturing(self, index: int) -> bool:
        """Whether the calling thread's stream on a device is being captured into a graph."""
        cuda = self._torch.cuda
        asked = getattr(cuda.current_stream(index), "is_capturing", None)
        if asked is not None:
            return bool(asked())
        return cuda.current_device() == index and bool(cuda.is_current_stream_capturing())

    def driver_memory(self, index: int) -> DriverMemory:
        """The whole device's free and total; releases the interpreter, takes no allocator mutex.

        Only for a used device: elsewhere the call would make a context.
        """
        free, total = self._torch.cuda.mem_get_info(index)
        return DriverMemory(free, total)

    def host(self) -> HostReading | None:
        """Pinned host memory; None before torch 2.7."""
        if self._host_statistics is None:
            return None
        given = self._host_statistics()
        # 2.7 had allocated and reserved; later releases call them active and allocated.
        for in_use, held in (("active_bytes", "allocated_bytes"), ("allocated_bytes", "reserved_bytes")):
            if in_use in given and held in given:
                return HostReading(given[in_use]["current"], given[held]["current"])
        return None

    def settings(self) -> AllocatorSettings:
        """The settings in force now; once expandable segments are on, the readings after know it."""
        settings = settings_in_force(self._torch)
        self._expandable = self._expandable or settings.expandable_segments
        if self._expandable:
            self.raw_statistics = None
        if settings.throw_on_cudamalloc_oom and not self._counts_rejections:
            self._counts_rejections = True
            # the accelerator's own call has no num_oom_rejections, which stays 0 without the option
            call = getattr(self._torch._C, "_cuda_memoryStats", None)
            if call is not None and self.backend == NATIVE:
                self._statistics = call
                self.raw_statistics = None
        return settings

    def device(self, index: int) -> Device:
        """The names of a used device."""
        known = self._devices.get(index)
        if known is None:
            known = self._devices[index] = Device(index, f"cuda:{index}", _hardware_id(self._torch, index))
        return known

    def _is_used(self, index: int) -> bool:
        if not self.has_context(index):  # 0.1 µs, where the statistics are 7
            return False
        if self.backend != NATIVE:
            return True
        statistics = self._statistics(index)
        reserved = statistics["reserved_bytes"]["all"]
        return bool(reserved["peak"] or reserved["allocated"] or statistics["num_ooms"])


_UNCACHING = frozenset({"PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"})


def _backend(torch: Any) -> str:
    backend = str(torch.cuda.get_allocator_backend())
    if backend == NATIVE and not _UNCACHING.isdisjoint(os.environ):
        # whether "0" turns caching off depends on the release: newer ones can be asked
        enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
        if enabled is None or not enabled():
            return UNCACHED
    return backend


def _statistics_call(torch: Any, index: int) -> Callable[[int], dict[str, Any]]:
    """The cheapest call of this release that gives the nested statistics.

    From 2.13 on ``memory_stats`` keeps an entry for every private pool that ever lived: after 1,000
    dead pools it takes 1.8 ms. The accelerator's own call leaves those out.
    """
    for name in ("_accelerator_getDeviceStats", "_cuda_memoryStats"):
        call = getattr(torch._C, name, None)
        if call is not None and _is_whole(call, index):
            return call
    return torch.cuda.memory_stats_as_nested_dict


def _snapshot_call(torch: Any) -> Callable[[], dict[str, Any]]:
    """From 2.11 on the traces of the user's memory history can be left out: with a long one they take most of
    the time. Before, torch's public call makes them too, and leaves the settings out with them."""
    public = getattr(torch.cuda, "memory_snapshot", None)
    raw = getattr(torch._C, "_cuda_memorySnapshot", None)
    if raw is not None and public is not None and "include_traces" in signature(public).parameters:
        return lambda: raw((0, 0, False))
    whole = getattr(getattr(torch.cuda, "memory", None), "_snapshot", None)
    if whole is not None:
        return whole
    return lambda: {"segments": torch.cuda.memory_snapshot()}


def tracing_call(torch: Any) -> Callable[[], bool]:
    """Whether ``torch.jit.trace`` runs the calling code: asked at every request."""
    return getattr(torch._C, "_is_tracing", None) or torch.jit.is_tracing


def when_initialised(torch: Any, act: Callable[[], None]) -> None:
    """Act once CUDA is initialised in this process, at once if it is. It cannot be taken back, and what
    raises in there would fail the initialisation."""
    torch.cuda._lazy_call(act)


def attach_oom_observer(torch: Any, observer: Callable[[int, int, int, int], None]) -> None:
    """Have the allocator call ``observer(device, asked, allowed, free)`` at each out of memory error, for the
    life of the process, on the thread whose allocation failed, before its exception is raised.

    Only once CUDA is initialised.

    Raises:
        RuntimeError: the backend has no observers, or this torch would not survive one.
        AttributeError: this build of torch has none.
    """
    # before 2.4, which also brought that name, the first device gets the observer and the others one that
    # fails: the user would see "RuntimeError: bad_function_call" for an out of memory error there
    if torch.cuda.device_count() > 1 and not hasattr(torch, "OutOfMemoryError"):
        raise RuntimeError("before torch 2.4 an observer breaks the errors of every device but the first")
    torch._C._cuda_attach_out_of_memory_observer(observer)


def is_mapped(statistics: dict[str, Any]) -> bool:
    """Whether some memory was mapped, which no cudaMalloc segment holds: expandable segments are in use.

    Before torch 2.4 it is seen of a pool all of which is mapped, and of small segments, which have one size.
    """
    segments, allocations = statistics["segment"], statistics.get("num_device_alloc")
    if allocations is not None:  # both count since the user's last reset
        return allocations > segments["all"]["allocated"]
    reserved = {pool: statistics["reserved_bytes"][pool]["current"] for pool in POOLS.values()}
    return reserved["small_pool"] > segments["small_pool"]["current"] * SMALL_SEGMENT or any(
        held and not segments[pool]["current"] for pool, held in reserved.items()
    )


def _is_whole(call: Callable[[int], Any], index: int) -> bool:
    try:
        given = call(index)
    except RuntimeError:
        return False
    return "reserved_bytes" in given and "num_alloc_retries" in given


def _hardware_id(torch: Any, index: int) -> str | None:
    """NVML's and DCGM's name of the device, from its CUDA uuid (torch 2.4 or later, not on ROCm)."""
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is None or torch.version.cuda is None:
        return None
    kind = "MIG" if " MIG " in f" {properties.name} " else "GPU"
    return f"{kind}-{uuid}"
