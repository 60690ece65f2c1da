"""Two runs side by side: what became slower, where, and whether it is more than the noise.

A run's iteration is taken apart into what all ranks have alike (each phase of the median rank, communication) and what
the slowest rank adds (waiting for it, by rank and phase). Every part has a difference and a 95 % interval over
iterations; only what exceeds it, and 2 % of the iteration, counts as a change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_auto.recorder.layout import Phase
from lens_auto.report import statistics
from lens_auto.report.match import attempts, match
from lens_auto.report.verdicts import MIN_ITERATIONS, Analysis, Judge, analyze, phase_name, without_warm_up
from lens_auto.report.words import counted, duration, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_auto.report.load import LoadedWriter
    from lens_auto.report.statistics import Float64Array

COMPARE_FORMAT = "lens-compare"
COMPARE_VERSION = 1
MIN_CHANGE = 0.02  # of the first run's iteration

LATE = "waiting for the slowest rank"
COMMUNICATION = "communication"
NOT_SEEN = "not seen"


@dataclass
class Part:
    """One part of an iteration in both runs, ns of an iteration."""

    part: str
    a_ns: float
    b_ns: float
    change_ns: float
    interval_ns: tuple[float, float]
    significant: bool


@dataclass
class Run:
    """One of the two runs."""

    run_id: str
    run_dir: str
    ranks: int
    iterations: int
    iteration_ns: float
    findings: list[str]


@dataclass
class Comparison:
    """What changed from a to b.

    Attributes:
        verdict: one line.
        a: the run that b is compared with.
        b: the run that is looked at.
        iteration: the whole iteration, without saving and evaluating.
        change: by how much b's iteration is longer, as a share of a's.
        interval: its 95 % interval.
        significant: whether it is more than the noise within the runs.
        parts: what iterations consist of, the largest change first.
        by_rank: the ranks' own work, by rank and phase, where it changed.
        notes: what could not be compared.
    """

    verdict: str
    a: Run
    b: Run
    iteration: Part
    change: float
    interval: tuple[float, float]
    significant: bool
    parts: list[Part]
    by_rank: list[Part]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As the object that `lens-auto compare --json` prints."""
        return {"format": COMPARE_FORMAT, "version": COMPARE_VERSION, **dataclasses.asdict(self)}


class TooShort(ValueError):
    """A run that has too few iterations to be compared; the message is one line."""


@dataclass
class _Taken:
    """A run taken apart: ns of each iteration."""

    analysis: Analysis
    length_ns: Float64Array
    parts: dict[str, Float64Array]
    by_rank: dict[str, Float64Array]
    ranks: int


def compare(a: tuple[str, str, Sequence[LoadedWriter]], b: tuple[str, str, Sequence[LoadedWriter]]) -> Comparison:
    """Compare two runs, each given as its id, its directory and its writers.

    Raises:
        TooShort: one of them has too few iterations.
    """
    taken = [_take_apart(run_dir, writers) for _, run_dir, writers in (a, b)]
    first, second = taken
    scale = float(first.length_ns.mean())
    whole = _part("iteration", first.length_ns, second.length_ns, scale)
    names = list(dict.fromkeys([*first.parts, *second.parts]))
    parts = [_part(name, *_both(name, first.parts, second.parts, taken), scale) for name in names]
    parts = [each for each in parts if max(each.a_ns, each.b_ns) > 0]
    notes = []
    by_rank = []
    if first.ranks != second.ranks:
        notes.append(f"a has {counted(first.ranks, 'rank')}, b has {second.ranks}: ranks are not compared one by one")
    else:
        names = list(dict.fromkeys([*first.by_rank, *second.by_rank]))
        by_rank = [_part(name, *_both(name, first.by_rank, second.by_rank, taken), scale) for name in names]
        by_rank = sorted((each for each in by_rank if each.significant), key=lambda each: -abs(each.change_ns))
    if {*first.analysis.arrival} != {*second.analysis.arrival}:
        notes.append("the ranks' arrivals are known in different ways in the two runs: parts may have moved")
    runs = [
        Run(
            run_id=run_id,
            run_dir=run_dir,
            ranks=each.ranks,
            iterations=each.analysis.iterations,
            iteration_ns=float(each.length_ns.mean()),
            findings=[finding.headline for finding in each.analysis.findings],
        )
        for (run_id, run_dir, _), each in zip((a, b), taken, strict=True)
    ]
    interval = (whole.interval_ns[0] / scale, whole.interval_ns[1] / scale)
    found = Comparison(
        verdict="",
        a=runs[0],
        b=runs[1],
        iteration=whole,
        change=whole.change_ns / scale,
        interval=interval,
        significant=whole.significant,
        parts=sorted(parts, key=lambda each: -abs(each.change_ns)),
        by_rank=by_rank,
        notes=notes,
    )
    found.verdict = _verdict(found)
    return found


