"""What an iteration is, told from the records of one writer after the fact.

The rule is written down in `docs/architecture.md` ("Iterations and phases"); the numbers in the comments here are its
points. Everything works on whole columns: a run has millions of records.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lens_auto.recorder.layout import Flag, Kind, Phase

Int64Array = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

TILE_DTYPE = np.dtype(
    [("start_ns", "<i8"), ("end_ns", "<i8"), ("phase", "<u1"), ("iteration", "<i8"), ("record", "<i8")]
)
EVALUATION_DTYPE = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("loader", "<u8"),
        ("batches", "<i8"),
        ("iteration", "<i8"),
        ("record", "<i8"),
        ("exhausted", "?"),
    ]
)

# Only these are events of the training thread; communication happens inside of them or between them.
_EVENT_KINDS = (
    Kind.OPTIMIZER_STEP,
    Kind.BACKWARD,
    Kind.FETCH,
    Kind.LOADER_START,
    Kind.MODEL_INIT,
    Kind.CHECKPOINT_SAVE,
    Kind.CHECKPOINT_LOAD,
    Kind.PROCESS_GROUP,
)
_SET_UP_KINDS = (Kind.MODEL_INIT, Kind.PROCESS_GROUP, Kind.CHECKPOINT_LOAD)
_TRAINING_KINDS = (Kind.LOADER_START, Kind.FETCH, Kind.BACKWARD, Kind.OPTIMIZER_STEP)

# What covers a piece of time, first wins (4).
(
    _EVALUATE,
    _CHECKPOINT,
    _CLOSURE_FORWARD,
    _CLOSURE_BACKWARD,
    _STEP,
    _BACKWARD,
    _FETCH,
    _LOADER_START,
    _SET_UP,
    _GAP,
    _FORWARD,
) = range(11)
_PHASES = np.array(
    [
        Phase.EVALUATE,
        Phase.CHECKPOINT,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.BACKWARD,
        Phase.DATA_LOADING,
        Phase.DATA_LOADING,
        Phase.START_UP,
        Phase.OTHER,
        Phase.FORWARD,
    ],
    dtype=np.uint8,
)


@dataclass(frozen=True)
class Iterations:
    """Iterations and phases of one writer. Times are monotonic nanoseconds.

    Attributes:
        thread: the training thread; -1 where nothing was recorded that tells.
        number: number of each iteration, from 0.
        start_ns: start of each.
        end_ns: end of each, the start of the next.
        phase_ns: time of each iteration (rows) in each `Phase` (columns); rows sum to the iteration.
        tiles: `TILE_DTYPE`: the pieces that iterations consist of, in order, and what hooks saw outside of them
            (iteration -1). `record` is the number of the record that a piece comes from; -1: none (forward, other).
            For evaluation it is that of the pass's first fetch.
        evaluations: `EVALUATION_DTYPE`: evaluation passes, also outside of iterations (iteration -1).
        record_iteration: for each record given, the iteration that it started in; -1 none.
        extra_boundaries: live boundaries that the rule does not have, monotonic ns.
        missed_boundaries: iterations whose end the live prediction lacks.
    """

    thread: int
    number: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    phase_ns: Int64Array
    tiles: npt.NDArray[np.void]
    evaluations: npt.NDArray[np.void]
    record_iteration: Int64Array
    extra_boundaries: Int64Array
    missed_boundaries: Int64Array

    def __len__(self) -> int:
        return len(self.number)

    @property
    def mispredicted(self) -> int:
        """How many boundaries the live prediction had wrong, or not at all (5)."""
        return len(self.extra_boundaries) + len(self.missed_boundaries)

    @property
    def duration_ns(self) -> Int64Array:
        """Length of each iteration."""
        return self.end_ns - self.start_ns

    @property
    def training_ns(self) -> Int64Array:
        """Length of each iteration without evaluation and checkpoints: what iteration-time statistics are about."""
        aside = self.phase_ns[:, Phase.EVALUATE] + self.phase_ns[:, Phase.CHECKPOINT]
        training: Int64Array = self.duration_ns - aside
        return training


@dataclass(frozen=True)
class Resume:
    """Where a reader that follows a running writer goes on: after the last iteration that it is done with.

    Attributes:
        number: of the first iteration that is not done.
        start_ns: its start, the end of the last one.
        past_ns: ends of a few iterations before it, ascending; the last is `start_ns`.
        training_loaders: passes (`a` of `FETCH`) that are known to be training.
        newest_optimizer: the highest ordinal of an optimizer that has stepped; -1 none.
    """

    number: int
    start_ns: int
    past_ns: tuple[int, ...] = ()
    training_loaders: frozenset[int] = frozenset()
    newest_optimizer: int = -1

    @classmethod
    def behind_a_gap(cls, data: npt.NDArray[np.void], before: Resume | None = None) -> Resume | None:
        """Where iterations go on in records that others should precede: the first step that is left says in which
        iteration the writer was. That iteration is cut off at its start.

        Args:
            data: the records behind the gap.
            before: where a reader had stood before it.
        """
        if not len(data):
            return before
        steps = data[(data["kind"] == Kind.OPTIMIZER_STEP) & (data["b"] == 1)]
        number = int((steps if len(steps) else data)["iteration"][0])
        start_ns = int(data["start_ns"].min())
        known = before or cls(0, 0)
        return cls(number, start_ns, (start_ns,), known.training_loaders, known.newest_optimizer)


def find_iterations(
    data: npt.NDArray[np.void],
    numbers: Int64Array | None = None,
    end_ns: int | None = None,
    resume: Resume | None = None,
) -> Iterations:
    """Apply the rule to the records of one writer.

    Args:
        data: its records (`recorder.read.RECORD_DTYPE`), in any order.
        numbers: their record numbers; by default their indices.
        end_ns: until when the writer is known to have run: an evaluation pass left at the very end lasts until then.
        resume: the records are those after an iteration that is done with. Where it is not given and the first record
            is not there, they are what is left behind a gap.

    Returns:
        Iterations, phases, evaluation passes, and the iteration of every record.
    """
    if numbers is None:
        numbers = np.arange(len(data), dtype=np.int64)
    if resume is None and len(numbers) and int(numbers.min()) > 0:  # the oldest segments went to make room
        resume = Resume.behind_a_gap(data[np.argsort(numbers)])
    starts = data["start_ns"].astype(np.int64)
    inside_backward = _steps_inside_backward(data, starts)
    stepping = _stepping_thread(data, inside_backward)
    thread = _training_thread(data, stepping)
    foreign = inside_backward | ((data["kind"] == Kind.OPTIMIZER_STEP) & (data["thread"] == stepping))
    events = _Events(data, numbers, starts, thread, foreign, inside_backward)
    until_ns = max(int(events.end_ns.max(initial=0)), end_ns or 0)

    counted = events.of(Kind.OPTIMIZER_STEP) & (data["b"][events.row] == 1)
    known = -1 if resume is None else resume.newest_optimizer
    first_step, boundary = _boundaries(data, events, counted, known)
    start_ns, stop_ns = _edges(data, events, counted, boundary)
    if resume is not None and len(start_ns):
        start_ns[0] = resume.start_ns
    evaluations = _evaluations(data, events, until_ns, resume)
    evaluations["iteration"] = _iteration_at(evaluations["start_ns"], start_ns, stop_ns)
    tiles = _tiles(events, evaluations, start_ns, stop_ns)

    phase_ns = np.zeros((len(stop_ns), len(Phase)), dtype=np.int64)
    within = tiles["iteration"] >= 0
    np.add.at(
        phase_ns,
        (tiles["iteration"][within], tiles["phase"][within].astype(np.intp)),
        (tiles["end_ns"] - tiles["start_ns"])[within],
    )
    extra, missed = _mispredicted(data, starts, events, counted, first_step)
    record_iteration = _iteration_at(starts, start_ns, stop_ns)
    if resume is not None:
        _renumber(resume, starts, tiles, evaluations, record_iteration)
    first_number = 0 if resume is None else resume.number
    return Iterations(
        thread=thread,
        number=np.arange(first_number, first_number + len(stop_ns), dtype=np.int64),
        start_ns=start_ns,
        end_ns=stop_ns,
        phase_ns=phase_ns,
        tiles=tiles,
        evaluations=evaluations,
        record_iteration=record_iteration,
        extra_boundaries=extra,
        missed_boundaries=missed,
    )


def _steps_inside_backward(data: npt.NDArray[np.void], starts: Int64Array) -> Mask:
    """Optimizer steps issued from inside a backward. On CUDA they run in autograd's threads, which do not know it."""
    kind = data["kind"]
    ends = data["end_ns"].astype(np.int64)
    inside: Mask = (kind == Kind.OPTIMIZER_STEP) & ((data["flags"] & Flag.IN_BACKWARD) != 0)
    steps = np.flatnonzero((kind == Kind.OPTIMIZER_STEP) & ~inside)
    backward = kind == Kind.BACKWARD
    cover = _Cover(starts[backward], ends[backward], starts[backward])
    covered, index = cover.at(starts[steps])
    covered[covered] = ends[steps][covered] <= cover.end_ns[index[covered]]
    inside[steps[covered]] = True
    return inside


