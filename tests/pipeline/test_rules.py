# SPDX-License-Identifier: Apache-2.0
"""The rules and the configuration of Prometheus, by promtool of Prometheus 3."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import yaml

from .expressions import RESOURCE, RULES_SOURCE, alerts, rules
from .parts import part
from .servers import CONFIG

FOLDER = CONFIG / "prometheus"
TESTS = sorted((FOLDER / "tests").glob("*.yaml"))


def promtool(*arguments: object) -> None:
    done = subprocess.run(
        [part("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def generate(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, RULES_SOURCE, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_committed_rules_are_those_of_the_source_at_scale_1_byte_for_byte(tmp_path):
    done = generate("--to", tmp_path)
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_bytes() for path in (FOLDER / "rules").iterdir()}
    assert written == committed


def test_a_stale_file_is_named(tmp_path):
    generate("--to", tmp_path)
    (tmp_path / "fleet.yaml").write_text("groups: []\n")
    done = generate("--to", tmp_path, "--check")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"stale: {tmp_path / 'fleet.yaml'}: run ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scale", "0.5"), "--scale 0.5 needs --to"),
        (("--scale", "0"), "0 is not allowed (a number above 0)"),
        (("--scale", "nan", "--to", "x"), "nan is not allowed (a number above 0)"),
        (("--scale", "fast", "--to", "x"), "fast is not allowed (a number above 0)"),
        (("--runbook", "https://wiki.example/gpu"), "--runbook needs --to"),
        (
            ("--runbook", "wiki/gpu", "--to", "x"),
            "wiki/gpu is not allowed (an http or https address, without #)",
        ),
        (
            ("--runbook", "https://wiki.example/gpu#a", "--to", "x"),
            "https://wiki.example/gpu#a is not allowed",
        ),
    ],
)
def test_an_argument_that_is_not_allowed_is_told_in_one_line(arguments, said):
    done = generate(*arguments)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_a_scale_changes_every_duration_and_nothing_else(tmp_path):
    done = generate("--scale", "0.02", "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    scaled = {row["alert"]: row for row in alerts(tmp_path)}
    full = {row["alert"]: row for row in alerts()}
    assert full["TorchMemFragmented"]["for"] == "5m"
    assert scaled["TorchMemFragmented"]["for"] == "6000ms"
    assert scaled["TorchMemHeadroomExhaustion"]["expr"] == "torchmem:headroom:exhaustion_seconds < 288"
    assert [row["expr"].count("\n") for row in rules(tmp_path)] == [
        row["expr"].count("\n") for row in rules()
    ]
    assert not any("m]" in row["expr"].replace("ms]", "") for row in rules(tmp_path))
    promtool("check", "rules", *sorted(tmp_path.iterdir()))


def test_a_runbook_of_ones_own_changes_where_alerts_lead_to_and_nothing_else(tmp_path):
    done = generate("--runbook", "https://wiki.example/gpu", "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    ours = {row["alert"]: row["annotations"]["runbook_url"] for row in alerts(tmp_path)}
    assert ours["TorchMemLeak"] == "https://wiki.example/gpu#torchmemleak"
    assert set(ours) == {row["alert"] for row in alerts()}
    for path in sorted(tmp_path.iterdir()):
        committed = (FOLDER / "rules" / path.name).read_text()
        assert path.read_text() == committed.replace(
            "https://torchmem.example/docs/RUNBOOK.md", "https://wiki.example/gpu"
        )
    again = generate("--runbook", "https://wiki.example/gpu", "--to", tmp_path, "--check")
    assert again.returncode == 0, again.stderr


def test_every_rule_file_and_configuration_passes_promtools_check():
    promtool("check", "rules", "--lint=all", "--lint-fatal", *sorted((FOLDER / "rules").iterdir()))
    for path in ("prometheus-scrape.yaml", "prometheus-push.yaml"):
        promtool("check", "config", "--lint=all", "--lint-fatal", FOLDER / path)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_promtool_tests(path):
    promtool("test", "rules", path)


def _wandering(dice: random.Random) -> Callable[[], float]:
    away = 0.0

    def step() -> float:
        nonlocal away
        away = 0.95 * away + dice.gauss(0, 300)
        return 4000 + away

    return step


NOISES: dict[str, Callable[[random.Random], Callable[[], float]]] = {
    "even": lambda dice: lambda: dice.uniform(2500, 5500),
    "normal": lambda dice: lambda: dice.gauss(4000, 1200),
    "wandering": _wandering,
    "dips": lambda dice: lambda: 4000 - (dice.uniform(500, 3800) if dice.random() < 0.03 else 0),
}
"""Headroom in MiB, minute by minute, without a trend."""


def test_of_forty_noises_without_a_trend_over_eight_hours_one_at_most_looks_like_an_end(tmp_path):
    series = []
    for seed in range(40):
        kind = list(NOISES)[seed % len(NOISES)]
        step = NOISES[kind](random.Random(seed))
        labels = f'job="{kind}", instance="{seed}", torch_device="cuda:0"'
        values = " ".join(f"{max(50, step()):.0f}" for _ in range(480))
        series.append({"series": f"torch_memory_headroom_bytes{{{labels}}}", "values": values})
    test = yaml.safe_load((FOLDER / "tests" / "exhaustion.yaml").read_text())
    test["rule_files"] = [str(FOLDER / "rules" / "*.yaml")]
    ever = 'count_over_time(ALERTS{alertname="TorchMemHeadroomExhaustion", alertstate="firing"}[8h])'
    check = {"expr": f"(count({ever}) or vector(0)) <= bool 1", "eval_time": "8h"}
    check["exp_samples"] = [{"labels": "{}", "value": 1}]
    test["tests"] = [{"interval": "1m", "input_series": series, "promql_expr_test": [check]}]
    (tmp_path / "noises.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", tmp_path / "noises.yaml")


def test_each_alert_is_tested_firing_and_not_firing():
    fires: set[str] = set()
    silent: set[str] = set()
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for check in test.get("alert_rule_test", ()):
                told = {one["exp_labels"].get("instance") for one in check["exp_alerts"]}
                beside = {
                    word
                    for series in test["input_series"]
                    if 'instance="' in series["series"]
                    for word in [series["series"].split('instance="')[1].split('"')[0]]
                }
                fires |= {check["alertname"]} if check["exp_alerts"] else set()
                silent |= {check["alertname"]} if beside - told else set()
    names = {row["alert"] for row in alerts()}
    assert (fires, silent) == (names, names)


def test_each_alert_tells_who_and_how_much_how_urgent_it_is_and_where_to_read_on():
    for row in alerts():
        assert row["labels"]["severity"] in ("critical", "warning", "info")
        summary = row["annotations"]["summary"]
        assert set(re.findall(r'label "(\w+)"', summary)) <= RESOURCE
        assert "{{ $labels.job }}" in summary
        assert "$value" in summary or row["alert"] == "TorchMemTelemetryMissing"  # of which there is no value
        assert row["annotations"]["runbook_url"].endswith(f"/docs/RUNBOOK.md#{row['alert'].lower()}")
