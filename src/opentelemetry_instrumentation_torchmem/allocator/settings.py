# SPDX-License-Identifier: Apache-2.0
"""The allocator settings in force, and where they came from.

Reading them never initialises CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order of precedence: the first one that is set replaces the others wholly."""

N = TypeVar("N", int, float)

_MIB = 1024 * 1024
_OPTION = re.compile(r"\s*([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,]*)\s*(?:,|$)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What the options in force say; an option that nobody set is None.

    Example:
        >>> AllocatorSettings.parse("max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF").max_split_size
        67108864
    """

    text: str
    origin: str
    """``runtime``, the variable's name, or ``default``."""
    expandable_segments: bool
    max_split_size: int | None
    """Bytes: blocks above are never split."""
    roundup_power2_divisions: str | None
    """As written: one number, or a list by size."""
    garbage_collection_threshold: float | None

    @classmethod
    def parse(cls, text: str, origin: str) -> AllocatorSettings:
        """Read an option string; what cannot be read counts as not set, as torch refuses it anyway."""
        options = dict(_OPTION.findall(text))
        split = _number(options.get("max_split_size_mb"), int)
        return cls(
            text=text,
            origin=origin,
            expandable_segments=options.get("expandable_segments", "").strip().lower() == "true",
            max_split_size=None if split is None else split * _MIB,
            roundup_power2_divisions=options.get("roundup_power2_divisions"),
            garbage_collection_threshold=_number(options.get("garbage_collection_threshold"), float),
        )


def settings_in_force(torch: Any, environ: Mapping[str, str] = os.environ) -> AllocatorSettings:
    """The runtime's own word (torch 2.12 or later), else the environment's.

    ``torch`` is the imported module.
    """
    of_runtime = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if of_runtime is not None:
        try:
            return _parsed(str(of_runtime()), "runtime")
        except RuntimeError:  # another accelerator than CUDA, or none
            pass
    for variable in ENVIRONMENT:
        if variable in environ:
            return _parsed(environ[variable], variable)
    return _parsed("", "default")


@lru_cache(maxsize=8)
def _parsed(text: str, origin: str) -> AllocatorSettings:
    """Each string once: it is asked for at every collection and hardly ever changes."""
    return AllocatorSettings.parse(text, origin)


def _number(text: str | None, kind: Callable[[str], N]) -> N | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None
