"""The exporters that the `OTEL_*` variables name, by OpenTelemetry's own entry points."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from lens_auto.destinations import CONSOLE, FILE, METRICS, OTLP, TRACES, destinations, endpoint_is_set
from lens_auto.destinations import exporter_names as named

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler

TRACES_GROUP = "opentelemetry_traces_exporter"
GRPC, HTTP = "otlp_proto_grpc", "otlp_proto_http"
LOCAL = frozenset({CONSOLE, FILE})  # what is sent there stays on this node
_BY_PROTOCOL = {"grpc": GRPC, "http/protobuf": HTTP}
_OWN = {"otlp": OTLP, "console": CONSOLE}  # NEMO_LENS_EXPORTER; its `file` is the run directory, without an exporter


class UnknownExporter(ValueError):
    """A name that no installed package answers to."""


def exporter_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Whom the records of ranks are sent to; empty: they stay in the run directory.

    What `OTEL_TRACES_EXPORTER` names, else `NEMO_LENS_EXPORTER`, else `otlp` where an endpoint is configured.
    """
    names = named(TRACES, environ)
    if names is not None:
        return names
    own = environ.get("NEMO_LENS_EXPORTER", "").strip().lower()
    if own in (*_OWN, "file"):
        return [_OWN[own]] if own in _OWN else []
    return [OTLP] if endpoint_is_set(TRACES, environ) else []


def metrics_exporter_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Whom the metrics of ranks go to; empty: none are made.

    What `OTEL_METRICS_EXPORTER` names, else as for spans; `NEMO_LENS_METRICS_ENABLED=0` says no.
    """
    return destinations(METRICS, environ, {}, lambda: True)


def entry_point_name(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """`otlp` by the protocol that is configured (grpc where none is); every other name is itself.

    Raises:
        UnknownExporter: a protocol that is none of OTLP's.
    """
    if name != OTLP:
        return name
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(variable, "").strip()
        if protocol:
            if protocol not in _BY_PROTOCOL:
                raise UnknownExporter(f"{variable}={protocol!r} is not one of {', '.join(_BY_PROTOCOL)}")
            return _BY_PROTOCOL[protocol]
    return GRPC


def make_exporter(name: str) -> SpanExporter:
    """Make the exporter of a name.

    Raises:
        UnknownExporter: nothing installed has this name; the message lists what there is.
    """
    wanted = entry_point_name(name)
    found = entry_points(group=TRACES_GROUP)
    for point in found:
        if point.name == wanted:
            exporter: SpanExporter = point.load()()
            return exporter
    names = ", ".join(sorted({point.name for point in found} | {OTLP, *LOCAL}))
    raise UnknownExporter(f"OTEL_TRACES_EXPORTER={name!r} is not installed; installed: {names}")


def make_sampler() -> Sampler:
    """The head sampler that `OTEL_TRACES_SAMPLER` names: the SDK's own, or one by entry point."""
    from lens_auto.pipelines import sampler_from_environment

    return sampler_from_environment()
