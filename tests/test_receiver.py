"""The OTLP receiver of these tests: what stock exporters see of it, and what it counts, in every state."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from export_node import wait_until
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from receiver import PROTOCOLS, Certificate, Protocol, Receiver, make_certificate, plain_spans

ROOT = Path(__file__).parent.parent
FAULTS: dict[str, Callable[[Receiver], None]] = {
    "ok": Receiver.ok,
    "down": Receiver.down,
    "hang": Receiver.hang,
    "reset": Receiver.reset,
    "wrong_protocol": Receiver.wrong_protocol,
    "status": lambda receiver: receiver.status(503, retry_after_s=30),
    "slow": lambda receiver: receiver.slow(30),
    "drop_after_accept": Receiver.drop_after_accept,
}

both = pytest.mark.parametrize("protocol", PROTOCOLS)


@pytest.fixture(autouse=True)
def no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "GRPC_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # they win over an exporter's certificate_file
        monkeypatch.delenv(name, raising=False)
    # What the exporters say about every failed attempt is no news here.
    for name in ("grpc", "http"):
        monkeypatch.setattr(logging.getLogger(f"opentelemetry.exporter.otlp.proto.{name}"), "disabled", True)


def make_spans(count: int) -> list[ReadableSpan]:
    """Ended spans of the SDK."""
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "test"}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for index in range(count):
        provider.get_tracer("tracer").start_span(f"span {index}").end()
    provider.shutdown()
    return list(memory.get_finished_spans())


def ids(spans: list[ReadableSpan]) -> list[str]:
    return [f"{span.context.span_id:016x}" for span in spans]


@contextlib.contextmanager
def exporter(receiver: Receiver, timeout_s: float = 5.0, **options: Any) -> Iterator[SpanExporter]:
    """The stock exporter for a receiver."""
    kind = HttpSpanExporter if receiver.protocol == "http" else GrpcSpanExporter
    made = kind(endpoint=receiver.traces_endpoint, timeout=timeout_s, **options)
    try:
        yield made
    finally:
        made.shutdown()


def export(receiver: Receiver, spans: list[ReadableSpan], timeout_s: float = 5.0, **options: Any) -> bool:
    """Send with an exporter of its own; whether it says that it succeeded."""
    with exporter(receiver, timeout_s, **options) as made:
        return made.export(spans) is SpanExportResult.SUCCESS


def connect(receiver: Receiver) -> socket.socket:
    return socket.create_connection(("127.0.0.1", receiver.port), 2)


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the other side closes; a gRPC server begins with its settings."""
    connection.settimeout(2)
    received = b""
    while part := connection.recv(4096):
        received += part
    return received


def outcomes(receiver: Receiver) -> list[str]:
    return [request.outcome for request in receiver.requests()]


# --- what it keeps ----------------------------------------------------------------------------------------------------


@both
def test_a_span_in_full(protocol: Protocol) -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "test", "rank": 3}))
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("tracer", "1.2", attributes={"of": "scope"})
    parent = tracer.start_span("parent", start_time=1_000)
    link = Link(SpanContext(0xABC, 0xDEF, is_remote=True), {"why": "linked"})
    child = tracer.start_span(
        "child",
        set_span_in_context(parent),
        kind=SpanKind.CLIENT,
        attributes={"text": "a", "int": -5, "float": 0.5, "bool": True, "list": [1, 2], "empty": ""},
        links=[link],
        start_time=2_000,
    )
    child.add_event("event", {"number": 7}, timestamp=2_500)
    child.set_status(Status(StatusCode.ERROR, "broken"))
    child.end(3_000)
    parent.end(4_000)

    before_ns = time.time_ns()
    with Receiver(protocol) as receiver:
        assert export(receiver, list(memory.get_finished_spans()), headers={"x-test": "yes"})
        spans = receiver.spans()
        (request,) = receiver.requests()
    context = parent.get_span_context()
    assert spans[0] == {
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{child.get_span_context().span_id:016x}",
        "parent_id": f"{context.span_id:016x}",
        "name": "child",
        "kind": 3,
        "start_ns": 2_000,
        "end_ns": 3_000,
        "attributes": {"text": "a", "int": -5, "float": 0.5, "bool": True, "list": [1, 2], "empty": ""},
        "links": [{"trace_id": f"{0xABC:032x}", "span_id": f"{0xDEF:016x}", "attributes": {"why": "linked"}}],
        "events": [{"name": "event", "time_ns": 2_500, "attributes": {"number": 7}}],
        "status_code": 2,
        "status_message": "broken",
        "resource": {"service.name": "test", "rank": 3},
        "scope": {"name": "tracer", "version": "1.2", "attributes": {"of": "scope"}},
    }
    assert [(span["name"], span["parent_id"], type(span["attributes"])) for span in spans] == [
        ("child", spans[1]["span_id"], dict),
        ("parent", None, dict),
    ]
    assert request.signal == "traces"
    assert request.items == 2
    assert request.outcome == "accepted"
    assert request.headers["x-test"] == "yes"
    assert before_ns <= request.time_ns <= time.time_ns()


