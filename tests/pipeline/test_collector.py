# SPDX-License-Identifier: Apache-2.0
"""Every file of the collector's, loaded by the real collector, does what its comments say."""

from __future__ import annotations

import gzip
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from opentelemetry_instrumentation_torchmem import signals
from pipeline.parts import part
from pipeline.sender import Sender
from pipeline.servers import (
    CONFIG,
    CannotStart,
    Collector,
    Prometheus,
    Server,
    collector,
    free_ports,
    jaeger,
    prometheus,
    until,
)

BASE = "otel-collector.yaml"
SETS = (
    (BASE, "metrics-scrape.yaml"),
    (BASE, "metrics-push.yaml"),
    (BASE, "metrics-remote-write.yaml"),
    (BASE, "agent.yaml"),
    (BASE, "agent.yaml", "agent-token.yaml"),
    (BASE, "agent.yaml", "agent-token.yaml", "bearer-token.yaml"),
    (BASE, "metrics-scrape.yaml", "logs-otlp.yaml"),
    (BASE, "metrics-scrape.yaml", "tls.yaml"),
    (BASE, "metrics-scrape.yaml", "tls.yaml", "bearer-token.yaml"),
    (BASE, "metrics-push.yaml", "gateway.yaml"),
    (BASE, "metrics-push.yaml", "gateway.yaml", "logs-otlp.yaml", "tls.yaml", "bearer-token.yaml"),
)


def collectors() -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of the files that are the collector's: beside them lie other servers'."""
    for file in sorted(CONFIG.glob("*.yaml")):
        loaded = yaml.safe_load(file.read_text())
        parts = {"extensions", "receivers", "processors", "exporters", "service"}
        if set(loaded) <= parts and "jaeger_storage" not in loaded.get("extensions", {}):
            yield file.name, loaded


def of(files: tuple[str, ...]) -> str:
    return "+".join(Path(each).stem for each in files)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate of 127.0.0.1 and a token, as the environment that the files name them in."""
    folder = tmp_path_factory.mktemp("secrets")
    certificate, key, token = (folder / name for name in ("tls.crt", "tls.key", "token"))
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=collector",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    token.write_text("of-the-test")
    return {"TLS_CERT_FILE": str(certificate), "TLS_KEY_FILE": str(key), "TOKEN_FILE": str(token)}


def test_each_file_of_the_collectors_is_in_a_set_that_is_loaded_here() -> None:
    assert {name for name, _ in collectors()} == {each for files in SETS for each in files}


@pytest.mark.parametrize("files", SETS, ids=of)
def test_a_set_of_files_is_valid_and_runs_and_warns_of_nothing(
    files: tuple[str, ...], tmp_path: Path, secrets: dict[str, str]
) -> None:
    arguments = [argument for each in files for argument in ("--config", str(CONFIG / each))]
    subprocess.run([part("otelcol"), "validate", *arguments], check=True, timeout=60)
    with collector(tmp_path, files, environment=secrets) as otelcol:
        assert otelcol.running
    warnings = [
        line for line in otelcol.log.splitlines() if "\twarn\t" in line and "connection refused" not in line
    ]
    assert warnings == []


def test_the_files_that_say_what_they_listen_on_say_loopback(tmp_path: Path, secrets: dict[str, str]) -> None:
    with collector(tmp_path, SETS[0]) as otelcol, jaeger(tmp_path) as traces:
        for server in (otelcol, traces):
            assert set(listening(server)) == {"127.0.0.1"}
    # ... and so where the environment names nothing
    for name in ("otel-collector.yaml", "metrics-scrape.yaml", "jaeger.yaml"):
        addresses = [part for part in (CONFIG / name).read_text().split() if "LISTEN:-" in part]
        assert addresses
        assert all("LISTEN:-127.0.0.1:" in part for part in addresses)


def listening(server: Server) -> list[str]:
    connections = psutil.Process(server.pid).net_connections(kind="inet")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


def test_without_a_way_for_metrics_the_collector_does_not_start_rather_than_drop_them(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="service::pipelines::metrics: must have at least one exporter"):
        collector(tmp_path, [BASE]).start()


