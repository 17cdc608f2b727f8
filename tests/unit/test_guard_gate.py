# SPDX-License-Identifier: Apache-2.0
"""The gate: nothing in flight while it is closed, and nobody lost who waits at it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from opentelemetry_instrumentation_torchmem.guard import MemoryGuard, MemoryGuardMiddleware
from opentelemetry_instrumentation_torchmem.guard.gate import Gate
from opentelemetry_instrumentation_torchmem.guard.watch import ShutError

ARRIVALS = 1_000_000
CLEARS = 2_000
SCOPE = {"type": "http", "path": "/", "http_version": "1.1", "method": "GET"}


@contextmanager
def switching(seconds: float):
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def nothing(*_) -> None: ...


@pytest.mark.timeout(280)
def test_a_million_arrivals_against_thousands_of_clears_never_overlap_and_none_is_lost():
    guard = MemoryGuard()
    guard.start = lambda server=None: None
    gate = guard.gate
    inside = served = overlaps = clears = 0
    clearing = False
    ended = threading.Event()

    async def app(scope, receive, send) -> None:
        nonlocal inside, served, overlaps
        inside += 1
        overlaps += clearing
        if served % 8 == 0:
            await asyncio.sleep(0)
        overlaps += clearing
        served += 1
        inside -= 1

    def clear_again_and_again() -> None:
        nonlocal clearing, overlaps, clears
        while not ended.is_set():
            if not gate.close(limit=0.05):
                continue
            clearing = True
            overlaps += inside
            for _ in range(20):
                overlaps += gate.in_flight > 1  # one may have counted itself, and is about to see it closed
            overlaps += inside
            clearing = False
            clears += 1
            gate.open()

    async def arrive(number: int) -> None:
        for _ in range(number):
            await middleware(SCOPE, nothing, nothing)

    async def main() -> None:
        each = 20_000
        while served < ARRIVALS or (clears < CLEARS and served < 4 * ARRIVALS):
            await asyncio.gather(*(arrive(each // 50) for _ in range(50)))

    middleware = MemoryGuardMiddleware(app, guard)
    thread = threading.Thread(target=clear_again_and_again)
    with switching(5e-5):
        thread.start()
        began = time.monotonic()
        try:
            asyncio.run(main())
        finally:
            ended.set()
            thread.join()
    print(f"{served} arrivals, {gate.held} of them held, {clears} clears, {time.monotonic() - began:.0f} s")
    assert (overlaps, inside, gate.in_flight) == (0, 0, 0)
    assert served >= ARRIVALS
    assert served % 20_000 == 0, "each that arrived was served once"
    assert clears >= CLEARS
    assert gate.held > CLEARS / 10


def test_the_event_loop_goes_on_while_the_gate_is_closed_and_an_arrival_waits_only_so_long():
    gate = Gate(arrival_limit=0.2)
    assert gate.close()

    async def main() -> tuple[bool, int, float]:
        lane = gate.lane()
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        began = time.monotonic()
        passed = await gate.wait(lane)
        beating.cancel()
        assert lane.count == 1
        return passed, beats, time.monotonic() - began

    passed, beats, waited = asyncio.run(main())
    assert passed, "what is cleared is not touched by who allocates meanwhile: it may pass"
    assert beats > 3
    assert waited >= 0.2
    assert gate.held == 1


def test_while_something_is_missing_an_arrival_is_refused_after_its_limit_and_for_good_at_once():
    gate = Gate(arrival_limit=0.05)
    assert gate.close()
    gate.shut = True

    async def main() -> tuple[bool, bool, bool]:
        lane = gate.lane()
        late = await gate.wait(lane)
        gate.arrival_limit = 60
        waiting = asyncio.create_task(gate.wait(lane))
        await asyncio.sleep(0.02)
        gate.refuse()
        return late, await waiting, await gate.wait(lane)

    assert asyncio.run(main()) == (False, False, False)
    gate.open()
    assert gate.closed, "for good"
    assert gate.in_flight == 0


def test_an_arrival_whose_client_goes_while_it_waits_leaves_nothing_behind():
    guard = MemoryGuard()
    guard.start = lambda server=None: None
    served: list[int] = []

    async def app(scope, receive, send) -> None:
        served.append(1)
        await asyncio.sleep(60)

    async def main() -> None:
        middleware = MemoryGuardMiddleware(app, guard)
        assert guard.gate.close()
        waiting = [asyncio.create_task(middleware(SCOPE, nothing, nothing)) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert guard.gate.in_flight == 0
        guard.gate.open()
        await asyncio.sleep(0.01)
        assert (len(served), guard.gate.in_flight) == (2, 2)
        for task in waiting[1:]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())
    assert guard.gate.in_flight == 0


def test_closing_gives_up_at_its_limit_and_lets_all_pass_that_waited_meanwhile():
    gate = Gate()
    closed: list[bool] = []

    async def main() -> None:
        lane = gate.lane()
        lane.count += 1  # a long request
        thread = threading.Thread(target=lambda: closed.append(gate.close(limit=0.2)))
        thread.start()
        while not gate.closed:
            await asyncio.sleep(0.001)
        assert await gate.wait(lane)
        thread.join()
        lane.count -= 2

    asyncio.run(main())
    assert closed == [False]
    assert not gate.closed
    assert gate.in_flight == 0


def test_closing_waits_for_what_is_in_flight_on_loops_and_threads_and_for_what_it_does_not_count():
    guard = MemoryGuard()
    gate = guard.gate
    order: list[str] = []
    outside = threading.Event()
    entered = threading.Barrier(3)

    def on_a_thread() -> None:
        with guard.request():
            entered.wait()
            time.sleep(0.05)
            order.append("thread")

    async def on_a_loop() -> None:
        async with guard.request():
            entered.wait()
            await asyncio.sleep(0.1)
            order.append("loop")
        await asyncio.sleep(0.05)
        order.append("outside")
        outside.set()

    threads = [
        threading.Thread(target=on_a_thread),
        threading.Thread(target=lambda: asyncio.run(on_a_loop())),
    ]
    for thread in threads:
        thread.start()
    entered.wait()
    assert gate.in_flight == 2
    assert gate.close(limit=10, idle=outside.is_set)
    assert order == ["thread", "loop", "outside"]

    waited = threading.Thread(target=on_a_thread)
    entered = threading.Barrier(1)
    waited.start()
    waited.join(0.1)
    assert waited.is_alive(), "an arrival on a thread waits too"
    gate.open()
    waited.join(10)
    assert order[-1] == "thread"
    for thread in threads:
        thread.join()


def test_without_a_web_framework_a_shut_gate_is_told_by_an_exception():
    guard = MemoryGuard()
    guard.gate.refuse()
    with pytest.raises(ShutError), guard.request():
        pass

    async def main() -> None:
        async with guard.request():
            pass

    with pytest.raises(ShutError):
        asyncio.run(main())
    assert guard.gate.in_flight == 0
