"""The exporter process of a node: reads the segments of all local ranks, sends their spans, removes what was accepted.

Metrics are made of the same records, where an exporter for them is named (`metering`).

Started by a rank (`export.launch`), in a session of its own. Ends by itself when all writers are gone and all is sent,
or `LINGER_S` after the last writer went. What is not sent by then stays in the run directory for `lens-auto recover`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from lens_auto.config import NemoLensConfig
from lens_auto.export import launch
from lens_auto.export.exporters import exporter_names, make_sampler, metrics_exporter_names
from lens_auto.export.lane import Candidate, Lane, OtherRanks
from lens_auto.export.senders import make_sender
from lens_auto.recorder import finish, spool
from lens_auto.recorder.layout import SEGMENT_RECORDS, SEGMENT_SUFFIX, segment_name
from lens_auto.recorder.read import (
    RunDirectory,
    Status,
    UnreadableFile,
    WriterFiles,
    WriterInfo,
    process_is_alive,
)
from lens_auto.strategies import BUILTIN_STRATEGIES, get_export_strategy

if TYPE_CHECKING:
    from lens_auto.export.metering import Metering

logger = logging.getLogger("lens_auto.export")

LINGER_S = 60.0
LINGER_VARIABLE = "NEMO_LENS_EXPORTER_LINGER_S"
TERMINATED_S = 10.0  # what is left after SIGTERM, which schedulers send some time before SIGKILL
IDLE_S = 0.2
GRACE_S = 0.5  # between the last span and the end
LAST_ANSWER_S = 12.0  # an answer on its way at the end is waited for: a batch that was taken is not sent again
CLOSE_S = 2.0  # metric readers have this at least, whatever lanes took
FINISH_AGAIN_S = 30.0
VANISHED_S = 3.0
SAY_AGAIN_S = 600.0
NICENESS = 10
_LOCK_TRIES = 5


def make_lanes(
    config: NemoLensConfig, world_size: Callable[[], int], default_file: Callable[[], str]
) -> tuple[list[Lane], list[str]]:
    """One lane for each exporter that the environment names.

    Args:
        config: who exports.
        world_size: of the job, as far as it is known when a link is made.
        default_file: where `lens_file` writes unless told otherwise.

    Returns:
        The lanes, and one line for each exporter that cannot be made.
    """
    from opentelemetry.sdk.trace.sampling import Decision

    sampler = make_sampler()

    def sampled(trace_id: bytes, name: str) -> bool:
        decision = sampler.should_sample(None, int.from_bytes(trace_id, "big"), name).decision
        return decision is not Decision.DROP

    others = OtherRanks(lambda rank: exports(config, rank, world_size()))
    lanes: list[Lane] = []
    problems: list[str] = []
    for name in exporter_names():
        try:
            lanes.append(Lane(name, make_sender(name, default_file), others, sampled))
        except Exception as error:
            problems.append(f"the exporter {name!r} cannot be made: {error}")
            logger.error("%s", problems[-1])
    return lanes, problems


def exports(config: NemoLensConfig, rank: int, world_size: int) -> bool:
    """What a built-in strategy says of a rank; of one that the program registered nothing is known here."""
    if config.export_strategy not in BUILTIN_STRATEGIES or config.export_strategy == "first_rank_per_node":
        return True
    return get_export_strategy(config.export_strategy)(config, rank, world_size)


def decided(config: NemoLensConfig, info: WriterInfo) -> bool | None:
    """Whether a rank that is gone exports: what it said, else what a built-in strategy says; None: nobody knows."""
    said = info.raw.get("exports")
    if said is not None:
        return bool(said)
    if config.export_strategy not in BUILTIN_STRATEGIES:
        return None
    if config.export_strategy == "first_rank_per_node":
        return info.local_rank <= 0
    return get_export_strategy(config.export_strategy)(config, info.rank, info.world_size)


class Local(NamedTuple):
    """A rank of this node.

    Attributes:
        writer: its files, as they were a moment ago.
        folder: where progress with it is kept; None: nothing can be sent of it yet.
        ended: it writes no more, and its files have come to rest.
        sends: whether its spans are to be sent; None: nobody can say, they are kept.
    """

    writer: WriterFiles
    folder: str | None
    ended: bool
    sends: bool | None

    @property
    def running(self) -> bool:
        """Whether it may write more."""
        return self.writer.status is Status.RUNNING


class _Node:
    """The writers of this node that are to be sent, as the spool and their run directories have them."""

    def __init__(self, run_folder: str, config: NemoLensConfig) -> None:
        self._run_folder = run_folder
        self._config = config
        self._finish_after: dict[str, float] = {}
        self._vanished: dict[str, float] = {}
        self.run_dirs: set[str] = set()
        self.world_size = 1

    def look(self) -> list[Local]:
        """Registered writers that are not done, in order of rank."""
        register = launch.registered(self._run_folder)
        self.run_dirs.update(run_dir for run_dir in register.values() if run_dir)
        found: dict[str, WriterFiles] = {}
        for path in (self._run_folder, *sorted(self.run_dirs)):
            left = register.keys() - found.keys()
            if left:
                with contextlib.suppress(UnreadableFile):
                    found.update((writer.name, writer) for writer in RunDirectory(path, left).writers)
        self._forget_vanished(register.keys() - found.keys())
        writers = sorted(found.values(), key=lambda writer: (writer.info.rank, writer.name))
        self.run_dirs.update(writer.info.run_dir for writer in writers if writer.info.run_dir)
        self.world_size = max((writer.info.world_size for writer in writers), default=self.world_size)
        return [local for local in map(self._local, writers) if local is not None]

    def _forget_vanished(self, names: set[str]) -> None:
        """A writer whose files somebody removed is not waited for."""
        now = time.monotonic()
        self._vanished = {name: self._vanished.get(name, now) for name in names}
        for name, since in self._vanished.items():
            if now - since > VANISHED_S and not launch.still_writes(name):
                logger.warning("the files of %s are gone, nothing of it can be sent", name)
                launch.unregister(self._run_folder, name)

    def _local(self, writer: WriterFiles) -> Local | None:
        """None: its files are on their way to the run directory."""
        info, spooled = writer.info, self.is_spooled(writer.folders[0])
        gone = writer.status is not Status.RUNNING and not process_is_alive(info.pid, info.start_ticks)
        if gone and spooled and not self._cannot_finish(writer):
            return None
        stays = bool(info.raw.get("run_dir_failed"))
        ended = gone or (writer.status is Status.CLOSED and (stays or not spooled))
        folder = next((str(each) for each in writer.folders if not self.is_spooled(each)), None)
        if folder is None and (gone or stays):
            folder = str(writer.folders[0])
        if info.seed is None and not ended:
            folder = None
        sends = decided(self._config, info) if ended else info.raw.get("exports")
        if sends is None:
            folder = None
        return Local(writer, folder, ended, sends)

    def is_spooled(self, folder: Path) -> bool:
        """Whether a writer's folder is the one in the spool."""
        return str(folder).startswith(self._run_folder + os.sep)

    def _cannot_finish(self, writer: WriterFiles) -> bool:
        """Move what a dead writer left to the run directory. True: that cannot be done, it is sent from where it is."""
        now = time.monotonic()
        if now < self._finish_after.get(writer.name, 0.0):
            return True
        folder = str(writer.folders[0])
        try:
            info = finish.read_writer(folder)
            target = None if info is None else finish.run_dir_of(folder, info)
            if target is None:
                raise FileNotFoundError(2, "nothing says where its files belong", folder)
            finish.finish_writer(folder, target)
        except FileNotFoundError:
            return os.path.isdir(folder)  # else somebody else was faster
        except OSError as error:
            logger.warning("%r cannot be moved to the run directory (%s)", folder, error.strerror or error)
            self._finish_after[writer.name] = now + FINISH_AGAIN_S
            return True
        return False


