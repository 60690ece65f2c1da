"""The exporter process's second task: metrics of the ranks of its node, to whom `OTEL_METRICS_EXPORTER` names.

Reads records as a lane does, at its own pace and with a position of its own (`export-metrics.json`), and hands what
`metrics` makes of them to the metric readers of OpenTelemetry: those that push at intervals, and the one of Prometheus,
which is asked. What the process had not handed over when it was killed is lost; counters then begin anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import Counter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)

from lens_auto import pipelines
from lens_auto.export.gpus import Gpus, find_gpus
from lens_auto.export.lane import LOOK_SHARE, SMALL_PART, Candidate, Progress
from lens_auto.export.metrics import Measured, RankMetrics, measure
from lens_auto.export.spans import resource_of
from lens_auto.export.stream import next_stretch
from lens_auto.instruments import training
from lens_auto.recorder.read import WriterFiles

logger = logging.getLogger("lens_auto.export")

NAME = "metrics"  # of its progress files
LOOK_EVERY_S = 1.0
TRY_AGAIN_S = 2.0
FLUSH_S = 2.0
ANSWER_S = 3.0  # so long may an answer to Prometheus be on its way
PROMETHEUS = "prometheus"
_PORT_VARIABLE, _HOST_VARIABLE = "OTEL_EXPORTER_PROMETHEUS_PORT", "OTEL_EXPORTER_PROMETHEUS_HOST"


class Feed:
    """What one metric reader is given.

    Args:
        name: of the exporter, as `OTEL_METRICS_EXPORTER` has it.
        make: makes the reader; OSError where its port is taken by another job of this node, and may become free.
        gpus: of this node; they go with what ranks say.
    """

    def __init__(self, name: str, make: Callable[[], MetricReader], gpus: Gpus | None = None) -> None:
        self.name = name
        self._make = make
        self._reader: MetricReader | None = None
        self._delta = False
        self._ranks: dict[str, RankMetrics] = {}
        self._gpus = gpus
        self._resource: Mapping[str, Any] = {}  # of a rank of this node
        self._lock = threading.Lock()
        self._added = self._handed = 0
        self._collected_at = float("-inf")
        self._closing = False
        self._try_at = 0.0
        self._told = False

    def attach(self) -> None:
        """Make the reader, where there is none yet.

        Raises:
            ValueError, ImportError: it cannot be made at all.
        """
        if self._reader is not None or time.monotonic() < self._try_at:
            return
        try:
            reader = self._make()
        except OSError as error:
            self._try_at = time.monotonic() + TRY_AGAIN_S
            if not self._told:
                self._told = True
                logger.warning("metrics to %s wait until it can be had: %s", self.name, error)
            return
        # What the SDK's own provider looks up and sets (1.45); it takes nothing that was measured elsewhere.
        wanted = [how for kind, how in reader._instrument_class_temporality.items() if issubclass(kind, Counter)]
        self._delta = AggregationTemporality.DELTA in wanted
        reader._set_collect_callback(self._collect)  # type: ignore[arg-type]
        self._reader = reader

    @property
    def is_asked(self) -> bool:
        """Whether it is asked for metrics rather than that it sends them."""
        return not isinstance(self._reader, PeriodicExportingMetricReader)

    @property
    def is_behind(self) -> bool:
        """Whether something was added that nobody has collected."""
        with self._lock:
            return self._added > self._handed

    @property
    def is_answering(self) -> bool:
        """Whether it was asked so lately that the answer may not have left."""
        return time.monotonic() < self._collected_at + ANSWER_S

    def add(self, writer: WriterFiles, measured: Measured, since_ns: int) -> None:
        """Add what was measured of a rank.

        Args:
            writer: the rank's files.
            measured: of a stretch of them.
            since_ns: wall clock; since when this process counts.
        """
        with self._lock:
            found = self._ranks.get(writer.name)
            if found is None:
                found = self._ranks[writer.name] = RankMetrics(writer.info.rank, since_ns)
            found.resource = self._resource = resource_of(writer)
            found.add(measured)
            self._added += 1

    def _collect(self, reader: MetricReader, timeout_millis: float = 0.0) -> MetricsData | None:
        with self._lock:
            if not self._ranks or (self._closing and self._added == self._handed):
                return None
            self._handed = self._added
            self._collected_at = time.monotonic()
            found = [rank.collect(self._delta) for rank in self._ranks.values()]
            if self._gpus is not None:
                found.append(self._gpus.collect(self._resource))
            return MetricsData(found)

    def flush(self) -> None:
        """Send now what is waiting; who is asked will ask."""
        if self._reader is not None and not self.is_asked and self.is_behind:
            with contextlib.suppress(Exception):
                self._reader.force_flush()

    def close(self) -> None:
        """Send what is waiting, and no more after that."""
        self._closing = True
        if self._reader is not None:
            with contextlib.suppress(Exception):
                self._reader.shutdown()


class Metering:
    """All metric readers of a node's exporter process.

    Args:
        names: of the exporters.
        locate: gives the file of `lens_file`.

    Attributes:
        problems: one line for each exporter that cannot be made.
    """

    def __init__(self, names: Sequence[str], locate: Callable[[], str]) -> None:
        plan = pipelines.Plan(resource={}, locate=lambda _: locate())
        self.problems: list[str] = []
        self._feeds: list[Feed] = []
        self._progress: dict[str, Progress] = {}
        self._not_before: dict[str, tuple[float, bool]] = {}
        self._since_ns: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._read: set[str] = set()  # writers of which all is counted, and not yet handed over
        self._lock = threading.Lock()  # the process's main thread asks for progress too
        self._gpus = find_gpus()
        for name in names:
            feed = Feed(name, lambda name=name: _make_reader(name, plan), self._gpus)  # type: ignore[misc]
            if self._attach(feed):
                self._feeds.append(feed)

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def _attach(self, feed: Feed) -> bool:
        try:
            feed.attach()
        except Exception as error:
            self.problems.append(f"the metrics exporter {feed.name!r} cannot be made: {error}")
            logger.error("%s", self.problems[-1])
            return False
        return True

    def progress(self, writer: str, folder: str) -> Progress:
        """How far a writer is counted, whose progress is kept in a folder."""
        with self._lock:
            found = self._progress.get(writer)
            if found is None:
                found = self._progress[writer] = Progress(folder, NAME)
            return found

    @property
    def waits_to_be_asked(self) -> bool:
        """Whether someone who asks has not asked since the last value, or may not have the answer yet."""
        return any(feed.is_asked and (feed.is_behind or feed.is_answering) for feed in self._feeds)

    def step(self, candidates: Sequence[Candidate]) -> bool:
        """Count at most one stretch of each writer. True: there may be more at once."""
        self._feeds = [feed for feed in self._feeds if self._attach(feed)]
        if self._gpus is not None:
            self._gpus.look()
        busy = [self._count(each, len(candidates)) for each in candidates]
        if any(busy):
            return True
        if self._read:
            self._hand_over()
        return False

    def _count(self, each: Candidate, among: int) -> bool:
        name, progress = each.writer.name, self.progress(each.writer.name, each.folder)
        not_before, ended = self._not_before.get(name, (0.0, False))
        now = time.monotonic()
        if progress.finished or name in self._read or (now < not_before and ended == each.ended):
            return False
        try:
            stretch = next_stretch(each.writer, progress.position, each.ended)
            measured = None if stretch is None else measure(each.writer, stretch)
        except Exception:
            logger.exception("no more metrics are made of rank %d (%s)", each.writer.info.rank, name)
            self._read.add(name)
            return False
        if stretch is None or measured is None:
            # Looking at them all takes a bounded share of the time.
            pause_s = max(LOOK_EVERY_S, LOOK_SHARE * among * (time.monotonic() - now))
            self._not_before[name] = (time.monotonic() + pause_s, each.ended)
            return False
        self._add(each.writer, measured, progress.position.top == 0)
        if stretch.after.top - progress.position.top < SMALL_PART:
            self._not_before[name] = (time.monotonic() + LOOK_EVERY_S, each.ended)
        progress.position = stretch.after
        progress.lost += stretch.lost
        progress.save()
        if stretch.cut.last:
            self._read.add(name)
        return True

    def _add(self, writer: WriterFiles, measured: Measured, from_start: bool) -> None:
        info = writer.info
        if writer.name not in self._since_ns:
            self._since_ns[writer.name] = info.clock.wall(info.started_ns) if from_start else time.time_ns()
        dropped = writer.dropped
        measured.counts[training.RECORDS_DROPPED] = max(0, dropped - self._dropped.get(writer.name, 0))
        self._dropped[writer.name] = dropped
        for feed in self._feeds:
            feed.add(writer, measured, self._since_ns[writer.name])

    def _hand_over(self) -> None:
        """Ranks that ended are done with once what was counted of them was sent, or tried to be."""
        threads = [threading.Thread(target=feed.flush, name=f"flush-{feed.name}", daemon=True) for feed in self._feeds]
        _run_all(threads, FLUSH_S)
        for name in self._read:
            progress = self._progress[name]
            progress.finished = True
            progress.save()
        self._read.clear()

    def close(self, timeout_s: float) -> None:
        """End all readers at the same time, in bounded time."""
        threads = [threading.Thread(target=feed.close, name=f"close-{feed.name}", daemon=True) for feed in self._feeds]
        _run_all(threads, timeout_s)


def _run_all(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _make_reader(name: str, plan: pipelines.Plan) -> MetricReader:
    if name == PROMETHEUS:
        look_for_port()
    return pipelines.metric_reader(name, plan)


def look_for_port() -> None:
    """Prometheus's reader registers itself before it listens, so that a second try would be one reader too many.

    Raises:
        OSError: the port is taken.
        ValueError: the variable holds no number.
    """
    host, port = os.environ.get(_HOST_VARIABLE) or "localhost", os.environ.get(_PORT_VARIABLE) or "9464"
    found: list[Any] = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror} ({_HOST_VARIABLE}, {_PORT_VARIABLE})", f"{host}:{port}"
            ) from None
