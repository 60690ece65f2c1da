"""Three HTTP services under `opentelemetry-instrument` make one trace of a rollout, with no code for it.

The services are those of `examples/rollout_services`; what they printed is read as NeMo Gym's document reads it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, Launcher, Run, Started, free_port
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags
from test_providers import spans_of

from lens_auto import http_services, state
from lens_auto.http_services import GatedTracer, RolloutMiddleware, rollout_id, rollout_processor
from lens_auto.settings import Settings

EXAMPLE = Path(__file__).parent.parent / "examples" / "rollout_services"
NEEDED = (
    "fastapi",
    "uvicorn",
    "aiohttp",
    "opentelemetry.instrumentation.fastapi",
    "opentelemetry.instrumentation.aiohttp_client",
)
MISSING = [name for name in NEEDED if find_spec(name) is None]
needs_services = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

AGENT, MODEL, RESOURCES = "agent-server", "model-server", "resources-server"


@dataclass
class Service:
    """A service that runs."""

    started: Started
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Outcome:
    """What the services of this module left."""

    spans: list[dict[str, Any]]
    answers: dict[str, dict[str, Any]]
    runs: dict[str, Run]
    driver: Run

    def of(self, rollout: str) -> list[dict[str, Any]]:
        """Spans that carry a rollout's id."""
        return [span for span in self.spans if span["attributes"].get("nemo.gym.rollout.id") == rollout]


def start(launcher: Launcher, name: str, *arguments: str, plain: bool = False, groups: str | None = None) -> Service:
    port = free_port()
    environment: dict[str, str | None] = {
        "OTEL_SERVICE_NAME": f"{name}-server",
        "OTEL_TRACES_EXPORTER": "console,lens_file",
        "NEMO_LENS_RUN_ID": "the-run",
        "PYTHONUNBUFFERED": "1",
    }
    if groups is not None:
        environment["NEMO_LENS_SPAN_GROUPS"] = groups
    command = (*PYTHON, str(EXAMPLE / f"{name}.py"), str(port), *arguments)
    return Service(launcher.start(command if plain else (*INSTRUMENT, *command), environment), port)


def wait_until_it_listens(service: Service) -> None:
    for _ in range(1200):
        try:
            with urllib.request.urlopen(f"{service.url}/openapi.json", timeout=1):
                return
        except OSError:
            assert service.started.process.poll() is None, service.started.wait().stderr
            time.sleep(0.05)
    raise AssertionError(f"{service.url} does not answer")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        found: dict[str, Any] = json.load(response)
        return found


TASK = {"prompt": "40+2", "expected": "42"}

DRIVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import run
print(asyncio.run(run.collect(sys.argv[2], 2)))
"""


@pytest.fixture(scope="module")
def outcome(launch_once: Launcher) -> Iterator[Outcome]:
    """All ways of running the services at once: they share a model and a resources server."""
    model = start(launch_once, "model")
    resources = start(launch_once, "resources")
    plain = start(launch_once, "model", plain=True)
    services = {
        "model": model,
        "resources": resources,
        "plain": plain,
        "agent": start(launch_once, "agent", model.url, resources.url),
        "off": start(launch_once, "agent", model.url, resources.url, groups="job"),
        "broken": start(launch_once, "agent", plain.url, resources.url),
    }
    for service in services.values():
        wait_until_it_listens(service)
    answers = {name: post(f"{services[name].url}/ng-rollout/{name}/run", TASK) for name in ("agent", "off", "broken")}
    driver = launch_once.run(
        *(*INSTRUMENT, *PYTHON, launch_once.program(DRIVER), str(EXAMPLE), services["agent"].url),
        env={"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "driver"},
    )
    runs = {}
    for service in services.values():
        service.started.process.send_signal(signal.SIGINT)
    for name, service in services.items():
        runs[name] = service.started.wait()
    output = "".join(run.stdout for run in (*runs.values(), driver))
    spans = [json.loads(line) for line in output.splitlines() if '"trace_id"' in line]
    yield Outcome([span for span in spans if not span["name"].endswith("/openapi.json")], answers, runs, driver)


def rows(spans: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(service, kind, name), sorted: what the document's recipe shows besides the trace id."""
    return sorted((span["resource"]["attributes"]["service.name"], span["kind"], span["name"]) for span in spans)