def make_metering(default_file: Callable[[], str]) -> tuple[Metering | None, list[str]]:
    """What makes metrics, for the exporters that the environment names; None: none is named, or none can be made.

    Args:
        default_file: where `lens_file` writes.

    Returns:
        It, and one line for each exporter that cannot be made.
    """
    names = metrics_exporter_names()
    if not names:
        return None, []
    from lens_auto.export.metering import Metering

    made = Metering(names, default_file)
    return (made if made else None), made.problems


def keep_count(metering: Metering, locals_: Callable[[], list[Local]], stop: Callable[[], bool]) -> None:
    """Make metrics until told to stop."""
    while not stop():
        try:
            busy = metering.step(_candidates(locals_()))
        except Exception:
            logger.exception("metrics go on in a moment")
            busy = False
            time.sleep(1.0)
        if not busy:
            time.sleep(IDLE_S)


def _candidates(ranks: list[Local]) -> list[Candidate]:
    return [Candidate(each.writer, each.folder, each.ended) for each in ranks if each.folder and each.sends]


def drain(lane: Lane, locals_: Callable[[], list[Local]], stop: Callable[[], bool]) -> None:
    """Work on a lane until told to stop."""
    while not stop():
        try:
            ranks = [] if lane.has_part else locals_()
            busy = lane.step(_candidates(ranks))
        except Exception:
            logger.exception("lane %s goes on in a moment", lane.name)
            busy = False
            time.sleep(1.0)
        if not busy:
            time.sleep(IDLE_S)


