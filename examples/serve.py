# SPDX-License-Identifier: Apache-2.0
"""A small inference server: images from Stable Diffusion, text from LLaMA.

    python examples/serve.py --port 8000
    curl --json '{"prompt": "a lighthouse", "width": 768}' localhost:8000/images > lighthouse.png
    curl --json '{"prompt": "Once", "max_new_tokens": 8}' localhost:8000/generate
    curl --json '{"prompt": "Once"}' --no-buffer localhost:8000/generate/stream

Both models are built small, from their configs, with random weights: nothing is downloaded, the pictures are
noise and the words are not words. `--images-weights` and `--text-weights` name local folders of real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import io
import json
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

import diffusers
import torch
import uvicorn
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from opentelemetry_instrumentation_torchmem import MemoryGuard, MemoryGuardMiddleware

# ---------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """What can be chosen at start: on the command line, or as SERVE_* variables (`uvicorn serve:app`)."""

    device: str
    images_weights: str | None
    text_weights: str | None
    image_workers: int
    kept_sessions: int
    memory_gib: float | None
    cudnn: bool
    guard: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.float16


def option_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"

    def add(name: str, convert: Callable[[str], object], default: object, text: str) -> None:
        variable = "SERVE_" + name.upper().replace("-", "_")
        value = os.environ.get(variable, default)
        parser.add_argument("--" + name, type=convert, default=value, help=f"{text} [{variable}, {default}]")

    add("device", str, default_device, "where the models live")
    add("images-weights", str, None, "a local folder with a Stable Diffusion pipeline")
    add("text-weights", str, None, "a local folder with a causal language model and its tokenizer")
    add("image-workers", int, 2, "images painted at the same time")
    add("kept-sessions", int, 16, "conversations whose key-value cache stays on the device")
    add("memory-gib", float, None, "the most device memory to use, in GiB; all of it unless given")
    add("guard", flag, "0", "1 to drain and clear the server when its memory is sick: see docs/GUARD.md")
    add("cudnn", flag, "1", "0 where cuDNN is missing: convolutions then run on PyTorch's own kernels")
    return parser


def flag(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


def options_from(arguments: argparse.Namespace) -> Options:
    return Options(**{name: getattr(arguments, name) for name in Options.__dataclass_fields__})


# ----------------------------------------------------------------------------------------------------- models


class HostEulerScheduler(EulerDiscreteScheduler):
    """Euler's method with the timesteps on the host, beside the sigmas: no step waits for the device."""

    def set_timesteps(self, num_inference_steps: int, device: object, **kwargs: object) -> None:  # noqa: ARG002
        super().set_timesteps(num_inference_steps, device="cpu", **kwargs)


def load_images(options: Options) -> StableDiffusionPipeline:
    diffusers.logging.set_verbosity_error()  # or it warns that it casts what it was asked to cast
    if options.images_weights:
        pipeline = StableDiffusionPipeline.from_pretrained(
            options.images_weights, dtype=options.dtype, local_files_only=True
        )
        pipeline.scheduler = HostEulerScheduler.from_config(pipeline.scheduler.config)
    else:
        pipeline = small_stable_diffusion()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(options.device, options.dtype)


