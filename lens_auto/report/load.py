"""Read a run writer by writer, and keep of each what the report needs: its iterations, its work, its communication."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lens_auto import semconv
from lens_auto.iteration.bandwidth import Transfers, find_transfers
from lens_auto.iteration.device_times import operation_times
from lens_auto.iteration.rule import Int64Array, Iterations, Mask, find_iterations
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.recorder.read import Records, RunDirectory, Status, WriterFiles, find_referring
from lens_auto.report.work import Work, find_work

if TYPE_CHECKING:
    from collections.abc import Callable

_OPERATION_KINDS = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)


@dataclass
class Operations:
    """All calls of one communication operation by one writer, as columns."""

    name: str
    bytes: int
    duration_ns: Int64Array  # call to the end of its last wait, of calls whose end is known; the device's where it is
    count: int
    end_unknown: int
    exposed_ns: int  # time of the training thread, inside of iterations
    exposed_unknown: int  # calls that enqueue device work


@dataclass
class InFlight:
    """An operation that a thread had entered and not left."""

    operation: str
    group: str
    seq: int | None
    peer: int | None
    thread: int
    since_ns: int
    consistent: bool


@dataclass
class Position:
    """What a writer that did not close was last seen in."""

    phase: Phase
    iteration: int
    since_ns: int
    in_flight: list[InFlight] = field(default_factory=list)


@dataclass
class LoadedWriter:
    """One writer, read."""

    writer: WriterFiles
    iterations: Iterations
    work: Work
    operations: list[Operations]
    transfers: Transfers
    position: Position | None
    records: int
    holes: int
    damaged: int


def load(run: RunDirectory, on_progress: Callable[[int], None] = lambda writers: None) -> list[LoadedWriter]:
    """Read every writer of a run.

    Args:
        run: the run directory; files that cannot be read are added to its problems.
        on_progress: told after each writer that one more is done.
    """
    loaded = []
    for writer in run.writers:
        loaded.append(load_writer(writer))
        on_progress(1)
    return loaded


def load_writer(writer: WriterFiles) -> LoadedWriter:
    """Read one writer."""
    records = writer.records()
    iterations = find_iterations(records.data, records.numbers, writer.last_sign_ns)
    return LoadedWriter(
        writer=writer,
        iterations=iterations,
        work=find_work(writer, records, iterations),
        operations=_operations(writer, records, iterations) + _reducer(writer, records, iterations),
        transfers=find_transfers(records.data, records.numbers, writer.string),
        position=position_of(writer),
        records=len(records),
        holes=records.holes,
        damaged=records.damaged,
    )


@dataclass
class Calls:
    """Communication operations of one writer, one by one, as columns.

    Attributes:
        rows: where each is among the records.
        start_ns: its call.
        end_ns: the end of its last wait.
        duration_ns: what the device took where that was measured, else from the call to the end of the last wait.
        exposed_ns: for how long the training thread, or its stream, was held, inside of iterations; 0 where it is not
            known.
        unknown: its end is not known, nor its duration.
        enqueued: it enqueued device work.
        measured: the duration was measured on the device.
        by_flight: by torch's flight recorder, rather than by events.
        exposed_unknown: the host cannot tell how long it was exposed, and no event did.
    """

    rows: Int64Array
    start_ns: Int64Array
    end_ns: Int64Array
    duration_ns: Int64Array
    exposed_ns: Int64Array
    unknown: Mask
    enqueued: Mask
    measured: Mask
    by_flight: Mask
    exposed_unknown: Mask


def find_calls(records: Records, iterations: Iterations) -> Calls:
    """The communication operations of a writer, each with its waits."""
    data = records.data
    rows = np.flatnonzero(np.isin(data["kind"], _OPERATION_KINDS))
    flags = data["flags"][rows]
    start_ns, end_ns, held_ns = _times(records, rows)
    exposed_ns = np.where(data["thread"][rows] == iterations.thread, held_ns, 0)
    enqueued: Mask = (flags & Flag.ENQUEUE) != 0
    waited = np.zeros(len(rows), dtype=np.bool_)
    if len(rows):
        wait, at = find_referring(data, records.numbers, Kind.WAIT, rows)
        _, wait_end_ns, wait_held_ns = _times(records, wait)
        np.maximum.at(end_ns, at, wait_end_ns)
        np.add.at(exposed_ns, at, np.where(data["thread"][wait] == iterations.thread, wait_held_ns, 0))
        enqueued[at[(data["flags"][wait] & Flag.ENQUEUE) != 0]] = True
        waited[at] = True
    unknown = ((flags & Flag.END_UNKNOWN) != 0) | (((flags & Flag.ASYNC) != 0) & ~waited)
    times = operation_times(data, records.numbers, rows)
    measured = times.duration_ns >= 0
    exposed_ns = np.where(times.exposed_ns >= 0, times.exposed_ns, exposed_ns)
    exposed_unknown = enqueued & (times.exposed_ns < 0)
    exposed_ns[exposed_unknown | (iterations.record_iteration[rows] < 0)] = 0
    duration_ns = np.where(measured, times.duration_ns, end_ns - start_ns)
    unknown &= ~measured
    by_flight = times.by_flight
    return Calls(
        rows, start_ns, end_ns, duration_ns, exposed_ns, unknown, enqueued, measured, by_flight, exposed_unknown
    )


def _operations(writer: WriterFiles, records: Records, iterations: Iterations) -> list[Operations]:
    data = records.data
    calls = find_calls(records, iterations)
    rows, unknown = calls.rows, calls.unknown
    found = []
    name = data["name"][rows]
    for number in np.unique(name).tolist():
        of = name == number
        found.append(
            Operations(
                name=writer.string(number) or "unknown",
                bytes=sum(data["bytes"][rows[of]].tolist()),
                duration_ns=calls.duration_ns[of & ~unknown],
                count=int(np.count_nonzero(of)),
                end_unknown=int(np.count_nonzero(of & unknown)),
                exposed_ns=int(calls.exposed_ns[of].sum()),
                exposed_unknown=int(np.count_nonzero(of & calls.exposed_unknown)),
            )
        )
    return found


def _reducer(writer: WriterFiles, records: Records, iterations: Iterations) -> list[Operations]:
    """The communication of DistributedDataParallel, by its own logger: one for each of its iterations.

    Its operations are listed by torch's flight recorder where that is on (`c` is 0 then), without their times.
    """
    data = records.data
    rows = np.flatnonzero(data["kind"] == Kind.DDP)
    rows = (
        rows[[writer.string(number) == "communication" for number in data["name"][rows].tolist()]]
        if len(rows)
        else rows
    )
    if not len(rows):
        return []
    start_ns, end_ns, exposed_ns = _times(records, rows)
    counted_here = data["c"][rows] > 0
    return [
        Operations(
            name=semconv.SPAN_DDP_PREFIX + "communication",
            bytes=sum(data["bytes"][rows[counted_here]].tolist()),
            duration_ns=end_ns - start_ns,
            count=len(rows),
            end_unknown=0,
            exposed_ns=int(exposed_ns[iterations.record_iteration[rows] >= 0].sum()),
            exposed_unknown=0,
        )
    ]


def _times(records: Records, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Start, end, and how long the calling thread was held."""
    data = records.data
    start_ns = data["start_ns"][rows].astype(np.int64)
    end_ns = np.maximum(data["end_ns"][rows].astype(np.int64), start_ns)
    exposed_ns = data["exposed_ns"][rows]
    length_ns = end_ns - start_ns
    # A call cannot hold its thread for longer than it lasted.
    held_ns = np.where(exposed_ns > 0, np.minimum(exposed_ns, length_ns.astype(np.uint64)).astype(np.int64), length_ns)
    return start_ns, end_ns, held_ns


def position_of(writer: WriterFiles) -> Position | None:
    """Phase and operations in flight of a writer that did not close: now, or at its last heartbeat."""
    live = writer.live
    if live is None or writer.status is Status.CLOSED:
        return None
    now_ns = time.monotonic_ns() if writer.status is Status.RUNNING else live.heartbeat_ns
    in_flight = [
        InFlight(
            operation=writer.string(slot.name) or slot.kind_name,
            group=writer.string(slot.group),
            seq=slot.seq if slot.seq >= 0 else None,
            peer=slot.peer if slot.peer >= 0 else None,
            thread=slot.thread,
            since_ns=max(0, now_ns - slot.start_ns),
            consistent=slot.consistent,
        )
        for slot in sorted(live.slots, key=lambda slot: slot.start_ns)
    ]
    since_ns = max(0, now_ns - live.phase.since_ns) if live.phase.since_ns else 0
    return Position(live.phase.phase, live.phase.iteration, since_ns, in_flight)
