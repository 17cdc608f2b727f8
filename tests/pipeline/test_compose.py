# SPDX-License-Identifier: Apache-2.0
"""compose.yaml, by compose's own loader: it runs the files and commands that the other tests run.

There is no container engine here: that the images start is not shown, and of Grafana, Tempo and Loki nothing
is but the structure of their files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from .checkers import compose
from .parts import COMMANDS, collector_release
from .servers import CONFIG, alertmanager, collector, jaeger, prometheus

FILE = CONFIG / "compose.yaml"
SHELL_LESS = {"otelcol", "tempo", "jaeger", "loki"}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return compose(FILE)["services"]


def mounted(service: dict[str, Any]) -> dict[str, Path]:
    """Place in the container -> file or folder of this repository."""
    return {
        each["target"]: Path(each["source"]) for each in service.get("volumes", []) if each["type"] == "bind"
    }


def on_this_machine(service: dict[str, Any]) -> list[str]:
    """Its command with the repository's own paths for those in the container."""
    command = list(service["command"])
    for target, source in mounted(service).items():
        command = [part.replace(target, str(source)) for part in command]
    return command


def names_of_flags(argv: list[str]) -> set[str]:
    """`--flag=value`; where a flag takes a set of values they are part of its name."""
    return {part if "feature" in part else part.partition("=")[0] for part in argv if part.startswith("--")}


def test_a_mistake_in_the_file_is_the_loaders_to_tell(tmp_path):
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("healthcheck:", "healthchek:"))
    with pytest.raises(ValueError, match="healthchek"):
        compose(wrong)


def test_every_image_is_pinned_to_a_release(services):
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_the_images_are_of_the_releases_that_are_tested(services):
    assert services["otelcol"]["image"].endswith(f":{collector_release()}")
    # Prometheus 3.16.0 is its Go module's 0.316.0.
    _, minor, patch = COMMANDS["prometheus"].version.split(".")
    assert services["prometheus"]["image"].endswith(f":v{minor[0]}.{int(minor[1:])}.{patch}")
    assert services["alertmanager"]["image"].endswith(f":{COMMANDS['alertmanager'].version}")
    # Jaeger 2.13.0 was tagged with 1.76.0; later releases have the one number.
    assert (services["jaeger"]["image"].rpartition(":")[2], COMMANDS["jaeger"].version) == (
        "2.13.0",
        "v1.76.0",
    )


def test_every_service_has_a_health_check_of_its_own_or_a_neighbour_that_has_one_for_it(services):
    for name, service in services.items():
        checked = services[f"{name}-ready"] if name in SHELL_LESS else service
        assert checked["healthcheck"]["test"][0] == "CMD", name


def test_a_health_check_asks_where_the_configuration_listens(services):
    asked = {
        name: service["healthcheck"]["test"][-1]
        for name, service in services.items()
        if "healthcheck" in service
    }
    health = yaml.safe_load((CONFIG / "otel-collector.yaml").read_text())["extensions"]["healthcheckv2"][
        "http"
    ]
    assert health["endpoint"].endswith(":-127.0.0.1:13133}")
    assert asked["otelcol-ready"] == f"http://127.0.0.1:13133{health['status']['path']}"
    own = yaml.safe_load((CONFIG / "jaeger.yaml").read_text())["extensions"]["healthcheckv2"]["http"]
    assert own["endpoint"].endswith(":-127.0.0.1:23133}")
    assert asked["jaeger-ready"] == f"http://127.0.0.1:23133{own['status']['path']}"
    for name in ("tempo", "loki"):
        server = yaml.safe_load((CONFIG / f"{name}.yaml").read_text())["server"]
        assert asked[f"{name}-ready"] == f"http://127.0.0.1:{server['http_listen_port']}/ready"


def test_only_this_machine_reaches_what_is_published(services):
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["published"] for port in published} == {"4317", "4318", "3000", "9090", "9093", "16686"}
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_everything_that_is_mounted_is_in_the_repository_and_cannot_be_written(services):
    for name, service in services.items():
        for each in service.get("volumes", []):
            if each["type"] == "bind":
                assert Path(each["source"]).exists(), f"{name}: {each['source']}"
                assert Path(each["source"]).is_relative_to(CONFIG)
                assert each["read_only"], f"{name}: {each['source']}"


@pytest.mark.parametrize("path", ["push", "scrape"])
def test_the_collectors_command_is_the_one_that_the_tests_run(path, tmp_path):
    service = compose(FILE, {"METRICS": path})["services"]["otelcol"]
    run = collector(tmp_path, ["otel-collector.yaml", f"metrics-{path}.yaml", "logs-otlp.yaml"]).argv[1:]
    joined = [
        f"--config={value}" for flag, value in zip(run[::2], run[1::2], strict=True) if flag == "--config"
    ]
    assert on_this_machine(service) == joined


