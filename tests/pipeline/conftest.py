# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the pipeline's tests: one whole pipeline for all of a file's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
