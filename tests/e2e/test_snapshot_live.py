# SPDX-License-Identifier: Apache-2.0
"""`torchmem snapshot --pid`: a live process is asked for its snapshot, as a user does it."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.needs_emulation


def asked(*options: str, pid: int | None = None, **more) -> tuple[int, str, str]:
    """What the command says of a process, this one where none is named."""
    import subprocess
    import sys

    run = "import sys; from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", run, "snapshot", "--pid", str(pid or os.getpid()), *options],
        capture_output=True,
        text=True,
        check=False,
        **more,
    )
    return done.returncode, done.stdout, done.stderr


def asked_as(user: int) -> tuple[int, str, str]:
    """The same of another user, who need not be able to start Python here."""
    from opentelemetry_instrumentation_torchmem.cli import snapshot_file, snapshot_live

    reading, writing = os.pipe()
    pid = os.getpid()
    if os.fork() == 0:
        os.setuid(user)
        try:
            snapshot_live.ask(pid, 1 << 20)
        except snapshot_file.SnapshotError as error:
            os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        wrong = said.read()
    return 2 if wrong else 0, "", wrong


def serving(**options) -> None:
    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

    TorchMemInstrumentor().instrument(**{"live_snapshots": True, **options})


def a_server(directory: str) -> dict:
    import threading

    import torch

    from opentelemetry_instrumentation_torchmem.requests.track import track

    serving()
    mib = 1 << 20
    kept = [torch.empty(size * mib, dtype=torch.uint8, device="cuda") for size in (30, 5, 40, 12)]
    del kept[1]
    ends, began = threading.Event(), threading.Event()

    def request() -> None:
        with track("answer"):
            began.set()
            ends.wait()

    busy = threading.Thread(target=request)
    busy.start()
    began.wait()
    code, said, wrong = asked("--save", "kept.pickle", cwd=directory)  # beside a request that does not end
    ends.set()
    busy.join()
    again = asked("--no-picture", cwd=directory)[0]
    limit = torch.cuda.mem_get_info()[1]
    return {
        "code": code,
        "said": said,
        "wrong": wrong,
        "again": again,
        "limit": limit,
        "pid": os.getpid(),
        "segments": torch.cuda.memory_snapshot(),
        "threads": [thread.name for thread in threading.enumerate()],
    }


def test_a_live_process_is_drawn_and_its_snapshot_kept(gpu, tmp_path):
    import pickle

    told = gpu.run(a_server, args=[str(tmp_path)], memory="1GiB")
    assert (told["code"], told["wrong"], told["again"]) == (0, "", 0)
    assert f"process {told['pid']}" in told["said"]
    assert (tmp_path / f"torchmem-{told['pid']}.html").read_text().startswith("<!DOCTYPE html>")
    kept = tmp_path / "kept.pickle"
    assert kept.stat().st_mode & 0o777 == 0o600
    whole = pickle.loads(kept.read_bytes())
    expected = [(each["address"], each["total_size"], len(each["blocks"])) for each in told["segments"]]
    assert [
        (each["address"], each["total_size"], len(each["blocks"])) for each in whole["segments"]
    ] == expected
    assert whole["device_traces"] == [[]]
    assert whole["torchmem"]["devices"]["0"]["total"] == told["limit"]  # what the doctor wants to know
    assert told["threads"].count("torchmem-snapshots") == 1


def one_that_refuses(why: str) -> dict:
    import torch

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor

    options = ("--no-picture",)
    serving(**({} if why != "off" else {"live_snapshots": False}))
    if why == "unused":
        return {"told": asked(*options)}
    kept = torch.empty(1 << 20, device="cuda")
    if why == "gone":
        TorchMemInstrumentor().uninstrument()
    if why == "captured":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            told = asked(*options)
    elif why == "forked":
        child = os.fork()
        if child == 0:
            os._exit(asked(*options)[0] * 16)
        told = asked(*options, pid=child)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 32
    elif why == "another user" and os.geteuid() == 0:
        told = asked_as(65534)
    elif why == "another user":  # seen from the process
        mine = os.geteuid
        os.geteuid = lambda: 65534
        told = asked(*options)
        os.geteuid = mine
    else:
        told = asked(*options)
    return {"told": told, "kept": kept.numel(), "after": asked(*options)}


@pytest.mark.parametrize(
    ("why", "said", "alloc_conf"),
    [
        ("off", "it was not started with OTEL_PYTHON_TORCHMEM_LIVE_SNAPSHOTS=true", None),
        ("unused", "or has not used CUDA yet", None),
        ("gone", "it cannot be asked", None),
        ("captured", "it gives none: it captures a CUDA graph", None),
        ("forked", "it cannot be asked", None),
        ("backend", "it gives none: the allocator's backend is cudaMallocAsync", "backend:cudaMallocAsync"),
        ("another user", "it gives none: it is another user's", None),
    ],
)
def test_a_process_that_gives_none_says_why(gpu, why, said, alloc_conf):
    told = gpu.run(one_that_refuses, args=[why], memory="1GiB", alloc_conf=alloc_conf)
    code, out, wrong = told["told"]
    assert (code, out) == (2, "")
    assert said in wrong
    assert wrong.count("\n") == 1
    if why in ("captured", "forked", "another user"):  # and then it gives one to who may ask
        assert told["after"][0] == 0


def one_that_is_asked_badly() -> dict:
    import socket
    import threading
    from time import monotonic, sleep

    import torch

    from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, snapshot_server

    serving()
    kept = [torch.empty(512, dtype=torch.uint8, device="cuda") for _ in range(20_000)][::2]

    def asker() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(snapshot_server.address(os.getpid()))
        return connection

    for _ in range(20):
        asker().close()  # who asks and goes
    answered = asked("--no-picture")
    idle = asker()  # who asks and does not read
    sleep(0.5)
    longest, until = 0.0, monotonic() + 1
    while monotonic() < until:  # a server goes on meanwhile
        began = monotonic()
        torch.empty(512, dtype=torch.uint8, device="cuda")
        longest = max(longest, monotonic() - began)

    def waiting() -> int:
        return [each.name for each in threading.enumerate()].count("torchmem-snapshots")

    def ended() -> bool:
        until = monotonic() + 10
        while waiting() and monotonic() < until:
            sleep(0.01)
        return not waiting()

    TorchMemInstrumentor().uninstrument()
    idle.close()
    ends = [ended()]
    serving()
    again = asked("--no-picture")[0]
    serves = waiting()
    TorchMemInstrumentor().uninstrument()  # while nobody asks
    ends.append(ended())
    return {
        "answered": answered,
        "longest": longest,
        "kept": len(kept),
        "again": again,
        "serves": serves,
        "ends": ends,
    }


def test_who_asks_badly_holds_up_nobody(gpu):
    told = gpu.run(one_that_is_asked_badly, memory="1GiB")
    assert told["answered"][0] == 0, told["answered"]
    assert told["longest"] < 0.25
    assert told["again"] == 0
    assert told["serves"] == 1
    assert told["ends"] == [True, True]


def test_a_process_that_is_not_there(tmp_path):
    code, out, wrong = asked(pid=2**22 + 1, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert "there is no such process here" in wrong
    assert not list(tmp_path.iterdir())
