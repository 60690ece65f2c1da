"""`Work.wait`: completes the record of an asynchronous operation, and shows the waiting in the live page."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm, point_to_point
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind, pack_operation

if TYPE_CHECKING:
    from lens_auto.recorder.device import Opened
    from lens_auto.recorder.recorder import Recorder, ThreadState

_now = time.monotonic_ns
_WAIT = int(Kind.WAIT)


def _wanted() -> bool:
    return not runtime.groups.isdisjoint(("communication", "pipeline")) or runtime.watching()


_overrides: dict[type, bool] = {}  # whether a class of works has a `wait` of its own in Python


def _overrides_wait(kind: type) -> bool:
    own = itertools.takewhile(lambda each: each is not _comm.c10d.Work, kind.__mro__)
    found = _overrides[kind] = any("wait" in vars(each) for each in own)
    return found


def wait(self: Any, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch's `wait` for one in Python that calls it by `super()`.

    By the caller's name and first argument pybind11 knows that it must not call the override again.
    """
    return wrapped(*args, **kwargs)


def _hook(site: Site) -> Hook:

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overridden: bool | None = False
        try:
            overridden = _overrides.get(type(instance))
            if overridden is None:
                overridden = _overrides_wait(type(instance))
        except Exception as error:
            site.fault(error)
        if overridden:
            return wait(instance, wrapped, args, kwargs)
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        try:
            state = recorder.local.state
            nested, state.depth = state.depth, 1
        except Exception as error:
            site.fault(error)
            return wrapped(*args, **kwargs)
        if nested:  # the wait inside a blocking call
            return wrapped(*args, **kwargs)
        numbers: tuple[int, ...] = ()
        start = name = 0
        opened: Opened | None = None
        try:
            try:
                watched = _comm.pending.get(id(instance))
                if watched is not None:
                    numbers = watched.numbers
                    if watched.device is not None and recorder.device is not None:
                        opened = recorder.device.open_again(watched.device)
                name = recorder.strings.id("wait")
                start = _now()
                state.enter(pack_operation(_WAIT, name, 0, 0, -1, 0), start)
            except Exception as error:
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            try:
                _ended(recorder, state, numbers, name, start, error)
            except Exception as failure:
                site.fault(failure)
            raise
        finally:
            state.depth = 0
        try:
            end = _ended(recorder, state, numbers, name, start, None)
            if opened is not None and recorder.device is not None:
                recorder.device.close(opened, numbers, start, end, wait=True)
            if point_to_point.doubted:  # the work knows now whose message it took
                point_to_point.settle(recorder)
        except Exception as error:
            site.fault(error)
        return result

    return hook


def _ended(
    recorder: Recorder,
    state: ThreadState,
    numbers: tuple[int, ...],
    name: int,
    start: int,
    error: BaseException | None,
) -> int:
    """Empty the slot, and record the wait of what is recorded. Returns when that was."""
    state.leave()
    if not numbers:
        return 0
    end = _now()
    flags = int(Flag.COALESCED) if len(numbers) > 1 else 0
    detail = 0
    if error is not None:
        flags |= Flag.FAILED
        detail = recorder.strings.id(type(error).__name__)
    for number in numbers:
        recorder.record(
            _WAIT, start, end, state.index, flags, name, detail=detail, exposed_ns=end - start, ref=number + 1
        )
    return end


class WorkInstrumentor(LensInstrumentor):
    """`Work.wait` on torch's own class: the work that the program holds stays torch's object."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.distributed.distributed_c10d": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        _comm.bind(module)
        site = guard.site("torch.distributed.Work.wait", _wanted)
        patches.wrap(module.Work, "wait", _hook(site), site)
