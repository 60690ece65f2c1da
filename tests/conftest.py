"""Fixtures that start real programs; see `launch.py`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import Launcher

# A shell that starts the tests in the background has SIGINT ignored, and every program started here would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
