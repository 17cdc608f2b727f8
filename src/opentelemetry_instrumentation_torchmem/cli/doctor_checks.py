# SPDX-License-Identifier: Apache-2.0
"""Whether this environment is fit: versions, entry points, conflicts, options, exporters.

Imports no torch and initialises nothing; connects to the exporters' endpoints and sends nothing.
"""

from __future__ import annotations

import ast
import glob
import importlib.metadata as metadata
import importlib.util
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from ..advice.evidence import variables_of
from ..allocator.settings import AllocatorSettings
from ..allocator.source import ASYNC, NATIVE, UNCACHED
from ..config import Config
from ..package import INSTRUMENTS
from ..requests.specs import TargetSpec
from .doctor_settings import KNOWN_UNTIL, refused
from .doctor_signals import Machine, absences

DISTRIBUTION = "opentelemetry-instrumentation-torchmem"
OK, NOTE, PROBLEM = "ok", "note", "problem"
_TIMEOUT = 2.0
_OTHERS = ("opentelemetry-sdk", "opentelemetry-distro", "opentelemetry-exporter-otlp")
_CONCERNED = re.compile(r"opentelemetry-|wrapt$|grpcio$|protobuf$")
_SIGNALS = ("metrics", "traces", "logs")
_PORTS = {"grpc": 4317, "http/protobuf": 4318, "http/json": 4318}
_WITH_OTLP = f"pip install '{DISTRIBUTION}[otlp]'"
_OF_FILES = "opentelemetry-configuration"
_UNCACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    level: str
    """``ok``, ``note`` (nothing to be done) or ``problem``."""
    text: str


def checks(environ: Mapping[str, str]) -> list[Check]:
    """Everything that can be said without a running process."""
    return list(dict.fromkeys(check for look in _LOOKS for check in look(environ)))


def machine(environ: Mapping[str, str]) -> Machine:
    """What decides which signals there are, as far as it shows from outside."""
    settings = _settings(environ)
    backend = NATIVE
    if any(name in environ for name in _UNCACHING):
        backend = UNCACHED
    elif "backend:cudaMallocAsync" in settings.text.replace(" ", ""):
        backend = ASYNC
    config = _config(environ, lambda _: None)
    tells_fraction = "def get_per_process_memory_fraction" in _file_of_torch("cuda/memory.py")
    without_gpu = _hidden(environ) or ("" if _device_files() else "no GPU's device file is seen")
    return Machine(_release(_version("torch")), backend, settings, config, tells_fraction, without_gpu)


# ---- what is installed ----


def _python(_: Mapping[str, str]) -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", OK if sys.version_info >= (3, 10) else PROBLEM, f"{version}, {sys.executable}")


def _package(_: Mapping[str, str]) -> Iterator[Check]:
    version = _version(DISTRIBUTION)
    if version is None:
        yield Check("package", PROBLEM, f"{DISTRIBUTION} is imported, but not installed: pip install it")
    else:
        yield Check("package", OK, f"{DISTRIBUTION} {version}")


def _torch(_: Mapping[str, str]) -> Iterator[Check]:
    version = _version("torch")
    if version is None:
        yield Check("torch", PROBLEM, "torch is not installed here: there is nothing to be told")
        return
    (wanted,) = (Requirement(each) for each in INSTRUMENTS)
    if not wanted.specifier.contains(version, prereleases=True):
        yield Check("torch", PROBLEM, f"torch {version}: the launcher asks for {wanted.specifier}")
        return
    built = _built_for()
    if built is None:
        yield Check("torch", PROBLEM, f"torch {version} is built without CUDA or ROCm: it has no GPU memory")
    else:
        yield Check("torch", OK, f"{version}, built for {built}")


