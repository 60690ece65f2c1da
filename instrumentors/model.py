"""Wrapping a model: DistributedDataParallel, FullyShardedDataParallel, `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors._patch import LensInstrumentor, Patches
from instrumentors._phase import Call, Write, phase_hook
from lens_auto import guard
from lens_auto.recorder.layout import Flag, Kind, Phase

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState


def _writer(wrapper: str) -> Write:
    def write(
        recorder: Recorder,
        state: ThreadState,
        call: Call,
        start: int,
        end: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        flags, detail = recorder.model_init, 0
        if error is not None:
            flags |= Flag.FAILED
            detail = recorder.strings.id(type(error).__name__)
        recorder.record(Kind.MODEL_INIT, start, end, state.index, flags, recorder.strings.id(wrapper), detail=detail)

    return write


def _wrap(owner: Any, attribute: str, wrapper: str, patches: Patches) -> None:
    site = guard.site(f"model.{wrapper}")
    patches.wrap(owner, attribute, phase_hook(site, Phase.START_UP, None, _writer(wrapper)), site)


class ModelInstrumentor(LensInstrumentor):
    """Constructors of the wrappers. Nested wrapping (FSDP's policies) is one record, the outermost."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.nn.parallel.distributed": self._install_ddp,
            "torch.distributed.fsdp.fully_sharded_data_parallel": self._install_fsdp,
            "torch.distributed.fsdp._fully_shard._fully_shard": self._install_fully_shard,  # 2.6 and later
            "torch.distributed._composable.fsdp.fully_shard": self._install_fully_shard,  # 2.4, 2.5
        }

    @staticmethod
    def _install_ddp(module: ModuleType, patches: Patches) -> None:
        _wrap(module.DistributedDataParallel, "__init__", "DistributedDataParallel", patches)

    @staticmethod
    def _install_fsdp(module: ModuleType, patches: Patches) -> None:
        _wrap(module.FullyShardedDataParallel, "__init__", "FullyShardedDataParallel", patches)

    @staticmethod
    def _install_fully_shard(module: ModuleType, patches: Patches) -> None:
        _wrap(module, "fully_shard", "fully_shard", patches)
