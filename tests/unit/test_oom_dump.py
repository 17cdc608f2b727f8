# SPDX-License-Identifier: Apache-2.0
"""A directory of dumps: private, bounded, each file whole or not there."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import stat
import tempfile

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


def test_a_link_to_a_mounted_volume_is_followed(tmp_path):
    """As of Kubernetes: /var/log -> /mnt/log, or the directory itself."""
    (tmp_path / "mnt" / "log").mkdir(parents=True)
    (tmp_path / "log").symlink_to("mnt/./log")
    (tmp_path / "oom").symlink_to(tmp_path / "log" / "dumps")
    for path in ("log", "log/dumps", "oom", "log/../log/dumps"):
        dumps = directory(tmp_path / path)
        dumps.check()
        written = dumps.write({})
        assert os.path.dirname(written) == str(tmp_path / path).replace("log/../", "")
        assert stat.S_IMODE(os.stat(written).st_mode) == 0o600
    assert len(os.listdir(tmp_path / "mnt" / "log" / "dumps")) == 3
    assert stat.S_IMODE(os.stat(tmp_path / "mnt" / "log" / "dumps").st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_link_that_anyone_may_replace_is_refused(tmp_path, mode):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "elsewhere")
    for path in ("link", "link/dumps"):
        dumps = directory(tmp_path / "open" / path)
        if mode == 0o1777:  # as /tmp: nobody but its owner can
            dumps.check()
            continue
        with pytest.raises(NotWrittenError, match=r"anyone may replace the link .*link$"):
            dumps.check()
        with pytest.raises(NotWrittenError, match=r"anyone may replace the link .*link$"):
            dumps.write({})
    assert os.listdir(tmp_path / "elsewhere") == (["dumps"] if mode == 0o1777 else [])


def test_a_directory_that_one_may_pass_and_not_read_is_no_hindrance():
    with tempfile.TemporaryDirectory() as above:
        dumps = os.path.join(above, "private", "dumps")
        os.makedirs(dumps)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.chmod(above, 0o711)
                    os.chown(dumps, 65534, 65534)
                    os.chmod(os.path.dirname(dumps), 0o711)
                    os.setuid(65534)
                else:
                    os.chmod(os.path.dirname(dumps), 0o311)
                directory(dumps).write({})
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        os.chmod(os.path.dirname(dumps), 0o755)
        assert len(os.listdir(dumps)) == 1


def test_a_link_that_another_user_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    if os.geteuid() == 0:
        os.lchown(tmp_path / "link", 4711, 4711)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(NotWrittenError, match="link belongs to another user"):
        directory(tmp_path / "link").write({})
    assert os.listdir(tmp_path / "elsewhere") == []


def test_links_that_lead_in_circles_are_told(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(NotWrittenError, match="symbolic links"):
        directory(tmp_path / "a").check()


@pytest.mark.parametrize("part", ["above", "above/dumps"])
def test_what_has_become_a_link_since_is_refused(tmp_path, part):
    (tmp_path / "above" / "dumps").mkdir(parents=True)
    (tmp_path / "elsewhere" / "dumps").mkdir(parents=True)
    dumps = directory(tmp_path / "above" / "dumps")
    dumps.write({})
    (tmp_path / part).rename(tmp_path / "moved")
    (tmp_path / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotWrittenError, match="dumps"):
        dumps.write({})
    assert os.listdir(tmp_path / "elsewhere" / "dumps") == []
    assert os.listdir(tmp_path / "elsewhere") == ["dumps"]


def test_a_directory_open_to_all_is_written_to_as_an_empty_volume_of_kubernetes_is(tmp_path):
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    for path in ("volume", "volume/dumps"):
        written = directory(tmp_path / path).write({})
        assert stat.S_IMODE(os.stat(written).st_mode) == 0o600


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
