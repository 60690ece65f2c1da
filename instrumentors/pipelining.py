"""`torch.distributed.pipelining`: microbatches of each stage, and what stages send to each other.

A stage says which operations carry a microbatch's activation or gradient (`get_fwd_recv_ops` and its like); the
schedule starts them (`_batch_p2p`), together with those of other microbatches and stages as it sees fit, and waits
later. So an operation is remembered when the stage gives it out, and its record is written when the schedule starts it;
the wait on its work, wherever that happens, completes the record.

Seen in 2.13. Up to 2.7 `_batch_p2p` gives one work for the whole list. Schedules that drive stages themselves, outside
`step`, are not recorded here: their transfers are point-to-point operations like any other.
"""

from __future__ import annotations

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

# Method of a stage that gives out operations -> what they carry, and the attribute that names the stages at the other
# end: by microbatch, by output, or one list for all.
_OPERATIONS = {
    "get_fwd_recv_ops": (Kind.PIPELINE_RECV, FORWARD, "args_recv_info"),
    "get_bwd_recv_ops": (Kind.PIPELINE_RECV, BACKWARD, "grad_recv_info"),
    "get_fwd_send_ops": (Kind.PIPELINE_SEND, FORWARD, "act_send_info"),
    "get_bwd_send_ops": (Kind.PIPELINE_SEND, BACKWARD, "grad_send_info"),
}


class _TorchCall(Call):
    """A call of a schedule's `step`; `given` holds the operations that stages gave out and nobody started yet."""

    __slots__ = ("given",)

    def __init__(self, info: _comm.GroupInfo, number: int, schedule: str, backward: bool) -> None:
        super().__init__(info, number, schedule, backward)
        self.given: dict[int, tuple[Any, Transfer]] = {}  # by id; the operation is kept, so that its id stays its own


def _begin(recorder: Recorder, schedule: Any, kwargs: dict[str, Any]) -> Call:
    stages = getattr(schedule, "_stages", None)
    stage = stages[0] if stages else schedule._stage
    info = _comm.group_info(recorder, stage.group)
    number = _pipeline.next_call(recorder, info)
    return _TorchCall(info, number, type(schedule).__name__, bool(getattr(schedule, "_has_backward", True)))


# --- transfers --------------------------------------------------------------------------------------------------------


def _peer_stages(stage: Any, kind: Kind, direction: str, attribute: str, microbatch: int, count: int) -> list[int]:
    """The stage at the other end of each operation, in their order. With skip connections it is not the neighbour."""
    found = getattr(stage, attribute)
    if kind is Kind.PIPELINE_RECV:
        peers = [
            each.source
            for each in found[microbatch]
            if getattr(each, "source", None) is not None and each.buffer is not None
        ]
    elif direction is FORWARD:
        peers = [each for output in sorted(found) for each in found[output] if each is not None]
    else:
        peers = [each for each in found if each is not None]
    if len(peers) != count:  # tensors without a gradient are not sent
        up = (kind is Kind.PIPELINE_RECV) == (direction is FORWARD)
        peers = [stage.stage_index + (-1 if up else 1)] * count
    return peers


def _operations_hook(method: str, site: Site) -> Hook:
    """Remember what the operations that a stage gives out carry."""
    kind, direction, attribute = _OPERATIONS[method]
    argument = f"{'fwd' if direction is FORWARD else 'bwd'}_chunk_id"

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operations = wrapped(*args, **kwargs)
        recorder, call = runtime.recorder, _pipeline.local.call
        if operations and recorder is not None and isinstance(call, _TorchCall):
            try:
                microbatch = args[0] if args else kwargs[argument]
                peers = _peer_stages(instance, kind, direction, attribute, microbatch, len(operations))
                transfers: dict[int, Transfer] = {}
                for operation, peer_stage in zip(operations, peers, strict=True):
                    transfer = transfers.get(peer_stage)
                    if transfer is None:
                        transfer = transfers[peer_stage] = Transfer(
                            kind, direction, instance.stage_index, peer_stage, microbatch, operation.peer
                        )
                    transfer.add(recorder, operation.tensor)
                    call.given[id(operation)] = (operation, transfer)
            except _comm.Skip:
                pass
            except Exception as error:
                site.fault(error)
        return operations

    return hook


