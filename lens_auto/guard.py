"""One guard around all code of ours that runs inside a training program, and never around the user's call."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("lens_auto")

MAX_FAULTS = 3

_sites: dict[str, Site] = {}


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
        """Count a failure of ours; the first is logged, the third switches the site off."""
        self.faults += 1
        what = f"{type(error).__name__}: {error}"
        if self.faults == 1:
            logger.debug("lens-auto: hook %s failed", self.name, exc_info=error)
        if self.faults == MAX_FAULTS:
            self.reason = what
            self.gate.clear()
            logger.warning(
                "lens-auto: hook %s failed %d times (%s) and is off now; the training program is not affected",
                self.name,
                self.faults,
                what,
            )


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
