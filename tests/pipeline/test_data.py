# SPDX-License-Identifier: Apache-2.0
"""After the example's load every query of rules and runbook returns data on both paths, or it is told why.

The dashboards' are in test_grafana.py. A minute of the rules is 1.2 s here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from . import expressions
from .expressions import RULES_SOURCE, in_rules, in_runbook, without_data
from .parts import ROOT
from .servers import Prometheus
from .stack import Pace, Stack, example, running

SCALE = 0.02
REASONS = {
    "torch_memory_oom_rejections|torchmem:oom_rejections": "only under throw_on_cudamalloc_oom",
    "torch_memory_guard_|torchmem:guard_": "the example server has no guard",
    "torch_memory_telemetry_absent|torchmem:telemetry_absent": "every figure of a snapshot is to be had",
    "torchmem:preallocating": "the example server takes memory as it needs it",
    ":rise[23]h": "nothing has grown for hours",
    "exhaustion_seconds": "headroom has not fallen for hours",
    "RUNBOOK.md: .*_?low1h{.* (<=|>=) torchmem": "compares with an hour before",
    r"RUNBOOK.md: TorchMemHeadroomBelowNeed: sum by .* > on": "has a value once that is mended",
    "torchmem:identity:falls10m": "every process has an identity of its own",
}
"""Why there may be no data: by a pattern over a metric's name, or over the place of a query and its text."""


@pytest.fixture(scope="module")
def loaded(emulation, tmp_path_factory) -> Iterator[Stack]:
    """After a load that fragments, retries and runs out of memory."""
    folder = tmp_path_factory.mktemp("loaded")
    subprocess.run(
        [sys.executable, RULES_SOURCE, "--scale", str(SCALE), "--to", folder / "rules"], check=True
    )
    change = {"rule_files": [str(folder / "rules" / "*.yaml")], "global.evaluation_interval": "1s"}
    with (
        running(folder, Pace(export=1), change) as stack,
        example(folder, stack.otelcol.grpc, export=1) as server,
    ):
        load = [ROOT / "examples" / "load.py", "--seconds", 20, server.url]
        subprocess.run([sys.executable, *map(str, load)], check=True, timeout=120, capture_output=True)
        large = httpx.post(f"{server.url}/images", json={"width": 4096, "height": 4096}, timeout=60)
        assert large.status_code == 503
        time.sleep(8)  # exported, and recorded layer by layer
        yield stack


@pytest.fixture(params=["scraping", "pushed"])
def store(request, loaded) -> Prometheus:
    return getattr(loaded, request.param)


def test_every_query_of_the_rules_returns_data(store):
    at_scale = list(in_rules(store.folder / "rules"))
    assert len(at_scale) > 80
    assert without_data(store, at_scale, REASONS, lookback="5m") == []


def test_every_query_of_the_runbook_returns_data(store):
    assert without_data(store, list(in_runbook()), REASONS, lookback="5m") == []


@pytest.mark.parametrize("pattern", REASONS)
def test_a_reason_is_for_something_that_is_there(pattern):
    everything = [f"{each.where}: {each.written}" for each in (*in_rules(), *in_runbook())]
    assert any(re.search(pattern, each) for each in everything)


def test_no_rule_fails(store):
    groups = store.get("rules")["groups"]
    assert {group["name"] for group in groups} == {
        group.name for file in expressions.source.FILES.values() for group in file
    }
    assert [
        (rule["name"], rule["lastError"])
        for group in groups
        for rule in group["rules"]
        if rule["health"] != "ok"
    ] == []


def test_the_normalised_layer_is_the_same_on_both_paths(loaded):
    def series(prometheus: Prometheus) -> set[tuple[tuple[str, str], ...]]:
        found = prometheus.query('{__name__=~"torchmem:.*", job="example"}')
        return {tuple(sorted(each["metric"].items())) for each in found if "le" not in each["metric"]}

    scraped, pushed = map(series, loaded.each_prometheus)
    assert len(scraped) > 80
    assert scraped == pushed


def test_every_process_is_one_process_on_both_paths(loaded):
    for prometheus in loaded.each_prometheus:
        counted = Counter(json.dumps(each["metric"]) for each in prometheus.query("torchmem:limit"))
        assert list(counted.values()) == [1]
