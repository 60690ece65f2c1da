"""The numbers of the report, from what was loaded; plain values that print as a table or as JSON."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_auto.iteration.bandwidth import Bandwidth, bandwidths
from lens_auto.recorder.layout import Phase
from lens_auto.recorder.read import RunDirectory, Status
from lens_auto.report.goodput import Goodput, goodput, restarts
from lens_auto.report.match import attempts, match
from lens_auto.report.postmortem import examine
from lens_auto.report.services import ProgramSummary, find_programs
from lens_auto.report.verdicts import Analysis, Finding, WhatIf, analyze
from lens_auto.report.words import counted, duration, named, size, three_digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lens_auto.iteration.rule import Int64Array
    from lens_auto.report.load import LoadedWriter, Operations, Position

REPORT_FORMAT = "lens-report"
REPORT_VERSION = 1
# The phases that iterations are made of, in the order in which they come.
PHASES = (
    Phase.DATA_LOADING,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.EVALUATE,
    Phase.CHECKPOINT,
    Phase.OTHER,
)
_MISSING_NAMED = 1000


FAILED = "failed"
_ENDED = ("died", "exception", "exited")  # causes of ranks that wait which are the end of another


@dataclass
class IterationTimes:
    """Iteration times without evaluation and checkpoints, ns. None where there is no iteration."""

    count: int
    median_ns: int | None
    p99_ns: int | None
    total_ns: int  # with evaluation and checkpoints

    @classmethod
    def of(cls, training_ns: Int64Array, total_ns: int) -> IterationTimes:
        """Statistics of some iterations."""
        if not len(training_ns):
            return cls(0, None, None, total_ns)
        return cls(
            len(training_ns),
            round(float(np.median(training_ns))),
            round(float(np.percentile(training_ns, 99))),
            total_ns,
        )


@dataclass
class RankSummary:
    """One writer: a process as a rank."""

    rank: int
    host: str
    pid: int
    state: str  # closed, failed (closed, by an exception or with a status other than 0), running, died, unknown
    phase: str | None  # last seen in; None where it closed
    phase_iteration: int | None
    phase_since_ns: int | None
    in_flight: list[dict[str, Any]]
    iterations: IterationTimes
    phase_share: dict[str, float]  # of the time of its iterations
    records: int
    dropped: int
    unfinished: int  # places in segments that a thread took and never filled
    damaged: int
    mispredicted: int
    hook_faults: int
    hooks_off: dict[str, str]


@dataclass
class OperationSummary:
    """One communication operation over all ranks."""

    operation: str
    count: int
    bytes: int
    median_ns: int | None
    end_unknown: int
    exposed_ns: int | None  # None: device work was enqueued, the host cannot tell
    exposed_share: float | None  # of the time of all iterations of all ranks
    bandwidth: list[Bandwidth]  # by size of the group


@dataclass
class Summary:
    """The whole report."""

    verdict: str
    findings: list[Finding]  # what slows the run down, the most expensive first
    run_dir: str
    run_id: str
    created: str | None
    world_size: int
    missing_count: int
    missing_ranks: list[int]  # the first thousand
    first_to_fail: int | None  # where a rank failed or several died, and it can be told
    first_end: str  # how that one ended, in words
    hang: str  # who waits for whom, where ranks hang or hung until they were ended
    ranks: list[RankSummary]
    iterations: IterationTimes
    phase_share: dict[str, float]
    operations: list[OperationSummary]
    what_if: list[WhatIf]
    comparison: Analysis  # of the ranks with each other
    goodput: Goodput | None
    programs: list[ProgramSummary]  # what processes made with OpenTelemetry themselves
    records: int
    dropped: int
    mispredicted: int
    problems: list[str]

    @property
    def progress(self) -> str:
        """How far the run came, and where its iterations went."""
        return "; ".join(part for part in _progress_parts(self) if part)

    def to_json(self) -> dict[str, Any]:
        """As the object that `lens-auto report --json` prints."""
        found = dataclasses.asdict(self)
        for once in ("findings", "what_if"):
            del found["comparison"][once]
        return {"format": REPORT_FORMAT, "version": REPORT_VERSION, **found}


def summarize(run: RunDirectory, loaded: Sequence[LoadedWriter], problems: Iterable[str] = ()) -> Summary:
    """Compute the report of a run.

    Args:
        run: the run directory.
        loaded: its writers, read.
        problems: what went wrong before, one line each.
    """
    ranks = [_rank(each) for each in loaded]
    training_ns = _joined([each.iterations.training_ns for each in loaded])
    total_ns = sum(rank.iterations.total_ns for rank in ranks)
    world_size = max((each.writer.info.world_size for each in loaded), default=0)
    seen = {rank.rank for rank in ranks}
    missing_count = world_size - len({rank for rank in seen if 0 <= rank < world_size})
    missing: list[int] = []
    for rank in range(world_size):
        if len(missing) == min(missing_count, _MISSING_NAMED):
            break
        if rank not in seen:
            missing.append(rank)
    tries = attempts(loaded)
    analysis = _compare(tries)
    spent = goodput(tries)
    again = restarts(spent)
    found = [*analysis.findings, *([again] if again is not None else [])]
    first, first_end, hang = _ends(run, ranks)
    lost = filter(None, (each.writer.lost(each.records, each.holes, each.damaged) for each in loaded))
    summary = Summary(
        verdict="",
        findings=sorted(found, key=lambda each: -each.effect),
        run_dir=str(run.path),
        run_id=run.run_id,
        created=run.manifest.get("created") if isinstance(run.manifest.get("created"), str) else None,
        world_size=world_size,
        missing_count=missing_count,
        missing_ranks=missing,
        first_to_fail=first,
        first_end=first_end,
        hang=hang,
        ranks=ranks,
        iterations=IterationTimes.of(training_ns, total_ns),
        phase_share=_shares(sum((each.iterations.phase_ns.sum(axis=0) for each in loaded), np.zeros(len(Phase)))),
        operations=_operations(
            [operations for each in loaded for operations in each.operations], total_ns, _bandwidths(tries)
        ),
        what_if=analysis.what_if,
        comparison=analysis,
        goodput=spent,
        programs=find_programs(run),
        records=sum(rank.records for rank in ranks),
        dropped=sum(rank.dropped for rank in ranks),
        mispredicted=sum(rank.mispredicted for rank in ranks),
        problems=[*problems, *(str(problem) for problem in run.problems), *lost],
    )
    summary.verdict = verdict(summary)
    return summary


def _ends(run: RunDirectory, ranks: Sequence[RankSummary]) -> tuple[int | None, str, str]:
    """Which rank pulled the others down, how it ended, and who hangs; ranks that closed and failed get that state."""
    if not ranks or not isinstance(run, RunDirectory):
        return None, "", ""
    found = examine(run)
    seen = {(state.rank, state.pid): found.ends[state.rank] for state in found.analysis.ranks}
    for each in ranks:
        end = seen.get((each.rank, each.pid))
        if each.state == Status.CLOSED.value and end is not None and end.kind in ("exception", "exit", "signal"):
            each.state = FAILED
    bad = [rank for rank in ranks if rank.state in (Status.DIED.value, FAILED)]
    first = found.first_to_fail if len(bad) > 1 or any(rank.state == FAILED for rank in bad) else None
    culprit = found.analysis.culprit
    hangs = any(state.hang is not None or state.state == Status.RUNNING.value for state in found.analysis.ranks)
    hang = found.analysis.verdict if hangs and culprit is not None and culprit.cause not in _ENDED else ""
    return first, "" if first is None else found.ends[first].words, hang


def _compare(tries: list[list[LoadedWriter]]) -> Analysis:
    """Compare the ranks of the attempt that says most: the one with the longest time of compared iterations."""
    analyses = [analyze(match(writers)) for writers in tries]
    if not analyses:
        return Analysis()
    chosen = max(range(len(analyses)), key=lambda at: analyses[at].span_ns)
    analysis = analyses[chosen]
    if len(analyses) > 1:
        analysis.notes.append(f"the ranks are compared in attempt {chosen + 1} of {len(analyses)}, the longest")
    return analysis


def _joined(parts: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _shares(phase_ns: Any) -> dict[str, float]:
    total = float(np.sum(phase_ns))
    return {phase.name.lower(): float(phase_ns[phase]) / total if total > 0 else 0.0 for phase in PHASES}


def _rank(loaded: LoadedWriter) -> RankSummary:
    info, iterations, position = loaded.writer.info, loaded.iterations, loaded.position
    return RankSummary(
        rank=info.rank,
        host=info.host,
        pid=info.pid,
        state=loaded.writer.status.value,
        phase=None if position is None else position.phase.name.lower(),
        phase_iteration=None if position is None else position.iteration,
        phase_since_ns=None if position is None else position.since_ns,
        in_flight=[] if position is None else _in_flight(position),
        iterations=IterationTimes.of(iterations.training_ns, int(iterations.duration_ns.sum())),
        phase_share=_shares(iterations.phase_ns.sum(axis=0)),
        records=loaded.records,
        dropped=loaded.writer.dropped,
        # A place that a running writer has taken is being filled.
        unfinished=0 if loaded.writer.status is Status.RUNNING else loaded.holes,
        damaged=loaded.damaged,
        mispredicted=iterations.mispredicted,
        hook_faults=info.hook_faults,
        hooks_off=info.hooks_off,
    )


def _in_flight(position: Position) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in position.in_flight]


def _bandwidths(tries: list[list[LoadedWriter]]) -> list[Bandwidth]:
    """Of the attempt that has the most of it."""
    found = [
        bandwidths([each.transfers for each in writers], [each.writer.string for each in writers]) for writers in tries
    ]
    return max(found, key=lambda each: sum(one.count for one in each), default=[])


def _operations(
    all_operations: Sequence[Operations], total_ns: int, bandwidth: Sequence[Bandwidth]
) -> list[OperationSummary]:
    by_name: dict[str, list[Operations]] = defaultdict(list)
    for operations in all_operations:
        by_name[operations.name].append(operations)
    found = []
    for name, parts in by_name.items():
        durations = _joined([part.duration_ns for part in parts])
        known = all(not part.exposed_unknown for part in parts)
        exposed_ns = sum(part.exposed_ns for part in parts)
        found.append(
            OperationSummary(
                operation=name,
                count=sum(part.count for part in parts),
                bytes=sum(part.bytes for part in parts),
                median_ns=round(float(np.median(durations))) if len(durations) else None,
                end_unknown=sum(part.end_unknown for part in parts),
                exposed_ns=exposed_ns if known else None,
                exposed_share=exposed_ns / total_ns if known and total_ns > 0 else None,
                bandwidth=[each for each in bandwidth if each.operation == name],
            )
        )
    return sorted(found, key=lambda each: (-(each.exposed_ns or 0), -each.count, each.operation))


# --- one line first ---------------------------------------------------------------------------------------------------


def verdict(summary: Summary) -> str:
    """What a person should know before anything else, in one line."""
    parts = _troubles(summary)
    if summary.findings:
        worst = summary.findings[0]
        return "; ".join([*parts, worst.headline, f"try: {worst.advice}"])
    return "; ".join(part for part in [*parts, *_progress_parts(summary)] if part)


def _progress_parts(summary: Summary) -> list[str]:
    parts = [_progress(summary)]
    times = summary.iterations
    if times.median_ns is not None and times.p99_ns is not None:
        parts.append(f"median {duration(times.median_ns)}, p99 {duration(times.p99_ns)}")
        largest = sorted(summary.phase_share.items(), key=lambda item: -item[1])[:3]
        parts.append(", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005))
    exposed = sum(each.exposed_share or 0.0 for each in summary.operations)
    if exposed >= 0.005:
        parts.append(f"communication exposed {exposed:.0%}")
    return parts


def _troubles(summary: Summary) -> list[str]:
    found = []
    died = [rank for rank in summary.ranks if rank.state == Status.DIED.value]
    failed = [rank.rank for rank in summary.ranks if rank.state == FAILED]
    if summary.first_to_fail in failed:
        found.append(f"rank {summary.first_to_fail} failed: {summary.first_end}")
    if summary.hang:
        if died:
            found.append(f"{named([rank.rank for rank in died])} died")
        found.append(summary.hang)
    elif len(died) == 1 or (died and len({_place(rank) for rank in died}) == 1):
        found.append(f"{named([rank.rank for rank in died])} died in {_place(died[0])}")
    elif died:
        first = next((rank for rank in died if rank.rank == summary.first_to_fail), died[0])
        found.append(f"{named([rank.rank for rank in died])} died, rank {first.rank} in {_place(first)}")
    if summary.first_to_fail is not None and summary.first_to_fail not in failed:
        found.append(f"the first to fail was rank {summary.first_to_fail}: {summary.first_end}")
    if summary.missing_count:
        more = "" if len(summary.missing_ranks) == summary.missing_count else " and more"
        found.append(f"{named(summary.missing_ranks)}{more} missing of {summary.world_size}")
    if summary.dropped:
        found.append(f"{counted(summary.dropped, 'record')} dropped")
    unsent = sum(each.unsent for each in summary.programs)
    if unsent:
        found.append(f"{counted(unsent, 'span')} of programs not sent")
    return found


def _place(rank: RankSummary) -> str:
    """Where a rank was last seen, as `all_reduce in backward of iteration 41`."""
    if rank.phase is None:
        return "an unknown place"
    where = f"{rank.phase} of iteration {rank.phase_iteration}"
    if rank.phase == Phase.START_UP.name.lower():
        where = "start-up"
    operations = ", ".join(str(each["operation"]) for each in rank.in_flight)
    return f"{operations} in {where}" if operations else where


def _progress(summary: Summary) -> str:
    counts = {rank.iterations.count for rank in summary.ranks}
    if not summary.ranks:
        services = [each for each in summary.programs if each.rank is None]
        if not services:
            return "no rank recorded anything"
        spans = sum(each.spans for each in services)
        return f"no rank; {counted(len(services), 'service')} made {counted(spans, 'span')}"
    least, most = min(counts), max(counts)
    iterations = counted(most, "iteration") if least == most else f"{least:,} to {counted(most, 'iteration')}"
    ranks = counted(len({rank.rank for rank in summary.ranks}), "rank")
    running = any(rank.state == Status.RUNNING.value for rank in summary.ranks)
    text = f"{iterations} on {ranks}"
    return f"running: {text} so far" if running else text


__all__ = [
    "PHASES",
    "IterationTimes",
    "OperationSummary",
    "RankSummary",
    "Summary",
    "duration",
    "named",
    "size",
    "summarize",
    "three_digits",
    "verdict",
]
