"""Optimizer steps, which make iterations: torch's global step hooks, and GradScaler for steps that it skips."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors._patch import Hook, LensInstrumentor, Patches
from instrumentors._phase import now_ns
from instrumentors._weak import ByIdentity
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Flag, Kind, Phase

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

_ordinals: ByIdentity[int] = ByIdentity()
_next_ordinal = 0


class _OpenStep:
    """A step that has begun on a thread.

    The post hook is skipped where `step` raises; whether this step is still running is then told by whether its frame
    is still on the stack. Neither frame nor optimizer is held: what the program drops after the exception is free.

    Attributes:
        code: what the frame that runs it runs.
        frame: id of that frame; another one, of other code, may have it once that has ended.
    """

    __slots__ = ("by_scaler", "code", "counted", "fired", "frame", "name", "optimizer", "ordinal", "start")

    def __init__(self, optimizer: Any, frame: FrameType, by_scaler: bool) -> None:
        global _next_ordinal
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.code = frame.f_code
        self.frame = id(frame)
        self.by_scaler = by_scaler
        self.fired = False
        ordinal = _ordinals.get(optimizer)
        if ordinal is None:
            ordinal = _ordinals[optimizer] = _next_ordinal
            _next_ordinal += 1
        self.ordinal = ordinal
        self.counted = False
        self.start = now_ns()

    def settle(self, recorder: Recorder, state: ThreadState) -> None:
        """Something else begins on the thread: a step that does not run any more has raised."""
        if not self.runs():
            _end(recorder, state, self, int(Flag.FAILED))

    def runs(self) -> bool:
        """Whether the frame that runs it is on this thread's stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == self.frame and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False


def _begin(recorder: Recorder, state: ThreadState, optimizer: Any, frame: FrameType, by_scaler: bool) -> bool:
    """A step begins. False where it is part of one that runs already."""
    running = state.step
    if running is not None:
        same = running.optimizer() is optimizer
        if (not same or running.by_scaler) and running.frame != id(frame) and running.runs():
            running.fired = running.fired or same
            return False
        _end(recorder, state, running, Flag.FAILED)
    step = _OpenStep(optimizer, frame, by_scaler)
    iterations = runtime.iterations
    if iterations is not None and iterations.counts(step.ordinal, step.name):
        step.counted = True
        iterations.begin_step(step.ordinal, state.index)
    state.step = step
    recorder.phase(Phase.OPTIMIZER, step.start)
    return True


def _end(recorder: Recorder, state: ThreadState, step: _OpenStep, flags: int) -> None:
    end = now_ns()
    state.step = None
    recorder.steps += 1
    if state.backward:
        flags |= Flag.IN_BACKWARD
    recorder.record(
        Kind.OPTIMIZER_STEP,
        step.start,
        end,
        state.index,
        flags | recorder.optimizer,
        recorder.strings.id(step.name),
        a=step.ordinal,
        b=int(step.counted),
    )
    iterations = runtime.iterations
    if step.counted and iterations is not None:
        iterations.end_step(end, state.index)
    recorder.phase(Phase.BACKWARD if state.backward else Phase.OTHER, end)


class _StepHooks:
    """torch's global pre and post hooks, which run for every optimizer, also where torch.compile compiles the step."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._gate = site.gate

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """`step` is about to run."""
        if not self._gate:
            return
        try:
            recorder = runtime.recorder or runtime.become_rank()
            if recorder is not None:
                _begin(recorder, recorder.thread(), optimizer, sys._getframe(1), by_scaler=False)
        except Exception as error:
            self._site.fault(error)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """`step` returned."""
        recorder = runtime.recorder
        if recorder is None or not self._gate:
            return
        try:
            state = recorder.thread()
            step = state.step
            if step is not None and step.frame == id(sys._getframe(1)):
                _end(recorder, state, step, 0)
        except Exception as error:
            self._site.fault(error)


def _scaler_hook(site: Site) -> Hook:
    """`GradScaler.step(optimizer)` is the optimizer's step, also where it finds an inf and does not step."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step: _OpenStep | None = None
        state: ThreadState | None = None
        recorder: Recorder | None = None
        try:
            recorder = runtime.recorder or runtime.become_rank()
            optimizer = args[0] if args else kwargs["optimizer"]
            if recorder is not None:
                state = recorder.thread()
                if _begin(recorder, state, optimizer, sys._getframe(0), by_scaler=True):
                    step = state.step
        except Exception as error:
            site.fault(error)
        flags = int(Flag.FAILED)
        try:
            result = wrapped(*args, **kwargs)
            flags = 0
        finally:
            try:
                if recorder is not None and state is not None and step is not None:
                    if not step.fired and not flags:
                        flags = int(Flag.SKIPPED)
                    _end(recorder, state, step, flags)
            except Exception as error:
                site.fault(error)
        return result

    return hook


class OptimizerInstrumentor(LensInstrumentor):
    """Global step hooks of `torch.optim.optimizer`, and `GradScaler.step`."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.optim.optimizer": self._install_hooks,
            "torch.amp.grad_scaler": self._install_scaler,
        }

    @staticmethod
    def _install_hooks(module: ModuleType, patches: Patches) -> None:
        hooks = _StepHooks(guard.site("torch.optim.Optimizer.step"))
        patches.register(
            "torch.optim.Optimizer step hooks", module.register_optimizer_step_pre_hook(hooks.before).remove
        )
        patches.register("", module.register_optimizer_step_post_hook(hooks.after).remove)

    @staticmethod
    def _install_scaler(module: ModuleType, patches: Patches) -> None:
        site = guard.site("torch.amp.GradScaler.step")
        patches.wrap(module.GradScaler, "step", _scaler_hook(site), site)
