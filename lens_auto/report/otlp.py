"""OTLP/JSON lines as a run: what a collector's file exporter, or `lens-auto export`, wrote of one.

Spans become the records that they were made of, as far as they say so, and everything else goes on as with a run
directory. What spans do not say: the thread of an operation (the training thread is assumed), the pass of a fetch (told
from the numbers of the batches), and which of several optimizers stepped (iterations are those that the spans say).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from lens_auto import semconv
from lens_auto.recorder.layout import MANIFEST_NAME, RANKS_DIR, DeviceTime, Flag, Kind
from lens_auto.recorder.read import (
    RECORD_DTYPE,
    Clock,
    LiveFile,
    Records,
    RunDirectory,
    Status,
    UnreadableFile,
    WriterFiles,
    WriterInfo,
)

_SENDS, _RECEIVES = ("send", "isend", "send_object_list"), ("recv", "irecv", "recv_object_list")
_KINDS = {
    semconv.SPAN_BACKWARD: Kind.BACKWARD,
    semconv.SPAN_OPTIMIZER_STEP: Kind.OPTIMIZER_STEP,
    semconv.SPAN_MODEL_INIT: Kind.MODEL_INIT,
    semconv.SPAN_CHECKPOINT_SAVE: Kind.CHECKPOINT_SAVE,
    semconv.SPAN_CHECKPOINT_LOAD: Kind.CHECKPOINT_LOAD,
}
_NAMED_BY = {
    Kind.OPTIMIZER_STEP: semconv.DL_OPTIMIZER,
    Kind.MODEL_INIT: semconv.DL_MODEL_WRAPPER,
    Kind.CHECKPOINT_SAVE: semconv.FILE_PATH,
    Kind.CHECKPOINT_LOAD: semconv.FILE_PATH,
}
_LIMIT_NS = 1 << 62


@dataclass
class _Span:
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool


@dataclass
class _Process:
    """The spans of one process as one rank."""

    resource: dict[str, Any]
    spans: list[_Span] = field(default_factory=list)


class SpanRun(RunDirectory):
    """A file of OTLP/JSON lines that stands for a run directory.

    Raises:
        UnreadableFile: it is no such file, or none of its spans is of a training job.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[UnreadableFile] = []
        self.manifest: dict[str, Any] = {}
        processes = self._read()
        self.writers: list[WriterFiles] = [
            _SpanWriter(self.path, index, process) for index, process in enumerate(processes)
        ]
        self.writers.sort(key=lambda writer: (writer.info.rank, writer.info.started_ns))

    def _read(self) -> list[_Process]:
        found: dict[tuple[Any, ...], _Process] = {}
        lines = bad = 0
        valid = 'lines like {"resourceSpans": [...]} are valid'
        with self.path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                lines += 1
                try:
                    message = orjson.loads(line)
                    for part in message["resourceSpans"]:
                        resource = _attributes(part.get("resource", {}).get("attributes", ()))
                        spans = [_span(span) for scope in part.get("scopeSpans", ()) for span in scope.get("spans", ())]
                        key = tuple(resource.get(name) for name in (*_WHO, semconv.PROCESS_PID, semconv.NEMO_RUN_ID))
                        found.setdefault(key, _Process(resource)).spans += spans
                except (ValueError, KeyError, TypeError, AttributeError):
                    bad += 1
        if bad == lines:
            kind = "empty" if not lines else "no OTLP/JSON lines"
            folder = f"a folder with {MANIFEST_NAME} and {RANKS_DIR}/ is valid, and so are "
            raise UnreadableFile(self.path, kind, folder + valid.replace(" are valid", ""), "nothing is read")
        if bad:
            self.problems.append(
                UnreadableFile(self.path, f"{bad} of {lines} lines are damaged", valid, "they are skipped")
            )
        ranks = [process for process in found.values() if isinstance(process.resource.get(semconv.DL_RANK), int)]
        if not ranks:
            raise UnreadableFile(
                self.path,
                f"no span of a resource with {semconv.DL_RANK}",
                "spans that a rank of a training job recorded are valid",
                "nothing is read",
            )
        return self._of_one_run(ranks)

    def _of_one_run(self, processes: list[_Process]) -> list[_Process]:
        """Of several runs the one that began last. (Ranks that never met have a run id each, and are one run.)"""
        runs: dict[str, list[_Process]] = {}
        for process in processes:
            runs.setdefault(str(process.resource.get(semconv.NEMO_RUN_ID, "")), []).append(process)
        ranks = [{process.resource[semconv.DL_RANK] for process in of_run} for of_run in runs.values()]
        if sum(map(len, ranks)) == len(set().union(*ranks)):
            return processes
        begun = {run: min(span.start_ns for each in of_run for span in each.spans) for run, of_run in runs.items()}
        newest = max(begun, key=lambda run: begun[run])
        self.problems.append(
            UnreadableFile(
                self.path,
                f"{len(runs)} runs ({', '.join(sorted(runs))})",
                "one run is told at a time",
                f"only {newest}, which began last, is read",
            )
        )
        return runs[newest]