def chains(spans: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    """From each span without children, the names on the way up to the root."""
    by_id = {span["span_id"]: span for span in spans}
    parents = {span["parent_id"] for span in spans}
    found = set()
    for span in spans:
        if span["span_id"] not in parents:
            names = []
            step: dict[str, Any] | None = span
            while step is not None:
                names.append(step["name"])
                step = by_id.get(step["parent_id"])
            found.add(tuple(reversed(names)))
    return found


RUN = "POST /ng-rollout/{rollout_id}/run"


@needs_services
def test_one_rollout_is_one_trace_with_the_documents_chain(outcome: Outcome) -> None:
    assert outcome.answers["agent"] == {"rollout": "agent", "answer": "42", "reward": 1.0}
    spans = outcome.of("agent")
    assert len({span["trace_id"] for span in spans}) == 1
    assert rows(spans) == [
        (AGENT, "CLIENT", "HTTP POST"),
        (AGENT, "CLIENT", "HTTP POST"),
        (AGENT, "INTERNAL", "gym.rollout"),
        (AGENT, "SERVER", RUN),
        (MODEL, "INTERNAL", "gym.model.responses"),
        (MODEL, "SERVER", "POST /v1/responses"),
        (RESOURCES, "INTERNAL", "gym.verify"),
        (RESOURCES, "SERVER", "POST /verify"),
    ]
    assert chains(spans) == {
        (RUN, "gym.rollout", "HTTP POST", "POST /v1/responses", "gym.model.responses"),
        (RUN, "gym.rollout", "HTTP POST", "POST /verify", "gym.verify"),
    }


@needs_services
@pytest.mark.skipif(shutil.which("jq") is None, reason="not installed: jq")
def test_the_documents_own_recipe(outcome: Outcome, tmp_path: Path) -> None:
    for name in ("agent", "model", "resources"):
        (tmp_path / f"{name}.log").write_text(outcome.runs[name].stdout)
    recipe = (
        """cat *.log | grep '"trace_id"' | grep '"nemo.gym.rollout.id":"agent"' """
        """| jq -r '[.trace_id, .resource.attributes."service.name", .kind, .name] | @tsv' | sort"""
    )
    shown = subprocess.run(["sh", "-c", recipe], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    fields = [line.split("\t") for line in shown.splitlines()]
    assert len({trace_id for trace_id, *_ in fields}) == 1
    assert {service for _, service, _, _ in fields} == {AGENT, MODEL, RESOURCES}
    assert len(fields) == 8


@needs_services
def test_with_the_agents_http_groups_off_the_trace_holds(outcome: Outcome) -> None:
    spans = outcome.of("off")
    assert len({span["trace_id"] for span in spans}) == 1
    assert chains(spans) == {
        ("gym.rollout", "POST /v1/responses", "gym.model.responses"),
        ("gym.rollout", "POST /verify", "gym.verify"),
    }
    assert {kind for service, kind, _ in rows(spans) if service == AGENT} == {"INTERNAL"}


@needs_services
def test_a_service_that_is_not_instrumented_breaks_the_trace_there(outcome: Outcome) -> None:
    assert outcome.answers["broken"]["reward"] == 1.0
    spans = outcome.of("broken")
    assert chains(spans) == {
        (RUN, "gym.rollout", "HTTP POST"),
        (RUN, "gym.rollout", "HTTP POST", "POST /verify", "gym.verify"),
    }
    assert MODEL not in {service for service, _, _ in rows(spans)}
    assert '"trace_id"' not in outcome.runs["plain"].stdout


@needs_services
def test_job_goes_around_all_rollouts(outcome: Outcome) -> None:
    assert outcome.driver.code == 0, outcome.driver.stderr
    (job,) = [span for span in outcome.spans if span["name"] == "gym.job"]
    assert job["attributes"] == {"rollouts": 2}
    for rollout in ("task0", "task1"):
        spans = outcome.of(rollout)
        assert len(spans) == 8
        assert {span["trace_id"] for span in spans} == {job["trace_id"]}
    # The driver's own requests: CLIENT spans in the job, whose answers are the agent's.
    requests = [span for span in outcome.spans if span["parent_id"] == job["span_id"]]
    assert rows(requests) == [("driver", "CLIENT", "HTTP POST")] * 2
    assert {span["parent_id"] for span in outcome.spans if span["name"] == RUN} >= {
        span["span_id"] for span in requests
    }


@needs_services
def test_the_run_directory_has_the_same_spans(outcome: Outcome) -> None:
    run = outcome.runs["agent"]
    services = run.cwd / "lens-runs" / "the-run" / "services"
    files = sorted(services.iterdir())
    assert len(files) == 5  # three agents, model, resources
    kept = {
        span["spanId"]
        for path in files
        for line in path.read_text().splitlines()
        for resource_spans in json.loads(line)["resourceSpans"]
        for scope_spans in resource_spans["scopeSpans"]
        for span in scope_spans["spans"]
    }
    printed = {span["span_id"] for span in outcome.spans if span["resource"]["attributes"]["service.name"] != "driver"}
    assert kept >= printed
    assert all(spans_of(path) for path in files)  # and OTLP/JSON as others read it


@needs_services
def test_services_say_where_their_spans_are_and_nothing_else(outcome: Outcome) -> None:
    for name, run in outcome.runs.items():
        assert run.code in (0, -signal.SIGINT), run.stderr
        expected = 0 if name == "plain" else 1
        assert len(run.lines) == expected, run.stderr
        for line in run.lines:
            assert line.startswith("lens-auto: spans of this process are in lens-runs/the-run/services/")


@pytest.mark.slow
@needs_services
def test_the_example_with_per_rollout(launch: Launcher) -> None:
    run = launch.run(
        *(*INSTRUMENT, *PYTHON, str(EXAMPLE / "run.py"), "--rollouts", "2"),
        env={"OTEL_TRACES_EXPORTER": "console", "NEMO_LENS_SPAN_GROUPS": "per_rollout"},
    )
    assert run.code == 0, run.stderr
    shown = [line for line in run.stdout.splitlines() if not line.startswith("{")]
    assert shown == ["task0: 2, reward 1.0", "task1: 3, reward 1.0"]
    output = run.stdout + "".join(path.read_text() for path in (run.cwd / "logs").glob("*.log"))
    spans = [json.loads(line) for line in output.splitlines() if '"trace_id"' in line]
    assert "gym.job" not in {span["name"] for span in spans}
    by_rollout = {
        rollout: {span["trace_id"] for span in spans if span["attributes"].get("nemo.gym.rollout.id") == rollout}
        for rollout in ("task0", "task1")
    }
    assert [len(found) for found in by_rollout.values()] == [1, 1]
    assert by_rollout["task0"] != by_rollout["task1"]
    roots = [span for span in spans if span["parent_id"] is None]
    assert [(span["kind"], span["name"]) for span in roots] == [("CLIENT", "HTTP POST")] * 2


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/ng-rollout/7/v1/responses", "7"),
        ("/ng-rollout/a%20b/run", "a b"),
        ("/ng-rollout/7", None),
        ("/ng-rollout//run", None),
        ("/v1/ng-rollout/7/run", None),
        ("", None),
        (f"/ng-rollout/{'x' * 500}/run", "x" * 256),
    ],
)
def test_the_rollout_in_a_path(path: str, expected: str | None) -> None:
    assert rollout_id(path) == expected


