# SPDX-License-Identifier: Apache-2.0
"""The endpoint of `torchmem top` before real exporters, hand-made requests and broken senders."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

import grpc
import httpx
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.metrics import Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import Counter, MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from opentelemetry_instrumentation_torchmem.cli import endpoint as otlp
from opentelemetry_instrumentation_torchmem.cli.board import Board

GIB = 1 << 30
METRICS_SERVICE = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


class Top:
    """A running endpoint with its board, and the requests it handed over."""

    def __init__(self, endpoint: otlp.Endpoint, board: Board, received: list) -> None:
        self.endpoint, self.board, self.received = endpoint, board, received
        self.grpc = f"http://{endpoint.grpc_address}"
        self.http = f"http://{endpoint.http_address}"

    def processes(self):
        return self.board.view().processes

    def device(self):
        (process,) = self.processes()
        (device,) = process.devices
        return device


@contextmanager
def running(**options) -> Iterator[Top]:
    board, received = Board(), []

    def receive(request, peer):
        received.append(request)
        board.receive(request, peer)

    with otlp.Endpoint(receive, **({"grpc_port": 0, "http_port": 0} | options)) as endpoint:
        yield Top(endpoint, board, received)


@pytest.fixture
def top() -> Iterator[Top]:
    with running() as top:
        yield top


@pytest.fixture
def http(top: Top) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=top.http, timeout=10) as client:
        yield client


class Server:
    """A process under the real SDK, seen from outside: figures to be exported, and an exporter."""

    def __init__(self, exporter, instance="one", **figures) -> None:
        self.figures = figures
        resource = Resource.create(
            {"service.name": "serve", "service.instance.id": instance, "process.pid": 7}
        )
        self.reader = PeriodicExportingMetricReader(exporter, export_interval_millis=float("inf"))
        self.provider = MeterProvider([self.reader], resource=resource, shutdown_on_exit=False)
        meter = self.provider.get_meter("test")

        def observe(name, **labels):
            def callback(_options):
                value = self.figures.get(name)
                return [] if value is None else [Observation(value, {"torch.device": "cuda:0", **labels})]

            return [callback]

        meter.create_observable_up_down_counter(
            "torch.memory.reserved", observe("reserved", **{"torch.memory.pool": "large"}), "By"
        )
        meter.create_observable_gauge("torch.memory.fragmentation", observe("fragmentation"), "1")
        meter.create_observable_counter("torch.memory.allocation.retries", observe("retries"), "{retry}")
        meter.create_histogram("http.server.request.duration").record(0.1)

    def export(self, **figures) -> None:
        self.figures |= figures
        assert self.provider.force_flush()


def grpc_exporter(top: Top, **more):
    return GrpcMetrics(top.grpc, insecure=True, **more)


def http_exporter(top: Top, **more):
    return HttpMetrics(f"{top.http}/v1/metrics", **more)


@pytest.mark.parametrize(
    ("exporter", "compression"),
    [
        (grpc_exporter, None),
        (grpc_exporter, grpc.Compression.Gzip),
        (http_exporter, Compression.NoCompression),
        (http_exporter, Compression.Gzip),
    ],
    ids=["grpc", "grpc-gzip", "http", "http-gzip"],
)
def test_the_sdks_own_exporters_deliver_exact_values(top, exporter, compression):
    server = Server(exporter(top, compression=compression))
    server.export(reserved=5 * GIB + 1, fragmentation=0.25, retries=3)
    server.export(reserved=6 * GIB + 1, retries=5)
    device = top.device()
    assert (device.reserved, device.fragmentation) == (6 * GIB + 1, 0.25)
    assert (device.retries.total, device.retries.recent) == (5, 2)
    assert device.retries.rate > 0
    assert [value for _, value in device.history][-1] == 6 * GIB + 1
    assert device.slack is None
    server.provider.shutdown()


@pytest.mark.parametrize("exporter", [grpc_exporter, http_exporter])
def test_delta_temporality_adds_up(top, exporter):
    delta = {ObservableCounter: AggregationTemporality.DELTA, Counter: AggregationTemporality.DELTA}
    server = Server(exporter(top, preferred_temporality=delta))
    for retries in (3, 5, 5, 9):
        server.export(retries=retries)
    sent = [
        metric.sum
        for request in top.received
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "torch.memory.allocation.retries"
    ]
    assert {each.aggregation_temporality for each in sent} == {1}, "the sender did send deltas"
    assert top.device().retries.total == 9
    server.provider.shutdown()


def test_two_senders_over_two_transports_are_two_processes(top):
    first = Server(grpc_exporter(top), instance="a")
    second = Server(http_exporter(top), instance="b")
    first.export(reserved=1)
    second.export(reserved=2)
    assert {p.instance: p.devices[0].reserved for p in top.processes()} == {"a": 1, "b": 2}
    first.provider.shutdown()
    second.provider.shutdown()


def test_a_restarted_sender_starts_from_its_own_count(top):
    first = Server(grpc_exporter(top), instance="before")
    first.export(retries=50)
    first.provider.shutdown()
    second = Server(grpc_exporter(top), instance="after")
    second.export(retries=1)
    second.provider.shutdown()
    assert {p.instance: p.devices[0].retries.total for p in top.processes()} == {"before": 50, "after": 1}


def test_an_exporter_outlives_a_restart_of_the_endpoint():
    with running() as top:
        port = int(top.endpoint.grpc_address.rpartition(":")[2])
        server = Server(grpc_exporter(top, timeout=10))
        server.export(reserved=1)
    with running(grpc_port=port) as again:
        server.export(reserved=2)
        assert again.device().reserved == 2
    server.provider.shutdown()


@pytest.mark.parametrize("transport", ["grpc", "http", "http-gzip"])
def test_traces_and_logs_are_answered(top, transport, caplog):
    if transport == "grpc":
        spans, logs = GrpcSpans(top.grpc, insecure=True), GrpcLogs(top.grpc, insecure=True)
    else:
        compression = Compression.Gzip if transport == "http-gzip" else Compression.NoCompression
        spans = HttpSpans(f"{top.http}/v1/traces", compression=compression)
        logs = HttpLogs(f"{top.http}/v1/logs", compression=compression)
    results = []
    export = spans.export
    spans.export = lambda batch: results.append(export(batch)) or results[-1]
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    with tracers.get_tracer("test").start_as_current_span("work"):
        pass
    assert results == [SpanExportResult.SUCCESS]

    loggers = LoggerProvider(shutdown_on_exit=False)
    loggers.add_log_record_processor(BatchLogRecordProcessor(logs))
    loggers.get_logger("test").emit(LogRecord(body="hello", severity_number=SeverityNumber.INFO))
    assert loggers.force_flush()
    assert caplog.records == [], "exporters log what is refused"
    assert top.endpoint.refused == 0
    assert top.received == []
    tracers.shutdown()
    loggers.shutdown()


JSON_METRICS = {
    "resourceMetrics": [
        {
            "resource": {
                "attributes": [
                    {"key": "service.name", "value": {"stringValue": "js"}},
                    {"key": "process.pid", "value": {"intValue": "4242"}},
                ]
            },
            "scopeMetrics": [
                {
                    "scope": {"name": "by hand", "inventedLater": {"a": [1, None]}},
                    "metrics": [
                        {
                            "name": "torch.memory.reserved",
                            "unit": "By",
                            "sum": {
                                "aggregationTemporality": 2,
                                "dataPoints": [
                                    {
                                        "attributes": [
                                            {"key": "torch.device", "value": {"stringValue": "cuda:1"}}
                                        ],
                                        "startTimeUnixNano": "1800000000000000000",
                                        "timeUnixNano": "1800000002000000001",
                                        "asInt": "9007199254740993",
                                        "exemplars": [
                                            {
                                                "traceId": "5b8efff798038103d269b633813fc60c",
                                                "spanId": "eee19b7ec3c1b174",
                                                "timeUnixNano": "1800000002000000000",
                                                "asDouble": 1.5,
                                            }
                                        ],
                                    }
                                ],
                            },
                        },
                        {
                            "name": "torch.memory.fragmentation",
                            "gauge": {
                                "dataPoints": [
                                    {
                                        "attributes": [
                                            {"key": "torch.device", "value": {"stringValue": "cuda:1"}}
                                        ],
                                        "timeUnixNano": 1800000002000000001,
                                        "asDouble": 0.5,
                                    }
                                ]
                            },
                        },
                    ],
                }
            ],
        }
    ],
    "unknownField": "is ignored",
}


def test_json_is_read_as_otlp_says(top, http):
    answer = http.post("/v1/metrics", json=JSON_METRICS)
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (
        200,
        "application/json",
        {},
    )
    device = top.device()
    assert device.name == "cuda:1"
    assert device.reserved == 9007199254740993, "2**53 + 1: no float on the way"
    assert device.fragmentation == 0.5
    assert device.history == ((1800000002.0, 9007199254740993),)
    assert top.processes()[0].pid == 4242
    point = top.received[0].resource_metrics[0].scope_metrics[0].metrics[0].sum.data_points[0]
    assert point.time_unix_nano == 1800000002000000001
    assert point.exemplars[0].trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert point.exemplars[0].span_id.hex() == "eee19b7ec3c1b174"


def test_json_keeps_an_empty_message_apart_from_none(top, http):
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "a", "gauge": {}}, {"name": "b"}]}]}]}
    assert http.post("/v1/metrics", json=body).status_code == 200
    metrics = top.received[0].resource_metrics[0].scope_metrics[0].metrics
    assert [metric.WhichOneof("data") for metric in metrics] == ["gauge", None]


def test_json_traces_and_logs_with_hex_ids_are_answered(http):
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "name": "generate",
        "kind": 1,
        "startTimeUnixNano": "1800000000000000000",
        "endTimeUnixNano": "1800000000000000001",
        "attributes": [{"key": "n", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}}],
        "flags": 257,
    }
    answer = http.post("/v1/traces", json={"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    assert (answer.status_code, answer.json()) == (200, {})
    record = {"timeUnixNano": "1", "severityNumber": 9, "body": {"stringValue": "x"}, "traceId": "5b" * 16}
    answer = http.post("/v1/logs", json={"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]})
    assert (answer.status_code, answer.json()) == (200, {})


def protobuf(reserved: int) -> bytes:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="torch.memory.reserved")
    point = metric.gauge.data_points.add(as_int=reserved, time_unix_nano=1)
    point.attributes.add(key="torch.device").value.string_value = "cuda:0"
    return request.SerializeToString()


def test_protobuf_is_answered_in_protobuf_on_a_connection_kept_open(top, http):
    for reserved in (1, 2):
        answer = http.post(
            "/v1/metrics", content=protobuf(reserved), headers={"content-type": "application/x-protobuf"}
        )
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert answer.http_version == "HTTP/1.1"
        ExportMetricsServiceResponse.FromString(answer.content)
    assert len(top.endpoint._http._open) == 1
    assert top.device().reserved == 2


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "identity", "none"])
def test_content_encodings(top, http, encoding):
    body = gzip.compress(protobuf(5)) if encoding.lower() == "gzip" else protobuf(5)
    headers = {"content-type": "application/x-protobuf; charset=x", "content-encoding": encoding}
    assert http.post("/v1/metrics", content=body, headers=headers).status_code == 200
    assert top.device().reserved == 5


def test_gzip_of_several_members(top, http):
    body = protobuf(5)
    answer = http.post(
        "/v1/metrics",
        content=gzip.compress(body[:10]) + gzip.compress(body[10:]),
        headers={"content-type": "application/x-protobuf", "content-encoding": "gzip"},
    )
    assert answer.status_code == 200
    assert top.device().reserved == 5


def test_a_chunked_body_is_read(top, http):
    body = protobuf(5)
    answer = http.post(
        "/v1/metrics",
        content=iter([body[:7], body[7:]]),
        headers={"content-type": "application/x-protobuf"},
    )
    assert answer.status_code == 200
    assert top.device().reserved == 5


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (b"\xff\xff", {"content-type": "application/x-protobuf"}, 400, "ExportMetricsServiceRequest"),
        (b"{", {"content-type": "application/json"}, 400, "ExportMetricsServiceRequest"),
        (b"[]", {"content-type": "application/json"}, 400, "expected"),
        (b'{"resourceMetrics": [[]]}', {"content-type": "application/json"}, 400, "expected"),
        (b'{"resourceMetrics": {"a": 1}}', {"content-type": "application/json"}, 400, "expected"),
        (b"[" * 100_000, {"content-type": "application/json"}, 400, "ExportMetricsServiceRequest"),
        (b'"\xff"', {"content-type": "application/json"}, 400, "decode"),
        (b"x", {"content-type": "text/plain"}, 415, "text/plain"),
        (b"x", {}, 415, "(none)"),
        (b"x", {"content-type": "application/json", "content-encoding": "br"}, 415, "br"),
        (b"x", {"content-type": "application/json", "content-encoding": "gzip"}, 400, "gzip"),
        (
            gzip.compress(b"{}" * 100)[:-9],
            {"content-type": "application/json", "content-encoding": "gzip"},
            400,
            "cut short",
        ),
        (
            gzip.compress(b"") * 1000,
            {"content-type": "application/json", "content-encoding": "gzip"},
            400,
            "too many members",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_in_the_senders_encoding(top, http, body, headers, status, says):
    answer = http.post("/v1/metrics", content=body, headers=headers)
    assert answer.status_code == status
    if headers.get("content-type") == "application/x-protobuf":
        assert answer.headers["content-type"] == "application/x-protobuf"
        told = Status.FromString(answer.content)
        code, message = told.code, told.message
    else:
        assert answer.headers["content-type"] == "application/json"
        code, message = answer.json()["code"], answer.json()["message"]
    assert code == 3
    assert says in message
    assert top.endpoint.refused == 1
    assert http.post("/v1/metrics", json={}).status_code == 200, "and the next request is served"


def test_a_protobuf_refusal_holds_a_long_message_whole(http):
    answer = http.post("/v1/" + "x" * 150, content=b"", headers={"content-type": "application/json"})
    assert answer.status_code == 404
    body = otlp._status("application/x-protobuf", 5, "ü" * 150)
    assert (Status.FromString(body).code, Status.FromString(body).message) == (5, "ü" * 150)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS"])
def test_other_methods_and_paths(http, method):
    answer = http.request(method, "/v1/metrics")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = http.request(method, "/metrics")
    assert answer.status_code == 404
    if method != "HEAD":
        assert "/v1/metrics" in answer.json()["message"]
    assert http.post("/v1/profiles", json={}).status_code == 404
    assert http.post("/v1/metrics?token=x", json={}).status_code == 200


def bomb() -> bytes:
    """200 MiB of zeros in 200 KiB."""
    packer = zlib.compressobj(wbits=31)
    return b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(200)) + packer.flush()


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"\0" * (3 << 20), "identity"),
        (iter([b"\0" * (1 << 20)] * 3), "identity"),
        (bomb(), "gzip"),
        (gzip.compress(gzip.compress(b"")) + gzip.compress(b"\0" * (3 << 20)), "gzip"),
    ],
    ids=["plain", "chunked", "bomb", "second-member"],
)
def test_a_body_over_the_limit_is_refused_and_read_no_further(body, encoding):
    with running(max_body=1 << 20) as top:
        tracemalloc.start()
        answer = httpx.post(
            f"{top.http}/v1/metrics",
            content=body,
            headers={"content-type": "application/x-protobuf", "content-encoding": encoding},
        )
        assert answer.status_code == 413
        assert Status.FromString(answer.content).code == 8
        assert "1048576 bytes" in Status.FromString(answer.content).message
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20
        assert httpx.post(f"{top.http}/v1/metrics", json={}).status_code == 200


def test_a_sender_gets_its_refusal_though_it_sends_the_whole_body_first(top):
    connection = HTTPConnection(top.endpoint.http_address, timeout=20)
    connection.request("POST", "/v1/metrics", b"\0" * (30 << 20), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert json.loads(answer.read())["code"] == 8
    connection.close()


def test_a_body_of_exactly_the_limit_is_read():
    with running(max_body=len(protobuf(5))) as top:
        headers = {"content-type": "application/x-protobuf"}
        assert httpx.post(f"{top.http}/v1/metrics", content=protobuf(5), headers=headers).status_code == 200
        assert (
            httpx.post(
                f"{top.http}/v1/metrics",
                content=gzip.compress(protobuf(5)),
                headers=headers | {"content-encoding": "gzip"},
            ).status_code
            == 413
        ), "gzip makes so short a body longer"


def test_grpc_refuses_what_is_malformed_or_too_large(capfd):
    with running(max_body=1 << 20) as top, grpc.insecure_channel(top.endpoint.grpc_address) as channel:
        call = channel.unary_unary(METRICS_SERVICE)
        for body, compression, code in (
            (b"\xff\xff", None, grpc.StatusCode.INVALID_ARGUMENT),
            (b"\0" * (2 << 20), None, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (b"\0" * (50 << 20), grpc.Compression.Gzip, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(body, compression=compression, timeout=10)
            assert refused.value.code() == code
        assert call(protobuf(5), timeout=10) == b""
        assert top.device().reserved == 5
    assert capfd.readouterr().err == "", "the terminal belongs to the screen"


def test_a_fault_of_ours_is_told_to_the_sender_and_ends_nothing(capfd):
    def receive(_request, _peer):
        raise KeyError("ours")

    with (
        otlp.Endpoint(receive, grpc_port=0, http_port=0) as endpoint,
        grpc.insecure_channel(endpoint.grpc_address) as channel,
    ):
        for _ in range(2):
            answer = httpx.post(f"http://{endpoint.http_address}/v1/metrics", json={})
            assert (answer.status_code, answer.json()["code"]) == (500, 13)
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(METRICS_SERVICE)(b"", timeout=10)
            assert refused.value.code() == grpc.StatusCode.INTERNAL
            assert "ours" in refused.value.details()
    assert capfd.readouterr().err == ""


def test_senders_that_break_off_or_talk_nonsense_leave_it_serving(top, http, capfd):
    address = ("127.0.0.1", int(top.http.rpartition(":")[2]))
    head = b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for sent in (
        b"",
        b"\x16\x03\x01\x02\x00\x01",
        head + b"Content-Length: 100\r\n\r\n{",
        head + b"Content-Length: -5\r\n\r\n{}",
        head + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffff\r\n",
        head + b"X: " + b"y" * 100_000,
    ):
        with socket.create_connection(address) as connection:
            connection.sendall(sent)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with socket.create_connection(("127.0.0.1", int(top.grpc.rpartition(":")[2]))) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert http.post("/v1/metrics", json=JSON_METRICS).status_code == 200
    assert top.device().fragmentation == 0.5
    assert capfd.readouterr().err == ""


def test_connections_beyond_the_limit_are_turned_away_and_later_ones_served(monkeypatch):
    monkeypatch.setattr(otlp, "MAX_CONNECTIONS", 2)
    with running() as top:
        held = [httpx.Client(base_url=top.http) for _ in range(2)]
        for client in held:
            assert client.post("/v1/logs", json={}).status_code == 200
        assert httpx.post(f"{top.http}/v1/logs", json={}).status_code == 503
        held[0].close()
        wait_for(lambda: len(top.endpoint._http._open) == 1)
        assert httpx.post(f"{top.http}/v1/logs", json={}).status_code == 200
        held[1].close()


def wait_for(condition, seconds=10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_leaving_it_ends_its_threads_and_frees_its_ports():
    before = set(threading.enumerate())
    with running() as top:
        client = httpx.Client(base_url=top.http)
        assert client.post("/v1/metrics", json={}).status_code == 200
        ports = [int(top.grpc.rpartition(":")[2]), int(top.http.rpartition(":")[2])]
    wait_for(lambda: not [t for t in set(threading.enumerate()) - before if t.is_alive()])
    client.close()
    with running(grpc_port=ports[0], http_port=ports[1]):
        pass


@pytest.mark.parametrize("side", ["grpc", "http"])
def test_a_port_in_use_is_an_error_that_names_the_option_and_leaves_nothing_open(top, side, capfd):
    taken = int((top.grpc if side == "grpc" else top.http).rpartition(":")[2])
    ports = {"grpc_port": 0, "http_port": 0} | {f"{side}_port": taken}
    with pytest.raises(otlp.EndpointError, match=rf"port {taken} .* in use.*--{side}-port"):
        otlp.Endpoint(lambda request, peer: None, **ports)
    assert capfd.readouterr().err == "", "grpc's own account of it is not shown"


def test_one_port_for_both_sides_is_in_use():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(otlp.EndpointError, match="in use"):
        otlp.Endpoint(lambda request, peer: None, grpc_port=port, http_port=port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_an_error(host):
    with pytest.raises(otlp.EndpointError, match=host.partition(".")[0]):
        otlp.Endpoint(lambda request, peer: None, host=host, grpc_port=0, http_port=0)
