"""Real ranks with an endpoint: what arrives is what `lens-auto export` makes, however the ranks end."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from export_node import wait_until
from launch import CLOSING, INSTRUMENT, PYTHON, RUN_RANKS, SCRIPTS, TORCHRUN, Launcher, Run, free_port
from receiver import Receiver
from records import read_run, read_spans

from lens_auto import semconv
from lens_auto.export import otlp_json
from lens_auto.export.kept import kept_spans
from lens_auto.export.spans import run_spans
from lens_auto.recorder import spool
from lens_auto.recorder.read import RunDirectory

LINGER, EXIT = "NEMO_LENS_EXPORTER_LINGER_S", "NEMO_LENS_EXIT_TIMEOUT_S"
ALL = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_EXPORT_STRATEGY": "all_ranks"}
ITERATIONS = 6

# Two ranks that train, evaluate and save, and end in the way that the argument says.
TRAIN = f"""
import json, os, signal, sys, time
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def say(**facts):
    sys.stdout.write(json.dumps(facts) + "\\n")
    sys.stdout.flush()

def main(rank):
    dist.init_process_group("gloo")
    if os.environ.get("NEMO_LENS_EXPORT_STRATEGY") == "even":  # when the rank has begun to record
        from lens_auto import register_export_strategy
        register_export_strategy("even", lambda config, rank, world_size: rank % 2 == 0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = TensorDataset(torch.ones({ITERATIONS}, 2))
    for (batch,) in DataLoader(batches):
        model(batch).sum().backward()
        dist.all_reduce(torch.ones(1))
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
        work.wait()
        optimizer.step()
    with torch.no_grad():
        for (batch,) in DataLoader(batches):
            model.module(batch)
    torch.save(model.state_dict(), f"model-{{rank}}.pt")
    dist.barrier()
    status = open("/proc/self/status").read()
    say(
        rank=rank,
        loaded=[name for name in sys.modules if name.split(".")[0] == "grpc" or name.startswith("opentelemetry.sdk")],
        resident=int(status.split("VmRSS:")[1].split()[0]) * 1024,
    )
    end = sys.argv[1] if len(sys.argv) > 1 else ""
    time.sleep(0.5 if end else 0)  # the ranks have agreed by now
    if end == "killed" or (end == "one killed" and rank == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "one killed":
        time.sleep(60)
    if end == "os._exit":
        os._exit(3)
    dist.destroy_process_group()
"""
IN_RANKS = RUN_RANKS + TRAIN + "run_ranks(main, 2)\n"
IN_TORCHRUN = TRAIN + "main(int(os.environ['RANK']))\n"

Key = tuple[str, int, int, str, int]  # name, rank, iteration (-1: the job's trace), attributes, links


def shown(attributes: dict[str, Any]) -> str:
    """Attributes without times."""
    return json.dumps({key: value for key, value in sorted(attributes.items()) if not key.endswith("_ns")})


# What torch tells of its own accord, now and then: not the same in two runs.
TOLD_BY_TORCH = (semconv.TIMING_FLIGHT_RECORDER, semconv.TIMING_DDP_LOGGER)


def recorded(run_dir: Path) -> Counter[Key]:
    """What `lens-auto export` makes of a run, by what does not vary from run to run."""
    spans = read_spans(run_dir)
    traces = {
        span.trace_id: span.attributes[semconv.DL_ITERATION]
        for found in spans.values()
        for span in found
        if span.name == semconv.SPAN_ITERATION
    }
    return Counter(
        (span.name, rank, traces.get(span.trace_id, -1), shown(span.attributes), len(span.links))
        for rank, found in spans.items()
        for span in found
        if span.attributes.get(semconv.LENS_TIMING_SOURCE) not in TOLD_BY_TORCH
    )


def received(receiver: Receiver) -> Counter[Key]:
    """What an endpoint got, likewise."""
    spans = receiver.spans()
    traces = {
        span["trace_id"]: span["attributes"][semconv.DL_ITERATION]
        for span in spans
        if span["name"] == semconv.SPAN_ITERATION
    }
    return Counter(
        (
            span["name"],
            span["resource"][semconv.DL_RANK],
            traces.get(span["trace_id"], -1),
            shown(span["attributes"]),
            len(span["links"]),
        )
        for span in spans
        if span["attributes"].get(semconv.LENS_TIMING_SOURCE) not in TOLD_BY_TORCH
    )


def check_once(receiver: Receiver) -> None:
    assert set(receiver.span_ids().values()) <= {1}


def check_spool_is_empty(launch: Launcher) -> None:
    assert [path for path in (launch.folder / "spool").rglob("*") if not path.is_dir()] == []


def facts(run: Run) -> list[dict[str, Any]]:
    """What the ranks said of themselves, by rank."""
    return sorted((json.loads(line) for line in run.stdout.splitlines()), key=lambda each: each["rank"])


@pytest.fixture(scope="module")
def without(launch_once: Launcher) -> Run:
    """The run without an endpoint."""
    program = launch_once.program(IN_RANKS)
    return launch_once.run(*INSTRUMENT, *PYTHON, program, env=ALL).check()


@dataclass
class Killed:
    """Both ranks were killed while the endpoint never answered.

    Attributes:
        recorded: names of the spans that were recorded, by rank.
    """

    launcher: Launcher
    run: Run
    receiver: Receiver
    recorded: dict[int, Counter[str]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    launcher = Launcher(tmp_path_factory.mktemp("killed"))
    with Receiver("grpc") as receiver:
        receiver.hang()
        environment = {**ALL, **receiver.environment(), EXIT: "3", LINGER: "1", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"}
        run = launcher.run(*INSTRUMENT, *PYTHON, launcher.program(IN_RANKS), "killed", env=environment)
        wait_until(lambda: not launcher.started[0].marked())
        yield Killed(launcher, run, receiver, by_rank(recorded(run.run_dir)))
    launcher.close()


def by_rank(spans: Counter[Key]) -> dict[int, Counter[str]]:
    """How many spans of each name a rank has."""
    found: dict[int, Counter[str]] = {}
    for (name, rank, *_), count in spans.items():
        found.setdefault(rank, Counter())[name] += count
    return found


# --- the same spans ---------------------------------------------------------------------------------------------------


def test_torchrun_over_grpc(launch: Launcher, without: Run) -> None:
    with Receiver("grpc") as receiver:
        command = (*INSTRUMENT, *TORCHRUN, "--nproc-per-node", "2", launch.program(IN_TORCHRUN))
        run = launch.run(*command, env={**ALL, **receiver.environment(), "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"})
    assert (run.code, run.survivors, run.lines) == (0, [], []), run.stderr
    assert received(receiver) == recorded(without.run_dir)
    check_once(receiver)
    check_spool_is_empty(launch)
    assert list(run.run_dir.rglob("*.seg")) == []
    # An asynchronous operation's end is in its span: its wait was not sent apart.
    assert not [span for span in receiver.spans() if span["name"] == "torch.distributed.wait"]
    assert [each["loaded"] for each in facts(run)] == [[], []]


def test_forked_ranks_over_http_and_to_a_file(launch: Launcher, without: Run) -> None:
    """Two exporters, each in a lane of its own; the file is what the Collector's OTLP/JSON receiver reads."""
    file = launch.folder / "spans.jsonl"
    with Receiver("http") as receiver:
        environment = {
            **ALL,
            **receiver.environment(),
            "OTEL_TRACES_EXPORTER": "otlp,lens_file",
            "NEMO_LENS_FILE": str(file),
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=ours",
        }
        run = launch.run(*INSTRUMENT, *PYTHON, launch.program(IN_RANKS), env=environment)
    assert (run.code, run.survivors, run.lines) == (0, [], []), run.stderr
    assert received(receiver) == recorded(without.run_dir)
    check_once(receiver)
    check_spool_is_empty(launch)
    (headers,) = {(request.headers["x-tenant"], request.headers["content-encoding"]) for request in receiver.requests()}
    assert headers == ("ours", "gzip")
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    in_file = [
        (span["traceId"], span["spanId"])
        for line in lines
        for part in line["resourceSpans"]
        for scope in part["scopeSpans"]
        for span in scope["spans"]
    ]
    assert sorted(in_file) == sorted((span["trace_id"], span["span_id"]) for span in receiver.spans())
    for ours, bare in zip(facts(run), facts(without), strict=True):
        assert ours["loaded"] == []
        assert ours["resident"] - bare["resident"] < 10e6


# --- ranks that end badly ---------------------------------------------------------------------------------------------


def test_all_ranks_killed_while_nobody_answers(killed: Killed) -> None:
    launcher, run, receiver = killed.launcher, killed.run, killed.receiver
    assert run.code == signal.SIGKILL
    (told,) = run.lines
    assert re.match(r"lens-auto: spans of 2 rank\(s\) are not sent yet( \(otlp: DEADLINE_EXCEEDED.*\))?; ", told)
    assert told.endswith(f"lens-auto recover lens-runs/{run.run_dir.name}")
    spans = {
        (span.span_id.hex(), span.name, span.start_ns, span.end_ns, len(span.links))
        for found in read_spans(run.run_dir).values()
        for span in found
    }
    count = len(spans)
    assert (len(receiver.spans()), kept_spans(run.run_dir)) == (0, count)
    receiver.ok()
    done = subprocess.run(
        [str(SCRIPTS / "lens-auto"), "recover"],
        env=launcher.environment(receiver.environment()),
        cwd=launcher.cwd,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert f"{count} spans sent" in done.stderr
    assert (len(receiver.spans()), kept_spans(run.run_dir)) == (count, 0)
    assert spans == {
        (span["span_id"], span["name"], span["start_ns"], span["end_ns"], len(span["links"]))
        for span in receiver.spans()
    }
    check_spool_is_empty(launcher)


def test_one_rank_killed_and_the_other_terminated(launch: Launcher, killed: Killed) -> None:
    """torchrun sends SIGTERM to the ranks that are left. All that both recorded arrives."""
    with Receiver("http") as receiver:
        command = (*INSTRUMENT, *TORCHRUN, "--nproc-per-node", "2", launch.program(IN_TORCHRUN), "one killed")
        run = launch.run(*command, env={**ALL, **receiver.environment()})
    assert run.code == 1
    assert run.survivors == []
    assert [line for line in run.lines if line.startswith("lens-auto")] == []
    assert by_rank(received(receiver)) == killed.recorded
    check_once(receiver)
    check_spool_is_empty(launch)
    jobs = [span for span in receiver.spans() if span["name"] == semconv.SPAN_JOB]
    assert [span["attributes"][semconv.NEMO_SPAN_TRUNCATED] for span in jobs] == [True, True]


def test_os_exit_and_a_strategy_of_the_program(launch: Launcher, killed: Killed) -> None:
    """Without `atexit`, without destructors; the program says that rank 0 exports."""
    with Receiver("grpc") as receiver:
        environment = {**ALL, **receiver.environment(), "NEMO_LENS_EXPORT_STRATEGY": "even"}
        run = launch.run(*INSTRUMENT, *PYTHON, launch.program(IN_RANKS), "os._exit", env=environment)
    assert (run.code, run.survivors, run.lines) == (3, [], [])
    assert by_rank(received(receiver)) == {0: killed.recorded[0]}
    check_once(receiver)
    check_spool_is_empty(launch)
    assert list(run.run_dir.rglob("*.seg")) == []


# --- file systems without room ----------------------------------------------------------------------------------------

STEPS = 20_000
ALONE = """
import sys
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.sum().backward()
parameter.grad = None  # a step of nothing: two records in a few microseconds
for _ in range(STEPS):
    optimizer.step()
sys.exit(7)
"""


# Two seconds and more pass between a step and the end, so that its spans are sent while the rank runs.
SLOWLY = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = TensorDataset(torch.ones(12, 2))
for _ in range(3):
    for (batch,) in DataLoader(batches):
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.1)
    with torch.no_grad():
        for (batch,) in DataLoader(batches):
            model(batch)
    torch.save(model.state_dict(), "model.pt")
"""


@dataclass
class Alone:
    """A single rank that ended, and what its endpoint got."""

    launcher: Launcher
    run: Run
    receiver: Receiver
    place: Path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Alone]]:
    """Four, side by side: a small spool, a run directory that cannot be written, a name of no exporter, a file."""
    programs = {
        "spool": ALONE.replace("STEPS", str(STEPS)),
        "run directory": ALONE.replace("STEPS", "10"),
        "name": ALONE.replace("STEPS", "10"),
        "file": SLOWLY,
    }
    with contextlib.ExitStack() as stack:
        started = {}
        for name, source in programs.items():
            launcher = Launcher(tmp_path_factory.mktemp("alone"))
            stack.callback(launcher.close)
            place = launcher.folder / "mounted"
            receiver = stack.enter_context(Receiver("http" if name == "run directory" else "grpc"))
            environment: dict[str, str | None] = dict(receiver.environment())
            if name == "spool":
                mount(place, "size=6m", stack)
                environment["NEMO_LENS_SPOOL_DIR"] = str(place)
            elif name == "run directory":  # a container with a read-only working directory
                mount(place, "size=1m,ro", stack)
                environment["NEMO_LENS_RUN_DIR"] = str(place / "run")
            else:
                environment = {"OTEL_TRACES_EXPORTER": "jaegr" if name == "name" else "lens_file"}
            command = (*INSTRUMENT, *PYTHON, launcher.program(source))
            started[name] = launcher, launcher.start(command, environment), receiver, place
        yield {
            name: Alone(launcher, process.wait(), receiver, place)
            for name, (launcher, process, receiver, place) in started.items()
        }


def mount(place: Path, options: str, stack: contextlib.ExitStack) -> None:
    """Mount a memory file system for as long as the stack is open."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True, timeout=10)


def test_spool_that_fills_up(alone: dict[str, Alone]) -> None:
    """The first segment fits, the second does not: what was written arrives, what was not is counted."""
    run, receiver = alone["spool"].run, alone["spool"].receiver
    assert (run.code, run.survivors) == (7, []), run.stderr
    (told,) = run.lines
    assert told.startswith("lens-auto: no room for records in ")
    names = Counter(span["name"] for span in receiver.spans())
    (job,) = [span for span in receiver.spans() if span["name"] == semconv.SPAN_JOB]
    dropped = job["attributes"][semconv.LENS_RECORDS_DROPPED]
    assert dropped > 0
    # A backward, then a step and a boundary each time. Only steps and the backward are spans, and a step ends each
    # iteration.
    written = 1 + 2 * STEPS - dropped
    assert names[semconv.SPAN_OPTIMIZER_STEP] == names[semconv.SPAN_ITERATION]
    assert abs(names[semconv.SPAN_OPTIMIZER_STEP] - written / 2) <= 1
    assert names[semconv.SPAN_BACKWARD] == names[semconv.SPAN_JOB] == 1
    check_once(receiver)


def test_run_directory_that_cannot_be_written(alone: dict[str, Alone]) -> None:
    """All is sent from the spool, and nothing is left there."""
    found = alone["run directory"]
    run, receiver = found.run, found.receiver
    assert (run.code, run.survivors) == (7, []), run.stderr
    (told,) = run.lines
    assert f"the run directory {str(found.place / 'run')!r} cannot be written" in told
    assert Counter(span["name"] for span in receiver.spans()) == {
        semconv.SPAN_JOB: 1,
        semconv.SPAN_BACKWARD: 1,
        semconv.SPAN_OPTIMIZER_STEP: 10,
        semconv.SPAN_ITERATION: 10,
    }
    check_once(receiver)
    check_spool_is_empty(found.launcher)


def test_a_name_of_no_exporter(alone: dict[str, Alone]) -> None:
    """One line says what is wrong and what happens now; the job does not wait."""
    run = alone["name"].run
    assert (run.code, run.survivors) == (7, []), run.stderr
    (told,) = run.lines
    assert told.startswith("lens-auto: spans of 1 rank(s) are not sent (the exporter 'jaegr' cannot be made:")
    assert "installed: " in told
    assert told.endswith(f"lens-auto recover lens-runs/{run.run_dir.name}")
    (writer,) = read_run(run.run_dir)
    assert len(writer.rows) == 21


def test_a_file_is_what_export_writes(alone: dict[str, Alone]) -> None:
    """Streamed while the rank ran, and equal to the byte but for how many spans are in a line. The records stay."""
    run = alone["file"].run
    assert (run.code, run.survivors) == (0, []), run.stderr
    assert run.lines == [f"{CLOSING}lens-runs/{run.run_dir.name}"]
    (file,) = run.run_dir.glob("spans-*.jsonl")
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert len(lines) > 2

    def spans_of(line: Any) -> list[Any]:
        (part,) = line["resourceSpans"]
        (scope,) = part["scopeSpans"]
        return [(part["resource"], scope["scope"], span) for span in scope["spans"]]

    written = [json.loads(line) for line, _ in otlp_json.lines(run_spans(RunDirectory(run.run_dir)))]
    shown = sorted(json.dumps(span) for line in lines for span in spans_of(line))
    assert shown == sorted(json.dumps(span) for line in written for span in spans_of(line))
    assert len(shown) > 36 * 4
    assert kept_spans(run.run_dir, "lens_file") == 0
    check_spool_is_empty(alone["file"].launcher)


# --- two nodes --------------------------------------------------------------------------------------------------------


def test_two_nodes(tmp_path: Path) -> None:
    """Each node has its spool, its run directory and its exporter; it is one run all the same."""
    nodes = [Launcher(tmp_path / name) for name in "ab"]
    with contextlib.ExitStack() as stack, Receiver("grpc", down=True) as receiver:
        for node in nodes:
            stack.callback(node.close)
        world = {
            **ALL,
            **receiver.environment(),
            "NEMO_LENS_EXPORT_STRATEGY": "first_rank_per_node",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": str(free_port()),
            EXIT: "0.5",
            LINGER: "0.5",
        }
        started = [
            node.start(
                (*INSTRUMENT, *PYTHON, node.program(IN_TORCHRUN)),
                {**world, "RANK": str(number), "GROUP_RANK": str(number)},
            )
            for number, node in enumerate(nodes)
        ]
        runs = [each.wait() for each in started]
        assert [run.code for run in runs] == [0, 0], runs[0].stderr
        wait_until(lambda: not [each for each in started if each.marked()])

        merged = tmp_path / "merged"
        parts = [str(run.run_dir) for run in runs]
        command = [str(SCRIPTS / "lens-auto"), "collect", *parts, "-o", str(merged)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert [writer.rank for writer in read_run(merged)] == [0, 1]
        count = sum(len(spans) for spans in read_spans(merged).values())
        assert count == sum(len(spans) for run in runs for spans in read_spans(run.run_dir).values())
        assert kept_spans(merged) == count

        receiver.up()
        for node in nodes:
            (run_folder,) = Path(spool.user_folder(str(node.folder / "spool"))).iterdir()
            environment = node.environment({**world, "RANK": None})
            node.started.append(node.start((*PYTHON, "-m", "lens_auto.export.process", str(run_folder)), environment))
        for node in nodes:
            assert node.started[-1].wait().code == 0
        assert len(receiver.spans()) == count
        assert receiver.connections >= 2
        check_once(receiver)
        for node in nodes:
            check_spool_is_empty(node)
    spans = receiver.spans()
    assert len({span["resource"][semconv.NEMO_RUN_ID] for span in spans}) == 1
    roots: dict[int, set[tuple[str, int]]] = {}
    for span in spans:
        if span["name"] == semconv.SPAN_ITERATION:
            place = (span["trace_id"], span["resource"][semconv.DL_RANK])
            roots.setdefault(span["attributes"][semconv.DL_ITERATION], set()).add(place)
    assert sorted(roots) == list(range(ITERATIONS))
    for places in roots.values():
        assert len({trace for trace, _ in places}) == 1
        assert {rank for _, rank in places} == {0, 1}
