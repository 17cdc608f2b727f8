# SPDX-License-Identifier: Apache-2.0
"""A snapshot as a picture: one SVG, alone or in a page, without scripts and without anything from elsewhere.

A group of segments is drawn to one scale, each segment in a row. A segment with more blocks than a row can
show runs over several; groups of very many segments put several in a row. Blocks of less than a pixel are
drawn together, and where their states differ the pixel says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from .screen import size
from .snapshot_file import ALLOCATED, PENDING, Segment
from .snapshot_map import CACHED_FREE, SPLIT_FREE, UNTOLD_FREE, Group, pieces

MAX_GROUPS = 200
"""Groups drawn: those that hold most."""
MIXED = "mixed"
LEGEND = {
    ALLOCATED: "allocated",
    PENDING: "freed, waiting for a stream",
    SPLIT_FREE: "free in a partly used segment",
    CACHED_FREE: "free, a whole segment or page",
    UNTOLD_FREE: "free, which of the two is not told",
    MIXED: "of several states, each less than a pixel",
}

# Lengths are tenths of a pixel: whole numbers make short paths.
_PIXEL = 10
_WIDTH = 1200 * _PIXEL
_MARGIN = 20 * _PIXEL
_LABELS = 130 * _PIXEL
_GAP = 3 * _PIXEL  # between segments in a row
_SEAM = 6  # between blocks
_ROWS = 600  # in a group, more only where its segments would not be seen
_LONG_ROWS = 256  # of segments that run over several rows
_CROWDED = 200  # blocks in a row
_HEIGHTS = (
    (60, 14, 3),
    (200, 8, 2),
    (1 << 62, 4, 1),
)  # up to so many rows: a row's height, and what is between
_TITLES = 4000  # segments that say what they are when pointed at

_STYLE = """
:root{color-scheme:light dark}
.map{--ink:#1f2328;--quiet:#59636e;--allocated:#3f7fc1;--pending_free:#12a5b4;--split_free:#e0523f;
--cached_free:#a9d8a4;--untold_free:#d9b44a;--mixed:#8e5ba6;font-family:system-ui,sans-serif;fill:var(--ink)}
@media(prefers-color-scheme:dark){.map{--ink:#e6edf3;--quiet:#9198a1;--allocated:#5a9be0;--pending_free:#39c5cf;
--split_free:#f0624d;--cached_free:#3d7a45;--untold_free:#a3842f;--mixed:#a97bc4}}
.map path{fill:none;stroke-width:var(--row)}
.map .device{font-size:200px;font-weight:600}
.map .place{font-size:140px;font-weight:600}
.map .quiet{font-size:120px;font-weight:400;fill:var(--quiet)}
.map .begin{fill:var(--quiet)}
.map .mark{fill:none;stroke:var(--ink);stroke-width:20}
.map .found{font-size:115px;font-weight:600;dominant-baseline:central}
.map .point{fill:transparent}
""" + "\n".join(
    f".map .{look}{{stroke:var(--{look})}}.map .{look}-key{{fill:var(--{look})}}" for look in LEGEND
)
_PAGE_STYLE = """
body{margin:24px;font-family:system-ui,sans-serif;background:#fff;color:#1f2328}
summary{margin-left:20px}pre{margin-left:20px;overflow-x:auto;font-size:13px;line-height:1.4}
svg{width:100%;max-width:1700px;height:auto;display:block}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
"""
_ALONE_STYLE = """
.ground{fill:#fff}@media(prefers-color-scheme:dark){.ground{fill:#0d1117}}
"""


class _Drawn(NamedTuple):
    markup: str
    height: int


def page(name: str, groups: Sequence[Group], summary: Iterable[str]) -> str:
    """The picture in an HTML page, the summary above it."""
    picture = _svg(name, groups, ground=False)
    words = "\n".join(summary)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(name)}</title><style>{_PAGE_STYLE}</style></head>\n"
        f"<body><details><summary>Figures of {escape(name)}</summary><pre>{escape(words)}</pre></details>\n"
        f"{picture}\n</body></html>\n"
    )


def svg(name: str, groups: Sequence[Group]) -> str:
    """The picture alone."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + _svg(name, groups, ground=True) + "\n"


def _svg(name: str, groups: Sequence[Group], *, ground: bool) -> str:
    parts: list[str] = []
    y = _MARGIN

    def put(drawn: _Drawn) -> None:
        nonlocal y
        parts.append(f'<g transform="translate({_MARGIN} {y})">{drawn.markup}</g>')
        y += drawn.height

    put(_legend())
    chosen = sorted(groups, key=lambda group: -group.reserved)[:MAX_GROUPS]
    kept = {group.place for group in chosen}
    titles = _TITLES
    for _, of_device in groupby(groups, lambda group: group.place.device):
        whole = list(of_device)
        drawn = [group for group in whole if group.place in kept]
        if drawn:
            put(_device(whole))
        for group in drawn:
            put(_group(group, titled=len(group.segments) <= titles))
            titles -= len(group.segments)
    if len(groups) > len(chosen):
        left = sum(group.reserved for group in groups) - sum(group.reserved for group in chosen)
        put(_words("quiet", f"{len(groups) - len(chosen):,} more pools and streams with {size(left)}", 200))
    if not groups:
        put(_words("quiet", "Nothing was reserved.", 200))

    width, height = _WIDTH + _LABELS + 2 * _MARGIN, y + _MARGIN
    back = f'<rect class="ground" width="{width}" height="{height}"/>' if ground else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width // _PIXEL}" height="{height // _PIXEL}">'
        f"<title>Memory map of {escape(name)}</title>"
        f"<style>{_STYLE}{_ALONE_STYLE if ground else ''}</style>{back}{''.join(parts)}</svg>"
    )


def _words(style: str, text: str, height: int) -> _Drawn:
    return _Drawn(f'<text class="{style}" y="{height * 2 // 3}">{escape(text)}</text>', height)


def _legend() -> _Drawn:
    parts: list[str] = []
    x = 0
    for look, words in LEGEND.items():
        parts.append(f'<rect class="{look}-key" x="{x}" y="20" width="120" height="120"/>')
        parts.append(f'<text class="quiet" x="{x + 180}" y="125">{escape(words)}</text>')
        x += 340 + 63 * len(words)
    return _Drawn("".join(parts), 220)


def _device(groups: Sequence[Group]) -> _Drawn:
    held = [group for group in groups if group.largest is not None]
    words = f"{size(sum(group.reserved for group in groups))} reserved"
    best = max(held, key=_largest, default=None)
    if best is not None:
        words += f", the largest free block {size(_largest(best))}: {best.place.label}"
    return _Drawn(
        f'<text class="device" y="330">cuda:{groups[0].place.device}'
        f'<tspan class="quiet" dx="120">{escape(words)}</tspan></text>',
        430,
    )


def _largest(group: Group) -> int:
    return 0 if group.largest is None else group.largest.size


class _Chunk(NamedTuple):
    """A part of a segment in a row."""

    segment: Segment
    begin: int
    """Address."""
    end: int
    row: int
    x: int


def _group(group: Group, *, titled: bool) -> _Drawn:
    segments = sorted(group.segments, key=lambda segment: (-segment.size, segment.address))
    span = _span(segments, group.blocks)
    chunks = list(_layout(segments, span))
    rows = chunks[-1].row + 1
    height, between = next((high, low) for most, high, low in _HEIGHTS if rows <= most)
    row_height, pitch = height * _PIXEL, (height + between) * _PIXEL
    top = 300

    paths: dict[str, list[str]] = {look: [] for look in LEGEND}
    marks: list[str] = []
    long = segments[0].size > span
    found = False
    parts: list[tuple[int, int, str]] = []
    for chunk in chunks:
        y = top + chunk.row * pitch
        if chunk.begin == chunk.segment.address:
            parts = list(pieces(chunk.segment, group.rules))
        _draw(parts, chunk, span, y + row_height // 2, paths)
        if long and chunk.begin == chunk.segment.address:
            marks.append(f'<rect class="begin" x="-90" y="{y}" width="40" height="{row_height}"/>')
        if titled:
            marks.append(_title(chunk, span, y, row_height))
        block = group.largest
        if block is not None and block.address < chunk.end and block.address + block.size > chunk.begin:
            x = chunk.x + _scaled(max(block.address, chunk.begin) - chunk.begin, span)
            end = chunk.x + _scaled(min(block.address + block.size, chunk.end) - chunk.begin, span)
            width = max(end - x, 3 * _PIXEL)
            marks.append(f'<rect class="mark" x="{x}" y="{y}" width="{width}" height="{row_height}"/>')
            if not found:
                found = True
                marks.append(
                    f'<text class="found" x="{_WIDTH + 100}" y="{y + row_height // 2}">'
                    f"\N{BLACK LEFT-POINTING SMALL TRIANGLE} {escape(size(block.size))} free</text>"
                )
    count = len(group.segments)
    words = (
        f"{size(group.reserved)} in {count:,} segment{'' if count == 1 else 's'}, {group.blocks:,} blocks"
        f" \N{MIDDLE DOT} a full row is {size(span)}"
    )
    if long:
        words += " \N{MIDDLE DOT} a tick where a segment begins"
    if group.largest is not None:
        words += f" \N{MIDDLE DOT} largest free block {size(group.largest.size)}, outlined"
    markup = (
        f'<text class="place" y="170">{escape(group.place.label)}'
        f'<tspan class="quiet" dx="120">{escape(words)}</tspan></text>'
        f'<g style="--row:{row_height}px">'
        + "".join(f'<path class="{look}" d="{"".join(path)}"/>' for look, path in paths.items() if path)
        + f"</g>{''.join(marks)}"
    )
    return _Drawn(markup, top + rows * pitch + 150)


def _span(segments: Sequence[Segment], blocks: int) -> int:
    """The bytes that a full row stands for."""
    span = segments[0].size
    rows = len(segments)
    while blocks > _CROWDED * rows and span > 1 << 20:
        finer = sum(-(-segment.size * 2 // span) for segment in segments)
        if finer > _LONG_ROWS:
            break
        span, rows = -(-span // 2), finer
    if rows > _ROWS:
        most = segments[0].size * (_WIDTH // _PIXEL)  # where the largest segment is a pixel
        while span < most and sum(_room(segment.size, span) for segment in segments) > _ROWS * _WIDTH:
            span *= 2
    return span


def _room(length: int, span: int) -> int:
    """What a segment takes of a row, with the gap behind it."""
    return max(_PIXEL, _scaled(length, span)) + _GAP


def _layout(segments: Sequence[Segment], span: int) -> Iterator[_Chunk]:
    """Rows from the top, each filled from the left with whole segments; a longer one begins its own."""
    share = len(segments) > _ROWS
    row, x = -1, _WIDTH + 1
    for segment in segments:
        begin, end = segment.address, segment.address + segment.size
        while begin < end:
            upto = min(end, begin + span)
            room = _room(upto - begin, span)
            if not share or begin > segment.address or x + room - _GAP > _WIDTH:
                row, x = row + 1, 0
            yield _Chunk(segment, begin, upto, row, x)
            x += room
            begin = upto


def _scaled(length: int, span: int) -> int:
    return length * _WIDTH // span


def _draw(
    parts: Sequence[tuple[int, int, str]], chunk: _Chunk, span: int, y: int, paths: Mapping[str, list[str]]
) -> None:
    """Adds a chunk's blocks to the paths of their looks, those of less than a pixel together."""
    looks: set[str] = set()
    since = until = 0

    def add(look: str, x: int, width: int) -> None:
        paths[look].append(f"M{chunk.x + x} {y}h{width}")

    def flush() -> None:
        if looks:
            look = looks.pop() if len(looks) == 1 else SPLIT_FREE if looks == _FREE_LOOKS else MIXED
            add(look, since, max(until - since, _PIXEL))
            looks.clear()

    for index in range(bisect_right(parts, (chunk.begin, _ENDLESS)) - 1, len(parts)):
        address, length, look = parts[index]
        if address >= chunk.end:
            break
        x = _scaled(max(address, chunk.begin) - chunk.begin, span)
        end = _scaled(min(address + length, chunk.end) - chunk.begin, span)
        if end - x >= _PIXEL:
            flush()
            add(look, x, end - x - (_SEAM if end - x > 3 * _PIXEL else 0))
            continue
        if not looks:
            since = x
        looks.add(look)
        until = end
        if until - since >= _PIXEL:
            flush()
    flush()


_ENDLESS = 1 << 64
_FREE_LOOKS = {SPLIT_FREE, CACHED_FREE}


def _title(chunk: _Chunk, span: int, y: int, height: int) -> str:
    segment = chunk.segment
    words = (
        f"segment {segment.address:#x}, {size(segment.size)} in {len(segment.blocks):,} blocks, "
        f"{size(segment.allocated)} allocated"
    )
    width = max(_PIXEL, _scaled(chunk.end - chunk.begin, span))
    return (
        f'<rect class="point" x="{chunk.x}" y="{y}" width="{width}" height="{height}">'
        f"<title>{escape(words)}</title></rect>"
    )
