# SPDX-License-Identifier: Apache-2.0
"""Reading snapshot files: plain data comes out as it went in, and nothing else does anything at all."""

from __future__ import annotations

import copy
import io
import os
import pickle
import pickletools
import random
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentelemetry_instrumentation_torchmem.cli import snapshot_file, snapshot_pickle
from opentelemetry_instrumentation_torchmem.cli.snapshot_file import Block, SnapshotError, read
from opentelemetry_instrumentation_torchmem.cli.snapshot_pickle import PlainDataError, load, printable

MIB = 1 << 20
ROOM = 64 * MIB
BASE = 0x7F0000000000


def segment(**more) -> dict:
    """2 MiB: allocated, pending, free."""
    blocks = [
        {"address": BASE, "size": MIB, "requested_size": MIB - 5, "state": "active_allocated", "frames": []},
        {
            "address": BASE + MIB,
            "size": 512,
            "requested_size": 1,
            "state": "active_pending_free",
            "frames": [],
        },
        {
            "address": BASE + MIB + 512,
            "size": MIB - 512,
            "requested_size": 0,
            "state": "inactive",
            "frames": [],
        },
    ]
    plain = {
        "device": 0,
        "address": BASE,
        "total_size": 2 * MIB,
        "allocated_size": MIB,
        "active_size": MIB + 512,
        "requested_size": MIB - 4,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return plain | more


def snapshot(*segments: dict, **more) -> dict:
    whole = {"segments": list(segments), "device_traces": [[]], "allocator_settings": {}}
    return whole | more


@pytest.fixture
def reading(tmp_path: Path):
    """Reads what was pickled, or bytes as they are."""

    def read_it(whole: object, **options) -> snapshot_file.Snapshot:
        file = tmp_path / "some.pickle"
        file.write_bytes(whole if isinstance(whole, bytes) else pickle.dumps(whole))
        return read(file, **options)

    return read_it


# The pickle


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=30,
)


@settings(deadline=None)
@given(PLAIN, st.sampled_from([2, 3, 4, 5]), st.booleans())
def test_plain_data_comes_out_as_it_went_in(value, protocol, in_python):
    stream = io.BytesIO()
    (pickle._Pickler if in_python else pickle.Pickler)(stream, protocol).dump(value)
    assert load(stream.getvalue(), ROOM) == value


def test_long_lists_shared_parts_and_cycles_come_out_as_they_went_in():
    shared = {"a": 1}
    value = [shared] * 3000 + [("x" * 70_000, 1 << 62)]
    value.append({str(number): number for number in range(2500)})
    loaded = load(pickle.dumps(value), ROOM)
    assert loaded == value
    assert loaded[0] is loaded[1]
    cycle: list = []
    cycle.append(cycle)
    loaded = load(pickle.dumps(cycle), ROOM)
    assert loaded[0] is loaded


@pytest.mark.parametrize("entries", [999, 1000, 1001, 2000])
def test_a_dict_whose_last_batch_is_empty_is_read(entries):
    """A pickler puts in a thousand at a time, and after the last full thousand an empty batch."""
    value = {"all": {str(number): number for number in range(entries)}}
    assert load(pickle.dumps(value), ROOM) == value


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_would_run_is_refused_by_its_name_and_does_not_run(tmp_path, protocol):
    mark = tmp_path / "ran"
    with pytest.raises(PlainDataError, match=r"refused at byte \d+: (STACK_)?GLOBAL posix.mkdir"):
        load(pickle.dumps(snapshot(segment(frames=[Evil(mark)])), protocol), ROOM)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil(mark), protocol))
    assert mark.exists(), "the same bytes do it elsewhere"


