"""`setup_telemetry`: what it sets up, what it refuses, and that its end is bounded."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, Launcher
from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from receiver import Receiver
from test_otlp_json import parse

from lens_auto import handle as handle_module
from lens_auto import managed_span, state
from lens_auto.config import NemoLensConfig
from lens_auto.handle import TelemetryHandle, setup_telemetry
from lens_auto.logging_bridge import OTelLogHandler
from lens_auto.sampling import RankAwareSampler
from lens_auto.strategies import is_rank_sampled

_CLEARED = re.compile(r"_?NEMO_LENS_|OTEL_|TORCHELASTIC_|SLURM_|WANDB_|(LOCAL_)?(RANK|WORLD_SIZE)$")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As a process that never set up telemetry: no global provider, no variables, a folder of its own."""
    for name in list(os.environ):
        if _CLEARED.match(name):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    groups = state.enabled_span_groups
    _forget()
    yield
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, OTelLogHandler):
            logging.getLogger().removeHandler(handler)
    _forget()
    state.set_enabled_span_groups(groups)


def _forget() -> None:
    handle_module._reset_for_tests()
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE._done = False
    metrics._internal._METER_PROVIDER = None
    metrics._internal._METER_PROVIDER_SET_ONCE._done = False
    metrics._internal._PROXY_METER_PROVIDER = metrics._internal._ProxyMeterProvider()
    _logs._internal._LOGGER_PROVIDER = None
    _logs._internal._LOGGER_PROVIDER_SET_ONCE._done = False


def set_up(exporter: SpanExporter, **fields: Any) -> TelemetryHandle:
    """Telemetry with a custom span exporter and no metrics."""
    arguments = {
        name: fields.pop(name)
        for name in ("rank", "world_size", "resource_attributes", "export_strategy", "_allow_reinit")
        if name in fields
    }
    config = NemoLensConfig(enabled=True, metrics_enabled=False, **fields)
    return setup_telemetry(config, span_exporter=exporter, **arguments)


def names(exporter: InMemorySpanExporter) -> list[str]:
    return [span.name for span in exporter.get_finished_spans()]


# --- what is set up ---------------------------------------------------------------------------------------------------


def test_spans_and_metrics_reach_the_given_exporter_and_reader() -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    config = NemoLensConfig(enabled=True, span_groups="default,step")
    made = setup_telemetry(config, span_exporter=exporter, metric_reader=reader)
    assert made.is_exporting is True
    assert state.enabled_span_groups == {"job", "checkpoint", "evaluate", "step"}
    with made.tracer.start_as_current_span("by the handle"), managed_span("step", "by a group", iteration=3) as span:
        assert span is not None
    with managed_span("optimizer", "group off") as nothing:
        assert nothing is None
    with trace.get_tracer("elsewhere").start_as_current_span("by the global provider"):
        pass
    made.meter.create_counter("steps").add(2)
    data = reader.get_metrics_data()
    assert data is not None
    metric = data.resource_metrics[0].scope_metrics[0].metrics[0]
    assert (metric.name, metric.data.data_points[0].value) == ("steps", 2)  # type: ignore[union-attr]
    made.shutdown()
    assert names(exporter) == ["by a group", "by the handle", "by the global provider"]
    assert exporter.get_finished_spans()[0].attributes == {"iteration": 3}
    assert state.enabled_span_groups == frozenset()


def test_traces_off() -> None:
    exporter = InMemorySpanExporter()
    made = set_up(exporter, traces_enabled=False)
    with made.tracer.start_as_current_span("s") as span, managed_span("job", "j") as nothing:
        assert not span.is_recording()
        assert nothing is None
    made.shutdown()
    assert names(exporter) == []


def test_disabled_does_nothing_and_may_be_called_again() -> None:
    for _ in range(2):
        made = setup_telemetry(NemoLensConfig())
        assert made.is_exporting is False
        with made.tracer.start_as_current_span("s") as span:
            assert not span.is_recording()
        made.meter.create_histogram("h").record(1.0)
        made.shutdown()
    assert state.enabled_span_groups == frozenset()
    assert trace._TRACER_PROVIDER is None
    assert set_up(InMemorySpanExporter()).is_exporting is True


