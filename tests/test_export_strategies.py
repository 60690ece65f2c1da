"""Which ranks export, and which iterations: decided by rank and by trace id, the same wherever it is decided."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from export_node import Node, check_sum, rank
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from receiver import Receiver
from records import read_spans

from lens_auto import semconv
from lens_auto.strategies import is_rank_sampled

WORLD = 4
RATE = 0.5
SAMPLED = [number for number in range(WORLD) if is_rank_sampled(number, RATE)]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver("http") as made:
        yield made


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def ranks_received(receiver: Receiver) -> list[int]:
    return sorted({span["resource"][semconv.DL_RANK] for span in receiver.spans()})


def make_node(folder: Path, stack: contextlib.ExitStack, *, iterations: int = 5, **extra: object) -> Node:
    node = Node(folder, *(rank(number, iterations, world_size=WORLD, **extra) for number in range(WORLD)))
    stack.callback(node.close)
    return node


def test_ranks_that_were_killed_before_they_could_say(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """The exporter decides for them as they would have."""
    strategies = [
        ("single_rank", {}, [WORLD - 1]),
        ("single_rank", {"NEMO_LENS_EXPORT_RANK": "2"}, [2]),
        ("all_ranks", {}, [0, 1, 2, 3]),
        ("sampled", {"NEMO_LENS_EXPORT_SAMPLE_RATE": str(RATE)}, SAMPLED),
        ("first_rank_per_node", {}, [0]),
    ]
    started = []
    for number, (strategy, more, _) in enumerate(strategies):
        node = make_node(tmp_path / str(number), stack, exports=None)
        recorded = {rank: len(spans) for rank, spans in read_spans(node.run_dir).items()}
        receiver = stack.enter_context(Receiver("http"))
        environment = {**receiver.environment(), **more, "NEMO_LENS_EXPORT_STRATEGY": strategy}
        started.append((node, receiver, recorded, node.start(environment)))
    for (strategy, _, expected), (node, receiver, recorded, exporter) in zip(strategies, started, strict=True):
        assert exporter.wait().code == 0
        assert ranks_received(receiver) == expected, strategy
        assert len(receiver.spans()) == sum(recorded[number] for number in expected)
        assert set(receiver.span_ids().values()) == {1}
        assert node.segments() == []


def test_what_a_rank_said_counts(tmp_path: Path, stack: contextlib.ExitStack, receiver: Receiver) -> None:
    """A rank knows more than the exporter: its program may have registered a strategy."""
    node = Node(tmp_path, *(rank(number, 5, exports=number in (1, 2)) for number in range(WORLD)))
    stack.callback(node.close)
    assert node.start({**receiver.environment(), "NEMO_LENS_EXPORT_STRATEGY": "mine"}).wait().code == 0
    assert ranks_received(receiver) == [1, 2]
    assert node.segments() == []


def test_nobody_knows(tmp_path: Path, stack: contextlib.ExitStack, receiver: Receiver) -> None:
    """A strategy that the program was to register, of ranks that died before: what they recorded is kept."""
    node = make_node(tmp_path, stack, exports=None)
    recorded = node.recorded()
    ended = node.start({**receiver.environment(), "NEMO_LENS_EXPORT_STRATEGY": "mine"}).wait()
    assert (ended.code, receiver.spans()) == (0, [])
    assert node.kept() == len(recorded)
    assert not node.run_folder.exists()


# --- the head sampler -------------------------------------------------------------------------------------------------


def test_the_sampler_keeps_the_same_iterations_on_all_ranks(
    tmp_path: Path, stack: contextlib.ExitStack, receiver: Receiver
) -> None:
    sampler = "parentbased_traceidratio"
    node = make_node(tmp_path, stack, iterations=60)
    recorded = node.recorded()
    environment = {**receiver.environment(), "OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": "0.3"}
    assert node.start(environment).wait().code == 0
    check_sum(node, receiver, recorded)

    kept: dict[int, set[int]] = {}
    for span in receiver.spans():
        if span["name"] == semconv.SPAN_ITERATION:
            kept.setdefault(span["resource"][semconv.DL_RANK], set()).add(span["attributes"][semconv.DL_ITERATION])
    assert sorted(kept) == list(range(WORLD))
    assert len({frozenset(iterations) for iterations in kept.values()}) == 1
    # What the SDK's own sampler says of each trace.
    ratio = TraceIdRatioBased(0.3)
    wanted = {
        span.trace_id
        for span in recorded
        if ratio.should_sample(None, int.from_bytes(span.trace_id, "big"), span.name).decision is not Decision.DROP
    }
    assert Counter(span["trace_id"] for span in receiver.spans()) == Counter(
        span.trace_id.hex() for span in recorded if span.trace_id in wanted
    )
    assert 5 < len(kept[0]) < 35
