"""Ranks that send to each other: who waits for whom, what a slow stage of a pipeline costs, and hosts' clocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reports import matched_of, summary_of
from synthetic import MONOTONIC_0, MS, WALL_0, Writer, write_run

from lens_auto.recorder.layout import Flag, Kind
from lens_auto.report import clocks

ITERATIONS, MICROBATCHES, TRAVEL = 40, 4, 0.25
ASYNC = Flag.SPAN | Flag.ASYNC

Work = Callable[[int, str], float]  # milliseconds of a stage's forward or backward of one microbatch, or its step


def alike(stage: int, phase: str) -> float:
    return {"forward": 4.0, "backward": 8.0, "optimizer": 1.0}[phase]


def slow(which: int, what: str) -> Work:
    return lambda stage, phase: alike(stage, phase) + (6.0 if (stage, phase) == (which, what) else 0.0)


class Pipeline:
    """Stages that pass microbatches on: all forward, then all backward, then a step each."""

    def __init__(self, stages: int, work: Work, *, hosts: int = 1, any_source: bool = False, barrier: bool = False):
        self.writers = []
        for stage in range(stages):
            host = stage * hosts // stages
            clock = {"monotonic_ns": MONOTONIC_0, "wall_ns": WALL_0 + 5_000 * MS * host}
            self.writers.append(
                Writer(stage, stages, nonce=stage + 1, pid=4242 + stage, host=f"host{host}", extra={"clock": clock})
            )
        self.any_source = any_source
        self.sent: dict[tuple[int, int], list[float]] = {}
        self.received: dict[tuple[int, int], int] = {}
        for iteration in range(ITERATIONS):
            self._iteration(work, iteration, barrier)

    def _iteration(self, work: Work, iteration: int, barrier: bool) -> None:
        last = len(self.writers) - 1
        # Stage by stage in the direction in which the data goes: what is received was sent before.
        for stage, writer in enumerate(self.writers):
            for _ in range(MICROBATCHES):
                if stage:
                    self._receive(writer, stage - 1)
                writer.wait(work(stage, "forward"))
                if stage < last:
                    self._send(writer, stage + 1)
        for stage in range(last, -1, -1):
            writer = self.writers[stage]
            for _ in range(MICROBATCHES):
                if stage < last:
                    self._receive(writer, stage + 1)
                writer.backward(work(stage, "backward"))
                if stage:
                    self._send(writer, stage - 1)
            writer.step(ms=work(stage, "optimizer"))
        if barrier:
            done = max(writer.now for writer in self.writers) + TRAVEL
            for writer in self.writers:
                writer.add(Kind.COLLECTIVE, writer.now, done, name="barrier", group="all", seq=iteration, group_size=3)
                writer.now = done

    def _send(self, writer: Writer, peer: int) -> None:
        times = self.sent.setdefault((writer.rank, peer), [])
        number = writer.take(Kind.SEND, 0.01, ASYNC, name="isend", group="pp", peer=peer, seq=len(times))
        times.append(writer.now)
        writer.take(Kind.WAIT, 0.01, ref=number + 1)

    def _receive(self, writer: Writer, peer: int) -> None:
        way = (peer, writer.rank)
        seq = self.received[way] = self.received.get(way, -1) + 1
        start, writer.now = writer.now, max(writer.now, self.sent[way][seq]) + TRAVEL
        if not self.any_source:
            writer.add(Kind.RECV, start, writer.now, name="recv", group="pp", peer=peer, seq=seq)
            return
        flags = Flag.SPAN | Flag.ANY_SOURCE
        number = writer.add(Kind.RECV, start, writer.now, flags, name="recv", group="pp")
        writer.add(Kind.RECV_SOURCE, writer.now, writer.now, 0, seq=seq, peer=peer, ref=number + 1)

    def write(self, run_dir: Path) -> Path:
        return write_run(run_dir, *self.writers)


@pytest.mark.parametrize("any_source", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
def test_all_time_is_explained_and_nobody_blamed(tmp_path: Path, barrier: bool, any_source: bool) -> None:
    pipeline = Pipeline(3, alike, barrier=barrier, any_source=any_source)
    found = summary_of(pipeline.write(tmp_path))
    assert found.findings == []
    assert found.comparison.replayed_ns == pytest.approx(found.comparison.span_ns, rel=0.01)
    # 3 + 4 - 1 microbatches' times pass, and each stage works for 4 of them.
    for each in found.comparison.ranks:
        assert each.unknown < 0.01
        assert each.waiting == pytest.approx(2 / 6, abs=0.03)
        assert sum(each.own.values()) == pytest.approx(4 / 6, abs=0.03)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_slow_stage_costs_what_its_absence_brings(tmp_path: Path, stage: int, phase: str) -> None:
    ill = summary_of(Pipeline(3, slow(stage, phase)).write(tmp_path / "ill"))
    well = summary_of(Pipeline(3, alike).write(tmp_path / "well"))
    finding = ill.findings[0]
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [stage], phase)
    assert finding.effect == pytest.approx(1 - well.comparison.span_ns / ill.comparison.span_ns, abs=0.03)
    assert all(each.kind == "straggler" for each in ill.findings)


def test_a_stage_that_is_slower_in_everything_is_not_told_to_have_larger_batches(tmp_path: Path) -> None:
    found = summary_of(Pipeline(2, lambda stage, phase: alike(stage, phase) * (1 + stage)).write(tmp_path))
    finding = found.findings[0]
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", [1], "no single cause")
    assert "every phase is slower alike" in finding.headline
    assert "stage" in finding.advice
    assert "host" in finding.advice


def test_a_send_that_waits_for_its_receiver(tmp_path: Path) -> None:
    """As a blocking one does with gloo and NCCL: the receiver is late, and the sender held."""
    writers = [Writer(rank, 2, nonce=rank + 1, pid=4242 + rank) for rank in (0, 1)]
    for seq in range(ITERATIONS):
        sender, receiver = writers
        sender.wait(2)
        receiver.wait(12)
        done = receiver.now + TRAVEL
        sender.add(Kind.SEND, sender.now, done, name="send", group="pp", peer=1, seq=seq)
        receiver.add(Kind.RECV, receiver.now, done, name="recv", group="pp", peer=0, seq=seq)
        sender.now = receiver.now = done
        for writer in writers:
            writer.backward(4)
            writer.step(ms=1)
    found = summary_of(write_run(tmp_path, *writers))
    assert (found.findings[0].kind, found.findings[0].ranks, found.findings[0].cause) == ("straggler", [1], "forward")
    sender_work, receiver_work = found.comparison.ranks
    assert sender_work.waiting == pytest.approx(10 / 17.25, abs=0.02)
    assert receiver_work.waiting < 0.01
    assert found.findings[0].effect == pytest.approx(10 / 17.25, abs=0.02)


def test_messages_tell_how_far_apart_the_clocks_of_hosts_are(tmp_path: Path) -> None:
    matched = matched_of(Pipeline(2, alike, hosts=2).write(tmp_path))
    clock = matched.hosts["host1"]
    assert clock.uncertainty_ns is not None
    assert clock.uncertainty_ns <= 2 * TRAVEL * MS
    assert abs(clock.offset_ns + 5_000 * MS) <= clock.uncertainty_ns
    assert not clock.drifts


def test_messages_in_one_direction_do_not_tell(tmp_path: Path) -> None:
    writers = Pipeline(2, alike, hosts=2).writers
    for writer in writers:  # the way back is not recorded
        writer.records = [each for each in writer.records if not (each["kind"] == Kind.SEND and each["peer"] == 0)]
    assert matched_of(write_run(tmp_path, *writers)).hosts["host1"].uncertainty_ns is None


def test_messages_one_way_at_a_time_do_not_tell_how_clocks_drift() -> None:
    """First one host's messages alone, then the other's: no offset fits both, and no stretch has both."""
    sent, received = WALL_0, WALL_0 - 50 * MS  # each is received before it was sent
    came = np.full((80, 2), clocks.NOT_SEEN_TO_COME)
    left = np.full((80, 2), clocks.NOT_SEEN_TO_LEAVE)
    came[:40, 0] = came[40:, 1] = sent + np.arange(40)
    left[:40, 1] = left[40:, 0] = received + np.arange(40)
    came[40:], left[40:] = came[40:] + MS * (came[40:] > 0), left[40:] + MS * (left[40:] < clocks.NOT_SEEN_TO_LEAVE)
    assert clocks.compare(["here", "there"], came, left)["there"].uncertainty_ns is None
