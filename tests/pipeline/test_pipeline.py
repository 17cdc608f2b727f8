# SPDX-License-Identifier: Apache-2.0
"""One load through the whole pipeline: what the process knows is what Prometheus, Jaeger and the logs say.

The repository's own configuration files, the example server under `opentelemetry-instrument`, once with the
SDK's usual totals and once with deltas.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from opentelemetry_instrumentation_torchmem import signals
from pipeline.parts import ROOT
from pipeline.servers import Prometheus, until
from pipeline.stack import Stack, example
from pipeline.told import Told, in_prometheus, series_name, told

WATCHED = Path(__file__).with_name("watched_serve.py")
MIB = 2**20
KEPT_GROWTH = 256 * MIB  # as otel-collector.yaml says
KEPT_SHARE = 0.05
ABSENT = {
    "torch.memory.oom.rejections": "only with the allocator's setting throw_on_cudamalloc_oom",
    "torch.memory.telemetry.absent": "every figure of a snapshot is to be had in this mode",
    **{signal.name: "only with a guard, which the server has none of" for signal in signals.GUARD_METRICS},
}
"""Metrics that the native allocator with its default settings does not give, each with the reason."""
MOVING = {
    "torch.memory.reading.age",
    "torch.memory.snapshot.age",
    "torch.memory.telemetry.duration",
    "torch.memory.telemetry.skipped",
}
"""What goes on while the server rests: two exports of it are never equal."""
EVERY = (*signals.METRICS, *signals.GUARD_METRICS, *signals.REQUEST_METRICS)

# Metric -> what torch calls it, in the pools `small` and `large` or (`.all`) in all.
OWN_NAMES = {
    "torch.memory.allocated": "allocated_bytes.{pool}_pool.current",
    "torch.memory.reserved": "reserved_bytes.{pool}_pool.current",
    "torch.memory.active": "active_bytes.{pool}_pool.current",
    "torch.memory.requested": "requested_bytes.{pool}_pool.current",
    "torch.memory.inactive_split": "inactive_split_bytes.{pool}_pool.current",
    "torch.memory.segments": "segment.{pool}_pool.current",
    "torch.memory.blocks": "active.{pool}_pool.current",
    "torch.memory.allocated_peak": "allocated_bytes.all.peak",
    "torch.memory.reserved_peak": "reserved_bytes.all.peak",
    "torch.memory.limit": "device_total",
    "torch.memory.allocation.retries": "num_alloc_retries",
    "torch.memory.ooms": "num_ooms",
    "torch.memory.device.allocations": "num_device_alloc",
    "torch.memory.device.frees": "num_device_free",
    "torch.memory.device.syncs": "num_sync_all_streams",
    "torch.memory.allocations": "allocation.all.allocated",
    "torch.memory.turnover": "allocated_bytes.all.allocated",
}


@dataclass(frozen=True, slots=True)
class Story:
    """What was done, and what the process said of itself at rest after it."""

    stack: Stack
    service: str
    before: Told
    told: Told
    stats: dict[str, Any]
    lone_growth: int
    exemplars: dict[str, list[dict[str, Any]]]
    """By Prometheus's name: those of the growth histogram after the one large request."""
    lone_counts: dict[str, dict[Any, float]]
    """Its buckets then."""
    resting: dict[str, dict[str, dict[Any, float]]]
    """Prometheus's name -> series -> labels -> value, at rest."""


