"""Measures what lens-auto costs and holds it against its budgets.

Exits with 1 where a budget is missed, could not be measured, or where the machine is too busy to tell.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from benchmarks import carrier, exporter, helpers, hooks, memory, startup, training
from benchmarks.budget import BUDGETS, BY_NAME, Budget, Measurement, as_json, quantity, verdict
from benchmarks.child import ChildError

GROUPS: tuple[tuple[str, ModuleType], ...] = (
    ("hooks", hooks),
    ("helpers", helpers),
    ("start-up", startup),
    ("memory", memory),
    ("exporter", exporter),
    ("training", training),
    ("carrier", carrier),
)
FAILURES = ("MISSED", "UNCLEAR", "FAILED")
_STYLES = {
    "ok": "green",
    "UNCLEAR": "bold yellow",
    "MISSED": "bold red",
    "FAILED": "bold red",
    "not measured yet": "dim",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parse(arguments)
    # A log has no line to draw over; 120 columns keep the table whole there.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.list:
        console.print(_list())
        return 0
    wanted = [each for each in BUDGETS if not options.only or each.name in options.only]
    found = _measure(wanted, options.quick)
    if options.json:
        print(json.dumps([as_json(each, found.get(each.name)) for each in wanted], indent=2))
    else:
        console.print(_table(wanted, found))
        _explain(console, wanted, found)
    return 1 if any(verdict(each, found.get(each.name)) in FAILURES for each in wanted) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="Every figure is a difference or a ratio inside one run, measured in turns. How to read them:"
        " benchmarks/README.md",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=BY_NAME, help="measure only these budgets (names: --list)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats and shorter runs: about a minute, less sure"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table; progress goes to stderr")
    parser.add_argument("--list", action="store_true", help="list the budgets and measure nothing")
    return parser.parse_args(arguments)


def _measure(wanted: list[Budget], quick: bool) -> dict[str, Measurement]:
    """Measures group by group; a group that fails takes only its own rows with it."""
    names = frozenset(each.name for each in wanted if each.measured)
    needed = [(label, module) for label, module in GROUPS if names & frozenset(module.NAMES)]
    found: dict[str, Measurement] = {}
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        for label, module in needed:
            task = bars.add_task(label, total=1.0)
            begun = time.monotonic()

            def tell(share: float, task: object = task) -> None:
                bars.update(task, completed=share)  # type: ignore[arg-type]

            found.update(_measure_group(module, names, quick, tell))
            bars.update(task, completed=1.0)
            if not console.is_terminal:
                console.print(f"{label}: {time.monotonic() - begun:.0f} s")
    return found


def _measure_group(
    module: ModuleType, names: frozenset[str], quick: bool, progress: Callable[[float], None]
) -> dict[str, Measurement]:
    own = names & frozenset(module.NAMES)
    try:
        measured: dict[str, Measurement] = module.measure(own, quick, progress)
    except ChildError as error:
        return {name: Measurement(None, problem=str(error)) for name in own}
    return {name: each for name, each in measured.items() if name in own}


def _list() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("budget", justify="right", no_wrap=True)
    table.add_column("what")
    for each in BUDGETS:
        table.add_row(each.name, _limit(each), each.what + ("" if each.measured else " (not measured yet)"))
    return table


def _limit(budget: Budget) -> str:
    return "-" if budget.limit is None else f"<= {quantity(budget.limit, budget.unit)}"


def _table(wanted: list[Budget], found: dict[str, Measurement]) -> Table:
    table = Table(title="What lens-auto costs", title_justify="left", pad_edge=False, show_lines=True)
    table.add_column("what")
    table.add_column("budget", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in wanted:
        measured = found.get(each.name)
        said = verdict(each, measured)
        text = Text(each.what)
        if measured is not None and (measured.detail or measured.problem):
            text.append("\n" + (measured.detail or measured.problem), style="dim")
        value = quantity(measured.value, each.unit) if measured is not None else "-"
        table.add_row(text, _limit(each), value, Text(said, style=_STYLES.get(said, "")))
    return table


def _explain(console: Console, wanted: list[Budget], found: dict[str, Measurement]) -> None:
    """Where the time goes, of all rows that tell, and one line that says how it went."""
    missed = [each for each in wanted if verdict(each, found.get(each.name)) in FAILURES]
    shown: list[list[str]] = []
    for each in wanted:
        measured = found.get(each.name)
        if measured is None or not measured.profile or measured.profile in shown:
            continue
        shown.append(measured.profile)
        console.print(f"\n{each.name}: where it goes", style="bold")
        for line in measured.profile:
            console.print(f"  {line}", markup=False, highlight=False)
    held = [each for each in wanted if verdict(each, found.get(each.name)) == "ok"]
    line = f"{len(held)} of {len(held) + len(missed)} budgets are met"
    for each in missed:
        measured = found.get(each.name)
        if measured is None or measured.value is None or each.limit is None:
            line += f"; {each.name} could not be measured"
            continue
        over = measured.value - each.limit
        by = f"{quantity(abs(over), each.unit)} {'too much' if over > 0 else 'below'}"
        if verdict(each, measured) == "UNCLEAR":
            noise = quantity(measured.width, each.unit)
            line += f"; {each.name} cannot be told, {by} in noise of {noise}: run it again when the machine is quiet"
        else:
            line += f"; {each.name} by {by}"
    console.print(f"\n{line}", style="bold red" if missed else "bold green", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
