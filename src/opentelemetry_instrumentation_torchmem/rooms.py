# SPDX-License-Identifier: Apache-2.0
"""The rooms of this package that are wired now, for what the user makes by name: the guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import wrapt
from opentelemetry._logs import LoggerProvider
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from .allocator.captures import CaptureWatch, note_older
from .allocator.growth import Growth
from .allocator.pools import PoolWatch
from .allocator.sampler import Sampler
from .allocator.survey import Survey
from .allocator.windows import OpenWindows
from .telemetry import OwnTelemetry


@dataclass(frozen=True, slots=True)
class Rooms:
    """Who reads, who is in flight, who captures, and what they needed."""

    sampler: Sampler
    windows: OpenWindows
    captures: CaptureWatch
    growth: Growth
    telemetry: OwnTelemetry
    settle: Callable[[], object]
    """Ends what was given up and is still called open."""
    excludes: Callable[[str], bool]
    """Whether the user wants none of a metric."""
    meter_provider: MeterProvider | None = None
    tracer_provider: TracerProvider | None = None
    logger_provider: LoggerProvider | None = None
    """Those that ``instrument()`` was given; None for the global ones."""

    @classmethod
    def alone(cls) -> Rooms:
        """Where nothing is instrumented: the same rooms, with no measured request ever in them."""
        telemetry, windows, pools, captures = OwnTelemetry(), OpenWindows(), PoolWatch(), CaptureWatch()
        survey = Survey(telemetry, windows, captures, live_pools=lambda: pools.owned() | captures.owned())
        wrapt.register_post_import_hook(pools.install, "torch.cuda.memory")
        wrapt.register_post_import_hook(captures.install, "torch.cuda.graphs")
        wrapt.register_post_import_hook(lambda _: note_older(pools, captures), "torch")
        sampler = Sampler(telemetry, pools, windows, survey=survey)
        return cls(sampler, windows, captures, Growth(), telemetry, settle=_nothing, excludes=lambda _: False)

    def begin_anew(self) -> None:
        """In a forked child: no lock of the parent's, none of its requests, none of its figures."""
        self.telemetry.unlock()
        self.windows.begin_anew()
        self.sampler.begin_anew()
        self.growth.begin_anew()


def _nothing() -> None: ...


_wired: Rooms | None = None


def wire(rooms: Rooms) -> None:
    """From one ``instrument()`` on."""
    global _wired
    _wired = rooms


def unwire(rooms: Rooms) -> None:
    """Until its ``uninstrument()``."""
    global _wired
    if _wired is rooms:
        _wired = None


def wired() -> Rooms | None:
    """Those of the ``instrument()`` in force."""
    return _wired
