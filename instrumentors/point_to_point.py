"""Point-to-point operations: one record per transfer, counted so that both ends name the same one."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import Argument, GroupInfo, Skip
from instrumentors._patch import Hook, LensInstrumentor, Patches
from instrumentors.collectives import communication_site
from lens_auto import runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

_now = time.monotonic_ns
_ASYNC = int(Flag.ASYNC)


class _Transfer:
    """One send or receive, between its call and its record."""

    __slots__ = ("dtype", "flags", "info", "k", "kind", "nbytes", "peer", "start", "tag")

    def __init__(self, kind: Kind, info: GroupInfo, peer: int, tag: int, size: tuple[int, int, bool]) -> None:
        self.kind = kind
        self.info = info
        self.peer = peer
        self.tag = tag
        self.nbytes, self.dtype, device = size
        self.flags = int(Flag.ENQUEUE) if device else 0
        self.k = -1
        self.start = 0
        if peer >= 0:
            self.count()
        else:
            self.flags |= Flag.ANY_SOURCE

    def count(self) -> None:
        """Take the next number between the two ranks; after an unclear receive on the tag it cannot be told."""
        mine, theirs = self.info.rank, self.peer
        source, target = (mine, theirs) if self.kind is Kind.SEND else (theirs, mine)
        self.k = self.info.next_transfer(source, target, self.tag)
        if self.kind is Kind.RECV and self.tag in self.info.unclear:
            self.flags |= Flag.AMBIGUOUS

    def enter(self, recorder: Recorder, state: ThreadState, name: int) -> None:
        """Show it in the live page, and start its clock."""
        self.start = _now()
        recorder.live.enter(
            state.slot,
            self.kind,
            state.index,
            state.native_id,
            name,
            self.info.name,
            self.info.size,
            self.peer,
            self.tag,
            self.start,
            self.k,
            self.nbytes,
            self.dtype,
        )

    def write(self, recorder: Recorder, state: ThreadState, name: int, flags: int, detail: str = "") -> int:
        """Write the record, if the group is on; returns its number or -1."""
        if not recorder.communication:
            return -1
        end = _now()
        return recorder.record(
            self.kind,
            self.start,
            end,
            state.index,
            self.flags | flags | recorder.communication,
            name,
            self.info.name,
            self.dtype,
            self.k,
            self.nbytes,
            self.peer,
            self.tag,
            self.info.size,
            recorder.strings.id(detail),
            end - self.start,
        )


class _Ends:
    """Reads peer, group and tag from the arguments of one of the functions.

    The peer is given as a global rank (`dst`, `src`) or as a rank in the group (`group_dst`, `group_src`).
    """

    def __init__(self, kind: Kind, function: Callable[..., Any]) -> None:
        self.kind = kind
        names = ("dst", "group_dst") if kind is Kind.SEND else ("src", "group_src")
        self.peer, self.group_peer = (Argument(function, name) for name in names)
        self.group = Argument(function, "group")
        self.tag = Argument(function, "tag")
        self.tensor = Argument(function, "tensor")

    def transfer(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Transfer:
        """What this call transfers."""
        info = _comm.group_info(recorder, self.group.of(args, kwargs))
        peer = self.peer.of(args, kwargs)
        if peer is None:
            in_group = self.group_peer.of(args, kwargs)
            peer = -1 if in_group is None else info.ranks[in_group]
        tag = self.tag.of(args, kwargs)
        size = _comm.payload(recorder, self.tensor.of(args, kwargs))
        return _Transfer(self.kind, info, peer, tag or 0, size)


def _hook(operation: str, kind: Kind, original: Callable[..., Any], site: Site) -> Hook:
    ends = _Ends(kind, original)

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        state = recorder.thread()
        if state.depth:
            return wrapped(*args, **kwargs)
        state.depth = 1
        transfer: _Transfer | None = None
        name = 0
        try:
            try:
                name = recorder.strings.id(operation)
                transfer = ends.transfer(recorder, args, kwargs)
                transfer.enter(recorder, state, name)
            except Skip:
                transfer = None
            except Exception as error:
                transfer = None
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            if transfer is not None:
                _ended(recorder, state, transfer, name, site, None, type(error).__name__)
            raise
        finally:
            state.depth = 0
        if transfer is not None:
            _ended(recorder, state, transfer, name, site, result, "")
        return result

    return hook


def _ended(
    recorder: Recorder, state: ThreadState, transfer: _Transfer, name: int, site: Site, result: Any, failure: str
) -> None:
    """Empty the slot, write the record, watch the work; never raises."""
    try:
        recorder.live.leave(state.slot)
        asynchronous = isinstance(result, _comm.c10d.Work)
        flags = int(Flag.FAILED) if failure else _ASYNC if asynchronous else 0
        if transfer.peer < 0:
            if isinstance(result, int) and result >= 0:  # a blocking receive from any source: now it is known
                transfer.peer = result
                transfer.count()
            else:
                transfer.info.unclear.add(transfer.tag)
                flags |= Flag.AMBIGUOUS
        number = transfer.write(recorder, state, name, flags, failure)
        if asynchronous and number >= 0:
            _comm.watch(result, (number,))
    except Exception as error:
        site.fault(error)


def _batch_hook(site: Site) -> Hook:
    """`batch_isend_irecv`: one record per operation of the list. Backends return a work each, or one for all."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        state = recorder.thread()
        if state.depth:
            return wrapped(*args, **kwargs)
        state.depth = 1
        transfers: list[tuple[_Transfer, int]] = []
        try:
            try:
                for operation in args[0] if args else kwargs["p2p_op_list"]:
                    transfers.append(_of_batch(recorder, operation))
                for transfer, name in transfers:
                    transfer.enter(recorder, state, name)
            except Skip:
                transfers.clear()
            except Exception as error:
                transfers.clear()
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            _batch_ended(recorder, state, transfers, site, None, type(error).__name__)
            raise
        finally:
            state.depth = 0
        _batch_ended(recorder, state, transfers, site, result, "")
        return result

    return hook


