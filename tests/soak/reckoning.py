# SPDX-License-Identifier: Apache-2.0
"""The soak's reckoning: the clients' account, the server's and the telemetry's against each other.

Each call has an entry in the server's own account, and each entry the span of ours that was current in the
call, if there was one. So nothing is compared by sums alone: which calls were measured is known one by one,
also beside the switches, and so is what of them the SDK was handed and what came to the collector.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.collector import Collector, attributes

from soak.asking import Sent

GIVEN_UP_S = 2.0
"""A stream that its client left is recorded a moment after its end, by another thread."""
DURATION, GROWTH = "torch.memory.request.duration", "torch.memory.request.reserved_growth"
RETRIES = "torch.memory.request.retries"
IN_STATS = {
    "torch.memory.allocations": "allocation.all.allocated",
    "torch.memory.turnover": "allocated_bytes.all.allocated",
    "torch.memory.device.allocations": "num_device_alloc",
    "torch.memory.device.frees": "num_device_free",
    "torch.memory.device.syncs": "num_sync_all_streams",
    "torch.memory.allocation.retries": "num_alloc_retries",
    "torch.memory.ooms": "num_ooms",
}
"""The counters of the allocator: telemetry's name -> torch's."""
OPERATIONS = {
    "answer": "answer",
    "stream": "stream",
    "pieces": "pieces",
    "rerank": "rerank",
    "generate text": "generate",
    "generate image": "generate",
}
"""What the account calls a call -> ``torch.operation``."""
NO_FAILURES = ("ok", "GeneratorExit", "CancelledError")


@dataclass(slots=True)
class Call:
    number: int
    request: str | None
    operation: str
    span: str | None
    before: tuple[int, str] | None
    """How the switch stood before the call, and at the beginning of its body."""
    within: tuple[int, str]
    began: int
    ended: int | None = None
    left: int | None = None
    """When it had wholly ended for its caller; None where the caller had gone."""
    outcome: str | None = None


@dataclass(slots=True)
class Era:
    """From one ``instrument()`` to its ``uninstrument()``. Nanoseconds."""

    number: int
    on: tuple[int, int]
    off: tuple[int, int] | None = None
    flushed: int | None = None
    """When the export began that came to the collector before its end."""

    def surely(self, at: int) -> bool:
        return self.on[1] <= at and (self.off is None or at < self.off[0])


@dataclass(slots=True)
class Account:
    calls: dict[int, Call] = field(default_factory=dict)
    eras: list[Era] = field(default_factory=list)
    recorded: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """By metric: each measurement that the SDK was handed."""
    collected: list[int] = field(default_factory=list)
    """When each collection began."""
    blocks: list[tuple[float, int]] = field(default_factory=list)
    """The interpreter's blocks of memory, by seconds of the wall clock."""
    given_up: set[str] = field(default_factory=set)
    unlogged: list[str] = field(default_factory=list)
    """The names of the events that the SDK gave up."""
    said: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Account:
        account = cls()
        with open(path) as lines:
            for line in map(json.loads, lines):
                account._take(line.pop("what"), line.pop("at"), line)
        return account

    def _take(self, what: str, at: int, told: dict[str, Any]) -> None:
        if what == "began":
            before = None if told["before"] is None else tuple(told["before"])
            self.calls[told["call"]] = Call(
                told["call"],
                told["request"],
                told["operation"],
                told["span"],
                before,
                tuple(told["within"]),
                at,
            )
        elif what == "ended":
            self.calls[told["call"]].ended = at
            self.calls[told["call"]].outcome = told["outcome"]
        elif what == "left":
            self.calls[told["call"]].left = at
        elif what == "switched":
            times = told["began"], told["ended"]
            if told["to"] == "on":
                self.eras.append(Era(len(self.eras), times))
            else:
                self.eras[-1].off, self.eras[-1].flushed = times, told["flushed"]
        elif what == "recorded":
            self.recorded[told["metric"]].append({**told, "at": at})
        elif what == "collects":
            self.collected.append(at)
        elif what == "unlogged":
            self.unlogged.extend(told["events"])
        elif what == "holds":
            self.blocks.append((at / 1e9, told["blocks"]))
        elif what == "given up":
            self.given_up.update(told["spans"])
        else:
            getattr(self, what).append(told.get("line") or told.get("error"))

    def era_at(self, at: int) -> Era | None:
        """The one that surely was then."""
        return next((era for era in self.eras if era.surely(at)), None)

    def off_at(self, at: int) -> bool:
        """Whether nothing was instrumented then, surely."""
        nexts = [*(era.on[0] for era in self.eras[1:]), None]
        return any(
            era.off is not None and era.off[1] <= at and (following is None or at < following)
            for era, following in zip(self.eras, nexts, strict=True)
        )


