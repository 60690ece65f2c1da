"""Collectives of `torch.distributed`: one record per outermost call."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import Argument, GroupInfo, Skip, group_info, payload
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import LIVE_SLOT, Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.device import Opened
    from lens_auto.recorder.recorder import Recorder, ThreadState

# operation -> names of the argument whose size is `dl.comm.bytes`: what this rank puts in (all_gather: its shard;
# reduce_scatter, all_to_all: the whole input), or takes out where it may put in nothing (scatter). Object forms: 0.
# Which of these exist depends on torch's version: 2.13 has the *_single forms.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor",),
    "all_reduce_coalesced": ("tensors",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor",),
    "all_gather_single": ("input_tensor",),
    "all_gather_into_tensor": ("input_tensor",),
    "_all_gather_base": ("input_tensor",),
    "all_gather_coalesced": ("input_tensor_list",),
    "gather": ("tensor",),
    "scatter": ("tensor",),
    "reduce_scatter": ("input_list",),
    "reduce_scatter_single": ("input",),
    "reduce_scatter_tensor": ("input",),
    "_reduce_scatter_base": ("input",),
    "all_to_all": ("input_tensor_list",),
    "all_to_all_single": ("input",),
    "barrier": (),
    "monitored_barrier": (),
    "all_gather_object": (),
    "gather_object": (),
    "broadcast_object_list": (),
    "scatter_object_list": (),
}

_now = time.monotonic_ns
_pack_slot = LIVE_SLOT.pack_into
_COLLECTIVE = int(Kind.COLLECTIVE)
_ASYNC = int(Flag.ASYNC)
_ENQUEUE = int(Flag.ENQUEUE)
_FAILED = int(Flag.FAILED)
_MEASURED = int(Flag.MEASURED)


def communication_site(name: str) -> Site:
    """The site of a blocking communication call: open while its group or the hang watch is on."""
    return guard.site(name, lambda: "communication" in runtime.groups or runtime.watching())


def _hook(operation: str, original: Callable[..., Any], sizes: tuple[str, ...], site: Site) -> Hook:
    """The hook of one collective.

    The outermost call is recorded, with what it calls inside: public collectives call each other, and re-enter
    themselves under a torch function mode.

    It runs around every collective of the program: what a call of a function of ours would cost more than it does is
    written out.
    """
    group_argument, size_argument = Argument(original, "group"), Argument(original, *sizes)
    group_at, group_named = group_argument.position, group_argument.name
    size_at, size_named = size_argument.position, size_argument.name
    async_argument = Argument(original, "async_op")
    groups, plain = _comm.groups, _comm.plain

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        try:
            state = recorder.local.state
            nested, state.depth = state.depth, 1
        except Exception as error:
            site.fault(error)
            return wrapped(*args, **kwargs)
        if nested:
            return wrapped(*args, **kwargs)
        info: GroupInfo | None = None  # until the slot is to show the call
        try:
            try:
                opened: Opened | None = None
                given = len(args)
                group: Any = args[group_at] if group_at < given else kwargs.get(group_named) if kwargs else None
                value: Any = args[size_at] if size_at < given else kwargs.get(size_named) if kwargs else None
                try:
                    members = groups[_comm.c10d._world._default_pg if group is None else group]
                    shown = members.shown[operation]
                    if type(value) in plain:
                        nbytes = value.nbytes
                        dtype = recorder.dtypes[value.dtype]
                        device: int = recorder.communication and value.is_cuda
                    else:
                        nbytes, dtype, device = payload(recorder, value)
                except (AttributeError, KeyError, RuntimeError):  # the first of its kind, or sparse
                    members = group_info(recorder, group)
                    shown = members.show(operation, recorder)
                    nbytes, dtype, device = payload(recorder, value)
                if device and recorder.device is not None and recorder.communication:
                    opened = recorder.device.open(value, bool(async_argument.of(args, kwargs)))
                seq = members.number() + 1 - members.transfers[0] if members.native else next(members.counter)
                start = _now()
                info = members  # before the slot: what a signal handler raises in between leaves it again
                _pack_slot(state.page, state.slot, seq, start, nbytes, dtype, shown, seq)
            except Skip:
                pass
            except Exception as error:
                info = None
                site.fault(error)
            result = wrapped(*args, **kwargs) if kwargs else wrapped(*args)
        except BaseException as error:
            if info is not None:
                try:
                    ended(recorder, state, info, operation, start, seq, nbytes, dtype, _FAILED, error)
                except Exception as failure:
                    site.fault(failure)
            raise
        finally:
            state.depth = 0
        if info is None:
            return result
        state.kind[0] = 0
        if recorder.communication:
            try:
                end = _now()
                flags = recorder.communication
                if device:
                    flags |= _ENQUEUE if opened is None else _ENQUEUE | _MEASURED
                asynchronous = result is not None and async_argument.of(args, kwargs)
                if asynchronous:
                    flags |= _ASYNC
                number = recorder.collective(shown, start, end, state.index, flags, seq, nbytes, dtype)
                if opened is not None and recorder.device is not None:
                    recorder.device.close(opened, (number,), start, end, wait=False)
                if asynchronous and number >= 0:
                    _comm.watch_result(result, number, None if opened is None else opened.device)
            except Exception as error:
                site.fault(error)
        return result

    return hook


def ended(
    recorder: Recorder,
    state: ThreadState,
    info: GroupInfo,
    operation: str,
    start: int,
    seq: int,
    nbytes: int,
    dtype: int,
    flags: int,
    error: BaseException | None,
) -> int:
    """Empty the slot and, with the group on, write the record.

    Returns:
        The number of the record, or -1.
    """
    state.leave()
    if not recorder.communication:
        return -1
    end = _now()
    return recorder.record(
        _COLLECTIVE,
        start,
        end,
        state.index,
        flags | recorder.communication,
        recorder.strings.id(operation),
        info.name,
        dtype,
        seq,
        nbytes,
        -1,
        0,
        info.size,
        recorder.strings.id(type(error).__name__) if error is not None else 0,
        end - start,
    )


class CollectivesInstrumentor(LensInstrumentor):
    """Every collective of `torch.distributed`: tensor, coalesced, object and single-tensor forms."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed.distributed_c10d": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        _comm.bind(module)
        for operation, sizes in OPERATIONS.items():
            original = vars(module).get(operation)
            if original is not None:
                site = communication_site(f"torch.distributed.{operation}")
                patches.wrap(module, operation, _hook(operation, original, sizes, site), site)