def _start_hook(site: Site) -> Hook:
    """`_batch_p2p`: the schedule starts operations."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, call = runtime.recorder, _pipeline.local.call
        if recorder is None or not isinstance(call, _TorchCall):
            return wrapped(*args, **kwargs)
        operations = args[0] if args else kwargs.get("p2p_ops", ())
        start = now_ns()
        try:
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            try:
                _started(recorder, call, operations, start, None, type(error).__name__)
            except Exception as failure:
                site.fault(failure)
            raise
        try:
            _started(recorder, call, operations, start, result, "")
        except Exception as error:
            site.fault(error)
        return result

    return hook


def _started(recorder: Recorder, call: _TorchCall, operations: Any, start: int, result: Any, failure: str) -> None:
    if not call.given:
        return
    end = now_ns()
    given = [call.given.pop(id(operation), (None, None))[1] for operation in operations]
    transfers = list(dict.fromkeys(each for each in given if each is not None))
    if not transfers:
        return
    flags = _FAILED if failure else _ASYNC
    if len(transfers) > 1:
        flags |= _COALESCED
    state = recorder.thread()
    for transfer in transfers:
        if transfer.number < 0:
            call.write(recorder, state, transfer, start, end, flags, failure)
    works = result if isinstance(result, list) else [] if result is None else [result]
    if len(works) == len(given):
        for work, its in zip(works, given, strict=True):
            if its is not None and its.number >= 0:
                _pipeline.watch_too(work, its.number)
    else:  # one work for all of them
        for work in works:
            for transfer in transfers:
                if transfer.number >= 0:
                    _pipeline.watch_too(work, transfer.number)


# --- microbatches -----------------------------------------------------------------------------------------------------


def _backward_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    full = args[2] if len(args) > 2 else kwargs.get("full_backward", True)
    return BACKWARD if full else "backward_input"


# Method of a stage that computes -> the argument that is the microbatch, kind of the record, its name.
_COMPUTATIONS: dict[str, tuple[str, Kind, Callable[[tuple[Any, ...], dict[str, Any]], str]]] = {
    "forward_one_chunk": ("fwd_chunk_id", Kind.PIPELINE_FORWARD, lambda args, kwargs: FORWARD),
    "backward_one_chunk": ("bwd_chunk_id", Kind.PIPELINE_BACKWARD, _backward_name),
    "backward_weight_one_chunk": ("bwd_chunk_id", Kind.PIPELINE_BACKWARD, lambda args, kwargs: "backward_weight"),
}


def _computation_hook(method: str, site: Site) -> Hook:
    argument, kind, name_of = _COMPUTATIONS[method]

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, call = runtime.recorder, _pipeline.local.call
        if recorder is None or call is None:
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
                flags = _FAILED if failure else 0
                if getattr(getattr(instance, "device", None), "type", "cpu") != "cpu":
                    flags |= Flag.ENQUEUE
                microbatch = args[0] if args else kwargs[argument]
                name = name_of(args, kwargs)
                state = recorder.thread()
                if kind is Kind.PIPELINE_FORWARD or call.backward:
                    call.write_microbatch(
                        recorder, state, kind, name, instance.stage_index, microbatch, start, flags, failure
                    )
            except Exception as error:
                site.fault(error)

    return hook


# --- installing -------------------------------------------------------------------------------------------------------


class PipeliningInstrumentor(LensInstrumentor):
    """Schedules of `torch.distributed.pipelining`, with one stage on each rank or several."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.distributed.pipelining._backward": self._install_backward,
            "torch.distributed.pipelining.schedules": self._install,
        }

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        schedules = [getattr(module, name, None) for name in ("PipelineScheduleSingle", "PipelineScheduleMulti")]
        stage = getattr(module, "_PipelineStageBase", None)
        missing = [name for name in (*_OPERATIONS, "forward_one_chunk") if name not in vars(stage or object)]
        if None in schedules or not hasattr(module, "_batch_p2p") or missing:
            guard.logger.debug(
                "lens-auto: this version of torch.distributed.pipelining is not known (it lacks %s); its transfers are"
                " point-to-point spans",
                ", ".join(missing) or "a schedule",
            )
            return
        _comm.bind(_comm_module())
        site = guard.site("torch.distributed.pipelining.step")  # always on: calls are counted whatever is recorded
        hook = _pipeline.call_hook(site, _begin)
        for schedule in schedules:
            patches.wrap(schedule, "step", hook, site)
        for method in _OPERATIONS:
            site = _pipeline.pipeline_site(f"torch.distributed.pipelining.{method}")
            patches.wrap(stage, method, _operations_hook(method, site), site)
        site = _pipeline.pipeline_site("torch.distributed.pipelining._batch_p2p")
        patches.wrap(module, "_batch_p2p", _start_hook(site), site)
        for method in _COMPUTATIONS:
            site = _pipeline.microbatch_site(f"torch.distributed.pipelining.{method}")
            patches.wrap(stage, method, _computation_hook(method, site), site)

    @staticmethod
    def _install_backward(module: ModuleType, patches: Patches) -> None:
        # Schedules that split backward call `autograd.grad`, which is no backward pass elsewhere.
        for function in ("stage_backward_input", "stage_backward_weight"):
            site = guard.site(f"torch.distributed.pipelining.{function}")
            patches.wrap(module, function, backward._hook(site), site)


def _comm_module() -> ModuleType:
    from torch.distributed import distributed_c10d

    return distributed_c10d
