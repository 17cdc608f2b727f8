# SPDX-License-Identifier: Apache-2.0
"""What a span says of a call, or of several: figures -> attributes. Knows the table and no span."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import Any

from .. import signals
from ..allocator.peaks import RESETS
from ..allocator.pools import LIVING
from ..allocator.reading import RawReading
from ..allocator.sampler import Readings
from ..allocator.windows import Change, change, followed, nothing_held, total
from .shapes import Inputs, described

# the keys of a span's attributes: each look at a row takes its time on the path of every request
_DEVICES = signals.DEVICES.name
_CONCURRENT = signals.CONCURRENT.name
_EXCLUSIVE = signals.EXCLUSIVE.name
_RESERVED_BEFORE = signals.RESERVED_BEFORE.name
_RESERVED_DELTA = signals.RESERVED_DELTA.name
_RESERVED_BY_DEVICE = signals.RESERVED_BY_DEVICE.name
_ALLOCATED_BEFORE = signals.ALLOCATED_BEFORE.name
_ALLOCATED_DELTA = signals.ALLOCATED_DELTA.name
_ALLOCATED_BY_DEVICE = signals.ALLOCATED_BY_DEVICE.name
_PEAK_GROWTH = signals.PEAK_GROWTH.name
_RETRIES = signals.RETRIES.name
_OOMS = signals.OOMS.name
_DEVICE_ALLOCATIONS = signals.DEVICE_ALLOCATIONS.name
_DEVICE_SYNCS = signals.DEVICE_SYNCS.name
_TURNOVER = signals.TURNOVER.name
_FRAGMENTATION = signals.FRAGMENTATION.name


def changes_of(before: Readings | None, after: Readings | None) -> tuple[list[Change], Readings]:
    """What changed on each device, and the later readings. On one that was not read before nothing was held
    then; where nobody could read nothing is known."""
    if before is None or after is None:
        return [], ()
    earlier = {reading[0]: reading for reading in before}
    changes = [change(earlier.get(reading[0]) or nothing_held(reading), reading) for reading in after]
    return changes, after


def refused_within(before: Readings | None, after: Readings | None) -> int:
    """How many requests of memory were refused early meanwhile, as far as that was counted."""
    earlier = {index: statistics.get("num_oom_rejections") for index, _, statistics in before or ()}
    rose = 0
    for index, _, statistics in after or ():
        then, now = earlier.get(index, 0), statistics.get("num_oom_rejections")
        if then is not None and now is not None and now > then:
            rose += now - then
    return rose


def name_of(reading: RawReading) -> str:
    """The device as torch names it."""
    return f"cuda:{reading[0]}"


class Stay:
    """The calls under one enriched span. Those that overlap are one stay, from the first one's start to the
    last one's end: what each of them saw would add up to more than there was."""

    __slots__ = ("_ended", "after", "before", "open", "told")

    def __init__(self) -> None:
        self.open = 0
        """How many are in flight now."""
        self.before: Readings | None = ()
        """When the first of those began."""
        self.after: Readings | None = ()
        """The latest since then."""
        self.told: AbstractSet[str] = frozenset()
        self._ended: _Story | None = None

    def one_began(self, before: Readings | None) -> None:
        """A call that began with these readings."""
        if not self.open:
            # of another thread the last one may have ended since: what it told is told
            self.before = self.after = self.after if _is_later(self.after, before) else before
        self.open += 1

    def one_ended(self, after: Readings | None, concurrent: int) -> dict[str, Any]:
        """What the span says from now on."""
        if not _is_later(self.after, after):  # one may be finished late
            self.after = after
        changes, after = changes_of(self.before, self.after)
        story = _Story([name_of(reading) for reading in after], changes, concurrent)
        if self._ended is not None:
            story = self._ended.then(story)
        self.open -= 1
        if not self.open:
            self._ended = story
            self.before = ()
        attributes = story.attributes()
        self.told = attributes.keys()
        return attributes


def _is_later(readings: Readings | None, others: Readings | None) -> bool:
    return readings[0][1] > others[0][1] if readings and others else False


class _Story:
    """What a span says of one call, or of several under it."""

    __slots__ = ("changes", "concurrent", "devices")

    def __init__(self, devices: list[str], changes: list[Change], concurrent: int) -> None:
        self.devices = devices
        self.changes = changes
        self.concurrent = concurrent

    def then(self, later: _Story) -> _Story:
        """Two calls one after another: what happened adds up, from the first one's start."""
        merged = {
            name: followed(self.changes[self.devices.index(name)], change_)
            if name in self.devices
            else change_
            for name, change_ in zip(later.devices, later.changes, strict=True)
        }
        for name, change_ in zip(self.devices, self.changes, strict=True):
            merged.setdefault(name, change_)
        return _Story(list(merged), list(merged.values()), max(self.concurrent, later.concurrent))

    def attributes(self) -> dict[str, Any]:
        """The attributes of the span."""
        return attributes_of(self.devices, self.changes, self.concurrent)


