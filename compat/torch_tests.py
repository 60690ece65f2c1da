"""PyTorch's own distributed tests, bare and instrumented, test by test."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compat import child
from compat.child import PROGRAMS
from lens_auto.recorder.read import RunDirectory

INSTRUMENTED = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_QUIET": "1"}
# What a rank can do on gloo: collectives of each shape, objects, point to point, profilers, DDP and its logger, faults.
SUBSET = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_max",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_logging_data_cpu",
    "test_destroy_full_group",
    "test_get_future",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
)
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Compared:
    """Outcomes with us beside those without.

    Attributes:
        bare: of each bare run, by test.
        instrumented: of the instrumented one.
        writers: how many processes recorded in it.
        records: what they recorded.
        problem: why the runs could not be compared; empty where they could.
    """

    bare: list[dict[str, dict[str, Any]]]
    instrumented: dict[str, dict[str, Any]]
    writers: int
    records: int
    problem: str = ""

    @property
    def flaky(self) -> list[str]:
        """Tests that do not always end the same without us."""
        return [name for name in self.bare[0] if len(self._bare_outcomes(name)) > 1]

    @property
    def changed(self) -> list[str]:
        """What is not as in any bare run, one line for each test."""
        lines = []
        for name in sorted({*self.bare[0], *self.instrumented}):
            before, now = self._bare_outcomes(name), self.instrumented.get(name)
            if now is None or now["outcome"] not in before:
                what = "did not run" if now is None else f"{now['outcome']}: {_last_line(now['why'])}"
                lines.append(f"{name}: bare {' or '.join(sorted(before)) or 'did not run'}, now {what}")
        return lines

    def failure(self) -> str:
        """What is wrong, in one line; empty where nothing is."""
        if self.problem:
            return self.problem
        if not any(passed(each) for each in self.bare):
            return "no test passes without lens-auto"
        if changed := self.changed:
            return f"{len(changed)} outcomes changed: {'; '.join(changed)}"
        fewest = min(passed(each) for each in self.bare)
        if passed(self.instrumented) < fewest:
            return f"{passed(self.instrumented)} passed, {fewest} without lens-auto"
        return "" if self.records else "nothing was recorded"

    def _bare_outcomes(self, name: str) -> set[str]:
        return {each[name]["outcome"] for each in self.bare if name in each}


def passed(outcomes: dict[str, dict[str, Any]]) -> int:
    """How many tests passed."""
    return counts(outcomes)["passed"]


def counts(outcomes: dict[str, dict[str, Any]]) -> Counter[str]:
    """How many tests had which outcome."""
    return Counter(each["outcome"] for each in outcomes.values())


def shown(outcomes: dict[str, dict[str, Any]]) -> str:
    """Counts of outcomes, as the table says them."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts(outcomes).items()))


def reasons(outcomes: dict[str, dict[str, Any]]) -> Counter[str]:
    """Why tests were skipped."""
    return Counter(each["why"] for each in outcomes.values() if each["outcome"] == "skipped")


def compare(bin_folder: Path, folder: Path, names: Sequence[str] = (), bare_runs: int = 1) -> Compared:
    """Run tests bare, to know which are flaky, and instrumented.

    Args:
        bin_folder: of the environment whose torch is tested.
        folder: where outputs and records go.
        names: of the tests; none: all.
        bare_runs: how often without us.
    """
    program = str(PROGRAMS / "torch_distributed_tests.py")
    command = ("python", program, *names)
    runs = [child.run(command, bin_folder, folder / f"bare{index}", {}, _TIMEOUT_S) for index in range(bare_runs)]
    with_us = ("opentelemetry-instrument", *command)
    instrumented = child.run(with_us, bin_folder, folder / "instrumented", INSTRUMENTED, _TIMEOUT_S)
    problems = [each.problem for each in (*runs, instrumented) if each.problem]
    writers, records = 0, 0
    if instrumented.run_dir.exists():
        for writer in RunDirectory(instrumented.run_dir).writers:
            writers += 1
            records += len(writer.records().data)
    outcomes = [each.results.get("tests", {}) for each in (*runs, instrumented)]
    return Compared(outcomes[:-1], outcomes[-1], writers, records, "; ".join(problems))


def explanation(compared: Compared) -> list[str]:
    """For people: why tests were skipped, which are flaky."""
    lines = [f"{count} skipped: {why}" for why, count in reasons(compared.bare[0]).most_common()]
    return [*lines, *(f"flaky without lens-auto: {name}" for name in compared.flaky)]


def _last_line(why: str) -> str:
    lines = [line for line in why.splitlines() if "Error" in line]
    return (lines or why.splitlines() or [""])[-1].strip()


def write(path: Path, compared: Compared) -> None:
    """Keep all outcomes beside the outputs."""
    path.write_text(json.dumps({"bare": compared.bare, "instrumented": compared.instrumented}, indent=1))
