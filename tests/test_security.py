"""What others may see and plant: modes of files, links, other users' spools, secrets, damaged files."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import CLOSING, INSTRUMENT, PYTHON, Launcher, free_port
from records import read_run
from synthetic import Writer, train, write_run
from typer.testing import CliRunner

from lens_auto.cli import app
from lens_auto.recorder import finish, spool
from lens_auto.recorder.layout import SEGMENT_SUFFIX, Kind

TRAIN = """
import os, sys
import torch
parameter = torch.nn.Parameter(torch.ones(2))
for _ in range(3):
    parameter.sum().backward()
"""


def modes(folder: Path) -> set[tuple[str, int]]:
    """Kind and mode of all that is in a folder, and of the folder."""
    found = set()
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        kind = "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"
        found.add((kind, stat.S_IMODE(mode)))
    return found


def test_only_the_user_can_look_in(launch: Launcher) -> None:
    """Also with a umask that would let all: while it runs (the spool), and afterwards (the run directory)."""
    source = f"""
import os
os.umask(0)
{TRAIN}
from opentelemetry import trace
trace.get_tracer("own").start_span("own").end()
import shutil, time
time.sleep(0.6)  # the housekeeper has been everywhere
shutil.copytree(os.environ["NEMO_LENS_SPOOL_DIR"] + f"/lens-auto-{{os.getuid()}}", "seen")
"""
    run = launch.instrumented(source).check()
    assert modes(launch.cwd / "seen") == {("folder", 0o700), ("file", 0o600)}
    assert modes(run.run_dir) == {("folder", 0o700), ("file", 0o600)}
    names = {path.name for path in run.run_dir.rglob("*")}
    assert {"manifest.json", "writer.json", "spans.jsonl"} <= names


def test_links_at_our_places_are_not_followed(launch: Launcher) -> None:
    victim = launch.folder / "victim"
    victim.mkdir()
    planted = launch.folder / "spool" / f"lens-auto-{os.getuid()}"
    planted.parent.mkdir()
    planted.symlink_to(victim)
    runs = launch.cwd / "lens-runs"
    runs.mkdir()
    (runs / "known").symlink_to(victim)
    run = launch.instrumented(TRAIN, env={"NEMO_LENS_RUN_ID": "known"})
    assert run.code == 0
    assert list(victim.iterdir()) == []
    assert planted.is_symlink() and (runs / "known").is_symlink()
    told = [line for line in run.lines if not line.startswith(CLOSING)]
    assert len(told) == 2, run.stderr
    assert "NEMO_LENS_SPOOL_DIR" in told[0] and "is used instead" in told[0]
    assert "NEMO_LENS_RUN_DIR" in told[1] and "links are not followed" in told[1]
    (place,) = [line.removeprefix(CLOSING) for line in run.lines if line.startswith(CLOSING)]
    (writer,) = read_run(launch.cwd / place)
    assert len(writer.of(Kind.BACKWARD)) == 3
    shutil.rmtree(launch.cwd / place)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_another_users_spool_is_neither_used_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / f"lens-auto-{os.getuid()}"
    writer = theirs / "run" / "ranks" / "w"
    writer.mkdir(parents=True)
    (writer / "writer.json").write_text("{}")
    monkeypatch.setenv("NEMO_LENS_SPOOL_DIR", str(tmp_path))
    assert str(theirs / "run") in finish.spooled_runs()
    os.chown(theirs, 12345, 12345)
    assert str(theirs / "run") not in finish.spooled_runs()
    folder, problems = spool.make_writer_folder(str(tmp_path), 1, "mine-of-a-test", "w")
    assert not folder.startswith(str(tmp_path))
    assert "belongs to user 12345" in problems[0]
    shutil.rmtree(Path(folder).parents[1])


SECRETS = {
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20header-5ECRET",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-key=traces-5ECRET",
    "SOME_TOKEN": "environment-5ECRET",
}


def test_secrets_are_nowhere(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is in headers, in the environment, in batches nor in parameters gets out of the process."""
    source = """
    import os, sys, time
    import torch
    from pathlib import Path
    from torch.utils.data import DataLoader
    batch = torch.frombuffer(bytearray(bytes.fromhex(sys.argv[1])), dtype=torch.float32)
    parameter = torch.nn.Parameter(batch.clone())
    for _ in range(3):
        for each in DataLoader(batch.reshape(4, -1)):
            (parameter.sum() * each.sum()).backward()
    torch.save({"key": batch}, "model.pt")
    time.sleep(1.5)
    mark = "TEST_RUN_MARK=" + os.environ["TEST_RUN_MARK"]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                print((entry / "cmdline").read_bytes().replace(b"\\0", b" ").decode())
        except OSError:
            pass
    os.unlink("model.pt")
    """
    batch = random.Random(5).randbytes(64)
    env = {
        **SECRETS,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "NEMO_LENS_EXPORTER": "otlp",
        "NEMO_LENS_SPAN_GROUPS": "all",
        "NEMO_LENS_EXIT_TIMEOUT_S": "0.5",
    }
    program = launch.program(source)
    run = launch.run(*INSTRUMENT, *PYTHON, program, batch.hex(), env=env)
    assert run.code == 0, run.stderr
    assert "lens_auto.export" in run.stdout  # the exporter process was there to be looked at
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    doctor = CliRunner().invoke(app, ["doctor"])
    assert "OTEL_EXPORTER_OTLP" in doctor.output
    told = [run.stdout.replace(batch.hex(), ""), run.stderr, doctor.output]
    files = [path for path in launch.folder.rglob("*") if path.is_file() and path != Path(program)]
    assert any(path.name.endswith(SEGMENT_SUFFIX) for path in files), files
    contents = {str(path): path.read_bytes() for path in files}
    for place, content in [*contents.items(), *((f"output {i}", text.encode()) for i, text in enumerate(told))]:
        assert b"5ECRET" not in content, place
        for offset in range(0, len(batch), 8):
            assert batch[offset : offset + 8] not in content, place
    for place in (path for path in files if path.name == "writer.json"):
        (run_dir,) = {place.parents[2]}
        there = launch.cwd / "all.jsonl"
        exported = CliRunner().invoke(app, ["export", str(run_dir), "--to", "otlp-json", "-o", str(there)])
        assert exported.exit_code == 0, exported.output
        assert b"5ECRET" not in there.read_bytes()
        break
    else:
        raise AssertionError("nothing was recorded")


