"""The process as we see it: configured at interpreter start, a rank once it behaves as one, closed at its end.

`recorder` is None until the process behaves as a rank. Hooks look at it first, and do nothing while it is None.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lens_auto import guard, state
from lens_auto.settings import Settings

if TYPE_CHECKING:  # every interpreter imports this file at its start: what only a rank needs is imported by the rank
    from collections.abc import Iterator

    from lens_auto.iteration.carrier import Switch
    from lens_auto.iteration.live import LiveIterations
    from lens_auto.iteration.schedule import Schedule
    from lens_auto.recorder.housekeeper import Housekeeper
    from lens_auto.recorder.recorder import Recorder

logger = logging.getLogger("lens_auto")

RUN_ID_VARIABLE = "NEMO_LENS_RUN_ID"
LAUNCHER_VARIABLE = "_NEMO_LENS_LAUNCHER"  # pid of the first process: it finishes what its children leave

recorder: Recorder | None = None
iterations: LiveIterations | None = None
settings: Settings | None = None
groups: frozenset[str] = frozenset()  # span groups that are on now

_housekeeper: Housekeeper | None = None
_lock = threading.RLock()
_schedule: Schedule | None = None
_parent_was_rank = False
_closed = False
_exit_by: float | None = None
_init_count = 0


def configure() -> Settings:
    """Read the environment, name the run for our children. Idempotent and cheap; nothing is recorded yet."""
    global settings, groups
    if settings is not None:
        return settings
    with _lock:
        settings = Settings.from_env(os.environ)
        groups = frozenset() if settings.disabled else settings.groups
        state.set_enabled_span_groups(groups)
        if LAUNCHER_VARIABLE not in os.environ and os.environ.get("RANK", "0") == "0":  # once, not in every process
            for problem in settings.problems:
                logger.warning("lens-auto: %s", problem)
        if settings.disabled:
            return settings
        if not os.environ.get(RUN_ID_VARIABLE):
            os.environ[RUN_ID_VARIABLE] = _first_run_id()
        os.environ.setdefault(LAUNCHER_VARIABLE, str(os.getpid()))
        if os.environ[LAUNCHER_VARIABLE] == str(os.getpid()):
            atexit.register(_finish_children, os.environ[RUN_ID_VARIABLE])
        os.register_at_fork(after_in_child=_after_fork)
    return settings


def watching() -> bool:
    """Whether the hang watch is on: blocking operations then show themselves in the live page, whatever their group."""
    return settings is not None and not settings.disabled and settings.hang_timeout_s > 0


def set_groups(wanted: frozenset[str]) -> None:
    """Switch span groups in this process, now."""
    global groups
    groups = wanted
    state.set_enabled_span_groups(wanted)
    if recorder is not None:
        recorder.span_flags(wanted)
    if _housekeeper is not None:
        ever = sorted({*_housekeeper.info["groups"], *wanted})
        if ever != _housekeeper.info["groups"]:
            _housekeeper.update(groups=ever)
    guard.refresh_all()


def schedule_switches(switches: list[Switch]) -> None:
    """Switch span groups from later iterations on; called from other threads."""
    if recorder is None or _schedule is None:
        return
    _schedule.add(switches)
    recorder.switch_at = _schedule.next_iteration


def _switch(iteration: int) -> None:
    """At a boundary, in the training thread: what is due."""
    if recorder is None or _schedule is None:
        return
    wanted = _schedule.due(iteration)
    recorder.switch_at = _schedule.next_iteration
    if wanted is not None and wanted != groups:
        set_groups(wanted)


def _first_run_id() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        step = os.environ.get("SLURM_STEP_ID")
        return f"slurm-{job}.{step}" if step else f"slurm-{job}"
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if elastic and elastic != "none":
        return elastic
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + os.urandom(3).hex()


def _finish_children(run_id: str) -> None:
    """At the launcher's end: what killed children left in the spool goes to the run directory."""
    if os.environ.get(LAUNCHER_VARIABLE) != str(os.getpid()):
        return  # a forked child
    try:
        from lens_auto.recorder import finish, rundir

        key = rundir.safe_name(run_id)
        if not finish.spooled_runs(key):
            return
        for problem in finish.finish_dead(key=key):
            logger.warning("lens-auto: %s", problem)
        _wait_for_exporter(key)
    except Exception as error:
        guard.failed("finish", error)
        guard.tell(f"what killed processes left could not be moved ({error}); `lens-auto report` can still read it")


