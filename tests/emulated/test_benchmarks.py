# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' table hides no goal, and the gate fails when a path has become worse, and only then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/opentelemetry_instrumentation_torchmem")
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"

GOALS = {
    "a collection, [18] device*": (2, 3),
    "a collection with 1,000 dead private pools": (1.2, 1),
    "import": (10, 1),
    "our part of a start by *": (10, 1),
    "a recorded call with its metrics": (1.15, 1),
    "a recorded call without metrics": (1.2, 1),
    "a call with metrics alone": (1.1, 1),
    "a sampled-out call, no metrics": (1.5, 1),
    "a call without an SDK": (1, 1),
    "a recorded call among 64 open windows": (1.1, 2),
    "left of 100,000 recorded calls": (1, 1),
    "the analysis of * blocks, *": (0.5, 6),
    "a core's share, 100 requests/s, *, 10,000 blocks, *": (0.5, 4),
    "a request, the server ready": (2, 1),
}
"""What was promised of each figure, and how many such figures there are."""


def figures(text: str) -> list[list[str]]:
    """The cells of each figure in the tables of a run or a page."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return [row for row in rows if row[0] != "figure"]


def run(
    *arguments: str, place: Path = ROOT, before: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """The benchmarks in a process of their own, after what ``before`` changes."""
    program = f"import sys; from benchmarks import __main__, guard\n{before}\n__main__.main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=place,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_missed_goal_is_marked_counted_and_the_status_of_a_strict_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--only", "guard", "--quick", "--strict", "--json", str(file))
    done = run(*arguments, before="guard.GOAL = -1.0")
    assert done.returncode == 1, done.stderr
    assert "1 goals missed" in done.stdout
    told = json.loads(file.read_text())["guard"]
    marks = {row[0]: row[4:6] for row in figures(done.stdout)}
    assert marks.keys() == {figure["name"] for figure in told}
    assert marks.pop("a request, the server ready") == ["≤ -1 µs", "**missed**"]
    assert all(mark == ["", ""] for mark in marks.values())


def test_the_page_has_every_promised_goal_and_marks_what_misses_it() -> None:
    table = figures((ROOT / "docs" / "PERFORMANCE.md").read_text())
    for name, _, value, _, goal, mark, _ in table:
        if not goal:
            assert mark == "", name
        elif (shown := float(value.split()[0])) != (most := float(goal.split()[1])):
            assert mark == ("met" if shown < most else "**missed**"), name
        else:  # rounded
            assert mark in ("met", "**missed**"), name
    for name, (goal, count) in GOALS.items():
        found = [row[4].split()[1] for row in table if row[4] and fnmatchcase(row[0], name)]
        assert found == [f"{goal:g}"] * count, name


def attributes_of_both() -> tuple[list[str], list[str]]:
    """What ours alone has on its span, and what the one by hand alone has."""
    import torch

    from benchmarks import requests, rivals

    kept = torch.empty(1 << 20, device="cuda")
    bench = requests.Bench()
    spans = []
    for call in (bench.ours(), rivals.call_by_hand(bench, records=True)):
        call()
        spans.append(set(bench.processor.last.attributes))
    del kept
    ours, by_hand = spans
    return sorted(ours - by_hand), sorted(by_hand - ours)


def test_the_span_by_hand_has_all_that_two_readings_tell(gpu: Any) -> None:
    ours, by_hand = gpu.run(attributes_of_both, env={"PYTHONPATH": str(ROOT)})
    assert ours == ["torch.memory.exclusive", "torch.memory.requests.concurrent"]
    assert by_hand == []


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize(("rival", "count"), [("by_hand", 3), ("exporter", 9), ("torchtel", 3)])
def test_each_rival_runs_beside_ours(rival: str, count: int) -> None:
    for package in ("prometheus_client", "torchtel"):
        pytest.importorskip(package, reason="an extra of its own, `bench`")
    before = (
        "from benchmarks import rivals\n"
        f"rivals.SIDES = {{{rival!r}: None}}\n"
        "rivals.figures_of = lambda *a, of=rivals.figures_of: of('rivals', a[1], '--rounds', '2')"
    )
    done = run("--only", "rivals", "--quick", before=before)
    assert done.returncode == 0, done.stderr
    table = figures(done.stdout)
    assert len(table) == count
    assert all(float(row[2].split()[0]) >= 0 and row[4:6] == ["", ""] for row in table)


@pytest.fixture(scope="module")
def copy(emulation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and the benchmarks, with a baseline of its own."""
    place = tmp_path_factory.mktemp("copy")
    for part in ("src", "benchmarks", "tests/emulator"):
        shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    (place / ".cache").symlink_to(ROOT / ".cache")  # the emulation, built once
    (place / "benchmarks" / "baseline.json").unlink(missing_ok=True)
    done = gate(place, "--write-baseline")
    assert done.returncode == 0, done.stderr
    return place


