"""Read what writers left: run directories, segments and live files, as NumPy columns.

Nothing read here is trusted. A file that is truncated, empty, of another version or not ours at all raises
`UnreadableFile` and nothing else; what a header claims never decides how much memory is taken. Files are read rather
than mapped: the writer of a running job cuts and moves its segments, and a map of a file that was cut ends the reader
with SIGBUS.
"""

from __future__ import annotations

import enum
import json
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from lens_auto.recorder import layout
from lens_auto.recorder.layout import FORMAT_VERSION, RECORD_FIELDS, SEGMENT_RECORDS, Kind, Phase, Slot, WriterState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

RUN_FORMAT = "lens-run"
WRITER_FORMAT = "lens-writer"

RECORD_DTYPE = np.dtype([(name, "<" + code) for name, code in RECORD_FIELDS])
assert RECORD_DTYPE.itemsize == layout.RECORD_BYTES
_MAX_REF = np.uint64(1 << 62)  # what is more was never written by a recorder

RecordArray: TypeAlias = "npt.NDArray[np.void]"
_T = TypeVar("_T")

_INT64_MAX = (1 << 63) - 1
_JSON_LIMIT_BYTES = 4 << 20
_STRINGS_LIMIT_BYTES = 256 << 20
_READ_ATTEMPTS = 20
_SHOWN_CHARACTERS = 60
_UNNAMED = "names are shown as numbers"
_SEGMENT_FILE = re.compile(r"(\d{8,10})\.seg")
_FIELD_TYPE = re.compile(r"[<|]?([ui][1248])")


class UnreadableFile(Exception):
    """A file that cannot be read; the message is one line: the path, what was found, what is valid, what happens now.

    Attributes:
        path: the file.
        found: what is wrong with it.
        valid: what was expected; empty where there is nothing to say.
        consequence: what happens now.
        missing: there is no such file.
    """

    def __init__(self, path: str | Path, found: str, valid: str, consequence: str, *, missing: bool = False) -> None:
        self.path = Path(path)
        self.found = found
        self.valid = valid
        self.consequence = consequence
        self.missing = missing
        super().__init__("; ".join(part for part in (f"{_shown_path(path)}: {found}", valid, consequence) if part))


def _shown_path(path: str | Path) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _knows_versions() -> str:
    return f"this reader knows {FORMAT_VERSION}"


# --- files ------------------------------------------------------------------------------------------------------------


def _open(path: Path, consequence: str) -> tuple[int, int]:
    """Open a regular file; its descriptor and size. A pipe or device in its place would block or never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnreadableFile(path, "there is no such file", "", consequence, missing=True) from None
    except (OSError, ValueError) as error:
        raise UnreadableFile(path, getattr(error, "strerror", None) or str(error), "", consequence) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise UnreadableFile(path, "not a regular file", "", consequence)
    return descriptor, found.st_size


def _read_whole(path: Path, limit_bytes: int, consequence: str) -> bytes:
    descriptor, size = _open(path, consequence)
    with os.fdopen(descriptor, "rb") as file:
        if size > limit_bytes:
            raise UnreadableFile(path, f"{size} bytes", f"at most {limit_bytes} are valid", consequence)
        try:
            return file.read(size)
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error), "", consequence) from None


def _read_json(path: Path, file_format: str, consequence: str) -> dict[str, Any]:
    """A JSON object that names its format and version."""
    data = _read_whole(path, _JSON_LIMIT_BYTES, consequence)
    valid = f'a JSON object with "format": "{file_format}" is valid'
    try:
        found = orjson.loads(data)
    except ValueError:
        raise UnreadableFile(path, "empty" if not data else "not JSON", valid, consequence) from None
    if not isinstance(found, dict) or found.get("format") != file_format:
        kind = found.get("format") if isinstance(found, dict) else found
        raise UnreadableFile(path, f"format {_shown(kind)}", valid, consequence)
    if found.get("version") != FORMAT_VERSION:
        raise UnreadableFile(path, f"version {_shown(found.get('version'))}", _knows_versions(), consequence)
    return found


def process_is_alive(pid: int, start_ticks: int) -> bool:
    """Whether the process with this id and start (field 22 of /proc/<pid>/stat) still runs here."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0] not in (b"Z", b"X") and int(fields[19]) == start_ticks
    except (OSError, IndexError, ValueError):
        return False


# --- segments ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentHeader:
    """What the first page of a segment says."""

    number: int
    nonce: int
    pid: int
    rank: int
    monotonic_ns: int
    wall_ns: int
    capacity: int
    dtype: np.dtype[np.void]


