"""Budgets of real training: DDP on two ranks over gloo, on and off in turns inside one run."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks import child
from benchmarks.budget import BY_NAME, Measurement
from benchmarks.child import ChildError, Progress
from benchmarks.timing import block_ratios

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
    seconds = 25 if quick else 150  # at most: it ends once that tells on which side of the budget it is
    command = [
        *child.instrumented(),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "benchmarks.programs.ddp", groups, "--collectives", str(collectives)),
        *("--budget", str(budget), "--seconds", str(seconds), "--min-pairs", "10" if quick else "20"),
    ]
    result = child.run(command, {"NEMO_LENS_SPAN_GROUPS": groups}, progress, seconds + 120)
    if result["records"] < least_records or result["faults"]:
        raise ChildError(f"{result['records']:.1f} records an iteration, {result['faults']} faults of hooks")
    on_ns, off_ns = np.array(result["on_ns"]), np.array(result["off_ns"])  # pair, wall or CPU, iteration
    by_wall, by_cpu = block_ratios(on_ns, off_ns)
    added_us = np.median(np.median(on_ns, axis=2) - np.median(off_ns, axis=2), axis=0) / 1e3
    records = max(1.0, result["records"])
    detail = (
        f"95 % [{by_wall.low:.3f}, {by_wall.high:.3f}], {len(on_ns)} pairs of blocks; by CPU time {by_cpu}; off"
        f" {np.median(off_ns[:, 0]) / 1e6:.1f} ms; {added_us[1]:+.0f} us of CPU for {records:.0f} records;"
        f" our threads {100 * result['background']:.2f} % of a core (in both)"
    )
    if not by_wall.tells(budget) and by_wall.width > budget - 1 and by_cpu.width < by_wall.width:
        # CPU time leaves out the waiting, so that the same work is a larger share of it: an upper bound.
        detail = f"by CPU time, an upper bound: too busy for wall time; wall {by_wall.value:.3f}, {detail}"
        by_wall = by_cpu
    profile = []
    if by_wall.value > budget:
        # They work in the on blocks alone, half of the time. What gloo starts for the carrier comes on top.
        threads_us = 2 * result["background"] * float(np.median(off_ns[:, 0])) / 1e3
        profile = [
            f"{added_us[1]:8.0f} us  an iteration, the training thread's CPU: {records:.0f} records, see hook-on",
            f"{threads_us:8.0f} us  an iteration, CPU of our threads (housekeeper, carrier): no core is free for them",
        ]
    return Measurement(by_wall.value, detail, profile, width=by_wall.width)
