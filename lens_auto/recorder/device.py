"""What a GPU took, by events on its streams: recorded where hooks are, looked at later, never waited for.

Events are pooled, recorded on the current stream of the thread that a hook runs in, and asked whether they are complete
only in the training thread, at the end of an iteration, while no CUDA graph is captured. Torch's CUDA interface is
reached here alone, through the module that torch itself imported, and only once the program has initialized it. (Torch
for ROCm has the same interface.)

The device clock of a writer is 0 at its first event and goes on from one change of phase to the next, so that no span
of time is long: an event's time is a 32-bit float of milliseconds, some 60 us off after a quarter of an hour.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from lens_auto import guard
from lens_auto.recorder import captures
from lens_auto.recorder.layout import DeviceTime, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder

_MANY = 16_384  # events that are not complete: beyond that no more are recorded
_TIME, _MARK, _MEMORY = int(Kind.DEVICE_TIME), int(Kind.DEVICE_MARK), int(Kind.DEVICE_MEMORY)
_WAIT, _CLOCK = int(DeviceTime.WAIT), int(DeviceTime.CLOCK)
_HERE = int(DeviceTime.CLOCK | DeviceTime.EXPOSED)


class Opened(NamedTuple):
    """An operation around which events are recorded, after the first of them.

    Attributes:
        device: index of its device.
        stream, event: of the first event; None where only the wait for it is measured.
    """

    device: int
    stream: Any
    event: Any


class _Pair(NamedTuple):
    """Two events around an operation, or around the wait for it."""

    device: int
    stream: int
    start: Any
    end: Any
    numbers: tuple[int, ...]
    start_ns: int
    end_ns: int
    what: int


class _Mark(NamedTuple):
    """An event where the phase changed."""

    stream: int
    event: Any
    at_ns: int


class _Boundary(NamedTuple):
    """The end of an iteration, with the allocator's counters then."""

    at_ns: int
    allocated: int
    reserved: int
    peak: int


