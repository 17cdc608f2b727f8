# SPDX-License-Identifier: Apache-2.0
"""The example server on real libraries: what it answers, and what its requests leave in the allocator."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from emulator.gpu import Gpu
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MIB = 2**20
CACHE_PER_TOKEN = 16 * 1024

# The example's own code, unchanged, with a window on the allocator beside it. The port is told to the parent.
SERVER = """
import socket, sys
sys.path.insert(0, sys.argv[1])
import serve, torch, uvicorn
app = serve.create_app(serve.options_from(serve.option_parser().parse_args(sys.argv[2:])))
app.get("/stats")(lambda: dict(torch.cuda.memory_stats()))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
"""


@dataclass
class Server:
    url: str
    client: httpx.Client

    def stat(self, name: str) -> int:
        return self.client.get("/stats").json()[name]

    def allocated(self) -> int:
        return self.stat("allocated_bytes.all.current")

    def generate(self, prompt: str, tokens: int, session: str | None = None) -> dict[str, Any]:
        answer = self.client.post(
            "/generate", json={"prompt": prompt, "max_new_tokens": tokens, "session": session}
        )
        answer.raise_for_status()
        return answer.json()


@contextmanager
def serving(gpu: Gpu, gib: float, *options: object) -> Iterator[Server]:
    limit = [] if gpu.emulated else ["--memory-gib", gib]
    arguments = [EXAMPLES, "--cudnn", 0, *limit, *options]
    process = gpu.popen(
        [sys.executable, "-c", SERVER, *map(str, arguments)], memory=f"{gib}GiB", stdout=subprocess.PIPE
    )
    try:
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Server(url, client)
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, real_gpu: bool) -> Iterator[Server]:
    gpu = Gpu(lambda: request.getfixturevalue("emulation"), real=real_gpu)
    with serving(gpu, 3, "--kept-sessions", 2) as server:
        yield server


@pytest.mark.parametrize(("width", "height"), [(256, 256), (512, 320), (768, 1024)])
def test_an_image_is_a_png_of_the_size_that_was_asked_for(server: Server, width: int, height: int) -> None:
    answer = server.client.post("/images", json={"width": width, "height": height})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(answer.content))
    image.load()
    assert (image.format, image.size) == ("PNG", (width, height))


def test_an_image_leaves_nothing_allocated_behind(server: Server) -> None:
    server.client.post("/images", json={"width": 640, "height": 640})
    before = server.allocated()
    server.client.post("/images", json={"width": 640, "height": 640})
    assert server.allocated() == before


@pytest.mark.parametrize("wanted", [1, 7, 40])
def test_generate_returns_as_many_tokens_as_were_asked_for(server: Server, wanted: int) -> None:
    assert len(server.generate("Once upon a time", wanted)["tokens"]) == wanted


def test_a_stream_brings_its_tokens_one_by_one_and_ends(server: Server) -> None:
    with server.client.stream("POST", "/generate/stream", json={"max_new_tokens": 200}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = [chunk.decode() for chunk in answer.iter_raw()]
    assert len(chunks) > 50, "the stream came in a few pieces"
    *events, last, nothing = "".join(chunks).split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    assert [sorted(json.loads(event.removeprefix("data: "))) for event in events] == [["text", "token"]] * 200


def test_a_generation_ends_soon_when_its_client_has_gone(server: Server) -> None:
    def allocations() -> int:
        return server.stat("allocation.all.allocated")

    before = allocations()
    server.generate("Once", 1024)
    whole = allocations() - before

    with server.client.stream("POST", "/generate/stream", json={"max_new_tokens": 1024}) as answer:
        next(answer.iter_lines())
    readings = [allocations()]

    def at_rest() -> bool:
        time.sleep(0.2)
        readings.append(allocations())
        return readings[-1] == readings[-2]

    until(at_rest, seconds=10)
    assert readings[-1] - before - whole < 0.7 * whole


def test_a_session_keeps_its_cache_alive_and_the_longest_unused_one_goes_first(server: Server) -> None:
    server.generate("warm up", 1)
    before = server.allocated()
    turn = "a" * 2000  # one token a byte

    server.generate(turn, 4, "first")
    assert server.allocated() - before == pytest.approx(2000 * CACHE_PER_TOKEN, rel=0.1)
    server.generate(turn, 4, "first")
    assert server.allocated() - before == pytest.approx(4000 * CACHE_PER_TOKEN, rel=0.1)

    server.generate("b", 1, "second")
    server.generate("c", 1, "third")
    assert server.client.get("/healthz").json()["sessions"] == 2
    assert server.allocated() - before < 2 * MIB, "the first session's cache is still there"


def test_a_conversation_longer_than_the_model_begins_anew(server: Server) -> None:
    for _ in range(3):
        server.generate("a" * 4000, 1, "long")
    before = server.allocated()
    server.generate("a" * 4000, 1, "long")
    assert server.allocated() > before


def test_requests_overlap_without_disturbing_each_other(server: Server) -> None:
    sides = [256, 320, 384, 448, 512, 576, 640, 704] * 2

    def image(side: int) -> Image.Image:
        return Image.open(io.BytesIO(httpx.post(f"{server.url}/images", json={"width": side}).content))

    with ThreadPoolExecutor(8) as pool:
        images = pool.map(image, sides)
        texts = pool.map(lambda n: server.generate("x" * 100, n), range(1, 17))
        assert [image.size for image in images] == [(side, 512) for side in sides]
        assert [len(text["tokens"]) for text in texts] == list(range(1, 17))


def test_a_wrong_size_is_refused_before_the_model_sees_it(server: Server) -> None:
    assert server.client.post("/images", json={"width": 100}).status_code == 422


def test_a_request_without_memory_gets_503_and_the_next_one_is_served(gpu: Gpu) -> None:
    with serving(gpu, 1) as server:
        before = server.allocated()
        refused = server.client.post("/images", json={"width": 2048, "height": 2048})
        assert refused.status_code == 503
        assert refused.json()["error"] == "out_of_memory"
        assert "out of memory" in refused.json()["detail"]
        assert server.stat("num_ooms") == 1
        assert server.client.post("/images", json={"width": 256, "height": 256}).status_code == 200
        assert server.allocated() - before < 10 * MIB, "the failed request's tensors are still held"


def test_a_stream_without_memory_gets_503_before_its_first_token(gpu: Gpu) -> None:
    with serving(gpu, 0.0625) as server:
        refused = server.client.post("/generate/stream", json={"prompt": "a" * 8000, "max_new_tokens": 4})
        assert (refused.status_code, refused.json()["error"]) == (503, "out_of_memory")
        answer = server.client.post("/generate/stream", json={"prompt": "a", "max_new_tokens": 4})
        assert answer.text.endswith("data: [DONE]\n\n")


# ---- what is computed: on the CPU, for the emulated GPU computes nothing


def on_cpu(body: str, *arguments: object) -> Any:
    program = "import json, sys\nsys.path.insert(0, sys.argv[1])\nimport serve, torch\n" + body
    done = subprocess.run(
        [sys.executable, "-c", program, EXAMPLES, *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_prompts_seeds_and_neighbours_do_to_an_image_what_they_should() -> None:
    same = on_cpu("""
