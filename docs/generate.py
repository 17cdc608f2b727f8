# SPDX-License-Identifier: Apache-2.0
"""Writes docs/METRICS.md and docs/registry/ from the table in signals.py, the README's table of options, and
docs/RELEASES.md from what each release was seen to tell (docs/releases.json, which `make releases` compares).

python docs/generate.py          write them
python docs/generate.py --check  exit 1, naming the files, where one is stale
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from opentelemetry_instrumentation_torchmem.config import OPTIONS
from opentelemetry_instrumentation_torchmem.signals import (
    EVENTS,
    GUARD_METRICS,
    METRICS,
    REQUEST_METRICS,
    SPANS,
    Attribute,
    Event,
    Metric,
    RequestMetric,
    Span,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.releases.absences import release_of, why

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
OPTIONS_BEGIN, OPTIONS_END = "<!-- options: written by `make docs` -->", "<!-- end of options -->"
SCHEMA_URL = "https://torchmem.example/schemas/torchmem/0.1.0"
GENERATED = "Generated from signals.py by `make docs`: do not edit."


def attributes() -> list[Attribute]:
    """Every attribute of the table, once, in the order of its first use."""
    rows = (*METRICS, *REQUEST_METRICS, *GUARD_METRICS, *SPANS, *EVENTS)
    first: dict[str, Attribute] = {}
    for attribute in (attribute for row in rows for attribute in row.attributes):
        first.setdefault(attribute.name, attribute)
    return list(first.values())


def metrics_page() -> str:
    lines = [
        f"<!-- {GENERATED} -->",
        "# Metrics",
        "",
        "Everything comes from one reading of the allocator for each device and collection. A figure that",
        "this backend, mode or release of torch cannot give is absent: never 0 for unknown.",
        "",
        "| metric | instrument, unit | attributes | meaning |",
        "|---|---|---|---|",
        *(_metric_line(row) for row in METRICS),
        "",
        "Device metrics are told for each device that this process has reserved memory on.",
        "`torch.memory.host.*` needs torch 2.7 or later. No memory is told before CUDA is",
        "initialised, nor in a forked child that inherited an initialised CUDA. The ledger is one",
        "process's view: with two on a device each is the other's `external`; do not sum `limit`.",
        "",
        "## Metrics of requests",
        "",
        "Recorded once for each measured call, inside its span: exemplars carry the trace's id.",
        "A growth of 0 has none.",
        "",
        "| metric | instrument, unit | attributes | meaning |",
        "|---|---|---|---|",
        *(_metric_line(row) for row in REQUEST_METRICS),
        "",
        "## Metrics of the guard",
        "",
        "Told only where a `MemoryGuard` was made: see GUARD.md.",
        "",
        "| metric | instrument, unit | attributes | meaning |",
        "|---|---|---|---|",
        *(_metric_line(row) for row in GUARD_METRICS),
        "",
        "## Spans",
        "",
        *(line for span in SPANS for line in _lines(span)),
        "## Events",
        "",
        *(line for event in EVENTS for line in (f"### `{event.name}`", "", *_lines(event))),
        "## Attributes",
        "",
        "| attribute | type | meaning | there |",
        "|---|---|---|---|",
        *(_attribute_line(attribute) for attribute in attributes()),
        "",
    ]
    for attribute in attributes():
        if attribute.members:
            lines += [f"### `{attribute.name}`", "", "| value | meaning |", "|---|---|"]
            lines += [f"| `{value}` | {meaning} |" for value, meaning in attribute.members.items()]
            lines.append("")
    return "\n".join(lines)


MODES = {
    "native": "The native allocator, one device",
    "expandable": "`expandable_segments:True`",
    "two devices": "The native allocator, two devices",
    "cudaMallocAsync": "`backend:cudaMallocAsync`",
    "no GPU": "No GPU",
}
"""As docs/releases.json names them, and as the page does."""


def releases_page() -> str:
    """What each release of torch gives in each mode, from what was seen.

    Raises:
        SystemExit: a signal is absent and nobody says why, or is there although somebody says that it is not.
    """
    legs: dict[str, dict[str, Any]] = json.loads((DOCS / "releases.json").read_text())
    versions = {leg: told["torch"].split("+")[0] for leg, told in legs.items()}
    signals = sorted({signal for told in legs.values() for mode in MODES for signal in told[mode]})
    lines = [
        "<!-- Written by `make docs` from docs/releases.json: do not edit. -->",
        "# Releases",
        "",
        "What each release of torch gives, seen by running one workload with it: memory grows, is",
        "fragmented, pinned and held by a CUDA graph, retries, runs out, and requests overlap.",
        "`make releases` runs it anew, with the tests that hold there, and fails where a signal comes or",
        "goes. The allocator is torch's real one on an [emulated CUDA runtime](../tests/emulator/README.md).",
        "The guard's signals depend on no release.",
        "",
        "| torch | Python | OpenTelemetry | wrapt |",
        "|---|---|---|---|",
        *(
            f"| {versions[leg]} | {told['python']} | {told['opentelemetry']} | {told['wrapt']} |"
            for leg, told in legs.items()
        ),
        "",
        f"Of {len(signals)} signals these are not everywhere; **no** has a number where the reason stands.",
    ]
    reasons: dict[str, int] = {}
    wrong: list[str] = []
    for mode, title in MODES.items():
        rows: list[str] = []
        everywhere = 0
        for signal in signals:
            cells: list[str] = []
            for told in legs.values():
                reason = why(signal, release_of(told["torch"]), mode)
                if (signal in told[mode]) == (reason is not None):
                    wrong.append(
                        f"{signal}, torch {told['torch']}, {mode}: {reason or 'absent for no known reason'}"
                    )
                if reason is None:
                    cells.append("yes")
                else:
                    cells.append(f"no ({reasons.setdefault(reason, len(reasons) + 1)})")
            if set(cells) == {"yes"}:
                everywhere += 1
            else:
                rows.append(f"| {_signal(signal)} | {' | '.join(cells)} |")
        lines += ["", f"## {title}", "", f"{everywhere} signals with every release; the others:", ""]
        lines += [f"| signal | {' | '.join(f'torch {each}' for each in versions.values())} |"]
        lines += ["|---|" + "---|" * len(legs), *rows]
    lines += [
        "",
        "## Why",
        "",
        *(f"{number}. {reason[0].upper()}{reason[1:]}." for reason, number in reasons.items()),
    ]
    if wrong:
        sys.exit("docs/releases.json and tests/releases/absences.py do not agree:\n  " + "\n  ".join(wrong))
    return "\n".join(lines) + "\n"


def _signal(name: str) -> str:
    """``metric torch.memory.usage by torch.memory.state free`` -> with what is code set as such."""
    kind, _, rest = name.partition(" ")
    return f"{kind} " + " ".join(word if word == "by" else f"`{word}`" for word in rest.split())


def readme() -> str:
    """The README, with the table of options as it is in config.py."""
    lines = ["| option, variable | default | meaning |", "|---|---|---|"]
    for option in OPTIONS.values():
        default = option.default
        shown = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
        names = f"`{option.name}`<br>`OTEL_PYTHON_TORCHMEM_{option.name.upper()}`"
        lines.append(f"| {names} | {f'`{shown}`' if shown else 'none'} | {option.metadata['about']} |")
    head, rest = README.read_text().split(OPTIONS_BEGIN)
    tail = rest.split(OPTIONS_END)[1]
    return head + OPTIONS_BEGIN + "\n" + "\n".join(lines) + "\n" + OPTIONS_END + tail


def _lines(row: Span | Event) -> list[str]:
    return [
        row.about,
        "",
        "| attribute | type | meaning | there |",
        "|---|---|---|---|",
        *(_attribute_line(attribute) for attribute in row.attributes),
        "",
    ]


def _metric_line(row: Metric | RequestMetric) -> str:
    kind = row.kind.value if not row.unit else f"{row.kind.value}, `{row.unit}`"
    names = ", ".join(f"`{attribute.name}`" for attribute in row.attributes)
    return f"| `{row.name}` | {kind} | {names} | {row.about} |"


def _attribute_line(attribute: Attribute) -> str:
    there = "always" if attribute.required == "required" else attribute.required
    return f"| `{attribute.name}` | {attribute.type} | {attribute.about} | {there} |"


def registry() -> dict[str, Any]:
    """File name -> content, in the format that OpenTelemetry Weaver reads (v1)."""
    return {
        "manifest.yaml": {"schema_url": SCHEMA_URL},
        "attributes.yaml": {
            "groups": [
                {
                    "id": "registry.torchmem",
                    "type": "attribute_group",
                    "display_name": "PyTorch memory attributes",
                    "brief": "Attributes of the memory of PyTorch's caching allocator.",
                    "attributes": [_registry_attribute(attribute) for attribute in attributes()],
                }
            ]
        },
        "metrics.yaml": {
            "groups": [_registry_metric(row) for row in (*METRICS, *REQUEST_METRICS, *GUARD_METRICS)]
        },
        "spans.yaml": {"groups": [_registry_span(span) for span in SPANS]},
        "events.yaml": {"groups": [_registry_event(event) for event in EVENTS]},
    }


def _registry_attribute(attribute: Attribute) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": attribute.name}
    if attribute.members is None:
        entry["type"] = attribute.type
    else:
        entry["type"] = {"members": [_member(*member) for member in attribute.members.items()]}
    entry |= {"brief": attribute.about, "stability": "development"}
    if attribute.examples:
        entry["examples"] = [list(e) if isinstance(e, tuple) else e for e in attribute.examples]
    return entry


def _member(value: str, meaning: str) -> dict[str, str]:
    return {"id": value.lower(), "value": value, "brief": meaning, "stability": "development"}


def _registry_metric(row: Metric | RequestMetric) -> dict[str, Any]:
    return {
        "id": f"metric.{row.name}",
        "type": "metric",
        "metric_name": row.name,
        "brief": row.about,
        "instrument": row.kind.value,
        "unit": row.unit,
        "stability": "development",
        "attributes": [{"ref": a.name, "requirement_level": _level(a)} for a in row.attributes],
    }


def _registry_span(span: Span) -> dict[str, Any]:
    return {
        "id": f"span.{span.name}",
        "type": "span",
        "span_kind": "internal",
        "brief": span.about,
        "stability": "development",
        "attributes": [{"ref": a.name, "requirement_level": _level(a)} for a in span.attributes],
    }


def _registry_event(event: Event) -> dict[str, Any]:
    return {
        "id": f"event.{event.name}",
        "type": "event",
        "name": event.name,
        "brief": event.about,
        "stability": "development",
        "attributes": [{"ref": a.name, "requirement_level": _level(a)} for a in event.attributes],
    }


def _level(attribute: Attribute) -> str | dict[str, str]:
    if attribute.required in ("required", "recommended", "opt_in"):
        return attribute.required
    return {"conditionally_required": attribute.required[0].upper() + attribute.required[1:] + "."}


def files() -> Iterable[tuple[Path, str]]:
    yield README, readme()
    yield DOCS / "METRICS.md", metrics_page()
    yield DOCS / "RELEASES.md", releases_page()
    for name, content in registry().items():
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)
        yield DOCS / "registry" / name, f"# {GENERATED}\n{text}"


def main(arguments: list[str]) -> int:
    stale = [path for path, text in files() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in stale:
            print(f"stale: {path.relative_to(DOCS.parent)}: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
