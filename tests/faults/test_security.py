# SPDX-License-Identifier: Apache-2.0
"""What never leaves the process: prompts, values, tokens, secrets; and what nobody can reach or read."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.collector import Collector
from faults.served import Served, take, track

SECRETS = {
    "HF_TOKEN": "hf_CanaryOfHuggingFace0123456789",
    "AWS_SECRET_ACCESS_KEY": "CanaryOfAmazon/0123456789+abcdef",
    "OPENAI_API_KEY": "sk-canary-of-openai-0123456789",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20CanaryOfTheCollector0123456789",
    "DATABASE_URL": "postgres://canary:CanaryOfADatabase0123456789@localhost/app",
}
TEXTS = [
    "CanaryOfAPrompt", "CanaryOfASystemPrompt", "CanaryOfAnAnswer", "CanaryOfAKey", "CanaryOfAStream",
    "CanaryOfAnAttribute", "CanaryOfAFrame",
]  # fmt: skip
FLOAT, TOKENS = 13371337.25, [424242421, 424242437]

PROGRAM = """
import logging, os, sys, torch
from opentelemetry_instrumentation_torchmem import instrument_model, track

logging.basicConfig(level=logging.DEBUG)
torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")

class Engine:
    secret = "CanaryOfAnAttribute"

    def __repr__(self):
        return self.secret

    def generate(self, prompt, inputs=None, *, system=None, tokens=None, options=None):
        CanaryOfAFrame = prompt
        self.kept = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        self.values = torch.full((1000, 7), 13371337.25)
        return {"text": "CanaryOfAnAnswer", "tokens": [424242421, 424242437]}

    def stream(self, prompt):
        for _ in range(3):
            yield "CanaryOfAStream"

@track
def rerank(prompt, tokens):
    return torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

values = torch.full((3, 5), 13371337.25)
tokens = torch.tensor([[424242421, 424242437]])
engine = Engine()
engine.generate("CanaryOfAPrompt", values, system="CanaryOfASystemPrompt", tokens=tokens,
                options={"CanaryOfAKey": values, "ids": [424242421, 424242437]})
list(engine.stream("CanaryOfAPrompt"))
model = torch.nn.Linear(5, 2)
instrument_model(model, "rank")
model(values)
with track("block"):
    prompt = "CanaryOfAPrompt"
for _ in range(2):
    try:
        rerank("CanaryOfAPrompt", tokens)
    except torch.OutOfMemoryError:
        pass
print("SERVED")
"""


def shapes_of_a_number(number: float) -> set[bytes]:
    """How a number may stand in a message: as text, as protobuf's fixed and variable lengths."""
    found = {str(number).encode(), struct.pack("<d", number)}
    if isinstance(number, int):
        found.add(struct.pack("<q", number))
        rest, variable = number, bytearray()
        while rest > 127:
            variable.append(rest & 127 | 128)
            rest >>= 7
        found.add(bytes([*variable, rest]))
    else:
        found |= {struct.pack("<f", number), f"{number:g}".encode(), f"{number:.0f}".encode()}
    return found


def canaries() -> dict[str, bytes]:
    found = {text: text.encode() for text in TEXTS}
    for name, secret in SECRETS.items():
        found[name] = re.search(r"[Cc]anary[\w/+-]*\d", secret)[0].encode()  # type: ignore[index]
    for number in (FLOAT, *TOKENS):
        found |= {f"{number} as {form!r}": form for form in shapes_of_a_number(number)}
    return found


@pytest.mark.needs_emulation
def test_no_prompt_value_token_or_secret_is_in_anything_that_is_exported_or_written(gpu, tmp_path):
    (tmp_path / "app.py").write_text(PROGRAM)
    dumps = tmp_path / "dumps"
    with Collector(tmp_path / "came") as collector:
        process = gpu.popen(
            [
                str(Path(sys.executable).with_name("opentelemetry-instrument")),
                *("--traces_exporter", "otlp", "--metrics_exporter", "otlp", "--logs_exporter", "otlp"),
                *(
                    "--torchmem_targets",
                    "app.gone:Engine.generate,__main__:Engine.generate,__main__:Engine.stream",
                ),
                *("--torchmem_oom_dump_dir", str(dumps), "--torchmem_snapshot_share", "0.1"),
                *(sys.executable, "app.py"),
            ],
            memory="1GiB",
            env={
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
                "OTEL_METRIC_EXPORT_INTERVAL": "500",
                "OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED": "true",
                **SECRETS,
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, said = process.communicate(timeout=120)
    assert (process.returncode, out.split()) == (0, [b"SERVED"]), said.decode()
    spans = [span.name for _, span in collector.spans()]
    assert {"generate Engine", "stream Engine", "rank Linear", "block", "rerank"} <= set(spans)
    logs = [
        record
        for message in collector.messages("logs")
        for resource in message.resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]
    assert any(record.event_name == "torch.memory.oom.evidence" for record in logs)
    assert any("app.gone:Engine.generate" in record.body.string_value for record in logs)
    (dump,) = dumps.iterdir()
    assert stat.S_IMODE(dump.stat().st_mode) == 0o600
    assert stat.S_IMODE(dumps.stat().st_mode) == 0o700
    places = {"metrics, spans and logs": b"\n".join(collector.bodies()), "the dump": dump.read_bytes()}
    places["standard error"] = said
    assert b"3x5" in places["metrics, spans and logs"]  # shapes are told
    assert b"app.py" in places["the dump"]  # and frames, as the user has them recorded
    leaks = [
        (name, place)
        for name, canary in canaries().items()
        for place, body in places.items()
        if canary in body
    ]
    assert leaks == []


def reachable() -> dict:
    import psutil

    served = Served(oom_dump_dir=os.path.join(os.getcwd(), "dumps-of-nobody"), snapshot_share=0.1)
    kept = take(30)

    @track("answer")
    def answer(mib: int) -> Any:
        return take(mib)

    answer(1)
    served.collect()
    process = psutil.Process()
    connections = [each for each in process.net_connections("all") if each.status != "NONE" or each.laddr]
    return {
        "connections": [str(each) for each in connections],
        "children": len(process.children()),
        "threads": process.num_threads(),
        "kept": kept.numel(),
    }


def test_an_instrumented_process_listens_on_nothing_and_starts_nothing(gpu, tmp_path):
    program = "import json; from faults.test_security import reachable; print(json.dumps(reachable()))"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = gpu.popen(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, cwd=tmp_path, stdout=subprocess.PIPE
    )
    got = json.loads(process.communicate(timeout=60)[0])
    assert (got["connections"], got["children"]) == ([], 0)
