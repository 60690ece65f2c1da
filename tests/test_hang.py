"""Provoked hangs and crashes: the hang watch, `lens-auto hang` and `lens-auto postmortem` name the same culprit."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, RUN_RANKS, SCRIPTS, TORCHRUN, Launcher, free_port
from receiver import Receiver
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
    "asynchronous": (2, "user_code", "all_reduce", "0", 2),
    "both_receive": (1, "order", "recv", "0", 0),
    "device": (2, "device", "all_reduce", "0", 5),
    # What C++ issues is not in the live page: the group's own count tells which operation it is, the flight recorder
    # its name (2.13 has it on; without it the name is "backward").
    "backward_of_ddp": (2, "user_code", "all_reduce", "0", 8),
}

# Forks three ranks for each scenario, and kills what is left of them when the test says so by a file.
PROGRAM = """
import contextlib, multiprocessing, os, sys, threading, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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

def asynchronous(rank):
    dist.barrier()
    if rank == 2:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4), async_op=True).wait()

def both_receive(rank):
    dist.barrier()
    if rank < 2:
        dist.recv(torch.ones(4), 1 - rank)
    time.sleep(1000)

def device(rank):
    # There is no GPU here: one that never finishes, below the function that programs call.
    torch.cuda._lazy_init = lambda: None
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch._C._cuda_synchronize = lambda: time.sleep(1000)
    at_step_two(rank, lambda batch: torch.cuda.synchronize())

def backward_of_ddp(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    lock = threading.Lock()
    for step in range(4):
        if step == 2 and rank == 2:
            lock.acquire()
            lock.acquire()
        model(torch.ones(2, 4)).sum().backward()

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


def wait_for(what: Callable[[], Any], timeout_s: float = 45) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.05)
    return None


def verdict_of(run_dir: Path, op: str) -> dict[str, Any] | None:
    """What the watch says of the hang; on a busy machine it may have spoken of a slow start before."""
    found = read_json(run_dir / "hang.json")
    return found if found is not None and found["culprit"]["op"] == op else None


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
    environment = {"NEMO_LENS_HANG_TIMEOUT_S": "1.2"}
    started = launch_once.start((*INSTRUMENT, *PYTHON, program, *EXPECTED), environment)
    found: dict[str, Seen] = {}
    for scenario in EXPECTED:
        this = found[scenario] = Seen(launch_once.cwd / "lens-runs" / scenario)
        this.watch = (
            wait_for(lambda this=this, scenario=scenario: verdict_of(this.run_dir, EXPECTED[scenario][2])) or {}
        )
        if this.watch:
            this.tool = hang.analyse(this.run_dir)
        (launch_once.cwd / f"{scenario}.end").touch()
        assert wait_for((launch_once.cwd / f"{scenario}.ended").exists), scenario
        if this.run_dir.exists():
            assert finish_dead(str(this.run_dir)) == []
            this.after = postmortem.examine(this.run_dir)
    run = started.wait()
    found["stderr"] = Seen(run.folder, stderr=run.stderr)
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
    assert found == dict.fromkeys(found, EXPECTED[scenario])


def test_it_is_said_once(seen: dict[str, Seen]) -> None:
    """One line on standard error for each hang, whichever rank comes first."""
    lines = Counter(seen["stderr"].stderr.splitlines())
    for scenario in EXPECTED:
        verdict = seen[scenario].watch["verdict"]
        assert lines[f"lens-auto: hang: {verdict}; see it with: lens-auto hang lens-runs/{scenario}"] == 1


