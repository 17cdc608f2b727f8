# SPDX-License-Identifier: Apache-2.0
"""TorchMemInstrumentor: wires the rooms, and restores what it touched."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any

import wrapt
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from .allocator.pools import PoolWatch
from .allocator.sampler import Sampler
from .config import Config
from .metrics import Feed, Registration, registration
from .package import INSTRUMENTS
from .telemetry import OwnTelemetry


class TorchMemInstrumentor(BaseInstrumentor):
    """Makes the GPU memory of PyTorch's caching allocator visible through OpenTelemetry.

    Example:
        >>> TorchMemInstrumentor().instrument()
        >>> TorchMemInstrumentor().instrument(excluded_metrics=["torch.memory.host.*"])

    ``instrument`` never raises, imports torch or initialises CUDA; ``uninstrument`` restores everything, and
    the series vanish. The options are those of ``Config``.
    """

    _wiring: _Wiring | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        return INSTRUMENTS

    def _instrument(self, **kwargs: Any) -> None:
        telemetry = OwnTelemetry()
        try:
            self._wiring = _Wiring(telemetry, **kwargs)
        except Exception as error:  # anything that escapes would stop every later instrumentor
            telemetry.say_once("instrument", "torchmem: not instrumented: %r", error)

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002 - the base class's signature
        wiring, self._wiring = self._wiring, None
        if wiring is not None:
            wiring.undo()


class _Wiring:
    """All that lives from one ``instrument()`` to its ``uninstrument()``."""

    def __init__(
        self,
        telemetry: OwnTelemetry,
        meter_provider: Any = None,
        tracer_provider: Any = None,  # noqa: ARG002
        **options: object,
    ) -> None:
        self._undone = False
        config = Config.of(options, warn=lambda line: telemetry.say_once(line, "%s", line))
        self._pools = PoolWatch()
        self._registration: Registration = registration(meter_provider)
        sampler = Sampler(telemetry, self._pools, sampling=config.sampling)
        self._registration.plug(Feed(sampler, telemetry, config.excludes))
        wrapt.register_post_import_hook(self._torch_imported(telemetry), "torch.cuda.memory")

    def _torch_imported(self, telemetry: OwnTelemetry):
        def torch_imported(memory: ModuleType) -> None:
            if self._undone:  # a hook cannot be taken back
                return
            try:
                self._pools.install(memory)
            except Exception as error:  # what escapes would fail the user's import
                telemetry.skip("error")
                telemetry.say_once("pools", "torchmem: memory pools are not watched: %r", error)

        return torch_imported

    def undo(self) -> None:
        self._undone = True
        self._registration.unplug()
        self._pools.remove()
