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

from lens_auto.export.spans import Others, Part, Span, SpanMaker, look_at
from lens_auto.iteration.rule import Int64Array, Iterations, Resume, find_iterations
from lens_auto.recorder.layout import SEGMENT_RECORDS, Flag, Kind
from lens_auto.recorder.read import Records, WriterFiles

PATIENCE_NS = 60_000_000_000  # how long an operation without a wait may hold itself back
_LAG = 2  # iterations that stay behind: the open one, and one that is closed
_PAST = 16
_LOADERS = 64
_SEGMENTS = 2
_MUCH = 2 * SEGMENT_RECORDS
_END = 1 << 62


class Position(NamedTuple):
    """Where a stream stands: everything before is done.

    Attributes:
        top: number of the first record that was not looked at.
        open: numbers below it that are not done.
        resume: where iterations go on; None before the first.
    """

    top: int = 0
    open: tuple[int, ...] = ()
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
            "resume": None
            if resume is None
            else {
                "number": resume.number,
                "start_ns": resume.start_ns,
                "past_ns": list(resume.past_ns),
                "training_loaders": sorted(resume.training_loaders),
            },
        }

    @staticmethod
    def from_json(found: dict[str, Any]) -> Position:
        """The reverse of `to_json`."""
        resume = found["resume"]
        return Position(
            int(found["top"]),
            tuple(map(int, found["open"])),
            None
            if resume is None
            else Resume(
                int(resume["number"]),
                int(resume["start_ns"]),
                tuple(map(int, resume["past_ns"])),
                frozenset(map(int, resume["training_loaders"])),
            ),
        )


class Cut(NamedTuple):
    """What determines a part, beside the position before it.

    Attributes:
        below: records of this number and above are not looked at.
        until_ns: what starts before is in.
        held: numbers of operations that wait for their end.
        last: the writer writes no more.
    """

    below: int
    until_ns: int
    held: tuple[int, ...]
    last: bool


class StreamPart:
    """One part: its spans, and the position after it."""

    def __init__(self, writer: WriterFiles, others: Others, cut: Cut, maker: SpanMaker, after: Position) -> None:
        self.cut = cut
        self.count = maker.count
        self.after = after
        self._maker = maker

    def spans(self) -> Iterator[Span]:
        """The spans, in an order that depends on records and cut alone."""
        return self._maker.spans()


def next_part(
    writer: WriterFiles, position: Position, others: Others, ended: bool, cut: Cut | None = None
) -> StreamPart | None:
    """The part after a position.

    Args:
        writer: its files, freshly looked at.
        position: where the stream stands.
        others: what is known of the other ranks.
        ended: the writer writes no more.
        cut: of a part that was begun; None: where it is best.

    Returns:
        None: nothing more can be told yet (or, where the writer ended, at all).
    """
    segments = _SEGMENTS
    while True:
        records, exhausted = _read(writer, position, cut, segments)
        sign_ns = writer.last_sign_ns
        iterations = find_iterations(records.data, records.numbers, sign_ns, position.resume)
        chosen = cut or _choose(records, iterations, position, ended and exhausted, not exhausted)
        if chosen is not None or exhausted:
            break
        segments *= 2  # one iteration of more records than that
    if chosen is None:
        return None
    part = Part(chosen.until_ns, frozenset(chosen.held), chosen.last)
    maker = SpanMaker(others, look_at(writer, records, iterations), part)
    return StreamPart(writer, others, chosen, maker, _after(records, iterations, position, chosen))


def _read(writer: WriterFiles, position: Position, cut: Cut | None, segments: int) -> tuple[Records, bool]:
    """Records that are not done, and whether these are all there are."""
    first = position.low // SEGMENT_RECORDS
    if cut is not None:
        segments = cut.below // SEGMENT_RECORDS + 1 - first
    found = writer.records(first, segments)
    numbers = found.numbers
    wanted: npt.NDArray[np.bool_] = numbers >= position.top
    if position.open:
        wanted |= np.isin(numbers, np.array(position.open, dtype=np.int64))
    if cut is not None:
        wanted &= numbers < cut.below
    exhausted = cut is not None or writer.last_segment < first + segments
    return Records(found.data[wanted], numbers[wanted], found.holes, found.damaged, found.missing_segments), exhausted


def _choose(records: Records, iterations: Iterations, position: Position, last: bool, more: bool) -> Cut | None:
    """Where the next part ends; None: nothing is closed for good yet."""
    below = int(records.numbers[-1]) + 1 if len(records) else position.top
    if last:
        return Cut(below, _END, (), True)
    if len(iterations) > _LAG:
        until_ns = int(iterations.start_ns[-_LAG])
    elif not len(iterations) and len(records) >= _MUCH and not more:
        until_ns = int(np.quantile(records.data["start_ns"], 0.5))  # a rank that never steps
    else:
        return None
    return Cut(below, until_ns, _held(records, until_ns), False)


def _held(records: Records, until_ns: int) -> tuple[int, ...]:
    """Asynchronous operations before the cut that nobody has waited for yet."""
    data = records.data
    begun = ((data["flags"] & Flag.ASYNC) != 0) & (data["start_ns"] < until_ns)
    begun &= data["end_ns"].astype(np.int64) > time.monotonic_ns() - PATIENCE_NS
    begun &= ~np.isin(records.numbers, data["ref"][data["kind"] == Kind.WAIT].astype(np.int64) - 1)
    return tuple(records.numbers[begun].tolist())


def _after(records: Records, iterations: Iterations, position: Position, cut: Cut) -> Position:
    data, numbers = records.data, records.numbers
    if cut.last:
        return Position(cut.below)
    done = data["start_ns"] < cut.until_ns
    if cut.held:
        done &= ~np.isin(numbers, np.array(cut.held, dtype=np.int64))
    wait = data["kind"] == Kind.WAIT
    target = data["ref"][wait].astype(np.int64) - 1
    done[wait] = ~np.isin(target, numbers[~done & ~wait])
    still_open = set(numbers[~done].tolist()) | _holes(numbers, position, cut)
    return Position(cut.below, tuple(sorted(still_open)), _resume(data, iterations, position, cut))


def _holes(numbers: Int64Array, position: Position, cut: Cut) -> set[int]:
    """Places in the newest segments that a thread has taken and may still commit."""
    first = max(position.low, (cut.below // SEGMENT_RECORDS - 1) * SEGMENT_RECORDS)
    if not len(numbers) or cut.below - first > _MUCH:
        return set()
    there = set(numbers[numbers >= first].tolist())
    expected = range(max(first, position.top), cut.below)
    return {number for number in expected if number not in there}


def _resume(data: npt.NDArray[np.void], iterations: Iterations, position: Position, cut: Cut) -> Resume | None:
    before = position.resume
    closed = iterations.start_ns < cut.until_ns
    if not closed.any():
        return before
    past = (*(before.past_ns if before is not None else ()), *iterations.end_ns[closed].tolist())
    fetched = data["a"][(data["kind"] == Kind.FETCH) & (data["start_ns"] < cut.until_ns)]
    training = set(fetched.tolist()) - set(iterations.evaluations["loader"].tolist())
    training |= before.training_loaders if before is not None else set()
    return Resume(
        int(iterations.number[closed][-1]) + 1,
        cut.until_ns,
        past[-_PAST:],
        frozenset(sorted(training)[-_LOADERS:]),
    )
