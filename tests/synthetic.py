"""Run directories made by hand: records with chosen times, written through `recorder/layout.py` and nothing else.

Independent of the real recorder, so that the readers are tested against the contract and not against its first user.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lens_auto.recorder import layout
from lens_auto.recorder.layout import RECORD_FIELDS, Flag, Kind, Phase, WriterState
from lens_auto.recorder.read import RECORD_DTYPE

MS = 1_000_000
MONOTONIC_0 = 5_000_000_000_000  # of the synthetic clock, monotonic
WALL_0 = 1_700_000_000_000_000_000
FIELDS = [name for name, _ in RECORD_FIELDS]
SLOT_FIELDS = (
    *("kind", "thread", "native_id", "name", "group", "group_size", "peer", "tag", "start_ns", "seq", "bytes", "dtype"),
)
ALL_GROUPS = [
    "job",
    "checkpoint",
    "evaluate",
    "model_init",
    "load_checkpoint",
    "step",
    "forward_backward",
    "optimizer",
    "data_loading",
    "communication",
]


@dataclass
class Writer:
    """One writer. `now` is a clock in milliseconds that the methods move; a record starts and ends by it."""

    rank: int = 0
    world_size: int = 1
    nonce: int = 0x1111_1111_1111_1111
    host: str = "elsewhere"
    pid: int = 4242
    start_ticks: int = 77
    run_id: str = "run-1"
    seed: str | None = "00" * 15 + "07"
    groups: list[str] = field(default_factory=lambda: list(ALL_GROUPS))
    closed: bool = True
    now: float = 0.0
    records: list[dict[str, int]] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    slots: dict[int, dict[str, int]] = field(default_factory=dict)
    phase: Phase = Phase.OTHER
    extra: dict[str, Any] = field(default_factory=dict)
    loaders: int = 0

    @property
    def name(self) -> str:
        return f"{self.host}-{self.pid}-{self.start_ticks:x}"

    # --- records ------------------------------------------------------------------------------------------------------

    def string(self, text: str) -> int:
        if not text:
            return 0
        if text not in self.strings:
            self.strings.append(text)
        return self.strings.index(text) + 1

    def add(self, kind: Kind, start: float, end: float | None, flags: int = Flag.SPAN, **fields: Any) -> int:
        """Append a record; start and end in ms of the clock, strings as text. Returns its number."""
        record = dict.fromkeys(FIELDS, 0)
        record.update(kind=kind, flags=int(flags), peer=-1, seq=-1)
        record["start_ns"] = at(start)
        record["end_ns"] = 0 if end is None else at(end)
        for key, value in fields.items():
            record[key] = self.string(value) if isinstance(value, str) else int(value)
        self.records.append(record)
        return len(self.records) - 1

    def take(self, kind: Kind, ms: float, flags: int = Flag.SPAN, **fields: Any) -> int:
        """Append a record that starts now and lasts some ms; the clock moves to its end."""
        start, self.now = self.now, self.now + ms
        return self.add(kind, start, self.now, flags, **fields)

    def wait(self, ms: float) -> None:
        """Nothing that a hook sees."""
        self.now += ms

    def loader(self, ms: float = 1.0) -> int:
        """Start a pass; returns its number."""
        self.loaders += 1
        self.take(Kind.LOADER_START, ms, a=self.loaders)
        return self.loaders

    def fetch(self, loader: int, ms: float = 2.0, flags: int = Flag.SPAN) -> int:
        return self.take(Kind.FETCH, ms, flags, a=loader)

    def exhaust(self, loader: int, ms: float = 1.0) -> int:
        return self.fetch(loader, ms, Flag.SPAN | Flag.EXHAUSTED)

    def backward(self, ms: float = 4.0) -> int:
        return self.take(Kind.BACKWARD, ms)

    def step(self, optimizer: int = 0, ms: float = 1.0, flags: int = Flag.SPAN, b: int = 1, name: str = "SGD") -> int:
        return self.take(Kind.OPTIMIZER_STEP, ms, flags, a=optimizer, b=b, name=name)

    def boundary(self) -> int:
        """The live prediction closes an iteration now."""
        return self.add(Kind.BOUNDARY, self.now, self.now, 0)

    def array(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """The records as a reader gives them."""
        found = np.zeros(len(self.records), dtype=RECORD_DTYPE)
        for index, record in enumerate(self.records):
            found[index] = tuple({**record, "commit": index % layout.SEGMENT_RECORDS + 1}[name] for name in FIELDS)
        return found

    # --- files --------------------------------------------------------------------------------------------------------

    def info(self, run_dir: Path) -> dict[str, Any]:
        return {
            "format": "lens-writer",
            "version": 1,
            "writer": self.name,
            "nonce": f"{self.nonce:016x}",
            "host": self.host,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.rank,
            "run_id": self.run_id,
            "run_dir": str(run_dir),
            "spool_dir": None,
            "seed": self.seed,
            "seed_source": None if self.seed is None else "agreed",
            "groups": self.groups,
            "resource": {"service.name": "nemo", "dl.rank": self.rank, "dl.world_size": self.world_size},
            "clock": {"monotonic_ns": MONOTONIC_0, "wall_ns": WALL_0},
            "started_ns": MONOTONIC_0,
            "ended_ns": at(self.now) if self.closed else None,
            "end": "exit" if self.closed else None,
            "torch": "2.13.0",
            "python": "3.12.0",
            "iteration_optimizer": None,
            "records": len(self.records),
            "dropped": 0,
            "hooks_off": {},
            "hook_faults": 0,
            **self.extra,
        }

    def live(self) -> bytes:
        page = bytearray(layout.LIVE_BYTES)
        layout.LIVE_HEAD.pack_into(
            page,
            0,
            layout.LIVE_MAGIC,
            layout.FORMAT_VERSION,
            self.pid,
            self.start_ticks,
            self.nonce,
            self.rank,
            self.world_size,
            self.rank,
        )
        state = WriterState.CLOSED if self.closed else WriterState.RUNNING
        page[layout.LIVE_STATE_OFFSET : layout.LIVE_STATE_OFFSET + 4] = int(state).to_bytes(4, "little")
        now = at(self.now)
        layout.LIVE_HEARTBEAT.pack_into(page, layout.LIVE_HEARTBEAT_OFFSET, now, now - MONOTONIC_0 + WALL_0)
        layout.LIVE_PHASE.pack_into(page, layout.LIVE_PHASE_OFFSET, 3, self.phase, 9, now, 10, 11, 3)
        layout.LIVE_COUNTERS.pack_into(page, layout.LIVE_COUNTERS_OFFSET, len(self.records), 0, 0, 0, 1)
        for slot, fields in self.slots.items():
            values = {**dict.fromkeys(SLOT_FIELDS, 0), "peer": -1, **fields}
            operation = layout.pack_operation(
                *(values[name] for name in ("kind", "name", "group", "group_size", "peer", "tag"))
            )
            offset = layout.slot_offset(slot)
            begin = layout.slot_mark(values["seq"], values["start_ns"])
            start, end = values["start_ns"], values.get("end", begin)
            layout.LIVE_SLOT.pack_into(page, offset, begin, start, values["bytes"], values["dtype"], operation, end)
            owner = values["thread"], values["native_id"]
            layout.LIVE_SLOT_OWNER.pack_into(page, offset + layout.LIVE_SLOT_OWNER_OFFSET, *owner)
        return bytes(page)

    def strings_file(self) -> bytes:
        lines = [json.dumps({"format": layout.STRINGS_FORMAT, "version": layout.FORMAT_VERSION})]
        return "".join(f"{line}\n" for line in (*lines, *map(json.dumps, self.strings))).encode()

    def segments(self, *, cut: bool = True) -> dict[str, bytes]:
        """The segment files, cut after the last record or as long as a writer makes them."""
        data = self.array()
        found = {}
        for number in range((len(data) + layout.SEGMENT_RECORDS - 1) // layout.SEGMENT_RECORDS):
            part = data[number * layout.SEGMENT_RECORDS : (number + 1) * layout.SEGMENT_RECORDS]
            body = part.tobytes()
            if not cut:
                body = body.ljust(layout.SEGMENT_RECORDS * layout.RECORD_BYTES, b"\0")
            found[layout.segment_name(number)] = segment_header(number, self.nonce, self.pid, self.rank) + body
        return found

    def write(self, run_dir: Path, *, cut: bool = True) -> Path:
        """Write the writer's folder into a run directory; returns the folder."""
        folder = run_dir / layout.RANKS_DIR / self.name
        folder.mkdir(parents=True)
        (folder / layout.WRITER_NAME).write_text(json.dumps(self.info(run_dir)))
        (folder / layout.STRINGS_NAME).write_bytes(self.strings_file())
        (folder / layout.LIVE_NAME).write_bytes(self.live())
        for name, data in self.segments(cut=cut).items():
            (folder / name).write_bytes(data)
        return folder


