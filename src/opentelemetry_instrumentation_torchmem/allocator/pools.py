# SPDX-License-Identifier: Apache-2.0
"""Which memory pools are alive, and whether one with an allocator of its own was ever made in this process.

Such an allocator may need the interpreter (vLLM's sleep mode does) while the caching allocator's mutex
is held; a reading waits for that mutex with the interpreter in hand. Together that hangs the process for
ever, so from the first such pool on nobody may read beside the thread that allocates.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from .replaced import Replaced
from .snapshot import PoolId, PoolOn
from .source import NATIVE, initialised_torch


def living(*classes: type) -> list[Any]:
    """The objects of some classes that live now, from one walk over the heap.

    What refers to a class may be one. A walk over all objects, ``gc.get_objects``, would touch tuples that
    other threads are still building, and those then fail.
    """
    return of_classes(gc.get_referrers(*_with_subclasses(classes)), classes)


def of_classes(things: Iterable[Any], classes: tuple[type, ...]) -> list[Any]:
    """Those that are of some classes."""
    # isinstance would wake lazy objects, warnings and all
    return [thing for thing in things if issubclass(type(thing), classes)]


def _with_subclasses(classes: Iterable[type]) -> list[type]:
    return [deeper for each in classes for deeper in (each, *_with_subclasses(each.__subclasses__()))]


LIVING: set[ref[Any]] = set()
"""The owners of private pools that are known and live, on any device: while there is one, the statistics may
not count all that is trapped as split. To be asked at each request."""


class Ownership:
    """How often a pool may have won or lost an owner: no statistics tell, and to ask the pools takes the
    allocator's lock."""

    def __init__(self) -> None:
        self.changes = 0

    def changed(self) -> None:
        self.changes += 1


OWNERSHIP = Ownership()
"""That of this process."""


def _lives(owner: Any) -> None:
    LIVING.add(ref(owner, _gone))
    OWNERSHIP.changed()


def _gone(owner: ref[Any]) -> None:
    LIVING.discard(owner)
    OWNERSHIP.changed()


class Owners:
    """The objects that own private pools, and on which device each does. Keeps none of them alive."""

    def __init__(self) -> None:
        self._devices: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def note(self, owner: Any) -> None:
        """It owns, or is about to own, a pool on the current device."""
        torch = initialised_torch()
        if torch is not None:
            with suppress(Exception):  # a subclass without hash, a broken context: this is the user's call
                self._devices[owner] = torch.cuda.current_device()
        with suppress(TypeError):
            _lives(owner)

    def note_older(self, owners: Iterable[Any]) -> None:
        """Those made before. Of several devices, which one they were made on is not known."""
        torch = initialised_torch()
        if torch is not None and torch.cuda.device_count() == 1:
            for owner in owners:
                self.note(owner)
        else:
            for owner in owners:
                _lives(owner)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for reference in self._devices.keyrefs():  # at once: another thread may add one meanwhile
            owner = reference()
            device = None if owner is None else self._devices.get(owner)
            if device is not None:
                yield owner, device


_plain: WeakSet[Any] = WeakSet()
"""Pools that were made under watch, an earlier ``instrument()``'s too, without an allocator of their own."""


_suspects: deque[bool] = deque(maxlen=1)
"""Not empty once one with an allocator of its own was made under watch, an earlier ``instrument()``'s too."""


def _is_plain(pool: Any) -> bool:
    """Whether a pool has none for sure. Releases from 2.9 on do not tell of one made before."""
    return pool in _plain or getattr(pool, "allocator", pool) is None


def _nothing() -> None:
    return None


class PoolWatch:
    """Replaces ``torch.cuda.MemPool.__init__``, and what ``use_mem_pool`` calls, by plain functions that note
    the pools."""

    def __init__(self) -> None:
        self.suspect = bool(_suspects)
        """True for good: a dead pool's segments still go back through its allocator."""
        self.when_suspect: Callable[[], object] = _nothing
        """Called as soon as it is."""
        self._made = Owners()
        self._in_force = threading.local()
        self._replaced = Replaced()
        self.owner_classes: tuple[type, ...] = ()

    def _become_suspect(self) -> None:
        self.suspect = True
        self.when_suspect()

    def in_force(self, device: int) -> PoolId | None:
        """The pool that ``use_mem_pool`` has the calling thread's requests on a device go to; None: none."""
        entered: list[PoolOn] = getattr(self._in_force, "entered", [])
        return next((pool for on, pool in reversed(entered) if on == device), None)

    def owned(self) -> set[PoolOn]:
        """The pools that have a ``MemPool`` for an owner for sure; asks the allocator."""
        found: set[PoolOn] = set()
        for pool, device in self._made:
            with suppress(Exception):  # a broken context, an object that was never made whole
                # an older release, which has no count, may have let go of the pool before
                if pool.use_count() > 0:
                    found.add((device, tuple(pool.id)))
        return found

    def install(self, memory: Any) -> None:
        """Watch from now on; ``memory`` is the imported module ``torch.cuda.memory``."""
        pool_class = getattr(memory, "MemPool", None)
        if pool_class is not None:  # before torch 2.5 there are none
            self._replaced.put(memory, "_cuda_beginAllocateCurrentThreadToPool", self._enters)
            self._replaced.put(memory, "_cuda_beginAllocateToPool", self._enters)
            self._replaced.put(memory, "_cuda_endAllocateToPool", self._leaves)
            self._replaced.put(pool_class, "__init__", self._makes)
            allocator_class = getattr(memory, "_CUDAAllocator", None)
            self.owner_classes = (pool_class,) if allocator_class is None else (pool_class, allocator_class)

    def note_older(self, owners: Sequence[Any]) -> None:
        """What was made before.

        Whether such a pool has an allocator of its own most releases do not tell: one that lives is suspect,
        and so is an allocator that lives, as its pool may be dead.
        """
        pools = of_classes(owners, self.owner_classes[:1])
        allocators = of_classes(owners, self.owner_classes[1:])
        torch = initialised_torch()
        if not all(map(_is_plain, pools)) or (
            allocators and torch is not None and torch.cuda.get_allocator_backend() == NATIVE
        ):
            self._become_suspect()
        self._made.note_older(pools)

    def remove(self) -> None:
        self._replaced.put_back()

    def _makes(self, original: Callable[..., None], pool: Any, /, *args: Any, **kwargs: Any) -> None:
        plain = kwargs.get("allocator", args[0] if args else None) is None
        if not plain:
            self._become_suspect()
            _suspects.append(True)
        original(pool, *args, **kwargs)
        self._made.note(pool)
        if plain:
            with suppress(TypeError):
                _plain.add(pool)

    def _enters(self, original: Callable[..., Any], device: int, pool: Any, /, *args: Any) -> Any:
        told = original(device, pool, *args)
        with suppress(Exception):  # this is the user's call
            self._in_force.__dict__.setdefault("entered", []).append((device, tuple(pool)))
        return told

    def _leaves(self, original: Callable[..., Any], device: int, pool: Any, /, *args: Any) -> Any:
        told = original(device, pool, *args)
        with suppress(Exception):  # this is the user's call
            entered = self._in_force.__dict__.get("entered", [])
            if (device, tuple(pool)) in entered:
                entered.reverse()
                entered.remove((device, tuple(pool)))
                entered.reverse()
        return told
