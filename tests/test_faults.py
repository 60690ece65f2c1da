"""A fault of ours never reaches the program: each function of ours fails, one at a time, in programs that run for real.

`fault_cases.py` finds out itself which functions the hooks call, so that new ones are among them. What is left out is
the hooks themselves, and what else others than we call (`entries`): there the guard is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from launch import CLOSING, INSTRUMENT, PYTHON, RUN_RANKS, SCRIPTS, Launcher, Run
from records import read_run

from lens_auto.recorder.layout import Kind

PROGRAM = Path(__file__).with_name("fault_cases.py")
ALL = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_QUIET": "1"}
SLOWER_S = 20.0
# Of life and death of a rank, what the program's own thread does. All others are made to fail by `make compat`.
OF_A_LIFE = (
    "lens_auto.runtime._make_recorder",
    "lens_auto.runtime.initialized",
    "lens_auto.runtime._finish",
    "lens_auto.recorder.housekeeper.Housekeeper.close",
    "lens_auto.iteration.agreement.Agreement.step",
)
# Called by others than us: hooks, callbacks of torch and of weak references.
ENTRIES = re.compile(
    r"instrumentors\.\w+\.\w+\.<locals>\.hook$|instrumentors\.optimizer\._StepHooks\.(before|after)$"
    r"|instrumentors\._comm\._gone$|instrumentors\.ddp\._Reducer\.flush$"
)
_TORCHS_OWN = re.compile(
    r"(\[rank\d+\]:)?\[?[WIE]\d{4} |Exception raised from |frame #\d+: |<omitting python frames>|\s*$"
)


def said(lines: str) -> list[str]:
    """What is not torch's own."""
    return [line for line in lines.splitlines() if not _TORCHS_OWN.match(line)]


def run_both(launch: Launcher, how: str, timeout_s: float = 240) -> tuple[list[Any], list[Any]]:
    """What the two ranks say bare, and with faults."""
    found = []
    for mode in ("bare", how):
        run = launch.run(*PYTHON, str(PROGRAM), str(launch.folder), mode, env=ALL, timeout_s=timeout_s)
        found.append([json.loads((launch.folder / f"{rank}.json").read_text()) for rank in (0, 1)])
        assert (run.code, run.stdout, run.stderr) == (0, "", ""), (run, found[-1][0]["problems"])
    return found[0], found[1]


def check_hooks(bare: list[Any], ranks: list[Any], at_least: int, off_at_least: int) -> None:
    for before, now in zip(bare, ranks, strict=True):
        assert now["problems"] == []
        assert now["expected"] == before["expected"]
        assert now["before"] == ""
        for fault, lines in now["lines"].items():
            ours = said(lines)
            assert len(ours) <= 1, (fault, ours)
            assert all(line.startswith("lens-auto: ") for line in ours), (fault, ours)
            assert bool(ours) == bool(now["off"][fault]), (fault, ours, now["off"][fault])
    assert [name for name in ranks[0]["entries"] if not ENTRIES.match(name)] == []
    faults = ranks[0]["struck"]
    assert len(faults) > at_least
    assert [fault for fault in faults if not faults[fault] + ranks[1]["struck"][fault]] == []
    off = {fault for fault in faults if ranks[0]["off"][fault]}
    # A sleep is no failure; most others are, and often enough within one iteration.
    assert not [fault for fault in off if fault.endswith(":sleep")]
    assert len(off) > off_at_least


@pytest.mark.timeout(300)
def test_any_function_that_a_hook_calls(launch: Launcher) -> None:
    """It raises; what else it may do: below."""
    check_hooks(*run_both(launch, "each"), at_least=100, off_at_least=50)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_function_in_all_hooks(launch: Launcher) -> None:
    check_hooks(*run_both(launch, "wide", 800), at_least=300, off_at_least=120)


def check_lives(launch: Launcher, modes: tuple[str, ...], only: tuple[str, ...], timeout_s: float) -> int:
    """Let functions fail in whole lives of ranks; returns how many."""
    known = [] if only else [fault.rsplit(":", 1)[0] for fault in run_both(launch, "each")[1][0]["struck"]]
    plan = launch.folder / "plan.json"
    plan.write_text(json.dumps({"known": sorted(set(known)), "only": only}))
    run = launch.run(
        *(*PYTHON, str(PROGRAM), str(launch.folder), "life", str(plan), *modes), env=ALL, timeout_s=timeout_s
    )
    assert run.code == 0, run.stderr
    bare, *others = [json.loads(line) for line in run.stdout.splitlines()]
    assert bare["codes"] == [0, 0]
    for life in others:
        assert life["codes"] == [0, 0], life
        assert [rank["numbers"] for rank in life["ranks"]] == [rank["numbers"] for rank in bare["ranks"]], life
        assert life["seconds"] < bare["seconds"] + SLOWER_S, life
        for lines in life["lines"]:
            ours = said(lines)
            assert len(ours) <= 1 and all(line.startswith("lens-auto: ") for line in ours), life
    assert all(any(rank["struck"] for rank in life["ranks"]) for life in others if only)
    return len(others)


