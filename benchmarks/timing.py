"""How times are compared on a noisy machine: in one process, in turns, and never by their means."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Block = Callable[[int], int]  # runs a statement n times and returns the nanoseconds that took


def calls(function: Callable[..., Any], *args: Any) -> Block:
    """A block that calls a function again and again."""

    def block(count: int) -> int:
        turns = range(count)
        start = time.perf_counter_ns()
        for _ in turns:
            function(*args)
        return time.perf_counter_ns() - start

    return block


def interleave(
    blocks: Mapping[str, Block], count: int, rounds: int, progress: Callable[[float], None] = lambda share: None
) -> dict[str, np.ndarray]:
    """Times all blocks in turns: a b c, c b a, a b c, ...

    Args:
        blocks: what to time, by name.
        count: statements in one block, few enough that a block fits between two interruptions.
        rounds: how often each block runs.
        progress: told the share that is done.

    Returns:
        Per name, nanoseconds per statement, one value a round.
    """
    names = list(blocks)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        blocks[name](count)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(blocks[name](count) / count)
        if turn % 50 == 0:
            progress(turn / rounds)
    return {name: np.array(values) for name, values in found.items()}


def undisturbed_ns(values: np.ndarray) -> float:
    """What a statement takes when nobody else wants the core: the mean of the fastest tenth of the rounds.

    What other processes do only ever adds time, so the low end is where two variants differ by their own work alone.
    """
    ordered = np.sort(values)
    return float(np.mean(ordered[: max(1, len(ordered) // 10)]))


def over(values: np.ndarray, bare: np.ndarray) -> tuple[float, float]:
    """How much longer one takes than the other, in nanoseconds: undisturbed, and as the median of adjacent pairs."""
    return undisturbed_ns(values) - undisturbed_ns(bare), float(np.median(values - bare))


def median_interval(values: np.ndarray, share: float = 0.95, draws: int = 2000) -> tuple[float, float, float]:
    """The median, and the interval in which it lies with the given probability (bootstrap)."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(values, size=(draws, len(values))), axis=1)
    low, high = np.quantile(medians, [(1 - share) / 2, (1 + share) / 2])
    return float(np.median(values)), float(low), float(high)


def block_ratio(on: np.ndarray, off: np.ndarray, share: float = 0.95) -> tuple[float, float, float]:
    """How much longer iterations take in blocks that are on than in the adjacent ones that are off.

    Args:
        on, off: one row a block, one column an iteration; rows with the same index are adjacent in time.
        share: the probability of the interval.

    Returns:
        The ratio, and its interval: median over the pairs of blocks of the ratio of their median iterations.
    """
    return median_interval(np.median(on, axis=1) / np.median(off, axis=1), share)
