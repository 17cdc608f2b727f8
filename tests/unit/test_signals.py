# SPDX-License-Identifier: Apache-2.0
"""The table's own rules, and what is generated from it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from opentelemetry_instrumentation_torchmem import signals
from opentelemetry_instrumentation_torchmem.allocator.sampler import COUNTERS
from opentelemetry_instrumentation_torchmem.signals import (
    EVENTS,
    GUARD_METRICS,
    METRICS,
    REQUEST_METRICS,
    SPANS,
    Kind,
)

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
ALL_METRICS = (*METRICS, *REQUEST_METRICS, *GUARD_METRICS)
REGISTRY = {path.name: yaml.safe_load(path.read_text()) for path in (DOCS / "registry").glob("*.yaml")}
GROUPS = [group for content in REGISTRY.values() for group in content.get("groups", [])]


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_fresh():
    assert generator().main(["--check"]) == 0


def test_names_are_the_fields_own():
    names = [row.name for row in ALL_METRICS]
    assert len(set(names)) == len(names)
    for row in ALL_METRICS:
        assert NAME.fullmatch(row.name), row.name
        assert row.name.startswith("torch.memory.")
        assert row.about.endswith("."), row.name
        assert not row.name.endswith(("_total", "_bytes", "_seconds", "_ratio"))


@pytest.mark.parametrize("what", ["attributes", "metrics"])
def test_no_name_is_the_namespace_of_another(what):
    if what == "attributes":
        names = {a.name for row in (*ALL_METRICS, *SPANS, *EVENTS) for a in row.attributes}
    else:
        names = {row.name for row in ALL_METRICS}
    for name in names:
        assert not [other for other in names if other.startswith(f"{name}.")], name


def test_every_attribute_of_the_module_is_used_and_described_once():
    rows = (*ALL_METRICS, *SPANS, *EVENTS)
    used = {id(attribute) for row in rows for attribute in row.attributes} | {
        id(attribute) for group in signals.CARRIED.values() for attribute in group
    }
    declared = [value for value in vars(signals).values() if isinstance(value, signals.Attribute)]
    assert [attribute.name for attribute in declared if id(attribute) not in used] == []
    for attribute in declared:
        assert attribute.type in ("string", "int", "double", "boolean", "string[]")
        assert attribute.members or attribute.examples or attribute.type == "boolean", attribute.name


def test_every_counter_of_the_reading_has_a_row():
    class Totals:
        totals = dict.fromkeys(COUNTERS, 1)

    rows = [row for row in METRICS if row.kind is Kind.COUNTER and row.per is signals.Per.DEVICE]
    assert len(rows) == len(COUNTERS)
    assert all(row.of(Totals()) == 1 for row in rows)


def test_the_registry_has_a_manifest_with_a_schema_url():
    assert list(REGISTRY["manifest.yaml"]) == ["schema_url"]
    assert re.fullmatch(
        r"https://[^/]+/schemas/torchmem/\d+\.\d+\.\d+", REGISTRY["manifest.yaml"]["schema_url"]
    )


def test_the_registry_refers_only_to_what_it_declares():
    declared = {
        attribute["id"]: attribute
        for group in GROUPS
        if group["type"] == "attribute_group"
        for attribute in group["attributes"]
    }
    for group in GROUPS:
        assert group["stability" if group["type"] != "attribute_group" else "id"]
        if group["type"] == "metric":
            assert group["id"] == f"metric.{group['metric_name']}"
            assert group["instrument"] in ("counter", "updowncounter", "gauge", "histogram")
            assert isinstance(group["unit"], str)
        for attribute in group.get("attributes", []):
            if group["type"] != "attribute_group":
                assert attribute["ref"] in declared
                level = attribute["requirement_level"]
                assert level == "required" or list(level) == ["conditionally_required"]
    for attribute in declared.values():
        assert attribute["stability"] == "development"
        if isinstance(attribute["type"], dict):
            members = attribute["type"]["members"]
            assert len({member["id"] for member in members}) == len(members)
        elif attribute["type"].startswith("string"):
            assert attribute["examples"]


def test_the_registry_has_every_row():
    told = {group["metric_name"]: group for group in GROUPS if group["type"] == "metric"}
    assert set(told) == {row.name for row in ALL_METRICS}
    for row in ALL_METRICS:
        assert told[row.name]["unit"] == row.unit
        assert told[row.name]["instrument"] == row.kind.value
        assert [a["ref"] for a in told[row.name]["attributes"]] == [a.name for a in row.attributes]


def test_byte_histograms_have_a_bucket_for_nothing_and_powers_of_two_up_to_64_gib():
    for row in REQUEST_METRICS:
        if row.unit == "By":
            assert row.boundaries[0] == 0
            assert row.boundaries[1:] == tuple(float(2**power) for power in range(20, 37))
