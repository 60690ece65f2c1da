"""Spans for a terminal or a log collector: one compact JSON object a line."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lens_auto.export.spans import Span, WriterSpans

_EPOCH = datetime.datetime(1970, 1, 1)
# What JSON readers keep of an integer; orjson refuses more.
_INT64_MAX = (1 << 63) - 1


def lines(writers: Iterable[WriterSpans]) -> Iterator[tuple[bytes, int]]:
    """Encode the spans of some writers.

    Returns:
        Lines, each with its line feed, and how many spans are in each (1).
    """
    for writer in writers:
        resource = _plain(writer.resource)
        for span in writer.spans:
            yield orjson.dumps(_object(span, resource), option=orjson.OPT_APPEND_NEWLINE), 1


def encode(span: Span, resource: dict[str, Any]) -> bytes:
    """One span as a line, with its line feed."""
    return orjson.dumps(_object(span, _plain(resource)), option=orjson.OPT_APPEND_NEWLINE)


def _object(span: Span, resource: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": None if span.parent_id is None else span.parent_id.hex(),
        "kind": "INTERNAL",
        "name": span.name,
        "start_time": iso_time(span.start_ns),
        "end_time": iso_time(span.end_ns),
        "attributes": _plain(span.attributes),
        "links": [
            {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex(), "attributes": _plain(link.attributes)}
            for link in span.links
        ],
        "resource": {"attributes": resource},
    }
    if span.error is not None:
        found["status"] = {"code": "ERROR", "message": span.error}
    return found


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        key: min(value, _INT64_MAX) if isinstance(value, int) and not isinstance(value, bool) else value
        for key, value in attributes.items()
    }


def iso_time(wall_ns: int) -> str:
    """ISO 8601 in UTC, to the nanosecond."""
    seconds, ns = divmod(wall_ns, 1_000_000_000)
    return f"{(_EPOCH + datetime.timedelta(seconds=seconds)).isoformat()}.{ns:09d}Z"
