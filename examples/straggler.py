"""Train a small language model with DistributedDataParallel, and make it slow on purpose.

    torchrun --nproc-per-node 2 examples/straggler.py                             # healthy
    torchrun --nproc-per-node 2 examples/straggler.py --fault dataset --rank 1    # one rank reads slowly
    torchrun --nproc-per-node 2 examples/straggler.py --fault dataset --rank all  # all do

Each fault is one that real jobs have, small enough to be seen in a few seconds of training on a CPU. The program knows
nothing of who watches it.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 256
FAULTS = {
    "none": "nothing is slow",
    "dataset": "every sample takes a while to read",
    "forward": "a layer of the model computes for longer",
    "backward": "a layer's gradient computes for longer",
    "optimizer": "the optimizer's step computes for longer",
    "gc": "now and then the garbage collector walks through millions of objects",
    "sequence": "samples are several times as long",
    "checkpoint": "rank 0 saves the model, and all wait for it",
    "file": "every sample is read from --dataset-file, which may be a pipe that somebody fills slowly",
}


def burn(milliseconds: float) -> None:
    """Keep this process's core busy for a while."""
    until = time.perf_counter() + milliseconds / 1e3
    values = torch.ones(64, 64)
    while time.perf_counter() < until:
        values = values @ values / 64


class Texts(Dataset[Tensor]):
    """A few texts of random bytes, over and over, so that there is something to learn."""

    def __init__(self, samples: int, length: int, delay_ms: float, seed: int, file: Path | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(0, VOCABULARY, (8, length + 1), generator=generator)
        self.samples = samples
        self.delay_ms = delay_ms
        self.file = None if file is None else file.open("rb")

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        if self.delay_ms:
            time.sleep(self.delay_ms / 1e3)  # a slow disk keeps no core busy
        if self.file is not None:
            self.file.read(1024)
        return self.texts[index % len(self.texts)]


class _SlowGradient(torch.autograd.Function):
    """The identity; its gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, milliseconds: float) -> Tensor:
        ctx.milliseconds = milliseconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        burn(ctx.milliseconds)
        return gradients[0], None


class Model(nn.Module):
    """A recurrent language model whose layers can be made slow."""

    def __init__(self, width: int, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, VOCABULARY))
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of the next byte, in nats."""
        hidden, _ = self.mix(self.token(tokens[:, :-1]))
        if self.forward_ms:
            burn(self.forward_ms)
        if self.backward_ms:
            hidden = _SlowGradient.apply(hidden, self.backward_ms)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class SlowAdamW(torch.optim.AdamW):
    """AdamW whose step takes a while."""

    def __init__(self, *args: Any, milliseconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.milliseconds = milliseconds

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        burn(self.milliseconds)
        return super().step(closure)


class Pauses:
    """Objects that keep the garbage collector busy, and when it is to run."""

    def __init__(self, every: int, objects: int, seed: int) -> None:
        self.every = every
        self.objects = [[] for _ in range(objects)]
        self.random = random.Random(seed)

    def maybe(self) -> None:
        """Collect, once in a while."""
        if self.random.randrange(self.every) == 0:
            gc.collect()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small model with DistributedDataParallel, and make it slow on purpose.",
        epilog="faults: " + "; ".join(f"{name}: {what}" for name, what in FAULTS.items()),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--rank", default="1", help="which rank has it; 'all' for all (of gc: at random)")
    parser.add_argument("--delay-ms", type=float, default=40.0, help="how much an iteration is delayed by it")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=32, help="bytes of a sample")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="data loading processes per rank")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints, with that fault")
    parser.add_argument("--dataset-file", type=Path, help="what a rank with fault 'file' reads from")
    parser.add_argument("--seed", type=int, default=1234)
    return parser.parse_args(arguments)


class SlowFile(io.BytesIO):
    """A file on a disk that takes its time: as slow to write as one of a large model."""

    def __init__(self, delay_ms: float) -> None:
        super().__init__()
        self.delay_ms = delay_ms

    def write(self, data: Any) -> int:
        time.sleep(self.delay_ms / 1e3)
        self.delay_ms = 0.0
        return super().write(data)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.manual_seed(args.seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ill = args.rank == "all" or int(args.rank) == rank
    delay = {fault: args.delay_ms if ill and fault == args.fault else 0.0 for fault in FAULTS}

    length = args.length * 4 if delay["sequence"] else args.length
    file = args.dataset_file if delay["file"] else None
    dataset = Texts(args.batch_size * 512, length, delay["dataset"] / args.batch_size, args.seed, file)
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, world_size, rank, seed=args.seed)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)

    model = DistributedDataParallel(Model(args.width, delay["forward"], delay["backward"]))
    optimizer = SlowAdamW(model.parameters(), lr=3e-3, milliseconds=delay["optimizer"])
    pauses = Pauses(12, int(delay["gc"] * 20_000), args.seed + rank) if delay["gc"] else None

    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for tokens in loader:
            loss = model(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if pauses is not None:
                pauses.maybe()
            if args.fault == "checkpoint" and step % args.checkpoint_every == 0:
                if rank == 0:
                    torch.save(model.module.state_dict(), SlowFile(10 * args.delay_ms))
                dist.barrier()
            if step % 20 == 0 and rank == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
            if step == args.steps:
                break
    dist.barrier()  # a group that is taken down while its last all-reduce is put away can hang (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
