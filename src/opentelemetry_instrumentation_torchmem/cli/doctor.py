# SPDX-License-Identifier: Apache-2.0
"""`torchmem doctor`: is the installation sound, and what should be changed about the allocator's use.

Needs none of the `cli` extra's packages, no torch and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..advice.evidence import Evidence
from ..advice.live import NothingToSeeError, evidences
from ..advice.overhead import DriverTimes, measure
from ..advice.rules import Advice, advise, size
from ..signals import METRICS, REQUEST_METRICS
from . import doctor_checks
from .doctor_checks import NOTE, PROBLEM, Check
from .doctor_signals import absences
from .snapshot_file import SnapshotError, read
from .snapshot_pickle import printable

ABOUT = "whether the installation is sound, and what to change about the allocator's use"
DESCRIPTION = """\
Without --snapshot it looks at the installation: versions and conflicts, entry points, options, whether the
exporters' endpoints answer, which signals this machine can give and why the others are absent. It imports no
torch, initialises no CUDA and sends nothing.

With --snapshot FILE it says what to change about the allocator and its use, the most effective first, with
the figure that says so. FILE is what the process wrote about itself,

    from opentelemetry_instrumentation_torchmem.advice import dump
    dump("app.pickle", seconds=10)

or any snapshot of torch.cuda.memory._dump_snapshot and of oom_dump_dir, which tell less. It need not be
trusted.

Exit codes: 0 nothing to change; 1 something is to be changed; 2 nothing could be looked at.
"""

_MIB = 1 << 20
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": _MIB, "GIB": 1 << 30, "TIB": 1 << 40}
_MARKS = {"ok": "ok", "note": "--", "problem": "!!"}


class _NotPrintedError(RuntimeError):
    """Standard output takes nothing; the message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options; each field is the option of its name."""

    snapshot: Path | None
    need: int | None
    measure: bool
    json: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add = parser.add_argument
    add("--snapshot", type=Path, metavar="FILE", help="look at what a process wrote about itself")
    add(
        "--need",
        type=_bytes,
        metavar="SIZE",
        help="the largest request that must succeed, as 600MiB: less headroom counts as trouble",
    )
    add(
        "--measure",
        action="store_true",
        help="measure what the driver's calls take on this machine's first GPU: initialises CUDA and takes "
        "32 MiB of it, ten times",
    )
    add("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command to its end. Returns its exit code: 0, 1 for what is to be changed, or 2."""
    options = Options(**vars(arguments))
    try:
        if options.snapshot is None and options.need is not None:
            raise NothingToSeeError("--need is about a snapshot: give --snapshot FILE too")
        if options.snapshot is None:
            return _installation(options, _measured() if options.measure else None)
        times = _measured() if options.measure else None
        found = [(each, advise(each)) for each in _evidences(options.snapshot, options.need, times)]
        if options.json:
            _print_json({"devices": [_device_json(*each) for each in found]})
        else:
            _print(line for each in found for line in _device_lines(*each))
    except _NotPrintedError as error:
        print(f"torchmem doctor: error: {error}", file=sys.stderr)
        return 2
    except (SnapshotError, NothingToSeeError) as error:
        where = "" if options.snapshot is None else f"{printable(str(options.snapshot), 500)}: "
        print(f"torchmem doctor: error: {where}{error}", file=sys.stderr)
        if options.json:
            with suppress(_NotPrintedError):
                _print_json({"error": f"{where}{error}"})
        return 2
    return int(any(advice for _, advice in found))


def _evidences(file: Path, need: int | None, times: DriverTimes | None) -> Sequence[Evidence]:
    snapshot = read(file)
    whole: dict[str, object] = {**snapshot.beside, "segments": snapshot.raw}
    if snapshot.settings:
        whole["allocator_settings"] = snapshot.settings
    found = evidences(whole, need=need, times=times)
    if not found:
        raise NothingToSeeError("nothing was reserved when it was taken")
    return found


def _measured() -> DriverTimes:
    try:
        import torch
    except ModuleNotFoundError:
        raise NothingToSeeError("--measure needs torch, which is not installed") from None
    try:
        return measure(torch, 0)
    except (RuntimeError, AssertionError) as error:
        raise NothingToSeeError(f"--measure: {str(error).splitlines()[0]}") from None


