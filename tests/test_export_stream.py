"""A rank's records become spans while it writes: the very ones that a reader of the whole makes, whatever happens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
from export_node import GONE_PID, Node, alive, rank, write_many
from receiver import Receiver
from records import read_spans
from synthetic import Writer

from lens_auto.export import stream
from lens_auto.export.answer import ACCEPTED, Answer
from lens_auto.export.kept import kept_spans
from lens_auto.export.lane import Candidate, Lane, OtherRanks
from lens_auto.export.spans import Span
from lens_auto.recorder import layout
from lens_auto.recorder.layout import SEGMENT_RECORDS, Flag, Kind, Phase
from lens_auto.recorder.read import RunDirectory


class Endpoint:
    """Takes everything."""

    remote = True

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        self.spans += spans
        return ACCEPTED

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is long enough after the synthetic ranks' time that no late record of it is to be expected."""
    now = synthetic.MONOTONIC_0 + 30_000_000_000
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic_ns=lambda: now))


def new_lane(endpoint: Endpoint) -> Lane:
    return Lane("otlp", endpoint, OtherRanks(lambda rank: rank == 0), lambda trace_id, name: True)


def candidate(node: Node, *, ended: bool) -> Candidate:
    (writer,) = RunDirectory(node.run_dir).writers
    return Candidate(writer, str(writer.folders[-1]), ended)


def drain(lane: Lane, node: Node, *, ended: bool) -> None:
    """All that can be sent now."""
    lane._works.clear()  # it waits between two looks, a test does not
    while lane.step([candidate(node, ended=ended)]):
        pass


def by_id(spans: list[Span]) -> dict[bytes, Span]:
    found = {span.span_id: span for span in spans}
    assert len(found) == len(spans), "a span was sent twice"
    return found


class Device:
    """What the device of a rank took becomes known an iteration or several later."""

    def __init__(self, writer: Writer, draw: random.Random) -> None:
        self.writer = writer
        self.draw = draw
        self.pending: list[dict[str, Any]] = []

    def operation(self, number: int) -> None:
        start, flags = self.writer.now, Flag.SPAN | Flag.ENQUEUE | Flag.MEASURED
        found = self.writer.take(Kind.COLLECTIVE, 1, flags, name="all_reduce", seq=5000 + number, init=1)
        at = {"start": start, "end": self.writer.now}
        self.pending.append({"kind": Kind.DEVICE_TIME, **at, "ref": found + 1, "a": number, "b": 1, "c": 6})

    def boundary(self) -> None:
        now = self.writer.now
        self.pending.append({"kind": Kind.DEVICE_MARK, "start": now, "end": now, "b": int(now), "c": 2})
        self.pending.append({"kind": Kind.DEVICE_MEMORY, "start": now - 1e-6, "end": now - 1e-6, "a": int(now), "b": 7})
        while self.pending and self.draw.random() < 0.9:
            self.writer.add(**self.pending.pop(0), flags=0)


def eventful(iterations: int, seed: int) -> Writer:
    """A rank with passes of evaluation, checkpoints, waits that come late or never, transfers and failures."""
    draw = random.Random(seed)
    writer = rank(0, 0, world_size=1)
    loader = writer.loader()
    waiting: list[int] = []
    doubtful: list[int] = []
    device = Device(writer, draw) if seed % 2 else None
    for number in range(iterations):
        writer.fetch(loader)
        writer.wait(1)
        start = writer.now
        writer.backward()
        for _ in range(draw.randrange(4)):
            operation = writer.add(
                Kind.COLLECTIVE, start + 1, start + 2, Flag.SPAN | Flag.ASYNC, name="all_reduce", seq=number, init=1
            )
            if draw.random() < 0.9:
                waiting.append(operation)
        while waiting and draw.random() < 0.6:
            writer.add(Kind.WAIT, writer.now, writer.now + 1, ref=waiting.pop(0) + 1, exposed_ns=1000, name="wait")
        if draw.random() < 0.3:
            writer.take(Kind.SEND, 1, name="send", group="0", peer=1, seq=number, init=1)
            writer.take(Kind.RECV, 1, name="recv", group="0", peer=1, seq=number, init=1)
        if draw.random() < 0.2:
            flags = Flag.SPAN | Flag.ANY_SOURCE | Flag.AMBIGUOUS | (Flag.ASYNC if draw.random() < 0.5 else 0)
            doubtful.append(writer.take(Kind.RECV, 1, flags, name="irecv", group="0", init=1))
        while doubtful and draw.random() < 0.4:
            receive = doubtful.pop(0) + 1
            writer.add(Kind.RECV_SOURCE, writer.now, writer.now, 0, ref=receive, peer=1, seq=1000 + number)
            if draw.random() < 0.5:
                writer.add(Kind.WAIT, writer.now, writer.now + 1, ref=receive, name="wait")
        if draw.random() < 0.1:
            writer.take(Kind.COLLECTIVE, 1, Flag.SPAN | Flag.FAILED, name="barrier", detail="RuntimeError")
        if draw.random() < 0.1:
            writer.wait(20)
            writer.add(Kind.HANG, writer.now - 15, writer.now, name="all_reduce", seq=number, a=Phase.OTHER)
        if device is not None:
            device.operation(number)
        writer.step()
        writer.boundary()
        if device is not None:
            device.boundary()
        if draw.random() < 0.15:
            passes = writer.loader()
            for _ in range(draw.randrange(1, 4)):
                writer.fetch(passes)
            writer.exhaust(passes)
        if draw.random() < 0.1:
            writer.take(Kind.CHECKPOINT_SAVE, 3, name="model.pt", bytes=10)
        if draw.random() < 0.05:
            loader = writer.loader()
    return writer