def _take_apart(run_dir: str, writers: Sequence[LoadedWriter]) -> _Taken:
    candidates = [(match(attempt)) for attempt in attempts(writers)]
    matched = max(candidates, key=lambda each: float(each.span_ns.sum()), default=None)
    if matched is None or len(matched.iteration) < MIN_ITERATIONS:
        count = 0 if matched is None else len(matched.iteration)
        raise TooShort(
            f"{run_dir}: {counted(count, 'iteration')} to compare; at least {MIN_ITERATIONS} are needed; nothing is"
            " compared"
        )
    analysis = analyze(matched)
    matched = without_warm_up(matched)[0]
    judge = Judge(matched)
    apart = judge.apart_ns()
    parts: dict[str, Float64Array] = {}
    for phase in Phase:
        if phase not in (Phase.CHECKPOINT, Phase.EVALUATE):
            parts[phase_name(phase)] = judge.common(phase)
    parts[COMMUNICATION] = judge.exposed_ns()
    parts[NOT_SEEN] = judge.held_ns()
    length = matched.span_ns - apart
    # All ranks leave an operation together: what is left is how much later the slowest comes than the median one.
    parts[LATE] = np.maximum(length - sum(parts.values(), np.zeros(len(length))), 0)
    by_rank = {
        f"{phase_name(phase)} on rank {rank}": matched.by_iteration(judge.own[:, column, phase])
        for column, rank in enumerate(judge.ranks)
        for phase in Phase
        if judge.own[:, column, phase].any()
    }
    return _Taken(analysis, length, parts, by_rank, len(judge.ranks))


def _both(
    name: str, first: dict[str, Float64Array], second: dict[str, Float64Array], taken: Sequence[_Taken]
) -> tuple[Float64Array, Float64Array]:
    nothing = [np.zeros(len(each.length_ns)) for each in taken]
    return first.get(name, nothing[0]), second.get(name, nothing[1])


def _part(name: str, a_ns: Float64Array, b_ns: Float64Array, scale_ns: float) -> Part:
    change = statistics.difference(b_ns, a_ns)
    significant = (change.low > 0 or change.high < 0) and abs(change.value) >= MIN_CHANGE * scale_ns
    return Part(
        name, float(a_ns.mean()), float(b_ns.mean()), change.value, (change.low, change.high), bool(significant)
    )


def _verdict(found: Comparison) -> str:
    whole = found.iteration
    low, high = found.interval
    times = f"{duration(whole.a_ns)} to {duration(whole.b_ns)}"
    interval = f"95 % interval {100 * low:+.0f} to {100 * high:+.0f} %"
    changed = [each for each in found.parts if each.significant]
    if not found.significant:
        text = f"no more than noise: an iteration went from {times} ({found.change:+.1%}, {interval})"
        return text + ("; but " + _list(changed[:3]) if changed else "")
    direction = "slower" if found.change > 0 else "faster"
    text = f"b is {percent(abs(found.change))} {direction} than a: an iteration went from {times} ({interval})"
    same = [each for each in changed if (each.change_ns > 0) == (whole.change_ns > 0)]
    if same:
        text += f"; {_list(same[:3])}"
    ranks = [each for each in found.by_rank if (each.change_ns > 0) == (whole.change_ns > 0)]
    if same and same[0].part == LATE and ranks:
        text += f"; above all {ranks[0].part} ({duration(ranks[0].a_ns)} to {duration(ranks[0].b_ns)})"
    return text


def _list(parts: Sequence[Part]) -> str:
    return ", ".join(
        f"{each.part} {'+' if each.change_ns > 0 else '-'}{duration(abs(each.change_ns))}" for each in parts
    )


def render(found: Comparison, out: Any) -> None:
    """Print a comparison, the verdict first."""
    from rich.table import Table
    from rich.text import Text

    out.print(Text(found.verdict, style="bold"), soft_wrap=True)
    for name, run in (("a", found.a), ("b", found.b)):
        compared = f"{counted(run.iterations, 'iteration')} on {counted(run.ranks, 'rank')} compared"
        out.print(Text(f"{name}: run {run.run_id} in {run.run_dir}, {compared}", style="dim"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("part of an iteration")
    for column in ("a", "b", "change", "95 % interval"):
        table.add_column(column, justify="right")
    table.add_column("")
    for each in (found.iteration, *found.parts, *found.by_rank):
        low, high = each.interval_ns
        table.add_row(
            each.part,
            duration(each.a_ns),
            duration(each.b_ns),
            _signed(each.change_ns),
            f"{_signed(low)} to {_signed(high)}",
            Text("changed" if each.significant else "", style="yellow"),
            style="bold" if each is found.iteration else "",
        )
    out.print()
    out.print(table)
    out.print()
    for note in (
        *found.notes,
        "the intervals are about the noise within each run; two runs of the same program on a shared machine may differ"
        " by more",
    ):
        out.print(Text(note), soft_wrap=True)


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"
