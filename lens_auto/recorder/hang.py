"""The hang watch: notices that nothing happens any more while an operation is not done, and writes down who is in what.

Runs in the housekeeper, knows everything from the rank's own live page, and never waits for a store, a lock or a
collective. What torch's flight recorder adds is asked for in a thread of its own, after everything else is on disk.

Files: `RUN_DIR/hang-rank<N>.json`, the one a person looks for, and the same as `hang.json` in the writer's folder of
the run directory, where `lens-auto collect` finds it. Until the run directory is known (the ranks may hang before they
agree on one) the watch claims the one that this rank would have alone. `RUN_DIR/hang.json` is what they say together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from lens_auto import guard
from lens_auto.recorder import c10d, layout, rundir, spool
from lens_auto.recorder.layout import Flag, Kind, Phase, Slot

if TYPE_CHECKING:
    from lens_auto.recorder.housekeeper import Housekeeper

logger = logging.getLogger("lens_auto")

RANK_FORMAT = "lens-hang-rank"
VERSION = 1
VERDICT_NAME = "hang.json"  # in the run directory: what the ranks' files say together
_PREFIX, _SUFFIX = "hang-rank", ".json"

_WAITING_PHASES = (Phase.DATA_LOADING, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT)
# What a phase is called where no operation is in the live page.
PHASE_OPERATIONS = {
    Phase.DATA_LOADING: "DataLoader.__next__",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer step",
    Phase.CHECKPOINT: "checkpoint",
}
_MAX_FRAMES = 100
_MAX_ENTRIES = 64
_MAX_BYTES = 16 << 20
_FLIGHT_PATIENCE_S = 2.0


class HangWatch:
    """One per rank.

    Args:
        keeper: whose recorder it watches, and who knows where files go.
        timeout_s: after how many seconds without anything happening; 0: it only keeps track of process groups.
    """

    def __init__(self, keeper: Housekeeper, timeout_s: float) -> None:
        self.timeout_ns = int(timeout_s * 1e9)
        self.own_records = 0  # that the housekeeper wrote itself: they are no progress
        self.process_groups: list[dict[str, Any]] = []  # by index of their counter in the live page
        self._keeper = keeper
        self._recorder = keeper.recorder
        self._site = guard.site("hang_watch")
        self._groups: dict[tuple[int, str], int] = {}
        self._page = b""
        self._written = -1
        self._phase_page = b""
        self._slot_pages: list[bytes] = []
        self._progress_ns = self._phase_ns = time.monotonic_ns()
        self._slot_ns = [self._progress_ns] * layout.LIVE_SLOTS
        self._report: dict[str, Any] | None = None
        self._verdict_at_ns = 0
        self._next_look_ns = 0

    def tick(self) -> None:
        """Look once; called by the housekeeper at every tick."""
        if not self._site.gate:
            return
        try:
            self._follow_groups()
            if self.timeout_ns:
                self._look(time.monotonic_ns())
        except Exception as error:
            self._site.fault(error)

    # --- process groups -----------------------------------------------------------------------------------------------

    def _follow_groups(self) -> None:
        """Keep the live page's counters of issued operations, which count those that only C++ sees as well."""
        if not self._recorder.init:
            return
        try:
            groups = c10d.process_groups()
        except RuntimeError:  # they change at this moment
            return
        for group in groups:
            key = (self._recorder.init, group.name)
            index = self._groups.get(key)
            if index is None:
                index = self._groups[key] = len(self.process_groups)
                facts = {
                    "name": group.name,
                    "init": self._recorder.init,
                    "description": group.description,
                    "ranks": compact(group.ranks),
                }
                self.process_groups = [*self.process_groups, facts]
                self._keeper.touch()
            try:
                self._recorder.live.issued(index, max(0, group.issued() - self._transfers(group.name)))
            except Exception:  # a backend that does not count
                continue

    def _transfers(self, name: str) -> int:
        """How many of the operations that torch has counted on a group were point to point, also those under way."""
        transfers, counts = self._recorder.transfers.get(name, (0, 0))
        if counts:
            strings = self._recorder.strings
            under_way = [slot for slot in self._slots() if slot.kind in (Kind.SEND, Kind.RECV)]
            transfers += sum(strings.text(slot.group) == name for slot in under_way)
        return transfers

    def issued(self) -> int:
        """Operations that this rank has issued so far, on all groups, also those that are gone."""
        live = self._recorder.live.buffer
        count = min(len(self.process_groups), layout.LIVE_ISSUED_COUNT)
        first = layout.LIVE_ISSUED_OFFSET
        return sum(int.from_bytes(live[at : at + 8], "little") for at in range(first, first + 8 * count, 8))

    def group_size(self, name: str) -> int:
        """Ranks of a process group of the current initialization; 0 where it is not known."""
        peers = self._peers(name)
        return 0 if peers is None else len(peers)

    # --- noticing -----------------------------------------------------------------------------------------------------

    def _look(self, now: int) -> None:
        self._follow_progress(now)
        if self._report is not None:
            if self._progress_ns > self._report["monotonic_ns"]:
                self._over(now)
            elif self._verdict_at_ns and now >= self._verdict_at_ns:
                self._verdict_at_ns = 0
                self._tell_verdict()
            return
        slots = self._slots()
        for slot in slots:
            if now - self._held_since(slot) > self.timeout_ns:
                self._alarm("operation", now, slot)
                return
        quiet_ns = now - self._progress_ns
        if quiet_ns > self.timeout_ns:
            if not slots and self._recorder.phase_code in _WAITING_PHASES:
                self._alarm("phase", now, None)
                return
            if now >= self._next_look_ns:
                self._next_look_ns = now + max(self.timeout_ns // 4, 1_000_000_000)
                entry = self._pending_flight()
                if entry is not None:
                    self._alarm("flight_recorder", now, None, entry)
                    return
        # A rank that is in no operation of ours cannot know that it holds the others up: they say so in their files.
        if quiet_ns > self.timeout_ns // 2 and self._others_hang():
            self._alarm("asked", now, slots[0] if slots else None)

    def _follow_progress(self, now: int) -> None:
        buffer = self._recorder.live.buffer
        phase = bytes(buffer[layout.LIVE_PHASE_OFFSET : layout.LIVE_PHASE_OFFSET + layout.LIVE_PHASE.size])
        page = bytes(buffer[layout.LIVE_SLOTS_OFFSET :])
        written = self._recorder.written() - self.own_records
        if phase != self._phase_page:
            self._phase_page = phase
            self._phase_ns = self._progress_ns = now
        if page != self._page:
            size = layout.LIVE_SLOT_BYTES
            for index in range(layout.LIVE_SLOTS):
                if page[index * size : (index + 1) * size] != self._page[index * size : (index + 1) * size]:
                    self._slot_ns[index] = now
            self._page = page
            self._progress_ns = now
        if written != self._written:
            self._written = written
            self._progress_ns = now

    def _held_since(self, slot: Slot) -> int:
        """Since when an operation is held up: not while the training thread gets on with something else."""
        since = max(slot.start_ns, self._phase_ns)
        return since if slot.slot == 0 else max(since, self._slot_ns[0])

    def _slots(self) -> list[Slot]:
        read = (layout.read_slot(self._recorder.live.buffer, index) for index in range(layout.LIVE_SLOTS))
        return [slot for slot in read if slot.kind and slot.consistent]

    def _pending_flight(self) -> dict[str, Any] | None:
        """The oldest operation that torch's flight recorder holds for not done, and old enough."""
        entries = self._ask_flight(only_active=True)
        limit = time.time_ns() - self.timeout_ns
        old = [each for each in entries if not each.get("retired") and 0 < int(each["time_created_ns"]) < limit]
        return min(old, key=lambda each: int(each["time_created_ns"]), default=None)

    @staticmethod
    def _ask_flight(only_active: bool) -> list[dict[str, Any]]:
        """The flight recorder's entries. It takes a lock that a hung operation may hold: a thread of its own asks."""
        found: list[dict[str, Any]] = []

        def ask() -> None:
            try:
                found.extend(c10d.flight_entries(only_active))
            except Exception as error:
                guard.logger.debug("lens-auto: no flight recorder (%s)", error)

        thread = threading.Thread(target=ask, name="lens-flight-recorder", daemon=True)
        thread.start()
        thread.join(_FLIGHT_PATIENCE_S)
        return list(found)

    def _others_hang(self) -> bool:
        """Whether another rank's file says that it has been hanging since this one's last sign of progress."""
        if not self._keeper.run_dir:
            return False
        own = time.time_ns() - (time.monotonic_ns() - self._progress_ns)
        try:
            with os.scandir(self._keeper.run_dir) as entries:
                for entry in entries:
                    name = entry.name
                    told = name.startswith(_PREFIX) and name.endswith(_SUFFIX) and name != self._name()
                    if told and entry.stat().st_mtime_ns > own:
                        return True
        except OSError:
            pass
        return False

    # --- telling ------------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        rank = self._recorder.rank
        return f"{_PREFIX}{rank if rank >= 0 else f'-pid{os.getpid()}'}{_SUFFIX}"

    def _alarm(self, reason: str, now: int, slot: Slot | None, entry: dict[str, Any] | None = None) -> None:
        recorder = self._recorder
        self._keeper.claim_early()
        report = self._report = self._describe(reason, now, slot, entry)
        self._write(report)
        operation = report["operation"]
        if operation is not None:
            self.own_records += 1
            recorder.record(
                Kind.HANG,
                now - operation["waited_ns"],
                now,
                slot.thread if slot is not None else 0,
                Flag.SPAN,
                recorder.strings.id(operation["op"]),
                slot.group if slot is not None else recorder.strings.id(operation["group"] or ""),
                slot.dtype if slot is not None else 0,
                -1 if operation["seq"] is None else operation["seq"],
                slot.bytes if slot is not None else 0,
                slot.peer if slot is not None else -1,
                slot.tag if slot is not None else 0,
                slot.group_size if slot is not None else len(operation["peers"] or ()),
                recorder.strings.id(layout.HANG_NAME),
                operation["waited_ns"],
                0,
                int(recorder.phase_code),
                slot.kind if slot is not None else 0,
            )
        self._verdict_at_ns = now + min(2_000_000_000, max(self.timeout_ns // 2, 700_000_000))
        entries = self._ask_flight(only_active=False)
        if entries:
            report["flight_recorder"] = entries[-_MAX_ENTRIES:]
            self._write(report)

    def _over(self, now: int) -> None:
        """It went on: the file says so, and the next hang is another."""
        report, self._report = self._report, None
        if report is not None:
            report["over"] = iso(time.time_ns())
            report["over_ns"] = time.time_ns()
            self._write(report)
        self._verdict_at_ns = 0

    def _describe(self, reason: str, now: int, slot: Slot | None, entry: dict[str, Any] | None) -> dict[str, Any]:
        recorder, info = self._recorder, self._keeper.info
        wall_ns = time.time_ns()
        frames = sys._current_frames()
        names = {each.ident: (each.name, each.native_id) for each in list(threading._active.values())}  # type: ignore[attr-defined]
        in_flight = [self._operation(each, now, wall_ns, frames, names) for each in self._slots()]
        operation: dict[str, Any] | None = None
        if slot is not None:
            operation = self._operation(slot, now, wall_ns, frames, names)
        elif entry is not None:
            operation = self._flight_operation(entry, wall_ns)
        elif reason == "phase":
            operation = _operation(
                PHASE_OPERATIONS[recorder.phase_code], "phase", wall_ns, now - recorder.phase_since_ns
            )
        live = recorder.live.buffer
        issued = [
            int.from_bytes(live[at : at + 8], "little")
            for at in range(layout.LIVE_ISSUED_OFFSET, layout.LIVE_ISSUED_OFFSET + 8 * layout.LIVE_ISSUED_COUNT, 8)
        ]
        return {
            "format": RANK_FORMAT,
            "version": VERSION,
            "rank": recorder.rank,
            "world_size": recorder.world_size,
            "host": info["host"],
            "pid": info["pid"],
            "writer": info["writer"],
            "run_id": info["run_id"],
            "init": recorder.init,
            "reason": reason,
            "timeout_s": self.timeout_ns / 1e9,
            "at": iso(wall_ns),
            "wall_ns": wall_ns,
            "monotonic_ns": now,
            "operation": operation,
            "in_flight": in_flight,
            "phase": {
                "phase": recorder.phase_code.name.lower(),
                "iteration": recorder.iteration,
                "since": iso(wall_ns - (now - recorder.phase_since_ns)),
                "since_ns": wall_ns - (now - recorder.phase_since_ns),
                "steps": recorder.steps,
                "fetches": recorder.fetches,
            },
            "process_groups": [
                {**facts, "issued": issued[index] if index < len(issued) else None}
                for index, facts in enumerate(self.process_groups)
            ],
            "failure": self._keeper.ending.failure,
            "stacks": _stacks(frames, names),
            "flight_recorder": None,
            "over": None,
            "over_ns": None,
        }

    def _operation(
        self,
        slot: Slot,
        now: int,
        wall_ns: int,
        frames: dict[int, FrameType],
        names: dict[int | None, tuple[str, int | None]],
    ) -> dict[str, Any]:
        strings = self._recorder.strings
        group = strings.text(slot.group)
        found = _operation(strings.text(slot.name), _kind(slot.kind), wall_ns, now - slot.start_ns)
        found.update(
            group=group or None,
            seq=slot.seq if slot.seq >= 0 else None,
            peer=slot.peer if slot.peer >= 0 else None,
            tag=slot.tag,
            bytes=slot.bytes,
            dtype=strings.text(slot.dtype) or None,
            group_size=slot.group_size or None,
            peers=self._peers(group),
            thread=slot.thread,
        )
        if slot.kind == Kind.WAIT:
            ident = next((ident for ident, (_, native) in names.items() if native == slot.native_id), None)
            awaited = _awaited(frames.get(ident) if ident is not None else None)
            if awaited:
                found["op"] = awaited
        return found

    def _flight_operation(self, entry: dict[str, Any], wall_ns: int) -> dict[str, Any]:
        created = int(entry["time_created_ns"])
        group = str((entry.get("process_group") or [""])[0])
        found = _operation(c10d.operation_of(entry), "flight_recorder", wall_ns, max(0, wall_ns - created))
        nbytes, dtype = c10d.payload_of(entry)
        found.update(
            group=group or None,
            seq=entry.get("collective_seq_id"),
            bytes=nbytes,
            dtype=dtype or None,
            peers=self._peers(group),
        )
        return found

    def _peers(self, group: str) -> list[int] | None:
        for facts in self.process_groups:
            if facts["name"] == group and facts["init"] == self._recorder.init:
                return expand(facts["ranks"])
        return None

    def _write(self, report: dict[str, Any]) -> None:
        data = json.dumps(report, indent=1).encode() + b"\n"
        run_dir, folder = self._keeper.run_dir, self._keeper.writer_dir()
        places = []
        if run_dir:
            places.append(os.path.join(run_dir, self._name()))
        if folder is not None:
            places.append(os.path.join(folder, layout.HANG_NAME))
        elif self._recorder.folder is not None:
            places.append(os.path.join(self._recorder.folder, layout.HANG_NAME))
        for place in places:
            try:
                if os.path.dirname(place) == folder:
                    spool.private_folder(folder)
                spool.write_atomically(place, data)
            except OSError as error:
                guard.logger.debug("lens-auto: %r cannot be written (%s)", place, error)

    def _is_of_before(self, path: str) -> bool:
        """Whether a verdict is of an earlier hang."""
        report = self._report
        return report is not None and os.stat(path).st_mtime_ns < report["wall_ns"] - self.timeout_ns

    def _tell_verdict(self) -> None:
        """What all ranks' files say together; the first rank that gets here says it in one line."""
        from lens_auto.report import hang  # reads files only; numpy is here already wherever torch is

        run_dir = self._keeper.run_dir
        if not run_dir or self._report is None:
            return
        path = os.path.join(run_dir, VERDICT_NAME)
        with contextlib.suppress(FileNotFoundError):
            if not self._is_of_before(path):
                return
        found = hang.analyse(run_dir)
        if found.culprit is None:
            return
        draft = f"{path}.{os.getpid()}"
        spool.write_atomically(draft, json.dumps(found.to_json(), indent=1).encode() + b"\n")
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._is_of_before(path):
                    os.unlink(path)
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            return  # another rank was first
        finally:
            os.unlink(draft)
        logger.warning("lens-auto: hang: %s; see it with: lens-auto hang %s", found.verdict, rundir.shown(run_dir))


def _operation(name: str, kind: str, wall_ns: int, waited_ns: int) -> dict[str, Any]:
    since_ns = wall_ns - waited_ns
    return {
        "op": name,
        "kind": kind,
        "group": None,
        "seq": None,
        "peer": None,
        "tag": 0,
        "bytes": 0,
        "dtype": None,
        "group_size": None,
        "peers": None,
        "since": iso(since_ns),
        "since_ns": since_ns,
        "waited_ns": waited_ns,
        "thread": 0,
    }


def _kind(kind: int) -> str:
    try:
        return Kind(kind).name.lower()
    except ValueError:
        return str(kind)


def iso(wall_ns: int) -> str:
    """Local time with its offset, to the millisecond."""
    seconds, rest = divmod(wall_ns, 1_000_000_000)
    local = time.localtime(seconds)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{rest // 1_000_000:03d}{time.strftime('%z', local)}"


def read_hang(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What a hang watch wrote; None where there is no such file, or none that can be read."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == RANK_FORMAT else None


# --- threads ----------------------------------------------------------------------------------------------------------

_OURS = "lens-"  # names of our own threads


def _stacks(frames: dict[int, FrameType], names: dict[int | None, tuple[str, int | None]]) -> list[dict[str, Any]]:
    """The Python stacks of all threads but ours, the main thread first, innermost frame first."""
    main = threading.main_thread().ident
    found = []
    for ident, frame in sorted(frames.items(), key=lambda item: (item[0] != main, item[0])):
        name, native_id = names.get(ident, (f"thread {ident}", None))
        if not name.startswith(_OURS):
            found.append({"name": name, "native_id": native_id, "main": ident == main, "frames": frame_lines(frame)})
    return found


def frame_lines(frame: FrameType | None) -> list[str]:
    """`file:line function` of a frame and those that called it."""
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_FRAMES:
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno} {getattr(code, 'co_qualname', code.co_name)}")
        frame = frame.f_back
    return lines


def _awaited(frame: FrameType | None) -> str:
    """The operation of the `Work` that a thread waits for: the hook on `Work.wait` has it (its type: 2.4 to 2.13)."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "instrumentors.work" and "instance" in frame.f_locals:
            get_type = getattr(frame.f_locals["instance"], "_get_op_type", None)
            return operation_name(str(get_type())) if get_type is not None else ""
        frame = frame.f_back
    return ""


# c10d::OpType -> the function that issues it.
_OP_TYPES = {
    "BROADCAST": "broadcast",
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "SEND": "isend",
    "RECV": "irecv",
    "RECVANYSOURCE": "irecv",
    "BARRIER": "barrier",
}


# The order of the enumeration (torch/csrc/distributed/c10d/Work.hpp, 2.4 to 2.13): pybind may hand out numbers.
_OP_TYPE_ORDER = (
    *("BROADCAST", "ALLREDUCE", "ALLREDUCE_COALESCED", "REDUCE", "ALLGATHER", "_ALLGATHER_BASE", "ALLGATHER_COALESCED"),
    *("GATHER", "SCATTER", "REDUCE_SCATTER", "ALLTOALL_BASE", "ALLTOALL", "SEND", "RECV", "RECVANYSOURCE", "BARRIER"),
    "_REDUCE_SCATTER_BASE",
)


def operation_name(op_type: str) -> str:
    """`all_reduce` for `OpType.ALLREDUCE`, or the number that it stands for; empty where it says nothing."""
    word = op_type.rpartition(".")[2]
    if word.isdigit():
        word = _OP_TYPE_ORDER[int(word)] if int(word) < len(_OP_TYPE_ORDER) else ""
    return _OP_TYPES.get(word, "" if word in ("UNKNOWN", "") else word.lower())


# --- ranks as text ----------------------------------------------------------------------------------------------------


def compact(ranks: list[int]) -> str:
    """`0-3,8` for [0, 1, 2, 3, 8]; ranks in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def expand(text: str) -> list[int]:
    """The reverse of `compact`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last if dash else first) + 1))
    return found
