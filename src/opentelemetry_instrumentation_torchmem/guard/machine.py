# SPDX-License-Identifier: Apache-2.0
"""The guard's state machine: events in, actions out. Pure: no thread, no clock of its own, no torch.

::

    serving ──sick for a while──▶ draining ──idle──▶ clearing ──well──▶ serving
                                     │                  └──still sick──▶ restart wanted ──limit──▶ serving
                                     └──never idle──▶ serving
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from .allowed import SECONDS, Allowed, check, maybe, refusal, whole_from


class State(Enum):
    """Where the guard is."""

    SERVING = "serving"
    DRAINING = "draining"
    CLEARING = "clearing"
    RESTART_WANTED = "restart_wanted"


STATES = {
    State.SERVING.value: "Ready; the memory is watched.",
    State.DRAINING.value: "Not ready, if readiness steers the traffic; what arrives is served until none is "
    "in flight.",
    State.CLEARING.value: "Behind the gate: measured, cleared, measured again; what arrives waits.",
    State.RESTART_WANTED.value: "Not ready, and served what arrives, until the process is replaced.",
}
"""``torch.memory.guard.state``: value -> meaning."""


class Transition(Enum):
    """What led from one state to another."""

    DRAIN_BEGUN = "drain_begun"
    CLEAR_BEGUN = "clear_begun"
    BUSY = "busy"
    RECOVERED = "recovered"
    STILL_SICK = "still_sick"
    RESTART_WANTED = "restart_wanted"
    GAVE_UP = "gave_up"
    FAILED = "failed"
    NOT_RESTARTED = "not_restarted"


TRANSITIONS = {
    "drain_begun": "Sick for long enough, and a place was free: serving to draining.",
    "clear_begun": "Nothing in flight, or the drain's limit has come: draining to clearing.",
    "busy": "Something was in flight, or a graph was being captured: clearing back to draining.",
    "recovered": "Well after clearing, or nobody can know: clearing to serving.",
    "still_sick": "Sick after clearing, and no restart is allowed now: clearing to serving.",
    "restart_wanted": "Sick after clearing, clearing has not ended within its limit, or something is missing "
    "from its place: to restart wanted.",
    "gave_up": "Never idle within its limits: draining or clearing to serving.",
    "failed": "A step raised: back to serving.",
    "not_restarted": "Nobody has replaced the process within the limit: restart wanted to serving.",
}
"""``torch.memory.guard.transition``: value -> meaning."""


class Action(Enum):
    """What the machine wants done. Each may fail without harm to the machine."""

    TAKE_PLACE = "take_place"
    """Ask for a place to drain in, and tell ``placed``."""
    NOT_READY = "not_ready"
    READY = "ready"
    CLEAR = "clear"
    """If nothing is in flight, close the gate and clear; then tell ``finished``."""
    GATE_AND_CLEAR = "gate_and_clear"
    """Close the gate first and wait for what is in flight; then clear and tell ``finished``."""
    WANT_RESTART = "want_restart"
    EXIT = "exit"
    """The moment to end the process, where that is the way: nothing is in flight, or arrivals must wait until
    nothing is, because readiness does not keep them away."""
    RELEASE_PLACE = "release_place"


_ROWS = {"sick_for": maybe(SECONDS), "probe_failures": Allowed(whole_from(1), "a whole number from 1 up")}


@dataclass(frozen=True, slots=True)
class Timing:
    """How long each state lasts. Seconds."""

    sick_for: float | None = None
    """The evidence of being sick must span this much before anything is done; None for what the policy
    says."""
    cool_down: float = 300.0
    """Between the end of one cycle and the beginning of the next, at least."""
    probe_period: float = 10.0
    """How often readiness is asked for (Kubernetes: ``periodSeconds``)."""
    probe_failures: int = 3
    """After how many failures in a row traffic stops (``failureThreshold``)."""
    drain_limit: float = 120.0
    """After this much of draining the gate closes, whatever is in flight. More than the probe needs to see
    that the server is not ready, plus the longest request."""
    hold_limit: float = 10.0
    """How long arrivals wait at the gate while what is in flight ends."""
    clear_limit: float = 120.0
    """How long clearing and compaction may take."""
    restart_limit: float = 300.0
    """How long a restart is waited for."""
    min_uptime: float = 600.0
    """No restart is wanted of a process younger than this: it bounds their rate."""

    call_limit: float = 30.0
    """How long each call of what you gave (policy, readings, lease, on_ready, on_restart) is waited for."""

    def __post_init__(self) -> None:
        rows = {field.name: _ROWS.get(field.name, SECONDS) for field in fields(self)}
        check("Timing", rows, {name: getattr(self, name) for name in rows})
        if self.drain_limit < self.min_not_ready:
            raise ValueError(
                refusal(
                    "Timing",
                    "drain_limit",
                    self.drain_limit,
                    f"at least probe_period x probe_failures, here {self.min_not_ready:g} s, plus the "
                    "longest request",
                )
            )

    @property
    def min_not_ready(self) -> float:
        """The least time that it is not ready: before it nobody who asks has to have seen it."""
        return self.probe_period * self.probe_failures


@dataclass(frozen=True, slots=True)
class Place:
    """What came of asking for a place to drain in."""

    granted: bool
    steers: bool = True
    """Whether readiness steers the traffic. If not, it stays ready and arrivals wait at the gate instead."""
    may_restart: bool = True


class Result(Enum):
    """How an attempt to clear has ended."""

    BUSY = "busy"
    """Something was in flight: nothing was done."""
    WELL = "well"
    """Also where nobody can know: nothing is restarted on ignorance."""
    SICK = "sick"
    MISSING = "missing"
    """Something is not back in its place: the gate stays shut."""
    FAILED = "failed"


Told = Callable[[Transition, State, State, str], None]


def _nobody(_: Transition, __: State, ___: State, ____: str) -> None: ...


class Machine:
    """The state, and what may be done in it. Not for two threads at once: its owner locks.

    Each event comes with the time, and returns the actions that are due, in order. A clock that jumps makes
    a state shorter or longer by no more than one of its limits.

    Example:
        >>> machine = Machine(Timing(sick_for=10), now=0.0)
        >>> machine.judged(True, "no headroom", as_of=0.0, now=0.0)
        ()
        >>> machine.judged(True, "no headroom", as_of=10.0, now=10.0)
        (<Action.TAKE_PLACE: 'take_place'>,)
    """

    def __init__(self, timing: Timing, now: float, told: Told = _nobody) -> None:
        self.timing = timing
        self._sick_for = 60.0 if timing.sick_for is None else timing.sick_for
        self.state = State.SERVING
        self.steers = True
        self.shut = False
        """Something is missing: there is no way back but a restart."""
        self._told = told
        self._since = now
        self._drained_since = now
        self._ended: float | None = None
        self._sick_since: float | None = None
        self._reason = ""
        self._asking = False
        self._may_restart = True
        self._gated = False
        self._exited = False
        self.hanging = False
        """Clearing has not ended in its time: what is done to the memory is not known."""

    @property
    def ready(self) -> bool:
        """Whether new traffic is welcome here."""
        return not self.shut and (self.state is State.SERVING or not self.steers)

    @property
    def may_restart(self) -> bool:
        """Whether this cycle may come to that."""
        return self._may_restart

    @property
    def reason(self) -> str:
        """Why it was last found sick."""
        return self._reason

    @property
    def sick(self) -> bool:
        """Whether the last verdict was that it is sick, long enough or not."""
        return self._sick_since is not None

    def judged(self, sick: bool | None, reason: str, as_of: float, now: float) -> tuple[Action, ...]:
        """What the policy said while serving."""
        if self.state is not State.SERVING:
            return ()
        if not sick:
            self._sick_since = None
            return ()
        self._reason = reason
        if self._sick_since is None or as_of < self._sick_since:
            self._sick_since = as_of
        if as_of - self._sick_since < self._sick_for or self._cooling(now) or self._asking:
            return ()
        self._asking = True
        return (Action.TAKE_PLACE,)

    def placed(self, place: Place, now: float) -> tuple[Action, ...]:
        """What came of ``TAKE_PLACE``. Without a place it keeps serving, and asks again when next judged."""
        if not self._asking:
            return (Action.RELEASE_PLACE,) if place.granted else ()
        self._asking = False
        if not place.granted:
            return ()
        self.steers, self._may_restart = place.steers, place.may_restart
        self._gated, self._exited = not place.steers, False
        self._drained_since = now
        self._enter(State.DRAINING, Transition.DRAIN_BEGUN, self._reason, now)
        return (Action.NOT_READY,) if self.steers else ()

    def looked(self, idle: bool, now: float) -> tuple[Action, ...]:
        """Whether anything is in flight, and that time has passed."""
        if self.state is State.DRAINING:
            return self._draining(idle, now)
        if self.state is State.CLEARING:
            if self._past(self.timing.clear_limit + self.timing.hold_limit, now):
                self.hanging = True
                return self._want_restart("clearing has not ended within its limit", now)
            return ()
        if self.state is State.RESTART_WANTED:
            if self._past(self.timing.restart_limit, now) and not (self.shut or self.hanging):
                return self._back(Transition.NOT_RESTARTED, "nobody has replaced the process", now)
            # where readiness does not steer, connections that are kept alive are closed meanwhile
            seen_since = self._drained_since if self.steers else self._since
            seen = now - seen_since >= self.timing.min_not_ready
            if (idle or not self.steers) and seen and not self._exited:
                self._exited = True
                return (Action.EXIT,)
        return ()

    def _draining(self, idle: bool, now: float) -> tuple[Action, ...]:
        drained_for = now - self._drained_since
        if drained_for < 0:  # the clock has jumped back
            self._drained_since, drained_for = now, 0.0
        if self._gated or drained_for >= self.timing.drain_limit:
            self._gated = True
            self._enter(State.CLEARING, Transition.CLEAR_BEGUN, "arrivals wait at the gate", now)
            return (Action.GATE_AND_CLEAR,)
        if idle and drained_for >= self.timing.min_not_ready:
            self._enter(State.CLEARING, Transition.CLEAR_BEGUN, "nothing is in flight", now)
            return (Action.CLEAR,)
        return ()

    def finished(
        self, result: Result, reason: str, now: float, restart_allowed: bool = True
    ) -> tuple[Action, ...]:
        """How ``CLEAR`` or ``GATE_AND_CLEAR`` has ended."""
        self.hanging = False
        if result is Result.MISSING:  # even if it was given up meanwhile: what is missing stays so
            was_ready, self.shut = self.ready, True
            return self._want_restart(reason, now, was_ready)
        if self.state is State.RESTART_WANTED and result is Result.WELL and not (self.shut or self._exited):
            return self._back(Transition.RECOVERED, reason, now)  # it has ended, late
        if self.state is not State.CLEARING:
            return ()
        if result is Result.BUSY:
            if self._gated:
                return self._back(Transition.GAVE_UP, reason, now)
            self._enter(State.DRAINING, Transition.BUSY, reason, now)
            return ()
        if result is Result.WELL:
            return self._back(Transition.RECOVERED, reason, now)
        if result is Result.FAILED:
            return self._back(Transition.FAILED, reason, now)
        if not (restart_allowed and self._may_restart):
            return self._back(Transition.STILL_SICK, reason, now)
        return self._want_restart(reason, now)

    def _want_restart(self, reason: str, now: float, was_ready: bool | None = None) -> tuple[Action, ...]:
        if self.state is State.RESTART_WANTED:
            return ()
        was_ready = self.ready if was_ready is None else was_ready
        self._reason = reason
        self._enter(State.RESTART_WANTED, Transition.RESTART_WANTED, reason, now)
        not_ready = (Action.NOT_READY,) if was_ready and not self.ready else ()
        return (*not_ready, Action.WANT_RESTART)

    def _back(self, transition: Transition, reason: str, now: float) -> tuple[Action, ...]:
        self._ended = now
        self._sick_since = None
        was_ready = self.ready
        self._enter(State.SERVING, transition, reason, now)
        return (Action.RELEASE_PLACE,) if was_ready else (Action.READY, Action.RELEASE_PLACE)

    def _enter(self, state: State, transition: Transition, reason: str, now: float) -> None:
        before, self.state, self._since = self.state, state, now
        self._told(transition, before, state, reason)

    def _past(self, limit: float, now: float) -> bool:
        if now < self._since:  # the clock has jumped back
            self._since = now
        return now - self._since >= limit

    def _cooling(self, now: float) -> bool:
        if self._ended is None:
            return False
        if now < self._ended:  # the clock has jumped back
            self._ended = now
        return now - self._ended < self.timing.cool_down
