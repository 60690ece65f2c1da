"""Signals in every phase: the program ends as it would without us, and what was recorded before is there."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, Launcher, Run
from records import Writer, read_run
from typer.testing import CliRunner

from lens_auto.cli import app
from lens_auto.recorder.layout import Kind, Phase

PHASES = {
    "data_loading": Phase.DATA_LOADING,
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
    "checkpoint": Phase.CHECKPOINT,
    "collective": Phase.FORWARD,
}
FAST = ("backward", "collective")  # the other phases: `make compat`
WAYS = ("SIGTERM", "SIGTERM handled", "SIGINT", "SIGKILL", "SIGSTOP")
STEPS = 3
SLOWER_S = 5.0

# Children of multiprocessing, each one rank; each says when it is in its phase, where it sleeps until its signal comes.
PROGRAM = """
import json, multiprocessing, os, signal, sys, time
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

PHASES, WAYS, STEPS = json.loads(sys.argv[1])

def stay(place, here):
    place.ready.send(here)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not place.go_on:
        time.sleep(0.01)

class Place:
    go_on = False

class Batches(Dataset):
    def __init__(self, place):
        self.place = place
    def __len__(self):
        return 5
    def __getitem__(self, index):
        if index == STEPS and self.place.phase == "data_loading":
            stay(self.place, "data_loading")
        return torch.ones(2)

class Layer(torch.autograd.Function):
    place = None
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        if Layer.place.step == STEPS and Layer.place.phase == "backward":
            stay(Layer.place, "backward")
        return gradient * 2

class Slow:
    def __init__(self, place):
        self.place = place
    def __reduce__(self):
        stay(self.place, "checkpoint")
        return int, ()

def handler(number, frame):
    print("handled", number, flush=True)
    sys.exit(5)

def rank_main(number, phase, way, ready, go):
    sys.stdout = open(f"{number}.out", "w")
    sys.stderr = open(f"{number}.err", "w")
    os.dup2(sys.stderr.fileno(), 2)
    os.environ.update(RANK=str(number), WORLD_SIZE="1", LOCAL_RANK=str(number))
    if way == "SIGTERM handled":
        signal.signal(signal.SIGTERM, handler)
    place = Layer.place = Place()
    place.phase, place.ready, place.step = phase, ready, 0
    if way == "SIGSTOP":  # it goes on after SIGCONT
        signal.signal(signal.SIGUSR1, lambda *_: setattr(place, "go_on", True))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    def closure():
        if place.step == STEPS and phase == "optimizer":
            stay(place, "optimizer")
    if phase == "collective":  # it waits for a message that comes when its peer is asked
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{number}.store", rank=0, world_size=2)
    for batch in DataLoader(Batches(place), batch_size=None):
        if place.step == STEPS and phase == "forward":
            stay(place, "forward")
        loss = Layer.apply(parameter * batch).sum()
        if place.step == STEPS and phase == "collective":
            ready.send("collective")
            dist.recv(torch.zeros(1), 1)
        loss.backward()
        optimizer.step(closure)
        place.step += 1
        if place.step == STEPS + 1 and phase == "checkpoint":
            torch.save(Slow(place), f"{number}.pt")
    print("trained", [value.hex() for value in parameter.tolist()], flush=True)
    sys.exit(7)

def peer_main(number, go):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{number}.store", rank=1, world_size=2)
    go.recv()
    dist.send(torch.zeros(1), 0)
    os._exit(0)

def run(number, phase, way):
    here, there = multiprocessing.Pipe()
    child = multiprocessing.Process(target=rank_main, args=(number, phase, way, there, None))
    child.start()
    peer = None
    if phase == "collective":
        go, wait = multiprocessing.Pipe()
        peer = os.fork()
        if peer == 0:
            os.environ["NEMO_LENS_DISABLED"] = "1"
            peer_main(number, wait)
    return number, phase, way, here, child, peer, go if peer else None

def end(number, phase, way, here, child, peer, go):
    if not here.poll(30):
        return {"number": number, "way": way, "phase": phase, "late": True}
    said = here.recv()
    time.sleep(0.4)  # the live page and the housekeeper are up to date
    signalled = time.monotonic()
    os.kill(child.pid, getattr(signal, way.split()[0]))
    if way == "SIGSTOP":
        time.sleep(0.3)
        stopped = open(f"/proc/{child.pid}/stat").read().rsplit(")", 1)[1].split()[0] == "T"
        os.kill(child.pid, signal.SIGCONT)
        os.kill(child.pid, signal.SIGUSR1)
        signalled = time.monotonic()
    if go:  # in a receive Python's handlers run only once it has returned
        go.send(1)
    child.join(20)
    code, took = child.exitcode, time.monotonic() - signalled
    if child.is_alive():
        child.kill()
    if peer:
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)
    return {"number": number, "phase": phase, "way": way, "said": said, "code": code, "took": took,
            "out": open(f"{number}.out").read(), "err": open(f"{number}.err").read().splitlines()[-1:]}

