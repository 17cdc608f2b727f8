# SPDX-License-Identifier: Apache-2.0
"""A live process's snapshot, asked for at the socket where it waits for that (``live_snapshots``)."""

from __future__ import annotations

import os
import socket
import sys
from time import monotonic

from ..snapshot_server import GIVEN, REFUSED, address, peer
from .snapshot_file import SnapshotError
from .snapshot_pickle import printable

PATIENCE = 40.0
"""Seconds to wait for it, of which the process may use up most before it begins."""
_SWITCH = "OTEL_PYTHON_TORCHMEM_LIVE_SNAPSHOTS=true"


def ask(pid: int, most: int) -> bytes:
    """The pickle that a process of this machine makes of its snapshot now.

    Args:
        pid: as this process sees it: from inside the same container.
        most: bytes; a larger one is refused.

    Raises:
        SnapshotError: it gives none; the message says why.
    """
    if sys.platform != "linux":
        raise SnapshotError("a live process can be asked on Linux alone")
    until = monotonic() + PATIENCE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        try:
            connection.connect(address(pid))
        except ConnectionRefusedError:
            raise SnapshotError(_why_nobody_waits(pid)) from None
        if peer(connection)[0] != pid:
            raise SnapshotError("another process waits at its address")
        said = _all(connection, until, len(GIVEN) + most)
    if said.startswith(GIVEN):
        return said[len(GIVEN) :]
    if said.startswith(REFUSED):
        raise SnapshotError(f"it gives none: {printable(said[len(REFUSED) :].decode(errors='replace'), 500)}")
    raise SnapshotError("what waits there gives no snapshots" if said else "it broke off")


def _why_nobody_waits(pid: int) -> str:
    if not os.path.isdir(f"/proc/{pid}"):
        return "there is no such process here; that of a container is asked from inside it"
    return f"it cannot be asked: it was not started with {_SWITCH}, or has not used CUDA yet"


def _all(connection: socket.socket, until: float, most: int) -> bytes:
    """What the other end says until it closes."""
    said = bytearray()
    while len(said) <= most:
        connection.settimeout(max(0.001, until - monotonic()))
        try:
            more = connection.recv(1 << 20)
        except TimeoutError:
            raise SnapshotError(f"it has not given all of it within {PATIENCE:.0f} s") from None
        except ConnectionResetError:
            raise SnapshotError("it broke off") from None
        if not more:
            return bytes(said)
        said += more
    raise SnapshotError(f"it is larger than {most / (1 << 20):,.0f} MiB (--max-size)")
