# SPDX-License-Identifier: Apache-2.0
"""Readings -> observable instruments. Knows the sampler and the table; decides nothing of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry.metrics import (
    CallbackOptions,
    MeterProvider,
    Observation,
    get_meter,
    get_meter_provider,
)

from .allocator.sampler import Sampler
from .allocator.source import Device
from .package import NAME
from .signals import DEVICE, HARDWARE_ID, METRICS, REQUEST_METRICS, Metric, Per
from .telemetry import OwnTelemetry
from .version import __version__

Attributes = dict[str, str | int | float | bool]
Subject = tuple[Any, Attributes]
"""What a row reads, and the attributes that every point of it carries."""


class Feed:
    """The observations of every row, from one ``instrument()`` to its ``uninstrument()``.

    The SDK calls one callback a row, one after another, in the thread of the reader that collects. The
    first one opens the cycle, with one reading for all; a row that comes up again begins the next cycle.
    """

    def __init__(
        self,
        sampler: Sampler,
        telemetry: OwnTelemetry,
        excluded: Callable[[str], bool],
        *,
        before: Callable[[], None],
        targets: Callable[[], Sequence[Subject]],
        ooms: Callable[[int], Mapping[str, int] | None] = lambda _: None,
    ) -> None:
        self._ooms = ooms
        self._before = before
        self._targets = targets
        self.rows = tuple(row for row in METRICS if not excluded(row.name))
        self._names = frozenset(row.name for row in self.rows)
        self._sampler = sampler
        self._telemetry = telemetry
        self._cycle = threading.local()

    def observe(self, row: Metric) -> list[Observation]:
        """The row's points of this cycle; none where nothing can be known. Never raises."""
        if row.name not in self._names:
            return []
        try:
            return [point for subject in self._subjects(row) for point in _points(row, *subject)]
        except Exception as error:  # the SDK would log a traceback at every cycle
            self._telemetry.skip("error")
            self._telemetry.say_once(f"row {row.name}", "torchmem: %s cannot be told: %r", row.name, error)
            return []

    def _subjects(self, row: Metric) -> Sequence[Subject]:
        cycle = self._cycle
        served: set[str] | None = getattr(cycle, "served", None)
        if served is None or row.name in served:
            served = cycle.served = set[str]()
            cycle.subjects = self._open()
        served.add(row.name)
        return cycle.subjects[row.per]

    def _open(self) -> Mapping[Per, Sequence[Subject]]:
        self._before()
        picture = self._sampler.collect()
        targets = self._targets()
        if picture is None:
            nothing: dict[Per, Sequence[Subject]] = dict.fromkeys(Per, ())
            return {**nothing, Per.TARGET: targets, Per.PACKAGE: [(self._telemetry, {})] if targets else []}
        return {
            Per.TARGET: targets,
            Per.DEVICE: [(state, _device_attributes(device)) for device, state in picture.devices],
            Per.OOM: [
                (self._ooms(device.index), _device_attributes(device)) for device, _ in picture.devices
            ],
            Per.HOST: [] if picture.host is None else [(picture.host, {})],
            Per.PROCESS: [(picture, {})],
            Per.PACKAGE: [(self._telemetry, {})],
        }


def _device_attributes(device: Device) -> Attributes:
    if device.hardware_id is None:
        return {DEVICE.name: device.name}
    return {DEVICE.name: device.name, HARDWARE_ID.name: device.hardware_id}


def _points(row: Metric, read: Any, attributes: Attributes) -> list[Observation]:
    figure = row.of(read)
    if figure is None:
        return []
    if row.also:
        beside = {attribute.name: value for attribute, of in row.also if (value := of(read)) is not None}
        attributes = {**attributes, **beside}
    if row.by is None or not isinstance(figure, Mapping):
        return [Observation(figure, attributes)]  # pyright: ignore[reportArgumentType] - no row maps without by
    by = row.by.name
    return [Observation(value, {**attributes, by: member}) for member, value in figure.items()]


class Registration:
    """Our instruments on one meter provider.

    The SDK can neither unregister an instrument nor take a second callback for it (core#2454), so they are
    made once for each provider and yield only while a feed is plugged in.
    """

    def __init__(self, provider: MeterProvider) -> None:
        self._meter = get_meter(NAME, __version__, meter_provider=provider)
        self._made: set[str] = set()
        self._records: dict[str, Any] = {}
        self._feed: Feed | None = None

    def plug(self, feed: Feed) -> None:
        """Yield this feed's points from now on, making the instruments that are still missing."""
        self._feed = feed
        for row in feed.rows:
            if row.name not in self._made:
                self._made.add(row.name)
                create = getattr(self._meter, f"create_observable_{row.kind.name.lower()}")
                create(row.name, [self._callback(row)], unit=row.unit, description=row.about)

    def records(self, excluded: Callable[[str], bool]) -> Mapping[str, Any]:
        """The instruments that requests record on, by the names of their rows."""
        for row in REQUEST_METRICS:
            if row.name not in self._records:
                create = getattr(self._meter, f"create_{row.kind.name.lower()}")
                beside = {"explicit_bucket_boundaries_advisory": row.boundaries} if row.boundaries else {}
                self._records[row.name] = create(row.name, unit=row.unit, description=row.about, **beside)
        return {name: _Excluded() if excluded(name) else record for name, record in self._records.items()}

    def unplug(self) -> None:
        """Yield nothing from now on: the series vanish."""
        self._feed = None
        self.forget()

    def forget(self) -> None:
        """Take back what requests recorded."""
        for record in self._records.values():
            _forget(record)

    def _callback(self, row: Metric) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_: CallbackOptions) -> list[Observation]:
            feed = self._feed
            return [] if feed is None else feed.observe(row)

        return observe


def _forget(record: Any) -> None:
    """Take back what was recorded on a synchronous instrument: the SDK would export its last state for ever.

    It has no way to ask for that (core#2454). Where its inner parts are not as they are known, the points
    stay as they were when measuring ended.
    """
    record = getattr(record, "_real_instrument", record)
    consumer = getattr(record, "_measurement_consumer", None)
    storages: Mapping[Any, Any] = getattr(consumer, "_reader_storages", {})
    for storage in tuple(storages.values()):
        for match in getattr(storage, "_instrument_view_instrument_matches", {}).get(record, ()):
            points = getattr(match, "_attributes_aggregation", None)
            if isinstance(points, dict):
                points.clear()  # pyright: ignore[reportUnknownMemberType] - a private part of the SDK


class _Excluded:
    """Stands where an excluded metric's instrument would."""

    def record(self, *_: object) -> None:
        """Nothing."""

    add = record


# The one state that outlives its owner: instruments that the SDK can never forget. Registrations by provider,
# and the one made through the API's proxy, which becomes the real global provider's when that is set.
_registrations: WeakKeyDictionary[MeterProvider, Registration] = WeakKeyDictionary()
_through_proxy: Registration | None = None


def is_set(provider: MeterProvider) -> bool:
    """Whether a provider is a real one, not the API's stand-in for one that may be set later."""
    return type(provider).__name__ != "_ProxyMeterProvider"


def registration(provider: MeterProvider | None) -> Registration:
    """The one registration of a provider; None is the global one, also when that is set only later."""
    global _through_proxy
    current_global = get_meter_provider()
    provider = provider or current_global
    known = _registrations.get(provider)
    if known is None:
        if provider is current_global and _through_proxy is not None:
            known = _through_proxy
        else:
            known = Registration(provider)
        _registrations[provider] = known
        if not is_set(provider):
            _through_proxy = known
    return known
