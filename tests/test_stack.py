"""The local stack, without Docker: its files fit each other, and dashboards ask for what is really emitted."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_node import Node, alive, many_records, rank
from launch import free_port
from synthetic import Writer

from lens_auto.recorder import layout
from lens_auto.recorder.layout import Kind

compose_spec = pytest.importorskip("compose_spec")
promql_parser = pytest.importorskip("promql_parser")

ROOT = Path(__file__).resolve().parent.parent
OBSERVABILITY = ROOT / "observability"
DASHBOARD = OBSERVABILITY / "grafana" / "dashboards" / "training.json"
COMPOSE = (ROOT / "docker-compose.otel.yml").read_text()
# What the test's own unpacked copy, an installed package and a person's choice are called.
PROMETHEUS = (
    os.environ.get("PROMETHEUS")
    or shutil.which("prometheus")
    or shutil.which(f"{sys.prefix}/prometheus/usr/bin/prometheus")
)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="no prometheus on the PATH (Debian: apt-get install prometheus, or make prometheus)"
)

Service = dict[str, Any]


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    found: dict[str, Service] = yaml.safe_load(COMPOSE)["services"]
    return found


def load(name: str) -> Any:
    return yaml.safe_load((OBSERVABILITY / name).read_text())


def port_of(endpoint: str) -> int:
    return int(endpoint.rstrip("/").rsplit(":", 1)[1])


# --- the compose file -------------------------------------------------------------------------------------------------


def validate(text: str) -> None:
    """Against the compose specification: unknown keys, wrong types, and references to what is not there.

    Raises:
        ValueError: what is wrong, and where.
    """
    compose_spec.PyCompose.from_yaml(text).validate()
    content = yaml.safe_load(text)
    for name, service in content["services"].items():
        needed = set(service.get("depends_on", ()))
        mode = service.get("network_mode", "")
        if mode.startswith("service:"):
            needed.add(mode.partition(":")[2])
        for other in needed - content["services"].keys():
            raise ValueError(f"services.{name} needs {other!r}, which is not there")
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if not source.startswith((".", "/")) and source not in content.get("volumes", {}):
                raise ValueError(f"services.{name} mounts {source!r}, which is not there")


def test_the_compose_file_fits_the_specification() -> None:
    validate(COMPOSE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    ports:\n", "    prots:\n"),
        ("      interval: 5s\n", "      interval: often\n"),
        ("      jaeger:\n        condition: service_healthy\n", "      yaeger:\n        condition: service_healthy\n"),
        ("condition: service_healthy", "condition: service_well"),
        ("    restart: unless-stopped\n", "    restart: perhaps\n"),
        ("      - prometheus-data:/prometheus\n", "      - other-data:/prometheus\n"),
    ],
)
def test_the_check_of_the_compose_file_finds(old: str, new: str) -> None:
    assert old in COMPOSE
    with pytest.raises(ValueError):
        validate(COMPOSE.replace(old, new, 1))


def test_versions_are_pinned(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
    assert services["jaeger"]["image"].startswith("jaegertracing/jaeger:2.")
    assert services["collector"]["image"].startswith("otel/opentelemetry-collector-contrib:")


def test_ports_are_on_the_loopback_interface_only(services: dict[str, Service]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert len(published) == 5
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), port
    assert len(set(published)) == len(published)
    assert not [name for name, service in services.items() if service.get("network_mode") == "host"]


def test_every_service_has_a_health_check(services: dict[str, Service]) -> None:
    """The collector's is in a neighbour that shares its network."""
    checked = {name for name, service in services.items() if "healthcheck" in service}
    assert services["collector-health"]["network_mode"] == "service:collector"
    assert checked | {"collector"} == set(services)
    for service in services.values():
        needed = service.get("depends_on", {})
        if isinstance(needed, dict):
            assert {name for name, how in needed.items() if how["condition"] == "service_healthy"} <= checked


def test_what_is_mounted_is_there(services: dict[str, Service]) -> None:
    mounted = set()
    for name, service in services.items():
        targets = set()
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            targets.add(target)
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert mode == ["ro"], volume
                mounted.add((ROOT / source).resolve())
        # A configuration that a command names is one that is mounted.
        for argument in service.get("command", ()):
            if argument.startswith(("--config=", "--config.file=")):
                assert argument.partition("=")[2] in targets, (name, argument)
    configured = [path for path in OBSERVABILITY.rglob("*") if path.is_file() and path.suffix != ".py"]
    for path in configured:
        if "__pycache__" not in path.parts:
            assert any(path == place or place in path.parents for place in mounted), path


# --- ports that must meet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["collector.yaml", "jaeger.yaml"])
def test_pipelines_use_what_is_defined(name: str) -> None:
    content = load(name)
    service = content["service"]
    assert set(service["extensions"]) == set(content["extensions"])
    for kind in ("receivers", "processors", "exporters"):
        used = {part for pipeline in service["pipelines"].values() for part in pipeline[kind]}
        assert used == set(content[kind]), kind
    for pipeline in service["pipelines"].values():
        if "memory_limiter" in pipeline["processors"]:
            assert pipeline["processors"][0] == "memory_limiter"  # it can refuse only what is not in a batch yet


