"""torchtitan: its Llama 3 debug model, made on the meta device, sharded by its own code, with its optimizers.

`torchtitan_llama.py TENSOR_PARALLEL`. Its `Trainer` wants a CUDA device; its parts take it from torch, where the
program says "cpu". They are unmodified.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from outcome import leave

torch._utils._get_available_device_type = lambda: "cpu"  # where it asks, when it is imported

from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

STEPS = 8
BATCH = 2
CONTEXT = 32
VOCABULARY = 2048


def batch(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    config = JobConfig()
    config.training.seq_len = CONTEXT
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "full"
    config.parallelism.disable_loss_parallel = True
    tensor_parallel = int(sys.argv[1])
    dims = ParallelDims(
        dp_replicate=1, dp_shard=size // tensor_parallel, cp=1, tp=tensor_parallel, pp=1, ep=1, etp=1, world_size=size
    )
    spec = get_train_spec("llama3")
    arguments = spec.model_args["debugmodel"]
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    spec.parallelize_fn(model, dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)
    schedulers = spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, STEPS)
    losses = []
    for step in range(STEPS):
        optimizers.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
    leave(rank, STEPS, None, losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
