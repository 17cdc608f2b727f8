# SPDX-License-Identifier: Apache-2.0
"""The servers behind the package, as binaries: built with Go once, then kept in .cache/parts/.

    python -m tests.pipeline.parts              builds what is missing of all, and prints where they are
    python -m tests.pipeline.parts promtool     of one

`TORCHMEM_OTELCOL=/usr/bin/otelcol-contrib` (`TORCHMEM_PROMETHEUS`, ...) names a binary of your own instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "parts"
MANIFEST = ROOT / "collector-config" / "builder.yaml"
BUILDER = "go.opentelemetry.io/collector/cmd/builder@v0.165.0"
OLDEST_GO = (1, 25)
BUILD_LIMIT_S = 2400


class CannotBuild(Exception):
    """Why a part is not there, in one line that says how to mend it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A program of a Go module, at one release."""

    package: str
    version: str


COMMANDS = {
    "promtool": Command("github.com/prometheus/prometheus/cmd/promtool", "v0.316.0"),
    "prometheus": Command("github.com/prometheus/prometheus/cmd/prometheus", "v0.316.0"),
    # The last release whose module carries the files of its web interface.
    "alertmanager": Command("github.com/prometheus/alertmanager/cmd/alertmanager", "v0.31.1"),
    "jaeger": Command("github.com/jaegertracing/jaeger/cmd/jaeger", "v1.76.0"),
}
PARTS = ("otelcol", *COMMANDS)


def part(name: str) -> Path:
    """The binary of `otelcol`, `prometheus`, `promtool`, `alertmanager` or `jaeger`; built if need be.

    Raises CannotBuild with one line.
    """
    if name not in PARTS:
        raise CannotBuild(f"there is no part {name!r}: it is one of {', '.join(PARTS)}")
    variable = f"TORCHMEM_{name.upper()}"
    if own := os.environ.get(variable):
        return _named_by_the_user(name, variable, own)
    binary = CACHE / f"{name}-{version(name)}" / name
    if not binary.exists():
        with _alone(name):
            if not binary.exists():  # another process may have built it meanwhile
                _build(name, binary)
    return binary


def version(name: str) -> str:
    """The release, as the folder in the cache says it; the collector's also tells its manifest."""
    if name == "otelcol":
        return f"{collector_release()}-{hashlib.sha256(MANIFEST.read_bytes()).hexdigest()[:10]}"
    return COMMANDS[name].version


def collector_release() -> str:
    """The collector's release in the builder's manifest: what the configurations are written for."""
    found = re.search(r"^  version: *([\d.]+)$", MANIFEST.read_text(), re.MULTILINE)
    if found is None:
        raise CannotBuild(f"{MANIFEST.relative_to(ROOT)} has no line `  version: 0.165.0` under dist")
    return found[1]


def _named_by_the_user(name: str, variable: str, own: str) -> Path:
    found = shutil.which(own)
    if found is None:
        raise CannotBuild(
            f"{variable}={own} is not a program: give the path of {name}, or unset it to build one"
        )
    return Path(found)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(name: str, binary: Path) -> None:
    go = _go(name)
    print(f"building {name} {version(name)} with {go}: minutes, once ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=CACHE) as scratch:
        place = Path(scratch)
        with open(place / "log", "w") as log:
            built = (_build_collector if name == "otelcol" else _build_command)(name, place, log.fileno())
        if built is None:
            kept = CACHE / f"{name}.log"
            shutil.copy(place / "log", kept)
            lines = [line.strip() for line in kept.read_text(errors="replace").splitlines() if line.strip()]
            raise CannotBuild(
                f"{name} {version(name)} cannot be built: {lines[-1] if lines else 'it took too long'} "
                f"(all of it: {kept})"
            )
        binary.parent.mkdir(exist_ok=True)
        os.replace(built, binary)


def _go(name: str) -> str:
    go = shutil.which("go")
    wanted = ".".join(map(str, OLDEST_GO))
    if go is None:
        raise CannotBuild(
            f"{name} is built with Go, and there is no `go` on PATH: install Go {wanted} or later, "
            f"or name a binary by TORCHMEM_{name.upper()}"
        )
    told = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout.strip()
    found = re.search(r"go(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_GO:
        raise CannotBuild(
            f"{name} is built with Go {wanted} or later, and {go} is {told or 'silent about its version'}: "
            f"install a later one, or name a binary by TORCHMEM_{name.upper()}"
        )
    return go


def _build_command(name: str, place: Path, log: int) -> Path | None:
    command = COMMANDS[name]
    steps = (
        ["go", "mod", "init", "parts"],
        ["go", "get", "-tool", f"{command.package}@{command.version}"],
        ["go", "build", "-ldflags=-s -w", "-o", name, command.package],
    )
    return place / name if all(_go_step(step, place, log) for step in steps) else None


def _build_collector(name: str, place: Path, log: int) -> Path | None:
    done = _go_step(["go", "run", BUILDER, "--config", str(MANIFEST)], place, log)
    return place / name / name if done else None


def _go_step(argv: list[str], place: Path, log: int) -> bool:
    environment = {
        **os.environ,
        "GOFLAGS": f"{os.environ.get('GOFLAGS', '')} -mod=mod".strip(),
        "GOWORK": "off",
    }
    try:
        done = subprocess.run(
            argv, cwd=place, stdout=log, stderr=log, env=environment, check=False, timeout=BUILD_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    try:
        for name in sys.argv[1:] or PARTS:
            print(f"{name} {version(name) if name in PARTS else ''}: {part(name)}", flush=True)
    except CannotBuild as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
