# SPDX-License-Identifier: Apache-2.0
"""What the guard does behind its closed gate, and what each of these steps won."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEPS = {
    "drain": "Waiting until no request was in flight.",
    "clear": "empty_cache, behind the closed gate.",
    "compaction": "Live memory moved out, the cache emptied, all of it moved back.",
}
"""``torch.memory.guard.step``: value -> what it is."""


@dataclass(frozen=True, slots=True)
class CompactionOutcome:
    """What came of one compaction. It never raises for what it refuses.

    Example:
        >>> CompactionOutcome(refused="a captured graph holds addresses").missing is None
        True
    """

    moved: int = 0
    """Bytes that were moved out and are back."""
    won: int | None = None
    """By how much headroom rose, where the compaction has measured it itself; bytes."""
    refused: str | None = None
    """Why nothing was moved at all, in words; None where it was."""
    missing: str | None = None
    """Why something is not back in its place, in words: the gate stays shut, and a restart is wanted. None
    where all is back."""
    unseen: tuple[str, ...] = ()
    """What it cannot see and may have broken, in words."""


Compact = Callable[[], CompactionOutcome]
"""Run on the clearing thread with the gate closed, no measured call open, no graph being captured and no
reading by anyone; what it raises counts as failed, with everything still in its place."""
