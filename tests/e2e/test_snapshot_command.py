# SPDX-License-Identifier: Apache-2.0
"""`torchmem snapshot` as a user runs it, on what the real allocator dumps."""

from __future__ import annotations

import io
import os
import pickle
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import analyse
from opentelemetry_instrumentation_torchmem.cli import snapshot_file

RUN = "import sys; from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main(sys.argv[1:]))"
MIB = 1 << 20


def command(*arguments: str | Path, cwd: Path, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, "snapshot", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


def shown(line: str, text: str) -> float:
    """The figure of a summary's line, in bytes."""
    found = re.search(rf"^ *{line} +(\d[\d.]* (?:B|[KMG]iB))", text, re.MULTILINE)
    assert found, (line, text)
    return in_bytes(found[1])


def busy(file: str, history: bool) -> dict:
    """Tensors on two streams, holes, a pending free, a wholly free segment, a MemPool; dumped as users do."""
    import torch
    from emulator import control

    if history:
        torch.cuda.memory._record_memory_history()
    mib = 1 << 20

    def grow(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    keep = [grow(size) for size in (30 * mib, 5 * mib, 3 * mib, 100, 700_000, 12 * mib, 40 * mib)]
    keep += [grow(2000 + 512 * number) for number in range(300)]
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        keep += [grow(2 * mib), grow(3000)]
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        keep += [grow(7 * mib), grow(6 * mib)]
    control.hold(other)
    used_elsewhere = grow(9 * mib)
    used_elsewhere.record_stream(other)
    with torch.cuda.stream(other):
        used_elsewhere.zero_()
    del used_elsewhere
    for index in sorted((1, 4, 6, *range(8, 300, 3)), reverse=True):
        del keep[index]
    stats = torch.cuda.memory_stats()
    torch.cuda.memory._dump_snapshot(file)
    assert torch.cuda.memory_stats() == stats
    return {
        "reserved": stats["reserved_bytes.all.current"],
        "allocated": stats["allocated_bytes.all.current"],
        "active": stats["active_bytes.all.current"],
        "inactive_split": stats["inactive_split_bytes.all.current"],
        "blocks": stats["active.all.current"],
        "stream": other.cuda_stream,
        "pool": list(pool.id),
    }


@pytest.mark.needs_emulation
@pytest.mark.parametrize("history", [False, True], ids=["plain", "history"])
@pytest.mark.parametrize("mode", ["native", "expandable"])
def test_the_figures_of_a_dump_are_the_allocators_own(gpu, tmp_path, mode, history):
    file = tmp_path / "dump.pickle"
    stats = gpu.run(busy, args=[str(file), history], alloc_conf=f"expandable_segments:{mode == 'expandable'}")

    snapshot = snapshot_file.read(file)
    blocks = [block for segment in snapshot.segments for block in segment.blocks]
    by_state = dict.fromkeys(("allocated", "pending_free", "free"), 0)
    for block in blocks:
        by_state[block.state] += block.size
    assert sum(segment.size for segment in snapshot.segments) == stats["reserved"]
    assert by_state["allocated"] == stats["allocated"]
    assert by_state["pending_free"] == stats["active"] - stats["allocated"] >= 9 * MIB
    assert by_state["free"] == stats["reserved"] - stats["active"]
    assert sum(block.state != "free" for block in blocks) == stats["blocks"]
    assert {segment.stream for segment in snapshot.segments} == {0, stats["stream"]}
    assert tuple(stats["pool"]) in {segment.pool for segment in snapshot.segments}
    device = analyse(snapshot.raw, AllocatorSettings.of_snapshot(snapshot.settings, {}), {})[0]
    if mode == "native":
        assert device.split_free == stats["inactive_split"]

    done = command(file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line, figure in (
        ("reserved", stats["reserved"]),
        ("allocated", stats["allocated"]),
        ("pending free", stats["active"] - stats["allocated"]),
        ("free in partly used segments", device.split_free),
        ("free as whole segments or pages", device.cached_free),
        ("largest hole, in any pool", max(block.size for block in blocks if block.state == "free")),
    ):
        assert shown(line, done.stdout) == pytest.approx(figure, rel=0.005), line
    assert f"expandable_segments={mode == 'expandable'}" in done.stdout
    assert f"stream {stats['stream']:#x}" in done.stdout
    assert "pool {}:{}".format(*stats["pool"]) in done.stdout
    assert done.stdout.endswith("picture: dump.html\n")
    page = (tmp_path / "dump.html").read_text(encoding="utf-8")
    for look in ("allocated", "pending_free", "split_free"):
        assert f'<path class="{look}"' in page
    assert f"stream {stats['stream']:#x}" in page
    assert "reserved" in page


def alternating(file: str) -> list:
    """Expandable segments turned on and off again at run time, and a graph's pool."""
    import torch

    def grow():
        return [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (3, 5, 30, 7)]

    kept = [grow()]
    for mode in ("True", "False"):
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{mode}")
        kept.append(grow())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept.append(torch.zeros(1 << 22, device="cuda"))
    del kept[0][1], kept[1][2], kept[2][0]
    torch.cuda.memory._dump_snapshot(file)
    return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]


@pytest.mark.needs_emulation
def test_mixed_modes_and_a_graphs_pool_are_told_apart(gpu, tmp_path):
    file = tmp_path / "mixed.pickle"
    allocated, reserved = gpu.run(alternating, args=[str(file)])
    done = command(file, "--output", "map.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown("reserved", done.stdout) == pytest.approx(reserved, rel=0.005)
    assert shown("allocated", done.stdout) == pytest.approx(allocated, rel=0.005)
    places = re.findall(r"^  (\S.*?(?:large|small)(?:, expandable)?)  +\d", done.stdout, re.MULTILINE)
    assert "default pool, default stream, large" in places
    assert "default pool, default stream, large, expandable" in places
    assert any(place.startswith("pool ") for place in places)
    ElementTree.parse(tmp_path / "map.svg")


def two_devices(file: str) -> list:
    import torch

    kept = [torch.empty(n << 20, dtype=torch.uint8, device=f"cuda:{n % 2}") for n in range(3, 12)]
    torch.cuda.memory._dump_snapshot(file)
    return [torch.cuda.memory_reserved(0), torch.cuda.memory_reserved(1), len(kept)]


@pytest.mark.needs_emulation
def test_devices_are_told_apart(gpu, tmp_path):
    file = tmp_path / "two.pickle"
    first, second, _ = gpu.run(two_devices, args=[str(file)], devices=2)
    done = command(file, "--no-picture", cwd=tmp_path)
    one, other = done.stdout.split("cuda:1\n")
    assert shown("reserved", one) == pytest.approx(first, rel=0.005)
    assert shown("reserved", other) == pytest.approx(second, rel=0.005)
    assert list(tmp_path.iterdir()) == [file]


def not_initialised(file: str) -> None:
    import torch

    torch.cuda.init()
    torch.cuda.memory._dump_snapshot(file)


def test_a_dump_of_nothing_is_told_as_such(gpu, tmp_path):
    file = tmp_path / "nothing.pickle"
    gpu.run(not_initialised, args=[str(file)])
    done = command(file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Nothing was reserved when it was taken." in done.stdout


# The command, without a GPU


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    blocks = [
        {"address": 0, "size": MIB, "requested_size": MIB, "state": "active_allocated", "frames": []},
        {"address": MIB, "size": MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 2 * MIB,
        "allocated_size": MIB,
        "active_size": MIB,
        "requested_size": MIB,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    file = tmp_path / "dump.pickle"
    file.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}))
    return file


def test_nothing_is_written_over_unless_it_is_asked_for(dump, tmp_path):
    picture = tmp_path / "dump.html"
    picture.write_text("mine")
    refused = command(dump, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr == (
        "torchmem snapshot: error: dump.html exists already: another --output, or --force to replace it\n"
    )
    assert picture.read_text() == "mine"
    assert command(dump, "--output", dump.with_suffix(".svg"), cwd=tmp_path).returncode == 0
    assert command(dump, "--force", cwd=tmp_path).returncode == 0
    assert picture.read_text().startswith("<!DOCTYPE html>")


def test_the_dump_itself_is_never_written_over(dump, tmp_path):
    content = dump.read_bytes()
    page = tmp_path / "dump.html"
    dump.rename(page)
    assert command("dump.html", cwd=tmp_path).returncode == 2
    assert command("dump.html", "--force", cwd=tmp_path).returncode == 2
    assert page.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--output", "map.png"), "map.png: must end in .html or .svg"),
        (("--output", "nowhere/map.svg"), "nowhere/map.svg: No such file or directory"),
        (("--max-size", "0"), "0: must be a whole number"),
        (("--top", "x"), "x: must be a whole number"),
    ],
)
def test_an_option_that_cannot_be_followed_is_told(dump, tmp_path, options, complaint):
    done = command(dump, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [dump]


def test_a_file_that_cannot_be_read_is_told_by_its_name(tmp_path):
    (tmp_path / "evil\x1b[2J.pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    done = command("evil\x1b[2J.pickle", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        r"torchmem snapshot: error: evil\x1b[2J.pickle: refused at byte 2: GLOBAL os.system; "
        "a snapshot holds dicts, lists, tuples, strings and numbers only\n"
    )


def test_a_full_disk_leaves_no_half_a_picture(dump, tmp_path):
    """As one is full: no file may have more than 1 KiB."""
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))}
    done = command(dump, "--output", "map.svg", cwd=tmp_path, **small)
    assert (done.returncode, done.stderr) == (2, "torchmem snapshot: error: map.svg: File too large\n")
    assert list(tmp_path.iterdir()) == [dump]


def test_what_is_no_regular_file_is_not_written_to(dump, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "map.svg").symlink_to("pipe")  # nobody reads from it: to open it would wait for ever
    done = command(dump, "--output", "map.svg", "--force", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "torchmem snapshot: error: map.svg is no regular file: another --output\n",
    )


def test_a_link_to_nothing_is_written_through_where_that_is_asked_for(dump, tmp_path):
    (tmp_path / "map.svg").symlink_to("there.svg")
    assert command(dump, "--output", "map.svg", cwd=tmp_path).returncode == 2
    done = command(dump, "--output", "map.svg", "--force", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ElementTree.parse(tmp_path / "there.svg")


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_name_that_is_too_long_for_the_pictures_is_told(dump, tmp_path, force):
    long = tmp_path / ("a" * 251)
    dump.rename(long)
    done = command(long.name, *force, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"torchmem snapshot: error: {'a' * 251}.html: File name too long: another --output\n"
    )
    assert command(long.name, "--output", "map.svg", cwd=tmp_path).returncode == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown"), [(Terminal, "\rreading: 12%\rreading: 50%\r            \r"), (io.StringIO, "")]
)
def test_a_terminal_is_told_how_far_a_file_that_takes_long_is_read(monkeypatch, stream, shown):
    from opentelemetry_instrumentation_torchmem.cli import snapshot

    times = iter([100.0, 100.9, *[102.0] * 9])
    monkeypatch.setattr(snapshot, "monotonic", lambda: next(times))
    said = stream()
    monkeypatch.setattr(sys, "stderr", said)
    with snapshot._progress() as progress:
        for share in (0.01, 0.121, 0.124, 0.5):
            progress(share)
    assert said.getvalue() == shown


def test_it_needs_no_torch(dump, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = command(dump, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_it_ends_quietly_when_its_reader_does(dump, tmp_path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", RUN, "snapshot", str(dump)],
            cwd=tmp_path,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_terminal_without_unicode_shows_what_it_can(dump, tmp_path):
    done = command(dump, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr
    assert "reserved" in done.stdout
