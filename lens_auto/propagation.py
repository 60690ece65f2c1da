"""W3C trace context and baggage in and out of a carrier (HTTP headers, message attributes, a plain dict)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

# Our own pair and not the global propagator: OTEL_PROPAGATORS must not change what ranks understand of each other.
_propagator = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


def inject_context(carrier: MutableMapping[str, str]) -> None:
    """Writes the current trace context and baggage into `carrier`; nothing where there is neither."""
    _propagator.inject(carrier)


def extract_context(carrier: Mapping[str, str] | None) -> Context:
    """The context that `carrier` holds; an empty one where it holds none or cannot be read. Never raises."""
    if not carrier:
        return Context()
    try:
        return _propagator.extract(carrier, context=Context())
    except Exception:  # whatever arrived is not a carrier: values that are no strings, no mapping at all
        return Context()
