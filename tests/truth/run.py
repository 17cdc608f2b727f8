# SPDX-License-Identifier: Apache-2.0
"""Judges random states of the real allocator in every mode and prints what came of it.

    python tests/truth/run.py --states 10000 [--mode native] [--first 0] [--jobs 2]

Ends with 1 if a figure was ever wrong. A walk that showed something is repeated by its mode and seed:
``--mode MODE --first SEED --states 4``.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from emulator import build

from truth.states import DEVICES, MEMORY, MIB, MODES, Tally

TESTS = Path(__file__).resolve().parent.parent
STOPS = 4  # judged states of one walk
WALKS = 25  # of one process


def _environment(mode: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment = build.environment(build.build(sys.executable), kept)
    environment |= {
        "EMULATED_GPU_MEMORY": MEMORY,
        "EMULATED_GPU_DEVICES": str(DEVICES),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
    }
    if MODES[mode].conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = MODES[mode].conf
    return environment


def _judge(job: tuple[str, int, int]) -> tuple[str, Tally]:
    mode, first, last = job
    tally = Tally()
    done = subprocess.run(
        [sys.executable, str(TESTS / "truth" / "states.py"), mode, str(first), str(last)],
        env=_environment(mode),
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        tally.add(json.loads(done.stdout))
    except json.JSONDecodeError:
        tally.mismatches.append(f"{mode}, seeds {first} to {last}: it died\n{done.stderr[-2000:]}")
    return mode, tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--states", type=int, default=10_000, help="how many in all, about")
    parser.add_argument(
        "--mode", action="append", choices=list(MODES), help="this mode alone; may be repeated"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    modes = options.mode or list(MODES)
    walks = max(1, round(options.states / len(modes) / STOPS))
    last = options.first + walks
    jobs = [
        (mode, first, min(first + WALKS, last))
        for first in range(options.first, last, WALKS)
        for mode in modes
    ]
    _environment(modes[0])  # builds the emulation, once
    started = time.monotonic()
    tallies = {mode: Tally() for mode in modes}
    with ThreadPoolExecutor(options.jobs) as pool:
        for mode, tally in pool.map(_judge, jobs):
            tallies[mode].add(vars(tally))
            if mode == modes[-1]:
                done = sum(each.states for each in tallies.values())
                print(f"{done} states, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            for mismatch in tally.mismatches:
                print(f"MISMATCH {mismatch}", file=sys.stderr, flush=True)

    whole = Tally()
    wide = max(map(len, modes))
    print(
        f"{'mode':{wide}}  states  exported  wrong  exact  MiB below the truth: mean, most  "
        "not exact or absent"
    )
    for mode, tally in tallies.items():
        whole.add(vars(tally))
        print(_row(f"{mode:{wide}}", tally))
    print(_row(f"{'all':{wide}}", whole))
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if whole.mismatches or not whole.states else 0


def _row(name: str, tally: Tally) -> str:
    below = tally.below
    gap = f"{sum(below) / len(below) / MIB:.1f}, {max(below) / MIB:.1f} of {len(below)}" if below else "-"
    beyond = f", beyond a page {tally.beyond}" if tally.beyond else ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.absent.items()))
    figures = f"{tally.states:6}  {tally.exported:8}  {len(tally.mismatches):5}  {tally.exact:5}"
    return f"{name}  {figures}  {gap}{beyond}  {reasons}"


if __name__ == "__main__":
    sys.exit(main())
