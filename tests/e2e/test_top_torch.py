# SPDX-License-Identifier: Apache-2.0
"""An unmodified PyTorch program under `opentelemetry-instrument`, watched by `torchmem top`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, torch
held = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (30, 3, 50, 7)]
del held[0], held[1]
torch.cuda.synchronize()
stats = torch.cuda.memory_stats()
print(json.dumps({
    "device": f"cuda:{torch.cuda.current_device()}",
    "reserved": stats["reserved_bytes.all.current"],
    "retries": stats["num_alloc_retries"],
    "ooms": stats["num_ooms"],
}))
"""


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_what_torch_says_is_what_top_says(gpu, tmp_path, protocol):
    told = tmp_path / "summary.json"
    main = "import sys; from opentelemetry_instrumentation_torchmem.cli import main; sys.exit(main())"
    top = subprocess.Popen(
        [sys.executable, "-c", main, "top", "--grpc-port", "0", "--http-port", "0", "--summary-json", told],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        addresses = re.search(r"gRPC (\S+), HTTP (\S+);", top.stdout.readline())
        address = addresses[1 if protocol == "grpc" else 2]
        (tmp_path / "app.py").write_text(PROGRAM)
        app = subprocess.run(
            [
                Path(sys.executable).with_name("opentelemetry-instrument"),
                *("--traces_exporter", "otlp", "--metrics_exporter", "otlp"),
                *("--exporter_otlp_protocol", protocol),
                *("--exporter_otlp_endpoint", f"http://{address}"),
                *(sys.executable, "app.py"),
            ],
            cwd=tmp_path,
            env=gpu.environment(memory="1GiB", env={"OTEL_SERVICE_NAME": "app"}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert app.returncode == 0, app.stderr
        assert "export" not in app.stderr, "no exporter complained"
        top.terminate()
        top.communicate(timeout=20)
    finally:
        top.kill()
        top.wait()
    truth = json.loads(app.stdout)
    (process,) = json.loads(told.read_text())["processes"]
    (device,) = process["devices"]
    assert process["service"] == "app"
    assert truth["reserved"] > 80 << 20
    assert {
        "device": device["device"],
        "reserved": device["reserved_last"],
        "retries": device["retries"],
        "ooms": device["ooms"],
    } == truth
