# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU keeps its promises: each is asserted on a figure that could be wrong.

The functions before each test are its bodies: they run on the GPU, in a process of their own.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from emulator import build, control

pytestmark = pytest.mark.needs_emulation

MiB = 1 << 20
GiB = 1 << 30
RUN = str(Path(build.__file__).with_name("run"))


def allocate(size, device=0):
    import torch

    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def stat(key, device=0):
    import torch

    return torch.cuda.memory_stats(device)[key]


def reserved(device=0):
    return stat("reserved_bytes.all.current", device)


def pending():
    return stat("active_bytes.all.current") - stat("allocated_bytes.all.current")


def accounted(device=0):
    """Whether what the allocator reserved, what others took and what is free add up to the device."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return reserved(device) + control.memory(device, "external") + free == total


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return None


# ---- memory ----


def fill_a_device():
    import torch

    kept = allocate(30 * MiB)
    seen = {"accounted": [accounted()]}
    control.external_malloc(0, GiB)
    seen["free beside external"] = torch.cuda.mem_get_info(0)[0]
    seen["accounted"].append(accounted())
    seen["error"] = error_of(allocate, 3 * GiB)
    seen["retries"], seen["ooms"] = stat("num_alloc_retries"), stat("num_ooms")
    control.external_free(0, GiB)
    fits = allocate(3 * GiB)
    seen["accounted"].append(accounted())
    seen["reserved"] = reserved()
    del kept, fits
    torch.cuda.empty_cache()
    seen["used at the end"] = control.memory(0)
    return seen


def test_a_full_device_is_one_retry_and_one_oom_and_every_byte_is_accounted_for(gpu):
    seen = gpu.run(fill_a_device, memory="4GiB")
    assert seen == {
        "accounted": [True, True, True],
        "free beside external": 4 * GiB - GiB - 30 * MiB,
        "error": "OutOfMemoryError",
        "retries": 1,
        "ooms": 1,
        "reserved": 3 * GiB + 30 * MiB,
        "used at the end": 0,
    }
    assert "this is no GPU but an emulation" in gpu.last.stderr


def grow_expandable_segments():
    import torch

    seen = {"reserved": [], "accounted": []}
    kept = []
    for _ in range(3):
        kept.append(allocate(15 * MiB))
        seen["reserved"].append(reserved() // MiB)
        seen["accounted"].append(accounted())
    kept[1].copy_(torch.arange(15 * MiB, dtype=torch.int64).to(torch.uint8))
    seen["copied"] = kept[1][1000:1005].cpu().tolist()
    seen["segments"] = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
    seen["cudaMalloc"], seen["cuMemCreate"] = control.count("cudaMalloc"), control.count("cuMemCreate")
    del kept
    torch.cuda.empty_cache()
    seen["reserved"].append(reserved())
    seen["used at the end"] = control.memory(0, "created")
    seen["error"] = error_of(allocate, 2 * GiB)
    seen["after the error"] = control.memory(0)
    return seen


def test_expandable_segments_grow_by_pages_of_20_mib_and_shrink(gpu):
    seen = gpu.run(grow_expandable_segments, memory="1GiB", alloc_conf="expandable_segments:True")
    assert seen == {
        "reserved": [20, 40, 60, 0],
        "accounted": [True, True, True],
        "copied": [n % 256 for n in range(1000, 1005)],
        "segments": [True],
        "cudaMalloc": 0,
        "cuMemCreate": 3,
        "used at the end": 0,
        "error": "OutOfMemoryError",
        "after the error": 0,
    }


def use_the_async_backend():
    import torch

    kept = allocate(40 * MiB)
    seen = {"backend": torch.cuda.get_allocator_backend()}
    seen["allocated"], seen["reserved"] = stat("allocated_bytes.all.current"), reserved()
    seen["accounted"] = accounted()
    seen["calls"] = [control.count("cudaMallocAsync"), control.count("cudaMalloc")]
    seen["error"] = error_of(allocate, GiB)
    del kept
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    seen["used at the end"] = control.memory(0)
    return seen


def test_the_allocator_over_cuda_malloc_async_runs(gpu):
    seen = gpu.run(use_the_async_backend, memory="1GiB", alloc_conf="backend:cudaMallocAsync")
    assert seen == {
        "backend": "cudaMallocAsync",
        "allocated": 40 * MiB,
        "reserved": 64 * MiB,
        "accounted": True,
        "calls": [1, 0],
        "error": "OutOfMemoryError",
        "used at the end": 0,
    }


PLUGGABLE = """
#include <stddef.h>
extern int cudaMalloc(void **, size_t);
extern int cudaFree(void *);
void *take(ptrdiff_t size, int device, void *stream) { void *p = 0; cudaMalloc(&p, size); return p; }
void give(void *p, ptrdiff_t size, int device, void *stream) { cudaFree(p); }
"""


def use_pools_and_pinned_memory(directory):
    import torch

    source, library = f"{directory}/pluggable.c", f"{directory}/pluggable.so"
    Path(source).write_text(PLUGGABLE)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    seen = {}

    plain = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(plain):
        in_pool = allocate(40 * MiB)
    outside = allocate(2 * MiB)
    seen["pools"] = len({segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()})
    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "take", "give")
    special = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(special):
        in_special = allocate(60 * MiB)
    seen["with a pluggable pool"] = [reserved(), control.memory(0, "malloc")]
    del in_pool, in_special, outside, plain, special
    torch.cuda.empty_cache()
    seen["used at the end"] = control.memory(0)

    pinned = torch.arange(1000, pin_memory=True)
    seen["pinned"] = [pinned.is_pinned(), torch.arange(3).is_pinned(), control.memory(0)]
    there = pinned.cuda(non_blocking=True)
    seen["there and back"] = there.cpu().equal(pinned)
    seen["zeros"] = torch.zeros(10 * MiB, dtype=torch.uint8, device="cuda").cpu().any().item()
    if hasattr(torch.cuda, "host_memory_stats"):
        seen["host bytes"] = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return seen


def test_memory_pools_pluggable_allocators_and_pinned_memory_work(gpu, tmp_path):
    seen = gpu.run(use_pools_and_pinned_memory, args=[str(tmp_path)], memory="1GiB")
    assert seen.pop("host bytes", 8192) == 8192
    assert seen == {
        "pools": 2,
        "with a pluggable pool": [120 * MiB, 120 * MiB],  # 40, a segment of 20, 60
        "used at the end": 0,
        "pinned": [True, False, 0],
        "there and back": True,
        "zeros": False,
    }


def ask_the_oracle():
    import torch

    pieces = [allocate(30 * MiB) for _ in range(10)]
    del pieces[::2]
    before = torch.cuda.memory_stats(0)
    snapshot = len(torch.cuda.memory_snapshot())
    calls = control.count("cudaMalloc")
    answers = [control.would_fit(size) for size in (724 * MiB, 874 * MiB, 874 * MiB + 1, 2 * GiB)]
    unchanged = torch.cuda.memory_stats(0) == before and len(torch.cuda.memory_snapshot()) == snapshot
    unchanged = unchanged and control.count("cudaMalloc") == calls
    truth = [error_of(allocate, size) for size in (874 * MiB, 874 * MiB + 1)]
    thread = threading.Thread(target=time.sleep, args=[0.5])
    thread.start()
    return {
        "answers": answers,
        "unchanged": unchanged,
        "truth": truth,
        "with threads": error_of(control.would_fit, 1),
    }


def test_the_oracle_tells_what_would_fit_and_changes_nothing(gpu):
    # 1024 MiB less five kept segments of 30 MiB: the five freed ones are flushed for a large request.
    assert gpu.run(ask_the_oracle, memory="1GiB") == {
        "answers": [True, True, False, False],
        "unchanged": True,
        "truth": [None, "OutOfMemoryError"],
        "with threads": "RuntimeError",
    }


# ---- streams, events, captures ----


def hold_streams():
    import torch

    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    seen = {"pending": []}

    def free_one_used_on(stream):
        block = allocate(30 * MiB)
        block.record_stream(stream)

    control.hold()
    free_one_used_on(side)
    seen["pending"].append(pending() // MiB)
    allocate(1)
    seen["pending"].append(pending() // MiB)
    control.complete(other)
    allocate(1)
    seen["pending"].append(pending() // MiB)
    control.complete(side)
    seen["pending"].append(pending() // MiB)  # the allocator has not looked yet
    allocate(1)
    seen["pending"].append(pending() // MiB)
    control.release()

    # Only the stream that is held waits, and a stream that waits for it.
    with control.held(side):
        events = [torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()]
        events[0].record(side)
        events[1].record(other)
        seen["held alone"] = [events[0].query(), events[1].query()]
        other.wait_event(events[0])
        events[2].record(other)
        seen["waits for it"] = [events[2].query(), side.query(), other.query()]
    seen["released"] = [event.query() for event in events] + [side.query(), other.query()]

    # A synchronising call completes what it waits for; or blocks, if asked to, until someone releases.
    with control.held():
        free_one_used_on(side)
        torch.cuda.synchronize()
        allocate(1)
        seen["synchronised"] = pending()
    control.hold(block=True)
    events[0].record(side)
    threading.Timer(0.4, control.release).start()
    started = time.monotonic()
    events[0].synchronize()
    seen["blocked"] = time.monotonic() - started > 0.3
    # An OOM waits for pending frees, as it does on a GPU.
    control.hold()
    for _ in range(3):
        free_one_used_on(side)
    seen["flushed"] = [error_of(allocate, 95 * MiB), pending()]
    return seen


def test_a_test_decides_when_events_complete_and_pending_frees_follow(gpu):
    assert gpu.run(hold_streams, memory="100MiB") == {
        "pending": [30, 30, 30, 30, 0],
        "held alone": [False, True],
        "waits for it": [False, False, False],
        "released": [True, True, True, True, True],
        "synchronised": 0,
        "blocked": True,
        "flushed": [None, 0],
    }


def capture_graphs():
    import torch

    seen = {}
    source, target = torch.arange(4).cuda(), torch.zeros(4, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
        kept = allocate(5 * MiB)
        seen["capturing"] = torch.cuda.is_current_stream_capturing()
        seen["while capturing"] = [reserved() > 0, error_of(torch.cuda.memory_snapshot)]
    seen["captured"] = target.cpu().tolist()
    graph.replay()
    seen["replayed"] = target.cpu().tolist()
    seen["pools"] = len({segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()})
    del kept

    # Another thread's cudaFree breaks a capture: why nobody may empty the cache meanwhile.
    runtime, foreign, free = ctypes.CDLL(None), ctypes.c_void_p(), torch.cuda.mem_get_info(0)[0]
    runtime.cudaMalloc(ctypes.byref(foreign), ctypes.c_size_t(60 * MiB))
    seen["taken by another library"] = free - torch.cuda.mem_get_info(0)[0]

    def clear():
        seen["clearing"] = runtime.cudaFree(foreign)

    def capture_beside_a_clear():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            target.add_(1)
            thread = threading.Thread(target=clear)
            thread.start()
            thread.join()

    seen["capture beside a clear"] = error_of(capture_beside_a_clear) is not None
    torch.cuda.synchronize()
    seen["afterwards"] = [torch.cuda.is_current_stream_capturing(), error_of(allocate, MiB)]
    return seen


def test_graphs_are_captured_replayed_and_broken_by_another_threads_free(gpu):
    assert gpu.run(capture_graphs, memory="1GiB") == {
        "capturing": True,
        "while capturing": [True, None],
        "captured": [0, 0, 0, 0],
        "replayed": [0, 1, 2, 3],
        "pools": 2,
        "taken by another library": 60 * MiB,
        "clearing": 900,  # cudaErrorStreamCaptureUnsupported
        "capture beside a clear": True,
        "afterwards": [False, None],
    }


# ---- pauses, failures, counts ----


def took(function, *args):
    started = time.monotonic()
    function(*args)
    return time.monotonic() - started


def inject():
    import torch

    seen = {}
    torch.cuda.init()
    # From the environment: the first cudaMalloc pauses 300 ms, the second fails. (Ever larger: not cached.)
    seen["first"] = 0.3 <= took(allocate, 20 * MiB) < 2
    seen["second"] = [error_of(allocate, 30 * MiB), stat("num_alloc_retries"), stat("num_ooms")]
    # The third from now on fails once: the allocator flushes and tries again.
    control.fail("cudaMalloc", 3)
    kept = []
    for size in (40, 50, 60):
        kept.append(allocate(size * MiB))
        seen.setdefault("retries", []).append(stat("num_alloc_retries"))
    control.forgive()
    control.fail("cudaMalloc", 0)
    seen["every"] = [error_of(allocate, 70 * MiB), error_of(allocate, 80 * MiB), stat("num_ooms")]
    control.forgive()
    control.pause("cudaMalloc", 0, 100)
    control.pause("cudaFree", 1, 150)
    seen["pauses"] = [took(allocate, size * MiB) >= 0.1 for size in (90, 100)]
    seen["freed"] = took(torch.cuda.empty_cache) >= 0.15
    control.forgive()
    seen["quick"] = took(allocate, 90 * MiB) < 0.1

    # The pause holds what torch holds: the allocator's lock, and so anyone who asks it for statistics.
    control.pause("cudaMalloc", 1, 400)
    thread = threading.Thread(target=allocate, args=[100 * MiB])
    thread.start()
    while not control.inside("cudaMalloc"):
        time.sleep(0.001)
    seen["statistics"] = took(torch.cuda.memory_stats, 0) > 0.2
    thread.join()
    seen["inside at the end"] = control.inside("cudaMalloc")

    before = control.counts()
    allocate(110 * MiB)
    allocate(110 * MiB)  # from the cache: no call
    after = control.counts()
    seen["calls"] = {
        name: after[name] - before.get(name, 0)
        for name in ("cudaMalloc", "cudaFree")
        if after[name] != before.get(name, 0)
    }
    return seen


def test_pauses_and_failures_hit_the_call_they_name(gpu):
    seen = gpu.run(
        inject,
        memory="1GiB",
        env={"EMULATED_GPU_PAUSE": "cudaMalloc:1:300", "EMULATED_GPU_FAIL": "cudaMalloc:2"},
    )
    assert seen == {
        "first": True,
        "second": [None, 1, 0],
        "retries": [1, 1, 2],
        "every": ["OutOfMemoryError", "OutOfMemoryError", 2],
        "pauses": [True, True],
        "freed": True,
        "quick": True,
        "statistics": True,
        "inside at the end": 0,
        "calls": {"cudaMalloc": 1},
    }


# ---- devices and contexts ----


def look_at_devices():
    import torch

    seen = {"count": torch.cuda.device_count()}
    torch.cuda.init()
    torch.cuda.memory_stats(1)
    properties = [torch.cuda.get_device_properties(device) for device in range(2)]
    seen["sizes"] = [each.total_memory // MiB for each in properties]
    seen["uuids"] = len({str(each.uuid) for each in properties}) if hasattr(properties[0], "uuid") else 2
    contexts = lambda: [control.has_context(0), control.has_context(1)]  # noqa: E731
    seen["contexts"] = [contexts()]
    kept = allocate(MiB)
    torch.cuda.memory_stats(1)
    seen["contexts"].append(contexts())
    seen["torch says"] = [torch._C._cuda_hasPrimaryContext(device) for device in range(2)]
    control.external_malloc(1, 100 * MiB)
    seen["free"] = [torch.cuda.mem_get_info(device)[0] // MiB for device in range(2)]
    seen["contexts"].append(contexts())
    seen["made"] = control.contexts_made()
    moved = kept.to("cuda:1")
    seen["accounted"] = [moved.device.index, accounted(0), accounted(1)]

    child = os.fork()
    if child == 0:
        os._exit(0 if error_of(allocate, 1) == "RuntimeError" else 1)
    seen["a forked child is refused"] = os.waitpid(child, 0)[1] == 0
    return seen


def test_two_devices_are_told_apart_and_contexts_are_made_only_where_cuda_would(gpu):
    seen = gpu.run(look_at_devices, memory="1GiB,2GiB", devices=2)
    assert seen == {
        "count": 2,
        "sizes": [1024, 2048],
        "uuids": 2,
        "contexts": [[False, False], [True, False], [True, True]],
        "torch says": [True, False],
        "free": [1022, 1948],
        "made": 2,
        "accounted": [1, True, True],
        "a forked child is refused": True,
    }


VISIBLE = """
import torch
result = [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda._device_count_nvml(),
          [torch.cuda.mem_get_info(device)[1] >> 20 for device in range(torch.cuda.device_count())],
          str(getattr(torch.cuda.get_device_properties(0), "uuid", "e301a7ed-0000-4000-8000-000000000002"))]
