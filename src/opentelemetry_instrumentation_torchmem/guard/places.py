# SPDX-License-Identifier: Apache-2.0
"""Places to drain in, for the workers of one node: a locked file is a place that is taken.

The kernel frees a lock with the last descriptor of its file: also when the holder is killed, as long as no
forked child has a copy of it. The files are never unlinked: two would hold the same place by different files.
One local filesystem; pods share none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from .allowed import SECONDS, Allowed, check, whole_from

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None

SEATS = 1024
"""The most workers that can be told apart; what comes later is not counted among them."""
_WELL, _SICK = b"w", b"s"

_ALLOWED = {
    "folder": Allowed(
        lambda value: bool(value) and isinstance(value, (str, os.PathLike)), "the path of a folder"
    ),
    "at_most": Allowed(whole_from(1), "a whole number from 1 up"),
    "restarts": Allowed(whole_from(0), "a whole number from 0 up"),
    "restarts_per": SECONDS,
}

_live: WeakSet[Places] = WeakSet()


def _forked() -> None:
    for places in tuple(_live):
        places.begin_anew()


if hasattr(os, "register_at_fork"):  # it cannot be taken back, so it stands here, once
    os.register_at_fork(after_in_child=_forked)


class Places:
    """``at_most`` places in a folder that all workers of a node name alike.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> one, two = Places(folder), Places(folder)
        >>> one.take(), two.take()
        (True, False)
        >>> one.release()
        >>> two.take()
        True
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        at_most: int = 1,
        *,
        restarts: int = 1,
        restarts_per: float = 600.0,
    ) -> None:
        """``restarts`` in ``restarts_per`` seconds is what the workers of this folder may want together.

        Raises:
            OSError: the folder cannot be made, or not be written.
            RuntimeError: this system has no such locks.
            ValueError: a number that is not allowed.
        """
        if fcntl is None:
            raise RuntimeError("torchmem: places need flock, which this system does not have")
        check("Places", _ALLOWED, locals())
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._at_most = at_most
        self._restarts, self._restarts_per = restarts, restarts_per
        self._held: int | None = None
        self._seat: int | None = None
        _live.add(self)

    def begin_anew(self) -> None:
        """In a forked child: its copies go, and with them nothing of the parent's locks."""
        for copy in (self._held, self._seat):
            if copy is not None:
                with suppress(OSError):
                    os.close(copy)
        self._held = self._seat = None

    def take(self) -> bool:
        """Take a place, if one is free or held already."""
        if self._held is None:
            self._held = self._first("place", self._at_most)
        return self._held is not None

    def release(self) -> None:
        """Give it back."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def tell(self, sick: bool) -> None:
        """Take a seat among the workers, and say how this one is."""
        if self._seat is None:
            self._seat = self._first("seat", SEATS)
        if self._seat is not None:
            os.pwrite(self._seat, _SICK if sick else _WELL, 0)

    def all_sick(self) -> bool:
        """Whether there are others, and every worker that sits is sick."""
        seated = sick = 0
        for number in range(SEATS):
            try:
                seat = os.open(self._path("seat", number), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                break
            try:
                if self._seat is not None and os.path.sameopenfile(seat, self._seat):
                    free = False
                else:
                    free = _lock(seat, shared=True)
                if not free:
                    seated += 1
                    sick += os.pread(seat, 1, 0) == _SICK
            finally:
                os.close(seat)
        return seated > 1 and sick == seated

    def may_restart(self, clock: Callable[[], float] = time.time) -> bool:
        """Whether one more restart is within what the workers may want together; it is then counted."""
        path = self._path("restarts", 0)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, wait=True)
            now = clock()
            text = os.pread(descriptor, 1 << 16, 0).decode("ascii", "replace")
            recent = [at for at in map(_number, text.split()) if abs(now - at) < self._restarts_per]
            if len(recent) >= self._restarts:
                return False
            lines = "".join(f"{at:.3f}\n" for at in [*recent, now])
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, lines.encode(), 0)
            return True
        finally:
            os.close(descriptor)

    def _path(self, kind: str, number: int) -> str:
        return str(self._folder / f"torchmem-{kind}-{number}")

    def _first(self, kind: str, most: int) -> int | None:
        """The descriptor of the first file of a kind that is free, now locked."""
        for number in range(most):
            descriptor = os.open(self._path(kind, number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _lock(descriptor):
                return descriptor
            os.close(descriptor)
        return None


def _lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    assert fcntl is not None  # noqa: S101 - there is no Places without
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    return True


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("-inf")
