"""Metrics of services that collect and verify rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_auto import semconv
from lens_auto.instruments._cache import BUCKETS_MS, PerMeter, number

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, Meter

_HISTOGRAMS = {
    semconv.GYM_SERVER_REQUEST_DURATION_MS: "Time to answer a request",
    semconv.GYM_ROLLOUT_DURATION_MS: "Time of a rollout",
    semconv.GYM_VERIFY_DURATION_MS: "Time to verify a rollout",
}


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        self.histograms: dict[str, Histogram] = {
            name: meter.create_histogram(
                name, unit="ms", description=text, explicit_bucket_boundaries_advisory=BUCKETS_MS
            )
            for name, text in _HISTOGRAMS.items()
        }
        self.success_rate = meter.create_gauge(
            semconv.GYM_VERIFY_SUCCESS_RATE, unit="1", description="Share of rollouts that were verified as good"
        )
        self.servers = meter.create_gauge(
            semconv.GYM_SERVERS_ACTIVE, unit="{server}", description="Services that are running"
        )


_instruments = PerMeter(_Instruments)


def record_gym_metrics(
    meter: Meter,
    server_request_duration_ms: float | None = None,
    rollout_duration_ms: float | None = None,
    verify_duration_ms: float | None = None,
    verify_success_rate: float | None = None,
    active_servers: int | None = None,
) -> None:
    """Records what is given: durations (ms) as histograms, the others as gauges. None is not recorded,
    nor is what has no `float()`.
    """
    instruments = _instruments(meter)
    for name, value in (
        (semconv.GYM_SERVER_REQUEST_DURATION_MS, server_request_duration_ms),
        (semconv.GYM_ROLLOUT_DURATION_MS, rollout_duration_ms),
        (semconv.GYM_VERIFY_DURATION_MS, verify_duration_ms),
    ):
        found = number(name, value)
        if found is not None:
            instruments.histograms[name].record(found)
    for name, value, gauge in (
        (semconv.GYM_VERIFY_SUCCESS_RATE, verify_success_rate, instruments.success_rate),
        (semconv.GYM_SERVERS_ACTIVE, active_servers, instruments.servers),
    ):
        found = number(name, value)
        if found is not None:
            gauge.set(found)
