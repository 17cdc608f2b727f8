# SPDX-License-Identifier: Apache-2.0
"""An environment that really has no torch: the server runs as if this package were not there."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

ABSENT = ("torch", "functorch", "torchgen", "triton", "nvidia", "cuda_", "cuda-", "transformers", "diffusers")
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with all that is installed here but torch and what stands on it."""
    place = tmp_path_factory.mktemp("bare")
    farm = place / "packages"
    farm.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(ABSENT) and entry.suffix != ".pth":
            (farm / entry.name).symlink_to(entry)
    venv.create(place / "venv", symlinks=True)
    library = next((place / "venv" / "lib").glob("python*/site-packages"))
    (library / "packages.pth").write_text(f"{farm}\n{SOURCE}\n")
    return place / "venv" / "bin" / "python"


def run(python: Path, program: str, *, launched: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PYTHON"))
    }
    argv = [str(python), "-c", program]
    if launched:
        launcher = (
            "import sys; from opentelemetry.instrumentation.auto_instrumentation import run; "
            "sys.argv = ['opentelemetry-instrument', '--traces_exporter', 'none', '--logs_exporter', 'none', "
            "'--metrics_exporter', 'console', *sys.argv[1:]]; run()"
        )
        argv = [str(python), "-c", launcher, *argv]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)


def test_under_the_launcher_nothing_is_said_and_nothing_exported(bare_python):
    done = run(bare_python, "print('served')", launched=True)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout
    assert "torch.memory" not in done.stdout
    assert "Traceback" not in done.stderr


def test_instrument_in_code_tells_why_not_and_stops_nothing(bare_python):
    done = run(
        bare_python,
        "from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor\n"
        "TorchMemInstrumentor().instrument()\n"
        "print('served')",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"
    assert "torch >= 2.2.0a0" in done.stderr


def test_without_the_dependency_check_there_are_no_series_either(bare_python):
    done = run(
        bare_python,
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from exported import Exported\n"
        "from opentelemetry_instrumentation_torchmem import TorchMemInstrumentor, track\n"
        "exported = Exported()\n"
        "TorchMemInstrumentor().instrument(meter_provider=exported.provider, skip_dep_check=True)\n"
        "print(sorted(exported.collect().names))\n"
        "with track('block'):\n"
        "    pass\n"
        "print(sorted(exported.collect().names))\n"
        "try:\n"
        "    import torch\n"
        "except ImportError:\n"
        "    print('no torch')\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[]",
        "[]",
        "no torch",
    ]
