"""The rule for iterations and phases, on loops of known timing; every expected number is written down (ms)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from synthetic import MONOTONIC_0, MS, Writer, at, train

from lens_auto.iteration.rule import Iterations, Resume, find_iterations
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.recorder.read import RECORD_DTYPE

X = Phase.OTHER
D = Phase.DATA_LOADING
F = Phase.FORWARD
B = Phase.BACKWARD
S = Phase.OPTIMIZER
E = Phase.EVALUATE
C = Phase.CHECKPOINT


def rule(writer: Writer, **keywords: Any) -> Iterations:
    found = find_iterations(writer.array(), **keywords)
    # Phases tile the iterations, whatever else is true.
    assert np.array_equal(found.phase_ns.sum(axis=1), found.duration_ns)
    assert np.array_equal(found.start_ns[1:], found.end_ns[:-1])
    return found


def bounds(found: Iterations) -> list[tuple[float, float]]:
    return [
        ((start - MONOTONIC_0) / MS, (end - MONOTONIC_0) / MS)
        for start, end in zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)
    ]


def phases(found: Iterations, iteration: int) -> dict[Phase, float]:
    """Phases of an iteration that took any time, in ms."""
    return {phase: ns / MS for phase, ns in zip(Phase, found.phase_ns[iteration].tolist(), strict=True) if ns}


def tiles(found: Iterations, iteration: int) -> list[tuple[Phase, float]]:
    chosen = found.tiles[found.tiles["iteration"] == iteration]
    return [(Phase(int(tile["phase"])), int(tile["end_ns"] - tile["start_ns"]) / MS) for tile in chosen]


def test_plain_loop() -> None:
    writer = train(Writer(), 5)
    found = rule(writer)
    # Loader start at 10, 2 ms; then 11 ms an iteration, of which the last (other) belongs to the next.
    assert bounds(found) == [(10, 22), (22, 33), (33, 44), (44, 55), (55, 66)]
    assert phases(found, 0) == {D: 4, F: 3, B: 4, S: 1}
    assert phases(found, 3) == {X: 1, D: 2, F: 3, B: 4, S: 1}
    assert tiles(found, 3) == [(X, 1), (D, 2), (F, 3), (B, 4), (S, 1)]
    assert found.number.tolist() == [0, 1, 2, 3, 4]
    assert found.mispredicted == 0
    assert len(found.evaluations) == 0
    assert found.thread == 0


def test_records_get_their_true_iteration() -> None:
    writer = train(Writer(), 3)
    found = rule(writer)
    of = {
        kind: [
            int(number)
            for number, record in zip(found.record_iteration, writer.records, strict=True)
            if record["kind"] == kind
        ]
        for kind in Kind
    }
    assert of[Kind.PROCESS_GROUP] == [-1]
    assert of[Kind.MODEL_INIT] == [-1]
    assert of[Kind.LOADER_START] == [0]
    assert of[Kind.FETCH] == [0, 1, 2, -1]  # the exhausted one comes after the last boundary
    assert of[Kind.BACKWARD] == of[Kind.OPTIMIZER_STEP] == of[Kind.COLLECTIVE] == of[Kind.WAIT] == [0, 1, 2]


def test_tiles_name_their_records() -> None:
    writer = train(Writer(), 2)
    found = rule(writer)
    named = [
        (Phase(int(tile["phase"])), None if tile["record"] < 0 else Kind(writer.records[int(tile["record"])]["kind"]))
        for tile in found.tiles[found.tiles["iteration"] == 0]
    ]
    assert named == [
        (D, Kind.LOADER_START),
        (D, Kind.FETCH),
        (F, None),
        (B, Kind.BACKWARD),
        (S, Kind.OPTIMIZER_STEP),
    ]


def test_tiles_outside_of_iterations() -> None:
    found = rule(train(Writer(), 2))
    outside = found.tiles[found.tiles["iteration"] == -1]
    assert outside["phase"].tolist() == [Phase.START_UP, Phase.START_UP, D]


def test_record_numbers_of_the_caller() -> None:
    writer = train(Writer(), 2)
    numbers = np.arange(len(writer.records), dtype=np.int64) + 100_000
    found = rule(writer, numbers=numbers)
    assert set(found.tiles["record"][found.tiles["record"] >= 0].tolist()) <= set(numbers.tolist())


def test_order_of_records_does_not_matter() -> None:
    data = train(Writer(), 6).array()
    numbers = np.arange(len(data), dtype=np.int64)
    shuffled = np.random.default_rng(5).permutation(len(data))
    one, other = find_iterations(data, numbers), find_iterations(data[shuffled], numbers[shuffled])
    assert np.array_equal(one.tiles, other.tiles)
    assert np.array_equal(one.end_ns, other.end_ns)
    assert np.array_equal(one.record_iteration[shuffled], other.record_iteration)


def dcgan(iterations: int = 6) -> Writer:
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(iterations):
        writer.fetch(loader, 2)
        writer.wait(3)  # D on real
        writer.backward(2)
        writer.wait(4)  # G, then D on fake
        writer.backward(2)
        writer.step(0, 1, name="Adam")
        writer.wait(1)  # D again, for G
        writer.backward(5)
        writer.step(1, 1, name="Adam")
    return writer


def test_dcgan_two_optimizers() -> None:
    found = rule(dcgan())
    assert len(found) == 6
    assert bounds(found)[:2] == [(0, 22), (22, 43)]  # 21 ms each, the loader's start in the first
    assert phases(found, 1) == {D: 2, F: 8, B: 9, S: 2}
    assert tiles(found, 1) == [(D, 2), (F, 3), (B, 2), (F, 4), (B, 2), (S, 1), (F, 1), (B, 5), (S, 1)]


def test_dcgan_live_prediction_of_the_first_cycle_is_wrong() -> None:
    writer = dcgan(3)
    boundaries = [record["end_ns"] for record in writer.records if record["kind"] == Kind.OPTIMIZER_STEP]
    for index in (0, 3, 5):  # predicted: after the first step of iteration 0, then right
        ms = (boundaries[index] - MONOTONIC_0) / MS
        writer.add(Kind.BOUNDARY, ms, ms, 0)
    found = rule(writer)
    assert found.extra_boundaries.tolist() == [boundaries[0]]
    assert found.missed_boundaries.tolist() == [0]
    assert found.mispredicted == 2


def test_actor_critic_with_a_shared_backward() -> None:
    writer = Writer()
    for _ in range(7):
        writer.wait(6)  # the environment, then the losses
        writer.backward(3)
        writer.step(0, 1)
        writer.step(1, 2)
    found = rule(writer)
    assert len(found) == 7
    assert bounds(found)[:3] == [(6, 12), (12, 24), (24, 36)]  # the first starts at the first event
    assert phases(found, 1) == {F: 6, B: 3, S: 3}


def steps_of(*optimizers: int) -> Writer:
    """A backward of 2 ms and a step of 1 ms for each optimizer named."""
    writer = Writer()
    for optimizer in optimizers:
        writer.backward(2)
        writer.step(optimizer, 1)
    return writer


@pytest.mark.parametrize(
    ("optimizers", "iterations"),
    [
        # One training after another: a new optimizer takes over, and the old one is not heard of before it repeats.
        ("0 0 0 1 1", "0|0|0|1|1"),
        ("0 0 0 1 1 2 2", "0|0|0|1|1|2|2"),
        ("0 0 0 1 2 1 2", "0|0|0|1 2|1 2"),
        ("0 1 0 1 2 2", "0 1|0 1|2|2"),
        ("0 0 1 1 0 0", "0|0|1|1 0|0"),  # back to an old one: it did step before, so nothing tells
        # Not told by one step alone.
        ("0 0 0 1", "0|0|0 1"),
        # A second one that joins the first.
        ("0 0 0 1 0 1", "0|0|0 1|0 1"),
        # In one cycle from the start.
        ("0 1 1 0 1 1", "0 1|1 0|1|1"),
    ],
)
def test_one_training_after_another(optimizers: str, iterations: str) -> None:
    found = rule(steps_of(*map(int, optimizers.split())))
    expected = [len(each.split()) * 3 for each in iterations.split("|")]
    assert [ns // MS for ns in found.duration_ns.tolist()] == expected


def test_one_training_after_another_read_in_parts() -> None:
    """A reader that goes on after iteration 1 knows which optimizers are new."""
    data = steps_of(0, 0, 0, 1, 1).array()
    later = data[data["start_ns"] >= at(6)]
    resumed = find_iterations(later, resume=Resume(2, at(6), (at(3), at(6)), newest_optimizer=0))
    assert resumed.number.tolist() == [2, 3, 4]
    assert bounds(resumed) == [(6, 9), (9, 12), (12, 15)]


def test_the_beginning_is_gone() -> None:
    """What is left keeps the numbers that it had; the iteration in which it begins is cut off at its start."""
    data = train(Writer(), 6).array()
    whole = find_iterations(data)
    data["iteration"] = np.maximum(whole.record_iteration, 0)
    lost = int(np.flatnonzero(whole.record_iteration == 3)[1])
    left = find_iterations(data[lost:], np.arange(lost, len(data)))
    assert left.number.tolist() == [3, 4, 5]
    assert left.start_ns[0] == data["start_ns"][lost] > whole.start_ns[3]
    assert left.end_ns.tolist() == whole.end_ns[3:].tolist()
    assert left.record_iteration.tolist() == whole.record_iteration[lost:].tolist()


def test_one_optimizer_per_parameter() -> None:
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(4):
        writer.fetch(loader, 1)
        writer.wait(2)
        writer.backward(4)
        for parameter in range(10):
            writer.step(parameter, 0.5)
    found = rule(writer)
    assert len(found) == 4
    assert bounds(found) == [(0, 13), (13, 25), (25, 37), (37, 49)]
    assert phases(found, 2) == {D: 1, F: 2, B: 4, S: 5}


def test_gradient_accumulation_of_4() -> None:
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(3):
        for _ in range(4):
            writer.fetch(loader, 1)
            writer.wait(2)
            writer.backward(3)
            writer.wait(0.5)  # loss.item()
        writer.step(0, 1)
    found = rule(writer)
    assert len(found) == 3
    assert bounds(found) == [(0, 28), (28, 55), (55, 82)]  # 4 * 6.5 + 1
    assert phases(found, 1) == {D: 4, F: 8, B: 12, S: 1, X: 2}


def test_lbfgs_backwards_are_inside_the_step() -> None:
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(3):
        writer.fetch(loader, 2)
        start = writer.now
        for _ in range(5):  # closures
            writer.wait(1)
            writer.backward(2)
        writer.wait(1)
        writer.add(Kind.OPTIMIZER_STEP, start, writer.now, a=0, b=1, name="LBFGS")
        writer.wait(1)
    found = rule(writer)
    assert len(found) == 3
    assert bounds(found) == [(0, 19), (19, 38), (38, 57)]
    assert phases(found, 1) == {X: 1, D: 2, S: 16}
    assert tiles(found, 1) == [(X, 1), (D, 2), (S, 16)]


def test_a_closure_that_is_the_training_step() -> None:
    """As in Lightning: forward and backward run inside `step`."""
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(3):
        writer.fetch(loader, 2)
        start = writer.now
        writer.wait(3)
        writer.backward(4)
        writer.wait(1)
        writer.add(Kind.OPTIMIZER_STEP, start, writer.now, a=0, b=1, name="Adam")
        writer.wait(1)
    found = rule(writer)
    assert bounds(found) == [(0, 11), (11, 22), (22, 33)]
    nanosecond = 1 / MS
    assert phases(found, 1) == pytest.approx({X: 1, D: 2, F: 3 - nanosecond, B: 4, S: 1 + nanosecond}, abs=1e-9)
    assert [(phase, round(ms)) for phase, ms in tiles(found, 1)] == [(X, 1), (D, 2), (S, 0), (F, 3), (B, 4), (S, 1)]


def test_lbfgs_whose_first_closure_starts_in_the_same_nanosecond() -> None:
    writer = Writer()
    for _ in range(3):
        start = writer.now
        writer.backward(2)
        writer.wait(1)
        writer.add(Kind.OPTIMIZER_STEP, start, writer.now, a=0, b=1)
    assert [phases(rule(writer), each) for each in range(3)] == [{S: 3}] * 3


def test_grad_scaler_skip_is_a_step() -> None:
    writer = Writer()
    loader = writer.loader(1)
    for number in range(4):
        writer.fetch(loader, 1)
        writer.wait(2)
        writer.backward(3)
        writer.step(0, 1, flags=Flag.SPAN | (Flag.SKIPPED if number == 2 else 0))
    found = rule(writer)
    assert len(found) == 4
    assert bounds(found) == [(0, 8), (8, 15), (15, 22), (22, 29)]


def with_evaluation(*, exhausted: bool) -> Writer:
    """20 iterations; after every fifth an evaluation of 3 batches, left early or not."""
    writer = Writer()
    training = writer.loader(1)
    for number in range(1, 21):
        writer.fetch(training, 1)
        writer.wait(2)
        writer.backward(3)
        writer.step(0, 1)
        if number % 5 == 0:
            writer.wait(1)
            evaluation = writer.loader(1)
            for _ in range(3):
                writer.fetch(evaluation, 1)
                writer.wait(4)
            if exhausted:
                writer.exhaust(evaluation, 1)
            writer.wait(1)
    return writer


def test_evaluation_every_5_iterations() -> None:
    found = rule(with_evaluation(exhausted=True))
    assert len(found) == 20
    assert found.evaluations["batches"].tolist() == [3, 3, 3, 3]
    assert found.evaluations["iteration"].tolist() == [5, 10, 15, -1]
    assert ((found.evaluations["end_ns"] - found.evaluations["start_ns"]) / MS).tolist() == [17] * 4  # 1 + 3 * 5 + 1
    assert found.evaluations["exhausted"].tolist() == [True] * 4
    assert phases(found, 5) == {X: 2, E: 17, D: 1, F: 2, B: 3, S: 1}
    assert tiles(found, 5) == [(X, 1), (E, 17), (X, 1), (D, 1), (F, 2), (B, 3), (S, 1)]
    assert (found.duration_ns[[4, 5, 6]] / MS).tolist() == [7, 26, 7]
    assert (found.training_ns[[4, 5, 6]] / MS).tolist() == [7, 9, 7]


def test_evaluation_left_early_lasts_until_the_next_event() -> None:
    writer = with_evaluation(exhausted=False)
    found = rule(writer, end_ns=at(writer.now + 2))
    assert len(found) == 20
    assert found.evaluations["batches"].tolist() == [3, 3, 3, 3]
    # Starting the loader 1, three times 5, then 1 until the next fetch; the last until the end of what is known.
    assert ((found.evaluations["end_ns"] - found.evaluations["start_ns"]) / MS).tolist() == [17, 17, 17, 19]
    assert found.evaluations["exhausted"].tolist() == [False] * 4
    assert phases(found, 5) == {X: 1, E: 17, D: 1, F: 2, B: 3, S: 1}


def test_evaluation_before_the_first_step() -> None:
    writer = Writer()
    sanity = writer.loader(1)
    for _ in range(2):
        writer.fetch(sanity, 1)
        writer.wait(3)
    writer.exhaust(sanity, 1)
    training = writer.loader(1)
    writer.fetch(training, 1)
    writer.wait(2)
    writer.backward(3)
    writer.step()
    found = rule(writer)
    assert len(found) == 1
    assert phases(found, 0) == {E: 10, D: 2, F: 2, B: 3, S: 1}


def test_a_single_batch_pass_left_open_is_training() -> None:
    writer = Writer()
    for _ in range(5):
        loader = writer.loader(1)
        writer.fetch(loader, 2)  # next(iter(loader))
        writer.wait(2)
        writer.backward(3)
        writer.step()
    found = rule(writer)
    assert len(found) == 5
    assert len(found.evaluations) == 0
    assert phases(found, 2) == {D: 3, F: 2, B: 3, S: 1}


def test_a_single_batch_pass_fetched_to_its_end() -> None:
    writer = Writer()
    training = writer.loader(1)
    for _ in range(2):
        writer.fetch(training, 1)
        writer.wait(2)
        writer.backward(3)
        writer.step()
        evaluation = writer.loader(1)
        writer.fetch(evaluation, 1)
        writer.wait(5)
        writer.exhaust(evaluation, 1)
    writer.exhaust(training, 1)
    # A loader of one batch, prefetched to its end before the backward: training.
    one = writer.loader(1)
    writer.fetch(one, 1)
    writer.exhaust(one, 1)
    writer.wait(2)
    writer.backward(3)
    writer.step()
    found = rule(writer)
    assert len(found) == 3
    assert found.evaluations["batches"].tolist() == [1, 1]
    assert found.evaluations["loader"].tolist() == [2, 3]
    assert phases(found, 1) == {E: 8, D: 1, F: 2, B: 3, S: 1}
    assert phases(found, 2) == {E: 8, D: 4, F: 2, B: 3, S: 1}


def test_an_empty_pass_is_no_evaluation() -> None:
    writer = train(Writer(), 2)
    writer.exhaust(writer.loader(1), 1)
    assert len(rule(writer).evaluations) == 0


def test_accelerate_prefetches_by_one() -> None:
    """Each batch is fetched before the one before it is used; the last fetch ends the pass before the last forward."""
    writer = Writer()
    loader = writer.loader(1)
    writer.fetch(loader, 2)
    for number in range(4):
        if number < 3:
            writer.fetch(loader, 2)
        else:
            writer.exhaust(loader, 1)
        writer.wait(3)
        writer.backward(4)
        writer.step()
    found = rule(writer)
    assert len(found) == 4
    assert len(found.evaluations) == 0
    assert phases(found, 0) == {D: 5, F: 3, B: 4, S: 1}
    assert phases(found, 2) == {D: 2, F: 3, B: 4, S: 1}
    assert phases(found, 3) == {D: 1, F: 3, B: 4, S: 1}


@pytest.mark.parametrize(("thread", "flag"), [(0, Flag.IN_BACKWARD), (3, Flag.IN_BACKWARD), (3, 0)])
def test_step_inside_backward(thread: int, flag: int) -> None:
    """Hooks that step each parameter's optimizer as its gradient is ready; on CUDA they run in autograd's threads."""
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(4):
        writer.fetch(loader, 1)
        writer.wait(2)
        start = writer.now
        for parameter in range(3):
            writer.wait(1)
            writer.take(Kind.OPTIMIZER_STEP, 0.5, Flag.SPAN | flag, a=parameter, b=1, name="SGD", thread=thread)
        writer.wait(0.5)
        writer.add(Kind.BACKWARD, start, writer.now)
        writer.wait(1)
    found = rule(writer)
    assert len(found) == 4
    assert found.thread == 0
    assert bounds(found) == [(0, 9), (9, 18), (18, 27), (27, 36)]  # each ends with its backward
    assert phases(found, 1) == {X: 1, D: 1, F: 2, B: 5}


def test_step_inside_backward_predicted_live_at_the_step() -> None:
    writer = Writer()
    for _ in range(3):
        start = writer.now
        writer.wait(1)
        writer.take(Kind.OPTIMIZER_STEP, 1, Flag.IN_BACKWARD, a=0, b=1)
        writer.boundary()
        writer.wait(1)
        writer.add(Kind.BACKWARD, start, writer.now)
    found = rule(writer)
    assert bounds(found) == [(0, 3), (3, 6), (6, 9)]
    assert found.mispredicted == 0


def test_only_counted_steps_make_iterations() -> None:
    """WGAN: five critic steps for one of the generator, NEMO_LENS_ITERATION_OPTIMIZER=last."""
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(3):
        for _ in range(5):
            writer.fetch(loader, 1)
            writer.wait(1)
            writer.backward(1)
            writer.step(0, 1, b=0)
        writer.wait(1)
        writer.backward(1)
        writer.step(1, 1, b=1)
    found = rule(writer)
    assert len(found) == 3
    assert bounds(found) == [(0, 24), (24, 47), (47, 70)]
    assert phases(found, 1) == {D: 5, F: 6, B: 6, S: 6}


def test_checkpoint_and_evaluation_are_kept_apart() -> None:
    writer = train(Writer(), 2)
    writer.take(Kind.CHECKPOINT_SAVE, 20, name="model.pt", bytes=10)
    evaluation = writer.loader(1)
    writer.fetch(evaluation)
    writer.fetch(evaluation)
    writer.take(Kind.CHECKPOINT_SAVE, 6, name="best.pt", bytes=10)
    writer.exhaust(evaluation)
    loader = writer.loader(1)
    writer.fetch(loader)
    writer.wait(3)
    writer.backward()
    writer.step()
    found = rule(writer)
    assert len(found) == 3
    # The checkpoint in the middle of the evaluation is evaluation: 1 + 2 + 2 + 6 + 1.
    assert phases(found, 2) == {X: 1, C: 20, E: 12, D: 4, F: 3, B: 4, S: 1}
    assert found.training_ns[2] == 13 * MS


def test_start_up_ends_with_the_last_set_up_record() -> None:
    writer = Writer()
    loader = writer.loader(1)
    writer.fetch(loader, 1)  # looks at a batch to size the model
    writer.take(Kind.MODEL_INIT, 5, name="DistributedDataParallel")
    writer.take(Kind.CHECKPOINT_LOAD, 5, name="model.pt")
    writer.wait(1)
    for _ in range(2):
        writer.fetch(loader, 1)
        writer.wait(1)
        writer.backward(1)
        writer.step()
    found = rule(writer)
    assert bounds(found) == [(13, 17), (17, 21)]
    assert phases(found, 0) == {D: 1, F: 1, B: 1, S: 1}


def test_steps_in_another_thread() -> None:
    """The program hands the optimizer's step to a thread, and waits for it."""
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(3):
        writer.fetch(loader, 1)
        writer.wait(2)
        writer.backward(3)
        writer.take(Kind.OPTIMIZER_STEP, 1, a=0, b=1, name="Adam", thread=5)
        writer.wait(1)
    found = rule(writer)
    assert found.thread == 0
    assert bounds(found) == [(0, 8), (8, 16), (16, 24)]  # the first starts the loader
    assert phases(found, 1) == {X: 1, D: 1, F: 2, B: 3, S: 1}


