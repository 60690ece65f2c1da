"""Sends and receives as points in which two ranks depend on each other.

A transfer has up to two points on either side: where the call was issued, which is what the other side waits for, and
where the training thread was held until it was done. A receive cannot be done before its send was issued. A send need
not wait for its receive, but with many back ends it does (gloo's and NCCL's send nothing before the receiver is ready).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lens_auto.iteration.rule import Int64Array, Iterations, Mask
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import find_referring
from lens_auto.report.points import POINT_DTYPE, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from lens_auto.recorder.read import Records

# What names a transfer on both sides, beside the group: all ranks are global.
_KEY = ("init", "sender", "receiver", "tag", "seq")
_UNUSABLE = Flag.FAILED | Flag.AMBIGUOUS | Flag.FLIGHT | Flag.ENQUEUE
NOBODY = -1


def transfer_points(records: Records, iterations: Iterations, rank: int) -> npt.NDArray[np.void]:
    """Where the training thread issued sends and receives, and where they held it; `group` is a string id.

    Args:
        records: all of the writer.
        iterations: its iterations.
        rank: the writer's.

    Returns:
        Two points for each transfer that ran on the host and whose other end is known, one if nothing waited for it.
    """
    data = records.data
    wanted = np.isin(data["kind"], (Kind.SEND, Kind.RECV)) & (data["thread"] == iterations.thread)
    wanted &= (iterations.record_iteration >= 0) & ((data["flags"] & _UNUSABLE) == 0)
    rows = np.flatnonzero(wanted)
    peer, seq = _other_ends(records, rows)
    known = (peer >= 0) & (seq >= 0)
    rows, peer, seq = rows[known], peer[known], seq[known]
    sends = data["kind"][rows] == Kind.SEND
    issued = np.zeros(len(rows), dtype=POINT_DTYPE)
    issued["source"] = Source.TRANSFER
    issued["seq"] = seq
    for name in ("group", "init", "tag"):
        issued[name] = data[name][rows]
    issued["sender"], issued["receiver"] = np.where(sends, rank, peer), np.where(sends, peer, rank)
    issued["arrival_ns"] = issued["release_ns"] = data["start_ns"][rows]
    issued["iteration"] = iterations.record_iteration[rows]
    begin_ns, end_ns, by = _held(records, rows, iterations.thread)
    waited = (begin_ns >= 0) & (iterations.record_iteration[by] >= 0)
    held = issued[waited]
    held["held"] = True
    held["arrival_ns"], held["release_ns"] = begin_ns[waited], end_ns[waited]
    held["iteration"] = iterations.record_iteration[by[waited]]
    return np.concatenate([issued, held])


def _other_ends(records: Records, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The rank at the other end of each, and its ordinal; those of any-source receives were told afterwards."""
    data = records.data
    peer, seq = data["peer"][rows].astype(np.int64), data["seq"][rows].astype(np.int64)
    told, at = find_referring(data, records.numbers, Kind.RECV_SOURCE, rows)
    doubtful = (data["flags"][told] & Flag.AMBIGUOUS) != 0
    peer[at], seq[at] = np.where(doubtful, NOBODY, data["peer"][told]), data["seq"][told]
    return peer, seq


def _held(records: Records, rows: Int64Array, thread: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """From when to when the thread was held until each was done, by which record; -1 where no wait was recorded."""
    data = records.data
    asynchronous = (data["flags"][rows] & Flag.ASYNC) != 0
    begin_ns = np.where(asynchronous, -1, data["start_ns"][rows].astype(np.int64))
    end_ns = np.maximum(data["end_ns"][rows].astype(np.int64), begin_ns)
    by = rows.copy()
    wait, at = find_referring(data, records.numbers, Kind.WAIT, rows)
    usable = (data["thread"][wait] == thread) & ((data["flags"][wait] & _UNUSABLE) == 0)
    wait, at = wait[usable][::-1], at[usable][::-1]  # of several waits the first stays
    begin_ns[at], end_ns[at], by[at] = data["start_ns"][wait], data["end_ns"][wait], wait
    return begin_ns, np.maximum(end_ns, begin_ns), by


@dataclass(frozen=True)
class Exchanged:
    """Points of transfers of which both sides are known, as columns.

    Attributes:
        column: whose it is.
        index: which of that rank's points.
        held: it held the thread; else it was issued there.
        receives: of the receiver.
        other: for one that held the place here of the other side's issue; -1 for issues.
    """

    column: Int64Array
    index: Int64Array
    held: Mask
    receives: Mask
    other: Int64Array

    def rows(self, ranks: int) -> Int64Array:
        """Each as a row that has its index in its rank's column, and -1 elsewhere."""
        found = np.full((len(self.column), ranks), -1, dtype=np.int64)
        found[np.arange(len(self.column)), self.column] = self.index
        return found


def pair_transfers(
    ranks: Sequence[int],
    groups: Sequence[Int64Array],
    points: Sequence[npt.NDArray[np.void]],
    chosen: Sequence[Int64Array],
) -> Exchanged:
    """Match what ranks issued and waited for.

    Args:
        ranks: the rank of each column.
        groups: for each rank a code, the same for all ranks, of each of the groups that its points refer to.
        points: of each rank.
        chosen: which points of each rank are of transfers.
    """
    column = np.concatenate([np.full(len(rows), place, dtype=np.int64) for place, rows in enumerate(chosen)])
    index = np.concatenate(list(chosen)).astype(np.int64)
    found = np.concatenate([each[rows] for each, rows in zip(points, chosen, strict=True)])
    group = np.concatenate(
        [codes[each["group"][rows]] for codes, each, rows in zip(groups, points, chosen, strict=True)]
    )
    keys = [group, *(found[name].astype(np.int64) for name in _KEY)]
    order = np.lexsort(keys[::-1])
    fresh = np.zeros(len(found), dtype=np.bool_)
    for key in keys:
        fresh[1:] |= np.diff(key[order]) != 0
    transfer = np.empty(len(found), dtype=np.int64)
    transfer[order] = np.cumsum(fresh)
    receives: Mask = np.array(ranks, dtype=np.int64)[column] == found["receiver"]
    held: Mask = found["held"]
    # Where each side of each transfer was issued; the first where a number came twice.
    issued = np.full((int(fresh.sum()) + 1, 2), -1, dtype=np.int64)
    places = np.flatnonzero(~held)[::-1]
    issued[transfer[places], receives[places].astype(np.int64)] = places
    other = issued[transfer, 1 - receives.astype(np.int64)]
    kept = np.flatnonzero(other >= 0)
    place = np.full(len(found), -1, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return Exchanged(column[kept], index[kept], held[kept], receives[kept], np.where(held, place[other], -1)[kept])
