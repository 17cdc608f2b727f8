# SPDX-License-Identifier: Apache-2.0
"""MemoryGuard: the thread that watches, and drives the state machine through the gate and the places.

Knows the allocator's rooms and its own; the server it guards knows it by its middleware or by ``request``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import TypeVar
from weakref import WeakSet

from opentelemetry._logs import LoggerProvider
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from .. import rooms as package_rooms
from ..allocator.sampler import Collection
from ..allocator.source import initialised_torch
from ..rooms import Rooms
from .allowed import (
    FILE,
    POLICY,
    SECONDS,
    SECONDS_ABOVE_0,
    YES_OR_NO,
    Allowed,
    calls,
    check,
    instance,
    maybe,
    refusal,
)
from .gate import Gate
from .given import Given
from .machine import Action, Machine, Place, Result, State, Timing, Transition
from .places import Places
from .policy import DeviceReadings, Headroom, Policy, Readings, Slack, Verdict, judged
from .restart import WAYS, ask_to_end
from .sharing import shares_listener
from .steps import Compact, CompactionOutcome
from .telling import Figures, Step, Teller

_T = TypeVar("_T")
_UNKNOWN = 120.0
"""Seconds after which it is said that the policy has nothing to judge by."""
_LEAVES = 1.0
"""Seconds that its thread is waited for at the end."""
_PACE = 0.1
"""Seconds between two looks while something is under way."""

_ALLOWED = {
    "policy": maybe(POLICY),
    "timing": maybe(instance(Timing, "Timing(drain_limit=...)")),
    "compact": maybe(calls("a callable that returns a CompactionOutcome, as Compaction(model)")),
    "clear": maybe(calls("a callable")),
    "restart": Allowed(lambda value: isinstance(value, str) and value in WAYS, f"one of {', '.join(WAYS)}"),
    "on_restart": maybe(calls("a callable over the reason")),
    "on_ready": maybe(calls("a callable over whether it is ready")),
    "ready_file": maybe(FILE),
    "places": maybe(instance(Places, "Places('/a/folder')")),
    "lease": maybe(calls("a callable that returns what to call afterwards, or None")),
    "steers": maybe(YES_OR_NO),
    "interval": SECONDS_ABOVE_0,
    "arrival_limit": SECONDS,
    "readings": maybe(calls("a callable over whether they must be fresh")),
    "clock": calls("a callable that returns monotonic seconds"),
}

_live: WeakSet[MemoryGuard] = WeakSet()


def _forked() -> None:
    for guard in tuple(_live):
        guard.begin_anew()


if hasattr(os, "register_at_fork"):  # it cannot be taken back, so it stands here, once
    os.register_at_fork(after_in_child=_forked)


class ShutError(RuntimeError):
    """The gate is shut: something that a request would touch is not in its place."""


class MemoryGuard:
    """Detects a sick GPU memory, drains the server, clears at idle, measures again, and asks for a restart
    only if that has failed.

    Example:
        >>> guard = MemoryGuard(Headroom(need=2 << 30))
        >>> guard.ready(), guard.alive()
        (True, True)
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        timing: Timing | None = None,
        compact: Compact | None = None,
        clear: Callable[[], object] | None = None,
        restart: str = "liveness",
        on_restart: Callable[[str], object] | None = None,
        on_ready: Callable[[bool], object] | None = None,
        ready_file: str | os.PathLike[str] | None = None,
        places: Places | None = None,
        lease: Callable[[], Callable[[], object] | None] | None = None,
        steers: bool | None = None,
        interval: float = 5.0,
        arrival_limit: float = 30.0,
        readings: Callable[[bool], Readings | None] | None = None,
        clock: Callable[[], float] = monotonic,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        """Nothing runs until ``start``, which the middleware calls.

        Args:
            policy: whether readings are sick; ``Headroom()`` unless given.
            timing: how long each state lasts.
            compact: tried where clearing alone was not enough.
            clear: instead of ``empty_cache`` of every device.
            restart: ``liveness``, ``sigterm`` or ``callback``: how the process is replaced.
            on_restart: called with the reason when a restart is wanted, whatever the way.
            on_ready: called with whether it is ready when that changes, on a thread of the guard's.
            ready_file: there while it is ready, for probes that run a command.
            places: bounds how many workers of a node drain at once.
            lease: the same for pods: called when it wants to drain, it returns what to call afterwards, or
                None where it may not.
            steers: whether readiness steers the traffic; None to find out whether workers share the socket.
            interval: seconds between two looks while all is well.
            arrival_limit: the longest that an arrival waits at the gate, in seconds.
            readings: instead of this package's own; its argument says whether they must be fresh.
            clock: monotonic seconds.
            tracer_provider: that of ``instrument()`` unless given, else the global one; so are the others.

        Raises:
            ValueError: an argument that is not allowed.
        """
        check("MemoryGuard", _ALLOWED, locals())
        if restart == "callback" and on_restart is None:
            raise ValueError(
                refusal(
                    "MemoryGuard", "on_restart", None, "with restart='callback' a callable over the reason"
                )
            )
        timing = timing or Timing()
        self._policy: Policy = policy if policy is not None else Headroom()
        if timing.sick_for is None:
            timing = replace(timing, sick_for=float(getattr(self._policy, "sick_for", 60.0)))
        self._timing = timing
        self._compact = compact
        self._clear = clear
        self._restart = restart
        self._on_restart = on_restart
        self._on_ready = on_ready
        self._ready_file = None if ready_file is None else Path(ready_file)
        self._places = places
        self._lease = lease
        self._steers = steers
        self._interval = interval
        self._given_readings = readings
        self._given = Given(timing.call_limit)
        self._clock = clock
        self._alone: Rooms | None = None
        self._server: tuple[str, int | None] | None = None
        self._figures = Figures()
        self.gate = Gate(arrival_limit, self._gate_failed)
        self._teller = Teller(self._figures_now, tracer_provider, meter_provider, logger_provider)
        self._said_sick: bool | None = None
        self._begin()
        if self._ready_file is not None:  # what a killed one has left says nothing of this one
            self._attempt("ready_file", self._ready_file.unlink, True)
        _live.add(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._machine = Machine(self._timing, self._clock(), self._transition)
        self._began = self._clock()
        self._thread: threading.Thread | None = None
        self._clearing: threading.Thread | None = None
        self._ended = threading.Event()
        self._gave_up = False
        """Whether the gate was opened before clearing, which hangs, has ended."""
        self._release_lease: Callable[[], object] | None = None
        self._before: Readings | None = None
        self._drain_began = perf_counter()
        self._ready = self._alive = self._told_ready = True
        self.closing = False
        """Whether connections are asked to close: others are to serve what they would bring."""

    def begin_anew(self) -> None:
        """In a forked child: no thread, no request and no state of the parent's."""
        self.gate.begin_anew()
        self._figures = Figures()
        self._teller.begin_anew()
        self._given.begin_anew()
        if self._alone is not None:
            self._alone.begin_anew()
        self._said_sick = None
        self._begin()

    # what others ask

    def ready(self) -> bool:
        """Whether new traffic is welcome here."""
        return self._ready

    def alive(self) -> bool:
        """False where the process wants to be replaced and ``restart`` is ``liveness``."""
        return self._alive

    @property
    def state(self) -> State:
        """Where it is."""
        return self._machine.state

    @property
    def watches(self) -> bool:
        """Whether it was started and not stopped."""
        return self._thread is not None

    def request(self) -> Request:
        """Count something in flight, without a web framework: ``with guard.request():`` on a thread, ``async
        with guard.request():`` on an event loop. It waits at the gate as a request of the middleware's does,
        and raises ``ShutError`` where that would be refused."""
        return Request(self.gate)

    # its life

    def start(self, server: tuple[str, int | None] | None = None) -> None:
        """Watch from now on, on a thread of its own; ``server`` is that of an ASGI scope. Never raises."""
        self._server = server or self._server
        with self._lock:
            if self._thread is not None:
                return
            self._ended = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._ended,), name="torchmem-guard", daemon=True
            )
            thread = self._thread
        if any(other is not self and other.watches for other in tuple(_live)):
            self._say("two guards", "two guards watch in this process, and each would clear: one is enough")
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter ends
            self._say("start", "the guard does not watch: %r", error)

    def stop(self) -> None:
        """Watch no more, and hold no place. What is being cleared is cleared to its end."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._ended.set()
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_LEAVES)  # what it had begun to take is then given back below
        self._attempt("release_place", self._release_place)
        self._attempt("ready_file", self._touch)

    def _run(self, ended: threading.Event) -> None:
        while True:
            try:
                self._attempt("tick", self.tick)
            except BaseException as error:  # this thread is the guard's alone: it goes on
                self._say("tick ended", "the guard's tick failed: %r", error)
            serving = self._machine.state is State.SERVING
            if ended.wait(self._interval if serving else min(self._interval, _PACE)):
                return

    def tick(self) -> None:
        """Look once, and do what is due. ``start`` has a thread do it again and again."""
        self._attempt("metrics", self._teller.observe)
        if self._machine.state is State.SERVING:
            readings = self._attempt("readings", self._measure, False)
            verdict = self._judge(readings)
            with self._lock:
                if self._machine.sick or verdict.sick:
                    self._before = readings
                actions = self._machine.judged(
                    verdict.sick,
                    verdict.reason,
                    self._clock() if verdict.as_of is None else verdict.as_of,
                    self._clock(),
                )
            if (
                verdict.sick is None
                and self._clock() - self._began > _UNKNOWN
                and readings
                and readings.devices
            ):
                self._say(
                    "unknown",
                    "the guard's policy has nothing to judge by: no need is known (give Headroom one, or "
                    "instrument the requests), or no headroom is",
                    level=logging.INFO,
                )
            if self._places is not None and self._said_sick is not verdict.sick:
                self._said_sick = verdict.sick
                self._attempt("places", self._places.tell, bool(verdict.sick))
        else:
            idle = self._attempt("idle", self._idle) is True
            with self._lock:
                actions = self._machine.looked(idle, self._clock())
            if (
                self._machine.hanging and not self._gave_up
            ):  # who needs no GPU need not wait for one that hangs
                self._gave_up = self.gate.give_up()
        self._do(actions)
        self._attempt("ready_file", self._touch)
        self._attempt("on_ready", self._tell_on_ready)

    # the machine's actions

    def _do(self, actions: tuple[Action, ...]) -> None:
        self._refresh()
        handlers: dict[Action, Callable[[], object]] = {
            Action.TAKE_PLACE: self._take_place,
            Action.NOT_READY: self._tell_ready,
            Action.READY: self._tell_ready,
            Action.CLEAR: lambda: self._start_clearing(gated=False),
            Action.GATE_AND_CLEAR: lambda: self._start_clearing(gated=True),
            Action.WANT_RESTART: self._want_restart,
            Action.EXIT: self._exit,
            Action.RELEASE_PLACE: self._release_place,
        }
        for action in actions:
            self._attempt(action.value, handlers[action])

    def _refresh(self) -> None:
        machine = self._machine
        self._ready = machine.ready
        self.closing = not machine.ready or machine.state is State.RESTART_WANTED
        self._alive = not machine.shut and not (
            self._restart == "liveness" and machine.state is State.RESTART_WANTED
        )

    def _take_place(self) -> None:
        place = Place(granted=False)
        try:
            place = self._place()
            if self._ended.is_set():  # stopped meanwhile
                place = Place(granted=False)
        finally:
            if not place.granted:
                self._attempt("release_place", self._release_place)
            with self._lock:
                actions = self._machine.placed(place, self._clock())
                self._drain_began = perf_counter()
            self._do(actions)

    def _place(self) -> Place:
        if self._clearing is not None and self._clearing.is_alive():  # the one before hangs
            return Place(granted=False)
        if self._places is not None and not self._places.take():
            return Place(granted=False)
        if self._lease is not None:
            self._release_lease = self._given.call("lease", self._lease, late=_give_back)
            if self._release_lease is None:
                return Place(granted=False)
        if self._places is not None and self._places.all_sick():
            self._say("all sick", "every worker of this node is sick: all keep serving, and clear in turn")
            return Place(granted=True, steers=False, may_restart=False)
        steers = self._steers
        if steers is None:
            steers = shares_listener(self._server) is not True
        if not steers:
            self._say(
                "shared socket",
                "several workers take connections from one socket, where readiness steers no traffic: "
                "arrivals wait at this worker's gate instead",
            )
        return Place(granted=True, steers=steers)

    def _release_place(self) -> None:
        release, self._release_lease = self._release_lease, None
        try:
            if self._places is not None:
                self._places.release()
        finally:
            if release is not None:
                self._given.call("lease's end", release)

    def _tell_ready(self) -> None:
        if not self._ready:
            self.gate.drain()
        self._attempt("ready_file", self._touch)
        self._attempt("on_ready", self._tell_on_ready)

    def _tell_on_ready(self) -> None:
        on_ready, ready = self._on_ready, self._ready
        # one that hangs is told when it has ended
        if on_ready is not None and ready is not self._told_ready and not self._given.hangs("on_ready"):
            self._told_ready = ready
            self._given.call("on_ready", lambda: on_ready(ready))

    def _touch(self) -> None:
        if self._ready_file is None:
            return
        if self._ready and not self._ended.is_set():
            self._ready_file.touch()
        else:
            self._ready_file.unlink(missing_ok=True)

    def _want_restart(self) -> None:
        on_restart, reason = self._on_restart, self._machine.reason
        if on_restart is not None:
            self._given.call("on_restart", lambda: on_restart(reason))

    def _exit(self) -> None:
        if self._restart == "sigterm":
            if self._machine.steers:
                ask_to_end()
            else:
                self._spawn(lambda: self._attempt("exit", self._exit_at_idle))

    def _exit_at_idle(self) -> None:
        rooms = self._rooms()
        try:
            if self.gate.close(self._timing.hold_limit, lambda: self._outside_is_idle(rooms)):
                ask_to_end()
            else:
                self._say("exit", "no restart: something is in flight still")
        finally:
            self.gate.open()  # who waited is served by the shutdown

    # behind the gate

    def _start_clearing(self, gated: bool) -> None:
        self._gave_up = False
        if gated:
            self.gate.drain()
        try:
            self._spawn(lambda: self._clear_at_idle(gated))
        except RuntimeError as error:
            self._finished(Result.FAILED, f"no thread to clear on: {error!r}")

    def _spawn(self, work: Callable[[], None]) -> None:
        self._clearing = threading.Thread(target=work, name="torchmem-clear", daemon=True)
        self._clearing.start()

    def _clear_at_idle(self, gated: bool) -> None:
        result, reason = Result.FAILED, "clearing did not come to its end"
        try:
            result, reason = self._behind_the_gate(self._timing.hold_limit if gated else 0.0)
        except BaseException as error:  # this thread is the guard's alone
            reason = f"clearing raised {error!r}"
            self._say("clear", "clearing failed: %r", error)
        finally:
            if result is Result.MISSING:
                self.gate.refuse()
            else:
                self.gate.shut = False
                self.gate.open()
        self._finished(result, reason)

    def _finished(self, result: Result, reason: str) -> None:
        allowed = True
        if result is Result.SICK and self._machine.may_restart:
            allowed = self._attempt("restarts", self._restart_allowed) is True
            if not allowed:
                reason = f"{reason}; no restart yet, to bound their rate"
        with self._lock:
            actions = self._machine.finished(result, reason, self._clock(), allowed)
        self._do(actions)

    def _restart_allowed(self) -> bool:
        if self._clock() - self._began < self._timing.min_uptime:
            return False
        return self._places is None or self._places.may_restart()

    def _behind_the_gate(self, limit: float) -> tuple[Result, str]:
        rooms = self._rooms()
        if not self.gate.close(limit, lambda: self._outside_is_idle(rooms)):
            return Result.BUSY, "something is in flight still"
        drained = self._measure(True)
        self._note("drain", self._drain_began, self._before, drained)

        began = perf_counter()
        with rooms.sampler.paused():
            done = rooms.windows.while_none_open(lambda: rooms.captures.while_none(self._clear_all))
        if not done:
            return Result.BUSY, "a measured call or the capture of a graph has begun"
        cleared = self._measure(True)
        self._note("clear", began, drained, cleared)
        verdict = self._judge(cleared)
        if verdict.sick and self._compact is not None:
            outcome, compacted = self._compacted(rooms, cleared)
            if outcome.missing is not None:
                return Result.MISSING, outcome.missing
            verdict = self._judge(compacted)
        if verdict.sick:
            return Result.SICK, verdict.reason
        return Result.WELL, "well after clearing" if verdict.sick is False else "cannot be judged"

    def _clear_all(self) -> bool:
        if self._clear is not None:
            self._clear()
            return True
        source = self._rooms().sampler.source()
        if source is not None:
            source.empty_cache()
        return True

    def _compacted(self, rooms: Rooms, before: Readings | None) -> tuple[CompactionOutcome, Readings | None]:
        began = perf_counter()
        # until all is back nobody may touch it, however long that takes
        if not self.gate.shuts(self._timing.hold_limit):
            refused = (
                "clearing has not ended within its limit, and the gate is open"
                if not self.gate.closed
                else "an arrival that had waited for its limit is in flight"
            )
            self._teller.refused(refused)
            return CompactionOutcome(refused=refused), before
        with rooms.sampler.paused():
            outcome = rooms.windows.while_none_open(lambda: rooms.captures.while_none(self._try_to_compact))
        if outcome is None:
            outcome = CompactionOutcome(refused="a measured call or the capture of a graph has begun")
        if outcome.refused is not None:
            self._teller.refused(outcome.refused)
        if outcome.missing is not None:
            return outcome, None
        self.gate.shut = False
        after = self._measure(True)
        self._note("compaction", began, before, after)
        return outcome, after

    def _try_to_compact(self) -> CompactionOutcome:
        try:
            outcome: object = self._compact() if self._compact is not None else None
            if isinstance(outcome, CompactionOutcome):
                return outcome
            self._say("compact", "compact returned %r; allowed is a CompactionOutcome", outcome)
            return CompactionOutcome(refused=f"compact returned {outcome!r}, no CompactionOutcome")
        except BaseException as error:  # this thread is the guard's alone
            self._say("compact", "compaction failed: %r", error)
            return CompactionOutcome(refused=f"it raised {error!r}")

    # what is known

    def _rooms(self) -> Rooms:
        wired = package_rooms.wired()
        if wired is not None:
            return wired
        if self._alone is None:
            self._alone = Rooms.alone()
        return self._alone

    def _outside_is_idle(self, rooms: Rooms) -> bool:
        """Whether nothing runs that the gate does not count: work that outlived its request, captures."""
        rooms.settle()
        return not rooms.windows.any_open and not rooms.captures.under_way

    def _idle(self) -> bool:
        rooms = self._rooms()
        if self._clearing is not None and self._clearing.is_alive():  # it holds what settling would wait for
            return not (self.gate.in_flight or rooms.windows.any_open or rooms.captures.under_way)
        return not self.gate.in_flight and self._outside_is_idle(rooms)

    def _measure(self, fresh: bool) -> Readings | None:
        """Readings; ``fresh`` are those behind the gate, after something was done."""
        given = self._given_readings
        if given is not None:
            return self._given.call("readings", lambda: given(fresh))
        rooms = self._rooms()
        collection = rooms.sampler.collect(fresh=fresh)
        if collection is None:
            return None
        devices = _device_readings(collection, rooms, self._clock())
        if isinstance(self._policy, Headroom):
            needs = {each.name: self._policy.need_of(each) for each in devices}
            self._figures.needs = {name: need for name, need in needs.items() if need is not None}
            self._tell_strangers(self._policy)
        return Readings(devices, self._clock(), cleared=fresh, was_sick=self._machine.sick)

    def _tell_strangers(self, policy: Headroom) -> None:
        torch = initialised_torch()
        if torch is None or not isinstance(policy.need, Mapping):
            return
        known = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        for name in policy.need.keys() - known:
            self._say(f"need {name}", "need names %s, and there is %s", name, ", ".join(known))

    def _judge(self, readings: Readings | None) -> Verdict:
        if readings is None:
            return Verdict(None)
        policy = self._policy
        try:
            if type(policy) in (Headroom, Slack):  # they neither wait nor end
                return judged(policy(readings), readings.at)
            return judged(self._given.call("policy", lambda: policy(readings)), readings.at)
        except Exception as error:
            self.failed("policy", error)
            return Verdict(None)

    def _note(self, step: str, began: float, before: Readings | None, after: Readings | None) -> None:
        told = Step(step, perf_counter() - began)
        pairs = _pairs(before, after)
        headrooms = [
            b.headroom - a.headroom for a, b in pairs if a.headroom is not None and b.headroom is not None
        ]
        released = [
            a.reserved - b.reserved for a, b in pairs if a.reserved is not None and b.reserved is not None
        ]
        if headrooms:
            told.headroom = sum(headrooms)
        if released:
            told.released = sum(released)
        figures = self._figures
        figures.headroom_won[step] += max(0, told.headroom or 0)
        figures.released[step] += max(0, told.released or 0)
        figures.seconds[step] += told.seconds
        self._teller.step(told)

    # what is told

    def _transition(self, transition: Transition, before: State, after: State, reason: str) -> None:
        self._figures.state = after
        self._figures.transitions[transition.value] += 1
        self._attempt("tell", self._tell, transition, before, after, reason)

    def _tell(self, transition: Transition, before: State, after: State, reason: str) -> None:
        self._teller.transition(
            transition, before, after, reason, steers=self._machine.steers, in_flight=self.gate.in_flight
        )

    def _figures_now(self) -> Figures:
        self._figures.held, self._figures.in_flight = self.gate.held, self.gate.in_flight
        return self._figures

    def _attempt(self, what: str, act: Callable[..., _T], *arguments: object) -> _T | None:
        """An act that raises is said once, and passed over: the machine goes on without it."""
        try:
            return act(*arguments)
        except Exception as error:
            self.failed(what, error)
            return None

    def _gate_failed(self, error: Exception) -> None:
        self.failed("gate", error)

    def failed(self, what: str, error: Exception) -> None:
        """Say once that something of the guard's own failed, and that it goes on without."""
        self._say(f"{what} {type(error).__name__}", f"the guard's {what} failed: %r", error)

    def _say(self, key: str, message: str, *arguments: object, level: int = logging.WARNING) -> None:
        self._rooms().telemetry.say_once(f"guard {key}", f"torchmem: {message}", *arguments, level=level)


