"""OTLP over gRPC: our own bytes on a channel of our own.

The SDK's exporter has no public way to be given bytes, so the variables that it reads are read here, in the same way
(https://opentelemetry.io/docs/specs/otel/protocol/exporter/).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlparse

import grpc  # type: ignore[import-untyped]
from opentelemetry.util.re import parse_env_headers

from lens_auto import __version__
from lens_auto.export.answer import ACCEPTED, Answer, Outcome
from lens_auto.export.otlp_bytes import Encoder
from lens_auto.export.partial import rejected_spans
from lens_auto.export.spans import Span

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_DEFAULT_ENDPOINT = "http://localhost:4317"
_DEFAULT_TIMEOUT_S = 10.0
_OPTIONS = (
    ("grpc.primary_user_agent", f"lens-auto/{__version__}"),
    ("grpc.max_send_message_length", -1),
    # An endpoint that comes back is found within seconds; gRPC's own default is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
_RETRY_INFO = "google.rpc.retryinfo-bin"
_STATUS_DETAILS = "grpc-status-details-bin"
_TOO_LARGE = "larger than max"  # how gRPC's own servers say it, in all languages


class Settings(NamedTuple):
    """What the variables say.

    Attributes:
        target: host and port.
        certificate, client_key, client_certificate: names of PEM files.
    """

    target: str
    insecure: bool
    headers: tuple[tuple[str, str], ...]
    timeout_s: float
    gzip: bool
    certificate: str
    client_key: str
    client_certificate: str


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the variables of OTLP's exporter for traces.

    Raises:
        ValueError: a timeout or compression that is none.
    """

    def value(name: str) -> str:
        for prefix in ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"):
            found = environ.get(prefix + name, "").strip()
            if found:
                return found
        return ""

    endpoint = value("ENDPOINT") or _DEFAULT_ENDPOINT
    url = urlparse(endpoint)
    insecure = url.scheme != "https" and (value("INSECURE").lower() or str(url.scheme == "http").lower()) == "true"
    timeout, compression = value("TIMEOUT"), value("COMPRESSION").lower()
    try:
        timeout_s = float(timeout) if timeout else _DEFAULT_TIMEOUT_S
    except ValueError:
        raise ValueError(f"OTEL_EXPORTER_OTLP_TIMEOUT={timeout!r} is not a number of seconds") from None
    if compression not in ("", "none", "gzip"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_COMPRESSION={compression!r} is not one of none, gzip for gRPC")
    return Settings(
        target=url.netloc or endpoint,
        insecure=insecure,
        headers=tuple(parse_env_headers(value("HEADERS"), liberal=True).items()),
        timeout_s=timeout_s if timeout_s > 0 else _DEFAULT_TIMEOUT_S,
        gzip=compression == "gzip",
        certificate=value("CERTIFICATE"),
        client_key=value("CLIENT_KEY"),
        client_certificate=value("CLIENT_CERTIFICATE"),
    )


def _content(path: str) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()


def open_channel(settings: Settings) -> Any:
    """A channel to the endpoint; nothing is connected yet.

    Raises:
        OSError: a certificate or key cannot be read.
    """
    compression = grpc.Compression.Gzip if settings.gzip else grpc.Compression.NoCompression
    if settings.insecure:
        return grpc.insecure_channel(settings.target, options=_OPTIONS, compression=compression)
    credentials = grpc.ssl_channel_credentials(
        _content(settings.certificate), _content(settings.client_key), _content(settings.client_certificate)
    )
    return grpc.secure_channel(settings.target, credentials, options=_OPTIONS, compression=compression)


class GrpcSender:
    """Sends over OTLP/gRPC."""

    remote = True

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._settings = read_settings(environ)
        self._encoder = Encoder()
        self._channel = open_channel(self._settings)
        self._export = self._channel.unary_unary(_METHOD)  # without serializers: bytes in, bytes out

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        """Encode and send one batch."""
        return self.post(self._encoder.request(spans, resource))

    def post(self, body: bytes) -> Answer:
        """Send a request that is encoded already."""
        try:
            response = self._export(body, timeout=self._settings.timeout_s, metadata=self._settings.headers)
        except grpc.RpcError as error:
            return _refusal(error)
        except Exception as error:
            return Answer(Outcome.LATER, f"{type(error).__name__}: {error}")
        rejected, message = rejected_spans(response)
        return Answer(Outcome.ACCEPTED, message, rejected=rejected) if rejected else ACCEPTED

    def close(self) -> None:
        """Close the channel; a call on its way ends."""
        self._channel.close()


def _refusal(error: Any) -> Answer:
    code, details = error.code(), error.details() or ""
    reason = f"{code.name} {details}".rstrip()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return Answer(Outcome.INVALID, reason)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return Answer(Outcome.TOO_LARGE, reason)
    return Answer(Outcome.LATER, reason, _retry_after_s(error.trailing_metadata() or ()))


def _retry_after_s(metadata: Any) -> float | None:
    """The delay that the endpoint asks for: in the status's details, or as OpenTelemetry's exporter looks for it."""
    found = {key: value for key, value in metadata if key in (_RETRY_INFO, _STATUS_DETAILS)}
    if not found:
        return None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
    from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

    info = RetryInfo()
    try:
        if _RETRY_INFO in found:
            info.ParseFromString(found[_RETRY_INFO])
        elif not any(detail.Unpack(info) for detail in Status.FromString(found[_STATUS_DETAILS]).details):
            return None
    except DecodeError:
        return None
    delay_s: float = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return max(0.0, delay_s)
