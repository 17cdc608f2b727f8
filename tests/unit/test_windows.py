# SPDX-License-Identifier: Apache-2.0
"""Windows against a brute-force account of the same life; changes against their definition."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentelemetry_instrumentation_torchmem.allocator.reading import AllocatorReading
from opentelemetry_instrumentation_torchmem.allocator.windows import (
    NOTHING_KNOWN,
    OpenWindows,
    Window,
    change,
    followed,
    total,
)
from opentelemetry_instrumentation_torchmem.requests.shapes import NO_INPUTS
from opentelemetry_instrumentation_torchmem.requests.story import Stay, attributes_of, steady

MIB = 1 << 20


def statistics(**figures) -> dict:
    """A native reading's statistics: `reserved=`, `allocated=`, `turnover=`, ... the rest is 0."""
    peak = figures.get("peak", figures.get("allocated", 0))
    allocated, turnover = figures.get("allocated", 0), figures.get("turnover", figures.get("allocated", 0))

    def family(current: int, peak: int = 0, grown: int = 0) -> dict:
        return {"all": {"current": current, "peak": peak, "allocated": grown, "freed": grown - current}}

    return {
        "allocated_bytes": family(allocated, peak, turnover),
        "active_bytes": family(allocated, figures.get("active_peak", peak)),
        "reserved_bytes": family(figures.get("reserved", 0), figures.get("reserved", 0)),
        "inactive_split_bytes": family(figures.get("split", 0)),
        "num_alloc_retries": figures.get("retries", 0),
        "num_ooms": figures.get("ooms", 0),
        "num_device_alloc": figures.get("device_allocations", 0),
        "num_sync_all_streams": figures.get("syncs", 0),
    }


def reading(device: int = 0, at: float = 0.0, **figures) -> AllocatorReading:
    return AllocatorReading(device, at, statistics(**figures))


def beside(life: list, living: list[list]) -> int:
    """How many are open at once with a window, itself included: what it is nested in and what is nested in it
    are no others, and of the rest those count that are nested in nothing else of the rest."""

    def above(life: list | None) -> list:
        found = []
        while life is not None:
            if life in living:
                found.append(life)
            life = life[2]
        return found

    line = above(life)
    parents = [(other, next(iter(above(other)[1:]), None)) for other in living]
    return 1 + sum(
        other not in line and (parent is None or (parent in line and parent is not life))
        for other, parent in parents
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 3)), max_size=200))
def test_each_window_sees_the_most_that_were_open_with_it(steps):
    windows = OpenWindows()
    ever: list[list] = []  # window, most seen so far, the one that it is nested in
    living: list[list] = []
    for opens, which, nests in [*steps, *[(False, 0, 0)] * len(steps)]:
        if opens:
            outer = ever[-1 - which % len(ever)] if ever and nests == 0 else None  # it may be closed already
            outer = living[which % len(living)] if living and nests == 1 else outer
            life = [windows.open(Window(), outer and outer[0]), 0, outer]
            ever.append(life)
            living.append(life)
        elif living:
            window, most, _ = living.pop(which % len(living))
            assert windows.close(window) == most
        for life in living:
            life[1] = max(life[1], beside(life, living))
        roots = sum(all(outer not in living for outer in outers(life)) for life in living)
        assert windows.count == roots
        assert list(windows.all_open()) == [life[0] for life in living]
        assert windows.any_open is bool(living)
    assert windows.count == 0
    assert not windows._sequences


def outers(life: list) -> list[list]:
    found = []
    while (life := life[2]) is not None:
        found.append(life)
    return found


def test_what_runs_beside_within_one_request_overlaps_and_the_rest_does_not():
    windows = OpenWindows()
    generate = windows.open(Window())
    forward = windows.open(Window(), generate)
    layer = windows.open(Window(), forward)
    assert windows.close(layer) == 1
    assert windows.close(forward) == 1
    first, second = windows.open(Window(), generate), windows.open(Window(), generate)
    assert windows.close(first) == 2
    other = windows.open(Window())
    assert windows.close(second) == 2  # never three at once
    assert (windows.close(generate), windows.close(other)) == (2, 2)


def test_what_outlives_its_outer_request_stands_for_itself():
    windows = OpenWindows()
    generate = windows.open(Window())
    forward = windows.open(Window(), generate)
    windows.close(generate)
    assert windows.count == 1
    other = windows.open(Window())
    assert windows.close(other) == 2
    assert windows.close(forward) == 2
    assert windows.close(windows.open(Window(), forward)) == 1  # nested in what has ended


def test_no_window_is_lost_between_threads():
    windows = OpenWindows()
    seen = []

    def live() -> None:
        for _ in range(2000):
            seen.append(windows.close(windows.open(Window())))

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert windows.count == 0
    assert windows.all_open() == ()
    assert 1 <= min(seen)
    assert max(seen) <= 4


