# SPDX-License-Identifier: Apache-2.0
"""Evidence from the process itself, and the file that carries it: a snapshot with what is known beside it.

The file is torch's own snapshot, so memory_viz and `torchmem snapshot` read it too.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple, cast

from ..allocator.pools import living, of_classes
from ..allocator.reading import AllocatorReading, DriverMemory
from ..allocator.settings import ENVIRONMENT, SEEN, AllocatorSettings, SettingsSeen
from ..allocator.snapshot import Limits, PoolId, never_released
from ..allocator.source import NATIVE, UNCACHED, Source, initialised_torch
from .evidence import Evidence, variables_of
from .overhead import Activity, DriverTimes, times_of_trace
from .rules import Advice, advise

KEY = "torchmem"
"""What the file holds beside torch's own keys."""
_LARGEST, _LONGEST, _MOST_POOLS = 1 << 63, 10_000, 10_000
_DEVICES = 1024
_COUNTS = tuple(each.name for each in fields(Activity) if each.name != "seconds")


class NothingToSeeError(RuntimeError):
    """There is no evidence to be had; the message says why."""


class Examined(NamedTuple):
    """One device, and what to change."""

    evidence: Evidence
    advice: list[Advice]


def examine(
    *, seconds: float = 0.0, need: int | None = None, times: DriverTimes | None = None
) -> list[Examined]:
    """Looks at each device of this process, and says what to change: nothing where all is well.

    Takes a snapshot, which holds the interpreter while it lasts: for a quiet moment. Counts are those of the
    next ``seconds``, or since the process began. ``need`` is the largest request that must succeed, in bytes.

    Raises:
        NothingToSeeError: CUDA is not initialised, or the backend tells nothing.
    """
    return [Examined(each, advise(each)) for each in evidences(told(seconds), need=need, times=times)]


