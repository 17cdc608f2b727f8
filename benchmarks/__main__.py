# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark and prints one table; exits 0 also when a goal is missed, unless told ``--strict``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from . import collection, gate, guard, harness, requests, rivals, snapshots, start
from .harness import Figure

sys.path.insert(0, str(harness.ROOT / "tests"))
from emulator import build

GROUPS = {
    "collection": ("A collection", collection.figures),
    "start": ("A process without torch", start.figures),
    "requests": ("A measured call", requests.figures),
    "snapshots": ("The analysis of a snapshot", snapshots.figures),
    "guard": ("A request through the guard", guard.figures),
    "rivals": ("Beside what one would otherwise pick", rivals.figures),
}
PAGE = harness.ROOT / "docs" / "PERFORMANCE.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=GROUPS, action="append", help="this group alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: wider quartiles")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(harness.ROOT)}")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--against", action="store_true", help="compare with the baseline: 1 if it is worse")
    parser.add_argument("--write-baseline", action="store_true", help="make what is measured the baseline")
    options = parser.parse_args()
    if options.against or options.write_baseline:
        if len(sys.argv) > 2:
            parser.error("--against and --write-baseline stand alone")
        sys.exit(gate.against() if options.against else gate.write())
    if options.write and (options.only or options.quick):
        parser.error("--write takes a whole run")

    began = monotonic()
    figures = {group: GROUPS[group][1](options.quick) for group in options.only or GROUPS}
    missed = [figure for group in figures.values() for figure in group if not figure.met]
    lines = [line for group, told in figures.items() for line in table(GROUPS[group][0], told)]
    print("\n".join([machine(), "", *lines]))
    print(f"{len(missed)} goals missed; {monotonic() - began:.0f} s")
    if options.json:
        described = {
            group: [{**asdict(one), "met": one.met} for one in told] for group, told in figures.items()
        }
        options.json.write_text(json.dumps({"machine": machine(), **described}, indent=2) + "\n")
    if options.write:
        PAGE.write_text(page(figures))
    sys.exit(1 if missed and options.strict else 0)


def table(title: str, figures: Sequence[Figure]) -> list[str]:
    """A Markdown table that is readable as it stands."""
    rows = [("figure", "measured against", "value", "quartiles", "goal", "", "here")]
    for figure in figures:
        goal = "" if figure.goal is None else f"≤ {figure.goal:g} {figure.unit}"
        met = "" if figure.goal is None else "met" if figure.met else "**missed**"
        quartiles = "" if figure.low == figure.high else f"{figure.low:.2f} to {figure.high:.2f}"
        value = f"{figure.value:.2f} {figure.unit}"
        rows.append((figure.name, figure.against, value, quartiles, goal, met, figure.detail))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return [f"## {title}", "", *lines, ""]


def machine() -> str:
    packages = ("torch", "opentelemetry-sdk", "opentelemetry-instrumentation", "wrapt")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{processor()}, {os.cpu_count()} CPUs, {gpu()}; Python {platform.python_version()}, {versions}."


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu() -> str:
    return (
        "a real GPU"
        if build.has_real_gpu()
        else "an **emulated** GPU (torch's real allocator; the driver costs nothing)"
    )


def page(figures: Mapping[str, Sequence[Figure]]) -> str:
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Written by `python -m benchmarks --write`: do not edit. -->",
        "# What it costs",
        "",
        HOW.strip(),
        "",
        machine(),
        "",
        *(line for group, told in figures.items() for line in table(GROUPS[group][0], told)),
    ]
    return "\n".join(lines)