ALLOWED = {
    *("FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MARK", "EMPTY_LIST", "EMPTY_DICT"),
    *("EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
}


@pytest.mark.parametrize("code", range(256))
def test_every_operation_is_one_of_the_few_or_refused_by_its_name(code):
    name = next((each.name for each in pickletools.opcodes if ord(each.code) == code), "no pickle operation")
    if name not in ALLOWED:
        with pytest.raises(PlainDataError, match=f"at byte 4: .*{name}"):
            load(b"\x80\x02NN" + bytes([code]) + b"builtins\nprint\n\x00\x00\x00\x00\x00\x00.", ROOM)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"GIF89a", "not a pickle of protocol 2 or later; what torch.cuda.memory._dump_snapshot writes is"),
        (b"(lp0\n.", "not a pickle of protocol 2 or later"),
        (b"PK\x03\x04" + bytes(100), "looks like a zip archive, as torch.save writes; what torch.cuda"),
        (b"\x1f\x8b\x08\x00" + bytes(100), "no snapshot: it looks like gzip; what torch.cuda.memory._dump_"),
        (b' {"segments": []}', "looks like JSON; what torch"),
        (b"[{}]", "looks like JSON; what torch"),
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"\x80\x02}.", "what torch.save of an old release writes"),
        (b"\x80", "cut off: the file ends at byte 1"),
        (b"\x80\x06N.", "protocol 6; 2 to 5 are read"),
        (b"\x80\x01N.", "protocol 1; 2 to 5"),
        (b"\x80\x04\x80\x04].", "refused at byte 2: PROTO"),
        (b"\x80\x04]q\x01.", "broken at byte 5: what it remembers is not counted up"),
        (b"\x80\x04N", "cut off"),
        (b"\x80\x04N.N", "1 bytes follow the end"),
        (b"\x80\x04NN.", "ends in the middle"),
        (b"\x80\x04(N.", "ends in the middle"),
        (b"\x80\x04.", "ends in the middle"),
        (b"\x80\x04h\x07.", "broken at byte 2: it refers to a value that is not there"),
        (b"\x80\x04j\xff\xff\xff\xff.", "refers to a value that is not there"),
        (b"\x80\x04e.", "broken at byte 2"),
        (b"\x80\x04Na.", "broken at byte 3"),
        (b"\x80\x04N(Ne.", "broken at byte 5"),
        (b"\x80\x04}(Nu.", "broken at byte 5"),
        (b"\x80\x04\x86.", "broken at byte 2"),
        (b"\x80\x04\x8c\x02\xff\xff.", "a string that is not UTF-8"),
        (b"\x80\x04}\x8c\x01kNs\x8c\x01kNs.", "has a key twice"),
        (b"\x80\x04}(\x8c\x01kN\x8c\x01kNu.", "has a key twice"),
        (b"\x80\x04}K\x01K\x02s.", r"has a key of type \w+, not str"),
        (b"\x80\x04})Ns.", r"has a key of type \w+, not str"),
        (b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", "an integer of 255 bytes"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff", "cut off"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"x.", "cut off"),
        (b"\x80\x04X\xff\xff\xff\xffx.", "cut off"),
    ],
)
def test_what_is_broken_or_foreign_gets_one_clear_error(reading, content, complaint):
    with pytest.raises(SnapshotError, match=complaint):
        reading(content)


def test_every_truncation_is_told(reading):
    whole = pickle.dumps(snapshot(segment()))
    for length in range(1, len(whole)):
        with pytest.raises(SnapshotError, match=r"cut off|not a pickle"):
            reading(whole[:length])


def test_whatever_the_bytes_are_they_are_read_or_refused(reading):
    """Bytes changed at random: never another exception than the one that the command tells."""
    rng = random.Random(5)
    whole = pickle.dumps(snapshot(segment(), segment(address=BASE * 2, device=1)))
    told = []
    for _ in range(1500):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 10))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            reading(bytes(changed))
        except SnapshotError as error:
            told.append(str(error))
    assert len(told) > 700
    assert all(error.isprintable() for error in told)


# Memory and time. Each bomb goes through the command in a process that may not have much.

