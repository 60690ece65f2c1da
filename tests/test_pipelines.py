"""Pipelines of torch: which transfers are recorded, and that each receive names the very send it came from.

The program writes a nonce into every activation and every gradient that goes from one stage to another, and remembers
which it sent and which it received. Neither the records nor the ids know of it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import CLOSING, INSTRUMENT, PYTHON, RUN_RANKS, Launcher
from records import Row, Writer, read_run

from instrumentors.megatron import steps as megatron_steps
from lens_auto.export import pipeline_spans
from lens_auto.recorder.layout import Flag, Kind

ITERATIONS = 3
MICROBATCHES = 8
WARM_UP = 1  # iterations at first in which torch also runs the stages to learn their shapes
PHASES = ("GPipe", "1F1B", "replicas", "interleaved", "eval")

PROGRAM = (
    RUN_RANKS
    + """
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

ITERATIONS, MICROBATCHES, WARM_UP = 3, 8, 1
nonces = iter(range(1, 1 << 20))
log = None

def mark(tensor, what, stage):
    nonce = rank * 100_000 + next(nonces)
    tensor = tensor.clone()
    tensor[:, 0] = nonce
    if log is not None:
        log.setdefault(f"sent {what} {stage}", []).append(nonce)
    return tensor

def note(tensor, what, stage):
    if log is not None:
        log.setdefault(f"received {what} {stage}", []).append(int(tensor[0, 0].item()))

class Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, stage):
        ctx.stage = stage
        note(tensor, "forward", stage)
        return tensor.clone()
    @staticmethod
    def backward(ctx, gradient):
        return mark(gradient, "backward", ctx.stage), None

class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, stage):
        ctx.stage = stage
        return mark(tensor, "forward", stage)
    @staticmethod
    def backward(ctx, gradient):
        note(gradient, "backward", ctx.stage)
        return gradient.clone(), None

class Part(nn.Module):
    def __init__(self, stage, stages):
        super().__init__()
        torch.manual_seed(stage)
        self.stage, self.last = stage, stage == stages - 1
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        if self.stage:
            x = Arrive.apply(x, self.stage)
            x = x.clone()
            x[:, 0] = 0.0  # the nonce is no part of the model
        x = torch.tanh(self.layer(x))
        return x if self.last else Leave.apply(x, self.stage)

def train(schedule_class, group, per_rank, evaluate=False):
    global log
    log = None
    ranks = dist.get_process_group_ranks(group)
    stages = len(ranks) * per_rank
    place = ranks.index(rank)
    mine = [
        PipelineStage(Part(stage, stages), stage, stages, torch.device("cpu"), group=group)
        for stage in range(place, stages, len(ranks))
    ]
    schedule = schedule_class(mine if per_rank > 1 else mine[0], MICROBATCHES, loss_fn=nn.MSELoss())
    optimizer = torch.optim.SGD([p for stage in mine for p in stage.submod.parameters()], lr=0.1)
    losses = []
    for iteration in range(ITERATIONS):
        if iteration == WARM_UP:
            log = {}
        torch.manual_seed(1000 + iteration)
        x, y = torch.randn(16, 4), torch.randn(16, 4)
        optimizer.zero_grad()
        found = []
        keywords = {"target": y, "losses": found} if mine[-1].is_last else {}
        (schedule.eval if evaluate else schedule.step)(*((x,) if mine[0].is_first else ()), **keywords)
        optimizer.step()
        losses += [loss.item().hex() for loss in found]
    weights = [value.hex() for stage in mine for p in stage.submod.parameters() for value in p.flatten().tolist()]
    return {"losses": losses, "weights": weights, "log": log, "group": group.group_name, "ranks": ranks}

