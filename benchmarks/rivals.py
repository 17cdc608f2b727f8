# SPDX-License-Identifier: Apache-2.0
"""What a user would otherwise pick, beside ours in the same run.

``torch.cuda.memory_stats`` in a span by hand; a thread that sets the gauges of a Prometheus client, with its
HTTP server; torchtel. Each is used as its own documentation or the usual article has it.
"""

from __future__ import annotations

import argparse
import contextvars
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from time import perf_counter, process_time_ns, sleep
from typing import Any

import torch
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor
from opentelemetry_instrumentation_torchmem.requests.probe import Target
from opentelemetry_instrumentation_torchmem.requests.wrapping import wrap_attribute
from opentelemetry_instrumentation_torchmem.signals import EXCLUSIVE, METRICS, REQUEST_METRICS, Kind

from . import harness
from .harness import Figure, Side, Times, environment, figures_of, interleaved, of, print_figures, ratio
from .requests import CALLS, Bench, Model

BY_HAND = "memory_stats in a span by hand"
EXPORTER = "a Prometheus client's thread and scrape"
APART = 0.05
"""Seconds from one export to the next: the caches of the processor have gone cold, as they do in a server."""
ARRIVALS = 0.0005
"""Seconds from one request to the next, where its wait beside an export is looked at."""


def figures(quick: bool) -> list[Figure]:
    rounds = "40" if quick else "200"
    return [figure for what in SIDES for figure in figures_of("rivals", what, "--rounds", rounds)]


def by_hand(rounds: int) -> list[Figure]:
    """A call with a span around it that has the same attributes, as far as two readings tell them."""
    memory = harness.fragmented(torch, 1)
    bench = Bench()
    times = interleaved(
        {
            "recorded": bench.ours(),
            "recorded by hand": call_by_hand(bench, records=True),
            "span": bench.ours(request_metrics=False),
            "span by hand": call_by_hand(bench, records=False),
        },
        rounds,
        CALLS,
    )
    stats = interleaved({"flat": torch.cuda.memory_stats, "raw": lambda: raw(0)}, rounds, CALLS)
    del memory
    name, records = "a measured call", "the same three records"
    return [
        ratio(
            f"{name}, with its metrics", f"{BY_HAND} + {records}", times, "recorded", "recorded by hand", None
        ),
        ratio(f"{name}, without metrics", BY_HAND, times, "span", "span by hand", None),
        ratio("one raw reading, as ours are", "torch.cuda.memory_stats", stats, "raw", "flat", None),
    ]


def raw(device: int) -> dict[str, Any]:
    return torch._C._accelerator_getDeviceStats(device)


def call_by_hand(bench: Bench, *, records: bool) -> Side:
    """What one writes who reads torch's documentation. It cannot tell whether requests overlapped."""
    tracer, meter = bench.traced.get_tracer("by hand"), bench.metered.get_meter("by hand")
    labels = {"torch.operation": "generate", "code.function.name": "app.Model.generate"}
    exclusive = {**labels, EXCLUSIVE.name: True}
    duration, *growths = (
        meter.create_histogram(row.name, row.unit, explicit_bucket_boundaries_advisory=row.boundaries)
        for row in REQUEST_METRICS
        if row.kind is Kind.HISTOGRAM
    )
    bare = Model.generate

    class ByHand(Model):
        def generate(self, ids: torch.Tensor, *, max_new_tokens: int) -> None:
            with tracer.start_as_current_span("generate Model", attributes=labels) as span:
                before = torch.cuda.memory_stats()
                began = perf_counter()
                bare(self, ids, max_new_tokens=max_new_tokens)
                ended = perf_counter()
                after = torch.cuda.memory_stats()
                reserved = after["reserved_bytes.all.current"]
                reserved_growth = reserved - before["reserved_bytes.all.current"]
                peak_growth = after["reserved_bytes.all.peak"] - before["reserved_bytes.all.peak"]
                attributes: dict[str, Any] = {
                    "torch.device": "cuda:0",
                    "torch.memory.reserved.before": before["reserved_bytes.all.current"],
                    "torch.memory.reserved.delta": reserved_growth,
                    "torch.memory.allocated.before": before["allocated_bytes.all.current"],
                    "torch.memory.allocated.delta": after["allocated_bytes.all.current"]
                    - before["allocated_bytes.all.current"],
                    "torch.memory.allocation.retries": after["num_alloc_retries"]
                    - before["num_alloc_retries"],
                    "torch.memory.ooms": after["num_ooms"] - before["num_ooms"],
                    "torch.memory.device.allocations": after["num_device_alloc"] - before["num_device_alloc"],
                    "torch.memory.device.syncs": after["num_sync_all_streams"]
                    - before["num_sync_all_streams"],
                    "torch.memory.turnover": after["allocated_bytes.all.allocated"]
                    - before["allocated_bytes.all.allocated"],
                    "torch.memory.fragmentation": after["inactive_split_bytes.all.current"] / reserved,
                    "torch.input.shapes": ["x".join(map(str, ids.shape))],
                    "torch.input.dtypes": [str(ids.dtype).removeprefix("torch.")],
                }
                if peak_growth:
                    attributes["torch.memory.peak_growth"] = peak_growth
                span.set_attributes(attributes)
                if records:
                    duration.record(ended - began, exclusive)
                    growths[0].record(max(0, reserved_growth), exclusive)
                    growths[1].record(max(0, peak_growth), exclusive)

    model, ids = ByHand(), torch.ones(1, 2048, dtype=torch.int64)
    return lambda: model.generate(ids, max_new_tokens=8)


