"""DeepSpeed on CPU: ZeRO of the stage given, gradient accumulation, an evaluation after every epoch.

`deepspeed_zero.py STAGE`, started by torchrun.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from outcome import leave
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2
MICROBATCH = 4


def main() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(1, keepdim=True)
    data = TensorDataset(inputs, targets)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    deepspeed.init_distributed("gloo")
    engine, _, training, _ = deepspeed.initialize(
        model=network,
        model_parameters=network.parameters(),
        training_data=data,
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": int(sys.argv[1])},
            "zero_allow_untested_optimizer": True,
        },
    )
    evaluation = DataLoader(data, batch_size=2 * MICROBATCH)
    losses = []
    for _ in range(EPOCHS):
        engine.train()
        for x, y in training:
            loss = mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            losses += [mse_loss(engine(x), y).item() for x, y in evaluation]
    leave(dist.get_rank(), engine.global_steps, EPOCHS, losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
