"""The bytes on disk: records, segments, the live file. Writers pack them, readers map them; nobody else knows offsets.

All integers are little-endian. Every file starts with a magic, a format version and (segments) its own field table, so
that a reader of another version can say what it met instead of guessing.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mmap

FORMAT_VERSION = 1
PAGE_BYTES = 4096

# --- records ----------------------------------------------------------------------------------------------------------

RECORD_FIELDS: tuple[tuple[str, str], ...] = (
    ("start_ns", "u8"),  # monotonic clock of the host
    ("end_ns", "u8"),  # 0: the end is not known (yet)
    ("seq", "i8"),  # collective: torch's sequence number; send/recv: k; fetch: batch index; -1 unknown
    ("bytes", "u8"),
    ("exposed_ns", "u8"),  # how long the calling thread was held by the operation
    ("iteration", "u4"),  # the number the writer predicted when it wrote; readers apply the rule again
    ("flags", "u4"),  # Flag
    ("dtype", "u4"),  # string id
    ("thread", "u2"),  # index of the thread in its process, 0 is the first that recorded
    ("reserved0", "u2"),
    # The operation, as a slot of the live page has it.
    ("kind", "u2"),  # Kind
    ("reserved1", "u2"),
    ("name", "u4"),  # string id: operation, class, path
    ("group", "u4"),  # string id: torch's name of the process group
    ("group_size", "u4"),
    ("peer", "i4"),  # global rank at the other end; -1 none or unknown
    ("tag", "i4"),
    ("detail", "u4"),  # string id: exception type, group description, device
    ("init", "u4"),  # ordinal of the init_process_group in this process, from 1; 0 before the first
    ("ref", "u8"),  # number + 1 of the record of the same writer that this one completes; 0 none
    ("a", "u8"),  # per kind, see Kind
    ("b", "u8"),
    ("c", "u8"),
    ("reserved2", "u4"),
    ("commit", "u4"),  # index in the segment + 1, written last: anything else means the record is not there
)
_CODES = {"u8": "Q", "i8": "q", "u4": "I", "i4": "i", "u2": "H"}
RECORD = struct.Struct("<" + "".join(_CODES[code] for _, code in RECORD_FIELDS))
RECORD_BYTES = 128
OPERATION = struct.Struct("<HxxIIIii")  # kind ... tag
pack_operation = OPERATION.pack
# The same record, of a collective that did not fail: its operation packed before, and 0 in detail, ref, a, b, c.
COLLECTIVE_RECORD = struct.Struct(f"<QQqQQIIIHxx{OPERATION.size}s4xI36xI")
assert RECORD.size == COLLECTIVE_RECORD.size == RECORD_BYTES


class Kind(enum.IntEnum):
    """What a record is about, and what its free fields `a`, `b`, `c` hold."""

    OPTIMIZER_STEP = 1  # name: class; a: ordinal of the optimizer, in order of first step; b: iteration counts it (0/1)
    BOUNDARY = 2  # the live prediction closed `iteration` at start_ns; a: steps in it
    BACKWARD = 3
    FETCH = 4  # one batch; a: pass (one per DataLoader.__iter__); b: workers; c: the loader's batch size, 0 unknown
    LOADER_START = 5  # DataLoader.__iter__; a: pass; b: workers
    COLLECTIVE = 6
    SEND = 7  # seq: k, counted from 0 per (group, from, to, tag)
    RECV = 8
    WAIT = 9  # ref: the operation waited for
    MODEL_INIT = 10  # name: the wrapper class
    CHECKPOINT_SAVE = 11  # name: path; bytes: file size
    CHECKPOINT_LOAD = 12
    PROCESS_GROUP = 13  # name: init_process_group, new_group ...; group: the group made; detail: its description
    # Pipelines. group: the pipeline's; seq: microbatch, -1 unknown; a: schedule call, counted from 0 per (init, group);
    # b: stage, counted over the whole pipeline. name: forward or backward, what is computed or carried.
    PIPELINE_FORWARD = 14  # one microbatch of a stage
    PIPELINE_BACKWARD = 15  # name also: backward_input, backward_weight, where the schedule splits it
    PIPELINE_SEND = 16  # one microbatch's activation or gradient, all its tensors; peer: its rank; c: its stage
    PIPELINE_RECV = 17  # the same; COALESCED: posted together with other transfers, and waited for with them
    PIPELINE_CALL = 18  # the schedule call itself, never a span; name: the schedule; b: 1 with backward, 0 without
    RECV_SOURCE = 19  # ref: a RECV, of which more is known now; peer, seq: whose send it was, or AMBIGUOUS
    HANG = 20  # start: since when; end: when it was noticed; name, group, seq, peer: of the operation; a: its Phase;
    # b: its Kind, 0 where a phase or the flight recorder told; detail: file with the stacks, in the writer's folder
    FSDP = 21  # a parameter group of FSDP2; name: unshard, wait_for_unshard, reduce_scatter; detail: its module
    DDP = 22  # from the reducer's own logger; name: forward, backward, communication; a: iteration of the reducer; of
    # communication b: overlap with backward, ns; c: buckets, 0 where the flight recorder has them; detail: their sizes
    # By events of a device (recorder/device.py). Start and end are the host's stamps of what was measured.
    DEVICE_TIME = 23  # ref: the operation; a: ns on its stream; b: device clock at its start; c: DeviceTime
    DEVICE_MARK = 24  # the phase changed; a: ns since the mark before; b: device clock; c: DeviceTime
    DEVICE_MEMORY = 25  # at the end of an iteration; a: bytes allocated; b: reserved; c: peak allocated.
    # All that was measured in the iteration was written before it. (peer: index of the device.)
    DEVICE_WAIT = 26  # in a slot only: the program waits for a device; name: by which call


class Flag(enum.IntFlag):
    """Properties of a record."""

    SPAN = 1  # its span group was on: it becomes a span. Without it, it only feeds the rules for iterations and phases
    ASYNC = 2
    COALESCED = 4  # one wait or call that covers several operations
    SKIPPED = 8  # GradScaler found an inf: the optimizer did not step
    FAILED = 16  # it ended in an exception; detail: its type
    IN_BACKWARD = 32  # an optimizer step issued from inside backward
    EXHAUSTED = 64  # the fetch ended the pass (StopIteration)
    ENQUEUE = 128  # host time of an enqueued device operation: lens.timing_source = host_enqueue
    ANY_SOURCE = 256
    AMBIGUOUS = 512  # a receive whose send cannot be told
    END_UNKNOWN = 1024  # it will not be completed by a WAIT: what followed it bypasses Work.wait
    FLIGHT = 2048  # from torch's flight recorder: it exists, its start is when it was created
    MEASURED = 4096  # events were recorded around it: a DEVICE_TIME is to come


class DeviceTime(enum.IntFlag):
    """What a time that events of a device measured says."""

    WAIT = 1  # how long the stream was held by the wait for the operation, not how long the operation took
    CLOCK = 2  # b is known: the writer's device clock, ns since its first event on the stream of its training thread
    EXPOSED = 4  # it was on that stream, which was held for as long


# --- segments ---------------------------------------------------------------------------------------------------------

SEGMENT_MAGIC = b"LENSSEG\n"
SEGMENT_RECORDS = 32_768
SEGMENT_HEADER_BYTES = PAGE_BYTES
SEGMENT_BYTES = SEGMENT_HEADER_BYTES + SEGMENT_RECORDS * RECORD_BYTES
SEGMENT_SUFFIX = ".seg"

# magic, version, record bytes, capacity, segment number, writer nonce, pid, rank, monotonic ns, wall ns, JSON bytes;
# then JSON: {"fields": [[name, numpy type], ...]}.
SEGMENT_HEADER = struct.Struct("<8sIIIIQiiQQI")


def segment_name(number: int) -> str:
    """File name of a writer's n-th segment."""
    return f"{number:08d}{SEGMENT_SUFFIX}"


