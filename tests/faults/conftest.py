# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the faults."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def pluggable(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the allocators of the emulated tests' pluggable.c."""
    library = tmp_path_factory.mktemp("pluggable") / "pluggable.so"
    source = Path(__file__).parents[1] / "emulated" / "pluggable.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return str(library)
