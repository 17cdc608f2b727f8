# SPDX-License-Identifier: Apache-2.0
"""Holds what the paths cost now against ``baseline.json``: counts, and ratios to a floor in the same run.

Counts are the same on any machine: instructions of the interpreter, calls of C functions, calls of torch.
What they cannot see (a C function that takes longer) the ratios do, loosely, and only if each of several
tries says so. Always on the emulated GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from threading import get_ident
from typing import Any

from . import harness
from .harness import Side

BASELINE = harness.ROOT / "benchmarks" / "baseline.json"
PYTHON = ".".join(platform.python_version_tuple()[:2])
"""Each has instructions of its own, and so a baseline of its own."""
OURS = "opentelemetry_instrumentation_torchmem"
LIBRARIES = ("opentelemetry-api", "opentelemetry-sdk", "wrapt")
TOLERANCE = {
    "instructions of this package": 0.02,
    "instructions in all": 0.02,
    "calls of C functions": 0.02,
    "calls of torch": 0.0,
    "modules": 0.0,
    "ratio": 0.2,
}
"""How much more than the baseline's is borne, as a share of it."""
OF_LIBRARIES = frozenset({"instructions in all", "calls of C functions", "modules"})
"""Compared only where the libraries are the baseline's."""
TRIES = 3
COUNTED, ROUNDS, CALLS = 7, 40, 20

Figures = dict[str, dict[str, float]]
"""By path, by what is counted."""


def against() -> int:
    """Compare with the baseline and print how it went: the exit status."""
    committed = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    known = committed.get(PYTHON)
    if known is None:
        there = ", ".join(sorted(committed, key=_order)) or "none"
        where = BASELINE.relative_to(harness.ROOT)
        print(f"{where} has nothing for Python {PYTHON} (it has {there}): `make bench-baseline` adds it")
        return 1
    changed = {name: (was, version(name)) for name, was in known["libraries"].items() if was != version(name)}
    for name, (was, now) in changed.items():
        print(f"{name} is {now} here and {was} in the baseline: what it does itself is not compared")
    baseline: Figures = known["paths"]
    if changed:
        baseline = {
            path: {what: was for what, was in counts.items() if what not in OF_LIBRARIES}
            for path, counts in baseline.items()
        }
    found = measured()
    worse = list(regressions(baseline, found))
    tries = 1
    while worse and tries < TRIES and all(what == "ratio" for _, what in worse):
        tries += 1
        for path, figures in measured("--ratios").items():
            found[path]["ratio"] = min(found[path]["ratio"], figures["ratio"])
        worse = list(regressions(baseline, found))
    for path, what in worse:
        was, now = baseline[path][what], found.get(path, {}).get(what)
        if now is None:
            print(f"WORSE  {path}, {what}: not measured any more")
        else:
            more = f"{now / was - 1:+.1%}, {TOLERANCE[what]:.0%} is borne" if was else "none is borne"
            print(f"WORSE  {path}, {what}: {now:g}, {was:g} in the baseline ({more})")
    counted = sum(map(len, baseline.values()))
    print(
        f"{len(worse)} of {counted} figures are worse than the baseline for Python {PYTHON} (tries: {tries})"
    )
    if any(
        now < baseline.get(path, {}).get(what, float("inf")) * (1 - TOLERANCE[what])
        for path, figures in found.items()
        for what, now in figures.items()
        if what != "ratio" and not (changed and what in OF_LIBRARIES)
    ):
        print("some counts are better or new: `make bench-baseline` holds them")
    return 1 if worse else 0


