"""Where spans, metrics and logs of OpenTelemetry's SDK go without a network: JSON lines on the console or in a file.

Needs the SDK, so only a process that makes such spans imports this. Records of training take another way: `export/`.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from lens_auto.export.console import iso_time
from lens_auto.values import held

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext

logger = logging.getLogger("lens_auto")

_HAS_IS_REMOTE = 0x100  # flags of a span's parent and of a link (opentelemetry/proto/trace/v1/trace.proto)
_IS_REMOTE = 0x200
_STATUS_CODES = {StatusCode.OK: 1, StatusCode.ERROR: 2}


# --- files ------------------------------------------------------------------------------------------------------------


class JsonLinesFile:
    """A file of whole lines. Each write is one append of its own, so that nothing written is lost with the process.

    Beyond half its limit the file becomes `<name>.old.jsonl`, in place of an earlier one: the newest lines stay.

    Args:
        locate: Gives the path, before each write: it changes after a fork, and when a rank's folder moves.
        limit_bytes: How much both files together may hold.
    """

    def __init__(self, locate: Callable[[], str], limit_bytes: int) -> None:
        self._locate = locate
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._descriptor = -1
        self._size = 0
        self._path = ""
        self._told = False
        self.dropped_lines = 0
        os.register_at_fork(after_in_child=self._after_fork)

    def write(self, line: bytes) -> bool:
        """Append one line (with its line feed). False where it could not be written; said once."""
        with self._lock:
            try:
                self._open(self._locate())
                if self._size and self._size + len(line) > self._limit_bytes // 2:
                    self._rotate()
                written = os.write(self._descriptor, line)
                if written != len(line):  # the disk is full: no half lines, unless others write to the file as well
                    if os.fstat(self._descriptor).st_size == self._size + written:
                        os.ftruncate(self._descriptor, self._size)
                    raise OSError(28, "no space left on the device", self._path)
                self._size += len(line)
                return True
            except OSError as error:
                self.dropped_lines += 1
                self._tell(error)
                return False

    @property
    def path(self) -> str:
        """The file written last; empty before the first line."""
        return self._path

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        with self._lock:
            self._close()

    def _open(self, path: str) -> None:
        if path == self._path and self._descriptor >= 0:
            return
        self._close()
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size
        self._path = path

    def _rotate(self) -> None:
        path = self._path
        os.replace(path, f"{path.removesuffix('.jsonl')}.old.jsonl")
        self._close()
        self._open(path)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "lens-auto: %r cannot be written (%s); spans of this process are dropped until it can;"
                " NEMO_LENS_RUN_DIR names another run directory",
                error.filename or self._path,
                error.strerror or error,
            )

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._close()


class FileSpanExporter(SpanExporter):
    """Spans as OTLP/JSON lines."""

    def __init__(self, file: JsonLinesFile) -> None:
        self.file = file

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One line for the batch."""
        return SpanExportResult.SUCCESS if self.file.write(spans_line(spans)) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Closes the file."""
        self.file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


class FileMetricExporter(MetricExporter):
    """Metrics as OTLP/JSON lines."""

    def __init__(self, file: JsonLinesFile) -> None:
        super().__init__()
        self.file = file

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """One line for the collection."""
        from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

        written = self.file.write(_message_line(encode_metrics(metrics_data)))
        return MetricExportResult.SUCCESS if written else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Nothing is held back."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Closes the file."""
        self.file.close()


class FileLogExporter(LogRecordExporter):
    """Log records as OTLP/JSON lines."""

    def __init__(self, file: JsonLinesFile) -> None:
        self.file = file

    def export(self, batch: Sequence[Any]) -> LogRecordExportResult:
        """One line for the batch."""
        from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs

        written = self.file.write(_message_line(encode_logs(batch)))
        return LogRecordExportResult.SUCCESS if written else LogRecordExportResult.FAILURE

    def shutdown(self) -> None:
        """Closes the file."""
        self.file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


