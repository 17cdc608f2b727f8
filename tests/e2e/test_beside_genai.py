# SPDX-License-Identifier: Apache-2.0
"""An LLM server and its client, each under OpenTelemetry's own instrumentation: who is whose child, and whose
the attributes are."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from exported import Exported, Logged, Traced
from fastapi import FastAPI, Request

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

MIB = 1 << 20
ANSWER = {
    "id": "chat-1",
    "object": "chat.completion",
    "created": 1,
    "model": "small",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a secret"}}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


class Engine:
    def __init__(self):
        self.kept = []

    def generate(self, prompt):
        import torch

        self.kept.append(torch.empty(30 * MIB, dtype=torch.uint8, device="cuda"))
        return ANSWER


def application():
    engine = Engine()
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer(request: Request):
        return engine.generate((await request.json())["messages"])

    return app


@contextlib.contextmanager
def listening(app):
    """The address of the app, served over a real socket."""
    import uvicorn

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([taken],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(10)


def served(way: str, span: str) -> dict:
    """What the two instrumentations and this one tell of one completion."""
    import httpx
    import torch  # noqa: F401 - before the first call, as a server does
    from openai import AsyncOpenAI
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    exported, traced, logged = Exported(), Traced(), Logged()
    providers = {"meter_provider": exported.provider, "tracer_provider": traced.provider}
    OpenAIInstrumentor().instrument(**providers, logger_provider=logged.provider)
    TorchMemInstrumentor().instrument(**providers, targets=[f"{__name__}:Engine.generate"], span=span)
    app = application()
    FastAPIInstrumentor.instrument_app(app, **providers)

    async def ask(address: str, transport=None):
        async with httpx.AsyncClient(transport=transport) as http:
            client = AsyncOpenAI(api_key="none", base_url=address, http_client=http, max_retries=0)
            given = await client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "a question"}]
            )
        return given.choices[0].message.content

    if way == "in process":
        content = asyncio.run(ask("http://app/v1", httpx.ASGITransport(app)))
    else:
        with listening(app) as address:
            content = asyncio.run(ask(address))
    by_id = {each.context.span_id: each for each in traced.spans}
    exported.collect()
    return {
        "content": content,
        "spans": {
            each.name: {
                "kind": each.kind.name,
                "parent": by_id[each.parent.span_id].name if each.parent else None,
                "genai": sorted(key for key in each.attributes if key.startswith("gen_ai.")),
                "growth": each.attributes.get("torch.memory.reserved.delta"),
                "operation": each.attributes.get("torch.operation"),
            }
            for each in traced.spans
        },
        "metrics": sorted(name for name in exported.names if name.startswith(("gen_ai.", "http.server."))),
        "requests": [
            attributes["code.function.name"].rpartition(".")[0].rpartition(".")[2]
            for attributes, _ in (
                (dict(point.attributes), point.count)
                for point in exported.points("torch.memory.request.duration")
            )
        ],
        "told": [str(each.attributes) for each in traced.spans],
    }


def check(got: dict, way: str) -> dict:
    """What holds in every mode; the spans by their part."""
    assert got["content"] == "a secret"
    chat = got["spans"].pop("chat small")
    assert (chat["kind"], chat["parent"]) == ("CLIENT", None)
    assert {"gen_ai.operation.name", "gen_ai.request.model", "gen_ai.usage.input_tokens"} <= set(
        chat["genai"]
    )
    assert chat["growth"] is None, "what the GPU did belongs to the server's span"
    server = got["spans"]["POST /v1/chat/completions"]
    if way == "in process":
        assert (server["kind"], server["parent"]) == ("INTERNAL", "chat small")
    else:
        assert (server["kind"], server["parent"]) == ("SERVER", None)
    assert "gen_ai.client.operation.duration" in got["metrics"]
    assert any(name.startswith("http.server.") for name in got["metrics"])
    assert got["requests"] == ["Engine"]
    assert not any("a secret" in told or "a question" in told for told in got["told"])
    return server


@pytest.mark.needs_emulation
@pytest.mark.parametrize("way", ["in process", "over a socket"])
def test_generate_is_the_child_of_the_servers_span_and_the_clients_stays_its_own(gpu, way):
    got = gpu.run(served, args=[way, "new"], memory="1GiB", timeout=120)
    server = check(got, way)
    assert server["growth"] is None
    generate = got["spans"]["generate Engine"]
    assert (generate["kind"], generate["parent"]) == ("INTERNAL", "POST /v1/chat/completions")
    assert generate["growth"] == 30 * MIB
    assert generate["operation"] == "generate"


@pytest.mark.needs_emulation
@pytest.mark.parametrize("way", ["in process", "over a socket"])
def test_enriching_puts_the_figures_on_the_servers_span_alone(gpu, way):
    got = gpu.run(served, args=[way, "enrich"], memory="1GiB", timeout=120)
    server = check(got, way)
    assert server["growth"] == 30 * MIB
    assert "generate Engine" not in got["spans"]
