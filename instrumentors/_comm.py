"""What the communication hooks share: process groups as we know them, sizes of payloads, works that are awaited.

Private names of torch are reached here alone (seen in 2.13: `_world._default_pg`, `_get_sequence_number_for_group`,
`group_name`, `group_desc`).
"""

from __future__ import annotations

import inspect
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lens_auto.recorder.layout import Kind, pack_operation

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder

torch: Any = None
c10d: Any = None
plain: list[Any] = []  # the types of tensors that have nothing unusual, once one was seen


def bind(module: Any) -> None:
    """Remember torch's modules; called by the hooks that wait for `torch.distributed.distributed_c10d`."""
    global torch, c10d
    import torch as torch_module

    torch, c10d = torch_module, module


class Skip(Exception):
    """This call is not to be recorded: it only traces, or this rank is not in the group."""


# --- process groups ---------------------------------------------------------------------------------------------------


class GroupInfo:
    """A process group, looked at once.

    Attributes:
        name: string id of torch's name of the group.
        size: its ranks.
        ranks: global rank of each group rank.
        native: whether torch counts its operations.
        shown: what slots of the live page show while a collective runs, by its name.
        transfers: how many of the operations that torch has counted were point to point, and whether its backend counts
            them (gloo does, and the ranks of a pipeline make different numbers of them). Shared with the recorder.
    """

    __slots__ = (
        *("counter", "name", "native", "number", "rank", "ranks"),
        *("shown", "size", "text", "transfers"),
    )

    def __init__(self, recorder: Recorder, group: Any) -> None:
        self.text = str(getattr(group, "group_name", "") or "")
        self.name = recorder.strings.id(self.text)
        self.ranks: list[int] = list(c10d.get_process_group_ranks(group))
        self.size = len(self.ranks)
        self.rank = self.ranks[group.rank()]
        self.counter = itertools.count(1)
        self.shown: dict[str, bytes] = {}
        self.transfers = recorder.transfers[self.text] = [0, int(_counts_transfers(group))]
        self.number: Callable[[], int] = group._get_sequence_number_for_group
        self.native = True
        try:
            self.number()
        except Exception:  # backends that do not count
            self.native = False

    def next_seq(self) -> int:
        """Sequence number of the collective that is about to be called, from 1; the same on every member."""
        return self.number() + 1 - self.transfers[0] if self.native else next(self.counter)

    def issued(self) -> int:
        """Operations that torch has counted so far; 0 where it does not count."""
        return self.number() if self.native else 0

    def show(self, operation: str, recorder: Recorder) -> bytes:
        """What a slot of the live page shows while a collective of this name runs on the group."""
        found = self.shown.get(operation)
        if found is None:
            name = recorder.strings.id(operation)
            found = self.shown[operation] = pack_operation(Kind.COLLECTIVE, name, self.name, self.size, -1, 0)
        return found


def _counts_transfers(group: Any) -> bool:
    try:
        return "gloo" in str(c10d.get_backend(group))
    except Exception:
        return False


groups: dict[Any, GroupInfo] = {}


def group_info(recorder: Recorder, group: Any) -> GroupInfo:
    """What is known of a group; None is the default one.

    Raises:
        Skip: this rank is not in it.
    """
    if group is None:
        group = c10d._world._default_pg
    found = groups.get(group)
    if found is None:
        if group is None or group is c10d.GroupMember.NON_GROUP_MEMBER:
            raise Skip
        found = groups[group] = GroupInfo(recorder, group)
    return found


def _default_group() -> Any:
    return c10d._world._default_pg


def forget_group(group: Any) -> None:
    """A group was destroyed; None is the default one, and with it all."""
    if group is None or group is _default_group():
        groups.clear()
    else:
        groups.pop(group, None)


def forget_groups() -> None:
    """The process forked, or starts over with `init_process_group`."""
    groups.clear()
    pending.clear()


os.register_at_fork(after_in_child=forget_groups)


# --- payloads ---------------------------------------------------------------------------------------------------------


