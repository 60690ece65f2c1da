"""A small, real OTLP receiver that counts what it gets and can misbehave on command.

    with Receiver("grpc") as receiver:
        ...                                   # a program with receiver.environment() sends its spans
        receiver.down()                       # refuses connections from here on
        receiver.up()
        receiver.wait_for(10)
        assert max(receiver.span_ids().values()) == 1

A front of ours owns the port and relays bytes to a stock server behind it: grpc with the generated OTLP services, or
http.server. So connections can be refused, left hanging and reset in the same way for both, also in the middle of a
run, and TLS passes through untouched.

Changing a fault never makes counts ambiguous: a span is stored only while its client is still there, and a connection
is closed only once the answers for what was stored have left. `drop_after_accept` is the one fault after which a client
cannot know, and a client that gives up just as the answer leaves is the one race that no server can close.

Also a program: `python -m tests.receiver --protocol grpc`; see `main`.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import gzip
import http.server
import importlib.util
import ipaddress
import json
import os
import shlex
import shutil
import signal
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

Protocol = Literal["http", "grpc"]
Signal = Literal["traces", "metrics", "logs"]
T = TypeVar("T")

PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")
HOST = "127.0.0.1"

# What each status of OTLP/HTTP is called in OTLP/gRPC.
_GRPC_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}

_ANSWER_BOUND_S = 1.0  # how long a change of fault waits for answers that are on their way
_POLL_S = 0.02


# --- what was received ------------------------------------------------------------------------------------------------


class Scope(TypedDict):
    """The instrumentation scope of a span."""

    name: str
    version: str
    attributes: dict[str, Any]


class Link(TypedDict):
    """A link of a span."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


class Event(TypedDict):
    """An event of a span."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


class Span(TypedDict):
    """A received span; ids in hex, times in nanoseconds since the epoch, enums as OTLP's numbers."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[Link]
    events: list[Event]
    status_code: int
    status_message: str
    resource: dict[str, Any]
    scope: Scope


@dataclass(frozen=True)
class Request:
    """A request that reached the server behind the front.

    Attributes:
        time_ns: wall clock at its arrival.
        items: spans, metrics or log records in it.
        size_bytes: its message, uncompressed.
        headers: HTTP headers or gRPC metadata, names in lower case, binary values in hex.
        outcome: "accepted", "refused" (`status`), "dropped" (stored, and then reset) or "abandoned" (the client gave up
            or its connection was taken away before anything was stored).
    """

    time_ns: int
    signal: Signal
    items: int
    size_bytes: int
    headers: Mapping[str, str]
    outcome: str


