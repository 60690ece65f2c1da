"""Every communication call of `torch.distributed` on two gloo ranks: one record each, the same on both ends."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from launch import RUN_RANKS, Launcher
from records import Row, Writer, read_run

from lens_auto.recorder.layout import Flag, Kind

# operation, call, bytes, dtype. `t(n)` is n float32 ones; `g` the group; ROOT holds what rank 0 alone passes. Bytes are
# what a rank puts in; scatter: what it takes out; object forms are not known.
CALLS = [
    ("all_reduce", "dist.all_reduce(t(4), group=g)", 16, "float32"),
    ("all_reduce_coalesced", "dist.all_reduce_coalesced([t(4), t(2)], group=g)", 24, "float32"),
    ("broadcast", "dist.broadcast(t(4), 0, group=g)", 16, "float32"),
    ("reduce", "dist.reduce(t(4), 0, group=g)", 16, "float32"),
    ("all_gather", "dist.all_gather([t(4), t(4)], t(4), group=g)", 16, "float32"),
    ("all_gather_single", "dist.all_gather_single(t(8), t(4), group=g)", 16, "float32"),
    ("all_gather_into_tensor", "dist.all_gather_into_tensor(t(8), t(4), group=g)", 16, "float32"),
    ("_all_gather_base", "dist.distributed_c10d._all_gather_base(t(8), t(4), group=g)", 16, "float32"),
    (
        "all_gather_coalesced",
        "dist.all_gather_coalesced([[t(4), t(2)], [t(4), t(2)]], [t(4), t(2)], group=g)",
        24,
        "float32",
    ),
    ("gather", "dist.gather(t(4), root([t(4), t(4)]), 0, group=g)", 16, "float32"),
    ("scatter", "dist.scatter(t(4), root([t(4), t(4)]), 0, group=g)", 16, "float32"),
    ("reduce_scatter", "dist.reduce_scatter(t(4), [t(4), t(4)], group=g)", 32, "float32"),
    ("reduce_scatter_single", "dist.reduce_scatter_single(t(4), t(8), group=g)", 32, "float32"),
    ("reduce_scatter_tensor", "dist.reduce_scatter_tensor(t(4), t(8), group=g)", 32, "float32"),
    ("_reduce_scatter_base", "dist.distributed_c10d._reduce_scatter_base(t(4), t(8), group=g)", 32, "float32"),
    ("all_to_all", "dist.all_to_all([t(4), t(4)], [t(4), t(4)], group=g)", 32, "float32"),
    ("all_to_all_single", "dist.all_to_all_single(t(4), t(4), group=g)", 16, "float32"),
    ("barrier", "dist.barrier(group=g)", 0, ""),
    ("monitored_barrier", "dist.monitored_barrier(group=g)", 0, ""),
    ("all_gather_object", "dist.all_gather_object([None, None], 'x', group=g)", 0, ""),
    ("gather_object", "dist.gather_object('x', root([None, None]), group=g)", 0, ""),
    ("broadcast_object_list", "dist.broadcast_object_list(['x'], group=g)", 0, ""),
    ("scatter_object_list", "dist.scatter_object_list([None], root(['x', 'y']), group=g)", 0, ""),
]
ODD = [  # what tensors may be, and every argument by keyword
    ("all_reduce", "dist.all_reduce(tensor=t(4), op=dist.ReduceOp.SUM, group=None, async_op=False)", 16, "float32"),
    ("broadcast", "dist.broadcast(tensor=t(4), src=0)", 16, "float32"),
    ("all_gather_into_tensor", "dist.all_gather_into_tensor(output_tensor=t(8), input_tensor=t(4))", 16, "float32"),
    ("reduce_scatter_tensor", "dist.reduce_scatter_tensor(output=t(4), input=t(8))", 32, "float32"),
    ("all_reduce", "dist.all_reduce(torch.ones(3, dtype=torch.bfloat16))", 6, "bfloat16"),
    ("all_reduce", "dist.all_reduce(torch.ones(3, dtype=torch.int64))", 24, "int64"),
    ("all_reduce", "dist.all_reduce(torch.ones(4, dtype=torch.complex64))", 32, "complex64"),
    ("all_reduce", "dist.all_reduce(torch.nn.Parameter(t(4)).detach())", 16, "float32"),
    ("all_reduce", "dist.all_reduce(t(0))", 0, "float32"),
    # two int64 indices and two float32 values
    ("all_reduce", "dist.all_reduce(torch.sparse_coo_tensor([[0, 2]], t(2), (4,)).coalesce())", 24, "float32"),
]
NOT_ASYNC = {"monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
ASYNC = [
    (operation, f"{call[:-1]}, async_op=True).wait()", *rest)
    for operation, call, *rest in CALLS
    if operation not in NOT_ASYNC
]

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
import warnings
warnings.simplefilter("ignore")

def t(size):
    return torch.ones(size)

def main(rank):
    dist.init_process_group("gloo")

    def root(value):
        return value if rank == 0 else None

    def run(calls, g=None):
        for call in calls:
            eval(call, globals(), {"g": g, "root": root})

    run(CALLS)
    with torch.device("cpu"):
        run(CALLS)
    run(ASYNC)
    run(CALLS, dist.new_group([0, 1], group_desc="both"))
    run(ODD)

    one = dist.new_group([0], group_desc="one")
    dist.all_reduce(t(4), group=one)  # rank 1 is not in it

    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(t(4))
        dist.all_reduce(t(2))
    manager.wait()

    try:
        dist.all_reduce("not a tensor")
    except TypeError as error:
        failure = type(error).__name__

    # point to point
    other = 1 - rank
    def ring(send, receive):
        (send if rank == 0 else receive)()
        (receive if rank == 0 else send)()
    for _ in range(2):
        ring(lambda: dist.send(t(4), other), lambda: dist.recv(t(4), other))
    ring(lambda: dist.send(t(2), other, tag=5), lambda: dist.recv(t(2), other, tag=5))
    ring(lambda: dist.send(tensor=t(2), group_dst=other), lambda: dist.recv(tensor=t(2), group_src=other))
    works = [dist.isend(t(8), other), dist.irecv(t(8), other), dist.isend(t(8), dst=other), dist.irecv(t(8), src=other)]
    for work in works:
        work.wait()
    operations = [dist.P2POp(dist.isend, t(3), other), dist.P2POp(dist.irecv, t(3), other)] * 2
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    ring(lambda: dist.send_object_list(["x", 1], other), lambda: dist.recv_object_list([None, None], other))
    with torch.device("cpu"):
        ring(lambda: dist.send(t(4), other), lambda: dist.recv(t(4), other))
    pair = dist.new_group([0, 1], group_desc="pair")
    ring(lambda: dist.send(t(1), other, group=pair), lambda: dist.recv(t(1), other, group=pair))
    # from whoever sends: a blocking receive says who it was, another one does not
    ring(lambda: dist.send(t(1), other, tag=7), lambda: dist.recv(t(1), tag=7))
    ring(lambda: dist.send(t(1), other, tag=7), lambda: dist.recv(t(1), other, tag=7))
    ring(lambda: dist.send(t(1), other, tag=9), lambda: dist.irecv(t(1), tag=9).wait())
    ring(lambda: dist.send(t(1), other, tag=9), lambda: dist.recv(t(1), other, tag=9))

    print(json.dumps({"rank": rank, "failure": failure}))
    dist.destroy_process_group()

run_ranks(main, 2)
"""


