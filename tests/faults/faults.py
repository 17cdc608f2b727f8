# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a test's name and a removed line stand whole
"""The faults: what is done, what is promised, the test that holds it, and the line without which that fails.

python tests/faults/faults.py          writes docs/RELIABILITY.md
python tests/faults/prove.py [word]    removes each protection in a copy, and wants the test to fail
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("src/opentelemetry_instrumentation_torchmem")
DOCUMENT = ROOT / "docs" / "RELIABILITY.md"


@dataclass(frozen=True, slots=True)
class Removal:
    """What is taken out of a file of the package; ``put`` stands in its place."""

    file: str
    text: str
    """As it stands there, once."""
    put: str
    does: str
    """What it is there for, in words."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    done: str
    promised: str
    test: str
    """``file::function`` under tests/."""
    without: Sequence[Removal]
    """The protection: taken out together, for where there are two one of them is enough."""
    also: Sequence[str] = ()
    """Other tests of it."""


def _faults() -> Iterator[tuple[str, Sequence[Fault]]]:
    waits = Removal(
        "instrumentor.py",
        """                if "torch" in sys.modules:
                    wrapt.register_post_import_hook(self._instrumented.torch_imported, "torch")
""",
        """                if True:
                    self._instrumented.torch_imported(sys)
""",
        "nothing is wired before torch is imported",
    )
    gate = Removal(
        "allocator/source.py",
        "is_initialized is not None and is_initialized() else None",
        "is_initialized is not None else None",
        "nothing is asked of torch before `torch.cuda.is_initialized()`",
    )
    alive = Removal(
        "allocator/sampler.py",
        "            return self._source if self._source.is_alive() else None\n",
        "            return self._source\n",
        "the source is asked each time whether it is this process's",
    )
    drains = [
        Removal(
            "requests/probe.py",
            "            self._wake.get()\n            self.drain()\n",
            "            self._wake.get()\n",
            "what was given up is told at once, on a thread of our own",
        ),
        Removal(
            "requests/probe.py",
            "            if requests.abandoned:\n                requests.drain()\n",
            "",
            "what was given up is told by the next call too, not by collections alone",
        ),
    ]

    def guard(file: str, before: str, after: str, does: str) -> Removal:
        """An ``except Exception``, between what stands before and after it, that catches nothing more."""
        caught = f"{before}except Exception{after}"
        return Removal(file, caught, caught.replace("except Exception", "except NotImplementedError"), does)

    yield (
        "Torch, and what it does",
        [
            Fault(
                "Torch is absent",
                "An environment without torch, under the launcher and in code.",
                "The server runs as without the package; one line says why, no series.",
                "e2e/test_without_torch.py::test_without_the_dependency_check_there_are_no_series_either",
                [waits],
                also=[
                    "e2e/test_without_torch.py::test_under_the_launcher_nothing_is_said_and_nothing_exported",
                    "e2e/test_without_torch.py::test_instrument_in_code_tells_why_not_and_stops_nothing",
                ],
            ),
            Fault(
                "CPU only",
                "Torch without a GPU or a driver.",
                "Calls give what they give and are timed; nothing is told of memory, nothing logged or counted "
                "as skipped.",
                "faults/test_torch.py::test_on_the_cpu_a_call_is_timed_and_nothing_is_told_of_memory",
                [gate, alive],
            ),
            Fault(
                "CUDA uninitialised",
                "A GPU that the program has not touched yet: collections, requests, `uninstrument()`.",
                "No context is made by us, ever; figures come once the user has initialised CUDA.",
                "faults/test_torch.py::test_an_uninitialised_cuda_stays_so_until_the_user_wants_it",
                [gate, alive],
            ),
            Fault(
                "`cudaMallocAsync`",
                "Requests and an out of memory error on that backend.",
                "Results and exceptions as without us; the figures it keeps, and no zeros for the others.",
                "faults/test_torch.py::test_cuda_malloc_async_loses_figures_and_no_call",
                [
                    Removal(
                        "allocator/source.py",
                        "        if self.backend == NATIVE:\n            statistics = self._statistics(index)\n",
                        "        if self.backend in (NATIVE, ASYNC):\n"
                        "            statistics = self._statistics(index)\n",
                        "a backend's statistics are reduced to those it keeps",
                    )
                ],
                also=["emulated/test_metrics.py::test_cuda_malloc_async_gives_three_figures_and_no_more"],
            ),
            Fault(
                "Pluggable allocator",
                "Requests on an allocator that raises at every question.",
                "Results as without us; the device's limit alone is told, and nothing is logged.",
                "faults/test_torch.py::test_a_pluggable_allocator_loses_figures_and_no_call",
                [
                    Removal(
                        "allocator/source.py",
                        "        if self.backend == NATIVE:\n            statistics = self._statistics(index)\n",
                        "        if True:\n            statistics = self._statistics(index)\n",
                        "an allocator without statistics is not asked for them",
                    )
                ],
                also=["emulated/test_metrics.py::test_a_pluggable_allocator_tells_nothing_of_itself"],
            ),
            Fault(
                "A `MemPool` whose allocator needs the interpreter",
                "vLLM's sleep mode, in small: a thread allocates in such a pool while collections run.",
                "Nobody hangs; what is not read is counted by reason.",
                "emulated/test_hazards.py::test_beside_such_a_pool_nothing_is_read_and_that_is_counted",
                [
                    Removal(
                        "allocator/pools.py",
                        "            self._become_suspect()\n            _suspects.append(True)\n",
                        "            pass\n",
                        "a pool with an allocator of its own is noted when it is made",
                    )
                ],
                also=[
                    "emulated/test_request_hazards.py::test_beside_such_a_pool_a_second_thread_that_makes_requests_hangs_nothing",
                    "emulated/test_hazards.py::test_without_the_protection_such_a_pool_hangs_the_process",
                ],
            ),
            Fault(
                "Graph capture",
                "A request captures a graph; others and collections go on beside it.",
                "The capture succeeds and replays; no snapshot is taken meanwhile, and that is counted.",
                "faults/test_torch.py::test_a_graph_is_captured_and_replayed_with_requests_and_collections_around_it",
                [
                    Removal(
                        "allocator/captures.py",
                        "            self._capturing[graph] = _given(*args, **kwargs)\n",
                        "",
                        "captures are noted on whichever thread they begin",
                    )
                ],
                also=[
                    "emulated/test_survey.py::test_never_during_a_capture_on_any_thread_and_none_that_was_broken_off_is_in_the_way"
                ],
            ),
            Fault(
                "The user's resets",
                "`reset_peak_memory_stats` and `reset_accumulated_memory_stats` between requests.",
                "The user's own peaks and counters are as without us; no total of ours falls.",
                "faults/test_torch.py::test_peaks_and_counters_are_the_users_own_and_ours_never_fall",
                [
                    Removal(
                        "allocator/sampler.py",
                        "                    self._base[name] = self._base.get(name, 0) + last\n",
                        "                    pass\n",
                        "what was counted before a reset is carried on",
                    )
                ],
                also=[
                    "emulated/test_resets.py::test_no_total_falls_and_none_loses_what_was_collected",
                    "emulated/test_requests.py::test_the_users_own_resets_leave_figures_out_and_never_make_them_wrong",
                ],
            ),
            Fault(
                "OOM storm",
                "A thousand out of memory errors in a row.",
                "Each costs less than twice what it costs without us; one is examined, all are counted.",
                "emulated/test_oom.py::test_a_storm_is_examined_once_counted_and_summed_up",
                [
                    Removal(
                        "oom.py",
                        "            due = began >= storm.not_before\n",
                        "            due = True\n",
                        "no more than one in ten seconds is examined on a device",
                    )
                ],
                also=["emulated/test_oom.py::test_a_storm_on_many_threads_loses_none"],
            ),
            Fault(
                "The user's OOM observers",
                "Observers attached before and after ours, while telling the evidence raises.",
                "Both are called, and the exception is torch's own, with cause and context as without us; the "
                "error is counted.",
                "faults/test_torch.py::test_the_users_observers_and_exception_stand_though_telling_the_evidence_fails",
                [
                    guard(
                        "oom.py",
                        "            self._see(device, (asked, allowed, free), trace.get_current_span(), None)\n        ",
                        " as error:\n",
                        "a fault of ours stays inside the observer",
                    ),
                    guard(
                        "oom.py",
                        "            watch.seen(device, asked, allowed, free)\n    ",
                        " as error:\n",
                        "and once more around it",
                    ),
                ],
                also=["emulated/test_oom.py::test_the_users_observer_history_and_exception_are_as_without"],
            ),
        ],
    )
    yield (
        "Processes",
        [
            Fault(
                "Fork after initialisation",
                "A child that inherited an initialised CUDA serves a request and collects.",
                "It serves; it tells its own request and nothing of its parent's memory. The parent goes on.",
                "faults/test_processes.py::test_a_child_forked_after_initialisation_serves_and_tells_nothing_of_its_parents_memory",
                [alive],
                also=[
                    "emulated/test_metrics.py::test_a_forked_child_exports_nothing_of_its_parents_gpu",
                    "emulated/test_metrics.py::test_a_child_forked_before_cuda_exports_its_own",
                ],
            ),
            Fault(
                "Fork during a collection",
                "A fork while the reader's thread is in the driver with our locks held.",
                "The child's calls do not hang; a provider that it makes exports its requests. One that it "
                "inherits may be locked for good inside the SDK.",
                "faults/test_processes.py::test_a_child_forked_during_a_collection_serves_and_can_export",
                [
                    Removal(
                        "wiring.py",
                        "        self._windows.begin_anew()\n",
                        "",
                        "a forked child has locks of its own",
                    )
                ],
                also=[
                    "emulated/test_lifecycle.py::test_a_child_forked_beside_requests_neither_hangs_nor_keeps_them"
                ],
            ),
            Fault(
                "Spawned workers",
                "A script under the launcher spawns workers, whose targets are the script's own classes.",
                "Each answers and tells its own memory and requests.",
                "faults/test_processes.py::test_spawned_workers_are_measured_each_for_itself",
                [
                    Removal(
                        "requests/targets.py",
                        'return "__main__" if module == "__mp_main__" else module',
                        "return module",
                        "a spawned worker's name for the script is understood",
                    )
                ],
                also=["emulated/test_metrics.py::test_a_spawned_worker_exports_its_own"],
            ),
            Fault(
                "gunicorn's prefork",
                "`gunicorn --preload --workers 2` under the launcher, with requests at import in the master.",
                "Every request is answered; each worker's count is of its own requests, without the master's.",
                "faults/test_processes.py::test_gunicorns_workers_tell_their_own_requests_and_none_of_the_masters",
                [
                    Removal(
                        "wiring.py",
                        "        self._registration.forget()\n",
                        "",
                        "a forked child forgets what its parent recorded",
                    )
                ],
            ),
            Fault(
                "uvicorn's workers",
                "`uvicorn --workers 2` under the launcher.",
                "Every request is answered; each worker tells its own, the supervisor nothing.",
                "faults/test_processes.py::test_uvicorns_workers_are_measured_and_its_supervisor_tells_nothing",
                [
                    Removal(
                        "instrumentor.py",
                        '                    wrapt.register_post_import_hook(self._torch_imported, "torch")\n',
                        "",
                        "whoever is instrumented first waits for torch",
                    )
                ],
            ),
            Fault(
                "Subinterpreters",
                "`instrument()`, measured calls and a collection in one, beside the main one.",
                "Calls pass there and nothing is told, for torch runs in the main one alone; the main one goes on.",
                "faults/test_processes.py::test_in_an_interpreter_without_torch_calls_pass_and_nothing_is_told",
                [waits],
            ),
        ],
    )
    yield (
        "Calls",
        [
            Fault(
                "Abandoned generator",
                "Streams dropped in cycles, so that they are collected in the middle of whatever the thread is "
                "at, the SDK with its locks among it.",
                "Nobody hangs; each has one span, no error.",
                "faults/test_calls.py::test_an_abandoned_generator_hangs_nobody_and_has_its_span",
                [
                    Removal(
                        "requests/probe.py",
                        "        self.abandoned.append((probe, error))\n",
                        "        self.finish(probe, error, None)\n",
                        "a finalizer records nothing: it queues what ended",
                    )
                ],
                also=[
                    "unit/test_streams.py::test_a_generator_collected_inside_the_sdk_takes_none_of_its_locks",
                    "unit/test_streams.py::test_an_async_generator_collected_inside_the_sdk_takes_none_of_its_locks",
                ],
            ),
            Fault(
                "Cancelled coroutine",
                "`cancel()`, `cancel(message)`, `wait_for` that times out.",
                "The caller gets what asyncio gives, `finally` runs; the span ends once and is no error.",
                "faults/test_calls.py::test_a_cancelled_coroutine_is_cancelled_as_ever_and_is_no_error",
                [
                    Removal(
                        "requests/probe.py",
                        "failure = None if error is None or _is_no_failure(error) else error\n",
                        "failure = error\n",
                        "a cancellation is no failure",
                    )
                ],
                also=[
                    "unit/test_streams.py::test_a_cancelled_coroutine_is_no_error",
                    "unit/test_streams.py::test_a_pending_coroutine_collected_inside_the_sdk_takes_none_of_its_locks",
                ],
            ),
            Fault(
                "A hook raises",
                "The user's request and response hooks raise at every call.",
                "Results, exceptions and figures as without hooks; told once, counted each time.",
                "faults/test_calls.py::test_a_hook_that_raises_costs_a_log_line_and_no_call",
                [
                    guard(
                        "requests/probe.py",
                        "            hook(*arguments)\n        ",
                        " as error:\n",
                        "a hook's exception is its own affair",
                    )
                ],
                also=[
                    "emulated/test_request_hazards.py::test_a_hook_that_raises_is_named_once_counted_each_time_and_costs_nothing_else"
                ],
            ),
            Fault(
                "A callback raises",
                "A user's observable callback, and the driver's call within one of ours.",
                "Other instruments of the cycle keep their points; what the driver alone knows is absent.",
                "faults/test_calls.py::test_a_callback_that_raises_costs_its_own_figures_alone",
                [
                    guard(
                        "allocator/sampler.py",
                        "            return part(*arguments)\n        ",
                        " as error:  # a broken",
                        "a part of a collection that raises is absent from it",
                    )
                ],
                also=["emulated/test_lifecycle.py::test_a_driver_that_fails_costs_only_what_it_alone_knows"],
            ),
            Fault(
                "A span processor raises",
                "At the start of every span, or at its end.",
                "Results and exceptions as without; told once. A span that could not be started is not measured.",
                "faults/test_calls.py::test_a_span_processor_that_raises_costs_a_log_line_and_no_call",
                [
                    guard(
                        "requests/probe.py",
                        "                    span.end(probe.ended_at)\n        ",
                        " as fault:",
                        "what the end of a span raises stops there",
                    )
                ],
            ),
            Fault(
                "An exporter raises",
                "Exporters of spans and metrics raise at every export, and call measured code themselves.",
                "Results, exceptions and figures as without; an export is no request and begins no other.",
                "faults/test_calls.py::test_an_exporter_that_raises_costs_no_call_and_no_figure",
                [
                    Removal(
                        "requests/probe.py",
                        "                if context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get(_SUPPRESSED):\n",
                        "                if False:\n",
                        "where the SDK suppresses instrumentation nothing is measured (what an exporter raises, "
                        "the SDK keeps)",
                    )
                ],
            ),
            Fault(
                "A second `instrument()`",
                "From another entry point, and from eight threads at once.",
                "Each call is measured once; one `uninstrument()` restores everything.",
                "faults/test_calls.py::test_a_second_instrument_measures_nothing_twice_and_one_uninstrument_ends_it",
                [
                    Removal(
                        "instrumentor.py",
                        "            if self._instrumented is not None:  # two threads",
                        "            if False:  # two threads",
                        "who comes second changes nothing",
                    )
                ],
                also=[
                    "emulated/test_lifecycle.py::test_a_second_entry_point_changes_nothing",
                    "emulated/test_lifecycle.py::test_two_threads_that_instrument_at_once_leave_nothing_behind",
                ],
            ),
            Fault(
                "`uninstrument()` under load",
                "Forty times, while three threads make calls and streams.",
                "No result is wrong, no call raises or hangs, classes are as before; no point comes back, no "
                "total falls.",
                "faults/test_calls.py::test_uninstrument_under_load_disturbs_no_call_and_no_point_comes_back",
                [
                    Removal(
                        "requests/probe.py",
                        "                if not self.closed:\n                    self._record(",
                        "                if True:\n                    self._record(",
                        "what ends after the end is not recorded",
                    ),
                    Removal(
                        "requests/probe.py",
                        "if requests.metered and not requests.closed:",
                        "if requests.metered:",
                        "nor where a call left nothing new",
                    ),
                ],
                also=[
                    "emulated/test_requests.py::test_uninstrument_with_requests_in_flight_lets_them_end_and_leaves_nothing",
                    "emulated/test_requests.py::test_no_point_comes_back_from_requests_that_end_beside_uninstrument",
                ],
            ),
            Fault(
                "2,000 targets",
                "Each a class of its own, each called.",
                "A call costs less than twice what it costs with one target; 200 label sets, the rest counted "
                "under `other`, none lost by the SDK's limit.",
                "faults/test_calls.py::test_of_2000_targets_each_is_measured_and_the_series_are_bounded",
                [
                    Removal(
                        "requests/probe.py",
                        "        if len(self._series) >= MAX_TARGETS:\n",
                        "        if False:\n",
                        "the label sets of targets are bounded",
                    )
                ],
                also=["unit/test_targets.py::test_targets_cost_in_proportion_to_their_number"],
            ),
        ],
    )
    yield (
        "The way out",
        [
            Fault(
                "No provider",
                "`instrument()` with the API's stand-ins; real ones are set later.",
                "Calls pass and nothing is read; from the moment there is a provider they are measured.",
                "faults/test_export.py::test_without_a_provider_nothing_is_read_until_there_is_one",
                [
                    Removal(
                        "wiring.py",
                        "        return traced, metered\n",
                        "        return True, True\n",
                        "whether spans and metrics go anywhere is asked first",
                    )
                ],
            ),
            Fault(
                "A provider is shut down",
                "First the one of metrics, then the one of traces, with requests and abandoned streams going on.",
                "Calls take as long as before; spans of abandoned streams end though nothing collects any more; "
                "new providers are served.",
                "faults/test_export.py::test_providers_that_are_shut_down_hold_up_no_call_and_new_ones_are_served",
                drains,
            ),
            Fault(
                "A provider is replaced",
                "Two providers in turn, three times.",
                "The current one has each series once, the other one none.",
                "faults/test_export.py::test_a_provider_that_is_replaced_and_comes_back_has_each_series_once",
                [
                    Removal(
                        "metrics.py",
                        "    known = _registrations.get(provider)\n",
                        "    known = None\n",
                        "a provider that comes back has its instruments already",
                    )
                ],
                also=[
                    "emulated/test_lifecycle.py::test_fifty_cycles_with_two_providers_leave_one_series_each_and_nothing_else"
                ],
            ),
            *(
                Fault(
                    f"The collector {state}",
                    f"{done}, then it is well again. The SDK's real OTLP exporters over HTTP.",
                    "Calls take as long as before, abandoned streams end meanwhile, `uninstrument()` waits for "
                    "nothing; in the end the totals count every request.",
                    "faults/test_export.py::test_a_collector_that_is_unwell_holds_up_no_call_and_later_gets_the_whole_sum",
                    drains,
                )
                for state, done in (
                    ("is down", "It is killed, and nobody listens"),
                    ("is slow", "It takes the request and never answers"),
                    ("refuses", "It answers 503"),
                    ("sends garbage", "It answers with bytes that are no HTTP"),
                )
            ),
        ],
    )
    yield (
        "The machine",
        [
            Fault(
                "Disk full",
                "The dump of an out of memory error on a tmpfs of 16 KiB (where none may be mounted, under a "
                "limit on the size of files).",
                "The user's exception is torch's own; the evidence is told without a dump, nothing is left on "
                "the disk, one line says why.",
                "faults/test_host.py::test_a_full_disk_costs_the_dump_and_leaves_nothing_behind",
                [
                    Removal(
                        "allocator/dump.py",
                        "            os.unlink(partial, dir_fd=directory)\n",
                        "",
                        "half a file is taken away",
                    )
                ],
                also=["unit/test_oom_dump.py::test_a_full_disk_leaves_nothing_behind"],
            ),
            Fault(
                "A clock that jumps",
                "The wall clock goes back and forth by hours and years, within requests too.",
                "Results as ever; no duration, age or budget notices, for they are monotonic. A span's own "
                "times are the wall clock's, as every span's are.",
                "faults/test_host.py::test_a_wall_clock_that_jumps_changes_no_duration_and_no_age",
                [
                    Removal(
                        "requests/probe.py",
                        "from time import monotonic, sleep, time_ns\n",
                        "from time import sleep, time as monotonic, time_ns\n",
                        "durations are of a monotonic clock",
                    )
                ],
            ),
            Fault(
                "The interpreter ends",
                "With streams open, a call that hangs and one busy in threads; plainly, uninstrumented just "
                "before, or by Ctrl-C.",
                "It ends, with the code it would have, and no traceback of ours; what was recorded is exported.",
                "faults/test_host.py::test_the_interpreter_ends_with_work_in_flight_and_tells_what_was_done",
                [
                    Removal(
                        "requests/probe.py",
                        'name="torchmem-streams", daemon=True',
                        'name="torchmem-streams", daemon=False',
                        "who waits for the last streams does not keep the process",
                    )
                ],
            ),
            Fault(
                "Signals",
                "A handler that makes requests, a thousand times a second, in the middle of requests.",
                "Every result is right and nobody hangs; each request is told.",
                "faults/test_host.py::test_a_signal_handler_may_make_requests_in_the_middle_of_one",
                [
                    Removal(
                        "requests/probe.py",
                        "        if thread in telling:  # a signal",
                        "        if False:  # a signal",
                        "who interrupts the SDK on the same thread waits for it to end",
                    ),
                    Removal(
                        "requests/probe.py",
                        "not self.measured or thread in telling:",
                        "not self.measured:",
                        "likewise where a call left nothing new",
                    ),
                ],
            ),
            Fault(
                "A signal handler raises",
                "`SIGALRM` in the middle of the readings before and after a call, its handler raises.",
                "The user gets the exception; nothing stays open, and the next call is measured as ever.",
                "faults/test_host.py::test_what_a_signal_handler_raises_within_a_measurement_reaches_the_user",
                [
                    Removal(
                        "requests/probe.py",
                        "        if is_a_signal_handlers(error):\n            raise error\n",
                        "",
                        "what a handler raised is told from a fault of ours",
                    )
                ],
            ),
            Fault(
                "A signal handler raises while an error is examined",
                "`SIGALRM` while the evidence of an out of memory error is taken, its handler raises.",
                "The user gets the handler's exception, in the place of torch's, which is counted; calls go on, and "
                "the next error is the user's own.",
                "faults/test_host.py::test_what_a_signal_handler_raises_while_an_error_is_examined_reaches_the_user",
                [
                    Removal(
                        "oom.py",
                        "        if is_a_signal_handlers(error):\n            raise error\n",
                        "",
                        "what a handler raised is told from a part that failed",
                    )
                ],
            ),
            Fault(
                "No memory on the host",
                "The address space is used up to the last kilobytes when the device runs out of memory.",
                "The user's exception is torch's own and calls go on; the evidence is told as far as it could "
                "be taken, and a line says that it is incomplete.",
                "faults/test_host.py::test_without_memory_on_the_host_telemetry_is_lost_before_any_call",
                [
                    guard(
                        "oom.py",
                        "            return part(*arguments)\n        ",
                        " as error:\n",
                        "a part of the evidence that raises is absent from it",
                    )
                ],
            ),
        ],
    )
    yield (
        "What nobody may see or reach",
        [
            Fault(
                "Secrets",
                "Prompts, answers, tensor values, tokens and the environment's secrets planted, then looked for "
                "in every byte of metrics, spans, logs, dump and standard error.",
                "None is there. (An exception's message goes onto the span that it ended, as with every "
                "OpenTelemetry span: keep prompts out of exceptions.)",
                "faults/test_security.py::test_no_prompt_value_token_or_secret_is_in_anything_that_is_exported_or_written",
                [
                    Removal(
                        "requests/shapes.py",
                        "            found += value.shape, value.dtype\n",
                        "            found += tuple([*value.shape, *value.flatten().tolist()]), value.dtype\n",
                        "of a tensor its shape is told",
                    )
                ],
            ),
            Fault(
                "Dumps",
                "The same run with `oom_dump_dir`.",
                "The file is its owner's alone (0600), the directory that was made for it too (0700).",
                "faults/test_security.py::test_no_prompt_value_token_or_secret_is_in_anything_that_is_exported_or_written",
                [
                    Removal(
                        "allocator/dump.py",
                        "os.open(partial, _NEW_FILE, 0o600, dir_fd=directory)",
                        "os.open(partial, _NEW_FILE, 0o644, dir_fd=directory)",
                        "the mode is set as the file is made",
                    )
                ],
                also=["unit/test_oom_dump.py::test_a_dump_is_a_pickle_that_its_owner_alone_may_read"],
            ),
            Fault(
                "Listeners",
                "The sockets and children of an instrumented process.",
                "There are none of ours without `live_snapshots`: `torchmem top`, and an exporter that the user "
                "sets, are the ones that open any.",
                "faults/test_security.py::test_an_instrumented_process_listens_on_nothing_and_starts_nothing",
                [
                    Removal(
                        "wiring.py",
                        "        _live.add(self)\n",
                        "        _live.add(self)\n"
                        '        self.listener = __import__("socket").create_server(("127.0.0.1", 0))\n',
                        "no line opens one (tried with one added)",
                    )
                ],
            ),
            Fault(
                "Another user asks",
                "A process with `live_snapshots` is asked for its snapshot by another user.",
                "They are told no; the process's own user and root get it.",
                "e2e/test_snapshot_live.py::test_a_process_that_gives_none_says_why",
                [
                    Removal(
                        "snapshot_server.py",
                        "        if user not in (0, os.geteuid()):\n",
                        "        if user == -1:\n",
                        "who asks is known from the kernel",
                    )
                ],
            ),
            Fault(
                "Who asks and does not listen",
                "Some ask such a process for its snapshot and go, one asks and never reads, and then comes "
                "`uninstrument()`.",
                "The server goes on meanwhile; the socket and its thread end with `uninstrument()`.",
                "e2e/test_snapshot_live.py::test_who_asks_badly_holds_up_nobody",
                [
                    Removal(
                        "snapshot_server.py",
                        "                listener.shutdown(socket.SHUT_RDWR)\n",
                        "                pass\n",
                        "the thread that waits is woken as the socket is closed",
                    )
                ],
            ),
        ],
    )