def plain_value(value: AnyValue) -> Any:
    """An OTLP value as a Python value; None for one that is not set."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [plain_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return plain_attributes(value.kvlist_value.values)
    return getattr(value, kind)


def plain_attributes(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    """OTLP attributes as a dict."""
    return {attribute.key: plain_value(attribute.value) for attribute in attributes}


def plain_spans(request: trace_service_pb2.ExportTraceServiceRequest) -> list[Span]:
    """The spans of an OTLP request, in its order."""
    spans: list[Span] = []
    for resource_spans in request.resource_spans:
        resource = plain_attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            scope = Scope(
                name=scope_spans.scope.name,
                version=scope_spans.scope.version,
                attributes=plain_attributes(scope_spans.scope.attributes),
            )
            spans.extend(
                Span(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex() or None,
                    name=span.name,
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=plain_attributes(span.attributes),
                    links=[
                        Link(
                            trace_id=link.trace_id.hex(),
                            span_id=link.span_id.hex(),
                            attributes=plain_attributes(link.attributes),
                        )
                        for link in span.links
                    ],
                    events=[
                        Event(
                            name=event.name,
                            time_ns=event.time_unix_nano,
                            attributes=plain_attributes(event.attributes),
                        )
                        for event in span.events
                    ],
                    status_code=span.status.code,
                    status_message=span.status.message,
                    resource=resource,
                    scope=scope,
                )
                for span in scope_spans.spans
            )
    return spans


class _Kind(NamedTuple):
    """A signal of OTLP: its messages, and how to count what is in one."""

    request: Callable[[], Message]
    response: Callable[[], Message]
    register: Callable[[Any, grpc.Server], None]
    count: Callable[[Any], int]


_KINDS: dict[Signal, _Kind] = {
    "traces": _Kind(
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        lambda request: sum(len(scope.spans) for part in request.resource_spans for scope in part.scope_spans),
    ),
    "metrics": _Kind(
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
        lambda request: sum(len(scope.metrics) for part in request.resource_metrics for scope in part.scope_metrics),
    ),
    "logs": _Kind(
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
        logs_service_pb2_grpc.add_LogsServiceServicer_to_server,
        lambda request: sum(len(scope.log_records) for part in request.resource_logs for scope in part.scope_logs),
    ),
}


# --- faults and the decision on each request --------------------------------------------------------------------------


class _Route(enum.Enum):
    """Where the front leads a connection."""

    OWN = "the server of this receiver's protocol"
    OTHER = "the server of the other protocol"
    NOWHERE = "accepted and never answered"
    RESET = "accepted and reset"
    CLOSED = "refused"


@dataclass(frozen=True)
class _Fault:
    """How the receiver behaves; see the methods of `Receiver`."""

    name: str
    route: _Route = _Route.OWN
    code: int = 0
    retry_after_s: float | None = None
    seconds_per_span: float = 0.0
    times: int | None = None


_OK = _Fault("ok")


class _Desk:
    """Decides on each request, and keeps what is accepted. Used by every thread."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.changed = threading.Condition()
        self.fault = _OK
        self.closing = False
        self.attached: set[int] = set()  # the front's own ports of connections that lead to a client
        self.traces: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self.metrics: list[metrics_service_pb2.ExportMetricsServiceRequest] = []
        self.items: Counter[Signal] = Counter()
        self.requests: list[Request] = []
        self.answering = 0  # accepted, and the answer has not left yet
        self.errors: list[BaseException] = []  # what went wrong in the receiver itself
        self.reset: Callable[[int], None]  # reset the client behind this port; the front's

    def attach(self, port: int) -> None:
        with self.changed:
            self.attached.add(port)

    def detach(self, port: int) -> None:
        with self.changed:
            self.attached.discard(port)
            self.changed.notify_all()

    def switch(self, fault: _Fault) -> None:
        """From here on requests meet this fault; returns when answers to accepted ones have left."""
        with self.changed:
            self.fault = fault
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.answering == 0, _ANSWER_BOUND_S)

    def answered(self) -> None:
        with self.changed:
            self.answering -= 1
            self.changed.notify_all()

    def decide(
        self, kind: Signal, message: Message, headers: Mapping[str, str], port: int, is_active: Callable[[], bool]
    ) -> tuple[str, _Fault]:
        """The outcome for a request (see `Request`), and the fault that it met; waits where that fault is slow.

        After "accepted" the caller sends the answer and then calls `answered`.
        """
        arrived_ns = time.time_ns()
        items = _KINDS[kind].count(message)
        start = time.monotonic()
        with self.changed:
            while True:
                fault = self.fault
                if self.closing or port not in self.attached or not is_active():
                    outcome = "abandoned"
                    break
                if fault.route is not _Route.OWN:
                    # It overtook the change of fault: the front is about to take its connection away.
                    self.changed.wait(_POLL_S)
                    continue
                remaining_s = start + fault.seconds_per_span * items - time.monotonic()
                if remaining_s > 0:
                    self.changed.wait(min(remaining_s, _POLL_S))
                    continue
                outcome = {"status": "refused", "drop_after_accept": "dropped"}.get(fault.name, "accepted")
                break
            if outcome in ("accepted", "dropped"):
                if kind == "traces":
                    self.traces.append(cast("trace_service_pb2.ExportTraceServiceRequest", message))
                elif kind == "metrics":
                    self.metrics.append(cast("metrics_service_pb2.ExportMetricsServiceRequest", message))
                self.items[kind] += items
            if outcome == "accepted":
                self.answering += 1
            elif outcome != "abandoned" and fault.times is not None:
                self.fault = replace(fault, times=fault.times - 1) if fault.times > 1 else _OK
            self.requests.append(Request(arrived_ns, kind, items, message.ByteSize(), headers, outcome))
            self.changed.notify_all()
        return outcome, fault


# --- the front: connections -------------------------------------------------------------------------------------------


class _End(asyncio.Protocol):
    """One end of a connection: what arrives here leaves at the other end; without one it waits, or is thrown away."""

    transport: asyncio.Transport

    def __init__(self, made: Callable[[], None], lost: Callable[[], None]) -> None:
        self._made = made
        self._lost = lost
        self.other: _End | None = None
        self.early: bytearray | None = None  # what arrived before the other end was there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._made()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            if not self.other.transport.is_closing():
                self.other.transport.write(data)
        elif self.early is not None:
            self.early += data

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()


