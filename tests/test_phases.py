"""A program with known sleeps marks its own phases: what we recorded agrees with its marks, on the right rank."""

from __future__ import annotations

import json
import statistics

import pytest
from launch import RUN_RANKS, Launcher
from records import Writer, read_run

from lens_auto.recorder.layout import Phase

ITERATIONS = 8
# Seconds that each rank sleeps in each phase: the ranks hold each other back in different ones.
SLEEPS = [
    {"data_loading": 0.060, "forward": 0.020, "backward": 0.020, "optimizer": 0.020, "other": 0.020},
    {"data_loading": 0.020, "forward": 0.050, "backward": 0.030, "optimizer": 0.040, "other": 0.050},
]
PHASES = {
    "data_loading": Phase.DATA_LOADING,
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
    "other": Phase.OTHER,
}

PROGRAM = """
import json, sys, time
from time import perf_counter
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

def main(rank):
    dist.init_process_group("gloo")
    sleeps = SLEEPS[rank]

    class Sleepy(Dataset):
        def __len__(self):
            return ITERATIONS
        def __getitem__(self, index):
            time.sleep(sleeps["data_loading"])
            return torch.ones(4)

    class SleepyBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, gradient):
            time.sleep(sleeps["backward"])
            return gradient

    class SleepySGD(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(sleeps["optimizer"])
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = SleepySGD([parameter], lr=0.01)
    marks = {name: [] for name in sleeps}
    dist.barrier()
    ended = perf_counter()
    fetch = iter(DataLoader(Sleepy(), batch_size=1))
    for _ in range(ITERATIONS):
        started = perf_counter()
        (batch,) = next(fetch)
        got = perf_counter()
        time.sleep(sleeps["forward"])
        loss = (SleepyBackward.apply(parameter) * batch).sum()
        called = perf_counter()
        loss.backward()
        returned = perf_counter()
        dist.all_reduce(parameter.grad)
        stepping = perf_counter()
        optimizer.step()
        stepped = perf_counter()
        marks["data_loading"].append(got - started)
        marks["forward"].append(called - got)
        marks["backward"].append(returned - called)
        marks["optimizer"].append(stepped - stepping)
        # what lies between two iterations belongs to the second; the first starts with its loader
        marks["other"].append(stepping - returned + (started - ended if len(marks["other"]) else 0))
        ended = stepped
        time.sleep(sleeps["other"])
    sys.stdout.write(json.dumps({"rank": rank, "marks": marks}) + "\\n")
    dist.destroy_process_group()

run_ranks(main, 2)
"""


@pytest.fixture(scope="module")
def run(launch_once: Launcher) -> list[tuple[Writer, dict[str, list[float]]]]:
    """Each rank's writer, and its own marks in seconds."""
    source = RUN_RANKS + f"SLEEPS = {SLEEPS}\nITERATIONS = {ITERATIONS}\n" + PROGRAM
    run = launch_once.instrumented(source).check()
    said = {line["rank"]: line["marks"] for line in map(json.loads, run.stdout.splitlines())}
    return [(writer, said[writer.rank]) for writer in read_run(run.run_dir)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PHASES)
def test_phase(run: list[tuple[Writer, dict[str, list[float]]]], rank: int, name: str) -> None:
    """Within 5 % of the program's own marks, or 2 ms."""
    writer, marks = run[rank]
    assert writer.rank == rank
    marked = [1e3 * seconds for seconds in marks[name]]
    recorded = writer.phase_ms(PHASES[name])
    assert len(recorded) == len(marked) == ITERATIONS
    agreeing = [have == pytest.approx(mark, rel=0.05, abs=2) for have, mark in zip(recorded, marked, strict=True)]
    # Between a hook and the program's own mark the scheduler may run somebody else, for as long as it likes.
    assert sum(agreeing) >= ITERATIONS - 2, (recorded, marked)
    assert statistics.median(recorded) == pytest.approx(statistics.median(marked), rel=0.05, abs=2)
    # The sleeps are really in the marks; in `other` all but the first iteration have one.
    at_least = [1e3 * SLEEPS[rank][name]] * ITERATIONS
    if name == "other":
        at_least[0] = 0
    assert all(have >= least for have, least in zip(marked, at_least, strict=True))


def test_nothing_is_left_over(run: list[tuple[Writer, dict[str, list[float]]]]) -> None:
    """No evaluation, no checkpoint, and phases that tile each iteration."""
    for writer, _ in run:
        assert set(writer.phase_ms(Phase.EVALUATE) + writer.phase_ms(Phase.CHECKPOINT)) == {0.0}
        assert writer.iterations.phase_ns.sum(axis=1).tolist() == writer.iterations.duration_ns.tolist()
        assert writer.iterations.mispredicted == 0
