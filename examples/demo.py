# SPDX-License-Identifier: Apache-2.0
"""The demo: a server without a line of telemetry in it, driven until its GPU memory is in pieces, and watched.

    python examples/demo.py          (or `make demo`; DEMO_SECONDS=60 by default)

Starts `torchmem top`, then `serve.py` under `opentelemetry-instrument` on this machine's GPU or, where there is
none, on the emulated one, then `load.py`. Ends by itself, stops what it started, and exits 0 when top has seen
over OTLP what it promises to show: reserved memory rising, fragmentation, and a retry of the allocator.
"""

from __future__ import annotations

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
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
EMULATOR = EXAMPLES.parent / "tests" / "emulator" / "run"
MEMORY_GIB = 3  # small enough to run out of within seconds; a larger GPU is used up to here
EXPORT_INTERVAL_S = 2
START_LIMIT_S = 180  # the first import of torch on a cold disk is slow


class DemoFailed(Exception):
    pass


class Children:
    """The processes of the demo, each in a session of its own, so that Ctrl-C reaches us alone and all end in order."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[object], log: bool = True, **variables: str) -> None:
        output = (self._logs / f"{name}.log").open("wb") if log else None
        self._running[name] = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )
        if output:
            output.close()

    def ended(self, name: str) -> int | None:
        return self._running[name].poll()

    def check(self) -> None:
        """Raises if one has ended that nobody stopped."""
        for name, child in self._running.items():
            if child.poll() is not None and name != "load":
                raise DemoFailed(f"{name} ended with {child.returncode}\n{self.tail(name)}")

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM, patience: float = 20) -> None:
        child = self._running.pop(name)
        if child.poll() is None:
            child.send_signal(how)
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def stop_all(self) -> None:
        for name in reversed(list(self._running)):
            self.stop(name, patience=5)

    def tail(self, name: str, lines: int = 20) -> str:
        log = self._logs / f"{name}.log"
        if not log.exists():
            return ""
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def has_gpu() -> bool:
    """Asked in a process of its own: a process that looks at CUDA keeps some of it."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", question], stderr=subprocess.DEVNULL).returncode == 0


def beside_python(name: str) -> Path:
    return Path(sys.executable).parent / name


def wait_until_healthy(url: str, children: Children) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        children.check()
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise DemoFailed(f"the server did not answer within {START_LIMIT_S} s\n{children.tail('server')}")


def run(children: Children, folder: Path, seconds: float) -> dict[str, object]:
    otlp, port = free_port(), free_port()
    top_says = folder / "top.json"
    watching = sys.stdout.isatty()

    print("Looking for a GPU ...", flush=True)
    on_gpu = has_gpu()
    where: list[object] = [] if on_gpu else [sys.executable, EMULATOR, "--memory", f"{MEMORY_GIB}GiB", "--"]
    limits: list[object] = ["--memory-gib", MEMORY_GIB] if on_gpu else ["--cudnn", 0]
    print(f"Serving on {'the GPU' if on_gpu else 'an emulated GPU'} with {MEMORY_GIB} GiB ...", flush=True)

    children.start(
        "top",
        [
            *(beside_python("torchmem"), "top", "--grpc-port", otlp, "--http-port", 0),
            *("--interval", 1 if watching else 5, "--summary-json", top_says),
            *([] if watching else ["--plain"]),
        ],
        log=False,
    )
    children.start(
        "server",
        [
            *where,
            *(beside_python("opentelemetry-instrument"), "--service_name", "demo"),
            *("--traces_exporter", "otlp", "--metrics_exporter", "otlp", "--logs_exporter", "otlp"),
            *("--exporter_otlp_protocol", "grpc", "--exporter_otlp_endpoint", f"http://127.0.0.1:{otlp}"),
            *("--metric_export_interval", EXPORT_INTERVAL_S * 1000),
            *(sys.executable, EXAMPLES / "serve.py", "--port", port, *limits),
        ],
    )
    url = f"http://127.0.0.1:{port}"
    wait_until_healthy(url, children)
    time.sleep(EXPORT_INTERVAL_S)  # so that top sees the server before it is driven

    children.start("load", [sys.executable, EXAMPLES / "load.py", "--seconds", seconds, url])
    limit = time.monotonic() + seconds + 60
    while children.ended("load") is None:
        children.check()
        if time.monotonic() > limit:
            raise DemoFailed("the load does not end")
        time.sleep(0.2)
    time.sleep(EXPORT_INTERVAL_S)  # the last export
    children.stop("server")
    children.stop("top", signal.SIGINT)
    print(f"\nThe load: {children.tail('load')}")
    return json.loads(top_says.read_text())


def main() -> int:
    seconds = float(os.environ.get("DEMO_SECONDS") or 60)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="torchmem-demo-"))
    children = Children(folder)
    try:
        summary = run(children, folder, seconds)
        return 0
    except DemoFailed as failure:
        print(f"\nThe demo failed: {failure}\nLogs: {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        children.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
