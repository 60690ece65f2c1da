"""The `lens-auto` command. What a subcommand needs is imported when it runs: `--help` and completion stay fast."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lens_auto.report.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lens_auto.recorder.read import RunDirectory

RUNS_FOLDER = "lens-runs"
PROGRESS_AFTER_S = 1.0

_BAD_INPUT = 2
_TAKE_FILES = ("report", "compare", "html")  # commands that also take OTLP/JSON lines
_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_BROKEN_PIPE = 141  # what a shell reports of a program that SIGPIPE ended

app = typer.Typer(
    name="lens-auto",
    help="Traces of a PyTorch training job that was recorded under opentelemetry-instrument.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_DIR",
        help=f"The run directory; by default the newest in ./{RUNS_FOLDER}.",
        show_default=False,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="The OTLP endpoint; by default what the OTEL_* variables name.",
        show_default=False,
    ),
]
Protocol = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        metavar="NAME",
        help="grpc or http/protobuf; by default OTEL_EXPORTER_OTLP_PROTOCOL, else by the port (4318: HTTP).",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from lens_auto import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def report(
    run_dir: RunDir = None,
    as_json: AsJson = False,
    sql: Annotated[
        str | None,
        typer.Option(
            "--sql",
            metavar="QUERY",
            help="Print the result of a query instead; tables: ranks, iterations, work, phases, operations, meetings,"
            " findings, what_if.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Say what slows a run down, and show where its iterations went, which ranks died, and what was lost."""
    from lens_auto.report.load import load
    from lens_auto.report.removed import removed
    from lens_auto.report.summary import summarize

    with _bad_input():
        run, problems = _open(run_dir, "report")
        with _progress("reading", len(run.writers)) as advance:
            loaded = load(run, advance)
        problems += removed((each.writer.info.raw for each in loaded), (each.records for each in loaded))
        summary = summarize(run, loaded, problems)
        if sql is not None:
            _query(sql, summary, loaded, as_json)
            return
    if as_json:
        _print_json(summary.to_json())
        return
    from lens_auto.report.text import console, render

    render(summary, console())


def _query(text: str, summary: Any, loaded: Any, as_json: bool) -> None:
    from lens_auto.report import tables
    from lens_auto.report.text import console

    names, rows = tables.Tables(summary, loaded).query(text)
    if as_json:
        _print_json([dict(zip(names, row, strict=True)) for row in rows])
    else:
        tables.render(names, rows, console())


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="The run directory to compare with.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run directory to look at.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show what became slower from run A to run B, where, and whether it is more than the noise."""
    from lens_auto.report import compare as comparing
    from lens_auto.report.load import load

    with _bad_input():
        sides, problems = [], []
        for path in (first, second):
            run, found = _open(path, "compare")
            with _progress("reading", len(run.writers)) as advance:
                sides.append((run.run_id, str(run.path), load(run, advance)))
            problems += [*found, *map(str, run.problems)]
        result = comparing.compare(sides[0], sides[1])
    result.notes += problems
    if as_json:
        _print_json(result.to_json())
        return
    from lens_auto.report.text import console

    comparing.render(result, console())


@app.command()
def html(
    run_dir: RunDir = None,
    to_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The file; by default <run id>.html here.", show_default=False
        ),
    ] = None,
    iterations: Annotated[
        str | None,
        typer.Option(
            "--iterations",
            metavar="N,...",
            help="Which to draw in the timeline, up to six; by default an ordinary, the longest and most uneven one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the report with its pictures as one HTML file that needs no network."""
    from lens_auto.export import output
    from lens_auto.report import html as pages
    from lens_auto.report.load import load
    from lens_auto.report.summary import summarize

    with _bad_input():
        wanted = None if iterations is None else _numbers(iterations)
        run, problems = _open(run_dir, "html")
        with _progress("reading", 2 * len(run.writers)) as advance:
            loaded = load(run, advance)
            summary = summarize(run, loaded, problems)
            page = pages.page(summary, loaded, wanted, advance)
        path = f"{run.run_id or 'run'}.html" if to_file is None else str(to_file)
        with output(path) as file:
            file.write(page)
    if path != "-":
        _say(f"written to {path}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--iterations {text!r}; numbers separated by commas are valid; nothing is written") from None


@app.command()
def top(
    run_dir: RunDir = None,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, help="Time between two looks.")
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option("--count", metavar="N", min=1, help="Look N times; by default until Ctrl-C.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a look; one look by default.")] = False,
) -> None:
    """Show what every rank is in right now: while it trains, while it hangs, after it died."""
    from lens_auto.report import top as live
    from lens_auto.report.text import console

    with _bad_input():
        chosen = _newest_run(os.getcwd(), "top") if run_dir is None else str(run_dir)
        if as_json:
            for look in live.looks(chosen, interval_s, count or 1):
                _print_json(look.to_json())
            return
        out = console()
        live.show(chosen, interval_s, count if out.is_terminal else count or 1, out, lambda: out.height)


