# SPDX-License-Identifier: Apache-2.0
"""`torchmem top` as a user runs it: a process of its own, with and without a terminal."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

TOP = (
    sys.executable,
    "-c",
    "import sys; from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main())",
    "top",
)
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0")
GIB = 1 << 30


@contextmanager
def top(*options: str, **more) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [*TOP, *FREE_PORTS, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def addresses(line: str) -> tuple[str, str]:
    found = re.search(r"OTLP gRPC (\S+?),? (?:· )?HTTP (\S+?)[; ]", line)
    assert found, line
    return found[1], found[2]


def run_top(*options: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([*TOP, *options], capture_output=True, text=True, timeout=60, **more)


def send(
    http_address: str, at: float, *, reserved: int, fragmentation=0.25, retries=0, ooms=0, pid=7
) -> None:
    """One export by hand: ``at`` is the sender's time in seconds."""
    device = [{"key": "torch.device", "value": {"stringValue": "cuda:0"}}]
    point = {"attributes": device, "timeUnixNano": str(int(at * 1e9)), "startTimeUnixNano": "1"}

    def counter(name: str, value: int) -> dict:
        points = [{**point, "asInt": str(value)}]
        return {"name": name, "sum": {"aggregationTemporality": 2, "isMonotonic": True, "dataPoints": points}}

    metrics = [
        {"name": "torch.memory.reserved", "gauge": {"dataPoints": [{**point, "asInt": str(reserved)}]}},
        {
            "name": "torch.memory.fragmentation",
            "gauge": {"dataPoints": [{**point, "asDouble": fragmentation}]},
        },
        counter("torch.memory.allocation.retries", retries),
        counter("torch.memory.ooms", ooms),
    ]
    resource = [
        {"key": "service.name", "value": {"stringValue": "serve"}},
        {"key": "service.instance.id", "value": {"stringValue": f"instance-{pid}"}},
        {"key": "process.pid", "value": {"intValue": str(pid)}},
    ]
    body = {
        "resourceMetrics": [{"resource": {"attributes": resource}, "scopeMetrics": [{"metrics": metrics}]}]
    }
    assert httpx.post(f"http://{http_address}/v1/metrics", json=body).status_code == 200


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_lines_and_on_a_signal_the_summary(tmp_path, end):
    told, picture = tmp_path / "summary.json", tmp_path / "screen.svg"
    with top("--interval", "0.2", "--summary-json", str(told), "--save-svg", str(picture)) as process:
        _, http = addresses(process.stdout.readline())
        send(http, 100, reserved=2 * GIB, retries=1)
        send(http, 102, reserved=5 * GIB, fragmentation=0.5, retries=4)
        send(http, 104, reserved=4 * GIB, fragmentation=0.125, retries=4, ooms=1)
        line = process.stdout.readline()
        assert re.match(r"\d\d:\d\d:\d\d serve/7 cuda:0 reserved=", line), line
        process.send_signal(end)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert (
        "serve/7 cuda:0: reserved 2.00 GiB → 4.00 GiB (most 5.00 GiB), "
        "fragmentation up to 50.0 %, retries 4, OOMs 1, 12 points"
    ) in out
    summary = json.loads(told.read_text())
    assert (summary["exports"], summary["dropped"], summary["refused"]) == (3, 0, 0)
    (watched,) = summary["processes"]
    assert (watched["service"], watched["pid"], watched["instance"]) == ("serve", 7, "instance-7")
    assert watched["devices"] == [
        {
            "device": "cuda:0",
            "hw_id": None,
            "points": 12,
            "reserved_first": 2 * GIB,
            "reserved_last": 4 * GIB,
            "reserved_max": 5 * GIB,
            "fragmentation_max": 0.5,
            "retries": 4,
            "ooms": 1,
        }
    ]
    assert "<svg" in picture.read_text()
    assert "serve" in picture.read_text()


def test_a_line_is_printed_only_when_something_came():
    with top("--interval", "0.3", "--duration", "2") as process:
        _, http = addresses(process.stdout.readline())
        send(http, 100, reserved=GIB)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert len(re.findall(r"^\d\d:\d\d:\d\d serve/7", out, re.MULTILINE)) == 1


def test_it_ends_by_itself_and_keeps_the_stated_number_of_processes(tmp_path):
    told = tmp_path / "summary.json"
    with top("--duration", "2", "--max-processes", "3", "--summary-json", str(told)) as process:
        _, http = addresses(process.stdout.readline())
        for pid in range(5):
            send(http, 100, reserved=pid, pid=pid)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "3 processes, 2 more dropped" in out
    assert json.loads(told.read_text())["dropped"] == 2


