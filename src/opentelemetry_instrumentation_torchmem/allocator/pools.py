# SPDX-License-Identifier: Apache-2.0
"""Whether a memory pool with an allocator of its own was ever made in this process.

Such an allocator may need the interpreter (vLLM's sleep mode does) while the caching allocator's mutex
is held; a reading waits for that mutex with the interpreter in hand. Together that hangs the process for
ever, so from the first such pool on nobody may read beside the thread that allocates.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from .source import initialised_torch


def _with_subclasses(pool_class: type) -> list[type]:
    """What refers to one of these may be a pool. A walk over all objects, ``gc.get_objects``, would touch
    tuples that other threads are still building, and those then fail."""
    return [
        pool_class,
        *(deeper for each in pool_class.__subclasses__() for deeper in _with_subclasses(each)),
    ]


class PoolWatch:
    """Replaces ``torch.cuda.MemPool.__init__`` by a plain function that notes such pools."""

    def __init__(self) -> None:
        self.suspect = False
        """True for good: a dead pool's segments still go back through its allocator."""
        self._restore: tuple[type, Any] | None = None

    def install(self, memory: Any) -> None:
        """Watch from now on; ``memory`` is the imported module ``torch.cuda.memory``.

        Of pools made before nothing is known, so with CUDA already initialised any that lives is suspect.
        """
        pool_class = getattr(memory, "MemPool", None)
        if pool_class is None or self._restore is not None:  # before torch 2.5 there are none
            return
        if initialised_torch() is not None:
            self.suspect = self.suspect or any(
                issubclass(type(thing), pool_class)  # isinstance would wake lazy objects, warnings and all
                for thing in gc.get_referrers(*_with_subclasses(pool_class))
            )
        original = pool_class.__dict__.get("__init__")
        if original is None:
            return

        @functools.wraps(original)
        def noted_init(pool: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("allocator", args[0] if args else None) is not None:
                self.suspect = True
            original(pool, *args, **kwargs)

        pool_class.__init__ = noted_init
        self._restore = (pool_class, original)

    def remove(self) -> None:
        """Put the class's own entry back, unless somebody has wrapped it since."""
        if self._restore is None:
            return
        pool_class, original = self._restore
        self._restore = None
        if getattr(pool_class.__dict__.get("__init__"), "__wrapped__", None) is original:
            pool_class.__init__ = original
