"""The bytes, the variables and the answers of OTLP: the same as with OpenTelemetry's own exporters."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from receiver import PROTOCOLS, Protocol, Receiver

from lens_auto.export import otlp_grpc, otlp_http, sdk
from lens_auto.export.answer import Outcome
from lens_auto.export.otlp_bytes import Encoder
from lens_auto.export.partial import rejected_spans
from lens_auto.export.senders import SdkSender, make_sender
from lens_auto.export.spans import Link, Span

TEXT = st.text(max_size=20)
INTEGERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70), st.sampled_from([(1 << n) + d for n in (7, 14, 21, 28, 63) for d in (-1, 0, 1)])
)
SCALARS = st.one_of(TEXT, st.booleans(), INTEGERS, st.floats(allow_nan=False))
LISTS = st.one_of(
    st.lists(TEXT, max_size=3), st.lists(st.booleans(), max_size=3), st.lists(st.integers(0, 1 << 40), max_size=3)
)
ATTRIBUTES = st.dictionaries(TEXT.filter(bool), st.one_of(SCALARS, LISTS), max_size=5)
TIMES = st.integers(1, (1 << 63) - 1)
LINKS = st.builds(Link, st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), ATTRIBUTES)
SPANS = st.builds(
    Span,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.one_of(st.none(), st.binary(min_size=8, max_size=8)),
    TEXT.filter(bool),
    TIMES,
    TIMES,
    ATTRIBUTES,
    st.lists(LINKS, max_size=2),
    st.one_of(st.none(), TEXT.filter(bool)),
)
ENCODER = Encoder()  # one for all: what it remembers must not show


@settings(max_examples=100, deadline=None)
@given(st.lists(SPANS, max_size=4))
def test_the_bytes_of_the_stock_encoder(spans: list[Span]) -> None:
    resource = sdk.resource_from({"service.name": "nemo", "dl.rank": 3, "list": ["a", "b"]})
    stock = encode_spans([sdk.to_sdk(span, resource) for span in spans]).SerializePartialToString()
    if spans:  # of no spans there is nothing to compare: the stock encoder leaves the resource out
        assert ENCODER.request(spans, dict(resource.attributes)) == stock


def test_values_that_equal_each_other() -> None:
    """1, True and 1.0 are one key of a dictionary, and three values of OTLP."""
    span = Span(bytes(15) + b"1", bytes(7) + b"1", None, "name", 1, 2, {})
    resource = sdk.resource_from({})
    for value in (1, True, 1.0, 0, False, 0.0, math.nan, "1", 1, True):
        span.attributes = {"key": value}
        stock = encode_spans([sdk.to_sdk(span, resource)]).SerializePartialToString()
        assert ENCODER.request([span], dict(resource.attributes)) == stock


# --- variables --------------------------------------------------------------------------------------------------------

PREFIX = "OTEL_EXPORTER_OTLP_"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"ENDPOINT": "http://collector:4317"},
        {"ENDPOINT": "https://collector:4317/path"},
        {"ENDPOINT": "collector:4317"},
        {"ENDPOINT": "collector:4317", "INSECURE": "true"},
        {"ENDPOINT": "http://collector:4317", "INSECURE": "false"},
        {"ENDPOINT": "https://collector:4317", "INSECURE": "true"},
        {"ENDPOINT": "http://a:1", "TRACES_ENDPOINT": "http://b:2", "TRACES_INSECURE": "TRUE"},
        {"HEADERS": "x-one=1,x-two=a%20b", "TIMEOUT": "3.5", "COMPRESSION": "gzip"},
        {"HEADERS": "x-one=1", "TRACES_HEADERS": "x-two=2", "TIMEOUT": "3", "TRACES_TIMEOUT": "7"},
    ],
)
def test_grpc_reads_the_variables_as_the_sdk_does(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    ours, stock = otlp_grpc.read_settings(), OTLPSpanExporter()
    stock.shutdown()
    assert (ours.target, ours.insecure) == (stock._endpoint, stock._insecure)
    assert (dict(ours.headers), ours.timeout_s) == (dict(stock._headers), stock._timeout)
    assert ours.gzip == (stock._compression.name == "Gzip")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [("TIMEOUT", "soon", "is not a number of seconds"), ("COMPRESSION", "deflate", "is not one of none, gzip")],
)
def test_bad_variables(variable: str, value: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        otlp_grpc.read_settings({PREFIX + variable: value})
    assert f"OTEL_EXPORTER_OTLP_{variable}={value!r}" in str(raised.value)


def test_whose_exporter_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that a user's code makes, and a user who wants so, have the SDK's exporters from end to end."""
    made = make_sender("otlp", str, {})
    assert type(made) is otlp_grpc.GrpcSender
    made.close()
    for variable, value in (
        ("NEMO_LENS_OTLP_ENCODER", "sdk"),
        ("OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER", "mine"),
    ):
        made = make_sender("otlp", str, {variable: value})
        assert type(made) is SdkSender
        made.close()


