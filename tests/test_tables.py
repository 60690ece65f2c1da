"""`lens-auto report --sql`: every table of the report from a query, and how fast large runs load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from simulate import Job, on, write_large
from synthetic import WALL_0, Writer, train, write_run

from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.load import load
from lens_auto.report.summary import Summary, summarize
from lens_auto.report.tables import TABLES, BadQuery, Tables

MS = 1_000_000


def tables_of(run_dir: Path) -> tuple[Summary, Tables]:
    run = RunDirectory(run_dir)
    loaded = load(run)
    summary = summarize(run, loaded)
    return summary, Tables(summary, loaded)


def test_the_reports_tables_are_queries(tmp_path: Path) -> None:
    summary, tables = tables_of(Job(ranks=3, visible=2, extra={"data": on({1}, 10)}).write(tmp_path))

    def ask(text: str) -> list[tuple[Any, ...]]:
        return tables.query(text)[1]

    # Ranks.
    assert ask("select rank, iterations, median_ns, records, state from ranks") == [
        (each.rank, each.iterations.count, each.iterations.median_ns, each.records, each.state)
        for each in summary.ranks
    ]
    assert [
        round(value) for (value,) in ask("select median(training_ns) from iterations group by rank order by rank")
    ] == [each.iterations.median_ns for each in summary.ranks]
    # Share of each phase.
    shares = ask("select rank, sum(backward_ns) / sum(duration_ns) from iterations group by rank order by rank")
    assert [share for _, share in shares] == [pytest.approx(each.phase_share["backward"]) for each in summary.ranks]
    pieces = ask(
        "select rank, sum(duration_ns) from phases where phase = 'backward' and iteration >= 0 group by 1 order by 1"
    )
    totals = ask("select rank, sum(backward_ns) from iterations group by 1 order by 1")
    assert pieces == totals
    # Communication.
    (found,) = ask(
        "select operation, count(*), sum(bytes), median(duration_ns), sum(exposed_ns) from operations group by 1"
    )
    reduction = next(each for each in summary.operations if each.operation == "all_reduce")
    assert found == (
        "all_reduce",
        reduction.count,
        reduction.bytes,
        pytest.approx(reduction.median_ns),
        reduction.exposed_ns,
    )
    # Own work and waiting.
    work = ask(
        "select rank, sum(own_data_loading_ns) / sum(span_ns), sum(waits_ns) / sum(span_ns) from work"
        " group by 1 order by 1"
    )
    assert [own for _, own, _ in work] == [
        pytest.approx(each.own["data_loading"], rel=1e-4) for each in summary.comparison.ranks
    ]
    assert [waits for _, _, waits in work] == [
        pytest.approx(each.waiting, abs=1e-4) for each in summary.comparison.ranks
    ]
    assert ask("select arrival, count(distinct (iteration, meeting)) from meetings group by 1 order by 1") == [
        ("collectives", summary.comparison.arrival["collectives"]),
        ("ddp_logger", summary.comparison.arrival["ddp_logger"]),
    ]
    # Verdicts and what if.
    assert ask("select kind, ranks, cause, effect from findings") == [
        (each.kind, json.dumps(each.ranks), each.cause, each.effect) for each in summary.findings
    ]
    assert ask("select saves from what_if") == [(each.saves,) for each in summary.what_if]


def test_times_and_unknown_values(tmp_path: Path) -> None:
    writer = Writer(rank=0)
    writer.take(Kind.FETCH, 1, a=1)
    writer.add(
        Kind.COLLECTIVE, 2, 2.5, Flag.SPAN | Flag.ASYNC, name="broadcast", group="dp", seq=7, dtype="int8", peer=-1
    )
    writer.now = 5
    writer.backward()
    writer.step()
    _, tables = tables_of(write_run(tmp_path, writer))
    names, rows = tables.query(
        "select operation, process_group, seq, dtype, start_ns, duration_ns, asynchronous from operations"
    )
    assert names == ["operation", "process_group", "seq", "dtype", "start_ns", "duration_ns", "asynchronous"]
    assert rows == [("broadcast", "dp", 7, "int8", WALL_0 + 2 * MS, None, True)]
    assert tables.query("select median_ns is null from ranks where iterations = 0")[1] == []


def test_every_table_of_an_empty_run(tmp_path: Path) -> None:
    _, tables = tables_of(write_run(tmp_path))
    for name in TABLES:
        assert tables.query(f"select count(*) from {name}")[1] == [(0,)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("select * from nothing", r"nothing does not exist.*; tables: ranks, iterations, work, phases, operations"),
        ("selec", "syntax error"),
        ("select * from read_text('/etc/hostname')", "file system operations are disabled"),
        ("select no_such_column from ranks", "no_such_column"),
    ],
)
def test_bad_queries(tmp_path: Path, text: str, said: str) -> None:
    _, tables = tables_of(write_run(tmp_path, train(Writer(), 3)))
    with pytest.raises(BadQuery, match=said) as raised:
        tables.query(text)
    assert "\n" not in str(raised.value)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lens_auto.cli", "report", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command(tmp_path: Path) -> None:
    run_dir = str(write_run(tmp_path / "run", train(Writer(), 100)))
    done = command(run_dir, "--sql", "select rank, count(*) as iterations from iterations group by rank")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [["rank", "iterations"], ["0", "100"]]
    done = command(run_dir, "--json", "--sql", "select rank, count(*) as iterations from iterations group by rank")
    assert json.loads(done.stdout) == [{"rank": 0, "iterations": 100}]
    done = command(run_dir, "--sql", "select")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    (tmp_path / "duckdb.py").write_text("raise ImportError")
    done = command(run_dir, "--sql", "select 1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "lens-auto: DuckDB is not installed; pip install 'nemo-lens-auto[report]' adds it\n"


# --- speed ------------------------------------------------------------------------------------------------------------


# Its own peak: what wait4 says of a child holds what its parent had when it was started.
TELLING = """
import atexit, sys
from lens_auto.cli import main
def peak():
    with open("/proc/self/status") as file:
        sys.stderr.write(next(line for line in file if line.startswith("VmHWM:")))
atexit.register(peak)
main()
"""


def measured(*args: str) -> tuple[str, float, float, int]:
    """Output of the command, seconds it took, seconds of processor time, and the most memory it had in bytes."""
    begun = time.monotonic()
    command = [sys.executable, "-c", TELLING, *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    output = process.stdout.read()
    peak_kib = int(process.stderr.read().split()[-2])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return output, time.monotonic() - begun, usage.ru_utime + usage.ru_stime, peak_kib * 1024


def check_large(output: str) -> None:
    assert output.startswith("rank 3 holds the others back: data_loading takes 5.0")


def test_a_tenth_of_a_large_run(tmp_path: Path) -> None:
    """320,000 records: a tenth of the whole, in a tenth of the time (measured in processor time: others run, too)."""
    records = write_large(tmp_path, iterations=1000)
    output, _, processor_s, peak_bytes = measured("report", str(tmp_path))
    check_large(output)
    assert f"{records:,} records, 0 dropped" in output
    assert processor_s < 1.5 + 3
    assert peak_bytes < 400e6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_large_run(tmp_path: Path) -> None:
    """8 ranks x 10,000 iterations x 40 records in under 30 s and 2 GB."""
    assert write_large(tmp_path) == 3_200_000
    output, seconds, _, peak_bytes = measured("report", str(tmp_path))
    check_large(output)
    assert seconds < 30
    assert peak_bytes < 2e9
