"""Metrics of an inference server, by OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lens_auto import semconv
from lens_auto.instruments._cache import BUCKETS_S, PerMeter, number
from lens_auto.values import encodable

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, Meter

OPERATION_NAME = "text_completion"
PROVIDER_NAME = "nemo"
TOKEN_TYPE_INPUT = "input"
TOKEN_TYPE_OUTPUT = "output"

# Advised by the conventions for `gen_ai.client.token.usage`: powers of four.
_TOKEN_BUCKETS = tuple(float(4**power) for power in range(14))


class _Instruments(NamedTuple):
    duration: Histogram
    tokens: Histogram


def _make(meter: Meter) -> _Instruments:
    return _Instruments(
        meter.create_histogram(
            semconv.GEN_AI_SERVER_REQUEST_DURATION,
            unit="s",
            description="Time to answer a request",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        ),
        meter.create_histogram(
            semconv.GEN_AI_CLIENT_TOKEN_USAGE,
            unit="{token}",
            description="Tokens read and made for a request",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        ),
    )


_instruments = PerMeter(_make)


def record_inference_metrics(
    meter: Meter,
    request_duration_s: float | None = None,
    model: str | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    operation_name: str = OPERATION_NAME,
    provider_name: str = PROVIDER_NAME,
) -> None:
    """Records one request.

    Args:
        meter: Where to record.
        request_duration_s: Histogram `gen_ai.server.request.duration`, in seconds.
        model: Attribute `gen_ai.request.model`; None: left out.
        input_tokens: Histogram `gen_ai.client.token.usage` with `gen_ai.token.type` = input.
        output_tokens: The same with output.
        operation_name: Attribute `gen_ai.operation.name`.
        provider_name: Attribute `gen_ai.provider.name`.
    """
    instruments = _instruments(meter)
    attributes = {
        semconv.GEN_AI_OPERATION_NAME: encodable(str(operation_name)),
        semconv.GEN_AI_PROVIDER_NAME: encodable(str(provider_name)),
    }
    if model is not None:
        attributes[semconv.GEN_AI_REQUEST_MODEL] = encodable(str(model))
    duration = number(semconv.GEN_AI_SERVER_REQUEST_DURATION, request_duration_s)
    if duration is not None:
        instruments.duration.record(duration, attributes)
    for tokens, kind in ((input_tokens, TOKEN_TYPE_INPUT), (output_tokens, TOKEN_TYPE_OUTPUT)):
        count = number(semconv.GEN_AI_CLIENT_TOKEN_USAGE, tokens)
        if count is not None:
            instruments.tokens.record(count, {**attributes, semconv.GEN_AI_TOKEN_TYPE: kind})
