# SPDX-License-Identifier: Apache-2.0
"""The process that a test body runs in: reads its job, runs the body, writes down what came of it."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def _body(job: dict[str, Any]) -> Any:
    """The function, from its test file imported by path, or the source text's `result`."""
    if "source" in job:
        scope: dict[str, Any] = {"__name__": "body"}
        exec(compile(job["source"], "<body>", "exec"), scope)
        return scope.get("result")
    file = Path(job["file"])
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, job["function"])(*job["args"])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    # Shortly before the parent gives up, every thread says where it stands, also when all wait for the GIL.
    faulthandler.enable()
    faulthandler.dump_traceback_later(job["timeout"] * 0.9)
    outcome: dict[str, Any]
    try:
        outcome = {"value": _body(job)}
        text = json.dumps(outcome)
    except BaseException:
        text = json.dumps({"error": traceback.format_exc()})
    faulthandler.cancel_dump_traceback_later()
    Path(job["outcome"]).write_text(text)


if __name__ == "__main__":
    # Run as a file, this directory comes first on the path; the tests' own directory is meant.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    main()
