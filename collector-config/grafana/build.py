# SPDX-License-Identifier: Apache-2.0
"""The dashboards, as tables: written to dashboards/*.json with Grafana's own typed builder.

    python collector-config/grafana/build.py          write them
    python collector-config/grafana/build.py --check  exit 1, naming the files, where one is stale

They stand on the recording rules `torchmem:*` (../prometheus/rules/), so that they read the same whether
metrics were scraped or pushed. Histograms whose exemplars open traces are read raw: recorded ones have none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from opentelemetry_instrumentation_torchmem.signals import (
    REQUEST_DURATION,
    REQUEST_PEAK_GROWTH,
    REQUEST_RESERVED_GROWTH,
    RequestMetric,
)

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "prometheus")]  # siblings that are no package

from generated_files import check, write  # noqa: E402
from panels import GREEN, NEUTRAL, ORANGE, RED, Board, Column, Panel, Query, Row, Text, Variable, dashboard_of  # noqa: E402
from rules import prometheus_names  # noqa: E402

FOLDER = HERE / "dashboards"
MIB = 2**20

PROCESS = 'job=~"$service", instance=~"$instance"'
ON_DEVICE = f'{PROCESS}, torch_device=~"$device"'
OF_OPERATION = f'{PROCESS}, torch_operation=~"$operation"'
ALONE = f'{OF_OPERATION}, torch_memory_exclusive="true"'
OF_SERVICE = 'job=~"$service"'
IDENTITY = "job, instance, torch_device"

FRAGMENTED = ((None, GREEN), (0.2, ORANGE), (0.35, RED))
ENOUGH = ((None, RED), (1, ORANGE), (2, GREEN))
LASTS = ((None, RED), (4 * 3600, ORANGE), (24 * 3600, GREEN))
NONE_IS_WELL = ((None, GREEN), (1, RED))
FEW_ARE_WELL = ((None, GREEN), (1, ORANGE), (10, RED))

LEDGER = {
    "allocated": "blue",
    "pending_free": "purple",
    "split_free": "red",
    "cached_free": "yellow",
    "cached": "orange",
    "external": "#808080",
    "free": "green",
}


def series(name: str, labels: str = ON_DEVICE) -> str:
    return f"torchmem:{name}{{{labels}}}"


OVER_NEED = (
    f"{series('headroom')} / on (job, instance) group_left () "
    f"({series('request_growth:need1h', PROCESS)} > 0)"
)


def raw(histogram: RequestMetric, part: str, by: str, labels: str = OF_OPERATION) -> str:
    """The rate of a part of a histogram that has its exemplars, under the name with a unit and without."""
    return " or ".join(
        f"sum by ({by}) (rate({name}_{part}{{{labels}}}[$__rate_interval]))"
        for name in prometheus_names(histogram)
    )


def quantile(share: float, histogram: RequestMetric) -> str:
    return f"histogram_quantile({share}, {raw(histogram, 'bucket', 'le, torch_operation')})"


def requests(by: str, labels: str) -> str:
    return raw(REQUEST_DURATION, "count", by, labels)


SERVICE = Variable(
    "service", "Service", "service.namespace/service.name: `job` in Prometheus.",
    "label_values(torchmem:limit, job)",
)  # fmt: skip
INSTANCE = Variable(
    "instance", "Instance", "service.instance.id: a new one for each start of a process.",
    'label_values(torchmem:limit{job=~"$service"}, instance)',
)  # fmt: skip
DEVICE = Variable(
    "device", "Device", "torch.device, as the process names it.",
    f"label_values(torchmem:limit{{{PROCESS}}}, torch_device)",
)  # fmt: skip
OPERATION = Variable(
    "operation", "Operation", "torch.operation: what the measured call does.",
    f"label_values(torchmem:requests_active{{{PROCESS}}}, torch_operation)",
)  # fmt: skip
AT_LEAST = Text(
    "growth", "Growth of at least (bytes)", "Requests that grew reserved by less are not listed.",
    str(256 * MIB),
)  # fmt: skip

# --------------------------------------------------------------------------------------------- the allocator

ALLOCATOR = Board(
    "torchmem-allocator",
    "torchmem / Allocator",
    "One server's GPU memory: where it went, what it costs, how long it lasts.",
    (SERVICE, INSTANCE, DEVICE),
    (
        Row(
            "How long until it dies",
            (
                Panel(
                    "Headroom",
                    "The largest single request that is sure to succeed now, the allocator's own flush "
                    "allowed. The worst of the chosen devices.",
                    "stat", "bytes",
                    (Query(f"min({series('headroom')})", "headroom"),),
                    width=4, height=5, steps=((None, RED), (256 * MIB, ORANGE), (1024 * MIB, GREEN)),
                ),
                Panel(
                    "Headroom ÷ need",
                    "How many times over the largest growth that requests have lately needed still fits. "
                    "Below 1 the next such request is refused. See the runbook: headroom below need.",
                    "stat", "none",
                    (Query(f"min({OVER_NEED})", "times"),),
                    width=4, height=5, steps=ENOUGH, decimals=1, no_value="no growth seen",
                ),
                Panel(
                    "Time to exhaustion",
                    "When headroom reaches zero if it goes on falling as it has for two hours; nothing "
                    "where it does not fall. It looks at the troughs, so that a sawtooth is not a decline.",
                    "stat", "s",
                    (Query(f"min({series('headroom:exhaustion_seconds')})", "left"),),
                    width=4, height=5, steps=LASTS, no_value="not falling",
                ),
                Panel(
                    "Fragmentation",
                    "The share of reserved that is free but trapped in partly used segments. Above 0.35 for "
                    "five minutes, with retries, is the alert.",
                    "stat", "percentunit",
                    (Query(f"max({series('fragmentation')})", "trapped"),),
                    width=4, height=5, steps=FRAGMENTED, maximum=1, decimals=1,
                ),
                Panel(
                    "Retries in 10 min",
                    "Times the allocator gave back all its cache and asked the driver again: each stalls "
                    "every stream. One is routine, a climb is not.",
                    "stat", "none",
                    (Query(f"sum({series('allocation_retries:increase10m')})", "retries"),),
                    width=4, height=5, steps=FEW_ARE_WELL, decimals=0,
                ),
                Panel(
                    "Out of memory in 1 h",
                    "Errors raised to the caller. The evidence of each is in the logs and on the span that "
                    "failed.",
                    "stat", "none",
                    (Query(f"sum(increase({series('ooms')}[1h]))", "errors"),),
                    width=4, height=5, steps=NONE_IS_WELL, decimals=0,
                ),
                Panel(
                    "Headroom against need",
                    "What still fits in one request, what requests have lately needed, and where headroom "
                    "is going: the dashed line is where its troughs will be in four hours. They meet: the "
                    "server dies.",
                    "lines", "bytes",
                    (
                        Query(series("headroom"), "headroom {{instance}} {{torch_device}}"),
                        Query(series("request_growth:need1h", PROCESS), "need {{instance}}"),
                        Query(
                            f"clamp_min(predict_linear({series('headroom')}[1h], 4 * 3600), 0)",
                            "in 4 h {{instance}} {{torch_device}}",
                        ),
                    ),
                    width=16, height=9, steps=((None, NEUTRAL), (256 * MIB, NEUTRAL)),
                ),
                Panel(
                    "Largest free block",
                    "The largest request that is served without asking the driver, by pool. Headroom well "
                    "above it means the next large request costs trips to the driver.",
                    "lines", "bytes",
                    (
                        Query(
                            series("free_block_largest"),
                            "{{torch_memory_pool}} {{instance}} {{torch_device}}",
                        ),
                    ),
                    width=8, height=9,
                ),
            ),
        ),
        Row(
            "Where did the memory go",
            (
                Panel(
                    "The ledger",
                    "Every byte of the device in one state, stacked to the limit. Red is what fragmentation "
                    "traps, yellow is cache that a flush returns, grey is what others hold on the device. "
                    "With several processes on one device choose one instance: each is the other's external.",
                    "stacked", "bytes",
                    (
                        Query(
                            f"sum by (torch_memory_state) ({series('usage')})", "{{torch_memory_state}}"
                        ),
                        Query(f"sum({series('limit')})", "limit"),
                    ),
                    width=16, height=11, colours={**LEDGER, "limit": "white"}, dashed=("limit",),
                ),
                Panel(
                    "Where it stands",
                    "The ledger now, as shares of the limit.",
                    "bars", "percentunit",
                    (
                        Query(
                            f"sum by (torch_memory_state) ({series('usage')}) "
                            f"/ scalar(sum({series('limit')}))",
                            "{{torch_memory_state}}",
                            instant=True,
                        ),
                    ),
                    width=8, height=11, maximum=1, steps=((None, NEUTRAL),), decimals=1,
                ),
                Panel(
                    "Allocated, active, reserved",
                    "Under the names PyTorch has for them. Reserved that climbs while allocated is flat is "
                    "cache; both climbing is a leak.",
                    "lines", "bytes",
                    (
                        Query(f"sum by (instance, torch_device) ({series('allocated:bytes')})",
                              "allocated {{instance}} {{torch_device}}"),
                        Query(f"sum by (instance, torch_device) ({series('active')})",
                              "active {{instance}} {{torch_device}}"),
                        Query(f"sum by (instance, torch_device) ({series('reserved:bytes')})",
                              "reserved {{instance}} {{torch_device}}"),
                        Query(series("reserved_peak"), "reserved, peak {{instance}} {{torch_device}}"),
                    ),
                    width=12, height=9,
                ),
                Panel(
                    "Fragmentation and slack",
                    "Fragmentation is what is trapped; slack is all that is held and not in use, cache "
                    "included. Slack high and fragmentation low is only cache. Under expandable segments "
                    "fragmentation comes from snapshots.",
                    "lines", "percentunit",
                    (
                        Query(series("fragmentation"), "fragmentation {{instance}} {{torch_device}}"),
                        Query(series("slack"), "slack {{instance}} {{torch_device}}"),
                    ),
                    width=12, height=9, maximum=1, steps=FRAGMENTED, show_steps=True,
                ),
                Panel(
                    "Not PyTorch's",
                    "Memory in use on the device that this process's allocator does not hold: the CUDA "
                    "context, NCCL, other libraries, other processes.",
                    "lines", "bytes",
                    (
                        Query(
                            series("usage", f'{ON_DEVICE}, torch_memory_state="external"'),
                            "external {{instance}} {{torch_device}}",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Private pools and rounding",
                    "Held by the pools of CUDA graphs and by MemPools, and lost to rounding requests up.",
                    "lines", "bytes",
                    (
                        Query(series("private_pool_reserved"), "private pools {{instance}} {{torch_device}}"),
                        Query(series("rounding"), "rounding {{instance}} {{torch_device}}"),
                    ),
                    width=8,
                ),
                Panel(
                    "Pinned host memory",
                    "Held by torch's host allocator (torch 2.7 and later): reserved is kept for later and "
                    "never given back by itself.",
                    "lines", "bytes",
                    (
                        Query(series("host_allocated", PROCESS), "allocated {{instance}}"),
                        Query(series("host_reserved", PROCESS), "reserved {{instance}}"),
                    ),
                    width=8, no_value="torch older than 2.7, or none",
                ),
            ),
        ),
        Row(
            "What it costs",
            (
                Panel(
                    "Retries and out of memory errors",
                    "How many in each ten minutes.",
                    "lines", "none",
                    (
                        Query(
                            series("allocation_retries:increase10m"), "retries {{instance}} {{torch_device}}"
                        ),
                        Query(series("ooms:increase10m"), "out of memory {{instance}} {{torch_device}}"),
                    ),
                    width=8, steps=NONE_IS_WELL,
                ),
                Panel(
                    "Trips to the driver",
                    "Allocations, frees and synchronisations a second: a server that is warm makes none.",
                    "lines", "ops",
                    (
                        Query(f"sum(rate({series('device_allocations')}[$__rate_interval]))", "allocations"),
                        Query(f"sum(rate({series('device_frees')}[$__rate_interval]))", "frees"),
                        Query(f"sum(rate({series('device_syncs')}[$__rate_interval]))", "syncs"),
                    ),
                    width=8, steps=((None, GREEN), (1, ORANGE), (10, RED)),
                ),
                Panel(
                    "Why it ran out",
                    "Out of memory errors in each ten minutes by what explains them: each verdict has its "
                    "own fix in the runbook.",
                    "lines", "none",
                    (
                        Query(
                            f"sum by (torch_memory_oom_verdict) ({series('oom_verdicts:increase10m')})",
                            "{{torch_memory_oom_verdict}}",
                        ),
                    ),
                    width=8, steps=NONE_IS_WELL, no_value="never",
                ),
                Panel(
                    "Turnover",
                    "Bytes handed out a second, from the cache or not.",
                    "lines", "Bps",
                    (
                        Query(
                            f"sum by (instance, torch_device) (rate({series('turnover')}[$__rate_interval]))",
                            "{{instance}} {{torch_device}}",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Blocks handed out",
                    "Allocations a second, from the cache or not.",
                    "lines", "ops",
                    (
                        Query(
                            "sum by (instance, torch_device) "
                            f"(rate({series('allocations')}[$__rate_interval]))",
                            "{{instance}} {{torch_device}}",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Segments and blocks",
                    "Segments held from the driver and blocks in use, by pool. Segments are absent under "
                    "expandable segments.",
                    "lines", "short",
                    (
                        Query(
                            f"sum by (torch_memory_pool) ({series('segments')})",
                            "segments, {{torch_memory_pool}}",
                        ),
                        Query(
                            f"sum by (torch_memory_pool) ({series('blocks')})",
                            "blocks, {{torch_memory_pool}}",
                        ),
                    ),
                    width=8,
                ),
            ),
        ),
        Row(
            "What this was measured with",
            (
                Panel(
                    "The allocator's settings in force",
                    "Release, backend and settings of each process: they decide which figures there are.",
                    "table", "none",
                    (Query(series("allocator_info", PROCESS), instant=True),),
                    width=16, height=6,
                    columns={
                        "instance": Column("instance"),
                        "torch_version": Column("torch"),
                        "torch_memory_backend": Column("backend"),
                        "torch_memory_expandable_segments": Column("expandable segments"),
                        "torch_memory_max_split_size": Column("max split", "bytes"),
                        "torch_memory_garbage_collection_threshold": Column("gc threshold"),
                        "torch_memory_roundup_power2_divisions": Column("roundup"),
                    },
                ),
                Panel(
                    "How old the figures are",
                    "Age of the reading, and of the snapshot that headroom and free blocks come from. A "
                    "snapshot waits for a moment without a request.",
                    "lines", "s",
                    (
                        Query(f"max({series('reading_age')})", "reading"),
                        Query(f"max({series('snapshot_age')})", "snapshot"),
                    ),
                    width=8, height=6, steps=((None, GREEN), (300, ORANGE), (1800, RED)),
                ),
                Panel(
                    "What the measuring costs",
                    "The share of one core that readings and snapshots take.",
                    "lines", "percentunit",
                    (
                        Query(
                            "sum by (torch_memory_telemetry_step) "
                            f"(rate({series('telemetry_duration', PROCESS)}[$__rate_interval]))",
                            "{{torch_memory_telemetry_step}}",
                        ),
                    ),
                    width=8, height=7, steps=((None, GREEN), (0.005, ORANGE), (0.02, RED)),
                ),
                Panel(
                    "What was not done",
                    "Readings and snapshots that this package chose not to take in each ten minutes, by why.",
                    "lines", "none",
                    (
                        Query(
                            "sum by (torch_memory_telemetry_reason) "
                            f"({series('telemetry_skipped:increase10m', PROCESS)})",
                            "{{torch_memory_telemetry_reason}}",
                        ),
                    ),
                    width=8, height=7,
                ),
                Panel(
                    "Figures that are absent",
                    "Figures of the last snapshot that are absent, or less than they might be, by why.",
                    "lines", "none",
                    (
                        Query(
                            f"sum by (torch_memory_telemetry_absence) ({series('telemetry_absent')})",
                            "{{torch_memory_telemetry_absence}}",
                        ),
                    ),
                    width=8, height=7, no_value="none",
                ),
            ),
        ),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- the requests

REQUESTS = Board(
    "torchmem-requests",
    "torchmem / Requests",
    "Which request did it: growth and retries by operation, each point of a heatmap a link to the trace "
    "behind it.",
    (SERVICE, INSTANCE, OPERATION, AT_LEAST),
    (
        Row(
            "Which request did it",
            (
                Panel(
                    "Growth of reserved, a request",
                    "How far reserved grew during each request. The points are single requests: click one "
                    "for its trace. Growth in the upper buckets after the warm-up is what breaks a server "
                    "up.",
                    "heatmap", "bytes",
                    (Query(raw(REQUEST_RESERVED_GROWTH, "bucket", "le"), "{{le}}", exemplar=True),),
                    width=16, height=10,
                ),
                Panel(
                    "Retries by operation",
                    "Retries inside requests' windows in each ten minutes. Requests that overlap each count "
                    "the same retry.",
                    "lines", "none",
                    (
                        Query(
                            "sum by (torch_operation) "
                            f"(increase({series('request_retries', OF_OPERATION)}[10m]))",
                            "{{torch_operation}}",
                        ),
                    ),
                    width=8, height=10, steps=FEW_ARE_WELL,
                ),
                Panel(
                    "The requests themselves",
                    "Traces whose span grew reserved by at least the figure above. Tail sampling keeps "
                    "those that grew, retried, failed or ran out of memory, and a share of the rest.",
                    "traces", "none",
                    (
                        Query(
                            '{ span.torch.operation =~ "$operation" '
                            "&& span.torch.memory.reserved.delta >= $growth }"
                        ),
                    ),
                    width=24, height=8, no_value="none in this time, or no traces here",
                ),
                Panel(
                    "Growth of the peak, a request",
                    "How far the peak of allocated bytes rose during an exclusive request: what it truly "
                    "needed beyond what any request before it had.",
                    "heatmap", "bytes",
                    (Query(raw(REQUEST_PEAK_GROWTH, "bucket", "le"), "{{le}}", exemplar=True),),
                    width=12, height=9,
                ),
                Panel(
                    "Growth, 99 in 100 stay below",
                    "By operation, over requests of the last minutes; the upper edge of a bucket, so up to "
                    "twice the truth.",
                    "lines", "bytes",
                    (Query(quantile(0.99, REQUEST_RESERVED_GROWTH), "{{torch_operation}}", exemplar=True),),
                    width=12, height=9, steps=((None, GREEN), (256 * MIB, ORANGE), (1024 * MIB, RED)),
                ),
            ),
        ),
        Row(
            "What users felt",
            (
                Panel(
                    "Duration, 99 in 100 stay below",
                    "By operation. Retries stall every stream: a rise with retries is memory's doing.",
                    "lines", "s",
                    (Query(quantile(0.99, REQUEST_DURATION), "{{torch_operation}}", exemplar=True),),
                    width=8, height=9,
                ),
                Panel(
                    "Duration, half stay below",
                    "By operation.",
                    "lines", "s",
                    (Query(quantile(0.5, REQUEST_DURATION), "{{torch_operation}}"),),
                    width=8, height=9,
                ),
                Panel(
                    "In flight",
                    "Requests that are open, by operation. Where they overlap, a request's figures are what "
                    "happened on the device during it.",
                    "lines", "none",
                    (
                        Query(
                            f"sum by (torch_operation) ({series('requests_active', OF_OPERATION)})",
                            "{{torch_operation}}",
                        ),
                    ),
                    width=8, height=9,
                ),
                Panel(
                    "Requests a second",
                    "By operation, those that failed apart.",
                    "lines", "reqps",
                    (
                        Query(
                            requests("torch_operation", OF_OPERATION + ', error_type=""'),
                            "{{torch_operation}}"
                        ),
                        Query(
                            requests("torch_operation, error_type", OF_OPERATION + ', error_type!=""'),
                            "{{torch_operation}} failed: {{error_type}}",
                        ),
                    ),
                    width=12, height=9,
                ),
                Panel(
                    "Alone on the device",
                    "The share of requests that no other overlapped: what is told of these, they did.",
                    "lines", "percentunit",
                    (
                        Query(
                            f"({requests('torch_operation', ALONE)}) "
                            f"/ ({requests('torch_operation', OF_OPERATION)})",
                            "{{torch_operation}}",
                        ),
                    ),
                    width=12, height=9, maximum=1,
                ),
            ),
        ),
        Row(
            "What was left behind",
            (
                Panel(
                    "Evidence of out of memory errors",
                    "The log record of each examined error: the verdict in words, the ledger, the requests "
                    "in flight, and the trace it belongs to.",
                    "logs", "none",
                    (Query('{service_name=~".+"} |= "is out of memory"'),),
                    width=24, height=10, no_value="none in this time, or no logs here",
                ),
            ),
        ),
    ),
    sources=("metrics", "traces", "logs"),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------- the fleet

ALLOCATOR_OF_INSTANCE = (
    "Its allocator",
    "/d/torchmem-allocator?var-service=${__data.fields.service}&var-instance=${__data.fields.instance}&${__url_time_range}",
)
ALLOCATOR_OF_SERIES = (
    "Its allocator",
    "/d/torchmem-allocator?var-service=${__field.labels.job}&var-instance=${__field.labels.instance}&${__url_time_range}",
)
HEADROOM_SHARE = (
    f"max by ({IDENTITY}) ({series('headroom', OF_SERVICE)}) "
    f"/ max by ({IDENTITY}) ({series('limit', OF_SERVICE)}) "
    f"unless on (job, instance) {series('preallocating', OF_SERVICE)}"
)
WORST = f"bottomk(25, {HEADROOM_SHARE})"


def of_the_worst(expression: str) -> str:
    return f"max by ({IDENTITY}) ({expression}) and on ({IDENTITY}) {WORST}"


def how_many(condition: str) -> str:
    return f"count({condition}) or vector(0)"


FLEET = Board(
    "torchmem-fleet",
    "torchmem / Fleet",
    "Every server at once, the worst first.",
    (SERVICE,),
    (
        Row(
            "At a glance",
            (
                Panel(
                    "Devices that report",
                    "Processes with memory on a device, in the chosen services.",
                    "stat", "none",
                    (Query(f"count({series('limit', OF_SERVICE)})", "devices"),),
                    width=4, height=5, decimals=0,
                ),
                Panel(
                    "Alerts that fire",
                    "Of this package's rules: each has a section in the runbook.",
                    "stat", "none",
                    (
                        Query(
                            how_many(f'ALERTS{{alertstate="firing", alertname=~"TorchMem.*", {OF_SERVICE}}}'),
                            "alerts",
                        ),
                    ),
                    width=4, height=5, steps=NONE_IS_WELL, decimals=0,
                ),
                Panel(
                    "Below need",
                    "Processes whose headroom, of all their devices together, is less than what a request "
                    "has needed within the last hour.",
                    "stat", "none",
                    (
                        Query(
                            how_many(
                                f"sum by (job, instance) ({series('headroom', OF_SERVICE)}) "
                                f"< on (job, instance) {series('request_growth:need1h', OF_SERVICE)}"
                            ),
                            "processes",
                        ),
                    ),
                    width=4, height=5, steps=NONE_IS_WELL, decimals=0,
                ),
                Panel(
                    "Gone within 4 h",
                    "Devices whose headroom reaches zero within four hours, at the pace of its lows of the "
                    "last two.",
                    "stat", "none",
                    (
                        Query(
                            how_many(f"{series('headroom:exhaustion_seconds', OF_SERVICE)} < 4 * 3600"),
                            "devices",
                        ),
                    ),
                    width=4, height=5, steps=NONE_IS_WELL, decimals=0,
                ),
                Panel(
                    "Fragmented",
                    "Devices with more than 0.35 of what they hold trapped.",
                    "stat", "none",
                    (Query(how_many(f"{series('fragmentation', OF_SERVICE)} > 0.35"), "devices"),),
                    width=4, height=5, steps=NONE_IS_WELL, decimals=0,
                ),
                Panel(
                    "Out of memory in 10 min",
                    "Errors raised to callers, over all servers.",
                    "stat", "none",
                    (Query(f"sum({series('ooms:increase10m', OF_SERVICE)})", "errors"),),
                    width=4, height=5, steps=NONE_IS_WELL, decimals=0,
                ),
            ),
        ),
        Row(
            "The worst first",
            (
                Panel(
                    "The 25 with the least headroom",
                    "By the share of the device that one request can still get. Engines that preallocate "
                    "are left out: their levels mean nothing. An instance opens its allocator.",
                    "table", "none",
                    (
                        Query(WORST),
                        Query(of_the_worst(series("headroom", OF_SERVICE))),
                        Query(of_the_worst(series("headroom:exhaustion_seconds", OF_SERVICE))),
                        Query(of_the_worst(series("fragmentation", OF_SERVICE))),
                        Query(of_the_worst(series("allocation_retries:increase10m", OF_SERVICE))),
                        Query(of_the_worst(series("ooms:increase10m", OF_SERVICE))),
                    ),
                    width=24, height=12, sort_by="headroom, share",
                    columns={
                        "job": Column("service"),
                        "instance": Column("instance"),
                        "torch_device": Column("device"),
                        "Value #A": Column(
                            "headroom, share", "percentunit", ((None, RED), (0.05, ORANGE), (0.2, GREEN)), 1
                        ),
                        "Value #B": Column("headroom", "bytes"),
                        "Value #C": Column("gone in", "s", LASTS),
                        "Value #D": Column("fragmentation", "percentunit", FRAGMENTED, 1),
                        "Value #E": Column("retries in 10 min", "none", FEW_ARE_WELL, 0),
                        "Value #F": Column("out of memory in 10 min", "none", NONE_IS_WELL, 0),
                    },
                    links=(ALLOCATOR_OF_INSTANCE,),
                ),
                Panel(
                    "Gone first",
                    "The five devices of each service whose headroom ends first; none where none is falling.",
                    "bars", "s",
                    (
                        Query(
                            series("fleet:exhaustion_seconds:worst5", OF_SERVICE),
                            "{{job}} {{instance}} {{torch_device}}", instant=True,
                        ),
                    ),
                    width=8, height=9, steps=LASTS, no_value="none is falling", links=(ALLOCATOR_OF_SERIES,),
                ),
                Panel(
                    "Most fragmented",
                    "The five devices of each service with the largest trapped share.",
                    "bars", "percentunit",
                    (
                        Query(
                            series("fleet:fragmentation:worst5", OF_SERVICE),
                            "{{job}} {{instance}} {{torch_device}}", instant=True,
                        ),
                    ),
                    width=8, height=9, steps=FRAGMENTED, maximum=1, decimals=1, links=(ALLOCATOR_OF_SERIES,),
                ),
                Panel(
                    "Most retries in 10 min",
                    "The five devices of each service that flushed their cache most often; none where none "
                    "did.",
                    "bars", "none",
                    (
                        Query(
                            series("fleet:allocation_retries:worst5", OF_SERVICE),
                            "{{job}} {{instance}} {{torch_device}}", instant=True,
                        ),
                    ),
                    width=8, height=9, steps=FEW_ARE_WELL, no_value="none", decimals=0,
                    links=(ALLOCATOR_OF_SERIES,),
                ),
                Panel(
                    "Alerts",
                    "What fires or is about to, with its severity.",
                    "table", "none",
                    (Query(f'ALERTS{{alertname=~"TorchMem.*", {OF_SERVICE}}}'),),
                    width=24, height=8, no_value="none",
                    columns={
                        "alertname": Column("alert"),
                        "alertstate": Column("state"),
                        "severity": Column("severity"),
                        "job": Column("service"),
                        "instance": Column("instance"),
                        "torch_device": Column("device"),
                    },
                    links=(ALLOCATOR_OF_INSTANCE,),
                ),
            ),
        ),
        Row(
            "Services",
            (
                Panel(
                    "Least headroom",
                    "Of each service's devices, the one with the least.",
                    "lines", "bytes",
                    (Query(series("fleet:headroom:min", OF_SERVICE), "{{job}} {{torch_device}}"),),
                    width=8, height=9, steps=((None, RED), (256 * MIB, ORANGE), (1024 * MIB, GREEN)),
                ),
                Panel(
                    "Most fragmented",
                    "Of each service's devices, the one with the largest trapped share.",
                    "lines", "percentunit",
                    (Query(series("fleet:fragmentation:max", OF_SERVICE), "{{job}} {{torch_device}}"),),
                    width=8, height=9, maximum=1, steps=FRAGMENTED, show_steps=True,
                ),
                Panel(
                    "Retries in 10 min",
                    "Of all devices of a service.",
                    "lines", "none",
                    (Query(series("fleet:allocation_retries:sum", OF_SERVICE), "{{job}} {{torch_device}}"),),
                    width=8, height=9, steps=FEW_ARE_WELL,
                ),
                Panel(
                    "The ledger of the average device",
                    "Shares of the limit, averaged over all chosen devices: what the fleet's memory is "
                    "spent on.",
                    "stacked", "percentunit",
                    (
                        Query(
                            f"avg by (torch_memory_state) ({series('usage', OF_SERVICE)} "
                            f"/ on ({IDENTITY}, hw_id) group_left () {series('limit', OF_SERVICE)})",
                            "{{torch_memory_state}}",
                        ),
                    ),
                    width=12, height=9, maximum=1, colours=LEDGER,
                ),
                Panel(
                    "Processes that report",
                    "By service and device. A fall without a deployment is telemetry that is missing, or "
                    "servers that died.",
                    "lines", "none",
                    (Query(series("fleet:instances", OF_SERVICE), "{{job}} {{torch_device}}"),),
                    width=6, height=9, decimals=0,
                ),
                Panel(
                    "Devices with several processes",
                    "How many processes hold memory on one device, by hw.id, the name that DCGM and NVML "
                    "print: each is the other's external.",
                    "lines", "none",
                    (
                        Query(
                            "count by (hw_id) (" + series("limit", f'{OF_SERVICE}, hw_id!=""') + ") > 1",
                            "{{hw_id}}",
                        ),
                    ),
                    width=6, height=9, decimals=0, no_value="none",
                ),
            ),
        ),
    ),
)  # fmt: skip

BOARDS = (ALLOCATOR, REQUESTS, FLEET)

ANNOTATIONS = {
    "Alerts": 'ALERTS{alertstate="firing", alertname=~"TorchMem.*", job=~"$service"}',
}


def documents() -> dict[Path, str]:
    """What each file has to hold."""
    return {
        FOLDER / f"{board.uid}.json": json.dumps(
            json.loads(JSONEncoder().encode(dashboard_of(board, BOARDS, ANNOTATIONS))),
            indent=2,
            sort_keys=True,
        )
        + "\n"
        for board in BOARDS
    }


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"build.py takes --check or nothing, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    return check(documents(), "grafana/build.py") if arguments else write(documents())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
