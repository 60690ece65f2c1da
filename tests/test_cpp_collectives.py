"""Collectives that Python does not issue: every operation that torch's flight recorder lists is recorded, each once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
from launch import PYTHON, RUN_RANKS, Launcher
from records import Row, Writer, read_run, read_spans

from lens_auto import semconv
from lens_auto.export.spans import Span
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.load import load

CASES = ("ddp", "fsdp2", "tensor_parallel", "functional")
STEPS = 3

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch._C._distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 3

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 16)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def train(model, losses, seed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())

def main(rank):
    dist.init_process_group("gloo")
    losses, marks = [], []
    def mark():
        entries = json.loads(c10d._dump_fr_trace_json(True, False)).get("entries", [])
        marks.append(entries[-1]["record_id"] + 1 if entries else 0)
        return entries

    mark()
    torch.manual_seed(1)
    train(DistributedDataParallel(Model(), bucket_cap_mb=0.001), losses, rank)
    mark()

    torch.manual_seed(1)
    model = Model()
    fully_shard(model.first)
    fully_shard(model.second)
    fully_shard(model)
    train(model, losses, rank)
    mark()

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    train(parallelize_module(Model(), mesh, plan), losses, 1)
    mark()

    if "bare" in sys.argv:
        sys.stdout.write(json.dumps({"rank": rank, "losses": losses}) + "\\n")
        dist.barrier()
        dist.destroy_process_group()
        return

    # functional collectives by hand: one that is waited for, one that blocks inside, one whose gradient C++ issues
    total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert (total + 1).tolist() == [3.0] * 4
    gathered = functional.all_gather_single(torch.full((2, 2), float(rank)), 1, dist.group.WORLD)
    assert gathered.tolist() == [[0.0, 0.0, 1.0, 1.0]] * 2
    leaf = torch.ones(4, requires_grad=True)
    functional.all_reduce(leaf, "sum", dist.group.WORLD).sum().backward()
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1
    assert compiled(torch.ones(4)).tolist() == [5.0] * 4
    assert compiled(torch.ones(4)).tolist() == [5.0] * 4
    names = [None, None]
    dist.all_gather_object(names, rank)  # makes several operations
    entries = mark()
    sys.stdout.write(json.dumps({"rank": rank, "losses": losses, "marks": marks, "entries": entries}) + "\\n")
    dist.barrier()
    dist.destroy_process_group()

run_ranks(main, 2)
"""


@dataclass(frozen=True)
class Recorded:
    """One run on two ranks, and what the program saw."""

    run_dir: Any
    writers: list[Writer]
    said: list[dict[str, Any]]
    bare: list[dict[str, Any]]
    spans: dict[int, list[Span]]


def said(text: str) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda found: found["rank"])


@pytest.fixture(scope="module")
def recorded(launch_once: Launcher) -> Recorded:
    source = RUN_RANKS + PROGRAM
    run = launch_once.instrumented(
        source, env={"NEMO_LENS_SPAN_GROUPS": "all", "TORCH_FR_BUFFER_SIZE": "4000"}, timeout_s=100
    ).check()
    bare = launch_once.run(*PYTHON, launch_once.program(source), "bare", timeout_s=100)
    assert bare.code == 0, bare.stderr
    writers = read_run(run.run_dir)
    for writer in writers:
        assert (writer.info["hook_faults"], writer.info["hooks_off"], writer.info["dropped"]) == (0, {}, 0)
    return Recorded(run.run_dir, writers, said(run.stdout), said(bare.stdout), read_spans(run.run_dir))


def listed(recorded: Recorded, rank: int, case: str) -> list[dict[str, Any]]:
    """What the flight recorder has of a case."""
    marks = recorded.said[rank]["marks"]
    index = CASES.index(case)
    entries = recorded.said[rank]["entries"]
    return [each for each in entries if marks[index] <= each["record_id"] < marks[index + 1] and is_the_jobs(each)]


def is_the_jobs(entry: dict[str, Any]) -> bool:
    """Whether it is an operation of the program's; a group without a name is lens-auto's carrier."""
    return bool(entry["process_group"][0])


