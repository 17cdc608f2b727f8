# SPDX-License-Identifier: Apache-2.0
"""Bytes from storages to host memory and back, through one small pinned buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

BUFFER = 32 << 20
"""Pinned, in two halves; a power of two, as torch rounds pinned memory up to one and keeps it for later."""


class Copier:
    """Copies between pageable host memory and a GPU. What it returns from has completed.

    While one half of the buffer is on its way to or from the device, the other is copied on the host.
    """

    def __init__(self, torch: Any, buffer: int = BUFFER) -> None:
        """``buffer`` is in bytes. Where nothing can be pinned, copies are direct, and slower."""
        self._torch = torch
        try:
            self._halves: Sequence[Any] = torch.empty(buffer, dtype=torch.uint8, pin_memory=True).chunk(2)
        except RuntimeError:
            self._halves = ()

    def to_host(self, storage: Any, size: int) -> Any:
        """The first ``size`` bytes, as a tensor of bytes in pageable memory."""
        host = self._torch.empty(size, dtype=self._torch.uint8, device="cpu")
        device = self._bytes(storage)
        if not self._halves:
            host.copy_(device[:size])
            return host
        under_way: tuple[Any, Any, Any] | None = None
        for half, begin, end in self._portions(size):
            half.copy_(device[begin:end], non_blocking=True)
            coming = (self._mark(), half, host[begin:end])
            _land(under_way)
            under_way = coming
        _land(under_way)
        return host

    def to_device(self, host: Any, storage: Any) -> None:
        """All bytes, into a storage that has room for them."""
        device = self._bytes(storage)
        if not self._halves:
            device[: host.numel()].copy_(host)
            self._mark().synchronize()
            return
        marks: list[Any] = []
        for half, begin, end in self._portions(host.numel()):
            if len(marks) >= 2:
                marks[-2].synchronize()  # what went through this half before has arrived
            half.copy_(host[begin:end])
            device[begin:end].copy_(half, non_blocking=True)
            marks.append(self._mark())
        for mark in marks[-2:]:
            mark.synchronize()

    def _bytes(self, storage: Any) -> Any:
        return self._torch.empty(0, dtype=self._torch.uint8, device=storage.device).set_(storage)

    def _portions(self, size: int) -> Iterator[tuple[Any, int, int]]:
        """A half of the buffer, and where what goes through it begins and ends."""
        step = self._halves[0].numel()
        for number, begin in enumerate(range(0, size, step)):
            end = min(begin + step, size)
            yield self._halves[number % 2][: end - begin], begin, end

    def _mark(self) -> Any:
        mark = self._torch.cuda.Event()
        mark.record()
        return mark


def _land(under_way: tuple[Any, Any, Any] | None) -> None:
    if under_way is not None:
        mark, half, host = under_way
        mark.synchronize()
        host.copy_(half)
