# SPDX-License-Identifier: Apache-2.0
"""What a call's arguments are by shape and type, never by value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

MAX_TENSORS = 8
MAX_LENGTH = 64

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most keywords are of these: one look instead of three."""


def described(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """``(["1x2048"], ["int64"])`` of the first tensors among the arguments, and in the lists, tuples and
    mappings among them, one level deep; a scalar's shape is ``""``. Bounded in number and length."""
    shapes: list[str] = []
    dtypes: list[str] = []
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None:
        return shapes, dtypes
    for value in (*arguments, *keywords.values()):
        if type(value) in _PLAIN:
            continue
        found: Iterable[Any] = ()
        if isinstance(value, tensor):
            found = (value,)
        elif isinstance(value, (list, tuple)):
            inner = cast("Sequence[Any]", value)[:MAX_TENSORS]
            found = (item for item in inner if isinstance(item, tensor))
        elif isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value).values()
            found = (item for item in inner if isinstance(item, tensor))
        for item in found:
            shapes.append(_shape(item.shape))
            dtypes.append(_type(item.dtype))
            if len(shapes) == MAX_TENSORS:
                return shapes, dtypes
    return shapes, dtypes


# each text once: requests repeat their shapes, and torch has some forty types


@lru_cache(maxsize=1024)
def _shape(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))[:MAX_LENGTH]


@lru_cache(maxsize=64)
def _type(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