def test_a_change_is_after_less_before():
    before = reading(
        reserved=100, allocated=60, turnover=500, peak=80, retries=1, device_allocations=5, syncs=2
    )
    after = reading(
        reserved=160,
        allocated=50,
        turnover=900,
        peak=130,
        retries=3,
        device_allocations=8,
        syncs=4,
        ooms=1,
        split=40,
    )
    got = change(before, after)
    assert got._asdict() == {
        "reserved_before": 100,
        "reserved_delta": 60,
        "allocated_before": 60,
        "allocated_delta": -10,
        "peak_growth": 50,
        "retries": 2,
        "ooms": 1,
        "device_allocations": 3,
        "device_syncs": 2,
        "turnover": 400,
        "inactive_split": 40,
        "reserved": 160,
    }
    assert got.fragmentation == 0.25


def test_a_reset_of_the_counters_inside_the_window_leaves_them_unknown():
    before = reading(allocated=60, turnover=500, retries=4)
    after = reading(allocated=70, turnover=600, retries=5)
    after.statistics["allocated_bytes"]["all"]["freed"] = 550  # 20 were live at the reset
    got = change(before, after)
    assert (got.retries, got.turnover, got.device_allocations) == (None, None, None)
    assert got.allocated_delta == 10


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"peak": 80}, {"peak": 80}, 0),
        ({"peak": 80}, {"peak": 95}, 15),
        ({"peak": 80}, {"peak": 30}, None),  # reset, and lower since
        ({"peak": 80, "active_peak": 99}, {"peak": 95, "active_peak": 96}, None),  # reset, and higher since
    ],
)
def test_a_peak_is_told_only_if_no_reset_hides_it(before, after, expected):
    assert change(reading(**before), reading(**after)).peak_growth == expected


def test_devices_add_up_and_an_unknown_one_has_no_sum():
    first = change(reading(reserved=10), reading(reserved=30))
    second = change(reading(1, reserved=5), reading(1, reserved=4))
    assert total([first, second]).reserved_delta == 19
    assert total([first, second]).reserved_before == 15
    assert total([first, NOTHING_KNOWN]).reserved_delta is None


def test_calls_one_after_another_add_up_from_the_first_ones_start():
    first = change(reading(reserved=10, retries=1), reading(reserved=30, retries=2))
    second = change(reading(reserved=30, retries=5), reading(reserved=25, retries=5, split=5))
    both = followed(first, second)
    assert (both.reserved_before, both.reserved_delta, both.retries) == (10, 15, 1)
    assert both.fragmentation == 0.2


# what a span says of them

FIGURES = (
    "reserved",
    "allocated",
    "turnover",
    "peak",
    "split",
    "retries",
    "ooms",
    "device_allocations",
    "syncs",
)
SOME = st.fixed_dictionaries({name: st.integers(0, 3) for name in FIGURES})


def readings(before: dict[str, int], grown: dict[str, int]):
    after = {name: before[name] + grown.get(name, 0) for name in FIGURES}
    return (0, 0.0, statistics(**before)), (0, 1.0, statistics(**after))


@settings(max_examples=1000)
@given(
    SOME,
    st.dictionaries(st.sampled_from(FIGURES), st.integers(-1, 2), max_size=3),
    st.integers(1, 2),
    st.sets(
        st.sampled_from(["num_device_alloc", "inactive_split_bytes", "num_alloc_retries", "reserved_bytes"])
    ),
)
def test_a_call_that_leaves_nothing_new_is_told_as_any_other(before, grown, concurrent, unknown):
    first, last = readings(before, grown)
    for name in unknown:
        first[2].pop(name), last[2].pop(name)
    quick = steady((first,), (last,), concurrent, True, NO_INPUTS)
    known = change(first, last)
    if quick is not None:
        assert quick == attributes_of(["cuda:0"], [known], concurrent)
        assert known[1] <= 0
        assert known[4] == known[5] == 0
    if not unknown and grown.keys() <= {"split"} and before["reserved"]:
        assert quick is not None
    records_nothing = steady((first,), (last,), concurrent, False, NO_INPUTS)
    assert records_nothing in (None, True)
    if records_nothing:
        assert (known[1] <= 0, known[4], known[5] or 0) == (True, 0, 0)


def test_calls_that_overlap_under_one_span_count_what_happened_once():
    def at(moment: float, reserved: int):
        return ((0, moment, statistics(reserved=reserved, retries=reserved // 10)),)

    def told(stay: Stay, moment: float, reserved: int, concurrent: int):
        attributes = stay.one_ended(at(moment, reserved), concurrent)
        return [attributes[f"torch.memory.{name}"] for name in ("reserved.delta", "allocation.retries")]

    stay = Stay()
    stay.one_began(at(0, 10))
    stay.one_began(at(1, 20))
    assert told(stay, 2, 30, 2) == [20, 2]
    stay.one_began(at(3, 40))
    assert told(stay, 5, 60, 2) == [50, 5]
    assert told(stay, 4, 50, 2) == [50, 5]  # one that was given up is finished late
    stay.one_began(at(6, 100))  # what happened between two stays is nobody's
    assert told(stay, 7, 110, 1) == [60, 6]
    stay.one_began(at(6.5, 105))  # and what the one before it has told is not told again
    assert told(stay, 8, 120, 1) == [70, 7]
