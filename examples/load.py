# SPDX-License-Identifier: Apache-2.0
"""Load for `serve.py`: the sizes and the concurrency that fragment a GPU's memory, or a calm mix.

    python examples/load.py --seconds 30 http://127.0.0.1:8000

`fragment` asks for images of many sizes between turns of many conversations. An image takes hundreds of
megabytes for a moment; once they are free, the growing caches of the conversations settle in them and stay.
The next image finds no hole that is large enough, and the allocator takes more from the device, until none is
left. `steady` asks for one size of image and one length of prompt, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

IMAGE_SIDES = range(256, 896 + 1, 64)
CONVERSATIONS = 24
WAVE_S = 30  # from calm to busy and back, or the whole of a shorter run


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, object]


@dataclass
class Results:
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: Counter[str] = field(default_factory=Counter)

    def summary(self, seconds: float) -> dict[str, object]:
        everything = [latency for each in self.latencies.values() for latency in each]
        failed = self.failures.total()
        return {
            "seconds": round(seconds, 1),
            "requests": len(everything) + failed,
            "failed": failed,
            "failures": dict(self.failures),
            "latency_ms": {path: spread(each) for path, each in sorted(self.latencies.items())},
        }


def spread(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {"requests": len(ordered), "p50": at(0.5), "p95": at(0.95), "max": at(1)}


# ---------------------------------------------------------------------------------------------- what is asked


def fragment(dice: random.Random, busy: Callable[[], float]) -> Iterator[Ask]:
    """Between calm (0) and busy (1): then images are larger and conversations are many."""
    while True:
        sides = IMAGE_SIDES[: 2 + int(busy() * len(IMAGE_SIDES))]
        if dice.random() < 0.35:
            yield Ask("/images", {"width": dice.choice(sides), "height": dice.choice(sides)})
        else:
            talk = dice.randrange(4 + int(busy() * (CONVERSATIONS - 4)))
            turn = {
                "prompt": "word " * dice.randint(20, 400),
                "max_new_tokens": dice.randint(2, 8),
                "session": f"conversation {talk}",
            }
            yield Ask(dice.choice(["/generate", "/generate", "/generate/stream"]), turn)


def tide(waves: float) -> float:
    """0 at the beginning of each wave, 1 in its middle."""
    return (1 - math.cos(2 * math.pi * waves)) / 2


def steady(dice: random.Random, _: Callable[[], float]) -> Iterator[Ask]:
    while True:
        if dice.random() < 0.35:
            yield Ask("/images", {"width": 512, "height": 512})
        else:
            yield Ask("/generate", {"prompt": "word " * 100, "max_new_tokens": 4})


PROFILES = {"fragment": fragment, "steady": steady}

# -------------------------------------------------------------------------------------------- how it is asked


async def drive(url: str, profile: str, seconds: float, concurrency: int, seed: int) -> Results:
    start = time.monotonic()
    end = start + seconds
    wave_s = min(WAVE_S, seconds)
    asks = PROFILES[profile](random.Random(seed), lambda: tide((time.monotonic() - start) / wave_s))
    results = Results()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def worker() -> None:
            while time.monotonic() < end:
                await send(client, next(asks), results)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return results


async def send(client: httpx.AsyncClient, ask: Ask, results: Results) -> None:
    start = time.perf_counter()
    try:
        async with client.stream("POST", ask.path, json=ask.body) as response:
            ended = b""
            async for chunk in response.aiter_bytes():
                ended = (ended + chunk)[-200:]
    except httpx.HTTPError as error:
        results.failures[type(error).__name__] += 1
        await asyncio.sleep(0.2)  # a server that is not there is not asked in a busy loop
        return
    if response.status_code != 200:
        results.failures[str(response.status_code)] += 1
    elif b"event: error" in ended:
        results.failures["broken stream"] += 1
    else:
        results.latencies[ask.path].append(time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="fragment")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the summary there too")
    chosen = parser.parse_args()

    start = time.monotonic()
    results = asyncio.run(drive(chosen.url, chosen.profile, chosen.seconds, chosen.concurrency, chosen.seed))
    summary = results.summary(time.monotonic() - start)
    print("{requests} requests in {seconds} s, {failed} failed {failures}".format(**summary))
    for path, each in summary["latency_ms"].items():
        print("  {:18} {requests:6}   p50 {p50:7} ms   p95 {p95:7} ms   max {max:7} ms".format(path, **each))
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(summary, file, indent=2)
    return 0 if results.latencies else 1


if __name__ == "__main__":
    raise SystemExit(main())
