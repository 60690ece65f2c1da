"""How a rank ends: the exception that nobody caught, where it came from, and what the rank was in.

`sys.excepthook` is chained, never replaced: whoever was there before is called as if we were not. No signal handler is
installed; a signal that ends the process is told by its launcher (`recorder/exits.py`) and by the live page.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lens_auto import guard

if TYPE_CHECKING:
    from lens_auto.recorder.housekeeper import Housekeeper

_MAX_MESSAGE = 2000
_MAX_FRAMES = 50
_OURS = ("instrumentors.", "lens_auto.")


class Ending:
    """Of one rank.

    Attributes:
        failure: what `writer.json` says of an exception that nobody caught; None: there was none so far.
    """

    def __init__(self, keeper: Housekeeper) -> None:
        self.failure: dict[str, Any] | None = None
        self._keeper = keeper
        self._previous: Any = None
        self._hook: Any = None

    @property
    def end(self) -> str:
        """What `writer.json` says of how it closed."""
        return "exit" if self.failure is None else "exception"

    def install(self) -> None:
        """Chain `sys.excepthook`."""
        previous = self._previous = sys.excepthook

        def excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
            try:
                self.note(value, traceback)
            except Exception as problem:
                guard.failed("ending", problem)
            previous(kind, value, traceback)

        self._hook = sys.excepthook = excepthook

    def finish(self) -> None:
        """The process ends: put the hook back where it is still ours, and look for an exception that passed it by.

        multiprocessing's children run their finalizers while the exception is being handled, and never call the hook.
        """
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        if self.failure is not None:
            return
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code not in (None, 0) else None
        if error is None:
            error = getattr(sys, "last_value", None)
        if error is not None and not isinstance(error, SystemExit):
            self.note(error, error.__traceback__)

    def note(self, error: BaseException, traceback: TracebackType | None) -> None:
        """Remember an exception that ends the process."""
        if self.failure is None:
            self.failure = self._describe(error, traceback)
            self._keeper.touch()
            self._keeper.recorder.wake.set()

    def _describe(self, error: BaseException, traceback: TracebackType | None) -> dict[str, Any]:
        recorder = self._keeper.recorder
        kind = type(error)
        name = (
            kind.__qualname__
            if kind.__module__ in ("builtins", "__main__")
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        lines: list[str] = []
        operation: dict[str, Any] | None = None
        while traceback is not None:
            frame = traceback.tb_frame
            module = str(frame.f_globals.get("__name__", ""))
            if module.startswith(_OURS):
                operation = operation or _operation_in(frame.f_locals)
            else:
                lines.append(f"{frame.f_code.co_filename}:{traceback.tb_lineno} {frame.f_code.co_name}")
            traceback = traceback.tb_next
        return {
            "type": name,
            "message": str(error)[:_MAX_MESSAGE],
            "frames": lines[::-1][:_MAX_FRAMES],  # innermost first
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "iteration": recorder.iteration,
            "phase": recorder.phase_code.name.lower(),
            "operation": operation,
        }


def _operation_in(names: dict[str, Any]) -> dict[str, Any] | None:
    """The communication call that a hook of ours was around, from its local names."""
    transfer = names.get("transfer")
    info = getattr(transfer, "info", None) if transfer is not None else names.get("info")
    group = getattr(info, "text", None)
    operation = names.get("operation")
    if not isinstance(group, str) or not isinstance(operation, str):
        return None
    seq = getattr(transfer, "k", None) if transfer is not None else names.get("seq")
    nbytes = getattr(transfer, "nbytes", 0) if transfer is not None else names.get("nbytes", 0)
    return {
        "op": operation,
        "group": group,
        "seq": seq if isinstance(seq, int) else None,
        "bytes": nbytes if isinstance(nbytes, int) else 0,
        "peer": getattr(transfer, "peer", None),
    }