def _renumber(
    resume: Resume,
    starts: Int64Array,
    tiles: npt.NDArray[np.void],
    evaluations: npt.NDArray[np.void],
    record_iteration: Int64Array,
) -> None:
    """Count iterations from where the reader goes on; what began before (it ended late) is in one of the past ones."""
    for column in (tiles["iteration"], evaluations["iteration"], record_iteration):
        column[column >= 0] += resume.number
    late = starts < resume.start_ns
    past = np.array(resume.past_ns, dtype=np.int64)
    behind = len(past) - np.searchsorted(past, starts[late], side="right")
    record_iteration[late] = np.maximum(resume.number - behind, -1)


def _stepping_thread(data: npt.NDArray[np.void], inside_backward: Mask) -> int:
    """The thread that stepped optimizers; -1: none did. Steps inside backward do not tell."""
    stepped = (data["kind"] == Kind.OPTIMIZER_STEP) & ~inside_backward
    for candidates in (stepped & (data["b"] == 1), stepped):
        threads = data["thread"][candidates]
        if len(threads):
            return int(np.bincount(threads).argmax())
    return -1


def _training_thread(data: npt.NDArray[np.void], stepping: int) -> int:
    """The thread that stepped optimizers; where none did, or it did nothing else, the one that ran backward, or
    fetched.
    """
    kind = data["kind"]
    backward = data["thread"][kind == Kind.BACKWARD]
    does_more = np.isin(kind[data["thread"] == stepping], (Kind.BACKWARD, Kind.FETCH)).any()
    if stepping >= 0 and (does_more or not len(backward)):
        return stepping
    for threads in (backward, *(data["thread"][kind == each] for each in (Kind.FETCH, Kind.LOADER_START))):
        if len(threads):
            return int(np.bincount(threads).argmax())
    return int(data["thread"].min()) if len(data) else -1


