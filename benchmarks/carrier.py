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
    bare_ns = np.array(result["bare_ns"])
    bare_us = float(np.median(bare_ns[:, 0])) / 1e3
    taken, waited = (
        [bare_us * (each - 1) for each in block_ratios(np.array(result[f"{kind}_ns"]), bare_ns)[0]]
        for kind in ("carrier", "blocking")
    )
    detail = (
        f"{taken[0]:+.0f} us (95 % {taken[1]:+.0f} to {taken[2]:+.0f}) of {bare_us / 1e3:.1f} ms that are all Python,"
        f" blocking {waited[0]:+.0f} us ({waited[1]:+.0f} to {waited[2]:+.0f}); {len(bare_ns)} rounds of blocks"
    )
    share = [max(0.0, each) / waited[0] for each in taken]
    return {"carrier": Measurement(share[0], detail, width=share[2] - share[1])}
