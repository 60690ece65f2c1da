"""`lens-auto export --to perfetto`: read back by a decoder of its own, and by Perfetto's where that is installed."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from simulate import Job, on
from synthetic import MS, WALL_0, Writer, train, wall, write_run

from lens_auto.export import perfetto
from lens_auto.export.spans import run_spans
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RunDirectory

ROOT = Path(__file__).parent.parent


# --- a reader of traces -----------------------------------------------------------------------------------------------


def fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message, by number."""
    found: dict[int, list[Any]] = defaultdict(list)
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            found[key >> 3].append(varint())
        elif kind == 1:
            found[key >> 3].append(struct.unpack_from("<Q", data, at)[0])
            at += 8
        else:
            assert kind == 2
            length = varint()
            found[key >> 3].append(data[at : at + length])
            at += length
    assert at == len(data)
    return found


@dataclass
class Slice:
    process: str
    thread: str
    name: str
    start_ns: int
    parent: Slice | None
    end_ns: int = -1
    arguments: dict[str, Any] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.name if self.parent is None else f"{self.parent.path}/{self.name}"


def read_trace(data: bytes) -> tuple[list[Slice], list[tuple[Slice, Slice]]]:
    """Slices and arrows, by the rules of Perfetto: events in order of time, a stack for each track."""
    packets = [fields(each) for each in fields(data)[1]]
    assert all(packet[10] == [1] for packet in packets)
    assert packets[0][13] == [3]
    processes, threads, names, keys = {}, {}, {}, {}
    events = []
    for packet in packets:
        for interned in packet[12]:
            for table, number in ((names, 2), (keys, 3)):
                for entry in map(fields, fields(interned)[number]):
                    table[entry[1][0]] = entry[2][0].decode()
        for descriptor in map(fields, packet[60]):
            if descriptor[3]:
                process = fields(descriptor[3][0])
                processes[process[1][0]] = process[6][0].decode()
            else:
                thread = fields(descriptor[4][0])
                threads[descriptor[1][0]] = (processes[thread[1][0]], thread[5][0].decode())
        events += [(packet[8][0], fields(event)) for event in packet[11]]
    stacks: dict[int, list[Slice]] = defaultdict(list)
    slices, arrows = [], []
    open_flows: dict[int, Slice] = {}
    for at_ns, event in sorted(events, key=lambda each: each[0]):
        stack = stacks[event[11][0]]
        if event[9] == [1]:
            process, thread = threads[event[11][0]]
            one = Slice(process, thread, names[event[10][0]], at_ns, stack[-1] if stack else None)
            for annotation in map(fields, event[4]):
                ((number, value),) = ((number, value[0]) for number, value in annotation.items() if number != 1)
                if number == 4 and value >= 1 << 63:
                    value -= 1 << 64
                one.arguments[keys[annotation[1][0]]] = value.decode() if number == 6 else value
            stack.append(one)
            slices.append(one)
        else:
            one = stack.pop()
            one.end_ns = at_ns
            assert one.parent is None or one.parent.end_ns == -1
        for flow in (*event[47], *event[48]):
            if flow in open_flows:
                arrows.append((open_flows[flow], one))
            open_flows[flow] = one
    assert not any(stacks.values())
    return slices, arrows


def trace_of(run_dir: Path) -> bytes:
    encode = perfetto.encoder()
    parts = [part for made in run_spans(RunDirectory(run_dir)) for part in encode([made])]
    return b"".join(part for part, _ in parts)


# --- what is in a trace -----------------------------------------------------------------------------------------------


def test_a_plain_run(tmp_path: Path) -> None:
    first, second = Writer(rank=0, world_size=2), Writer(rank=1, world_size=2, pid=4243, nonce=2 << 40)
    write_run(tmp_path, train(first, 3), train(second, 3))
    slices, arrows = read_trace(trace_of(tmp_path))
    assert {each.process for each in slices} == {"rank 0 on elsewhere", "rank 1 on elsewhere"}
    mine = [each for each in slices if each.process.startswith("rank 1")]
    steps = [each for each in mine if each.name == "train.iteration"]
    assert [each.path for each in steps] == ["train.job/train.iteration"] * 3
    assert [(each.start_ns, each.end_ns) for each in steps] == [
        (wall(10), wall(22)),
        (wall(22), wall(33)),
        (wall(33), wall(44)),
    ]
    inside = [each.name for each in mine if each.parent is steps[1]]
    assert inside == ["train.data_loading", "train.forward", "train.backward", "train.optimizer_step"]
    (reduction,) = [each for each in mine if each.parent is not None and each.parent.parent is steps[1]]
    assert reduction.path == "train.job/train.iteration/train.backward/torch.distributed.all_reduce"
    assert reduction.arguments["dl.comm.bytes"] == 4096
    assert reduction.arguments["dl.comm.async"] == 1
    assert reduction.arguments["dl.comm.dtype"] == "float32"
    assert reduction.arguments["dl.comm.exposed_ns"] == 1.5 * MS
    # One arrow for each link: from rank 0's iteration to the other's.
    pairs = [(one.process, one.arguments["dl.iteration"], other.process) for one, other in arrows]
    assert pairs == [("rank 0 on elsewhere", number, "rank 1 on elsewhere") for number in range(3)]


