# SPDX-License-Identifier: Apache-2.0
"""When the user last reset the allocator's peaks.

The statistics tell it only as long as some peak stays below what it was: a call that resets them and then
needs more than before would look like one that never did.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from .replaced import Replaced

_CALLS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""All that torch's own functions for it call, which look them up each time."""


class PeakResets:
    """What windows ask: at each reading's end, so a plain attribute."""

    def __init__(self) -> None:
        self.last = -inf
        """By ``monotonic``, when the last one was done, on whatever device; infinity while one is."""
        self.under_way: set[object] = set()


RESETS = PeakResets()
"""Those of this process."""


class PeakWatch:
    """Has torch's calls that reset the peaks note the time. Owner: the instrumentor."""

    def __init__(self) -> None:
        self._replaced = Replaced()

    def install(self, torch: Any) -> None:
        """Watch from now on."""
        calls = torch._C  # noqa: SLF001 - the one place that all of torch's ways go through
        for name in _CALLS:  # a build without CUDA has none
            self._replaced.put(calls, name, _noted)

    def remove(self) -> None:
        self._replaced.put_back()


def _noted(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    this = object()
    RESETS.under_way.add(this)
    RESETS.last = inf
    try:
        return original(*args, **kwargs)
    finally:
        RESETS.under_way.discard(this)
        RESETS.last = monotonic()
        if RESETS.under_way:  # looked at after that: one that began meanwhile has said so itself
            RESETS.last = inf
