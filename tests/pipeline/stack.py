# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline at once, and an instrumented example server in front of it.

One collector, one Prometheus for each path, Jaeger; all on the files of collector-config/. The tests shorten
intervals, each in the same proportion to the others as it is committed, and say so by `Pace`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .parts import ROOT
from .servers import Collector, Jaeger, Prometheus, Server, collector, free_ports, jaeger, prometheus

EMULATOR = ROOT / "tests" / "emulator" / "run"
SERVE = ROOT / "examples" / "serve.py"
SCRIPTS = Path(sys.executable).parent
BOTH_PATHS = {"service::pipelines::metrics::exporters": ["prometheus", "otlp_http/prometheus"]}


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the pipeline runs, in seconds; the defaults are those of the tests."""

    export: float = 2
    scrape: float = 0.5
    decision_wait: float = 6
    lookback: float = 10

    @property
    def expiration(self) -> float:
        """Three exports, as it is committed for the SDK's interval of a minute."""
        return 3 * self.export


@dataclass
class Stack:
    pace: Pace
    otelcol: Collector
    scraping: Prometheus
    pushed: Prometheus
    jaeger: Jaeger

    @property
    def each_prometheus(self) -> tuple[Prometheus, Prometheus]:
        return self.scraping, self.pushed


@contextlib.contextmanager
def running(
    folder: Path, pace: Pace | None = None, change: Mapping[str, object] | None = None
) -> Iterator[Stack]:
    """The pipeline, ready; both paths at once, so there are two Prometheus. `change` is for both."""
    pace = pace or Pace()
    change = {**faster(pace), **(change or {})}
    with contextlib.ExitStack() as started:
        traces = started.enter_context(jaeger(folder))
        push_port, scrape_port = free_ports(2)
        otelcol = started.enter_context(
            collector(
                folder,
                ["otel-collector.yaml", "metrics-scrape.yaml", "metrics-push.yaml"],
                settings=BOTH_PATHS,
                environment={
                    "TRACES_ENDPOINT": traces.grpc,
                    "PROMETHEUS_OTLP_URL": f"http://127.0.0.1:{push_port}/api/v1/otlp/v1/metrics",
                    "METRIC_EXPIRATION_SECONDS": f"{pace.expiration:.0f}",
                    "DECISION_WAIT_SECONDS": f"{pace.decision_wait:.0f}",
                },
            )
        )
        scraping = started.enter_context(
            prometheus(
                folder,
                "prometheus-scrape.yaml",
                name="prometheus-scrape",
                port=scrape_port,
                replace={"127.0.0.1:8889": otelcol.scrape, "127.0.0.1:8888": otelcol.own},
                change=change,
                arguments=[f"--query.lookback-delta={pace.lookback}s"],
            )
        )
        pushed = started.enter_context(
            prometheus(
                folder,
                "prometheus-push.yaml",
                name="prometheus-push",
                port=push_port,
                replace={"127.0.0.1:8888": otelcol.own},
                change=change,
                arguments=[f"--query.lookback-delta={pace.lookback}s"],
            )
        )
        yield Stack(pace, otelcol, scraping, pushed, traces)


def faster(pace: Pace) -> dict[str, object]:
    every = f"{int(1000 * pace.scrape)}ms"
    return {
        "global.scrape_interval": every,
        "global.scrape_timeout": every,
        "global.evaluation_interval": "5s",
    }


class Example(Server):
    url: str


def example(
    folder: Path,
    otlp: str,
    *,
    name: str = "server",
    service: str = "example",
    program: Path = SERVE,
    arguments: Sequence[object] = (),
    memory: str = "3GiB",
    export: float = 2,
    exporters: str = "otlp",
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    real_if_present: bool = False,
) -> Example:
    """examples/serve.py (or a `program` around it) as a user runs it: under `opentelemetry-instrument`.

    On the emulated GPU with so much `memory`. `otlp` is `host:port` of a collector's gRPC; `exporters` go to
    metrics and traces alike, so that `otlp,console` also writes what is sent to the log.
    """
    port = port or free_ports(1)[0]
    command: list[object] = [sys.executable, EMULATOR, "--memory", memory]
    if real_if_present:
        command.append("--real-if-present")
    command += ["--", SCRIPTS / "opentelemetry-instrument", sys.executable, program, "--port", port]
    command += ["--cudnn", 0, *arguments]
    clean = {variable: "" for variable in os.environ if variable.startswith("OTEL_")}
    server = Example(
        name,
        command,
        folder,
        ready=f"http://127.0.0.1:{port}/healthz",
        ports=[port],
        ready_limit_s=180,
        environment={
            **clean,
            "OTEL_SERVICE_NAME": service,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{otlp}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_METRICS_EXPORTER": exporters,
            "OTEL_TRACES_EXPORTER": exporters,
            "OTEL_LOGS_EXPORTER": "otlp",
            "OTEL_METRIC_EXPORT_INTERVAL": str(int(1000 * export)),
            "OTEL_BSP_SCHEDULE_DELAY": "500",
            "OTEL_BLRP_SCHEDULE_DELAY": "500",
            "OTEL_PYTHON_FASTAPI_EXCLUDED_URLS": "healthz,stats",
            **(environment or {}),
        },
    )
    server.url = f"http://127.0.0.1:{port}"
    return server
