"""Context over FastAPI, aiohttp and Ray, with the real packages and real processes; and over bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from launch import PYTHON, Launcher, free_port
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider

from lens_auto.contrib import nccl
from lens_auto.contrib import ray as lens_ray
from lens_auto.contrib.aiohttp import instrument_aiohttp_client
from lens_auto.contrib.fastapi import instrument_fastapi

NEEDED = ("fastapi", "uvicorn", "aiohttp")
INSTRUMENTATIONS = ("opentelemetry.instrumentation.fastapi", "opentelemetry.instrumentation.aiohttp_client")


def missing(*modules: str) -> list[str]:
    """Those of some modules that are not installed."""
    return [name for name in modules if find_spec(name) is None]


needs_http = pytest.mark.skipif(
    bool(missing(*NEEDED, *INSTRUMENTATIONS)), reason=f"not installed: {', '.join(missing(*NEEDED, *INSTRUMENTATIONS))}"
)


@pytest.fixture
def current_span() -> Iterator[trace.Span]:
    """A span that is current, in a context with baggage."""
    with TracerProvider().get_tracer("t").start_as_current_span("current") as span:
        token = context.attach(baggage.set_baggage("user", "ada"))
        yield span
        context.detach(token)


def span_id_in(found: context.Context) -> int:
    return trace.get_current_span(found).get_span_context().span_id


# --- HTTP -------------------------------------------------------------------------------------------------------------

SERVER = """
import sys
import uvicorn
from fastapi import FastAPI
from lens_auto import NemoLensConfig, setup_telemetry, span_cm
from lens_auto.contrib.fastapi import instrument_fastapi

setup_telemetry(NemoLensConfig(enabled=True, exporter="console", service_name="server", metrics_enabled=False))
app = FastAPI()
instrument_fastapi(app, service_name="ignored")
instrument_fastapi(app)  # a second call changes nothing

@app.get("/items/{item}")
async def items(item: int):
    with span_cm("inside"):
        return {"item": item}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

CLIENT = """
import asyncio, sys
import aiohttp
from lens_auto import NemoLensConfig, setup_telemetry, span_cm
from lens_auto.contrib.aiohttp import instrument_aiohttp_client

handle = setup_telemetry(
    NemoLensConfig(enabled=True, exporter="console", service_name="client", metrics_enabled=False)
)
instrument_aiohttp_client()
instrument_aiohttp_client()

async def main():
    async with aiohttp.ClientSession() as session:
        for attempt in range(600):  # until the server listens
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                break
        with span_cm("outside"):
            async with session.get(f"http://127.0.0.1:{sys.argv[1]}/items/7") as response:
                assert (await response.json()) == {"item": 7}

asyncio.run(main())
handle.shutdown()
"""


def json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@needs_http
def test_fastapi_and_aiohttp_are_one_trace_over_sockets(launch: Launcher) -> None:
    port = str(free_port())
    server = launch.start((*PYTHON, launch.program(SERVER, "server.py"), port))
    client = launch.run(*PYTHON, launch.program(CLIENT, "client.py"), port)
    assert client.code == 0, client.stderr
    server.process.send_signal(2)
    served = server.wait()
    spans = json_lines(client.stdout) + json_lines(served.stdout)
    assert len({span["trace_id"] for span in spans}) == 1
    by_kind = {
        (span["resource"]["attributes"]["service.name"], span["kind"], span["parent_id"]): span for span in spans
    }
    (outside,) = [span for span in spans if span["name"] == "outside"]
    request = by_kind["client", "CLIENT", outside["span_id"]]
    answer = by_kind["server", "SERVER", request["span_id"]]
    assert answer["name"] == "GET /items/{item}"
    (inside,) = [span for span in spans if span["name"] == "inside"]
    assert inside["parent_id"] == answer["span_id"]
    # One span for one request, whatever was called twice.
    assert [span["kind"] for span in spans].count("SERVER") == [span["kind"] for span in spans].count("CLIENT") == 1
    assert served.lines == client.lines == []


@pytest.mark.parametrize(
    ("call", "module", "message"),
    [
        (
            lambda: instrument_fastapi(object()),
            "opentelemetry.instrumentation.fastapi",
            "instrument_fastapi needs opentelemetry-instrumentation-fastapi: pip install 'nemo-lens-auto[fastapi]'",
        ),
        (
            instrument_aiohttp_client,
            "opentelemetry.instrumentation.aiohttp_client",
            "instrument_aiohttp_client needs opentelemetry-instrumentation-aiohttp-client:"
            " pip install 'nemo-lens-auto[aiohttp]'",
        ),
    ],
)
def test_without_the_instrumentation_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, call: Any, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as raised:
        call()
    assert str(raised.value) == message


# --- Ray --------------------------------------------------------------------------------------------------------------

