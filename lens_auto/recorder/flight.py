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
ASK_EVERY_NS = 5_000_000_000  # unless the flight recorder would be full before
THREAD = 0xFFFF  # of records from here: none of the program's
_SETTLE_NS = 400_000_000  # a hook that has left the operation may not have written its record yet
_CLOCK_NS = 50_000  # the two clocks are read one after the other
_NEAR_NS = 600_000_000_000  # a group of the same name that was made again counts from 1 as well
_KEPT = 50_000  # calls that are remembered
# Ends of names of calls that may make several operations inside; gloo does a reduce_scatter by all_reduces.
_SEVERAL = ("_object", "_object_list", "_coalesced", "monitored_barrier", "reduce_scatter", "all_to_all")
_CALL = [("key", "<u8"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("name", "<u4"), ("number", "<i8")]


def _key(group: Any, seq: Any) -> Any:
    """One number for a group's string id and a sequence number."""
    return (group << 40) + seq


class FlightLog:
    """Of one rank; asked by its housekeeper."""

    def __init__(self, keeper: Housekeeper) -> None:
        self._keeper = keeper
        self._recorder = keeper.recorder
        self._site = guard.site("flight_recorder")
        self._next_ns = 0
        self._seen = -1  # record_id of the newest entry that was looked at
        self._asked_ns = 0
        self._asked_issued = 0  # operations issued when the flight recorder was last asked
        self._own = 0  # operations since then that the hooks recorded
        self._cursor = (0, 0)  # segment, index: the next of our own records to look at
        self._calls: list[Any] = []  # arrays of _CALL, oldest first: what the hooks recorded
        self._waiting: list[dict[str, Any]] = []
        self._untimed: dict[int, int] = {}  # record_id of an entry that is not over -> number of the call's record

    def tick(self) -> None:
        """Look, once a second; the flight recorder is asked only where it has something that the hooks did not see."""
        now = time.monotonic_ns()
        if now >= self._next_ns and self._recorder.init and self._site.gate:
            self._next_ns = now + LOOK_EVERY_NS
            self._look(now, last=False)

    def finish(self) -> None:
        """The program is done: what is left is taken now."""
        if self._recorder.init and self._site.gate:
            self._look(time.monotonic_ns(), last=True)

    def _look(self, now: int, last: bool) -> None:
        try:
            times = self._recorder.communication_times
            if not times:
                return
            # It was switched off, and what happened before that was not taken yet.
            owed = self._asked_ns <= times[-1][1] < now
            if times[-1][1] < now and not owed and not self._waiting:
                return
            self._follow_own(now)
            if owed or self._is_due(now, last):
                if c10d.keeps_flight_records():
                    self._ask()
                    self._follow_own(time.monotonic_ns())
                else:
                    self._asked_ns = now
            if self._waiting:
                self._sort_out(time.monotonic_ns(), last)
        except Exception as error:
            self._site.fault(error)

    def _is_due(self, now: int, last: bool) -> bool:
        fresh = self._keeper.watch.issued() - self._asked_issued
        if last:
            return True
        if fresh <= self._own and not self._waiting and not (fresh and c10d.times_operations()):
            return False
        return now - self._asked_ns >= ASK_EVERY_NS or fresh >= c10d.flight_capacity() // 3

    def _ask(self) -> None:
        """Take over the entries that are new."""
        self._asked_issued = self._keeper.watch.issued()
        self._own = 0
        entries = c10d.flight_entries()
        self._asked_ns = time.monotonic_ns()
        to_monotonic = c10d.wall_offset_ns()
        self._write_times(entries)
        for entry in entries:
            if int(entry["record_id"]) <= self._seen or entry.get("is_p2p") or not entry["process_group"][0]:
                continue  # a group without a name is none of the program's: our own carrier
            entry["at_ns"] = int(entry["time_created_ns"]) + to_monotonic
            ended = int(entry.get("time_discovered_completed_ns") or 0)
            entry["until_ns"] = ended + to_monotonic if ended else 0
            if any(since <= entry["at_ns"] < until for since, until in self._recorder.communication_times):
                self._waiting.append(entry)
        if entries:
            self._seen = max(self._seen, int(entries[-1]["record_id"]))

    def _sort_out(self, now: int, last: bool) -> None:
        """Record the entries that no hook recorded; what may still be recorded by one waits."""
        running = {} if last else self._running()
        kept = []
        for entry, covered in zip(self._waiting, self._covered(self._waiting), strict=True):
            if covered:
                self._expect_time(entry)
                continue
            group, seq, at_ns = str(entry["process_group"][0]), int(entry["collective_seq_id"]), int(entry["at_ns"])
            if not last and (seq >= running.get(group, 1 << 62) or now - at_ns < _SETTLE_NS):
                kept.append(entry)
            else:
                self._record(entry, group, seq, at_ns)
        self._waiting = kept

    def _covered(self, entries: list[dict[str, Any]]) -> list[bool]:
        """For each entry whether it is of a call that a hook recorded."""
        import numpy as np

        if not self._calls:
            return [False] * len(entries)
        calls = np.concatenate(self._calls)
        self._calls = [calls]
        calls = calls[np.argsort(calls["key"], kind="stable")]
        strings = self._recorder.strings
        groups = np.array([strings.id(str(each["process_group"][0])) for each in entries], dtype=np.uint64)
        keys = _key(groups, np.array([int(each["collective_seq_id"]) for each in entries], dtype=np.uint64))
        at_ns = np.array([int(each["at_ns"]) for each in entries], dtype=np.int64)
        index = np.searchsorted(calls["key"], keys, side="right") - 1
        before = calls[np.maximum(index, 0)]
        exact = (index >= 0) & (before["key"] == keys) & (np.abs(before["start_ns"] - at_ns) < _NEAR_NS)
        several = [number for number in np.unique(before["name"]).tolist() if strings.text(number).endswith(_SEVERAL)]
        inside = (index >= 0) & (before["key"] >> 40 == groups) & np.isin(before["name"], several)
        inside &= (before["start_ns"] - _CLOCK_NS <= at_ns) & (at_ns <= before["end_ns"] + _CLOCK_NS)
        for entry, number in zip(entries, np.where(exact, before["number"], -1).tolist(), strict=True):
            entry["number"] = number
        found: list[bool] = (exact | inside).tolist()
        return found

    # --- times, where the job has NCCL take them ----------------------------------------------------------------------

    def _expect_time(self, entry: dict[str, Any]) -> None:
        number = int(entry.get("number", -1))
        if number < 0 or not c10d.times_operations():
            return
        self._untimed[int(entry["record_id"])] = number
        self._write_times([entry])
        while len(self._untimed) > _KEPT:
            del self._untimed[next(iter(self._untimed))]

    def _write_times(self, entries: list[dict[str, Any]]) -> None:
        """Record how long operations took that are over now."""
        for entry in entries:
            took_ms = entry.get("duration_ms")
            number = self._untimed.get(int(entry["record_id"]))
            if number is None or took_ms is None:
                continue
            del self._untimed[int(entry["record_id"])]
            self._keeper.watch.own_records += 1
            at_ns = int(entry["time_created_ns"]) + c10d.wall_offset_ns()
            took_ns = round(float(took_ms) * 1e6)
            self._recorder.record(Kind.DEVICE_TIME, at_ns, at_ns, THREAD, Flag.FLIGHT, ref=number + 1, a=took_ns)

    def _running(self) -> dict[str, int]:
        """For each group on which a call is under way: from which sequence number on its operations may be its own."""
        found: dict[str, int] = {}
        buffer = self._recorder.live.buffer
        for index in range(layout.LIVE_SLOTS):
            slot = layout.read_slot(buffer, index)
            if slot.kind == Kind.COLLECTIVE:
                name = self._recorder.strings.text(slot.group)
                found[name] = min(found.get(name, 1 << 62), slot.seq)
        return found

    def _record(self, entry: dict[str, Any], group: str, seq: int, at_ns: int) -> None:
        recorder, until_ns = self._recorder, int(entry["until_ns"])
        flags = Flag.FLIGHT | Flag.SPAN | (0 if until_ns else Flag.END_UNKNOWN)
        nbytes, dtype = c10d.payload_of(entry)
        self._keeper.watch.own_records += 1
        entry["number"] = recorder.record(
            Kind.COLLECTIVE,
            at_ns,
            max(at_ns, until_ns),
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
        self._expect_time(entry)

    # --- our own records ----------------------------------------------------------------------------------------------

    def _follow_own(self, now: int) -> None:
        """Note the calls that the hooks recorded since the last time."""
        for segment in sorted(self._keeper.open_segments(), key=lambda each: each.number):
            if segment.number < self._cursor[0] or not segment.path:
                continue
            index = self._cursor[1] if segment.number == self._cursor[0] else 0
            self._cursor = (segment.number, self._read(segment, index, now))
        while len(self._calls) > 1 and sum(map(len, self._calls[1:])) > _KEPT:
            del self._calls[0]

    def _read(self, segment: Segment, index: int, now: int) -> int:
        """Read records from an index on; the index of the first one that is not written yet."""
        import numpy as np

        from lens_auto.recorder.read import RECORD_DTYPE

        count = segment.used() - index
        if count <= 0:
            return index
        offset = layout.SEGMENT_HEADER_BYTES + index * layout.RECORD_BYTES
        found = np.frombuffer(segment.buffer, dtype=RECORD_DTYPE, count=count, offset=offset)
        written = found["commit"] == np.arange(index + 1, index + count + 1, dtype=np.uint32)
        # In a segment that is full since a while, what is not written never will be: its thread died in the middle.
        if not (segment.closed_ns and now - segment.closed_ns > _SETTLE_NS) and not written.all():
            count = int(np.argmin(written))
        found, written = found[:count], written[:count]
        ours = written & (found["kind"] == Kind.COLLECTIVE) & ((found["flags"] & Flag.FLIGHT) == 0)
        rows = np.flatnonzero(ours & (found["seq"] >= 0))
        if len(rows):
            calls = np.empty(len(rows), dtype=_CALL)  # a copy: the map is not held
            calls["key"] = _key(found["group"][rows].astype(np.uint64), found["seq"][rows].astype(np.uint64))
            for name in ("start_ns", "end_ns", "name"):
                calls[name] = found[name][rows]
            calls["number"] = segment.base + index + rows
            self._calls.append(calls)
            self._own += len(rows)
        return index + count
