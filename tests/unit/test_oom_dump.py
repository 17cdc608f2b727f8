# SPDX-License-Identifier: Apache-2.0
"""A directory of dumps: private, bounded, each file whole or not there."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import stat

import pytest

from opentelemetry_instrumentation_torchmem.allocator.dump import DumpDirectory, NotWrittenError

SNAPSHOT = {
    "segments": [{"device": 0, "address": n, "blocks": []} for n in range(1000)],
    "device_traces": [[]],
}
SIZE = len(pickle.dumps(SNAPSHOT, protocol=4))


def directory(path, files=10, size=1 << 20) -> DumpDirectory:
    return DumpDirectory(str(path), files, size)


def test_a_dump_is_a_pickle_that_its_owner_alone_may_read(tmp_path):
    old = os.umask(0)
    try:
        path = directory(tmp_path / "new").write(SNAPSHOT)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o700
    with open(path, "rb") as file:
        assert pickle.load(file) == SNAPSHOT
    assert os.listdir(tmp_path / "new") == [os.path.basename(path)]


def test_no_name_comes_twice_and_none_can_be_guessed(tmp_path):
    dumps = directory(tmp_path)
    names = {os.path.basename(dumps.write({})) for _ in range(10)}
    assert len(names) == 10
    assert len({name.rpartition("-")[2] for name in names}) == 10
    assert all(len(name.rpartition("-")[2]) == len("0123456789abcdef.pickle") for name in names)


def test_no_more_files_than_are_allowed_whoever_wrote_them(tmp_path):
    directory(tmp_path, files=3).write({})
    (tmp_path / "somebody's file.pickle").touch()
    (tmp_path / "torchmem-oom-another-process.pickle").touch()
    (tmp_path / ".torchmem-oom-that-was-killed.pickle.partial").touch()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(NotWrittenError, match=r"holds 3 dumps, and 3 are allowed \(oom_dump_max_files\)"):
        directory(tmp_path, files=3).write({})
    assert sorted(os.listdir(tmp_path)) == before


def test_no_more_bytes_than_are_allowed(tmp_path):
    dumps = directory(tmp_path, size=2 * SIZE + 100)
    dumps.write(SNAPSHOT)
    dumps.write(SNAPSHOT)
    with pytest.raises(NotWrittenError, match="oom_dump_max_mib"):
        dumps.write(SNAPSHOT)
    assert len(os.listdir(tmp_path)) == 2
    dumps.write({})  # a small one still fits


def test_a_bound_of_none_writes_none(tmp_path):
    with pytest.raises(NotWrittenError):
        directory(tmp_path, files=0).write({})
    with pytest.raises(NotWrittenError):
        directory(tmp_path, size=0).write({})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", [0, 100, SIZE - 1])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, after):
    written = 0
    write = os.write

    def full(file, data):
        nonlocal written
        room = after - written
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[:room])
        written += done
        return done

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NotWrittenError, match="No space left on device"):
        directory(tmp_path).write(SNAPSHOT)
    assert os.listdir(tmp_path) == []


def test_a_limit_on_the_size_of_files_leaves_nothing_behind(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(NotWrittenError, match="File too large"):
            directory(tmp_path).write(SNAPSHOT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_pickled_leaves_nothing_behind(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        directory(tmp_path).write({"segments": lambda: None})
    assert os.listdir(tmp_path) == []


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    dumps = directory(tmp_path / "link")
    with pytest.raises(NotWrittenError, match="link"):
        dumps.check()
    with pytest.raises(NotWrittenError, match="link"):
        dumps.write({})
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_directory_that_is_swapped_for_a_link_meanwhile_is_written_where_it_was(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    rename = os.rename

    def swapped(*arguments, **options):
        rename(here, tmp_path / "moved")
        here.symlink_to(elsewhere)
        rename(*arguments, **options)

    monkeypatch.setattr(os, "rename", swapped)
    directory(here).write({})
    assert os.listdir(elsewhere) == []
    assert len(os.listdir(tmp_path / "moved")) == 1


@pytest.mark.parametrize("path", ["a file", "missing/as well"])
def test_what_is_no_directory_is_told(tmp_path, path):
    (tmp_path / "a file").touch()
    with pytest.raises(NotWrittenError, match=path):
        directory(tmp_path / path).check()
    with pytest.raises(NotWrittenError, match=path):
        directory(tmp_path / path).write({})


def test_a_directory_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    open_ = os.open

    def refusing(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotWrittenError, match="not writable"):
        directory(tmp_path).check()
    with pytest.raises(NotWrittenError, match="Permission denied"):
        directory(tmp_path).write({})
