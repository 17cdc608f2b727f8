# SPDX-License-Identifier: Apache-2.0
"""A small server's memory, with requests that are measured: one that fragments, or the same in good health.

    tests/emulator/run --memory 1GiB -- python tests/pipeline/fragmenting.py fragment --seconds 30

Conversations have a cache of 8 MiB each, two in one of the allocator's segments of 20. In good health a few
are open at a time, and all end. In the run that goes wrong there was a rush, and every second one of it is
never ended: its segment stays, and 12 MiB of it serve no image. Images of two sizes come in turns, and now
and then the cache is cleared, as many servers do; as the segments have eaten the room, the larger image
then finds none until the smaller one's has been flushed. One poster is asked for as well; there is more
free than it needs, in pieces.

It prints a line of JSON for each few turns: when, how much of what is held is trapped, retries and errors so
far, all by torch itself; and one for each export.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from typing import Any

import torch
from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track

MIB = 1 << 20
SESSION, SMALL_IMAGE, LARGE_IMAGE, POSTER = 8 * MIB, 150 * MIB, 190 * MIB, 400 * MIB
RUSH, CALM = 78, 10


class Exporter(OTLPMetricExporter):
    """Tells when it has exported."""

    def export(self, *arguments: Any, **keywords: Any) -> Any:
        result = super().export(*arguments, **keywords)
        print(json.dumps({"exported_at": time.time()}), flush=True)
        return result


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@track
def image(size: int) -> None:
    take(size)


@track
def conversation() -> torch.Tensor:
    return take(SESSION)


def line() -> dict[str, float]:
    told = torch.cuda.memory_stats()
    return {
        "at": time.time(),
        "trapped": told["inactive_split_bytes.all.current"] / (told["reserved_bytes.all.current"] or 1),
        "retries": told["num_alloc_retries"],
        "ooms": told["num_ooms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("health", choices=("fragment", "healthy"))
    parser.add_argument("--seconds", type=float, required=True)
    chosen = parser.parse_args()

    provider = MeterProvider([PeriodicExportingMetricReader(Exporter())])
    metrics.set_meter_provider(provider)
    TorchMemInstrumentor().instrument()
    end = time.monotonic() + chosen.seconds
    take(MIB)
    provider.force_flush()  # as a server does that takes its first requests some time after its start
    rush = [conversation() for _ in range(RUSH if chosen.health == "fragment" else 0)]
    del rush[::2]
    turn = 0
    while time.monotonic() < end and os.getppid() != 1:
        calm = [conversation() for _ in range(CALM)]
        del calm
        for size in (SMALL_IMAGE, LARGE_IMAGE):
            image(size)
        turn += 1
        if turn == 40:  # there is more than that, in pieces, where there was a rush
            with contextlib.suppress(torch.OutOfMemoryError):
                image(POSTER)
        if turn % 10 == 0:
            torch.cuda.empty_cache()
            print(json.dumps(line()), flush=True)
        time.sleep(0.05)
    provider.shutdown()


if __name__ == "__main__":
    main()
