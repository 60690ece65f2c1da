"""The exporters that the `OTEL_*` variables name, by OpenTelemetry's own entry points."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler

TRACES_GROUP = "opentelemetry_traces_exporter"
SAMPLER_GROUP = "opentelemetry_traces_sampler"
_BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


class UnknownExporter(ValueError):
    """A name that no installed package answers to."""


def exporter_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names in `OTEL_TRACES_EXPORTER`; unset: `otlp` where an endpoint is configured, else none."""
    text = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if text:
        names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        return [] if names == ["none"] else [name for name in names if name != "none"]
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return ["otlp"] if any(environ.get(name) for name in endpoints) else []


def entry_point_name(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """`otlp` by the protocol that is configured (grpc where none is); every other name is itself.

    Raises:
        UnknownExporter: a protocol that is none of OTLP's.
    """
    if name != "otlp":
        return name
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(variable)
        if protocol:
            if protocol not in _BY_PROTOCOL:
                raise UnknownExporter(f"{variable}={protocol!r} is not one of {', '.join(_BY_PROTOCOL)}")
            return _BY_PROTOCOL[protocol]
    return _BY_PROTOCOL["grpc"]


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
    names = ", ".join(sorted({point.name for point in found}))
    raise UnknownExporter(f"OTEL_TRACES_EXPORTER={name!r} is not installed; installed: {names}")


def make_sampler() -> Sampler:
    """The head sampler that `OTEL_TRACES_SAMPLER` names, as the SDK reads it (its own, or one by entry point).

    An unknown name keeps everything, as the SDK does.
    """
    from opentelemetry.sdk.trace import sampling

    name = os.environ.get("OTEL_TRACES_SAMPLER", "").strip()
    for point in entry_points(group=SAMPLER_GROUP):
        if point.name == name:
            sampler: Sampler = point.load()(os.environ.get("OTEL_TRACES_SAMPLER_ARG", ""))
            return sampler
    return sampling._get_from_env_or_default()
