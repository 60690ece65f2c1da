"""Send a recorded run from the command line: all of it (`export --to otlp`), or what an exporter left (`recover`)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lens_auto.config import NemoLensConfig
from lens_auto.export.exporters import exporter_names
from lens_auto.export.process import SdkSender, make_lanes, remove_segments, run_folder_of
from lens_auto.export.spans import run_spans
from lens_auto.recorder.layout import SEGMENT_RECORDS
from lens_auto.recorder.read import RunDirectory, Status

BATCH_SPANS = 512
PATIENCE_S = 60.0
_PAUSE_S = 0.5


class NotSent(Exception):
    """An endpoint did not take spans for `PATIENCE_S`. The message says how many it took."""


class Sent(NamedTuple):
    """What was done: spans sent, spans that the sampler left out, writers still at work (not touched)."""

    spans: int
    not_sampled: int
    running: int


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


def send_run(run: RunDirectory, advance: Callable[[int], None]) -> Sent:
    """Send all spans of a run to the endpoint that the environment names; the run directory stays as it is.

    Args:
        run: what to send.
        advance: told the number of spans after each batch.

    Raises:
        NotSent: the endpoint does not take them.
    """
    sender = SdkSender("otlp")
    sent = 0
    try:
        for made in run_spans(run):
            spans = iter(made.spans)
            while batch := list(itertools.islice(spans, BATCH_SPANS)):
                deadline = time.monotonic() + PATIENCE_S
                while not sender.send(batch, made.resource):
                    if time.monotonic() > deadline:
                        raise NotSent(f"the endpoint took {sent:,} spans, then none for {PATIENCE_S:.0f} s")
                    time.sleep(_PAUSE_S)
                sent += len(batch)
                advance(len(batch))
    finally:
        sender.close()
    return Sent(sent, 0, 0)


def recover(run: RunDirectory, advance: Callable[[int], None]) -> Sent:
    """Send what an exporter process left of a run, and remove what was accepted; each span once, over several calls.

    Raises:
        NotSent: the endpoint does not take them; what it took is written down.
    """
    os.environ.setdefault("OTEL_TRACES_EXPORTER", ",".join(exporter_names()) or "otlp")
    world_size = max((writer.info.world_size for writer in run.writers), default=1)
    lanes = make_lanes(NemoLensConfig.from_env(), world_size)
    if not lanes:
        raise NotSent("no exporter could be made; OTEL_TRACES_EXPORTER names none that is installed")
    sent = not_sampled = running = 0
    for writer in run.writers:
        folder = run_folder_of(writer)
        if writer.status is Status.RUNNING or folder is None:
            running += 1
            continue
        if writer.info.raw.get("exports") is False:
            continue
        for lane in lanes:
            progress = lane.progress(writer, folder)
            before, before_left = progress.sent, progress.dropped_by_sampler
            last_moved = time.monotonic()
            while not progress.finished:
                count = progress.sent
                if lane.step(writer, folder, True):
                    last_moved = time.monotonic()
                    advance(progress.sent - count)
                elif time.monotonic() - last_moved > PATIENCE_S:
                    raise NotSent(f"the endpoint took {sent + progress.sent - before:,} spans, then none")
                else:
                    time.sleep(0.05)
            sent += progress.sent - before
            not_sampled += progress.dropped_by_sampler - before_left
        low = min(lane.progress(writer, folder).position.low for lane in lanes)
        remove_segments(writer, low // SEGMENT_RECORDS, True)
    for lane in lanes:
        lane.close()
    return Sent(sent, not_sampled, running)
