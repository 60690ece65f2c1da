"""What is current in a rank outside of all spans of the program: its iteration, and the baggage of the job.

A context is attached once and never again: a boundary inside a span of the program must not change that span's place.
What it holds are objects that answer for the moment at which they are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opentelemetry import baggage, context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from lens_auto import guard, runtime
from lens_auto.groups import TrainingSpanGroup

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def iteration_ids() -> tuple[int, int] | None:
    """Trace id and span id of the iteration that this rank is in; None before the ranks share a seed."""
    recorder, keeper = runtime.recorder, runtime._housekeeper
    seed = keeper.info.get("seed") if keeper is not None else None
    if recorder is None or not seed or recorder.rank < 0:
        return None
    from lens_auto.recorder import ids

    known, iteration = bytes.fromhex(str(seed)), recorder.iteration
    trace_id = ids.iteration_trace_id(known, iteration)
    span_id = ids.iteration_span_id(known, iteration, recorder.rank)
    return int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big")


class _IterationSpan(NonRecordingSpan):
    """Stands for the iteration that this process is in."""

    def __init__(self) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)

    def get_span_context(self) -> SpanContext:
        """The iteration's; an invalid one where this process is no rank (yet), or its iterations are no spans."""
        try:
            found = iteration_ids() if TrainingSpanGroup.STEP in runtime.groups else None
            return trace.INVALID_SPAN_CONTEXT if found is None else SpanContext(*found, False, _SAMPLED)
        except Exception as error:
            guard.failed("context", error)
            return trace.INVALID_SPAN_CONTEXT


class _LiveBaggage(dict[str, object]):
    """Baggage that another thread may still add to: whoever goes through it goes through a copy."""

    def copy(self) -> dict[str, object]:
        return dict(list(super().items()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def keys(self) -> Any:
        return self.copy().keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()


_span = _IterationSpan()
_baggage = _LiveBaggage()


def attach() -> None:
    """Make them current in this thread, below whatever the program makes current; once is enough."""
    here = context.get_current()
    if any(value is _baggage for value in here.values()):
        return
    # OpenTelemetry keeps its key for baggage to itself; it is the only one in a context with nothing but baggage.
    (key,) = baggage.set_baggage("name", "value", context.Context())
    for name, value in baggage.get_all(here).items():
        _baggage.setdefault(name, value)
    wanted = context.set_value(key, _baggage, here)
    if not trace.get_current_span(here).get_span_context().is_valid:
        wanted = trace.set_span_in_context(_span, wanted)
    context.attach(wanted)


def receive_baggage(header: str) -> None:
    """The baggage of the job is known; what the program set under the same name stays."""
    from lens_auto.propagation import extract_context

    for name, value in baggage.get_all(extract_context({"baggage": header})).items():
        _baggage.setdefault(name, value)
