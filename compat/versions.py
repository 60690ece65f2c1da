"""The versions of Python and torch that are claimed: on each a subset of PyTorch's own tests, and training bitwise."""

from __future__ import annotations

from pathlib import Path

from compat import frameworks, torch_tests
from compat.environment import Environment, Environments, Unavailable
from compat.frameworks import TORCHRUN, Program
from compat.row import Row

OLDEST_TORCH = "2.4.0"
DEVELOPED_WITH = "2.13.0"
NEWEST_TORCH = "2.14.1"
# torch and the Pythons that it is tried with. 2.4 has no wheel for Python 3.13.
VERSIONS = (
    (OLDEST_TORCH, "3.10"),
    (OLDEST_TORCH, "3.11"),
    (OLDEST_TORCH, "3.12"),
    (DEVELOPED_WITH, "3.10"),
    (DEVELOPED_WITH, "3.11"),
    (DEVELOPED_WITH, "3.12"),
    (DEVELOPED_WITH, "3.13"),
    (NEWEST_TORCH, "3.11"),
)


def environment(torch: str, python: str) -> Environment:
    """Where one pair of versions is."""
    packages = (f"torch=={torch}", "numpy", "setuptools", "expecttest")
    return Environment(f"torch-{torch}-python-{python}", packages, python=python)


def check_training(torch: str, python: str, environments: Environments, folder: Path) -> Row:
    """A training program, its numbers compared to the last bit."""
    program = Program(
        f"training-{torch}-{python}",
        f"training, torch {torch}, Python {python}",
        environment(torch, python),
        "torch",
        (*TORCHRUN, "{programs}/training_bitwise.py"),
    )
    return frameworks.check(program, environments, folder)


def check_tests(torch: str, python: str, environments: Environments, folder: Path) -> Row:
    """The subset of PyTorch's own tests."""
    title = f"PyTorch's own tests, a subset, torch {torch}, Python {python}"
    try:
        prepared = environments.prepare(environment(torch, python))
        version = f"torch {prepared.version('torch')}"
    except Unavailable as reason:
        return Row(title, unavailable=str(reason))
    return torch_tests_row(title, version, torch_tests.compare(prepared.bin, folder, torch_tests.SUBSET))


def torch_tests_row(title: str, version: str, compared: torch_tests.Compared) -> Row:
    """What the table says of PyTorch's own tests."""
    bare = sorted({torch_tests.shown(each) for each in compared.bare})
    return Row(
        title,
        version,
        " or ".join(bare),
        torch_tests.shown(compared.instrumented),
        found=f"{compared.records} records of {compared.writers} ranks",
        problem=compared.failure(),
    )
