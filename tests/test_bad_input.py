"""Bad input costs one clear line: the value, what is valid, what happens now. The job runs on, with its own status."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import CLOSING, RUN_RANKS, Launcher, Run
from records import read_run

from lens_auto.groups import TrainingSpanGroup
from lens_auto.recorder.layout import Kind

BACKWARDS = 3
# The exit status is the program's own whatever happens to us.
TRAIN = f"""
import sys
import torch
parameter = torch.nn.Parameter(torch.ones(2))
for _ in range({BACKWARDS}):
    parameter.sum().backward()
print("trained")
sys.exit(7)
"""


def check_job(run: Run) -> None:
    """The job itself went as if we were not there."""
    assert (run.code, run.stdout) == (7, "trained\n"), run.stderr
    assert run.survivors == []


# --- settings ---------------------------------------------------------------------------------------------------------


def test_unknown_group_and_boolean(launch: Launcher) -> None:
    bad = {"NEMO_LENS_SPAN_GROUPS": "default,comunication", "NEMO_LENS_DISABLED": "maybe"}
    run = launch.instrumented(TRAIN, env=bad)
    check_job(run)
    assert len(run.lines) == 3, run.stderr
    boolean = next(line for line in run.lines if "NEMO_LENS_DISABLED" in line)
    assert boolean == (
        "lens-auto: NEMO_LENS_DISABLED='maybe' is not valid: expected 1/0, true/false, yes/no or on/off; it is ignored"
    )
    groups = next(line for line in run.lines if "NEMO_LENS_SPAN_GROUPS" in line)
    assert groups.startswith("lens-auto: NEMO_LENS_SPAN_GROUPS='default,comunication' is not valid: ")
    assert "'comunication'" in groups
    for valid in ("default", "per_step", "per_rollout", "all", *TrainingSpanGroup.ALL_GROUPS):
        assert valid in groups
    assert groups.endswith("; using the default, per_step")
    assert run.lines[2] == f"{CLOSING}lens-runs/{run.run_dir.name}"
    (writer,) = read_run(run.run_dir)
    assert set(writer.info["groups"]) == TrainingSpanGroup.resolve("per_step")


def test_bad_values_are_told_once_for_all_processes(launch: Launcher) -> None:
    """A launcher and its children read the same environment; one line is enough."""
    source = "import subprocess, sys; [subprocess.run([sys.executable, '-c', '']) for _ in range(2)]"
    run = launch.instrumented(source, env={"NEMO_LENS_QUIET": "perhaps"})
    assert run.code == 0
    assert run.lines == [
        "lens-auto: NEMO_LENS_QUIET='perhaps' is not valid: expected 1/0, true/false, yes/no or on/off;"
        " the line at the end of a run is printed"
    ]


# --- the run directory ------------------------------------------------------------------------------------------------


def check_records_stay_in_spool(run: Run, wanted: Path) -> None:
    """One line on the run directory, one that says where the records are; all of them are there."""
    check_job(run)
    assert len(run.lines) == 2, run.stderr
    told, closing = run.lines
    assert told.startswith("lens-auto: ")
    assert repr(str(wanted)) in told
    assert "NEMO_LENS_RUN_DIR" in told
    assert "the training program is not affected" in told
    (place,) = {path.parents[2] for path in run.spooled if path.name == "writer.json"}
    assert repr(str(place)) in told
    assert closing.removeprefix(CLOSING) == str(place)
    (writer,) = read_run(place)
    assert len(writer.of(Kind.BACKWARD)) == BACKWARDS
    assert run.run_dirs == []


@pytest.mark.slow
def test_run_directory_below_a_file(launch: Launcher) -> None:
    (launch.cwd / "file").write_text("not a folder")
    wanted = launch.cwd / "file" / "run"
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_RUN_DIR": str(wanted)})
    check_records_stay_in_spool(run, wanted)


def test_run_directory_of_another_run(launch: Launcher) -> None:
    """Two runs are never merged: the second gets a suffix."""
    train = textwrap.indent(TRAIN.replace("sys.exit(7)", ""), "    ")
    runs = 'for run_id in ("a", "b"):\n    os.environ["NEMO_LENS_RUN_ID"] = run_id\n    run_ranks(main, 1)\n'
    source = f"{RUN_RANKS}import torch\ndef main(rank):\n{train}\n{runs}"
    run = launch.instrumented(source, env={"NEMO_LENS_RUN_DIR": "same"})
    assert run.code == 0, run.stderr
    assert run.lines == [f"{CLOSING}same", f"{CLOSING}same-2"]
    for run_id, expected in (("a", "same"), ("b", "same-2")):
        (writer,) = read_run(launch.cwd / expected)
        assert writer.info["run_dir"] == str(launch.cwd / expected)
        assert writer.info["run_id"] == run_id
    assert run.spooled == []


# --- file systems without room ----------------------------------------------------------------------------------------


@pytest.fixture
def mount(launch: Launcher) -> Iterator[Callable[[str], Path]]:
    """Mounts memory file systems in the test's folder, and takes them down after it."""
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        place = launch.folder / f"mounted-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, timeout=10
        )
        if done.returncode != 0:
            pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount_tmpfs
    launch.close()
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=10)


