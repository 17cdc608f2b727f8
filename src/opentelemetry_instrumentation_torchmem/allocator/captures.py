# SPDX-License-Identifier: Apache-2.0
"""Whether a CUDA graph is being captured, on any thread: torch tells that of the calling one alone. And which
private pools the graphs own that are alive."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

from .pools import Owners, living
from .snapshot import PoolOn
from .source import initialised_torch

_Note = Callable[[Any], None]
_T = TypeVar("_T")


class CaptureWatch:
    """Replaces the ends of a capture on ``torch.cuda.CUDAGraph`` by plain functions that note them."""

    def __init__(self) -> None:
        self._capturing: WeakSet[Any] = WeakSet()
        """Graphs; one whose capture was broken off goes with the graph."""
        self._beginning = threading.RLock()
        self._originals: dict[str, Any] = {}
        self._class: Any = None
        self._graphs = Owners()

    @property
    def under_way(self) -> bool:
        return bool(self._capturing)

    def while_none(self, act: Callable[[], _T]) -> _T | None:
        """What an act gives that would break a capture; one that begins meanwhile waits for its end. None
        without it while one is under way."""
        with self._beginning:
            return None if self._capturing else act()

    def owned(self) -> set[PoolOn]:
        """The pools that a graph which was captured and not reset owns for sure."""
        found: set[PoolOn] = set()
        for graph, device in self._graphs:
            with suppress(Exception):  # it owns none: not captured, or reset since
                found.add((device, tuple(graph.pool())))
        return found

    def install(self, graphs: Any) -> None:
        """Watch from now on; ``graphs`` is the imported module ``torch.cuda.graphs``."""
        self._class = getattr(graphs, "CUDAGraph", None)
        if self._class is None or self._originals:
            return
        if initialised_torch() is not None:
            self._graphs.note_older(living(self._class))
        self._replace("capture_begin", before=self._begins)
        self._replace("capture_end", after=self._capturing.discard)
        self._replace("capture_end_pre", after=self._capturing.discard)  # from 2.15 on a step of its own

    def _begins(self, graph: Any) -> None:
        self._capturing.add(graph)
        self._graphs.note(graph)

    def remove(self) -> None:
        """Put the class's own entries back, unless somebody has wrapped them since."""
        for name, original in self._originals.items():
            if getattr(self._class.__dict__.get(name), "__wrapped__", None) is original:
                setattr(self._class, name, original)
        self._originals = {}

    def _replace(self, name: str, *, before: _Note | None = None, after: _Note | None = None) -> None:
        original = self._class.__dict__.get(name)
        if original is None:
            return

        @functools.wraps(original)
        def noted(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                with self._beginning:
                    before(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._capturing.discard(graph)
                raise
            finally:
                if after is not None:
                    after(graph)

        self._originals[name] = original
        setattr(self._class, name, noted)
