# SPDX-License-Identifier: Apache-2.0
"""The log record of an out of memory error, on each logs API that there has been."""

from __future__ import annotations

import sys
from types import ModuleType

from exported import Logged
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_span_in_context

from opentelemetry_instrumentation_torchmem import oom

EVENT = "torch.memory.oom.evidence"


def test_a_record_carries_the_event_its_attributes_and_the_trace():
    logged = Logged()
    span = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("a request")
    emit = oom.OomLog(logged.provider)
    emit("said", {"a": 1}, set_span_in_context(span))
    (with_span,) = logged.records
    assert (with_span.event_name, with_span.body, dict(with_span.attributes)) == (EVENT, "said", {"a": 1})
    assert with_span.trace_id == span.get_span_context().trace_id
    assert with_span.span_id == span.get_span_context().span_id


class _OlderLogger:
    """As it was before it took the parts of a record, and with them an event's name."""

    def emit(self, record: object) -> None: ...


class _Event:
    def __init__(self, name: str, **parts: object) -> None:
        self.name = name
        self.parts = parts


def test_an_older_api_gets_an_event(monkeypatch):
    emitted: list[_Event] = []

    class EventLogger:
        emit = staticmethod(emitted.append)

    events = ModuleType("opentelemetry._events")
    events.Event = _Event
    events.get_event_logger = lambda *_: EventLogger
    monkeypatch.setitem(sys.modules, "opentelemetry._events", events)
    monkeypatch.setattr(oom, "Logger", _OlderLogger)
    span = TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("a request")
    oom.OomLog()("said", {"a": 1}, set_span_in_context(span))
    (event,) = emitted
    assert event.name == EVENT
    assert event.parts["body"] == "said"
    assert event.parts["attributes"] == {"a": 1}
    assert event.parts["trace_id"] == span.get_span_context().trace_id


def test_an_api_with_neither_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry._events", None)
    monkeypatch.setattr(oom, "Logger", _OlderLogger)
    oom.OomLog()("said", {"a": 1}, None)
