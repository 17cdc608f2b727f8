# SPDX-License-Identifier: Apache-2.0
"""Whether a server is sick: pure functions over readings. No clock, no torch, no OpenTelemetry.

A policy is any callable over ``Readings``; two come with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from re import fullmatch
from typing import cast

from .allowed import SECONDS, Allowed, check, maybe, number

_MIB = 1 << 20
_GIB = 1 << 30


def _within(low: float, high: float, *, bottom: bool = False, top: bool = False) -> Callable[[object], bool]:
    """Numbers between two, which are themselves allowed or not."""

    def holds(value: object) -> bool:
        return number(value) and (low < value < high or (bottom and value == low) or (top and value == high))

    return holds


def _needs(value: object) -> bool:
    """Bytes, or bytes by the name of a device."""
    if not isinstance(value, Mapping):
        return _within(0, inf)(value)
    needs = cast("Mapping[object, object]", value)
    return bool(needs) and all(
        isinstance(name, str) and fullmatch(r"cuda:\d+", name) and _within(0, inf)(need)
        for name, need in needs.items()
    )


_HEADROOM = {
    "need": maybe(Allowed(_needs, "bytes above 0, for each device or by its name, {'cuda:0': 2 << 30}")),
    "trapped_share": maybe(Allowed(_within(0, 1, top=True), "above 0 and up to 1")),
    "trapped_floor": Allowed(_within(0, inf, bottom=True), "bytes from 0 up"),
    "margin": Allowed(_within(0, 1, bottom=True), "from 0 to below 1"),
    "sick_for": SECONDS,
}
_SLACK = {"sick": Allowed(_within(0, 1), "between 0 and 1"), "sick_for": SECONDS}
_VERDICT = {"as_of": maybe(Allowed(number, "seconds by the guard's clock"))}


@dataclass(frozen=True, slots=True)
class DeviceReadings:
    """What is known of one device. Bytes; None where it cannot be known here."""

    name: str
    """``cuda:0``"""
    at: float
    """Seconds, by the guard's clock, of the reading."""
    limit: int | None = None
    """The device's total."""
    reserved: int | None = None
    active: int | None = None
    trapped: int | None = None
    """Free, and held in partly used segments."""
    headroom: int | None = None
    """The largest request that is sure to succeed."""
    headroom_at: float | None = None
    """The same of the snapshot that headroom comes from."""
    need: int | None = None
    """The largest recent growth of one measured request."""

    @property
    def slack(self) -> float | None:
        """The unused share of what is held, 0 to 1."""
        if self.active is None or not self.reserved:
            return None
        return 1 - self.active / self.reserved


@dataclass(frozen=True, slots=True)
class Readings:
    """What a policy judges."""

    devices: tuple[DeviceReadings, ...]
    at: float
    """Seconds, by the guard's clock."""
    cleared: bool = False
    """Whether they were taken behind the gate, after clearing: sick means that a restart is wanted."""
    was_sick: bool = False
    """What the policy said of the ones before: for a margin between sick and well."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy says of readings."""

    sick: bool | None
    """None where it cannot be known: never acted upon."""
    reason: str = ""
    """In words, with the figures."""
    as_of: float | None = None
    """Seconds, by the guard's clock, of the oldest figure that it rests on; None for now."""

    def __post_init__(self) -> None:
        check("Verdict", _VERDICT, {"as_of": self.as_of})


Policy = Callable[[Readings], "Verdict | str | bool | None"]
"""A text is the reason why it is sick; an empty one or False says that it is well; None, that none knows."""


def judged(said: object, at: float) -> Verdict:
    """What a policy returned, as a verdict.

    Raises:
        TypeError: it returned something else.
    """
    if isinstance(said, Verdict):
        return said if said.as_of is not None else Verdict(said.sick, said.reason, at)
    if said is None or isinstance(said, bool):
        return Verdict(said, "the policy says so" if said else "", at)
    if isinstance(said, str):
        return Verdict(bool(said), said, at)
    raise TypeError(f"a policy returned {said!r}; allowed are a Verdict, a text, a bool and None")


