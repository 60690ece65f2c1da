"""What if: the recorded iterations played again with some ranks' own work replaced.

Each rank goes from operation to operation: it works, comes, waits for the last to come and for the operation itself. Of
a transfer it waits for the other end, which had to be issued.
Replaying the recorded work gives the recorded time; replacing one rank's work, or one phase of it, by that of the
median rank says what it costs. Nothing else is assumed to change.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from lens_auto.report.statistics import Float64Array, FloatArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_auto.report.match import Matched

# Beyond this many operations iterations are replayed side by side also where their ends do not meet.
_MAX_STEPS = 50_000


class Replay:
    """Replays of one attempt.

    Args:
        matched: its ranks side by side.
    """

    def __init__(self, matched: Matched) -> None:
        self._matched = matched
        self._everybody = bool(matched.present.all())
        self._plain = not matched.overlap_ns.any()
        # Iterations side by side go by the place that operations have in them, so that each round is one piece.
        position = matched.operation_position
        self._by_place = matched.meets and (self._everybody or len(position) > _MAX_STEPS)
        self._order = np.argsort(position, kind="stable") if self._by_place else np.arange(len(position))
        position = position[self._order]
        self._rounds = np.append(np.flatnonzero(np.diff(position, prepend=-1)), len(position))
        self._iteration = matched.operation_iteration[self._order]
        self._present = matched.present[self._order]
        self._overlap_ns = matched.overlap_ns[self._order]
        self._comm_ns = matched.comm_ns[self._order]
        place = np.full(len(position) + 1, -1, dtype=np.int64)  # the last one is of -1
        place[self._order] = np.arange(len(position))
        self._after = place[matched.after[self._order]]
        self._came_ns = np.zeros(len(position))  # when the last rank had come to each operation
        self._work_ns = matched.own_ns.sum(axis=2, dtype=np.float64)
        self.recorded_ns = self._iterations(self._work_ns)

    def saved(self, changes: Sequence[FloatArray]) -> Float64Array:
        """How much shorter iterations become.

        Args:
            changes: for each scenario what is added to each rank's own work (columns) before each operation (rows).

        Returns:
            Nanoseconds saved for each scenario (rows) and iteration (columns).
        """
        found = np.zeros((len(changes), len(self._matched.iteration)))
        for row, change in enumerate(changes):
            found[row] = self.recorded_ns - self._iterations(np.maximum(self._work_ns + change, 0))
        return found

    def _iterations(self, work_ns: Float64Array) -> Float64Array:
        """Length of each iteration, given own work [operation, rank]."""
        matched = self._matched
        before: Float64Array = work_ns - matched.overlap_before_ns
        np.maximum(before, 0, out=before)
        before += matched.fixed_ns
        if not matched.meets:
            return matched.by_iteration(before.max(axis=1, initial=0))
        if self._everybody and self._plain:
            return matched.by_iteration(before.max(axis=1) + matched.comm_ns)
        # Where all ranks are in all operations, an iteration begins with all of them together.
        return self._side_by_side(before[self._order]) if self._by_place else self._step_by_step(before)

    def _side_by_side(self, before: Float64Array) -> Float64Array:
        """All iterations at once, their first operations, then their second ones, and so on."""
        clock = np.zeros((len(self._matched.iteration), before.shape[1]))
        for begin, end in pairwise(self._rounds.tolist()):
            rows = slice(begin, end)
            at = self._iteration[rows]
            clock[at] = self._meet(clock[at], before[rows], rows)
        found: Float64Array = clock.max(axis=1)
        return found

    def _step_by_step(self, before: Float64Array) -> Float64Array:
        """One operation after the other: what a rank is late at the end of an iteration it is late in the next."""
        clock = np.zeros((1, before.shape[1]))
        ended = np.zeros(len(self._matched.iteration))
        for operation, iteration in enumerate(self._iteration.tolist()):
            rows = slice(operation, operation + 1)
            clock = self._meet(clock, before[rows], rows)
            ended[iteration] = clock.max()
        return np.diff(ended, prepend=0)

    def _meet(self, clock: Float64Array, before: Float64Array, rows: slice) -> Float64Array:
        """Ranks come to some operations, and leave them."""
        came = clock + before
        present = self._present[rows]
        last = came.max(axis=1, where=present, initial=-np.inf)
        self._came_ns[rows] = last
        after = self._after[rows]
        last = np.where(after >= 0, np.maximum(last, self._came_ns[after]), last)
        done = last + self._comm_ns[rows]
        left = np.maximum(came + self._overlap_ns[rows], done[:, None])
        found: Float64Array = np.where(present, left, clock)
        return found
