# SPDX-License-Identifier: Apache-2.0
"""A request through the guard's middleware, against a bare ASGI middleware that passes it on.

The application is the same on both sides: it sends a start and a body. The server is ready.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from opentelemetry_instrumentation_torchmem import MemoryGuard, MemoryGuardMiddleware

from . import harness
from .harness import Figure, Side, added, interleaved

CALLS = 200
GOAL = 2.0
SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "path": "/generate",
    "headers": [(b"host", b"localhost")],
    "server": ("127.0.0.1", 8000),
}
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
BODY = {"type": "http.response.body", "body": b"hello", "more_body": False}
PIECE = {**BODY, "more_body": True}
PIECES = 50


class PassThrough:
    """The least that a middleware is."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    await send(BODY)


async def stream(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    for _ in range(PIECES):
        await send(PIECE)
    await send(BODY)


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send(message: Any) -> None: ...


def side(app: Callable[..., Awaitable[None]], scope: dict[str, Any] = SCOPE) -> Side:
    """A request, driven to its end without an event loop: nothing in it waits."""

    def request() -> None:
        coroutine = app(scope, receive, send)
        try:
            coroutine.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        raise AssertionError("it waited")

    return request


def figures(quick: bool) -> list[Figure]:
    rounds = 100 if quick else 400
    guard = MemoryGuard()
    guarded = MemoryGuardMiddleware(hello, guard)
    streamed = MemoryGuardMiddleware(stream, guard)
    asyncio.run(hello(SCOPE, receive, send))
    times = interleaved(
        {
            "guarded": side(guarded),
            "passed": side(PassThrough(hello)),
            "streamed": side(streamed),
            "passed stream": side(PassThrough(stream)),
            "probe": side(guarded, {**SCOPE, "method": "GET", "path": "/readyz"}),
        },
        rounds,
        CALLS,
    )
    guard.stop()
    against = "a bare pass-through ASGI middleware"
    return [
        added("a request, the server ready", against, times, "guarded", "passed", GOAL),
        added(
            f"a stream of {PIECES} pieces, the server ready",
            against,
            times,
            "streamed",
            "passed stream",
            None,
        ),
        harness.of(
            "a probe of readiness", "nothing", times["probe"], "µs", None, "answered by the middleware itself"
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    harness.print_figures(figures(parser.parse_args().quick))
