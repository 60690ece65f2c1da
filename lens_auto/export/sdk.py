"""Our spans as the SDK's, for the exporters that OpenTelemetry's entry points name."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from lens_auto import __version__, semconv
from lens_auto.export.spans import Span

_SCOPE = InstrumentationScope(semconv.INSTRUMENTATION_SCOPE, __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_INT64_MAX = (1 << 63) - 1


def to_sdk(span: Span, resource: Resource) -> ReadableSpan:
    """A finished span of the SDK with our ids, times and links."""
    trace_id = int.from_bytes(span.trace_id, "big")
    parent = None if span.parent_id is None else _context(trace_id, span.parent_id, remote=False)
    status = Status(StatusCode.ERROR, span.error) if span.error is not None else Status()
    return ReadableSpan(
        name=span.name,
        context=_context(trace_id, span.span_id, remote=False),
        parent=parent,
        resource=resource,
        attributes=_attributes(span.attributes),
        links=[
            Link(
                _context(int.from_bytes(link.trace_id, "big"), link.span_id, True, link.trace_state),
                _attributes(link.attributes),
            )
            for link in span.links
        ],
        kind=SpanKind.INTERNAL,
        status=status,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: int, span_id: bytes, remote: bool, trace_state: str = "") -> SpanContext:
    state = TraceState.from_header([trace_state]) if trace_state else None
    return SpanContext(trace_id, int.from_bytes(span_id, "big"), remote, _SAMPLED, state)


def _attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """OTLP holds integers of 64 bits; a counter of ours is unsigned."""
    return {
        key: max(min(value, _INT64_MAX), -_INT64_MAX - 1) if type(value) is int else value
        for key, value in attributes.items()
    }


def resource_from(attributes: dict[str, Any]) -> Resource:
    """A rank's resource. The SDK adds what it says about itself."""
    return Resource.create(_attributes(attributes))
