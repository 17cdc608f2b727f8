# SPDX-License-Identifier: Apache-2.0
"""The rooms, wired: made once torch is imported, from one ``instrument()`` to its ``uninstrument()``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any
from weakref import WeakSet

from opentelemetry._logs import LoggerProvider
from opentelemetry.metrics import MeterProvider, get_meter_provider
from opentelemetry.trace import ProxyTracerProvider, TracerProvider, get_tracer, get_tracer_provider

from . import oom, rooms
from .allocator.captures import CaptureWatch, note_older
from .allocator.dump import DumpDirectory
from .allocator.growth import Growth
from .allocator.peaks import PeakWatch
from .allocator.pools import PoolWatch
from .allocator.reading import AllocatorReading
from .allocator.sampler import Sampler, Totals
from .allocator.settings import SettingsWatch
from .allocator.snapshot import PoolOn
from .allocator.source import when_initialised
from .allocator.survey import Survey
from .allocator.windows import OpenWindows
from .config import Config
from .imports import when_imported
from .metrics import Feed, is_set, registration
from .package import NAME
from .requests import track
from .requests.compiled import COMPILER, CompiledCalls
from .requests.compiler import torch_imported
from .requests.probe import Hook, Requests
from .requests.specs import BUILT_IN_LABELS
from .requests.targets import Targets
from .signals import GUARD_METRICS, METRICS, REQUEST_METRICS
from .snapshot_server import SnapshotServer
from .telemetry import OwnTelemetry
from .version import __version__

# These outlive each wiring: a provider that is given again counts on, and what it exported must not fall.
_totals: dict[int, Totals] = {}
_verdicts = oom.Verdicts()
_live: WeakSet[Wiring] = WeakSet()

_METRIC_NAMES = frozenset(row.name for row in (*METRICS, *REQUEST_METRICS, *GUARD_METRICS))


def _forked() -> None:
    for wiring in tuple(_live):
        wiring.begin_anew()


if hasattr(os, "register_at_fork"):  # it cannot be taken back, so it stands here, once
    os.register_at_fork(after_in_child=_forked)


class Wiring:
    """All that lives from one ``instrument()`` to its ``uninstrument()``."""

    def __init__(
        self,
        telemetry: OwnTelemetry,
        config: Config,
        meter_provider: MeterProvider | None = None,
        tracer_provider: TracerProvider | None = None,
        logger_provider: LoggerProvider | None = None,
        request_hook: Hook | None = None,
        response_hook: Hook | None = None,
    ) -> None:
        self._undone = False
        self._acts: dict[str, list[Callable[[ModuleType], None]]] = {}
        """What is to be done at the imports that are waited for."""
        self._telemetry = telemetry
        _tell_unmatched(telemetry, config, "excluded_metrics", _METRIC_NAMES)
        _tell_unmatched(telemetry, config, "disabled_targets", BUILT_IN_LABELS)
        windows = self._windows = OpenWindows()
        self._pools = PoolWatch()
        self._peaks = PeakWatch()
        self._captures = CaptureWatch()
        self._settings = SettingsWatch()
        self._growth = Growth()
        sampler = self._sampler = Sampler(
            telemetry,
            self._pools,
            windows,
            sampling=config.sampling,
            max_reading_age=config.max_reading_age,
            totals=_totals,
            survey=Survey(
                telemetry,
                windows,
                self._captures,
                live_pools=self._live_pools,
                share=config.snapshot_share,
            ),
        )
        self._registration = registration(meter_provider)
        self._ooms = oom.OomWatch(
            sampler,
            telemetry,
            self._captures,
            oom.OomLog(logger_provider),
            _dumps(config),
            config.told("oom_dump_dir", config.oom_dump_dir),
            in_flight=self._in_flight,
            live_pools=self._live_pools,
            pool_in_force=self._pools.in_force,
            verdicts=_verdicts,
        )
        self._requests = Requests(
            get_tracer(NAME, __version__, tracer_provider),
            self._registration.records(config.excludes),
            sampler,
            windows,
            telemetry,
            awake=_awake(tracer_provider, meter_provider, config.request_metrics),
            request_metrics=config.request_metrics,
            request_hook=request_hook,
            response_hook=response_hook,
            out_of_memory=self._ooms.request_failed if config.oom_evidence else None,
            refused=self._ooms.request_was_refused if config.oom_evidence else None,
            grown=self._growth.note,
        )
        origin = config.origins.get("targets", "")
        self._targets = Targets(
            self._requests,
            [replace(spec, origin=origin) for spec in config.targets],
            disabled=config.disabled_targets,
            default_span=config.span,
        )
        # before anybody reads: beside some pools that must not be
        self._when_imported("torch.cuda.memory", self._pools.install)
        self._when_imported("torch.cuda.graphs", self._captures.install)
        self._when_imported("torch", lambda _: note_older(self._pools, self._captures))
        self._when_imported("torch", self._peaks.install)
        unused = "torch" not in sys.modules
        self._when_imported("torch", lambda torch: self._settings.install(torch, from_the_start=unused))
        self._registration.plug(
            Feed(
                sampler,
                telemetry,
                config.excludes,
                before=self._before_collection,
                targets=self._requests.active,
                ooms=self._ooms.counts,
            )
        )
        self._when_imported("torch", torch_imported)
        if config.oom_evidence:
            oom.activate(self._ooms)
            self._when_imported("torch", oom.torch_imported)
        self._snapshots = SnapshotServer(lambda: sampler.asked(_all_that_is_known), telemetry)
        if config.live_snapshots:
            self._when_imported("torch", lambda torch: when_initialised(torch, self._snapshots.start))
        self._targets.install()
        self._compiled = CompiledCalls()
        self._when_imported(COMPILER, self._compiled.install)  # around what targets there have wrapped
        track.activate(self._requests, config.span)
        self._rooms = rooms.Rooms(
            sampler,
            windows,
            self._captures,
            self._growth,
            telemetry,
            settle=self._requests.drain,
            excludes=config.excludes,
            meter_provider=meter_provider,
            tracer_provider=tracer_provider,
            logger_provider=logger_provider,
        )
        rooms.wire(self._rooms)
        _live.add(self)

    def begin_anew(self) -> None:
        """In a forked child: no lock of the parent's, none of its requests, none of its figures."""
        self._telemetry.unlock()
        self._windows.begin_anew()
        self._sampler.begin_anew()
        self._requests.begin_anew()
        self._growth.begin_anew()
        self._ooms.begin_anew()
        self._snapshots.begin_anew()
        self._registration.forget()

    def _before_collection(self) -> None:
        self._requests.before_collection()
        self._targets.before_collection()

    def _when_imported(self, module: str, act: Callable[[ModuleType], None]) -> None:
        self._acts.setdefault(module, []).append(act)
        when_imported(module, self._imported)

    def _imported(self, name: str, module: ModuleType) -> None:
        for act in () if self._undone else self._acts.pop(name, ()):
            self._act(act, name, module)

    def _act(self, act: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
        try:
            act(module)
        except Exception as error:  # what escapes would fail the user's import
            self._telemetry.skip("error")
            self._telemetry.say_once(name, "torchmem: %s is not as it is known: %r", name, error)

    def _in_flight(self) -> Sequence[tuple[str, float, Sequence[AllocatorReading]]]:
        return self._requests.in_flight()

    def _live_pools(self) -> set[PoolOn]:
        return self._pools.owned() | self._captures.owned()

    def undo(self) -> None:
        """Put back what was touched; the series vanish."""
        self._undone = True
        rooms.unwire(self._rooms)
        oom.deactivate()
        self._snapshots.close()
        track.deactivate()
        self._compiled.remove()
        self._targets.undo()
        self._requests.close()
        self._registration.unplug()
        self._pools.remove()
        self._peaks.remove()
        self._captures.remove()
        self._settings.remove()


def _dumps(config: Config) -> DumpDirectory | None:
    if not (config.oom_evidence and config.oom_dump_dir):
        return None
    return DumpDirectory(config.oom_dump_dir, config.oom_dump_max_files, config.oom_dump_max_mib << 20)


def _all_that_is_known() -> Mapping[str, Any]:
    """A snapshot with what the doctor wants to know beside it."""
    from .advice.live import told  # few ever ask

    return told()


def _tell_unmatched(telemetry: OwnTelemetry, config: Config, option: str, names: Collection[str]) -> None:
    """Say of each pattern that fits nothing: a typo would leave on what was to be off."""
    patterns: Sequence[str] = getattr(config, option)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, _globs(names) if "*" in pattern else names, 1, 0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            told = config.told(option, pattern)
            telemetry.say_once(told, "torchmem: %s fits nothing%s", told, hint)


def _globs(names: Collection[str]) -> set[str]:
    """Each that stands for the names below one."""
    parts = [name.split(".") for name in names]
    return {".".join((*each[:length], "*")) for each in parts for length in range(1, len(each))}


def _awake(
    tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None, request_metrics: bool
) -> Callable[[], tuple[bool, bool]]:
    """Whether spans and whether request metrics go anywhere: not while the global providers are proxies."""

    def awake() -> tuple[bool, bool]:
        traced = tracer_provider is not None or not isinstance(get_tracer_provider(), ProxyTracerProvider)
        metered = request_metrics and (meter_provider is not None or is_set(get_meter_provider()))
        return traced, metered

    return awake
