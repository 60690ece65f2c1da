"""One process: what `managed_span` and `trace_fn` cost with their group off."""

from __future__ import annotations

import sys
import time

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


traced = trace_fn(GROUP, "bare")(bare)


def main() -> None:
    set_enabled_span_groups({"job"})
    blocks = {
        "empty": empty_block,
        "span": span_block,
        "attributes": attributes_block,
        "bare": calls(bare, 1),
        "traced": calls(traced, 1),
    }
    found = interleave(blocks, float(sys.argv[1]), report_progress)
    leave_result(
        {
            "managed_span_us": over(found["span"], found["empty"])[0] / 1e3,
            "with_attributes_us": over(found["attributes"], found["empty"])[0] / 1e3,
            "trace_fn_us": over(found["traced"], found["bare"])[0] / 1e3,
            "bare_us": undisturbed_ns(found["bare"]) / 1e3,
        }
    )


if __name__ == "__main__":
    main()
