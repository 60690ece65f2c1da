"""One rank on a fake process group: a tiny training loop, and its resident memory while it runs."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.child import leave_result, report_progress

SAMPLES = 400


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def status_bytes() -> dict[str, int]:
    """What it is made of: anonymous, mapped files, shared memory."""
    found: dict[str, int] = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssFile", "RssShmem"):
                found[name] = int(rest.split()[0]) * 1024
    return found


def main() -> None:
    iterations = int(sys.argv[1])
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 8)
    samples: list[int] = []
    every = max(1, iterations // SAMPLES)
    start = time.monotonic()
    for iteration in range(iterations):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        if iteration % every == 0:
            samples.append(resident_bytes())
            if len(samples) % 10 == 0:
                report_progress(iteration / iterations)
    taken_s = time.monotonic() - start
    runtime = sys.modules.get("lens_auto.runtime")
    recorder = runtime.recorder if runtime is not None else None
    leave_result(
        {
            "samples": samples,
            "parts": status_bytes(),
            "iteration_us": taken_s / iterations * 1e6,
            "records": recorder.written() if recorder is not None else 0,
            "dropped": recorder.dropped if recorder is not None else 0,
            "modules": sorted(sys.modules),
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
