"""Metrics of training. The exporter process computes them from records; a program may record its own as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_auto import semconv
from lens_auto.instruments._cache import BUCKETS_S, PerMeter, labels, number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.metrics import Counter, Histogram, Meter
    from opentelemetry.metrics import _Gauge as Gauge
    from opentelemetry.util.types import AttributeValue

ITERATION_DURATION = "dl.iteration.duration"
DATA_LOADING_DURATION = "dl.data_loading.duration"
FORWARD_DURATION = "dl.forward.duration"
BACKWARD_DURATION = "dl.backward.duration"
OPTIMIZER_DURATION = "dl.optimizer.duration"
COMM_DURATION = "dl.comm.duration"
COMM_SIZE = "dl.comm.size"
ITERATIONS = "dl.iterations"
BATCHES = semconv.DL_BATCHES
RECORDS_DROPPED = semconv.LENS_RECORDS_DROPPED
TOKENS_PER_SECOND = semconv.DL_THROUGHPUT_TOKENS_PER_SEC
SAMPLES_PER_SECOND = "dl.throughput_samples_per_sec"
COMM_OPERATION = "dl.comm.operation"  # attribute of the two communication histograms

# An all-reduce on one machine takes microseconds.
_COMM_BUCKETS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, *BUCKETS_S)
_SIZE_BUCKETS_BYTES = tuple(float(4**power) for power in range(4, 18))  # 256 B to 16 GiB

# Name: unit, description, upper bounds of buckets.
HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    ITERATION_DURATION: ("s", "Time of an iteration, without evaluation and checkpoints", BUCKETS_S),
    DATA_LOADING_DURATION: ("s", "Time that an iteration waited for batches", BUCKETS_S),
    FORWARD_DURATION: ("s", "Time of the forward passes of an iteration", BUCKETS_S),
    BACKWARD_DURATION: ("s", "Time of the backward passes of an iteration", BUCKETS_S),
    OPTIMIZER_DURATION: ("s", "Time of the optimizer steps of an iteration", BUCKETS_S),
    COMM_DURATION: ("s", "Time of a communication operation, from its call to the end of its wait", _COMM_BUCKETS_S),
    COMM_SIZE: ("By", "Bytes of a communication operation", _SIZE_BUCKETS_BYTES),
}
# Name: unit, description.
COUNTERS: dict[str, tuple[str, str]] = {
    ITERATIONS: ("{iteration}", "Iterations that ended"),
    BATCHES: ("{batch}", "Batches that were loaded"),
    RECORDS_DROPPED: ("{record}", "Records that found no room"),
}
GAUGES: dict[str, tuple[str, str]] = {
    TOKENS_PER_SECOND: ("{token}/s", "Tokens trained on in a second"),
    SAMPLES_PER_SECOND: ("{sample}/s", "Samples trained on in a second"),
}


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        self.histograms: dict[str, Histogram] = {
            name: meter.create_histogram(name, unit=unit, description=text, explicit_bucket_boundaries_advisory=bounds)
            for name, (unit, text, bounds) in HISTOGRAMS.items()
        }
        self.counters: dict[str, Counter] = {
            name: meter.create_counter(name, unit=unit, description=text) for name, (unit, text) in COUNTERS.items()
        }
        self.gauges: dict[str, Gauge] = {
            name: meter.create_gauge(name, unit=unit, description=text) for name, (unit, text) in GAUGES.items()
        }


_instruments = PerMeter(_Instruments)


def record_training_metrics(
    meter: Meter,
    iteration_duration_s: float | None = None,
    data_loading_duration_s: float | None = None,
    forward_duration_s: float | None = None,
    backward_duration_s: float | None = None,
    optimizer_duration_s: float | None = None,
    comm_duration_s: float | None = None,
    comm_size_bytes: int | None = None,
    iterations: int | None = None,
    batches: int | None = None,
    records_dropped: int | None = None,
    tokens_per_second: float | None = None,
    samples_per_second: float | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> None:
    """Records what is given: durations (s) and sizes (bytes) as histograms, counts as counters, rates as gauges.

    Args:
        meter: Where to record.
        iteration_duration_s: Of one iteration; the four that follow are its phases.
        data_loading_duration_s: Waiting for batches.
        forward_duration_s: Forward passes.
        backward_duration_s: Backward passes.
        optimizer_duration_s: Optimizer steps.
        comm_duration_s: Of one operation; `attributes` say which (`dl.comm.operation`).
        comm_size_bytes: Of the same operation.
        iterations: How many more ended.
        batches: How many more were loaded.
        records_dropped: How many more found no room.
        tokens_per_second: The rate now.
        samples_per_second: The rate now.
        attributes: Of all that is recorded in this call; keep them few, a metric has at most hundreds of values.
    """
    instruments = _instruments(meter)
    attributes = labels(attributes)
    for name, value in (
        (ITERATION_DURATION, iteration_duration_s),
        (DATA_LOADING_DURATION, data_loading_duration_s),
        (FORWARD_DURATION, forward_duration_s),
        (BACKWARD_DURATION, backward_duration_s),
        (OPTIMIZER_DURATION, optimizer_duration_s),
        (COMM_DURATION, comm_duration_s),
        (COMM_SIZE, comm_size_bytes),
    ):
        found = number(name, value)
        if found is not None:
            instruments.histograms[name].record(found, attributes)
    for name, value in ((ITERATIONS, iterations), (BATCHES, batches), (RECORDS_DROPPED, records_dropped)):
        found = number(name, value)
        if found is not None:
            instruments.counters[name].add(found, attributes)
    for name, value in ((TOKENS_PER_SECOND, tokens_per_second), (SAMPLES_PER_SECOND, samples_per_second)):
        found = number(name, value)
        if found is not None:
            instruments.gauges[name].set(found, attributes)
