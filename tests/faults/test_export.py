# SPDX-License-Identifier: Apache-2.0
"""Faults on the way out: providers that come and go, collectors down, slow, refusing, talking nonsense."""

from __future__ import annotations

import time
from typing import Any

import pytest

from faults.collector import Collector
from faults.served import (
    MIB,
    Exported,
    Served,
    TorchMemInstrumentor,
    Traced,
    at_each_reading,
    take,
    timed,
    track,
    until,
)

# ---- providers


def without_a_provider() -> dict:
    kept = take(30)
    reads = [0]

    def counted() -> None:
        reads[0] += 1

    at_each_reading(counted)

    @track("answer")
    def answer(turn: int) -> int:
        return turn

    bare, _ = timed(2000, answer)
    TorchMemInstrumentor().instrument()
    reads[0] = 0
    absent, answers = timed(2000, answer)
    unread = reads[0]
    from opentelemetry.metrics import set_meter_provider
    from opentelemetry.trace import set_tracer_provider

    exported, traced = Exported(), Traced()
    set_meter_provider(exported.provider)
    set_tracer_provider(traced.provider)
    answers.append(answer(2000))
    exported.collect()
    return {
        "answers": answers == list(range(2001)),
        "reads": unread,
        "ratio": absent / bare,
        "later": [len(traced.spans), exported.value("torch.memory.allocated"), kept.numel()],
    }


def test_without_a_provider_nothing_is_read_until_there_is_one(gpu):
    got = gpu.run(without_a_provider)
    assert got["answers"]
    assert got["reads"] == 0
    assert got["later"] == [1, 30 * MIB, 30 * MIB]
    assert got["ratio"] < 5  # against a tracked call that nobody measures; a reading costs far more


def a_provider_that_is_shut_down() -> dict:
    served = Served()
    kept = take(30)

    @track("answer")
    def answer(turn: int) -> int:
        return turn

    @track("stream")
    def stream() -> Any:
        yield from range(3)

    before, answers = timed(300, answer)
    served.exported.provider.shutdown()
    begun = len(served.spans)
    for _ in range(10):  # given up: no collection will ever come to end their spans
        next(stream())
    after, more = timed(300, answer)
    ended = [span.name for span in served.spans[begun:]].count("stream")
    served.traced.provider.shutdown()
    last, most = timed(300, answer)
    TorchMemInstrumentor().uninstrument()
    again = Served()
    other = [answer(1), len(again.spans), again.collect().value("torch.memory.allocated")]
    return {
        "answers": answers + more + most == [*range(300)] * 3,
        "ended": ended,
        "ratios": [after / before, last / before],
        "again": other,
        "durations": again.durations,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def test_providers_that_are_shut_down_hold_up_no_call_and_new_ones_are_served(gpu):
    got = gpu.run(a_provider_that_is_shut_down)
    assert got["answers"]
    assert got["ended"] == 10
    assert max(got["ratios"]) < 3
    assert (got["again"], got["durations"], got["lines"]) == ([1, 1, 30 * MIB], 1, [])


def a_provider_that_is_replaced() -> list:
    kept = take(30)
    served = Served()
    other = Exported()
    told = []

    @track("answer")
    def answer(turn: int) -> int:
        return turn

    for turn in range(6):
        current, silent = (served.exported, other) if turn % 2 else (other, served.exported)
        TorchMemInstrumentor().uninstrument()
        TorchMemInstrumentor().instrument(meter_provider=current.provider)
        gave = [answer(turn) for _ in range(3)]
        current.collect()
        durations = sum(point.count for point in current.points("torch.memory.request.duration"))
        allocated = current.all("torch.memory.allocated")
        left = [name for name in silent.collect().names if name.startswith("torch.")]
        told.append([gave, durations, [value for _, value in allocated], left])
    return [*told, kept.numel()]


def test_a_provider_that_is_replaced_and_comes_back_has_each_series_once(gpu):
    *told, kept = gpu.run(a_provider_that_is_replaced)
    assert told == [[[turn] * 3, 3, [0, kept], []] for turn in range(6)]


# ---- collectors


def beside_a_collector(mood: str, directory: str) -> dict:
    """Requests while the collector is well, while it is not, and when it is well again."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    collector = Collector(directory)
    collector.start()
    kept = take(30)
    metrics = OTLPMetricExporter(f"{collector.address}/v1/metrics", timeout=20)
    reader = PeriodicExportingMetricReader(metrics, export_interval_millis=100, export_timeout_millis=20_000)
    traced = Traced()  # what ends, whatever becomes of it
    traced.provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(f"{collector.address}/v1/traces", timeout=20), schedule_delay_millis=100
        )
    )
    provider = MeterProvider([reader])
    served = Served(meter_provider=provider, tracer_provider=traced.provider)

    @track("answer")
    def answer(turn: int) -> int:
        return take(1).numel() + turn

    @track("stream")
    def stream() -> Any:
        yield from range(3)

    well, answers = timed(300, answer)
    assert until(lambda: any(name == "torch.memory.request.duration" for _, name, _ in collector.points()))
    collector.stop()
    if mood != "down":
        collector.start(mood)
    time.sleep(0.5)  # an export is under way, and takes its time
    began, ended = time.monotonic(), len(traced.spans)
    unwell, more = timed(300, answer)
    for _ in range(10):  # given up while nothing collects
        next(stream())
    answers += [*more, answer(0)]
    seconds = time.monotonic() - began
    streams = [span.name for span in traced.spans[ended:]].count("stream")
    collector.stop()
    collector.start()
    again, more = timed(300, answer)
    answers += more

    def told() -> float:
        return collector.last("torch.memory.request.duration", by="telemetry.sdk.name").get(
            "opentelemetry", 0
        )

    whole = until(lambda: told() == 911, 60)
    began_ending = time.monotonic()
    TorchMemInstrumentor().uninstrument()
    uninstrumented = time.monotonic() - began_ending
    traced.provider.shutdown()
    provider.shutdown()
    spans = [span.name for _, span in collector.spans()]
    collector.stop()
    return {
        "answers": answers == [MIB + turn for turn in [*range(300), *range(300), 0, *range(300)]],
        "ratios": [unwell / well, again / well],
        "streams ended": streams,
        "took": seconds,
        "told": [whole, told()],
        "retries": served.lines,
        "spans": [spans.count("answer"), len([span for span in traced.spans if span.name == "answer"])],
        "uninstrumented": uninstrumented,
        "kept": kept.numel(),
    }


@pytest.mark.parametrize("mood", ["down", "slow", "refusing", "garbage"])
def test_a_collector_that_is_unwell_holds_up_no_call_and_later_gets_the_whole_sum(gpu, tmp_path, mood):
    got = gpu.run(beside_a_collector, args=[mood, str(tmp_path / "came")], memory="1GiB", timeout=180)
    assert got["answers"]
    assert max(got["ratios"]) < 4
    assert got["streams ended"] == 10  # though nothing collects meanwhile
    assert got["took"] < 15  # far less than the export that waits
    assert got["told"] == [True, 911]
    sent, ended = got["spans"]
    assert ended == 901
    assert sent >= 600  # those of the time when it was well; the SDK keeps what it can of the rest
    assert got["uninstrumented"] < 5
    assert got["retries"] == []
