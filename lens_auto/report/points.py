"""The points at which a rank meets others in collectives: those that Python issued, and those that only show.

Those of DistributedDataParallel's reducer are in no record: they end with backward, so the end of backward is the
meeting point, and the start of backward the last thing that is seen of a rank's arrival (`Source.BACKWARD`), unless the
reducer's own clock was recorded (`Source.REDUCER`).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from lens_auto.iteration.rule import Int64Array, Iterations, Mask
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.recorder.read import find_referring

if TYPE_CHECKING:
    import numpy.typing as npt

    from lens_auto.recorder.read import Records, WriterFiles

# Nobody leaves these before everybody has come. (The root of a broadcast may leave first.)
_MUTUAL = frozenset(
    {
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_single", "all_gather_into_tensor"),
        *("_all_gather_base", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_single"),
        *("reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single", "barrier"),
        *("monitored_barrier", "all_gather_object"),
    }
)


class Source(enum.IntEnum):
    """How the arrival of a rank at a meeting point is known."""

    COLLECTIVE = 0  # a collective that Python issued
    REDUCER = 1  # end of the gradients' computation, by the reducer's own clock
    BACKWARD = 2  # the start of the backward that ends with the meeting
    OPTIMIZER = 3  # the end of the last backward before the optimizer: the meeting lies between them
    ITERATION = 4  # no meeting is seen: the iteration as a whole
    TRANSFER = 5  # a send or a receive: where it was issued, or held the thread


BACKWARD_GROUP, GAP_GROUP = -1, -2  # of points that no record of a collective stands for


POINT_DTYPE = np.dtype(
    [
        ("group", "<i4"),  # index into `Work.groups` (before: a string id); BACKWARD_GROUP, GAP_GROUP
        ("init", "<i4"),
        ("seq", "<i8"),  # sequence number; of a backward, its ordinal in the iteration; of a transfer, among its like
        ("iteration", "<i8"),
        ("arrival_ns", "<i8"),
        ("release_ns", "<i8"),
        ("begin_ns", "<i8"),  # of a backward: its start, which arrival is where nothing later is known
        ("source", "u1"),
        ("mutual", "?"),
        # Of transfers only: the ranks at its ends, and whether it held the thread here or was issued.
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("tag", "<i4"),
        ("held", "?"),
    ]
)


def meeting_points(writer: WriterFiles, records: Records, iterations: Iterations) -> npt.NDArray[np.void]:
    """Where the training thread met other ranks, or may have; `group` is the string id of the group's name."""
    backwards = _backward_points(records, iterations)
    _ask_the_reducer(writer, records, backwards)
    return np.concatenate([_collective_points(writer, records, iterations), backwards, _gap_points(iterations)])


def _collective_points(writer: WriterFiles, records: Records, iterations: Iterations) -> npt.NDArray[np.void]:
    data = records.data
    within = (data["thread"] == iterations.thread) & (iterations.record_iteration >= 0)
    within &= (data["flags"] & Flag.FLIGHT) == 0  # that they exist is known, not when
    rows = np.flatnonzero((data["kind"] == Kind.COLLECTIVE) & (data["seq"] >= 0) & within)
    release_ns, known = _releases(records, rows, iterations.thread)
    rows, release_ns = rows[known], release_ns[known]
    found = np.zeros(len(rows), dtype=POINT_DTYPE)
    mutual = np.array([writer.string(name) in _MUTUAL for name in range(len(writer.strings))], dtype=np.bool_)
    operation = data["name"][rows]
    found["group"] = data["group"][rows]
    found["init"] = data["init"][rows]
    found["seq"] = data["seq"][rows]
    found["iteration"] = iterations.record_iteration[rows]
    found["arrival_ns"] = data["start_ns"][rows]
    found["release_ns"] = release_ns
    found["source"] = Source.COLLECTIVE
    known_name = operation < len(mutual)
    found["mutual"][known_name] = mutual[operation[known_name]]
    return found


def _releases(records: Records, rows: Int64Array, thread: int) -> tuple[Int64Array, Mask]:
    """When each collective let the training thread go; and where that is known."""
    data = records.data
    release_ns = np.maximum(data["end_ns"][rows], data["start_ns"][rows]).astype(np.int64)
    flags = data["flags"][rows]
    known: Mask = (flags & (Flag.FAILED | Flag.END_UNKNOWN)) == 0
    asynchronous = (flags & Flag.ASYNC) != 0
    wait, at = find_referring(data, records.numbers, Kind.WAIT, rows)
    own = data["thread"][wait] == thread
    np.maximum.at(release_ns, at[own], data["end_ns"][wait[own]].astype(np.int64))
    waited = np.zeros(len(rows), dtype=np.bool_)
    waited[at[own]] = True
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
    at, inside = interval_at(end_ns, backwards["arrival_ns"], backwards["release_ns"] + 1)
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


def interval_at(time_ns: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> tuple[Int64Array, Mask]:
    """Index of the interval (ascending, not overlapping) that starts at or before each time; whether it covers it."""
    index = np.searchsorted(start_ns, time_ns, side="right").astype(np.int64) - 1
    inside = index >= 0
    if len(end_ns):
        inside &= time_ns < end_ns[index]
    return np.maximum(index, 0), inside