class Growing:
    """A rank whose records appear bit by bit."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self.writer = writer
        self.records = list(writer.records)
        self.data = writer.array()
        writer.records = []
        self.node = Node(folder, alive(writer))
        self.folder = self.node.run_dir / layout.RANKS_DIR / writer.name
        self.holes: set[int] = set()
        (self.folder / layout.STRINGS_NAME).write_bytes(writer.strings_file())

    def show(self, count: int) -> None:
        """The first so many records are there, but for the holes."""
        data = self.data[:count].copy()
        for hole in self.holes:
            data["commit"][hole] = 0
        header = synthetic.segment_header(0, self.writer.nonce, self.writer.pid, self.writer.rank)
        (self.folder / layout.segment_name(0)).write_bytes(header + data.tobytes())

    def close(self) -> None:
        """All records are there, and the rank has ended."""
        self.show(len(self.records))
        self.writer.closed = True
        info = {**self.writer.info(self.node.run_dir), "records": len(self.records)}
        (self.folder / layout.WRITER_NAME).write_text(json.dumps(info))
        (self.folder / layout.LIVE_NAME).write_bytes(self.writer.live())


@pytest.mark.parametrize("seed", range(5))
def test_part_after_part_is_the_whole(tmp_path: Path, seed: int) -> None:
    """The rank writes on, and the exporter is killed, at any moment."""
    draw = random.Random(seed)
    growing = Growing(tmp_path, eventful(120, seed))
    endpoint = Endpoint()
    lane = new_lane(endpoint)
    shown = parts = 0
    while shown < len(growing.records):
        shown = min(len(growing.records), shown + draw.randrange(1, 120))
        growing.show(shown)
        before = len(endpoint.spans)
        drain(lane, growing.node, ended=False)
        parts += len(endpoint.spans) > before
        if draw.random() < 0.3:
            lane = new_lane(endpoint)
    growing.close()
    lane.step([candidate(growing.node, ended=True)])  # killed with the last part in hand
    lane = new_lane(endpoint)
    drain(lane, growing.node, ended=True)
    assert parts > 5
    (whole,) = read_spans(growing.node.run_dir).values()
    assert by_id(endpoint.spans) == by_id(whole)
    assert growing.node.kept() == 0


def test_a_hang_is_told_while_it_lasts(tmp_path: Path) -> None:
    """Nothing else of the open iteration is known; the span is the one that a reader of the whole makes."""
    writer = rank(0, 6, world_size=1)
    writer.fetch(1)
    writer.wait(500)
    since = {"iteration": 6, "a": Phase.FORWARD}
    hang = writer.add(Kind.HANG, writer.now - 400, writer.now, name="all_reduce", seq=9, **since)
    hung = len(writer.records)
    writer.backward()
    writer.step()
    writer.boundary()
    growing = Growing(tmp_path, writer)
    endpoint = Endpoint()
    lane = new_lane(endpoint)
    growing.show(hang)
    drain(lane, growing.node, ended=False)
    before = len(endpoint.spans)
    assert before and "lens.hang" not in {span.name for span in endpoint.spans}
    growing.show(hung)
    drain(lane, growing.node, ended=False)
    assert [span.name for span in endpoint.spans[before:]] == ["lens.hang"]
    lane = new_lane(endpoint)  # another exporter process goes on
    drain(lane, growing.node, ended=False)
    assert len(endpoint.spans) == before + 1
    growing.close()
    drain(lane, growing.node, ended=True)
    (whole,) = read_spans(growing.node.run_dir).values()
    assert by_id(endpoint.spans) == by_id(whole)
    (span,) = [span for span in whole if span.name == "lens.hang"]
    (iteration,) = [each for each in whole if each.attributes.get("dl.iteration") == 6]
    (link,) = span.links
    assert (link.trace_id, link.span_id) == (iteration.trace_id, iteration.span_id)


def test_a_device_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times come an iteration or several later; where they never come, a minute is enough."""
    writer = rank(0, 0, world_size=1)
    draw = random.Random(1)
    draw.random = lambda: 1.0  # type: ignore[method-assign]
    device = Device(writer, draw)
    for number in range(8):
        writer.backward()
        device.operation(number)
        writer.step()
        writer.boundary()
        device.boundary()
        if number == 3:  # what it has done by now is known: two iterations
            for each in device.pending[:6]:
                writer.add(**each, flags=0)
    growing = Growing(tmp_path, writer)
    growing.show(len(growing.records))
    endpoint = Endpoint()
    lane = new_lane(endpoint)
    drain(lane, growing.node, ended=False)
    assert [span.attributes["dl.iteration"] for span in endpoint.spans if span.name == "train.iteration"] == [0, 1]
    assert [span.attributes.get("dl.device.memory.reserved") for span in endpoint.spans[:2]] == [7, 7]
    (first, second) = [span for span in endpoint.spans if span.name == "torch.distributed.all_reduce"]
    assert [each.attributes["dl.comm.device_duration_ns"] for each in (first, second)] == [0, 1]
    later = synthetic.MONOTONIC_0 + 100_000_000_000
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic_ns=lambda: later))
    drain(lane, growing.node, ended=False)
    assert len([span for span in endpoint.spans if span.name == "train.iteration"]) == 6


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_record_that_is_committed_late(tmp_path: Path, at: int) -> None:
    """A thread had its place and was interrupted. Meanwhile the exporter sent a batch, and was killed."""
    growing = Growing(tmp_path, eventful(400, 1))
    endpoint = Endpoint()
    lane = new_lane(endpoint)
    hole = next(
        number
        for number, record in enumerate(growing.records)
        if number > 50 and record["kind"] == (Kind.FETCH, Kind.SEND, Kind.COLLECTIVE, Kind.CHECKPOINT_SAVE)[at]
    )
    growing.holes = {hole}
    growing.show(len(growing.records) - 30)
    lane.step([candidate(growing.node, ended=False)])
    assert 0 < len(endpoint.spans) < 600
    growing.holes = set()
    growing.show(len(growing.records) - 20)
    lane = new_lane(endpoint)
    drain(lane, growing.node, ended=False)
    growing.close()
    drain(new_lane(endpoint), growing.node, ended=True)
    (whole,) = read_spans(growing.node.run_dir).values()
    assert by_id(endpoint.spans).keys() == by_id(whole).keys()
    assert growing.node.kept() == 0


