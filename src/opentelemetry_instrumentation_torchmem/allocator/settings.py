# SPDX-License-Identifier: Apache-2.0
"""The allocator settings in force, and where they came from.

Reading them never initialises CUDA.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from .replaced import Replaced

ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""In the order of precedence: the first one that is set replaces the others wholly."""

N = TypeVar("N", int, float)

_MIB = 1024 * 1024
# Linear in the string: a name is looked at once, from its first letter, and a bracket up to the next one.
_OPTION = re.compile(r"(?<![a-z_0-9])([a-z_0-9]+)\s*:\s*(\[[^][]*\]|[^,]*)\s*(?:,|$)")
_INTERVALS = 16  # of roundup_power2_divisions: by powers of two from 1 MiB to 64 GiB
_FORGOTTEN = ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")
"""Options that torch sets back when others are set at run time; it keeps the rest as they were."""
_PAGE = "large_segment_size_mb"


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What the options in force say; an option that nobody set is None.

    Example:
        >>> AllocatorSettings.parse("max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF").max_split_size
        67108864
    """

    text: str
    """The string that was set last."""
    origin: str
    """``runtime``, the variable's name, or ``default``."""
    expandable_segments: bool = False
    max_split_size: int | None = None
    """Bytes: blocks above are never split."""
    roundup_power2_divisions: str | None = None
    """As written: one number, or a list by size."""
    garbage_collection_threshold: float | None = None
    max_non_split_rounding: int | None = None
    """Bytes by which a block may exceed a request that is never split."""
    large_segment_size: int | None = None
    """Bytes asked of the driver for a request of 1 to 10 MiB; the page of large expandable segments."""
    throw_on_cudamalloc_oom: bool = False
    expandable_segments_reserve: str | None = None
    """As written: the share of the device's memory that an address range spans, or ``40G``."""
    expandable_segments_reserve_by_class: str | None = None
    in_doubt: bool = False
    """Others were set at run time, unseen: what torch has kept of those cannot be known."""
    pages_changed: bool = False
    """``large_segment_size_mb`` was another one before: what was mapped then keeps its pages."""

    @classmethod
    def parse(cls, text: str, origin: str, before: str = "") -> AllocatorSettings:
        """Read an option string; what cannot be read counts as not set, as torch refuses it anyway.

        ``before`` is what was in force when this string was set at run time: torch keeps most of it.

        Example:
            >>> AllocatorSettings.parse("large_segment_size_mb:40", "runtime", "expandable_segments:True"
            ...     ).expandable_segments
            True
        """
        options = _merged(before, text)
        return cls(
            text=text,
            origin=origin,
            expandable_segments=_is_true(options.get("expandable_segments")),
            max_split_size=_mib(options.get("max_split_size_mb")),
            roundup_power2_divisions=options.get("roundup_power2_divisions"),
            garbage_collection_threshold=_number(options.get("garbage_collection_threshold"), float),
            max_non_split_rounding=_mib(options.get("max_non_split_rounding_mb")),
            large_segment_size=_mib(options.get("large_segment_size_mb")),
            throw_on_cudamalloc_oom=_is_true(options.get("throw_on_cudamalloc_oom")),
            expandable_segments_reserve=options.get("expandable_segments_reserve"),
            expandable_segments_reserve_by_class=options.get("expandable_segments_reserve_by_class"),
        )

    @classmethod
    def of_snapshot(
        cls, given: Mapping[str, Any], environ: Mapping[str, str], seen: SettingsSeen | None = None
    ) -> AllocatorSettings:
        """What a snapshot's ``allocator_settings`` say, which are in force themselves and not as written.

        The options that no snapshot holds are taken from the string it gives, else from what was ``seen`` to
        be set before, else from the environment.
        """
        text = str(given.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        read = _at_run_time(text, "snapshot", environ, seen)
        split, threshold = given.get("max_split_size"), given.get("garbage_collection_threshold")
        divisions: Mapping[str, Any] = given.get("roundup_power2_divisions") or {}
        return replace(
            read,
            expandable_segments=bool(given.get("expandable_segments", read.expandable_segments)),
            max_split_size=read.max_split_size if split is None else split if split > 0 else None,
            garbage_collection_threshold=threshold or None,
            roundup_power2_divisions=(
                "[" + ",".join(f"{size}:{count}" for size, count in _by_size(divisions)) + "]"
                if any(divisions.values())
                else None
            ),
        )

    @property
    def in_force(self) -> AllocatorSettings:
        """The same whichever way they were written and came to be."""
        return replace(self, text="", origin="")

    @property
    def divisions(self) -> tuple[int, ...] | None:
        """Into how many steps the sizes between two powers of two are rounded, for each of the 16
        intervals from 1 MiB on; None where none is."""
        if self.roundup_power2_divisions is None:
            return None
        divisions = _divisions(self.roundup_power2_divisions)
        return divisions if max(divisions) > 1 else None


class SettingsSeen:
    """What was set at run time: torch tells the last string alone, and keeps most of those before it."""

    def __init__(self) -> None:
        self.from_the_start = False
        """Whether it was watched from torch's import on: none was set before."""
        self._before = ""
        """What was in force before the last one that was seen, as one string."""
        self._last: str | None = None
        """None while none was seen."""
        self._missed = False
        self.pages_changed = False

    @classmethod
    def of(cls, before: str, last: str, in_doubt: bool, pages_changed: bool) -> SettingsSeen:
        """As another process saw them."""
        seen = cls()
        seen._before, seen._last, seen._missed, seen.pages_changed = before, last, in_doubt, pages_changed
        return seen

    @property
    def last(self) -> str | None:
        """The string that was set last, as far as that was seen; None if none was."""
        return self._last

    def note(self, before: str | None, text: str, taken: bool) -> None:
        """One was set; ``before`` is the string that torch told just then, None where it tells none.

        Of a string that torch refused it has taken some options, or all but one.
        """
        self._reconcile(before)
        whole = _merged(self._before, self._last or "")
        self._before = _written(whole)
        self._last = text
        self._missed = self._missed or not taken
        after = _merged(self._before, text)
        if _mib(whole.get(_PAGE)) != _mib(after.get(_PAGE)):
            self.pages_changed = True

    def before(self, text: str, environ: Mapping[str, str]) -> tuple[str, bool]:
        """What was in force before the string that torch tells now, and whether that is in doubt."""
        if self._last is not None:
            return self._before, self._missed or text != self._last
        of_environment = _of_environment(environ)[0]
        if self.from_the_start or text == of_environment:
            return "", self._missed
        return of_environment, True

    def unwatched(self, text: str | None) -> None:
        """From now on nobody looks; ``text`` is what torch tells now, None where that cannot be asked."""
        if text is not None:
            self._reconcile(text)
        elif self._last is None:
            self.from_the_start = False

    def _reconcile(self, text: str | None) -> None:
        """With what torch tells now, before anything is set."""
        if text is None:  # an old release: its options are in its snapshots
            self._last = self._last or _of_environment(os.environ)[0]
        elif self._last is None:
            before, missed = self.before(text, os.environ)
            self._before, self._last, self._missed = before, text, missed
        elif text != self._last:
            self._missed = True


SEEN: Final = SettingsSeen()
"""Of this process: what was set once is in force for as long as torch is."""


class SettingsWatch:
    """Replaces torch's function that sets options at run time by a plain one that notes them."""

    def __init__(self, seen: SettingsSeen = SEEN) -> None:
        self._seen = seen
        self._torch: Any = None
        self._replaced = Replaced()

    def install(self, torch: Any, from_the_start: bool) -> None:
        """Watch from now on. ``torch`` is the imported module; ``from_the_start``: nobody has used it yet."""
        self._torch = torch
        self._seen.from_the_start = self._seen.from_the_start or from_the_start
        name = next((name for name in _SETTERS if hasattr(torch._C, name)), None)
        if name is not None:
            self._replaced.put(torch._C, name, self._noted)

    def _noted(self, original: Callable[[str], Any], text: str) -> Any:
        before = _told(self._torch)
        try:
            given = original(text)
        except BaseException:
            self._seen.note(before, text, taken=False)
            raise
        self._seen.note(before, text, taken=True)
        return given

    def remove(self) -> None:
        if self._replaced:
            # to ask before CUDA is initialised would have torch read the environment too early
            self._seen.unwatched(_told(self._torch) if self._torch.cuda.is_initialized() else None)
            self._replaced.put_back()


_SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")


def _told(torch: Any) -> str | None:
    """The string that was set last, torch 2.12 or later; None where it does not tell."""
    of_runtime = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if of_runtime is None:
        return None
    try:
        return str(of_runtime())
    except RuntimeError:  # another accelerator than CUDA, or none
        return None


def settings_in_force(
    torch: Any, environ: Mapping[str, str] = os.environ, seen: SettingsSeen = SEEN
) -> AllocatorSettings:
    """The runtime's own word (torch 2.12 or later), else what was seen to be set, else the environment's.

    The runtime tells the string that was set last. What it leaves out is taken from those that were ``seen``
    before, else from the environment; where others were set unseen the settings are in doubt.

    ``torch`` is the imported module, its CUDA initialised.
    """
    text = _told(torch)
    if text is None:
        text = seen.last
    if text is None:
        text, origin = _of_environment(environ)
        return _parsed(text, origin)
    return _at_run_time(text, "runtime", environ, seen)


def settings_at(
    snapshot: Mapping[str, Any],
    otherwise: AllocatorSettings,
    environ: Mapping[str, str] = os.environ,
    seen: SettingsSeen = SEEN,
) -> AllocatorSettings:
    """Those in force when a snapshot was taken; ``otherwise`` where it does not say.

    It knows them all, where the runtime tells the string that was set last alone.
    """
    given = snapshot.get("allocator_settings")
    if not given:
        return otherwise
    read = AllocatorSettings.of_snapshot(given, environ, seen)
    # a release that does not tell the string has no option that matters and is not in its snapshots
    in_doubt = read.in_doubt and otherwise.origin == "runtime"
    return replace(read, text=otherwise.text, origin=otherwise.origin, in_doubt=in_doubt)


def _at_run_time(
    text: str, origin: str, environ: Mapping[str, str], seen: SettingsSeen | None
) -> AllocatorSettings:
    if seen is None:
        return _parsed(text, origin, _of_environment(environ)[0])
    before, in_doubt = seen.before(text, environ)
    return _parsed(text, origin, before, in_doubt, seen.pages_changed)


def _merged(before: str, text: str) -> dict[str, str]:
    """The options in force when a string is set where others were."""
    kept = {name: value for name, value in _OPTION.findall(before) if name not in _FORGOTTEN}
    return kept | dict(_OPTION.findall(text))


def _written(options: Mapping[str, str]) -> str:
    return ",".join(f"{name}:{value}" for name, value in options.items())


def _of_environment(environ: Mapping[str, str]) -> tuple[str, str]:
    for variable in ENVIRONMENT:
        if variable in environ:
            return environ[variable], variable
    return "", "default"


@functools.lru_cache(maxsize=8)
def _parsed(
    text: str, origin: str, before: str = "", in_doubt: bool = False, pages_changed: bool = False
) -> AllocatorSettings:
    """Each string once: it is asked for at every collection and hardly ever changes."""
    read = AllocatorSettings.parse(text, origin, before)
    return replace(read, in_doubt=in_doubt, pages_changed=pages_changed)


@functools.lru_cache(maxsize=8)
def _divisions(text: str) -> tuple[int, ...]:
    """As torch reads it: one number for all, or ``[256:1,512:2,>:8]``, whose first number stands for what
    is smaller too, and ``>`` for what is larger than the one before it."""
    if not text.startswith("["):
        return (_number(text, int) or 0,) * _INTERVALS
    divisions = [0] * _INTERVALS
    last: int | None = None
    for item in text.strip("[] ").split(","):
        size, _, count = (part.strip() for part in item.partition(":"))
        value = _number(count, int) or 0
        if size == ">":
            above = (last or 0) + 1  # so of 2.15; older releases begin one earlier
            divisions[above:] = [value] * (_INTERVALS - above)
            continue
        index = min(max((_number(size, int) or 1).bit_length() - 1, 0), _INTERVALS - 1)
        if last is None:
            divisions[:index] = [value] * index
        divisions[index] = value
        last = index
    return tuple(divisions)


def _by_size(divisions: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(divisions.items(), key=lambda item: _number(item[0], int) or 0)


def _is_true(text: str | None) -> bool:
    return text is not None and text.strip().lower() == "true"


def _mib(text: str | None) -> int | None:
    number = _number(text, int)
    return None if number is None else number * _MIB


def _number(text: str | None, kind: Callable[[str], N]) -> N | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None
