"""Iteration time of a rank beside its exporter, stopped and running in turns; what both hold in memory at the end.

Arguments: pairs of blocks; `beside`, `killed` (its exporter is killed in the middle) or `bare` (there is none: without
`opentelemetry-instrument`). Run under `opentelemetry-instrument` with an endpoint.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.child import leave_result, report_progress
from lens_auto.export import launch

ITERATIONS = 20
PATIENCE_S = 20.0


def status_bytes(pid: int | str, field: str) -> int:
    """A size in a process's status: VmRSS is what it holds now, VmHWM the most that it held."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def running_exporter() -> subprocess.Popen[bytes]:
    """The exporter that runs; the housekeeper starts the first, and another where one was killed."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for process in reversed(launch._started):
            if process.poll() is None:
                return process
        time.sleep(0.05)
    raise RuntimeError(f"no exporter within {PATIENCE_S:.0f} s")


def main(pairs: int, mode: str) -> None:
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
    exporter: subprocess.Popen[bytes] | None = None
    if mode != "bare":
        exporter = running_exporter()
        time.sleep(3)  # it has imported what it needs
    running: list[tuple[list[int], list[int]]] = []
    stopped: list[tuple[list[int], list[int]]] = []
    peak = 0
    for number in range(pairs):
        if exporter:
            if mode == "killed" and number == pairs // 2:
                peak = status_bytes(exporter.pid, "VmHWM")
                exporter.kill()
                exporter.wait()
                exporter = running_exporter()
                time.sleep(3)
            exporter.send_signal(signal.SIGSTOP)
        stopped.append(block())
        if exporter:
            exporter.send_signal(signal.SIGCONT)
        running.append(block())
        report_progress(number / pairs)
    if exporter:
        peak = max(peak, status_bytes(exporter.pid, "VmHWM"))  # which also says that it still runs
    leave_result(
        {
            "running": running,
            "stopped": stopped,
            "rank_bytes": status_bytes("self", "VmRSS"),
            "exporter_bytes": peak,
            "ended_ns": time.monotonic_ns(),
        }
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