def test_what_a_rank_writes(seen: dict[str, Seen]) -> None:
    this = seen["user_lock"]
    waiting = read_json(this.run_dir / "hang-rank0.json")
    stuck = read_json(this.run_dir / "hang-rank2.json")
    assert waiting is not None and stuck is not None
    operation = waiting["operation"]
    assert (operation["op"], operation["group"], operation["seq"]) == ("all_reduce", "0", 5)
    assert (operation["bytes"], operation["dtype"], operation["peers"]) == (16, "float32", [0, 1, 2])
    assert operation["waited_ns"] >= 1_000_000_000
    assert waiting["reason"] == "operation"
    assert waiting["process_groups"] == [{"name": "0", "init": 1, "description": "", "ranks": "0-2", "issued": 5}]
    # a rank that is in no operation cannot know that it hangs: it speaks because the others do
    assert (stuck["reason"], stuck["operation"]) == ("asked", None)
    assert (stuck["phase"]["phase"], stuck["phase"]["fetches"]) == ("forward", 3)
    assert stuck["process_groups"][0]["issued"] == 4
    (main,) = [each for each in stuck["stacks"] if each["main"]]
    assert main["frames"][0].endswith("user_lock.<locals>.here")
    assert not [each for each in stuck["stacks"] if each["name"].startswith("lens-")]
    # the same in the writer's folder, where it travels with the writer
    (writer,) = [each for each in RunDirectory(this.run_dir).writers if each.info.rank == 2]
    assert read_json(writer.folders[0] / "hang.json") == stuck


def test_hang_is_a_record_and_a_span(seen: dict[str, Seen]) -> None:
    this = seen["other_collective"]
    writers = read_run(this.run_dir)
    for writer in writers:
        (row,) = writer.of(Kind.HANG)
        assert (row.name, row.group, row.seq) == ("broadcast" if writer.rank == 2 else "all_reduce", "0", 5)
        assert row.end_ns - row.start_ns >= 1_000_000_000
    (span,) = [span for span in read_spans(this.run_dir)[0] if span.name == "lens.hang"]
    assert span.attributes["lens.hang.operation"] == "all_reduce"
    assert span.attributes["lens.hang.phase"] == "forward"
    assert span.attributes["dl.comm.group"] == "0"
    assert span.attributes["dl.comm.seq"] == 5
    assert span.attributes["dl.comm.peers"] == [0, 1, 2]
    stacks = span.attributes["lens.hang.stacks"]
    assert isinstance(stacks, list) and "all_reduce" in str(stacks[0])


def test_a_device_that_never_answers(seen: dict[str, Seen]) -> None:
    this = seen["device"]
    stuck = read_json(this.run_dir / "hang-rank2.json")
    assert stuck is not None
    assert (stuck["reason"], stuck["operation"]["op"]) == ("operation", "torch.cuda.synchronize")
    assert stuck["operation"]["kind"] == "device_wait"
    assert "in torch.cuda.synchronize at program.py" in this.watch["verdict"]


def test_how_ranks_ended(seen: dict[str, Seen]) -> None:
    after = seen["killed_peer"].after
    assert after is not None
    assert (after.first_to_fail, after.order[0]) == (2, 2)
    assert [(after.ends[rank].kind, after.ends[rank].signal) for rank in range(3)] == [("signal", "SIGKILL")] * 3
    failed = seen["exception"].after
    assert failed is not None and failed.first_to_fail == 2
    end = failed.ends[2]
    assert (end.kind, end.exception, end.message) == ("exception", "ValueError", "the loss is not finite")
    crossed = seen["other_size"].after
    assert crossed is not None
    # gloo ended one of the two that are not to blame
    assert sorted(crossed.ends[rank].signal or "" for rank in (0, 1)) in (["SIGABRT", "SIGKILL"], ["", "SIGABRT"])
    assert "in all_reduce #5 of 4,000 bytes of float32 (not 16) of group 0" in crossed.analysis.verdict


# --- runs that do not hang --------------------------------------------------------------------------------------------

HEALTHY = """
import glob, os, sys, time
import torch
import torch.distributed as dist

def main(rank):
    dist.init_process_group("gloo")
    for _ in range(4):
        time.sleep(0.8 if rank else 0)
        dist.all_reduce(torch.ones(4))
    quiet = glob.glob("lens-runs/*/hang*") == []
    time.sleep(4 if rank else 0)
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    time.sleep(1)
    sys.stdout.write(f"{rank} {quiet}\\n")
    dist.destroy_process_group()

run_ranks(main, 2)
"""


