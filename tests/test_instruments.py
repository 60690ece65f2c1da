"""Each instruments module: names, kinds, units, attributes and values, as the SDK collects them."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, Histogram, InMemoryMetricReader, Sum

from lens_auto import instruments
from lens_auto.instruments import gym, inference, rl, training

Collected = dict[str, Any]


class Recorded:
    """A meter, and what it recorded."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.meter = self.provider.get_meter("test")

    def collect(self) -> Collected:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def points(metric: Any) -> list[tuple[float, dict[str, Any]]]:
    """(value or sum, attributes) of each data point."""
    return [
        (point.sum if isinstance(metric.data, Histogram) else point.value, dict(point.attributes or {}))
        for point in metric.data.data_points
    ]


def test_inference(recorded: Recorded) -> None:
    inference.record_inference_metrics(
        recorded.meter, request_duration_s=0.42, model="llama", input_tokens=128, output_tokens=256
    )
    found = recorded.collect()
    assert set(found) == {"gen_ai.server.request.duration", "gen_ai.client.token.usage"}
    attributes = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "nemo",
        "gen_ai.request.model": "llama",
    }
    duration, usage = found["gen_ai.server.request.duration"], found["gen_ai.client.token.usage"]
    assert (duration.unit, usage.unit) == ("s", "{token}")
    assert isinstance(duration.data, Histogram)
    assert points(duration) == [(0.42, attributes)]
    assert sorted(points(usage), key=lambda point: point[0]) == [
        (128, {**attributes, "gen_ai.token.type": "input"}),
        (256, {**attributes, "gen_ai.token.type": "output"}),
    ]


def test_inference_with_other_names(recorded: Recorded) -> None:
    instruments.record_inference_metrics(recorded.meter, input_tokens=0, provider_name="p", operation_name="chat")
    found = recorded.collect()
    assert set(found) == {"gen_ai.client.token.usage"}
    expected = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "p", "gen_ai.token.type": "input"}
    assert points(found["gen_ai.client.token.usage"]) == [(0, expected)]


RL_GAUGES = {
    "reward_mean": "rl.reward.mean",
    "kl_divergence": "rl.kl_divergence",
    "policy_loss": "rl.policy_loss",
    "value_loss": "rl.value_loss",
    "entropy": "rl.entropy",
    "response_length_mean": "rl.response_length.mean",
    "grad_norm": "rl.grad_norm",
    "learning_rate": "rl.learning_rate",
    "throughput_tokens_per_sec": "rl.throughput.tokens_per_sec",
}
RL_HISTOGRAMS = {
    "generation_duration_ms": "rl.generation.duration_ms",
    "rollout_duration_ms": "rl.rollout.duration_ms",
}
GYM_GAUGES = {"verify_success_rate": "gym.verify.success_rate", "active_servers": "gym.servers.active"}
GYM_HISTOGRAMS = {
    "server_request_duration_ms": "gym.server.request_duration_ms",
    "rollout_duration_ms": "gym.rollout.duration_ms",
    "verify_duration_ms": "gym.verify.duration_ms",
}
TRAINING_GAUGES = {
    "tokens_per_second": "dl.throughput_tokens_per_sec",
    "samples_per_second": "dl.throughput_samples_per_sec",
}
TRAINING_HISTOGRAMS = {
    "iteration_duration_s": "dl.iteration.duration",
    "data_loading_duration_s": "dl.data_loading.duration",
    "forward_duration_s": "dl.forward.duration",
    "backward_duration_s": "dl.backward.duration",
    "optimizer_duration_s": "dl.optimizer.duration",
    "comm_duration_s": "dl.comm.duration",
    "comm_size_bytes": "dl.comm.size",
}
TRAINING_COUNTERS = {
    "iterations": "dl.iterations",
    "batches": "dl.batches",
    "records_dropped": "lens.records.dropped",
}


@pytest.mark.parametrize(
    ("record", "gauges", "histograms", "unit"),
    [
        (rl.record_rl_metrics, RL_GAUGES, RL_HISTOGRAMS, "ms"),
        (gym.record_gym_metrics, GYM_GAUGES, GYM_HISTOGRAMS, "ms"),
        (training.record_training_metrics, TRAINING_GAUGES, TRAINING_HISTOGRAMS, "s"),
    ],
)
def test_each_argument_is_one_metric(
    record: Callable[..., None], gauges: dict[str, str], histograms: dict[str, str], unit: str
) -> None:
    for argument, name in (*gauges.items(), *histograms.items()):
        recorded = Recorded()
        record(recorded.meter, **{argument: 3})
        found = recorded.collect()
        assert set(found) == {name}, argument  # and nothing for what was not given
        assert points(found[name]) == [(3, {})]
        if argument in gauges:
            assert isinstance(found[name].data, Gauge)
        else:
            assert isinstance(found[name].data, Histogram)
            assert found[name].unit == ("By" if name == "dl.comm.size" else unit)
    recorded = Recorded()
    record(recorded.meter)
    assert recorded.collect() == {}


