# SPDX-License-Identifier: Apache-2.0
"""The soak's load: the example's own, calls of every other kind, clients that leave, and too much asked."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import load

CONCURRENCY = 6
LIMIT_S = 120.0
"""After which an answer counts as lost."""
TOO_MUCH = load.Ask("/images", {"width": 4096, "height": 4096})


@dataclass(slots=True)
class Sent:
    """One request, and what became of it: ``ok``, ``oom``, ``left`` by its client; all else is lost."""

    name: str
    path: str
    leaves: bool = False
    must: str | None = None
    """What it is sure to come to."""
    outcome: str = "open"
    seconds: float = 0.0


def asks(dice: random.Random, busy: Callable[[], float], storming: Callable[[], bool]) -> Iterator[load.Ask]:
    """The example's load that fragments, between calls of every other kind."""
    own = load.fragment(dice, busy)
    while True:
        if storming() and dice.random() < 0.5:
            yield TOO_MUCH
        elif dice.random() < 0.6:
            yield next(own)
        else:
            work: dict[str, object] = {"mib": dice.randint(1, 48), "steps": dice.randint(1, 6)}
            work["seconds"] = dice.choice([0, 0.002, 0.01])
            path = dice.choice(["/answer", "/stream", "/pieces", "/rerank"])
            if path == "/answer":
                work["fails"] = dice.random() < 0.1
                work["cancel_after"] = dice.choice([None, None, None, 0.003])
            yield load.Ask(path, work)


class Clients:
    """As many as ``CONCURRENCY``, each with one request after another, until ``end``."""

    def __init__(self, url: str, seed: int, busy: Callable[[], float]) -> None:
        self.sent: list[Sent] = []
        self.storming = False
        self._url = url
        self._dice = random.Random(seed)
        self._asks = asks(self._dice, busy, lambda: self.storming)
        self._ended = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=CONCURRENCY)
        async with httpx.AsyncClient(base_url=self._url, timeout=LIMIT_S, limits=limits) as client:
            await asyncio.gather(*(self._one_after_another(client) for _ in range(CONCURRENCY)))

    def end(self) -> None:
        self._ended = True

    async def _one_after_another(self, client: httpx.AsyncClient) -> None:
        while not self._ended:
            ask = next(self._asks)
            streams = ask.path in ("/generate/stream", "/stream", "/pieces")
            sent = Sent(str(len(self.sent)), ask.path)
            sent.leaves = ask is not TOO_MUCH and self._dice.random() < (0.3 if streams else 0.04)
            sent.must = "oom" if ask is TOO_MUCH else None
            self.sent.append(sent)
            leaves_after = self._dice.randint(1, 3) if streams else self._dice.uniform(0.001, 0.05)
            began = time.monotonic()
            try:
                if sent.leaves and not streams:
                    sent.outcome = await asyncio.wait_for(self._send(client, ask, sent, None), leaves_after)
                else:
                    chunks = int(leaves_after) if sent.leaves else None
                    sent.outcome = await self._send(client, ask, sent, chunks)
            except asyncio.TimeoutError:
                sent.outcome = "left"
            except httpx.HTTPError as error:
                sent.outcome = f"lost: {error!r}"
                await asyncio.sleep(0.2)  # a server that is not there is not asked in a busy loop
            sent.seconds = time.monotonic() - began

    async def _send(
        self, client: httpx.AsyncClient, ask: load.Ask, sent: Sent, leaves_after: int | None
    ) -> str:
        name = {"x-request": sent.name}
        async with client.stream("POST", ask.path, json=ask.body, headers=name) as answer:
            body, chunks = b"", 0
            async for chunk in answer.aiter_bytes():
                body, chunks = (body + chunk)[-2000:], chunks + 1
                if answer.status_code == 200 and chunks == leaves_after:
                    return "left"
        if answer.status_code == 503 and b"out_of_memory" in body:
            return "oom"
        if answer.status_code != 200:
            return f"lost: {answer.status_code} {body[:200]!r}"
        if answer.headers["content-type"].startswith("text/event-stream"):
            if b"event: error" in body and b"out_of_memory" in body:
                return "oom"
            if not body.endswith(b"data: [DONE]\n\n"):
                return f"lost: broken off after {body[-100:]!r}"
        return "ok"
