"""What `make compat` takes for a failure, and the table that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compat.child import Ended
from compat.environment import Environment, Environments, Unavailable
from compat.frameworks import problem
from compat.row import BEGIN, END, Row, write_table
from compat.torch_tests import Compared


def ended(
    status: int | None = 0, *, steps: int = 12, evaluations: int = 3, number: float = 1.5, ranks: int = 2
) -> Ended:
    results = {
        f"rank{rank}": {"steps": steps, "evaluations": evaluations, "numbers": [number.hex()]} for rank in range(ranks)
    }
    return Ended(status, ["Traceback", "ValueError: no", "bye"], results, Path("run"))


@pytest.mark.parametrize(
    ("bare", "instrumented", "found", "says"),
    [
        (ended(), ended(), [(12, 3)] * 2, ""),
        (ended(1), ended(), [(12, 3)] * 2, "bare: exit status 1: ValueError: no"),
        (ended(), ended(None), [(12, 3)] * 2, "instrumented: ran out of time: ValueError: no"),
        (ended(steps=0), ended(steps=0), [(0, 3)] * 2, "it trained nothing, or not on 2 ranks: 0 + 3 eval on 2 ranks"),
        (ended(ranks=1), ended(ranks=1), [(12, 3)], "it trained nothing, or not on 2 ranks: 12 + 3 eval on 1 ranks"),
        (ended(), ended(number=1.5000000000000002), [(12, 3)] * 2, "steps or numbers differ"),
        (ended(), ended(), [(24, 3)] * 2, "reported 12 + 3 eval on 2 ranks, found 24 + 3 eval on 2 ranks"),
        (ended(), ended(), [(12, 2)] * 2, "reported 12 + 3 eval on 2 ranks, found 12 + 2 eval on 2 ranks"),
        (ended(), ended(), [(12, 3)], "reported 12 + 3 eval on 2 ranks, found 12 + 3 eval on 1 ranks"),
        (ended(), ended(), [], "reported 12 + 3 eval on 2 ranks, found nothing"),
    ],
)
def test_what_a_framework_must_do(
    bare: Ended, instrumented: Ended, found: list[tuple[int, int | None]], says: str
) -> None:
    said = problem(2, bare, instrumented, found)
    assert said == says if not says or "differ" not in says else said.startswith(says)


def outcomes(**of: str) -> dict[str, dict[str, Any]]:
    return {
        name: {"outcome": outcome, "why": "AssertionError: 1 != 2\nhint", "seconds": 1} for name, outcome in of.items()
    }


@pytest.mark.parametrize(
    ("bare", "instrumented", "records", "says"),
    [
        ([outcomes(a="passed", b="skipped")], outcomes(a="passed", b="skipped"), 1, ""),
        ([outcomes(a="passed")], outcomes(a="passed"), 0, "nothing was recorded"),
        (
            [outcomes(a="passed", b="passed")],
            outcomes(a="passed", b="failed"),
            1,
            "1 outcomes changed: b: bare passed, now failed: AssertionError: 1 != 2",
        ),
        (
            [outcomes(a="passed", b="failed")],
            outcomes(a="passed"),
            1,
            "1 outcomes changed: b: bare failed, now did not run",
        ),
        # Flaky without us: either outcome is as bare.
        ([outcomes(a="passed", b="passed"), outcomes(a="passed", b="failed")], outcomes(a="passed", b="failed"), 1, ""),
        ([outcomes(a="skipped")], outcomes(a="skipped"), 1, "no test passes without lens-auto"),
    ],
)
def test_what_pytorchs_tests_must_do(
    bare: list[dict[str, dict[str, Any]]], instrumented: dict[str, dict[str, Any]], records: int, says: str
) -> None:
    assert Compared(bare, instrumented, 2, records).failure() == says


def test_rows_replace_their_own_and_keep_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    write_table(page, [Row("one", "1", "passes", "passes", "2", "2"), Row("two", "1", problem="a | b\nc")])
    write_table(page, [Row("one", "2", unavailable="no Python 3.99 here"), Row("three")])
    assert page.read_text().splitlines() == [
        "before",
        BEGIN,
        "| program | version | bare | instrumented | reported | found |",
        "|---|---|---|---|---|---|",
        "| one | 2 | not run: no Python 3.99 here | - | - | - |",
        "| two | 1 | - | FAILED: a \\| b c | - | - |",
        "| three | - | - | - | - | - |",
        END,
        "after",
    ]
    page.write_text("no place")
    with pytest.raises(ValueError, match="has nowhere to go"):
        write_table(page, [Row("one")])


def test_an_interpreter_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no Python 3\.99 here"):
        Environments(tmp_path, ["/nowhere/python"]).prepare(Environment("none", (), python="3.99"))
