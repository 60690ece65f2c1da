"""What a run recorded, as plain Python objects, read with the package's own reader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lens_auto.export.spans import Span, run_spans
from lens_auto.iteration.rule import Iterations, find_iterations
from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.recorder.read import RunDirectory, WriterFiles


@dataclass(frozen=True)
class Row:
    """One record, its strings resolved. Fields as in `recorder.layout.RECORD_FIELDS`."""

    number: int
    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    iteration: int
    thread: int
    flags: Flag
    group: str
    dtype: str
    seq: int
    bytes: int
    peer: int
    tag: int
    group_size: int
    detail: str
    exposed_ns: int
    ref: int
    a: int
    b: int
    c: int
    init: int


class Writer:
    """One process that recorded as a rank."""

    def __init__(self, files: WriterFiles) -> None:
        self.files = files
        self.info: dict[str, Any] = files.info.raw
        self.rank = files.info.rank
        self.pid = files.info.pid

    def __repr__(self) -> str:
        return f"Writer(rank={self.rank}, pid={self.pid}, {len(self.rows)} records)"

    @cached_property
    def rows(self) -> list[Row]:
        """Its records, in order of their numbers."""
        records = self.files.records()
        text = self.files.string
        names = records.data.dtype.names or ()
        found = []
        for number, values in zip(records.numbers.tolist(), records.data.tolist(), strict=True):
            row = dict(zip(names, values, strict=True))
            for field in ("name", "group", "dtype", "detail"):
                row[field] = text(row[field])
            row["kind"], row["flags"] = Kind(row["kind"]), Flag(row["flags"])
            found.append(Row(number, **{name: row[name] for name in Row.__annotations__ if name != "number"}))
        return found

    def of(self, *kinds: Kind) -> list[Row]:
        """Its records of these kinds."""
        return [row for row in self.rows if row.kind in kinds]

    @cached_property
    def iterations(self) -> Iterations:
        """Its iterations, by the readers' rule."""
        records = self.files.records()
        return find_iterations(records.data, records.numbers)

    def phase_ms(self, phase: Phase) -> list[float]:
        """Milliseconds of a phase in each iteration."""
        return [value / 1e6 for value in self.iterations.phase_ns[:, phase].tolist()]


def read_run(path: Path) -> list[Writer]:
    """All writers of a run directory by rank; a problem that the reader met fails the test."""
    run = RunDirectory(path)
    writers = [Writer(files) for files in run.writers]
    for writer in writers:
        assert writer.rows is not None
    assert run.problems == []
    return writers


def read_spans(path: Path) -> dict[int, list[Span]]:
    """The spans of a run directory by rank."""
    run = RunDirectory(path)
    found: dict[int, list[Span]] = {}
    for writer in run_spans(run):
        spans = list(writer.spans)
        assert len(spans) == writer.count
        found.setdefault(writer.writer.info.rank, []).extend(spans)
    assert run.problems == []
    return found
