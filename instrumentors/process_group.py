"""The life of process groups: a process that enters `init_process_group` is a rank from here on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind, pack_operation

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

_now = time.monotonic_ns
_KIND = int(Kind.PROCESS_GROUP)


def _after_init(recorder: Recorder) -> None:
    group = _comm.c10d.GroupMember.WORLD
    runtime.initialized(group.rank(), group.size(), _comm.c10d._get_default_store())


def _hook(operation: str, site: Site) -> Hook:
    initializes = operation == "init_process_group"

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if initializes:
            try:
                recorder = runtime.become_rank(by_init=True)
                runtime.next_init()
            except Exception as error:
                site.fault(error)
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
        start = _now()
        try:
            try:
                if operation == "destroy_process_group":
                    group = args[0] if args else kwargs.get("group")
                    if group is None or group is _comm.c10d.GroupMember.WORLD:
                        runtime.leaving()
                    _comm.forget_group(group)
                name = recorder.strings.id(operation)
                state.enter(pack_operation(_KIND, name, 0, 0, -1, 0), start)
            except Exception as error:
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            try:
                if initializes:  # the group that there was, if any, goes on
                    runtime.init_failed()
                _ended(recorder, state, operation, start, None, error)
            except Exception as failure:
                site.fault(failure)
            raise
        finally:
            state.depth = 0
        try:
            _ended(recorder, state, operation, start, result, None)
        except Exception as error:
            site.fault(error)
        return result

    return hook


def _ended(
    recorder: Recorder,
    state: ThreadState,
    operation: str,
    start: int,
    result: Any,
    error: BaseException | None,
) -> None:
    end = _now()
    state.leave()
    flags, detail, group, size = recorder.communication, 0, 0, 0
    if error is not None:
        flags |= Flag.FAILED
        detail = recorder.strings.id(type(error).__name__)
    elif operation == "init_process_group":
        _comm.forget_groups()
        _after_init(recorder)
        result = _comm.c10d.GroupMember.WORLD
    if isinstance(result, _comm.c10d.ProcessGroup):
        info = _comm.group_info(recorder, result)
        group, size = info.name, info.size
        detail = recorder.strings.id(str(getattr(result, "group_desc", "")))
    name = recorder.strings.id(operation)
    recorder.record(
        _KIND,
        start,
        end,
        state.index,
        flags,
        name,
        group=group,
        group_size=size,
        detail=detail,
        exposed_ns=end - start,
    )


class ProcessGroupInstrumentor(LensInstrumentor):
    """`init_process_group`, `new_group` and its relatives, `destroy_process_group`."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed.distributed_c10d": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        _comm.bind(module)
        for operation in (
            "init_process_group",
            "new_group",
            "new_subgroups",
            "new_subgroups_by_enumeration",
            "split_group",
            "shrink_group",
            "destroy_process_group",
        ):
            site = guard.site(f"torch.distributed.{operation}")
            patches.wrap(module, operation, _hook(operation, site), site)
