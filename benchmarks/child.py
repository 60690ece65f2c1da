"""Runs the measured programs in processes of their own, with no setting in the environment but those asked for."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "nemo-lens-auto"
ROOT = Path(__file__).resolve().parents[1]
RESULT_VARIABLE = "LENS_BENCHMARK_RESULT"  # where a program leaves its result, as JSON
_PROGRESS = "@progress "
_INSTRUMENT = "from opentelemetry.instrumentation.auto_instrumentation import run; run()"

Progress = Callable[[float], None]  # told the share that is done


class ChildError(Exception):
    """A measured program failed, or ran out of time."""


@functools.cache
def foreign_instrumentors() -> str:
    """Names of the instrumentors that other distributions installed here: what they cost is not ours to measure."""
    found = metadata.entry_points(group="opentelemetry_instrumentor")
    return ",".join(sorted(each.name for each in found if each.dist is None or each.dist.name != DISTRIBUTION))


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment, without the settings of OpenTelemetry and ours that the user may have, plus `variables`.

    Instrumentations of others are switched off, on both sides of every comparison.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "NEMO_LENS_", "_NEMO_LENS_"))}
    foreign = foreign_instrumentors()
    others = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": foreign} if foreign else {}
    return {**kept, "OMP_NUM_THREADS": "1", "NEMO_LENS_QUIET": "1", **others, **variables}


def instrumented(python: str = sys.executable) -> list[str]:
    """`opentelemetry-instrument`, by its function: the script may not be on the path."""
    return [python, "-c", _INSTRUMENT]


def report_progress(share: float) -> None:
    """In a program: say how much is done."""
    print(f"{_PROGRESS}{share:.3f}", flush=True)


def leave_result(result: Any) -> None:
    """In a program: hand the result to who started it."""
    Path(os.environ[RESULT_VARIABLE]).write_text(json.dumps(result))


def _reason(said: Sequence[str]) -> str:
    """The last line that looks like an exception: what a launcher prints after it says nothing."""
    for line in reversed(said):
        if re.search(r"\b\w+(Error|Exception)\b", line) and "ChildFailedError" not in line:
            return line.strip()
    return " | ".join(said[-3:]) or "it said nothing"


def run(
    command: Sequence[str], variables: Mapping[str, str], progress: Progress, timeout_s: float, *arguments: str
) -> Any:
    """Runs a program to its end and returns the result that it left.

    Args:
        command: the start of the command line.
        variables: added to the cleaned environment.
        progress: told what the program says of its progress.
        timeout_s: after this it is killed.
        *arguments: the rest of the command line.

    Raises:
        ChildError: it failed; the message ends with what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="lens-bench-") as folder:
        result = Path(folder, "result.json")
        said: list[str] = []
        environment = clean_environment(
            **{"NEMO_LENS_RUN_DIR": os.path.join(folder, "run"), RESULT_VARIABLE: str(result), **variables}
        )
        deadline = time.monotonic() + timeout_s
        process = subprocess.Popen(
            [*command, *arguments],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            # The programs report their progress often, so that this loop looks at the clock often enough.
            for line in process.stdout:
                if line.startswith(_PROGRESS):
                    progress(float(line[len(_PROGRESS) :]))
                else:
                    said.append(line.rstrip())
                if time.monotonic() > deadline:
                    raise ChildError(f"still running after {timeout_s:.0f} s")
            status = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ChildError(f"still running after {timeout_s:.0f} s") from None
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if status != 0 or not result.exists():
            raise ChildError(f"exit status {status}: {_reason(said)}")
        return json.loads(result.read_text())
