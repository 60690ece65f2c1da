"""What counts as an iteration, in the training loops that people write: the numbers expected are written down here.

One program starts and imports torch once; each scenario is a process of its own with a run directory of its own.
"""

from __future__ import annotations

import textwrap

import pytest
from launch import INSTRUMENT_HERE, PYTHON, Launcher, Run
from records import Writer, read_run

from lens_auto.recorder.layout import Flag, Kind, Phase

SCENARIOS = '''
import torch
from torch.utils.data import DataLoader, TensorDataset

def parameters(count=1):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]

def loss_of(*parameters):
    return sum((parameter ** 2).sum() for parameter in parameters)

def loader(batches):
    return DataLoader(TensorDataset(torch.ones(batches, 2)), batch_size=1)

def dcgan():
    """Two optimizers, one loader: discriminator on real and fake, then the generator. 6 batches."""
    discriminator, generator = parameters(2)
    of_discriminator = torch.optim.Adam([discriminator])
    of_generator = torch.optim.Adam([generator])
    for (real,) in loader(6):
        of_discriminator.zero_grad()
        (discriminator * real).sum().backward()
        (discriminator * generator.detach()).sum().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        (discriminator * generator).sum().backward()
        of_generator.step()

def actor_critic():
    """One backward, two optimizers. 5 updates."""
    actor, critic = parameters(2)
    of_actor, of_critic = torch.optim.Adam([actor]), torch.optim.Adam([critic])
    for _ in range(5):
        (loss_of(actor) + 0.5 * loss_of(critic)).backward()
        of_actor.step()
        of_critic.step()

def optimizer_per_parameter():
    """Four optimizers that step one after the other. 5 updates."""
    weights = parameters(4)
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for _ in range(5):
        loss_of(*weights).backward()
        for optimizer in optimizers:
            optimizer.step()

def optimizer_in_backward():
    """Four optimizers that step from gradient hooks, inside backward. 5 updates."""
    weights = parameters(4)
    for weight in weights:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(5):
        loss_of(*weights).backward()

def accumulation():
    """20 microbatches, a step after every fourth: 5 iterations."""
    weights = parameters()
    optimizer = torch.optim.AdamW(weights)
    for index, (batch,) in enumerate(loader(20)):
        (loss_of(*weights) * batch.sum() / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

def lbfgs():
    """4 steps, whose closure runs forward and backward several times."""
    weights = parameters()
    optimizer = torch.optim.LBFGS(weights, lr=0.1, max_iter=5)
    def closure():
        optimizer.zero_grad()
        loss = (loss_of(*weights) - 1) ** 2
        loss.backward()
        return loss
    for _ in range(4):
        optimizer.step(closure)

def grad_scaler():
    """5 steps through a GradScaler; the third finds an inf and is skipped."""
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(*weights)).backward()
        if index == 2:
            weights[0].grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()

def grad_scaler_unscaled():
    """The same with gradients unscaled and clipped before the step."""
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(*weights)).backward()
        if index == 1:
            weights[0].grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(optimizer)
        scaler.update()

def evaluation():
    """15 batches; after every fifth a pass over 4 others, with gradients on."""
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for index, (batch,) in enumerate(loader(15), 1):
        (loss_of(*weights) * batch.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index % 5 == 0:
            for (held_out,) in loader(4):
                loss_of(*weights) * held_out.sum()

def scheduler():
    """A learning-rate scheduler wraps `step`; two epochs of 3 batches."""
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        for (batch,) in loader(3):
            (loss_of(*weights) * batch.sum()).backward()
            optimizer.step()
        schedule.step()

def trainings():
    """One training after another, each with an optimizer of its own: 4, 3 and 2 steps."""
    for kind, steps in ((torch.optim.SGD, 4), (torch.optim.Adam, 3), (torch.optim.SGD, 2)):
        weights = parameters()
        optimizer = kind(weights, lr=0.1)
        for (batch,) in loader(steps):
            (loss_of(*weights) * batch.sum()).backward()
            optimizer.step()

class Fragile(torch.optim.SGD):
    failing = ()
    calls = 0
    def step(self, closure=None):
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise ArithmeticError("as told")
        return super().step(closure)

def fragile(failing):
    weights = parameters()
    optimizer = Fragile(weights, lr=0.1)
    optimizer.failing = failing
    for (batch,) in loader(5):
        (loss_of(*weights) * batch.sum()).backward()
        try:
            optimizer.step()
        except ArithmeticError:
            pass

def step_raises():
    """The third of 5 steps raises; the program goes on."""
    fragile({2})

def last_step_raises():
    """The last of 5 steps raises."""
    fragile({4})

def critic_steps():
    """WGAN: three steps of the critic for one of the generator, 4 times."""
    critic, generator = parameters(2)
    of_critic = torch.optim.RMSprop([critic])
    of_generator = torch.optim.Adam([generator])
    for _ in range(4):
        for _ in range(3):
            (critic * generator.detach()).sum().backward()
            of_critic.step()
        (critic * generator).sum().backward()
        of_generator.step()
'''