@pytest.mark.parametrize(("variable", "value"), [("NEMO_LENS_DISABLED", "1"), ("OTEL_SDK_DISABLED", "true")])
def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    made = set_up(InMemorySpanExporter())
    assert made.is_exporting is False
    assert state.enabled_span_groups == frozenset()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_second_call_is_refused() -> None:
    first = set_up(InMemorySpanExporter())
    with pytest.raises(RuntimeError, match=r"^setup_telemetry was called before in this process"):
        set_up(InMemorySpanExporter())
    first.shutdown()
    with pytest.raises(RuntimeError):
        set_up(InMemorySpanExporter())
    assert setup_telemetry(NemoLensConfig()).is_exporting is False  # disabled: not a second one
    exporters = [InMemorySpanExporter(), InMemorySpanExporter()]
    for rank, exporter in enumerate(exporters):
        again = set_up(exporter, rank=rank, world_size=2, export_strategy=lambda *_: True, _allow_reinit=True)
        with trace.get_tracer("t").start_as_current_span(f"rank {rank}"):
            pass
        again.shutdown()
    assert [names(exporter) for exporter in exporters] == [["rank 0"], ["rank 1"]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exporter": "zipkin"}, "unknown exporter 'zipkin'; there are: otlp, console, file"),
        (
            {"export_strategy": "odd_ranks"},
            "unknown export strategy 'odd_ranks'; there are: all_ranks, first_rank_per_node, sampled, single_rank",
        ),
        (
            {"span_groups": "job,layers"},
            "unknown span group 'layers'; valid presets: default, per_step, all; valid groups: checkpoint, evaluate,"
            " forward_backward, job, load_checkpoint, model_init, optimizer, step",
        ),
    ],
)
def test_an_unknown_name_lists_the_names(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        setup_telemetry(NemoLensConfig(enabled=True, **fields))
    assert str(raised.value) == message
    made = set_up(InMemorySpanExporter())  # the failed call does not count
    assert made.is_exporting is True


def test_a_rank_that_does_not_export() -> None:
    exporter = InMemorySpanExporter()
    made = set_up(exporter, rank=0, world_size=2)  # single_rank: the last
    assert made.is_exporting is False
    assert state.enabled_span_groups == frozenset()
    with made.tracer.start_as_current_span("s"), managed_span("job", "j") as span:
        assert span is None
    made.shutdown()
    assert names(exporter) == []
    assert trace._TRACER_PROVIDER is None


def test_a_strategy_given_in_the_call_decides() -> None:
    asked: list[tuple[str, int, int]] = []

    def strategy(config: NemoLensConfig, rank: int, world_size: int) -> bool:
        asked.append((config.export_strategy, rank, world_size))
        return rank == 0

    made = set_up(InMemorySpanExporter(), rank=0, world_size=2, export_strategy=strategy)
    assert made.is_exporting is True
    assert asked == [("single_rank", 0, 2)]


# --- the resource -----------------------------------------------------------------------------------------------------


def resource_of(exporter: InMemorySpanExporter, made: TelemetryHandle) -> dict[str, Any]:
    with made.tracer.start_as_current_span("s"):
        pass
    made.shutdown()
    return dict(exporter.get_finished_spans()[0].resource.attributes)


def test_the_users_resource_attributes_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "by environment")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=by%20environment,zone=z")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    exporter = InMemorySpanExporter()
    made = set_up(
        exporter,
        rank=3,
        world_size=4,
        service_name="by config",
        user="ada",
        wandb_project="p",
        resource_attributes={"host.name": "mine", "team": "by call", "sizes": (1, 2), "dl.rank": 30},
    )
    found = resource_of(exporter, made)
    expected = {
        "service.name": "by environment",
        "service.instance.id": "77-rank3",
        "nemo.run.id": "77",
        "nemo.user.id": "ada",
        "wandb.project": "p",
        "dl.rank": 30,
        "dl.world_size": 4,
        "dl.local_rank": 1,
        "host.name": "mine",
        "host.gpu.count": 2,
        "process.pid": os.getpid(),
        "slurm.job.id": "77",
        "team": "by call",
        "zone": "z",
        "sizes": (1, 2),
        "telemetry.sdk.language": "python",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_what_cannot_be_held_is_left_out_with_one_debug_line(caplog: pytest.LogCaptureFixture) -> None:
    exporter = InMemorySpanExporter()
    with caplog.at_level(logging.DEBUG, logger="lens_auto"):
        made = set_up(
            exporter,
            service_name="svc",
            resource_attributes={
                "good": 1.5,
                "object": object(),
                "nothing": None,
                "mixed": [1, "a"],
                "map": {"a": 1},
                "big": 1 << 63,
            },
        )
    found = resource_of(exporter, made)
    assert found["good"] == 1.5
    assert found["service.name"] == "svc"
    assert not {"object", "nothing", "mixed", "map", "big"} & set(found)
    lines = [record for record in caplog.records if "left out" in record.getMessage()]
    assert [(line.levelno, line.getMessage()) for line in lines] == [
        (
            logging.DEBUG,
            "lens-auto: resource attributes that cannot be held and are left out: object (object), mixed (list),"
            " map (dict), big (int)",
        )
    ]


def test_the_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    made = NemoLensConfig(enabled=True, metrics_enabled=False)
    setup_telemetry(made, span_exporter=InMemorySpanExporter())
    assert uuid.UUID(made.run_id).version == 4
    for variable, value in (("TORCHELASTIC_RUN_ID", "e"), ("SLURM_JOB_ID", "s"), ("NEMO_LENS_RUN_ID", "n")):
        monkeypatch.setenv(variable, value)  # each stronger than those before it
        assert handle_module._run_id(8) == value
    monkeypatch.setenv("NEMO_LENS_RUN_ID", "n")
    named = NemoLensConfig(enabled=True, run_id="given", metrics_enabled=False)
    setup_telemetry(named, span_exporter=InMemorySpanExporter(), _allow_reinit=True)
    assert named.run_id == "given"


# --- the end ----------------------------------------------------------------------------------------------------------


def test_open_spans_are_closed_and_marked() -> None:
    exporter = InMemorySpanExporter()
    made = set_up(exporter)
    outer = made.tracer.start_span("outer")
    with trace.use_span(outer):
        made.tracer.start_span("inner")
        made.tracer.start_span("ended").end()
    made.shutdown()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["ended", "inner", "outer"]
    assert [dict(span.attributes or {}) for span in spans] == [
        {},
        {"nemo.span.truncated": True},
        {"nemo.span.truncated": True},
    ]
    outer.end()  # the program's own end comes late and changes nothing
    made.shutdown()
    assert len(exporter.get_finished_spans()) == 3


def test_a_timeout_that_is_no_number_is_refused_and_ends_nothing() -> None:
    exporter = InMemorySpanExporter()
    made = set_up(exporter)
    with pytest.raises(TypeError, match="timeout_ms must be a number of milliseconds, got None"):
        made.shutdown(None)  # type: ignore[arg-type]
    made.tracer.start_span("after").end()
    made.shutdown(1000)
    assert names(exporter) == ["after"]


def test_a_name_that_cannot_be_encoded_costs_no_other_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver("http") as receiver:
        for name, value in receiver.environment().items():
            monkeypatch.setenv(name, value)
        made = setup_telemetry(NemoLensConfig(enabled=True, metrics_enabled=False))
        for name in ("good", "\ud800", "good too"):
            made.tracer.start_span(name).end()
        made.shutdown()
        assert sorted(span["name"] for span in receiver.spans()) == ["?", "good", "good too"]


class _Stuck(SpanExporter):
    """Takes far longer than anybody waits, in whatever it does."""

    def export(self, spans: Any) -> SpanExportResult:
        time.sleep(30)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        time.sleep(30)


def test_shutdown_is_bounded_whatever_an_exporter_does(caplog: pytest.LogCaptureFixture) -> None:
    made = set_up(_Stuck())
    made.tracer.start_span("s").end()
    began = time.monotonic()
    made.shutdown(timeout_ms=300)
    assert 0.25 < time.monotonic() - began < 1.0
    assert [record.getMessage() for record in caplog.records if record.name == "lens_auto"] == [
        "lens-auto: traces not all sent within 300 ms; the rest is lost"
    ]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("fault", ["down", "hang"])
def test_shutdown_with_a_dead_endpoint_is_bounded(monkeypatch: pytest.MonkeyPatch, protocol: Any, fault: str) -> None:
    with Receiver(protocol) as receiver:
        getattr(receiver, fault)()
        for name, value in receiver.environment().items():
            monkeypatch.setenv(name, value)
        made = setup_telemetry(NemoLensConfig(enabled=True, logs_enabled=True))
        made.tracer.start_span("s").end()
        made.meter.create_counter("c").add(1)
        logging.getLogger("program").warning("w")
        began = time.monotonic()
        made.shutdown(timeout_ms=700)
        assert time.monotonic() - began < 1.4
        assert receiver.counts()["spans"] == 0


def test_shutdown_sends_traces_metrics_and_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver("grpc") as receiver:
        for name, value in receiver.environment().items():
            monkeypatch.setenv(name, value)
        made = setup_telemetry(NemoLensConfig(enabled=True, logs_enabled=True, service_name="svc"))
        assert [type(each) for each in logging.getLogger().handlers].count(OTelLogHandler) == 1
        with made.tracer.start_as_current_span("s"):
            logging.getLogger("program").warning("inside")
        made.meter.create_counter("c").add(1)
        made.shutdown()
        counts = receiver.counts()
        assert (counts["spans"], counts["metrics"], counts["logs"]) == (1, 1, 1)
        assert receiver.spans()[0]["resource"]["service.name"] == "svc"
    assert OTelLogHandler not in [type(each) for each in logging.getLogger().handlers]


def test_otel_variables_name_the_exporter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    made = setup_telemetry(NemoLensConfig(enabled=True))
    made.tracer.start_span("s").end()
    made.shutdown()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["name"] == "s"


def test_otel_variables_are_stronger_than_the_named_exporter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    made = setup_telemetry(NemoLensConfig(enabled=True, exporter="console"))
    made.tracer.start_span("s").end()
    with managed_span("job", "j") as span:
        assert span is None
    made.shutdown()
    assert made.is_exporting is False
    assert capsys.readouterr().out == ""


def test_a_disabled_call_leaves_what_runs_alone() -> None:
    exporter = InMemorySpanExporter()
    made = set_up(exporter)
    setup_telemetry(NemoLensConfig(enabled=False)).shutdown()
    with managed_span("job", "after"):
        pass
    made.shutdown()
    assert names(exporter) == ["after"]


# --- a bad environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "told", "goes_on"),
    [
        ({"OTEL_TRACES_EXPORTER": "bogus"}, ["'bogus'", "is not installed"], "metrics"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "xx"}, ["PROTOCOL='xx'"], "metrics"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_SCHEDULE_DELAY": "-1"},
            ["BSP_SCHEDULE_DELAY='-1'"],
            "metrics",
        ),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "0"}, ["OTEL_METRIC_EXPORT_INTERVAL='0'"], "spans"),
        ({"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "abc"}, ["_PORT='abc'"], "spans"),
        (
            {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": "busy"},
            ["in use", "_PORT="],
            "spans",
        ),
    ],
)
def test_a_bad_environment_costs_one_line_and_one_signal(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    environment: dict[str, str],
    told: list[str],
    goes_on: str,
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        for name, value in environment.items():
            monkeypatch.setenv(name, str(taken.getsockname()[1]) if value == "busy" else value)
        if "prometheus" in environment.values():
            monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "0.0.0.0")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=s3cret")
        made = setup_telemetry(NemoLensConfig(enabled=True, exporter="console"))
        made.tracer.start_span("s").end()
        made.meter.create_counter("c").add(1)
        made.shutdown()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "lens_auto"]
    assert all(part in line for part in told), line
    assert "s3cret" not in line
    assert made.is_exporting is True
    out = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert ["metrics" if "resource_metrics" in each else "spans" for each in out] == [goes_on]


