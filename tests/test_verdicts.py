"""Who is slow, and why: the verdicts on jobs whose faults are known, simulated and real."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import pytest
from launch import INSTRUMENT, PYTHON, RUN_RANKS, TORCHRUN, Launcher
from reports import matched_of, summary_of
from simulate import Job, on
from synthetic import write_run

from lens_auto.recorder.layout import Kind
from lens_auto.report import statistics
from lens_auto.report.words import every, percent, span

STRAGGLER = str(Path(__file__).parent.parent / "examples" / "straggler.py")
MS = 1_000_000


def found_in(run_dir: Path) -> list[tuple[str, list[int], str | None]]:
    """Kind, ranks and cause of every finding, as --json has them."""
    report = json.loads(orjson.dumps(summary_of(run_dir).to_json()))
    return [(each["kind"], each["ranks"], each["cause"]) for each in report["findings"]]


# --- one rank is slow -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("phase", "cause"),
    [("data", "data_loading"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer")],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_phase_of_one_rank(tmp_path: Path, phase: str, cause: str, ranks: int, rank: int) -> None:
    rank = min(rank, ranks - 1)
    run_dir = Job(ranks=ranks, extra={phase: on({rank}, 10)}).write(tmp_path)
    found = summary_of(run_dir)
    (finding,) = found.findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [rank], cause)
    assert finding.effect == pytest.approx(10 / 36, abs=0.02)
    assert finding.interval is not None
    assert finding.interval[0] < finding.effect < finding.interval[1]
    assert (finding.arrival, finding.iterations) == ("ddp_logger", 59)
    assert found.verdict.startswith(f"rank {rank} holds the others back: {cause} takes ")
    assert f"; that costs {percent(finding.effect)} of the time (" in found.verdict
    assert "; try: " in found.verdict
    # What if says the same, of the rank and of its phase.
    assert [(each.rank, each.phase) for each in found.what_if[:2]] == [(rank, None), (rank, cause)]
    assert found.what_if[1].saves == pytest.approx(finding.effect, abs=0.02)
    # The others wait for it, by what it is late.
    others = [each for each in found.comparison.ranks if each.rank != rank]
    assert all(each.waiting == pytest.approx(10 / 36, abs=0.03) for each in others)
    assert found.comparison.ranks[rank].waiting < 0.01


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_becomes_slow_later(tmp_path: Path, rank: int) -> None:
    def late(at: int, iteration: int) -> float:
        return 250.0 if at == rank and iteration >= 300 else 0.0

    job = Job(iterations=600, work={"data": 2, "forward": 200, "backward": 300, "optimizer": 2}, extra={"data": late})
    (finding,) = summary_of(job.write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [rank], "data_loading")
    assert finding.details["since_iteration"] == pytest.approx(300, abs=2)
    assert f"rank {rank} holds the others back since iteration 30" in finding.headline
    assert "data_loading takes 25" in finding.headline
    assert finding.effect == pytest.approx(250 / (2 * 504 + 250), abs=0.02)


def test_a_rank_that_is_slow_for_a_while_is_not_steady(tmp_path: Path) -> None:
    """As where a neighbour on the machine comes and goes."""
    job = Job(ranks=2, extra={"forward": lambda rank, iteration: 12.0 * (rank == 1 and iteration < 30)})
    assert found_in(job.write(tmp_path)) == []


@pytest.mark.parametrize("rank", [1, 3])
def test_two_causes_are_no_single_cause(tmp_path: Path, rank: int) -> None:
    run_dir = Job(extra={"data": on({rank}, 5), "other": on({rank}, 4)}).write(tmp_path)
    (finding,) = summary_of(run_dir).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [rank], "no single cause")
    assert [each["cause"] for each in finding.causes] == ["data_loading", "other"]
    assert [round(each["share"], 1) for each in finding.causes] == [0.6, 0.4]
    assert "no single cause (data_loading 5" in finding.headline


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_on_a_slow_core_is_slow_alike_in_all_phases(tmp_path: Path, rank: int) -> None:
    extra = {"forward": on({rank}, 4), "backward": on({rank}, 6), "optimizer": on({rank}, 1)}
    (finding,) = summary_of(Job(extra=extra).write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [rank], "no single cause")
    assert finding.details["alike"] is True
    assert finding.advice.startswith("look at the host rather than the program")


@pytest.mark.parametrize("rank", [0, 3])
def test_longer_samples_on_one_rank_are_its_data(tmp_path: Path, rank: int) -> None:
    run_dir = Job(extra={"forward": on({rank}, 6), "backward": on({rank}, 9)}).write(tmp_path)
    assert found_in(run_dir) == [("straggler", [rank], "data")]


def test_several_slow_ranks(tmp_path: Path) -> None:
    run_dir = Job(ranks=8, extra={"data": on({2, 5}, 10)}).write(tmp_path)
    (finding,) = summary_of(run_dir).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [2, 5], "data_loading")
    assert finding.effect == pytest.approx(10 / 36, abs=0.02)
    assert finding.headline.startswith("ranks 2, 5 hold the others back: data_loading takes 12")


@pytest.mark.parametrize("rank", [0, 1])
def test_without_the_reducers_clock_a_slow_forward_is_still_seen(tmp_path: Path, rank: int) -> None:
    run_dir = Job(ranks=2, reducer=False, extra={"forward": on({rank}, 10)}).write(tmp_path)
    found = summary_of(run_dir)
    (finding,) = found.findings
    assert (finding.kind, finding.ranks, finding.cause, finding.arrival) == ("straggler", [rank], "forward", "backward")
    assert any(note.startswith("the collective inside backward is not seen") for note in found.comparison.notes)


def test_without_the_reducers_clock_a_slow_backward_is_nobodys(tmp_path: Path) -> None:
    run_dir = Job(ranks=2, reducer=False, extra={"backward": on({1}, 10)}).write(tmp_path)
    assert found_in(run_dir) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_collectives_in_the_program(tmp_path: Path, rank: int) -> None:
    job = Job(wrapper="", visible=5, reducer=False, work={"data": 2, "forward": 8, "between": 1, "optimizer": 2})
    job.extra["between"] = on({rank}, 2)
    found = summary_of(job.write(tmp_path))
    (finding,) = found.findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [rank], "other")
    assert finding.arrival == "collectives"
    assert found.comparison.arrival == {"collectives": 58 * 5}  # not those after the last step


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_meet_unseen_between_backward_and_optimizer(tmp_path: Path, rank: int) -> None:
    """Gradients reduced by the program itself, with collectives not recorded."""
    job = Job(ranks=2, wrapper="", reducer=False, communication=0, extra={"backward": on({rank}, 10)})
    writers = job.run()
    for iteration in range(job.iterations):
        ends = []
        for at, writer in enumerate(writers):
            backwards = [each for each in writer.records if each["kind"] == Kind.BACKWARD]
            ends.append(backwards[iteration])
            # The backward of the other rank ends before the step, which waits for the slow one.
            if at != rank:
                backwards[iteration]["end_ns"] -= 9 * MS
    (finding,) = summary_of(write_run(tmp_path, *writers)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [rank], "backward")
    assert finding.arrival == "optimizer"


@pytest.mark.parametrize("reducer", [True, False])
def test_gradient_accumulation(tmp_path: Path, reducer: bool) -> None:
    """Only the last backward of an iteration is a meeting: what comes before it is own work."""
    job = Job(ranks=2, accumulate=4, reducer=reducer, noise=0.1, extra={"forward": on({1}, 12)})
    (finding,) = summary_of(job.write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [1], "forward")
    assert finding.effect == pytest.approx(12 / 38, abs=0.03)


# --- all ranks, or none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs_name_nobody(tmp_path: Path, seed: int) -> None:
    job = Job(ranks=2 + seed % 3, seed=seed, noise=0.15, reducer=seed % 2 == 0)
    jitter = random.Random(seed)
    job.extra["forward"] = lambda rank, iteration: jitter.choice([0.0] * 120 + [20.0])  # the machine is not ours alone
    found = summary_of(job.write(tmp_path))
    assert found.findings == []
    assert found.verdict.startswith(f"60 iterations on {job.ranks} ranks; median ")


@pytest.mark.parametrize("workers", [0, 2])
def test_input_bound(tmp_path: Path, workers: int) -> None:
    found = summary_of(Job(workers=workers, extra={"data": on(None, 10)}).write(tmp_path))
    (finding,) = found.findings
    assert (finding.kind, finding.ranks, finding.cause) == ("input_bound", [], "data_loading")
    assert finding.effect == pytest.approx(12 / 36, abs=0.02)
    assert finding.details["workers"] == [workers]
    assert f"all ranks wait for data ({workers or 'no'} workers per loader)" in found.verdict


def test_optimizer_bound(tmp_path: Path) -> None:
    run_dir = Job(extra={"optimizer": on(None, 20)}).write(tmp_path)
    assert found_in(run_dir) == [("optimizer_bound", [], "optimizer")]


@pytest.mark.parametrize("visible", [0, 4])
def test_communication_bound(tmp_path: Path, visible: int) -> None:
    run_dir = Job(visible=visible, communication=4 if visible else 15).write(tmp_path)
    assert found_in(run_dir) == [("communication_bound", [], "communication")]


@pytest.mark.parametrize("hidden_barrier", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_slow_checkpoints(tmp_path: Path, rank: int, hidden_barrier: bool) -> None:
    job = Job(ranks=2, iterations=100, hidden_barrier=hidden_barrier, extra={"checkpoint": on({rank}, 100, every=10)})
    (finding,) = summary_of(job.write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("slow_checkpoints", [rank], "checkpoint")
    assert finding.effect == pytest.approx(10 / 36, abs=0.03)
    assert finding.headline.startswith(f"saving a checkpoint takes 100 ms on rank {rank} about every 10th iteration")


def test_evaluation_on_one_rank_alone(tmp_path: Path) -> None:
    run_dir = Job(ranks=2, iterations=100, extra={"evaluate": on({0}, 100, every=10)}).write(tmp_path)
    assert found_in(run_dir) == [("evaluation", [0], "evaluate")]


@pytest.mark.parametrize("ranks", [{1}, {0, 2}])
def test_stalls(tmp_path: Path, ranks: set[int]) -> None:
    draw = random.Random(3)
    pauses = {(rank, iteration) for rank in ranks for iteration in range(200) if draw.random() < 0.06}
    job = Job(iterations=200, extra={"other": lambda rank, iteration: 80.0 * ((rank, iteration) in pauses)})
    (finding,) = summary_of(job.write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("stalls", sorted(ranks), "other")
    counted = sum(1 for _, iteration in pauses if iteration > 1)
    assert abs(finding.details["events"] - counted) <= 2
    assert finding.details["mean_ns"] == pytest.approx(80 * MS, rel=0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_now_and_then_on_a_busy_machine(tmp_path: Path, rank: int) -> None:
    """The noise of both ranks is too large for single stalls to stand out; that all are one rank's does."""
    draw = random.Random(4)
    stops = {iteration: draw.choice(["forward", "backward", "other"]) for iteration in range(4, 250, 12)}
    extra = {
        phase: (lambda at, iteration, phase=phase: 100.0 * (at == rank and stops.get(iteration) == phase))
        for phase in ("forward", "backward", "other")
    }
    job = Job(ranks=2, iterations=250, noise=0.5, extra=extra)  # type: ignore[arg-type]
    (finding,) = summary_of(job.write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("stalls", [rank], "no single cause")


def test_lateness_that_wanders(tmp_path: Path) -> None:
    draw = random.Random(5)
    late = [draw.randrange(4) for _ in range(60)]
    job = Job(extra={"forward": lambda rank, iteration: 15.0 * (late[iteration] == rank)})
    assert found_in(job.write(tmp_path)) == [("wandering", [], "forward")]


@pytest.mark.parametrize("reducer", [True, False])
def test_imbalance_that_follows_the_data(tmp_path: Path, reducer: bool) -> None:
    """Without the reducer's clock the sizes of the batches tell, where they are recorded."""
    draw = random.Random(5)
    size = {(rank, iteration): draw.uniform(0, 1) for rank in range(4) for iteration in range(60)}
    job = Job(
        reducer=reducer,
        extra={
            "forward": lambda rank, iteration: 20 * size[rank, iteration],
            "backward": lambda rank, iteration: 30 * size[rank, iteration],
        },
        batch_bytes=lambda rank, iteration: 0 if reducer else 1e6 * (1 + size[rank, iteration]),
    )
    assert found_in(job.write(tmp_path)) == [("data_imbalance", [], "data")]


def test_drift(tmp_path: Path) -> None:
    job = Job(iterations=200, extra={"other": lambda rank, iteration: 0.08 * iteration})
    (finding,) = summary_of(job.write(tmp_path)).findings
    assert (finding.kind, finding.ranks, finding.cause) == ("drift", [], "other")
    assert finding.details["change"] == pytest.approx(12 / 28, abs=0.05)


def test_warm_up_is_no_verdict(tmp_path: Path) -> None:
    job = Job(extra={"forward": lambda rank, iteration: 900.0 if iteration < 3 else 0.0})
    found = summary_of(job.write(tmp_path))
    assert found.findings == []
    assert found.comparison.warm_up_iterations == 2  # and the first, which follows no other
    assert found.comparison.warm_up_ns == pytest.approx(2 * 900 * MS, rel=0.1)


def test_few_iterations_give_no_verdict(tmp_path: Path) -> None:
    found = summary_of(Job(iterations=9, extra={"data": on({1}, 50)}).write(tmp_path))
    assert found.findings == []
    assert "no verdict from fewer than 10 iterations that can be compared" in found.comparison.notes


# --- restarts ---------------------------------------------------------------------------------------------------------


def restarted(run_dir: Path, lost_ms: float) -> Path:
    writers = []
    start = 0.0
    for attempt in range(3):
        job = Job(ranks=2, start=start, extra={"checkpoint": on({0}, 5, every=25)})
        resource = {"torchelastic.restart_count": str(attempt)}
        made = job.run(pid=100 + 10 * attempt, changes={"resource": resource})
        writers += made
        start = max(each.now for each in made) + lost_ms
    return write_run(run_dir, *writers)


def test_restarts(tmp_path: Path) -> None:
    found = summary_of(restarted(tmp_path, 1000))
    (finding,) = found.findings
    assert (finding.kind, finding.ranks, finding.interval) == ("restarts", [], None)
    assert finding.details["attempts"] == 3
    assert finding.cost_ns == pytest.approx(2000 * MS, rel=0.01)
    assert found.goodput is not None
    assert found.goodput.goodput == pytest.approx(1 - 2000 / (found.goodput.wall_ns / MS), abs=0.01)
    assert finding.details["done_again_ns"] == pytest.approx(2 * 10 * 26 * MS, rel=0.05)
    assert "attempt" in found.comparison.notes[-1]


def test_quick_restarts_are_no_verdict(tmp_path: Path) -> None:
    assert found_in(restarted(tmp_path, 50)) == []


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_ms", [0.0, 37.0, -4000.0])
def test_clocks_of_hosts(tmp_path: Path, ahead_ms: float) -> None:
    job = Job(ranks=4, hosts=["a", "a", "b", "b"], clock_ms={"b": ahead_ms}, extra={"data": on({3}, 10)})
    run_dir = job.write(tmp_path)
    matched = matched_of(run_dir)
    clock = matched.hosts["b"]
    assert clock.uncertainty_ns is not None
    assert abs(clock.offset_ns + ahead_ms * MS) <= clock.uncertainty_ns
    assert clock.uncertainty_ns < 6 * MS  # rank 3 always comes last: its host's clock is bounded from one side by 10 ms
    assert found_in(run_dir) == [("straggler", [3], "data_loading")]


def test_one_host_needs_no_clock(tmp_path: Path) -> None:
    matched = matched_of(Job().write(tmp_path))
    assert {host: (clock.offset_ns, clock.uncertainty_ns) for host, clock in matched.hosts.items()} == {
        "elsewhere": (0, 0)
    }


# --- replays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_what_if_is_what_happens_without_the_fault(tmp_path: Path, phase: str) -> None:
    ill = summary_of(Job(seed=7, noise=0.1, extra={phase: on({2}, 15)}).write(tmp_path / "ill"))
    well = summary_of(Job(seed=8, noise=0.1).write(tmp_path / "well"))
    really = 1 - well.comparison.span_ns / ill.comparison.span_ns
    assert ill.what_if[0].saves == pytest.approx(really, abs=0.05)


def test_replays_reproduce_what_was_recorded(tmp_path: Path) -> None:
    found = summary_of(Job(noise=0.3, visible=3).write(tmp_path)).comparison
    assert found.replayed_ns == pytest.approx(found.span_ns, rel=0.01)


def test_groups_that_overlap_are_replayed_step_by_step(tmp_path: Path) -> None:
    """Ranks 0, 1 and 2, 3 reduce in pairs, then all together: a rank that is late in its pair is late for all."""
    writers = Job(iterations=0, wrapper="").run()
    draw = random.Random(2)
    pairs = [(0, 1), (2, 3)]
    for seq in range(60):
        for writer in writers:
            writer.take(Kind.FETCH, 2, a=1)
            writer.wait(draw.uniform(4, 5) + (10 if writer.rank == 3 else 0))
        for index, pair in enumerate(pairs):
            done = max(writers[rank].now for rank in pair) + 1
            for rank in pair:
                writer = writers[rank]
                writer.add(
                    Kind.COLLECTIVE, writer.now, done, name="all_reduce", group=f"pair{index}", seq=seq, group_size=2
                )
                writer.now = done
        for writer in writers:
            writer.backward(draw.uniform(4, 5))
        done = max(writer.now for writer in writers) + 1
        for writer in writers:
            writer.add(Kind.COLLECTIVE, writer.now, done, name="all_reduce", group="all", seq=seq, group_size=4)
            writer.now = done
            writer.step(ms=1)
    run_dir = write_run(tmp_path, *writers)
    found = summary_of(run_dir)
    (finding,) = found.findings
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [3], "forward")
    assert finding.effect == pytest.approx(10 / 26, abs=0.03)
    assert found.comparison.replayed_ns == pytest.approx(found.comparison.span_ns, rel=0.02)


