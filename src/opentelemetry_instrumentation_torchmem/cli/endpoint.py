# SPDX-License-Identifier: Apache-2.0
"""An OTLP endpoint: gRPC and HTTP, protobuf and JSON, gzip.

It answers metrics, traces and logs as the protocol asks, hands metric messages to one callback and forgets
the rest. It knows nothing of what the metrics mean. Everything a sender can make large has a bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import socketserver
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, cast, final

import grpc
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto_json.collector.logs.v1.logs_service import (
    ExportLogsServiceRequest as JsonLogsRequest,
)
from opentelemetry.proto_json.collector.metrics.v1.metrics_service import (
    ExportMetricsServiceRequest as JsonMetricsRequest,
)
from opentelemetry.proto_json.collector.trace.v1.trace_service import (
    ExportTraceServiceRequest as JsonTraceRequest,
)

HOST = "127.0.0.1"
GRPC_PORT = 4317
HTTP_PORT = 4318
MAX_BODY = 4 * 1024 * 1024
"""Bytes of one request, as sent and unpacked: gRPC's own default."""
MAX_CONNECTIONS = 256
"""Open HTTP connections; a further one is answered 503."""
IDLE_SECONDS = 75.0
"""An HTTP connection silent for so long is closed."""

_PROTOBUF = "application/x-protobuf"
_JSON = "application/json"
_SERVICE = "opentelemetry.proto.collector"

Receive = Callable[[ExportMetricsServiceRequest, str], None]


class _Refusal(Exception):  # noqa: N818 - an answer, not an error of ours
    """One answer that is not 200. ``code`` is google.rpc.Code's number for it."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def _refuse(status: int, code: int, message: str) -> NoReturn:
    raise _Refusal(status, code, message)


class EndpointError(Exception):
    """An address that cannot be listened on: in use, not permitted, not this machine's, not resolvable."""


@dataclass(frozen=True, slots=True)
class _Signal:
    path: str
    service: str
    request: type[Message]
    response: bytes
    json_request: Any  # one of opentelemetry-proto-json's generated classes: they share no public base

    def read(self, content_type: str, body: bytes) -> Message:
        """Raises ``_Refusal`` with what is wrong with the body."""
        message = self.request()
        try:
            if content_type == _JSON:
                _copy(self.json_request.from_json(body), message)
            else:
                message.ParseFromString(body)
        except (DecodeError, ValueError, TypeError, AttributeError, RecursionError) as error:
            # AttributeError: what the generated code does with a wrongly shaped member.
            reason = str(error) or type(error).__name__
            raise _Refusal(400, 3, f"not a {self.request.DESCRIPTOR.name}: {reason}"[:500]) from error
        return message


_METRICS = _Signal(
    path="/v1/metrics",
    service=f"{_SERVICE}.metrics.v1.MetricsService",
    request=ExportMetricsServiceRequest,
    response=ExportMetricsServiceResponse().SerializeToString(),
    json_request=JsonMetricsRequest,
)
_SIGNALS = (
    _METRICS,
    _Signal(
        path="/v1/traces",
        service=f"{_SERVICE}.trace.v1.TraceService",
        request=ExportTraceServiceRequest,
        response=ExportTraceServiceResponse().SerializeToString(),
        json_request=JsonTraceRequest,
    ),
    _Signal(
        path="/v1/logs",
        service=f"{_SERVICE}.logs.v1.LogsService",
        request=ExportLogsServiceRequest,
        response=ExportLogsServiceResponse().SerializeToString(),
        json_request=JsonLogsRequest,
    ),
)
_GRPC_STATUS = {3: grpc.StatusCode.INVALID_ARGUMENT, 13: grpc.StatusCode.INTERNAL}
_BY_PATH = {signal.path: signal for signal in _SIGNALS}


