# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests: the GPU."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test files say `from emulator import control`; so do the bodies they send to other processes.
sys.path.insert(0, str(Path(__file__).parent))

from emulator import build
from emulator.gpu import Gpu


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "needs_emulation: steers the GPU or its size: runs on the emulated one, also beside a real one",
    )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # as a shell starts what runs in its background; the processes of tests would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_gpu() -> bool:
    return build.has_real_gpu()


@pytest.fixture(scope="session")
def emulation() -> Path:
    """The directory of the emulation's libraries, built for this interpreter's torch."""
    torch = build.find_torch(sys.executable)
    if not os.environ.get("CI") and (torch is None or not torch.cuda):
        pytest.skip("needs a CUDA build of torch (none is installed here); on CI this is a failure")
    try:
        return build.build(sys.executable)
    except build.CannotBuild as error:
        pytest.fail(f"the emulated GPU cannot be built: {error}", pytrace=False)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, real_gpu: bool) -> Iterator[Gpu]:
    """A GPU to run code on, in fresh processes: `gpu.run(body, memory="4GiB")`.

    The body is a function at the top level of the test file; it runs in a process of its own, and what it
    returns (JSON) comes back. An exception in it fails the test with its traceback and standard error; one
    that hangs is killed and raises `gpu.Hung` with the stack of every thread. `gpu.popen(argv)` starts a
    server that ends with the test; `gpu.environment()` is the environment of either.

    The GPU is the emulated one, which the body steers by `from emulator import control`. On a machine with a
    real GPU a test runs there unless it is marked `needs_emulation`; a run that asks for a size of memory or
    for several devices is emulated there too. It is never skipped on CI.
    """
    steered = request.node.get_closest_marker("needs_emulation") is not None
    handle = Gpu(lambda: request.getfixturevalue("emulation"), real=real_gpu and not steered)
    yield handle
    handle.close()
