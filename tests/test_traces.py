"""Traces: one for each iteration on all ranks, no span id twice, and spans of the chosen groups only."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from launch import CLOSING, INSTRUMENT, INSTRUMENT_HERE, PYTHON, RUN_RANKS, Launcher, free_port
from records import read_run, read_spans

from lens_auto.export.spans import Span
from lens_auto.recorder import ids

# --- two ranks with the same seeds everywhere -------------------------------------------------------------------------

SEED = 7
SEEDED = f"""
import json, random, sys
import numpy, torch
import torch._dynamo
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def main(rank):
    random.seed({SEED})
    numpy.random.seed({SEED})
    torch.manual_seed({SEED})
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1, generator=torch.Generator()):
        model(batch).sum().backward()
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
        optimizer.step()
    drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    dist.barrier()  # a group that is taken down while its last all-reduce is put away can hang (torch 2.13)
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(drawn) + "\\n")
"""
GROUPS = {"NEMO_LENS_SPAN_GROUPS": "all"}


@pytest.fixture(scope="module", params=[pytest.param("common parent", marks=pytest.mark.slow), "no common parent"])
def alike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Launcher, list[str]]:
    """A run whose ranks seeded every generator alike, and what they drew after training."""
    launcher = Launcher(tmp_path_factory.mktemp("alike"))
    request.addfinalizer(launcher.close)
    if request.param == "common parent":
        run = launcher.instrumented(RUN_RANKS + SEEDED + "run_ranks(main, 2)\n", env=GROUPS).check()
        return launcher, run.stdout.splitlines()
    program = launcher.program("import os\n" + SEEDED + "main(int(os.environ['RANK']))\n")
    world = {**GROUPS, "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    started = [launcher.start((*INSTRUMENT, *PYTHON, program), {**world, "RANK": rank}) for rank in "01"]
    runs = [each.wait() for each in started]
    for run in runs:
        assert (run.code, run.spooled) == (0, []), run.stderr
    return launcher, "".join(run.stdout for run in runs).splitlines()


def test_ranks_share_the_trace_of_each_iteration(alike: tuple[Launcher, list[str]]) -> None:
    (run_dir,) = (alike[0].cwd / "lens-runs").iterdir()
    writers = read_run(run_dir)
    assert [writer.rank for writer in writers] == [0, 1]
    (seed,) = {writer.info["seed"] for writer in writers}
    spans = read_spans(run_dir)
    roots = {
        rank: {span.attributes["dl.iteration"]: span for span in found if span.name == "train.iteration"}
        for rank, found in spans.items()
    }
    assert {rank: sorted(found) for rank, found in roots.items()} == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    for iteration in range(4):
        first, second = roots[0][iteration], roots[1][iteration]
        assert first.trace_id == second.trace_id == ids.iteration_trace_id(bytes.fromhex(seed), iteration)
        assert second.span_id == ids.iteration_span_id(bytes.fromhex(seed), iteration, 1)
        assert (first.parent_id, second.parent_id) == (None, None)
        assert [(link.trace_id, link.span_id) for link in second.links] == [(first.trace_id, first.span_id)]
    assert len({root.trace_id for root in roots[0].values()}) == 4


def test_no_span_id_occurs_twice(alike: tuple[Launcher, list[str]]) -> None:
    (run_dir,) = (alike[0].cwd / "lens-runs").iterdir()
    spans = [span for found in read_spans(run_dir).values() for span in found]
    assert len(spans) > 50
    assert len({span.span_id for span in spans}) == len(spans)
    assert bytes(8) not in {span.span_id for span in spans}


def test_parents_are_spans_of_the_same_trace(alike: tuple[Launcher, list[str]]) -> None:
    (run_dir,) = (alike[0].cwd / "lens-runs").iterdir()
    for found in read_spans(run_dir).values():
        known = {(span.trace_id, span.span_id): span for span in found}
        children = [span for span in found if span.parent_id is not None]
        assert children
        for span in children:
            parent = known[span.trace_id, span.parent_id or b""]
            assert span.start_ns <= span.end_ns
            # DDP's logger gives durations on a clock of its own
            if span.attributes["lens.timing_source"] != "ddp_logger":
                assert parent.start_ns <= span.start_ns
                assert span.end_ns <= parent.end_ns


def test_a_receive_names_its_send(alike: tuple[Launcher, list[str]]) -> None:
    (run_dir,) = (alike[0].cwd / "lens-runs").iterdir()
    spans = read_spans(run_dir)
    sends = [span for span in spans[0] if span.name == "torch.distributed.send"]
    receives = [span for span in spans[1] if span.name == "torch.distributed.recv"]
    assert len(sends) == len(receives) == 4
    for send, receive in zip(sends, receives, strict=True):
        assert (send.trace_id, send.span_id) in [(link.trace_id, link.span_id) for link in receive.links]


def test_no_generator_of_the_program_was_drawn_from(alike: tuple[Launcher, list[str]]) -> None:
    torch_drawn = {json.loads(line)[2] for line in alike[1]}
    assert [json.loads(line)[:2] for line in alike[1]] == [
        [random.Random(SEED).random(), np.random.RandomState(SEED).rand()]
    ] * 2
    assert len(torch_drawn) == 1


# --- span groups ------------------------------------------------------------------------------------------------------

PRESETS = ("default", "per_step", "all")
CHOSEN = {
    "job": {"train.job"},
    "model_init": {"train.model_init"},
    "step": {"train.iteration"},
    "data_loading": {"train.data_loading"},
    "forward_backward": {"train.forward", "train.backward", "ddp.forward", "ddp.backward"},
    "optimizer": {"train.optimizer_step"},
    "evaluate": {"train.evaluate"},
    "checkpoint": {"checkpoint.save"},
    "load_checkpoint": {"checkpoint.load"},
    "communication": {
        "ddp.communication",
        "torch.distributed.all_reduce",
        "torch.distributed.destroy_process_group",
        "torch.distributed.init_process_group",
    },
}
# Four mixtures of them, so that any two groups are apart in at least one.
GROUPS_IN_ORDER = list(CHOSEN)
for bit in range(4):
    mixture = [group for index, group in enumerate(GROUPS_IN_ORDER, 1) if index >> bit & 1]
    CHOSEN[",".join(mixture)] = set().union(*(CHOSEN[group] for group in mixture))
CHOSEN["default"] = CHOSEN["job"] | CHOSEN["checkpoint"] | CHOSEN["evaluate"]
CHOSEN["per_step"] = set().union(*(CHOSEN[group] for group in GROUPS_IN_ORDER if group != "communication"))
CHOSEN["all"] = CHOSEN["per_step"] | CHOSEN["communication"]
CHOSEN = {spec: names for spec, names in CHOSEN.items() if "," in spec or spec in ("communication", *PRESETS)}

EVERYTHING = """
import multiprocessing, os, sys
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def main(groups):
    os.environ.update(NEMO_LENS_SPAN_GROUPS=groups, NEMO_LENS_RUN_ID=groups, NEMO_LENS_RUN_DIR=f"lens-runs/{groups}")
    instrument()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = TensorDataset(torch.ones(3, 2))
    for (batch,) in DataLoader(batches):
        loss = model(batch).sum()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
    with torch.no_grad():
        for (batch,) in DataLoader(batches):
            model(batch)
    torch.save(model.state_dict(), f"{groups}.pt")
    torch.load(f"{groups}.pt")
    dist.destroy_process_group()