# --- real jobs --------------------------------------------------------------------------------------------------------


def train(launch: Launcher, *args: str, during: Callable[[Path], None] | None = None) -> Path:
    """Run the example on two ranks under the instrumentation; its run directory.

    Args:
        launch: starts it.
        args: the example's.
        during: called beside the running job with its run directory.
    """
    started = launch.start([*INSTRUMENT, *TORCHRUN, "--standalone", "--nproc-per-node", "2", STRAGGLER, *args])
    if during is not None:
        thread = threading.Thread(target=during, args=(launch.cwd / "lens-runs",), daemon=True)
        thread.start()
    return started.wait(170).check().run_dir


def verdict_of(run_dir: Path) -> tuple[str, list[int], str | None]:
    """The first finding, as the command prints it."""
    command = [sys.executable, "-m", "lens_auto.cli", "report", "--json", str(run_dir)]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert report["findings"], report
    return tuple(report["findings"][0][key] for key in ("kind", "ranks", "cause"))


FORKED = """
import runpy, sys
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
def main(rank):
    runpy.run_path(sys.argv[1], run_name="example")["main"](sys.argv[2:])
run_ranks(main, 2)
"""


@pytest.mark.parametrize(
    ("fault", "rank", "cause"),
    [pytest.param("dataset", 1, "data_loading", marks=pytest.mark.slow), ("backward", 0, "backward")],
)
def test_a_real_straggler(launch: Launcher, fault: str, rank: int, cause: str) -> None:
    """Backward is slow inside the all-reduce that hides it: every rank's backward takes as long."""
    args = ("--fault", fault, "--rank", str(rank), "--steps", "30", "--delay-ms", "100")
    run = launch.instrumented(RUN_RANKS + FORKED, STRAGGLER, *args)
    assert verdict_of(run.check().run_dir) == ("straggler", [rank], cause)


