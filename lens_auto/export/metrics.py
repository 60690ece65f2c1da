"""Metrics of training from records: histograms, counters and rates of each rank, as OpenTelemetry's SDK holds them.

Whole columns at a time. An instrument of the SDK takes one value a call, some microseconds each: for a rank with
hundreds of operations an iteration that would be more than their spans cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from lens_auto import __version__, semconv
from lens_auto.export.sdk import resource_from
from lens_auto.export.spans import AttributeValue
from lens_auto.instruments import training
from lens_auto.iteration.rule import Mask
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.report.load import find_calls

if TYPE_CHECKING:
    from lens_auto.export.stream import Stretch
    from lens_auto.recorder.read import WriterFiles

_SCOPE = InstrumentationScope(semconv.INSTRUMENTATION_SCOPE, __version__)
_PHASES = (
    (training.DATA_LOADING_DURATION, Phase.DATA_LOADING),
    (training.FORWARD_DURATION, Phase.FORWARD),
    (training.BACKWARD_DURATION, Phase.BACKWARD),
    (training.OPTIMIZER_DURATION, Phase.OPTIMIZER),
)
_DDP_OPERATION = semconv.SPAN_DDP_PREFIX + "communication"

Float64Array = npt.NDArray[np.float64]


class Series(NamedTuple):
    """Which data point of a rank a value belongs to.

    Attributes:
        name: of the metric.
        operation: of communication; empty for everything else.
        timing: how the duration of communication was taken; empty where that is by the host's clock, as all others.
    """

    name: str
    operation: str = ""
    timing: str = ""


class Measured(NamedTuple):
    """What a stretch of a rank's records says.

    Attributes:
        values: of histograms, in their unit.
        counts: to add to counters.
        rates: to set gauges to.
    """

    values: dict[Series, Float64Array]
    counts: dict[str, int]
    rates: dict[str, float]


def measure(writer: WriterFiles, stretch: Stretch) -> Measured:
    """The metrics of a stretch.

    Args:
        writer: whose records they are.
        stretch: the records.
    """
    iterations, data = stretch.iterations, stretch.records.data
    done = stretch.done
    closed = iterations.start_ns < stretch.cut.until_ns
    training_ns = iterations.training_ns[closed]
    values = {Series(training.ITERATION_DURATION): training_ns / 1e9}
    for name, phase in _PHASES:
        spent_ns = iterations.phase_ns[closed, phase]
        values[Series(name)] = spent_ns[spent_ns > 0] / 1e9
    values.update(_communication(writer, stretch, done))

    loaded = (data["kind"] == Kind.FETCH) & ((data["flags"] & (Flag.EXHAUSTED | Flag.FAILED)) == 0) & done
    counts = {
        training.ITERATIONS: int(np.count_nonzero(closed)),
        training.BATCHES: int(np.count_nonzero(loaded)),
    }
    trained_on = loaded & _in_training(stretch)
    samples, spent_s = int(data["c"][trained_on].sum()), float(training_ns.sum()) / 1e9
    rates = {training.SAMPLES_PER_SECOND: samples / spent_s} if samples and spent_s > 0 else {}
    return Measured({series: found for series, found in values.items() if len(found)}, counts, rates)


def _in_training(stretch: Stretch) -> Mask:
    """Records that are a piece of an iteration that is closed, and not of an evaluation in it."""
    tiles = stretch.iterations.tiles
    pieces = tiles[
        (tiles["iteration"] >= 0)
        & (tiles["phase"] == Phase.DATA_LOADING)
        & (tiles["record"] >= 0)
        & (tiles["start_ns"] < stretch.cut.until_ns)
    ]
    found: Mask = np.isin(stretch.records.numbers, pieces["record"])
    return found


def _communication(writer: WriterFiles, stretch: Stretch, done: Mask) -> dict[Series, Float64Array]:
    data = stretch.records.data
    values: dict[Series, Float64Array] = {}
    calls = find_calls(stretch.records, stretch.iterations)
    over = done[calls.rows]
    duration_s = calls.duration_ns / 1e9
    by_events = calls.measured & ~calls.by_flight
    timings = (
        (semconv.TIMING_HOST, ~calls.enqueued & ~calls.measured),
        (semconv.TIMING_HOST_ENQUEUE, calls.enqueued & ~calls.measured),
        (semconv.TIMING_CUDA_EVENT, by_events),
        (semconv.TIMING_FLIGHT_RECORDER, calls.by_flight),
    )
    names, sizes = data["name"][calls.rows], data["bytes"][calls.rows].astype(np.float64)
    for number in np.unique(names[over]).tolist():
        operation = writer.string(number) or "unknown"
        of = over & (names == number)
        values[Series(training.COMM_SIZE, operation)] = sizes[of]
        for timing, taken in timings:
            values[Series(training.COMM_DURATION, operation, timing)] = duration_s[of & ~calls.unknown & taken]
    # The reducer's own logger: one for each of its iterations; its sizes are zero where the flight recorder has them.
    rows = np.flatnonzero((data["kind"] == Kind.DDP) & done)
    rows = (
        rows[[writer.string(number) == "communication" for number in data["name"][rows].tolist()]]
        if len(rows)
        else rows
    )
    if len(rows):
        start_ns, end_ns = data["start_ns"][rows].astype(np.int64), data["end_ns"][rows].astype(np.int64)
        timing = semconv.TIMING_DDP_LOGGER
        values[Series(training.COMM_DURATION, _DDP_OPERATION, timing)] = np.maximum(end_ns - start_ns, 0) / 1e9
        sized = rows[data["c"][rows] > 0]
        values[Series(training.COMM_SIZE, _DDP_OPERATION)] = data["bytes"][sized].astype(np.float64)
    return values


# --- what is kept of a rank -------------------------------------------------------------------------------------------


class _Distribution:
    """An explicit-bucket histogram; a value on a bound is in the bucket below it, as the SDK has it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.sum = 0.0
        self.low = np.inf
        self.high = -np.inf

    def add(self, values: Float64Array) -> None:
        self.counts += np.bincount(np.searchsorted(self.bounds, values, side="left"), minlength=len(self.counts))
        self.sum += float(values.sum())
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))


