"""Requests into a FastAPI application. Under `opentelemetry-instrument` this needs no call."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("lens_auto")


def instrument_fastapi(app: Any, service_name: str | None = None) -> None:
    """Gives every request into `app` a SERVER span whose parent is the caller's span.

    OpenTelemetry's own instrumentation does it. An application that is instrumented already stays as it is.

    Args:
        app: The `FastAPI` application.
        service_name: Taken for the sake of Lens's signature. A span's service is named by its resource
            (`OTEL_SERVICE_NAME`, or `NemoLensConfig.service_name`), so it has no effect, and a debug line says so.

    Raises:
        ImportError: `opentelemetry-instrumentation-fastapi` is not installed.
    """
    try:
        from opentelemetry.instrumentation.fastapi import (  # type: ignore[import-not-found, unused-ignore]
            FastAPIInstrumentor,
        )
    except ImportError as error:
        raise ImportError(
            "instrument_fastapi needs opentelemetry-instrumentation-fastapi: pip install 'nemo-lens-auto[fastapi]'"
        ) from error
    if service_name is not None:
        logger.debug(
            "lens-auto: instrument_fastapi: service_name=%r has no effect; set OTEL_SERVICE_NAME", service_name
        )
    if not getattr(app, "_is_instrumented_by_opentelemetry", False):
        FastAPIInstrumentor.instrument_app(app)
