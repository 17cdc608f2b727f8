# SPDX-License-Identifier: Apache-2.0
"""Options: argument or file beats environment beats default; what is wrong is told in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opentelemetry_instrumentation_torchmem import environment_variables
from opentelemetry_instrumentation_torchmem.config import OPTIONS, Config


def config(arguments=None, environ=None) -> tuple[Config, list[str]]:
    said: list[str] = []
    return Config.of(arguments or {}, environ or {}, said.append), said


def test_an_argument_beats_the_environment_beats_the_default():
    environ = {"OTEL_PYTHON_TORCHMEM_SAMPLING": "request"}
    assert config()[0].sampling == "auto"
    assert config(environ=environ)[0].sampling == "request"
    assert config({"sampling": "always"}, environ)[0].sampling == "always"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("sampling", " Always ", "always"),
        ("max_reading_age", "2.5", 2.5),
        ("max_reading_age", 0, 0.0),
        ("request_metrics", "off", False),
        ("request_metrics", True, True),
        ("excluded_metrics", "torch.memory.host.*, torch.memory.usage,",
         ("torch.memory.host.*", "torch.memory.usage")),
        ("excluded_metrics", ["torch.memory.usage"], ("torch.memory.usage",)),
    ],
)  # fmt: skip
def test_values_as_the_environment_and_as_files_have_them(option, value, expected):
    got, said = config({option: value})
    assert getattr(got, option) == expected
    assert said == []


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("sampling", "often", "one of auto, request, always"),
        ("sampling", 3, "one of auto, request, always"),
        ("max_reading_age", "soon", "a number of seconds from 0 up"),
        ("max_reading_age", -1, "a number of seconds from 0 up"),
        ("max_reading_age", "nan", "a number of seconds from 0 up"),
        ("max_reading_age", True, "a number of seconds from 0 up"),
        ("request_metrics", "perhaps", "true or false"),
        ("snapshot_share", 0.2, "a number from 0 to 0.1"),
        ("snapshot_share", "much", "a number from 0 to 0.1"),
        ("excluded_metrics", 7, "comma-separated names, or a list of names"),
        ("excluded_metrics", ["a", 7], "comma-separated names, or a list of names"),
    ],
)
def test_a_bad_value_is_told_with_its_origin_and_what_is_allowed(option, value, allowed):
    got, (line,) = config({option: value})
    assert getattr(got, option) == getattr(Config(), option)
    assert f"{option}={value!r} (from an argument) is not allowed" in line
    assert allowed in line


def test_a_bad_variable_is_named():
    got, (line,) = config(environ={"OTEL_PYTHON_TORCHMEM_MAX_READING_AGE": "soon"})
    assert got.max_reading_age == 15.0
    assert "max_reading_age='soon' (from OTEL_PYTHON_TORCHMEM_MAX_READING_AGE)" in line


def test_a_bad_argument_does_not_fall_back_to_the_environment():
    got, _ = config({"sampling": "often"}, {"OTEL_PYTHON_TORCHMEM_SAMPLING": "always"})
    assert got.sampling == "auto"


def test_it_knows_where_each_option_that_was_given_came_from():
    environ = {
        "OTEL_PYTHON_TORCHMEM_SPAN": "off",
        "OTEL_PYTHON_TORCHMEM_TARGETS": "a:b",
        "OTEL_PYTHON_TORCHMEM_OOM_DUMP_DIR": "/tmp",
        "OTEL_PYTHON_TORCHMEM_SAMPLING": "",
    }
    arguments = {"oom_dump_dir": "/tmp", "snapshot_share": None, "max_reading_age": "soon"}
    got, _ = config(arguments, environ)
    assert got.origins == {
        "span": "OTEL_PYTHON_TORCHMEM_SPAN",
        "targets": "OTEL_PYTHON_TORCHMEM_TARGETS",
        "oom_dump_dir": "an argument",  # though the variable says the same
    }
    assert got.told("span", got.span) == "span='off' (from OTEL_PYTHON_TORCHMEM_SPAN)"
    assert got.told("max_reading_age", got.max_reading_age) == "max_reading_age=15.0 (from the default)"
    assert got == replace(got, origins={})
    with pytest.raises(TypeError):
        got.origins["span"] = "elsewhere"


def test_the_origins_are_no_option():
    got, (argument, variable) = config({"origins": {}}, {"OTEL_PYTHON_TORCHMEM_ORIGINS": "x"})
    assert got.origins == {}
    assert argument.startswith("torchmem: unknown option origins={} (from an argument) is ignored")
    assert variable.startswith("torchmem: unknown variable OTEL_PYTHON_TORCHMEM_ORIGINS='x' is ignored")


def test_unknown_options_and_variables_are_told_with_the_nearest_name():
    _, (argument,) = config({"samplin": "always"})
    assert "unknown option samplin='always' (from an argument)" in argument
    assert "did you mean sampling?" in argument
    _, (variable,) = config(environ={"OTEL_PYTHON_TORCHMEM_SAMPLNG": "always"})
    assert "unknown variable OTEL_PYTHON_TORCHMEM_SAMPLNG='always'" in variable
    assert "did you mean OTEL_PYTHON_TORCHMEM_SAMPLING?" in variable


def test_every_option_has_its_variable_and_the_module_holds_nothing_else():
    names = {name for name in vars(environment_variables) if not name.startswith("__")}
    assert names == {f"OTEL_PYTHON_TORCHMEM_{option.upper()}" for option in OPTIONS}
    assert all(getattr(environment_variables, name) == name for name in names)


def test_every_option_says_what_it_is():
    assert all(option.metadata["about"].endswith(".") for option in OPTIONS.values())