def gate(place: Path, option: str = "--against", before: str = "") -> subprocess.CompletedProcess[str]:
    return run(option, place=place, before=before, PYTHONPATH=str(place / "src"), PYTHONDONTWRITEBYTECODE="1")


def baseline(place: Path) -> Path:
    return place / "benchmarks" / "baseline.json"


@pytest.fixture
def wasteful(copy: Path) -> Iterator[Any]:
    """Adds code to the end of a file of the copy, for one test."""
    undo: dict[Path, str] = {}

    def waste(file: str, code: str) -> Path:
        path = copy / PACKAGE / file
        undo[path] = path.read_text()
        path.write_text(undo[path] + code)
        return copy

    yield waste
    for path, text in undo.items():
        path.write_text(text)


def test_a_clean_run_passes_beside_a_busy_processor(copy: Path) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 200: pass"])
    try:
        done = gate(copy)
    finally:
        busy.kill()
        busy.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" 0 of {figures_in(copy)} figures are worse" in " " + done.stdout


def figures_in(place: Path) -> int:
    return sum(map(len, json.loads(baseline(place).read_text())[MINOR]["paths"].values()))


WASTE = """
_once = _statistics_call
def _statistics_call(torch, index):
    call = _once(torch, index)
    def wasteful(index):
        {body}
        return call(index)
    return wasteful
"""
TIME_ALONE = (
    "from benchmarks import gate; gate.TOLERANCE |= {what: 1 for what in gate.TOLERANCE if what != 'ratio'}"
)


@pytest.mark.parametrize(
    ("body", "before", "worse"),
    [
        ("call(index)", "", "calls of torch"),
        ("for _ in range(4): pass", "", "instructions of this package"),
        ("sum(range(3000))", TIME_ALONE, "ratio"),
    ],
    ids=["a reading is taken twice", "a reading takes some instructions more", "a C function takes longer"],
)
def test_the_gate_fails_where(wasteful: Any, body: str, before: str, worse: str) -> None:
    done = gate(wasteful("allocator/source.py", WASTE.format(body=body)), before=before)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"WORSE  a call with metrics alone, {worse}: " in done.stdout
    assert f"(tries: {3 if worse == 'ratio' else 1})" in done.stdout


def test_a_python_without_a_baseline_fails_and_is_told_which_there_are(copy: Path) -> None:
    text = baseline(copy).read_text()
    baseline(copy).write_text(text.replace(f'"{MINOR}"', '"3.9"'))
    try:
        done = gate(copy)
    finally:
        baseline(copy).write_text(text)
    assert done.returncode == 1
    assert f"has nothing for Python {MINOR} (it has 3.9): `make bench-baseline` adds it" in done.stdout


def test_under_another_sdk_only_what_is_ours_is_compared(copy: Path) -> None:
    text = baseline(copy).read_text()
    changed = json.loads(text)
    changed[MINOR]["libraries"]["opentelemetry-sdk"] = "1.0"
    for figures in changed[MINOR]["paths"].values():
        figures["instructions in all"] = 1
    figures["instructions of this package"] = 1
    baseline(copy).write_text(json.dumps(changed))
    try:
        done = gate(copy)
    finally:
        baseline(copy).write_text(text)
    assert done.returncode == 1
    told = [line for line in done.stdout.splitlines() if line.startswith("WORSE")]
    assert len(told) == 1
    assert told[0].startswith("WORSE  a request through the guard, instructions of this package: ")
    assert "opentelemetry-sdk is " in done.stdout
