"""What one rank did itself and what held it: the points at which it depends on other ranks, and its work up to each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lens_auto.iteration.device_times import DeviceClock, operation_times
from lens_auto.iteration.rule import Int64Array, Iterations
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.report.points import interval_at, meeting_points
from lens_auto.report.transfers import transfer_points

if TYPE_CHECKING:
    import numpy.typing as npt

    from lens_auto.recorder.read import Records, WriterFiles

# The wrapper whose gradients travel inside backward, unseen; and those that gather weights inside forward, too.
REDUCER = "DistributedDataParallel"
GATHERING_WRAPPERS = frozenset({"FullyShardedDataParallel", "fully_shard"})
_OPERATIONS = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
_FEW = 0.1  # share of the operations that no event may be of
PHASES = len(Phase)


@dataclass(frozen=True)
class Work:
    """One writer's meeting points and own work. Times are monotonic nanoseconds of its host, its device's too.

    Attributes:
        groups: names of the process groups that points refer to.
        points: `points.POINT_DTYPE`, in order of arrival.
        own_arrival_ns: own work so far in each phase (columns) at the arrival of each point.
        own_release_ns: the same at its release; more than at arrival where an asynchronous operation was overlapped.
        own_iteration_ns: own work in each iteration (rows) and phase (columns).
        wrappers: classes that wrapped the model.
        workers: processes of the data loaders that were fetched from; empty: no loader was seen.
        loader_starts: iterations in which a loader was started.
        enqueued: communication was enqueued on a device, and no event tells when it happened.
        batch_bytes: size of what each iteration fetched; zeros where it was not recorded.
    """

    groups: list[str]
    points: npt.NDArray[np.void]
    own_arrival_ns: Int64Array
    own_release_ns: Int64Array
    own_iteration_ns: Int64Array
    wrappers: frozenset[str]
    workers: frozenset[int]
    loader_starts: Int64Array
    enqueued: bool
    batch_bytes: Int64Array


def find_work(writer: WriterFiles, records: Records, iterations: Iterations) -> Work:
    """The work of one writer: its device's where events tell of that, else its host's."""
    clock = DeviceClock(records.data)
    enqueued = _unseen_on_device(records, clock)
    if clock:
        records, iterations = _on_device(clock, records, iterations)
    data = records.data
    kind = data["kind"]
    held_start_ns, held_end_ns = _held(records, iterations.thread)
    points = np.concatenate(
        [meeting_points(writer, records, iterations), transfer_points(records, iterations, writer.info.rank)]
    )
    points = points[np.argsort(points["arrival_ns"], kind="stable")]
    groups = _name_groups(writer, points)
    own = _Own(iterations, held_start_ns, held_end_ns, points["arrival_ns"], points["release_ns"])
    edges = np.append(iterations.start_ns, iterations.end_ns[-1:])
    at_edges = own.at(edges)
    fetches = np.flatnonzero(kind == Kind.FETCH)
    batch_bytes = np.zeros(len(iterations), dtype=np.int64)
    where = iterations.record_iteration[fetches]
    np.add.at(batch_bytes, where[where >= 0], data["bytes"][fetches][where >= 0].astype(np.int64))
    starts = iterations.record_iteration[kind == Kind.LOADER_START]
    return Work(
        groups=groups,
        points=points,
        own_arrival_ns=own.at(points["arrival_ns"]),
        own_release_ns=own.at(points["release_ns"]),
        own_iteration_ns=np.diff(at_edges, axis=0),
        wrappers=frozenset(writer.string(name) for name in np.unique(data["name"][kind == Kind.MODEL_INIT]).tolist()),
        workers=frozenset(np.unique(data["b"][fetches]).tolist()),
        loader_starts=np.unique(starts[starts >= 0]),
        enqueued=enqueued,
        batch_bytes=batch_bytes,
    )


def _name_groups(writer: WriterFiles, points: npt.NDArray[np.void]) -> list[str]:
    """Put the index of the name of its group in the place of its string id, and list the names."""
    seen = points["group"] >= 0
    ids, index = np.unique(points["group"][seen], return_inverse=True)
    points["group"][seen] = index
    return [writer.string(each) for each in ids.tolist()]


def _unseen_on_device(records: Records, clock: DeviceClock) -> bool:
    """Whether operations were enqueued on a device, and no event tells when they were, but for some at the start."""
    data = records.data
    rows = np.flatnonzero(np.isin(data["kind"], _OPERATIONS) & ((data["flags"] & Flag.ENQUEUE) != 0))
    times = operation_times(data, records.numbers, rows)
    unseen = int(np.count_nonzero((times.exposed_ns < 0) & (times.duration_ns < 0)))
    return unseen > _FEW * len(rows) if clock else len(rows) > 0


def _on_device(clock: DeviceClock, records: Records, iterations: Iterations) -> tuple[Records, Iterations]:
    """The same as the device saw it: everything at the time when the stream of the training thread came there.

    The host may be ahead of it by any time; a batch that it waited for while the device was busy cost nothing.
    """
    data = records.data.copy()
    for name in ("start_ns", "end_ns"):
        known = data[name] > 0
        data[name][known] = clock.translate(data[name][known].astype(np.int64)).astype(np.uint64)
    # What DistributedDataParallel's logger has on CUDA is when it was enqueued, and for how long it ran.
    reducer = records.data["kind"] == Kind.DDP
    data["end_ns"][reducer] = (data["start_ns"] + records.data["end_ns"] - records.data["start_ns"])[reducer]
    tiles = iterations.tiles.copy()
    for name in ("start_ns", "end_ns"):
        tiles[name] = clock.translate(tiles[name])
    start_ns, end_ns = clock.translate(iterations.start_ns), clock.translate(iterations.end_ns)
    return (
        dataclasses.replace(records, data=data),
        dataclasses.replace(iterations, start_ns=start_ns, end_ns=end_ns, tiles=tiles),
    )


def _held(records: Records, thread: int) -> tuple[Int64Array, Int64Array]:
    """When communication held the training thread: intervals in order that do not overlap."""
    data = records.data
    kind = data["kind"]
    wanted = (np.isin(kind, _OPERATIONS) | (kind == Kind.WAIT)) & (data["thread"] == thread)
    # FSDP2 waits for what other streams gathered, where its collectives hold nobody up.
    wanted |= (kind == Kind.FSDP) & ((data["flags"] & Flag.MEASURED) != 0) & (data["thread"] == thread)
    rows = np.flatnonzero(wanted & ((data["flags"] & Flag.FLIGHT) == 0))
    start_ns = data["start_ns"][rows].astype(np.int64)
    end_ns = data["end_ns"][rows].astype(np.int64)
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns = start_ns[order], np.maximum(end_ns[order], start_ns[order])
    if len(end_ns):
        start_ns = np.maximum(start_ns, np.append(start_ns[:1], np.maximum.accumulate(end_ns)[:-1]))
    kept = end_ns > start_ns
    return start_ns[kept], end_ns[kept]


class _Own:
    """Own work so far, by phase: time in iterations during which no communication held the thread."""

    def __init__(self, iterations: Iterations, held_start_ns: Int64Array, held_end_ns: Int64Array, *at: Int64Array):
        tiles = iterations.tiles[iterations.tiles["iteration"] >= 0]
        cuts = [tiles["start_ns"], tiles["end_ns"], held_start_ns, held_end_ns, *at, np.zeros(1, dtype=np.int64)]
        # (Sorted by hand: NumPy's unique takes twenty times as long for so many distinct values, seen in 2.4.)
        edge_ns = np.sort(np.concatenate(cuts).astype(np.int64))
        self._edge_ns: Int64Array = edge_ns[np.append(True, edge_ns[1:] != edge_ns[:-1])]
        piece, length_ns = self._edge_ns[:-1], np.diff(self._edge_ns)
        tile, inside = interval_at(piece, tiles["start_ns"], tiles["end_ns"])
        _, held = interval_at(piece, held_start_ns, held_end_ns)
        own = inside & ~held
        phase = np.where(own, tiles["phase"][tile] if len(tiles) else 0, PHASES)
        self._so_far_ns = np.zeros((PHASES, len(self._edge_ns)), dtype=np.int64)
        for code in range(PHASES):
            np.cumsum(np.where(phase == code, length_ns, 0), out=self._so_far_ns[code, 1:])

    def at(self, time_ns: Int64Array) -> Int64Array:
        """Own work until each of some times, which were given as cuts or are edges of iterations."""
        index = np.clip(np.searchsorted(self._edge_ns, time_ns, side="right") - 1, 0, None)
        found: Int64Array = np.ascontiguousarray(self._so_far_ns[:, index].T)
        return found