class RankMetrics:
    """Metrics of one rank, as far as they have not been handed over.

    Args:
        rank: global rank; on every data point, because exporters that drop the resource (Prometheus) would mix the
            ranks of a node.
        start_ns: wall clock; since when is counted.
    """

    def __init__(self, rank: int, start_ns: int) -> None:
        self.start_ns = start_ns
        self.resource: Mapping[str, AttributeValue] = {}
        self._rank = rank
        self._distributions: dict[Series, _Distribution] = {}
        self._counts: dict[str, int] = {}
        self._rates: dict[str, float] = {}

    def add(self, measured: Measured) -> None:
        """Add what a stretch says."""
        for series, values in measured.values.items():
            found = self._distributions.get(series)
            if found is None:
                found = self._distributions[series] = _Distribution(training.HISTOGRAMS[series.name][2])
            found.add(values)
        for name, count in measured.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        self._rates.update(measured.rates)

    def collect(self, delta: bool) -> ResourceMetrics:
        """Everything as the SDK has it.

        Args:
            delta: what was added since the last call, which is then forgotten; else everything since the start.
        """
        now_ns = time.time_ns()
        temporality = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
        metrics = [*self._histograms(temporality, now_ns), *self._sums(temporality, now_ns), *self._gauges(now_ns)]
        if delta:
            self.start_ns = now_ns
            self._distributions.clear()
            self._counts.clear()
            self._rates.clear()
        return ResourceMetrics(resource_from(dict(self.resource)), [ScopeMetrics(_SCOPE, metrics, "")], "")

    def _attributes(self, series: Series) -> dict[str, str | int]:
        found: dict[str, str | int] = {semconv.DL_RANK: self._rank}
        if series.operation:
            found[training.COMM_OPERATION] = series.operation
        if series.timing:
            found[semconv.LENS_TIMING_SOURCE] = series.timing
        return found

    def _histograms(self, temporality: AggregationTemporality, now_ns: int) -> Iterator[Metric]:
        points: dict[str, list[HistogramDataPoint]] = {}
        for series, found in self._distributions.items():
            point = HistogramDataPoint(
                attributes=self._attributes(series),
                start_time_unix_nano=self.start_ns,
                time_unix_nano=now_ns,
                count=int(found.counts.sum()),
                sum=found.sum,
                bucket_counts=found.counts.tolist(),
                explicit_bounds=found.bounds,
                min=found.low,
                max=found.high,
            )
            points.setdefault(series.name, []).append(point)
        for name, each in points.items():
            unit, text, _ = training.HISTOGRAMS[name]
            yield Metric(name, text, unit, Histogram(each, temporality))

    def _sums(self, temporality: AggregationTemporality, now_ns: int) -> Iterator[Metric]:
        for name, count in self._counts.items():
            unit, text = training.COUNTERS[name]
            point = NumberDataPoint({semconv.DL_RANK: self._rank}, self.start_ns, now_ns, count)
            yield Metric(name, text, unit, Sum([point], temporality, is_monotonic=True))

    def _gauges(self, now_ns: int) -> Iterator[Metric]:
        for name, rate in self._rates.items():
            unit, text = training.GAUGES[name]
            yield Metric(name, text, unit, Gauge([NumberDataPoint({semconv.DL_RANK: self._rank}, 0, now_ns, rate)]))
