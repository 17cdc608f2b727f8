# SPDX-License-Identifier: Apache-2.0
"""The allocator settings in force."""

from __future__ import annotations

from time import process_time
from types import SimpleNamespace

import pytest

from opentelemetry_instrumentation_torchmem.allocator.settings import (
    AllocatorSettings,
    SettingsSeen,
    SettingsWatch,
    settings_in_force,
)

MIB = 1 << 20


def torch_that_says(text: str) -> SimpleNamespace:
    return SimpleNamespace(_C=SimpleNamespace(_accelerator_getAllocatorSettings=lambda: text))


def test_every_option_that_a_forecast_needs_is_read():
    settings = AllocatorSettings.parse(
        "max_split_size_mb:64, roundup_power2_divisions:[256:1,>:4],garbage_collection_threshold:0.6,"
        "max_non_split_rounding_mb:40,large_segment_size_mb:12,throw_on_cudamalloc_oom:True,"
        "expandable_segments:True,expandable_segments_reserve:40G,"
        "expandable_segments_reserve_by_class:[tiny:0.05]",
        "test",
    )
    assert settings.max_split_size == 64 * MIB
    assert settings.roundup_power2_divisions == "[256:1,>:4]"
    assert settings.garbage_collection_threshold == 0.6
    assert settings.max_non_split_rounding == 40 * MIB
    assert settings.large_segment_size == 12 * MIB
    assert settings.throw_on_cudamalloc_oom
    assert settings.expandable_segments
    assert settings.expandable_segments_reserve == "40G"
    assert settings.expandable_segments_reserve_by_class == "[tiny:0.05]"


@pytest.mark.parametrize(
    ("text", "divisions"),
    [  # as torch 2.15 reads them
        ("4", (4,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[1:2,>:4]", (2,) + (4,) * 15),
        ("[4:4,16:2]", (4, 4, 4, 0, 2) + (0,) * 11),
        ("[>:4]", (0,) + (4,) * 15),
        ("1", None),
    ],
)
def test_roundup_divisions_are_read_as_torch_reads_them(text, divisions):
    assert AllocatorSettings.parse(f"roundup_power2_divisions:{text}", "test").divisions == divisions


@pytest.mark.parametrize(
    "text",
    [
        "a" * 300_000,
        " " * 300_000,
        "a" + " " * 300_000,
        "a:[" * 100_000,
        "a:[," * 75_000,
        "a:[]" + " " * 300_000 + "x",
    ],
    ids=["a name", "spaces", "spaces behind", "brackets", "brackets and commas", "spaces behind brackets"],
)
def test_a_long_string_takes_time_by_its_length_alone(text):
    began = process_time()
    assert not AllocatorSettings.parse(text, "file").expandable_segments
    assert process_time() - began < 1  # quadratic, it took minutes


def test_a_change_at_run_time_keeps_most_options_and_forgets_three():
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,large_segment_size_mb:32,max_split_size_mb:64"
    }
    settings = settings_in_force(torch_that_says("garbage_collection_threshold:0.5"), environ)
    assert settings.expandable_segments
    assert settings.large_segment_size == 32 * MIB
    assert settings.max_split_size is None
    assert (settings.text, settings.origin) == ("garbage_collection_threshold:0.5", "runtime")


def test_a_snapshot_tells_what_is_in_force_itself():
    given = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "roundup_power2_divisions": {"2": 4, "1": 2, "4": 0},
    }
    settings = AllocatorSettings.of_snapshot(given, {"PYTORCH_ALLOC_CONF": "large_segment_size_mb:16"})
    assert settings.expandable_segments
    assert settings.max_split_size is settings.garbage_collection_threshold is None
    assert settings.divisions is not None
    assert settings.divisions[:3] == (2, 4, 0)
    assert settings.large_segment_size == 16 * MIB


ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:32"}


def test_what_was_set_at_run_time_stays_in_force_when_other_options_are_set():
    torch, watch, seen = watched_torch()
    for text in ("large_segment_size_mb:40,max_split_size_mb:64", "expandable_segments:True", ""):
        torch._C._accelerator_setAllocatorSettings(text)
    settings = settings_in_force(torch, ENVIRONMENT, seen)
    assert (settings.large_segment_size, settings.max_split_size) == (40 * MIB, None)
    assert settings.expandable_segments
    assert settings.pages_changed
    assert not settings.in_doubt
    watch.remove()
    assert torch._C._accelerator_setAllocatorSettings == torch.original


