# SPDX-License-Identifier: Apache-2.0
"""All storages of some modules out, the cache emptied, all of them back.

Nothing leaves the device before all of it is in host memory, and no host copy goes before its storage is
back: whatever fails in between, each byte is in one place or the other.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import Any

from ..allocator.pools import living
from ..allocator.rules import Rules
from ..allocator.snapshot import Limits, analyse
from ..allocator.source import NATIVE, Source, initialised_torch
from ..guard.steps import CompactionOutcome
from ..package import NAME
from .apart import apart
from .copies import Copier
from .host import HostMemory, host_memory
from .kept import REGISTER, Kept
from .storages import Found, Home, RefusedError, locate, storages

_logger = logging.getLogger(NAME)
HOST_RESERVE = 256 << 20
"""Host memory that is left to others, in bytes."""
_STEP = 512

UNSEEN = (
    "consumers of the memory that torch does not know of: DLPack (CuPy, JAX), another process by CUDA IPC, "
    "addresses registered with NCCL or kept by an extension or by a graph that torch did not capture",
)
"""What a compaction cannot see, and may have broken."""


@dataclass(frozen=True, slots=True)
class Compacted(CompactionOutcome):
    """What came of one compaction, in full. Bytes."""

    reason: str | None = None
    """Of a refusal: one of ``REFUSALS``."""
    storages: int = 0
    """How many were moved."""
    seconds: float = 0.0
    headroom_before: int | None = None
    """On the devices concerned, in sum; None where it cannot be told."""
    headroom_after: int | None = None
    left: int | None = None
    """Live on these devices and not among what was given: it stayed where it was."""

    def bring_back(self) -> Compacted:
        """Try again to bring back all that is missing in this process."""
        return Compaction().bring_back()


@dataclass(slots=True)
class _Work:
    """What one run knows."""

    torch: Any
    source: Source
    devices: Sequence[int] = ()
    before: int | None = None
    left: int | None = None
    moved: int = 0
    storages: int = 0
    errors: list[BaseException] = field(default_factory=list[BaseException])


class Compaction:
    """Moves the memory of modules and tensors closer together, so that what was trapped between is free.

    Tensors, their views, ties and gradients stay the objects that they are, with their values and strides;
    only their addresses change. While it runs **nothing may touch them**: what is out has no memory. It
    refuses, before anything is moved, what it would break (``REFUSALS``). One runs at a time in a process.

    What cannot come back stays in host memory, and belongs to the process: this object need not be kept,
    and ``bring_back`` of any other brings it back too. Calling it raises nothing but what interrupts it, as
    Ctrl-C does, and that once the memory is back, or is told as missing.

    Example:
        >>> guard = MemoryGuard(compact=Compaction(model, {"cache": cache}))
    """

    def __init__(
        self,
        *things: object,
        host: Callable[[], HostMemory | None] = host_memory,
        host_reserve: int = HOST_RESERVE,
    ) -> None:
        """``things``: modules, tensors, and lists, tuples and dicts of them; looked at anew each time.

        ``host`` tells how much host memory there is, of which ``host_reserve`` bytes are left to others.
        """
        self._things = things
        self._host = host
        self._reserve = host_reserve

    @property
    def missing(self) -> int:
        """Bytes of this process that are in host memory alone: what was free on the device is gone."""
        return REGISTER.missing

    def __call__(self) -> Compacted:
        """Compact now; what is missing comes back first. It takes the time of two copies of all of it."""
        return self._run(self._compact)

    def bring_back(self) -> Compacted:
        """Try again to bring back all that is missing in this process, as when its memory is free again."""
        return self._run(self._bring_back)

    def _run(self, act: Callable[[_Work], None]) -> Compacted:
        began = perf_counter()
        try:
            work = _begin()
            if not apart(lambda: self._move(act, work), REGISTER.alone):
                return Compacted(refused=str(RefusedError("busy")), reason="busy")
            return self._outcome(work, perf_counter() - began)
        except RefusedError as error:
            return _refusal(error)
        except Exception as error:  # a fault of this package's, before or after anything was moved
            return _refusal(RefusedError("failed", _in_brief(error)))
        except BaseException:
            if self.missing:
                _logger.warning("torchmem: after an interrupted compaction: %s", _missing(self.missing))
            raise

    def _move(self, act: Callable[[_Work], None], work: _Work) -> None:
        for step in (act, self._bring_back):  # what could not come back before the others may fit now
            try:
                with work.torch.no_grad():
                    step(work)
            except BaseException as error:  # noqa: PERF203 - nobody but this thread's caller is to see it
                work.errors.append(error)

    def _compact(self, work: _Work) -> None:
        if REGISTER.copies:
            self._bring_back(work)
            if REGISTER.copies:
                raise RefusedError("busy")
            work.moved = work.storages = 0
        torch = work.torch
        _check_graphs(torch)
        found = locate(storages(self._things, torch), work.source.snapshot()["segments"])
        if not found:
            raise RefusedError("nothing")
        self._check_host(sum(each.size for each in found))
        work.devices = sorted({each.home.device for each in found})
        for device in work.devices:
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what keeps it from being emptied is found before anything is moved
        work.before = _headroom(work)
        allocated = sum(work.source.read(device).allocated or 0 for device in work.devices)
        work.left = allocated - sum(each.block for each in found)
        copies = _copied_out(found, torch)
        REGISTER.copies = copies  # from here on nothing raises that leaves a byte nowhere
        for kept in copies:
            kept.out = True
            kept.found.storage.resize_(0)
        self._bring_back(work)

    def _check_host(self, size: int) -> None:
        there = self._host()
        if there is None:
            raise RefusedError("host_memory", "how much there is cannot be told here")
        if size + self._reserve > there.available:
            raise RefusedError(
                "host_memory",
                f"{size:,} bytes and {self._reserve:,} to be left, {there.available:,} available by "
                f"{there.origin}",
            )

    def _bring_back(self, work: _Work) -> None:
        REGISTER.copies = [kept for kept in REGISTER.copies if kept.out]
        if not REGISTER.copies:
            return
        work.devices = work.devices or sorted({kept.found.home.device for kept in REGISTER.copies})
        work.torch.cuda.empty_cache()  # if it fails, what the allocator hands out may be no memory
        copier = Copier(work.torch)
        for home, some in groupby(sorted(REGISTER.copies, key=_order), key=_home):
            with _at(home, work.torch):
                self._bring_home(list(some), copier, work)

    def _bring_home(self, waiting: Sequence[Kept], copier: Copier, work: _Work) -> None:
        """Those of one place, the largest first: at first those that fill a segment of their own."""
        rules = Rules.of(work.source.settings())
        filling = [kept for kept in waiting if rules.asked(_rounded(kept)) == _rounded(kept)]
        others = [kept for kept in waiting if all(kept is not each for each in filling)]
        for some in (filling, others):
            if some is others:
                _make_room(others, rules, work)
            for kept in some:
                try:
                    if kept.found.storage.nbytes() < kept.found.size:
                        kept.found.storage.resize_(kept.found.size)
                    copier.to_device(kept.host, kept.found.storage)
                except Exception as error:  # noqa: PERF203 - it stays kept
                    work.errors.append(error)
                else:
                    REGISTER.drop(kept)
                    work.moved += kept.found.size
                    work.storages += 1

    def _outcome(self, work: _Work, seconds: float) -> Compacted:
        for error in work.errors:
            if isinstance(error, RefusedError):
                return _refusal(error)
        error = _in_brief(work.errors[-1]) if work.errors else None
        if error is not None:
            _logger.warning("torchmem: in a compaction: %s", error)
        if error is not None and not work.moved and not self.missing:
            return _refusal(RefusedError("failed", error))
        after = None
        if not self.missing:
            try:
                after = _headroom(work)
            except Exception as failed:  # it is moved all the same
                _logger.warning("torchmem: after a compaction: %s", _in_brief(failed))
        return Compacted(
            moved=work.moved,
            won=None if work.before is None or after is None else after - work.before,
            missing=f"{_missing(self.missing)}: {error}" if self.missing else None,
            unseen=UNSEEN,
            storages=work.storages,
            seconds=seconds,
            headroom_before=work.before,
            headroom_after=after,
            left=work.left,
        )


def _begin() -> _Work:
    torch = initialised_torch()
    if torch is None:
        raise RefusedError("not_initialised")
    source = Source(torch)
    if source.backend != NATIVE:
        raise RefusedError("backend", source.backend)
    return _Work(torch, source)


def _in_brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200].partition('. ')[0]}"


def _refusal(error: RefusedError) -> Compacted:
    missing = REGISTER.missing
    told = _missing(missing) if missing else None
    return Compacted(refused=str(error), reason=error.reason, missing=told)


def _missing(size: int) -> str:
    return f"{size:,} bytes are in host memory alone"


def _check_graphs(torch: Any) -> None:
    """Refuse while CUDA graphs are alive, captured or being captured."""
    if living(torch.cuda.CUDAGraph):
        gc.collect()  # one may be garbage in a circle
        alive = len(living(torch.cuda.CUDAGraph))
        if alive:
            raise RefusedError("captured_graphs", f"{alive}; reset and delete them first")


def _copied_out(found: Sequence[Found], torch: Any) -> list[Kept]:
    try:
        copier = Copier(torch)
        kept: list[Kept] = []
        for each in found:
            with _at(each.home, torch):
                kept.append(Kept(each, copier.to_host(each.storage, each.size)))
    except Exception as error:
        raise RefusedError("failed", _in_brief(error)) from error
    return kept


def _at(home: Home, torch: Any) -> AbstractContextManager[Any]:
    """The stream that a storage's memory belongs to: what is allocated here belongs there again."""
    if home.stream == 0:
        return torch.cuda.stream(torch.cuda.default_stream(home.device))
    return torch.cuda.stream(torch.cuda.ExternalStream(home.stream, device=home.device))