def write() -> None:
    """Make what is measured now the baseline for this Python; the others' stay."""
    committed = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    found = measured()
    tries = [found, *(measured("--ratios") for _ in range(TRIES - 1))]
    for path in tries[1]:
        found[path]["ratio"] = sorted(each[path]["ratio"] for each in tries)[TRIES // 2]
    committed[PYTHON] = {"libraries": {name: version(name) for name in LIBRARIES}, "paths": found}
    ordered = {minor: committed[minor] for minor in sorted(committed, key=_order)}
    BASELINE.write_text(json.dumps(ordered, indent=2) + "\n")


def regressions(baseline: Figures, found: Figures) -> Iterator[tuple[str, str]]:
    """The path and the figure of each that is worse, or gone."""
    for path, figures in baseline.items():
        for what, was in figures.items():
            now = found.get(path, {}).get(what)
            if now is None or now > was * (1 + TOLERANCE[what]):
                yield path, what


def measured(*arguments: str) -> Figures:
    """From a fresh process."""
    return json.loads(harness.output_of("gate", *arguments, emulated=True, PYTHONHASHSEED="0"))


def _order(minor: str) -> list[int]:
    return [int(part) for part in minor.split(".")]


def paths() -> dict[str, tuple[Side, Side | None]]:
    """What is looked at, by the name that the baseline has for it; with its floor where it has one.
    Memory is in use on the device meanwhile."""
    import torch

    from opentelemetry_instrumentation_torchmem import MemoryGuard, MemoryGuardMiddleware
    from opentelemetry_instrumentation_torchmem.allocator.reading import DriverMemory
    from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
    from opentelemetry_instrumentation_torchmem.allocator.snapshot import Limits, analyse
    from opentelemetry_instrumentation_torchmem.allocator.source import Source
    from opentelemetry_instrumentation_torchmem.config import Config
    from opentelemetry_instrumentation_torchmem.telemetry import OwnTelemetry
    from opentelemetry_instrumentation_torchmem.wiring import Wiring

    from . import collection, guard, requests, snapshots

    without_sdk = requests.call(Wiring(OwnTelemetry(), Config()))
    bench = requests.Bench()
    spans = bench.ours(request_metrics=False)
    sampled_out = bench.ours(tracer_provider=bench.dropped, request_metrics=False)
    reader = collection.instrumented(snapshot_share=0)
    latest = Source(torch).snapshot()["segments"]
    settings = AllocatorSettings.parse(snapshots.MODES["native"], "runtime")
    limits = {0: Limits(DriverMemory(*torch.cuda.mem_get_info(0)), fraction=1.0)}
    watch = MemoryGuard()
    guarded = guard.side(MemoryGuardMiddleware(guard.hello, watch))
    watch.stop()
    return {
        "a call without an SDK": (without_sdk, None),
        "a recorded call with its metrics": (bench.ours(), bench.floor(span=True, records=True)),
        "a recorded call without metrics": (spans, bench.floor(span=True, records=False)),
        "a call with metrics alone": (bench.ours("off"), bench.floor(span=False, records=True)),
        "a sampled-out call, no metrics": (sampled_out, bench.bare_span()),
        "a stream of ten items": (stream(bench.wiring()), None),
        "a collection": (reader.collect, collection.floor(reader, 1, ready=True)),
        "the analysis of a snapshot": (lambda: analyse(latest, settings, limits), None),
        "a request through the guard": (guarded, None),
    }


def stream(wiring: Any) -> Side:
    from opentelemetry_instrumentation_torchmem.requests.probe import Target
    from opentelemetry_instrumentation_torchmem.requests.wrapping import wrap

    def ten(self: object) -> Iterator[int]:
        yield from range(10)

    measured = wrap(ten, Target("app.Model.stream", "stream"), wiring._requests)
    model = object()
    return lambda: list(measured(model))


def figures(ratios_alone: bool) -> Figures:
    """What this process measures."""
    found: Figures = (
        {} if ratios_alone else {"the import of this package": imported()}
    )  # while it is none yet
    import torch

    memory = harness.fragmented(torch, 1)
    sides = paths()
    for name, (side, floor) in sides.items():
        if floor is not None:
            times = harness.interleaved({"ours": side, "floor": floor}, ROUNDS, CALLS)
            ratio = harness.ratio(name, "", times, "ours", "floor", None).value
            found[name] = {"ratio": round(ratio, 3)}
    if not ratios_alone:
        for name, (side, _) in sides.items():
            for _ in range(COUNTED):
                side()
            found[name] = counted(side) | found.get(name, {})
    del memory
    return found


def imported() -> dict[str, float]:
    """What an import brings that the launcher has not imported already."""
    import_module("opentelemetry.sdk._configuration")
    import_module("opentelemetry.instrumentation.auto_instrumentation._load")

    def load() -> None:
        import opentelemetry_instrumentation_torchmem

        assert opentelemetry_instrumentation_torchmem.TorchMemInstrumentor

    there = set(sys.modules)
    instructions = instructions_of(load)[OURS]
    assert "torch" not in sys.modules
    return {"instructions of this package": instructions, "modules": len(sys.modules.keys() - there)}


def counted(side: Side) -> dict[str, float]:
    """The most frequent counts of a call: what comes once in many (a buffer that grows) is left out."""
    gc.collect()
    gc.disable()
    counts: Counter[tuple[tuple[str, float], ...]] = Counter()
    for _ in range(COUNTED):
        instructions, (calls, of_torch) = instructions_of(side), calls_of(side)
        told = {
            "instructions of this package": instructions[OURS],
            "instructions in all": instructions.total(),
            "calls of C functions": calls,
            "calls of torch": of_torch,
        }
        counts[tuple(told.items())] += 1
    gc.enable()
    return dict(counts.most_common(1)[0][0])


def instructions_of(side: Side) -> Counter[str]:
    """The instructions that the interpreter executes on this thread, in this package's code and elsewhere."""
    counts: Counter[Any] = Counter()
    (monitored if hasattr(sys, "monitoring") else traced)(side, counts)
    told: Counter[str] = Counter()
    for code, executed in counts.items():
        told[OURS if f"/{OURS}/" in code.co_filename else "elsewhere"] += executed
    return told


def traced(side: Side, counts: Counter[Any]) -> None:
    """Count by code object; before Python 3.12."""

    def entered(frame: Any, event: str, given: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code

        def executed(frame: Any, event: str, given: object) -> Callable[..., Any]:
            if event == "opcode":
                counts[code] += 1
            return executed

        return executed

    sys.settrace(entered)
    try:
        side()
    finally:
        sys.settrace(None)


def monitored(side: Side, counts: Counter[Any]) -> None:
    """The same from Python 3.12 on, where tracing leaves out code that has run before."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool, event, thread = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION, get_ident()

    def executed(code: Any, offset: int) -> None:
        if get_ident() == thread:
            counts[code] += 1

    monitoring.use_tool_id(tool, "benchmarks")
    monitoring.register_callback(tool, event, executed)
    monitoring.set_events(tool, event)
    try:
        side()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


def calls_of(side: Side) -> tuple[int, int]:
    """How many C functions are called on this thread, and how many of them are torch's."""
    calls = of_torch = 0

    def called(frame: Any, event: str, given: Any) -> None:
        nonlocal calls, of_torch
        if event == "c_call":
            calls += 1
            of_torch += (getattr(given, "__module__", None) or "").startswith("torch")

    sys.setprofile(called)
    try:
        side()
    finally:
        sys.setprofile(None)
    return calls - 1, of_torch  # one is the end of it


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratios", action="store_true", help="these alone")
    print(json.dumps(figures(parser.parse_args().ratios)))