FLOODS = {
    "the protocol again and again": b"\x80\x04" * MIB + b"].",
    "empty batches": b"\x80\x04]" + b"(e" * MIB + b".",
    "marks": b"\x80\x04" + b"(" * (2 * MIB) + b".",
}


@pytest.mark.parametrize("name", FLOODS)
def test_what_builds_nothing_cannot_go_on_for_long(name):
    with pytest.raises(PlainDataError, match=r"refused at byte 2: PROTO|more than 16 MiB of memory"):
        load(FLOODS[name], 16 * MIB)


KIB = 1 << 10
HOARDS = {
    "lists that wait, and None": (b"(" + b"]" * (50 * KIB)) * 3 + (b"(" + b"N" * (225 * KIB)) * 9,
    "small numbers that wait": b"K\x01" * (2 * MIB),
    "references that wait": b"]\x94" + b"h\x00" * (2 * MIB),
    "None that waits below marks": (b"N" * 1000 + b"(") * (2 * KIB),
    "lists of one": b"](" + b"]Na" * (325 * KIB),
    "dicts of one": b"(" + b"}\x8c\x01aNs" * (200 * KIB),
    "dicts of six": b"(" + (b"}(" + b"".join(b"\x8c\x01%cN" % key for key in b"abcdef") + b"u") * (50 * KIB),
    "tuples": b"(" + b"N\x85" * (512 * KIB),
    "numbers": b"(" + (b"\x8a\x09" + bytes(8) + b"\x01") * (200 * KIB),
    "short texts": b"(" + b"\x8c\x02ab" * (512 * KIB),
    "a long list put in at once": b"](" + b"N" * (2 * MIB) + b"e.",
    "a tuple of many": b"(" + b"N" * (2 * MIB) + b"t.",
    "a text with a wide letter": (
        b"X" + struct.pack("<I", MIB + 4) + b"a" * MIB + "\N{GRINNING FACE}".encode() + b"."
    ),
    "texts with a wide letter": b"(" + (b"\x8c\xfc" + b"a" * 248 + "\N{GRINNING FACE}".encode()) * (10 * KIB),
    "a large dict": b"}(" + b"".join(b"\x8c\x04%04xN" % key for key in range(16_000)) + b"u.",
}
TAKEN_WHOLE = {"a text with a wide letter", "a large dict"}
HOARDED = 10 * MIB
MEASURE = r"""
import os, pathlib, re, sys
from opentelemetry_instrumentation_torchmem.cli.snapshot_pickle import PlainDataError, load
def told(name):
    return int(re.search(name + r":\s*(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10
for file in sys.argv[2:]:
    if not os.fork():
        data = pathlib.Path(file).read_bytes()
        before = told("VmRSS")
        try:
            load(data, int(sys.argv[1]))
            said = "taken"
        except PlainDataError as error:
            said = str(error)
        print(pathlib.Path(file).name, told("VmHWM") - before, said, sep=":", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def hoarded(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """What each takes in a process of its own, as the system counts it, and what is said."""
    place = tmp_path_factory.mktemp("hoards")
    for name, hoard in HOARDS.items():
        (place / name).write_bytes(b"\x80\x04" + hoard)
    command = [sys.executable, "-c", MEASURE, str(HOARDED), *(str(place / name) for name in HOARDS)]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return {name: (int(most), said) for name, most, said in (line.split(":", 2) for line in lines)}


@pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux tells of a process")
@pytest.mark.parametrize("name", HOARDS)
def test_no_more_memory_is_taken_than_was_allowed(hoarded, name):
    most, said = hoarded[name]
    assert said == ("taken" if name in TAKEN_WHOLE else "what it holds takes more than 10 MiB of memory")
    assert most < HOARDED + MIB


BOMBS = {
    "a huge memo index": b"\x80\x04r\xff\xff\xff\x7f.",
    "a huge memo index, with something to put": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a string that says it is huge": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "bytes that say they are huge": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "an array that says it is huge": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "an integer that says it is huge": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"x.",
    "a frame that says it is huge": b"\x80\x04\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N.",
    "many empty lists": b"\x80\x04" + b"]" * (4 * MIB) + b"0.",
    "many empty dicts in a list": b"\x80\x04](" + b"}" * (4 * MIB) + b"e.",
    "many remembered": b"\x80\x04N" + b"\x94" * (8 * MIB) + b".",
    "many values that wait": b"\x80\x04(" + b"N" * (8 * MIB) + b"l.",
    "deep lists": b"\x80\x04" + b"]" * (2 * MIB) + b"a" * (2 * MIB) + b".",
    "deep tuples": b"\x80\x04N" + b"\x85" * (4 * MIB) + b".",
    "deep marks": b"\x80\x04" + b"(" * (8 * MIB) + b".",
    "a deep tuple as a key": b"\x80\x04})" + b"\x85" * MIB + b"Ns.",
    "many references to one list": b"\x80\x04]\x94(" + b"h\x00" * (3 * MIB) + b"e.",
    "a long string beside one wide letter": (
        b"\x80\x04X" + struct.pack("<I", 8 * MIB + 4) + b"a" * (8 * MIB) + "\N{GRINNING FACE}".encode() + b"."
    ),
}


def laughs() -> bytes:
    """Lists of lists of lists, a billion by name and a few hundred in memory."""
    level: object = segment()
    for _ in range(30):
        level = [level] * 10
    return pickle.dumps({"segments": level})


def repeated() -> bytes:
    """One segment of a thousand blocks, a hundred thousand times."""
    blocks = [
        {"address": BASE + 512 * number, "size": 512, "state": "inactive", "frames": []}
        for number in range(1000)
    ]
    one = segment(blocks=blocks, total_size=512_000, allocated_size=0, active_size=0)
    return pickle.dumps({"segments": [one] * 100_000})


def endless_settings() -> bytes:
    inside: dict = {}
    inside["self"] = inside
    return pickle.dumps(snapshot(segment(), allocator_settings={"a": inside, "x": "\x1b[2J" * 100_000}))


MADE = {
    "a billion laughs": laughs,
    "one segment very often": repeated,
    "settings in themselves": endless_settings,
}
SPACE = 512 * MIB
RUN = "import sys; from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main(sys.argv[1:]))"


def in_little_memory(*arguments: str, cwd: Path, space: int = SPACE) -> subprocess.CompletedProcess[str]:
    """The command, in a process that may have no more address space than so much."""
    return subprocess.run(
        [sys.executable, "-c", RUN, "snapshot", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (space, space)),
    )


@pytest.mark.parametrize("name", [*BOMBS, *MADE])
def test_a_bomb_takes_little_memory_and_time(tmp_path, name):
    file = tmp_path / "bomb.pickle"
    file.write_bytes(MADE[name]() if name in MADE else BOMBS[name])
    # 20 MiB of file may build 200 MiB, within which the interpreter's own half is left.
    done = in_little_memory(str(file), "--max-size", "20", cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert "not enough memory" not in done.stderr
    if name == "settings in themselves":
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
    else:
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert not list(tmp_path.glob("*.html"))


def test_what_a_file_builds_is_bounded_by_what_was_allowed():
    many = pickle.dumps([{} for _ in range(50_000)])
    assert len(load(many, 32 * MIB)) == 50_000
    with pytest.raises(PlainDataError, match="more than 4 MiB of memory"):
        load(many, 4 * MIB)


# The file


def test_a_small_file_takes_little_memory_whatever_is_allowed(tmp_path):
    file = tmp_path / "small.pickle"
    file.write_bytes(pickle.dumps(snapshot(segment())))
    assert len(read(file, 1 << 60).segments) == 1


def test_a_file_above_the_limit_is_refused_unread(tmp_path):
    file = tmp_path / "large.pickle"
    with file.open("wb") as opened:
        opened.truncate(1 << 30)
    done = in_little_memory(str(file), cwd=tmp_path, space=300 * MIB)
    assert done.returncode == 2
    assert "the file has 1,024 MiB; at most 256 MiB are read (--max-size)" in done.stderr


def test_what_is_no_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, complaint in (
        ("none", "No such file"),
        (".", "directory|regular"),
        ("pipe", "not a regular"),
        ("/dev/zero", "not a regular"),
    ):
        with pytest.raises(SnapshotError, match=complaint):
            read(tmp_path / name)
    (tmp_path / "empty").touch()
    with pytest.raises(SnapshotError, match="the file is empty"):
        read(tmp_path / "empty")


# The structure


def test_a_snapshot_is_what_the_allocator_told(reading):
    found = reading(snapshot(segment(device=3, stream=77, segment_pool_id=(1, 2), is_expandable=True)))
    [only] = found.segments
    assert (only.device, only.stream, only.pool, only.kind, only.expandable) == (3, 77, (1, 2), "small", True)
    assert only.blocks == [
        Block(BASE, MIB, "allocated"),
        Block(BASE + MIB, 512, "pending_free"),
        Block(BASE + MIB + 512, MIB - 512, "free"),
    ]
    assert only.allocated == MIB


def test_a_bare_list_and_what_older_releases_leave_out_are_read(reading):
    old = copy.deepcopy(segment())
    del old["segment_pool_id"], old["is_expandable"]
    for block in old["blocks"]:
        del block["address"]
    old["blocks"][1]["state"] = "active_awaiting_free"
    [told] = reading(snapshot(segment())).segments
    assert reading([old]).segments == [replace(told, pool=None)]
    assert reading([]).segments == []


def test_segments_come_by_device_and_address(reading):
    def at(address: int, device: int) -> dict:
        blocks = [{"address": address, "size": 512, "state": "inactive"}]
        sizes = {"total_size": 512, "allocated_size": 0, "active_size": 0}
        return segment(address=address, device=device, blocks=blocks, **sizes)

    found = reading([at(2048, 1), at(1024, 1), at(4096, 0)])
    assert [(each.device, each.address) for each in found.segments] == [(0, 4096), (1, 1024), (1, 2048)]
    assert [each["address"] for each in found.raw] == [4096, 1024, 2048]


def without(key: str) -> dict:
    return {name: value for name, value in segment().items() if name != key}


def with_block(number: int, **more) -> dict:
    blocks = copy.deepcopy(segment()["blocks"])
    blocks[number] |= more
    return segment(blocks=blocks)


ALL_FREE = {"size": 2 * MIB, "state": "inactive"}


@pytest.mark.parametrize(
    ("whole", "complaint"),
    [
        (7, "no snapshot: 7, where a list of segments is expected"),
        ("x\x1b[2J", r"no snapshot: 'x\\x1b\[2J', where"),
        ({}, "no snapshot: a dict with nothing"),
        ({"model": 1, "epoch": 2}, "a dict with model, epoch, where 'segments' is expected"),
        ({"segments": {"a": 1}}, "no snapshot: a dict of 1"),
        ([[]], "segment 0 is a list of 0; it must be a dict"),
        ([segment(), 5], "segment 1 is 5; it must be a dict"),
        *(
            ([without(key)], f"segment 0 has no {key}")
            for key in ("device", "address", "total_size", "stream")
        ),
        *(([without(key)], f"segment 0 has no {key}") for key in ("blocks", "segment_type", "active_size")),
        ([segment(total_size=-5)], "segment 0: total_size is -5; it must be a whole number from 0x1 to"),
        ([segment(total_size=0)], "total_size is 0"),
        ([segment(total_size=2.0 * MIB)], "total_size is 2097152.0"),
        ([segment(total_size=True)], "total_size is True"),
        ([segment(total_size=3 * MIB)], "its blocks leave out 1,048,576 of its 3,145,728 bytes"),
        ([segment(address=-1)], "address is -1"),
        ([segment(address=1 << 64)], "address is 0x10000000000000000"),
        ([segment(address=(1 << 64) - 5)], "total_size is 0x200000"),
        ([segment(device=-1)], "device is -1"),
        ([segment(device=100_000)], "device is 100000"),
        ([segment(device="cuda:0")], "device is 'cuda:0'"),
        ([segment(stream=1 << 70)], "stream is"),
        ([segment(segment_type="huge")], "segment_type is 'huge'; it must be small or large"),
        ([segment(segment_type=["small"])], "segment_type is a list of 1"),
        ([segment(segment_pool_id=(1, 2, 3))], "segment_pool_id is a tuple of 3"),
        (
            [segment(segment_pool_id=("a", []))],
            "segment_pool_id is a tuple of 2; it must be two whole numbers",
        ),
        *(
            ([segment(segment_pool_id=pool)], "it must be two whole numbers from 0 to 0xffffffffffffffff")
            for pool in ((1 << 64, 0), (0, (1 << 61) - 1 << 20), (-1, 0), (True, 0))
        ),
        ([segment(is_expandable=1)], "is_expandable is 1"),
        ([segment(allocated_size=5)], "allocated_size is 5; by its blocks it is 1,048,576"),
        ([segment(active_size=MIB)], "active_size is 1,048,576; by its blocks"),
        ([segment(blocks=[])], "its blocks leave out"),
        ([segment(blocks=[3])], "segment 0, block 0 is 3; it must be a dict"),
        ([segment(blocks="blocks")], "blocks is 'blocks'"),
        ([with_block(1, size=-512)], "segment 0, block 1: size is -512"),
        ([with_block(1, size=1 << 40)], "segment 0, block 1: size is 0x10000000000"),
        ([with_block(1, size="512")], "block 1: size is '512'"),
        (
            [with_block(1, address=BASE)],
            "segment 0, block 1: address is 0x7f0000000000; it must be 0x7f0000100000",
        ),
        (
            [with_block(1, address=float(BASE + MIB))],
            "block 1: address is 139637977776128.0; it must be 0x7f0",
        ),
        (
            [segment(address=1, blocks=[{**ALL_FREE, "address": True}])],
            "block 0: address is True; it must be",
        ),
        ([with_block(0, requested_size="a")], "block 0: requested_size is 'a'; it must be a whole number"),
        ([with_block(2, requested_size=1 << 64)], "block 2: requested_size is 0x10000000000000000"),
        ([with_block(2, state="lost")], "block 2: state is 'lost'; it must be active_allocated or"),
        ([with_block(2, state=["inactive"])], "block 2: state is a list of 1"),
        ([with_block(2, state=None)], "block 2: state is None"),
        ([segment(), segment()], "two segments of device 0 overlap at 0x7f0000000000"),
        (snapshot(segment(), allocator_settings=5), "allocator_settings is 5"),
        (
            snapshot(segment(), allocator_settings={"max_split_size": "no"}),
            "allocator_settings: max_split_size is 'no'; it must be of type int",
        ),
    ],
)
def test_a_wrong_structure_is_told_with_its_place(reading, whole, complaint):
    with pytest.raises(SnapshotError, match=complaint):
        reading(whole)


def test_more_blocks_than_are_read_are_refused(reading, monkeypatch):
    monkeypatch.setattr(snapshot_file, "MAX_BLOCKS", 7)
    other = copy.deepcopy(segment(device=1))
    assert len(reading([segment()]).segments) == 1
    with pytest.raises(SnapshotError, match="more than 7 segments and blocks"):
        reading([segment(), other])


WORD = (1 << 64) - 1
PRIME = (1 << 61) - 1
"""Below it a number is its own hash."""
FIRST, SECOND, BEGIN = 11400714785074694791, 14029467366897019727, 2870177450012600261
"""Of CPython's hash of a tuple."""