from concurrent.futures import ThreadPoolExecutor
options = serve.options_from(serve.option_parser().parse_args([]))
painter = serve.Painter(serve.load_images(options), 3)
def paint(ask):
    return painter.paint(*ask)
asks = [(prompt, 64, side, steps, seed)
        for prompt in ("a lighthouse", "a cat") for side in (64, 96) for steps in (1, 3) for seed in (1, 2)]
alone = [paint(ask) for ask in asks]
with ThreadPoolExecutor(6) as pool:
    together = list(pool.map(paint, asks))
print(json.dumps({"together": alone == together, "different": len(set(alone)), "asks": len(asks)}))
""")
    assert same == {"together": True, "different": 16, "asks": 16}


def test_a_session_answers_as_if_all_its_turns_were_one_prompt() -> None:
    answers = on_cpu("""
options = serve.options_from(serve.option_parser().parse_args([]))
model, tokenizer = serve.load_text(options)
writer = serve.Writer(model, tokenizer, 4)
tokens, kept = [], []
for turn in ("Once upon a time", "there was a cat", "and a dog"):
    written = writer.write(turn, 12, "talk")
    tokens += tokenizer(turn).input_ids
    whole = model.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0].tolist()
    kept.append([written, whole[len(tokens):]])
    tokens = whole
