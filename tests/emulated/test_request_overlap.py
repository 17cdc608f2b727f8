# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of threads, tasks, streams and nested targets, against a brute-force account."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from exported import Exported, Traced

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

MIB = 1 << 20
COUNTED = {
    "torch.memory.reserved.delta": "reserved_bytes.all.current",
    "torch.memory.turnover": "allocated_bytes.all.allocated",
    "torch.memory.allocation.retries": "num_alloc_retries",
    "torch.memory.ooms": "num_ooms",
    "torch.memory.device.allocations": "num_device_alloc",
}
EXCLUSIVE_ONLY = "torch.memory.allocated.delta"

# ---- the account: who is open when, by definition


@dataclass(eq=False)
class Call:
    """One call as the account knows it."""

    name: str
    outer: Call | None
    """The measured call in whose context it began, nested or not."""
    measured: bool
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    most: int = 0

    def above(self, living: list[Call]) -> list[Call]:
        """What it is nested in, of the calls that are open; the nearest first."""
        found, outer = [], self.outer
        while outer is not None:
            if outer in living:
                found.append(outer)
            outer = outer.outer
        return found


def at_once(call: Call, living: list[Call]) -> int:
    """A call and those beside it: not what it is nested in or what is nested in it; and of what is nested in
    another call beside it only that one counts."""
    line = [call, *call.above(living)]
    parents = [(other, next(iter(other.above(living)), None)) for other in living]
    return 1 + sum(
        other not in line and (parent is None or (parent is not call and parent in line))
        for other, parent in parents
    )


# ---- who makes the calls, one step at a time


class Actor:
    """A thread or a task that does what it is told, step by step. The calls it is in open by recursion."""

    def __init__(self, inherited: Call | None) -> None:
        self.stack = [] if inherited is None else [inherited]
        self.base = len(self.stack)
        """Of the stack, what is not its own: it was started in a call."""
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def told(self, step: Any) -> Any:
        """Have it do a step, and wait until it is done."""
        self._give(step)
        return self._answer()

    def _answer(self) -> Any:
        answer = self._done.get(timeout=30)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _give(self, step: Any) -> None:
        raise NotImplementedError

    def _act(self, step: Any) -> Any:
        if step == "raise":
            raise KeyError("of the user's")
        try:
            return step()
        except Exception as error:
            return error


class ThreadActor(Actor):
    def __init__(self, context: contextvars.Context | None = None, inherited: Call | None = None) -> None:
        super().__init__(inherited)
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._live if context is None else lambda: context.run(self._live)).start()
        self._answer()

    def _give(self, step: Any) -> None:
        self._steps.put(step)

    def _live(self) -> None:
        answer: Any = None
        while True:
            self._done.put(answer)
            step = self._steps.get()
            if step == "return":
                return
            if isinstance(step, Opening):
                with contextlib.suppress(KeyError):
                    step.call(self._live)
                answer = None
            else:
                answer = self._act(step)


class TaskActor(Actor):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None = None,
        inherited: Call | None = None,
    ) -> None:
        super().__init__(inherited)
        self._loop = loop
        self._steps: asyncio.Queue[Any] = asyncio.Queue()

        def start() -> None:
            self._task = loop.create_task(self._live(), context=context)

        loop.call_soon_threadsafe(start)
        self._answer()

    def _give(self, step: Any) -> None:
        self._loop.call_soon_threadsafe(self._steps.put_nowait, step)

    async def _live(self) -> None:
        answer: Any = None
        while True:
            self._done.put(answer)
            step = await self._steps.get()
            if step == "return":
                return
            if isinstance(step, Opening):
                with contextlib.suppress(KeyError):
                    await step.call_async(self._live)
                answer = None
            else:
                answer = self._act(step)


@dataclass
class Opening:
    call: Callable[..., Any]
    call_async: Callable[..., Any]


