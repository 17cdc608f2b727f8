# SPDX-License-Identifier: Apache-2.0
"""Runs the pipeline's servers on the repository's own configuration files, on loopback and free ports.

    with collector(folder, ["otel-collector.yaml", "metrics-scrape.yaml"]) as otelcol:
        with prometheus(folder, "prometheus-scrape.yaml", replace={"127.0.0.1:8889": otelcol.scrape}) as prom:
            prom.value('up')

The collector and Jaeger take addresses from the environment, as any user would give them. Prometheus and
Alertmanager read none: their committed file is loaded, addresses are replaced in it (and intervals, where a
test says so), and the rest runs as it is committed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .parts import ROOT, collector_release, part

CONFIG = ROOT / "collector-config"
READY_LIMIT_S = 60
STOP_LIMIT_S = 20


class CannotStart(Exception):
    """Why a server does not run, in one line that says how to mend it."""


# --------------------------------------------------------------------------------------------------- a server


class Server:
    """A process of its own group that has told it is ready; it ends with the `with` block, or by `stop`."""

    first_in_child: Callable[[], None] | None = None
    """Called in the child before its program; only where no other thread may hold a lock meanwhile."""

    def __init__(
        self,
        name: str,
        argv: Sequence[object],
        folder: Path,
        *,
        ready: str,
        ports: Sequence[int],
        environment: Mapping[str, str] | None = None,
        explain: Callable[[str], str] | None = None,
        ready_limit_s: float = READY_LIMIT_S,
    ) -> None:
        """`ready` is a URL that answers 2xx once the server is up; `ports` are those it will listen on;
        `explain` turns the log of a server that ended at once into one line."""
        self.name = name
        self.argv = [str(part) for part in argv]
        self.folder = folder
        self.log_file = folder / f"{name}.log"
        self._ready = ready
        self._ports = ports
        self._environment = {**os.environ, **(environment or {})}
        self._explain = explain or last_line
        self._ready_limit_s = ready_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.poll() if self._process else None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def start(self) -> None:
        """Starts it (again) and waits until it is ready. Raises CannotStart, with nothing left behind."""
        for port in self._ports:
            if not port_is_free(port):
                raise CannotStart(
                    f"{self.name} wants port {port} on 127.0.0.1, and another program listens there: "
                    f"end that one (`ss -ltnp 'sport = :{port}'` names it) or choose another port"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        offset = self.log_file.stat().st_size if self.log_file.exists() else 0
        with open(self.log_file, "ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.argv,
                    cwd=self.folder,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=self.first_in_child,
                )
            except OSError as error:
                raise CannotStart(f"{self.argv[0]} does not run: {error.strerror}") from None
        try:
            self._wait_until_ready(offset)
        except BaseException:  # a Ctrl-C too must leave nothing behind
            self.stop()
            raise

    def _wait_until_ready(self, offset: int) -> None:
        end = time.monotonic() + self._ready_limit_s
        while not answers(self._ready):
            if not self.running:
                code = self._process.returncode if self._process else None
                said = self.log_file.read_bytes()[offset:].decode(errors="replace")
                raise CannotStart(f"{self.name} ended with {code}: {self._explain(said)}")
            if time.monotonic() > end:
                raise CannotStart(
                    f"{self.name} is not ready after {self._ready_limit_s} s: see {self.log_file}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """By SIGTERM, and by SIGKILL where that is not obeyed. Ends what it started too."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill(self) -> None:
        """By SIGKILL, as a crash would; `start` brings it back on the same ports and folder."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """It hangs: connections are accepted by the kernel, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def reload(self) -> None:
        """SIGHUP: Prometheus and Alertmanager read their files again."""
        os.kill(self.pid, signal.SIGHUP)