# --- console and file -------------------------------------------------------------------------------------------------


def test_console_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    made = setup_telemetry(NemoLensConfig(enabled=True, exporter="console", service_name="svc", logs_enabled=True))
    with made.tracer.start_as_current_span("outer", kind=SpanKind.SERVER) as outer:
        made.tracer.start_span("inner", attributes={"text": "a\nb", "list": [1, 2]}).end()
        logging.getLogger("program").warning("in the outer span")
    made.meter.create_counter("c").add(1)
    made.shutdown()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    spans = {each["name"]: each for each in found if "kind" in each}
    context = outer.get_span_context()
    assert spans["outer"]["trace_id"] == trace.format_trace_id(context.trace_id)
    assert spans["outer"]["kind"] == "SERVER"
    assert spans["outer"]["parent_id"] is None
    assert spans["outer"]["resource"]["attributes"]["service.name"] == "svc"
    assert spans["inner"]["kind"] == "INTERNAL"
    assert spans["inner"]["parent_id"] == spans["outer"]["span_id"] == trace.format_span_id(context.span_id)
    assert spans["inner"]["attributes"] == {"text": "a\nb", "list": [1, 2]}
    (log,) = [each for each in found if each.get("body") == "in the outer span"]
    assert log["trace_id"] == spans["outer"]["trace_id"]
    assert (log["severity"], log["resource"]["attributes"]["service.name"]) == ("WARN", "svc")
    (metric,) = [each for each in found if "resource_metrics" in each]
    assert metric["resource_metrics"][0]["scope_metrics"][0]["metrics"][0]["name"] == "c"
    assert len(found) == 4