def payload(recorder: Recorder, value: Any) -> tuple[int, int, bool]:
    """Bytes, string id of the data type, and whether it lies on a device whose work is enqueued.

    Raises:
        Skip: a fake tensor, the call only traces.
    """
    kind = type(value)
    if kind in plain:
        try:
            dtype = value.dtype
            return value.nbytes, recorder.dtypes.get(dtype) or dtype_id(recorder, dtype), value.is_cuda
        except Exception:  # sparse, nested: no such property
            return _odd_bytes(value), dtype_id(recorder, value.dtype), value.is_cuda
    if kind is list or kind is tuple:
        total, dtype, device = 0, 0, False
        for item in value:
            nbytes, dtype, item_device = payload(recorder, item)
            total += nbytes
            device = device or item_device
        return total, dtype, device
    if isinstance(value, torch.Tensor):
        if not plain:
            plain.extend((torch.Tensor, torch.nn.Parameter))
            return payload(recorder, value)
        if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
            raise Skip
        local = getattr(value, "_local_tensor", None)
        if local is not None and local is not value:
            return payload(recorder, local)
        return _odd_bytes(value), dtype_id(recorder, value.dtype), bool(value.is_cuda)
    return 0, 0, False


def _odd_bytes(value: Any) -> int:
    try:
        if value.is_sparse:
            values, indices = value._values(), value._indices()
            return int(values.nbytes + indices.nbytes)
        return int(value.nbytes)
    except Exception:
        return 0


def dtype_id(recorder: Recorder, dtype: Any) -> int:
    """String id of a data type's name, as torch prints it less the prefix."""
    found = recorder.dtypes.get(dtype)
    if found is None:
        found = recorder.dtypes[dtype] = recorder.strings.id(str(dtype).removeprefix("torch."))
    return found


# --- arguments --------------------------------------------------------------------------------------------------------


class Argument:
    """Finds one argument of a call, given by position or keyword."""

    __slots__ = ("default", "name", "position")

    def __init__(self, function: Callable[..., Any], *names: str) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        self.name = names[0] if names else ""
        self.position = 1 << 30
        self.default: Any = None
        for name in names:
            for position, parameter in enumerate(parameters):
                if parameter.name == name:
                    self.name = name
                    self.position = position if parameter.kind is not parameter.KEYWORD_ONLY else 1 << 30
                    self.default = None if parameter.default is parameter.empty else parameter.default
                    return

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Its value in this call, its default where it is not given."""
        position = self.position
        if position < len(args):
            return args[position]
        return kwargs.get(self.name, self.default)


# --- works ------------------------------------------------------------------------------------------------------------


class _Watched(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("device", "key", "numbers")
    device: int | None
    key: int
    numbers: tuple[int, ...]


pending: dict[int, _Watched] = {}  # id of a Work -> the records that its wait completes


def _gone(reference: Any) -> None:
    key = reference.key
    if pending.get(key) is reference:
        del pending[key]


def watch(work: Any, numbers: tuple[int, ...], device: int | None = None) -> None:
    """Remember which records the wait on this `Work` completes. The work stays torch's own object.

    Args:
        work: the program's.
        numbers: of the records.
        device: on whose current stream the wait is measured; None: it is not.
    """
    reference = _Watched(work, _gone)
    reference.device = device
    reference.key = id(work)
    reference.numbers = numbers
    pending[id(work)] = reference


def watch_result(result: Any, number: int, device: int | None = None) -> None:
    """Watch what an operation returned: a work, or (coalescing manager) an object that holds works."""
    if c10d is not None and isinstance(result, c10d.Work):
        watch(result, (number,), device)
        return
    for work in _works_of(result):
        watch(work, (number,), device)


def _works_of(result: Any) -> Iterator[Any]:
    works = result if isinstance(result, (list, tuple)) else getattr(result, "works", ())
    for work in works if isinstance(works, (list, tuple)) else ():
        if isinstance(work, c10d.Work):
            yield work
