# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - the paths first
"""A guarded server on the emulated GPU: the example's own app, or a bare one, with routes that make it sick.

    python guarded_server.py '{"app": "example", "policy": "headroom", ...}' FD

FD is a listening socket of the parent's, who starts a fresh server on it when this one has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

import torch
import uvicorn
from exported import Exported, Traced
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import StreamingResponse

from opentelemetry_instrumentation_torchmem import MemoryGuard, MemoryGuardMiddleware, TorchMemInstrumentor
from opentelemetry_instrumentation_torchmem.compaction import Compaction
from opentelemetry_instrumentation_torchmem.guard import Headroom, Places, Slack
from opentelemetry_instrumentation_torchmem.guard.machine import State, Timing

MIB = 1 << 20


def take(mib: float) -> torch.Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")


def fragments(mib: int) -> list[torch.Tensor]:
    """About as much as is named, held in segments of 20 MiB of which 12 are free: trapped, and in no block
    that is larger."""
    pairs = [(take(8), take(8)) for _ in range(mib // 20)]
    return [kept for kept, _ in pairs]


class Sick:
    """What has made it so."""

    def __init__(self) -> None:
        self.leaked: list[torch.Tensor] = []
        self.streams = self.background = 0


def with_routes(app: FastAPI, guard: MemoryGuard, exported: Exported, traced: Traced, sick: Sick) -> FastAPI:
    @app.get("/pid")
    def pid() -> int:
        return os.getpid()

    @app.post("/hold")
    async def hold(mib: int, background: BackgroundTasks) -> StreamingResponse:
        """A stream that holds much memory in pieces until some time after the guard has seen it."""
        held = await asyncio.to_thread(fragments, mib)

        async def pieces() -> Any:
            sick.streams += 1
            until = time.monotonic() + 60
            seen = False
            while time.monotonic() < until:
                if guard.state is not State.SERVING and not seen:
                    seen, until = True, time.monotonic() + 1.0
                yield f"{guard.state.value}\n"
                await asyncio.sleep(0.05)
            held.clear()
            yield "end\n"
            sick.streams -= 1

        def after() -> None:
            sick.background += 1
            time.sleep(0.3)
            sick.background -= 1

        background.add_task(after)
        return StreamingResponse(pieces(), media_type="text/plain", background=background)

    @app.post("/burst")
    def burst(mib: int) -> None:
        """Much memory for a moment: cached afterwards."""
        fragments(mib)

    @app.post("/leak")
    def leak(mib: int) -> None:
        sick.leaked.extend(fragments(mib))

    @app.post("/compute")
    async def compute(seconds: float) -> None:
        kept = take(1)
        await asyncio.sleep(seconds)
        del kept

    @app.get("/told")
    def told() -> dict[str, Any]:
        exported.collect()
        names = [name for name in exported.names if name.startswith("torch.memory.guard.")]
        spans = [span for span in traced.spans if span.name == "torch.memory.guard"]
        return {
            "state": guard.state.value,
            "metrics": {
                name: {next(iter(labels.values()), ""): value for labels, value in exported.all(name)}
                for name in names
            },
            "spans": [
                {
                    "attributes": dict(span.attributes),
                    "events": [dict(event.attributes) for event in span.events],
                }
                for span in spans
            ],
            "trapped": torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0),
        }

    if os.environ.get("GUARDED_WATCHES"):
        clear = torch.cuda.empty_cache

        def watched_clear() -> None:
            """What must be over when it is cleared."""
            if sick.streams or sick.background:
                print("CLEARED WITH WORK IN FLIGHT", file=sys.stderr, flush=True)
                os._exit(9)
            clear()

        torch.cuda.empty_cache = watched_clear
    return app


def policy_of(told: dict[str, Any]) -> Any:
    return Slack() if told["policy"] == "slack" else Headroom(need=told["need_mib"] * MIB, trapped_share=None)


def create(told: dict[str, Any]) -> FastAPI:
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider, tracer_provider=traced.provider, snapshot_share=0.1
    )
    faster = told.get("faster", 1)
    sick = Sick()
    guard = MemoryGuard(
        policy_of(told),
        timing=Timing(**told["timing"]),
        interval=0.1,
        restart=told.get("restart", "liveness"),
        places=Places(told["places"], restarts=1000) if told.get("places") else None,
        clock=lambda: time.monotonic() * faster,
        meter_provider=exported.provider,
        tracer_provider=traced.provider,
        ready_file=told.get("ready_file"),
        compact=Compaction(sick.leaked) if told.get("compacts") else None,
    )
    if told["app"] == "example":
        import serve

        app = serve.create_app(serve.options_from(serve.option_parser().parse_args(["--cudnn", "0"])))
    else:
        app = FastAPI()
    app.state.weights = take(told.get("weights_mib", 64))
    app.add_middleware(MemoryGuardMiddleware, guard=guard)
    return with_routes(app, guard, exported, traced, sick)


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[2]))
    server = uvicorn.Server(
        uvicorn.Config(create(json.loads(sys.argv[1])), log_level="warning", timeout_keep_alive=60)
    )
    server.run([listener])
    for thread in threading.enumerate():
        if thread.name == "torchmem-clear":
            thread.join(5)
else:  # `uvicorn --workers 2 guarded_server:app`
    if "GUARDED" in os.environ:
        app = create(json.loads(os.environ["GUARDED"]))
