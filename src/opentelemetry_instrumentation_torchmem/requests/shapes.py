# SPDX-License-Identifier: Apache-2.0
"""What a call's arguments are by shape and type, never by value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ..signals import DTYPES, SHAPES

MAX_TENSORS = 8
MAX_LENGTH = 64
_FULL = 2 * MAX_TENSORS

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most keywords are of these: one look instead of three."""
Inputs = tuple[Any, ...]
"""Sizes and types of tensors, in turn: two for each tensor, and nothing that holds one."""
NO_INPUTS: Inputs = ()
_NOTHING: Mapping[str, Any] = {}
_tensor: Any = None
"""``torch.Tensor``, once torch is imported."""


def inputs_of(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Inputs:
    """The sizes and types, in turn, of the first tensors among the arguments, and in the lists, tuples and
    mappings among them, one level deep. On the path of every request."""
    global _tensor
    tensor = _tensor
    if tensor is None:
        torch = sys.modules.get("torch")
        if torch is None:
            return NO_INPUTS
        tensor = _tensor = torch.Tensor
    found = NO_INPUTS
    for values in (arguments, keywords.values()):
        for value in values:
            kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType] - anything may be an argument
            if kind is tensor:
                found += value.shape, value.dtype
            elif kind in _PLAIN:
                continue
            else:
                found += _within(value, kind, tensor)
            if len(found) >= _FULL:
                break
    return found


def _within(value: Any, kind: Any, tensor: Any) -> Inputs:
    """The shapes and types of a tensor of a class of its own, or of the tensors in a container."""
    if isinstance(value, tensor):
        return value.shape, value.dtype
    inner: Iterable[Any]
    if isinstance(value, (list, tuple)):
        inner = cast("Sequence[Any]", value)[:MAX_TENSORS]
    # what every mapping's class has: to ask the abstract class of any object takes four times as long
    elif hasattr(kind, "keys") and isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value).values()
    else:
        return NO_INPUTS
    found = NO_INPUTS
    for item in inner:
        if isinstance(item, tensor):
            found += item.shape, item.dtype
            if len(found) >= _FULL:
                break
    return found


def described(inputs: Inputs) -> Mapping[str, Any]:
    """The attributes of inputs: ``1x2048`` and ``int64`` of each; a scalar's shape is ``""``. Bounded in
    number and length; nothing where there are none."""
    if not inputs:
        return _NOTHING
    inputs = inputs[:_FULL]
    return {
        SHAPES.name: tuple(["x".join(map(str, size))[:MAX_LENGTH] for size in inputs[0::2]]),
        DTYPES.name: tuple([str(dtype).removeprefix("torch.") for dtype in inputs[1::2]]),
    }
