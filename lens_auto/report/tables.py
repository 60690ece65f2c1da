"""A run as tables for SQL, queried by DuckDB: what the report computes, and what it computes it from.

Tables are made when a query names them. Times are nanoseconds; those called `start_ns` are wall clock times of the
first rank's host. Where a value is not known it is NULL.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_auto.iteration.rule import find_iterations
from lens_auto.recorder.layout import Flag, Phase
from lens_auto.report.load import find_calls
from lens_auto.report.match import attempts, match
from lens_auto.report.points import Source
from lens_auto.report.verdicts import SOURCES, Judge, phase_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lens_auto.report.load import LoadedWriter
    from lens_auto.report.match import Matched
    from lens_auto.report.summary import Summary

    Columns = dict[str, Any]

TABLES: dict[str, str] = {
    "ranks": "one row a process: attempt, rank, host, pid, state, iterations, median_ns, p99_ns, records, dropped",
    "iterations": "one row a rank and iteration: attempt, rank, iteration, start_ns, duration_ns, training_ns (without"
    " evaluation and checkpoints), then the time of each phase: data_loading_ns, forward_ns ...",
    "work": "one row a rank and compared iteration: attempt, rank, iteration, span_ns (between its operations), own"
    " work by phase (own_data_loading_ns ...), late_ns (beyond others), waits_ns (for others), communication_ns",
    "phases": "one row a piece of an iteration: attempt, rank, iteration, phase, start_ns, duration_ns",
    "operations": "one row a call: attempt, rank, iteration, operation, process_group, seq, peer, tag, bytes, dtype,"
    " group_size, asynchronous, start_ns, duration_ns, exposed_ns",
    "meetings": "one row a rank and operation in which ranks met: attempt, iteration, meeting, rank, arrival (how it is"
    " known), own_ns (its work since the one before), late_ns, waits_ns, communication_ns",
    "findings": "one row a verdict: kind, ranks, cause, effect, low, high, cost_ns, headline, advice",
    "what_if": "one row a replay: rank, phase, saves, low, high, saves_ns",
}
_TRAINING = [phase for phase in Phase if phase is not Phase.START_UP]


class MissingDuckDB(ValueError):
    """DuckDB, which runs the queries, is not installed; the message is one line."""


class BadQuery(ValueError):
    """DuckDB does not take a query; the message is one line."""


class Tables:
    """The tables of a run.

    Args:
        summary: its report.
        loaded: its writers.

    Raises:
        MissingDuckDB: the library that runs queries is not installed.
    """

    def __init__(self, summary: Summary, loaded: Sequence[LoadedWriter]) -> None:
        try:
            self._duckdb = importlib.import_module("duckdb")
        except ImportError:
            raise MissingDuckDB("DuckDB is not installed; pip install 'nemo-lens-auto[report]' adds it") from None
        self._summary = summary
        self._loaded = list(loaded)
        self._attempts = attempts(loaded)
        self._attempt = {id(each): at for at, writers in enumerate(self._attempts) for each in writers}
        self._matches: list[Matched] | None = None
        self._connection = self._duckdb.connect()
        # A query is about the run and about nothing else.
        self._connection.execute("SET enable_external_access = false")

    def query(self, text: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Names of the columns and rows of a query.

        Raises:
            BadQuery: the query cannot be run; the message lists the tables where one is not known.
        """
        makers: dict[str, Callable[[], Columns]] = {
            "ranks": self._ranks,
            "iterations": self._iterations,
            "work": self._work,
            "phases": self._phases,
            "operations": self._operations,
            "meetings": self._meetings,
            "findings": self._findings,
            "what_if": self._what_if,
        }
        for name, make in makers.items():
            if re.search(rf"\b{name}\b", text, re.IGNORECASE):
                self._connection.register(name, make())
        try:
            found = self._connection.execute(text)
            if found is None:
                raise BadQuery("the query cannot be run: there is no statement in it")
            names = [str(column[0]) for column in found.description or ()]
            return names, found.fetchall()
        except self._duckdb.Error as error:
            reason = str(error).split("\n")[0]
            valid = f"; tables: {', '.join(TABLES)}" if "Table with name" in reason else ""
            raise BadQuery(f"the query cannot be run: {reason}{valid}") from None

    # --- tables -------------------------------------------------------------------------------------------------------

    def _of(self, each: LoadedWriter) -> int:
        return self._attempt.get(id(each), -1)

    def _wall(self, each: LoadedWriter, time_ns: Any) -> Any:
        clock = each.writer.info.clock
        wall = np.asarray(time_ns, dtype=np.int64) + (clock.wall_ns - clock.monotonic_ns)
        attempt = self._of(each)
        host = self._matched()[attempt].hosts.get(each.writer.info.host) if attempt >= 0 else None
        return wall if host is None else host.shift(wall)

    def _matched(self) -> list[Matched]:
        if self._matches is None:
            self._matches = [match(writers) for writers in self._attempts]
        return self._matches

    def _ranks(self) -> Columns:
        rows = list(zip(self._loaded, self._summary.ranks, strict=True))
        return {
            "attempt": _whole([self._of(each) for each, _ in rows]),
            "rank": _whole([rank.rank for _, rank in rows]),
            "host": _texts([rank.host for _, rank in rows]),
            "pid": _whole([rank.pid for _, rank in rows]),
            "state": _texts([rank.state for _, rank in rows]),
            "iterations": _whole([rank.iterations.count for _, rank in rows]),
            "median_ns": _known([rank.iterations.median_ns for _, rank in rows]),
            "p99_ns": _known([rank.iterations.p99_ns for _, rank in rows]),
            "records": _whole([rank.records for _, rank in rows]),
            "dropped": _whole([rank.dropped for _, rank in rows]),
        }

    def _iterations(self) -> Columns:
        parts = []
        for each in self._loaded:
            found = each.iterations
            part: Columns = {
                "attempt": np.full(len(found), self._of(each)),
                "rank": np.full(len(found), each.writer.info.rank),
                "iteration": found.number,
                "start_ns": self._wall(each, found.start_ns),
                "duration_ns": found.duration_ns,
                "training_ns": found.training_ns,
            }
            for phase in _TRAINING:
                part[f"{phase_name(phase)}_ns"] = found.phase_ns[:, phase]
            parts.append(part)
        return _joined(parts)

    def _work(self) -> Columns:
        parts = []
        for attempt, matched in enumerate(self._matched()):
            if not len(matched.iteration):
                continue
            judge = Judge(matched)
            own = matched.by_iteration(judge.own.reshape(len(judge.own), -1)).reshape(
                len(matched.iteration), len(matched.writers), -1
            )
            waits = matched.by_iteration(judge.matched.wait_ns)
            communication = matched.by_iteration(np.where(matched.present, matched.exposed_ns[:, None], 0))
            for column, each in enumerate(matched.writers):
                part: Columns = {
                    "attempt": np.full(len(matched.iteration), attempt),
                    "rank": np.full(len(matched.iteration), each.writer.info.rank),
                    "iteration": matched.iteration,
                    "span_ns": matched.span_ns,
                }
                for phase in _TRAINING:
                    part[f"own_{phase_name(phase)}_ns"] = own[:, column, phase]
                part["late_ns"] = judge.iteration_late[:, column]
                part["waits_ns"] = waits[:, column]
                part["communication_ns"] = communication[:, column]
                parts.append(part)
        return _joined(parts)

    def _phases(self) -> Columns:
        parts = []
        names = _texts([phase_name(phase) for phase in Phase])
        for each in self._loaded:
            tiles = each.iterations.tiles
            parts.append(
                {
                    "attempt": np.full(len(tiles), self._of(each)),
                    "rank": np.full(len(tiles), each.writer.info.rank),
                    "iteration": tiles["iteration"],
                    "phase": names[tiles["phase"]],
                    "start_ns": self._wall(each, tiles["start_ns"]),
                    "duration_ns": tiles["end_ns"] - tiles["start_ns"],
                }
            )
        return _joined(parts)

    def _operations(self) -> Columns:
        parts = []
        for each in self._loaded:
            writer = each.writer
            records = writer.records()
            iterations = find_iterations(records.data, records.numbers, writer.last_sign_ns)
            calls = find_calls(records, iterations)
            data = records.data[calls.rows]
            duration = calls.duration_ns.astype(np.float64)
            duration[calls.unknown] = np.nan
            exposed = calls.exposed_ns.astype(np.float64)
            exposed[calls.exposed_unknown] = np.nan
            parts.append(
                {
                    "attempt": np.full(len(data), self._of(each)),
                    "rank": np.full(len(data), writer.info.rank),
                    "iteration": iterations.record_iteration[calls.rows],
                    "operation": _named(writer.string, data["name"]),
                    "process_group": _named(writer.string, data["group"]),
                    "seq": data["seq"].astype(np.int64),
                    "peer": data["peer"].astype(np.int64),
                    "tag": data["tag"].astype(np.int64),
                    "bytes": data["bytes"].astype(np.uint64),
                    "dtype": _named(writer.string, data["dtype"]),
                    "group_size": data["group_size"].astype(np.int64),
                    "asynchronous": (data["flags"] & Flag.ASYNC) != 0,
                    "start_ns": self._wall(each, calls.start_ns),
                    "duration_ns": duration,
                    "exposed_ns": exposed,
                }
            )
        return _joined(parts)

    def _meetings(self) -> Columns:
        parts = []
        sources = _texts([SOURCES[source] for source in Source])
        for attempt, matched in enumerate(self._matched()):
            if not len(matched.iteration):
                continue
            judge = Judge(matched)
            for column, each in enumerate(matched.writers):
                rows = np.flatnonzero(matched.present[:, column])
                parts.append(
                    {
                        "attempt": np.full(len(rows), attempt),
                        "iteration": matched.iteration[matched.operation_iteration[rows]],
                        "meeting": matched.operation_position[rows],
                        "rank": np.full(len(rows), each.writer.info.rank),
                        "arrival": sources[matched.source[rows]],
                        "own_ns": judge.work[rows, column],
                        "late_ns": judge.late[rows, column],
                        "waits_ns": judge.matched.wait_ns[rows, column].astype(np.float64),
                        "communication_ns": matched.exposed_ns[rows],
                    }
                )
        return _joined(parts)

    def _findings(self) -> Columns:
        rows = self._summary.findings
        return {
            "kind": _texts([each.kind for each in rows]),
            "ranks": _texts([json.dumps(each.ranks) for each in rows]),
            "cause": _texts([each.cause for each in rows]),
            "effect": _known([each.effect for each in rows]),
            "low": _known([None if each.interval is None else each.interval[0] for each in rows]),
            "high": _known([None if each.interval is None else each.interval[1] for each in rows]),
            "cost_ns": _whole([each.cost_ns for each in rows]),
            "headline": _texts([each.headline for each in rows]),
            "advice": _texts([each.advice for each in rows]),
        }

    def _what_if(self) -> Columns:
        rows = self._summary.what_if
        return {
            "rank": _known([each.rank for each in rows]),
            "phase": _texts([each.phase for each in rows]),
            "saves": _known([each.saves for each in rows]),
            "low": _known([each.interval[0] for each in rows]),
            "high": _known([each.interval[1] for each in rows]),
            "saves_ns": _whole([each.saves_ns for each in rows]),
        }


# --- columns ----------------------------------------------------------------------------------------------------------


def _whole(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int64)


def _known(values: Sequence[float | None]) -> Any:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _texts(values: Sequence[str | None]) -> Any:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _named(string: Callable[[int], str], numbers: Any) -> Any:
    known, inverse = np.unique(numbers, return_inverse=True)
    return _texts([string(number) for number in known.tolist()])[inverse]


def _joined(parts: Sequence[Columns]) -> Columns:
    if not parts:
        return {"rank": np.empty(0, dtype=np.int64)}
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def render(names: Sequence[str], rows: Sequence[Sequence[Any]], out: Any) -> None:
    """Print the result of a query."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, name in enumerate(names):
        numeric = bool(rows) and all(isinstance(row[at], (int, float, type(None))) for row in rows[:100])
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if value is None else _shown(value)) for value in row))
    out.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
