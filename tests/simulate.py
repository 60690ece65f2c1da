"""Run directories of data-parallel jobs that never ran: ranks whose work is chosen, and who wait for each other.

Each iteration every rank loads data, computes forward and backward, waits for the slowest in the all-reduce at the end
of backward, steps its optimizer and does some other things. What a hook would see of it becomes a record.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from synthetic import WALL_0, Writer, write_run

from lens_auto.recorder.layout import Flag, Kind

Extra = Callable[[int, int], float]  # rank, iteration -> milliseconds


def nothing(rank: int, iteration: int) -> float:
    return 0.0


def on(ranks: set[int] | None, ms: float, every: int = 1) -> Extra:
    """Some milliseconds on some ranks (None: all), every n-th iteration."""
    return lambda rank, iteration: ms if (ranks is None or rank in ranks) and iteration % every == every - 1 else 0.0


@dataclass
class Job:
    """A data-parallel job; times in milliseconds.

    Attributes:
        work: what each phase takes on every rank.
        extra: what it takes on top, by phase; also `checkpoint` and `evaluate`.
        noise: relative standard deviation of each phase's time.
        reducer: the reducer's own logger was recorded.
        visible: collectives that Python issues after the optimizer's step (blocking all-reduces).
        hidden_barrier: after a checkpoint all wait for each other in a call that is not recorded.
        accumulate: microbatches in an iteration; only the last backward is followed by the all-reduce.
        hosts: host of each rank; by default all are on one.
        clock_ms: how far each host's wall clock is ahead.
        wrapper: class that wraps the model; empty: none.
        workers: of the data loader.
        batch_bytes: size of a batch.
    """

    ranks: int = 4
    iterations: int = 60
    seed: int = 1
    work: dict[str, float] = field(
        default_factory=lambda: {"data": 2.0, "forward": 8.0, "backward": 12.0, "optimizer": 2.0, "other": 1.0}
    )
    extra: dict[str, Extra] = field(default_factory=dict)
    noise: float = 0.03
    communication: float = 1.0
    reducer: bool = True
    visible: int = 0
    hidden_barrier: bool = False
    accumulate: int = 1
    hosts: list[str] | None = None
    clock_ms: dict[str, float] = field(default_factory=dict)
    wrapper: str = "DistributedDataParallel"
    workers: int = 0
    batch_bytes: Extra = nothing
    start: float = 0.0
    writers: list[Writer] = field(default_factory=list)

    def run(self, *, pid: int = 100, changes: dict[str, Any] | None = None) -> list[Writer]:
        """Play the job; its writers, by rank."""
        self.random = random.Random(self.seed)
        self.writers = [self._writer(rank, pid + rank, changes or {}) for rank in range(self.ranks)]
        for iteration in range(self.iterations):
            self._iteration(iteration)
        return self.writers

    def write(self, folder: Path) -> Path:
        """Play it and write its run directory."""
        return write_run(folder, *self.run())

    def _writer(self, rank: int, pid: int, changes: dict[str, Any]) -> Writer:
        host = self.hosts[rank] if self.hosts is not None else "elsewhere"
        writer = Writer(rank=rank, world_size=self.ranks, pid=pid, nonce=(pid << 40) + rank, host=host, now=self.start)
        ahead = self.clock_ms.get(host, 0.0)
        if ahead:
            clock = writer.info(Path())["clock"]
            writer.extra["clock"] = {**clock, "wall_ns": WALL_0 + round(ahead * 1e6)}
        writer.extra.update(changes)
        if self.wrapper:
            writer.take(Kind.MODEL_INIT, 1, name=self.wrapper)
        writer.loader(1)
        return writer

    def _time(self, phase: str, rank: int, iteration: int) -> float:
        usual = self.work.get(phase, 0.0)
        extra = self.extra.get(phase, nothing)(rank, iteration)
        return max(0.001, (usual + extra) * max(0.2, self.random.gauss(1, self.noise)))

    def _iteration(self, iteration: int) -> None:
        for microbatch in range(self.accumulate):
            last = microbatch == self.accumulate - 1
            begun, computed = [], []
            for rank, writer in enumerate(self.writers):
                size = round(self.batch_bytes(rank, iteration))
                loading = self._time("data", rank, iteration) / self.accumulate
                writer.take(Kind.FETCH, loading, a=1, b=self.workers, seq=iteration, bytes=size)
                writer.wait(self._time("forward", rank, iteration) / self.accumulate)
                begun.append(writer.now)
                computed.append(writer.now + self._time("backward", rank, iteration) / self.accumulate)
            done = max(computed) + self.communication
            for writer, begin, end in zip(self.writers, begun, computed, strict=True):
                writer.now = done if last else end
                number = writer.add(Kind.BACKWARD, begin, writer.now)
                assert number >= 0
                if self.reducer and last:
                    writer.add(Kind.DDP, begin, end, name="backward", a=iteration)
                    writer.add(Kind.DDP, end - 0.5, done, name="communication", a=iteration)
        for rank, writer in enumerate(self.writers):
            writer.step(ms=self._time("optimizer", rank, iteration))
            writer.wait(self._time("other", rank, iteration))
        for _ in range(self.visible):
            self._all_reduce(iteration)
        self._apart(iteration)

    def _all_reduce(self, iteration: int) -> None:
        came = []
        for rank, writer in enumerate(self.writers):
            writer.wait(self._time("between", rank, iteration))
            came.append(writer.now)
        done = max(came) + self.communication
        for writer, begin in zip(self.writers, came, strict=True):
            seq = sum(record["kind"] == Kind.COLLECTIVE for record in writer.records)
            writer.now = done
            size = self.ranks
            writer.add(Kind.COLLECTIVE, begin, done, Flag.SPAN, name="all_reduce", group="0", seq=seq, group_size=size)

    def _apart(self, iteration: int) -> None:
        saved = False
        for rank, writer in enumerate(self.writers):
            checkpoint = self.extra.get("checkpoint", nothing)(rank, iteration)
            if checkpoint:
                writer.take(Kind.CHECKPOINT_SAVE, checkpoint, name="model.pt")
                saved = True
            evaluation = self.extra.get("evaluate", nothing)(rank, iteration)
            if evaluation:
                loader = writer.loader(0.1)
                for _ in range(4):
                    writer.fetch(loader, evaluation / 8)
                    writer.wait(evaluation / 8)
                writer.exhaust(loader, 0.1)
        if saved and self.hidden_barrier:
            latest = max(writer.now for writer in self.writers)
            for writer in self.writers:
                writer.now = latest
