# SPDX-License-Identifier: Apache-2.0
"""One workload, run with each release: which signals came of it, and whether the figures are the allocator's.

python workload.py MODE    run in the leg's environment; prints one line of JSON
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from exported import Exported, Logged, Traced  # noqa: E402

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, instrument_model  # noqa: E402

MIB = 1 << 20
EVERYWHERE = ("torch.device", "hw.id")
"""Attributes that every metric of a device carries: told once."""


class Engine:
    """What is measured: each call does what it is told."""

    def step(self, tensor, act):
        return act()


class Seen:
    """Every signal that has come, by the names that the documentation gives them."""

    def __init__(self) -> None:
        self.exported, self.traced, self.logged = Exported(), Traced(), Logged()
        self.names: set[str] = set()

    def collect(self) -> None:
        for metric in self.exported.collect().metrics:
            self.names.add(f"metric {metric.name}")
            for point in metric.data.data_points:
                self.names.update(f"attribute {key}" for key in point.attributes if key in EVERYWHERE)
                for key in ("torch.memory.pool", "torch.memory.state"):
                    if key in point.attributes:
                        member = f" {point.attributes[key]}" if key.endswith("state") else ""
                        self.names.add(f"metric {metric.name} by {key}{member}")

    def all(self) -> list[str]:
        self.collect()
        for span in self.traced.spans:
            self.names.update(f"span {key}" for key in span.attributes)
            for event in span.events:
                if event.name.startswith("torch."):
                    self.names.update(f"event {key}" for key in event.attributes)
        self.names.update(f"log {record.event_name}" for record in self.logged.records)
        return sorted(self.names)


def take(mib: int, device: int = 0):
    import torch

    return torch.empty(mib * MIB, dtype=torch.uint8, device=f"cuda:{device}")


def on_the_gpu(seen: Seen, mode: str) -> None:
    import torch
    from emulator import control

    engine = Engine()
    kept = engine.step(take(1), lambda: [take(30) for _ in range(6)])  # grows, to a new peak
    seen.collect()
    engine.step(None, lambda: [kept.pop(each) for each in (4, 2, 0)])  # every second one: fragments
    small = engine.step(
        None, lambda: [torch.empty(1000, dtype=torch.uint8, device="cuda") for _ in range(99)]
    )
    del small[::3]
    seen.collect()
    both = engine.step(None, lambda: [take(4, 0), take(9, 1)]) if mode == "two devices" else None
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    control.external_malloc(0, 50 * MIB)
    graph, held = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    if mode != "cudaMallocAsync":
        with torch.cuda.graph(graph):
            torch.empty(2 * MIB, device="cuda").fill_(1)
    seen.collect()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cached = [take(200) for _ in range(2)]
    del cached
    engine.step(None, lambda: take(500))  # what the other stream has cached must be flushed for it

    def overlapped():
        other = threading.Thread(target=engine.step, args=(None, lambda: take(2)))
        other.start()
        other.join()

    engine.step(None, overlapped)
    pending = take(5)
    control.hold(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)
    pending.record_stream(side)
    del pending
    seen.collect()
    control.release(side)

    with suppress(torch.cuda.OutOfMemoryError):
        engine.step(None, lambda: take(3000))
    kept.clear()
    del graph
    gc.collect()
    seen.collect()
    check(seen, torch, mode)
    del small, both, pinned, held


def check(seen: Seen, torch, mode: str) -> None:
    """The figures are the allocator's own.

    Raises:
        AssertionError: one is not.
    """
    told, statistics = seen.exported, torch.cuda.memory_stats(0)
    keys = {
        "torch.memory.allocated": "allocated_bytes.all.current",
        "torch.memory.reserved": "reserved_bytes.all.current",
        "torch.memory.active": "active_bytes.all.current",
        "torch.memory.requested": "requested_bytes.all.current",
        "torch.memory.allocation.retries": "num_alloc_retries",
        "torch.memory.ooms": "num_ooms",
        "torch.memory.allocations": "allocation.all.allocated",
        "torch.memory.turnover": "allocated_bytes.all.allocated",
        "torch.memory.device.allocations": "num_device_alloc",
        "torch.memory.device.syncs": "num_sync_all_streams",
    }
    for name, key in keys.items():
        value = told.value(name, device="cuda:0")
        true = statistics.get(key)
        assert value is None or value == true, f"{name} is {value}, the allocator's {true}"
    ledger = told.ledger()
    total = torch.cuda.mem_get_info(0)[1]
    assert sum(ledger.values()) == total == told.value("torch.memory.limit", device="cuda:0"), ledger
    assert ledger["external"] >= 50 * MIB, ledger
    if mode != "cudaMallocAsync":
        assert statistics["num_alloc_retries"] >= 2, "the workload is to make a retry, and one for the error"


def without_gpu() -> None:
    import torch

    assert not torch.cuda.is_available()
    model = torch.nn.Linear(4, 4)
    stop = instrument_model(model)
    model(torch.ones(2, 4))
    stop()
    Engine().step(torch.ones(2, 3), lambda: None)
    with suppress(ValueError):
        Engine().step(None, lambda: int("no number"))
    assert not torch.cuda.is_initialized(), "what measures must not initialise CUDA"


def main(mode: str) -> None:
    seen = Seen()
    TorchMemInstrumentor().instrument(
        meter_provider=seen.exported.provider,
        tracer_provider=seen.traced.provider,
        logger_provider=seen.logged.provider,
        targets=["__main__:Engine.step"],
        snapshot_share=0.1,
    )
    if mode == "no GPU":
        without_gpu()
    else:
        on_the_gpu(seen, mode)
    signals = seen.all()
    TorchMemInstrumentor().uninstrument()
    import torch

    told = {name.split("-")[0]: version(name) for name in ("opentelemetry-sdk", "wrapt")}
    print(json.dumps({"torch": torch.__version__, **told, "signals": signals}))


if __name__ == "__main__":
    main(sys.argv[1])
