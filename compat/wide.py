"""The wide forms of our own tests: those that are marked `slow` and not part of `make test`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from compat.environment import ROOT, Environments
from compat.row import Row

# Name of the check -> title, files of tests (ALL_OTHERS: those that no other check names).
ALL_OTHERS = ""
WIDE = {
    "bitwise": ("fourteen ways to train, to the last bit", "test_bitwise.py"),
    "faults": ("every function of ours fails, one at a time", "test_faults.py"),
    "ranks": ("ranks that disagree, die or sleep", "test_no_harm.py"),
    "signals": ("signals in every phase", "test_signals.py"),
    "soak": ("100,000 iterations", "test_soak.py"),
    "verdicts": ("what is put into a job is named, and nothing where nothing was", "test_verdicts.py"),
    "others": ("all other long tests", ALL_OTHERS),
}
_WITHOUT_BARE = ("test_verdicts.py", ALL_OTHERS)
_TIMEOUT_S = 7200
_PASSED = re.compile(r"\b(\d+) passed\b")


def check(title: str, file: str, environments: Environments, folder: Path) -> Row:
    """Run the slow tests of a file; most compare with what it does without lens-auto."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "output.txt"
    tests = ROOT / "tests"
    files = [str(tests / file)]
    if file == ALL_OTHERS:
        files = [str(tests), *(f"--ignore={tests / named}" for _, named in WIDE.values() if named)]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", *files]
    version = f"torch {metadata.version('torch')}"
    with output.open("wb") as said:
        try:
            status = subprocess.run(
                [*command, f"--basetemp={folder / 'tests'}"],
                cwd=ROOT,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            return Row(title, version, problem=f"not done after {_TIMEOUT_S} s")
    text = output.read_text(errors="replace")
    passed = _PASSED.search(text)
    if status != 0 or passed is None:
        for line in text.splitlines():
            if line.startswith(("FAILED ", "ERROR ", "E   ")):
                print(f"    {line}", file=sys.stderr)
        return Row(title, version, problem=(text.strip().splitlines() or [f"exit status {status}"])[-1])
    beside = "" if file in _WITHOUT_BARE else ", each beside a bare run"
    return Row(title, version, bare="-", instrumented=f"{passed[1]} tests pass{beside}")
