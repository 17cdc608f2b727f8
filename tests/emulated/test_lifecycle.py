# SPDX-License-Identifier: Apache-2.0
"""instrument, uninstrument and again: one series each, nothing left, the options honoured."""

from __future__ import annotations

import gc
import logging
import os
import threading
from itertools import pairwise

import wrapt
from exported import Exported

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, wiring

MIB = 1 << 20


def ours(exported: Exported) -> set[str]:
    return {name for name in exported.collect().names if name.startswith("torch.")}


def point_counts(exported: Exported) -> dict[str, int]:
    return {name: len(exported.points(name)) for name in sorted(ours(exported))}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fifty_times() -> dict:
    import torch

    memory = torch.cuda.memory
    untouched = memory.MemPool.__dict__["__init__"]
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    a, b = Exported(), Exported()
    instrumentor = TorchMemInstrumentor()
    counts, silences, wrapped = [], [], 0
    instrumentor.instrument(meter_provider=a.provider)
    instrumentor.uninstrument()
    threads, files, hooked = threading.active_count(), descriptors(), hooks()
    for cycle in range(50):
        current, other = (a, b) if cycle % 3 != 1 else (b, a)
        instrumentor.instrument(meter_provider=current.provider)
        wrapped += memory.MemPool.__dict__["__init__"] is not untouched
        counts.append(point_counts(current))
        silences.append(sorted(ours(other)))
        instrumentor.uninstrument()
        silences += [sorted(ours(a)), sorted(ours(b))]
    gc.collect()
    return {
        "first": counts[0],
        "all the same": all(count == counts[0] for count in counts),
        "silences": sorted({name for silence in silences for name in silence}),
        "wrapped": wrapped,
        "restored": memory.MemPool.__dict__["__init__"] is untouched,
        "threads": threading.active_count() - threads,
        "files": descriptors() - files,
        "hooks": hooks() - hooked,
        "alive": len(wiring._live),
        "kept": kept.numel(),
    }


def hooks() -> int:
    """On imports that have not come."""
    return sum(map(len, filter(None, wrapt.importer._post_import_hooks.values())))


def test_fifty_cycles_with_two_providers_leave_one_series_each_and_nothing_else(gpu):
    got = gpu.run(fifty_times, memory="2GiB")
    assert got["first"]["torch.memory.usage"] == 6
    assert got["first"]["torch.memory.limit"] == 1
    assert got["all the same"]
    assert got["silences"] == []
    assert (got["wrapped"], got["restored"]) == (50, True)
    assert (got["threads"], got["files"], got["hooks"]) == (0, 0, 0)
    assert got["alive"] == 0


def global_set_afterwards() -> list:
    import torch
    from opentelemetry.metrics import set_meter_provider

    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    instrumentor = TorchMemInstrumentor()
    instrumentor.instrument()
    exported = Exported()
    set_meter_provider(exported.provider)
    told = [point_counts(exported)]
    instrumentor.uninstrument()
    told.append(point_counts(exported))
    instrumentor.instrument()
    told.append(point_counts(exported))
    instrumentor.uninstrument()
    instrumentor.instrument(meter_provider=exported.provider)  # the same one, named
    told.append(point_counts(exported))
    instrumentor.uninstrument()
    other = Exported()
    instrumentor.instrument(meter_provider=other.provider)
    told += [point_counts(exported), point_counts(other)]
    return [*told, kept.numel()]


def test_the_global_provider_may_be_set_after_instrument(gpu):
    first, silent, again, named, left, other, _ = gpu.run(global_set_afterwards)
    assert first["torch.memory.usage"] == 6
    assert silent == left == {}
    assert first == again == named == other


def named_before_it_became_global() -> list:
    import torch
    from opentelemetry.metrics import set_meter_provider

    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    instrumentor = TorchMemInstrumentor()
    exported = Exported()
    instrumentor.instrument()
    instrumentor.uninstrument()
    instrumentor.instrument(meter_provider=exported.provider)
    told = [point_counts(exported)]
    instrumentor.uninstrument()
    set_meter_provider(exported.provider)
    instrumentor.instrument()
    told.append(point_counts(exported))
    return [*told, kept.numel()]


def test_a_provider_named_first_and_global_later_is_one_and_the_same(gpu):
    named, later, _ = gpu.run(named_before_it_became_global)
    assert named == later
    assert named["torch.memory.usage"] == 6


def excluded_then_not() -> list:
    import torch

    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    exported = Exported()
    instrumentor = TorchMemInstrumentor()
    told = []
    for patterns in (["torch.memory.host.*", "torch.memory.usage"], [], "torch.memory.*"):
        instrumentor.instrument(meter_provider=exported.provider, excluded_metrics=patterns)
        told.append(sorted(ours(exported)))
        instrumentor.uninstrument()
    return [*told, kept.numel()]


def test_excluded_metrics_are_not_made_and_come_when_no_longer_excluded(gpu):
    some, every, none, _ = gpu.run(excluded_then_not)
    assert set(every) - set(some) == {
        "torch.memory.host.allocated",
        "torch.memory.host.reserved",
        "torch.memory.usage",
    }
    assert none == []