_events = itemgetter("num_alloc_retries", "num_ooms", "num_device_alloc", "num_sync_all_streams")
_NAMES = tuple([f"cuda:{index}" for index in range(256)])


def steady(before: Any, after: Any, concurrent: int, recording: bool, inputs: Inputs) -> Any:
    """What a span says of a call on one device that left nothing new: no growth of what is reserved, no new
    peak, no call of the driver. Nothing of any other, or where something is not known: then ``attributes_of``
    says it. Where no span records, whether it was such a call. ``before`` and ``after`` are readings or None.
    On the path of every request."""
    try:
        ((index, at, b),), ((_, _, a),) = before, after
        allocated_b, allocated = b["allocated_bytes"]["all"], a["allocated_bytes"]["all"]
        reserved_b, reserved = b["reserved_bytes"]["all"]["current"], a["reserved_bytes"]["all"]["current"]
        if (
            reserved > reserved_b
            or allocated["peak"] != allocated_b["peak"]
            or _events(a) != _events(b)
            or RESETS.last >= at
            or (a.get("num_oom_rejections") and refused_within(before, after))
        ):
            return None
        if not recording:
            return True
        current = allocated_b["current"]
        delta = allocated["current"] - current
        turnover = allocated["allocated"] - allocated_b["allocated"]
        if turnover < 0 or delta != turnover - allocated["freed"] + allocated_b["freed"]:
            return None
        told = (_usual.get(inputs) or _as_usual(inputs)).copy()
        if index:
            told[_DEVICES] = _NAMES[index]
        told[_RESERVED_BEFORE] = reserved_b
        told[_ALLOCATED_BEFORE] = current
        told[_TURNOVER] = turnover
        if reserved != reserved_b:
            told[_RESERVED_DELTA] = reserved - reserved_b
        if concurrent == 1:
            told[_ALLOCATED_DELTA] = delta
        else:
            told[_CONCURRENT], told[_EXCLUSIVE] = concurrent, False
        if not LIVING and "inactive_split_bytes" in a:
            told[_FRAGMENTATION] = a["inactive_split_bytes"]["all"]["current"] / reserved
        return told
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError):
        return None


_usual: dict[Inputs, dict[str, Any]] = {}
"""Requests repeat their shapes: what is the same in every story of ``steady``, ready to be copied."""
_ENOUGH = 1024


def _as_usual(inputs: Inputs) -> dict[str, Any]:
    if len(_usual) >= _ENOUGH:
        _usual.clear()
    unchanged = dict.fromkeys((_RESERVED_DELTA, _RETRIES, _OOMS, _DEVICE_ALLOCATIONS, _DEVICE_SYNCS), 0)
    return _usual.setdefault(
        inputs, {**described(inputs), _DEVICES: _NAMES[0], _CONCURRENT: 1, _EXCLUSIVE: True, **unchanged}
    )


def attributes_of(names: Sequence[str], changes: Sequence[Change], concurrent: int) -> dict[str, Any]:
    """What a span says; what cannot be known, or means nothing under overlap, is left out. Of several devices
    sums, and each one's figures where they differ."""
    if not changes:
        return {}
    several = len(changes) > 1
    if several:
        told_of = [i for i, each in enumerate(changes) if not each.idle]
        # of none that changed: those that hold something, or all of them
        told_of = told_of or [i for i, each in enumerate(changes) if each.reserved] or [*range(len(changes))]
        names, changes = [names[i] for i in told_of], [changes[i] for i in told_of]
        several = len(changes) > 1
    whole = total(changes)
    exclusive = concurrent == 1
    told: dict[str, Any] = {
        _DEVICES: ",".join(names),
        _CONCURRENT: concurrent,
        _EXCLUSIVE: exclusive,
        _RESERVED_BEFORE: whole.reserved_before,
        _RESERVED_DELTA: whole.reserved_delta,
        _ALLOCATED_BEFORE: whole.allocated_before,
        _RETRIES: whole.retries,
        _OOMS: whole.ooms,
        _DEVICE_ALLOCATIONS: whole.device_allocations,
        _DEVICE_SYNCS: whole.device_syncs,
        _TURNOVER: whole.turnover,
        _FRAGMENTATION: None if LIVING else whole.fragmentation,
    }
    if exclusive:
        told[_ALLOCATED_DELTA] = whole.allocated_delta
        if whole.peak_growth:
            told[_PEAK_GROWTH] = whole.peak_growth
    if several:
        pairs = [(_RESERVED_BY_DEVICE, [each.reserved_delta for each in changes])]
        if exclusive:
            pairs.append((_ALLOCATED_BY_DEVICE, [each.allocated_delta for each in changes]))
        for key, deltas in pairs:
            if None not in deltas and len(set(deltas)) > 1:
                told[key] = [f"{name}={delta}" for name, delta in zip(names, deltas, strict=True)]
    return {key: value for key, value in told.items() if value is not None}
