# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - the paths first
"""The soak: the example server at its top rate, with everything on, through switches, outages and storms.

    python tests/soak/soak.py --seconds 600 --seed 7        (or `make soak`)

While clients ask as fast as they are answered, at random times (one seed) the live server is uninstrumented
and instrumented again, the collector refuses, hangs, talks nonsense or is gone and comes back on its port,
and far too much memory is asked for. In the end nothing may have grown, no request may be lost, and the
accounts of the clients, of the server, of torch and of the telemetry must agree call by call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from emulator.gpu import FOREIGN
from faults.collector import Collector

from soak import growth
from soak.asking import Clients, load
from soak.reckoning import Reckoning

MEMORY = "3GiB"
START_LIMIT_S = 180
REST_S = 60
MOODS = ("refusing", "slow", "garbage", "gone")
LEAKS = tuple(growth.BOUNDS)


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens when, in seconds from the beginning of the load; all of it from the seed."""

    switches: tuple[tuple[float, float, float], ...]
    """On for so long, off for so long; and a die for whether what was recorded is exported before."""
    outages: tuple[tuple[float, float, str], ...]
    """Well for so long, then unwell for so long, and how."""
    storms: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, seed: int, seconds: float) -> Plan:
        dice = random.Random(seed)
        most = min(12.0, seconds / 12)  # of an outage: in a short run they are short

        def until_the_end(lengths: Callable[[], Any]) -> Iterator[Any]:
            at = 0.0
            while True:
                each = lengths()
                at += each[0] + each[1]
                if at > 0.92 * seconds:
                    return
                yield each

        moods: list[str] = []

        def mood() -> str:
            if not moods:
                moods.extend(dice.sample(MOODS, len(MOODS)))
            return moods.pop()

        return cls(
            tuple(
                until_the_end(lambda: (dice.uniform(0.5, 1.6 * most), dice.uniform(0.05, 2), dice.random()))
            ),
            tuple(
                until_the_end(
                    lambda: (dice.uniform(most / 4, 3 * most), dice.uniform(most / 4, most), mood())
                )
            ),
            tuple(until_the_end(lambda: (dice.uniform(1, 3 * most), dice.uniform(0.2, 2)))),
        )