# ---- the installation ----


def _installation(options: Options, times: DriverTimes | None) -> int:
    found = doctor_checks.checks(os.environ)
    sound = all(check.level != PROBLEM for check in found)
    if options.json:
        absent = absences(doctor_checks.machine(os.environ))
        given = [row.name for row in (*METRICS, *REQUEST_METRICS) if row.name not in absent]
        _print_json(
            {
                "sound": sound,
                "checks": [asdict(check) for check in found],
                "signals": {"given": given, "absent": absent},
                "driver_times": None if times is None else asdict(times),
            }
        )
    else:
        _print(_check_lines(found, times, sound))
    return int(not sound)


def _check_lines(found: Sequence[Check], times: DriverTimes | None, sound: bool) -> Iterator[str]:
    for check in found:
        yield f"{_MARKS[check.level]}  {check.name + ':':<13} {printable(check.text, 400)}"
    if times is not None:
        yield f"--  {'driver:':<13} {_times_text(times)}"
    yield ""
    problems = sum(check.level == PROBLEM for check in found)
    if not sound:
        yield f"{problems} to be put right (!!)."
    elif any(check.name == "device" and check.level == NOTE for check in found):
        yield "Sound, but no GPU is seen here: nothing of a GPU will be told."
    else:
        yield "The installation is sound."


def _times_text(times: DriverTimes) -> str:
    told = {"allocation": times.allocation, "free": times.free, "sync": times.sync}
    parts = [f"{name} {seconds * 1e6:,.0f} µs" for name, seconds in told.items() if seconds is not None]
    return f"{', '.join(parts)} (medians of {times.origin})"


# ---- a process ----


def _device_lines(evidence: Evidence, advice: Sequence[Advice]) -> Iterator[str]:
    held = f"{size(evidence.map.reserved)} reserved, {size(evidence.map.allocated)} allocated"
    total = "" if evidence.total is None else f" of {size(evidence.total)}"
    headroom = "" if evidence.headroom is None else f", headroom {size(evidence.headroom)}"
    yield f"cuda:{evidence.device}: {held}{total}{headroom}"
    overhead, times = evidence.overhead, evidence.times
    if overhead is not None and times is not None:
        yield (
            f"  Trips to the driver take an estimated {overhead.share:.2%} of the time: "
            f"{overhead.calls_per_second:.3g} calls a second, by {times.origin}."
        )
    if not advice:
        yield "  Nothing to change."
    for number, each in enumerate(advice, 1):
        yield f"  {number}. {printable(each.change, 2000)}  [{each.code}]"
        yield f"     {printable(each.why, 2000)}"


def _device_json(evidence: Evidence, advice: Sequence[Advice]) -> Mapping[str, object]:
    overhead = evidence.overhead
    return {
        "device": f"cuda:{evidence.device}",
        "figures": {
            "total": evidence.total,
            "reserved": evidence.map.reserved,
            "allocated": evidence.map.allocated,
            "trapped": evidence.trapped,
            "headroom": evidence.headroom,
            "external": evidence.external,
        },
        "activity": None if evidence.activity is None else asdict(evidence.activity),
        "overhead_estimate": None if overhead is None else asdict(overhead),
        "advice": [
            {
                "code": each.code,
                "change": each.change,
                "why": each.why,
                "weight": round(each.weight, 4),
                "figures": each.figures,
            }
            for each in advice
        ],
    }


def _print_json(told: Mapping[str, object]) -> None:
    _print([json.dumps(told, indent=2)])


def _print(lines: Iterator[str] | Sequence[str]) -> None:
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except OSError as error:
        # Python would complain once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # that one: whoever read has ended, as `head` does
            raise _NotPrintedError(f"standard output cannot be written: {error.strerror}") from None


def _bytes(text: str) -> int:
    number = text.rstrip("BbIiKkMmGgTt ")
    unit = text[len(number) :].strip().upper()
    unit = unit if unit in _UNITS else f"{unit}IB"
    try:
        value = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(
            f"{text}: must be a size in KiB, MiB, GiB or TiB, as 600MiB or 1.5GiB"
        )
    return value
