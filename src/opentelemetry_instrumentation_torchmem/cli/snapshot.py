# SPDX-License-Identifier: Apache-2.0
"""`torchmem snapshot FILE`: what a memory snapshot holds, as a summary and a picture.

Importing it needs none of the `cli` extra's packages; ``run`` does. It needs no torch and no GPU.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

from ..allocator.rules import Rules
from ..allocator.settings import AllocatorSettings
from ..allocator.snapshot import analyse
from .snapshot_file import MAX_BLOCKS, MAX_FILE, MEMORY_FACTOR, Snapshot, SnapshotError, read
from .snapshot_pickle import printable

ABOUT = "memory map of a snapshot file, as a summary and a picture"
DESCRIPTION = f"""\
Reads what torch.cuda.memory._dump_snapshot(FILE) wrote, prints a summary, and draws the memory map: the
segments in rows, blocks by state, holes, the largest free block of each pool and stream. The picture is one
file without scripts, HTML or SVG. No torch and no GPU are needed.

The file need not be trusted: plain data is read from it and everything else is refused by its name. At
most {MAX_BLOCKS:,} segments and blocks are read, with about {MEMORY_FACTOR + 1} times --max-size of memory.
"""

_MIB = 1 << 20
_SUFFIXES = (".html", ".svg")


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options; each field is the option of its name."""

    file: Path
    output: Path | None
    force: bool
    no_picture: bool
    top: int
    max_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the snapshot, a pickle")
    add(
        "--output",
        type=_picture,
        metavar="FILE",
        help="where to write the picture, .html or .svg (FILE's name with .html, in the current directory)",
    )
    add("--force", action="store_true", help="write over a file that is there already")
    add("--no-picture", action="store_true", help="the summary only")
    add(
        "--top",
        type=_positive,
        default=20,
        metavar="N",
        help="pools and streams told of each device, those that hold most (%(default)s)",
    )
    add(
        "--max-size",
        type=_positive,
        default=MAX_FILE // _MIB,
        metavar="MIB",
        help="a larger FILE is refused (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command to its end. Returns its exit code: 0, or 2 for what the user must change.

    Raises:
        ModuleNotFoundError: a package of the ``cli`` extra is missing.
    """
    from . import snapshot_map, snapshot_picture, snapshot_text

    options = Options(**vars(arguments))
    stdout: TextIO = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        cast("io.TextIOWrapper", stdout).reconfigure(errors="replace")
    output = None if options.no_picture else options.output or Path(f"{options.file.stem}.html")
    name = printable(options.file.name)
    if output is not None and not options.force and os.path.lexists(output):
        return _error(
            f"{printable(str(output), 500)} exists already: another --output, or --force to replace it"
        )
    if output is not None and output.exists() and options.file.exists() and output.samefile(options.file):
        return _error(f"{printable(str(output), 500)} is the snapshot itself: another --output")
    try:
        snapshot = read(options.file, options.max_size * _MIB)
        settings = _settings_of(snapshot)
        lines = list(snapshot_text.summary(name, snapshot, analyse(snapshot.raw, settings, {}), options.top))
        if output is not None:
            groups, rules = snapshot_map.groups(snapshot.segments), Rules.of(settings)
            if output.suffix == ".svg":
                picture = snapshot_picture.svg(name, groups, rules)
            else:
                picture = snapshot_picture.page(name, groups, rules, lines)
            _write(output, picture, force=options.force)
    except SnapshotError as error:
        return _error(f"{printable(str(options.file), 500)}: {error}")
    except MemoryError:
        return _error(f"{printable(str(options.file), 500)}: not enough memory to read it")
    except OSError as error:
        return _error(f"{printable(str(output), 500)}: {error.strerror}")
    return _tell(lines, output)


def _settings_of(snapshot: Snapshot) -> AllocatorSettings:
    """The settings that the file tells; whether segments can expand shows in the segments too."""
    settings = AllocatorSettings.of_snapshot(snapshot.settings, {})
    if "expandable_segments" in snapshot.settings:
        return settings
    return replace(settings, expandable_segments=any(segment.expandable for segment in snapshot.segments))


def _write(output: Path, text: str, *, force: bool) -> None:
    """Writes the file whole, or leaves none behind."""
    with open(output, "w" if force else "x", encoding="utf-8") as opened:
        try:
            opened.write(text)
            opened.flush()
        except OSError:
            if output.is_file():
                output.unlink()
            raise


def _tell(lines: Sequence[str], output: Path | None) -> int:
    try:
        for line in lines:
            print(line)
        if output is not None:
            print(f"\npicture: {printable(str(output), 500)}")
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has ended, as `head` does. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _error(message: str) -> int:
    print(f"torchmem snapshot: error: {message}", file=sys.stderr)
    return 2


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: must end in {' or '.join(_SUFFIXES)}")
    return path


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 to 999999999")
    return int(text)
