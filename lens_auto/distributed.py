"""Trace context between ranks."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext

from lens_auto.helpers import safe_set_span_attributes
from lens_auto.propagation import extract_context, inject_context
from lens_auto.values import encodable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


logger = logging.getLogger("lens_auto")

CARRIER_BYTES = 512  # of the one broadcast that a usual carrier needs: length, then JSON, then zeros
_LENGTH_BYTES = 4


def broadcast_trace_context(rank: int, src_rank: int = 0) -> dict[str, str] | None:
    """Gives every rank the trace context and baggage that are current on one of them.

    A collective on the default group: all ranks call it, or none. Decide by what is the same on all ranks, never by
    whether this rank exports. It is one broadcast of 512 bytes; a carrier that does not fit takes a second one. Both
    live on the group's device, and the only thing read back from there is the carrier itself, on the receiving ranks.

    Args:
        rank: Global rank of this process.
        src_rank: Global rank whose context it is.

    Returns:
        The carrier (W3C headers), also on the source; None without torch, without an initialized default group, or
        where nothing is current on the source.
    """
    distributed = sys.modules.get("torch.distributed")  # whoever initialized a group has imported it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    import torch

    device = _group_device()
    if rank == src_rank:
        carrier = _current_carrier()
        payload = json.dumps(carrier).encode() if carrier else b""
        message = len(payload).to_bytes(_LENGTH_BYTES, "big") + payload
        distributed.broadcast(_tensor(message[:CARRIER_BYTES].ljust(CARRIER_BYTES, b"\0"), device), src=src_rank)
        if len(message) > CARRIER_BYTES:
            distributed.broadcast(_tensor(message[CARRIER_BYTES:], device), src=src_rank)
        return carrier
    head = torch.zeros(CARRIER_BYTES, dtype=torch.uint8, device=device)
    distributed.broadcast(head, src=src_rank)
    received = _bytes(head)
    length = int.from_bytes(received[:_LENGTH_BYTES], "big")
    payload = received[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if length > len(payload):
        rest_tensor = torch.zeros(length - len(payload), dtype=torch.uint8, device=device)
        distributed.broadcast(rest_tensor, src=src_rank)
        payload += _bytes(rest_tensor)
    return _decoded(payload)


def _current_carrier() -> dict[str, str] | None:
    """Never raises: the other ranks are waiting in the broadcast."""
    carrier: dict[str, str] = {}
    try:
        inject_context(carrier)
    except Exception:
        logger.debug("lens-auto: the current context cannot be written down", exc_info=True)
        return None
    return carrier or None


def _decoded(payload: bytes) -> dict[str, str] | None:
    if not payload:
        return None
    try:
        found = json.loads(payload)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found else None


def _group_device() -> torch.device:
    """Where tensors of the default group live: the CPU where its backend takes them there, else its accelerator."""
    import torch
    import torch.distributed as dist

    # "cpu:gloo,cuda:nccl" or "cuda:nccl" (torch 2.1 and later); a custom backend may answer without devices.
    kinds = [part.split(":")[0] for part in str(dist.get_backend_config()).split(",") if ":" in part]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(list(data), dtype=torch.uint8, device=device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().tolist())


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
    span = tracer.start_span(encodable(name), links=[Link(remote)] if remote.is_valid else None)
    safe_set_span_attributes(span, attributes)
    return span


def _span_context(context: Context | SpanContext | None) -> SpanContext:
    if context is None:
        return trace.INVALID_SPAN_CONTEXT
    if isinstance(context, SpanContext):
        return context
    return trace.get_current_span(context).get_span_context()
