"""Records to spans: names, ids, parents, links and attributes. Which form they leave in is the exporters' business.

The rules are those of `docs/architecture.md` and `docs/ids.md`: one trace per iteration that all ranks share, a root in
it for each rank, a parent only where the parent's span group is on, and the job's own trace for what belongs to no
iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lens_auto import semconv
from lens_auto.export import pipeline_spans
from lens_auto.groups import TrainingSpanGroup as Group
from lens_auto.iteration.device_times import DeviceClock, operation_times
from lens_auto.iteration.origin import span_of
from lens_auto.iteration.rule import Int64Array, Iterations, Mask, find_iterations
from lens_auto.recorder import ids
from lens_auto.recorder.hang import iso, read_hang
from lens_auto.recorder.layout import HANG_NAME, Flag, Kind, Phase
from lens_auto.recorder.read import RECORD_DTYPE, Records, RunDirectory, WriterFiles, find_referring

AttributeValue: TypeAlias = "str | bool | int | float | list[str] | list[bool] | list[int] | list[float]"

# Records kept in memory between looking at all writers and making their spans; beyond it they are read twice.
_KEEP_BYTES = 256 << 20

_JOB_KINDS = (Kind.CHECKPOINT_SAVE, Kind.CHECKPOINT_LOAD, Kind.MODEL_INIT)
_OPERATION_KINDS = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
_AWAITED_KINDS = (*_OPERATION_KINDS, *pipeline_spans.TRANSFER_KINDS)
_SEND_KINDS = (Kind.SEND, Kind.PIPELINE_SEND)
_AROUND_KINDS = (Kind.DDP, Kind.PIPELINE_FORWARD, Kind.PIPELINE_BACKWARD)
_DEVICE_PHASE_KINDS = (Kind.BACKWARD, Kind.OPTIMIZER_STEP, Kind.FETCH)
# Plain integers: an operation on enum flags costs twenty times as much, and there are several for each span.
_FAILED = int(Flag.FAILED)
_EXHAUSTED = int(Flag.EXHAUSTED)
_SKIPPED = int(Flag.SKIPPED)
_ASYNC = int(Flag.ASYNC)
_COALESCED = int(Flag.COALESCED)
_ENQUEUE = int(Flag.ENQUEUE)
_AMBIGUOUS = int(Flag.AMBIGUOUS)
_END_UNKNOWN = int(Flag.END_UNKNOWN)
_FLIGHT = int(Flag.FLIGHT)
_UNKNOWN_PREFIX = "lens.record."
_CHUNK = 16_384


@dataclass(slots=True)
class Link:
    """A reference to a span in this or another trace; `trace_state` as in the W3C's header."""

    trace_id: bytes
    span_id: bytes
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    trace_state: str = ""


