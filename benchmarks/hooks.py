"""Budgets of a hook on a collective: off, watching, recording."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import child
from benchmarks.budget import BY_NAME, Measurement
from benchmarks.child import Progress

NAMES = ("hook-off", "hook-watch", "wait-watch", "hook-on", "hook-vs-span")

PACKED_US = 0.34  # `struct.pack_into` of a record, as the design has it

# mode -> environment. `job` leaves communication off; the hang watch is on unless it is switched off.
_ENVIRONMENTS = {
    "off": {"NEMO_LENS_SPAN_GROUPS": "job", "NEMO_LENS_HANG_TIMEOUT_S": "0"},
    "watch": {},
    "on": {"NEMO_LENS_SPAN_GROUPS": "all"},
}


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Measures the budgets named; each mode is a process of its own, hook and bare call in turns inside it."""
    needed = [
        mode
        for mode, of_mode in (
            ("off", {"hook-off"}),
            ("watch", {"hook-watch", "wait-watch"}),
            ("on", {"hook-on", "hook-vs-span"}),
        )
        if of_mode & names
    ]
    found: dict[str, Measurement] = {}
    for index, mode in enumerate(needed):

        def part(share: float, index: int = index) -> None:
            progress((index + share) / len(needed))

        found.update(_measure_mode(mode, quick, part))
    return found


def _measure_mode(mode: str, quick: bool, progress: Progress) -> dict[str, Measurement]:
    limit_us = BY_NAME[f"hook-{mode}"].limit or 0.0
    command = [*child.instrumented(), sys.executable, "-m", "benchmarks.programs.hook_costs"]
    seconds = "4" if quick else "12"
    result: dict[str, Any] = child.run(command, _ENVIRONMENTS[mode], progress, 120, mode, seconds, str(limit_us))
    wrapper = f"the wrapper on a stand-in {result['wrapper_us']:.2f}"
    on_call = f"bare all_reduce {result['bare_us']:.2f}, median of pairs {result['hook_median_us']:+.2f}"
    if mode == "off":
        detail = f"on a stand-in; on all_reduce {result['hook_us']:+.2f} ({on_call})"
        return {"hook-off": Measurement(result["wrapper_us"], detail)}
    speed = (
        f"packing a record takes {result['record_us']:.2f} us here and {PACKED_US} where the budgets were written: at"
        f" that speed {result['hook_us'] * PACKED_US / result['record_us']:.2f} us"
    )
    rows = {f"hook-{mode}": Measurement(result["hook_us"], f"{on_call}; {wrapper}; {speed}", profile=result["profile"])}
    if mode == "watch":
        wait_ns = result["wait_ns"]
        detail = "comes on top in real groups: the fake group's works have a wait of their own"
        if wait_ns is None:
            rows["wait-watch"] = Measurement(None, problem="this torch has no gloo, or Work.wait is not patched")
        else:
            rows["wait-watch"] = Measurement(wait_ns / 1e3, detail)
    else:
        rows["hook-vs-span"] = Measurement(
            result["hook_us"] / result["span_us"],
            f"the span takes {result['span_us']:.2f} us",
            profile=result["profile"],
        )
    return rows
