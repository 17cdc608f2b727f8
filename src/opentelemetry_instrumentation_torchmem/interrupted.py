# SPDX-License-Identifier: Apache-2.0
"""What a signal handler of the user's raises in the middle of our code: no fault of ours, theirs to see."""

from __future__ import annotations

import signal
from threading import get_ident, main_thread
from traceback import walk_tb


def is_a_signal_handlers(error: Exception) -> bool:
    """Whether a signal handler has raised it, as timeouts do, wherever the main thread was."""
    if get_ident() != main_thread().ident:
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))
