"""Spans of a writer that still writes: part after part, each span once, the same that a reader of the whole makes.

A part ends where an iteration ends that the rule has closed for good; one more iteration stays behind it, so that what
belongs to the part (waits, evaluation passes) has been written. Where a stream stands is a small JSON object. Together
with the records it determines the next part: a process that goes on after another was killed makes the very same spans
in the very same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lens_auto.export.pipeline_spans import apply_receive_sources
from lens_auto.export.spans import Looked, Others, Part, Span, SpanMaker, look_at
from lens_auto.groups import TrainingSpanGroup as Group
from lens_auto.iteration.rule import Iterations, Mask, Resume, find_iterations
from lens_auto.recorder.layout import SEGMENT_RECORDS, Flag, Kind
from lens_auto.recorder.read import Records, WriterFiles

PATIENCE_NS = 60_000_000_000  # how long an operation without a wait may hold itself back
_LAG = 2  # iterations that stay behind: the open one, and one that is closed
# How long after its time a record may be written: what torch's flight recorder knows is asked for every few seconds.
_LATE_NS = 1_000_000_000
_LATE_FLIGHT_NS = 8_000_000_000
_PAST = 256
_LOADERS = 64
_AT_ONCE = SEGMENT_RECORDS // 2  # records looked at for one part; more where an iteration has more
_MUCH = 2 * SEGMENT_RECORDS
_END = 1 << 62


class Place(NamedTuple):
    """Where a record belongs that was held back from the part in whose time it lies.

    Attributes:
        number: the record's.
        iteration: -1 for none.
        in_job: it is in the job's trace.
        parent_id: the span of the piece of the iteration that it lies in.
    """

    number: int
    iteration: int
    in_job: bool
    parent_id: bytes | None


class Position(NamedTuple):
    """Where a stream stands: everything before is done.

    Attributes:
        top: number of the first record that was not looked at.
        open: numbers below it that are not done.
        places: of those among them whose time is over.
        resume: where iterations go on; None before the first.
    """

    top: int = 0
    open: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()
    resume: Resume | None = None

    @property
    def low(self) -> int:
        """All records below this number are done."""
        return min(self.open, default=self.top)

    def to_json(self) -> dict[str, Any]:
        """As an object that JSON can hold."""
        resume = self.resume
        return {
            "top": self.top,
            "open": list(self.open),
            "places": [
                [*place[:3], None if place.parent_id is None else place.parent_id.hex()] for place in self.places
            ],
            "resume": None
            if resume is None
            else {
                "number": resume.number,
                "start_ns": resume.start_ns,
                "past_ns": list(resume.past_ns),
                "training_loaders": sorted(resume.training_loaders),
                "newest_optimizer": resume.newest_optimizer,
            },
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> Position:
        """The reverse of `to_json`."""
        resume = found["resume"]
        return Position(
            int(found["top"]),
            tuple(map(int, found["open"])),
            tuple(
                Place(int(number), int(iteration), bool(in_job), None if parent is None else bytes.fromhex(parent))
                for number, iteration, in_job, parent in found["places"]
            ),
            None
            if resume is None
            else Resume(
                int(resume["number"]),
                int(resume["start_ns"]),
                tuple(map(int, resume["past_ns"])),
                frozenset(map(int, resume["training_loaders"])),
                int(resume.get("newest_optimizer", -1)),
            ),
        )


class Cut(NamedTuple):
    """What determines a part, beside the position before it.

    Attributes:
        below: records of this number and above are not looked at.
        until_ns: what starts before is in.
        held: numbers of operations that wait for their end.
        missing: numbers below that a thread had taken and not yet committed. Committed since, they are in a later part.
        last: the writer writes no more.
        only: numbers of the records that alone are in: hangs, which are told while they last.
    """

    below: int
    until_ns: int
    held: tuple[int, ...]
    missing: tuple[int, ...]
    last: bool
    only: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As an object that JSON can hold."""
        return self._asdict()

    @staticmethod
    def from_json(found: dict[str, Any]) -> Cut:
        """The reverse of `to_json`."""
        return Cut(
            int(found["below"]),
            int(found["until_ns"]),
            tuple(map(int, found["held"])),
            tuple(map(int, found["missing"])),
            bool(found["last"]),
            tuple(map(int, found.get("only", ()))),
        )