@both
@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compression(protocol: Protocol, compression: str) -> None:
    if protocol == "grpc" and compression == "deflate":
        pytest.skip("the stock gRPC exporter offers gzip only")
    option = grpc.Compression.Gzip if protocol == "grpc" else Compression(compression)
    spans = make_spans(50)
    with Receiver(protocol) as receiver:
        assert export(receiver, spans, compression=option)
        assert [span["span_id"] for span in receiver.spans()] == ids(spans)
        (request,) = receiver.requests()
    if protocol == "http":
        assert request.headers["content-encoding"] == compression
        assert int(request.headers["content-length"]) < request.size_bytes


@both
def test_metrics_and_logs_are_counted(protocol: Protocol) -> None:
    with Receiver(protocol) as receiver:
        if protocol == "http":
            metrics: Any = HttpMetricExporter(endpoint=f"{receiver.endpoint}/v1/metrics")
        else:
            metrics = GrpcMetricExporter(endpoint=receiver.endpoint)
        provider = MeterProvider([PeriodicExportingMetricReader(metrics, float("inf"))], Resource({}))
        for name in ("one", "two"):
            provider.get_meter("meter").create_counter(name).add(1)
        assert provider.force_flush(5_000)
        provider.shutdown()

        logs = logs_service_pb2.ExportLogsServiceRequest()
        scope = logs.resource_logs.add().scope_logs.add()
        for _ in range(3):
            scope.log_records.add()
        if protocol == "http":
            assert post(receiver, "/v1/logs", logs.SerializeToString()).status == 200
        else:
            with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
                logs_service_pb2_grpc.LogsServiceStub(channel).Export(logs, timeout=5)
        counts = receiver.counts()
        assert receiver.spans() == []
    assert (counts["metrics"], counts["logs"], counts["spans"], counts["accepted"]) == (2, 3, 0, 2)


@both
def test_doubles_are_seen(protocol: Protocol) -> None:
    first, second = make_spans(2)
    with Receiver(protocol) as receiver, exporter(receiver) as made:
        made.export([first, second])
        made.export([first])
        assert receiver.span_ids() == Counter(ids([first, second, first]))
        assert receiver.span_count == 3
        assert receiver.connections == 1


@both
def test_wait_for(protocol: Protocol) -> None:
    spans = make_spans(5)
    with Receiver(protocol) as receiver:
        with pytest.raises(TimeoutError, match=r"^0 of 5 spans after 0\.05 s$"):
            receiver.wait_for(5, timeout_s=0.05)
        sender = threading.Thread(target=lambda: [export(receiver, [span]) for span in spans])
        sender.start()
        assert [span["span_id"] for span in receiver.wait_for(5)] == ids(spans)
        sender.join()


@both
def test_a_large_request_passes(protocol: Protocol) -> None:
    spans = make_spans(1)
    request = trace_service_pb2.ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for index in range(2_000):
        scope.spans.add(name="x" * 4_000, span_id=index.to_bytes(8, "big"), trace_id=bytes(16))
    with Receiver(protocol) as receiver:
        if protocol == "http":
            assert post(receiver, "/v1/traces", request.SerializeToString()).status == 200
        else:
            with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
                trace_service_pb2_grpc.TraceServiceStub(channel).Export(request, timeout=5)
        assert receiver.span_count == 2_000
        assert receiver.spans() == plain_spans(request)
        assert export(receiver, spans)