def _wait_for_exporter(key: str) -> None:
    """The last process of a job waits, bounded, for the exporter: where it is a container's first, all ends with it."""
    from lens_auto.export import launch
    from lens_auto.export.exporters import exporter_names, metrics_exporter_names
    from lens_auto.recorder import finish, rundir

    names, metrics = exporter_names(), metrics_exporter_names()
    current = configure()
    if not (names or metrics):
        return
    deadline = _exit_deadline()
    for folder in finish.spooled_runs(key):
        console = "console" in (*names, *metrics)
        left = launch.wait_until_sent(folder, max(0.0, deadline - time.monotonic()), console)
        if left and not current.quiet:
            places = sorted({rundir.shown(run_dir) for run_dir in left.values() if run_dir}) or [folder]
            reason, hopeless = launch.said(folder)
            if not names:
                why = f" ({reason})" if reason else ""
                print(f"lens-auto: metrics of {len(left)} rank(s) are not sent{why}", file=sys.stderr, flush=True)
                continue
            print(
                f"lens-auto: spans of {len(left)} rank(s) are not sent{'' if hopeless else ' yet'}"
                f"{f' ({reason})' if reason else ''};{'' if hopeless else ' the exporter goes on for a while,'} what"
                f" is left can be sent with: lens-auto recover {' '.join(places)}",
                file=sys.stderr,
                flush=True,
            )


def _exit_deadline() -> float:
    """When this process must be gone; the first who asks starts the clock."""
    global _exit_by
    if _exit_by is None:
        _exit_by = time.monotonic() + configure().exit_timeout_s
    return _exit_by


def _after_fork() -> None:
    """In a forked child: never write to the parent's files."""
    global recorder, iterations, _housekeeper, _parent_was_rank, _closed, _exit_by, _init_count, _lock
    if recorder is not None:
        _parent_was_rank = True
    _lock = threading.RLock()
    recorder = iterations = _housekeeper = None
    _closed = False
    _exit_by = None
    _init_count = 0