def read_lines(folder: Path, pattern: str) -> list[bytes]:
    (path,) = folder.glob(pattern)
    return path.read_bytes().splitlines()


def test_file_is_otlp_json_in_the_run_directory(tmp_path: Path) -> None:
    config = NemoLensConfig(enabled=True, exporter="file", run_id="r1", logs_enabled=True)
    made = setup_telemetry(config, rank=0)
    remote = SpanContext(0x5AFE << 100, 0xBEEF, True, TraceFlags(1))
    parent = trace.set_span_in_context(NonRecordingSpan(remote))
    span = made.tracer.start_span(
        "s", parent, SpanKind.CLIENT, {"i": 1 << 40, "b": True, "f": 0.5, "l": ["x"], "lone": "\udc80"}, [Link(remote)]
    )
    span.add_event("e", {"k": "v"})
    span.set_status(Status(StatusCode.ERROR, "why"))
    span.end()
    with made.tracer.start_as_current_span("second"):
        logging.getLogger("program").error("bad %d", 1)
    made.meter.create_counter("c").add(5)
    made.shutdown()
    folder = tmp_path / "lens-runs" / "r1"
    assert json.loads((folder / "manifest.json").read_text())["run_id"] == "r1"
    first, second = read_lines(folder, f"services/rank0-{os.getpid()}.jsonl")
    message = parse(first)
    (resource_spans,) = message.resource_spans
    assert {each.key: each.value.string_value for each in resource_spans.resource.attributes}["nemo.run.id"] == "r1"
    (scope_spans,) = resource_spans.scope_spans
    assert scope_spans.scope.name == "nemo.lens"
    (found,) = scope_spans.spans
    assert found.trace_id.hex() == f"{0x5AFE << 100:032x}"
    assert found.parent_span_id.hex() == f"{0xBEEF:016x}"
    assert (found.name, found.kind, found.status.code, found.status.message) == ("s", 3, 2, "why")
    assert found.flags & 0x301 == 0x301  # sampled; its parent is known to be remote
    values = {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in found.attributes}
    assert (values["i"], values["b"], values["f"], values["lone"]) == (1 << 40, True, 0.5, "?")
    assert [each.string_value for each in values["l"].values] == ["x"]
    assert [(each.name, each.attributes[0].value.string_value) for each in found.events] == [("e", "v")]
    assert [each.span_id.hex() for each in found.links] == [f"{0xBEEF:016x}"]
    assert 0 < found.start_time_unix_nano <= found.end_time_unix_nano <= time.time_ns()
    (log,) = [json.loads(line) for line in read_lines(folder, "services/*.logs.jsonl")]
    record = log["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    own = parse(second).resource_spans[0].scope_spans[0].spans[0]
    assert record["body"] == {"stringValue": "bad 1"}
    assert (record["traceId"], record["spanId"]) == (own.trace_id.hex(), own.span_id.hex())
    (metric,) = [json.loads(line) for line in read_lines(folder, "services/*.metrics.jsonl")]
    assert metric["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["name"] == "c"


def test_an_integer_beyond_64_bits_costs_its_attribute_alone_in_a_file(tmp_path: Path) -> None:
    made = setup_telemetry(NemoLensConfig(enabled=True, exporter="file", run_id="r1", metrics_enabled=False))
    made.tracer.start_span("s", attributes={"seed": 1 << 63, "seeds": [1, 1 << 70], "kept": -(1 << 63)}).end()
    made.shutdown()
    (line,) = read_lines(tmp_path / "lens-runs" / "r1", "services/*.jsonl")
    (span,) = parse(line).resource_spans[0].scope_spans[0].spans
    assert [(each.key, each.value.int_value) for each in span.attributes] == [("kept", -(1 << 63))]


def test_every_kind_of_span_is_encoded_as_the_sdk_encodes_it() -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    from lens_auto.sdk_exporters import spans_line

    exporter = InMemorySpanExporter()
    made = set_up(exporter)
    state_of_trace = trace.TraceState([("vendor", "1")])
    remote = SpanContext(7, 8, True, TraceFlags(1), state_of_trace)
    for kind in SpanKind:
        context = trace.set_span_in_context(NonRecordingSpan(remote)) if kind is SpanKind.SERVER else None
        span = made.tracer.start_span(
            kind.name, context, kind, {"n": -1, "inf": float("inf")}, [Link(remote, {"a": 1})]
        )
        span.add_event("event", {"at": [1.0, 2.0]})
        span.set_status(StatusCode.OK)
        span.end()
    made.shutdown()
    spans: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
    expected = encode_spans(spans)
    ours = parse(spans_line(spans))
    # The SDK's encoder (1.45) leaves out the trace flags, the low byte of `flags`, and a link's trace state.
    for span_message in ours.resource_spans[0].scope_spans[0].spans:
        assert span_message.flags & 0x01  # sampled
        span_message.flags &= ~0xFF
        for link in span_message.links:
            assert (link.flags & 0xFF, link.trace_state) == (0x01, "vendor=1")
            link.flags &= ~0xFF
            link.trace_state = ""
    assert len(spans) == 5
    assert ours.resource_spans[0] == expected.resource_spans[0]


# --- the sampler ------------------------------------------------------------------------------------------------------


def kept(sampler: RankAwareSampler, parent: int | None = None) -> bool:
    """Whether a span is kept; `parent` is the sampled flag of its remote parent."""
    context = None
    if parent is not None:
        context = trace.set_span_in_context(NonRecordingSpan(SpanContext(1, 2, True, TraceFlags(parent))))
    return sampler.should_sample(context, 5, "s").decision is Decision.RECORD_AND_SAMPLE


def test_layered_on_the_strategy_the_sampler_decides_anew() -> None:
    ranks, rate = range(4096), 0.5
    strategy = {rank for rank in ranks if is_rank_sampled(rank, rate)}
    alone = {rank for rank in ranks if kept(RankAwareSampler(rank, 4096, rate))}
    layered = {rank for rank in ranks if kept(RankAwareSampler(rank, 4096, rate, layered=True))}
    assert alone == strategy
    # Independent of the strategy: of those that it keeps, the sampler keeps half.
    assert abs(len(layered & strategy) / len(strategy) - rate) < 0.04
    assert abs(len(layered) / 4096 - rate) < 0.04


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # `sampled` keeps ranks 2, 4, 6, 8, 18, 31 of 32 at 0.25; over `all_ranks` the sampler keeps the same.
        ("all_ranks", [2, 4, 6, 8, 18, 31]),
        ("sampled", [rank for rank in (2, 4, 6, 8, 18, 31) if is_rank_sampled(rank + (1 << 40), 0.25)]),
    ],
)
def test_the_sampler_in_use(strategy: str, expected: list[int]) -> None:
    found = []
    for rank in range(32):
        exporter = InMemorySpanExporter()
        config = NemoLensConfig(
            enabled=True,
            metrics_enabled=False,
            export_strategy=strategy,
            sampler_enabled=True,
            export_sample_rate=0.25,
        )
        made = setup_telemetry(config, rank, 32, span_exporter=exporter, _allow_reinit=True)
        with made.tracer.start_as_current_span("s"):
            made.tracer.start_span("child").end()
        made.shutdown()
        if names(exporter):
            assert names(exporter) == ["child", "s"]
            found.append(rank)
    assert found == expected