def of_entry(recorded: Recorded, rank: int, entry: dict[str, Any]) -> list[Row]:
    """The records of a flight recorder entry: by number, or because it was made inside of a recorded call."""
    group, seq = entry["process_group"][0], entry["collective_seq_id"]
    rows = [row for row in recorded.writers[rank].of(Kind.COLLECTIVE) if row.group == group]
    found = [row for row in rows if row.seq == seq]
    return found or [row for row in rows if row.name.endswith("_object") and row.seq == seq - 1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_every_operation_is_recorded_once(recorded: Recorded, case: str, rank: int) -> None:
    entries = listed(recorded, rank, case)
    assert entries
    for entry in entries:
        assert len(of_entry(recorded, rank, entry)) == 1, entry


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_recorded_that_is_not_listed(recorded: Recorded, rank: int) -> None:
    numbers = {(each["process_group"][0], each["collective_seq_id"]) for each in recorded.said[rank]["entries"]}
    rows = [row for row in recorded.writers[rank].of(Kind.COLLECTIVE) if row.name != "barrier"]
    assert [row for row in rows if (row.group, row.seq) not in numbers] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_hooks_come_before_the_flight_recorder(recorded: Recorded, rank: int) -> None:
    """What Python sees is recorded by a hook, with its times; what C++ alone sees says where it comes from."""

    def sources(case: str) -> Counter[tuple[str, bool]]:
        rows = [of_entry(recorded, rank, entry)[0] for entry in listed(recorded, rank, case)]
        return Counter((row.name, bool(row.flags & Flag.FLIGHT)) for row in rows)

    # DDP: parameters verified and broadcast once, gradients averaged; all of it in C++
    assert {flight for _, flight in sources("ddp")} == {True}
    assert sources("ddp")["all_reduce", True] >= STEPS
    # FSDP2: three parameter groups, gathered in forward (and again in backward where they were let go), scattered once
    assert {flight for _, flight in sources("fsdp2")} == {False}
    # tensor parallel: one all_reduce in forward, none in backward, as the inputs need no gradient
    assert sources("tensor_parallel")["all_reduce", False] >= STEPS
    # all_reduce twice and all_gather by hand, the rest from autograd and from compiled code
    functional = sources("functional")
    assert functional["all_reduce", False] == 2
    assert functional["all_gather_into_tensor", False] == 1
    assert functional["all_reduce", True] == 3
    assert functional["all_gather_object", False] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_results_that_are_used_are_waited_for(recorded: Recorded, rank: int) -> None:
    writer = recorded.writers[rank]
    awaited = {row.ref - 1: row for row in writer.of(Kind.WAIT) if row.name == "wait_tensor"}
    rows = [row for row in writer.of(Kind.COLLECTIVE) if row.number in awaited]
    assert len(rows) == len(awaited) > STEPS
    for row in rows:
        assert row.flags & Flag.ASYNC
        assert row.start_ns <= awaited[row.number].start_ns <= awaited[row.number].end_ns
    # and none of those that a hook recorded is left open
    issued = [row for row in writer.of(Kind.COLLECTIVE) if row.flags & Flag.ASYNC]
    assert {row.number for row in issued} - {row.ref - 1 for row in writer.of(Kind.WAIT)} == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_are_those_of_the_flight_recorder(recorded: Recorded, rank: int) -> None:
    for case in ("ddp", "fsdp2", "tensor_parallel"):
        for entry in listed(recorded, rank, case):
            (row,) = of_entry(recorded, rank, entry)
            if row.name == "scatter":  # ours is what a rank takes out, as it may put in nothing
                continue
            assert (row.bytes, row.dtype, row.group_size) == (size_of(entry), dtype_of(entry), 2), entry


def size_of(entry: dict[str, Any]) -> int:
    of = {"Float": 4, "Long": 8, "Int": 4, "Byte": 1}
    return sum(of[kind] * prod(size) for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=True))


