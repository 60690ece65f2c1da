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
from benchmarks.child import ChildError, Progress
from benchmarks.timing import median_interval

NAMES = ("start-up",)

DISTRIBUTION = "nemo-lens-auto"
WARM_UPS = 2
_PROGRAM = "import lens_auto"  # tells, in each environment, whether ours is there


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Runs an empty program in both environments in turns and compares them pair by pair."""
    pairs = 15 if quick else 31
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
        for turn in range(pairs):
            for python in (ours, plain) if turn % 2 == 0 else (plain, ours):
                times[python].append(_run_ns(python, folder))
            progress(turn / pairs)
        wall = np.array([times[ours], times[plain]])[:, :, 0] / 1e6
        cpu = np.array([times[ours], times[plain]])[:, :, 1] / 1e6
        # Of all pairs, adjacent ones met the most similar neighbours.
        median, low, high = median_interval(wall[0] - wall[1])
        detail = (
            f"95 % [{low:.1f}, {high:.1f}], {pairs} pairs; plain {np.median(wall[1]):.0f} ms;"
            f" CPU time +{np.median(cpu[0] - cpu[1]):.1f} ms"
        )
        limit = BY_NAME["start-up"].limit
        missed = limit is not None and median > limit
        return {"start-up": Measurement(median, detail, _imports(ours, plain, folder) if missed else [])}


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


def _imports(ours: str, plain: str, folder: str) -> list[str]:
    """What is imported with us only, by own time (`-X importtime`, which about doubles the times)."""
    extra = _import_times_us(ours, folder)
    for module in _import_times_us(plain, folder):
        extra.pop(module, None)
    rows = sorted(((own_us, module) for module, own_us in extra.items()), reverse=True)
    total_us = sum(own_us for own_us, _ in rows)
    lines = [f"{own_us / 1e3:6.2f} ms  {module}" for own_us, module in rows[:20]]
    return [f"{total_us / 1e3:6.2f} ms  all {len(rows)} modules that only we import", *lines]


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
            times[parts[2].strip()] = int(parts[0])
    return times
