# SPDX-License-Identifier: Apache-2.0
"""Runs the legs: python -m tests.releases [LEG ...] [--prepare] [--signals] [--write]

Each in an environment of its own, made where it is not there: what is in legs.py, on the emulated GPU. A leg
tells which signals it can give; that is compared with docs/releases.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .environments import ROOT, NotHere, prepare
from .legs import LEGS, NEWEST, Leg

sys.path.insert(0, str(ROOT / "tests"))

from emulator import build

TOLD = ROOT / "docs" / "releases.json"
MODES = {
    "native": "",
    "expandable": "expandable_segments:True",
    "two devices": "",
    "cudaMallocAsync": "backend:cudaMallocAsync",
    "no GPU": None,
}
"""By name, the allocator's settings; None where there is no GPU at all."""
FOREIGN = ("OTEL_", "PYTORCH_", "CUDA_", "EMULATED_GPU_", "LD_", "PYTHONPATH", "VIRTUAL_ENV")


class Failed(Exception):
    """Something of a leg did not come out as it must; the message says what."""


def environment(python: Path, mode: str) -> dict[str, str]:
    """Of a process that runs the workload in one of the modes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    settings = MODES[mode]
    if settings is None:
        return env | {"CUDA_VISIBLE_DEVICES": ""}
    env = build.environment(build.build(str(python)), env)
    return env | {
        "EMULATED_GPU_MEMORY": "1GiB",
        "EMULATED_GPU_DEVICES": "2" if mode == "two devices" else "1",
        "PYTORCH_CUDA_ALLOC_CONF": settings,
    }


def signals(python: Path) -> dict[str, Any]:
    """The release of torch, and the signals of each mode."""

    def run(mode: str) -> dict[str, Any]:
        command = [str(python), str(Path(__file__).with_name("workload.py")), mode]
        done = subprocess.run(
            command, env=environment(python, mode), capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            raise Failed(f"the workload failed ({mode}):\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(2) as runs:
        told = dict(zip(MODES, runs.map(run, MODES), strict=True))
    about = {name: told["native"][name] for name in ("torch", "opentelemetry", "wrapt")}
    return about | {mode: given["signals"] for mode, given in told.items()}


def differences(known: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """In words, how what was told differs from what is committed."""
    lines = (
        [f"torch is {told['torch']}, not {known.get('torch')}"] if known.get("torch") != told["torch"] else []
    )
    for mode in MODES:
        before, now = set(known.get(mode, ())), set(told[mode])
        lines += [f"{mode}: {name} is not told any more" for name in sorted(before - now)]
        lines += [f"{mode}: {name} is told, and was not" for name in sorted(now - before)]
    return lines


def tests(leg: Leg, python: Path, pytest: list[str]) -> None:
    """What is run of the tests."""
    if not leg.tests:
        return
    command = [str(python), "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *pytest, *leg.tests]
    command += [f"--deselect={test}" for test in leg.without]
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
        raise Failed("its tests failed")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make releases", description="Runs the legs of tests/releases/legs.py."
    )
    names = [leg.name for leg in LEGS]
    parser.add_argument(
        "legs", nargs="*", metavar="LEG", help=f"{', '.join(names)}: all of them if none is named"
    )
    parser.add_argument("--prepare", action="store_true", help="make the environments, and no more")
    parser.add_argument("--signals", action="store_true", help="compare the signals, and run no tests")
    parser.add_argument("--write", action="store_true", help="write what is told to docs/releases.json")
    parser.add_argument("--pytest", default="", help="further arguments for pytest")
    options = parser.parse_args()
    if unknown := set(options.legs) - set(names):
        parser.error(f"no leg is called {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    known = json.loads(TOLD.read_text()) if TOLD.exists() else {}
    failed = []
    for leg in LEGS:
        if options.legs and leg.name not in options.legs:
            continue
        if leg.name == NEWEST and options.prepare:
            continue
        began = time.monotonic()
        try:
            python, version = prepare(leg)
            meant = "" if version == leg.python else f" ({leg.python} was meant, and is not here)"
            print(f"== {leg.name}: Python {version}{meant}, {leg.about}", flush=True)
            if options.prepare:
                continue
            told = {"python": version, **signals(python)}
            if options.write:
                known = {each.name: known.get(each.name) for each in LEGS if each.name in known} | {
                    leg.name: told
                }
                TOLD.write_text(json.dumps(known, indent=1) + "\n")
            elif lines := differences(known.get(leg.name, {}), told):
                raise Failed("its signals differ from docs/releases.json:\n  " + "\n  ".join(lines))
            if not options.signals:
                tests(leg, python, options.pytest.split())
            print(f"== {leg.name}: well, after {time.monotonic() - began:.0f} s", flush=True)
        except NotHere as error:
            print(f"== {leg.name}: not run: {error}", flush=True)
        except (Failed, build.CannotBuild, subprocess.SubprocessError) as error:
            failed.append(leg.name)
            print(f"== {leg.name}: FAILED: {error}", file=sys.stderr, flush=True)
    if failed:
        print(f"legs that failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
