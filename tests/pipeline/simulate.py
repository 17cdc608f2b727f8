# SPDX-License-Identifier: Apache-2.0
"""A fleet in one process: what the package really exports, told again by as many instances as wanted.

    python -m tests.pipeline.simulate count      series and bytes for a device and for a target
    python -m tests.pipeline.simulate send --instances 1000 --endpoint 127.0.0.1:4317
    python -m tests.pipeline.simulate measure    what a collector and a Prometheus cost here, both paths

The export that is told again is recorded from a process on the emulated GPU. `measure` runs the committed
files, as the tests do, with exports every 12 s instead of every 60; docs/SIZING.md has what it printed.
"""

from __future__ import annotations

import argparse
import gzip
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics

from .parts import ROOT
from .servers import Prometheus, Server, collector, free_ports, prometheus

EMULATOR = ROOT / "tests" / "emulator" / "run"
MIB = 2**20
RESOURCES_A_REQUEST = 50
SERVICE = "simulated"


# ------------------------------------------------------------------------------------------- one real export


def record(devices: int = 1, targets: int = 1) -> ResourceMetrics:
    """What one process with so many devices and targets exports, every target alone and overlapping."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "export"
        argv = [sys.executable, EMULATOR, "--memory", "1GiB", "--devices", devices, "--", sys.executable]
        argv += ["-m", "tests.pipeline.simulate", "be-one", "--devices", devices, "--targets", targets]
        done = subprocess.run(
            [*map(str, argv), "--to", str(written)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        if done.returncode:
            raise RuntimeError(f"no export could be recorded: {done.stderr.strip().splitlines()[-1:]}")
        return ResourceMetrics.FromString(written.read_bytes())


def be_one(devices: int, targets: int, to: Path) -> None:
    """In a process of its own, on the emulated GPU: the package as it is, one export in OTLP."""
    import torch
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

    reader = InMemoryMetricReader()
    pod = {
        "service.name": SERVICE,
        "service.namespace": "serving",
        "service.instance.id": "00000000-0000-4000-8000-000000000000",
        "k8s.namespace.name": "serving",
        "k8s.deployment.name": "images-and-text",
        "k8s.pod.name": "images-and-text-7d9c5b8f6d-abcde",
        "k8s.node.name": "gpu-node-0000",
    }
    provider = MeterProvider([reader], resource=Resource.create(pod))
    instrumentor = TorchMemInstrumentor()
    # Spans that are recorded, for the exemplars of histograms.
    instrumentor.instrument(meter_provider=provider, tracer_provider=TracerProvider(), snapshot_share=0.1)
    kept = [
        torch.empty(size * MIB, dtype=torch.uint8, device=f"cuda:{each}")
        for each in range(devices)
        for size in (8, 30)
    ]
    kept += [torch.empty(1000, dtype=torch.uint8, device=f"cuda:{each}") for each in range(devices)]
    kept.append(torch.empty(MIB, dtype=torch.uint8, pin_memory=True))

    def every_target() -> None:
        for number in range(targets):
            _call(f"operation-{number}", alone=True)
            _call(f"operation-{number}", alone=False)

    def _call(name: str, *, alone: bool) -> None:
        barrier = threading.Barrier(1 if alone else 2)

        def call() -> None:
            with track(name):
                barrier.wait(30)
                for each in range(devices):  # each call grows: only growths have exemplars
                    kept.append(torch.empty(10 * MIB, dtype=torch.uint8, device=f"cuda:{each}"))
                barrier.wait(30)

        threads = [threading.Thread(target=call) for _ in range(barrier.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    every_target()
    reader.get_metrics_data()
    time.sleep(0.5)  # a moment without a request, for a snapshot
    every_target()  # exemplars are of one export alone
    (export,) = encode_metrics(reader.get_metrics_data()).resource_metrics
    to.write_bytes(export.SerializeToString())


def points_of(metric: Metric) -> Any:
    return getattr(metric, metric.WhichOneof("data")).data_points


def series_of(export: ResourceMetrics) -> Counter[str]:
    """Prometheus's series for each metric: a histogram has one for each bucket, and two more."""
    counted: Counter[str] = Counter()
    for scope in export.scope_metrics:
        for metric in scope.metrics:
            for point in points_of(metric):
                is_histogram = metric.WhichOneof("data") == "histogram"
                counted[metric.name] += len(point.bucket_counts) + 2 if is_histogram else 1
    return counted


@dataclass(frozen=True, slots=True)
class Size:
    series: int
    plain: int
    """Bytes of OTLP."""
    zipped: int

    @classmethod
    def of(cls, export: ResourceMetrics) -> Size:
        request = ExportMetricsServiceRequest(resource_metrics=[export]).SerializeToString()
        return cls(series_of(export).total(), len(request), len(gzip.compress(request)))

    def __sub__(self, other: Size) -> Size:
        return Size(self.series - other.series, self.plain - other.plain, self.zipped - other.zipped)


