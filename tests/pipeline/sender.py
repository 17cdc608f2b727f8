# SPDX-License-Identifier: Apache-2.0
"""A process that sends, without a GPU: the real SDK and its OTLP exporters, one request at a time."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import grpc
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, TraceFlags, set_span_in_context

TIMES = ("start_time_unix_nano", "time_unix_nano")
DELTA = dict.fromkeys((Counter, Histogram), AggregationTemporality.DELTA)


class Sender:
    """Meter, tracer and logger of one process; each `send_` says whether the collector took what it got."""

    def __init__(
        self,
        endpoint: str,
        service: str = "sender",
        *,
        delta: bool = False,
        authority: Path | None = None,
        token: str | None = None,
        timeout_s: float = 3,
        resource: Mapping[str, str] | None = None,
    ) -> None:
        """`endpoint` is `host:port`. With an `authority`'s certificate it speaks TLS."""
        self.service = service
        self.instance = str(uuid.uuid4())
        told = Resource({"service.name": service, "service.instance.id": self.instance, **(resource or {})})
        way = {
            "endpoint": endpoint,
            "insecure": authority is None,
            "credentials": grpc.ssl_channel_credentials(authority.read_bytes()) if authority else None,
            "headers": {"authorization": f"Bearer {token}"} if token else None,
            "timeout": timeout_s,
        }
        self._to = OTLPMetricExporter(**way), OTLPSpanExporter(**way), OTLPLogExporter(**way)
        self._reader = InMemoryMetricReader(preferred_temporality=DELTA if delta else None)
        self._spans, self._logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
        self.meter = MeterProvider([self._reader], resource=told).get_meter("sender")
        traces = TracerProvider(resource=told)
        traces.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = traces.get_tracer("sender")
        logs = LoggerProvider(resource=told)
        logs.add_log_record_processor(SimpleLogRecordProcessor(self._logs))
        self._logger = logs.get_logger("sender")

    def send_metrics(self, clock_s: float = 0) -> bool:
        """As from a machine whose clock is so many seconds ahead."""
        metrics = self._reader.get_metrics_data()
        for metric in (each for r in metrics.resource_metrics for s in r.scope_metrics for each in s.metrics):
            metric.data.data_points[:] = [
                replace(point, **{name: getattr(point, name) + int(clock_s * 1e9) for name in TIMES})
                for point in metric.data.data_points
            ]
        return self._to[0].export(metrics).name == "SUCCESS"

    def send_span(
        self, name: str, *, failed: bool = False, after: str | None = None, **attributes: int | str
    ) -> str | None:
        """A trace of one span, its attributes with `__` for each dot. Its id, or None if it was refused.

        With `after`, a trace's id, the span is one more of that trace.
        """
        context = None
        if after is not None:
            parent = SpanContext(
                int(after, 16), 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
            )
            context = set_span_in_context(NonRecordingSpan(parent))
        with self.tracer.start_as_current_span(name, context) as span:
            span.set_attributes({key.replace("__", "."): value for key, value in attributes.items()})
            if failed:
                span.set_status(StatusCode.ERROR)
        spans = self._spans.get_finished_spans()
        self._spans.clear()
        taken = self._to[1].export(spans).name == "SUCCESS"
        return format(span.get_span_context().trace_id, "032x") if taken else None

    def send_log(self, text: str) -> bool:
        self._logger.emit(LogRecord(body=text, severity_number=SeverityNumber.WARN))
        records = self._logs.get_finished_logs()
        self._logs.clear()
        return self._to[2].export(records).name == "SUCCESS"

    def close(self) -> None:
        for exporter in self._to:
            exporter.shutdown()
