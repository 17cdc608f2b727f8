# SPDX-License-Identifier: Apache-2.0
"""What a process that never imports torch pays: at import, and at its start under the launcher."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from statistics import median

from .harness import Figure, environment, of

OURS = "opentelemetry_instrumentation_torchmem"
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
# What the launcher does with each entry point, first for its flags, then in the process that it becomes.
FLAGS = f"""
import sys, time
import opentelemetry.instrumentation.auto_instrumentation
from opentelemetry.util._importlib_metadata import entry_points
found = entry_points(group="opentelemetry_environment_variables")
for entry_point in sorted(found, key=lambda found: {OURS!r} in found.value):
    began = time.thread_time_ns()
    entry_point.load()
    spent = time.thread_time_ns() - began
assert "torch" not in sys.modules
print(spent / 1e6)
"""
INSTRUMENT = f"""
import sys, time
from opentelemetry.instrumentation.auto_instrumentation import _load
from opentelemetry.instrumentation.dependencies import get_dist_dependency_conflicts
from opentelemetry.util._importlib_metadata import entry_points
distro = _load._load_distro()
distro.configure()
_load._load_configurators()
found = entry_points(group="opentelemetry_instrumentor")
for entry_point in sorted(found, key=lambda found: {OURS!r} in found.value):
    began = time.thread_time_ns()
    if get_dist_dependency_conflicts(entry_point.dist) is None:
        distro.load_instrumentor(entry_point, skip_dep_check=True)
    spent = time.thread_time_ns() - began
assert {OURS!r} in sys.modules and "torch" not in sys.modules
print(spent / 1e6)
"""  # ours comes last: the others have paid for what they share
QUIET = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}


def figures(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as bytecode:
        variables = environment(PYTHONPYCACHEPREFIX=bytecode, **QUIET)
        parts: dict[str, list[float]] = {IMPORT: [], FLAGS: [], INSTRUMENT: []}
        for _ in range(6 if quick else 13):
            for part, told in parts.items():
                told.append(milliseconds(part, variables))
    imports, flags, instrument = (told[1:] for told in parts.values())  # the first one compiled
    both = [a + b for a, b in zip(flags, instrument, strict=True)]
    detail = f"{median(flags):.1f} for its flags, {median(instrument):.1f} to instrument; torch not imported"
    return [
        of("import", "what the launcher imports anyway", imports, "ms", 10, "torch not imported"),
        of("our part of a start by `opentelemetry-instrument`", "nothing", both, "ms", 10, detail),
    ]


def milliseconds(part: str, variables: dict[str, str]) -> float:
    """What a process of its own prints."""
    command = [sys.executable, "-c", part]
    return float(subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout)
