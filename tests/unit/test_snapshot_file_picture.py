# SPDX-License-Identifier: Apache-2.0
"""What is drawn and told of a snapshot: every byte once, in its state; nothing runs, nothing is fetched."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentelemetry_instrumentation_torchmem.allocator.rules import Rules
from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.allocator.snapshot import analyse
from opentelemetry_instrumentation_torchmem.cli import snapshot_picture
from opentelemetry_instrumentation_torchmem.cli.snapshot_file import Block, Segment, Snapshot
from opentelemetry_instrumentation_torchmem.cli.snapshot_map import Group, groups, pieces
from opentelemetry_instrumentation_torchmem.cli.snapshot_text import summary

MIB = 1 << 20
BASE = 0x7F0000000000
SETTINGS = AllocatorSettings.parse("", "default")
EXPANDABLE = AllocatorSettings.parse("expandable_segments:True", "default")
RULES = Rules.of(SETTINGS)
PER_PIXEL = 10  # units of the picture
WIDTH = 12_000
STATES = {"allocated": "active_allocated", "pending_free": "active_pending_free", "free": "inactive"}


def segment(
    *blocks: tuple[int, str], address=BASE, device=0, stream=0, kind="large", pool=(0, 0), expandable=False
):
    placed, at = [], address
    for size, state in blocks:
        placed.append(Block(at, size, state))
        at += size
    allocated = sum(size for size, state in blocks if state == "allocated")
    return Segment(device, address, at - address, stream, kind, pool, expandable, allocated, placed)


def raw(one: Segment) -> dict:
    """As the allocator tells it."""
    return {
        "device": one.device,
        "address": one.address,
        "total_size": one.size,
        "allocated_size": one.allocated,
        "active_size": sum(block.size for block in one.blocks if block.state != "free"),
        "stream": one.stream,
        "segment_type": one.kind,
        **({} if one.pool is None else {"segment_pool_id": one.pool}),
        "is_expandable": one.expandable,
        "blocks": [
            {"address": block.address, "size": block.size, "state": STATES[block.state]}
            for block in one.blocks
        ],
    }


def grouped(*segments: Segment, given=SETTINGS) -> list[Group]:
    return groups(segments, analyse([raw(one) for one in segments], given, {}))


def draw(*segments: Segment, given=SETTINGS, name="some.pickle") -> ElementTree.Element:
    return ElementTree.fromstring(snapshot_picture.svg(name, grouped(*segments, given=given)))


def strokes(picture: ElementTree.Element) -> list[tuple[str, int, int, int]]:
    """(look, x, y, width) of all that is drawn in the groups."""
    found = []
    for path in picture.iter("{http://www.w3.org/2000/svg}path"):
        moves = re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d"))
        assert "".join(f"M{x} {y}h{width}" for x, y, width in moves) == path.get("d")
        found += [(path.get("class"), int(x), int(y), int(width)) for x, y, width in moves]
    return found


def texts(picture: ElementTree.Element) -> str:
    return " ".join(picture.itertext())


def told(*segments: Segment, rows=20, given=SETTINGS, settings=None) -> list[str]:
    told_of = [raw(one) for one in segments]
    snapshot = Snapshot(list(segments), told_of, settings or {}, 1234)
    return list(summary("some.pickle", snapshot, analyse(told_of, given, {}), rows))


# Where the free bytes lie


def looks(*segments: Segment, rules=RULES) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in segments:
        for _, size, look in pieces(one, rules):
            found[look] += size
    return found


BLOCKS = st.lists(
    st.tuples(
        st.integers(1, 60 * 2048).map(lambda n: n * 512), st.sampled_from(["allocated", "allocated", "free"])
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(st.lists(st.tuples(BLOCKS, st.booleans()), min_size=1, max_size=5))
def test_each_byte_is_drawn_once_and_the_sums_are_those_of_the_analysis(plans):
    segments, at = [], BASE
    for blocks, expandable in plans:
        merged: list[tuple[int, str]] = []
        for size, state in blocks:  # the allocator keeps no two free blocks side by side
            if merged and state == "free" and merged[-1][1] == "free":
                merged[-1] = (merged[-1][0] + size, "free")
            else:
                merged.append((size, state))
        if expandable:  # whole pages
            size = sum(size for size, _ in merged)
            merged.append((-size % (20 * MIB) or 20 * MIB, "allocated"))
        segments.append(segment(*merged, address=at, expandable=expandable))
        at += 1 << 40
    for one in segments:
        parts = list(pieces(one, RULES))
        assert parts[0][0] == one.address
        assert sum(size for _, size, _ in parts) == one.size
        assert all(a + size == b for (a, size, _), (b, _, _) in pairwise(parts))
    device = analyse([raw(one) for one in segments], EXPANDABLE, {})[0]
    found = looks(*segments)
    assert found["allocated"] == device.allocated
    assert found["split_free"] == device.split_free
    assert found["cached_free"] == device.cached_free


def test_only_whole_pages_of_an_expandable_segment_are_wholly_free():
    one = segment((MIB, "allocated"), (50 * MIB, "free"), (9 * MIB, "allocated"), expandable=True)
    assert [(address - BASE, size, look) for address, size, look in pieces(one, RULES)] == [
        (0, MIB, "allocated"),
        (MIB, 19 * MIB, "split_free"),
        (20 * MIB, 20 * MIB, "cached_free"),
        (40 * MIB, 11 * MIB, "split_free"),
        (51 * MIB, 9 * MIB, "allocated"),
    ]


# The picture


def test_segments_are_rows_to_scale_the_largest_first():
    picture = draw(
        segment((10 * MIB, "allocated"), (10 * MIB, "free")),
        segment((40 * MIB, "free"), address=BASE * 2),
    )
    drawn = strokes(picture)
    [whole, used, free] = sorted(drawn, key=lambda stroke: (stroke[2], stroke[1]))
    assert whole[0] == "cached_free"
    assert (used[0], free[0]) == ("allocated", "split_free")
    assert whole[2] < used[2] == free[2]
    seam = 10
    assert WIDTH - seam < whole[3] <= WIDTH
    assert WIDTH / 4 - seam < used[3] <= WIDTH / 4
    assert (whole[1], used[1], free[1]) == (0, 0, WIDTH // 4)


def test_groups_are_headed_by_device_pool_and_stream_the_defaults_first():
    picture = draw(
        segment((MIB, "free"), device=1),
        segment((MIB, "free"), stream=0x77, address=BASE + MIB, kind="small"),
        segment((MIB, "free"), pool=(3, 1), address=BASE + 2 * MIB, expandable=True),
        segment((2 * MIB, "free"), address=BASE + 3 * MIB),
    )
    assert re.findall(
        r"cuda:\d|\w+ (?:pool|3:1), [\w ]+, \w+(?:, expandable)?(?=  ?[\d])", texts(picture)
    ) == [
        "cuda:0",
        "default pool, default stream, large",
        "default pool, stream 0x77, small",
        "pool 3:1, default stream, large, expandable",
        "cuda:1",
        "default pool, default stream, large",
    ]


def test_the_largest_free_block_is_outlined_and_named():
    picture = draw(
        segment((5 * MIB, "free"), (5 * MIB, "allocated"), (10 * MIB, "free")),
        segment((20 * MIB, "allocated"), address=BASE * 2),
    )
    [mark] = [each for each in picture.iter() if each.get("class") == "mark"]
    assert (int(mark.get("x")), int(mark.get("width"))) == (WIDTH // 2, WIDTH // 2)
    assert "10.0 MiB free" in texts(picture)
    assert "the largest free block 10.0 MiB: default pool, default stream, large" in texts(picture)


def test_a_tiny_block_that_pins_a_segment_is_seen():
    drawn = strokes(draw(segment((512 * MIB, "free"), (512, "allocated"), (512 * MIB, "free"))))
    [(x, width)] = [(x, width) for look, x, _, width in drawn if look == "allocated"]
    assert abs(x - WIDTH // 2) <= 1
    assert width == PER_PIXEL


def test_blocks_below_a_pixel_are_drawn_together_and_said_to_be():
    dense = [(512, "allocated"), (512, "free")] * 50
    drawn = strokes(draw(segment((500 * MIB, "allocated"), *dense, (500 * MIB, "free"))))
    assert [stroke[0] for stroke in sorted(drawn, key=lambda stroke: stroke[1])] == [
        "allocated",
        "mixed",
        "split_free",
    ]


def test_a_segment_of_very_many_blocks_runs_over_several_rows():
    one = segment(*[(MIB, "allocated"), (MIB, "free")] * 5000, expandable=True)
    picture = draw(one)
    drawn = strokes(picture)
    rows = Counter(y for _, _, y, _ in drawn)
    assert 20 < len(rows) <= 256
    assert "a tick where a segment begins" in texts(picture)
    assert len([each for each in picture.iter() if each.get("class") == "begin"]) == 1
    seen: Counter[str] = Counter()
    for look, _, _, width in drawn:
        seen[look] += width
    assert 0.9 < seen["allocated"] / seen["split_free"] < 1.1


def test_very_many_segments_share_rows():
    many = [segment((2 * MIB, "allocated"), address=BASE + number * 2 * MIB) for number in range(20_000)]
    drawn = strokes(draw(*many))
    assert len(drawn) == 20_000
    assert len({y for _, _, y, _ in drawn}) <= 700
    assert all(x + width <= WIDTH + 30 for _, x, _, width in drawn)
    by_row: dict[int, list[tuple[int, int]]] = {}
    for _, x, y, width in drawn:
        by_row.setdefault(y, []).append((x, width))
    for row in by_row.values():
        row.sort()
        assert all(x + width <= after for (x, width), (after, _) in pairwise(row))


def test_a_segment_a_byte_beside_one_of_terabytes_is_drawn():
    picture = draw(
        segment((1 << 45, "allocated"), (1 << 45, "free")),
        *(segment((1, "free"), address=BASE * 2 + number) for number in range(2000)),
    )
    assert max(int(x) + int(width) for _, x, _, width in strokes(picture)) <= WIDTH + 30


@pytest.mark.parametrize("per_segment", [100, 25_000])
def test_a_hundred_thousand_blocks_make_a_file_that_browsers_open(per_segment):
    blocks = [
        (512 + index * 7919 % 400 * 512, ("allocated", "free")[index % 2]) for index in range(per_segment)
    ]
    many = [segment(*blocks, address=BASE + (number << 40)) for number in range(100_000 // per_segment)]
    page = snapshot_picture.page("some.pickle", grouped(*many), told(*many))
    assert len(page) < 3_000_000
    assert page.count("<path") <= len(snapshot_picture.LEGEND)


def test_very_many_groups_are_drawn_as_far_as_they_can_be_read():
    many = [segment((MIB, "free"), address=BASE + number * MIB, stream=number) for number in range(5000)]
    picture = draw(*many)
    assert "4,800 more pools and streams with 4.69 GiB" in texts(picture)
    assert len(strokes(picture)) == 200


def test_nothing_reserved_is_a_picture_too():
    assert "Nothing was reserved." in texts(draw())


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "]]>&amp;\"'"])
def test_a_name_is_text_whatever_is_in_it(name):
    one = segment((MIB, "free"))
    assert name in texts(draw(one, name=name))
    page = snapshot_picture.page(name, grouped(one), told(one))
    assert name not in page
    assert "<script" not in page
    assert "<img" not in page


def test_nothing_runs_and_nothing_is_fetched():
    one = segment((MIB, "free"))
    page = snapshot_picture.page("some.pickle", grouped(one), told(one))
    svg = snapshot_picture.svg("some.pickle", grouped(one))
    for written in (page, svg):
        assert set(re.findall(r"https?://[^\"' >]+", written)) == {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<script|<link|<image|href|src=|@import|url\(|\bon\w+=", written)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    assert "prefers-color-scheme:dark" in svg


def test_what_a_segment_holds_is_told_where_it_is_pointed_at():
    picture = draw(segment((3 * MIB, "allocated"), (MIB, "free")))
    assert f"segment {BASE:#x}, 4.00 MiB in 2 blocks, 3.00 MiB allocated" in texts(picture)


# The summary


def test_the_summary_tells_the_ledger_the_places_and_the_sizes():
    lines = told(
        segment((12 * MIB, "allocated"), (8 * MIB, "free")),
        segment((20 * MIB, "free"), address=BASE * 2),
        segment((512, "allocated"), (2 * MIB - 512, "free"), address=BASE * 3, kind="small", stream=5),
        settings={"expandable_segments": False, "roundup_power2_divisions": {"1": 0, "2": 4}, "x": ""},
    )
    text = "\n".join(lines)
    assert lines[0] == "some.pickle: 1.21 KiB, 3 segments, 5 blocks"
    for line in (
        r"reserved +42.0 MiB",
        r"allocated +12.0 MiB +28.6 %",
        r"pending free +0 B +0.0 %",
        r"free in partly used segments +10.0 MiB +23.8 %",
        r"free as whole segments or pages +20.0 MiB +47.6 %",
        r"largest hole, in any pool +20.0 MiB",
        r"large +20.0 MiB",
        r"default pool, default stream, large +40.0 MiB +12.0 MiB +0 B +28.0 MiB +2 +20.0 MiB",
        r"default pool, stream 0x5, small +2.00 MiB +512 B +0 B +2.00 MiB +1 +2.00 MiB",
        r"up to 512 B +1 +512 B +0 +0 B",
        r"up to 20.0 MiB +1 +12.0 MiB +1 +20.0 MiB",
        "allocator settings: expandable_segments=False roundup_power2_divisions=\\[2:4\\] x=\N{EN DASH}",
    ):
        assert re.search(rf"^ *{line}$", text, re.MULTILINE), line


def test_the_summary_tells_what_cannot_be_known():
    text = "\n".join(
        told(segment((20 * MIB, "free"), pool=(0, 3)), segment((MIB, "allocated"), address=BASE * 2))
    )
    assert re.search(r"free in partly used segments +0 B to 20.0 MiB +\(private pools\)", text)
    assert re.search(r"free as whole segments or pages +0 B to 20.0 MiB +\(private pools\)", text)
    assert text.count("(private pools) Whether a private pool that holds free memory still has an owner") == 1


def test_the_summary_leaves_the_small_places_out_and_says_so():
    many = [
        segment(((number + 1) * MIB, "free"), address=BASE + (number << 30), stream=number)
        for number in range(9)
    ]
    lines = told(*many, rows=3)
    assert "  6 more with 21.0 MiB reserved (--top)" in lines
    assert len([line for line in lines if line.lstrip().startswith("default pool")]) == 3


def test_a_snapshot_of_nothing_is_told_as_such():
    assert told() == [
        "some.pickle: 1.21 KiB, 0 segments, 0 blocks",
        "Nothing was reserved when it was taken.",
    ]


# What a release does not tell


def test_where_the_release_tells_no_pools_the_picture_says_no_more_than_the_text():
    old = segment((MIB, "allocated"), (19 * MIB, "free"), pool=None)
    idle = segment((20 * MIB, "free"), address=BASE * 2, pool=None)
    assert "(torch release)" in "\n".join(told(old, idle))
    picture = draw(old, idle)
    assert {look for look, *_ in strokes(picture)} == {"allocated", "untold_free"}
    assert "default pool" not in texts(picture)
    assert "default stream, large" in texts(picture)


def test_where_pages_are_not_those_of_the_settings_the_picture_says_no_more_than_the_text():
    odd = segment((MIB, "allocated"), (29 * MIB, "free"), expandable=True)
    assert "(page size)" in "\n".join(told(odd, given=EXPANDABLE))
    assert {look for look, *_ in strokes(draw(odd, given=EXPANDABLE))} == {"allocated", "untold_free"}


# Time


class Walked(list):
    """A list that counts how often it is walked through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_many_devices_take_no_more_than_their_segments():
    many = Walked(segment((MIB, "free"), device=number) for number in range(60))
    told_of = [raw(one) for one in many]
    devices = analyse(told_of, SETTINGS, {})
    many.times = 0
    list(summary("some.pickle", Snapshot(many, told_of, {}, 1234), devices, 20))
    assert many.times < 5
    drawn = Walked(groups(many, devices))
    drawn.times = 0
    snapshot_picture.svg("some.pickle", drawn)
    assert drawn.times < 5
