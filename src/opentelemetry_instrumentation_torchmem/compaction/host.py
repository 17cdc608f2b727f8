# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may still take: the machine's, and that of its cgroups.

Files of Linux alone; elsewhere nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_KIB = 1 << 10
_NO_LIMIT = 1 << 60
"""cgroup v1 writes its lack of a limit as a number near 2 ** 63."""


class HostMemory(NamedTuple):
    """What is left, and what bounds it."""

    available: int
    """Bytes."""
    origin: str
    """The file that says so."""


class _Layout(NamedTuple):
    """Where a version of cgroups keeps its figures."""

    mount: str
    limits: tuple[str, ...]
    used: str
    reclaimable: str
    """The line of ``memory.stat`` that tells what the kernel gives back before it kills."""


_LAYOUTS = {
    "": _Layout("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": _Layout(
        "sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
    ),
}
"""By the controllers that ``/proc/self/cgroup`` names: none in version 2."""


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """The least that the machine and each cgroup above this process leave; None where neither tells.

    ``root`` is the root of the file system.
    """
    return min((*_machine(root), *_cgroups(root)), default=None)


def _machine(root: Path) -> Iterator[HostMemory]:
    file = root / "proc/meminfo"
    for line in _lines(file):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield HostMemory(int(rest.split()[0]) * _KIB, str(file))


def _cgroups(root: Path) -> Iterator[HostMemory]:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        layout = next((_LAYOUTS[each] for each in controllers.split(",") if each in _LAYOUTS), None)
        if layout is None:
            continue
        mount = root / layout.mount
        place = mount / path.strip("/")
        # the path may be the host's: in a container that sees its own alone it is not there
        for group in (place, *place.parents):
            yield from _cgroup(group, layout)
            if group == mount:
                break


def _cgroup(group: Path, layout: _Layout) -> Iterator[HostMemory]:
    used = _number(group / layout.used)
    if used is None:
        return
    for line in _lines(group / "memory.stat"):
        name, _, figure = line.partition(" ")
        if name == layout.reclaimable:
            used -= int(figure)
    for name in layout.limits:
        limit = _number(group / name)
        if limit is not None and limit < _NO_LIMIT:
            yield HostMemory(max(0, limit - max(0, used)), str(group / name))


def _number(file: Path) -> int | None:
    for line in _lines(file):
        return int(line) if line.strip().isdecimal() else None
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
