"""How fast collectives carried their data: algorithm bandwidth and bus bandwidth.

The formulas are those of NCCL's tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): with S bytes among
n ranks in t seconds the algorithm bandwidth is S/t. The bus bandwidth is that times 2(n-1)/n for an all-reduce, and
times (n-1)/n for an all-gather, a reduce-scatter and an all-to-all: it can be compared with what a link can do,
whatever n. S is the size of the whole: of an all-gather n times what each rank puts in.

A rank's time in a collective is waiting for the last one to come, and then the transfer. The last one does not wait:
the shortest time of all ranks of the group is taken, and only where all of them are known. That holds for operations
that nobody leaves before everybody has come; the root of a broadcast and the sender of a message may leave before the
data has arrived, so these have no bandwidth here. Times that measure a transfer are those of blocking calls on the
host, of events on the stream around an operation, and the flight recorder's; not the time from an asynchronous call to
the end of its wait, which the program chooses, nor that of a call that only enqueues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lens_auto import semconv
from lens_auto.iteration.device_times import operation_times
from lens_auto.iteration.rule import Int64Array, Mask
from lens_auto.recorder.layout import Flag, Kind

_ALL_REDUCE = ("all_reduce", "all_reduce_coalesced")
_ALL_GATHER = (
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced"),
    "all_gather_into_tensor_coalesced",
)
_SCATTERED = (
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "all_to_all", "all_to_all_single"),
)
OPERATIONS = frozenset((*_ALL_REDUCE, *_ALL_GATHER, *_SCATTERED))
_TIMINGS = (semconv.TIMING_HOST, semconv.TIMING_CUDA_EVENT, semconv.TIMING_FLIGHT_RECORDER)
_FAR = np.iinfo(np.int64).max

TRANSFER_DTYPE = np.dtype(
    [
        ("operation", "<u4"),  # string ids of the writer
        ("group", "<u4"),
        ("init", "<i8"),
        ("seq", "<i8"),
        ("bytes", "<i8"),
        ("group_size", "<i8"),
        ("took_ns", "<i8"),
        ("timing", "u1"),  # index into _TIMINGS
    ]
)
Transfers = npt.NDArray[np.void]


@dataclass
class Bandwidth:
    """Of one operation among so many ranks.

    Attributes:
        timing: how the times were taken, as `lens.timing_source` has it.
        count: collectives, each counted once.
        bytes: S of all of them together.
        algorithm, bus: bytes a second, all bytes over all of the time.
    """

    operation: str
    group_size: int
    timing: str
    count: int
    bytes: int
    algorithm: float
    bus: float


def whole_bytes(operation: str, nbytes: int, group_size: int) -> int:
    """S of an operation into which each rank puts so many bytes."""
    return nbytes * group_size if operation in _ALL_GATHER else nbytes


def bus_factor(operation: str, group_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    share = (group_size - 1) / group_size
    return 2 * share if operation in _ALL_REDUCE else share


def find_transfers(data: npt.NDArray[np.void], numbers: Int64Array, string: Callable[[int], str]) -> Transfers:
    """The collectives of one writer whose times say how long the transfer took, at the most.

    Args:
        data: its records.
        numbers: their numbers, ascending.
        string: text of a string id.
    """
    known = [name for name in np.unique(data["name"]).tolist() if string(name) in OPERATIONS]
    wanted = (data["kind"] == Kind.COLLECTIVE) & np.isin(data["name"], known) & (data["seq"] >= 0)
    wanted &= (data["bytes"] > 0) & (data["group_size"] > 1)
    wanted &= (data["flags"] & Flag.FAILED) == 0
    rows = np.flatnonzero(wanted)
    times = operation_times(data, numbers, rows)
    start_ns, end_ns = data["start_ns"][rows].astype(np.int64), data["end_ns"][rows].astype(np.int64)
    by_device = times.duration_ns > 0
    blocking = ((data["flags"][rows] & (Flag.ASYNC | Flag.ENQUEUE | Flag.FLIGHT)) == 0) & (end_ns > start_ns)
    found = np.zeros(len(rows), dtype=TRANSFER_DTYPE)
    found["operation"] = data["name"][rows]
    for name in ("group", "init", "seq", "bytes", "group_size"):
        found[name] = data[name][rows]
    found["took_ns"] = np.where(by_device, times.duration_ns, end_ns - start_ns)
    found["timing"] = np.where(by_device, np.where(times.by_flight, 2, 1), 0)
    kept: Transfers = found[by_device | blocking]
    return kept


def _transfer_times(found: Sequence[Transfers], strings: Sequence[Callable[[int], str]]) -> list[Int64Array]:
    """How long the transfer of each collective took, for each writer in the order of its transfers; -1 unknown.

    Args:
        found: of the ranks of one attempt.
        strings: text of a string id, of each of them.
    """
    if not found:
        return []
    everything = np.concatenate(found)
    texts = (_coded(found, strings, name) for name in ("group", "operation"))
    columns = (everything[name] for name in ("init", "group_size", "bytes", "seq"))
    which = np.zeros(len(everything), dtype=np.int64)
    count = np.array([len(everything)])
    for column in (*texts, *columns):
        if len(column) and column.min() != column.max():
            values, inverse = np.unique(column, return_inverse=True)
            _, which, count = np.unique(which * len(values) + inverse, return_inverse=True, return_counts=True)
    shortest = np.full(len(count), _FAR, dtype=np.int64)
    np.minimum.at(shortest, which, everything["took_ns"])
    complete: Mask = count[which] == everything["group_size"]  # (another size on one rank: it is not among these)
    took = np.where(complete, shortest[which], -1)
    return np.split(took, np.cumsum([len(each) for each in found])[:-1])


def _coded(found: Sequence[Transfers], strings: Sequence[Callable[[int], str]], name: str) -> Int64Array:
    """A column of texts as numbers that mean the same on all writers."""
    codes: dict[str, int] = {}
    parts = []
    for transfers, string in zip(found, strings, strict=True):
        unique, inverse = np.unique(transfers[name], return_inverse=True)
        own = [codes.setdefault(string(each), len(codes)) for each in unique.tolist()]
        parts.append(np.array(own, dtype=np.int64)[inverse])
    return np.concatenate(parts)


def bandwidths(found: Sequence[Transfers], strings: Sequence[Callable[[int], str]]) -> list[Bandwidth]:
    """The bandwidth of every operation, by size of the group and by how times were taken.

    Args:
        found: transfers of the ranks of one attempt.
        strings: text of a string id, of each of them.
    """
    totals: dict[tuple[str, int, int], list[float]] = {}
    for transfers, took, string in zip(found, _transfer_times(found, strings), strings, strict=True):
        known = took > 0
        transfers, took = transfers[known], took[known]
        # (As one number: NumPy sorts structures a hundred times as slowly.)
        keys = transfers["operation"].astype(np.int64) << 34 | transfers["group_size"].astype(np.int64) << 2
        keys |= transfers["timing"]
        for key in np.unique(keys).tolist():
            of = keys == key
            operation, size, timing = string(key >> 34), key >> 2 & 0xFFFFFFFF, key & 3
            whole = whole_bytes(operation, int(transfers["bytes"][of].sum()), size)
            total = totals.setdefault((operation, size, timing), [0, 0, 0])
            # Every rank of the group has it.
            total[0] += int(np.count_nonzero(of)) / size
            total[1] += whole / size
            total[2] += int(took[of].sum()) / size
    return [
        Bandwidth(
            operation,
            size,
            _TIMINGS[timing],
            round(count),
            round(whole),
            whole / took_ns * 1e9,
            whole / took_ns * 1e9 * bus_factor(operation, size),
        )
        for (operation, size, timing), (count, whole, took_ns) in sorted(totals.items())
    ]
