# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing of several sides, and the figures that come of it.

Sides take turns, so that what else the machine does meets them alike; time is the thread's own on the CPU, or
the process's where several threads do the work.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from time import sleep, thread_time_ns
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Side = Callable[[], object]
Times = dict[str, list[float]]
"""Microseconds a call, one for each round, by side."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    name: str
    against: str
    """What it is measured against."""
    value: float
    unit: str
    """``x`` for a ratio."""
    goal: float | None
    """At most; None for a figure that is there to be compared with."""
    low: float
    high: float
    """The quartiles of the rounds."""
    detail: str = ""
    """The two sides in absolute terms, on this machine."""

    @property
    def met(self) -> bool:
        return self.goal is None or self.value <= self.goal


def interleaved(
    sides: Mapping[str, Side],
    rounds: int,
    calls: int = 1,
    clock: Callable[[], int] = thread_time_ns,
    pause: float = 0.0,
) -> Times:
    """Time each side in turn, ``calls`` times in each round; every second round in reverse order.

    ``clock`` tells nanoseconds; ``pause`` is so many seconds before each turn, which are not counted.
    """
    for side in sides.values():
        for _ in range(3 * calls):
            side()
    gc.collect()
    gc.freeze()
    times: Times = {name: [] for name in sides}
    order = list(sides.items())
    for turn in range(rounds):
        for name, side in order if turn % 2 else reversed(order):
            many = range(calls)
            if pause:
                sleep(pause)
            began = clock()
            for _ in many:
                side()
            times[name].append((clock() - began) / calls / 1000)
    gc.unfreeze()
    return times


def ratio(name: str, against: str, times: Times, side: str, floor: str, goal: float | None) -> Figure:
    """How many times the floor a side costs: the median of the rounds' own ratios."""
    pairs = [a / b for a, b in zip(times[side], times[floor], strict=True)]
    return of(name, against, pairs, "x", goal, _microseconds(times, side, floor))


def added(name: str, against: str, times: Times, side: str, floor: str, goal: float | None) -> Figure:
    """How many microseconds more than the floor a side costs."""
    pairs = [a - b for a, b in zip(times[side], times[floor], strict=True)]
    return of(name, against, pairs, "µs", goal, _microseconds(times, side, floor))


def of(
    name: str, against: str, values: Sequence[float], unit: str, goal: float | None, detail: str
) -> Figure:
    """A figure of values that are there already, one for each round."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return Figure(name, against, median(values), unit, goal, low, high, detail)


def _microseconds(times: Times, side: str, floor: str) -> str:
    return f"{median(times[side]):.1f} against {median(times[floor]):.1f} µs"


def child(module: str, *arguments: str, devices: int = 1, emulated: bool = False) -> list[str]:
    """The command of a process of one's own on the GPU, the emulated one where there is none."""
    run = [str(ROOT / "tests" / "emulator" / "run"), "--memory", "4GiB"]
    run += [] if emulated else ["--real-if-present"]
    return [*run, "--devices", str(devices), "--", sys.executable, "-m", f"benchmarks.{module}", *arguments]


def environment(**extra: str) -> dict[str, str]:
    """A child's environment, without what a developer's shell may hold."""
    foreign = ("EMULATED_GPU_", "OTEL_", "PYTORCH_", "CUDA_VISIBLE_DEVICES", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONWARNINGS": "ignore", **extra}


def figures_of(module: str, *arguments: str, devices: int = 1) -> list[Figure]:
    """The figures that a module prints when it runs in a process of its own on the GPU."""
    return [Figure(**figure) for figure in json.loads(output_of(module, *arguments, devices=devices))]


def output_of(
    module: str, *arguments: str, devices: int = 1, emulated: bool = False, **variables: str
) -> str:
    """The last line that it prints."""
    done = subprocess.run(
        child(module, *arguments, devices=devices, emulated=emulated),
        check=False,
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"benchmarks.{module} failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def print_figures(figures: Sequence[Figure]) -> None:
    """What ``figures_of`` reads."""
    print(json.dumps([asdict(figure) for figure in figures]))


def fragmented(torch: Any, devices: int) -> list[Any]:
    """Memory in use on each device, in both pools, with holes: keep what comes back."""
    blocks = [
        torch.empty(size, dtype=torch.uint8, device=device)
        for device in range(devices)
        for size in chain([3 << 20] * 20, [1000] * 100)
    ]
    return blocks[::2]