def hashed(so_far: int, item: int) -> int:
    so_far = so_far + item * SECOND & WORD
    return (so_far << 31 | so_far >> 33) * FIRST & WORD


def unhashed(so_far: int) -> int:
    so_far = so_far * pow(FIRST, -1, 1 << 64) & WORD
    return (so_far << 33 | so_far >> 31) & WORD


def colliding_pools() -> Iterator[tuple[int, int]]:
    wanted = unhashed(hashed(hashed(BEGIN, 1), 1))
    for first in count(1):
        second = (wanted - hashed(BEGIN, first)) * pow(SECOND, -1, 1 << 64) & WORD
        if second < PRIME:
            yield first, second


def colliding_streams_of_pools() -> Iterator[tuple[int, tuple[int, int]]]:
    """On device 0: what is looked up there is (device, stream, pool, …)."""
    wanted = hashed(hashed(hashed(BEGIN, 0), 1), hash((0, 1)) & WORD)
    for number in count(1):
        before = unhashed(unhashed(wanted) - (hash((0, number)) & WORD) * SECOND & WORD)
        stream = (before - hashed(BEGIN, 0)) * pow(SECOND, -1, 1 << 64) & WORD
        if stream < PRIME:
            yield stream, (0, number)


def test_pools_and_streams_whose_numbers_were_chosen_to_collide_are_refused(reading):
    """Each would be compared with all others: 500,000 segments of these would take hours."""
    pools = list(islice(colliding_pools(), 40))
    assert len({hash(pool) for pool in pools}) == 1
    mixed = list(islice(colliding_streams_of_pools(), 40))
    assert len({hash((0, *each, "small", False)) for each in mixed}) == 1
    for places in ([(number, pool) for number, pool in enumerate(pools)], mixed):
        segments = [at(number << 20, stream, pool) for number, (stream, pool) in enumerate(places)]
        assert len(reading(segments[:10]).segments) == 10
        with pytest.raises(SnapshotError, match="numbers that were chosen to take time"):
            reading(segments)