def count() -> str:
    """The table of docs/SIZING.md: a process, and what each more device and target adds."""
    one, devices, targets = (Size.of(record(*each)) for each in ((1, 1), (2, 1), (1, 2)))
    rows = [
        ("a process with one device and one target", one),
        ("each further device", devices - one),
        ("each further target", targets - one),
    ]
    lines = ["| | series | bytes of OTLP an export | gzipped |", "|---|---|---|---|"]
    lines += [f"| {name} | {size.series} | {size.plain:,} | {size.zipped:,} |" for name, size in rows]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- many of them


class Fleet:
    """So many instances of the recorded process: each with its own identity, all with moving figures."""

    def __init__(self, template: ResourceMetrics, instances: int) -> None:
        self._random = random.Random(instances)
        self.refused = 0
        self._exports = [self._instance(template, number) for number in range(instances)]

    def _instance(self, template: ResourceMetrics, number: int) -> ResourceMetrics:
        export = ResourceMetrics()
        export.CopyFrom(template)
        own = {
            "service.instance.id": f"00000000-0000-4000-8000-{number:012x}",
            "k8s.pod.name": f"images-and-text-7d9c5b8f6d-{number:05d}",
            "k8s.node.name": f"gpu-node-{number // 8:04d}",
        }
        for attribute in export.resource.attributes:
            if attribute.key in own:
                attribute.value.string_value = own[attribute.key]
        for point in _points(export):
            for attribute in point.attributes:
                if attribute.key == "hw.id":
                    attribute.value.string_value = f"GPU-{number:08x}{attribute.value.string_value[12:]}"
        return export

    def requests(self) -> Iterator[ExportMetricsServiceRequest]:
        """One export of all of them: totals have climbed, figures have moved, a request more was measured."""
        now = time.time_ns()
        for export in self._exports:
            for point in _points(export):
                point.time_unix_nano = now
                if hasattr(point, "bucket_counts"):
                    bucket = self._random.randrange(len(point.bucket_counts))
                    point.bucket_counts[bucket] += 1
                    point.count += 1
                elif point.WhichOneof("value") == "as_int":
                    point.as_int += self._random.randrange(0, 4096)
        for start in range(0, len(self._exports), RESOURCES_A_REQUEST):
            yield ExportMetricsServiceRequest(
                resource_metrics=self._exports[start : start + RESOURCES_A_REQUEST]
            )

    def _export(self, stub: MetricsServiceStub, request: ExportMetricsServiceRequest) -> Any:
        """As the SDK does: what is refused for now is tried again."""
        for pause in (1, 2, 4, 8, None):
            try:
                return stub.Export(request, timeout=30)
            except grpc.RpcError as error:
                if pause is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.refused += 1
                time.sleep(pause)
        raise AssertionError("unreachable")

    def send(self, endpoint: str, seconds: float, interval: float) -> tuple[int, float]:
        """Exports every `interval` for so long. Returns how many, and the seconds that the slowest took."""
        end, exports, slowest = time.monotonic() + seconds, 0, 0.0
        with grpc.insecure_channel(endpoint) as channel:
            stub = MetricsServiceStub(channel)
            while time.monotonic() < end:
                begun = time.monotonic()
                for request in self.requests():
                    answer = self._export(stub, request)
                    if answer.partial_success.rejected_data_points:
                        raise RuntimeError(f"refused: {answer.partial_success.error_message}")
                exports, slowest = exports + 1, max(slowest, time.monotonic() - begun)
                time.sleep(max(0.0, min(begun + interval, end) - time.monotonic()))
        return exports, slowest


def _points(export: ResourceMetrics) -> Iterator[Any]:
    for scope in export.scope_metrics:
        for metric in scope.metrics:
            yield from points_of(metric)


# -------------------------------------------------------------------------------------------- what they cost


class Meter:
    """A process's CPU seconds, and the most memory it was seen to hold."""

    def __init__(self, server: Server) -> None:
        self._process = psutil.Process(server.pid)
        self._begun = self._cpu()
        self.peak = 0

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    @property
    def cpu(self) -> float:
        return self._cpu() - self._begun

    def look(self) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss)


@dataclass(frozen=True, slots=True)
class Cost:
    instances: int
    path: str
    series: int
    """In Prometheus: theirs, and what the rules record of them."""
    recorded: int
    exports: int
    refused: int
    """Requests that the collector would not take at first."""
    collector_cpu: float
    collector_peak: int
    prometheus_cpu: float
    prometheus_peak: int
    page: int
    """Bytes of one scrape; 0 by push."""
    page_seconds: float
    rules_seconds: float
    """The last evaluation of all rules."""


