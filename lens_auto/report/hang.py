"""Who holds the others up: compares what all ranks are in, and names the culprit.

Each rank is seen through its live page where that can be read (on its host, or after the fact), else through the file
that its hang watch wrote. The rules for what must be equal on all ranks of a collective are those of PyTorch's own
analyser (`torch/distributed/flight_recorder/components/types.py`, `Op.match`): the operation; sizes, but for
all_to_all; types.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_auto.recorder import c10d, layout
from lens_auto.recorder.hang import PHASE_OPERATIONS, RANK_FORMAT, expand, iso
from lens_auto.recorder.layout import Phase
from lens_auto.recorder.read import RunDirectory, Status, UnreadableFile, WriterFiles
from lens_auto.report.words import counted, duration, named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HANG_FORMAT = "lens-hang"
VERSION = 1
_MISSING_NAMED = 10_000  # ranks that nobody saw and that are told one by one: a damaged file may tell of billions
LONG_NS = 5_000_000_000  # what waits for less is no hang, unless the hang watch says so
FROZEN_NS = 5_000_000_000  # without a heartbeat, of a process that is there
_JSON_LIMIT_BYTES = 16 << 20
_DIED_WITH_NS = 1_000_000_000

# Several names for one operation.
_SAME = {
    "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allreduce_coalesced": "all_reduce_coalesced",
}
# Operations to which every rank may bring another amount.
_ANY_SIZE = {
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
# What an exception says that came about because a peer was gone.
_CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Socket Timeout|Socket closed|timed out|remote process|ncclRemoteError"
    r"|communicator was aborted|Connection refused|failed to recv|failed to connect|Read error|Write error",
    re.IGNORECASE,
)
# How gloo says that what a peer sent does not fit (gloo/transport/tcp/pair.cc): the bytes that came, those expected.
_OTHER_SIZE = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_PHASE_WORDS = {
    "data_loading": "DataLoader.__next__",
    "backward": "backward",
    "optimizer": "the optimizer's step",
    "checkpoint": "a checkpoint",
    "start_up": "user code (start-up)",
    "forward": "user code (forward)",
    "other": "user code",
    "evaluate": "evaluation",
}
_TRANSFERS = ("send", "recv")
_UNNAMED = ("wait", "device_wait")  # what is waited for is an operation that has been issued before


@dataclass
class Wait:
    """An operation that a rank is in, or was in when it ended. Times are wall clock ns."""

    kind: str
    op: str
    group: str | None
    seq: int | None
    peer: int | None
    tag: int
    bytes: int
    dtype: str | None
    group_size: int | None
    since_ns: int
    thread: int = 0


@dataclass
class RankState:
    """What is known of one rank.

    Attributes:
        state: running, frozen (no heartbeat), failed (an exception that nobody caught), died, closed, unknown, missing.
        last_sign_ns: wall clock time of its end, or of the last heartbeat.
        issued: operations issued by group.
        members: global ranks by group.
        frames: stack of the main thread, innermost first; empty where no file has it.
        hang: what its hang watch wrote; None: nothing, or it went on.
        exit: how its launcher saw it end.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: str = "missing"
    phase: str = ""
    iteration: int = 0
    phase_since_ns: int = 0
    steps: int = 0
    fetches: int = 0
    waits: list[Wait] = field(default_factory=list)
    issued: dict[str, int] = field(default_factory=dict)
    members: dict[str, list[int]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    last_sign_ns: int | None = None
    started_ns: int = 0
    ended_ns: int | None = None
    frames: list[str] = field(default_factory=list)
    hang: dict[str, Any] | None = None
    hang_file: str | None = None
    failure: dict[str, Any] | None = None
    exit: dict[str, Any] | None = None
    flight: list[dict[str, Any]] = field(default_factory=list)

    @property
    def wait(self) -> Wait | None:
        """What it waits in: the operation that it entered first."""
        return min(self.waits, key=lambda wait: wait.since_ns, default=None)

    @property
    def where(self) -> str:
        """`file:line function` of the program's own innermost frame; empty where no stack is known."""
        for line in self.frames:
            path = line.rpartition(":")[0]
            if not _FOREIGN.search(path):
                return f"{os.path.basename(path)}:{line.rpartition(':')[2]}"
        return ""

    @property
    def progress(self) -> tuple[int, int, int]:
        """How far it has come; a batch that it waits for counts."""
        return (self.iteration, self.steps, self.fetches + (self.phase == "data_loading"))


# Frames that are not the program's: installed packages, the standard library, ours.
_FOREIGN = re.compile(r"site-packages|dist-packages|/lib/python\d|^<|/instrumentors/|/lens_auto/")


@dataclass
class Culprit:
    """Who holds the others up, and how.

    Attributes:
        rank: None where a rank is missing and nobody knows which.
        cause: not_started, died, exception, exited, frozen; skipped, other_operation, other_size, other_dtype, order;
            data_loading, checkpoint, backward, optimizer, start_up, user_code, process_group, point_to_point, device.
        op, group, seq: the operation that the others wait in.
        since: when the culprit entered what it is in, or ended; local time of the reader.
        doing: what it is in, in words.
        waiting: the ranks that wait for it.
    """

    rank: int | None
    cause: str
    op: str | None
    group: str | None
    seq: int | None
    since: str | None
    since_ns: int | None
    doing: str
    waiting: list[int]


@dataclass
class Analysis:
    """What all ranks say together."""

    run_dir: str
    run_id: str
    verdict: str
    culprit: Culprit | None
    culprits: list[Culprit]
    ranks: list[RankState]
    world_size: int
    at_ns: int
    problems: list[str]

    def to_json(self) -> dict[str, Any]:
        """As the object that `lens-auto hang --json` prints."""
        return {
            "format": HANG_FORMAT,
            "version": VERSION,
            "run_dir": self.run_dir,
            "run_id": self.run_id,
            "at": iso(self.at_ns),
            "verdict": self.verdict,
            "culprit": None if self.culprit is None else asdict(self.culprit),
            "culprits": [asdict(each) for each in self.culprits],
            "world_size": self.world_size,
            "ranks": [rank_json(each) for each in self.ranks],
            "problems": self.problems,
        }


def rank_json(state: RankState) -> dict[str, Any]:
    """One rank as JSON."""
    return {
        "rank": state.rank,
        "host": state.host,
        "pid": state.pid,
        "state": state.state,
        "phase": state.phase,
        "iteration": state.iteration,
        "phase_since": iso(state.phase_since_ns) if state.phase_since_ns else None,
        "in_flight": [{**asdict(wait), "since": iso(wait.since_ns)} for wait in state.waits],
        "issued": state.issued,
        "where": state.where or None,
        "last_sign": iso(state.last_sign_ns) if state.last_sign_ns else None,
        "hang_file": state.hang_file,
    }


def analyse(run: RunDirectory | str | Path) -> Analysis:
    """Compare all ranks of a run, also while it runs.

    Raises:
        UnreadableFile: the path is no run directory.
    """
    opened = run if isinstance(run, RunDirectory) else RunDirectory(run)
    states, world_size, problems = load_states(opened)
    return judge(opened, states, world_size, problems)


def judge(run: RunDirectory, states: list[RankState], world_size: int, problems: list[str]) -> Analysis:
    """Name the culprit among ranks that were loaded."""
    culprits = _Blame(states, world_size).culprits()
    culprit = culprits[0] if culprits else None
    analysis = Analysis(
        run_dir=str(run.path),
        run_id=run.run_id,
        verdict="",
        culprit=culprit,
        culprits=culprits,
        ranks=states,
        world_size=world_size,
        at_ns=time.time_ns(),
        problems=problems,
    )
    analysis.verdict = _verdict(analysis)
    return analysis


# --- what each rank is in ---------------------------------------------------------------------------------------------


def load_states(run: RunDirectory) -> tuple[list[RankState], int, list[str]]:
    """The state of every rank, by rank; the world size; what could not be read."""
    writers = {writer.name: writer for writer in run.writers}
    for writer in list(writers.values()):
        for other in _siblings(writer):
            if other.info.run_id == writer.info.run_id:
                writers.setdefault(other.name, other)
    newest: dict[tuple[int, int], WriterFiles] = {}
    for writer in writers.values():
        # A rank that does not know its number yet is told apart by its process.
        key = (writer.info.rank, 0 if writer.info.rank >= 0 else writer.info.pid)
        there = newest.get(key)
        if there is None or _started(there) < _started(writer):
            newest[key] = writer
    states = [_state(writer, run) for _, writer in sorted(newest.items())]
    world_size = max((writer.info.world_size for writer in newest.values()), default=0)
    known = {state.rank for state in states}
    for path, report in _hang_files(run.path):
        rank = report.get("rank")
        if isinstance(rank, int) and rank >= 0 and rank not in known:
            known.add(rank)
            states.append(_from_report(report, path))
            world_size = max(world_size, int(report.get("world_size") or 0))
    if not any(state.rank < 0 for state in states):
        states += islice((RankState(rank) for rank in range(world_size) if rank not in known), _MISSING_NAMED)
    _add_exits(run.path, states)
    states.sort(key=lambda state: state.rank)
    return states, world_size, [str(problem) for problem in run.problems]


def _started(writer: WriterFiles) -> int:
    return writer.info.clock.wall(writer.info.started_ns)


def _siblings(writer: WriterFiles) -> list[WriterFiles]:
    """Writers in the same spool: of ranks that do not know their run directory yet."""
    spool = writer.info.spool_dir
    if spool is None or writer.info.host != socket.gethostname():
        return []
    try:
        return RunDirectory(Path(spool).parent.parent).writers
    except UnreadableFile:
        return []


def _state(writer: WriterFiles, run: RunDirectory) -> RankState:
    info, clock, live = writer.info, writer.info.clock, writer.live
    state = RankState(info.rank, info.host, info.pid, started_ns=clock.wall(info.started_ns))
    report, path = _own_report(writer, run.path)
    if report is not None and not report.get("over_ns"):
        state.hang, state.hang_file = report, path
        main = next((each for each in report.get("stacks") or [] if each.get("main")), None)
        state.frames = [str(line) for line in (main or {}).get("frames") or []]
        state.flight = [each for each in report.get("flight_recorder") or [] if isinstance(each, dict)]
    failure = info.raw.get("failure")
    state.failure = failure if isinstance(failure, dict) else None
    state.exit = writer.exit
    facts = [each for each in info.raw.get("process_groups") or [] if isinstance(each, dict)]
    issued = live.issued if live is not None else ()
    for index, each in enumerate(facts):
        name = str(each.get("name"))
        state.members[name] = expand(str(each.get("ranks", "")))
        state.descriptions[name] = str(each.get("description") or "")
        if index < len(issued):
            state.issued[name] = issued[index]
    if live is None and report is not None:
        _fill_from_report(state, report)
    elif live is not None:
        phase = live.phase
        state.phase, state.iteration = phase.phase.name.lower(), phase.iteration
        state.phase_since_ns = clock.wall(phase.since_ns)
        if not phase.since_ns:  # nothing was said yet
            state.phase, state.phase_since_ns = "start_up", state.started_ns
        state.steps, state.fetches = phase.steps, phase.fetches
        state.waits = [
            Wait(
                slot.kind_name,
                writer.string(slot.name) or slot.kind_name,
                writer.string(slot.group) or None,
                slot.seq if slot.seq >= 0 else None,
                slot.peer if slot.peer >= 0 else None,
                slot.tag,
                slot.bytes,
                writer.string(slot.dtype) or None,
                slot.group_size or None,
                clock.wall(slot.start_ns),
                slot.thread,
            )
            for slot in live.slots
        ]
        for wait in state.waits:
            if wait.kind == "collective" and wait.group is not None and wait.seq is not None:
                state.issued[wait.group] = max(state.issued.get(wait.group, 0), wait.seq)
        if report is not None:
            _name_waits(state, report)
        state.last_sign_ns = live.heartbeat_wall_ns
    if info.ended_ns is not None:
        state.ended_ns = state.last_sign_ns = clock.wall(info.ended_ns)
    state.state = _how_it_stands(writer, state)
    if state.hang is not None and state.state in ("died", "closed", "failed") and after_hang(state):
        last_sign_ns = state.last_sign_ns
        _fill_from_report(state, state.hang)
        state.last_sign_ns = last_sign_ns
    elif state.state == "closed":
        state.waits = []
    return state


def after_hang(state: RankState) -> bool:
    """Whether a rank ended only after its hang watch had spoken, and not by an error of its own."""
    alarm_ns = int((state.hang or {}).get("wall_ns") or 0)
    if state.failure is not None:
        return is_consequence(state) and int(state.failure.get("wall_ns") or 0) > alarm_ns
    return True


def _how_it_stands(writer: WriterFiles, state: RankState) -> str:
    if state.failure is not None:
        return "failed"
    if writer.status is Status.CLOSED:
        return "closed"
    if writer.status is Status.DIED:
        return "died"
    if writer.status is Status.RUNNING:
        silent = state.last_sign_ns is not None and time.time_ns() - state.last_sign_ns > FROZEN_NS
        return "frozen" if silent else "running"
    return "running" if state.hang is not None else "unknown"


def _name_waits(state: RankState, report: dict[str, Any]) -> None:
    """What the rank itself found out about the works that it waits for."""
    told = {
        (int(each.get("since_ns", 0)) // 10_000_000, each.get("thread")): str(each.get("op"))
        for each in report.get("in_flight") or []
        if each.get("kind") == "wait"
    }
    for wait in state.waits:
        if wait.kind == "wait":
            wait.op = next(
                (
                    op
                    for (since, thread), op in told.items()
                    if thread == wait.thread and abs(since - wait.since_ns // 10_000_000) <= 1
                ),
                wait.op,
            )


def _from_report(report: dict[str, Any], path: str) -> RankState:
    """A rank whose live page cannot be read from here, as its hang watch described it."""
    state = RankState(int(report["rank"]), str(report.get("host", "")), int(report.get("pid") or 0), "running")
    if not report.get("over_ns"):
        state.hang, state.hang_file = report, path
    failure = report.get("failure")
    if isinstance(failure, dict):
        state.failure, state.state = failure, "failed"
    main = next((each for each in report.get("stacks") or [] if each.get("main")), None)
    state.frames = [str(line) for line in (main or {}).get("frames") or []]
    state.flight = [each for each in report.get("flight_recorder") or [] if isinstance(each, dict)]
    _fill_from_report(state, report)
    return state


def _fill_from_report(state: RankState, report: dict[str, Any]) -> None:
    phase = report.get("phase") or {}
    state.phase, state.iteration = str(phase.get("phase", "")), int(phase.get("iteration") or 0)
    state.phase_since_ns = int(phase.get("since_ns") or 0)
    state.steps, state.fetches = int(phase.get("steps") or 0), int(phase.get("fetches") or 0)
    state.last_sign_ns = int(report.get("wall_ns") or 0) or None
    for each in report.get("process_groups") or []:
        name = str(each.get("name"))
        state.members[name] = expand(str(each.get("ranks", "")))
        state.descriptions[name] = str(each.get("description") or "")
        state.issued[name] = int(each.get("issued") or 0)
    known = set(Wait.__dataclass_fields__)
    state.waits = [
        Wait(**{key: value for key, value in each.items() if key in known})
        for each in report.get("in_flight") or []
        if isinstance(each, dict)
    ]


def _own_report(writer: WriterFiles, run_dir: Path) -> tuple[dict[str, Any] | None, str | None]:
    for folder in writer.folders:
        found = _read_json(folder / layout.HANG_NAME)
        if found is not None and found.get("format") == RANK_FORMAT:
            top = run_dir / f"hang-rank{writer.info.rank}.json"
            return found, str(top if top.exists() else folder / layout.HANG_NAME)
    return None, None


def _hang_files(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(run_dir.glob("hang-rank*.json")):
        report = _read_json(path)
        if report is not None and report.get("format") == RANK_FORMAT:
            found.append((str(path), report))
    return found


def _add_exits(run_dir: Path, states: list[RankState]) -> None:
    """Ends of processes that never recorded anything, where the launcher knew which rank they were."""
    by_rank = {state.rank: state for state in states if state.state == "missing"}
    for path in sorted(run_dir.glob("exits-*.json")):
        found = _read_json(path) or {}
        for each in found.get("exits") or []:
            state = by_rank.get(each.get("rank", -1)) if isinstance(each, dict) else None
            if state is not None:
                state.exit = each


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            found = json.loads(file.read(_JSON_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# --- who is to blame --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Point:
    """A place at which ranks meet: an operation of a group."""

    kind: str
    op: str
    group: str | None
    seq: int | None


class _Blame:
    """Follows from each rank that waits to those it waits for, until one is found that does not wait."""

    def __init__(self, states: Sequence[RankState], world_size: int) -> None:
        self._states = {state.rank: state for state in states if state.rank >= 0}
        self._nameless = [state for state in states if state.rank < 0]
        self._world_size = world_size
        self._members: dict[str, list[int]] = {}
        for state in states:
            for group, ranks in state.members.items():
                if len(ranks) > len(self._members.get(group, ())):
                    self._members[group] = ranks
        alarms = [
            int(state.hang["wall_ns"]) for state in states if state.hang is not None and state.hang.get("wall_ns")
        ]
        self._alarm_ns = min(alarms, default=None)
        self._told = bool(alarms)
        self._points: dict[int, _Point] = {}
        self._waits: dict[int, Wait] = {}
        for rank, state in self._states.items():
            found = self._point_of(state)
            if found is not None:
                self._points[rank], self._waits[rank] = found

    def culprits(self) -> list[Culprit]:
        """All of them, the most telling first."""
        found = self._mismatches()
        if not found:
            found = self._missing_ranks()
        if not found:
            found = self._crossed()
        if not found:
            found = self._first_failure()
        if not found:
            found = self._alone()
        return found

    # --- what a rank waits in -----------------------------------------------------------------------------------------

    def _point_of(self, state: RankState) -> tuple[_Point, Wait] | None:
        """The operation that a rank is held up in, if it is."""
        if state.state == "missing" or (state.state in ("closed", "failed") and not state.waits):
            return None
        wait = state.wait
        if wait is not None:
            if not self._is_long(state, wait):
                return None
            if wait.kind == "collective":
                return _Point("collective", _SAME.get(wait.op, wait.op), wait.group, wait.seq), wait
            if wait.kind in _TRANSFERS:
                return _Point(wait.kind, wait.op, wait.group, wait.seq), wait
            if wait.kind == "process_group":
                return _Point("process_group", wait.op, None, None), wait
            if wait.kind not in _UNNAMED:
                return None
        elif state.phase != "backward":
            return None
        # A work or a device is awaited, or C++ waits in backward: in the group in which another rank lags behind.
        lagging = self._lagging_group(state)
        if lagging is None:
            return None
        if wait is not None and wait.kind == "wait" and wait.op != "wait":
            op = wait.op
        else:
            op = self._flight_name(state, lagging) or (wait.op if wait is not None else "backward")
        seq = state.issued.get(lagging)
        since_ns = wait.since_ns if wait is not None else state.phase_since_ns
        made = Wait("collective", op, lagging, seq, None, 0, 0, None, len(self._members.get(lagging, ())), since_ns)
        if not self._is_long(state, made):
            return None
        return _Point("collective", _SAME.get(op, op), lagging, seq), made

    def _is_long(self, state: RankState, wait: Wait) -> bool:
        if state.hang is not None or state.state in ("died", "failed"):
            return True
        return (time.time_ns() if state.state == "running" else state.last_sign_ns or 0) - wait.since_ns > LONG_NS

    def _lagging_group(self, state: RankState) -> str | None:
        best: tuple[int, str] | None = None
        for group, issued in state.issued.items():
            for rank in self._members.get(group, ()):
                other = self._states.get(rank)
                if rank == state.rank or other is None or other.state == "missing":
                    continue
                behind = issued - other.issued.get(group, 0)
                if behind > 0 and (best is None or behind < best[0]):
                    best = (behind, group)
        return None if best is None else best[1]

    @staticmethod
    def _flight_name(state: RankState, group: str) -> str:
        """The name of the operation that torch's flight recorder has last on a group; empty where it has none."""
        for entry in reversed(state.flight):
            if (entry.get("process_group") or [""])[0] == group and not entry.get("retired"):
                return str(entry.get("profiling_name", "")).partition(":")[2]
        return ""

    def _members_of(self, point: _Point, wait: Wait) -> list[int]:
        if point.kind in _TRANSFERS:
            return [] if wait.peer is None else [wait.peer]
        if point.kind == "process_group":
            return list(range(self._world_size))
        known = self._members.get(point.group or "")
        if known:
            return known
        return list(range(self._world_size)) if wait.group_size in (None, self._world_size) else []

    def _is_gone(self, state: RankState, wait: Wait) -> bool:
        """Whether a rank was gone while another waited, rather than killed with all of them after the hang."""
        if state.state in ("running", "frozen", "unknown"):
            return False
        if state.state == "missing":
            return True
        if state.hang is not None and after_hang(state):
            return False
        if state.state != "died":
            return True
        last = max(state.last_sign_ns or 0, int((state.exit or {}).get("wall_ns") or 0))
        if self._alarm_ns is not None:
            return last < self._alarm_ns + _DIED_WITH_NS
        return last < wait.since_ns + _DIED_WITH_NS

    # --- the same number, another operation ---------------------------------------------------------------------------

    def _mismatches(self) -> list[Culprit]:
        """Ranks that are in the same number of a group with another operation, size or type."""
        meetings: dict[tuple[str, int], dict[int, tuple[str, int, str | None]]] = {}
        since: dict[int, int] = {}
        for rank, state in self._states.items():
            for wait in state.waits:
                if wait.kind != "collective" or wait.group is None or wait.seq is None:
                    continue
                if rank in self._points or state.state in ("died", "failed"):
                    there = meetings.setdefault((wait.group, wait.seq), {})
                    there[rank] = (_SAME.get(wait.op, wait.op), wait.bytes, wait.dtype)
                    since[rank] = wait.since_ns
            failed = (state.failure or {}).get("operation")
            if isinstance(failed, dict) and failed.get("group") and isinstance(failed.get("seq"), int):
                op = str(failed.get("op"))
                there = meetings.setdefault((str(failed["group"]), failed["seq"]), {})
                there.setdefault(rank, (_SAME.get(op, op), int(failed.get("bytes") or 0), None))
                since.setdefault(rank, int((state.failure or {}).get("wall_ns") or 0))
            for entry in self._unfinished_flight(state):
                there = meetings.setdefault((entry[0], entry[1]), {})
                there.setdefault(rank, entry[2])
                since.setdefault(rank, state.phase_since_ns)
        found = []
        for (group, seq), there in meetings.items():
            if len(there) < 2:
                continue
            found += self._odd_ones(group, seq, there, since)
        return sorted(found, key=lambda culprit: (-len(culprit.waiting), culprit.rank or 0))

    @staticmethod
    def _unfinished_flight(state: RankState) -> list[tuple[str, int, tuple[str, int, str | None]]]:
        found = []
        for entry in state.flight:
            if entry.get("retired") or entry.get("is_p2p"):
                continue
            nbytes, dtype = c10d.payload_of(entry)
            op = c10d.operation_of(entry)
            group = str((entry.get("process_group") or [""])[0])
            found.append((group, int(entry.get("collective_seq_id") or 0), (_SAME.get(op, op), nbytes, dtype or None)))
        return found

    def _odd_ones(
        self, group: str, seq: int, there: dict[int, tuple[str, int, str | None]], since: dict[int, int]
    ) -> list[Culprit]:
        operations = Counter(op for op, _, _ in there.values())
        usual_op = self._usual([op for _, (op, _, _) in sorted(there.items())], operations)
        same_op = {rank: each for rank, each in sorted(there.items()) if each[0] == usual_op}
        types = [dtype for _, _, dtype in same_op.values() if dtype]
        usual_type = self._usual(types, Counter(types)) if types else None
        sizes = [nbytes for _, nbytes, _ in same_op.values()]
        usual_size = self._usual(sizes, Counter(sizes))
        odd: dict[int, str] = {}
        for rank, (op, nbytes, dtype) in there.items():
            if op != usual_op:
                odd[rank] = "other_operation"
            elif usual_op in _ANY_SIZE:
                continue
            elif dtype and usual_type and dtype != usual_type:
                odd[rank] = "other_dtype"
            elif nbytes != usual_size:
                odd[rank] = "other_size"
        waiting = [rank for rank in there if rank not in odd]
        ahead = max((self._states[rank].progress for rank in waiting), default=(0, 0, 0))
        found = []
        for rank, cause in odd.items():
            state, (op, nbytes, dtype) = self._states[rank], there[rank]
            if cause == "other_operation" and state.progress > ahead:
                cause = "skipped"
            detail = ""
            if cause in ("other_size", "other_dtype"):
                detail = f" of {counted(nbytes, 'byte')}{f' of {dtype}' if dtype else ''}"
                detail += f" (not {usual_size:,})" if cause == "other_size" else f" (not {usual_type})"
            doing = f"{op} #{seq}{detail} of {self._group_words(group)}{_at(state)}"
            if cause == "skipped":
                doing = f"in {doing}, {_further(state, ahead)} already"
            found.append(self._made(rank, cause, usual_op, group, seq, since.get(rank), doing, waiting))
        return found

    @staticmethod
    def _usual(values: Sequence[Any], counts: Counter[Any]) -> Any:
        """The most common one; of equally common ones that of the lowest rank."""
        most = max(counts.values(), default=0)
        return next((value for value in values if counts[value] == most), None)

    # --- who never came -----------------------------------------------------------------------------------------------

    def _missing_ranks(self) -> list[Culprit]:
        """For each rank that waits: those in whose absence it waits, and what they are in."""
        blamed: dict[int, tuple[str, _Point, int, str, set[int]]] = {}
        for rank, point in self._points.items():
            wait = self._waits[rank]
            for other in self._members_of(point, wait):
                if other == rank or (self._is_there(other, point) and not self._died_in(other, wait)):
                    continue
                for end, cause, since_ns, doing in self._ends(other, point, wait, {rank}):
                    there = blamed.setdefault(end, (cause, point, since_ns, doing, set()))
                    there[4].add(rank)
        found = [
            self._made(rank, cause, point.op, point.group, point.seq, since_ns or None, doing, sorted(waiting))
            for rank, (cause, point, since_ns, doing, waiting) in blamed.items()
        ]
        found += self._nameless_missing()
        gone = ("not_started", "died", "exception", "exited", "frozen")
        return sorted(
            found,
            key=lambda culprit: (
                self._is_victim(culprit),
                culprit.cause not in gone,
                -len(culprit.waiting),
                culprit.since_ns or 0,
                culprit.rank or 0,
            ),
        )

    def _is_victim(self, culprit: Culprit) -> bool:
        state = None if culprit.rank is None else self._states.get(culprit.rank)
        return culprit.cause == "exception" and state is not None and is_consequence(state)

    def _died_in(self, rank: int, wait: Wait) -> bool:
        """Whether a rank came to where another waits, and died there."""
        state = self._states.get(rank)
        return state is not None and state.state == "died" and self._is_gone(state, wait)

    def _nameless_missing(self) -> list[Culprit]:
        """Ranks that wait in init_process_group and do not know their numbers: how many are missing can be told."""
        waiting = [state for state in self._nameless if state.wait is not None and state.wait.kind == "process_group"]
        if not waiting or len(self._states) + len(self._nameless) >= self._world_size:
            return []
        missing = self._world_size - len(self._states) - len(self._nameless)
        doing = f"{missing} of {counted(self._world_size, 'rank')} never reached init_process_group"
        return [Culprit(None, "not_started", "init_process_group", None, None, None, None, doing, [])]

    def _is_there(self, rank: int, point: _Point) -> bool:
        """Whether a rank has come to a point, and is in it or past it."""
        state = self._states.get(rank)
        if state is None:
            return False
        here = self._points.get(rank)
        if point.kind == "process_group":
            return here is not None and here.kind == "process_group" and here.op == point.op
        if point.kind in _TRANSFERS:
            other = "recv" if point.kind == "send" else "send"
            return here is not None and here.kind == other and here.group == point.group
        if here is not None and (here.group, here.seq) == (point.group, point.seq):
            return True
        failed = (state.failure or {}).get("operation") or {}
        if failed.get("group") == point.group and failed.get("seq") == point.seq:
            return True
        return point.seq is not None and state.issued.get(point.group or "", 0) >= point.seq

    def _ends(self, rank: int, point: _Point, wait: Wait, path: set[int]) -> list[tuple[int, str, int, str]]:
        """Where the blame for a rank's absence ends: rank, cause, since when, what it is in."""
        if rank in path:
            return []
        state = self._states.get(rank)
        if state is None:
            return [(rank, "not_started", 0, "not seen")]
        if self._is_gone(state, wait) or state.state == "frozen":
            return [(rank, *self._how_it_is_gone(state, point))]
        further = self._points.get(rank)
        if further is not None:
            ends = []
            for other in self._members_of(further, self._waits[rank]):
                if other != rank and not self._is_there(other, further):
                    ends += self._ends(other, further, self._waits[rank], path | {rank})
            if ends:
                return ends
            if further.kind == "collective" or further.kind in _TRANSFERS:
                return []  # it waits for those that wait for it: crossed
        cause, since_ns, doing = self._doing(state)
        ahead = max((self._states[each].progress for each in path if each in self._states), default=(0, 0, 0))
        if state.progress > ahead and point.kind == "collective" and cause != "process_group":
            return [(rank, "skipped", since_ns, f"{doing}, {_further(state, ahead)} already")]
        return [(rank, cause, since_ns, doing)]

    def _how_it_is_gone(self, state: RankState, point: _Point) -> tuple[str, int, str]:
        if state.state == "missing":
            how = f"its process ended with {exit_words(state.exit)}" if state.exit else "no process of it was seen"
            place = "init_process_group" if point.kind == "process_group" else "this operation"
            return "not_started", int((state.exit or {}).get("wall_ns") or 0), f"it never reached {place}: {how}"
        if state.state == "failed":
            failure = state.failure or {}
            return "exception", int(failure.get("wall_ns") or 0), failure_words(failure)
        if state.state == "died":
            how = exit_words(state.exit) if state.exit else "its process is gone"
            return "died", state.last_sign_ns or 0, f"it died ({how}) in {_place(state)}"
        if state.state == "frozen":
            return "frozen", state.last_sign_ns or 0, f"its process does nothing at all, last seen in {_place(state)}"
        return "exited", state.ended_ns or 0, "it has ended without an error"

    def _doing(self, state: RankState) -> tuple[str, int, str]:
        """What a rank that is alive and waits for nobody is in."""
        wait = state.wait
        if wait is not None and wait.kind == "process_group":
            return "process_group", wait.since_ns, f"in {wait.op}{_at(state)}"
        if wait is not None and wait.kind in _TRANSFERS:
            peer = "" if wait.peer is None else f" with rank {wait.peer}"
            return "point_to_point", wait.since_ns, f"in {wait.op}{peer}{_at(state)}"
        if wait is not None and wait.kind == "device_wait":
            return "device", wait.since_ns, f"in {wait.op}{_at(state)}"
        words = _PHASE_WORDS.get(state.phase, state.phase or "an unknown place")
        cause = state.phase if state.phase in ("data_loading", "checkpoint", "backward", "optimizer") else "user_code"
        if state.phase == "start_up" and not state.issued:
            cause = "start_up"
        return cause, state.phase_since_ns, f"in {words}{_at(state)}"

    # --- each waits for the other -------------------------------------------------------------------------------------

    def _crossed(self) -> list[Culprit]:
        """Ranks that entered the operations of two groups (or two transfers) in different order."""
        found = self._rings()
        if found:
            return found
        places: dict[_Point, list[int]] = {}
        for rank, point in sorted(self._points.items()):
            if point.kind == "collective" or point.kind in _TRANSFERS:
                places.setdefault(point, []).append(rank)
        if len(places) < 2:
            return []
        found = []
        usual = max(places, key=lambda point: len(places[point]))  # of equal ones the first, that of the lowest rank
        for point, ranks in places.items():
            if point == usual:
                continue
            for rank in ranks:
                waits_for = set(self._members_of(usual, self._waits[places[usual][0]]))
                held = set(self._members_of(point, self._waits[rank]))
                if rank not in waits_for or not held & set(places[usual]):
                    continue
                words = "" if point.group is None else f" of {self._group_words(point.group)}"
                number = "" if point.seq is None else f" #{point.seq}"
                doing = f"in {point.op}{number}{words} first{_at(self._states[rank])}"
                since = self._waits[rank].since_ns
                found.append(self._made(rank, "order", usual.op, usual.group, usual.seq, since, doing, places[usual]))
        return found

    def _rings(self) -> list[Culprit]:
        """Ranks each of which waits for a transfer with the next, as two that both receive; the highest is named."""
        for start in sorted(self._points):
            ring = [start]
            while True:
                point, peer = self._points[ring[-1]], self._waits[ring[-1]].peer
                following = None if peer is None else self._points.get(peer)
                if peer is None or following is None or following.kind != point.kind or point.kind not in _TRANSFERS:
                    break
                if peer in ring:
                    ring = ring[ring.index(peer) :]
                    rank = max(ring)
                    point, wait = self._points[rank], self._waits[rank]
                    doing = f"in {point.op} with rank {wait.peer} as well{_at(self._states[rank])}"
                    return [self._made(rank, "order", point.op, point.group, point.seq, wait.since_ns, doing, ring)]
                ring.append(peer)
        return []

    # --- nobody waits -------------------------------------------------------------------------------------------------

    def _first_failure(self) -> list[Culprit]:
        """The rank that ended first, of its own accord."""
        ended = [state for state in self._states.values() if failed_at(state) is not None]
        if self._told and not any(state.state == "failed" for state in ended):
            ended = [state for state in ended if (state.last_sign_ns or 0) < (self._alarm_ns or 0)]
        if not ended:
            return []
        ended.sort(key=end_order)
        first = ended[0]
        point = self._point_of_failure(ended)
        cause, since_ns, doing = self._how_it_is_gone(first, point)
        waiting = [state.rank for state in ended[1:] if is_consequence(state)]
        return [
            self._made(first.rank, cause, point.op or None, point.group, point.seq, since_ns or None, doing, waiting)
        ]

    def _point_of_failure(self, ended: list[RankState]) -> _Point:
        """The operation in which the first to end let the others down; its own where nobody says."""
        for state in (*ended[1:], ended[0]):
            failed = (state.failure or {}).get("operation")
            if isinstance(failed, dict):
                op = str(failed.get("op"))
                return _Point("collective", _SAME.get(op, op), failed.get("group"), failed.get("seq"))
        for state in ended:
            wait = state.wait
            if wait is not None and wait.kind == "collective":
                return _Point("collective", _SAME.get(wait.op, wait.op), wait.group, wait.seq)
        return _Point("", "", None, None)

    def _alone(self) -> list[Culprit]:
        """Ranks that hang in something that needs no other rank."""
        found = []
        for rank, state in self._states.items():
            if state.state not in ("running", "died", "frozen", "failed") or rank in self._points:
                continue
            told = state.hang is not None and state.hang.get("reason") != "asked"
            if not told and state.state != "frozen":
                continue
            if state.state == "frozen":
                cause, since_ns, doing = self._how_it_is_gone(state, _Point("", "", None, None))
                op = None
            else:
                cause, since_ns, doing = self._doing(state)
                op = None
                if cause == "device" and state.wait is not None:
                    op = state.wait.op
                elif state.phase.upper() in Phase.__members__:
                    op = PHASE_OPERATIONS.get(Phase[state.phase.upper()])
            found.append(self._made(rank, cause, op, None, None, since_ns, doing, []))
        return sorted(found, key=lambda culprit: culprit.since_ns or 0)

    # --- words --------------------------------------------------------------------------------------------------------

    def _made(
        self,
        rank: int,
        cause: str,
        op: str | None,
        group: str | None,
        seq: int | None,
        since_ns: int | None,
        doing: str,
        waiting: list[int],
    ) -> Culprit:
        since = iso(since_ns) if since_ns else None
        return Culprit(
            rank, cause, op, group, seq, since, since_ns or None, doing, [each for each in waiting if each != rank]
        )

    def _group_words(self, group: str) -> str:
        for state in self._states.values():
            if state.descriptions.get(group):
                return f"group {group} ({state.descriptions[group]})"
        return f"group {group}"

    def words_of(self, culprit: Culprit) -> str:
        """`all_reduce #412 of group 0 (dp)`."""
        if culprit.op is None:
            return ""
        seq = "" if culprit.seq is None else f" #{culprit.seq}"
        return f"{culprit.op}{seq}" + ("" if culprit.group is None else f" of {self._group_words(culprit.group)}")


def _further(state: RankState, ahead: tuple[int, int, int]) -> str:
    """How far ahead of others a rank is."""
    if state.iteration > ahead[0]:
        return f"in iteration {state.iteration}"
    return f"at its batch {state.progress[2]}" if state.progress[2] > ahead[2] else f"past its step {state.steps}"


def _at(state: RankState) -> str:
    return f" at {state.where}" if state.where else ""


def _place(state: RankState) -> str:
    """Where a rank was last seen, as `all_reduce #12 of group 0 in backward of iteration 41`."""
    wait = state.wait
    words = "start-up"
    if state.phase != "start_up":
        words = f"{_PHASE_WORDS.get(state.phase, state.phase or 'an unknown place')} of iteration {state.iteration}"
    if wait is None:
        return words
    seq = "" if wait.seq is None else f" #{wait.seq}"
    group = "" if wait.group is None else f" of group {wait.group}"
    return f"{wait.op}{seq}{group} in {words}"


def failed_at(state: RankState) -> int | None:
    """When a rank ended badly, wall clock ns; None where it did not, as far as is known."""
    if state.failure is not None:
        return int(state.failure.get("wall_ns") or 0)
    if state.state == "died":
        return state.last_sign_ns or 0
    code = (state.exit or {}).get("code")
    if code not in (None, 0):
        return state.ended_ns or int((state.exit or {}).get("wall_ns") or 0)
    return None


def is_consequence(state: RankState) -> bool:
    """Whether a rank ended because another had: its exception says so, or its launcher did it."""
    if state.failure is not None:
        return bool(_CONSEQUENCE.search(str(state.failure.get("message", ""))))
    return bool((state.exit or {}).get("by_launcher"))


def end_order(state: RankState) -> tuple[bool, int, int]:
    """Sort key: who ended of its own accord first, then by time."""
    return (is_consequence(state), failed_at(state) or 0, state.rank)


def exit_words(found: dict[str, Any] | None) -> str:
    """`signal 9 (SIGKILL)`, `exit code 1`."""
    if not found or not isinstance(found.get("code"), int):
        return "an unknown status"
    code = int(found["code"])
    return f"signal {-code} ({found.get('signal')})" if code < 0 else f"exit code {code}"


def failure_words(failure: dict[str, Any]) -> str:
    """`ValueError: bad loss at train.py:41`."""
    message = str(failure.get("message", "")).strip().splitlines()
    text = str(failure.get("type"))
    if message:
        text += f": {_printable(message[0][:200])}{'…' if len(message[0]) > 200 else ''}"
    where = next((line for line in failure.get("frames") or [] if not _FOREIGN.search(line)), "")
    if where:
        path, _, rest = where.rpartition(":")
        text += f" at {os.path.basename(path)}:{rest}"
    met = _OTHER_SIZE.search(str(failure.get("message", "")))
    if met is not None:
        text += f" ({met[1]} bytes came from a rank where {met[2]} were due: the two were in different operations)"
    return text


def _printable(text: str) -> str:
    """A program's own words without what a terminal would obey."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _verdict(analysis: Analysis) -> str:
    """One line: who waits in what, and who is missing."""
    culprit = analysis.culprit
    blame = _Blame(analysis.ranks, analysis.world_size)
    if culprit is None:
        longest = max(
            (
                (analysis.at_ns - wait.since_ns, state.rank, wait)
                for state in analysis.ranks
                if state.state == "running"
                for wait in state.waits
            ),
            key=lambda each: each[0],
            default=None,
        )
        if longest is not None and longest[0] > LONG_NS:
            words = f"rank {longest[1]} has been in {longest[2].op} for {duration(longest[0])}"
            return f"{words}; nobody is known to be missing"
        running = sum(state.state == "running" for state in analysis.ranks)
        return f"no hang: no rank waits for more than {duration(LONG_NS)} ({running} running)"
    since = (
        ""
        if culprit.since_ns is None
        else f" since {time.strftime('%H:%M:%S', time.localtime(culprit.since_ns // 10**9))}"
    )
    operation = blame.words_of(culprit)
    others = [
        each
        for each in analysis.culprits[1:]
        if (each.cause, each.op, each.seq) == (culprit.cause, culprit.op, culprit.seq)
    ]
    who = (
        "a rank"
        if culprit.rank is None
        else named([culprit.rank, *(each.rank for each in others if each.rank is not None)])
    )
    start = (
        f"{named(culprit.waiting)} {'waits' if len(culprit.waiting) == 1 else 'wait'} in {operation}; "
        if culprit.waiting and operation
        else ""
    )
    if culprit.cause in ("other_operation", "other_size", "other_dtype"):
        return f"{start}{who} {'is' if not others else 'are'} in {culprit.doing} instead"
    if culprit.cause == "order":
        return f"{start}{who} went the other way round: {culprit.doing}"
    if culprit.cause in ("not_started", "died", "exited"):
        return f"{start}{who}: {culprit.doing}"
    if culprit.cause == "exception":
        return f"{start}{who} failed with {culprit.doing}"
    if not culprit.waiting:
        return f"{who} hangs {culprit.doing}{since}"
    came = "skipped it" if culprit.cause == "skipped" else "never came"
    return f"{start}{who} {came}: {culprit.doing}{since}"


# --- for a terminal ---------------------------------------------------------------------------------------------------

_RANKS_SHOWN = 64


def table(names: Sequence[str]) -> Table:
    """A plain table."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        found.add_column(name, overflow="fold")
    return found


def in_words(state: RankState) -> str:
    """What a rank is in, in a few words."""
    if state.state == "missing":
        return "never seen"
    return f"{_place(state)}{_at(state)}"


def render(analysis: Analysis, out: Console) -> None:
    """Print it, the verdict first."""
    from rich.text import Text

    out.print(Text(analysis.verdict, style="bold red" if analysis.culprit is not None else "bold"), soft_wrap=True)
    out.print(Text(f"run {analysis.run_id} in {analysis.run_dir}", style="dim"), soft_wrap=True)
    out.print()
    named_ranks = {culprit.rank for culprit in analysis.culprits}
    shown = sorted(analysis.ranks, key=lambda state: (state.rank not in named_ranks, state.rank))[:_RANKS_SHOWN]
    rows = table(("rank", "state", "is in", "for"))
    for state in sorted(shown, key=lambda each: each.rank):
        since_ns = state.wait.since_ns if state.wait is not None else state.phase_since_ns
        until_ns = analysis.at_ns if state.state == "running" else state.last_sign_ns or since_ns
        rows.add_row(
            str(state.rank) if state.rank >= 0 else "?",
            state.state,
            Text(in_words(state), style="red" if state.rank in named_ranks else ""),
            duration(max(0, until_ns - since_ns)) if since_ns else "-",
        )
    out.print(rows)
    if len(shown) < len(analysis.ranks):
        out.print(f"{len(analysis.ranks) - len(shown)} more; --json has them all")
    files = [state.hang_file for state in analysis.ranks if state.hang_file]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    if files:
        out.print(Text(f"stacks of all threads: {files[0]}{more}"), soft_wrap=True)
    for problem in analysis.problems:
        out.print(Text(problem), soft_wrap=True)
