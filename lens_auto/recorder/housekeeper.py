"""The thread that looks after a recorder: segments made ahead and moved, heartbeat, agreement.

It never encodes anything, never touches a group or store of the job, and holds the GIL only for moments.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from typing import Any

from lens_auto import guard
from lens_auto.export.exporting import Exporting
from lens_auto.iteration import origin
from lens_auto.iteration.agreement import Agreed, Agreement
from lens_auto.iteration.sharing import Sharing
from lens_auto.iteration.store import StoreAccess
from lens_auto.recorder import finish, rundir, spool
from lens_auto.recorder.ending import Ending
from lens_auto.recorder.flight import FlightLog
from lens_auto.recorder.hang import HangWatch
from lens_auto.recorder.layout import RANKS_DIR, WRITER_NAME, WriterState
from lens_auto.recorder.recorder import Recorder
from lens_auto.recorder.segment import Segment
from lens_auto.resources import rank_attributes

logger = logging.getLogger("lens_auto")

TICK_S = 0.25
AGREEING_TICK_S = 0.02
AGREEMENT_USUAL_NS = 3_000_000_000
AGREEMENT_PATIENCE_S = 1.0  # in all, of ends: that of the process group, that of the process
STORE_PATIENCE_S = 0.3  # of an end, for a store that does not answer
CARRIER_PATIENCE_S = 0.5  # the same, for peers that do not answer
SETTLE_NS = 1_000_000_000  # a closed segment rests this long before it moves: a thread may still be in its last record


class Housekeeper:
    """One per rank.

    Args:
        recorder: what it looks after.
        info: the content of `writer.json`; this object owns it from now on.
    """

    def __init__(self, recorder: Recorder, info: dict[str, Any]) -> None:
        self.recorder = recorder
        self.info = info
        self.run_dir: str | None = None  # None: not known yet; empty: it cannot be written
        self.agreement: Agreement | None = None
        self.sharing: Sharing | None = None
        self.exporting: Exporting | None = None
        self.headers: dict[str, str] = {}  # of the trace that the job was started from, once it is known
        self.ending = Ending(self)
        self.watch = HangWatch(self, 0.0)
        self.flight = FlightLog(self)
        self._access: StoreAccess | None = None
        self._in_store = False  # whether the thread is where a store that does not answer would hold it
        self._patience_s = AGREEMENT_PATIENCE_S
        self._abandoned = False  # it was still there when the process ended
        self._claimed_early: str | None = None  # the run id under which the run directory was made before it was agreed
        self._named = threading.Event()
        self._stopping = threading.Event()
        self._kept: list[tuple[str, int, int]] = []  # path, bytes, records
        self._resting: list[Segment] = []
        self._begun_ns = time.monotonic_ns()
        self._told = False
        self._dirty = True
        self._thread = threading.Thread(target=self._run, name="lens-housekeeper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.save()
        if self.exporting is not None:
            self.exporting.register(str(self.info["writer"]), None)
        self.ending.install()
        self._thread.start()

    def watch_hangs(self, timeout_s: float) -> None:
        """Notice it when nothing happens any more for so long; 0: do not."""
        self.watch = HangWatch(self, timeout_s)

    def open_segments(self) -> list[Segment]:
        """Segments that have not moved yet, oldest first."""
        return [*self._resting, *self.recorder.closed, self.recorder.segment]

    def touch(self) -> None:
        """What `writer.json` says has changed; it is written at the next tick."""
        self._dirty = True

    def agree(self, agreement: Agreement, access: StoreAccess) -> None:
        """Agree on seed and run id with the other ranks, in the background."""
        self._begun_ns = time.monotonic_ns()
        self._access = access
        self.agreement = agreement
        self.recorder.wake.set()

    def share(self, sharing: Sharing) -> None:
        """Share carrier and switches with the other ranks once they agree."""
        self.sharing = sharing

    def update(self, **facts: Any) -> None:
        """Change what `writer.json` says; it is written at the next tick."""
        self.info.update(facts)
        self._dirty = True
        self.recorder.wake.set()

    def name_run(self, run: Agreed, source: str) -> None:
        """Fix run id, seed and the trace that the job was started from; the run directory is made at the next tick.

        Args:
            run: what the ranks agreed on, or what this one has alone.
            source: `agreed` or `own`.
        """
        span = {name: run.headers[name] for name in ("traceparent", "tracestate") if name in run.headers}
        self.info.update(run_id=run.run_id, seed=run.seed.hex(), seed_source=source, origin=span)
        self.headers = run.headers
        if "baggage" in run.headers:
            from lens_auto.current_context import receive_baggage

            receive_baggage(run.headers["baggage"])
        self._named.set()
        self._dirty = True
        self.recorder.wake.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            pause_s = TICK_S
            try:
                self.tick()
                pause_s = float(self._pause_s())
            except Exception as error:
                guard.failed("housekeeper", error)
            self.recorder.wake.wait(pause_s)
            self.recorder.wake.clear()

    def _pause_s(self) -> float:
        agreement = self.agreement
        if agreement is None or agreement.finished:
            return TICK_S
        waited_s = (time.monotonic_ns() - self._begun_ns) / 1e9
        return AGREEING_TICK_S if waited_s < 5 else TICK_S if waited_s < 60 else 2.0

    def tick(self) -> None:
        """One round of all duties."""
        self.recorder.prepare()
        self._talk()
        if self._abandoned:
            return
        if self._named.is_set() and self._claimed_early is not None:
            self._leave_early_claim()
        if self._named.is_set() and self.run_dir is None:
            self._claim_run_dir()
        if self.exporting is not None and self._named.is_set():
            self._look_after_exporter(self.exporting)
        self.watch.tick()
        self.flight.tick()
        self._move(time.monotonic_ns() - SETTLE_NS)
        self._keep_bound()
        self.recorder.publish(sum(size for _, size, _ in self._kept), guard.fault_count())
        off = guard.switched_off()
        if off != self.info["hooks_off"]:
            self.info.update({"hooks_off": off})
            self._dirty = True
        if self._dirty:
            self.save()

    def _look_after_exporter(self, exporting: Exporting) -> None:
        if self.info["exports"] is None:
            exports = exporting.decide(self.recorder.rank, self.recorder.world_size)
            if exports is not None:
                self.info.update({"exports": exports})
                self._dirty = True
        exporting.register(str(self.info["writer"]), self.run_dir)
        exporting.keeper.look()

    def _talk(self) -> None:
        """All that needs the job's store, which may not answer."""
        self._in_store = True
        try:
            self._agree_on()
            if self.sharing is not None and self._named.is_set() and not self._abandoned:
                self.sharing.tick(self.info, self.headers, self.run_dir)
        finally:
            self._in_store = False

    def _agree_on(self) -> None:
        agreement = self.agreement
        if agreement is None:
            return
        agreement.step()
        if self._abandoned:
            return
        if agreement.finished and self._access is not None:
            self._access.let_go()
        if agreement.result is not None and not self._named.is_set():
            self.name_run(agreement.result, "agreed")
        elif agreement.failed and not self._named.is_set():
            logger.debug("lens-auto: no agreement with the other ranks (%s)", agreement.failed)
            self.name_alone()

    def name_alone(self) -> None:
        """No other rank answers: this one's own run id and a seed of its own."""
        self.name_run(Agreed(os.urandom(16), str(self.info["run_id"]), origin.from_environment(os.environ)), "own")

    def _claim_run_dir(self) -> None:
        wanted = self.info["wanted_dir"] or rundir.default_run_dir(str(self.info["run_id"]), self.info["cwd"])
        try:
            self.run_dir = rundir.claim(wanted, str(self.info["run_id"]))
        except OSError as error:
            self._tell(f"the run directory {wanted!r} cannot be written ({error.strerror or error})")
            self.run_dir = ""
            self.info.update({"run_dir_failed": True})  # the exporter sends from the spool
            self._dirty = True
            return
        self.info.update({"run_dir": self.run_dir})
        self._dirty = True

    def claim_early(self) -> None:
        """Make the run directory before the ranks agreed on a run: they may hang before they do."""
        if self.run_dir is not None:
            return
        try:
            self.run_dir = rundir.claim(self.info["fallback_dir"], str(self.info["run_id"]))
        except OSError as error:
            self._tell(f"the run directory {self.info['fallback_dir']!r} cannot be written ({error.strerror or error})")
            return
        self._claimed_early = str(self.info["run_id"])
        self.info.update({"run_dir": self.run_dir})
        self.save()

    def _leave_early_claim(self) -> None:
        """The ranks agreed on another run after all: what was written under the first one is left alone."""
        if self._claimed_early != self.info["run_id"]:
            self.run_dir = None
            self.info.update({"run_dir": None})
        self._claimed_early = None

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "lens-auto: %s; records stay in the spool folder %r, `lens-auto report` reads them there; the training"
                " program is not affected; NEMO_LENS_RUN_DIR names another directory",
                what,
                self._spool_run(),
            )

    def _spool_run(self) -> str | None:
        folder = self.recorder.folder
        return os.path.dirname(os.path.dirname(folder)) if folder else None

    def writer_dir(self) -> str | None:
        """The writer's folder in the run directory; None while that is not known."""
        if not self.run_dir or self.recorder.folder is None:
            return None
        return os.path.join(self.run_dir, RANKS_DIR, os.path.basename(self.recorder.folder))

    def _move(self, older_than_ns: int) -> None:
        """Closed segments go to the run directory, once there is one."""
        self._resting += self.recorder.take_closed(older_than_ns)
        target = self.writer_dir()
        while self._resting:
            segment = self._resting[0]
            try:
                path, kept, used = segment.path, os.path.getsize(segment.path), segment.used()
            except FileNotFoundError:  # the exporter process removes what was accepted, or what nobody wants
                self._resting.pop(0)
                continue
            if target is not None:
                spool.private_folder(target)
                try:
                    kept = finish.move_segment(segment.path, target)
                    path = os.path.join(target, os.path.basename(segment.path))
                except FileNotFoundError:
                    kept = 0
                except OSError as error:
                    self._tell(f"the run directory {self.run_dir!r} takes no more ({error.strerror or error})")
            elif self.run_dir is None:
                return  # its name is not known yet
            self._resting.pop(0)
            self._kept.append((path, kept, used))

    def _keep_bound(self) -> None:
        """Beyond the bound the oldest segments go, and their records count as dropped."""
        total = sum(size for _, size, _ in self._kept)
        while total > self.recorder.limit_bytes and len(self._kept) > 1:
            path, size, records = self._kept.pop(0)
            total -= size
            with contextlib.suppress(OSError):  # the exporter process removes what was accepted: that is not dropped
                os.unlink(path)
                self.recorder.dropped += records

    def save(self) -> None:
        """Write `writer.json` in the spool, and in the run directory once there is one."""
        self._dirty = False
        info = self.info
        facts = {
            "resource": rank_attributes(
                info["rank"], info["world_size"], info["local_rank"], info["run_id"], os.environ
            ),
            "records": self.recorder.written(),
            "dropped": self.recorder.dropped,
            "hook_faults": guard.fault_count(),
            "process_groups": self.watch.process_groups,
            "failure": self.ending.failure,
        }
        info.update(facts)
        data = json.dumps(dict(info)).encode() + b"\n"
        for folder in (self.recorder.folder, self.writer_dir()):
            if folder is None:
                continue
            try:
                if folder != self.recorder.folder:
                    spool.private_folder(folder)
                spool.write_atomically(os.path.join(folder, WRITER_NAME), data)
            except OSError as error:
                if folder == self.recorder.folder:
                    self.recorder.tell(error)
                else:
                    self._tell(f"{folder!r} cannot be written ({error.strerror or error})")

    # --- the end ------------------------------------------------------------------------------------------------------

    def store_ends(self) -> None:
        """The store is about to go with the default process group."""
        self.await_agreement()
        self._settle()

    def _settle(self) -> None:
        """Ranks that agreed meet before the store goes: where it goes under a question, torch prints a stack trace."""
        agreed = self.agreement is not None and self.agreement.finished and not self.agreement.failed
        if self.sharing is not None and agreed:
            self.sharing.settle()

    def await_agreement(self, limit_s: float = 1.0) -> None:
        """Give a job that was so short a moment to agree, once and for all; ranks that had the time never will."""
        agreement = self.agreement
        if time.monotonic_ns() - self._begun_ns > AGREEMENT_USUAL_NS:
            limit_s = min(limit_s, 0.1)
        deadline = time.monotonic() + min(limit_s, self._patience_s)
        while agreement is not None and not agreement.finished and time.monotonic() < deadline:
            self.recorder.wake.set()
            time.sleep(0.01)
            self._patience_s -= 0.01

    def _join(self, deadline: float) -> bool:
        """Wait for the thread, which was asked to stop. A store that does not answer is not waited for.

        Returns:
            Whether it does nothing any more that the caller does from here on.
        """
        patience = min(deadline, time.monotonic() + STORE_PATIENCE_S)
        while self._thread.is_alive() and time.monotonic() < max(deadline, patience):
            self._thread.join(0.05)
            if self._in_store and time.monotonic() >= patience:
                self._abandoned = True
                return True
        return not self._thread.is_alive()

    def close(self, timeout_s: float) -> str | None:
        """Stop, move everything to the run directory. Returns where the records are; None where they are nowhere."""
        deadline = time.monotonic() + timeout_s
        self.await_agreement(timeout_s / 4)
        self._settle()
        self.ending.finish()
        self._stopping.set()
        if self.sharing is not None:
            self.sharing.stop()
        self.recorder.wake.set()
        stuck = not self._join(deadline)
        if self.sharing is not None:
            self.sharing.wait(CARRIER_PATIENCE_S)
        if self._access is not None:
            self._access.let_go()
        if not stuck:
            self.flight.finish()
        self.recorder.stop()
        if stuck:  # in a file system call: what is written stays for the next reader
            return self._spool_run()
        if self.run_dir is None:
            if not self._named.is_set():
                self.name_alone()
            self._claim_run_dir()
        self._move(time.monotonic_ns())
        self._keep_bound()
        self.recorder.publish(sum(size for _, size, _ in self._kept), guard.fault_count())
        self.recorder.live.state(WriterState.CLOSED)
        self.info.update(
            {
                "ended_ns": time.monotonic_ns(),
                "end": self.ending.end,
                "hooks_off": guard.switched_off(),
            }
        )
        if self.exporting is not None:
            self._look_after_exporter(self.exporting)
        self.save()
        folder = self.recorder.folder
        if folder is None or not self.run_dir:
            return self._spool_run()
        try:
            finish.finish_writer(folder, self.run_dir)
        except OSError as error:
            self._tell(f"the run directory {self.run_dir!r} takes no more ({error.strerror or error})")
            if self.exporting is not None:
                self.info.update({"run_dir_failed": True})  # the exporter sends from the spool
                self.save()
            return self._spool_run()
        return self.run_dir