class DeviceTimes:
    """Of one process.

    Args:
        recorder: gets the records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.skipped = 0  # operations and marks without events: too many were not complete
        self._recorder = recorder
        self._site = guard.site("device_times")
        self._cuda: Any = None
        self._device = 0  # whose allocator is asked, and whose stream has the marks
        self._thread = 0  # the training thread, once an iteration ended; before, that which first used the device
        self._iterated = False
        self._pool: dict[int, list[Any]] = {}
        self._pending: deque[_Pair | _Mark | _Boundary] = deque()
        self._marked_ns = 0
        self._base: _Mark | None = None  # the last mark that is complete
        self._clock_ns = 0  # the device clock there

    # --- where hooks are ----------------------------------------------------------------------------------------------

    def open(self, value: Any, asynchronous: bool) -> Opened | None:
        """An operation on this tensor (or these) is about to be enqueued; None where it is not measured.

        The current stream of an asynchronous one goes on: only the wait for it is measured.
        """
        try:
            if not self._can_record():
                return None
            device = device_of(value)
            return Opened(device, None, None) if asynchronous else self._open(device)
        except Exception as error:
            self._site.fault(error)
            return None

    def open_again(self, device: int) -> Opened | None:
        """The wait for an operation on this device is about to be enqueued."""
        try:
            return self._open(device) if self._can_record() else None
        except Exception as error:
            self._site.fault(error)
            return None

    def _open(self, device: int) -> Opened:
        if not self._marked_ns:  # the device clock begins
            self.mark(time.monotonic_ns())
        stream = self._cuda.current_stream(device if device >= 0 else self._device)
        return Opened(stream.device_index, stream, self._record_event(stream))

    def close(self, opened: Opened, numbers: tuple[int, ...], start_ns: int, end_ns: int, wait: bool) -> None:
        """It is enqueued.

        Args:
            opened: what `open` gave.
            numbers: of the records that this is a time of; negative ones were dropped.
            start_ns, end_ns: the host's stamps of the call.
            wait: it was the wait for the operation.
        """
        device, stream, start = opened
        if start is None:
            return
        try:
            end = self._record_event(stream)
            what = _WAIT if wait else 0
            self._pending.append(_Pair(device, stream.cuda_stream, start, end, numbers, start_ns, end_ns, what))
        except Exception as error:
            self._site.fault(error)

    def mark(self, at_ns: int) -> None:
        """The phase changes; `at_ns` is the host's stamp of that."""
        if self._cuda is None or threading.get_ident() != self._thread or at_ns <= self._marked_ns:
            return
        try:
            if self._can_record():
                stream = self._cuda.current_stream(self._device)
                self._pending.append(_Mark(stream.cuda_stream, self._record_event(stream), at_ns))
                self._marked_ns = at_ns
        except Exception as error:
            self._site.fault(error)

    def boundary(self, at_ns: int) -> None:
        """An iteration ended at this time, in the training thread: the place to see what is complete."""
        try:
            if self._cuda is None and not self._arm():
                return
            if not self._iterated:
                self._iterated = True
                self._thread = threading.get_ident()
            if threading.get_ident() != self._thread:
                return
            self.mark(at_ns)
            if not self._site.gate or self._is_captured():
                return
            found = self._cuda.memory_stats_as_nested_dict(self._device)
            allocated, reserved = (found.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
            counters = (allocated.get("current", 0), reserved.get("current", 0), allocated.get("peak", 0))
            self._pending.append(_Boundary(at_ns, *map(int, counters)))
            self._collect()
        except Exception as error:
            self._site.fault(error)

    def finish(self) -> None:
        """The program is done: take what is complete."""
        if self._cuda is None or threading.get_ident() != self._thread:
            return
        try:
            if self._site.gate and not self._is_captured():
                self._collect()
        except Exception as error:
            self._site.fault(error)

    def _arm(self) -> bool:
        """Whether the program has initialized CUDA."""
        cuda = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return False
        self._thread = threading.get_ident()
        self._device = int(cuda.current_device())
        self._cuda = cuda
        return True

    def _is_captured(self) -> bool:
        return captures.under_way() or bool(self._cuda.is_current_stream_capturing())

    def _can_record(self) -> bool:
        if not self._site.gate or (self._cuda is None and not self._arm()) or self._is_captured():
            return False
        if len(self._pending) >= _MANY:
            self.skipped += 1
            return False
        return True

    def _record_event(self, stream: Any) -> Any:
        try:
            event = self._pool[stream.device_index].pop()
        except (KeyError, IndexError):  # (looking first would be a race: backward has threads of its own)
            event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    # --- what is complete ---------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Record what is complete, in the order in which it was enqueued; what follows the first that is not waits."""
        pending = self._pending
        while pending:
            head = pending[0]
            if isinstance(head, _Boundary):
                self._write_memory(head)
            elif not (head.event if isinstance(head, _Mark) else head.end).query():
                return
            elif isinstance(head, _Mark):
                self._write_mark(head)
            else:
                self._write_pair(head)
            pending.popleft()

    def _write_pair(self, pair: _Pair) -> None:
        what, clock_ns, base = pair.what, 0, self._base
        if base is not None and base.stream == pair.stream and pair.device == self._device:
            what |= _HERE
            clock_ns = max(0, self._clock_ns + _ns(base.event, pair.start))
        took_ns = max(0, _ns(pair.start, pair.end))
        for number in pair.numbers:
            if number >= 0:
                self._recorder.record(
                    *(_TIME, pair.start_ns, pair.end_ns, 0, 0),
                    peer=pair.device,
                    ref=number + 1,
                    a=took_ns,
                    b=clock_ns,
                    c=what,
                )
        self._pool.setdefault(pair.device, []).extend((pair.start, pair.end))

    def _write_mark(self, mark: _Mark) -> None:
        took_ns = 0
        if self._base is not None:
            took_ns = max(0, _ns(self._base.event, mark.event))
            self._clock_ns += took_ns
            self._pool.setdefault(self._device, []).append(self._base.event)
        self._base = mark
        self._recorder.record(
            *(_MARK, mark.at_ns, mark.at_ns, 0, 0), peer=self._device, a=took_ns, b=self._clock_ns, c=_CLOCK
        )

    def _write_memory(self, at: _Boundary) -> None:
        # A moment before the end of the iteration is in it.
        self._recorder.record(
            *(_MEMORY, at.at_ns - 1, at.at_ns - 1, 0, 0),
            peer=self._device,
            a=at.allocated,
            b=at.reserved,
            c=at.peak,
        )


def device_of(value: Any) -> int:
    """Index of the device of a tensor, or of the first of several; -1 where it is on none."""
    while isinstance(value, (list, tuple)):
        value = value[0] if value else None
    get_device = getattr(value, "get_device", None)
    return -1 if get_device is None else int(get_device())


def _ns(start: Any, end: Any) -> int:
    """From one complete event to another."""
    return round(float(start.elapsed_time(end)) * 1e6)
