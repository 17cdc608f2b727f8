# SPDX-License-Identifier: Apache-2.0
"""The guard in an ASGI server: counts what is in flight, holds arrivals at the gate, answers the probes.

Whatever passes is counted until the application returns: streams and background tasks to their end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from threading import get_ident
from typing import Any

from .allowed import PATH, YES_OR_NO, calls, check, instance, maybe, refusal
from .gate import Lane
from .watch import MemoryGuard

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SERVICE_RESTART = 1012
"""The code that a websocket is closed with: come again."""
_TRY_AGAIN = 1013
_CLOSE = (b"connection", b"close")


_ALLOWED = {
    "guard": instance(MemoryGuard, "an instance, MemoryGuard()"),
    "ready_path": maybe(PATH),
    "live_path": maybe(PATH),
    "close_websockets": YES_OR_NO,
}
_ASKED = {"asked": calls("what is to be called, not what it returned: guard.ready or guard.alive")}


class MemoryGuardMiddleware:
    """The one line that turns it on: ``app.add_middleware(MemoryGuardMiddleware, guard=guard)``.

    It must be the outermost: what is answered further out is not counted.
    """

    def __init__(
        self,
        app: Application,
        guard: MemoryGuard,
        *,
        ready_path: str | None = "/readyz",
        live_path: str | None = "/livez",
        close_websockets: bool = False,
    ) -> None:
        """``ready_path`` and ``live_path`` are answered here, None for neither. ``close_websockets`` closes
        those that are open with 1012 when a drain begins; else they are waited for, up to its limit.

        Raises:
            ValueError: an argument that is not allowed.
        """
        check("MemoryGuardMiddleware", _ALLOWED, locals())
        if ready_path is not None and ready_path == live_path:
            raise ValueError(
                refusal("MemoryGuardMiddleware", "live_path", live_path, "a path that is not ready_path's")
            )
        self._app = app
        self._guard = guard
        self._gate = guard.gate
        self._close_websockets = close_websockets
        self._probes: dict[str, Callable[[], bool]] = {}
        if ready_path is not None:
            self._probes[ready_path] = guard.ready
        if live_path is not None:
            self._probes[live_path] = guard.alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection or request of the server's."""
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        if scope["path"] in self._probes:
            await answer(self._probes[scope["path"]](), scope, send)
            return
        gate, guard = self._gate, self._guard
        lane = gate.recent
        if lane is None or lane.thread != get_ident():
            lane = self._first(scope)
        lane.count += 1  # first count, then look
        if gate.closed:
            lane.count -= 1
            if not await gate.wait(lane):
                await _refuse(scope, send)
                return
        try:

            def sending(message: Message) -> Awaitable[None]:
                if guard.closing and message["type"] == "http.response.start":
                    try:
                        message = _closing(message, scope)
                    except Exception as error:
                        guard.failed("response", error)
                return send(message)

            await self._app(scope, receive, sending)
        finally:
            lane.count -= 1

    def _first(self, scope: Scope) -> Lane:
        """The first on its thread, or after one on another."""
        try:
            self._guard.start(scope.get("server"))
        except Exception as error:  # whatever it is, the request is not to blame
            self._guard.failed("start", error)
        return self._gate.lane()

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._guard.start()
            elif message["type"] == "lifespan.shutdown":
                self._guard.stop()
            return message

        await self._app(scope, received, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate = self._gate
        lane = gate.recent
        if lane is None or lane.thread != get_ident():
            lane = self._first(scope)
        lane.count += 1
        if gate.closed:
            lane.count -= 1
            if not await gate.wait(lane):
                await receive()
                await send({"type": "websocket.close", "code": _TRY_AGAIN})
                return
        try:
            if self._close_websockets:
                async with _Closable(lane, self._guard, receive, send) as (receive, send):
                    await self._app(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            lane.count -= 1


class _Closable:
    """A websocket that a drain closes: its application sees it disconnected."""

    def __init__(self, lane: Lane, guard: MemoryGuard, receive: Receive, send: Send) -> None:
        self._lane = lane
        self._guard = guard
        self._from_client = receive
        self._to_client = send
        self._drain: asyncio.Future[None]
        self._message: asyncio.Future[Message] | None = None
        self._accepted = self._closed = False

    async def __aenter__(self) -> tuple[Receive, Send]:
        self._drain = self._lane.until_drained()
        if self._guard.closing:
            self._drain.set_result(None)
        return self._receive, self._send

    async def __aexit__(self, *_: object) -> None:
        self._lane.forget(self._drain)
        if self._message is not None:
            self._message.cancel()

    async def _receive(self) -> Message:
        if self._message is None:
            self._message = asyncio.ensure_future(self._from_client())
        # what the client has said before it is closed is delivered, the handshake first of all
        if not self._closed:
            until = {self._message, self._drain} if self._accepted else {self._message}
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        if self._message.done():
            message, self._message = self._message, None
            return message.result()
        if not self._closed:
            self._closed = True
            await self._to_client({"type": "websocket.close", "code": SERVICE_RESTART})
        return {"type": "websocket.disconnect", "code": SERVICE_RESTART}

    async def _send(self, message: Message) -> None:
        if message["type"] == "websocket.accept":
            self._accepted = True
        if message["type"] == "websocket.close":
            if self._closed:
                return
            self._closed = True
        if not self._closed or message["type"] == "websocket.close":
            await self._to_client(message)


def endpoint(asked: Callable[[], bool]) -> Application:
    """An ASGI application that tells yes (200) or no (503), and nothing else: ``guard.ready``, to be mounted
    where the middleware's own paths do not suit.

    Raises:
        ValueError: an argument that cannot be called.
    """
    check("endpoint", _ASKED, {"asked": asked})

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI
        if scope["type"] == "http":
            await answer(asked(), scope, send)

    return answers


async def answer(yes: bool, scope: Scope, send: Send) -> None:
    """A probe's answer, to GET and HEAD alike."""
    body = b"yes\n" if yes else b"no\n"
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    if scope["method"] not in ("GET", "HEAD"):
        body = b""
        headers = [(b"allow", b"GET, HEAD"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 405, "headers": headers})
    else:
        headers.append((b"cache-control", b"no-store"))
        await send({"type": "http.response.start", "status": 200 if yes else 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _refuse(scope: Scope, send: Send) -> None:
    """What it would touch is not there: the one request that is not served."""
    headers = [(b"content-length", b"0"), (b"retry-after", b"1")]
    if scope.get("http_version", "1.1").startswith("1"):
        headers.append(_CLOSE)
    with suppress(Exception):  # the client may have gone meanwhile
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _closing(message: Message, scope: Scope) -> Message:
    """The client is asked to come again by another connection, which finds another server."""
    if not scope.get("http_version", "1.1").startswith("1"):  # later versions have no such header
        return message
    headers = [pair for pair in message.get("headers", ()) if bytes(pair[0]).lower() != b"connection"]
    return {**message, "headers": [*headers, _CLOSE]}
