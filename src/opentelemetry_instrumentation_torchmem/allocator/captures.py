# SPDX-License-Identifier: Apache-2.0
"""Whether a CUDA graph is being captured, on any thread: torch tells that of the calling one alone. And which
private pools the graphs own that are alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from .pools import OWNERSHIP, Owners, PoolWatch, living, of_classes
from .replaced import Replaced
from .snapshot import DEFAULT_POOL, PoolId, PoolOn
from .source import initialised_torch

_T = TypeVar("_T")


class CaptureWatch:
    """Replaces the ends of a capture on ``torch.cuda.CUDAGraph`` by plain functions that note them."""

    def __init__(self) -> None:
        self._capturing: WeakKeyDictionary[Any, tuple[int, int, PoolId] | None] = WeakKeyDictionary()
        """Graphs, with the device and the stream of the capture and the pool that it was given, where that is
        known; one whose capture was broken off goes with the graph."""
        self._beginning = threading.RLock()
        self._replaced = Replaced()
        self._graphs = Owners()
        self.owner_classes: tuple[type, ...] = ()

    @property
    def under_way(self) -> bool:
        return bool(self._capturing)

    def while_none(self, act: Callable[[], _T]) -> _T | None:
        """What an act gives that would break a capture; one that begins meanwhile waits for its end. None
        without it while one is under way."""
        with self._beginning:
            return None if self._capturing else act()

    def pool_given(self, device: int, stream: int) -> PoolId | None:
        """The pool that the capture of a stream was given, or the only capture on the device, which others
        may have joined. None where it has one of its own."""
        on_device = [given for given in tuple(self._capturing.values()) if given and given[0] == device]
        given = [given for given in on_device if given[1] == stream] or on_device
        return given[0][2] if len(given) == 1 and given[0][2] != DEFAULT_POOL else None

    def owned(self) -> set[PoolOn]:
        """The pools that a graph which was captured and not reset owns for sure."""
        found: set[PoolOn] = set()
        for graph, device in self._graphs:
            with suppress(Exception):  # it owns none: not captured, or reset since
                found.add((device, tuple(graph.pool())))
        return found

    def install(self, graphs: Any) -> None:
        """Watch from now on; ``graphs`` is the imported module ``torch.cuda.graphs``."""
        graph_class = getattr(graphs, "CUDAGraph", None)
        if graph_class is not None:
            self._replaced.put(graph_class, "capture_begin", self._begins)
            self._replaced.put(graph_class, "capture_end", self._ends)
            self._replaced.put(graph_class, "capture_end_pre", self._ends)  # from 2.15 on a step of its own
            self._replaced.put(graph_class, "reset", _resets)
            self.owner_classes = (graph_class,)

    def note_older(self, owners: Sequence[Any]) -> None:
        """What was made before."""
        self._graphs.note_older(of_classes(owners, self.owner_classes))

    def remove(self) -> None:
        self._replaced.put_back()

    def _begins(self, original: Callable[..., Any], graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self._beginning:
            self._capturing[graph] = _given(*args, **kwargs)
            self._graphs.note(graph)
        try:
            return original(graph, *args, **kwargs)
        except BaseException:
            self._capturing.pop(graph, None)
            raise

    def _ends(self, original: Callable[..., Any], graph: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(graph, *args, **kwargs)
        finally:
            self._capturing.pop(graph, None)


def _resets(original: Callable[..., Any], graph: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(graph, *args, **kwargs)
    finally:
        OWNERSHIP.changed()


def _given(pool: Any = None, *_: Any, **__: Any) -> tuple[int, int, PoolId] | None:
    """What a capture that begins now on the calling thread has been given."""
    torch = initialised_torch()
    if torch is None:
        return None
    with suppress(Exception):  # a broken context: this is the user's call
        stream = torch.cuda.current_stream()
        return stream.device_index, stream.cuda_stream, DEFAULT_POOL if pool is None else tuple(pool)
    return None


def note_older(*watches: PoolWatch | CaptureWatch) -> None:
    """Have watches note what was made before they were installed: one walk over the heap for them all."""
    if initialised_torch() is not None:
        older = living(*(each for watch in watches for each in watch.owner_classes))
        for watch in watches:
            watch.note_older(older)
