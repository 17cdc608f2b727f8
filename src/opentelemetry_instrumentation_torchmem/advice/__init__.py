# SPDX-License-Identifier: Apache-2.0
"""What to change about the allocator and its use, and why: from settings, readings and a snapshot.

In the process itself, in a quiet moment::

    for device in examine(seconds=10.0):
        for advice in device.advice:
            print(advice.change, advice.why)

or for `torchmem doctor --snapshot FILE`, ``dump("app.pickle")``.
"""

from .evidence import Evidence
from .live import Examined, NothingToSeeError, dump, examine
from .overhead import Activity, DriverTimes, Overhead, measure, times_of_trace
from .rules import Advice, Tier, advise

__all__ = [
    "Activity",
    "Advice",
    "DriverTimes",
    "Evidence",
    "Examined",
    "NothingToSeeError",
    "Overhead",
    "Tier",
    "advise",
    "dump",
    "examine",
    "measure",
    "times_of_trace",
]
