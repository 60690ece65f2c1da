"""Functional collectives (`torch.distributed._functional_collectives`), as DTensor and tensor parallelism use them.

The functions issue their operation in C++ and return a tensor that is waited for at its first use: one record for the
call, and one for the wait that completes it. Under tracing nothing is recorded: torch.compile sees the bare functions.
What autograd issues for a functional collective of a tensor that needs gradients never passes through Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import Argument, GroupInfo, Skip
from instrumentors._patch import Hook, LensInstrumentor, Patches
from instrumentors.collectives import communication_site, ended
from lens_auto import runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.device import Opened
    from lens_auto.recorder.recorder import Recorder, ThreadState

# Function -> the name of its operation.
OPERATIONS = {
    "broadcast": "broadcast",
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_autograd": "all_gather_into_tensor",
    "all_gather_tensor": "all_gather_into_tensor",
    "all_gather_tensor_autograd": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_autograd": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd": "reduce_scatter_tensor",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "all_to_all_single_autograd": "all_to_all_single",
    "permute_tensor": "all_to_all_single",
}

# 2.13 renamed these; the old names warn and call the new ones, which are wrapped then. A hook around an old name would
# be the line that the warning names.
RENAMED = {
    "all_gather_tensor": "all_gather_single",
    "all_gather_tensor_autograd": "all_gather_single_autograd",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "reduce_scatter_tensor_autograd": "reduce_scatter_single_autograd",
    "all_gather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}

_now = time.monotonic_ns
_WAIT = int(Kind.WAIT)
_ASYNC = int(Flag.ASYNC)
_ENQUEUE = int(Flag.ENQUEUE)
_FAILED = int(Flag.FAILED)
_MEASURED = int(Flag.MEASURED)


class _Issued:
    """An operation whose result is to be waited for."""

    __slots__ = ("device", "dtype", "info", "nbytes", "number", "operation", "seq")

    def __init__(
        self, info: GroupInfo, operation: str, seq: int, nbytes: int, dtype: int, number: int, device: int | None
    ) -> None:
        self.device = device  # on whose current stream the wait is measured; None: it is not
        self.info = info
        self.operation = operation
        self.seq = seq
        self.nbytes = nbytes
        self.dtype = dtype
        self.number = number


# By the address of the result's storage, by which torch itself finds the work: views of a result are awaited as well.
_issued: dict[int, _Issued] = {}
_MANY = 4096


def _address(tensor: Any) -> int:
    """Address of a plain tensor's storage; 0 where it has none."""
    if type(tensor) is not _comm.torch.Tensor:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except Exception:  # vmap's and the like look like plain tensors
        return 0


def _remember(results: list[Any], issued: _Issued) -> None:
    for tensor in results:
        address = _address(tensor)
        if address:
            _issued[address] = issued
    while len(_issued) > _MANY:  # never awaited: the oldest go
        del _issued[next(iter(_issued))]


