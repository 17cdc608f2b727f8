# SPDX-License-Identifier: Apache-2.0
"""A call on a thread of its own, that is waited for whatever comes meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..package import NAME

_logger = logging.getLogger(NAME)


def apart(act: Callable[[], None], alone: threading.Lock) -> bool:
    """Runs it to its end where no pool is in use, no stream chosen, and no mode or default is set.

    ``alone`` is held meanwhile; False, and nothing is done, if somebody has it. What interrupts the waiting,
    as Ctrl-C does, is raised once the call has ended; it never ends the call halfway.

    Raises:
        BaseException: what the call raised, or what interrupted the waiting.
    """
    claim, done = threading.Lock(), threading.Event()
    ran: list[bool] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            if not claim.acquire(blocking=False) or not alone.acquire(blocking=False):
                return
            ran.append(True)
            try:
                act()
            finally:
                alone.release()
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="torchmem-compaction")
    started = told = False
    interrupt: BaseException | None = None
    while True:
        try:
            if not started:
                started = True
                thread.start()
            if interrupt is not None and not told:
                told = True
                _logger.warning("torchmem: a compaction is interrupted once its memory is back")
            # not join: what interrupts that can leave the thread marked as ended (CPython before 3.13)
            done.wait()
            break
        except BaseException as error:
            if claim.acquire(blocking=False):  # it has not begun, and will not
                raise
            interrupt = interrupt or error
    for error in (interrupt, *raised):
        if error is not None:
            raise error
    return bool(ran)
