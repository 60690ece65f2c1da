"""What if: the recorded iterations played again with some ranks' own work replaced.

Each rank goes from operation to operation: it works, comes, waits for the last to come and for the operation itself.
Replaying the recorded work gives the recorded time; replacing one rank's work, or one phase of it, by that of the
median rank says what it costs. Nothing else is assumed to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lens_auto.report.statistics import Float64Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_auto.report.match import Matched


class Replay:
    """Replays of one attempt.

    Args:
        matched: its ranks side by side.
    """

    def __init__(self, matched: Matched) -> None:
        self._matched = matched
        self._everybody = bool(matched.present.all())
        self._plain = not matched.overlap_ns.any()
        self._work_ns = matched.own_ns.sum(axis=2, dtype=np.float64)
        self.recorded_ns = self.iterations(self._work_ns[None])[0]

    def saved(self, changes: Sequence[Float64Array]) -> Float64Array:
        """How much shorter iterations become.

        Args:
            changes: for each scenario what is added to each rank's own work (columns) before each operation (rows).

        Returns:
            Nanoseconds saved for each scenario (rows) and iteration (columns).
        """
        if not changes:
            return np.zeros((0, len(self._matched.iteration)))
        work = np.stack([np.maximum(self._work_ns + change, 0) for change in changes])
        saved: Float64Array = self.recorded_ns[None] - self.iterations(work)
        return saved

    def iterations(self, work_ns: Float64Array) -> Float64Array:
        """Length of each iteration (columns) in some scenarios (rows) of own work [scenario, operation, rank]."""
        matched = self._matched
        if not matched.meets:
            length = (work_ns + matched.fixed_ns).max(axis=2, initial=0)
            return np.stack([matched.by_iteration(each) for each in length])
        if self._everybody and self._plain:
            length = (work_ns + matched.fixed_ns).max(axis=2) + matched.comm_ns
            return np.stack([matched.by_iteration(each) for each in length])
        return self._step_by_step(work_ns)

    def _step_by_step(self, work_ns: Float64Array) -> Float64Array:
        """Groups that overlap, and asynchronous operations: one operation after the other."""
        matched = self._matched
        scenarios, operations, ranks = work_ns.shape
        clock = np.zeros((scenarios, ranks))
        ended = np.zeros((scenarios, len(matched.iteration)))
        columns = [np.flatnonzero(row) for row in matched.present]
        before = work_ns + matched.fixed_ns
        after = matched.overlap_ns.astype(np.float64)
        comm = matched.comm_ns.tolist()
        last = np.flatnonzero(np.append(np.diff(matched.operation_iteration) > 0, True)).tolist()
        iteration = 0
        for operation in range(operations):
            those = columns[operation]
            came = clock[:, those] + before[:, operation, those]
            done = came.max(axis=1, keepdims=True) + comm[operation]
            clock[:, those] = np.maximum(came + after[operation, those], done)
            if operation == last[iteration]:
                ended[:, iteration] = clock.max(axis=1)
                iteration += 1
        return np.diff(ended, axis=1, prepend=0)