class Reckoning:
    """Fails by entries in ``failures``; what it has found is in ``figures``."""

    @classmethod
    def of(cls, folder: Path) -> Reckoning:
        """Of a run that has left its accounts there."""
        sent = [Sent(**each) for each in json.loads((folder / "clients.json").read_text())]
        account = Account.read(folder / "account.jsonl")
        last = json.loads((folder / "last.json").read_text())
        return cls(sent, account, Collector(folder / "collector"), last)

    def __init__(
        self, sent: Sequence[Sent], account: Account, collector: Collector, last: dict[str, Any]
    ) -> None:
        self.failures: list[str] = []
        self.figures: dict[str, Any] = {}
        self._sent = sent
        self.blocks = account.blocks
        self._account = account
        self._messages = collector.messages("metrics")
        self._spans: dict[str, Any] = {}
        self._span_count = 0
        for _, span in collector.spans():
            self._span_count += 1
            self._spans[span.span_id.hex()] = span
        self._logs = [
            record
            for message in collector.messages("logs")
            for resource in message.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]
        self._last = last
        self._points: dict[str, list[tuple[dict[str, Any], Any]]] = defaultdict(list)
        for message in self._messages:
            for name, point in points_of(message):
                self._points[name].append((attributes(point), point))
        for part in (
            self._requests, self._switches, self._spans_by_identity, self._durations, self._growths,
            self._retries, self._totals, self._allocator, self._ooms, self._silence, self._quiet,
        ):  # fmt: skip
            part()

    def _want(self, holds: object, words: str, shown: Iterable[Any] = ()) -> None:
        if not holds:
            examples = "; ".join(map(str, list(shown)[:5]))
            self.failures.append(f"{words}{': ' + examples if examples else ''}")

    # the clients against the server

    def _requests(self) -> None:
        calls: dict[str | None, list[Call]] = defaultdict(list)
        for call in self._account.calls.values():
            calls[call.request].append(call)
        outcomes = Counter(sent.outcome.partition(":")[0] for sent in self._sent)
        self.figures["requests"] = dict(outcomes)
        lost = [sent for sent in self._sent if sent.outcome not in ("ok", "oom", "left")]
        self._want(not lost, f"{len(lost)} requests were lost", lost)
        unexpected = [sent for sent in self._sent if sent.must is not None and sent.outcome != sent.must]
        self._want(not unexpected, "requests had another answer than they must have", unexpected)
        wrong = []
        for sent in self._sent:
            made = calls.pop(sent.name, [])
            ran_out = [call.outcome == "OutOfMemoryError" for call in made]
            right = len(made) <= 1 if sent.outcome == "left" else ran_out == [sent.outcome == "oom"]
            if not right:
                wrong.append((sent, made))
        self._want(not wrong, "requests whose calls are not what their clients were told", wrong)
        self._want(not calls, "calls without a request", calls.items())
        unended = [call for call in self._account.calls.values() if call.ended is None]
        self._want(not unended, "calls that never ended", unended)

    def _switches(self) -> None:
        surely_on = surely_off = between = 0
        wrong = []
        for call in self._account.calls.values():
            if call.before != call.within or call.within[1] == "between":
                between += 1
                continue
            measured = call.within[1] == "on"
            surely_on, surely_off = surely_on + measured, surely_off + (not measured)
            if measured != (call.span is not None):
                wrong.append(call)
        self._want(not wrong, "calls that were measured while off, or not while on", wrong)
        self.figures["calls"] = {"on": surely_on, "off": surely_off, "beside a switch": between}
        self.figures["switches"] = 2 * len(self._account.eras) - 1

    # the server against the telemetry

    def _spans_by_identity(self) -> None:
        noted = Counter(call.span for call in self._account.calls.values() if call.span is not None)
        twice = [span for span, count in noted.items() if count > 1]
        self._want(not twice, "spans that were current in more than one call", twice)
        came = {identity for identity, span in self._spans.items() if "torch.operation" in attributes(span)}
        missing = noted.keys() - came - self._account.given_up
        by_span = self._by_span()
        self._want(not missing, f"{len(missing)} spans never came", [by_span[each] for each in missing])
        self._want(came <= noted.keys(), "spans of no call", came - noted.keys())
        wrong = [
            (by_span[identity], attributes(self._spans[identity]).get("error.type"))
            for identity in came & noted.keys()
            if attributes(self._spans[identity])["torch.operation"] != OPERATIONS[by_span[identity].operation]
            or attributes(self._spans[identity]).get("error.type") != failure_of(by_span[identity])
        ]
        self._want(not wrong, "spans that tell another operation or failure than their calls", wrong)
        self.figures["spans"] = {
            "of calls": len(noted),
            "came": len(came),
            "given up by the SDK": len(self._account.given_up & noted.keys()),
            "sent twice": self._span_count - len(self._spans),
        }

    def _by_span(self) -> dict[str, Call]:
        return {call.span: call for call in self._account.calls.values() if call.span is not None}

    def _durations(self) -> None:
        """Each measured call is recorded once, unless it ended after its ``uninstrument()``; what is recorded
        is told, unless its series vanished before the next export."""
        recorded = Counter(each["span"] for each in self._account.recorded[DURATION])
        twice = [span for span, count in recorded.items() if count > 1]
        self._want(not twice, "calls that were recorded twice", twice)
        by_span = self._by_span()
        self._want(
            recorded.keys() <= by_span.keys(), "durations of no call", recorded.keys() - by_span.keys()
        )
        lost, untold, late, beside = [], [], [], 0
        for span, call in by_span.items():
            era = self._account.era_at(call.began) or self._era_of(call)
            if era is None or call.ended is None:
                continue
            end = None if era.off is None else era.off[0]
            surely = call.left if call.left is not None else call.ended + int(GIVEN_UP_S * 1e9)
            if end is None or surely < end:
                if span not in recorded:
                    lost.append(call)
            elif era.off is not None and call.ended > era.off[1]:
                late.append(call)
                if span in recorded:
                    untold.append(call)
            else:
                beside += 1
        self._want(not lost, f"{len(lost)} measured calls were not recorded", lost)
        self._want(not untold, "calls were recorded after their uninstrument()", untold)
        wrong = [
            (each, by_span[each["span"]])
            for each in self._account.recorded[DURATION]
            if each["span"] in by_span
            and (
                each["attributes"].get("error.type") != failure_of(by_span[each["span"]])
                or each["attributes"]["torch.operation"] != OPERATIONS[by_span[each["span"]].operation]
            )
        ]
        self._want(not wrong, "durations that tell another operation or failure than their calls", wrong)
        told = self._told(DURATION, lambda _: 1, lambda point: point.count)
        self.figures["durations"] = {
            "of measured calls": len(by_span),
            "ended after their uninstrument()": len(late),
            "ended beside it": beside,
            "recorded": sum(recorded.values()),
            **told,
        }

    def _era_of(self, call: Call) -> Era | None:
        """Of a call that began beside a switch: the one before or after it."""
        return next(
            (
                era
                for era in self._account.eras
                if era.on[0] <= call.began and (era.off is None or call.began < era.off[1])
            ),
            None,
        )

    def _told(self, metric: str, weight: Any, figure: Any) -> dict[str, Any]:
        """What came of what was recorded on a metric: each series is held against its own measurements."""
        series: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for each in self._account.recorded[metric]:
            series[each["series"]].append(each)
        last: dict[tuple[Any, int], Any] = {}
        for labels, point in self._points[metric]:
            key = tuple(sorted(labels.items())), point.start_time_unix_nano
            if key not in last or last[key].time_unix_nano < point.time_unix_nano:
                last[key] = point
        starts: dict[Any, list[int]] = defaultdict(list)
        for labels, start in sorted(last, key=lambda key: key[1]):
            starts[labels].append(start)
        told = untold = 0
        claimed: set[tuple[Any, int]] = set()
        earlier: dict[Any, int] = {}
        for offers in sorted(series.values(), key=lambda offers: offers[0]["made"]):
            labels, made = tuple(sorted(offers[0]["attributes"].items())), offers[0]["made"]
            at = bisect_left(starts[labels], made + 1) - 1
            start = starts[labels][at] if at >= 0 and starts[labels][at] > earlier.get(labels, 0) else None
            earlier[labels] = made
            recorded = sum(weight(each) for each in offers)
            point = None if start is None else last[labels, start]
            if start is not None:
                claimed.add((labels, start))
            value = 0 if point is None else figure(point)
            era = self._account.era_at(made)
            sure_at = 0 if point is None else point.time_unix_nano
            if era is not None and era.flushed is not None:
                sure_at = max(sure_at, era.flushed)
            if era is not None and era.off is None:
                sure_at = self._last["at"]
            surely = sum(weight(each) for each in offers if each["at"] < sure_at)
            self._want(
                surely <= value <= recorded,
                f"{metric} {dict(labels)} tells {value}, of {recorded} recorded and {surely} of them before "
                "its last export",
            )
            told, untold = told + value, untold + recorded - value
        nobodys = [key for key in last if key not in claimed and figure(last[key])]
        self._want(not nobodys, f"series of {metric} that nothing was recorded on", nobodys)
        return {"told": told, "recorded after the last export of their series": untold}

    def _growths(self) -> None:
        durations = {each["span"] for each in self._account.recorded[DURATION]}
        growths = self._account.recorded[GROWTH]
        grew = Counter(each["span"] for each in growths if each["value"])  # those of 0 are of no span
        differ = grew.keys() - durations
        self._want(
            not differ and grew.total() == len(grew) and len(growths) == len(durations),
            "durations and growths are of other calls",
            differ,
        )
        self._told(GROWTH, lambda _: 1, lambda point: point.count)

    def _retries(self) -> None:
        recorded = {each["span"]: each["value"] for each in self._account.recorded[RETRIES]}
        durations = {each["span"] for each in self._account.recorded[DURATION]}
        on_spans = {
            identity: count
            for identity, span in self._spans.items()
            if identity in durations and (count := attributes(span).get("torch.memory.allocation.retries"))
        }
        known = {span: count for span, count in recorded.items() if span in self._spans}
        self._want(
            known == on_spans,
            "retries of requests are not those on their spans",
            known.items() ^ on_spans.items(),
        )
        told = self._told(RETRIES, lambda each: each["value"], lambda point: point.as_int)
        self.figures["retries of requests"] = {"recorded": sum(recorded.values()), **told}

    # the allocator's own

    def _final(self, name: str) -> dict[tuple[Any, ...], float]:
        """The points of a metric in the last export."""
        latest = max((point.time_unix_nano for _, point in self._points[name]), default=0)
        return {
            tuple(sorted(labels.items())): point.as_int or point.as_double
            for labels, point in self._points[name]
            if point.time_unix_nano == latest and latest >= self._last["at"]
        }

    def _allocator(self) -> None:
        self._want(all(self._last["flushed"]), "the last export has failed", self._last["flushed"])
        differ = []
        for name, of in IN_STATS.items():
            told = self._final(name)
            if [*told.values()] != [self._last["stats"][of]]:
                differ.append((name, told, self._last["stats"][of]))
        for name, of in (
            ("allocated", "allocated_bytes"),
            ("reserved", "reserved_bytes"),
            ("active", "active_bytes"),
        ):
            told = sum(self._final(f"torch.memory.{name}").values())
            if told != self._last["stats"][f"{of}.all.current"]:
                differ.append((name, told, self._last["stats"][f"{of}.all.current"]))
        self._want(not differ, "the last export tells other figures than the allocator", differ)
        active = sum(self._final("torch.memory.requests.active").values())
        self._want(active == 0, f"{active} requests are told as active at rest")
        self.figures["allocator"] = {name: self._last["stats"][of] for name, of in IN_STATS.items()}

    def _totals(self) -> None:
        """No counter ever falls, from the first export to the last; but those that begin anew say so."""
        fell = []
        last: dict[Any, Any] = {}
        for message in self._messages:
            for metric in metrics_of(message):
                if metric.WhichOneof("data") != "sum" or not metric.sum.is_monotonic:
                    continue
                for point in metric.sum.data_points:
                    key = metric.name, point.start_time_unix_nano, tuple(sorted(attributes(point).items()))
                    value = point.as_int or point.as_double
                    if key in last and last[key] > value:
                        fell.append((*key, last[key], value))
                    last[key] = value
        self._want(not fell, f"counters fell {len(fell)} times", fell)

    def _ooms(self) -> None:
        ooms = [call for call in self._account.calls.values() if call.outcome == "OutOfMemoryError"]
        self._want(
            len(ooms) == self._last["stats"]["num_ooms"],
            f"{len(ooms)} calls ran out of memory, and torch counts {self._last['stats']['num_ooms']}",
        )
        seen = self._final("torch.memory.oom.verdicts")
        surely = [call for call in ooms if call.within[1] == "on" == stage_at(self._account, call.ended)]
        perhaps = [
            call for call in ooms if call.within[1] != "off" or stage_at(self._account, call.ended) != "off"
        ]
        total = sum(seen.values())
        self._want(
            len(surely) <= total <= len(perhaps),
            f"{total:g} errors have a verdict, of {len(surely)} to {len(perhaps)} while instrumented",
        )
        events = [record for record in self._logs if record.event_name == "torch.memory.oom.evidence"]
        identities = {(record.time_unix_nano, record.span_id) for record in events}
        examined = sum(
            value
            for labels, value in seen.items()
            if dict(labels)["torch.memory.oom.verdict"] != "unexamined"
        )
        given_up = self._account.unlogged.count("torch.memory.oom.evidence")
        self._want(
            len(identities) + given_up == examined,
            f"{len(identities)} log records, {given_up} that the SDK gave up, {examined:g} errors examined",
        )
        self.figures["out of memory"] = {
            "calls": len(ooms),
            "with a verdict": int(total),
            "examined": int(examined),
            "logged": len(identities),
            "logs given up by the SDK": given_up,
        }

    def _silence(self) -> None:
        """While nothing is instrumented nothing is told, but by a collection that began before."""
        began = sorted(self._account.collected)
        came = {
            (name, point.time_unix_nano)
            for name, points in self._points.items()
            if name.startswith("torch.") and not name.startswith("torch.memory.guard.")
            for _, point in points
            if self._account.off_at(point.time_unix_nano)
            and self._account.off_at(began[bisect_left(began, point.time_unix_nano) - 1])
        }
        self._want(not came, "points of the time between uninstrument() and instrument()", came)

    def _quiet(self) -> None:
        """Nothing of ours raised, was given up or complained."""
        self._want(not self._account.raised, "raised where nobody catches it", self._account.raised)
        said = [line for line in self._account.said if "no dump of an out of memory error" not in line]
        self._want(not said, "the package complained", said)
        skipped = {
            dict(labels)["torch.memory.telemetry.reason"]: value
            for labels, value in self._final("torch.memory.telemetry.skipped").items()
        }
        self.figures["skipped"] = {reason: int(count) for reason, count in skipped.items() if count}
        wrong = {reason: skipped.get(reason) for reason in ("error", "request", "hook", "target", "overflow")}
        self._want(all(count == 0 for count in wrong.values()), "something of ours failed", wrong.items())

    def series(self, until: float) -> int:
        """How many different series had come by then, in seconds of the wall clock."""
        return len(
            {
                (name, tuple(sorted(labels.items())))
                for name, points in self._points.items()
                for labels, point in points
                if point.time_unix_nano <= until * 1e9
            }
        )


def stage_at(account: Account, at: int | None) -> str:
    if at is None or account.era_at(at) is not None:
        return "on"
    return "off" if account.off_at(at) else "between"


def failure_of(call: Call) -> str | None:
    return None if call.outcome in NO_FAILURES else call.outcome


def metrics_of(message: Any) -> Iterable[Any]:
    return (
        metric
        for resource in message.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def points_of(message: Any) -> Iterable[tuple[str, Any]]:
    for metric in metrics_of(message):
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            yield metric.name, point
