"""Collectives that only C++ sees, from torch's flight recorder where the job has it on: each once.

The recorder lists every operation of the backends, also those that our hooks recorded. An entry is ours already where a
record of the same group has its sequence number, or where it was made inside of a recorded call (the object forms make
several). What is left becomes a record that says where it comes from: it exists, it was created then; its end is known
on backends that tell. Point-to-point entries are left to the hooks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lens_auto import guard
from lens_auto.recorder import c10d, layout
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.segment import Segment

if TYPE_CHECKING:
    from lens_auto.recorder.housekeeper import Housekeeper

LOOK_EVERY_NS = 1_000_000_000
THREAD = 0xFFFF  # of records from here: none of the program's
_SETTLE_NS = 400_000_000  # a hook that has left the operation may not have written its record yet
_CLOCK_NS = 1_000_000  # the two clocks are read one after the other
_NEAR_NS = 600_000_000_000  # a group of the same name that was made again counts from 1 as well
_KEPT = 20_000  # calls of a group that are remembered
_MAX_INSIDE = 16  # operations that one call makes inside


class _Calls:
    """The recorded calls of a group, by sequence number, oldest first."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int]] = {}

    def add(self, seq: int, start_ns: int, end_ns: int) -> None:
        """A call was recorded."""
        self._spans[seq] = (start_ns, end_ns)
        if len(self._spans) > _KEPT:
            del self._spans[next(iter(self._spans))]

    def cover(self, seq: int, at_ns: int) -> bool:
        """Whether an operation is one of these calls, or one that a call made inside."""
        found = self._spans.get(seq)
        if found is not None and abs(found[0] - at_ns) < _NEAR_NS:
            return True
        for before in range(seq - 1, seq - _MAX_INSIDE, -1):
            found = self._spans.get(before)
            if found is not None:
                return found[0] - _CLOCK_NS <= at_ns <= found[1] + _CLOCK_NS
        return False