def a_second_instrument() -> list:
    import torch

    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    exported = Exported()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("opentelemetry").addHandler(handler)
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)  # another entry point
    counts = point_counts(exported)
    TorchMemInstrumentor().uninstrument()
    return [counts, said, point_counts(exported), kept.numel()]


def test_a_second_entry_point_changes_nothing(gpu):
    counts, said, after, _ = gpu.run(a_second_instrument)
    assert counts["torch.memory.usage"] == 6
    assert said == ["Attempting to instrument while already instrumented"]
    assert after == {}


def torch_is_imported_later() -> list:
    import sys

    exported = Exported()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    before = ["torch" in sys.modules, sorted(exported.collect().names)]
    import torch

    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    watched = hasattr(torch.cuda.MemPool.__init__, "__wrapped__")
    return [*before, watched, exported.collect().value("torch.memory.allocated"), kept.numel()]


def test_torch_is_never_imported_by_us_and_found_when_the_user_imports_it(gpu):
    imported, names, watched, allocated, _ = gpu.run(torch_is_imported_later)
    assert watched is True
    assert imported is False
    assert names == []
    assert allocated == 30 * MIB


def beside_half_built_tuples() -> int:
    import torch

    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    exported = Exported()
    raised = []
    stop = threading.Event()

    def build() -> None:
        while not stop.is_set():
            try:
                tuple(i for i in range(1000))
            except SystemError as error:  # somebody else has referred to the tuple meanwhile
                raised.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    for _ in range(20):
        TorchMemInstrumentor().instrument(meter_provider=exported.provider)
        TorchMemInstrumentor().uninstrument()
    stop.set()
    thread.join()
    return len(raised) + kept.numel() - MIB


def test_instrument_does_not_touch_what_other_threads_are_building(gpu):
    assert gpu.run(beside_half_built_tuples) == 0


def instrumented_again_after_a_reset() -> list:
    import torch

    exported = Exported()
    names = ("torch.memory.allocations", "torch.memory.turnover", "torch.memory.device.allocations")
    told = []
    kept = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(30)]
    for _ in range(3):
        TorchMemInstrumentor().instrument(meter_provider=exported.provider)
        kept.append(torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"))
        exported.collect()
        spent = exported.value("torch.memory.telemetry.duration")
        told.append([*(exported.value(name) for name in names), spent])
        TorchMemInstrumentor().uninstrument()
        torch.cuda.reset_accumulated_memory_stats()
    return told


def test_counters_go_on_when_a_provider_is_given_again(gpu):
    told = gpu.run(instrumented_again_after_a_reset)
    for earlier, later in pairwise(told):
        assert all(before <= after for before, after in zip(earlier, later, strict=True)), told


def two_threads_at_once() -> list:
    import torch

    untouched = torch.cuda.MemPool.__dict__["__init__"]
    exported = [Exported(), Exported()]
    left = 0
    gate = threading.Barrier(2)  # opens anew each time both have come

    def instrument(provider) -> None:
        gate.wait()
        TorchMemInstrumentor().instrument(meter_provider=provider)

    for _ in range(50):
        threads = [threading.Thread(target=instrument, args=(each.provider,)) for each in exported]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        TorchMemInstrumentor().uninstrument()
        left += torch.cuda.MemPool.__dict__["__init__"] is not untouched
        left += sum(bool(ours(each)) for each in exported)
    return [left]


def test_two_threads_that_instrument_at_once_leave_nothing_behind(gpu):
    assert gpu.run(two_threads_at_once) == [0]


def forked_beside_requests() -> list:
    import signal

    from opentelemetry_instrumentation_torchmem import track

    import torch  # noqa: F401  # isort: skip

    exported = Exported()
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            with track("request"):
                pass

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    outcomes = []
    for _ in range(25):
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # a lock of the parent's hangs it
            with track("mine"):
                pass
            requests = TorchMemInstrumentor()._instrumented._wiring._requests
            counts = {labels["torch.operation"]: count for count, labels in requests.active()}
            TorchMemInstrumentor().uninstrument()
            os._exit(0 if counts == {"request": 0, "mine": 0} else 3)
        outcomes.append(os.waitpid(child, 0)[1])
    stop.set()
    for thread in threads:
        thread.join()
    return sorted(set(outcomes))


def test_a_child_forked_beside_requests_neither_hangs_nor_keeps_them(gpu):
    assert gpu.run(forked_beside_requests, timeout=250) == [0]


def the_driver_stops_telling() -> list:
    import torch
    from emulator import control

    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    exported = Exported()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("opentelemetry_instrumentation_torchmem").addHandler(handler)
    TorchMemInstrumentor().instrument(meter_provider=exported.provider)
    whole = exported.collect().names
    control.fail("cudaMemGetInfo", 0)
    exported.collect()
    lost, allocated = whole - exported.names, exported.value("torch.memory.allocated")
    control.forgive()
    back = exported.collect().names
    return [sorted(lost), allocated, said, sorted(whole - back), kept.numel()]


def test_a_driver_that_fails_costs_only_what_it_alone_knows(gpu):
    lost, allocated, said, still_lost, _ = gpu.run(the_driver_stops_telling)
    assert lost == ["torch.memory.limit", "torch.memory.usage"]
    assert allocated == 30 * MIB
    (line,) = said
    assert line.startswith("torchmem: what the driver knows of cuda:0 is left out: ")
    assert still_lost == []
