# SPDX-License-Identifier: Apache-2.0
"""Compaction: live weights out to host memory, the cache emptied, all of it back, closer together.

For a planned window in which nothing uses the weights; behind the guard's gate, or by hand::

    compaction = Compaction(model)
    outcome = compaction()
    print(outcome.refused or outcome.missing or f"headroom rose by {outcome.won:,} bytes")
"""

from .host import HostMemory, host_memory
from .move import Compacted, Compaction
from .storages import REFUSALS

__all__ = ["REFUSALS", "Compacted", "Compaction", "HostMemory", "host_memory"]
