"""What the report finds in a run directory."""

from __future__ import annotations

from pathlib import Path

from lens_auto.recorder.read import RunDirectory
from lens_auto.report.load import load
from lens_auto.report.match import Matched, attempts, match
from lens_auto.report.summary import Summary, summarize


def summary_of(run_dir: Path) -> Summary:
    run = RunDirectory(run_dir)
    return summarize(run, load(run))


def matched_of(run_dir: Path) -> Matched:
    """Of a run of one attempt."""
    (writers,) = attempts(load(RunDirectory(run_dir)))
    return match(writers)
