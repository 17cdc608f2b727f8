# SPDX-License-Identifier: Apache-2.0
"""One measured call, against the same readings, span and records made by hand.

Both sides have the real SDK, a span processor that does nothing, and the same attributes and label sets.
"""

from __future__ import annotations

import argparse
import contextvars
import gc
import tracemalloc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from opentelemetry.context import get_current
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import set_span_in_context

from opentelemetry_instrumentation_torchmem.config import Config
from opentelemetry_instrumentation_torchmem.requests.probe import Target
from opentelemetry_instrumentation_torchmem.requests.wrapping import wrap_attribute
from opentelemetry_instrumentation_torchmem.signals import EXCLUSIVE, REQUEST_METRICS, Kind
from opentelemetry_instrumentation_torchmem.telemetry import OwnTelemetry
from opentelemetry_instrumentation_torchmem.wiring import Wiring

from . import harness
from .harness import Figure, Side, added, figures_of, interleaved, print_figures, ratio

CALLS = 20
OTHERS = 63


def figures(quick: bool) -> list[Figure]:
    rounds, calls = ("60", "10000") if quick else ("200", "100000")
    return figures_of("requests", "--rounds", rounds, "--calls", calls)


class Ended(SpanProcessor):
    """Does nothing but remember the last span."""

    last: ReadableSpan

    def on_end(self, span: ReadableSpan) -> None:
        self.last = span


