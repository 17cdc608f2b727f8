# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes objects: core ones by the API's own schemas, strictly; custom ones by their published types.

There is no cluster here. The collector's command, environment and files are run as a process, and so is what
the auto-instrumentation image is made of.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from . import checkers
from .checkers import schema
from .parts import ROOT, CannotBuild, collector_release
from .servers import CONFIG, Collector, collector, free_ports

FOLDER = CONFIG / "kubernetes"
RELEASE = "1.34"
CORE = ("v1", "apps/v1", "networking.k8s.io/v1")
OBJECTS: list[dict[str, Any]] = [
    document
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return copy.deepcopy(found)


def of_kind(*apis: str) -> list[Any]:
    return [
        pytest.param(each, id=f"{each['kind']} {each['metadata']['name']}")
        for each in OBJECTS
        if each["apiVersion"] in apis
    ]


GATEWAY = one("StatefulSet", "torchmem-collector")
(OTELCOL,) = GATEWAY["spec"]["template"]["spec"]["containers"]
SERVER = one("Deployment", "images-and-text")


# ------------------------------------------------------------------------------------------------- the types


@pytest.mark.parametrize("resource", of_kind(*CORE))
def test_a_core_object_is_what_the_api_defines_with_no_key_that_it_does_not(resource: dict[str, Any]):
    kubernetes_validate.validate(resource, RELEASE, strict=True)


def test_a_wrong_key_of_a_core_object_is_found():
    wrong = one("Deployment", "images-and-text")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(wrong, RELEASE, strict=True)


@pytest.mark.parametrize("resource", of_kind("monitoring.coreos.com/v1"))
def test_a_resource_of_the_prometheus_operator_is_what_its_types_define(resource: dict[str, Any]):
    jsonschema.Draft7Validator(schema(resource["kind"])).validate(resource)


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("PrometheusRule", "torchmem", ("groups", 0, "rules", 0, "expresion"), "up"),
        ("PrometheusRule", "torchmem", ("groups", 0, "interval"), "soon"),
        ("ServiceMonitor", "torchmem-collector", ("endpoints", 0, "honourLabels"), True),
        ("ServiceMonitor", "torchmem-collector", ("endpoints", 0, "scheme"), "gopher"),
    ],
)
def test_a_mistake_in_a_resource_of_the_prometheus_operator_is_found(kind, name, path, value):
    wrong = one(kind, name)
    place = wrong["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert not jsonschema.Draft7Validator(schema(kind)).is_valid(wrong)


@pytest.fixture(scope="module")
def against_types() -> Callable[[dict[str, Any]], list[str]]:
    try:
        checkers.types()
    except CannotBuild as error:
        # Node.js is not among what CI promises; the test of its shape runs without it.
        pytest.skip(f"the operator's types are not to be had: {error}")
    return checkers.instrumentation


def test_the_instrumentation_is_what_the_operators_types_define(against_types):
    assert against_types(one("Instrumentation", "torchmem")) == []


def test_the_instrumentation_has_the_shape_that_the_operator_documents():
    spec = one("Instrumentation", "torchmem")["spec"]
    assert set(spec) == {"exporter", "propagators", "sampler", "python"}
    assert set(spec["python"]) == {"image", "env", "resourceRequirements"}
    assert {frozenset(each) for each in spec["python"]["env"]} == {frozenset({"name", "value"})}
    assert all(isinstance(each["value"], str) for each in spec["python"]["env"])


def test_a_mistake_in_the_instrumentation_is_found(against_types):
    wrong = one("Instrumentation", "torchmem")
    wrong["spec"]["python"]["imag"] = "x"
    wrong["spec"]["sampler"]["type"] = "sometimes"
    said = " ".join(against_types(wrong))
    assert "'\"imag\"' does not exist in type 'IPython'" in said
    assert "data/spec/sampler/type must be equal to one of the allowed values" in said


def test_every_object_is_checked_by_one_of_these():
    assert {each["apiVersion"] for each in OBJECTS} == {
        *CORE,
        "monitoring.coreos.com/v1",
        "opentelemetry.io/v1alpha1",
    }


# -------------------------------------------------------------------------------------------- generated ones


def test_the_generated_objects_are_fresh():
    done = subprocess.run(
        [sys.executable, FOLDER / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_prometheus_rule_holds_the_groups_of_the_committed_rule_files():
    files = [
        CONFIG / "prometheus" / "rules" / name for name in ("normalise.yaml", "fleet.yaml", "alerts.yaml")
    ]
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert one("PrometheusRule", "torchmem")["spec"]["groups"] == groups
    assert {file.name for file in files} == {
        file.name for file in (CONFIG / "prometheus" / "rules").glob("*.yaml")
    }


def test_the_service_monitor_keeps_the_labels_that_the_collector_tells():
    first, second = one("ServiceMonitor", "torchmem-collector")["spec"]["endpoints"]
    assert (first["port"], first["honorLabels"]) == ("metrics", True)
    assert (second["port"], second.get("honorLabels")) == ("own", None)


def test_the_config_map_holds_the_collectors_files_as_they_are():
    for name, text in one("ConfigMap", "torchmem-collector")["data"].items():
        assert text == (CONFIG / name).read_text()


def test_kustomize_lists_every_object_but_the_example():
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*listed} == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "server.yaml"}


# ------------------------------------------------------------------------------------ that they fit together


def test_the_service_the_monitor_and_the_policy_find_the_collector():
    labels = GATEWAY["spec"]["template"]["metadata"]["labels"]
    service = one("Service", "torchmem-collector")
    assert service["spec"]["selector"].items() <= labels.items()
    monitor = one("ServiceMonitor", "torchmem-collector")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"]: port for port in service["spec"]["ports"]}
    assert {each["port"] for each in monitor["endpoints"]} <= set(ports)
    of_the_container = {port["name"]: port["containerPort"] for port in OTELCOL["ports"]}
    for port in ports.values():
        assert of_the_container[port["targetPort"]] == port["port"]
    policy = one("NetworkPolicy", "torchmem-collector")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    opened = {each["port"] for rule in policy["ingress"] for each in rule["ports"]}
    assert opened == {port["port"] for port in ports.values()}


def test_the_example_may_send_and_is_instrumented():
    template = SERVER["spec"]["template"]["metadata"]
    allowed = one("NetworkPolicy", "torchmem-collector")["spec"]["ingress"][0]["from"][0]["podSelector"][
        "matchLabels"
    ]
    assert allowed.items() <= template["labels"].items()
    found = one("Instrumentation", "torchmem")["metadata"]
    wanted = template["annotations"]["instrumentation.opentelemetry.io/inject-python"]
    assert wanted == f"{found['namespace']}/{found['name']}"


def test_the_instrumentation_sends_to_the_gateway():
    service = one("Service", "torchmem-collector")["metadata"]
    endpoint = one("Instrumentation", "torchmem")["spec"]["exporter"]["endpoint"]
    assert endpoint == f"http://{service['name']}.{service['namespace']}.svc:4318"


def test_the_pods_attributes_come_from_the_downward_api_before_they_are_named():
    variables = SERVER["spec"]["template"]["spec"]["containers"][0]["env"]
    names = [variable["name"] for variable in variables]
    (attributes,) = [variable for variable in variables if variable["name"] == "OTEL_RESOURCE_ATTRIBUTES"]
    pairs = dict(pair.split("=") for pair in attributes["value"].split(","))
    for needed in re.findall(r"\$\((\w+)\)", attributes["value"]):
        assert names.index(needed) < names.index("OTEL_RESOURCE_ATTRIBUTES")
        assert "fieldRef" in variables[names.index(needed)]["valueFrom"]
    # What prometheus-push.yaml promotes is told here; the cluster's name is not the pod's to tell.
    promoted = yaml.safe_load((CONFIG / "prometheus" / "prometheus-push.yaml").read_text())["otlp"]
    of_the_pod = {name for name in promoted["promote_resource_attributes"] if name.startswith("k8s.")}
    assert of_the_pod - {"k8s.cluster.name"} <= set(pairs)
    assert "service.instance.id" not in pairs, "one for each process is the SDK's to make"


def test_a_server_is_ready_only_when_it_answers_and_holds_what_it_asks_for():
    (container,) = SERVER["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # Memory of the host that is promised and not held ends a server at its busiest.
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_the_gateways_memory_is_more_than_its_limiter_lets_it_use():
    variables = {each["name"]: each["value"] for each in OTELCOL["env"]}
    limit = int(OTELCOL["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert limit >= 1.2 * int(variables["MEMORY_LIMIT_MIB"])
    assert OTELCOL["image"].endswith(f":{collector_release()}")


def test_the_gateway_runs_as_the_stateful_set_says(tmp_path):
    """With its arguments, its environment, and the files of the ConfigMap, on other ports."""
    for name, text in one("ConfigMap", "torchmem-collector")["data"].items():
        (tmp_path / name).write_text(text)
    files = [argument.removeprefix("--config=/etc/otelcol/") for argument in OTELCOL["args"]]
    variables = {each["name"]: each["value"] for each in OTELCOL["env"]}
    kept = {name: value for name, value in variables.items() if name not in ("SCRAPE_LISTEN", "SELF_HOST")}
    read = "".join((tmp_path / file).read_text() for file in files)
    assert {name for name in variables if f"${{env:{name}:-" not in read} == set()
    with collector(tmp_path, [tmp_path / file for file in files], environment=kept) as gateway:
        path = OTELCOL["readinessProbe"]["httpGet"]["path"]
        with urllib.request.urlopen(f"http://{gateway.health}{path}", timeout=5) as answer:
            assert answer.status == 200


# ---------------------------------------------------------------------------- the auto-instrumentation image


def dockerfile() -> str:
    return (FOLDER / "autoinstrumentation.Dockerfile").read_text().replace("\\\n", " ")


def test_what_the_image_copies_is_there():
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(), re.MULTILINE):
        for name in copied.split():
            assert (ROOT / name).exists()


def test_the_instrumentation_names_the_image_that_the_dockerfile_makes():
    (tag,) = re.findall(r"--tag (\S+)", dockerfile())
    assert one("Instrumentation", "torchmem")["spec"]["python"]["image"] == tag


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/autoinstrumentation, made by the Dockerfile's own command with this interpreter."""
    (command,) = re.findall(r"^RUN (pip install .+)$", dockerfile(), re.MULTILINE)
    place = tmp_path_factory.mktemp("image") / "autoinstrumentation"
    argv = command.replace("/autoinstrumentation", str(place)).split()
    subprocess.run(
        [sys.executable, "-m", *argv, "--quiet", "--disable-pip-version-check"],
        cwd=ROOT,
        check=True,
        timeout=280,
    )
    return place


LOADER = Path("opentelemetry", "instrumentation", "auto_instrumentation")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What is installed here, torch and all, but for what the image has to bring."""
    place = tmp_path / "packages"
    place.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_*(opentelemetry|google|protobuf|grpc|wrapt|asgiref)", entry.name):
            (place / entry.name).symlink_to(entry)
    return place


def test_a_server_is_instrumented_by_what_is_in_the_image_alone(injected, packages, tmp_path):
    """As the operator does it: the folder on PYTHONPATH, and the Instrumentation's environment."""
    variables = {
        each["name"]: each["value"] for each in one("Instrumentation", "torchmem")["spec"]["python"]["env"]
    }
    program = tmp_path / "app.py"
    program.write_text(
        "import sys\n"
        "from opentelemetry_instrumentation_torchmem import track\n"
        "assert sys.modules['opentelemetry_instrumentation_torchmem'].__file__.startswith(sys.argv[1])\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "with track('warm-up'): pass\n"
    )
    (port,) = free_ports(1)
    arguments = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_SERVICE_NAME": "bare"}
    folder = tmp_path / "collector"
    with collector(folder, ports={"http": port}) as otelcol:
        done = subprocess.run(
            [f"{sys.base_prefix}/bin/python3", "-s", program, injected],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": ":".join(map(str, (injected / LOADER, injected, packages))),
                **variables,
                **arguments,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        scraped = scrape(otelcol)
    assert re.search(
        r'^torch_memory_request_duration_seconds_count\{.*job="bare".*torch_operation="warm-up".*\} 1',
        scraped,
        re.MULTILINE,
    )


def scrape(otelcol: Collector) -> str:
    with urllib.request.urlopen(f"http://{otelcol.scrape}/metrics", timeout=5) as answer:
        return answer.read().decode()
