# SPDX-License-Identifier: Apache-2.0
"""Modules and tensors -> the storages under them on GPUs, each once, and why one could not be moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

_COMPONENTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""A sparse layout -> the methods that give the tensors it is made of."""
_SEQUENCES = (list, tuple, set, frozenset)
_DEEP = 4
"""How deep lists, tuples and dicts in a module's attributes are looked into."""

REFUSALS: Mapping[str, str] = {
    "not_initialised": "CUDA is not initialised in this process",
    "backend": "only the native caching allocator gives memory back and takes it anew",
    "busy": "another compaction is under way, or has left memory that is not back",
    "not_understood": "it takes modules, tensors, and lists, tuples, sets and dicts of them",
    "nothing": "none of it holds memory on a GPU",
    "captured_graphs": "CUDA graphs are alive, and replay the addresses that they were captured with",
    "private_pools": "it lies in the pool of a CUDA graph or in a MemPool, where it would not come back to",
    "not_resizable": "the memory belongs to something else than its storage",
    "not_the_allocators": "the memory is not the caching allocator's",
    "shared_memory": "two storages share the memory, and only one would be moved",
    "no_storage": "a tensor does not tell its storage",
    "host_memory": "too little host memory to hold it meanwhile",
    "failed": "a step before anything is moved did not succeed",
}
"""Why nothing was moved: reason -> what that means."""


class RefusedError(Exception):
    """Nothing may be moved. ``reason`` is one of ``REFUSALS``; the message says what it is about."""

    def __init__(self, reason: str, about: str = "") -> None:
        super().__init__(f"{REFUSALS[reason]}{': ' if about else ''}{about}")
        self.reason = reason


class Home(NamedTuple):
    """Where the allocator keeps a storage."""

    device: int
    stream: int
    """As a snapshot's segments name it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A storage on a GPU that can be moved."""

    storage: Any
    size: int
    """In bytes, as it was asked for."""
    block: int
    """In bytes, as the allocator keeps it."""
    home: Home


def tensors(things: Iterable[object], torch: Any) -> Iterator[Any]:
    """Every tensor of modules, tensors, and lists, tuples, sets and dicts of them.

    Of a module: parameters with their gradients, buffers, and the tensors in its other attributes.

    Raises:
        RefusedError: one of the things is something else.
    """
    understood = (torch.Tensor, torch.nn.Module, dict, *_SEQUENCES)
    for number, thing in enumerate(things, 1):
        if not isinstance(thing, understood):
            raise RefusedError("not_understood", f"argument {number} is {_kind(thing)}")
        yield from _in(thing, torch, _DEEP)


def _in(thing: object, torch: Any, deep: int, *, of_module: bool = False) -> Iterator[Any]:
    if isinstance(thing, torch.Tensor):
        tensor: Any = thing
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad
    elif isinstance(thing, torch.nn.Module) and not of_module:
        module: Any = thing
        for each in module.modules():
            yield from _in(each.__dict__, torch, _DEEP, of_module=True)
    elif deep:
        for each in _contents(thing):
            yield from _in(each, torch, deep - 1, of_module=of_module)


def _contents(thing: object) -> Sequence[object]:
    if isinstance(thing, dict):
        return list(cast("dict[object, object]", thing).values())
    return list(cast("list[object]", thing)) if isinstance(thing, _SEQUENCES) else ()


def _kind(thing: object) -> str:
    return (
        "an optimizer: give its state_dict()"
        if hasattr(thing, "param_groups")
        else f"of type {type(thing).__name__}"
    )


def storages(things: Iterable[object], torch: Any) -> list[Any]:
    """The storages on GPUs under all of it, each once; one that is empty is none.

    Raises:
        RefusedError: a tensor does not tell its storage, or one of the things is none of these.
    """
    found: dict[int, Any] = {}
    for tensor in tensors(things, torch):
        for part in _parts(tensor, torch):
            storage = _storage(part)
            if storage is not None and storage.device.type == "cuda" and storage.nbytes():
                found[id(storage)] = storage  # one object for each storage: torch sees to it
    return list(found.values())


def _parts(tensor: Any, torch: Any) -> Iterator[Any]:
    """The plain tensors that a tensor is made of: wrappers report bytes of their own and hold none."""
    if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        inner = [getattr(tensor, name) for name in names]
    elif hasattr(tensor, "to_local"):
        inner = [tensor.to_local()]
    elif str(tensor.layout) in _COMPONENTS:
        inner = [getattr(tensor, method)() for method in _COMPONENTS[str(tensor.layout)]]
    else:
        yield tensor
        return
    for each in inner:
        if isinstance(each, torch.Tensor):
            yield from _parts(each, torch)


def _storage(tensor: Any) -> Any | None:
    try:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.device.type == "cuda":
            storage.data_ptr()  # a wrapper's tells bytes and has no address
    except (RuntimeError, NotImplementedError) as error:
        raise RefusedError("no_storage", f"{type(tensor).__name__}, {tuple(tensor.shape)}") from error
    return storage


def locate(storages: Sequence[Any], segments: Iterable[Mapping[str, Any]]) -> list[Found]:
    """Where the allocator keeps each, by a snapshot's segments.

    Raises:
        RefusedError: one of them cannot be moved.
    """
    _check_shared(storages)
    blocks = {
        (segment["device"], block["address"]): (segment, block)
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    found: list[Found] = []
    for storage in storages:
        size = storage.nbytes()
        told = f"{size:,} bytes on {storage.device}"
        segment, block = blocks.get((storage.device.index, storage.data_ptr()), (None, None))
        if not storage.resizable():
            raise RefusedError("not_resizable", told)
        if segment is None or block is None or block["size"] < size:
            raise RefusedError("not_the_allocators", told)
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            raise RefusedError("private_pools", told)
        found.append(Found(storage, size, block["size"], Home(segment["device"], segment["stream"])))
    return found


def _check_shared(storages: Sequence[Any]) -> None:
    spans = sorted((each.device.index, each.data_ptr(), each.nbytes()) for each in storages)
    for (device, address, size), (next_device, next_address, _) in pairwise(spans):
        if device == next_device and address + size > next_address:
            raise RefusedError("shared_memory", f"{size:,} bytes on cuda:{device}")