def _reset(transport: asyncio.Transport) -> None:
    """Close with RST instead of FIN."""
    if not transport.is_closing():
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Connection:
    """A client's connection, and the one to the server that the front made for it. Lives in the front's loop."""

    def __init__(self, front: _Front) -> None:
        self.front = front
        self.route = _Route.CLOSED
        self.port = 0  # by which the server knows it
        self.client = _End(self._client_made, self._client_lost)
        self.server = _End(self._server_made, self._server_lost)
        self._connecting: asyncio.Task[None] | None = None

    def _client_made(self) -> None:
        self.front.connections.add(self)
        self.front.accepted += 1
        self.route = self.front.route
        if self.route in (_Route.OWN, _Route.OTHER):
            self.client.early = bytearray()
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        elif self.route is _Route.RESET:
            _reset(self.client.transport)
        elif self.route is _Route.CLOSED:
            self.client.transport.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.server, HOST, self.front.ports[self.route])
        except OSError:
            self.client.transport.abort()

    def _server_made(self) -> None:
        if self.client.early is None or self.client.transport.is_closing():
            self.server.transport.abort()
            return
        self.port = self.server.transport.get_extra_info("sockname")[1]
        self.front.desk.attach(self.port)
        early, self.client.early = self.client.early, None
        self.client.other, self.server.other = self.server, self.client
        self.server.transport.write(bytes(early))

    def _client_lost(self) -> None:
        self.front.connections.discard(self)
        self._part()

    def _server_lost(self) -> None:
        if self.server.other is not None:
            self._part()
            self.client.transport.close()

    def _part(self) -> None:
        """Take the client away from its server."""
        self.client.early = None
        if self.server.other is not None:
            self.client.other = self.server.other = None
            self.front.desk.detach(self.port)
            self.server.transport.abort()

    def reroute(self, route: _Route) -> None:
        """What happens to an open connection when new ones are led elsewhere."""
        if route is self.route:
            return
        self.route = route
        self._part()
        if route is _Route.RESET:
            self.reset()
        elif route is not _Route.NOWHERE:
            self.client.transport.close()

    def reset(self) -> None:
        """Give the client an RST."""
        self._part()
        _reset(self.client.transport)


