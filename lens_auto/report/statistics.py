"""Robust figures over iterations, and how sure they are.

Iterations that follow each other are alike (a neighbour on the machine comes and goes), so the bootstrap draws blocks
of consecutive ones. It has a generator of its own with a fixed seed: the same run gives the same report, and nobody's
random numbers change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.floating[Any]]

RESAMPLES = 1000
CONFIDENCE = 0.95
_SEED = 20_240_917
_NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def above(self, bound: float) -> bool:
        """Whether the whole interval lies above a bound."""
        return self.low > bound


def share(part_ns: Float64Array, whole_ns: Float64Array) -> Estimate:
    """The share that a part has of the whole, over iterations: the ratio of the sums.

    Args:
        part_ns: the part of each iteration, in order; may be negative.
        whole_ns: the whole of each.
    """
    count = len(whole_ns)
    total = float(whole_ns.sum())
    if not count or total <= 0:
        return Estimate(0.0, 0.0, 0.0)
    drawn = _block_sums(np.stack([part_ns, whole_ns]))
    ratios = drawn[0] / np.maximum(drawn[1], 1.0)
    low, high = np.percentile(ratios, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(part_ns.sum()) / total, float(low), float(high))


def difference(one_ns: Float64Array, other_ns: Float64Array) -> Estimate:
    """How much larger the mean of one run's iterations is than that of another's."""
    ones, others = (_block_sums(each[None])[0] / len(each) for each in (one_ns, other_ns))
    low, high = np.percentile(ones - others, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(one_ns.mean() - other_ns.mean()), float(low), float(high))


def _block_sums(series: Float64Array) -> Float64Array:
    """Sums of each series (rows) over bootstrap samples of its columns, drawn in blocks around a circle."""
    count = series.shape[1]
    length = max(1, round(count**0.5))
    blocks = -(-count // length)
    rest = count - (blocks - 1) * length  # the last block is cut, so that every sample has as many iterations
    running = np.concatenate([np.zeros((len(series), 1)), np.cumsum(np.hstack([series, series]), axis=1)], axis=1)
    whole = running[:, length : length + count] - running[:, :count]
    cut = running[:, rest : rest + count] - running[:, :count]
    generator = np.random.Generator(np.random.PCG64(_SEED))
    starts = generator.integers(0, count, size=(blocks, RESAMPLES))
    drawn = cut[:, starts[0]]
    for row in starts[1:]:
        drawn = drawn + whole[:, row]
    result: Float64Array = drawn
    return result


def spread(values: Float64Array, axis: int = 0) -> Float64Array:
    """The standard deviation as far as outliers let it be told, from the median absolute deviation."""
    centre = np.median(values, axis=axis, keepdims=True)
    found: Float64Array = _NORMAL_MAD * np.median(np.abs(values - centre), axis=axis)
    return found


def lower_median_of_others(values: FloatArray) -> FloatArray:
    """For each column the lower median of the other columns, row by row.

    The lower one, so that of two ranks the faster is what the slower is measured by.
    """
    columns = values.shape[1]
    if columns < 2:
        return values.copy()
    order = np.argsort(values, axis=1, kind="stable")
    position = np.empty_like(order)
    np.put_along_axis(position, order, np.arange(columns)[None], axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    middle = (columns - 2) // 2
    return np.where(position > middle, ordered[:, middle : middle + 1], ordered[:, middle + 1 : middle + 2])


def lower_median(values: Float64Array) -> Float64Array:
    """The lower median of each row."""
    middle = (values.shape[1] - 1) // 2
    found: Float64Array = np.partition(values, middle, axis=1)[:, middle]
    return found
