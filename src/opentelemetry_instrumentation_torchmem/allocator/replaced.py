# SPDX-License-Identifier: Apache-2.0
"""Torch's functions that ours stand in for, until they are put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """What one watch has put in torch's place. False while that is nothing."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def put(self, place: Any, name: str, by: Callable[..., Any]) -> None:
        """Have ``by`` called with what stands there, and with its arguments; put twice, once.

        Nothing is put where nothing stands, nor where a class inherits it: to put that back would copy it.
        """
        original = place.__dict__.get(name)
        if original is None or any(place is known and name == its for known, its, *_ in self._entries):
            return

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self._entries:  # put back, but somebody has wrapped ours, or kept it
                return original(*args, **kwargs)
            return by(original, *args, **kwargs)

        self._entries.append((place, name, original, ours))
        setattr(place, name, ours)

    def put_back(self) -> None:
        """Where ours still stands itself; a wrapper may say ``__wrapped__`` of the original and be theirs."""
        while self._entries:
            place, name, original, ours = self._entries.pop()
            if place.__dict__.get(name) is ours:
                setattr(place, name, original)
