# SPDX-License-Identifier: Apache-2.0
"""A server that leaks slowly into fragmentation, an export a minute: what is flat, and what tells in time.

Every half hour comes a request for a lot of memory. Between these many small ones run side by side; each
leaves a session behind for a while. In the run that goes wrong one session in two minutes is never ended.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from together import Together, in_a_copy
from watched import Clock, Watched, take

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
TOTAL = 2048 * MIB
WEIGHTS, NEED = 900 * MIB, 600 * MIB
MINUTES = 300
SEEDS = (1, 2)
AT_ONCE, TURNS = 6, 3
LEAKED_A_MINUTE = 0.5
ALERT = 15
"""Minutes that an alert looks back: ``min_over_time(headroom[15m]) < need``."""

MODES = {
    "native": Together(memory="2GiB", timeout=200),
    "expandable": Together(memory="2GiB", alloc_conf="expandable_segments:True", timeout=200),
}


class Server:
    """A minute is a call; ``sessions`` outlive the requests that they belong to."""

    def __init__(self, seed: int, leaks: float) -> None:
        self.chance = random.Random(seed)
        self.leak = leaks / (AT_ONCE * TURNS)
        self.weights = take(WEIGHTS)
        self.sessions: list[tuple[float, Any]] = []
        self.now = 0
        warm_up = [take(NEED), *(take(90 * MIB) for _ in range(AT_ONCE - 2))]
        del warm_up

    def minute(self) -> None:
        chance = self.chance
        self.now += 1
        for _ in range(TURNS):
            in_flight = []
            for _ in range(AT_ONCE):
                in_flight.append(take(chance.randrange(40, 360) * MIB // 4))
                session = take(chance.randrange(5, 24) * MIB // 4)
                ends = float("inf") if chance.random() < self.leak else self.now + chance.randrange(3)
                self.sessions.append((ends, session))
        del in_flight, session
        self.sessions = [(ends, session) for ends, session in self.sessions if ends > self.now]


def run(seed: int, leaks: float) -> dict[str, Any]:
    import torch
    from emulator import control

    clock = Clock()
    watched = Watched()
    server = Server(seed, leaks)
    minutes: list[dict[str, Any]] = []
    verdicts: dict[str, int] = {}
    died = None
    while server.now < MINUTES and died is None:
        if server.now and server.now % 30 == 0:
            try:
                take(NEED)
            except torch.OutOfMemoryError:
                died = server.now
                watched.collect()
                points = watched.all("torch.memory.oom.verdicts")
                verdicts = {labels["torch.memory.oom.verdict"]: count for labels, count in points if count}
                break
        server.minute()
        clock.pass_by(60)
        told = watched.collect().figures()
        near = abs(told["headroom"] - NEED) < 50 * MIB  # else now and then is enough
        minutes.append(
            {
                "headroom": told["headroom"],
                "age": round(watched.age, 1),
                "reserved": told["reserved"],
                "used": control.memory(0, "used"),  # as NVML has it
                "unallocated": TOTAL - told["allocated"],
                "inactive_split": told["inactive_split"],
                "fits": control.would_fit(NEED) if near or server.now % 10 == 0 else None,
            }
        )
    return {"died": died, "minutes": minutes, "verdicts": verdicts}


def runs(leaks: float) -> list[dict[str, Any]]:
    return [in_a_copy(run, seed, leaks) for seed in SEEDS]


@MODES["native"].body
@MODES["expandable"].body
def leaking():
    return runs(LEAKED_A_MINUTE)


@MODES["native"].body
@MODES["expandable"].body
def healthy():
    return runs(0)


both_modes = pytest.mark.parametrize("mode", MODES)
each_seed = pytest.mark.parametrize("seed", SEEDS)


def told_of(gpu, mode: str, body, seed: int) -> dict[str, Any]:
    outcome = MODES[mode](gpu, body)[SEEDS.index(seed)]
    assert "error" not in outcome, outcome["error"]
    return outcome["value"]


def true_each_time(minutes: list[dict[str, Any]], page: int) -> None:
    """What headroom says of the big request, against what would have come of it."""
    checked = [minute for minute in minutes if minute["fits"] is not None]
    assert len(checked) > 10
    assert all(minute["fits"] for minute in checked if minute["headroom"] >= NEED)
    assert not any(minute["fits"] for minute in checked if minute["headroom"] + page < NEED)


@each_seed
@both_modes
def test_headroom_falls_below_the_need_minutes_before_it_dies_while_the_rest_is_flat(gpu, mode, seed):
    got = told_of(gpu, mode, leaking, seed)
    minutes, died = got["minutes"], got["died"]
    assert died is not None
    assert got["verdicts"] == {"fragmented": 1}
    assert len(minutes) == died > 60

    told = died  # the minute since when the alert has been on
    for number in range(died, 0, -1):
        if minutes[number - 1]["headroom"] < NEED and told - number <= ALERT:
            told = number
    print(f"{mode}, seed {seed}: told in minute {told}, died in minute {died}")
    assert died - told >= 5
    true_each_time(minutes, 0 if mode == "native" else 20 * MIB)
    assert all(minute["age"] < 1 for minute in minutes)

    for name in ("reserved", "used"):
        figures = [minute[name] for minute in minutes]
        assert min(figures) > 0.85 * TOTAL
        assert max(figures) - min(figures) <= 0.1 * TOTAL, name
        last = figures[-30:]
        assert max(last) - min(last) <= 0.02 * TOTAL, name
    assert minutes[-1]["unallocated"] > NEED  # enough of it, in pieces
    if mode == "expandable":
        assert all(minute["inactive_split"] is None for minute in minutes)


@each_seed
@both_modes
def test_a_healthy_run_of_the_same_length_gives_no_alarm(gpu, mode, seed):
    got = told_of(gpu, mode, healthy, seed)
    minutes = got["minutes"]
    assert (got["died"], len(minutes), got["verdicts"]) == (None, MINUTES, {})
    assert min(minute["headroom"] for minute in minutes) >= NEED
    true_each_time(minutes, 0 if mode == "native" else 20 * MIB)
    assert min(minute["used"] for minute in minutes) > 0.85 * TOTAL  # no fuller, no emptier than the other
