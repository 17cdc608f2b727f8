# SPDX-License-Identifier: Apache-2.0
"""Prints what is installed here as constraints, for every Python that this package supports.

A release that needs a newer Python than the oldest supported one is pinned from that Python on alone.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions

OWN = {"opentelemetry-instrumentation-torchmem", "pip", "setuptools"}


def main() -> None:
    print("# What make and CI install. Written by `make constraints`.")
    for distribution in sorted(distributions(), key=lambda found: found.name.lower()):
        if distribution.name.lower() in OWN:
            continue
        needs = re.search(r">=\s*3\.(\d+)", distribution.metadata.get("Requires-Python") or "")
        newer = f' ; python_version >= "3.{needs[1]}"' if needs and int(needs[1]) > 10 else ""
        print(f"{distribution.name}=={distribution.version.split('+')[0]}{newer}")


if __name__ == "__main__":
    main()