class Exporter:
    """All lanes of a node.

    Args:
        run_folder: the spool's folder of this run.
    """

    def __init__(self, run_folder: str) -> None:
        self._run_folder = run_folder.rstrip(os.sep)
        self._problems: list[str] = []
        try:
            self._config = NemoLensConfig.for_strategy()
        except ValueError as error:
            self._config = NemoLensConfig()
            self._problems.append(str(error))
        self._node = _Node(self._run_folder, self._config)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._looked: tuple[float, list[Local]] = (0.0, [])
        self._end_by: float | None = None
        self._said = ""
        self._metering: Metering | None = None

    def locals_(self) -> list[Local]:
        """The ranks of this node, looked at a moment ago at most."""
        with self._lock:
            when, found = self._looked
            if time.monotonic() - when > IDLE_S / 2:
                found = self._node.look()
                self._looked = (time.monotonic(), found)
            return found

    def terminate(self) -> None:
        """End soon; called by a signal handler."""
        if self._end_by is None:
            self._end_by = time.monotonic() + TERMINATED_S

    def run(self) -> None:
        """Until all writers are gone and all is sent, or the bound is reached."""
        lanes, problems = make_lanes(self._config, lambda: self._node.world_size, self._default_file)
        self._metering, more = make_metering(lambda: self._default_file("metrics"))
        problems += self._problems + more
        if (not lanes and self._metering is None) or self._problems:
            self._node.look()
            launch.say(self._run_folder, "; ".join(problems) or "no exporter is named", hopeless=True)
            self._leave()
            return
        launch.say(self._run_folder, "; ".join(problems))
        threads = [
            threading.Thread(
                target=drain, args=(lane, self.locals_, self._stop.is_set), name=f"lane-{lane.name}", daemon=True
            )
            for lane in lanes
        ]
        if self._metering is not None:
            work = (self._metering, self.locals_, self._stop.is_set)
            threads.append(threading.Thread(target=keep_count, args=work, name="metrics", daemon=True))
        for thread in threads:
            thread.start()
        self._wait_for_the_end(lanes)
        self._stop.set()
        deadline = time.monotonic() + LAST_ANSWER_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._metering is not None:
            self._metering.close(max(CLOSE_S, deadline - time.monotonic()))
        self._clear(self._node.look(), lanes)
        for lane in lanes:
            with contextlib.suppress(Exception):
                lane.close()
        self._leave()

    def _wait_for_the_end(self, lanes: list[Lane]) -> None:
        linger_s = _linger_s()
        last_needed = last_alive = time.monotonic()
        while True:
            now = time.monotonic()
            present = self.locals_()
            if any(local.running for local in present):
                last_alive = now
            if not self._clear(present, lanes):
                last_needed = now
            self._say(lanes)
            # A short job is over before Prometheus has asked once.
            patience_s = linger_s if self._metering is not None and self._metering.waits_to_be_asked else GRACE_S
            if now - last_needed > patience_s or now - last_alive > linger_s or now > (self._end_by or now):
                return
            time.sleep(IDLE_S)

    def _say(self, lanes: list[Lane]) -> None:
        """Leave a word for whoever waits: why nothing is accepted at the moment."""
        reason = "; ".join(f"{lane.name}: {lane.reason}" for lane in lanes if lane.reason)
        if reason != self._said:
            self._said = reason
            launch.say(self._run_folder, reason)

    def _default_file(self, what: str = "spans") -> str:
        for run_dir in sorted(self._node.run_dirs):
            if os.path.isdir(run_dir):
                return os.path.join(run_dir, f"{what}-{os.uname().nodename}.jsonl")
        raise FileNotFoundError(2, "there is no run directory yet", "NEMO_LENS_FILE")

    def _leave(self) -> None:
        """Keep the log where it says something; remove what is ours in the spool, where all is sent."""
        log = Path(self._run_folder, launch.LOG_NAME)
        with contextlib.suppress(OSError):
            text = log.read_bytes()
            for run_dir in self._node.run_dirs:
                if text and os.path.isdir(run_dir):
                    spool.write_atomically(os.path.join(run_dir, f"exporter-{os.uname().nodename}.log"), text)
        if not launch.registered(self._run_folder):
            launch.remove_traces(self._run_folder)

    def _clear(self, present: list[Local], lanes: list[Lane]) -> bool:
        """Remove segments that every lane is done with, and say which writers are. True: all are."""
        for local in present:
            writer = local.writer
            if local.sends is False:
                low, done = _all_but_newest(writer), local.ended
            elif local.sends is None or local.folder is None:
                low, done = 0, local.ended and local.sends is None
            else:
                progresses = [each.progress(writer.name, local.folder) for each in self._readers(lanes)]
                low = min(each.position.low for each in progresses)
                done = local.ended and all(each.finished for each in progresses)
            if any(lane.remote for lane in lanes) and local.sends is not None:
                self._remove(local, low // SEGMENT_RECORDS, done)
            if done:
                launch.unregister(self._run_folder, writer.name)
        return not launch.registered(self._run_folder)

    def _readers(self, lanes: list[Lane]) -> list[Lane | Metering]:
        return [*lanes, *([] if self._metering is None else [self._metering])]

    def _remove(self, local: Local, before: int, done: bool) -> None:
        for folder in local.writer.folders:
            if str(folder) != local.folder and not local.ended:
                continue  # what is in the spool is the rank's to move
            if done and self._node.is_spooled(folder):
                shutil.rmtree(folder, ignore_errors=True)  # it could not be moved to a run directory
            else:
                remove_segments(folder, before, done)


def _linger_s() -> float:
    try:
        return max(0.0, float(os.environ.get(LINGER_VARIABLE, "") or LINGER_S))
    except ValueError:
        logger.warning("%s is not a number of seconds; it is %g", LINGER_VARIABLE, LINGER_S)
        return LINGER_S


def _all_but_newest(writer: WriterFiles) -> int:
    """Number of a record up to which nothing is written any more; nobody wants the spans."""
    return max(writer.last_segment - 1, 0) * SEGMENT_RECORDS


def remove_segments(folder: Path, before: int, whole: bool) -> None:
    """Remove a writer's segments below a number, or all of them."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.name.endswith(SEGMENT_SUFFIX)]
    except OSError:
        return
    for name in names:
        if whole or name < segment_name(before):
            with contextlib.suppress(OSError):
                os.unlink(folder / name)


def _lock(path: str) -> int | None:
    """Hold the lock of a run's exporter; None: another process holds it."""
    for _ in range(_LOCK_TRIES):
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another exporter may have removed the file at its end, after we opened it.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                return descriptor
        except OSError:
            pass  # held by another exporter, or for a moment by a rank that looks whether there is one
        os.close(descriptor)
        time.sleep(0.05)
    return None


class _NowAndThen(logging.Filter):
    """What the exporters of OpenTelemetry say at every try while an endpoint is away: each line once in a while."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry."):
            return True
        key, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._last.get(key, -SAY_AGAIN_S) < SAY_AGAIN_S:
            return False
        self._last[key] = now
        return True


def main(arguments: list[str]) -> int:
    """Entry point of `python -m lens_auto.export.process RUN_FOLDER`."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_NowAndThen())
    run_folder = arguments[0]
    exporter = Exporter(run_folder)

    def end(number: int, frame: FrameType | None) -> None:
        exporter.terminate()

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)  # training first
    try:
        lock = _lock(os.path.join(run_folder, launch.LOCK_NAME))
    except OSError as error:
        logger.error("%r cannot be locked: %s", run_folder, error)
        return 1
    if lock is None:
        return 0  # another one is it
    exporter.run()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # a lane may still be in a call that does not return


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