def at(ms: float) -> int:
    """Monotonic nanoseconds of a time in ms of the synthetic clock."""
    return MONOTONIC_0 + round(ms * MS)


def wall(ms: float) -> int:
    """Wall clock nanoseconds of a time in ms of the synthetic clock."""
    return WALL_0 + round(ms * MS)


def segment_header(number: int, nonce: int, pid: int = 4242, rank: int = 0, **changes: Any) -> bytes:
    """The first page of a segment."""
    values: dict[str, Any] = {
        "magic": layout.SEGMENT_MAGIC,
        "version": layout.FORMAT_VERSION,
        "record_bytes": layout.RECORD_BYTES,
        "capacity": layout.SEGMENT_RECORDS,
        "number": number,
        "nonce": nonce,
        "pid": pid,
        "rank": rank,
        "monotonic_ns": MONOTONIC_0,
        "wall_ns": WALL_0,
        "table": json.dumps({"fields": [[name, "<" + code] for name, code in RECORD_FIELDS]}).encode(),
        **changes,
    }
    table = values.pop("table")
    json_bytes = values.pop("json_bytes", len(table))
    header = layout.SEGMENT_HEADER.pack(*values.values(), json_bytes) + table
    return header.ljust(layout.SEGMENT_HEADER_BYTES, b"\0")


