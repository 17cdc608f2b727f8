# SPDX-License-Identifier: Apache-2.0
"""Checks the variables that the files here read, as they are set: the collector takes wrong ones silently.

    python collector-config/check.py && otelcol --config ...

Prints one line for each that is wrong, and exits 1 then. Needs Python alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    pattern: str
    """Of the whole value."""
    said: str
    """What is allowed, with an example."""


COUNT = Form(r"0*[1-9]\d*", "a whole number above 0 without a unit, like 180")
PERCENT = Form(r"0*(\d{1,2}(\.\d+)?|100(\.0+)?)", "a number from 0 to 100, like 5")
ADDRESS = Form(r"\S*[^\s:]:\d{1,5}", "host:port, like 127.0.0.1:4317")
HOST = Form(r"[^\s/]+", "a host, like 127.0.0.1")
PORT = Form(r"\d{1,5}", "a port, like 8888")
URL = Form(r"https?://[^\s/]\S*", "a URL, like http://127.0.0.1:9090/api/v1/write")
FILE = Form(r"/.*[^/]", "a whole path, like /etc/otelcol/tls.crt")
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


def main() -> int:
    lines = wrong(os.environ)
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
