# SPDX-License-Identifier: Apache-2.0
"""What is wrong is said in one line that names it and how to mend it, and nothing is left behind."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline import parts as parts_room
from pipeline.parts import ROOT, CannotBuild, part
from pipeline.servers import CONFIG, CannotStart, Server, alertmanager, checker, collector, jaeger, prometheus
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
    "a duration": (
        BASE,
        "${env:DECISION_WAIT_SECONDS:-70}.s",
        "70 seconds",
        "'decision_wait' time: unknown unit",
    ),
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


# ------------------------------------------------------------------------------------- a place to write


@pytest.mark.parametrize(
    ("variable", "files", "where"),
    [
        ("STORAGE_DIRECTORY", (SCRAPE,), "storage"),
        ("LOGS_FILE", (SCRAPE,), "logs.jsonl"),
        ("WAL_DIRECTORY", ("metrics-remote-write.yaml",), "wal"),
    ],
)
def test_a_place_that_may_not_be_written_is_named_and_the_readme_has_what_helps(
    tmp_path: Path, variable: str, files: tuple[str, ...], where: str
) -> None:
    in_the_way = tmp_path / "a-file"
    in_the_way.touch()
    with pytest.raises(CannotStart) as error:
        collector(tmp_path, [BASE, *files], environment={variable: str(in_the_way / where)}).start()
    assert str(in_the_way) in one_line(error.value)
    readme = (CONFIG / "README.md").read_text()
    assert f" {variable}=$PWD/data/{where}" in readme
    assert f"`{variable}`" in readme.split("## When it does not start")[1]


# --------------------------------------------------------------------------------- a wrong variable

WHOLE = "is not a whole number above 0 without a unit, like 180"
WRONG = {
    "METRIC_EXPIRATION_SECONDS": (("3m", "180s", "1.5", "0", "-5", "", "abc"), WHOLE),
    "DECISION_WAIT_SECONDS": (("70s", "1m10s", "0.5", "0", "-1", ""), WHOLE),
    "QUEUE_BYTES": (("256MiB", "0", "", "1e9"), WHOLE),
    "MEMORY_LIMIT_MIB": (("1GiB", "0", ""), WHOLE),
    "MEMORY_SPIKE_MIB": (("128MiB", ""), WHOLE),
    "KEPT_GROWTH_BYTES": (("", "256MiB"), WHOLE),
    "KEPT_SHARE_PERCENT": (("500", "100.5", "-1", "5%", ""), "is not a number from 0 to 100, like 5"),
    "TRACES_ENDPOINT": (("", "127.0.0.1"), "is not host:port, like 127.0.0.1:4317"),
    "TRACES_INSECURE": (("yes", ""), "is not true or false"),
    "OTLP_GRPC_LISTEN": (("", "4317"), "is not host:port, like 127.0.0.1:4317"),
    "STORAGE_DIRECTORY": (("", "storage"), "is not a whole path, like /etc/otelcol/one"),
    "PROMETHEUS_OTLP_URL": (("", "127.0.0.1:9090"), "is not a URL, like http://127.0.0.1:9090/"),
}
RIGHT = {
    "METRIC_EXPIRATION_SECONDS": "90",
    "KEPT_SHARE_PERCENT": "0",
    "TLS_CLIENT_CA_FILE": "",
    "SELF_PORT": "1",
}
CHECK = [sys.executable, str(CONFIG / "check.py")]


@pytest.mark.parametrize("variable", WRONG)
def test_a_variable_of_the_wrong_form_is_told_before_anything_starts(tmp_path: Path, variable: str) -> None:
    values, said = WRONG[variable]
    for value in values:
        with pytest.raises(CannotStart) as error:
            collector(tmp_path, environment={variable: value})
        line = one_line(error.value)
        assert line.startswith(f"{variable}={value!r} in the environment {said}"), line


def test_the_check_for_users_tells_each_wrong_variable_in_a_line_and_right_ones_in_one() -> None:
    told = {}
    for name, environment in {
        "wrong": {"DECISION_WAIT_SECONDS": "70s", "QUEUE_BYTES": ""},
        "right": RIGHT,
        "a port": {"OTLP_GRPC_LISTEN": "0.0.0.0:65536"},
        "the last port": {"OTLP_GRPC_LISTEN": "[::]:65535", "MEMORY_LIMIT_MIB": "9", "MEMORY_SPIKE_MIB": "8"},
        "two that do not fit": {"MEMORY_LIMIT_MIB": "100", "MEMORY_SPIKE_MIB": "100"},
        "a slip": {"OTLP_GRPC_LISTN": "127.0.0.1:1", "HOME": "/"},
    }.items():
        told[name] = subprocess.run(CHECK, env=environment, capture_output=True, text=True, check=False)
    assert told["wrong"].returncode == 1
    assert [line.split("=")[0] for line in told["wrong"].stderr.splitlines()] == [
        "DECISION_WAIT_SECONDS",
        "QUEUE_BYTES",
    ]
    assert (told["right"].returncode, told["right"].stderr) == (0, "")
    assert told["right"].stdout == "4 variables are set, and all of them are allowed\n"
    assert told["a port"].stderr.startswith(
        "OTLP_GRPC_LISTEN='0.0.0.0:65536' in the environment is not host:port"
    )
    assert (told["the last port"].returncode, told["the last port"].stderr) == (0, "")
    assert told["two that do not fit"].returncode == 1
    assert told["two that do not fit"].stderr == (
        "MEMORY_SPIKE_MIB='100' in the environment is not below MEMORY_LIMIT_MIB='100'\n"
    )
    assert told["a slip"].returncode == 0  # it may be somebody else's
    assert told["a slip"].stderr == "OTLP_GRPC_LISTN is not read: OTLP_GRPC_LISTEN is\n"


@pytest.mark.parametrize("variable", ["METRIC_EXPIRATION_SECONDS", "DECISION_WAIT_SECONDS"])
def test_seconds_are_seconds_and_a_unit_or_nothing_is_refused_by_the_collector_itself(variable: str) -> None:
    """Bare numbers would be nanoseconds; the files put the unit behind."""
    files = [argument for each in (BASE, SCRAPE) for argument in ("--config", str(CONFIG / each))]
    refused = {}
    for value in ("180", "3m", "70s", "1.5", ""):
        command = [part("otelcol"), "validate", *files]
        environment = {**os.environ, variable: value}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        refused[value] = done.returncode != 0
        key = variable.removesuffix("_SECONDS").lower()
        assert not refused[value] or f"'{key}' time: " in done.stderr
    assert refused == {"180": False, "3m": True, "70s": True, "1.5": True, "": True}


def test_every_variable_of_the_files_is_checked_and_its_default_is_right() -> None:
    defaults = [
        each
        for file in CONFIG.glob("*.yaml")
        for each in re.findall(r"\$\{env:([A-Z_]+):-([^}]*)\}", file.read_text())
    ]
    assert {name for name, _ in defaults} == set(checker().FORMS)
    assert [checker().wrong({name: default}) for name, default in defaults] == [[]] * len(defaults)


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
    before = psutil.Process().children()  # the unscaled alert's, on CI
    with pytest.raises(CannotStart) as error:
        servers_at(taken, tmp_path)[name].start()
    line = one_line(error.value)
    assert line.startswith(f"{name} wants port {taken} on 127.0.0.1, and another program listens there")
    assert "choose another port" in line
    assert psutil.Process().children() == before


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
