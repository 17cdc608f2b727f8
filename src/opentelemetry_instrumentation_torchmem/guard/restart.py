# SPDX-License-Identifier: Apache-2.0
"""How a process that wants to be restarted comes to its end: somebody else ends it, or it asks itself to."""

from __future__ import annotations

import os
import signal

WAYS = {
    "liveness": "Liveness fails, and who probes it ends the process. Nothing happens where nobody does.",
    "sigterm": "SIGTERM to itself once nothing is in flight: the server shuts down gracefully, and its "
    "supervisor starts a fresh worker.",
    "callback": "The callback is all.",
}
"""Ways to be restarted, by name: what each is."""


def ask_to_end() -> None:
    """SIGTERM to this process: uvicorn and gunicorn take it as graceful shutdown, and their supervisors
    replace the worker. Never ``os._exit``, which cuts streams, nor an exit code of 3 or 4, which stop the
    supervisor."""
    os.kill(os.getpid(), signal.SIGTERM)
