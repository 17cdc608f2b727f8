# SPDX-License-Identifier: Apache-2.0
"""What may not be given to the guard's rooms is refused when they are made, in one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.guard import (
    Headroom,
    MemoryGuard,
    MemoryGuardMiddleware,
    Places,
    Readings,
    Slack,
    Timing,
    Verdict,
    endpoint,
)
from opentelemetry_instrumentation_torchmem.guard.policy import judged

NAN, INFINITE = float("nan"), float("inf")


def middleware(**options: Any) -> MemoryGuardMiddleware:
    return MemoryGuardMiddleware(lambda *_: None, **({"guard": MemoryGuard()} | options))


def grpc_health(**options: Any) -> object:
    pytest.importorskip("grpc")
    from opentelemetry_instrumentation_torchmem.guard import grpc_health

    return grpc_health(**({"ready": MemoryGuard().ready} | options))


REFUSED: list[tuple[Callable[..., object], str, list[object], str]] = [
    (
        MemoryGuard,
        "policy",
        ["slack", 3, Slack],
        "an instance of a policy, Headroom() or Slack(), or a callable",
    ),
    (MemoryGuard, "timing", [{"drain_limit": 60}, 60], "Timing(drain_limit=...), or None"),
    (MemoryGuard, "places", ["/x"], "Places('/a/folder'), or None"),
    (MemoryGuard, "clear", [3], "a callable, or None"),
    (MemoryGuard, "compact", [3], "a callable that returns a CompactionOutcome"),
    (MemoryGuard, "on_restart", [3], "a callable over the reason, or None"),
    (MemoryGuard, "on_ready", ["x"], "a callable over whether it is ready, or None"),
    (MemoryGuard, "lease", [3], "a callable that returns what to call afterwards"),
    (MemoryGuard, "readings", [3], "a callable over whether they must be fresh"),
    (MemoryGuard, "clock", [None], "a callable that returns monotonic seconds"),
    (MemoryGuard, "steers", ["yes", 1], "True or False, or None"),
    (MemoryGuard, "restart", [None, [], "exit"], "one of liveness, sigterm, callback"),
    (MemoryGuard, "interval", [0, "5", INFINITE, NAN, None], "seconds above 0 and up to 1e9"),
    (MemoryGuard, "arrival_limit", [None, "30", NAN, INFINITE, -1, True], "seconds from 0 to 1e9"),
    (MemoryGuard, "ready_file", ["", "/", 3, b"ready", "a\0b"], "the path of a file, or None"),
    (Timing, "probe_failures", [0, 2.5, True, "3"], "a whole number from 1 up"),
    (Timing, "probe_period", [True, -1], "seconds from 0 to 1e9"),
    (Timing, "drain_limit", ["5m", INFINITE, NAN, None], "seconds from 0 to 1e9"),
    (
        Timing,
        "drain_limit",
        [5],
        "at least probe_period x probe_failures, here 30 s, plus the longest request",
    ),
    (
        Headroom,
        "need",
        ["2GiB", True, 0, -1, NAN, {}, {0: 1}, {"cuda": 1}, {"cuda:0": "x"}],
        "bytes above 0, for",
    ),
    (Headroom, "sick_for", ["60"], "seconds from 0 to 1e9"),
    (Headroom, "trapped_share", [0, 1.5, "x"], "above 0 and up to 1, or None"),
    (Slack, "sick", [35, -1, "x"], "between 0 and 1"),
    (Slack, "well", [0, 0.4, None], "above 0 and up to sick=0.35"),
    (
        lambda as_of: Verdict(True, as_of=as_of),
        "as_of",
        [NAN, "now"],
        "seconds by the guard's clock, or None",
    ),
    (middleware, "guard", [None, MemoryGuard], "an instance, MemoryGuard()"),
    (middleware, "ready_path", ["readyz", 3, ""], "a path that begins with /, or None"),
    (middleware, "live_path", ["/readyz"], "a path that is not ready_path's"),
    (middleware, "close_websockets", ["no"], "True or False"),
    (endpoint, "asked", [True], "what is to be called, not what it returned: guard.ready"),
    (grpc_health, "ready", [True], "what is to be called, not what it returned: guard.ready"),
    (grpc_health, "services", ["app.Engine"], "a tuple of names"),
]


@pytest.mark.parametrize(
    ("make", "name", "value", "about"),
    [(make, name, value, about) for make, name, values, about in REFUSED for value in values],
)
def test_what_is_not_allowed_is_refused_when_it_is_made_in_one_line(make, name, value, about):
    with pytest.raises(ValueError, match=f": {name}=") as error:
        make(**{name: value})
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith("torchmem: ")
    assert f" is not allowed ({about}" in line


@pytest.mark.parametrize("name", ["at_most", "restarts", "restarts_per"])
def test_places_take_whole_numbers(tmp_path, name):
    with pytest.raises(ValueError, match=rf"torchmem: Places: {name}='1' is not allowed"):
        Places(tmp_path, **{name: "1"})


def test_to_be_replaced_by_a_callback_needs_one():
    with pytest.raises(
        ValueError, match=r"on_restart=None is not allowed \(with restart='callback' a callable"
    ):
        MemoryGuard(restart="callback")


def test_what_is_allowed_is_taken(tmp_path):
    MemoryGuard(
        lambda readings: None, timing=Timing(drain_limit=30), arrival_limit=0, ready_file=tmp_path / "ready",
        steers=False, restart="callback", on_restart=print, interval=0.5, places=Places(str(tmp_path)),
    )  # fmt: skip
    assert Headroom(need={"cuda:0": 2.5e9, "cuda:11": 1}).need_of
    assert judged(Headroom(need=1)(Readings((), 0.0)), 1.0).sick is None
    middleware(ready_path="/x", live_path=None)
    middleware(ready_path=None, live_path=None)