class _Front:
    """Owns the port: accepts and relays, or does neither. One thread with an event loop."""

    def __init__(self, desk: _Desk, ports: dict[_Route, int]) -> None:
        self.desk = desk
        self.ports = ports
        self.route = _Route.CLOSED
        self.connections: set[_Connection] = set()
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="receiver-front", daemon=True)

    def start(self, port: int) -> int:
        """Reserve the port (0: a free one); nobody listens on it yet."""
        self._socket = self._reserve(port)
        self._thread.start()
        self.port = int(self._socket.getsockname()[1])
        return self.port

    @staticmethod
    def _reserve(port: int) -> socket.socket:
        # Bound and not listening refuses connections, and nobody else gets the port meanwhile.
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((HOST, port))
        return reserved

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_BOUND_S)

    def lead(self, route: _Route) -> None:
        """Lead connections this way from here on, open ones too."""
        self._call(self._lead(route))

    async def _lead(self, route: _Route) -> None:
        await asyncio.sleep(0.01)  # answers that the servers wrote pass through
        self.route = route
        if route is _Route.CLOSED and self._server is not None:
            self._server.close()
            self._server = None
            self._socket = self._reserve(self.port)
        for connection in list(self.connections):
            connection.reroute(route)
        if route is not _Route.CLOSED and self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: _Connection(self).client, sock=self._socket)

    def reset(self, port: int) -> None:
        """Reset the client whose requests reach the server from this port."""
        self._call(self._reset(port))

    async def _reset(self, port: int) -> None:
        for connection in list(self.connections):
            if connection.port == port:
                connection.reset()

    def close(self) -> None:
        """End every connection and the thread."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_BOUND_S)
        self._loop.close()

    async def _close(self) -> None:
        self.route = _Route.CLOSED
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in list(self.connections):
            connection.reroute(_Route.CLOSED)
            connection.client.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # lets the transports close


# --- the servers behind it --------------------------------------------------------------------------------------------


class _HttpHandler(http.server.BaseHTTPRequestHandler):
    """OTLP/HTTP with protobuf."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _HttpServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        kind = self.path.removeprefix("/v1/")
        length = self.headers.get("content-length", "")
        if not length.isdigit():
            self._answer(411, Status(message="Content-Length is needed"), close=True)
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):  # the client went away in the middle
            self.close_connection = True
            return
        if self.server.desk.protocol != "http" or f"/v1/{kind}" != self.path or kind not in _KINDS:
            self._answer(404, Status(message=f"no such path: {self.path}"))
            return
        if self.headers.get_content_type() != "application/x-protobuf":
            self._answer(415, Status(message="only application/x-protobuf is understood"))
            return
        message = _KINDS[kind].request()
        try:
            message.ParseFromString(_decompress(body, self.headers.get("content-encoding", "identity")))
        except LookupError as error:
            self._answer(415, Status(message=str(error)))
            return
        except (DecodeError, OSError, EOFError, zlib.error) as error:
            self._answer(400, Status(message=f"not an OTLP request: {error}"))
            return

        headers = {name.lower(): value for name, value in self.headers.items()}
        port = int(self.client_address[1])
        outcome, fault = self.server.desk.decide(kind, message, headers, port, lambda: True)
        if outcome == "accepted":
            try:
                self._answer(200, _KINDS[kind].response())
            finally:
                self.server.desk.answered()
        elif outcome == "refused":
            self._answer(fault.code, _refusal(fault), retry_after_s=fault.retry_after_s)
        else:
            if outcome == "dropped":
                self.server.desk.reset(port)
            self.close_connection = True

    def _answer(self, code: int, message: Message, *, retry_after_s: float | None = None, close: bool = False) -> None:
        body = message.SerializeToString()
        self.send_response(code)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        if retry_after_s is not None:
            self.send_header("Retry-After", f"{retry_after_s:g}")
        if close:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def _decompress(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    if encoding == "deflate":
        return zlib.decompress(body)
    if encoding == "identity":
        return body
    raise LookupError(f"unknown Content-Encoding {encoding!r}; there are: gzip, deflate, identity")


def _refusal(fault: _Fault) -> Status:
    """The error message of OTLP, the same in both protocols."""
    status = Status(code=_GRPC_CODES[fault.code].value[0], message=f"refused with {fault.code} by the test")
    if fault.retry_after_s is not None:
        status.details.add().Pack(_retry_info(fault.retry_after_s))
    return status


def _retry_info(retry_after_s: float) -> RetryInfo:
    info = RetryInfo()
    info.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
    return info


class _HttpServer(http.server.ThreadingHTTPServer):
    """The stock threading server with its errors in the receiver's hands."""

    request_queue_size = 128

    def __init__(self, desk: _Desk, certificate: Certificate | None) -> None:
        super().__init__((HOST, 0), _HttpHandler)
        self.desk = desk
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.certificate, certificate.key)
            # The handshake happens at the first read, in the connection's own thread: a silent client blocks no other.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="receiver-http", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's name."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections end in many ways here; anything else is an error of the receiver."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.desk.errors.append(error)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(_ANSWER_BOUND_S)


class _GrpcService:
    """The Export method of one signal."""

    def __init__(self, kind: Signal, desk: _Desk) -> None:
        self._kind = kind
        self._desk = desk

    def Export(self, request: Message, context: grpc.ServicerContext) -> Message:
        """Called by grpc, in a thread of its pool."""
        if self._desk.protocol != "grpc":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "not a gRPC receiver")
        headers = {
            key: value if isinstance(value, str) else value.hex() for key, value in context.invocation_metadata()
        }
        port = int(context.peer().rpartition(":")[2])
        outcome, fault = self._desk.decide(self._kind, request, headers, port, context.is_active)
        if outcome == "accepted":
            # Called once the answer is written, or right away where the call has ended already.
            if not context.add_callback(self._desk.answered):
                self._desk.answered()
            return _KINDS[self._kind].response()
        if outcome == "refused":
            status = _refusal(fault)
            metadata = [("grpc-status-details-bin", status.SerializeToString())]
            if fault.retry_after_s is not None:
                # Where OpenTelemetry's Python exporter looks for it.
                metadata.append(("google.rpc.retryinfo-bin", _retry_info(fault.retry_after_s).SerializeToString()))
            context.set_trailing_metadata(tuple(metadata))
            context.abort(_GRPC_CODES[fault.code], status.message)
        if outcome == "dropped":
            self._desk.reset(port)
        context.abort(grpc.StatusCode.CANCELLED, "the connection is gone")
        raise AssertionError("abort raises")


