"""The report as one HTML file that needs no network: verdict, heat map, phases, what if, communication, timeline."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from lens_auto.recorder.layout import Flag, Kind, Phase
from lens_auto.report.match import attempts, match
from lens_auto.report.points import Source
from lens_auto.report.summary import PHASES, Summary
from lens_auto.report.text import footer
from lens_auto.report.verdicts import Judge, without_warm_up
from lens_auto.report.words import duration, percent, rate, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from lens_auto.report.load import LoadedWriter
    from lens_auto.report.match import Matched

_PAGE = Path(__file__).with_name("page.html")
# What a page shows of a run, however large that is.
_HEAT_COLUMNS = 1200
_HEAT_RANKS = 256
_BARS = 6000
_CHOSEN = 6

_COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV, Kind.PIPELINE_SEND, Kind.PIPELINE_RECV)


class MissingPlotly(ValueError):
    """plotly, which draws the pictures, is not installed; the message is one line."""


def page(
    summary: Summary,
    loaded: Sequence[LoadedWriter],
    iterations: Sequence[int] | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> bytes:
    """The whole file.

    Args:
        summary: the report.
        loaded: the writers that it is of.
        iterations: numbers of the iterations in the timeline; None: an ordinary one, the slowest, the most uneven.
        on_progress: told that another writer was read for the timeline.

    Raises:
        MissingPlotly: the library that draws is not installed.
        ValueError: an iteration is asked for that the run does not have.
    """
    try:
        library: bytes = importlib.import_module("plotly.offline").get_plotlyjs().encode()
    except ImportError:
        raise MissingPlotly("plotly is not installed; pip install 'nemo-lens-auto[report]' adds it") from None
    tries = attempts(loaded)
    matches = [match(writers) for writers in tries]
    matched = max(matches, key=lambda each: float(each.span_ns.sum()), default=None)
    data = _data(summary, matched, iterations, on_progress)
    # Nothing in the data may end the element that it is in.
    encoded = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY).replace(b"<", b"\\u003c")
    template = _PAGE.read_bytes()
    title = re.sub(r"[<>&]", " ", f"{summary.run_id} - lens-auto").encode()
    parts = re.split(rb"\{\{(title|library|data)\}\}", template)
    values = {b"title": title, b"library": library.replace(b"</script", b"<\\/script"), b"data": encoded}
    return b"".join(values[part] if index % 2 else part for index, part in enumerate(parts))


def _data(
    summary: Summary, matched: Matched | None, iterations: Sequence[int] | None, on_progress: Callable[[float], None]
) -> dict[str, Any]:
    times = summary.iterations
    comparison = summary.comparison
    facts = [
        ["ranks", f"{len({rank.rank for rank in summary.ranks})} of {summary.world_size}"],
        ["iterations", f"{max((rank.iterations.count for rank in summary.ranks), default=0):,}"],
        ["median iteration", "-" if times.median_ns is None else duration(times.median_ns)],
        ["99th percentile", "-" if times.p99_ns is None else duration(times.p99_ns)],
    ]
    if len(comparison.ranks) > 1:
        waiting = sum(each.waiting for each in comparison.ranks) / len(comparison.ranks)
        facts.append(["waiting for others", percent(waiting)])
    if summary.goodput is not None:
        facts.append(["time in iterations", percent(summary.goodput.goodput)])
    found: dict[str, Any] = {
        "verdict": summary.verdict,
        "progress": summary.progress if summary.findings else "",
        "run": summary.run_id,
        "where": summary.run_dir,
        "created": summary.created,
        "facts": facts,
        "findings": [
            {**dataclasses.asdict(each), "share": percent(each.effect), "cost": duration(each.cost_ns)}
            for each in summary.findings
        ],
        "phases": [phase.name.lower() for phase in PHASES],
        "ranks": [
            {
                "rank": each.rank,
                "state": each.state,
                "iterations": each.iterations.count,
                "median": "-" if each.iterations.median_ns is None else duration(each.iterations.median_ns),
                "p99": "-" if each.iterations.p99_ns is None else duration(each.iterations.p99_ns),
                "records": each.records,
                "dropped": each.dropped,
                "process": f"{each.pid} on {each.host}",
            }
            for each in summary.ranks
        ],
        "work": [dataclasses.asdict(each) for each in comparison.ranks[:_HEAT_RANKS]],
        "shares": [{"rank": each.rank, "own": each.phase_share} for each in summary.ranks[:_HEAT_RANKS]],
        "whatIf": [
            {"text": each.text, "saves": each.saves, "interval": each.interval, "all": each.rank is None}
            for each in summary.what_if
        ],
        "operations": [
            {
                "operation": each.operation,
                "count": f"{each.count:,}",
                "bytes": size(each.bytes),
                "median": "-" if each.median_ns is None else duration(each.median_ns),
                "exposed": "-" if each.exposed_ns is None else duration(each.exposed_ns),
                "share": "-" if each.exposed_share is None else percent(each.exposed_share),
                "bus": ", ".join(f"{rate(one.bus)} ({one.group_size} ranks)" for one in each.bandwidth) or "-",
            }
            for each in summary.operations
        ],
        "notes": footer(summary),
        "heat": None,
        "timeline": [],
    }
    if matched is not None and matched.writers:
        found["heat"] = _heat(matched)
        found["timeline"] = _timeline(matched, _chosen(matched, iterations), on_progress)
    return found


# --- heat map ---------------------------------------------------------------------------------------------------------


def _heat(matched: Matched) -> dict[str, Any]:
    """Iteration time and own work of each rank (rows) in each iteration, or group of iterations (columns); ms."""
    writers = matched.writers[:_HEAT_RANKS]
    count = max((len(each.iterations) for each in writers), default=0)
    group = max(1, -(-count // _HEAT_COLUMNS))
    columns = -(-count // group)
    time = np.full((len(writers), columns * group), np.nan)
    for row, each in enumerate(writers):
        time[row, : len(each.iterations)] = each.iterations.training_ns / 1e6
    own = np.full((len(writers), columns * group), np.nan)
    if len(matched.iteration):
        judge = Judge(matched)
        training = [phase for phase in Phase if phase not in (Phase.CHECKPOINT, Phase.EVALUATE)]
        work = matched.by_iteration(judge.own[:, : len(writers), training].sum(axis=2)) / 1e6
        inside = matched.iteration < count
        own[:, matched.iteration[inside]] = work[inside].T
    return {
        "ranks": [each.writer.info.rank for each in writers],
        "group": group,
        "time": _grouped(time, group),
        "own": _grouped(own, group),
    }


def _grouped(values: npt.NDArray[np.float64], group: int) -> list[list[float | None]]:
    """Means of groups of columns, to four digits; None where nothing is known."""
    parts = values.reshape(len(values), -1, group)
    known = np.isfinite(parts)
    total = np.where(known, parts, 0).sum(axis=2)
    counts = known.sum(axis=2)
    means = np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
    return [[float(f"{value:.4g}") if np.isfinite(value) else None for value in row] for row in means.tolist()]


# --- timeline ---------------------------------------------------------------------------------------------------------


def _chosen(matched: Matched, iterations: Sequence[int] | None) -> list[tuple[str, int]]:
    """Iterations to draw, each with why."""
    common = min((len(each.iterations) for each in matched.writers), default=0)
    if iterations is not None:
        if len(iterations) > _CHOSEN:
            raise ValueError(
                f"{len(iterations)} iterations are more than the {_CHOSEN} that a page shows; nothing is written"
            )
        for number in iterations:
            if not 0 <= number < common:
                raise ValueError(f"iteration {number} is not in this run; all ranks have 0 to {common - 1}")
        return [(f"iteration {number}", number) for number in iterations]
    calm = without_warm_up(matched)[0]
    if not len(calm.iteration):
        return [("the first iteration", 0)] if common else []
    order = np.argsort(calm.span_ns, kind="stable")
    found = [("an ordinary iteration", int(calm.iteration[order[len(order) // 2]]))]
    found.append(("the longest iteration", int(calm.iteration[order[-1]])))
    if calm.meets:
        waits = calm.by_iteration(calm.wait_ns).max(axis=1)
        usual = np.abs(calm.span_ns - np.median(calm.span_ns)) <= 0.5 * np.median(calm.span_ns)
        found.append(
            ("the most uneven one of ordinary length", int(calm.iteration[np.argmax(np.where(usual, waits, -1))]))
        )
    unique = {number: (why, number) for why, number in reversed(found)}
    return [each for each in found if unique.pop(each[1], None) is not None]


def _timeline(
    matched: Matched, chosen: list[tuple[str, int]], on_progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    pictures: list[dict[str, Any]] = [
        {"why": why, "iteration": number, "bars": [], "arrows": [], "left_out": 0} for why, number in chosen
    ]
    writers = matched.writers[:_HEAT_RANKS]
    ends: list[dict[tuple[Any, ...], tuple[int, int]]] = [{} for _ in chosen]  # sends, by what names them
    receives: list[list[tuple[tuple[Any, ...], int, int]]] = [[] for _ in chosen]
    for row, each in enumerate(writers):
        shift = _to_common(matched, each)
        records = each.writer.records()
        start_ns = records.data["start_ns"].astype(np.int64)
        for index, (picture, (_, number)) in enumerate(zip(pictures, chosen, strict=True)):
            begin, end = int(each.iterations.start_ns[number]), int(each.iterations.end_ns[number])
            picture.setdefault("from", shift(begin))
            picture["from"] = min(picture["from"], shift(begin))
            _phase_bars(picture, row, each, number, shift)
            rows = np.flatnonzero((start_ns >= begin) & (start_ns < end))
            _operation_bars(picture, row, each, records.data[rows], shift, ends[index], receives[index])
        on_progress(1)
    for picture, sends, received in zip(pictures, ends, receives, strict=True):
        for key, row, at in received:
            sent = sends.get(key)
            if sent is not None:
                picture["arrows"].append([sent[0], sent[1] - picture["from"], row, at - picture["from"]])
        for bar in picture["bars"]:
            bar[2] = round((bar[2] - picture["from"]) / 1e6, 4)
            bar[3] = round(bar[3] / 1e6, 4)
        for arrow in picture["arrows"]:
            arrow[1], arrow[3] = round(arrow[1] / 1e6, 4), round(arrow[3] / 1e6, 4)
        del picture["from"]
        picture["ranks"] = [each.writer.info.rank for each in writers]
    return pictures


def _to_common(matched: Matched, each: LoadedWriter) -> Callable[[int], int]:
    """From a writer's monotonic time to wall clock time of the first rank's host."""
    info = each.writer.info
    reference = next(other.writer.info for other in matched.writers if other.writer.info.host == info.host)
    clock = matched.hosts.get(info.host)

    def convert(time_ns: int) -> int:
        wall = reference.clock.wall(time_ns)
        return wall if clock is None else int(clock.shift(np.array([wall], dtype=np.int64))[0])

    return convert


def _phase_bars(picture: dict[str, Any], row: int, each: LoadedWriter, number: int, shift: Any) -> None:
    """What the training thread was in; what of a backward was waiting is drawn as that where it is known."""
    tiles = each.iterations.tiles
    points = each.work.points
    told = points[(points["iteration"] == number) & (points["source"] == Source.REDUCER)]
    for tile in tiles[tiles["iteration"] == number]:
        start, end, phase = int(tile["start_ns"]), int(tile["end_ns"]), int(tile["phase"])
        inside = (
            told[(told["arrival_ns"] > start) & (told["arrival_ns"] < end)] if phase == Phase.BACKWARD else told[:0]
        )
        cut = int(inside["arrival_ns"][0]) if len(inside) else end
        _bar(picture, row, Phase(phase).name.lower(), shift(start), cut - start, "")
        if cut < end:
            _bar(picture, row, "held", shift(cut), end - cut, "waits for others, and for the all-reduce of backward")


def _operation_bars(
    picture: dict[str, Any],
    row: int,
    each: LoadedWriter,
    data: npt.NDArray[np.void],
    shift: Any,
    sends: dict[tuple[Any, ...], tuple[int, int]],
    receives: list[tuple[tuple[Any, ...], int, int]],
) -> None:
    text = each.writer.string
    rank = each.writer.info.rank
    wanted = np.isin(data["kind"], (*_COMMUNICATION, Kind.WAIT, Kind.DDP)) & ((data["flags"] & Flag.FLIGHT) == 0)
    for record in data[wanted]:
        kind, name = int(record["kind"]), text(int(record["name"]))
        start, end = int(record["start_ns"]), max(int(record["end_ns"]), int(record["start_ns"]))
        if kind == Kind.DDP and name != "communication":
            continue
        label = "all-reduce of backward" if kind == Kind.DDP else name
        if kind in _COMMUNICATION and int(record["group"]):
            label += f" on group {text(int(record['group']))}"
        if int(record["seq"]) >= 0 and kind != Kind.WAIT:
            label += f" #{int(record['seq'])}"
        if int(record["bytes"]):
            label += f", {size(int(record['bytes']))}"
        peer = int(record["peer"])
        if peer >= 0:
            label += f", rank {peer}"
        _bar(picture, row, "communication", shift(start), end - start, label)
        if kind not in (Kind.SEND, Kind.RECV) or peer < 0 or int(record["flags"]) & Flag.AMBIGUOUS:
            continue
        pair = (rank, peer) if kind == Kind.SEND else (peer, rank)
        key = (text(int(record["group"])), int(record["init"]), *pair, int(record["tag"]), int(record["seq"]))
        if kind == Kind.SEND:
            sends[key] = (row, shift(start))
        else:
            receives.append((key, row, shift(end)))


def _bar(picture: dict[str, Any], row: int, what: str, start_ns: int, length_ns: int, label: str) -> None:
    if len(picture["bars"]) >= _BARS:
        picture["left_out"] += 1
        return
    picture["bars"].append([row, what, start_ns, length_ns, label])
