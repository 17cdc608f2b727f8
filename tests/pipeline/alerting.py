# SPDX-License-Identifier: Apache-2.0
"""From a process to the webhook: collector, Prometheus with the rules, Alertmanager, and who gets its posts.

All on the repository's own files, by either path. A scale other than 1 is for the rules (written by their own
source at that scale) and for the intervals of everything else, in the same proportion.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from . import expressions
from .parts import ROOT
from .servers import CONFIG, Prometheus, alertmanager, collector, free_ports, prometheus, until

EMULATOR = ROOT / "tests" / "emulator" / "run"
FRAGMENTING = Path(__file__).with_name("fragmenting.py")
EXPORT = "60s"
"""The SDK's default interval."""
LOOKBACK = "5m"
"""Prometheus's default."""
EXPIRATION = "3m"
"""metrics-scrape.yaml's default."""
PATHS = ("scrape", "push")


def seconds(duration: str) -> float:
    """Of one of Prometheus's durations."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(count) * units[unit] for count, unit in re.findall(r"(\d+)(ms|[smhd])", duration))


def at_scale(duration: str, scale: float) -> str:
    return duration if scale == 1 else f"{round(1000 * scale * seconds(duration))}ms"


@dataclass(frozen=True, slots=True)
class Post:
    """An alert as Alertmanager posted it."""

    at: float
    """When it came, by the clock of the day."""
    alert: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.alert["labels"]["alertname"]

    @property
    def job(self) -> str:
        return self.alert["labels"]["job"]


@dataclass
class Webhook:
    """Who is told: every alert that was posted, in order."""

    url: str
    posts: list[Post] = field(default_factory=list)

    def firing(self, job: str) -> list[Post]:
        return [post for post in self.posts if post.job == job and post.alert["status"] == "firing"]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    hook = Webhook("")

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            now = time.time()
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            hook.posts.extend(Post(now, alert) for alert in told["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    hook.url = f"http://127.0.0.1:{server.server_port}/alerts"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True, slots=True)
class Stated:
    """What the configuration says an alert takes, in seconds."""

    export: float
    scrape: float
    evaluation: float
    hold: float
    group_wait: float

    @property
    def to_fire(self) -> float:
        """An evaluation for the recording rules, one for the alert on them, one that sees the hold over."""
        return self.scrape + 3 * self.evaluation + self.hold

    @property
    def whole(self) -> float:
        """From what happens to the webhook."""
        return self.export + self.to_fire + self.group_wait


@dataclass
class Alerting:
    """All of it, running."""

    path: str
    scale: float
    otlp: str
    """Where a process sends to, `host:port` of gRPC."""
    prometheus: Prometheus
    webhook: Webhook
    config: dict[str, Any]
    """Prometheus's, as it runs."""
    routes: dict[str, Any]
    """Alertmanager's."""
    rules: list[dict[str, Any]]

    def stated(self, alert: str) -> Stated:
        rule = next(each for each in self.rules if each.get("alert") == alert)
        route = self.routes["route"]
        severity = f'severity="{rule["labels"]["severity"]}"'
        chosen = next((each for each in route["routes"] if each["matchers"] == [severity]), {})
        return Stated(
            export=seconds(at_scale(EXPORT, self.scale)),
            scrape=seconds(self.config["global"]["scrape_interval"]) if self.path == "scrape" else 0,
            evaluation=seconds(self.config["global"]["evaluation_interval"]),
            hold=seconds(rule.get("for", "0s")),
            group_wait=seconds(chosen.get("group_wait", route["group_wait"])),
        )

    def missed(self) -> float:
        """Seconds of evaluations that Prometheus left out on a busy machine, in all groups."""
        name = "prometheus_rule_group_iterations_missed_total"
        with urllib.request.urlopen(f"{self.prometheus.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        counts = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, counts)) * seconds(self.config["global"]["evaluation_interval"])


@contextlib.contextmanager
def alerting(folder: Path, path: str, scale: float = 1) -> Iterator[Alerting]:
    """The pipeline with its alerts, by one path."""
    rules = CONFIG / "prometheus" / "rules"
    if scale != 1:
        rules = folder / "rules"
        written = [sys.executable, expressions.RULES_SOURCE, "--scale", str(scale), "--to", rules]
        subprocess.run(written, check=True)
    with contextlib.ExitStack() as started:
        hook = started.enter_context(webhook())
        prometheus_port, alertmanager_port = free_ports(2)
        otelcol = started.enter_context(
            collector(
                folder,
                ["otel-collector.yaml", f"metrics-{path}.yaml"],
                environment={
                    "PROMETHEUS_OTLP_URL": f"http://127.0.0.1:{prometheus_port}/api/v1/otlp/v1/metrics",
                    "METRIC_EXPIRATION_SECONDS": f"{scale * seconds(EXPIRATION):.0f}",
                },
            )
        )
        routes = yaml.safe_load((CONFIG / "prometheus" / "alertmanager.yaml").read_text())["route"]
        waits = ("group_wait", "group_interval", "repeat_interval")
        places = {"route": routes} | {f"route.routes.{at}": each for at, each in enumerate(routes["routes"])}
        started.enter_context(
            alertmanager(
                folder,
                port=alertmanager_port,
                replace={"http://127.0.0.1:9095/alerts": hook.url},
                change={
                    f"{place}.{wait}": at_scale(values[wait], scale)
                    for place, values in places.items()
                    for wait in waits
                    if wait in values
                },
            )
        )
        name = f"prometheus-{path}.yaml"
        intervals = yaml.safe_load((CONFIG / "prometheus" / name).read_text())["global"]
        server = started.enter_context(
            prometheus(
                folder,
                name,
                port=prometheus_port,
                replace={
                    "127.0.0.1:9093": f"127.0.0.1:{alertmanager_port}",
                    "127.0.0.1:8888": otelcol.own,
                    **({"127.0.0.1:8889": otelcol.scrape} if path == "scrape" else {}),
                },
                change={
                    "rule_files": [str(rules / "*.yaml")],
                    **{f"global.{interval}": at_scale(value, scale) for interval, value in intervals.items()},
                },
                arguments=[f"--query.lookback-delta={at_scale(LOOKBACK, scale)}"],
            )
        )
        yield Alerting(
            path,
            scale,
            otelcol.grpc,
            server,
            hook,
            yaml.safe_load((folder / "prometheus.yaml").read_text()),
            yaml.safe_load((folder / "alertmanager.yaml").read_text()),
            expressions.rules(rules),
        )


# ------------------------------------------------------------------------------------------------- the story


@dataclass(frozen=True, slots=True)
class Told:
    """A process's own lines: see fragmenting.py."""

    lines: tuple[Mapping[str, float], ...]

    @property
    def sick_since(self) -> float:
        """When torch's own figures first said what the alert is about."""
        return next(
            each["at"] for each in self.lines if each.get("trapped", 0) > 0.35 and each["retries"] > 0
        )

    @property
    def exported_after(self) -> float:
        """When the first export that could tell it had been made."""
        exports = (each["exported_at"] for each in self.lines if "exported_at" in each)
        return next(at for at in exports if at >= self.sick_since)


@dataclass(frozen=True, slots=True)
class Story:
    """What came of two processes, one that fragments and one in good health."""

    sick: Told
    healthy: Told
    posts: tuple[Post, ...]
    """Of the one that fragments, firing."""
    posts_of_the_healthy: tuple[Post, ...]
    alerts_of_the_healthy: tuple[str, ...]
    """By their names, also those that only began to be one."""
    active_at: float
    """When Prometheus saw it first."""
    missed: float
    largest_gap: float
    """Between two points of the one that fragments, in seconds."""
    stated: Stated


ALERT, OUT_OF_MEMORY = "TorchMemFragmented", "TorchMemOutOfMemory"


class Stopped(Exception):
    """Nobody wants to know any more."""


def story(running: Alerting, folder: Path, stop: threading.Event | None = None) -> Story:
    """Both processes at once, until the alert has come and a while longer. Raises Stopped at `stop`."""
    stop = stop or threading.Event()

    def has_come() -> bool:
        if stop.is_set():
            raise Stopped
        return {post.name for post in running.webhook.firing("fragment")} >= {ALERT, OUT_OF_MEMORY}

    stated = running.stated(ALERT)
    length = 2 * stated.whole + 30  # with their start on a busy machine
    with workload(running, folder, "fragment", length), workload(running, folder, "healthy", length):
        until(
            has_come,
            length + 60,
            f"{ALERT} at the webhook: {running.prometheus.get('alerts')}",
        )
        active = next(
            each
            for each in running.prometheus.get("alerts")["alerts"]
            if each["labels"]["alertname"] == ALERT and each["labels"]["job"] == "fragment"
        )
        stop.wait(min(stated.hold, 60))
        window = f"{round(1000 * (length + 60))}ms"
        ever = running.prometheus.query(f'count_over_time(ALERTS{{job="healthy"}}[{window}])')
        points = running.prometheus.query(f'torch_memory_limit_bytes{{job="fragment"}}[{window}]')
        missed = running.missed()
    at = [float(when) for each in points for when, _ in each["values"]]
    return Story(
        sick=told(folder / "fragment.jsonl"),
        healthy=told(folder / "healthy.jsonl"),
        posts=tuple(running.webhook.firing("fragment")),
        posts_of_the_healthy=tuple(running.webhook.firing("healthy")),
        alerts_of_the_healthy=tuple(each["metric"]["alertname"] for each in ever),
        active_at=instant(active["activeAt"]),
        missed=missed,
        largest_gap=max(later - sooner for sooner, later in pairwise(at)),
        stated=stated,
    )


@contextlib.contextmanager
def workload(running: Alerting, folder: Path, health: str, length: float) -> Iterator[None]:
    """fragmenting.py, under the name of its health, on a GPU of its own."""
    command = [sys.executable, EMULATOR, "--memory", "1GiB", "--", sys.executable, FRAGMENTING, health]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    with open(folder / f"{health}.jsonl", "w") as lines, open(folder / f"{health}.log", "w") as log:
        process = subprocess.Popen(
            [*map(str, command), "--seconds", str(length)],
            stdout=lines,
            stderr=log,
            start_new_session=True,
            env={
                **clean,
                "OTEL_SERVICE_NAME": health,
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{running.otlp}",
                "OTEL_EXPORTER_OTLP_INSECURE": "true",
                "OTEL_METRIC_EXPORT_INTERVAL": f"{1000 * running.stated(ALERT).export:.0f}",
            },
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def told(file: Path) -> Told:
    whole = file.read_text().rpartition("\n")[0]
    return Told(tuple(json.loads(line) for line in whole.splitlines()))


def instant(text: str) -> float:
    """Of a time as Prometheus and Alertmanager write it, to the microsecond."""
    stamp = re.sub(r"(\.\d{1,6})\d*", r"\1", text.replace("Z", "+00:00"))
    stamp = re.sub(r"\.(\d+)", lambda found: "." + found[1].ljust(6, "0"), stamp)
    return datetime.fromisoformat(stamp).timestamp()
