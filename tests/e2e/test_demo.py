# SPDX-License-Identifier: Apache-2.0
"""`make demo`, without a terminal: it shows what it promises, ends by itself and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MARK = "TORCHMEM_DEMO_TEST"


class Demo:
    """One run. Its processes, those in sessions of their own too, are found by a variable they inherit."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.folder = folder
        self.output = folder / "output"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        environment |= {"DEMO_SECONDS": str(seconds), MARK: self.mark, "TMPDIR": str(folder)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, EXAMPLES / "demo.py"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def runs(self, script: str) -> psutil.Process | None:
        return next((process for process in self.alive() if self._has(process, script)), None)

    @staticmethod
    def _has(process: psutil.Process, script: str) -> bool:
        try:
            return any(part.endswith(script) for part in process.cmdline())
        except psutil.Error:
            return False

    def wait_for(self, script: str) -> psutil.Process:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            assert self.process.poll() is None, self.text()
            if process := self.runs(script):
                return process
            time.sleep(0.1)
        raise AssertionError(f"{script} was not started:\n{self.text()}")

    def ended(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def files_left(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name.startswith("torchmem-demo-")]


@contextmanager
def demo(seconds: float) -> Iterator[Demo]:
    with tempfile.TemporaryDirectory() as folder:
        run = Demo(Path(folder), seconds)
        try:
            yield run
        finally:
            for process in run.alive():
                process.kill()
            run.process.wait(10)


@pytest.mark.timeout(240)
def test_the_demo_shows_what_it_promises_and_leaves_nothing_behind(emulation: Path) -> None:
    with demo(seconds=25) as run:
        assert run.ended(200) == 0, run.text()
        assert run.alive() == []
        assert run.files_left() == []
        lines = run.text().splitlines()
        plain = [line for line in lines if " demo/" in line and "reserved=" in line]
        assert len(plain) >= 4, run.text()
        assert any("retries=" in line and "retries=0" not in line for line in plain)
        assert lines[-1].startswith("Seen over OTLP: reserved ")


def test_a_demo_that_shows_too_little_says_what_was_missing(emulation: Path) -> None:
    with demo(seconds=0.5) as run:
        assert run.ended(120) == 1
        assert "The demo failed: it did not show a retry of the allocator" in run.text()
        assert run.alive() == []


@pytest.mark.parametrize(
    ("number", "script"),
    [(signal.SIGINT, "load.py"), (signal.SIGTERM, "serve.py"), (signal.SIGHUP, "serve.py")],
)
def test_a_signal_ends_the_demo_and_everything_it_started(
    emulation: Path, number: signal.Signals, script: str
) -> None:
    with demo(seconds=60) as run:
        run.wait_for(script)
        run.process.send_signal(number)
        assert run.ended(40) == 128 + number, run.text()
        assert run.alive() == []
        assert run.files_left() == []


def test_a_server_that_dies_ends_the_demo_and_is_told_of(emulation: Path) -> None:
    with demo(seconds=60) as run:
        run.wait_for("load.py")
        server = run.runs("serve.py")
        assert server is not None
        server.kill()
        assert run.ended(40) == 1
        assert "The demo failed: server ended with -9" in run.text()
        assert run.alive() == []
        assert len(run.files_left()) == 1, "the logs are kept"