def dtype_of(entry: dict[str, Any]) -> str:
    return {"Float": "float32", "Long": "int64", "Int": "int32", "Byte": "uint8"}[entry["input_dtypes"][-1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_reducers_own_times(recorded: Recorded, rank: int) -> None:
    """DDP at a sample rate of 1: forward, backward and communication of every iteration, the last one too."""
    rows = recorded.writers[rank].of(Kind.DDP)
    assert Counter(row.name for row in rows) == {"forward": STEPS, "backward": STEPS, "communication": STEPS}
    backwards = recorded.writers[rank].of(Kind.BACKWARD)
    for iteration in range(STEPS):
        found = {row.name: row for row in rows if row.a == iteration}
        forward, backward, communication = found["forward"], found["backward"], found["communication"]
        assert forward.start_ns < forward.end_ns == backward.start_ns < backward.end_ns
        assert communication.start_ns >= backward.start_ns
        assert 0 < communication.exposed_ns <= communication.end_ns - communication.start_ns
        # on our clock: the backward that the reducer measured lies in the one that the hook saw, within a millisecond
        around = backwards[iteration]
        assert around.start_ns - 1_000_000 <= backward.end_ns  # to the reducer, it begins where forward ends
        assert communication.end_ns <= around.end_ns + 1_000_000
        sizes = [int(size) for size in communication.detail.split(",")]
        assert communication.bytes == sum(sizes) == 4 * (16 * 32 + 32 + 32 * 16 + 16)


@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp2_says_for_which_module(recorded: Recorded, rank: int) -> None:
    rows = recorded.writers[rank].of(Kind.FSDP)
    by_name: dict[str, Counter[str]] = {}
    for row in rows:
        by_name.setdefault(row.name, Counter())[row.detail] += 1
    assert by_name["reduce_scatter"] == {"first": STEPS, "second": STEPS}
    assert set(by_name["unshard"]) == set(by_name["wait_for_unshard"]) == {"first", "second"}
    assert by_name["unshard"] == by_name["wait_for_unshard"]
    collectives = recorded.writers[rank].of(Kind.COLLECTIVE)
    for row in rows:
        if row.name != "wait_for_unshard":
            inside = [each for each in collectives if row.start_ns <= each.start_ns <= each.end_ns <= row.end_ns]
            assert len(inside) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_spans_say_how_they_were_timed(recorded: Recorded, rank: int) -> None:
    spans = recorded.spans[rank]
    by_source: dict[str, set[str]] = {}
    for span in spans:
        by_source.setdefault(str(span.attributes[semconv.LENS_TIMING_SOURCE]), set()).add(span.name)
    assert by_source["ddp_logger"] == {"ddp.forward", "ddp.backward", "ddp.communication"}
    assert {"torch.distributed.all_reduce", "torch.distributed.broadcast"} <= by_source["flight_recorder"]
    assert {"fsdp.unshard", "fsdp.wait_for_unshard", "fsdp.reduce_scatter"} <= by_source["host"]
    unshard = next(span for span in spans if span.name == "fsdp.unshard")
    assert unshard.attributes[semconv.DL_MODEL_MODULE] in ("first", "second")
    flight = next(span for span in spans if span.attributes[semconv.LENS_TIMING_SOURCE] == "flight_recorder")
    assert semconv.DL_COMM_EXPOSED_NS not in flight.attributes
    assert flight.attributes[semconv.DL_COMM_END] == "unknown"
    communication = next(span for span in spans if span.name == "ddp.communication")
    assert sum(communication.attributes[semconv.DL_DDP_BUCKET_SIZES]) == communication.attributes[semconv.DL_COMM_BYTES]  # type: ignore[arg-type]


def test_the_communication_table_has_them_all(recorded: Recorded) -> None:
    loaded = load(RunDirectory(recorded.run_dir))
    for rank, writer in enumerate(loaded):
        counts = {each.name: each.count for each in writer.operations}
        listed_here = [each for case in CASES for each in listed(recorded, rank, case)]
        wanted = Counter(of_entry(recorded, rank, entry)[0].name for entry in listed_here)
        wanted["all_gather_object"] = 1
        assert {name: counts[name] for name in wanted} == dict(wanted)
        # beside them the reducer's own times, one for each iteration; their bytes are those of the operations above
        (reducer,) = [each for each in writer.operations if each.name == "ddp.communication"]
        assert (reducer.count, reducer.bytes, len(reducer.duration_ns)) == (STEPS, 0, STEPS)
        assert reducer.exposed_ns > 0


def test_losses_are_the_same_without_us(recorded: Recorded) -> None:
    assert [found["losses"] for found in recorded.said] == [found["losses"] for found in recorded.bare]