def test_the_oldest_segments_are_gone(tmp_path: Path) -> None:
    """The endpoint was away for so long that the run outgrew its bound: what is lost is counted, and what follows has
    the numbers, traces and ids that it always had.
    """
    node = Node(tmp_path, alive(rank(0, 4, world_size=1)))
    (writer,) = node.writers
    records = write_many(node, writer, 5 * SEGMENT_RECORDS // 2)
    (whole,) = read_spans(node.run_dir).values()
    folder = node.run_dir / layout.RANKS_DIR / writer.name
    endpoint = Endpoint()
    lane = new_lane(endpoint)
    while lane.progress(writer.name, str(folder)).position.top == 0:
        assert lane.step([candidate(node, ended=False)])
    top, held_back, *_ = lane.progress(writer.name, str(folder)).position
    assert 0 < top < SEGMENT_RECORDS
    assert held_back  # read, but not settled yet
    (folder / layout.segment_name(0)).unlink()
    info = json.loads((folder / layout.WRITER_NAME).read_text())
    (folder / layout.WRITER_NAME).write_text(json.dumps({**info, "pid": GONE_PID}))
    drain(lane, node, ended=True)

    progress = lane.progress(writer.name, str(folder))
    assert progress.lost == SEGMENT_RECORDS - top + len(held_back)
    assert progress.finished
    sent, known = by_id(endpoint.spans), by_id(whole)
    assert kept_spans(node.run_dir) == 0
    # Four of six records of an iteration are spans, and each iteration has two of its own: a record for each span.
    assert abs(len(sent) + progress.lost - len(known)) < 30
    assert records - progress.lost < len(sent) + 30
    new = {span_id for span_id, span in sent.items() if span != known.get(span_id)}
    # At the seam: the iteration that lost its beginning, and what had waited for a part that never came.
    assert len(new) < 15, [sent[each] for each in new]
    assert max(span.attributes.get("dl.iteration", 0) for span in endpoint.spans) == max(
        span.attributes.get("dl.iteration", 0) for span in whole
    )


def test_a_backlog_does_not_fill_the_memory(tmp_path: Path) -> None:
    """Parts are read one after the other, of all ranks together."""
    node = Node(tmp_path, rank(0, 2), rank(1, 2))
    records = sum(write_many(node, writer, 40_000) for writer in node.writers)
    with Receiver("grpc") as receiver:
        ended = node.start(receiver.environment()).wait(60)
        assert ended.code == 0
        assert abs(receiver.span_count - records) < 30
    assert node.kept() == 0
    assert ended.peak_bytes < 120e6
