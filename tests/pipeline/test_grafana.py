# SPDX-License-Identifier: Apache-2.0
"""Grafana's files: by structure, as there is no Grafana here, and their queries on the real Prometheus."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from .expressions import (
    RULES_SOURCE,
    Expression,
    Parser,
    faults,
    in_dashboards,
    of_the_table,
    recorded,
    without_data,
    without_variables,
)
from .parts import ROOT
from .servers import CONFIG, Prometheus, collector, free_ports, prometheus
from .simulate import record
from .stack import example

GRAFANA = CONFIG / "grafana"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
SOURCES = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "torchmem.yaml").read_text())[
    "datasources"
]
BUILT_IN = {"__rate_interval", "__range", "__interval", "__data", "__field", "__url_time_range", "__all"}
COLUMNS = 24


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


ALL_PANELS = [
    pytest.param(name, panel, id=f"{name}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in panels(board)
]


def texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for each in node.values():
            yield from texts(each)
    elif isinstance(node, list):
        for each in node:
            yield from texts(each)


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, GRAFANA / "build.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Grafana's builder needs Python 3.11; the files are committed"
)
def test_the_committed_dashboards_are_what_the_tables_make_with_grafanas_own_types():
    done = build("--check")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's builder needs Python 3.11")
def test_an_argument_that_the_builder_does_not_know_is_told_in_one_line():
    done = build("--chek")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "build.py takes --check or nothing, not --chek\n"


def test_there_is_a_board_for_the_allocator_the_requests_and_the_fleet():
    assert set(BOARDS) == {"torchmem-allocator", "torchmem-requests", "torchmem-fleet"}
    assert all(board["uid"] == name for name, board in BOARDS.items())


@pytest.mark.parametrize(("name", "panel"), ALL_PANELS)
def test_a_panel_says_what_it_shows_in_which_unit_and_from_where_it_is_bad(name: str, panel: dict[str, Any]):
    defaults = panel["fieldConfig"]["defaults"]
    assert len(panel["description"]) > 10
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    steps = defaults["thresholds"]["steps"]
    assert steps[0]["value"] is None, "the first colour holds from nothing on"
    values = [step["value"] for step in steps[1:]]
    assert values == sorted(values)
    assert panel["targets"]
    letters = [target["refId"] for target in panel["targets"]]
    assert letters == sorted(set(letters))
    assert all(
        target["datasource"]["uid"] in ("${metrics}", "${traces}", "${logs}") for target in panel["targets"]
    )


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(board: dict[str, Any]):
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_variable_that_is_used_is_there_and_every_one_that_is_there_is_used(board: dict[str, Any]):
    there = {variable["name"] for variable in board["templating"]["list"]}
    used = {
        found[1] or found[2]
        for text in texts(
            {"panels": board["panels"], "variables": board["templating"], "marks": board["annotations"]}
        )
        for found in re.finditer(r"\$(?:\{(\w+)|(\w+))", text)
    }
    assert used - BUILT_IN == there


def test_service_instance_and_device_can_be_chosen():
    choices = {
        name: {variable["name"] for variable in board["templating"]["list"]} for name, board in BOARDS.items()
    }
    assert choices["torchmem-allocator"] >= {"service", "instance", "device"}
    assert choices["torchmem-requests"] >= {"service", "instance", "operation"}
    assert choices["torchmem-fleet"] >= {"service"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_link_leads_to_a_board_that_is_there_and_sets_only_variables_that_it_has(board: dict[str, Any]):
    links = [text for text in texts(board) if text.startswith("/d/")]
    assert links
    for link in links:
        uid = link.removeprefix("/d/").partition("?")[0]
        assert uid in BOARDS
        known = {variable["name"] for variable in BOARDS[uid]["templating"]["list"]}
        assert set(re.findall(r"[?&]var-(\w+)=", link)) <= known


def test_the_ledger_is_stacked_to_the_limit_which_is_not_part_of_the_stack():
    (ledger,) = [panel for panel in panels(BOARDS["torchmem-allocator"]) if panel["title"] == "The ledger"]
    assert ledger["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    (outline,) = [
        override["properties"]
        for override in ledger["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == "limit" and len(override["properties"]) > 1
    ]
    assert {"id": "custom.stacking", "value": {"mode": "none", "group": "outline"}} in outline


def test_exemplars_are_asked_for_on_raw_buckets_alone():
    asked = {
        target["expr"]
        for board in BOARDS.values()
        for panel in panels(board)
        for target in panel["targets"]
        if target.get("exemplar")
    }
    assert len(asked) >= 4
    for expression in asked:
        assert "torchmem:" not in expression, "a recorded series has no exemplars"
        assert "_bucket{" in expression


def test_prometheus_finds_the_exemplars_by_the_boards_own_queries(tmp_path, emulation):
    """What a process really exports, pushed; asked as Grafana asks, by the panel's query."""
    export = ExportMetricsServiceRequest(resource_metrics=[record()])
    with prometheus(tmp_path, "prometheus-push.yaml") as server:
        request = urllib.request.Request(
            f"{server.url}/api/v1/otlp/v1/metrics",
            data=export.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        for name, panel in [each.values for each in ALL_PANELS]:
            for target in panel["targets"]:
                if not target.get("exemplar"):
                    continue
                found = server.get(
                    "query_exemplars",
                    query=without_variables(target["expr"]),
                    start=time.time() - 600,
                    end=time.time() + 60,
                )
                told = [exemplar for series in found for exemplar in series["exemplars"]]
                assert told, f"{name}: {panel['title']}"
                assert all(len(exemplar["labels"]["trace_id"]) == 32 for exemplar in told)


# ------------------------------------------------------------------------------------------- the data sources


def by_type(kind: str) -> dict[str, Any]:
    (source,) = [source for source in SOURCES if source["type"] == kind]
    return source


def test_an_exemplar_opens_its_trace():
    (link,) = by_type("prometheus")["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id"
    assert link["datasourceUid"] == by_type("tempo")["uid"]


def test_a_trace_leads_to_the_metrics_of_its_instance_and_to_its_logs():
    tempo = by_type("tempo")["jsonData"]
    assert tempo["tracesToMetrics"]["datasourceUid"] == by_type("prometheus")["uid"]
    assert {"key": "service.instance.id", "value": "instance"} in tempo["tracesToMetrics"]["tags"]
    assert tempo["tracesToLogsV2"]["datasourceUid"] == by_type("loki")["uid"]
    assert "$${__trace.traceId}" in tempo["tracesToLogsV2"]["query"]
    (field,) = by_type("loki")["jsonData"]["derivedFields"]
    assert field["datasourceUid"] == by_type("tempo")["uid"]


def test_every_source_that_is_linked_to_is_there():
    uids = [source["uid"] for source in SOURCES]
    assert len(set(uids)) == len(uids)
    for source in SOURCES:
        for key, value in _pairs(source):
            if key == "datasourceUid":
                assert value in uids


def _pairs(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield key, value
            yield from _pairs(value)
    elif isinstance(node, list):
        for each in node:
            yield from _pairs(each)


def test_the_queries_from_traces_and_the_boards_name_only_what_there_is(tmp_path):
    linked = [
        Expression(
            query["query"].replace("$$__tags", 'instance=~".*"'), f"datasources: {query['name']}", False, ""
        )
        for query in by_type("tempo")["jsonData"]["tracesToMetrics"]["queries"]
    ]
    assert len(linked) >= 4
    with prometheus(tmp_path, "prometheus-push.yaml") as server:
        parser = Parser(server)
        known = recorded(parser, of_the_table())
        found = [fault for each in (*linked, *in_dashboards()) for fault in faults(each, parser, known)]
    assert found == []


WITHOUT_DATA = {
    "headroom:exhaustion_seconds": "headroom has not fallen for three hours",
    "fleet:exhaustion_seconds:worst5": "headroom has not fallen for three hours",
    "telemetry_absent": "every figure of a snapshot is to be had in this mode",
    "Devices with several processes": "there is one process",
}
"""Queries that return nothing after the load, each with the reason; by a pattern over metric or panel."""


@pytest.fixture(scope="module")
def loaded(emulation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after a load that fragments and runs out of memory; a minute of the rules is 1.2 s here."""
    folder = tmp_path_factory.mktemp("loaded")
    subprocess.run([sys.executable, RULES_SOURCE, "--scale", "0.02", "--to", folder / "rules"], check=True)
    (port,) = free_ports(1)
    metrics = {"PROMETHEUS_OTLP_URL": f"http://127.0.0.1:{port}/api/v1/otlp/v1/metrics"}
    faster = {"rule_files": [str(folder / "rules" / "*.yaml")], "global.evaluation_interval": "1s"}
    with collector(folder, ["otel-collector.yaml", "metrics-push.yaml"], environment=metrics) as otelcol:
        store = prometheus(
            folder, "prometheus-push.yaml", port=port, replace={"127.0.0.1:8888": otelcol.own}, change=faster
        )
        with store, example(folder, otelcol.grpc, export=2) as server:
            ask = functools.partial(httpx.post, f"{server.url}/images", timeout=60)
            assert ask(json={"width": 1024, "height": 1024}).status_code == 200
            load = [sys.executable, ROOT / "examples" / "load.py", "--seconds", "20", server.url]
            subprocess.run(load, check=True, capture_output=True, timeout=120)
            assert ask(json={"width": 4096, "height": 4096}).status_code == 503
            time.sleep(8)  # exported, and recorded layer by layer
            yield store


def test_every_query_of_the_boards_returns_data_after_the_load_or_is_listed_with_the_reason(loaded):
    assert without_data(loaded, list(in_dashboards()), WITHOUT_DATA, lookback="5m") == []


def test_no_variable_of_grafanas_is_left_in_what_prometheus_is_asked():
    assert without_variables('x{a=~"$service"}[$__rate_interval]') == 'x{a=~".*"}[5m]'
    assert not [each.where for each in in_dashboards() if "$" in each.text]
