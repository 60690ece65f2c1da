"""Backward: `torch.autograd.backward`, which `Tensor.backward` calls."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors._patch import LensInstrumentor, Patches
from instrumentors._phase import now_ns
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind, Phase

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState


def _hook(site: Site) -> Any:
    """The outermost backward of a thread; reentrant checkpointing calls it again from inside."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            try:
                recorder = runtime.become_rank()
            except Exception as error:
                site.fault(error)
            if recorder is None:
                return wrapped(*args, **kwargs)
        try:
            state = recorder.local.state
            nested, state.backward = state.backward, 1
        except Exception as error:
            site.fault(error)
            return wrapped(*args, **kwargs)
        if nested:
            return wrapped(*args, **kwargs)
        start = now_ns()
        before = recorder.phase_code
        try:
            try:
                if state.step is not None:  # a step of an optimizer that raised ends here
                    state.step.settle(recorder, state)
                recorder.phase(Phase.BACKWARD, start)
            except Exception as error:
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            try:
                _ended(recorder, state, start, before, error)
            except Exception as failure:
                site.fault(failure)
            raise
        finally:
            state.backward = 0
        try:
            _ended(recorder, state, start, before, None)
        except Exception as failure:
            site.fault(failure)
        return result

    return hook


def _ended(recorder: Recorder, state: ThreadState, start: int, before: Phase, error: BaseException | None) -> None:
    end = now_ns()
    flags, detail = recorder.forward_backward, 0
    if error is not None:
        flags |= Flag.FAILED
        detail = recorder.strings.id(type(error).__name__)
    name = recorder.strings.id("backward")
    recorder.record(Kind.BACKWARD, start, end, state.index, flags, name, detail=detail)
    recorder.phase(before if before is Phase.OPTIMIZER else Phase.OTHER, end)  # an LBFGS closure stays in its step


class BackwardInstrumentor(LensInstrumentor):
    """`torch.autograd.backward`. `autograd.grad` and direct calls of the engine are not backward passes to us."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.autograd": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        site = guard.site("torch.autograd.backward")
        patches.wrap(module, "backward", _hook(site), site)
