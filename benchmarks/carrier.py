"""The carrier's budget: time taken from the training thread, over two blocking broadcasts of the same message."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks import child
from benchmarks.budget import Measurement
from benchmarks.child import ChildError, Progress
from benchmarks.timing import block_ratios

NAMES = ("carrier",)


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """One run of two ranks."""
    command = [
        *child.instrumented(),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "benchmarks.programs.carrier"),
    ]
    result = child.run(command, {"NEMO_LENS_SPAN_GROUPS": "per_step"}, progress, 180)
    if result["through"] < result["iterations"] * 0.9:
        raise ChildError(f"{result['through']} of {result['iterations']} carriers went through")
    bare_ns, carrier_ns = np.array(result["bare_ns"]), np.array(result["carrier_ns"])
    by_wall, _ = block_ratios(carrier_ns, bare_ns)
    bare_us, blocking_us = float(np.median(bare_ns[:, 0])) / 1e3, result["blocking_ns"] / 1e3
    taken_us, width_us = (by_wall.value - 1) * bare_us, by_wall.width * bare_us
    detail = (
        f"{taken_us:+.0f} us (95 % {(by_wall.low - 1) * bare_us:+.0f} to {(by_wall.high - 1) * bare_us:+.0f}) of"
        f" {bare_us / 1e3:.1f} ms that are all Python, {len(bare_ns)} pairs of blocks; blocking: fastest tenth"
        f" {blocking_us:.0f} us, median, with waiting for the other rank {result['blocking_median_ns'] / 1e3:.0f} us"
    )
    return {"carrier": Measurement(max(0.0, taken_us) / blocking_us, detail, width=width_us / blocking_us)}
