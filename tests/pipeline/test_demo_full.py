# SPDX-License-Identifier: Apache-2.0
"""`make demo-full`, without a terminal: it shows the whole way, ends, and leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.parts import ROOT
from pipeline.servers import until

MARK = "TORCHMEM_DEMO_FULL_TEST"
CHILD_NAMES = {"serve.py": "server", "load.py": "load"}
"""As the demo calls them."""


class Demo:
    """One run. All it starts, in sessions of their own too, is found by a variable that they inherit."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.folder = folder
        self.output = folder / "output"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "examples" / "demo_full.py"],
                env={**clean, MARK: self.mark, "TMPDIR": str(folder), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def child(self, name: str) -> psutil.Process | None:
        """The one whose program or script is so called."""
        for process in self.alive():
            if any(Path(part).name == name for part in process.cmdline()):
                return process
        return None

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def files_left(self) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path != self.output]


@pytest.fixture
def started(emulation: Path, tmp_path: Path) -> Iterator[list[Demo]]:
    runs: list[Demo] = []
    yield runs
    for run in runs:
        for process in run.alive():
            process.kill()
        run.process.wait(10)


def test_the_demo_goes_from_a_metric_to_its_trace_and_leaves_nothing(
    started: list[Demo], tmp_path: Path
) -> None:
    run = Demo(tmp_path, DEMO_SECONDS="20", DEMO_PORTS="any")
    started.append(run)
    assert run.process.wait(240) == 0, run.text
    assert run.alive() == []
    assert run.files_left() == []
    for name in ("the server", "Prometheus", "alerts", "Jaeger", "the collector"):
        assert any(
            line.startswith(f"  {name} ") and "http://127.0.0.1:" in line for line in run.text.splitlines()
        )
    assert "ALERT fires: TorchMemOutOfMemory" in run.text
    way = run.text.split("From a metric to the request:")[1]
    assert "an exemplar of torch.memory.request.reserved_growth: " in way
    assert "'torch.memory.reserved.delta': " in way
    assert "is out of memory" in way


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_all_that_it_started(
    started: list[Demo], tmp_path: Path, number: signal.Signals
) -> None:
    run = Demo(tmp_path, DEMO_SECONDS="120", DEMO_PORTS="any")
    started.append(run)
    # Once with everything up, once in the midst of starting.
    wanted = "To open, while it runs:" if number is signal.SIGINT else "Starting"
    until(lambda: wanted in run.text or run.process.poll() is not None, 120, wanted)
    time.sleep(1)
    assert len(run.alive()) > 2
    run.process.send_signal(number)
    assert run.process.wait(60) == 128 + number, run.text
    assert run.alive() == []
    assert run.files_left() == []


@pytest.mark.parametrize("name", ["otelcol", "jaeger", "prometheus", "alertmanager", "serve.py", "load.py"])
def test_the_death_of_any_child_ends_the_demo_by_name_and_leaves_nothing(
    started: list[Demo], tmp_path: Path, name: str
) -> None:
    run = Demo(tmp_path, DEMO_SECONDS="120", DEMO_PORTS="any")
    started.append(run)
    until(lambda: "  reserved " in run.text or run.process.poll() is not None, 180, "figures")
    child = until(lambda: run.child(name), 30, name)
    child.kill()
    assert run.process.wait(60) == 1, run.text
    said = run.text[run.text.index("demo-full: ") :].splitlines()
    assert said[0] == f"demo-full: {CHILD_NAMES.get(name, name)} ended with -9; its last lines:"
    assert len(said) > 1
    assert "Traceback" not in run.text
    assert run.alive() == []
    assert run.files_left() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux")
def test_a_demo_that_is_killed_takes_with_it_what_it_started(started: list[Demo], tmp_path: Path) -> None:
    run = Demo(tmp_path, DEMO_SECONDS="120", DEMO_PORTS="any")
    started.append(run)
    until(lambda: "  reserved " in run.text or run.process.poll() is not None, 180, "figures")
    assert len(run.alive()) >= 7
    run.process.kill()
    run.process.wait(10)
    until(lambda: run.alive() == [], 10, "all have ended")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DEMO_SECONDS", "abc", "'abc' from it or DEMO_SECONDS: a number of seconds above 0"),
        ("DEMO_SECONDS", "0", "'0' from it or DEMO_SECONDS: a number of seconds above 0"),
        (
            "KEPT_SHARE_PERCENT",
            "500",
            "KEPT_SHARE_PERCENT='500' in the environment is not a number from 0 to 100",
        ),
        (
            "TORCHMEM_OTELCOL",
            "no-program",
            "no-program does not run: Exec format error; give a collector 0.165",
        ),
        ("TORCHMEM_JAEGER", "no-program", "no-program does not run: Exec format error"),
    ],
)
def test_a_wrong_setting_is_told_in_a_line_and_nothing_is_left(
    started: list[Demo], tmp_path_factory: pytest.TempPathFactory, variable: str, value: str, said: str
) -> None:
    if value == "no-program":
        file = tmp_path_factory.mktemp("programs") / value
        file.write_bytes(b"\0 no program")
        file.chmod(0o755)
        value = str(file)
    run = Demo(tmp_path_factory.mktemp("demo"), **{"DEMO_SECONDS": "5", "DEMO_PORTS": "any", variable: value})
    started.append(run)
    assert run.process.wait(60) in (1, 2), run.text
    assert said in run.text.splitlines()[-1]
    assert "Traceback" not in run.text
    assert run.alive() == []
    assert run.files_left() == []


def test_a_port_in_use_ends_it_at_once_with_one_line_that_says_how_to_go_on(
    started: list[Demo], tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 9093))
            other.listen()
        except OSError:
            pass  # somebody else's program listens there already, which is what the test wants
        run = Demo(tmp_path, DEMO_SECONDS="5")
        started.append(run)
        assert run.process.wait(60) == 1, run.text
    line = run.text.splitlines()[-1]
    assert line.startswith("demo-full: ")
    assert " on 127.0.0.1, and another program listens there" in line
    assert line.endswith("(here: make demo-full DEMO_PORTS=any)")
    assert run.alive() == []
    assert run.files_left() == []
