"""What is left to send of a run."""

from __future__ import annotations

import os
from pathlib import Path

from lens_auto.export.lane import OtherRanks, Progress
from lens_auto.export.stream import next_part
from lens_auto.recorder.read import RunDirectory, WriterFiles


def kept_spans(run_dir: str | Path, exporter: str = "otlp") -> int:
    """How many spans are still to be made for an exporter from what a run holds: records not sent, and not lost.

    Ranks that the export strategy leaves out do not count. Of a running rank, what it has recorded so far counts.

    Args:
        run_dir: the run directory, or the spool's folder of a run.
        exporter: its name, as `OTEL_TRACES_EXPORTER` has it.

    Raises:
        UnreadableFile: the path is no run directory.
    """
    run = RunDirectory(run_dir)
    return sum(_kept(writer, exporter) for writer in run.writers if writer.info.raw.get("exports") is not False)


def _kept(writer: WriterFiles, exporter: str) -> int:
    progress = Progress(progress_folder(writer, exporter), exporter)
    others = OtherRanks(lambda rank: True)
    position, cut, done = progress.position, progress.cut, progress.sent_of_part
    count = 0
    while not progress.finished:
        part = next_part(writer, position, others, True, cut)
        if part is None:
            break
        count += part.count - done
        if part.cut.last:
            break
        position, cut, done = part.after, None, 0
    return count


def progress_folder(writer: WriterFiles, exporter: str = "") -> str:
    """Where progress with a writer that writes no more is kept: beside its segments, in the run directory if it can be.

    Args:
        writer: its files.
        exporter: a folder that holds the progress of this one is preferred.
    """
    for folder in reversed(writer.folders):
        if os.path.exists(folder / f"export-{exporter}.json"):
            return str(folder)
    return str(writer.folders[-1])