def post(
    receiver: Receiver, path: str, body: bytes, *, kind: str = "application/x-protobuf", encoding: str = "identity"
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=5)
    sent = {"Content-Type": kind, "Content-Encoding": encoding}
    connection.request("POST", path, body, sent)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


def test_http_requests_that_are_not_otlp() -> None:
    with Receiver("http") as receiver:
        assert post(receiver, "/v1/nothing", b"").status == 404
        assert post(receiver, "/traces", b"").status == 404
        assert post(receiver, "/v1/traces", b"{}", kind="application/json").status == 415
        assert post(receiver, "/v1/traces", b"", encoding="br").status == 415
        assert post(receiver, "/v1/traces", b"\xff\xff").status == 400
        assert post(receiver, "/v1/traces", b"no gzip", encoding="gzip").status == 400
        assert post(receiver, "/v1/traces", gzip.compress(b"")[:-4], encoding="gzip").status == 400
        assert receiver.requests() == []


# --- faults -----------------------------------------------------------------------------------------------------------


@both
def test_down_and_up_again(protocol: Protocol) -> None:
    lost, kept, last = make_spans(3)
    with Receiver(protocol, down=True) as receiver:
        assert receiver.fault == "down"
        with pytest.raises(ConnectionRefusedError):
            connect(receiver)
        assert not export(receiver, [lost], timeout_s=0.3)
        receiver.up()
        assert export(receiver, [kept])
        port, before = receiver.port, receiver.connections
        with connect(receiver) as idle:
            receiver.down()
            assert b"HTTP" not in read_to_end(idle)
        with pytest.raises(ConnectionRefusedError):
            connect(receiver)
        assert not export(receiver, [lost], timeout_s=0.3)
        receiver.up()
        assert receiver.port == port
        assert export(receiver, [last])
        assert receiver.span_ids() == Counter(ids([kept, last]))
        assert receiver.connections == before + 2


@both
def test_hang(protocol: Protocol) -> None:
    first, lost, again, last = make_spans(4)
    with Receiver(protocol) as receiver, exporter(receiver, timeout_s=0.5) as old:
        assert old.export([first]) is SpanExportResult.SUCCESS
        receiver.hang()
        start = time.monotonic()
        assert not export(receiver, [lost], timeout_s=0.3)
        assert old.export([again]) is SpanExportResult.FAILURE  # also on the connection that was open before
        assert 0.5 < time.monotonic() - start < 4
        with connect(receiver) as silent:
            silent.settimeout(0.1)
            with pytest.raises(TimeoutError):
                silent.recv(1)
        assert outcomes(receiver) == ["accepted"]
        receiver.ok()
        assert export(receiver, [last])
        assert receiver.span_ids() == Counter(ids([first, last]))


@both
def test_reset(protocol: Protocol) -> None:
    first, lost, last = make_spans(3)
    with Receiver(protocol) as receiver, exporter(receiver, timeout_s=0.5) as old:
        assert old.export([first]) is SpanExportResult.SUCCESS
        with connect(receiver) as open_before:
            while receiver.connections < 2:
                time.sleep(0.01)
            before = receiver.connections
            receiver.reset()
            with pytest.raises(ConnectionResetError):
                read_to_end(open_before)
        with pytest.raises(ConnectionResetError), connect(receiver) as refused:
            read_to_end(refused)

        def tried_again() -> bool:
            # A call can still go out on the connection that was reset, and fail with it; the next one connects.
            assert old.export([lost]) is SpanExportResult.FAILURE
            return receiver.connections > before + 1  # the one above, and the exporter's

        wait_until(tried_again)
        receiver.ok()
        assert export(receiver, [last])
        assert receiver.span_ids() == Counter(ids([first, last]))


