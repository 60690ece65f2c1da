"""What training feels of an endpoint that misbehaves, fault by fault: time, memory, exit. `make faults`.

For each fault a real training process beside its real exporter process and a real receiver: iteration time while the
exporter runs over the same while it is stopped, in turns; resident memory of the rank over the same program without
us; the exporter's peak over a bare Python; and how long the process takes from its last line to its end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import child
from benchmarks.timing import block_ratios

if TYPE_CHECKING:
    from tests.receiver import Receiver

RANK_MB, EXPORTER_MB = 40.0, 120.0
EXIT_S = 5.0  # NEMO_LENS_EXIT_TIMEOUT_S
END_OF_PYTHON_S = 2.0  # what a bare Python with torch takes to end on a busy machine
NOISE = 0.02  # of an iteration, where the interval is narrower
PROTOCOLS = ("http", "grpc")


def _comes_and_goes(receiver: Receiver, done: threading.Event) -> None:
    while not done.wait(2.0):
        receiver.down()
        if done.wait(2.0):
            return
        receiver.up()


@dataclass(frozen=True)
class Fault:
    """How an endpoint misbehaves.

    Attributes:
        start: puts the receiver into it; `while_running` goes on in a thread.
        killed: the exporter is killed in the middle.
        environment: what the program is told besides the receiver's own variables.
    """

    name: str
    start: Callable[[Receiver], None] = lambda receiver: None
    while_running: Callable[[Receiver, threading.Event], None] | None = None
    killed: bool = False
    tls: bool = False
    environment: tuple[tuple[str, str], ...] = ()


FAULTS = (
    Fault("none"),
    Fault("down", lambda receiver: receiver.down()),
    Fault("down and back", while_running=_comes_and_goes),
    Fault("never answers", lambda receiver: receiver.hang()),
    Fault("resets", lambda receiver: receiver.reset()),
    Fault("429", lambda receiver: receiver.status(429, retry_after_s=1)),
    Fault("503", lambda receiver: receiver.status(503, retry_after_s=1)),
    Fault("1 span a second", lambda receiver: receiver.slow(1.0)),
    Fault("wrong protocol", lambda receiver: receiver.wrong_protocol()),
    Fault("wrong TLS", tls=True, environment=(("OTEL_EXPORTER_OTLP_CERTIFICATE", ""),)),
    Fault("exporter killed", killed=True),
)


@dataclass
class Row:
    """What was measured under one fault."""

    fault: str
    protocol: str
    ratio: float
    low: float
    high: float
    rank_mb: float
    exporter_mb: float
    exit_s: float

    @property
    def problems(self) -> list[str]:
        """Which bounds it is beyond; an iteration time counts where its interval says so."""
        found = []
        if self.low > 1 + NOISE:
            found.append("iteration time")
        if self.rank_mb > RANK_MB:
            found.append("rank's memory")
        if self.exporter_mb > EXPORTER_MB:
            found.append("exporter's memory")
        if self.exit_s > EXIT_S + END_OF_PYTHON_S:
            found.append("exit")
        return found


def measure(fault: Fault, protocol: str, pairs: int, bare_bytes: int, python_bytes: int) -> Row:
    """Trains under one fault.

    Args:
        bare_bytes: what the program holds without us.
        python_bytes: what a bare Python holds.
    """
    from tests.receiver import Receiver

    done = threading.Event()
    with ExitStack() as stack:
        receiver = stack.enter_context(Receiver("http" if protocol == "http" else "grpc", tls=fault.tls))
        fault.start(receiver)
        if fault.while_running is not None:
            thread = threading.Thread(target=fault.while_running, args=(receiver, done))
            thread.start()
            stack.callback(thread.join)
        stack.callback(done.set)
        command = [*child.instrumented(), sys.executable, "-m", "benchmarks.programs.exporter_training"]
        variables = {**receiver.environment(), **dict(fault.environment), "NEMO_LENS_EXPORTER_LINGER_S": "0"}
        mode = "killed" if fault.killed else "beside"
        found = child.run(command, variables, lambda share: None, 300, str(pairs), mode)
        ended_ns = time.monotonic_ns()
    by_wall, _ = block_ratios(np.array(found["running"]), np.array(found["stopped"]))
    return Row(
        fault.name,
        protocol,
        by_wall.value,
        by_wall.low,
        by_wall.high,
        (found["rank_bytes"] - bare_bytes) / 1e6,
        (found["exporter_bytes"] - python_bytes) / 1e6,
        (ended_ns - found["ended_ns"]) / 1e9,
    )


def _bare(pairs: int) -> int:
    command = [sys.executable, "-m", "benchmarks.programs.exporter_training"]
    found = child.run(command, {}, lambda share: None, 300, str(pairs), "bare")
    return int(found["rank_bytes"])


def _bare_python() -> int:
    code = "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def main(arguments: list[str] | None = None) -> int:
    """Measures every fault over both protocols; 1 where a bound is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks, wider intervals")
    parser.add_argument("--json", action="store_true", help="print one object")
    names = [each.name for each in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT", help=", ".join(names))
    options = parser.parse_args(arguments)
    pairs = 60 if options.quick else 200
    bare_bytes, python_bytes = _bare(pairs), _bare_python()
    rows = []
    for fault in FAULTS:
        for protocol in PROTOCOLS if fault.name in options.only else ():
            row = measure(fault, protocol, pairs, bare_bytes, python_bytes)
            rows.append(row)
            if not options.json:
                if len(rows) == 1:
                    print(f"{'endpoint':16} {'over':5} {'iteration time':>22} {'rank':>9} {'exporter':>9} {'exit':>7}")
                time_ = f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"
                print(
                    f"{row.fault:16} {row.protocol:5} {time_:>22} {row.rank_mb:+6.1f} MB {row.exporter_mb:+6.1f} MB"
                    f" {row.exit_s:5.1f} s  {'beyond: ' + ', '.join(row.problems) if row.problems else 'ok'}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": [{**asdict(row), "problems": row.problems} for row in rows]}))
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
