# SPDX-License-Identifier: Apache-2.0
"""Faults of the measured calls: what is given up, what raises, who instruments twice, too many targets."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import types
from itertools import pairwise
from typing import Any

import pytest

from faults.served import MIB, Exported, Served, TorchMemInstrumentor, elsewhere, take, timed, track, until


class Held:
    """In a cycle: only the garbage collector sees that it is dropped, whatever the thread is at."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.itself = stream, self


# ---- given up


def abandoned_streams(streams: int) -> dict:
    served = Served()
    kept = take(30)
    users = served.exported.provider.get_meter("user").create_histogram("users.own")

    @track("stream")
    def stream() -> Any:
        yield from range(10)

    def collects(frame: Any, *_: Any) -> Any:
        if "opentelemetry/sdk" not in frame.f_code.co_filename:
            return None
        # everywhere, and in the ends of the user's own spans most of all: their locks are ours too
        if choose.random() < (0.5 if "exporter" in frame.f_code.co_filename else 0.002):
            gc.collect(0)
        return collects

    firsts, choose = [], random.Random(7)
    gc.disable()
    gc.freeze()
    sys.settrace(collects)  # at any line of the SDK, with whatever lock is held there
    for number in range(streams):
        held = Held(stream())
        firsts.append(next(held.stream))
        del held
        users.record(number, {"number": number % 7})
        served.traced.provider.get_tracer("user").start_span("users.own").end()
        if number % 20 == 0:
            served.collect()
    sys.settrace(None)
    gc.enable()
    gc.collect()
    whole = list(stream())

    def told() -> bool:  # the last of them perhaps by another thread, in this moment
        served.collect()
        return served.durations > streams

    until(told, 10)
    spans = [span for span in served.spans if span.name == "stream"]
    return {
        "firsts": set(firsts) == {0},
        "whole": whole,
        "spans": len(spans),
        "failed": sum(span.status.status_code.name == "ERROR" for span in spans),
        "told": sum("torch.memory.reserved.delta" in span.attributes for span in spans),
        "durations": served.durations,
        "active": served.active,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def test_an_abandoned_generator_hangs_nobody_and_has_its_span(gpu):
    got = gpu.run(abandoned_streams, args=[300], timeout=90)
    assert got["firsts"]
    assert got["whole"] == list(range(10))
    assert (got["spans"], got["told"], got["durations"]) == (301, 301, 301)
    assert (got["failed"], got["active"], got["lines"]) == (0, 0, [])


def cancelled_coroutines() -> dict:
    served = Served()
    kept = take(30)
    cleaned = []

    @track("answer")
    async def answer(given: int) -> int:
        try:
            await asyncio.sleep(30 if given % 2 else 0)
        finally:
            cleaned.append(given)
        return given

    async def serve() -> list[Any]:
        tasks = [asyncio.create_task(answer(given)) for given in range(6)]
        await asyncio.sleep(0.2)
        tasks[1].cancel()
        got = await asyncio.gather(*tasks[:2], return_exceptions=True)
        try:
            await asyncio.wait_for(tasks[3], 0.05)
        except asyncio.TimeoutError as error:
            got.append(error)
        tasks[5].cancel("the client has gone")
        try:
            await tasks[5]
        except asyncio.CancelledError as error:
            got.append(error)
        return [*(type(each).__name__ for each in got), str(got[-1]), await tasks[2]]

    came = asyncio.run(serve())
    served.collect()
    return {
        "came": came,
        "cleaned": sorted(cleaned),
        "spans": [[span.status.status_code.name, len(span.events)] for span in served.spans],
        "errors": [span.attributes.get("error.type") for span in served.spans],
        "durations": served.durations,
        "failures": [
            point.attributes["error.type"]
            for point in served.exported.points("torch.memory.request.duration")
            if "error.type" in point.attributes
        ],
        "active": served.active,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def test_a_cancelled_coroutine_is_cancelled_as_ever_and_is_no_error(gpu):
    got = gpu.run(cancelled_coroutines)
    assert got["came"] == [
        "int",
        "CancelledError",
        "TimeoutError",
        "CancelledError",
        "the client has gone",
        2,
    ]
    assert got["cleaned"] == list(range(6))
    assert got["spans"] == [["UNSET", 0]] * 6
    assert got["errors"] == [None] * 6
    assert (got["durations"], got["failures"], got["active"], got["lines"]) == (6, [], 0, [])


# ---- what raises


def everything_of_the_users_raises(what: str) -> dict:
    from emulator import control
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        InMemoryMetricReader,
        MetricExporter,
        PeriodicExportingMetricReader,
    )
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

    class BrokenProcessor(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            if what == "processor, at the start":
                raise OSError("on start")

        def on_end(self, span: Any) -> None:
            raise OSError("on end")

    class BrokenExporter(SpanExporter):
        def export(self, spans: Any) -> Any:
            asked(0)  # one that is a user of measured code itself
            raise OSError("export of spans")

    class BrokenMetricExporter(MetricExporter):
        exports = 0

        def export(self, *_: Any, **__: Any) -> Any:
            BrokenMetricExporter.exports += 1
            raise OSError("export of metrics")

        def force_flush(self, timeout_millis: float = 0) -> bool:
            return True

        def shutdown(self, *_: Any, **__: Any) -> None: ...

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a hook, or a callback")

    hooks = {"request_hook": broken, "response_hook": broken} if what == "hook" else {}
    served = Served(**hooks)
    meter = served.exported.provider.get_meter("user")
    for turn in range(2):
        if what == "callback":
            meter.create_observable_gauge(f"users.broken.{turn}", [broken])
        meter.create_observable_gauge(f"users.{turn}", [lambda _: [Observation(1)]])
    if what.startswith("processor"):
        served.traced.provider.add_span_processor(BrokenProcessor())
    if what == "exporter":
        served.traced.provider.add_span_processor(SimpleSpanProcessor(BrokenExporter()))
        TorchMemInstrumentor().uninstrument()
        reader = PeriodicExportingMetricReader(BrokenMetricExporter(), export_interval_millis=20)
        served.exported.reader = InMemoryMetricReader()
        served.exported.provider = MeterProvider([served.exported.reader, reader])
        served.instrument()
    kept = take(30)
    if what == "callback":  # and one of ours
        control.fail("cudaMemGetInfo", 0)

    @track("answer")
    def answer(given: int) -> int:
        if given == 7:
            raise KeyError(given)
        return given

    def asked(given: int) -> Any:
        try:
            return answer(given)
        except Exception as error:
            return repr(error)

    async def answers(given: int) -> Any:
        return asked(given)

    gave = [asked(given) for given in range(10)]
    gave += [asyncio.run(answers(10))]
    for _ in range(3):
        served.collect()
    _, more = timed(50, asked)
    return {
        "gave": gave,
        "more": more,
        "spans": len(served.spans),
        "failed": sum(span.status.status_code.name == "ERROR" for span in served.spans),
        "durations": served.durations,
        "allocated": served.exported.value("torch.memory.allocated"),
        "limit": served.exported.value("torch.memory.limit"),
        "users": [served.exported.value(f"users.{turn}") for turn in range(2) if what != "exporter"],
        "exports": BrokenMetricExporter.exports,
        "active": served.active,
        "skipped": served.skipped,
        "lines": served.lines,
        "kept": kept.numel(),
    }


def of_what_raises(gpu: Any, what: str) -> dict:
    """What is told where something of the user's raises; their own calls are as if it did not."""
    got = gpu.run(everything_of_the_users_raises, args=[what])
    answers = [given if given != 7 else "KeyError(7)" for given in range(50)]
    assert got["gave"] == answers[:11]
    assert got["more"] == answers
    assert (got["allocated"], got["active"]) == (30 * MIB, 0)
    if what != "processor, at the start":  # of which no span comes to be
        assert (got["durations"], got["spans"], got["failed"]) == (11, 61, 2)
    return got


def test_a_hook_that_raises_costs_a_log_line_and_no_call(gpu):
    got = of_what_raises(gpu, "hook")
    assert got["skipped"] == {"hook": 22}
    assert len(got["lines"]) == 2


@pytest.mark.needs_emulation
def test_a_callback_that_raises_costs_its_own_figures_alone(gpu):
    got = of_what_raises(gpu, "callback")
    assert got["users"] == [1, 1]
    assert got["limit"] is None  # the driver's, which fails
    assert got["skipped"]["error"] >= 3
    assert len(got["lines"]) == 2  # the ledger's and the snapshot's, once each


@pytest.mark.parametrize("when", ["", ", at the start"])
def test_a_span_processor_that_raises_costs_a_log_line_and_no_call(gpu, when):
    got = of_what_raises(gpu, f"processor{when}")
    assert got["skipped"]["request"] >= 11
    assert len(got["lines"]) == 1


def test_an_exporter_that_raises_costs_no_call_and_no_figure(gpu):
    got = of_what_raises(gpu, "exporter")
    assert got["exports"] > 0
    assert (got["skipped"], got["lines"]) == ({}, [])


# ---- who instruments


def engine_module() -> tuple[types.ModuleType, type]:
    class Engine:
        def generate(self, given: int) -> int:
            return given + 1

        def stream(self, given: int) -> Any:
            yield from range(given)

    module = types.ModuleType("engine_of_the_user")
    Engine.__module__, Engine.__qualname__ = module.__name__, "Engine"
    module.Engine = Engine  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module, Engine


def instrumented_twice() -> dict:
    kept = take(30)
    _, engine = engine_module()
    untouched = dict(vars(engine))
    targets = ["engine_of_the_user:Engine.generate"]
    served = Served(targets=targets)
    other = Exported()
    gate = threading.Barrier(9)

    def again() -> None:
        gate.wait()
        # the base class answers only who comes one after another
        TorchMemInstrumentor()._instrument(meter_provider=other.provider, targets=targets)

    threads = [elsewhere(again) for _ in range(8)]
    gate.wait()
    for thread in threads:
        thread.join()
    TorchMemInstrumentor().instrument(meter_provider=other.provider)
    answers = [engine().generate(given) for given in range(5)]
    served.collect()
    told = [len(served.spans), served.durations, len(served.exported.points("torch.memory.usage"))]
    TorchMemInstrumentor().uninstrument()
    return {
        "answers": answers,
        "told": told,
        "other": sorted(other.collect().names),
        "restored": {name: vars(engine).get(name) is entry for name, entry in untouched.items()},
        "after": sorted(name for name in served.collect().names if name.startswith("torch.")),
        "kept": kept.numel(),
    }


def test_a_second_instrument_measures_nothing_twice_and_one_uninstrument_ends_it(gpu):
    got = gpu.run(instrumented_twice)
    assert got["answers"] == [1, 2, 3, 4, 5]
    assert got["told"] == [5, 5, 6]
    assert (got["other"], got["after"]) == ([], [])
    assert all(got["restored"].values())


def uninstrumented_under_load(rounds: int) -> dict:
    kept = take(30)
    _, engine = engine_module()
    untouched = dict(vars(engine))
    targets = ["engine_of_the_user:Engine.generate", "engine_of_the_user:Engine.stream"]
    served = Served(targets=targets)
    stop = threading.Event()
    wrong: list[Any] = []
    calls = [0] * 3

    def load(which: int) -> None:
        while not stop.is_set():
            calls[which] += 1
            try:
                if engine().generate(which) != which + 1 or list(engine().stream(3)) != [0, 1, 2]:
                    wrong.append("result")
            except BaseException as error:
                wrong.append(repr(error))

    threads = [elsewhere(lambda which=which: load(which)) for which in range(3)]
    came_back, counted = [], []
    for _ in range(rounds):
        stop.wait(0.02)
        counted.append(served.collect().value("torch.memory.turnover"))
        TorchMemInstrumentor().uninstrument()
        stop.wait(0.01)
        came_back += [name for name in served.collect().names if name.startswith("torch.")]
        served.instrument(targets=targets)
    TorchMemInstrumentor().uninstrument()
    stop.set()
    for thread in threads:
        thread.join(30)
    return {
        "wrong": wrong[:3],
        "alive": sum(thread.is_alive() for thread in threads),
        "calls": sum(calls),
        "spans": len(served.spans),
        "came back": came_back,
        "fell": [pair for pair in pairwise(counted) if pair[0] > pair[1]],
        "after": sorted(name for name in served.collect().names if name.startswith("torch.")),
        "restored": [vars(engine).get(name) is entry for name, entry in untouched.items()],
        "kept": kept.numel(),
    }


def test_uninstrument_under_load_disturbs_no_call_and_no_point_comes_back(gpu):
    got = gpu.run(uninstrumented_under_load, args=[40], timeout=120)
    assert (got["wrong"], got["alive"]) == ([], 0)
    assert 40 < got["spans"] <= 2 * got["calls"]
    assert (got["came back"], got["fell"], got["after"]) == ([], [], [])
    assert all(got["restored"])


# ---- very many targets


def many_targets(targets: int) -> dict:
    kept = take(30)
    module = types.ModuleType("engines")
    sys.modules["engines"] = module
    for number in range(targets):
        engine = type(f"E{number}", (), {"generate": lambda self, given: given, "__module__": "engines"})
        setattr(module, engine.__name__, engine)
    bare, _ = timed(2000, module.E0().generate)
    served = Served(targets=["engines:E0.generate"])
    of_one, _ = timed(2000, module.E0().generate)
    TorchMemInstrumentor().uninstrument()
    served = Served(targets=[f"engines:E{number}.generate" for number in range(targets)])
    of_many, _ = timed(2000, module.E0().generate)
    answers = [getattr(module, f"E{number}")().generate(number) for number in range(targets)]
    served.collect()
    labels = {
        point.attributes.get("code.function.name")
        for point in served.exported.points("torch.memory.request.duration")
    }
    return {
        "answers": answers == list(range(targets)),
        "ratio": (of_many - bare) / (of_one - bare),
        "labels": len(labels),
        "of the others": sum(
            point.count
            for point in served.exported.points("torch.memory.request.duration")
            if point.attributes["torch.operation"] == "other"
        ),
        "durations": served.durations,
        "overflow": served.skipped.get("overflow"),
        "lost by the SDK": sum(
            "otel.metric.overflow" in point.attributes
            for metric in served.exported.metrics
            for point in metric.data.data_points
        ),
        "points": max(len(metric.data.data_points) for metric in served.exported.metrics),
        "restored": len(TorchMemInstrumentor().uninstrument() or ()),
        "kept": kept.numel(),
    }


def test_of_2000_targets_each_is_measured_and_the_series_are_bounded(gpu):
    got = gpu.run(many_targets, args=[2000], timeout=120)
    assert got["answers"]
    assert got["ratio"] < 2
    assert got["durations"] == 4000
    assert got["labels"] == 201
    assert got["of the others"] == 1800
    assert got["overflow"] >= 1800
    assert (got["lost by the SDK"], got["points"]) == (0, 201)
