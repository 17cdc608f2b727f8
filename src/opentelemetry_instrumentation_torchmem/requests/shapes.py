# SPDX-License-Identifier: Apache-2.0
"""What a call's arguments are by shape and type, never by value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

MAX_TENSORS = 8
MAX_LENGTH = 64

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most keywords are of these: one look instead of three."""


def described(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """``(["1x2048"], ["int64"])`` of the first tensors among the arguments, and in the lists, tuples and
    mappings among them, one level deep; a scalar's shape is ``""``. Bounded in number and length."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None:
        return [], []
    tensors: list[Any] = []
    for value in (*arguments, *keywords.values()):
        if type(value) in _PLAIN:
            continue
        if isinstance(value, tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            inner = cast("Sequence[Any]", value)[:MAX_TENSORS]
            tensors += [item for item in inner if isinstance(item, tensor)]
        elif isinstance(value, Mapping):
            inner = cast("Mapping[str, Any]", value).values()
            tensors += islice((item for item in inner if isinstance(item, tensor)), MAX_TENSORS)
        if len(tensors) >= MAX_TENSORS:
            del tensors[MAX_TENSORS:]
            break
    return [_shape(item.shape) for item in tensors], [_type(item.dtype) for item in tensors]


# each text once: requests repeat their shapes, and torch has some forty types


@lru_cache(maxsize=1024)
def _shape(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))[:MAX_LENGTH]


@lru_cache(maxsize=64)
def _type(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