def test_read_only_run_directory(launch: Launcher, mount: Callable[[str], Path]) -> None:
    wanted = mount("size=1m,ro") / "run"
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_RUN_DIR": str(wanted)})
    check_records_stay_in_spool(run, wanted)


def test_no_room_in_the_run_directory(launch: Launcher, mount: Callable[[str], Path]) -> None:
    """Names and manifest still fit, records do not."""
    wanted = mount("size=4m") / "run"
    (wanted.parent / "ballast").write_bytes(bytes((4 << 20) - 5 * 4096))
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_RUN_DIR": str(wanted)})
    check_job(run)
    assert len(run.lines) == 2, run.stderr
    told = f"lens-auto: the run directory {str(wanted)!r} takes no more (No space left on device)"
    assert run.lines[0].startswith(told)
    place = Path(run.lines[1].removeprefix(CLOSING))
    (writer,) = read_run(place)
    assert len(writer.of(Kind.BACKWARD)) == BACKWARDS


def test_spool_below_a_file(launch: Launcher) -> None:
    (launch.cwd / "file").write_text("not a folder")
    wanted = str(launch.cwd / "file" / "spool")
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_SPOOL_DIR": wanted})
    check_job(run)
    told, closing = run.lines
    assert told.startswith("lens-auto: NEMO_LENS_SPOOL_DIR")
    assert repr(wanted) in told
    assert "is used instead" in told
    assert closing == f"{CLOSING}lens-runs/{run.run_dir.name}"
    (writer,) = read_run(run.run_dir)
    assert len(writer.of(Kind.BACKWARD)) == BACKWARDS
    assert writer.info["spool_dir"] in told  # where it went
    assert not Path(writer.info["spool_dir"]).exists()


def check_nothing_fits(run: Run) -> None:
    check_job(run)
    told = [line for line in run.lines if not line.startswith(CLOSING)]
    assert len(told) == 1, run.stderr
    assert told[0].startswith("lens-auto: no room for records in ")
    assert "NEMO_LENS_SPOOL_DIR" in told[0]
    assert "No space left on device" in told[0]


def test_full_spool(launch: Launcher, mount: Callable[[str], Path]) -> None:
    """Not even the live page fits: touching a mapped page of such a file would end the process with SIGBUS."""
    place = mount("size=1m")
    ballast = place / "ballast"
    with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_SPOOL_DIR": str(place)})
    check_job(run)
    told = [line for line in run.lines if not line.startswith(CLOSING)]
    assert len(told) == 1, run.stderr
    assert str(place) in told[0]


def test_spool_without_room_for_a_segment(launch: Launcher, mount: Callable[[str], Path]) -> None:
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_SPOOL_DIR": str(mount("size=1m"))})
    check_nothing_fits(run)
    (writer,) = read_run(run.run_dir)
    assert writer.rows == []
    assert writer.info["dropped"] == BACKWARDS


def test_spool_that_fills_up(launch: Launcher, mount: Callable[[str], Path]) -> None:
    """The first segment fits, the second does not: what is lost is counted, and no signal ends the job."""
    source = """
    import sys
    import torch
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    parameter.grad = None  # a step of nothing: two records in a few microseconds
    for _ in range(20_000):
        optimizer.step()
    print("trained")
    sys.exit(7)
    """
    run = launch.instrumented(textwrap.dedent(source), env={"NEMO_LENS_SPOOL_DIR": str(mount("size=6m"))})
    check_nothing_fits(run)
    (writer,) = read_run(run.run_dir)
    assert len(writer.rows) >= 32_768
    assert writer.info["dropped"] > 0
    assert len(writer.rows) + writer.info["dropped"] == 1 + 2 * 20_000
    assert {row.kind for row in writer.rows} == {Kind.BACKWARD, Kind.OPTIMIZER_STEP, Kind.BOUNDARY}
