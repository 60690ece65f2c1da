"""Spans that programs and services made themselves: the report counts them, `recover` and `export` send them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from export_node import Node, rank
from launch import SCRIPTS, Launcher
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from receiver import PROTOCOLS, Receiver
from reports import summary_of
from synthetic import write_run

from lens_auto import sdk_exporters
from lens_auto.export import programs, send
from lens_auto.recorder import layout
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.services import find_programs
from lens_auto.report.text import console, footer, render

GONE = f"{socket.gethostname()}-{(1 << 22) + 1}"  # a process of this host that cannot be
REMOTE = SpanContext(int("a" * 32, 16), int("b" * 16, 16), True, TraceFlags(1))


def make_spans(service: str, count: int) -> list[ReadableSpan]:
    """Spans with everything that a span can have; every third failed."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": service, "host.name": "here"}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("program", "1.2")
    for index in range(count):
        with tracer.start_as_current_span("outer") as outer:
            attributes = {"index": index, "ratio": 0.5, "names": ["a", "b"], "on": True}
            span = tracer.start_span(
                f"{service} {index}", kind=SpanKind.CLIENT, attributes=attributes, links=[Link(REMOTE, {"why": "test"})]
            )
            span.add_event("happened", {"how": "well"})
            if index % 3 == 0:
                span.set_status(Status(StatusCode.ERROR, "no"))
            span.end()
            assert outer.is_recording()
    return list(memory.get_finished_spans())


def put(run_dir: Path, name: str, spans: list[ReadableSpan], at_once: int = 4, extra: bytes = b"") -> Path:
    """A file with so many spans a line."""
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [sdk_exporters.spans_line(spans[first : first + at_once]) for first in range(0, len(spans), at_once)]
    path.write_bytes(b"".join(lines) + extra)
    return path


def ids(spans: list[ReadableSpan]) -> list[str]:
    return sorted(f"{span.context.span_id:016x}" for span in spans if span.context is not None)