class StreamPart:
    """One part: its spans, and the position after it.

    Attributes:
        cut: what determines it.
        count: how many spans it has.
        after: the position after it.
        lost: records between the position and the part whose segment is gone: the oldest go where a run outgrows its
            bound.
    """

    def __init__(self, cut: Cut, maker: SpanMaker, after: Position, lost: int) -> None:
        self.cut = cut
        self.count = maker.count
        self.after = after
        self.lost = lost
        self._maker = maker

    def spans(self) -> Iterator[Span]:
        """The spans, in an order that depends on records and cut alone."""
        return self._maker.spans()


class Stretch(NamedTuple):
    """Records up to a cut, before anything is made of them.

    Attributes:
        cut: where it ends.
        records: those at hand; some of them start behind the cut, or are held back.
        iterations: the rule applied to them.
        resume: where iterations went on at its begin.
        lost: records between the position and the first of it whose segment is gone.
    """

    cut: Cut
    records: Records
    iterations: Iterations
    resume: Resume | None
    lost: int

    @property
    def done(self) -> Mask:
        """Of which records nothing is left after it. What completes an operation is done with that."""
        return _done(self.records, self.cut)[0]

    @property
    def after(self) -> Position:
        """The position after it, for who does not ask to which piece of its iteration a record belongs."""
        if self.cut.last:
            return Position(self.cut.below)
        still_open = {*self.records.numbers[~self.done].tolist(), *self.cut.missing}
        return Position(
            self.cut.below,
            tuple(sorted(still_open)),
            (),
            _resume(self.records.data, self.iterations, self.resume, self.cut),
        )


def next_stretch(
    writer: WriterFiles, position: Position, ended: bool, cut: Cut | None = None, hangs: bool = False
) -> Stretch | None:
    """Read what follows a position.

    Args:
        writer: its files, freshly looked at.
        position: where the stream stands.
        ended: the writer writes no more.
        cut: of a part that was begun; None: where it is best.
        hangs: where nothing else can be told yet, tell those that the writer has noticed.

    Returns:
        None: nothing more can be told yet (or, where the writer ended, at all).
    """
    at_once = _AT_ONCE
    while True:
        records, exhausted, gap, lost = _read(writer, position, cut, at_once)
        resume = position.resume
        if gap:
            resume = Resume.behind_a_gap(records.data[records.numbers >= position.top], resume)
        iterations = find_iterations(records.data, records.numbers, writer.last_sign_ns, resume)
        settled_ns = _END if ended else time.monotonic_ns() - _late_ns(writer)
        chosen = cut or _choose(records, iterations, position, gap, settled_ns, ended and exhausted)
        if chosen is not None or exhausted:
            break
        at_once *= 2  # one iteration of more records than that
    if chosen is None and hangs:
        chosen = _hangs(records, position, gap)
    return None if chosen is None else Stretch(chosen, records, iterations, resume, lost)


def next_part(
    writer: WriterFiles, position: Position, others: Others, ended: bool, cut: Cut | None = None
) -> StreamPart | None:
    """The part after a position, with its spans.

    Args:
        writer: its files, freshly looked at.
        position: where the stream stands.
        others: what is known of the other ranks.
        ended: the writer writes no more.
        cut: of a part that was begun; None: where it is best.

    Returns:
        None: nothing more can be told yet (or, where the writer ended, at all).
    """
    found = next_stretch(writer, position, ended, cut, hangs=True)
    if found is None:
        return None
    part = Part(found.cut.until_ns, frozenset(found.cut.held), found.cut.last, frozenset(found.cut.only))
    looked = look_at(writer, found.records, found.iterations)
    _put_back(looked, position.places)
    after = _after(looked, found.resume, found.cut, position.places)
    return StreamPart(found.cut, SpanMaker(others, looked, part), after, found.lost)


def _put_back(looked: Looked, places: tuple[Place, ...]) -> None:
    """What was held back belongs where it did."""
    numbers = looked.records.numbers
    rows = np.searchsorted(numbers, np.array([place.number for place in places], dtype=np.int64)).tolist()
    for place, row in zip(places, rows, strict=True):
        if row < len(numbers) and numbers[row] == place.number:
            looked.iterations.record_iteration[row] = place.iteration
            looked.place.put(row, place.in_job, place.parent_id)


class _Read(NamedTuple):
    """What was read for a part.

    Attributes:
        records: those that are not done.
        exhausted: these are all there are.
        gap: how far behind the position the first of them lies, because segments are gone.
        lost: records that are gone with them, those that were held back too.
    """

    records: Records
    exhausted: bool
    gap: int
    lost: int


