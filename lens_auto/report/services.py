"""What programs and services made with OpenTelemetry themselves, as the files of a run directory hold it.

`services/<host>-<pid>.jsonl` of a process that is no rank, `ranks/<writer>/spans.jsonl` of one that is; beside them log
records, metrics, and the spans that an endpoint did not take (`docs/providers.md`). All are lines of OTLP/JSON.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from lens_auto import semconv
from lens_auto.identity import SERVICES_DIR
from lens_auto.recorder.finish import process_start_ticks
from lens_auto.recorder.read import RunDirectory, Status, WriterFiles
from lens_auto.recorder.rundir import safe_name

TRACES, UNSENT, LOGS, METRICS = "traces", "unsent", "logs", "metrics"
POSITION_SUFFIX = ".sent"  # beside a file with unsent spans: how much of it was accepted since
_ENDING = re.compile(r"(\.old)?\.jsonl$")
_KIND = re.compile(rf"\.({UNSENT}|{LOGS}|{METRICS})(?:\.old)?\.jsonl$")
_RANK_FILE = re.compile(rf"(spans|{UNSENT}|{LOGS}|{METRICS})(?:\.old)?\.jsonl")
_ERROR = 2  # StatusCode of OTLP


class ProgramFile(NamedTuple):
    """A file of one process.

    Attributes:
        path: where it is.
        kind: `TRACES`, `UNSENT`, `LOGS` or `METRICS`.
        process: which process: `<host>-<pid>`, or a rank's writer.
        rank: its rank; None: it is none.
        may_grow: the process may still write to it.
    """

    path: Path
    kind: str
    process: str
    rank: int | None
    may_grow: bool


@dataclass
class ProgramSummary:
    """What one process made itself."""

    process: str
    rank: int | None
    service: str
    spans: int = 0
    failed: int = 0
    unsent: int = 0  # of its spans, those that an endpoint did not take
    log_records: int = 0
    damaged_lines: int = 0
    files: list[str] = field(default_factory=list)


def find_files(run: RunDirectory) -> list[ProgramFile]:
    """The files of a run, services first."""
    found = [*_of_services(run.path / SERVICES_DIR)]
    for writer in run.writers:
        found += _of_rank(writer)
    return found


def _of_services(folder: Path) -> Iterator[ProgramFile]:
    for path in _files(folder):
        ending = _ENDING.search(path.name)
        if ending is None:
            continue
        kind = _KIND.search(path.name)
        process = path.name[: (kind or ending).start()]
        yield ProgramFile(path, kind[1] if kind else TRACES, process, None, _is_alive(process, path))


def _of_rank(writer: WriterFiles) -> Iterator[ProgramFile]:
    seen: set[str] = set()
    for folder in reversed(writer.folders):  # what is in the run directory is complete
        for path in _files(folder):
            kind = _RANK_FILE.fullmatch(path.name)
            if kind is None or path.name in seen:
                continue
            seen.add(path.name)
            found = TRACES if kind[1] == "spans" else kind[1]
            yield ProgramFile(path, found, writer.name, writer.info.rank, writer.status is Status.RUNNING)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except OSError:
        return []


def _is_alive(process: str, path: Path) -> bool:
    """Whether a process of this name runs here, and is not another one that got its id later."""
    host, _, pid = process.rpartition("-")
    if not pid.isdigit() or (host != safe_name(socket.gethostname()) and not re.fullmatch(r"rank\d+", host)):
        return False
    ticks = process_start_ticks(int(pid))
    try:
        with open("/proc/stat", "rb") as file:
            booted_s = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
        started_s = booted_s + ticks / os.sysconf("SC_CLK_TCK")
        return ticks > 0 and started_s <= path.stat().st_mtime + 1
    except (OSError, StopIteration, ValueError):
        return ticks > 0


def sent_position(path: Path) -> tuple[int, list[int]]:
    """Up to where the lines of a file were dealt with, and where those begin that the endpoint refused for good."""
    try:
        found = orjson.loads(path.with_name(path.name + POSITION_SUFFIX).read_bytes())
        return int(found["position"]), [int(each) for each in found["refused"]]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, []


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The messages of a file, each with where its line ends; None for a line that is damaged.

    Args:
        path: the file.
        start: where to begin, the end of a line.

    Raises:
        OSError: it cannot be read.
    """
    end = start
    with open(path, "rb") as file:
        file.seek(start)
        for line in file:
            end += len(line)
            try:
                message = orjson.loads(line)
            except ValueError:
                message = None
            yield end, message if isinstance(message, dict) else None


def spans_of(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The spans of a message, each with its service."""
    for part in _objects(message, "resourceSpans"):
        service = _service(part)
        for scope in _objects(part, "scopeSpans"):
            for span in _objects(scope, "spans"):
                yield service, span


def _objects(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = found.get(name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _service(part: dict[str, Any]) -> str:
    resource = part.get("resource")
    for attribute in _objects(resource, "attributes") if isinstance(resource, dict) else ():
        value = attribute.get("value")
        if attribute.get("key") == semconv.SERVICE_NAME and isinstance(value, dict):
            return str(value.get("stringValue", ""))
    return ""


def trace_lines(run: RunDirectory) -> Iterator[tuple[bytes, int]]:
    """The lines with spans of all processes of a run, as they are, and how many spans are in each.

    A line that is damaged, and not merely being written, is an empty one.
    """
    for file in find_files(run):
        if file.kind not in (TRACES, UNSENT):
            continue
        try:
            with open(file.path, "rb") as lines:
                for line in lines:
                    try:
                        message = orjson.loads(line)
                    except ValueError:
                        message = None
                    if isinstance(message, dict) and line.endswith(b"\n"):
                        yield line, sum(1 for _ in spans_of(message))
                    elif not file.may_grow:
                        yield b"", 0
        except OSError:  # it moved to the run directory, or somebody removed it
            continue


def find_programs(run: RunDirectory) -> list[ProgramSummary]:
    """What each process of a run made itself, services first."""
    found: dict[str, ProgramSummary] = {}
    for file in find_files(run):
        if file.kind == METRICS:
            continue
        program = found.setdefault(file.process, ProgramSummary(file.process, file.rank, ""))
        program.files.append(str(file.path.relative_to(run.path) if file.path.is_relative_to(run.path) else file.path))
        try:
            start = sent_position(file.path)[0] if file.kind == UNSENT else 0
            for _, message in read_lines(file.path, start):
                _count(program, file, message)
        except OSError:  # it moved to the run directory, or somebody removed it
            continue
    return [program for program in found.values() if program.spans or program.log_records or program.damaged_lines]


def _count(program: ProgramSummary, file: ProgramFile, message: dict[str, Any] | None) -> None:
    if message is None:
        program.damaged_lines += not file.may_grow  # else it is being written
    elif file.kind == LOGS:
        for part in _objects(message, "resourceLogs"):
            program.service = program.service or _service(part)
            program.log_records += sum(len(_objects(scope, "logRecords")) for scope in _objects(part, "scopeLogs"))
    else:
        for service, span in spans_of(message):
            program.service = program.service or service
            program.spans += 1
            program.unsent += file.kind == UNSENT
            status = span.get("status")
            program.failed += isinstance(status, dict) and status.get("code") in (_ERROR, "STATUS_CODE_ERROR")