def _open_results(result: Any) -> list[Any]:
    """The tensors inside of results that are not complete yet."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    return [each.elem for each in results if type(each).__name__ == "AsyncCollectiveTensor"]


def _group_of(group: Any, tag: Any) -> Any:
    """The process group that a functional collective was given, in any of the forms it takes."""
    c10d = _comm.c10d
    if isinstance(group, c10d.ProcessGroup):
        return group
    if isinstance(group, str):
        return c10d._resolve_process_group(group)
    if isinstance(group, tuple):
        return group[0].get_group(group[1])
    if isinstance(group, list):  # ranks: torch itself warns, once is enough
        return c10d._resolve_process_group(c10d._resolve_group_name_by_ranks_and_tag(group, tag or ""))
    return group.get_group()


def _traces(module: ModuleType) -> bool:
    """Whether this call only traces (`_are_we_tracing`, 2.2 to 2.13)."""
    tracing = getattr(module, "_are_we_tracing", None)
    return tracing is not None and bool(tracing())


def _hook(module: ModuleType, function: str, original: Callable[..., Any], site: Site) -> Hook:
    operation = OPERATIONS[function]
    payload_argument = Argument(original, "self", "inputs")
    group_argument = Argument(original, "group")
    tag_argument = Argument(original, "tag")

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
        info: GroupInfo | None = None
        start = seq = nbytes = dtype = 0
        device = False
        try:
            try:
                if _traces(module):
                    raise Skip
                nbytes, dtype, device = _comm.payload(recorder, _inner(payload_argument.of(args, kwargs)))
                group = _group_of(group_argument.of(args, kwargs), tag_argument.of(args, kwargs))
                info = _comm.group_info(recorder, group)
                seq = info.next_seq()
                start = _now()
                state.enter(info.show(operation, recorder), start, seq, nbytes, dtype)
            except Skip:
                info = None
            except Exception as error:
                info = None
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            if info is not None:
                try:
                    ended(recorder, state, info, operation, start, seq, nbytes, dtype, _FAILED, error)
                except Exception as failure:
                    site.fault(failure)
            raise
        finally:
            state.depth = 0
        if info is not None:
            try:
                flags = _ENQUEUE if device else 0
                _issued_now(recorder, state, info, operation, start, seq, nbytes, dtype, flags, result)
            except Exception as error:
                site.fault(error)
        return result

    return hook


def _inner(value: Any) -> Any:
    """A result that was not awaited yet, as its plain tensor; torch waits for it inside."""
    if isinstance(value, list):
        return [_inner(each) for each in value]
    return getattr(value, "elem", value) if type(value).__name__ == "AsyncCollectiveTensor" else value


def _issued_now(
    recorder: Recorder,
    state: ThreadState,
    info: GroupInfo,
    operation: str,
    start: int,
    seq: int,
    nbytes: int,
    dtype: int,
    flags: int,
    result: Any,
) -> None:
    """The call returned: record it, and remember what is to be awaited."""
    results = _open_results(result)
    flags |= _ASYNC if results else 0
    device: int | None = None
    if results and flags & _ENQUEUE and recorder.device is not None and recorder.communication:
        opened = recorder.device.open(results, asynchronous=True)
        if opened is not None:
            device = opened.device
            flags |= _MEASURED
    number = ended(recorder, state, info, operation, start, seq, nbytes, dtype, flags, None)
    if results:
        _remember(results, _Issued(info, operation, seq, nbytes, dtype, number, device))


def _wait_hook(module: ModuleType, site: Site) -> Hook:
    """`wait_tensor`, also as torch calls it at the first use of a result."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        issued: _Issued | None = None
        opened: Opened | None = None
        start = before = 0
        try:
            state = recorder.local.state
            before = state.depth
            tensor = args[0] if args else kwargs["tensor"]
            address = _address(_inner(tensor)) if _issued else 0
            if address and not _traces(module):
                issued = _issued.pop(address, None)
            if issued is not None:
                if issued.device is not None and recorder.device is not None:
                    opened = recorder.device.open_again(issued.device)
                start = _now()
                if not before:  # else the slot shows the call that waits
                    shown = issued.info.show(issued.operation, recorder)
                    state.enter(shown, start, issued.seq, issued.nbytes, issued.dtype)
                state.depth = 1
        except Exception as error:
            issued = None
            site.fault(error)
        if issued is None:
            return wrapped(*args, **kwargs)
        failure: BaseException | None = None
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            failure = error
            raise
        finally:
            state.depth = before
            try:
                end = _awaited(recorder, state, issued, start, failure, emptied=not before)
                if end and opened is not None and recorder.device is not None:
                    recorder.device.close(opened, (issued.number,), start, end, wait=True)
            except Exception as error:
                site.fault(error)

    return hook


def _awaited(
    recorder: Recorder,
    state: ThreadState,
    issued: _Issued,
    start: int,
    error: BaseException | None,
    emptied: bool,
) -> int:
    """Empty the slot and record the wait. Returns when that was; 0 where it is not recorded."""
    if emptied:
        state.leave()
    if issued.number < 0 or not recorder.communication:
        return 0
    end = _now()
    flags = _FAILED if error is not None else 0
    detail = recorder.strings.id(type(error).__name__) if error is not None else 0
    name = recorder.strings.id("wait_tensor")
    recorder.record(
        _WAIT, start, end, state.index, flags, name, detail=detail, exposed_ns=end - start, ref=issued.number + 1
    )
    return end


class FunctionalInstrumentor(LensInstrumentor):
    """The functions of `torch.distributed._functional_collectives`, and `wait_tensor`."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed._functional_collectives": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        import torch.distributed.distributed_c10d as c10d

        _comm.bind(c10d)
        for function in OPERATIONS:
            original = vars(module).get(function)
            if callable(original) and RENAMED.get(function) not in vars(module):
                site = communication_site(f"{module.__name__}.{function}")
                patches.wrap(module, function, _hook(module, function, original, site), site)
        if "wait_tensor" in vars(module):
            site = communication_site(f"{module.__name__}.wait_tensor")
            patches.wrap(module, "wait_tensor", _wait_hook(module, site), site)
