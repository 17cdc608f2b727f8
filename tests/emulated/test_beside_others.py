# SPDX-License-Identifier: Apache-2.0
"""Third-party code beside this package: it works as it does alone, and what is measured stays right."""

from __future__ import annotations

import pickle

import pytest
from exported import Exported, Logged, Traced

from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, instrument_model

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20


def instrumented(**options) -> tuple[Exported, Traced]:
    exported, traced = Exported(), Traced()
    TorchMemInstrumentor().instrument(
        meter_provider=exported.provider,
        tracer_provider=traced.provider,
        logger_provider=Logged().provider,
        **options,
    )
    return exported, traced


def names(traced: Traced) -> list[str]:
    """Of the spans since the last look."""
    found = [span.name for span in traced.spans]
    traced.exporter.clear()
    return found


# ---- accelerate: its hooks take the place of an instance's forward ----


def network():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))


def offloaded(order: str) -> dict:
    """Weights in host memory, brought to the device for each layer's call."""
    import torch
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    _, traced = instrumented()
    model = network()
    bare = [vars(layer).keys() for layer in model.modules()]
    stops = []

    def measure():
        stops.append(instrument_model(model, "rank"))

    def hook():
        cpu_offload(model, execution_device="cuda:0")

    for step in (measure, hook) if order == "measured first" else (hook, measure):
        step()
    x = torch.ones(2, 256)
    devices = [model(x).device.type for _ in range(2)]
    spans = list(traced.spans)
    told = dict(spans[0].attributes)
    seen = {"names": names(traced), "devices": devices, "weights": next(model.parameters()).device.type}
    if order == "measured first":
        stops[0]()
        model(x)
        seen["measured no more"] = names(traced)
        remove_hook_from_submodules(model)
    else:
        remove_hook_from_submodules(model)
        model.to("cuda")
        model(x.cuda())
        seen["hook removed"] = names(traced)
        stops[0]()
    TorchMemInstrumentor().uninstrument()
    seen["as before"] = [
        vars(layer).keys() == keys for layer, keys in zip(model.modules(), bare, strict=True)
    ]
    seen["class"] = "__call__" in vars(type(model))
    seen["turnover"] = told["torch.memory.turnover"]
    seen["exclusive"] = told["torch.memory.exclusive"]
    return seen


@pytest.mark.parametrize("order", ["measured first", "hooked first"])
def test_a_model_with_accelerates_offload_hooks_is_measured_in_either_order(gpu, order):
    got = gpu.run(offloaded, args=[order], memory="1GiB", timeout=120)
    assert got["names"] == ["rank Sequential"] * 2
    assert got["devices"] == ["cpu", "cpu"], "the hook gives back what it was given"
    assert got["weights"] == "meta"
    assert got["turnover"] >= 2 * 256 * 256 * 4, "the weights that the hooks brought are the call's"
    assert got["exclusive"] is True
    assert got.get("measured no more", []) == []
    assert got.get("hook removed", ["rank Sequential"]) == ["rank Sequential"]
    assert all(got["as before"])
    assert got["class"] is False


def hooked_by_class() -> dict:
    """A target by name, whose instances get a hook before and after their class is measured."""
    import sys

    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    class Net(torch.nn.Linear):
        pass

    Net.__qualname__ = "Net"
    this = sys.modules[__name__]
    this.Net = Net
    before, after = Net(8, 8), Net(8, 8)
    add_hook_to_module(before, AlignDevicesHook(execution_device="cuda:0", io_same_device=True))
    _, traced = instrumented(targets=[f"{__name__}:Net.forward"])
    add_hook_to_module(after, AlignDevicesHook(execution_device="cuda:0", io_same_device=True))
    seen = {
        "devices": [model(torch.ones(2, 8)).device.type for model in (before, after)],
        "hooked": names(traced),
    }
    TorchMemInstrumentor().uninstrument()
    for model in (before, after):
        model(torch.ones(2, 8))
    seen["uninstrumented"] = names(traced)
    for model in (before, after):
        remove_hook_from_module(model)
        model(torch.ones(2, 8, device="cuda"))
    seen["removed"] = names(traced)
    seen["own forward"] = [type(model.forward).__name__ for model in (before, after)]
    return seen


