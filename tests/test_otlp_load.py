"""`lens-auto report` on OTLP/JSON lines, as a collector writes them: the same report as from the run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate import Job, on
from synthetic import MS, Writer, train, write_run

from lens_auto.export import otlp_json
from lens_auto.export.spans import run_spans
from lens_auto.recorder.layout import DeviceTime, Flag, Kind
from lens_auto.recorder.read import RunDirectory, UnreadableFile
from lens_auto.report.load import load
from lens_auto.report.otlp import SpanRun
from lens_auto.report.summary import Summary, summarize


def exported(run_dir: Path, target: Path) -> Path:
    """The spans of a run as lines, those of different ranks mixed, as a collector batches them."""
    lines = [line for line, _ in otlp_json.lines(run_spans(RunDirectory(run_dir)))]
    target.write_bytes(b"".join(lines[::2] + lines[1::2]))
    return target


def summary_of(run: RunDirectory) -> Summary:
    return summarize(run, load(run))


def both(tmp_path: Path, *writers: Writer) -> tuple[Summary, Summary]:
    for writer in writers:
        for record in writer.records:
            if record["kind"] == Kind.LOADER_START:
                record["name"] = writer.string("DataLoader.__iter__")
    run_dir = write_run(tmp_path / "run", *writers)
    return summary_of(RunDirectory(run_dir)), summary_of(SpanRun(exported(run_dir, tmp_path / "spans.jsonl")))


@pytest.mark.parametrize(
    "job",
    [
        Job(extra={"data": on({1}, 10)}),
        Job(ranks=2, visible=3, extra={"backward": on({0}, 10)}),
        Job(ranks=2, iterations=100, extra={"checkpoint": on({0}, 100, every=10)}),
        Job(ranks=2, accumulate=3, extra={"forward": on({1}, 10)}),
        Job(ranks=2, extra={"evaluate": on(None, 50, every=20)}),
        Job(workers=4, extra={"data": on(None, 12)}),
        Job(ranks=1, wrapper="", reducer=False),
    ],
    ids=["data", "backward", "checkpoint", "accumulate", "evaluate", "input", "alone"],
)
def test_the_same_report(tmp_path: Path, job: Job) -> None:
    mine, theirs = both(tmp_path, *job.run())
    assert theirs.verdict == mine.verdict
    assert [(each.kind, each.ranks, each.cause, each.effect) for each in theirs.findings] == [
        (each.kind, each.ranks, each.cause, each.effect) for each in mine.findings
    ]
    assert theirs.iterations == mine.iterations
    assert theirs.phase_share == mine.phase_share
    assert theirs.operations == mine.operations
    assert theirs.comparison.ranks == mine.comparison.ranks
    assert [(each.rank, each.host, each.pid, each.state, each.iterations) for each in theirs.ranks] == [
        (each.rank, each.host, each.pid, each.state, each.iterations) for each in mine.ranks
    ]
    assert (theirs.run_id, theirs.world_size, theirs.problems) == ("run-1", job.ranks, [])


def test_asynchronous_operations(tmp_path: Path) -> None:
    mine, theirs = both(tmp_path, train(Writer(rank=0, world_size=1), 50))
    assert [(each.operation, each.count, each.exposed_ns, each.median_ns) for each in theirs.operations] == [
        (each.operation, each.count, each.exposed_ns, each.median_ns) for each in mine.operations
    ]


def test_operations_of_a_device(tmp_path: Path) -> None:
    """What events and the flight recorder told of them is in their spans."""
    writer = Writer(rank=0, world_size=1)
    loader = writer.loader()
    own, wait = DeviceTime.EXPOSED, DeviceTime.EXPOSED | DeviceTime.WAIT
    for number in range(20):
        writer.fetch(loader)
        writer.backward()
        common = {"name": "all_reduce", "group": "0", "group_size": 2, "init": 1, "bytes": 4096}
        for kind, flags, times in (
            ("blocking", 0, [(3, 0, own)]),
            ("on another stream", 0, [(5, 0, 0)]),
            ("asynchronous", Flag.ASYNC, [(2, 0, wait)]),
            ("timed by NCCL", Flag.ASYNC, [(2, 0, wait), (7, Flag.FLIGHT, 0)]),
            ("not measured", 0, []),
        ):
            seen = Flag.SPAN | Flag.ENQUEUE | flags
            common["name"] = kind
            operation = writer.take(Kind.COLLECTIVE, 0.01, seen, seq=number, **common)
            if flags & Flag.ASYNC:
                writer.take(Kind.WAIT, 0.01, name="wait", ref=operation + 1)
            for ms, origin, what in times:
                took = {"ref": operation + 1, "a": ms * MS, "c": int(what)}
                writer.add(Kind.DEVICE_TIME, writer.now, writer.now, origin, **took)
        writer.step()
    mine, theirs = both(tmp_path, writer)
    assert {each.operation: (each.median_ns, each.exposed_ns) for each in mine.operations} == {
        "blocking": (3 * MS, 60 * MS),
        "on another stream": (5 * MS, None),
        "asynchronous": (pytest.approx(0.02 * MS), 40 * MS),
        "timed by NCCL": (7 * MS, 40 * MS),
        "not measured": (pytest.approx(0.01 * MS), None),
    }
    assert [(each.operation, each.exposed_ns) for each in theirs.operations] == [
        (each.operation, each.exposed_ns) for each in mine.operations
    ]
    found = {each.operation: each.median_ns for each in theirs.operations}
    assert (found["blocking"], found["on another stream"], found["timed by NCCL"]) == (3 * MS, 5 * MS, 7 * MS)


def test_several_optimizers_in_an_iteration(tmp_path: Path) -> None:
    """Spans name classes, not optimizers: what an iteration is they say themselves."""
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(12):
        writer.fetch(loader)
        for optimizer in (0, 1):
            writer.backward()
            writer.step(optimizer)
    mine, theirs = both(tmp_path, writer)
    assert theirs.iterations == mine.iterations
    assert theirs.iterations.count == 12


def test_a_rank_that_died(tmp_path: Path) -> None:
    _, theirs = both(tmp_path, train(Writer(closed=False, extra={"dropped": 7}), 5))
    assert [(each.state, each.dropped) for each in theirs.ranks] == [("died", 7)]


def test_foreign_spans_are_left_out(tmp_path: Path) -> None:
    target = exported(write_run(tmp_path / "run", train(Writer(), 20)), tmp_path / "spans.jsonl")
    other = {"resource": {"attributes": []}, "scopeSpans": [{"spans": [{"name": "GET", "startTimeUnixNano": "1"}]}]}
    with target.open("ab") as file:
        file.write(json.dumps({"resourceSpans": [other]}).encode() + b"\n\n{broken\n")
    run = SpanRun(target)
    assert [writer.info.rank for writer in run.writers] == [0]
    assert [str(problem).split(": ", 1)[1] for problem in run.problems] == [
        '1 of 3 lines are damaged; lines like {"resourceSpans": [...]} are valid; they are skipped'
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"hello\n", "no OTLP/JSON lines"),
        (b'{"resourceSpans": []}\n', "no span of a resource with dl.rank"),
    ],
)
def test_no_such_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile, match=said):
        SpanRun(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 10_000), values), min_size=1, max_size=8))
def test_damage_never_breaks_the_report(tmp_path: Path, edits: list[tuple[int, Any]]) -> None:
    writer = train(Writer(), 12)
    writer.take(Kind.SEND, 1, Flag.SPAN, name="send", peer=1, seq=0, group="0")
    lines = [json.loads(line) for line, _ in otlp_json.lines(run_spans(RunDirectory(write_run_once(tmp_path, writer))))]

    def places(node: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            found.append((node, key))
            places(inner, found)
        return found

    for at, value in edits:
        spots = places(lines, [])
        node, key = spots[at % len(spots)]
        node[key] = value
    path = tmp_path / "spans"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    try:
        summary_of(SpanRun(path))
    except UnreadableFile:
        pass


def write_run_once(tmp_path: Path, writer: Writer) -> Path:
    run_dir = tmp_path / "run"
    return run_dir if run_dir.exists() else write_run(run_dir, writer)


def test_the_command(tmp_path: Path) -> None:
    run_dir = Job(ranks=2, extra={"data": on({1}, 10)}).write(tmp_path / "run")
    path = exported(run_dir, tmp_path / "spans.jsonl")
    for command in (["report", str(path)], ["compare", str(run_dir), str(path)]):
        done = subprocess.run(
            [sys.executable, "-m", "lens_auto.cli", *command], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        start = "rank 1 holds the others back: " if command[0] == "report" else "no more than noise: "
        assert done.stdout.startswith(start)
