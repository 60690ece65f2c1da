"""The Grafana dashboard, as code: `python observability/dashboards.py` writes `grafana/dashboards/training.json`.

Its queries are written from the names of the metrics in `lens_auto.instruments.training`, as Prometheus has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lens_auto import semconv
from lens_auto.instruments import training

FILE = Path(__file__).parent / "grafana" / "dashboards" / "training.json"
DATA_SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 24, 8  # of the page and of a panel, in Grafana's grid

_UNITS = {"s": "seconds", "By": "bytes", "{sample}/s": "per_second", "{token}/s": "per_second"}


def series(name: str, part: str = "") -> str:
    """A metric as Prometheus has it, of the chosen run and ranks.

    Args:
        name: as OpenTelemetry has it.
        part: of a histogram: `bucket`, `sum` or `count`.
    """
    if name in training.HISTOGRAMS:
        suffix = f"_{_UNITS[training.HISTOGRAMS[name][0]]}_{part}"
    elif name in training.GAUGES:
        suffix = f"_{_UNITS[training.GAUGES[name][0]]}"
    else:
        suffix = "_total"
    return f'{label(name)}{suffix}{{nemo_run_id=~"$run",{RANK}=~"$rank"}}'


def label(name: str) -> str:
    """An attribute or metric name as Prometheus has it."""
    return name.replace(".", "_")


RANK = label(semconv.DL_RANK)
OPERATION = label(training.COMM_OPERATION)


def rate(name: str, part: str = "", by: str = "") -> str:
    """A metric's growth in a second, summed up."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({series(name, part)}[$__rate_interval]))"


def mean(name: str, by: str) -> str:
    """The mean of a histogram's values."""
    return f"{rate(name, 'sum', by)} / {rate(name, 'count', by)}"


def quantile(share: float, name: str, by: str) -> str:
    """A quantile of a histogram's values, as its buckets tell it."""
    return f"histogram_quantile({share}, {rate(name, 'bucket', f'le, {by}')})"


class Query(NamedTuple):
    """A query of a panel, and how its lines are called."""

    text: str
    legend: str


class Panel(NamedTuple):
    """A panel of the dashboard."""

    title: str
    says: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = WIDTH // 2
    stacked: bool = False


_PHASES = {
    "data loading": training.DATA_LOADING_DURATION,
    "forward": training.FORWARD_DURATION,
    "backward": training.BACKWARD_DURATION,
    "optimizer": training.OPTIMIZER_DURATION,
}


def _phase_shares() -> tuple[Query, ...]:
    whole = rate(training.ITERATION_DURATION, "sum")
    parts = [Query(f"{rate(name, 'sum')} / {whole}", title) for title, name in _PHASES.items()]
    known = " + ".join(f"({rate(name, 'sum')} or vector(0))" for name in _PHASES.values())
    return (*parts, Query(f"1 - ({known}) / {whole}", "other"))


