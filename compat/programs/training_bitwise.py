"""Training in the ways that PyTorch itself offers, one after another; leaves what must be equal to the last bit.

DDP with gradient accumulation, a communication hook, FSDP, gradient checkpointing, and an evaluation after every epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from outcome import leave
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2
BATCH = 4


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 1))


class Checkpointed(torch.nn.Module):
    """Recomputes its layers in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, inputs, use_reentrant=False)


def ddp() -> torch.nn.Module:
    return DistributedDataParallel(network())


def ddp_with_hook() -> torch.nn.Module:
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def ddp_checkpointed() -> torch.nn.Module:
    return DistributedDataParallel(Checkpointed())


def fully_sharded() -> torch.nn.Module:
    model = network()
    torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def train(make: Callable[[], torch.nn.Module], accumulate: int) -> Iterator[float]:
    """Two epochs with an evaluation after each; gives losses and, at the end, the sum of the weights."""
    torch.manual_seed(1)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(1, keepdim=True)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, seed=1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(DataLoader(data, batch_size=BATCH, sampler=sampler)):
            last = index % accumulate == accumulate - 1
            waits = nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()
            with waits:
                loss = mse_loss(model(x), y)
                loss.backward()
            yield loss.item()
            if last:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=BATCH * 2, sampler=sampler):
                mean = mse_loss(model(x), y)
                dist.all_reduce(mean)
                yield mean.item()
    for weight in model.parameters():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        yield local.detach().double().sum().item()


def generators() -> Iterator[float]:
    """Where the random generators are after the training."""
    yield random.random()
    yield float(numpy.random.random())
    yield torch.rand(1).item()


def main() -> None:
    random.seed(1)
    numpy.random.seed(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers: list[float] = []
    steps = evaluations = 0
    ways = [(ddp, 2), (ddp_with_hook, 1), (ddp_checkpointed, 1)]
    if hasattr(torch.distributed.fsdp, "fully_shard"):  # from torch 2.6; the one before it needs a CUDA device
        ways.append((fully_sharded, 1))
    for make, accumulate in ways:
        numbers += train(make, accumulate)
        steps += EPOCHS * (64 // size // BATCH // accumulate)
        evaluations += EPOCHS
    leave(rank, steps, evaluations, [*numbers, *generators()])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