def test_gauges_show_the_last_value_and_histograms_add_up(recorded: Recorded) -> None:
    for value in (1.0, 5.0):
        rl.record_rl_metrics(recorded.meter, reward_mean=value, rollout_duration_ms=value)
    found = recorded.collect()
    assert points(found["rl.reward.mean"]) == [(5.0, {})]
    (point,) = found["rl.rollout.duration_ms"].data.data_points
    assert (point.count, point.sum) == (2, 6.0)


def test_training_counts_and_attributes(recorded: Recorded) -> None:
    for argument, name in TRAINING_COUNTERS.items():
        training.record_training_metrics(recorded.meter, attributes={"dl.rank": 1}, **{argument: 2})
        training.record_training_metrics(recorded.meter, attributes={"dl.rank": 1}, **{argument: 3})
        metric = recorded.collect()[name]
        assert isinstance(metric.data, Sum)
        assert metric.data.is_monotonic
        assert points(metric) == [(5, {"dl.rank": 1})]
    operation = {training.COMM_OPERATION: "all_reduce"}
    training.record_training_metrics(recorded.meter, comm_duration_s=0.1, comm_size_bytes=4096, attributes=operation)
    found = recorded.collect()
    assert points(found["dl.comm.size"]) == [(4096, operation)]


def test_buckets_tell_1_ms_from_100_s(recorded: Recorded) -> None:
    values = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    for value in values:
        training.record_training_metrics(recorded.meter, iteration_duration_s=value)
        rl.record_rl_metrics(recorded.meter, rollout_duration_ms=value * 1e3)
    found = recorded.collect()
    for name in ("dl.iteration.duration", "rl.rollout.duration_ms"):
        (point,) = found[name].data.data_points
        assert max(point.bucket_counts) == 1  # no two of them share a bucket
        assert point.bucket_counts[-1] == 0  # and there is room above


def test_instruments_are_made_once_for_a_meter_and_go_with_it() -> None:
    made: list[str] = []

    class Meter(metrics.NoOpMeter):
        def create_histogram(self, name: str, *args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return super().create_histogram(name, *args, **kwargs)

    first, second = Meter("a"), Meter("b")
    for meter in (first, first, second):
        gym.record_gym_metrics(meter, rollout_duration_ms=1.0)
    assert sorted(made) == sorted([*GYM_HISTOGRAMS.values()] * 2)
    gone = weakref.ref(first)
    del first, meter
    gc.collect()
    assert gone() is None


def test_an_sdk_meter_goes_with_its_provider(recorded: Recorded) -> None:
    rl.record_rl_metrics(recorded.meter, entropy=1.0)
    gone = weakref.ref(recorded.meter)
    recorded.provider.shutdown()
    del recorded.meter, recorded.provider, recorded.reader
    gc.collect()
    assert gone() is None


# --- values that are no numbers of Python's ---------------------------------------------------------------------------


class Tensor:
    """Of one element, as torch's and others': it has `float()`."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __float__(self) -> float:
        (value,) = self.values
        return value


@pytest.mark.parametrize(
    ("record", "argument", "name"),
    [
        (rl.record_rl_metrics, "reward_mean", "rl.reward.mean"),
        (rl.record_rl_metrics, "rollout_duration_ms", "rl.rollout.duration_ms"),
        (gym.record_gym_metrics, "verify_success_rate", "gym.verify.success_rate"),
        (gym.record_gym_metrics, "verify_duration_ms", "gym.verify.duration_ms"),
        (inference.record_inference_metrics, "request_duration_s", "gen_ai.server.request.duration"),
        (inference.record_inference_metrics, "input_tokens", "gen_ai.client.token.usage"),
        (training.record_training_metrics, "iteration_duration_s", "dl.iteration.duration"),
        (training.record_training_metrics, "iterations", "dl.iterations"),
        (training.record_training_metrics, "tokens_per_second", "dl.throughput_tokens_per_sec"),
    ],
)
def test_what_has_float_is_converted_and_anything_else_is_left_out(
    recorded: Recorded, caplog: pytest.LogCaptureFixture, record: Any, argument: str, name: str
) -> None:
    values = (Tensor(1.5), np.int64(2), 4, Tensor(1.0, 2.0), "8", 1 << 2000, object())
    with caplog.at_level(logging.DEBUG, logger="lens_auto"):
        for value in values:
            record(recorded.meter, **{argument: value})
    ((value, _),) = points(recorded.collect()[name])
    assert value == (
        4 if name in ("rl.reward.mean", "gym.verify.success_rate", "dl.throughput_tokens_per_sec") else 7.5
    )
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 4
    assert all(line.startswith(f"lens-auto: the value of {name} is no number and is not recorded (") for line in lines)


def test_attributes_of_training_can_be_exported(recorded: Recorded) -> None:
    attributes: Any = {"kept": "x", "sizes": [1, 2], "object": object(), "big": 1 << 64, "name": "caf\udce9"}
    training.record_training_metrics(recorded.meter, iterations=1, attributes=attributes)
    assert points(recorded.collect()["dl.iterations"]) == [(1, {"kept": "x", "sizes": (1, 2), "name": "caf?"})]
