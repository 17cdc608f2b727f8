# SPDX-License-Identifier: Apache-2.0
NAME = "opentelemetry_instrumentation_torchmem"
"""The name of the meter, the tracer and the logger."""

INSTRUMENTS = ("torch >= 2.2.0a0",)
