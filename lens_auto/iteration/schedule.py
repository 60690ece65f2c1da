"""Which span groups are on in which iteration: windows from the environment, and switches of a running job.

Every rank applies a switch at the same iteration number, in the training thread, at the boundary.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence

from lens_auto.iteration.carrier import Switch
from lens_auto.recorder.recorder import NEVER

WINDOW_GROUPS = frozenset({"communication", "microbatch"})
CONTROL_NAME = "control.json"
MAX_FOR_ITERATIONS = 1_000_000_000


def window_switches(groups: frozenset[str], window: Iterable[tuple[int, int]]) -> tuple[frozenset[str], list[Switch]]:
    """The groups at start and the switches that confine `communication` and `microbatch` to ranges of iterations.

    Args:
        groups: that are on otherwise.
        window: ranges, both ends included, sorted; none: no confinement.
    """
    ranges = list(window)
    if not ranges:
        return groups, []
    outside, inside = groups - WINDOW_GROUPS, groups | WINDOW_GROUPS
    switches: list[Switch] = []
    for first, last in ranges:
        if switches and switches[-1].from_iteration >= first:  # ranges that touch or overlap are one
            last = max(last, switches.pop().from_iteration - 1)
        else:
            switches.append(Switch(inside, first))
        switches.append(Switch(outside, last + 1))
    return outside, switches


class Schedule:
    """The switches that are still to come in this process.

    Args:
        windows: those of the environment. Requests to switch come on top.
    """

    def __init__(self, windows: Iterable[Switch] = ()) -> None:
        self._coming = sorted(windows, key=lambda each: each.from_iteration)
        self._windows = frozenset(self._coming)
        self._known = set(self._coming)

    @property
    def next_iteration(self) -> int:
        """When to look again."""
        return self._coming[0].from_iteration if self._coming else NEVER

    def add(self, switches: Sequence[Switch]) -> None:
        """Take in the switches of one request; known ones change nothing. What an earlier request would do later than
        this one begins is off: it would undo this one.
        """
        new = [switch for switch in switches if switch not in self._known]
        if not new:
            return
        self._known.update(new)
        first = min(switch.from_iteration for switch in switches)
        kept = (each for each in self._coming if each in self._windows or each.from_iteration < first)
        self._coming = sorted([*kept, *new], key=lambda each: each.from_iteration)

    def due(self, iteration: int) -> frozenset[str] | None:
        """Groups to switch to in this iteration; None: nothing changes."""
        groups = None
        while self._coming and self._coming[0].from_iteration <= iteration:
            groups = self._coming.pop(0).groups
        return groups


# --- the control file: what `lens-auto groups` asks of rank 0 ---------------------------------------------------------


def write_request(run_dir: str, groups: frozenset[str], for_iterations: int | None) -> str:
    """Ask a running job to switch. Returns the file written.

    Raises:
        OSError: the run directory cannot be written.
    """
    from lens_auto.recorder.spool import write_atomically

    path = os.path.join(run_dir, CONTROL_NAME)
    request = {"format": "lens-control", "version": 1, "groups": sorted(groups), "for_iterations": for_iterations}
    write_atomically(path, json.dumps(request).encode() + b"\n")
    return path


class Requests:
    """Rank 0's look at the control file."""

    def __init__(self) -> None:
        self._seen = 0

    def look(self, run_dir: str) -> tuple[frozenset[str], int | None] | None:
        """A request that was not seen before: groups, and for how many iterations."""
        path = os.path.join(run_dir, CONTROL_NAME)
        try:
            stamp = os.stat(path, follow_symlinks=False).st_mtime_ns
            if stamp == self._seen:
                return None
            self._seen = stamp
            with open(path, "rb") as file:
                found = json.loads(file.read(1 << 16))
            count = found["for_iterations"]
            if count is not None and not 0 < int(count) <= MAX_FOR_ITERATIONS:
                return None
            return frozenset(map(str, found["groups"])), None if count is None else int(count)
        except (OSError, ValueError, KeyError, TypeError):
            return None
