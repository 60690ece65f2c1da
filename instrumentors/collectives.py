"""Collectives of `torch.distributed`: one record per outermost call."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from instrumentors import _comm
from instrumentors._comm import Argument, GroupInfo, Skip
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

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
_COLLECTIVE = int(Kind.COLLECTIVE)
_ASYNC = int(Flag.ASYNC)
_ENQUEUE = int(Flag.ENQUEUE)
_FAILED = int(Flag.FAILED)


def communication_site(name: str) -> Site:
    """The site of a blocking communication call: open while its group or the hang watch is on."""
    return guard.site(name, lambda: "communication" in runtime.groups or runtime.watching())


def _hook(operation: str, original: Callable[..., Any], sizes: tuple[str, ...], site: Site) -> Hook:
    """The hook of one collective.

    The outermost call is recorded, with what it calls inside: public collectives call each other, and re-enter
    themselves under a torch function mode.
    """
    group_argument = Argument(original, "group")
    async_argument = Argument(original, "async_op")
    size_argument = Argument(original, *sizes) if sizes else None

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        state = recorder.thread()
        if state.depth:
            return wrapped(*args, **kwargs)
        state.depth = 1
        info: GroupInfo | None = None
        start = seq = nbytes = dtype = name = 0
        device = False
        try:
            try:
                info = _comm.group_info(recorder, group_argument.of(args, kwargs))
                if size_argument is not None:
                    nbytes, dtype, device = _comm.payload(recorder, size_argument.of(args, kwargs))
                seq = info.next_seq()
                name = recorder.strings.id(operation)
                start = _now()
                recorder.live.enter(
                    state.slot,
                    _COLLECTIVE,
                    state.index,
                    state.native_id,
                    name,
                    info.name,
                    info.size,
                    -1,
                    0,
                    start,
                    seq,
                    nbytes,
                    dtype,
                )
            except Skip:
                info = None
            except Exception as error:
                info = None
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            if info is not None:
                _ended(recorder, state, info, name, start, seq, nbytes, dtype, _FAILED, site, error)
            raise
        finally:
            state.depth = 0
        if info is not None:
            flags = _ENQUEUE if device else 0
            if result is not None and async_argument.of(args, kwargs):
                flags |= _ASYNC
            number = _ended(recorder, state, info, name, start, seq, nbytes, dtype, flags, site, None)
            if flags & _ASYNC and number >= 0:
                try:
                    _comm.watch_result(result, number)
                except Exception as error:
                    site.fault(error)
        return result

    return hook


def _ended(
    recorder: Any,
    state: Any,
    info: GroupInfo,
    name: int,
    start: int,
    seq: int,
    nbytes: int,
    dtype: int,
    flags: int,
    site: Site,
    error: BaseException | None,
) -> int:
    """Empty the slot and, with the group on, write the record; never raises."""
    try:
        end = _now()
        recorder.live.leave(state.slot)
        if not recorder.communication:
            return -1
        number: int = recorder.record(
            _COLLECTIVE,
            start,
            end,
            state.index,
            flags | recorder.communication,
            name,
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
        return number
    except Exception as failure:
        site.fault(failure)
        return -1


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
