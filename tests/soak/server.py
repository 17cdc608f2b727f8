# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - the paths first
"""The example server with everything on, which keeps an account of its own of each call.

    python server.py FOLDER COLLECTOR [LEAK]

Runs on the emulated GPU. Commands come as lines of JSON on standard input, their answers go to standard
output. The account is FOLDER/account.jsonl; COLLECTOR is the address that OTLP goes to.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

import serve
import torch
import uvicorn
from diffusers import StableDiffusionPipeline
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry import _logs, metrics, trace
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import (
    AlignedHistogramBucketExemplarReservoir,
    AlwaysOnExemplarFilter,
    MeterProvider,
    SimpleFixedSizeExemplarReservoir,
)
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from pydantic import BaseModel
from transformers import GenerationMixin

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track
from opentelemetry_instrumentation_torchmem.package import NAME
from opentelemetry_instrumentation_torchmem.signals import REQUEST_METRICS

MIB = 1 << 20
EXPORT_S = 1.0
PATIENCE_S = 120.0
"""How long an export is tried again: longer than any outage."""
LEAK_S = 0.1
"""A leak leaks as often."""
TARGETS = ["__main__:Engine.answer", "__main__:Engine.stream", "__main__:Engine.pieces"]

REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
"""What the client calls the request."""


class Account:
    """Each call and each switch, as they happened here. A line is put from any thread, a finalizer's too."""

    def __init__(self, path: Path) -> None:
        self.open: dict[int, None] = {}
        self._numbers = itertools.count()
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, args=(path,), daemon=True, name="account")
        self._writer.start()
        threading.Thread(target=self._count_objects, daemon=True).start()

    def note(self, what: str, **told: Any) -> None:
        self._lines.put(json.dumps({"what": what, "at": time.time_ns(), **told}))

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Around the body of what may be measured: whether it is, the current span says."""
        number, entry = next(self._numbers), ENTRY.get()
        if entry is not None:
            entry.calls.append(number)
        self.open[number] = None
        self.note(
            "began",
            call=number,
            request=REQUEST.get(),
            operation=operation,
            span=our_span(),
            before=None if entry is None else entry.stage,
            within=SWITCH.stage,
        )
        outcome = "ok"
        try:
            yield
        except BaseException as error:
            outcome = type(error).__qualname__
            raise
        finally:
            self.note("ended", call=number, outcome=outcome)
            del self.open[number]

    def close(self) -> None:
        self._lines.put(None)
        self._writer.join()

    def _count_objects(self) -> None:
        """The interpreter's blocks of memory: a leak of objects shows here long before it is megabytes.

        Garbage in cycles is none. Two million objects are there from the start, and not looked through again
        each time.
        """
        gc.collect()
        gc.freeze()
        while True:
            gc.collect()
            self.note("holds", blocks=sys.getallocatedblocks())
            time.sleep(1)

    def _write(self, path: Path) -> None:
        with open(path, "w") as file:
            while (line := self._lines.get()) is not None:
                file.write(line + "\n")
                if self._lines.empty():
                    file.flush()


def our_span() -> str | None:
    """The current span, if it is one of this package's: FastAPI has some of its own."""
    span = trace.get_current_span()
    scope = getattr(span, "instrumentation_scope", None)
    return f"{span.get_span_context().span_id:016x}" if scope is not None and scope.name == NAME else None


class Entry:
    """Around a call as its caller sees it: how things stood before, and which calls had ended after."""

    def __init__(self) -> None:
        self.stage = SWITCH.stage
        self.calls: list[int] = []

    def left(self) -> None:
        for call in self.calls:
            ACCOUNT.note("left", call=call)


ENTRY: ContextVar[Entry | None] = ContextVar("entry", default=None)


