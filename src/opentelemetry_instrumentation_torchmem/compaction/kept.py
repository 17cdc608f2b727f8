# SPDX-License-Identifier: Apache-2.0
"""What is in host memory and not back on its device: one register for the process.

It, and no ``Compaction``, owns the copies: they outlive whoever asked for the move.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .storages import Found


@dataclass(slots=True)
class Kept:
    """A storage whose bytes are in host memory."""

    found: Found
    host: Any
    out: bool = False
    """It may have no memory of its own, or not its bytes in it."""


@dataclass(slots=True)
class Register:
    """The copies, and the lock of whoever moves memory: one at a time in the process."""

    copies: Sequence[Kept] = ()
    """Replaced as a whole, so that it can be read without the lock."""
    alone: threading.Lock = field(default_factory=threading.Lock)

    @property
    def missing(self) -> int:
        """Bytes that are in host memory alone: what was free on the device is gone."""
        return sum(kept.found.size for kept in self.copies if kept.out)

    def drop(self, gone: Kept) -> None:
        """This one is back."""
        self.copies = [kept for kept in self.copies if kept is not gone]


REGISTER = Register()