class Request:
    """One thing in flight, from entering to leaving it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._passing = self._gate.passing()
        if not self._passing.__enter__():
            self._passing.__exit__(None, None, None)
            raise ShutError("torchmem: the guard's gate is shut: what a request would touch is not there")

    def __exit__(self, *error: object) -> None:
        self._passing.__exit__(None, None, None)

    async def __aenter__(self) -> None:
        lane = self._lane = self._gate.lane()
        lane.count += 1
        if self._gate.closed:
            lane.count -= 1
            if not await self._gate.wait(lane):
                raise ShutError("torchmem: the guard's gate is shut: what a request would touch is not there")

    async def __aexit__(self, *error: object) -> None:
        self._lane.count -= 1


def _give_back(release: Callable[[], object] | None) -> None:
    if release is not None:
        release()


def _device_readings(collection: Collection, rooms: Rooms, now: float) -> tuple[DeviceReadings, ...]:
    readings: list[DeviceReadings] = []
    for device, state in collection.devices:
        known, reading = state.map, state.reading
        trapped = reading.inactive_split
        if trapped is None and known is not None:
            trapped = known.split_free
        readings.append(
            DeviceReadings(
                name=device.name,
                at=now - state.age,
                limit=state.limit,
                reserved=reading.reserved,
                active=reading.active,
                trapped=trapped,
                headroom=state.headroom,
                headroom_at=None if state.map_age is None else now - state.map_age,
                need=rooms.growth.largest(device.index),
            )
        )
    return tuple(readings)


def _pairs(before: Readings | None, after: Readings | None) -> list[tuple[DeviceReadings, DeviceReadings]]:
    if before is None or after is None:
        return []
    earlier = {device.name: device for device in before.devices}
    return [(earlier[device.name], device) for device in after.devices if device.name in earlier]
