# SPDX-License-Identifier: Apache-2.0
"""No rule, board or query of the runbook fails on a fleet in which series are there twice.

A rule in which two series match one fails for the whole fleet, not for those two alone. Here is every metric
of the table, of processes that share what should tell them apart; promtool says which evaluation failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from opentelemetry_instrumentation_torchmem.signals import Attribute, Kind

from . import expressions
from .servers import CONFIG
from .test_rules import promtool

SCRAPED = {"otel_scope_name": "torchmem", "otel_scope_version": "1"}
PUSHED = {"service_name": "twins", "k8s_pod_name": "twins-0"}
TWINS: tuple[dict[str, str], ...] = (
    # Two processes under one id, each with a GPU of its own.
    {"job": "a", "instance": "same", "torch_device": "cuda:0", "hw_id": "GPU-1"},
    {"job": "a", "instance": "same", "torch_device": "cuda:0", "hw_id": "GPU-2"},
    # Another service that took the same id, with two devices; the second has told no hw_id.
    {"job": "b", "instance": "same", "torch_device": "cuda:0", "hw_id": "GPU-1"},
    {"job": "b", "instance": "same", "torch_device": "cuda:1"},
)
HOURS, STEP_MINUTES = 6, 5
STEPS = HOURS * 60 // STEP_MINUTES
GIB = 2**30
SHAPES = {
    "torch.memory.headroom": f"{36 * GIB}-{GIB // 3}x{STEPS}",
    "torch.memory.allocated": f"{GIB}+{GIB * 7 // 100}x{STEPS}",
    "torch.memory.limit": f"{80 * GIB}x{STEPS}",
    "torch.memory.fragmentation": f"0.5x{STEPS}",
    "torch.memory.reading_age": f"900x{STEPS}",
}
"""Of what would tell nothing if it rose with the rest, from where to where."""


def members(attribute: Attribute | str) -> tuple[str, ...]:
    if isinstance(attribute, str) or attribute.members is None:
        return ("one", "other")
    return tuple(attribute.members)


def fleet() -> Iterator[dict[str, str]]:
    """Every metric by both names, once as scraped and once as pushed, of every process above."""
    for row in expressions.source.ROWS:
        names = expressions.source.prometheus_names(row)
        labels = [each for each in row.attributes if expressions.source.label(each) not in TWINS[0]]
        choices: list[dict[str, str]] = [{}]
        for attribute in labels:
            name = expressions.source.label(attribute)
            values = members(attribute)
            # All values of one label beside the first of each other: every value is there, not every product.
            choices += [{name: value} for value in values]
        first = {expressions.source.label(each): members(each)[0] for each in labels}
        distinct = {tuple(sorted({**first, **choice}.items())) for choice in choices}
        has_device = any(expressions.source.label(each) == "torch_device" for each in row.attributes)
        has_hardware = any(expressions.source.label(each) == "hw_id" for each in row.attributes)
        growth = SHAPES.get(row.name, f"{GIB}+{GIB // 2}x{STEPS}")
        for number, twin in enumerate(TWINS):
            dropped = {
                *(() if has_device else ("torch_device",)),
                *(() if has_hardware else ("hw_id",)),
            }
            who = {name: value for name, value in twin.items() if name not in dropped}
            for path in (SCRAPED, PUSHED):
                for own in sorted(distinct):
                    for name in names:
                        base = {**who, **dict(own), **path}
                        if row.kind is Kind.HISTOGRAM:
                            yield from histogram(name, base, number)
                        else:
                            yield one(name, base, growth)


def histogram(name: str, labels: dict[str, str], number: int) -> Iterator[dict[str, str]]:
    rising = f"{number}+3x{STEPS}"
    for bound, values in (("0", f"0x{STEPS}"), (f"{64 * GIB}", f"0x{STEPS}"), ("+Inf", rising)):
        yield one(f"{name}_bucket", {**labels, "le": bound}, values)
    yield one(f"{name}_count", labels, rising)
    yield one(f"{name}_sum", labels, f"0+6x{STEPS}")


def one(name: str, labels: dict[str, str], values: str) -> dict[str, str]:
    return {
        "series": name + "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}",
        "values": values,
    }


@pytest.fixture(scope="module")
def twins() -> dict[str, object]:
    """The beginning of a promtool test."""
    distinct = {each["series"]: each for each in fleet()}
    told = ({"job": "a"}, {"job": "b"}, {"job": "c", "torch_memory_preallocates": "true"})
    for resource in told:
        for path in (SCRAPED, PUSHED):
            series = one("target_info", {**resource, "instance": "same", **path}, f"1x{STEPS}")
            distinct[series["series"]] = series
    return {
        "rule_files": [str(CONFIG / "prometheus" / "rules" / "*.yaml")],
        "evaluation_interval": f"{STEP_MINUTES}m",
        "group_eval_order": [
            group["name"]
            for file in expressions.source.FILES
            for group in yaml.safe_load((CONFIG / "prometheus" / "rules" / file).read_text())["groups"]
        ],
        "tests": [{"interval": f"{STEP_MINUTES}m", "input_series": list(distinct.values())}],
    }


def check(twins: dict[str, object], checks: list[dict[str, object]], folder: Path) -> None:
    (series,) = twins["tests"]  # type: ignore[misc]
    test = {**twins, "tests": [{**series, "promql_expr_test": checks}]}
    (folder / "twins.yaml").write_text(yaml.safe_dump(test, width=10_000))
    promtool("test", "rules", folder / "twins.yaml")


SILENT = {
    "TorchMemTelemetryMissing": "nobody ends here",
    "torchmem:identity:falls10m": "nothing falls here four times in ten minutes, at a point in five",
}
"""What has no value on this set, and why."""


def test_every_rule_is_evaluated_on_twins_without_an_error_and_has_series_to_fail_on(twins, tmp_path):
    names = [rule["record"] for rule in expressions.rules() if "record" in rule]
    alerts = [
        f'ALERTS{{alertname="{rule["alert"]}"}}'
        for rule in expressions.alerts()
        if rule["alert"] not in SILENT
    ]
    assert len(names) > 50
    checks = [
        {
            "expr": f"count(count_over_time({name}[{HOURS}h])) > bool 0",
            "eval_time": f"{HOURS}h",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for name in (*names, *alerts)
        if name not in SILENT
    ]
    check(twins, checks, tmp_path)


@pytest.mark.parametrize("of", ["in_rules", "in_dashboards", "in_runbook"])
def test_every_expression_that_is_asked_of_prometheus_is_evaluated_on_twins_without_an_error(
    of, twins, tmp_path
):
    texts = sorted({each.text for each in getattr(expressions, of)()})
    checks = [
        {"expr": f"({text}\n) unless on () vector(1)", "eval_time": f"{HOURS}h", "exp_samples": []}
        for text in texts
    ]
    check(twins, checks, tmp_path)
