# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this package, and nothing else.

``opentelemetry-instrument`` makes a flag of every name in this module that begins with ``OTEL_``
(``--torchmem_sampling``): a name that another package also has would stop the launcher for everybody.
"""

OTEL_PYTHON_TORCHMEM_SAMPLING = "OTEL_PYTHON_TORCHMEM_SAMPLING"
"""Who reads the allocator: ``auto`` or ``always``."""

OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS = "OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS"
"""Comma-separated names or globs of metrics that are not made: ``torch.memory.host.*``."""
