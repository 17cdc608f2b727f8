# SPDX-License-Identifier: Apache-2.0
"""What a process that never imports torch pays: at import, and at its start under the launcher."""

from __future__ import annotations

import os
import site
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

from . import harness
from .harness import Figure, environment

OURS = "opentelemetry_instrumentation_torchmem"
# As `opentelemetry-instrument python -c pass`; the executable is the environment's own.
LAUNCHER = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"
# What the launcher's distribution has imported by the time it comes to the instrumentors.
IMPORT = f"""
import sys, time
from opentelemetry.instrumentation.auto_instrumentation import _load
import opentelemetry.sdk._configuration
began = time.thread_time_ns()
import {OURS}
{OURS}.TorchMemInstrumentor
spent = time.thread_time_ns() - began
assert "torch" not in sys.modules
print(spent / 1e6)
"""
QUIET = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}


def figures(quick: bool) -> list[Figure]:
    rounds = 5 if quick else 15
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        variables = environment(PYTHONPYCACHEPREFIX=str(place / "bytecode"), **QUIET)
        pythons = {known: _environment(place / str(known), known) for known in (True, False)}
        spent: dict[bool, list[float]] = {True: [], False: []}
        imports: list[float] = []
        for turn in range(rounds + 1):
            told = _run([pythons[True], "-c", IMPORT], variables)[1]
            starts = {
                known: _run([pythons[known], "-c", LAUNCHER, pythons[known], "-c", _body(known)], variables)[
                    0
                ]
                for known in ((True, False) if turn % 2 else (False, True))
            }
            if turn:  # the first one compiled
                imports.append(float(told))
                for known, seconds in starts.items():
                    spent[known].append(seconds * 1000)
    ours, floor = (quantiles(spent[known], n=4) for known in (True, False))
    # what else the machine does only adds, and half a second of a process meets much of it
    low, middle, _ = (a - b for a, b in zip(ours, floor, strict=True))
    least = min(spent[True]) - min(spent[False])
    detail = f"lower quartiles: {ours[0]:.0f} against {floor[0]:.0f} ms; torch not imported"
    return [
        harness.of("import", "what the launcher imports anyway", imports, "ms", 10, "torch not imported"),
        Figure(
            "start of `opentelemetry-instrument python -c pass`",
            "the same where this package is not installed",
            low,
            "ms",
            10,
            min(least, middle),
            max(least, middle),
            detail,
        ),
    ]


def _body(known: bool) -> str:
    return f"import sys; assert ('{OURS}' in sys.modules) is {known}; assert 'torch' not in sys.modules"


def _environment(place: Path, known: bool) -> str:
    """A virtual environment with all that this one has, this package from its sources or not at all."""
    venv.create(place, with_pip=False)
    packages = next(place.glob("lib/python*/site-packages"))
    for entry in Path(_site_packages()).iterdir():
        if OURS not in entry.name or (known and entry.suffix == ".dist-info"):
            (packages / entry.name).symlink_to(entry)
    if known:
        (packages / "ours.pth").write_text(f"{harness.ROOT / 'src'}\n")
    return str(place / "bin" / "python")


def _site_packages() -> str:
    return next(path for path in site.getsitepackages() if path in sys.path)


def _run(command: Sequence[str], variables: dict[str, str]) -> tuple[float, str]:
    """The seconds of CPU time that a command took, and what it printed."""
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1), (os.POSIX_SPAWN_CLOSE, read)]
    process = os.posix_spawn(command[0], command, variables, file_actions=actions)
    os.close(write)
    with open(read) as output:
        printed = output.read()
    _, status, usage = os.wait4(process, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, printed
