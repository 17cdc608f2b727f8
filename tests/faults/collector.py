# SPDX-License-Identifier: Apache-2.0
"""A collector of the faults' own: takes OTLP over HTTP in a mood, keeps the bodies as they came.

    python collector.py PORT DIRECTORY MOOD

``good`` answers as it should, ``refusing`` with 503, ``slow`` never, ``garbage`` with bytes that are no HTTP.
"""

from __future__ import annotations

import gzip
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from typing_extensions import Self

MESSAGES = {
    "metrics": ExportMetricsServiceRequest,
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
}


class Collector:
    """One in a process of its own, on a port that stays the same while it comes and goes."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, mood: str = "good") -> None:
        """Return once it listens."""
        # it has no need of the GPU that the tests' own processes run on
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.port), str(self.directory), mood], env=environment
        )
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("the collector does not come up")

    def stop(self) -> None:
        """As a crash does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # what came

    def bodies(self) -> list[bytes]:
        """Every body as it came, unzipped, in order."""
        return [file.read_bytes() for file in sorted(self.directory.glob("*.bin"))]

    def messages(self, signal_: str) -> list[Any]:
        files = sorted(self.directory.glob(f"*-{signal_}.bin"))
        return [MESSAGES[signal_].FromString(file.read_bytes()) for file in files]

    def points(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The resource's attributes, the metric's name and the point, oldest first."""
        for message in self.messages("metrics"):
            for resource in message.resource_metrics:
                of = attributes(resource.resource)
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in getattr(metric, metric.WhichOneof("data")).data_points:
                        yield of, metric.name, point

    def last(self, name: str, by: str = "process.pid") -> dict[Any, float]:
        """The last points of a metric from each process, summed: their values, or counts of a histogram."""
        last: dict[Any, dict[Any, float]] = {}
        for of, metric, point in self.points():
            if metric == name:
                value = point.count if hasattr(point, "count") else point.as_int or point.as_double
                last.setdefault(of.get(by), {})[tuple(sorted(attributes(point).items()))] = value
        return {who: sum(values.values()) for who, values in last.items()}

    def metrics_of(self) -> dict[Any, set[str]]:
        """The names of our metrics by the process that sent them."""
        found: dict[Any, set[str]] = {}
        for of, name, _ in self.points():
            found.setdefault(of.get("process.pid"), set())
            if name.startswith("torch."):
                found[of.get("process.pid")].add(name)
        return found

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        return [
            (attributes(resource.resource), span)
            for message in self.messages("traces")
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(thing: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in thing.attributes}


def serve(port: int, directory: Path, mood: str) -> None:
    number = itertools.count()
    began = time.time_ns()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if mood == "slow":
                time.sleep(3600)
            if mood == "garbage":
                self.wfile.write(b"\x00\xffthis is no HTTP\r\n" * 100)
                self.close_connection = True
                return
            if mood == "good":
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                kind = self.path.rpartition("/")[2]
                whole = directory / f"{began}-{next(number):06}-{kind}.bin"
                whole.with_suffix(".partial").write_bytes(body)
                whole.with_suffix(".partial").rename(whole)
            self.send_response(200 if mood == "good" else 503)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None: ...

    parent = os.getppid()

    def leave_with_the_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    threading.Thread(target=leave_with_the_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
