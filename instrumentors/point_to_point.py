"""Point-to-point operations: one record per transfer, numbered so that both ends name the same one.

The k-th message that a rank sends to another, in a group and on a tag, is the k-th that the other takes from it there;
each end counts on its own, also while nothing is recorded. A receive from any source takes part in that order only once
it is known whose message it took, and it makes doubtful what was posted beside it: which of two receives takes a
message is the backend's choice. What stays doubtful is recorded as ambiguous; what becomes known later gets a
RECV_SOURCE record of its own.
"""

from __future__ import annotations

import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import GroupInfo, Skip
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind, pack_operation

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

_now = time.monotonic_ns
_RECV_SOURCE = int(Kind.RECV_SOURCE)
_ASYNC = int(Flag.ASYNC)
_FAILED = int(Flag.FAILED)
_COALESCED = int(Flag.COALESCED)
_ENQUEUE = int(Flag.ENQUEUE)
_ANY_SOURCE = int(Flag.ANY_SOURCE)
_AMBIGUOUS = int(Flag.AMBIGUOUS)

_FEW = 64  # open receives that are kept before looking which of them are over
_MANY = 4096  # doubtful receives at once; beyond it nobody waits for them any more
_MANY_PATHS = 16_384  # peers and tags of one group


def _counted() -> bool:
    """Whether transfers are counted: not only while they are recorded, but wherever they might be later."""
    if "communication" in runtime.groups or runtime.watching():
        return True
    settings = runtime.settings
    return settings is not None and not settings.disabled and (settings.propagation != "off" or bool(settings.window))


# --- the order of messages --------------------------------------------------------------------------------------------


class _Receive:
    """A posted receive, as long as it matters whose message it takes.

    Attributes:
        source: global rank; -1 while it is not known.
        k: number of its first message from there; -1 while it is not known.
        messages: how many it takes.
        number: of its record; -1 none.
        doubtful: recorded, or to be recorded, as ambiguous.
        work: of an asynchronous one.
    """

    __slots__ = ("any_source", "done", "doubtful", "k", "messages", "number", "source", "work")

    def __init__(self, source: int, messages: int) -> None:
        self.source = source
        self.any_source = source < 0
        self.messages = messages
        self.k = -1
        self.number = -1
        self.done = False
        self.doubtful = False
        self.work: Callable[[], Any] | None = None

    def look(self, info: GroupInfo) -> bool:
        """Whether it is over.

        Raises:
            LookupError: its work is gone, and nobody can say any more whose message it took.
        """
        if not self.done and self.work is not None:
            work = self.work()
            if work is None:
                if self.any_source:
                    raise LookupError
                self.done = True
            elif work.is_completed():
                if self.any_source:
                    self.source = info.ranks[work._source_rank()]
                self.done = True
        return self.done


def _runs(watched: _comm._Watched) -> bool:
    """Whether a work is not over."""
    work = watched()
    return work is not None and not work.is_completed()


