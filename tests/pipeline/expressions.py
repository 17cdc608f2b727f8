# SPDX-License-Identifier: Apache-2.0
"""Every PromQL in the repository, and what it may name.

Rules, dashboards and the runbook are read; each expression is parsed by the real Prometheus
(`/api/v1/parse_query`), and its syntax tree is held against what signals.py defines: metrics by the names
they have in Prometheus on either path, labels by the attributes that the metric carries, values of labels by
the members of enumerations. What the recording rules make may be named too, with the labels that they keep.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import urllib.error
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from opentelemetry_instrumentation_torchmem.signals import Attribute, Kind

from .parts import ROOT
from .servers import CONFIG, Prometheus, api

RULES_SOURCE = CONFIG / "prometheus" / "rules.py"
RULES = CONFIG / "prometheus" / "rules"
DASHBOARDS = CONFIG / "grafana"
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"


def _load(path: Path) -> Any:
    """A module by its path: the folder's name is no package's."""
    name = f"torchmem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


source = _load(RULES_SOURCE)
"""rules.py, for the names it gives."""


# -------------------------------------------------------------------------------------- what there is to read


@dataclass(frozen=True, slots=True)
class Expression:
    """A PromQL expression and where it stands."""

    text: str
    """As Prometheus takes it: no variable of Grafana's or placeholder of the runbook's is left."""
    where: str
    """`rules/alerts.yaml: TorchMemLeak`, `docs/RUNBOOK.md: TorchMemLeak`, `grafana/x.json: Headroom`."""
    alert: bool = False
    """Whether it has a value only where something is wrong."""
    written: str = ""
    """As it stands there."""


def rules(folder: Path = RULES) -> list[dict[str, Any]]:
    """Every rule, recording and alerting."""
    return [
        rule
        for path in sorted(folder.glob("*.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def alerts(folder: Path = RULES) -> list[dict[str, Any]]:
    return [rule for rule in rules(folder) if "alert" in rule]


def in_rules(folder: Path = RULES) -> Iterator[Expression]:
    for path in sorted(folder.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                where = f"rules/{path.name}: {rule.get('record') or rule['alert']}"
                yield Expression(rule["expr"], where, "alert" in rule, rule["expr"])
                for template in rule.get("annotations", {}).values():
                    for query in re.findall(r'query \(printf "([^"]*)"', template):
                        yield Expression(
                            query.replace("%q", '".*"').replace('=".*"', '=~".*"'), where, False, query
                        )


# What stands for a variable of Grafana's: a duration where one is wanted, everything in a matcher.
_DURATIONS = {"__rate_interval": "5m", "__interval": "1m", "__range": "1h"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")


def without_variables(text: str) -> str:
    """Grafana's expression as Prometheus would get it with every variable at All."""
    return _VARIABLE.sub(lambda found: _DURATIONS.get(found[1] or found[2], ".*"), text)


def in_dashboards(folder: Path = DASHBOARDS) -> Iterator[Expression]:
    """Of panels, rows' panels, annotations and variables."""
    for path in sorted(folder.rglob("*.json")):
        where = f"grafana/{path.relative_to(folder)}"
        for title, text in _queries(json.loads(path.read_text()), ""):
            yield Expression(without_variables(text), f"{where}: {title}", False, text)