@both
@pytest.mark.parametrize("code", [429, 503])
def test_status_with_a_time_to_retry(protocol: Protocol, code: int) -> None:
    spans = make_spans(3)
    with Receiver(protocol) as receiver:
        receiver.status(code, retry_after_s=0.15, times=2)
        assert receiver.fault == "status"
        start = time.monotonic()
        assert export(receiver, spans)
        assert 0.3 <= time.monotonic() - start < 4
        assert receiver.fault == "ok"
        assert outcomes(receiver) == ["refused", "refused", "accepted"]
        assert receiver.span_ids() == Counter(ids(spans))


@both
def test_status_for_as_long_as_it_is_set(protocol: Protocol) -> None:
    lost, kept = make_spans(2)
    with Receiver(protocol) as receiver, exporter(receiver, timeout_s=0.5) as made:
        receiver.status(503, retry_after_s=30)
        assert made.export([lost]) is SpanExportResult.FAILURE
        receiver.status(400)
        assert made.export([lost]) is SpanExportResult.FAILURE
        assert outcomes(receiver) == ["refused", "refused"]
        receiver.ok()
        assert made.export([kept]) is SpanExportResult.SUCCESS
        assert receiver.span_ids() == Counter(ids([kept]))


def test_what_a_refusal_says() -> None:
    with Receiver("http") as receiver:
        receiver.status(429, retry_after_s=7)
        assert post(receiver, "/v1/traces", b"").getheader("Retry-After") == "7"
        receiver.status(503)
        response = post(receiver, "/v1/traces", b"")
        assert (response.status, response.getheader("Retry-After")) == (503, None)
    expected = {429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE}
    with Receiver("grpc") as receiver, grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
        stub = trace_service_pb2_grpc.TraceServiceStub(channel)
        for code, name in expected.items():
            receiver.status(code, retry_after_s=1.5)
            with pytest.raises(grpc.RpcError) as raised:
                stub.Export(trace_service_pb2.ExportTraceServiceRequest(), timeout=5)
            assert raised.value.code() is name
            metadata = dict(raised.value.trailing_metadata())
            # RetryInfo: field 1 is a Duration of 1 s (08 01) and 500,000,000 ns.
            assert metadata["google.rpc.retryinfo-bin"].hex() == "0a0808011080cab5ee01"
            assert b"type.googleapis.com/google.rpc.RetryInfo" in metadata["grpc-status-details-bin"]


@both
def test_slow(protocol: Protocol) -> None:
    spans = make_spans(5)
    with Receiver(protocol) as receiver:
        receiver.slow(0.08)
        start = time.monotonic()
        assert export(receiver, spans)
        assert 0.4 <= time.monotonic() - start < 4
        assert receiver.span_ids() == Counter(ids(spans))


@both
def test_a_client_that_gives_up_on_a_slow_one_has_sent_nothing(protocol: Protocol) -> None:
    spans = make_spans(5)
    with Receiver(protocol) as receiver, exporter(receiver, timeout_s=0.2) as made:
        receiver.slow(0.1)
        assert made.export(spans) is SpanExportResult.FAILURE
        time.sleep(0.5)
        assert receiver.spans() == []
        assert set(outcomes(receiver)) == {"abandoned"}


@both
def test_wrong_protocol(protocol: Protocol) -> None:
    first, lost, last = make_spans(3)
    with Receiver(protocol) as receiver, exporter(receiver, timeout_s=0.5) as old:
        assert old.export([first]) is SpanExportResult.SUCCESS
        receiver.wrong_protocol()
        assert old.export([lost]) is SpanExportResult.FAILURE
        assert not export(receiver, [lost], timeout_s=0.5)
        # It really speaks the other one, and takes nothing in it.
        if protocol == "grpc":
            assert post(receiver, "/v1/traces", b"").status == 404
        else:
            with grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
                with pytest.raises(grpc.RpcError) as raised:
                    trace_service_pb2_grpc.TraceServiceStub(channel).Export(
                        trace_service_pb2.ExportTraceServiceRequest(), timeout=5
                    )
                assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        receiver.ok()
        assert export(receiver, [last])
        assert receiver.span_ids() == Counter(ids([first, last]))


