"""Point to point: each receive names the very send whose payload it got.

A program moves thousands of tensors, each with a nonce in it, in every way that torch offers. Every rank notes the
nonce of each call in the order of its calls; its SEND and RECV records are in the same order and know of no nonces.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import INSTRUMENT, PYTHON, RUN_RANKS, Launcher
from records import Row, Writer, read_run
from synthetic import Writer as Synthetic

from lens_auto.export.pipeline_spans import apply_receive_sources
from lens_auto.recorder import ids
from lens_auto.recorder.layout import Flag, Kind

RANKS = 3

HEAD = (
    RUN_RANKS
    + """
import json, random
import torch
import torch.distributed as dist
try:
    from lens_auto import runtime
except ImportError:
    runtime = None

sent, received = [], []
received_sum = 0.0
recording = True
sizes = (1, 3, 64, 1000)

def switch(on):
    global recording
    recording = on
    if runtime.recorder is not None:
        runtime.set_groups(frozenset({"communication"} if on else ()))

def payload(nonce, size):
    tensor = torch.full((size,), float(nonce))
    if recording:
        sent.append(nonce)
    return tensor

class Got:
    '''A tensor to receive into; its nonce is noted once it is there, in the order of the calls.'''
    def __init__(self, size):
        self.tensor = torch.zeros(size)
        self.place = None
        if recording:
            self.place = len(received)
            received.append(None)
    def note(self, nonce=None):
        global received_sum
        nonce = int(self.tensor[0].item()) if nonce is None else nonce
        assert self.tensor.unique().numel() == 1
        received_sum += nonce
        if self.place is not None:
            received[self.place] = nonce

def end(path):
    with open(f"{path}.{rank}", "w") as file:
        json.dump({"sent": sent, "received": received, "sum": received_sum}, file)
    dist.destroy_process_group()
"""
)

# All ranks draw the same plan from a generator of their own.
RANDOM_TRAFFIC = (
    HEAD
    + """
def groups(everybody):
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    return [dist.group.WORLD, everybody, pairs]

def move(draw, made, nonces, how, count):
    plan = []
    of_all = draw.choice(made[:2])
    for _ in range(count):
        source, target = draw.sample(range(3), 2)
        group = of_all if how == "batch" else draw.choice(made)  # a batch is of one group
        if isinstance(group, dict):
            group = group[tuple(sorted((source, target)))]
        tag = 0 if how == "object" else draw.choice((0, 0, 1, 7))
        plan.append((source, target, group, tag, draw.choice(sizes), next(nonces), draw.random() < 0.5))
    pending, batch = [], []
    for source, target, group, tag, size, nonce, by_group in plan:
        if rank not in (source, target):
            continue
        sending = rank == source
        peer = target if sending else source
        ends = "dst" if sending else "src"
        name, number = (f"group_{ends}", dist.get_group_rank(group, peer)) if by_group else (ends, peer)
        peers = {name: number}
        if how == "blocking":
            if sending:
                dist.send(payload(nonce, size), group=group, tag=tag, **peers)
            else:
                got = Got(size)
                assert dist.recv(got.tensor, group=group, tag=tag, **peers) == source
                got.note()
        elif how == "object":
            if sending:
                dist.send_object_list([{"nonce": nonce}], group=group, **peers)
                if recording:
                    sent.append(nonce)
            else:
                got, found = Got(1), [None]
                dist.recv_object_list(found, group=group, **peers)
                got.note(found[0]["nonce"])
        elif how == "async":
            if sending:
                pending.append((dist.isend(payload(nonce, size), group=group, tag=tag, **peers), None))
            else:
                got = Got(size)
                pending.append((dist.irecv(got.tensor, group=group, tag=tag, **peers), got))
        else:
            got = None if sending else Got(size)
            tensor = payload(nonce, size) if sending else got.tensor
            operation = dist.isend if sending else dist.irecv
            where = {"group_peer": number} if by_group else {"peer": number}
            batch.append((dist.P2POp(operation, tensor, group=group, tag=tag, **where), got))
    if batch:
        # The order of records is that of the list; sends and receives may be mixed in any way between two ranks.
        works = dist.batch_isend_irecv([operation for operation, _ in batch])
        pending = [(work, got) for work, (_, got) in zip(works, batch, strict=True)]
    for work, got in pending if draw.random() < 0.5 else reversed(pending):
        work.wait()
        if got is not None:
            got.note()