def dump(file: str | os.PathLike[str], *, seconds: float = 0.0) -> None:
    """Writes what ``torchmem doctor --snapshot FILE`` reads, for its owner alone; what is there is replaced.

    Raises:
        NothingToSeeError: CUDA is not initialised, or the backend tells nothing.
        OSError: it cannot be written.
    """
    whole = told(seconds)
    partial = f"{os.fspath(file)}.{os.getpid()}.partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
            pickle.dump(whole, opened, protocol=4)
        os.replace(partial, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def told(seconds: float = 0.0) -> dict[str, Any]:
    """A snapshot of this process with what is known beside it, as plain data."""
    torch = initialised_torch()
    if torch is None:
        raise NothingToSeeError("CUDA is not initialised in this process")
    source = Source(torch)
    if source.backend == UNCACHED:
        return {"segments": [], KEY: {"backend": UNCACHED, "devices": {"0": {}}}}
    if source.backend != NATIVE:
        raise NothingToSeeError(f"the backend {source.backend} tells nothing of its blocks")
    used = source.used_devices()
    before = {index: source.read(index) for index in used}
    if seconds:
        sleep(seconds)
    after = {index: source.read(index) for index in used}
    whole = source.snapshot()
    whole.setdefault("device_traces", [[] for _ in range(max(used, default=-1) + 1)])
    lives = _Lives.now(torch)
    whole[KEY] = {
        "torch": source.version,
        "backend": source.backend,
        "settings": source.settings().text,
        "variables": variables_of(os.environ),
        **_set_before(source.settings().text),
        "expandable_blocked": _expandable_blocked(lives),
        "graph_pools": _graph_pools(lives),
        "devices": {
            str(index): {
                **_limits(source, after[index]),
                **asdict(
                    Activity.between(before[index], after[index])
                    if seconds
                    else Activity.since_start(after[index], _age())
                ),
            }
            for index in used
        },
    }
    return whole


def evidences(
    whole: Mapping[str, Any], *, need: int | None = None, times: DriverTimes | None = None
) -> list[Evidence]:
    """The evidence of each device, from what ``told`` gives, or torch's own snapshot alone.

    Raises:
        NothingToSeeError: what is told beside the snapshot is not of the kind that it must be.
    """
    about = _Told(whole.get(KEY, {}), KEY)
    variables = about.texts("variables")
    given = whole.get("allocator_settings")
    if isinstance(given, dict):
        settings = AllocatorSettings.of_snapshot(cast("dict[str, Any]", given), variables, _seen(about))
    else:
        before = next(iter(variables.values()), "")
        settings = AllocatorSettings.parse(about.text("settings") or before, "file", before)
    segments: list[Mapping[str, Any]] = whole["segments"]
    devices = about.dicts("devices")
    if not isinstance(given, dict) and any(segment.get("is_expandable") for segment in segments):
        settings = replace(settings, expandable_segments=True)
    of_device: dict[int, list[Mapping[str, Any]]] = {index: [] for index in devices}
    for segment in segments:
        of_device.setdefault(segment["device"], []).append(segment)
    given_traces = whole.get("device_traces", ())
    if not isinstance(given_traces, (list, tuple)):
        raise NothingToSeeError(f"device_traces is a {type(given_traces).__name__}; it must be a list")
    traces = cast("Sequence[Any]", given_traces)
    recorded = [id(trace) for trace in traces if trace]
    if len(set(recorded)) != len(recorded):  # as many times the memory, for nothing
        raise NothingToSeeError("device_traces: two devices have the same list")
    found: list[Evidence] = []
    for index in sorted(of_device):
        known = devices.get(index, _Told({}, KEY))
        history = _history(traces[index]) if index < len(traces) else []
        total, free = known.number("total"), known.number("free")
        driver = None if total is None or free is None else DriverMemory(int(free), int(total))
        reserved = known.number("reserved")
        found.append(
            Evidence(
                index,
                settings,
                of_device[index],
                Limits(
                    driver,
                    known.number("fraction"),
                    None if reserved is None else int(reserved),
                    untouched=known.number("untouched") == 1,
                ),
                about.text("backend") or NATIVE,
                variables,
                _activity(known),
                times or times_of_trace(history),
                need,
                about.text("expandable_blocked"),
                [entry["size"] for entry in history if entry.get("action") == "alloc"],
                _release(about.text("torch")),
                about.pools("graph_pools"),
            )
        )
    return found


_BEFORE, _IN_DOUBT, _PAGES_CHANGED = "settings_before", "settings_in_doubt", "pages_changed"


def _set_before(text: str) -> dict[str, str | int]:
    """What was in force before the options that torch tells: it keeps most of that."""
    before, in_doubt = SEEN.before(text, os.environ)
    return {_BEFORE: before, _IN_DOUBT: int(in_doubt), _PAGES_CHANGED: int(SEEN.pages_changed)}


def _seen(about: _Told) -> SettingsSeen | None:
    before = about.text(_BEFORE)
    if before is None:
        return None
    last = about.text("settings") or ""
    return SettingsSeen.of(before, last, bool(about.number(_IN_DOUBT)), bool(about.number(_PAGES_CHANGED)))


def _history(entries: object) -> list[Mapping[str, Any]]:
    """The entries of a memory history that are as torch writes them."""
    found: list[Mapping[str, Any]] = []
    for entry in cast("Sequence[Any]", entries) if isinstance(entries, (list, tuple)) else ():
        if isinstance(entry, dict):
            fields_of = cast("dict[str, Any]", entry)
            size, at = fields_of.get("size"), fields_of.get("time_us")
            if type(size) is int and 0 <= size < _LARGEST and type(at) is int and 0 <= at < _LARGEST:
                found.append(fields_of)
    return found


def _release(version: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", version or "")
    return None if found is None else (int(found[1]), int(found[2]))


def _activity(known: _Told) -> Activity | None:
    counts = {name: known.number(name) for name in _COUNTS}
    if all(count is None for count in counts.values()):
        return None
    whole = {name: None if count is None else int(count) for name, count in counts.items()}
    return Activity(known.number("seconds"), **whole)


class _Told:
    """A dict of a file that nobody has to trust: its values are what they must be, or it is said."""

    def __init__(self, given: object, where: str) -> None:
        self._given = self._dict(given, where)
        self._where = where

    def _dict(self, given: object, where: str) -> dict[object, object]:
        if not isinstance(given, dict):
            raise NothingToSeeError(f"{where} is a {type(given).__name__}; it must be a dict")
        return cast("dict[object, object]", given)

    def number(self, name: str) -> float | None:
        value = self._given.get(name)
        if value is not None and not isinstance(value, (int, float)):
            raise NothingToSeeError(f"{self._where}: {name} is a {type(value).__name__}; it must be a number")
        if value is not None and not abs(value) < _LARGEST:
            raise NothingToSeeError(f"{self._where}: {name} is beyond any figure of a device")
        return value

    def text(self, name: str) -> str | None:
        value = self._given.get(name)
        if value is not None and not isinstance(value, str):
            raise NothingToSeeError(f"{self._where}: {name} is a {type(value).__name__}; it must be a text")
        if value is not None and len(value) > _LONGEST:
            raise NothingToSeeError(f"{self._where}: {name} has {len(value):,} letters; at most {_LONGEST:,}")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """By name, in the order of precedence."""
        inner = _Told(self._given.get(name, {}), f"{self._where}: {name}")
        known = ((variable, inner.text(variable)) for variable in ENVIRONMENT)
        return {variable: value for variable, value in known if value is not None}

    def pools(self, name: str) -> frozenset[PoolId] | None:
        given: Any = self._given.get(name)
        if given is None:
            return None
        wrong = NothingToSeeError(f"{self._where}: {name} must be pairs of numbers, at most {_MOST_POOLS:,}")
        if not isinstance(given, (list, tuple)) or len(cast("Sequence[Any]", given)) > _MOST_POOLS:
            raise wrong
        pools: set[PoolId] = set()
        for pair in cast("Sequence[Any]", given):
            match pair:
                case [int(first), int(second)] if 0 <= first < 2 * _LARGEST and 0 <= second < 2 * _LARGEST:
                    pools.add((first, second))
                case _:
                    raise wrong
        return frozenset(pools)

    def dicts(self, name: str) -> dict[int, _Told]:
        where = f"{self._where}: {name}"
        inner = self._dict(self._given.get(name, {}), where)
        return {
            int(index): _Told(value, f"{where} {index}")
            for index, value in inner.items()
            if isinstance(index, str) and index.isascii() and index.isdecimal() and len(index) < 5
            if int(index) < _DEVICES
        }


def _limits(source: Source, reading: AllocatorReading) -> dict[str, int | float | None]:
    driver = source.driver_memory(reading.device)
    return {
        "total": driver.total,
        "free": driver.free,
        "fraction": source.memory_fraction(reading.device),
        "reserved": reading.reserved,
        "untouched": int(never_released(reading.statistics)),
    }


def _age() -> float | None:
    """Seconds since this process began; None where that is not told."""
    try:
        up = float(Path("/proc/uptime").read_text().split()[0])
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return up - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


class _Lives(NamedTuple):
    """The objects of torch's that live now and hold memory of their own."""

    pools: list[Any]
    allocators: list[Any]
    graphs: list[Any]

    @classmethod
    def now(cls, torch: Any) -> _Lives:
        """By one walk over the heap, which holds the interpreter."""
        memory = torch.cuda.memory
        kinds = [
            () if kind is None else (kind,)
            for kind in (
                getattr(memory, "MemPool", None),
                getattr(memory, "CUDAPluggableAllocator", None),
                torch.cuda.CUDAGraph,
            )
        ]
        found = living(*(each for kind in kinds for each in kind))
        return cls(*(of_classes(found, kind) for kind in kinds))


def _expandable_blocked(lives: _Lives) -> str | None:
    """Why expandable segments cannot be used in this process."""
    if not sys.platform.startswith("linux"):
        return f"there are none on {sys.platform}"
    if lives.pools and lives.allocators:
        return "a memory pool with an allocator of its own does not go with them"
    return None


def _graph_pools(lives: _Lives) -> list[tuple[int, int]]:
    """Of the CUDA graphs that have been captured."""
    pools: set[tuple[int, int]] = set()
    for graph in lives.graphs:
        with suppress(RuntimeError):  # it was not captured
            pools.add(tuple(graph.pool()))
    return sorted(pools)