class _Events:
    """The training thread's events in order of their start, outer before inner; unknown ends are filled in.

    `foreign` ones belong to them whichever thread they ran in.
    """

    def __init__(
        self,
        data: npt.NDArray[np.void],
        numbers: Int64Array,
        starts: Int64Array,
        thread: int,
        foreign: Mask,
        inside_backward: Mask,
    ) -> None:
        kind, flags = data["kind"], data["flags"]
        wanted = np.isin(kind, np.array(_EVENT_KINDS, dtype=kind.dtype)) & (data["thread"] == thread)
        wanted |= foreign
        rows = np.flatnonzero(wanted)
        ends = data["end_ns"][rows].astype(np.int64)
        order = np.lexsort((-ends, starts[rows]))
        self.row = rows[order]
        self.kind = kind[self.row]
        self.flags = flags[self.row]
        self.inside_backward = inside_backward[self.row]
        self.number = numbers[self.row]
        self.start_ns: Int64Array = starts[self.row]
        end_ns = ends[order]
        # Without an end of its own (a step that raised, a rank that died) an event lasts until the next.
        following = np.append(self.start_ns[1:], self.start_ns[-1:])
        self.end_ns: Int64Array = np.where(end_ns >= self.start_ns, end_ns, following)

    def of(self, *kinds: Kind) -> Mask:
        """Which events are of these kinds."""
        mask = np.zeros(len(self.kind), dtype=np.bool_)
        for each in kinds:
            mask |= self.kind == each
        return mask


