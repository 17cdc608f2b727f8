# SPDX-License-Identifier: Apache-2.0
"""Compaction on the real allocator: what it wins, keeps and refuses, and that it loses nothing."""

from __future__ import annotations

import random
import threading
import zlib
from pathlib import Path

import pytest
from together import Together

from opentelemetry_instrumentation_torchmem import compaction
from opentelemetry_instrumentation_torchmem.compaction import REFUSALS, Compaction, HostMemory
from opentelemetry_instrumentation_torchmem.compaction.kept import REGISTER

pytestmark = pytest.mark.needs_emulation

MIB = 1 << 20
STEP, PAGE = 2 * MIB, 20 * MIB
MEMORY = 2048 * MIB
SEEDS = 3
MODES = {"native": "", "expandable": "expandable_segments:True"}
SETTINGS = {**MODES, "split limit": "max_split_size_mb:32", "roundup": "roundup_power2_divisions:4"}

together = {
    mode: Together(memory=MEMORY, alloc_conf=conf, devices=2, timeout=280) for mode, conf in SETTINGS.items()
}
broken = {mode: Together(memory=MEMORY, alloc_conf=conf, timeout=280) for mode, conf in MODES.items()}
in_each_mode = pytest.mark.parametrize("mode", MODES)


def in_modes(*modes, among=together):
    def each(body):
        for mode in modes:
            among[mode].body(body)
        return body

    return each


def digest(tensor) -> int:
    import torch

    there = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(there.numpy())


