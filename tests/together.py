# SPDX-License-Identifier: Apache-2.0
"""Several test bodies for the price of one import of torch."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulator.gpu import Gpu


class Together:
    """Bodies that run one after another on the emulated GPU, each in a process of its own.

    The processes are forked from one that has imported torch and not touched CUDA. All run when the first
    result is asked for; what one raises fails only the test that asks for its result.

        native = Together(memory="2GiB")  # the options of gpu.run

        @native.body
        def grow():
            ...

        def test_it(gpu):
            assert native(gpu, grow) == 1
    """

    def __init__(self, **options: Any) -> None:
        self._bodies: list[Callable[[], Any]] = []
        self._options = options
        self._told: dict[str, Any] | None = None
        self._failed: BaseException | None = None

    def body(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """A function at the top level of the test file, to be run with the others."""
        self._bodies.append(body)
        return body

    def __call__(self, gpu: Gpu, body: Callable[[], Any]) -> Any:
        """What the body returned."""
        if self._failed is not None:
            raise self._failed
        if self._told is None:
            file = body.__code__.co_filename
            names = [each.__name__ for each in self._bodies]
            try:
                self._told = gpu.run(in_copies, args=[file, names], **self._options)
            except BaseException as error:
                self._failed = error
                raise
        outcome = self._told[body.__name__]
        if "error" in outcome:
            raise gpu.Failed(outcome["error"])
        return outcome["value"]


def in_copies(file: str, names: list[str]) -> dict[str, Any]:
    import torch

    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert not torch.cuda.is_initialized()
    return {name: in_a_copy(getattr(module, name)) for name in names}


def in_a_copy(body: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """``value``, what the body returned in a forked copy, or ``error``, a text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        outcome: dict[str, Any]
        try:
            outcome = {"value": body(*arguments)}
            text = json.dumps(outcome)
        except BaseException:
            text = json.dumps({"error": f"{body.__name__} raised:\n{traceback.format_exc()}"})
        with os.fdopen(writing, "w") as out:
            out.write(text)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code or not text:
        return {"error": f"the process of {body.__name__} ended with {code}"}
    return json.loads(text)