def test_the_collector_takes_all_signals_where_exporters_send_them(services: dict[str, Service]) -> None:
    """At the ports of OTLP's specification, which exporters use unless told otherwise, and which are published."""
    content = load("collector.yaml")
    assert set(content["service"]["pipelines"]) == {"traces", "metrics", "logs"}
    protocols = content["receivers"]["otlp"]["protocols"]
    assert port_of(protocols["grpc"]["endpoint"]) == 4317
    assert port_of(protocols["http"]["endpoint"]) == 4318
    inside = {int(port.split(":")[2]) for port in services["collector"]["ports"]}
    assert inside == {4317, 4318}


def test_the_collector_reaches_jaeger_and_prometheus_reaches_the_collector() -> None:
    collector, jaeger, prometheus = load("collector.yaml"), load("jaeger.yaml"), load("prometheus.yml")
    host, port = collector["exporters"]["otlp/jaeger"]["endpoint"].split(":")
    assert host == "jaeger"
    assert int(port) == port_of(jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"])
    assert "otlp/jaeger" in collector["service"]["pipelines"]["traces"]["exporters"]
    assert "prometheus" in collector["service"]["pipelines"]["metrics"]["exporters"]
    scraped = [
        target
        for job in prometheus["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    assert f"collector:{port_of(collector['exporters']['prometheus']['endpoint'])}" in scraped


def test_jaeger_shows_what_it_stores(services: dict[str, Service]) -> None:
    content = load("jaeger.yaml")
    stores = set(content["extensions"]["jaeger_storage"]["backends"])
    assert content["exporters"]["jaeger_storage_exporter"]["trace_storage"] in stores
    assert content["extensions"]["jaeger_query"]["storage"]["traces"] in stores
    page = port_of(content["extensions"]["jaeger_query"]["http"]["endpoint"])
    assert [f"127.0.0.1:{page}:{page}"] == services["jaeger"]["ports"]


def test_health_checks_ask_where_health_is_told(services: dict[str, Service]) -> None:
    told = {
        "collector-health": port_of(load("collector.yaml")["extensions"]["health_check"]["endpoint"]),
        "jaeger": port_of(load("jaeger.yaml")["extensions"]["healthcheckv2"]["http"]["endpoint"]),
        "prometheus": int(services["prometheus"]["ports"][0].split(":")[2]),
        "grafana": int(services["grafana"]["ports"][0].split(":")[2]),
    }
    for name, port in told.items():
        asked = urllib.parse.urlparse(services[name]["healthcheck"]["test"][-1])
        assert (asked.hostname, asked.port) == ("127.0.0.1", port), name


def test_grafana_finds_its_sources_and_dashboards(services: dict[str, Service]) -> None:
    sources = {each["uid"]: each for each in load("grafana/provisioning/datasources/lens.yaml")["datasources"]}
    for uid, service in (("prometheus", "prometheus"), ("jaeger", "jaeger")):
        asked = urllib.parse.urlparse(sources[uid]["url"])
        assert asked.hostname == service
        assert f"127.0.0.1:{asked.port}:{asked.port}" in services[service]["ports"]
    (provider,) = load("grafana/provisioning/dashboards/lens.yaml")["providers"]
    targets = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in targets
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    used = set(re.findall(r'"uid": "(\w+)"', DASHBOARD.read_text())) - {json.loads(DASHBOARD.read_text())["uid"]}
    assert used <= sources.keys()


# --- the dashboard ----------------------------------------------------------------------------------------------------


def test_the_dashboard_is_what_its_code_makes() -> None:
    script = OBSERVABILITY / "dashboards.py"
    made = subprocess.run(
        [sys.executable, "-c", f"import runpy; print(runpy.run_path({str(script)!r})['text'](), end='')"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert made.stdout == DASHBOARD.read_text(), "python observability/dashboards.py writes it anew"


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def queries() -> dict[str, str]:
    """Every query by panel and letter, as Grafana would send it with everything chosen."""
    return {
        f"{panel['title']} {target['refId']}": fill(target["expr"]) for panel in panels() for target in panel["targets"]
    }


def fill(query: str, interval: str = "5s") -> str:
    for name, value in {"$__rate_interval": interval, "$__range": interval, "$run": ".*", "$rank": ".*"}.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    titles = {panel["title"] for panel in panels()}
    assert {
        "Iteration time by rank",
        "Share of each phase",
        "Communication by operation",
        "Dropped records by rank",
    } <= titles


def selectors(node: Any) -> Iterator[Any]:
    """The vector selectors in a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def grouping(query: str) -> set[str]:
    return {name.strip() for found in re.findall(r"\bby \(([^)]*)\)", query) for name in found.split(",")}


class Emitted:
    """What an exporter process told Prometheus: labels of each series, by name."""

    def __init__(self, text: str) -> None:
        self.labels: dict[str, set[str]] = {}
        for line in text.splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line)
            if found and not line.startswith("#"):
                names = set(re.findall(r'(\w+)="', found[2] or ""))
                self.labels.setdefault(found[1], set()).update(names)


def growing(number: int, process: subprocess.Popen[bytes]) -> Writer:
    """A rank that trains; loaders say their batch size."""
    writer = alive(rank(number, iterations=10), process)
    for record in writer.records:
        if record["kind"] == Kind.FETCH:
            record["c"] = 16
    return writer


def grow(node: Node, count: int) -> None:
    """Every rank has recorded so much now."""
    for writer in node.writers:
        folder = node.run_dir / layout.RANKS_DIR / writer.name
        for name, content in many_records(writer, count).items():
            draft = folder / f".{name}"
            draft.write_bytes(content)
            os.replace(draft, folder / name)


@contextmanager
def exporting(folder: Path) -> Iterator[tuple[Node, int]]:
    """Two ranks that train, and the exporter process whose port Prometheus may ask."""
    port = free_port()
    processes = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
    node = Node(folder, *(growing(number, process) for number, process in enumerate(processes)))
    try:
        grow(node, 6_000)
        variables = {
            "OTEL_METRICS_EXPORTER": "prometheus",
            "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
            "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        }
        node.start(variables)
        yield node, port
    finally:
        node.close()
        for process in processes:
            process.kill()
            process.wait()


def wait_for(ask: Callable[[], str | None], timeout_s: float, what: str) -> str:
    """What the first call gives that is something."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = ask()
        except OSError as error:
            found, last = None, error
        else:
            last = None
        if found:
            return found
        assert time.monotonic() < deadline, (what, last)
        time.sleep(0.1)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def test_queries_ask_for_names_and_labels_that_are_emitted(tmp_path: Path) -> None:
    with exporting(tmp_path) as (_, port):

        def ask() -> str | None:
            text = get(f"http://127.0.0.1:{port}/metrics")
            return text if "dl_comm_size_bytes_count{" in text else None

        emitted = Emitted(wait_for(ask, 20, "metrics"))
    # The Collector adds resource attributes as labels.
    from_resource = {"nemo_run_id"}
    asked = set()
    for title, query in queries().items():
        for selector in selectors(promql_parser.parse(query)):
            asked.add(selector.name)
            assert selector.name in emitted.labels, (title, selector.name, sorted(emitted.labels))
            used = {matcher.name for matcher in selector.matchers.matchers} | grouping(query)
            assert used <= emitted.labels[selector.name] | from_resource, (title, selector.name)
    ours = {name for name in emitted.labels if name.startswith(("dl_", "lens_"))}
    assert {name for name in ours if not name.endswith("_bucket")} <= asked | {
        # Not every part of a histogram is of use.
        *(name for name in ours if name.endswith(("_duration_seconds_sum", "_duration_seconds_count"))),
    }


# --- Prometheus itself ------------------------------------------------------------------------------------------------


@needs_prometheus
def test_prometheus_reads_its_configuration() -> None:
    promtool = shutil.which("promtool", path=str(Path(str(PROMETHEUS)).parent))
    if promtool is None:
        pytest.skip("no promtool beside prometheus")
    command = [promtool, "check", "config", str(OBSERVABILITY / "prometheus.yml")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stdout + found.stderr


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A server that asks an exporter process; gives its address."""
    port = free_port()
    configuration = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
        "scrape_configs": [{"job_name": "ranks", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = [
        str(PROMETHEUS),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: get(f"{address}/-/ready"), 20, "prometheus")
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def answer(address: str, query: str) -> list[float]:
    found = json.loads(get(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
    assert found["status"] == "success", found
    return [float(each["value"][1]) for each in found["data"]["result"]]


@needs_prometheus
def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """A real server fetches from a real exporter process while two ranks go on training."""
    with exporting(tmp_path / "node") as (node, port), prometheus(tmp_path / "prometheus", port) as address:
        left = queries()
        values: dict[str, list[float]] = {}
        count, deadline = 6_000, time.monotonic() + 60
        while left:
            assert time.monotonic() < deadline, (left, node.log())
            count += 3_000
            grow(node, count)
            time.sleep(1.0)
            for title, query in list(left.items()):
                found = answer(address, query)
                if found and all(map(math.isfinite, found)):
                    values[title] = found
                    del left[title]
    # Both ranks took 11 ms for each iteration: fetch 2, forward 3, backward 4, step 1, other 1.
    assert values["Iteration time by rank A"] == pytest.approx([0.011, 0.011])
    shares = [values[title] for title in queries() if title.startswith("Share")]
    assert [found for (found,) in shares] == pytest.approx([2 / 11, 3 / 11, 4 / 11, 1 / 11, 1 / 11])
    assert values["Dropped records by rank A"] == [0, 0]
    assert values["Ranks that send metrics A"] == [2]
    assert values["Samples in a second A"] == pytest.approx([2 * 16 / 0.011], rel=1e-3)
    (operation,) = values["Slow operations A"]
    assert 0.001 < operation <= 0.0025  # 2 ms, by buckets
