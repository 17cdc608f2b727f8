# SPDX-License-Identifier: Apache-2.0
"""What Compose and Kubernetes say of a file, without an engine or a cluster: their own loaders and types.

Built once with Go, or installed once by npm, into .cache/parts/ as the servers are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from .parts import CACHE, CannotBuild

HERE = Path(__file__).parent
LIMIT_S = 900
OPERATOR = "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"


def compose(file: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The project as compose's loader has it, all profiles. Raises ValueError with the loader's words."""
    binary = _made("composeload", _build_loader) / "composeload"
    done = subprocess.run(
        [binary, file],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], **(environment or {})},
    )
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return json.loads(done.stdout)


def schema(kind: str) -> dict[str, Any]:
    """The schema of a resource of the Prometheus operator's, from its own types; unknown keys are refused."""
    for file in _made("schemas", _generate_schemas).glob("*.yaml"):
        resource = yaml.safe_load(file.read_text())
        if resource["spec"]["names"]["kind"] == kind:
            found = resource["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            found["properties"]["metadata"] = {"type": "object"}
            return _strict(found)
    raise KeyError(f"the Prometheus operator has no {kind}")


def types() -> Path:
    """Where the published types of OpenTelemetry's operator are. Raises CannotBuild where npm has none."""
    return _made("instrumentation", _install_types)


def instrumentation(resource: dict[str, Any]) -> list[str]:
    """What the published types have against an Instrumentation: by tsc, and by the schema beside them."""
    folder = types()
    module = "@kubernetes-models/opentelemetry-operator/opentelemetry.io/v1alpha1/Instrumentation"
    literal = json.dumps(resource)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        (place / "it.ts").write_text(
            f'import {{ IInstrumentation }} from "{module}";\n'
            f"export const it: IInstrumentation = {literal};\n"
        )
        (place / "it.mjs").write_text(
            f'import {{ Instrumentation }} from "{module}";\nnew Instrumentation({literal}).validate();\n'
        )
        typed = _run(
            ["node", folder / "node_modules" / "typescript" / "bin" / "tsc",
             "--noEmit", "--strict", "--skipLibCheck",
             "--module", "nodenext", "--moduleResolution", "nodenext", "--target", "es2022", place / "it.ts"],
            folder,
        )  # fmt: skip
        valid = _run(["node", place / "it.mjs"], folder)
    said = [line for line in typed.stdout.splitlines() if "error TS" in line] if typed.returncode else []
    if valid.returncode:
        said += [line for line in valid.stderr.splitlines() if "data/" in line] or [valid.stderr]
    return said


def _strict(node: Any) -> Any:
    """A schema that refuses what the API server would drop in silence."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(value) for key, value in node.items()}
    if strict.get("type") == "object" and isinstance(strict.get("properties"), dict):
        strict.setdefault("additionalProperties", False)
    if strict.pop("x-kubernetes-int-or-string", False):
        strict = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return strict


# ----------------------------------------------------------------------------------------- built or installed


def _made(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The folder that `make` filled, keyed by what it is made from. Raises CannotBuild in one line."""
    source = HERE / name
    digest = hashlib.sha256()
    for file in sorted(path for path in source.iterdir() if path.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    made = CACHE / f"{name}-{digest.hexdigest()[:10]}"
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=CACHE) as scratch:
            place = Path(scratch) / "made"
            place.mkdir()
            make(source, place)
            if not made.exists():  # another process may have been sooner
                os.replace(place, made)
    return made


def _build_loader(source: Path, place: Path) -> None:
    _step(["go", "build", "-o", place / "composeload", "."], source)


def _generate_schemas(source: Path, place: Path) -> None:
    generate = ["go", "tool", "controller-gen", "crd:crdVersions=v1,maxDescLen=0"]
    _step([*generate, f"paths={OPERATOR}", f"output:crd:dir={place}"], source)


def _install_types(source: Path, place: Path) -> None:
    shutil.copy(source / "package.json", place)
    _step(["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"], place)


def _step(argv: Sequence[object], folder: Path) -> None:
    if shutil.which(str(argv[0])) is None:
        raise CannotBuild(f"{argv[0]} is not on PATH: install {'Go' if argv[0] == 'go' else 'Node.js'}")
    done = _run(argv, folder)
    if done.returncode:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        raise CannotBuild(f"{' '.join(map(str, argv[:3]))} in {folder}: {' '.join(last)}")


def _run(argv: Sequence[object], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, argv)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={**os.environ, "GOWORK": "off"},
    )