class _Cover:
    """Intervals that do not overlap, each with an owner; of overlapping ones the outer or earlier keeps the time."""

    def __init__(self, start_ns: Int64Array, end_ns: Int64Array, owner: Int64Array) -> None:
        order = np.lexsort((-end_ns, start_ns))
        start_ns, end_ns, owner = start_ns[order], end_ns[order], owner[order]
        if len(end_ns):
            taken_until = np.append(start_ns[:1], np.maximum.accumulate(end_ns)[:-1])
            start_ns = np.maximum(start_ns, taken_until)
        kept = end_ns > start_ns
        self.start_ns, self.end_ns, self.owner = start_ns[kept], end_ns[kept], owner[kept]

    def at(self, time_ns: Int64Array) -> tuple[Mask, Int64Array]:
        """Which times are covered, and the index of the interval that starts at or before each (-1: none does)."""
        index = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        covered = index >= 0
        covered[covered] = self.end_ns[index[covered]] > time_ns[covered]
        return covered, index


def _cover(events: _Events, mask: Mask) -> _Cover:
    return _Cover(events.start_ns[mask], events.end_ns[mask], events.number[mask])


def _step_ends(events: _Events) -> Int64Array:
    """When each event is over; for a step inside backward that is the end of the backward."""
    backward = _cover(events, events.of(Kind.BACKWARD))
    covered, index = backward.at(events.start_ns)
    covered &= events.inside_backward
    ends = events.end_ns.copy()
    ends[covered] = np.maximum(backward.end_ns[index[covered]], ends[covered])
    return ends


def _boundaries(
    data: npt.NDArray[np.void], events: _Events, counted: Mask, known: int
) -> tuple[Int64Array, Int64Array]:
    """(1) The first step of each iteration (an index among counted steps), and the end of each iteration."""
    optimizer = data["a"][events.row[counted]].astype(np.int64)
    steps = len(optimizer)
    if not steps:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing
    # When the optimizer of each step steps again; an iteration that starts with step i closes before the earliest
    # repetition of any step from i on.
    again = np.full(steps, steps, dtype=np.int64)
    by_optimizer = np.argsort(optimizer, kind="stable")
    repeated = optimizer[by_optimizer[1:]] == optimizer[by_optimizer[:-1]]
    again[by_optimizer[:-1][repeated]] = by_optimizer[1:][repeated]
    closes = np.minimum.accumulate(again[::-1])[::-1].tolist()
    # Optimizers are numbered in the order of their first steps.
    highest = np.maximum.accumulate(np.append(np.int64(known), optimizer))
    never_before = np.flatnonzero(highest[1:] > highest[:-1]).tolist()
    firsts = []
    step = 0
    while step < steps:
        firsts.append(step)
        following = closes[step]
        new = bisect_left(never_before, step)
        new_end = bisect_left(never_before, following, new)
        # New optimizers have taken over from those before them, which do not step before a new one repeats.
        if new < new_end and never_before[new] > step and following < steps:
            taken_over = never_before[new]
            if new_end - new == following - taken_over and again[taken_over:following].min() == following:
                firsts.append(taken_over)
        step = following
    first_step = np.array(firsts, dtype=np.int64)
    boundary = np.maximum.reduceat(_step_ends(events)[counted], first_step)
    return first_step, np.maximum.accumulate(boundary)


