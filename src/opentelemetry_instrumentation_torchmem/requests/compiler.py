# SPDX-License-Identifier: Apache-2.0
"""Whether torch compiles, exports or traces this very call: then every wrapper passes straight through."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import wrapt

from ..allocator.source import tracing_call


def compiling() -> bool:
    """Whether the compiler or an export is tracing this very call; this stands in until torch is imported."""
    return False


def tracing() -> bool:
    """Whether ``torch.jit.trace`` is; likewise."""
    return False


_before_torch = compiling
dynamo_compiling = compiling
"""Whether the compiler is, as ``compiling`` but for what ``flags`` say: together they take half its time."""
flags: Any = SimpleNamespace(_is_compiling_flag=False)


def torch_imported(torch: Any) -> None:
    """From now on pass through what torch compiles, exports or traces. Owner of the switch: the instrumentor.

    The compiler knows ``torch.compiler.is_compiling`` by identity and folds it to a constant, so that a
    wrapper leaves nothing in the graph, as long as it is asked first. Once set it stays: the compiled code of
    others depends on it.
    """
    global dynamo_compiling, flags
    is_compiling = getattr(torch.compiler, "is_compiling", None)
    if is_compiling is not None:
        _pass_through_when(is_compiling, tracing_call(torch))
        if hasattr(torch.compiler, "is_dynamo_compiling") and hasattr(torch.compiler, "_is_compiling_flag"):
            dynamo_compiling, flags = torch.compiler.is_dynamo_compiling, torch.compiler
    else:  # before 2.3 it is in the compiler itself, which most processes never import
        wrapt.register_post_import_hook(
            lambda dynamo: _pass_through_when(dynamo.is_compiling, torch.jit.is_tracing), "torch._dynamo"
        )


def _pass_through_when(is_compiling: Callable[[], bool], is_tracing: Callable[[], bool]) -> None:
    global compiling, tracing, dynamo_compiling
    if compiling is _before_torch:
        compiling, tracing = is_compiling, is_tracing
        dynamo_compiling = is_compiling
