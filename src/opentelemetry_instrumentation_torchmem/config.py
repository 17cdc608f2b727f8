# SPDX-License-Identifier: Apache-2.0
"""The options: one frozen dataclass, from arguments or the SDK's file, the environment, the defaults.

A bad value never stops the server: it is logged once, with where it came from and what is allowed, and the
default is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import inf
from types import MappingProxyType
from typing import Any, TypeVar

from .requests.specs import SPANS, TargetSpec, parse_targets

Warn = Callable[[str], object]
N = TypeVar("N", int, float)


class _NotAllowedError(ValueError):
    """A value that its option does not allow; the message says what is allowed."""


def _one_of(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value is False and "off" in allowed:  # what YAML makes of a bare off
            return "off"
        text = value.strip().lower() if isinstance(value, str) else None
        if text not in allowed:
            raise _NotAllowedError(f"one of {', '.join(allowed)}")
        return text

    return parse


def _number(kind: Callable[[Any], N], least: float, most: float, allowed: str) -> Callable[[object], N]:
    """A number from ``least`` to ``most``, as itself or as text; ``allowed`` says so in words."""

    taken = (int, str) if kind is int else (int, float, str)

    def parse(value: object) -> N:
        try:
            number = kind(value) if isinstance(value, taken) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not least <= number <= most or number == inf:
            raise _NotAllowedError(allowed)
        return number

    return parse


_count = _number(int, 0, inf, "a whole number from 0 up")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _NotAllowedError("a text")
    return value.strip()


def _yes_or_no(value: object) -> bool:
    known = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    answer = known.get(str(value).strip().lower())
    if answer is None:
        raise _NotAllowedError("true or false")
    return answer


def _targets(value: object) -> tuple[TargetSpec, ...]:
    try:
        return parse_targets(value)
    except ValueError as error:
        raise _NotAllowedError(str(error)) from None


def _names(value: object) -> tuple[str, ...]:
    """A comma-separated text, or a list of texts."""
    parts: Iterable[object] = value.split(",") if isinstance(value, str) else _listed(value)
    names = tuple(part.strip() if isinstance(part, str) else "" for part in parts)
    if isinstance(value, str):
        return tuple(name for name in names if name)
    if not all(names):
        raise _NotAllowedError("comma-separated names, or a list of names")
    return names


def _listed(value: object) -> Iterable[object]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value  # pyright: ignore[reportUnknownVariableType] - of anything: each part is looked at
    raise _NotAllowedError("comma-separated names, or a list of names")


def told(name: str, value: object, origin: str) -> str:
    """How every message names what the user gave, and where."""
    return f"{name}={value!r} (from {origin})"


def _option(parse: Callable[[object], Any], default: Any, about: str) -> Any:
    return field(default=default, metadata={"parse": parse, "about": about})


@dataclass(frozen=True, slots=True)
class Config:
    """What the user chose.

    Each option is a keyword of ``instrument()``, a key of the SDK's configuration file under
    ``instrumentation/development: python: torchmem:``, the variable ``OTEL_PYTHON_TORCHMEM_<OPTION>`` and the
    launcher's flag ``--torchmem_<option>``; an argument or the file beats the environment beats the default.

    Example:
        >>> Config.of({"sampling": "always"}, {}, print).sampling
        'always'
    """

    sampling: str = _option(
        _one_of("auto", "request", "always"),
        "auto",
        "Who reads the allocator. `auto`: requests, and a collection that cannot wait for one; never where "
        "a reading could hang the process (a memory pool with its own allocator). `request`: requests alone. "
        "`always`: each collection, whatever it waits for.",
    )
    max_reading_age: float = _option(
        _number(float, 0, inf, "a number of seconds from 0 up"),
        15.0,
        "Seconds for which a request's reading serves the collections while requests are in flight.",
    )
    snapshot_share: float = _option(
        _number(float, 0, 0.1, "a number from 0 to 0.1"),
        0.001,
        "The share of time that memory snapshots may take, 0 to 0.1; 0 for none, and no figure that needs "
        "one (headroom, largest free block, private pools; fragmentation under expandable segments).",
    )
    request_metrics: bool = _option(_yes_or_no, True, "Whether the metrics of requests are recorded.")
    targets: tuple[TargetSpec, ...] = _option(
        _targets,
        (),
        "What is measured beside the built-in targets: `app.engine:Engine.generate,app.model:Net*.forward`; "
        "as an argument or in the file also mappings of `target`, `span`, `operation`, `nested`, `iterator`.",
    )
    disabled_targets: tuple[str, ...] = _option(
        _names, (), "Names or globs of built-in targets that are not measured: `transformers.*`, or `*`."
    )
    span: str = _option(
        _one_of(*SPANS),
        "new",
        "Where a measured call is told: on a `new` span, on the current one (`enrich`), or `off`: in metrics "
        "alone. A target's own choice beats it.",
    )
    oom_evidence: bool = _option(
        _yes_or_no,
        True,
        "Whether the evidence of an out of memory error is taken and told: an event on the active span, a "
        "log record, and its verdict counted.",
    )
    oom_dump_dir: str = _option(
        _text,
        "",
        "The directory that snapshots of out of memory errors are written to, in the format of PyTorch's "
        "memory_viz and `torchmem snapshot`; none where it is empty.",
    )
    oom_dump_max_files: int = _option(
        _number(int, 0, inf, "a whole number from 0 up"),
        10,
        "How many such snapshots the directory may hold. None is ever deleted.",
    )
    oom_dump_max_mib: int = _option(
        _number(int, 0, inf, "a whole number from 0 up"), 256, "How large they may be together, in MiB."
    )
    live_snapshots: bool = _option(
        _yes_or_no,
        False,
        "Whether this process waits at a local socket for `torchmem snapshot --pid`, and gives its own user "
        "and root the allocator's snapshot.",
    )
    excluded_metrics: tuple[str, ...] = _option(
        _names, (), "Names or globs of metrics that are not made: `torch.memory.host.*`."
    )
    origins: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """No option: where each that was given came from, by name. What is not among them has its default."""

    def told(self, option: str, value: object) -> str:
        """How a message names an option with its value, or with one of its values."""
        return told(option, value, self.origins.get(option, "the default"))

    def excludes(self, metric: str) -> bool:
        """Whether a metric is one of the excluded."""
        return any(fnmatchcase(metric, pattern) for pattern in self.excluded_metrics)

    @classmethod
    def of(
        cls,
        given: Mapping[str, object],
        environ: Mapping[str, str] = os.environ,
        warn: Warn = print,
        *,
        given_by: str = "an argument",
    ) -> Config:
        """The options in force. What is wrong is told to ``warn``, one line each, and the default used."""
        for name, value in given.items():
            if name not in OPTIONS:
                near = get_close_matches(name, OPTIONS, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                warn(
                    f"torchmem: unknown option {told(name, value, given_by)} is ignored "
                    f"(allowed are {', '.join(OPTIONS)}){hint}"
                )
        known = {f"OTEL_PYTHON_TORCHMEM_{name.upper()}": name for name in OPTIONS}
        for variable in environ:
            if variable.startswith("OTEL_PYTHON_TORCHMEM_") and variable not in known:
                near = get_close_matches(variable, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                warn(
                    f"torchmem: unknown variable {variable}={environ[variable]!r} is ignored "
                    f"(allowed are {', '.join(known)}){hint}"
                )
        chosen: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for variable, name in known.items():
            for value, origin in ((given.get(name), given_by), (environ.get(variable), variable)):
                if value is None or value == "":
                    continue
                try:
                    chosen[name] = OPTIONS[name].metadata["parse"](value)
                    origins[name] = origin
                except _NotAllowedError as allowed:
                    warn(
                        f"torchmem: {told(name, value, origin)} is not allowed ({allowed}); "
                        f"the default {OPTIONS[name].default!r} is used"
                    )
                break
        return cls(**chosen, origins=MappingProxyType(origins))


OPTIONS: Mapping[str, Field[Any]] = {each.name: each for each in fields(Config) if "parse" in each.metadata}
"""The options by name, in the order of the class."""
