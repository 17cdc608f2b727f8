# SPDX-License-Identifier: Apache-2.0
"""The legs: with which releases of everything the tests are run, one row each. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = (
    "tests/unit/test_reading.py", "tests/unit/test_settings.py", "tests/unit/test_source.py",
    "tests/unit/test_snapshot.py", "tests/unit/test_config.py", "tests/unit/test_instrument_arguments.py",
    "tests/unit/test_windows.py", "tests/unit/test_wrapping.py", "tests/unit/test_streams.py",
    "tests/unit/test_track.py", "tests/unit/test_targets.py", "tests/unit/test_oom_verdict.py",
    "tests/unit/test_oom_dump.py", "tests/unit/test_oom_log.py",
)  # fmt: skip
"""What needs no GPU."""
REQUESTS, LIFECYCLE, METRICS = (
    f"tests/emulated/test_{name}.py" for name in ("requests", "lifecycle", "metrics")
)
SEVERAL_DEVICES = (
    "tests/emulated/test_oom.py::test_an_error_on_each_of_several_devices_stays_the_users_and_is_seen"
)
"""What runs on torch's real allocator."""
NO_HOST_MEMORY = (f"{LIFECYCLE}::test_excluded_metrics_are_not_made_and_come_when_no_longer_excluded",)
NO_MEMORY_POOLS = tuple(
    f"{LIFECYCLE}::test_{name}"
    for name in (
        "fifty_cycles_with_two_providers_leave_one_series_each_and_nothing_else",
        "torch_is_never_imported_by_us_and_found_when_the_user_imports_it",
        "two_threads_that_instrument_at_once_leave_nothing_behind",
    )
)
OTHER_HOST_FIGURES = (f"{METRICS}::test_every_figure_equals_the_allocators_own",)
NO_SETTINGS_AT_RUN_TIME = (
    f"{METRICS}::test_segments_made_expandable_at_run_time_are_noticed_even_if_turned_off_again",
)
CACHING_CANNOT_BE_ASKED = (f"{METRICS}::test_whether_caching_is_off_is_asked_of_torch_not_of_the_variable",)
NO_DRIVER_CALLS = (f"{LIFECYCLE}::test_counters_go_on_when_a_provider_is_given_again",)
NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class Leg:
    """An environment of its own, what is installed there, and what is run in it."""

    name: str
    python: str
    """The release meant. Where it is not installed another one that torch was built for takes its place."""
    pythons: tuple[str, ...]
    """Those that this torch was built for."""
    torch: str
    """Installed without what it depends on: CUDA's large libraries are never used on the emulated GPU."""
    pins: tuple[str, ...]
    """Beside it; what is not named here is pinned by constraints.txt."""
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    """Tests of things that these releases have not."""

    @property
    def about(self) -> str:
        """What is special about it, in words."""
        shown = ("opentelemetry-sdk", "wrapt")
        return ", ".join([self.torch, *(pin for pin in self.pins if pin.split("=")[0] in shown)])


TORCHS_OWN = ("filelock", "fsspec", "jinja2", "networkx", "setuptools<82", "sympy", "typing-extensions")
"""What torch imports."""
TESTING = ("hypothesis", "psutil", "pytest", "pytest-rerunfailures", "pytest-timeout")
NEWEST_OPENTELEMETRY = (
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-distro", "opentelemetry-exporter-otlp",
    "opentelemetry-instrumentation",
)  # fmt: skip

LEGS = (
    Leg(
        "oldest", "3.10", ("3.10", "3.11", "3.12"), "torch==2.2.2",
        ("numpy==1.26.4", "nvidia-cuda-runtime-cu12==12.1.105", "nvidia-cuda-nvcc-cu12==12.1.105",
         "opentelemetry-api==1.30.0", "opentelemetry-sdk==1.30.0", "opentelemetry-exporter-otlp==1.30.0",
         "opentelemetry-proto==1.30.0", "opentelemetry-exporter-otlp-proto-common==1.30.0",
         "opentelemetry-exporter-otlp-proto-grpc==1.30.0", "opentelemetry-exporter-otlp-proto-http==1.30.0",
         "opentelemetry-distro==0.51b0", "opentelemetry-instrumentation==0.51b0",
         "opentelemetry-semantic-conventions==0.51b0",
         "googleapis-common-protos==1.70.0", "protobuf==5.29.5", "importlib-metadata==8.5.0",
         "wrapt==1.16.0"),
        (*PACKAGE, LIFECYCLE, SEVERAL_DEVICES),
        (*NO_HOST_MEMORY, *NO_MEMORY_POOLS, *NO_DRIVER_CALLS),
    ),
    Leg(
        "cuda12", "3.11", ("3.10", "3.11", "3.12", "3.13"), "torch==2.5.1",
        ("numpy==2.2.6", "nvidia-cuda-runtime-cu12==12.4.127", "nvidia-cuda-nvcc-cu12==12.4.131",
         *NEWEST_OPENTELEMETRY, "wrapt==1.17.3"),
        (*PACKAGE, REQUESTS, LIFECYCLE, SEVERAL_DEVICES),
        NO_HOST_MEMORY,
    ),
    Leg(
        "cuda12-late", "3.13", ("3.10", "3.11", "3.12", "3.13", "3.14"), "torch==2.9.1",
        ("numpy", "nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-nvcc-cu12==12.8.93",
         *NEWEST_OPENTELEMETRY, "wrapt==2.5.2"),
        (*PACKAGE, REQUESTS, METRICS),
        (*OTHER_HOST_FIGURES, *NO_SETTINGS_AT_RUN_TIME, *CACHING_CANNOT_BE_ASKED),
    ),
    # that of `make test`, which runs all the tests in it: here it tells its signals
    Leg(NEWEST, "3.11", ("3.11", "3.12", "3.13", "3.14"), "torch==2.15.0", (), ()),
)  # fmt: skip
