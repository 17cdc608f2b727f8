# SPDX-License-Identifier: Apache-2.0
"""What the real SDK would export, as plain figures: `exported.value("torch.memory.limit")`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk._logs import LoggerProvider, export
from opentelemetry.sdk.metrics import Counter, MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

DELTA = {Counter: AggregationTemporality.DELTA, ObservableCounter: AggregationTemporality.DELTA}


class Exported:
    """A meter provider with a reader in memory: `collect`, then ask what came."""

    def __init__(self, delta: bool = False) -> None:
        self.reader = InMemoryMetricReader(preferred_temporality=DELTA if delta else None)
        self.provider = MeterProvider([self.reader])
        self.metrics: list[Any] = []

    def collect(self) -> Exported:
        data = self.reader.get_metrics_data()
        self.metrics = [
            metric
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        return self

    @property
    def names(self) -> set[str]:
        return {metric.name for metric in self.metrics}

    def points(self, name: str) -> list[Any]:
        return [point for metric in self.metrics if metric.name == name for point in metric.data.data_points]

    def all(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        return [(dict(point.attributes), point.value) for point in self.points(name)]

    def value(self, name: str, **attributes: Any) -> Any:
        """The sum of the points that carry the attributes (`state`, `pool`, `device`, `reason`, `step`)."""
        keys = {
            "device": "torch.device",
            "state": "torch.memory.state",
            "pool": "torch.memory.pool",
            "reason": "torch.memory.telemetry.reason",
            "step": "torch.memory.telemetry.step",
        }
        wanted = {keys[key]: value for key, value in attributes.items()}
        matching = [value for labels, value in self.all(name) if wanted.items() <= labels.items()]
        return sum(matching) if matching else None

    def ledger(self, device: str = "cuda:0") -> dict[str, int]:
        return {
            labels["torch.memory.state"]: value
            for labels, value in self.all("torch.memory.usage")
            if labels["torch.device"] == device
        }


class Traced:
    """A tracer provider whose finished spans lie in memory."""

    def __init__(self, **arguments: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**arguments)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())


class Logged:
    """A logger provider whose records lie in memory.

    Where the logs API is old it has no events: they have an API of their own, whose provider is global.
    """

    def __init__(self) -> None:
        self.is_old = not hasattr(export, "InMemoryLogRecordExporter")
        kind = export.InMemoryLogExporter if self.is_old else export.InMemoryLogRecordExporter
        self.exporter: Any = kind()
        self.provider = LoggerProvider(shutdown_on_exit=False)
        self.provider.add_log_record_processor(export.SimpleLogRecordProcessor(self.exporter))
        if self.is_old:
            from opentelemetry import _events
            from opentelemetry.sdk._events import EventLoggerProvider

            _events.set_event_logger_provider(EventLoggerProvider(self.provider))

    @property
    def records(self) -> list[Any]:
        records = [each.log_record for each in self.exporter.get_finished_logs()]
        return [self._of_now(record) for record in records] if self.is_old else records

    def _of_now(self, record: Any) -> Any:
        attributes = dict(record.attributes)
        name = attributes.pop("event.name", None)
        return SimpleNamespace(
            event_name=name,
            body=record.body,
            attributes=attributes,
            trace_id=record.trace_id,
            span_id=record.span_id,
            severity_number=record.severity_number,
        )
