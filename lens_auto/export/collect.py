"""Merge the parts of one run that nodes without a common file system hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lens_auto.recorder import rundir, spool
from lens_auto.recorder.layout import RANKS_DIR, WRITER_NAME
from lens_auto.recorder.read import RunDirectory


class NotOneRun(ValueError):
    """The parts belong to different runs."""


def collect(parts: list[Path], target: Path) -> tuple[int, int]:
    """Copy all writers of the parts into one run directory.

    Args:
        parts: run directories of one run.
        target: the merged one; made where it does not exist, completed where it holds the same run.

    Returns:
        How many writers were copied, and how many were there already.

    Raises:
        NotOneRun: the parts, or what the target holds, are of different runs.
        UnreadableFile: a part is no run directory.
        OSError: the target cannot be written.
    """
    runs = [RunDirectory(part) for part in parts]
    ids = {run.run_id: run.path for run in runs}
    if len(ids) != 1:
        found = ", ".join(f"{path} holds {run_id}" for run_id, path in ids.items())
        raise NotOneRun(f"the parts are of different runs: {found}")
    run_id = runs[0].run_id
    manifest = rundir.manifest_of(str(target))
    if manifest is not None and manifest.get("run_id") != run_id:
        raise NotOneRun(f"{target} holds the run {manifest.get('run_id')}, the parts are of {run_id}")
    merged = Path(rundir.claim(os.path.abspath(target), run_id))
    copied = there = 0
    for run in runs:
        for writer in run.writers:
            goal = merged / RANKS_DIR / writer.name
            if (goal / WRITER_NAME).exists():
                there += 1
                continue
            draft = merged / RANKS_DIR / f".{writer.name}.{os.getpid()}"
            spool.private_folder(str(draft))
            for folder in reversed(writer.folders):
                for entry in os.scandir(folder):
                    if entry.is_file(follow_symlinks=False) and not entry.name.endswith(".tmp"):
                        shutil.copyfile(entry.path, draft / entry.name, follow_symlinks=False)
            os.rename(draft, goal)
            copied += 1
    return copied, there
