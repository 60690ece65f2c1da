"""How far the clocks of the hosts of a run are apart, told from the operations in which their ranks met.

Nobody leaves an all-reduce before everybody has come to it. Whatever rank a of one host and rank b of another say of
the same operation, a's release is therefore no earlier than b's arrival, and the other way round: each operation bounds
the offset of the two clocks from both sides, and many operations bound it narrowly. A message bounds it from one side:
it is received no earlier than it was sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lens_auto.iteration.rule import Int64Array
from lens_auto.report.statistics import Float64Array

# No time of a wall clock, and no bound of an offset; their difference is still a 64-bit number.
NOT_SEEN_TO_COME, NOT_SEEN_TO_LEAVE = -(1 << 61), 1 << 61
_WINDOWS = 64
_WINDOW_OPERATIONS = 32


@dataclass(frozen=True)
class HostClock:
    """The clock of one host against that of the run's first rank.

    Attributes:
        host: its name.
        offset_ns: what is added to its wall clock times; of the middle of the run where the clocks drift.
        uncertainty_ns: how far off that may be; None: no operation tells, its wall clock is taken as it is.
        operations: how many operations told.
        drifts: one offset does not fit the whole run.
        at_ns: times (its wall clock) between which `offsets_ns` is interpolated; a single one where it does not drift.
        offsets_ns: the offset at each.
    """

    host: str
    offset_ns: int
    uncertainty_ns: int | None
    operations: int
    drifts: bool
    at_ns: Int64Array
    offsets_ns: Float64Array

    def shift(self, time_ns: Int64Array) -> Int64Array:
        """Times of this host on the clock of the first rank's."""
        if not self.drifts:
            return time_ns + self.offset_ns
        return time_ns + np.interp(time_ns, self.at_ns, self.offsets_ns).astype(np.int64)


def own_clock(host: str) -> HostClock:
    """The clock that the others are compared with."""
    return HostClock(host, 0, 0, 0, False, np.zeros(1, dtype=np.int64), np.zeros(1))


def unknown_clock(host: str) -> HostClock:
    """A clock of which no operation tells anything."""
    return HostClock(host, 0, None, 0, False, np.zeros(1, dtype=np.int64), np.zeros(1))


def compare(hosts: list[str], came_ns: Int64Array, left_ns: Int64Array) -> dict[str, HostClock]:
    """Estimate the clock of every host.

    Args:
        hosts: the host of each rank; that of the first is the reference.
        came_ns: wall clock time at which each rank (columns) came to each operation (rows), `NOT_SEEN_TO_COME` where it
            is not known to have come. Nobody leaves it before all these had come.
        left_ns: when it left, or `NOT_SEEN_TO_LEAVE`.
    """
    reference = hosts[0]
    found = {reference: own_clock(reference)}
    names = np.array(hosts)
    here = names == reference
    for host in dict.fromkeys(hosts):
        if host == reference:
            continue
        there = names == host
        came_here, left_here = came_ns[:, here].max(axis=1), left_ns[:, here].min(axis=1)
        came_there, left_there = came_ns[:, there].max(axis=1), left_ns[:, there].min(axis=1)
        below = (came_here > NOT_SEEN_TO_COME) & (left_there < NOT_SEEN_TO_LEAVE)
        above = (came_there > NOT_SEEN_TO_COME) & (left_here < NOT_SEEN_TO_LEAVE)
        if not (below.any() and above.any()):
            found[host] = unknown_clock(host)
            continue
        told = below | above
        least = np.where(below, came_here - left_there, NOT_SEEN_TO_COME)
        most = np.where(above, left_here - came_there, NOT_SEEN_TO_LEAVE)
        found[host] = _bounded(host, least[told], most[told], np.where(above, came_there, left_there)[told])
    return found


def _bounded(host: str, least: Int64Array, most: Int64Array, at_ns: Int64Array) -> HostClock:
    """The offset that all operations allow; where there is none, the clocks drift and it is told piece by piece."""
    low, high = int(least.max()), int(most.min())
    if low <= high:
        middle = (low + high) // 2
        half = (high - low + 1) // 2
        return HostClock(host, middle, half, len(least), False, np.zeros(1, dtype=np.int64), np.array([float(middle)]))
    windows = int(np.clip(len(least) // _WINDOW_OPERATIONS, 2, _WINDOWS))
    order = np.argsort(at_ns, kind="stable")
    lows, highs, times = [], [], []
    for part in np.array_split(order, windows):
        if len(part) and least[part].max() > NOT_SEEN_TO_COME and most[part].min() < NOT_SEEN_TO_LEAVE:
            lows.append(int(least[part].max()))
            highs.append(int(most[part].min()))
            times.append(int(np.median(at_ns[part])))
    if not times:  # messages went one way at a time
        return unknown_clock(host)
    offsets = (np.array(lows, dtype=np.float64) + np.array(highs)) / 2
    half = int(np.abs(np.array(highs) - np.array(lows)).max()) // 2 + 1
    return HostClock(
        host, int(offsets[len(offsets) // 2]), half, len(least), True, np.array(times, dtype=np.int64), offsets
    )