RAY = """
import json
import tempfile
import ray
from opentelemetry import trace
from lens_auto.contrib.ray import inject_ray_context, ray_dispatch_with_context, traced_remote_call

def set_up_worker():
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider())

def seen():
    span = trace.get_current_span()
    return {
        "name": span.name,
        "trace": span.get_span_context().trace_id,
        "parent": span.parent.span_id if span.parent else None,
    }

@ray.remote
@traced_remote_call
def task(a, b=1, **more):
    return {"arguments": [a, b, more], **seen()}

@ray.remote
class Actor:
    @traced_remote_call
    def method(self, a):
        return {"arguments": [a], **seen()}

    @traced_remote_call
    async def coroutine(self, a):
        return {"arguments": [a], **seen()}

    @traced_remote_call
    def items(self, count):
        for number in range(count):
            yield {"arguments": [number], **seen()}

    @traced_remote_call
    def fails(self):
        raise KeyError("on purpose")

set_up_worker()
folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # short: Ray's sockets lie in it
ray.init(
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=False,
    runtime_env={"worker_process_setup_hook": set_up_worker},
    _temp_dir=folder.name,
)
found = {}
with trace.get_tracer("driver").start_as_current_span("driver") as span:
    found["driver"] = [span.get_span_context().trace_id, span.get_span_context().span_id]
    actor = Actor.remote()
    found["task"] = ray.get(ray_dispatch_with_context(task, 1, b=2, c=3))
    found["by hand"] = ray.get(task.remote(1, _otel_carrier=inject_ray_context()))
    found["without"] = ray.get(task.remote(1))
    found["method"] = ray.get(ray_dispatch_with_context(actor.method, "x"))
    found["coroutine"] = ray.get(ray_dispatch_with_context(actor.coroutine, "y"))
    streamed = ray_dispatch_with_context(actor.items.options(num_returns="streaming"), 2)
    found["items"] = [ray.get(each) for each in streamed]
    other = {"traceparent": f"00-{7:032x}-{8:016x}-01"}
    found["given"] = ray.get(ray_dispatch_with_context(actor.method, "z", _carrier=other))
    try:
        ray.get(ray_dispatch_with_context(actor.fails))
    except KeyError as error:
        found["error"] = type(error).__name__
print(json.dumps(found), flush=True)
ray.shutdown()
"""


@pytest.mark.skipif(bool(missing("ray")), reason="not installed: ray")
def test_ray_tasks_and_actors_are_children_of_the_caller(launch: Launcher) -> None:
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    run = launch.run(*PYTHON, launch.program(RAY), env=environment, timeout_s=110)
    assert run.code == 0, run.stderr
    (found,) = json_lines(run.stdout)
    trace_id, span_id = found["driver"]
    for key in ("task", "by hand", "method", "coroutine"):
        assert (found[key]["trace"], found[key]["parent"]) == (trace_id, span_id), key
    assert [each["parent"] for each in found["items"]] == [span_id, span_id]
    assert [each["arguments"] for each in found["items"]] == [[0], [1]]
    assert found["without"]["parent"] is None
    assert found["without"]["trace"] != trace_id
    assert (found["given"]["trace"], found["given"]["parent"]) == (7, 8)
    assert found["task"]["arguments"] == [1, 2, {"c": 3}]  # the method never sees the carrier
    assert [found[key]["name"] for key in ("task", "method", "coroutine")] == [
        "task",
        "Actor.method",
        "Actor.coroutine",
    ]
    assert "KeyError" in found["error"]


def test_the_carrier_for_ray(current_span: trace.Span) -> None:
    carrier = lens_ray.inject_ray_context()
    assert sorted(carrier) == ["baggage", "traceparent"]
    here = current_span.get_span_context().span_id
    assert span_id_in(lens_ray.extract_ray_context(carrier)) == here
    assert span_id_in(lens_ray.extract_ray_context()) == here  # no carrier: the current context
    assert span_id_in(lens_ray.extract_ray_context({})) == 0
    assert baggage.get_baggage("user", lens_ray.extract_ray_context(carrier)) == "ada"


def test_a_traced_method_keeps_its_signature_and_its_name(current_span: trace.Span) -> None:
    import inspect

    class Actor:
        @lens_ray.traced_remote_call
        def method(self, a: int, *, b: int = 2, **rest: int) -> tuple[int, int, dict[str, int]]:
            """Its own words."""
            return a, b, rest

    assert Actor().method(1, b=3, c=4) == (1, 3, {"c": 4})
    assert Actor().method(1, _otel_carrier={}) == (1, 2, {})  # type: ignore[call-arg, unused-ignore]
    assert (Actor.method.__name__, Actor.method.__doc__) == ("method", "Its own words.")
    assert list(inspect.signature(Actor.method).parameters) == ["self", "a", "b", "_otel_carrier", "rest"]


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_carry_the_context(current_span: trace.Span) -> None:
    data = nccl.serialize_context()
    carrier = nccl.deserialize_context(data)
    assert carrier == json.loads(data)
    assert carrier is not None
    assert sorted(carrier) == ["baggage", "traceparent"]
    token = context.attach(context.Context())
    try:
        found = nccl.extract_nccl_context(data)
        assert span_id_in(found) == current_span.get_span_context().span_id
        assert baggage.get_baggage("user", found) == "ada"
    finally:
        context.detach(token)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[1]", b'{"traceparent": 5}', b"null"])
def test_damaged_bytes_give_the_current_context(current_span: trace.Span, data: bytes) -> None:
    assert nccl.deserialize_context(data) is None
    assert span_id_in(nccl.extract_nccl_context(data)) == current_span.get_span_context().span_id


def test_bytes_without_a_context() -> None:
    assert nccl.serialize_context() == b"{}"
    assert nccl.deserialize_context(b"{}") == {}
    assert span_id_in(nccl.extract_nccl_context(b"{}")) == 0
