# SPDX-License-Identifier: Apache-2.0
"""The gate: arrivals are counted on their event loop without a lock, and wait while another thread clears.

An arrival counts itself, then looks whether the gate is closed; who closes it closes, then looks whether
anything is counted. Each writes before it looks, so that one of the two always sees the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from time import monotonic

_LOOK = 0.002
"""Seconds between two looks whether what is in flight has ended."""


class Lane:
    """The arrivals of one thread's event loop. Its count is written on that thread alone."""

    __slots__ = ("_draining", "_waiting", "count", "loop", "thread")

    def __init__(self) -> None:
        self.count = 0
        """Those in flight."""
        self.thread = get_ident()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._draining: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """On its own thread: all that wait at the gate look again."""
        for waiting in self._waiting:
            _done(waiting)

    def drain(self) -> None:
        """On its own thread: all that wait for a drain know."""
        for waiting in self._draining:
            _done(waiting)

    def call(self, what: Callable[[], None]) -> None:
        """From any thread: on its own."""
        loop = self.loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(what)
            except RuntimeError:  # the loop has ended, and with it who waited
                self.loop = None

    def until_drained(self) -> asyncio.Future[None]:
        """Done at the next drain; to be forgotten by whoever asked."""
        self.loop = loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._draining.add(waiting)
        return waiting

    def forget(self, waiting: asyncio.Future[None]) -> None:
        """That one waits no more."""
        self._draining.discard(waiting)

    async def opened(self, gate: Gate, until: float) -> bool:
        """Wait until the gate opens; False if it has not by the monotonic time ``until``."""
        self.loop = loop = asyncio.get_running_loop()  # before the look: who opens wakes the loops it knows
        waiting = loop.create_future()
        self._waiting.add(waiting)
        timer = loop.call_later(max(0.0, until - monotonic()), _done, waiting)
        try:
            if gate.closed and not gate.refuses:
                await waiting
        finally:
            timer.cancel()
            self._waiting.discard(waiting)
        return not gate.closed


def _always() -> bool:
    return True


def _done(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Gate:
    """Open, closed, or shut: closed one lets an arrival pass that has waited for its limit, shut one refuses
    it, because something that it would touch is not there."""

    def __init__(
        self, arrival_limit: float = 30.0, fault: Callable[[Exception], object] = lambda _: None
    ) -> None:
        """``arrival_limit`` is the longest that an arrival waits, in seconds; ``fault`` is told of an error
        of the gate's own, which no arrival hears of."""
        self.arrival_limit = arrival_limit
        self._fault = fault
        self.begin_anew()

    def begin_anew(self) -> None:
        """As if nothing had arrived: in a forked child the parent's requests never end."""
        self.closed = self.shut = self.refuses = False
        self.held = 0
        """Arrivals that had to wait, so far."""
        self._lanes: dict[int, Lane] = {}
        self.recent: Lane | None = None
        """The lane that was last asked for: most servers have but one."""
        self._threads = threading.Condition()
        self._in_threads = 0

    def lane(self) -> Lane:
        """That of the calling thread."""
        identity = get_ident()
        lane = self.recent = self._lanes.get(identity) or self._lanes.setdefault(identity, Lane())
        return lane

    @property
    def in_flight(self) -> int:
        """Those that have passed and not left."""
        return self._in_threads + sum(lane.count for lane in tuple(self._lanes.values()))

    # arrivals on an event loop: the fast path is in the middleware, in line

    async def wait(self, lane: Lane) -> bool:
        """For an arrival that found the gate closed and is not counted: wait, then count it.

        False where it must be refused. It waits no longer than ``arrival_limit``.
        """
        try:
            return await self._wait(lane)
        except Exception as error:  # whatever it is, the request is not to blame
            self._fault(error)
            passes = not (self.closed and self.shut)
            lane.count += passes
            return passes

    async def _wait(self, lane: Lane) -> bool:
        until = monotonic() + self.arrival_limit
        self.held += 1
        while True:
            opened = await lane.opened(self, until)
            lane.count += 1
            if not self.closed:
                return True
            if not opened and monotonic() >= until and not self.shut:
                return True
            lane.count -= 1
            if self.refuses or monotonic() >= until:
                return False

    # arrivals on threads

    @contextmanager
    def passing(self) -> Generator[bool]:
        """An arrival on the calling thread, counted until the block ends; False where it must be refused."""
        with self._threads:
            if self.closed:
                self.held += 1
                try:
                    limit = max(0.0, self.arrival_limit)
                    self._threads.wait_for(lambda: self.refuses or not self.closed, limit)
                except Exception as error:  # whatever it is, the request is not to blame
                    self._fault(error)
            self._in_threads += 1  # first count, then look
            passes = not (self.closed and self.shut)
            self._in_threads -= not passes
        try:
            yield passes
        finally:
            with self._threads:
                self._in_threads -= passes

    # the one who clears

    def close(self, limit: float = 0.0, idle: Callable[[], bool] | None = None) -> bool:
        """Close it for arrivals, and wait up to ``limit`` seconds until nothing is in flight and ``idle``.

        Whether that came about; if not it is open again. On a thread of one's own.
        """
        with self._threads:
            self.closed = True
        if self._empties(limit, idle or _always):
            return True
        self.open()
        return False

    def shuts(self, limit: float = 0.0) -> bool:
        """Once closed, shut it, and wait up to ``limit`` seconds for who had waited too long and has passed.

        Whether nothing is in flight; if not it is as before.
        """
        with self._threads:
            if not self.closed:  # given up meanwhile
                return False
            self.shut = True
        if self._empties(limit, _always):
            return True
        self.shut = False
        return False

    def give_up(self) -> bool:
        """Open it before who closed it has done with it, unless it is shut. Whether it is open."""
        with self._threads:
            if self.shut:
                return False
            self.closed = False
        self._wake()
        return True

    def _empties(self, limit: float, idle: Callable[[], bool]) -> bool:
        until = monotonic() + limit
        pause = threading.Event()
        while self.in_flight or not idle():
            if monotonic() >= until:
                return False
            pause.wait(_LOOK)
        return True

    def open(self) -> None:
        """Let all pass that wait; nobody where it refuses."""
        self.closed = self.refuses
        self._wake()

    def refuse(self) -> None:
        """Closed, shut, and for good: what arrives is refused at once, and so is who waits."""
        self.closed = self.shut = self.refuses = True
        self._wake()

    def _wake(self) -> None:
        with self._threads:
            self._threads.notify_all()
        for lane in tuple(self._lanes.values()):
            lane.call(lane.wake)

    def drain(self) -> None:
        """Tell all that wait for a drain."""
        for lane in tuple(self._lanes.values()):
            lane.call(lane.drain)
