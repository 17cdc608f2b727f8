# SPDX-License-Identifier: Apache-2.0
"""How each generator here ends: it writes its files, or says which of them are stale."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write(texts: Mapping[Path, str]) -> int:
    """Writes each file. Returns the exit code."""
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def check(texts: Mapping[Path, str], generator: str) -> int:
    """Names each file that is not as it would be written by ``generator``. Returns 1 if there is one."""
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"stale: {path}: run `python collector-config/{generator}`", file=sys.stderr)
    return 1 if stale else 0