def _read(writer: WriterFiles, position: Position, cut: Cut | None, at_once: int) -> _Read:
    first = position.top // SEGMENT_RECORDS
    last = max(cut.below - 1, position.top) if cut is not None else position.top + at_once
    segments = last // SEGMENT_RECORDS + 1 - first
    # What is open may lie far behind: the segments between are not read again.
    behind = sorted({number // SEGMENT_RECORDS for number in position.open} - set(range(first, first + segments)))
    read = {number: found for number in behind if _segment_of(found := writer.records(number, 1)) == number}
    newest = writer.records(first, segments)
    # A segment that was made meanwhile is found in the next round.
    exhausted = cut is not None or writer.last_segment < first + segments
    data = np.concatenate([*(found.data for found in read.values()), newest.data]) if read else newest.data
    numbers = np.concatenate([*(found.numbers for found in read.values()), newest.numbers])
    wanted: npt.NDArray[np.bool_] = numbers >= position.top
    if position.open:
        wanted |= np.isin(numbers, np.array(position.open, dtype=np.int64))
    if cut is not None:
        wanted &= numbers < cut.below
        if cut.missing:
            wanted &= ~np.isin(numbers, np.array(cut.missing, dtype=np.int64))
    elif len(numbers) and len(numbers) - int(np.searchsorted(numbers, position.top)) > at_once:
        wanted &= numbers < numbers[int(np.searchsorted(numbers, position.top)) + at_once]
        exhausted = False
    there = set(np.unique(numbers // SEGMENT_RECORDS).tolist())
    data, numbers = data[wanted], numbers[wanted]
    fresh = numbers[numbers >= position.top]
    oldest = int(fresh[0]) // SEGMENT_RECORDS if len(fresh) else first
    gap = max(0, oldest * SEGMENT_RECORDS - position.top)
    lost = gap + sum(number // SEGMENT_RECORDS not in there for number in position.open) if gap else 0
    return _Read(Records(data, numbers, 0, 0, 0), exhausted, gap, lost)


def _segment_of(records: Records) -> int:
    return int(records.numbers[0]) // SEGMENT_RECORDS if len(records) else -1


def _late_ns(writer: WriterFiles) -> int:
    return _LATE_FLIGHT_NS if Group.COMMUNICATION in writer.info.groups else _LATE_NS


def _choose(
    records: Records, iterations: Iterations, position: Position, gap: int, settled_ns: int, last: bool
) -> Cut | None:
    """Where the next part ends; None: nothing is closed for good yet."""
    below = int(records.numbers[-1]) + 1 if len(records) else position.top
    below = max(below, position.top)
    if last:
        return Cut(below, _END, (), (), True)
    settled = int(np.searchsorted(iterations.start_ns[1 : 1 - _LAG], settled_ns, side="right"))
    measured_ns = _measured_until_ns(records.data)
    if settled and measured_ns is not None:
        patience_ns = time.monotonic_ns() - PATIENCE_NS  # the device may never come there
        settled = int(
            np.searchsorted(iterations.start_ns[1 : settled + 1], max(measured_ns, patience_ns), side="right")
        )
    if settled:
        until_ns = int(iterations.start_ns[settled])
    elif not len(iterations) and len(records) >= _MUCH:
        until_ns = min(settled_ns, int(np.quantile(records.data["start_ns"], 0.5)))  # a rank that never steps
    else:
        return None
    missing = _missing(records, position, gap, below)
    return Cut(below, until_ns, _held(records, until_ns, missing), missing, False)


def _hangs(records: Records, position: Position, gap: int) -> Cut | None:
    """A part of nothing but hangs; None: there is none. All else stays open."""
    found = records.numbers[records.data["kind"] == Kind.HANG].tolist()
    if not found:
        return None
    below = max(int(records.numbers[-1]) + 1, position.top)
    return Cut(below, -1, (), _missing(records, position, gap, below), False, tuple(found))


def _measured_until_ns(data: npt.NDArray[np.void]) -> int | None:
    """Until when a device was followed: the end of the last iteration of which everything is known; None: it is not."""
    if not np.any(data["kind"] == Kind.DEVICE_MARK):
        return None
    return int(data["start_ns"][data["kind"] == Kind.DEVICE_MEMORY].max(initial=0)) + 1


def _held(records: Records, until_ns: int, missing: tuple[int, ...]) -> tuple[int, ...]:
    """What was before the cut and is not known whole: asynchronous operations that nobody has waited for, those that a
    device has not come to, receives whose source may yet be told, and waits for what is missing.
    """
    data = records.data
    wait = data["kind"] == Kind.WAIT
    target = data["ref"].astype(np.int64) - 1
    now_known = apply_receive_sources(data, records.numbers)
    doubtful = (data["kind"] == Kind.RECV) & ((now_known["flags"] & Flag.AMBIGUOUS) != 0)
    held = (((data["flags"] & Flag.ASYNC) != 0) & ~np.isin(records.numbers, target[wait])) | doubtful
    held |= ((data["flags"] & Flag.MEASURED) != 0) & ~np.isin(records.numbers, target[data["kind"] == Kind.DEVICE_TIME])
    held &= data["end_ns"].astype(np.int64) > time.monotonic_ns() - PATIENCE_NS
    if missing:
        held |= wait & np.isin(target, np.array(missing, dtype=np.int64))
    return tuple(records.numbers[held & (data["start_ns"] < until_ns)].tolist())


def _missing(records: Records, position: Position, gap: int, below: int) -> tuple[int, ...]:
    """Places among the newest that a thread has taken and may still commit."""
    newest = max(0, below - SEGMENT_RECORDS)
    expected = np.arange(max(position.top + gap, newest), below, dtype=np.int64)
    if position.open:
        expected = np.union1d(expected, np.array(position.open, dtype=np.int64))
        expected = expected[expected >= newest]
    found = np.setdiff1d(expected, records.numbers, assume_unique=True)
    return tuple(found.tolist())


def _done(records: Records, cut: Cut) -> tuple[Mask, Mask]:
    """Records of which nothing is left after a cut, and those that complete others."""
    data, numbers = records.data, records.numbers
    completes: Mask = np.isin(data["kind"], (Kind.WAIT, Kind.RECV_SOURCE, Kind.DEVICE_TIME))
    if cut.only:
        return np.isin(numbers, np.array(cut.only, dtype=np.int64)), completes
    done: Mask = data["start_ns"] < cut.until_ns
    if cut.held:
        done &= ~np.isin(numbers, np.array(cut.held, dtype=np.int64))
    # What completes an operation goes with it.
    still = np.append(numbers[~done & ~completes], np.array(cut.missing, dtype=np.int64))
    done[completes] = ~np.isin(data["ref"][completes].astype(np.int64) - 1, still)
    return done, completes


def _after(looked: Looked, resume: Resume | None, cut: Cut, before: tuple[Place, ...]) -> Position:
    data, numbers, iterations = looked.records.data, looked.records.numbers, looked.iterations
    if cut.last:
        return Position(cut.below)
    done, completes = _done(looked.records, cut)
    still_open = {*numbers[~done].tolist(), *cut.missing}
    if cut.only:
        return Position(cut.below, tuple(sorted(still_open)), before, resume)
    places = tuple(
        Place(
            int(numbers[row]),
            int(iterations.record_iteration[row]),
            bool(looked.place.in_job[row]),
            looked.place.parent(row),
        )
        for row in np.flatnonzero(~done & ~completes & (data["start_ns"] < cut.until_ns)).tolist()
    )
    return Position(cut.below, tuple(sorted(still_open)), places, _resume(data, iterations, resume, cut))


def _resume(data: npt.NDArray[np.void], iterations: Iterations, before: Resume | None, cut: Cut) -> Resume | None:
    closed = iterations.start_ns < cut.until_ns
    if not closed.any():
        return before
    past = (*(before.past_ns if before is not None else ()), *iterations.end_ns[closed].tolist())
    fetched = data["a"][(data["kind"] == Kind.FETCH) & (data["start_ns"] < cut.until_ns)]
    training = set(fetched.tolist()) - set(iterations.evaluations["loader"].tolist())
    training |= before.training_loaders if before is not None else set()
    stepped = (data["kind"] == Kind.OPTIMIZER_STEP) & (data["b"] == 1) & (data["start_ns"] < cut.until_ns)
    newest = before.newest_optimizer if before is not None else -1
    return Resume(
        int(iterations.number[closed][-1]) + 1,
        cut.until_ns,
        past[-_PAST:],
        frozenset(sorted(training)[-_LOADERS:]),
        max(newest, int(data["a"][stepped].max(initial=0)) if stepped.any() else -1),
    )