class _GrpcServer:
    """A stock grpc server with OTLP's three services."""

    def __init__(self, desk: _Desk, certificate: Certificate | None) -> None:
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="receiver-grpc")
        self._server = grpc.server(
            self._pool, options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
        )
        for kind, messages in _KINDS.items():
            messages.register(_GrpcService(kind, desk), self._server)
        if certificate is None:
            self.port = self._server.add_insecure_port(f"{HOST}:0")
        else:
            pair = (certificate.key.read_bytes(), certificate.certificate.read_bytes())
            self.port = self._server.add_secure_port(f"{HOST}:0", grpc.ssl_server_credentials([pair]))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(_ANSWER_BOUND_S)
        self._pool.shutdown(wait=False)


# --- TLS --------------------------------------------------------------------------------------------------------------


class Certificate(NamedTuple):
    """PEM files of a self-signed certificate for 127.0.0.1 and localhost; a client has to trust the first."""

    certificate: Path
    key: Path


def make_certificate(folder: Path) -> Certificate:
    """Make a self-signed certificate in a folder.

    Raises:
        RuntimeError: there is neither the `cryptography` package nor an `openssl` program.
    """
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    if importlib.util.find_spec("cryptography") is not None:
        _certificate_by_cryptography(made)
    elif (openssl := shutil.which("openssl")) is not None:
        options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        command = [openssl, *options.split(), "-addext", f"subjectAltName=IP:{HOST},DNS:localhost"]
        files = ["-keyout", str(made.key), "-out", str(made.certificate)]
        subprocess.run([*command, *files], check=True, capture_output=True, timeout=30)
    else:
        raise RuntimeError("TLS needs the `cryptography` package or the `openssl` program; neither is here")
    return made


