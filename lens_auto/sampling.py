"""A sampler that keeps all spans of some ranks and none of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_auto.strategies import is_rank_sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
    from opentelemetry.trace import Link, SpanKind, TraceState
    from opentelemetry.util.types import Attributes
else:
    # A rank that makes no spans of its own never pays for the SDK: the first instance registers with its `Sampler`.
    Sampler = object

# Far from every rank there is: the hash of a rank moved by it has nothing to do with the hash of the rank.
_LAYERED_OFFSET = 1 << 40


class RankAwareSampler(Sampler):
    """Keeps all spans of this rank, or drops them all, by the hash that the export strategy `sampled` uses.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks.
        sample_rate: Share of ranks to keep, from 0 to 1.
        root: Decides about traces that start on a rank that is kept; None: all of them are kept. With a root, a span
            that has a parent follows its parent, also on a rank that is dropped, as `ParentBased` does: a trace that
            another process started does not break here.
        layered: Decide by a hash of its own. Over the export strategy `sampled`, the strategy's hash would keep every
            rank that the strategy left.

    Raises:
        ValueError: `sample_rate` lies outside [0, 1].
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        sample_rate: float = 1.0,
        *,
        root: Sampler | None = None,
        layered: bool = False,
    ) -> None:
        if not 0.0 <= sample_rate <= 1.0:
            raise ValueError(f"sample_rate must lie in [0, 1], got {sample_rate!r}")
        from opentelemetry.sdk.trace import sampling

        sampling.Sampler.register(RankAwareSampler)
        self._description = f"RankAwareSampler{{rank={rank}, world_size={world_size}, sample_rate={sample_rate}}}"
        kept = is_rank_sampled(rank + _LAYERED_OFFSET if layered else rank, sample_rate)
        own: sampling.Sampler = (root or sampling.ALWAYS_ON) if kept else sampling.ALWAYS_OFF
        self._delegate = own if root is None else sampling.ParentBased(own)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Without a root, the same answer for every span of this process."""
        return self._delegate.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Which rank this is and which share is kept."""
        return self._description
