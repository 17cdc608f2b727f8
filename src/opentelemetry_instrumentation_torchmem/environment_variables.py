# SPDX-License-Identifier: Apache-2.0
"""The environment variables of this package, and nothing else.

``opentelemetry-instrument`` makes a flag of every name in this module that begins with ``OTEL_``
(``--torchmem_sampling``): a name that another package also has would stop the launcher for everybody.
"""

OTEL_PYTHON_TORCHMEM_SAMPLING = "OTEL_PYTHON_TORCHMEM_SAMPLING"
"""Who reads the allocator: ``auto``, ``request`` or ``always``."""

OTEL_PYTHON_TORCHMEM_MAX_READING_AGE = "OTEL_PYTHON_TORCHMEM_MAX_READING_AGE"
"""Seconds for which a request's reading serves the collections meanwhile: 15."""

OTEL_PYTHON_TORCHMEM_SNAPSHOT_SHARE = "OTEL_PYTHON_TORCHMEM_SNAPSHOT_SHARE"
"""The share of time that memory snapshots may take: 0.001; 0 for none."""

OTEL_PYTHON_TORCHMEM_REQUEST_METRICS = "OTEL_PYTHON_TORCHMEM_REQUEST_METRICS"
"""Whether the metrics of requests are recorded: ``true`` or ``false``."""

OTEL_PYTHON_TORCHMEM_TARGETS = "OTEL_PYTHON_TORCHMEM_TARGETS"
"""What is measured beside the built-in targets: ``app.engine:Engine.generate,app.model:Net*.forward``."""

OTEL_PYTHON_TORCHMEM_DISABLED_TARGETS = "OTEL_PYTHON_TORCHMEM_DISABLED_TARGETS"
"""Names or globs of built-in targets that are not measured: ``transformers.*``."""

OTEL_PYTHON_TORCHMEM_SPAN = "OTEL_PYTHON_TORCHMEM_SPAN"
"""Where a measured call is told: ``new``, ``enrich`` or ``off``."""

OTEL_PYTHON_TORCHMEM_OOM_EVIDENCE = "OTEL_PYTHON_TORCHMEM_OOM_EVIDENCE"
"""Whether the evidence of an out of memory error is taken and told: ``true`` or ``false``."""

OTEL_PYTHON_TORCHMEM_OOM_DUMP_DIR = "OTEL_PYTHON_TORCHMEM_OOM_DUMP_DIR"
"""The directory that snapshots of out of memory errors are written to; none where it is empty."""

OTEL_PYTHON_TORCHMEM_OOM_DUMP_MAX_FILES = "OTEL_PYTHON_TORCHMEM_OOM_DUMP_MAX_FILES"
"""How many such snapshots the directory may hold: 10."""

OTEL_PYTHON_TORCHMEM_OOM_DUMP_MAX_MIB = "OTEL_PYTHON_TORCHMEM_OOM_DUMP_MAX_MIB"
"""How large they may be together, in MiB: 256."""

OTEL_PYTHON_TORCHMEM_LIVE_SNAPSHOTS = "OTEL_PYTHON_TORCHMEM_LIVE_SNAPSHOTS"
"""Whether this process waits for ``torchmem snapshot --pid``: ``true`` or ``false``."""

OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS = "OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS"
"""Comma-separated names or globs of metrics that are not made: ``torch.memory.host.*``."""