@dataclass(frozen=True, slots=True)
class Headroom:
    """Sick while the largest request that is sure to succeed is smaller than the need, or while very much is
    trapped. After clearing only the need counts: what is trapped and hurts nobody is no reason to restart.

    Example:
        >>> short = DeviceReadings("cuda:0", at=0.0, headroom=100 << 20, headroom_at=0.0)
        >>> Headroom(need=512 << 20)(Readings((short,), at=0.0)).reason
        'cuda:0: headroom of 100 MiB is below the need of 512 MiB'
    """

    need: int | Mapping[str, int] | None = None
    """Bytes, for every device or by its name (``cuda:0``), the others then having none; None for the largest
    recent growth of one measured request on each."""
    trapped_share: float | None = 0.25
    """Of the device's limit; None never to look at what is trapped."""
    trapped_floor: int = 1 * _GIB
    """Bytes that are trapped below which the share does not count."""
    margin: float = 0.1
    """By how much more than enough it must be, once sick, to be well again; a share of the figure."""
    sick_for: float = 60.0
    """Seconds that it must last before the guard acts, unless the guard is told otherwise."""

    def __post_init__(self) -> None:
        check("Headroom", _HEADROOM, {name: getattr(self, name) for name in _HEADROOM})

    def __call__(self, readings: Readings) -> Verdict:
        """Whether any device is sick; unknown where none can be judged."""
        verdicts = [self._of(device, readings) for device in readings.devices]
        return _worst(verdict for verdict in verdicts if verdict is not None)

    def need_of(self, device: DeviceReadings) -> int | None:
        """What the headroom of a device is compared with."""
        if isinstance(self.need, Mapping):
            return self.need.get(device.name)
        return self.need if self.need is not None else device.need

    def _of(self, device: DeviceReadings, readings: Readings) -> Verdict | None:
        lenient = 1 + self.margin if readings.was_sick and not readings.cleared else 1
        need = self.need_of(device)
        short: Verdict | None = None
        if need and device.headroom is not None:
            short = Verdict(
                device.headroom < need * lenient,
                f"{device.name}: headroom of {size(device.headroom)} is below the need of {size(need)}",
                device.headroom_at,
            )
        if readings.cleared or (short is not None and short.sick):
            return short
        if self.trapped_share is None or device.trapped is None or not device.limit:
            return short
        most = max(self.trapped_share * device.limit, self.trapped_floor)
        trapped = Verdict(
            device.trapped > most / lenient,
            f"{device.name}: {size(device.trapped)} are trapped of {size(device.limit)}, "
            f"{size(round(most))} allowed",
            device.at,
        )
        return trapped if trapped.sick or short is None else short


@dataclass(frozen=True, slots=True)
class Slack:
    """Sick while more of what is held is unused than a share; after clearing a smaller share is allowed.

    Cache is in it: what clearing alone does not bring down is fragmentation.

    Example:
        >>> loose = DeviceReadings("cuda:0", at=0.0, reserved=100, active=60)
        >>> Slack()(Readings((loose,), at=0.0)).reason
        'cuda:0: 40 % of what is held is unused, 35 % allowed'
    """

    sick: float = 0.35
    well: float = 0.20
    """What is allowed after clearing."""
    sick_for: float = 300.0
    """Seconds that it must last before the guard acts, unless the guard is told otherwise."""

    def __post_init__(self) -> None:
        well = Allowed(_within(0, self.sick, top=True), f"above 0 and up to sick={self.sick}")
        check("Slack", _SLACK | {"well": well}, {"well": self.well} | {n: getattr(self, n) for n in _SLACK})

    def __call__(self, readings: Readings) -> Verdict:
        """Whether any device is sick; unknown where nothing is held."""
        most = self.well if readings.cleared else self.sick
        return _worst(
            Verdict(
                slack > most,
                f"{device.name}: {100 * slack:.0f} % of what is held is unused, {100 * most:.0f} % allowed",
                device.at,
            )
            for device in readings.devices
            if (slack := device.slack) is not None
        )


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    known = list(verdicts)
    for verdict in known:
        if verdict.sick:
            return verdict
    return Verdict(False, "", known[0].as_of) if known else Verdict(None)


def size(size: int) -> str:
    """Bytes, in words."""
    return f"{size / _GIB:.2f} GiB" if abs(size) >= _GIB else f"{size / _MIB:.0f} MiB"
