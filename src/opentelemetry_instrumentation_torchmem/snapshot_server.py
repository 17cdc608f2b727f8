# SPDX-License-Identifier: Apache-2.0
"""Hands a snapshot to whoever asks this process for one: ``torchmem snapshot --pid``.

Only where the user wants it (``live_snapshots``). A thread waits at a socket of Linux's abstract kind: it is
no file that could be left behind, and it is gone with the process. This process's user and root are answered,
nobody else; what they say is not read.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Final

from .allocator.dump import as_torch_writes_it
from .allocator.survey import NoSnapshotError
from .telemetry import OwnTelemetry

GIVEN: Final = b"torchmem snapshot 1\n"
"""Before a snapshot, a pickle as PyTorch's own tools open it."""
REFUSED: Final = b"torchmem no\n"
"""Before the reason why there is none, in words."""
PEER: Final = struct.Struct("3i")
"""What the kernel knows of the other end: its process, user and group."""

_PATIENCE = 30.0
"""Seconds for which one who asks may take to be given a snapshot."""


def address(pid: int) -> str:
    """Where a process waits for those who ask."""
    return f"\0torchmem-snapshot-{pid}"


def peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    pid, user, _ = PEER.unpack(told)
    return pid, user


class SnapshotServer:
    """Answers from ``start`` to ``close``. Owner: the wiring."""

    def __init__(self, take: Callable[[], Mapping[str, Any]], telemetry: OwnTelemetry) -> None:
        """``take`` gives a snapshot, or raises ``NoSnapshotError``."""
        self._take = take
        self._telemetry = telemetry
        self._listener: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Wait for those who ask, from now on. Never raises: it is called as CUDA is initialised."""
        if self._closed or self._listener is not None:
            return
        try:
            if sys.platform != "linux":
                raise OSError("only Linux has such sockets")
            self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address(os.getpid()))
            listener.listen(1)
            threading.Thread(
                target=self._serve, args=[listener], name="torchmem-snapshots", daemon=True
            ).start()
        except Exception as error:  # no such sockets here, or no more threads
            self.close()
            self._telemetry.say_once(
                "live_snapshots", "torchmem: nobody can ask this process for a snapshot: %r", error
            )

    def close(self) -> None:
        """Answer nobody from now on."""
        self._closed = True
        self._let_go(wake=True)

    def begin_anew(self) -> None:
        """In a forked child: the socket is the parent's, who goes on waiting at it."""
        self._let_go(wake=False)

    def _let_go(self, *, wake: bool) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if wake:
            with suppress(OSError):  # never listened
                listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed meanwhile
                return
            with connection:
                try:
                    self._answer(connection)
                except Exception as error:  # who asked is gone, or the snapshot raised
                    self._telemetry.say_once(
                        f"live_snapshots {type(error).__name__}",
                        "torchmem: one who asked for a snapshot got none: %r",
                        error,
                    )

    def _answer(self, connection: socket.socket) -> None:
        until = monotonic() + _PATIENCE
        connection.settimeout(_PATIENCE)
        _, user = peer(connection)
        if user not in (0, os.geteuid()):
            connection.sendall(REFUSED + b"it is another user's")
            return
        try:
            snapshot = as_torch_writes_it(self._take())
        except NoSnapshotError as error:
            connection.sendall(REFUSED + str(error).encode())
            return
        connection.sendall(GIVEN)
        pickle.dump(snapshot, _Until(connection, until), protocol=4)


class _Until:
    """The other end, for a pickler, as long as there is time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until

    def write(self, data: Any) -> int:
        self._connection.settimeout(max(0.001, self._until - monotonic()))
        self._connection.sendall(data)
        return len(data)
