# SPDX-License-Identifier: Apache-2.0
"""The middleware: what is counted and until when, what probes are told, how connections are closed."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from opentelemetry_instrumentation_torchmem import MemoryGuard, MemoryGuardMiddleware
from opentelemetry_instrumentation_torchmem.guard import CompactionOutcome, DeviceReadings, Readings
from opentelemetry_instrumentation_torchmem.guard.machine import State, Timing
from opentelemetry_instrumentation_torchmem.guard.middleware import endpoint
from opentelemetry_instrumentation_torchmem.guard.telling import Figures

MIB = 1 << 20


class Server:
    """An application under a guard that the test ticks by hand, on a clock of its own."""

    def __init__(
        self, routes: list[Any] = (), middleware: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.now = 0.0
        self.sick = False
        self.headroom, self.reserved = 100 * MIB, 800 * MIB
        timing = Timing(
            sick_for=10,
            cool_down=0,
            probe_period=5,
            probe_failures=1,
            drain_limit=60,
            hold_limit=0,
            min_uptime=0,
        )
        self.guard = MemoryGuard(
            lambda readings: "cuda:0 is short" if self.sick else False,
            timing=timing,
            clock=lambda: self.now,
            readings=self.readings,
            clear=self.clear,
            steers=options.pop("steers", True),
            **options,
        )
        self.guard.start = lambda server=None: None
        self.app = Starlette(routes=list(routes))
        self.app.add_middleware(MemoryGuardMiddleware, guard=self.guard, **(middleware or {}))

    def readings(self, fresh: bool) -> Readings:
        device = DeviceReadings("cuda:0", self.now, reserved=self.reserved, headroom=self.headroom)
        return Readings((device,), self.now, cleared=fresh)

    def clear(self) -> None:
        self.reserved -= 300 * MIB

    def pass_by(self, seconds: float) -> State:
        self.now += seconds
        self.guard.tick()
        if self.guard._clearing is not None:
            self.guard._clearing.join()
        return self.guard.state

    def drain(self) -> None:
        self.sick = True
        self.pass_by(0)
        assert self.pass_by(10) is State.DRAINING


def test_a_probe_is_told_ready_or_not_and_nothing_else():
    server = Server(restart="liveness")
    client = TestClient(server.app)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.text) == (200, "yes\n")
    server.drain()
    answer = client.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "no\n")
    assert set(answer.headers) == {"content-type", "content-length", "cache-control"}
    assert client.head("/readyz").status_code == 503
    assert client.head("/readyz").text == ""
    assert client.post("/readyz").status_code == 405
    assert client.get("/livez").status_code == 200
    assert server.guard.gate.in_flight == 0
    server.pass_by(6)
    assert server.guard.state is State.RESTART_WANTED
    assert (client.get("/livez").status_code, client.get("/readyz").status_code) == (503, 503)


def test_the_probes_paths_are_the_users_and_none_hides_a_route_of_the_applications():
    routes = [Route("/readyz", lambda request: PlainTextResponse("mine"))]
    server = Server(routes, {"ready_path": None, "live_path": "/-/alive"})
    client = TestClient(server.app)
    assert client.get("/readyz").text == "mine"
    assert client.get("/-/alive").text == "yes\n"
    assert client.get("/livez").status_code == 404
    mounted = TestClient(endpoint(server.guard.ready))
    assert mounted.get("/whatever").status_code == 200


def test_streams_and_background_tasks_are_in_flight_to_their_end():
    seen: list[tuple[str, int]] = []

    async def stream(request):
        async def pieces():
            for number in range(3):
                seen.append((f"piece {number}", server.guard.gate.in_flight))
                yield b"piece"

        async def after():
            await asyncio.sleep(0)
            seen.append(("background", server.guard.gate.in_flight))

        return StreamingResponse(pieces(), background=BackgroundTask(after))

    server = Server([Route("/", stream)])
    assert TestClient(server.app).get("/").text == "piecepiecepiece"
    assert seen == [("piece 0", 1), ("piece 1", 1), ("piece 2", 1), ("background", 1)]
    assert server.guard.gate.in_flight == 0


def test_what_raises_in_the_application_is_in_flight_no_more():
    def fails(request):
        raise LookupError

    server = Server([Route("/", fails)])
    with pytest.raises(LookupError):
        TestClient(server.app).get("/")
    assert server.guard.gate.in_flight == 0


def test_while_it_drains_every_arrival_is_served_and_asked_to_close_its_connection():
    def hello(request):
        return PlainTextResponse("hello", headers={"connection": "keep-alive"})

    server = Server([Route("/", hello)])
    client = TestClient(server.app)
    assert client.get("/").headers["connection"] == "keep-alive"
    server.drain()
    answer = client.get("/")
    assert (answer.status_code, answer.headers.get_list("connection")) == (200, ["close"])
    server.sick = False
    assert server.pass_by(5) is State.SERVING
    assert client.get("/").headers["connection"] == "keep-alive"


def test_a_fault_of_the_gates_own_is_said_and_reaches_no_request(caplog):
    server = Server([Route("/", lambda request: PlainTextResponse("hello"))])
    gate, client = server.guard.gate, TestClient(server.app)
    server.guard.start = lambda server=None: 1 / 0
    gate.arrival_limit = None  # whatever a fault may be
    gate.close()
    gate.recent = None
    assert client.get("/").text == "hello"
    with server.guard.request():
        assert gate.in_flight == 1
    gate.shut = True
    assert client.get("/").status_code == 503, "even so nobody touches what is not there"
    assert gate.in_flight == 0
    assert [line for line in caplog.messages if "the guard's" in line] == [
        "torchmem: the guard's start failed: ZeroDivisionError('division by zero')",
        "torchmem: the guard's gate failed: TypeError(\"unsupported operand type(s) for +: "
        "'float' and 'NoneType'\")",
    ]


def test_http_2_has_no_such_header():
    server = Server()
    server.drain()
    sent: list[Any] = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/", "http_version": "2", "method": "GET"}
    asyncio.run(MemoryGuardMiddleware(app, server.guard)(scope, None, send))
    assert sent == [{"type": "http.response.start", "status": 200, "headers": []}]


def test_a_request_in_flight_is_waited_for_and_then_it_is_cleared():
    release, entered = threading.Event(), threading.Event()

    def slow(request):
        entered.set()
        release.wait(30)
        return PlainTextResponse("done")

    server = Server([Route("/", slow)])
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(TestClient(server.app).get("/")))
    thread.start()
    entered.wait(30)
    server.drain()
    assert server.pass_by(6) is State.DRAINING
    assert server.pass_by(30) is State.DRAINING
    release.set()
    thread.join(30)
    server.sick = False
    assert server.pass_by(0.1) is State.SERVING
    assert answers[0].text == "done"


# websockets


async def echo(websocket):
    await websocket.accept()
    try:
        while True:
            await websocket.send_text(await websocket.receive_text())
    except WebSocketDisconnect as gone:
        closed.append(gone.code)


closed: list[int] = []


@pytest.mark.parametrize("closes", [True, False])
def test_websockets_are_waited_for_or_closed_with_1012_when_a_drain_begins(closes):
    closed.clear()
    server = Server([WebSocketRoute("/", echo)], {"close_websockets": closes})
    client = TestClient(server.app)
    with client.websocket_connect("/") as websocket:
        websocket.send_text("one")
        assert websocket.receive_text() == "one"
        assert server.guard.gate.in_flight == 1
        server.drain()
        if closes:
            with pytest.raises(WebSocketDisconnect) as gone:
                websocket.receive_text()
            assert gone.value.code == 1012
        else:
            websocket.send_text("two")
            assert websocket.receive_text() == "two"
            assert server.pass_by(6) is State.DRAINING, "in flight still"
    assert closed == ([1012] if closes else [1000])
    assert server.guard.gate.in_flight == 0


def test_a_websocket_that_comes_while_it_drains_is_taken_before_it_is_closed():
    server = Server([WebSocketRoute("/", echo)], {"close_websockets": True})
    server.drain()
    with TestClient(server.app).websocket_connect("/") as websocket:
        with pytest.raises(WebSocketDisconnect) as gone:
            websocket.receive_text()
        assert gone.value.code == 1012


# compaction's place in it


class Compaction:
    def __init__(self, server: Server, outcome: CompactionOutcome | Exception, well: bool) -> None:
        self.server, self.outcome, self.well = server, outcome, well
        self.gate: list[tuple[bool, bool]] = []

    def __call__(self) -> CompactionOutcome:
        gate = self.server.guard.gate
        self.gate.append((gate.closed, gate.shut))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.server.sick = not self.well
        self.server.headroom += 500 * MIB * self.well
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "well", "state"),
    [
        (CompactionOutcome(moved=1), True, State.SERVING),
        (CompactionOutcome(refused="a captured graph"), False, State.RESTART_WANTED),
        (RuntimeError("no"), False, State.RESTART_WANTED),
    ],
)
def test_compaction_runs_behind_the_shut_gate_where_clearing_was_not_enough(outcome, well, state):
    server = Server(compact=lambda: compaction())
    compaction = Compaction(server, outcome, well)
    server.drain()
    assert server.pass_by(6) is state
    assert compaction.gate == [(True, True)]
    assert (server.guard.gate.closed, server.guard.gate.shut) == (False, False)
    assert server.guard._figures.headroom_won == {"drain": 0, "clear": 0, "compaction": 500 * MIB * well}
    assert TestClient(server.app).get("/nowhere").status_code == 404, "what arrives is served"


def test_where_something_is_missing_the_gate_stays_shut_and_no_request_touches_it():
    touched: list[str] = []

    def touch(request):
        touched.append("touched")
        return PlainTextResponse("x")

    server = Server([Route("/", touch)], compact=lambda: CompactionOutcome(missing="others took the memory"))
    server.drain()
    assert server.pass_by(6) is State.RESTART_WANTED
    answer = TestClient(server.app).get("/")
    assert (answer.status_code, answer.headers["connection"], answer.headers["retry-after"]) == (
        503,
        "close",
        "1",
    )
    assert touched == []
    assert TestClient(server.app).get("/livez").status_code == 503
    assert server.pass_by(100_000) is State.RESTART_WANTED


def test_clearing_that_raises_leaves_the_server_as_it_was_and_the_gate_open():
    server = Server([Route("/", lambda request: PlainTextResponse("served"))])
    server.reserved = None  # the arithmetic of this test's own clearing fails
    server.drain()
    assert server.pass_by(6) is State.SERVING
    assert server.guard._figures.transitions["failed"] == 1
    assert TestClient(server.app).get("/").text == "served"
    assert server.guard.ready()


def test_nothing_is_moved_while_an_arrival_that_waited_too_long_is_in_flight():
    server = Server(compact=lambda: pytest.fail("compacted"))
    gate = server.guard.gate
    gate.arrival_limit = 0.0
    cleared = server.clear

    def clear() -> None:  # it takes longer than the arrival waits
        lane = gate.lane()
        assert asyncio.run(gate.wait(lane))
        assert gate.in_flight == 1
        cleared()

    server.guard._clear = clear
    server.drain()
    assert server.pass_by(6) is State.RESTART_WANTED
    assert (gate.closed, gate.shut, gate.in_flight) == (False, False, 1)


def test_a_server_that_is_well_again_after_clearing_is_not_compacted():
    server = Server(compact=lambda: pytest.fail("compacted"))
    server.drain()
    server.sick = False
    assert server.pass_by(6) is State.SERVING


# what is told


def test_every_transition_is_an_event_of_the_cycles_span_a_log_record_and_a_count():
    spans, logs, reader = InMemorySpanExporter(), InMemoryLogRecordExporter(), InMemoryMetricReader()
    traced, logged = TracerProvider(shutdown_on_exit=False), LoggerProvider(shutdown_on_exit=False)
    traced.add_span_processor(SimpleSpanProcessor(spans))
    logged.add_log_record_processor(SimpleLogRecordProcessor(logs))
    server = Server(
        tracer_provider=traced,
        logger_provider=logged,
        meter_provider=MeterProvider([reader]),
        restart="callback",
        on_restart=lambda reason: None,
    )
    server.drain()
    server.headroom += 70 * MIB  # what was in flight held it
    server.pass_by(6)

    (span,) = spans.get_finished_spans()
    told = [event.attributes["torch.memory.guard.transition"] for event in span.events]
    assert told == ["drain_begun", "clear_begun", "restart_wanted"]
    attributes = dict(span.attributes)
    seconds = attributes.pop("torch.memory.guard.seconds_by_step")
    assert [text.split("=")[0] for text in seconds] == ["drain", "clear"]
    assert attributes == {
        "torch.memory.guard.reason": "cuda:0 is short",
        "torch.memory.guard.steers": True,
        "torch.memory.guard.outcome": "restart_wanted",
        "torch.memory.guard.headroom_by_step": (f"drain={70 * MIB}", "clear=0"),
        "torch.memory.guard.released_by_step": ("drain=0", f"clear={300 * MIB}"),
    }
    records = [each.log_record for each in logs.get_finished_logs()]
    assert [record.event_name for record in records] == ["torch.memory.guard.transition"] * 3
    assert [record.severity_number for record in records] == [SeverityNumber.INFO] * 2 + [SeverityNumber.WARN]
    assert {record.trace_id for record in records} == {span.context.trace_id}
    assert records[2].body.endswith("clearing to restart_wanted, restart_wanted. cuda:0 is short")

    points = {
        metric.name: {tuple(point.attributes.values()): point.value for point in metric.data.data_points}
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert points["torch.memory.guard.status"] == {
        ("serving",): 0,
        ("draining",): 0,
        ("clearing",): 0,
        ("restart_wanted",): 1,
    }
    assert points["torch.memory.guard.transitions"][("restart_wanted",)] == 1
    assert points["torch.memory.guard.headroom_won"][("drain",)] == 70 * MIB
    assert points["torch.memory.guard.released"][("clear",)] == 300 * MIB


@pytest.mark.parametrize("guard_first", [True, False])
def test_without_providers_of_its_own_it_tells_through_those_that_instrument_was_given(guard_first):
    pytest.importorskip("torch")
    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    traced = TracerProvider(shutdown_on_exit=False)
    traced.add_span_processor(SimpleSpanProcessor(spans))
    server = Server() if guard_first else None
    TorchMemInstrumentor().instrument(meter_provider=MeterProvider([reader]), tracer_provider=traced)
    try:
        server = server or Server()
        server.drain()
        server.sick = False
        server.pass_by(6)
        metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    finally:
        TorchMemInstrumentor().uninstrument()
    counts = {
        point.attributes["torch.memory.guard.transition"]: point.value
        for metric in metrics
        if metric.name == "torch.memory.guard.transitions"
        for point in metric.data.data_points
    }
    assert counts["recovered"] == 1
    assert [span.name for span in spans.get_finished_spans()] == ["torch.memory.guard"]


def test_the_callbacks_are_told_and_what_they_raise_is_not_the_guards():
    told: list[Any] = []

    def on_ready(ready):
        told.append(ready)
        raise LookupError

    server = Server(on_ready=on_ready, on_restart=told.append, restart="callback")
    server.drain()
    server.pass_by(6)
    assert told == [False, "cuda:0 is short"]
    assert server.guard.alive(), "liveness is not the way here"
    assert server.pass_by(301) is State.SERVING
    assert told[-1] is True


def test_a_file_is_there_while_it_is_ready(tmp_path):
    ready = tmp_path / "ready"
    server = Server(ready_file=ready)
    server.pass_by(0)
    assert ready.exists()
    server.drain()
    assert not ready.exists()
    server.sick = False
    server.pass_by(6)
    assert ready.exists()
    server.guard.stop()
    assert not ready.exists()


def test_a_file_that_a_killed_server_has_left_is_gone_before_this_one_serves(tmp_path):
    (tmp_path / "ready").touch()
    guard = MemoryGuard(ready_file=tmp_path / "ready")
    assert not (tmp_path / "ready").exists()
    guard.tick()
    assert (tmp_path / "ready").exists()


def test_a_compaction_that_returns_nothing_is_told_as_what_it_is(caplog):
    server = Server(compact=lambda: None)
    server.drain()
    assert server.pass_by(6) is State.RESTART_WANTED
    assert server.guard._figures.transitions["failed"] == 0
    assert "torchmem: compact returned None; allowed is a CompactionOutcome" in caplog.messages


def test_two_guards_in_one_process_are_told_of_once_and_a_stopped_one_has_no_thread(caplog):
    first, second = MemoryGuard(interval=0.01), MemoryGuard(interval=0.01)
    first.start()
    thread = first._thread
    second.start()
    second.start()
    first.stop()
    second.stop()
    assert not thread.is_alive()
    assert len([line for line in caplog.messages if "two guards watch in this process" in line]) == 1
    first.start()
    first.stop()
    assert len([line for line in caplog.messages if "two guards" in line]) == 1


def test_a_forked_child_begins_anew():
    server = Server()
    server.drain()
    server.guard.gate.lane().count += 1  # its thread's identity is the child's too
    child = os.fork()
    if child == 0:
        guard = server.guard
        anew = (guard.state, guard.ready(), guard.gate.in_flight, guard.closing, guard._figures.transitions)
        os._exit(0 if anew == (State.SERVING, True, 0, False, Figures().transitions) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (server.guard.state, server.guard.gate.in_flight) == (State.DRAINING, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restart": "reboot"}, r"restart='reboot' is not allowed \(one of liveness, sigterm, callback\)"),
        ({"interval": 0}, r"interval=0 is not allowed \(seconds above 0 and up to 1e9\)"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        MemoryGuard(**options)
    assert "\n" not in str(error.value)


def test_the_thread_starts_with_the_server_and_ends_with_it():
    guard = MemoryGuard(interval=0.01)
    app = Starlette()
    app.add_middleware(MemoryGuardMiddleware, guard=guard)

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "torchmem-guard"]

    assert threads() == []
    with TestClient(app):
        assert threads() == ["torchmem-guard"]
    for thread in threading.enumerate():
        if thread.name == "torchmem-guard":
            thread.join(10)
    assert threads() == []


def test_grpc_asks_for_health_as_its_protocol_has_it():
    grpc = pytest.importorskip("grpc")
    from concurrent.futures import ThreadPoolExecutor

    from opentelemetry_instrumentation_torchmem.guard import grpc_health

    server = Server()
    health = grpc.server(ThreadPoolExecutor(4))
    health.add_generic_rpc_handlers((grpc_health(server.guard.ready, ("", "app.Engine"), watchers=2),))
    port = health.add_insecure_port("127.0.0.1:0")
    health.start()
    serving, not_serving, unknown = b"\x08\x01", b"\x08\x02", b"\x08\x03"
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=30)
            assert check(b"", timeout=30) == serving
            assert check(b"\x0a\x0aapp.Engine", timeout=30) == serving
            with pytest.raises(grpc.RpcError) as error:
                check(b"\x0a\x05other", timeout=30)
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            assert (
                next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x01x", timeout=30))
                == unknown
            )
            assert next(watch) == serving
            others = [channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=30) for _ in range(3)]
            told = []
            for other in others:
                try:
                    told.append(next(other))
                except grpc.RpcError as refused:
                    told.append(refused.code())
            assert told.count(grpc.StatusCode.UNIMPLEMENTED) >= 2, "each would hold a thread"
            server.drain()
            assert check(b"", timeout=30) == not_serving
            assert next(watch) == not_serving
            watch.cancel()
    finally:
        health.stop(None)
