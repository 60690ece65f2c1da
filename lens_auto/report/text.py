"""The report as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lens_auto.recorder.read import Status
from lens_auto.report.summary import FAILED, PHASES, OperationSummary, RankSummary, Summary
from lens_auto.report.words import counted, duration, named, rate, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lens_auto.report.verdicts import Analysis

# Beyond this many ranks only those that did not close and the first few are shown.
_RANKS_SHOWN = 32
_PLAIN_WIDTH = 200
_STYLES = {
    **dict.fromkeys((Status.DIED.value, FAILED), "bold red"),
    Status.RUNNING.value: "green",
    Status.UNKNOWN.value: "yellow",
}


def console(*, stderr: bool = False) -> Console:
    """A console with colour on a terminal only; elsewhere wide enough that nothing wraps in a log."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=max(found.width, _PLAIN_WIDTH))


def render(summary: Summary, out: Console) -> None:
    """Print the report, the verdict first."""
    bad = bool(
        summary.missing_count or summary.dropped or any(r.state in (Status.DIED.value, FAILED) for r in summary.ranks)
    )
    out.print(Text(summary.verdict, style="bold red" if bad else "bold"), soft_wrap=True)
    for other in summary.findings[1:]:
        out.print(Text(f"also: {other.headline}; try: {other.advice}"), soft_wrap=True)
    if summary.findings:
        out.print(Text(summary.progress), soft_wrap=True)
    where = f"run {summary.run_id} in {summary.run_dir}"
    out.print(
        Text(where if summary.created is None else f"{where}, started {summary.created}", style="dim"), soft_wrap=True
    )
    if summary.ranks:
        shown = _shown(summary.ranks)
        _titled(out, "Ranks", _rank_table(shown))
        if len(shown) < len(summary.ranks):
            out.print(f"{len(summary.ranks) - len(shown)} more closed; --json has them all")
        for rank in shown:
            if rank.phase is not None:
                out.print(Text(f"rank {_rank(rank)} {_verb(rank)} {_last_seen(rank)}"), soft_wrap=True)
        _titled(out, "Share of each phase in the time of iterations", _phase_table(shown, summary))
    if summary.operations:
        _titled(out, "Communication", _operation_table(summary))
    if summary.programs:
        _titled(out, "Spans that programs made themselves", _program_table(summary))
    if len(summary.comparison.ranks) > 1:
        title = f"Own work and waiting, share of {summary.comparison.iterations:,} compared iterations"
        _titled(out, title, _work_table(summary))
    if summary.what_if:
        out.print()
        out.print(Text("What if (the recorded iterations replayed)", style="bold"))
        for each in summary.what_if:
            low, high = each.interval
            out.print(Text(f"{each.text}, 95 % interval {100 * low:.0f} to {100 * high:.0f} %"), soft_wrap=True)
    out.print()
    for line in footer(summary):
        out.print(Text(line), soft_wrap=True)


def _shown(ranks: list[RankSummary]) -> list[RankSummary]:
    if len(ranks) <= _RANKS_SHOWN:
        return ranks
    closed = [rank for rank in ranks if rank.state == Status.CLOSED.value][:_RANKS_SHOWN]
    return [rank for rank in ranks if rank.state != Status.CLOSED.value or rank in closed]


