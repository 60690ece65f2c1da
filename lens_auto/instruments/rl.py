"""Metrics of reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_auto import semconv
from lens_auto.instruments._cache import BUCKETS_MS, PerMeter, number

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram, Meter
    from opentelemetry.metrics import _Gauge as Gauge

# name -> unit, description
_GAUGES = {
    semconv.RL_REWARD_MEAN: ("1", "Mean reward over a batch of rollouts"),
    semconv.RL_KL_DIVERGENCE: ("1", "Divergence of the policy from its reference"),
    semconv.RL_POLICY_LOSS: ("1", "Policy loss"),
    semconv.RL_VALUE_LOSS: ("1", "Value loss"),
    semconv.RL_ENTROPY: ("1", "Entropy of the policy"),
    semconv.RL_RESPONSE_LENGTH_MEAN: ("{token}", "Mean length of a response"),
    semconv.RL_GRAD_NORM: ("1", "Norm of the gradient"),
    semconv.RL_LEARNING_RATE: ("1", "Learning rate"),
    semconv.RL_THROUGHPUT_TOKENS_PER_SEC: ("{token}/s", "Tokens trained on in a second"),
}
_HISTOGRAMS = {
    semconv.RL_GENERATION_DURATION_MS: "Time to generate",
    semconv.RL_ROLLOUT_DURATION_MS: "Time to collect rollouts",
}


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        self.gauges: dict[str, Gauge] = {
            name: meter.create_gauge(name, unit=unit, description=text) for name, (unit, text) in _GAUGES.items()
        }
        self.histograms: dict[str, Histogram] = {
            name: meter.create_histogram(
                name, unit="ms", description=text, explicit_bucket_boundaries_advisory=BUCKETS_MS
            )
            for name, text in _HISTOGRAMS.items()
        }


_instruments = PerMeter(_Instruments)


def record_rl_metrics(
    meter: Meter,
    reward_mean: float | None = None,
    kl_divergence: float | None = None,
    policy_loss: float | None = None,
    value_loss: float | None = None,
    entropy: float | None = None,
    response_length_mean: float | None = None,
    grad_norm: float | None = None,
    learning_rate: float | None = None,
    throughput_tokens_per_sec: float | None = None,
    generation_duration_ms: float | None = None,
    rollout_duration_ms: float | None = None,
) -> None:
    """Records what is given: durations (ms) as histograms, everything else as gauges. None is not recorded,
    nor is what has no `float()`; a tensor is read, which may wait for its device.
    """
    instruments = _instruments(meter)
    for name, value in (
        (semconv.RL_REWARD_MEAN, reward_mean),
        (semconv.RL_KL_DIVERGENCE, kl_divergence),
        (semconv.RL_POLICY_LOSS, policy_loss),
        (semconv.RL_VALUE_LOSS, value_loss),
        (semconv.RL_ENTROPY, entropy),
        (semconv.RL_RESPONSE_LENGTH_MEAN, response_length_mean),
        (semconv.RL_GRAD_NORM, grad_norm),
        (semconv.RL_LEARNING_RATE, learning_rate),
        (semconv.RL_THROUGHPUT_TOKENS_PER_SEC, throughput_tokens_per_sec),
    ):
        found = number(name, value)
        if found is not None:
            instruments.gauges[name].set(found)
    for name, value in (
        (semconv.RL_GENERATION_DURATION_MS, generation_duration_ms),
        (semconv.RL_ROLLOUT_DURATION_MS, rollout_duration_ms),
    ):
        found = number(name, value)
        if found is not None:
            instruments.histograms[name].record(found)