@pytest.mark.parametrize(("sender", "protocol"), [(GrpcSpanExporter, "http"), (HttpSpanExporter, "grpc")])
def test_an_exporter_of_the_other_protocol(sender: Any, protocol: Protocol) -> None:
    with Receiver(protocol) as receiver:
        made = sender(endpoint=f"{receiver.endpoint}/v1/traces", timeout=0.5)
        assert made.export(make_spans(1)) is SpanExportResult.FAILURE
        made.shutdown()
        assert receiver.counts() | {"connections": 0} == dict.fromkeys(receiver.counts(), 0)


@both
def test_drop_after_accept(protocol: Protocol) -> None:
    spans, more = make_spans(3), make_spans(2)
    with Receiver(protocol) as receiver:
        receiver.drop_after_accept()
        assert not export(receiver, spans, timeout_s=0.5)
        dropped = len(receiver.requests())
        assert dropped >= 1
        assert outcomes(receiver) == ["dropped"] * dropped
        assert receiver.span_ids() == Counter(ids(spans) * dropped)
        # Once, and the exporter's next attempt makes the double.
        receiver.drop_after_accept(times=1)
        assert export(receiver, more)
        assert outcomes(receiver) == ["dropped"] * (dropped + 1) + ["accepted"]
        assert receiver.span_ids() == Counter(ids(spans) * dropped + ids(more) * 2)


@both
def test_changes_under_load_leave_no_doubt(protocol: Protocol) -> None:
    """What the exporter was told is what was stored, whenever the fault changed; nothing is stored twice."""
    told: Counter[str] = Counter()
    refused: list[str] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            with exporter(receiver, timeout_s=0.5) as made:
                for _ in range(20):
                    spans = make_spans(2)
                    if made.export(spans) is SpanExportResult.SUCCESS:
                        told.update(ids(spans))
                    else:
                        refused.extend(ids(spans))
                        break

    with Receiver(protocol) as receiver:
        senders = [threading.Thread(target=send) for _ in range(3)]
        for sender in senders:
            sender.start()
        for name in ("down", "reset", "hang", "wrong_protocol", "status") * 2:
            receiver.wait_for(receiver.span_count + 20)
            FAULTS[name](receiver)
            time.sleep(0.05)
            receiver.ok()
        stop.set()
        for sender in senders:
            sender.join()
        assert receiver.span_ids() == told
        assert set(told.values()) == {1}
        assert len(refused) > 0
        assert receiver.counts()["dropped"] == 0


# --- TLS --------------------------------------------------------------------------------------------------------------


def trusting(protocol: Protocol, certificate: Path) -> dict[str, Any]:
    """The exporter's options to trust a certificate."""
    if protocol == "http":
        return {"certificate_file": str(certificate)}
    return {"credentials": grpc.ssl_channel_credentials(certificate.read_bytes())}


@pytest.fixture(scope="module")
def other_certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("other"))


@both
def test_tls(protocol: Protocol, other_certificate: Certificate) -> None:
    kept, lost, last = make_spans(3)
    with Receiver(protocol, tls=True) as receiver:
        assert receiver.certificate is not None
        assert receiver.endpoint.startswith("https://127.0.0.1:")
        right, wrong = (trusting(protocol, path) for path in (receiver.certificate, other_certificate.certificate))
        assert export(receiver, [kept], **right)
        assert not export(receiver, [lost], timeout_s=0.5, **wrong)
        plain = HttpSpanExporter if protocol == "http" else GrpcSpanExporter
        without = plain(endpoint=receiver.traces_endpoint.replace("https", "http"), timeout=0.5)
        assert without.export([lost]) is SpanExportResult.FAILURE
        without.shutdown()
        receiver.wrong_protocol()
        assert not export(receiver, [lost], timeout_s=0.5, **right)
        receiver.ok()
        assert export(receiver, [last], **right)
        assert receiver.span_ids() == Counter(ids([kept, last]))
    assert not receiver.certificate.exists()


