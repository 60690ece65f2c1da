"""What torch itself knows of process groups and of operations under way, asked from outside of the training thread.

Private names of torch are reached here alone, by feature detection (seen in 2.13: `_world.pg_names`,
`_world.pg_group_ranks`, `_get_sequence_number_for_group`, `_dump_fr_trace`). Nothing here imports torch, takes
part in a collective, or touches a store.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lens_auto.recorder import captures

_C10D = "torch.distributed.distributed_c10d"
# What the variable was called before 2.6 is still read.
FLIGHT_RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
TIMING_VARIABLE = "TORCH_NCCL_ENABLE_TIMING"
_DEFAULT_CAPACITY = 2000
# The first is for every backend (2.7 and later), the other NCCL's own.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


class Group(NamedTuple):
    """A process group that this rank is in.

    Attributes:
        name: torch's name of it, the same on all members.
        description: what the program called it; empty where it did not.
        ranks: global ranks of its members.
        issued: how many operations this rank has issued on it; raises where the backend does not count.
    """

    name: str
    description: str
    ranks: list[int]
    issued: Callable[[], int]


def process_groups() -> list[Group]:
    """The process groups of this process, in the order in which they were made.

    Raises:
        Exception: torch changed, or changes them at this moment; asking again later may help.
    """
    world = getattr(sys.modules.get(_C10D), "_world", None)
    if world is None:
        return []
    found = []
    for group, name in list(world.pg_names.items()):
        ranks = sorted(world.pg_group_ranks.get(group, {}))
        description = str(getattr(group, "group_desc", "") or "")
        if description in ("undefined", "default_pg"):
            description = ""
        found.append(Group(str(name), description, ranks, group._get_sequence_number_for_group))
    return found


_kept: bool | None = None


def keeps_flight_records() -> bool:
    """Whether torch's flight recorder is on in this job; ask once operations have been issued.

    Nobody but the job switches it: by these variables, or by torch's default (2.13: on for every backend).
    """
    global _kept
    if _kept is None:
        if flight_capacity() == 0:
            return False
        if not captures.under_way():
            _kept = bool(flight_entries())
    return bool(_kept)


def times_operations() -> bool:
    """Whether the job has NCCL time its operations, so that the flight recorder knows how long each took (2.2 to 2.13).

    Nobody but the job switches it on: it costs two more events an operation.
    """
    return os.environ.get(TIMING_VARIABLE, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")


def flight_capacity() -> int:
    """How many operations the flight recorder keeps, where it is on."""
    for variable in FLIGHT_RECORDER_VARIABLES:
        value = os.environ.get(variable, "").strip()
        if value.isdigit():
            return int(value)
    return _DEFAULT_CAPACITY


def flight_entries(only_active: bool = False) -> list[dict[str, Any]]:
    """The entries of torch's flight recorder, oldest first; none where it is off or this torch has none, or while a
    CUDA graph is captured: NCCL's looks at events.

    Takes about 20 us an entry, and a lock of the recorder that operations take as well.
    """
    if captures.under_way():
        return []
    import pickle  # torch has imported it

    module = sys.modules.get("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is None:
            continue
        found = pickle.loads(dump(True, False, only_active))  # torch's own, from this process: no stacks
        entries = found.get("entries") if isinstance(found, dict) else None
        if entries:
            return [entry for entry in entries if isinstance(entry, dict)]
    return []


def wall_offset_ns() -> int:
    """What is to be added to a wall clock stamp of torch's, to have it on our monotonic clock."""
    best, offset = 1 << 62, 0
    for _ in range(3):  # the thread may be put aside between the two
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if after - before < best:
            best, offset = after - before, before - wall
    return offset


def operation_of(entry: dict[str, Any]) -> str:
    """`all_reduce` of a flight recorder entry's `gloo:all_reduce`."""
    return str(entry.get("profiling_name", "")).partition(":")[2] or "unknown"


# c10's name of a type -> torch's, and bytes of an element.
_TYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
}


def payload_of(entry: dict[str, Any]) -> tuple[int, str]:
    """Bytes that a flight recorder entry puts in, and the name of their type."""
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    total, name = 0, ""
    for index, shape in enumerate(sizes):
        name, size = _TYPES.get(str(types[min(index, len(types) - 1)]) if types else "", ("", 0))
        count = 1
        for length in shape:
            count *= int(length)
        total += count * size
    return total, name
