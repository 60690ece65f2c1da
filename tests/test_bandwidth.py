"""Bandwidth of collectives: the formulas, and which times measure a transfer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import RUN_RANKS, SCRIPTS, Launcher
from synthetic import Writer, write_run

from lens_auto.iteration.bandwidth import Bandwidth, bus_factor, whole_bytes
from lens_auto.recorder.layout import DeviceTime, Flag, Kind
from lens_auto.recorder.read import RunDirectory
from lens_auto.report.load import load
from lens_auto.report.summary import summarize

MIB = 1 << 20
BLOCKING = Flag.SPAN
ASYNC = Flag.SPAN | Flag.ASYNC
ENQUEUED = Flag.SPAN | Flag.ENQUEUE | Flag.MEASURED


@pytest.mark.parametrize(
    ("operation", "ranks", "whole", "factor"),
    [
        ("all_reduce", 2, 1000, 1.0),
        ("all_reduce", 8, 1000, 1.75),
        ("all_gather_into_tensor", 4, 4000, 0.75),
        ("reduce_scatter_tensor", 4, 1000, 0.75),
        ("all_to_all_single", 8, 1000, 0.875),
    ],
)
def test_formulas(operation: str, ranks: int, whole: int, factor: float) -> None:
    assert whole_bytes(operation, 1000, ranks) == whole
    assert bus_factor(operation, ranks) == factor


class Ranks:
    """Two ranks; the second comes to every collective 2 ms before its end, the first when it likes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers = [Writer(rank=rank, world_size=2, nonce=7 + rank, pid=100 + rank) for rank in range(2)]
        self.seq = 0

    def collective(self, name: str, early_ms: float, flags: int = BLOCKING, size: int = 2, nbytes: int = MIB) -> None:
        self.seq += 1
        common = {"name": name, "group": "0", "seq": self.seq, "init": 1, "group_size": size, "dtype": "float32"}
        for writer, ms in zip(self.writers, (early_ms, 2.0), strict=True):
            enqueued = flags & Flag.ENQUEUE
            number = writer.take(Kind.COLLECTIVE, 0.01 if enqueued else ms, flags, bytes=nbytes, **common)
            if flags & Flag.ASYNC:
                writer.take(Kind.WAIT, 1, name="wait", ref=number + 1)
            if enqueued:
                what = {"ref": number + 1, "a": round(ms * 1e6), "c": DeviceTime.CLOCK | DeviceTime.EXPOSED}
                writer.add(Kind.DEVICE_TIME, writer.now, writer.now, 0, **what)
            writer.backward()
            writer.step()

    def of(self, operation: str) -> list[Bandwidth]:
        run = RunDirectory(write_run(self.folder, *self.writers))
        found = {each.operation: each.bandwidth for each in summarize(run, load(run)).operations}
        return found[operation]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path / "run")


def test_the_last_to_come_measures_the_transfer(ranks: Ranks) -> None:
    for early_ms in (30, 2, 7):
        ranks.collective("all_reduce", early_ms)
    (found,) = ranks.of("all_reduce")
    assert (found.group_size, found.timing, found.count, found.bytes) == (2, "host", 3, 3 * MIB)
    assert found.algorithm == found.bus == pytest.approx(MIB / 2e-3)


def test_by_events(ranks: Ranks) -> None:
    ranks.collective("all_gather_into_tensor", 9, ENQUEUED)
    (found,) = ranks.of("all_gather_into_tensor")
    assert (found.timing, found.count, found.bytes) == ("cuda_event", 1, 2 * MIB)
    assert (found.algorithm, found.bus) == (pytest.approx(2 * MIB / 2e-3), pytest.approx(MIB / 2e-3))


@pytest.mark.parametrize(
    ("name", "flags", "size", "nbytes"),
    [
        ("all_reduce", ASYNC, 2, MIB),  # the program chooses when it waits
        ("all_reduce", Flag.SPAN | Flag.FAILED, 2, MIB),
        ("all_reduce", BLOCKING, 3, MIB),  # one rank's time is not here
        ("broadcast", BLOCKING, 2, MIB),  # its root may leave before the data has arrived
        ("barrier", BLOCKING, 2, 0),
        ("all_reduce", BLOCKING, 2, 0),
    ],
)
def test_times_that_measure_no_transfer(ranks: Ranks, name: str, flags: int, size: int, nbytes: int) -> None:
    ranks.collective(name, 5, flags, size, nbytes)
    assert ranks.of(name) == []


PROGRAM = """
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist

def main(rank):
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    half = dist.new_group([0, 1])
    for _ in range(5):
        weight.sum().backward()
        dist.all_reduce(torch.ones(1 << 18))
        if rank < 2:
            dist.all_reduce(torch.ones(1 << 18), group=half)
        optimizer.step()
    dist.destroy_process_group()

run_ranks(main, 3)
"""


@pytest.mark.slow
def test_ranks_on_gloo(launch: Launcher) -> None:
    run = launch.instrumented(RUN_RANKS + PROGRAM, env={"NEMO_LENS_SPAN_GROUPS": "all"})
    assert run.code == 0, run.stderr
    shown = launch.run(str(SCRIPTS / "lens-auto"), "report", str(run.run_dir), "--json")
    (operation,) = [each for each in json.loads(shown.stdout)["operations"] if each["operation"] == "all_reduce"]
    pair, all_ = operation["bandwidth"]
    assert [(each["group_size"], each["count"], each["bytes"], each["timing"]) for each in (pair, all_)] == [
        (2, 5, 5 * MIB, "host"),
        (3, 5, 5 * MIB, "host"),
    ]
    assert pair["bus"] == pair["algorithm"] and all_["bus"] == pytest.approx(all_["algorithm"] * 4 / 3)
    assert 1e6 < pair["algorithm"] < 1e12
    text = launch.run(str(SCRIPTS / "lens-auto"), "report", str(run.run_dir)).stdout
    assert "bus bandwidth" in text and "(2 ranks)" in text and "(3 ranks)" in text
