"""Runs real programs bare and with lens-auto, and says whether anything differs.

Writes the table in docs/compatibility.md. Exits with 1 where a program fails, differs, or is counted wrongly.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from compat import frameworks, straggler, torch_tests, versions, wide
from compat.environment import ROOT, Environments
from compat.row import COLUMNS, Row, write_table

PAGE = ROOT / "docs" / "compatibility.md"
Check = Callable[[Environments, Path], Row]

BARE_RUNS = 3  # of PyTorch's own tests: what does not end the same in all of them is flaky


def _torch_tests(environments: Environments, folder: Path) -> Row:
    """All of PyTorch's own distributed tests on gloo, with the torch of this interpreter."""
    compared = torch_tests.compare(Path(sys.executable).parent, folder, bare_runs=BARE_RUNS)
    if not compared.problem:
        for line in torch_tests.explanation(compared):
            print(f"    {line}", file=sys.stderr)
    return versions.torch_tests_row("PyTorch's own distributed tests", f"torch {metadata.version('torch')}", compared)


CHECKS: dict[str, tuple[str, Check]] = {
    "torch-tests": ("PyTorch's own distributed tests, all of them", _torch_tests),
    **{each.name: (each.title, partial(frameworks.check, each)) for each in frameworks.PROGRAMS_OF_FRAMEWORKS},
    "lightning-straggler": (straggler.TITLE, partial(straggler.check, frameworks.LIGHTNING)),
}
for _name, (_title, _file) in wide.WIDE.items():
    CHECKS[_name] = (_title, partial(wide.check, _title, _file))
for _torch, _python in versions.VERSIONS:
    CHECKS[f"training-{_torch}-{_python}"] = (
        f"training to the last bit, torch {_torch}, Python {_python}",
        partial(versions.check_training, _torch, _python),
    )
    CHECKS[f"tests-{_torch}-{_python}"] = (
        f"PyTorch's own tests, a subset, torch {_torch}, Python {_python}",
        partial(versions.check_tests, _torch, _python),
    )
_STYLES = {"ok": "green", "FAILED": "bold red", "not run": "yellow"}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        for name, (title, _) in CHECKS.items():
            console.print(f"{name:<24} {title}", markup=False, highlight=False)
        return 0
    rows = _run(options.only or list(CHECKS), options)
    if options.json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        console.print(_table(rows))
        _explain(console, rows)
    return 1 if any(row.problem for row in rows) or not any(row.verdict == "ok" for row in rows) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m compat", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CHECKS, help="only these (names: --list)")
    parser.add_argument("--list", action="store_true", help="list the names and run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table; progress goes to stderr")
    parser.add_argument("--no-page", action="store_true", help="leave docs/compatibility.md as it is")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".compat", help="where the virtual environments are kept (%(default)s)"
    )
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="PATH", help="interpreters of other versions, beside those on PATH"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep every program's output and records here")
    return parser.parse_args(arguments)


def _run(names: list[str], options: argparse.Namespace) -> list[Row]:
    environments = Environments(options.cache.resolve(), options.python)
    console = Console(stderr=True)
    kept = options.keep.resolve() if options.keep else None
    rows = []
    with tempfile.TemporaryDirectory(prefix="lens-compat-") as temporary:
        for index, name in enumerate(names, start=1):
            _, check = CHECKS[name]
            folder = (kept or Path(temporary)) / name
            shutil.rmtree(folder, ignore_errors=True)
            begun = time.monotonic()
            with console.status(f"{index}/{len(names)} {name}"):
                row = check(environments, folder)
            took = f"{time.monotonic() - begun:.0f} s"
            console.print(f"{index}/{len(names)} {name}: {row.verdict}, {took}", markup=False, highlight=False)
            rows.append(row)
            if not options.no_page:
                write_table(PAGE, [row])
    return rows


def _table(rows: list[Row]) -> Table:
    table = Table(title="With lens-auto and without", title_justify="left", pad_edge=False, show_lines=True)
    for column in COLUMNS:
        table.add_column(column)
    table.add_column("", no_wrap=True, min_width=7)
    for row in rows:
        cells = [Text(cell.replace("`", "")) for cell in row.cells()]
        table.add_row(*cells, Text(row.verdict, style=_STYLES[row.verdict]))
    return table


def _explain(console: Console, rows: list[Row]) -> None:
    """What failed, whole, and one line that says how it went."""
    failed = [row for row in rows if row.problem]
    for row in failed:
        console.print(f"\n{row.program}: {row.problem}", style="bold red", markup=False, highlight=False)
    left_out = sum(1 for row in rows if row.unavailable)
    line = f"{len(rows) - len(failed) - left_out} of {len(rows)} are the same with lens-auto"
    if left_out:
        line += f"; {left_out} could not be run here"
    console.print(f"\n{line}", style="bold red" if failed else "bold green", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
