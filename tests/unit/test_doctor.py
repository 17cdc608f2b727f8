# SPDX-License-Identifier: Apache-2.0
"""`torchmem doctor` without a process: what it says of an installation, and which signals there are."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from opentelemetry_instrumentation_torchmem.allocator.settings import AllocatorSettings
from opentelemetry_instrumentation_torchmem.cli import doctor_checks, main
from opentelemetry_instrumentation_torchmem.cli.doctor_checks import NOTE, OK, PROBLEM
from opentelemetry_instrumentation_torchmem.cli.doctor_signals import Machine, absences
from opentelemetry_instrumentation_torchmem.config import Config
from opentelemetry_instrumentation_torchmem.signals import METRICS, REQUEST_METRICS

NATIVE = Machine((2, 15), "native", AllocatorSettings.parse("", "default"), Config())
NOWHERE = {"OTEL_METRICS_EXPORTER": "console", "OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


def told(environ: dict[str, str], name: str) -> list[tuple[str, str]]:
    return [(each.level, each.text) for each in doctor_checks.checks(environ) if each.name == name]


# ---- signals ----


def short(names) -> set[str]:
    return {name.removeprefix("torch.memory.") for name in names}


def test_the_native_allocator_gives_every_signal_but_what_an_option_turns_on():
    assert absences(NATIVE) == {"torch.memory.oom.rejections": "throw_on_cudamalloc_oom is not set"}
    throws = replace(NATIVE, settings=AllocatorSettings.parse("throw_on_cudamalloc_oom:True", "x"))
    assert absences(throws) == {}


def test_expandable_segments_keep_no_figures_of_segments_and_fragmentation_comes_from_snapshots():
    expandable = replace(NATIVE, settings=AllocatorSettings.parse("expandable_segments:True", "x"))
    assert short(absences(expandable)) == {"inactive_split", "segments", "oom.rejections"}
    without = replace(expandable, config=replace(Config(), snapshot_share=0.0))
    assert short(absences(without)) - short(absences(expandable)) == {
        "fragmentation", "headroom", "free_block.largest", "private_pool.reserved", "snapshot.age",
        "telemetry.absent",
    }  # fmt: skip


def test_cuda_malloc_async_tells_three_figures_and_what_follows_from_them():
    given = {row.name for row in (*METRICS, *REQUEST_METRICS)} - set(
        absences(replace(NATIVE, backend="cudaMallocAsync"))
    )
    of_device = {row.name for row in METRICS if row.per.value == "device"}
    assert short(given & of_device) == {
        "usage", "limit", "allocated", "reserved", "active", "allocated_peak", "reserved_peak", "slack",
        "reading.age",
    }  # fmt: skip


def test_older_releases_lack_what_came_later():
    assert short(absences(replace(NATIVE, torch=(2, 2)))) == {
        "device.allocations", "device.frees", "device.syncs", "oom.rejections", "host.allocated",
        "host.reserved",
    }  # fmt: skip
    assert short(absences(replace(NATIVE, tells_fraction=False))) == {"headroom", "oom.rejections"}


def test_without_torch_there_is_nothing_and_what_the_user_turned_off_is_told_as_such():
    assert set(absences(replace(NATIVE, torch=None))) == {row.name for row in (*METRICS, *REQUEST_METRICS)}
    chosen = replace(NATIVE, config=replace(Config(), request_metrics=False, excluded_metrics=("*.host.*",)))
    assert absences(chosen) == {
        "torch.memory.host.allocated": "excluded_metrics names it",
        "torch.memory.host.reserved": "excluded_metrics names it",
        "torch.memory.oom.rejections": "throw_on_cudamalloc_oom is not set",
        **dict.fromkeys((row.name for row in REQUEST_METRICS), "request_metrics is off"),
    }


# ---- the installation ----


def test_this_installation_is_sound():
    found = doctor_checks.checks(NOWHERE)
    assert [each for each in found if each.level == PROBLEM] == []
    assert {"python", "package", "torch", "versions", "entry point"} <= {
        each.name for each in found if each.level == OK
    }


def test_an_endpoint_that_answers_and_one_that_does_not_are_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        there = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
        assert told(there, "exporter") == [
            (OK, f"127.0.0.1:{port} answers, where metrics and traces and logs go")
        ]
        mixed = there | {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1/v1/metrics"}
        (nobody, somebody) = told(mixed, "exporter")
        assert nobody[0] == PROBLEM
        assert nobody[1].startswith("nobody answers at 127.0.0.1:1, where metrics go (Connection refused)")
        assert somebody == (OK, f"127.0.0.1:{port} answers, where traces and logs go")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ("localhost", 4317)),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ("localhost", 4318)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector"}, ("collector", 443)),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:9"}, ("collector", 9)),
        (
            {
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1]",
            },
            ("::1", 4318),
        ),
    ],
)
def test_the_endpoint_is_the_one_that_the_exporter_takes(environ, place):
    assert doctor_checks._endpoint("otlp", "metrics", environ) == place


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, "switch", (PROBLEM, "OTEL_SDK_DISABLED=true: nothing is exported")),
        (
            {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "flask, torchmem"},
            "switch",
            (PROBLEM, "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS keeps the launcher from instrumenting"),
        ),
        (
            {"OTEL_METRICS_EXPORTER": "none"},
            "exporter",
            (PROBLEM, "OTEL_METRICS_EXPORTER=none: no metrics are exported"),
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otpl"},
            "exporter",
            (PROBLEM, "the metrics exporter otpl is not installed"),
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"},
            "allocator",
            (PROBLEM, "PYTORCH_CUDA_ALLOC_CONF replaces PYTORCH_ALLOC_CONF wholly: set one of them"),
        ),
        (
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"},
            "allocator",
            (
                NOTE,
                "PYTORCH_ALLOC_CONF: garbage_collection_threshold does nothing unless the program sets a "
                "memory fraction below 1",
            ),
        ),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            "device",
            (PROBLEM, "CUDA_VISIBLE_DEVICES=: no GPU is visible to this environment"),
        ),
    ],
)  # fmt: skip
def test_what_is_set_wrong_is_told_in_one_line_with_where_it_stands(environ, name, expected):
    assert expected in told(NOWHERE | environ, name)


def test_a_misspelt_option_is_a_problem():
    ((level, text),) = told(NOWHERE | {"OTEL_PYTHON_TORCHMEM_SPAM": "new"}, "option")
    assert level == PROBLEM
    assert text.endswith("did you mean OTEL_PYTHON_TORCHMEM_SPAN?")


def test_a_configuration_file_is_the_one_that_says_where_telemetry_goes(tmp_path):
    file = tmp_path / "sdk.yaml"
    file.write_text("file_format: '1.0'")
    (level, _), *more = told({"OTEL_CONFIG_FILE": str(file)}, "exporter")
    assert (level, more) == (OK, [])


# ---- the command ----


def command(*arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    run = (
        "import sys; from opentelemetry_instrumentation_torchmem.cli import main; code = main(sys.argv[1:]); "
    )
    return subprocess.run(
        [
            sys.executable,
            "-c",
            run + "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)",
            *arguments,
        ],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_imports_no_torch_and_exits_with_0_where_all_is_sound_and_1_where_it_is_not():
    sound = command("doctor", environ=NOWHERE)
    assert (sound.returncode, sound.stderr) == (0, "False\n")
    assert sound.stdout.endswith("\nThe installation is sound.\n")
    unsound = command("doctor", "--json", environ=NOWHERE | {"OTEL_SDK_DISABLED": "true"})
    assert unsound.returncode == 1
    document = json.loads(unsound.stdout)
    assert document["sound"] is False
    assert {"name": "switch", "level": "problem", "text": "OTEL_SDK_DISABLED=true: nothing is exported"} in (
        document["checks"]
    )
    assert document["signals"]["absent"] == {
        "torch.memory.oom.rejections": "throw_on_cudamalloc_oom is not set"
    }
    assert "torch.memory.headroom" in document["signals"]["given"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"not a pickle", None),
        ({"segments": []}, "nothing was reserved when it was taken"),
        ({"segments": [], "torchmem": 7}, "torchmem is a int; it must be a dict"),
        (
            {"segments": [], "torchmem": {"devices": {"0": {"total": "much"}}}},
            "torchmem: devices 0: total is a str; it must be a number",
        ),
        (
            {"segments": [], "torchmem": {"devices": {"0": []}}},
            "torchmem: devices 0 is a list; it must be a dict",
        ),
        (
            {"segments": [], "torchmem": {"devices": {"0": {}}, "graph_pools": 3}},
            "torchmem: graph_pools must be pairs of numbers",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_snapshot_is_refused_in_one_line(tmp_path, capsys, content, said):
    import pickle

    file = tmp_path / "x.pickle"
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=4))
    assert main(["doctor", "--snapshot", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"torchmem doctor: error: {file}: ")
    assert printed.err.count("\n") == 1
    if said is not None:
        assert printed.err.endswith(f": {said}\n")


@pytest.mark.parametrize(
    ("text", "expected"), [("600MiB", 600 << 20), ("1.5g", 3 << 29), ("64 KiB", 1 << 16), ("7", 7)]
)
def test_sizes_are_read_as_people_write_them(text, expected):
    from opentelemetry_instrumentation_torchmem.cli.doctor import _bytes

    assert _bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-3MiB", "0", "inf", "1e400MiB", "3TiB"])
def test_a_size_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--need", text] if text[:1] != "-" else ["doctor", f"--need={text}"])
    assert left.value.code == 2
    assert f"{text}: must be a size, as 600MiB or 1.5GiB" in capsys.readouterr().err