class Life:
    """One random life of a process: actors, calls and tensors, and the account of them."""

    def __init__(self, torch: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.torch = torch
        self.loop = loop
        self.actors: list[Actor] = []
        self.living: list[Call] = []
        self.ended: list[Call] = []
        self.streams: list[tuple[Any, Call]] = []
        self.kept: list[Any] = []
        self.made = 0
        self.stretches: list[tuple[list[Call], dict[str, int]]] = []
        """Of each step the requests that were open, and what the allocator did."""

    # the targets

    def opening(self, name: str, nested: bool) -> Opening:
        @track(name, nested=nested)
        def measured(live: Callable[[], None]) -> None:
            live()

        @track(name, nested=nested)
        async def measured_async(live: Callable[[], Any]) -> None:
            await live()

        return Opening(measured, measured_async)

    def stream(self, name: str, nested: bool) -> Any:
        @track(name, nested=nested)
        def tokens() -> Any:
            while True:
                yield self.allocate(3)

        return tokens()

    # the steps

    def statistics(self) -> dict[str, int]:
        stats = self.torch.cuda.memory_stats(0)
        keys = (*COUNTED.values(), "allocated_bytes.all.current", "allocated_bytes.all.peak")
        return {key: stats[key] for key in keys}

    def allocate(self, mib: int) -> None:
        with contextlib.suppress(self.torch.OutOfMemoryError):
            self.kept.append(self.torch.empty(mib * MIB, dtype=self.torch.uint8, device="cuda"))

    def begins(self, name: str, nested: bool, outer: Call | None) -> Call:
        measured = nested or outer is None or not (outer in self.living or outer.above(self.living))
        call = Call(name, outer, measured)
        if measured:
            call.before = self.statistics()
            self.living.append(call)
            self.look()
        return call

    def ends(self, call: Call) -> None:
        if call.measured:
            call.after = self.statistics()
            self.living.remove(call)
            self.ended.append(call)
            self.look()

    def look(self) -> None:
        for call in self.living:
            call.most = max(call.most, at_once(call, self.living))

    def step(self, choice: int, which: int) -> None:
        before = self.statistics()
        during = self.living.copy()
        self._step(choice, which)
        after = self.statistics()
        during += [call for call in self.living if call not in during]
        gained = {name: after[key] - before[key] for name, key in COUNTED.items()}
        self.stretches.append((during, gained))

    def _step(self, choice: int, which: int) -> None:
        actor = self.actors[which % len(self.actors)]
        inside = next((call for call in reversed(actor.stack) if call.measured), None)
        if choice in (0, 1, 2):  # a call begins; the second of three may be nested
            self.made += 1
            name, nested = f"call {self.made}", choice == 1
            call = self.begins(name, nested, inside)
            actor.stack.append(call)
            actor.told(self.opening(name, nested))
        elif choice in (3, 4) and len(actor.stack) > actor.base:  # or ends
            actor.told("raise" if choice == 4 and which % 3 == 0 else "return")
            self.ends(actor.stack.pop())
        elif choice == 5 and len(self.actors) < 7:  # something starts within a call
            context = actor.told(contextvars.copy_context)
            child = TaskActor(self.loop, context, inside) if which % 2 else ThreadActor(context, inside)
            self.actors.append(child)
        elif choice == 6:
            actor.told(lambda: self.allocate(1 + which % 120))
        elif choice == 7 and self.kept:
            del self.kept[which % len(self.kept) :: 2]
        elif choice == 8:  # a stream begins
            self.made += 1
            name, nested = f"stream {self.made}", which % 2 == 1
            stream = self.stream(name, nested)
            call = self.begins(name, nested, inside)
            self.streams.append((stream, call))
            actor.told(lambda: next(stream))
        elif choice == 9 and self.streams:  # goes on or ends, on any thread or task
            stream, call = self.streams[which % len(self.streams)]
            if which % 2:
                actor.told(lambda: next(stream))
            else:
                self.streams.remove((stream, call))
                actor.told(stream.close)
                self.ends(call)

    def end(self) -> None:
        for stream, call in self.streams:
            stream.close()
            self.ends(call)
        for actor in reversed(self.actors):
            while len(actor.stack) > actor.base:
                actor.told("return")
                self.ends(actor.stack.pop())
            actor._give("return")
        self.kept.clear()


OFTEN = (0, 1, 2, 3, 3, 3, 3, 4, 4, 5, 6, 6, 6, 6, 6, 7, 7, 8, 9, 9, 9)
"""The choices of a step, each as often as it should come."""


def random_lives(examples: int, steps: int, conf: str | None) -> dict:
    import torch
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    windows = TorchMemInstrumentor()._instrumented._wiring._requests.windows
    weights = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever, daemon=True)
    runner.start()
    seen = {"spans": 0, "shared": 0, "exclusive": 0, "beside in one": 0, "retries": 0, "ooms": 0, "most": 0}
    recorded = {"exclusive": 0, "count": 0}

    def drained() -> list[Any]:
        exported.collect()
        return traced.spans

    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    @given(st.lists(st.tuples(st.sampled_from(OFTEN), st.integers(0, 1000)), min_size=20, max_size=steps))
    def lives(choices: list[tuple[int, int]]) -> None:
        torch.cuda.empty_cache()
        traced.exporter.clear()
        life = Life(torch, loop)
        life.actors = [ThreadActor(), ThreadActor(), TaskActor(loop)]
        try:
            for choice, which in choices:
                life.step(choice, which)
        finally:
            life.end()
        spans = {span.name.partition(" measured")[0].partition(" tokens")[0]: span for span in drained()}
        assert sorted(spans) == sorted(call.name for call in life.ended)
        for call in life.ended:
            told = spans[call.name].attributes
            assert told["torch.memory.requests.concurrent"] == call.most, call
            assert told["torch.memory.exclusive"] is (call.most == 1), call
            for name, key in COUNTED.items():
                assert told[name] == call.after[key] - call.before[key], (call, name)
            allocated = call.after["allocated_bytes.all.current"] - call.before["allocated_bytes.all.current"]
            assert told.get(EXCLUSIVE_ONLY) == (allocated if call.most == 1 else None)
            growth = call.after["allocated_bytes.all.peak"] - call.before["allocated_bytes.all.peak"]
            assert told.get("torch.memory.peak_growth") == (growth or None if call.most == 1 else None)
            if call.outer is not None and call.outer in life.ended:
                parent = spans[call.outer.name].context.span_id
                assert spans[call.name].parent.span_id == parent
            seen["spans"] += 1
            seen["exclusive" if call.most == 1 else "shared"] += 1
            seen["beside in one"] += call.most > 1 and call.outer is not None
            seen["most"] = max(seen["most"], call.most)
            seen["retries"] += told["torch.memory.allocation.retries"]
            seen["ooms"] += told["torch.memory.ooms"]
        # over the exclusive ones that are not nested, which are disjoint, deltas are what the allocator did
        alone = [call for call in life.ended if call.most == 1 and call.outer is None]
        for name in COUNTED:
            did = sum(gained[name] for during, gained in life.stretches for call in during if call in alone)
            assert sum(spans[call.name].attributes[name] for call in alone) == did
        assert windows.count == 0
        assert not windows.any_open
        active = {value for _, value in exported.all("torch.memory.requests.active")}
        assert active <= {0}, active
        recorded["count"] += len(life.ended)

    lives()
    exported.collect()
    durations = exported.points("torch.memory.request.duration")
    loop.call_soon_threadsafe(loop.stop)
    runner.join()
    skipped = {labels["torch.memory.telemetry.reason"]: value
               for labels, value in exported.all("torch.memory.telemetry.skipped")}  # fmt: skip
    return {
        "seen": seen,
        "recorded": sum(point.count for point in durations),
        "ended": recorded["count"],
        "exclusive": sum(
            point.count for point in durations if point.attributes.get("torch.memory.exclusive") is True
        ),
        "skipped": {
            reason: value
            for reason, value in skipped.items()
            if value and reason != "overflow" and "snapshot" not in reason
        },
        "alive": weights.numel(),
    }