def exporter(rounds: int) -> list[Figure]:
    """One cycle of each: read, and have it where the monitoring is, in another process."""
    memory = harness.fragmented(torch, 1)
    instrumentor = TorchMemInstrumentor()
    with peer() as (endpoint, fetch):
        update, samples, url = gauges()

        def theirs() -> None:
            update()
            fetch(url)

        def readers() -> tuple[PeriodicExportingMetricReader, InMemoryMetricReader]:
            exporter = OTLPMetricExporter(endpoint)
            return PeriodicExportingMetricReader(exporter, float("inf")), InMemoryMetricReader()

        sent, kept = readers()
        instrumentor.instrument(meter_provider=MeterProvider([sent, kept]))
        points = f"{count(kept)} points against {len(THEIRS)} and {samples() - len(THEIRS)} of the process"
        cycles = {"ours": sent.force_flush, "theirs": theirs}
        whole = interleaved(cycles, rounds, clock=process_time_ns, pause=APART)
        alone = interleaved({"ours": kept.collect, "theirs": update}, rounds, pause=APART)
        waits = waited({**cycles, "nothing": lambda: sleep(0.003)}, rounds)
        sent.shutdown()
        instrumentor.uninstrument()

        sent, kept = readers()
        others = [row.name for row in METRICS if row.name not in THEIRS.values()]
        instrumentor.instrument(meter_provider=MeterProvider([sent, kept]), excluded_metrics=others)
        few = f"{count(kept)} points against the same"
        cycles = {"ours": sent.force_flush, "theirs": theirs}
        same = interleaved(cycles, rounds, clock=process_time_ns, pause=APART)
        sent.shutdown()
        instrumentor.uninstrument()
    del memory
    cycle, their_cycle = "a collection and export", "its update and scrape"
    both = (("ours", cycle), ("theirs", their_cycle))
    least = f"beside nothing {median(waits['nothing']):.2f}"
    return [
        told(
            ratio("a collection with its export over OTLP", EXPORTER, whole, "ours", "theirs", None), points
        ),
        told(ratio("the same of its eight figures alone", EXPORTER, same, "ours", "theirs", None), few),
        told(
            ratio("a collection alone", "that thread's update alone", alone, "ours", "theirs", None), points
        ),
        *(
            share(f"a core's share, {what} each {seconds} s", whole[side], seconds)
            for seconds in (1, 10)
            for side, what in both
        ),
        *(
            of(
                f"a request's longest wait beside {what}",
                "the moment it was due",
                waits[side],
                "ms",
                None,
                f"{least}; at most {max(waits[side]):.1f} against {max(waits['nothing']):.1f} ms",
            )
            for side, what in both
        ),
    ]


THEIRS = {
    "allocated": "torch.memory.allocated",
    "reserved": "torch.memory.reserved",
    "active": "torch.memory.active",
    "inactive_split": "torch.memory.inactive_split",
    "max_allocated": "torch.memory.allocated_peak",
    "retries": "torch.memory.allocation.retries",
    "ooms": "torch.memory.ooms",
    "device_allocations": "torch.memory.device.allocations",
}
"""The usual article's gauges, and ours of the same."""


def gauges() -> tuple[Callable[[], None], Callable[[], int], str]:
    """The usual article's exporter: gauges, a server, and the body of the thread that sets them each second.
    The registry is the client's own, which also tells of the process and the interpreter."""
    from prometheus_client import REGISTRY, Gauge, start_http_server

    made = {name: Gauge(f"torch_{name}", ours, ["device"]) for name, ours in THEIRS.items()}
    server, thread = start_http_server(0, addr="127.0.0.1")
    assert thread.daemon

    def update() -> None:
        for device in range(torch.cuda.device_count()):
            label = f"cuda:{device}"
            made["allocated"].labels(label).set(torch.cuda.memory_allocated(device))
            made["reserved"].labels(label).set(torch.cuda.memory_reserved(device))
            made["max_allocated"].labels(label).set(torch.cuda.max_memory_allocated(device))
            stats = torch.cuda.memory_stats(device)
            made["inactive_split"].labels(label).set(stats["inactive_split_bytes.all.current"])
            made["active"].labels(label).set(stats["active_bytes.all.current"])
            made["retries"].labels(label).set(stats["num_alloc_retries"])
            made["ooms"].labels(label).set(stats["num_ooms"])
            made["device_allocations"].labels(label).set(stats["num_device_alloc"])

    def samples() -> int:
        update()
        return sum(len(metric.samples) for metric in REGISTRY.collect())

    return update, samples, f"127.0.0.1:{server.server_port}"