def small_stable_diffusion() -> StableDiffusionPipeline:
    """The architecture of Stable Diffusion 1.5 with a handful of channels."""
    torch.manual_seed(0)
    tokenizer = letter_tokenizer()
    text_config = CLIPTextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return StableDiffusionPipeline(
        text_encoder=CLIPTextModel(text_config),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(
            sample_size=64,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=text_config.hidden_size,
            attention_head_dim=8,
        ),
        vae=AutoencoderKL(
            block_out_channels=(32, 64, 64, 64),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            latent_channels=4,
        ),
        scheduler=HostEulerScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def letter_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer without its list of words: it spells."""
    letters = sorted(ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return CLIPTokenizer({token: number for number, token in enumerate(tokens)}, [], model_max_length=77)


def load_text(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if options.text_weights:
        model = AutoModelForCausalLM.from_pretrained(
            options.text_weights, dtype=options.dtype, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(options.text_weights, local_files_only=True)
    else:
        model, tokenizer = small_llama()
    return model.to(options.device, options.dtype).eval(), tokenizer


def small_llama() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """LLaMA with few and narrow layers, but heads as wide as a large one's: 16 KiB of cache a token."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()  # a token is a byte: no vocabulary to download
    config = LlamaConfig(
        vocab_size=259,  # 256 bytes and three special tokens
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,  # random weights have nothing to end with
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


# ----------------------------------------------------------------------------------------------------- images


class Painter:
    """Paints up to `workers` images at a time, on one set of weights."""

    def __init__(self, pipeline: StableDiffusionPipeline, workers: int) -> None:
        self._idle: queue.SimpleQueue[StableDiffusionPipeline] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(self._another(pipeline))

    @staticmethod
    def _another(pipeline: StableDiffusionPipeline) -> StableDiffusionPipeline:
        """A pipeline on the same weights. Schedulers and tokenizers change while in use: each has its own."""
        own = {name: copy.deepcopy(pipeline.components[name]) for name in ("scheduler", "tokenizer")}
        twin = type(pipeline)(**{**pipeline.components, **own}, requires_safety_checker=False)
        twin.set_progress_bar_config(disable=True)
        return twin

    def paint(self, prompt: str, width: int, height: int, steps: int, seed: int) -> bytes:
        """The picture as PNG bytes."""
        pipeline = self._idle.get()
        try:
            image = pipeline(
                prompt,
                width=width,
                height=height,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed),
            ).images[0]
        finally:
            self._idle.put(pipeline)
        png = io.BytesIO()
        image.save(png, "PNG", compress_level=1)
        return png.getvalue()


# ------------------------------------------------------------------------------------------------------- text


@dataclass
class Conversation:
    """The tokens so far, and the key-value cache that saves computing them again."""

    cache: DynamicCache
    tokens: list[int] = field(default_factory=list)


class Sessions:
    """The last conversations, each with its cache on the device; the longest unused one goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, name: str) -> Conversation | None:
        """Out of the store while it is in use: two requests never write to one cache."""
        with self._lock:
            return self._kept.pop(name, None)

    def keep(self, name: str, conversation: Conversation) -> None:
        with self._lock:
            self._kept[name] = conversation
            self._kept.move_to_end(name)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)


class StopWhen(StoppingCriteria):
    """Ends a generation whose client has gone."""

    def __init__(self, gone: threading.Event) -> None:
        self._gone = gone

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._gone.is_set(), device=input_ids.device)


class TokenStreamer(BaseStreamer):
    """Passes each new token on as soon as it is made."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._on_token(int(value))
        self._prompt_seen = True  # `generate` hands over the prompt first

    def end(self) -> None:
        pass


class Writer:
    """Continues texts, alone or as turns of a conversation."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept_sessions: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._context = model.config.max_position_embeddings
        self._tokenizing = threading.Lock()  # fast tokenizers refuse two threads at once
        self.sessions = Sessions(kept_sessions)

    def encode(self, text: str) -> list[int]:
        with self._tokenizing:
            return self._tokenizer(text).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def write(
        self,
        prompt: str,
        max_new_tokens: int,
        session: str | None = None,
        on_token: Callable[[int], None] | None = None,
        gone: threading.Event | None = None,
    ) -> list[int]:
        """The new tokens. A session's earlier turns are read from its cache, not computed again."""
        turn = self.encode(prompt)
        talk = self.sessions.take(session) if session else None
        if talk is None or len(talk.tokens) + len(turn) + max_new_tokens > self._context:
            talk = Conversation(DynamicCache(config=self._model.config))
        # The tokens stay on the host, where `generate` may keep its books: no step waits for the device.
        tokens = torch.tensor([talk.tokens + turn])
        written = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            cache=talk.cache,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            streamer=TokenStreamer(on_token) if on_token else None,
            stopping_criteria=[StopWhen(gone)] if gone else None,
        )[0].tolist()
        if session:
            talk.tokens = written
            self.sessions.keep(session, talk)
        return written[tokens.shape[1] :]

    async def stream(
        self, prompt: str, max_new_tokens: int, session: str | None = None
    ) -> AsyncIterator[tuple[int, str]]:
        """The new tokens one by one, each with the text it adds, while a thread makes them."""
        loop = asyncio.get_running_loop()
        made: asyncio.Queue[int | None] = asyncio.Queue()
        gone = threading.Event()

        def on_token(token: int) -> None:
            loop.call_soon_threadsafe(made.put_nowait, token)

        work = asyncio.create_task(
            asyncio.to_thread(self.write, prompt, max_new_tokens, session, on_token, gone)
        )
        work.add_done_callback(lambda _: made.put_nowait(None))
        tokens: list[int] = []
        sent = ""
        try:
            while (token := await made.get()) is not None:
                tokens.append(token)
                # A character may need several tokens: decode all, send what is new and whole.
                text = self.decode(tokens).rstrip("\ufffd")
                yield token, text[len(sent) :]
                sent = text
            await work  # raises what the thread raised
        finally:
            gone.set()


