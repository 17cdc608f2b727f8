# SPDX-License-Identifier: Apache-2.0
"""What a person sees: the board as a live screen, as plain lines and as a summary.

Pure functions from a view of the board to text. A figure that was not sent shows as a dash, never as 0.
Colours are the terminal's own sixteen, and every state has a glyph of its own: it reads on dark and light
backgrounds, and without colour.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from .board import (
    STATES,
    BoardView,
    Count,
    DeviceView,
    ProcessSummary,
    ProcessView,
)

ABSENT = "\N{EN DASH}"
FRAGMENTATION_ALERT = 0.20
"""The trapped share of reserved memory from which the screen shows it in red."""

_LOOKS = {
    "allocated": ("█", "blue"),
    "pending_free": ("▓", "cyan"),
    "split_free": ("▒", "red"),
    "cached_free": ("░", "green"),
    "cached": ("░", "green"),
    "external": ("\u2571", "magenta"),
    "free": ("·", "dim"),
}
_SPARKS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_WIDE, _NARROW = 162, 76
"""Widths from which a device's figures take one row, or below which they take six."""
_TABLE_EXTRA = 4  # a blank line, the columns' names, a blank line, the legend
_ALERT = "bold red"
_QUIET = "dim"


@dataclass(frozen=True, slots=True)
class Header:
    """What the top line says beside the board."""

    grpc_address: str
    http_address: str
    elapsed: float
    refused: int


# Figures as text


def size(value: float | None) -> str:
    """Bytes with three figures: ``5.50 GiB``."""
    if value is None:
        return ABSENT
    return f"{_scaled(value, _exponent(value))} {_UNITS[_exponent(value)]}"


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share * 100:.1f} %"


