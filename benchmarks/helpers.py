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
    result = child.run(command, {}, progress, 60, "3" if quick else "10")
    kinds = {"function": result["trace_fn_us"], **result["kinds_us"]}
    shown = ", ".join(f"{kind.replace('_', ' ')} {cost:.2f}" for kind, cost in kinds.items())
    return {
        "managed-span-off": Measurement(
            result["managed_span_us"],
            f"the whole with statement; with two attributes {result['with_attributes_us']:.2f}",
        ),
        # An asynchronous generator is itself twenty times the price of a function: shown, not held to the budget.
        "trace-fn-off": Measurement(
            max(kinds[kind] for kind in ("function", "coroutine", "generator")),
            f"{shown}; the bare function {result['bare_us']:.2f}",
        ),
    }