# --------------------------------------------------------------------------------------------------- requests

Side = Annotated[int, Field(ge=64, le=4096, multiple_of=8)]


class ImageRequest(BaseModel):
    prompt: str = "a lighthouse at dusk"
    width: Side = 512
    height: Side = 512
    steps: int = Field(2, ge=1, le=50)
    seed: int = 0


class TextRequest(BaseModel):
    prompt: str = Field("Once upon a time", min_length=1, max_length=8000)
    max_new_tokens: int = Field(16, ge=1, le=1024)
    session: str | None = Field(None, description="continue this conversation, and keep its cache")


class TextReply(BaseModel):
    text: str
    tokens: list[int]
    session: str | None


# ------------------------------------------------------------------------------------------------- the server


def create_app(options: Options) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        torch.backends.cudnn.enabled = options.cudnn
        if options.memory_gib:
            total = torch.cuda.get_device_properties(options.device).total_memory
            share = min(1.0, options.memory_gib * 2**30 / total)
            device = torch.device(
                options.device
            ).index  # None for a plain "cuda", which it takes to be this one
            torch.cuda.set_per_process_memory_fraction(share, device)
        app.state.painter = Painter(load_images(options), options.image_workers)
        app.state.writer = Writer(*load_text(options), options.kept_sessions)
        yield

    app = FastAPI(title="Images and text", lifespan=lifespan)
    if options.guard:
        app.add_middleware(MemoryGuardMiddleware, guard=MemoryGuard())

    @app.get("/healthz")
    def healthz() -> dict[str, object]:
        return {"status": "ok", "device": options.device, "sessions": len(app.state.writer.sessions)}

    @app.post("/images", response_class=Response, responses={200: {"content": {"image/png": {}}}})
    def images(wanted: ImageRequest) -> Response:
        png = app.state.painter.paint(wanted.prompt, wanted.width, wanted.height, wanted.steps, wanted.seed)
        return Response(png, media_type="image/png")

    @app.post("/generate")
    def generate(wanted: TextRequest) -> TextReply:
        tokens = app.state.writer.write(wanted.prompt, wanted.max_new_tokens, wanted.session)
        return TextReply(text=app.state.writer.decode(tokens), tokens=tokens, session=wanted.session)

    @app.post("/generate/stream")
    async def stream(wanted: TextRequest) -> StreamingResponse:
        pieces = app.state.writer.stream(wanted.prompt, wanted.max_new_tokens, wanted.session)
        first = await anext(pieces)  # where a long prompt finds no memory it fails here: still a 503
        return StreamingResponse(events(first, pieces), media_type="text/event-stream")

    @app.exception_handler(torch.cuda.OutOfMemoryError)
    async def no_memory(_: Request, error: torch.cuda.OutOfMemoryError) -> JSONResponse:
        return JSONResponse(out_of_memory(error), status_code=503, headers={"retry-after": "1"})

    return app


async def events(first: tuple[int, str], more: AsyncIterator[tuple[int, str]]) -> AsyncIterator[str]:
    """Server-sent events: one a token, then `[DONE]`."""
    try:
        async with aclosing(more):
            yield event({"token": first[0], "text": first[1]})
            async for token, text in more:
                yield event({"token": token, "text": text})
        yield "data: [DONE]\n\n"
    except torch.cuda.OutOfMemoryError as error:
        yield "event: error\n" + event(out_of_memory(error))


def event(data: dict[str, object]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def out_of_memory(error: torch.cuda.OutOfMemoryError) -> dict[str, object]:
    return {"error": "out_of_memory", "detail": str(error).split(". ")[0] + "."}


app = create_app(options_from(option_parser().parse_args([])))


def main() -> None:
    parser = option_parser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(create_app(options_from(arguments)), host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
