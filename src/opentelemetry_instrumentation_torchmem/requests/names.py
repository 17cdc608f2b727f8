# SPDX-License-Identifier: Apache-2.0
"""The names of spans: the operation, and the class that a method is called on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class NameByClass:
    """The operation and the class that a method is called on, made once for each class."""

    __slots__ = ("_attribute", "_operation", "_owner", "known")
    _ENOUGH = 1000
    """Classes by name; in a process that keeps making classes they begin anew."""

    def __init__(self, operation: str, owner: str, attribute: str) -> None:
        self._operation = operation
        self._owner = owner
        self._attribute = attribute
        self.known: dict[str, str] = {}
        """By the name of the class."""

    def of(self, arguments: Sequence[Any]) -> str:
        """The name of a call with these arguments."""
        if not arguments:
            return f"{self._operation} {self._owner}"
        first: object = arguments[0]
        kind = first if isinstance(first, type) else type(first)
        known = self.known.get(kind.__name__)
        if known is not None:
            return known
        if len(self.known) >= self._ENOUGH:
            self.known.clear()
        # a static method's first argument is anything
        owner = kind.__name__ if hasattr(kind, self._attribute) else self._owner
        return self.known.setdefault(kind.__name__, f"{self._operation} {owner}")


SpanName = str | NameByClass


def span_name(function: Callable[..., Any], operation: str) -> SpanName:
    """The name of the spans of a function's calls."""
    qualified: str = getattr(function, "__qualname__", operation)
    owner, _, attribute = qualified.rpartition(".")
    if owner and not owner.endswith("<locals>"):
        return NameByClass(operation, owner.rpartition(".")[2], attribute)
    return operation if attribute == operation else f"{operation} {attribute}"