def _environment_int(name: str, default: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def _in_loader_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def become_rank(by_init: bool = False) -> Recorder | None:
    """The process behaves as a rank: start its recorder.

    Args:
        by_init: it entered `init_process_group`. Otherwise (backward, optimizer step) DataLoader workers and forked
            children of a rank do not count.

    Returns:
        The recorder; None where this process is not to record.
    """
    if recorder is not None:
        return recorder
    start = guard.site("recorder")
    if start.reason:  # it failed; a second try would meet the files of the first
        return None
    try:
        return _start_recorder(by_init)
    except Exception as error:
        start.fault(error)
        start.reason = f"{type(error).__name__}: {error}"  # a second try would meet the first one's files
        guard.tell(f"the recorder failed when it started ({start.reason}); the training program is not affected")
        return recorder


def _start_recorder(by_init: bool) -> Recorder | None:
    global recorder, iterations, _housekeeper
    with _lock:
        if _closed:
            return None
        current = configure()
        if current.disabled or (not by_init and (_parent_was_rank or _in_loader_worker())):
            return None
        from lens_auto.iteration.live import LiveIterations

        made, keeper = _make_recorder(current)
        keeper.start()
        iterations = LiveIterations(made, current.iteration_optimizer)
        _housekeeper = keeper
        recorder = made
        atexit.register(close)
        # multiprocessing's children end in os._exit, after its own finalizers but without atexit
        from multiprocessing import util

        util.Finalize(None, close, exitpriority=-100)
        world_size = _environment_int("WORLD_SIZE", 1)
        made.world_size = world_size
        if world_size == 1 and not by_init:
            identify(_environment_int("RANK", 0), 1)
            keeper.name_alone()
        else:
            identify(_environment_int("RANK", -1), world_size)
        _attach_context()
    return recorder


def _attach_context() -> None:
    try:
        from lens_auto import current_context

        current_context.attach()
    except Exception as error:
        guard.failed("context", error)


def _make_recorder(current: Settings) -> tuple[Recorder, Housekeeper]:
    import platform
    import secrets
    import socket

    from lens_auto.export.exporters import exporter_names, metrics_exporter_names
    from lens_auto.export.exporting import Exporting
    from lens_auto.iteration.schedule import Schedule, window_switches
    from lens_auto.recorder import finish, rundir, spool
    from lens_auto.recorder.device import DeviceTimes
    from lens_auto.recorder.housekeeper import Housekeeper
    from lens_auto.recorder.layout import FORMAT_VERSION
    from lens_auto.recorder.recorder import Recorder

    global _schedule, groups
    local_ranks = max(1, _environment_int("LOCAL_WORLD_SIZE", 1))
    ticks = finish.process_start_ticks(os.getpid())
    host = socket.gethostname()
    writer = f"{rundir.safe_name(host)}-{os.getpid()}-{ticks:x}"
    run_id = os.environ.get(RUN_ID_VARIABLE) or _first_run_id()
    folder: str | None
    try:
        folder, problems = spool.make_writer_folder(current.spool_dir, local_ranks, rundir.safe_name(run_id), writer)
        for problem in problems:
            if current.spool_dir is not None:
                logger.warning("lens-auto: NEMO_LENS_SPOOL_DIR: %s; %r is used instead", problem, folder)
    except spool.NoSpoolError as error:
        folder = None
        logger.warning("lens-auto: no folder for the spool: %s; records are dropped and counted", error.strerror)
    nonce = secrets.randbits(64)
    made = Recorder(folder, nonce, ticks, current.max_run_bytes // local_ranks)
    at_start, switches = window_switches(groups, current.window)
    _schedule = Schedule(switches)
    if switches:
        set_groups(at_start)
    made.span_flags(groups)
    if current.device_times:
        made.device = DeviceTimes(made)
    made.on_switch = _switch
    made.switch_at = _schedule.next_iteration
    cwd = os.getcwd()
    wanted = os.path.abspath(current.run_dir) if current.run_dir else None
    info: dict[str, Any] = {
        "format": "lens-writer",
        "version": FORMAT_VERSION,
        "writer": writer,
        "nonce": f"{nonce:016x}",
        "host": host,
        "pid": os.getpid(),
        "start_ticks": ticks,
        "rank": -1,
        "world_size": 0,
        "local_rank": -1,
        "run_id": run_id,
        "run_dir": None,
        "wanted_dir": wanted,
        "fallback_dir": wanted or rundir.default_run_dir(run_id, cwd),
        "cwd": cwd,
        "spool_dir": folder,
        "seed": None,
        "seed_source": None,
        "origin": {},
        "groups": sorted(groups),
        "exports": None,
        "resource": {},
        "clock": {"monotonic_ns": time.monotonic_ns(), "wall_ns": time.time_ns()},
        "started_ns": time.monotonic_ns(),
        "ended_ns": None,
        "end": None,
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "python": platform.python_version(),
        "iteration_optimizer": current.iteration_optimizer,
        "records": 0,
        "dropped": 0,
        "hooks_off": {},
        "hook_faults": 0,
    }
    keeper = Housekeeper(made, info)
    keeper.watch_hangs(current.hang_timeout_s)
    names, metrics = exporter_names(), metrics_exporter_names()
    if (names or metrics) and folder is not None:
        run_folder = os.path.dirname(os.path.dirname(folder))
        keeper.exporting = Exporting(run_folder, names, metrics, _environment_int("LOCAL_RANK", 0))
        info["sends"] = bool(names)
    else:
        info["exports"] = True
    return made, keeper


def identify(rank: int, world_size: int) -> None:
    """Say which rank this process is."""
    if recorder is None or _housekeeper is None:
        return
    local_rank = _environment_int("LOCAL_RANK", rank if world_size <= 1 else -1)
    recorder.rank = rank
    recorder.world_size = world_size
    recorder.live.identify(rank, world_size, local_rank)
    _housekeeper.update(rank=rank, world_size=world_size, local_rank=local_rank)


def next_init() -> int:
    """Ordinal of the `init_process_group` that starts now, from 1."""
    global _init_count
    _init_count += 1
    if recorder is not None:
        recorder.init = _init_count
    return _init_count


def init_failed() -> None:
    """That `init_process_group` failed: ranks of which some tried more often must agree on the ordinal."""
    global _init_count
    _init_count -= 1
    if recorder is not None:
        recorder.init = _init_count


def initialized(rank: int, world_size: int, store: Any) -> None:
    """`init_process_group` succeeded: the ranks can agree now.

    Args:
        rank, world_size: of the default group.
        store: the job's; it is neither used nor kept, see `iteration.store`.
    """
    if recorder is None or _housekeeper is None:
        return
    identify(rank, world_size)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"lens-auto/{restart}/{_init_count}"
    if _housekeeper.info["seed"] is not None:
        if _housekeeper.sharing is not None:
            from lens_auto.iteration.store import StoreAccess

            _housekeeper.sharing.follow(StoreAccess(store), prefix)
        return
    from lens_auto.iteration import origin
    from lens_auto.iteration.agreement import Agreed, Agreement
    from lens_auto.iteration.sharing import Sharing
    from lens_auto.iteration.store import StoreAccess

    if world_size == 1:
        _housekeeper.name_alone()
        return
    own = Agreed(os.urandom(16), str(_housekeeper.info["run_id"]), origin.from_environment(os.environ))
    access = StoreAccess(store)
    _housekeeper.agree(Agreement(access.client, prefix, rank, world_size, own), access)
    mode = "derived" if settings is None else settings.propagation
    if mode != "off":
        _housekeeper.share(Sharing(access, prefix, rank, world_size, recorder, mode, schedule_switches))


def leaving() -> None:
    """The default process group is about to be destroyed, and with it the store."""
    if _housekeeper is not None:
        _housekeeper.store_ends()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A model that is freed in the middle of the end can hang or die in its destructor: it is not for us to free it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def close() -> None:
    """The process ends: stop recording, move everything to the run directory, say where it is (rank 0)."""
    global recorder, _closed, iterations
    with _lock:
        if recorder is None or _housekeeper is None or _closed:
            return
        _closed = True
        rank = recorder.rank
        try:
            if recorder.device is not None:
                recorder.device.finish()
        except Exception as error:
            guard.failed("device", error)
        recorder = iterations = None
    try:
        with _no_collection():
            _finish(rank, _housekeeper)
    except Exception as error:
        guard.failed("close", error)
        guard.tell(f"the records could not be closed ({error}); `lens-auto report` can still read them")


def _finish(rank: int, housekeeper: Housekeeper) -> None:
    from lens_auto.recorder import rundir

    current = configure()
    place = housekeeper.close(max(0.0, _exit_deadline() - time.monotonic()))
    silent = current.quiet or (housekeeper.exporting is not None and not housekeeper.exporting.keeps_records)
    if rank in (0, -1) and place is not None and not silent:
        print(f"lens-auto: recorded; see it with: lens-auto report {rundir.shown(place)}", file=sys.stderr, flush=True)
