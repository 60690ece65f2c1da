"""Megatron-core's pipeline schedules: microbatches of each stage, and what stages send to each other.

The communicator knows neither microbatch nor stage. Both follow from the order: within a schedule call, the n-th
activation to the next rank belongs to the n-th forward step that has a next stage, the n-th gradient to the previous
rank likewise, and what a rank receives comes in the order in which its neighbour sends it.

Seen in megatron-core 0.16 (`P2PCommunicator` is there since 0.14). Schedules of other kinds (several modules bridged, a
combined forward and backward step) keep their point-to-point spans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm, _pipeline, backward
from instrumentors._patch import Hook, LensInstrumentor, Patches
from instrumentors._pipeline import BACKWARD, FORWARD, Call, Transfer, now_ns
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder

_FAILED = int(Flag.FAILED)
_ASYNC = int(Flag.ASYNC)
_COALESCED = int(Flag.COALESCED)
_ENQUEUE = int(Flag.ENQUEUE)

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_OPERATIONS = (
    "recv_forward",
    "recv_backward",
    "send_forward",
    "send_backward",
    "send_forward_recv_backward",
    "send_backward_recv_forward",
    "send_forward_recv_forward",
    "send_backward_recv_backward",
    "send_forward_backward_recv_forward_backward",
)

# What `_communicate` can do at once: key of its work -> kind, direction, whether the next rank is at the other end.
_PARTS = {
    "send_next": (Kind.PIPELINE_SEND, FORWARD, True),
    "recv_prev": (Kind.PIPELINE_RECV, FORWARD, False),
    "send_prev": (Kind.PIPELINE_SEND, BACKWARD, False),
    "recv_next": (Kind.PIPELINE_RECV, BACKWARD, True),
}


def steps(microbatches: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    """The order of a rank's forward steps: (microbatch, model chunk).

    Groups of `group_size` microbatches go through all chunks of a rank before the next group starts; the last group may
    be smaller. Backward steps take the microbatches in the same order, and the chunks from the last to the first.
    """
    found = []
    for first in range(0, microbatches, group_size):
        group = range(first, min(first + group_size, microbatches))
        found += [(microbatch, chunk) for chunk in range(chunks) for microbatch in group]
    return found


class _MegatronCall(Call):
    """A call of one of the forward-backward functions.

    Attributes:
        ranks: global rank of each pipeline rank.
        rank: this rank's place among them.
        order: (microbatch, stage) of this rank's steps, by direction.
        moved: (microbatch, stage here, stage there) of its transfers, by part of `_communicate`.
        counts: how many of each it has made.
        transfers, microbatches: which are recorded. Whoever starts to count in the middle of a call counts wrongly.
    """

    __slots__ = ("counts", "microbatches", "moved", "order", "rank", "ranks", "transfers")

    def __init__(
        self,
        recorder: Recorder,
        info: _comm.GroupInfo,
        schedule: str,
        backward: bool,
        forward_steps: list[tuple[int, int]],
    ) -> None:
        super().__init__(info, _pipeline.next_call(recorder, info), schedule, backward)
        self.transfers = bool(recorder.pipeline)
        self.microbatches = bool(recorder.microbatch)
        self.ranks = info.ranks
        self.rank = rank = info.ranks.index(info.rank)
        size = info.size
        chunks = 1 + max((chunk for _, chunk in forward_steps), default=0)
        backward_steps = [(microbatch, chunks - 1 - chunk) for microbatch, chunk in forward_steps]
        self.order = {
            FORWARD: [(microbatch, chunk * size + rank) for microbatch, chunk in forward_steps],
            BACKWARD: [(microbatch, chunk * size + rank) for microbatch, chunk in backward_steps],
        }
        self.moved = {
            "send_next": _moved(forward_steps, rank, 1, size, chunks),
            "recv_prev": _turned(_moved(forward_steps, (rank - 1) % size, 1, size, chunks)),
            "send_prev": _moved(backward_steps, rank, -1, size, chunks),
            "recv_next": _turned(_moved(backward_steps, (rank + 1) % size, -1, size, chunks)),
        }
        self.counts: dict[str, int] = {}

    def take(self, what: str, order: list[Any]) -> Any:
        """The next of an order; None where it is at its end."""
        index = self.counts.get(what, 0)
        self.counts[what] = index + 1
        return order[index] if index < len(order) else None


def _moved(order: list[tuple[int, int]], rank: int, step: int, size: int, chunks: int) -> list[tuple[int, int, int]]:
    """What a rank sends to a neighbour: (microbatch, its stage, the neighbour's). The ends send nothing on."""
    found = [(microbatch, chunk * size + rank, chunk * size + rank + step) for microbatch, chunk in order]
    return [each for each in found if 0 <= each[2] < size * chunks]


def _turned(moved: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(microbatch, there, here) for microbatch, here, there in moved]


# --- schedule calls ---------------------------------------------------------------------------------------------------


def _begin(schedule: str, interleaved: bool, module: ModuleType) -> _pipeline.Begin:
    def begin(recorder: Recorder, instance: Any, kwargs: dict[str, Any]) -> Call | None:
        communicator = kwargs.get("p2p_communicator")
        collection = kwargs.get("pg_collection")
        if communicator is not None and not isinstance(communicator, module.P2PCommunicator):
            guard.logger.debug(
                "lens-auto: %s is not a communicator that is known; its transfers are point-to-point spans",
                type(communicator).__name__,
            )
            return None
        group = getattr(communicator, "pp_group", None) or getattr(collection, "pp", None)
        if group is None:
            group = module.parallel_state.get_pipeline_model_parallel_group()
        info = _comm.group_info(recorder, group)
        microbatches, model = kwargs["num_microbatches"], kwargs["model"]
        chunks, group_size = 1, microbatches
        if interleaved:
            chunks = len(model)
            config = module.get_model_config(model[0])
            group_size = getattr(config, "microbatch_group_size_per_vp_stage", None) or info.size
        order = steps(microbatches, chunks, max(1, group_size))
        return _MegatronCall(recorder, info, schedule, not kwargs.get("forward_only", False), order)

    return begin


# --- transfers --------------------------------------------------------------------------------------------------------


class _Batch:
    """What one operation of the communicator transfers: for each part one transfer, of one tensor or several."""

    __slots__ = ("start", "transfers", "works")

    def __init__(self) -> None:
        self.start = now_ns()
        self.transfers: dict[str, Transfer] = {}
        self.works: list[tuple[Any, str | None]] = []  # works that are not waited for inside, and what each completes

    def write(self, recorder: Recorder, call: Call, failure: str) -> None:
        end = now_ns()
        flags = _FAILED if failure else _ASYNC if self.works else 0
        if len(self.transfers) > 1:
            flags |= _COALESCED
        state = recorder.thread()
        for transfer in self.transfers.values():
            call.write(recorder, state, transfer, self.start, end, flags, failure)
        for work, part in self.works:
            for name, transfer in self.transfers.items():
                if part in (name, None) and transfer.number >= 0:
                    _pipeline.watch_too(work, transfer.number)


class _Local(threading.local):
    batch: _Batch | None = None


_local = _Local()


def _operation_hook(site: Site) -> Hook:
    """A public operation of `P2PCommunicator`, which transfers the tensors of a microbatch one by one."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, call = runtime.recorder, _pipeline.local.call
        if recorder is None or not isinstance(call, _MegatronCall) or _local.batch is not None:
            return wrapped(*args, **kwargs)
        try:
            batch = _local.batch = _Batch() if call.transfers else None
        except Exception as error:
            batch = None
            site.fault(error)
        if batch is None:
            return wrapped(*args, **kwargs)
        failure = ""
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            _local.batch = None
            try:
                batch.write(recorder, call, failure)
            except Exception as error:
                site.fault(error)

    return hook


def _communicate_hook(site: Site) -> Hook:
    """`P2PCommunicator._communicate`, where the tensors are known."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, call, batch = runtime.recorder, _pipeline.local.call, _local.batch
        result = wrapped(*args, **kwargs)
        if recorder is not None and isinstance(call, _MegatronCall) and batch is not None:
            try:
                _communicated(recorder, call, batch, kwargs, result)
            except _comm.Skip:
                pass
            except Exception as error:
                site.fault(error)
        return result

    return hook


def _communicated(
    recorder: Recorder, call: _MegatronCall, batch: _Batch, kwargs: dict[str, Any], result: tuple[Any, ...]
) -> None:
    tensors = {
        "send_next": kwargs.get("tensor_send_next"),
        "send_prev": kwargs.get("tensor_send_prev"),
        "recv_prev": result[0] if kwargs.get("recv_prev") else None,
        "recv_next": result[1] if kwargs.get("recv_next") else None,
    }
    for part, tensor in tensors.items():
        if tensor is None:
            continue
        transfer = batch.transfers.get(part)
        if transfer is None:
            kind, direction, to_next = _PARTS[part]
            moved = call.take(part, call.moved[part])
            # One too many: whatever this is, it cannot be named.
            microbatch, stage, peer_stage = moved if moved is not None else (-1, call.rank, call.rank)
            peer = call.ranks[(call.rank + (1 if to_next else -1)) % len(call.ranks)]
            transfer = batch.transfers[part] = Transfer(kind, direction, stage, peer_stage, microbatch, peer)
        transfer.add(recorder, tensor)
    works = result[2] if len(result) > 2 else None
    if isinstance(works, dict):
        batch.works += [(work, part) for part, work in works.items()]
    elif works:
        batch.works += [(work, None) for work in works]


# --- microbatches -----------------------------------------------------------------------------------------------------


def _step_hook(function: str, site: Site) -> Hook:
    """`forward_step` and `backward_step` of the schedules."""
    forward = function == "forward_step"
    kind, direction = (Kind.PIPELINE_FORWARD, FORWARD) if forward else (Kind.PIPELINE_BACKWARD, BACKWARD)

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, call = runtime.recorder, _pipeline.local.call
        if recorder is None or not isinstance(call, _MegatronCall):
            return wrapped(*args, **kwargs)
        start = now_ns()
        failure = ""
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            try:
                if call.microbatches:
                    microbatch, stage = call.take(direction, call.order[direction]) or (-1, call.rank)
                    flags = _FAILED if failure else 0
                    if _comm.torch.cuda.is_initialized():
                        flags |= _ENQUEUE
                    state = recorder.thread()
                    call.write_microbatch(recorder, state, kind, direction, stage, microbatch, start, flags, failure)
            except Exception as error:
                site.fault(error)

    return hook


# --- installing -------------------------------------------------------------------------------------------------------


class MegatronInstrumentor(LensInstrumentor):
    """The three forward-backward functions of Megatron-core, `P2PCommunicator`, `custom_backward`."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"megatron.core.pipeline_parallel.schedules": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        if hasattr(module, "custom_backward"):  # it calls the engine directly, so that no other hook sees it
            site = guard.site("megatron.custom_backward")
            patches.wrap(module, "custom_backward", backward._hook(site), site)
        communicator = getattr(module, "P2PCommunicator", None)
        if communicator is None or "_communicate" not in vars(communicator):
            guard.logger.debug(
                "lens-auto: this version of megatron-core has no P2PCommunicator (0.14 and later have); its transfers"
                " are point-to-point spans"
            )
            return
        from torch.distributed import distributed_c10d

        _comm.bind(distributed_c10d)
        for function in _SCHEDULES:
            site = guard.site(f"megatron.{function}")  # always on: calls are counted whatever is recorded
            begin = _begin(function, function.endswith("with_interleaving"), module)
            patches.wrap(module, function, _pipeline.call_hook(site, begin), site)
        for operation in _OPERATIONS:
            site = _pipeline.pipeline_site(f"megatron.{operation}")
            patches.wrap(communicator, operation, _operation_hook(site), site)
        site = _pipeline.pipeline_site("megatron._communicate")
        patches.wrap(communicator, "_communicate", _communicate_hook(site), site)
        for function in ("forward_step", "backward_step"):
            site = _pipeline.microbatch_site(f"megatron.{function}")
            patches.wrap(module, function, _step_hook(function, site), site)
