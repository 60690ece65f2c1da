"""FSDP2: unsharding, waiting for it, and reducing gradients, by the module they are for.

The collectives inside are records of their own; these say for whom they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._comm import GroupInfo
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind

if TYPE_CHECKING:
    from lens_auto.recorder.device import Opened
    from lens_auto.recorder.recorder import Recorder

_now = time.monotonic_ns
_KIND = int(Kind.FSDP)
# Method of a parameter group -> what it is called, and where its process group is.
METHODS = {
    "unshard": ("unshard", "_all_gather_process_group"),
    "wait_for_unshard": ("wait_for_unshard", "_all_gather_process_group"),
    "post_backward": ("reduce_scatter", "_reduce_scatter_process_group"),
}


def _hook(method: str, site: Site) -> Hook:
    name, group_attribute = METHODS[method]
    waits = method == "wait_for_unshard"

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None or not recorder.communication:
            return wrapped(*args, **kwargs)
        start = issued = 0
        info: GroupInfo | None = None
        opened: Opened | None = None
        try:
            info = _group(recorder, instance, group_attribute)
            if info is not None:
                if waits and instance._all_gather_result is None:
                    info = None
                elif not waits:
                    issued = _issued(info)
                elif instance.device.type == "cuda" and recorder.device is not None:
                    opened = recorder.device.open_again(instance.device.index or 0)
            start = _now()
        except Exception as error:
            info = None
            site.fault(error)
        error_type = ""
        try:
            return wrapped(*args, **kwargs)
        except BaseException as error:
            error_type = type(error).__name__
            raise
        finally:
            # Most calls find nothing to do: only those that issued a collective, or had one to wait for, count.
            if info is not None:
                try:
                    if error_type or waits or _issued(info) != issued:
                        _record(recorder, instance, name, info, start, error_type, opened)
                except Exception as error:
                    site.fault(error)

    return hook


def _group(recorder: Recorder, instance: Any, attribute: str) -> GroupInfo | None:
    """The process group of a parameter group; None where it has none (nothing is sharded, or over one rank)."""
    try:
        group = getattr(instance, attribute)
    except (AssertionError, AttributeError):
        return None
    return None if group is None else _comm.group_info(recorder, group)


def _issued(info: GroupInfo) -> int:
    return info.number() if info.native else -1


def _record(
    recorder: Recorder, instance: Any, name: str, info: GroupInfo, start: int, error: str, opened: Opened | None
) -> None:
    flags = recorder.communication | (Flag.FAILED if error else 0)
    if instance.device.type != "cpu":
        flags |= Flag.ENQUEUE
    if opened is not None:
        flags |= Flag.MEASURED
    end = _now()
    number = recorder.record(
        _KIND,
        start,
        end,
        recorder.thread().index,
        flags,
        recorder.strings.id(name),
        info.name,
        group_size=info.size,
        detail=recorder.strings.id(error or str(getattr(instance, "_module_fqn", None) or "")),
        a=len(instance.fsdp_params),
    )
    if opened is not None and recorder.device is not None:
        recorder.device.close(opened, (number,), start, end, wait=True)


class FSDP2Instrumentor(LensInstrumentor):
    """`FSDPParamGroup.unshard`, `wait_for_unshard` and `post_backward`."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.distributed.fsdp._fully_shard._fsdp_param_group": self._install,  # 2.6 and later
            "torch.distributed._composable.fsdp._fsdp_param_group": self._install,  # 2.4, 2.5
        }

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        import torch.distributed.distributed_c10d as distributed

        _comm.bind(distributed)
        for method in METHODS:
            site = guard.site(f"FSDPParamGroup.{method}", lambda: "communication" in runtime.groups)
            patches.wrap(module.FSDPParamGroup, method, _hook(method, site), site)