def test_the_samplers_root_is_otels_and_parents_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(rate: float) -> Any:
        config = NemoLensConfig(enabled=True, metrics_enabled=False, sampler_enabled=True, export_sample_rate=rate)
        setup_telemetry(config, span_exporter=InMemorySpanExporter(), _allow_reinit=True)
        return trace.get_tracer_provider().sampler  # type: ignore[attr-defined]

    keeps_all = in_use(1.0)
    assert (kept(keeps_all), kept(keeps_all, parent=1), kept(keeps_all, parent=0)) == (True, True, False)
    keeps_none = in_use(0.0)
    assert (kept(keeps_none), kept(keeps_none, parent=1), kept(keeps_none, parent=0)) == (False, True, False)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    root_off = in_use(1.0)
    assert (kept(root_off), kept(root_off, parent=1)) == (False, True)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    ratio = in_use(1.0)
    decisions = [ratio.should_sample(None, trace_id, "s").decision for trace_id in (1, (1 << 64) - 1)]
    assert decisions == [Decision.RECORD_AND_SAMPLE, Decision.DROP]


# --- whole programs ---------------------------------------------------------------------------------------------------

FORGETS = """
import sys
from lens_auto import NemoLensConfig, setup_telemetry
handle = setup_telemetry(NemoLensConfig.from_env())
handle.tracer.start_span("ended").end()
open_span = handle.tracer.start_span("left open")
print("main ends", flush=True)
"""