class _Channel:
    """The receives of one group on one tag.

    Attributes:
        taken: messages by source, counted when a receive of that source is posted.
        open: receives that may not be over.
        started: asynchronous receives from known sources that may not be over: what watches their work, source, number
            of the first message, messages.
        unseen: there were asynchronous receives that were not recorded: nobody knows which of them are over.
        blocked: threads in a blocking receive.
        doubtful: receives since one from any source was posted, until all of them are over.
        lost: it cannot be known any more how many messages were taken from whom.
    """

    __slots__ = ("blocked", "doubtful", "info", "lost", "open", "prune_at", "started", "taken", "unseen")

    def __init__(self, info: GroupInfo) -> None:
        self.info = info
        self.taken: dict[int, int] = {}
        self.open: list[_Receive] = []
        self.started: list[tuple[_comm._Watched, int, int, int]] = []
        self.prune_at = _FEW
        self.unseen = False
        self.blocked = 0
        self.doubtful: list[_Receive] = []
        self.lost = False

    @property
    def clear(self) -> bool:
        """Whether a receive from a known source takes the next message from there for sure."""
        return not self.doubtful and not self.lost

    def take(self, source: int, messages: int) -> int:
        """Number of the first message that a receive from a known source takes, posted while all is clear."""
        k = self.taken.get(source, 0)
        self.taken[source] = k + messages
        return k

    def give_back(self, source: int, k: int, messages: int) -> None:
        """That receive failed: it took nothing."""
        if self.taken.get(source) == k + messages:
            self.taken[source] = k

    def keep(self, watched: _comm._Watched, source: int, k: int, messages: int) -> None:
        """An asynchronous receive was posted and recorded: remember it until it is over."""
        self.started.append((watched, source, k, messages))
        if len(self.started) > self.prune_at:
            self.started = [each for each in self.started if _runs(each[0])]
            self.prune_at = max(_FEW, 2 * len(self.started))

    def post(self, recorder: Recorder, source: int, messages: int) -> _Receive:
        """A receive is about to be posted, from any source (-1) or while not all is clear."""
        if self.doubtful:
            self.settle(recorder)
        receive = _Receive(source, messages)
        if not self.lost and source < 0 and (self.unseen or self.blocked):
            self._lose()
        if self.lost:
            receive.doubtful = True
            return receive
        if source >= 0:
            receive.k = self.take(source, messages)
        elif not self.doubtful:
            self._open_started()
            for beside in self.open:
                beside.doubtful = True
                if beside.number >= 0:
                    self._tell(recorder, beside)
            self.doubtful.extend(self.open)
        if self.doubtful or source < 0:
            receive.doubtful = True
            self.doubtful.append(receive)
            doubted[id(self)] = self
            if len(self.doubtful) > _MANY:
                self._lose()
        self.open.append(receive)
        return receive

    def done(self, recorder: Recorder, receive: _Receive, source: int) -> None:
        """A blocking receive returned."""
        receive.source = source
        receive.done = True
        if receive in self.open:
            self.open.remove(receive)
        if self.lost:
            return
        if source < 0:
            self._lose()
        elif self.doubtful:
            self.settle(recorder)

    def withdraw(self, receive: _Receive) -> None:
        """A receive failed: it took nothing."""
        if receive in self.open:
            self.open.remove(receive)
        if receive in self.doubtful:
            self.doubtful.remove(receive)
        if not receive.any_source:
            self.give_back(receive.source, receive.k, receive.messages)

    def settle(self, recorder: Recorder) -> None:
        """Once all doubtful receives are over: which of them are known after all, and count the messages they took."""
        try:
            over = [each.look(self.info) for each in self.doubtful]
        except Exception:
            self._lose()
            return
        if not all(over):
            return
        by_source: dict[int, list[_Receive]] = {}
        for each in self.doubtful:
            by_source.setdefault(each.source, []).append(each)
        for source, receives in by_source.items():
            for each in receives:
                if each.any_source:
                    count = self.taken.get(source, 0)
                    self.taken[source] = count + each.messages
                    each.k = count if len(receives) == 1 else -1
            # Several from one source keep their order, unless one of them might have taken any other's message.
            known = len(receives) == 1 or not any(each.any_source for each in receives)
            for each in receives:
                each.doubtful = not known
                if each.number >= 0:
                    self._tell(recorder, each)
        self._end_doubt()

    def _lose(self) -> None:
        """It cannot be known any more how many messages were taken from whom."""
        self.lost = True
        self.open = []
        self._end_doubt()

    def _end_doubt(self) -> None:
        self.doubtful = []
        doubted.pop(id(self), None)

    def _open_started(self) -> None:
        """Look at the asynchronous receives one by one from here on; those that are over are forgotten."""
        self.open = [each for each in self.open if not each.done]
        for watched, source, k, messages in self.started:
            if _runs(watched):
                receive = _Receive(source, messages)
                receive.k = k
                receive.work = watched
                receive.number = watched.numbers[0]
                self.open.append(receive)
        self.started = []

    @staticmethod
    def _tell(recorder: Recorder, receive: _Receive) -> None:
        """Record what is known now of a receive that was recorded before."""
        now = _now()
        flags = _AMBIGUOUS if receive.doubtful else 0
        k = -1 if receive.doubtful else receive.k
        thread = recorder.thread().index
        recorder.record(_RECV_SOURCE, now, now, thread, flags, seq=k, peer=receive.source, ref=receive.number + 1)


