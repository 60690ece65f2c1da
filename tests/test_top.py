"""`lens-auto top`: what ranks are in, read from outside while they run, hang, and after they died."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, RUN_RANKS, Launcher
from rich.console import Console
from synthetic import MS, Writer, at, train, write_run

from lens_auto.recorder.layout import Kind, Phase
from lens_auto.report.top import Look, RankNow, Watch, headline, table_of

HANGING = """
import os, time, torch, torch.distributed as dist
import torch._dynamo  # the first optimizer imports it, which takes seconds
def main(rank):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.ones(2, 4)).sum().backward()
        if rank == 1 and os.path.exists("hang"):
            time.sleep(600)
        dist.all_reduce(torch.ones(4))
        optimizer.step()
        time.sleep(0.02)
run_ranks(main, 2)
"""


def top(run_dir: Path | str, *args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "lens_auto.cli", "top", str(run_dir), "--json", "--interval", "0.3", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def started(launch: Launcher, program: str) -> Path:
    """Start two ranks; their run directory, once both are in it."""
    launch.start([*INSTRUMENT, *PYTHON, launch.program(RUN_RANKS + program)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.2)
        found = list((launch.cwd / "lens-runs").glob("*"))
        if found and len(list((found[0] / "ranks").glob("*/writer.json"))) == 2:
            return found[0]
    raise AssertionError("the ranks did not start")


def until(run_dir: Path, reached: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        look = top(run_dir)
        if reached(look["ranks"]):
            return look
        assert time.monotonic() < deadline, look


def test_a_job_that_runs_then_hangs_then_is_killed(launch: Launcher) -> None:
    run_dir = started(launch, HANGING)
    look = until(run_dir, lambda ranks: len(ranks) == 2 and all(each["iteration"] > 3 for each in ranks))
    assert (look["format"], look["version"], look["world_size"]) == ("lens-top", 1, 2)
    assert all(0 < each["iterations_per_s"] <= 50 for each in look["ranks"])
    redrawn_on_a_terminal(run_dir)

    (launch.cwd / "hang").touch()
    look = until(run_dir, lambda ranks: (ranks[0]["operation_for_ns"] or 0) > 1e9)
    waiting, absent = look["ranks"]
    assert (waiting["rank"], waiting["state"], waiting["operation"]) == (0, "running", "all_reduce")
    assert (waiting["seq"], waiting["peer"], waiting["others"]) == (waiting["steps"] + 1, None, 0)
    assert (absent["rank"], absent["operation"], absent["iteration"]) == (1, None, waiting["iteration"])
    assert [each["iterations_per_s"] for each in look["ranks"]] == [0, 0]
    later = top(run_dir)
    assert later["ranks"][0]["operation_for_ns"] > waiting["operation_for_ns"]
    assert later["ranks"][1]["phase_for_ns"] > absent["phase_for_ns"] > 1e9
    assert all(each["heartbeat_age_ns"] < 5e9 for each in later["ranks"])

    for each in later["ranks"]:
        os.kill(each["pid"], signal.SIGKILL)
    dead = until(run_dir, lambda ranks: all(each["state"] == "died" for each in ranks))
    assert [(each["rank"], each["operation"], each["iteration"]) for each in dead["ranks"]] == [
        (0, "all_reduce", waiting["iteration"]),
        (1, None, waiting["iteration"]),
    ]
    assert all(each["iterations_per_s"] is None for each in dead["ranks"])


def redrawn_on_a_terminal(run_dir: Path) -> None:
    """There it goes on until it is interrupted."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "lens_auto.cli", "top", str(run_dir), "--interval", "0.2"]
    process = subprocess.Popen(command, stdout=secondary, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
    os.close(secondary)
    seen = b""
    while seen.count(b"2 running") < 3:
        seen += os.read(primary, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    os.close(primary)


# --- what is shown ----------------------------------------------------------------------------------------------------


def died_in(phase: Phase, **slot: Any) -> Writer:
    writer = train(Writer(rank=3, world_size=8, closed=False), 5)
    writer.phase = phase
    if slot:
        writer.slots[0] = {
            "kind": Kind.COLLECTIVE,
            "name": writer.string("all_reduce"),
            "group": writer.string("dp"),
            "start_ns": at(writer.now - 1250),
            **slot,
        }
    return writer


def text_of(look: Look, most: int = 100, width: int = 200) -> list[str]:
    with open(os.devnull, "w") as nowhere:
        out = Console(record=True, width=width, file=nowhere)
        out.print(table_of(look, most))
        return out.export_text().splitlines()


def test_a_rank_that_died(tmp_path: Path) -> None:
    look = Watch(write_run(tmp_path, died_in(Phase.BACKWARD, seq=412))).look()
    (rank,) = look.ranks
    assert (rank.state, rank.phase, rank.iteration) == ("died", "backward", 9)
    assert (rank.operation, rank.group, rank.seq, rank.operation_for_ns) == ("all_reduce", "dp", 412, 1250 * MS)
    lines = text_of(look)
    assert lines[0] == "run run-1: 1 died of 8; rank 3 died"
    assert lines[2].split()[:5] == ["3", "died", "9", "-", "backward"]
    assert "all_reduce #412 on group dp  1.25 s" in lines[2]


def test_a_rank_that_closed(tmp_path: Path) -> None:
    (rank,) = Watch(write_run(tmp_path, train(Writer(), 5))).look().ranks
    assert (rank.state, rank.phase, rank.operation, rank.steps) == ("closed", None, None, 10)


def test_a_rank_that_was_started_again_is_shown_once(tmp_path: Path) -> None:
    first, second = train(Writer(closed=False), 5), train(Writer(pid=5000, nonce=7 << 40), 5)
    second.extra["started_ns"] = at(1000)
    (rank,) = Watch(write_run(tmp_path, first, second)).look().ranks
    assert (rank.pid, rank.state) == (5000, "closed")


def running(rank: int, iteration: int, phase_for_ns: int = 1_000_000, pace: float | None = 10.0) -> RankNow:
    return RankNow(
        rank=rank,
        host="a",
        pid=100 + rank,
        state="running",
        phase="backward",
        iteration=iteration,
        phase_for_ns=phase_for_ns,
        operation=None,
        group=None,
        seq=None,
        peer=None,
        operation_for_ns=None,
        others=0,
        iterations_per_s=pace,
        steps=0,
        records=0,
        dropped=0,
        heartbeat_age_ns=0,
    )


@pytest.mark.parametrize(
    ("iterations", "said"),
    [([7, 7, 7], "iteration 7; 10.0 iterations/s"), ([7, 8, 7], "iterations 7 to 8; 10.0 iterations/s")],
)
def test_headline(iterations: list[int], said: str) -> None:
    look = Look("d", "r", "now", 3, [running(rank, number) for rank, number in enumerate(iterations)], [])
    assert headline(look) == f"run r: 3 running of 3; {said}"


def test_many_ranks_show_those_that_are_behind(tmp_path: Path) -> None:
    ranks = [running(rank, 90 if rank == 77 else 100) for rank in range(100)]
    look = Look("d", "r", "now", 100, ranks, [])
    assert "iterations 90 to 100; rank 77 behind" in headline(look)
    lines = text_of(look, 10)
    assert lines[2].split()[0] == "77"
    assert lines[-1] == "90 more ranks"


@pytest.mark.parametrize(
    ("width", "last"), [(140, "process"), (105, "sign of life"), (92, "for")], ids=["wide", "less wide", "narrow"]
)
def test_a_narrow_terminal_has_less_columns(width: int, last: str) -> None:
    rank = dataclasses.replace(running(0, 1_000, 2_000_000_000), operation="all_reduce", group="tensor", seq=123_456)
    lines = text_of(Look("d", "r", "now", 1, [rank], []), width=width)
    assert lines[1].rstrip().endswith(last)
    assert "all_reduce #123456 on group tensor" in lines[2]
    assert len(lines) == 3


def test_no_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lens_auto.cli", "top", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lens-auto: ")
    assert done.stderr.count("\n") == 1
