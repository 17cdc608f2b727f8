# SPDX-License-Identifier: Apache-2.0
"""A directory of snapshots in PyTorch's own pickle format, bounded in number and size.

A file is there whole or not at all, readable by its owner alone, under a name that nobody can guess. What
was in the directory before is never touched.

A volume is often mounted under a symbolic link. Links in the directory's path are followed once, when it is
first there, and only those that nobody but root and this process's user can have made; what becomes a link
after that is refused.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import secrets
import stat
import time
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"\.?torchmem-oom-.*\.pickle(\.partial)?")
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_ABOVE = _DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)  # one may pass and not read
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def as_torch_writes_it(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot as torch's own tools open it: they look for the traces, which are not copied."""
    devices = 1 + max((segment["device"] for segment in snapshot["segments"]), default=0)
    traces: list[list[Any]] = [[] for _ in range(devices)]
    return {"allocator_settings": {}, **snapshot, "device_traces": traces}


class NotWrittenError(Exception):
    """No dump was written; the message says why."""


class DumpDirectory:
    """Where the snapshots of out of memory errors go.

    Example:
        >>> DumpDirectory("/var/lib/app/oom", max_files=10, max_bytes=256 << 20).write(snapshot)
        '/var/lib/app/oom/torchmem-oom-20250101T120000Z-4711-6f0c….pickle'
    """

    def __init__(self, path: str, max_files: int, max_bytes: int) -> None:
        self._path = os.path.abspath(os.path.expanduser(path))
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._resolved: str | None = None
        """Without links; None until it is there."""

    def check(self) -> None:
        """Make the directory if its parent is there, and look whether files can be made in it.

        Raises:
            NotWrittenError: they cannot, as it looks now.
        """
        try:
            os.close(self._open())
        except OSError as error:
            raise NotWrittenError(f"{self._path}: {error.strerror or error}") from error
        if not os.access(self._resolved or self._path, os.W_OK | os.X_OK):
            raise NotWrittenError(f"{self._path}: not writable")

    def write(self, snapshot: Any) -> str:
        """Write a snapshot, and give the file's path.

        Raises:
            NotWrittenError: the directory is full by its bounds, the disk is, or it cannot be written.
        """
        try:
            directory = self._open()
            try:
                return os.path.join(self._path, self._write(directory, snapshot))
            finally:
                os.close(directory)
        except OSError as error:
            raise NotWrittenError(f"{self._path}: {error.strerror or error}") from error

    def _open(self) -> int:
        resolved = self._resolved or _without_links(self._path)
        parent, _, name = resolved.rpartition("/")
        above = _open_without_links(parent)
        try:
            try:
                directory = os.open(name or "/", _DIRECTORY, dir_fd=above)
            except FileNotFoundError:
                os.mkdir(name, 0o700, dir_fd=above)
                directory = os.open(name, _DIRECTORY, dir_fd=above)
        finally:
            os.close(above)
        self._resolved = resolved
        return directory

    def _write(self, directory: int, snapshot: Any) -> str:
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"torchmem-oom-{moment}-{os.getpid()}-{secrets.token_hex(8)}.pickle"
        partial = f".{name}.partial"
        file = os.open(partial, _NEW_FILE, 0o600, dir_fd=directory)
        try:
            try:
                pickle.dump(snapshot, _Bounded(file, self._room(directory)), protocol=4)
            finally:
                os.close(file)
            self._room(directory)  # again, with ours: another process may have written meanwhile
            os.rename(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(partial, dir_fd=directory)
            raise
        return name

    def _room(self, directory: int) -> int:
        """Bytes that may still be written, by what all processes have left in the directory, this one's new
        file among it."""
        files = used = 0
        with os.scandir(directory) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    files += 1
                    used += entry.stat(follow_symlinks=False).st_size
        if files > self._max_files:
            raise NotWrittenError(
                f"{self._path} holds {files - 1} dumps, and {self._max_files} are allowed "
                "(oom_dump_max_files)"
            )
        if used > self._max_bytes:
            raise _too_large()
        return self._max_bytes - used


def _open_without_links(path: str) -> int:
    """The directory at an absolute path.

    Raises:
        OSError: it is not there, or a part of its path is a link.
    """
    directory = os.open("/", _ABOVE)
    for name in filter(None, path.split("/")):
        try:
            inner = os.open(name, _ABOVE, dir_fd=directory)
        finally:
            os.close(directory)
        directory = inner
    return directory


def _without_links(path: str) -> str:
    """An absolute path with its links followed; what is not there yet is left as it is.

    Raises:
        NotWrittenError: somebody else may have made one of them.
        OSError: they lead in circles, or cannot be read.
    """
    done, followed = "", 0
    rest = path.split("/")[::-1]
    while rest:
        name = rest.pop()
        if name in ("", "."):
            continue
        if name == "..":
            done = done.rpartition("/")[0]
            continue
        here = f"{done}/{name}"
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            return "/".join([here, *filter(None, reversed(rest))])
        if not stat.S_ISLNK(found.st_mode):
            done = here
            continue
        followed += 1
        if followed > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        above = os.stat(done or "/")
        if found.st_uid not in (0, os.geteuid()):
            raise NotWrittenError(f"{path}: the link {here} belongs to another user")
        if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
            raise NotWrittenError(f"{path}: anyone may replace the link {here}")
        target = os.readlink(here)
        if target.startswith("/"):
            done = ""
        rest += target.split("/")[::-1]
    return done


_MOST_LINKS = 40  # as Linux has it


def _too_large() -> NotWrittenError:
    return NotWrittenError("the dumps together would be larger than is allowed (oom_dump_max_mib)")


class _Bounded:
    """A file for a pickler that takes no more than what there is room for."""

    def __init__(self, file: int, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        self._room -= rest.nbytes
        if self._room < 0:
            raise _too_large()
        while rest:
            rest = rest[os.write(self._file, rest) :]
        return len(data)