class _Path:
    """One way that messages go: from or to a peer, in a group and on a tag.

    Attributes:
        peer: global rank; -1 any.
        tag: 0 where the backend matches messages whatever their tags.
        k: number of the next message that is sent.
        channel: the receives of the group on the tag; None where this rank sends.
        lost: no number can be given, see `_Counts`.
    """

    __slots__ = ("channel", "info", "k", "lost", "peer", "tag")

    def __init__(self, info: GroupInfo, peer: int, tag: int, channel: _Channel | None, lost: bool) -> None:
        self.info = info
        self.peer = peer
        self.tag = tag
        self.k = 0
        self.channel = channel
        self.lost = lost


class _Counts:
    """The messages of one group, from and to this rank.

    Attributes:
        lost: no numbers can be given. The group has the name of an earlier one of this initialization, so that they
            would name two messages; or it uses ever new tags, more than are kept.
    """

    __slots__ = ("channels", "info", "lost", "paths", "sends")

    def __init__(self, info: GroupInfo, lost: bool) -> None:
        self.info = info
        self.lost = lost
        self.channels: dict[int, _Channel] = {}
        self.sends: dict[tuple[int, int], _Path] = {}
        # As calls name them: kind, peer, peer in the group, tag, on a device.
        self.paths: dict[tuple[Kind, int | None, int | None, int, bool], _Path] = {}

    def path(
        self, kind: Kind, group: Any, peer: int | None, peer_in_group: int | None, tag: int, device: bool
    ) -> _Path:
        """The way that a call names for the first time."""
        key = (kind, peer, peer_in_group, tag, device)
        if len(self.paths) >= _MANY_PATHS:
            self.lost = True
            self.paths.clear()
            self.sends.clear()
            self.channels.clear()
        if peer is None:
            peer = -1 if peer_in_group is None else self.info.ranks[peer_in_group]
        if tag and _ignores_tags(group, device):
            tag = 0
        if kind is Kind.SEND:
            found = self.sends.get((peer, tag))
            if found is None:
                found = self.sends[peer, tag] = _Path(self.info, peer, tag, None, self.lost)
        else:
            channel = self.channels.get(tag)
            if channel is None:
                channel = self.channels[tag] = _Channel(self.info)
            found = _Path(self.info, peer, tag, channel, self.lost)
        self.paths[key] = found
        return found


_counts: dict[GroupInfo, _Counts] = {}
_named: set[tuple[int, str]] = set()  # names of groups that were counted, by initialization
doubted: dict[int, _Channel] = {}  # channels with doubtful receives
lost_since = -1  # the initialization in which a transfer was not counted: from there on no order can be told


def _forget() -> None:
    _counts.clear()
    _named.clear()
    doubted.clear()


os.register_at_fork(after_in_child=_forget)


def _counts_of(recorder: Recorder, info: GroupInfo) -> _Counts:
    found = _counts.get(info)
    if found is None:
        alive = set(_comm.groups.values())
        for gone in [each for each in _counts if each not in alive]:
            del _counts[gone]
        name = (recorder.init, info.text)
        found = _counts[info] = _Counts(info, name in _named)
        _named.add(name)
    return found


def _ignores_tags(group: Any, device: bool) -> bool:
    try:
        if group is None:
            group = _comm._default_group()
        backend = group._get_backend(_comm.torch.device("cuda" if device else "cpu"))
        return str(backend.name()).lower().endswith("ccl")
    except Exception:
        return False