def measure(
    instances: int, path: str, seconds: float = 48, interval: float = 12, *, rules: bool = True
) -> Cost:
    """Both servers on the committed files, one path, so many instances for so long; or without the rules."""
    fleet = Fleet(record(1, 1), instances)
    push_port = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        otelcol = collector(
            folder,
            ["otel-collector.yaml", f"metrics-{path}.yaml", "gateway.yaml"],
            environment={"PROMETHEUS_OTLP_URL": f"http://127.0.0.1:{push_port}/api/v1/otlp/v1/metrics"},
        )
        with otelcol:
            replace = {"127.0.0.1:8888": otelcol.own}
            if path == "scrape":
                replace["127.0.0.1:8889"] = otelcol.scrape
            change: dict[str, object] = {} if rules else {"rule_files": []}
            store = prometheus(
                folder, f"prometheus-{path}.yaml", port=push_port, replace=replace, change=change
            )
            with store:
                meters = [Meter(otelcol), Meter(store)]
                over = threading.Event()

                def look() -> None:
                    while not over.wait(0.25):
                        for meter in meters:
                            meter.look()

                watcher = threading.Thread(target=look)
                watcher.start()
                try:
                    exports, _ = fleet.send(otelcol.grpc, seconds, interval)
                finally:
                    over.set()
                    watcher.join()
                # Before anything is asked of them, which costs too.
                used = [meter.cpu for meter in meters]
                page, page_seconds = _page(otelcol.scrape) if path == "scrape" else (0, 0.0)
                return Cost(
                    instances,
                    path,
                    _count(store, f'{{job="serving/{SERVICE}", __name__!~"torchmem:.*"}}'),
                    _count(store, f'{{job="serving/{SERVICE}", __name__=~"torchmem:.*"}}'),
                    exports,
                    fleet.refused,
                    used[0],
                    meters[0].peak,
                    used[1],
                    meters[1].peak,
                    page,
                    page_seconds,
                    sum(group["evaluationTime"] for group in store.get("rules")["groups"]),
                )


def _count(store: Prometheus, selector: str) -> int:
    return int(store.value(f"count({selector})") or 0)


def _page(address: str) -> tuple[int, float]:
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        return len(answer.read()), time.monotonic() - begun


def measured(costs: Sequence[Cost]) -> str:
    lines = [
        "| instances | path | series (recorded) | collector CPU s | collector MiB | Prometheus CPU s "
        "| Prometheus MiB | page | rules s | exports (refused) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cost in costs:
        page = f"{cost.page / 1e6:.2f} MB in {cost.page_seconds:.2f} s" if cost.page else "-"
        lines.append(
            f"| {cost.instances:,} | {cost.path} | {cost.series:,} ({cost.recorded:,}) "
            f"| {cost.collector_cpu:.2f} | {cost.collector_peak / MIB:.0f} "
            f"| {cost.prometheus_cpu:.2f} | {cost.prometheus_peak / MIB:.0f} "
            f"| {page} | {cost.rules_seconds:.3f} | {cost.exports} ({cost.refused}) |"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("count", help="series and bytes for a device and for a target")
    send = commands.add_parser("send", help="export as a fleet would")
    send.add_argument("--instances", type=int, default=100)
    send.add_argument("--endpoint", default="127.0.0.1:4317")
    send.add_argument("--seconds", type=float, default=60)
    send.add_argument("--interval", type=float, default=60)
    cost = commands.add_parser("measure", help="what collector and Prometheus cost here")
    cost.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    cost.add_argument("--paths", nargs="+", choices=("push", "scrape"), default=["push", "scrape"])
    cost.add_argument("--seconds", type=float, default=48)
    cost.add_argument("--without-rules", action="store_true", help="Prometheus alone, without its rules")
    one = commands.add_parser("be-one")
    one.add_argument("--devices", type=int, required=True)
    one.add_argument("--targets", type=int, required=True)
    one.add_argument("--to", type=Path, required=True)
    chosen = parser.parse_args()
    # As Ctrl-C does: the servers that were started are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if chosen.command == "be-one":
        be_one(chosen.devices, chosen.targets, chosen.to)
    elif chosen.command == "count":
        print(count())
    elif chosen.command == "send":
        exports, slowest = Fleet(record(1, 1), chosen.instances).send(
            chosen.endpoint, chosen.seconds, chosen.interval
        )
        print(f"{exports} exports of {chosen.instances} instances, the slowest in {slowest:.2f} s")
    else:
        costs: list[Cost] = []
        for path in chosen.paths:
            for instances in chosen.instances:
                rules = not chosen.without_rules
                costs.append(measure(instances, path, chosen.seconds, rules=rules))
                print(measured(costs[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        print(measured(costs))


if __name__ == "__main__":
    main()