HOW = """
Each figure is a ratio to, or a difference from, a floor: the least that the same outcome could cost,
measured in the same run. Both sides take turns, every second time in reverse order; the time is the
thread's own on the CPU, so that what else the machine does counts as little as it can; the figure is the
median over the rounds, the quartiles are theirs. Absolute times, in the last column, are of this one machine.

- **A collection** is one `collect()` of a reader that has every observable metric of this package. Its
  floor reads the same devices with the cheapest raw calls and collects as many no-op instruments of the
  same kinds. What a no-op instrument is decides the ratio, so there are two: one whose callback returns as
  many points with the same attributes, made before (the goal's), and one whose callback yields nothing,
  which shows what the SDK itself costs for each point that is exported, whoever makes it.
- **A process without torch** never imports it. Our part of a start is what the launcher does with each of
  our entry points, the check of the dependencies included: for the names of the flags, then to instrument
  in the process that it becomes.
- **A measured call** is a wrapped method that does nothing, with a tensor among its arguments; its floor is
  the same method, overridden by one with two raw readings of the allocator around it and, by hand, a span
  with the same attributes and records on three histograms with the same label sets, in the span's context;
  of what is recorded the duration alone is measured. Both have the real SDK and a span processor that does
  nothing.
- **A snapshot** holds the interpreter while torch makes it; its analysis is plain Python beside it, which
  other threads interrupt. A core's share counts, for ten seconds, a thousand requests that do nothing, one
  collection and a snapshot, with all that the SDK does for the spans and the metrics. The longest wait is
  that of a request which comes just when a snapshot begins: 500 requests a second came.
- **A request through the guard** is one that the guard's middleware passes on while the server is ready; its
  floor is a middleware that does nothing but pass it on. The application, which sends a start and a body, is
  the same.
- **What one would otherwise pick** runs in the same process, as its documentation or the usual article has
  it. Nothing is a goal there, for none of them does the same. A collection and its export goes by OTLP over
  HTTP to another process, an update and its scrape is fetched by another one; what is counted is the CPU time
  of all threads of the process that is measured, 50 ms after the cycle before. A request's longest wait is
  that of the requests, one each half millisecond, that come while such a cycle runs on another thread.
  - This package tells of a call its memory before and what changed, new peaks, retries, OOMs, calls of the
    driver, turnover, fragmentation and shapes; whether other calls overlapped, and then only what still means
    something; of streams to their end. Of the process: the ledger, headroom and the statistics by pool, of
    every device in use, with counters that bear the user's resets.
  - `memory_stats` in a span by hand tells the same figures of a call, on the device that was asked for, where
    someone has written them down. It does not tell whether other calls overlapped (its differences are then
    theirs too), follows no stream, and knows nothing between the calls.
  - A Prometheus client's thread tells eight figures of each device, once a second, and the client's own of
    process and interpreter. It knows no call, nor what came and went between two updates, no ledger and no
    headroom; its counters are gauges, which a reset sets back.
  - torchtel 0.0.3 makes a span, without figures, for each `forward` of one model (and for what a training
    loop does), and tells the bytes allocated and reserved on the current device.

`make bench-check` holds the paths against `benchmarks/baseline.json`, on any machine: how many instructions
the interpreter executes for one call in this package's code (at most 2 % more) and in all, how many C
functions are called (2 %), how many of them are torch's (none), what an import brings; and, loosely, the
ratios to the same floors, which fail if they are a fifth worse in each of three tries. `make bench-baseline`
writes it, for the Python that runs it.

What a measured call costs above its floor is some eight hundred instructions of the interpreter: the begin
and the end, each in line in one function, and what both need once. Looked at by leaving one part out after
another, of 6 to 6.5 µs for one with a span 1.5 are the figures and the dictionary of the attributes (some
thirty looks into the dictionaries that torch makes), 0.8 the shapes and types of the arguments, 0.7 the
window that tells overlap, 0.7 what keeps a fault on any line of it from the caller, and 0.4 the name of the
span.

A core's share with a span for each request is above its goal where the SDK alone is: 0.5 % of ten seconds is
50 µs a request, and a span with its attributes and three records takes the SDK 45 to 50, whoever makes them.
What this package adds to that, its readings above the two, its snapshot and its export, is a line of its own.
"""


if __name__ == "__main__":
    main()
