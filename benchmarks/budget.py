"""The budgets, and how a measurement is held against its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Budget:
    """One row of the table.

    Attributes:
        name: what `--only` takes.
        what: the row's text.
        limit: the most that is allowed; None: only shown.
        unit: `us`, `ms`, `MB` (10^6 bytes) or `x` (a ratio).
        measured: False for what no benchmark measures yet; it is listed, and never fails.
    """

    name: str
    what: str
    limit: float | None
    unit: str
    measured: bool = True


@dataclass
class Measurement:
    """What was found for one budget.

    Attributes:
        value: in the budget's unit; None where it could not be measured.
        detail: one line that says how sure that is and what it is made of.
        profile: lines that explain a miss; empty where there was none.
        problem: why it could not be measured.
        width: of the 95 % interval, in the budget's unit; 0 where noise does not matter.
    """

    value: float | None
    detail: str = ""
    profile: list[str] = field(default_factory=list)
    problem: str = ""
    width: float = 0.0


BUDGETS: tuple[Budget, ...] = (
    Budget("hook-off", "a hook, its group and the hang watch off, over the bare call", 0.15, "us"),
    Budget(
        "hook-watch",
        "a hook on a collective, its group off, the hang watch on (default), over the bare call",
        1.5,
        "us",
    ),
    Budget("hook-on", "a hook on a collective, its group on, over the bare call", 3.0, "us"),
    Budget("hook-vs-span", "the same, over an SDK span's start and end (5 attributes, no-op processor)", 1 / 7, "x"),
    Budget(
        "wait-watch",
        "Work.wait inside a blocking collective (gloo), group off, watch on, over the bare wait",
        None,
        "us",
    ),
    Budget("managed-span-off", "managed_span, its group off, over no span", 0.5, "us"),
    Budget("trace-fn-off", "a function under trace_fn, its group off, over the bare function", 0.2, "us"),
    Budget("ddp-per-step", "DDP training, 2 ranks, per_step, iteration time over off", 1.02, "x"),
    Budget("ddp-all", "the same, all, with 200 small collectives an iteration", 1.05, "x"),
    Budget("start-up", "start-up of a program without torch, over plain opentelemetry-instrument", 30.0, "ms"),
    Budget("memory", "resident memory of a rank, over uninstrumented", 40.0, "MB"),
    Budget("memory-growth", "its growth over the last half of the run", 10.0, "MB"),
    Budget(
        "carrier",
        "carrier: time taken from the training thread, over two blocking broadcasts",
        1 / 10,
        "x",
    ),
    Budget("exporter", "exporter process: CPU per span, over SDK span and stock encoder", 1 / 2, "x"),
    Budget("exporter-http", "the same over OTLP/HTTP", 1 / 2, "x"),
    Budget("exporter-training", "iteration time while the endpoint refuses, over the exporter stopped", 1.02, "x"),
    Budget("exporter-memory", "exporter process: resident memory with a backlog, over a bare Python", 120.0, "MB"),
)
BY_NAME = {each.name: each for each in BUDGETS}


def allowance(budget: Budget) -> float:
    """How much the budget allows: of a ratio to the uninstrumented time, what is above 1."""
    if budget.limit is None:
        return float("inf")
    return budget.limit - 1 if budget.limit > 1 and budget.unit == "x" else budget.limit


def verdict(budget: Budget, measured: Measurement | None) -> str:
    """How the row stands.

    Returns:
        `ok`; `MISSED`; `UNCLEAR` where the interval is wider than all that the budget allows and holds the budget;
        `FAILED` where it could not be measured; `not measured yet`; `-` for a row that has no budget.
    """
    if not budget.measured:
        return "not measured yet"
    if measured is None or measured.value is None:
        return "FAILED"
    if budget.limit is None:
        return "-"
    if measured.width > allowance(budget) and abs(measured.value - budget.limit) < measured.width:
        return "UNCLEAR"
    return "ok" if measured.value <= budget.limit else "MISSED"


def quantity(value: float | None, unit: str) -> str:
    """A value with its unit, with as many digits as mean something."""
    if value is None:
        return "-"
    digits = {"us": 2, "ms": 1, "MB": 1, "x": 3}[unit]
    return f"{value:.{digits}f} {unit}"


def as_json(budget: Budget, measured: Measurement | None) -> dict[str, Any]:
    """One row for `--json`."""
    return {**asdict(budget), **asdict(measured or Measurement(None)), "verdict": verdict(budget, measured)}
