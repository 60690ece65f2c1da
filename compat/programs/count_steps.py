"""Runs another program as `python` would, and counts how often its optimizers step: `count_steps.py PROGRAM ARGUMENTS`.

For programs that do not say it themselves. It counts below torch's hooks, in the optimizers' own `step`.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys

import torch
from outcome import leave

COUNTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def _count(optimizer: type[torch.optim.Optimizer], steps: list[None]) -> None:
    bare = optimizer.step

    @functools.wraps(bare)
    def step(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
        steps.append(None)
        return bare(self, *args, **kwargs)

    optimizer.step = step


def main() -> None:
    steps: list[None] = []
    for each in COUNTED:
        _count(each, steps)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave(int(os.environ["RANK"]), len(steps), None, [])


if __name__ == "__main__":
    main()
