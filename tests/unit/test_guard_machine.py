# SPDX-License-Identifier: Apache-2.0
"""The guard's state machine, alone and driving real gates and places, against a model of what must not be."""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentelemetry_instrumentation_torchmem.guard import (
    CompactionOutcome,
    DeviceReadings,
    MemoryGuard,
    Places,
    Readings,
    watch,
)
from opentelemetry_instrumentation_torchmem.guard.machine import (
    Action,
    Machine,
    Place,
    Result,
    State,
    Timing,
    Transition,
)

TIMING = Timing(
    sick_for=20,
    cool_down=100,
    probe_period=5,
    probe_failures=3,
    drain_limit=60,
    hold_limit=0,
    clear_limit=40,
    restart_limit=80,
    min_uptime=0,
)
ACTS = (
    "readings", "policy", "clear", "compact", "on_ready", "on_restart", "take", "release", "all_sick", "exit",
    "tell", "spawn",
)  # fmt: skip
reached: Counter[Transition] = Counter()


class Broken(Exception):
    pass


class Worker:
    """One process: a guard whose clearing thread runs when the model says so."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.sick: bool | None = False
        self.compaction = CompactionOutcome()
        self.work: list[Any] = []
        self.clearing = False
        self.ended_at: float | None = None
        self.drained_at = 0.0
        self.back_before = 0.0
        self.seen = State.SERVING
        self.transitions: list[Transition] = []
        worker = self

        class Guard(MemoryGuard):
            def _spawn(self, work) -> None:
                worker.world.may_break("spawn", RuntimeError)
                worker.work.append(work)

            def _say(self, *arguments, **more) -> None:  # quiet
                pass

            def _tell(self, transition, before, after, reason) -> None:
                worker.note(transition, before)
                worker.world.may_break("tell")
                super()._tell(transition, before, after, reason)

        class BreakingPlaces(Places):
            def take(self) -> bool:
                world.may_break("take", OSError)
                return super().take()

            def release(self) -> None:
                super().release()
                world.may_break("release", OSError)

            def all_sick(self) -> bool:
                world.may_break("all_sick", OSError)
                return super().all_sick()

        self.places = BreakingPlaces(world.folder, world.at_most, restarts=10**9, restarts_per=0)
        self.guard = Guard(
            self.policy,
            timing=TIMING,
            places=self.places,
            steers=number % 3 != 2,
            clear=self.clear,
            compact=self.compact if number % 2 else None,
            restart="sigterm",
            on_ready=lambda ready: world.may_break("on_ready"),
            on_restart=lambda reason: world.may_break("on_restart"),
            readings=self.readings,
            clock=lambda: world.now,
        )
        self.guard._given.call = lambda name, act, late=None: act()  # a thread a call: too slow for so many
        self.lane = self.guard.gate.lane()
        self.in_flight = 0
        self.waiting = 0

    def note(self, transition: Transition, before: State) -> None:
        world = self.world
        self.transitions.append(transition)
        reached[transition] += 1
        if transition is Transition.DRAIN_BEGUN:
            if self.ended_at is not None:
                world.must(world.moved - self.ended_at >= TIMING.cool_down, "flaps faster than the cool-down")
            self.drained_at, self.back_before = world.moved, world.jumped_back
        elif self.guard.state is State.SERVING:
            self.ended_at = world.moved

    def readings(self, fresh: bool) -> Readings:
        self.world.may_break("readings")
        device = DeviceReadings("cuda:0", self.world.now, reserved=100, active=50, headroom=10)
        return Readings((device,), self.world.now, cleared=fresh)

    def policy(self, readings: Readings) -> bool | None:
        self.world.may_break("policy")
        return self.sick

    def clear(self) -> None:
        self.world.must(self.in_flight == 0, "cleared with a request in flight")
        self.world.must(self.guard.gate.closed, "cleared with the gate open")
        self.world.may_break("clear")

    def compact(self) -> CompactionOutcome:
        self.world.must(self.in_flight == 0, "compacted with a request in flight")
        self.world.must(self.guard.gate.closed and self.guard.gate.shut, "compacted with the gate open")
        self.world.may_break("compact")
        return self.compaction

    def arrive(self) -> None:
        """As the middleware has it."""
        self.lane.count += 1
        if self.guard.gate.closed:
            self.lane.count -= 1
            self.waiting += 1
        else:
            self.in_flight += 1

    def pass_gate(self) -> None:
        if not self.guard.gate.closed:
            self.in_flight += self.waiting
            self.lane.count += self.waiting
            self.waiting = 0

    def leave(self) -> None:
        self.in_flight -= 1
        self.lane.count -= 1


numbers = st.integers(0, 3)


class World(RuleBasedStateMachine):
    """Four workers of one node under an adversary."""

    @initialize(at_most=st.integers(1, 2))
    def begin(self, at_most: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = self.temporary.name
        self.at_most = at_most
        self.now = 1000.0
        self.moved = self.jumped_back = 0.0
        self.breaking: set[str] = set()
        self.broken_promises: list[str] = []
        self.exits = 0
        watch.ask_to_end = self.ask_to_end
        self.workers = [Worker(self, number) for number in range(4)]

    def must(self, holds: bool, promise: str) -> None:
        """Within an action, where the guard would swallow an assertion."""
        if not holds:
            self.broken_promises.append(promise)

    def may_break(self, what: str, error: type[Exception] = Broken) -> None:
        if what in self.breaking:
            raise error(what)

    def ask_to_end(self) -> None:
        self.exits += 1
        self.may_break("exit")

    @rule(seconds=st.sampled_from([1, 5, 15, 30, 100]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.moved += seconds
        for worker in self.workers:
            worker.guard.tick()

    @rule(number=numbers)
    def one_has_been_sick_for_long(self, number: int) -> None:
        self.workers[number].sick = True
        for _ in range(3):
            self.workers[number].guard.tick()
            self.now += TIMING.sick_for / 2
            self.moved += TIMING.sick_for / 2
        self.workers[number].guard.tick()

    @rule()
    def who_drains_is_seen_to(self) -> None:
        for worker in self.workers:
            worker.pass_gate()
            while worker.guard.state is State.DRAINING and worker.in_flight:
                worker.leave()
        self.now += TIMING.min_not_ready
        self.moved += TIMING.min_not_ready
        for worker in self.workers:
            worker.guard.tick()

    @precondition(lambda self: any(worker.work for worker in self.workers))
    @rule(late=st.booleans())
    def who_clears_does(self, late: bool) -> None:
        for worker in self.workers:
            if worker.work:
                if late:
                    worker.arrive()
                worker.work.pop(0)()

    @rule(seconds=st.sampled_from([-10_000, -50, 1000]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.now += seconds
        self.moved += max(0, seconds)
        self.jumped_back += max(0, -seconds)

    @rule(number=numbers)
    def one_looks(self, number: int) -> None:
        self.workers[number].guard.tick()

    @rule(number=numbers, sick=st.sampled_from([True, True, True, False, None]))
    def it_is(self, number: int, sick: bool | None) -> None:
        self.workers[number].sick = sick

    @rule()
    def all_are_sick(self) -> None:
        for worker in self.workers:
            worker.sick = True

    @rule(number=numbers)
    def a_request_arrives(self, number: int) -> None:
        self.workers[number].arrive()

    @rule(number=numbers)
    def a_request_ends(self, number: int) -> None:
        worker = self.workers[number]
        worker.pass_gate()
        if worker.in_flight:
            worker.leave()

    @rule(number=numbers, outcome=st.sampled_from([{}, {"refused": "no"}, {"missing": "gone"}]))
    def compaction_would(self, number: int, outcome: dict[str, str]) -> None:
        self.workers[number].compaction = CompactionOutcome(**outcome)

    @rule(what=st.sampled_from(ACTS))
    def something_breaks(self, what: str) -> None:
        self.breaking.add(what)

    @precondition(lambda self: self.breaking)
    @rule()
    def all_is_mended(self) -> None:
        self.breaking.clear()

    @invariant()
    def every_promise_is_kept(self) -> None:
        assert self.broken_promises == []

    @invariant()
    def no_more_drain_at_once_than_allowed(self) -> None:
        busy = [worker for worker in self.workers if worker.guard.state is not State.SERVING]
        assert len(busy) <= self.at_most, [worker.guard.state for worker in busy]

    @invariant()
    def readiness_is_what_the_state_says(self) -> None:
        for worker in self.workers:
            guard = worker.guard
            assert guard.ready() or guard.state is not State.SERVING or guard.gate.shut
            if guard.gate.refuses:
                assert guard.gate.closed
                assert not guard.ready()
                assert not guard.alive()

    @invariant()
    def the_gate_is_open_while_serving_and_draining(self) -> None:
        for worker in self.workers:
            if worker.guard.state in (State.SERVING, State.DRAINING) and not worker.work:
                assert not worker.guard.gate.closed

    def teardown(self) -> None:
        """Whatever has happened, it comes to rest: with time, and with all that was in flight at its end."""
        if not hasattr(self, "workers"):
            return
        self.breaking.clear()
        for worker in self.workers:
            worker.pass_gate()
            while worker.in_flight:
                worker.leave()
            worker.sick = False
        for _ in range(400):
            self.now += 1
            self.moved += 1
            for worker in self.workers:
                state = worker.guard.state
                worker.guard.tick()
                if worker.work:
                    worker.work.pop(0)()
                if state is State.DRAINING is worker.guard.state:
                    longest = TIMING.drain_limit + self.jumped_back - worker.back_before
                    assert self.moved - worker.drained_at <= longest + 1, "still draining"
        assert self.broken_promises == []
        event(f"transitions {sum(len(worker.transitions) for worker in self.workers) // 5 * 5}")
        for worker in self.workers:
            guard = worker.guard
            missing = Transition.RESTART_WANTED in worker.transitions and guard.gate.refuses
            assert guard.state is (State.RESTART_WANTED if missing else State.SERVING)
            assert guard.ready() is not missing
            assert worker.places._held is None or missing
            worker.pass_gate()
            assert not worker.waiting or missing, "an arrival is lost"
            worker.places.begin_anew()
        self.temporary.cleanup()


World.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(autouse=True)
def no_signals(monkeypatch):
    monkeypatch.setattr(watch, "ask_to_end", watch.ask_to_end)  # put back what the model sets


class TestTheGuardAgainstItsModel(World.TestCase):
    @classmethod
    def tearDownClass(cls) -> None:
        print(dict(reached))
        everywhere = {
            Transition.RECOVERED,
            Transition.GAVE_UP,
            Transition.RESTART_WANTED,
            Transition.STILL_SICK,
        }
        assert everywhere <= set(reached), "the model comes everywhere"


# the machine alone: what a cycle is


class Story:
    def __init__(self, timing: Timing = TIMING) -> None:
        self.told: list[str] = []
        self.machine = Machine(timing, 0.0, lambda transition, *_: self.told.append(transition.value))

    def draining(self, place: Place | None = None) -> Machine:
        machine = self.machine
        machine.judged(True, "short", 0.0, 0.0)
        assert machine.judged(True, "short", 20.0, 20.0) == (Action.TAKE_PLACE,)
        machine.placed(place or Place(True), 20.0)
        assert machine.state is State.DRAINING
        return machine


def test_it_must_have_been_sick_by_evidence_for_long_enough_and_without_a_break():
    machine = Story().machine
    assert machine.judged(True, "short", as_of=0.0, now=0.0) == ()
    assert machine.judged(True, "short", as_of=0.0, now=500.0) == (), "one snapshot, however old"
    assert machine.judged(False, "", as_of=500.0, now=500.0) == ()
    assert machine.judged(True, "short", as_of=505.0, now=505.0) == ()
    assert machine.judged(None, "", as_of=510.0, now=510.0) == (), "nobody knows: from the beginning"
    assert machine.judged(True, "short", as_of=526.0, now=526.0) == ()
    assert machine.judged(True, "short", as_of=546.0, now=546.0) == (Action.TAKE_PLACE,)


def test_without_a_place_it_serves_and_asks_again():
    machine = Story().machine
    machine.judged(True, "short", 0.0, 0.0)
    for now in (20.0, 25.0):
        assert machine.judged(True, "short", now, now) == (Action.TAKE_PLACE,)
        assert machine.judged(True, "short", now, now) == (), "one question at a time"
        assert machine.placed(Place(granted=False), now) == ()
        assert machine.state is State.SERVING
        assert machine.ready


def test_it_is_not_ready_long_enough_to_be_seen_however_idle_it_is():
    machine = Story().draining()
    assert not machine.ready
    assert machine.looked(idle=True, now=34.9) == ()
    assert machine.looked(idle=False, now=36.0) == ()
    assert machine.looked(idle=True, now=36.1) == (Action.CLEAR,)


def test_well_after_clearing_it_serves_and_leaves_itself_in_peace_for_the_cool_down():
    story = Story()
    machine = story.draining()
    machine.looked(True, 35.0)
    assert machine.finished(Result.WELL, "", 36.0) == (Action.READY, Action.RELEASE_PLACE)
    machine.judged(True, "again", 40.0, 40.0)
    assert machine.judged(True, "again", 135.9, 135.9) == ()
    assert machine.judged(True, "again", 136.0, 136.0) == (Action.TAKE_PLACE,)
    assert story.told == ["drain_begun", "clear_begun", "recovered"]


def test_still_sick_it_wants_a_restart_at_idle_once_and_serves_again_if_nobody_comes():
    story = Story()
    machine = story.draining()
    machine.looked(True, 35.0)
    assert machine.finished(Result.SICK, "short", 36.0) == (Action.WANT_RESTART,)
    assert not machine.ready
    assert machine.looked(idle=False, now=37.0) == ()
    assert machine.looked(idle=True, now=38.0) == (Action.EXIT,)
    assert machine.looked(idle=True, now=39.0) == ()
    assert machine.looked(idle=True, now=116.0) == (Action.READY, Action.RELEASE_PLACE)
    assert story.told[-2:] == ["restart_wanted", "not_restarted"]


@pytest.mark.parametrize(("place", "allowed"), [(Place(True, may_restart=False), True), (Place(True), False)])
def test_where_no_restart_is_allowed_it_serves_sick_as_it_is(place, allowed):
    story = Story()
    machine = story.draining(place)
    machine.looked(True, 35.0)
    assert machine.finished(Result.SICK, "short", 36.0, allowed) == (Action.READY, Action.RELEASE_PLACE)
    assert story.told[-1] == "still_sick"


def test_never_idle_it_gates_arrivals_at_the_drains_limit_and_then_gives_up():
    story = Story()
    machine = story.draining()
    assert machine.looked(idle=False, now=79.9) == ()
    assert machine.looked(idle=False, now=80.0) == (Action.GATE_AND_CLEAR,)
    assert machine.finished(Result.BUSY, "a stream", 90.0) == (Action.READY, Action.RELEASE_PLACE)
    assert story.told[-1] == "gave_up"


def test_a_request_that_slips_in_before_the_gate_closes_sends_it_back_to_draining():
    machine = Story().draining()
    machine.looked(True, 36.0)
    assert machine.finished(Result.BUSY, "one slipped in", 36.1) == ()
    assert machine.state is State.DRAINING
    assert machine.looked(True, 36.2) == (Action.CLEAR,)


def test_where_readiness_steers_nothing_it_stays_ready_and_gates_at_once():
    machine = Story().draining(Place(True, steers=False))
    assert machine.ready
    assert machine.looked(idle=False, now=20.1) == (Action.GATE_AND_CLEAR,)
    assert machine.finished(Result.WELL, "", 21.0) == (Action.RELEASE_PLACE,)


def test_clearing_that_hangs_wants_a_restart_and_is_forgiven_if_it_ends_after_all():
    machine = Story().draining()
    machine.looked(True, 36.0)
    assert machine.looked(True, 75.9) == ()
    assert machine.looked(True, 76.0) == (Action.WANT_RESTART,)
    assert machine.finished(Result.WELL, "", 77.0) == (Action.READY, Action.RELEASE_PLACE)


def test_what_is_missing_leaves_no_way_but_a_restart_even_where_readiness_steers_nothing():
    machine = Story().draining(Place(True, steers=False))
    machine.looked(False, 21.0)
    assert machine.finished(Result.MISSING, "gone", 22.0) == (Action.NOT_READY, Action.WANT_RESTART)
    assert not machine.ready
    assert machine.looked(False, 10_000.0) == (Action.EXIT,)
    assert machine.looked(True, 20_000.0) == ()
    assert machine.state is State.RESTART_WANTED


def test_a_drain_that_no_probe_would_see_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"drain_limit=20 is not allowed \(at least probe_period x") as error:
        Timing(drain_limit=20)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cool_down=-1"):
        Timing(cool_down=-1)