found = []
todo = [(phase, way) for phase in PHASES for way in WAYS]
for first in range(0, len(todo), 5):
    started = [run(first + i, *each) for i, each in enumerate(todo[first : first + 5])]
    found += [end(*each) for each in started]
print(json.dumps(found))
"""


@dataclass
class Ended:
    """How the children of a bare and of an instrumented run ended."""

    bare: list[Any]
    lens: list[Any]
    run: Run


@pytest.fixture(scope="module", params=[FAST, pytest.param(tuple(PHASES), marks=pytest.mark.slow)], ids=["few", "all"])
def ended(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Ended:
    """What the children of a bare and of an instrumented run did."""
    found: list[list[Any]] = []
    for kind, before in (("bare", ()), ("lens", INSTRUMENT)):
        launcher = Launcher(tmp_path_factory.mktemp(kind))
        arguments = json.dumps([request.param, WAYS, STEPS])
        env = {"NEMO_LENS_RUN_ID": "signals", "NEMO_LENS_QUIET": "1"}
        run = launcher.run(*before, *PYTHON, launcher.program(PROGRAM), arguments, env=env, timeout_s=280)
        launcher.close()
        assert run.code == 0, run.stderr
        assert run.lines == []
        found.append(json.loads(run.stdout))
    return Ended(found[0], found[1], run)


@pytest.mark.timeout(600)
def test_ends_as_without_us(ended: Ended) -> None:
    bare, lens = ended.bare, ended.lens
    assert len(bare) == len(lens) >= len(FAST) * len(WAYS)
    for before, now in zip(bare, lens, strict=True):
        assert before["said"] == before["phase"], before
        took, took_bare = now.pop("took"), before.pop("took")
        assert took < took_bare + SLOWER_S, (took, before)
        assert now == before
    codes = {way: {each["code"] for each in lens if each["way"] == way} for way in WAYS}
    assert codes == {
        "SIGTERM": {-15},
        "SIGTERM handled": {5},
        "SIGINT": {1},
        "SIGKILL": {-9},
        "SIGSTOP": {7},
    }
    assert all(each["out"].startswith("trained") for each in lens if each["way"] == "SIGSTOP")
    assert all(each["out"] == "handled 15\n" for each in lens if each["way"] == "SIGTERM handled")


def numbered(writer: Writer) -> int:
    """Which child it was."""
    return int(writer.info["resource"].get("dl.local_rank", writer.rank))


def test_everything_recorded_before_is_there(ended: Ended) -> None:
    lens, run = ended.lens, ended.run
    writers: dict[int, Writer] = {}
    for writer in read_run(run.run_dir):
        writers[numbered(writer)] = writer
    assert run.spooled == []
    for each in lens:
        writer = writers[each["number"]]
        done = writer.of(Kind.OPTIMIZER_STEP)
        whole = [row for row in done if row.end_ns > 0]
        expected = STEPS + (each["phase"] == "checkpoint")
        if each["way"] == "SIGSTOP":
            assert len(whole) == 5, (each, writer)
        else:
            assert len(whole) in (expected, expected + 1), (each, writer)
            assert len(writer.of(Kind.FETCH)) >= expected - 1  # the first comes before the process is a rank
        exit_file = run.run_dir / "ranks" / str(writer.info["writer"]) / "exit.json"
        if each["code"] < 0:
            assert json.loads(exit_file.read_text())["signal"] == each["way"].split()[0], each
            live = writer.files.live
            assert live is not None and live.phase is not None
            assert live.phase.phase == PHASES[each["phase"]], each


def test_the_report_says_who_was_killed(ended: Ended, tmp_path: Path) -> None:
    """Of the ranks of one number, which the children of `collective` all are, the newest counts: this one alone."""
    (killed,) = [each for each in ended.lens if each["way"] == "SIGKILL" and each["phase"] == "collective"]
    (writer,) = [writer for writer in read_run(ended.run.run_dir) if numbered(writer) == killed["number"]]
    shutil.copy(ended.run.run_dir / "manifest.json", tmp_path)
    shutil.copytree(ended.run.run_dir / "ranks" / str(writer.info["writer"]), tmp_path / "ranks" / "killed")
    result = CliRunner().invoke(app, ["postmortem", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    (rank,) = [each for each in found["ranks"] if each["state"] == "died"]
    assert (found["first_to_fail"], rank["end"]["signal"]) == (rank["rank"], "SIGKILL")
    (operation,) = rank["in_flight"]
    assert operation["op"] == "recv"
    assert operation["since"] < rank["end"]["at"]
