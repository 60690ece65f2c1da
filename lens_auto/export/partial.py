"""The little that is read of OTLP's answers: spans of an accepted request that the endpoint threw away."""

from __future__ import annotations


def rejected_spans(body: bytes) -> tuple[int, str]:
    """How many spans an `ExportTraceServiceResponse` says it rejected, and why. An answer that is none: 0."""
    if len(body) <= 2:  # nothing, or an empty partial success
        return 0, ""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return 0, ""
    return max(0, partial.rejected_spans), partial.error_message
