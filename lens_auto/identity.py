"""Who this process is in what OpenTelemetry's SDK sends from it, and where the files of that lie."""

from __future__ import annotations

import os

from lens_auto import runtime

SERVICES_DIR = "services"
_SERVICE_SUFFIX = {"traces": "", "metrics": ".metrics", "logs": ".logs", "unsent": ".unsent"}
_RANK_FILE = {"traces": "spans", "metrics": "metrics", "logs": "logs", "unsent": "unsent"}

_services_folder: str | None = None
_service_files: dict[str, str] = {}  # by signal


def rank() -> tuple[int, int]:
    """Rank and world size; rank -1 in a process that is no rank, as far as is known now."""
    recorder = runtime.recorder
    if recorder is not None and recorder.rank >= 0:
        return recorder.rank, recorder.world_size
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return -1, 0


def resource_attributes() -> dict[str, str | int]:
    """The resource of this process: a rank's, or a service's, which has no rank and is named by host and process."""
    from lens_auto import semconv
    from lens_auto.resources import rank_attributes, user_attributes

    run_id = os.environ.get(runtime.RUN_ID_VARIABLE)
    own_rank, world_size = rank()
    if own_rank >= 0:
        try:
            local_rank = int(os.environ["LOCAL_RANK"])
        except (KeyError, ValueError):
            local_rank = own_rank if world_size <= 1 else -1
        return rank_attributes(own_rank, world_size, local_rank, run_id)
    attributes = rank_attributes(0, 1, 0, run_id)
    for name in (semconv.DL_RANK, semconv.DL_WORLD_SIZE, semconv.DL_LOCAL_RANK):
        del attributes[name]
    instance = f"{attributes[semconv.HOST_NAME]}-{os.getpid()}"
    attributes[semconv.SERVICE_INSTANCE_ID] = f"{run_id}-{instance}" if run_id else instance
    return {**attributes, **user_attributes()}


def locate(signal: str) -> str:
    """The file of a signal in the run directory: a rank's folder there, else `services/<host>-<pid>.jsonl`.

    While a rank runs, its folder is in the spool; what closes the rank moves it.

    Args:
        signal: `traces`, `metrics`, `logs`, or `unsent`: spans that an exporter could not send.

    Raises:
        OSError: The run directory cannot be made.
    """
    recorder, keeper = runtime.recorder, runtime._housekeeper
    if recorder is not None and recorder.folder is not None:
        return os.path.join(recorder.folder, f"{_RANK_FILE[signal]}.jsonl")
    if keeper is not None and keeper.run_dir and keeper.recorder.folder is not None:  # the rank has closed
        from lens_auto.recorder.layout import RANKS_DIR

        folder = os.path.join(keeper.run_dir, RANKS_DIR, os.path.basename(keeper.recorder.folder))
        return os.path.join(folder, f"{_RANK_FILE[signal]}.jsonl")
    found = _service_files.get(signal)
    if found is None:
        import socket

        from lens_auto.recorder import rundir

        name = f"{rundir.safe_name(socket.gethostname())}-{os.getpid()}{_SERVICE_SUFFIX[signal]}.jsonl"
        found = _service_files[signal] = os.path.join(_services_dir(), name)
    return found


def _services_dir() -> str:
    """The folder for services in this run's directory, made when it is first needed."""
    global _services_folder
    if _services_folder is None:
        from lens_auto.recorder import rundir, spool

        settings = runtime.configure()
        run_id = os.environ.get(runtime.RUN_ID_VARIABLE) or runtime._first_run_id()
        wanted = os.path.abspath(settings.run_dir) if settings.run_dir else rundir.default_run_dir(run_id)
        _services_folder = spool.private_folder(os.path.join(rundir.claim(wanted, run_id), SERVICES_DIR))
    return _services_folder


def service_files() -> dict[str, str]:
    """Files that this process wrote as a service, by signal."""
    return {signal: path for signal, path in _service_files.items() if os.path.exists(path)}


def after_fork() -> None:
    """A forked child writes files of its own."""
    _service_files.clear()
