"""Runs a program to its end, bare or under `opentelemetry-instrument`, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT_VARIABLE = "LENS_COMPAT_RESULT"  # the folder where a program leaves what it counted
PROGRAMS = Path(__file__).with_name("programs")
_PATIENCE_S = 20  # between SIGTERM and SIGKILL
# What a launcher, a user of OpenTelemetry or one of lens-auto may have set.
_NOT_INHERITED = re.compile(r"_?NEMO_LENS_|OTEL_|PYTHON|TORCH|SLURM_|LOCAL_|MASTER_|(RANK|WORLD_SIZE)$")


@dataclass(frozen=True)
class Ended:
    """A program that ended.

    Attributes:
        status: its exit status; negative is the signal that ended it, None: it was ended after its time.
        said: its last lines, stdout and stderr together.
        results: what its ranks left, by the name of the file.
        run_dir: where its records are, if any.
    """

    status: int | None
    said: list[str]
    results: dict[str, Any]
    run_dir: Path

    @property
    def problem(self) -> str:
        """Why it did not end well; empty where it did."""
        if self.status == 0:
            return ""
        how = "ran out of time" if self.status is None else f"exit status {self.status}"
        return f"{how}: {_reason(self.said)}"


def run(
    command: Sequence[str], bin_folder: Path, folder: Path, variables: Mapping[str, str], timeout_s: float
) -> Ended:
    """Run a command line.

    Args:
        command: its first word is looked up in `bin_folder`.
        bin_folder: of the environment that it runs in.
        folder: its working directory, made anew; its records and its output stay there.
        variables: added to the environment.
        timeout_s: after this it is ended, and what it started with it.
    """
    results = folder / "results"
    results.mkdir(parents=True)
    output = folder / "output.txt"
    kept = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.match(name)}
    environment = {
        **kept,
        "PATH": f"{bin_folder}{os.pathsep}{kept.get('PATH', '')}",
        "VIRTUAL_ENV": str(bin_folder.parent),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "CUDA_VISIBLE_DEVICES": "",  # everything here is about the CPU, also where there are devices
        "HF_HUB_OFFLINE": "1",
        "NEMO_LENS_RUN_DIR": str(folder / "run"),
        RESULT_VARIABLE: str(results),
        **variables,
    }
    with output.open("wb") as said:
        process = subprocess.Popen(
            [str(bin_folder / command[0]), *command[1:]],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return Ended(
        status,
        output.read_text(errors="replace").splitlines()[-200:],
        {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))},
        folder / "run",
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it, as a user would; launchers end their ranks, which are in sessions of their own, when they get SIGTERM."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(said: Sequence[str]) -> str:
    """The last line that looks like an exception: what a launcher prints after it says nothing."""
    for line in reversed(said):
        if re.search(r"\b\w+(Error|Exception)\b", line) and "ChildFailedError" not in line:
            return line.strip()
    return " | ".join(said[-3:]) or "it said nothing"
