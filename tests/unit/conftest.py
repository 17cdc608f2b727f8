# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the unit tests: calls measured through the real SDK, in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from opentelemetry_instrumentation_torchmem.allocator.pools import PoolWatch
from opentelemetry_instrumentation_torchmem.allocator.sampler import Sampler
from opentelemetry_instrumentation_torchmem.allocator.windows import OpenWindows
from opentelemetry_instrumentation_torchmem.metrics import Feed, registration
from opentelemetry_instrumentation_torchmem.requests.probe import Requests, Target
from opentelemetry_instrumentation_torchmem.requests.wrapping import wrap
from opentelemetry_instrumentation_torchmem.telemetry import OwnTelemetry


class Measured:
    """What the instrumentor wires, with what the SDK received."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.tracers.get_tracer("test")
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.telemetry = OwnTelemetry()
        self.awake = (True, True)
        self._registration = registration(self.meters)
        self.requests = self.make()

    def make(self, **options: Any) -> Requests:
        """Another ``Requests`` on the same SDK; the latest is the one that collections ask."""
        windows = OpenWindows()
        sampler = Sampler(self.telemetry, PoolWatch(), windows)
        records = self._registration.records(lambda _: False)
        requests = Requests(
            options.pop("tracer", self.tracer),
            records,
            sampler,
            windows,
            self.telemetry,
            awake=lambda: self.awake,
            **options,
        )
        feed = Feed(
            sampler,
            self.telemetry,
            lambda _: False,
            before=requests.before_collection,
            targets=requests.active,
        )
        self._registration.plug(feed)
        return requests

    def wrap(self, function: Callable[..., Any], operation: str | None = None, **options: Any) -> Any:
        """The function, measured."""
        label = f"{function.__module__}.{function.__qualname__}"
        target = Target(label, operation or function.__name__, **options)
        return wrap(function, target, self.requests)

    def spans(self) -> list[ReadableSpan]:
        """Every span that has ended, what finalizers put off included."""
        self.requests.drain()
        deadline = time.monotonic() + 20
        with self.requests.windows.lock:
            pass
        while self.requests.unfinished and time.monotonic() < deadline:  # another thread is at it
            time.sleep(0.001)
        return list(self.exporter.get_finished_spans())

    def points(self, metric: str) -> list[Any]:
        """The points of a metric, in a collection now."""
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for each in scope.metrics
            if each.name == metric
            for point in each.data.data_points
        ]

    def close(self) -> None:
        self.requests.close()
        self._registration.unplug()


@pytest.fixture
def measured() -> Iterator[Measured]:
    """Calls are measured: ``measured.wrap(function)``, ``measured.spans()``."""
    handle = Measured()
    yield handle
    handle.close()
