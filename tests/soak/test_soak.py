# SPDX-License-Identifier: Apache-2.0
"""A short soak with a fixed seed, and the proof that it can fail: at each leak, at a wrong account."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soak import growth
from soak.reckoning import Reckoning

Line = dict[str, Any]
Spoil = Callable[[Path], object]
SOAK = Path(__file__).with_name("soak.py")
SEED = 7
SECONDS, LEAKING_S = 45, 10


def soak(folder: Path, seconds: float, *options: str) -> tuple[int, dict[str, Any], str]:
    """Its exit status, its verdict and all that it wrote."""
    told = folder / "verdict.json"
    command = [sys.executable, SOAK, "--seconds", seconds, "--seed", SEED, "--keep", folder, "--json", told]
    done = subprocess.run(
        [*map(str, command), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + 230,
    )
    assert told.exists(), done.stdout
    return done.returncode, json.loads(told.read_text()), done.stdout


@pytest.fixture(scope="module")
def soaked(emulation: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run, and its verdict."""
    folder = tmp_path_factory.mktemp("soak")
    code, verdict, said = soak(folder, SECONDS)
    assert code == bool(verdict["failures"]), said
    return folder, verdict


def test_a_server_soaked_in_switches_outages_and_storms_loses_nothing_and_all_accounts_agree(soaked):
    _, verdict = soaked
    assert verdict["failures"] == []
    # what happened was worth it
    assert {outage.split()[0] for outage in verdict["outages"]} == {"refusing", "slow", "garbage", "gone"}
    assert verdict["switches"] >= 10
    assert min(verdict["requests"][outcome] for outcome in ("ok", "oom", "left")) > 10
    assert min(verdict["calls"][how] for how in ("on", "off")) > 50
    assert verdict["spans"]["came"] == verdict["spans"]["of calls"] - verdict["spans"]["given up by the SDK"]
    assert verdict["allocator"]["torch.memory.allocation.retries"] > 10
    assert verdict["out of memory"]["with a verdict"] > 5


@pytest.mark.parametrize("kind", growth.BOUNDS)
def test_a_leak_is_found_in_seconds(emulation: Path, tmp_path: Path, kind: str):
    code, verdict, said = soak(tmp_path, LEAKING_S, "--leak", kind)
    assert code == 1
    assert [failure for failure in verdict["failures"] if failure.startswith(f"{kind} grew")], said


def _first(
    what: str, which: Callable[[Line], object], change: Callable[[Line], object] | None = None
) -> Spoil:
    """Changes the first such line of the server's account, or takes it out."""

    def spoil(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "account.jsonl").read_text().splitlines()]
        line = next(line for line in lines if line["what"] == what and which(line))
        if change is None:
            lines.remove(line)
        else:
            change(line)
        (folder / "account.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return spoil


def _without_spans(folder: Path) -> None:
    max((folder / "collector").glob("*-traces.bin"), key=lambda body: body.stat().st_size).unlink()


def _changed(file: str, change: Callable[[Any], object]) -> Spoil:
    def write(folder: Path) -> None:
        told = json.loads((folder / file).read_text())
        change(told)
        (folder / file).write_text(json.dumps(told))

    return write


WRONG: dict[str, tuple[Spoil, str]] = {
    "an export of spans that is not there": (_without_spans, "spans never came"),
    "a call that was not recorded": (
        _first("recorded", lambda line: line["metric"] == "torch.memory.request.duration"),
        "measured calls were not recorded",
    ),
    "a retry that was not recorded": (
        _first("recorded", lambda line: line["metric"] == "torch.memory.request.retries" and line["value"]),
        "retries of requests are not those on their spans",
    ),
    "a call that was measured while off": (
        _first(
            "began", lambda line: line["span"], lambda line: line.update(before=[2, "off"], within=[2, "off"])
        ),
        "measured while off",
    ),
    "a call of another request": (
        _first("began", lambda line: True, lambda line: line.update(request="1000000")),
        "calls without a request",
    ),
    "a request that was not answered": (
        _changed("clients.json", lambda sent: sent[10].update(outcome="lost: ReadError")),
        "1 requests were lost",
    ),
    "an answer that was another": (
        _changed(
            "clients.json", lambda sent: next(s for s in sent if s["outcome"] == "oom").update(outcome="ok")
        ),
        "calls are not what their clients",
    ),
    "an error that torch did not count": (
        _changed("last.json", lambda last: last["stats"].update(num_ooms=last["stats"]["num_ooms"] + 1)),
        "ran out of memory, and torch counts",
    ),
    "a counter that is not torch's": (
        _changed("last.json", lambda last: last["stats"].update({"allocated_bytes.all.allocated": 1})),
        "the last export tells other figures than the allocator",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_reckoning_sees_what_does_not_agree(soaked, tmp_path: Path, wrong: str):
    folder, _ = soaked
    spoil, words = WRONG[wrong]
    shutil.copytree(folder, tmp_path / "copy")
    spoil(tmp_path / "copy")
    assert any(words in failure for failure in Reckoning.of(tmp_path / "copy").failures)