def _certificate_by_cryptography(made: Certificate) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(timezone.utc)
    names = [x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


# --- the receiver -----------------------------------------------------------------------------------------------------


class Receiver:
    """An OTLP receiver on 127.0.0.1. One fault at a time; each of the methods for them replaces the one before.

    Args:
        protocol: "http" (protobuf over HTTP/1.1, path /v1/traces) or "grpc".
        tls: serve with a self-signed certificate made for this receiver; see `certificate`.
        port: the port; 0 is a free one.
        down: refuse connections from the start, until `up`.

    Attributes:
        endpoint: the base URL, for OTEL_EXPORTER_OTLP_ENDPOINT.
        traces_endpoint: the URL for OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or an exporter's `endpoint`.
        certificate: the PEM file that a client must trust, with TLS.
    """

    def __init__(self, protocol: Protocol, *, tls: bool = False, port: int = 0, down: bool = False) -> None:
        if protocol not in PROTOCOLS:
            raise ValueError(f"unknown protocol {protocol!r}; there are: {', '.join(PROTOCOLS)}")
        self.protocol: Protocol = protocol
        self._plain: list[Span] = []
        self._decoded = 0
        self._decoding = threading.Lock()
        self._closed = False
        self._switching = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="receiver-")
        self._tls = make_certificate(Path(self._folder.name)) if tls else None
        self.certificate: Path | None = self._tls.certificate if self._tls else None
        self._desk = _Desk(protocol)
        self._servers: dict[Protocol, _HttpServer | _GrpcServer] = {}
        self._front = _Front(self._desk, {_Route.OWN: self._serve(protocol)})
        self._desk.reset = self._front.reset
        self.port = self._front.start(port)
        self.endpoint = f"{'https' if tls else 'http'}://{HOST}:{self.port}"
        self.traces_endpoint = f"{self.endpoint}/v1/traces" if protocol == "http" else self.endpoint
        if down:
            self.down()
        else:
            self.up()

    def _serve(self, protocol: Protocol) -> int:
        """Start the server of a protocol, and return its port."""
        if protocol not in self._servers:
            server = _HttpServer if protocol == "http" else _GrpcServer
            self._servers[protocol] = server(self._desk, self._tls)
        return self._servers[protocol].port

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None and self._desk.errors:
            raise self._desk.errors[0]

    def close(self) -> None:
        """End it, in whatever state it is; what was received stays readable."""
        if self._closed:
            return
        self._closed = True
        with self._desk.changed:
            self._desk.closing = True
            self._desk.changed.notify_all()
        self._front.close()
        for server in self._servers.values():
            server.stop()
        self._folder.cleanup()

    def environment(self) -> dict[str, str]:
        """The OTEL_* variables of a program that sends here, and no proxy on the way.

        The names of certificates for `requests` are emptied: where a machine sets them, they win over OpenTelemetry's.
        """
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf" if self.protocol == "http" else "grpc",
            "NO_PROXY": HOST,
            "no_proxy": HOST,
            "REQUESTS_CA_BUNDLE": "",
            "CURL_CA_BUNDLE": "",
        }
        if self.certificate is not None:
            variables["OTEL_EXPORTER_OTLP_CERTIFICATE"] = str(self.certificate)
        return variables

    # What was received.

    @property
    def span_count(self) -> int:
        """Spans stored so far, doubles included."""
        with self._desk.changed:
            return self._desk.items["traces"]

    @property
    def connections(self) -> int:
        """Connections that were accepted so far, whatever became of them."""
        return self._front.accepted

    def spans(self) -> list[Span]:
        """Every stored span, in order of arrival, doubles included."""
        with self._decoding:
            with self._desk.changed:
                new = self._desk.traces[self._decoded :]
            for request in new:
                self._plain += plain_spans(request)
            self._decoded += len(new)
            return list(self._plain)

    def metrics(self) -> list[metrics_service_pb2.ExportMetricsServiceRequest]:
        """Every stored request with metrics, in order of arrival."""
        with self._desk.changed:
            return list(self._desk.metrics)

    def span_ids(self) -> Counter[str]:
        """How often each span id was stored: any number above 1 is a double."""
        return Counter(span["span_id"] for span in self.spans())

    def requests(self) -> list[Request]:
        """Requests that reached the server, of all signals, in the order in which they were decided."""
        with self._desk.changed:
            return list(self._desk.requests)

    def counts(self) -> dict[str, int]:
        """Totals: stored spans, metrics and logs; connections; requests and spans by outcome."""
        requests = self.requests()
        outcomes = Counter(request.outcome for request in requests)
        with self._desk.changed:
            stored = dict(self._desk.items)
        return {
            "spans": stored.get("traces", 0),
            "metrics": stored.get("metrics", 0),
            "logs": stored.get("logs", 0),
            "connections": self.connections,
            "requests": len(requests),
            **{outcome: outcomes[outcome] for outcome in ("accepted", "refused", "dropped", "abandoned")},
        }

    def wait_for(self, count: int, timeout_s: float = 10.0) -> list[Span]:
        """Wait until at least so many spans are stored, and return all.

        Raises:
            TimeoutError: there were fewer; it says how many.
        """
        with self._desk.changed:
            if not self._desk.changed.wait_for(lambda: self._desk.items["traces"] >= count, timeout_s):
                raise TimeoutError(f"{self._desk.items['traces']} of {count} spans after {timeout_s} s")
        return self.spans()

    def wait_until_alone(self, timeout_s: float = 10.0) -> None:
        """Wait until every client has gone: what one that was killed left on its way is then never stored.

        Raises:
            TimeoutError: some are still there; it says how many.
        """
        with self._desk.changed:
            if not self._desk.changed.wait_for(lambda: not self._desk.attached, timeout_s):
                raise TimeoutError(f"{len(self._desk.attached)} clients are still connected after {timeout_s} s")

    # Faults.

    @property
    def fault(self) -> str:
        """The name of the fault in force; "ok" is none."""
        with self._desk.changed:
            return self._desk.fault.name

    def _switch(self, fault: _Fault) -> None:
        with self._switching:
            if self._closed:
                raise RuntimeError("this receiver is closed")
            if fault.route is _Route.OTHER:
                other: Protocol = "grpc" if self.protocol == "http" else "http"
                self._front.ports[_Route.OTHER] = self._serve(other)
            self._desk.switch(fault)
            self._front.lead(fault.route)

    def ok(self) -> None:
        """No fault: accept everything."""
        self._switch(_OK)

    def up(self) -> None:
        """Listen again on the same port; the same as `ok`."""
        self.ok()

    def down(self) -> None:
        """Close every connection and refuse new ones."""
        self._switch(_Fault("down", _Route.CLOSED))

    def hang(self) -> None:
        """Accept connections and never answer; nothing that is sent meanwhile is ever stored."""
        self._switch(_Fault("hang", _Route.NOWHERE))

    def reset(self) -> None:
        """Reset open connections, and each new one right after it was accepted."""
        self._switch(_Fault("reset", _Route.RESET))

    def wrong_protocol(self) -> None:
        """Speak HTTP/1.1 on the gRPC port, or gRPC on the HTTP port."""
        self._switch(_Fault("wrong_protocol", _Route.OTHER))

    def status(self, code: int, *, retry_after_s: float | None = None, times: int | None = None) -> None:
        """Refuse requests with an HTTP status, or what it is called in gRPC.

        Args:
            code: 429 and 503 (RESOURCE_EXHAUSTED, UNAVAILABLE) ask to try again; 400, 401, 403, 404, 500, 502, 504.
            retry_after_s: Retry-After, or RetryInfo in gRPC. A fraction is not HTTP's, and understood by the SDK.
            times: refuse so many requests, then be `ok`; None is until another method is called.
        """
        if code not in _GRPC_CODES:
            raise ValueError(f"unknown status {code!r}; there are: {', '.join(map(str, _GRPC_CODES))}")
        self._switch(_Fault("status", code=code, retry_after_s=retry_after_s, times=_times(times)))

    def slow(self, seconds_per_span: float) -> None:
        """Take so long for each span (or metric, or log record) of a request before it is stored and answered."""
        self._switch(_Fault("slow", seconds_per_span=seconds_per_span))

    def drop_after_accept(self, *, times: int | None = None) -> None:
        """Store what is sent, then reset the connection without an answer: the client cannot know.

        Args:
            times: do so with so many requests, then be `ok`; None is until another method is called.
        """
        self._switch(_Fault("drop_after_accept", times=_times(times)))


