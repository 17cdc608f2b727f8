# SPDX-License-Identifier: Apache-2.0
"""What `torchmem top` shows: nothing invented, nothing lost, nothing beyond the terminal's edges."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from opentelemetry_instrumentation_torchmem.cli import screen
from opentelemetry_instrumentation_torchmem.cli.board import (
    STATES,
    BoardView,
    Count,
    DeviceSummary,
    DeviceView,
    ProcessSummary,
    ProcessView,
)

GIB = 1 << 30
HEADER = screen.Header("127.0.0.1:4317", "127.0.0.1:4318", elapsed=61, refused=0)


def device(name="cuda:0", **figures) -> DeviceView:
    absent = dict.fromkeys(DeviceView.__dataclass_fields__) | {"name": name, "ledger": {}, "history": ()}
    return DeviceView(**(absent | figures))


def busy(**more) -> DeviceView:
    figures = {
        "hw_id": "GPU-5c1b0f3e-98aa-4c1d-b1a2-000000000001",
        "ledger": {
            "allocated": 3 * GIB,
            "pending_free": 0,
            "split_free": GIB,
            "cached_free": GIB,
            "external": GIB // 2,
            "free": 5 * GIB // 2,
        },
        "limit": 8 * GIB,
        "reserved": 5 * GIB,
        "fragmentation": 0.2,
        "slack": 0.4,
        "headroom": 512 << 20,
        "retries": Count(4, 0.5, 2),
        "ooms": Count(0, 0.0, 0),
        "device_allocations": Count(90, 1.25, 9),
        "history": ((0.0, 4.0 * GIB), (120.0, 5.0 * GIB)),
    }
    return device(**(figures | more))


def process(*devices: DeviceView, **more) -> ProcessView:
    figures = {
        "service": "serve",
        "pid": 4242,
        "instance": "a",
        "silent": 1.0,
        "interval": 2.0,
        "gone": False,
    }
    return ProcessView(devices=devices, **(figures | more))


def view(*processes: ProcessView, **more) -> BoardView:
    figures = {"exports": 3, "strangers": 0, "stranger": None, "dropped": 0}
    return BoardView(processes=processes, **(figures | more))


def drawn(board: BoardView, width=100, height=40, header=HEADER) -> list[str]:
    console = Console(width=width, height=height, file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(screen.frame(board, header, width, height))
    return captured.get().splitlines()


@given(
    ledger=st.dictionaries(st.sampled_from(STATES), st.integers(0, 80 * GIB)),
    beyond=st.integers(0, GIB),
    width=st.integers(len(STATES), 200),
)
def test_every_state_that_holds_memory_is_seen_and_the_bar_is_full(ledger, beyond, width):
    cells = screen.cells(ledger, sum(ledger.values()), width)
    assert set(cells) == {state for state, value in ledger.items() if value}
    assert all(number >= 1 for number in cells.values())
    assert sum(cells.values()) == (width if any(ledger.values()) else 0)
    assert sum(screen.cells(ledger, sum(ledger.values()) + beyond, width).values()) <= width


def test_the_bar_is_in_proportion():
    assert screen.cells({"allocated": 3, "split_free": 1, "free": 4}, 8, 80) == {
        "allocated": 30,
        "split_free": 10,
        "free": 40,
    }


def test_a_bar_whose_states_do_not_reach_the_limit_is_blank_there():
    assert screen.cells({"allocated": 3}, 6, 80) == {"allocated": 40}


def test_noise_is_flat_and_growth_is_not():
    noise = [(float(at), 5 * GIB + (at % 2) * (2 << 20)) for at in range(20)]
    assert set(screen.sparkline(noise, 80 * GIB, 20)) == {"▁"}
    growing = [(float(at), at * GIB) for at in range(21)]
    assert screen.sparkline(growing, 80 * GIB, 8) == "▂▃▃▅▅▆▇█"


def test_the_sparkline_goes_by_time_not_by_sample():
    # Nine samples in the first second, then nothing until the tenth.
    samples = [(at / 9, 0.0) for at in range(9)] + [(10.0, 8.0 * GIB)]
    assert screen.sparkline(samples, 8 * GIB, 10) == "▁▁▁▁▁▁▁▁▁█"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (int(5.5 * GIB), "5.50 GiB"),
        (80 * GIB, "80.0 GiB"),
        (999.96 * GIB, "1000 GiB"),
        (1024 * GIB, "1.00 TiB"),
    ],
)
def test_sizes_have_three_figures(value, text):
    assert screen.size(value) == text


def test_a_block_says_everything_that_was_sent():
    text = "\n".join(drawn(view(process(busy()))))
    for figure in (
        "serve  pid 4242  cuda:0",
        "1 s ago, every 2 s",
        "allocated",
        "3.00 GiB",
        "pending free",
        "0.00 GiB",
        "split free",
        "2.50 GiB",
        "fragmentation",
        "20.0 %",
        "40.0 %",
        "512 MiB",
        "4 (+2/min)",
        "1.2/s",
        "reserved 5.00 GiB of 8.00 GiB",
        "+1.00 GiB in 2 min",
    ):
        assert figure in text, text


def test_what_was_not_sent_is_a_dash_on_the_screen_and_in_lines():
    board = view(process(device(limit=8 * GIB)))
    text = "\n".join(drawn(board))
    assert text.count(screen.ABSENT) == 13, text
    assert "0.00" not in text
    (line,) = screen.lines(board)
    assert "limit=8.00GiB" in line
    for name in ("reserved", "fragmentation", "slack", "headroom", "retries", "ooms", "device_allocations"):
        assert f"{name}={screen.ABSENT}" in line


def test_without_split_free_the_sum_state_is_named():
    text = "\n".join(drawn(view(process(device(ledger={"allocated": 1, "cached": 2, "free": 3}, limit=6)))))
    assert "░ cached " in text
    assert "split" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
@pytest.mark.parametrize("number", [0, 1, 3, 100])
def test_the_screen_keeps_within_the_terminal(width, height, number):
    processes = [
        process(busy(), pid=pid, service=f"embedder-with-a-long-name-{pid}") for pid in range(number)
    ]
    lines = drawn(view(*processes, dropped=3), width, height, screen.Header("[::1]:1", "[::1]:2", 5, 2))
    assert max(len(line) for line in lines) <= width
    if number:
        assert len(lines) <= height


def test_where_not_all_fit_those_in_trouble_are_shown_and_the_rest_is_counted():
    processes = [
        process(busy(retries=Count(0, 0.0, 0), fragmentation=0.01), pid=pid, service=f"calm-{pid:02}")
        for pid in range(50)
    ]
    processes[40] = process(busy(ooms=Count(1, 0.1, 1)), pid=40, service="dying")
    lines = drawn(view(*processes), 100, 20)
    shown = [line for line in lines if line.startswith(("calm", "dying"))]
    assert any(line.startswith("dying") for line in shown)
    assert f"{50 - len(shown)} calmer not shown" in "\n".join(lines)


def test_gone_and_late_processes_are_told():
    text = "\n".join(
        drawn(view(process(busy(), silent=6.0), process(busy(), silent=40.0, gone=True, service="old")))
    )
    assert "LATE, last seen 6 s ago" in text
    assert "GONE, last seen 40 s ago" in text


def test_an_old_reading_is_told():
    assert "reading 12 s old" in "\n".join(drawn(view(process(busy(reading_age=12.0)))))


def test_a_name_with_markup_is_shown_as_it_is():
    assert "[red]x[/red]" in "\n".join(drawn(view(process(busy(), service="[red]x[/red]"))))


def test_an_empty_board_says_what_to_do():
    text = "\n".join(drawn(view(exports=0), header=screen.Header("127.0.0.1:5555", "127.0.0.1:2", 1, 0)))
    assert "opentelemetry-instrument" in text
    assert "http://127.0.0.1:5555" in text


def test_exports_without_our_metrics_are_told_with_their_sender():
    text = " ".join(drawn(view(exports=9, strangers=8, stranger="web")))
    assert "8 exports without torch.memory metrics, the last from web." in text


def test_once_all_have_gone_the_screen_does_not_say_that_nothing_came():
    text = " ".join(drawn(view(exports=9)))
    assert "The processes that reported have gone." in text
    assert "without" not in text


def test_the_picture_draws_all_rows_and_fetches_nothing():
    picture = screen.svg(view(*(process(busy(), pid=pid) for pid in range(30))), HEADER, 100)
    assert picture.startswith("<svg")
    assert picture.count("split&#160;free") == 30
    assert "url(http" not in picture
    assert "@font-face" not in picture
    assert ">&#160;" not in picture, "some viewers drop spaces at the beginning of a text"
    assert 'x="183" y="20"' in picture, "OTLP after torchmem top and three spaces: 15 cells of 12.2"


def test_lines_leave_out_who_was_not_heard_of():
    board = view(process(busy(), silent=4.0), process(busy(), silent=6.0, service="quiet"))
    (line,) = screen.lines(board, within=5.0)
    assert line.startswith("serve/4242 cuda:0 reserved=5.00GiB limit=8.00GiB allocated=3.00GiB ")
    assert "growth=+1.00_GiB_in_2_min" in line


def test_the_summary_tells_first_last_and_most():
    ended = ProcessSummary(
        "serve", 7, "a", (DeviceSummary("cuda:0", None, 12, GIB, 2 * GIB, 3 * GIB, 0.31, 4, None),)
    )
    head, line = screen.summary([ended], 61, 20, 0)
    assert head == "torchmem top: 61 s, 20 metric exports, 1 process"
    assert line == (
        "serve/7 cuda:0: reserved 1.00 GiB → 2.00 GiB (most 3.00 GiB), "
        "fragmentation up to 31.0 %, retries 4, OOMs \N{EN DASH}, 12 points"
    )


def test_processes_without_a_process_id_are_told_apart_by_their_instance():
    board = view(
        process(busy(), pid=None, instance="7c1fe2d0-1111"),
        process(busy(), pid=None, instance="09ab34cd-2222"),
    )
    for text in ("\n".join(drawn(board)), "\n".join(drawn(board, height=12)), "\n".join(screen.lines(board))):
        assert "7c1fe2d0" in text
        assert "09ab34cd" in text
        assert "1111" not in text
