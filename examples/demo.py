# SPDX-License-Identifier: Apache-2.0
"""The demo: an ordinary server, driven until its GPU memory lies in pieces, and watched from outside.

    python examples/demo.py            (or `make demo`; DEMO_SECONDS=60 is how long the server is driven)

Starts `torchmem top`, then `serve.py` under `opentelemetry-instrument` on this machine's GPU or, where there
is none, on the emulated one, then `load.py`. Ends by itself, stops all that it started, and exits 0 if top
received over OTLP what it promises to show: reserved memory rising, fragmentation, a retry of the allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
EMULATOR = EXAMPLES.parent / "tests" / "emulator" / "run"
SCRIPTS = Path(sys.executable).parent
MEMORY_GIB = 3  # the load fills this within seconds; of a larger GPU no more is used
EXPORT_INTERVAL_S = 2
START_LIMIT_S = 180  # the first import of torch from a cold disk is slow
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoError(Exception):
    """What went wrong, in words for the one who runs the demo."""


class Children:
    """The demo's processes. Each has a session of its own: Ctrl-C reaches the demo, which ends them."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[object], *, on_screen: bool = False) -> None:
        with open(self._logs / f"{name}.log", "wb") as log:
            self._started[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=None if on_screen else log,
                stderr=log,
                start_new_session=True,
            )

    def has_ended(self, name: str) -> bool:
        return self._started[name].poll() is not None

    def expect(self, *names: str) -> None:
        for name in names:
            if self.has_ended(name):
                raise DemoError(f"{name} ended with {self._started[name].returncode}:\n{self.log(name)}")

    def stop(self, name: str, patience_s: float = 20) -> None:
        child = self._started.pop(name)
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # itself if it did not obey, and whatever it started
        child.wait()

    def stop_all(self) -> None:
        for name in reversed(list(self._started)):
            self.stop(name, patience_s=5)

    def log(self, name: str) -> str:
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-15:])


# ------------------------------------------------------------------------------------------------- the run


def watch(children: Children, folder: Path, seconds: float, picture: Path | None) -> dict[str, object]:
    """Runs the three against each other and returns what top saw."""
    on_gpu = has_gpu()
    otlp_port, port = free_ports(2)
    url, told = f"http://127.0.0.1:{port}", folder / "top.json"
    print(
        f"Serving on {'this machine' if on_gpu else 'an emulated'} GPU with {MEMORY_GIB} GiB, "
        f"driven for {seconds:g} s once it is up ...",
        flush=True,
    )

    top = [SCRIPTS / "torchmem", "top", "--grpc-port", otlp_port, "--http-port", 0, "--summary-json", told]
    if picture:
        top += ["--save-svg", picture]
    children.start("top", top, on_screen=True)

    server = [SCRIPTS / "opentelemetry-instrument", "--service_name", "demo"]
    server += ["--traces_exporter", "otlp", "--metrics_exporter", "otlp", "--logs_exporter", "none"]
    server += [
        "--exporter_otlp_protocol",
        "grpc",
        "--exporter_otlp_endpoint",
        f"http://127.0.0.1:{otlp_port}",
    ]
    server += ["--metric_export_interval", EXPORT_INTERVAL_S * 1000]
    # Without cuDNN on a real GPU too: so the same sizes are allocated on both.
    server += [sys.executable, EXAMPLES / "serve.py", "--port", port, "--cudnn", 0]
    if on_gpu:
        server += ["--memory-gib", MEMORY_GIB]
    else:
        server = [sys.executable, EMULATOR, "--memory", f"{MEMORY_GIB}GiB", "--", *server]
    children.start("server", server)
    wait_until_up(url, children)
    time.sleep(1.5 * EXPORT_INTERVAL_S)  # top sees it at rest first

    children.start("load", [sys.executable, EXAMPLES / "load.py", "--seconds", seconds, url])
    limit = time.monotonic() + seconds + 60
    while not children.has_ended("load"):
        children.expect("top", "server")
        if time.monotonic() > limit:
            raise DemoError(f"the load has not ended:\n{children.log('load')}")
        time.sleep(0.2)
    time.sleep(EXPORT_INTERVAL_S)
    children.stop("server")  # it exports once more while it ends
    children.stop("top")
    return json.loads(told.read_text())


def has_gpu() -> bool:
    """Asked in a process of its own, for a process that has asked keeps some of the GPU's memory."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", question], check=False, stderr=subprocess.DEVNULL)
    return asked.returncode == 0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until_up(url: str, children: Children) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        children.expect("top", "server")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=2):
            return
        time.sleep(0.2)
    raise DemoError(f"the server does not answer after {START_LIMIT_S} s:\n{children.log('server')}")


# --------------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Seen:
    """What came over OTLP of the device that held the most memory. None is what never came."""

    reserved_first: float | None = None
    reserved_max: float | None = None
    fragmentation_max: float | None = None
    retries: float | None = None
    ooms: float | None = None

    @classmethod
    def of(cls, summary: dict[str, object]) -> Seen:
        devices = [device for process in summary["processes"] for device in process["devices"]]
        if not devices:
            return cls()
        most = max(devices, key=lambda device: device["reserved_max"] or 0)
        return cls(**{name: most[name] for name in cls.__dataclass_fields__})

    def missing(self) -> list[str]:
        rose = (self.reserved_max or 0) > (self.reserved_first or 0)
        shown = {
            "reserved memory rising": rose,
            "a fragmentation above 0": (self.fragmentation_max or 0) > 0,
            "a retry of the allocator": (self.retries or 0) >= 1,
        }
        return [what for what, was_shown in shown.items() if not was_shown]

    def __str__(self) -> str:
        fragmentation = told(self.fragmentation_max, lambda share: f"{share:.0%}")
        return (
            f"reserved {told(self.reserved_first, size)} -> {told(self.reserved_max, size)}, "
            f"fragmentation up to {fragmentation}, "
            f"{told(self.retries, count)} retries, {told(self.ooms, count)} OOMs"
        )


def told(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def size(octets: float) -> str:
    return f"{octets / 2**30:.2f} GiB" if octets >= 2**30 else f"{octets / 2**20:.0f} MiB"


def count(number: float) -> str:
    return f"{number:.0f}"


def seconds(text: str) -> float:
    number = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} from it or DEMO_SECONDS: a number of seconds above 0")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("DEMO_SECONDS") or "60"
    parser.add_argument("--seconds", type=seconds, default=default, help="[DEMO_SECONDS, 60]")
    parser.add_argument("--save-svg", type=Path, metavar="FILE", help="a picture of the last screen")
    chosen = parser.parse_args()

    for number in SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="torchmem-demo-"))
    children = Children(folder)
    failure = ""
    try:
        seen = Seen.of(watch(children, folder, chosen.seconds, chosen.save_svg))
        print(f"\nThe load: {children.log('load').strip()}\nSeen over OTLP: {seen}")
        if missing := seen.missing():
            failure = f"it did not show {' nor '.join(missing)}"
    except DemoError as error:
        failure = str(error)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        children.stop_all()
        if not failure:
            shutil.rmtree(folder, ignore_errors=True)
    if failure:
        print(f"\nThe demo failed: {failure}\nAll logs: {folder}", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    raise SystemExit(main())