def test_settings_made_unseen_are_in_doubt():
    torch, watch, seen = watched_torch()
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:40")
    assert not settings_in_force(torch, ENVIRONMENT, seen).in_doubt
    torch.original("expandable_segments:True")
    assert settings_in_force(torch, ENVIRONMENT, seen).in_doubt

    torch, watch, seen = watched_torch()
    watch.remove()
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:40")
    SettingsWatch(seen).install(torch, from_the_start=False)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert settings_in_force(torch, ENVIRONMENT, seen).in_doubt


def test_whoever_wraps_ours_brings_no_doubt_when_it_is_watched_again():
    torch, watch, seen = watched_torch()
    ours = torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings = lambda text: ours(text)  # noted by both, one would be unseen
    watch.remove()
    SettingsWatch(seen).install(torch, from_the_start=False)
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:40")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    settings = settings_in_force(torch, ENVIRONMENT, seen)
    assert (settings.large_segment_size, settings.expandable_segments) == (40 * MIB, True)
    assert not settings.in_doubt


def test_settings_that_torch_refused_are_in_doubt_for_it_may_have_taken_some():
    torch, _, seen = watched_torch()
    with pytest.raises(ValueError, match="Unrecognized"):
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:40,foo:1")
    assert settings_in_force(torch, ENVIRONMENT, seen).in_doubt


def test_the_environment_counts_as_torch_has_read_it_not_as_it_is_now():
    torch, _, seen = watched_torch()
    settings = settings_in_force(torch, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, seen)
    assert (settings.large_segment_size, settings.expandable_segments) == (32 * MIB, False)
    assert not settings.in_doubt


def test_of_a_late_look_only_a_string_that_is_not_the_environments_leaves_a_doubt():
    assert not settings_in_force(torch_that_says(""), {}, SettingsSeen()).in_doubt
    assert not settings_in_force(
        torch_that_says("a:1"), {"PYTORCH_ALLOC_CONF": "a:1"}, SettingsSeen()
    ).in_doubt
    assert settings_in_force(torch_that_says("a:1"), {}, SettingsSeen()).in_doubt


def test_a_release_that_does_not_tell_what_is_in_force_is_watched_as_well():
    said: list[str] = []
    torch = SimpleNamespace(
        _C=SimpleNamespace(_cuda_cudaCachingAllocator_set_allocator_settings=said.append),
        cuda=SimpleNamespace(is_initialized=lambda: True),
    )
    seen = SettingsSeen()
    watch = SettingsWatch(seen)
    watch.install(torch, from_the_start=False)
    assert settings_in_force(torch, ENVIRONMENT, seen).origin == "PYTORCH_CUDA_ALLOC_CONF"
    torch._C._cuda_cudaCachingAllocator_set_allocator_settings("expandable_segments:True")
    settings = settings_in_force(torch, ENVIRONMENT, seen)
    assert (settings.expandable_segments, settings.origin) == (True, "runtime")
    assert said == ["expandable_segments:True"]
    watch.remove()
    assert torch._C._cuda_cudaCachingAllocator_set_allocator_settings == said.append


def watched_torch() -> tuple[SimpleNamespace, SettingsWatch, SettingsSeen]:
    """One that has read ``ENVIRONMENT``, watched from its import on."""
    told = [ENVIRONMENT["PYTORCH_CUDA_ALLOC_CONF"]]

    def set_settings(text: str) -> None:
        told.append(text)
        if "foo" in text:
            raise ValueError("Unrecognized key")

    torch = torch_that_says("")
    torch.original = torch._C._accelerator_setAllocatorSettings = set_settings
    torch._C._accelerator_getAllocatorSettings = lambda: told[-1]
    torch.cuda = SimpleNamespace(is_initialized=lambda: True)
    seen = SettingsSeen()
    watch = SettingsWatch(seen)
    watch.install(torch, from_the_start=True)
    return torch, watch, seen
