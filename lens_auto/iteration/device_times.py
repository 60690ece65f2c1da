"""What the records say that a device took: operations, phases, and the writer's device clock.

`recorder.device` writes them. Times are nanoseconds; -1 stands for what was not measured.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lens_auto.iteration.rule import Int64Array, Mask
from lens_auto.recorder.layout import DeviceTime, Flag, Kind
from lens_auto.recorder.read import find_referring

# (NumPy takes a flag for a signed number, which it does not combine with an unsigned one.)
_WAIT, _CLOCK, _EXPOSED = (np.uint64(what) for what in (DeviceTime.WAIT, DeviceTime.CLOCK, DeviceTime.EXPOSED))


class OperationTimes(NamedTuple):
    """Of some operations, as columns.

    Attributes:
        duration_ns: from when the stream that it was called on came to it until it was over, waiting for other ranks
            included.
        exposed_ns: for how long the stream of the training thread was held by it; -1 also where it was another stream.
        by_flight: the duration is the flight recorder's.
    """

    duration_ns: Int64Array
    exposed_ns: Int64Array
    by_flight: Mask


def operation_times(data: npt.NDArray[np.void], numbers: Int64Array, rows: Int64Array) -> OperationTimes:
    """What a device took for operations.

    Args:
        data: the records of a writer.
        numbers: their numbers, ascending.
        rows: where the operations are among them, ascending.
    """
    duration_ns, exposed_ns = (np.full(len(rows), -1, dtype=np.int64) for _ in range(2))
    by_flight: Mask = np.zeros(len(rows), dtype=np.bool_)
    times, at = find_referring(data, numbers, Kind.DEVICE_TIME, rows)
    took_ns = data["a"][times].astype(np.int64)
    waits = (data["c"][times] & _WAIT) != 0
    flight = (data["flags"][times] & Flag.FLIGHT) != 0
    own = ~waits & ~flight
    duration_ns[at[flight]] = took_ns[flight]
    by_flight[at[flight]] = True
    duration_ns[at[own]] = took_ns[own]
    by_flight[at[own]] = False
    held = (data["c"][times] & _EXPOSED) != 0
    exposed_ns[at[held]] = 0
    np.add.at(exposed_ns, at[held], took_ns[held])
    return OperationTimes(duration_ns, exposed_ns, by_flight)


class DeviceClock:
    """Times of a writer's host on its device's clock: when the stream of its training thread came there.

    Args:
        data: the records of a writer.
    """

    def __init__(self, data: npt.NDArray[np.void]) -> None:
        known = (data["c"] & _CLOCK) != 0
        marks = data[(data["kind"] == Kind.DEVICE_MARK) & known]
        times = data[(data["kind"] == Kind.DEVICE_TIME) & known]
        start_ns, took_ns = times["b"].astype(np.int64), times["a"].astype(np.int64)
        host_ns = np.concatenate([marks["start_ns"], times["start_ns"], times["end_ns"]]).astype(np.int64)
        device_ns = np.concatenate([marks["b"].astype(np.int64), start_ns, start_ns + took_ns])
        order = np.lexsort((device_ns, host_ns))
        self.host_ns: Int64Array = host_ns[order]
        self.device_ns: Int64Array = np.maximum.accumulate(device_ns[order]) if len(order) else device_ns

    def __bool__(self) -> bool:
        return len(self.host_ns) > 1

    def between(self, start_ns: Int64Array, end_ns: Int64Array) -> Int64Array:
        """What the device took from one time of the host to another, where both are known to the nanosecond."""
        found = np.full(len(start_ns), -1, dtype=np.int64)
        if self:
            (first, known_first), (last, known_last) = self._exact(start_ns), self._exact(end_ns)
            known = known_first & known_last
            found[known] = (last - first)[known]
        return found

    def _exact(self, time_ns: Int64Array) -> tuple[Int64Array, Mask]:
        at = np.minimum(np.searchsorted(self.host_ns, time_ns), len(self.host_ns) - 1)
        return self.device_ns[at], self.host_ns[at] == time_ns

    def translate(self, time_ns: Int64Array) -> Int64Array:
        """Times of the host to when the device came there, on the host's clock; in between evenly, outside as they are.

        Nothing runs before it was enqueued, and what was enqueued while the device had nothing to do runs at once: the
        smallest shift that is possible is the one between the two clocks.
        """
        if not self:
            return time_ns
        shift = int((self.host_ns - self.device_ns).max())
        base = int(self.host_ns[0])
        moved = np.interp(time_ns - base, self.host_ns - base, self.device_ns + (shift - base))
        found = np.rint(moved).astype(np.int64) + base
        outside = (time_ns < self.host_ns[0]) | (time_ns > self.host_ns[-1])
        ends = np.where(time_ns < self.host_ns[0], 0, self.device_ns[-1] + shift - self.host_ns[-1])
        result: Int64Array = np.where(outside, time_ns + ends, found)
        return result