@app.command()
def hang(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Name the rank that holds the others up, while a job hangs or after it was killed."""
    from lens_auto.report.hang import analyse, render

    with _bad_input():
        run, problems = _open(run_dir, "hang")
        found = analyse(run)
    found.problems[:0] = problems
    if as_json:
        _print_json(found.to_json())
        return
    from lens_auto.report.text import console

    render(found, console())


@app.command()
def postmortem(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Show how every rank of a job ended, in which order, and which failed first."""
    from lens_auto.report.postmortem import examine, render

    with _bad_input():
        run, problems = _open(run_dir, "postmortem")
        found = examine(run)
    found.analysis.problems[:0] = problems
    if as_json:
        _print_json(found.to_json())
        return
    from lens_auto.report.text import console

    render(found, console())


def _complete_format(incomplete: str) -> list[str]:
    from lens_auto.export import FORMATS

    return [name for name in (*FORMATS, "otlp") if name.startswith(incomplete)]


@app.command()
def export(
    run_dir: RunDir = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            autocompletion=_complete_format,
            help="otlp-json: OTLP/JSON lines, as a collector's file receiver reads. console: one JSON object a span."
            " perfetto: a trace for ui.perfetto.dev. otlp: to an endpoint.",
        ),
    ] = "otlp-json",
    to_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Written whole or not at all; by default, and for -, standard output.",
        ),
    ] = None,
    endpoint: Endpoint = None,
    protocol: Protocol = None,
) -> None:
    """Turn the records of a run into OpenTelemetry spans. Repeated exports give the same ids."""
    if to == "otlp":
        _send(run_dir, "export", endpoint, protocol)
        return
    for option, value in (("--endpoint", endpoint), ("--protocol", protocol)):
        if value is not None:
            _fail(f"{option} {value!r} goes with --to otlp, this is --to {to}; nothing is exported")
    from lens_auto.export import encoder, output
    from lens_auto.export.spans import run_spans
    from lens_auto.report.services import trace_lines

    with _bad_input():
        encode = encoder(to)
        run, problems = _open(run_dir, "export")
        path = None if to_file is None else str(to_file)
        count = damaged = 0
        with _progress("exporting", len(run.writers)) as advance, output(path) as file:
            for made in run_spans(run):
                problems += [made.problem] if made.problem else []
                for line, spans in encode([made]):
                    file.write(line)
                    count += spans
                    advance(spans / made.count)
            if to == "otlp-json":  # what programs made themselves is in this form already
                for line, spans in trace_lines(run):
                    file.write(line)
                    count += spans
                    damaged += not line
    for problem in (*problems, *run.problems):
        _say(str(problem))
    if damaged:
        _say(_damaged(damaged))
    if path not in (None, "-"):
        _say(f"{counted(count, 'span')} of {counted(len(run.writers), 'rank')} written to {path}")


@app.command()
def recover(run_dir: RunDir = None, endpoint: Endpoint = None, protocol: Protocol = None) -> None:
    """Send what an exporter process or a program could not send, and remove what is accepted; each span once."""
    _send(run_dir, "recover", endpoint, protocol)


def _send(run_dir: Path | None, command: str, endpoint: str | None, protocol: str | None) -> None:
    from lens_auto.export import send

    with _bad_input():
        send.name_endpoint(endpoint, protocol)
        run, problems = _open(run_dir, command)
        with _progress("sending", sum(writer.info.records for writer in run.writers)) as advance:
            try:
                done = send.send_run(run, advance) if command == "export" else send.recover(run, advance)
            except send.NotSent as error:
                _say(str(error))
                raise typer.Exit(1) from None
    for problem in (*problems, *run.problems):
        _say(str(problem))
    notes = [f"{counted(done.spans, 'span')} sent"]
    if done.not_sampled:
        notes.append(f"{done.not_sampled:,} left out by the sampler")
    if done.running:
        notes.append(f"{done.running} processes are still running and were left alone")
    if done.damaged:
        notes.append(_damaged(done.damaged))
    _say("; ".join(notes))


def _damaged(lines: int) -> str:
    return f"{counted(lines, 'damaged line')} in the files of programs left out"


@app.command()
def collect(
    parts: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run directories that hold parts of one run.")],
    to_directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The merged run directory.", show_default=False)
    ],
) -> None:
    """Merge the parts of one run that nodes without a common file system hold."""
    from lens_auto.export.collect import collect as merge

    with _bad_input():
        copied, there, problems = merge(parts, to_directory)
    for problem in problems:
        _say(problem)
    _say(f"{counted(copied, 'rank')} copied to {to_directory}" + (f", {there} were there already" if there else ""))