def _message_line(message: Any) -> bytes:
    from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

    return _dump(_with_hexadecimal_ids(MessageToDict(message, use_integers_for_enums=True)))


def _with_hexadecimal_ids(value: Any) -> Any:
    """protobuf's JSON has bytes in base64; OTLP/JSON has ids in hexadecimal, the one difference between them."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in ("traceId", "spanId") else _with_hexadecimal_ids(item)
            for key, item in value.items()
        }
    return [_with_hexadecimal_ids(item) for item in value] if isinstance(value, list) else value


# --- standard output --------------------------------------------------------------------------------------------------


class ConsoleSpanExporter(SpanExporter):
    """Spans on standard output, one compact JSON object a line."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Each line leaves in one write: lines of several processes on one pipe stay whole."""
        for span in spans:
            print_line(_dump(_console_object(span)))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


def print_line(line: bytes) -> None:
    """Print a line (with its line feed) in one write."""
    sys.stdout.write(line.decode())
    sys.stdout.flush()


class ConsoleLogExporter(LogRecordExporter):
    """Log records on standard output, one compact JSON object a line, their ids written as spans have them."""

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """One line for each record."""
        for each in batch:
            print_line(_dump(_console_log(each)))
        return LogRecordExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is open."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held back."""
        return True


def console_metric_exporter() -> MetricExporter:
    """Metrics on standard output, one compact JSON object for each collection."""
    return ConsoleMetricExporter(out=sys.stdout, formatter=lambda data: data.to_json(indent=None) + "\n")


def _console_log(each: ReadableLogRecord) -> dict[str, Any]:
    record = each.log_record
    return {
        "trace_id": format_trace_id(record.trace_id) if record.trace_id else None,
        "span_id": format_span_id(record.span_id) if record.span_id else None,
        "time": iso_time(record.timestamp or record.observed_timestamp or 0),
        "severity": record.severity_text,
        "body": record.body,
        "attributes": dict(record.attributes or {}),
        "resource": {"attributes": dict(each.resource.attributes)},
    }


