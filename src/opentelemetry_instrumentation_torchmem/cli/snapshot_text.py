# SPDX-License-Identifier: Apache-2.0
"""A snapshot in words and figures, for a terminal. The figures are `allocator.snapshot`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from ..allocator.rules import LARGE, SMALL, Between
from ..allocator.snapshot import ABSENT as WHY
from ..allocator.snapshot import DeviceMap, Place
from .screen import ABSENT, percent, size
from .snapshot_file import FREE, Segment, Snapshot
from .snapshot_map import place_label

_STEPS = (512, 4 << 10, 64 << 10, 1 << 20, 10 << 20, 20 << 20, 100 << 20, 1 << 30, 10 << 30)
"""Bounds of the distribution of block sizes: the allocator's own, and round ones between."""
_LINE = 100


def summary(name: str, snapshot: Snapshot, devices: Mapping[int, DeviceMap], rows: int) -> Iterator[str]:
    """The summary's lines.

    Args:
        name: what to call the file; fit to print.
        snapshot: what the file holds.
        devices: what the snapshot's analysis says.
        rows: at most so many pools and streams are told of each device, those that hold most.
    """
    blocks = sum(len(segment.blocks) for segment in snapshot.segments)
    segments = len(snapshot.segments)
    yield f"{name}: {size(snapshot.file_size)}, {_many(segments, 'segment')}, {_many(blocks, 'block')}"
    by_device: dict[int, list[Segment]] = {}
    for segment in snapshot.segments:
        by_device.setdefault(segment.device, []).append(segment)
    if not devices:
        yield "Nothing was reserved when it was taken."
    for number, device in sorted(devices.items()):
        yield ""
        yield from _device(device)
        yield ""
        yield from _places(device.places, rows)
        yield ""
        yield from _distribution(by_device.get(number, ()))
    if snapshot.settings:
        yield ""
        yield from _settings(snapshot.settings)


def _device(device: DeviceMap) -> Iterator[str]:
    def line(words: str, value: str, of_reserved: int | None = None, why: str | None = None) -> str:
        share = ""
        if of_reserved is not None and device.reserved:
            share = percent(of_reserved / device.reserved)
        reason = "" if why is None else f"  ({_words(why)})"
        return f"  {words:<34}{value:>22}  {share:>7}{reason}".rstrip()

    split = device.split_free
    yield f"cuda:{device.device}"
    yield line("reserved", size(device.reserved))
    yield line("allocated", size(device.allocated), device.allocated)
    yield line("pending free", size(device.pending_free), device.pending_free)
    why = device.absent.get("split_free")
    if split is None and device.cached is not None:
        cached = device.cached
        rest = Between(device.free - cached.most, device.free - cached.least)
        yield line("free in partly used segments", _between(rest), why=why)
        yield line("free as whole segments or pages", _between(cached), why=why)
    else:
        yield line("free in partly used segments", size(split), split, why)
        yield line("free as whole segments or pages", size(device.cached_free), device.cached_free, why)
    yield line("largest hole, in any pool", size(device.largest_hole))
    yield "  largest request served without the driver, default pool and stream"
    served = device.free_block_largest or {}
    for kind in (LARGE, SMALL):
        figure = served.get(kind)
        why = None if figure is not None and figure.exact else device.absent.get("free_block.largest")
        yield line(f"  {kind}", ABSENT if figure is None else _between(figure), why=why)
    told = (device.absent.get(figure) for figure in ("split_free", "free_block.largest"))
    for reason in sorted({reason for reason in told if reason is not None}):
        yield f"  ({_words(reason)}) {WHY[reason]}"


def _words(reason: str) -> str:
    return reason.replace("_", " ")


def _between(figure: Between) -> str:
    return size(figure.least) if figure.exact else f"{size(figure.least)} to {size(figure.most)}"


def _places(places: Sequence[Place], rows: int) -> Iterator[str]:
    chosen = sorted(places, key=lambda place: -place.reserved)[:rows]
    labels = [place_label(place.pool, place.stream, place.kind, place.expandable) for place in chosen]
    width = max(len(label) for label in labels)
    yield f"  {'':<{width}}   reserved  allocated    pending       free  in blocks    largest"
    for label, place in zip(labels, chosen, strict=True):
        yield (
            f"  {label:<{width}}  {size(place.reserved):>9}  {size(place.allocated):>9}  "
            f"{size(place.pending_free):>9}  {size(sum(place.free)):>9}  {len(place.free):>9,}  "
            f"{size(max(place.free, default=None)):>9}"
        )
    if len(places) > len(chosen):
        left = sum(place.reserved for place in places) - sum(place.reserved for place in chosen)
        yield f"  {len(places) - len(chosen):,} more with {size(left)} reserved (--top)"


def _distribution(segments: Iterable[Segment]) -> Iterator[str]:
    """How many blocks of which size are in use and free."""
    counts = {free: [[0, 0] for _ in range(len(_STEPS) + 1)] for free in (True, False)}
    for segment in segments:
        for block in segment.blocks:
            step = next((number for number, most in enumerate(_STEPS) if block.size <= most), len(_STEPS))
            cell = counts[block.state == FREE][step]
            cell[0] += 1
            cell[1] += block.size
    yield f"  {'block size':<16}{'in use':>10}{'bytes':>11}{'free':>10}{'bytes':>11}"
    for step, (used, free) in enumerate(zip(counts[False], counts[True], strict=True)):
        if not used[0] and not free[0]:
            continue
        bound = f"up to {size(_STEPS[step])}" if step < len(_STEPS) else "more"
        yield f"  {bound:<16}{used[0]:>10,}{size(used[1]):>11}{free[0]:>10,}{size(free[1]):>11}"


def _settings(settings: Mapping[str, object]) -> Iterator[str]:
    line = "allocator settings:"
    for name, value in settings.items():
        if isinstance(value, dict):
            divisions = [f"{of}:{count}" for of, count in cast("dict[str, int]", value).items() if count]
            shown = "[" + ",".join(divisions) + "]" if divisions else ABSENT
        else:
            shown = ABSENT if value == "" else str(value)
        item = f" {name}={shown}"
        if len(line) + len(item) > _LINE:
            yield line
            line = " "
        line += item
    yield line


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
