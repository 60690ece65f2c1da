"""Finish what a writer left: move its files from the spool into the run directory, also when it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import shutil
import socket
from collections.abc import Iterator

from lens_auto.recorder import rundir, spool
from lens_auto.recorder.layout import (
    EXIT_NAME,
    HANG_NAME,
    LIVE_NAME,
    RANKS_DIR,
    RECORD_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_SUFFIX,
    STRINGS_NAME,
    WRITER_NAME,
)

logger = logging.getLogger("lens_auto")


def process_start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of /proc/<pid>/stat); 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(info: dict[str, object]) -> bool:
    """Whether the process of a `writer.json` still runs. Of another host's nothing is known: it counts as alive."""
    if info.get("host") != socket.gethostname():
        return True
    pid, ticks = info.get("pid"), info.get("start_ticks")
    if not isinstance(pid, int) or not isinstance(ticks, int):
        return False
    return process_start_ticks(pid) == ticks


def read_writer(folder: str) -> dict[str, object] | None:
    """The `writer.json` of a folder; None where there is none that can be read."""
    try:
        with open(os.path.join(folder, WRITER_NAME), "rb") as file:
            found = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def committed_bytes(data: bytes) -> int:
    """Length of a segment up to its last committed record."""
    index = (len(data) - SEGMENT_HEADER_BYTES) // RECORD_BYTES
    while index > 0:
        end = SEGMENT_HEADER_BYTES + index * RECORD_BYTES
        if int.from_bytes(data[end - 4 : end], "little") == index:
            return end
        index -= 1
    return min(len(data), SEGMENT_HEADER_BYTES)


def move_segment(source: str, folder: str) -> int:
    """Move a closed segment into a writer's folder of the run directory, cut after its last record.

    The new file is complete before it gets its name, and the old one goes only then: a reader finds the segment in at
    least one place at any time. Returns the bytes kept; a segment without records goes away (0).

    Raises:
        OSError: the run directory cannot take it; the source stays.
    """
    with open(source, "rb") as file:
        data = file.read()
    kept = committed_bytes(data)
    if kept > SEGMENT_HEADER_BYTES:
        spool.write_atomically(os.path.join(folder, os.path.basename(source)), data[:kept])
    else:
        kept = 0
    os.unlink(source)
    return kept


@contextlib.contextmanager
def _only_one(folder: str) -> Iterator[bool]:
    """Hold the folder's lock; False where another process finishes it already."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def finish_writer(folder: str, run_dir: str) -> None:
    """Move all files of a writer that writes no more from its spool folder to the run directory.

    Raises:
        OSError: the run directory cannot take them; what was not moved stays in the spool.
    """
    with _only_one(folder) as ours:
        if not ours:
            return
        target = os.path.join(run_dir, RANKS_DIR, os.path.basename(folder))
        spool.private_folder(os.path.join(run_dir, RANKS_DIR))
        spool.private_folder(target)
        for name in sorted(os.listdir(folder)):
            if name.endswith(SEGMENT_SUFFIX):
                move_segment(os.path.join(folder, name), target)
        for name in (STRINGS_NAME, LIVE_NAME, HANG_NAME, EXIT_NAME):
            with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, name), "rb") as file:
                spool.write_atomically(os.path.join(target, name), file.read())
        others = ("export-*.json", "*.jsonl")  # how far exporters are with it; spans and logs of the SDK
        for path in [found for other in others for found in glob.glob(os.path.join(glob.escape(folder), other))]:
            with open(path, "rb") as file:
                spool.write_atomically(os.path.join(target, os.path.basename(path)), file.read())
        _tell_exporter(folder, run_dir)
        info = read_writer(folder)
        if info is not None:
            info["run_dir"] = run_dir
            spool.write_atomically(os.path.join(target, WRITER_NAME), json.dumps(info).encode() + b"\n")
        shutil.rmtree(folder, ignore_errors=True)
        for parent in (os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
            with contextlib.suppress(OSError):
                os.rmdir(parent)


def _tell_exporter(folder: str, run_dir: str) -> None:
    """Where the files of a writer are now, for the exporter that has yet to send them."""
    from lens_auto.export import launch

    run_folder, writer = os.path.dirname(os.path.dirname(folder)), os.path.basename(folder)
    if os.path.exists(os.path.join(run_folder, launch.SENDING_NAME, writer)):
        launch.register(run_folder, writer, run_dir)


def spooled_writers() -> list[str]:
    """Spool folders of all writers of this user on this host."""
    return [
        folder for run in spooled_runs() for folder in sorted(glob.glob(os.path.join(glob.escape(run), RANKS_DIR, "*")))
    ]


def spooled_runs(key: str | None = None) -> list[str]:
    """Spool folders of all runs of this user on this host, or of the one with a key."""
    configured = os.environ.get("NEMO_LENS_SPOOL_DIR")
    bases = [*([configured] if configured else []), spool.SHM, spool.spool_bases(None, 1)[-1]]
    found: list[str] = []
    for base in dict.fromkeys(bases):
        user = spool.user_folder(base)
        try:
            if os.path.islink(user) or os.lstat(user).st_uid != os.getuid():
                continue
        except OSError:
            continue
        found += sorted(glob.glob(os.path.join(glob.escape(user), "*" if key is None else glob.escape(key))))
    return found


def run_dir_of(folder: str, info: dict[str, object]) -> str | None:
    """Where a dead writer's files belong: where it said, where its siblings went, or where it would have gone alone."""
    told = _told_run_dir(folder, info)
    if told is not None:
        return told
    wanted, run_id = info.get("fallback_dir"), info.get("run_id")
    if isinstance(wanted, str) and isinstance(run_id, str):
        return rundir.claim(wanted, run_id)
    return None


def _told_run_dir(folder: str, info: dict[str, object]) -> str | None:
    """What a writer or a sibling of it says of the run directory; None where nobody knew it yet."""
    if isinstance(info.get("run_dir"), str):
        return str(info["run_dir"])
    for sibling in sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(folder)), "*"))):
        other = read_writer(sibling)
        if other is not None and isinstance(other.get("run_dir"), str):
            return str(other["run_dir"])
    return None


def finish_dead(run_dir: str | None = None, key: str | None = None) -> list[str]:
    """Finish the writers in the spool whose process is gone.

    Args:
        run_dir: only those of this run directory.
        key: only those under this spool key (the launcher knows its children by it).

    Returns:
        One line for each writer that could not be finished.
    """
    problems = []
    wanted = os.path.realpath(run_dir) if run_dir is not None else None
    for folder in spooled_writers():
        if key is not None and os.path.basename(os.path.dirname(os.path.dirname(folder))) != key:
            continue
        info = read_writer(folder)
        if info is None or is_alive(info):
            continue
        try:
            if wanted is not None:  # another run's are left alone, whatever is wrong with them
                named = _told_run_dir(folder, info) or info.get("fallback_dir")
                if not isinstance(named, str) or os.path.realpath(named) != wanted:
                    continue
            target = run_dir_of(folder, info)
            if target is not None:
                finish_writer(folder, target)
        except OSError as error:
            problems.append(f"{folder!r} cannot be moved to its run directory ({error}); it stays where it is")
    return problems
