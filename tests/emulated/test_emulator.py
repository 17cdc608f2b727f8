# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU keeps its promises: each is asserted on a figure that could be wrong."""

from __future__ import annotations

import time

import pytest
from emulator import control

pytestmark = pytest.mark.needs_emulation

MiB = 1 << 20
GiB = 1 << 30


def stats(device: int = 0) -> dict[str, int]:
    import torch

    return torch.cuda.memory_stats(device)


def fill(size: int, device: int = 0):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def driver_and_allocator_agree(device: int = 0) -> bool:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return stats(device)["reserved_bytes.all.current"] + control.memory(device, "external") + free == total


def oom_and_external():
    import torch

    kept = fill(30 * MiB)
    seen = {"agree": [driver_and_allocator_agree()]}
    control.external_malloc(0, GiB)
    seen["free_after_external"] = torch.cuda.mem_get_info(0)[0]
    seen["agree"].append(driver_and_allocator_agree())
    try:
        fill(3 * GiB)
    except torch.cuda.OutOfMemoryError as error:
        seen["error"] = type(error).__name__
    seen["retries"], seen["ooms"] = stats()["num_alloc_retries"], stats()["num_ooms"]
    control.external_free(0, GiB)
    fits = fill(3 * GiB)
    seen["agree"].append(driver_and_allocator_agree())
    seen["reserved"] = stats()["reserved_bytes.all.current"]
    del kept, fits
    return seen


def test_a_full_device_is_one_retry_and_one_oom_and_every_byte_is_accounted_for(gpu):
    seen = gpu.run(oom_and_external, memory="4GiB")
    assert seen == {
        "agree": [True, True, True],
        "free_after_external": 4 * GiB - GiB - 30 * MiB,
        "error": "OutOfMemoryError",
        "retries": 1,
        "ooms": 1,
        "reserved": 3 * GiB + 30 * MiB,
    }
    assert "this is no GPU but an emulation" in gpu.last.stderr


def raises():
    raise ValueError("the body's own words")


def hangs():
    time.sleep(60)


def test_a_body_that_fails_or_hangs_says_what_and_where(gpu):
    with pytest.raises(gpu.Failed, match="the body's own words"):
        gpu.run(raises)
    with pytest.raises(gpu.Hung, match=r"(?s)had not ended after 1 s.*in hangs"):
        gpu.run(hangs, timeout=1)
    with pytest.raises(gpu.Failed, match="died of SIGKILL"):
        gpu.run("import os; os.kill(os.getpid(), 9)")