class FlightLog:
    """Of one rank; asked by its housekeeper."""

    def __init__(self, keeper: Housekeeper) -> None:
        self._keeper = keeper
        self._recorder = keeper.recorder
        self._site = guard.site("flight_recorder")
        self._wanted: bool | None = None
        self._next_ns = 0
        self._seen = -1  # record_id of the newest entry that was looked at
        self._on_since_ns = 0  # monotonic; 0: communication is off
        self._cursor = (0, 0)  # segment, index: the next of our own records to look at
        self._calls: dict[tuple[int, str], _Calls] = {}  # by initialization and group
        self._waiting: list[dict[str, Any]] = []
        self._names: dict[int, str] = {}

    def tick(self) -> None:
        """Look, once a second."""
        if self._wanted is None and self._recorder.init:
            self._wanted = c10d.keeps_flight_records()
        now = time.monotonic_ns()
        if not self._wanted or now < self._next_ns or not self._site.gate:
            return
        self._next_ns = now + LOOK_EVERY_NS
        self._look(now, last=False)

    def finish(self) -> None:
        """The program is done: what is left is taken now."""
        if self._wanted is None:
            self._wanted = bool(self._recorder.init) and c10d.keeps_flight_records()
        if self._wanted and self._site.gate:
            self._look(time.monotonic_ns(), last=True)

    def _look(self, now: int, last: bool) -> None:
        try:
            if not self._recorder.communication:
                self._on_since_ns = 0
                return
            self._follow_own(now)
            entries = c10d.flight_entries()
            wall_ns, now = time.time_ns(), time.monotonic_ns()
            to_monotonic = now - wall_ns
            first = self._on_since_ns == 0
            if first:
                self._on_since_ns = now if self._seen >= 0 else 1
            for entry in entries:
                number = int(entry["record_id"])
                if number <= self._seen or entry.get("is_p2p"):
                    continue
                entry["at_ns"] = int(entry["time_created_ns"]) + to_monotonic
                if entry["at_ns"] >= self._on_since_ns:
                    self._waiting.append(entry)
            if entries:
                self._seen = max(self._seen, int(entries[-1]["record_id"]))
            self._follow_own(now)
            self._sort_out(now, last, to_monotonic)
        except Exception as error:
            self._site.fault(error)

    def _sort_out(self, now: int, last: bool, to_monotonic: int) -> None:
        running = {} if last else self._running()
        kept = []
        for entry in self._waiting:
            group, seq, at_ns = str(entry["process_group"][0]), int(entry["collective_seq_id"]), int(entry["at_ns"])
            if any(calls.cover(seq, at_ns) for (_, name), calls in self._calls.items() if name == group):
                continue
            if not last and (seq >= running.get(group, 1 << 62) or now - at_ns < _SETTLE_NS):
                kept.append(entry)
                continue
            self._record(entry, group, seq, at_ns, to_monotonic)
        self._waiting = kept

    def _running(self) -> dict[str, int]:
        """For each group on which a call is under way: from which sequence number on its operations may be its own."""
        found: dict[str, int] = {}
        buffer = self._recorder.live.buffer
        for index in range(layout.LIVE_SLOTS):
            offset = layout.LIVE_SLOTS_OFFSET + index * layout.LIVE_SLOT_BYTES
            fields = layout.LIVE_SLOT.unpack_from(buffer, offset)
            kind, group, seq = fields[1], fields[5], fields[10]
            if kind == Kind.COLLECTIVE:
                name = self._text(group)
                found[name] = min(found.get(name, 1 << 62), seq)
        return found

    def _text(self, number: int) -> str:
        name = self._names.get(number)
        if name is None:
            name = self._names[number] = self._recorder.strings.text(number)
        return name

    def _record(self, entry: dict[str, Any], group: str, seq: int, at_ns: int, to_monotonic: int) -> None:
        recorder = self._recorder
        ended = int(entry.get("time_discovered_completed_ns") or 0)
        end_ns = ended + to_monotonic if ended else at_ns
        flags = Flag.FLIGHT | recorder.communication | (0 if ended else Flag.END_UNKNOWN)
        nbytes, dtype = c10d.payload_of(entry)
        self._keeper.watch.own_records += 1
        recorder.record(
            Kind.COLLECTIVE,
            at_ns,
            max(at_ns, end_ns),
            THREAD,
            flags,
            recorder.strings.id(c10d.operation_of(entry)),
            recorder.strings.id(group),
            recorder.strings.id(dtype),
            seq,
            nbytes,
            -1,
            0,
            self._keeper.watch.group_size(group),
        )

    # --- our own records ----------------------------------------------------------------------------------------------

    def _follow_own(self, now: int) -> None:
        """Note the calls that the hooks recorded since the last time."""
        for segment in sorted(self._keeper.open_segments(), key=lambda each: each.number):
            if segment.number < self._cursor[0] or not segment.path:
                continue
            index = self._cursor[1] if segment.number == self._cursor[0] else 0
            self._cursor = (segment.number, self._read(segment, index, now))

    def _read(self, segment: Segment, index: int, now: int) -> int:
        """Read records from an index on; the index of the first one that is not written yet."""
        unpack = layout.RECORD.unpack_from
        names = [name for name, _ in layout.RECORD_FIELDS]
        kind_at, group_at, seq_at = names.index("kind"), names.index("group"), names.index("seq")
        flags_at, init_at = names.index("flags"), names.index("init")
        used = segment.used()
        while index < used:
            fields = unpack(segment.buffer, layout.SEGMENT_HEADER_BYTES + index * layout.RECORD_BYTES)
            if fields[-1] != index + 1:
                if segment.closed_ns and now - segment.closed_ns > _SETTLE_NS:
                    index += 1  # a thread died in the middle of it
                    continue
                break
            if fields[kind_at] == Kind.COLLECTIVE and not fields[flags_at] & Flag.FLIGHT:
                key = (fields[init_at], self._text(fields[group_at]))
                self._calls.setdefault(key, _Calls()).add(fields[seq_at], fields[0], fields[1])
            index += 1
        return index
