"""Budget of the exporter process: CPU for each span, from the record on disk to the OTLP that an endpoint accepted."""

from __future__ import annotations

import socket
import sys

import numpy as np

from benchmarks import child
from benchmarks.budget import Measurement
from benchmarks.child import Progress
from benchmarks.timing import block_ratios

NAMES = ("exporter", "exporter-http", "exporter-memory", "exporter-training")
_COSTS = frozenset(NAMES[:3])


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Its own cost against an endpoint that takes everything, and what training feels of it while one is away."""
    found: dict[str, Measurement] = {}
    if "exporter-training" in names:
        share = 0.3 if names & _COSTS else 1.0
        found["exporter-training"] = _training(quick, lambda done: progress(share * done))
    if names & _COSTS:
        begin = 0.3 if "exporter-training" in names else 0.0
        found.update(_costs(quick, lambda done: progress(begin + (1 - begin) * done)))
    return found


def _training(quick: bool, progress: Progress) -> Measurement:
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        command = [*child.instrumented(), sys.executable, "-m", "benchmarks.programs.exporter_training"]
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "NEMO_LENS_EXPORTER_LINGER_S": "0"}
        result = child.run(command, variables, progress, 300, "60" if quick else "300", "beside")
    running, stopped = np.array(result["running"]), np.array(result["stopped"])
    by_wall, by_cpu = block_ratios(running, stopped)
    detail = (
        f"95 % [{by_wall.low:.3f}, {by_wall.high:.3f}], {len(running)} pairs of blocks; by CPU time {by_cpu}; alone"
        f" {np.median(stopped[:, 0]) / 1e6:.2f} ms"
    )
    return Measurement(by_wall.value, detail)


def _costs(quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Runs the real exporter process against an endpoint that throws everything away, and the SDK beside it."""
    command = [sys.executable, "-m", "benchmarks.programs.exporter_costs"]
    arguments = ("1", "60000", "120000") if quick else ("5", "120000", "500000")
    found = child.run(command, {}, progress, 600, *arguments)
    stock_us = found["stock_span_us"] + found["stock_encode_us"]
    stages = ", ".join(f"{name} {spent_us:.1f}" for name, spent_us in found["stages_us"].items())
    measured = {}
    for name, protocol in (("exporter", "grpc"), ("exporter-http", "http")):
        each = found[protocol]
        detail = (
            f"{each['span_us']:.1f} us a span over OTLP/{protocol}; stock: span {found['stock_span_us']:.1f} us,"
            f" encoder {found['stock_encode_us']:.1f} us; {found['rounds']} rounds, {each['low']:.3f} to"
            f" {each['high']:.3f}"
        )
        profile = [
            f"stock path {stock_us:.1f} us a span, ours {each['span_us']:.1f}: {stages}, in us; metrics, where they are"
            f" wanted, {found['metrics_us']:.1f} more",
            *found["profile"],
        ]
        measured[name] = Measurement(each["ratio"], detail, profile)
    peak = found["memory"]
    measured["exporter-memory"] = Measurement(
        (peak["peak_bytes"] - peak["bare_bytes"]) / 1e6,
        f"peak {peak['peak_bytes'] / 1e6:.0f} MB while it drained {peak['records']:,} records of 8 ranks; a bare Python"
        f" {peak['bare_bytes'] / 1e6:.0f} MB",
    )
    return measured
