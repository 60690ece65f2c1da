"""Lightning, strategy "ddp", of which one rank is slow: `lightning_straggler.py WHAT RANK`, started by plain python.

WHAT: `dataset` sleeps in the dataset of that rank, `backward` in a hook of the model's first layer.
"""

from __future__ import annotations

import os
import sys
import time

import lightning
import torch
from lightning_ddp import Regression
from torch.utils.data import DataLoader, Dataset

STEPS = 60
DELAY_S = 0.08
BATCH = 4


class Slow(Dataset):
    """Rows of numbers and their sums, that take a while to read."""

    def __init__(self, size: int, delay_s: float) -> None:
        self.inputs = torch.randn(size, 8)
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.delay_s)
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True)


class SlowBackward(Regression):
    """Backward takes a while, before its gradients are reduced."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.network[0].register_full_backward_hook(lambda *_: time.sleep(delay_s))


def main() -> None:
    what, rank = sys.argv[1], int(sys.argv[2])
    slow = int(os.environ.get("LOCAL_RANK", "0")) == rank  # Lightning starts rank 1 itself
    lightning.seed_everything(1)
    dataset = Slow(BATCH * STEPS * 2, DELAY_S / BATCH if slow and what == "dataset" else 0.0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = SlowBackward(DELAY_S if slow and what == "backward" else 0.0)
    trainer.fit(model, DataLoader(dataset, batch_size=BATCH))


if __name__ == "__main__":
    main()