def _make_room(waiting: Sequence[Kept], rules: Rules, work: _Work) -> None:
    """One segment for all that would leave a rest in segments of their own, on the current stream.

    Only where a block may be split at will, and memory is not mapped in pages anyway.
    """
    if rules.expandable or rules.max_split is not None or rules.divisions is not None:
        return
    room = sum(_rounded(kept) for kept in waiting if _rounded(kept) > rules.small_most)
    if not room:
        return
    torch, device = work.torch, waiting[0].found.home.device
    driver, fraction = work.source.driver_memory(device), work.source.memory_fraction(device)
    held = work.source.read(device).reserved or 0
    allowed = driver.total if fraction is None else int(fraction * driver.total)
    if rules.asked(room) <= min(driver.free, allowed - held):
        torch.empty(room, dtype=torch.uint8, device=f"cuda:{device}")  # freed at once, and kept by the cache


def _rounded(kept: Kept) -> int:
    return -(-kept.found.size // _STEP) * _STEP


def _order(kept: Kept) -> tuple[Home, int]:
    return kept.found.home, -kept.found.size


def _home(kept: Kept) -> Home:
    return kept.found.home


def _headroom(work: _Work) -> int | None:
    """Of the devices concerned, in sum; None where it cannot be told."""
    source = work.source
    if not work.devices:
        return None
    limits: dict[int, Limits] = {}
    for device in work.devices:
        limits[device] = Limits(
            source.driver_memory(device), source.memory_fraction(device), source.read(device).reserved
        )
    maps = analyse(source.snapshot()["segments"], source.settings(), limits)
    headrooms = [maps[device].headroom for device in work.devices]
    known = [each.least for each in headrooms if each is not None]
    return sum(known) if len(known) == len(headrooms) else None
