"""After a crash: how every rank ended, in which order, and who failed first."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_auto.recorder.hang import iso
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.hang import (
    Analysis,
    RankState,
    after_hang,
    exit_words,
    failed_at,
    failure_words,
    is_consequence,
    judge,
    load_states,
)
from lens_auto.report.words import counted, named

if TYPE_CHECKING:
    from rich.console import Console

POSTMORTEM_FORMAT = "lens-postmortem"
VERSION = 1


@dataclass
class End:
    """How one rank ended.

    Attributes:
        kind: exception, signal, exit (a status other than 0), ok, died (nobody saw how), running, unknown, missing.
        wall_ns: when; of a rank that was killed its last heartbeat, at most a quarter of a second before.
        by_launcher: its launcher ended it, because of another.
        consequence: another had ended before, and this one says so.
    """

    kind: str
    wall_ns: int | None
    exit_code: int | None
    signal: str | None
    exception: str | None
    message: str | None
    by_launcher: bool
    consequence: bool
    words: str


@dataclass
class Postmortem:
    """The whole run's end."""

    analysis: Analysis
    ends: dict[int, End]
    order: list[int]
    first_to_fail: int | None
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """As the object that `lens-auto postmortem --json` prints."""
        found = self.analysis.to_json()
        for each in found["ranks"]:
            end = self.ends[each["rank"]]
            each["end"] = {
                "kind": end.kind,
                "at": None if end.wall_ns is None else iso(end.wall_ns),
                "exit_code": end.exit_code,
                "signal": end.signal,
                "exception": end.exception,
                "message": end.message,
                "by_launcher": end.by_launcher,
                "consequence": end.consequence,
            }
        return {
            **found,
            "format": POSTMORTEM_FORMAT,
            "version": VERSION,
            "verdict": self.verdict,
            "first_to_fail": self.first_to_fail,
            "order": self.order,
        }


def examine(run: RunDirectory | str | Path) -> Postmortem:
    """Tell how all ranks of a run ended.

    Raises:
        UnreadableFile: the path is no run directory.
    """
    opened = run if isinstance(run, RunDirectory) else RunDirectory(run)
    states, world_size, problems = load_states(opened)
    analysis = judge(opened, states, world_size, problems)
    ends = {state.rank: _end(state) for state in states}
    ended = [state for state in states if ends[state.rank].wall_ns is not None]
    ended.sort(key=lambda state: (ends[state.rank].wall_ns or 0, state.rank))
    # Ranks that were killed because they hung did not fail.
    bad = [state for state in ended if not (state.hang is not None and after_hang(state))]
    bad = [state for state in bad if ends[state.rank].kind in ("exception", "signal", "exit", "died")]
    first = min(bad, key=lambda state: (ends[state.rank].consequence, ends[state.rank].wall_ns or 0), default=None)
    found = Postmortem(
        analysis,
        ends,
        [state.rank for state in ended],
        None if first is None else first.rank,
        "",
    )
    found.verdict = _verdict(found, states)
    return found


def _end(state: RankState) -> End:
    code = (state.exit or {}).get("code")
    signal = (state.exit or {}).get("signal") if isinstance(code, int) and code < 0 else None
    failure = state.failure
    by_launcher = bool((state.exit or {}).get("by_launcher"))
    at = failed_at(state)
    if failure is not None:
        kind, words = "exception", failure_words(failure)
    elif signal is not None:
        kind, words = "signal", exit_words(state.exit) + (", sent by its launcher" if by_launcher else "")
    elif isinstance(code, int) and code != 0:
        kind, words = "exit", exit_words(state.exit)
    elif state.state == "closed":
        kind, words, at = "ok", "ended without an error", state.ended_ns
        if at is None and code == 0:
            words, at = "left by os._exit with status 0", state.last_sign_ns
    elif state.state == "died":
        kind, words = "died", "was killed, or left by os._exit: nobody saw how"
    elif state.state == "missing":
        kind, words = "missing", "was never seen"
    else:
        kind, words, at = "running" if state.state in ("running", "frozen") else "unknown", state.state, None
    return End(
        kind,
        at or None,
        code if isinstance(code, int) else None,
        signal,
        None if failure is None else str(failure.get("type")),
        None if failure is None else str(failure.get("message")),
        by_launcher,
        is_consequence(state),
        words,
    )


def _verdict(found: Postmortem, states: list[RankState]) -> str:
    if found.analysis.culprit is not None:
        text = found.analysis.verdict
        culprit = found.ends.get(found.analysis.culprit.rank if found.analysis.culprit.rank is not None else -1)
        first = next((state for state in states if state.rank == found.first_to_fail), None)
        if first is not None and first.rank != found.analysis.culprit.rank:
            text += f"; the first to end was rank {first.rank}: {found.ends[first.rank].words}"
        elif culprit is not None and culprit.kind == "signal":
            text += f"; it ended by {culprit.words}"
        return text
    running = sum(end.kind == "running" for end in found.ends.values())
    if running:
        return (
            f"{running} of {counted(len(states), 'rank')} {'is' if running == 1 else 'are'} running; nothing has failed"
        )
    unseen = [state.rank for state in states if found.ends[state.rank].kind in ("missing", "unknown")]
    if unseen and len(unseen) < len(states):
        return f"how {named(unseen)} ended is not known; all others ended without an error"
    if unseen:
        return f"how {named(unseen)} ended is not known"
    if not states:
        return "no rank recorded anything"
    return f"{'all ranks' if len(states) > 1 else named([states[0].rank])} ended without an error"


# --- for a terminal ---------------------------------------------------------------------------------------------------


def render(found: Postmortem, out: Console) -> None:
    """Print it, the verdict first."""
    from rich.text import Text

    from lens_auto.report.hang import in_words, table

    out.print(Text(found.verdict, style="bold"), soft_wrap=True)
    out.print(Text(f"run {found.analysis.run_id} in {found.analysis.run_dir}", style="dim"), soft_wrap=True)
    out.print()
    rows = table(("rank", "ended", "how", "last iteration", "was in"))
    order = {rank: index for index, rank in enumerate(found.order)}
    for state in sorted(found.analysis.ranks, key=lambda each: (order.get(each.rank, len(order)), each.rank)):
        end = found.ends[state.rank]
        when = "-" if end.wall_ns is None else time.strftime("%H:%M:%S", time.localtime(end.wall_ns // 10**9))
        first = state.rank == found.first_to_fail
        rows.add_row(
            str(state.rank) + (" (first)" if first else ""),
            when,
            Text(end.words, style="red" if first else ""),
            str(state.iteration) if state.phase else "-",
            Text(in_words(state)),
        )
    out.print(rows)
    for problem in found.analysis.problems:
        out.print(Text(problem), soft_wrap=True)
