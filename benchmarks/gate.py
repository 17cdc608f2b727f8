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
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
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
COUNTED, ROUNDS, CALLS = 11, 60, 20

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
    found = measured("counts")
    worse = list(regressions(baseline, found, ratios=False))
    tries = 0
    while not worse and tries < TRIES:  # what is worse by count is so whatever the time says
        tries += 1
        for path, figures in measured("ratios").items():
            ratio = found.setdefault(path, {}).get("ratio", figures["ratio"])
            found[path]["ratio"] = min(ratio, figures["ratio"])
        if not (slower := list(regressions(baseline, found, ratios=True))):
            break
        worse = slower if tries == TRIES else []
    for path, what in worse:
        was, now = baseline[path][what], found.get(path, {}).get(what)
        if now is None:
            print(f"WORSE  {path}, {what}: not measured any more")
        else:
            more = f"{now / was - 1:+.1%}, {TOLERANCE[what]:.0%} is borne" if was else "none is borne"
            print(f"WORSE  {path}, {what}: {now:g}, {was:g} in the baseline ({more})")
    counted = sum(map(len, baseline.values()))
    timed = f"ratios measured {tries} times" if tries else "ratios not measured"
    print(f"{len(worse)} of {counted} figures are worse than the baseline for Python {PYTHON}; {timed}")
    if any(
        now < baseline.get(path, {}).get(what, 0) * (1 - TOLERANCE[what])
        for path, figures in found.items()
        for what, now in figures.items()
        if what != "ratio"
    ):
        print("some counts are better: `make bench-baseline` holds them")
    return 1 if worse else 0


def write() -> None:
    """Make what is measured now the baseline for this Python; the others' stay."""
    committed = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    found = measured("counts")
    tries = [measured("ratios") for _ in range(TRIES)]
    for path in tries[0]:
        found[path]["ratio"] = sorted(each[path]["ratio"] for each in tries)[TRIES // 2]
    committed[PYTHON] = {"libraries": {name: version(name) for name in LIBRARIES}, "paths": found}
    ordered = {minor: committed[minor] for minor in sorted(committed, key=_order)}
    BASELINE.write_text(json.dumps(ordered, indent=2) + "\n")


def regressions(baseline: Figures, found: Figures, *, ratios: bool) -> Iterator[tuple[str, str]]:
    """The path and the figure of each that is worse, or gone; the ratios, or all that is counted."""
    for path, figures in baseline.items():
        for what, was in figures.items():
            if (what == "ratio") == ratios:
                now = found.get(path, {}).get(what)
                if now is None or now > was * (1 + TOLERANCE[what]):
                    yield path, what


def measured(part: str) -> Figures:
    """From a fresh process."""
    return json.loads(harness.output_of("gate", part, emulated=True, PYTHONHASHSEED="0"))


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
    from opentelemetry_instrumentation_torchmem.config import Config
    from opentelemetry_instrumentation_torchmem.telemetry import OwnTelemetry
    from opentelemetry_instrumentation_torchmem.wiring import Wiring

    from . import collection, guard, requests, snapshots

    without_sdk = requests.call(Wiring(OwnTelemetry(), Config()))
    bench = requests.Bench()
    spans = bench.ours(request_metrics=False)
    sampled_out = bench.ours(tracer_provider=bench.dropped, request_metrics=False)
    reader = collection.instrumented(snapshot_share=0)
    latest = torch.cuda.memory_snapshot(include_traces=False)
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


def all_counts() -> Figures:
    figures: Figures = {"the import of this package": imported()}  # first: it is not there yet
    memory = in_use()
    for name, (side, _) in paths().items():
        for _ in range(COUNTED):
            side()
        figures[name] = counted(side)
    del memory
    return figures


def all_ratios() -> Figures:
    figures: Figures = {}
    memory = in_use()
    for name, (side, floor) in paths().items():
        if floor is not None:
            times = harness.interleaved({"ours": side, "floor": floor}, ROUNDS, CALLS)
            figures[name] = {"ratio": round(harness.ratio(name, "", times, "ours", "floor", None).value, 3)}
    del memory
    return figures


def in_use() -> list[Any]:
    import torch

    return harness.fragmented(torch, 1)


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
    counts: Counter[str] = Counter()
    where: dict[Any, str] = {}

    def entered(frame: Any, event: str, given: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        place = where.setdefault(code, OURS if f"/{OURS}/" in code.co_filename else "elsewhere")

        def executed(frame: Any, event: str, given: object) -> Callable[..., Any]:
            if event == "opcode":
                counts[place] += 1
            return executed

        return executed

    sys.settrace(entered)
    try:
        side()
    finally:
        sys.settrace(None)
    return counts


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


PARTS: Mapping[str, Callable[[], Figures]] = {"counts": all_counts, "ratios": all_ratios}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    print(json.dumps(PARTS[parser.parse_args().part]()))


if __name__ == "__main__":
    main()