# --- answers ----------------------------------------------------------------------------------------------------------

SPAN = Span(b"t" * 16, b"s" * 8, None, "name", 1, 2, {"key": "value"})


def send(monkeypatch: pytest.MonkeyPatch, receiver: Receiver, **more: str) -> Any:
    for name, value in {**receiver.environment(), **more}.items():
        monkeypatch.setenv(name, value)
    sender = make_sender("otlp", str)
    answer = sender.send([SPAN], {"service.name": "nemo"})
    sender.close()
    return answer


@pytest.mark.parametrize("encoder", ["", "sdk"])
@pytest.mark.parametrize(
    ("protocol", "compression"),
    [("http", ""), ("http", "none"), ("http", "gzip"), ("http", "deflate"), ("grpc", ""), ("grpc", "gzip")],
)
def test_accepted(monkeypatch: pytest.MonkeyPatch, protocol: Protocol, compression: str, encoder: str) -> None:
    with Receiver(protocol) as receiver:
        variables = {"OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret"}
        if compression:
            variables["OTEL_EXPORTER_OTLP_COMPRESSION"] = compression
        answer = send(monkeypatch, receiver, NEMO_LENS_OTLP_ENCODER=encoder, **variables)
        assert answer.outcome is Outcome.ACCEPTED
        (span,) = receiver.spans()
        assert (span["span_id"], span["attributes"]) == (SPAN.span_id.hex(), SPAN.attributes)
        assert receiver.requests()[0].headers["x-key"] == "secret"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("status", "outcome"), [(400, Outcome.INVALID), (401, Outcome.LATER), (404, Outcome.LATER), (503, Outcome.LATER)]
)
def test_refused(monkeypatch: pytest.MonkeyPatch, protocol: Protocol, status: int, outcome: Outcome) -> None:
    with Receiver(protocol) as receiver:
        receiver.status(status, retry_after_s=7 if status == 503 else None)
        answer = send(monkeypatch, receiver)
        assert answer.outcome is outcome
        assert answer.retry_after_s == (7 if status == 503 else None)
        assert len(receiver.requests()) == 1  # trying again is the lane's business


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch, protocol: Protocol) -> None:
    with Receiver(protocol, down=True) as receiver:
        first, second = (send(monkeypatch, receiver) for _ in range(2))
    assert first.outcome is Outcome.LATER
    assert "refused" in first.reason.lower()
    assert "0x" not in first.reason
    assert first.reason == second.reason


def test_partial_success() -> None:
    response = ExportTraceServiceResponse()
    assert rejected_spans(response.SerializeToString()) == (0, "")
    response.partial_success.SetInParent()
    assert rejected_spans(response.SerializeToString()) == (0, "")
    response.partial_success.rejected_spans = 300
    response.partial_success.error_message = "too old"
    assert rejected_spans(response.SerializeToString()) == (300, "too old")
    assert rejected_spans(b"<html>welcome</html>") == (0, "")


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, None), ("", None), ("7", 7), ("0.5", 0.5), ("-1", 0), ("inf", None), ("soon", None)]
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert otlp_http._seconds(header) == seconds


def test_retry_after_a_date() -> None:
    found = otlp_http._seconds(formatdate(time() + 30, usegmt=True))
    assert found is not None
    assert 28 <= found <= 31


def test_reasons_are_short() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    outer = requests.exceptions.ConnectionError(RuntimeError("Max retries exceeded", refused))
    assert otlp_http.reason_of(requests.exceptions.ConnectionError(refused)) == "Connection refused"
    assert otlp_http.reason_of(outer)
    assert otlp_http.reason_of(ValueError()) == "ValueError"


# --- the exporter `lens_file` -----------------------------------------------------------------------------------------


def test_lens_file_of_the_sdk(tmp_path: Path) -> None:
    """An ordinary exporter of the SDK's interface: a program that knows nothing of us writes OTLP/JSON lines."""
    program = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from lens_auto.export.file_exporter import LensFileSpanExporter
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(LensFileSpanExporter()))
tracer = provider.get_tracer("mine")
for number in range(700):
    with tracer.start_as_current_span("work", attributes={"number": number}):
        pass
provider.shutdown()
"""
    file = tmp_path / "spans.jsonl"
    environment = {"PATH": "", "NEMO_LENS_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    spans = [
        span
        for line in lines
        for part in line["resourceSpans"]
        for each in part["scopeSpans"]
        for span in each["spans"]
    ]
    assert len({span["spanId"] for span in spans}) == 700
    assert {span["name"] for span in spans} == {"work"}
    assert all(len(bytes.fromhex(span["traceId"])) == 16 for span in spans)
