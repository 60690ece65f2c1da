"""One guard around all code of ours that runs inside a training program, and never around the user's call."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("lens_auto")

MAX_FAULTS = 3

_sites: dict[str, Site] = {}
_told = False  # that something failed: one line in a process is enough, the report names the rest


class Site:
    """A place where we hook into the program: its gate, and what went wrong there.

    `gate` is handed to wrapt as `enabled=`: an empty list is false, and testing it costs no Python call. `wanted` says
    whether the site should be on; a site that failed `MAX_FAULTS` times stays off whatever is wanted.
    """

    __slots__ = ("faults", "gate", "name", "reason", "wanted")

    def __init__(self, name: str, wanted: Callable[[], bool]) -> None:
        self.name = name
        self.wanted = wanted
        self.gate: list[bool] = []
        self.faults = 0
        self.reason = ""
        _sites[name] = self
        self.refresh()

    def refresh(self) -> None:
        """Open or shut the gate by what is wanted now."""
        self.gate[:] = [True] if self.wanted() and not self.reason else []

    def retire(self) -> None:
        """Shut the gate of the wrappers made so far for good: one that somebody wrapped again may stay in place."""
        self.gate.clear()
        self.gate = []
        self.refresh()

    def fault(self, error: Exception) -> None:
        """Count a failure of ours; the third switches the site off, with one line. Nothing else comes out of here but
        what a signal handler of the program raised while code of ours ran: that is the program's.
        """
        theirs = False
        try:
            theirs = _of_signal_handler(error)
            if not theirs:
                self._count(error)
        except Exception:  # a filter of the program's logging, an error that cannot be shown
            self.reason = self.reason or (type(error).__name__ if self.faults >= MAX_FAULTS else "")
        if theirs is True:
            raise error

    def _count(self, error: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            logger.debug("lens-auto: hook %s failed", self.name, exc_info=error)
        if self.faults == MAX_FAULTS:
            self.gate.clear()
            self.reason = f"{type(error).__name__}: {error}"
            tell(
                f"hook {self.name} failed {self.faults} times ({self.reason}) and is off now; the training program"
                " is not affected, `lens-auto report` names what else is off"
            )


def lost(name: str, error: Exception) -> None:
    """Something of ours could not be put in at all: the report says so like of a hook that is off."""
    try:
        reason = f"{type(error).__name__}: {error}"
        tell(f"{name} could not be patched ({reason}); it is not recorded, `lens-auto report` names what else is not")
        each = site(name)
        each.reason = reason
        each.gate.clear()
    except Exception:  # this is the guard: nothing comes out of it
        return


def failed(name: str, error: Exception) -> None:
    """Something of ours that is no hook failed; see `Site.fault`."""
    try:
        fault = site(name).fault
    except Exception:
        return
    fault(error)


def tell(what: str) -> None:
    """Log that something of ours failed, once in a process."""
    global _told
    if not _told:
        _told = True
        try:
            logger.warning("lens-auto: %s", what)
        except Exception:  # a filter of the program's
            return


def _of_signal_handler(error: BaseException) -> bool:
    """Whether an exception came out of a signal handler of the program, which Python runs wherever we are."""
    codes = set()
    traceback = error.__traceback__
    while traceback is not None:
        codes.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return any(_code_of(signal.getsignal(number)) in codes for number in signal.valid_signals())


def _code_of(handler: Any) -> Any:
    function = getattr(handler, "func", handler)  # of a partial
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    return getattr(function, "__code__", handler)


def _forget_told() -> None:
    global _told
    _told = False


os.register_at_fork(after_in_child=_forget_told)


def site(name: str, wanted: Callable[[], bool] = lambda: True) -> Site:
    """The site of this name, made on first use."""
    found = _sites.get(name)
    if found is None:
        return Site(name, wanted)
    return found


def refresh_all() -> None:
    """Open or shut every gate anew: the span groups or the recorder changed."""
    for each in _sites.values():
        each.refresh()


def switched_off() -> dict[str, str]:
    """Names of the sites that switched themselves off, with the last error of each."""
    return {each.name: each.reason for each in _sites.values() if each.reason}


def fault_count() -> int:
    """Failures of ours in this process so far, over all sites."""
    return sum(each.faults for each in _sites.values())


if "NEMO_LENS_FAULT" in os.environ:  # a test wants to see what happens when something of ours fails
    from lens_auto import faults

    faults.install(os.environ[faults.VARIABLE])
