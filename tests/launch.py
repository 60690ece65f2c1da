"""Start real programs under a launch way, each isolated from every other run, and see what they leave behind.

A run has a folder of its own: the program's working directory, its run directories below it, its spool. Every process
of a run carries a mark in its environment; by it a run that hangs is ended whole (torchrun puts workers into sessions
of their own), and a test can see that no process outlived its run.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(sys.executable).parent  # not resolved: a virtual environment's python is a link
INSTRUMENT = (str(SCRIPTS / "opentelemetry-instrument"),)
PYTHON = (sys.executable,)
TORCHRUN = (str(SCRIPTS / "torchrun"),)

CLOSING = "lens-auto: recorded; see it with: lens-auto report "

_MARK = "TEST_RUN_MARK"
_OF_A_LAUNCHER = re.compile(
    r"_?NEMO_LENS_|OTEL_|PYTHON|TORCH|SLURM_|LOCAL_|GROUP_|ROLE_|MASTER_|GLOO_|(RANK|WORLD_SIZE|OMP_NUM_THREADS)$"
)
# What torch and its launcher print of their own accord: C++ and Python log lines, and torchrun's banner.
_TORCHS_OWN = re.compile(r"(\[rank\d+\]:)?\[?[WIE]\d{4} |\[Gloo\] |\*{5,}$|Setting OMP_NUM_THREADS")

# Put before a program: `run_ranks(main, n)` calls `main(rank)` in n ranks that share one import of torch. They end like
# every child of multiprocessing, in os._exit, which also saves them seconds of taking torch down.
RUN_RANKS = """
import gc, multiprocessing, os, sys
def _rank_main(main, rank, size):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    main(rank)
    gc.freeze()  # a reducer that is freed while its group's last operation is put away can hang (torch 2.13)
def run_ranks(main, size):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank_main, args=(main, rank, size)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    worst = max(abs(rank.exitcode) for rank in ranks)
    if worst:
        sys.exit(worst)
"""


# Put before a program that imports torch first and then calls `instrument()`, if need be in a forked child.
INSTRUMENT_HERE = """
from importlib.metadata import entry_points
_instrumentors = [
    entry_point.load()
    for entry_point in entry_points(group="opentelemetry_instrumentor")
    if entry_point.value.startswith("instrumentors.")
]
def instrument():
    made = [instrumentor() for instrumentor in _instrumentors]
    for each in made:
        each.instrument()
    return made
"""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, and that no connection is given before it is used."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)  # below those that Linux gives by itself
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@dataclass
class Run:
    """A run that ended.

    Attributes:
        code: the exit status; negative is the signal that ended it.
        survivors: command lines of its processes that still ran when it had ended.
    """

    code: int
    stdout: str
    stderr: str
    folder: Path
    survivors: list[str] = field(default_factory=list)

    @property
    def cwd(self) -> Path:
        """Its working directory."""
        return self.folder / "work"

    @property
    def spool(self) -> Path:
        """Its NEMO_LENS_SPOOL_DIR."""
        return self.folder / "spool"

    @property
    def lines(self) -> list[str]:
        """Lines on stderr that are not torch's own."""
        return [line for line in self.stderr.splitlines() if line.strip() and not _TORCHS_OWN.match(line)]

    @property
    def run_dirs(self) -> list[Path]:
        """Run directories at the default place."""
        return sorted((self.cwd / "lens-runs").glob("*"))

    @property
    def run_dir(self) -> Path:
        """The one run directory."""
        assert len(self.run_dirs) == 1, (self.run_dirs, self.stderr)
        return self.run_dirs[0]

    @property
    def spooled(self) -> list[Path]:
        """Files left in the spool."""
        return [path for path in self.spool.rglob("*") if not path.is_dir()]

    def check(self, *, run_dirs: int = 1) -> Run:
        """Assert what holds for every run that went well: status 0, nothing left behind, our one line and no other."""
        shown = f"exit status {self.code}\n{self.stdout}\n{self.stderr}"
        assert self.code == 0, shown
        assert self.spooled == [], shown
        assert self.survivors == [], shown
        assert len(self.run_dirs) == run_dirs, shown
        closing = [f"{CLOSING}lens-runs/{path.name}" for path in self.run_dirs]
        assert sorted(self.lines) == closing, shown
        return self


class Started:
    """A run under way."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, mark: str) -> None:
        self.process = process
        self._folder = folder
        self._mark = mark

    def marked(self) -> dict[int, str]:
        """Processes of this run that are alive: command line by pid."""
        needle = f"{_MARK}={self._mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
        return found

    def end(self) -> None:
        """Kill what is left of the run."""
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float = 100) -> Run:
        """Wait for the end; a run that takes longer is killed and fails the test."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            running = self.marked()
            self.end()
            stdout, stderr = self.process.communicate(timeout=10)
            raise AssertionError(f"still running after {timeout_s} s: {running}\n{stdout}\n{stderr}") from None
        # multiprocessing's resource tracker ends a moment after the process that started it.
        deadline = time.monotonic() + 2
        while (survivors := self.marked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.end()
        return Run(self.process.returncode, stdout, stderr, self._folder, list(survivors.values()))


class Launcher:
    """Starts programs in a folder: `work` is their working directory, `spool` their spool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cwd = folder / "work"
        self.cwd.mkdir(parents=True, exist_ok=True)
        self.started: list[Started] = []

    def program(self, source: str, name: str = "program.py") -> str:
        """Write a program's source, and return its path."""
        path = self.cwd / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return str(path)

    def environment(self, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """The caller's environment without what a launcher or a user of OpenTelemetry set, with our places in it."""
        clean = {name: value for name, value in os.environ.items() if not _OF_A_LAUNCHER.match(name)}
        clean.update(
            PATH=f"{SCRIPTS}{os.pathsep}{clean.get('PATH', '')}",
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            NEMO_LENS_SPOOL_DIR=str(self.folder / "spool"),
        )
        for name, value in (extra or {}).items():
            if value is None:
                clean.pop(name, None)
            else:
                clean[name] = value
        return clean

    def start(self, command: Sequence[str], env: Mapping[str, str | None] | None = None) -> Started:
        """Start a command line in a session of its own."""
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            command,
            cwd=self.cwd,
            env={**self.environment(env), _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        started = Started(process, self.folder, mark)
        self.started.append(started)
        return started

    def run(self, *command: str, env: Mapping[str, str | None] | None = None, timeout_s: float = 100) -> Run:
        """Run a command line to its end."""
        return self.start(command, env).wait(timeout_s)

    def instrumented(
        self, source: str, *args: str, env: Mapping[str, str | None] | None = None, timeout_s: float = 100
    ) -> Run:
        """Run a program as `opentelemetry-instrument python program.py`."""
        return self.run(*INSTRUMENT, *PYTHON, self.program(source), *args, env=env, timeout_s=timeout_s)

    def close(self) -> None:
        """End what a failed test left running."""
        for started in self.started:
            started.end()
            if started.process.poll() is None:
                started.process.wait(10)
