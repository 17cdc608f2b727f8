# SPDX-License-Identifier: Apache-2.0
"""`torchmem doctor` without a process: what it says of an installation, and which signals there are."""

from __future__ import annotations

import json
import os
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


def test_without_a_gpu_no_figure_of_one_is_promised_and_the_variable_that_hides_it_is_named(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_device_files", lambda: ["/dev/nvidia0"])
    assert absences(doctor_checks.machine({})).keys() == {"torch.memory.oom.rejections"}
    hidden = absences(doctor_checks.machine({"CUDA_VISIBLE_DEVICES": "-1"}))
    why = "CUDA_VISIBLE_DEVICES=-1: no GPU is visible to this environment"
    of_gpus = {row.name for row in METRICS if row.per.value in ("device", "host", "process", "oom")}
    assert hidden == dict.fromkeys(of_gpus, why)


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


@pytest.mark.parametrize(
    ("endpoint", "protocol", "said"),
    [
        ("http://[::1", "grpc", "the endpoint http://[::1 is no address, as http://host:4317 is"),
        ("http://:", "grpc", "the endpoint http://: is no address, as http://host:4317 is"),
        ("http://a:99999", "grpc", "the endpoint http://a:99999 is no address, as http://host:4317 is"),
        ("ftp://a:21", "grpc", "the endpoint ftp://a:21 begins with ftp://: http:// or https://"),
        ("a:4318", "http/protobuf", "the endpoint a:4318 has no scheme: http:// or https://"),
    ],
)
def test_an_endpoint_that_is_none_is_told_once(endpoint, protocol, said):
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    assert told(environ, "exporter") == [(PROBLEM, said)]


def test_a_malformed_target_is_a_problem():
    (wrong, right) = told(NOWHERE | {"OTEL_PYTHON_TORCHMEM_TARGETS": "a.b,a:b"}, "option")
    assert wrong[0] == PROBLEM
    assert wrong[1].startswith(
        "targets='a.b' (from OTEL_PYTHON_TORCHMEM_TARGETS) is no target: a target is module:Class.method"
    )
    assert right == (OK, "targets='a:b' (from OTEL_PYTHON_TORCHMEM_TARGETS)")


def test_each_option_that_is_given_is_told_with_where_it_came_from():
    given = {
        "OTEL_PYTHON_TORCHMEM_REQUEST_METRICS": "off",
        "OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS": "torch.memory.usage,*.host.*",
        "OTEL_PYTHON_TORCHMEM_SPAN": "",
    }
    assert told(NOWHERE, "option") == []
    assert told(NOWHERE | given, "option") == [
        (OK, "request_metrics=False (from OTEL_PYTHON_TORCHMEM_REQUEST_METRICS)"),
        (OK, "excluded_metrics='torch.memory.usage' (from OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS)"),
        (OK, "excluded_metrics='*.host.*' (from OTEL_PYTHON_TORCHMEM_EXCLUDED_METRICS)"),
    ]


ACCEPTED = (
    "", "max_split_size_mb:20", "max_split_size_mb: 64,", "max_split_size_mb:64.5", "backend:native",
    "garbage_collection_threshold:0.5,expandable_segments:True", "roundup_power2_divisions:[256:4,512:0,>:1]",
    "roundup_power2_divisions:8", "large_segment_size_mb:12", "per_process_memory_fraction:1",
    "pinned_num_register_threads:8,pinned_use_cuda_host_register:True", "throw_on_cudamalloc_oom:False",
    "expandable_segments_reserve:40G", "graph_capture_record_stream_reuse:True",
    "max_non_split_rounding_mb:20", "large_segment_size_mb:12,max_split_size_mb:12",
    "pinned_max_cached_size_mb:4,pinned_max_round_threshold_mb:4,pinned_reserve_segment_size_mb:8",
)  # fmt: skip
REFUSED = {
    "bogus:1": "there is no option bogus",
    "expandable_segment:True": "there is no option expandable_segment; did you mean expandable_segments?",
    ":::": "::: is no option:value",
    "max_split_size_mb": "max_split_size_mb is no option:value",
    "max_split_size_mb:64,,backend:native": ",backend:native is no option:value",
    "max_split_size_mb:3": "max_split_size_mb:3 must be a whole number, 20 or more",
    "max_split_size_mb:x": "max_split_size_mb:x must be a whole number, 20 or more",
    "large_segment_size_mb:10": "large_segment_size_mb:10 must be a whole number, 11 or more",
    "garbage_collection_threshold:1":
        "garbage_collection_threshold:1 must be between 0 and 1, without either",
    "per_process_memory_fraction:2": "per_process_memory_fraction:2 must be from 0 to 1",
    "expandable_segments:true": "expandable_segments:true must be True or False",
    "backend:foo": "backend:foo must be native or cudaMallocAsync",
    "pinned_num_register_threads:3": "pinned_num_register_threads:3 must be a power of 2, 128 at most",
    "large_segment_size_mb:30,max_split_size_mb:29":
        "max_split_size_mb:29 must be a whole number, 30 or more",
    "max_non_split_rounding_mb:19": "max_non_split_rounding_mb:19 must be a whole number, 20 or more",
    "pinned_reserve_segment_size_mb:0": "pinned_reserve_segment_size_mb:0 must be a whole number, 1 or more",
    "roundup_power2_divisions:[256:3]":
        "roundup_power2_divisions:[256:3] must be a power of 2, or [size:divisions,…] of powers of 2",
}  # fmt: skip
ASK = """
import json, sys, torch
set_to = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
def accepts(text):
    set_to("large_segment_size_mb:20")  # torch keeps it from the text before
    try:
        set_to(text)
    except Exception:
        return False
    return True
print(json.dumps(set_to and [accepts(each) for each in json.loads(sys.argv[1])]))
"""


def test_torch_refuses_what_the_doctor_says_that_it_refuses_and_nothing_else():
    texts = [*ACCEPTED, *REFUSED]
    asked = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(texts)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    accepts = json.loads(asked.stdout)
    if accepts is None:
        pytest.skip("this release cannot be asked")
    assert dict(zip(texts, accepts, strict=True)) == {each: each in ACCEPTED for each in texts}


@pytest.mark.parametrize("text", [*ACCEPTED, *REFUSED])
def test_an_allocator_option_that_torch_refuses_is_a_problem(text):
    checks = told(NOWHERE | {"PYTORCH_ALLOC_CONF": text}, "allocator")
    found = [each for each in checks if each[0] == PROBLEM]
    said = f"PYTORCH_ALLOC_CONF: {REFUSED.get(text)}: torch fails at CUDA's start"
    assert found == ([(PROBLEM, said)] if text in REFUSED else [])


def test_a_later_torch_may_know_an_option_that_is_not_known_here(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_version", lambda name: "3.1.0")
    assert told(NOWHERE | {"PYTORCH_ALLOC_CONF": "bogus:1"}, "allocator") == [
        (NOTE, "PYTORCH_ALLOC_CONF: there is no option bogus (as of torch 2.15)")
    ]


def test_a_misspelt_option_is_a_problem():
    ((level, text),) = told(NOWHERE | {"OTEL_PYTHON_TORCHMEM_SPAM": "new"}, "option")
    assert level == PROBLEM
    assert text.endswith("did you mean OTEL_PYTHON_TORCHMEM_SPAN?")


def test_a_configuration_file_is_the_one_that_says_where_telemetry_goes(tmp_path):
    file = tmp_path / "sdk.yaml"
    file.write_text("file_format: '1.0'")
    (level, _), *more = told({"OTEL_CONFIG_FILE": str(file)}, "exporter")
    assert (level, more) == (OK, [])


def test_a_configuration_file_that_is_not_there_or_is_none_is_a_problem(tmp_path):
    missing = str(tmp_path / "nope.yaml")
    for variable in ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE"):
        assert told({variable: missing}, "exporter") == [(PROBLEM, f"{missing} ({variable}): no such file")]
    file = tmp_path / "sdk.yaml"
    pytest.importorskip("opentelemetry.configuration")
    file.write_text("file_format: [")
    ((level, text),) = told({"OTEL_CONFIG_FILE": str(file)}, "exporter")
    assert level == PROBLEM
    assert text.startswith(f"{file} (OTEL_CONFIG_FILE) cannot be read: ")


def test_the_package_that_reads_a_configuration_file_is_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "sdk.yaml"
    file.write_text("file_format: '1.0'")
    there = doctor_checks._version
    monkeypatch.setattr(
        doctor_checks, "_version", lambda name: None if name == "opentelemetry-configuration" else there(name)
    )
    said = (
        "OTEL_CONFIG_FILE is set and opentelemetry-configuration is not installed: "
        "pip install opentelemetry-configuration"
    )
    assert (PROBLEM, said) in told({"OTEL_CONFIG_FILE": str(file)}, "versions")
    assert (PROBLEM, said) not in told({}, "versions")


OPTIONS = """
file_format: "1.0"
instrumentation/development:
  python:
    torchmem:
      enabled: true
      excluded_metrics: [torch.memory.usage]
      colour: blue
      targets: [{target: nonsense}]
"""


def test_options_in_the_configuration_file_are_looked_at(tmp_path):
    file = tmp_path / "sdk.yaml"
    pytest.importorskip("opentelemetry.configuration")
    file.write_text(OPTIONS)
    environ = {"OTEL_CONFIG_FILE": str(file), "OTEL_PYTHON_TORCHMEM_TARGETS": "a.b"}
    (colour, target, excluded) = told(environ, "option")
    assert colour[1].startswith("unknown option colour='blue' (from the configuration file) is ignored")
    assert target[1].startswith("targets='nonsense' (from the configuration file) is no target: a target is")
    assert excluded == (OK, "excluded_metrics='torch.memory.usage' (from the configuration file)")
    assert doctor_checks.machine(environ).config.excludes("torch.memory.usage")


def test_an_otlp_exporter_that_is_not_installed_is_told_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(doctor_checks.metadata, "entry_points", lambda **_: ())
    chosen = NOWHERE | {"OTEL_METRICS_EXPORTER": "otlp"}
    assert next(doctor_checks._exporters(chosen)).text == (
        "the metrics exporter otlp is not installed: "
        "pip install 'opentelemetry-instrumentation-torchmem[otlp]'"
    )


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
    seen = "The installation is sound."
    unseen = "Sound, but no GPU is seen here: nothing of a GPU will be told."
    assert sound.stdout.endswith(f"\n{seen if doctor_checks._device_files() else unseen}\n")
    unsound = command("doctor", "--json", environ=NOWHERE | {"OTEL_SDK_DISABLED": "true"})
    assert unsound.returncode == 1
    document = json.loads(unsound.stdout)
    assert document["sound"] is False
    assert {"name": "switch", "level": "problem", "text": "OTEL_SDK_DISABLED=true: nothing is exported"} in (
        document["checks"]
    )
    absent, given = document["signals"]["absent"], document["signals"]["given"]
    if doctor_checks._device_files():
        assert absent == {"torch.memory.oom.rejections": "throw_on_cudamalloc_oom is not set"}
        assert "torch.memory.headroom" in given
    else:
        for name in ("usage", "limit", "headroom", "host.allocated", "allocator.info", "oom.verdicts"):
            assert absent[f"torch.memory.{name}"] == "no GPU's device file is seen"
        assert {"torch.memory.telemetry.skipped", "torch.memory.requests.active"} <= set(given)
        assert not set(absent) & set(given)


HISTORY = [{"action": "alloc", "addr": 0, "size": 5, "stream": 0, "time_us": 1}]


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
            "torchmem: graph_pools must be pairs of numbers, at most 10,000",
        ),
        *(
            (
                {"segments": [], "torchmem": {"devices": {"0": {}}, "graph_pools": pools}},
                "torchmem: graph_pools must be pairs of numbers, at most 10,000",
            )
            for pools in ([(1 << 64, 0)], [(0, -1)], [(float("inf"), 0)], ["12"], [(0, 1)] * 10_001)
        ),
        (
            {"segments": [], "torchmem": {"devices": {"0": {}}, "settings": "a" * 300_000}},
            "torchmem: settings has 300,000 letters; at most 10,000",
        ),
        (
            {"segments": [], "device_traces": [HISTORY, HISTORY], "torchmem": {"devices": {"0": {}}}},
            "device_traces: two devices have the same list",
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


def held(device: int = 0, **more) -> dict:
    """200 MiB of a device, half of them in use."""
    half = 100 << 20
    blocks = [
        {"address": 0, "size": half, "requested_size": half, "state": "active_allocated"},
        {"address": half, "size": half, "requested_size": 0, "state": "inactive"},
    ]
    sizes = {"total_size": 2 * half, "allocated_size": half, "active_size": half}
    return {
        "device": device, "address": 0, **sizes, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks, **more,
    }  # fmt: skip


def test_the_evidence_of_a_device_is_its_own_segments_alone():
    from opentelemetry_instrumentation_torchmem.advice.live import evidences

    whole = {"segments": [held(1), held(0), held(1, address=1 << 40)], "torchmem": {"devices": {"7": {}}}}
    told_of = {each.device: [segment["address"] for segment in each.segments] for each in evidences(whole)}
    assert told_of == {0: [0], 1: [0, 1 << 40], 7: []}


def test_what_a_history_cannot_hold_is_left_out_of_it():
    from opentelemetry_instrumentation_torchmem.advice.live import evidences

    odd = [{**HISTORY[0], "size": size} for size in (-1, 7, 1 << 63, (1 << 61) - 1 << 20, True)]
    [evidence] = evidences({"segments": [held()], "device_traces": [odd]})
    assert list(evidence.asked) == [7]


def test_words_from_a_file_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    import pickle

    about = {
        "backend": "native",
        "expandable_blocked": "\x1b[2Jgone",
        "devices": {"0": {"total": 300 << 20, "free": 100 << 20, "fraction": 1.0, "retries": 9}},
    }
    blocks = [
        {"address": place << 20, "size": 1 << 20, "requested_size": 1 << 20, "state": state}
        for place, state in enumerate(["active_allocated", "inactive"] * 100)
    ]
    sizes = {"allocated_size": 100 << 20, "active_size": 100 << 20}
    file = tmp_path / "x.pickle"
    file.write_bytes(pickle.dumps({"segments": [held(blocks=blocks, **sizes)], "torchmem": about}))
    assert main(["doctor", "--snapshot", str(file)]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b[2Jgone" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [("600MiB", 600 << 20), ("1.5g", 3 << 29), ("64 KiB", 1 << 16), ("7", 7), ("100TiB", 100 << 40)],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    from opentelemetry_instrumentation_torchmem.cli.doctor import _bytes

    assert _bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-3MiB", "0", "inf", "1e400MiB", "3PiB"])
def test_a_size_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--need", text] if text[:1] != "-" else ["doctor", f"--need={text}"])
    assert left.value.code == 2
    assert f"{text}: must be a size in KiB, MiB, GiB or TiB, as 600MiB or 1.5GiB" in capsys.readouterr().err


def test_a_file_that_is_no_snapshot_is_told_as_json_where_json_is_wanted(tmp_path, capsys):
    file = tmp_path / "x.pickle"
    file.write_bytes(b"")
    assert main(["doctor", "--json", "--snapshot", str(file)]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": f"{file}: the file is empty"}


def test_a_need_without_a_snapshot_is_refused(capsys):
    assert main(["doctor", "--need", "1GiB"]) == 2
    printed = capsys.readouterr()
    said = "torchmem doctor: error: --need is about a snapshot: give --snapshot FILE too\n"
    assert (printed.out, printed.err) == ("", said)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_output_that_cannot_be_written_is_told_in_one_line(arguments):
    run = (
        "import sys; from opentelemetry_instrumentation_torchmem import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    with open("/dev/full", "w") as full:
        got = subprocess.run(
            [sys.executable, "-c", run, *arguments],
            env=NOWHERE,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    said = "torchmem doctor: error: standard output cannot be written: No space left on device\n"
    assert (got.returncode, got.stderr) == (2, said)
