# SPDX-License-Identifier: Apache-2.0
"""When the user last reset the allocator's peaks or counters.

The statistics tell it only as long as some figure stays below what it was: a call that resets them and then
needs more than before would look like one that never did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

_OF_PEAKS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
_OF_COUNTERS = ("_cuda_resetAccumulatedMemoryStats", "_accelerator_resetAccumulatedStats")
"""All that torch's own functions for it call, which look them up each time."""


class Resets:
    """What windows ask: at each reading's end, so plain attributes."""

    def __init__(self) -> None:
        self.last = -inf
        """By ``monotonic``, when the last one was done, of whichever figures, on whatever device; infinity
        while one is."""
        self.last_of_peaks = -inf
        """Likewise of the peaks."""
        self.under_way: set[object] = set()

    def of_peaks_since(self, at: float) -> bool:
        """Whether there may have been one of the peaks since then."""
        return bool(self.under_way) or self.last_of_peaks >= at


RESETS = Resets()
"""Those of this process."""


class ResetWatch:
    """Has torch's calls that reset the statistics note the time. Owner: the instrumentor."""

    def __init__(self) -> None:
        self._restore: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []

    def install(self, torch: Any) -> None:
        """Watch from now on."""
        calls = torch._C  # noqa: SLF001 - the one place that all of torch's ways go through
        for name in _OF_PEAKS + _OF_COUNTERS:
            original = getattr(calls, name, None)  # a build without CUDA has none
            if original is not None:
                noted = _noted(original, of_peaks=name in _OF_PEAKS)
                setattr(calls, name, noted)
                self._restore.append((calls, name, original, noted))

    def remove(self) -> None:
        """Put torch's own back, unless somebody has wrapped ours since."""
        while self._restore:
            place, name, original, noted = self._restore.pop()
            if getattr(place, name) is noted:
                setattr(place, name, original)


def _noted(original: Callable[..., Any], *, of_peaks: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset(*args: Any, **kwargs: Any) -> Any:
        this = object()
        RESETS.under_way.add(this)
        RESETS.last = inf
        try:
            return original(*args, **kwargs)
        finally:
            now = monotonic()
            if of_peaks:
                RESETS.last_of_peaks = now
            RESETS.under_way.discard(this)
            RESETS.last = now
            if RESETS.under_way:  # looked at after that: one that began meanwhile has said so itself
                RESETS.last = inf

    return reset
