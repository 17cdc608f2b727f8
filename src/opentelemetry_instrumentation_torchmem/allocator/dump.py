# SPDX-License-Identifier: Apache-2.0
"""A directory of snapshots in PyTorch's own pickle format, bounded in number and size.

A file is there whole or not at all, readable by its owner alone, under a name that nobody can guess. What
was in the directory before is never touched.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import time
from typing import Any

_NAME = re.compile(r"\.?torchmem-oom-.*\.pickle(\.partial)?")
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


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

    def check(self) -> None:
        """Make the directory if its parent is there, and look whether files can be made in it.

        Raises:
            NotWrittenError: they cannot, as it looks now.
        """
        try:
            os.close(self._open())
        except OSError as error:
            raise NotWrittenError(f"{self._path}: {error.strerror or error}") from error
        if not os.access(self._path, os.W_OK | os.X_OK):
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
        try:
            return os.open(self._path, _DIRECTORY)
        except FileNotFoundError:
            os.mkdir(self._path, 0o700)
            return os.open(self._path, _DIRECTORY)

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