class Server:
    """The server's process, which does what it is told, one command after another."""

    def __init__(self, folder: Path, collector: str, leak: str | None) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment |= {"MALLOC_ARENA_MAX": "1", "PYTHON": sys.executable}
        command = [sys.executable, TESTS / "emulator" / "run", "--memory", MEMORY, "--", sys.executable]
        command += [TESTS / "soak" / "server.py", folder, collector, *([leak] if leak else [])]
        self.log = folder / "server.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._one_by_one = asyncio.Lock()

    async def ready(self) -> int:
        """Its port."""
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), START_LIMIT_S)
        if not line:
            self.process.wait()
        self.expect()
        return json.loads(line)["port"]

    def expect(self) -> None:
        """That it is there.

        Raises:
            RuntimeError: it has ended; with the last of its log.
        """
        if self.process.poll() is not None:
            said = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the server has ended with {self.process.returncode}:\n{said}")

    async def do(self, command: str, **arguments: Any) -> Any:
        def asked() -> Any:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
            if not line:
                self.process.wait()
                self.expect()
            return json.loads(line)

        async with self._one_by_one:
            answer = await asyncio.to_thread(asked)
        if isinstance(answer, dict) and "raised" in answer:
            raise RuntimeError(f"the server's {command} raised {answer['raised']}")
        return answer

    async def up(self, url: str) -> None:
        import httpx

        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(10 * START_LIMIT_S):
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/healthz")).status_code == 200:
                        return
                self.expect()
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the server does not answer:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Soak:
    """One run."""

    def __init__(self, folder: Path, seconds: float, seed: int, leak: str | None) -> None:
        self._folder = folder
        self._seconds = seconds
        self._seed = seed
        self._plan = Plan.of(seed, seconds)
        self._collector = Collector(folder / "collector")
        self._well = True
        self._server = Server(folder, self._collector.address, leak)
        self.samples: list[growth.Sample] = []
        self.began = self.ended = 0.0
        self.outages: list[tuple[str, float]] = []

    async def run(self) -> Reckoning:
        server = self._server
        try:
            await asyncio.to_thread(self._collector.start)
            url = f"http://127.0.0.1:{await server.ready()}"
            await server.up(url)
            self.began = time.time()
            wave_s = min(load.WAVE_S, self._seconds / 8)  # whole waves in each quarter
            self.clients = Clients(url, self._seed, lambda: load.tide((time.time() - self.began) / wave_s))
            asking = asyncio.create_task(self.clients.run())
            disturbing = [
                asyncio.create_task(each) for each in (self._switch(), self._outage(), self._storm())
            ]
            await self._sample(self.began + self._seconds)
            self.ended = time.time()
            self.clients.end()
            await asyncio.gather(asking, *disturbing)
            still_open = await server.do("rest", seconds=REST_S)
            last = await self._last()
            await server.do("end")
            code = await asyncio.to_thread(server.process.wait, 60)
        finally:
            server.stop()
            self._collector.stop()
        (self._folder / "clients.json").write_text(json.dumps([asdict(sent) for sent in self.clients.sent]))
        (self._folder / "last.json").write_text(json.dumps(last))
        (self._folder / "samples.json").write_text(json.dumps([asdict(each) for each in self.samples]))
        reckoning = Reckoning.of(self._folder)
        if still_open:
            reckoning.failures.append(f"calls that are still open at the end: {still_open}")
        if code:
            reckoning.failures.append(f"the server exited with {code}")
        if "Traceback" in server.log.read_text():
            reckoning.failures.append("the server's log has a traceback")
        return reckoning

    async def _last(self) -> dict[str, Any]:
        """The allocator's figures and an export of them, with nothing happening in between."""
        for _ in range(10):
            last = await self._server.do("told")
            if last["still"]:
                break
        return last

    def grown(self, reckoning: Reckoning) -> dict[str, tuple[float, float]]:
        """Each figure in the second quarter and in the last."""
        over_time = {
            name: [(each.at, getattr(each, name)) for each in self.samples]
            for name in ("memory", "threads", "descriptors")
        }
        by_half = [growth.quarter(number, self.began, self.ended)[1] for number in (2, 4)]
        span = self.began, self.ended
        return {
            **{name: growth.compared(each, *span, statistics.median) for name, each in over_time.items()},
            "objects": growth.compared(reckoning.blocks, *span, min),
            "series": (reckoning.series(by_half[0]), reckoning.series(by_half[1])),
        }

    async def _sample(self, until: float) -> None:
        while time.time() < until:
            self._server.expect()
            self.samples.append(await asyncio.to_thread(growth.sample, self._server.process.pid))
            await asyncio.sleep(min(1.0, self._seconds / 60))

    async def _switch(self) -> None:
        for on, off, die in self._plan.switches:
            await asyncio.sleep(on)
            await self._server.do("off", flush=self._well and die < 0.5)
            await asyncio.sleep(off)
            await self._server.do("on")

    async def _outage(self) -> None:
        collector = self._collector
        for well, unwell, mood in self._plan.outages:
            await asyncio.sleep(well)
            self._well = False
            collector.stop()
            if mood != "gone":
                await asyncio.to_thread(collector.start, mood)
            began = time.time()
            await asyncio.sleep(unwell)
            collector.stop()
            await asyncio.to_thread(collector.start)
            self.outages.append((mood, time.time() - began))
            # the exporters try again after pauses that grow with the outage
            await asyncio.sleep(0.5)
            self._well = True

    async def _storm(self) -> None:
        for calm, wild in self._plan.storms:
            await asyncio.sleep(calm)
            self.clients.storming = True
            await asyncio.sleep(wild)
            self.clients.storming = False


# --------------------------------------------------------------------------------------------- the verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--leak", choices=LEAKS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the verdict there too")
    parser.add_argument("--keep", type=Path, help="a folder that keeps accounts, exports and log")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if chosen.seed is None else chosen.seed
    print(f"Soaking for {chosen.seconds:g} s with SOAK_SEED={seed} ...", flush=True)

    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, chosen.seconds, seed, chosen.leak)
    try:
        reckoning = asyncio.run(soak.run())
    except RuntimeError as error:
        print(f"FAILED: {error}\nWhat was noted lies in {folder}; again with SOAK_SEED={seed}")
        return 1
    figures = soak.grown(reckoning)
    failures = [*reckoning.failures, *growth.grown(figures)]
    verdict = {
        "seed": seed,
        "seconds": chosen.seconds,
        "failures": failures,
        **reckoning.figures,
        "outages": [f"{mood} {seconds:.1f} s" for mood, seconds in soak.outages],
        "growth": figures,
    }
    for name, figure in verdict.items():
        if name not in ("failures", "seed", "seconds"):
            print(f"  {name:20} {figure}")
    for failure in failures:
        print(f"FAILED: {failure}")
    if chosen.json:
        chosen.json.write_text(json.dumps(verdict, indent=2))
    if chosen.keep is None:
        if failures:
            print(f"What was noted lies in {folder}; again with SOAK_SEED={seed}")
        else:
            shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
