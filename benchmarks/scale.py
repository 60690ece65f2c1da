"""What agreement and carrier cost at 2, 8 and 64 processes: store and gloo alone, no model. `make scale`.

One process imports torch and forks the others, so that 64 of them fit on a small machine. All share its cores: CPU time
per process is the figure to look at, wall-clock times are an upper bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

ITERATIONS = 50
ITERATION_S = 0.1
SIZES = (2, 8, 64)


def measure(world_size: int) -> dict[str, float]:
    """Fork `world_size` processes that agree and share a carrier; medians over them.

    Returns:
        agreement_s: until every rank knows the seed. carrier_s: from there until the group runs.
        carrier_cpu_us: CPU time of the carrier thread for each iteration. arrival_ms: from rank 0's boundary to the
        carrier at another rank. received_share: iterations whose carrier arrived.
    """
    import multiprocessing

    from torch.distributed import TCPStore

    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, world_size, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    # Only now: the server has threads, and a fork copies the locks that they hold.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for pipe in pipes:
        pipe.send(server.port)
    results: list[dict[str, Any]] = []
    for pipe in pipes:
        results.append(pipe.recv() if pipe.poll(180) else {})
    for process in processes:
        process.kill()
        process.join()
    found = [each for each in results if each]
    others = [each for each in found if "arrival_ms" in each]
    return {
        "ranks": world_size,
        "answered": len(found),
        "agreement_s": max(each["agreement_s"] for each in found),
        "carrier_s": max(each["carrier_s"] for each in found),
        "carrier_cpu_us": statistics.median(each["carrier_cpu_us"] for each in found),
        "arrival_ms": statistics.median(each["arrival_ms"] for each in others),
        "received_share": min(each["received_share"] for each in others),
    }


def _rank(rank: int, world_size: int, pipe: Connection) -> None:
    """One process: agree, build the carrier, live through some iterations."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    from lens_auto.iteration.agreement import Agreed, Agreement
    from lens_auto.iteration.carrier import Carrier
    from lens_auto.iteration.store import StoreAccess

    store = TCPStore("127.0.0.1", pipe.recv(), is_master=False, timeout=timedelta(seconds=60))
    access = StoreAccess(store)
    begun = time.monotonic()
    agreement = Agreement(access.client, "scale", rank, world_size, Agreed(os.urandom(16), "scale"))
    while not agreement.finished:
        agreement.step()
        time.sleep(0.02)
    agreed = time.monotonic()
    number = 0
    arrivals: list[float] = []

    def arrived(_number: int, carrier: dict[str, str], _switches: list[Any], *_of_ranks: int) -> None:
        sent = float(carrier["tracestate"].partition("=")[2])
        arrivals.append((time.monotonic() - sent) * 1e3)

    carrier = Carrier(
        access,
        "scale",
        rank,
        world_size,
        lambda: number,
        lambda _number: ({"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": f"t={boundary}"}, []),
        arrived,
    )
    boundary = time.monotonic()
    carrier.start("scale")
    while carrier.state == "joining":
        time.sleep(0.01)
    running = time.monotonic()
    cpu_before = time.process_time()
    for number in range(1, ITERATIONS + 1):  # noqa: B007 - the carrier asks for it
        boundary = time.monotonic()
        carrier.boundary.ring()
        time.sleep(ITERATION_S)
    found = {
        "agreement_s": agreed - begun,
        "carrier_s": running - agreed,
        "carrier_cpu_us": (time.process_time() - cpu_before) / ITERATIONS * 1e6,
    }
    if rank:
        found["arrival_ms"] = statistics.median(arrivals) if arrivals else float("nan")
        found["received_share"] = len(arrivals) / (ITERATIONS + 1)
    pipe.send(found)
    time.sleep(60)  # the parent ends us once it has heard of all


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("sizes", nargs="*", type=int, help="numbers of processes (default: 2 8 64)")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = []
    for size in arguments.sizes or SIZES:
        print(f"{size} processes ...", file=sys.stderr, flush=True)
        rows.append(measure(size))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("ranks", "agreement", "carrier up", "CPU an iteration", "arrival", "arrived")
    for row in rows:
        table.add_row(
            f"{row['ranks']:.0f}",
            f"{row['agreement_s']:.2f} s",
            f"{row['carrier_s']:.2f} s",
            f"{row['carrier_cpu_us']:.0f} us",
            f"{row['arrival_ms']:.1f} ms",
            f"{row['received_share']:.0%}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
