"""What the hooks of an iteration's phases share: one record for the outermost call, and the live page told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from instrumentors._patch import Hook
from lens_auto import runtime
from lens_auto.guard import Site
from lens_auto.recorder.layout import Phase

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # instance, args, kwargs
Write = Callable[["Recorder", "ThreadState", Call, int, int, Any, "BaseException | None"], None]

now_ns = time.monotonic_ns


def phase_hook(site: Site, phase: Phase, after: Phase | None, write: Write) -> Hook:
    """A hook around a call that is one phase as a whole.

    Args:
        site: where failures of ours count.
        phase: what the live page says inside.
        after: what it says afterwards; None: what it said before.
        write: writes the record: recorder, thread, call, start, end, result, exception or None.
    """

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        try:
            state = recorder.local.state
            nested, state.phase_depth = state.phase_depth, 1
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
                    start = now_ns()  # not before that end
                recorder.phase(phase, start)
            except Exception as error:
                site.fault(error)
            result = wrapped(*args, **kwargs)
        except BaseException as error:
            try:
                ended(recorder, state, (instance, args, kwargs), start, None, error, before)
            except Exception as failure:
                site.fault(failure)
            raise
        finally:
            state.phase_depth = 0
        try:
            ended(recorder, state, (instance, args, kwargs), start, result, None, before)
        except Exception as failure:
            site.fault(failure)
        return result

    def ended(
        recorder: Recorder,
        state: ThreadState,
        call: Call,
        start: int,
        result: Any,
        error: BaseException | None,
        before: Phase,
    ) -> None:
        end = now_ns()
        write(recorder, state, call, start, end, result, error)
        recorder.phase(before if after is None else after, end)

    return hook
