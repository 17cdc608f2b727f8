# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the pipeline's tests: one whole pipeline for all of a file's tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.alerting import Story, alerting, story
from pipeline.parts import PARTS, CannotBuild, part
from pipeline.stack import Stack, running


@pytest.fixture(scope="session", autouse=True)
def parts() -> dict[str, Path]:
    """Every binary, built before the first test: a missing toolchain is told once, and nothing is skipped."""
    try:
        return {name: part(name) for name in PARTS}
    except CannotBuild as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="module")
def stack(
    parts: dict[str, Path], emulation: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(scope="session", autouse=True)
def unscaled(
    request: pytest.FixtureRequest, parts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Story]]:
    """The story of the alert as it is committed: begun before the first test, asked for by the last."""
    wanted = any("test_unscaled_alert" in item.nodeid for item in request.session.items)
    stop = threading.Event()

    def run() -> Story:
        if not (wanted and os.environ.get("CI")):
            raise RuntimeError("on CI alone (CI=true)")
        folder = tmp_path_factory.mktemp("unscaled")
        with alerting(folder, "scrape") as running:
            return story(running, folder, stop)

    with ThreadPoolExecutor(1) as beside:
        future = beside.submit(run)
        yield future.result
        stop.set()
