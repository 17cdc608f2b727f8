# SPDX-License-Identifier: Apache-2.0
"""What the user gives the guard to call: it may hang, or raise anything, and the guard goes on."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.guard import CompactionOutcome, MemoryGuard, Readings
from opentelemetry_instrumentation_torchmem.guard.given import EndsError, Given, HangsError
from opentelemetry_instrumentation_torchmem.guard.machine import State, Timing


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


class Driven:
    """A guard that the test ticks, on a clock of its own."""

    def __init__(self, policy: Any = None, call_limit: float = 0.05, **options: Any) -> None:
        self.now = 0.0
        self.sick = True
        timing = Timing(sick_for=10, cool_down=0, probe_period=5, probe_failures=1, drain_limit=60,
                        clear_limit=20, hold_limit=0, min_uptime=0, call_limit=call_limit)  # fmt: skip
        options = {"clear": lambda: None, "readings": self.readings, "steers": True} | options
        self.guard = MemoryGuard(
            policy or (lambda readings: self.sick), timing=timing, clock=lambda: self.now, **options
        )

    def readings(self, fresh: bool) -> Readings:
        return Readings((), self.now, cleared=fresh)

    def pass_by(self, seconds: float, joins: bool = True) -> State:
        self.now += seconds
        self.guard.tick()
        if self.guard._clearing is not None and joins:
            self.guard._clearing.join(20)
        return self.guard.state

    def drain(self) -> State:
        self.pass_by(0)
        return self.pass_by(10)


def ends(*_: object) -> None:
    raise SystemExit(3)


def until(true: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["hangs", "ends"])
def test_an_on_ready_that_hangs_or_ends_its_thread_does_not_keep_the_server_not_ready(what, release, caplog):
    told: list[bool] = []

    def on_ready(ready: bool) -> None:
        told.append(ready)
        if len(told) == 1:
            release.wait() if what == "hangs" else ends()

    driven = Driven(on_ready=on_ready)
    with caplog.at_level(logging.WARNING):
        assert driven.drain() is State.DRAINING
        driven.sick = False
        assert driven.pass_by(6) is State.SERVING
        assert driven.guard.ready()
        driven.pass_by(1)
    lines = [record.getMessage() for record in caplog.records if "on_ready" in record.getMessage()]
    assert len(lines) == 1
    assert ("has not returned within 0.05 s" if what == "hangs" else "SystemExit(3)") in lines[0]
    release.set()
    until(lambda: not driven.guard._given.hangs("on_ready"))
    driven.pass_by(1)
    assert told == [False, True], "what it missed is told once it has ended"


@pytest.mark.parametrize("what", ["policy", "lease", "readings"])
def test_what_hangs_while_serving_is_said_once_and_asked_again_when_it_has_ended(what, release, caplog):
    calls: list[str] = []
    returned: list[str] = []

    def hangs(*arguments: Any) -> Any:
        calls.append(what)
        if len(calls) == 1:
            release.wait()
        if what == "lease":
            return lambda: returned.append("given back")
        return True if what == "policy" else Readings((), driven.now, cleared=arguments[0])

    driven = Driven(**{what: hangs})
    with caplog.at_level(logging.WARNING):
        driven.drain()
        for _ in range(3):
            assert driven.pass_by(10) is State.SERVING
    assert len(calls) == 1, "one thread hangs, not one for each look"
    lines = [
        record.getMessage() for record in caplog.records if f"{what} has not returned" in record.getMessage()
    ]
    assert len(lines) == 1
    release.set()
    until(lambda: not driven.guard._given.hangs(what))
    assert returned == (["given back"] if what == "lease" else []), "a lease that came late is not kept"
    assert State.DRAINING in {driven.pass_by(10), driven.pass_by(10)}


def test_a_lease_that_comes_when_the_guard_has_been_stopped_is_given_back():
    def lease() -> Any:
        driven.guard.stop()
        return lambda: returned.append("given back")

    returned: list[str] = []
    driven = Driven(lease=lease)
    assert driven.drain() is State.SERVING
    assert returned == ["given back"]


def test_a_policy_that_ends_its_thread_does_not_end_the_guards(caplog):
    guard = MemoryGuard(ends, interval=0.01, readings=lambda fresh: Readings((), 0.0, cleared=fresh))
    with caplog.at_level(logging.WARNING):
        guard.start()
        until(lambda: any("SystemExit(3)" in record.getMessage() for record in caplog.records))
        time.sleep(0.05)
        assert guard._thread.is_alive()
        guard.stop()


@pytest.mark.parametrize("what", ["clear", "compact", "on_restart", "lease", "readings"])
def test_whatever_ends_its_thread_the_server_serves_again(what):
    driven = Driven(**{"on_restart": ends, what: ends}, restart="callback")
    driven.drain()
    for _ in range(100):
        driven.pass_by(10)
    driven.sick = False
    driven.pass_by(400)
    assert driven.pass_by(400) is State.SERVING
    assert driven.guard.ready()
    assert not driven.guard.gate.closed


@pytest.mark.parametrize("restart", ["callback", "liveness"])
def test_a_clear_that_hangs_opens_the_gate_at_its_limit_and_the_server_stays_not_ready_until_it_ends(
    restart, release
):
    def compact() -> CompactionOutcome:
        compacted.append(True)
        return CompactionOutcome()

    compacted: list[bool] = []
    driven = Driven(clear=release.wait, restart=restart, on_restart=lambda reason: None, compact=compact)
    gate = driven.guard.gate
    driven.drain()
    assert driven.pass_by(6, joins=False) is State.CLEARING
    until(lambda: gate.closed)
    assert driven.pass_by(19, joins=False) is State.CLEARING
    assert gate.closed
    assert driven.pass_by(1, joins=False) is State.RESTART_WANTED
    assert not gate.closed, "who needs no GPU is served"
    with driven.guard.request():
        assert driven.pass_by(10_000, joins=False) is State.RESTART_WANTED
        assert not driven.guard.ready()
        assert driven.guard.alive() is (restart == "callback")
        release.set()
        driven.guard._clearing.join(20)
    assert (gate.closed, gate.shut, compacted) == (False, False, []), "nothing is moved behind an open gate"
    assert driven.pass_by(301) is State.SERVING, "it has ended: it serves again as it is"
    assert driven.guard.ready()


def test_a_compaction_that_hangs_keeps_the_gate_shut_what_it_moved_is_not_there(release):
    moving = threading.Event()

    def compact() -> CompactionOutcome:
        moving.set()
        release.wait()
        return CompactionOutcome(moved=1)

    driven = Driven(compact=compact)
    driven.drain()
    driven.pass_by(6, joins=False)
    assert moving.wait(20)
    assert driven.pass_by(10_000, joins=False) is State.RESTART_WANTED
    driven.pass_by(1, joins=False)
    assert (driven.guard.gate.closed, driven.guard.gate.shut) == (True, True)
    release.set()
    driven.guard._clearing.join(20)
    assert (driven.guard.gate.closed, driven.guard.gate.shut) == (False, False)


def test_a_call_is_given_up_and_not_made_again_while_it_hangs(release):
    given, late = Given(0.02), []
    with pytest.raises(HangsError, match=r"policy has not returned within 0\.02 s"):
        given.call("policy", lambda: release.wait() and "late", late=late.append)
    with pytest.raises(HangsError, match="the call before has not returned"):
        given.call("policy", lambda: "again")
    assert given.call("lease", lambda: "another") == "another"
    release.set()
    until(lambda: late)
    until(lambda: not given.hangs("policy"))
    assert late == ["late"]
    assert given.call("policy", lambda: "again") == "again"
    with pytest.raises(LookupError):
        given.call("policy", lambda: {}["what it raised"])
    with pytest.raises(EndsError, match=r"policy raised SystemExit\(3\)"):
        given.call("policy", ends)