def _table(left: Iterable[str], right: Iterable[str] = (), last: Iterable[str] = ()) -> Table:
    """A table with columns of text, then of numbers, then of text."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    for name in last:
        table.add_column(name, overflow="fold")
    return table


def _titled(out: Console, title: str, table: Table) -> None:
    out.print()
    out.print(Text(title, style="bold"))
    out.print(table)


def _rank_table(ranks: list[RankSummary]) -> Table:
    table = _table(("rank", "state"), ("iterations", "median", "p99", "records", "dropped"), ("process",))
    for rank in ranks:
        times = rank.iterations
        table.add_row(
            _rank(rank),
            Text(rank.state, style=_STYLES.get(rank.state, "")),
            f"{times.count:,}",
            _optional_duration(times.median_ns),
            _optional_duration(times.p99_ns),
            f"{rank.records:,}",
            Text(f"{rank.dropped:,}", style="red" if rank.dropped else ""),
            Text(f"{rank.pid} on {rank.host}"),
        )
    return table


def _program_table(summary: Summary) -> Table:
    table = _table(("service", "process"), ("spans", "failed", "not sent", "log records"))
    for each in summary.programs:
        process = each.process if each.rank is None or each.rank < 0 else f"rank {each.rank}"
        table.add_row(
            Text(each.service or "-"),
            Text(process),
            f"{each.spans:,}",
            Text(f"{each.failed:,}", style="red" if each.failed else ""),
            Text(f"{each.unsent:,}", style="red" if each.unsent else ""),
            f"{each.log_records:,}",
        )
    return table


def _rank(rank: RankSummary) -> str:
    return str(rank.rank) if rank.rank >= 0 else "?"


def _optional_duration(ns: int | None) -> str:
    return "-" if ns is None else duration(ns)


def _verb(rank: RankSummary) -> str:
    return "is in" if rank.state == Status.RUNNING.value else "was last seen in"


def _last_seen(rank: RankSummary) -> str:
    text = "start-up" if rank.phase == "start_up" else f"{rank.phase} of iteration {rank.phase_iteration}"
    for each in rank.in_flight:
        seq = "" if each["seq"] is None else f" #{each['seq']}"
        group = f" on group {each['group']}" if each["group"] else ""
        peer = "" if each["peer"] is None else f" with rank {each['peer']}"
        text += f", {each['operation']}{seq}{group}{peer} for {duration(each['since_ns'])}"
    return text


def _phase_table(ranks: list[RankSummary], summary: Summary) -> Table:
    names = [phase.name.lower() for phase in PHASES]
    table = _table(("rank",), names)
    for rank in ranks:
        table.add_row(_rank(rank), *(f"{rank.phase_share[name]:.1%}" for name in names))
    if len(summary.ranks) > 1:
        table.add_row("all", *(f"{summary.phase_share[name]:.1%}" for name in names), style="bold")
    return table


def _work_table(summary: Summary) -> Table:
    names = [phase.name.lower() for phase in PHASES]
    names = [name for name in names if any(each.own.get(name) for each in summary.comparison.ranks)]
    table = _table(("rank",), (*names, "waits for others", "communicates", "not seen"))
    for each in summary.comparison.ranks[:_RANKS_SHOWN]:
        shares = [each.own.get(name, 0.0) for name in names]
        shares += (each.waiting, each.communication, each.unknown)
        table.add_row(str(each.rank), *(f"{share:.1%}" for share in shares))
    return table


def _operation_table(summary: Summary) -> Table:
    carried = any(each.bandwidth for each in summary.operations)
    columns = ("algorithm bandwidth", "bus bandwidth") if carried else ()
    table = _table(("operation",), ("count", "bytes", "median", "exposed", "share of iterations", *columns))
    for each in summary.operations:
        rates = (_rates(each, "algorithm"), _rates(each, "bus")) if carried else ()
        table.add_row(
            Text(each.operation),
            f"{each.count:,}",
            size(each.bytes),
            _optional_duration(each.median_ns),
            _optional_duration(each.exposed_ns),
            "-" if each.exposed_share is None else f"{each.exposed_share:.1%}",
            *rates,
        )
    return table


def _rates(operation: OperationSummary, which: str) -> str:
    """Its bandwidth; with the number of ranks where there are groups of several sizes."""
    found = operation.bandwidth
    several = len({each.group_size for each in found}) > 1
    ranks = [f" ({each.group_size} ranks)" if several else "" for each in found]
    return ", ".join(f"{rate(getattr(each, which))}{of}" for each, of in zip(found, ranks, strict=True)) or "-"


def footer(summary: Summary) -> list[str]:
    """What was dropped, guessed or switched off; one line each."""
    lines = [
        f"{counted(summary.records, 'record')}, {summary.dropped:,} dropped;"
        f" {counted(summary.mispredicted, 'iteration boundary')} mispredicted while recording (corrected here)"
    ]
    unfinished, damaged = (sum(getattr(rank, name) for rank in summary.ranks) for name in ("unfinished", "damaged"))
    if unfinished or damaged:
        lines.append(f"{unfinished:,} records begun and never finished, {damaged:,} damaged: left out")
    endless = sum(each.end_unknown for each in summary.operations)
    if endless:
        lines.append(
            f"{endless:,} asynchronous operations were never waited for: their end is unknown, no median has them"
        )
    if any(each.exposed_ns is None for each in summary.operations):
        lines.append("exposed - : device work was enqueued, the host's time does not tell")
    faults = sum(rank.hook_faults for rank in summary.ranks)
    if faults:
        lines.append(f"{faults:,} failures of hooks (the training program was not affected)")
    off: dict[tuple[str, str], list[int]] = {}
    for rank in summary.ranks:
        for hook, reason in rank.hooks_off.items():
            off.setdefault((hook, reason), []).append(rank.rank)
    lines += [f"hook {hook} switched itself off on {named(ranks)}: {reason}" for (hook, reason), ranks in off.items()]
    if summary.missing_count:
        more = "" if len(summary.missing_ranks) == summary.missing_count else " and more"
        lines.append(
            f"{named(summary.missing_ranks)}{more} missing: of {summary.world_size} ranks, no record of"
            f" {summary.missing_count} is in this run directory"
        )
    if len(summary.comparison.ranks) > 1:
        lines += _comparison_notes(summary.comparison)
    died = [rank.rank for rank in summary.ranks if rank.state == Status.DIED.value]
    if died:
        lines.append(f"{named(died)} died: not closed, and the process is gone")
    unknown = [rank.rank for rank in summary.ranks if rank.state == Status.UNKNOWN.value]
    if unknown:
        lines.append(f"{named(unknown)} did not close; whether it still runs can only be told on its own host")
    unsent, broken = (sum(getattr(each, name) for each in summary.programs) for name in ("unsent", "damaged_lines"))
    if unsent:
        lines.append(
            f"{unsent:,} spans of programs were not taken by the endpoint; they can be sent with: lens-auto recover"
            f" {summary.run_dir}"
        )
    if broken:
        lines.append(f"{broken:,} damaged lines in the files of programs: left out")
    return [*lines, *summary.problems]


def _comparison_notes(found: Analysis) -> list[str]:
    """How the ranks were compared, and what could not be known."""
    lines = []
    if found.span_ns:
        away = found.replayed_ns / found.span_ns - 1
        lines.append(
            f"replayed, the compared iterations take {abs(away):.1%} {'more' if away > 0 else 'less'} than recorded"
        )
    if found.warm_up_iterations:
        one = found.warm_up_iterations == 1
        lines.append(
            f"warm-up: the first {'iteration' if one else f'{found.warm_up_iterations} iterations'} took"
            f" {duration(found.warm_up_ns)} longer than usual and {'is' if one else 'are'} left out of the comparison"
        )
    for host in found.hosts[1:]:
        if host["uncertainty_ns"] is None:
            lines.append(f"clock of {host['host']}: no operation tells how far off it is; taken as it is")
        else:
            drifts = ", drifting" if host["drifts"] else ""
            lines.append(
                f"clock of {host['host']}: {duration(abs(host['offset_ns']))}"
                f" {'behind' if host['offset_ns'] > 0 else 'ahead'}, give or take {duration(host['uncertainty_ns'])}"
                f" (from {host['operations']:,} operations{drifts})"
            )
    return lines + found.notes


# --- lens-auto doctor -------------------------------------------------------------------------------------------------


def render_doctor(found: dict[str, Any], out: Console) -> None:
    """Print what `lens_auto.doctor.report` found, problems first."""
    problems = found.get("problems", [])
    if problems:
        out.print(Text(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}:", style="bold red"))
        for problem in problems:
            out.print(Text(f"  {problem}"), soft_wrap=True)
    else:
        state = "is disabled here" if found.get("disabled") else "would record a training program here"
        out.print(Text(f"No problem found: lens-auto {state}.", style="bold green"))
    for note in found.get("notes", []):
        out.print(Text(f"Note: {note}"), soft_wrap=True)
    packages = _table(("what", "version"))
    packages.add_row("python", str(found.get("python", "-")))
    for name, version in found.get("packages", {}).items():
        packages.add_row(Text(name), Text("not installed" if version is None else str(version)))
    _titled(out, "Environment", packages)
    out.print()
    distro = found.get("distro", {})
    loaded = distro.get("loaded")
    installed = ", ".join(distro.get("installed", [])) or "none"
    out.print(Text(f"Distro loaded by opentelemetry-instrument: {loaded or 'none'} (installed: {installed})"))
    places = found.get("places", {})
    for name, value in places.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        out.print(Text(f"{name}: {shown or 'none'}"), soft_wrap=True)
    for signal, names in found.get("sends", {}).items():
        nowhere = "nowhere" if signal == "metrics" else "the run directory"
        out.print(Text(f"{signal} of ranks go to: {', '.join(names) or nowhere}"), soft_wrap=True)
    settings = _table(("setting", "value", "from"))
    for each in found.get("settings", []):
        settings.add_row(Text(str(each["name"])), Text(str(each["value"])), Text(str(each["source"])))
    _titled(out, "Configuration", settings)
    patched = found.get("patched", {})
    if patched:
        table = _table(("instrumentor", "what"))
        for name, targets in patched.items():
            table.add_row(Text(name), Text(_by_module(targets) or "nothing"))
        _titled(out, "Would be patched", table)


def _by_module(targets: Iterable[str]) -> str:
    """Dotted names with each module named once."""
    names: dict[str, list[str]] = {}
    for target in targets:
        module, _, name = target.rpartition(".")
        names.setdefault(module, []).append(name)
    return "; ".join(f"{module}: {', '.join(found)}" if module else ", ".join(found) for module, found in names.items())
