"""OTLP over HTTP: our own bytes through the SDK's exporter.

The SDK's exporter decides about everything but the body: URL, headers, TLS, proxies, timeout, as the `OTEL_*` variables
have it. It is given no spans and a `requests.Session` (a public argument) that sends the bytes at hand instead of the
empty request, and that takes the answer before the exporter's own retries: a lane has its own.
"""

from __future__ import annotations

import email.utils
import gzip
import logging
import math
import re
import time
import zlib
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from lens_auto.export.answer import ACCEPTED, Answer, Outcome
from lens_auto.export.otlp_bytes import Encoder
from lens_auto.export.partial import rejected_spans
from lens_auto.export.spans import Span

_GZIP_LEVEL = 6
_INVALID, _TOO_LARGE = 400, 413
_ADDRESS = re.compile(r"<?[\w.]+(?:\([^)]*\))? object at 0x[0-9a-f]+>?[:,]? ?")


class _Taken(Exception):
    """Ends the exporter's call: the session has the answer."""


class _Session(requests.Session):
    """Sends `body`, whatever it is asked to send, and keeps the answer."""

    body = b""
    answer = ACCEPTED

    def request(self, method: str, url: str, **arguments: Any) -> Any:  # type: ignore[override]
        headers = {**self.headers, **(arguments.get("headers") or {})}
        encoding = next((value for name, value in headers.items() if name.lower() == "content-encoding"), "")
        arguments["data"] = _compressed(self.body, encoding)
        try:
            response = super().request(method, url, **arguments)
        except Exception as error:
            self.answer = Answer(Outcome.LATER, reason_of(error))
        else:
            self.answer = _answer(response)
        raise _Taken


def _compressed(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.compress(body, _GZIP_LEVEL)
    return zlib.compress(body) if encoding == "deflate" else body


def _answer(response: Any) -> Answer:
    status = response.status_code
    if 200 <= status < 300:
        rejected, message = rejected_spans(response.content)
        return Answer(Outcome.ACCEPTED, message, rejected=rejected) if rejected else ACCEPTED
    reason = f"HTTP {status} {response.reason or ''}".rstrip()
    if status == _INVALID:
        return Answer(Outcome.INVALID, reason)
    if status == _TOO_LARGE:
        return Answer(Outcome.TOO_LARGE, reason)
    return Answer(Outcome.LATER, reason, _seconds(response.headers.get("retry-after")))


def _seconds(retry_after: str | None) -> float | None:
    """How long a `Retry-After` asks to wait: seconds, or until a date."""
    if not retry_after:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def reason_of(error: BaseException) -> str:
    """What is at the bottom of an exception of `requests`, in one line that is the same for every try."""
    for _ in range(10):
        inner = getattr(error, "reason", None) or next(iter(error.args), None) or error.__cause__
        if not isinstance(inner, BaseException):
            break
        error = inner
    text = getattr(error, "strerror", None) or next((str(part) for part in error.args[::-1]), "")
    return _ADDRESS.sub("", text or type(error).__name__)


class HttpSender:
    """Sends over OTLP/HTTP."""

    remote = True

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._session = _Session()
        self._exporter = OTLPSpanExporter(session=self._session)
        # What went wrong is told by the lane, once and not at every try.
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL + 1)

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        """Encode and send one batch."""
        return self.post(self._encoder.request(spans, resource))

    def post(self, body: bytes) -> Answer:
        """Send a request that is encoded already."""
        session = self._session
        session.body = body
        session.answer = Answer(Outcome.LATER, "the SDK's exporter sent nothing")
        try:
            self._exporter.export([])
        except _Taken:
            pass
        except Exception as error:
            return Answer(Outcome.LATER, f"{type(error).__name__}: {error}")
        return session.answer

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