def entered(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def outer(*args: Any, **kwargs: Any) -> Any:
        entry = Entry()
        token = ENTRY.set(entry)
        try:
            return function(*args, **kwargs)
        finally:
            ENTRY.reset(token)
            entry.left()

    return outer


def measured(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with ACCOUNT.call(operation):
            return function(*args, **kwargs)

    return inner


class Switch:
    """Instruments and uninstruments the live server."""

    def __init__(self, dumps: Path) -> None:
        self.stage: tuple[int, str] = (0, "off")
        """How often it was switched, and how it stands: on, off, or in between."""
        self._dumps = dumps

    def on(self) -> None:
        with self._to("on"):
            TorchMemInstrumentor().instrument(targets=TARGETS, oom_dump_dir=str(self._dumps))

    def off(self, flush: bool) -> None:
        """``flush``: what was recorded goes out first, as an application that cares would do it."""
        flushed = None
        if flush:
            began = time.time_ns()
            flushed = began if metrics.get_meter_provider().force_flush(20_000) else None
        with self._to("off", flushed=flushed):
            TorchMemInstrumentor().uninstrument()

    @contextmanager
    def _to(self, state: str, **told: Any) -> Iterator[None]:
        number = self.stage[0] + 1
        began, self.stage = time.time_ns(), (number, "between")
        yield
        self.stage = (number, state)
        ACCOUNT.note("switched", to=state, began=began, ended=time.time_ns(), **told)


# -------------------------------------------------------------- what the SDK takes, and what it gives up


class Noted:
    """The SDK's own reservoir of exemplars, which notes each measurement that the SDK hands it."""

    _numbers = itertools.count()

    def __init__(self, metric: str, reservoir: Any) -> None:
        self._metric = metric
        self._reservoir = reservoir
        self._number = next(self._numbers)
        self._made = time.time_ns()

    def offer(self, value: float, time_unix_nano: int, attributes: Any, context: Any) -> None:
        span = trace.get_current_span(context).get_span_context()
        ACCOUNT.note(
            "recorded",
            metric=self._metric,
            series=self._number,
            made=self._made,
            attributes=dict(attributes),
            value=value,
            span=f"{span.span_id:016x}",
        )
        self._reservoir.offer(value, time_unix_nano, attributes, context)

    def collect(self, point_attributes: Any) -> Any:
        return self._reservoir.collect(point_attributes)


def noting(metric: str) -> Callable[[Any], Callable[..., Noted]]:
    def build(**arguments: Any) -> Noted:
        histogram = "boundaries" in arguments
        kind = AlignedHistogramBucketExemplarReservoir if histogram else SimpleFixedSizeExemplarReservoir
        return Noted(metric, kind(**arguments))

    return lambda _: build


class Reader(PeriodicExportingMetricReader):
    """Notes when each collection began: what it has is from then on, though its points bear a later time."""

    def collect(self, timeout_millis: float = 10_000) -> None:
        ACCOUNT.note("collects")
        super().collect(timeout_millis)


class CountedLogs(OTLPLogExporter):
    """Notes the log records that the SDK gives up after its last try."""

    def export(self, batch: Any) -> Any:
        result = super().export(batch)
        if result.name != "SUCCESS":
            ACCOUNT.note("unlogged", events=[each.log_record.event_name for each in batch])
        return result


class Counted(OTLPSpanExporter):
    """The same of spans."""

    def export(self, spans: Any) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            ACCOUNT.note("given up", spans=[f"{span.get_span_context().span_id:016x}" for span in spans])
        return result


def providers(collector: str) -> tuple[MeterProvider, TracerProvider, LoggerProvider]:
    """The SDK's own, over OTLP to a collector; queues that hold an outage."""
    exporter = OTLPMetricExporter(f"{collector}/v1/metrics", timeout=PATIENCE_S)
    reader = Reader(exporter, 1000 * EXPORT_S, 1000 * PATIENCE_S)
    views = [
        View(instrument_name=row.name, exemplar_reservoir_factory=noting(row.name)) for row in REQUEST_METRICS
    ]
    # all, for the account: growths of 0 are recorded where no span is
    metered = MeterProvider([reader], views=views, exemplar_filter=AlwaysOnExemplarFilter())
    traced = TracerProvider(sampler=ALWAYS_ON)
    spans = Counted(f"{collector}/v1/traces", timeout=PATIENCE_S)
    traced.add_span_processor(BatchSpanProcessor(spans, max_queue_size=1 << 16, schedule_delay_millis=500))
    logged = LoggerProvider()
    logs = CountedLogs(f"{collector}/v1/logs", timeout=PATIENCE_S)
    logged.add_log_record_processor(BatchLogRecordProcessor(logs, schedule_delay_millis=500))
    metrics.set_meter_provider(metered)
    trace.set_tracer_provider(traced)
    _logs.set_logger_provider(logged)
    return metered, traced, logged


# ------------------------------------------------------------------------------------------- the server


class AskedError(ValueError):
    """What a request that asks to fail fails with."""


class Work(BaseModel):
    mib: int = 1
    steps: int = 3
    seconds: float = 0.0
    """Of each step."""
    fails: bool = False
    cancel_after: float | None = None


def hold(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


class Engine:
    """The user's own, of every kind that is measured by name."""

    async def answer(self, work: Work) -> int:
        with ACCOUNT.call("answer"):
            held = [hold(work.mib)]
            for _ in range(work.steps):
                await asyncio.sleep(work.seconds)
                held.append(hold(work.mib))
            if work.fails:
                raise AskedError("as was asked")
            return len(held)

    async def stream(self, work: Work) -> AsyncIterator[str]:
        with ACCOUNT.call("stream"):
            for step in range(work.steps):
                held = hold(work.mib)
                await asyncio.sleep(work.seconds)
                yield f"data: {step} {held.numel()}\n\n"

    def pieces(self, work: Work) -> Iterator[str]:
        with ACCOUNT.call("pieces"):
            for step in range(work.steps):
                held = hold(work.mib)
                time.sleep(work.seconds)
                yield f"data: {step} {held.numel()}\n\n"


@entered
def rerank(work: Work) -> int:
    with track("rerank") as request, ACCOUNT.call("rerank"):
        request.set_attribute("app.steps", work.steps)
        return sum(hold(work.mib).numel() for _ in range(work.steps))


def with_routes(app: FastAPI) -> FastAPI:
    engine = Engine()

    @app.post("/answer")
    async def answer(work: Work) -> dict[str, Any]:
        entry = Entry()
        ENTRY.set(entry)
        try:
            return {"answer": await asyncio.wait_for(engine.answer(work), work.cancel_after)}
        except asyncio.TimeoutError:
            return {"answer": "cancelled"}
        except AskedError:
            return {"answer": "failed"}
        finally:
            entry.left()

    @app.post("/stream")
    def stream(work: Work) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            entry = Entry()
            ENTRY.set(entry)
            try:
                async for event in engine.stream(work):  # not closed where the client goes: given up
                    yield event
                entry.left()
                yield "data: [DONE]\n\n"
            except torch.cuda.OutOfMemoryError as error:
                entry.left()
                yield "event: error\n" + serve.event(serve.out_of_memory(error))

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/pieces")
    def pieces(work: Work) -> StreamingResponse:
        def events() -> Iterator[str]:
            entry = Entry()
            ENTRY.set(entry)
            try:
                yield from engine.pieces(work)
                entry.left()
                yield "data: [DONE]\n\n"
            except torch.cuda.OutOfMemoryError as error:
                entry.left()
                yield "event: error\n" + serve.event(serve.out_of_memory(error))

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.post("/rerank")
    def ranked(work: Work) -> dict[str, int]:
        return {"answer": rerank(work)}

    return app


class Named:
    """Around the whole application: what the client calls a request, its calls know."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            name = dict(scope["headers"]).get(b"x-request")
            REQUEST.set(None if name is None else name.decode())
        await self._app(scope, receive, send)


# ------------------------------------------------------------------------------------------- its control


def leak_of(kind: str) -> Callable[[], Any]:
    """What leaks a little of a kind at each call."""
    held: list[Any] = []
    forever = threading.Event()
    numbers = itertools.count()
    counter = metrics.get_meter("soak").create_counter("soak.leak")

    def thread() -> None:
        threading.Thread(target=forever.wait, daemon=True).start()

    return {
        "memory": lambda: held.append(b"\1" * (4 * MIB)),
        "threads": thread,
        "descriptors": lambda: held.append(os.open(os.devnull, os.O_RDONLY)),
        "series": lambda: counter.add(1, {"number": next(numbers)}),
        "objects": lambda: held.append([[] for _ in range(5000)]),
    }[kind]


class Control(threading.Thread):
    """Does what the lines on standard input say, one after another."""

    def __init__(self, server: uvicorn.Server, providers: tuple[Any, ...]) -> None:
        super().__init__(daemon=True, name="control")
        self._server = server
        self._providers = providers

    def run(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(self, command.pop("do"))(**command)
            except Exception as error:
                answer = {"raised": repr(error)}
            print(json.dumps(answer), flush=True)
        os._exit(3)  # whoever commands has gone

    def on(self) -> None:
        SWITCH.on()

    def off(self, flush: bool) -> None:
        SWITCH.off(flush)

    def rest(self, seconds: float) -> list[int]:
        """The calls that are still open after so long."""
        end = time.monotonic() + seconds
        while ACCOUNT.open and time.monotonic() < end:
            gc.collect()
            time.sleep(0.05)
        return list(ACCOUNT.open)

    def told(self) -> dict[str, Any]:
        """The allocator's figures, as they are before and after all has been exported."""
        stats = torch.cuda.memory_stats()
        at = time.time_ns()
        flushed = [each.force_flush(60_000) for each in self._providers]
        return {"flushed": flushed, "at": at, "stats": stats, "still": torch.cuda.memory_stats() == stats}

    def end(self) -> None:
        self._server.should_exit = True


def watch_what_is_said() -> None:
    logging.basicConfig(level=logging.WARNING)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: ACCOUNT.note("said", line=record.getMessage())
    logging.getLogger(NAME).addHandler(handler)
    unraisable, in_thread = sys.unraisablehook, threading.excepthook

    def unraised(raised: Any) -> None:
        ACCOUNT.note("raised", error=f"{raised.exc_value!r} in {raised.object!r}")
        unraisable(raised)

    def in_a_thread(raised: Any) -> None:
        ACCOUNT.note("raised", error=f"{raised.exc_value!r} in {raised.thread!r}")
        in_thread(raised)

    sys.unraisablehook, threading.excepthook = unraised, in_a_thread


def main() -> None:
    watch_what_is_said()
    GenerationMixin.generate = measured("generate text", GenerationMixin.generate)
    StableDiffusionPipeline.__call__ = measured("generate image", StableDiffusionPipeline.__call__)
    serve.Writer.write = entered(serve.Writer.write)
    serve.Painter.paint = entered(serve.Painter.paint)
    exported = providers(sys.argv[2])
    SWITCH.on()  # as the launcher does it, before the application is made
    arguments = ["--device", "cuda", "--cudnn", "0", "--guard", "1"]
    app = with_routes(serve.create_app(serve.options_from(serve.option_parser().parse_args(arguments))))
    server = uvicorn.Server(uvicorn.Config(Named(app), log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)
    Control(server, exported).start()
    if len(sys.argv) > 3:
        leak = leak_of(sys.argv[3])

        def leaks() -> None:
            while True:
                leak()
                time.sleep(LEAK_S)

        threading.Thread(target=leaks, daemon=True).start()
    server.run([listener])
    for provider in exported:
        provider.shutdown()
    ACCOUNT.close()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    ACCOUNT = Account(FOLDER / "account.jsonl")
    SWITCH = Switch(FOLDER / "dumps")
    main()
