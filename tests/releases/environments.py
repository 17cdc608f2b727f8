# SPDX-License-Identifier: Apache-2.0
"""The environments of the legs, in `.cache/releases/`, made anew where what is pinned has changed.

Standard library only: it makes what everything else needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .legs import NEWEST, TESTING, TORCHS_OWN, Leg

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "releases"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input")


class NotHere(Exception):
    """The leg cannot be run on this machine; the message says what is missing."""


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
        yield from map(str, sorted(Path(root, "versions").glob(f"{version}.*/bin/python"), reverse=True))


def _is(python: str, version: str) -> bool:
    """Asked of itself: the name on PATH may be a shim with nothing behind it."""
    ask = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip() == version
    except OSError:
        return False


def find_python(leg: Leg) -> tuple[str, str]:
    """A Python for the leg and its release: the one meant, else the nearest one that is here.

    Raises:
        NotHere: there is none that this torch was built for.
    """
    meant = leg.pythons.index(leg.python)
    for version in sorted(leg.pythons, key=lambda each: abs(leg.pythons.index(each) - meant)):
        for python in _candidates(version):
            if _is(python, version):
                return python, version
    raise NotHere(f"no Python that {leg.torch} was built for: {', '.join(leg.pythons)}")


def _constraints(leg: Leg) -> str:
    """constraints.txt without what the leg pins itself, and what goes with another torch."""
    own = {_name(pin) for pin in leg.pins if re.search("[=<>]", pin)} | {"setuptools", "torch", "triton"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#") or _name(line) not in own) + "\n"


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def prepare(leg: Leg) -> tuple[Path, str]:
    """The leg's Python with everything installed, and what it is.

    Raises:
        NotHere: no Python on this machine will do.
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    if leg.name == NEWEST:
        python = ROOT / ".venv" / "bin" / "python"
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        return python, subprocess.run(
            [python, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()
    base, version = find_python(leg)
    home = CACHE / leg.name
    home.mkdir(parents=True, exist_ok=True)
    python = home / "bin" / "python"
    constraints = _constraints(leg)
    made_by = (ROOT / "pyproject.toml", ROOT / "tests" / "emulator" / "standins.py", Path(__file__))
    installed = (leg.torch, *leg.pins, *TORCHS_OWN, *TESTING, version, constraints)
    digest = hashlib.sha256(
        "\0".join([*installed, *(file.read_text() for file in made_by)]).encode()
    ).hexdigest()
    ready = home / ".ready"
    with open(CACHE / f"{leg.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != digest:
            shutil.rmtree(home)
            subprocess.run([base, "-m", "venv", str(home)], check=True)
            (home / "constraints.txt").write_text(constraints)
            alone = [pin for pin in leg.pins if pin.startswith("nvidia-")]
            rest = [pin for pin in leg.pins if pin not in alone]
            install = [str(python), *PIP, "install", "--no-compile"]
            _run([*install, "--no-deps", leg.torch, *alone])
            _run([*install, "--constraint", str(home / "constraints.txt"), *rest, *TORCHS_OWN, *TESTING,
                  "--editable", str(ROOT)])  # fmt: skip
            _run([sys.executable, str(ROOT / "tests" / "emulator" / "standins.py"), str(python)])
            ready.write_text(digest)
    return python, version


def _run(command: list[str]) -> None:
    """Without the output of what went well: pip calls torch incomplete, which it is."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
