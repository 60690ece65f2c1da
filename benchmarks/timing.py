"""How times are compared on a noisy machine: in one process, in turns, and never by their means."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

BLOCK_NS = 500_000  # short enough to fit between two interruptions, long against the clock's own cost
PROBE = 50
LEAST_ROUNDS = 400

Block = Callable[[int], int]  # runs a statement n times and returns the nanoseconds that took


def calls(function: Callable[[Any], Any], argument: Any) -> Block:
    """A block that calls a function with one argument again and again.

    Written out as a user writes it: `function(*arguments)` would hide a part of what a wrapper costs.
    """

    def block(count: int) -> int:
        turns = range(count)
        start = time.perf_counter_ns()
        for _ in turns:
            function(argument)
        return time.perf_counter_ns() - start

    return block


def interleave(
    blocks: Mapping[str, Block],
    seconds: float,
    progress: Callable[[float], None] = lambda share: None,
    counts: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Times all blocks in turns: a b c, c b a, a b c, ...

    Args:
        blocks: what to time, by name.
        seconds: how long, in all; each block runs at least `LEAST_ROUNDS` times.
        counts: statements in a block, for those that do not get as many as fit into `BLOCK_NS`.
        progress: told the share that is done.

    Returns:
        Per name, nanoseconds per statement, one value a round.
    """
    names = list(blocks)
    found: dict[str, list[float]] = {name: [] for name in names}
    given = counts or {}
    sizes = {name: given.get(name) or _fitting(blocks[name]) for name in names}
    begun = time.monotonic()
    turn = 0
    while turn < LEAST_ROUNDS or time.monotonic() - begun < seconds:
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(blocks[name](sizes[name]) / sizes[name])
        if turn % 50 == 0:
            progress(min(1.0, (time.monotonic() - begun) / seconds))
        turn += 1
    return {name: np.array(values) for name, values in found.items()}


def _fitting(block: Block) -> int:
    """How many statements fit into `BLOCK_NS`."""
    block(PROBE)
    return max(10, min(2000, int(BLOCK_NS * PROBE / max(1, block(PROBE)))))


def undisturbed_ns(values: np.ndarray) -> float:
    """What a statement takes when nobody else wants the core: the mean of the fastest twentieth of the rounds.

    What other processes do only ever adds time, so the low end is where two variants differ by their own work alone.
    """
    ordered = np.sort(values)
    return float(np.mean(ordered[: max(1, len(ordered) // 20)]))


def over(values: np.ndarray, bare: np.ndarray) -> tuple[float, float]:
    """How much longer one takes than the other, in nanoseconds: undisturbed, and as the median of adjacent pairs."""
    return undisturbed_ns(values) - undisturbed_ns(bare), float(np.median(values - bare))


class Interval(NamedTuple):
    """An estimate, and where the true value lies with some probability."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """From end to end."""
        return self.high - self.low

    def tells(self, limit: float) -> bool:
        """Whether it is clear on which side of the limit the true value lies."""
        return self.high <= limit or self.low > limit

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    statistic: Callable[..., float], *columns: np.ndarray, share: float = 0.95, draws: int = 1000
) -> Interval:
    """A statistic of observations (the first axis of each column), and its interval under resampling."""
    generator = np.random.default_rng(0)
    size = len(columns[0])
    drawn = []
    for _ in range(draws):
        rows = generator.integers(0, size, size)
        drawn.append(statistic(*(column[rows] for column in columns)))
    low, high = np.quantile(drawn, [(1 - share) / 2, (1 + share) / 2])
    return Interval(statistic(*columns), float(low), float(high))


def undisturbed_difference(values: np.ndarray, others: np.ndarray, share: float = 0.25) -> float:
    """The difference between the means of the fastest observations of both."""
    count = max(1, int(len(values) * share))
    return float(np.mean(np.sort(values)[:count]) - np.mean(np.sort(others)[:count]))


def block_ratios(on: np.ndarray, off: np.ndarray, share: float = 0.95) -> tuple[Interval, Interval]:
    """How much longer iterations take in blocks that are on than in the adjacent ones that are off.

    Args:
        on, off: blocks, in pairs that are adjacent in time; for each two rows, wall and CPU time, a column an
            iteration.
        share: the probability of the intervals.

    Returns:
        By wall time and by CPU time: the median over the pairs of the ratio of their median iterations.
    """
    ratios = np.median(on, axis=2) / np.median(off, axis=2)

    def median(values: np.ndarray) -> float:
        return float(np.median(values))

    return bootstrap(median, ratios[:, 0], share=share), bootstrap(median, ratios[:, 1], share=share)