def test_threads_that_do_not_train_are_left_out() -> None:
    writer = train(Writer(), 3)
    plain = rule(writer)
    for ms in range(10, 40, 3):
        writer.add(Kind.FETCH, ms, ms + 2, thread=1, a=77)
        writer.add(Kind.CHECKPOINT_SAVE, ms, ms + 2, thread=2)
    found = rule(writer)
    assert np.array_equal(found.tiles, plain.tiles)


def test_events_without_an_end_last_until_the_next() -> None:
    writer = Writer()
    loader = writer.loader(1)
    for number in range(3):
        writer.fetch(loader, 1)
        writer.wait(2)
        writer.backward(3)
        if number == 1:  # it raised, the program caught it 2 ms later
            writer.add(Kind.OPTIMIZER_STEP, writer.now, None, Flag.FAILED, a=0, b=1)
            writer.wait(2)
        else:
            writer.step()
    found = rule(writer)
    assert bounds(found) == [(0, 8), (8, 16), (16, 23)]
    assert phases(found, 1) == {D: 1, F: 2, B: 3, S: 2}


def test_no_steps_no_iterations() -> None:
    writer = Writer()
    loader = writer.loader(1)
    for _ in range(3):
        writer.fetch(loader, 1)
        writer.wait(1)
    writer.exhaust(loader, 1)
    found = rule(writer)
    assert len(found) == 0
    assert found.evaluations["batches"].tolist() == [3]
    assert found.record_iteration.tolist() == [-1] * 5


def test_no_records() -> None:
    found = find_iterations(np.empty(0, dtype=RECORD_DTYPE))
    assert len(found) == 0
    assert found.thread == -1
    assert len(found.tiles) == len(found.evaluations) == found.mispredicted == 0


def test_ten_thousand_iterations_take_about_a_second() -> None:
    one = train(Writer(), 1, comm=False)
    body = one.array()[2:]  # loader start, fetch, backward, step, boundary, exhausted
    comm = np.zeros(36, dtype=RECORD_DTYPE)
    comm["kind"] = Kind.COLLECTIVE
    comm["start_ns"] = at(14)
    comm["end_ns"] = at(14.1)
    iteration = np.concatenate([body[1:5], comm])
    data = np.tile(iteration, 10_000)
    shift = np.repeat(np.arange(10_000, dtype=np.uint64) * np.uint64(11 * MS), len(iteration))
    data["start_ns"] += shift
    data["end_ns"] += shift
    assert len(data) == 400_000
    begin = time.perf_counter()
    found = find_iterations(data)
    took_s = time.perf_counter() - begin
    assert len(found) == 10_000
    assert found.mispredicted == 0
    assert took_s < 3, f"{took_s:.2f} s"  # about 0.1 s on an idle core
