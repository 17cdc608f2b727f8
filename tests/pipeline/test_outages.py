# SPDX-License-Identifier: Apache-2.0
"""What an outage costs: not the server its speed, not the counters their truth, not what was queued.

Outages last a few seconds here; OUTAGE_SECONDS=60 makes each a minute; on CI 20 s. The rest of the
pipeline's times are scaled as `Pace` says.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from pipeline.sender import Sender
from pipeline.servers import Collector, Jaeger, Prometheus, collector, free_ports, jaeger, prometheus, until
from pipeline.stack import Example, Stack, example

WATCHED = Path(__file__).with_name("watched_serve.py")
OUTAGE_S = float(os.environ.get("OUTAGE_SECONDS") or 6)
CALM_S = min(OUTAGE_S / 2, 10)
# A refused gRPC connection is tried again after growing pauses; beside it, an export and a scrape.
BACK_S = 15
# The four of them, one after the other, are the setup of the first test.
pytestmark = pytest.mark.timeout(300 + 10 * OUTAGE_S)
KILLED, HANGS, REFUSES, AWAY = OUTAGES = (
    "the collector is killed",
    "the collector hangs",
    "the collector refuses",
    "Prometheus and Jaeger are away",
)
COUNTERS = (
    "torch_memory_allocations_total",
    "torch_memory_turnover_bytes_total",
    "torch_memory_device_allocations_total",
    "torch_memory_request_duration_seconds_count",
)
IN_STATS = ("allocation.all.allocated", "allocated_bytes.all.allocated", "num_device_alloc")
"""What the allocator says of the first three."""


# --------------------------------------------------------------------------------- a server through all of it


class Driver(threading.Thread):
    """Asks one thing after the other, always the same, and notes how long each took."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ended = threading.Event()
        self.asked: list[tuple[float, float]] = []
        """When, and how long it took."""

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._ended.is_set():
                start = time.time()
                client.post("/generate", json={"prompt": "word", "max_new_tokens": 4}).raise_for_status()
                self.asked.append((start, time.time() - start))
                time.sleep(0.02)

    def end(self) -> None:
        self._ended.set()
        self.join(60)

    def median(self, phase: tuple[float, float]) -> float:
        return statistics.median(took for start, took in self.asked if phase[0] <= start < phase[1])


@dataclass
class Ordeal:
    stack: Stack
    service: str
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When each began and ended."""
    driver: Driver | None = None
    stats: dict[str, int] = field(default_factory=dict)
    latest: dict[str, dict[str, float]] = field(default_factory=dict)
    """Prometheus's name -> counter -> value, at rest after all."""
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Prometheus's name -> each sample of a counter that always climbs."""