print(json.dumps(kept))
""")
    assert len(answers) == 3
    assert all(written == whole for written, whole in answers)
    assert len({tuple(written) for written, _ in answers}) > 1


def test_weights_from_a_folder_give_what_they_gave_before_they_were_saved(tmp_path: Path) -> None:
    before, after = on_cpu(
        """
import hashlib
def answers(*arguments):
    options = serve.options_from(serve.option_parser().parse_args(list(arguments)))
    pipeline, (model, tokenizer) = serve.load_images(options), serve.load_text(options)
    painted = serve.Painter(pipeline, 1).paint("a cat", 64, 64, 2, 7)
    written = serve.Writer(model, tokenizer, 1).write("Once", 9)
    return pipeline, model, tokenizer, [hashlib.sha256(painted).hexdigest(), written]
pipeline, model, tokenizer, before = answers()
images, text = sys.argv[2] + "/images", sys.argv[2] + "/text"
pipeline.scheduler = serve.EulerDiscreteScheduler.from_config(pipeline.scheduler.config)  # as it is published
pipeline.save_pretrained(images)
model.save_pretrained(text)
tokenizer.save_pretrained(text)
torch.manual_seed(99)
after = answers("--images-weights", images, "--text-weights", text)[-1]
print(json.dumps([before, after]))
""",
        tmp_path,
    )
    assert before == after


def drive(server: Server, profile: str, seconds: float, folder: Path) -> dict[str, Any]:
    told = folder / "load.json"
    command = [EXAMPLES / "load.py", "--profile", profile, "--seconds", seconds, "--json", told, server.url]
    subprocess.run([sys.executable, *map(str, command)], check=True, timeout=seconds + 60)
    return json.loads(told.read_text())


def test_the_load_fragments_the_memory_until_the_allocator_retries(gpu: Gpu, tmp_path: Path) -> None:
    with serving(gpu, 3) as server:
        at_rest = server.stat("reserved_bytes.all.current")
        summary = drive(server, "fragment", 20, tmp_path)
        stats = server.client.get("/stats").json()
    assert stats["num_alloc_retries"] >= 1
    assert stats["reserved_bytes.all.peak"] > at_rest + 1500 * MIB
    assert stats["inactive_split_bytes.all.peak"] > 300 * MIB
    assert stats["inactive_split_bytes.all.current"] > 0.05 * stats["reserved_bytes.all.current"]
    assert summary["requests"] > 200
    assert summary["failed"] <= 0.02 * summary["requests"]
    assert set(summary["latency_ms"]) == {"/images", "/generate", "/generate/stream"}


def test_the_steady_load_does_not(gpu: Gpu, tmp_path: Path) -> None:
    with serving(gpu, 3) as server:
        summary = drive(server, "steady", 6, tmp_path)
        stats = server.client.get("/stats").json()
    assert stats["num_alloc_retries"] == 0
    # how many requests overlap decides the rest, and a busy machine that
    assert stats["inactive_split_bytes.all.current"] < 0.25 * stats["reserved_bytes.all.current"]
    assert summary["failed"] == 0
