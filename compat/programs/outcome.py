"""What a program counted itself, left for `python -m compat`, which holds the recorded spans against it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path


def leave(rank: int, steps: int, evaluations: int | None, numbers: Iterable[float]) -> None:
    """Say what this rank did.

    Args:
        rank: its rank.
        steps: how often the framework says that it stepped its optimizer.
        evaluations: passes of evaluation; None where the program does not know.
        numbers: losses and sums of weights: bare and instrumented runs are compared by them, to the last bit.
    """
    said = {"steps": steps, "evaluations": evaluations, "numbers": [float(each).hex() for each in numbers]}
    # A line of its own, should something else write at the same time.
    print(f"\nrank {rank}: {steps} steps, {evaluations} evaluations", flush=True)
    Path(os.environ["LENS_COMPAT_RESULT"], f"rank{rank}.json").write_text(json.dumps(said))
