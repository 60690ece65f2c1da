"""PyTorch's own distributed tests end the same with everything on: a subset; all of them are in `make compat`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compat import torch_tests
from compat.torch_tests import SUBSET


@pytest.mark.timeout(300)
def test_outcomes_do_not_change(tmp_path: Path) -> None:
    compared = torch_tests.compare(Path(sys.executable).parent, tmp_path, SUBSET)
    assert compared.failure() == ""
    assert torch_tests.shown(compared.bare[0]) == f"{len(SUBSET)} passed"
    assert compared.writers == 2 * len(SUBSET)  # two ranks a test