# Each scenario in a forked child with a run id, and so a run directory, of its own.
EACH = """
import multiprocessing, os
import torch._dynamo  # the first step of an optimizer imports it: once here, not in every child

def scenario(name, setting):
    os.environ["NEMO_LENS_RUN_ID"] = name
    if setting is not None:
        os.environ["NEMO_LENS_ITERATION_OPTIMIZER"] = setting
    START()
    globals()[name.split(".")[0]]()

for name, setting in NAMES.items():
    child = multiprocessing.get_context("fork").Process(target=scenario, args=(name, setting))
    child.start()
    child.join()
    assert child.exitcode == 0, name
"""

ALONE = [
    "dcgan",
    "actor_critic",
    "optimizer_per_parameter",
    "optimizer_in_backward",
    "accumulation",
    "lbfgs",
    "grad_scaler",
    "grad_scaler_unscaled",
    "evaluation",
    "scheduler",
    "trainings",
    "step_raises",
    "last_step_raises",
    "critic_steps",
]
SETTINGS = {
    "critic_steps.first": "first",
    "critic_steps.last": "last",
    "critic_steps.class": "Adam",
    "dcgan.last": "last",
    "critic_steps.nobody": "Adagrad",
}


@pytest.fixture(scope="module")
def zero_code(launch_once: Launcher) -> Run:
    """All scenarios under opentelemetry-instrument."""
    names = dict.fromkeys(ALONE)
    source = SCENARIOS + f"START = lambda: None\nNAMES = {names}\n" + EACH
    return launch_once.instrumented(source).check(run_dirs=len(ALONE))


def the_writer(run: Run, name: str) -> Writer:
    (writer,) = read_run(run.cwd / "lens-runs" / name)
    assert writer.info["hook_faults"] == 0
    assert writer.info["hooks_off"] == {}
    return writer


def per_iteration(writer: Writer, kind: Kind) -> list[int]:
    """How many records of a kind each iteration holds."""
    counts = [0] * len(writer.iterations)
    for row, iteration in zip(writer.rows, writer.iterations.record_iteration.tolist(), strict=True):
        if row.kind is kind:
            assert iteration >= 0, row
            counts[iteration] += 1
    return counts