# --- the live file ----------------------------------------------------------------------------------------------------

LIVE_MAGIC = b"LENSLIV\n"
LIVE_BYTES = PAGE_BYTES
LIVE_NAME = "live"

# magic, version, pid, start ticks of the process (field 22 of /proc/<pid>/stat), nonce, rank, world size, local rank
LIVE_HEAD = struct.Struct("<8sIiQQiii")
LIVE_STATE_OFFSET = 128  # u32 WriterState
LIVE_HEARTBEAT_OFFSET = 136  # monotonic ns, wall ns
LIVE_HEARTBEAT = struct.Struct("<QQ")
LIVE_PHASE_OFFSET = 192  # begin, phase, iteration, since ns, steps ever, fetches ever, end (begin == end: consistent)
LIVE_PHASE = struct.Struct("<IIQQQQI")
LIVE_COUNTERS_OFFSET = 320  # records written (all segments), records dropped, hook faults, bytes kept, segments made
LIVE_COUNTERS = struct.Struct("<QQQQQ")
# Operations that this rank has issued so far (u64 each), in the order of `process_groups` in writer.json.
LIVE_ISSUED_OFFSET = 384
LIVE_ISSUED_COUNT = 80
LIVE_SLOTS_OFFSET = 1024
assert LIVE_ISSUED_OFFSET + 8 * LIVE_ISSUED_COUNT <= LIVE_SLOTS_OFFSET
LIVE_SLOT_BYTES = 128
LIVE_SLOTS = (LIVE_BYTES - LIVE_SLOTS_OFFSET) // LIVE_SLOT_BYTES
# A slot is one cache line, written by a single C call: begin (`slot_mark`), start, bytes, dtype, OPERATION, end (the
# mark again; begin == end: consistent). Behind it, written once: which thread's it is.
LIVE_SLOT = struct.Struct(f"<qQQI{OPERATION.size}s4xq")
LIVE_SLOT_KIND_OFFSET = 28  # u16: 0 is an empty slot, so that clearing is one aligned store
LIVE_SLOT_OWNER_OFFSET = 64
LIVE_SLOT_OWNER = struct.Struct("<HxxI")  # index of the thread, native thread id
assert LIVE_SLOT.size == LIVE_SLOT_OWNER_OFFSET


