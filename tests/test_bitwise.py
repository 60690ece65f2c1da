"""Losses, weights and random generators are the same to the last bit, whatever is recorded; see `bitwise_cases.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, Launcher
from records import read_run

PROGRAM = Path(__file__).with_name("bitwise_cases.py")
ITERATIONS = 20
FAST = ("ddp", "fsdp2", "tensor_parallel", "pipelining", "mixed_precision")
QUIET = {"NEMO_LENS_QUIET": "1"}


def run(launch: Launcher, modes: str, cases: Sequence[str], timeout_s: float, *before: str, groups: str = "") -> None:
    arguments = (str(PROGRAM), str(launch.folder), str(ITERATIONS), modes, *cases)
    env = {**QUIET, "NEMO_LENS_RUN_DIR": str(launch.folder / f"{groups}.run"), "NEMO_LENS_SPAN_GROUPS": groups or None}
    ended = launch.run(*before, *PYTHON, *arguments, env=env, timeout_s=timeout_s)
    assert (ended.code, ended.stdout, ended.lines) == (0, "", []), ended.stderr


def said(launch: Launcher, mode: str) -> list[dict[str, Any]]:
    return [json.loads((launch.folder / f"{mode}.{rank}.json").read_text()) for rank in (0, 1)]


def check(launch: Launcher, mode: str, groups: str) -> None:
    for rank, (bare, now) in enumerate(zip(said(launch, "bare"), said(launch, mode), strict=True)):
        for case in bare:
            assert len(bare[case]["losses"]) == ITERATIONS
            assert bare[case]["losses"][0] != bare[case]["losses"][-1]
            assert now[case] == bare[case], (mode, rank, case)
    writers = read_run(launch.folder / f"{groups}.run")
    assert [writer.rank for writer in writers] == [0, 1]
    for writer in writers:
        assert (writer.info["hooks_off"], writer.info["hook_faults"], writer.info["dropped"]) == ({}, 0, 0)
        assert len(writer.iterations) >= ITERATIONS * len(said(launch, "bare")[0]) - 1


@pytest.mark.timeout(240)
def test_same_to_the_last_bit(launch: Launcher) -> None:
    run(launch, "bare,default,all", FAST, 220)
    for mode in ("default", "all"):
        check(launch, mode, mode)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_cases_same_to_the_last_bit(launch: Launcher) -> None:
    """From the interpreter's start, as a user does it."""
    run(launch, "bare", (), 500)
    for groups in ("default", "all"):
        run(launch, "given", (), 500, *INSTRUMENT, groups=groups)
        check(launch, "given", groups)
