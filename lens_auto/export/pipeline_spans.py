"""Pipelines: what the records of microbatches and of transfers between stages become. Pure functions of one record.

A transfer's id is made of what both ends know of it (`docs/ids.md`, domain `pipeline`): the receiver computes the
sender's and links to it. The schedule call is counted over the whole run, so no iteration number is in it: ranks whose
live predictions differ, or that have no optimizer, still name the same span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lens_auto import semconv
from lens_auto.recorder import ids
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MICROBATCH_KINDS = (Kind.PIPELINE_FORWARD, Kind.PIPELINE_BACKWARD)
TRANSFER_KINDS = (Kind.PIPELINE_SEND, Kind.PIPELINE_RECV)
KINDS = MICROBATCH_KINDS + TRANSFER_KINDS

FORWARD = "forward"
BACKWARD = "backward"

_FAILED = int(Flag.FAILED)
_ASYNC = int(Flag.ASYNC)
_COALESCED = int(Flag.COALESCED)

_NAMES = {
    (Kind.PIPELINE_SEND, FORWARD): semconv.SPAN_PIPELINE_SEND_FORWARD,
    (Kind.PIPELINE_SEND, BACKWARD): semconv.SPAN_PIPELINE_SEND_BACKWARD,
    (Kind.PIPELINE_RECV, FORWARD): semconv.SPAN_PIPELINE_RECV_FORWARD,
    (Kind.PIPELINE_RECV, BACKWARD): semconv.SPAN_PIPELINE_RECV_BACKWARD,
}


class Record(Protocol):
    """The fields that are read here; strings are still numbers. See `recorder.layout`."""

    @property
    def kind(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def a(self) -> int: ...
    @property
    def b(self) -> int: ...
    @property
    def c(self) -> int: ...
    @property
    def init(self) -> int: ...


# --- ids --------------------------------------------------------------------------------------------------------------


def transfer_span_id(
    seed: bytes,
    group: str,
    init: int,
    call: int,
    sender: int,
    stage: int,
    target_stage: int,
    microbatch: int,
    direction: str,
) -> bytes:
    """The span of sending one microbatch's activation or gradient; the receiver computes the same.

    Args:
        seed: the run's.
        group: torch's name of the pipeline's process group.
        init: ordinal of `init_process_group`, from 1.
        call: the schedule call, counted from 0 per group and init.
        sender: global rank; it tells data-parallel replicas apart.
        stage, target_stage: the sending and the receiving stage of the whole pipeline.
        microbatch: its number in the call.
        direction: `forward` (activation) or `backward` (gradient).
    """
    return ids.derive(
        ids.SPAN_ID_BYTES, "pipeline", seed, group, init, call, sender, stage, target_stage, microbatch, direction
    )


def send_span_id(record: Record, seed: bytes, rank: int, group: str, direction: str) -> bytes | None:
    """The derived id of a rank's PIPELINE_SEND record; None where it failed, or where its microbatch is unknown."""
    if record.kind != Kind.PIPELINE_SEND or rank < 0 or record.seq < 0 or record.flags & _FAILED:
        return None
    return transfer_span_id(seed, group, record.init, record.a, rank, record.b, record.c, record.seq, direction)


def sender_span_id(record: Record, seed: bytes, group: str, direction: str) -> bytes | None:
    """The id of the span that a PIPELINE_RECV record links to; None where it cannot be told."""
    if record.kind != Kind.PIPELINE_RECV or record.peer < 0 or record.seq < 0 or record.flags & _FAILED:
        return None
    return transfer_span_id(seed, group, record.init, record.a, record.peer, record.c, record.b, record.seq, direction)


# --- names and attributes ---------------------------------------------------------------------------------------------


def span_name(record: Record, name: str) -> str:
    """Name of a record's span; `name` is the record's, what was computed or carried."""
    if record.kind == Kind.PIPELINE_FORWARD:
        return semconv.SPAN_PIPELINE_FORWARD
    if record.kind == Kind.PIPELINE_BACKWARD:
        return semconv.SPAN_PIPELINE_BACKWARD
    return _NAMES[Kind(record.kind), name if name == BACKWARD else FORWARD]


def attributes(record: Record, rank: int, group: str, dtype: str) -> dict[str, str | bool | int]:
    """Attributes of a record's span, without those that every span has and those that its waits decide.

    Args:
        record: of one of `KINDS`.
        rank: global rank of the writer.
        group, dtype: the record's strings, resolved.
    """
    found: dict[str, str | bool | int] = {semconv.DL_PIPELINE_STAGE: record.b}
    if record.seq >= 0:
        found[semconv.DL_MICROBATCH_ID] = record.seq
    if record.kind in MICROBATCH_KINDS:
        return found
    found[semconv.PIPELINE_RANK] = rank
    if record.kind == Kind.PIPELINE_RECV:
        found[semconv.PIPELINE_FROM_RANK] = record.peer
    if record.seq >= 0:
        found[semconv.PIPELINE_MICROBATCH_ID] = record.seq
    if group:
        found[semconv.DL_COMM_GROUP] = group
    found[semconv.DL_COMM_GROUP_SIZE] = record.group_size
    found[semconv.DL_COMM_BYTES] = record.bytes
    if dtype:
        found[semconv.DL_COMM_DTYPE] = dtype
    found[semconv.DL_COMM_PEER] = record.peer
    found[semconv.DL_COMM_ASYNC] = bool(record.flags & _ASYNC)
    if record.flags & _COALESCED:
        found[semconv.DL_COMM_COALESCED] = True
    return found


# --- point to point: what became known later --------------------------------------------------------------------------


def apply_receive_sources(data: npt.NDArray[np.void], numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Receives as they are known at the end: the last RECV_SOURCE record that refers to one corrects it.

    Args:
        data: one writer's records.
        numbers: their numbers, ascending.

    Returns:
        The records with peer, seq and the AMBIGUOUS flag of those receives replaced; the same array where there is
        nothing to replace, else a copy.
    """
    import numpy as np

    from lens_auto.recorder.read import find_referring

    receives = np.flatnonzero(data["kind"] == Kind.RECV)
    later, at = find_referring(data, numbers, Kind.RECV_SOURCE, receives)
    if not len(later):
        return data
    corrected = data.copy()
    ambiguous = np.uint32(Flag.AMBIGUOUS)
    for row, source in zip(receives[at].tolist(), later.tolist(), strict=True):
        corrected["peer"][row] = data["peer"][source]
        corrected["seq"][row] = data["seq"][source]
        corrected["flags"][row] &= ~ambiguous
        corrected["flags"][row] |= data["flags"][source] & ambiguous
    return corrected
