"""Spans as OTLP/JSON lines: one `TracesData` message a line, as the OpenTelemetry file exporter specification has it.

Ids are hexadecimal, 64-bit integers are strings, names are in lower camel case
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import orjson

import lens_auto
from lens_auto import semconv

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lens_auto.export.spans import Link, Span, WriterSpans

SPANS_PER_LINE = 512

_KIND_INTERNAL = 1
_STATUS_ERROR = 2
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def lines(writers: Iterable[WriterSpans]) -> Iterator[tuple[bytes, int]]:
    """Encode the spans of some writers.

    Returns:
        Lines, each with its line feed, and how many spans are in each.
    """
    for writer in writers:
        spans = iter(writer.spans)
        while batch := list(itertools.islice(spans, SPANS_PER_LINE)):
            yield line(batch, writer.resource), len(batch)


def line(spans: Iterable[Span], resource: dict[str, Any]) -> bytes:
    """One line, with its line feed: spans of one resource."""
    scope = {"name": semconv.INSTRUMENTATION_SCOPE, "version": lens_auto.__version__}
    scope_spans = [{"scope": scope, "spans": [_span(span) for span in spans]}]
    message = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": scope_spans}]}
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def _span(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "name": span.name,
        "kind": _KIND_INTERNAL,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id is not None:
        found["parentSpanId"] = span.parent_id.hex()
    if span.links:
        found["links"] = [_link(link) for link in span.links]
    if span.error is not None:
        found["status"] = {"code": _STATUS_ERROR, "message": span.error}
    return found


def _link(link: Link) -> dict[str, Any]:
    found: dict[str, Any] = {"traceId": link.trace_id.hex(), "spanId": link.span_id.hex()}
    if link.trace_state:
        found["traceState"] = link.trace_state
    if link.attributes:
        found["attributes"] = _attributes(link.attributes)
    return found


def _attributes(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(min(max(value, _INT64_MIN), _INT64_MAX))}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"doubleValue": value}
        return {"doubleValue": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return {"arrayValue": {"values": [_value(item) for item in value]}}
