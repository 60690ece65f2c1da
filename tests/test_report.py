"""`lens-auto report` and `export` on runs whose numbers are known, on damaged ones, and on what is no run at all."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reports import summary_of
from rich.console import Console
from synthetic import MS, WALL_0, Writer, at, segment_header, train, write_run

from lens_auto.export import otlp_json
from lens_auto.export.spans import run_spans
from lens_auto.recorder import exits, layout
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.load import load
from lens_auto.report.postmortem import examine
from lens_auto.report.summary import summarize
from lens_auto.report.text import console, render, render_doctor
from lens_auto.report.words import duration, named, size

ROOT = Path(__file__).parent.parent


def command(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "lens_auto.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def two_ranks(**changes: Any) -> tuple[Writer, Writer]:
    first = Writer(rank=0, world_size=2)
    second = Writer(rank=1, world_size=2, pid=4243, nonce=2 << 40, **changes)
    return first, second


def died_in_all_reduce(world_size: int = 2) -> tuple[Writer, Writer]:
    first, second = two_ranks(closed=False, extra={"dropped": 7, "hooks_off": {"torch.save": "KeyError: 'x'"}})
    first.world_size = second.world_size = world_size
    train(first, 50)
    train(second, 41)
    second.phase = Phase.BACKWARD
    second.slots[0] = {
        "kind": Kind.COLLECTIVE,
        "name": second.string("all_reduce"),
        "group": second.string("0"),
        "seq": 41,
        "start_ns": at(second.now - 1250),
    }
    return first, second


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_a_plain_run(tmp_path: Path) -> None:
    first, second = two_ranks()
    found = summary_of(write_run(tmp_path, train(first, 100), train(second, 100)))
    assert (found.run_id, found.world_size, found.missing_count, found.missing_ranks) == ("run-1", 2, 0, [])
    # 11 ms each; the first of a rank is 12 ms, with the start of the loader and without the millisecond of before.
    assert (found.iterations.count, found.iterations.median_ns, found.iterations.p99_ns) == (200, 11 * MS, 11_010_000)
    assert found.iterations.total_ns == 2 * 1101 * MS
    shares = {name: round(share * 2202) for name, share in found.phase_share.items()}
    assert shares == {
        "data_loading": 2 * 202,
        "forward": 2 * 300,
        "backward": 2 * 400,
        "optimizer": 2 * 100,
        "evaluate": 0,
        "checkpoint": 0,
        "other": 2 * 99,
    }
    assert [(rank.rank, rank.state, rank.iterations.count, rank.phase) for rank in found.ranks] == [
        (0, "closed", 100, None),
        (1, "closed", 100, None),
    ]
    assert found.ranks[0].phase_share == found.ranks[1].phase_share == found.phase_share
    (operation,) = found.operations
    assert operation.operation == "all_reduce"
    assert (operation.count, operation.bytes, operation.median_ns) == (200, 200 * 4096, 2 * MS)
    assert operation.exposed_ns == 200 * 1_500_000
    assert operation.exposed_share == pytest.approx(300 / 2202)
    assert (found.records, found.dropped, found.mispredicted, found.problems) == (2 * 604, 0, 0, [])
    assert found.verdict == (
        "100 iterations on 2 ranks; median 11.0 ms, p99 11.0 ms;"
        " backward 36%, forward 27%, data_loading 18%; communication exposed 14%"
    )


def test_the_first_to_fail_of_several_that_died(tmp_path: Path) -> None:
    """The launcher killed rank 0 because rank 1 was gone: only what it saw tells them apart."""
    writers = [dataclasses.replace(died_in_all_reduce()[1], rank=rank, pid=(1 << 30) + rank) for rank in (0, 1)]
    run = write_run(tmp_path, *writers)
    for writer, code, by_launcher in zip(writers, (-15, -9), (True, False), strict=True):
        seen = exits.describe(writer.pid, code, writer.rank, by_launcher)
        (run / layout.RANKS_DIR / writer.name / layout.EXIT_NAME).write_text(json.dumps(seen))
    found = summary_of(run)
    assert found.first_to_fail == 1
    assert "ranks 0, 1 died in all_reduce" in found.verdict
    assert "; the first to fail was rank 1: signal 9 (SIGKILL); " in found.verdict


def test_a_rank_that_left_with_status_0_did_not_fail(tmp_path: Path) -> None:
    """`os._exit(0)` closes nothing; its launcher saw the status."""
    writers = [dataclasses.replace(died_in_all_reduce()[1], rank=rank, pid=(1 << 30) + rank) for rank in (0, 1)]
    run = write_run(tmp_path, *writers)
    for writer, code in zip(writers, (0, 4), strict=True):
        seen = exits.describe(writer.pid, code, writer.rank, False)
        (run / layout.RANKS_DIR / writer.name / layout.EXIT_NAME).write_text(json.dumps(seen))
    found = examine(run)
    assert [(found.ends[rank].kind, found.ends[rank].exit_code) for rank in (0, 1)] == [("ok", 0), ("exit", 4)]
    assert found.ends[0].words == "left by os._exit with status 0"
    assert found.first_to_fail == 1
    assert [rank.state for rank in summary_of(run).ranks] == ["closed", "died"]
    assert summary_of(run).verdict.startswith("rank 1 died")


def test_a_rank_that_an_exception_ended(tmp_path: Path) -> None:
    """It closes like any other; the other rank died of it."""
    failed, died = (dataclasses.replace(died_in_all_reduce()[1], rank=rank, pid=(1 << 30) + rank) for rank in (0, 1))
    failed.closed = True
    frames = ["/work/train.py:18 <module>"]
    failure = {"type": "ValueError", "message": "bad \x1b[31msample", "frames": frames, "wall_ns": WALL_0}
    failed.extra = {**failed.extra, "failure": failure}
    found = summary_of(write_run(tmp_path, failed, died))
    assert found.first_to_fail == 0
    assert [rank.state for rank in found.ranks] == ["failed", "died"]
    assert found.verdict.startswith(
        r"rank 0 failed: ValueError: bad \x1b[31msample at train.py:18 <module>; rank 1 died"
    )


def test_records_that_were_lost_are_told(tmp_path: Path) -> None:
    whole = summary_of(write_run(tmp_path / "whole", *died_in_all_reduce()))
    writer = dataclasses.replace(died_in_all_reduce()[0], extra={"records": whole.ranks[0].records + 17})
    (problem,) = summary_of(write_run(tmp_path / "cut", writer)).problems
    assert problem.startswith(f"rank 0: 17 of its {whole.ranks[0].records + 17:,} records are missing")


def test_nothing_but_garbage(tmp_path: Path) -> None:
    (tmp_path / "ranks" / "g").mkdir(parents=True)
    (tmp_path / "ranks" / "g" / layout.segment_name(0)).write_bytes(b"zzz")
    done = command("report", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "neither its manifest.json nor a rank in it can be read" in done.stderr


def test_a_rank_that_died(tmp_path: Path) -> None:
    found = summary_of(write_run(tmp_path, *died_in_all_reduce(world_size=5)))
    assert found.verdict.startswith(
        "rank 1 died in all_reduce in backward of iteration 9; ranks 2 to 4 missing of 5; 7 records dropped;"
        " 41 to 50 iterations on 2 ranks; median 11.0 ms"
    )
    assert (found.missing_count, found.missing_ranks, found.dropped) == (3, [2, 3, 4], 7)
    rank = found.ranks[1]
    assert (rank.state, rank.phase, rank.phase_iteration) == ("died", "backward", 9)
    (operation,) = rank.in_flight
    assert (operation["operation"], operation["group"], operation["seq"]) == ("all_reduce", "0", 41)
    assert operation["since_ns"] == 1250 * MS
    assert rank.hooks_off == {"torch.save": "KeyError: 'x'"}


def test_evaluation_and_checkpoints_are_not_iteration_time(tmp_path: Path) -> None:
    writer = Writer()
    training = writer.loader(1)
    for number in range(20):
        writer.fetch(training)
        writer.wait(3)
        writer.backward()
        writer.step()
        if number == 9:
            evaluation = writer.loader(1)
            for _ in range(50):
                writer.fetch(evaluation)
            writer.exhaust(evaluation)
            writer.take(Kind.CHECKPOINT_SAVE, 78, name="model.pt")
    found = summary_of(write_run(tmp_path, writer))
    assert (found.iterations.median_ns, found.iterations.p99_ns) == (10 * MS, round(10.81 * MS))
    assert found.iterations.total_ns == (20 * 10 + 1 + 102 + 78) * MS
    assert found.phase_share["evaluate"] == pytest.approx(102 / 381)
    assert found.phase_share["checkpoint"] == pytest.approx(78 / 381)


def test_operations_whose_end_or_exposure_is_not_known(tmp_path: Path) -> None:
    writer = Writer()
    writer.backward()
    writer.take(Kind.COLLECTIVE, 1, Flag.SPAN | Flag.ASYNC, name="all_gather", exposed_ns=MS)
    writer.take(Kind.COLLECTIVE, 3, Flag.SPAN, name="all_gather", exposed_ns=3 * MS)
    writer.take(Kind.COLLECTIVE, 1, Flag.SPAN | Flag.ENQUEUE, name="broadcast", exposed_ns=MS)
    writer.take(Kind.SEND, 2, Flag.SPAN, name="send", peer=1, seq=0, bytes=10, exposed_ns=2 * MS, thread=4)
    writer.step()
    found = {each.operation: each for each in summary_of(write_run(tmp_path, writer)).operations}
    assert (found["all_gather"].count, found["all_gather"].end_unknown, found["all_gather"].median_ns) == (2, 1, 3 * MS)
    assert found["all_gather"].exposed_ns == 4 * MS
    assert found["all_gather"].exposed_share == pytest.approx(4 / 12)
    assert (found["broadcast"].exposed_ns, found["broadcast"].exposed_share) == (None, None)
    assert found["send"].exposed_ns == 0  # not the training thread


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    writer = train(Writer(host=socket.gethostname(), pid=os.getpid(), start_ticks=ticks, closed=False), 3)
    found = summary_of(write_run(tmp_path, writer))
    assert found.ranks[0].state == "running"
    assert found.verdict.startswith("running: 3 iterations on 1 rank so far; ")


def test_a_run_without_records(tmp_path: Path) -> None:
    assert summary_of(write_run(tmp_path)).verdict == "no rank recorded anything"
    shutil.rmtree(tmp_path)
    found = summary_of(write_run(tmp_path, Writer()))
    assert found.verdict == "0 iterations on 1 rank"
    assert found.iterations.median_ns is None


def test_a_world_that_is_too_large_to_list(tmp_path: Path) -> None:
    found = summary_of(write_run(tmp_path, Writer(rank=5, world_size=(1 << 31) - 1)))
    assert found.missing_count == (1 << 31) - 2
    assert len(found.missing_ranks) == 1000
    assert "ranks 0 to 4, 6 to 1000 and more missing of 2147483647" in found.verdict


def test_mispredicted_boundaries(tmp_path: Path) -> None:
    writer = train(Writer(), 10, live=False)
    found = summary_of(write_run(tmp_path, writer))
    assert found.mispredicted == found.ranks[0].mispredicted == 10


def test_words() -> None:
    assert named([3]) == "rank 3"
    assert named([0, 1]) == "ranks 0, 1"
    assert named([7, 0, 1, 2, 3]) == "ranks 0 to 3, 7"
    assert named(list(range(0, 40, 2))) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and more"
    assert [duration(ns) for ns in (0, 999, 1500, 9_995_000, 99_960_000, 1_234_000_000, 5_000_000_000_000)] == [
        "0 ns",
        "999 ns",
        "1.50 us",
        "10.0 ms",
        "100 ms",
        "1.23 s",
        "5,000 s",
    ]
    assert [size(count) for count in (0, 1023, 1024, 364 * 1024, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "364 KiB",
        "3.00 GiB",
    ]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_report_of_the_newest_run(tmp_path: Path) -> None:
    runs = tmp_path / "lens-runs"
    write_run(runs / "old", train(Writer(), 3))
    os.utime(runs / "old" / layout.MANIFEST_NAME, (1, 1))
    write_run(runs / "new", *died_in_all_reduce())
    (runs / "no run").mkdir()
    done = command("report", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rank 1 died in all_reduce in backward of iteration 9; 7 records dropped; 41 to 50")
    assert lines[1] == "run run-1 in lens-runs/new, started 2026-01-02T03:04:05Z"
    assert "\x1b" not in done.stdout
    for text in (
        "rank 1 was last seen in backward of iteration 9, all_reduce #41 on group 0 for 1.25 s",
        "hook torch.save switched itself off on rank 1: KeyError: 'x'",
        "rank 1 died: not closed, and the process is gone",
    ):
        assert text in lines
    assert any(line.split()[:5] == ["0", "closed", "50", "11.0", "ms"] for line in lines)
    assert any(line.split()[:6] == ["all_reduce", "91", "364", "KiB", "2.00", "ms"] for line in lines)


def test_json(tmp_path: Path) -> None:
    run = write_run(tmp_path, *died_in_all_reduce())
    done = command("report", str(run), "--json")
    found = json.loads(done.stdout)
    assert (found["format"], found["version"]) == ("lens-report", 1)
    expected = summary_of(run).to_json()
    assert found == json.loads(json.dumps(expected))
    assert found["ranks"][1]["in_flight"][0]["operation"] == "all_reduce"


def test_colour_on_a_terminal_only(tmp_path: Path) -> None:
    run = write_run(tmp_path, *died_in_all_reduce())
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100"}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "lens_auto.cli", "report", str(run)], stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 65536):
            shown += piece
    except OSError:  # the other end is closed
        pass
    assert process.wait() == 0
    assert b"\x1b[1;31mrank 1 died" in shown


def test_export_to_a_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", *died_in_all_reduce())
    done = command("export", str(run), "--to", "otlp-json", "-o", str(tmp_path / "spans.jsonl"))
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"lens-auto: 556 spans of 2 ranks written to {tmp_path / 'spans.jsonl'}\n"
    expected = b"".join(line for line, _ in otlp_json.lines(run_spans(RunDirectory(run))))
    assert (tmp_path / "spans.jsonl").read_bytes() == expected


def test_export_to_standard_output(tmp_path: Path) -> None:
    run = write_run(tmp_path, train(Writer(), 2))
    done = command("export", str(run), "--to", "console")
    assert (done.returncode, done.stderr) == (0, "")
    names = [json.loads(line)["name"] for line in done.stdout.splitlines()]
    assert names.count("train.iteration") == 2


def test_a_reader_that_leaves_early(tmp_path: Path) -> None:
    run = write_run(tmp_path, train(Writer(), 3000))
    line = f"{sys.executable} -m lens_auto.cli export {run} | head -c 100"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )
    assert len(done.stdout) == 100
    assert done.stderr == b""


@pytest.mark.parametrize("arguments", ["report", "report --json", "export", "--help"])
def test_an_output_that_takes_nothing(tmp_path: Path, arguments: str) -> None:
    """A full device, a standard output that was closed, a reader that left before the first byte."""
    name, *options = arguments.split()
    run = "" if name == "--help" else str(write_run(tmp_path, train(Writer(), 3)))
    command = f"{sys.executable} -m lens_auto.cli {name} {run} {' '.join(options)}"
    ends = {" >/dev/full": (2, "No space left on device"), " >&-": (2, "Bad file descriptor")}
    ends[" | (exec <&-; sleep 2); exit ${PIPESTATUS[0]}"] = (141, "")
    for end, (status, says) in ends.items():
        done = subprocess.run(
            ["bash", "-c", command + end], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == status, (end, done.stderr)
        assert done.stderr.splitlines()[:1] == ([f"lens-auto: the output: {says}"] if says else []) or (
            name == "export" and done.stderr == f"lens-auto: the output: {says}; nothing is written\n"
        )


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, train(Writer(rank=0, world_size=2), 3), train(Writer(rank=1, world_size=2, pid=4243, nonce=99), 3)
    )
    first, second = sorted((run / layout.RANKS_DIR).iterdir())
    for segment in first.glob("*.seg"):
        segment.unlink()
    done = command("export", str(run), "-o", str(tmp_path / "out"))
    assert done.returncode == 0
    assert "records are missing; files were cut or lost" in done.stderr
    (second / layout.WRITER_NAME).write_text("")
    done = command("collect", str(run), "-o", str(tmp_path / "merged"))
    assert f"{second / layout.WRITER_NAME}" in done.stderr and "the writer is skipped" in done.stderr
    assert "1 rank copied to" in done.stderr


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"sends": True, "exports": True}, "were sent to the endpoint"),
        ({"exports": False}, "the export strategy leaves"),
    ],
)
def test_what_was_sent_is_not_lost(tmp_path: Path, extra: dict[str, Any], says: str) -> None:
    run = write_run(tmp_path, train(Writer(extra=extra), 3))
    for segment in run.rglob("*.seg"):
        segment.unlink()
    problems = json.loads(command("report", str(run), "--json").stdout)["problems"]
    assert [says in problem for problem in problems] == [True]
    assert "missing" not in command("export", str(run), "-o", str(tmp_path / "out")).stderr


@pytest.mark.parametrize("name", ["report", "export"])
def test_bad_input_is_one_line(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "lens-runs" / "one", train(Writer(), 1))
    (tmp_path / "file").write_text("x")
    (run / "of another version").mkdir()
    later = {"format": "lens-run", "version": 3}
    (run / "of another version" / layout.MANIFEST_NAME).write_text(json.dumps(later))
    valid = "a folder with manifest.json and ranks/ is valid; nothing is read"
    no_lines = (  # `report` reads files of a collector as well
        "file: no OTLP/JSON lines; a folder with manifest.json and ranks/ is valid, and so are lines like"
        ' {"resourceSpans": [...]}; nothing is read'
    )
    for arguments, cwd, says in (
        (["none"], tmp_path, f"none: there is no such directory; {valid}"),
        (["file"], tmp_path, no_lines if name == "report" else f"file: not a directory; {valid}"),
        (["."], tmp_path, f".: not a run directory; {valid}"),
        (["lens-runs"], tmp_path, "lens-runs: not a run directory but a folder of 1; the newest is lens-runs/one"),
        ([], run, f"there is no run directory in ./lens-runs; name one: lens-auto {name} RUN_DIR"),
        (["of another version"], run, "version 3; this reader knows 1; nothing is read"),
    ):
        done = command(name, *arguments, cwd=cwd)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("lens-auto: ")
        assert done.stderr.endswith(f"{says}\n")
        assert done.stderr.count("\n") == 1


def test_bad_options(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", train(Writer(), 1)))
    done = command("export", run, "--to", "xml")
    assert done.returncode == 2
    assert done.stderr == "lens-auto: 'xml' is no form of export; valid: otlp-json, console, perfetto, otlp\n"
    done = command("export", run, "--protocol", "grpc")
    assert done.returncode == 2
    said = "lens-auto: --protocol 'grpc' goes with --to otlp, this is --to otlp-json; nothing is exported\n"
    assert done.stderr == said
    done = command("export", run, "-o", str(tmp_path / "none" / "file"))
    assert done.returncode == 2
    assert done.stderr == f"lens-auto: {tmp_path}/none/file: No such file or directory; nothing is written\n"
    assert command("rapport").returncode == 2


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    writer = train(Writer(), 4)
    run = write_run(tmp_path / "run", writer)
    bad = run / layout.RANKS_DIR / writer.name / layout.segment_name(1)
    bad.write_bytes(segment_header(1, writer.nonce, version=9))
    line = f"{bad}: version 9; this reader knows 1; the segment is skipped"
    done = command("report", str(run))
    assert done.returncode == 0
    assert line in done.stdout.splitlines()
    done = command("export", str(run), "-o", str(tmp_path / "out"))
    assert done.returncode == 0
    assert f"lens-auto: {line}" in done.stderr.splitlines()


def test_help_and_version() -> None:
    for arguments in (["--help"], ["report", "-h"], ["export", "--help"], ["doctor", "--help"]):
        done = command(*arguments, COLUMNS="120")
        assert done.returncode == 0
        assert "Usage" in done.stdout
    assert command("--version").stdout.strip() == "0.1.0"


def test_doctor() -> None:
    exporters = {"OTEL_TRACES_EXPORTER": "zipkon", "OTEL_METRICS_EXPORTER": "prometheus,console"}
    done = command("doctor", "--json", NEMO_LENS_SPAN_GROUPS="nonsense", **exporters)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert any("NEMO_LENS_SPAN_GROUPS='nonsense'" in problem for problem in found["problems"])
    shown = text_of(lambda out: render_doctor(found, out))
    assert shown.splitlines()[0] == f"{len(found['problems'])} problem{'s' if len(found['problems']) > 1 else ''}:"
    assert "NEMO_LENS_SPAN_GROUPS='nonsense'" in shown
    assert "torch.autograd: backward" in shown
    assert found["sends"] == {"traces": ["zipkon"], "metrics": ["prometheus", "console"]}
    (problem,) = [line for line in found["problems"] if "zipkon" in line]
    assert "is not installed; there are: " in problem
    assert "metrics of ranks go to: prometheus, console" in shown
    healthy = text_of(lambda out: render_doctor({**found, "problems": [], "sends": {"metrics": []}}, out))
    assert healthy.startswith("No problem found: lens-auto would record a training program here.\n")
    assert "metrics of ranks go to: nowhere" in healthy


def problems_of(cwd: Path, **environment: str) -> tuple[list[str], dict[str, Any]]:
    """What doctor finds wrong in an environment, and all that it says."""
    found = json.loads(command("doctor", "--json", cwd=cwd, **environment).stdout)
    return found["problems"], found


def test_doctor_tells_what_a_job_would_trip_over(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        problems, found = problems_of(
            tmp_path,
            NEMO_LENS_EXPORT_STRATEGY="odd_ranks",
            NEMO_LENS_LOGS_ENABLED="perhaps",
            NEMO_LENS_RUN_DIR="/proc/x",
            NEMO_LENS_SPOOL_DIR=str(tmp_path / "to be" / "made"),
            OTEL_METRICS_EXPORTER="prometheus",
            OTEL_EXPORTER_PROMETHEUS_HOST="127.0.0.1",
            OTEL_EXPORTER_PROMETHEUS_PORT=port,
            OTEL_METRIC_EXPORT_INTERVAL="0",
            OTEL_TRACES_SAMPLER="bogus",
            OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        )
    for beginning in (
        "NEMO_LENS_EXPORT_STRATEGY: unknown export strategy 'odd_ranks'; there are: ",
        "NEMO_LENS_LOGS_ENABLED='perhaps' is not valid: ",
        "the run directory '/proc/x' cannot be made ('/proc': ",
        f"OTEL_EXPORTER_PROMETHEUS_PORT='{port}' cannot be used (",
        "no metrics of OpenTelemetry's own: ValueError: interval value 0.0 is invalid",
        "OTEL_TRACES_SAMPLER='bogus' is not known; there are: ",
    ):
        assert [problem.startswith(beginning) for problem in problems].count(True) == 1, (beginning, problems)
    assert "OTEL_METRIC_EXPORT_INTERVAL='0'" in " ".join(problems)
    assert len(problems) == 6
    assert found["places"]["spool"] == [str(tmp_path / "to be" / "made")]
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind
    assert found["notes"] == ["nobody listens on 127.0.0.1:9 now (Connection refused), where OTLP is sent to"]
    shown = text_of(lambda out: render_doctor(found, out))
    assert "Note: nobody listens on 127.0.0.1:9 now" in shown


def test_doctor_says_it_once(tmp_path: Path) -> None:
    (problem,), _ = problems_of(tmp_path, OTEL_PROPAGATORS="tracecontext,b3")
    assert problem.startswith("OTEL_PROPAGATORS=")
    assert "opentelemetry-instrument itself cannot start" in problem
    odd = {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-3", "NEMO_LENS_EXPORT_SAMPLE_RATE": "7"}
    rate, sdk = sorted(problems_of(tmp_path, **odd)[0])
    assert rate.startswith("NEMO_LENS_EXPORT_SAMPLE_RATE='7'") and "no records of ranks are exported" in rate
    assert sdk.startswith("OpenTelemetry's SDK cannot be imported") and "COUNT_LIMIT must be" in sdk


def text_of(draw: Callable[[Console], None]) -> str:
    """What is printed where there is no terminal."""
    out = console()
    out.file = io.StringIO()
    draw(out)
    return out.file.getvalue()


# --- damage at random -------------------------------------------------------------------------------------------------


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from([layout.segment_name(0), layout.STRINGS_NAME, layout.LIVE_NAME]),
            st.integers(0, 1 << 16),
            st.binary(min_size=1, max_size=24),
        ),
        max_size=12,
    ),
    closed=st.booleans(),
)
def test_damage_never_breaks_report_or_export(
    tmp_path: Path, edits: list[tuple[str, int, bytes]], closed: bool
) -> None:
    """Bytes changed anywhere behind the headers: wrong numbers may come out, a traceback may not."""
    run_dir = tmp_path / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    writer = train(Writer(closed=closed), 8)
    evaluation = writer.loader(1)
    writer.fetch(evaluation)
    writer.exhaust(evaluation)
    writer.take(Kind.SEND, 1, name="send", group="0", peer=1, seq=0)
    writer.take(Kind.RECV, 1, name="recv", group="0", peer=1, seq=0)
    writer.slots[0] = {"kind": Kind.COLLECTIVE, "name": 1}
    folder = write_run(run_dir, writer) / layout.RANKS_DIR / writer.name
    for name, place, piece in edits:
        data = bytearray((folder / name).read_bytes())
        first = layout.SEGMENT_HEADER_BYTES if name == layout.segment_name(0) else 0
        place = first + place % (len(data) - first)
        data[place : place + len(piece)] = piece
        (folder / name).write_bytes(data)
    run = RunDirectory(run_dir)
    summary = summarize(run, load(run))
    json.dumps(summary.to_json())
    assert text_of(lambda out: render(summary, out)).startswith(summary.verdict)
    ids = [span.span_id for made in run_spans(run) for span in made.spans]
    assert len(ids) == len(set(ids))
    for line, _ in otlp_json.lines(run_spans(run)):
        json.loads(line)
