# SPDX-License-Identifier: Apache-2.0
"""Places to drain in: real processes, real locks, kill -9 and fork."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opentelemetry_instrumentation_torchmem.guard import MemoryGuard, Places, Readings
from opentelemetry_instrumentation_torchmem.guard.machine import State, Timing
from opentelemetry_instrumentation_torchmem.guard.sharing import shares_listener

WORKER = """
import os, sys, time
from opentelemetry_instrumentation_torchmem.guard import MemoryGuard, Places, Readings
from opentelemetry_instrumentation_torchmem.guard.machine import State, Timing

timing = Timing(sick_for=0, cool_down=0.2, probe_period=0.1, probe_failures=1, drain_limit=100, min_uptime=0)
guard = MemoryGuard(
    lambda readings: "always sick", timing=timing, places=Places(sys.argv[1]), steers=True, interval=0.02,
    readings=lambda fresh: Readings((), time.monotonic(), cleared=fresh),
)
if sys.argv[2] == "holds":  # something in flight for ever: it drains until it is killed
    guard.gate.lane().count += 1
if sys.argv[2] == "forks":
    guard.gate.lane().count += 1
guard.start()
told, child = None, 0
while True:
    state = guard.state.value
    if state != told:
        told = state
        print(time.monotonic(), state, flush=True)
        if sys.argv[2] == "forks" and state == "draining" and not child:
            child = os.fork()
            if not child:
                time.sleep(60)
            print("child", child, flush=True)
    time.sleep(0.005)
