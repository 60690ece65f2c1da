"""Two ranks: what the carrier takes from the training thread, beside the blocking form of the same message.

The training thread does nothing but Python here, the worst case: every wake-up of the carrier's thread takes the GIL
from it. Blocks of iterations go bare, carrier, blocking, in turns.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.child import leave_result, report_progress
from lens_auto import runtime

ROUNDS = 40
BLOCK = 15
WORK = 60_000


def work() -> int:
    """Some milliseconds of Python."""
    total = 0
    for each in range(WORK):
        total += each & 7
    return total


def blocking(payload: torch.Tensor) -> None:
    """The form that waits: a broadcast of the length, then one of the payload."""
    length = torch.tensor([payload.numel()])
    dist.broadcast(length, 0)
    dist.broadcast(payload, 0)


def main() -> None:
    """Measure and leave the result: the fastest tenth of each kind, which nothing else disturbed."""
    dist.init_process_group("gloo")
    recorder = runtime.recorder
    assert recorder is not None
    deadline = time.monotonic() + 30
    while recorder.boundary_event is None or runtime._housekeeper.sharing.carrier.state != "running":  # type: ignore[union-attr]
        if time.monotonic() > deadline:
            raise TimeoutError("the carrier did not start")
        time.sleep(0.05)
    carrier = runtime._housekeeper.sharing.carrier  # type: ignore[union-attr]
    payload = torch.zeros(256, dtype=torch.uint8)
    bare: list[int] = []
    carried: list[int] = []
    waited: list[int] = []
    before = carrier.sent + carrier.received
    for number in range(ROUNDS):
        for kind in ("bare", "carrier", "blocking") if number % 2 else ("carrier", "bare", "blocking"):
            for _ in range(BLOCK):
                start = time.perf_counter_ns()
                if kind == "carrier":
                    recorder.boundary(time.monotonic_ns(), 1, 0)
                elif kind == "blocking":
                    begun = time.perf_counter_ns()
                    blocking(payload)
                    waited.append(time.perf_counter_ns() - begun)
                work()
                taken = time.perf_counter_ns() - start
                if kind == "bare":
                    bare.append(taken)
                elif kind == "carrier":
                    carried.append(taken)
            if kind == "carrier":  # let the last of them arrive outside of the bare block
                time.sleep(0.02)
        if dist.get_rank() == 0:
            report_progress((number + 1) / ROUNDS)
    if dist.get_rank() == 0:
        leave_result(
            {
                "bare_ns": statistics.quantiles(bare, n=10)[0],
                "carrier_ns": statistics.quantiles(carried, n=10)[0],
                "blocking_ns": statistics.quantiles(waited, n=10)[0],
                "blocking_median_ns": statistics.median(waited),
                "through": carrier.sent + carrier.received - before,
                "iterations": ROUNDS * BLOCK,
            }
        )
    dist.barrier()


if __name__ == "__main__":
    main()
