"""The live page of a rank: what it is in right now, readable from outside, also after SIGKILL."""

from __future__ import annotations

import mmap
import os
import struct
import time

from lens_auto.recorder import layout, spool
from lens_auto.recorder.layout import Phase, WriterState

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_pack_phase = layout.LIVE_PHASE.pack_into


class LiveFile:
    """One mapped page. Every group of fields is written by a single C call that starts and ends with the same word: a
    reader that finds them different, or zero, looks again.
    """

    def __init__(self, folder: str | None, nonce: int, start_ticks: int) -> None:
        self.buffer: mmap.mmap | bytearray
        if folder is None:
            self.buffer = bytearray(layout.LIVE_BYTES)
        else:
            self.buffer = spool.create_mapped(os.path.join(folder, layout.LIVE_NAME), layout.LIVE_BYTES)
        self._nonce = nonce
        self._start_ticks = start_ticks
        self._phase_turn = 0
        self.identify(-1, 0, -1)
        self.state(WriterState.RUNNING)
        self.heartbeat()

    def identify(self, rank: int, world_size: int, local_rank: int) -> None:
        """Write who this is."""
        layout.LIVE_HEAD.pack_into(
            self.buffer,
            0,
            layout.LIVE_MAGIC,
            layout.FORMAT_VERSION,
            os.getpid(),
            self._start_ticks,
            self._nonce,
            rank,
            world_size,
            local_rank,
        )

    def state(self, state: WriterState) -> None:
        """Write whether the writer runs or closed itself."""
        _U32.pack_into(self.buffer, layout.LIVE_STATE_OFFSET, state)

    def heartbeat(self) -> None:
        """Stamp the page."""
        layout.LIVE_HEARTBEAT.pack_into(self.buffer, layout.LIVE_HEARTBEAT_OFFSET, time.monotonic_ns(), time.time_ns())

    def counters(self, records: int, dropped: int, faults: int, kept_bytes: int, segments: int) -> None:
        """Write the counters of the recorder."""
        layout.LIVE_COUNTERS.pack_into(
            self.buffer, layout.LIVE_COUNTERS_OFFSET, records, dropped, faults, kept_bytes, segments
        )

    def issued(self, index: int, count: int) -> None:
        """Write how many operations of a process group this rank has issued (`process_groups` of `writer.json`)."""
        if index < layout.LIVE_ISSUED_COUNT:
            _U64.pack_into(self.buffer, layout.LIVE_ISSUED_OFFSET + 8 * index, count)

    def phase(self, phase: Phase, iteration: int, since_ns: int, steps: int, fetches: int) -> None:
        """Write what the training thread is in, and since when (monotonic)."""
        turn = self._phase_turn = (self._phase_turn + 1) & 0xFFFFFFFF or 1
        _pack_phase(self.buffer, layout.LIVE_PHASE_OFFSET, turn, phase, iteration, since_ns, steps, fetches, turn)

    def own_slot(self, index: int, thread: int, native_id: int) -> None:
        """Write whose a slot is."""
        offset = layout.slot_offset(index) + layout.LIVE_SLOT_OWNER_OFFSET
        layout.LIVE_SLOT_OWNER.pack_into(self.buffer, offset, thread, native_id)
