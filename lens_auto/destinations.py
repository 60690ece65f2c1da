"""Which exporters the `OTEL_*` variables name. Imports nothing, so that whoever sends nothing pays for nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TRACES, METRICS, LOGS = "traces", "metrics", "logs"
CONSOLE, FILE, OTLP, NONE = "console", "lens_file", "otlp", "none"


def exporter_names(signal: str, environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """What `OTEL_<SIGNAL>_EXPORTER` names; None where it is unset or blank. `none` is an empty list."""
    text = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
    if not text:
        return None
    return [name for name in dict.fromkeys(part.strip() for part in text.split(",")) if name and name != NONE]


def endpoint_is_set(signal: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an OTLP endpoint is configured for a signal, by its own variable or the general one."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return any(environ.get(name, "").strip() for name in names)