@pytest.fixture(scope="module")
def ordeal(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    story = Ordeal(stack, "through-outages")
    server = example(
        tmp_path_factory.mktemp("server"),
        stack.otelcol.grpc,
        service=story.service,
        program=WATCHED,
        export=stack.pace.export,
    )
    with server:
        driver = story.driver = Driver(server.url)
        driver.start()
        time.sleep(2)  # the first requests warm up

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            start = time.time()
            yield
            story.phases[name] = start, time.time()

        def rest(which: str) -> None:
            recovered(story)
            with phase(f"calm {which}"):
                time.sleep(CALM_S)

        rest("before it is killed")
        with phase(KILLED):
            stack.otelcol.kill()
            time.sleep(OUTAGE_S)
        stack.otelcol.start()
        rest("before it hangs")
        with phase(HANGS):
            stack.otelcol.pause()
            time.sleep(OUTAGE_S)
        stack.otelcol.resume()
        rest("before it refuses")
        with phase(REFUSES), refusing(stack):
            time.sleep(OUTAGE_S)
        rest("before they are away")
        with phase(AWAY):
            for each in (*stack.each_prometheus, stack.jaeger):
                each.kill()
            time.sleep(OUTAGE_S)
        for each in (*stack.each_prometheus, stack.jaeger):
            each.start()
        rest("after all")
        driver.end()
        time.sleep(4 * stack.pace.export)
        story.stats = httpx.get(f"{server.url}/stats").json()
        for each in stack.each_prometheus:
            story.latest[each.name] = {
                counter: each.value(f'sum({counter}{{job="{story.service}"}})') or 0 for counter in COUNTERS
            }
            story.points[each.name] = samples(
                each, f'torch_memory_turnover_bytes_total{{job="{story.service}"}}'
            )
    return story


@contextmanager
def refusing(stack: Stack) -> Iterator[None]:
    """A collector in the place of the stack's that is over its memory limit."""
    stack.otelcol.stop()
    doors = {
        door: int(getattr(stack.otelcol, door).split(":")[1]) for door in ("grpc", "http", "scrape", "health")
    }
    limits = {"MEMORY_LIMIT_MIB": "2", "MEMORY_SPIKE_MIB": "1"}
    with collector(stack.otelcol.folder, name="refusing", ports=doors, environment=limits):
        yield
    stack.otelcol.start()


def samples(server: Prometheus, series: str) -> list[tuple[float, float]]:
    """Each (time, value) of the one series of the last half hour, as it was written."""
    found = server.query(f"{series}[30m]")
    return [(float(at), float(value)) for at, value in found[0]["values"]] if found else []


def recovered(story: Ordeal) -> None:
    """Waits until both Prometheus have a point that was made after now."""
    now = time.time()
    question = f'timestamp(torch_memory_turnover_bytes_total{{job="{story.service}"}})'
    for each in story.stack.each_prometheus:
        until(functools.partial(later_than, each, question, now), OUTAGE_S + 60, f"{each.name} has it again")


def later_than(server: Prometheus, question: str, moment: float) -> bool:
    return (server.value(question) or 0) > moment


@pytest.mark.parametrize("outage", OUTAGES)
def test_the_server_is_as_fast_in_an_outage_as_before(ordeal: Ordeal, outage: str) -> None:
    assert ordeal.driver is not None
    median = {name: ordeal.driver.median(phase) for name, phase in ordeal.phases.items()}
    # The calm before and after: a machine that was busier in one of them is not the outage's doing.
    names = list(ordeal.phases)
    calm = max(median[names[names.index(outage) + side]] for side in (-1, 1))
    assert median[outage] < 1.5 * calm + 0.005, {
        name: f"{1000 * each:.1f} ms" for name, each in median.items()
    }


@pytest.mark.parametrize("path", ["scraping", "pushed"])
def test_counters_are_right_after_all_outages(ordeal: Ordeal, path: str) -> None:
    assert ordeal.driver is not None
    latest = ordeal.latest[getattr(ordeal.stack, path).name]
    assert latest == {
        "torch_memory_allocations_total": ordeal.stats["allocation.all.allocated"],
        "torch_memory_turnover_bytes_total": ordeal.stats["allocated_bytes.all.allocated"],
        "torch_memory_device_allocations_total": ordeal.stats["num_device_alloc"],
        "torch_memory_request_duration_seconds_count": len(ordeal.driver.asked),
    }


@pytest.mark.parametrize("path", ["scraping", "pushed"])
def test_no_counter_ever_falls_so_no_rate_is_wrong(ordeal: Ordeal, path: str) -> None:
    points = ordeal.points[getattr(ordeal.stack, path).name]
    values = [value for _, value in sorted(points)]
    assert len(values) > 10
    assert values == sorted(values)
    server = getattr(ordeal.stack, path)
    for counter in COUNTERS:
        found = server.query(f'resets({counter}{{job="{ordeal.service}"}}[30m]) > 0')
        assert found == [], counter


@pytest.mark.parametrize("outage", OUTAGES)
@pytest.mark.parametrize("path", ["scraping", "pushed"])
def test_the_hole_of_an_outage_is_as_long_as_the_outage(ordeal: Ordeal, path: str, outage: str) -> None:
    times = [at for at, _ in sorted(ordeal.points[getattr(ordeal.stack, path).name])]
    usual = 3 * ordeal.stack.pace.export

    def hole(start: float, end: float) -> float:
        return max(
            later - earlier for earlier, later in itertools.pairwise(times) if later > start and earlier < end
        )

    for name, (start, end) in ordeal.phases.items():
        if name.startswith("calm"):
            within = [at for at in times if start <= at <= end]
            assert all(later - earlier < usual for earlier, later in itertools.pairwise(within)), name
    start, end = ordeal.phases[outage]
    kept = (path, outage) == ("pushed", AWAY)  # by the collector's queue
    assert hole(start, end) < (usual if kept else end - start + BACK_S)


# ----------------------------------------------------------------------------------------- a slow collector


class Door:
    """A way to `host:port` on which each piece of bytes is held for `delay_s`, in both directions."""

    def __init__(self, to: str) -> None:
        host, port = to.split(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        self.held = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with source, target, contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.held += self.delay_s > 0
                time.sleep(self.delay_s)
                target.sendall(piece)

    def close(self) -> None:
        self._listener.close()


def test_before_a_slow_collector_the_server_is_as_fast_and_its_counters_are_right(
    stack: Stack, tmp_path: Path
) -> None:
    service, door = "before-a-slow-collector", Door(stack.otelcol.grpc)
    phases: list[tuple[float, float]] = []
    with (
        contextlib.closing(door),
        example(tmp_path, door.address, service=service, program=WATCHED, export=stack.pace.export) as server,
    ):
        driver = Driver(server.url)
        driver.start()
        time.sleep(3)  # the first requests warm up
        # An answer takes longer than the pause between two exports.
        for delay_s, lasts_s in ((0, 5), (stack.pace.export, 15), (0, 5)):
            door.delay_s = delay_s
            start = time.time()
            time.sleep(lasts_s)
            phases.append((start, time.time()))
        driver.end()
        time.sleep(4 * stack.pace.export)
        stats = httpx.get(f"{server.url}/stats").json()
        told = {
            each.name: [each.value(f'sum({counter}{{job="{service}"}})') for counter in COUNTERS]
            for each in stack.each_prometheus
        }
    before, slow, after = map(driver.median, phases)
    assert door.held > 5
    assert slow < 1.5 * max(before, after) + 0.005
    right = [stats[key] for key in IN_STATS] + [len(driver.asked)]
    assert told == {each.name: right for each in stack.each_prometheus}


# -------------------------------------------------------------------------------------------- what was queued


@dataclass
class Numbered:
    """What a sender was told is taken: the values of a counter that is sent after each step, and traces."""

    sender: Sender
    values: list[float] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    refused: int = 0

    def send(self, count: int, pause_s: float = 0.1) -> None:
        counter = self.sender.meter.create_counter("torch.memory.turnover", "By")
        for _ in range(count):
            counter.add(1)
            step = len(self.values) + self.refused + 1
            if self.sender.send_metrics():
                self.values.append(step)
            else:
                self.refused += 1
            if trace := self.sender.send_span("generate", torch__memory__allocation__retries=1):
                self.traces.append(trace)
            time.sleep(pause_s)


@dataclass
class Pushed:
    """A collector that pushes, with a Prometheus and a Jaeger that can be away."""

    folder: Path
    prometheus: Prometheus
    jaeger: Jaeger
    environment: dict[str, str]

    def collector(self, **environment: str) -> Collector:
        files = ["otel-collector.yaml", "metrics-push.yaml"]
        return collector(self.folder, files, environment={**self.environment, **environment})

    def away(self) -> None:
        self.prometheus.kill()
        self.jaeger.kill()

    def back(self) -> None:
        self.prometheus.start()
        self.jaeger.start()


@pytest.fixture
def pushing(tmp_path: Path) -> Iterator[Pushed]:
    port = free_ports(1)[0]
    with (
        prometheus(tmp_path, "prometheus-push.yaml", port=port, change={"rule_files": []}) as server,
        jaeger(tmp_path) as traces,
    ):
        environment = {
            "TRACES_ENDPOINT": traces.grpc,
            "PROMETHEUS_OTLP_URL": f"{server.url}/api/v1/otlp/v1/metrics",
            "DECISION_WAIT_SECONDS": "2",
        }
        yield Pushed(tmp_path, server, traces, environment)


def arrived(pushing: Pushed, service: str) -> set[float]:
    return {
        value
        for _, value in samples(pushing.prometheus, f'torch_memory_turnover_bytes_total{{job="{service}"}}')
    }


def missing_traces(pushing: Pushed, traces: list[str]) -> list[str]:
    return [trace for trace in traces if not pushing.jaeger.trace(trace)]


def assert_all_arrive(pushing: Pushed, told: Numbered) -> None:
    def nothing_missing() -> bool:
        values = set(told.values) - arrived(pushing, told.sender.service)
        return not values and not missing_traces(pushing, told.traces)

    until(nothing_missing, 60, "all that was acknowledged is in Prometheus and Jaeger", every=1)


def test_what_was_acknowledged_while_prometheus_and_jaeger_are_away_arrives_once_they_are_back(
    pushing: Pushed,
) -> None:
    with pushing.collector() as otelcol:
        told = Numbered(Sender(otelcol.grpc, "patient"))
        pushing.away()
        told.send(20, pause_s=OUTAGE_S / 20)
        assert len(told.values) == len(told.traces) == 20, "a queue with room should not refuse"
        pushing.back()
        assert_all_arrive(pushing, told)
    assert arrived(pushing, "patient") == set(range(1, 21))


def test_what_was_acknowledged_survives_that_the_collector_is_killed_in_the_outage(pushing: Pushed) -> None:
    otelcol = pushing.collector()
    with otelcol:
        told = Numbered(Sender(otelcol.grpc, "killed"))
        pushing.away()
        told.send(20, pause_s=OUTAGE_S / 20)
        time.sleep(4)  # the traces are judged: until then they are in memory, which the README says
        otelcol.kill()
        otelcol.start()
        after = Numbered(Sender(otelcol.grpc, "afterwards"))
        after.send(5)
        assert len(after.values) == len(after.traces) == 5
        pushing.back()
        assert_all_arrive(pushing, told)
        assert_all_arrive(pushing, after)


def test_remote_write_keeps_in_its_log_what_came_in_an_outage_and_a_kill(tmp_path: Path) -> None:
    arguments = ["--web.enable-remote-write-receiver"]
    server = prometheus(tmp_path, "prometheus-push.yaml", change={"rule_files": []}, arguments=arguments)
    environment = {"REMOTE_WRITE_URL": f"{server.url}/api/v1/write", "TRACES_ENDPOINT": "127.0.0.1:9"}
    otelcol = collector(
        tmp_path, ["otel-collector.yaml", "metrics-remote-write.yaml"], environment=environment
    )
    with server, otelcol:
        told = Numbered(Sender(otelcol.grpc, "logged"))
        server.kill()
        told.send(10, pause_s=OUTAGE_S / 10)
        otelcol.kill()
        otelcol.start()
        server.start()
        series = 'torch_memory_turnover_bytes_total{job="logged"}'
        until(
            lambda: {value for _, value in samples(server, series)} >= set(told.values),
            60,
            "all of it",
            every=1,
        )
    assert told.values == list(range(1, 11))


def test_a_full_queue_refuses_and_keeps_what_it_has_taken(pushing: Pushed) -> None:
    with pushing.collector(QUEUE_BYTES="4000") as otelcol:
        told = Numbered(Sender(otelcol.grpc, "too-much", timeout_s=1))
        pushing.away()
        until(lambda: told.send(1, pause_s=0) or told.refused, 60, "a refusal", every=0)
        told.traces = []  # which ones the sampler let through to a full queue no sender is told
        assert told.values
        pushing.back()
        assert_all_arrive(pushing, told)
        until(lambda: told.send(1) or told.values[-1] > told.refused, 30, "room again")


# ----------------------------------------------------------------------------------------------------- ghosts


def test_a_server_that_died_and_came_again_leaves_no_ghost_beyond_the_stated_time(
    stack: Stack, tmp_path: Path
) -> None:
    server: Example = example(tmp_path, stack.otelcol.grpc, service="died", export=stack.pace.export)

    def instances(of: Prometheus) -> set[str]:
        return {each["metric"]["instance"] for each in of.query('torch_memory_limit_bytes{job="died"}')}

    def used(url: str) -> bool:
        return httpx.post(f"{url}/generate", json={"max_new_tokens": 1}, timeout=60).status_code == 200

    with server:
        assert used(server.url)
        both: Callable[[], bool] = lambda: all(len(instances(each)) == 1 for each in stack.each_prometheus)  # noqa: E731
        until(both, 30, "the server in each Prometheus")
        first = instances(stack.scraping)
        server.kill()
        died = time.monotonic()
        stated = {
            stack.scraping.name: stack.pace.expiration + stack.pace.scrape,
            stack.pushed.name: stack.pace.lookback,
        }
        for each in stack.each_prometheus:
            until(lambda each=each: not instances(each) & first, 60, f"{each.name} has forgotten it")
            # Its last export was up to one interval before its end: that is on the safe side.
            assert time.monotonic() - died < stated[each.name] + 5, each.name
        server.start()
        assert used(server.url)
        until(both, 30, "the new one in each Prometheus")
        for each in stack.each_prometheus:
            assert not instances(each) & first
