# SPDX-License-Identifier: Apache-2.0
"""A snapshot file, read and checked: what is wrong in it is said once, and what is left can be relied on.

Knows what `torch.cuda.memory._dump_snapshot` writes, and a bare list of segments; needs no torch.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

from .snapshot_pickle import PlainDataError, TooMuchError, load, printable

ALLOCATED, PENDING, FREE = "allocated", "pending_free", "free"
MAX_FILE = 256 << 20
MAX_BLOCKS = 1_000_000
"""Segments and blocks together."""
MAX_PLACES = 10_000
"""Pools and streams that differ: a process has a few, or some hundreds with CUDA graphs."""
MEMORY_FACTOR = 10
"""What is built of a file may take so many times ``max_file`` in memory. A memory history takes 8 times its
size, blocks 13 times theirs."""

_STATES = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,  # the name in torch's documentation
    "inactive": FREE,
}
_KINDS = ("small", "large")
_MAX_DEVICE = 1023
_MAX_ADDRESS = (1 << 64) - 1
_MAX_ALIKE = 16
_MAX_SETTINGS = 64
_MAX_SETTING = 1000
_KNOWN_SETTINGS: dict[str, tuple[type, ...]] = {
    "PYTORCH_CUDA_ALLOC_CONF": (str,),
    "max_split_size": (int,),
    "garbage_collection_threshold": (float, int),
    "expandable_segments": (bool,),
    "roundup_power2_divisions": (dict,),
}


_EXPECTED = "what torch.cuda.memory._dump_snapshot writes is expected"
_FOREIGN = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "a zip archive, as torch.save writes": re.compile(rb"PK\x03\x04"),
    "what torch.save of an old release writes": re.compile(rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\."),
    "JSON": re.compile(rb"(?:\xef\xbb\xbf)?\s*[\[{]\s*[\[{\"\d\]}]"),
}
"""What a file begins with that is something else."""


class SnapshotError(ValueError):
    """The file is no snapshot that can be shown. The message says what is wrong with it, and where."""


class Block(NamedTuple):
    """A piece of a segment: allocated, freed with a stream still to pass it (pending), or free."""

    address: int
    size: int
    state: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory held from the driver, wholly filled by its blocks in the order of their addresses."""

    device: int
    address: int
    size: int
    stream: int
    kind: str
    """``small`` or ``large``: which requests it serves."""
    pool: tuple[int, int] | None
    """(0, 0) is the default pool; others are those of CUDA graphs and MemPools. None of a release that does
    not tell them apart."""
    expandable: bool
    allocated: int
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A file's segments by device and address, and what it says of the allocator's settings."""

    segments: list[Segment]
    raw: list[Mapping[str, object]]
    """The same segments, in the same order, as the allocator told them."""
    settings: dict[str, object]
    """Texts (printable), numbers, booleans and dicts of numbers, by name. Empty where the file tells none."""
    file_size: int
    beside: Mapping[str, object] = field(default_factory=dict[str, object])
    """What else the file holds, unchecked."""


Progress = Callable[[float], None]


def read(file: Path, max_file: int = MAX_FILE, progress: Progress | None = None) -> Snapshot:
    """Reads and checks a snapshot file.

    Args:
        file: a regular file.
        max_file: bytes; a larger file is refused before it is read.
        progress: is told now and then which share of it is read.

    Raises:
        SnapshotError: anything that keeps it from being shown.
    """
    try:
        data = _content(file, max_file)
    except OSError as error:
        raise SnapshotError(error.strerror or str(error)) from None
    if not data:
        raise SnapshotError("the file is empty")
    return parse(data, max_file, progress)


def parse(data: bytes, max_file: int = MAX_FILE, progress: Progress | None = None) -> Snapshot:
    """Checks what such a file holds.

    Raises:
        SnapshotError: as for ``read``.
    """
    for what, begin in _FOREIGN.items():
        if begin.match(data):
            raise SnapshotError(f"no snapshot: it looks like {what}; {_EXPECTED}")
    if data[:1] != b"\x80":
        raise SnapshotError(f"no snapshot: it is not a pickle of protocol 2 or later; {_EXPECTED}")
    try:
        whole = load(data, MEMORY_FACTOR * max_file, progress)
    except TooMuchError as error:
        raise SnapshotError(f"{error} ({MEMORY_FACTOR} times --max-size)") from None
    except PlainDataError as error:
        raise SnapshotError(str(error)) from None
    return _snapshot(whole, len(data))


def _content(file: Path, max_file: int) -> bytes:
    # Non-blocking: opening a pipe must not wait for someone to write.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError("it is not a regular file")
        size = status.st_size
        if size > max_file:
            raise SnapshotError(
                f"the file has {_mib(size)} MiB; at most {_mib(max_file)} MiB are read (--max-size)"
            )
        return opened.read(size)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f}".removesuffix(".0")


def _snapshot(whole: object, file_size: int) -> Snapshot:
    settings: object = None
    beside: dict[str, object] = {}
    if isinstance(whole, dict):
        told = cast("dict[str, object]", whole)
        if "segments" not in told:
            keys = ", ".join(printable(key, 30) for key in list(told)[:5]) or "nothing"
            raise SnapshotError(f"no snapshot: a dict with {keys}, where 'segments' is expected")
        whole, settings = told["segments"], told.get("allocator_settings")
        beside = {name: value for name, value in told.items() if value is not whole and value is not settings}
    if not isinstance(whole, list):
        raise SnapshotError(f"no snapshot: {_kind_of(whole)}, where a list of segments is expected")
    room = MAX_BLOCKS
    pairs: list[tuple[Segment, Mapping[str, object]]] = []
    for number, raw in enumerate(cast("list[object]", whole)):
        if not isinstance(raw, dict):
            raise SnapshotError(f"segment {number} is {_kind_of(raw)}; it must be a dict")
        segment = _Fields(cast("dict[str, object]", raw), f"segment {number}").segment(room)
        room -= 1 + len(segment.blocks)
        pairs.append((segment, cast("dict[str, object]", raw)))
    pairs.sort(key=lambda pair: (pair[0].device, pair[0].address))
    for (one, _), (other, _) in pairwise(pairs):
        if one.device == other.device and one.address + one.size > other.address:
            raise SnapshotError(f"two segments of device {one.device} overlap at {other.address:#x}")
    _check_places(segment for segment, _ in pairs)
    return Snapshot(
        [segment for segment, _ in pairs], [raw for _, raw in pairs], _settings(settings), file_size, beside
    )


def _check_places(segments: Iterable[Segment]) -> None:
    """Refuses what no allocator tells: pools and streams without number, or such as collide as keys.

    Numbers can be chosen so, and each segment would be compared with all places. Texts cannot.
    """
    places: dict[str, tuple[object, ...]] = {}
    for segment in segments:
        # in the order of `allocator.snapshot` and `snapshot_map.Place`, whose keys these are
        place = (segment.device, segment.stream, segment.pool, segment.kind, segment.expandable)
        places.setdefault(repr(place), place)
        if len(places) > MAX_PLACES:
            raise SnapshotError(f"more than {MAX_PLACES:,} pools and streams; that many are read")
    pools = {repr(pool): pool for _, _, pool, _, _ in places.values()}
    for hashes in (map(hash, places.values()), map(hash, pools.values())):
        alike = Counter(hashes)
        if max(alike.values(), default=0) > _MAX_ALIKE:
            raise SnapshotError("its pools and streams have numbers that were chosen to take time")


class _Fields:
    """One dict of the file, its fields checked as they are asked for."""

    def __init__(self, fields: Mapping[str, object], where: str) -> None:
        self._fields = fields
        self._where = where

    def segment(self, room: int) -> Segment:
        address = self._whole("address", 0, _MAX_ADDRESS)
        size = self._whole("total_size", 1, _MAX_ADDRESS - address)
        raw = self._fields.get("blocks")
        if not isinstance(raw, list):
            raise self._wrong("blocks", "a list of blocks")
        blocks = cast("list[object]", raw)
        if len(blocks) >= room:
            raise SnapshotError(f"more than {MAX_BLOCKS:,} segments and blocks; that many are read")
        kind = self._one_of("segment_type", _KINDS)
        expandable = self._fields.get("is_expandable", False)
        if not isinstance(expandable, bool):
            raise self._wrong("is_expandable", "True or False")
        checked = self._blocks(blocks, address, size)
        for name, states in (("allocated_size", (ALLOCATED,)), ("active_size", (ALLOCATED, PENDING))):
            told = self._whole(name, 0, size)
            summed = sum(block.size for block in checked if block.state in states)
            if told != summed:
                raise SnapshotError(f"{self._where}: {name} is {told:,}; by its blocks it is {summed:,}")
        return Segment(
            device=self._whole("device", 0, _MAX_DEVICE),
            address=address,
            size=size,
            stream=self._whole("stream", -(1 << 63), _MAX_ADDRESS),
            kind=kind,
            pool=self._pool(),
            expandable=expandable,
            allocated=self._whole("allocated_size", 0, size),
            blocks=checked,
        )

    def _blocks(self, raw: list[object], address: int, size: int) -> list[Block]:
        blocks: list[Block] = []
        at, end = address, address + size
        for number, fields in enumerate(raw):
            if not isinstance(fields, dict):
                raise SnapshotError(f"{self._where}, block {number} is {_kind_of(fields)}; it must be a dict")
            told = cast("dict[str, object]", fields)
            length, state = told.get("size"), told.get("state")
            begin, asked = told.get("address", at), told.get("requested_size", 0)
            # The common case without a call: there may be a million.
            if (
                type(length) is int
                and 0 < length <= end - at
                and type(begin) is int
                and begin == at
                and type(asked) is int
                and 0 <= asked <= _MAX_ADDRESS
                and isinstance(state, str)
                and state in _STATES
            ):
                blocks.append(Block(at, length, _STATES[state]))
                at += length
            else:
                _Fields(told, f"{self._where}, block {number}").refuse_block(at, end)
        if at != end:
            raise SnapshotError(f"{self._where}: its blocks leave out {end - at:,} of its {size:,} bytes")
        return blocks

    def refuse_block(self, at: int, end: int) -> None:
        self._whole("size", 1, end - at)
        for name, least, most in (("address", at, at), ("requested_size", 0, _MAX_ADDRESS)):
            if name in self._fields:
                self._whole(name, least, most)
        self._one_of("state", tuple(_STATES))

    def _pool(self) -> tuple[int, int] | None:
        if "segment_pool_id" not in self._fields:
            return None
        told = self._fields["segment_pool_id"]
        if isinstance(told, tuple):
            pair = cast("tuple[object, ...]", told)
            if len(pair) == 2:
                first, second = pair
                if (
                    type(first) is int
                    and type(second) is int
                    and 0 <= first <= _MAX_ADDRESS
                    and 0 <= second <= _MAX_ADDRESS
                ):
                    return first, second
        raise self._wrong("segment_pool_id", f"two whole numbers from 0 to {_MAX_ADDRESS:#x}")

    def _whole(self, name: str, least: int, most: int) -> int:
        value = self._fields.get(name)
        if type(value) is not int or not least <= value <= most:
            allowed = f"{least:#x}" if least == most else f"a whole number from {least:#x} to {most:#x}"
            raise self._wrong(name, allowed)
        return value

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self._wrong(name, " or ".join(allowed))
        return value

    def _wrong(self, name: str, allowed: str) -> SnapshotError:
        if name not in self._fields:
            return SnapshotError(f"{self._where} has no {name}")
        return SnapshotError(f"{self._where}: {name} is {_shown(self._fields[name])}; it must be {allowed}")


def _settings(told: object) -> dict[str, object]:
    """The settings that are plain values; those that figures depend on must be what they are in torch."""
    if told is None:
        return {}
    if not isinstance(told, dict):
        raise SnapshotError(f"allocator_settings is {_kind_of(told)}; it must be a dict")
    given = cast("dict[str, object]", told)
    settings: dict[str, object] = {}
    for name, value in list(given.items())[:_MAX_SETTINGS]:
        shown = printable(name, 50)
        known = _KNOWN_SETTINGS.get(name)
        if known is not None and type(value) not in known:
            allowed = " or ".join(kind.__name__ for kind in known)
            raise SnapshotError(
                f"allocator_settings: {name} is {_shown(value)}; it must be of type {allowed}"
            )
        if isinstance(value, dict):
            inner = list(cast("dict[str, object]", value).items())[:_MAX_SETTINGS]
            settings[shown] = {printable(key, 20): count for key, count in inner if type(count) is int}
        elif isinstance(value, str):
            settings[shown] = printable(value, _MAX_SETTING)
        elif isinstance(value, (bool, int, float)):
            settings[shown] = value
    return settings


def _shown(value: object) -> str:
    """A value in a message: never walked into, it may hold itself."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:#x}" if isinstance(value, int) and abs(value) > 1 << 20 else str(value)
    if isinstance(value, str):
        return f"'{printable(value, 40)}'"
    return _kind_of(value)


def _kind_of(value: object) -> str:
    if isinstance(value, (dict, list, tuple)):
        count = len(cast("list[object]", value))
        return f"a {type(cast('object', value)).__name__} of {count:,}"
    return _shown(value)
