# SPDX-License-Identifier: Apache-2.0
"""The guard on real servers under load: sick, not ready, drained, cleared, ready again or replaced; not one
request lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from emulator.gpu import Gpu

pytestmark = pytest.mark.needs_emulation

HERE = Path(__file__).parent
SERVER = HERE / "guarded_server.py"
PERIOD, FAILURES = 0.25, 2
TIMING = {
    "sick_for": 0.5, "cool_down": 0.5, "probe_period": PERIOD, "probe_failures": FAILURES, "drain_limit": 60,
    "hold_limit": 20, "clear_limit": 60, "restart_limit": 120, "min_uptime": 0,
}  # fmt: skip
CYCLES = 20


class Supervisor:
    """Holds the listening socket, and starts a fresh server on it whenever one has ended."""

    def __init__(self, gpu: Gpu, told: dict[str, Any], memory: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.exits: list[int] = []
        self._arguments = (gpu, told, memory)
        self._ended = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def _start(self) -> subprocess.Popen[Any]:
        gpu, told, memory = self._arguments
        number = self.listener.fileno()
        return gpu.popen(
            [sys.executable, str(SERVER), json.dumps(told), str(number)],
            memory=memory,
            pass_fds=[number],
            env={"GUARDED_WATCHES": "1"},
        )

    def _supervise(self) -> None:
        while not self._ended:
            try:
                self.exits.append(self._process.wait(0.1))
            except subprocess.TimeoutExpired:
                continue
            if not self._ended:
                self._process = self._start()

    def stop(self) -> None:
        self._ended = True
        self._thread.join()
        self._process.kill()
        self._process.wait(20)
        self.listener.close()


class Balancer:
    """Probes readiness as Kubernetes does, and sends new requests only while it is ready."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)
        self.seen: list[int] = []
        """Each status, once for each time that it held; 0 where nobody answered."""
        self.failures = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            try:
                status = self._client.get("/readyz").status_code
            except httpx.HTTPError:
                status = 0
            if self.now != status:
                self.seen.append(status)
            self.failures = 0 if status == 200 else self.failures + 1

    @property
    def now(self) -> int | None:
        return self.seen[-1] if self.seen else None

    @property
    def sends(self) -> bool:
        return self.failures < FAILURES

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()


class Load:
    """Clients that go on until they are stopped; what came back is counted."""

    def __init__(self, url: str, balancer: Balancer) -> None:
        self.url = url
        self.balancer = balancer
        self.outcomes: Counter[str] = Counter()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def go(self, ask: Callable[[httpx.Client], str], pause: float, always: bool = False) -> None:
        """``always``: also while the balancer would not send."""
        thread = threading.Thread(target=self._run, args=(ask, pause, always))
        self._threads.append(thread)
        thread.start()

    def _run(self, ask: Callable[[httpx.Client], str], pause: float, always: bool) -> None:
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self._ended.wait(pause):
                if always or self.balancer.sends:
                    try:
                        outcome = ask(client)
                    except Exception as error:
                        outcome = f"lost: {error!r}"
                    self.outcomes[outcome] += 1

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    @property
    def lost(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.outcomes.items() if not outcome.startswith("200")}


def generate(client: httpx.Client) -> str:
    answer = client.post("/generate", json={"prompt": "once", "max_new_tokens": 2})
    return f"{answer.status_code} generate {answer.headers.get('connection', 'keep-alive')}"


def stream(client: httpx.Client) -> str:
    asked = {"prompt": "once upon", "max_new_tokens": 4}
    with client.stream("POST", "/generate/stream", json=asked) as answer:
        text = "".join(answer.iter_text())
    return f"{answer.status_code} stream" if text.endswith("data: [DONE]\n\n") else "cut"


def compute(client: httpx.Client) -> str:
    return f"{client.post('/compute', params={'seconds': 0.02}).status_code} compute"


def hold(url: str, mib: int) -> str:
    with httpx.stream("POST", f"{url}/hold", params={"mib": mib}, timeout=120) as answer:
        text = "".join(answer.iter_text())
    return f"{answer.status_code} hold" if text.endswith("end\n") else f"cut: {text[-40:]!r}"


def until(true: Callable[[], Any], seconds: float = 90, what: str = "") -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return found


@contextmanager
def guarded(
    gpu: Gpu, told: dict[str, Any], memory: str = "3GiB"
) -> Iterator[tuple[Supervisor, Balancer, Load]]:
    supervisor = Supervisor(gpu, told, memory)
    try:
        until(lambda: answers(supervisor.url, "/readyz") == 200, what="it starts")
        balancer = Balancer(supervisor.url)
        load = Load(supervisor.url, balancer)
        try:
            yield supervisor, balancer, load
        finally:
            load.stop()
            balancer.stop()
    finally:
        supervisor.stop()


