"""How ranks ended, as the process that started them saw it: exit codes and signals, which no rank can write itself.

`ranks/<writer>/exit.json` in the run directory (in the spool where that is not known) for a process that recorded;
`exits-<host>-<pid>.json` in the run directory, by launcher, for all that it started, also those that never became one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import socket
import time
from typing import Any

from lens_auto.recorder import finish, rundir, spool
from lens_auto.recorder.layout import EXIT_NAME, RANKS_DIR

EXIT_FORMAT = "lens-exit"
EXITS_FORMAT = "lens-exits"
VERSION = 1
_MAX_SUFFIX = 20

_seen: dict[int, dict[str, Any]] = {}  # by process id


def describe(pid: int, code: int, rank: int | None, by_launcher: bool, message: str = "") -> dict[str, Any]:
    """What is written of one process.

    Args:
        pid: its process id.
        code: its exit status as `subprocess` has it: negative is the signal that ended it.
        rank: its global rank, where the launcher knows it.
        by_launcher: the launcher ended it, because of another.
        message: what it left in an error file.
    """
    name = ""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
    return {
        "format": EXIT_FORMAT,
        "version": VERSION,
        "host": socket.gethostname(),
        "pid": pid,
        "rank": rank,
        "code": code,
        "signal": name or (str(-code) if code < 0 else None),
        "wall_ns": time.time_ns(),
        "by_launcher": by_launcher,
        "message": message[:2000],
    }


def note(found: dict[str, Any], run_id: str, cwd: str) -> None:
    """Write down how one process ended. The first that is said of a process counts.

    Raises:
        OSError: the folder cannot be written.
    """
    pid = int(found["pid"])
    if pid in _seen:
        return
    _seen[pid] = found
    data = json.dumps(found).encode() + b"\n"
    pattern = f"{glob.escape(rundir.safe_name(found['host']))}-{pid}-*"
    run_dirs: set[str] = set()
    folders: set[str] = set()
    for run in finish.spooled_runs():
        for folder in glob.glob(os.path.join(glob.escape(run), RANKS_DIR, pattern)):
            folders.add(folder)  # what lies there moves to the run directory with the rest
            run_dir = (finish.read_writer(folder) or {}).get("run_dir")
            if isinstance(run_dir, str):
                run_dirs.add(run_dir)
    for run_dir in run_dirs or set(_run_dirs(run_id, cwd)):
        there = glob.glob(os.path.join(glob.escape(run_dir), RANKS_DIR, pattern))
        folders.update(there)
        if not there and found["rank"] is None:
            continue  # some other child of the launcher
        everything = {
            "format": EXITS_FORMAT,
            "version": VERSION,
            "host": found["host"],
            "launcher": os.getpid(),
            "exits": list(_seen.values()),
        }
        name = f"exits-{rundir.safe_name(found['host'])}-{os.getpid()}.json"
        spool.write_atomically(os.path.join(run_dir, name), json.dumps(everything, indent=1).encode() + b"\n")
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # it has moved meanwhile
            spool.write_atomically(os.path.join(folder, EXIT_NAME), data)


def _run_dirs(run_id: str, cwd: str) -> list[str]:
    """Where a run of this id is, whose ranks have all left the spool."""
    wanted = os.environ.get("NEMO_LENS_RUN_DIR", "").strip()
    base = os.path.abspath(wanted) if wanted else rundir.default_run_dir(run_id, cwd)
    for suffix in range(1, _MAX_SUFFIX):
        path = base if suffix == 1 else f"{base}-{suffix}"
        manifest = rundir.manifest_of(path)
        if manifest is None:
            return []
        if manifest.get("run_id") == run_id:
            return [path]
    return []