def main(number):
    global rank
    rank = number
    draw, nonces = random.Random(11), iter(range(1, 1 << 20))
    for round in range(2):
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/init.{sys.argv[1]}.{round}",
                                rank=rank, world_size=3)
        everybody = dist.new_group([2, 0, 1], use_local_synchronization=True)  # named after its ranks
        made = groups(everybody)
        for part in range(24):
            if part in (8, 16):  # in the middle of things
                dist.barrier()
                for pair, group in made[2].items():
                    if rank in pair:
                        dist.destroy_process_group(group)
                made = groups(everybody)
            switch(part % 6 != 5)
            how = ("blocking", "async", "batch", "object")[part % 4]
            move(draw, made, nonces, how, 5 if how == "object" else 75)
        dist.barrier()
        if round == 0:
            dist.destroy_process_group()
    end(sys.argv[1])

run_ranks(main, 3)
"""
)

ANY_SOURCE = (
    HEAD
    + """
def main(number):
    global rank
    rank = number
    dist.init_process_group("gloo")
    nonces = iter(range(100_000 * rank + 1, 100_000 * (rank + 1)))
    def sends(count, tag=0, pause=0.0):
        for _ in range(count):
            dist.send(payload(next(nonces), 2), 0, tag=tag)
    def take(source=None, tag=0, later=False):
        got = Got(2)
        if later:
            return dist.irecv(got.tensor, source, tag=tag), got
        dist.recv(got.tensor, source, tag=tag)
        got.note()
    def left(taken):
        return [1] * (10 - sum(n < 200_000 for n in taken)) + [2] * (10 - sum(n > 200_000 for n in taken))
    kept = []
    def wait(*pending):
        for work, got in pending:
            work.wait()
            got.note()
        kept.extend(pending)
    for part, (tag, ours) in enumerate((
        # blocking, from whomever
        (0, lambda tag: [take(tag=tag) for _ in range(20)]),
        # then from each in turn: the counts have gone on
        (0, lambda tag: [take(source, tag) for _ in range(10) for source in (2, 1)]),
        # asynchronous, one after the other
        (1, lambda tag: [wait(take(tag=tag, later=True)) for _ in range(20)]),
        # a specific one is open when any source is asked for, and the other way round
        (2, lambda tag: [wait(take(1, tag, True), take(None, tag, True)) for _ in range(5)] and
                        [take(source, tag) for source in left(received[-10:])]),
    )):
        if rank == 0:
            ours(tag)
        else:
            sends(10, tag)
        dist.barrier()
    # each from another rank, posted together: known once they are over
    for _ in range(10):
        if rank == 0:
            wait(take(None, 3, True), take(None, 3, True))
        else:
            sends(1, 3)
        dist.barrier()
    if rank == 0:  # whatever was open is looked at when something else is transferred
        take(1, 4)
        take(2, 4)
    else:
        sends(1, 4)
    # works that are gone right after their wait, before anybody could ask them
    if rank == 0:
        for _ in range(20):
            work, got = take(None, 6, True)
            work.wait()
            got.note()
            del work
    else:
        sends(10, 6)
    # groups that are destroyed and made again, with something open when they go; then the whole world
    for _ in range(2):
        group = dist.new_group([0, 1, 2])
        if rank == 0:
            for _ in range(10):
                for source in (2, 1):
                    got = Got(2)
                    dist.recv(got.tensor, source, group=group, tag=8)
                    got.note()
            for _ in range(20):
                got = Got(2)
                dist.recv(got.tensor, None, group=group, tag=8)
                got.note()
        else:
            for _ in range(20):
                dist.send(payload(next(nonces), 2), 0, group=group, tag=8)
        dist.barrier(group)
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/again.{sys.argv[1]}", rank=rank, world_size=3)
    if rank == 0:
        [take(tag=9) for _ in range(10)]
        [take(source, 9) for source in left(received[-10:])]
    else:
        sends(10, 9)
    dist.barrier()
    # a failed call is no message
    if rank:
        try:
            dist.send(torch.zeros(1), rank)
        except ValueError:
            sent.append(0)
        sends(1, 5)
    else:
        take(2, 5)
        take(1, 5)
    dist.barrier()
    end(sys.argv[1])