@dataclass(frozen=True)
class Recorded:
    """Records of both ranks, and what rank 0 saw."""

    writers: list[Writer]
    failure: str


@pytest.fixture(scope="module")
def recorded(launch_once: Launcher) -> Recorded:
    tables = "".join(
        f"{name} = {[call for _, call, *_ in calls]}\n"
        for name, calls in (("CALLS", CALLS), ("ASYNC", ASYNC), ("ODD", ODD))
    )
    source = RUN_RANKS + tables + PROGRAM
    run = launch_once.instrumented(source, env={"NEMO_LENS_SPAN_GROUPS": "communication"}).check()
    writers = read_run(run.run_dir)
    assert [writer.rank for writer in writers] == [0, 1]
    for writer in writers:
        assert (writer.info["hook_faults"], writer.info["hooks_off"], writer.info["dropped"]) == (0, {}, 0)
    return Recorded(writers, json.loads(run.stdout.splitlines()[0])["failure"])


def blocks(writer: Writer) -> dict[str, list[Row]]:
    """A writer's collectives, cut by the order of the program."""
    sizes = {"plain": len(CALLS), "device": len(CALLS), "async": len(ASYNC), "subgroup": len(CALLS), "odd": len(ODD)}
    sizes |= {"one": 1 if writer.rank == 0 else 0, "coalesced": 2, "failed": 1}
    rows = writer.of(Kind.COLLECTIVE)
    found = {}
    for name, size in sizes.items():
        found[name], rows = rows[:size], rows[size:]
    found["rest"] = rows
    return found


