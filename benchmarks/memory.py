"""Budgets of resident memory: over an uninstrumented rank, and flat."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import child
from benchmarks.budget import Measurement
from benchmarks.child import ChildError, Progress

NAMES = ("memory", "memory-growth")


def measure(names: frozenset[str], quick: bool, progress: Progress) -> dict[str, Measurement]:
    """Runs the same loop with everything on and uninstrumented, side by side: memory does not mind the company."""
    iterations = "10000" if quick else "100000"
    program = [sys.executable, "-m", "benchmarks.programs.memory_loop"]
    everything = {"NEMO_LENS_SPAN_GROUPS": "all"}
    with ThreadPoolExecutor(2) as pool:
        ours = pool.submit(child.run, [*child.instrumented(), *program], everything, progress, 420, iterations)
        bare = pool.submit(child.run, program, {}, lambda share: None, 420, iterations)
        return _compare(ours.result(), bare.result(), int(iterations))


def _compare(ours: dict[str, Any], bare: dict[str, Any], iterations: int) -> dict[str, Measurement]:
    if ours["records"] < 3 * iterations:
        raise ChildError(f"only {ours['records']} records of {iterations} iterations, {ours['dropped']} dropped")
    with_us = np.array(ours["samples"]) / 1e6
    without = np.array(bare["samples"]) / 1e6
    half = len(with_us) // 2
    tenth = max(1, len(with_us) // 10)
    # Segments come and go, so single samples swing by a few of them: the peak counts, and medians show the trend.
    peak = float(with_us[half:].max() - np.median(without[half:]))
    growth = float(np.median(with_us[-tenth:]) - np.median(with_us[half : half + tenth]))
    parts = ", ".join(
        f"{label} {(ours['parts'].get(name, 0) - bare['parts'].get(name, 0)) / 1e6:+.1f}"
        for label, name in (("anonymous", "RssAnon"), ("files", "RssFile"), ("shared memory", "RssShmem"))
    )
    detail = (
        f"peak of the last half after {iterations} iterations of {ours['iteration_us']:.0f} us; median"
        f" {float(np.median(with_us[half:]) - np.median(without[half:])):+.1f}; at the end {parts};"
        f" uninstrumented {float(np.median(without[half:])):.0f} MB"
    )
    bare_growth = float(np.median(without[-tenth:]) - np.median(without[half : half + tenth]))
    return {
        "memory": Measurement(peak, detail, _extra_packages(ours["modules"], bare["modules"])),
        "memory-growth": Measurement(
            growth, f"uninstrumented {bare_growth:+.1f}; {ours['records']} records, {ours['dropped']} dropped"
        ),
    }


def _extra_packages(ours: list[str], bare: list[str]) -> list[str]:
    """What is imported with us only: the usual reason for memory that does not grow."""
    extra = Counter(name.split(".")[0] for name in set(ours) - set(bare))
    return [f"{count:4} modules of {package}" for package, count in extra.most_common(12)]
