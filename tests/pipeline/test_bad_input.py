# SPDX-License-Identifier: Apache-2.0
"""What is wrong is said in one line that names it and how to mend it, and nothing is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline import parts as parts_room
from pipeline.parts import ROOT, CannotBuild, part
from pipeline.servers import CONFIG, CannotStart, Server, alertmanager, collector, jaeger, prometheus
from pipeline.stack import example

BASE, SCRAPE = "otel-collector.yaml", "metrics-scrape.yaml"
PROMETHEUS = "prometheus-scrape.yaml"


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


def program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return path


# --------------------------------------------------------------------------------------------- typos


def typo(folder: Path, name: str, right: str, wrong: str, of: str = ".") -> Path:
    """A copy of a committed file with one thing misspelt."""
    text = (CONFIG / of / name).read_text()
    assert right in text
    path = folder / name
    path.write_text(text.replace(right, wrong, 1))
    return path


COLLECTOR_TYPOS = {
    "a key": (BASE, "limit_mib", "limit_mb", "invalid keys: limit_mb"),
    "a component": (BASE, "tail_sampling:\n", "tail_samplng:\n", 'unknown type: "tail_samplng"'),
    "a reference": (
        BASE,
        ", tail_sampling]",
        ", tail_sample]",
        'references processor "tail_sample" which is not',
    ),
    "a colon": (BASE, "receivers:\n", "receivers\n", "not valid YAML"),
    "a duration": (BASE, "${env:DECISION_WAIT:-70s}", "70 seconds", "'decision_wait' time: unknown unit"),
    "a number": (BASE, "${env:MEMORY_LIMIT_MIB:-512}", "lots", "'limit_mib' expected type 'uint32'"),
    "a condition": (BASE, 'ooms"] > 0', 'ooms"] >> 0', "condition has invalid syntax"),
}


@pytest.mark.parametrize("what", COLLECTOR_TYPOS)
def test_a_typo_in_the_collectors_file_is_named_with_the_file(tmp_path: Path, what: str) -> None:
    name, right, wrong, said = COLLECTOR_TYPOS[what]
    file = typo(tmp_path, name, right, wrong)
    with pytest.raises(CannotStart) as error:
        collector(tmp_path, [file, SCRAPE]).start()
    line = one_line(error.value)
    assert said in line
    assert f"mend it in {file}" in line


OTHER_TYPOS = {
    "prometheus, a key": (
        prometheus,
        PROMETHEUS,
        "scrape_interval",
        "scrape_intervall",
        "scrape_intervall not found",
    ),
    "prometheus, a colon": (prometheus, PROMETHEUS, "global:", "global", "is not YAML"),
    "prometheus, a duration": (
        prometheus,
        PROMETHEUS,
        "interval: 15s",
        "interval: fast",
        "not a valid duration",
    ),
    "alertmanager, a key": (
        alertmanager,
        "alertmanager.yaml",
        "group_wait",
        "group_wat",
        "field group_wat not found",
    ),
    "alertmanager, a receiver": (
        alertmanager,
        "alertmanager.yaml",
        "receiver: webhook",
        "receiver: webhok",
        'undefined receiver "webhok"',
    ),
    "jaeger, an extension": (
        jaeger,
        "jaeger.yaml",
        "jaeger_query:",
        "jaeger_qery:",
        'unknown type: "jaeger_qery"',
    ),
    "jaeger, a key": (jaeger, "jaeger.yaml", "max_traces", "max_trace", "invalid keys: max_trace"),
}


@pytest.mark.parametrize("what", OTHER_TYPOS)
def test_a_typo_in_another_servers_file_is_named_with_the_file(tmp_path: Path, what: str) -> None:
    server, name, right, wrong, said = OTHER_TYPOS[what]
    file = typo(tmp_path, name, right, wrong, of="." if server is jaeger else "prometheus")
    with pytest.raises(CannotStart) as error:
        server(tmp_path, file).start()
    line = one_line(error.value)
    assert said in line
    assert str(file) in line


def test_a_rule_that_is_no_expression_is_named_with_its_place(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text('groups: [{name: some, rules: [{record: "torchmem:a", expr: "sum(("}]}]')
    with pytest.raises(CannotStart) as error:
        prometheus(tmp_path, PROMETHEUS, change={"rule_files": [str(rules)]}).start()
    line = one_line(error.value)
    assert str(rules) in line
    assert "unclosed left parenthesis" in line


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CannotStart, match=r"there is no configuration file .*otel-colector.yaml: give a file of"
    ):
        collector(tmp_path, ["otel-colector.yaml", SCRAPE])


@pytest.mark.parametrize(
    ("file", "variable"), [("tls.yaml", "TLS_CERT_FILE"), ("bearer-token.yaml", "TOKEN_FILE")]
)
def test_a_secret_that_is_not_there_is_named_and_nobody_is_let_in_without(
    tmp_path: Path, file: str, variable: str
) -> None:
    environment = {"TLS_CERT_FILE": "/nowhere", "TLS_KEY_FILE": "/nowhere", "TOKEN_FILE": "/nowhere"}
    with pytest.raises(CannotStart) as error:
        collector(tmp_path, [BASE, SCRAPE, file], environment=environment).start()
    assert "/nowhere" in one_line(error.value)
    assert f"collector-config/{file}" in one_line(error.value)
    assert variable in (CONFIG / file).read_text()


# ----------------------------------------------------------------------------------- a port in use


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def servers_at(port: int, folder: Path) -> dict[str, Server]:
    return {
        "otelcol": collector(folder, ports={"grpc": port}),
        "prometheus": prometheus(folder, PROMETHEUS, port=port),
        "alertmanager": alertmanager(folder, port=port),
        "jaeger": jaeger(folder, ports={"query": port}),
        "server": example(folder, "127.0.0.1:4317", port=port),
    }


@pytest.mark.parametrize("name", ["otelcol", "prometheus", "alertmanager", "jaeger", "server"])
def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path, taken: int, name: str) -> None:
    with pytest.raises(CannotStart) as error:
        servers_at(taken, tmp_path)[name].start()
    line = one_line(error.value)
    assert line.startswith(f"{name} wants port {taken} on 127.0.0.1, and another program listens there")
    assert "choose another port" in line
    assert psutil.Process().children(recursive=True) == []


def test_a_port_that_is_taken_meanwhile_is_named_too(tmp_path: Path, taken: int) -> None:
    with pytest.raises(CannotStart) as error:
        collector(tmp_path, environment={"OTLP_GRPC_LISTEN": f"127.0.0.1:{taken}"}).start()
    assert f"another program listens at 127.0.0.1:{taken}: end that one" in one_line(error.value)


# ------------------------------------------------------------------------- a missing binary or toolchain


def test_a_binary_of_ones_own_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMEM_OTELCOL", "/nowhere/otelcol")
    with pytest.raises(CannotBuild) as error:
        part("otelcol")
    line = one_line(error.value)
    assert line.startswith("TORCHMEM_OTELCOL=/nowhere/otelcol is not a program: give the path of otelcol")


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a PATH with nothing on it but what the test puts into the folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setattr(parts_room, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(programs))
    return programs


def test_a_missing_toolchain_is_told_with_what_helps(nothing_built: Path) -> None:
    with pytest.raises(CannotBuild) as error:
        part("jaeger")
    line = one_line(error.value)
    assert line.startswith("jaeger is built with Go, and there is no `go` on PATH: install Go 1.25 or later")
    assert "TORCHMEM_JAEGER" in line


def test_an_old_toolchain_is_told_with_what_helps(nothing_built: Path) -> None:
    program(nothing_built / "go", "echo go version go1.19.8 linux/amd64")
    with pytest.raises(
        CannotBuild, match=r"Go 1\.25 or later, and .*/go is go version go1\.19\.8 .*install a later"
    ):
        part("promtool")


def test_a_build_that_fails_says_why_and_leaves_no_binary(nothing_built: Path) -> None:
    program(
        nothing_built / "go",
        '[ "$1" = version ] && echo go version go1.26.0 linux/amd64 && exit 0',
        'echo "go: module lookup disabled by GOPROXY=off" >&2; exit 1',
    )
    with pytest.raises(CannotBuild) as error:
        part("prometheus")
    line = one_line(error.value)
    assert "cannot be built: go: module lookup disabled by GOPROXY=off (all of it: " in line
    assert [each.name for each in parts_room.CACHE.rglob("prometheus")] == []


def test_a_part_that_there_is_not_is_told_with_those_there_are() -> None:
    with pytest.raises(CannotBuild, match="no part 'grafana': it is one of otelcol, promtool, prometheus"):
        part("grafana")


def test_building_from_the_command_line_ends_with_the_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHMEM_JAEGER": "/nowhere/jaeger"}
    command = [sys.executable, "-m", "tests.pipeline.parts", "jaeger"]
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert len(told.stderr.splitlines()) == 1
    assert told.stderr.startswith("TORCHMEM_JAEGER=/nowhere/jaeger is not a program")


# ---------------------------------------------------------------------------- an unsupported collector


@pytest.mark.parametrize("release", ["otelcol-contrib version 0.130.1", "otelcol version 0.164.9", "what?"])
def test_a_collector_of_an_earlier_release_is_refused_with_the_one_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    own = program(tmp_path / "otelcol", f"echo {release!r}")
    monkeypatch.setenv("TORCHMEM_OTELCOL", str(own))
    with pytest.raises(CannotStart) as error:
        collector(tmp_path)
    line = one_line(error.value)
    assert line.startswith(f"{own} is a collector ")
    assert (
        "collector-config/ is written for 0.165.0 or later: take that one, or unset TORCHMEM_OTELCOL" in line
    )
