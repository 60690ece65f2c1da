"""Budget of a program that never imports torch: what we add to its start and end.

Two virtual environments are made, both with links to the packages of this one; in the second our distribution is left
out, so that `opentelemetry-instrument` there is the plain one. Nothing is downloaded or installed.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path

import numpy as np

from benchmarks import child
from benchmarks.budget import BY_NAME, Measurement
from benchmarks.child import DISTRIBUTION, ChildError, Progress
from benchmarks.timing import bootstrap, undisturbed_difference

NAMES = ("start-up",)

WARM_UPS = 2
LEAST_PAIRS = 15
LONGEST_S = 45.0  # on a busy machine


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Runs an empty program in both environments in turns and compares them pair by pair."""
    with tempfile.TemporaryDirectory(prefix="lens-bench-") as folder:
        ours = _environment(Path(folder, "ours"), hidden=False)
        plain = _environment(Path(folder, "plain"), hidden=True)
        for python, there in ((ours, True), (plain, False)):
            if _has_entry_points(python, folder) is not there:
                raise ChildError(
                    f"the distribution {DISTRIBUTION} is {'missing' if there else 'not hidden'} in {python}"
                )
        for _ in range(WARM_UPS):
            _run_ns(ours, folder)
            _run_ns(plain, folder)
        times: dict[str, list[tuple[int, int]]] = {ours: [], plain: []}
        most = LEAST_PAIRS if quick else 2 * LEAST_PAIRS
        begun = time.monotonic()
        for turn in range(most):
            if turn >= LEAST_PAIRS and time.monotonic() - begun > LONGEST_S:
                break
            for python in (ours, plain) if turn % 2 == 0 else (plain, ours):
                times[python].append(_run_ns(python, folder))
            progress(turn / most)
        return {"start-up": _compare(np.array(times[ours]) / 1e6, np.array(times[plain]) / 1e6, ours, plain, folder)}


def _compare(ours_ms: np.ndarray, plain_ms: np.ndarray, ours: str, plain: str, folder: str) -> Measurement:
    """Both have one row a run; wall and CPU milliseconds."""
    limit = BY_NAME["start-up"].limit
    assert limit is not None
    wall = bootstrap(undisturbed_difference, ours_ms[:, 0], plain_ms[:, 0])
    cpu = bootstrap(undisturbed_difference, ours_ms[:, 1], plain_ms[:, 1])
    pairs = float(np.median(ours_ms[:, 0] - plain_ms[:, 0]))
    detail = (
        f"fastest quarter of {len(ours_ms)} runs each, 95 % [{wall.low:.1f}, {wall.high:.1f}]; by CPU time"
        f" {cpu.value:+.1f} [{cpu.low:.1f}, {cpu.high:.1f}]; median of pairs {pairs:+.1f}; plain"
        f" {np.median(plain_ms[:, 0]):.0f}"
    )
    best = wall
    if not wall.tells(limit) and wall.width > limit and cpu.width < wall.width:
        # Nothing of ours waits at start-up, so CPU time says the same.
        best = cpu
        detail = f"by CPU time: too busy for wall time; wall {wall.value:+.1f}, {detail}"
    profile = _profile(ours, plain, folder) if best.value > limit else []
    return Measurement(best.value, detail, profile, width=best.width)


def _environment(root: Path, hidden: bool) -> str:
    """Makes an environment that sees this one's packages; returns its interpreter.

    Args:
        root: where.
        hidden: whether our distribution is left out.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(root)
    target = Path(
        sysconfig.get_path(
            "purelib",
            "venv" if "venv" in sysconfig.get_scheme_names() else None,
            vars={"base": str(root), "platbase": str(root)},
        )
    )
    left_out = {file.parts[0] for file in metadata.files(DISTRIBUTION) or ()} if hidden else set()
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(source).iterdir():
            if entry.name not in left_out and entry.name != "__pycache__" and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return str(root / "bin" / "python")


def _has_entry_points(python: str, folder: str) -> bool:
    code = (
        "from importlib.metadata import entry_points;"
        "print(any(e.value.startswith('lens_auto') for e in entry_points(group='opentelemetry_distro')))"
    )
    said = subprocess.run(
        [python, "-c", code], env=child.clean_environment(), cwd=folder, capture_output=True, text=True, check=True
    )
    return said.stdout.strip() == "True"


def _run_ns(python: str, folder: str) -> tuple[int, int]:
    """Wall and CPU nanoseconds of `opentelemetry-instrument python -c pass`, from its start to its exit."""
    environment = child.clean_environment()
    start = time.perf_counter_ns()
    process = subprocess.Popen(
        [*child.instrumented(python), python, "-c", "pass"],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_ns = time.perf_counter_ns() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise ChildError(f"an empty program ended with exit status {process.returncode}")
    return wall_ns, int((usage.ru_utime + usage.ru_stime) * 1e9)


def _profile(ours: str, plain: str, folder: str) -> list[str]:
    """Where the time goes, by `-X importtime`, which about doubles it."""
    extra = _import_times_us(ours, folder)
    base = _import_times_us(plain, folder)
    # OpenTelemetry loads distro and instrumentors while `sitecustomize` is imported: its own time is what is no import.
    loading_us = extra["sitecustomize"] - base["sitecustomize"]
    rows = sorted(((own_us, module) for module, own_us in extra.items() if module not in base), reverse=True)
    total_us = sum(own_us for own_us, _ in rows)
    return [
        f"{loading_us / 1e3:6.2f} ms  loading entry points, less imports: OpenTelemetry checks each one's requirements",
        f"{total_us / 1e3:6.2f} ms  {len(rows)} modules that only we import:",
        *(f"{own_us / 1e3:6.2f} ms    {module}" for own_us, module in rows[:15]),
    ]


def _import_times_us(python: str, folder: str) -> dict[str, int]:
    said = subprocess.run(
        [*child.instrumented(python), python, "-c", "pass"],
        env=child.clean_environment(PYTHONPROFILEIMPORTTIME="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    times: dict[str, int] = {}
    for line in said.stderr.splitlines():
        # import time: self [us] | cumulative | imported package
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            name = parts[2].strip()
            times[name] = times.get(name, 0) + int(parts[0])
    return times
