"""Merge the parts of one run that nodes without a common file system hold."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from lens_auto.recorder import rundir, spool
from lens_auto.recorder.layout import MANIFEST_NAME, RANKS_DIR, WRITER_NAME
from lens_auto.recorder.read import RunDirectory


class NotOneRun(ValueError):
    """The parts belong to different runs."""


def collect(parts: list[Path], target: Path) -> tuple[int, int, list[str]]:
    """Copy all writers of the parts into one run directory.

    Args:
        parts: run directories of one run.
        target: the merged one; made where it does not exist, completed where it holds the same run.

    Returns:
        How many writers were copied or brought up to date, how many were there already, and what could not be read.

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
        if run.path.is_dir() and merged.samefile(run.path):
            there += len(run.writers)
            continue
        for writer in run.writers:
            # The run directory's files last: where both have one, it is the complete one.
            changed = sum(_copy(folder, merged / RANKS_DIR / writer.name) for folder in writer.folders)
            copied, there = copied + (changed > 0), there + (changed == 0)
        _copy_beside(run.path, merged)
    return copied, there, [str(problem) for run in runs for problem in run.problems]


def _copy(source: Path, target: Path) -> int:
    """Copy the files of a folder that the other lacks or has in an older state; how many. What else is there stays."""
    spool.private_folder(str(target))
    with contextlib.suppress(FileNotFoundError):
        # Who a writer is comes last: a reader of the merged run sees it with its files, or not at all.
        entries = sorted(os.scandir(source), key=lambda entry: (entry.name == WRITER_NAME, entry.name))
        return sum(_copy_file(entry, target / entry.name) for entry in entries)
    return 0


def _copy_file(entry: os.DirEntry[str], target: Path) -> bool:
    if not entry.is_file(follow_symlinks=False) or entry.name.endswith(".tmp"):
        return False
    with contextlib.suppress(FileNotFoundError):
        found, have = entry.stat(follow_symlinks=False), target.stat()
        if (found.st_size, found.st_mtime_ns) == (have.st_size, have.st_mtime_ns):
            return False
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copy2(entry.path, draft, follow_symlinks=False)
        os.replace(draft, target)
    except FileNotFoundError:  # it moved to the run directory meanwhile
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    return True


def _copy_beside(part: Path, merged: Path) -> None:
    """Logs, span files of services and the like; a name that another part has too keeps both."""
    for path in sorted(part.rglob("*")):
        relative = path.relative_to(part)
        if relative.parts[0] in (RANKS_DIR, MANIFEST_NAME) or not path.is_file() or path.is_symlink():
            continue
        target = merged / relative
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(2, 1000):
            if not target.exists():
                shutil.copy2(path, target)
                break
            if target.read_bytes() == path.read_bytes():
                break
            target = merged / relative.with_name(f"{relative.stem}-{number}{relative.suffix}")
