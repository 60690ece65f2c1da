"""A framework's job of which one rank is slow: the report must name that rank and what it is slow in."""

from __future__ import annotations

from pathlib import Path

from compat import child
from compat.environment import Environment, Environments, Unavailable
from compat.row import Row
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.load import load
from lens_auto.report.summary import summarize

TITLE = "Lightning, one rank slow in its dataset or in backward"
# What is slow, on which rank, and the cause that the report has to name.
CASES = (
    ("dataset", 0, "data_loading"),
    ("dataset", 1, "data_loading"),
    ("backward", 0, "backward"),
    ("backward", 1, "backward"),
)
_TIMEOUT_S = 300


def check(environment: Environment, environments: Environments, folder: Path) -> Row:
    """Run each case and read the first line of its report."""
    try:
        prepared = environments.prepare(environment)
    except Unavailable as reason:
        return Row(TITLE, unavailable=str(reason))
    version = f"{prepared.version('lightning')}, torch {prepared.version('torch')}"
    expected, found = [], []
    for what, rank, cause in CASES:
        command = ("opentelemetry-instrument", "python", "{}/lightning_straggler.py", what, str(rank))
        words = [word.format(child.PROGRAMS) for word in command]
        ended = child.run(words, prepared.bin, folder / f"{what}-{rank}", {"NEMO_LENS_QUIET": "1"}, _TIMEOUT_S)
        if ended.problem:
            return Row(TITLE, version, problem=f"{what} on rank {rank}: {ended.problem}")
        expected.append(f"rank {rank}: {cause}")
        found.append(_named(ended.run_dir))
    problem = "" if found == expected else f"the report names {found} instead of {expected}"
    return Row(
        TITLE, version, instrumented="passes", reported="; ".join(expected), found="; ".join(found), problem=problem
    )


def _named(run_dir: Path) -> str:
    """Whom the report of a run holds responsible, and for what."""
    run = RunDirectory(run_dir)
    findings = summarize(run, load(run)).findings
    if not findings:
        return "nobody"
    worst = findings[0]
    who = ", ".join(map(str, worst.ranks)) or "all"
    return f"rank {who}: {worst.cause}" if worst.kind == "straggler" else f"{worst.kind} on {who}: {worst.cause}"
