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
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lens_auto.export.answer import Answer, Outcome, Sender
from lens_auto.export.spans import Others, Span, resource_of
from lens_auto.export.stream import Cut, Position, StreamPart, next_part
from lens_auto.recorder import spool
from lens_auto.recorder.read import WriterFiles

logger = logging.getLogger("lens_auto.export")

BATCH_SPANS = 512
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
LONGEST_OBEYED_S = 300.0  # an endpoint that asks for more is asked again after this
SLOW_S = 1.0  # a try that fails after so long fails for its size, maybe: the next one is smaller
LOOK_EVERY_S = 0.5
SMALL_PART = 4096  # records: a writer that had fewer is left alone for a moment, however short its iterations are
LOOK_SHARE = 20  # looking at a running writer takes at most one part in so many of the time
TELL_EVERY_S = 10.0
_FORMAT, _VERSION = "lens-export", 2
_FOR_GOOD = (Outcome.INVALID, Outcome.TOO_LARGE)


class Progress:
    """How far a lane has come with one writer.

    Attributes:
        position: where its stream stands.
        cut: of the part in hand; None between parts.
        sent_of_part: spans of that part that are dealt with.
        sent: spans that were accepted.
        not_sampled: spans that the head sampler left out.
        refused: spans that the endpoint will never take, or says it threw away.
        lost: records whose segment was gone before they were sent: the oldest go where a run outgrows its bound.
        finished: nothing is left to send.
    """

    def __init__(self, folder: str, lane: str) -> None:
        self.path = os.path.join(folder, f"export-{lane}.json")
        self.position = Position()
        self.cut: Cut | None = None
        self.sent_of_part = 0
        self.sent = 0
        self.not_sampled = 0
        self.refused = 0
        self.lost = 0
        self.finished = False
        self._told = False
        try:
            with open(self.path, "rb") as file:
                self._take(json.load(file))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s): the writer is sent from its first record on", self.path, error)

    def _take(self, found: dict[str, Any]) -> None:
        if (found["format"], found["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {found['format']!r} of version {found['version']!r}, this is {_VERSION}")
        self.position = Position.from_json(found["position"])
        self.cut = None if found["cut"] is None else Cut.from_json(found["cut"])
        self.sent_of_part = int(found["sent_of_part"])
        self.sent = int(found["sent"])
        self.not_sampled = int(found["not_sampled"])
        self.refused = int(found["refused"])
        self.lost = int(found["lost"])
        self.finished = bool(found["finished"])

    def save(self) -> None:
        """Write it down, in one step. A full disk is no reason to stop: this process knows where it stands."""
        state = {
            "format": _FORMAT,
            "version": _VERSION,
            "position": self.position.to_json(),
            "cut": None if self.cut is None else self.cut.to_json(),
            "sent_of_part": self.sent_of_part,
            "sent": self.sent,
            "not_sampled": self.not_sampled,
            "refused": self.refused,
            "lost": self.lost,
            "finished": self.finished,
        }
        try:
            spool.write_atomically(self.path, json.dumps(state).encode() + b"\n")
        except OSError as error:
            if not self._told:
                self._told = True
                logger.warning(
                    "%s cannot be written (%s): sending goes on, another exporter would send again what this one sends"
                    " from here on",
                    self.path,
                    error.strerror or error,
                )


class Candidate(NamedTuple):
    """A writer that a lane may work on.

    Attributes:
        writer: its files, freshly looked at.
        folder: where progress with it is kept.
        ended: it writes no more.
    """

    writer: WriterFiles
    folder: str
    ended: bool


class _Work:
    """What a lane knows of a writer."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.not_before = 0.0
        self.ended = False


class _InHand:
    """The part that a lane is at. One at a time: parts are what takes memory."""

    def __init__(self, work: _Work, part: StreamPart, resource: dict[str, Any]) -> None:
        self.work = work
        self.part = part
        self.resource = resource
        self.spans = itertools.islice(part.spans(), work.progress.sent_of_part, None)
        self.waiting: list[Span] = []


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
        self.remote = sender.remote
        self.reason = ""  # why nothing is accepted at the moment
        self._sender = sender
        self._others = others
        self._sampled = sampled
        self._decided: dict[bytes, bool] = {}
        self._works: dict[str, _Work] = {}
        self._in_hand: _InHand | None = None
        self._turn = 0
        self._lock = threading.Lock()  # the process's main thread asks for progress too
        self._random = random.Random(os.urandom(16))
        self._batch_spans = BATCH_SPANS
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0
        self._ever_accepted = False
        self._failing_since: float | None = None
        self._told_at = 0.0

    def progress(self, writer: str, folder: str) -> Progress:
        """How far this lane has come with a writer, whose progress is kept in a folder."""
        return self._work(writer, folder).progress

    def _work(self, writer: str, folder: str) -> _Work:
        with self._lock:
            work = self._works.get(writer)
            if work is None:
                work = self._works[writer] = _Work(Progress(folder, self.name))
            return work

    @property
    def has_part(self) -> bool:
        """Whether it is in the middle of a part: it then needs no candidates."""
        return self._in_hand is not None

    def step(self, candidates: Sequence[Candidate]) -> bool:
        """Send at most one batch; writers take turns, part by part. True: there may be more at once."""
        if time.monotonic() < self._not_before:
            return False
        if self._in_hand is None:
            self._in_hand = self._next(candidates)
            if self._in_hand is None:
                return False
        hand = self._in_hand
        if not hand.waiting:
            hand.waiting = list(itertools.islice(hand.spans, BATCH_SPANS))
        if hand.waiting:
            return self._send(hand, hand.waiting[: self._batch_spans])
        work, progress = hand.work, hand.work.progress
        if hand.part.after.top - progress.position.top < SMALL_PART:
            work.not_before = time.monotonic() + LOOK_EVERY_S
        progress.position = hand.part.after
        progress.finished = hand.part.cut.last
        progress.cut = None
        progress.sent_of_part = 0
        progress.save()
        self._in_hand = None
        return True

    def _next(self, candidates: Sequence[Candidate]) -> _InHand | None:
        """Begin the next part, of the writer whose turn it is."""
        for number in range(self._turn, self._turn + len(candidates)):
            each = candidates[number % len(candidates)]
            work = self._work(each.writer.name, each.folder)
            now = time.monotonic()
            if work.progress.finished or (now < work.not_before and each.ended == work.ended):
                continue
            work.ended = each.ended
            found = self._begin(work, each)
            if found is not None:
                self._turn = number + 1
                return found
            # Looking at them all takes a bounded share of the time.
            pause_s = LOOK_SHARE * len(candidates) * (time.monotonic() - now)
            work.not_before = time.monotonic() + max(LOOK_EVERY_S, pause_s)
        return None

    def _begin(self, work: _Work, each: Candidate) -> _InHand | None:
        progress = work.progress
        part = next_part(each.writer, progress.position, self._others, each.ended, progress.cut)
        if part is None:
            return None
        if progress.cut is None:
            progress.cut = part.cut
            progress.sent_of_part = 0
            progress.lost += part.lost
            progress.save()
            if part.lost:
                logger.warning("%s: %d records were gone before they could be sent", each.writer.name, part.lost)
        return _InHand(work, part, resource_of(each.writer))

    def _send(self, hand: _InHand, batch: list[Span]) -> bool:
        progress = hand.work.progress
        wanted = [span for span in batch if self._is_sampled(span)]
        refused = 0
        if wanted:
            began = time.monotonic()
            answer = self._sender.send(wanted, hand.resource)
            if answer.outcome is Outcome.ACCEPTED:
                self._accepted()
                refused = min(answer.rejected, len(wanted))
            elif answer.outcome in _FOR_GOOD and len(wanted) == 1 and self._ever_accepted:
                refused = 1
                logger.warning("%s: span %r is refused for good: %s", self.name, wanted[0].name, answer.reason)
            else:
                return self._not_accepted(answer, len(batch), time.monotonic() - began)
        progress.sent += len(wanted) - refused
        progress.refused += refused
        progress.not_sampled += len(batch) - len(wanted)
        progress.sent_of_part += len(batch)
        del hand.waiting[: len(batch)]
        progress.save()
        return True

    def _accepted(self) -> None:
        if self._failing_since is not None:
            logger.info("%s: accepted again after %.0f s", self.name, time.monotonic() - self._failing_since)
            self._failing_since = None
        self.reason = ""
        self._ever_accepted = True
        self._pause_s = FIRST_PAUSE_S
        self._batch_spans = min(2 * self._batch_spans, BATCH_SPANS)

    def _not_accepted(self, answer: Answer, size: int, took_s: float) -> bool:
        now = time.monotonic()
        if self._failing_since is None or (answer.reason != self.reason and now > self._told_at + TELL_EVERY_S):
            logger.warning("%s: %d spans were not accepted, they are kept: %s", self.name, size, answer.reason)
            self._failing_since = self._failing_since or now
            self._told_at = now
        self.reason = answer.reason
        if answer.outcome in _FOR_GOOD and size > 1:
            self._batch_spans = max(1, size // 2)  # down to the one span that is meant
            return True
        if answer.retry_after_s is not None:
            pause_s = min(answer.retry_after_s, LONGEST_OBEYED_S)
        elif took_s > SLOW_S and size > 1:
            self._batch_spans = max(1, size // 4)
            pause_s = FIRST_PAUSE_S
        else:
            pause_s = self._pause_s * self._random.uniform(0.8, 1.2)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._not_before = now + pause_s
        return False

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