def _queries(node: Any, title: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for each in node:
            yield from _queries(each, title)
    if not isinstance(node, dict):
        return
    title = node.get("title") or node.get("name") or title
    if not isinstance(title, str):
        title = ""
    kind = node.get("datasource", {})
    prometheus = not isinstance(kind, dict) or kind.get("type", "prometheus") == "prometheus"
    expression = node.get("expr")
    if isinstance(expression, str) and expression and prometheus:
        yield title, expression
    if node.get("type") == "query" and prometheus:  # a variable
        asked = node.get("query")
        asked = asked.get("query", "") if isinstance(asked, dict) else asked
        if isinstance(asked, str) and asked:
            yield title, _variable_query(asked)
    for value in node.values():
        yield from _queries(value, title)


def _variable_query(text: str) -> str:
    """`label_values(metric{...}, label)` names a metric and one of its labels."""
    found = re.fullmatch(r"\s*label_values\(\s*(.*)\s*,\s*(\w+)\s*\)\s*", text, re.DOTALL)
    if found:
        return f"group by ({found[2]}) ({found[1]})"
    found = re.fullmatch(r"\s*query_result\(\s*(.*)\s*\)\s*", text, re.DOTALL)
    return found[1] if found else text


PLACEHOLDERS = {'="JOB"': '=~".+"', '="INSTANCE"': '=~".+"', '="DEVICE"': '=~".+"', '="OPERATION"': '=~".+"'}
"""What the reader of the runbook puts in."""


def in_runbook(path: Path = RUNBOOK) -> Iterator[Expression]:
    """Its blocks of promql, each one query."""
    title = ""
    lines = iter(path.read_text().splitlines())
    for line in lines:
        if line.startswith("## "):
            title = line.removeprefix("## ").strip()
        if line.strip() == "```promql":
            block: list[str] = []
            for inside in lines:
                if inside.strip() == "```":
                    break
                block.append(inside)
            written = "\n".join(block).strip()
            text = written
            for placeholder, anything in PLACEHOLDERS.items():
                text = text.replace(placeholder, anything)
            yield Expression(text, f"docs/RUNBOOK.md: {title}", False, written)


def everything() -> list[Expression]:
    return [*in_rules(), *in_dashboards(), *in_runbook()]


# ------------------------------------------------------------------------------------------ what may be named

IDENTITY = frozenset({"job", "instance"})
"""The labels that a series has on both paths, beside its attributes. Those of one path alone (`service_name`
on what was pushed, `otel_scope_name` on what was scraped) would make a board or a rule blind on the other."""

_PROMOTED = yaml.safe_load((CONFIG / "prometheus" / "prometheus-push.yaml").read_text())["otlp"][
    "promote_resource_attributes"
]
RESOURCE = frozenset(source.label(name) for name in _PROMOTED if not name.startswith("service."))
"""What target_info tells of the resource; `service.*` is `job` and `instance` there."""

TOLD_BY_THE_USER = {"torch_memory_preallocates": ("true",)}
"""Resource attributes that collector-config/README.md and the runbook ask for: label -> its values."""

FOREIGN: Mapping[str, frozenset[str]] = {
    # The resource, beside every process's series, on both paths.
    "target_info": IDENTITY | RESOURCE | frozenset(TOLD_BY_THE_USER) | {"telemetry_sdk_language"},
    # Prometheus's own.
    "up": IDENTITY,
    "ALERTS": IDENTITY | {"alertname", "alertstate", "severity", "torch_device", "torch_operation"},
    "scrape_duration_seconds": IDENTITY,
    "prometheus_rule_evaluation_failures_total": IDENTITY | {"rule_group"},
    "prometheus_tsdb_head_series": IDENTITY,
    # The collector's own, at its port 8888.
    "otelcol_exporter_queue_size": IDENTITY | {"exporter", "data_type"},
    "otelcol_exporter_queue_capacity": IDENTITY | {"exporter", "data_type"},
    "otelcol_exporter_send_failed_metric_points_total": IDENTITY | {"exporter"},
    "otelcol_receiver_refused_metric_points_total": IDENTITY | {"receiver", "transport"},
    "otelcol_receiver_accepted_metric_points_total": IDENTITY | {"receiver", "transport"},
    # dcgm-exporter's, joined by the device's uuid.
    "DCGM_FI_DEV_FB_USED": IDENTITY | {"UUID", "gpu", "Hostname"},
}
"""What is named and is not this package's, with its labels."""


@dataclass(slots=True)
class Known:
    """Metrics by name, each with its labels, and the labels' values where they are enumerated."""

    metrics: dict[str, frozenset[str]] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, name: str, labels: Iterable[str]) -> None:
        self.metrics[name] = frozenset(labels)