@pytest.mark.slow
def test_a_function_of_a_ranks_life(launch: Launcher) -> None:
    assert check_lives(launch, ("raise",), OF_A_LIFE, 100) == len(OF_A_LIFE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_function_of_a_ranks_life(launch: Launcher) -> None:
    assert check_lives(launch, ("raise", "garbage"), (), 3400) > 200


# --- as a user sees it ------------------------------------------------------------------------------------------------

TRAIN = (
    RUN_RANKS
    + """
import torch
import torch.distributed as dist

def main(rank):
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.ones(2) + rank)
    for _ in range(5):
        parameter.square().sum().backward()
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.1 * parameter.grad
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} {[value.hex() for value in parameter.tolist()]}\\n")
    sys.exit(3)

run_ranks(main, 2)
"""
)


def train(launch: Launcher, fault: str = "") -> Run:
    return launch.instrumented(TRAIN, env={"NEMO_LENS_FAULT": fault or None, "NEMO_LENS_SPAN_GROUPS": "all"})


def test_a_hook_that_fails_is_off_and_the_report_says_so(launch: Launcher) -> None:
    bare = launch.run(*PYTHON, launch.program(TRAIN))
    run = train(launch, "instrumentors._comm.payload:raise")
    assert (run.code, sorted(run.stdout.splitlines())) == (3, sorted(bare.stdout.splitlines()))
    reason = "Fault: put in by a test"
    line = (
        f"lens-auto: hook torch.distributed.all_reduce failed 3 times ({reason}) and is off now; the training program"
        " is not affected, `lens-auto report` names what else is off"
    )
    # One on each rank, and where the records are.
    assert sorted(run.lines) == sorted([line, line, f"{CLOSING}lens-runs/{run.run_dir.name}"])
    for writer in read_run(run.run_dir):
        assert writer.info["hooks_off"] == {"torch.distributed.all_reduce": reason}
        assert writer.info["hook_faults"] == 3
        assert len(writer.of(Kind.BACKWARD)) == 5  # all else is recorded
    report = launch.run(str(SCRIPTS / "lens-auto"), "report", str(run.run_dir), env={"COLUMNS": "200"})
    assert report.code == 0
    assert re.search(rf"torch\.distributed\.all_reduce.*{re.escape(reason)}", report.stdout), report.stdout


@pytest.mark.parametrize("fault", ["lens_auto.runtime.configure:raise", "lens_auto.settings.Settings.from_env:garbage"])
def test_a_fault_at_interpreter_start(launch: Launcher, fault: str) -> None:
    """Nothing is recorded; the program does not notice."""
    trains = "import torch; torch.nn.Parameter(torch.ones(1)).sum().backward();" if "configure" in fault else ""
    program = launch.program(f"import sys; {trains} sys.exit(4)")
    run = launch.run(*INSTRUMENT, *PYTHON, program, env={"NEMO_LENS_FAULT": fault})
    assert (run.code, run.stdout) == (4, "")
    assert len(run.lines) == 1, run.stderr
    assert run.lines[0].startswith("lens-auto: ")
    assert run.run_dirs == []


def test_the_programs_own_handler_may_raise_anywhere(launch: Launcher) -> None:
    """An exception that its signal handler raises while code of ours runs is its own, and reaches it."""
    source = """
    import os, signal
    import torch
    from lens_auto.recorder.recorder import Recorder

    class Late(Exception):
        pass

    def handler(number, frame):
        raise Late

    signal.signal(signal.SIGUSR1, handler)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    bare = Recorder.phase
    def phase(self, *args):
        signal.raise_signal(signal.SIGUSR1)  # now, in the middle of a hook
        return bare(self, *args)
    Recorder.phase = phase
    for _ in range(5):
        try:
            parameter.sum().backward()
        except Late:
            print("late")
    """
    run = launch.instrumented(source)
    assert (run.code, run.stdout) == (0, "late\n" * 5), run.stderr
    (writer,) = read_run(run.run_dir)
    assert (writer.info["hooks_off"], writer.info["hook_faults"]) == ({}, 0)