@final
class Endpoint:
    """Listens on both ports from construction on, answers within ``with``.

    Args:
        receive: called with each metric export and its sender's address, from any of the endpoint's threads.
        host: name or address to listen on. A name that stands for several addresses means its first.
        grpc_port, http_port: 0 picks a free one.
        max_body: bytes of one request, as sent and unpacked; a larger one is refused (413 or
            RESOURCE_EXHAUSTED).

    Raises:
        EndpointError: an address cannot be listened on. Nothing is left listening then.
    """

    def __init__(
        self,
        receive: Receive,
        *,
        host: str = HOST,
        grpc_port: int = GRPC_PORT,
        http_port: int = HTTP_PORT,
        max_body: int = MAX_BODY,
    ) -> None:
        self._receive = receive
        self.max_body = max_body
        self.refused = 0
        """Requests refused so far, over HTTP or gRPC, except those too large for gRPC's own limit."""
        self._refused_lock = threading.Lock()
        family, address = _resolve(host)
        self._http = _HttpServer(self, family, address, http_port)
        try:
            self._grpc, grpc_port = self._bind_grpc(family, address, grpc_port)
        except EndpointError:
            self._http.server_close()
            raise
        self.grpc_address = _address(address, grpc_port)
        """``host:port`` of the gRPC side."""
        self.http_address = _address(address, self._http.server_port)
        """``host:port`` of the HTTP side."""
        self._http_thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="otlp-http", daemon=True
        )

    def __enter__(self) -> Endpoint:
        self._grpc.start()
        self._http_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends both servers and every open connection; a call in flight has half a second to end."""
        stopped = self._grpc.stop(0.5)
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join()
        stopped.wait()

    def accept(self, signal: _Signal, content_type: str, body: bytes, peer: str) -> None:
        """Reads one request and passes metrics on. Raises ``_Refusal``."""
        message = signal.read(content_type, body)
        if not isinstance(message, ExportMetricsServiceRequest):
            return
        try:
            self._receive(message, peer)
        except Exception as error:  # a fault of ours: the sender's log tells it, the screen goes on
            raise _Refusal(500, 13, f"torchmem top failed on it: {error!r}"[:500]) from error

    def count_refused(self) -> None:
        with self._refused_lock:
            self.refused += 1

    def _bind_grpc(self, family: socket.AddressFamily, address: str, port: int) -> tuple[grpc.Server, int]:
        # grpc writes its own account of a failed bind to standard error: ask the socket first.
        with _listening(family, address, port, "grpc"):
            pass
        server = grpc.server(
            ThreadPoolExecutor(max_workers=4, thread_name_prefix="otlp-grpc"),
            options=[
                ("grpc.so_reuseport", 0),  # else a second server shares the port and half the exports
                ("grpc.max_receive_message_length", self.max_body),
            ],
        )
        server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(
                    signal.service,
                    # No deserializer: grpc would log a traceback for each malformed message.
                    {"Export": grpc.unary_unary_rpc_method_handler(self._answer_grpc(signal))},
                )
                for signal in _SIGNALS
            )
        )
        try:
            return server, server.add_insecure_port(_address(address, port))
        except RuntimeError as error:
            raise EndpointError(_in_use(address, port, "grpc")) from error

    def _answer_grpc(self, signal: _Signal) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def export(body: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                self.accept(signal, _PROTOBUF, body, context.peer())
            except _Refusal as refusal:
                self.count_refused()
                context.abort(_GRPC_STATUS[refusal.code], str(refusal))
            return signal.response

        return export


_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _HttpServer(ThreadingHTTPServer):
    # On Windows the option means "share the port": the silent second server.
    allow_reuse_address = os.name == "posix"
    daemon_threads = True

    def __init__(self, endpoint: Endpoint, family: socket.AddressFamily, address: str, port: int) -> None:
        self.endpoint = endpoint
        self.address_family = family
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        try:
            super().__init__((address, port), _HttpHandler)
        except OSError as error:
            raise _cannot_listen(error, address, port, "http") from error

    def server_bind(self) -> None:
        # Not HTTPServer's: it looks the host's name up, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_port = int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            request.settimeout(1.0)
            with contextlib.suppress(OSError):  # the sender may have gone already
                request.sendall(_FULL)
            self.shutdown_request(request)
            return
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._open_lock:
                self._open.discard(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that broke off is no concern of the screen's."""

    def server_close(self) -> None:
        super().server_close()
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # the sender may have closed it just now
                    connection.shutdown(socket.SHUT_RDWR)


