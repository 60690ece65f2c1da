"""One process under `opentelemetry-instrument`: what the hooks of collectives add to a call, in one mode.

On torch's fake process group, whose calls take a few microseconds and nothing from the network.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import sys
import time
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.child import leave_result, report_progress
from benchmarks.timing import calls, interleave, over, undisturbed_ns
from instrumentors._patch import Patches
from lens_auto import guard, runtime
from lens_auto.recorder.layout import LIVE_SLOT, OPERATION, RECORD

COUNT = 100  # calls in a block
SITE = "torch.distributed.all_reduce"


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a collective: for differences that are smaller than a collective's own noise."""


def pass_through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """The least that a hook can do."""
    return wrapped(*args, **kwargs)


def stand_in(gate: list[bool], function: Any = nothing, hook: Any = pass_through) -> Any:
    """A function, wrapped as every hook is, behind the given gate."""
    module = ModuleType("stand_in")
    module.function = function  # type: ignore[attr-defined]
    site = guard.Site(f"stand-in {id(gate)} {id(hook)}", lambda: True)
    site.gate = gate
    Patches().wrap(module, "function", hook, site)
    return module.function


def least_hooks() -> dict[str, Any]:
    """Hooks of which each does one thing more that a watching hook cannot leave out; by what it adds."""
    counter = itertools.count()  # the fake group has no sequence numbers
    page, now, pack = bytearray(4096), time.monotonic_ns, LIVE_SLOT.pack_into
    operation = bytes(OPERATION.size)
    types = {torch.float32: 1}

    def size_and_type(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        tensor.nbytes, types[tensor.dtype]
        return wrapped(*args, **kwargs)

    def slot(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        seq = next(counter)
        pack(page, 0, seq, now(), tensor.nbytes, types[tensor.dtype], operation, seq)
        return wrapped(*args, **kwargs)

    return {
        "the wrapper around the call": pass_through,
        "size and type of the tensor": size_and_type,
        "clock, counter, and packing the slot": slot,
    }


def ladder(function: Any, bare: Any, tensor: torch.Tensor, gate: list[bool], seconds: float) -> list[str]:
    """Where a hook's time goes, paid between calls of torch: what each step adds to the one before."""
    steps = {what: stand_in(gate, bare, hook) for what, hook in least_hooks().items()}
    blocks = {"bare": calls(bare, tensor), "hook": calls(function, tensor)}
    blocks |= {what: calls(step, tensor) for what, step in steps.items()}
    found = interleave(blocks, seconds)
    costs = {what: over(found[what], found["bare"])[0] / 1e3 for what in [*steps, "hook"]}
    rows, before = [], 0.0
    for what, cost in costs.items():
        name = "all else: thread, group, nesting, guards, leaving; a record" if what == "hook" else what
        rows.append(f"{cost - before:6.2f} us  {name}")
        before = cost
    return rows


def nested_wait(seconds: float) -> float | None:
    """What the hook adds to the wait inside a blocking collective, in ns; None where this torch has no gloo.

    The fake group's works have a `wait` of their own, which nobody patches.
    """
    wrapper = vars(c10d.Work).get("wait")
    original = getattr(wrapper, "__wrapped__", None)
    state = runtime.recorder.thread() if runtime.recorder is not None else None
    if original is None or state is None or not hasattr(c10d, "ProcessGroupGloo"):
        return None
    group = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    work = group.allreduce([torch.zeros(16)])
    work.wait()

    def block(patched: Any) -> Any:
        def run(count: int) -> int:
            c10d.Work.wait = patched
            work.wait()
            turns = range(count)
            start = time.perf_counter_ns()
            for _ in turns:
                work.wait()
            return time.perf_counter_ns() - start

        return run

    state.depth = 1
    try:
        found = interleave({"hook": block(wrapper), "bare": block(original)}, seconds)
    finally:
        c10d.Work.wait = wrapper
        state.depth = 0
    return over(found["hook"], found["bare"])[0]


def record_block() -> Any:
    """Packing a record: how fast this machine is, beside the one that the budgets were written on."""
    page, pack = bytearray(RECORD.size), RECORD.pack_into
    record = RECORD.unpack(page)

    def packed(offset: int) -> None:
        pack(page, offset, *record)

    return calls(packed, 0)


def span_block() -> Any:
    """An SDK span's start and end, with five attributes and a processor that does nothing."""
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanProcessor())
    tracer = provider.get_tracer("benchmarks")

    def span(seq: int) -> None:
        attributes = {
            "dl.comm.group": "0",
            "dl.comm.seq": seq,
            "dl.comm.bytes": 64,
            "dl.comm.dtype": "float32",
            "dl.comm.group_size": 2,
        }
        tracer.start_span("torch.distributed.all_reduce", attributes=attributes).end()

    return calls(span, 17)


def profile(function: Any, tensor: torch.Tensor, count: int = 20_000) -> list[str]:
    """Where a hook's time goes, by function. The profiler's own cost inflates what makes many calls."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        function(tensor)
    profiler.disable()
    rows: list[tuple[float, str]] = []
    for (path, _, name), (_, _, own_s, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        ours = any(part in path for part in ("lens_auto", "instrumentors"))
        called_by_us = path == "~" and any("lens_auto" in who[0] or "instrumentors" in who[0] for who in callers)
        if ours or called_by_us:
            where = "/".join(path.split("/")[-2:]) + ":" if ours else ""
            rows.append((own_s, f"{where}{name}"))
    rows.sort(reverse=True)
    total_s = sum(own_s for own_s, _ in rows)
    return [f"{100 * own_s / total_s:3.0f} %  {what}" for own_s, what in rows[:12]]


def main() -> None:
    mode, seconds, limit_us = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.zeros(16)
    hook = dist.all_reduce
    bare = getattr(hook, "__wrapped__", hook) if SITE in guard._sites else hook
    gate = guard.site(SITE).gate if SITE in guard._sites else []
    if bool(gate) != (mode != "off"):
        raise SystemExit(f"the hook of all_reduce is {'on' if gate else 'off'} in mode {mode}")

    hook(tensor)
    before = runtime.recorder.written() if runtime.recorder is not None else 0
    blocks = {
        "bare": calls(bare, tensor),
        "hook": calls(hook, tensor),
        "nothing": calls(nothing, tensor),
        "wrapped": calls(stand_in(gate), tensor),
    }
    if mode != "off":
        blocks["record"] = record_block()
    if mode == "on":
        blocks["span"] = span_block()
    found = interleave(blocks, seconds, report_progress, {"hook": COUNT, "bare": COUNT})
    written = (runtime.recorder.written() if runtime.recorder is not None else 0) - before
    expected = COUNT * len(found["hook"]) if mode == "on" else 0
    if written != expected or guard.fault_count():
        raise SystemExit(f"{written} records instead of {expected}, {guard.fault_count()} faults of hooks")

    hook_ns, hook_median_ns = over(found["hook"], found["bare"])
    wrapper_ns, wrapper_median_ns = over(found["wrapped"], found["nothing"])
    cost_ns = wrapper_ns if mode == "off" else hook_ns

    def explain() -> list[str]:
        return [*ladder(hook, bare, tensor, gate, seconds), *profile(hook, tensor)]

    leave_result(
        {
            "hook_us": hook_ns / 1e3,
            "hook_median_us": hook_median_ns / 1e3,
            "wrapper_us": wrapper_ns / 1e3,
            "wrapper_median_us": wrapper_median_ns / 1e3,
            "bare_us": undisturbed_ns(found["bare"]) / 1e3,
            "span_us": undisturbed_ns(found["span"]) / 1e3 if mode == "on" else None,
            "record_us": undisturbed_ns(found["record"]) / 1e3 if mode != "off" else None,
            "wait_ns": nested_wait(seconds / 3) if mode == "watch" else None,
            "profile": explain() if cost_ns / 1e3 > limit_us and mode != "off" else [],
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