class Slot(NamedTuple):
    """An operation that a thread is in. Names are string ids.

    Attributes:
        slot: which of the page.
        consistent: whether it was read whole, and not while it was written.
    """

    slot: int
    consistent: bool
    kind: int
    thread: int
    native_id: int
    name: int
    group: int
    group_size: int
    peer: int
    tag: int
    start_ns: int
    seq: int
    bytes: int
    dtype: int

    @property
    def kind_name(self) -> str:
        """The kind in lower case, or its number where it is unknown."""
        try:
            return Kind(self.kind).name.lower()
        except ValueError:
            return f"kind {self.kind}"


def slot_mark(seq: int, start_ns: int) -> int:
    """What begins and ends a slot: the sequence number, another one than that of the operation before; where there is
    none the start, negative. (A small number is packed in less time than the start.)
    """
    return seq if seq >= 0 else -start_ns


def slot_offset(index: int) -> int:
    """Where the n-th slot of a live page lies."""
    return LIVE_SLOTS_OFFSET + index * LIVE_SLOT_BYTES


def read_slot(page: mmap.mmap | bytearray | bytes, index: int) -> Slot:
    """The n-th slot of a live page; its kind is 0 where the thread is in no operation."""
    offset = slot_offset(index)
    begin, start, nbytes, dtype, operation, end = LIVE_SLOT.unpack_from(page, offset)
    kind, name, group, size, peer, tag = OPERATION.unpack(operation)
    thread, native_id = LIVE_SLOT_OWNER.unpack_from(page, offset + LIVE_SLOT_OWNER_OFFSET)
    consistent, seq = begin == end, max(begin, -1)
    return Slot(index, consistent, kind, thread, native_id, name, group, size, peer, tag, start, seq, nbytes, dtype)


class WriterState(enum.IntEnum):
    """How a writer's live file says it stands. RUNNING with a dead process: it was killed."""

    RUNNING = 1
    CLOSED = 2


class Phase(enum.IntEnum):
    """What the training thread is in, as far as hooks can tell while it happens."""

    OTHER = 0
    DATA_LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    EVALUATE = 5
    CHECKPOINT = 6
    START_UP = 7


# --- side files of a writer -------------------------------------------------------------------------------------------

STRINGS_NAME = (
    "strings"  # JSON lines: a header object, then the strings; the n-th line after the header has id n (from 1)
)
STRINGS_FORMAT = "lens-strings"
WRITER_NAME = "writer.json"
HANG_NAME = "hang.json"  # what a rank was in when nothing happened any more, see recorder/hang.py
EXIT_NAME = "exit.json"  # how the process ended, as its launcher saw it, see recorder/exits.py
RANKS_DIR = "ranks"
MANIFEST_NAME = "manifest.json"
