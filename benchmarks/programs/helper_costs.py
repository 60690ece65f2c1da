"""One process: what `managed_span` and `trace_fn` cost with their group off."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from benchmarks.child import leave_result, report_progress
from benchmarks.timing import calls, interleave, over, undisturbed_ns
from lens_auto import managed_span, set_enabled_span_groups, trace_fn

GROUP = "step"


def empty_block(count: int) -> int:
    """The loop alone."""
    turns = range(count)
    start = time.perf_counter_ns()
    for _ in turns:
        pass
    return time.perf_counter_ns() - start


def span_block(count: int) -> int:
    """As a user writes it; the name is looked up in the module, as his would be."""
    turns = range(count)
    start = time.perf_counter_ns()
    for _ in turns:
        with managed_span(GROUP, "train.step"):
            pass
    return time.perf_counter_ns() - start


def attributes_block(count: int) -> int:
    """With attributes."""
    turns = range(count)
    start = time.perf_counter_ns()
    for _ in turns:
        with managed_span(GROUP, "train.step", rank=1, kind="train"):
            pass
    return time.perf_counter_ns() - start


def bare(value: int) -> int:
    """A function that does next to nothing."""
    return value


async def coroutine(value: int) -> int:
    """The same, to be awaited."""
    return value


def generator(value: int) -> Iterator[int]:
    """The same, in two items."""
    yield value
    yield value


async def async_generator(value: int) -> AsyncIterator[int]:
    """The same, in two items to be awaited."""
    yield value
    yield value


traced = trace_fn(GROUP, "bare")(bare)
KINDS = {
    "coroutine": (coroutine, "await function(1)"),
    "generator": (generator, "for _ in function(1): pass"),
    "async_generator": (async_generator, "async for _ in function(1): pass"),
}


def block_of(function: Callable[..., Any], use: str) -> Callable[[int], int]:
    """A block that uses a function so often; nothing in it ever waits, so that no event loop is needed."""
    names: dict[str, Any] = {"function": function, "clock": time.perf_counter_ns}
    exec(
        f"async def run(count):\n"
        f"    turns = range(count)\n"
        f"    start = clock()\n"
        f"    for _ in turns:\n"
        f"        {use}\n"
        f"    return clock() - start\n",
        names,
    )

    def block(count: int) -> int:
        running = names["run"](count)
        try:
            running.send(None)
        except StopIteration as stop:
            return int(stop.value)
        raise AssertionError("it waited for something")

    return block


def main() -> None:
    set_enabled_span_groups({"job"})
    blocks = {
        "empty": empty_block,
        "span": span_block,
        "attributes": attributes_block,
        "bare": calls(bare, 1),
        "traced": calls(traced, 1),
    }
    for kind, (function, use) in KINDS.items():
        blocks[kind] = block_of(function, use)
        blocks[f"{kind} traced"] = block_of(trace_fn(GROUP, kind)(function), use)
    found = interleave(blocks, float(sys.argv[1]), report_progress)
    leave_result(
        {
            "managed_span_us": over(found["span"], found["empty"])[0] / 1e3,
            "with_attributes_us": over(found["attributes"], found["empty"])[0] / 1e3,
            "trace_fn_us": over(found["traced"], found["bare"])[0] / 1e3,
            "bare_us": undisturbed_ns(found["bare"]) / 1e3,
            "kinds_us": {kind: over(found[f"{kind} traced"], found[kind])[0] / 1e3 for kind in KINDS},
        }
    )


if __name__ == "__main__":
    main()