class Bench:
    """The providers that both sides use, and the sides made of them."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self.processor = Ended()
        self.traced = TracerProvider(sampler)
        self.traced.add_span_processor(self.processor)
        self.dropped = TracerProvider(sampler=ALWAYS_OFF)
        self.dropped.add_span_processor(self.processor)
        self.reader = InMemoryMetricReader()
        self.metered = MeterProvider([self.reader])
        self.open: list[Any] = []

    def ours(self, span: str = "new", **options: Any) -> Side:
        """A call of a method that is measured."""
        return call(self.wiring(**options), span)

    def wiring(self, **options: Any) -> Wiring:
        given = {name: options.pop(name) for name in ("tracer_provider", "meter_provider") if name in options}
        given = {"tracer_provider": self.traced, "meter_provider": self.metered, **given}
        return Wiring(OwnTelemetry(), Config.of(options, {}), **given)

    def floor(self, *, span: bool, records: bool) -> Side:
        """The same call, measured by hand: a method with two raw readings around it, and a span and records
        where ours makes them."""
        self.ours()()
        told = dict(self.processor.last.attributes or {})
        labels = {key: told.pop(key) for key in ("torch.operation", "code.function.name")}
        exclusive = {**labels, EXCLUSIVE.name: True}
        tracer, meter = self.traced.get_tracer("floor"), self.metered.get_meter("floor")
        histograms = [
            meter.create_histogram(row.name, row.unit, explicit_bucket_boundaries_advisory=row.boundaries)
            for row in REQUEST_METRICS
            if row.kind is Kind.HISTOGRAM
        ]
        duration, *growths = histograms
        read, bare = torch._C._accelerator_getDeviceStats, Model.generate

        class ByHand(Model):
            def generate(self, ids: torch.Tensor, *, max_new_tokens: int) -> None:
                context = get_current()
                if span:
                    made = tracer.start_span("generate Model", context, attributes=labels)
                    context = set_span_in_context(made, context)
                before = read(0)
                began = perf_counter()
                bare(self, ids, max_new_tokens=max_new_tokens)
                ended = perf_counter()
                after = read(0)
                if span:
                    made.set_attributes(told)
                if records:
                    duration.record(ended - began, exclusive, context)
                    for growth in growths:
                        growth.record(0, exclusive, context)
                if span:
                    made.end()
                del before, after

        model, ids = ByHand(), torch.ones(1, 2048, dtype=torch.int64)
        return lambda: model.generate(ids, max_new_tokens=8)

    def bare_span(self) -> Side:
        """The same call under a span that is sampled out."""
        tracer, bare = self.dropped.get_tracer("floor"), Model.generate

        class ByHand(Model):
            def generate(self, ids: torch.Tensor, *, max_new_tokens: int) -> None:
                made = tracer.start_span("generate Model")
                bare(self, ids, max_new_tokens=max_new_tokens)
                made.end()

        model, ids = ByHand(), torch.ones(1, 2048)
        return lambda: model.generate(ids, max_new_tokens=8)

    def beside(self, others: int) -> Side:
        """A measured call with other windows open all the while."""
        wiring = self.wiring()
        calls = wiring._requests.calls(Target("app.Model.generate", "generate"), "generate Model")
        self.open += [contextvars.Context().run(calls.begin) for _ in range(others)]
        return call(wiring)


class Model:
    def generate(self, ids: torch.Tensor, *, max_new_tokens: int) -> None:
        """Nothing, quickly."""


def call(wiring: Wiring | None, span: str = "new") -> Side:
    """A call of a method with one tensor among its arguments; measured where there is a wiring."""

    class Model_(Model):
        generate = Model.generate

    Model_.__name__ = "Model"
    if wiring is not None:
        target = Target("app.Model.generate", "generate", span)
        wrap_attribute(Model_, "generate", target, wiring._requests)
    model, ids = Model_(), torch.ones(1, 2048, dtype=torch.int64)
    return lambda: model.generate(ids, max_new_tokens=8)


def compare(rounds: int, calls: int) -> list[Figure]:
    memory = harness.fragmented(torch, 1)
    without_sdk = call(Wiring(OwnTelemetry(), Config()))
    bench = Bench()

    def two(ours: Side, floor: Side, times: int = CALLS) -> harness.Times:
        return interleaved({"ours": ours, "floor": floor}, rounds, times)

    readings, records = "two raw readings", "the same three records"
    told = f"a bare span with as many attributes + {readings}"
    full = two(bench.ours(), bench.floor(span=True, records=True))
    spans = two(bench.ours(request_metrics=False), bench.floor(span=True, records=False))
    metrics = two(bench.ours("off"), bench.floor(span=False, records=True))
    out = bench.ours(tracer_provider=bench.dropped, request_metrics=False)
    sampled_out = two(out, bench.bare_span(), 200)
    no_sdk = two(without_sdk, call(None), 1000)
    alone, beside_one, beside_many = bench.beside(0), bench.beside(1), bench.beside(OTHERS)
    windows = interleaved({"1": alone, "2": beside_one, "64": beside_many}, rounds, CALLS)
    figures = [
        ratio("a recorded call with its metrics", f"{told} + {records}", full, "ours", "floor", 1.15),
        ratio("a recorded call without metrics", told, spans, "ours", "floor", 1.2),
        ratio("a call with metrics alone", f"{readings} + {records}", metrics, "ours", "floor", 1.1),
        added("a sampled-out call, no metrics", "a bare sampled-out span", sampled_out, "ours", "floor", 1.5),
        added("a call without an SDK", "the bare call", no_sdk, "ours", "floor", 1),
        ratio("a recorded call among 64 open windows", "alone", windows, "64", "1", 1.1),
        ratio("a recorded call among 64 open windows", "among 2", windows, "64", "2", 1.1),
        retained(bench.ours(), bench.reader, calls),
    ]
    del memory
    return figures


def retained(side: Callable[[], object], reader: InMemoryMetricReader, calls: int) -> Figure:
    """What is left of many calls, in a process that is collected from now and then."""

    def many(count: int) -> None:
        for _ in range(10):
            for _ in range(count // 10):
                side()
            reader.collect()
        gc.collect()

    tracemalloc.start()
    many(1000)
    before = tracemalloc.get_traced_memory()[0]
    many(calls)
    left = (tracemalloc.get_traced_memory()[0] - before) / calls
    tracemalloc.stop()
    detail = "tracemalloc; the ring of brief readings fills meanwhile"
    return harness.of(f"left of {calls:,} recorded calls", "a call", [left], "B", 1, detail)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--calls", type=int)
    options = parser.parse_args()
    print_figures(compare(options.rounds, options.calls))


if __name__ == "__main__":
    main()
