# SPDX-License-Identifier: Apache-2.0
"""The alert of a server that fragments, as it is committed: 5 minutes, an export a minute, no file changed.

Nine minutes, on CI alone. Nearly all of it is waiting: conftest.py starts it before the first test, and it
runs beside the others; this file is the last.
"""

from __future__ import annotations

import os

import pytest

from .alerting import ALERT, instant

pytestmark = [
    pytest.mark.skipif(not os.environ.get("CI"), reason="takes nine minutes: on CI (CI=true) alone"),
    pytest.mark.timeout(1200),
]


def test_the_committed_rule_fires_within_the_stated_time_and_a_healthy_process_fires_nothing(unscaled):
    seen = unscaled()
    post = next(post for post in seen.posts if post.name == ALERT)
    fired = instant(post.alert["startsAt"])
    assert (seen.stated.export, seen.stated.hold, seen.stated.evaluation) == (60, 300, 30)
    assert fired - seen.active_at >= 300 - 0.001
    print(f"stated {seen.stated.whole:.0f} s, taken {post.at - seen.sick.sick_since:.0f} s")
    assert post.at - seen.sick.sick_since <= seen.stated.whole + seen.missed
    assert (seen.posts_of_the_healthy, seen.alerts_of_the_healthy) == ((), ())
