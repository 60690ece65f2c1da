"""Fixtures that start real programs; see `launch.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import Launcher


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Starts programs in this test's own folder."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def launch_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Starts programs whose results several tests of a module look at."""
    launcher = Launcher(tmp_path_factory.mktemp("run"))
    yield launcher
    launcher.close()