EXPECTED = {"plain": CALLS, "device": CALLS, "async": ASYNC, "subgroup": CALLS, "odd": ODD}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("block", EXPECTED)
def test_each_call_is_one_record(recorded: Recorded, block: str, rank: int) -> None:
    rows = blocks(recorded.writers[rank])[block]
    assert [(row.name, row.bytes, row.dtype) for row in rows] == [
        (operation, size, dtype) for operation, _, size, dtype in EXPECTED[block]
    ]
    assert {row.group_size for row in rows} == {2}
    assert {bool(row.flags & Flag.ASYNC) for row in rows} == {block == "async"}
    assert {bool(row.flags & (Flag.FAILED | Flag.COALESCED)) for row in rows} == {False}
    assert len({row.group for row in rows}) == 1
    assert all(0 < row.start_ns <= row.end_ns for row in rows)


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_else_is_recorded(recorded: Recorded, rank: int) -> None:
    assert blocks(recorded.writers[rank])["rest"] == []


def test_sub_groups_have_names_of_their_own(recorded: Recorded) -> None:
    for writer in recorded.writers:
        found = blocks(writer)
        assert found["plain"][0].group != found["subgroup"][0].group
        made = [row for row in writer.of(Kind.PROCESS_GROUP) if row.name == "new_group"]
        assert made[0].detail == "both"
        assert made[0].group == found["subgroup"][0].group
    names = [{row.group for row in writer.of(Kind.COLLECTIVE) if row.group_size == 2} for writer in recorded.writers]
    assert names[0] == names[1]


def test_a_rank_outside_of_the_group_records_nothing(recorded: Recorded) -> None:
    (row,) = blocks(recorded.writers[0])["one"]
    assert (row.name, row.bytes, row.group_size) == ("all_reduce", 16, 1)
    assert blocks(recorded.writers[1])["one"] == []


def test_sequence_numbers_are_the_same_on_both_ranks(recorded: Recorded) -> None:
    """(group, sequence number) names a collective; nothing in a group has the number of another."""
    named: list[list[tuple[str, int, str]]] = []
    for writer in recorded.writers:
        found = blocks(writer)
        rows = [row for block in ("plain", "device", "async", "subgroup", "odd") for row in found[block]]
        named.append([(row.group, row.seq, row.name) for row in rows])
        numbers = [(row.group, row.seq) for row in rows]
        assert len(set(numbers)) == len(numbers)
        assert min(seq for _, seq in numbers) >= 1
        for group in {row.group for row in rows}:
            of_group = [seq for name, seq in numbers if name == group]
            assert of_group == sorted(of_group)
    assert named[0] == named[1]


def test_waits_complete_asynchronous_calls(recorded: Recorded) -> None:
    for writer in recorded.writers:
        awaited = {row.ref - 1: row for row in writer.of(Kind.WAIT)}
        for row in blocks(writer)["async"]:
            if row.name in ("all_reduce_coalesced", "all_gather_coalesced"):
                # these return a future, whose wait is not `Work.wait`: readers see that their end is unknown
                assert row.number not in awaited
                continue
            wait = awaited[row.number]
            assert row.start_ns <= wait.start_ns <= wait.end_ns
            assert wait.exposed_ns == wait.end_ns - wait.start_ns
        # the waits inside blocking calls are part of them
        blocking = {row.number for name in ("plain", "device", "subgroup", "odd") for row in blocks(writer)[name]}
        assert not blocking & set(awaited)


def test_coalescing_manager(recorded: Recorded) -> None:
    for writer in recorded.writers:
        rows = blocks(writer)["coalesced"]
        assert [(row.name, row.bytes) for row in rows] == [("all_reduce", 16), ("all_reduce", 8)]


def test_a_failed_call(recorded: Recorded) -> None:
    assert recorded.failure == "TypeError"
    for writer in recorded.writers:
        (row,) = blocks(writer)["failed"]
        assert (row.name, row.detail, bool(row.flags & Flag.FAILED)) == ("all_reduce", "TypeError", True)