def of_the_table() -> Known:
    """What signals.py defines, by the names of both paths."""
    known = Known(dict(FOREIGN), dict(TOLD_BY_THE_USER))
    for row in source.ROWS:
        labels = IDENTITY | {source.label(attribute) for attribute in row.attributes}
        for name in source.prometheus_names(row):
            if row.kind is Kind.HISTOGRAM:
                known.add(f"{name}_bucket", labels | {"le"})
                known.add(f"{name}_count", labels)
                known.add(f"{name}_sum", labels)
            else:
                known.add(name, labels)
        for attribute in row.attributes:
            if values := _values(attribute):
                known.values[source.label(attribute)] = values
    return known


def namings() -> dict[str, tuple[str, ...]]:
    """Each name of a metric in Prometheus, or of a part of a histogram, -> all that it may have."""
    found: dict[str, tuple[str, ...]] = {}
    for row in source.ROWS:
        for part in ("_bucket", "_count", "_sum") if row.kind is Kind.HISTOGRAM else ("",):
            names = tuple(name + part for name in source.prometheus_names(row))
            found |= dict.fromkeys(names, names)
    return found


def _values(attribute: Attribute) -> tuple[str, ...] | None:
    if attribute.members is not None:
        return tuple(attribute.members)
    return ("true", "false") if attribute.type == "boolean" else None


# ----------------------------------------------------------------------------------------------- the checking


