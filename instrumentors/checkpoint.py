"""Checkpoints: `torch.save`, `torch.load`, `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors._comm import Argument
from instrumentors._patch import LensInstrumentor, Patches
from instrumentors._phase import Call, Write, phase_hook
from lens_auto import guard
from lens_auto.recorder.layout import Flag, Kind, Phase

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState


def _path_of(target: Any) -> str:
    """The path of a file argument; empty for a buffer."""
    if isinstance(target, (str, os.PathLike)):
        return os.fspath(target) if isinstance(os.fspath(target), str) else ""
    name = getattr(target, "name", "")
    return name if isinstance(name, str) else ""


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path) if path and os.path.isfile(path) else 0
    except OSError:
        return 0


def _writer(kind: Kind, target: Argument) -> Write:
    def write(
        recorder: Recorder,
        state: ThreadState,
        call: Call,
        start: int,
        end: int,
        result: Any,
        error: BaseException | None,
    ) -> None:
        path = _path_of(target.of(call[1], call[2]))
        flags = recorder.checkpoint if kind is Kind.CHECKPOINT_SAVE else recorder.load_checkpoint
        detail = 0
        if error is not None:
            flags |= Flag.FAILED
            detail = recorder.strings.id(type(error).__name__)
        name = recorder.strings.id(path)
        recorder.record(kind, start, end, state.index, flags, name, nbytes=_size_of(path), detail=detail)

    return write


def _wrap(module: ModuleType, name: str, kind: Kind, arguments: tuple[str, ...], patches: Patches) -> None:
    original = vars(module).get(name)
    if original is None:
        return
    site = guard.site(f"{module.__name__}.{name}")
    hook = phase_hook(site, Phase.CHECKPOINT, None, _writer(kind, Argument(original, *arguments)))
    patches.wrap(module, name, hook, site)


class CheckpointInstrumentor(LensInstrumentor):
    """Saving and loading. What `torch.distributed.checkpoint` saves through `torch.save` is one record, its own."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.serialization": self._install_serialization,
            "torch.distributed.checkpoint.state_dict_saver": self._install_saver,
            "torch.distributed.checkpoint.state_dict_loader": self._install_loader,
        }

    @staticmethod
    def _install_serialization(module: ModuleType, patches: Patches) -> None:
        _wrap(module, "save", Kind.CHECKPOINT_SAVE, ("f",), patches)
        _wrap(module, "load", Kind.CHECKPOINT_LOAD, ("f",), patches)

    @staticmethod
    def _install_saver(module: ModuleType, patches: Patches) -> None:
        _wrap(module, "save", Kind.CHECKPOINT_SAVE, ("checkpoint_id",), patches)
        _wrap(module, "async_save", Kind.CHECKPOINT_SAVE, ("checkpoint_id",), patches)

    @staticmethod
    def _install_loader(module: ModuleType, patches: Patches) -> None:
        _wrap(module, "load", Kind.CHECKPOINT_LOAD, ("checkpoint_id",), patches)
