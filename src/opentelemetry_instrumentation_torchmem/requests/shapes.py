# SPDX-License-Identifier: Apache-2.0
"""What a call's arguments are by shape and type, never by value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

MAX_TENSORS = 8
MAX_LENGTH = 64


def described(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """``(["1x2048"], ["int64"])`` of the first tensors among the arguments, and in the lists, tuples and
    mappings among them, one level deep; a scalar's shape is ``""``. Bounded in number and length."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    shapes: list[str] = []
    dtypes: list[str] = []
    if tensor is None:
        return shapes, dtypes
    for value in _flat(arguments, keywords):
        if isinstance(value, tensor):
            shapes.append("x".join(map(str, value.shape))[:MAX_LENGTH])
            dtypes.append(str(value.dtype).removeprefix("torch."))
            if len(shapes) == MAX_TENSORS:
                break
    return shapes, dtypes


def _flat(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterable[Any]:
    for value in (*arguments, *keywords.values()):
        if isinstance(value, (list, tuple)):
            yield from cast("Sequence[Any]", value)[:MAX_TENSORS]
        elif isinstance(value, Mapping):
            yield from cast("Mapping[str, Any]", value).values()
        else:
            yield value