def answers(url: str, path: str) -> int:
    try:
        return httpx.get(url + path, timeout=30).status_code
    except httpx.HTTPError:
        return 0


def told_by(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/told", timeout=30).json()


def transitions(told: dict[str, Any]) -> dict[str, int]:
    counts = told["metrics"]["torch.memory.guard.transitions"]
    return {name: count for name, count in counts.items() if count}


@pytest.mark.timeout(900)
def test_twenty_times_headroom_falls_short_and_comes_back_and_no_request_is_lost(gpu):
    told = {"app": "example", "policy": "headroom", "need_mib": 700, "timing": TIMING}
    with guarded(gpu, told) as (supervisor, balancer, load), ThreadPoolExecutor(1) as one_more:
        for ask in (generate, stream):
            load.go(ask, pause=0.1)
        load.go(compute, pause=0.15, always=True)  # who has not heard yet that it is not ready
        before = told_by(supervisor.url)["trapped"]
        for cycle in range(CYCLES):
            holding = one_more.submit(hold, supervisor.url, 2600)
            until(lambda: told_by(supervisor.url)["trapped"] > before + (1000 << 20), what="it is trapped")
            load.outcomes[holding.result()] += 1
            until(lambda done=cycle + 1: transitions(told_by(supervisor.url)).get("recovered", 0) >= done)
        load.stop()
        until(lambda: balancer.now == 200)
        at_the_end = told_by(supervisor.url)
    print(dict(load.outcomes), balancer.seen.count(503), transitions(at_the_end))
    assert load.lost == {}
    assert supervisor.exits == []
    assert load.outcomes["200 hold"] == CYCLES
    assert load.outcomes["200 compute"] > 10 * CYCLES
    closed = load.outcomes["200 generate close"]
    assert closed > 0, "connections that are kept alive are told to close"
    assert load.outcomes["200 generate keep-alive"] > closed
    counts = transitions(at_the_end)
    assert counts["drain_begun"] == counts["recovered"] == CYCLES
    assert set(counts) <= {"drain_begun", "clear_begun", "recovered", "busy"}
    assert balancer.seen.count(503) == CYCLES, "each time whoever probes has seen it"
    won = at_the_end["metrics"]["torch.memory.guard.headroom_won"]
    released = at_the_end["metrics"]["torch.memory.guard.released"]
    assert won["drain"] > CYCLES * 500 << 20, "it was held by the requests in flight"
    assert won["clear"] < 100 << 20, "clearing wins none: the allocator's own flush is in it"
    assert released["clear"] > CYCLES * 1000 << 20
    assert len(at_the_end["spans"]) == CYCLES
    span = at_the_end["spans"][0]
    assert span["attributes"]["torch.memory.guard.outcome"] == "recovered"
    assert "is below the need of 700 MiB" in span["attributes"]["torch.memory.guard.reason"]
    told_of = [event["torch.memory.guard.transition"] for event in span["events"]]
    assert (told_of[0], told_of[-1]) == ("drain_begun", "recovered")


@pytest.mark.timeout(900)
def test_the_slack_policy_with_the_storys_numbers_on_a_clock_that_runs_faster(gpu):
    timing = {"cool_down": 300, "probe_period": 10, "probe_failures": 3, "drain_limit": 6000, "min_uptime": 0}
    timing |= {"hold_limit": 20, "clear_limit": 6000, "restart_limit": 60000}
    told = {"app": "example", "policy": "slack", "timing": timing, "faster": 100, "weights_mib": 400}
    cycles = CYCLES
    with guarded(gpu, told) as (supervisor, _, load):
        load.go(generate, pause=0.2)
        load.go(stream, pause=0.2)
        load.go(compute, pause=0.15, always=True)
        for cycle in range(cycles):
            assert httpx.post(f"{supervisor.url}/burst", params={"mib": 1500}, timeout=60).status_code == 200
            until(lambda done=cycle + 1: transitions(told_by(supervisor.url)).get("recovered", 0) >= done)
        load.stop()
        at_the_end = told_by(supervisor.url)
    print(dict(load.outcomes), transitions(at_the_end))
    assert load.lost == {}
    counts = transitions(at_the_end)
    assert counts["drain_begun"] == counts["recovered"] == cycles
    reasons = [span["attributes"]["torch.memory.guard.reason"] for span in at_the_end["spans"]]
    assert all("of what is held is unused, 35 % allowed" in reason for reason in reasons)
    released = at_the_end["metrics"]["torch.memory.guard.released"]
    assert released["clear"] > cycles * 1000 << 20
    assert released["drain"] < 500 << 20


@pytest.mark.timeout(600)
def test_what_clearing_cannot_win_is_won_by_a_fresh_worker_and_no_request_is_lost(gpu, tmp_path):
    ready_file = tmp_path / "ready"
    told = {"app": "bare", "policy": "headroom", "need_mib": 700, "restart": "sigterm", "timing": TIMING}
    told |= {"ready_file": str(ready_file)}
    restarts = 2
    with guarded(gpu, told) as (supervisor, balancer, load):
        for _ in range(3):
            load.go(compute, pause=0.05)
        first = httpx.get(f"{supervisor.url}/pid").json()
        until(ready_file.exists)
        for restart in range(restarts):
            assert httpx.post(f"{supervisor.url}/leak", params={"mib": 2600}, timeout=60).status_code == 200
            until(lambda: balancer.now != 200)
            until(lambda: not ready_file.exists() or supervisor.exits)
            until(lambda count=restart + 1: len(supervisor.exits) == count, what="it ends")
            until(lambda: balancer.now == 200 and balancer.sends, what="a fresh one serves")
        last = httpx.get(f"{supervisor.url}/pid").json()
        load.stop()
        fresh = told_by(supervisor.url)
    print(dict(load.outcomes), supervisor.exits, balancer.seen)
    assert load.lost == {}
    assert load.outcomes["200 compute"] > 50
    assert last != first
    assert set(supervisor.exits) <= {0, -15}
    assert transitions(fresh) == {}


@pytest.mark.timeout(600)
def test_what_live_memory_traps_is_won_by_compaction_and_no_request_is_lost(gpu):
    told = {"app": "bare", "policy": "headroom", "need_mib": 1500, "compacts": True, "timing": TIMING}
    with guarded(gpu, told) as (supervisor, balancer, load):
        for always in (True, False, False):
            load.go(compute, pause=0.05, always=always)
        assert httpx.post(f"{supervisor.url}/leak", params={"mib": 2200}, timeout=60).status_code == 200
        until(lambda: balancer.now == 503)
        until(lambda: balancer.now == 200, what="it is ready again")
        load.stop()
        told = told_by(supervisor.url)
    print(dict(load.outcomes), transitions(told), told["metrics"]["torch.memory.guard.headroom_won"])
    assert load.lost == {}
    assert supervisor.exits == []
    assert transitions(told) == {"drain_begun": 1, "clear_begun": 1, "recovered": 1}
    won = told["metrics"]["torch.memory.guard.headroom_won"]
    assert won["clear"] == 0
    assert won["compaction"] > 800 << 20


UVICORN = [
    "-m", "uvicorn", "--workers", "2", "--log-level", "warning", "--app-dir", str(HERE), "guarded_server:app",
]  # fmt: skip
GUNICORN = [
    "-m", "gunicorn", "--workers", "2", "--worker-class", "asgi", "--log-level", "warning",
    "--chdir", str(HERE), "guarded_server:app",
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "bind"), [(UVICORN, "--port={}"), (GUNICORN, "--bind=127.0.0.1:{}")])
def test_workers_that_share_a_socket_gate_arrivals_and_the_supervisor_replaces_one_at_a_time(
    gpu, tmp_path, command, bind
):
    told = {"app": "bare", "policy": "headroom", "need_mib": 700, "restart": "sigterm", "timing": TIMING}
    told |= {"places": str(tmp_path / "places")}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    errors = tmp_path / "errors"
    with errors.open("wb") as log:
        process = gpu.popen(
            [sys.executable, *command, bind.format(port)],
            memory="3GiB",
            env={"GUARDED": json.dumps(told), "GUARDED_WATCHES": "1"},
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    asked: set[int] = set()

    def pids() -> set[int]:
        asked.update(httpx.get(f"{url}/pid", timeout=30).json() for _ in range(20))
        return asked

    try:
        until(lambda: answers(url, "/readyz") == 200)
        until(lambda: len(pids()) == 2)
        balancer = Balancer(url)
        load = Load(url, balancer)
        for _ in range(3):
            load.go(compute, pause=0.05, always=True)
        with httpx.Client(base_url=url, timeout=60) as one_worker:
            assert one_worker.post("/leak", params={"mib": 2600}).status_code == 200
        until(lambda: len(pids()) == 3, what="a fresh worker")
        load.stop()
        balancer.stop()
    finally:
        process.terminate()
        process.wait(30)
    print(dict(load.outcomes), balancer.seen)
    assert set(balancer.seen) == {200}, "where readiness steers nothing it stays ready"
    assert load.outcomes["200 compute"] > 50
    assert load.lost == {}
    assert "several workers take connections from one socket" in errors.read_text()


def test_the_example_server_is_guarded_where_it_is_asked_to_be(gpu):
    code = (
        f"import sys; sys.path.insert(0, {str(HERE.parents[1] / 'examples')!r}); import serve; from starlette"
    )
    code += ".testclient import TestClient; print(TestClient(serve.app).get('/readyz').status_code)"
    for asked, status in (("1", "200"), ("0", "404")):
        process = gpu.popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env={"SERVE_GUARD": asked, **os.environ}
        )
        assert process.communicate(timeout=120)[0].decode().split() == [status]
