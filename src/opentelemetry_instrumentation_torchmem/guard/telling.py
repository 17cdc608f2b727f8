# SPDX-License-Identifier: Apache-2.0
"""What the guard did, told: a span for each cycle, an event and a log record for each transition, metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

from opentelemetry._logs import LoggerProvider, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.metrics import (
    CallbackOptions,
    MeterProvider,
    Observation,
    get_meter,
    get_meter_provider,
)
from opentelemetry.trace import Span, TracerProvider, get_tracer, set_span_in_context

from .. import rooms, signals
from ..oom import OomLog
from ..package import NAME
from ..signals import GUARD_METRICS, Metric
from ..version import __version__
from .machine import State, Transition
from .steps import STEPS

_WARN = frozenset(
    {
        Transition.STILL_SICK,
        Transition.RESTART_WANTED,
        Transition.GAVE_UP,
        Transition.FAILED,
        Transition.NOT_RESTARTED,
    }
)


@dataclass(slots=True)
class Figures:
    """What the rows of the guard's metrics read."""

    state: State = State.SERVING
    transitions: dict[str, int] = field(default_factory=lambda: {each.value: 0 for each in Transition})
    headroom_won: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEPS, 0))
    released: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STEPS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    held: int = 0
    in_flight: int = 0
    needs: Mapping[str, int] | None = None
    """By the name of the device."""

    @property
    def status(self) -> Mapping[str, int]:
        return {each.value: int(each is self.state) for each in State}


@dataclass(slots=True)
class Step:
    """What one step of a cycle did. Bytes, summed over devices; None where it cannot be known."""

    name: str
    seconds: float
    headroom: int | None = None
    """By how much it rose; below 0 where it fell."""
    released: int | None = None
    """How many bytes held from the driver were given back."""


class Teller:
    """Tells of one guard, for its life."""

    def __init__(
        self,
        read: Callable[[], Figures],
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        logger_provider: LoggerProvider | None = None,
    ) -> None:
        """``read`` gives the figures as they are now. A provider that is not given is the one that
        ``instrument()`` was given, or the global one."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._logger_provider = logger_provider
        self._log = OomLog(logger_provider, signals.GUARD_EVENT.name)
        self._span: Span | None = None
        self._steps: list[Step] = []
        self._refused: str | None = None
        self.read = read
        self.told_through: list[ref[Teller]] | None = None
        self.observe()

    def observe(self) -> None:
        """Tell the metrics through the provider that is right now: ``instrument()`` may come later."""
        wired = rooms.wired()
        provider = self._meter_provider or (wired and wired.meter_provider)
        if provider is not None or self.told_through is None:
            self.told_through = _observe(provider or get_meter_provider(), self)

    def begin_anew(self) -> None:
        """In a forked child the parent's cycle is not this process's."""
        self._span, self._steps, self._refused = None, [], None

    def step(self, step: Step) -> None:
        """Keep what a step did for the end of the cycle."""
        self._steps.append(step)

    def refused(self, why: str) -> None:
        """Nothing was compacted."""
        self._refused = why

    def transition(
        self,
        transition: Transition,
        before: State,
        after: State,
        reason: str,
        *,
        steers: bool,
        in_flight: int,
    ) -> None:
        """Tell of one; the first of a cycle begins its span, the one back to serving ends it."""
        if self._span is None:
            self._steps, self._refused = [], None
            wired = rooms.wired()
            tracer_provider = self._tracer_provider or (wired and wired.tracer_provider)
            logger_provider = self._logger_provider or (wired and wired.logger_provider)
            self._log = OomLog(logger_provider, signals.GUARD_EVENT.name)
            self._span = get_tracer(NAME, __version__, tracer_provider).start_span(
                signals.GUARD_SPAN.name,
                Context(),
                attributes={signals.GUARD_REASON.name: reason, signals.GUARD_STEERS.name: steers},
            )
        span = self._span
        attributes: dict[str, Any] = {
            signals.GUARD_TRANSITION.name: transition.value,
            signals.GUARD_PREVIOUS_STATE.name: before.value,
            signals.GUARD_STATE.name: after.value,
            signals.GUARD_REASON.name: reason,
            signals.GUARD_STEERS.name: steers,
            signals.GUARD_IN_FLIGHT.name: in_flight,
        }
        span.add_event(signals.GUARD_EVENT.name, attributes)
        self._log(
            f"The guard of this process's GPU memory: {before.value} to {after.value}, "
            f"{transition.value}. {reason}",
            attributes,
            set_span_in_context(span, Context()),
            SeverityNumber.WARN if transition in _WARN else SeverityNumber.INFO,
        )
        if after in (State.SERVING, State.RESTART_WANTED):  # what comes then may come with the process's end
            self._end(transition)

    def _end(self, outcome: Transition) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        told: dict[str, Any] = {signals.GUARD_OUTCOME.name: outcome.value}
        steps = self._steps
        listed = {
            signals.GUARD_HEADROOM_WON: [f"{s.name}={s.headroom}" for s in steps if s.headroom is not None],
            signals.GUARD_RELEASED: [f"{s.name}={s.released}" for s in steps if s.released is not None],
            signals.GUARD_SECONDS: [f"{s.name}={s.seconds:.3f}" for s in steps],
        }
        told |= {attribute.name: figures for attribute, figures in listed.items() if figures}
        if self._refused is not None:
            told[signals.GUARD_REFUSED.name] = self._refused
        span.set_attributes(told)
        span.end()


# The one state that outlives its owner, as that of the metrics' room: the SDK never forgets an instrument, so
# they are made once for each provider and yield for the guard that was made last.
_watched: WeakKeyDictionary[MeterProvider, list[ref[Teller]]] = WeakKeyDictionary()
_watching = threading.Lock()


def _observe(provider: MeterProvider, teller: Teller) -> list[ref[Teller]]:
    with _watching:
        known = _watched.get(provider)
        if known is not None:
            if teller.told_through is not known:  # else one that was made later keeps it
                known[0] = ref(teller)
            return known
        current = _watched[provider] = [ref(teller)]
    meter = get_meter(NAME, __version__, meter_provider=provider)
    for row in GUARD_METRICS:
        create = getattr(meter, f"create_observable_{row.kind.name.lower()}")
        create(row.name, [_callback(row, current)], unit=row.unit, description=row.about)
    return current


def _callback(row: Metric, current: list[ref[Teller]]) -> Callable[[CallbackOptions], list[Observation]]:
    def observe(_: CallbackOptions) -> list[Observation]:
        teller, wired = current[0](), rooms.wired()
        excluded = wired is not None and wired.excludes(row.name)
        if teller is None or teller.told_through is not current or excluded:
            return []
        figure = row.of(teller.read())
        if figure is None:
            return []
        if row.by is None or not isinstance(figure, Mapping):
            return [Observation(figure, {})]  # pyright: ignore[reportArgumentType] - no row maps without by
        return [Observation(value, {row.by.name: member}) for member, value in figure.items()]

    return observe