@pytest.mark.parametrize("path", ["push", "scrape"])
def test_prometheus_is_run_on_the_same_file_with_the_same_flags(path, tmp_path):
    service = compose(FILE, {"METRICS": path})["services"]["prometheus"]
    command = on_this_machine(service)
    assert command[0] == f"--config.file={CONFIG / 'prometheus' / f'prometheus-{path}.yaml'}"
    run = prometheus(tmp_path, f"prometheus-{path}.yaml").argv
    # How long it keeps things is the only other one.
    assert names_of_flags(command) == names_of_flags(run) | {"--storage.tsdb.retention.time"}
    # rule_files are relative to the file.
    assert mounted(service)["/etc/prometheus/rules"] == CONFIG / "prometheus" / "rules"


def test_alertmanager_and_jaeger_are_run_on_the_same_files_with_the_same_flags(services, tmp_path):
    command = on_this_machine(services["alertmanager"])
    assert command[0] == f"--config.file={CONFIG / 'prometheus' / 'alertmanager.yaml'}"
    assert names_of_flags(command) == names_of_flags(alertmanager(tmp_path).argv)
    assert on_this_machine(services["jaeger"]) == ["=".join(jaeger(tmp_path).argv[1:])]


@pytest.mark.parametrize("path", ["push", "scrape"])
def test_the_collector_starts_on_its_service_s_files_and_environment(path, tmp_path):
    """Its addresses apart, which are the harness's."""
    service = compose(FILE, {"METRICS": path})["services"]["otelcol"]
    files = [Path(part.removeprefix("--config=")) for part in on_this_machine(service)]
    given = {key: value for key, value in service["environment"].items() if not key.endswith("_LISTEN")}
    with collector(tmp_path, files, environment=given) as otelcol:
        assert otelcol.running


def test_what_is_set_by_environment_is_a_variable_of_the_configuration(services):
    for name, files in {
        "otelcol": ["otel-collector.yaml", "metrics-push.yaml", "metrics-scrape.yaml", "logs-otlp.yaml"],
        "jaeger": ["jaeger.yaml"],
        "grafana": ["grafana/provisioning/datasources/torchmem.yaml"],
    }.items():
        read = "".join((CONFIG / file).read_text() for file in files)
        known = set(re.findall(r"\$\{env:(\w+)|(?<!\$)\$([A-Z]\w+)", read))
        flat = {each for pair in known for each in pair if each}
        given = {key for key in services[name]["environment"] if not key.startswith("GF_")}
        assert given <= flat, name
        if name == "grafana":
            assert given == flat, "a data source without an address"


def test_grafana_finds_the_boards_where_its_provisioning_says(services):
    provider = yaml.safe_load(
        (CONFIG / "grafana" / "provisioning" / "dashboards" / "torchmem.yaml").read_text()
    )
    folder = provider["providers"][0]["options"]["path"]
    assert mounted(services["grafana"])[folder] == CONFIG / "grafana" / "dashboards"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (CONFIG / "grafana" / "dashboards" / home.removeprefix(f"{folder}/")).is_file()


def test_addresses_in_the_shared_network_fit_together(services):
    """Each client's default is where its server listens, and no two listen on one port."""
    assert {
        name for name, service in services.items() if service.get("network_mode") != "service:network"
    } == {"network"}
    tempo = yaml.safe_load((CONFIG / "tempo.yaml").read_text())
    loki = yaml.safe_load((CONFIG / "loki.yaml").read_text())
    traces = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert services["otelcol"]["environment"]["TRACES_ENDPOINT"] == traces
    grafana = services["grafana"]["environment"]
    assert grafana["TEMPO_URL"].endswith(f":{tempo['server']['http_listen_port']}")
    assert grafana["LOKI_URL"].endswith(f":{loki['server']['http_listen_port']}")
    assert f":-{grafana['LOKI_URL']}/otlp}}" in (CONFIG / "logs-otlp.yaml").read_text()
    listening = [
        4317, 4318, 8888, 8889, 13133,  # the collector
        9090, 9093, 3000,
        int(traces.rpartition(":")[2]), tempo["server"]["http_listen_port"],
        tempo["server"]["grpc_listen_port"],
        loki["server"]["http_listen_port"], loki["server"]["grpc_listen_port"],
        16686, 16685, 23133, int(services["jaeger"]["environment"]["JAEGER_OTLP_LISTEN"].rpartition(":")[2]),
        9095,  # the webhook that alertmanager.yaml names
    ]  # fmt: skip
    assert len(set(listening)) == len(listening)


def test_tempo_and_loki_keep_their_data_on_volumes(services):
    tempo = yaml.safe_load((CONFIG / "tempo.yaml").read_text())["storage"]["trace"]
    loki = yaml.safe_load((CONFIG / "loki.yaml").read_text())
    places = {
        name: [each["target"] for each in services[name]["volumes"] if each["type"] == "volume"]
        for name in ("tempo", "loki")
    }
    for path in (tempo["wal"]["path"], tempo["local"]["path"]):
        assert path.startswith(places["tempo"][0])
    for path in (loki["common"]["path_prefix"], loki["compactor"]["working_directory"]):
        assert path.startswith(places["loki"][0])
