# SPDX-License-Identifier: Apache-2.0
"""An unmodified program under `opentelemetry-instrument`, its telemetry received over real OTLP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opentelemetry_instrumentation_torchmem.cli.endpoint import Endpoint
from opentelemetry_instrumentation_torchmem.signals import METRICS, Per

MIB = 1 << 20
LAUNCHER = Path(sys.executable).with_name("opentelemetry-instrument")

SOMETIMES = {
    "torch.memory.telemetry.absent",  # no figure of a snapshot is absent here
    "torch.memory.oom.rejections",  # counted where the option that rejects is on
}

PROGRAM = """
import json, time, torch
kept = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(20)]
small = [torch.empty(1000, dtype=torch.uint8, device="cuda") for _ in range(100)]
pinned = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
del kept[::2], small[::3]
try:
    torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({
    "stats": torch.cuda.memory_stats(0), "host": torch.cuda.host_memory_stats(), "free": free, "total": total,
    "uuid": str(torch.cuda.get_device_properties(0).uuid), "version": torch.__version__,
}))
time.sleep(0.5)
"""


class Received:
    """What came over OTLP: the last points of each metric, and the spans."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        last: list[tuple[dict[str, Any], Any]] = []
        for request in self.requests:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        if metric.name == name:
                            data = getattr(metric, metric.WhichOneof("data"))
                            last = [(_attributes(point), _value(point)) for point in data.data_points]
        return last

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            metric.name: metric
            for request in self.requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name.startswith("torch.")
        }


def _attributes(point: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in point.attributes}


def _value(point: Any) -> Any:
    return getattr(point, point.WhichOneof("value")) if hasattr(point, "as_int") else point