_WHO = (semconv.DL_RANK, semconv.HOST_NAME)


def _attributes(found: Any) -> dict[str, Any]:
    return {each["key"]: _value(each.get("value", {})) for each in found}


def _value(value: dict[str, Any]) -> Any:
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind in ("stringValue", "boolValue", "doubleValue"):
            return content
    return None


def _span(span: dict[str, Any]) -> _Span:
    start_ns = min(max(int(span.get("startTimeUnixNano", 0)), 0), _LIMIT_NS)
    end_ns = min(max(int(span.get("endTimeUnixNano", 0)), start_ns), _LIMIT_NS)
    failed = span.get("status", {}).get("code") == 2
    return _Span(str(span.get("name", "")), start_ns, end_ns, _attributes(span.get("attributes", ())), failed)


# --- one process ------------------------------------------------------------------------------------------------------


class _SpanWriter(WriterFiles):
    """The spans of one process in the form of a writer. Its clock is the wall clock."""

    def __init__(self, path: Path, index: int, process: _Process) -> None:
        self._process = process
        process.spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
        resource, spans = process.resource, process.spans
        job = next((span for span in spans if span.name == semconv.SPAN_JOB), None)
        truncated = job is not None and job.attributes.get(semconv.NEMO_SPAN_TRUNCATED) is True
        end_ns = max((span.end_ns for span in spans), default=0)
        self._end_ns = end_ns if job is None else job.end_ns
        self._status = Status.UNKNOWN if job is None else Status.DIED if truncated else Status.CLOSED
        dropped = 0 if job is None else job.attributes.get(semconv.LENS_RECORDS_DROPPED, 0)
        super().__init__(
            name=f"{path.name}-{index}",
            folders=[path],
            info=WriterInfo(
                writer=f"{path.name}-{index}",
                nonce=index,
                host=str(resource.get(semconv.HOST_NAME, "")),
                pid=_whole(resource.get(semconv.PROCESS_PID)),
                start_ticks=0,
                rank=_whole(resource.get(semconv.DL_RANK)),
                world_size=_whole(resource.get(semconv.DL_WORLD_SIZE)),
                local_rank=_whole(resource.get(semconv.DL_LOCAL_RANK)),
                run_id=str(resource.get(semconv.NEMO_RUN_ID, "")),
                run_dir=None,
                spool_dir=None,
                seed=None,
                seed_source=None,
                groups=frozenset(),
                resource=resource,
                clock=Clock(0, 0),
                started_ns=spans[0].start_ns if job is None and spans else 0 if job is None else job.start_ns,
                ended_ns=self._end_ns if self._status is Status.CLOSED else None,
                end=None,
                torch=None,
                python=None,
                iteration_optimizer=None,
                records=0,  # how many there were, nobody told
                dropped=dropped if isinstance(dropped, int) else 0,
                hooks_off={},
                hook_faults=0,
                raw={},
            ),
            problems=[],
        )
        self._texts = [""]
        self._ids = {"": 0}

    @property
    def strings(self) -> list[str]:
        """Interned strings by id."""
        return self._texts

    @property
    def live(self) -> LiveFile | None:
        """There is none."""
        return None

    @property
    def status(self) -> Status:
        """Whether its job's span says that it closed."""
        return self._status

    @property
    def last_sign_ns(self) -> int | None:
        """The end of its job's span, or of its last span."""
        return self._end_ns

    def records(self, first_segment: int = 0, segments: int | None = None) -> Records:
        """The records that the spans were made of."""
        return self._records

    @cached_property
    def _records(self) -> Records:
        rows: list[tuple[int, ...]] = []
        closing = self._closing_steps()
        passes = _Passes()
        for span in self._process.spans:
            self._add(rows, span, closing, passes)
        names = RECORD_DTYPE.names or ()
        data = np.zeros(len(rows), dtype=RECORD_DTYPE)
        for at, name in enumerate(names):
            allowed = np.iinfo(RECORD_DTYPE[name])  # whatever the file says
            data[name] = [min(max(row[at], int(allowed.min)), int(allowed.max)) for row in rows]
        return Records(data, np.arange(len(data), dtype=np.int64), 0, 0, 0)

    def _closing_steps(self) -> set[int] | None:
        """Starts of the steps with which iterations close, the last of each; None where no iteration has a span."""
        spans = self._process.spans
        steps = np.array([span.start_ns for span in spans if span.name == semconv.SPAN_OPTIMIZER_STEP], dtype=np.int64)
        found = set()
        for span in spans:
            if span.name == semconv.SPAN_ITERATION:
                last = int(np.searchsorted(steps, span.end_ns)) - 1
                if last >= 0 and steps[last] >= span.start_ns:
                    found.add(int(steps[last]))
        return found or None

    def _add(self, rows: list[tuple[int, ...]], span: _Span, closing: set[int] | None, passes: _Passes) -> None:
        values = span.attributes
        flags = int(Flag.SPAN) | (int(Flag.FAILED) if span.failed else 0)
        kind = _KINDS.get(span.name)
        if kind is not None:
            counted = kind is not Kind.OPTIMIZER_STEP or closing is None or span.start_ns in closing
            flags |= int(Flag.SKIPPED) if values.get(semconv.DL_OPTIMIZER_SKIPPED) is True else 0
            name = values.get(_NAMED_BY[kind], "") if kind in _NAMED_BY else "backward"
            size = _whole(values.get(semconv.FILE_SIZE), 0)
            self._row(rows, kind, span, flags, name, b=int(counted), bytes=size)
        elif span.name == semconv.SPAN_DATA_LOADING:
            starts = str(values.get(semconv.CODE_FUNCTION_NAME, "")).endswith("__iter__")
            exhausted = values.get(semconv.DL_LOADER_EXHAUSTED) is True
            batch = _whole(values.get(semconv.DL_BATCH_INDEX), -1)
            number = passes.start() if starts else passes.fetch(batch)
            flags |= int(Flag.EXHAUSTED) if exhausted else 0
            workers = _whole(values.get(semconv.DL_LOADER_WORKERS), 0)
            kind = Kind.LOADER_START if starts else Kind.FETCH
            self._row(rows, kind, span, flags, "", a=number, b=workers, seq=batch)
        elif span.name.startswith(semconv.SPAN_DDP_PREFIX):
            self._row(rows, Kind.DDP, span, flags, span.name.removeprefix(semconv.SPAN_DDP_PREFIX))
        elif span.name.startswith(semconv.SPAN_DISTRIBUTED_PREFIX) and semconv.DL_COMM_BYTES in values:
            self._operation(rows, span, flags)

    def _operation(self, rows: list[tuple[int, ...]], span: _Span, flags: int) -> None:
        values = span.attributes
        name = span.name.removeprefix(semconv.SPAN_DISTRIBUTED_PREFIX)
        kind = Kind.SEND if name in _SENDS else Kind.RECV if name in _RECEIVES else Kind.COLLECTIVE
        timing = values.get(semconv.LENS_TIMING_SOURCE)
        duration_ns = _whole(values.get(semconv.DL_COMM_DEVICE_DURATION_NS), -1)
        enqueued = timing in (semconv.TIMING_HOST_ENQUEUE, semconv.TIMING_CUDA_EVENT) or duration_ns >= 0
        asynchronous = values.get(semconv.DL_COMM_ASYNC) is True
        flags |= int(Flag.ENQUEUE) if enqueued else 0
        flags |= int(Flag.ASYNC) if asynchronous else 0
        unknown = values.get(semconv.DL_COMM_END) == semconv.DL_COMM_END_UNKNOWN
        flags |= int(Flag.END_UNKNOWN) if unknown else 0
        by_flight = timing == semconv.TIMING_FLIGHT_RECORDER
        if by_flight and not enqueued:
            flags |= int(Flag.FLIGHT)
        fields: dict[str, Any] = {
            "group": self._id(str(values.get(semconv.DL_COMM_GROUP, ""))),
            "seq": _whole(values.get(semconv.DL_COMM_SEQ), -1),
            "bytes": _whole(values.get(semconv.DL_COMM_BYTES), 0),
            "dtype": self._id(str(values.get(semconv.DL_COMM_DTYPE, ""))),
            "group_size": _whole(values.get(semconv.DL_COMM_GROUP_SIZE), 0),
            "peer": _whole(values.get(semconv.DL_COMM_PEER), -1),
            "tag": _whole(values.get(semconv.DL_COMM_TAG), 0),
        }
        measured = {"ref": len(rows) + 1}
        if not asynchronous or unknown:
            self._row(rows, kind, span, flags, name, **fields)
            if duration_ns >= 0:
                what = 0 if by_flight else int(DeviceTime.EXPOSED) * (semconv.DL_COMM_EXPOSED_NS in values)
                origin = int(Flag.FLIGHT) if by_flight else 0
                self._row(rows, Kind.DEVICE_TIME, span, origin, "", a=duration_ns, c=what, **measured)
            return
        # The span ends with the wait; how long that and the call held the thread is all that it says of both.
        exposed_ns = _whole(values.get(semconv.DL_COMM_EXPOSED_NS), 0)
        waiting_ns = min(exposed_ns, span.end_ns - span.start_ns)
        call = _Span(span.name, span.start_ns, span.start_ns, values, span.failed)
        wait = _Span(span.name, span.end_ns - waiting_ns, span.end_ns, values, False)
        number = len(rows)
        self._row(rows, kind, call, flags, name, **fields)
        self._row(rows, Kind.WAIT, wait, flags & int(Flag.ENQUEUE), "wait", ref=number + 1)
        if duration_ns >= 0:
            self._row(rows, Kind.DEVICE_TIME, span, int(Flag.FLIGHT), "", a=duration_ns, **measured)
        if timing == semconv.TIMING_CUDA_EVENT and semconv.DL_COMM_EXPOSED_NS in values:
            what = int(DeviceTime.WAIT | DeviceTime.EXPOSED)
            self._row(rows, Kind.DEVICE_TIME, wait, 0, "", a=exposed_ns, c=what, **measured)

    def _row(self, rows: list[tuple[int, ...]], kind: Kind, span: _Span, flags: int, name: str, **fields: int) -> None:
        record = {"peer": -1, "seq": -1, "init": 1, **fields}
        record.update(start_ns=span.start_ns, end_ns=span.end_ns, kind=int(kind), flags=flags, name=self._id(str(name)))
        rows.append(tuple(record.get(column, 0) for column in RECORD_DTYPE.names or ()))

    def _id(self, text: str) -> int:
        found = self._ids.get(text)
        if found is None:
            found = self._ids[text] = len(self._texts)
            self._texts.append(text)
        return found


class _Passes:
    """Which pass over a loader a fetch is of: the one that was started last among those whose next batch it is."""

    def __init__(self) -> None:
        self._next: dict[int, int] = defaultdict(int)
        self._count = 0

    def start(self) -> int:
        self._count += 1
        self._next[self._count] = 0
        return self._count

    def fetch(self, batch: int) -> int:
        for number in sorted(self._next, reverse=True):
            if self._next[number] == batch or batch < 0:
                self._next[number] += 1
                return number
        number = self.start()
        self._next[number] = batch + 1
        return number


def _whole(value: Any, default: int = -1) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