# --- damaged files ----------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(max(64, path.stat().st_size)))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in random.Random(2).sample(range(len(data)), min(40, len(data))):
        data[place] ^= 0xFF
    path.write_bytes(data)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _json(path: Path) -> None:
    path.write_text('{"format": ' + "[" * 100_000)


DAMAGE: tuple[Callable[[Path], None], ...] = (
    *(lambda path: path.write_bytes(b""), _cut, _noise, _flip, _fifo, _folder, _link, _json),
    lambda path: path.unlink(),
)
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("report",),
    ("report", "--json"),
    ("hang",),
    ("postmortem",),
    ("export", "--to", "otlp-json", "-o", "out.jsonl"),
    ("export", "--to", "perfetto", "-o", "out.json"),
)


def _a_run(folder: Path) -> Path:
    writers = []
    for rank in range(2):
        writer = Writer(rank=rank, world_size=2, nonce=7 + rank, pid=4242 + rank)
        writers.append(train(writer, 3))
    return write_run(folder, *writers)


@pytest.mark.timeout(240)
def test_commands_survive_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of a run in turn, damaged in each way: no command hangs or fails other than with one clear line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMO_LENS_SPOOL_DIR", str(tmp_path / "spool"))
    whole = _a_run(tmp_path / "whole")
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) >= 7
    runner = CliRunner()
    turn = 0
    for name in files:
        for damage in DAMAGE:
            run_dir = tmp_path / "damaged"
            shutil.rmtree(run_dir, ignore_errors=True)
            shutil.copytree(whole, run_dir)
            damage(run_dir / name)
            turn += 1
            command = COMMANDS[turn % len(COMMANDS)]
            result = runner.invoke(app, [command[0], str(run_dir), *command[1:]])
            where = (str(name), DAMAGE.index(damage), command, result.output[-500:])
            assert result.exception is None or isinstance(result.exception, SystemExit), (where, result.exc_info)
            assert result.exit_code == 0, where  # one bad file is one line, and all others are read
            assert "Traceback" not in result.output, where
    for name in files:
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).write_bytes(random.Random(3).randbytes(256))
    result = runner.invoke(app, ["report", str(run_dir)])
    assert result.exit_code != 0 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output


def test_a_report_says_what_it_could_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LENS_SPOOL_DIR", str(tmp_path / "spool"))
    run_dir = _a_run(tmp_path / "run")
    (segment,) = sorted(run_dir.glob(f"ranks/*/*{SEGMENT_SUFFIX}"))[:1]
    _noise(segment)
    result = CliRunner().invoke(app, ["report", str(run_dir), "--json"])
    assert result.exit_code == 0
    said: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{") :])
    assert said["ranks"]
    assert segment.name in result.output