def ends_with_this_process() -> Callable[[], None] | None:
    """What a child does first, so that it is killed when this process (or its thread that starts it) is."""
    if sys.platform != "linux":
        return None
    prctl, of_parents_death, parent = ctypes.CDLL(None).prctl, 1, os.getpid()

    def first() -> None:
        prctl(of_parents_death, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was killed before that
            os._exit(1)

    return first


# ---------------------------------------------------------------------------------------------- the collector


class Collector(Server):
    """Its addresses as `host:port`: OTLP goes in at `grpc` and `http`, the metrics come out at `scrape`,
    the collector's own at `own`.
    """

    grpc: str
    http: str
    scrape: str
    health: str
    own: str
    logs_file: Path


def collector(
    folder: Path,
    configs: Sequence[str | Path] = ("otel-collector.yaml", "metrics-scrape.yaml"),
    *,
    name: str = "otelcol",
    environment: Mapping[str, str] | None = None,
    ports: Mapping[str, int] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Collector:
    """The collector on files of collector-config/, merged in their order.

    `environment` beats the free ports chosen here (collector-config/README.md has the names); `ports` fixes
    some of `grpc`, `http`, `scrape`, `health`, `own`; `settings` are one-off changes, by their path with `::`
    between, as the collector's `--set` takes them. Its log, queues and `logs_file` lie in `folder`.
    """
    check_variables({**os.environ, **(environment or {})})
    doors = ("grpc", "http", "scrape", "health", "own")
    chosen = dict(zip(doors, free_ports(len(doors)), strict=True)) | dict(ports or {})
    listen = {each: f"127.0.0.1:{port}" for each, port in chosen.items()}
    argv: list[object] = [part("otelcol")]
    for config in configs:
        argv += ["--config", config_file(config)]
    for path, value in (settings or {}).items():
        argv += ["--config", f"yaml:{path}: {json.dumps(value)}"]
    check_collector_release(Path(str(argv[0])))
    server = Collector(
        name,
        argv,
        folder,
        ready=f"http://{listen['health']}/status",
        ports=list(chosen.values()),
        environment={
            "OTLP_GRPC_LISTEN": listen["grpc"],
            "OTLP_HTTP_LISTEN": listen["http"],
            "SCRAPE_LISTEN": listen["scrape"],
            "HEALTH_LISTEN": listen["health"],
            "SELF_PORT": str(chosen["own"]),
            "STORAGE_DIRECTORY": str(folder / f"{name}-storage"),
            "WAL_DIRECTORY": str(folder / f"{name}-wal"),
            "LOGS_FILE": str(folder / f"{name}-logs.jsonl"),
            **(environment or {}),
        },
        explain=functools.partial(explain_collector, [config_file(each) for each in configs]),
    )
    for door, address in listen.items():
        setattr(server, door, address)
    server.logs_file = folder / f"{name}-logs.jsonl"
    return server


def check_variables(environment: Mapping[str, str]) -> None:
    """Raises CannotStart for a variable that the collector might take silently for something else."""
    if wrong := checker().wrong(environment):
        raise CannotStart("; ".join(wrong))


@functools.cache
def checker() -> Any:
    """collector-config/check.py, which lies in no package."""
    found = importlib.util.spec_from_file_location("collector_config_check", CONFIG / "check.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def check_collector_release(binary: Path) -> None:
    """Raises CannotStart for a collector that does not know these files' names of components."""
    wanted = collector_release()
    command = [binary, "--version"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except OSError as error:
        raise CannotStart(
            f"{binary} does not run: {error.strerror}; give a collector {wanted} or later by "
            "TORCHMEM_OTELCOL, or unset it to have one built"
        ) from None
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", told)
    least = tuple(map(int, wanted.split(".")))
    if found is None or tuple(map(int, found.groups())) < least:
        raise CannotStart(
            f"{binary} is a collector {found[0] if found else 'of no release that it tells'}, and "
            f"collector-config/ is written for {wanted} or later: take that one, or unset TORCHMEM_OTELCOL "
            f"to have it built"
        )


def explain_collector(configs: Sequence[Path], log: str) -> str:
    """The cause out of `Error: ...`, which takes several lines of a wrong configuration."""
    lines = [line.strip() for line in log.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Error: ")]
    error: list[str] = []
    for line in lines[starts[0] :] if starts else [last_line(log)]:
        if re.match(r"\d{4}[-/]\d\d[-/]\d\d[T/ ]", line):
            break
        if line and line not in error:
            error.append(line)
    cause = " ".join(error) or last_line(log)
    for noise in ("Error: ", "failed to get config: ", "cannot unmarshal the configuration: "):
        cause = cause.removeprefix(noise)
    return mend(re.sub(r"decoding failed due to the following error\(s\): ?", "", cause), configs)


def mend(cause: str, configs: Sequence[Path]) -> str:
    """A cause with what to do about it."""
    if found := re.search(r"([\d.]+:\d+): bind: address already in use", cause):
        return f"another program listens at {found[1]}: end that one, or give another address"
    files = " or ".join(
        dict.fromkeys(str(each.relative_to(ROOT) if each.is_relative_to(ROOT) else each) for each in configs)
    )
    return f"{cause}; mend it in {files}, or in the environment that they name"


# ----------------------------------------------------------------------------------- Prometheus, Alertmanager


class Prometheus(Server):
    url: str

    def get(self, path: str, **parameters: object) -> Any:
        """The `data` of an answer of its API, `path` after /api/v1/."""
        return api(f"{self.url}/api/v1/{path}", parameters)["data"]

    def query(self, expression: str, **parameters: object) -> list[dict[str, Any]]:
        return self.get("query", query=expression, **parameters)["result"]

    def value(self, expression: str) -> float | None:
        """The one value of an expression; None where there is no series. Several are an error."""
        found = self.query(expression)
        if len(found) > 1:
            raise AssertionError(f"{expression} has {len(found)} values: {found}")
        return float(found[0]["value"][1]) if found else None


def prometheus(
    folder: Path,
    config: str | Path,
    *,
    name: str = "prometheus",
    port: int | None = None,
    replace: Mapping[str, str] | None = None,
    change: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
) -> Prometheus:
    """Prometheus on a file of collector-config/prometheus/ (or any path), with what compose.yaml gives it.

    `replace` replaces addresses wherever they stand in the file (`{"127.0.0.1:8889": otelcol.scrape}`);
    `change` sets values by their dotted path (`{"global.scrape_interval": "1s"}`); rule files are made
    absolute; `arguments` are further ones of its command line.
    """
    port = port or free_ports(1)[0]
    address = f"127.0.0.1:{port}"
    written = rewritten(folder / f"{name}.yaml", config_file(config, "prometheus"), replace, change)
    server = Prometheus(
        name,
        [
            part("prometheus"),
            f"--config.file={written}",
            f"--storage.tsdb.path={folder / f'{name}-data'}",
            f"--web.listen-address={address}",
            "--web.enable-lifecycle",
            "--web.enable-otlp-receiver",
            "--enable-feature=exemplar-storage",
            *arguments,
        ],
        folder,
        ready=f"http://{address}/-/ready",
        ports=[port],
        explain=functools.partial(explain_prometheus, config_file(config, "prometheus")),
    )
    server.url = f"http://{address}"
    return server


class Alertmanager(Server):
    url: str


def alertmanager(
    folder: Path,
    config: str | Path = "alertmanager.yaml",
    *,
    name: str = "alertmanager",
    port: int | None = None,
    replace: Mapping[str, str] | None = None,
    change: Mapping[str, object] | None = None,
) -> Alertmanager:
    """Alertmanager on a file of collector-config/prometheus/; `replace` and `change` as in `prometheus`."""
    port = port or free_ports(1)[0]
    address = f"127.0.0.1:{port}"
    written = rewritten(folder / f"{name}.yaml", config_file(config, "prometheus"), replace, change)
    server = Alertmanager(
        name,
        [
            part("alertmanager"),
            f"--config.file={written}",
            f"--storage.path={folder / f'{name}-data'}",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",  # or it gossips on every interface
        ],
        folder,
        ready=f"http://{address}/-/ready",
        ports=[port],
        explain=functools.partial(explain_prometheus, config_file(config, "prometheus")),
    )
    server.url = f"http://{address}"
    return server


def explain_prometheus(config: Path, log: str) -> str:
    said = [line for line in log.splitlines() if re.search(r"level=(ERROR|error)|error:", line)]
    line = said[0] if said else last_line(log)
    found = re.search(r'\berr(?:or)?="((?:[^"\\]|\\.)*)"', line)
    cause = found[1].replace("\\n", " ").replace('\\"', '"') if found else line
    return mend(" ".join(cause.split()), [config])


# ----------------------------------------------------------------------------------------------------- Jaeger


class Jaeger(Server):
    """`grpc`: where OTLP goes in (`host:port`); `url`: its API and pages."""

    grpc: str
    url: str

    def trace(self, trace_id: str) -> list[dict[str, Any]]:
        """The spans of a trace, each with `tags` as a dict; empty where it is not kept."""
        try:
            found = api(f"{self.url}/api/traces/{trace_id}", {})["data"]
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise
        return [flat(span) for trace in found for span in trace["spans"]]

    def search(self, service: str, *, tags: Mapping[str, str] | None = None, limit: int = 1000) -> list[Any]:
        """The traces of a service, each a list of spans, in the last hour."""
        parameters: dict[str, object] = {"service": service, "limit": limit, "lookback": "1h"}
        if tags:
            parameters["tags"] = json.dumps(tags)
        found = api(f"{self.url}/api/traces", parameters)["data"]
        return [[flat(span) for span in trace["spans"]] for trace in found]


def flat(span: dict[str, Any]) -> dict[str, Any]:
    return {**span, "tags": {tag["key"]: tag["value"] for tag in span["tags"]}}


def jaeger(
    folder: Path,
    config: str | Path = "jaeger.yaml",
    *,
    name: str = "jaeger",
    ports: Mapping[str, int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Jaeger:
    """Jaeger on collector-config/jaeger.yaml.

    `ports` fixes some of `grpc`, `query`, `query_grpc`, `health`.
    """
    chosen = dict(zip(("grpc", "query", "query_grpc", "health"), free_ports(4), strict=True)) | dict(
        ports or {}
    )
    listen = {each: f"127.0.0.1:{port}" for each, port in chosen.items()}
    server = Jaeger(
        name,
        [part("jaeger"), "--config", config_file(config)],
        folder,
        ready=f"http://{listen['health']}/status",
        ports=list(chosen.values()),
        environment={
            "JAEGER_OTLP_LISTEN": listen["grpc"],
            "JAEGER_QUERY_LISTEN": listen["query"],
            "JAEGER_QUERY_GRPC_LISTEN": listen["query_grpc"],
            "JAEGER_HEALTH_LISTEN": listen["health"],
            **(environment or {}),
        },
        explain=functools.partial(explain_collector, [config_file(config)]),
    )
    server.grpc, server.url = listen["grpc"], f"http://{listen['query']}"
    return server


# --------------------------------------------------------------------------------------------------- the rest


def config_file(config: str | Path, folder: str = ".") -> Path:
    """A path as it is, or a name under collector-config/ (or the folder in it)."""
    given = Path(config)
    path = given if given.is_absolute() else CONFIG / folder / given
    if not path.is_file():
        raise CannotStart(
            f"there is no configuration file {path}: give a file of {CONFIG / folder} or a whole path"
        )
    return path.resolve()


def rewritten(
    to: Path, source: Path, replace: Mapping[str, str] | None, change: Mapping[str, object] | None
) -> Path:
    """A copy of a YAML file with addresses and values replaced and its file paths made absolute."""
    try:
        loaded = yaml.safe_load(source.read_text())
    except yaml.YAMLError as error:
        raise CannotStart(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    unused = set(replace or {})

    def address(value: object) -> object:
        if isinstance(value, dict):
            return {key: address(each) for key, each in value.items()}
        if isinstance(value, list):
            return [address(each) for each in value]
        if isinstance(value, str):
            for old, new in (replace or {}).items():
                if old in value:
                    unused.discard(old)
                    value = value.replace(old, new)
        return value

    loaded = address(loaded)
    if unused:
        raise CannotStart(f"{source} does not name {', '.join(sorted(unused))}: nothing to replace")
    for list_of_files in ("rule_files", "templates"):
        if list_of_files in loaded:
            loaded[list_of_files] = [str(source.parent / each) for each in loaded[list_of_files]]
    for path, value in (change or {}).items():
        *parents, last = path.split(".")
        place: Any = loaded
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
        place[int(last) if isinstance(place, list) else last] = value
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(yaml.safe_dump(loaded, sort_keys=False))
    return to


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return 200 <= answer.status < 300
    except (OSError, ValueError):
        return False


def api(url: str, parameters: Mapping[str, object]) -> Any:
    question = urllib.parse.urlencode({name: str(value) for name, value in parameters.items()})
    with urllib.request.urlopen(f"{url}?{question}" if question else url, timeout=30) as answer:
        return json.load(answer)


def until(question: Callable[[], Any], seconds: float, what: str, every: float = 0.2) -> Any:
    """The first true answer. Raises AssertionError that names what did not come true."""
    end = time.monotonic() + seconds
    while not (answer := question()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(every)
    return answer


def last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