@dataclass(slots=True)
class Span:
    """A finished span. Ids are bytes, times wall clock nanoseconds; `error` is the status message of a failure."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    links: list[Link] = field(default_factory=list)
    error: str | None = None


class _Record(NamedTuple):
    """One record as Python values, in the order of its fields."""

    start_ns: int
    end_ns: int
    seq: int
    bytes: int
    exposed_ns: int
    iteration: int
    flags: int
    dtype: int
    thread: int
    reserved0: int
    kind: int
    reserved1: int
    name: int
    group: int
    group_size: int
    peer: int
    tag: int
    detail: int
    init: int
    ref: int
    a: int
    b: int
    c: int
    reserved2: int
    commit: int


assert _Record._fields == RECORD_DTYPE.names


@dataclass
class WriterSpans:
    """The spans of one writer.

    Attributes:
        writer: whose they are.
        resource: attributes that all of them share.
        count: how many there are.
        spans: the spans, once.
        problem: what is to be said of records that are missing; empty where none is.
    """

    writer: WriterFiles
    resource: dict[str, AttributeValue]
    count: int
    spans: Iterator[Span]
    problem: str = ""


def run_spans(run: RunDirectory) -> Iterator[WriterSpans]:
    """The spans of every writer of a run.

    All writers are looked at before the first span is made: only then is it known which iterations rank 0 has, and in
    which trace the other end of each transfer lies.
    """
    survey = _Survey(run)
    for writer in run.writers:
        looked = survey.look(writer)
        maker = SpanMaker(survey, looked)
        lost = writer.lost(len(looked.records), looked.records.holes, looked.records.damaged)
        yield WriterSpans(writer, resource_of(writer), maker.count, maker.spans(), lost)


def resource_of(writer: WriterFiles) -> dict[str, AttributeValue]:
    info = writer.info
    known: dict[str, AttributeValue] = {
        semconv.DL_RANK: info.rank,
        semconv.DL_WORLD_SIZE: info.world_size,
        semconv.NEMO_RUN_ID: info.run_id,
        semconv.HOST_NAME: info.host,
        semconv.PROCESS_PID: info.pid,
    }
    return {**known, **info.resource}


# --- looking at all writers first -------------------------------------------------------------------------------------


@dataclass
class Looked:
    """A writer with its records and iterations."""

    writer: WriterFiles
    records: Records
    iterations: Iterations
    seed: bytes
    place: _Place


def look_at(writer: WriterFiles, records: Records, iterations: Iterations) -> Looked:
    """Say where each record of a writer belongs."""
    records = replace(records, data=pipeline_spans.apply_receive_sources(records.data, records.numbers))
    seed = writer.info.seed if writer.info.seed is not None else ids.own_seed(writer.info.nonce)
    return Looked(writer, records, iterations, seed, _Place(writer, records, iterations, seed))


class _Survey:
    """What the spans of one writer must know of the others."""

    def __init__(self, run: RunDirectory) -> None:
        self._kept: dict[str, Looked] = {}
        self._iterations_of_first: dict[bytes, int] = {}
        sends: list[tuple[npt.NDArray[np.uint64], Int64Array]] = []
        kept_bytes = 0
        for writer in run.writers:
            looked = self.look(writer)
            kept_bytes += looked.records.data.nbytes
            if kept_bytes <= _KEEP_BYTES:
                self._kept[writer.name] = looked
            if writer.info.rank == 0 and Group.STEP in writer.info.groups:
                self._iterations_of_first[looked.seed] = len(looked.iterations)
            sends.append(_sends(looked))
        self._send_ids = np.concatenate([found for found, _ in sends]) if sends else np.empty(0, dtype=np.uint64)
        self._send_traces = np.concatenate([found for _, found in sends]) if sends else np.empty(0, dtype=np.int64)
        order = np.argsort(self._send_ids, kind="stable")
        self._send_ids, self._send_traces = self._send_ids[order], self._send_traces[order]

    def look(self, writer: WriterFiles) -> Looked:
        """Read a writer's records and apply the rule, or take what is still in memory."""
        kept = self._kept.pop(writer.name, None)
        if kept is not None:
            return kept
        records = writer.records()
        return look_at(writer, records, find_iterations(records.data, records.numbers, writer.last_sign_ns))

    def has_first(self, seed: bytes, iteration: int) -> bool:
        """Whether rank 0 has a span for this iteration."""
        return iteration < self._iterations_of_first.get(seed, 0)

    def send_iteration(self, span_id: bytes, sender: int, iteration: int) -> int | None:
        """In which iteration's trace a send lies, -1 for the job's; None where the sender is not in this run."""
        number = np.uint64(int.from_bytes(span_id, "big"))
        index = int(np.searchsorted(self._send_ids, number))
        if index < len(self._send_ids) and self._send_ids[index] == number:
            return int(self._send_traces[index])
        return None


def _sends(looked: Looked) -> tuple[npt.NDArray[np.uint64], Int64Array]:
    """Ids of a writer's sends, and the iteration whose trace each lies in (-1: the job's)."""
    data = looked.records.data
    rows = np.flatnonzero(np.isin(data["kind"], _SEND_KINDS) & ((data["flags"] & Flag.SPAN) != 0))
    found = np.array(
        [int.from_bytes(looked.place.send_id(row) or b"", "big") for row in rows.tolist()], dtype=np.uint64
    )
    return found, np.where(looked.place.in_job[rows], -1, looked.iterations.record_iteration[rows])


# --- where a record belongs -------------------------------------------------------------------------------------------


