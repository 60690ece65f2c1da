"""A node whose ranks are gone or still writing, made by hand, and the real exporter process on it.

The ranks' files are those of `synthetic.py`: nothing is trained, so a test starts in a moment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from launch import SCRIPTS, Launcher
from receiver import Receiver
from records import read_spans
from synthetic import MS, Writer, segment_header, train, write_run

from lens_auto.export import launch
from lens_auto.export.kept import kept_spans
from lens_auto.export.lane import Progress
from lens_auto.export.spans import Span
from lens_auto.recorder import layout, spool
from lens_auto.recorder.finish import process_start_ticks

GONE_PID = 1 << 30  # above any pid
NONCE = 0x1357_9BDF_0246_8ACE
SEED = "5eed" * 8


def rank(number: int = 0, iterations: int = 100, *, world_size: int = 2, **extra: Any) -> Writer:
    """A rank that trained and closed."""
    writer = Writer(
        rank=number,
        world_size=world_size,
        nonce=NONCE + number * 0x0101_0101_0101,
        host=socket.gethostname(),
        pid=GONE_PID + number,
        seed=SEED,
        extra={"exports": True, **extra},
    )
    return train(writer, iterations)


def alive(writer: Writer, process: subprocess.Popen[Any] | None = None) -> Writer:
    """The same rank while its process runs: a given one, or the test's own."""
    writer.pid = os.getpid() if process is None else process.pid
    writer.start_ticks = process_start_ticks(writer.pid)
    writer.closed = False
    return writer


def identity(span: Span) -> tuple[str, str]:
    """Trace and span id of a span in hex, as a receiver has them."""
    return span.trace_id.hex(), span.span_id.hex()


@dataclass
class Ended:
    """An exporter process that ended.

    Attributes:
        code: its exit status.
        took_s: how long it ran.
        peak_bytes: the most memory that was resident.
    """

    code: int
    took_s: float
    peak_bytes: int