GROUPS = tuple(_faults())
FAULTS = tuple(fault for _, faults in GROUPS for fault in faults)


HEAD = """\
<!-- Written by `python tests/faults/faults.py` from the table of faults. -->
# Reliability

What this package promises to the server that it is a guest in, fault by fault. Each row has a test with real
processes, PyTorch's real allocator and the SDK's real exporters (`make faults`); it asserts on the user's side (their
result, their exception, their latency as a ratio) and on the telemetry's. The last column names what protects the
promise: taken out, the test fails (`make proof` takes each out of a copy and looks).
"""

TAIL = """
## The soak

`make soak` (`SOAK_SECONDS=600`, `SOAK_SEED=` repeats one) is all of it at once: the example server at its top rate on
the emulated GPU, its guard on, everything exported over OTLP, while the live server is uninstrumented and instrumented
again, the collector refuses, hangs, talks nonsense, is gone and comes back, clients leave in the middle of streams,
coroutines are cancelled and far too much memory is asked for, each at random times. In the end

- **nothing has grown**: resident memory, threads, descriptors, series and objects, second quarter against last, within
  bounds that a leak of each kind is shown to break;
- **no request is lost**: each has its answer, or the error for want of memory that its call has met;
- **all accounts agree, call by call**: the clients', the server's own, torch's and the telemetry's. A call that began
  while instrumented has its one span at the collector, and its one measurement in the histograms unless it ended after
  its `uninstrument()`. Told of it is what came before the last export of its series: an application that wants the rest
  flushes its meter provider before it calls `uninstrument()`, for then the series vanish. The allocator's counters are
  torch's own to the last byte.

`make test` runs 45 seconds of it with a fixed seed (`tests/soak/test_soak.py`).

## What is not promised

- **An exception that a signal handler raises** (a `SIGALRM` timeout, Celery's soft time limit) at the wrong one of the
  few microseconds that a measurement adds to a call: what is raised within a finalizer Python drops, what is raised
  within an export the SDK keeps, and now and then a request is counted as active for good.
- **The SDK's own locks**: a reader that a fork caught in the middle of a collection never exports again in the child.
- **The last interval of a process that a signal ends** (uvicorn's workers end so): the SDK exports at exit, and there is
  none. Shorten the interval, or flush in the application's shutdown.
- **Spans while no collector takes them** are kept as far as the SDK's queue goes, then dropped. Metrics are totals: the
  next export tells all of them.
"""


def document() -> str:
    """docs/RELIABILITY.md."""
    parts = [HEAD]
    for title, faults in GROUPS:
        parts.append(
            f"\n## {title}\n\n| fault | what is promised | test | fails without |\n|---|---|---|---|\n"
        )
        for fault in faults:
            tests = "<br>".join(f"`tests/{test}`" for test in (fault.test, *fault.also))
            protections = "; ".join(f"`{removal.file}`: {removal.does}" for removal in fault.without)
            parts.append(f"| **{fault.name}.** {fault.done} | {fault.promised} | {tests} | {protections} |\n")
    return "".join([*parts, TAIL])


if __name__ == "__main__":
    DOCUMENT.write_text(document())