def write_run(run_dir: Path, *writers: Writer, cut: bool = True) -> Path:
    """Write a run directory with its manifest and writers."""
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest = {"format": "lens-run", "version": 1, "run_id": "run-1", "created": "2026-01-02T03:04:05Z"}
    (run_dir / layout.MANIFEST_NAME).write_text(json.dumps(manifest))
    for writer in writers:
        writer.write(run_dir, cut=cut)
    return run_dir


def train(writer: Writer, iterations: int = 5, *, comm: bool = True, live: bool = True) -> Writer:
    """A plain loop: fetch 2 ms, forward 3, backward 4 with an asynchronous all-reduce (wait 1 ms), step 1, other 1."""
    writer.add(Kind.PROCESS_GROUP, 0, 5, name="init_process_group", group="0", group_size=writer.world_size)
    writer.add(Kind.MODEL_INIT, 5, 10, name="DistributedDataParallel")
    writer.now = 10
    loader = writer.loader(2)
    for number in range(iterations):
        writer.fetch(loader)
        writer.wait(3)
        start = writer.now
        writer.backward()
        if comm:
            operation = writer.add(
                Kind.COLLECTIVE,
                start + 1,
                start + 1.5,
                Flag.SPAN | Flag.ASYNC,
                name="all_reduce",
                group="0",
                dtype="float32",
                seq=number,
                bytes=4096,
                group_size=writer.world_size,
                exposed_ns=MS // 2,
                init=1,
            )
            writer.add(Kind.WAIT, start + 2, start + 3, Flag.SPAN, ref=operation + 1, exposed_ns=MS, name="wait")
        writer.step()
        if live:
            writer.boundary()
        writer.wait(1)
    writer.exhaust(loader)
    return writer