def test_the_body_limit_is_an_option():
    with top("--max-body", "100") as process:
        _, http = addresses(process.stdout.readline())
        answer = httpx.post(
            f"http://{http}/v1/metrics", content=b" " * 101, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413
        assert "100 bytes" in answer.json()["message"]


@pytest.mark.parametrize("side", ["grpc", "http"])
def test_a_second_one_on_the_same_port_is_one_clear_error(side):
    with top() as first:
        taken = addresses(first.stdout.readline())[side == "http"].rpartition(":")[2]
        second = run_top(*FREE_PORTS, f"--{side}-port", taken)
        assert second.returncode == 2
        assert second.stdout == ""
        (line,) = second.stderr.splitlines()
        assert line.startswith(f"torchmem top: error: port {taken} on 127.0.0.1 is in use")
        assert f"--{side}-port" in line
        assert first.poll() is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--grpc-port", "70000"), "0 to 65535"),
        (("--http-port", "http"), "0 to 65535"),
        (("--duration", "0"), "more than 0"),
        (("--interval", "nan"), "more than 0"),
        (("--max-processes", "0"), "at least 1"),
        (("--max-body", "4MiB"), "at least 1"),
        (("--host", "no-such-host.invalid"), "no-such-host.invalid"),
        (("--save-svg", "/nowhere/at/all.svg"), "/nowhere/at/all.svg"),
    ],
)
def test_a_bad_option_is_an_error_with_what_is_allowed(options, says):
    ended = run_top(*FREE_PORTS, *options)
    assert ended.returncode == 2
    assert says in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_reader_that_ends_early_is_no_error():
    with top("--interval", "0.1") as process:
        _, http = addresses(process.stdout.readline())
        process.stdout.close()
        send(http, 100, reserved=GIB)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""


class Terminal:
    """A pseudo-terminal and what was written to it."""

    def __init__(self, columns: int, rows: int) -> None:
        pty = pytest.importorskip("pty", reason="needs a POSIX system")
        import fcntl
        import struct
        import termios

        self.outside, self.inside = pty.openpty()
        fcntl.ioctl(self.inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.text = ""

    def until(self, wanted: str, seconds: float = 20) -> str:
        deadline = time.monotonic() + seconds
        while wanted not in self.text:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} did not come: {self.text[-2000:]!r}"
            if select.select([self.outside], [], [], left)[0]:
                self.text += os.read(self.outside, 65536).decode(errors="replace")
        return self.text

    def close(self) -> None:
        os.close(self.inside)
        os.close(self.outside)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(80, 24)
    yield terminal
    terminal.close()


def test_on_a_terminal_it_draws_a_live_screen_and_leaves_it_tidy(terminal):
    process = subprocess.Popen(
        [*TOP, *FREE_PORTS],
        stdout=terminal.inside,
        stderr=terminal.inside,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    try:
        shown = terminal.until("No metrics yet")
        assert "\x1b[?1049h" in shown, "the alternate screen"
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        _, http = addresses(plain)
        send(http, 100, reserved=2 * GIB)
        send(http, 102, reserved=3 * GIB, retries=2)
        terminal.until("3.00 GiB")
        terminal.until("2 (+2/min)")
        process.send_signal(signal.SIGINT)
        terminal.until("retries 2, OOMs 0, 8 points")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
    after = terminal.text.rpartition("\x1b[?1049l")
    assert "\x1b[?25h" in terminal.text, "the cursor is shown again"
    assert "torchmem top: " in after[2], "the summary stays on the normal screen"
    assert "Traceback" not in terminal.text


def test_a_dumb_terminal_gets_plain_lines(terminal):
    process = subprocess.Popen(
        [*TOP, *FREE_PORTS, "--duration", "0.5"],
        stdout=terminal.inside,
        stderr=terminal.inside,
        env=os.environ | {"TERM": "dumb"},
    )
    terminal.until("0 processes")
    assert process.wait(timeout=20) == 0
    assert "\x1b" not in terminal.text


def test_a_terminal_without_utf8_is_no_error():
    with top("--duration", "1", env=os.environ | {"PYTHONIOENCODING": "ascii"}) as process:
        _, http = addresses(process.stdout.readline())
        send(http, 100, reserved=GIB)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "reserved 1.00 GiB ? 1.00 GiB" in out


@pytest.mark.parametrize("missing", ["grpc", "rich", "opentelemetry.proto_json"])
def test_without_the_extra_it_says_what_to_install(missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main(['top', '--plain']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "pip install 'opentelemetry-instrumentation-torchmem[cli]'" in line
    assert missing.partition(".")[0] in line


def test_neither_the_package_nor_the_help_imports_the_extra():
    program = (
        "import sys, opentelemetry_instrumentation_torchmem\n"
        "from opentelemetry_instrumentation_torchmem.cli import main\n"
        "try: main(['top', '--help'])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "found = {'grpc', 'rich', 'google.protobuf', 'torch'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "--max-processes" in ended.stdout
