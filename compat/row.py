"""One line of the result, and the table in `docs/compatibility.md` that the lines become."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COLUMNS = ("program", "version", "bare", "instrumented", "reported", "found")


@dataclass(frozen=True)
class Row:
    """How a program did.

    Attributes:
        program: what it is.
        version: of it and what it ran on.
        bare: how it ended without us.
        instrumented: how it ended with us, all span groups on.
        reported: iterations and evaluations that it counted itself.
        found: those that were recorded.
        problem: why this is a failure; empty where it is none.
        unavailable: why it did not run at all.
    """

    program: str
    version: str = "-"
    bare: str = "-"
    instrumented: str = "-"
    reported: str = "-"
    found: str = "-"
    problem: str = ""
    unavailable: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `FAILED` or `not run`."""
        return "FAILED" if self.problem else "not run" if self.unavailable else "ok"

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "verdict": self.verdict}

    def cells(self) -> tuple[str, ...]:
        """What the table says, in the order of `COLUMNS`."""
        if self.unavailable:
            return (self.program, self.version, f"not run: {self.unavailable}", "-", "-", "-")
        instrumented = f"FAILED: {self.problem}" if self.problem else self.instrumented
        return (self.program, self.version, self.bare, instrumented, self.reported, self.found)


def write_table(page: Path, rows: list[Row]) -> None:
    """Put rows into the page's table; those of other programs, from earlier runs, stay.

    Raises:
        ValueError: the page has no place for a table.
    """
    text = page.read_text(encoding="utf-8")
    place = re.search(f"{BEGIN}\n(.*){END}", text, re.DOTALL)
    if place is None:
        raise ValueError(f"{page} has no {BEGIN} and {END}: the table has nowhere to go")
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in place[1].splitlines()[2:]}
    for row in rows:
        cells = [re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row.cells()]
        lines[cells[0]] = f"| {' | '.join(cells)} |"
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    table = "\n".join([*head, *lines.values()])
    page.write_text(f"{text[: place.start()]}{BEGIN}\n{table}\n{text[place.end() - len(END) :]}", encoding="utf-8")
