"""Two ranks: what the carrier takes from the training thread, beside the blocking form of the same message.

The training thread does nothing but Python here, the worst case: every wake-up of the carrier's thread takes the GIL
from it. Blocks of iterations go bare, carrier, blocking, in turns.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from benchmarks.child import leave_result, report_progress
from lens_auto import runtime

ROUNDS = 120
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
    """Measure and leave the result: wall and CPU time of every iteration, ns, in pairs of blocks."""
    dist.init_process_group("gloo")
    recorder = runtime.recorder
    assert recorder is not None
    deadline = time.monotonic() + 30
    while recorder.boundary_bell is None or runtime._housekeeper.sharing.carrier.state != "running":  # type: ignore[union-attr]
        if time.monotonic() > deadline:
            raise TimeoutError("the carrier did not start")
        time.sleep(0.05)
    carrier = runtime._housekeeper.sharing.carrier  # type: ignore[union-attr]
    payload = torch.zeros(256, dtype=torch.uint8)
    times: dict[str, list[list[list[int]]]] = {"bare": [], "carrier": [], "blocking": []}
    before = carrier.sent + carrier.received
    for number in range(ROUNDS):
        for kind in ("carrier", "bare", "blocking") if number % 2 else ("blocking", "bare", "carrier"):
            block: list[list[int]] = [[], []]
            for _ in range(BLOCK):
                start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
                if kind == "carrier":
                    recorder.boundary(time.monotonic_ns(), 1, 0)
                elif kind == "blocking":
                    blocking(payload)
                work()
                block[1].append(time.thread_time_ns() - start_cpu)
                block[0].append(time.perf_counter_ns() - start)
            times[kind].append(block)
            if kind == "carrier":  # let the last of them arrive outside of the bare block
                time.sleep(0.02)
        if dist.get_rank() == 0:
            report_progress((number + 1) / ROUNDS)
    if dist.get_rank() == 0:
        leave_result(
            {
                **{f"{kind}_ns": blocks for kind, blocks in times.items()},
                "through": carrier.sent + carrier.received - before,
                "iterations": ROUNDS * BLOCK,
            }
        )
    dist.barrier()


if __name__ == "__main__":
    main()
