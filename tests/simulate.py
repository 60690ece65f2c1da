"""Run directories of data-parallel jobs that never ran: ranks whose work is chosen, and who wait for each other.

Each iteration every rank loads data, computes forward and backward, waits for the slowest in the all-reduce at the end
of backward, steps its optimizer and does some other things. What a hook would see of it becomes a record.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import WALL_0, Writer, at, segment_header, write_run

from lens_auto.recorder import layout
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RECORD_DTYPE

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


def write_large(folder: Path, ranks: int = 8, iterations: int = 10_000) -> int:
    """Write a run of 40 records an iteration and rank, columns at a time; how many records it has.

    An iteration takes 20 ms: a fetch, 14 blocking and 8 asynchronous collectives with their waits, two sends and two
    receives, backward with what its reducer says, a step. Rank 3 fetches for 4 ms longer.
    """
    strings = [
        "all_reduce",
        "0",
        "all_gather_into_tensor",
        "wait",
        "isend",
        "irecv",
        "backward",
        "communication",
        "SGD",
    ]
    template: list[tuple[Kind, float, float, dict[str, Any]]] = [(Kind.FETCH, 0.0, 1.0, {"a": 1, "seq": 0})]
    for number in range(14):
        template.append(
            (Kind.COLLECTIVE, 1.2 + 0.4 * number, 1.4 + 0.4 * number, {"name": 1, "group": 2, "seq": number})
        )
    for number in range(8):
        begin = 7.0 + 0.5 * number
        fields = {"name": 3, "group": 2, "seq": 14 + number, "flags": Flag.SPAN | Flag.ASYNC}
        template.append((Kind.COLLECTIVE, begin, begin + 0.01, fields))
        template.append((Kind.WAIT, begin + 0.3, begin + 0.4, {"name": 4, "ref": len(template)}))
    for number in range(2):
        template.append((Kind.SEND, 11.2 + 0.3 * number, 11.3 + 0.3 * number, {"name": 5, "group": 2, "seq": number}))
        template.append((Kind.RECV, 11.3 + 0.3 * number, 11.4 + 0.3 * number, {"name": 6, "group": 2, "seq": number}))
    template += [
        (Kind.BACKWARD, 12.0, 17.0, {}),
        (Kind.DDP, 12.0, 16.0, {"name": 7}),
        (Kind.DDP, 13.0, 17.0, {"name": 8}),
        (Kind.OPTIMIZER_STEP, 17.5, 19.0, {"name": 9, "b": 1}),
        (Kind.BOUNDARY, 19.0, 19.0, {}),
    ]
    assert len(template) == 40
    write_run(folder)
    generator = np.random.default_rng(1)
    for rank in range(ranks):
        writer = Writer(rank=rank, world_size=ranks, pid=100 + rank, nonce=(100 + rank) << 40, strings=list(strings))
        data = np.zeros((iterations, len(template)), dtype=RECORD_DTYPE)
        begins = at(10) + np.arange(iterations, dtype=np.int64) * 24_000_000
        for place, (kind, begin, end, fields) in enumerate(template):
            column = data[:, place]
            # Until the first collective only rank 3 is late; it lets all go together.
            came_late = place > 1 or (place == 1 and rank == 3)
            left_late = place > 0 or rank == 3
            jitter = generator.integers(0, 50_000, iterations) if kind is Kind.FETCH else 0
            column["start_ns"] = begins + round(begin * 1e6) + 4_000_000 * came_late
            column["end_ns"] = begins + round(end * 1e6) + 4_000_000 * left_late + jitter
            column["kind"], column["flags"], column["group_size"] = kind, Flag.SPAN, ranks
            column["peer"], column["seq"], column["init"], column["bytes"] = -1, -1, 1, 4096
            for name, value in fields.items():
                column[name] = value
            if kind is Kind.COLLECTIVE:
                column["seq"] += 22 * np.arange(iterations, dtype=np.int64)
            if kind in (Kind.SEND, Kind.RECV):
                column["seq"] += 2 * np.arange(iterations, dtype=np.int64)
                column["peer"] = (rank + 1) % ranks if kind is Kind.SEND else (rank - 1) % ranks
            if kind is Kind.WAIT:
                column["ref"] += np.arange(iterations, dtype=np.uint64) * np.uint64(len(template))
        whole = data.reshape(-1)
        whole["commit"] = np.arange(len(whole)) % layout.SEGMENT_RECORDS + 1
        writer.now = 24.0 * iterations + 100
        writer.extra = {"records": len(whole)}
        place_of = folder / layout.RANKS_DIR / writer.name
        place_of.mkdir(parents=True)
        (place_of / layout.WRITER_NAME).write_text(json.dumps(writer.info(folder)))
        (place_of / layout.STRINGS_NAME).write_bytes(writer.strings_file())
        (place_of / layout.LIVE_NAME).write_bytes(writer.live())
        for number in range(-(-len(whole) // layout.SEGMENT_RECORDS)):
            part = whole[number * layout.SEGMENT_RECORDS : (number + 1) * layout.SEGMENT_RECORDS]
            header = segment_header(number, writer.nonce, writer.pid, rank)
            (place_of / layout.segment_name(number)).write_bytes(header + part.tobytes())
    return ranks * iterations * len(template)