def _of_batch(recorder: Recorder, operation: Any) -> tuple[_Transfer, int]:
    name = operation.op.__name__
    kind = Kind.SEND if name == "isend" else Kind.RECV
    info = _comm.group_info(recorder, operation.group)
    peer = operation.peer if operation.peer is not None else -1
    size = _comm.payload(recorder, operation.tensor)
    return _Transfer(kind, info, peer, operation.tag or 0, size), recorder.strings.id(name)


def _batch_ended(
    recorder: Recorder,
    state: ThreadState,
    transfers: list[tuple[_Transfer, int]],
    site: Site,
    works: Any,
    failure: str,
) -> None:
    try:
        recorder.live.leave(state.slot)
        flags = int(Flag.FAILED) if failure else _ASYNC
        each_has_one = isinstance(works, list) and len(works) == len(transfers)
        if not each_has_one:
            flags |= Flag.COALESCED
        numbers = [transfer.write(recorder, state, name, flags, failure) for transfer, name in transfers]
        if not works or not numbers or numbers[0] < 0:
            return
        if each_has_one:
            for work, number in zip(works, numbers, strict=True):
                _comm.watch(work, (number,))
        else:
            for work in works:
                _comm.watch(work, tuple(numbers))
    except Exception as error:
        site.fault(error)


class PointToPointInstrumentor(LensInstrumentor):
    """`send recv isend irecv batch_isend_irecv` and the object lists."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed.distributed_c10d": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        _comm.bind(module)
        operations = {
            "send": Kind.SEND,
            "isend": Kind.SEND,
            "send_object_list": Kind.SEND,
            "recv": Kind.RECV,
            "irecv": Kind.RECV,
            "recv_object_list": Kind.RECV,
        }
        for operation, kind in operations.items():
            original = vars(module).get(operation)
            if original is not None:
                site = communication_site(f"torch.distributed.{operation}")
                patches.wrap(module, operation, _hook(operation, kind, original, site), site)
        site = communication_site("torch.distributed.batch_isend_irecv")
        patches.wrap(module, "batch_isend_irecv", _batch_hook(site), site)