"""


def test_cuda_visible_devices_hides_and_reorders_also_for_nvml(gpu):
    asked = {"CUDA_VISIBLE_DEVICES": "2,0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    seen = gpu.run(VISIBLE, memory="1GiB,2GiB,3GiB", devices=3, env=asked)
    assert seen == [True, 2, 2, [3072, 1024], "e301a7ed-0000-4000-8000-000000000002"]


# ---- real libraries ----


def run_real_libraries():
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).cuda().eval()
    token = torch.zeros(1, 256, dtype=torch.long, device="cuda")
    before, cache = torch.cuda.memory_allocated(), None
    with torch.inference_mode():
        for _ in range(4):
            cache = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values
    seen = {"cudnn": torch.backends.cudnn.enabled}
    seen["cache grows"] = torch.cuda.memory_allocated() - before >= 2 * 2 * 4 * 256 * 128 * 4
    del model, cache

    unet = UNet2DConditionModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )
    vae = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    )
    pipeline = StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        scheduler=DDIMScheduler(),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).to("cuda")
    embeddings = torch.zeros(1, 8, 32, device="cuda")
    seen["images"], seen["growth"] = [], []
    for size in (256, 512, 768):
        image = pipeline(
            prompt_embeds=embeddings,
            negative_prompt_embeds=embeddings,
            height=size,
            width=size,
            num_inference_steps=2,
        ).images[0]
        seen["images"].append(image.size)
        seen["growth"].append(reserved())
    return seen


def test_a_diffusion_pipeline_and_a_language_model_run(gpu):
    seen = gpu.run(run_real_libraries, memory="4GiB", timeout=120)
    assert seen["cache grows"]
    assert not seen["cudnn"]
    assert seen["images"] == [[256, 256], [512, 512], [768, 768]]
    assert seen["growth"][0] < seen["growth"][1] < seen["growth"][2]


# ---- the fixture, the script, the build ----


def raises():
    raise ValueError("the body's own words")


def hangs():
    time.sleep(60)


def test_a_body_that_fails_hangs_or_dies_says_what_and_where(gpu):
    with pytest.raises(gpu.Failed, match="the body's own words"):
        gpu.run(raises)
    with pytest.raises(gpu.Hung, match=r"(?s)had not ended after 2 s.*in hangs"):
        gpu.run(hangs, timeout=2)
    with pytest.raises(gpu.Failed, match="died of SIGKILL"):
        gpu.run("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(gpu.Failed, match="not JSON serializable"):
        gpu.run("result = object()")
    with pytest.raises(TypeError, match="top level"):
        gpu.run(lambda: None)


def test_a_command_started_on_the_gpu_ends_with_the_test(emulation):
    from emulator.gpu import Gpu

    gpu = Gpu(lambda: emulation)
    command = [
        sys.executable,
        "-c",
        "import torch, time; print(torch.cuda.is_available(), flush=True); time.sleep(60)",
    ]
    process = gpu.popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    process.stdout.close()
    gpu.close()
    assert process.poll() is not None


def test_the_run_script_builds_starts_and_leaves_other_programs_alone():
    ask = "import torch; print(torch.cuda.device_count(), torch.cuda.mem_get_info(1))"
    done = subprocess.run(
        [RUN, "--memory", "1GiB", "--devices", "2", "--expandable", "--", sys.executable, "-c", ask],
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"2 ({GiB}, {GiB})\n", done.stderr
    assert "this is no GPU but an emulation" in done.stderr
    shell = subprocess.run(
        [RUN, "--", "bash", "-c", "sleep 0; gcc --version >/dev/null; echo $0 fine"],
        capture_output=True,
        text=True,
    )
    assert (shell.stdout, shell.stderr, shell.returncode) == ("bash fine\n", "", 0)
    nonsense = subprocess.run(
        [RUN, "--memory", "much", "--", sys.executable, "-c", ask], capture_output=True, text=True
    )
    assert nonsense.returncode == 78
    assert "EMULATED_GPU_MEMORY=much is not understood; allowed:" in nonsense.stderr


def test_it_is_built_once_and_what_is_missing_is_named(emulation, tmp_path, monkeypatch):
    built = {path: path.stat().st_mtime_ns for path in emulation.iterdir()}
    assert build.build(sys.executable) == emulation
    assert {path: path.stat().st_mtime_ns for path in emulation.iterdir()} == built

    with pytest.raises(build.CannotBuild, match="has no torch"):
        build.build("/nonexistent/python")
    monkeypatch.setattr(build, "CACHE", tmp_path)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(build.CannotBuild, match="gcc is not on PATH"):
            build.build(sys.executable)
    torch = build.find_torch(sys.executable)
    without = build.Torch(torch.version, "11.8", tmp_path)
    monkeypatch.setattr(build, "find_torch", lambda python: without)
    with pytest.raises(build.CannotBuild, match=r"no complete headers of CUDA 11"):
        build.build(sys.executable)


def test_every_function_of_the_runtime_that_the_allocator_calls_is_emulated(emulation):
    torch = build.find_torch(sys.executable)
    nm = ["nm", "-D", str(torch.packages / "torch" / "lib" / "libc10_cuda.so")]
    wanted = set(re.findall(r" U (cuda\w+)", subprocess.run(nm, capture_output=True, text=True).stdout))
    there = subprocess.run(
        ["nm", "-D", str(emulation / build.PRELOAD)], capture_output=True, text=True
    ).stdout
    missing = wanted - set(re.findall(r" T (cuda\w+)", there))
    assert len(wanted) > 30
    assert missing - {"cudaGraphNodeGetDependencies"} == set()  # asked only under an option that is off
