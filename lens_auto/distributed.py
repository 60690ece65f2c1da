"""Trace context between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext

from lens_auto.helpers import safe_set_span_attributes
from lens_auto.propagation import extract_context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


def create_linked_span(
    tracer: Tracer,
    name: str,
    remote_context: Context | SpanContext | None = None,
    remote_carrier: Mapping[str, str] | None = None,
    **attributes: Any,
) -> Span:
    """Starts a span that links to a span of another process, without becoming its child.

    Args:
        tracer: Who makes the span.
        name: The span's name.
        remote_context: The other span's context; looked at first.
        remote_carrier: A carrier that holds it, as `inject_context` fills one.
        **attributes: Set on the span, filtered as `safe_set_span_attributes` does.

    Returns:
        The started span, for the caller to end. Without a valid remote context it has no link.
    """
    remote = _span_context(remote_context)
    if not remote.is_valid and remote_carrier is not None:
        remote = _span_context(extract_context(remote_carrier))
    span = tracer.start_span(name, links=[Link(remote)] if remote.is_valid else None)
    safe_set_span_attributes(span, attributes)
    return span


def _span_context(context: Context | SpanContext | None) -> SpanContext:
    if context is None:
        return trace.INVALID_SPAN_CONTEXT
    if isinstance(context, SpanContext):
        return context
    return trace.get_current_span(context).get_span_context()
