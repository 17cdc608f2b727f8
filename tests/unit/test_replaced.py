# SPDX-License-Identifier: Apache-2.0
"""What stands in torch's place, and what is left there afterwards."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from opentelemetry_instrumentation_torchmem.allocator.replaced import Replaced


class Noted:
    """A watch that notes what it is called with."""

    def __init__(self, place, name="call"):
        self.seen = []
        self.place = place
        self.replaced = Replaced()
        self.replaced.put(place, name, self.by)

    def by(self, original, /, *args, **kwargs):
        self.seen.append((*args, *kwargs.items()))
        return original(*args, **kwargs)


def a_class():
    class Place:
        def call(self, number=0, *, original=0, name=0):
            return number + original + name

    return Place


def a_module():
    def call(number=0, *, original=0, name=0):
        return number + original + name

    return SimpleNamespace(call=call)


def called(place, *args, **kwargs):
    return (place() if isinstance(place, type) else place).call(*args, **kwargs)


places = pytest.mark.parametrize("make", [a_class, a_module])


@places
def test_calls_go_through_ours_with_whatever_arguments_until_it_is_put_back(make):
    place = make()
    torchs = vars(place)["call"]
    watch = Noted(place)
    assert watch.replaced
    assert called(place, 1, original=2, name=3) == 6  # named as ours name theirs
    assert watch.seen[0][-3:] == (1, ("original", 2), ("name", 3))
    assert vars(place)["call"].__wrapped__ is torchs
    watch.replaced.put_back()
    assert vars(place)["call"] is torchs
    assert not watch.replaced
    called(place)
    assert len(watch.seen) == 1


@places
def test_put_twice_is_once_whoever_stands_between(make):
    place = make()
    torchs = vars(place)["call"]
    watch = Noted(place)
    watch.replaced.put(place, "call", watch.by)
    ours = place.call
    place.call = lambda *args, **kwargs: ours(*args, **kwargs)
    watch.replaced.put(place, "call", watch.by)
    called(place)
    assert len(watch.seen) == 1
    place.call = ours
    watch.replaced.put_back()
    assert vars(place)["call"] is torchs


@places
@pytest.mark.parametrize("inside", ["ours", "torch's"])
def test_what_somebody_has_put_there_since_stays_theirs_and_hears_no_more_of_us(make, inside):
    place = make()
    torchs = vars(place)["call"]
    watch = Noted(place)
    within = vars(place)["call"] if inside == "ours" else torchs

    @functools.wraps(within)  # around torch's: its `__wrapped__` is what ours says too
    def theirs(*args, **kwargs):
        return 100 + within(*args, **kwargs)

    place.call = theirs
    assert called(place, 1) == 101
    assert len(watch.seen) == (inside == "ours")
    watch.replaced.put_back()
    assert vars(place)["call"] is theirs
    again = Noted(place)  # the next `instrument()`
    watch.seen.clear()
    assert called(place, 1) == 101
    assert (len(watch.seen), len(again.seen)) == (0, 1)
    again.replaced.put_back()
    assert vars(place)["call"] is theirs


@places
def test_of_two_each_takes_its_own_away_in_either_order(make):
    place = make()
    torchs = vars(place)["call"]
    below, above = Noted(place), Noted(place)
    called(place)
    assert (len(below.seen), len(above.seen)) == (1, 1)
    above.replaced.put_back()
    below.replaced.put_back()
    assert vars(place)["call"] is torchs

    below, above = Noted(place), Noted(place)
    below.replaced.put_back()
    assert called(place, 1) == 1
    assert (len(below.seen), len(above.seen)) == (0, 1)
    above.replaced.put_back()
    assert called(place, 1) == 1
    assert (len(below.seen), len(above.seen)) == (0, 1)


def test_what_is_absent_or_inherited_is_left_alone():
    Base = a_class()
    Heir = type("Heir", (Base,), {"none": None})
    for place, name in ((Heir, "call"), (Heir, "none"), (SimpleNamespace(), "call")):
        before = dict(vars(place))
        watch = Noted(place, name)
        assert not watch.replaced
        assert dict(vars(place)) == before
        watch.replaced.put_back()
        assert dict(vars(place)) == before
    Base.call = lambda self: "another"
    assert Heir().call() == "another"


def test_ours_that_raises_is_as_torchs_and_one_that_is_put_back_meanwhile_ends():
    place = a_module()
    watch = Noted(place)
    with pytest.raises(TypeError, match="unexpected keyword"):
        place.call(unknown=1)

    def by(original, *args):
        replaced.put_back()
        return original(*args)

    replaced = Replaced()
    replaced.put(place, "call", by)
    assert place.call(7) == 7
    assert vars(place)["call"].__wrapped__ is not None  # the other's again
    assert len(watch.seen) == 2
