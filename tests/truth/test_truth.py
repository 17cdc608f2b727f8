# SPDX-License-Identifier: Apache-2.0
"""What the snapshot analysis says, held against what the real allocator then does.

A few random states of each mode; ``python tests/truth/run.py`` judges as many as one likes.
"""

from __future__ import annotations

import pytest

from truth import states

pytestmark = pytest.mark.needs_emulation

FAMILIES = {
    "native": [
        mode for mode, what in states.MODES.items() if states.ON not in what.conf and not what.switched
    ],
    "expandable": [mode for mode, what in states.MODES.items() if states.ON in what.conf],
    "switched": [mode for mode, what in states.MODES.items() if what.switched],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_states_are_told_as_the_allocator_shows_them(gpu, family):
    seeds = list(range(6 if family == "switched" else 3))
    tallies = gpu.run(
        states.judged,
        args=[FAMILIES[family], seeds, 3],
        memory=states.MEMORY,
        devices=states.DEVICES,
        timeout=280,
    )
    wrong = [mismatch for tally in tallies.values() for mismatch in tally["mismatches"]]
    assert not wrong, "\n".join(wrong[:5])
    assert all(tally["states"] for tally in tallies.values())
