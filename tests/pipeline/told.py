# SPDX-License-Identifier: Apache-2.0
"""What a process told of itself: read from what the SDK's console exporters wrote to its log."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry_instrumentation_torchmem import signals

SCOPE = "opentelemetry_instrumentation_torchmem"
SUFFIXES = {"By": "_bytes", "s": "_seconds"}

Labels = frozenset[tuple[str, str]]


def series_name(signal: signals.Metric | signals.RequestMetric) -> str:
    """The name in Prometheus, with suffixes, of the series that holds the value."""
    name = signal.name.replace(".", "_") + SUFFIXES.get(signal.unit, "")
    if signal.kind is signals.Kind.COUNTER:
        return name + "_total"
    if signal.kind is signals.Kind.GAUGE and signal.unit == "1":
        return name + "_ratio"
    return name


def label(key: str, value: object) -> tuple[str, str]:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return key.replace(".", "_"), text


@dataclass(frozen=True, slots=True)
class Told:
    """Everything that came out of the console exporters, in its order."""

    cycles: list[dict[str, list[dict[str, Any]]]]
    """Each collection: metric -> its points."""
    traces: dict[str, list[dict[str, Any]]]
    """Trace id -> its spans."""

    def series(self, signal: signals.Metric | signals.RequestMetric, cycle: int = -1) -> dict[str, Any]:
        """Series name -> labels -> value, as Prometheus should have them."""
        name = series_name(signal)
        result: dict[str, dict[Labels, float]] = defaultdict(dict)
        for point in self.cycles[cycle].get(signal.name, []):
            labels = frozenset(label(*each) for each in point["attributes"].items())
            if signal.kind is not signals.Kind.HISTOGRAM:
                result[name][labels] = point["value"]
                continue
            result[f"{name}_count"][labels] = point["count"]
            result[f"{name}_sum"][labels] = point["sum"]
            below = 0
            bounds = [*point["explicit_bounds"], float("inf")]
            for bound, count in zip(bounds, point["bucket_counts"], strict=True):
                below += count
                result[f"{name}_bucket"][labels | {("le", str(float(bound)))}] = below
        return dict(result)


def told(log: Path) -> Told:
    cycles: list[dict[str, list[dict[str, Any]]]] = []
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for document in documents(log.read_text(errors="replace")):
        if "resource_metrics" in document:
            cycles.append(
                {
                    metric["name"]: metric["data"]["data_points"]
                    for resource in document["resource_metrics"]
                    for scope in resource["scope_metrics"]
                    if scope["scope"]["name"] == SCOPE
                    for metric in scope["metrics"]
                }
            )
        elif "context" in document:
            traces[document["context"]["trace_id"].removeprefix("0x")].append(document)
    return Told(cycles, dict(traces))


def documents(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that begin at a line's beginning; what else is in the log is passed over."""
    decoder = json.JSONDecoder()
    place = 0
    while (place := text.find("\n{", place) + 1) > 0:
        try:
            document, place = decoder.raw_decode(text, place)
        except ValueError:  # cut off, or written into by another thread
            continue
        yield document


def in_prometheus(series: list[dict[str, Any]]) -> dict[Labels, float]:
    """A query's answer by the labels that are a point's own: not those of its resource and scope."""
    result: dict[Labels, float] = {}
    for each in series:
        labels = {
            (key, str(float(value)) if key == "le" else value)
            for key, value in each["metric"].items()
            if key not in {"__name__", "job", "instance"} and not key.startswith(("otel_scope_", "service_"))
        }
        result[frozenset(labels)] = float(each["value"][1])
    return result
