# SPDX-License-Identifier: Apache-2.0
"""Which memory pools are alive, and whether one with an allocator of its own was ever made in this process.

Such an allocator may need the interpreter (vLLM's sleep mode does) while the caching allocator's mutex
is held; a reading waits for that mutex with the interpreter in hand. Together that hangs the process for
ever, so from the first such pool on nobody may read beside the thread that allocates.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from .snapshot import PoolId, PoolOn
from .source import NATIVE, initialised_torch


def living(owner_class: type) -> Iterator[Any]:
    """The objects of a class that live now.

    What refers to the class may be one. A walk over all objects, ``gc.get_objects``, would touch tuples that
    other threads are still building, and those then fail.
    """
    return (
        thing
        for thing in gc.get_referrers(*_with_subclasses(owner_class))
        if issubclass(type(thing), owner_class)  # isinstance would wake lazy objects, warnings and all
    )


def _with_subclasses(owner_class: type) -> list[type]:
    return [
        owner_class,
        *(deeper for each in owner_class.__subclasses__() for deeper in _with_subclasses(each)),
    ]


LIVING: set[ref[Any]] = set()
"""The owners of private pools that are known and live, on any device: while there is one, the statistics may
not count all that is trapped as split. To be asked at each request."""


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
            LIVING.add(ref(owner, LIVING.discard))

    def note_older(self, owners: Iterable[Any]) -> None:
        """Those made before. Of several devices, which one they were made on is not known."""
        torch = initialised_torch()
        if torch is not None and torch.cuda.device_count() == 1:
            for owner in owners:
                self.note(owner)
        else:
            LIVING.update(ref(owner, LIVING.discard) for owner in owners)

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
        self._restore: tuple[type, Any] | None = None
        self._made = Owners()
        self._in_force = threading.local()
        self._routes: list[tuple[Any, str, Any, Any]] = []

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
        """Watch from now on; ``memory`` is the imported module ``torch.cuda.memory``.

        Whether one made before has an allocator of its own most releases do not tell: with CUDA already
        initialised such a one that lives is suspect, and so is an allocator that lives: its pool may be dead.
        """
        pool_class = getattr(memory, "MemPool", None)
        if pool_class is None or self._restore is not None:  # before torch 2.5 there are none
            return
        torch = initialised_torch()
        if torch is not None:
            older = list(living(pool_class))
            allocators = getattr(memory, "_CUDAAllocator", None)
            if not all(map(_is_plain, older)) or (
                allocators and torch.cuda.get_allocator_backend() == NATIVE and any(living(allocators))
            ):
                self._become_suspect()
            self._made.note_older(older)
        self._route(memory, "_cuda_beginAllocateCurrentThreadToPool", self._enters)
        self._route(memory, "_cuda_beginAllocateToPool", self._enters)
        self._route(memory, "_cuda_endAllocateToPool", self._leaves)
        original = pool_class.__dict__.get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def noted_init(pool: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("allocator", args[0] if args else None) is not None:
                self._become_suspect()
                _suspects.append(True)
            original(pool, *args, **kwargs)
            self._made.note(pool)
            if kwargs.get("allocator", args[0] if args else None) is None:
                with suppress(TypeError):
                    _plain.add(pool)

        pool_class.__init__ = noted_init
        self._restore = (pool_class, original)

    def _enters(self, device: int, pool: Any) -> None:
        entered = self._in_force.__dict__.setdefault("entered", [])
        entered.append((device, tuple(pool)))

    def _leaves(self, device: int, pool: Any) -> None:
        entered = self._in_force.__dict__.get("entered", [])
        if (device, tuple(pool)) in entered:
            entered.reverse()
            entered.remove((device, tuple(pool)))
            entered.reverse()

    def _route(self, memory: Any, name: str, note: Callable[[int, Any], None]) -> None:
        """Have what ``use_mem_pool`` calls note which pool."""
        original = getattr(memory, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def noted(device: int, pool: Any, *args: Any) -> Any:
            told = original(device, pool, *args)
            with suppress(Exception):  # this is the user's call
                note(device, pool)
            return told

        setattr(memory, name, noted)
        self._routes.append((memory, name, noted, original))

    def remove(self) -> None:
        """Put torch's own entries back, unless somebody has wrapped them since."""
        for memory, name, noted, original in self._routes:
            if getattr(memory, name, None) is noted:
                setattr(memory, name, original)
        self._routes = []
        if self._restore is None:
            return
        pool_class, original = self._restore
        self._restore = None
        if getattr(pool_class.__dict__.get("__init__"), "__wrapped__", None) is original:
            pool_class.__init__ = original
