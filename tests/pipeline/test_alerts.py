# SPDX-License-Identifier: Apache-2.0
"""The alert of a server that fragments, for real: from torch's allocator to the webhook, by either path.

Every duration times 0.02, in the usual run. `test_unscaled_alert.py` has it as it is committed.
"""

from __future__ import annotations

import re

import pytest

from . import expressions
from .alerting import ALERT, OUT_OF_MEMORY, PATHS, Story, alerting, instant, story

SCALE = 0.02


@pytest.fixture(scope="module", params=PATHS)
def seen(request, emulation, tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp(request.param)
    with alerting(folder, request.param, SCALE) as running:
        return story(running, folder)


def test_the_alert_reaches_the_webhook_with_its_figures_and_where_to_read_on(seen):
    post = next(post for post in seen.posts if post.name == ALERT)
    assert post.alert["labels"]["severity"] == "critical"
    assert post.alert["labels"]["torch_device"] == "cuda:0"
    assert post.alert["annotations"]["runbook_url"].endswith("/docs/RUNBOOK.md#torchmemfragmented")
    summary = post.alert["annotations"]["summary"]
    told = re.search(r"([\d.]+)% of the memory .* retries in 10 minutes: (\d+)\.", summary)
    assert told is not None
    assert 0.35 < float(told[1]) / 100 <= max(each.get("trapped", 0) for each in seen.sick.lines) + 0.0001
    assert 0 < int(told[2]) <= seen.sick.lines[-1].get("retries", 1 << 30)


def test_the_alert_fires_after_its_hold_and_within_what_the_configuration_states(seen):
    fired = instant(next(post for post in seen.posts if post.name == ALERT).alert["startsAt"])
    assert fired - seen.active_at >= seen.stated.hold - 0.001
    late = fired - seen.sick.exported_after
    print(f"{seen.stated}: fired {late:.1f} s after the first export that could know")
    # What a busy machine left out, it left out: evaluations by their number, points by their gaps.
    assert late <= seen.stated.to_fire + seen.missed + seen.largest_gap


def test_an_out_of_memory_error_reaches_the_webhook_with_its_verdict(seen):
    post = next(post for post in seen.posts if post.name == OUT_OF_MEMORY)
    assert post.alert["labels"]["torch_memory_oom_verdict"] == "fragmented"
    assert post.alert["annotations"]["summary"].endswith("in 10 minutes: 1, verdict: fragmented.")


def test_each_alert_is_told_once(seen):
    names = [post.name for post in seen.posts]
    assert names.count(ALERT) == 1
    assert set(names) <= {rule["alert"] for rule in expressions.alerts()}


def test_a_healthy_process_beside_it_fires_nothing_and_nothing_even_begins_to(seen):
    assert seen.posts_of_the_healthy == ()
    assert seen.alerts_of_the_healthy == ()
    assert len(seen.healthy.lines) > 5
    last = [each for each in seen.healthy.lines if "retries" in each][-1]
    assert (last["retries"], last["ooms"], last["trapped"] < 0.35) == (0, 0, True)
