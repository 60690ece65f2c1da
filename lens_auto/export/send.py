"""Send a recorded run from the command line: all of it (`export --to otlp`), or what an exporter left (`recover`)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lens_auto.config import NemoLensConfig
from lens_auto.export import launch, programs
from lens_auto.export.answer import Outcome
from lens_auto.export.exporters import exporter_names
from lens_auto.export.kept import kept_spans, progress_folder
from lens_auto.export.lane import Candidate
from lens_auto.export.process import decided, make_lanes, remove_segments
from lens_auto.export.senders import make_sender
from lens_auto.export.spans import run_spans
from lens_auto.recorder import finish, rundir
from lens_auto.recorder.layout import SEGMENT_RECORDS
from lens_auto.recorder.read import RunDirectory, Status

BATCH_SPANS = 512
PATIENCE_S = 15.0
_PAUSE_S = 0.5


class NotSent(Exception):
    """An endpoint did not take spans for `PATIENCE_S`. The message says how many it took, and why no more."""


class Sent(NamedTuple):
    """What was done: spans sent, left out by the sampler, processes still at work (not touched), damaged lines."""

    spans: int
    not_sampled: int
    running: int
    damaged: int = 0


def name_endpoint(endpoint: str | None, protocol: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Put an endpoint and protocol given on the command line where the exporters look."""
    if endpoint is not None:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        os.environ.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)
        os.environ.setdefault("OTEL_TRACES_EXPORTER", "otlp")
    if protocol is None and endpoint is not None and "OTEL_EXPORTER_OTLP_PROTOCOL" not in environ:
        protocol = "http/protobuf" if endpoint.rstrip("/").endswith(":4318") else "grpc"
    if protocol is not None:
        os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = protocol


def _file_of(run: RunDirectory) -> str:
    return str(run.path / f"spans-{os.uname().nodename}.jsonl")


def send_run(run: RunDirectory, advance: Callable[[int], None]) -> Sent:
    """Send all spans of a run, also those that programs made themselves, to the endpoint that the environment names.

    The run directory stays as it is.

    Args:
        run: what to send.
        advance: told the number of spans after each batch.

    Raises:
        NotSent: the endpoint does not take them.
    """
    sender = make_sender("otlp", lambda: _file_of(run))
    sent = 0
    try:
        for made in run_spans(run):
            spans = iter(made.spans)
            while batch := list(itertools.islice(spans, BATCH_SPANS)):
                deadline = time.monotonic() + PATIENCE_S
                while (answer := sender.send(batch, made.resource)).outcome is not Outcome.ACCEPTED:
                    if time.monotonic() > deadline or answer.outcome is not Outcome.LATER:
                        raise NotSent(f"the endpoint took {sent:,} spans and no more: {answer.reason}")
                    time.sleep(_PAUSE_S)
                sent += len(batch)
                advance(len(batch))
    finally:
        sender.close()
    own = programs.send_all(run, advance)
    if own.reason:
        raise NotSent(f"the endpoint took {sent + own.sent:,} spans and no more: {own.reason}")
    return Sent(sent + own.sent, 0, 0, own.damaged)


def recover(run: RunDirectory, advance: Callable[[int], None]) -> Sent:
    """Send what an exporter process left of a run, and what programs could not send of their own spans.

    What was accepted is removed: each span once, over several calls.

    Raises:
        NotSent: the endpoint does not take them; what it took is written down.
    """
    os.environ.setdefault("OTEL_TRACES_EXPORTER", ",".join(exporter_names()) or "otlp")
    world_size = max((writer.info.world_size for writer in run.writers), default=1)
    config = NemoLensConfig.for_strategy()
    lanes, problems = make_lanes(config, lambda: world_size, lambda: _file_of(run))
    if not lanes:
        raise NotSent("; ".join(problems) or "OTEL_TRACES_EXPORTER names no exporter")
    sent = not_sampled = running = 0
    for writer in run.writers:
        if writer.status is Status.RUNNING:
            running += 1
            continue
        if decided(config, writer.info) is False:
            continue
        low: int | None = None
        for lane in lanes:
            folder = progress_folder(writer, lane.name)
            progress = lane.progress(writer.name, folder)
            before, before_left = progress.sent, progress.not_sampled
            last_moved = time.monotonic()
            while not progress.finished:
                count = progress.sent
                if lane.step([Candidate(writer, folder, True)]):
                    last_moved = time.monotonic()
                    advance(progress.sent - count)
                elif time.monotonic() - last_moved > PATIENCE_S:
                    left = kept_spans(run.path, lane.name)
                    raise NotSent(
                        f"the endpoint took {sent + progress.sent - before:,} spans, {left:,} are left: {lane.reason}"
                    )
                else:
                    time.sleep(0.05)
            sent += progress.sent - before
            not_sampled += progress.not_sampled - before_left
            low = progress.position.low if low is None else min(low, progress.position.low)
        if any(lane.remote for lane in lanes):
            for each in writer.folders:
                remove_segments(each, (low or 0) // SEGMENT_RECORDS, len(writer.folders) == 1)
        _forget(run.run_id, writer.name)
    for lane in lanes:
        lane.close()
    own = programs.send_unsent(run, advance)
    sent, running = sent + own.sent, running + own.running
    if own.left:
        raise NotSent(
            f"the endpoint took {sent:,} spans, {own.left:,} that programs made themselves are left: {own.reason}"
        )
    return Sent(sent, not_sampled, running, own.damaged)


def _forget(run_id: str, writer: str) -> None:
    """Nothing is left of what an exporter noted in the spool."""
    for folder in finish.spooled_runs(rundir.safe_name(run_id)):
        launch.unregister(folder, writer)
        if not launch.registered(folder) and not launch.is_running(folder):
            launch.remove_traces(folder)