def settle(recorder: Recorder) -> None:
    """Look which of the doubtful receives are over, and record whose messages they took."""
    for channel in list(doubted.values()):
        channel.settle(recorder)


# --- one transfer -----------------------------------------------------------------------------------------------------


class _Transfer:
    """One send or receive, between its call and its record."""

    __slots__ = ("dtype", "flags", "k", "kind", "messages", "nbytes", "path", "receive", "start")

    def __init__(self, recorder: Recorder, path: _Path, kind: Kind, messages: int, size: tuple[int, int, bool]) -> None:
        self.path = path
        self.kind = kind
        self.messages = messages
        self.nbytes, self.dtype, device = size
        self.flags = _ENQUEUE if device else 0
        self.start = 0
        self.receive: _Receive | None = None
        if doubted:
            settle(recorder)
        channel = path.channel
        if channel is None:
            self.k = path.k
            path.k += messages
        elif path.peer >= 0 and channel.clear:
            self.k = channel.take(path.peer, messages)
        else:
            self.receive = channel.post(recorder, path.peer, messages)
            self.k = self.receive.k
            if path.peer < 0:
                self.flags |= _ANY_SOURCE

    def withdraw(self) -> None:
        """It did not take place: give its number back, unless somebody took the next one meanwhile."""
        path, channel = self.path, self.path.channel
        if channel is None:
            if path.k == self.k + self.messages:
                path.k = self.k
        elif self.receive is not None:
            channel.withdraw(self.receive)
        else:
            channel.give_back(path.peer, self.k, self.messages)

    def count(self) -> None:
        """It took place: where torch counts transfers among the collectives, collectives must leave them out."""
        transfers = self.path.info.transfers
        transfers[0] += transfers[1] * self.messages

    def enter(self, state: ThreadState, name: int) -> None:
        """Show it in the live page, and start its clock."""
        path = self.path
        info = path.info
        self.start = start = _now()
        operation = pack_operation(self.kind, name, info.name, info.size, path.peer, path.tag)
        state.enter(operation, start, self.k, self.nbytes, self.dtype)

    def not_recorded(self) -> None:
        """It was started and is not recorded, so that nobody will know whether it is over."""
        channel = self.path.channel
        if channel is not None and not self.flags & _ENQUEUE:  # no backend of device tensors receives from any source
            channel.unseen = True

    def finish(
        self, recorder: Recorder, state: ThreadState, name: int, flags: int, result: Any, failure: str = ""
    ) -> int:
        """The call returned, a `Work` or a blocking receive's source: write the record, if the group is on.

        Returns:
            The number of the record, or -1.
        """
        end = _now()
        path, receive = self.path, self.receive
        peer, k, channel = path.peer, self.k, path.channel
        work = result if flags & _ASYNC and isinstance(result, _comm.c10d.Work) else None
        if failure:
            k = -1
        elif channel is not None and receive is not None:
            if work is not None:
                receive.work = weakref.ref(work)
            elif flags & _ASYNC:
                receive.done = True
            else:
                channel.done(recorder, receive, result if receive.any_source else peer)
            peer, k = receive.source, receive.k
            if receive.doubtful or peer < 0:
                receive.doubtful = True
                flags |= _AMBIGUOUS
        if not recorder.communication:
            if work is not None and receive is None:
                self.not_recorded()
            return -1
        if path.lost or lost_since == recorder.init:
            flags |= _AMBIGUOUS
        number = recorder.record(
            self.kind,
            self.start,
            end,
            state.index,
            self.flags | flags | recorder.communication,
            name,
            path.info.name,
            self.dtype,
            k,
            self.nbytes,
            peer,
            path.tag,
            path.info.size,
            recorder.strings.id(failure) if failure else 0,
            end - self.start,
        )
        if receive is not None:
            receive.number = number
        if number >= 0 and work is not None:
            _comm.watch(work, (number,))
            if channel is not None and receive is None and not self.flags & _ENQUEUE:
                channel.keep(_comm.pending[id(work)], peer, k, self.messages)
        return number