# --- point to point ---------------------------------------------------------------------------------------------------

# What each rank does with the other in the program's order: send and receive, bytes, tag. Rank 0 sends first.
TRANSFERS = [
    *[("send", "recv", 16, 0)] * 2,
    ("send", "recv", 8, 5),
    ("send", "recv", 8, 0),
    *[("isend", "irecv", 32, 0)] * 2,
    *[("isend", "irecv", 12, 0)] * 2,
    ("send_object_list", "recv_object_list", 0, 0),
    ("send", "recv", 16, 0),
    ("send", "recv", 4, 0),
    *[("send", "recv", 4, 7)] * 2,
    ("send", "irecv", 4, 9),
    ("send", "recv", 4, 9),
]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_transfer_is_one_record(recorded: Recorded, rank: int) -> None:
    writer = recorded.writers[rank]
    sends, receives = writer.of(Kind.SEND), writer.of(Kind.RECV)
    assert [(row.name, row.bytes, row.tag) for row in sends] == [(send, size, tag) for send, _, size, tag in TRANSFERS]
    assert [(row.name, row.bytes, row.tag) for row in receives] == [
        (receive, size, tag) for _, receive, size, tag in TRANSFERS
    ]
    assert {row.peer for row in sends} == {1 - rank}
    assert {row.group_size for row in sends + receives} == {2}


@dataclass(frozen=True)
class Receive:
    """A receive with what is known of its send in the end."""

    row: Row
    peer: int
    k: int
    known: bool


def receives(writer: Writer) -> list[Receive]:
    later = {row.ref - 1: row for row in writer.of(Kind.RECV_SOURCE)}
    found = []
    for row in writer.of(Kind.RECV):
        last = later.get(row.number, row)
        found.append(Receive(row, last.peer, last.seq, not last.flags & Flag.AMBIGUOUS))
    return found


def test_k_and_peer_agree_at_both_ends(recorded: Recorded) -> None:
    """Both ends of a transfer name it alike: group, tag, and a number that counts what went from one to the other."""
    for sender, receiver in (recorded.writers, recorded.writers[::-1]):
        sends = {(row.group, row.tag, row.seq): row for row in sender.of(Kind.SEND)}
        assert len(sends) == len(TRANSFERS)
        last = {}
        for group, tag, k in sends:
            assert k > last.get((group, tag), -1)
            last[group, tag] = k
        found = receives(receiver)
        told = [receive for receive in found if receive.known]
        assert [receive.row.tag for receive in found if not receive.known] in ([], [9], [9, 9])
        assert {receive.peer for receive in told} == {sender.rank}
        named = [(receive.row.group, receive.row.tag, receive.k) for receive in told]
        assert len(set(named)) == len(named)
        # No two sends here are under way at once on a tag: they arrive in the order of the program.
        assert named == [name for name in sends if name[1] != 9 or len(told) == len(TRANSFERS)]
        for name, receive in zip(named, told, strict=True):
            send, row = sends[name], receive.row
            assert (send.bytes, send.dtype, send.init) == (row.bytes, row.dtype, row.init)
            assert row.flags & Flag.ASYNC or send.start_ns <= row.end_ns


def test_receives_from_any_source(recorded: Recorded) -> None:
    """A blocking one says whose message it took; after another, what comes next on the tag is in doubt at first."""
    for writer in recorded.writers:
        rows = [row for row in writer.of(Kind.RECV) if row.tag in (7, 9)]
        assert [bool(row.flags & Flag.ANY_SOURCE) for row in rows] == [True, False, True, False]
        assert [bool(row.flags & Flag.AMBIGUOUS) for row in rows[:3]] == [False, False, True]
        assert [row.peer for row in rows] == [1 - writer.rank, 1 - writer.rank, -1, 1 - writer.rank]


def test_waits_complete_asynchronous_transfers(recorded: Recorded) -> None:
    for writer in recorded.writers:
        awaited = {row.ref - 1 for row in writer.of(Kind.WAIT)}
        started = {row.number for row in writer.of(Kind.SEND, Kind.RECV) if row.flags & Flag.ASYNC}
        assert len(started) == 9  # 4 isend and irecv, 4 in a batch, the irecv from any source
        assert started <= awaited