def test_a_program_that_forgets_shutdown(launch: Launcher) -> None:
    with Receiver("http") as receiver:
        program = launch.program(FORGETS)
        environment = {**receiver.environment(), "NEMO_LENS_ENABLED": "1"}
        run = launch.run(*PYTHON, program, env=environment)
        assert (run.code, run.stdout.split()) == (0, ["main", "ends"]), run.stderr
        spans = {span["name"]: span["attributes"] for span in receiver.spans()}
        assert spans == {"ended": {}, "left open": {"nemo.span.truncated": True}}


ADOPTS = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from lens_auto import NemoLensConfig, managed_span, setup_telemetry
config = NemoLensConfig.from_env()
mine = InMemorySpanExporter()
handle = setup_telemetry(config, resource_attributes={"team": "blue"})
assert handle.is_exporting and config.enabled
with handle.tracer.start_as_current_span("by the handle"), managed_span("step", "by a group") as span:
    assert span is not None, "per_step is on under opentelemetry-instrument"
try:
    setup_telemetry(config)
except RuntimeError as error:
    print(type(error).__name__)
handle.shutdown()
with managed_span("job", "after shutdown"):
    pass
"""


def test_under_our_distro_it_adopts_what_runs(launch: Launcher) -> None:
    run = launch.run(*INSTRUMENT, *PYTHON, launch.program(ADOPTS))
    assert (run.code, run.stdout.split()) == (0, ["RuntimeError"]), run.stderr
    (path,) = (run.run_dir / "services").iterdir()
    spans = {}
    for line in path.read_bytes().splitlines():
        (resource_spans,) = parse(line).resource_spans
        resource = {each.key: each.value for each in resource_spans.resource.attributes}
        assert resource["team"].string_value == "blue"
        for span in resource_spans.scope_spans[0].spans:
            spans[span.name] = span
    # What runs goes on after the program's own shutdown: other instrumentations use it too.
    assert set(spans) == {"by the handle", "by a group", "after shutdown"}
    assert spans["by a group"].parent_span_id == spans["by the handle"].span_id
    assert run.lines == [f"lens-auto: spans of this process are in lens-runs/{run.run_dir.name}/services/{path.name}"]


def test_nothing_of_the_sdk_is_imported_before_it_is_needed() -> None:
    script = (
        "import sys, lens_auto; from lens_auto import NemoLensConfig, setup_telemetry;"
        " setup_telemetry(NemoLensConfig()); setup_telemetry(NemoLensConfig(enabled=True), rank=0, world_size=2);"
        " print('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"


FORKS = """
import multiprocessing
import os
from lens_auto import NemoLensConfig, managed_span, setup_telemetry
handle = setup_telemetry(NemoLensConfig(enabled=True, run_id="r"))
handle.meter.create_counter("c").add(1)
def child(name):
    with managed_span("job", name):
        pass