def _transfer(
    recorder: Recorder,
    kind: Kind,
    messages: int,
    tensor: Any,
    peer: int | None,
    group: Any,
    tag: int,
    peer_in_group: int | None,
) -> _Transfer:
    """What a call transfers.

    Raises:
        Skip: this rank is not in the group, or the call only traces.
    """
    info = _comm.group_info(recorder, group)
    counts = _counts.get(info)
    if counts is None:
        counts = _counts_of(recorder, info)
    size = _comm.payload(recorder, tensor)
    path = counts.paths.get((kind, peer, peer_in_group, tag, size[2]))
    if path is None:
        path = counts.path(kind, group, peer, peer_in_group, tag, size[2])
    return _Transfer(recorder, path, kind, messages, size)


# --- arguments --------------------------------------------------------------------------------------------------------

# tensor, peer, group, tag, peer in the group: Python sorts the arguments out faster than we could. Before 2.6 torch has
# no peers in groups; what it may add later goes into `_`.
_Arguments = tuple[Any, "int | None", Any, int, "int | None"]


def _read_send(
    tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None, **_: Any
) -> _Arguments:
    return tensor, dst, group, tag, group_dst


def _read_recv(
    tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None, **_: Any
) -> _Arguments:
    return tensor, src, group, tag, group_src


def _read_send_objects(
    object_list: Any,
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    **_: Any,
) -> _Arguments:
    return None, dst, group, 0, group_dst


def _read_recv_objects(
    object_list: Any,
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    **_: Any,
) -> _Arguments:
    return None, src, group, 0, group_src


# Operation -> kind, how many messages it makes (the object forms send the sizes first), reader of its arguments.
_OPERATIONS: dict[str, tuple[Kind, int, Callable[..., _Arguments]]] = {
    "send": (Kind.SEND, 1, _read_send),
    "isend": (Kind.SEND, 1, _read_send),
    "send_object_list": (Kind.SEND, 2, _read_send_objects),
    "recv": (Kind.RECV, 1, _read_recv),
    "irecv": (Kind.RECV, 1, _read_recv),
    "recv_object_list": (Kind.RECV, 2, _read_recv_objects),
}


def _reads(read: Callable[..., _Arguments], function: Callable[..., Any]) -> bool:
    """Whether the reader takes a function's positional arguments in their order."""
    ours = list(inspect.signature(read).parameters)[:-1]
    theirs = list(inspect.signature(function).parameters)
    return theirs[: len(ours)] == ours[: len(theirs)]


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hook(operation: str, site: Site) -> Hook:
    kind, messages, read = _OPERATIONS[operation]
    asynchronous = _ASYNC if operation.startswith("i") else 0
    blocks = kind is Kind.RECV and not asynchronous

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        global lost_since
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
        transfer: _Transfer | None = None
        channel: _Channel | None = None
        name = 0
        try:
            try:
                name = recorder.strings.id(operation)
                transfer = _transfer(recorder, kind, messages, *read(*args, **kwargs))
                transfer.enter(state, name)
                if blocks:
                    channel = transfer.path.channel
                    if channel is not None:
                        channel.blocked += 1
            except Skip:
                transfer = None
            except Exception as error:
                transfer = None
                lost_since = recorder.init
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            if channel is not None:
                channel.blocked -= 1
            if transfer is not None:
                try:
                    transfer.withdraw()
                    _ended(recorder, state, transfer, name, _FAILED | asynchronous, None, type(error).__name__)
                except Exception as failure:
                    lost_since = recorder.init
                    site.fault(failure)
            raise
        finally:
            state.depth = 0
        if channel is not None:
            channel.blocked -= 1
        if transfer is not None:
            try:
                _ended(recorder, state, transfer, name, asynchronous, result, "")
            except Exception as error:
                lost_since = recorder.init
                site.fault(error)
        return result

    return hook


