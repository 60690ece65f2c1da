"""PyTorch's own distributed tests, as its wheel ships them, on gloo with two forked ranks.

`torch_distributed_tests.py [TEST...]`: without names all of them. Leaves the outcome of each test, and why it skipped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

# Read when the tests are imported.
os.environ.update(
    BACKEND="gloo",
    WORLD_SIZE="2",
    TEMP_DIR=tempfile.mkdtemp(prefix="torch-tests-"),
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
)

import torch.multiprocessing
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend


class Gloo(TestDistBackend, DistributedTest._DistTestBase):
    """The tests of all backends, on gloo."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Outcomes(unittest.TestResult):
    """What became of each test: `passed`, `failed` or `skipped`, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, object]] = {}
        self._begun = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begun = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        seconds = round(time.monotonic() - self._begun, 2)
        self.found[name] = {"outcome": outcome, "why": why, "seconds": seconds}
        print(f"{name}: {outcome} {seconds} s {why}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addFailure(self, test: unittest.TestCase, error: object) -> None:
        self._note(test, "failed", str(error[1]))  # type: ignore[index]

    addError = addFailure

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)


def main() -> None:
    names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(Gloo)
    suite = unittest.TestSuite(Gloo(name) for name in names)
    outcomes = Outcomes()
    suite.run(outcomes)
    Path(os.environ["LENS_COMPAT_RESULT"], "tests.json").write_text(json.dumps(outcomes.found))


if __name__ == "__main__":
    main()
