# SPDX-License-Identifier: Apache-2.0
"""`torchmem top`: an OTLP endpoint with a live screen of every process's GPU memory.

Wires endpoint, board and screen together and owns what belongs to the process: signals, exit codes, files.
Importing it needs none of the `cli` extra's packages; ``run`` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from .board import FORGET_AFTER, GONE_AFTER, MAX_PROCESSES, Board

if TYPE_CHECKING:
    from .endpoint import Endpoint
    from .screen import Header

ABOUT = "live screen of the GPU memory of every process that exports to it over OTLP"
DESCRIPTION = f"""\
An OTLP endpoint on the exporters' default ports with a live screen: for each process and device the memory
ledger, fragmentation, slack, headroom, retries, OOMs, device allocations per second, and how reserved memory
grew over the last minutes. Start it, then in another terminal:

  opentelemetry-instrument --metrics_exporter otlp --metric_export_interval 2000 python app.py

Traces and logs are answered and thrown away; metrics it does not know are ignored. A process silent for
three of its export intervals, at least {GONE_AFTER:.0f} s, shows as gone; after {FORGET_AFTER:.0f} s more it
leaves. A dash is a figure that was not sent. It ends on Ctrl-C, on SIGTERM or after --duration, with a
summary.
"""

_N = TypeVar("_N", int, float)
_REFRESH_SECONDS = 0.5
_PICTURE_WIDTH = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The command's options; each field is the option of its name."""

    host: str
    grpc_port: int
    http_port: int
    plain: bool
    interval: float
    duration: float | None
    max_body: int
    max_processes: int
    summary_json: Path | None
    save_svg: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--grpc-port", type=_port, default=4317, metavar="PORT", help="0 picks a free one (%(default)s)")
    add("--http-port", type=_port, default=4318, metavar="PORT", help="0 picks a free one (%(default)s)")
    add("--plain", action="store_true", help="plain lines; the rule where output is not a terminal")
    add(
        "--interval",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="between plain lines (%(default)g); the screen is drawn twice a second",
    )
    add("--duration", type=_seconds, metavar="SECONDS", help="end by itself after so long")
    add(
        "--max-body",
        type=_positive,
        default=4 * 1024 * 1024,
        metavar="BYTES",
        help="of one request, as sent and unpacked; a larger one is refused (%(default)s)",
    )
    add(
        "--max-processes",
        type=_positive,
        default=MAX_PROCESSES,
        metavar="N",
        help="processes kept (%(default)s); a further one takes the place of one that has fallen silent",
    )
    add("--summary-json", type=Path, metavar="FILE", help="write the summary there too, as JSON")
    add("--save-svg", type=Path, metavar="FILE", help="write a picture of the last screen there")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command to its end. Returns its exit code: 0, or 2 for what the user must change.

    Raises:
        ModuleNotFoundError: a package of the ``cli`` extra is missing.
    """
    from . import endpoint as otlp
    from . import screen

    options = Options(**vars(arguments))
    for file in (options.summary_json, options.save_svg):
        if file is not None and file.is_dir():
            return _error(f"{file}: a folder, where the name of a file is wanted")
        if file is not None and not os.access(file.parent, os.W_OK):
            return _error(f"{file}: its folder does not exist or cannot be written to")
    stdout: TextIO = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        cast("io.TextIOWrapper", stdout).reconfigure(errors="replace")  # no UTF-8: "?" for a bar
    board = Board(max_processes=options.max_processes)
    try:
        endpoint = otlp.Endpoint(
            board.receive,
            host=options.host,
            grpc_port=options.grpc_port,
            http_port=options.http_port,
            max_body=options.max_body,
        )
    except otlp.EndpointError as error:
        return _error(str(error))

    try:
        with _ended_by_signals() as stop, endpoint:
            watch = _Watch(board, endpoint, stop, options)
            width = watch.on_terminal() if watch.has_terminal() else watch.in_lines()
            view, header = board.view(), watch.header()
        processes = board.summary()
        for line in screen.summary(processes, header.elapsed, view.exports, view.dropped):
            print(line)
        stdout.flush()
    except BrokenPipeError:
        # Whoever read has ended, as `head` does. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return 0
    told = {
        "seconds": round(header.elapsed, 3),
        "exports": view.exports,
        "refused": header.refused,
        "dropped": view.dropped,
        "processes": [dataclasses.asdict(process) for process in processes],
    }
    try:
        if options.save_svg is not None:
            options.save_svg.write_text(screen.svg(view, header, width), encoding="utf-8")
        if options.summary_json is not None:
            options.summary_json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return _error(str(error))
    return 0


class _Watch:
    """One run of the command, from the first picture to the last."""

    def __init__(self, board: Board, endpoint: Endpoint, stop: threading.Event, options: Options) -> None:
        self._board = board
        self._endpoint = endpoint
        self._stop = stop
        self._options = options
        self._began = time.monotonic()

    def header(self) -> Header:
        from .screen import Header

        return Header(
            grpc_address=self._endpoint.grpc_address,
            http_address=self._endpoint.http_address,
            elapsed=time.monotonic() - self._began,
            refused=self._endpoint.refused,
        )

    def has_terminal(self) -> bool:
        return (
            not self._options.plain
            and sys.stdout.isatty()
            and os.environ.get("TERM") not in ("dumb", "unknown")
        )

    def on_terminal(self) -> int:
        """Draws the screen until the end. Returns the terminal's width in cells."""
        from rich.console import Console
        from rich.live import Live

        from . import screen

        console = Console()

        def frame():
            return screen.frame(self._board.view(), self.header(), console.width, console.height)

        with Live(frame(), console=console, screen=True, auto_refresh=False) as live:
            while not self._ends_within(_REFRESH_SECONDS):
                live.update(frame(), refresh=True)
        return console.width

    def in_lines(self) -> int:
        """Prints lines until the end. Returns the width for a picture, in cells."""
        from . import screen

        print(
            f"torchmem top: OTLP gRPC {self._endpoint.grpc_address}, HTTP {self._endpoint.http_address}; "
            f"at most {screen.size(self._options.max_body)} a request "
            f"and {self._options.max_processes} processes",
            flush=True,
        )
        ended = False
        while not ended:
            began = time.monotonic()
            ended = self._ends_within(self._options.interval)
            heard = time.monotonic() - began
            for line in screen.lines(self._board.view(), heard):
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
        return _PICTURE_WIDTH

    def _ends_within(self, seconds: float) -> bool:
        """Waits so long, or less where the end comes sooner. True at the end."""
        left = math.inf
        if self._options.duration is not None:
            left = self._began + self._options.duration - time.monotonic()
        return self._stop.wait(max(0.0, min(seconds, left))) or left <= seconds


@contextmanager
def _ended_by_signals() -> Generator[threading.Event]:
    """An event that SIGINT and SIGTERM set; what was in place before comes back afterwards."""
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _error(message: str) -> int:
    print(f"torchmem top: error: {message}", file=sys.stderr)
    return 2


def _port(text: str) -> int:
    return _number(int, text, lambda port: 0 <= port <= 65535, "a port, 0 to 65535")


def _seconds(text: str) -> float:
    return _number(float, text, lambda seconds: 0 < seconds < math.inf, "seconds, more than 0")


def _positive(text: str) -> int:
    return _number(int, text, lambda number: number >= 1, "a whole number, at least 1")


def _number(kind: Callable[[str], _N], text: str, allows: Callable[[_N], bool], allowed: str) -> _N:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not allows(number):
        raise argparse.ArgumentTypeError(f"{text}: must be {allowed}")
    return number
