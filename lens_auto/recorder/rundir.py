"""The run directory: who may use which, and what its manifest says."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time

from lens_auto.recorder import spool
from lens_auto.recorder.layout import FORMAT_VERSION, MANIFEST_NAME, RANKS_DIR

RUNS_FOLDER = "lens-runs"
RUN_FORMAT = "lens-run"
_MAX_SUFFIX = 1000


def shown(path: str) -> str:
    """A path as a person may paste it into a shell: relative where it is below the working directory."""
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)


def safe_name(run_id: str) -> str:
    """A run id as a single path component."""
    kept = "".join(char if char.isalnum() or char in "-_.:+@" else "_" for char in run_id)[:128]
    return kept if kept.strip(".") else "run"


def default_run_dir(run_id: str, folder: str | None = None) -> str:
    """`./lens-runs/<run id>`, absolute."""
    return os.path.join(folder or os.getcwd(), RUNS_FOLDER, safe_name(run_id))


def manifest_of(path: str) -> dict[str, object] | None:
    """The manifest in a folder; None where there is none that can be read."""
    try:
        with open(os.path.join(path, MANIFEST_NAME), "rb") as file:
            found = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == RUN_FORMAT else None


def claim(wanted: str, run_id: str) -> str:
    """Make the run directory of a run, or join it where another rank of the same run made it.

    A directory that holds another run is left alone: the name gets a suffix (-2, -3 ...).

    Returns:
        The directory that is now this run's.

    Raises:
        OSError: it cannot be made or written.
    """
    manifest = {
        "format": RUN_FORMAT,
        "version": FORMAT_VERSION,
        "run_id": run_id,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    for suffix in range(1, _MAX_SUFFIX):
        path = wanted if suffix == 1 else f"{wanted}-{suffix}"
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            spool.make_folders(parent)
        spool.private_folder(path)
        target = os.path.join(path, MANIFEST_NAME)
        draft = f"{target}.{os.getpid()}"
        spool.write_atomically(draft, json.dumps(manifest).encode() + b"\n")
        try:
            os.link(draft, target, follow_symlinks=False)
        except FileExistsError:
            found = manifest_of(path)
            if found is None or found.get("run_id") != run_id:
                continue
        except OSError:  # a file system without hard links
            if manifest_of(path) is None:
                os.replace(draft, target)
            elif (manifest_of(path) or {}).get("run_id") != run_id:
                continue
        finally:
            with contextlib.suppress(OSError):
                os.unlink(draft)
        spool.private_folder(os.path.join(path, RANKS_DIR))
        return path
    raise FileExistsError(17, "a thousand runs of this name exist", wanted)