run_ranks(main, 3)
"""
)


class Traffic:
    """One run of a program: what it moved, and what was recorded of it."""

    def __init__(self, launch: Launcher, source: str) -> None:
        program = launch.program(source)
        env = {"NEMO_LENS_SPAN_GROUPS": "communication", "NEMO_LENS_PROPAGATION": "off"}
        run = launch.run(*INSTRUMENT, *PYTHON, program, "told", env=env, timeout_s=90).check()
        self.told: list[dict[str, Any]] = [
            json.loads(Path(launch.cwd / f"told.{rank}").read_text()) for rank in range(RANKS)
        ]
        self.writers = {writer.rank: writer for writer in read_run(run.run_dir)}
        assert sorted(self.writers) == list(range(RANKS))
        for writer in self.writers.values():
            assert (writer.info["hooks_off"], writer.info["hook_faults"]) == ({}, 0)
        self.sends: dict[bytes, int] = {}
        for rank, writer in self.writers.items():
            sent = writer.of(Kind.SEND)
            assert len(sent) == len(self.told[rank]["sent"])
            for row, nonce in zip(sent, self.told[rank]["sent"], strict=True):
                if row.seq < 0:
                    assert row.flags & Flag.FAILED
                    continue
                span_id = _span_id(writer, row, rank, row.peer)
                assert span_id not in self.sends, "no two sends have one id"
                self.sends[span_id] = nonce

    def received(self, rank: int) -> list[tuple[Row, Row, int]]:
        """Each receive as it was recorded, as it is known at the end, and the nonce that it got."""
        writer = self.writers[rank]
        records = writer.files.records()
        corrected = apply_receive_sources(records.data, records.numbers)
        at_the_end = Writer(writer.files)
        fields = ("peer", "seq", "flags")
        now = {
            number: dict(zip(fields, values, strict=True))
            for number, *values in zip(
                records.numbers.tolist(), *(corrected[each].tolist() for each in fields), strict=True
            )
        }
        rows = at_the_end.of(Kind.RECV)
        found = []
        assert len(rows) == len(self.told[rank]["received"])
        for row, nonce in zip(rows, self.told[rank]["received"], strict=True):
            values = {**vars(row), **now[row.number], "flags": Flag(now[row.number]["flags"])}
            found.append((row, Row(**values), nonce))
        return found

    def link(self, rank: int, row: Row) -> int | None:
        """The nonce of the send that a receive links to; None where it is ambiguous."""
        if row.flags & Flag.AMBIGUOUS or row.peer < 0 or row.seq < 0:
            return None
        return self.sends[_span_id(self.writers[rank], row, row.peer, rank)]


def _span_id(writer: Writer, row: Row, source: int, target: int) -> bytes:
    seed = writer.files.info.seed
    assert seed is not None
    return ids.send_span_id(seed, row.group, row.init, source, target, row.tag, row.seq)


@pytest.fixture(scope="module")
def random_traffic(launch_once: Launcher) -> Traffic:
    return Traffic(launch_once, RANDOM_TRAFFIC)


def test_random_traffic(random_traffic: Traffic) -> None:
    checked: Counter[str] = Counter()
    for rank in range(RANKS):
        for _, row, nonce in random_traffic.received(rank):
            assert random_traffic.link(rank, row) == nonce
            checked[row.name] += 1
    assert sum(checked.values()) >= 2000
    assert set(checked) == {"recv", "irecv", "recv_object_list"}


def test_random_traffic_was_varied(random_traffic: Traffic) -> None:
    """Several initializations with the same names of groups, groups made again, tags, and switching in between."""
    rows = [row for rank in range(RANKS) for row in random_traffic.writers[rank].of(Kind.SEND)]
    assert {row.init for row in rows} == {1, 2}
    assert {row.tag for row in rows} == {0, 1, 7}
    assert len({(row.init, row.group) for row in rows}) > 10
    assert len({row.group for row in rows}) < len({(row.init, row.group) for row in rows})
    # What was moved while nothing was recorded is in the counts: numbers are missing among those recorded.
    first = random_traffic.writers[0].of(Kind.SEND)
    numbers = [row.seq for row in first if (row.init, row.group, row.tag, row.peer) == (1, "0", 0, 1)]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] >= len(numbers)


@pytest.fixture(scope="module")
def any_source(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    launcher = Launcher(tmp_path_factory.mktemp("any"))
    try:
        return Traffic(launcher, ANY_SOURCE)
    finally:
        launcher.close()


def test_what_any_source_links_to_is_right(any_source: Traffic) -> None:
    for rank in range(RANKS):
        for _, row, nonce in any_source.received(rank):
            assert any_source.link(rank, row) in (nonce, None)


def test_what_can_be_known_of_any_source_is_known(any_source: Traffic) -> None:
    linked = Counter((row.tag, any_source.link(0, row) is not None) for _, row, _ in any_source.received(0))
    assert linked[0, True] == 40 and not linked[0, False]
    assert linked[1, True] == 20 and not linked[1, False]
    # Five pairs of a specific receive and one from any source: known only where they turned out to have two sources.
    assert linked[2, True] + linked[2, False] == 20
    assert linked[2, True] >= 10
    assert linked[3, True] == 20 and not linked[3, False]
    assert linked[4, True] == 2 and linked[5, True] == 2
    # In two groups one after the other: first from each, then from whomever; and after the world was made again.
    assert linked[8, True] == 80 and not linked[8, False]
    assert linked[9, True] == 20 and not linked[9, False]


def test_any_source_in_groups_that_were_made_again(any_source: Traffic) -> None:
    rows = [row for _, row, _ in any_source.received(0)]
    assert len({row.group for row in rows if row.tag == 8}) == 2
    assert {row.init for row in rows if row.tag == 9} == {2}
    assert {row.init for row in rows if row.tag < 5} == {1}


def test_a_specific_receive_beside_any_source_is_ambiguous(any_source: Traffic) -> None:
    rows = [(at_first, row) for at_first, row, _ in any_source.received(0) if row.tag == 2]
    pairs = list(zip(rows[0:10:2], rows[1:10:2], strict=True))
    for (specific_at_first, specific), (any_at_first, any_row) in pairs:
        assert not specific_at_first.flags & Flag.AMBIGUOUS  # nothing was doubtful when it was posted
        assert any_at_first.flags & Flag.AMBIGUOUS
        assert any_at_first.flags & Flag.ANY_SOURCE
        same = any_row.peer == specific.peer
        assert bool(specific.flags & Flag.AMBIGUOUS) == bool(any_row.flags & Flag.AMBIGUOUS) == same


def test_the_program_receives_the_same_without_us(launch: Launcher) -> None:
    program = launch.program(ANY_SOURCE)
    bare = launch.run(*PYTHON, program, "bare", timeout_s=60)
    assert bare.code == 0, bare.stderr
    told = [json.loads((launch.cwd / f"bare.{rank}").read_text()) for rank in range(RANKS)]
    everything = sum(sum(each["sent"]) for each in told)
    assert sum(each["sum"] for each in told) == everything


def test_later_word_of_a_receive() -> None:
    """The last one counts; what refers to nothing or to another kind changes nothing."""
    writer = Synthetic()
    first = writer.take(Kind.RECV, 1, Flag.SPAN | Flag.AMBIGUOUS | Flag.ANY_SOURCE, tag=3)
    second = writer.take(Kind.RECV, 1, Flag.SPAN, peer=1, seq=4)
    send = writer.take(Kind.SEND, 1, Flag.SPAN, peer=1, seq=9)
    writer.add(Kind.RECV_SOURCE, 5, 5, Flag.AMBIGUOUS, ref=first + 1, peer=2)
    writer.add(Kind.RECV_SOURCE, 6, 6, 0, ref=first + 1, peer=2, seq=7)
    writer.add(Kind.RECV_SOURCE, 6, 6, Flag.AMBIGUOUS, ref=second + 1, peer=1)
    for ref in (send + 1, 0, 1000, 1 << 63):
        writer.add(Kind.RECV_SOURCE, 7, 7, Flag.AMBIGUOUS, ref=ref, peer=5)
    data = writer.array()
    before = data.copy()
    found = apply_receive_sources(data, np.arange(len(data)))
    assert (data == before).all()
    assert found[first][["peer", "seq", "flags"]].tolist() == (2, 7, Flag.SPAN | Flag.ANY_SOURCE)
    assert found[second][["peer", "seq", "flags"]].tolist() == (1, -1, Flag.SPAN | Flag.AMBIGUOUS)
    assert found[send].tolist() == before[send].tolist()
    untouched = Synthetic().array()
    assert apply_receive_sources(untouched, np.arange(0)) is untouched