def _times(times: int | None) -> int | None:
    if times is not None and times < 1:
        raise ValueError(f"times is {times!r}; it must be at least 1, or None for no end")
    return times


# --- as a program -----------------------------------------------------------------------------------------------------

_FAULTS = ("ok", "up", "down", "hang", "reset", "wrong_protocol", "status", "slow", "drop_after_accept")
_READS = ("counts", "spans", "span_ids", "wait_for")


def _obey(receiver: Receiver, line: str) -> Any:
    """Run one command: a method's name, then its arguments as JSON values or `name=value`."""
    name, *words = shlex.split(line)
    if name not in _FAULTS + _READS:
        raise ValueError(f"unknown command {name!r}; there are: {', '.join((*_FAULTS, *_READS, 'quit'))}")
    positional = [json.loads(word) for word in words if "=" not in word]
    named = {key: json.loads(value) for key, _, value in (word.partition("=") for word in words if "=" in word)}
    result = getattr(receiver, name)(*positional, **named)
    return receiver.counts() if name in (*_FAULTS, "wait_for") else result


def _show(value: Any) -> None:
    print(json.dumps(value, default=lambda binary: binary.hex()), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until `quit`, the end of stdin, SIGINT or SIGTERM.

    The first line on stdout is an object with endpoint, traces_endpoint, certificate, port and pid. Then each line on
    stdin is a command, such as `status 503 retry_after_s=1 times=2`, `wait_for 10 timeout_s=5`, `counts`, `spans`, and
    each gets one line of JSON: what it returns, or the counts, or an object with "error". The counts come last.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.receiver", description="An OTLP receiver for tests.")
    parser.add_argument("--protocol", choices=PROTOCOLS, required=True)
    parser.add_argument("--port", type=int, default=0, help="0 is a free one (the default)")
    parser.add_argument("--tls", action="store_true", help="serve with a certificate made for this run")
    parser.add_argument("--fault", default="ok", help="a command to begin with, such as 'down' or 'slow 1'")
    options = parser.parse_args(arguments)

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
    with Receiver(options.protocol, tls=options.tls, port=options.port, down=options.fault == "down") as receiver:
        try:
            _obey(receiver, options.fault)
            _show(
                {
                    "endpoint": receiver.endpoint,
                    "traces_endpoint": receiver.traces_endpoint,
                    "certificate": receiver.certificate and str(receiver.certificate),
                    "port": receiver.port,
                    "pid": os.getpid(),
                }
            )
            for line in sys.stdin:
                if line.strip() == "quit":
                    break
                if line.strip():
                    try:
                        _show(_obey(receiver, line))
                    except (TypeError, ValueError, TimeoutError) as error:
                        _show({"error": str(error)})
        except KeyboardInterrupt:
            pass
        _show(receiver.counts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