@app.command()
def groups(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory of a running job.")],
    names: Annotated[
        str, typer.Argument(metavar="GROUPS", help="Span groups and presets, separated by commas.", show_default=False)
    ],
    for_iterations: Annotated[
        int | None,
        typer.Option(
            "--for-iterations", metavar="N", min=1, help="Switch back after N iterations.", show_default=False
        ),
    ] = None,
) -> None:
    """Switch span groups of a running job, on every rank from the same iteration."""
    from lens_auto.groups import TrainingSpanGroup
    from lens_auto.iteration.schedule import MAX_FOR_ITERATIONS, write_request
    from lens_auto.recorder.read import RunDirectory, Status

    if for_iterations is not None and for_iterations > MAX_FOR_ITERATIONS:
        _fail(f"--for-iterations {for_iterations}: at most {MAX_FOR_ITERATIONS}; nothing is switched")
    with _bad_input():
        wanted = TrainingSpanGroup.resolve(names)
        run = RunDirectory(run_dir)
        if not any(writer.status is Status.RUNNING for writer in run.writers):
            _fail(f"no rank of {run_dir} is running on this host; nothing is switched")
        write_request(str(run_dir), wanted, for_iterations)
    lasting = "" if for_iterations is None else f", for {counted(for_iterations, 'iteration')}"
    named = ", ".join(sorted(wanted)) or "no group"
    _say(f"rank 0 was asked to switch to {named}{lasting}; it does so a few iterations ahead")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what would be patched in this environment, the resolved configuration, and what is wrong with it."""
    from lens_auto.doctor import report as examine

    found = examine()
    if as_json:
        _print_json(found)
    else:
        from lens_auto.report.text import console, render_doctor

        render_doctor(found, console())
    if found.get("problems"):
        raise typer.Exit(1)


# --- what the commands share ------------------------------------------------------------------------------------------


def _say(line: str) -> None:
    print(f"lens-auto: {line}", file=sys.stderr, flush=True)


def _fail(line: str) -> NoReturn:
    _say(line)
    raise typer.Exit(_BAD_INPUT)


@contextmanager
def _bad_input() -> Iterator[None]:
    """What a user gave and cannot be used is one line, not a traceback."""
    from lens_auto.recorder.read import UnreadableFile

    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output left: that is no input
    except (UnreadableFile, ValueError) as error:
        _fail(str(error))
    except OSError as error:
        where = "the output" if error.filename is None else error.filename
        _fail(f"{where}: {error.strerror or error}; nothing is written")


def _open(path: Path | None, command: str) -> tuple[RunDirectory, list[str]]:
    """Finish what dead writers of the run left in the spool, then open it; a file is one of OTLP/JSON lines."""
    if path is not None and path.is_file() and command in _TAKE_FILES:
        from lens_auto.report.otlp import SpanRun

        return SpanRun(path), []
    from lens_auto.recorder.finish import finish_dead
    from lens_auto.recorder.read import RunDirectory, UnreadableFile

    chosen = _newest_run(os.getcwd(), command) if path is None else str(path)
    try:
        problems = list(finish_dead(chosen))
    except Exception as error:  # reading goes on with what is there
        problems = [f"files of dead ranks cannot be moved to {chosen} ({type(error).__name__}: {error})"]
    try:
        return RunDirectory(chosen), problems
    except UnreadableFile as error:
        inside = _runs_in(chosen)
        if inside:
            _fail(f"{chosen}: not a run directory but a folder of {len(inside)}; the newest is {inside[-1]}")
        raise error


def _runs_in(folder: str) -> list[str]:
    """Run directories in a folder, the newest last."""
    from lens_auto.recorder.layout import MANIFEST_NAME

    found: list[tuple[int, str]] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        path = os.path.join(folder, name)
        try:
            found.append((os.stat(os.path.join(path, MANIFEST_NAME)).st_mtime_ns, path))
        except OSError:
            continue
    return [path for _, path in sorted(found)]


def _newest_run(cwd: str, command: str) -> str:
    runs = _runs_in(os.path.join(cwd, RUNS_FOLDER))
    if not runs:
        _fail(f"there is no run directory in ./{RUNS_FOLDER}; name one: lens-auto {command} RUN_DIR")
    return os.path.relpath(runs[-1], cwd)


def _print_json(value: Any) -> None:
    import orjson

    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[float], None]]:
    """A bar on standard error for what takes longer than a second, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    begin = time.monotonic()
    done_so_far = 0.0
    bar: Any = None

    def advance(done: float) -> None:
        nonlocal bar, done_so_far
        done_so_far += done
        if bar is None and time.monotonic() - begin > PROGRESS_AFTER_S:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            bar.start()
            bar.add_task(what, total=total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done_so_far)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


class _ClosedOutput(io.RawIOBase):
    """Stands for a standard output that whoever started us has closed: only what needs it fails."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def main() -> None:
    """Entry point of the `lens-auto` command."""
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_ClosedOutput()))
    status: int
    try:
        try:
            app()
            return
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):  # typer and rich make an exit of it
                sys.stdout.flush()
                raise
            status = _BROKEN_PIPE
    except BrokenPipeError:
        status = _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _NO_OUTPUT:
            raise
        _say(f"the output: {error.strerror}")
        status = _BAD_INPUT
    # The reader has seen enough, or there is no room: the interpreter's own flush at exit must not complain.
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.exit(status)


if __name__ == "__main__":
    main()
