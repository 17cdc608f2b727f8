# SPDX-License-Identifier: Apache-2.0
"""Verdicts in random states of the real allocator, which is then asked whether the request would fit now."""

from __future__ import annotations

import json
import os
import random
import traceback
from collections import Counter

import pytest
from emulated.test_oom import Watched
from truth.states import MODES, Walk

from opentelemetry_instrumentation_torchmem import oom
from opentelemetry_instrumentation_torchmem.allocator.verdict import sizes
from opentelemetry_instrumentation_torchmem.requests.track import track

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
SEEDS = 6


def errors_of_a_walk(mode: str, seed: int):
    """Each error's verdict, what was asked of the driver, whether the request would fit now, and the largest
    block."""
    import torch
    from emulator import control

    watched = Watched()
    oom.INTERVAL, oom.SHARE = 0.0, 1e9
    chance = random.Random(f"{mode} {seed}")
    walk = Walk(MODES[mode], chance)
    for _ in range(6):
        walk.go(chance.randrange(10, 60))
        for _ in range(6):
            watched.traced.exporter.clear()
            size = walk.size() * chance.choice([1, 1, 3, 6])
            try:
                with track("answer"):
                    if chance.random() < 0.3:
                        walk.free_pending()
                    torch.empty(size, dtype=torch.uint8, device="cuda:0")
            except torch.OutOfMemoryError:
                event = watched.events[-1]
                yield [
                    event["verdict"],
                    event["asked"],
                    control.would_fit(size),
                    event["summary"],
                    event["own_largest"],
                ]


def errors(mode: str, seeds: int) -> list:
    found = []
    for seed in range(seeds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(writing, "w") as out:
                try:
                    for error in errors_of_a_walk(mode, seed):
                        out.write(json.dumps(error) + "\n")
                except BaseException:
                    out.write(json.dumps(["failed", 0, False, traceback.format_exc(), 0]) + "\n")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as lines:
            found += [json.loads(line) for line in lines]
        os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("mode", ["native", "expandable", "switched", "split limit", "fraction, expandable"])
def test_a_verdict_says_that_it_fits_now_only_where_it_does(gpu, mode):
    found = gpu.run(
        errors, args=[mode, SEEDS], memory="640MiB", devices=2, alloc_conf=MODES[mode].conf, timeout=240
    )
    print(Counter(verdict for verdict, *_ in found))
    assert len(found) > 5 * SEEDS
    for verdict, asked, fits, summary, largest in found:
        assert verdict not in ("failed", "unknown", "unexamined"), summary
        if verdict in ("pending_frees", "changed_meanwhile"):
            assert fits, summary
        else:  # within what a request can have been nobody knows whether a block would do
            least, most = sizes(asked)
            assert not fits or least <= largest < most, summary