class Exporter:
    """A running exporter process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._started = self._ended = time.monotonic()
        self._peak_bytes = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def wait(self, timeout_s: float = 30) -> Ended:
        """Wait for its end."""
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self.kill()
            raise AssertionError(f"the exporter still ran after {timeout_s} s")
        return Ended(self.process.returncode, self._ended - self._started, self._peak_bytes)

    def _watch(self) -> None:
        while self.process.poll() is None:
            self._peak_bytes = max(self._peak_bytes, status_bytes(self.process.pid, "VmHWM"))
            time.sleep(0.02)
        self._ended = time.monotonic()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self._watcher.join(10)


class Node:
    """A run directory, the spool's folder of the run, and what the ranks in them recorded.

    Args:
        folder: where all of it goes.
        writers: the ranks.
    """

    def __init__(self, folder: Path, *writers: Writer) -> None:
        self._launcher = Launcher(folder)
        self._log = folder / "log"
        self.run_dir = folder / "run"
        self.run_folder = Path(spool.user_folder(str(folder / "spool"))) / "run-1"
        self.run_folder.mkdir(parents=True)
        self.writers = list(writers)
        self._started: list[Exporter] = []
        write_run(self.run_dir, *writers)
        for writer in writers:
            self.register(writer)

    def register(self, writer: Writer) -> None:
        """Say that a rank is to be sent."""
        launch.register(str(self.run_folder), writer.name, str(self.run_dir))

    def add(self, writer: Writer) -> None:
        """One more rank."""
        writer.write(self.run_dir)
        self.writers.append(writer)
        self.register(writer)

    def recorded(self) -> list[Span]:
        """The spans that `lens-auto export` makes of all ranks, before anything is sent."""
        return [span for spans in read_spans(self.run_dir).values() for span in spans]

    def start(self, environment: Mapping[str, str], **more: str) -> Exporter:
        """Start the exporter, as a rank does."""
        variables = self._environment(environment, more)
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lens_auto.export.process", str(self.run_folder)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(Exporter(process))
        return self._started[-1]

    def log(self) -> str:
        """What exporters said so far."""
        return self._log.read_text() if self._log.exists() else ""

    def kept(self, exporter: str = "otlp") -> int:
        """Spans still to be made from what is left."""
        return kept_spans(self.run_dir, exporter)

    def progress(self, exporter: str = "otlp") -> list[Progress]:
        """What the exporter wrote down of each rank."""
        return [Progress(str(self.run_dir / layout.RANKS_DIR / writer.name), exporter) for writer in self.writers]

    def segments(self) -> list[str]:
        """Names of the segments that are left."""
        return sorted(path.name for path in self.run_dir.rglob("*.seg"))

    def recover(self, environment: Mapping[str, str], timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """`lens-auto recover`."""
        command = [str(SCRIPTS / "lens-auto"), "recover", str(self.run_dir)]
        variables = self._environment(environment, {})
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s)

    def _environment(self, environment: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
        # A receiver's faults are meant for spans.
        defaults = {"NEMO_LENS_EXPORT_STRATEGY": "all_ranks", "OTEL_METRICS_EXPORTER": "none"}
        return self._launcher.environment({**defaults, **environment, **more})

    def close(self) -> None:
        """End what a failed test left running."""
        for started in self._started:
            if started.process.poll() is None:
                started.kill()


def check_sum(node: Node, receiver: Receiver, recorded: list[Span], *, exporter: str = "otlp") -> None:
    """Received + kept + dropped = recorded, and nothing received twice."""
    received = Counter((span["trace_id"], span["span_id"]) for span in receiver.spans())
    doubled = {key: times for key, times in received.items() if times > 1}
    assert doubled == {}, node.log()
    assert received.keys() <= {identity(span) for span in recorded}
    progress = node.progress(exporter)
    assert sum(each.sent for each in progress) == len(received), node.log()
    dropped = sum(each.refused + each.not_sampled for each in progress)
    parts = {"received": len(received), "kept": node.kept(exporter), "dropped": dropped}
    assert sum(parts.values()) == len(recorded), (parts, len(recorded), node.log())


def status_bytes(pid: int, name: str) -> int:
    """A size in /proc/<pid>/status; 0 where the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Wait for something that happens in another process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def many_records(writer: Writer, count: int) -> dict[str, bytes]:
    """Segments with about so many records: the iterations of a small rank over and over, each with times of its own."""
    base = writer.array()
    first, size = 3, 6  # init, model, loader; then fetch, backward, collective, wait, step, boundary
    block = base[first : first + size]
    times = (count - first) // size
    data = np.concatenate([base[:first], np.tile(block, times)])
    repeat = np.arange(times, dtype=np.int64).repeat(size)
    period = base["start_ns"][first + size] - block["start_ns"][0]
    body = data[first:]
    for field in ("start_ns", "end_ns"):
        body[field] += (repeat * int(period)).astype(np.uint64)
    body["iteration"] = repeat
    body["seq"][body["kind"] == layout.Kind.COLLECTIVE] = np.arange(times)
    referring = body["ref"] > 0
    body["ref"][referring] += (repeat[referring] * size).astype(np.uint64)
    data["commit"] = np.arange(len(data)) % layout.SEGMENT_RECORDS + 1
    writer.now += times * int(period) / MS
    found = {}
    for number in range(-(-len(data) // layout.SEGMENT_RECORDS)):
        part = data[number * layout.SEGMENT_RECORDS : (number + 1) * layout.SEGMENT_RECORDS]
        found[layout.segment_name(number)] = (
            segment_header(number, writer.nonce, writer.pid, writer.rank) + part.tobytes()
        )
    return found


def write_many(node: Node, writer: Writer, count: int) -> int:
    """Replace a rank's segments by ones with about so many records; returns how many."""
    folder = node.run_dir / layout.RANKS_DIR / writer.name
    segments = many_records(writer, count)
    for name, content in segments.items():
        (folder / name).write_bytes(content)
    info = json.loads((folder / layout.WRITER_NAME).read_text())
    info["ended_ns"] = writer.info(node.run_dir)["ended_ns"]
    (folder / layout.WRITER_NAME).write_text(json.dumps(info))
    body = sum(len(content) - layout.SEGMENT_HEADER_BYTES for content in segments.values())
    return body // layout.RECORD_BYTES
