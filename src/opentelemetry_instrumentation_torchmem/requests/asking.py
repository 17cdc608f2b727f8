# SPDX-License-Identifier: Apache-2.0
"""How a wrapper asks for a probe at each call, and which functions are wrappers."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from .probe import Probe

Function = Callable[..., Any]


class Asking:
    """How a wrapper asks for a probe; one that was undone, or came out of a pickle, asks for nothing."""

    __slots__ = ("begin", "nested", "plain")

    def __init__(self, begin: Callable[..., Probe | None] | None = None, nested: bool = False) -> None:
        self.begin = begin or _measure_nothing
        self.nested = nested
        """Whether it asks inside another measured call too."""
        self.plain = False
        """Whether the call ends when the function returns, unless with a stream."""

    def no_more(self) -> None:
        """Measure nothing from now on: calls pass straight through."""
        self.begin = _measure_nothing

    def __reduce__(self) -> tuple[type[Asking], tuple[()]]:
        return Asking, ()


def _measure_nothing(*_: Any) -> None:
    return None


wrappers: WeakKeyDictionary[Function, Asking] = WeakKeyDictionary()
"""Every one there is: an attribute would be copied by whoever wraps ours with ``functools.wraps``."""


def asking_of(function: object) -> Asking | None:
    """How a wrapper asks; None for what is no wrapper of ours."""
    return wrappers.get(function) if type(function) is FunctionType else None