PANELS = (
    Panel(
        "Iteration time by rank",
        "The mean. Ranks that wait for each other take the same time: the report's table of own work says who is slow.",
        "s",
        (Query(mean(training.ITERATION_DURATION, RANK), f"rank {{{{{RANK}}}}}"),),
    ),
    Panel(
        "Slow iterations by rank",
        "99 of 100 iterations are at most as long, as far as buckets tell.",
        "s",
        (Query(quantile(0.99, training.ITERATION_DURATION, RANK), f"rank {{{{{RANK}}}}}"),),
    ),
    Panel(
        "Share of each phase",
        "Of the time of iterations, all ranks together.",
        "percentunit",
        _phase_shares(),
        stacked=True,
    ),
    Panel(
        "Backward by rank",
        "The mean for an iteration. It holds the waiting for other ranks, too.",
        "s",
        (Query(mean(training.BACKWARD_DURATION, RANK), f"rank {{{{{RANK}}}}}"),),
    ),
    Panel(
        "Communication by operation",
        "Time in operations for each second, all ranks together; those that overlap count each.",
        "s",
        (Query(rate(training.COMM_DURATION, "sum", OPERATION), f"{{{{{OPERATION}}}}}"),),
    ),
    Panel(
        "Slow operations",
        "99 of 100 are at most as long.",
        "s",
        (Query(quantile(0.99, training.COMM_DURATION, OPERATION), f"{{{{{OPERATION}}}}}"),),
    ),
    Panel(
        "Bytes by operation",
        "Given to operations in a second, all ranks together.",
        "Bps",
        (Query(rate(training.COMM_SIZE, "sum", OPERATION), f"{{{{{OPERATION}}}}}"),),
    ),
    Panel(
        "Operations in a second",
        "All ranks together.",
        "ops",
        (Query(rate(training.COMM_SIZE, "count", OPERATION), f"{{{{{OPERATION}}}}}"),),
    ),
    Panel(
        "Iterations and batches in a second",
        "Of one rank, on average.",
        "short",
        tuple(
            Query(f"avg (sum by ({RANK}) (rate({series(name)}[$__rate_interval])))", title)
            for title, name in (("iterations", training.ITERATIONS), ("batches", training.BATCHES))
        ),
    ),
    Panel(
        "Samples in a second",
        "All ranks together, where loaders say their batch size.",
        "short",
        (Query(f"sum ({series(training.SAMPLES_PER_SECOND)})", "samples"),),
    ),
    Panel(
        "Dropped records by rank",
        "Records that found no room, in the time shown. Anything above zero: spans are missing.",
        "short",
        (Query(f"sum by ({RANK}) (increase({series(training.RECORDS_DROPPED)}[$__range]))", f"rank {{{{{RANK}}}}}"),),
        kind="bargauge",
    ),
    Panel(
        "Ranks that send metrics",
        "",
        "short",
        (Query(f"count (sum by (nemo_run_id, {RANK}) ({series(training.ITERATIONS)}))", "ranks"),),
        kind="stat",
    ),
)


def variable(name: str, title: str, attribute: str, within: str) -> dict[str, Any]:
    """A choice at the top of the page: the values of a label."""
    query = f"label_values({within}, {attribute})"
    return {
        "name": name,
        "label": title,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",  # also without the label: metrics that Prometheus fetched from an exporter process itself
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 4,
    }


def panel(number: int, made: Panel, x: int, y: int) -> dict[str, Any]:
    """A panel in Grafana's form."""
    custom = {"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}} if made.stacked else {}
    defaults: dict[str, Any] = {"unit": made.unit, "min": 0, "custom": custom}
    if made.kind == "bargauge":
        steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    options: dict[str, Any] = {}
    if made.kind == "timeseries":
        options = {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"showLegend": True, "placement": "bottom"}}
    return {
        "id": number,
        "type": made.kind,
        "title": made.title,
        "description": made.says,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": x, "y": y, "w": made.width, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": query.text,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(made.queries)
        ],
    }


def place(panels: Iterable[Panel]) -> list[dict[str, Any]]:
    """Row by row, from the left."""
    placed, x, y = [], 0, 0
    for number, each in enumerate(panels, 1):
        if x + each.width > WIDTH:
            x, y = 0, y + HEIGHT
        placed.append(panel(number, each, x, y))
        x += each.width
    return placed


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's form."""
    iterations = f"{label(training.ITERATIONS)}_total"
    return {
        "uid": "lens-auto-training",
        "title": "Training",
        "tags": ["lens-auto"],
        "schemaVersion": 41,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                variable("run", "Run", "nemo_run_id", iterations),
                variable("rank", "Rank", RANK, f'{iterations}{{nemo_run_id=~"$run"}}'),
            ]
        },
        "links": [{"title": "Traces", "type": "link", "url": "http://127.0.0.1:16686", "targetBlank": True}],
        "panels": place(PANELS),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
