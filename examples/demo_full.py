# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline before the demo's server: allocator to alert, metric to trace.

    python examples/demo_full.py    (or `make demo-full`; DEMO_SECONDS=300 is how long the server is driven)

Starts the collector, Prometheus, Alertmanager and Jaeger on the files of collector-config/ (built with Go the
first time), then `serve.py` under `opentelemetry-instrument` on this machine's GPU or an emulated one, then
`load.py`. The rules and every interval run thirty times as fast as they are committed, so that there is
something to see. Prints the addresses, what Prometheus says, each alert as it is delivered, and at the end
the way from a metric to the trace of the request that did it. Ends by itself, with Ctrl-C, or as soon
as one of its servers has ended; nothing is left. Killed itself, it leaves its folder of logs and no process.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
sys.path.insert(0, str(EXAMPLES.parent / "tests"))

from demo import has_gpu, seconds  # noqa: E402
from pipeline.parts import PARTS, ROOT, CannotBuild, part  # noqa: E402
from pipeline.servers import (  # noqa: E402
    CannotStart,
    Collector,
    Jaeger,
    Prometheus,
    Server,
    alertmanager,
    collector,
    ends_with_this_process,
    free_ports,
    jaeger,
    prometheus,
)
from pipeline.stack import Example, example  # noqa: E402

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RULES = ROOT / "collector-config" / "prometheus" / "rules.py"
SCALE = 1 / 30
EXPORT_S = 2  # of the SDK's 60
SERVICE = "demo"
TICK_S = 5

# As the files of collector-config/ have them, so that what you know of these servers holds.
PORTS = {
    "grpc": 4317,
    "http": 4318,
    "scrape": 8889,
    "health": 13133,
    "own": 8888,
    "prometheus": 9090,
    "alertmanager": 9093,
    "query": 16686,
    "query_grpc": 16685,
    "jaeger_grpc": 14317,
    "jaeger_health": 23133,
    "server": 8000,
}


class DemoError(Exception):
    """What went wrong, in words for the one who runs the demo."""


@dataclass(frozen=True, slots=True)
class Running:
    otelcol: Collector
    prometheus: Prometheus
    jaeger: Jaeger
    server: Example
    each: Sequence[Server]

    def expect_all(self) -> None:
        for one in self.each:
            if not one.running:
                raise DemoError(ended(one.name, one.returncode, one.log))


def ended(name: str, code: int | None, log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()][-8:] or ["it said nothing"]
    return "\n  ".join((f"{name} ended with {code}; its last lines:", *lines))


@contextlib.contextmanager
def everything(folder: Path, ports: dict[str, int]) -> Iterator[Running]:
    rules = folder / "rules"
    faster = [sys.executable, str(RULES), "--scale", str(SCALE), "--to", str(rules)]
    subprocess.run(faster, check=True, capture_output=True)
    with contextlib.ExitStack() as started:
        webhook = started.enter_context(listening_webhook())
        traces = started.enter_context(
            jaeger(
                folder,
                ports={
                    "grpc": ports["jaeger_grpc"],
                    "query": ports["query"],
                    "query_grpc": ports["query_grpc"],
                    "health": ports["jaeger_health"],
                },
            )
        )
        otelcol = started.enter_context(
            collector(
                folder,
                ["otel-collector.yaml", "metrics-push.yaml"],
                ports={door: ports[door] for door in ("grpc", "http", "scrape", "health", "own")},
                environment={
                    "TRACES_ENDPOINT": traces.grpc,
                    "PROMETHEUS_OTLP_URL": f"http://127.0.0.1:{ports['prometheus']}/api/v1/otlp/v1/metrics",
                    "DECISION_WAIT_SECONDS": "6",
                },
            )
        )
        alerts = started.enter_context(
            alertmanager(
                folder,
                port=ports["alertmanager"],
                replace={"http://127.0.0.1:9095/alerts": webhook},
                change={"route.group_wait": "1s", "route.group_interval": "10s"},
            )
        )
        metrics = started.enter_context(
            prometheus(
                folder,
                "prometheus-push.yaml",
                port=ports["prometheus"],
                replace={
                    "127.0.0.1:9093": f"127.0.0.1:{ports['alertmanager']}",
                    "127.0.0.1:8888": otelcol.own,
                },
                change={
                    "rule_files": [str(rules / "*.yaml")],
                    "global.evaluation_interval": "1s",
                    "global.scrape_interval": "1s",
                    "global.scrape_timeout": "1s",
                },
                arguments=["--query.lookback-delta=10s"],
            )
        )
        server = started.enter_context(
            example(
                folder,
                otelcol.grpc,
                service=SERVICE,
                port=ports["server"],
                export=EXPORT_S,
                real_if_present=True,
                # Of a larger GPU no more is used: the load fills this within seconds.
                arguments=["--memory-gib", 3] if has_gpu() else [],
                # Snapshots too are taken thirty times as often. Torch leaves a folder of its own in TMPDIR.
                environment={"OTEL_PYTHON_TORCHMEM_SNAPSHOT_SHARE": "0.03", "TMPDIR": str(folder)},
            )
        )
        yield Running(otelcol, metrics, traces, server, (traces, otelcol, alerts, metrics, server))


