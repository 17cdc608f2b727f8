# SPDX-License-Identifier: Apache-2.0
"""What `torchmem top` makes of the messages it receives, with the clock in the test's hand."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from opentelemetry_instrumentation_torchmem import signals
from opentelemetry_instrumentation_torchmem.cli.board import (
    FORGET_AFTER,
    MAX_DEVICES,
    MAX_SAMPLES,
    METRICS,
    STATES,
    Board,
    DeviceView,
    ProcessView,
)

GIB = 1 << 30
SECOND = 1_000_000_000
EPOCH = 1_800_000_000
CUMULATIVE, DELTA = 2, 1


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def attributes(**values):
    return [
        KeyValue(
            key=key.replace("__", "."),
            value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value),
        )
        for key, value in values.items()
    ]


class Sender:
    """Builds one process's exports; ``at`` is seconds on the sender's own clock."""

    def __init__(self, service="serve", instance: str | None = "one", pid=7):
        self.request = ExportMetricsServiceRequest()
        self.resource_metrics = self.request.resource_metrics.add()
        self.resource_metrics.resource.attributes.extend(attributes(service__name=service, process__pid=pid))
        if instance is not None:
            self.resource_metrics.resource.attributes.extend(attributes(service__instance__id=instance))
        self.metrics = self.resource_metrics.scope_metrics.add().metrics

    def _fill(self, point, value, at, device, labels):
        point.time_unix_nano = int((EPOCH + at) * SECOND)
        point.attributes.extend(attributes(torch__device=device, **labels))
        if isinstance(value, int):
            point.as_int = value
        elif value is not None:
            point.as_double = value
        else:
            point.as_int, point.flags = 0, 1

    def gauge(self, name, value, *, at=0.0, device="cuda:0", **labels):
        self._fill(self.metrics.add(name=name).gauge.data_points.add(), value, at, device, labels)
        return self

    def level(self, name, value, *, at=0.0, device="cuda:0", temporality=CUMULATIVE, **labels):
        metric = self.metrics.add(name=name)
        metric.sum.aggregation_temporality = temporality
        self._fill(metric.sum.data_points.add(), value, at, device, labels)
        return self

    def counter(self, name, value, *, at=0.0, start=-100.0, temporality=CUMULATIVE, device="cuda:0"):
        metric = self.metrics.add(name=name)
        metric.sum.aggregation_temporality = temporality
        metric.sum.is_monotonic = True
        point = metric.sum.data_points.add()
        self._fill(point, value, at, device, {})
        point.start_time_unix_nano = int((EPOCH + start) * SECOND)
        return self

    def states(self, at=0.0, **states):
        for state, value in states.items():
            self.level("torch.memory.usage", value, at=at, torch__memory__state=state)
        return self


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    return Board(clock=clock)


def only_process(board: Board) -> ProcessView:
    (process,) = board.view().processes
    return process


def only_device(board: Board) -> DeviceView:
    (device,) = only_process(board).devices
    return device


def retries(value, **more):
    return Sender().counter("torch.memory.allocation.retries", value, **more).request


def reserved(value, at, **who):
    return Sender(**who).level("torch.memory.reserved", value, at=at).request


def test_pools_are_added_and_what_was_not_sent_is_absent(board):
    sender = Sender(service="serve", instance="a", pid=4242)
    sender.level("torch.memory.reserved", 3, torch__memory__pool="small", hw__id="GPU-1")
    sender.level("torch.memory.reserved", 40, torch__memory__pool="large", hw__id="GPU-1")
    sender.level("torch.memory.allocated", 5)
    sender.gauge("torch.memory.fragmentation", 0.0)
    board.receive(sender.request)

    process, device = only_process(board), only_device(board)
    assert (process.service, process.pid, process.instance) == ("serve", 4242, "a")
    assert (device.reserved, device.allocated, device.fragmentation) == (43, 5, 0.0)
    assert device.hw_id == "GPU-1"
    assert (device.limit, device.slack, device.headroom, device.reading_age) == (None,) * 4
    assert (device.retries, device.ooms, device.device_allocations) == (None,) * 3
    assert device.ledger == {}


def test_the_ledger_keeps_the_bars_order_and_leaves_unknown_states_out(board):
    board.receive(Sender().states(free=1, split_free=2, allocated=3, imagined=4).request)
    assert list(only_device(board).ledger.items()) == [("allocated", 3), ("split_free", 2), ("free", 1)]


def test_a_ledger_that_changes_its_states_is_never_counted_twice(board):
    board.receive(Sender().states(at=0, allocated=4, split_free=1, cached_free=2, free=3).request)
    board.receive(Sender().states(at=2, allocated=4, cached=3, free=3).request)
    assert only_device(board).ledger == {"allocated": 4, "cached": 3, "free": 3}


def test_a_collection_split_over_two_requests_is_one(board):
    board.receive(Sender().states(at=0, allocated=1, free=9).request)
    board.receive(Sender().states(at=2, allocated=4).request)
    board.receive(Sender().states(at=2, free=6).request)
    assert only_device(board).ledger == {"allocated": 4, "free": 6}
    assert only_process(board).interval == 2


def test_points_microseconds_apart_are_one_collection(board):
    board.receive(Sender().states(at=0.0005, allocated=4).states(at=0.0001, free=6).request)
    assert only_device(board).ledger == {"allocated": 4, "free": 6}
    assert only_process(board).interval is None


def test_a_figure_no_longer_sent_becomes_absent(board):
    for at in (0, 2):
        sender = Sender().gauge("torch.memory.slack", 0.5, at=at).level("torch.memory.limit", 8, at=at)
        board.receive(sender.states(at=at, allocated=3).request)
    assert (only_device(board).slack, only_device(board).ledger) == (0.5, {"allocated": 3})
    for at in (4, 6):
        board.receive(Sender().level("torch.memory.limit", 8, at=at).request)
    assert (only_device(board).slack, only_device(board).limit) == (None, 8)
    assert only_device(board).ledger == {}


@pytest.mark.parametrize("nothing", [None, float("nan"), float("inf")])
def test_a_point_without_a_number_is_absent_not_zero(board, nothing):
    board.receive(Sender().gauge("torch.memory.slack", 0.5).request)
    board.receive(Sender().gauge("torch.memory.slack", nothing, at=2).request)
    assert only_device(board).slack is None


def test_a_level_sent_as_changes_is_not_taken_for_a_level(board):
    board.receive(
        Sender().level("torch.memory.limit", 8).level("torch.memory.reserved", 5, temporality=DELTA).request
    )
    assert (only_device(board).limit, only_device(board).reserved) == (8, None)


def test_a_rate_needs_two_cumulative_points(board):
    board.receive(retries(10, at=0))
    assert only_device(board).retries.total == 10
    assert only_device(board).retries.rate is None
    assert only_device(board).retries.recent == 0
    board.receive(retries(16, at=2))
    assert only_device(board).retries.total == 16
    assert only_device(board).retries.rate == 3.0
    assert only_device(board).retries.recent == 6


def test_a_value_that_falls_is_a_reset(board):
    board.receive(retries(10, at=0))
    board.receive(retries(4, at=2))
    assert only_device(board).retries.total == 14
    assert only_device(board).retries.rate == 2.0


def test_a_later_start_is_a_reset_even_if_the_value_rose(board):
    board.receive(retries(10, at=0, start=-50))
    board.receive(retries(12, at=4, start=1))
    assert only_device(board).retries.total == 22
    assert only_device(board).retries.rate == 4.0, "12 since the new start 3 s ago"


def test_deltas_are_summed_and_have_a_rate_at_once(board):
    board.receive(retries(6, at=0, start=-2, temporality=DELTA))
    assert only_device(board).retries.rate == 3.0
    board.receive(retries(2, at=2, start=0, temporality=DELTA))
    count = only_device(board).retries
    assert (count.total, count.rate, count.recent) == (8, 1.0, 8)


@pytest.mark.parametrize("temporality", [CUMULATIVE, DELTA])
def test_an_export_repeated_by_its_sender_counts_once(board, temporality):
    board.receive(retries(5, at=0, start=-2, temporality=temporality))
    message = retries(9, at=2, start=-2 if temporality == CUMULATIVE else 0, temporality=temporality)
    board.receive(message)
    before = only_device(board).retries
    board.receive(message)
    assert only_device(board).retries == before


def test_only_the_last_minute_is_recent(board):
    for at, value in ((0, 1), (10, 3), (50, 4), (75, 4)):
        board.receive(retries(value, at=at))
    assert only_device(board).retries.recent == 1, "the rise at 10 s is 65 s old"


def test_a_late_point_does_not_overwrite_a_newer_one(board):
    board.receive(reserved(9, at=10))
    board.receive(reserved(5, at=8))
    assert only_device(board).reserved == 9


def test_a_sender_whose_clock_was_set_back_an_hour_goes_on(board):
    for at in (0, 2):
        board.receive(reserved(9, at=at))
        board.receive(retries(9, at=at))
    board.receive(Sender().level("torch.memory.reserved", 5, at=-3600).request)
    board.receive(retries(11, at=-3600))
    device = only_device(board)
    assert device.reserved == 5
    assert [value for _, value in device.history] == [5]
    assert (device.retries.total, device.retries.rate) == (11, None)


def test_history_is_bounded_in_number_and_in_time(board):
    for step in range(MAX_SAMPLES + 50):
        board.receive(reserved(step, at=step))
    history = only_device(board).history
    assert len(history) == MAX_SAMPLES
    assert history[-1][1] == MAX_SAMPLES + 49

    slow = Board(clock=Clock())
    for step in range(30):
        slow.receive(reserved(step, at=step * 60))
    history = only_device(slow).history
    assert history[-1][0] - history[0][0] == 600, "ten minutes of a sender that exports each minute"


def test_a_process_is_gone_after_three_of_its_intervals(board, clock):
    for at in (0, 20, 40):
        board.receive(reserved(1, at=at))
    clock.now += 59
    assert not only_process(board).gone
    clock.now += 2
    assert only_process(board).gone
    assert only_device(board).reserved == 1, "the last figures stay to be read"


def test_a_process_is_not_gone_before_fifteen_seconds(board, clock):
    for at in (0, 1, 2):
        board.receive(reserved(1, at=at))
    clock.now += 14
    assert not only_process(board).gone
    clock.now += 2
    assert only_process(board).gone


def test_a_burst_of_held_back_exports_does_not_shorten_the_interval(board, clock):
    for at in range(0, 300, 60):
        board.receive(reserved(1, at=at))
    clock.now += 100
    assert only_process(board).interval == 60
    board.receive(reserved(1, at=241))
    assert only_process(board).interval == 60, "nor does a flush out of turn"
    clock.now += 100
    assert not only_process(board).gone


def test_a_process_that_left_the_board_stays_in_the_summary(board, clock):
    board.receive(reserved(2 * GIB, at=0))
    board.receive(reserved(5 * GIB, at=2))
    board.receive(
        Sender()
        .level("torch.memory.reserved", 3 * GIB, at=4)
        .gauge("torch.memory.fragmentation", 0.25, at=4)
        .request
    )
    board.receive(retries(2, at=4))
    clock.now += 15 + FORGET_AFTER + 1
    assert board.view().processes == ()
    (process,) = board.summary()
    (device,) = process.devices
    assert (device.reserved_first, device.reserved_last, device.reserved_max) == (2 * GIB, 3 * GIB, 5 * GIB)
    assert (device.fragmentation_max, device.retries, device.ooms) == (0.25, 2, None)
    assert device.points == 5


def test_a_restarted_sender_is_a_new_process_and_the_old_one_goes(board, clock):
    for at in (0, 2):
        board.receive(Sender(instance="old", pid=1).counter("torch.memory.ooms", 5, at=at).request)
    clock.now += 14
    for at in (14, 16):
        board.receive(Sender(instance="new", pid=2).counter("torch.memory.ooms", 1, at=at).request)
    clock.now += 2
    new, old = board.view().processes
    assert (new.instance, new.gone, new.devices[0].ooms.total) == ("new", False, 1)
    assert (old.instance, old.gone, old.devices[0].ooms.total) == ("old", True, 5)


def test_without_an_instance_id_host_and_pid_tell_processes_apart(board):
    for pid in (1, 2):
        board.receive(Sender(instance=None, pid=pid).level("torch.memory.reserved", pid).request)
    assert [(p.pid, p.devices[0].reserved) for p in board.view().processes] == [(1, 1), (2, 2)]


def test_two_services_with_one_instance_id_are_two_processes(board):
    for service in ("a", "b"):
        board.receive(Sender(service=service, instance="0").level("torch.memory.reserved", 1).request)
    assert [process.service for process in board.view().processes] == ["a", "b"]


def test_of_200_processes_64_are_kept_and_those_keep_their_history(board, clock):
    for at in (0, 2, 4):
        for number in range(200) if at == 0 else reversed(range(200)):
            board.receive(reserved(number, at=at, instance=str(number), pid=number))
        clock.now += 2
    view = board.view()
    assert len(view.processes) == 64
    assert view.dropped == 136, "each counts once, however often it is turned away"
    assert {len(process.devices[0].history) for process in view.processes} == {3}


def test_a_new_process_takes_the_place_of_the_one_most_overdue(clock):
    board = Board(max_processes=2, clock=clock)
    for at in (0, 60):
        board.receive(reserved(1, at=at, instance="slow", pid=1))
    clock.now += 10
    for at in (0, 2):
        board.receive(reserved(1, at=at, instance="fast", pid=2))
    clock.now += 20
    board.receive(reserved(1, at=0, instance="new", pid=3))
    assert {process.instance for process in board.view().processes} == {"slow", "new"}, (
        "slow has been silent for longer, but is not overdue"
    )
    assert board.view().dropped == 1


def test_a_process_turned_away_and_taken_in_later_is_not_dropped(clock):
    board = Board(max_processes=1, clock=clock)
    for at in (0, 2):
        board.receive(reserved(1, at=at, instance="first"))
    board.receive(reserved(1, at=2, instance="second"))
    assert board.view().dropped == 1
    clock.now += 10
    board.receive(reserved(1, at=12, instance="second"))
    assert only_process(board).instance == "second"
    assert board.view().dropped == 1, "first, that has fallen silent"


def test_devices_of_a_process_are_bounded_and_in_natural_order(board):
    sender = Sender()
    for number in range(MAX_DEVICES + 10):
        sender.level("torch.memory.reserved", number, device=f"cuda:{number}")
    board.receive(sender.request)
    names = [device.name for device in only_process(board).devices]
    assert len(names) == MAX_DEVICES
    assert names[:3] == ["cuda:0", "cuda:1", "cuda:2"]
    assert names[10] == "cuda:10"


def test_what_it_does_not_know_is_passed_over(board):
    sender = Sender(service="web")
    sender.gauge("http.server.active_requests", 3)
    sender.gauge("torch.memory.invented", 3)
    histogram = sender.metrics.add(name="torch.memory.limit").histogram
    histogram.data_points.add(count=3)
    without_device = sender.metrics.add(name="torch.memory.reserved").gauge.data_points.add()
    without_device.as_int = 5
    board.receive(sender.request)
    view = board.view()
    assert view.processes == ()
    assert (view.exports, view.strangers, view.stranger) == (1, 1, "web")


def test_names_cannot_write_to_the_terminal(board):
    board.receive(Sender(service="a\x1b[31mb\nc" + "x" * 1000).level("torch.memory.limit", 1).request)
    service = only_process(board).service
    assert service.startswith("a?[31mb?c")
    assert len(service) == 120


def test_what_it_reads_is_what_the_table_declares():
    declared = {metric.name for metric in signals.METRICS}
    assert set(METRICS) - declared <= {"torch.memory.headroom"}, "headroom comes from snapshots"
    assert set(STATES) == set(signals.STATE.members)
    assert signals.DEVICE.name == "torch.device"
    assert signals.POOL.members.keys() == {"small", "large"}


def test_senders_that_say_neither_instance_nor_pid_are_told_apart_by_their_connections(board):
    for peer, bytes_ in (("127.0.0.1:5001", 3), ("127.0.0.1:5002", 40), ("127.0.0.1:5001", 5)):
        sender = Sender(instance=None, pid="").level("torch.memory.reserved", bytes_, at=bytes_)
        board.receive(sender.request, peer)
    assert sorted(process.devices[0].reserved for process in board.view().processes) == [5, 40]


@pytest.mark.parametrize("nonsense", [1e308, -1e308, 2.0**64])
def test_a_level_that_no_device_can_have_is_as_one_that_was_not_sent(board, nonsense):
    sender = Sender().states(allocated=4)
    board.receive(sender.level("torch.memory.usage", nonsense, torch__memory__state="free").request)
    assert only_device(board).ledger == {"allocated": 4}