@contextmanager
def sending_to(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in receiver.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(programs, "PATIENCE_S", 0.5)
    yield


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_counts_them(tmp_path: Path) -> None:
    writer = rank()
    run_dir = write_run(tmp_path / "run", writer)
    put(run_dir, f"services/{GONE}.jsonl", make_spans("agent", 6))
    put(run_dir, f"services/{GONE}.old.jsonl", make_spans("agent", 3))
    put(run_dir, f"services/{GONE}.unsent.jsonl", make_spans("agent", 2))
    put(run_dir, "services/other-7.jsonl", make_spans("model", 1), extra=b'{"resourceSp')
    put(run_dir, f"ranks/{writer.name}/spans.jsonl", make_spans("gpt", 5))
    log = {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": [{}, {}, {}]}]}]}
    (run_dir / f"services/{GONE}.logs.jsonl").write_text(json.dumps(log) + "\n")
    (run_dir / f"services/{GONE}.metrics.jsonl").write_text("{}\n")
    found = {each.process: each for each in summary_of(run_dir).programs}
    assert set(found) == {GONE, "other-7", writer.name}
    agent, model, own = found[GONE], found["other-7"], found[writer.name]
    # Each of these is a pair: the span, and the one around it.
    assert (agent.service, agent.spans, agent.failed, agent.unsent, agent.log_records) == ("agent", 22, 4, 4, 3)
    assert (model.service, model.spans, model.damaged_lines) == ("model", 2, 1)
    assert (own.service, own.rank, own.spans) == ("gpt", 0, 10)
    assert len(agent.files) == 4


def test_the_tables_say_what_was_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", rank())
    put(run_dir, f"services/{GONE}.unsent.jsonl", make_spans("agent", 2))
    summary = summary_of(run_dir)
    assert summary.verdict.startswith("rank 1 missing of 2; 4 spans of programs not sent; ")
    assert any(line.endswith(f"lens-auto recover {run_dir}") for line in footer(summary))
    render(summary, console())
    printed = capsys.readouterr().out
    assert "Spans that programs made themselves" in printed
    assert " ".join(next(line for line in printed.splitlines() if "agent" in line).split()) == f"agent {GONE} 4 1 4 0"


def test_a_run_of_services_alone(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    assert summary_of(run_dir).verdict == "no rank recorded anything"
    put(run_dir, "services/a-1.jsonl", make_spans("agent", 3))
    assert summary_of(run_dir).verdict == "no rank; 1 service made 6 spans"
    done = subprocess.run(
        [str(SCRIPTS / "lens-auto"), "report", "--json", str(run_dir)], capture_output=True, text=True, timeout=60
    )
    (program,) = json.loads(done.stdout)["programs"]
    assert (program["service"], program["spans"], program["files"]) == ("agent", 6, ["services/a-1.jsonl"])


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    process = subprocess.Popen(["sleep", "60"])
    try:
        put(run_dir, f"services/{socket.gethostname()}-{process.pid}.jsonl", make_spans("a", 1), extra=b'{"resou')
        (program,) = find_programs(RunDirectory(run_dir))
        assert (program.spans, program.damaged_lines) == (2, 0)
    finally:
        process.kill()
        process.wait()


# --- recover ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_recover_sends_what_was_not_sent(tmp_path: Path, protocol: Any) -> None:
    """With the spans of a rank beside it; every part of a span arrives as it was, and nothing is left to send."""
    node = Node(tmp_path, rank())
    recorded = {(span.trace_id.hex(), span.span_id.hex()) for span in node.recorded()}
    spans = make_spans("agent", 10)
    unsent = put(node.run_dir, f"services/{GONE}.unsent.jsonl", spans)
    kept = put(node.run_dir, f"services/{GONE}.jsonl", make_spans("agent", 2))
    own = make_spans("gpt", 3)
    put(node.run_dir, f"{layout.RANKS_DIR}/{node.writers[0].name}/unsent.jsonl", own)
    with Receiver(protocol) as receiver:
        done = node.recover({**receiver.environment(), "OTEL_METRICS_EXPORTER": "none"})
        assert done.returncode == 0, done.stderr
        assert f"{len(recorded) + 26:,} spans sent" in done.stderr
        found = {(span["trace_id"], span["span_id"]): span for span in receiver.spans()}
        assert len(found) == len(receiver.spans()) == len(recorded) + 26
        again = node.recover(receiver.environment())
        assert "0 spans sent" in again.stderr
        assert len(receiver.spans()) == len(found)
    assert not unsent.exists() and kept.exists()
    assert [path.name for path in node.run_dir.rglob("*.sent")] == []
    for span in spans:
        assert span.context is not None
        there = found[f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"]
        assert there["name"] == span.name
        assert there["attributes"] == {
            key: list(value) if isinstance(value, tuple) else value for key, value in (span.attributes or {}).items()
        }
        assert (there["start_ns"], there["end_ns"]) == (span.start_time, span.end_time)
        assert there["parent_id"] == (None if span.parent is None else f"{span.parent.span_id:016x}")
        assert there["resource"] == {"service.name": "agent", "host.name": "here"}
        assert (there["scope"]["name"], there["scope"]["version"]) == ("program", "1.2")
        if span.name != "outer":
            assert there["kind"] == 3  # CLIENT
            assert [(link["span_id"], link["attributes"]) for link in there["links"]] == [("b" * 16, {"why": "test"})]
            assert [(event["name"], event["attributes"]) for event in there["events"]] == [
                ("happened", {"how": "well"})
            ]
            assert there["status_code"] == (2 if span.status.status_code is StatusCode.ERROR else 0)


def test_recover_goes_on_where_the_endpoint_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "run")
    spans = make_spans("agent", 10)
    path = put(run_dir, f"services/{GONE}.unsent.jsonl", spans, at_once=2)
    seen = 0

    def stop(count: int) -> None:
        nonlocal seen
        seen += count
        if seen == 8:
            receiver.down()

    with Receiver("http") as receiver, sending_to(receiver, monkeypatch):
        with pytest.raises(send.NotSent, match=r"took 8 spans, 12 .* left: "):
            send.recover(RunDirectory(run_dir), stop)
        assert path.exists()
        assert summary_of(run_dir).verdict.startswith("12 spans of programs not sent")
        receiver.up()
        assert send.recover(RunDirectory(run_dir), lambda count: None).spans == 12
        assert sorted(receiver.span_ids()) == ids(spans)
        assert set(receiver.span_ids().values()) == {1}
    assert list((run_dir / "services").iterdir()) == []


def test_what_is_refused_or_damaged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "run")
    spans = make_spans("agent", 4)
    path = put(run_dir, f"services/{GONE}.unsent.jsonl", spans, at_once=2, extra=b'{"resourceSpans": [{\n')
    first = path.read_bytes().splitlines(keepends=True)[0]
    with Receiver("http") as receiver, sending_to(receiver, monkeypatch):
        receiver.status(400, times=1)
        with pytest.raises(send.NotSent, match="took 6 spans, 2 "):
            send.recover(RunDirectory(run_dir), lambda count: None)
        assert path.read_bytes() == first + b'{"resourceSpans": [{\n'
        assert send.recover(RunDirectory(run_dir), lambda count: None) == send.Sent(2, 0, 0, damaged=1)
        assert sorted(receiver.span_ids()) == ids(spans)
    assert path.read_bytes() == b'{"resourceSpans": [{\n'


def test_an_integer_of_more_than_64_bits_costs_its_attribute_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files that others wrote, or earlier versions of ours."""
    run_dir = write_run(tmp_path / "run")
    spans = make_spans("agent", 1)
    path = put(run_dir, f"services/{GONE}.unsent.jsonl", spans)
    message = json.loads(path.read_bytes())
    (first, _) = message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    first["attributes"] = [
        {"key": "seed", "value": {"intValue": str(1 << 63)}},
        {"key": "seeds", "value": {"arrayValue": {"values": [{"intValue": 1 << 70}]}}},
        {"key": "kept", "value": {"intValue": "-9223372036854775808"}},
    ]
    path.write_text(json.dumps(message) + "\n")
    with Receiver("http") as receiver, sending_to(receiver, monkeypatch):
        assert send.recover(RunDirectory(run_dir), lambda count: None) == send.Sent(2, 0, 0)
        assert sorted(receiver.span_ids()) == ids(spans)
        assert [span["attributes"] for span in receiver.spans() if span["name"] == "agent 0"] == [{"kept": -(1 << 63)}]
    assert not path.exists()


def test_a_program_that_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "run")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        path = put(run_dir, f"services/{socket.gethostname()}-{process.pid}.unsent.jsonl", make_spans("agent", 1))
        with Receiver("http") as receiver, sending_to(receiver, monkeypatch):
            done = send.recover(RunDirectory(run_dir), lambda count: None)
            assert (done.spans, done.running) == (0, 1)
            process.kill()
            process.wait()
            assert send.recover(RunDirectory(run_dir), lambda count: None) == send.Sent(2, 0, 0)
            assert receiver.span_count == 2
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


# --- export -----------------------------------------------------------------------------------------------------------


def test_export_over_otlp_sends_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(tmp_path / "run", rank())
    spans = make_spans("agent", 3)
    path = put(run_dir, f"services/{GONE}.jsonl", spans, extra=b'{"resourceSpans": [')
    before = path.read_bytes()
    with Receiver("grpc") as receiver, sending_to(receiver, monkeypatch):
        done = send.send_run(RunDirectory(run_dir), lambda count: None)
        assert (done.spans, done.damaged) == (receiver.span_count, 1)
        assert set(ids(spans)) <= set(receiver.span_ids())
        assert len(receiver.span_ids()) > len(spans)
    assert path.read_bytes() == before


def test_export_as_lines_holds_them_too(tmp_path: Path) -> None:
    """As they are; what is being written, or damaged, is not among them."""
    run_dir = write_run(tmp_path / "run", rank())
    path = put(run_dir, f"services/{GONE}.jsonl", make_spans("agent", 3), extra=b'{"resourceSpans": [')
    out = tmp_path / "out.jsonl"
    command = [str(SCRIPTS / "lens-auto"), "export", str(run_dir), "--to", "otlp-json", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "lens-auto: 1 damaged line in the files of programs left out" in " ".join(done.stderr.split())
    lines = out.read_bytes().splitlines()
    assert lines[-2:] == path.read_bytes().splitlines()[:2]
    assert len(lines) > 2
    for line in lines:
        assert json.loads(line)["resourceSpans"]
    others = tmp_path / "console.jsonl"
    command[4:] = ["console", "-o", str(others)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert b"agent" not in others.read_bytes()


# --- a real program ---------------------------------------------------------------------------------------------------


def test_a_program_whose_endpoint_was_away(launch: Launcher) -> None:
    """From the program's end to the endpoint that came back."""
    program = """
    from opentelemetry import trace
    for number in range(20):
        trace.get_tracer("t").start_span(f"span {number}").end()
    """
    with Receiver("http", down=True) as receiver:
        environment = {**receiver.environment(), "NEMO_LENS_EXIT_TIMEOUT_S": "1", "OTEL_METRICS_EXPORTER": "none"}
        run = launch.instrumented(program, env=environment)
        assert run.code == 0, run.stderr
        assert summary_of(run.run_dir).verdict == "20 spans of programs not sent; no rank; 1 service made 20 spans"
        receiver.up()
        done = launch.run(str(SCRIPTS / "lens-auto"), "recover", str(run.run_dir), env=environment)
        assert done.code == 0, done.stderr
        assert {span["name"] for span in receiver.spans()} == {f"span {number}" for number in range(20)}
    assert summary_of(run.run_dir).verdict == "no rank recorded anything"
