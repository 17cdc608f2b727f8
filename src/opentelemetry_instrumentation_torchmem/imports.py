# SPDX-License-Identifier: Apache-2.0
"""Waiting for the user's imports, without keeping who waits.

A hook of wrapt's cannot be taken back. So one stands for each module, however often this package is
instrumented, and asks at the import who is still there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakMethod

import wrapt

_waiting: dict[str, list[WeakMethod[Any]]] = {}
"""By the module that has not been imported yet."""


def when_imported(name: str, method: Callable[[str, ModuleType], object]) -> None:
    """Call a bound method with the name and the module once that is imported, or now if it is.

    Its object is not kept: once it is gone nothing is called. What it raises fails the user's import.
    """
    module, known = sys.modules.get(name), _waiting.get(name)
    if module is not None:
        method(name, module)
    elif known is not None:
        known[:] = [each for each in known if each() is not None]
        known.append(WeakMethod(method))
    else:
        _waiting[name] = [WeakMethod(method)]
        wrapt.register_post_import_hook(partial(_imported, name), name)


def _imported(name: str, module: ModuleType) -> None:
    for waiting in _waiting.pop(name, ()):
        method = waiting()
        if method is not None:
            method(name, module)
