"""The carrier's budget: time taken from the training thread, over two blocking broadcasts of the same message."""

from __future__ import annotations

import sys

from benchmarks import child
from benchmarks.budget import Measurement
from benchmarks.child import ChildError, Progress

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
    taken_us = (result["carrier_ns"] - result["bare_ns"]) / 1e3
    blocking_us = result["blocking_ns"] / 1e3
    detail = (
        f"fastest tenths: {taken_us:+.1f} us of {result['bare_ns'] / 1e6:.1f} ms that are all Python; blocking"
        f" {blocking_us:.0f} us (median, with waiting for the other rank: {result['blocking_median_ns'] / 1e3:.0f} us)"
    )
    if taken_us < -blocking_us:
        raise ChildError(f"the machine is too busy to tell: {detail}")
    return {"carrier": Measurement(max(0.0, taken_us) / blocking_us, detail)}