def test_slow_but_healthy_and_a_hang_that_ends(launch: Launcher) -> None:
    """Every collective takes half the limit: no alarm. One that takes longer, and then comes, is said to be over."""
    run = launch.instrumented(RUN_RANKS + HEALTHY, env={"NEMO_LENS_HANG_TIMEOUT_S": "1.6"})
    assert run.code == 0, run.stderr
    assert sorted(run.stdout.split()) == ["0", "1", "True", "True"]
    told = [line for line in run.lines if "hang" in line]
    assert len(told) == 1 and "rank 0 waits in all_reduce #5 of group 0; rank 1 never came: in user code" in told[0]
    report = read_json(run.run_dir / "hang-rank0.json")
    assert report is not None and report["over_ns"] > report["wall_ns"]
    found = hang.analyse(run.run_dir)
    assert (found.culprit, found.verdict[:7]) == (None, "no hang")
    (row,) = [row for writer in read_run(run.run_dir) for row in writer.of(Kind.HANG)]
    assert (row.name, row.seq) == ("all_reduce", 5)


# A rank that waits for another one, which comes only when the test says so.
HELD_UP = """
import os, time
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist

def main(rank):
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(8):
        parameter.sum().backward()
        while rank == 1 and step == 5 and not os.path.exists("go on"):
            time.sleep(0.05)
        dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()

run_ranks(main, 2)
"""


def test_a_hang_reaches_the_endpoint_while_it_lasts(launch: Launcher) -> None:
    """Its span comes at once, in the job's trace and with the stacks, and does not come again."""

    def hangs() -> list[dict[str, Any]]:
        return [span for span in receiver.spans() if span["name"] == "lens.hang"]

    environment = {"NEMO_LENS_HANG_TIMEOUT_S": "1.2", "NEMO_LENS_EXPORT_STRATEGY": "all_ranks"}
    with Receiver("http") as receiver:
        program = launch.program(RUN_RANKS + HELD_UP)
        started = launch.start((*INSTRUMENT, *PYTHON, program), {**environment, **receiver.environment()})
        found = wait_for(lambda: [span for span in hangs() if span["resource"]["dl.rank"] == 0], timeout_s=80)
        assert found, "no span while the ranks hang"
        (span,) = found
        assert span["attributes"]["lens.hang.operation"] == "all_reduce"
        assert span["attributes"]["dl.comm.seq"] == 6
        assert "all_reduce" in span["attributes"]["lens.hang.stacks"][0]
        (launch.cwd / "go on").touch()
        run = started.wait()
        assert run.code == 0, run.stderr
        assert [each["span_id"] for each in hangs() if each["resource"]["dl.rank"] == 0] == [span["span_id"]]
        jobs = {each["trace_id"] for each in receiver.spans() if each["name"] == "train.job"}
    assert jobs == {span["trace_id"]}


# --- a crash under torchrun -------------------------------------------------------------------------------------------

CRASH = """
import sys, time
import torch
import torch.distributed as dist

def hook(kind, value, traceback):
    sys.stderr.write(f"the user's hook saw {kind.__name__}\\n")
sys.excepthook = hook

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(6):
    parameter.sum().backward()
    dist.all_reduce(parameter.grad)
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("the loss is not finite")
    optimizer.step()
    time.sleep(0.1)
"""


def test_crash_under_torchrun(launch: Launcher) -> None:
    program = launch.program(CRASH)
    run = launch.run(*INSTRUMENT, *TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", program)
    assert run.code == 1
    assert "[rank1]: the user's hook saw ValueError" in run.lines  # (torchrun puts the rank before it)
    shown = launch.run(str(SCRIPTS / "lens-auto"), "postmortem", str(run.run_dir), "--json")
    assert shown.code == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert (found["first_to_fail"], found["culprit"]["rank"], found["culprit"]["cause"]) == (1, 1, "exception")
    assert "rank 1 failed with ValueError: the loss is not finite at program.py:17 <module>" in found["verdict"]
    other, failed = found["ranks"]
    assert (failed["end"]["kind"], failed["end"]["exit_code"], failed["iteration"]) == ("exception", 1, 3)
    # the other one met the closed connection, or the agent ended it before it did
    assert other["end"]["consequence"]
    assert other["end"]["signal"] == "SIGTERM" or other["end"]["exit_code"] == 1
    (exits,) = [read_json(path) for path in run.run_dir.glob("exits-*.json")]
    assert exits is not None and {each["rank"] for each in exits["exits"]} == {0, 1}
    text = launch.run(str(SCRIPTS / "lens-auto"), "hang", str(run.run_dir))
    assert text.code == 0 and "failed with ValueError: the loss is not finite" in text.stdout.splitlines()[0]