class _HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "torchmem-top"
    sys_version = ""
    timeout = IDLE_SECONDS
    wbufsize = -1  # each answer in one segment: in two, a sender that keeps its connection waits 40 ms
    server: _HttpServer  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower than the base's

    _unread = False
    """Whether a body may still be on its way when the answer is sent."""

    def do_POST(self) -> None:
        content_type = _JSON
        self._unread = True
        try:
            signal = self._signal()
            content_type = self._content_type()
            body = self._body()
            self._unread = False
            self.server.endpoint.accept(signal, content_type, body, "{}:{}".format(*self.client_address))
        except _Refusal as refusal:
            self.server.endpoint.count_refused()
            self._answer(refusal.status, content_type, _status(content_type, refusal.code, str(refusal)))
            return
        self._answer(200, content_type, b"{}" if content_type == _JSON else signal.response)

    def _not_allowed(self) -> None:
        self._unread = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        self.server.endpoint.count_refused()
        if self.path.partition("?")[0] in _BY_PATH:
            status, code, message = 405, 12, "only POST"
        else:
            status, code, message = 404, 5, _unknown_path(self.path)
        self._answer(status, _JSON, _status(_JSON, code, message))

    do_GET = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _not_allowed  # noqa: N815 - the base's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Nothing: the terminal belongs to the screen."""

    def _signal(self) -> _Signal:
        signal = _BY_PATH.get(self.path.partition("?")[0])
        return signal if signal is not None else _refuse(404, 5, _unknown_path(self.path))

    def _content_type(self) -> str:
        content_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type not in (_PROTOBUF, _JSON):
            _refuse(415, 3, f"Content-Type {content_type or '(none)'}: allowed are {_PROTOBUF} and {_JSON}")
        return content_type

    def _body(self) -> bytes:
        limit = self.server.endpoint.max_body
        encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("gzip", "identity", "none", ""):
            _refuse(415, 3, f"Content-Encoding {encoding}: allowed are gzip and identity")
        if self.headers.get("Transfer-Encoding", "").strip().lower() == "chunked":
            body = self._chunked(limit)
        else:
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit()):
                _refuse(411, 3, "a body needs its Content-Length")
            if len(length) > 18 or int(length) > limit:
                _refuse_size(limit)
            body = self._exactly(int(length))
        return _gunzip(body, limit) if encoding == "gzip" else body

    def _chunked(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            line = self.rfile.readline(64)
            size = line.partition(b";")[0].strip()
            try:
                length = int(size, 16) if line.endswith(b"\n") else -1
            except ValueError:
                length = -1
            if length < 0:
                _refuse(400, 3, "malformed chunk")
            if len(body) + length > limit:
                _refuse_size(limit)
            if length == 0:
                break
            body += self._exactly(length)
            if self.rfile.readline(3).strip():
                _refuse(400, 3, "malformed chunk")
        for _ in range(64):  # trailers are read over
            if not self.rfile.readline(8192).strip():
                return bytes(body)
        _refuse(400, 3, "too many trailers")

    def _exactly(self, length: int) -> bytes:
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the sender broke off")
        return body

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status == 405:
            self.send_header("Allow", "POST")
        if self._unread:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()
        if self._unread:
            self._drain()

    def _drain(self) -> None:
        """Reads a refused body over, within bounds: closed at once, the sender would see a reset."""
        self.close_connection = True
        self.connection.settimeout(0.5)
        left = 16 * MAX_BODY
        with contextlib.suppress(OSError):  # silent or gone: it has had its answer
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (chunk := self.connection.recv(65536)):
                left -= len(chunk)


def _refuse_size(limit: int) -> NoReturn:
    _refuse(413, 8, f"body over {limit} bytes: send smaller batches, or raise --max-body")


def _unknown_path(path: str) -> str:
    return f"{path[:200]}: known are {', '.join(_BY_PATH)}"


def _gunzip(body: bytes, limit: int) -> bytes:
    """Unpacks a few gzip members into at most ``limit`` bytes."""
    unpacked = bytearray()
    for _ in range(8):  # one is usual; each further one copies what is left
        member = zlib.decompressobj(wbits=31)
        try:
            unpacked += member.decompress(body, limit + 1 - len(unpacked))
        except zlib.error as error:
            _refuse(400, 3, f"malformed gzip: {error}")
        if len(unpacked) > limit:
            _refuse_size(limit)
        if not member.eof:
            _refuse(400, 3, "malformed gzip: cut short")
        body = member.unused_data
        if not body:
            return bytes(unpacked)
    _refuse(400, 3, "malformed gzip: too many members")


def _status(content_type: str, code: int, message: str) -> bytes:
    """A google.rpc.Status in the sender's own encoding; OTLP asks for it in every refusal."""
    if content_type == _JSON:
        return json.dumps({"code": code, "message": message}).encode()
    text = message.encode("utf-8", "replace")
    # int32 code = 1; string message = 2. By hand: the generated class is in a package we do not need else.
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _copy(source: object, target: Message) -> None:
    """Copies a message of opentelemetry-proto-json (dataclasses) into protobuf's: the field names agree."""
    known = target.DESCRIPTOR.fields_by_name
    for field in dataclasses.fields(cast("Any", source)):
        value: Any = getattr(source, field.name)
        if value is None or field.name not in known:
            continue
        if isinstance(value, list):
            repeated: Any = getattr(target, field.name)
            for item in cast("list[Any]", value):
                if dataclasses.is_dataclass(item):
                    _copy(item, repeated.add())
                else:
                    repeated.append(item)
        elif dataclasses.is_dataclass(value):
            child: Message = getattr(target, field.name)
            child.SetInParent()
            _copy(value, child)
        else:
            setattr(target, field.name, value)


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise EndpointError(f"--host {host}: {error}") from error
    return family, str(sockaddr[0])


def _address(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _listening(family: socket.AddressFamily, address: str, port: int, side: str) -> socket.socket:
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        probe.listen(1)
    except OSError as error:
        probe.close()
        raise _cannot_listen(error, address, port, side) from error
    return probe


def _cannot_listen(error: OSError, address: str, port: int, side: str) -> EndpointError:
    if error.errno == errno.EADDRINUSE:
        return EndpointError(_in_use(address, port, side))
    return EndpointError(f"cannot listen on {_address(address, port)}: {error.strerror or error}")


def _in_use(address: str, port: int, side: str) -> str:
    return (
        f"port {port} on {address} is in use, perhaps by a collector or another torchmem top: "
        f"end it, or choose another port with --{side}-port"
    )
