"""A long run: memory, descriptors and threads stay as they are, nothing is lost below the bound, which holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import RUN_RANKS, Launcher

from lens_auto.iteration.rule import find_iterations
from lens_auto.recorder.layout import SEGMENT_BYTES, Kind
from lens_auto.recorder.read import RunDirectory

COLLECTIVES = 9  # an iteration: each kind of works that a recorder might hold on to
PROGRAM = (
    RUN_RANKS
    + """
import json, os, threading, time
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist
from torch.utils.data import DataLoader

iterations, world = int(sys.argv[1]), int(sys.argv[2])

def state():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
    }

def main(rank):
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.ones(4) + rank)
    optimizer = torch.optim.SGD([parameter], lr=1e-6)
    loader = DataLoader(torch.zeros(50, 4), batch_size=1)
    batches = iter(loader)
    states = []
    for iteration in range(iterations):
        # By the first of them a segment was full and copied, so that all buffers were used once.
        if iteration in (2 * iterations // 5, 7 * iterations // 10):
            time.sleep(1.0)
            states.append(state())
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        (parameter + batch).sum().backward()
        for _ in range(2):
            dist.all_reduce(parameter.grad)
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(4)]
        for work in works[:2]:
            work.wait()
        works[2].get_future().wait()
        dist.barrier()
        objects = [None] * world
        dist.all_gather_object(objects, rank)
        try:
            dist.all_reduce(None)
        except TypeError:
            pass
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(1.0)
    states.append(state())
    dist.barrier()
    dist.destroy_process_group()
    with open(f"states.{rank}.json", "w") as file:
        json.dump(states, file)

run_ranks(main, world)
"""
)


def soak(launch: Launcher, iterations: int, world: int, timeout_s: float, **env: str) -> list[Any]:
    """Run it; what the ranks recorded, each against what it did."""
    environment = {"NEMO_LENS_SPAN_GROUPS": "all", **env}
    run = launch.instrumented(PROGRAM, str(iterations), str(world), env=environment, timeout_s=timeout_s).check()
    found = []
    for writer in sorted(RunDirectory(run.run_dir).writers, key=lambda each: each.info.rank):
        states = json.loads((launch.cwd / f"states.{writer.info.rank}.json").read_text())
        warm, middle, last = states
        assert last["rss"] - warm["rss"] < 10 << 20, states
        for name in ("descriptors", "threads", "tasks"):
            assert warm[name] == middle[name] == last[name], states
        assert (writer.info.hooks_off, writer.info.hook_faults) == ({}, 0)
        found.append(writer)
    assert len(found) == world
    return found


@pytest.mark.timeout(300)
def test_five_thousand_iterations(launch: Launcher) -> None:
    (writer,) = soak(launch, 5_000, 1, 250)
    records = writer.records()
    kinds = records.data["kind"].tolist()
    assert writer.info.dropped == 0
    assert kinds.count(Kind.COLLECTIVE) == COLLECTIVES * 5_000 + 1
    assert kinds.count(Kind.WAIT) == 2 * 5_000
    assert kinds.count(Kind.BACKWARD) == kinds.count(Kind.OPTIMIZER_STEP) == 5_000
    assert len(find_iterations(records.data, records.numbers)) == 5_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_iterations(launch: Launcher) -> None:
    bound = 128 << 20
    writers = soak(launch, 100_000, 2, 3400, NEMO_LENS_MAX_RUN_BYTES=str(bound))
    for writer in writers:
        kept = writer.records()
        # What the bound took is the oldest, and counted; of all else nothing is missing.
        assert writer.info.dropped > 0
        numbers = kept.numbers
        assert (numbers[1:] - numbers[:-1] == 1).all()
        assert len(numbers) + writer.info.dropped == int(numbers[-1]) + 1
        assert int(kept.data["iteration"][-1]) >= 99_999 - 1
    (run_dir,) = (launch.cwd / "lens-runs").iterdir()
    segments = sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    assert segments <= bound + 2 * 2 * SEGMENT_BYTES