def test_metrics_expire_after_three_of_the_sdk_export_intervals() -> None:
    exporter = yaml.safe_load((CONFIG / "metrics-scrape.yaml").read_text())["exporters"]["prometheus"]
    assert exporter["metric_expiration"] == "${env:METRIC_EXPIRATION_SECONDS:-180}.s"


def test_each_queue_is_on_disk_in_order_and_never_gives_up() -> None:
    queues = []
    for file, loaded in collectors():
        for name, exporter in loaded.get("exporters", {}).items():
            if name.startswith("otlp") and file not in ("gateway.yaml", "agent-token.yaml"):  # additions
                queues.append(name)
                queue, retry = exporter["sending_queue"], exporter["retry_on_failure"]
                assert (queue["storage"], queue["num_consumers"]) == ("file_storage", 1), (file, name)
                assert retry["max_elapsed_time"] == "0s", (file, name)
    assert len(queues) == 4


def test_each_variable_of_the_files_is_in_the_readme_with_its_default() -> None:
    readme = (CONFIG / "README.md").read_text()
    variables = {}
    for name, _ in [*collectors(), ("jaeger.yaml", {})]:
        variables |= dict(re.findall(r"\$\{env:([A-Z_]+):-([^}]*)\}", (CONFIG / name).read_text()))
    assert len(variables) > 25
    assert [each for each in variables if f"`{each}`" not in readme] == []
    for variable in (
        "OTLP_GRPC_LISTEN",
        "DECISION_WAIT_SECONDS",
        "TRACES_ENDPOINT",
        "REMOTE_WRITE_URL",
        "METRIC_EXPIRATION_SECONDS",
    ):
        default = {**variables, "OTLP_GRPC_LISTEN": "127.0.0.1:4317"}[variable]
        assert f"`{default}`" in next(line for line in readme.splitlines() if f"| `{variable}`" in line)


def test_what_sampling_calls_growth_is_a_boundary_of_the_buckets() -> None:
    kept = re.search(r"KEPT_GROWTH_BYTES:-(\d+)", (CONFIG / BASE).read_text())
    assert kept is not None
    assert float(kept[1]) in (signals.REQUEST_RESERVED_GROWTH.boundaries or ())


# ----------------------------------------------------------------------------------------------- who may send


def test_with_tls_a_sender_that_trusts_the_certificate_is_heard_and_one_without_tls_is_not(
    tmp_path: Path, secrets: dict[str, str]
) -> None:
    with collector(tmp_path, [BASE, "metrics-scrape.yaml", "tls.yaml"], environment=secrets) as otelcol:
        trusting = Sender(otelcol.grpc, authority=Path(secrets["TLS_CERT_FILE"]))
        plain = Sender(otelcol.grpc, timeout_s=1)
        for sender in (trusting, plain):
            sender.meter.create_counter("some.counter").add(1)
        assert trusting.send_metrics()
        assert not plain.send_metrics()


def test_with_a_client_authority_a_sender_must_show_a_certificate(
    tmp_path: Path, secrets: dict[str, str]
) -> None:
    environment = {**secrets, "TLS_CLIENT_CA_FILE": secrets["TLS_CERT_FILE"]}
    with collector(tmp_path, [BASE, "metrics-scrape.yaml", "tls.yaml"], environment=environment) as otelcol:
        without = Sender(otelcol.grpc, authority=Path(secrets["TLS_CERT_FILE"]), timeout_s=1)
        without.meter.create_counter("some.counter").add(1)
        assert not without.send_metrics()


def test_with_a_token_only_senders_that_show_it_are_heard(tmp_path: Path, secrets: dict[str, str]) -> None:
    files = [BASE, "metrics-scrape.yaml", "tls.yaml", "bearer-token.yaml"]
    with collector(tmp_path, files, environment=secrets) as otelcol:
        heard = {}
        for token in ("of-the-test", "of-another", None):
            sender = Sender(otelcol.grpc, authority=Path(secrets["TLS_CERT_FILE"]), token=token, timeout_s=1)
            sender.meter.create_counter("some.counter").add(1)
            heard[token] = sender.send_metrics(), sender.send_span("a") is not None, sender.send_log("a")
    assert heard == {"of-the-test": (True,) * 3, "of-another": (False,) * 3, None: (False,) * 3}