class _Place:
    """For each record of a writer: which trace it is in, and which piece of its iteration it lies in.

    Attributes:
        tile: for each record the index of the piece that contains its start; -1 none.
        tile_id: for each piece the id of its span; None where it has none.
        tile_in_job: for each piece whether its span is in the job's trace.
        in_job: for each record whether it is in the job's trace.
    """

    def __init__(self, writer: WriterFiles, records: Records, iterations: Iterations, seed: bytes) -> None:
        self._writer = writer
        self._data = records.data
        self._seed = seed
        self._used: dict[bytes, int] = {}
        tiles = iterations.tiles
        starts = records.data["start_ns"].astype(np.int64)
        index = np.searchsorted(tiles["start_ns"], starts, side="right") - 1
        kind = records.data["kind"]
        if len(tiles):
            until = tiles["end_ns"][index]
            index[starts >= until] = -1  # (an index of -1 wraps around and stays -1 or becomes it)
            # What goes around a phase begins a moment before it, in the piece before.
            index[np.isin(kind, _AROUND_KINDS) & (records.data["end_ns"].astype(np.int64) > until)] = -1
        self.tile: Int64Array = index.astype(np.int64)
        self.span_ids = ids.record_span_ids(writer.info.nonce, records.numbers).astype(">u8").tobytes()
        self.tile_id = self._tile_ids(records, iterations)
        has_span: Mask = np.array([each is not None for each in self.tile_id], dtype=np.bool_)
        apart = np.isin(tiles["phase"], (Phase.EVALUATE, Phase.CHECKPOINT))
        self.tile_in_job: Mask = has_span & (apart | (tiles["iteration"] < 0))
        self.in_job: Mask = (iterations.record_iteration < 0) | np.isin(kind, _JOB_KINDS)
        placed = self.tile >= 0
        self.in_job[placed] |= self.tile_in_job[self.tile[placed]]
        # A hang is told before anybody can know what it lies in: it is in the job's trace, whenever it is looked at.
        self.tile[kind == Kind.HANG] = -1
        self.in_job[kind == Kind.HANG] = True

    def _tile_ids(self, records: Records, iterations: Iterations) -> list[bytes | None]:
        writer, tiles = self._writer, iterations.tiles
        groups, nonce = writer.info.groups, writer.info.nonce
        rows = np.searchsorted(records.numbers, np.maximum(tiles["record"], 0)).tolist()
        numbers, phases = tiles["record"].tolist(), tiles["phase"].tolist()
        spanned = ((records.data["flags"] & Flag.SPAN) != 0).tolist()
        found: list[bytes | None] = []
        for index, (phase, number, row) in enumerate(zip(phases, numbers, rows, strict=True)):
            span_id = None
            if phase == Phase.EVALUATE:
                if Group.EVALUATE in groups:
                    span_id = ids.evaluate_span_id(self._seed, nonce, number)
            elif phase == Phase.FORWARD:
                if spanned[rows[index + 1]]:  # the piece after it is the backward it leads to
                    span_id = ids.forward_span_id(self._seed, nonce, numbers[index + 1])
            elif number >= 0 and spanned[row]:
                span_id = self.record_id(row)
            found.append(span_id)
        return found

    def parent(self, row: int) -> bytes | None:
        """Span id of the piece that a record lies in; None where that has no span, or one in another trace."""
        tile = int(self.tile[row])
        return self.tile_id[tile] if tile >= 0 and self.tile_in_job[tile] == self.in_job[row] else None

    def put(self, row: int, in_job: bool, parent_id: bytes | None) -> None:
        """Say where a record belongs whose piece is not among the records at hand."""
        self.in_job[row] = in_job
        self.tile[row] = -1 if parent_id is None else len(self.tile_id)
        if parent_id is not None:
            self.tile_id.append(parent_id)
            self.tile_in_job = np.append(self.tile_in_job, np.bool_(in_job))

    def record_id(self, row: int) -> bytes:
        """Span id of a record, from its place."""
        return self.span_ids[8 * row : 8 * row + 8]

    def send_id(self, row: int) -> bytes | None:
        """The derived id of a send, that the receiver computes too; None where it cannot be told."""
        record = self._data[row]
        if int(record["kind"]) == Kind.PIPELINE_SEND:
            return self._pipeline_send_id(row)
        rank, peer, k = self._writer.info.rank, int(record["peer"]), int(record["seq"])
        if rank < 0 or peer < 0 or k < 0 or int(record["flags"]) & _AMBIGUOUS:
            return None
        group = self._writer.string(int(record["group"]))
        found = ids.send_span_id(self._seed, group, int(record["init"]), rank, peer, int(record["tag"]), k)
        return self._first(found, row)

    def _pipeline_send_id(self, row: int) -> bytes | None:
        record = _Record._make(self._data[row].tolist())
        text = self._writer.string
        rank = self._writer.info.rank
        found = pipeline_spans.send_span_id(record, self._seed, rank, text(record.group), text(record.name))
        return None if found is None else self._first(found, row)

    def _first(self, span_id: bytes, row: int) -> bytes | None:
        """Damaged or repeated numbers must not give two spans one id: the first keeps it."""
        return span_id if self._used.setdefault(span_id, row) == row else None


# --- the spans of one writer ------------------------------------------------------------------------------------------


class _Wait(NamedTuple):
    """A wait: its row, and what of it goes into the span of what it completes."""

    row: int
    start_ns: int
    end_ns: int
    flags: int
    thread: int
    exposed_ns: int
    detail: int


class _Waits:
    """Waits, by the row of the operation that they complete."""

    def __init__(self, records: Records) -> None:
        data = records.data
        operations = np.flatnonzero(np.isin(data["kind"], _AWAITED_KINDS))
        rows, at = find_referring(data, records.numbers, Kind.WAIT, operations)
        self.of: dict[int, list[_Wait]] = {}
        columns = (data[name][rows].tolist() for name in _Wait._fields[1:])
        for target, *wait in zip(operations[at].tolist(), rows.tolist(), *columns, strict=True):
            self.of.setdefault(target, []).append(_Wait._make(wait))


