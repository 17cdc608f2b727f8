# SPDX-License-Identifier: Apache-2.0
"""Steers the emulated GPU from inside the process that runs on it. Importable anywhere; usable only there.

A stream is named by a `torch.cuda.Stream`, by its integer handle, or by `None` for all streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any, Literal

_What = Literal["used", "malloc", "created", "pools", "external", "total"]
_WHAT: dict[str, int] = {"used": 0, "malloc": 1, "created": 2, "pools": 3, "external": 4, "total": 5}

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "emu_external_malloc": (ctypes.c_int, [ctypes.c_int, ctypes.c_size_t]),
    "emu_external_free": (ctypes.c_int, [ctypes.c_int, ctypes.c_size_t]),
    "emu_bytes": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_int]),
    "emu_pause": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_int]),
    "emu_fail": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_int]),
    "emu_forgive": (None, []),
    "emu_count": (ctypes.c_ulong, [ctypes.c_char_p]),
    "emu_inside": (ctypes.c_int, [ctypes.c_char_p]),
    "emu_call_name": (ctypes.c_char_p, [ctypes.c_int]),
    "emu_has_context": (ctypes.c_int, [ctypes.c_int]),
    "emu_contexts_made": (ctypes.c_ulong, []),
    "emu_fork": (ctypes.c_int, []),
    "emu_hold_all": (None, [ctypes.c_bool, ctypes.c_bool]),
    "emu_hold": (None, [ctypes.c_int, ctypes.c_ulonglong, ctypes.c_bool, ctypes.c_bool]),
    "emu_complete_all": (None, []),
    "emu_complete": (None, [ctypes.c_int, ctypes.c_ulonglong]),
}


def _call(name: str, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is None:
        raise RuntimeError("this process does not run on the emulated GPU: start it by tests/emulator/run")
    function.restype, function.argtypes = _SIGNATURES[name]
    return function(*arguments)


def present() -> bool:
    """Whether this process runs on the emulated GPU."""
    return hasattr(ctypes.CDLL(None), "emu_count")


# ---- memory ----


def external_malloc(device: int, size: int) -> None:
    """Another process or library takes `size` bytes of the device; PyTorch does not know of it."""
    if error := _call("emu_external_malloc", device, size):
        raise MemoryError(f"device {device} has no {size} bytes left (error {error})")


def external_free(device: int, size: int) -> None:
    """Gives back what `external_malloc` took."""
    if error := _call("emu_external_free", device, size):
        raise ValueError(f"device {device}: less than {size} bytes are taken externally (error {error})")


def memory(device: int, what: _What = "used") -> int:
    """Bytes of the device in use: in all, or by `cudaMalloc`, `cuMemCreate`, memory pools, or externally."""
    return _call("emu_bytes", device, _WHAT[what])


def would_fit(size: int, device: int = 0) -> bool:
    """Whether `torch.empty` of `size` bytes would succeed now, found by doing it in a forked copy.

    The allocator of this process is left as it is. Only for a process with one thread: the copy has only the
    calling one, and a lock that another thread holds would never be released in it.
    """
    import torch

    if threading.active_count() > 1:
        raise RuntimeError("would_fit needs a process with a single thread")
    child = _call("emu_fork")
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the allocator's warnings are not this process's
        try:
            torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
        except torch.cuda.OutOfMemoryError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if answer not in (0, 1):
        raise RuntimeError(f"the forked copy ended with {answer}")
    return answer == 0


# ---- pauses and failures ----


def pause(call: str, nth: int, milliseconds: int) -> None:
    """The nth call from now on of a CUDA function (0: every one) first sleeps, in C, holding what is held."""
    if _call("emu_pause", call.encode(), nth, milliseconds):
        raise RuntimeError("too many pauses and failures are set: forgive() some")


def fail(call: str, nth: int, error: int = 0) -> None:
    """The nth call from now on (0: every one) fails: out of memory for allocations, else 999 (unknown)."""
    if _call("emu_fail", call.encode(), nth, error):
        raise RuntimeError("too many pauses and failures are set: forgive() some")


def forgive() -> None:
    """Takes back every pause and failure, those of the environment too."""
    _call("emu_forgive")


def inside(call: str) -> int:
    """How many threads sit in a pause of this function at this moment."""
    return _call("emu_inside", call.encode())


# ---- what was called ----


def count(call: str) -> int:
    """How often a function of the runtime or driver was called since the process began."""
    return _call("emu_count", call.encode())


def counts() -> dict[str, int]:
    """The same for every function that was called at all."""
    names = []
    while name := _call("emu_call_name", len(names)):
        names.append(name.decode())
    return {name: count(name) for name in sorted(names)}


def has_context(device: int) -> bool:
    """Whether anything so far would have made a primary context on the device."""
    return bool(_call("emu_has_context", device))


def contexts_made() -> int:
    return _call("emu_contexts_made")


# ---- when work completes ----


def _stream(stream: Any) -> tuple[int, int]:
    if isinstance(stream, int):
        return 0, stream
    return stream.device.index, stream.cuda_stream


def hold(stream: Any = None, block: bool = False) -> None:
    """From now on nothing submitted to the stream (or to any) completes: its events stay pending.

    A call that synchronises with held work completes it, as waiting on a GPU always ends; with `block` it
    sits there until another thread releases.
    """
    if stream is None:
        _call("emu_hold_all", True, block)
    else:
        _call("emu_hold", *_stream(stream), True, block)


def release(stream: Any = None) -> None:
    """Ends the hold: all that was submitted completes."""
    if stream is None:
        _call("emu_hold_all", False, False)
    else:
        _call("emu_hold", *_stream(stream), False, False)


def complete(stream: Any = None) -> None:
    """Completes what has been submitted so far; a hold goes on for what comes after."""
    if stream is None:
        _call("emu_complete_all")
    else:
        _call("emu_complete", *_stream(stream))


@contextlib.contextmanager
def held(stream: Any = None, block: bool = False) -> Iterator[None]:
    hold(stream, block)
    try:
        yield
    finally:
        release(stream)