def test_a_class_is_measured_through_accelerates_hooks_and_restored_under_them(gpu):
    got = gpu.run(hooked_by_class, memory="1GiB", timeout=120)
    assert got["devices"] == ["cpu", "cpu"]
    assert got["hooked"] == ["forward Net"], "of one hooked before, the hook has kept the bare forward"
    assert got["uninstrumented"] == []
    assert got["removed"] == []
    assert got["own forward"] == ["method", "method"]


# ---- torch.profiler ----


def profiled() -> dict:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    exported, traced = instrumented()
    model = torch.nn.Linear(64, 64).cuda()
    stop = instrument_model(model, "rank")
    x = torch.ones(2, 64, device="cuda")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        with record_function("the user's own"):
            model(x)
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    inside = names(traced)
    events = {event.key for event in profiler.key_averages()}
    sizes = [event.self_device_memory_usage for event in profiler.events() if event.name == "aten::empty"]
    model(x)
    exported.collect()
    stop()
    figure = exported.value("torch.memory.allocated", device="cuda:0")
    return {
        "inside": inside,
        "after": names(traced),
        "user": "the user's own" in events,
        "linear": "aten::linear" in events,
        "largest": max(sizes),
        "told": figure == torch.cuda.memory_allocated(),
        "kept": kept.numel(),
    }


def test_calls_are_measured_under_torchs_profiler_which_sees_what_it_sees_alone(gpu):
    got = gpu.run(profiled, memory="1GiB", timeout=120)
    assert got["inside"] == got["after"] == ["rank Linear"]
    assert got["user"] is True
    assert got["linear"] is True
    assert got["largest"] == got["kept"] == 30 * MIB
    assert got["told"] is True


# ---- the user's own memory history ----


def recording(dump_dir: str) -> dict:
    """The user records; errors, snapshots and dumps of ours happen meanwhile."""
    import torch

    exported, _ = instrumented(snapshot_share=0.1, oom_dump_dir=dump_dir)
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    exported.collect()
    before = entries(torch)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(3000 * MIB, dtype=torch.uint8, device="cuda")
    exported.collect()
    more = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    on = entries(torch)
    with open(f"{dump_dir}/the-users.pickle", "wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
    torch.cuda.memory._record_memory_history(enabled=None)
    last = torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
    exported.collect()
    off = entries(torch)
    verdicts = exported.value("torch.memory.oom.verdicts")
    TorchMemInstrumentor().uninstrument()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    again = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
    return {
        "before": before,
        "on": on,
        "off": off,
        "again": entries(torch),
        "verdicts": verdicts,
        "held": sum(each.numel() for each in (kept, more, last, again)),
    }


def entries(torch) -> dict[str, list[int]]:
    """What the user's history holds: the sizes by action."""
    found: dict[str, list[int]] = {}
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        found.setdefault(entry["action"], []).append(entry["size"] // MIB)
    return found


def test_the_users_own_memory_history_goes_on_and_stays_off_whatever_is_observed(gpu, tmp_path):
    got = gpu.run(recording, args=[str(tmp_path)], memory="1GiB")
    assert got["before"]["alloc"] == [30]
    assert got["on"]["alloc"] == [30, 40], "recorded on through an error and its evidence"
    assert len(got["on"]["oom"]) == 1
    assert got["off"].get("alloc", []) in ([], [30, 40]), "and no longer once the user has switched it off"
    assert 60 in got["again"]["alloc"]
    assert 50 not in got["again"]["alloc"]
    assert got["verdicts"] == 1
    assert got["held"] == 180 * MIB
    [dump] = [path for path in tmp_path.glob("torchmem-oom-*") if path.suffix in (".pickle", ".gz")]
    assert dump.stat().st_size > 0