"""


def worker(folder: Path, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), what], stdout=subprocess.PIPE, text=True
    )


def until(true, seconds: float = 60):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return found


@pytest.fixture
def processes():
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def free(folder: Path) -> bool:
    places = Places(folder)
    taken = places.take()
    places.release()
    return taken


def test_of_three_workers_at_most_one_drains_and_kill_9_frees_its_place(tmp_path, processes):
    processes += [worker(tmp_path, "holds") for _ in range(3)]
    os.set_blocking(processes[0].stdout.fileno(), False)
    told: dict[int, list[str]] = {}

    def draining() -> list[int]:
        for number, process in enumerate(processes):
            os.set_blocking(process.stdout.fileno(), False)
            while line := process.stdout.readline():
                told.setdefault(number, []).append(line.split()[1])
        return [number for number, states in told.items() if states[-1] != "serving"]

    killed: list[int] = []
    for _ in range(3):
        (drainer,) = until(lambda: [number for number in draining() if number not in killed])
        end = time.monotonic() + 0.5
        while time.monotonic() < end:  # the others are sick all the while
            assert [number for number in draining() if number not in killed] == [drainer]
            time.sleep(0.02)
        if len(killed) < 2:
            assert not free(tmp_path)
        processes[drainer].send_signal(signal.SIGKILL)
        processes[drainer].wait()
        killed.append(drainer)
    assert sorted(killed) == [0, 1, 2], "each had its turn once the one before was killed"
    until(lambda: free(tmp_path))


def test_a_forked_child_does_not_keep_its_parents_place(tmp_path, processes):
    processes.append(worker(tmp_path, "forks"))
    stdout = processes[0].stdout
    child = next(int(line.split()[1]) for line in stdout if line.startswith("child"))
    try:
        assert not free(tmp_path), "the parent holds it still"
        processes[0].kill()
        processes[0].wait()
        os.kill(child, 0)  # it is alive
        until(lambda: free(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)


def test_places_are_as_many_as_named_and_their_files_stay(tmp_path):
    three = [Places(tmp_path, at_most=2) for _ in range(3)]
    assert [places.take() for places in three] == [True, True, False]
    assert [places.take() for places in three] == [True, True, False], "to ask twice takes no second one"
    three[0].release()
    assert three[2].take()
    assert {path.name for path in tmp_path.iterdir()} == {"torchmem-place-0", "torchmem-place-1"}
    for places in three:
        places.release()


def test_all_are_sick_only_if_there_are_others_and_each_says_so(tmp_path):
    workers = [Places(tmp_path) for _ in range(3)]
    workers[0].tell(True)
    assert not workers[0].all_sick(), "it is alone"
    workers[1].tell(True)
    workers[2].tell(False)
    assert not workers[0].all_sick()
    workers[2].tell(True)
    assert all(places.all_sick() for places in workers)
    workers[1].tell(False)
    assert not workers[2].all_sick()
    workers[1].begin_anew()  # it has ended
    assert workers[2].all_sick()
    for places in workers:
        places.begin_anew()


def test_restarts_are_bounded_over_all_workers_of_a_folder(tmp_path):
    now = 1_000_000.0
    workers = [Places(tmp_path, restarts=2, restarts_per=100) for _ in range(2)]
    granted = []
    for at in (0, 10, 20, 99, 101, 111, 112):
        granted.append(workers[len(granted) % 2].may_restart(lambda at=at: now + at))
    assert granted == [True, True, False, False, True, True, False]
    (tmp_path / "torchmem-restarts-0").write_bytes(b"\xff nonsense \x00")
    assert workers[0].may_restart(lambda: now + 113)


@pytest.mark.parametrize("what", [{"at_most": 0}, {"restarts": -1}])
def test_a_number_of_places_that_makes_no_sense_is_refused_in_one_line(tmp_path, what):
    with pytest.raises(ValueError, match=r"Places: \w+=\S+ is not allowed \(a whole number from") as error:
        Places(tmp_path, **what)
    assert "\n" not in str(error.value)


class Driven:
    """A guard that a test ticks, on a clock of its own."""

    def __init__(self, places=None, **options) -> None:
        self.now = 0.0
        self.sick: bool | None = True
        timing = Timing(sick_for=10, cool_down=100, probe_period=5, probe_failures=1, drain_limit=60,
                        min_uptime=0)  # fmt: skip
        self.guard = MemoryGuard(
            lambda readings: self.sick,
            timing=timing,
            places=places,
            clock=lambda: self.now,
            readings=lambda fresh: Readings((), self.now, cleared=fresh),
            clear=lambda: None,
            **options,
        )

    def pass_by(self, seconds: float) -> State:
        self.now += seconds
        self.guard.tick()
        if self.guard._clearing is not None:
            self.guard._clearing.join()
        return self.guard.state


def test_where_all_are_sick_all_keep_serving_and_none_is_restarted(tmp_path):
    one, other = Driven(Places(tmp_path)), Driven(Places(tmp_path))
    for each in (one, other, one, other):
        each.pass_by(0)
    assert one.pass_by(10) is State.DRAINING
    assert one.guard.ready(), "readiness would take the last ones away"
    assert one.pass_by(1) is State.SERVING
    assert one.guard._figures.transitions["still_sick"] == 1
    assert other.pass_by(11) is State.DRAINING, "they clear in turn"


def test_across_pods_a_callable_of_the_users_says_who_may(tmp_path):
    leases: list[str] = []
    held = [True]

    def lease():
        leases.append("asked")
        return None if held[0] else lambda: leases.append("released")

    driven = Driven(Places(tmp_path), lease=lease)
    driven.pass_by(0)
    assert driven.pass_by(10) is State.SERVING
    assert free(tmp_path), "the node's place is given back where the lease is not to be had"
    held[0] = False
    assert driven.pass_by(1) is State.DRAINING
    driven.sick = False
    driven.pass_by(5)
    assert driven.guard.state is State.SERVING
    assert leases == ["asked", "asked", "released"]


def test_no_restart_is_wanted_of_a_process_that_is_too_young():
    driven = Driven()
    driven.guard._timing = driven.guard._machine.timing = Timing(
        sick_for=10, cool_down=0, probe_period=5, probe_failures=1, drain_limit=60, min_uptime=100
    )
    driven.pass_by(0)
    driven.pass_by(10)
    assert driven.pass_by(5) is State.SERVING
    for _ in range(30):
        driven.pass_by(10)
        if driven.guard.state is State.RESTART_WANTED:
            break
    assert driven.guard.state is State.RESTART_WANTED
    assert driven.now >= 100
    assert not driven.guard.alive()
    assert driven.guard._figures.transitions["still_sick"] >= 2


# workers that share a socket


def test_a_listening_socket_is_shared_where_a_sibling_holds_it_and_not_with_the_parent_alone():
    script = (
        "import os, sys, socket, time\n"
        "from opentelemetry_instrumentation_torchmem.guard.sharing import shares_listener\n"
        "listener = socket.socket(fileno=int(sys.argv[1]))\n"
        "for line in sys.stdin:\n"
        "    print(shares_listener(listener.getsockname()[:2]), flush=True)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", script, str(listener.fileno())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

        def ask(process) -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        with subprocess.Popen(command, pass_fds=[listener.fileno()], **pipes) as one:
            assert ask(one) == "False", "its parent holds it and takes no connection"
            with subprocess.Popen(command, pass_fds=[listener.fileno()], **pipes) as two:
                assert (ask(one), ask(two)) == ("True", "True")
                two.stdin.close()
            assert ask(one) == "False"
            one.stdin.close()


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")
def test_another_process_that_listens_on_the_same_port_is_told_too():
    script = (
        "import socket, sys\n"
        "listener = socket.socket()\n"
        "listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "listener.bind(('127.0.0.1', int(sys.argv[1])))\n"
        "listener.listen()\n"
        "print('listens', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        own.bind(("127.0.0.1", 0))
        own.listen()
        address = own.getsockname()[:2]
        assert shares_listener(address) is False
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", script, str(address[1])], **pipes) as other:
            assert other.stdout.readline() == "listens\n"
            assert shares_listener(address) is True
            other.stdin.close()


def test_a_socket_in_the_filesystem_is_known_and_what_is_not_known_is_not_guessed(tmp_path):
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert shares_listener((path, None)) is False
    assert shares_listener(None) is None
    assert shares_listener(("127.0.0.1", 1)) is None
    assert shares_listener(("127.0.0.1", 80), proc=Path("/nowhere")) is None