class _Devices:
    """What a device took, by the row of an operation; and the device clock, for phases."""

    def __init__(self, records: Records) -> None:
        data = records.data
        self.clock = DeviceClock(data)
        rows = np.flatnonzero(np.isin(data["kind"], (*_OPERATION_KINDS, Kind.FSDP)))
        times = operation_times(data, records.numbers, rows)
        known = np.flatnonzero((times.duration_ns >= 0) | (times.exposed_ns >= 0))
        columns = zip(rows[known].tolist(), *(column[known].tolist() for column in times), strict=True)
        self.of = {row: tuple(found) for row, *found in columns}
        memory = data[data["kind"] == Kind.DEVICE_MEMORY]
        memory = memory[(memory["a"] > 0) | (memory["b"] > 0) | (memory["c"] > 0)]
        # It was taken a moment before the end of its iteration.
        at_ns = memory["start_ns"].astype(np.int64) + 1
        self.memory = dict(zip(at_ns.tolist(), memory[["a", "b", "c"]].tolist(), strict=True))


@dataclass(frozen=True)
class Part:
    """The part of a writer's records that is to become spans now; the rest is only looked at.

    Attributes:
        until_ns: monotonic time; what starts before it is in.
        held: numbers of records that stay out although they start before.
        last: nothing follows: the job's span is in.
        only: numbers of the records that alone are in, whatever their time.
    """

    until_ns: int
    held: frozenset[int] = frozenset()
    last: bool = False
    only: frozenset[int] = frozenset()


_WHOLE = Part(1 << 62, last=True)


class Others(Protocol):
    """What the spans of one writer must know of the other ranks."""

    def has_first(self, seed: bytes, iteration: int) -> bool:
        """Whether rank 0 has a span for this iteration."""

    def send_iteration(self, span_id: bytes, sender: int, iteration: int) -> int | None:
        """In which iteration's trace the span of a send lies, -1 for the job's; None where it is not exported.

        Args:
            span_id: derived id of the send.
            sender: global rank.
            iteration: in whose trace the receive lies.
        """


