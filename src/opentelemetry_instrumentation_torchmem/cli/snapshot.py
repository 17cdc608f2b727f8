# SPDX-License-Identifier: Apache-2.0
"""`torchmem snapshot`: what a memory snapshot holds, of a file or a live process, as a summary and a picture.

Importing it needs none of the `cli` extra's packages; ``run`` does. It needs no torch and no GPU.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TextIO, cast

from ..allocator.settings import AllocatorSettings
from ..allocator.snapshot import analyse
from . import snapshot_live
from .snapshot_file import MAX_BLOCKS, MAX_FILE, MEMORY_FACTOR, Progress, Snapshot, SnapshotError, parse, read
from .snapshot_pickle import printable

ABOUT = "memory map of a snapshot file or a live process, as a summary and a picture"
DESCRIPTION = f"""\
Reads what torch.cuda.memory._dump_snapshot(FILE) wrote, or asks a live process; prints a summary and draws
the memory map: the segments in rows, blocks by state, holes, the largest free block of each pool and stream.
The picture is one file without scripts, HTML or SVG. No torch and no GPU are needed.

A process that runs with OTEL_PYTHON_TORCHMEM_LIVE_SNAPSHOTS=true can be asked, by its own user or root, from
inside its container. Its interpreter is held for a tenth of a second where there are 100,000 blocks.

The file need not be trusted: plain data is read from it and everything else is refused by its name. At
most {MAX_BLOCKS:,} segments and blocks are read, with no more memory than {MEMORY_FACTOR + 1} times
--max-size and 300 MiB. Mostly it takes 5 to 10 times the file's own size; 256 MiB of memory history
take about half a minute.
"""

_MIB = 1 << 20
_SUFFIXES = (".html", ".svg")


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options; each field is the option of its name."""

    file: Path | None
    pid: int | None
    save: Path | None
    output: Path | None
    force: bool
    no_picture: bool
    top: int
    max_size: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    one_of = parser.add_mutually_exclusive_group(required=True)
    one_of.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the snapshot, a pickle")
    one_of.add_argument("--pid", type=_positive, metavar="PID", help="a live process that is asked for one")
    add(
        "--save",
        type=Path,
        metavar="FILE",
        help="with --pid: where to keep the snapshot itself, for the doctor and PyTorch's memory_viz",
    )
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
    if options.file is not None:
        source, name, stem = str(options.file), options.file.name, options.file.stem
    else:
        source = name = f"process {options.pid}"
        stem = f"torchmem-{options.pid}"
    source, name = printable(source, 500), printable(name)
    output = None if options.no_picture else options.output or Path(f"{stem}.html")
    wrong = _cannot_be_written(options, output)
    if wrong is not None:
        return _error(wrong)
    try:
        snapshot = _read(options)
        devices = analyse(snapshot.raw, _settings_of(snapshot), {})
        lines = list(snapshot_text.summary(name, snapshot, devices, options.top))
        if output is not None:
            groups = snapshot_map.groups(snapshot.segments, devices)
            if output.suffix == ".svg":
                picture = snapshot_picture.svg(name, groups)
            else:
                picture = snapshot_picture.page(name, groups, lines)
            _write(output, picture.encode(), force=options.force)
    except SnapshotError as error:
        return _error(f"{source}: {error}")
    except MemoryError:
        return _error(f"{source}: not enough memory to read it")
    except _NotWrittenError as error:
        return _error(str(error))
    return _tell(lines, {"snapshot": options.save, "picture": output})


def _cannot_be_written(options: Options, output: Path | None) -> str | None:
    """Why a file that is to be written cannot be, as far as that shows before."""
    if options.save is not None and options.file is not None:
        return "--save goes with --pid: FILE is the snapshot already"
    if output is not None and options.save is not None and output.absolute() == options.save.absolute():
        return f"--output and --save are both {printable(str(output), 500)}"
    for option, path in (("--output", output), ("--save", options.save)):
        if path is None:
            continue
        shown = printable(str(path), 500)
        try:
            if not _is_there(path):
                continue
            if not options.force:
                return f"{shown} exists already: another {option}, or --force to replace it"
            if not os.path.exists(path):  # a link to nothing
                continue
            if options.file is not None and options.file.exists() and path.samefile(options.file):
                return f"{shown} is the snapshot itself: another {option}"
        except OSError as error:
            return f"{shown}: {error.strerror}: another {option}"
        if not path.is_file():
            return f"{shown} is no regular file: another {option}"
    return None


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _read(options: Options) -> Snapshot:
    most = options.max_size * _MIB
    with _progress() as progress:
        if options.pid is None:
            return read(cast("Path", options.file), most, progress)
        data = snapshot_live.ask(options.pid, most)
        if options.save is not None:
            _write(options.save, data, force=options.force, mode=0o600)
        return parse(data, most, progress)


@contextmanager
def _progress() -> Generator[Progress]:
    """Tells a terminal how far a large file is read: a memory history may take half a minute."""
    began, seen = monotonic(), getattr(sys.stderr, "isatty", bool)()  # there is none where it was closed
    last = ""

    def tell(share: float) -> None:
        nonlocal last
        line = f"reading: {share:.0%}"
        if seen and line != last and monotonic() - began > 1:
            last = line
            print(f"\r{line}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if last:
            print("\r" + " " * len(last), end="\r", file=sys.stderr, flush=True)


def _settings_of(snapshot: Snapshot) -> AllocatorSettings:
    """The settings that the file tells; whether segments can expand shows in the segments too."""
    settings = AllocatorSettings.of_snapshot(snapshot.settings, {})
    if "expandable_segments" in snapshot.settings:
        return settings
    return replace(settings, expandable_segments=any(segment.expandable for segment in snapshot.segments))


class _NotWrittenError(Exception):
    """A file could not be written; the message says which and why."""


def _write(path: Path, content: bytes, *, force: bool, mode: int = 0o666) -> None:
    """Writes the file whole, or leaves none behind."""
    try:
        with open(path, "wb" if force else "xb", opener=lambda name, how: os.open(name, how, mode)) as opened:
            try:
                opened.write(content)
                opened.flush()
            except OSError:
                if path.is_file():
                    path.unlink()
                raise
    except OSError as error:
        raise _NotWrittenError(f"{printable(str(path), 500)}: {error.strerror}") from None


def _tell(lines: Sequence[str], written: Mapping[str, Path | None]) -> int:
    try:
        for line in lines:
            print(line)
        for what, path in written.items():
            if path is not None:
                print(f"\n{what}: {printable(str(path), 500)}")
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
