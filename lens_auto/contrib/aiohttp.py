"""Requests of an aiohttp client. Under `opentelemetry-instrument` this needs no call."""

from __future__ import annotations


def instrument_aiohttp_client() -> None:
    """Gives every request of a `ClientSession` made from now on a CLIENT span, and sends its context along.

    OpenTelemetry's own instrumentation does it. A second call changes nothing.

    Raises:
        ImportError: `opentelemetry-instrumentation-aiohttp-client` is not installed.
    """
    try:
        from opentelemetry.instrumentation.aiohttp_client import (  # type: ignore[import-not-found, unused-ignore]
            AioHttpClientInstrumentor,
        )
    except ImportError as error:
        raise ImportError(
            "instrument_aiohttp_client needs opentelemetry-instrumentation-aiohttp-client:"
            " pip install 'nemo-lens-auto[aiohttp]'"
        ) from error
    instrumentor = AioHttpClientInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument()
