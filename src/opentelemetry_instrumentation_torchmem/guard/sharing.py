# SPDX-License-Identifier: Apache-2.0
"""Whether several processes take connections from one listening socket: then readiness steers nothing.

As the kernel tells it: who holds the socket that this process listens on, or listens beside it on the same
port (SO_REUSEPORT). Linux; elsewhere nobody knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"
"""As /proc/net/tcp has it."""


def shares_listener(server: tuple[str, int | None] | None, proc: Path = Path("/proc")) -> bool | None:
    """Whether another worker takes connections for the same address, ``server`` being that of an ASGI scope.

    The parent does not count: a supervisor holds the socket and takes none. None where it cannot be told.
    """
    if server is None:
        return None
    try:
        own = set(_sockets(proc / "self"))
        listening = _unix(proc, server[0]) if server[1] is None else _tcp(proc, server[1])
        mine = own & listening.keys()
        if not mine:
            return None
        addresses = {listening[inode] for inode in mine}
        if any(address in addresses for inode, address in listening.items() if inode not in mine):
            return True  # others listen there themselves
        return any(mine & set(_sockets(proc / sibling)) for sibling in _siblings(proc))
    except (OSError, ValueError):
        return None


def _tcp(proc: Path, port: int) -> dict[str, str]:
    """The sockets that listen on a port: inode -> address."""
    found: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in (proc / "self" / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found[fields[9]] = fields[1]
    return found


def _unix(proc: Path, path: str) -> dict[str, str]:
    """Of a path in the filesystem only one can listen: each has an address of its own."""
    lines = (proc / "self" / "net" / "unix").read_text().splitlines()[1:]
    inodes = [fields[6] for line in lines if len(fields := line.split(None, 7)) == 8 and fields[7] == path]
    return {inode: inode for inode in inodes}


def _sockets(process: Path) -> Iterator[str]:
    """The inodes of the sockets that a process holds; none of one that may not be looked at, or has ended."""
    with suppress(OSError):
        for descriptor in os.listdir(process / "fd"):
            with suppress(OSError):
                target = os.readlink(process / "fd" / descriptor)
                if target.startswith("socket:["):
                    yield target[8:-1]


def _siblings(proc: Path) -> Iterable[str]:
    """The processes with the same parent, this one left out."""
    parent, own = str(os.getppid()), str(os.getpid())
    for name in os.listdir(proc):
        if name.isdigit() and name != own:
            with suppress(OSError, IndexError):
                # after the name in parentheses, which may hold anything: state, parent
                if (proc / name / "stat").read_text().rpartition(")")[2].split()[1] == parent:
                    yield name