def _ended(
    recorder: Recorder,
    state: ThreadState,
    transfer: _Transfer,
    name: int,
    flags: int,
    result: Any,
    failure: str,
) -> None:
    """Empty the slot, write the record, watch the work."""
    state.leave()
    if not failure:
        transfer.count()
    if not recorder.communication and transfer.receive is None:
        if flags & _ASYNC:
            transfer.not_recorded()
        return
    transfer.finish(recorder, state, name, flags, result, failure)


def _batch_hook(site: Site) -> Hook:
    """`batch_isend_irecv`: one record per operation of the list. Backends return a work each, or one for all."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        global lost_since
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
        transfers: list[tuple[_Transfer, int]] = []
        try:
            try:
                try:
                    for operation in args[0] if args else kwargs["p2p_op_list"]:
                        transfers.append(_of_batch(recorder, operation))
                    for transfer, name in transfers:
                        transfer.enter(state, name)
                except Skip:
                    while transfers:
                        transfers.pop()[0].withdraw()
            except Exception as error:
                transfers.clear()
                lost_since = recorder.init
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            if transfers:  # nobody knows how far it came
                lost_since = recorder.init
            try:
                _batch_ended(recorder, state, transfers, None, type(error).__name__)
            except Exception as failure:
                site.fault(failure)
            raise
        finally:
            state.depth = 0
        try:
            _batch_ended(recorder, state, transfers, result, "")
        except Exception as error:
            lost_since = recorder.init
            site.fault(error)
        return result

    return hook


def _of_batch(recorder: Recorder, operation: Any) -> tuple[_Transfer, int]:
    if not isinstance(operation, _comm.c10d.P2POp):  # torch will say so
        raise Skip
    name = operation.op.__name__
    kind = Kind.SEND if name == "isend" else Kind.RECV
    tag = operation.tag or 0
    transfer = _transfer(recorder, kind, 1, operation.tensor, operation.peer, operation.group, tag, None)
    return transfer, recorder.strings.id(name)


def _batch_ended(
    recorder: Recorder,
    state: ThreadState,
    transfers: list[tuple[_Transfer, int]],
    works: Any,
    failure: str,
) -> None:
    if not transfers:
        return
    state.leave()
    if not failure:
        for transfer, _ in transfers:
            transfer.count()
    flags = _FAILED | _ASYNC if failure else _ASYNC
    each_has_one = isinstance(works, list) and len(works) == len(transfers)
    if not each_has_one:
        flags |= _COALESCED
    results: Iterable[Any] = works if each_has_one else [works[0] if works else None] * len(transfers)
    numbers = [
        transfer.finish(recorder, state, name, flags, result, failure)
        for (transfer, name), result in zip(transfers, results, strict=True)
    ]
    if works and numbers[0] >= 0 and not each_has_one:
        for work in works:
            _comm.watch(work, tuple(numbers))


class PointToPointInstrumentor(LensInstrumentor):
    """`send recv isend irecv batch_isend_irecv` and the object lists."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed.distributed_c10d": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        _comm.bind(module)
        for operation in _OPERATIONS:
            original = vars(module).get(operation)
            if original is None:
                continue
            if not _reads(_OPERATIONS[operation][2], original):
                guard.logger.debug("lens-auto: torch.distributed.%s has other arguments in this version", operation)
                continue
            site = guard.site(f"torch.distributed.{operation}", _counted)
            patches.wrap(module, operation, _hook(operation, site), site)
        site = guard.site("torch.distributed.batch_isend_irecv", _counted)
        patches.wrap(module, "batch_isend_irecv", _batch_hook(site), site)

    def _uninstrument(self, **kwargs: Any) -> None:
        global lost_since
        if runtime.recorder is not None:
            lost_since = runtime.recorder.init
        super()._uninstrument(**kwargs)
