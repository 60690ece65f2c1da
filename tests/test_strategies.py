"""Which ranks export, and the sampler that uses the same hash."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler

from lens_auto.config import NemoLensConfig
from lens_auto.sampling import RankAwareSampler
from lens_auto.strategies import (
    BUILTIN_STRATEGIES,
    get_export_strategy,
    rank_fraction,
    register_export_strategy,
    registered_strategies,
    unregister_export_strategy,
)

BUILTIN = ["all_ranks", "first_rank_per_node", "sampled", "single_rank"]


@pytest.fixture(autouse=True)
def restore_registry() -> Iterator[None]:
    originals = {name: get_export_strategy(name) for name in BUILTIN}
    yield
    for name in registered_strategies():
        if name not in BUILTIN:
            unregister_export_strategy(name)
    for name, strategy in originals.items():
        register_export_strategy(name, strategy, allow_override=True)


def exporting(config: NemoLensConfig, world_size: int) -> list[int]:
    strategy = get_export_strategy(config.export_strategy)
    return [rank for rank in range(world_size) if strategy(config, rank, world_size)]


def test_builtin_names() -> None:
    assert registered_strategies() == BUILTIN
    assert frozenset(BUILTIN) == BUILTIN_STRATEGIES


@pytest.mark.parametrize(("export_rank", "expected"), [(-1, [7]), (0, [0]), (3, [3]), (8, [])])
def test_single_rank(export_rank: int, expected: list[int]) -> None:
    assert exporting(NemoLensConfig(export_rank=export_rank), 8) == expected


def test_all_ranks() -> None:
    assert exporting(NemoLensConfig(export_strategy="all_ranks"), 4) == [0, 1, 2, 3]


def sampled(rate: float, world_size: int) -> list[int]:
    return exporting(NemoLensConfig(export_strategy="sampled", export_sample_rate=rate), world_size)


def test_sampled() -> None:
    assert sampled(0.0, 1000) == []
    assert sampled(1.0, 1000) == list(range(1000))
    # Written down: the choice must not change between versions, processes or machines.
    assert sampled(0.25, 32) == [2, 4, 6, 8, 18, 31]
    quarter, half = sampled(0.25, 4096), sampled(0.5, 4096)
    assert set(quarter) < set(half)
    assert abs(len(quarter) / 4096 - 0.25) < 0.02
    assert abs(len(half) / 4096 - 0.5) < 0.02


def test_the_hash_is_splitmix64() -> None:
    # First outputs of splitmix64 seeded with 0, as published with the generator.
    assert [rank_fraction(rank) for rank in range(3)] == [
        (output >> 11) / 2**53 for output in (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    ]


@pytest.mark.parametrize(
    ("local_rank", "expected"), [(None, True), ("", True), ("0", True), (" 0 ", True), ("1", False), ("x", False)]
)
def test_first_rank_per_node(monkeypatch: pytest.MonkeyPatch, local_rank: str | None, expected: bool) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert get_export_strategy("first_rank_per_node")(NemoLensConfig(), 5, 8) is expected


def test_register_and_unregister() -> None:
    def first_two(config: NemoLensConfig, rank: int, world_size: int) -> bool:
        return rank < 2

    register_export_strategy("first_two", first_two)
    assert registered_strategies() == ["all_ranks", "first_rank_per_node", "first_two", "sampled", "single_rank"]
    assert exporting(NemoLensConfig(export_strategy="first_two"), 4) == [0, 1]
    unregister_export_strategy("first_two")
    assert registered_strategies() == BUILTIN


def test_replacing_needs_allow_override() -> None:
    def none(config: NemoLensConfig, rank: int, world_size: int) -> bool:
        return False

    with pytest.raises(ValueError) as raised:
        register_export_strategy("all_ranks", none)
    assert str(raised.value) == "export strategy 'all_ranks' exists already; pass allow_override=True to replace it"
    register_export_strategy("all_ranks", none, allow_override=True)
    assert exporting(NemoLensConfig(export_strategy="all_ranks"), 4) == []


@pytest.mark.parametrize("name", ["", "  "])
def test_a_name_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        register_export_strategy(name, lambda config, rank, world_size: True)
    assert registered_strategies() == BUILTIN


def test_what_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match=r"^export strategy 'sampled' is built in and cannot be removed$"):
        unregister_export_strategy("sampled")
    with pytest.raises(ValueError, match=r"^export strategy 'mine' is not registered; there are: all_ranks, "):
        unregister_export_strategy("mine")


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError) as raised:
        get_export_strategy("mine")
    assert str(raised.value) == (
        "unknown export strategy 'mine'; there are: all_ranks, first_rank_per_node, sampled, single_rank"
    )


# --- the sampler ------------------------------------------------------------------------------------------------------


def test_the_sampler_keeps_the_ranks_that_the_strategy_samples() -> None:
    kept = [
        rank
        for rank in range(64)
        if RankAwareSampler(rank, 64, 0.25).should_sample(None, 1, "s").decision is Decision.RECORD_AND_SAMPLE
    ]
    assert kept == sampled(0.25, 64)


@pytest.mark.parametrize(("rate", "expected"), [(1.0, ["parent", "child"]), (0.0, [])])
def test_the_sampler_in_a_provider(rate: float, expected: list[str]) -> None:
    sampler = RankAwareSampler(rank=2, world_size=4, sample_rate=rate)
    assert isinstance(sampler, Sampler)
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("t")
    with tracer.start_as_current_span("parent", attributes={"a": 1}), tracer.start_as_current_span("child"):
        pass
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert sorted(spans) == sorted(expected)
    if expected:
        assert dict(spans["parent"].attributes or {}) == {"a": 1}


def test_the_samplers_description_and_rate() -> None:
    assert RankAwareSampler(1, 8, 0.5).get_description() == "RankAwareSampler{rank=1, world_size=8, sample_rate=0.5}"
    with pytest.raises(ValueError, match=r"^sample_rate must lie in \[0, 1\], got 1.5$"):
        RankAwareSampler(0, 1, 1.5)


def test_the_module_needs_no_sdk() -> None:
    script = "import sys, lens_auto.sampling, lens_auto.strategies; print('opentelemetry.sdk' in sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"
