"""What one rank did itself and what held it: the points at which it meets other ranks, and its own work up to each.

A rank meets the others in collectives. Those that Python issues are in the records. Those of DistributedDataParallel's
reducer are not: they end with backward, so the end of backward is the meeting point, and the start of backward the last
thing that is seen of a rank's arrival (`Source.BACKWARD`), unless the reducer's own clock was recorded
(`Source.REDUCER`).
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lens_auto.iteration.device_times import DeviceClock, operation_times
from lens_auto.iteration.rule import Int64Array, Iterations, Mask
from lens_auto.recorder.layout import Flag, Kind, Phase

if TYPE_CHECKING:
    import numpy.typing as npt

    from lens_auto.recorder.read import Records, WriterFiles

# The wrapper whose gradients travel inside backward, unseen; and those that gather weights inside forward, too.
REDUCER = "DistributedDataParallel"
GATHERING_WRAPPERS = frozenset({"FullyShardedDataParallel", "fully_shard"})
# Nobody leaves these before everybody has come. (The root of a broadcast may leave first.)
_MUTUAL = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_single", "all_gather_into_tensor"),
        *("_all_gather_base", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_single"),
        *("reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "barrier"),
        *("monitored_barrier", "all_gather_object"),
    }
)
_OPERATIONS = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
_MAX_REF = np.uint64(1 << 62)
_FEW = 0.1  # share of the operations that no event may be of
PHASES = len(Phase)


class Source(enum.IntEnum):
    """How the arrival of a rank at a meeting point is known."""

    COLLECTIVE = 0  # a collective that Python issued
    REDUCER = 1  # end of the gradients' computation, by the reducer's own clock
    BACKWARD = 2  # the start of the backward that ends with the meeting
    OPTIMIZER = 3  # the end of the last backward before the optimizer: the meeting lies between them
    ITERATION = 4  # no meeting is seen: the iteration as a whole


BACKWARD_GROUP, GAP_GROUP = -1, -2  # of points that no record of a collective stands for


POINT_DTYPE = np.dtype(
    [
        ("group", "<i4"),  # index into `Work.groups`; BACKWARD_GROUP, GAP_GROUP
        ("init", "<i4"),
        ("seq", "<i8"),  # sequence number; of a backward, its ordinal in the iteration
        ("iteration", "<i8"),
        ("arrival_ns", "<i8"),
        ("release_ns", "<i8"),
        ("begin_ns", "<i8"),  # of a backward: its start, which arrival is where nothing later is known
        ("source", "u1"),
        ("mutual", "?"),
    ]
)


@dataclass(frozen=True)
class Work:
    """One writer's meeting points and own work. Times are monotonic nanoseconds of its host, its device's too.

    Attributes:
        groups: names of the process groups that points refer to.
        points: `POINT_DTYPE`, in order of arrival.
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
    groups, points = _points(writer, records, iterations)
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
        tile, inside = _interval_at(piece, tiles["start_ns"], tiles["end_ns"])
        _, held = _interval_at(piece, held_start_ns, held_end_ns)
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


def _interval_at(time_ns: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> tuple[Int64Array, Mask]:
    """Index of the interval (ascending, not overlapping) that starts at or before each time; whether it covers it."""
    index = np.searchsorted(start_ns, time_ns, side="right").astype(np.int64) - 1
    inside = index >= 0
    if len(end_ns):
        inside &= time_ns < end_ns[index]
    return np.maximum(index, 0), inside


def _points(writer: WriterFiles, records: Records, iterations: Iterations) -> tuple[list[str], npt.NDArray[np.void]]:
    data = records.data
    within = (data["thread"] == iterations.thread) & (iterations.record_iteration >= 0)
    within &= (data["flags"] & Flag.FLIGHT) == 0  # that they exist is known, not when
    rows = np.flatnonzero((data["kind"] == Kind.COLLECTIVE) & (data["seq"] >= 0) & within)
    release_ns, known = _releases(records, rows, iterations.thread)
    rows, release_ns = rows[known], release_ns[known]
    collectives = np.zeros(len(rows), dtype=POINT_DTYPE)
    names, group = np.unique(data["group"][rows], return_inverse=True)
    groups = [writer.string(name) for name in names.tolist()]
    mutual = np.array([writer.string(name) in _MUTUAL for name in range(len(writer.strings))], dtype=np.bool_)
    operation = data["name"][rows]
    collectives["group"] = group
    collectives["init"] = data["init"][rows]
    collectives["seq"] = data["seq"][rows]
    collectives["iteration"] = iterations.record_iteration[rows]
    collectives["arrival_ns"] = data["start_ns"][rows]
    collectives["release_ns"] = release_ns
    collectives["source"] = Source.COLLECTIVE
    known_name = operation < len(mutual)
    collectives["mutual"][known_name] = mutual[operation[known_name]]

    backwards = _backward_points(records, iterations)
    _ask_the_reducer(writer, records, backwards)
    points = np.concatenate([collectives, backwards, _gap_points(iterations)])
    return groups, points[np.argsort(points["arrival_ns"], kind="stable")]


def _releases(records: Records, rows: Int64Array, thread: int) -> tuple[Int64Array, Mask]:
    """When each collective let the training thread go; and where that is known."""
    data = records.data
    release_ns = np.maximum(data["end_ns"][rows], data["start_ns"][rows]).astype(np.int64)
    flags = data["flags"][rows]
    known: Mask = (flags & (Flag.FAILED | Flag.END_UNKNOWN)) == 0
    asynchronous = (flags & Flag.ASYNC) != 0
    wait = np.flatnonzero(
        (data["kind"] == Kind.WAIT) & (data["ref"] > 0) & (data["ref"] <= _MAX_REF) & (data["thread"] == thread)
    )
    waited = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) and len(wait):
        wanted = data["ref"][wait].astype(np.int64) - 1
        numbers = records.numbers[rows]
        at = np.minimum(np.searchsorted(numbers, wanted), len(rows) - 1)
        matches = numbers[at] == wanted
        np.maximum.at(release_ns, at[matches], data["end_ns"][wait[matches]].astype(np.int64))
        waited[at[matches]] = True
    return release_ns, known & (waited | ~asynchronous)


