"""Budgets of real training: DDP on two ranks over gloo, on and off in turns inside one run."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks import child
from benchmarks.budget import BY_NAME, Measurement
from benchmarks.child import ChildError, Progress
from benchmarks.timing import median_interval

NAMES = ("ddp-per-step", "ddp-all")

_SETTINGS = {"ddp-per-step": ("per_step", 0, 1), "ddp-all": ("all", 200, 200)}  # groups, collectives, records at least


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """One run of two ranks for each budget named."""
    wanted = [name for name in NAMES if name in names]
    found: dict[str, Measurement] = {}
    for index, name in enumerate(wanted):

        def part(share: float, index: int = index) -> None:
            progress((index + share) / len(wanted))

        found[name] = _measure(name, quick, part)
    return found


def _measure(name: str, quick: bool, progress: Progress) -> Measurement:
    groups, collectives, least_records = _SETTINGS[name]
    budget = BY_NAME[name].limit
    assert budget is not None
    seconds = 25 if quick else 75
    command = [
        *child.instrumented(),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "benchmarks.programs.ddp", groups, "--collectives", str(collectives)),
        *("--budget", str(budget), "--seconds", str(seconds), "--min-pairs", "10" if quick else "20"),
    ]
    result = child.run(command, {"NEMO_LENS_SPAN_GROUPS": groups}, progress, seconds + 90)
    if result["records"] < least_records or result["faults"]:
        raise ChildError(f"{result['records']:.1f} records an iteration, {result['faults']} faults of hooks")
    on_ns, off_ns = np.array(result["on_ns"]), np.array(result["off_ns"])
    ratio, low, high = median_interval(on_ns / off_ns)
    added_us = float(np.median(on_ns - off_ns)) / 1e3
    detail = (
        f"95 % [{low:.3f}, {high:.3f}], {len(on_ns)} pairs of blocks; off {np.median(off_ns) / 1e6:.1f} ms,"
        f" on {added_us:+.0f} us for {result['records']:.0f} records; housekeeper"
        f" {100 * result['housekeeper']:.2f} % of a core (in both)"
    )
    profile = []
    if ratio > budget:
        profile.append(
            f"{added_us / max(1.0, result['records']):.1f} us an iteration for each record: see hook-on, wait-watch"
        )
        if low <= budget:
            profile.append(
                "the interval holds the budget: the machine is too busy to tell; run it again when it is quiet"
            )
    return Measurement(ratio, detail, profile)
