# SPDX-License-Identifier: Apache-2.0
"""The `torchmem` command: a table of subcommands.

What they need beside the standard library is in the `cli` extra and is imported only when one runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..version import __version__
from . import doctor, snapshot, top


@dataclass(frozen=True, slots=True)
class _Command:
    about: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


_COMMANDS = {
    "doctor": _Command(doctor.ABOUT, doctor.DESCRIPTION, doctor.add_arguments, doctor.run),
    "snapshot": _Command(snapshot.ABOUT, snapshot.DESCRIPTION, snapshot.add_arguments, snapshot.run),
    "top": _Command(top.ABOUT, top.DESCRIPTION, top.add_arguments, top.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for what the user must change; doctor's also 1.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Raises:
        SystemExit: after ``--help`` (0) or a bad option (2), as argparse does.
    """
    parser = argparse.ArgumentParser(prog="torchmem", description="The GPU memory of PyTorch, made visible.")
    parser.add_argument("--version", action="version", version=f"torchmem {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        options = commands.add_parser(
            name,
            help=command.about,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(options)
        options.set_defaults(run=command.run)
    arguments = vars(parser.parse_args(argv))
    run: Callable[[argparse.Namespace], int] = arguments.pop("run")
    try:
        return run(argparse.Namespace(**arguments))
    except ModuleNotFoundError as missing:
        print(
            f"torchmem: error: {missing.name} is not installed: "
            "pip install 'opentelemetry-instrumentation-torchmem[cli]'",
            file=sys.stderr,
        )
        return 2
