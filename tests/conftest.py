"""Fixtures that start real programs, see `launch.py`, and the order of the files."""

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

# Files that take longest, by this order: each is one worker's (`--dist loadfile`), and none should begin late.
LONGEST_FIRST = (
    *("launch", "export_process", "hang", "bad_input", "export_faults", "no_harm", "security", "report", "propagation"),
    *("metrics", "signals", "providers", "faults", "pipeline_spans", "traces", "services", "contrib", "verdicts"),
    *("p2p_links", "torch_tests", "soak", "receiver", "cpp_collectives", "patching", "iterations", "pipelines"),
    *("bitwise", "top", "export_stream", "html", "bandwidth", "programs", "device", "processes", "distributed"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


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
