"""What the pipeline hooks share: schedule calls, numbered alike on all ranks of a pipeline, and the records inside one.

Both ends of a transfer name the sender's span from (group, schedule call, stages, microbatch, direction). None of these
is sent: each rank counts its own calls, and the ranks of a pipeline make the same calls, or none of them gets anywhere.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import GroupInfo, Skip
from instrumentors._patch import Hook
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

FORWARD = "forward"
BACKWARD = "backward"

now_ns = time.monotonic_ns

_CALL = int(Kind.PIPELINE_CALL)
_FAILED = int(Flag.FAILED)
_ENQUEUE = int(Flag.ENQUEUE)


def pipeline_site(name: str) -> Site:
    """The site of a hook that only transfers need."""
    return guard.site(name, lambda: "pipeline" in runtime.groups)


def microbatch_site(name: str) -> Site:
    """The site of a hook that only the computation of microbatches needs."""
    return guard.site(name, lambda: "microbatch" in runtime.groups)


# --- transfers --------------------------------------------------------------------------------------------------------


class Transfer:
    """One microbatch's activation or gradient between two stages: all its tensors.

    Attributes:
        kind: PIPELINE_SEND or PIPELINE_RECV.
        direction: FORWARD or BACKWARD.
        stage, peer_stage: ours and that at the other end, counted over the whole pipeline.
        microbatch: -1 where it is not known.
        peer: global rank at the other end.
        number: of its record; -1 before it has one.
    """

    __slots__ = ("direction", "dtype", "flags", "kind", "microbatch", "nbytes", "number", "peer", "peer_stage", "stage")

    def __init__(self, kind: Kind, direction: str, stage: int, peer_stage: int, microbatch: int, peer: int) -> None:
        self.kind = int(kind)
        self.direction = direction
        self.stage = stage
        self.peer_stage = peer_stage
        self.microbatch = microbatch
        self.peer = peer
        self.nbytes = 0
        self.dtype = 0
        self.flags = 0
        self.number = -1

    def add(self, recorder: Recorder, tensor: Any) -> None:
        """Count one of its tensors."""
        nbytes, self.dtype, device = _comm.payload(recorder, tensor)
        self.nbytes += nbytes
        if device:
            self.flags |= _ENQUEUE


class Call:
    """One call of a schedule, while it runs.

    Attributes:
        info: the pipeline's group.
        number: from 0, the same on all ranks of the pipeline.
        schedule: its name.
        backward: whether it runs backward.
    """

    __slots__ = ("backward", "info", "number", "schedule")

    def __init__(self, info: GroupInfo, number: int, schedule: str, backward: bool) -> None:
        self.info = info
        self.number = number
        self.schedule = schedule
        self.backward = backward

    def write(
        self, recorder: Recorder, state: ThreadState, transfer: Transfer, start: int, end: int, flags: int, failure: str
    ) -> None:
        """Write a transfer's record; one that only started is completed by the waits on its works."""
        transfer.number = recorder.record(
            transfer.kind,
            start,
            end,
            state.index,
            recorder.pipeline | transfer.flags | flags,
            recorder.strings.id(transfer.direction),
            self.info.name,
            transfer.dtype,
            transfer.microbatch,
            transfer.nbytes,
            transfer.peer,
            0,
            self.info.size,
            recorder.strings.id(failure),
            end - start,
            0,
            self.number,
            transfer.stage,
            transfer.peer_stage,
        )

    def write_microbatch(
        self,
        recorder: Recorder,
        state: ThreadState,
        kind: Kind,
        name: str,
        stage: int,
        microbatch: int,
        start: int,
        flags: int,
        failure: str,
    ) -> None:
        """Write the record of a microbatch's computation, which ends now."""
        end = now_ns()
        recorder.record(
            kind,
            start,
            end,
            state.index,
            recorder.microbatch | flags,
            recorder.strings.id(name),
            self.info.name,
            seq=microbatch,
            group_size=self.info.size,
            detail=recorder.strings.id(failure),
            a=self.number,
            b=stage,
        )


def watch_too(work: Any, number: int) -> None:
    """Let the wait on this work complete one more record: the point-to-point hooks watch the same works."""
    watched = _comm.pending.get(id(work))
    _comm.watch(work, (number,) if watched is None else (*watched.numbers, number))


# --- schedule calls ---------------------------------------------------------------------------------------------------


class _Local(threading.local):
    call: Call | None = None  # the schedule call that the thread is in


local = _Local()
_numbers: dict[tuple[int, str], int] = {}
_lost = False  # a call was not counted: nothing can be named any more
os.register_at_fork(after_in_child=_numbers.clear)


def next_call(recorder: Recorder, info: GroupInfo) -> int:
    """Number of the schedule call that starts now, from 0 per initialization and name of the pipeline's group."""
    key = (recorder.init, info.text)
    number = _numbers.get(key, 0)
    _numbers[key] = number + 1
    return number


Begin = Callable[["Recorder", Any, dict[str, Any]], "Call | None"]


def call_hook(site: Site, begin: Begin) -> Hook:
    """A hook around a schedule call.

    Args:
        site: where failures of ours count.
        begin: gives the call: recorder, instance, keyword arguments; None where it is not to be recorded.
    """

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        global _lost
        recorder = runtime.recorder
        if recorder is None or _lost:
            return wrapped(*args, **kwargs)
        outer = local.call
        start = now_ns()
        call: Call | None = None
        try:
            call = begin(recorder, instance, kwargs)
        except Skip:
            pass
        except Exception as error:
            _lost = True
            site.fault(error)
        local.call = call
        try:
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            try:
                _ended(recorder, call, start, type(error).__name__)
            except Exception as failure:
                site.fault(failure)
            raise
        finally:
            local.call = outer
        try:
            _ended(recorder, call, start, "")
        except Exception as error:
            site.fault(error)
        return result

    return hook


def _ended(recorder: Recorder, call: Call | None, start: int, failure: str) -> None:
    if call is None:
        return
    recorder.record(
        _CALL,
        start,
        now_ns(),
        recorder.thread().index,
        _FAILED if failure else 0,
        recorder.strings.id(call.schedule),
        call.info.name,
        group_size=call.info.size,
        detail=recorder.strings.id(failure),
        a=call.number,
        b=int(call.backward),
    )
