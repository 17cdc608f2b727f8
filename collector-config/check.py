# SPDX-License-Identifier: Apache-2.0
"""Checks the variables that the files here read, as they are set: the collector takes wrong ones silently.

    python collector-config/check.py && otelcol --config ...

Prints one line for each that is wrong, or whose name may be meant for one, and exits 1 if one is wrong. Needs
Python alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Form:
    pattern: str
    """Of the whole value."""
    said: str
    """What is allowed, with an example."""


_PORT = r"0*(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
COUNT = Form(r"0*[1-9]\d*", "a whole number above 0 without a unit, like 180")
PERCENT = Form(r"0*(\d{1,2}(\.\d+)?|100(\.0+)?)", "a number from 0 to 100, like 5")
ADDRESS = Form(rf"\S*[^\s:]:{_PORT}", "host:port, like 127.0.0.1:4317, the port from 1 to 65535")
HOST = Form(r"[^\s/]+", "a host, like 127.0.0.1")
PORT = Form(_PORT, "a port from 1 to 65535, like 8888")
URL = Form(r"https?://[^\s/]\S*", "a URL, like http://127.0.0.1:9090/")
FILE = Form(r"/.*[^/]", "a whole path, like /etc/otelcol/one")
FILE_OR_NONE = Form(rf"|{FILE.pattern}", f"{FILE.said}, or nothing")
SWITCH = Form(r"true|false", "true or false")

FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("OTLP_GRPC_LISTEN", "OTLP_HTTP_LISTEN", "SCRAPE_LISTEN", "HEALTH_LISTEN"), ADDRESS),
    **dict.fromkeys(("JAEGER_OTLP_LISTEN", "JAEGER_QUERY_LISTEN"), ADDRESS),
    **dict.fromkeys(("JAEGER_QUERY_GRPC_LISTEN", "JAEGER_HEALTH_LISTEN"), ADDRESS),
    **dict.fromkeys(("TRACES_ENDPOINT", "GATEWAY_ENDPOINT"), ADDRESS),
    "SELF_HOST": HOST,
    "SELF_PORT": PORT,
    **dict.fromkeys(("TRACES_INSECURE", "GATEWAY_INSECURE"), SWITCH),
    **dict.fromkeys(("PROMETHEUS_OTLP_URL", "REMOTE_WRITE_URL", "LOGS_URL"), URL),
    **dict.fromkeys(("STORAGE_DIRECTORY", "WAL_DIRECTORY", "LOGS_FILE"), FILE),
    **dict.fromkeys(("TLS_CERT_FILE", "TLS_KEY_FILE", "TOKEN_FILE"), FILE),
    **dict.fromkeys(
        ("TLS_CLIENT_CA_FILE", "GATEWAY_CA_FILE", "GATEWAY_CERT_FILE", "GATEWAY_KEY_FILE"), FILE_OR_NONE
    ),
    **dict.fromkeys(("METRIC_EXPIRATION_SECONDS", "DECISION_WAIT_SECONDS"), COUNT),
    **dict.fromkeys(("QUEUE_BYTES", "MEMORY_LIMIT_MIB", "MEMORY_SPIKE_MIB", "KEPT_GROWTH_BYTES"), COUNT),
    "KEPT_SHARE_PERCENT": PERCENT,
}


def wrong(environment: Mapping[str, str]) -> list[str]:
    """One line for each variable that is set and is not of its form."""
    return [
        f"{name}={environment[name]!r} in the environment is not {form.said}; unset it for the default"
        for name, form in FORMS.items()
        if name in environment and not re.fullmatch(form.pattern, environment[name])
    ]


def too_large(environment: Mapping[str, str]) -> list[str]:
    """A line if the spike that memory may have is not below its limit."""
    limit, spike = (environment.get(name, "") for name in ("MEMORY_LIMIT_MIB", "MEMORY_SPIKE_MIB"))
    if not (limit.isdecimal() and spike.isdecimal()) or int(spike) < int(limit):
        return []
    return [f"MEMORY_SPIKE_MIB={spike!r} in the environment is not below MEMORY_LIMIT_MIB={limit!r}"]


def alike(environment: Mapping[str, str]) -> list[str]:
    """One line for each variable that nobody here reads and whose name is nearly that of one that is read."""
    meant = {name: get_close_matches(name, FORMS, 1, 0.85) for name in environment if name not in FORMS}
    return [f"{name} is not read: {found[0]} is" for name, found in meant.items() if found]


def main() -> int:
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    lines = [*wrong(os.environ), *too_large(os.environ)]
    for line in (*lines, *alike(os.environ)):
        print(line, file=sys.stderr)
    if not lines:
        print(f"{sum(name in os.environ for name in FORMS)} variables are set, and all of them are allowed")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