def _edges(
    data: npt.NDArray[np.void], events: _Events, counted: Mask, boundary: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """(2) Start and end of each iteration."""
    if not len(boundary):
        return boundary, boundary
    first_step_ns = events.start_ns[counted][0]
    calls = data["start_ns"][data["kind"] == Kind.PIPELINE_CALL].astype(np.int64)  # stages without a loader start here
    set_up = events.of(*_SET_UP_KINDS) & (events.start_ns < first_step_ns)
    ready_ns = events.end_ns[set_up].max(initial=0)
    training = events.start_ns[events.of(*_TRAINING_KINDS)]
    training = np.concatenate([training, calls])
    begin_ns = min(int(training[training >= ready_ns].min(initial=first_step_ns)), int(first_step_ns))
    return np.append(np.int64(begin_ns), boundary[:-1]), boundary


def _iteration_at(time_ns: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> Int64Array:
    """The iteration that contains each time; -1 none."""
    index: Int64Array = np.searchsorted(end_ns, time_ns, side="right").astype(np.int64)
    outside = index == len(end_ns)
    if len(start_ns):
        outside |= time_ns < start_ns[0]
    index[outside] = -1
    return index


def _evaluations(
    data: npt.NDArray[np.void], events: _Events, until_ns: int, resume: Resume | None
) -> npt.NDArray[np.void]:
    """(3) Loader passes with no backward between their first and last fetch."""
    at = np.flatnonzero(events.of(Kind.FETCH))
    loader = data["a"][events.row[at]]
    _, first, which = np.unique(loader, return_index=True, return_inverse=True)
    passes = len(first)
    last = np.zeros(passes, dtype=np.int64)
    last[which] = np.arange(len(at))  # later ones overwrite earlier ones
    ended = (events.flags[at] & Flag.EXHAUSTED) != 0
    batches = np.bincount(which[~ended], minlength=passes)
    exhausted = np.zeros(passes, dtype=np.bool_)
    exhausted[which[ended]] = True

    start_ns, end_ns = events.start_ns[at], events.end_ns[at]
    backward_ns = events.start_ns[events.of(Kind.BACKWARD)]
    before_last = np.searchsorted(backward_ns, start_ns[last])
    after_first = np.searchsorted(backward_ns, start_ns[first])
    evaluation = (before_last == after_first) & (batches > 0)
    evaluation[(batches == 1) & ~exhausted] = False
    if resume is not None and resume.training_loaders:
        evaluation &= ~np.isin(loader[first], np.array(sorted(resume.training_loaders), dtype=np.uint64))
    for each in np.flatnonzero(evaluation & (batches == 1)).tolist():
        # One batch, fetched to the end: training where a backward follows before any other pass fetches.
        other = int(first[each]) + 1
        while other < len(at) and loader[other] == loader[first[each]]:
            other += 1
        next_backward = int(after_first[each])
        if next_backward < len(backward_ns):
            evaluation[each] = other < len(at) and bool(start_ns[other] < backward_ns[next_backward])

    found = np.zeros(int(np.count_nonzero(evaluation)), dtype=EVALUATION_DTYPE)
    first, last = first[evaluation], last[evaluation]
    found["loader"] = loader[first]
    found["batches"] = batches[evaluation]
    found["exhausted"] = exhausted[evaluation]
    found["record"] = events.number[at[first]]
    # Starting the loader belongs to the pass where nothing came between.
    opening = at[first]
    before = np.maximum(opening - 1, 0)
    started = (opening > 0) & (events.kind[before] == Kind.LOADER_START)
    started &= data["a"][events.row[before]] == found["loader"]
    found["start_ns"] = np.where(started, events.start_ns[before], start_ns[first])
    following = np.searchsorted(events.start_ns, end_ns[last])
    next_ns = np.append(events.start_ns, np.int64(until_ns))[following]
    found["end_ns"] = np.where(found["exhausted"], end_ns[last], np.maximum(next_ns, end_ns[last]))
    return found[np.argsort(found["start_ns"], kind="stable")]


def _tiles(
    events: _Events, evaluations: npt.NDArray[np.void], start_ns: Int64Array, end_ns: Int64Array
) -> npt.NDArray[np.void]:
    """(4) Cut time at every start and end, and give each piece to the first in the list that covers it."""
    step, backward = _closures(events)
    backward_ns, nobody = events.start_ns[backward], np.full(len(step), -1, dtype=np.int64)
    covers = {
        _EVALUATE: _Cover(evaluations["start_ns"], evaluations["end_ns"], evaluations["record"]),
        _CHECKPOINT: _cover(events, events.of(Kind.CHECKPOINT_SAVE, Kind.CHECKPOINT_LOAD)),
        # The first nanosecond is the step's: its record lies in a piece of its own.
        _CLOSURE_FORWARD: _Cover(events.start_ns[step] + 1, backward_ns, nobody),
        _CLOSURE_BACKWARD: _Cover(backward_ns, events.end_ns[backward], events.number[backward]),
        _STEP: _cover(events, events.of(Kind.OPTIMIZER_STEP) & ~events.inside_backward),
        _BACKWARD: _cover(events, events.of(Kind.BACKWARD)),
        _FETCH: _cover(events, events.of(Kind.FETCH)),
        _LOADER_START: _cover(events, events.of(Kind.LOADER_START)),
        _SET_UP: _cover(events, events.of(Kind.MODEL_INIT, Kind.PROCESS_GROUP)),
    }
    cuts = [start_ns[:1], end_ns]
    for cover in covers.values():
        cuts += (cover.start_ns, cover.end_ns)
    edge = np.unique(np.concatenate(cuts))
    piece = edge[:-1]
    what = np.full(len(piece), _GAP, dtype=np.int64)
    owner = np.full(len(piece), -1, dtype=np.int64)
    iteration = _iteration_at(piece, start_ns, end_ns)
    for code in sorted(covers, reverse=True):
        covered, index = covers[code].at(piece)
        if code == _SET_UP:  # inside an iteration it is no phase of its own
            covered &= iteration < 0
        what[covered] = code
        owner[covered] = covers[code].owner[index[covered]]

    fresh = np.ones(len(piece), dtype=np.bool_)
    fresh[1:] = (what[1:] != what[:-1]) | (owner[1:] != owner[:-1]) | (iteration[1:] != iteration[:-1])
    head = np.flatnonzero(fresh)
    tiles = np.zeros(len(head), dtype=TILE_DTYPE)
    tiles["start_ns"] = piece[head]
    tiles["end_ns"] = np.append(piece[head[1:]], edge[-1:])
    tiles["iteration"] = iteration[head]
    tiles["record"] = owner[head]
    what = what[head]
    what[_forward(what, tiles["iteration"])] = _FORWARD
    tiles["phase"] = _PHASES[what]
    kept: npt.NDArray[np.void] = tiles[(tiles["iteration"] >= 0) | (what != _GAP)]
    return kept


def _closures(events: _Events) -> tuple[Int64Array, Int64Array]:
    """Steps whose closure is a training step, and the backward in each: the one event in it, and no search of LBFGS."""
    kind, start_ns, end_ns = events.kind, events.start_ns, events.end_ns
    step = np.flatnonzero(events.of(Kind.OPTIMIZER_STEP)[:-1] & ~events.inside_backward[:-1])
    backward = step + 1
    of_it = (kind[backward] == Kind.BACKWARD) & (start_ns[backward] > start_ns[step] + 1)
    # (One without an end, cut off where the step ended, is not in it.)
    of_it &= (start_ns[backward] < end_ns[step]) & (end_ns[backward] <= end_ns[step])
    step, backward = step[of_it], backward[of_it]
    # What begins after the backward and still within the step: another backward, of another call of the closure.
    later = np.searchsorted(start_ns, end_ns[backward])
    alone = start_ns[np.minimum(later, len(start_ns) - 1)] >= end_ns[step]
    alone |= later == len(start_ns)
    return step[alone], backward[alone]


def _forward(what: Int64Array, iteration: Int64Array) -> Mask:
    """Which gaps lead to a backward from a fetch, backward, step or boundary: the forward that no hook sees."""
    mask: Mask = (what == _GAP) & (iteration >= 0)
    mask[-1:] = False
    mask[:-1] &= (what[1:] == _BACKWARD) & (iteration[1:] == iteration[:-1])
    mask[1:] &= (iteration[1:] != iteration[:-1]) | np.isin(what[:-1], (_FETCH, _BACKWARD, _STEP))
    return mask


def _mispredicted(
    data: npt.NDArray[np.void], starts: Int64Array, events: _Events, counted: Mask, first_step: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """(5) Live boundaries that the rule lacks (their times), and iterations whose end the live prediction lacks.

    Two boundaries are the same where the same steps lie before them.
    """
    live_ns = np.sort(starts[data["kind"] == Kind.BOUNDARY])
    step_ns = events.start_ns[counted]
    true_after = np.append(first_step[1:], len(step_ns)) if len(first_step) else first_step
    live_after, index = np.unique(np.searchsorted(step_ns, live_ns), return_index=True)
    wrong = np.ones(len(live_ns), dtype=np.bool_)
    wrong[index] = ~np.isin(live_after, true_after)
    return live_ns[wrong], np.flatnonzero(~np.isin(true_after, live_after)).astype(np.int64)