def test_arrows_lead_from_a_send_to_its_receive(tmp_path: Path) -> None:
    sender, receiver = Writer(rank=0, world_size=2), Writer(rank=1, world_size=2, pid=4243, nonce=2 << 40)
    for writer in (sender, receiver):
        writer.take(Kind.FETCH, 1, a=1)
    for k in range(3):
        receiver.add(Kind.RECV, 10 + 10 * k, 16 + 10 * k, name="recv", group="0", peer=0, seq=k, init=1)  # posted first
        sender.add(Kind.SEND, 14 + 10 * k, 15 + 10 * k, name="send", group="0", peer=1, seq=k, init=1)
    for writer in (sender, receiver):
        writer.now = 50
        writer.backward()
        writer.step()
    _, arrows = read_trace(trace_of(write_run(tmp_path, sender, receiver)))
    arrows = [arrow for arrow in arrows if arrow[0].name != "train.iteration"]
    assert [(one.name, one.process[:6], other.name, other.process[:6]) for one, other in arrows] == [
        ("torch.distributed.send", "rank 0", "torch.distributed.recv", "rank 1")
    ] * 3
    assert [(one.start_ns, other.end_ns) for one, other in arrows] == [
        (wall(14 + 10 * k), wall(16 + 10 * k)) for k in range(3)
    ]


def test_operations_that_overlap_go_to_tracks_of_their_own(tmp_path: Path) -> None:
    writer = Writer()
    writer.take(Kind.FETCH, 1, a=1)
    for at, until in ((2, 8), (4, 10), (6, 7)):
        number = writer.add(Kind.COLLECTIVE, at, at + 0.5, Flag.SPAN | Flag.ASYNC, name="all_gather", seq=at, group="0")
        writer.add(Kind.WAIT, until - 0.5, until, ref=number + 1, name="wait")
    writer.now = 12
    writer.backward()
    writer.step()
    slices, _ = read_trace(trace_of(write_run(tmp_path, writer)))
    found = [(each.thread, each.start_ns, each.end_ns) for each in slices if each.name.endswith("all_gather")]
    assert found == [
        ("training", wall(2), wall(8)),
        ("overlapping 1", wall(4), wall(10)),
        ("training", wall(6), wall(7)),
    ]


def test_a_rank_that_was_started_again_is_another_process(tmp_path: Path) -> None:
    first = Job(ranks=1, iterations=3).run()
    second = Job(ranks=1, iterations=3, start=500).run(pid=200)
    slices, _ = read_trace(trace_of(write_run(tmp_path, *first, *second)))
    assert {each.process for each in slices} == {"rank 0 on elsewhere", "rank 0, started again 1x on elsewhere"}


def test_odd_values(tmp_path: Path) -> None:
    writer = Writer()
    writer.take(Kind.COLLECTIVE, 1, name="söme \ud800 thing", group="0", seq=1, bytes=(1 << 64) - 1)
    writer.take(Kind.FETCH, 0, a=1)
    writer.add(Kind.BACKWARD, 3, 2)
    slices, _ = read_trace(trace_of(write_run(tmp_path, writer)))
    (operation,) = [each for each in slices if "thing" in each.name]
    assert operation.arguments["dl.comm.bytes"] == (1 << 63) - 1


def test_the_command(tmp_path: Path) -> None:
    run_dir = Job(ranks=2, iterations=5, extra={"data": on({1}, 5)}).write(tmp_path / "run")
    target = tmp_path / "run.perfetto"
    done = subprocess.run(
        [sys.executable, "-m", "lens_auto.cli", "export", str(run_dir), "--to", "perfetto", "-o", str(target)],
        capture_output=True,
        text=True,
        check=True,
    )
    slices, _ = read_trace(target.read_bytes())
    assert done.stderr == f"lens-auto: {len(slices)} spans of 2 ranks written to {target}\n"
    assert min(each.start_ns for each in slices) == WALL_0


# --- read by Perfetto itself ------------------------------------------------------------------------------------------


def test_perfettos_own_schema_reads_it(tmp_path: Path) -> None:
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    data = trace_of(Job(ranks=2, iterations=20).write(tmp_path))
    trace = schema.Trace()
    trace.ParseFromString(data)
    unknown = pytest.importorskip("google.protobuf.unknown_fields").UnknownFieldSet
    assert all(not len(unknown(each)) for packet in trace.packet for each in (packet, packet.track_event))
    slices, _ = read_trace(data)
    kinds = [packet.track_event.type for packet in trace.packet if packet.HasField("track_event")]
    assert kinds.count(1) == kinds.count(2) == len(slices)
    named = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
    assert {each.process.process_name for each in named if each.HasField("process")} == {
        "rank 0 on elsewhere",
        "rank 1 on elsewhere",
    }
    assert trace.SerializeToString() and all(packet.trusted_packet_sequence_id == 1 for packet in trace.packet)


def test_perfettos_trace_processor_reads_it(tmp_path: Path) -> None:
    processor = pytest.importorskip("perfetto.trace_processor")
    run_dir = Job(ranks=2, iterations=20).write(tmp_path / "run")
    path = tmp_path / "trace"
    path.write_bytes(trace_of(run_dir))
    slices, arrows = read_trace(path.read_bytes())
    try:
        reader = processor.TraceProcessor(trace=str(path))
    except Exception as error:  # it fetches its program from the network when it is first used
        pytest.skip(f"Perfetto's trace processor does not start here: {type(error).__name__}")
    with reader:
        (found,) = reader.query("select count(*) as slices, sum(dur < 0) as open from slice")
        assert (found.slices, found.open) == (len(slices), 0)
        assert next(iter(reader.query("select count(*) as arrows from flow"))).arrows == len(arrows)
        (errors,) = reader.query("select sum(value) as n from stats where severity = 'error'")
        assert errors.n == 0
