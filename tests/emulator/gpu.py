# SPDX-License-Identifier: Apache-2.0
"""What the `gpu` fixture hands to a test: bodies and commands run in fresh processes on a GPU."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulator import build

CHILD = Path(__file__).with_name("child.py")
# What a developer's shell may hold and a test must not inherit.
FOREIGN = ("EMULATED_GPU_", "OTEL_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")


class Failed(AssertionError):
    """The body raised, or its process died: the message holds the traceback and standard error."""


class Hung(AssertionError):
    """The body did not end in time and was killed. The message holds the stack of each of its threads."""


@dataclass(frozen=True, slots=True)
class Output:
    stdout: str
    stderr: str
    seconds: float


class Gpu:
    """A GPU for tests: emulated, or real where the machine has one and the test can do with it.

    A run that asks for a size of memory or for several devices is emulated in any case: elsewhere it would be
    another test.
    """

    Failed = Failed
    Hung = Hung

    def __init__(self, libraries: Callable[[], Path], real: bool = False) -> None:
        self._libraries = libraries
        self.real = real
        self._started: list[subprocess.Popen[Any]] = []
        self.last = Output("", "", 0.0)
        """What the last `run` wrote to its standard output and error, and how long it took."""

    @property
    def emulated(self) -> bool:
        """Whether a run that asks for nothing special is emulated. A body asks `control.present()`."""
        return not self.real

    def environment(
        self,
        *,
        memory: str | int | None = None,
        devices: int = 1,
        alloc_conf: str | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> dict[str, str]:
        """The environment of a process on this GPU. A value of None in `env` removes the variable."""
        result = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        if not self.real or memory is not None or devices != 1:
            result = build.environment(self._libraries(), result)
            result["EMULATED_GPU_DEVICES"] = str(devices)
            if memory is not None:
                result["EMULATED_GPU_MEMORY"] = str(memory)
        if alloc_conf is not None:
            result["PYTORCH_CUDA_ALLOC_CONF"] = alloc_conf
        for name, value in (env or {}).items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
        return result

    def run(
        self,
        body: Callable[..., Any] | str,
        *,
        args: Iterable[Any] = (),
        memory: str | int | None = None,
        devices: int = 1,
        alloc_conf: str | None = None,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60,
    ) -> Any:
        """Runs the body in a fresh process and returns what it returned.

        `body` is a function at the top level of a test file, called with `args`, or source text, whose
        variable `result` is returned. Arguments and result travel as JSON: a tuple comes back as a list.
        Raises `gpu.Failed` when it raises or dies, `gpu.Hung` when it has not ended after `timeout` seconds.
        """
        job: dict[str, Any] = {"args": list(args), "timeout": timeout}
        if isinstance(body, str):
            name = "the body"
            job["source"] = body
        else:
            name = body.__qualname__
            if not inspect.isfunction(body) or "." in name or body.__name__ == "<lambda>":
                raise TypeError(
                    f"{name} is not a function at the top level of a file: the child could not find it"
                )
            job["file"] = inspect.getsourcefile(body)
            job["function"] = body.__name__

        with tempfile.TemporaryDirectory(prefix="emulated-gpu-") as scratch:
            place = Path(scratch)
            outcome_file = place / "outcome.json"
            job["outcome"] = str(outcome_file)
            (place / "job.json").write_text(json.dumps(job))
            started = time.monotonic()
            hung = False
            with open(place / "stdout", "wb") as stdout, open(place / "stderr", "wb") as stderr:
                process = subprocess.Popen(
                    [sys.executable, str(CHILD), str(place / "job.json")],
                    env=self.environment(memory=memory, devices=devices, alloc_conf=alloc_conf, env=env),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
                try:
                    code = process.wait(timeout)
                except subprocess.TimeoutExpired:
                    hung = True
                finally:
                    _kill_group(process)
            self.last = Output(
                (place / "stdout").read_text(errors="replace"),
                (place / "stderr").read_text(errors="replace"),
                time.monotonic() - started,
            )
            if hung:
                raise Hung(f"{name} had not ended after {timeout} s and was killed.\n{self._said()}")
            outcome = json.loads(outcome_file.read_text()) if outcome_file.exists() else None
        if outcome is None:
            died = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            raise Failed(f"the process of {name} {died}.\n{self._said()}")
        if "error" in outcome:
            raise Failed(f"{name} raised:\n{outcome['error']}\n{self._said()}")
        if code:
            raise Failed(f"{name} returned, then its process exited with {code}.\n{self._said()}")
        return outcome["value"]

    def popen(
        self,
        argv: list[str],
        *,
        memory: str | int | None = None,
        devices: int = 1,
        alloc_conf: str | None = None,
        env: Mapping[str, str | None] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on this GPU (further options are `subprocess.Popen`'s); it ends with the test."""
        environment = self.environment(memory=memory, devices=devices, alloc_conf=alloc_conf, env=env)
        process = subprocess.Popen(argv, env=environment, start_new_session=True, **options)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            _kill_group(process)

    def _said(self) -> str:
        return (
            f"--- its standard error ---\n{self.last.stderr[-20000:]}\n"
            f"--- its standard output ---\n{self.last.stdout[-5000:]}"
        )


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Ends the process and whatever it started: its session is its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