class Parser:
    """Syntax trees by the real Prometheus."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._url = f"{prometheus.url}/api/v1/parse_query"

    def tree(self, text: str) -> dict[str, Any]:
        """Raises ValueError with Prometheus's own words where it is no PromQL."""
        try:
            return api(self._url, {"query": text})["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.loads(error.read())["error"]) from None


def children(node: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("expr", "lhs", "rhs", "param"):
        if isinstance(node.get(key), dict):
            yield node[key]
    yield from node.get("args") or ()


def selectors(node: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The vector and matrix selectors of a tree."""
    if node["type"] in ("vectorSelector", "matrixSelector"):
        yield dict(node)
    for child in children(node):
        yield from selectors(child)


def name_of(selector: Mapping[str, Any]) -> str:
    if selector["name"]:
        return selector["name"]
    named = [
        each["value"] for each in selector["matchers"] if each["name"] == "__name__" and each["type"] == "="
    ]
    return named[0] if named else ""


@dataclass(slots=True)
class Check:
    """The faults of one tree."""

    known: Known
    faults: list[str] = field(default_factory=list)

    def labels(self, node: Mapping[str, Any]) -> frozenset[str]:
        """The labels that a node's series may have; notes what is not defined on the way."""
        kind = node["type"]
        if kind in ("vectorSelector", "matrixSelector"):
            return self._selector(node)
        below = [self.labels(child) for child in children(node)]
        there = frozenset().union(*below)
        if kind == "aggregation":
            self._named(node["grouping"], there, node["op"])
            if node["op"] == "count_values":
                there |= {node["param"]["val"]}
            if node["op"] in ("topk", "bottomk", "limitk", "limit_ratio"):
                return there
            grouping = frozenset(node["grouping"])
            return there - grouping if node["without"] else there & grouping
        if kind == "call" and node["func"]["name"] == "label_replace":
            self._named([node["args"][3]["val"]], there, "label_replace")
            return there | {node["args"][1]["val"]}
        if kind == "call" and node["func"]["name"] == "histogram_quantile":
            return there - {"le"}
        if kind == "call" and node["func"]["name"] == "label_join":
            self._named([each["val"] for each in node["args"][3:]], there, "label_join")
            return there | {node["args"][1]["val"]}
        if kind == "binaryExpr" and (matching := node.get("matching")):
            for side, each in (("left", below[0]), ("right", below[1])):
                if matching["on"]:
                    self._named(matching["labels"], each, f"on (), of its {side} side")
            one = below[1] if matching["card"] == "many-to-one" else below[0]
            self._named(matching["include"], one, "group_left/right ()")
            if node["op"] == "or":
                return there
            if matching["card"] == "one-to-one" and node["op"] not in ("and", "unless"):
                named = frozenset(matching["labels"])
                return below[0] & named if matching["on"] else below[0] - named
            many = below[1] if matching["card"] == "one-to-many" else below[0]
            return many | frozenset(matching["include"])
        return there

    def _named(self, labels: Iterable[str], there: frozenset[str], by: str) -> None:
        for label in labels:
            if label not in there:
                self.faults.append(f"label {label!r}, named by {by}, is on none of its series")

    def _selector(self, node: Mapping[str, Any]) -> frozenset[str]:
        name = name_of(node)
        if name not in self.known.metrics:
            self.faults.append(
                f"metric {name!r} is not defined" if name else "a selector without a metric's name"
            )
            return frozenset()
        labels = self.known.metrics[name]
        for matcher in node["matchers"]:
            label, value = matcher["name"], matcher["value"]
            if label == "__name__":
                continue
            if label not in labels:
                self.faults.append(f"{name} has no label {label!r}")
            elif label in self.known.values and value:
                self._value(name, label, value, regex=matcher["type"] in ("=~", "!~"))
        return labels

    def _value(self, name: str, label: str, value: str, *, regex: bool) -> None:
        members = self.known.values[label]
        for each in value.strip("()").split("|") if regex else (value,):
            if not any(re.fullmatch(each, member) if regex else each == member for member in members):
                allowed = ", ".join(members)
                self.faults.append(f"{name} has no {label}={each!r} (it is one of {allowed})")


def recorded(parser: Parser, known: Known, folder: Path = RULES) -> Known:
    """The table's names, and those that the recording rules make, with the labels that each keeps."""
    for rule in ordered(folder):
        if "record" in rule:
            labels = Check(known).labels(parser.tree(rule["expr"]))
            known.add(rule["record"], labels)
    return known


def ordered(folder: Path = RULES) -> list[dict[str, Any]]:
    """The rules in the order in which they stand on each other."""
    return [
        rule
        for name in source.FILES
        for group in yaml.safe_load((folder / name).read_text())["groups"]
        for rule in group["rules"]
    ]


def faults(expression: Expression, parser: Parser, known: Known) -> list[str]:
    """What is wrong with an expression: one line each, with where it stands."""
    try:
        tree = parser.tree(expression.text)
    except ValueError as error:
        return [f"{expression.where}: {' '.join(str(error).split())}: {expression.written}"]
    check = Check(known)
    check.labels(tree)
    return [f"{expression.where}: {fault}: {expression.written}" for fault in check.faults]


# --------------------------------------------------------------------------------------------- is there data?


def without_data(
    prometheus: Prometheus,
    expressions: Sequence[Expression],
    reasons: Mapping[str, str],
    *,
    lookback: str = "1h",
) -> list[str]:
    """The expressions that returned nothing at any time of the lookback, each in a line.

    `reasons` are regular expressions over `where: written` or over a metric's name, each with why there may
    be no data: these are left out. An alert returns something only while it fires: its selectors are asked.
    """
    parser = Parser(prometheus)
    missing: list[str] = []
    asked: dict[str, bool] = {}

    def has_data(text: str) -> bool:
        if text not in asked:
            often = re.sub(r"(\[[^][]*:)1m\]", r"\g<1>5s]", text)  # a load is over before a minute has begun
            asked[text] = bool(prometheus.query(f"max_over_time(count({often})[{lookback}:5s])"))
        return asked[text]

    for expression in expressions:
        tree = parser.tree(expression.text)
        names = {name_of(each) for each in selectors(tree)}
        subjects = (f"{expression.where}: {expression.written}", *names)
        if any(re.search(pattern, subject) for pattern in reasons for subject in subjects):
            continue
        if not expression.alert:
            if not has_data(expression.text):
                missing.append(f"{expression.where}: no data: {expression.written}")
            continue
        missing += [
            f"{expression.where}: no data of {name_of(each)} in it"
            for each in selectors(tree)
            if not has_data(selector_text(each))
        ]
    return missing


def selector_text(selector: Mapping[str, Any]) -> str:
    """A selector as PromQL, without range and offset."""
    matchers = ", ".join(
        f"{each['name']}{each['type']}{json.dumps(each['value'])}"
        for each in selector["matchers"]
        if each["name"] != "__name__"
    )
    return f"{name_of(selector)}{{{matchers}}}"
