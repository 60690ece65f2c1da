"""Records to spans: names, times, ids, parents, links, attributes, and that nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from synthetic import MONOTONIC_0, MS, WALL_0, Writer, at, train, wall, write_run

from lens_auto.export.spans import Span, WriterSpans, run_spans
from lens_auto.recorder import ids
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RunDirectory

SEED = bytes(15) + b"\x07"
JOB = ids.job_trace_id(SEED)


def export(folder: Path, *writers: Writer) -> list[list[Span]]:
    """The spans of each writer, by rank."""
    run = RunDirectory(write_run(folder / "run", *writers))
    found = []
    for made in run_spans(run):
        spans = list(made.spans)
        assert made.count == len(spans)
        found.append(spans)
    assert run.problems == []
    everything = [span for spans in found for span in spans]
    assert max(Counter((span.trace_id, span.span_id) for span in everything).values(), default=1) == 1
    assert len({span.span_id for span in everything}) == len(everything)
    known = {span.span_id: span for span in everything}
    for span in everything:
        assert span.end_ns >= span.start_ns
        assert "lens.timing_source" in span.attributes
        if span.parent_id is not None:
            assert known[span.parent_id].trace_id == span.trace_id
        for link in span.links:
            if link.attributes.get("lens.link.exported", True):
                assert known[link.span_id].trace_id == link.trace_id
            else:
                assert link.span_id not in known
    return found


def only(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def ms(span: Span) -> tuple[float, float]:
    return (span.start_ns - WALL_0) / MS, (span.end_ns - WALL_0) / MS


def pair(**both: Any) -> tuple[Writer, Writer]:
    first = Writer(rank=0, world_size=2, **both)
    second = Writer(rank=1, world_size=2, pid=4243, nonce=0x2222, **both)
    return first, second


def test_plain_training_on_two_ranks(tmp_path: Path) -> None:
    first, second = pair()
    zero, one = export(tmp_path, train(first, 3), train(second, 3))
    assert Counter(span.name for span in zero) == {
        "train.job": 1,
        "train.iteration": 3,
        "train.forward": 3,
        "train.backward": 3,
        "train.optimizer_step": 3,
        "train.data_loading": 5,  # starting the loader, three batches, the end
        "torch.distributed.all_reduce": 3,
        "torch.distributed.init_process_group": 1,
        "train.model_init": 1,
    }
    for number, (here, there) in enumerate(
        zip(named(zero, "train.iteration"), named(one, "train.iteration"), strict=True)
    ):
        assert here.trace_id == there.trace_id == ids.iteration_trace_id(SEED, number)
        assert here.span_id == ids.iteration_span_id(SEED, number, 0)
        assert there.span_id == ids.iteration_span_id(SEED, number, 1)
        assert here.parent_id is there.parent_id is None
        assert here.links == []
        assert [(link.trace_id, link.span_id, link.attributes) for link in there.links] == [
            (here.trace_id, here.span_id, {})
        ]
        assert here.attributes == {"dl.iteration": number, "lens.timing_source": "host"}


def test_one_iteration_in_full(tmp_path: Path) -> None:
    writer = train(Writer(), 2)
    (spans,) = export(tmp_path, writer)
    trace = ids.iteration_trace_id(SEED, 1)
    inside = {span.name: span for span in spans if span.trace_id == trace}
    assert {name: ms(span) for name, span in inside.items()} == {
        "train.iteration": (22, 33),
        "train.data_loading": (23, 25),
        "train.forward": (25, 28),
        "train.backward": (28, 32),
        "torch.distributed.all_reduce": (29, 31),  # from the call to the end of its wait
        "train.optimizer_step": (32, 33),
    }
    root = inside["train.iteration"].span_id
    parents = {name: span.parent_id for name, span in inside.items()}
    assert parents == {
        "train.iteration": None,
        "train.data_loading": root,
        "train.forward": root,
        "train.backward": root,
        "torch.distributed.all_reduce": inside["train.backward"].span_id,
        "train.optimizer_step": root,
    }
    backward = next(i for i, record in enumerate(writer.records) if record["start_ns"] == at(28))
    assert inside["train.backward"].span_id == ids.record_span_id(writer.nonce, backward).to_bytes(8, "big")
    assert inside["train.forward"].span_id == ids.forward_span_id(SEED, writer.nonce, backward)
    assert inside["train.forward"].attributes == {"lens.inferred": True, "lens.timing_source": "host"}
    assert inside["train.optimizer_step"].attributes == {"dl.optimizer": "SGD", "lens.timing_source": "host"}
    assert inside["torch.distributed.all_reduce"].attributes == {
        "lens.timing_source": "host",
        "dl.comm.group": "0",
        "dl.comm.group_size": 1,
        "dl.comm.seq": 1,
        "dl.comm.bytes": 4096,
        "dl.comm.dtype": "float32",
        "dl.comm.async": True,
        "dl.comm.exposed_ns": 1_500_000,  # 0.5 ms in the call, 1 ms in the wait
    }


def test_the_jobs_trace(tmp_path: Path) -> None:
    writer = train(Writer(), 1)
    writer.take(Kind.CHECKPOINT_LOAD, 2, name="old.pt", bytes=5)
    (spans,) = export(tmp_path, writer)
    job = only(spans, "train.job")
    assert (job.trace_id, job.span_id, job.parent_id) == (JOB, ids.job_span_id(SEED, 0, writer.nonce), None)
    assert ms(job) == (0, writer.now)
    assert job.attributes == {"lens.timing_source": "host"}
    init = only(spans, "torch.distributed.init_process_group")
    assert (init.trace_id, init.parent_id) == (JOB, job.span_id)
    assert init.attributes == {"lens.timing_source": "host", "dl.comm.group": "0", "dl.comm.group_size": 1}
    wrapped = only(spans, "train.model_init")
    assert (wrapped.trace_id, wrapped.parent_id, wrapped.links) == (JOB, job.span_id, [])
    assert wrapped.attributes["dl.model.wrapper"] == "DistributedDataParallel"
    loaded = only(spans, "checkpoint.load")
    assert (loaded.trace_id, loaded.parent_id, loaded.links) == (JOB, job.span_id, [])
    assert loaded.attributes == {"lens.timing_source": "host", "file.path": "old.pt", "file.size": 5}
    # The fetch that ended the pass comes after the last iteration.
    ended = named(spans, "train.data_loading")[-1]
    assert (ended.trace_id, ended.parent_id) == (JOB, job.span_id)
    assert ended.attributes["dl.loader.exhausted"] is True


def with_evaluation_and_checkpoint(writer: Writer) -> Writer:
    """An iteration, an evaluation of two batches with all-gathers, a checkpoint with a barrier, an iteration."""
    training = writer.loader(1)
    for last in (False, True):
        writer.fetch(training)
        writer.wait(3)
        writer.backward()
        writer.step()
        if last:
            break
        evaluation = writer.loader(1)
        for _ in range(2):
            writer.fetch(evaluation)
            writer.take(Kind.COLLECTIVE, 1, name="all_gather", group="0")
        writer.exhaust(evaluation)
        start = writer.now
        writer.take(Kind.COLLECTIVE, 1, name="barrier", group="0")
        writer.wait(4)
        writer.add(Kind.CHECKPOINT_SAVE, start, writer.now, name="model.pt", bytes=1234)
    return writer


def test_evaluation_and_checkpoints_live_in_the_jobs_trace(tmp_path: Path) -> None:
    writer = with_evaluation_and_checkpoint(Writer())
    (spans,) = export(tmp_path, writer)
    job, iteration = only(spans, "train.job"), named(spans, "train.iteration")[1]
    evaluate, checkpoint = only(spans, "train.evaluate"), only(spans, "checkpoint.save")
    for span in (evaluate, checkpoint):
        assert (span.trace_id, span.parent_id) == (JOB, job.span_id)
        assert [(link.trace_id, link.span_id, link.attributes) for link in span.links] == [
            (iteration.trace_id, iteration.span_id, {})
        ]
    assert evaluate.attributes == {"dl.batches": 2, "dl.iteration": 1, "lens.timing_source": "host"}
    assert checkpoint.attributes["file.size"] == 1234
    # What happens inside is in their trace, below them.
    assert {span.parent_id for span in named(spans, "torch.distributed.all_gather")} == {evaluate.span_id}
    assert only(spans, "torch.distributed.barrier").parent_id == checkpoint.span_id
    fetches = [span for span in named(spans, "train.data_loading") if span.parent_id == evaluate.span_id]
    assert len(fetches) == 4


def test_without_their_groups_communication_is_the_iterations(tmp_path: Path) -> None:
    writer = with_evaluation_and_checkpoint(Writer(groups=["step", "communication"]))
    for record in writer.records:
        record["flags"] &= ~Flag.SPAN if record["kind"] != Kind.COLLECTIVE else -1
    (spans,) = export(tmp_path, writer)
    iteration = named(spans, "train.iteration")[1]
    assert Counter(span.name for span in spans) == {
        "train.iteration": 2,
        "torch.distributed.all_gather": 2,
        "torch.distributed.barrier": 1,
    }
    assert {span.parent_id for span in spans if span.name.startswith("torch")} == {iteration.span_id}


def spans_only_of(writer: Writer, *kinds: Kind) -> Writer:
    for record in writer.records:
        if record["kind"] not in kinds:
            record["flags"] &= ~Flag.SPAN
    return writer


def test_communication_alone_has_no_parents(tmp_path: Path) -> None:
    writer = spans_only_of(train(Writer(groups=["communication"]), 3), Kind.COLLECTIVE, Kind.PROCESS_GROUP)
    (spans,) = export(tmp_path, writer)
    assert Counter(span.name for span in spans) == {
        "torch.distributed.all_reduce": 3,
        "torch.distributed.init_process_group": 1,
    }
    assert {span.parent_id for span in spans} == {None}
    traces = [span.trace_id for span in named(spans, "torch.distributed.all_reduce")]
    assert traces == [ids.iteration_trace_id(SEED, number) for number in range(3)]


def test_the_default_groups_have_no_span_per_iteration(tmp_path: Path) -> None:
    writer = with_evaluation_and_checkpoint(Writer(groups=["job", "checkpoint", "evaluate"]))
    (spans,) = export(tmp_path, spans_only_of(writer, Kind.CHECKPOINT_SAVE))
    assert Counter(span.name for span in spans) == {"train.job": 1, "train.evaluate": 1, "checkpoint.save": 1}
    # The iteration that they belong to is named all the same.
    for span in spans[1:]:
        (link,) = span.links
        assert link.span_id == ids.iteration_span_id(SEED, 1, 0)
        assert link.attributes == {"lens.link.exported": False}


def test_a_link_to_a_rank_that_does_not_export(tmp_path: Path) -> None:
    (spans,) = export(tmp_path, train(Writer(rank=3, world_size=4), 2))
    for span in named(spans, "train.iteration"):
        assert [link.attributes for link in span.links] == [{"lens.link.exported": False}]


def test_rank_0_died_earlier(tmp_path: Path) -> None:
    first, second = pair()
    first.closed = False
    zero, one = export(tmp_path, train(first, 2), train(second, 4))
    assert [link.attributes for span in named(one, "train.iteration") for link in span.links] == [
        {},
        {},
        {"lens.link.exported": False},
        {"lens.link.exported": False},
    ]
    job = only(zero, "train.job")
    assert job.attributes["nemo.span.truncated"] is True
    assert job.end_ns == wall(first.now)  # its last heartbeat


def test_a_died_writer_without_a_live_file_ends_with_its_last_record(tmp_path: Path) -> None:
    writer = train(Writer(closed=False), 2)
    folder = write_run(tmp_path / "run", writer) / "ranks" / writer.name
    (folder / "live").unlink()
    (made,) = run_spans(RunDirectory(tmp_path / "run"))
    assert next(made.spans).end_ns == wall(writer.now)


@pytest.mark.parametrize("source", [None, "own"])
def test_ranks_that_did_not_agree_share_nothing(tmp_path: Path, source: str | None) -> None:
    first, second = pair()
    for writer in (first, second):
        writer.seed = None if source is None else f"{writer.nonce:032x}"
        writer.extra["seed_source"] = source
    zero, one = export(tmp_path, train(first, 2), train(second, 2))
    assert not {span.trace_id for span in zero} & {span.trace_id for span in one}
    assert not any(span.links for span in named(one, "train.iteration"))


# --- asynchronous operations ------------------------------------------------------------------------------------------


def operation(writer: Writer, flags: int = Flag.SPAN | Flag.ASYNC, **fields: Any) -> int:
    return writer.take(Kind.COLLECTIVE, 1, flags, **{"name": "all_reduce", "group": "0", "exposed_ns": MS, **fields})


def test_waits(tmp_path: Path) -> None:
    writer = Writer()
    twice = operation(writer)
    never = operation(writer)
    elsewhere = operation(writer, thread=1)
    other_wait = operation(writer)
    device = operation(writer, Flag.SPAN | Flag.ASYNC | Flag.ENQUEUE)
    bypassed = operation(writer, Flag.SPAN | Flag.ASYNC | Flag.END_UNKNOWN)
    blocking = operation(writer, Flag.SPAN)
    failing = operation(writer)
    writer.take(Kind.WAIT, 2, 0, ref=twice + 1, exposed_ns=2 * MS)
    writer.take(Kind.WAIT, 3, 0, ref=elsewhere + 1, exposed_ns=3 * MS)
    writer.take(Kind.WAIT, 4, 0, ref=other_wait + 1, exposed_ns=4 * MS, thread=1)
    writer.take(Kind.WAIT, 5, 0, ref=device + 1, exposed_ns=5 * MS)
    writer.take(Kind.WAIT, 1, 0, ref=twice + 1, exposed_ns=MS)
    writer.take(Kind.WAIT, 1, Flag.FAILED, ref=failing + 1, detail="DistBackendError", exposed_ns=MS)
    end = writer.now
    writer.backward()
    (spans,) = export(tmp_path, writer)
    of = {int((span.start_ns - WALL_0) / MS): span for span in spans if span.name == "torch.distributed.all_reduce"}
    assert len(of) == 8

    def told(number: int) -> tuple[float, Any, Any, Any]:
        attributes = of[number].attributes
        return (
            ms(of[number])[1],
            attributes.get("dl.comm.exposed_ns"),
            attributes.get("dl.comm.end"),
            attributes["lens.timing_source"],
        )

    assert told(twice) == (end - 1, 4 * MS, None, "host")
    assert told(never) == (2, MS, "unknown", "host")
    assert told(elsewhere) == (13, 3 * MS, None, "host")  # called in another thread, waited for in the training thread
    assert told(other_wait) == (17, MS, None, "host")  # the other way round
    assert told(device) == (22, None, None, "host_enqueue")
    assert told(bypassed) == (6, MS, "unknown", "host")
    assert told(blocking) == (7, MS, None, "host")
    assert told(failing)[0] == end
    assert of[failing].error == of[failing].attributes["exception.type"] == "DistBackendError"
    assert of[blocking].error is None


def test_waits_are_not_spans_unless_they_complete_nothing(tmp_path: Path) -> None:
    writer = Writer()
    done = operation(writer)
    writer.take(Kind.WAIT, 1, Flag.SPAN, ref=done + 1, name="wait")
    writer.take(Kind.WAIT, 1, Flag.SPAN, ref=77_777, name="wait")  # of a segment that is gone
    writer.take(Kind.WAIT, 1, Flag.SPAN, ref=(1 << 64) - 1, name="wait")
    writer.take(Kind.WAIT, 1, Flag.SPAN, name="wait")
    writer.take(Kind.WAIT, 1, 0, ref=77_777, name="wait")
    (spans,) = export(tmp_path, writer)
    assert [span.name for span in spans].count("torch.distributed.wait") == 3


# --- point to point ---------------------------------------------------------------------------------------------------


def transfer(writer: Writer, kind: Kind, peer: int, k: int, flags: int = Flag.SPAN, **fields: Any) -> int:
    name = "send" if kind is Kind.SEND else "recv"
    values = {"name": name, "group": "pp", "peer": peer, "seq": k, "init": 1, "tag": 3, "bytes": 64, **fields}
    return writer.take(kind, 1, flags, **values)


def test_receives_link_to_their_sends(tmp_path: Path) -> None:
    first, second = pair()
    for writer, kind, peer in ((first, Kind.SEND, 1), (second, Kind.RECV, 0)):
        for k in range(3):
            # Rank 0 sends the last before its second step, rank 1 receives it after: another trace.
            if writer is second or k < 2:
                writer.backward()
                transfer(writer, kind, peer, k)
                writer.step()
            else:
                transfer(writer, kind, peer, k)
    zero, one = export(tmp_path, first, second)
    sends, receives = named(zero, "torch.distributed.send"), named(one, "torch.distributed.recv")
    for k, (send, receive) in enumerate(zip(sends, receives, strict=True)):
        assert send.span_id == ids.send_span_id(SEED, "pp", 1, 0, 1, 3, k)
        assert [(link.trace_id, link.span_id, link.attributes) for link in receive.links] == [
            (send.trace_id, send.span_id, {})
        ]
        assert "dl.comm.link" not in receive.attributes
        assert receive.attributes["dl.comm.peer"] == 0
        assert receive.attributes["dl.comm.tag"] == 3
        assert send.attributes["dl.comm.seq"] == k
    assert sends[2].trace_id == JOB
    assert receives[2].trace_id == ids.iteration_trace_id(SEED, 2)


def test_a_receive_whose_sender_is_not_in_the_run(tmp_path: Path) -> None:
    writer = Writer(rank=1, world_size=2)
    writer.backward()
    transfer(writer, Kind.RECV, 0, 0)
    writer.step()
    (spans,) = export(tmp_path, writer)
    (link,) = only(spans, "torch.distributed.recv").links
    assert link.span_id == ids.send_span_id(SEED, "pp", 1, 0, 1, 3, 0)
    assert link.trace_id == ids.iteration_trace_id(SEED, 0)
    assert link.attributes == {"lens.link.exported": False}


def test_receives_that_cannot_be_told_are_not_linked(tmp_path: Path) -> None:
    first, second = pair()
    transfer(first, Kind.SEND, 1, 0)
    transfer(second, Kind.RECV, 0, 0, Flag.SPAN | Flag.AMBIGUOUS)
    transfer(second, Kind.RECV, -1, -1, Flag.SPAN | Flag.ANY_SOURCE)
    transfer(second, Kind.RECV, 0, 0, Flag.SPAN | Flag.ANY_SOURCE)  # from anyone, and then it was known whom
    _, one = export(tmp_path, first, second)
    found = [(len(span.links), span.attributes.get("dl.comm.link")) for span in named(one, "torch.distributed.recv")]
    assert found == [(0, "ambiguous"), (0, "ambiguous"), (1, None)]


def test_sends_that_claim_the_same_number_keep_ids_of_their_own(tmp_path: Path) -> None:
    writer = Writer(rank=0, world_size=2)
    for _ in range(3):
        transfer(writer, Kind.SEND, 1, 5)
    transfer(writer, Kind.SEND, -1, -1)
    (spans,) = export(tmp_path, writer)
    assert len({span.span_id for span in named(spans, "torch.distributed.send")}) == 4


# --- parents by nesting, odd records ----------------------------------------------------------------------------------


def test_what_happens_inside_a_phase_is_below_it(tmp_path: Path) -> None:
    writer = Writer()
    for _ in range(2):
        start = writer.now
        writer.wait(1)
        writer.take(Kind.OPTIMIZER_STEP, 1, Flag.SPAN | Flag.IN_BACKWARD, a=0, b=1, name="SGD")
        writer.wait(1)
        writer.add(Kind.BACKWARD, start, writer.now)
    start = writer.now
    writer.backward(2)  # a closure
    writer.wait(1)
    writer.add(Kind.OPTIMIZER_STEP, start, writer.now, a=1, b=1, name="LBFGS")
    (spans,) = export(tmp_path, writer)
    known = {span.span_id: span for span in spans}
    pairs = [
        (span.name, known[span.parent_id].name if span.parent_id else None)
        for span in spans
        if span.name in ("train.optimizer_step", "train.backward")
    ]
    assert pairs == [
        ("train.optimizer_step", "train.backward"),
        ("train.backward", "train.iteration"),
        ("train.optimizer_step", "train.backward"),
        ("train.backward", "train.iteration"),
        ("train.backward", "train.optimizer_step"),
        ("train.optimizer_step", "train.iteration"),
    ]


def test_flags_become_attributes(tmp_path: Path) -> None:
    writer = Writer()
    writer.take(Kind.BACKWARD, 1, Flag.SPAN | Flag.ENQUEUE)
    writer.step(flags=Flag.SPAN | Flag.SKIPPED, name="AdamW")
    writer.wait(1)
    writer.take(Kind.BACKWARD, 1, Flag.SPAN | Flag.FAILED, detail="OutOfMemoryError")
    writer.step()
    writer.add(Kind.BACKWARD, writer.now, None)
    (spans,) = export(tmp_path, writer)
    backward, failed, endless = named(spans, "train.backward")
    assert backward.attributes["lens.timing_source"] == "host_enqueue"
    assert failed.error == failed.attributes["exception.type"] == "OutOfMemoryError"
    assert endless.start_ns == endless.end_ns
    assert endless.attributes["nemo.span.truncated"] is True
    skipped, stepped = named(spans, "train.optimizer_step")
    assert skipped.attributes["dl.optimizer.skipped"] is True
    assert skipped.attributes["dl.optimizer"] == "AdamW"
    assert "dl.optimizer.skipped" not in stepped.attributes
    assert only(spans, "train.forward").attributes["lens.timing_source"] == "host"


def test_a_kind_that_is_not_known_is_shown(tmp_path: Path) -> None:
    writer = Writer()
    writer.add(Kind.BACKWARD, 1, 2)
    writer.records[0]["kind"] = 999
    (spans,) = export(tmp_path, writer)
    assert ms(only(spans, "lens.record.999")) == (1, 2)


def test_every_record_with_span_is_there_once(tmp_path: Path) -> None:
    first, second = pair()
    for writer in (first, second):
        with_evaluation_and_checkpoint(train(writer, 4))
        transfer(writer, Kind.SEND, 1 - writer.rank, 0)
        transfer(writer, Kind.RECV, 1 - writer.rank, 0)
    for writer, spans in zip((first, second), export(tmp_path, first, second), strict=True):
        wanted = [record for record in writer.records if record["flags"] & Flag.SPAN and record["kind"] != Kind.WAIT]
        of_records = [
            span
            for span in spans
            if span.name not in ("train.job", "train.iteration", "train.evaluate", "train.forward")
        ]
        starts = Counter(span.start_ns - WALL_0 + MONOTONIC_0 for span in of_records)
        assert starts == Counter(record["start_ns"] for record in wanted)


def test_exports_are_reproducible(tmp_path: Path) -> None:
    first, second = pair()
    run = RunDirectory(write_run(tmp_path, train(first, 3), train(second, 3)))
    assert [list(made.spans) for made in run_spans(run)] == [list(made.spans) for made in run_spans(run)]


def test_the_resource(tmp_path: Path) -> None:
    writer = Writer(rank=2, world_size=4)
    made: WriterSpans
    (made,) = run_spans(RunDirectory(write_run(tmp_path, writer)))
    assert made.resource == {
        "dl.rank": 2,
        "dl.world_size": 4,
        "nemo.run.id": "run-1",
        "host.name": "elsewhere",
        "process.pid": 4242,
        "service.name": "nemo",
    }