context = multiprocessing.get_context("fork")
process = context.Process(target=child, args=("process",))
process.start()
process.join()
pool = context.Pool(1)
pool.map(child, ["pool"])
pool.close()
pool.join()
child("parent")
"""


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_forked_children_send_their_own_spans_under_their_own_name(launch: Launcher, protocol: Any) -> None:
    with Receiver(protocol) as receiver:
        run = launch.run(*PYTHON, launch.program(FORKS), env=receiver.environment())
        assert (run.code, run.lines) == (0, [])
        assert receiver.counts()["metrics"] == 1  # the parent's; a child's would be the same numbers again
        found = {span["name"]: span["resource"] for span in receiver.spans()}
    assert set(found) == {"process", "pool", "parent"}
    assert len({each["process.pid"] for each in found.values()}) == 3
    host = os.uname().nodename
    for name in ("process", "pool"):
        assert found[name]["service.instance.id"] == f"r-{host}-{found[name]['process.pid']}"
    assert found["parent"]["service.instance.id"] == "r-rank0"


def test_the_run_id_of_a_run_that_has_one_is_told(launch: Launcher) -> None:
    program = """
    from lens_auto import NemoLensConfig, setup_telemetry
    setup_telemetry(NemoLensConfig(enabled=True, run_id="mine"))
    """
    run = launch.instrumented(program, env={"NEMO_LENS_RUN_ID": "theirs"})
    assert run.lines == [
        "lens-auto: run_id='mine' of setup_telemetry is not used, this run is 'theirs' already;"
        " set NEMO_LENS_RUN_ID=mine before the start"
    ]
    assert launch.instrumented(program, env={"NEMO_LENS_RUN_ID": "mine"}).lines == []


@pytest.mark.parametrize("by_variable", [True, False])
def test_an_adopted_rank_whose_console_stays_empty_does_not_export(launch: Launcher, by_variable: bool) -> None:
    program = f"""
    from lens_auto import NemoLensConfig, managed_span, setup_telemetry
    config = NemoLensConfig(enabled=True, exporter="{"otlp" if by_variable else "console"}")
    handle = setup_telemetry(config, rank=1, world_size=4)
    with managed_span("job", "s") as span:
        print(handle.is_exporting, span)
    """
    run = launch.instrumented(program, env={"NEMO_LENS_EXPORTER": "console" if by_variable else None})
    assert (run.stdout, run.run_dirs) == ("False None\n", [])


@pytest.mark.parametrize("instrumented", [True, False])
def test_an_sdk_that_cannot_be_imported_costs_one_line(launch: Launcher, instrumented: bool) -> None:
    program = """
    from lens_auto import NemoLensConfig, managed_span, setup_telemetry
    config = NemoLensConfig(enabled=True, sampler_enabled=True)
    handle = setup_telemetry(config, resource_attributes={"team": "blue"})
    with managed_span("job", "s"):
        handle.meter.create_counter("c").add(1)
    handle.shutdown()
    print("trained")
    """
    command = (*INSTRUMENT, *PYTHON) if instrumented else PYTHON
    run = launch.run(*command, launch.program(program), env={"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-3"})
    assert (run.code, run.stdout) == (0, "trained\n"), run.stderr
    (line,) = run.lines
    assert line.startswith("lens-auto: ") or instrumented, line
    assert "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer but got -3" in line


def test_what_an_adopted_shutdown_leaves_is_not_called_lost(launch: Launcher) -> None:
    program = """
    from lens_auto import NemoLensConfig, managed_span, setup_telemetry
    handle = setup_telemetry(NemoLensConfig(enabled=True))
    with managed_span("job", "s"):
        pass
    handle.shutdown(300)
    """
    with Receiver("grpc", down=True) as receiver:
        environment = {
            **receiver.environment(),
            "NEMO_LENS_EXIT_TIMEOUT_S": "1",
            "NEMO_LENS_RUN_ID": "r",
            "OTEL_METRICS_EXPORTER": "none",
        }
        run = launch.instrumented(program, env=environment)
    (line,) = [line for line in run.lines if "not all sent within 300 ms" in line]
    assert "lost" not in line
    assert "kept in lens-runs/r (*unsent.jsonl), from where lens-auto recover sends them" in line
    assert list((run.run_dir / "services").glob("*.unsent.jsonl"))


@pytest.mark.parametrize("variable", ["NEMO_LENS_DISABLED", "OTEL_SDK_DISABLED"])
def test_switched_off_nothing_is_said_about_the_run_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setenv(variable, "true")
    setup_telemetry(NemoLensConfig(enabled=True), rank=0, world_size=2)
    assert caplog.records == []
