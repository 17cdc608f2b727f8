# SPDX-License-Identifier: Apache-2.0
"""The allocator settings in force, and where they came from.

Reading them never initialises CUDA.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order of precedence: the first one that is set replaces the others wholly."""

N = TypeVar("N", int, float)

_MIB = 1024 * 1024
_OPTION = re.compile(r"\s*([a-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,]*)\s*(?:,|$)")
_INTERVALS = 16  # of roundup_power2_divisions: by powers of two from 1 MiB to 64 GiB
_FORGOTTEN = ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")
"""Options that torch sets back when others are set at run time; it keeps the rest as they were."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What the options in force say; an option that nobody set is None.

    Example:
        >>> AllocatorSettings.parse("max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF").max_split_size
        67108864
    """

    text: str
    """The string that was set last."""
    origin: str
    """``runtime``, the variable's name, or ``default``."""
    expandable_segments: bool = False
    max_split_size: int | None = None
    """Bytes: blocks above are never split."""
    roundup_power2_divisions: str | None = None
    """As written: one number, or a list by size."""
    garbage_collection_threshold: float | None = None
    max_non_split_rounding: int | None = None
    """Bytes by which a block may exceed a request that is never split."""
    large_segment_size: int | None = None
    """Bytes asked of the driver for a request of 1 to 10 MiB; the page of large expandable segments."""
    throw_on_cudamalloc_oom: bool = False
    expandable_segments_reserve: str | None = None
    """As written: the share of the device's memory that an address range spans, or ``40G``."""
    expandable_segments_reserve_by_class: str | None = None

    @classmethod
    def parse(cls, text: str, origin: str, before: str = "") -> AllocatorSettings:
        """Read an option string; what cannot be read counts as not set, as torch refuses it anyway.

        ``before`` is what was in force when this string was set at run time: torch keeps most of it.

        Example:
            >>> AllocatorSettings.parse("large_segment_size_mb:40", "runtime", "expandable_segments:True"
            ...     ).expandable_segments
            True
        """
        kept = {name: value for name, value in _OPTION.findall(before) if name not in _FORGOTTEN}
        options = kept | dict(_OPTION.findall(text))
        return cls(
            text=text,
            origin=origin,
            expandable_segments=_is_true(options.get("expandable_segments")),
            max_split_size=_mib(options.get("max_split_size_mb")),
            roundup_power2_divisions=options.get("roundup_power2_divisions"),
            garbage_collection_threshold=_number(options.get("garbage_collection_threshold"), float),
            max_non_split_rounding=_mib(options.get("max_non_split_rounding_mb")),
            large_segment_size=_mib(options.get("large_segment_size_mb")),
            throw_on_cudamalloc_oom=_is_true(options.get("throw_on_cudamalloc_oom")),
            expandable_segments_reserve=options.get("expandable_segments_reserve"),
            expandable_segments_reserve_by_class=options.get("expandable_segments_reserve_by_class"),
        )

    @classmethod
    def of_snapshot(cls, given: Mapping[str, Any], environ: Mapping[str, str]) -> AllocatorSettings:
        """What a snapshot's ``allocator_settings`` say, which are in force themselves and not as written.

        The options that no snapshot holds are taken from the string it gives, else from the environment.
        """
        text = str(given.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        read = _parsed(text, "snapshot", _of_environment(environ)[0])
        split, threshold = given.get("max_split_size"), given.get("garbage_collection_threshold")
        divisions: Mapping[str, Any] = given.get("roundup_power2_divisions") or {}
        return replace(
            read,
            expandable_segments=bool(given.get("expandable_segments", read.expandable_segments)),
            max_split_size=read.max_split_size if split is None else split if split > 0 else None,
            garbage_collection_threshold=threshold or None,
            roundup_power2_divisions=(
                "[" + ",".join(f"{size}:{count}" for size, count in _by_size(divisions)) + "]"
                if any(divisions.values())
                else None
            ),
        )

    @property
    def divisions(self) -> tuple[int, ...] | None:
        """Into how many steps the sizes between two powers of two are rounded, for each of the 16
        intervals from 1 MiB on; None where none is."""
        if self.roundup_power2_divisions is None:
            return None
        divisions = _divisions(self.roundup_power2_divisions)
        return divisions if max(divisions) > 1 else None


def settings_in_force(torch: Any, environ: Mapping[str, str] = os.environ) -> AllocatorSettings:
    """The runtime's own word (torch 2.12 or later), else the environment's.

    The runtime tells the string that was set last. What it leaves out is taken from the environment; an
    option that was set at run time and is in neither cannot be known.

    ``torch`` is the imported module.
    """
    text, origin = _of_environment(environ)
    of_runtime = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if of_runtime is not None:
        try:
            return _parsed(str(of_runtime()), "runtime", text)
        except RuntimeError:  # another accelerator than CUDA, or none
            pass
    return _parsed(text, origin)


def settings_at(
    snapshot: Mapping[str, Any], otherwise: AllocatorSettings, environ: Mapping[str, str] = os.environ
) -> AllocatorSettings:
    """Those in force when a snapshot was taken; ``otherwise`` where it does not say.

    It knows them all, where the runtime tells the string that was set last alone.
    """
    given = snapshot.get("allocator_settings")
    if not given:
        return otherwise
    return replace(
        AllocatorSettings.of_snapshot(given, environ), text=otherwise.text, origin=otherwise.origin
    )


def _of_environment(environ: Mapping[str, str]) -> tuple[str, str]:
    for variable in ENVIRONMENT:
        if variable in environ:
            return environ[variable], variable
    return "", "default"


@lru_cache(maxsize=8)
def _parsed(text: str, origin: str, before: str = "") -> AllocatorSettings:
    """Each string once: it is asked for at every collection and hardly ever changes."""
    return AllocatorSettings.parse(text, origin, before)


@lru_cache(maxsize=8)
def _divisions(text: str) -> tuple[int, ...]:
    """As torch reads it: one number for all, or ``[256:1,512:2,>:8]``, whose first number stands for what
    is smaller too, and ``>`` for what is larger than the one before it."""
    if not text.startswith("["):
        return (_number(text, int) or 0,) * _INTERVALS
    divisions = [0] * _INTERVALS
    last: int | None = None
    for item in text.strip("[] ").split(","):
        size, _, count = (part.strip() for part in item.partition(":"))
        value = _number(count, int) or 0
        if size == ">":
            above = (last or 0) + 1  # so of 2.15; older releases begin one earlier
            divisions[above:] = [value] * (_INTERVALS - above)
            continue
        index = min(max((_number(size, int) or 1).bit_length() - 1, 0), _INTERVALS - 1)
        if last is None:
            divisions[:index] = [value] * index
        divisions[index] = value
        last = index
    return tuple(divisions)


def _by_size(divisions: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(divisions.items(), key=lambda item: _number(item[0], int) or 0)


def _is_true(text: str | None) -> bool:
    return text is not None and text.strip().lower() == "true"


def _mib(text: str | None) -> int | None:
    number = _number(text, int)
    return None if number is None else number * _MIB


def _number(text: str | None, kind: Callable[[str], N]) -> N | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None
