"""The trace that a job was started from: TRACEPARENT, TRACESTATE and BAGGAGE of rank 0's environment, on every rank.

The names are those of OpenTelemetry's specification of environment variables as carriers. Rank 0's "go" of the
agreement takes them to the others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("lens_auto")

HEADERS = ("traceparent", "tracestate", "baggage")
MAX_HEADER_BYTES = 8192  # of one header: the bound of the W3C's baggage

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The headers that the environment holds; what is too long or, of a traceparent, malformed is left out."""
    return clean({name: environ.get(name.upper(), "").strip() for name in HEADERS})


def clean(found: Any) -> dict[str, str]:
    """Those of some headers that can be used; also of what another process sent."""
    if not isinstance(found, dict):
        return {}
    kept = {}
    for name in HEADERS:
        value = found.get(name)
        if not isinstance(value, str) or not value:
            continue
        fits = len(value.encode("utf-8", "surrogatepass")) <= MAX_HEADER_BYTES and value.isprintable()
        if fits and (name != "traceparent" or _TRACEPARENT.fullmatch(value)):
            kept[name] = value
        else:
            logger.debug("lens-auto: %s of the environment is not valid and is left out", name.upper())
    return kept


def span_of(headers: Any) -> tuple[bytes, bytes, str] | None:
    """Trace id, span id and trace state that some headers name; None where they name no span."""
    found = clean(headers)
    traceparent = found.get("traceparent")
    if traceparent is None:
        return None
    _, trace_id, span_id, *_ = traceparent.split("-")
    return bytes.fromhex(trace_id), bytes.fromhex(span_id), found.get("tracestate", "")