def _console_object(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.get_span_context(), span.parent
    found: dict[str, Any] = {
        "trace_id": format_trace_id(context.trace_id) if context else None,
        "span_id": format_span_id(context.span_id) if context else None,
        "parent_id": format_span_id(parent.span_id) if parent else None,
        "kind": span.kind.name,
        "name": span.name,
        "start_time": iso_time(span.start_time or 0),
        "end_time": iso_time(span.end_time or 0),
        "attributes": dict(span.attributes or {}),
        "resource": {"attributes": dict(span.resource.attributes)},
    }
    if span.status.status_code is not StatusCode.UNSET:
        found["status"] = {"code": span.status.status_code.name, "message": span.status.description or ""}
    if span.events:
        found["events"] = [
            {"name": event.name, "time": iso_time(event.timestamp), "attributes": dict(event.attributes or {})}
            for event in span.events
        ]
    if span.links:
        found["links"] = [
            {
                "trace_id": format_trace_id(link.context.trace_id),
                "span_id": format_span_id(link.context.span_id),
                "attributes": dict(link.attributes or {}),
            }
            for link in span.links
        ]
    return found


# --- OTLP/JSON of SDK spans -------------------------------------------------------------------------------------------


def spans_line(spans: Sequence[ReadableSpan]) -> bytes:
    """A batch of spans as one line of OTLP/JSON, a `TracesData` message.

    See https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.
    """
    try:
        return orjson.dumps(_message(spans, _encoded_resource), default=_plain, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, ValueError):
        return _dump(_message(spans, _resource))


def _message(spans: Sequence[ReadableSpan], encode_resource: Callable[[Resource], Any]) -> dict[str, Any]:
    resources: dict[int, tuple[Resource, dict[Any, list[dict[str, Any]]]]] = {}
    for span in spans:
        _, scopes = resources.setdefault(id(span.resource), (span.resource, {}))
        scopes.setdefault(span.instrumentation_scope, []).append(_span(span))
    return {
        "resourceSpans": [
            {
                "resource": encode_resource(resource),
                "scopeSpans": [{"scope": _scope(scope), "spans": members} for scope, members in scopes.items()],
                **({"schemaUrl": resource.schema_url} if resource.schema_url else {}),
            }
            for resource, scopes in resources.values()
        ]
    }


def _resource(resource: Resource) -> dict[str, Any]:
    return {"attributes": _attributes(resource.attributes)}


_known_resource: tuple[Resource, orjson.Fragment] | None = None


def _encoded_resource(resource: Resource) -> orjson.Fragment:
    """A process has one resource at a time: the last one's encoding is kept."""
    global _known_resource
    known = _known_resource
    if known is None or known[0] is not resource:
        known = _known_resource = (resource, orjson.Fragment(_dump(_resource(resource)).rstrip()))
    return known[1]


def _scope(scope: InstrumentationScope | None) -> dict[str, Any]:
    if scope is None:
        return {}
    found: dict[str, Any] = {"name": scope.name}
    if scope.version:
        found["version"] = scope.version
    if scope.attributes:
        found["attributes"] = _attributes(scope.attributes)
    return found


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    found: dict[str, Any] = {} if context is None else _ids(context)
    found |= {
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP keeps 0 for unspecified
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes),
    }
    if span.parent is not None:
        found["parentSpanId"] = format_span_id(span.parent.span_id)
    flags = int(context.trace_flags) if context else 0
    found["flags"] = flags | _HAS_IS_REMOTE | (_IS_REMOTE if span.parent is not None and span.parent.is_remote else 0)
    if span.events:
        found["events"] = [_event(event) for event in span.events]
    if span.links:
        found["links"] = [_link(link) for link in span.links]
    for key, dropped in (
        ("droppedAttributesCount", span.dropped_attributes),
        ("droppedEventsCount", span.dropped_events),
        ("droppedLinksCount", span.dropped_links),
    ):
        if dropped:
            found[key] = dropped
    code = _STATUS_CODES.get(span.status.status_code)
    if code is not None:
        found["status"] = {"code": code, "message": span.status.description or ""}
    return found


def _ids(context: SpanContext) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": format_trace_id(context.trace_id),
        "spanId": format_span_id(context.span_id),
    }
    if context.trace_state:
        found["traceState"] = context.trace_state.to_header()
    return found


def _event(event: Event) -> dict[str, Any]:
    return {"name": event.name, "timeUnixNano": str(event.timestamp), "attributes": _attributes(event.attributes)}


def _link(link: Link) -> dict[str, Any]:
    flags = int(link.context.trace_flags) | _HAS_IS_REMOTE | (_IS_REMOTE if link.context.is_remote else 0)
    return {**_ids(link.context), "flags": flags, "attributes": _attributes(link.attributes)}


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    found = []
    for key, value in (attributes or {}).items():
        try:
            found.append({"key": key, "value": _value(value)})
        except OverflowError:  # as the SDK's encoder has it: the attribute alone is lost
            logger.debug("lens-auto: the attribute %r is left out: %r is no integer of 64 bits", key, value)
    return found


def _value(value: Any) -> dict[str, Any]:
    """OTLP's AnyValue. Raises OverflowError for an integer that has more than 64 bits."""
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        if held(value) is None:
            raise OverflowError
        return {"intValue": str(value)}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"doubleValue": value}
        return {"doubleValue": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": _attributes(value)}}
    if isinstance(value, Sequence):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {} if value is None else {"stringValue": str(value)}


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):  # integers of more than 64 bits; lone surrogates, which become question marks
        text = json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple, Sequence)) and not isinstance(value, (str, bytes)):
        return list(value)
    return str(value)
