# SPDX-License-Identifier: Apache-2.0
"""docs/RUNBOOK.md against the alerts and the table; its PromQL is held against it in test_expressions.py."""

from __future__ import annotations

import re

import pytest

from opentelemetry_instrumentation_torchmem.signals import EVENTS, METRICS, SPANS

from . import expressions
from .expressions import RUNBOOK, Parser
from .servers import prometheus

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