def duration(seconds: float) -> str:
    """``41 s``, ``2 min``, ``3 h``: for ages and spans, not for arithmetic."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def count(value: Count | None) -> str:
    """The total, and in brackets what was added within the last minute."""
    if value is None:
        return ABSENT
    return f"{value.total:,.0f} (+{value.recent:,.0f}/min)" if value.recent else f"{value.total:,.0f}"


def rate(value: Count | None) -> str:
    if value is None or value.rate is None:
        return ABSENT
    return f"{value.rate:.0f}/s" if value.rate >= 100 else f"{value.rate:.1f}/s"


def growth(history: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """(bytes, seconds): how much reserved memory grew over the history; ``None`` before a second sample."""
    if len(history) < 2:
        return None
    return history[-1][1] - history[0][1], history[-1][0] - history[0][0]


def _growth_text(history: Sequence[tuple[float, float]]) -> str:
    grown = growth(history)
    if grown is None:
        return ABSENT
    sign = "+" if grown[0] > 0 else "\N{MINUS SIGN}" if grown[0] < 0 else "±"
    return f"{sign}{size(abs(grown[0]))} in {duration(grown[1])}"


def _exponent(value: float) -> int:
    exponent = 0
    while abs(value) >= 1024 and exponent < len(_UNITS) - 1:
        value, exponent = value / 1024, exponent + 1
    return exponent


def _scaled(value: float, exponent: int) -> str:
    if exponent == 0:
        return f"{value:.0f}"
    scaled = value / 1024**exponent
    return f"{scaled:.{2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0}f}"


# The bar and the sparkline


def cells(ledger: Mapping[str, float], limit: float | None, width: int) -> dict[str, int]:
    """How many of ``width`` cells each state gets.

    In proportion, exactly ``width`` in all where the states sum to the limit, and at least one for every
    state that is not empty: a few trapped megabytes must be seen.
    """
    parts = {state: value for state, value in ledger.items() if value > 0}
    filled = sum(parts.values())
    whole = max(filled, limit or 0)
    if not whole or width < 1:
        return {}
    shares = {state: value / whole * width for state, value in parts.items()}
    given = {state: max(1, math.floor(share)) for state, share in shares.items()}
    wanted = min(width, max(1, round(filled / whole * width)))
    while sum(given.values()) > wanted:
        given[max(given, key=lambda state: given[state] - shares[state] * 1e-9)] -= 1
    for state in sorted(given, key=lambda state: given[state] - shares[state]):
        if sum(given.values()) >= wanted:
            break
        given[state] += 1
    return given


def bar(device: DeviceView, width: int) -> Text:
    """The ledger as ``width`` cells; without a ledger, blank."""
    text = Text(no_wrap=True)
    for state, number in cells(device.ledger, device.limit, width).items():
        glyph, style = _LOOKS[state]
        text.append(glyph * number, style)
    text.append(" " * (width - text.cell_len))
    return text


def sparkline(history: Sequence[tuple[float, float]], limit: float | None, width: int) -> str:
    """Reserved memory over the history's own span, newest at the right.

    The scale runs from the least to the most seen, but over no less than a twentieth of the limit: noise
    must look flat.
    """
    if len(history) < 2 or width < 1:
        return ""
    begin, end = history[0][0], history[-1][0]
    low = min(value for _, value in history)
    high = max(value for _, value in history)
    span = max(high - low, (limit or high) / 20, 1)
    columns: list[str] = []
    index = 0
    for column in range(width):
        until = begin + (end - begin) * (column + 1) / width
        while index + 1 < len(history) and history[index + 1][0] <= until:
            index += 1
        if column == width - 1:
            index = len(history) - 1
        columns.append(_SPARKS[round((history[index][1] - low) / span * (len(_SPARKS) - 1))])
    return "".join(columns)


# The live screen


def frame(view: BoardView, header: Header, width: int, height: int) -> RenderableType:
    """The whole screen: blocks of a few lines for each device, or one line each where they do not fit."""
    lines = [_title(header, width)]
    rows = [(process, device) for process in view.processes for device in process.devices]
    if not rows:
        return Group(*lines, Text(), *_waiting(view, header))
    notes = _notes(view, header, 0)
    room = height - len(lines) - len(notes)
    blocks: list[Text] = []
    for process, device in rows:
        blocks += (Text(), *_block(process, device, width))
        if len(blocks) > room:
            break
    else:
        return Group(*lines, *blocks, *notes)
    room = max(1, room - _TABLE_EXTRA)
    if len(rows) > room:
        room = max(1, height - len(lines) - 2 - _TABLE_EXTRA)
        notes = _notes(view, header, len(rows) - room)
    return Group(*lines, *_table(rows, width, room), *notes)


def svg(view: BoardView, header: Header, width: int) -> str:
    """The live screen as an SVG picture, with all its rows."""
    console = Console(
        record=True,
        width=width,
        file=StringIO(),
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
    )
    console.print(frame(view, header, width, height=10_000))
    picture = console.export_svg(title="torchmem top")
    # rich links fonts from the network; the reader's own monospace serves, and nothing is fetched.
    picture = re.sub(r"@font-face\s*\{[^}]*\}\s*", "", picture)
    return _SVG_INDENTED.sub(_indent, picture)


# Some viewers drop the spaces that a text begins with: begin it after them instead.
_SVG_INDENTED = re.compile(r'x="([\d.]+)" (y="[\d.]+") textLength="([\d.]+)"([^>]*>)((?:&#160;)+)')
_SVG_CELL = 12.2


def _indent(found: re.Match[str]) -> str:
    x, y, length, rest, spaces = found.groups()
    indent = len(spaces) // len("&#160;") * _SVG_CELL
    return f'x="{float(x) + indent:g}" {y} textLength="{float(length) - indent:g}"{rest}'


def _title(header: Header, width: int) -> Text:
    minutes, seconds = divmod(int(header.elapsed), 60)
    left = Text.assemble(
        ("torchmem top", "bold"),
        (f"   OTLP gRPC {header.grpc_address} · HTTP {header.http_address}", _QUIET),
    )
    return _justified(left, Text(f"{minutes}:{seconds:02}", _QUIET), width)


def _waiting(view: BoardView, header: Header) -> Iterator[Text]:
    if not view.exports:
        yield Text("No metrics yet. In another terminal:")
    elif view.strangers:
        yield Text(
            f"{_many(view.strangers, 'export')} without torch.memory metrics, the last from "
            f"{view.stranger}. They begin once that process has used the GPU through PyTorch, if it "
            "runs under opentelemetry-instrumentation-torchmem:"
        )
    else:
        yield Text("The processes that reported have gone. To start one:")
    yield Text()
    endpoint = ""
    if not header.grpc_address.endswith(":4317"):
        endpoint = f"--exporter_otlp_endpoint http://{header.grpc_address} "
    yield Text(
        "  opentelemetry-instrument --metrics_exporter otlp \\\n"
        f"      --metric_export_interval 2000 {endpoint}\\\n"
        "      python app.py",
        "bold",
    )
    yield Text()
    yield Text("The SDK's own export interval is a minute.", _QUIET)


def _notes(view: BoardView, header: Header, hidden: int) -> list[Text]:
    """What the screen does not show, as a blank line and one more; nothing where it shows all."""
    notes: list[str] = []
    if hidden:
        notes.append(f"{hidden} calmer not shown")
    if view.dropped:
        notes.append(f"{_many(view.dropped, 'process', 'es')} dropped (--max-processes)")
    if header.refused:
        notes.append(f"{_many(header.refused, 'request')} refused (see the senders' logs)")
    return [Text(), Text(" · ".join(notes), "bold", no_wrap=True, overflow="ellipsis")] if notes else []


def _block(process: ProcessView, device: DeviceView, width: int) -> Iterator[Text]:
    inner = width - 2
    lines = [
        _block_title(process, device, inner),
        bar(device, inner),
        *_grid(_ledger_fields(device), inner),
        *_grid(_figure_fields(device), inner),
        _reserved_line(device, inner),
    ]
    for line in lines:
        if process.gone:
            line.stylize(_QUIET)
        yield Text.assemble(" ", line, no_wrap=True, overflow="crop")


def _block_title(process: ProcessView, device: DeviceView, width: int) -> Text:
    left = Text()
    left.append(process.service, "bold")
    left.append(f"  pid {process.pid}" if process.pid is not None else f"  {_tag(process)}")
    left.append(f"  {device.name}", "bold")
    if device.hw_id is not None:
        left.append(f"  {device.hw_id if width >= 110 else _short(device.hw_id, 13)}", _QUIET)
    return _justified(left, _freshness(process, device), width)


def _freshness(process: ProcessView, device: DeviceView) -> Text:
    if process.gone:
        return Text(f"GONE, last seen {duration(process.silent)} ago", "bold")
    if process.interval is not None and process.silent > 2 * process.interval + 1:
        return Text(f"LATE, last seen {duration(process.silent)} ago", "bold")
    if device.reading_age is not None and device.reading_age > 5:
        return Text(f"reading {duration(device.reading_age)} old", "bold")
    every = "" if process.interval is None else f", every {duration(process.interval)}"
    return Text(f"{duration(process.silent)} ago{every}", _QUIET)


_Field = tuple[Text, Text]


def _ledger_fields(device: DeviceView) -> list[_Field]:
    states = [state for state in STATES if state != "cached"]
    if "cached" in device.ledger:
        states = [state for state in STATES if state not in ("split_free", "cached_free")]
    exponent = _exponent(device.limit or sum(device.ledger.values()))
    fields: list[_Field] = []
    for state in states:
        glyph, style = _LOOKS[state]
        value = device.ledger.get(state)
        shown = ABSENT if value is None else _in_unit(value, exponent)
        fields.append((Text.assemble((glyph, style), " ", (state.replace("_", " "), _QUIET)), Text(shown)))
    return fields


def _in_unit(value: float, exponent: int) -> str:
    scaled = value / 1024**exponent
    digits = 0 if exponent == 0 else 2
    if 0 < scaled < 0.005 and digits:
        return f"<0.01 {_UNITS[exponent]}"
    return f"{scaled:.{digits}f} {_UNITS[exponent]}"


def _figure_fields(device: DeviceView) -> list[_Field]:
    def named(name: str, value: str, style: str = "") -> _Field:
        return Text(name, _QUIET), Text(value, style)

    return [
        named("fragmentation", percent(device.fragmentation), _fragmentation_style(device)),
        named("slack", percent(device.slack)),
        named("headroom", size(device.headroom)),
        named("retries", count(device.retries), _recent_style(device.retries, "bold")),
        named("OOMs", count(device.ooms), _recent_style(device.ooms, _ALERT)),
        named("device allocs", rate(device.device_allocations)),
    ]


def _fragmentation_style(device: DeviceView) -> str:
    return _ALERT if (device.fragmentation or 0) >= FRAGMENTATION_ALERT else ""


def _recent_style(value: Count | None, style: str) -> str:
    return style if value is not None and value.recent else ""


def _grid(fields: Sequence[_Field], width: int) -> Iterator[Text]:
    """Fields in aligned columns, labels left and values right."""
    columns = 6 if width >= _WIDE else 3 if width >= _NARROW else 2
    gap = 3
    cell = (width - gap * (columns - 1)) // columns
    for begin in range(0, len(fields), columns):
        line = Text()
        for number, (label, value) in enumerate(fields[begin : begin + columns]):
            if number:
                line.append(" " * gap)
            line.append_text(_justified(label, value, cell))
        yield line


def _reserved_line(device: DeviceView, width: int) -> Text:
    line = Text.assemble(("reserved ", _QUIET), (size(device.reserved), "bold"))
    if device.limit is not None:
        line.append(f" of {size(device.limit)}")
    grown = Text(_growth_text(device.history) if len(device.history) > 1 else "", "bold")
    spark = min(60, width - line.cell_len - max(grown.cell_len, 20) - 4)
    line.append("  ")
    line.append(sparkline(device.history, device.limit, spark), "blue")
    line.append("  ")
    line.append_text(grown)
    return line


def _table(rows: Sequence[tuple[ProcessView, DeviceView]], width: int, room: int) -> Iterator[Text]:
    """One line a device, at most ``room``: where not all fit, those in most trouble, in their own order."""
    name = max(12, min(24, width - 68))
    bar_width = max(8, width - name - 53)
    yield Text()
    yield Text(
        f"{'process':<{name}} {'pid':>8} {'device':<7} {'':<{bar_width}} "
        f"{'resvd':>5} {'frag':>4} {'retry':>5} {'OOMs':>4} {'alloc/s':>7}",
        "bold",
        no_wrap=True,
        overflow="crop",
    )
    worst = sorted(range(len(rows)), key=lambda index: _trouble(*rows[index]), reverse=True)[:room]
    for index in sorted(worst):
        process, device = rows[index]
        retries, ooms = device.retries, device.ooms
        line = Text(no_wrap=True, overflow="crop")
        line.append(_fit(process.service, name))
        line.append(f" {_tag(process):>8} ")
        line.append(_fit(device.name, 7) + " ")
        line.append_text(bar(device, bar_width))
        line.append(f" {_tiny(device.reserved):>5}")
        line.append(f" {_tiny_percent(device.fragmentation):>4}", _fragmentation_style(device))
        line.append(f" {_tiny_count(retries):>5}", _recent_style(retries, "bold"))
        line.append(f" {_tiny_count(ooms):>4}", _recent_style(ooms, _ALERT))
        line.append(f" {rate(device.device_allocations).removesuffix('/s'):>7}")
        if process.gone:
            line.stylize(_QUIET)
        yield line
    yield Text()
    legend = Text(no_wrap=True, overflow="crop")
    for state in STATES:
        if state == "cached":
            continue
        glyph, style = _LOOKS[state]
        legend.append(glyph, style)
        legend.append(f" {state.replace('_', ' ')}  ", _QUIET)
    yield legend


def _trouble(process: ProcessView, device: DeviceView) -> tuple[float, ...]:
    """Orders devices by need of attention: fresh OOMs, fresh retries, then trapped and used shares."""
    used = (device.reserved or 0) / device.limit if device.limit else 0
    return (
        not process.gone,
        device.ooms.recent if device.ooms else 0,
        device.retries.recent if device.retries else 0,
        device.fragmentation or 0,
        used,
    )


def _tiny(value: float | None) -> str:
    return ABSENT if value is None else f"{_scaled(value, _exponent(value))}{_UNITS[_exponent(value)][0]}"


def _tiny_percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share * 100:.0f}%"


def _tiny_count(value: Count | None) -> str:
    return ABSENT if value is None else f"{value.total:.0f}"


def _justified(left: Text, right: Text, width: int) -> Text:
    room = width - right.cell_len - 1
    if left.cell_len > room:
        left = left.copy()
        left.truncate(max(0, room), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _fit(text: str, width: int) -> str:
    fitted = Text(text)
    fitted.truncate(width, overflow="ellipsis", pad=True)
    return fitted.plain


# Without a terminal


def lines(view: BoardView, within: float = math.inf) -> list[str]:
    """One line for each device of the processes heard of within so many seconds."""
    found: list[str] = []
    for process in view.processes:
        if process.silent > within:
            continue
        for device in process.devices:
            ledger = (f"{state}={_plain(size(device.ledger[state]))}" for state in device.ledger)
            figures = (
                f"reserved={_plain(size(device.reserved))}",
                f"limit={_plain(size(device.limit))}",
                *ledger,
                f"fragmentation={_plain(percent(device.fragmentation))}",
                f"slack={_plain(percent(device.slack))}",
                f"headroom={_plain(size(device.headroom))}",
                f"retries={ABSENT if device.retries is None else f'{device.retries.total:.0f}'}",
                f"ooms={ABSENT if device.ooms is None else f'{device.ooms.total:.0f}'}",
                f"device_allocations={rate(device.device_allocations)}",
                f"growth={_plain(_growth_text(device.history), '_')}",
            )
            found.append(f"{_who(process)} {device.name} {' '.join(figures)}")
    return found


def summary(processes: Sequence[ProcessSummary], elapsed: float, exports: int, dropped: int) -> list[str]:
    """The lines printed at the end."""
    found = [
        f"torchmem top: {duration(elapsed)}, {_many(exports, 'metric export')}, "
        f"{_many(len(processes), 'process', 'es')}"
    ]
    if dropped:
        found[0] += f", {dropped} more dropped"
    found.extend(
        f"{_who(process)} {device.device}: "
        f"reserved {size(device.reserved_first)} → {size(device.reserved_last)} "
        f"(most {size(device.reserved_max)}), "
        f"fragmentation up to {percent(device.fragmentation_max)}, "
        f"retries {_whole(device.retries)}, OOMs {_whole(device.ooms)}, {device.points} points"
        for process in processes
        for device in process.devices
    )
    return found


def _who(process: ProcessView | ProcessSummary) -> str:
    return f"{process.service}/{_tag(process)}"


def _tag(process: ProcessView | ProcessSummary) -> str:
    """What tells processes of one service apart: the SDK sends a process id only if asked to."""
    if process.pid is not None:
        return str(process.pid)
    return process.instance[:8] if process.instance else ABSENT


def _whole(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def _many(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _plain(text: str, space: str = "") -> str:
    return text.replace(" ", space)
