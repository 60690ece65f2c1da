"""The recorder of one rank: packs records into the open segment, and keeps the live page true."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lens_auto.recorder import layout
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.recorder.live import LiveFile
from lens_auto.recorder.segment import Segment, create_segment, no_segment
from lens_auto.recorder.strings import Interner

if TYPE_CHECKING:
    from lens_auto.recorder.bell import Bell
    from lens_auto.recorder.device import DeviceTimes

logger = logging.getLogger("lens_auto")

_pack = layout.RECORD.pack_into
_pack_collective = layout.COLLECTIVE_RECORD.pack_into
_pack_slot = layout.LIVE_SLOT.pack_into
_CAPACITY = layout.SEGMENT_RECORDS
_HEADER = layout.SEGMENT_HEADER_BYTES
_SIZE = layout.RECORD_BYTES
_RETRY_NS = 1_000_000_000
NEVER = 1 << 62
_TIMES = 64  # how many times of communication are remembered


class ThreadState:
    """What a thread of the program is in: how deep in wrapped calls, and where its slot lies."""

    __slots__ = ("backward", "depth", "index", "kind", "page", "phase_depth", "slot", "step")

    def __init__(self, index: int, live: LiveFile) -> None:
        place = min(index, layout.LIVE_SLOTS - 1)  # threads beyond the last slot share it
        live.own_slot(place, index, threading.get_native_id())
        self.index = index
        self.page = live.buffer
        self.slot = layout.slot_offset(place)
        kind = self.slot + layout.LIVE_SLOT_KIND_OFFSET
        self.kind = memoryview(self.page)[kind : kind + 2].cast("H")
        self.depth = 0  # inside a communication call that is recorded as a whole
        self.phase_depth = 0  # inside a data fetch, model wrapping or checkpoint
        self.step: Any = None  # an optimizer step that has begun
        self.backward = 0  # inside backward

    def enter(self, operation: bytes, start_ns: int, seq: int = -1, nbytes: int = 0, dtype: int = 0) -> None:
        """Show the operation that the thread enters, as `layout.OPERATION` packs it."""
        mark = layout.slot_mark(seq, start_ns)
        _pack_slot(self.page, self.slot, mark, start_ns, nbytes, dtype, operation, mark)

    def leave(self) -> None:
        """The thread is in no operation: one aligned store."""
        self.kind[0] = 0


class _Local(threading.local):
    """What each thread has of its own; made on its first use of it."""

    def __init__(self, new_state: Callable[[], ThreadState]) -> None:
        self.state = new_state()


class Recorder:
    """Records of one process as one rank.

    Args:
        folder: the writer's spool folder; None: nowhere to write, everything is dropped and counted.
        nonce: 64 random bits that name this writer.
        start_ticks: start of the process, as /proc/<pid>/stat has it.
        limit_bytes: how many bytes of closed segments this writer may keep.
    """

    def __init__(self, folder: str | None, nonce: int, start_ticks: int, limit_bytes: int) -> None:
        self.folder = folder
        self.nonce = nonce
        self.limit_bytes = limit_bytes
        self.iteration = 0
        self.init = 0
        self.rank = -1
        self.world_size = 0
        self.phase_code = Phase.START_UP
        self.phase_since_ns = time.monotonic_ns()
        self.steps = 0
        self.fetches = 0
        # By torch's name of a group: point-to-point operations in torch's count of operations, whether it counts them.
        self.transfers: dict[str, list[int]] = {}
        self.dtypes: dict[Any, int] = {}  # string ids of torch's data types
        self.dropped = 0
        self.communication = 0
        self.communication_times: list[tuple[int, int]] = []  # from when to when it was on; `NEVER`: it is
        self.span_flags(frozenset())
        self.switch_at = NEVER  # the iteration at which `on_switch` is due
        self.on_switch: Callable[[int], None] | None = None
        self.device: DeviceTimes | None = None  # what a GPU took; None where that is not wanted
        self.boundary_bell: Bell | None = None  # what the carrier's thread waits for
        self.wake = threading.Event()
        self.closed: list[Segment] = []
        self._lock = threading.Lock()
        self._threads = 0
        self._next_number = 0
        self._retry_ns = 0
        self._spare: Segment | None = None
        self._told = False
        self._closed_records = 0
        try:
            self.live = LiveFile(folder, nonce, start_ticks)
        except OSError as error:
            self.tell(error)
            self.live = LiveFile(None, nonce, start_ticks)
        self.local = _Local(self._new_thread)  # `local.state`: of the calling thread
        try:
            self.strings = Interner(folder)
        except OSError as error:
            self.tell(error)
            self.strings = Interner(None)
        self.segment = self._make() or no_segment(0)

    def span_flags(self, groups: frozenset[str]) -> None:
        """Which groups' records become spans: the flag that hooks put into their records, or 0."""
        on = {group: int(Flag.SPAN) for group in groups}
        before, self.communication = self.communication, on.get("communication", 0)
        if self.communication and not before:
            since_ns = time.monotonic_ns() if self.init else 0
            self.communication_times = [*self.communication_times[1 - _TIMES :], (since_ns, NEVER)]
        elif before and not self.communication and self.communication_times:
            since_ns = self.communication_times[-1][0]
            self.communication_times = [*self.communication_times[:-1], (since_ns, time.monotonic_ns())]
        self.optimizer = on.get("optimizer", 0)
        self.forward_backward = on.get("forward_backward", 0)
        self.data_loading = on.get("data_loading", 0)
        self.model_init = on.get("model_init", 0)
        self.checkpoint = on.get("checkpoint", 0)
        self.load_checkpoint = on.get("load_checkpoint", 0)
        self.pipeline = on.get("pipeline", 0)
        self.microbatch = on.get("microbatch", 0)

    # --- the hot path -------------------------------------------------------------------------------------------------

    def record(
        self,
        kind: int,
        start_ns: int,
        end_ns: int,
        thread: int,
        flags: int,
        name: int = 0,
        group: int = 0,
        dtype: int = 0,
        seq: int = -1,
        nbytes: int = 0,
        peer: int = -1,
        tag: int = 0,
        group_size: int = 0,
        detail: int = 0,
        exposed_ns: int = 0,
        ref: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
    ) -> int:
        """Write one record (fields as in `layout.RECORD_FIELDS`) and return its number; -1 where it was dropped."""
        segment = self.segment
        index = next(segment.counter)
        while index >= _CAPACITY:
            following = self._following(segment)
            if following is None:
                return -1
            segment = following
            index = next(segment.counter)
        _pack(
            segment.buffer,
            _HEADER + index * _SIZE,
            start_ns,
            end_ns,
            seq,
            nbytes,
            exposed_ns,
            self.iteration,
            flags,
            dtype,
            thread,
            0,
            kind,
            0,
            name,
            group,
            group_size,
            peer,
            tag,
            detail,
            self.init,
            ref,
            a,
            b,
            c,
            0,
            index + 1,
        )
        return segment.base + index

    def collective(
        self,
        operation: bytes,
        start_ns: int,
        end_ns: int,
        thread: int,
        flags: int,
        seq: int,
        nbytes: int,
        dtype: int,
    ) -> int:
        """Write the record of a collective that did not fail, its operation packed before (`layout.OPERATION`).

        Returns:
            Its number; -1 where it was dropped.
        """
        segment = self.segment
        index = next(segment.counter)
        while index >= _CAPACITY:
            following = self._following(segment)
            if following is None:
                return -1
            segment = following
            index = next(segment.counter)
        _pack_collective(
            segment.buffer,
            _HEADER + index * _SIZE,
            start_ns,
            end_ns,
            seq,
            nbytes,
            end_ns - start_ns,
            self.iteration,
            flags,
            dtype,
            thread,
            operation,
            self.init,
            index + 1,
        )
        return segment.base + index

    def _new_thread(self) -> ThreadState:
        with self._lock:
            index = self._threads
            self._threads += 1
        return ThreadState(min(index, 0xFFFF), self.live)

    def thread(self) -> ThreadState:
        """The state of the calling thread; `local.state` where every nanosecond counts."""
        return self.local.state

    def phase(self, phase: Phase, now_ns: int) -> None:
        """Say in the live page what the training thread is in from now on."""
        self.phase_code = phase
        self.phase_since_ns = now_ns
        self.live.phase(phase, self.iteration, now_ns, self.steps, self.fetches)
        if self.device is not None:
            self.device.mark(now_ns)

    def boundary(self, at_ns: int, steps: int, thread: int) -> None:
        """Close the iteration, as the live prediction has it, at a point of time."""
        self.record(Kind.BOUNDARY, at_ns, at_ns, thread, 0, a=steps)
        if self.device is not None:
            self.device.boundary(at_ns)
        self.iteration += 1
        if self.iteration >= self.switch_at and self.on_switch is not None:
            self.on_switch(self.iteration)
        if self.boundary_bell is not None:
            self.boundary_bell.ring()

    # --- segments -----------------------------------------------------------------------------------------------------

    def _following(self, full: Segment) -> Segment | None:
        """The segment after a full one; None where there is no room for one (the record is counted as dropped)."""
        with self._lock:
            if self.segment is not full:
                return self.segment
            following, self._spare = self._spare, None
            if following is None:
                now = time.monotonic_ns()
                if now < self._retry_ns:
                    self.dropped += 1
                    return None
                following = self._make()
                if following is None:
                    self._retry_ns = now + _RETRY_NS
                    self.dropped += 1
                    self._close(full)
                    self.segment = no_segment(full.number)
                    return None
            self._close(full)
            self.segment = following
        self.wake.set()
        return following

    def _close(self, segment: Segment) -> None:
        if segment.path:
            segment.closed_ns = time.monotonic_ns()
            self._closed_records += segment.used()
            self.closed.append(segment)

    def _make(self) -> Segment | None:
        if self.folder is None:
            return None
        try:
            made = create_segment(self.folder, self._next_number, self.nonce, self.rank)
        except OSError as error:
            self.tell(error)
            return None
        self._next_number += 1
        return made

    def prepare(self) -> None:
        """Make the next segment ahead of time. Called by the housekeeper only."""
        if self._spare is None and self.folder is not None and time.monotonic_ns() >= self._retry_ns:
            with self._lock:
                if self._spare is None:
                    self._spare = self._make()
                    if self._spare is None:
                        self._retry_ns = time.monotonic_ns() + _RETRY_NS

    def tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "lens-auto: no room for records in %r (%s); records are dropped and counted until there is, the"
                " training program is not affected; NEMO_LENS_SPOOL_DIR names another folder",
                self.folder,
                error.strerror or error,
            )

    # --- what others ask ---------------------------------------------------------------------------------------------

    def written(self) -> int:
        """Records written so far."""
        segment = self.segment
        return self._closed_records + (segment.used() if segment.path else 0)

    def publish(self, kept_bytes: int, faults: int) -> None:
        """Bring heartbeat and counters of the live page up to date."""
        self.live.counters(self.written(), self.dropped, faults, kept_bytes, self._next_number)
        self.live.heartbeat()

    def take_closed(self, older_than_ns: int) -> list[Segment]:
        """Closed segments that no thread can still be writing to, oldest first; they leave the recorder."""
        with self._lock:
            taken = [each for each in self.closed if each.closed_ns <= older_than_ns]
            self.closed = [each for each in self.closed if each.closed_ns > older_than_ns]
        return taken

    def stop(self) -> None:
        """Take no more records. What other threads write from now on goes nowhere."""
        with self._lock:
            last, spare = self.segment, self._spare
            self._spare = None
            self._retry_ns = 1 << 63
            self._close(last)
            self.segment = no_segment(last.number)
            if spare is not None:
                os.unlink(spare.path)
        self.strings.close()
