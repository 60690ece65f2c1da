"""A stand-in for `torch.cuda`'s events, streams and counters, for machines without a GPU.

A device that works through its streams in the order in which work was enqueued, on a clock that the test moves. Nothing
here may be asked while a graph is captured, and nothing here waits: `synchronize` is not there at all.
"""

from __future__ import annotations

import itertools
import struct
import threading
from typing import Any


class Stream:
    """Work in order; `busy_until` is when the device is through with what was enqueued, ns on its clock."""

    def __init__(self, cuda: FakeCuda, device_index: int, cuda_stream: int) -> None:
        self.cuda = cuda
        self.device_index = device_index
        self.cuda_stream = cuda_stream
        self.busy_until = 0

    def run(self, ms: float) -> None:
        """Enqueue work."""
        self.busy_until = max(self.busy_until, self.cuda.now) + round(ms * 1e6)

    def wait(self, until: int) -> None:
        """Enqueue a wait for something that is over then."""
        self.busy_until = max(self.busy_until, until)


class Event:
    """As torch's: recorded again and again on streams of one device."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool) -> None:
        assert enable_timing
        self.cuda = cuda
        self.device: int | None = None
        self.at: int | None = None
        cuda.events += 1

    def record(self, stream: Stream) -> None:
        self.cuda.check()
        assert self.device in (None, stream.device_index), "the event is of another device"
        self.device = stream.device_index
        self.at = max(stream.busy_until, self.cuda.now)

    def query(self) -> bool:
        self.cuda.check()
        self.cuda.queried_by.add(threading.get_ident())
        assert self.at is not None
        return self.at <= self.cuda.now

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, with the precision of CUDA's: a 32-bit float."""
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready")
        assert self.at is not None and other.at is not None and self.device == other.device
        return float(struct.unpack("f", struct.pack("f", (other.at - self.at) / 1e6))[0])


class FakeCuda:
    """What `lens_auto.recorder.device` reaches of `torch.cuda`."""

    def __init__(self) -> None:
        self.now = 0  # the device's clock, ns
        self.initialized = True
        self.capturing = False
        self.device = 0
        self.events = 0
        self.queried_by: set[int] = set()
        self.memory = {"allocated": 0, "reserved": 0, "peak": 0}
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)

    def check(self) -> None:
        assert self.initialized, "CUDA is not initialized"
        assert not self.capturing, "operation not permitted when stream is capturing"

    def is_initialized(self) -> bool:
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_device(self) -> int:
        assert self.initialized, "this would initialize CUDA"
        return self.device

    def current_stream(self, device: int | None = None) -> Stream:
        index = self.device if device is None else device
        return self._streams.setdefault(index, Stream(self, index, next(self._numbers)))

    def use_stream(self, stream: Stream) -> Stream:
        """Make a stream the current one of its device; the one before is returned."""
        before = self.current_stream(stream.device_index)
        self._streams[stream.device_index] = stream
        return before

    def new_stream(self, device: int = 0) -> Stream:
        return Stream(self, device, next(self._numbers))

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self, enable_timing)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        self.check()
        of = {name: {"all": {"current": self.memory[name]}} for name in ("allocated", "reserved")}
        of["allocated"]["all"]["peak"] = self.memory["peak"]
        return {f"{name}_bytes": counters for name, counters in of.items()}

    def advance(self, ms: float) -> None:
        """Time passes on the device."""
        self.now += round(ms * 1e6)