@pytest.fixture
def groups() -> Iterator[Any]:
    """Sets span groups; the old ones are back at the end."""
    before = state.enabled_span_groups
    yield state.set_enabled_span_groups
    state.set_enabled_span_groups(before)


REMOTE = SpanContext(5, 6, True, TraceFlags(1))


def test_a_group_that_is_off_passes_the_context_on(groups: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("t")
    gated = GatedTracer(lambda: tracer, "server")
    parent = trace.set_span_in_context(NonRecordingSpan(REMOTE))
    groups({"http_client"})
    with trace.use_span(gated.start_span("GET /x", parent, SpanKind.SERVER)) as span:
        assert span.get_span_context() == REMOTE
        tracer.start_span("inside").end()
    with gated.start_as_current_span("no parent", kind=SpanKind.SERVER):
        tracer.start_span("root").end()
    groups({"server"})
    gated.start_span("GET /y", parent, SpanKind.SERVER, {"a": 1}).end()
    with pytest.raises(ValueError), gated.start_as_current_span("BackgroundTask f"):
        raise ValueError("x")
    with gated.start_as_current_span("GET /y http send") as message:
        assert not message.is_recording()
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert set(found) == {"inside", "root", "GET /y", "BackgroundTask f"}
    assert found["inside"].parent == found["GET /y"].parent == REMOTE
    assert found["root"].parent is None
    assert dict(found["GET /y"].attributes or {}) == {"a": 1}
    assert [event.name for event in found["BackgroundTask f"].events] == ["exception"]


def test_a_rollouts_id_is_on_the_spans_of_its_request_only() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(rollout_processor())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("t")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        with tracer.start_as_current_span("inside"):
            assert baggage.get_baggage("nemo.gym.rollout.id") == (scope["path"].split("/")[2] or None)
        if scope["path"].endswith("fails"):
            raise KeyError("x")

    async def request(path: str) -> None:
        with tracer.start_as_current_span(f"SERVER {path}"):
            await RolloutMiddleware(application)({"type": "http", "path": path}, None, None)  # type: ignore[arg-type]

    async def both() -> None:
        results = await asyncio.gather(
            request("/ng-rollout/a/run"), request("/ng-rollout/b/fails"), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), KeyError]
        tracer.start_span("after").end()

    asyncio.run(both())
    found = [
        (span.name, dict(span.attributes or {}).get("nemo.gym.rollout.id")) for span in exporter.get_finished_spans()
    ]
    assert sorted(found) == [
        ("SERVER /ng-rollout/a/run", "a"),
        ("SERVER /ng-rollout/b/fails", "b"),
        ("after", None),
        ("inside", "a"),
        ("inside", "b"),
    ]


def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"fastapi", "aiohttp"}
    monkeypatch.setattr(http_services.importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(http_services, "_is_installed", lambda package: package.endswith("fastapi"))
    environment = {
        "NEMO_LENS_DISABLED": "1",
        "OTEL_PROPAGATORS": "b3",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "redis, fastapi",
        "NEMO_GYM_OTEL_ENABLED": "1",
    }
    lines = http_services.advice(Settings.from_env(environment), environment)
    assert [line.split(":")[0] for line in lines] == [
        "lens-auto is off in this process",
        "aiohttp is installed without opentelemetry-instrumentation-aiohttp-client",
        "OTEL_PROPAGATORS='b3' leaves out tracecontext",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS names 'fastapi'",
        "NEMO_GYM_OTEL_ENABLED without nemo_gym installed",
    ]
    installed.clear()
    assert http_services.advice(Settings(), {}) == []


def test_the_example_knows_its_servers(tmp_path: Path) -> None:
    command = [*PYTHON, str(EXAMPLE / "run.py"), "--plain", "bogus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "invalid choice: 'bogus'" in done.stderr