def test_above_its_memory_limit_the_collector_refuses_and_the_sender_keeps_what_it_has(
    tmp_path: Path,
) -> None:
    limits = {"MEMORY_LIMIT_MIB": "2", "MEMORY_SPIKE_MIB": "1"}
    with collector(tmp_path, SETS[0], environment=limits) as otelcol:
        sender = Sender(otelcol.grpc, timeout_s=1)
        counter = sender.meter.create_counter("some.counter")
        counter.add(1)
        until(lambda: not sender.send_metrics(), 20, "a refusal")


# ---------------------------------------------------------------------------------------------- where it goes


@pytest.fixture(scope="module")
def receiving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that takes what is pushed to it, by OTLP and by remote write."""
    folder = tmp_path_factory.mktemp("receiving")
    with prometheus(
        folder,
        "prometheus-push.yaml",
        arguments=["--web.enable-remote-write-receiver"],
        change={"rule_files": []},
    ) as server:
        yield server


def test_by_remote_write_metrics_arrive_under_the_same_names_and_labels(
    tmp_path: Path, receiving: Prometheus
) -> None:
    environment = {"REMOTE_WRITE_URL": f"{receiving.url}/api/v1/write"}
    with collector(tmp_path, SETS[2], environment=environment) as otelcol:
        resource = {"service.namespace": "test", "k8s.pod.name": "pod-0"}
        sender = Sender(otelcol.grpc, "by-remote-write", resource=resource)
        sender.meter.create_counter("torch.memory.turnover", "By").add(7, {"torch.device": "cuda:0"})
        assert sender.send_metrics()
        labels = f'job="test/by-remote-write",instance="{sender.instance}"'
        series = f'torch_memory_turnover_bytes_total{{{labels},torch_device="cuda:0"}}'
        assert until(lambda: receiving.value(series), 20, "the counter") == 7
        until(lambda: receiving.value(f'target_info{{{labels},k8s_pod_name="pod-0"}}'), 20, "the resource")


def test_a_clock_that_is_wrong_costs_what_the_readme_says(tmp_path: Path, receiving: Prometheus) -> None:
    environment = {"PROMETHEUS_OTLP_URL": f"{receiving.url}/api/v1/otlp/v1/metrics"}
    with collector(tmp_path, [BASE, "metrics-push.yaml"], environment=environment) as otelcol:
        series = "torch_memory_turnover_bytes_total"

        def send(name: str, clock_s: float) -> None:
            sender = Sender(otelcol.grpc, name)
            sender.meter.create_counter("torch.memory.turnover", "By").add(7)
            assert sender.send_metrics(clock_s)

        send("before", 0)  # or there would be nothing that the others are behind of
        until(lambda: receiving.query(f'{series}{{job="before"}}'), 20, "the first")
        clocks = {"ahead": 7200, "behind": -400, "far-behind": -7200, "two-days-behind": -172800, "right": 0}
        for name, clock_s in clocks.items():
            send(name, clock_s)
        skewed = f'{series}{{job=~"{"|".join(clocks)}"}}'

        def services(question: str, at: float) -> set[str]:
            return {each["metric"]["job"] for each in receiving.query(question, time=at)}

        # All in one request, which none of them spoils.
        now = time.time()
        stored = {"behind", "far-behind", "right"}
        until(lambda: services(f"{skewed}[72h]", now + 1) == stored, 20, "what is stored")
        assert "Dropping data" not in otelcol.log
        with urllib.request.urlopen(f"http://{otelcol.own}/metrics") as page:
            own = page.read().decode()
    assert re.search(r"^otelcol_processor_filter_datapoints_filtered\S* 2$", own, re.MULTILINE)
    assert services(skewed, now + 1) == {"right"}
    assert services(skewed, now + 7200) == set()
    assert services(skewed, now - 390) == {"behind"}


@pytest.mark.parametrize(
    ("way", "variable", "url"),
    [
        ("metrics-remote-write.yaml", "REMOTE_WRITE_URL", "/api/v1/write"),
        ("metrics-push.yaml", "PROMETHEUS_OTLP_URL", "/api/v1/otlp/v1/metrics"),
    ],
)
def test_a_prometheus_without_its_receiver_answers_404_and_the_readme_names_the_flag(
    tmp_path: Path, way: str, variable: str, url: str
) -> None:
    flag = "--web.enable-remote-write-receiver" if "write" in way else "--web.enable-otlp-receiver"
    server = prometheus(tmp_path, "prometheus-push.yaml", change={"rule_files": []})
    server.argv = [each for each in server.argv if each != flag]
    environment = {variable: f"{server.url}{url}"}
    with server, collector(tmp_path, [BASE, way], environment=environment) as otelcol:
        sender = Sender(otelcol.grpc)
        sender.meter.create_counter("torch.memory.turnover", "By").add(7)
        assert sender.send_metrics()
        until(lambda: "404" in otelcol.log, 20, "what Prometheus says")
        assert flag in (CONFIG / "README.md").read_text()


def test_an_agent_hands_metrics_traces_and_logs_to_a_gateway_which_samples(
    tmp_path: Path, receiving: Prometheus
) -> None:
    with jaeger(tmp_path) as traces:
        environment = {
            "TRACES_ENDPOINT": traces.grpc,
            "PROMETHEUS_OTLP_URL": f"{receiving.url}/api/v1/otlp/v1/metrics",
            "DECISION_WAIT_SECONDS": "2",
            "KEPT_SHARE_PERCENT": "0",
        }
        files = [BASE, "metrics-push.yaml", "gateway.yaml"]
        with (
            collector(tmp_path, files, name="gateway", environment=environment) as gateway,
            collector(
                tmp_path, [BASE, "agent.yaml"], name="agent", environment={"GATEWAY_ENDPOINT": gateway.grpc}
            ) as agent,
        ):
            sender = Sender(agent.grpc, "behind-an-agent", delta=True)
            counter = sender.meter.create_counter("torch.memory.turnover", "By")
            for _ in range(3):  # the gateway adds up what came as deltas
                counter.add(5)
                assert sender.send_metrics()
            kept = sender.send_span("generate", torch__memory__allocation__retries=1)
            dropped = sender.send_span("generate", torch__memory__allocation__retries=0)
            assert kept
            assert dropped
            assert sender.send_log("the log of a process")
            total = 'torch_memory_turnover_bytes_total{job="behind-an-agent"}'
            until(lambda: receiving.value(total) == 15, 20, "the total of three deltas")
            until(lambda: traces.trace(kept), 20, "the trace that retried")
            until(
                lambda: (
                    gateway.logs_file.exists() and "the log of a process" in gateway.logs_file.read_text()
                ),
                20,
                "the log",
            )
            assert traces.trace(dropped) == []


def test_an_agent_reaches_a_gateway_that_wants_tls_a_token_and_a_certificate_and_none_without_its_token(
    tmp_path: Path, secrets: dict[str, str]
) -> None:
    certificate = secrets["TLS_CERT_FILE"]
    another = tmp_path / "another-token"
    another.write_text("of-another")
    closed = {**secrets, "TLS_CLIENT_CA_FILE": certificate}
    files = [BASE, "metrics-scrape.yaml", "gateway.yaml", "tls.yaml", "bearer-token.yaml"]
    with collector(tmp_path, files, name="gateway", environment=closed) as gateway:
        way = {
            "GATEWAY_ENDPOINT": gateway.grpc,
            "GATEWAY_CA_FILE": certificate,
            "GATEWAY_CERT_FILE": certificate,
            "GATEWAY_KEY_FILE": secrets["TLS_KEY_FILE"],
        }
        for name, token in (("stranger", str(another)), ("agent", secrets["TOKEN_FILE"])):
            environment = {**way, "TOKEN_FILE": token}
            files = [BASE, "agent.yaml", "agent-token.yaml"]
            with collector(tmp_path, files, name=name, environment=environment) as agent:
                sender = Sender(agent.grpc, name)
                assert sender.send_log(f"said by the {name}")
                if name == "stranger":
                    until(lambda agent=agent: "Unauthenticated" in agent.log, 20, "a refusal of its token")
                else:
                    until(lambda: "said by the agent" in written(gateway), 20, "the log at the gateway")
        assert "said by the stranger" not in written(gateway)


def written(otelcol: Collector) -> str:
    return otelcol.logs_file.read_text() if otelcol.logs_file.exists() else ""


def test_tail_sampling_judges_by_each_of_its_signs_and_remembers_what_it_judged(tmp_path: Path) -> None:
    with jaeger(tmp_path) as traces:
        environment = {
            "TRACES_ENDPOINT": traces.grpc,
            "DECISION_WAIT_SECONDS": "2",
            "KEPT_SHARE_PERCENT": "0",
        }
        with collector(tmp_path, environment=environment) as otelcol:
            sender = Sender(otelcol.grpc, "sampled")
            delta = "torch__memory__reserved__delta"
            kept = {
                "failed": sender.send_span("a", failed=True),
                "retried": sender.send_span("a", torch__memory__allocation__retries=1),
                "ran out": sender.send_span("a", torch__memory__ooms=1),
                "grew": sender.send_span("a", **{delta: 256 * 2**20 + 1}),
            }
            dropped = {
                "as much as is allowed": sender.send_span("a", **{delta: 256 * 2**20}),
                "shrank": sender.send_span("a", **{delta: -(2**30)}),
                "nothing": sender.send_span("a", torch__memory__allocation__retries=0, torch__memory__ooms=0),
                "not ours": sender.send_span("a"),
            }
            until(lambda: all(traces.trace(each) for each in kept.values()), 30, "those to be kept")
            # Spans of both kinds that come after the decision; a bad one does not save what was dropped.
            sender.send_span("late", after=kept["grew"])
            sender.send_span("late", after=dropped["nothing"], failed=True)
            until(lambda: len(traces.trace(kept["grew"])) == 2, 30, "a span that came late")
            marker = sender.send_span("marker", failed=True)
            until(lambda: traces.trace(marker), 30, "what was sent after it")
            assert {name: traces.trace(each) for name, each in dropped.items()} == {
                name: [] for name in dropped
            }


def test_tail_sampling_keeps_its_share_of_the_rest_no_less_and_no_more(tmp_path: Path) -> None:
    share, count = 0.2, 400
    with jaeger(tmp_path) as traces:
        environment = {
            "TRACES_ENDPOINT": traces.grpc,
            "DECISION_WAIT_SECONDS": "2",
            "KEPT_SHARE_PERCENT": f"{100 * share:g}",
        }
        with collector(tmp_path, environment=environment) as otelcol:
            sender = Sender(otelcol.grpc, "shared")
            assert all(sender.send_span("a") for _ in range(count))
            marker = sender.send_span("marker", failed=True)
            until(lambda: traces.trace(marker), 30, "the last")
            time.sleep(2)  # what was judged with it is through the queue
            kept = len(traces.search("shared")) - 1
    # Six standard deviations of a fair draw: once in a billion runs it is further away.
    assert abs(kept - share * count) < 6 * (count * share * (1 - share)) ** 0.5


def test_logs_go_to_a_store_by_otlp_with_their_service(tmp_path: Path) -> None:
    bodies: list[tuple[str, bytes]] = []

    class Store(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            zipped = self.headers.get("content-encoding") == "gzip"
            bodies.append((self.path, gzip.decompress(body) if zipped else body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    port = free_ports(1)[0]
    store = ThreadingHTTPServer(("127.0.0.1", port), Store)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    try:
        environment = {"LOGS_URL": f"http://127.0.0.1:{port}/otlp"}
        with collector(tmp_path, SETS[6], environment=environment) as otelcol:
            sender = Sender(otelcol.grpc, "that-logs")
            assert sender.send_log("out of memory")
            path, body = until(lambda: bodies, 20, "a log in the store")[0]
    finally:
        store.shutdown()
        store.server_close()
    assert path == "/otlp/v1/logs"
    told = ExportLogsServiceRequest.FromString(body).resource_logs[0]
    assert told.scope_logs[0].log_records[0].body.string_value == "out of memory"
    assert "that-logs" in {each.value.string_value for each in told.resource.attributes}
