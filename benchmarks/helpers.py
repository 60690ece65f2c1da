"""Budgets of the Lens-compatible helpers in a user's own code, with their group off."""

from __future__ import annotations

import sys

from benchmarks import child
from benchmarks.budget import Measurement
from benchmarks.child import Progress

NAMES = ("managed-span-off", "trace-fn-off")


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Measures both in one process."""
    command = [sys.executable, "-m", "benchmarks.programs.helper_costs"]
    result = child.run(command, {}, progress, 60, "2" if quick else "6")
    return {
        "managed-span-off": Measurement(
            result["managed_span_us"],
            f"the whole with statement; with two attributes {result['with_attributes_us']:.2f}",
        ),
        "trace-fn-off": Measurement(result["trace_fn_us"], f"the bare function {result['bare_us']:.2f}"),
    }