@pytest.fixture(scope="module", params=["cumulative", "delta"])
def story(request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp(request.param)
    service = f"example-{request.param}"
    server = example(
        folder,
        stack.otelcol.grpc,
        service=service,
        program=WATCHED,
        export=stack.pace.export,
        exporters="otlp,console",
        environment={
            "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": request.param,
            "OTEL_PYTHON_TORCHMEM_SNAPSHOT_SHARE": "0.1",  # so that snapshots too have come to rest soon
        },
    )
    with server, httpx.Client(base_url=server.url, timeout=60) as client:
        before = client.get("/stats").json()["reserved_bytes.all.current"]
        assert client.post("/images", json={"width": 1024, "height": 1024}).status_code == 200
        growth = client.get("/stats").json()["reserved_bytes.all.current"] - before
        exemplars = {each.name: lone_exemplar(each, service, growth) for each in stack.each_prometheus}
        counts = {each.name: buckets(each, service) for each in stack.each_prometheus}

        load = [ROOT / "examples" / "load.py", "--seconds", 10, server.url]
        for _ in range(6):  # on a busy machine ten seconds may not fill the memory
            subprocess.run([sys.executable, *map(str, load)], check=True, timeout=100, capture_output=True)
            if client.get("/stats").json()["num_alloc_retries"]:
                break
        assert client.post("/images", json={"width": 4096, "height": 4096}).status_code == 503

        time.sleep(3 * stack.pace.export)  # the last figures are collected, exported and scraped
        so_far = told(server.log_file)
        resting = {
            each.name: {
                name: in_prometheus(each.query(latest(signal, name, service, request.param)))
                for signal in EVERY
                for name in names(signal)
            }
            for each in stack.each_prometheus
        }
        time.sleep(1.5 * stack.pace.export)  # one collection more: between the two lies what Prometheus has
        stats = client.get("/stats").json()
        server.stop()
    time.sleep(stack.pace.decision_wait + 3)  # the last traces are judged, and through the queue
    return Story(stack, service, so_far, told(server.log_file), stats, growth, exemplars, counts, resting)


def latest(signal: signals.Metric | signals.RequestMetric, name: str, service: str, temporality: str) -> str:
    series = f'{name}{{job="{service}"}}'
    # The SDK sends no delta of a counter that rests; to Prometheus it is away until it moves again.
    rests = temporality == "delta" and isinstance(signal, signals.RequestMetric)
    return f"last_over_time({series}[5m])" if rests else series


def names(signal: signals.Metric | signals.RequestMetric) -> list[str]:
    name = series_name(signal)
    histogram = signal.kind is signals.Kind.HISTOGRAM
    return [f"{name}_{part}" for part in ("count", "sum", "bucket")] if histogram else [name]


GROWTH = series_name(signals.REQUEST_RESERVED_GROWTH)


def lone_exemplar(prometheus: Prometheus, service: str, growth: int) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        series = prometheus.get(
            "query_exemplars",
            query=f'{GROWTH}_bucket{{job="{service}"}}',
            start=time.time() - 600,
            end=time.time() + 60,
        )
        return [each for one in series for each in one["exemplars"] if float(each["value"]) == growth]

    return until(found, 30, f"an exemplar of {growth} bytes in {prometheus.name}")


def buckets(prometheus: Prometheus, service: str) -> dict[Any, float]:
    return in_prometheus(prometheus.query(f'sum by (le) ({GROWTH}_bucket{{job="{service}"}})'))


@pytest.fixture(params=["scraping", "pushed"])
def prometheus(request: pytest.FixtureRequest, story: Story) -> Prometheus:
    return getattr(story.stack, request.param)


# ---------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("signal", EVERY, ids=lambda signal: signal.name)
def test_every_metric_of_the_table_is_in_prometheus_with_the_process_own_value(
    story: Story, prometheus: Prometheus, signal: signals.Metric | signals.RequestMetric
) -> None:
    here = {name: story.resting[prometheus.name][name] for name in names(signal)}
    if signal.name in ABSENT:
        assert not any(here.values()), f"it is there after all: {ABSENT[signal.name]}"
        return
    own = story.told.series(signal)
    assert set(own) == set(names(signal))
    assert all(here.values())
    if signal.name not in MOVING:
        assert set(here) == set(own)
        for name, series in here.items():
            # Seconds are summed in another order where deltas are added up; the rest is whole numbers.
            assert series == (pytest.approx(own[name]) if name.endswith("_seconds_sum") else own[name])
        return
    earlier = story.before.series(signal, cycle=-3)  # what Prometheus has may be an export old
    for name, series in here.items():
        assert set(series) <= set(own[name])
        for labels, value in series.items():
            if signal.kind is signals.Kind.COUNTER:
                assert earlier[name].get(labels, 0) <= value * 1.000001
                assert value <= own[name][labels] * 1.000001
            else:
                assert 0 <= value < 60


@pytest.mark.parametrize("metric", OWN_NAMES)
def test_what_the_allocator_says_itself_is_in_prometheus(
    story: Story, prometheus: Prometheus, metric: str
) -> None:
    signal = next(each for each in signals.METRICS if each.name == metric)
    here = story.resting[prometheus.name][series_name(signal)]
    own = OWN_NAMES[metric]
    assert len(here) == (2 if "{pool}" in own else 1)
    for labels, value in here.items():
        assert value == story.stats[own.format(pool=dict(labels).get("torch_memory_pool"))], dict(labels)


def test_the_ledger_in_prometheus_sums_to_the_device(story: Story, prometheus: Prometheus) -> None:
    ledger = story.resting[prometheus.name]["torch_memory_usage_bytes"]
    states = {dict(labels)["torch_memory_state"]: value for labels, value in ledger.items()}
    assert sum(states.values()) == story.stats["device_total"]
    assert states["allocated"] == story.stats["allocated_bytes.all.current"]
    assert states["split_free"] == story.stats["inactive_split_bytes.all.current"]
    assert states["free"] == story.stats["device_free"]


def test_the_load_did_what_it_is_for(story: Story) -> None:
    assert story.stats["num_alloc_retries"] >= 1
    assert story.stats["num_ooms"] >= 1
    assert len(story.told.traces) > 100


# --------------------------------------------------------------------------------------- from metric to trace


def test_the_exemplar_of_a_lone_growth_opens_a_trace_with_the_same_growth(
    story: Story, prometheus: Prometheus
) -> None:
    assert story.lone_growth > KEPT_GROWTH
    counts = sorted(
        (float(dict(labels)["le"]), count) for labels, count in story.lone_counts[prometheus.name].items()
    )
    below = max(count for bound, count in counts if bound < story.lone_growth)
    within = next(count for bound, count in counts if bound >= story.lone_growth)
    assert within - below == 1, "it does not stand alone in its bucket"

    trace_ids = {each["labels"]["trace_id"] for each in story.exemplars[prometheus.name]}
    assert len(trace_ids) == 1
    spans = story.stack.jaeger.trace(trace_ids.pop())
    grown = [span for span in spans if "torch.memory.reserved.delta" in span["tags"]]
    assert [span["tags"]["torch.memory.reserved.delta"] for span in grown] == [story.lone_growth]
    assert grown[0]["spanID"] == story.exemplars[prometheus.name][0]["labels"]["span_id"]
    assert grown[0]["tags"]["code.function.name"] == "diffusers.DiffusionPipeline.__call__"
    assert "POST /images" in {span["operationName"] for span in spans}, (
        "the request's own span is not with it"
    )


# --------------------------------------------------------------------------------------------------- sampling


def is_kept(spans: list[dict[str, Any]]) -> bool:
    def of(span: dict[str, Any], name: str) -> float:
        return span["attributes"].get(name, 0)

    return any(
        span["status"]["status_code"] == "ERROR"
        or of(span, "torch.memory.allocation.retries") > 0
        or of(span, "torch.memory.ooms") > 0
        or of(span, "torch.memory.reserved.delta") > KEPT_GROWTH
        for span in spans
    )


def in_jaeger(story: Story) -> dict[str, int]:
    """Trace id -> how many spans of it are kept."""
    found = story.stack.jaeger.search(story.service, limit=5000)
    return {spans[0]["traceID"]: len(spans) for spans in found}


def test_tail_sampling_keeps_each_trace_that_failed_retried_ran_out_or_grew_and_all_of_its_spans(
    story: Story,
) -> None:
    wanted = {trace: len(spans) for trace, spans in story.told.traces.items() if is_kept(spans)}
    kept = in_jaeger(story)
    assert len(wanted) >= 3
    assert {trace: kept.get(trace) for trace in wanted} == wanted


def test_tail_sampling_keeps_its_share_of_the_rest_and_no_more(story: Story) -> None:
    rest = {trace for trace, spans in story.told.traces.items() if not is_kept(spans)}
    kept = rest & set(in_jaeger(story))
    assert len(rest) > 100
    # Six standard deviations of a fair draw: once in a billion runs it is further away.
    spread = 6 * (len(rest) * KEPT_SHARE * (1 - KEPT_SHARE)) ** 0.5
    assert len(kept) <= KEPT_SHARE * len(rest) + spread


# ------------------------------------------------------------------------------------------------------- logs


def test_the_log_of_an_out_of_memory_error_carries_the_trace_id_of_the_request_that_failed(
    story: Story,
) -> None:
    records = [
        record
        for line in story.stack.otelcol.logs_file.read_text().splitlines()
        for resource in json.loads(line)["resourceLogs"]
        if {"key": "service.name", "value": {"stringValue": story.service}}
        in resource["resource"]["attributes"]
        for scope in resource["scopeLogs"]
        for record in scope["logRecords"]
        if record.get("eventName") == signals.OOM_EVENT.name
    ]
    assert records
    for record in records:
        assert record["severityText"] == "WARN"
        spans = {
            span["context"]["span_id"].removeprefix("0x"): span
            for span in story.told.traces[record["traceId"]]
        }
        assert spans[record["spanId"]]["status"]["status_code"] == "ERROR"
        assert spans[record["spanId"]]["attributes"]["error.type"] == "OutOfMemoryError"
        assert story.stack.jaeger.trace(record["traceId"]), "its trace was not kept"