def _built_for() -> str | None:
    """By torch's own file, which is read, not run."""
    try:
        parsed = ast.parse(_file_of_torch("version.py"))
    except SyntaxError:
        return None
    told: dict[str, object] = {}
    for each in parsed.body:
        target = each.targets[0] if isinstance(each, ast.Assign) else None
        target = each.target if isinstance(each, ast.AnnAssign) else target
        value = getattr(each, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            told[target.id] = value.value
    names = (("cuda", "CUDA"), ("hip", "ROCm"))
    return next((f"{words} {told[name]}" for name, words in names if told.get(name)), None)


def _file_of_torch(name: str) -> str:
    """What one of its files says; nothing is run. Empty where it is not there."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        with suppress(OSError):
            return Path(place, name).read_text(encoding="utf-8")
    return ""


def _device(environ: Mapping[str, str]) -> Iterator[Check]:
    hidden = _hidden(environ)
    if hidden:
        yield Check("device", PROBLEM, hidden)
    elif found := _device_files():
        yield Check("device", OK, ", ".join(found))
    else:
        yield Check("device", NOTE, "no GPU's device file is seen; CUDA was not initialised to ask it")


def _hidden(environ: Mapping[str, str]) -> str:
    """The variable that hides every GPU, in words; empty where none does."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if environ.get(name) in ("", "-1", "void", "none"):
            return f"{name}={environ[name]}: no GPU is visible to this environment"
    return ""


def _device_files() -> list[str]:
    """Of NVIDIA's GPUs, AMD's, of either in WSL, and of NVIDIA's boards whose GPU shares the memory."""
    patterns = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/nvmap")
    for pattern in patterns:
        if found := sorted(glob.glob(pattern)):
            return found
    return []


def _requirements(environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether what is installed goes together, as far as telemetry is concerned."""
    wrong: list[str] = []
    known = {_canonical(each.metadata["Name"] or "") for each in metadata.distributions()}
    for name in sorted(known):
        if not _CONCERNED.match(name):
            continue
        for text in metadata.requires(name) or ():
            try:
                needed = Requirement(text)
            except InvalidRequirement:
                continue
            if not _CONCERNED.match(_canonical(needed.name)):
                continue
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            version = _version(needed.name)
            if version is None:
                wrong.append(f"{name} needs {needed.name}, which is not installed")
            elif not needed.specifier.contains(version, prereleases=True):
                wrong.append(f"{name} needs {needed.name}{needed.specifier}, and {version} is installed")
    versions = [
        f"{each} {version}" for each in ("opentelemetry-api", *_OTHERS) if (version := _version(each))
    ]
    if wrong:
        yield from (Check("conflict", PROBLEM, each) for each in wrong)
    else:
        yield Check("versions", OK, ", ".join(versions))
    if environ.get("OTEL_CONFIG_FILE") and _version(_OF_FILES) is None:
        text = f"OTEL_CONFIG_FILE is set and {_OF_FILES} is not installed: pip install {_OF_FILES}"
        yield Check("versions", PROBLEM, text)
    if _version("opentelemetry-sdk") is None:
        yield Check("sdk", PROBLEM, f"opentelemetry-sdk is not installed: {_WITH_OTLP}")


def _entry_points(_: Mapping[str, str]) -> Iterator[Check]:
    found = [
        each for each in metadata.entry_points(group="opentelemetry_instrumentor") if each.name == "torchmem"
    ]
    if not found:
        yield Check("entry point", PROBLEM, "opentelemetry-instrument does not find torchmem: reinstall it")
        return
    if len({each.value for each in found}) > 1:
        values = ", ".join(sorted({each.value for each in found}))
        yield Check("entry point", PROBLEM, f"more than one package calls itself torchmem: {values}")
        return
    try:
        found[0].load()
    except Exception as error:
        yield Check("entry point", PROBLEM, f"{found[0].value} cannot be loaded: {error}")
        return
    yield Check("entry point", OK, found[0].value)
    if shutil.which("opentelemetry-instrument") is None:
        yield Check("launcher", NOTE, "opentelemetry-instrument is not on PATH: instrument() in code works")


# ---- what is set ----


def _switches(environ: Mapping[str, str]) -> Iterator[Check]:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Check("switch", PROBLEM, "OTEL_SDK_DISABLED=true: nothing is exported")
    disabled = {each.strip() for each in environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    if disabled & {"torchmem", "*"}:
        yield Check(
            "switch", PROBLEM, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS keeps the launcher from instrumenting"
        )


def _options(environ: Mapping[str, str]) -> Iterator[Check]:
    said: list[str] = []
    config = _config(environ, said.append)
    for each in said:
        yield Check("option", PROBLEM, each.removeprefix("torchmem: "))
    for option in config.origins:
        value: object = getattr(config, option)
        for part in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,):
            told = config.told(option, part.target if isinstance(part, TargetSpec) else part)
            if isinstance(part, TargetSpec) and part.problem is not None:
                yield Check("option", PROBLEM, f"{told} is no target: {part.problem}")
            else:
                yield Check("option", OK, told)


def _config(environ: Mapping[str, str], warn: Callable[[str], object]) -> Config:
    """The options of a process that is started with these variables."""
    return Config.of(_in_file(environ), environ, warn, given_by="the configuration file")


def _allocator(environ: Mapping[str, str]) -> Iterator[Check]:
    for name in _UNCACHING:
        if name in environ:
            yield Check("allocator", PROBLEM, f"{name} is set: nothing is cached, and nothing can be told")
    variables = variables_of(environ)
    settings = _settings(environ)
    first, *others = variables or [""]
    if others:
        yield Check("allocator", PROBLEM, f"{first} replaces {', '.join(others)} wholly: set one of them")
    for why, is_unknown in refused(variables.get(first, "")):
        release = _release(_version("torch"))
        if is_unknown and release is not None and release > KNOWN_UNTIL:
            until = ".".join(map(str, KNOWN_UNTIL))
            yield Check("allocator", NOTE, f"{first}: {why} (as of torch {until})")
        else:
            yield Check("allocator", PROBLEM, f"{first}: {why}: torch fails at CUDA's start")
    if settings.expandable_segments and settings.max_split_size is not None:
        yield Check(
            "allocator", PROBLEM, f"{first}: max_split_size_mb does harm beside expandable_segments:True"
        )
    if settings.garbage_collection_threshold and "per_process_memory_fraction" not in settings.text:
        yield Check(
            "allocator",
            NOTE,
            f"{first}: garbage_collection_threshold does nothing unless the program sets a memory fraction "
            "below 1",
        )


_FILES = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
"""The second is that of older SDKs, which read the file themselves."""


def _file(environ: Mapping[str, str]) -> Any:
    """The SDK's configuration file as the SDK reads it, or the exception; None where it has none to read."""
    file = environ.get("OTEL_CONFIG_FILE")
    if not file or not Path(file).is_file() or _version(_OF_FILES) is None:
        return None
    try:
        return importlib.import_module("opentelemetry.configuration").load_config_file(file)
    except Exception as error:
        return error


def _in_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """This package's options in the configuration file."""
    instrumented = getattr(_file(environ), "instrumentation_development", None)
    python: Mapping[str, Any] = getattr(instrumented, "python", None) or {}
    options: Mapping[str, Any] = python.get("torchmem") or {}
    return {name: value for name, value in options.items() if name != "enabled"}


def _exporters(environ: Mapping[str, str]) -> Iterator[Check]:
    variable = next((name for name in _FILES if environ.get(name)), None)
    if variable is not None:
        file = environ[variable]
        if not Path(file).is_file():
            yield Check("exporter", PROBLEM, f"{file} ({variable}): no such file")
        elif isinstance(read := _file(environ), Exception):
            why = (str(read).splitlines() or [repr(read)])[0]
            yield Check("exporter", PROBLEM, f"{file} ({variable}) cannot be read: {why}")
        else:
            yield Check("exporter", OK, f"{file} says where telemetry goes: its endpoints are not looked at")
        return
    asked: dict[tuple[str, int], list[str]] = {}
    default = "otlp" if _version("opentelemetry-distro") else ""
    for signal in _SIGNALS:
        chosen = environ.get(f"OTEL_{signal.upper()}_EXPORTER", default)
        names = [each.strip() for each in chosen.split(",") if each.strip()]
        if not names:
            text = f"no exporter of {signal} is set, and without opentelemetry-distro there is no default"
            yield Check("exporter", NOTE, text)
        for name in names:
            if name == "none":
                level = PROBLEM if signal == "metrics" else NOTE
                yield Check(
                    "exporter", level, f"OTEL_{signal.upper()}_EXPORTER=none: no {signal} are exported"
                )
                continue
            group = f"opentelemetry_{signal}_exporter"
            if not any(each.name == name for each in metadata.entry_points(group=group)):
                hint = f": {_WITH_OTLP}" if name.startswith("otlp") else ""
                yield Check("exporter", PROBLEM, f"the {signal} exporter {name} is not installed{hint}")
                continue
            if name.startswith("otlp"):
                place = _endpoint(name, signal, environ)
                if isinstance(place, Check):
                    yield place
                else:
                    asked.setdefault(place, []).append(signal)
    for (host, port), signals in asked.items():
        yield _reached(host, port, " and ".join(signals))


def _endpoint(exporter: str, signal: str, environ: Mapping[str, str]) -> tuple[str, int] | Check:
    def told(name: str) -> str | None:
        own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"
        return environ.get(own) or environ.get(f"OTEL_EXPORTER_OTLP_{name}")

    protocol = told("PROTOCOL") or "grpc"
    if exporter != "otlp":
        protocol = "grpc" if exporter == "otlp_proto_grpc" else "http/protobuf"
    if protocol not in _PORTS:
        return Check("exporter", PROBLEM, f"OTLP protocol {protocol}: one of {', '.join(_PORTS)}")
    text = told("ENDPOINT") or f"http://localhost:{_PORTS[protocol]}"
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        scheme, host = parts.scheme, parts.hostname
        port = parts.port or (443 if scheme == "https" else _PORTS[protocol])
    except ValueError:
        scheme = host = port = ""
    if not host or not port:
        return Check("exporter", PROBLEM, f"the endpoint {text} is no address, as http://host:4317 is")
    if scheme not in ("http", "https") and (scheme or protocol != "grpc"):
        what = f"begins with {scheme}://" if scheme else "has no scheme"
        return Check("exporter", PROBLEM, f"the endpoint {text} {what}: http:// or https://")
    return host, int(port)


def _reached(host: str, port: int, signals: str) -> Check:
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT).close()
    except OSError as error:
        why = error.strerror or str(error)
        return Check(
            "exporter",
            PROBLEM,
            f"nobody answers at {host}:{port}, where {signals} go ({why}): start a collector or torchmem top",
        )
    return Check("exporter", OK, f"{host}:{port} answers, where {signals} go")


def _signals(environ: Mapping[str, str]) -> Iterator[Check]:
    for name, why in absences(machine(environ)).items():
        yield Check("absent", NOTE, f"{name}: {why}")


def _settings(environ: Mapping[str, str]) -> AllocatorSettings:
    variables = variables_of(environ)
    name = next(iter(variables), "default")
    return AllocatorSettings.parse(variables.get(name, ""), name)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return None if found is None else (int(found[1]), int(found[2]))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_LOOKS: tuple[Callable[[Mapping[str, str]], Iterator[Check]], ...] = (
    _python,
    _package,
    _torch,
    _device,
    _requirements,
    _entry_points,
    _switches,
    _options,
    _allocator,
    _exporters,
    _signals,
)
