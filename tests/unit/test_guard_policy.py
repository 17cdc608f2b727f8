# SPDX-License-Identifier: Apache-2.0
"""What is sick, by the two policies that come with the package and by any callable."""

from __future__ import annotations

import pytest

from opentelemetry_instrumentation_torchmem.allocator.growth import SPAN, Growth
from opentelemetry_instrumentation_torchmem.allocator.reading import AllocatorReading
from opentelemetry_instrumentation_torchmem.allocator.windows import NOTHING_KNOWN
from opentelemetry_instrumentation_torchmem.guard import DeviceReadings, Headroom, Readings, Slack, Verdict
from opentelemetry_instrumentation_torchmem.guard.policy import judged

MIB, GIB = 1 << 20, 1 << 30


def seen(*devices: DeviceReadings, **more) -> Readings:
    return Readings(devices, at=100.0, **more)


def device(headroom: int | None = None, **more) -> DeviceReadings:
    at = None if headroom is None else 90.0
    return DeviceReadings("cuda:0", at=99.0, headroom=headroom, headroom_at=at, **more)


@pytest.mark.parametrize(("headroom", "sick"), [(512 * MIB - 1, True), (512 * MIB, False)])
def test_headroom_below_the_need_is_sick_and_enough_is_well(headroom, sick):
    verdict = Headroom(need=512 * MIB)(seen(device(headroom)))
    assert verdict.sick is sick
    assert verdict.as_of == 90.0, "as old as the snapshot, not as the reading"


def test_the_need_is_the_largest_recent_growth_unless_one_is_given():
    short = device(300 * MIB, need=400 * MIB)
    assert Headroom()(seen(short)).sick
    assert not Headroom(need=200 * MIB)(seen(short)).sick


def test_devices_that_differ_have_needs_of_their_own():
    small, large = (DeviceReadings(f"cuda:{n}", 0.0, headroom=GIB, headroom_at=0.0) for n in (0, 1))
    assert not Headroom(need={"cuda:0": GIB})(seen(small, large)).sick
    assert Headroom(need={"cuda:1": 2 * GIB})(seen(small, large)).reason.startswith("cuda:1: ")


def test_once_sick_it_takes_a_margin_to_be_well_but_not_after_clearing():
    little_more = device(105 * MIB)
    policy = Headroom(need=100 * MIB)
    assert not policy(seen(little_more)).sick
    assert policy(seen(little_more, was_sick=True)).sick
    assert not policy(seen(little_more, was_sick=True, cleared=True)).sick


@pytest.mark.parametrize(
    ("trapped", "limit", "sick"),
    [
        (5 * GIB, 16 * GIB, True),
        (3 * GIB, 16 * GIB, False),  # less than the share
        (GIB - 1, 2 * GIB, False),  # more than the share, below the floor
    ],
)
def test_much_trapped_of_the_limit_is_sick_and_a_small_reserve_never_makes_it_so(trapped, limit, sick):
    # of what is reserved 97 % are trapped: the ratio that clearing alone can raise is not looked at
    trapping = device(4 * GIB, trapped=trapped, limit=limit, reserved=trapped + MIB)
    assert Headroom(need=GIB)(seen(trapping)).sick is sick


def test_what_is_trapped_is_no_reason_to_restart():
    trapping = device(4 * GIB, trapped=8 * GIB, limit=16 * GIB)
    assert Headroom(need=GIB)(seen(trapping)).sick
    assert Headroom(need=GIB)(seen(trapping, cleared=True)).sick is False
    assert Headroom()(seen(trapping, cleared=True)).sick is None


def test_nothing_known_is_neither_sick_nor_well():
    assert Headroom()(seen()).sick is None
    assert Headroom(need=GIB)(seen(device())).sick is None
    assert Headroom()(seen(device(GIB))).sick is None
    assert Slack()(seen(device(reserved=0, active=0))).sick is None


def test_one_sick_device_of_several_is_enough_and_is_named():
    others = [DeviceReadings(f"cuda:{n}", 0.0, headroom=GIB, headroom_at=0.0) for n in (0, 2)]
    short = DeviceReadings("cuda:1", 0.0, headroom=MIB, headroom_at=0.0)
    verdict = Headroom(need=512 * MIB)(seen(others[0], short, others[1]))
    assert verdict.reason == "cuda:1: headroom of 1 MiB is below the need of 512 MiB"


@pytest.mark.parametrize(
    ("active", "cleared", "sick"),
    [(640, False, True), (650, False, False), (640, True, True), (790, True, True), (800, True, False)],
)
def test_slack_has_the_storys_numbers_and_less_is_allowed_after_clearing(active, cleared, sick):
    assert Slack()(seen(device(reserved=1000, active=active), cleared=cleared)).sick is sick
    assert (Slack().sick, Slack().well, Slack().sick_for) == (0.35, 0.20, 300.0)


@pytest.mark.parametrize(
    ("said", "sick", "reason"),
    [
        (True, True, "the policy says so"),
        (False, False, ""),
        (None, None, ""),
        ("too hot", True, "too hot"),
        ("", False, ""),
        (Verdict(True, "mine"), True, "mine"),
    ],
)
def test_any_callable_is_a_policy(said, sick, reason):
    verdict = judged(said, at=7.0)
    assert (verdict.sick, verdict.reason, verdict.as_of) == (sick, reason, 7.0)


def test_a_policy_that_returns_something_else_is_told_what_is_allowed():
    with pytest.raises(
        TypeError, match=r"a policy returned 0\.5; allowed are a Verdict, a text, a bool and None"
    ):
        judged(0.5, at=0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Headroom(need=-1),
            r"need=-1 is not allowed \(bytes above 0, for each device or by its name",
        ),
        (lambda: Headroom(trapped_share=1.5), r"trapped_share=1.5 is not allowed"),
        (lambda: Slack(sick=0.3, well=0.4), r"well=0.4 is not allowed \(above 0 and up to sick=0.3\)"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# what requests have needed


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_need_is_what_a_request_took_for_its_own_time_and_is_forgotten_after_an_hour():
    clock = Clock()
    growth = Growth(clock)
    reading = [AllocatorReading(0, 0.0, {})]

    def note(reserved: int, kept: int = 0, concurrent: int = 1) -> None:
        change = NOTHING_KNOWN._replace(reserved_delta=reserved, allocated_delta=kept)
        growth.note(reading, [change], concurrent)

    assert growth.largest(0) is None
    note(14 * GIB, kept=14 * GIB)  # a model that was loaded at first use
    assert growth.largest(0) is None
    note(300)
    note(200)
    assert (growth.largest(0), growth.largest(1)) == (300, None)
    note(2000, concurrent=4)  # each of four that overlapped saw the growth of all
    assert growth.largest(0) == 500
    clock.now = SPAN / 2
    note(400)
    assert growth.largest(0) == 500
    clock.now = SPAN + SPAN / 12
    assert growth.largest(0) == 400
    clock.now = 2 * SPAN
    assert growth.largest(0) is None