# Two stages of a pipeline with one microbatch: one works while the other waits, with all its threads.
STAGES = """
import os
import torch
import torch.distributed as dist

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(60):
    if rank == 0:
        output = model(torch.randn(2048, 512))
        dist.send(output.detach(), 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)
    else:
        received = torch.empty(2048, 512)
        dist.recv(received, 0)
        received.requires_grad_()
        model(received).square().mean().backward()
        dist.send(received.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""

CAUSES = {
    "dataset": "data_loading",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "sequence": "data",
}


@pytest.mark.slow
@pytest.mark.timeout(200)
class TestMatrix:
    """Each fault on each of two ranks, and none where there is none."""

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("fault", CAUSES)
    def test_one_rank(self, launch: Launcher, fault: str, rank: int) -> None:
        run_dir = train(launch, "--fault", fault, "--rank", str(rank), "--delay-ms", "80", "--steps", "60")
        assert verdict_of(run_dir) == ("straggler", [rank], CAUSES[fault])

    @pytest.mark.parametrize(("fault", "kind"), [("dataset", "input_bound"), ("optimizer", "optimizer_bound")])
    def test_all_ranks(self, launch: Launcher, fault: str, kind: str) -> None:
        run_dir = train(launch, "--fault", fault, "--rank", "all", "--delay-ms", "80", "--steps", "60")
        assert verdict_of(run_dir) == (kind, [], CAUSES[fault])

    @pytest.mark.parametrize("rank", ["0", "1", "all"])
    def test_garbage_collection(self, launch: Launcher, rank: str) -> None:
        ranks = [0, 1] if rank == "all" else [int(rank)]
        run_dir = train(launch, "--fault", "gc", "--rank", rank, "--steps", "150")
        assert verdict_of(run_dir) == ("stalls", ranks, "other")

    def test_checkpoints(self, launch: Launcher) -> None:
        assert verdict_of(train(launch, "--fault", "checkpoint")) == ("slow_checkpoints", [0], "checkpoint")

    @pytest.mark.parametrize("seed", range(10))
    def test_healthy(self, launch: Launcher, seed: int) -> None:
        assert found_in(train(launch, "--seed", str(seed))) == []

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_is_stopped_a_fifth_of_the_time(self, launch: Launcher, rank: int) -> None:
        def stop_and_go(runs: Path) -> None:
            pid = pid_of(runs, rank)
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.1)
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(0.4)

        kind, ranks, _ = verdict_of(train(launch, "--steps", "250", during=stop_and_go))
        assert (kind, ranks) in [("stalls", [rank]), ("straggler", [rank])]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_shares_its_core(self, launch: Launcher, rank: int) -> None:
        hogs: list[subprocess.Popen[bytes]] = []

        def hog(runs: Path) -> None:
            cores = sorted(os.sched_getaffinity(0))
            for each in (0, 1):
                for thread in Path(f"/proc/{pid_of(runs, each)}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {cores[each]})
            program = f"import os; os.sched_setaffinity(0, {{{cores[rank]}}})\nwhile True: pass"
            hogs.extend(subprocess.Popen([sys.executable, "-c", program]) for _ in range(3))

        try:
            kind, ranks, _ = verdict_of(train(launch, "--steps", "250", during=hog))
        finally:
            for each in hogs:
                each.kill()
        assert (kind, ranks) == ("straggler", [rank])

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize(
        "in_turn",
        [
            True,
            pytest.param(
                False,
                marks=pytest.mark.skipif(
                    len(os.sched_getaffinity(0)) < 4,
                    # On fewer cores it is the rank with more threads that is slow: they wait for each other's core.
                    reason="two ranks of two threads that compute at the same time need four cores",
                ),
            ),
        ],
    )
    def test_a_rank_with_half_its_threads(self, launch: Launcher, in_turn: bool, rank: int) -> None:
        shell = f'[ "$RANK" = {rank} ] && threads=1 || threads=2; OMP_NUM_THREADS=$threads exec "$0" "$@"'
        command = [*INSTRUMENT, *TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", "sh", "-c", shell]
        program = [launch.program(STAGES)] if in_turn else [STRAGGLER, "--steps=60", "--width=256", "--length=128"]
        environment = {"NEMO_LENS_SPAN_GROUPS": "all", "OMP_WAIT_POLICY": "PASSIVE"}
        run = launch.start([*command, *PYTHON, *program], environment).wait(170)
        kind, ranks, cause = verdict_of(run.check().run_dir)
        assert (kind, ranks) == ("straggler", [rank])
        assert cause == "no single cause" or not in_turn

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_dataset_behind_a_slow_pipe(self, launch: Launcher, rank: int) -> None:
        pipe = launch.cwd / "dataset"
        os.mkfifo(pipe)

        def feed() -> None:
            with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
                fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, 4096)  # nothing gathers in it while the job starts
                while True:
                    file.write(bytes(8 * 1024))  # a batch
                    time.sleep(0.25)

        threading.Thread(target=feed, daemon=True).start()
        run_dir = train(launch, "--fault", "file", "--rank", str(rank), "--dataset-file", str(pipe), "--steps", "50")
        assert verdict_of(run_dir) == ("straggler", [rank], "data_loading")

    @pytest.mark.parametrize("fault", ["dataset", "forward"])
    def test_what_if_is_what_removing_the_fault_brings(
        self, tmp_path: Path, fault: str, request: pytest.FixtureRequest
    ) -> None:
        spans = []
        for name, args in (("ill", ("--fault", fault)), ("well", ())):
            launch = Launcher(tmp_path / name)
            request.addfinalizer(launch.close)
            found = summary_of(train(launch, *args))
            spans.append(found.comparison.span_ns / found.comparison.iterations)
            if name == "ill":
                saves = found.what_if[0].saves
        assert saves == pytest.approx(1 - spans[1] / spans[0], abs=0.1)


def pid_of(runs: Path, rank: int) -> int:
    """Process id of a rank of a job that has just been started, once it trains."""
    for _ in range(600):
        time.sleep(0.1)
        for path in runs.glob("*/ranks/*/writer.json"):
            with contextlib.suppress(ValueError, KeyError):
                found = json.loads(path.read_text())
                if found["rank"] == rank:
                    return int(found["pid"])
    raise AssertionError(f"no rank {rank} in {runs}")


# --- statistics -------------------------------------------------------------------------------------------------------


def test_intervals_hold_what_they_should() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        part = generator.exponential(10, 100)
        hits += statistics.share(part, np.full(100, 100.0)).low < 0.1 < statistics.share(part, np.full(100, 100.0)).high
    assert 170 <= hits <= 200
    one = statistics.share(part, np.full(100, 100.0))
    assert one == statistics.share(part, np.full(100, 100.0))


def test_nobodys_random_numbers_change(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    summary_of(Job(ranks=2, iterations=12).write(tmp_path))
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_lower_medians() -> None:
    values = np.array([[1.0, 2.0, 3.0, 4.0], [9.0, 1.0, 1.0, 5.0]])
    assert statistics.lower_median_of_others(values).tolist() == [[3, 3, 2, 2], [1, 5, 5, 1]]
    assert statistics.lower_median_of_others(values[:, :2]).tolist() == [[2, 1], [1, 9]]
    assert statistics.lower_median(values).tolist() == [2, 1]


def test_words() -> None:
    assert span(2.1 * 3600e9, 11.7 * 3600e9) == "2.10 h of 11.7 h"
    assert span(4.2e9, 7.6e9) == "4.20 s of 7.60 s"
    assert (percent(0.183), percent(0.018)) == ("18%", "1.8%")
    often = [every(count, "iteration") for count in (0.6, 1.4, 2, 2.6, 10, 12, 21, 113)]
    assert often[:2] == ["in every iteration"] * 2
    assert [each.split()[2] for each in often[2:]] == ["2nd", "3rd", "10th", "12th", "21st", "113th"]
