"""Which ranks export: a registry of named strategies, and the hash by which ranks are sampled."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lens_auto.config import NemoLensConfig

# (configuration, global rank, world size) -> whether this rank exports. Asked once per process.
ExportStrategy = Callable[["NemoLensConfig", int, int], bool]

_MASK_64 = (1 << 64) - 1


def rank_fraction(rank: int) -> float:
    """A number in [0, 1) that depends on the rank alone: the same in every process and run (splitmix64's mixer)."""
    mixed = (rank + 1) * 0x9E3779B97F4A7C15 & _MASK_64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
    mixed ^= mixed >> 31
    return (mixed >> 11) / (1 << 53)  # 53 bits, so that no value rounds up to 1


def is_rank_sampled(rank: int, sample_rate: float) -> bool:
    """Whether `rank` is among the sampled share. Raising the rate only adds ranks; 0 has none, 1 has all."""
    return rank_fraction(rank) < sample_rate


def _single_rank(config: NemoLensConfig, rank: int, world_size: int) -> bool:
    return rank == (world_size - 1 if config.export_rank == -1 else config.export_rank)


def _all_ranks(config: NemoLensConfig, rank: int, world_size: int) -> bool:
    return True


def _sampled(config: NemoLensConfig, rank: int, world_size: int) -> bool:
    return is_rank_sampled(rank, config.export_sample_rate)


def _first_rank_per_node(config: NemoLensConfig, rank: int, world_size: int) -> bool:
    return (os.environ.get("LOCAL_RANK", "").strip() or "0") == "0"


_registry: dict[str, ExportStrategy] = {
    "single_rank": _single_rank,
    "all_ranks": _all_ranks,
    "sampled": _sampled,
    "first_rank_per_node": _first_rank_per_node,
}
_lock = threading.Lock()

BUILTIN_STRATEGIES: frozenset[str] = frozenset(_registry)


def register_export_strategy(name: str, fn: ExportStrategy, *, allow_override: bool = False) -> None:
    """Makes `fn` selectable as `export_strategy=name`. Call it before telemetry is set up.

    Raises:
        ValueError: The name is empty, or taken while `allow_override` is False.
    """
    if not name or not name.strip():
        raise ValueError("an export strategy needs a name, got an empty one")
    with _lock:
        if name in _registry and not allow_override:
            raise ValueError(f"export strategy {name!r} exists already; pass allow_override=True to replace it")
        _registry[name] = fn


def unregister_export_strategy(name: str) -> None:
    """Removes a strategy that was registered.

    Raises:
        ValueError: The name is a built-in one or not registered.
    """
    if name in BUILTIN_STRATEGIES:
        raise ValueError(f"export strategy {name!r} is built in and cannot be removed")
    with _lock:
        if name not in _registry:
            raise ValueError(f"export strategy {name!r} is not registered; there are: {', '.join(sorted(_registry))}")
        del _registry[name]


def registered_strategies() -> list[str]:
    """The names of all strategies, sorted."""
    with _lock:
        return sorted(_registry)


def get_export_strategy(name: str) -> ExportStrategy:
    """The strategy called `name`.

    Raises:
        ValueError: There is none; the message lists those there are.
    """
    with _lock:
        strategy = _registry.get(name)
        if strategy is None:
            raise ValueError(f"unknown export strategy {name!r}; there are: {', '.join(sorted(_registry))}")
        return strategy