def launched(
    gpu: Any, tmp_path: Path, *flags: str, program: str = PROGRAM, protocol: str = "grpc", **env: str | None
) -> tuple[Received, subprocess.CompletedProcess[str]]:
    """Run a program under the launcher, its exporter set to an endpoint of ours."""
    received = Received()
    (tmp_path / "app.py").write_text(program)
    with Endpoint(lambda request, _: received.requests.append(request), grpc_port=0, http_port=0) as endpoint:
        address = f"http://{endpoint.grpc_address if protocol == 'grpc' else endpoint.http_address}"
        done = subprocess.run(
            [
                LAUNCHER,
                "--traces_exporter",
                "otlp",
                "--metrics_exporter",
                "otlp",
                *flags,
                sys.executable,
                "app.py",
            ],
            cwd=tmp_path,
            env=gpu.environment(
                memory="1GiB",
                env={
                    "OTEL_SERVICE_NAME": "app",
                    "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                    "OTEL_EXPORTER_OTLP_ENDPOINT": address,
                    **env,
                },
            ),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    return received, done


def summed(points: list[tuple[dict[str, Any], Any]]) -> Any:
    return sum(value for _, value in points)


@pytest.mark.needs_emulation
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_every_metric_of_the_table_arrives_and_is_what_the_allocator_says(gpu, tmp_path, protocol):
    received, done = launched(gpu, tmp_path, protocol=protocol)
    truth = json.loads(done.stdout)
    stats = truth["stats"]
    assert "Traceback" not in done.stderr
    assert set(received.metrics) >= {row.name for row in METRICS if row.per is not Per.TARGET} - SOMETIMES
    for row in METRICS:
        if row.name in received.metrics:
            metric = received.metrics[row.name]
            assert metric.unit == row.unit, row.name
            data = getattr(metric, metric.WhichOneof("data"))
            assert metric.WhichOneof("data") == ("gauge" if row.kind.value == "gauge" else "sum"), row.name
            if row.kind.value != "gauge":
                assert data.is_monotonic is (row.kind.value == "counter"), row.name
            allowed = {attribute.name for attribute in row.attributes}
            needed = {attribute.name for attribute in row.attributes if attribute.required == "required"}
            for point in data.data_points:
                assert needed <= set(_attributes(point)) <= allowed, row.name

    def current(family: str, pool: str = "all") -> int:
        return stats[f"{family}.{pool}.current"]

    for name, family in {
        "allocated": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes",
        "requested": "requested_bytes", "inactive_split": "inactive_split_bytes", "segments": "segment",
        "blocks": "active",
    }.items():  # fmt: skip
        told = {
            labels["torch.memory.pool"]: value for labels, value in received.points(f"torch.memory.{name}")
        }
        assert told == {"small": current(family, "small_pool"), "large": current(family, "large_pool")}, name
    reserved, active = current("reserved_bytes"), current("active_bytes")
    split = current("inactive_split_bytes")
    single = {
        "limit": truth["total"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "fragmentation": split / reserved,
        "slack": 1 - active / reserved,
        "rounding": active - current("requested_bytes"),
        "allocation.retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
        "device.allocations": stats["num_device_alloc"],
        "device.frees": stats["num_device_free"],
        "device.syncs": stats["num_sync_all_streams"],
        "allocations": stats["allocation.all.allocated"],
        "turnover": stats["allocated_bytes.all.allocated"],
        "host.allocated": truth["host"]["active_bytes.current"],
        "host.reserved": truth["host"]["allocated_bytes.current"],
        "allocator.info": 1,
    }
    for name, value in single.items():
        ((_, told),) = received.points(f"torch.memory.{name}")
        assert told == pytest.approx(value, rel=1e-12), name
    assert stats["num_alloc_retries"] == stats["num_ooms"] == 1
    assert split > 0
    ledger = {labels["torch.memory.state"]: value for labels, value in received.points("torch.memory.usage")}
    assert ledger == {
        "allocated": current("allocated_bytes"),
        "pending_free": active - current("allocated_bytes"),
        "split_free": split,
        "cached_free": reserved - active - split,
        "external": truth["total"] - truth["free"] - reserved,
        "free": truth["free"],
    }
    assert sum(ledger.values()) == truth["total"]
    ((info, _),) = received.points("torch.memory.allocator.info")
    assert info["torch.version"] == truth["version"]
    ((labels, _),) = received.points("torch.memory.limit")
    assert labels == {"torch.device": "cuda:0", "hw.id": f"GPU-{truth['uuid']}"}
    ((_, age),) = received.points("torch.memory.reading.age")
    assert 0 <= age < 1
    steps = {labels["torch.memory.telemetry.step"]: value for labels, value in
             received.points("torch.memory.telemetry.duration")}  # fmt: skip
    assert steps["stats"] > 0
    assert summed(received.points("torch.memory.telemetry.skipped")) == 0


def test_options_are_flags_of_the_launcher(gpu, tmp_path):
    received, _ = launched(
        gpu, tmp_path, "--torchmem_excluded_metrics", "torch.memory.host.*,torch.memory.usage"
    )
    assert "torch.memory.limit" in received.metrics
    assert not {"torch.memory.usage", "torch.memory.host.reserved"} & set(received.metrics)


def test_a_bad_option_is_told_once_and_stops_nothing(gpu, tmp_path):
    received, done = launched(gpu, tmp_path, OTEL_PYTHON_TORCHMEM_SAMPLING="often")
    assert "torch.memory.limit" in received.metrics
    said = [line for line in done.stderr.splitlines() if "torchmem" in line]
    assert said == [
        "torchmem: sampling='often' (from OTEL_PYTHON_TORCHMEM_SAMPLING) is not allowed "
        "(one of auto, request, always); the default 'auto' is used"
    ]


CONFIGURATION = """
file_format: "1.0"
resource: {attributes: [{name: service.name, value: app}]}
meter_provider:
  readers:
    - periodic: {interval: 60000, exporter: {otlp_grpc: {endpoint: "%s"}}}
instrumentation/development:
  python:
    torchmem:
      excluded_metrics: [torch.memory.host.*, torch.memory.usge]
      targets: [nonsense]
      oom_dump_dir: /nowhere/at/all
      sampling: sometimes
      colour: blue
"""


def test_the_sdks_configuration_file_carries_options(gpu, tmp_path):
    program = PROGRAM
    received = Received()
    with Endpoint(lambda request, _: received.requests.append(request), grpc_port=0, http_port=0) as endpoint:
        (tmp_path / "otel.yaml").write_text(CONFIGURATION % f"http://{endpoint.grpc_address}")
        (tmp_path / "app.py").write_text(program)
        done = subprocess.run(
            [LAUNCHER, sys.executable, "app.py"],
            cwd=tmp_path,
            env=gpu.environment(
                memory="1GiB",
                env={
                    "OTEL_CONFIG_FILE": "otel.yaml",
                    "OTEL_PYTHON_TORCHMEM_SAMPLING": "always",  # the file beats it, also with a bad value
                },
            ),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert "torch.memory.limit" in received.metrics, done.stderr
    assert "torch.memory.host.reserved" not in received.metrics
    said = [line for line in done.stderr.splitlines() if line.startswith("torchmem")]
    assert len(said) == 6, done.stderr
    assert "unknown option colour='blue' (from the configuration file) is ignored" in said[0]
    assert "sampling='sometimes' (from the configuration file) is not allowed" in said[1]
    assert "excluded_metrics='torch.memory.usge' (from the configuration file) fits nothing" in said[2]
    assert "oom_dump_dir='/nowhere/at/all' (from the configuration file) cannot be written" in said[3]
    assert "target nonsense (from the configuration file) is not measured" in said[4]
    assert "no dump of an out of memory error: /nowhere/at/all: No such file" in said[5]


def test_a_program_that_never_imports_torch_gets_no_series_and_no_torch(gpu, tmp_path):
    program = "import sys; print('torch' in sys.modules)"
    received, done = launched(gpu, tmp_path, program=program)
    assert done.stdout.strip() == "False"
    assert received.metrics == {}
    assert "torchmem" not in done.stderr
