"""What a program may do with a model, case by case: run as a program by `test_bitwise.py`, bare and instrumented.

    bitwise_cases.py FOLDER ITERATIONS MODES [CASE...]

Two ranks share one import of torch. After each case a rank writes its losses, its weights, and the states of Python's,
NumPy's and torch's generators to FOLDER/<mode>.<rank>.json, to the last bit. Modes, by comma: `bare`; span groups, with
which it is then instrumented; `given`: whatever the process was started under.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import numpy
import torch
import torch._dynamo
import torch.distributed as dist
from launch import free_port
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WORLD = 2
Case = Callable[[int, int], "Iterator[tuple[Any, Any]]"]
cases: dict[str, Case] = {}


def case(function: Case) -> Case:
    cases[function.__name__] = function
    return function


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.dropout(torch.relu(self.first(x)), 0.25))


def batches(rank: int, count: int) -> Iterator[torch.Tensor]:
    """Shuffled by torch's generator, disturbed by Python's and NumPy's."""
    data = torch.arange(16 * 16, dtype=torch.float32).reshape(16, 16) / 64 + rank
    fetched = 0
    while True:
        for (batch,) in DataLoader(TensorDataset(data), batch_size=4, shuffle=True):
            yield batch + random.random() + float(numpy.random.rand())
            fetched += 1
            if fetched == count:
                return


def train(model: Any, rank: int, count: int, optimizer: Any = None, step: Any = None) -> Iterator[tuple[Any, Any]]:
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(rank, count):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        (step or optimizer.step)()
        yield loss, model.parameters


# --- cases ------------------------------------------------------------------------------------------------------------


@case
def ddp(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    yield from train(DistributedDataParallel(Model()), rank, count)


@case
def fsdp1(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    yield from train(FullyShardedDataParallel(Model(), device_id=torch.device("cpu")), rank, count)


@case
def fsdp2(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = Model()
    for layer in (model.first, model.second):
        fully_shard(layer)
    yield from train(fully_shard(model), rank, count)


@case
def tensor_parallel(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    yield from train(parallelize_module(Model(), mesh, plan), 0, count)


@case
def pipelining(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    stage = PipelineStage(torch.nn.Linear(16, 16), rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    for batch in batches(0, count):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*(() if rank else (batch,)), **({"target": batch, "losses": losses} if rank else {}))
        optimizer.step()
        yield sum(losses, stage.submod.weight.sum()), stage.submod.parameters


@case
def zero_redundancy(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    yield from train(model, rank, count, optimizer)


@case
def mixed_precision(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    for number, batch in enumerate(batches(rank, count)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss * (float("inf") if number == 4 else 1.0)).backward()  # one step is skipped
        scaler.step(optimizer)
        scaler.update()
        yield loss + scaler.get_scale(), model.parameters


@case
def gradient_checkpointing(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    class Checkpointed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = checkpoint(super().forward, x, use_reentrant=False)
            return checkpoint(self.second, torch.relu(self.first(half)), use_reentrant=True)

    yield from train(DistributedDataParallel(Checkpointed(), static_graph=True), rank, count)


@case
def no_sync(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(rank, count):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch).square().mean().backward()
        loss = model(batch + 1).square().mean()
        loss.backward()
        optimizer.step()
        yield loss, model.parameters


@case
def communication_hook(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, fp16_compress_hook)
    yield from train(model, rank, count)


@case
def collectives(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        for work in works:
            work.wait()
        optimizer.step()

    yield from train(model, rank, count, optimizer, step)


@case
def compiled_model(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = DistributedDataParallel(Model())
    yield from train(torch.compile(model, backend="aot_eager"), rank, count)


@case
def compiled_collectives(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile(backend="eager", fullgraph=True)
    def averaged(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient * 2
        dist.all_reduce(total)
        gathered = torch.empty(WORLD * total.numel())
        dist.all_gather_into_tensor(gathered, total.flatten())
        return total / 4 + gathered.sum() * 0

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad = averaged(parameter.grad)
        optimizer.step()

    yield from train(model, rank, count, optimizer, step)


@case
def compiled_step(rank: int, count: int) -> Iterator[tuple[Any, Any]]:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=False)
    yield from train(model, rank, count, optimizer, torch.compile(optimizer.step, backend="aot_eager"))


# --- the program ------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def bits(tensor: Any) -> list[str]:
    local = getattr(tensor, "_local_tensor", tensor)
    return [value.hex() for value in local.detach().double().flatten().tolist()]


def run(name: str, rank: int, count: int) -> dict[str, Any]:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(len(name))
    torch._dynamo.reset()
    losses: list[Any] = []
    weights: Any = None
    for loss, parameters in cases[name](rank, count):
        losses.append(bits(loss))
        weights = parameters
    return {
        "losses": losses,
        "weights": digest(json.dumps([bits(parameter) for parameter in weights()]).encode()),
        "generators": [
            digest(pickle.dumps(random.getstate())),
            digest(pickle.dumps(numpy.random.get_state())),
            digest(torch.get_rng_state().numpy().tobytes()),
        ],
    }


def main(rank: int, mode: str, folder: str, count: int, names: list[str], port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_PORT=str(port))
    if mode not in ("bare", "given"):
        os.environ.update(NEMO_LENS_SPAN_GROUPS=mode, NEMO_LENS_RUN_DIR=f"{folder}/{mode}.run")
        for each in entry_points(group="opentelemetry_instrumentor"):
            if each.value.startswith("instrumentors."):
                each.load()().instrument()
    dist.init_process_group("gloo")
    found = {name: run(name, rank, count) for name in names}
    with open(f"{folder}/{mode}.{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(mode: str, folder: str, count: int, names: list[str]) -> int:
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(rank, mode, folder, count, names, port)) for rank in range(WORLD)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, iterations, modes, *names = sys.argv[1:]
    codes = [run_ranks(mode, folder, int(iterations), names or list(cases)) for mode in modes.split(",")]
    sys.exit(max(codes))
