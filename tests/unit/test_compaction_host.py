# SPDX-License-Identifier: Apache-2.0
"""How much host memory a compaction may take, by files as Linux and containers have them."""

from __future__ import annotations

from opentelemetry_instrumentation_torchmem.compaction import HostMemory, host_memory

GIB = 1 << 30


def write(root, files: dict[str, object]):
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def machine(available: int) -> dict[str, object]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\nBuffers: 3 kB"}


def told(root) -> tuple[int, str] | None:
    found = host_memory(root)
    return None if found is None else (found.available, found.origin.removeprefix(f"{root}/"))


def test_the_machines_own_memory_counts_where_there_is_no_cgroup(tmp_path):
    assert told(write(tmp_path, machine(7 * GIB))) == (7 * GIB, "proc/meminfo")


def test_the_least_of_all_cgroups_above_counts_and_file_cache_is_free(tmp_path):
    group = "sys/fs/cgroup/kubepods/pod7"
    write(tmp_path, machine(64 * GIB) | {"proc/self/cgroup": "0::/kubepods/pod7/server"})
    write(
        tmp_path,
        {
            f"{group}/server/memory.max": "max",
            f"{group}/server/memory.current": 5 * GIB,
            f"{group}/memory.max": 8 * GIB,
            f"{group}/memory.high": "max",
            f"{group}/memory.current": 6 * GIB,
            f"{group}/memory.stat": f"anon 9\ninactive_file {GIB}\nactive_file {GIB}",
            "sys/fs/cgroup/kubepods/memory.max": 32 * GIB,
            "sys/fs/cgroup/kubepods/memory.current": 20 * GIB,
        },
    )
    assert told(tmp_path) == (3 * GIB, f"{group}/memory.max")


def test_a_throttled_limit_counts_like_a_hard_one(tmp_path):
    write(tmp_path, machine(64 * GIB) | {"proc/self/cgroup": "0::/server"})
    group = "sys/fs/cgroup/server"
    write(
        tmp_path,
        {
            f"{group}/memory.max": 8 * GIB,
            f"{group}/memory.high": 6 * GIB,
            f"{group}/memory.current": 5 * GIB,
        },
    )
    assert told(tmp_path) == (GIB, f"{group}/memory.high")


def test_a_container_that_sees_its_own_cgroup_alone_is_bounded_by_it(tmp_path):
    write(tmp_path, machine(64 * GIB) | {"proc/self/cgroup": "0::/../../docker/abc"})
    write(tmp_path, {"sys/fs/cgroup/memory.max": 2 * GIB, "sys/fs/cgroup/memory.current": 3 * GIB})
    assert told(tmp_path) == (0, "sys/fs/cgroup/memory.max")


def test_version_1_has_other_names_and_a_number_for_no_limit(tmp_path):
    write(tmp_path, machine(64 * GIB) | {"proc/self/cgroup": "5:cpu,cpuacct:/x\n9:memory:/docker/abc"})
    mount = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            f"{mount}/memory.limit_in_bytes": 9223372036854771712,
            f"{mount}/memory.usage_in_bytes": 30 * GIB,
            f"{mount}/docker/abc/memory.limit_in_bytes": 4 * GIB,
            f"{mount}/docker/abc/memory.usage_in_bytes": 2 * GIB,
            f"{mount}/docker/abc/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
        },
    )
    assert told(tmp_path) == (3 * GIB, f"{mount}/docker/abc/memory.limit_in_bytes")


def test_where_nothing_tells_nothing_is_known(tmp_path):
    assert host_memory(tmp_path) is None


def test_this_machine_tells():
    found = host_memory()
    assert isinstance(found, HostMemory)
    assert 0 <= found.available < 1 << 50
