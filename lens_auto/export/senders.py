"""Who sends spans: over OTLP, through any other exporter of OpenTelemetry's entry points, to a file or the console."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lens_auto.destinations import CONSOLE, FILE
from lens_auto.export import console, otlp_json
from lens_auto.export.answer import ACCEPTED, Answer, Outcome, Sender
from lens_auto.export.exporters import GRPC, HTTP, entry_point_name, make_exporter
from lens_auto.export.spans import Span

logger = logging.getLogger("lens_auto.export")

FILE_VARIABLE = "NEMO_LENS_FILE"
ENCODER_VARIABLE = "NEMO_LENS_OTLP_ENCODER"  # `sdk`: OpenTelemetry's own exporters from end to end
# Credentials that a user's code makes are the business of OpenTelemetry's own exporters.
_PROVIDERS = {
    HTTP: (
        "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
        "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
    ),
    GRPC: (
        "OTEL_PYTHON_EXPORTER_OTLP_GRPC_CREDENTIAL_PROVIDER",
        "OTEL_PYTHON_EXPORTER_OTLP_GRPC_TRACES_CREDENTIAL_PROVIDER",
    ),
}


def make_sender(name: str, default_file: Callable[[], str], environ: Mapping[str, str] = os.environ) -> Sender:
    """Make the sender of an exporter's name.

    Args:
        name: as `OTEL_TRACES_EXPORTER` has it.
        default_file: where `lens_file` writes unless `NEMO_LENS_FILE` says.
        environ: configures it.

    Raises:
        UnknownExporter: nothing installed has this name.
        ValueError: a variable that it needs has a value that cannot be used.
        OSError: a file that a variable names cannot be read.
    """
    if name == CONSOLE:
        return ConsoleSender()
    if name == FILE:
        path = environ.get(FILE_VARIABLE, "").strip()
        return FileSender(lambda: path or default_file())
    wanted = entry_point_name(name, environ)
    own = environ.get(ENCODER_VARIABLE, "").strip().lower() != "sdk"
    own = own and not any(environ.get(variable) for variable in _PROVIDERS.get(wanted, ()))
    if own and wanted == HTTP:
        from lens_auto.export.otlp_http import HttpSender

        return HttpSender()
    if own and wanted == GRPC:
        from lens_auto.export.otlp_grpc import GrpcSender

        return GrpcSender(environ)
    return SdkSender(name)


class SdkSender:
    """Sends through an exporter of the SDK's interface."""

    remote = True

    def __init__(self, name: str) -> None:
        self._exporter = make_exporter(name)
        self._resource: tuple[dict[str, Any], Any] | None = None

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        """Encode and export one batch."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        from lens_auto.export.sdk import resource_from, to_sdk

        if self._resource is None or self._resource[0] != resource:
            self._resource = (resource, resource_from(resource))
        made = self._resource[1]
        try:
            result = self._exporter.export([to_sdk(span, made) for span in spans])
        except Exception as error:
            return Answer(Outcome.LATER, f"{type(error).__name__}: {error}")
        return ACCEPTED if result is SpanExportResult.SUCCESS else Answer(Outcome.LATER, "its exporter failed")

    def close(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()


class ConsoleSender:
    """Prints one JSON object a line on standard output."""

    remote = False

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        """Print one batch."""
        try:
            sys.stdout.buffer.write(b"".join([console.encode(span, resource) for span in spans]))
            sys.stdout.buffer.flush()
        except (OSError, ValueError) as error:  # nobody reads any more
            return Answer(Outcome.LATER, f"standard output: {error}")
        return ACCEPTED

    def close(self) -> None:
        """Standard output is not ours to close."""


class FileSender:
    """Appends OTLP/JSON lines to a file: one write for a batch, whole or not at all.

    Args:
        locate: gives the path, at the first batch.
    """

    remote = False

    def __init__(self, locate: Callable[[], str]) -> None:
        self._locate = locate
        self._descriptor = -1

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        """Append one batch."""
        data = otlp_json.line(spans, resource)
        try:
            if self._descriptor < 0:
                flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._descriptor = os.open(self._locate(), flags, 0o600)
            size = os.fstat(self._descriptor).st_size
            written = os.write(self._descriptor, data)
            if written != len(data):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                return Answer(Outcome.LATER, "no space left for the file")
        except OSError as error:
            return Answer(Outcome.LATER, f"{error.filename or 'the file'}: {error.strerror or error}")
        return ACCEPTED

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
