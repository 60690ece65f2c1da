"""The ranks of a run side by side: at which operations they met, what each did itself before, and how long it waited.

Where they exchange messages, they also depend on each other two by two: what a rank receives must have been sent.

A collective makes everybody as slow as the slowest. What a rank costs the others is therefore not how long its phases
are but how late it comes to an operation after the one before had ended; `Matched.own_ns` is that, on the rank's own
clock, so that clocks of different hosts need not agree.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_auto.iteration.rule import Int64Array, Mask
from lens_auto.recorder.layout import Phase
from lens_auto.report import clocks
from lens_auto.report.clocks import HostClock
from lens_auto.report.points import BACKWARD_GROUP, GAP_GROUP, Source
from lens_auto.report.statistics import Float64Array
from lens_auto.report.transfers import Exchanged, pair_transfers
from lens_auto.report.work import GATHERING_WRAPPERS, PHASES, REDUCER

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from lens_auto.report.load import LoadedWriter

# Beyond this many cells (operations x ranks x phases) iterations are thinned out evenly.
_MAX_CELLS = 120_000_000
# Ranks that end backward together, to within this share of an iteration, meet there.
_TOGETHER = 0.1
_COVERED = 0.5  # share of the iterations that must have a recorded collective
_JITTER_NS = 500_000
_SEQ_BITS = 40
_LOWEST, _HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max

Rows = Int64Array  # indices into the points of one writer, ascending


@dataclass(frozen=True)
class Matched:
    """Ranks of one attempt side by side.

    Attributes:
        writers: the writers compared, by rank; columns.
        iteration: numbers of the iterations compared: those that begin and end with an operation; ascending.
        operation_iteration: for each operation (rows, in order of time) the index of its iteration.
        present: which ranks met in it.
        own_ns: [operation, rank, phase]: the rank's own work since it came to the one before.
        overlap_ns: [operation, rank]: own work between coming to an asynchronous operation and waiting for it.
        overlap_before_ns: the same of the operation before, which is part of `own_ns`.
        fixed_ns: [operation, rank]: held by what is not matched, before it came.
        after: [operation]: what holds a transfer's rank: the operation at which its other end issued it; -1: nothing.
        comm_ns: [operation]: from the last arrival until the operation let go.
        exposed_ns: [operation]: the part of that during which nobody worked.
        wait_ns: [operation, rank]: waiting for the last to come.
        source: [operation] `Source`.
        span_ns: recorded length of each iteration, from its first operation's predecessor to its last operation.
        meets: the ranks wait for each other; where not, each row is an iteration and ranks are not compared.
        skipped: iterations left out to save memory.
        notes: what could not be known.
    """

    writers: list[LoadedWriter]
    iteration: Int64Array
    operation_iteration: Int64Array
    present: Mask
    own_ns: npt.NDArray[np.float32]
    overlap_ns: npt.NDArray[np.float32]
    overlap_before_ns: npt.NDArray[np.float32]
    fixed_ns: npt.NDArray[np.float32]
    after: Int64Array
    comm_ns: Float64Array
    exposed_ns: Float64Array
    wait_ns: npt.NDArray[np.float32]
    source: npt.NDArray[np.uint8]
    span_ns: Float64Array
    meets: bool
    skipped: int = 0
    hosts: dict[str, HostClock] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[int]:
        """Global rank of each column."""
        return [each.writer.info.rank for each in self.writers]

    @property
    def exchanges(self) -> bool:
        """Ranks send to each other: many operations have one rank, and what each does is compared by iteration."""
        return bool((self.source == Source.TRANSFER).any())

    @property
    def operation_position(self) -> Int64Array:
        """For each operation how many came before it in its iteration."""
        return self.positions(np.arange(len(self.operation_iteration)))

    def positions(self, rows: Int64Array) -> Int64Array:
        """For each of some operations, in ascending order, how many of these came before it in its iteration."""
        iteration = self.operation_iteration[rows]
        found: Int64Array = np.arange(len(rows)) - np.searchsorted(iteration, iteration)
        return found

    def only(self, wanted: Mask) -> Matched:
        """The same with some of the iterations."""
        rows = wanted[self.operation_iteration]
        return dataclasses.replace(
            self,
            iteration=self.iteration[wanted],
            operation_iteration=(np.cumsum(wanted) - 1)[self.operation_iteration[rows]],
            present=self.present[rows],
            own_ns=self.own_ns[rows],
            overlap_ns=self.overlap_ns[rows],
            overlap_before_ns=self.overlap_before_ns[rows],
            fixed_ns=self.fixed_ns[rows],
            after=_renumbered(self.after, rows),
            comm_ns=self.comm_ns[rows],
            exposed_ns=self.exposed_ns[rows],
            wait_ns=self.wait_ns[rows],
            source=self.source[rows],
            span_ns=self.span_ns[wanted],
        )

    def by_iteration(self, values: npt.NDArray[np.floating]) -> Float64Array:
        """Sums of a column or columns of operations over each iteration."""
        found = np.zeros((len(self.iteration), *values.shape[1:]), dtype=np.float64)
        if len(values):
            first = np.flatnonzero(np.append(True, np.diff(self.operation_iteration) > 0))
            found[self.operation_iteration[first]] = np.add.reduceat(values, first, axis=0, dtype=np.float64)
        return found


def attempts(loaded: Sequence[LoadedWriter]) -> list[list[LoadedWriter]]:
    """Writers by attempt, each by rank: a rank that a launcher started again has one writer for each of its lives."""
    lives: dict[int, list[LoadedWriter]] = defaultdict(list)
    for each in loaded:
        if each.writer.info.rank >= 0 and len(each.iterations):
            lives[each.writer.info.rank].append(each)
    found: dict[int, list[LoadedWriter]] = defaultdict(list)
    for _, of_rank in sorted(lives.items()):
        counts = [restart_count(each) for each in of_rank]
        told = len(set(counts)) == len(counts) and None not in counts
        for ordinal, each in enumerate(of_rank):
            count = counts[ordinal]
            found[count if told and count is not None else ordinal].append(each)
    return [found[attempt] for attempt in sorted(found)]


def restart_count(each: LoadedWriter) -> int | None:
    """How often torchelastic had started the workers again."""
    from lens_auto import semconv

    count = each.writer.info.resource.get(semconv.TORCHELASTIC_RESTART_COUNT)
    try:
        return int(count)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def match(writers: list[LoadedWriter]) -> Matched:
    """Match the writers of one attempt, one for each rank."""
    if len(writers) < 2:
        return _alone(writers)
    matcher = _Matcher(writers)
    return matcher.result() or _alone(writers, matcher.notes)


# --- ranks that do not meet -------------------------------------------------------------------------------------------


def _alone(writers: list[LoadedWriter], notes: Sequence[str] = ()) -> Matched:
    """Each rank for itself: an iteration is a row that nobody waits in."""
    common = _common_iterations(writers)
    # The first iteration starts loaders and warms caches up; it also has nothing before it.
    common = common[common > common.min(initial=0)] if len(common) > 1 else common
    count, ranks = len(common), len(writers)
    own = np.zeros((count, ranks, PHASES), dtype=np.float32)
    fixed = np.zeros((count, ranks), dtype=np.float32)
    span = np.zeros((count, ranks))
    for column, each in enumerate(writers):
        rows = np.searchsorted(each.iterations.number, common)
        own[:, column] = each.work.own_iteration_ns[rows]
        span[:, column] = each.iterations.duration_ns[rows]
        fixed[:, column] = span[:, column] - each.work.own_iteration_ns[rows].sum(axis=1)
    return Matched(
        writers=writers,
        iteration=common,
        operation_iteration=np.arange(count, dtype=np.int64),
        present=np.ones((count, ranks), dtype=np.bool_),
        own_ns=own,
        overlap_ns=np.zeros((count, ranks), dtype=np.float32),
        overlap_before_ns=np.zeros((count, ranks), dtype=np.float32),
        fixed_ns=fixed,
        after=np.full(count, -1, dtype=np.int64),
        comm_ns=np.zeros(count),
        exposed_ns=fixed.min(axis=1).astype(np.float64) if ranks else np.zeros(count),
        wait_ns=np.zeros((count, ranks), dtype=np.float32),
        source=np.full(count, Source.ITERATION, dtype=np.uint8),
        span_ns=np.median(span, axis=1) if ranks else np.zeros(count),
        meets=False,
        notes=list(notes),
    )


def _common_iterations(writers: list[LoadedWriter]) -> Int64Array:
    if not writers:
        return np.empty(0, dtype=np.int64)
    return np.arange(min(len(each.iterations) for each in writers), dtype=np.int64)


# --- ranks that do ----------------------------------------------------------------------------------------------------


class _Matcher:
    """Finds the operations that ranks share, then lays out what each did around them."""

    def __init__(self, writers: list[LoadedWriter]) -> None:
        self.writers = writers
        self.points = [each.work.points for each in writers]
        self.own_arrival_ns = [each.work.own_arrival_ns for each in writers]
        self.hosts = [each.writer.info.host for each in writers]
        self.notes: list[str] = []
        # On one host the monotonic clock is one, and its first writer's pair of clocks leads all to wall time.
        first = {each.writer.info.host: each.writer.info.clock for each in reversed(writers)}
        self._to_wall_ns = [first[host].wall_ns - first[host].monotonic_ns for host in self.hosts]
        codes: dict[str, int] = {}  # of the groups' names, for all ranks
        self._group_codes = [
            np.array([*(codes.setdefault(group, len(codes)) for group in each.work.groups), 0], dtype=np.int64)
            for each in writers
        ]

    def result(self) -> Matched | None:
        """The ranks side by side; None where no operation is seen in which they met."""
        self._agree_on_backward()
        wrappers = frozenset[str]().union(*(each.work.wrappers for each in self.writers))
        chosen = [np.flatnonzero(each["source"] == Source.COLLECTIVE) for each in self.points]
        # What FSDP issues passes through Python: it is hidden only where collectives are not recorded.
        exchanged = self._exchanged()
        reduces, gathers = REDUCER in wrappers, bool(wrappers & GATHERING_WRAPPERS)
        if gathers or not reduces:
            recorded = max(self._covers(chosen), self._covers_exchanged(exchanged)) >= _COVERED
            gathers = gathers and not recorded
        if reduces or gathers:
            chosen = _joined(chosen, self._hidden(always=True))
        elif not recorded:
            chosen = _joined(chosen, self._hidden(always=False))
        found = self._lay_out(chosen, exchanged, gathers)
        if found is None:
            self.notes.append(
                "no operation is seen in which the ranks met: they are not compared"
                " (NEMO_LENS_SPAN_GROUPS=all records collectives)"
            )
        return found

    # --- which operations are the same --------------------------------------------------------------------------------

    def _pair(self, chosen: list[Rows]) -> Int64Array:
        """Operations of at least two ranks: which of its points each rank (columns) has there; -1: none."""
        keys = []
        for groups, points, rows in zip(self._group_codes, self.points, chosen, strict=True):
            found = points[rows]
            seen = found["group"] >= 0
            # The ones that no hook sees are named by their place in the iteration.
            group = np.where(
                seen, groups[np.where(seen, found["group"], 0)] - GAP_GROUP + 1, found["group"] - GAP_GROUP
            )
            seq = np.where(seen, found["seq"], found["iteration"] * 1024 + found["seq"])
            init = np.where(seen, found["init"], 0).astype(np.int64) & 0xFF
            keys.append((group << (_SEQ_BITS + 8)) | (init << _SEQ_BITS) | (seq & ((1 << _SEQ_BITS) - 1)))
        _, inverse, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
        operations = np.where(counts >= 2, np.cumsum(counts >= 2) - 1, -1)[inverse]
        at = np.full((int(np.count_nonzero(counts >= 2)), len(chosen)), -1, dtype=np.int64)
        begin = 0
        for column, rows in enumerate(chosen):
            operation = operations[begin : begin + len(rows)]
            begin += len(rows)
            paired = np.flatnonzero(operation >= 0)[::-1]  # of repeated ones the first stays
            at[operation[paired], column] = rows[paired]
        shared: Int64Array = at[np.count_nonzero(at >= 0, axis=1) >= 2]
        return shared

    def _covers(self, chosen: list[Rows]) -> float:
        """Share of the common iterations that have a shared operation."""
        at = self._pair(chosen)
        return self._covered(self._table(at, "iteration").max(axis=1) if len(at) else np.empty(0))

    def _covered(self, iterations: npt.NDArray[Any]) -> float:
        common = len(_common_iterations(self.writers))
        return len(np.unique(iterations)) / common if common else 0.0

    def _exchanged(self) -> Exchanged:
        """Both ends of what ranks sent to each other."""
        chosen = [np.flatnonzero(each["source"] == Source.TRANSFER) for each in self.points]
        ranks = [each.writer.info.rank for each in self.writers]
        return pair_transfers(ranks, self._group_codes, self.points, chosen)

    def _covers_exchanged(self, exchanged: Exchanged) -> float:
        return self._covered(self._table(exchanged.rows(len(self.writers)), "iteration").max(axis=1, initial=0))

    def _table(self, at: Int64Array, name: str) -> Int64Array:
        """A field of every operation (rows) on every rank (columns), times on the wall clock; 0 where absent."""
        found = np.zeros(at.shape, dtype=np.int64)
        for column, points in enumerate(self.points):
            there = at[:, column] >= 0
            found[there, column] = points[name][at[there, column]]
            if name.endswith("_ns"):
                found[there, column] += self._to_wall_ns[column]
        return found

    def _agree_on_backward(self) -> None:
        """Where the reducer's own clock is known of some ranks only, the start of backward is what all have."""
        at = self._pair([np.flatnonzero(each["group"] == BACKWARD_GROUP) for each in self.points])
        present = at >= 0
        told = self._table(at, "source") == Source.REDUCER
        mixed = (told & present).any(axis=1) & ~(told | ~present).all(axis=1)
        for column in range(len(self.points)):
            rows = at[mixed & told[:, column] & present[:, column], column]
            if not len(rows):
                continue
            points, own = self.points[column].copy(), self.own_arrival_ns[column].copy()
            own[rows, Phase.BACKWARD] -= points["arrival_ns"][rows] - points["begin_ns"][rows]
            points["arrival_ns"][rows] = points["begin_ns"][rows]
            points["source"][rows] = Source.BACKWARD
            self.points[column], self.own_arrival_ns[column] = points, own

    # --- meetings that no hook sees -----------------------------------------------------------------------------------

    def _hidden(self, *, always: bool) -> list[Rows]:
        """Where collectives that no hook sees let the ranks go.

        Args:
            always: a wrapper says that the last backward of an iteration ends with one; else only the ranks' being
                together tells.
        """
        inside = [np.flatnonzero(each["group"] == BACKWARD_GROUP) for each in self.points]
        last = [_last_of_each(points["iteration"], rows) for points, rows in zip(self.points, inside, strict=True)]
        together_ns = self._apart(last)
        if not always:
            limit_ns = _TOGETHER * float(np.median(np.concatenate([e.iterations.duration_ns for e in self.writers])))
            gaps = [np.flatnonzero(each["group"] == GAP_GROUP) for each in self.points]
            if self._apart(gaps) < min(together_ns / 2, limit_ns):
                return gaps
            if together_ns >= limit_ns:
                return [rows[:0] for rows in inside]
        # With gradient accumulation only some backwards reduce: those that the ranks leave together, like the last.
        most = max(int(each["seq"][each["group"] == BACKWARD_GROUP].max(initial=0)) for each in self.points)
        chosen = last
        for ordinal in range(most):
            of = [rows[points["seq"][rows] == ordinal] for points, rows in zip(self.points, inside, strict=True)]
            if self._apart(of) <= 3 * together_ns + _JITTER_NS:
                chosen = _joined(chosen, of)
        return chosen

    def _apart(self, chosen: list[Rows]) -> float:
        """How far apart ranks typically leave such points, ns; infinite where they share hardly any."""
        at = self._pair(chosen)
        at = at[(at >= 0).all(axis=1)]
        if len(at) < 3:
            return float("inf")
        times = self._table(at, "release_ns")
        away = (times - times[:, :1]).astype(np.float64)
        if len(set(self.hosts)) > 1:  # clocks of different hosts are apart by something constant
            away -= np.median(away, axis=0, keepdims=True)
        away -= np.median(away, axis=1, keepdims=True)
        return float(np.median(np.abs(away).max(axis=1)))

    # --- side by side -------------------------------------------------------------------------------------------------

    def _lay_out(self, chosen: list[Rows], exchanged: Exchanged, gathers: bool) -> Matched | None:
        met = self._pair(chosen)
        at = np.concatenate([met, exchanged.rows(len(self.writers))])
        present = at >= 0
        arrival, release = self._table(at, "arrival_ns"), self._table(at, "release_ns")
        hosts = self._compare_hosts(met, exchanged, arrival, release)
        for column, host in enumerate(self.hosts):
            arrival[:, column] = hosts[host].shift(arrival[:, column])
            release[:, column] = hosts[host].shift(release[:, column])
        # When the last came that it needs: a transfer needs its other end, too.
        came = np.where(present, arrival, _LOWEST).max(axis=1, initial=_LOWEST)
        left = np.where(present, release, _LOWEST).max(axis=1, initial=_LOWEST)
        others = np.where(exchanged.other < 0, -1, exchanged.other + len(met))
        after = np.append(np.full(len(met), -1, dtype=np.int64), others)
        # A send that was done before its receiver came did not wait for it.
        after[(after >= 0) & (left < came[after])] = -1
        ready = np.where(after >= 0, np.maximum(came, came[after]), came)
        of_operation = np.where(present, self._table(at, "iteration"), _HIGHEST).min(axis=1, initial=_HIGHEST)
        if len(exchanged.other):
            # Ranks that only send to each other need not be in the same iteration.
            order = np.lexsort((np.append(np.zeros(len(met)), exchanged.held), ready, of_operation))
        else:
            order = np.argsort(ready, kind="stable")
        kept = order[_in_turn(arrival[order], release[order], present[order])]
        after = _renumbered(after, kept)
        at, arrival, release, present, ready = at[kept], arrival[kept], release[kept], present[kept], ready[kept]
        if not len(at):
            return None

        of_operation = np.maximum.accumulate(of_operation[kept])
        iteration, last, before = _whole_iterations(of_operation)
        span_ns = _spans(release, present, last, before)
        step = max(1, -(-len(at) * len(self.writers) * PHASES // _MAX_CELLS))
        if step > 1:
            self.notes.append(f"the ranks are compared in one of {step} iterations: the run is that large")
        skipped = len(iteration) - len(iteration[::step])
        iteration, span_ns = iteration[::step], span_ns[::step]
        if not len(iteration):
            return None
        wanted = np.isin(of_operation, iteration)
        shape = (int(np.count_nonzero(wanted)), len(self.writers))
        own = np.zeros((*shape, PHASES), dtype=np.float32)
        overlap, before_ns, fixed = (np.zeros(shape, dtype=np.float32) for _ in range(3))
        for column in range(len(self.writers)):
            times = arrival[:, column], release[:, column]
            self._fill(column, at[:, column], *times, wanted, own, overlap, before_ns, fixed)
        source = np.where(present, self._table(at, "source"), 0).max(axis=1).astype(np.uint8)[wanted]
        transfer = source == Source.TRANSFER
        # Operations of different iterations are replayed apart.
        after[(after >= 0) & (of_operation != of_operation[after])] = -1
        after = _renumbered(after, wanted)
        waited = np.where(present, ready[:, None] - arrival, 0).max(axis=1)[wanted]
        present, held = present[wanted], np.where(present, release - arrival, _HIGHEST)[wanted]
        comm = held.min(axis=1).astype(np.float64)
        comm[after >= 0] -= np.minimum(waited, comm)[after >= 0]
        exposed = np.where(present, held - overlap, np.inf).min(axis=1)
        exposed[transfer] = comm[transfer]
        wait = np.where(present, held - overlap - exposed[:, None], 0.0).astype(np.float32)
        # Of a backward whose reducer is not seen the shortest is taken as everybody's own: it waited the least.
        hidden = source == Source.BACKWARD
        own[hidden, :, Phase.BACKWARD] += np.where(present[hidden], comm[hidden, None], 0)
        comm[hidden] = exposed[hidden] = 0
        if gathers:
            _share_forward(own, wait, present)
            self.notes.append(
                "the collectives inside forward are not recorded: the shortest forward of an iteration is taken as"
                " everybody's own (NEMO_LENS_SPAN_GROUPS=all records them)"
            )
        return Matched(
            writers=self.writers,
            iteration=iteration,
            operation_iteration=np.searchsorted(iteration, of_operation[wanted]),
            present=present,
            own_ns=own,
            overlap_ns=overlap,
            overlap_before_ns=before_ns,
            fixed_ns=fixed,
            after=after,
            comm_ns=comm,
            exposed_ns=np.maximum(exposed, 0),
            wait_ns=wait,
            source=source,
            span_ns=span_ns,
            meets=True,
            skipped=skipped,
            hosts=hosts,
            notes=self.notes,
        )

    def _compare_hosts(
        self, met: Int64Array, exchanged: Exchanged, arrival: Int64Array, release: Int64Array
    ) -> dict[str, HostClock]:
        """The clocks of the hosts, by operations that nobody leaves early and receives, that no send comes after."""
        mutual = self._table(met, "mutual").astype(np.bool_).any(axis=1)
        there = met[mutual] >= 0
        came = np.where(there, arrival[: len(met)][mutual], clocks.NOT_SEEN_TO_COME)
        left = np.where(there, release[: len(met)][mutual], clocks.NOT_SEEN_TO_LEAVE)
        received = np.flatnonzero(exchanged.held & exchanged.receives)
        sent = exchanged.other[received]
        row = np.arange(len(received))
        came = np.concatenate([came, np.full((len(row), met.shape[1]), clocks.NOT_SEEN_TO_COME)])
        left = np.concatenate([left, np.full((len(row), met.shape[1]), clocks.NOT_SEEN_TO_LEAVE)])
        of_messages, begin = slice(len(came) - len(row), None), len(met)
        came[of_messages][row, exchanged.column[sent]] = arrival[begin + sent, exchanged.column[sent]]
        left[of_messages][row, exchanged.column[received]] = release[begin + received, exchanged.column[received]]
        return clocks.compare(self.hosts, came, left)

    def _fill(
        self,
        column: int,
        at: Int64Array,
        arrival_ns: Int64Array,
        release_ns: Int64Array,
        wanted: Mask,
        own: npt.NDArray[np.float32],
        overlap: npt.NDArray[np.float32],
        before: npt.NDArray[np.float32],
        fixed: npt.NDArray[np.float32],
    ) -> None:
        """One rank's own work between the operations that it took part in."""
        there = np.flatnonzero(at >= 0)
        rows = at[there]
        came, left = self.own_arrival_ns[column][rows], self.writers[column].work.own_release_ns[rows]
        seen = np.isin(self.points[column]["source"][rows], (Source.COLLECTIVE, Source.TRANSFER))
        # Work inside of an operation overlaps it, and belongs to what comes next. Inside of a backward that ends with a
        # collective it cannot be told from waiting.
        done = np.zeros_like(came)
        done[1:] = came[1:] - np.where(seen[:-1, None], came[:-1], left[:-1])
        overlapped = np.where(seen, (left - came).sum(axis=1), 0)
        length = arrival_ns[there] - np.append(arrival_ns[there[:1]], release_ns[there[:-1]])
        length[1:] += overlapped[:-1]
        into = wanted[there]
        place = (np.cumsum(wanted) - 1)[there[into]]
        own[place, column] = done[into]
        overlap[place, column] = overlapped[into]
        before[place, column] = np.append(np.zeros_like(overlapped[:1]), overlapped[:-1])[into]
        fixed[place, column] = np.maximum(length - done.sum(axis=1), 0)[into]


def _renumbered(after: Int64Array, kept: Int64Array | Mask) -> Int64Array:
    """Of some operations, in a new order, which others they come after; -1 where that one is not kept or is later."""
    rows = np.flatnonzero(kept) if kept.dtype == np.bool_ else kept
    place = np.full(len(after) + 1, -1, dtype=np.int64)  # the last one is of -1
    place[rows] = np.arange(len(rows))
    found: Int64Array = place[after[rows]]
    found[found >= np.arange(len(rows))] = -1
    return found


def _joined(one: list[Rows], other: list[Rows]) -> list[Rows]:
    return [np.union1d(first, second) for first, second in zip(one, other, strict=True)]


def _last_of_each(iteration: Int64Array, rows: Rows) -> Rows:
    """Of some points the last of each iteration."""
    of = iteration[rows]
    last: Rows = rows[np.append(of[1:] != of[:-1], True)[: len(rows)]]
    return last


def _in_turn(arrival_ns: Int64Array, release_ns: Int64Array, present: Mask) -> Int64Array:
    """Operations to which every rank came after it had left the one before; the others lie inside of those."""
    latest = np.where(present, release_ns, _LOWEST)
    before = np.vstack([np.full_like(latest[:1], _LOWEST), np.maximum.accumulate(latest, axis=0)[:-1]])
    late = present & (arrival_ns < before)
    if not late.any():
        return np.arange(len(present), dtype=np.int64)
    # What may be late is so only where what came before it was kept. One list of all that is present: rows are many.
    doubtful: list[bool] = np.any(late, axis=1).tolist()
    ends = np.cumsum(np.count_nonzero(present, axis=1)).tolist()
    columns = np.nonzero(present)[1].tolist()
    came, left = arrival_ns[present].tolist(), release_ns[present].tolist()
    kept = []
    free = [_LOWEST] * present.shape[1]
    begin = 0
    for row, end in enumerate(ends):
        cells = range(begin, end)
        begin = end
        if not doubtful[row] or all(came[each] >= free[columns[each]] for each in cells):
            kept.append(row)
            for each in cells:
                free[columns[each]] = left[each]
    return np.array(kept, dtype=np.int64)


def _whole_iterations(of_operation: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Iterations that follow one with an operation; the row of the last operation in each, and of that before it."""
    last = np.flatnonzero(np.append(np.diff(of_operation) > 0, True))
    numbers = of_operation[last]
    follows = np.flatnonzero(np.diff(numbers) == 1) + 1
    return numbers[follows], last[follows], last[follows - 1]


def _spans(release_ns: Int64Array, present: Mask, last: Int64Array, before: Int64Array) -> Float64Array:
    """From the last operation of the iteration before to the last of each iteration, as the ranks in both saw it."""
    both = present[last] & present[before]
    lengths = np.where(both, release_ns[last] - release_ns[before], np.nan)
    neither = ~both.any(axis=1)
    if neither.any():
        ends = np.where(present, release_ns, _LOWEST).max(axis=1)
        lengths[neither, 0] = (ends[last] - ends[before])[neither]
    found: Float64Array = np.nanmedian(lengths, axis=1)
    return found


def _share_forward(own: npt.NDArray[np.float32], wait: npt.NDArray[np.float32], present: Mask) -> None:
    """Gathering weights inside forward makes all wait for all there: the shortest forward is everybody's own."""
    forward = own[:, :, Phase.FORWARD]
    least = np.where(present, forward, np.inf).min(axis=1, keepdims=True)
    excess = np.where(present, forward - least, 0).astype(np.float32)
    own[:, :, Phase.FORWARD] -= excess
    wait += excess