class SpanMaker:
    """Makes the spans of one writer."""

    def __init__(self, survey: Others, looked: Looked, part: Part = _WHOLE) -> None:
        self._survey = survey
        self._part = part
        self._writer = looked.writer
        self._info = looked.writer.info
        self._data = looked.records.data
        self._numbers = looked.records.numbers
        self._iterations = looked.iterations
        self._place = looked.place
        self._seed = looked.seed
        groups = self._info.groups
        self._steps = Group.STEP in groups
        self._job_id = ids.job_span_id(looked.seed, self._info.rank, self._info.nonce) if Group.JOB in groups else None
        self._job_trace = ids.job_trace_id(looked.seed)
        self._traces: dict[int, bytes] = {}
        self._roots: dict[int, bytes] = {}
        self._wall_ns = self._info.clock.wall(0)
        self._waits = _Waits(looked.records)
        self._devices = _Devices(looked.records)
        self._rows = self._span_rows()
        tiles = looked.iterations.tiles
        forwards = tiles["phase"] == Phase.FORWARD
        forwards &= np.array([each is not None for each in looked.place.tile_id[: len(tiles)]], dtype=np.bool_)
        forwards &= tiles["start_ns"] < part.until_ns
        self._forward_tiles: list[int] = np.flatnonzero(forwards).tolist()
        evaluations = looked.iterations.evaluations
        self._evaluation_rows = evaluations[evaluations["start_ns"] < part.until_ns]
        self.count = (
            len(self._rows)
            + (self._job_id is not None and part.last)
            + (int(np.count_nonzero(looked.iterations.start_ns < part.until_ns)) if self._steps else 0)
            + (len(self._evaluation_rows) if Group.EVALUATE in groups else 0)
            + len(self._forward_tiles)
        )

    @property
    def _agreed(self) -> bool:
        """Whether other ranks have the same seed, so that their spans can be named."""
        return self._info.seed is not None and self._info.seed_source != "own"

    def _span_rows(self) -> list[int]:
        """Records that become spans of their own. A wait becomes part of the span of what it completes."""
        in_part = ((self._data["flags"] & Flag.SPAN) != 0) & (self._data["start_ns"] < self._part.until_ns)
        if self._part.only:
            in_part = np.isin(self._numbers, np.array(sorted(self._part.only), dtype=np.int64))
        elif self._part.held:
            in_part &= ~np.isin(self._numbers, np.array(sorted(self._part.held), dtype=np.int64))
        spanned = in_part.tolist()
        merged = {wait.row for operation, waits in self._waits.of.items() if spanned[operation] for wait in waits}
        return [row for row, wanted in enumerate(spanned) if wanted and row not in merged]

    def spans(self) -> Iterator[Span]:
        """All spans: the job, iterations, what was inferred, then records in their order."""
        if self._job_id is not None and self._part.last:
            yield self._job(self._job_id)
        if self._steps:
            yield from self._iteration_spans()
        if Group.EVALUATE in self._info.groups:
            yield from self._evaluations()
        yield from self._forward_spans()
        yield from self._record_spans()

    # --- traces, roots, links -----------------------------------------------------------------------------------------

    def _trace(self, iteration: int) -> bytes:
        if iteration < 0:
            return self._job_trace
        found = self._traces.get(iteration)
        if found is None:
            found = self._traces[iteration] = ids.iteration_trace_id(self._seed, iteration)
        return found

    def _root(self, iteration: int) -> bytes:
        found = self._roots.get(iteration)
        if found is None:
            found = self._roots[iteration] = ids.iteration_span_id(self._seed, iteration, self._info.rank)
        return found

    def _parent(self, in_job: bool, iteration: int) -> bytes | None:
        """The span under which a whole trace of this rank hangs; None where its group is off."""
        if in_job or iteration < 0:
            return self._job_id
        return self._root(iteration) if self._steps else None

    def _iteration_link(self, iteration: int) -> list[Link]:
        """From the job's trace to this rank's iteration."""
        if iteration < 0:
            return []
        return [_link(self._trace(iteration), self._root(iteration), exported=self._steps)]

    # --- spans that are not records -----------------------------------------------------------------------------------

    def _job(self, span_id: bytes) -> Span:
        info, writer = self._info, self._writer
        attributes: dict[str, AttributeValue] = {semconv.LENS_TIMING_SOURCE: semconv.TIMING_HOST}
        end_ns = writer.last_sign_ns
        if end_ns is None:
            end_ns = int(np.maximum(self._data["start_ns"], self._data["end_ns"]).max(initial=info.started_ns))
        if info.ended_ns is None:
            attributes[semconv.NEMO_SPAN_TRUNCATED] = True
        if writer.dropped:
            attributes[semconv.LENS_RECORDS_DROPPED] = writer.dropped
        skew = info.raw.get("iteration_skew")
        if isinstance(skew, int) and skew:
            attributes[semconv.LENS_ITERATION_SKEW] = skew
        started_from = span_of(info.raw.get("origin"))
        links = [] if started_from is None else [Link(*started_from[:2], trace_state=started_from[2])]
        return self._span(self._job_trace, span_id, None, semconv.SPAN_JOB, info.started_ns, end_ns, attributes, links)

    def _iteration_spans(self) -> Iterator[Span]:
        found = self._iterations
        device_ns = self._devices.clock.between(found.start_ns, found.end_ns)
        for iteration, start_ns, end_ns, took_ns in zip(
            found.number.tolist(), found.start_ns.tolist(), found.end_ns.tolist(), device_ns.tolist(), strict=True
        ):
            if start_ns >= self._part.until_ns:
                return
            links = []
            if self._info.rank > 0 and self._agreed:
                first = ids.iteration_span_id(self._seed, iteration, 0)
                exported = self._survey.has_first(self._seed, iteration)
                links.append(_link(self._trace(iteration), first, exported=exported))
            attributes: dict[str, AttributeValue] = {
                semconv.DL_ITERATION: iteration,
                semconv.LENS_TIMING_SOURCE: semconv.TIMING_HOST,
            }
            _measured(attributes, took_ns)
            memory = self._devices.memory.get(end_ns)
            if memory is not None:
                attributes[semconv.DL_DEVICE_MEMORY_ALLOCATED] = memory[0]
                attributes[semconv.DL_DEVICE_MEMORY_RESERVED] = memory[1]
                attributes[semconv.DL_DEVICE_MEMORY_PEAK] = memory[2]
            yield self._span(
                self._trace(iteration),
                self._root(iteration),
                None,
                semconv.SPAN_ITERATION,
                start_ns,
                end_ns,
                attributes,
                links,
            )

    def _evaluations(self) -> Iterator[Span]:
        for row in self._evaluation_rows:
            iteration = int(row["iteration"])
            attributes: dict[str, AttributeValue] = {
                semconv.DL_BATCHES: int(row["batches"]),
                semconv.LENS_TIMING_SOURCE: semconv.TIMING_HOST,
            }
            if iteration >= 0:
                attributes[semconv.DL_ITERATION] = iteration
            yield self._span(
                self._job_trace,
                ids.evaluate_span_id(self._seed, self._info.nonce, int(row["record"])),
                self._job_id,
                semconv.SPAN_EVALUATE,
                int(row["start_ns"]),
                int(row["end_ns"]),
                attributes,
                self._iteration_link(iteration),
            )

    def _forward_spans(self) -> Iterator[Span]:
        tiles = self._iterations.tiles
        enqueued = self._data["flags"] & _ENQUEUE
        device_ns = self._devices.clock.between(tiles["start_ns"], tiles["end_ns"])
        for index in self._forward_tiles:
            span_id = self._place.tile_id[index]
            if span_id is None:
                continue
            iteration = int(tiles["iteration"][index])
            row = int(np.searchsorted(self._numbers, tiles["record"][index + 1]))
            attributes: dict[str, AttributeValue] = {
                semconv.LENS_INFERRED: True,
                semconv.LENS_TIMING_SOURCE: _timing(int(enqueued[row])),
            }
            _measured(attributes, int(device_ns[index]))
            yield self._span(
                self._trace(iteration),
                span_id,
                self._parent(False, iteration),
                semconv.SPAN_FORWARD,
                int(tiles["start_ns"][index]),
                int(tiles["end_ns"][index]),
                attributes,
            )

    # --- spans of records ---------------------------------------------------------------------------------------------

    def _record_spans(self) -> Iterator[Span]:
        place = self._place
        iterations = self._iterations.record_iteration
        starts, ends = self._data["start_ns"].astype(np.int64), self._data["end_ns"].astype(np.int64)
        for first in range(0, len(self._rows), _CHUNK):
            rows = self._rows[first : first + _CHUNK]
            at = np.array(rows, dtype=np.int64)
            device_ns = self._devices.clock.between(starts[at], ends[at])
            for row, took_ns, values, iteration, in_job, tile in zip(
                rows,
                device_ns.tolist(),
                self._data[at].tolist(),
                iterations[at].tolist(),
                place.in_job[at].tolist(),
                place.tile[at].tolist(),
                strict=True,
            ):
                record = _Record._make(values)
                span_id = (place.send_id(row) if record.kind in _SEND_KINDS else None) or place.record_id(row)
                parent_id = place.tile_id[tile] if tile >= 0 and place.tile_in_job[tile] == in_job else None
                if parent_id is None or parent_id == span_id:
                    parent_id = self._parent(in_job, iteration)
                name, attributes = self._describe(record)
                span = self._span(
                    self._job_trace if in_job else self._trace(iteration),
                    span_id,
                    parent_id,
                    name,
                    record.start_ns,
                    record.end_ns,
                    attributes,
                )
                if record.kind in _DEVICE_PHASE_KINDS:
                    _measured(attributes, took_ns)
                if record.kind in _JOB_KINDS:
                    span.links = self._iteration_link(iteration)
                if record.kind == Kind.HANG and record.a != Phase.START_UP:
                    span.links = self._iteration_link(record.iteration)
                if record.flags & _FAILED:
                    self._fail(span, record.detail)
                if record.kind in _AWAITED_KINDS:
                    self._complete(span, row, record)
                elif record.kind == Kind.FSDP and row in self._devices.of:
                    self._complete_by_device(span, *self._devices.of[row])
                if record.kind == Kind.RECV:
                    self._link_to_send(span, record, iteration, in_job)
                elif record.kind == Kind.PIPELINE_RECV:
                    self._link_pipeline(span, record, iteration, in_job)
                yield span

    def _describe(self, record: _Record) -> tuple[str, dict[str, AttributeValue]]:
        """Name and attributes of a record's span."""
        text = self._writer.string
        attributes: dict[str, AttributeValue] = {semconv.LENS_TIMING_SOURCE: _timing(record.flags)}
        kind = record.kind
        if kind in _OPERATION_KINDS or kind in (Kind.PROCESS_GROUP, Kind.WAIT):
            self._describe_communication(record, attributes)
            return semconv.SPAN_DISTRIBUTED_PREFIX + (text(record.name) or "unknown"), attributes
        if kind in pipeline_spans.KINDS:
            group, dtype = text(record.group), text(record.dtype)
            attributes.update(pipeline_spans.attributes(record, self._info.rank, group, dtype))
            return pipeline_spans.span_name(record, text(record.name)), attributes
        if kind in (Kind.FETCH, Kind.LOADER_START):
            attributes[semconv.CODE_FUNCTION_NAME] = text(record.name)
            attributes[semconv.DL_LOADER_WORKERS] = record.b
            if record.seq >= 0:
                attributes[semconv.DL_BATCH_INDEX] = record.seq
            if record.flags & _EXHAUSTED:
                attributes[semconv.DL_LOADER_EXHAUSTED] = True
            return semconv.SPAN_DATA_LOADING, attributes
        if kind == Kind.BACKWARD:
            return semconv.SPAN_BACKWARD, attributes
        if kind == Kind.OPTIMIZER_STEP:
            attributes[semconv.DL_OPTIMIZER] = text(record.name)
            if record.flags & _SKIPPED:
                attributes[semconv.DL_OPTIMIZER_SKIPPED] = True
            return semconv.SPAN_OPTIMIZER_STEP, attributes
        if kind == Kind.MODEL_INIT:
            attributes[semconv.DL_MODEL_WRAPPER] = text(record.name)
            return semconv.SPAN_MODEL_INIT, attributes
        if kind in (Kind.CHECKPOINT_SAVE, Kind.CHECKPOINT_LOAD):
            if record.name:
                attributes[semconv.FILE_PATH] = text(record.name)
            if record.bytes:
                attributes[semconv.FILE_SIZE] = record.bytes
            return (
                semconv.SPAN_CHECKPOINT_SAVE if kind == Kind.CHECKPOINT_SAVE else semconv.SPAN_CHECKPOINT_LOAD,
                attributes,
            )
        if kind == Kind.HANG:
            self._describe_hang(record, attributes)
            return semconv.SPAN_HANG, attributes
        if kind == Kind.FSDP:
            if record.group:
                attributes[semconv.DL_COMM_GROUP] = text(record.group)
            if record.detail and not record.flags & _FAILED:
                attributes[semconv.DL_MODEL_MODULE] = text(record.detail)
            return semconv.SPAN_FSDP_PREFIX + text(record.name), attributes
        if kind == Kind.DDP:
            self._describe_ddp(record, attributes)
            return semconv.SPAN_DDP_PREFIX + text(record.name), attributes
        # A kind that this version does not know: shown rather than lost.
        return f"{_UNKNOWN_PREFIX}{kind}", attributes

    def _describe_ddp(self, record: _Record, attributes: dict[str, AttributeValue]) -> None:
        """What the reducer's own logger measured of one iteration."""
        attributes[semconv.LENS_TIMING_SOURCE] = semconv.TIMING_DDP_LOGGER
        attributes[semconv.DL_DDP_ITERATION] = record.a
        if self._writer.string(record.name) != "communication":
            return
        sizes = [int(size) for size in self._writer.string(record.detail).split(",") if size.strip().isdigit()]
        attributes[semconv.DL_COMM_GROUP] = self._writer.string(record.group)
        attributes[semconv.DL_COMM_GROUP_SIZE] = record.group_size
        attributes[semconv.DL_COMM_BYTES] = record.bytes
        attributes[semconv.DL_COMM_EXPOSED_NS] = record.exposed_ns
        attributes[semconv.DL_DDP_OVERLAP_NS] = record.b
        attributes[semconv.DL_DDP_BUCKETS] = len(sizes)
        attributes[semconv.DL_DDP_BUCKET_SIZES] = sizes

    def _describe_hang(self, record: _Record, attributes: dict[str, AttributeValue]) -> None:
        """What the hang watch saw; the stacks are in the file that it wrote."""
        text = self._writer.string
        attributes[semconv.LENS_HANG_OPERATION] = text(record.name)
        attributes[semconv.LENS_HANG_SINCE] = iso(self._info.clock.wall(record.start_ns))
        if record.a in list(Phase):
            attributes[semconv.LENS_HANG_PHASE] = Phase(record.a).name.lower()
        if record.group:
            attributes[semconv.DL_COMM_GROUP] = text(record.group)
        if record.group_size:
            attributes[semconv.DL_COMM_GROUP_SIZE] = record.group_size
        if record.seq >= 0:
            attributes[semconv.DL_COMM_SEQ] = record.seq
        if record.peer >= 0:
            attributes[semconv.DL_COMM_PEER] = record.peer
        for folder in self._writer.folders:
            report = read_hang(folder / HANG_NAME)
            if report is None:
                continue
            attributes[semconv.LENS_HANG_FILE] = str(folder / HANG_NAME)
            peers = (report.get("operation") or {}).get("peers")
            if isinstance(peers, list):
                attributes[semconv.DL_COMM_PEERS] = [int(peer) for peer in peers]
            attributes[semconv.LENS_HANG_STACKS] = [
                "\n".join([str(each.get("name")), *map(str, each.get("frames") or [])])
                for each in report.get("stacks") or []
            ]
            return

    def _describe_communication(self, record: _Record, attributes: dict[str, AttributeValue]) -> None:
        text = self._writer.string
        if record.group:
            attributes[semconv.DL_COMM_GROUP] = text(record.group)
        if record.group_size:
            attributes[semconv.DL_COMM_GROUP_SIZE] = record.group_size
        if record.kind not in _OPERATION_KINDS:
            if record.kind == Kind.PROCESS_GROUP and record.detail and not record.flags & _FAILED:
                attributes[semconv.DL_COMM_GROUP_DESCRIPTION] = text(record.detail)
            return
        if record.seq >= 0:
            attributes[semconv.DL_COMM_SEQ] = record.seq
        attributes[semconv.DL_COMM_BYTES] = record.bytes
        if record.dtype:
            attributes[semconv.DL_COMM_DTYPE] = text(record.dtype)
        attributes[semconv.DL_COMM_ASYNC] = bool(record.flags & _ASYNC)
        if record.flags & _COALESCED:
            attributes[semconv.DL_COMM_COALESCED] = True
        if record.kind != Kind.COLLECTIVE:
            if record.peer >= 0:
                attributes[semconv.DL_COMM_PEER] = record.peer
            attributes[semconv.DL_COMM_TAG] = record.tag

    def _complete(self, span: Span, row: int, record: _Record) -> None:
        """An operation lasts until the end of its last wait; exposed is what the training thread spent in both."""
        thread = self._iterations.thread
        exposed_ns = _held_ns(record.start_ns, record.end_ns, record.exposed_ns) if record.thread == thread else 0
        enqueued = record.flags & _ENQUEUE
        waits = self._waits.of.get(row, ())
        for wait in waits:
            enqueued |= wait.flags & _ENQUEUE
            span.end_ns = max(span.end_ns, wait.end_ns + self._wall_ns)
            if wait.thread == thread:
                exposed_ns += _held_ns(wait.start_ns, wait.end_ns, wait.exposed_ns)
            if wait.flags & _FAILED:
                self._fail(span, wait.detail)
        if record.flags & _END_UNKNOWN or (record.flags & _ASYNC and not waits):
            span.attributes[semconv.DL_COMM_END] = semconv.DL_COMM_END_UNKNOWN
        measured = self._devices.of.get(row)
        if measured is not None:
            self._complete_by_device(span, *measured)
            return
        if record.flags & _FLIGHT:  # it says that the operation exists, not who waited for it
            return
        if not enqueued:  # the host's waiting says nothing about work that a device does
            span.attributes[semconv.DL_COMM_EXPOSED_NS] = exposed_ns
        else:
            span.attributes[semconv.LENS_TIMING_SOURCE] = semconv.TIMING_HOST_ENQUEUE

    @staticmethod
    def _complete_by_device(span: Span, duration_ns: int, exposed_ns: int, by_flight: bool) -> None:
        """What a device took; start and end of the span stay the host's."""
        if duration_ns >= 0:
            span.attributes[semconv.DL_COMM_DEVICE_DURATION_NS] = duration_ns
        if exposed_ns >= 0:
            span.attributes[semconv.DL_COMM_EXPOSED_NS] = exposed_ns
        by_events = exposed_ns >= 0 or not by_flight
        span.attributes[semconv.LENS_TIMING_SOURCE] = (
            semconv.TIMING_CUDA_EVENT if by_events else semconv.TIMING_FLIGHT_RECORDER
        )

    def _link_to_send(self, span: Span, record: _Record, iteration: int, in_job: bool) -> None:
        rank = self._info.rank
        if record.flags & _AMBIGUOUS or record.peer < 0 or record.seq < 0 or rank < 0:
            span.attributes[semconv.DL_COMM_LINK] = semconv.DL_COMM_LINK_AMBIGUOUS
            return
        group = self._writer.string(record.group)
        sent = ids.send_span_id(self._seed, group, record.init, record.peer, rank, record.tag, record.seq)
        self._link_to(span, sent, record.peer, iteration, in_job)

    def _link_pipeline(self, span: Span, record: _Record, iteration: int, in_job: bool) -> None:
        """A receive of a pipeline links to the sender's span and to rank 0's iteration."""
        text = self._writer.string
        sent = pipeline_spans.sender_span_id(record, self._seed, text(record.group), text(record.name))
        if sent is None:
            span.attributes[semconv.DL_COMM_LINK] = semconv.DL_COMM_LINK_AMBIGUOUS
        else:
            self._link_to(span, sent, record.peer, iteration, in_job)
        if iteration >= 0 and self._agreed:
            first = ids.iteration_span_id(self._seed, iteration, 0)
            exported = self._survey.has_first(self._seed, iteration)
            span.links.append(_link(self._trace(iteration), first, exported=exported))

    def _link_to(self, span: Span, sent: bytes, sender: int, iteration: int, in_job: bool) -> None:
        there = self._survey.send_iteration(sent, sender, -1 if in_job else iteration)
        if there is not None:
            span.links.append(_link(self._trace(there), sent, exported=True))
        elif self._agreed:
            # The sender is not in this run directory: its trace is most likely the receiver's.
            span.links.append(_link(self._trace(-1 if in_job else iteration), sent, exported=False))

    def _fail(self, span: Span, detail: int) -> None:
        exception = self._writer.string(detail) or "unknown"
        span.attributes[semconv.EXCEPTION_TYPE] = exception
        span.error = exception

    def _span(
        self,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes | None,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, AttributeValue],
        links: list[Link] | None = None,
    ) -> Span:
        """A span from monotonic stamps; one without an end of its own is empty and says that it is cut off."""
        if not end_ns:
            attributes[semconv.NEMO_SPAN_TRUNCATED] = True
        start = start_ns + self._wall_ns
        if start < 0:
            start = 0
        end = end_ns + self._wall_ns
        return Span(trace_id, span_id, parent_id, name, start, end if end > start else start, attributes, links or [])


def _link(trace_id: bytes, span_id: bytes, *, exported: bool) -> Link:
    return Link(trace_id, span_id, {} if exported else {semconv.LENS_LINK_EXPORTED: False})


def _measured(attributes: dict[str, AttributeValue], took_ns: int) -> None:
    """What a device took for a phase, where that is known."""
    if took_ns >= 0:
        attributes[semconv.DL_DEVICE_DURATION_NS] = took_ns
        attributes[semconv.LENS_TIMING_SOURCE] = semconv.TIMING_CUDA_EVENT


def _timing(flags: int) -> str:
    if flags & _FLIGHT:
        return semconv.TIMING_FLIGHT_RECORDER
    return semconv.TIMING_HOST_ENQUEUE if flags & _ENQUEUE else semconv.TIMING_HOST


def _held_ns(start_ns: int, end_ns: int, exposed_ns: int) -> int:
    """How long a call held its thread: what its record says, else its length."""
    return exposed_ns or max(0, end_ns - start_ns)
