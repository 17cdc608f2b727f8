# SPDX-License-Identifier: Apache-2.0
"""What dashboards, rules and the runbook name is there: by Prometheus's own parser, against signals.py."""

from __future__ import annotations

import pytest

from . import expressions
from .expressions import Expression, Known, Parser
from .servers import prometheus


@pytest.fixture(scope="module")
def parser(tmp_path_factory):
    with prometheus(tmp_path_factory.mktemp("prometheus"), "prometheus-push.yaml") as server:
        yield Parser(server)


@pytest.fixture(scope="module")
def known(parser) -> Known:
    return expressions.recorded(parser, expressions.of_the_table())


@pytest.mark.parametrize("of", ["in_rules", "in_dashboards", "in_runbook"])
def test_every_expression_parses_and_names_only_what_is_defined(parser, known, of):
    found = list(getattr(expressions, of)())
    assert len(found) > 20
    assert [fault for each in found for fault in expressions.faults(each, parser, known)] == []


def test_rules_and_runbook_stand_on_the_normalised_layer_and_boards_work_under_either_naming(parser):
    recorded = {rule["record"] for rule in expressions.ordered() if "record" in rule}
    same = expressions.namings()
    for each in expressions.everything():
        names = {expressions.name_of(selector) for selector in expressions.selectors(parser.tree(each.text))}
        raw = names & set(same)
        assert names - raw <= recorded | set(expressions.FOREIGN), each
        if each.where.startswith(("grafana/", "rules/normalise.yaml")):  # exemplars are on raw buckets alone
            assert raw == {name for one in raw for name in same[one]}, each
        else:
            assert raw == set(), each


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("torch_memory_headrom_bytes", "metric 'torch_memory_headrom_bytes' is not defined"),
        ("torchmem:headrom", "metric 'torchmem:headrom' is not defined"),
        ("rate(torch_memory_headroom_total[5m])", "metric 'torch_memory_headroom_total' is not defined"),
        ('{__name__=~"torch_.*"}', "a selector without a metric's name"),
        ('torchmem:usage{torch_memory_stat="free"}', "torchmem:usage has no label 'torch_memory_stat'"),
        (
            'torchmem:headroom{torch_memory_pool="large"}',
            "torchmem:headroom has no label 'torch_memory_pool'",
        ),
        (
            'torchmem:usage{torch_memory_state="fre"}',
            "torchmem:usage has no torch_memory_state='fre' (it is one",
        ),
        (
            'torchmem:usage{torch_memory_state=~"free|extern"}',
            "torchmem:usage has no torch_memory_state='extern'",
        ),
        (
            'torch_memory_request_duration_seconds_count{torch_memory_exclusive="yes"}',
            "has no torch_memory_exclusi",
        ),
        ("sum by (pod) (torchmem:headroom)", "label 'pod', named by sum, is on none"),
        ("max without (gpu) (torchmem:headroom)", "label 'gpu', named by max, is on none"),
        (
            "torchmem:headroom / on (job, instance, torch_device) torchmem:request_growth:need1h",
            "label 'torch_device', named by on (), of its right side, is on none",
        ),
        (
            "torchmem:headroom * on (job, instance) group_left (pod) target_info",
            "label 'pod', named by group_left/right (), is on none",
        ),
        (
            'label_replace(torchmem:headroom, "a", "$1", "node", "(.*)")',
            "label 'node', named by label_replace",
        ),
        ("sum by (le) (max by (job) (torchmem:headroom))", "label 'le', named by sum, is on none"),
        (
            "histogram_quantile(0.9, torchmem:request_duration_bucket) * on (le) vector(1)",
            "label 'le', named by on",
        ),
        ("avg by (hw_id) (torchmem:headroom / on (job) torchmem:limit)", "label 'hw_id', named by avg"),
        ("sum(torchmem:headroom", "unclosed left parenthesis"),
        ("avg_over_time(torchmem:headroom)", "expected type range vector"),
    ],
)
def test_what_is_not_defined_is_named_with_its_place(parser, known, text, fault):
    told = expressions.faults(Expression(text, "grafana/x.json: a panel", written=text), parser, known)
    assert told, "nothing was found"
    assert fault in told[0]
    assert told[0].startswith("grafana/x.json: a panel: ")
    assert "\n" not in told[0]


@pytest.mark.parametrize(
    "text",
    [
        "torch_memory_usage_bytes or torch_memory_usage",
        'sum by (job) (rate(torch_memory_turnover_bytes_total{torch_device="cuda:0"}[5m]))',
        'torchmem:usage{torch_memory_state=~".*_free"}',
        "histogram_quantile(0.9, sum by (le, torch_operation) (rate(torchmem:request_duration_bucket[5m])))",
        "torchmem:headroom * on (job, instance) group_left (k8s_pod_name) target_info",
        'torchmem:preallocating unless on (job, instance) target_info{torch_memory_preallocates="true"}',
        "topk(3, min_over_time(torchmem:headroom[1h:1m]))",
    ],
)
def test_what_is_defined_passes(parser, known, text):
    assert expressions.faults(Expression(text, "x", written=text), parser, known) == []


def test_a_metric_that_is_taken_out_of_the_table_is_missed(parser):
    known = expressions.of_the_table()
    for name in ("torch_memory_headroom_bytes", "torch_memory_headroom"):
        del known.metrics[name]
    known = expressions.recorded(parser, known)
    told = [fault for each in expressions.in_rules() for fault in expressions.faults(each, parser, known)]
    assert any(
        "rules/normalise.yaml: torchmem:headroom: metric 'torch_memory_headroom_bytes'" in each
        for each in told
    )


def test_grafanas_expressions_are_read_with_their_variables_filled():
    text = 'sum(rate(torchmem:ooms{job=~"$service", instance=~"${instance:regex}"}[$__rate_interval]))'
    assert expressions.without_variables(text) == 'sum(rate(torchmem:ooms{job=~".*", instance=~".*"}[5m]))'
    board = {
        "title": "board",
        "templating": {
            "list": [{"name": "service", "type": "query", "query": "label_values(torchmem:limit, job)"}]
        },
        "panels": [
            {"title": "outer", "panels": [{"title": "inner", "targets": [{"expr": "a"}, {"expr": "b"}]}]},
            {"title": "traces", "targets": [{"datasource": {"type": "tempo"}, "query": "{}", "expr": "no"}]},
        ],
        "annotations": {"list": [{"name": "ooms", "expr": "c"}]},
    }
    assert list(expressions._queries(board, "")) == [
        ("service", "group by (job) (torchmem:limit)"),
        ("inner", "a"),
        ("inner", "b"),
        ("ooms", "c"),
    ]