def main(number):
    global rank
    rank = number
    dist.init_process_group("gloo")
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    world, half = dist.group.WORLD, halves[rank // 2]
    found = {
        "GPipe": train(ScheduleGPipe, world, 1),
        "1F1B": train(Schedule1F1B, world, 1),
        "replicas": train(Schedule1F1B, half, 1),
        "interleaved": train(ScheduleInterleaved1F1B, half, 2),
        "eval": train(ScheduleGPipe, half, 1, evaluate=True),
    }
    with open(sys.argv[1] + f".{rank}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()

run_ranks(main, 4)
"""
)


class Pipelines:
    """One run of the program, and what it recorded.

    Attributes:
        told: what the program says, by rank and phase.
        bare: the same of a run without us.
    """

    def __init__(self, launch: Launcher, source: str = PROGRAM, timeout_s: float = 90) -> None:
        program = launch.program(source)
        env = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_PROPAGATION": "off"}
        run = launch.run(*INSTRUMENT, *PYTHON, program, "with", env=env, timeout_s=timeout_s)
        if source == PROGRAM:
            run.check()
        else:  # some versions of Megatron print lines of their own
            assert (run.code, run.spooled, run.survivors) == (0, [], []), run.stderr
            assert [line for line in run.lines if line.startswith("lens-auto")] == [
                f"{CLOSING}lens-runs/{run.run_dir.name}"
            ]
        without = launch.run(*PYTHON, program, "without", timeout_s=timeout_s)
        assert without.code == 0, without.stderr
        self.told = [_read(launch.cwd / f"with.{rank}") for rank in range(4)]
        self.bare = [_read(launch.cwd / f"without.{rank}") for rank in range(4)]
        self.writers = {writer.rank: writer for writer in read_run(run.run_dir)}
        self.sends: dict[bytes, tuple[int, Row]] = {}
        for rank, writer in self.writers.items():
            for row in writer.of(Kind.PIPELINE_SEND):
                span_id = pipeline_spans.send_span_id(row, self.seed(writer), rank, row.group, row.name)
                assert span_id is not None
                assert span_id not in self.sends
                self.sends[span_id] = (rank, row)

    @staticmethod
    def seed(writer: Writer) -> bytes:
        seed = writer.files.info.seed
        assert seed is not None
        return seed

    def sender(self, writer: Writer, row: Row) -> tuple[int, Row]:
        """Rank and record of the send that a receive links to."""
        span_id = pipeline_spans.sender_span_id(row, self.seed(writer), row.group, row.name)
        assert span_id is not None
        return self.sends[span_id]

    def rows(self, phase: str, rank: int, *kinds: Kind) -> list[Row]:
        """Records of a phase on a rank: calls are numbered by group, and the phases take turns."""
        group = self.told[rank][phase]["group"]
        phases = list(self.told[rank])
        before = [each for each in phases[: phases.index(phase)] if self.told[rank][each]["group"] == group]
        calls = range(ITERATIONS * len(before), ITERATIONS * (len(before) + 1))
        return [row for row in self.writers[rank].of(*kinds) if row.group == group and row.a in calls]

    def check_nonces(self, phase: str, warm_up: int) -> int:
        """Assert that each receive links to the send of the nonce that it received; how many there were.

        The i-th activation that a stage took was in its i-th receive, the i-th that it gave away in its i-th send.
        """
        sent: dict[tuple[int, int], int] = {}
        received: dict[tuple[int, int], int] = {}
        for nonces, kind, what in ((sent, Kind.PIPELINE_SEND, "sent"), (received, Kind.PIPELINE_RECV, "received")):
            for rank in range(4):
                rows = self.rows(phase, rank, kind)
                first = min(row.a for row in self.rows(phase, rank, Kind.PIPELINE_CALL))
                for key, logged in self.told[rank][phase]["log"].items():
                    if not key.startswith(what):
                        continue
                    _, direction, stage = key.split()
                    of_stage = [
                        row
                        for row in rows
                        if row.name == direction and row.b == int(stage) and row.a >= first + warm_up
                    ]
                    assert len(of_stage) == len(logged) == (ITERATIONS - warm_up) * MICROBATCHES
                    nonces.update({(rank, row.number): nonce for row, nonce in zip(of_stage, logged, strict=True)})
        for rank in range(4):
            for row in self.rows(phase, rank, Kind.PIPELINE_RECV):
                if (rank, row.number) in received:
                    sender, send = self.sender(self.writers[rank], row)
                    assert sent[sender, send.number] == received[rank, row.number]
        return len(received)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def pipelines(launch_once: Launcher) -> Pipelines:
    return Pipelines(launch_once)


def test_losses_and_weights_are_those_of_a_bare_run(pipelines: Pipelines) -> None:
    for with_us, bare in zip(pipelines.told, pipelines.bare, strict=True):
        for phase in PHASES:
            assert with_us[phase]["losses"] == bare[phase]["losses"]
            assert with_us[phase]["weights"] == bare[phase]["weights"]
    assert [len(each["GPipe"]["losses"]) for each in pipelines.told] == [0, 0, 0, ITERATIONS * MICROBATCHES]


def test_no_hook_failed(pipelines: Pipelines) -> None:
    assert [(writer.info["hooks_off"], writer.info["hook_faults"]) for writer in pipelines.writers.values()] == [
        ({}, 0)
    ] * 4


# Receives in an iteration by rank, forward and backward alike: stages that are not the first get activations, stages
# that are not the last get gradients.
RECEIVES = {
    "GPipe": ([0, 8, 8, 8], [8, 8, 8, 0]),
    "1F1B": ([0, 8, 8, 8], [8, 8, 8, 0]),
    "replicas": ([0, 8, 0, 8], [8, 0, 8, 0]),
    "interleaved": ([8, 16, 8, 16], [16, 8, 16, 8]),
    "eval": ([0, 8, 0, 8], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("phase", PHASES)
def test_counts(pipelines: Pipelines, phase: str) -> None:
    for direction, expected in zip(("forward", "backward"), RECEIVES[phase], strict=True):
        for rank in range(4):
            received = [row for row in pipelines.rows(phase, rank, Kind.PIPELINE_RECV) if row.name == direction]
            assert len(received) == ITERATIONS * expected[rank]
            assert sorted(Counter(row.a for row in received).values()) == [expected[rank]] * (
                ITERATIONS if expected[rank] else 0
            )
        sent = sum(
            row.name == direction for rank in range(4) for row in pipelines.rows(phase, rank, Kind.PIPELINE_SEND)
        )
        assert sent == ITERATIONS * sum(expected)


@pytest.mark.parametrize("phase", PHASES)
def test_every_receive_names_a_send_on_the_rank_it_came_from(pipelines: Pipelines, phase: str) -> None:
    ranks = {rank: pipelines.told[rank][phase]["ranks"] for rank in range(4)}
    for rank in range(4):
        named = set()
        for row in pipelines.rows(phase, rank, Kind.PIPELINE_RECV):
            sender, send = pipelines.sender(pipelines.writers[rank], row)
            assert sender == row.peer
            assert send.peer == rank
            assert (send.a, send.b, send.c, send.seq) == (row.a, row.c, row.b, row.seq)
            assert send.name == row.name
            assert send.bytes == row.bytes == 2 * 4 * 4
            assert sender in ranks[rank], "replicas never link across"
            named.add((sender, send.number))
        assert len(named) == len(pipelines.rows(phase, rank, Kind.PIPELINE_RECV))


@pytest.mark.parametrize("phase", PHASES)
def test_a_receive_links_to_the_send_of_the_nonce_that_it_received(pipelines: Pipelines, phase: str) -> None:
    checked = pipelines.check_nonces(phase, WARM_UP)
    assert checked == (ITERATIONS - WARM_UP) * sum(map(sum, RECEIVES[phase]))


@pytest.mark.parametrize("phase", PHASES)
def test_microbatches(pipelines: Pipelines, phase: str) -> None:
    for rank in range(4):
        ranks = pipelines.told[rank][phase]["ranks"]
        stages = range(ranks.index(rank), len(ranks) * (1 + (phase == "interleaved")), len(ranks))
        expected = sorted((stage, microbatch) for stage in stages for microbatch in range(MICROBATCHES))
        backward = [] if phase == "eval" else expected
        calls = pipelines.rows(phase, rank, Kind.PIPELINE_CALL)
        assert [row.b for row in calls] == [int(phase != "eval")] * ITERATIONS
        for call in calls:
            for kind, found in ((Kind.PIPELINE_FORWARD, expected), (Kind.PIPELINE_BACKWARD, backward)):
                rows = [row for row in pipelines.rows(phase, rank, kind) if row.a == call.a]
                assert sorted((row.b, row.seq) for row in rows) == found
                assert all(call.start_ns <= row.start_ns < row.end_ns <= call.end_ns for row in rows)


@pytest.mark.parametrize("phase", PHASES)
def test_waits_complete_every_transfer(pipelines: Pipelines, phase: str) -> None:
    """A transfer ends with the wait on its work; a receive is over before the stage computes with it."""
    for rank in range(4):
        waited = {row.ref - 1: row for row in pipelines.writers[rank].of(Kind.WAIT)}
        forwards = {(row.a, row.b, row.seq): row for row in pipelines.rows(phase, rank, Kind.PIPELINE_FORWARD)}
        for row in pipelines.rows(phase, rank, Kind.PIPELINE_SEND, Kind.PIPELINE_RECV):
            assert row.flags & Flag.SPAN
            assert row.flags & Flag.ASYNC
            assert waited[row.number].start_ns >= row.end_ns
            if row.kind is Kind.PIPELINE_RECV and row.name == "forward":
                assert waited[row.number].end_ns <= forwards[row.a, row.b, row.seq].start_ns


def test_what_is_waited_for_together_says_so(pipelines: Pipelines) -> None:
    """1F1B starts an activation's send with a gradient's receive; GPipe starts each transfer alone."""
    for rank in range(4):
        assert not any(
            row.flags & Flag.COALESCED for row in pipelines.rows("GPipe", rank, Kind.PIPELINE_SEND, Kind.PIPELINE_RECV)
        )
    together = [
        row
        for row in pipelines.rows("1F1B", 1, Kind.PIPELINE_RECV)
        if row.flags & Flag.COALESCED and row.name == "backward"
    ]
    assert len(together) == ITERATIONS * (MICROBATCHES - 2)  # all but those of the end, which nothing is sent with


@pytest.mark.slow
def test_with_the_group_off_calls_are_counted_and_nothing_else(launch: Launcher) -> None:
    """Ranks that switch the group on later must agree on the numbers."""
    switch = "runtime.set_groups(frozenset({'pipeline'}))"
    source = PROGRAM.replace('"replicas": train', f'"": {switch}, "replicas": train')
    source = source.replace("import json\n", "import json\nfrom lens_auto import runtime\n", 1)
    program = launch.program(source)
    env = {"NEMO_LENS_SPAN_GROUPS": "step", "NEMO_LENS_PROPAGATION": "off"}
    run = launch.run(*INSTRUMENT, *PYTHON, program, "with", env=env, timeout_s=90).check()
    for writer in read_run(run.run_dir):
        told = _read(launch.cwd / f"with.{writer.rank}")
        calls = writer.of(Kind.PIPELINE_CALL)
        assert len(calls) == ITERATIONS * len(PHASES)
        assert not writer.of(Kind.PIPELINE_FORWARD, Kind.PIPELINE_BACKWARD)
        transfers = writer.of(Kind.PIPELINE_SEND, Kind.PIPELINE_RECV)
        assert {row.group for row in transfers} == {told["replicas"]["group"]}
        assert len(transfers) == ITERATIONS * (16 + 48 + 8)  # replicas, interleaved, eval; sent and received


# --- Megatron-core ----------------------------------------------------------------------------------------------------

MEGATRON_PHASES = ("plain", "batched", "interleaved", "overlapped", "forward_only")

# Its schedules name the device "cuda" outright; on a machine without one a torch function mode puts "cpu" there.
MEGATRON_PROGRAM = (
    RUN_RANKS
    + PROGRAM[PROGRAM.index("import json") : PROGRAM.index("class Part")]
    .replace("[:, 0]", "[..., 0]")
    .replace("tensor[0, 0]", "tensor.flatten()[0]")
    + """
import warnings
warnings.filterwarnings("ignore")
from torch.overrides import TorchFunctionMode
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

class OnHost(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

torch.cuda.current_device = lambda: "cpu"

class Part(MegatronModule):
    def __init__(self, config, stage, stages, chunk):
        super().__init__(config)
        torch.manual_seed(stage)
        self.stage, self.last, self.vp_stage = stage, stage == stages - 1, chunk
        self.layer = nn.Linear(4, 4)
        self.model_type = ModelType.encoder_or_decoder
        self.input = None
    def set_input_tensor(self, tensors):
        self.input = tensors[0]
    def forward(self, batch):
        x = batch
        if self.stage:
            x = Arrive.apply(self.input, self.stage).clone()
            x[..., 0] = 0.0
        x = torch.tanh(self.layer(x))
        return x if self.last else Leave.apply(x, self.stage)

def step(batches, model):
    return model(next(batches)), lambda output: (output.pow(2).mean(), output.pow(2).mean().detach())

def train(phase):
    global log
    log = {}
    chunks = 2 if phase in ("interleaved", "overlapped") else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks
    )
    place, group = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_group()
    config = TransformerConfig(
        num_layers=2 * (chunks or 1), hidden_size=4, num_attention_heads=1, pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks, pipeline_dtype=torch.float32, use_cpu_initialization=True,
        deallocate_pipeline_outputs=phase == "plain", overlap_p2p_comm=phase == "overlapped",
        batch_p2p_comm=phase == "batched", batch_p2p_sync=False,
    )
    config.microbatch_group_size_per_vp_stage = 2
    stages = 2 * (chunks or 1)
    models = [Part(config, 2 * chunk + place, stages, chunk if chunks else None) for chunk in range(chunks or 1)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    losses = []
    for iteration in range(ITERATIONS):
        torch.manual_seed(1000 + iteration)
        batches = [torch.randn(3, 2, 4) for _ in range(MICROBATCHES)]
        optimizer.zero_grad()
        losses += schedules.get_forward_backward_func()(
            forward_step_func=step, data_iterator=[iter(batches) for _ in models], model=models,
            num_microbatches=MICROBATCHES, seq_length=3, micro_batch_size=2, forward_only=phase == "forward_only",
        )
        optimizer.step()
    weights = [value.hex() for model in models for p in model.parameters() for value in p.flatten().tolist()]
    ranks = dist.get_process_group_ranks(group)
    found = {"losses": [loss.item().hex() for loss in losses], "weights": weights, "log": log, "ranks": ranks,
             "group": group.group_name}
    parallel_state.destroy_model_parallel()
    return found

def main(number):
    global rank
    rank = number
    dist.init_process_group("gloo")
    with OnHost():
        found = {phase: train(phase) for phase in ("plain", "batched", "interleaved", "overlapped", "forward_only")}
    with open(sys.argv[1] + f".{rank}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()

run_ranks(main, 4)
"""
)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipelines]:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    launcher = Launcher(tmp_path_factory.mktemp("megatron"))
    yield Pipelines(launcher, MEGATRON_PROGRAM, timeout_s=180)
    launcher.close()


def test_megatron_is_not_disturbed(megatron: Pipelines) -> None:
    for with_us, bare in zip(megatron.told, megatron.bare, strict=True):
        for phase in MEGATRON_PHASES:
            assert (with_us[phase]["losses"], with_us[phase]["weights"]) == (
                bare[phase]["losses"],
                bare[phase]["weights"],
            )
    assert all((each.info["hooks_off"], each.info["hook_faults"]) == ({}, 0) for each in megatron.writers.values())


@pytest.mark.parametrize("phase", MEGATRON_PHASES)
def test_megatron_receives_link_to_the_send_of_the_nonce_that_they_received(megatron: Pipelines, phase: str) -> None:
    stages = 4 if phase in ("interleaved", "overlapped") else 2
    boundaries = {"forward": stages - 1, "backward": 0 if phase == "forward_only" else stages - 1}
    checked = megatron.check_nonces(phase, 0)
    assert checked == 2 * ITERATIONS * MICROBATCHES * sum(boundaries.values())  # two replicas
    for rank in range(4):
        ranks = megatron.told[rank][phase]["ranks"]
        for row in megatron.rows(phase, rank, Kind.PIPELINE_RECV):
            sender, send = megatron.sender(megatron.writers[rank], row)
            assert (sender, send.peer) == (row.peer, rank)
            assert sender in ranks
            assert send.bytes == row.bytes == 3 * 2 * 4 * 4


@pytest.mark.parametrize("phase", MEGATRON_PHASES)
def test_megatron_microbatches(megatron: Pipelines, phase: str) -> None:
    chunks = 2 if phase in ("interleaved", "overlapped") else 1
    for rank in range(4):
        place = megatron.told[rank][phase]["ranks"].index(rank)
        expected = sorted(
            (2 * chunk + place, microbatch) for chunk in range(chunks) for microbatch in range(MICROBATCHES)
        )
        for call in megatron.rows(phase, rank, Kind.PIPELINE_CALL):
            for kind, steps in ((Kind.PIPELINE_FORWARD, expected), (Kind.PIPELINE_BACKWARD, expected)):
                rows = [row for row in megatron.rows(phase, rank, kind) if row.a == call.a]
                wanted = [] if phase == "forward_only" and kind is Kind.PIPELINE_BACKWARD else steps
                assert sorted((row.b, row.seq) for row in rows) == wanted
        backwards = megatron.writers[rank].of(Kind.BACKWARD)
        per_call = MICROBATCHES * (1 + 1 + 2 + 2)  # custom_backward in the plain phase, torch's in the others
        assert len(backwards) == ITERATIONS * per_call


def test_megatron_order() -> None:
    """The table of the interleaved schedule, worked out by hand: 2 chunks, groups of 2, and a rest of 1."""
    assert megatron_steps(5, 2, 2) == [
        *((0, 0), (1, 0), (0, 1), (1, 1)),
        *((2, 0), (3, 0), (2, 1), (3, 1)),
        *((4, 0), (4, 1)),
    ]
    assert megatron_steps(3, 1, 3) == [(0, 0), (1, 0), (2, 0)]