def _backward_points(records: Records, iterations: Iterations) -> npt.NDArray[np.void]:
    """Every backward as a possible meeting point; whether it is one, the other ranks tell."""
    data = records.data
    tiles = iterations.tiles
    tiles = tiles[(tiles["iteration"] >= 0) & (tiles["phase"] == Phase.BACKWARD)]
    # A backward that a step cuts in two is one.
    _, first, which = np.unique(tiles["record"], return_index=True, return_inverse=True)
    order = np.argsort(first)
    end_ns = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(end_ns, which, tiles["end_ns"])
    found = np.zeros(len(first), dtype=POINT_DTYPE)
    found["iteration"] = tiles["iteration"][first]
    found["arrival_ns"] = found["begin_ns"] = tiles["start_ns"][first]
    found["release_ns"] = end_ns
    found = found[order]
    found["group"] = BACKWARD_GROUP
    found["source"] = Source.BACKWARD
    found["mutual"] = True
    if len(found):
        fresh = np.append(True, found["iteration"][1:] != found["iteration"][:-1])
        begin = np.flatnonzero(fresh)
        found["seq"] = np.arange(len(found)) - begin[np.cumsum(fresh) - 1]
    failed = data["kind"] == Kind.BACKWARD
    failed &= (data["flags"] & Flag.FAILED) != 0
    if failed.any():
        found = found[~np.isin(found["arrival_ns"], data["start_ns"][failed].astype(np.int64))]
    return found


def _ask_the_reducer(writer: WriterFiles, records: Records, backwards: npt.NDArray[np.void]) -> None:
    """Where the reducer's own logger was recorded, the end of the gradients' computation is the arrival."""
    data = records.data
    rows = np.flatnonzero(data["kind"] == Kind.DDP)
    names = {name for name in np.unique(data["name"][rows]).tolist() if writer.string(name) == "backward"}
    rows = rows[np.isin(data["name"][rows], sorted(names))]
    end_ns = data["end_ns"][rows].astype(np.int64)
    at, inside = _interval_at(end_ns, backwards["arrival_ns"], backwards["release_ns"] + 1)
    computed_ns = np.zeros(len(backwards), dtype=np.int64)
    np.maximum.at(computed_ns, at[inside], end_ns[inside])
    known = computed_ns > 0
    backwards["arrival_ns"][known] = computed_ns[known]
    backwards["source"][known] = Source.REDUCER


def _gap_points(iterations: Iterations) -> npt.NDArray[np.void]:
    """Between the last backward and the first step of each iteration: programs reduce gradients there, too."""
    tiles = iterations.tiles
    tiles = tiles[(tiles["iteration"] >= 0) & np.isin(tiles["phase"], (Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER))]
    phase, of = tiles["phase"], tiles["iteration"]
    steps = np.flatnonzero(phase == Phase.OPTIMIZER)
    steps = steps[np.append(True, np.diff(of[steps]) > 0)[: len(steps)]]
    # A step whose closure runs the backward begins before it.
    steps = steps[tiles["end_ns"][steps] - tiles["start_ns"][steps] > 1]
    steps = steps[steps >= 2]
    before = np.where(phase[steps - 1] == Phase.OTHER, steps - 2, steps - 1)
    follows = (phase[before] == Phase.BACKWARD) & (of[before] == of[steps])
    before, steps = before[follows], steps[follows]
    found = np.zeros(len(steps), dtype=POINT_DTYPE)
    found["group"] = GAP_GROUP
    found["iteration"] = of[steps]
    found["arrival_ns"] = tiles["end_ns"][before]
    found["release_ns"] = tiles["start_ns"][steps]
    found["source"] = Source.OPTIMIZER
    found["mutual"] = True
    return found
