"""Which exporters the variables name. Nothing of the SDK is imported to find that out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lens_auto.settings import parse_bool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def logs_wanted(environ: Mapping[str, str], said: Mapping[str, Any]) -> bool:
    """Whether the program's logs are to leave: `NEMO_LENS_LOGS_ENABLED`, else what the program said."""
    switch = parse_bool(environ.get("NEMO_LENS_LOGS_ENABLED", ""))
    return bool(said.get(LOGS)) if switch is None else switch


def destinations(
    signal: str, environ: Mapping[str, str], said: Mapping[str, Any], exports: Callable[[], bool]
) -> list[str]:
    """Exporters that a signal of this process goes to; empty: it goes nowhere.

    `OTEL_<SIGNAL>_EXPORTER` first, then `NEMO_LENS_EXPORTER`, then `otlp` where an endpoint is set. Without any of them
    spans go to the run directory, and logs where they are wanted; metrics go nowhere.

    Args:
        signal: `traces`, `metrics` or `logs`.
        environ: The variables.
        said: What the program's `setup_telemetry` said; weaker than the variables.
        exports: Whether this process exports; asked only where something would leave the node.
    """
    switch = parse_bool(environ.get(f"NEMO_LENS_{signal.upper()}_ENABLED", ""))
    if switch is False or (switch is None and signal != LOGS and said.get(signal) is False):
        return []
    names = exporter_names(signal, environ)
    if names is None:
        if signal == LOGS and not logs_wanted(environ, said):
            return []
        own = environ.get("NEMO_LENS_EXPORTER", "").strip().lower() or said.get("exporter", "")
        if own in (CONSOLE, OTLP, "file"):
            names = [FILE if own == "file" else own]
        elif endpoint_is_set(signal, environ):
            names = [OTLP]
        else:
            return [] if signal == METRICS else [FILE]
    if any(name != FILE for name in names) and not exports():
        return [name for name in names if name == FILE]
    return names


# The variables that decide how a signal is built, by their beginning.
_VARIABLES = {
    TRACES: ("OTEL_TRACES_", "OTEL_BSP_", "OTEL_SPAN_", "OTEL_ATTRIBUTE_", "OTEL_EVENT_", "OTEL_LINK_"),
    METRICS: ("OTEL_METRIC", "OTEL_EXPORTER_PROMETHEUS_"),
    LOGS: ("OTEL_LOGS_", "OTEL_BLRP_", "OTEL_LOGRECORD_"),
}
_MAY_HOLD_SECRETS = ("ENDPOINT", "HEADERS", "CERTIFICATE", "KEY")


def reason(signal: str, error: BaseException, environ: Mapping[str, str] = os.environ) -> str:
    """Why a signal could not be built, with the variables that were set for it: the SDK's errors rarely name one."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    beginnings = (*_VARIABLES[signal], "OTEL_EXPORTER_OTLP_")
    set_here = [
        name if name.endswith(_MAY_HOLD_SECRETS) else f"{name}={environ[name]!r}"
        for name in sorted(environ)
        if name.startswith(beginnings) and environ[name].strip() and name not in text
    ]
    return f"{text} ({', '.join(set_here)})" if set_here else text
