"""What slows a run down, as findings: each with an effect, an interval and a threshold, or not at all.

A finding is a share of the run's time. It is silent where its 95 % interval holds 0 or the share is under its
threshold, which is nowhere below 5 %. A cause is named where it explains at least 80 % of what is in excess; else the
finding says "no single cause" and the two largest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_auto.iteration.rule import Mask
from lens_auto.recorder.layout import Phase
from lens_auto.report import statistics
from lens_auto.report.match import Matched
from lens_auto.report.points import Source
from lens_auto.report.replay import Replay
from lens_auto.report.statistics import Estimate, Float64Array, FloatArray
from lens_auto.report.words import duration, every, named, percent, span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

MIN_EFFECT = 0.05
MIN_ITERATIONS = 10
CAUSE_SHARE = 0.8
# Shares of the time from which on a phase that all ranks have alike is called what a run is bound by.
INPUT_BOUND = 0.20
OPTIMIZER_BOUND = 0.30
COMMUNICATION_BOUND = 0.25
# Lateness that wanders from rank to rank is how a busy machine looks, too.
WANDERING = 0.20
DATA_IMBALANCE = 0.10
DRIFT = 0.15
# A stall exceeds what its rank usually takes by this share of an iteration, and by this many standard deviations.
STALL_SHARE = 0.5
STALL_DEVIATIONS = 8.0
# A few stalls are how a busy machine looks, too: they must cost more to be told than many.
STALL_EVENTS, STALL_FEW_EVENTS, STALL_FEW_EFFECT = 4, 8, 0.10
STALL_LONE_DEVIATIONS, STALL_LONE_EVENTS, STALL_LONE_SHARE = 3.0, 10, 0.9
STALL_RANK = 0.25  # a rank is named where it lost at least this share of what the worst one did
STEADY_FROM = 0.25  # a rank that stalls in more than this share of the iterations is slow, not interrupted
# On a busy machine some rank is late in every iteration, and one more often than the others. A steady straggler is late
# in at least this share of the iterations, and at its best still slower than the others at their best.
LATE_IN = 0.75
BEST = 25  # percentile
STRETCHES, STEADY_PART = 10, 0.35
# Of a rank that becomes slow later it is told from this long a stretch on.
LATER_ITERATIONS, LATER_NS = 100, 60_000_000_000
# Lateness that wanders costs at least this share in nine of ten iterations, not only now and then.
WANDERING_ALWAYS = 0.12
DATA_ALWAYS = 0.03
ALIKE = 0.8  # correlation from which on two things go together
UNLIKE = 0.5  # below it they do not

NO_SINGLE_CAUSE = "no single cause"
DATA = "data"

_APART = [Phase.CHECKPOINT, Phase.EVALUATE]
_TRAINING = [phase for phase in Phase if phase not in _APART]
SOURCES = {
    Source.COLLECTIVE: "collectives",
    Source.REDUCER: "ddp_logger",
    Source.BACKWARD: "backward",
    Source.OPTIMIZER: "optimizer",
    Source.ITERATION: "none",
    Source.TRANSFER: "transfers",
}


@dataclass
class Finding:
    """One thing that slows the run down.

    Attributes:
        kind: which verdict.
        ranks: whom it is about; empty: all.
        cause: the phase (or `data`) that explains it; `NO_SINGLE_CAUSE`; None where the kind says it all.
        causes: the largest parts of the excess, shares of it.
        effect: share of the run's time that it costs.
        interval: 95 % interval of the effect; None where it is counted, not estimated.
        threshold: the effect from which on it is told.
        cost_ns: the effect in time.
        of_ns: the time that it is a share of.
        iterations: how many iterations were looked at.
        arrival: how the ranks' arrival at the operations in which they meet is known.
        headline: one line: which rank, which phase, what it costs.
        advice: what to try.
        details: figures behind it.
    """

    kind: str
    ranks: list[int]
    cause: str | None
    causes: list[dict[str, Any]]
    effect: float
    interval: tuple[float, float] | None
    threshold: float
    cost_ns: int
    of_ns: int
    iterations: int
    arrival: str
    headline: str
    advice: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class RankWork:
    """Where the time of one rank went, shares of the compared iterations."""

    rank: int
    own: dict[str, float]  # own work by phase
    waiting: float  # for other ranks
    communication: float  # in operations to which all had come
    unknown: float  # held by operations that are not matched, or not seen


@dataclass
class WhatIf:
    """What replacing a rank's work by the median rank's would save."""

    rank: int | None  # None: all ranks
    phase: str | None  # None: all of its work
    saves: float
    interval: tuple[float, float]
    saves_ns: int
    text: str


@dataclass
class Analysis:
    """The ranks compared.

    Attributes:
        iterations: how many iterations were compared.
        warm_up_iterations: the first ones, which took longer and are left out.
        warm_up_ns: how much longer.
        span_ns: recorded time of the compared iterations.
        replayed_ns: the same, replayed; how far apart the two are tells how well replays do.
        arrival: how arrivals are known: operations by source.
        hosts: clocks of the hosts against that of the first rank.
        ranks: where the time of each went.
        findings: what slows the run down, the most expensive first.
        what_if: what replacing work would save, the most first.
        notes: what could not be known.
    """

    iterations: int = 0
    warm_up_iterations: int = 0
    warm_up_ns: int = 0
    span_ns: int = 0
    replayed_ns: int = 0
    arrival: dict[str, int] = field(default_factory=dict)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[RankWork] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    what_if: list[WhatIf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def phase_name(phase: int) -> str:
    """A phase as reports spell it."""
    return Phase(phase).name.lower()


def analyze(matched: Matched) -> Analysis:
    """Compare the ranks of one attempt and say what slows them down."""
    with np.errstate(all="ignore"):  # the times of damaged records are any numbers
        return _analyze(matched)


def _analyze(matched: Matched) -> Analysis:
    matched, warm_up, warm_up_ns = without_warm_up(matched)
    analysis = Analysis(
        iterations=len(matched.iteration),
        warm_up_iterations=warm_up,
        warm_up_ns=warm_up_ns,
        span_ns=int(matched.span_ns.sum()),
        arrival={SOURCES[Source(source)]: int(count) for source, count in zip(*_counts(matched.source), strict=True)},
        hosts=_hosts(matched),
        notes=list(matched.notes),
    )
    if not len(matched.iteration):
        return analysis
    judge = Judge(matched)
    analysis.replayed_ns = int(judge.replay.recorded_ns.sum())
    analysis.ranks = judge.rank_work()
    analysis.notes += judge.notes()
    if len(matched.iteration) >= MIN_ITERATIONS:
        analysis.findings = judge.findings()
        analysis.what_if = judge.what_if()
    else:
        analysis.notes.append(f"no verdict from fewer than {MIN_ITERATIONS} iterations that can be compared")
    return analysis


def _counts(values: npt.NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    found, counts = np.unique(values, return_counts=True)
    return found.tolist(), counts.tolist()


def _hosts(matched: Matched) -> list[dict[str, Any]]:
    return [
        {
            "host": clock.host,
            "offset_ns": clock.offset_ns,
            "uncertainty_ns": clock.uncertainty_ns,
            "operations": clock.operations,
            "drifts": clock.drifts,
        }
        for clock in matched.hosts.values()
    ]


def without_warm_up(matched: Matched) -> tuple[Matched, int, int]:
    """Leave out the first iterations as long as they take clearly longer than usual."""
    count = len(matched.iteration)
    limit = min(20, count // 10)
    usual = float(np.median(matched.span_ns)) if count else 0.0
    warm = 0
    while warm < limit and matched.span_ns[warm] > 1.5 * usual:
        warm += 1
    if not warm:
        return matched, 0, 0
    longer = int((matched.span_ns[:warm] - usual).sum())
    return matched.only(np.arange(count) >= warm), warm, longer


class Judge:
    """The figures that verdicts are made of."""

    def __init__(self, matched: Matched) -> None:
        self.matched = _without_hidden_waits(matched)
        self.ranks = matched.ranks
        self.span_ns = matched.span_ns
        self.replay = Replay(self.matched)
        self.own = own = self.matched.own_ns
        self.work = own.sum(axis=2, dtype=np.float64)
        training = own[:, :, _TRAINING].sum(axis=2, dtype=np.float64)
        # How much later each rank came than the others, for each operation; saving and evaluating are other matters.
        if matched.exchanges:
            self.late_by_phase = self._lateness_where_it_is_worked()
            trained = self.late_by_phase[:, :, _TRAINING].sum(axis=2, dtype=np.float64)
            self.late = np.minimum(self.late_by_phase.sum(axis=2, dtype=np.float64), trained)
        else:
            self.late = np.minimum(_excess(self.work, matched.present), _excess(training, matched.present))
            self.late_by_phase = np.stack([_excess(own[:, :, phase], matched.present) for phase in Phase], axis=2)
        self.iteration_late = matched.by_iteration(self.late)
        self.stalled = self._stalls(matched.by_iteration(training))
        self.calm: Mask = ~np.asarray(self.stalled.any(axis=1))
        self.looked_at = self.calm  # for what is typical
        self.explained_ns = np.zeros(len(self.span_ns))  # of each iteration, by stragglers

    def _lateness_where_it_is_worked(self) -> FloatArray:
        """By how much the work of ranks that send to each other exceeds that of the others: [operation, rank, phase].

        They do different things before each operation: what they do of a phase in an iteration is compared, and the
        excess lies where they work in that phase.
        """
        found = np.zeros_like(self.own)
        for phase in Phase:
            work = self.own[:, :, phase]
            total = self.matched.by_iteration(work)
            excess = _excess(total, np.ones_like(total, dtype=np.bool_))
            share = np.divide(excess, total, out=np.zeros_like(total), where=total > 0)
            found[:, :, phase] = share[self.matched.operation_iteration] * work
        return found

    # --- shares -------------------------------------------------------------------------------------------------------

    def share(self, part_ns: Float64Array, where: Mask | None = None) -> Estimate:
        """The share of iterations' time that a part of each has."""
        if where is None:
            return statistics.share(part_ns, self.span_ns)
        return statistics.share(part_ns[where], self.span_ns[where])

    def rank_work(self) -> list[RankWork]:
        """Where each rank's time went."""
        matched = self.matched
        total = max(float(self.span_ns.sum()), 1.0)
        own = self.own.sum(axis=0, dtype=np.float64)
        exposed = np.where(matched.present, matched.exposed_ns[:, None], 0).sum(axis=0)
        waiting = matched.wait_ns.sum(axis=0, dtype=np.float64)
        found = []
        for column, rank in enumerate(self.ranks):
            shares = {phase_name(phase): float(own[column, phase]) / total for phase in Phase if own[column, phase] > 0}
            waits, communicates = float(waiting[column]) / total, float(exposed[column]) / total
            rest = max(0.0, 1 - sum(shares.values()) - waits - communicates)
            found.append(RankWork(rank, shares, waits, communicates, rest))
        return found

    def notes(self) -> list[str]:
        """What could not be known."""
        found = []
        sources = set(np.unique(self.matched.source).tolist())
        if Source.BACKWARD in sources:
            found.append(
                "the collective inside backward is not seen from Python: ranks are compared by when they come to"
                " backward, and the shortest backward of an iteration is taken as everybody's own"
            )
        if Source.OPTIMIZER in sources:
            found.append(
                "no collective is recorded; the ranks leave the gap between backward and optimizer together: a rank's"
                " arrival is the end of its last backward"
            )
        if any(each.work.enqueued for each in self.matched.writers):
            found.append(
                "communication was enqueued on a device: when it ran, and whose device work was late, the host's times"
                " do not tell; own work and waiting are those of the Python thread"
            )
        return found

    # --- stalls -------------------------------------------------------------------------------------------------------

    def _stalls(self, work: Float64Array) -> Mask:
        """Where a rank (columns) took far longer than it usually does, iteration by iteration (rows)."""
        usual, deviation = np.median(work, axis=0), statistics.spread(work)
        least = STALL_SHARE * np.median(self.span_ns)
        found: Mask = work > usual + np.maximum(least, STALL_DEVIATIONS * deviation)
        if work.shape[1] > 1:
            # Where the machine is too busy for that: long ones that (almost) all are one rank's are no accident either.
            long = work > (usual + np.maximum(least, STALL_LONE_DEVIATIONS * deviation)).max()
            counts = long.sum(axis=0)
            worst = int(counts.argmax())
            if counts[worst] >= max(STALL_LONE_EVENTS, STALL_LONE_SHARE * counts.sum()):
                found[:, worst] |= long[:, worst]
        found[:, found.mean(axis=0) > STEADY_FROM] = False
        return found

    def _pauses(self) -> tuple[Float64Array, Float64Array]:
        """What stalls added to the work before each operation, and that by rank and phase in all."""
        matched = self.matched
        stalled = self.stalled[matched.operation_iteration]
        above = np.where(stalled[:, :, None], np.maximum(self.own - self._usual(), 0), 0)
        above[:, :, _APART] = 0
        return above.sum(axis=2, dtype=np.float64), above.sum(axis=0, dtype=np.float64)

    def _usual(self) -> FloatArray:
        """What ranks usually do of a phase before their n-th operation of an iteration: [operation, rank, phase]."""
        found = np.zeros_like(self.own)
        for column, present in enumerate(self.matched.present.T):
            rows = np.flatnonzero(present)
            position = self.matched.positions(rows)
            order = np.argsort(position, kind="stable")
            for part in np.split(rows[order], np.flatnonzero(np.diff(position[order])) + 1):
                if len(part):
                    found[part, column] = np.median(self.own[part, column], axis=0)
        return found

    # --- findings -----------------------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """All of them, the most expensive first."""
        found: list[Finding | None] = []
        if self.matched.meets:
            stragglers = self._stragglers()
            found += [stragglers, self._wandering(stragglers), self._communication()]
        found += [self._stall_finding(), self._checkpoints(), self._evaluation(), self._input(), self._optimizer()]
        found.append(self._drift())
        return sorted((each for each in found if each is not None), key=lambda each: -each.effect)

    # --- one rank, or some --------------------------------------------------------------------------------------------

    def _stragglers(self) -> Finding | None:
        """Ranks that come late to most operations, by enough to matter."""
        for where in self._stretches():
            chosen = self._steady(where)
            if chosen:
                break
        else:
            return None
        if where is not self.calm:
            where = self.calm & (np.arange(len(self.calm)) >= self._onset(chosen, where))
        change = np.zeros_like(self.late)
        change[:, chosen] = -np.maximum(self.late[:, chosen], 0)
        saved = self.replay.saved([change])[0]
        effect = self.share(saved, self.calm)
        if effect.value < MIN_EFFECT or not effect.above(0):
            return None
        ranks = [self.ranks[column] for column in chosen]
        self.looked_at, self.explained_ns = where, saved
        excess = self._excess_by_phase(chosen)
        cause, causes = _cause(excess)
        if cause == NO_SINGLE_CAUSE and self._follows_data(chosen, excess):
            cause = DATA
        own, others = self._typical(chosen, cause)
        who = named(ranks)
        verb, its, there = ("holds", "its", "there") if len(ranks) == 1 else ("hold", "their", "there")
        told: dict[str, Any] = {}
        if cause == DATA:
            reason = (
                f"forward and backward take {duration(own)} an iteration {there} and {duration(others)} elsewhere,"
                " both by the same factor: larger or longer batches"
            )
        elif cause == NO_SINGLE_CAUSE:
            parts = " and ".join(f"{each['cause']} {percent(each['share'])}" for each in causes)
            alike = self._alike(chosen)
            reason = f"{its} own work takes {duration(own)} an iteration and {duration(others)} elsewhere,"
            reason += f" no single cause ({parts} of the excess)" + ("; every phase is slower alike" if alike else "")
            if alike:
                told["alike"] = True
        else:
            reason = f"{cause} takes {duration(own)} an iteration {there} and {duration(others)} elsewhere"
        begin = int(self.matched.iteration[np.flatnonzero(where)[0]])
        since = ""
        if where is not self.calm:
            since = f" since iteration {begin:,}"
            told["since_iteration"] = begin
        often = (self.iteration_late[where][:, chosen] > 0).mean(axis=0)
        return self._finding(
            "straggler",
            ranks,
            cause,
            causes,
            effect,
            MIN_EFFECT,
            f"{who} {verb} the others back{since}: {reason}",
            _advice(cause, self._workers(chosen), bool(told.get("alike")), self.matched.exchanges),
            {"own_ns": round(own), "others_ns": round(others), "late_in": often.tolist(), **told},
        )

    def _stretches(self) -> Iterator[Mask]:
        """Where a rank may be steadily late: the whole run, else from some iteration to the end, in a long run."""
        yield self.calm
        edges = np.linspace(0, len(self.calm), STRETCHES + 1).astype(np.int64)
        for begin in edges[1:-2].tolist():
            where = self.calm & (np.arange(len(self.calm)) >= begin)
            if where.sum() >= LATER_ITERATIONS and self.span_ns[where].sum() >= LATER_NS:
                yield where

    def _onset(self, columns: Sequence[int], where: Mask) -> int:
        """From when on some ranks are late: where being late by half of what they are takes over from not being so."""
        late = self.iteration_late[:, list(columns)].sum(axis=1)
        half = float(np.median(late[where])) / 2
        return int(np.argmin(np.append(0.0, np.cumsum(late - half))))

    def _steady(self, where: Mask) -> list[int]:
        """Ranks that are late in most of some iterations, at their best, and all the time."""
        count = int(where.sum())
        if count < MIN_ITERATIONS:
            return []
        late = self.iteration_late[where]
        often = (late > 0).mean(axis=0)
        work = self.matched.by_iteration(self.work)[where]
        best = np.percentile(work, BEST, axis=0)
        best -= np.percentile(statistics.lower_median_of_others(work), BEST, axis=0)
        best /= max(float(np.median(self.span_ns[where])), 1.0)
        # Neighbours on the machine come and go: in all tenths of the time but one it is late by much of its mean.
        parts = np.array_split(late, min(STRETCHES, count))
        least = np.sort(np.stack([part.mean(axis=0) for part in parts]), axis=0)[1]
        chosen = []
        for column in range(len(self.ranks)):
            estimate = self.share(self.iteration_late[:, column], where)
            enough = min(estimate.value, best[column]) >= MIN_EFFECT and estimate.above(0)
            if enough and often[column] >= LATE_IN and least[column] >= STEADY_PART * late[:, column].mean():
                chosen.append(column)
        return chosen if 2 * len(chosen) <= len(self.ranks) + 1 else []

    def _excess_by_phase(self, columns: Sequence[int]) -> dict[str, float]:
        """By how much some ranks' work exceeds the others', by phase."""
        found = {}
        for phase in _TRAINING:
            own = self.matched.by_iteration(self.own[:, :, phase])[self.looked_at]
            others = statistics.lower_median_of_others(own)
            # The better three quarters of each: what a busy machine adds to some says nothing about the cause.
            count = (3 * len(own) + 3) // 4
            better = np.sort(own, axis=0)[:count] - np.sort(others, axis=0)[:count]
            found[phase_name(phase)] = float(better[:, list(columns)].mean(axis=0).sum())
        return found

    def _typical(self, columns: Sequence[int], cause: str | None) -> tuple[float, float]:
        """Mean own work of an iteration in what a cause names, of some ranks and of the median of the others."""
        own = self.matched.by_iteration(self._named_work(cause))[self.looked_at]
        others = [column for column in range(len(self.ranks)) if column not in columns]
        mine = float(own[:, list(columns)].mean())
        return mine, float(statistics.lower_median(own[:, others]).mean()) if others else 0.0

    def _named_work(self, cause: str | None) -> FloatArray:
        if cause == DATA:
            return self.own[:, :, Phase.FORWARD] + self.own[:, :, Phase.BACKWARD]
        for phase in Phase:
            if cause == phase_name(phase):
                return np.asarray(self.own[:, :, phase])
        return np.asarray(self.own[:, :, _TRAINING].sum(axis=2, dtype=np.float64))

    def _ratios(self, columns: Sequence[int]) -> dict[int, float]:
        """How many times as long as elsewhere each phase takes on some ranks; only of phases that matter."""
        found = {}
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            mine, others = self._typical(columns, phase_name(phase))
            if others > 0.005 * float(self.span_ns.mean()):
                found[int(phase)] = mine / others
        return found

    def _follows_data(self, columns: Sequence[int], excess: dict[str, float]) -> bool:
        """Forward and backward are longer by the same factor, the optimizer, which sees no data, is not.

        Stages of a pipeline see the same data.
        """
        if self.matched.exchanges:
            return False
        forward, backward = excess["forward"], excess["backward"]
        total = sum(value for value in excess.values() if value > 0)
        if total <= 0 or min(forward, backward) < 0.1 * total or forward + backward < CAUSE_SHARE * total:
            return False
        ratios = self._ratios(columns)
        one, other = ratios.get(Phase.FORWARD, 0.0), ratios.get(Phase.BACKWARD, 0.0)
        if min(one, other) <= 1 or not 0.5 <= (one - 1) / (other - 1) <= 2:
            return False
        return ratios.get(Phase.OPTIMIZER, 1.0) - 1 < 0.4 * (min(one, other) - 1)

    def _alike(self, columns: Sequence[int]) -> bool:
        """Whether all that computes is slower by about the same factor."""
        ratios = list(self._ratios(columns).values())
        return len(ratios) >= 2 and min(ratios) > 1.05 and max(ratios) - 1 <= 2.5 * (min(ratios) - 1)

    def _workers(self, columns: Sequence[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self.matched.writers[column].work.workers for column in columns))

    def _wandering(self, stragglers: Finding | None) -> Finding | None:
        """Lateness that goes from rank to rank."""
        steady = [self.ranks.index(rank) for rank in stragglers.ranks] if stragglers is not None else []
        late = np.maximum(self.late, 0)
        late[:, steady] = 0
        if not late.any():
            return None
        steady_change = np.zeros_like(self.late)
        steady_change[:, steady] = -np.maximum(self.late[:, steady], 0)
        with_all, with_steady = self.replay.saved([steady_change - late, steady_change])
        saved = with_all - with_steady
        effect = self.share(saved, self.calm)
        follows = self._varies_with_data()
        threshold = DATA_IMBALANCE if follows else WANDERING
        always = (
            np.percentile(saved[self.calm] / np.maximum(self.span_ns[self.calm], 1), 10) if self.calm.any() else 0.0
        )
        if always < (DATA_ALWAYS if follows else WANDERING_ALWAYS):
            return None
        if effect.value < threshold or effect.low < MIN_EFFECT:
            return None
        columns = [column for column in range(len(self.ranks)) if column not in steady]
        cause, causes = _cause(self._positive_excess(columns))
        last = np.argmax(np.where(self.iteration_late > 0, self.iteration_late, -1)[self.calm][:, columns], axis=1)
        counts = np.bincount(last, minlength=len(columns)) / max(1, len(last))
        most = ", ".join(f"rank {self.ranks[columns[at]]} in {percent(counts[at])}" for at in np.argsort(-counts)[:3])
        if follows:
            return self._finding(
                *("data_imbalance", [], DATA, causes, effect, threshold),
                f"batches differ between the ranks, all wait for the largest ({most} of the iterations)",
                "sort or bucket samples by length, or give each rank the same number of tokens rather than of samples",
                {"last": counts.tolist()},
            )
        who = f"another rank is late each time ({most} of the iterations)"
        if counts.max() >= LATE_IN:
            who = f"one rank is mostly the late one, too unevenly for a steady straggler ({most} of the iterations)"
        return self._finding(
            *("wandering", [], cause, causes, effect, threshold),
            f"{who}, in {_told(cause, causes)}",
            "look for what shares the hosts: other processes, threads of one's own (OMP_NUM_THREADS x ranks against"
            " cores), a shared file system; more work per iteration makes it matter less",
            {"last": counts.tolist()},
        )

    def _positive_excess(self, columns: Sequence[int]) -> dict[str, float]:
        rows = self.calm[self.matched.operation_iteration]
        late = np.maximum(self.late_by_phase[rows][:, list(columns)], 0)
        who = (self.late[rows][:, list(columns)] > 0)[:, :, None]
        total = (late * who).sum(axis=(0, 1))
        return {phase_name(phase): float(total[phase]) for phase in _TRAINING}

    def _varies_with_data(self) -> bool:
        """Forward varies with backward, or with the size of the batch, from iteration to iteration and rank to rank."""
        matched = self.matched
        forward = matched.by_iteration(self.own[:, :, Phase.FORWARD])
        ordinary = self.calm & (matched.span_ns > 0)
        backward = matched.by_iteration(self.own[:, :, Phase.BACKWARD])
        if (matched.source == Source.BACKWARD).any():
            backward = np.zeros_like(forward)  # what each rank did itself is not known
        sizes = np.zeros_like(forward)
        for column, each in enumerate(matched.writers):
            sizes[:, column] = each.work.batch_bytes[np.searchsorted(each.iterations.number, matched.iteration)]
        # The optimizer sees no data: where it varies along, it is the machine that varies.
        optimizer = matched.by_iteration(self.own[:, :, Phase.OPTIMIZER])
        if _correlation(forward[ordinary], optimizer[ordinary]) > UNLIKE:
            return False
        return any(_correlation(forward[ordinary], other[ordinary]) >= ALIKE for other in (backward, sizes))

    # --- all ranks ----------------------------------------------------------------------------------------------------

    def common(self, phase: int) -> Float64Array:
        """What the median rank does of a phase in each iteration, ns."""
        return self._median_rank(self.own[:, :, phase])

    def held_ns(self) -> Float64Array:
        """For how long operations that are not matched hold the median rank in each iteration."""
        return self._median_rank(self.matched.fixed_ns.astype(np.float64))

    def exposed_ns(self) -> Float64Array:
        """For how long operations to which all had come hold the median rank in each iteration."""
        if not self.matched.exchanges:
            return self.matched.by_iteration(self.matched.exposed_ns)
        return self._median_rank(np.broadcast_to(self.matched.exposed_ns[:, None], self.matched.present.shape))

    def _median_rank(self, values: FloatArray) -> Float64Array:
        """Lower median of the ranks: of each operation, summed over an iteration; of the sums where ranks exchange."""
        present = self.matched.present
        if self.matched.exchanges:
            return statistics.lower_median(self.matched.by_iteration(np.where(present, values, 0)))
        return self.matched.by_iteration(_lower_median_of_present(np.where(present, values, np.inf)))

    def apart_ns(self) -> Float64Array:
        """Saving and evaluating in each iteration, on the rank that it took longest."""
        return np.asarray(self.matched.by_iteration(self.own[:, :, _APART].sum(axis=2)).max(axis=1, initial=0))

    def _common(self, phase: int) -> tuple[Estimate, Float64Array]:
        part = self.common(phase)
        return self.share(part), part

    def _input(self) -> Finding | None:
        """All ranks wait for their data."""
        effect, _ = self._common(Phase.DATA_LOADING)
        if effect.value < INPUT_BOUND or effect.low < MIN_EFFECT:
            return None
        workers = self._workers(range(len(self.ranks)))
        seen = (
            f"{_number_of(workers)} worker{'' if workers == {1} else 's'} per loader" if workers else "no loader seen"
        )
        starts = self._loader_start_share()
        restart = ""
        if starts > 0.5:
            restart = "; most of it when a pass over the data starts: persistent_workers=True keeps the workers"
        return self._finding(
            *("input_bound", [], phase_name(Phase.DATA_LOADING), [], effect, INPUT_BOUND),
            f"all ranks wait for data ({seen}){restart}",
            _advice(phase_name(Phase.DATA_LOADING), workers),
            {"workers": sorted(workers), "at_loader_start": starts},
        )

    def _loader_start_share(self) -> float:
        """Share of the data loading that falls into iterations in which a loader was started."""
        starts = np.unique(np.concatenate([each.work.loader_starts for each in self.matched.writers]))
        loading = self.matched.by_iteration(self.own[:, :, Phase.DATA_LOADING]).sum(axis=1)
        if not len(starts) or loading.sum() <= 0:
            return 0.0
        return float(loading[np.isin(self.matched.iteration, starts)].sum() / loading.sum())

    def _optimizer(self) -> Finding | None:
        """The optimizer's step takes a large part on all ranks."""
        effect, part = self._common(Phase.OPTIMIZER)
        if effect.value < OPTIMIZER_BOUND or effect.low < MIN_EFFECT:
            return None
        return self._finding(
            *("optimizer_bound", [], phase_name(Phase.OPTIMIZER), [], effect, OPTIMIZER_BOUND),
            f"the optimizer's step takes {duration(float(part.mean()))} of every iteration on all ranks",
            "a fused or foreach implementation (fused=True), fewer and larger parameters, a sharded optimizer, or more"
            " gradient accumulation",
        )

    def _communication(self) -> Finding | None:
        """Operations to which everybody has come take long themselves."""
        exposed = self.exposed_ns()
        effect = self.share(exposed)
        if effect.value < COMMUNICATION_BOUND or effect.low < MIN_EFFECT:
            return None
        if any(each.work.enqueued for each in self.matched.writers):
            return None
        return self._finding(
            *("communication_bound", [], "communication", [], effect, COMMUNICATION_BOUND),
            f"communication that nothing overlaps takes {duration(float(exposed.mean()))} of every iteration",
            "overlap it with backward (bucket size, static_graph), send less (lower precision, gradient accumulation"
            " with no_sync), or look at the network between the hosts",
        )

    def _stall_finding(self) -> Finding | None:
        """Rare, long interruptions."""
        events = int(self.stalled.sum())
        if events < STALL_EVENTS:
            return None
        above, by_phase = self._pauses()
        saved = self.replay.saved([-above])[0]
        effect = self.share(saved)
        threshold = MIN_EFFECT if events >= STALL_FEW_EVENTS else STALL_FEW_EFFECT
        if effect.value < threshold or not effect.above(threshold / 2):
            return None
        counts = self.stalled.sum(axis=0)
        lost = by_phase.sum(axis=1)
        columns = [column for column in range(len(self.ranks)) if lost[column] >= STALL_RANK * lost.max()]
        cause, causes = _cause({phase_name(p): float(by_phase[:, p].sum()) for p in _TRAINING})
        each = float(above[self.stalled[self.matched.operation_iteration]].sum()) / events
        ranks = [self.ranks[column] for column in columns]
        at_start = self._stalls_at_loader_start()
        where = _told(cause, causes)
        if at_start:
            where += " when a pass over the data starts"
        advice = (
            "garbage collection, logging, other processes: gc.freeze() after start-up and gc.collect() on all ranks"
        )
        advice += " in the same iteration, nothing else on the hosts"
        if at_start:
            advice = "persistent_workers=True, or fewer and longer passes"
        often = every(len(self.span_ns) * len(columns) / events, "iteration")
        return self._finding(
            *("stalls", ranks, cause, causes, effect, threshold),
            f"{named(ranks)} {'stalls' if len(ranks) == 1 else 'stall'} now and then: {events} times"
            f" {duration(each)}, {often}, in {where}",
            advice,
            {
                "events": events,
                "mean_ns": round(each),
                "by_rank": {str(self.ranks[c]): int(counts[c]) for c in columns},
            },
        )

    def _stalls_at_loader_start(self) -> bool:
        hits = total = 0
        for column, each in enumerate(self.matched.writers):
            stalled = self.matched.iteration[self.stalled[:, column]]
            hits += int(np.isin(stalled, each.work.loader_starts).sum())
            total += len(stalled)
        return total > 0 and hits > 0.8 * total

    def _apart_finding(self, phase: Phase, kind: str, what: str, advice: str) -> Finding | None:
        """Time that saving or evaluating takes, and that the ranks which do not take part in it wait."""
        own = self.own[:, :, phase]
        if not own.any():
            return None
        change = np.zeros_like(own)
        change -= own
        saved = self.replay.saved([change])[0]
        effect = self.share(saved)
        if effect.value < MIN_EFFECT or not effect.above(0):
            return None
        by_iteration = self.matched.by_iteration(own)
        busy = by_iteration.max(axis=1) > 0
        columns = [column for column in range(len(self.ranks)) if by_iteration[:, column].any()]
        ranks = [self.ranks[column] for column in columns]
        gaps = np.diff(np.flatnonzero(busy))
        often = every(float(np.median(gaps)) if len(gaps) else len(busy), "iteration")
        each = float(by_iteration.max(axis=1)[busy].mean())
        who = "all ranks" if len(ranks) == len(self.ranks) else named(ranks)
        waiting = "" if len(ranks) == len(self.ranks) else ", and the others wait"
        return self._finding(
            *(kind, ranks, phase_name(phase), [], effect, MIN_EFFECT),
            f"{what} takes {duration(each)} on {who} {often}{waiting}",
            advice,
            {"events": int(busy.sum()), "mean_ns": round(each)},
        )

    def _checkpoints(self) -> Finding | None:
        return self._apart_finding(
            Phase.CHECKPOINT,
            "slow_checkpoints",
            "saving a checkpoint",
            "save less often, from a copy in the background (torch.distributed.checkpoint.async_save), to local disk"
            " first, or sharded over the ranks",
        )

    def _evaluation(self) -> Finding | None:
        found = self._apart_finding(
            Phase.EVALUATE,
            "evaluation",
            "evaluation",
            "spread it over all ranks, or evaluate less often or in a job of its own",
        )
        # What all ranks do alike is meant to be done.
        return found if found is not None and len(found.ranks) < len(self.ranks) else None

    def _drift(self) -> Finding | None:
        """Iterations become longer and longer."""
        length = (self.span_ns - self.apart_ns() - self.explained_ns)[self.calm]
        if len(length) < 10 * MIN_ITERATIONS:
            return None
        parts = [float(np.median(part)) for part in np.array_split(length, 10)]
        ups = np.sign(np.subtract.outer(parts, parts))[np.tril_indices(10, -1)]
        begin, end = length[: len(length) // 4], length[-(len(length) // 4) :]
        change = statistics.difference(end, begin)
        scale = max(float(begin.mean()), 1.0)
        effect = Estimate(*(value / scale for value in (change.value, change.low, change.high)))
        if effect.value < DRIFT or effect.low < MIN_EFFECT or ups.mean() < 0.6:
            return None
        grown = length - float(np.median(begin))
        costs = statistics.share(grown, self.span_ns[self.calm])
        own = self.matched.by_iteration(self.own.mean(axis=1))[self.calm]
        quarter = len(own) // 4
        growth = own[-quarter:].mean(axis=0) - own[:quarter].mean(axis=0)
        cause, causes = _cause({phase_name(phase): float(growth[phase]) for phase in _TRAINING})
        found = self._finding(
            *("drift", [], cause, causes, costs, DRIFT),
            f"iterations become longer: {duration(parts[0])} at first, {duration(parts[-1])} at last"
            f" (+{percent(effect.value)}), in {_told(cause, causes)}",
            "look for what grows: memory (swapping, fragmentation), lists that are kept, a hotter device, a dataset"
            " whose samples become longer",
            {"begin_ns": round(float(begin.mean())), "end_ns": round(float(end.mean())), "change": effect.value},
        )
        return found if found.effect >= MIN_EFFECT else None

    # --- what if ------------------------------------------------------------------------------------------------------

    def what_if(self, least: float = 0.01, most: int = 12) -> list[WhatIf]:
        """What it would save if a rank, or one phase of it, were like the median rank; and if a phase were free."""
        found = []
        for rank, phase, change in self._replacements(least):
            if not change.any():
                continue
            (saved,) = self.replay.saved([change])
            effect = self.share(saved)
            if effect.value >= least:
                found.append(self._what_if(rank, phase, effect, saved))
        return sorted(found, key=lambda each: (each.rank is None, -each.saves))[:most]

    def _replacements(self, least: float) -> Iterator[tuple[int | None, int | None, FloatArray]]:
        """Rank, phase and what changes before each operation, one at a time: each change is as large as the run."""
        for column, rank in enumerate(self.ranks if self.matched.meets else []):
            worth = np.maximum(self.late[:, column], 0)
            if float(worth.sum()) < least * float(self.span_ns.sum()):
                continue
            change = np.zeros_like(self.late)
            change[:, column] = -worth
            yield rank, None, change
            for phase in Phase:
                change = np.zeros_like(self.late)
                change[:, column] = -np.maximum(self.late_by_phase[:, column, phase], 0)
                yield rank, phase, change
        for phase in Phase:
            yield None, phase, -self.own[:, :, phase]

    def _what_if(self, rank: int | None, phase: int | None, effect: Estimate, saved: Float64Array) -> WhatIf:
        total = max(float(self.span_ns.sum()), 1.0)
        saves = float(saved.sum())
        amount = f"{percent(saves / total)} ({span(saves, total)})"
        name = None if phase is None else phase_name(phase)
        if rank is None:
            text = f"{name} on all ranks costs {amount}"
        elif name is None:
            text = f"rank {rank} being slower than the median rank costs {amount}"
        else:
            text = f"{name} on rank {rank} costs {amount}"
        return WhatIf(rank, name, effect.value, (effect.low, effect.high), round(saves), text)

    # --- wording ------------------------------------------------------------------------------------------------------

    def _finding(
        self,
        kind: str,
        ranks: list[int],
        cause: str | None,
        causes: list[dict[str, Any]],
        effect: Estimate,
        threshold: float,
        what: str,
        advice: str,
        details: dict[str, Any] | None = None,
    ) -> Finding:
        total = float(self.span_ns.sum())
        cost = effect.value * total
        sources, counts = _counts(self.matched.source)
        source = Source(sources[int(np.argmax(counts))]) if sources else Source.ITERATION
        interval = f"95 % interval {100 * effect.low:.0f} to {100 * effect.high:.0f} %"
        return Finding(
            kind=kind,
            ranks=ranks,
            cause=cause,
            causes=causes,
            effect=effect.value,
            interval=(effect.low, effect.high),
            threshold=threshold,
            cost_ns=round(cost),
            of_ns=round(total),
            iterations=len(self.span_ns),
            arrival=SOURCES[source],
            headline=f"{what}; that costs {percent(effect.value)} of the time ({span(cost, total)}, {interval})",
            advice=advice,
            details=details or {},
        )


# --- small parts ------------------------------------------------------------------------------------------------------


def _excess(values: FloatArray, present: Mask) -> FloatArray:
    """How much more than the lower median of the others each rank has; 0 where it was not there."""
    if values.shape[1] < 2:
        return np.zeros_like(values)
    if present.all():
        return values - statistics.lower_median_of_others(values)
    filled = np.where(present, values, _lower_median_of_present(np.where(present, values, np.inf))[:, None])
    found: FloatArray = np.where(present, filled - statistics.lower_median_of_others(filled), 0)
    return found


def _lower_median_of_present(values: FloatArray) -> FloatArray:
    """Lower median of the finite values of each row."""
    ordered = np.sort(values, axis=1)
    middle = (np.isfinite(values).sum(axis=1) - 1) // 2
    found: FloatArray = np.take_along_axis(ordered, np.maximum(middle, 0)[:, None], axis=1)[:, 0]
    return np.where(np.isfinite(found), found, 0)


def _cause(excess: dict[str, float]) -> tuple[str, list[dict[str, Any]]]:
    """The phase that explains enough of an excess, else that there is none; and the two largest."""
    total = sum(value for value in excess.values() if value > 0)
    if total <= 0:
        return NO_SINGLE_CAUSE, []
    largest = sorted(excess.items(), key=lambda item: -item[1])
    causes = [{"cause": name, "share": value / total} for name, value in largest[:2] if value > 0]
    return (largest[0][0] if largest[0][1] >= CAUSE_SHARE * total else NO_SINGLE_CAUSE), causes


def _told(cause: str | None, causes: list[dict[str, Any]]) -> str:
    if cause != NO_SINGLE_CAUSE:
        return str(cause)
    parts = " and ".join(f"{each['cause']} {percent(each['share'])}" for each in causes)
    return f"no single phase ({parts} of it)" if parts else "no phase that is seen"


def _number_of(workers: frozenset[int]) -> str:
    return " or ".join(str(each) if each else "no" for each in sorted(workers))


def _advice(cause: str | None, workers: frozenset[int], alike: bool = False, exchanges: bool = False) -> str:
    """What to try against a rank that is slow for this reason."""
    if cause == phase_name(Phase.DATA_LOADING):
        seen = f"; it has {_number_of(workers).replace('no', 'none')}" if workers else ""
        return f"more DataLoader workers (num_workers{seen}), prefetching, or faster storage for what it reads"
    if cause == DATA:
        return "sort or bucket samples by length, or give each rank the same number of tokens rather than of samples"
    if cause == phase_name(Phase.OPTIMIZER):
        return "compare its parameters and optimizer state with the other ranks': a sharded optimizer may be uneven"
    if alike and exchanges:
        return "move layers from its pipeline stage to others, or look at its host: other processes, fewer threads"
    if alike:
        return "look at the host rather than the program: other processes on its cores, fewer threads, throttling"
    if cause in (phase_name(Phase.FORWARD), phase_name(Phase.BACKWARD)):
        return "compare what this rank computes (batch, layers, expert or pipeline stage) and its host's clock and load"
    return "look at what this rank alone does between the phases: logging, metrics, copies, other processes on its host"


def _correlation(one: Float64Array, other: Float64Array) -> float:
    """Correlation of the two over iterations and ranks, each compared with its rank's own mean."""
    if one.shape[0] < MIN_ITERATIONS:
        return 0.0
    first, second = one - one.mean(axis=0), other - other.mean(axis=0)
    norm = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / norm if norm > 0 else 0.0


def _without_hidden_waits(matched: Matched) -> Matched:
    """While some rank saves or evaluates, others wait in calls that may not be recorded: that is not their work.

    Before such an operation, what a rank does outside of all phases counts as waiting beyond what it usually is.
    """
    if not matched.meets:
        return matched
    apart = matched.own_ns[:, :, _APART].sum(axis=2)
    longest = apart.max(axis=1, keepdims=True)
    busy = longest[:, 0] > 0
    if not busy.any() or busy.all():
        return matched
    other = matched.own_ns[:, :, Phase.OTHER]
    usual = np.median(other[~busy], axis=0)
    hidden = np.where(busy[:, None], np.minimum(np.maximum(other - usual, 0), np.maximum(longest - apart, 0)), 0)
    if not hidden.any():
        return matched
    own = matched.own_ns.copy()
    own[:, :, Phase.OTHER] -= hidden
    return dataclasses.replace(matched, own_ns=own, wait_ns=matched.wait_ns + hidden)
