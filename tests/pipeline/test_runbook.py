# SPDX-License-Identifier: Apache-2.0
"""docs/RUNBOOK.md against the alerts and the table; its PromQL is held against it in test_expressions.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.parse

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from opentelemetry_instrumentation_torchmem.signals import EVENTS, METRICS, SPANS

from . import expressions
from .expressions import RUNBOOK, Parser
from .servers import api, jaeger, prometheus, until

TEXT = RUNBOOK.read_text()
SECTIONS = {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in TEXT.split("\n## ")[1:]}
ALERTS = [row["alert"] for row in expressions.alerts()]


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_each_alert_has_a_section_under_its_name_in_their_order():
    assert [title for title in SECTIONS if title.startswith("TorchMem")] == ALERTS


@pytest.mark.parametrize("alert", ALERTS)
def test_a_section_says_what_it_means_what_to_run_why_what_to_do_and_how_to_confirm(alert):
    section = SECTIONS[alert]
    order = [section.index(part) for part in ("**Means.**", "**Look.**", "**Likely causes", "**Confirm.**")]
    assert order == sorted(order)
    look, causes, confirm = section[order[1] : order[2]], section[order[2] : order[3]], section[order[3] :]
    assert len(blocks("promql", look)) == 3
    assert len(blocks("promql", confirm)) == 1
    assert len(re.findall(r"^\d\. |^\| `", causes, re.MULTILINE)) >= 3
    assert "Fix" in causes or "fix" in causes
    assert "isk" in causes


def test_every_query_parses_as_it_is_printed_with_its_placeholders(tmp_path):
    with prometheus(tmp_path, "prometheus-push.yaml") as server:
        parser = Parser(server)
        for each in expressions.in_runbook():
            parser.tree(each.written)


def test_every_link_leads_to_a_section():
    titles = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= titles


def test_every_question_has_a_search_for_tempo_and_one_for_jaeger_over_attributes_of_the_table():
    section = SECTIONS["Which requests did it"]
    questions = re.findall(r"^\*\*(.*?)\*\*", section, re.MULTILINE)
    assert len(questions) == len(blocks("traceql", section)) == len(blocks("sh", section)) == 6
    on_spans = {attribute.name for row in SPANS for attribute in row.attributes}
    on_events = {attribute.name for row in EVENTS for attribute in row.attributes}
    for search in blocks("traceql", section):
        assert set(re.findall(r"span\.(torch[\w.]+|error[\w.]+)", search)) <= on_spans
        assert set(re.findall(r"event\.(torch[\w.]+)", search)) <= on_events
        assert set(re.findall(r'event:name = "([^"]+)"', search)) <= {row.name for row in EVENTS}
        assert search.count("{") == search.count("}")
    for search in blocks("sh", section):
        keys = set(re.findall(r'"((?:torch|error)\.[\w.]+)"', search))
        assert keys
        assert keys <= on_spans


# Question -> attributes of a request that is an answer, and of one that is nearly.
ANSWERS: dict[str, tuple[dict[str, int | str | bool], dict[str, int | str | bool]]] = {
    "Requests that grew reserved by more than 256 MiB": (
        {"torch.memory.reserved.delta": 268435457},
        {"torch.memory.reserved.delta": 268435456},
    ),
    "Requests during which the allocator retried": (
        {"torch.memory.allocation.retries": 1},
        {"torch.memory.allocation.retries": 0},
    ),
    "Requests that ran out of memory, and why": (
        {"error.type": "OutOfMemoryError"},
        {"error.type": "ValueError"},
    ),
    "Requests that needed more than any before, alone on the device": (
        {"torch.memory.peak_growth": 1},
        {"torch.memory.peak_growth": 0},
    ),
    "Calls that left tensors behind": (
        {"torch.memory.allocated.delta": 1},
        {"torch.memory.allocated.delta": -1},
    ),
    "Slow requests of one operation": (
        {"torch.operation": "generate"},
        {"torch.operation": "encode"},
    ),
}
SLOW_S = 6


def test_each_search_in_jaeger_finds_the_request_that_it_is_for_and_not_its_neighbour(tmp_path):
    section = SECTIONS["Which requests did it"]
    questions = re.findall(r"^\*\*(.*?)\*\*", section, re.MULTILINE)
    searches = dict(zip(questions, blocks("sh", section), strict=True))
    assert set(searches) == set(ANSWERS)
    with jaeger(tmp_path) as server:
        exporter = OTLPSpanExporter(endpoint=server.grpc, insecure=True)
        for number, pair in enumerate(ANSWERS.values()):
            told = Resource({"service.name": f"service-{number}"})
            provider = TracerProvider(resource=told, shutdown_on_exit=False)
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            for name, attributes in zip(("wanted", "nearly"), pair, strict=True):
                begun = time.time_ns() - SLOW_S * 10**9
                span = provider.get_tracer("x").start_span(name, start_time=begun, attributes=attributes)
                span.end(begun + (SLOW_S * 10**9 if "torch.operation" in attributes else 10**6))
        for number, (question, search) in enumerate(searches.items()):
            asked = search.replace("http://127.0.0.1:16686", server.url).replace("OPERATION", "generate")
            asked = asked.replace("SERVICE", f"service-{number}")
            found = until(lambda asked=asked: answers(asked), 20, question)
            assert found == ["wanted"], question
            if shutil.which("jq") and shutil.which("curl"):
                printed = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
                assert len(printed.stdout.splitlines()) == 1, question


def answers(search: str) -> list[str]:
    """The names of the spans that a printed search finds: its request, and jq's condition over what came."""
    url = re.search(r"'(http[^']*)'", search)
    assert url is not None
    parameters = re.findall(r"(?:-d|--data-urlencode) '?([^' ]+)=([^' ]+)", search)
    question = f"{url[1]}?{urllib.parse.urlencode(parameters)}" if parameters else url[1]
    spans = [span for trace in api(question, {})["data"] for span in trace["spans"]]
    condition = re.search(r'\.key == "([^"]+)" and \.value > (\d+)', search)
    if condition is None:
        assert "select" not in search
        return [span["operationName"] for span in spans]
    return [
        span["operationName"]
        for span in spans
        for tag in span["tags"]
        if tag["key"] == condition[1] and tag["value"] > int(condition[2])
    ]


def test_the_verdicts_and_reasons_it_names_are_those_there_are():
    verdicts = set(re.findall(r"^\| `(\w+)`", SECTIONS["TorchMemOutOfMemory"], re.MULTILINE)) | {"unexamined"}
    defined = {
        value
        for row in METRICS
        for attribute in row.attributes
        if attribute.name == "torch.memory.oom.verdict"
        for value in attribute.members or ()
    }
    assert verdicts == defined