@dataclass(frozen=True)
class Segment:
    """The committed records of one segment file.

    Attributes:
        header: the file's first page.
        records: committed records, of dtype `RECORD_DTYPE`.
        indices: the place of each in the segment.
        holes: places before the last record that nobody committed.
        damaged: committed records with impossible times, which are left out.
    """

    header: SegmentHeader
    records: RecordArray
    indices: npt.NDArray[np.int64]
    holes: int
    damaged: int


def _segment_header(path: Path, head: bytes, consequence: str) -> SegmentHeader:
    def bad(found: str, valid: str) -> UnreadableFile:
        return UnreadableFile(path, found, valid, consequence)

    if len(head) < layout.SEGMENT_HEADER_BYTES:
        found = f"{len(head)} bytes" if head else "empty"
        raise bad(found, f"a segment starts with a header of {layout.SEGMENT_HEADER_BYTES}")
    unpacked = layout.SEGMENT_HEADER.unpack_from(head)
    magic, version, record_bytes, capacity, number, nonce, pid, rank, monotonic_ns, wall_ns, json_bytes = unpacked
    if magic != layout.SEGMENT_MAGIC:
        raise bad(f"not a segment, it starts with {magic!r}", f"{layout.SEGMENT_MAGIC!r} is valid")
    if version != FORMAT_VERSION:
        raise bad(f"version {version}", _knows_versions())
    if not 1 <= capacity <= SEGMENT_RECORDS:
        raise bad(f"capacity {capacity}", f"1 to {SEGMENT_RECORDS} records are valid")
    room = layout.SEGMENT_HEADER_BYTES - layout.SEGMENT_HEADER.size
    if json_bytes > room:
        raise bad(f"a field table of {json_bytes} bytes", f"at most {room} are valid")
    table = head[layout.SEGMENT_HEADER.size : layout.SEGMENT_HEADER.size + json_bytes]
    dtype = _field_table(table, bad)
    if dtype.itemsize != record_bytes:
        raise bad(f"records of {record_bytes} bytes with fields of {dtype.itemsize}", "both must be equal")
    return SegmentHeader(number, nonce, pid, rank, monotonic_ns, wall_ns, capacity, dtype)


def _field_table(table: bytes, bad: Callable[[str, str], UnreadableFile]) -> np.dtype[np.void]:
    """The record type that a segment's field table describes; it has at least the fields that we know."""
    valid = 'a table like {"fields": [["start_ns", "<u8"], ...]} is valid'
    try:
        fields = json.loads(table)["fields"]
        pairs = [(str(name), str(code)) for name, code in fields]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise bad("a damaged field table", valid) from None
    described: list[tuple[str, str]] = []
    for name, code in pairs:
        matched = _FIELD_TYPE.fullmatch(code)
        if matched is None:
            raise bad(f"field {_shown(name)} of type {_shown(code)}", "u1 to u8 and i1 to i8 are valid")
        described.append((name, "<" + matched[1]))
    found = dict(described)
    if len(found) != len(described) or "" in found:
        raise bad("a field table with a repeated or empty name", valid)
    for name, code in RECORD_FIELDS:
        if found.get(name) != "<" + code:
            raise bad(f"a field table with {name!r} as {_shown(found.get(name))}", f"'<{code}' is valid")
    return np.dtype(described)


