"""Iterations while they happen: predicts each boundary from the cycle before it.

The true rule (an iteration closes when an optimizer that already stepped in it is about to step again) knows a boundary
only when the next iteration steps; records must carry a number at once. Readers apply the rule afterwards
(`iteration.rule`) and count where the prediction was wrong.
"""

from __future__ import annotations

from lens_auto.recorder.recorder import Recorder


class LiveIterations:
    """Counts optimizer steps of one process into iterations.

    Args:
        recorder: gets the boundaries.
        counted: whose steps count: None all, `first`, `last` (by order of first step), or a class name
            (`NEMO_LENS_ITERATION_OPTIMIZER`).
    """

    def __init__(self, recorder: Recorder, counted: str | None = None) -> None:
        self._recorder = recorder
        self._counted = counted
        self._stepped: set[int] = set()
        self._predicted = 1
        self._steps = 0
        self._announced = False
        self._closed = 0
        self._last_end_ns = 0
        self._newest = 0
        self._known = -1  # the highest ordinal that stepped before this iteration
        self._old_steps = 0  # steps of this iteration before the first of an optimizer that had never stepped
        self._old_end_ns = 0  # the end of the last of them
        self._mixed = False  # a known optimizer stepped after a new one

    def counts(self, ordinal: int, class_name: str) -> bool:
        """Whether the steps of this optimizer make iterations."""
        self._newest = max(self._newest, ordinal)
        if self._counted is None:
            return True
        if self._counted == "first":
            return ordinal == 0
        if self._counted == "last":
            return ordinal == self._newest
        return class_name == self._counted

    def begin_step(self, ordinal: int, thread: int) -> None:
        """A counted optimizer is about to step."""
        if ordinal in self._stepped:
            replaced = 0 < self._old_steps < self._steps and ordinal > self._known and not self._mixed
            if replaced:
                self._replace(thread)
            elif not self._announced:
                self._recorder.boundary(self._last_end_ns, self._steps, thread)
            self._closed += 1
            self._recorder.iteration = self._closed
            self._predicted = self._steps
            self._known = max(self._known, *self._stepped)
            self._stepped.clear()
            self._steps = self._old_steps = 0
            self._announced = self._mixed = False
        self._stepped.add(ordinal)
        if ordinal > self._known:
            if len(self._stepped) - 1 == self._old_steps:
                self._old_end_ns = self._last_end_ns
        elif len(self._stepped) - 1 == self._old_steps:
            self._old_steps += 1
        else:
            self._mixed = True

    def _replace(self, thread: int) -> None:
        """New optimizers took over from old ones: what looked like one iteration was two (rule 1)."""
        if not self._announced:
            self._recorder.boundary(self._old_end_ns, self._old_steps, thread)
        self._steps -= self._old_steps
        self._recorder.boundary(self._last_end_ns, self._steps, thread)
        self._closed += 1

    def end_step(self, end_ns: int, thread: int) -> None:
        """It has stepped (or was skipped, or failed)."""
        self._steps += 1
        self._last_end_ns = end_ns
        if self._steps >= self._predicted and not self._announced:
            self._announced = True
            self._recorder.boundary(end_ns, self._steps, thread)
