"""Provoked hangs and crashes: the hang watch, `lens-auto hang` and `lens-auto postmortem` name the same culprit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, SCRIPTS, TORCHRUN, Launcher, free_port
from records import read_run, read_spans

from lens_auto.recorder.finish import finish_dead
from lens_auto.recorder.layout import Kind
from lens_auto.recorder.read import RunDirectory
from lens_auto.report import hang, postmortem

# Scenario -> rank, cause, op, group, seq of the culprit among three ranks. The operation is the one the others wait in.
EXPECTED: dict[str, tuple[int, str, str, str | None, int | None]] = {
    "late_in_the_dataset": (2, "data_loading", "all_reduce", "0", 5),
    "skipped_collective": (1, "skipped", "barrier", "0", 6),
    "other_collective": (2, "other_operation", "all_reduce", "0", 5),
    "other_size": (2, "other_size", "all_reduce", "0", 5),
    "order_of_two_groups": (2, "order", "all_reduce", "1", 1),
    "killed_peer": (2, "died", "new_group", None, None),
    "exception": (2, "exception", "all_reduce", "0", 5),
    "user_lock": (2, "user_code", "all_reduce", "0", 5),
    "never_started": (2, "not_started", "init_process_group", None, None),
    "load_from_a_pipe": (2, "checkpoint", "all_reduce", "0", 1),
}

# Forks three ranks for each scenario, and kills what is left of them when the test says so by a file.
PROGRAM = """
import multiprocessing, os, sys, threading, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    stuck_at = None
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == self.stuck_at:
            time.sleep(1000)
        return torch.ones(4)

def steps(loader, step):
    for number, batch in enumerate(loader):
        dist.all_reduce(batch)
        if number == 2:
            step(batch)
        dist.barrier()

def linger():
    threading.Thread(target=time.sleep, args=(1000,)).start()

def late_in_the_dataset(rank):
    numbers = Numbers()
    numbers.stuck_at = 2 if rank == 2 else None
    steps(DataLoader(numbers), lambda batch: None)

def skipped_collective(rank):
    for number, batch in enumerate(DataLoader(Numbers())):
        dist.all_reduce(batch)
        if not (rank == 1 and number == 2):
            dist.barrier()

def at_step_two(rank, here):
    for number, batch in enumerate(DataLoader(Numbers())):
        if number == 2 and rank == 2:
            here(batch)
        dist.all_reduce(batch)
        dist.barrier()

def other_collective(rank):
    at_step_two(rank, lambda batch: dist.broadcast(batch, 0))

def other_size(rank):
    linger()  # the processes that survive the error stay
    at_step_two(rank, lambda batch: dist.all_reduce(torch.ones(1000)))

def order_of_two_groups(rank):
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    if rank == 2:
        first, second = second, first
    dist.all_reduce(torch.ones(4), group=first)
    dist.all_reduce(torch.ones(4), group=second)

def killed_peer(rank):
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), 9)
    dist.new_group([0, 1, 2])

def exception(rank):
    linger()
    def here(batch):
        raise ValueError("the loss is not finite")
    at_step_two(rank, here)

def user_lock(rank):
    def here(batch):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    at_step_two(rank, here)

def load_from_a_pipe(rank):
    if rank == 2:
        os.mkfifo("checkpoint.pt")
        torch.load("checkpoint.pt")
    dist.all_reduce(torch.ones(4))

def rank_main(scenario, rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    if scenario == "never_started" and rank == 2:
        time.sleep(1000)
    dist.init_process_group("gloo")
    globals()[scenario](rank)

def never_started(rank):
    pass

import socket
context = multiprocessing.get_context("fork")
for scenario in sys.argv[1:]:
    os.environ["NEMO_LENS_RUN_ID"] = scenario
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(listener.getsockname()[1])
    ranks = [context.Process(target=rank_main, args=(scenario, rank)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    while not os.path.exists(scenario + ".end"):
        time.sleep(0.05)
        [rank.is_alive() for rank in ranks]
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
    open(scenario + ".ended", "w").close()
"""


@dataclass
class Seen:
    """What was said of one scenario."""

    run_dir: Path
    watch: dict[str, Any] = field(default_factory=dict)
    tool: hang.Analysis | None = None
    after: postmortem.Postmortem | None = None
    stderr: str = ""


def wait_for(what: Callable[[], Any], timeout_s: float = 20) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    return None


def read_json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else None
    return None


@pytest.fixture(scope="module")
def seen(launch_once: Launcher) -> Iterator[dict[str, Seen]]:
    patch = pytest.MonkeyPatch()
    patch.setenv("NEMO_LENS_SPOOL_DIR", str(launch_once.folder / "spool"))
    program = launch_once.program(PROGRAM)
    environment = {"NEMO_LENS_HANG_TIMEOUT_S": "1"}
    started = launch_once.start((*INSTRUMENT, *PYTHON, program, *EXPECTED), environment)
    found: dict[str, Seen] = {}
    for scenario in EXPECTED:
        print(scenario, time.monotonic(), flush=True)
        this = found[scenario] = Seen(launch_once.cwd / "lens-runs" / scenario)
        this.watch = wait_for(lambda this=this: read_json(this.run_dir / "hang.json")) or {}
        if this.watch:
            this.tool = hang.analyse(this.run_dir)
        (launch_once.cwd / f"{scenario}.end").touch()
        assert wait_for((launch_once.cwd / f"{scenario}.ended").exists), scenario
        if this.run_dir.exists():
            assert finish_dead(str(this.run_dir)) == []
            this.after = postmortem.examine(this.run_dir)
    run = started.wait()
    found["stderr"] = Seen(run.folder, stderr=run.stderr)
    print(run.stderr)
    yield found
    patch.undo()


def named(culprit: Any) -> tuple[Any, ...]:
    if isinstance(culprit, dict):
        return tuple(culprit[name] for name in ("rank", "cause", "op", "group", "seq"))
    return (culprit.rank, culprit.cause, culprit.op, culprit.group, culprit.seq)


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_culprit_is_named(seen: dict[str, Seen], scenario: str) -> None:
    this = seen[scenario]
    assert this.watch, f"the hang watch said nothing\n{seen['stderr'].stderr}"
    assert this.tool is not None and this.tool.culprit is not None
    assert this.after is not None and this.after.analysis.culprit is not None
    found = {
        "watch": named(this.watch["culprit"]),
        "tool": named(this.tool.culprit),
        "postmortem": named(this.after.analysis.culprit),
    }
    print(this.watch["verdict"], this.after.verdict, sep="\n")
    assert found == dict.fromkeys(found, EXPECTED[scenario])