@contextmanager
def peer() -> Iterator[tuple[str, Callable[[str], None]]]:
    """Another process, which takes what is sent and fetches what it is told to: where it takes it, and the
    fetching."""
    command = [sys.executable, "-m", "benchmarks.rivals", "peer"]
    process = subprocess.Popen(
        command, cwd=harness.ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told, heard = process.stdin, process.stdout

    def fetch(address: str) -> None:
        print(address, file=told, flush=True)
        if int(heard.readline()) != 200:
            raise RuntimeError(f"{address} did not answer")

    try:
        yield f"http://127.0.0.1:{int(heard.readline())}/v1/metrics", fetch
    finally:
        process.communicate()  # the end of its input ends it


class Sink(BaseHTTPRequestHandler):
    """Takes any OTLP export."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


def be_peer() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for address in sys.stdin:
        connection = HTTPConnection(address.strip(), timeout=10)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        answer.read()
        print(answer.status, flush=True)
        connection.close()


def waited(cycles: Mapping[str, Callable[[], object]], rounds: int) -> Times:
    """Milliseconds, one for each cycle."""
    waits: Times = {side: [] for side in cycles}
    for _ in range(rounds):
        for side, cycle in cycles.items():
            sleep(APART / 5)
            waits[side].append(longest_wait(cycle) * 1000)
    return waits


def longest_wait(cycle: Callable[[], object]) -> float:
    """Seconds from when it was due to its end; of the requests that come while another thread is at work."""
    other = threading.Thread(target=cycle)
    longest = 0.0
    due = perf_counter()
    other.start()
    while other.is_alive():
        due += ARRIVALS
        sleep(max(0.0, due - perf_counter()))
        sum(range(2000))
        longest = max(longest, perf_counter() - due)
        due = max(due, perf_counter() - ARRIVALS)
    return longest


def count(reader: InMemoryMetricReader) -> int:
    """How many points a collection has."""
    data: Any = reader.get_metrics_data()
    return sum(
        len(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def share(name: str, microseconds: list[float], interval: int) -> Figure:
    values = [spent / (interval * 1e6) * 100 for spent in microseconds]
    return of(name, "nothing", values, "%", None, f"{median(microseconds) / 1000:.1f} ms")


def told(figure: Figure, more: str) -> Figure:
    return replace(figure, detail=f"{figure.detail}; {more}")


def torchtel(rounds: int) -> list[Figure]:
    """torchtel 0.0.3: a span for each `forward` of one model, and one metric."""
    from torchtel import PyTorchInstrumentor

    memory = harness.fragmented(torch, 1)
    bench = Bench()
    their_reader, our_reader = InMemoryMetricReader(), InMemoryMetricReader()
    trace.set_tracer_provider(bench.traced)
    metrics.set_meter_provider(MeterProvider([their_reader]))  # it takes no other
    TorchMemInstrumentor().instrument(
        meter_provider=MeterProvider([our_reader]), tracer_provider=bench.traced
    )
    watched = forwarded()
    PyTorchInstrumentor().instrument(model=watched.__self__)
    measured, spans = (
        forwarded(bench.wiring(request_metrics=records)._requests) for records in (True, False)
    )
    # each in a context of its own: torchtel makes a span current there that stays open
    sides: Mapping[str, Side] = {
        name: in_context(model)
        for name, model in {"ours": measured, "span": spans, "theirs": watched}.items()
    }
    times = interleaved(sides, rounds, CALLS)
    collections = interleaved({"ours": our_reader.collect, "theirs": their_reader.collect}, rounds)
    points = f"{count(our_reader)} points against {count(their_reader)}"
    del memory
    their_call, their_collection = "torchtel's span of it, without a reading", "torchtel's"
    return [
        ratio("a measured `forward`, with its metrics", their_call, times, "ours", "theirs", None),
        ratio("a measured `forward`, without metrics", their_call, times, "span", "theirs", None),
        told(ratio("a collection", their_collection, collections, "ours", "theirs", None), points),
    ]


def forwarded(requests: Any = None) -> Any:
    """The call of a module that does nothing, measured by ours where there are requests."""

    class Net(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> None: ...

    if requests is not None:
        wrap_attribute(Net, "forward", Target("app.Net.forward", "forward"), requests)
    return Net().__call__


def in_context(model: Callable[..., object]) -> Side:
    context, ids = contextvars.Context(), torch.ones(1, 2048, dtype=torch.int64)
    return lambda: context.run(model, ids)


SIDES: Mapping[str, Callable[[int], list[Figure]]] = {
    "by_hand": by_hand,
    "exporter": exporter,
    "torchtel": torchtel,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=[*SIDES, "peer"])
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    if options.what == "peer":
        be_peer()
    else:
        print_figures(SIDES[options.what](options.rounds))


if __name__ == "__main__":
    main()
