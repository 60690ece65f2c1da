"""Iteration time of a rank beside its exporter, whose endpoint refuses every connection; stopped and running in turns.

Arguments: pairs of blocks. Run under `opentelemetry-instrument` with an endpoint where nobody listens.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from benchmarks.child import leave_result, report_progress
from lens_auto.export import launch

ITERATIONS = 20


def main(pairs: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 256)

    def block() -> tuple[list[int], list[int]]:
        """Wall and CPU nanoseconds of each iteration."""
        wall_ns, cpu_ns = [], []
        for _ in range(ITERATIONS):
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            model(batch).square().mean().backward()
            optimizer.step()
            cpu_ns.append(time.thread_time_ns() - cpu)
            wall_ns.append(time.perf_counter_ns() - wall)
        return wall_ns, cpu_ns

    block()
    deadline = time.monotonic() + 20
    while not launch._started:  # the housekeeper starts it
        time.sleep(0.05)
        if time.monotonic() > deadline:
            raise RuntimeError("no exporter was started")
    exporter = launch._started[0].pid
    time.sleep(3)  # it has imported what it needs
    running: list[tuple[list[int], list[int]]] = []
    stopped: list[tuple[list[int], list[int]]] = []
    for number in range(pairs):
        os.kill(exporter, signal.SIGSTOP)
        stopped.append(block())
        os.kill(exporter, signal.SIGCONT)
        running.append(block())
        report_progress(number / pairs)
    os.kill(exporter, 0)  # it still runs
    leave_result({"running": running, "stopped": stopped})


if __name__ == "__main__":
    main(int(sys.argv[1]))
