# SPDX-License-Identifier: Apache-2.0
"""The server that heals before it dies: sick for a while, not ready, drained, cleared at idle, measured again.

Off unless one is made::

    guard = MemoryGuard()
    app.add_middleware(MemoryGuardMiddleware, guard=guard)
"""

from .steps import Compact, CompactionOutcome

__all__ = ["Compact", "CompactionOutcome"]
