# SPDX-License-Identifier: Apache-2.0
"""docs/SIZING.md says what the package really exports, and the simulated fleet is what it says it is."""

from __future__ import annotations

import re

import pytest

from .parts import ROOT
from .servers import collector, free_ports, prometheus, until
from .simulate import Fleet, Size, record, series_of

PAGE = ROOT / "docs" / "SIZING.md"


def documented(row: str) -> tuple[int, int, int]:
    """Series, bytes and gzipped bytes of a row of its first table."""
    found = re.search(
        rf"^\| {re.escape(row)} \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert found, f"{PAGE.name} has no row {row!r}"
    series, plain, zipped = (int(each.replace(",", "")) for each in found.groups())
    return series, plain, zipped


def test_series_and_bytes_are_those_of_a_real_export(emulation):
    one, devices, targets = (Size.of(record(*each)) for each in ((1, 1), (2, 1), (1, 2)))
    for row, size in {
        "a process with one device and one target": one,
        "each further device": devices - one,
        "each further target": targets - one,
    }.items():
        series, plain, zipped = documented(row)
        assert size.series == series, f"run `python -m tests.pipeline.simulate count`: {row}"
        assert size.plain == pytest.approx(plain, rel=0.05)
        assert size.zipped == pytest.approx(zipped, rel=0.25, abs=200)


def test_a_simulated_fleet_is_so_many_instances_in_prometheus_each_with_its_own_identity(tmp_path, emulation):
    export = record()
    (port,) = free_ports(1)
    metrics = {"PROMETHEUS_OTLP_URL": f"http://127.0.0.1:{port}/api/v1/otlp/v1/metrics"}
    with collector(tmp_path, ["otel-collector.yaml", "metrics-push.yaml"], environment=metrics) as otelcol:
        own = {"127.0.0.1:8888": otelcol.own}
        store = prometheus(tmp_path, "prometheus-push.yaml", port=port, replace=own)
        with store:
            exports, _ = Fleet(export, 7).send(otelcol.grpc, seconds=1, interval=2)
            assert exports == 1
            until(lambda: store.value("count(torch_memory_limit_bytes)") == 7, 20, "seven instances")
            assert store.value("count(count by (hw_id) (torch_memory_limit_bytes))") == 7
            everything = '{job="serving/simulated", __name__=~"torch_memory_.*"}'
            assert store.value(f"count({everything})") == 7 * series_of(export).total()
