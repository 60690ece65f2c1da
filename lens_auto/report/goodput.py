"""How much of a run's time went into iterations, and how much was lost between attempts where a launcher restarts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_auto.recorder.layout import Phase
from lens_auto.report.verdicts import MIN_EFFECT, Finding
from lens_auto.report.words import counted, long_duration, percent, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_auto.report.load import LoadedWriter


@dataclass
class Goodput:
    """Where the time of the whole run went.

    Attributes:
        attempts: how often the ranks were started.
        wall_ns: from the first process's start to the end of the last iteration.
        iterations_ns: in iterations, of all attempts.
        between_ns: from the last iteration of an attempt to the first of the next.
        done_again_ns: iterations after the last checkpoint that an attempt wrote before the next began: if the program
            goes on from its checkpoints, it does them again.
        goodput: share of the wall time that was spent in iterations.
    """

    attempts: int
    wall_ns: int
    iterations_ns: int
    between_ns: int
    done_again_ns: int
    goodput: float


def goodput(attempts: Sequence[Sequence[LoadedWriter]]) -> Goodput | None:
    """Add up the attempts of a run; None where no rank did an iteration."""
    if not attempts:
        return None
    begun = min(_wall(each, each.writer.info.started_ns) for each in attempts[0])
    edges = [(_median_wall(attempt, first=True), _median_wall(attempt, first=False)) for attempt in attempts]
    edges.sort()
    within = sum(end - start for start, end in edges)
    between = sum(max(0, start - end) for (_, end), (start, _) in itertools.pairwise(edges))
    again = sum(_after_checkpoint(attempt) for attempt in attempts[:-1])
    wall = max(1, edges[-1][1] - begun)
    return Goodput(len(attempts), wall, within, between, again, min(1.0, within / wall))


def _wall(each: LoadedWriter, monotonic_ns: int) -> int:
    return each.writer.info.clock.wall(monotonic_ns)


def _median_wall(attempt: Sequence[LoadedWriter], *, first: bool) -> int:
    edges = [_wall(each, int(each.iterations.start_ns[0] if first else each.iterations.end_ns[-1])) for each in attempt]
    return int(np.median(np.array(edges, dtype=np.int64)))


def _after_checkpoint(attempt: Sequence[LoadedWriter]) -> int:
    """Time of the iterations after the last checkpoint of an attempt; 0 where it wrote none."""
    saved = []
    for each in attempt:
        tiles = each.iterations.tiles
        ends = tiles["end_ns"][tiles["phase"] == Phase.CHECKPOINT]
        if len(ends):
            saved.append(int(each.iterations.end_ns[-1]) - int(ends.max()))
    return max(0, min(saved)) if saved else 0


def restarts(found: Goodput | None) -> Finding | None:
    """The verdict on attempts: what starting again cost."""
    if found is None or found.attempts < 2:
        return None
    effect = found.between_ns / found.wall_ns
    if effect < MIN_EFFECT:
        return None
    times = found.attempts - 1
    again = f"; up to {long_duration(found.done_again_ns)} of iterations was done again" if found.done_again_ns else ""
    details: dict[str, Any] = {"attempts": found.attempts, "done_again_ns": found.done_again_ns}
    return Finding(
        kind="restarts",
        ranks=[],
        cause=None,
        causes=[],
        effect=effect,
        interval=None,
        threshold=MIN_EFFECT,
        cost_ns=found.between_ns,
        of_ns=found.wall_ns,
        iterations=0,
        arrival="none",
        headline=f"the ranks were started again {counted(times, 'time')}; that costs {percent(effect)}"
        f" of the time ({span(found.between_ns, found.wall_ns)}), goodput {percent(found.goodput)}{again}",
        advice="see how they ended (lens-auto postmortem); a start-up that loads less, and checkpoints closer together",
        details=details,
    )