@contextlib.contextmanager
def listening_webhook() -> Iterator[str]:
    """Where Alertmanager delivers: on this screen. Its URL."""

    class Screen(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            for alert in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"]:
                firing = alert["status"] == "firing"
                text = alert["annotations"].get("summary", "") if firing else ""
                print(
                    f"  ALERT {'fires' if firing else 'ended'}: {alert['labels']['alertname']} {text}",
                    flush=True,
                )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Its own log is no part of the demo."""

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Screen)
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{receiver.server_port}/alerts"
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


@contextlib.contextmanager
def load(url: str, seconds: float, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(EXAMPLES / "load.py"), "--seconds", str(seconds), url]
    with open(log, "wb") as output:
        driven = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=ends_with_this_process(),  # noqa: PLW1509 - the one other thread is a webhook's
        )
    try:
        yield driven
    finally:
        driven.kill()
        driven.wait()


# ----------------------------------------------------------------------------------------------- what is seen

FIGURES = {
    "reserved": (f'sum(torchmem:reserved{{job="{SERVICE}"}})', lambda value: f"{value / 2**30:.2f} GiB"),
    "fragmentation": (f'max(torchmem:fragmentation{{job="{SERVICE}"}})', lambda value: f"{value:.0%}"),
    "headroom": (f'min(torchmem:headroom{{job="{SERVICE}"}})', lambda value: f"{value / 2**20:.0f} MiB"),
    "retries": (f'sum(torchmem:allocation_retries{{job="{SERVICE}"}})', lambda value: f"{value:.0f}"),
    "OOMs": (f'sum(torchmem:ooms{{job="{SERVICE}"}})', lambda value: f"{value:.0f}"),
}


def addresses(running: Running, ports: dict[str, int]) -> None:
    api = f"{running.prometheus.url}/api/v1"
    rows = [
        ("the server", running.server.url + "/docs", ""),
        ("Prometheus", running.prometheus.url, f"{api}/query?query=torchmem:fragmentation"),
        ("alerts", f"http://127.0.0.1:{ports['alertmanager']}", f"{api}/alerts"),
        ("Jaeger", running.jaeger.url, f"{running.jaeger.url}/api/traces?service={SERVICE}&limit=20"),
        ("the collector", f"http://{running.otelcol.own}/metrics", ""),
    ]
    print("\nTo open, while it runs:")
    for name, page, data in rows:
        print(f"  {name:14} {page:34} {data}".rstrip())
    if os.environ.get("TORCHMEM_PROMETHEUS") is None:
        print(
            "  (Prometheus and Jaeger as built here have their API and no pages: the addresses on the right\n"
            "  give JSON. For pages, name released binaries by TORCHMEM_PROMETHEUS and TORCHMEM_JAEGER.)"
        )
    print(flush=True)


def figures(running: Running) -> str:
    told = []
    for name, (question, form) in FIGURES.items():
        value = running.prometheus.value(question)
        told.append(f"{name} {'-' if value is None else form(value)}")
    return ", ".join(told)


def ask_for_too_much(url: str) -> None:
    """A picture that no 3 GiB hold: one out of memory error, with its evidence."""
    wanted = json.dumps({"width": 4096, "height": 4096}).encode()
    request = urllib.request.Request(f"{url}/images", wanted, {"content-type": "application/json"})
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=60).close()


def from_metric_to_trace(running: Running) -> list[str]:
    """The largest growths that still have their trace, as lines: metric, exemplar, spans."""
    series = running.prometheus.get(
        "query_exemplars",
        query=f'torch_memory_request_reserved_growth_bytes_bucket{{job="{SERVICE}"}}',
        start=time.time() - 3600,
        end=time.time() + 60,
    )
    exemplars = sorted(
        ((float(each["value"]), each["labels"]["trace_id"]) for one in series for each in one["exemplars"]),
        reverse=True,
    )
    for growth, trace_id in exemplars:
        if spans := running.jaeger.trace(trace_id):
            return [
                f"an exemplar of torch.memory.request.reserved_growth: {growth / 2**20:.0f} MiB",
                f"its trace: {running.jaeger.url}/trace/{trace_id}",
                *(f"  {line(span)}" for span in sorted(spans, key=lambda span: span["startTime"])[:6]),
            ]
    return []


def line(span: dict[str, object]) -> str:
    names = (
        "torch.memory.reserved.delta",
        "torch.memory.allocation.retries",
        "torch.memory.requests.concurrent",
    )
    tags = {name: span["tags"][name] for name in names if name in span["tags"]}
    return f"{span['operationName']}  {span['duration'] / 1000:.0f} ms  {tags or ''}".rstrip()


def logged(running: Running) -> list[str]:
    """What the out of memory errors said, in the log that the collector keeps."""
    if not running.otelcol.logs_file.exists():
        return []
    return [
        f"{record['body']['stringValue']}  (trace {record.get('traceId', '-')})"
        for text in running.otelcol.logs_file.read_text().splitlines()
        for resource in json.loads(text)["resourceLogs"]
        for scope in resource["scopeLogs"]
        for record in scope["logRecords"]
        if record.get("eventName") == "torch.memory.oom.evidence"
    ]


def wait(running: Running, seconds: float, driven: subprocess.Popen[bytes] | None = None) -> None:
    """Until then, or until the load has ended. Raises DemoError as soon as a server is gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and (driven is None or driven.poll() is None):
        running.expect_all()
        time.sleep(0.25)


def shown(running: Running, ports: dict[str, int], seconds: float, folder: Path) -> None:
    """`show`; one that does not answer because it has ended is named."""
    try:
        show(running, ports, seconds, folder)
    except (OSError, http.client.HTTPException, ValueError) as error:
        time.sleep(0.5)  # connections break a moment before the process is gone
        running.expect_all()
        raise DemoError(f"a server gave no answer: {error}") from error


def show(running: Running, ports: dict[str, int], seconds: float, folder: Path) -> None:
    addresses(running, ports)
    end = time.monotonic() + seconds
    too_much_at = end - seconds / 2
    with load(running.server.url, seconds, folder / "load.log") as driven:
        while driven.poll() is None and time.monotonic() < end + 60:
            if time.monotonic() > too_much_at:
                ask_for_too_much(running.server.url)
                too_much_at = float("inf")
            running.expect_all()
            print(f"  {figures(running)}", flush=True)
            wait(running, TICK_S, driven)
        if driven.poll() != 0:
            raise DemoError(ended("load", driven.poll(), (folder / "load.log").read_text(errors="replace")))
    wait(running, 10)  # the last traces are judged, the last points exported
    print(f"\nThe load: {(folder / 'load.log').read_text().strip()}\nIn Prometheus: {figures(running)}")
    way = from_metric_to_trace(running)
    print("\nFrom a metric to the request:", *way, sep="\n  ")
    told = logged(running)
    print("\nLogged:", *told[-3:], sep="\n  ", flush=True)
    missing = {
        "the figures in Prometheus": running.prometheus.value(FIGURES["retries"][0]) is not None,
        "an exemplar that opens its trace": bool(way),
        "the log of an out of memory error": bool(told),
    }
    if not all(missing.values()):
        raise DemoError(f"it did not show {' nor '.join(what for what, was in missing.items() if not was)}")


def ignore_signals() -> None:
    """From here on nothing keeps the demo from ending what it has started, a second Ctrl-C least of all."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end(number: int, _: object) -> None:
    ignore_signals()
    sys.exit(128 + number)


def remove(folder: Path) -> None:
    """All of it: what was just killed may still write for a moment."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("DEMO_SECONDS") or "300"
    parser.add_argument("--seconds", type=seconds, default=default, help="[DEMO_SECONDS, 300]")
    parser.add_argument(
        "--any-ports",
        action="store_true",
        default=os.environ.get("DEMO_PORTS") == "any",
        help="free ports instead of the usual ones (or DEMO_PORTS=any)",
    )
    chosen = parser.parse_args()
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True)) if chosen.any_ports else PORTS

    for number in SIGNALS:
        signal.signal(number, end)
    first = ends_with_this_process()
    Server.first_in_child = staticmethod(first) if first else None
    folder = Path(tempfile.mkdtemp(prefix="torchmem-demo-full-"))
    failure = ""
    try:
        for name in PARTS:
            part(name)  # what takes minutes is told before anything is started
        print(f"Starting, and then {chosen.seconds:g} s under load ...", flush=True)
        with everything(folder, ports) as running:
            shown(running, ports, chosen.seconds, folder)
            ignore_signals()
    except (CannotBuild, CannotStart, DemoError) as error:
        failure = str(error)
    finally:
        ignore_signals()
        if isinstance(sys.exc_info()[1], Exception):
            print(f"demo-full: all logs are in {folder}", file=sys.stderr)
        elif not failure:
            remove(folder)
    if failure:
        usual = " wants port " in failure and not chosen.any_ports
        hint = " (here: make demo-full DEMO_PORTS=any)" if usual else ""
        print(f"demo-full: {failure}{hint}", file=sys.stderr)
        remove(folder)
    return 1 if failure else 0


if __name__ == "__main__":
    raise SystemExit(main())
