# SPDX-License-Identifier: Apache-2.0
"""Readiness as gRPC asks for it: the service ``grpc.health.v1.Health``, written out, with grpcio alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from .allowed import Allowed, calls, check, instance, whole_from

SERVICE = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_LOOK = 0.2
"""Seconds between two looks for those who watch."""

_ALLOWED = {
    "ready": calls("what is to be called, not what it returned: guard.ready"),
    "services": instance(tuple, "a tuple of names"),
    "watchers": Allowed(whole_from(0), "a whole number from 0 up"),
}


def grpc_health(
    ready: Callable[[], bool], services: tuple[str, ...] = ("",), *, watchers: int = 1
) -> grpc.GenericRpcHandler:
    """A servicer that says SERVING while ``ready()``, ``guard.ready`` that is, for each name among
    ``services``; the empty one is the whole server.

    ``watchers`` is how many may call Watch at one time, each of whom holds a thread of the server's; who
    comes beyond is told UNIMPLEMENTED, upon which a gRPC client takes the server for healthy and asks no
    more.
    Example:
        >>> server.add_generic_rpc_handlers((grpc_health(guard.ready),))  # doctest: +SKIP

    Raises:
        ValueError: an argument that is not allowed.
    """
    check("grpc_health", _ALLOWED, locals())

    watching = threading.Semaphore(watchers)

    def status(request: bytes) -> int:
        if _service(request) not in services:
            return _SERVICE_UNKNOWN
        return _SERVING if ready() else _NOT_SERVING

    def checked(request: bytes, context: Any) -> bytes:
        told = status(request)
        if told == _SERVICE_UNKNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _response(told)

    def watch(request: bytes, context: Any) -> Iterator[bytes]:
        if not watching.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "too many watch: call Check")
        try:
            gone = threading.Event()
            if not context.add_callback(gone.set):
                return
            last = None
            while not gone.is_set():
                told = status(request)
                if told != last:
                    last = told
                    yield _response(told)
                gone.wait(_LOOK)
        finally:
            watching.release()

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Check": grpc.unary_unary_rpc_method_handler(checked),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        },
    )


def _service(request: bytes) -> str | None:
    """Field 1 of a ``HealthCheckRequest``; None for what is none."""
    if not request:
        return ""
    if request[0] != 0x0A or len(request) < 2 or request[1] != len(request) - 2 or request[1] > 0x7F:
        return None
    return request[2:].decode("utf-8", "replace")


def _response(status: int) -> bytes:
    """Field 1 of a ``HealthCheckResponse``."""
    return bytes((0x08, status))
