"""The carrier that every rank shares for an iteration: rank 0's trace context, baggage and control word, broadcast once
an iteration on a process group of our own, from a thread of our own. No rank ever waits for it.

The group is a `ProcessGroupGloo` that is constructed directly: `new_group` would bump torch's group counter, and can
rename the program's groups. Private names of torch (seen in 2.13): `ProcessGroupGloo(store, rank, size, timeout)`,
`BroadcastOptions`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from lens_auto import guard
from lens_auto.groups import TrainingSpanGroup
from lens_auto.iteration.store import StoreAccess, patient_store
from lens_auto.recorder.bell import Bell

logger = logging.getLogger("lens_auto")

CARRIER_BYTES = 512
MAX_RANKS = 128
MAX_OUTSTANDING = 4
JOIN_TIMEOUT_S = 60.0  # how long rank 0 waits for all ranks to say that they take part
LOOK_S = 0.1  # between looks at the store
HURRIED_LOOK_S = 0.02
CONNECT_TIMEOUT_S = 20.0
STALL_TIMEOUT_S = 120.0  # a broadcast that does not complete for so long ends the carrier
ARRIVAL_S = 0.05  # how long after a boundary the thread looks whether the broadcast is through, if no other came before
SHORT_S = 0.003  # iterations that are shorter share a wake-up, so long after the last
IDLE_S = 0.25

_MAGIC = 0x4C43
_VERSION = 1
# magic, version, iteration, the iteration that rank 0 is in, two switches (groups as bits, from iteration; bit 31:
# none), lengths of the three texts
_HEAD = struct.Struct("<HHQQIQIQHHH")
_NO_SWITCH = 1 << 31
_GROUPS = sorted(TrainingSpanGroup.ALL_GROUPS)


class Switch:
    """Span groups that are on from an iteration on."""

    __slots__ = ("from_iteration", "groups")

    def __init__(self, groups: frozenset[str], from_iteration: int) -> None:
        self.groups = groups
        self.from_iteration = from_iteration

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Switch) and (self.groups, self.from_iteration) == (other.groups, other.from_iteration)

    def __hash__(self) -> int:
        return hash((self.groups, self.from_iteration))

    def bits(self) -> int:
        """The groups as bits, in alphabetical order of all groups."""
        return sum(1 << index for index, name in enumerate(_GROUPS) if name in self.groups)


def groups_of_bits(bits: int) -> frozenset[str]:
    """The reverse of `Switch.bits`."""
    return frozenset(name for index, name in enumerate(_GROUPS) if bits >> index & 1)


def pack(iteration: int, current: int, carrier: Mapping[str, str], switches: list[Switch]) -> tuple[bytes, list[str]]:
    """The fixed-size message of one iteration, sent while rank 0 is in another.

    Where the texts do not fit, baggage is left out first, then tracestate.

    Returns:
        512 bytes, and the names of the headers left out.
    """
    texts = {name: carrier.get(name, "").encode() for name in ("traceparent", "tracestate", "baggage")}
    left_out = []
    for name in ("baggage", "tracestate", "traceparent"):
        if _HEAD.size + sum(map(len, texts.values())) <= CARRIER_BYTES:
            break
        texts[name] = b""
        left_out.append(name)
    words: list[int] = []
    for index in range(2):
        if index < len(switches):
            words += (switches[index].bits(), switches[index].from_iteration)
        else:
            words += (_NO_SWITCH, 0)
    head = _HEAD.pack(_MAGIC, _VERSION, iteration, current, *words, *map(len, texts.values()))
    return (head + b"".join(texts.values())).ljust(CARRIER_BYTES, b"\0"), left_out


def unpack(message: bytes) -> tuple[int, int, dict[str, str], list[Switch]]:
    """Iteration, rank 0's iteration when it was sent, carrier and switches of a message.

    Raises:
        ValueError: it is none of ours.
    """
    magic, version, iteration, current, bits1, from1, bits2, from2, *lengths = _HEAD.unpack_from(message)
    if magic != _MAGIC or version != _VERSION or _HEAD.size + sum(lengths) > len(message):
        raise ValueError(f"not a carrier message (starts {message[:4].hex()})")
    carrier, at = {}, _HEAD.size
    for name, length in zip(("traceparent", "tracestate", "baggage"), lengths, strict=True):
        if length:
            carrier[name] = message[at : at + length].decode()
        at += length
    words = ((bits1, from1), (bits2, from2))
    return iteration, current, carrier, [Switch(groups_of_bits(b), f) for b, f in words if not b & _NO_SWITCH]


def descriptors_left() -> int:
    """File descriptors that this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return soft - len(os.listdir("/proc/self/fd"))


