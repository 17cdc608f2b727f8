# SPDX-License-Identifier: Apache-2.0
"""What a call's arguments are by shape and type, never by value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ..signals import DTYPES, SHAPES

MAX_TENSORS = 8
MAX_LENGTH = 64

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Most keywords are of these: one look instead of three."""
_ENOUGH = 1024
_NOTHING: Mapping[str, Any] = {}


def described(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of the first tensors among the arguments, and in the lists, tuples and mappings among
    them, one level deep: ``1x2048`` and ``int64`` of each; a scalar's shape is ``""``. Bounded in number and
    length; nothing where there are none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _NOTHING
    tensor = torch.Tensor
    found: tuple[Any, ...] = ()
    for value in (*arguments, *keywords.values()) if keywords else arguments:
        kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType] - anything may be an argument
        if isinstance(value, tensor):
            found += value.shape, value.dtype
        elif kind not in _PLAIN:
            inner: Iterable[Any]
            if isinstance(value, (list, tuple)):
                inner = cast("Sequence[Any]", value)[:MAX_TENSORS]
            # what every mapping's class has: to ask the abstract class of any object takes four times as long
            elif hasattr(kind, "keys") and isinstance(value, Mapping):
                inner = cast("Mapping[str, Any]", value).values()
            else:
                continue
            for item in inner:
                if isinstance(item, tensor):
                    found += item.shape, item.dtype
                    if len(found) >= 2 * MAX_TENSORS:
                        break
        if len(found) >= 2 * MAX_TENSORS:
            break
    if not found:
        return _NOTHING
    return _known.get(found) or _attributes(found)


_known: dict[tuple[Any, ...], Mapping[str, Any]] = {}
"""Requests repeat their shapes."""


def _attributes(found: tuple[Any, ...]) -> Mapping[str, Any]:
    if len(_known) >= _ENOUGH:
        _known.clear()
    attributes = {
        SHAPES.name: tuple(["x".join(map(str, size))[:MAX_LENGTH] for size in found[0::2]]),
        DTYPES.name: tuple([str(dtype).removeprefix("torch.") for dtype in found[1::2]]),
    }
    return _known.setdefault(found, attributes)
