"""What every rank of a job is in, from the live files alone: while it trains, while it hangs, and after it died."""

from __future__ import annotations

import dataclasses
import datetime
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lens_auto.recorder.layout import Phase
from lens_auto.recorder.read import RunDirectory, Status
from lens_auto.report.load import position_of
from lens_auto.report.words import duration, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult

    from lens_auto.recorder.read import WriterFiles

TOP_FORMAT = "lens-top"
TOP_VERSION = 1

# A phase or an operation that lasts this many iterations of its rank is shown as slow; without a pace, this long.
_SLOW_ITERATIONS = 5
_SLOW_NS = 30_000_000_000
_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("rank", "right"),
    ("state", "left"),
    ("iteration", "right"),
    ("it/s", "right"),
    ("phase", "left"),
    ("for", "right"),
    ("operation", "left"),
    ("for", "right"),
    ("sign of life", "right"),
    ("process", "left"),
)
_STYLES = {Status.DIED.value: "bold red", Status.RUNNING.value: "green", Status.UNKNOWN.value: "yellow"}


@dataclass
class RankNow:
    """What one rank is in; of one that does not run, what it was last seen in.

    Attributes:
        rank: its global rank.
        host: where it runs.
        pid: its process.
        state: closed, running, died, unknown.
        phase: what its training thread is in.
        iteration: the number of its iteration, as predicted while it runs.
        phase_for_ns: for how long it has been in that phase.
        operation: the longest operation in flight; None: none.
        group: its process group.
        seq: its sequence number.
        peer: the rank at its other end.
        operation_for_ns: for how long it has been in flight.
        others: how many more operations are in flight, in other threads.
        iterations_per_s: pace since the last look; None where there was none yet, or it does not run.
        steps: optimizer steps so far.
        records: records so far.
        dropped: records that were dropped.
        heartbeat_age_ns: how long ago it showed a sign of life; None where its host's clock cannot be asked.
    """

    rank: int
    host: str
    pid: int
    state: str
    phase: str | None
    iteration: int | None
    phase_for_ns: int | None
    operation: str | None
    group: str | None
    seq: int | None
    peer: int | None
    operation_for_ns: int | None
    others: int
    iterations_per_s: float | None
    steps: int
    records: int
    dropped: int
    heartbeat_age_ns: int | None


@dataclass
class Look:
    """All ranks at one moment."""

    run_dir: str
    run_id: str
    at: str
    world_size: int
    ranks: list[RankNow]
    problems: list[str]

    def to_json(self) -> dict[str, Any]:
        """As the object that `lens-auto top --json` prints."""
        return {"format": TOP_FORMAT, "version": TOP_VERSION, **dataclasses.asdict(self)}

    @property
    def running(self) -> bool:
        """Whether any rank runs."""
        return any(each.state == Status.RUNNING.value for each in self.ranks)


