"""The exporter process of a node: reads the segments of all local ranks, sends their spans, removes what was accepted.

Started by a rank (`export.launch`), in a session of its own. Ends by itself when all writers are gone and all is sent,
or `LINGER_S` after the last writer went. What is not sent by then stays in the run directory for `lens-auto recover`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lens_auto.config import NemoLensConfig
from lens_auto.export import console
from lens_auto.export.exporters import UnknownExporter, exporter_names, make_exporter, make_sampler
from lens_auto.export.lane import Lane, OtherRanks
from lens_auto.export.launch import LOCK_NAME, LOG_NAME, SENDING_NAME, registered, unregister
from lens_auto.export.spans import Span
from lens_auto.recorder import spool
from lens_auto.recorder.layout import RANKS_DIR, SEGMENT_RECORDS, segment_name
from lens_auto.recorder.read import RunDirectory, Status, UnreadableFile, WriterFiles
from lens_auto.strategies import BUILTIN_STRATEGIES, get_export_strategy

logger = logging.getLogger("lens_auto.export")

LINGER_S = 60.0
LINGER_VARIABLE = "NEMO_LENS_EXPORTER_LINGER_S"
IDLE_S = 0.2
NO_WRITER_GRACE_S = 3.0  # ranks of a restarted job may be on their way


class SdkSender:
    """Sends through an exporter of the SDK."""

    def __init__(self, name: str) -> None:
        self._exporter = make_exporter(name)
        self._resource: tuple[dict[str, Any], Any] | None = None

    def send(self, spans: list[Span], resource: dict[str, Any]) -> bool:
        """Encode and export one batch."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        from lens_auto.export.sdk import resource_from, to_sdk

        if self._resource is None or self._resource[0] != resource:
            self._resource = (resource, resource_from(resource))
        made = self._resource[1]
        try:
            return self._exporter.export([to_sdk(span, made) for span in spans]) is SpanExportResult.SUCCESS
        except Exception as error:
            logger.warning("the exporter raised %s: %s", type(error).__name__, error)
            return False

    def close(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()


class ConsoleSender:
    """Prints one JSON object a line on standard output."""

    def send(self, spans: list[Span], resource: dict[str, Any]) -> bool:
        """Print one batch."""
        try:
            sys.stdout.buffer.write(b"".join(console.encode(span, resource) for span in spans))
            sys.stdout.buffer.flush()
        except OSError:  # nobody reads any more
            return False
        return True

    def close(self) -> None:
        """Standard output is not ours to close."""


def make_lanes(config: NemoLensConfig, world_size: int) -> list[Lane]:
    """One lane for each exporter that the environment names; one that cannot be made is logged and left out."""
    from opentelemetry.sdk.trace.sampling import Decision

    sampler = make_sampler()

    def sampled(trace_id: bytes, name: str) -> bool:
        decision = sampler.should_sample(None, int.from_bytes(trace_id, "big"), name).decision
        return decision is not Decision.DROP

    others = OtherRanks(lambda rank: exports(config, rank, world_size))
    lanes = []
    for name in exporter_names():
        try:
            sender = ConsoleSender() if name == "console" else SdkSender(name)
        except (UnknownExporter, Exception) as error:
            logger.error("exporter %r cannot be made: %s", name, error)
            continue
        lanes.append(Lane(name, sender, others, sampled))
    return lanes


def exports(config: NemoLensConfig, rank: int, world_size: int) -> bool:
    """What a built-in strategy says of a rank; of one that the program registered nothing is known here."""
    if config.export_strategy not in BUILTIN_STRATEGIES or config.export_strategy == "first_rank_per_node":
        return True
    return get_export_strategy(config.export_strategy)(config, rank, world_size)


class _Node:
    """The writers of this node, as the spool and their run directories have them."""

    def __init__(self, run_folder: str) -> None:
        self._run_folder = Path(run_folder)
        self.run_dirs: set[str] = set()

    def writers(self) -> list[WriterFiles]:
        """Registered writers that are not done, in order of rank."""
        register = registered(str(self._run_folder))
        self.run_dirs.update(run_dir for run_dir in register.values() if run_dir)
        found: dict[str, WriterFiles] = {}
        for path in (self._run_folder, *map(Path, sorted(self.run_dirs))):
            for writer in self._read(path):
                if writer.name in register:
                    found.setdefault(writer.name, writer)
                    if writer.info.run_dir:
                        self.run_dirs.add(writer.info.run_dir)
        return sorted(found.values(), key=lambda writer: (writer.info.rank, writer.name))

    @staticmethod
    def _read(path: Path) -> list[WriterFiles]:
        try:
            return RunDirectory(path).writers
        except UnreadableFile:
            return []


def run_folder_of(writer: WriterFiles) -> str | None:
    """Where a writer's progress is kept: its folder in the run directory. None: that is not known yet."""
    run_dir = writer.info.run_dir
    if not run_dir:
        return None
    folder = os.path.join(run_dir, RANKS_DIR, writer.name)
    return folder if os.path.isdir(folder) else None


def drain(lane: Lane, writers: Callable[[], list[WriterFiles]], stop: Callable[[], bool]) -> None:
    """Work on a lane until told to stop: all writers in turn, one batch each."""
    while not stop():
        busy = False
        for writer in writers():
            folder = run_folder_of(writer)
            if folder is None or writer.info.seed is None or not writer.info.raw.get("exports"):
                continue
            ended = writer.status in (Status.CLOSED, Status.DIED) and _is_finished(writer)
            try:
                busy |= lane.step(writer, folder, ended)
            except Exception:
                logger.exception("lane %s stopped at writer %s for now", lane.name, writer.name)
                time.sleep(1.0)
        if not busy:
            time.sleep(IDLE_S)


def _is_finished(writer: WriterFiles) -> bool:
    """Whether its files have come to rest: those of a closed writer in the run directory, of a dead one anywhere."""
    return writer.status is Status.DIED or len(writer.folders) == 1


class Exporter:
    """All lanes of a node.

    Args:
        run_folder: the spool's folder of this run.
    """

    def __init__(self, run_folder: str) -> None:
        self._run_folder = run_folder
        self._node = _Node(run_folder)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._looked: tuple[float, list[WriterFiles]] = (0.0, [])

    def writers(self) -> list[WriterFiles]:
        """The node's writers, looked at a moment ago at most."""
        with self._lock:
            when, found = self._looked
            if time.monotonic() - when > IDLE_S / 2:
                found = self._node.writers()
                self._looked = (time.monotonic(), found)
            return found

    def run(self) -> None:
        """Until all writers are gone and all is sent, or the bound is reached."""
        while not any(writer.info.seed is not None for writer in self.writers()):
            if not self._any_alive(time.monotonic() + NO_WRITER_GRACE_S):
                return
            time.sleep(IDLE_S)
        world_size = max(writer.info.world_size for writer in self.writers())
        lanes = make_lanes(NemoLensConfig.from_env(), world_size)
        threads = [
            threading.Thread(target=drain, args=(lane, self.writers, self._stop.is_set), name=f"lane-{lane.name}")
            for lane in lanes
        ]
        for thread in threads:
            thread.daemon = True
            thread.start()
        linger_s = float(os.environ.get(LINGER_VARIABLE, LINGER_S))
        last_alive = time.monotonic()
        while True:
            writers = self.writers()
            if any(writer.status is Status.RUNNING for writer in writers):
                last_alive = time.monotonic()
            all_done = self._clear(writers, lanes)
            gone_s = time.monotonic() - last_alive
            if (all_done and gone_s > NO_WRITER_GRACE_S) or gone_s > linger_s:
                break
            time.sleep(IDLE_S)
        self._stop.set()
        for thread in threads:
            thread.join(1.0)
        for lane in lanes:
            with contextlib.suppress(Exception):
                lane.close()
        self._leave()

    def _leave(self) -> None:
        """Keep the log where it says something; remove what is ours in the spool, where all is sent."""
        log = Path(self._run_folder, LOG_NAME)
        with contextlib.suppress(OSError):
            text = log.read_bytes()
            for run_dir in self._node.run_dirs:
                if text and os.path.isdir(run_dir):
                    spool.write_atomically(os.path.join(run_dir, f"exporter-{os.uname().nodename}.log"), text)
        if not registered(self._run_folder):
            for name in (LOG_NAME, LOCK_NAME):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._run_folder, name))
            for folder in (os.path.join(self._run_folder, SENDING_NAME), self._run_folder):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _any_alive(self, until: float) -> bool:
        while time.monotonic() < until:
            if any(writer.status is Status.RUNNING for writer in self.writers()):
                return True
            time.sleep(IDLE_S)
        return False

    def _clear(self, writers: list[WriterFiles], lanes: list[Lane]) -> bool:
        """Remove segments that every lane is done with; say which writers are. True: all are."""
        all_done = True
        for writer in writers:
            folder = run_folder_of(writer)
            if folder is None:
                all_done = all_done and writer.status is not Status.RUNNING
                continue
            if writer.info.raw.get("exports") is False:
                low, done = _written(writer), writer.status is not Status.RUNNING
            else:
                progresses = [lane.progress(writer, folder) for lane in lanes]
                low = min((each.position.low for each in progresses), default=0)
                done = bool(progresses) and all(each.finished for each in progresses)
            if lanes:
                remove_segments(writer, low // SEGMENT_RECORDS, done)
            if done:
                unregister(self._run_folder, writer.name)
            all_done = all_done and done
        return all_done and not registered(self._run_folder)


def _written(writer: WriterFiles) -> int:
    """Number after the last record of a writer whose spans nobody wants, less the segment it writes to."""
    return max(writer.last_segment - 1, 0) * SEGMENT_RECORDS


def remove_segments(writer: WriterFiles, before: int, whole: bool) -> None:
    for folder in writer.folders:
        try:
            names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(".seg")]
        except OSError:
            continue
        for name in names:
            if (whole and len(writer.folders) == 1) or name < segment_name(before):
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)


def main(arguments: list[str]) -> int:
    """Entry point of `python -m lens_auto.export.process RUN_FOLDER`."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_folder = arguments[0]
    lock = os.open(os.path.join(run_folder, LOCK_NAME), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0  # another one is it
    Exporter(run_folder).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
