"""Waiting for a device, shown in the live page, and captures of CUDA graphs, during which no event may be looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.recorder import captures
from lens_auto.recorder.layout import Kind, pack_operation

_now = time.monotonic_ns
_KIND = int(Kind.DEVICE_WAIT)


def _wait_hook(name: str) -> tuple[Hook, guard.Site]:
    """The hook of a call that waits for a device: the slot of the live page while it lasts, and no record."""
    site = guard.site(name, runtime.watching)

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        try:
            state = recorder.local.state
            shown = not state.kind[0]  # not where the thread is in an operation already, which waits by this
            if shown:
                state.enter(pack_operation(_KIND, recorder.strings.id(name), 0, 0, -1, 0), _now())
        except Exception as error:
            site.fault(error)
            return wrapped(*args, **kwargs)
        try:
            return wrapped(*args, **kwargs)
        finally:
            if shown:
                state.leave()

    return hook, site


def _begin_hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    captures.begun()
    try:
        return wrapped(*args, **kwargs)
    except BaseException:
        captures.ended()
        raise


def _end_hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        captures.ended()


class CudaInstrumentor(LensInstrumentor):
    """`synchronize` of `torch.cuda`, its streams and events and `torch.accelerator`; captures of `CUDAGraph`."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.cuda": self._install,
            "torch.cuda.streams": self._install_streams,
            "torch.cuda.graphs": self._install_graphs,
            "torch.accelerator": self._install_accelerator,  # 2.6 and later
        }

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        patches.wrap(module, "synchronize", *_wait_hook("torch.cuda.synchronize"))

    @staticmethod
    def _install_accelerator(module: ModuleType, patches: Patches) -> None:
        patches.wrap(module, "synchronize", *_wait_hook("torch.accelerator.synchronize"))

    @staticmethod
    def _install_streams(module: ModuleType, patches: Patches) -> None:
        patches.wrap(module.Stream, "synchronize", *_wait_hook("torch.cuda.Stream.synchronize"))
        patches.wrap(module.Event, "synchronize", *_wait_hook("torch.cuda.Event.synchronize"))

    @staticmethod
    def _install_graphs(module: ModuleType, patches: Patches) -> None:
        site = guard.site("torch.cuda.CUDAGraph")
        patches.wrap(module.CUDAGraph, "capture_begin", _begin_hook, site)
        patches.wrap(module.CUDAGraph, "capture_end", _end_hook, site)