for groups in CHOSEN:
    child = multiprocessing.get_context("fork").Process(target=main, args=(groups,))
    child.start()
    child.join()
    assert child.exitcode == 0, groups
"""


@pytest.fixture(scope="module")
def by_groups(launch_once: Launcher) -> dict[str, list[Span]]:
    """The spans of the same program with each choice of groups."""
    program = launch_once.program(INSTRUMENT_HERE + f"CHOSEN = {list(CHOSEN)}\n" + EVERYTHING)
    run = launch_once.run(*PYTHON, program)
    assert run.code == 0, run.stderr
    assert sorted(run.lines) == [f"{CLOSING}lens-runs/{path.name}" for path in run.run_dirs], run.stderr
    assert run.spooled == []
    return {path.name: [span for span in read_spans(path).get(0, []) if _by_hooks(span)] for path in run.run_dirs}


def _by_hooks(span: Span) -> bool:
    """Not what C++ issued when the model was wrapped: torch's flight recorder lists that, in buckets of its own."""
    return span.attributes["lens.timing_source"] != "flight_recorder"


@pytest.mark.parametrize("groups", CHOSEN)
def test_spans_of_the_chosen_groups(by_groups: dict[str, list[Span]], groups: str) -> None:
    assert {span.name for span in by_groups[groups]} == CHOSEN[groups]


def test_counts_do_not_depend_on_other_groups(by_groups: dict[str, list[Span]]) -> None:
    """Three batches; a group that is off still feeds the rules that iterations and phases follow from."""
    everything = [span.name for span in by_groups["all"]]
    for groups, names in CHOSEN.items():
        for name in names:
            assert [span.name for span in by_groups[groups]].count(name) == everything.count(name), (groups, name)
    assert everything.count("train.iteration") == 3
    assert everything.count("train.evaluate") == 1
    assert everything.count("torch.distributed.all_reduce") == 3


def test_a_parent_is_named_only_where_its_group_is_on(by_groups: dict[str, list[Span]]) -> None:
    assert {span.parent_id for span in by_groups["communication"]} == {None}
    assert None not in {span.parent_id for span in by_groups["all"] if span.name == "train.optimizer_step"}
