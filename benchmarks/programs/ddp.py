"""Two ranks that train under DDP, with lens-auto switched on and off every few iterations of the same run.

Every iteration is timed on every rank. Blocks go on, off, off, on, ...; an adjacent pair is one comparison. Rank 0 ends
the run once it is clear on which side of the budget the result lies, or when the time is over.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.child import leave_result, report_progress
from benchmarks.timing import block_ratios
from lens_auto import guard, runtime
from lens_auto.groups import TrainingSpanGroup

BLOCK = 20  # iterations between two switches
BATCH = 32
WIDTH = 256


def switch(groups: frozenset[str] | None) -> None:
    """Switch these groups on; None: shut every gate, as if we were not there.

    What stays while off: the closed gates themselves, and two calls of torch's optimizer hooks that return at once.
    """
    if groups is not None:
        runtime.set_groups(groups)
        return
    runtime.set_groups(frozenset())
    for site in guard._sites.values():
        site.gate.clear()


def background_cpu_ns() -> int:
    """CPU time that our threads have used; they run in both kinds of block, so the comparison does not see them."""
    threads = [each.native_id for each in threading.enumerate() if each.name.startswith("lens-")]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in threads)


class Training:
    """A small model under DDP, its data, and what one iteration is."""

    def __init__(self, collectives: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        data = TensorDataset(torch.randn(64 * BATCH, WIDTH), torch.randn(64 * BATCH, WIDTH))
        self.loader = DataLoader(data, batch_size=BATCH)
        self.batches = iter(self.loader)
        self.small = [torch.zeros(64) for _ in range(collectives)]

    def iteration(self) -> None:
        """Fetch, forward, backward, step, and the extra collectives."""
        try:
            inputs, targets = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        for tensor in self.small:
            dist.all_reduce(tensor)
        self.optimizer.step()


def timed_block(training: Training) -> np.ndarray:
    """Times each iteration of one block: wall and the training thread's CPU time, ns, the mean of the ranks.

    Returns:
        Two rows, wall and CPU; a column for each iteration.
    """
    times = torch.empty(2, BLOCK, dtype=torch.float64)
    for index in range(BLOCK):
        start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
        training.iteration()
        times[1, index] = time.thread_time_ns() - start_cpu
        times[0, index] = time.perf_counter_ns() - start
    switch(None)  # what follows is ours, not the program's
    dist.all_reduce(times)
    return (times / dist.get_world_size()).numpy()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "groups", help="span groups that are on in the on blocks; none: off as well, which shows the noise"
    )
    parser.add_argument("--collectives", type=int, default=0, help="extra all_reduce calls in an iteration")
    parser.add_argument("--budget", type=float, required=True, help="ratio that is allowed")
    parser.add_argument("--seconds", type=float, default=75, help="at most this long")
    parser.add_argument("--min-pairs", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    groups = None if arguments.groups == "none" else TrainingSpanGroup.resolve(arguments.groups)
    dist.init_process_group("gloo")
    training = Training(arguments.collectives)
    for state in (groups, None):
        switch(state)
        timed_block(training)

    on_ns: list[np.ndarray] = []
    off_ns: list[np.ndarray] = []
    records = 0
    begun_s, begun_cpu_ns = time.monotonic(), background_cpu_ns()
    go_on = torch.ones(1)
    while go_on.item():
        order = ((on_ns, groups), (off_ns, None))
        for times, state in order if len(on_ns) % 2 == 0 else reversed(order):
            before = runtime.recorder.written() if runtime.recorder is not None else 0
            switch(state)
            times.append(timed_block(training))
            if state is not None and runtime.recorder is not None:
                records += runtime.recorder.written() - before
        if dist.get_rank() == 0:
            share = (time.monotonic() - begun_s) / arguments.seconds
            report_progress(min(1.0, share))
            go_on[0] = 0 if share >= 1 else 1
            if len(on_ns) >= arguments.min_pairs and len(on_ns) % 5 == 0:
                by_wall, by_cpu = block_ratios(np.array(on_ns), np.array(off_ns), share=0.99)
                # On a busy machine wall times may never tell; CPU time is an upper bound, good enough once it holds.
                if by_wall.tells(arguments.budget) or (share > 0.5 and by_cpu.high <= arguments.budget):
                    go_on[0] = 0
        dist.broadcast(go_on, 0)
    spent_s, cpu_ns = time.monotonic() - begun_s, background_cpu_ns() - begun_cpu_ns
    if dist.get_rank() == 0:
        leave_result(
            {
                "on_ns": np.array(on_ns).tolist(),
                "off_ns": np.array(off_ns).tolist(),
                "records": records / (BLOCK * len(on_ns)),
                "faults": guard.fault_count(),
                "background": cpu_ns / (spent_s * 1e9),
            }
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