class _OpenSegment:
    """A segment file with its header read, before its records are."""

    def __init__(self, path: Path, consequence: str) -> None:
        self.path = path
        self._consequence = consequence
        descriptor, self._size = _open(path, consequence)
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        try:
            self.header = _segment_header(path, self._read_head(), consequence)
        except BaseException:
            self._file.close()
            raise
        body = self._size - layout.SEGMENT_HEADER_BYTES
        self.rows = min(self.header.capacity, max(body, 0) // self.header.dtype.itemsize)

    def _read_head(self) -> bytes:
        try:
            return self._file.read(layout.SEGMENT_HEADER_BYTES) or b""
        except OSError as error:
            raise UnreadableFile(self.path, error.strerror or str(error), "", self._consequence) from None

    def read_into(self, target: RecordArray, *, is_last: bool) -> tuple[npt.NDArray[np.int64], int, int]:
        """Read the committed records to the front of `target` (at least `rows` long) and close the file.

        Returns:
            Their indices in the segment, holes, and damaged records.
        """
        with self._file:
            if self.header.dtype == RECORD_DTYPE:
                rows = self._fill(target[: self.rows])
            else:
                raw = np.empty(self.rows, dtype=self.header.dtype)
                rows = self._fill(raw)
                for name in RECORD_DTYPE.names or ():
                    target[name][:rows] = raw[name][:rows]
        found = target[:rows]
        committed = found["commit"] == np.arange(1, rows + 1, dtype=np.uint32)
        written = int(np.count_nonzero(committed))
        last = int(np.flatnonzero(committed)[-1]) + 1 if written else 0
        # The places after the last record of the segment being filled are free, those of an earlier one were lost.
        holes = (last if is_last else rows) - written
        sane = committed & (found["start_ns"] <= _INT64_MAX) & (found["end_ns"] <= _INT64_MAX)
        indices = np.flatnonzero(sane)
        kept = len(indices)
        if kept and int(indices[-1]) != kept - 1:
            target[:kept] = found[sane]
        return indices.astype(np.int64, copy=False), holes, written - kept

    def _fill(self, target: RecordArray) -> int:
        """Read records until the array is full or the file ends (it may have been cut meanwhile); how many."""
        view = target.view(np.uint8).data
        filled = 0
        while filled < len(view):
            try:
                count = self._file.readinto(view[filled:])
            except OSError as error:
                raise UnreadableFile(self.path, error.strerror or str(error), "", self._consequence) from None
            if not count:
                break
            filled += count
        return filled // target.dtype.itemsize


def read_segment(path: str | Path, *, is_last: bool = True) -> Segment:
    """Read one segment file.

    Args:
        path: the file.
        is_last: whether the writer may still fill it: uncommitted places at its end are then no holes.

    Raises:
        UnreadableFile: it is no segment of this version, or damaged.
    """
    opened = _OpenSegment(Path(path), "it is not read")
    records = np.empty(opened.rows, dtype=RECORD_DTYPE)
    indices, holes, damaged = opened.read_into(records, is_last=is_last)
    return Segment(opened.header, records[: len(indices)], indices, holes, damaged)


# --- the live file ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LivePhase:
    """What the training thread was in; `consistent` is false where the writer was caught in the middle of an update."""

    phase: Phase
    iteration: int
    since_ns: int
    steps: int
    fetches: int
    consistent: bool


@dataclass(frozen=True)
class LiveFile:
    """A writer's live page. Times are monotonic nanoseconds of its host unless they say wall."""

    pid: int
    start_ticks: int
    nonce: int
    rank: int
    world_size: int
    local_rank: int
    state: WriterState
    heartbeat_ns: int
    heartbeat_wall_ns: int
    phase: LivePhase
    records: int
    dropped: int
    hook_faults: int
    kept_bytes: int
    segments: int
    issued: tuple[int, ...]  # operations issued, by process group in the order of `process_groups` of writer.json
    slots: tuple[Slot, ...]

    @property
    def consistent(self) -> bool:
        """Whether no group of fields was caught in the middle of an update."""
        return self.phase.consistent and all(slot.consistent for slot in self.slots)


def read_live(path: str | Path) -> LiveFile:
    """Read a live file; a page caught in the middle of an update is read again a few times.

    Raises:
        UnreadableFile: it is no live file of this version, or damaged.
    """
    place = Path(path)
    for _ in range(_READ_ATTEMPTS):
        found = _parse_live(place, _read_whole(place, layout.LIVE_BYTES, "it is not read"))
        if found.consistent:
            break
    return found


def _parse_live(path: Path, page: bytes) -> LiveFile:
    consequence = "it is not read"
    if len(page) != layout.LIVE_BYTES:
        found = f"{len(page)} bytes" if page else "empty"
        raise UnreadableFile(path, found, f"a live file has {layout.LIVE_BYTES}", consequence)
    magic, version, pid, ticks, nonce, rank, world_size, local_rank = layout.LIVE_HEAD.unpack_from(page)
    if magic != layout.LIVE_MAGIC:
        found = f"not a live file, it starts with {magic!r}"
        raise UnreadableFile(path, found, f"{layout.LIVE_MAGIC!r} is valid", consequence)
    if version != FORMAT_VERSION:
        raise UnreadableFile(path, f"version {version}", _knows_versions(), consequence)
    state = int.from_bytes(page[layout.LIVE_STATE_OFFSET : layout.LIVE_STATE_OFFSET + 4], "little")
    if state not in list(WriterState):
        valid = f"{', '.join(f'{each.value} ({each.name.lower()})' for each in WriterState)} are valid"
        raise UnreadableFile(path, f"state {state}", valid, consequence)
    heartbeat_ns, heartbeat_wall_ns = layout.LIVE_HEARTBEAT.unpack_from(page, layout.LIVE_HEARTBEAT_OFFSET)
    counters = layout.LIVE_COUNTERS.unpack_from(page, layout.LIVE_COUNTERS_OFFSET)
    if heartbeat_ns > _INT64_MAX or heartbeat_wall_ns > _INT64_MAX:
        raise UnreadableFile(path, f"heartbeat {heartbeat_ns}", f"at most {_INT64_MAX} is valid", consequence)
    return LiveFile(
        pid=pid,
        start_ticks=ticks,
        nonce=nonce,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        state=WriterState(state),
        heartbeat_ns=heartbeat_ns,
        heartbeat_wall_ns=heartbeat_wall_ns,
        phase=_parse_phase(page),
        records=counters[0],
        dropped=counters[1],
        hook_faults=counters[2],
        kept_bytes=counters[3],
        segments=counters[4],
        issued=struct.unpack_from(f"<{layout.LIVE_ISSUED_COUNT}Q", page, layout.LIVE_ISSUED_OFFSET),
        slots=tuple(_parse_slots(page)),
    )


def _parse_phase(page: bytes) -> LivePhase:
    begin, phase, iteration, since_ns, steps, fetches, end = layout.LIVE_PHASE.unpack_from(
        page, layout.LIVE_PHASE_OFFSET
    )
    known = phase in list(Phase) and since_ns <= _INT64_MAX
    return LivePhase(
        Phase(phase) if known else Phase.OTHER,
        iteration,
        since_ns if known else 0,
        steps,
        fetches,
        begin == end and known,
    )


def _parse_slots(page: bytes) -> Iterator[Slot]:
    for index in range(layout.LIVE_SLOTS):
        slot = layout.read_slot(page, index)
        if slot.kind:
            yield slot


# --- strings ----------------------------------------------------------------------------------------------------------


def read_strings(path: str | Path) -> list[str]:
    """The interned strings of a writer, by id; 0 is the empty string, a line that is damaged reads as "?".

    Raises:
        UnreadableFile: it is no strings file of this version.
    """
    place = Path(path)
    lines = _read_whole(place, _STRINGS_LIMIT_BYTES, _UNNAMED).split(b"\n")
    valid = f'a first line with "format": "{layout.STRINGS_FORMAT}" is valid'
    try:
        head = orjson.loads(lines[0])
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("format") != layout.STRINGS_FORMAT:
        raise UnreadableFile(place, "not a strings file" if lines[0] else "empty", valid, _UNNAMED)
    if head.get("version") != FORMAT_VERSION:
        raise UnreadableFile(place, f"version {_shown(head.get('version'))}", _knows_versions(), _UNNAMED)
    # What follows the last line feed is being written, or was when the writer died: no record names it yet.
    return ["", *map(_string, lines[1:-1])]


def _string(line: bytes) -> str:
    try:
        found = json.loads(line)  # not orjson: a path may hold lone surrogates
    except (ValueError, RecursionError):
        return "?"
    return found.encode("utf-8", "replace").decode() if isinstance(found, str) else "?"


# --- who a writer is --------------------------------------------------------------------------------------------------


class Status(enum.Enum):
    """How a writer stands."""

    CLOSED = "closed"
    RUNNING = "running"
    DIED = "died"
    UNKNOWN = "unknown"  # it did not close, and runs or ran on a host that cannot be asked from here


@dataclass(frozen=True)
class Clock:
    """The same instant on the monotonic and the wall clock of a writer's host."""

    monotonic_ns: int
    wall_ns: int

    def wall(self, monotonic_ns: int) -> int:
        """Wall clock time (ns since 1970) of a monotonic stamp."""
        return self.wall_ns + (monotonic_ns - self.monotonic_ns)


@dataclass(frozen=True)
class WriterInfo:
    """`writer.json`: who a writer is. `raw` holds the whole file."""

    writer: str
    nonce: int
    host: str
    pid: int
    start_ticks: int
    rank: int
    world_size: int
    local_rank: int
    run_id: str
    run_dir: str | None
    spool_dir: str | None
    seed: bytes | None
    seed_source: str | None
    groups: frozenset[str]
    resource: dict[str, Any]
    clock: Clock
    started_ns: int
    ended_ns: int | None
    end: str | None
    torch: str | None
    python: str | None
    iteration_optimizer: str | None
    records: int
    dropped: int
    hooks_off: dict[str, str]
    hook_faults: int
    raw: dict[str, Any] = field(repr=False)


class _Fields:
    """Typed values out of a JSON object."""

    def __init__(self, path: Path, found: dict[str, Any], consequence: str) -> None:
        self.path = path
        self.found = found
        self.consequence = consequence

    def bad(self, key: str, valid: str) -> UnreadableFile:
        return UnreadableFile(
            self.path, f"{key!r} is {_shown(self.found.get(key))}", f"{valid} is valid", self.consequence
        )

    def text(self, key: str) -> str:
        value = self.found.get(key)
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.found.get(key) is None else self.text(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.found.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad(key, f"an integer from {low} to {high}")
        return value

    def hexadecimal(self, key: str, size: int) -> bytes:
        value = self.found.get(key)
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", value):
            raise self.bad(key, f"a string of {2 * size} hexadecimal digits")
        return bytes.fromhex(value)

    def object(self, key: str) -> dict[str, Any]:
        value = self.found.get(key, {})
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return value


def read_writer(path: str | Path) -> WriterInfo:
    """Read a `writer.json`.

    Raises:
        UnreadableFile: it is not one of this version, or a value in it is impossible.
    """
    place = Path(path)
    consequence = "the writer is skipped"
    found = _read_json(place, WRITER_FORMAT, consequence)
    fields = _Fields(place, found, consequence)
    clock = _Fields(place, fields.object("clock"), consequence)
    groups = found.get("groups", [])
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise fields.bad("groups", "a list of strings")
    int32 = (1 << 31) - 1
    return WriterInfo(
        writer=fields.text("writer"),
        nonce=int.from_bytes(fields.hexadecimal("nonce", 8), "big"),
        host=fields.text("host"),
        pid=fields.integer("pid", 0, int32),
        start_ticks=fields.integer("start_ticks", 0, _INT64_MAX),
        rank=fields.integer("rank", -1, int32),
        world_size=fields.integer("world_size", 0, int32),
        local_rank=fields.integer("local_rank", -1, int32, -1),
        run_id=fields.text("run_id"),
        run_dir=fields.optional_text("run_dir"),
        spool_dir=fields.optional_text("spool_dir"),
        seed=None if found.get("seed") is None else fields.hexadecimal("seed", 16),
        seed_source=fields.optional_text("seed_source"),
        groups=frozenset(groups),
        resource={key: value for key, value in fields.object("resource").items() if _is_attribute(value)},
        clock=Clock(clock.integer("monotonic_ns", 0, _INT64_MAX), clock.integer("wall_ns", 0, _INT64_MAX)),
        started_ns=fields.integer("started_ns", 0, _INT64_MAX),
        ended_ns=None if found.get("ended_ns") is None else fields.integer("ended_ns", 0, _INT64_MAX),
        end=fields.optional_text("end"),
        torch=fields.optional_text("torch"),
        python=fields.optional_text("python"),
        iteration_optimizer=fields.optional_text("iteration_optimizer"),
        records=fields.integer("records", 0, _INT64_MAX, 0),
        dropped=fields.integer("dropped", 0, _INT64_MAX, 0),
        hooks_off={str(hook): str(reason) for hook, reason in fields.object("hooks_off").items()},
        hook_faults=fields.integer("hook_faults", 0, _INT64_MAX, 0),
        raw=found,
    )


def _is_attribute(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (str, bool, int, float)) for item in value)
    return isinstance(value, (str, bool, int, float))


# --- a writer and a run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """All committed records of a writer.

    Attributes:
        data: the records, of dtype `RECORD_DTYPE`, in order of their numbers.
        numbers: the number of each, segment * 32768 + index in the segment.
        holes: places that a thread took and never committed.
        damaged: committed records with impossible times, left out of `data`.
        missing_segments: segments before the last that are not there: the oldest go where a run outgrows its bound.
    """

    data: RecordArray
    numbers: npt.NDArray[np.int64]
    holes: int
    damaged: int
    missing_segments: int

    def __len__(self) -> int:
        return len(self.data)


def find_referring(
    data: RecordArray, numbers: npt.NDArray[np.int64], kind: Kind, rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Records of a kind that refer to some of these, as a wait refers to the operation that it completes.

    Args:
        data: the records of a writer.
        numbers: their numbers, ascending.
        kind: of the records that refer.
        rows: where the records that are referred to are, ascending.

    Returns:
        Where the records that refer are, ascending, and for each the index in `rows` of what it refers to.
    """
    found = np.flatnonzero((data["kind"] == kind) & (data["ref"] > 0) & (data["ref"] <= _MAX_REF))
    if not len(rows) or not len(found):
        return found[:0], found[:0]
    wanted = data["ref"][found].astype(np.int64) - 1
    candidates = numbers[rows]
    at = np.minimum(np.searchsorted(candidates, wanted), len(rows) - 1)
    matches = candidates[at] == wanted
    return found[matches], at[matches]


class WriterFiles:
    """The files of one writer, in the run directory and (while it runs, or until it is finished) in the spool.

    Attributes:
        name: the writer's name, as its folders are called.
        folders: where its files are, spool first.
        info: its `writer.json`.
    """

    def __init__(self, name: str, folders: list[Path], info: WriterInfo, problems: list[UnreadableFile]) -> None:
        self.name = name
        self.folders = folders
        self.info = info
        self._problems = problems
        self._lacks_strings = False

    def __repr__(self) -> str:
        return f"WriterFiles({self.name!r}, rank={self.info.rank}, status={self.status.value!r})"

    @cached_property
    def strings(self) -> list[str]:
        """Interned strings by id; only the empty one where the file cannot be read."""
        found = self._first(layout.STRINGS_NAME, read_strings)
        return [""] if found is None else found

    @cached_property
    def live(self) -> LiveFile | None:
        """The live page; None where it cannot be read."""
        found = self._first(layout.LIVE_NAME, read_live)
        if found is not None and found.nonce != self.info.nonce:
            self._problems.append(self._foreign(self.folders[0] / layout.LIVE_NAME, found.nonce, "it is not read"))
            return None
        return found

    @cached_property
    def exit(self) -> dict[str, Any] | None:
        """How it ended, as its launcher saw it (`exit.json`); None where that is not known."""
        for folder in self.folders:
            path = folder / layout.EXIT_NAME
            try:
                if not path.is_file():  # to open a pipe would wait
                    continue
                with open(path, "rb") as file:
                    found = json.loads(file.read(_JSON_LIMIT_BYTES))
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
        return None

    @cached_property
    def status(self) -> Status:
        """Whether the writer closed (or left by `os._exit(0)`), runs or died."""
        if self.info.ended_ns is not None or (self.live is not None and self.live.state is WriterState.CLOSED):
            return Status.CLOSED
        if self.exit is not None and self.exit.get("code") == 0:
            return Status.CLOSED
        if self.info.host == socket.gethostname():
            return Status.RUNNING if process_is_alive(self.info.pid, self.info.start_ticks) else Status.DIED
        # Finishing moves the live page of a dead writer to the run directory, on a host that could ask.
        return Status.DIED if self.live is not None else Status.UNKNOWN

    @cached_property
    def last_sign_ns(self) -> int | None:
        """Monotonic time of its end or last heartbeat; None where neither is known."""
        if self.info.ended_ns is not None:
            return self.info.ended_ns
        return self.live.heartbeat_ns if self.live is not None and self.live.heartbeat_ns else None

    @property
    def dropped(self) -> int:
        """Records that the writer says it dropped."""
        return max(self.info.dropped, self.live.dropped if self.live is not None else 0)

    def string(self, number: int) -> str:
        """The string of an id; a number in angle brackets where the strings file lacks it, which is told once."""
        if 0 <= number < len(self.strings):
            return self.strings[number]
        if not self._lacks_strings and len(self.strings) > 1 and self.status is not Status.RUNNING:
            self._lacks_strings = True
            found = f"{len(self.strings) - 1:,} strings, and there are records that name number {number:,}"
            self._problems.append(UnreadableFile(self.folders[0] / layout.STRINGS_NAME, found, "", _UNNAMED))
        return f"<{number}>"

    def lost(self, records: int, holes: int, damaged: int) -> str:
        """What to say of records that the writer counted and that are nowhere; empty where none is missing. Those that
        an exporter process sent, or that nobody wants, are not: see `report.removed`.

        Args:
            records, holes, damaged: how many were read.
        """
        if self.info.raw.get("sends") or self.info.raw.get("exports") is False:
            return ""
        lost = self.info.records - records - holes - damaged - self.dropped
        if self.status is not Status.CLOSED or lost <= 0:
            return ""
        return (
            f"rank {self.info.rank}: {lost:,} of its {self.info.records:,} records are missing; files were cut or lost"
        )

    def records(self, first_segment: int = 0, segments: int | None = None) -> Records:
        """Read all committed records. Segments that cannot be read are skipped and noted in the run's problems.

        Args:
            first_segment: the first to read.
            segments: how many to read at most; None: all.
        """
        opened: list[_OpenSegment] = []
        numbers = self._segment_numbers()
        wanted = [number for number in numbers if number >= first_segment][:segments]
        for number in wanted:
            found = self._open_segment(number)
            if found is not None:
                opened.append(found)
        data = np.empty(sum(segment.rows for segment in opened), dtype=RECORD_DTYPE)
        places: list[npt.NDArray[np.int64]] = []
        filled = holes = damaged = 0
        for segment in opened:
            try:
                # A spare segment lies ready behind the one being filled; only one further behind says it is full.
                indices, lost, bad = segment.read_into(
                    data[filled:], is_last=segment.header.number >= numbers[-1] - 1 or segment.rows < SEGMENT_RECORDS
                )
            except UnreadableFile as problem:
                self._problems.append(problem)
                continue
            places.append(indices + segment.header.number * SEGMENT_RECORDS)
            filled += len(indices)
            holes += lost
            damaged += bad
        self._count_last(data[:filled])
        return Records(
            data[:filled],
            np.concatenate(places) if places else np.empty(0, dtype=np.int64),
            holes,
            damaged,
            numbers[-1] + 1 - len(numbers) if numbers else 0,
        )

    def _count_last(self, data: RecordArray) -> None:
        """With `NEMO_LENS_ITERATION_OPTIMIZER=last` the writer could not know which optimizer would be the last."""
        if self.info.iteration_optimizer != "last":
            return
        steps = data["kind"] == layout.Kind.OPTIMIZER_STEP
        if steps.any():
            data["b"][steps] = data["a"][steps] == data["a"][steps].max()

    @property
    def last_segment(self) -> int:
        """Number of the newest segment that is there now; -1: none."""
        return max(self._segment_numbers(), default=-1)

    def _segment_numbers(self) -> list[int]:
        # The spool is listed first: a segment that moves between the two listings is then in the second.
        found: set[int] = set()
        for folder in self.folders:
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            found.update(int(match[1]) for match in map(_SEGMENT_FILE.fullmatch, names) if match)
        return sorted(found)

    def _open_segment(self, number: int) -> _OpenSegment | None:
        consequence = "the segment is skipped"

        def read(path: Path) -> _OpenSegment:
            segment = _OpenSegment(path, consequence)
            header = segment.header
            problem = None
            if header.number != number:
                problem = UnreadableFile(path, f"segment number {header.number}", f"{number} is valid", consequence)
            elif header.nonce != self.info.nonce:
                problem = self._foreign(path, header.nonce, consequence)
            if problem is not None:
                segment._file.close()
                raise problem
            return segment

        return self._first(layout.segment_name(number), read)

    def _foreign(self, path: Path, nonce: int, consequence: str) -> UnreadableFile:
        return UnreadableFile(path, f"written by {nonce:016x}", f"{self.info.nonce:016x} is valid", consequence)

    def _first(self, name: str, read: Callable[[Path], _T]) -> _T | None:
        """Read a file from the first folder that has it in a readable state; else note why not."""
        problem: UnreadableFile | None = None
        # A file that moves from the spool while we look is at its new place in the second round.
        for folder in (*self.folders, *self.folders):
            try:
                return read(folder / name)
            except UnreadableFile as error:
                if problem is None or problem.missing:
                    problem = error
        if problem is not None:
            self._problems.append(problem)
        return None


class RunDirectory:
    """A run directory and the writers in it, ordered by rank and start.

    Args:
        path: the directory.
        names: only writers of these names are looked at; None: all that are there.

    Attributes:
        path: the directory.
        manifest: its `manifest.json`; empty where that is damaged.
        writers: every writer whose `writer.json` can be read.
        problems: files that could not be read, as far as they were looked at.

    Raises:
        UnreadableFile: the path is no run directory, or one of another version.
    """

    def __init__(self, path: str | Path, names: Collection[str] | None = None) -> None:
        self.path = Path(path)
        self._names = names
        self.problems: list[UnreadableFile] = []
        self.manifest = self._read_manifest()
        self.writers: list[WriterFiles] = []
        for name in self._writer_names():
            writer = self._writer(name)
            if writer is not None:
                self.writers.append(writer)
        if names is None and self.problems and not self.manifest and not self.writers:
            raise UnreadableFile(
                self.path,
                f"neither its {layout.MANIFEST_NAME} nor a rank in it can be read",
                "a run directory as lens-auto writes it is valid",
                "nothing is read",
            )
        self.writers.sort(
            key=lambda writer: (writer.info.rank, writer.info.clock.wall(writer.info.started_ns), writer.name)
        )

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r}, {len(self.writers)} writers)"

    @property
    def run_id(self) -> str:
        """The run's id; that of its first writer where the manifest is damaged."""
        found = self.manifest.get("run_id")
        if isinstance(found, str):
            return found
        return self.writers[0].info.run_id if self.writers else ""

    def _read_manifest(self) -> dict[str, Any]:
        path = self.path / layout.MANIFEST_NAME
        ranks = self.path / layout.RANKS_DIR
        if not ranks.is_dir() and not path.is_file():
            found = "not a run directory" if self.path.is_dir() else "not a directory"
            if not self.path.exists():
                found = "there is no such directory"
            raise UnreadableFile(
                self.path,
                found,
                f"a folder with {layout.MANIFEST_NAME} and {layout.RANKS_DIR}/ is valid",
                "nothing is read",
                missing=True,
            )
        try:
            return _read_json(path, RUN_FORMAT, "nothing is read")
        except UnreadableFile as error:
            if error.found.startswith("version"):
                raise
            if not error.missing:  # the spool has none
                self.problems.append(UnreadableFile(path, error.found, error.valid, "its writers are read without it"))
            return {}

    def _writer_names(self) -> list[str]:
        if self._names is not None:
            return [name for name in sorted(self._names) if _is_folder(self.path / layout.RANKS_DIR / name)]
        try:
            return sorted(entry.name for entry in os.scandir(self.path / layout.RANKS_DIR) if entry.is_dir())
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                consequence = "no rank is read"
                self.problems.append(
                    UnreadableFile(self.path / layout.RANKS_DIR, error.strerror or str(error), "", consequence)
                )
            return []

    def _writer(self, name: str) -> WriterFiles | None:
        folder = self.path / layout.RANKS_DIR / name
        try:
            info = read_writer(folder / layout.WRITER_NAME)
        except UnreadableFile as error:
            self.problems.append(error)
            return None
        folders = [folder]
        # A run directory is read as it is: a copy of one names the original.
        of_spool = None if self.manifest else _run_folder(info, name)
        for other, first in ((_spool_folder(info, name), True), (of_spool, False)):
            if other is None or _is_same(other, folder):
                continue
            try:
                there = read_writer(other / layout.WRITER_NAME)
            except UnreadableFile:
                continue
            if there.nonce != info.nonce:
                continue
            folders.insert(0 if first else len(folders), other)
            if info.ended_ns is None and (there.ended_ns is not None or info.seed is None):
                info = there
        writer = WriterFiles(name, folders, info, self.problems)
        if info.rank < 0 and writer.live is not None and writer.live.rank >= 0:
            # The page is written at once, the file at the housekeeper's next tick: a rank may die in between.
            size = max(info.world_size, writer.live.world_size)
            writer.info = replace(info, rank=writer.live.rank, world_size=size)
        return writer


def _spool_folder(info: WriterInfo, name: str) -> Path | None:
    """A writer's folder in the spool, where it is on this host and still there."""
    if info.spool_dir is None or info.host != socket.gethostname():
        return None
    for folder in (Path(info.spool_dir), Path(info.spool_dir) / layout.RANKS_DIR / name):
        if folder.name == name and _is_folder(folder):
            return folder
    return None


def _run_folder(info: WriterInfo, name: str) -> Path | None:
    """A writer's folder in the run directory, for a reader that was pointed at the spool."""
    folder = None if info.run_dir is None else Path(info.run_dir) / layout.RANKS_DIR / name
    return folder if folder is not None and _is_folder(folder) else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name with a zero byte, or one that is too long
        return False


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


__all__ = [
    "RECORD_DTYPE",
    "Clock",
    "LiveFile",
    "LivePhase",
    "RecordArray",
    "Records",
    "RunDirectory",
    "Segment",
    "SegmentHeader",
    "Status",
    "UnreadableFile",
    "WriterFiles",
    "WriterInfo",
    "process_is_alive",
    "read_live",
    "read_segment",
    "read_strings",
    "read_writer",
]
