# SPDX-License-Identifier: Apache-2.0
"""What torch refuses in the variables that set its allocator, told without torch.

Nothing of CUDA works in a process that was started with one of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import NamedTuple

KNOWN_UNTIL = (2, 15)
"""The last release whose options these are; a later one may know more."""
_LARGE_SEGMENT = 20
"""MiB, until ``large_segment_size_mb`` stands before."""
_ITEM = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)")
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class _Kind(NamedTuple):
    """What a value may be."""

    allowed: str
    is_allowed: Callable[[str], bool]


def _whole(text: str) -> int | None:
    """As torch reads it: digits at the beginning count; what is negative becomes very large."""
    found = _WHOLE.match(text)
    return None if found is None else int(found[0]) % (1 << 64)


def _at_least(least: int) -> _Kind:
    def is_allowed(text: str) -> bool:
        value = _whole(text)
        return value is not None and value >= least

    return _Kind(f"a whole number, {least} or more" if least else "a whole number", is_allowed)


def _between(allowed: str, accepts: Callable[[float], bool]) -> _Kind:
    def is_allowed(text: str) -> bool:
        found = _NUMBER.match(text)
        return found is not None and accepts(float(found[0]))

    return _Kind(allowed, is_allowed)


def _one_of(*values: str) -> _Kind:
    def is_allowed(text: str) -> bool:
        return text in values

    return _Kind(" or ".join(values), is_allowed)


def _anything(_: str) -> bool:
    return True


def _is_power(text: str) -> bool:
    value = _whole(text) or 0
    return value > 0 and value & (value - 1) == 0


def _is_few(text: str) -> bool:
    return _is_power(text) and (_whole(text) or 0) <= 128


def _are_divisions(text: str) -> bool:
    if not text.startswith("["):
        return _is_power(text)
    for item in text.strip("[]").split(","):
        size, colon, count = item.partition(":")
        if not colon or not (size == ">" or _is_power(size)) or not (count == "0" or _is_power(count)):
            return False
    return True


_TRUTH = _one_of("True", "False")
_ANY = _Kind("", _anything)
_OPTIONS = {
    "backend": _one_of("native", "cudaMallocAsync"),
    "max_split_size_mb": _at_least(_LARGE_SEGMENT),
    "max_non_split_rounding_mb": _at_least(_LARGE_SEGMENT),
    "large_segment_size_mb": _at_least(11),
    "garbage_collection_threshold": _between("between 0 and 1, without either", lambda value: 0 < value < 1),
    "per_process_memory_fraction": _between("from 0 to 1", lambda value: 0 <= value <= 1),
    "roundup_power2_divisions": _Kind("a power of 2, or [size:divisions,…] of powers of 2", _are_divisions),
    "expandable_segments": _TRUTH,
    "expandable_segments_reserve": _ANY,
    "expandable_segments_reserve_by_class": _ANY,
    "release_lock_on_cudamalloc": _TRUTH,
    "release_lock_on_hipmalloc": _TRUTH,
    "throw_on_cudamalloc_oom": _TRUTH,
    "graph_capture_record_stream_reuse": _TRUTH,
    "pinned_use_background_threads": _TRUTH,
    "pinned_use_cuda_host_register": _TRUTH,
    "pinned_use_hip_host_register": _TRUTH,
    "pinned_num_register_threads": _Kind("a power of 2, 128 at most", _is_few),
    "pinned_free_catch_all": _TRUTH,
    "pinned_reserve_segment_size_mb": _at_least(1),
    "pinned_max_round_threshold_mb": _at_least(0),
    "pinned_max_cached_size_mb": _at_least(0),
}


def refused(text: str) -> Iterator[tuple[str, bool]]:
    """What torch refuses in an option string, one line each, and whether it is for an unknown name."""
    rest = "".join(text.split())
    options = dict(_OPTIONS)
    while rest:
        found = _ITEM.match(rest)
        if found is None:
            yield f"{rest} is no option:value", False
            return
        rest = rest[found.end() :]
        name, value = found[1], found[2]
        kind = options.get(name)
        if kind is None:
            near = get_close_matches(name, _OPTIONS, 1)
            yield f"there is no option {name}{f'; did you mean {near[0]}?' if near else ''}", True
        elif not kind.is_allowed(value):
            yield f"{name}:{value} must be {kind.allowed}", False
        elif name == "large_segment_size_mb":
            least = _at_least(_whole(value) or 0)
            options |= {"max_split_size_mb": least, "max_non_split_rounding_mb": least}
