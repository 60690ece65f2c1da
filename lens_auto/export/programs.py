"""Send what programs made with OpenTelemetry themselves: the lines of OTLP/JSON in a run directory, as they are."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lens_auto.destinations import OTLP
from lens_auto.export.answer import Answer, Outcome
from lens_auto.export.exporters import GRPC, HTTP, exporter_names
from lens_auto.export.senders import make_sender
from lens_auto.recorder import spool
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.services import (
    POSITION_SUFFIX,
    TRACES,
    UNSENT,
    ProgramFile,
    find_files,
    read_lines,
    sent_position,
    spans_of,
)
from lens_auto.values import held

PATIENCE_S = 15.0
_PAUSE_S = 0.5
_REFUSED = "the endpoint refuses them for good"
_DAMAGED = "a line is damaged"
_FOR_GOOD = (_REFUSED, _DAMAGED)
_IDS = ("traceId", "spanId", "parentSpanId")


class Unsent(NamedTuple):
    """What became of the spans of programs.

    Attributes:
        sent: spans that were accepted.
        left: spans that are still there.
        running: processes that may still write, whose files were left alone.
        reason: why some are left; empty where none are.
        damaged: lines that could not be read.
    """

    sent: int
    left: int
    running: int
    reason: str
    damaged: int = 0


def send_unsent(run: RunDirectory, advance: Callable[[int], None]) -> Unsent:
    """Send the spans that an endpoint did not take while their programs ran, and remove what it takes now.

    A call that is interrupted goes on where it was. What the endpoint will never take stays.

    Args:
        run: whose.
        advance: told the number of spans after each line.
    """
    files = [file for file in find_files(run) if file.kind == UNSENT]
    waiting = [file for file in files if not file.may_grow]
    running = len({file.process for file in files if file.may_grow})
    if not waiting:
        return Unsent(0, 0, running, "")
    return _send(waiting, advance, running, remove=True)


def send_all(run: RunDirectory, advance: Callable[[int], None]) -> Unsent:
    """Send everything that programs made themselves; the files stay as they are."""
    files = [file for file in find_files(run) if file.kind in (TRACES, UNSENT)]
    return _send(files, advance, 0, remove=False) if files else Unsent(0, 0, 0, "")


def _send(files: Iterable[ProgramFile], advance: Callable[[int], None], running: int, *, remove: bool) -> Unsent:
    name = next((each for each in exporter_names() if each in (OTLP, GRPC, HTTP)), OTLP)
    sender = make_sender(name, lambda: "")
    post: Callable[[bytes], Answer] | None = getattr(sender, "post", None)
    sent = left = damaged = 0
    reason = "" if post is not None else "spans of programs are sent by our own OTLP senders, not through the SDK's"
    try:
        for file in files:
            found = _File(file.path, remove, file.may_grow)
            if post is not None and reason in ("", *_FOR_GOOD):
                done, why = found.send(post, advance)
                sent += done
                reason = why or reason
            left += found.left()
            damaged += found.damaged
    finally:
        sender.close()
    return Unsent(sent, left, running, reason if left else "", damaged)


class _File:
    """One file, and how much of it was accepted."""

    def __init__(self, path: Path, remove: bool, may_grow: bool) -> None:
        self.damaged = 0
        self._path = path
        self._remove = remove
        self._may_grow = may_grow
        self._position_path = path.with_name(path.name + POSITION_SUFFIX)
        self._position, self._refused = sent_position(path) if remove else (0, [])

    def send(self, post: Callable[[bytes], Answer], advance: Callable[[int], None]) -> tuple[int, str]:
        """Send what is left. Returns how many spans were accepted, and why not all."""
        sent, reason = 0, ""
        begin = self._position
        for end, message in read_lines(self._path, self._position):
            spans = 0 if message is None else sum(1 for _ in spans_of(message))
            body = None if message is None or not spans else to_request(message)
            if body is None:
                if message is None or spans:
                    self._refused.append(begin)  # damaged: kept, for who wants to look
                    self.damaged += not self._may_grow  # else it is being written
                    reason = _DAMAGED
            else:
                answer = _patiently(post, body)
                if answer.outcome is Outcome.LATER:
                    return sent, answer.reason
                if answer.outcome is Outcome.ACCEPTED:
                    sent += spans - min(answer.rejected, spans)
                    advance(spans)
                else:
                    self._refused.append(begin)
                    reason = _REFUSED
            begin = self._position = end
            if self._remove:
                state = {"position": self._position, "refused": self._refused}
                spool.write_atomically(str(self._position_path), json.dumps(state).encode() + b"\n")
        if self._remove:
            self._clear()
        return sent, reason

    def _clear(self) -> None:
        """Leave the lines that were refused, or nothing."""
        with open(self._path, "rb") as file:
            kept = [line for start in self._refused if file.seek(start) == start for line in (file.readline(),)]
        if kept:
            spool.write_atomically(str(self._path), b"".join(kept))
        else:
            os.unlink(self._path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._position_path)
        self._position, self._refused = 0, []

    def left(self) -> int:
        """Spans that were not accepted."""
        if not self._remove or not self._path.exists():
            return 0
        return sum(
            1 for _, message in read_lines(self._path, self._position) if message is not None for _ in spans_of(message)
        )


def _patiently(post: Callable[[bytes], Answer], body: bytes) -> Answer:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = post(body)
        if answer.outcome is not Outcome.LATER or time.monotonic() > deadline:
            return answer
        time.sleep(_PAUSE_S)


def to_request(message: dict[str, Any]) -> bytes | None:
    """A `TracesData` message of OTLP/JSON as the bytes of a request to export it; None where it is none.

    They are one on the wire. The JSON differs from protobuf's own in its ids, which are hexadecimal. An attribute with
    an integer of more than 64 bits is left out: it would cost all spans of the message.
    """
    from google.protobuf.json_format import ParseDict, ParseError  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ParseDict(_for_protobuf(message), ExportTraceServiceRequest(), ignore_unknown_fields=True)
        return bytes(request.SerializeToString())
    except (ParseError, ValueError, TypeError):
        return None


def _for_protobuf(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode()
            if key in _IDS and isinstance(item, str)
            else _for_protobuf([each for each in item if _fits(each)] if key == "attributes" else item)
            for key, item in value.items()
        }
    return [_for_protobuf(item) for item in value] if isinstance(value, list) else value


def _fits(value: Any) -> bool:
    """Whether the integers in an attribute have at most 64 bits."""
    if isinstance(value, dict):
        number = value.get("intValue")
        return (number is None or held(int(number)) is not None) and all(map(_fits, value.values()))
    return all(map(_fits, value)) if isinstance(value, list) else True
