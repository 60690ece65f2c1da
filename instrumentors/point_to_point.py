"""Point-to-point operations: one record per transfer, numbered so that both ends name the same one.

The k-th message that a rank sends to another, in a group and on a tag, is the k-th that the other takes from it there;
each end counts on its own, also while nothing is recorded. A receive from any source takes part in that order only once
it is known whose message it took, and it makes doubtful what was posted beside it: which of two receives takes a
message is the backend's choice. What stays doubtful is recorded as ambiguous; what becomes known later gets a
RECV_SOURCE record of its own.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import Argument, GroupInfo, Skip
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

_now = time.monotonic_ns
_SEND = int(Kind.SEND)
_RECV = int(Kind.RECV)
_RECV_SOURCE = int(Kind.RECV_SOURCE)
_ASYNC = int(Flag.ASYNC)
_FAILED = int(Flag.FAILED)
_COALESCED = int(Flag.COALESCED)
_ENQUEUE = int(Flag.ENQUEUE)
_ANY_SOURCE = int(Flag.ANY_SOURCE)
_AMBIGUOUS = int(Flag.AMBIGUOUS)

_FEW = 64  # open receives that are kept before looking which of them are over
_MANY = 4096  # doubtful receives at once; beyond it nobody waits for them any more

# Operation -> kind, and how many messages it makes: the object forms send the sizes first.
_OPERATIONS = {
    "send": (Kind.SEND, 1),
    "isend": (Kind.SEND, 1),
    "send_object_list": (Kind.SEND, 2),
    "recv": (Kind.RECV, 1),
    "irecv": (Kind.RECV, 1),
    "recv_object_list": (Kind.RECV, 2),
}


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


class _Channel:
    """The receives of one group on one tag."""

    __slots__ = ("doubtful", "info", "lost", "open", "prune_at", "taken")

    def __init__(self, info: GroupInfo) -> None:
        self.info = info
        self.taken: dict[int, int] = {}  # messages by source, counted when a receive of that source is posted
        self.open: list[_Receive] = []
        self.prune_at = _FEW
        self.doubtful: list[_Receive] = []  # since a receive from any source was posted
        self.lost = False

    def post(self, recorder: Recorder, source: int, messages: int) -> _Receive:
        """A receive is about to be posted; a source of -1 is any."""
        if self.doubtful:
            self.settle(recorder)
        receive = _Receive(source, messages)
        if self.lost:
            receive.doubtful = True
            return receive
        if source >= 0:
            receive.k = self.taken.get(source, 0)
            self.taken[source] = receive.k + messages
        elif not self.doubtful:
            self._prune()
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
        if len(self.open) > self.prune_at:
            self._prune()
            self.prune_at = max(_FEW, 2 * len(self.open))
        return receive

    def done(self, recorder: Recorder, receive: _Receive, source: int) -> None:
        """A blocking receive returned."""
        receive.source = source
        receive.done = True
        if self.lost:
            return
        self.open.remove(receive)
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
        if not receive.any_source and self.taken.get(receive.source) == receive.k + receive.messages:
            self.taken[receive.source] = receive.k

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

    def _prune(self) -> None:
        """Forget the receives that are over."""

        def is_open(each: _Receive) -> bool:
            try:
                return not each.look(self.info)
            except Exception:
                return False

        self.open = [each for each in self.open if is_open(each)]

    @staticmethod
    def _tell(recorder: Recorder, receive: _Receive) -> None:
        """Record what is known now of a receive that was recorded before."""
        now = _now()
        flags = _AMBIGUOUS if receive.doubtful else 0
        k = -1 if receive.doubtful else receive.k
        thread = recorder.thread().index
        recorder.record(_RECV_SOURCE, now, now, thread, flags, seq=k, peer=receive.source, ref=receive.number + 1)


class _Counts:
    """How many messages a group has seen, from and to this rank.

    Attributes:
        again: it has the name of an earlier group of this initialization, so that its numbers would name two messages.
        ignores_tags: whether its backend matches messages whatever their tags, for host and device tensors.
    """

    __slots__ = ("again", "channels", "ignores_tags", "info", "sent")

    def __init__(self, info: GroupInfo, again: bool) -> None:
        self.info = info
        self.again = again
        self.sent: dict[tuple[int, int], int] = {}
        self.channels: dict[int, _Channel] = {}
        self.ignores_tags: dict[bool, bool] = {}

    def tag(self, group: Any, tag: int, device: bool) -> int:
        """The tag, where the backend matches by tags. NCCL and its relatives do not: messages have one order there."""
        if not tag:
            return 0
        ignored = self.ignores_tags.get(device)
        if ignored is None:
            ignored = self.ignores_tags[device] = _ignores_tags(group, device)
        return 0 if ignored else tag

    def channel(self, tag: int) -> _Channel:
        """The receives on a tag."""
        found = self.channels.get(tag)
        if found is None:
            found = self.channels[tag] = _Channel(self.info)
        return found


_counts: dict[GroupInfo, _Counts] = {}
_named: set[tuple[int, str]] = set()  # names of groups that were counted, by initialization
doubted: dict[int, _Channel] = {}  # channels with doubtful receives
_lost_since = -1  # the initialization in which a transfer was not counted


def _forget() -> None:
    _counts.clear()
    _named.clear()
    doubted.clear()


os.register_at_fork(after_in_child=_forget)


def _counts_of(recorder: Recorder, info: GroupInfo) -> _Counts:
    found = _counts.get(info)
    if found is None:
        alive = set(_comm._groups.values())
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


def _lose_count(recorder: Recorder) -> None:
    """A transfer was not counted: from here on no order can be told."""
    global _lost_since
    _lost_since = recorder.init


# --- one transfer -----------------------------------------------------------------------------------------------------


class _Transfer:
    """One send or receive, between its call and its record."""

    __slots__ = (
        *("channel", "counts", "dtype", "flags", "info", "k", "kind"),
        *("messages", "nbytes", "peer", "receive", "start", "tag"),
    )

    def __init__(
        self,
        recorder: Recorder,
        kind: Kind,
        group: Any,
        peer: int,
        tag: int,
        size: tuple[int, int, bool],
        messages: int = 1,
    ) -> None:
        self.kind = int(kind)
        self.info = info = _comm.group_info(recorder, group)
        self.counts = counts = _counts_of(recorder, info)
        self.peer = peer
        self.messages = messages
        self.nbytes, self.dtype, device = size
        self.flags = _ENQUEUE if device else 0
        self.tag = tag = counts.tag(group, tag, device)
        self.start = 0
        self.receive: _Receive | None = None
        self.channel: _Channel | None = None
        if doubted:
            settle(recorder)
        if kind is Kind.SEND:
            self.k = counts.sent.get((peer, tag), 0)
            counts.sent[peer, tag] = self.k + messages
        else:
            self.channel = counts.channel(tag)
            self.receive = self.channel.post(recorder, peer, messages)
            self.k = self.receive.k
            if peer < 0:
                self.flags |= _ANY_SOURCE

    def withdraw(self) -> None:
        """It did not take place: give its number back, unless somebody took the next one meanwhile."""
        if self.channel is not None and self.receive is not None:
            self.channel.withdraw(self.receive)
        elif self.counts.sent.get((self.peer, self.tag)) == self.k + self.messages:
            self.counts.sent[self.peer, self.tag] = self.k

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

    def finish(
        self, recorder: Recorder, state: ThreadState, name: int, flags: int, result: Any, failure: str = ""
    ) -> int:
        """The call returned, a `Work` or a blocking receive's source: write the record, if the group is on.

        Returns:
            The number of the record, or -1.
        """
        receive, channel = self.receive, self.channel
        if receive is not None and channel is not None and not failure:
            if flags & _ASYNC:
                if isinstance(result, _comm.c10d.Work):
                    receive.work = weakref.ref(result)
                else:
                    receive.done = True
            else:
                channel.done(recorder, receive, result if receive.any_source else receive.source)
            self.peer = receive.source
            self.k = receive.k
            if receive.doubtful or self.peer < 0:
                receive.doubtful = True
                flags |= _AMBIGUOUS
        if not recorder.communication:
            return -1
        if _lost_since == recorder.init or self.counts.again:
            flags |= _AMBIGUOUS
        end = _now()
        number = recorder.record(
            self.kind,
            self.start,
            end,
            state.index,
            self.flags | flags | recorder.communication,
            name,
            self.info.name,
            self.dtype,
            -1 if failure else self.k,
            self.nbytes,
            self.peer,
            self.tag,
            self.info.size,
            recorder.strings.id(failure),
            end - self.start,
        )
        if receive is not None:
            receive.number = number
        return number


class _Ends:
    """Reads peer, group and tag from the arguments of one of the functions.

    The peer is given as a global rank (`dst`, `src`) or as a rank in the group (`group_dst`, `group_src`).
    """

    def __init__(self, kind: Kind, messages: int, function: Callable[..., Any]) -> None:
        self.kind = kind
        self.messages = messages
        names = ("dst", "group_dst") if kind is Kind.SEND else ("src", "group_src")
        self.peer, self.group_peer = (Argument(function, name) for name in names)
        self.group = Argument(function, "group")
        self.tag = Argument(function, "tag")
        self.tensor = Argument(function, "tensor")

    def transfer(self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Transfer:
        """What this call transfers."""
        group = self.group.of(args, kwargs)
        peer = self.peer.of(args, kwargs)
        if peer is None:
            in_group = self.group_peer.of(args, kwargs)
            peer = -1 if in_group is None else _comm.group_info(recorder, group).ranks[in_group]
        tag = self.tag.of(args, kwargs)
        size = _comm.payload(recorder, self.tensor.of(args, kwargs))
        return _Transfer(recorder, self.kind, group, peer, tag or 0, size, self.messages)


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hook(operation: str, original: Callable[..., Any], site: Site) -> Hook:
    ends = _Ends(*_OPERATIONS[operation], original)
    asynchronous = _ASYNC if operation.startswith("i") else 0

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
                _lose_count(recorder)
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            if transfer is not None:
                transfer.withdraw()
                _ended(recorder, state, transfer, name, site, _FAILED | asynchronous, None, type(error).__name__)
            raise
        finally:
            state.depth = 0
        if transfer is not None:
            _ended(recorder, state, transfer, name, site, asynchronous, result, "")
        return result

    return hook


def _ended(
    recorder: Recorder,
    state: ThreadState,
    transfer: _Transfer,
    name: int,
    site: Site,
    flags: int,
    result: Any,
    failure: str,
) -> None:
    """Empty the slot, write the record, watch the work; never raises."""
    try:
        recorder.live.leave(state.slot)
        number = transfer.finish(recorder, state, name, flags, result, failure)
        if number >= 0 and isinstance(result, _comm.c10d.Work):
            _comm.watch(result, (number,))
    except Exception as error:
        _lose_count(recorder)
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
            except Skip:  # it only traces
                while transfers:
                    transfers.pop()[0].withdraw()
            except Exception as error:
                transfers.clear()
                _lose_count(recorder)
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
    peer = operation.peer if operation.peer is not None else -1
    size = _comm.payload(recorder, operation.tensor)
    transfer = _Transfer(recorder, kind, operation.group, peer, operation.tag or 0, size)
    return transfer, recorder.strings.id(name)


def _batch_ended(
    recorder: Recorder,
    state: ThreadState,
    transfers: list[tuple[_Transfer, int]],
    site: Site,
    works: Any,
    failure: str,
) -> None:
    if not transfers:
        return
    try:
        recorder.live.leave(state.slot)
        flags = _FAILED | _ASYNC if failure else _ASYNC
        each_has_one = isinstance(works, list) and len(works) == len(transfers)
        if not each_has_one:
            flags |= _COALESCED
        results: Iterable[Any] = works if each_has_one else [works[0] if works else None] * len(transfers)
        if failure:  # nobody knows how far it came
            _lose_count(recorder)
        numbers = [
            transfer.finish(recorder, state, name, flags, result, failure)
            for (transfer, name), result in zip(transfers, results, strict=True)
        ]
        if not works or not numbers or numbers[0] < 0:
            return
        if each_has_one:
            for work, number in zip(works, numbers, strict=True):
                _comm.watch(work, (number,))
        else:
            for work in works:
                _comm.watch(work, tuple(numbers))
    except Exception as error:
        _lose_count(recorder)
        site.fault(error)


class PointToPointInstrumentor(LensInstrumentor):
    """`send recv isend irecv batch_isend_irecv` and the object lists."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed.distributed_c10d": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        _comm.bind(module)
        for operation in _OPERATIONS:
            original = vars(module).get(operation)
            if original is not None:
                site = guard.site(f"torch.distributed.{operation}", _counted)
                patches.wrap(module, operation, _hook(operation, original, site), site)
        site = guard.site("torch.distributed.batch_isend_irecv", _counted)
        patches.wrap(module, "batch_isend_irecv", _batch_hook(site), site)

    def _uninstrument(self, **kwargs: Any) -> None:
        if runtime.recorder is not None:
            _lose_count(runtime.recorder)
        super()._uninstrument(**kwargs)