def weights(*sizes, device="cuda"):
    """Parameters of so many bytes with values of their own: copied there, as nothing computes."""
    import torch

    generator = torch.Generator().manual_seed(len(sizes))
    return torch.nn.ParameterList(
        [torch.nn.Parameter(torch.rand(size // 4, generator=generator).to(device)) for size in sizes]
    )


def fragmented(seed: int):
    """A model whose parameters lie between holes: other memory came and went while it was loaded."""
    import torch

    chance = random.Random(seed)
    kinds = ((100, 200_000), (MIB, 8 * MIB), (8 * MIB, 15 * MIB))
    sizes = [chance.randrange(*chance.choice(kinds)) // 4 * 4 for _ in range(30)]
    model, between = torch.nn.ParameterList(), []
    for size in sizes:
        model.extend(weights(size))
        between.append(torch.empty(chance.randrange(100, 20 * MIB), dtype=torch.uint8, device="cuda"))
    return model


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def live(*things) -> int:
    """Bytes of the storages of these tensors, as the allocator rounds them."""
    storages = {id(each.untyped_storage()): each.untyped_storage() for each in things}
    return sum(rounded(each.nbytes()) for each in storages.values())


# ---- what it wins ----


@in_modes(*SETTINGS)
def wins():
    import torch
    from emulator import control

    told = []
    before = torch.cuda.memory_stats  # imported, not called: nothing is initialised yet
    assert before
    for seed in range(SEEDS):
        model = fragmented(seed)
        values = [digest(each) for each in model]
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        outcome = Compaction(model)()
        free, _ = torch.cuda.mem_get_info()
        told.append(
            {
                "refused": outcome.refused,
                "missing": outcome.missing,
                "same": values == [digest(each) for each in model],
                "live": live(*model),
                "reserved_before": reserved,
                "reserved": torch.cuda.memory_reserved(),
                "driver_free": free,
                "headroom": outcome.headroom_after,
                "won": outcome.won,
                "fits": control.would_fit(outcome.headroom_after),
                "left": outcome.left,
                "moved": outcome.moved,
                "sizes": sum(each.untyped_storage().nbytes() for each in model),
            }
        )
        del model
        torch.cuda.empty_cache()
    return told


@in_each_mode
def test_a_fragmented_server_gets_headroom_to_within_a_rounding_step_of_all_that_is_free(gpu, mode):
    step = {"native": STEP, "expandable": PAGE}[mode]
    for got in together[mode](gpu, wins):
        print(mode, {name: value // MIB for name, value in got.items() if type(value) is int})
        assert (got["refused"], got["missing"], got["same"], got["left"]) == (None, None, True, 0)
        assert got["moved"] == got["sizes"]
        # What is held beyond the live bytes is the rest of one segment, or page, of large blocks and of
        # one of small ones; and of what the device has free, all but the rest of such a step is headroom.
        assert got["reserved"] - got["live"] <= step + STEP
        assert got["driver_free"] - got["headroom"] < step
        assert got["fits"]
        assert got["won"] > 0
        assert got["reserved"] < got["reserved_before"]


@in_modes(*MODES)
def rests():
    """What is held for a few weights of one size, in MiB, and the free bytes beyond the headroom."""
    import torch

    told = []
    for sizes in ((3 * MIB, 2 * MIB), (700 << 10,) * 10, (11 * MIB + 4,) * 3):
        model = weights(*sizes)
        outcome = Compaction(model)()
        free, _ = torch.cuda.mem_get_info()
        told.append([torch.cuda.memory_reserved() // MIB, free - outcome.headroom_after])
        del model
        torch.cuda.empty_cache()
    return told


@in_each_mode
def test_what_few_or_small_weights_leave_unused_is_what_is_documented(gpu, mode):
    got = together[mode](gpu, rests)
    # 5 MiB in one segment of 20; ten of 0.7 MiB two by two, or in pages; 33 MiB and a little
    assert [held for held, _ in got] == {"native": [20, 10, 34], "expandable": [20, 8, 40]}[mode]
    assert all(beyond < {"native": STEP, "expandable": PAGE}[mode] for _, beyond in got)


@pytest.mark.parametrize("mode", [mode for mode in SETTINGS if mode not in MODES])
def test_settings_that_forbid_a_segment_for_all_lose_no_value_and_no_headroom(gpu, mode):
    for got in together[mode](gpu, wins):
        assert (got["refused"], got["missing"], got["same"]) == (None, None, True)
        assert got["reserved"] <= got["reserved_before"]
        assert got["won"] >= 0
        assert got["fits"]


# ---- what it keeps ----


@in_modes(*MODES)
def keeps():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(300, 700, bias=False, device="cuda")
            self.head = torch.nn.Linear(300, 700, bias=False, device="cuda")
            self.head.weight = self.embed.weight  # tied
            self.norm = torch.nn.BatchNorm1d(300, device="cuda")
            self.turned = torch.nn.Parameter(torch.rand(64, 33, 5).cuda().permute(2, 0, 1))
            self.plain = [torch.rand(1000).cuda()]  # neither parameter nor buffer
            self.short = torch.nn.Parameter(torch.rand(513).half().cuda(), requires_grad=False)

    net = Net()
    with torch.inference_mode():
        net.frozen = torch.rand(4096).cuda()
    net.embed.weight.grad = torch.rand(700, 300).cuda()
    outside = net.embed.weight[10:20].detach()  # views that nobody gave to the compaction
    data = net.turned.data
    gap = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    objects = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    objects |= {"grad": net.embed.weight.grad, "frozen": net.frozen, "plain": net.plain[0]}
    objects |= {"outside": outside, "data": data}

    def seen(each):
        return id(each), digest(each), each.stride(), None if each.is_inference() else each._version

    before = {name: seen(each) for name, each in objects.items()}
    places = {name: each.data_ptr() for name, each in objects.items()}
    del gap
    outcome = Compaction(net)()
    assert outcome.refused is outcome.missing is None
    now = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    now |= {"grad": net.embed.weight.grad, "frozen": net.frozen, "plain": net.plain[0]}
    now |= {"outside": outside, "data": data}
    assert {name: seen(each) for name, each in now.items()} == before
    assert net.head.weight is net.embed.weight
    assert outside.untyped_storage() is net.embed.weight.untyped_storage()
    assert outside.data_ptr() == net.embed.weight.data_ptr() + 10 * 300 * 4
    assert net.turned.data_ptr() == data.data_ptr()
    assert net.frozen.is_inference()
    assert isinstance(net.short, torch.nn.Parameter)
    assert net.embed.weight.requires_grad
    assert net.embed.weight.is_leaf
    return {"storages": outcome.storages, "moved": sum(now[name].data_ptr() != places[name] for name in now)}


@in_each_mode
def test_tensors_stay_who_they_are_with_views_ties_gradients_strides_and_values(gpu, mode):
    got = together[mode](gpu, keeps)
    # embed and its gradient, turned, half, plain, frozen; weight, bias and three buffers of the norm
    assert got["storages"] == 11
    assert got["moved"]


@in_modes("native")
def outputs():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(500, 512),
        torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True),
        torch.nn.Linear(512, 500),
    ).eval()
    asked = torch.randint(0, 500, (2, 17))
    with torch.no_grad():
        reference = model(asked)
    between = []
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.data.cuda())
                between.append(torch.empty(9 * MIB, dtype=torch.uint8, device="cuda"))
    del between
    outcome = Compaction(model)()
    with torch.no_grad():  # the emulated GPU computes nothing: what it holds is computed with on the CPU
        again = model.cpu()(asked)
    return {"won": outcome.won, "equal": torch.equal(reference, again), "some": float(reference.abs().sum())}


def test_a_model_gives_the_same_outputs_as_before(gpu):
    got = together["native"](gpu, outputs)
    assert got["equal"]
    assert got["some"] > 0
    assert got["won"] > 0


class Wrapped:
    """A tensor subclass that holds two tensors and has no memory of its own, as quantised weights do."""

    @staticmethod
    def of(data, scale):
        import torch

        class Quantised(torch.Tensor):
            @staticmethod
            def __new__(cls, data, scale):
                return torch.Tensor._make_wrapper_subclass(
                    cls, data.shape, dtype=torch.float32, device=data.device
                )

            def __init__(self, data, scale):
                self.data_part, self.scale_part = data, scale

            def __tensor_flatten__(self):
                return ["data_part", "scale_part"], None

            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                raise NotImplementedError(function)

        return Quantised(data, scale)


@in_modes(*MODES)
def reaches():
    import os

    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    inside = [torch.rand(1000).cuda() for _ in range(3)]
    local = torch.rand(64, 64).cuda()
    parts = Wrapped.of(inside[0], Wrapped.of(inside[1], inside[2]))
    distributed = DTensor.from_local(local, DeviceMesh("cuda", [0]), [Replicate()], run_check=False)
    coo = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.5, 2.5], (2, 2)).cuda()
    csr = torch.rand(8, 8).to_sparse_csr().cuda()
    jagged = torch.nested.nested_tensor([torch.rand(3), torch.rand(5)], layout=torch.jagged).cuda()
    net = torch.nn.Module()
    net.caches = {"of": ({"keys": torch.rand(100).cuda()},)}
    plain = [
        net.caches["of"][0]["keys"],
        *inside,
        local,
        coo._indices(),
        coo._values(),
        csr.values(),
        csr.col_indices(),
        jagged.values(),
    ]
    before = [digest(each) for each in plain]
    with FakeTensorMode():
        fake = torch.empty(100, device="cuda")
    skipped = [torch.empty(9, device="meta"), torch.rand(7), torch.nn.LazyLinear(3, device="cuda"), fake]
    outcome = Compaction({"parts": parts, "net": [net]}, [distributed, (coo, csr)], jagged, skipped)()
    assert outcome.refused is outcome.missing is None
    dist.destroy_process_group()
    return {
        "same": before == [digest(each) for each in plain],
        "storages": outcome.storages,
        "moved": outcome.moved >= sum(each.untyped_storage().nbytes() for each in plain),
    }


@in_each_mode
def test_it_reaches_into_subclasses_distributed_sparse_and_nested_tensors_and_skips_what_has_no_memory(
    gpu, mode
):
    got = together[mode](gpu, reaches)
    assert (got["same"], got["moved"]) == (True, True)
    # three of the wrapper, one of the DTensor, two and three of the sparse ones, values and offsets
    # and one in a module's attribute, within a dict
    assert got["storages"] == 3 + 1 + 2 + 3 + 2 + 1


@in_modes(*MODES)
def elsewhere():
    """Two streams, two devices; called within a pool, inference mode and a default device."""
    import torch

    side = torch.cuda.Stream()
    first = weights(3 * MIB, 30 * MIB)
    with torch.cuda.stream(side):
        second = weights(5 * MIB, 40 * MIB)
    third = weights(7 * MIB, 50 * MIB, device="cuda:1")
    everything = [*first, *second, *third]
    before = [digest(each) for each in everything]
    pool = torch.cuda.MemPool()
    torch.set_default_device("cuda:1")
    with torch.inference_mode(), torch.cuda.use_mem_pool(pool), torch.cuda.stream(torch.cuda.Stream()):
        outcome = Compaction(everything)()
    assert outcome.refused is outcome.missing is None
    torch.set_default_device(None)
    homes = {}
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            homes[block["address"]] = [segment["device"], segment["stream"], *segment["segment_pool_id"]]
    return {
        "same": before == [digest(each) for each in everything],
        "homes": [homes[each.data_ptr()] for each in everything],
        "side": side.cuda_stream,
        "writable": bool(first[0].detach().zero_().is_inference()),
    }


@in_each_mode
def test_memory_comes_back_to_its_own_stream_device_and_the_default_pool_whatever_the_caller_has_set(
    gpu, mode
):
    got = together[mode](gpu, elsewhere)
    assert got["same"]
    on_side = [0, got["side"], 0, 0]
    assert got["homes"] == [[0, 0, 0, 0]] * 2 + [on_side] * 2 + [[1, 0, 0, 0]] * 2
    assert not got["writable"]


# ---- what it refuses ----


def in_a_graphs_pool():
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    graph.reset()
    return [made]


def beside_a_captured_graph():
    import torch

    model = weights(3 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # with no memory of its own: no pool tells of it
        model[0].detach().zero_()
    beside_a_captured_graph.alive = graph
    return model


def in_a_pool():
    import torch

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        return weights(3 * MIB, 5 * MIB)


def over_dlpack():
    import torch

    return [torch.from_dlpack(weights(3 * MIB)[0].detach())]


def both_over_dlpack():
    import torch

    model = weights(3 * MIB)
    model.extend([torch.nn.Parameter(torch.from_dlpack(model[0].detach()))])
    return model


def without_a_storage():
    import torch

    class Opaque(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32, device="cuda")

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    weights(MIB)
    return [Opaque()]


def a_generator():
    return (each for each in weights(3 * MIB))


def an_optimizer():
    import torch

    return torch.optim.SGD(weights(3 * MIB))


def a_text():
    weights(MIB)
    return "x"


def on_the_cpu():
    import torch

    weights(MIB)
    return torch.nn.Linear(3, 3)


def of_another_allocator():
    """Memory that PyTorch was handed, as a resizable storage over it."""
    import torch

    storage = weights(3 * MIB)[0].detach().untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device="cuda")
    inner = made.set_(storage)[512:]  # no block of the allocator's begins here
    return [torch.from_dlpack(inner)]


def plain():
    return weights(3 * MIB)


def little_host_memory():
    return HostMemory(200 * MIB, "/sys/fs/cgroup/memory.max")


def unknown_host_memory():
    return None


CASES = {
    "captured_graphs": (beside_a_captured_graph, None),
    "private_pools": (in_a_pool, None),
    "not_resizable": (over_dlpack, None),
    "shared_memory": (both_over_dlpack, None),
    "no_storage": (without_a_storage, None),
    "nothing": (on_the_cpu, None),
    "not_understood, a generator": (a_generator, None),
    "not_understood, an optimizer": (an_optimizer, None),
    "not_understood, a text": (a_text, None),
    "host_memory": (plain, little_host_memory),
    "host_memory unknown": (plain, unknown_host_memory),
    "private_pools of a graph": (in_a_graphs_pool, None),
    "not_resizable, inside another's block": (of_another_allocator, None),
}


def refuses(case: str) -> dict:
    import torch
    from emulator import control

    things, host = CASES[case]
    given = things()
    tensors = list(given.parameters()) if isinstance(given, torch.nn.Module) else []
    tensors = list(given) if isinstance(given, (list, torch.nn.ParameterList)) else tensors
    tensors = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter)]
    before = [digest(each) for each in tensors], [each.data_ptr() for each in tensors]
    frees = control.count("cudaFree")
    outcome = Compaction(given, **({"host": host} if host else {}))()
    return {
        "reason": outcome.reason,
        "refused": outcome.refused,
        "untouched": ([digest(each) for each in tensors], [each.data_ptr() for each in tensors]) == before,
        "frees": control.count("cudaFree") - frees,
        "missing": outcome.missing,
        "moved": outcome.moved,
    }


@in_modes("native")
def refusals():
    from together import in_a_copy

    return {case: in_a_copy(refuses, case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_it_refuses_with_its_reason_before_anything_is_moved(gpu, case):
    outcome = together["native"](gpu, refusals)[case]
    assert "error" not in outcome, outcome["error"]
    got = outcome["value"]
    reason = case.split(" ")[0].rstrip(",")
    assert got["reason"] == reason
    assert got["refused"].startswith(REFUSALS[reason])
    assert (got["untouched"], got["frees"], got["missing"], got["moved"]) == (True, 0, None, 0)


def test_without_cuda_there_is_nothing_to_compact_and_none_is_initialised():
    import torch

    outcome = Compaction(torch.nn.Linear(3, 3))()
    assert outcome.reason == "not_initialised"
    assert not torch.cuda.is_initialized()


def on_cuda_malloc_async():
    return Compaction(weights(MIB))().refused


def test_another_backend_is_refused_by_its_name(gpu):
    refused = gpu.run(on_cuda_malloc_async, memory="256MiB", alloc_conf="backend:cudaMallocAsync")
    assert refused == f"{REFUSALS['backend']}: cudaMallocAsync"


# ---- that it loses nothing ----


@in_modes(*MODES)
def gone():
    """Another process takes what was given back, just before it is taken again."""
    import torch
    from emulator import control

    model = weights(60 * MIB, 40 * MIB, 20 * MIB, 5 * MIB, 1000)
    before = [digest(each) for each in model]
    clear = torch.cuda.empty_cache
    taken = []

    def cleared():
        clear()
        if not taken and not model[0].untyped_storage().nbytes():
            free, _ = torch.cuda.mem_get_info()
            taken.append(free - 64 * MIB)
            control.external_malloc(0, taken[0])

    torch.cuda.empty_cache = cleared
    compact = Compaction(model)
    outcome = compact()
    there = [each.untyped_storage().nbytes() > 0 for each in model]
    intact = [
        digest(each) == value for each, value, is_there in zip(model, before, there, strict=True) if is_there
    ]
    told = {"missing": outcome.missing, "refused": outcome.refused, "there": there, "intact": all(intact)}
    again = compact()
    told |= {"bytes": compact.missing, "again": again.reason, "still out": again.missing, "won": outcome.won}
    still = compact.bring_back()
    told["still"] = still.missing is not None
    control.external_free(0, taken[0])
    back = compact.bring_back()
    told |= {"back": back.missing, "same": [digest(each) for each in model] == before}
    told["last"] = Compaction(model)().refused
    return told


@in_each_mode
def test_what_finds_no_memory_on_the_way_back_is_kept_on_the_host_until_there_is_some(gpu, mode):
    got = together[mode](gpu, gone)
    out = sum(size for size, there in zip((60, 40, 20, 5), got["there"], strict=False) if not there) * MIB
    assert 0 < out == got["bytes"]
    assert got["missing"].startswith(f"{out:,} bytes are in host memory alone: OutOfMemoryError")
    assert (got["refused"], got["intact"], got["won"]) == (None, True, None)
    assert got["again"] == "busy"
    assert got["still out"] == f"{out:,} bytes are in host memory alone"
    assert got["still"]
    assert (got["back"], got["same"], got["last"]) == (None, True, None)


@in_modes(*MODES)
def not_emptied():
    """The cache cannot be emptied once the memory is out."""
    import torch

    model = weights(60 * MIB, 5 * MIB, 1000)
    before = [digest(each) for each in model]
    clear = torch.cuda.empty_cache

    def refusing():
        if not all(each.untyped_storage().nbytes() for each in model):
            raise RuntimeError("not now")
        clear()

    torch.cuda.empty_cache = refusing
    compact = Compaction(model)
    outcome = compact()
    torch.cuda.empty_cache = clear
    back = compact.bring_back()
    same = [digest(each) for each in model] == before
    return {"missing": outcome.missing, "back": [back.missing, back.refused], "same": same}


@in_each_mode
def test_a_cache_that_cannot_be_emptied_leaves_the_memory_on_the_host_until_it_can(gpu, mode):
    got = together[mode](gpu, not_emptied)
    assert got["missing"] == "68,158,440 bytes are in host memory alone: RuntimeError: not now"
    assert (got["back"], got["same"]) == ([None, None], True)


CALLS = (
    "cudaMemcpyAsync", "cudaHostAlloc", "cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaEventRecord",
    "cudaEventSynchronize", "cudaEventCreateWithFlags", "cudaStreamSynchronize", "cuMemCreate", "cuMemMap",
    "cuMemUnmap", "cuMemSetAccess", "cuMemRelease", "cudaMemGetInfo",
)  # fmt: skip


def faulty(call: str, nth: int) -> str:
    """The nth call of a function of CUDA's fails. What came of it, where no tensor was lost."""
    import torch
    from emulator import control

    model = weights(17 * MIB, 11 * MIB, 3 * MIB, 1000)
    gap = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    more = weights(12 * MIB, 700_000)
    del gap
    everything = [*model, *more]
    before = [digest(each) for each in everything]
    compact = Compaction(model, more)
    calls = control.count(call)
    control.fail(call, nth)
    outcome = compact()
    control.forgive()
    hit = control.count(call) - calls >= nth
    came = "moved"
    if outcome.missing:
        came = "brought back"
        assert compact.missing
        again = compact.bring_back()
        if again.missing:  # a call that failed has left the allocator broken: what is out is on the host
            came = "kept"
            out = {id(kept.found.storage): kept.host for kept in REGISTER.copies}
            for each, value in zip(everything, before, strict=True):
                host = out.get(id(each.untyped_storage()))
                assert digest(each if host is None else host) == value
            return came
    elif outcome.refused:
        came = outcome.reason
    assert not compact.missing
    assert [digest(each) for each in everything] == before
    return came if hit else "never"


@in_modes(*MODES, among=broken)
def faults():
    from together import in_a_copy

    found = {}
    for call in CALLS:
        for nth in (1, 2, 5, 13):
            outcome = in_a_copy(faulty, call, nth)
            assert "error" not in outcome, (call, nth, outcome)
            if outcome["value"] == "never":
                break
            found[f"{call} {nth}"] = outcome["value"]
    return found


@in_each_mode
def test_no_tensor_is_lost_when_a_call_of_cuda_fails_wherever_it_is(gpu, mode):
    got = broken[mode](gpu, faults)
    print(mode, got)
    assert len(got) > 20
    assert {"failed", "moved"} <= set(got.values())


class Broken(Exception):
    pass


class Traced:
    """Runs a compaction of which one line raises, on the thread that moves."""

    def __init__(self, compact) -> None:
        self.compact = compact
        self.lines: list[tuple[str, int]] = []

    def __call__(self, nth: int = 0):
        place = str(Path(compaction.__file__).parent)
        self.lines = []

        def trace(frame, event, _):
            file = frame.f_code.co_filename
            if not file.startswith(place) or file.endswith(
                "apart.py"
            ):  # what only starts and ends the thread
                return None
            if event == "line":
                self.lines.append((Path(frame.f_code.co_filename).name, frame.f_lineno))
                if len(self.lines) == nth:
                    raise Broken(self.lines[-1])
            return trace

        threading.settrace(trace)
        try:
            return self.compact()
        finally:
            threading.settrace(None)


@in_modes(*MODES, among=broken)
def broken_lines():
    """Each line that runs raises: the first time that it does and the last."""
    import torch

    model = weights(11 * MIB, 2 * MIB, 5000)
    gap = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    model.extend(weights(3 * MIB))
    del gap
    before = [digest(each) for each in model]
    run = Traced(Compaction(model))
    assert run().refused is None
    times = {}
    for nth, line in enumerate(run.lines, 1):
        times.setdefault(line, []).append(nth)
    came = {"lines": len(times), "refused": 0, "missing": 0, "moved": 0}
    for nth in sorted({nth for each in times.values() for nth in (each[0], each[-1])}):
        outcome = run(nth)
        came["refused" if outcome.refused else "missing" if outcome.missing else "moved"] += 1
        if run.compact.missing:
            run.compact.bring_back()
        assert not run.compact.missing, run.lines[-1]
        assert [digest(each) for each in model] == before, (nth, run.lines[-1])
    return came


@in_each_mode
def test_no_tensor_is_lost_when_any_line_of_it_raises(gpu, mode):
    got = broken[mode](gpu, broken_lines)
    print(mode, got)
    assert got["lines"] > 100
    assert got["refused"] > 100
    assert got["moved"] > 20


def all_taken():
    """No memory is to be had until it is called."""
    import torch
    from emulator import control

    clear, taken = torch.cuda.empty_cache, []

    def cleared():
        clear()
        free, _ = torch.cuda.mem_get_info()
        if not taken and not torch.cuda.memory_allocated():
            taken.append(free)
            control.external_malloc(0, free)

    torch.cuda.empty_cache = cleared

    def given_back():
        control.external_free(0, taken[0])
        torch.cuda.empty_cache = clear

    return given_back


@in_modes(*MODES)
def let_go():
    """Nobody keeps the compaction whose memory is missing."""
    import gc

    model = weights(60 * MIB, 5 * MIB)
    before = [digest(each) for each in model]
    given_back = all_taken()
    outcome = Compaction(model)()
    gc.collect()
    told = {"missing": outcome.missing, "bytes": Compaction(model).missing}
    given_back()
    told["back"] = [Compaction(model).bring_back().missing, [digest(each) for each in model] == before]
    given_back = all_taken()
    outcome = Compaction(model)()
    gc.collect()
    given_back()
    told["by its outcome"] = [outcome.bring_back().missing, [digest(each) for each in model] == before]
    given_back = all_taken()
    Compaction(model)()
    given_back()
    again = Compaction(model)()
    told["by the next"] = [again.refused, again.missing, [digest(each) for each in model] == before]
    told["moved"] = again.moved
    return told


@in_each_mode
def test_what_is_missing_outlives_the_compaction_and_any_other_brings_it_back(gpu, mode):
    got = together[mode](gpu, let_go)
    assert got["missing"].startswith(f"{65 * MIB:,} bytes are in host memory alone: OutOfMemoryError")
    assert (got["bytes"], got["moved"]) == (65 * MIB, 65 * MIB)
    assert (got["back"], got["by its outcome"]) == ([None, True], [None, True])
    assert got["by the next"] == [None, None, True]


@in_modes(*MODES)
def four_objects():
    """Four threads, each with a compaction of its own, over the same weights."""
    from emulator import control

    model = weights(*(5 * MIB,) * 12)
    before = [digest(each) for each in model]
    outcomes = []
    for _ in range(5):
        control.pause("cudaFree", 1, 300)  # native and expandable both give something back: the others come
        control.pause("cuMemUnmap", 1, 300)  # while one is on its way
        threads = [threading.Thread(target=lambda: outcomes.append(Compaction(model)())) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        control.forgive()
    return {
        "reasons": sorted({str(each.reason) for each in outcomes}),
        "missing": [each.missing for each in outcomes if each.missing],
        "moved": any(each.moved for each in outcomes),
        "same": [digest(each) for each in model] == before,
    }


@in_each_mode
def test_four_compactions_of_the_same_weights_at_once_are_one_and_three_refusals(gpu, mode):
    got = together[mode](gpu, four_objects)
    assert got == {"reasons": ["None", "busy"], "missing": [], "moved": True, "same": True}


@in_modes("native")
def interrupted():
    """Ctrl-C, twice, while the thread is in one of its calls of CUDA, wherever that is."""
    import os
    import signal

    from emulator import control

    model = weights(40 * MIB, 30 * MIB, 3 * MIB)
    before = [digest(each) for each in model]
    told = {}
    for call in ("cudaMemcpyAsync", "cudaMalloc", "cudaFree"):
        control.pause(call, 0, 100)
        over = threading.Event()

        def interrupt(call=call, over=over):
            left = 2
            while left and not over.wait(0.01):
                if control.inside(call):
                    os.kill(os.getpid(), signal.SIGINT)
                    left -= 1

        other = threading.Thread(target=interrupt)
        other.start()
        try:
            Compaction(model)()
            told[call] = "not interrupted"
        except KeyboardInterrupt:
            told[call] = [each.untyped_storage().nbytes() for each in model]
        over.set()
        other.join()
        control.forgive()
        if type(told[call]) is list:
            told[call].append([digest(each) for each in model] == before)
    told["next"] = [Compaction(model)().refused, [each.name for each in threading.enumerate()]]
    return told


def test_an_interrupt_is_raised_only_once_the_memory_is_back(gpu):
    got = together["native"](gpu, interrupted)
    back = [40 * MIB, 30 * MIB, 3 * MIB, True]
    calls = ("cudaMemcpyAsync", "cudaMalloc", "cudaFree")
    assert got == {**dict.fromkeys(calls, back), "next": [None, ["MainThread"]]}


@in_modes("native")
def beside():
    """One compaction at a time."""
    import torch
    from emulator import control

    model = weights(3 * MIB)
    compact = Compaction(model)
    control.pause("cudaMalloc", 0, 300)
    first = threading.Thread(target=compact)
    first.start()
    while not control.inside("cudaMalloc"):
        pass
    second = compact()
    first.join()
    return {"reason": second.reason, "initialised": torch.cuda.is_initialized()}


def test_a_second_one_at_the_same_time_is_refused(gpu):
    assert together["native"](gpu, beside) == {"reason": "busy", "initialised": True}
