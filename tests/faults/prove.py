# SPDX-License-Identifier: Apache-2.0
"""Takes each fault's protection out of a copy of the package and wants the fault's test to fail.

    python tests/faults/prove.py [word ...]           those alone whose name holds a word
    python tests/faults/prove.py --some 4 --seed 17   as many, by chance

A process that the test starts must have imported the copy; else nothing is proved, and that is told.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.faults import FAULTS, PACKAGE, ROOT, Fault

NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*")


def copied(fault: Fault, place: Path) -> Path:
    """A copy of package and tests without the fault's protection; the file that its users sign."""
    for part in ("src", "tests"):
        shutil.copytree(ROOT / part, place / part, ignore=NOT_COPIED)
    shutil.copy(ROOT / "pyproject.toml", place)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (place / ".cache").symlink_to(ROOT / ".cache")  # the emulation, built once
    for removal in fault.without:
        file = place / PACKAGE / removal.file
        text = file.read_text()
        if text.count(removal.text) != 1:
            raise SystemExit(f"{fault.name}: {removal.file} does not hold this once:\n{removal.text}")
        file.write_text(text.replace(removal.text, removal.put))
    witness = place / "imported"
    witness.touch()
    package = place / PACKAGE / "package.py"
    package.write_text(
        package.read_text()
        + f"\nimport os as _os\nwith open({str(witness)!r}, 'a') as _file:\n"
        + "    print(_os.getpid(), file=_file)\n"
    )
    return witness


def without(fault: Fault) -> str:
    """How the test fares."""
    with tempfile.TemporaryDirectory(prefix="without-") as scratch:
        place = Path(scratch)
        witness = copied(fault, place)
        environment = {**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("CI", None)
        test = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{fault.test}"],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = test.communicate()
        children = set(witness.read_text().split()) - {str(test.pid)}
    if not children:
        return "NOT PROVED: no process imported the copy\n" + said[-2000:]
    if test.returncode == 0:
        return "NOT PROVED: the test passes without it"
    if test.returncode != 1:
        return f"NOT PROVED: pytest ended with {test.returncode}\n" + said[-2000:]
    why = [line[1:].strip() for line in said.splitlines() if line.startswith("E ")]
    return f"fails: {next((line for line in why if line), said[-300:])}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", metavar="word")
    parser.add_argument("--some", type=int, metavar="N", help="so many of them, by chance")
    parser.add_argument("--seed", default="", help="the same seed, the same ones")
    options = parser.parse_args()
    words = [word.lower() for word in options.words]
    wanted = [fault for fault in FAULTS if not words or any(word in fault.name.lower() for word in words)]
    if not wanted:
        parser.error(f"no fault's name holds any of {', '.join(words)}")
    if options.some is not None:
        wanted = random.Random(options.seed).sample(wanted, min(options.some, len(wanted)))
        print(f"{len(wanted)} by the seed {options.seed!r}", flush=True)
    unproved = 0
    for fault in wanted:
        began = time.monotonic()
        outcome = without(fault)
        unproved += not outcome.startswith("fails")
        print(f"{fault.name} ({time.monotonic() - began:.0f} s)\n    {outcome}", flush=True)
    print(f"{len(wanted) - unproved} of {len(wanted)} protections are seen to protect")
    return bool(unproved)


if __name__ == "__main__":
    sys.exit(main())
