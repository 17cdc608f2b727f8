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
_ENOUGH = 1024
_NOTHING: Mapping[str, Any] = {}
_tensor: Any = None
"""``torch.Tensor``, once torch is imported."""


def described(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of the first tensors among the arguments, and in the lists, tuples and mappings among
    them, one level deep: ``1x2048`` and ``int64`` of each; a scalar's shape is ``""``. Bounded in number and
    length; nothing where there are none. On the path of every request."""
    global _tensor
    tensor = _tensor
    if tensor is None:
        torch = sys.modules.get("torch")
        if torch is None:
            return _NOTHING
        tensor = _tensor = torch.Tensor
    found: tuple[Any, ...] = ()
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
    if not found:
        return _NOTHING
    return _known.get(found) or _attributes(found)


def _within(value: Any, kind: Any, tensor: Any) -> tuple[Any, ...]:
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
        return ()
    found: tuple[Any, ...] = ()
    for item in inner:
        if isinstance(item, tensor):
            found += item.shape, item.dtype
            if len(found) >= _FULL:
                break
    return found


_known: dict[tuple[Any, ...], Mapping[str, Any]] = {}
"""Requests repeat their shapes."""


def _attributes(found: tuple[Any, ...]) -> Mapping[str, Any]:
    if len(_known) >= _ENOUGH:
        _known.clear()
    told = found[:_FULL]
    attributes = {
        SHAPES.name: tuple(["x".join(map(str, size))[:MAX_LENGTH] for size in told[0::2]]),
        DTYPES.name: tuple([str(dtype).removeprefix("torch.") for dtype in told[1::2]]),
    }
    return _known.setdefault(found, attributes)
