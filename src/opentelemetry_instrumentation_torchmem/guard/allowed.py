# SPDX-License-Identifier: Apache-2.0
"""What the arguments of the guard's rooms may be: a table for each, one loop, one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import TypeGuard, cast

_LONGEST = 1e9
"""Seconds: what the system's clocks and locks can wait for, everywhere."""
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one argument may be."""

    holds: Callable[[object], bool]
    about: str
    """In words."""


def check(where: str, table: Mapping[str, Allowed], values: Mapping[str, object]) -> None:
    """Raise for the first value that its row does not allow.

    Raises:
        ValueError: what was wrong, where, and what is allowed, in one line.
    """
    for name, row in table.items():
        if not row.holds(values[name]):
            raise ValueError(refusal(where, name, values[name], row.about))


def refusal(where: str, name: str, value: object, about: str) -> str:
    """The line for a value that is not allowed."""
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return f"torchmem: {where}: {name}={shown} is not allowed ({about})"


def number(value: object) -> TypeGuard[float]:
    """A finite one, and no truth value."""
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def _seconds(value: object) -> bool:
    return number(value) and 0 <= value <= _LONGEST


def whole_from(least: int) -> Callable[[object], bool]:
    """Whole numbers from one up."""
    return lambda value: not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def _file(value: object) -> bool:
    if not isinstance(value, (str, os.PathLike)):
        return False
    path = os.fspath(cast("str | os.PathLike[str] | os.PathLike[bytes]", value))
    return isinstance(path, str) and bool(path) and "\0" not in path and not Path(path).is_dir()


def maybe(row: Allowed) -> Allowed:
    """The same, or None."""
    return Allowed(lambda value: value is None or row.holds(value), f"{row.about}, or None")


def instance(kind: type, example: str) -> Allowed:
    """One of a class."""
    return Allowed(lambda value: isinstance(value, kind), example)


def calls(about: str) -> Allowed:
    """Something that can be called."""
    return Allowed(callable, about)


SECONDS = Allowed(_seconds, "seconds from 0 to 1e9")
SECONDS_ABOVE_0 = Allowed(lambda value: _seconds(value) and value != 0, "seconds above 0 and up to 1e9")
FILE = Allowed(_file, "the path of a file")
PATH = Allowed(lambda value: isinstance(value, str) and value.startswith("/"), "a path that begins with /")
YES_OR_NO = Allowed(lambda value: isinstance(value, bool), "True or False")
POLICY = Allowed(
    lambda value: callable(value) and not isinstance(value, type),
    "an instance of a policy, Headroom() or Slack(), or a callable over Readings",
)
