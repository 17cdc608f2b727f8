# SPDX-License-Identifier: Apache-2.0
"""What this package costs, what it chose not to do, and what it says only once.

Knows nothing of torch or OpenTelemetry, so that every room may use it.
"""

from __future__ import annotations

import logging
import threading

from .package import NAME

_logger = logging.getLogger(NAME)

STEPS = {
    "stats": "The allocator's statistics, one call a device.",
    "device": "The driver's and the pinned host memory's figures.",
    "snapshot": "Snapshots and what is made of them.",
    "oom": "The evidence of out of memory errors, on the threads that failed.",
}
"""``torch.memory.telemetry.step``: value -> what it is."""

REASONS = {
    "pluggable_pool": "A reading beside a memory pool with its own allocator, which could hang the process. "
    "Whether a MemPool made before `instrument()` has one torch does not tell: it counts as such.",
    "snapshot_budget": "A snapshot: the ones before have used up their share of time.",
    "snapshot_busy": "A snapshot: no moment without a request in flight came soon enough.",
    "snapshot_capture": "A snapshot: a CUDA graph was being captured.",
    "snapshot_unsafe": "A snapshot, where readings are not taken either.",
    "sampling": "A reading that `sampling=request` left to the requests.",
    "hook": "A request or response hook of the user's that raised.",
    "request": "A request that could not be measured, or an attribute of it: the log names it once.",
    "target": "A target that is not there, or cannot be wrapped.",
    "overflow": "A request counted under `other`: too many targets.",
    "dump": "A snapshot of an out of memory error that was not written: the log says why once.",
    "error": "A part of a collection that raised; the log names it once.",
}
"""``torch.memory.telemetry.reason``: value -> meaning."""


class OwnTelemetry:
    """Totals since the process's first ``instrument()``. One owner: the instrumentor, which hands it down."""

    def __init__(self) -> None:
        self.unlock()
        self._said: set[str] = set()
        self.seconds: dict[str, float] = dict.fromkeys(STEPS, 0.0)
        self.skipped: dict[str, int] = dict.fromkeys(REASONS, 0)

    def carry_on(self, earlier: OwnTelemetry) -> None:
        """Go on counting where an earlier one stopped: what was exported must not fall."""
        self.seconds, self.skipped = earlier.seconds, earlier.skipped

    def unlock(self) -> None:
        """A lock of its own, also for a forked child whose parent may have held this one."""
        # reentrant: a signal handler may interrupt the very thread that counts
        self._lock = threading.RLock()

    def spent(self, step: str, seconds: float) -> None:
        """Add seconds to a step."""
        with self._lock:
            self.seconds[step] += seconds

    def skip(self, reason: str) -> None:
        """Count one thing that was not done."""
        with self._lock:
            self.skipped[reason] += 1

    def say_once(self, key: str, message: str, *arguments: object, level: int = logging.WARNING) -> None:
        """Log a message the first time its key comes up; from an ``except`` block, with the traceback at
        debug level."""
        with self._lock:
            if key in self._said:
                return
            self._said.add(key)
        _logger.log(level, message, *arguments)
        _logger.debug("torchmem: details of %s", key, exc_info=True)
