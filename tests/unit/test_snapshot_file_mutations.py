# SPDX-License-Identifier: Apache-2.0
"""A snapshot file whose values somebody has changed: each command ends with an answer or one line."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.cli import main

MIB = 1 << 20
ODD = (
    0, -1, 512, 1 << 63, 1 << 64, 1 << 200, 1e308, float("nan"), float("inf"), True, None, "",
    "\x1b[31m\0\r\n",
    "a" * 3000, "\ud800", "inactive", "large", [], {}, (), (1, 2), (1 << 70, -1), [[]], b"x", {"a": 1},
)  # fmt: skip
KEYS = ("address", "size", "state", "blocks", "segments", "device", "allocator_settings", "\x1b]0;x", 1, (0,))


def whole() -> dict[str, Any]:
    blocks = [
        {"address": MIB * place, "size": MIB, "requested_size": MIB, "state": state, "frames": []}
        for place, state in enumerate(["active_allocated", "inactive", "active_pending_free"])
    ]
    segment = {
        "device": 0, "address": 0, "total_size": 3 * MIB, "allocated_size": MIB, "active_size": 2 * MIB,
        "requested_size": MIB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
    of_device = {"total": 100 * MIB, "free": 90 * MIB, "fraction": 1.0, "retries": 3, "seconds": 60.0}
    about = {
        "torch": "2.15.0",
        "backend": "native",
        "settings": "",
        "variables": {},
        "devices": {"0": of_device},
    }
    return {
        "segments": [segment],
        "device_traces": [[{"action": "alloc", "addr": 0, "size": 5, "stream": 0, "time_us": 1}]],
        "allocator_settings": {"max_split_size": -1, "roundup_power2_divisions": {"1": 0}},
        "torchmem": about,
    }


def changed(chance: random.Random) -> dict[str, Any]:
    given = copy.deepcopy(whole())
    for _ in range(chance.choice([1, 1, 2, 5])):
        path: list[tuple[Any, Any]] = []
        node: Any = given
        while isinstance(node, (dict, list)) and node and (not path or chance.random() < 0.85):
            key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
            path.append((node, key))
            node = node[key]
        holder, key = path[-1]
        how = chance.random()
        if how < 0.6:
            holder[key] = copy.deepcopy(chance.choice(ODD))
        elif how < 0.7:
            del holder[key]
        elif how < 0.8 and isinstance(holder, list):
            holder.extend([holder[key]] * 100)
        elif how < 0.9 and isinstance(holder, dict):
            holder[chance.choice(KEYS)] = copy.deepcopy(chance.choice(ODD))
        else:
            holder[key] = chance.choice([holder, given])
    return given


@pytest.mark.parametrize("command", [["snapshot", "--no-picture"], ["doctor", "--snapshot"]])
def test_values_changed_at_random_give_an_answer_or_one_line(tmp_path, capsys, command):
    chance = random.Random(7)
    file = tmp_path / "some.pickle"
    ends = set()
    for number in range(700):
        file.write_bytes(pickle.dumps(changed(chance), protocol=4))
        code = main([*command, str(file)])
        said, complained = capsys.readouterr()
        assert code in (0, 1, 2), number
        assert complained.count("\n") == (code == 2), (number, complained)
        assert bool(said) is (code != 2), number
        assert "\x1b" not in said + complained, number
        ends.add(code)
    assert {2} < ends


@pytest.mark.parametrize("traces", [5, "text", {"0": []}, None])
def test_traces_of_another_kind_are_told_as_what_they_are(tmp_path, capsys, traces):
    file = tmp_path / "some.pickle"
    file.write_bytes(pickle.dumps({**whole(), "device_traces": traces}))
    assert main(["doctor", "--snapshot", str(file)]) == 2
    assert capsys.readouterr().err.endswith(
        f"some.pickle: device_traces is a {type(traces).__name__}; it must be a list\n"
    )
