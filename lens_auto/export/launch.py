"""Start the exporter process of this node, from a rank, and start it again where it died.

One per node: whoever holds the lock on the spool's `exporter.lock` is it. Nothing of the SDK is imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time

from lens_auto.recorder import spool
from lens_auto.recorder.finish import process_start_ticks

LOCK_NAME = "exporter.lock"
SENDING_NAME = "sending"  # a file for each writer that the exporter is not done with; it holds its run_dir
LOG_NAME = "exporter.log"
SAYS_NAME = "exporter.says"
LOOK_EVERY_S = 2.0
START_PATIENCE_S = 10.0  # a started exporter needs a moment before it takes the lock
LONGEST_PATIENCE_S = 300.0  # between starts of one that never runs

_started: list[subprocess.Popen[bytes]] = []


# The exporter computes in one thread, and tells of failures itself.
_SMALL = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "GRPC_VERBOSITY": "NONE",
}


def is_running(run_folder: str) -> bool:
    """Whether some process holds the exporter's lock of a spool run folder."""
    try:
        descriptor = os.open(os.path.join(run_folder, LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def start(run_folder: str, inherit_output: bool) -> None:
    """Start the exporter of a spool run folder, in a session of its own: a signal to the job does not reach it.

    Args:
        run_folder: the spool's folder of this run.
        inherit_output: its standard output is ours (the console exporter prints there).
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = _without_auto_instrumentation(environment.get("PYTHONPATH", ""))
    environment["NEMO_LENS_DISABLED"] = "1"
    environment["PYTHONSAFEPATH"] = "1"  # what lies in the job's working directory is not to be imported
    for name, value in _SMALL.items():
        environment.setdefault(name, value)
    _started[:] = [process for process in _started if process.poll() is None]
    log = os.open(
        os.path.join(run_folder, LOG_NAME), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lens_auto.export.process", run_folder],
            stdin=subprocess.DEVNULL,
            stdout=None if inherit_output else subprocess.DEVNULL,
            stderr=log,
            env=environment,
            start_new_session=True,
            close_fds=True,
        )
    finally:
        os.close(log)
    _started.append(process)


def _without_auto_instrumentation(python_path: str) -> str:
    marker = os.path.join("opentelemetry", "instrumentation", "auto_instrumentation")
    return os.pathsep.join(part for part in python_path.split(os.pathsep) if part and marker not in part)


class ExporterKeeper:
    """Looks now and then whether the exporter runs, and starts it where it does not.

    Args:
        run_folder: the spool's folder of this run.
        inherit_output: see `start`.
        local_rank: ranks look at different times, the first one first.
    """

    def __init__(self, run_folder: str, inherit_output: bool, local_rank: int) -> None:
        self._run_folder = run_folder
        self._inherit_output = inherit_output
        self._next_look = time.monotonic() + max(0, local_rank) * LOOK_EVERY_S
        self._patience_s = START_PATIENCE_S

    def look(self) -> None:
        """Called by the housekeeper at every tick."""
        now = time.monotonic()
        if now < self._next_look:
            return
        if is_running(self._run_folder):
            self._next_look = now + LOOK_EVERY_S
            self._patience_s = START_PATIENCE_S
            return
        self._next_look = now + self._patience_s
        self._patience_s = min(2 * self._patience_s, LONGEST_PATIENCE_S)
        start(self._run_folder, self._inherit_output)


# --- the register of writers ------------------------------------------------------------------------------------------


def register(run_folder: str, writer: str, run_dir: str) -> None:
    """Say that a writer's records are to be sent, and where they will be (empty: not known yet)."""
    folder = spool.private_folder(os.path.join(run_folder, SENDING_NAME))
    spool.write_atomically(os.path.join(folder, writer), run_dir.encode())


def registered(run_folder: str) -> dict[str, str]:
    """Writers that the exporter is not done with, and their run directories."""
    folder = os.path.join(run_folder, SENDING_NAME)
    found: dict[str, str] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in sorted(names):
        if not name.endswith(".tmp"):
            with contextlib.suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                found[name] = file.read(4096).decode(errors="surrogateescape")
    return found


def unregister(run_folder: str, writer: str) -> None:
    """The exporter is done with a writer."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_folder, SENDING_NAME, writer))


def remove_traces(run_folder: str) -> None:
    """Remove what is the exporter's in a spool run folder, once all is sent; the folder too, where nothing else is."""
    for name in (LOG_NAME, LOCK_NAME, SAYS_NAME):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(run_folder, name))
    for folder in (os.path.join(run_folder, SENDING_NAME), run_folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


# --- the launcher's wait ----------------------------------------------------------------------------------------------


def say(run_folder: str, reason: str, hopeless: bool = False) -> None:
    """The exporter's word for whoever waits: why nothing is sent at the moment, or ever."""
    with contextlib.suppress(OSError):
        text = json.dumps({"reason": reason, "hopeless": hopeless})
        spool.write_atomically(os.path.join(run_folder, SAYS_NAME), text.encode() + b"\n")


def said(run_folder: str) -> tuple[str, bool]:
    """What the exporter said last: the reason, and whether there is no hope."""
    try:
        with open(os.path.join(run_folder, SAYS_NAME), "rb") as file:
            found = json.loads(file.read(1 << 16))
        return str(found["reason"]), bool(found["hopeless"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", False


def still_writes(writer: str) -> bool:
    """Whether a writer's process runs, by its name: it ends with pid and start."""
    try:
        pid, ticks = writer.rsplit("-", 2)[1:]
        return process_start_ticks(int(pid)) == int(ticks, 16)
    except ValueError:
        return False


def wait_until_sent(run_folder: str, timeout_s: float, inherit_output: bool) -> dict[str, str]:
    """Wait, bounded, until the exporter is done with all writers that ended.

    Returns:
        The run directories of those that it is not done with, by writer.
    """
    deadline = time.monotonic() + timeout_s
    next_start = time.monotonic()
    own = f"-{os.getpid()}-"
    while True:
        left = {
            writer: run_dir
            for writer, run_dir in registered(run_folder).items()
            if own in writer or not still_writes(writer)
        }
        now = time.monotonic()
        if not left or now >= deadline:
            return left
        if not is_running(run_folder):
            if now >= next_start:
                next_start = now + START_PATIENCE_S
                say(run_folder, "")
                with contextlib.suppress(OSError):
                    start(run_folder, inherit_output)
            elif said(run_folder)[1]:
                return left
        time.sleep(0.02)