class Carrier:
    """One rank's side of the carrier. Its thread does all the work; it ends by itself where anything is wrong.

    Args:
        access: to the job's store.
        prefix: tells this init of this attempt from others.
        rank, world_size: of the default group.
        current: the iteration that this process is in.
        outgoing: rank 0: carrier and switches of an iteration.
        arrived: called with an iteration, its carrier, the switches, and the iterations that rank 0 was in when it sent
            them and that this process was in when they came.
    """

    def __init__(
        self,
        access: StoreAccess,
        prefix: str,
        rank: int,
        world_size: int,
        current: Callable[[], int],
        outgoing: Callable[[int], tuple[dict[str, str], list[Switch]]],
        arrived: Callable[[int, dict[str, str], list[Switch], int, int], None],
    ) -> None:
        self._access = access
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._current = current
        self._outgoing = outgoing
        self._arrived = arrived
        self._stopping = threading.Event()
        self.boundary = Bell()  # rung by the training thread when an iteration begins
        self.cpu_ns = 0  # of the thread, while it broadcasts
        self._thread = threading.Thread(target=self._run, name="lens-carrier", daemon=True)
        self._hurry = False
        self.state = "unstarted"  # joining, connecting, running, ended
        self.reason = ""
        self.sent = 0
        self.received = 0
        self.left_out = 0

    def start(self, agreed: str) -> None:
        """Start the thread.

        Args:
            agreed: what only ranks know that agreed: keys that others left in the store are not these.
        """
        self._prefix = f"{self._prefix}/{agreed}"
        self.state = "joining"
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._end(str(error))

    @property
    def needs_store(self) -> bool:
        """Whether this rank asks the job's store, or rank 0 is about to have others ask it."""
        return self.state in ("joining", "connecting")

    def hurry(self) -> None:
        """The store is about to go."""
        self._hurry = True

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()
        self.boundary.ring()

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread after `stop`: one that comes back from C++ while the interpreter ends would abort it."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            group = self._join()
            if group is not None:
                self.state = "running"
                self._broadcast(group)
        except Exception as error:
            try:
                self._end(f"{type(error).__name__}: {error}")
            except Exception as failure:
                self.state = "ended"
                guard.failed("carrier", failure)

    def _end(self, reason: str, stalled: bool = False) -> None:
        self.state, self.reason = "ended", reason
        if not self._stopping.is_set():
            # A peer whose connection closed has ended, as all do; one that is there and does not answer is news.
            level = logging.WARNING if stalled else logging.DEBUG
            logger.log(level, "lens-auto: no carrier broadcast from here on (%s); derived ids are used", reason)

    def _key(self, what: str) -> str:
        return f"{self._prefix}/carrier/{what}"

    def _join(self) -> Any:
        """Build the group once every rank said that it takes part and rank 0 has said go. None: it does not come."""
        import torch.distributed.distributed_c10d as c10d

        if descriptors_left() < 64 + 4 * self._world_size:
            self._end(f"RLIMIT_NOFILE leaves {descriptors_left()} descriptors")
            return None
        store = self._access.another()
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        store.set(self._key(f"ready/{self._rank}"), "1")
        if self._rank == 0:
            waiting = set(range(1, self._world_size))
            while waiting:
                waiting = {rank for rank in waiting if not store.check([self._key(f"ready/{rank}")])}
                if waiting and not self._patient(deadline):
                    self._end(f"ranks {sorted(waiting)[:8]} do not take part")
                    return None
            self.state = "connecting"
            store.set(self._key("go"), "1")
        else:
            while not store.check([self._key("go")]):
                if not self._patient(deadline):
                    self._end("rank 0 did not say go")
                    return None
        self.state = "connecting"
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        meeting = patient_store(store, self._key("group"), self._stopping)
        _keep_forever(meeting)
        group = c10d.ProcessGroupGloo(meeting, self._rank, self._world_size, timeout)
        _keep_forever(group)
        store.close()
        return group if self._meet(group, deadline) else None

    def _meet(self, group: Any, deadline: float) -> bool:
        """Wait until no rank needs the store any more: one that is looking for another may be connected to by it."""
        meeting = group.barrier()
        try:
            while not meeting.is_completed():
                if not self._patient(deadline):
                    self._end("ranks do not meet")
                    return False
            _torchs_wait()(meeting)
        finally:
            _keep_forever(meeting)
        return True

    def _patient(self, deadline: float) -> bool:
        return not self._stopping.wait(HURRIED_LOOK_S if self._hurry else LOOK_S) and time.monotonic() < deadline

    def _broadcast(self, group: Any) -> None:
        outstanding: deque[tuple[Any, memoryview, int, float]] = deque()  # work, message, iteration, since when
        try:
            self._take_turns(group, outstanding)
        finally:
            for work, *_ in outstanding:
                _keep_forever(work)

    def _take_turns(self, group: Any, outstanding: deque[tuple[Any, memoryview, int, float]]) -> None:
        """One broadcast for every iteration, in order, at most `MAX_OUTSTANDING` at a time."""
        import torch
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        buffers = [torch.zeros(CARRIER_BYTES, dtype=torch.uint8) for _ in range(MAX_OUTSTANDING + 1)]
        messages = [buffer.numpy().data for buffer in buffers]
        for buffer in buffers:
            _keep_forever(buffer)
        wait = _torchs_wait()
        following = was_in = 0
        issued_at = last_issued_at = time.monotonic()
        while not self._stopping.is_set():
            while outstanding and outstanding[0][0].is_completed():
                work, message, _, _ = outstanding[0]
                wait(work)
                outstanding.popleft()
                if self._rank != 0:
                    iteration, first_is_in, carrier, switches = unpack(message.tobytes())
                    self.received += 1
                    self._arrived(iteration, carrier, switches, first_is_in, was_in)
            if outstanding and time.monotonic() - outstanding[0][3] > STALL_TIMEOUT_S:
                self._end(
                    f"the broadcast of iteration {outstanding[0][2]} did not complete in {STALL_TIMEOUT_S:.0f} s", True
                )
                return
            issued = False
            while following <= self._current() and len(outstanding) < MAX_OUTSTANDING:
                index = following % len(buffers)
                if self._rank == 0:
                    carrier, switches = self._outgoing(following)
                    messages[index][:], left_out = pack(following, self._current(), carrier, switches)
                    self.left_out += len(left_out)
                    self.sent += 1
                work = group.broadcast([buffers[index]], options)
                last_issued_at, issued_at = issued_at, time.monotonic()
                outstanding.append((work, messages[index], following, issued_at))
                following += 1
                issued = True
            self.cpu_ns = time.thread_time_ns()
            was_in = self._current()
            # Each wake-up takes the GIL from the training thread, and what it runs is in no cache any more: one at a
            # boundary, at which the last broadcast is through, too.
            if issued and issued_at - last_issued_at < SHORT_S:
                self._stopping.wait(SHORT_S)
            else:
                self.boundary.wait(ARRIVAL_S if outstanding else IDLE_S)


def _torchs_wait() -> Callable[[Any], Any]:
    """`Work.wait` past our own hook: of a complete work it only raises what failed (`Work.exception` warns)."""
    from torch.distributed.distributed_c10d import Work

    wait: Callable[[Any], Any] = vars(Work)["wait"]
    return getattr(wait, "__wrapped__", wait)


def _keep_forever(thing: Any) -> None:
    """Never destruct: a group or work with a peer that is gone waits in its destructor until its timeout."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