@pytest.mark.needs_emulation
@pytest.mark.parametrize("conf", [None, "expandable_segments:True"], ids=["native", "expandable"])
def test_every_interleaving_is_told_as_it_was(gpu, conf):
    got = gpu.run(random_lives, args=[120, 60, conf], memory="300MiB", alloc_conf=conf, timeout=240)
    seen = got["seen"]
    print(seen)
    assert got["recorded"] == got["ended"] == seen["spans"] > 500
    assert got["exclusive"] == seen["exclusive"]
    assert min(seen["shared"], seen["exclusive"], seen["beside in one"]) > 20
    assert seen["most"] >= 4
    if conf is None:
        assert seen["retries"] > 0
    assert seen["ooms"] > 0
    assert got["skipped"] == {}


# ---- nobody steps: threads and tasks as they come


def as_they_come(threads: int, tasks: int, calls: int) -> dict:
    import torch

    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider, tracer_provider=traced.provider)
    windows = TorchMemInstrumentor()._instrumented._wiring._requests.windows
    weights = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    log: list[tuple[str, str]] = []  # what happened, in the order of the interpreter
    own: dict[str, int] = {}

    def work(name: str, chance: random.Random) -> None:
        log.append(("in", name))
        handed_out = 0
        for _ in range(chance.randrange(3)):
            mib = chance.randrange(2, 8)
            torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
            handed_out += mib * MIB
        own[name] = handed_out

    def a_thread(number: int) -> None:
        chance = random.Random(number)
        for turn in range(calls):
            name = f"thread {number} {turn}"
            log.append(("want", name))
            with track(name, nested=False) as request:
                request.set_attribute("id", name)
                work(name, chance)
                with track("unmeasured"):
                    time.sleep(chance.random() / 2000)
                log.append(("out", name))
            log.append(("done", name))
            time.sleep(chance.random() / 500)

    async def a_task(number: int) -> None:
        chance = random.Random(1000 + number)
        for turn in range(calls):
            name = f"task {number} {turn}"
            log.append(("want", name))
            with track(name) as request:
                request.set_attribute("id", name)
                work(name, chance)
                await asyncio.sleep(chance.random() / 2000)
                log.append(("out", name))
            log.append(("done", name))
            await asyncio.sleep(chance.random() / 500)

    async def all_tasks() -> None:
        await asyncio.gather(*(a_task(number) for number in range(tasks)))

    collecting = threading.Event()

    def collect() -> None:
        while not collecting.wait(0.02):
            exported.collect()

    collector = threading.Thread(target=collect)
    workers = [threading.Thread(target=a_thread, args=(number,)) for number in range(threads)]
    workers.append(threading.Thread(target=lambda: asyncio.run(all_tasks())))
    for worker in (collector, *workers):
        worker.start()
    for worker in workers:
        worker.join()
    collecting.set()
    collector.join()

    def most(begins: str, ends: str) -> dict[str, int]:
        """The most that were open at one time during each, if one is open between the two."""
        living: dict[str, int] = {}
        ended: dict[str, int] = {}
        for what, name in log:
            if what == begins:
                living[name] = 0
                for each, seen in living.items():
                    living[each] = max(seen, len(living))
            elif what == ends:
                ended[name] = living.pop(name)
        return ended

    surely, perhaps = most("in", "out"), most("want", "done")
    wrong, exclusive = [], 0
    for span in traced.spans:
        told, name = span.attributes, span.attributes["id"]
        concurrent = told["torch.memory.requests.concurrent"]
        if not surely[name] <= concurrent <= perhaps[name]:
            wrong.append([name, concurrent, surely[name], perhaps[name]])
        if told["torch.memory.exclusive"] is not (concurrent == 1):
            wrong.append([name, "exclusive"])
        if concurrent == 1:
            exclusive += 1
            if told["torch.memory.turnover"] != own[name]:
                wrong.append([name, told["torch.memory.turnover"], own[name]])
        elif told["torch.memory.turnover"] < own[name]:
            wrong.append([name, told["torch.memory.turnover"], own[name]])
    exported.collect()
    return {
        "wrong": wrong,
        "spans": len(traced.spans),
        "exclusive": exclusive,
        "most": max(span.attributes["torch.memory.requests.concurrent"] for span in traced.spans),
        "count": windows.count,
        "any": windows.any_open,
        "active": exported.value("torch.memory.requests.active"),
        "recorded": sum(point.count for point in exported.points("torch.memory.request.duration")),
        "alive": weights.numel(),
    }


@pytest.mark.parametrize(("threads", "tasks"), [(1, 1), (4, 4)])
def test_threads_and_tasks_as_they_come_lie_between_what_was_sure_and_what_may_have_been(gpu, threads, tasks):
    calls = 300
    got = gpu.run(as_they_come, args=[threads, tasks, calls], memory="1GiB", timeout=120)
    assert got["wrong"] == []
    assert got["spans"] == got["recorded"] == (threads + tasks) * calls
    assert 0 < got["exclusive"] < got["spans"]
    assert 2 <= got["most"] <= threads + tasks
    assert (got["count"], got["any"], got["active"]) == (0, False, 0)