@both
def test_a_client_with_tls_and_a_receiver_without(protocol: Protocol, other_certificate: Certificate) -> None:
    (lost,) = make_spans(1)
    with Receiver(protocol) as receiver:
        kind = HttpSpanExporter if protocol == "http" else GrpcSpanExporter
        made = kind(
            endpoint=receiver.traces_endpoint.replace("http", "https", 1),
            timeout=0.5,
            **trusting(protocol, other_certificate.certificate),
        )
        assert made.export([lost]) is SpanExportResult.FAILURE
        made.shutdown()
        assert receiver.spans() == []
        assert receiver.connections >= 1


# --- its end ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_it_ends_in_every_state(protocol: Protocol, tls: bool, fault: str) -> None:
    """Within 2 s, with a silent client and one in the middle of an export; no thread of it stays."""
    before = set(threading.enumerate())
    receiver = Receiver(protocol, tls=tls)
    FAULTS[fault](receiver)
    options = trusting(protocol, receiver.certificate) if receiver.certificate else {}
    with exporter(receiver, timeout_s=1.5, **options) as made, contextlib.ExitStack() as clients:
        if fault not in ("down", "reset"):
            clients.enter_context(connect(receiver))
        sender = threading.Thread(target=made.export, args=(make_spans(1),))
        sender.start()
        if fault in ("ok", "drop_after_accept"):
            receiver.wait_for(1)
        else:
            time.sleep(0.05)
        start = time.monotonic()
        receiver.close()
        assert time.monotonic() - start < 2
        receiver.close()
        with pytest.raises(ConnectionRefusedError):
            connect(receiver)
        made.shutdown()
        sender.join(5)
    deadline = time.monotonic() + 2
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()
    assert (receiver.span_count > 0) is (fault in ("ok", "drop_after_accept"))
    with pytest.raises(RuntimeError, match="closed"):
        receiver.ok()


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"^unknown protocol 'thrift'; there are: http, grpc$"):
        Receiver("thrift")  # type: ignore[arg-type]
    with Receiver("http") as receiver:
        with pytest.raises(ValueError, match=r"^unknown status 200; there are: 400, "):
            receiver.status(200)
        with pytest.raises(ValueError, match="times is 0"):
            receiver.status(503, times=0)
        with pytest.raises(ValueError, match="times is 0"):
            receiver.drop_after_accept(times=0)
        assert receiver.fault == "ok"


# --- as a program -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], Any]]]:
    command = [sys.executable, "-m", "tests.receiver", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(line: str) -> Any:
            stdin.write(f"{line}\n")
            stdin.flush()
            return json.loads(stdout.readline())

        try:
            yield process, ask
        finally:
            process.kill()


@both
def test_as_a_program(protocol: Protocol) -> None:
    kind = HttpSpanExporter if protocol == "http" else GrpcSpanExporter
    spans = make_spans(2)
    with program("--protocol", protocol, "--tls", "--fault", "status 503 retry_after_s=0.1 times=1") as (process, ask):
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["pid"] == process.pid
        made = kind(endpoint=said["traces_endpoint"], timeout=5, **trusting(protocol, Path(said["certificate"])))
        assert made.export(spans) is SpanExportResult.SUCCESS
        made.shutdown()
        assert ask("wait_for 2 timeout_s=5")["spans"] == 2
        assert [span["span_id"] for span in ask("spans")] == ids(spans)
        assert ask("span_ids") == dict.fromkeys(ids(spans), 1)
        assert ask("wait_for 3 0.01") == {"error": "2 of 3 spans after 0.01 s"}
        assert ask("nonsense")["error"].startswith("unknown command 'nonsense'; there are: ok, up, down, ")
        assert ask("status")["error"] != ""
        assert ask("down")["refused"] == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", said["port"]), 2)
        assert ask("quit")["accepted"] == 1
        assert process.wait(2) == 0
    assert not Path(said["certificate"]).exists()


@pytest.mark.parametrize("way", ["end of stdin", "SIGTERM", "SIGINT"])
def test_the_program_ends_with(way: str) -> None:
    with program("--protocol", "http", "--fault", "hang") as (process, _):
        assert process.stdin is not None
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        with socket.create_connection(("127.0.0.1", port), 2):
            if way == "end of stdin":
                process.stdin.close()
            else:
                process.send_signal(getattr(signal, way))
            assert json.loads(process.stdout.readline())["spans"] == 0
            assert process.wait(2) == 0
