# SPDX-License-Identifier: Apache-2.0
"""TorchMemInstrumentor: waits for torch, then has the rooms wired, and restores what was touched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from .config import Config, told
from .package import INSTRUMENTS
from .telemetry import OwnTelemetry

if TYPE_CHECKING:
    from .wiring import Wiring

_IN_CODE = {
    "meter_provider": ("get_meter", "a MeterProvider; the global one is used"),
    "tracer_provider": ("get_tracer", "a TracerProvider; the global one is used"),
    "logger_provider": ("get_logger", "a LoggerProvider; the global one is used"),
    "request_hook": ("__call__", "a function; it is left out"),
    "response_hook": ("__call__", "a function; it is left out"),
}
"""What only code can give: what it must have, and what it must be. Every other keyword is an option."""


class _InFile(dict[str, Any]):
    """The options in the SDK's configuration file."""


@dataclass(init=False)
class _Configuration:
    """What the SDK makes of them, to give each field as an argument: so those of the file are known as such.

    A field for each option would give the defaults too, which would beat the variables, and one misspelt
    would keep the SDK from instrumenting.
    """

    in_file: _InFile

    def __init__(self, /, **options: Any) -> None:
        self.in_file = _InFile(options)


class TorchMemInstrumentor(BaseInstrumentor):
    """Makes the GPU memory of PyTorch's caching allocator visible through OpenTelemetry.

    Example:
        >>> TorchMemInstrumentor().instrument()
        >>> TorchMemInstrumentor().uninstrument()
        >>> TorchMemInstrumentor().instrument(excluded_metrics=["torch.memory.host.*"])

    ``instrument`` never raises, imports torch or initialises CUDA: it waits for the import of torch, and a
    process that never does pays nothing. ``uninstrument`` restores everything, and the series vanish. Beside
    the options, those of ``Config``, it takes ``meter_provider``, ``tracer_provider``, ``logger_provider``,
    ``request_hook(span, operation, args, kwargs)`` and ``response_hook(span, operation, result)``.
    """

    configuration = _Configuration
    """Read by the SDK, where its configuration file names this instrumentor."""
    _instrumented: _Instrumented | None = None
    _telemetry: OwnTelemetry | None = None
    _lock = threading.Lock()
    _waits = False
    """Whether the import of torch is waited for."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return INSTRUMENTS

    def _instrument(self, **kwargs: Any) -> None:
        with self._lock:
            if self._instrumented is not None:  # two threads at once: the base class does not see that
                return
            telemetry = OwnTelemetry()
            if self._telemetry is not None:
                telemetry.carry_on(self._telemetry)
            TorchMemInstrumentor._telemetry = telemetry
            try:
                self._instrumented = _Instrumented(telemetry, kwargs)
                if "torch" in sys.modules:
                    wrapt.register_post_import_hook(self._instrumented.torch_imported, "torch")
                elif not TorchMemInstrumentor._waits:  # a hook cannot be taken back: one is enough
                    TorchMemInstrumentor._waits = True
                    wrapt.register_post_import_hook(self._torch_imported, "torch")
            except Exception as error:  # anything that escapes would stop every later instrumentor
                telemetry.say_once("instrument", "torchmem: not instrumented: %r", error)

    def _torch_imported(self, torch: ModuleType) -> None:
        instrumented = self._instrumented
        if instrumented is not None:
            instrumented.torch_imported(torch)

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002 - the base class's signature
        with self._lock:
            instrumented, self._instrumented = self._instrumented, None
        if instrumented is not None:
            instrumented.undo()


class _Instrumented:
    """One ``instrument()``: its options at once, its rooms when torch is there."""

    def __init__(self, telemetry: OwnTelemetry, arguments: dict[str, Any]) -> None:
        self._telemetry = telemetry
        self._in_code: dict[str, Any] = {}
        for name, (method, allowed) in _IN_CODE.items():
            given = arguments.get(name)
            if hasattr(given, method):
                self._in_code[name] = given
            elif given is not None:
                said = told(name, given, "an argument")
                telemetry.say_once(name, "torchmem: %s is not %s", said, allowed)
        options = {name: given for name, given in arguments.items() if name not in _IN_CODE}
        given_by = "an argument"
        in_file = options.get("in_file")
        if isinstance(in_file, _InFile):
            options, given_by = in_file, "the configuration file"
        self._config = Config.of(
            options, warn=lambda line: telemetry.say_once(line, "%s", line), given_by=given_by
        )
        self._wiring: Wiring | None = None
        self._undone = False

    def torch_imported(self, torch: ModuleType) -> None:  # noqa: ARG002 - the hook's signature
        """Have the rooms wired. Never raises: it would fail the user's import."""
        if self._undone or self._wiring is not None:
            return
        try:
            from .wiring import Wiring

            self._wiring = Wiring(self._telemetry, self._config, **self._in_code)
        except Exception as error:  # what escapes would fail the user's import
            self._telemetry.say_once("wiring", "torchmem: not instrumented: %r", error)

    def undo(self) -> None:
        """Put back what was touched."""
        self._undone = True
        if self._wiring is not None:
            self._wiring.undo()