class Watch:
    """Looks at a run again and again; the pace of a rank is told from two looks."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = run_dir
        self._before: dict[str, tuple[int, int]] = {}

    def look(self) -> Look:
        """Read every live file now."""
        run = RunDirectory(self._run_dir)
        ranks = [self._rank(writer) for writer in run.writers]
        # Of a rank that was started again its latest life is what counts.
        latest = {each.rank: each for each in ranks}
        return Look(
            run_dir=str(run.path),
            run_id=run.run_id,
            at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
            world_size=max((writer.info.world_size for writer in run.writers), default=0),
            ranks=[latest[rank] for rank in sorted(latest)],
            problems=[str(problem) for problem in run.problems],
        )

    def _rank(self, writer: WriterFiles) -> RankNow:
        live, info = writer.live, writer.info
        position = position_of(writer)
        first = position.in_flight[0] if position is not None and position.in_flight else None
        running = writer.status is Status.RUNNING
        return RankNow(
            rank=info.rank,
            host=info.host,
            pid=info.pid,
            state=writer.status.value,
            phase=None if position is None else position.phase.name.lower(),
            iteration=None if live is None else live.phase.iteration,
            phase_for_ns=None if position is None else position.since_ns,
            operation=None if first is None else first.operation,
            group=None if first is None else first.group,
            seq=None if first is None else first.seq,
            peer=None if first is None else first.peer,
            operation_for_ns=None if first is None else first.since_ns,
            others=0 if position is None else max(0, len(position.in_flight) - 1),
            iterations_per_s=self._pace(writer.name, live.phase.iteration) if running and live is not None else None,
            steps=0 if live is None else live.phase.steps,
            records=0 if live is None else live.records,
            dropped=writer.dropped,
            heartbeat_age_ns=max(0, time.monotonic_ns() - live.heartbeat_ns) if running and live is not None else None,
        )

    def _pace(self, name: str, iteration: int) -> float | None:
        now_ns = time.monotonic_ns()
        before = self._before.get(name)
        self._before[name] = (now_ns, iteration)
        if before is None or now_ns <= before[0]:
            return None
        return max(0.0, (iteration - before[1]) * 1e9 / (now_ns - before[0]))


def looks(run_dir: str | Path, interval_s: float, count: int | None) -> Iterator[Look]:
    """Look at a run again and again, each time after an interval.

    Args:
        run_dir: the run directory.
        interval_s: pause between two looks.
        count: how often; None: for ever. The first has had another before it, so that it knows the ranks' pace.
    """
    watch = Watch(run_dir)
    if watch.look().running:
        time.sleep(interval_s)
    done = 0
    while count is None or done < count:
        yield watch.look()
        done += 1
        if count is None or done < count:
            time.sleep(interval_s)


# --- on a terminal ----------------------------------------------------------------------------------------------------


def show(run_dir: str | Path, interval_s: float, count: int | None, out: Console, rows: Callable[[], int]) -> None:
    """Show a run until the user interrupts.

    Args:
        run_dir: the run directory.
        interval_s: pause between two looks.
        count: how often to look; None: for ever.
        out: where; a terminal is redrawn, elsewhere one look is printed after the other.
        rows: how many lines there are now.
    """
    if not out.is_terminal:
        for look in looks(run_dir, interval_s, count):
            out.print(table_of(look, 1 << 20))
        return
    from rich.live import Live

    with Live(console=out, auto_refresh=False, screen=count is None) as live:
        try:
            for look in looks(run_dir, interval_s, count):
                live.update(table_of(look, max(1, rows() - 5)), refresh=True)
        except KeyboardInterrupt:
            pass


def table_of(look: Look, most: int) -> RenderableType:
    """One look as a table; beyond `most` ranks those that are furthest behind or longest in something come first."""
    shown = look.ranks
    if len(shown) > most:
        shown = sorted(shown, key=lambda each: (each.iteration or 0, -(each.phase_for_ns or 0)))[:most]
    lines: list[RenderableType] = [Text(headline(look), style="bold"), _Ranks(shown)]
    if len(shown) < len(look.ranks):
        lines.append(Text(f"{len(look.ranks) - len(shown)} more ranks", style="dim"))
    return Group(*lines)


class _Ranks:
    """The table of ranks. Where it is wider than the terminal, what tells least about progress is left out."""

    def __init__(self, ranks: list[RankNow]) -> None:
        self._ranks = ranks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for left_out in (0, 1, 2):  # of the last columns
            table = self._table(left_out)
            if console.measure(table, options=options.update(width=1 << 16)).maximum <= options.max_width:
                break
        yield table

    def _table(self, left_out: int) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        columns = _COLUMNS[: len(_COLUMNS) - left_out]
        for name, justify in columns:
            table.add_column(name, justify=justify, overflow="fold")
        for each in self._ranks:
            table.add_row(*_cells(each)[: len(columns)])
        return table


def _cells(each: RankNow) -> list[Text]:
    """One rank, by column."""
    slow = _is_slow(each)
    return [
        Text(str(each.rank) if each.rank >= 0 else "?"),
        Text(each.state, style=_STYLES.get(each.state, "")),
        Text("-" if each.iteration is None else f"{each.iteration:,}"),
        Text("-" if each.iterations_per_s is None else f"{each.iterations_per_s:.1f}"),
        Text("-" if each.phase is None else each.phase),
        Text("-" if each.phase_for_ns is None else duration(each.phase_for_ns), style="yellow" if slow else ""),
        Text(_operation(each)),
        Text("-" if each.operation_for_ns is None else duration(each.operation_for_ns), style="red" if slow else ""),
        Text("-" if each.heartbeat_age_ns is None else f"{duration(each.heartbeat_age_ns)} ago"),
        Text(f"{each.pid} on {each.host}"),
    ]


def headline(look: Look) -> str:
    """Who runs, how fast, and who is behind."""
    by_state: dict[str, list[int]] = {}
    for each in look.ranks:
        by_state.setdefault(each.state, []).append(each.rank)
    states = ", ".join(f"{len(ranks)} {state}" for state, ranks in sorted(by_state.items()))
    parts = [f"run {look.run_id}: {states or 'no rank'} of {look.world_size}"]
    died = by_state.get(Status.DIED.value)
    if died:
        parts.append(f"{named(died)} died")
    active = [each for each in look.ranks if each.state == Status.RUNNING.value and each.iteration is not None]
    if active:
        numbers = [each.iteration or 0 for each in active]
        least = min(numbers)
        parts.append(f"iteration {least:,}" if least == max(numbers) else f"iterations {least:,} to {max(numbers):,}")
        if max(numbers) - least > 1:
            parts.append(f"{named([each.rank for each in active if each.iteration == least])} behind")
        paces = [each.iterations_per_s for each in active if each.iterations_per_s is not None]
        if paces:
            parts.append(f"{sum(paces) / len(paces):.1f} iterations/s")
    return "; ".join(parts)


def _operation(each: RankNow) -> str:
    if each.operation is None:
        return "-"
    text = each.operation
    if each.seq is not None:
        text += f" #{each.seq}"
    if each.group:
        text += f" on group {each.group}"
    if each.peer is not None:
        text += f" with rank {each.peer}"
    return text + (f", and {each.others} more" if each.others else "")


def _is_slow(each: RankNow) -> bool:
    longest = max(each.phase_for_ns or 0, each.operation_for_ns or 0)
    if each.phase in (None, Phase.START_UP.name.lower()) or each.state != Status.RUNNING.value:
        return False
    if each.iterations_per_s:
        return longest > _SLOW_ITERATIONS * 1e9 / each.iterations_per_s
    return longest > _SLOW_NS
