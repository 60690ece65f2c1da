"""Budget of the exporter process: CPU for each span, from the record on disk to the OTLP that an endpoint accepted."""

from __future__ import annotations

import sys

from benchmarks import child
from benchmarks.budget import Measurement
from benchmarks.child import Progress

NAMES = ("exporter", "exporter-http", "exporter-memory")


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
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
            f"stock path {stock_us:.1f} us a span, ours {each['span_us']:.1f}: {stages}, in us",
            *found["profile"],
        ]
        measured[name] = Measurement(each["ratio"], detail, profile)
    peak = found["memory"]
    measured["exporter-memory"] = Measurement(
        (peak["peak_bytes"] - peak["bare_bytes"]) / 1e6,
        f"peak {peak['peak_bytes'] / 1e6:.0f} MB while it drained {peak['records']:,} records of 8 ranks; a bare Python"
        f" {peak['bare_bytes'] / 1e6:.0f} MB",
    )
    return {name: each for name, each in measured.items() if name in names}