# name -> iterations, backwards in each, steps in each, live boundaries too many, live boundaries missing
EXPECTED = {
    # The first step is taken for the whole first iteration, which costs one boundary too many and one missing.
    "dcgan": (6, 3, 2, 1, 1),
    "actor_critic": (5, 1, 2, 1, 1),
    "optimizer_per_parameter": (5, 1, 4, 1, 1),
    "optimizer_in_backward": (5, 1, 4, 1, 1),
    "accumulation": (5, 4, 1, 0, 0),
    "grad_scaler": (5, 1, 1, 0, 0),
    "grad_scaler_unscaled": (4, 1, 1, 0, 0),
    "evaluation": (15, 1, 1, 0, 0),
    "scheduler": (6, 1, 1, 0, 0),
    "trainings": (9, 1, 1, 0, 0),
    "step_raises": (5, 1, 1, 0, 0),
    "last_step_raises": (5, 1, 1, 0, 0),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_iterations(zero_code: Run, name: str) -> None:
    iterations, backwards, steps, extra, missed = EXPECTED[name]
    writer = the_writer(zero_code, name)
    assert len(writer.iterations) == iterations
    assert per_iteration(writer, Kind.BACKWARD) == [backwards] * iterations
    assert per_iteration(writer, Kind.OPTIMIZER_STEP) == [steps] * iterations
    assert len(writer.iterations.extra_boundaries) == extra
    assert len(writer.iterations.missed_boundaries) == missed
    # Phases tile the iteration.
    assert writer.iterations.phase_ns.sum(axis=1).tolist() == writer.iterations.duration_ns.tolist()


def test_optimizers_are_named(zero_code: Run) -> None:
    steps = the_writer(zero_code, "dcgan").of(Kind.OPTIMIZER_STEP)
    assert [(row.name, row.a) for row in steps] == [("Adam", 0), ("Adam", 1)] * 6


def test_steps_inside_backward(zero_code: Run) -> None:
    """They are part of the backward, which closes the iteration at its end."""
    writer = the_writer(zero_code, "optimizer_in_backward")
    steps = writer.of(Kind.OPTIMIZER_STEP)
    assert all(row.flags & Flag.IN_BACKWARD for row in steps)
    assert set(writer.phase_ms(Phase.OPTIMIZER)) == {0.0}
    backwards = writer.of(Kind.BACKWARD)
    assert writer.iterations.end_ns.tolist() == [row.end_ns for row in backwards]


def test_lbfgs(zero_code: Run) -> None:
    """The closure's backwards belong to the step."""
    writer = the_writer(zero_code, "lbfgs")
    assert len(writer.iterations) == 4
    assert writer.iterations.mispredicted == 0
    steps = writer.of(Kind.OPTIMIZER_STEP)
    assert [row.name for row in steps] == ["LBFGS"] * 4
    backwards = writer.of(Kind.BACKWARD)
    assert len(backwards) >= 8  # some closures more than once
    for backward in backwards:
        assert any(step.start_ns <= backward.start_ns and backward.end_ns <= step.end_ns for step in steps)
    assert set(writer.phase_ms(Phase.BACKWARD)) == {0.0}


@pytest.mark.parametrize(("name", "skipped"), [("grad_scaler", [2]), ("grad_scaler_unscaled", [1])])
def test_grad_scaler_skips(zero_code: Run, name: str, skipped: list[int]) -> None:
    steps = the_writer(zero_code, name).of(Kind.OPTIMIZER_STEP)
    assert [index for index, row in enumerate(steps) if row.flags & Flag.SKIPPED] == skipped
    assert {row.name for row in steps} == {"SGD"}


def test_evaluation_with_gradients_on(zero_code: Run) -> None:
    writer = the_writer(zero_code, "evaluation")
    found = writer.iterations.evaluations
    assert found["batches"].tolist() == [4, 4, 4]
    # After iterations 4 and 9, so in 5 and 10; after the last there is none.
    assert found["iteration"].tolist() == [5, 10, -1]
    with_evaluation = [index for index, spent in enumerate(writer.phase_ms(Phase.EVALUATE)) if spent > 0]
    assert with_evaluation == [5, 10]


@pytest.mark.parametrize(("name", "failed"), [("step_raises", 2), ("last_step_raises", 4)])
def test_step_that_raises(zero_code: Run, name: str, failed: int) -> None:
    """It is a step all the same; its end is not stretched over what the program did next."""
    writer = the_writer(zero_code, name)
    steps = writer.of(Kind.OPTIMIZER_STEP)
    assert [index for index, row in enumerate(steps) if row.flags & Flag.FAILED] == [failed]
    following = [row for row in writer.of(Kind.FETCH, Kind.BACKWARD) if row.start_ns > steps[failed].start_ns]
    assert steps[failed].end_ns <= following[0].start_ns


def test_critic_steps_by_repetition(zero_code: Run) -> None:
    """A documented limit: each repeated step of the critic is an iteration, 3 for one of the generator."""
    writer = the_writer(zero_code, "critic_steps")
    assert len(writer.iterations) == 12


@pytest.fixture(scope="module")
def with_settings(launch_once: Launcher) -> Run:
    """Scenarios that need NEMO_LENS_ITERATION_OPTIMIZER, each instrumented in its child, after torch was imported."""
    source = SCENARIOS + INSTRUMENT_HERE + f"START = instrument\nNAMES = {SETTINGS}\n" + EACH
    program = launch_once.program(source, "settings.py")
    run = launch_once.run(*PYTHON, program)
    assert run.code == 0, run.stderr
    return run


@pytest.mark.parametrize(
    ("name", "iterations"),
    [
        ("critic_steps.first", 12),  # every step of the critic
        ("critic_steps.last", 4),  # every step of the generator
        ("critic_steps.class", 4),
        ("dcgan.last", 6),
        ("critic_steps.nobody", 0),  # no optimizer of this class
    ],
)
def test_chosen_optimizer(with_settings: Run, name: str, iterations: int) -> None:
    writer = the_writer(with_settings, name)
    assert writer.info["iteration_optimizer"] == SETTINGS[name]
    assert len(writer.iterations) == iterations


def test_names_in_the_program_text() -> None:
    """Every scenario is run, and every one that runs is looked at."""
    defined = {line.split("(")[0].removeprefix("def ") for line in SCENARIOS.splitlines() if line.startswith("def ")}
    assert defined - {"parameters", "loss_of", "loader", "fragile"} == set(ALONE)
    assert set(ALONE) - set(EXPECTED) == {"lbfgs", "critic_steps"}
    assert textwrap.dedent(SCENARIOS) == SCENARIOS