def at(address: int, stream: int, pool: tuple[int, int]) -> dict:
    blocks = [{"address": address, "size": 512, "state": "inactive"}]
    sizes = {"total_size": 512, "allocated_size": 0, "active_size": 0}
    return segment(address=address, blocks=blocks, stream=stream, segment_pool_id=pool, **sizes)


def test_more_pools_and_streams_than_are_read_are_refused(reading, monkeypatch):
    monkeypatch.setattr(snapshot_file, "MAX_PLACES", 7)
    segments = [at(number << 20, number % 8, (0, 0)) for number in range(40)]
    assert len(reading(segments[:7]).segments) == 7
    with pytest.raises(SnapshotError, match="more than 7 pools and streams"):
        reading(segments)


def test_settings_are_the_plain_ones_and_fit_to_print(reading):
    told = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64\n\x1b]0;x\x07",
        "max_split_size": 64 * MIB,
        "expandable_segments": False,
        "roundup_power2_divisions": {"1": 4, "2": "x"},
        "something": [1],
        "\u202eevil": 1,
        "long": "y" * 5000,
    }
    settings_read = reading(snapshot(segment(), allocator_settings=told)).settings
    assert settings_read["PYTORCH_CUDA_ALLOC_CONF"] == r"max_split_size_mb:64\n\x1b]0;x\x07"
    assert settings_read["roundup_power2_divisions"] == {"1": 4}
    assert settings_read["max_split_size"] == 64 * MIB
    assert "something" not in settings_read
    assert r"\u202eevil" in settings_read
    assert len(settings_read["long"]) < 1100


@given(st.text())
def test_text_from_a_file_is_fit_for_a_terminal(text):
    assert printable(text).isprintable()
    assert snapshot_pickle.printable("cuda:0") == "cuda:0"
