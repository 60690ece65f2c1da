"""Trace context as bytes, for programs that send some along with their tensors."""

from __future__ import annotations

import json

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from lens_auto.propagation import extract_context, inject_context


def serialize_context() -> bytes:
    """The current trace context and baggage as JSON; `{}` where there is neither."""
    carrier: dict[str, str] = {}
    inject_context(carrier)
    return json.dumps(carrier).encode()


def deserialize_context(data: bytes) -> dict[str, str] | None:
    """The carrier in what `serialize_context` made; None where `data` is anything else."""
    try:
        found = json.loads(bytes(data).decode())
    except (ValueError, TypeError):
        return None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return None
    return found


def extract_nccl_context(data: bytes) -> Context:
    """The context in what `serialize_context` made; the current context where `data` is anything else."""
    carrier = deserialize_context(data)
    return otel_context.get_current() if carrier is None else extract_context(carrier)
