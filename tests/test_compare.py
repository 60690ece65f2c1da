"""`lens-auto compare`: what changed between two runs, and what is only noise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulate import Job, on

from lens_auto.recorder.read import RunDirectory
from lens_auto.report.compare import COMMUNICATION, LATE, Comparison, TooShort, compare
from lens_auto.report.load import load

MS = 1_000_000


def side(run_dir: Path) -> tuple[str, str, Any]:
    run = RunDirectory(run_dir)
    return run.run_id, str(run_dir), load(run)


def compared(tmp_path: Path, a: Job, b: Job) -> Comparison:
    return compare(side(a.write(tmp_path / "a")), side(b.write(tmp_path / "b")))


def changed(found: Comparison) -> dict[str, float]:
    return {each.part: round(each.change_ns / MS, 1) for each in found.parts if each.significant}


def test_the_same_program_twice(tmp_path: Path) -> None:
    found = compared(tmp_path, Job(seed=1, noise=0.2), Job(seed=2, noise=0.2))
    assert not found.significant
    assert found.interval[0] < 0 < found.interval[1]
    assert found.verdict.startswith("no more than noise: an iteration went from ")
    assert changed(found) == {}


@pytest.mark.parametrize(("phase", "part"), [("data", "data_loading"), ("optimizer", "optimizer")])
def test_a_phase_that_became_slower_everywhere(tmp_path: Path, phase: str, part: str) -> None:
    found = compared(tmp_path, Job(seed=1), Job(seed=2, extra={phase: on(None, 5)}))
    assert found.significant
    assert found.change == pytest.approx(5 / 27, abs=0.02)
    assert list(changed(found)) == [part]
    assert changed(found)[part] == pytest.approx(5, abs=0.3)
    assert found.verdict.startswith(f"b is {found.change:.0%} slower than a: an iteration went from 2")
    assert f"; {part} +" in found.verdict


def test_a_rank_that_became_slower(tmp_path: Path) -> None:
    found = compared(tmp_path, Job(seed=1), Job(seed=2, extra={"forward": on({2}, 8)}))
    assert list(changed(found)) == [LATE]
    assert changed(found)[LATE] == pytest.approx(7.5, abs=0.6)  # a little lateness was there before
    assert [each.part for each in found.by_rank] == ["forward on rank 2"]
    assert "; above all forward on rank 2 (8." in found.verdict
    assert found.b.findings[0].startswith("rank 2 holds the others back: forward ")


def test_faster(tmp_path: Path) -> None:
    found = compared(tmp_path, Job(seed=1, communication=9), Job(seed=2, communication=1))
    assert found.change == pytest.approx(-8 / 35, abs=0.02)
    assert found.verdict.startswith("b is 2")
    assert "% faster than a: an iteration went from 3" in found.verdict
    assert changed(found) == {COMMUNICATION: -8.0}


def test_checkpoints_are_no_part_of_an_iteration(tmp_path: Path) -> None:
    found = compared(tmp_path, Job(seed=1), Job(seed=2, extra={"checkpoint": on({0}, 100, every=5)}))
    assert not found.significant


def test_parts_add_up(tmp_path: Path) -> None:
    found = compared(tmp_path, Job(seed=1, noise=0.3), Job(seed=2, noise=0.3, visible=2))
    for run, name in ((found.a, "a_ns"), (found.b, "b_ns")):
        assert sum(getattr(each, name) for each in found.parts) == pytest.approx(run.iteration_ns, rel=0.01)


def test_different_numbers_of_ranks(tmp_path: Path) -> None:
    found = compared(tmp_path, Job(seed=1, ranks=2), Job(seed=2, ranks=4, extra={"data": on(None, 5)}))
    assert (found.a.ranks, found.b.ranks, found.by_rank) == (2, 4, [])
    assert found.notes == ["a has 2 ranks, b has 4: ranks are not compared one by one"]
    assert "data_loading" in changed(found)


def test_single_processes(tmp_path: Path) -> None:
    alone = {"ranks": 1, "wrapper": "", "reducer": False}
    found = compared(tmp_path, Job(seed=1, **alone), Job(seed=2, extra={"forward": on(None, 5)}, **alone))  # type: ignore[arg-type]
    assert list(changed(found)) == ["forward"]


def test_too_few_iterations(tmp_path: Path) -> None:
    with pytest.raises(TooShort, match=r"4 iterations to compare; at least 10 are needed; nothing is compared"):
        compared(tmp_path, Job(), Job(iterations=5))


def test_the_command(tmp_path: Path) -> None:
    a = Job(seed=1).write(tmp_path / "a")
    b = Job(seed=2, extra={"data": on({1}, 10)}).write(tmp_path / "b")

    def command(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lens_auto.cli", "compare", *args], capture_output=True, text=True, check=False
        )

    done = command(str(a), str(b))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("b is ")
    assert "waiting for the slowest rank +" in lines[0]
    assert lines[1].startswith(f"a: run run-1 in {a}, 59 iterations on 4 ranks compared")
    found = json.loads(command(str(a), str(b), "--json").stdout)
    assert (found["format"], found["version"], found["significant"]) == ("lens-compare", 1, True)
    assert found["verdict"] == lines[0]
    done = command(str(a), str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
