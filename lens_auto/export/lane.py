"""One exporter's way through the records of a node: part after part, writer after writer, each span once.

How far a lane has come with a writer is in `export-<name>.json` beside the writer's segments, written after every batch
that was accepted. A process that is killed goes on there. Only the batch that was on its way at that moment is sent
again, with the same ids.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lens_auto.export.spans import Others, Span, resource_of
from lens_auto.export.stream import Cut, Position, StreamPart, next_part
from lens_auto.recorder import spool
from lens_auto.recorder.read import WriterFiles

logger = logging.getLogger("lens_auto.export")

BATCH_SPANS = 512
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Sender(Protocol):
    """Sends spans of one writer somewhere."""

    def send(self, spans: list[Span], resource: dict[str, Any]) -> bool:
        """True where all were accepted; False: none was, try again later."""

    def close(self) -> None:
        """Send no more."""


class Progress:
    """How far a lane has come with one writer."""

    def __init__(self, folder: str, lane: str) -> None:
        self._path = os.path.join(folder, f"export-{lane}.json")
        self.position = Position()
        self.cut: Cut | None = None
        self.sent_of_part = 0
        self.sent = 0
        self.dropped_by_sampler = 0
        self.finished = False
        try:
            with open(self._path, "rb") as file:
                self._take(json.load(file))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s): the writer is sent from its first record on", self._path, error)

    def _take(self, found: dict[str, Any]) -> None:
        self.position = Position.from_json(found["position"])
        cut = found["cut"]
        if cut is not None:
            self.cut = Cut(int(cut[0]), int(cut[1]), tuple(map(int, cut[2])), bool(cut[3]))
        self.sent_of_part = int(found["sent_of_part"])
        self.sent = int(found["sent"])
        self.dropped_by_sampler = int(found["not_sampled"])
        self.finished = bool(found["finished"])

    def save(self) -> None:
        """Write it down, in one step."""
        state = {
            "format": "lens-export",
            "version": 1,
            "position": self.position.to_json(),
            "cut": None if self.cut is None else list(self.cut),
            "sent_of_part": self.sent_of_part,
            "sent": self.sent,
            "not_sampled": self.dropped_by_sampler,
            "finished": self.finished,
        }
        spool.write_atomically(self._path, json.dumps(state).encode() + b"\n")


class _Work:
    """A writer that a lane is at: its progress and the part in its hands."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.part: StreamPart | None = None
        self.spans: Iterator[Span] = iter(())
        self.batch: list[Span] = []
        self.resource: dict[str, Any] = {}


class Lane:
    """One exporter and what it has done.

    Args:
        name: of the exporter, as `OTEL_TRACES_EXPORTER` has it.
        sender: sends.
        others: what is known of other ranks.
        sampled: whether a trace is to be sent, asked once for each.
    """

    def __init__(self, name: str, sender: Sender, others: Others, sampled: Callable[[bytes, str], bool]) -> None:
        self.name = name
        self._sender = sender
        self._others = others
        self._sampled = sampled
        self._decided: dict[bytes, bool] = {}
        self._works: dict[str, _Work] = {}
        self._random = random.Random(os.urandom(16))
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0

    def progress(self, writer: WriterFiles, folder: str) -> Progress:
        """How far this lane has come with a writer."""
        work = self._works.get(writer.name)
        if work is None:
            work = self._works[writer.name] = _Work(Progress(folder, self.name))
        return work.progress

    def step(self, writer: WriterFiles, folder: str, ended: bool) -> bool:
        """Send at most one batch of a writer. True: there may be more at once."""
        progress = self.progress(writer, folder)
        if progress.finished or time.monotonic() < self._not_before:
            return False
        work = self._works[writer.name]
        if work.part is None and not self._begin(work, writer, ended):
            return False
        if not work.batch:
            work.batch = list(itertools.islice(work.spans, BATCH_SPANS))
        if not work.batch:
            self._complete(work)
            return True
        wanted = [span for span in work.batch if self._is_sampled(span)]
        if wanted and not self._sender.send(wanted, work.resource):
            self._not_before = time.monotonic() + self._pause_s * self._random.uniform(0.8, 1.2)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return False
        self._pause_s = FIRST_PAUSE_S
        progress.sent += len(wanted)
        progress.dropped_by_sampler += len(work.batch) - len(wanted)
        progress.sent_of_part += len(work.batch)
        work.batch = []
        progress.save()
        return True

    def _begin(self, work: _Work, writer: WriterFiles, ended: bool) -> bool:
        progress = work.progress
        part = next_part(writer, progress.position, self._others, ended, progress.cut)
        if part is None:
            return False
        if progress.cut is None:
            progress.cut = part.cut
            progress.sent_of_part = 0
            progress.save()
        work.part = part
        work.resource = resource_of(writer)
        work.spans = itertools.islice(part.spans(), progress.sent_of_part, None)
        return True

    def _complete(self, work: _Work) -> None:
        assert work.part is not None
        progress = work.progress
        progress.position = work.part.after
        progress.finished = work.part.cut.last
        progress.cut = None
        progress.sent_of_part = 0
        progress.save()
        work.part = None

    def _is_sampled(self, span: Span) -> bool:
        found = self._decided.get(span.trace_id)
        if found is None:
            if len(self._decided) > 10_000:
                self._decided.clear()
            found = self._decided[span.trace_id] = self._sampled(span.trace_id, span.name)
        return found

    def close(self) -> None:
        """Send no more."""
        self._sender.close()


class OtherRanks:
    """What a node's exporter knows of ranks elsewhere: what the export strategy says of them.

    Args:
        exports: whether a global rank exports.
    """

    def __init__(self, exports: Callable[[int], bool]) -> None:
        self._exports = exports

    def has_first(self, seed: bytes, iteration: int) -> bool:
        """Rank 0 has every iteration that it exports at all."""
        return self._exports(0)

    def send_iteration(self, span_id: bytes, sender: int, iteration: int) -> int | None:
        """A send is taken to be in the iteration of its receive."""
        return iteration if self._exports(sender) else None
