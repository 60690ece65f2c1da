"""Reading what writers left: whole, running, cut, moved, of another version, and damaged in many ways."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import ALL_GROUPS, MS, Writer, at, segment_header, train, wall, write_run

from lens_auto.iteration.rule import find_iterations
from lens_auto.recorder import layout
from lens_auto.recorder.layout import RECORD_BYTES, SEGMENT_HEADER_BYTES, SEGMENT_RECORDS, Kind, Phase, WriterState
from lens_auto.recorder.read import (
    RECORD_DTYPE,
    RunDirectory,
    Status,
    UnreadableFile,
    process_is_alive,
    read_live,
    read_segment,
    read_strings,
    read_writer,
)


def own_start_ticks() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def one_line(error: UnreadableFile) -> str:
    text = str(error)
    assert "\n" not in text
    assert str(error.path) in text
    return text


# --- what is whole ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False])
def test_a_run(tmp_path: Path, cut: bool) -> None:
    first, second = train(Writer(rank=0, world_size=2)), train(Writer(rank=1, world_size=2, pid=4243, nonce=99))
    run = RunDirectory(write_run(tmp_path / "run", second, first, cut=cut))
    assert run.run_id == "run-1"
    assert run.manifest["created"] == "2026-01-02T03:04:05Z"
    assert [writer.info.rank for writer in run.writers] == [0, 1]
    for files, written in zip(run.writers, (first, second), strict=True):
        records = files.records()
        assert records.data.dtype == RECORD_DTYPE
        assert np.array_equal(records.data, written.array())
        assert records.numbers.tolist() == list(range(len(written.records)))
        assert (records.holes, records.damaged, records.missing_segments) == (0, 0, 0)
        assert files.strings == ["", *written.strings]
        assert files.string(1) == "init_process_group"
        assert files.string(0) == ""
        assert files.status is Status.CLOSED
    assert run.problems == []


def test_a_string_that_is_missing_is_told_once(tmp_path: Path) -> None:
    writer = train(Writer())
    run = RunDirectory(write_run(tmp_path / "run", writer))
    (files,) = run.writers
    assert [files.string(number) for number in (1, 40, 41)] == [writer.strings[0], "<40>", "<41>"]
    (problem,) = run.problems
    assert one_line(problem).endswith(
        f"strings: {len(writer.strings)} strings, and there are records that name number 40; names are shown as numbers"
    )


def test_writer_info(tmp_path: Path) -> None:
    writer = Writer(
        rank=3, world_size=8, closed=False, now=7, extra={"hooks_off": {"step": "KeyError: 1"}, "dropped": 5}
    )
    info = read_writer(writer.write(tmp_path) / layout.WRITER_NAME)
    assert (info.rank, info.world_size, info.local_rank) == (3, 8, 3)
    assert info.nonce == writer.nonce
    assert info.seed == bytes(15) + b"\x07"
    assert info.groups == frozenset(ALL_GROUPS)
    assert info.clock.wall(at(7)) == wall(7)
    assert info.ended_ns is None
    assert info.hooks_off == {"step": "KeyError: 1"}
    assert info.dropped == 5
    assert info.raw["torch"] == "2.13.0"


def test_several_segments(tmp_path: Path) -> None:
    writer = Writer()
    for index in range(SEGMENT_RECORDS * 2 + 10):
        writer.records.append(
            {**dict.fromkeys(RECORD_DTYPE.names or (), 0), "kind": 3, "start_ns": index, "end_ns": index}
        )
    (files,) = RunDirectory(write_run(tmp_path, writer)).writers
    records = files.records()
    assert len(records) == SEGMENT_RECORDS * 2 + 10
    assert records.numbers.tolist() == list(range(len(records)))
    assert records.data["start_ns"].tolist() == list(range(len(records)))
    (files.folders[0] / layout.segment_name(0)).unlink()  # the oldest go where a run outgrows its bound
    records = files.records()
    assert records.numbers[0] == SEGMENT_RECORDS
    assert len(records) == SEGMENT_RECORDS + 10
    assert records.missing_segments == 1


def test_live_file(tmp_path: Path) -> None:
    writer = train(Writer(rank=1, world_size=2, closed=False))
    writer.phase = Phase.BACKWARD
    writer.slots[0] = {
        "kind": Kind.COLLECTIVE,
        "thread": 1,
        "native_id": 4250,
        "name": writer.string("all_gather"),
        "group": writer.string("0"),
        "group_size": 2,
        "start_ns": at(writer.now - 20),
        "seq": 41,
        "bytes": 128,
    }
    (files,) = RunDirectory(write_run(tmp_path, writer)).writers
    live = files.live
    assert live is not None
    assert (live.pid, live.start_ticks, live.nonce) == (4242, 77, writer.nonce)
    assert (live.rank, live.world_size, live.local_rank) == (1, 2, 1)
    assert live.state is WriterState.RUNNING
    assert (live.heartbeat_ns, live.heartbeat_wall_ns) == (at(writer.now), wall(writer.now))
    assert (live.phase.phase, live.phase.iteration, live.phase.steps, live.phase.fetches) == (Phase.BACKWARD, 9, 10, 11)
    assert live.records == len(writer.records)
    assert live.consistent
    (slot,) = live.slots
    assert files.string(slot.name) == "all_gather"
    assert (slot.kind_name, slot.thread, slot.native_id, slot.seq, slot.peer) == ("collective", 1, 4250, 41, -1)
    assert live.heartbeat_ns - slot.start_ns == 20 * MS
    assert files.last_sign_ns == at(writer.now)


def test_a_live_file_caught_in_an_update(tmp_path: Path) -> None:
    writer = Writer(closed=False)
    writer.slots[2] = {"kind": Kind.SEND, "start_ns": 8, "end": 7}
    page = bytearray(writer.live())
    live = read_live(save(tmp_path, page))
    assert not live.consistent
    assert [slot.consistent for slot in live.slots] == [False]
    assert live.phase.consistent
    layout.LIVE_PHASE.pack_into(page, layout.LIVE_PHASE_OFFSET, 4, Phase.FORWARD, 1, 1, 1, 1, 3)
    assert not read_live(save(tmp_path, page)).phase.consistent


def save(folder: Path, data: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# --- how a writer stands ----------------------------------------------------------------------------------------------


def test_status(tmp_path: Path) -> None:
    here, ticks = socket.gethostname(), own_start_ticks()
    running = Writer(host=here, pid=os.getpid(), start_ticks=ticks, closed=False)
    reused = Writer(host=here, pid=os.getpid(), start_ticks=ticks + 1, closed=False, rank=1)
    gone = Writer(host=here, pid=2**22 + 1, closed=False, rank=2)
    closed = Writer(host=here, pid=os.getpid(), start_ticks=ticks + 2, rank=3)
    finished_elsewhere = Writer(closed=False, rank=4)
    running_elsewhere = Writer(closed=False, pid=6, rank=5)
    run = write_run(tmp_path, running, reused, gone, closed, finished_elsewhere, running_elsewhere)
    (run / "ranks" / running_elsewhere.name / layout.LIVE_NAME).unlink()
    found = RunDirectory(run)
    assert [writer.status for writer in found.writers] == [
        Status.RUNNING,
        Status.DIED,
        Status.DIED,
        Status.CLOSED,
        Status.DIED,
        Status.UNKNOWN,
    ]


def test_a_zombie_is_not_alive() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    ticks = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19])
    assert not process_is_alive(child, ticks)
    os.waitpid(child, 0)
    assert process_is_alive(os.getpid(), own_start_ticks())


# --- spool and run directory ------------------------------------------------------------------------------------------


def running_in_spool(tmp_path: Path, records: int) -> tuple[Path, Path, Writer]:
    """A writer of this host whose files lie in the spool, and its (still empty) folder in the run directory."""
    writer = Writer(host=socket.gethostname(), closed=False)
    for index in range(records):
        writer.add(Kind.BACKWARD, index, index + 0.5)
    run_dir, spool = tmp_path / "run", tmp_path / "spool" / "lens-auto-0" / "key"
    writer.extra["spool_dir"] = str(spool / layout.RANKS_DIR / writer.name)
    in_spool = writer.write(spool, cut=False)
    (in_spool / layout.WRITER_NAME).write_text(json.dumps(writer.info(run_dir)))
    write_run(run_dir)
    in_run = run_dir / layout.RANKS_DIR / writer.name
    in_run.mkdir(parents=True)
    shutil.copy(in_spool / layout.WRITER_NAME, in_run)
    return in_spool, in_run, writer


def test_a_running_writer_is_read_from_the_spool(tmp_path: Path) -> None:
    in_spool, in_run, writer = running_in_spool(tmp_path, SEGMENT_RECORDS + 5)
    spare = segment_header(2, writer.nonce)
    save(in_spool, spare.ljust(layout.SEGMENT_BYTES, b"\0"), layout.segment_name(2))
    shutil.move(in_spool / layout.segment_name(0), in_run)
    run = RunDirectory(tmp_path / "run")
    (files,) = run.writers
    assert files.folders == [in_spool, in_run]
    records = files.records()
    assert records.numbers.tolist() == list(range(SEGMENT_RECORDS + 5))
    assert (records.holes, records.missing_segments) == (0, 0)
    assert files.live is not None
    # A segment in both places counts once.
    shutil.copy(in_run / layout.segment_name(0), in_spool)
    assert len(files.records()) == SEGMENT_RECORDS + 5
    assert run.problems == []


def test_the_spool_folder_of_a_run_can_be_read_itself(tmp_path: Path) -> None:
    in_spool, in_run, _ = running_in_spool(tmp_path, SEGMENT_RECORDS + 5)
    shutil.move(in_spool / layout.segment_name(0), in_run)
    run = RunDirectory(in_spool.parent.parent)
    assert len(run.writers[0].records()) == SEGMENT_RECORDS + 5
    assert run.run_id == "run-1"
    assert run.problems == []


def test_a_copy_is_read_as_it_is(tmp_path: Path) -> None:
    """It names the original, which may still be there."""
    in_spool, in_run, _ = running_in_spool(tmp_path, 50)
    for path in in_spool.iterdir():
        shutil.copy(path, in_run)
    shutil.rmtree(in_spool)
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    (segment,) = copy.rglob("*.seg")
    segment.unlink()
    assert len(RunDirectory(tmp_path / "run").writers[0].records()) == 50
    assert len(RunDirectory(copy).writers[0].records()) == 0


def test_files_that_move_while_they_are_read(tmp_path: Path) -> None:
    in_spool, in_run, _ = running_in_spool(tmp_path, 50)
    run = RunDirectory(tmp_path / "run")
    for name in (layout.segment_name(0), layout.STRINGS_NAME, layout.LIVE_NAME):
        shutil.move(in_spool / name, in_run)
    shutil.rmtree(in_spool)
    (files,) = run.writers
    assert len(files.records()) == 50
    assert files.strings == [""]
    assert files.live is not None
    assert run.problems == []


def test_another_writers_folder_in_the_spool_is_not_believed(tmp_path: Path) -> None:
    in_spool, in_run, writer = running_in_spool(tmp_path, 5)
    stranger = {**writer.info(tmp_path / "run"), "nonce": "00000000000000aa"}
    (in_spool / layout.WRITER_NAME).write_text(json.dumps(stranger))
    assert RunDirectory(tmp_path / "run").writers[0].folders == [in_run]


def test_what_the_spool_knows_better_counts(tmp_path: Path) -> None:
    _, in_run, writer = running_in_spool(tmp_path, 5)
    early = {**writer.info(tmp_path / "run"), "seed": None, "seed_source": None}
    (in_run / layout.WRITER_NAME).write_text(json.dumps(early))
    assert RunDirectory(tmp_path / "run").writers[0].info.seed == bytes(15) + b"\x07"


# --- holes and cuts ---------------------------------------------------------------------------------------------------


def test_holes_are_counted(tmp_path: Path) -> None:
    data = train(Writer(), 5).array()
    data["commit"][[3, 7]] = 0
    data["commit"][8] = 4  # another record's word
    segment = read_segment(save(tmp_path, segment_header(0, 1) + data.tobytes()))
    assert segment.holes == 3
    assert segment.indices.tolist() == [index for index in range(len(data)) if index not in (3, 7, 8)]
    assert np.array_equal(segment.records, data[segment.indices])


def test_a_full_segment_that_another_follows_has_no_free_places(tmp_path: Path) -> None:
    writer = train(Writer(), 3)
    path = save(tmp_path, writer.segments(cut=False)[layout.segment_name(0)])
    assert read_segment(path).holes == 0
    assert read_segment(path, is_last=False).holes == SEGMENT_RECORDS - len(writer.records)


@pytest.mark.parametrize("length", [SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + 5 * RECORD_BYTES + 77])
def test_a_cut_segment(tmp_path: Path, length: int) -> None:
    data = segment_header(0, 1) + train(Writer(), 5).array().tobytes()
    segment = read_segment(save(tmp_path, data[:length]))
    assert len(segment.records) == (length - SEGMENT_HEADER_BYTES) // RECORD_BYTES
    assert segment.holes == 0


def test_impossible_times_are_left_out(tmp_path: Path) -> None:
    data = train(Writer(), 5).array()
    data["start_ns"][2] = 1 << 63
    data["end_ns"][4] = (1 << 64) - 1
    segment = read_segment(save(tmp_path, segment_header(0, 1) + data.tobytes()))
    assert segment.damaged == 2
    assert len(segment.records) == len(data) - 2


def test_a_segment_with_more_fields_in_another_order(tmp_path: Path) -> None:
    """The dtype is the file's own: what we know is found by name, what we do not know is skipped."""
    data = train(Writer(), 5).array()
    described = [
        ("later", "<u8"),
        *((name, str(RECORD_DTYPE[name].str)) for name in reversed(RECORD_DTYPE.names or ())),
    ]
    wide = np.zeros(len(data), dtype=described)
    for name in RECORD_DTYPE.names or ():
        wide[name] = data[name]
    table = json.dumps({"fields": described}).encode()
    header = segment_header(0, 1, record_bytes=wide.dtype.itemsize, table=table)
    assert np.array_equal(read_segment(save(tmp_path, header + wide.tobytes())).records, data)


# --- one clear line ---------------------------------------------------------------------------------------------------

GOOD = segment_header(0, 0x1111_1111_1111_1111)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (GOOD[:100], "100 bytes; a segment starts with a header of 4096"),
        (b"\0" * 5000, "not a segment"),
        (b"PK\x03\x04zipfile" * 500, r"not a segment, it starts with b'PK\x03\x04zipf'; b'LENSSEG\n' is valid"),
        (segment_header(0, 1, version=7), "version 7; this reader knows 1"),
        (segment_header(0, 1, capacity=0), "capacity 0; 1 to 32768 records are valid"),
        (segment_header(0, 1, capacity=2**32 - 1), "capacity 4294967295"),
        (segment_header(0, 1, record_bytes=0), "records of 0 bytes with fields of 128"),
        (segment_header(0, 1, record_bytes=2**32 - 1), "records of 4294967295 bytes"),
        (segment_header(0, 1, json_bytes=2**32 - 1), "a field table of 4294967295 bytes"),
        (segment_header(0, 1, table=b"{"), "damaged field table"),
        (segment_header(0, 1, table=b"[" * 3000), "damaged field table"),
        (segment_header(0, 1, table=b'{"fields": [["start_ns", "O"]]}'), "field 'start_ns' of type 'O'"),
        (segment_header(0, 1, table=b'{"fields": [["start_ns", "<u4"]]}'), "'start_ns' as '<u4'; '<u8' is valid"),
        (segment_header(0, 1, table=b'{"fields": []}'), "'start_ns' as None"),
    ],
)
def test_what_is_no_segment(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        read_segment(save(tmp_path, data))
    assert says in one_line(caught.value)
    assert one_line(caught.value).endswith("it is not read")


def test_no_file_at_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "none", "there is no such file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
    ):
        for read in (read_segment, read_live, read_strings, read_writer):
            with pytest.raises(UnreadableFile, match=says):
                read(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "lens-run"}, """format 'lens-run'; a JSON object with "format": "lens-writer" is valid"""),
        ({"version": 2}, "version 2; this reader knows 1"),
        ({"nonce": "xyz"}, "'nonce' is 'xyz'; a string of 16 hexadecimal digits is valid"),
        ({"rank": "0"}, "'rank' is '0'; an integer from -1 to 2147483647 is valid"),
        ({"rank": 1 << 40}, "'rank' is 1099511627776"),
        ({"seed": "00"}, "'seed' is '00'"),
        ({"clock": {}}, "'monotonic_ns' is None"),
        ({"groups": "all"}, "'groups' is 'all'"),
        ({"started_ns": -5}, "'started_ns' is -5"),
        ({"resource": [1]}, "'resource' is [1]"),
    ],
)
def test_bad_writer_json(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    writer = Writer(extra=change)
    with pytest.raises(UnreadableFile) as caught:
        read_writer(writer.write(tmp_path) / layout.WRITER_NAME)
    assert says in one_line(caught.value)
    assert one_line(caught.value).endswith("the writer is skipped")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": "lens-strings", "version": 1}'])
def test_what_is_no_writer_json(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(UnreadableFile):
        read_writer(save(tmp_path, data))


def test_strings_with_damage(tmp_path: Path) -> None:
    head = b'{"format": "lens-strings", "version": 1}\n'
    path = save(tmp_path, head + b'"one"\n\x00\xff"\n7\n"f\\u00fcnf\\udc80"\n"half a li')
    assert read_strings(path) == ["", "one", "?", "?", "fünf?"]
    for data, says in (
        (b"", "empty"),
        (b"x\n", "not a strings file"),
        (head.replace(b"1", b"9"), "version 9; this reader knows 1"),
    ):
        with pytest.raises(UnreadableFile, match=says):
            read_strings(save(tmp_path, data))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda page: page[:100], "100 bytes; a live file has 4096"),
        (lambda page: b"", "empty"),
        (lambda page: b"X" + page[1:], "not a live file"),
        (lambda page: page[:8] + b"\7" + page[9:], "version 7; this reader knows 1"),
        (lambda page: page[:128] + b"\7" + page[129:], r"state 7; 1 \(running\), 2 \(closed\) are valid"),
    ],
)
def test_what_is_no_live_file(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(UnreadableFile, match=says) as caught:
        read_live(save(tmp_path, change(Writer().live())))
    one_line(caught.value)


def test_a_run_with_bad_files_is_read_without_them(tmp_path: Path) -> None:
    good, bad = train(Writer(rank=0)), train(Writer(rank=1, pid=2))
    run_dir = write_run(tmp_path, good, bad)
    folder = run_dir / layout.RANKS_DIR / good.name
    save(folder, segment_header(1, good.nonce, version=3), layout.segment_name(1))
    save(folder, segment_header(7, good.nonce), layout.segment_name(2))
    save(folder, segment_header(3, 5), layout.segment_name(3))
    save(folder, b"", layout.STRINGS_NAME)
    save(folder, b"?", layout.LIVE_NAME)
    save(run_dir / layout.RANKS_DIR / bad.name, b"{}", layout.WRITER_NAME)
    save(run_dir / layout.RANKS_DIR, b"", "a file where folders are expected")
    run = RunDirectory(run_dir)
    (files,) = run.writers
    assert len(files.records()) == len(good.records)
    assert files.string(1) == "<1>"
    assert files.live is None
    assert files.status is Status.CLOSED
    found = [one_line(problem) for problem in run.problems]
    assert len(found) == 6
    assert all("; " in line for line in found)
    for part in (
        "version 3; this reader knows 1; the segment is skipped",
        "segment number 7; 2 is valid; the segment is skipped",
        "written by 0000000000000005; 1111111111111111 is valid; the segment is skipped",
        "the writer is skipped",
        "names are shown as numbers",
        "1 bytes; a live file has 4096",
    ):
        assert any(part in line for line in found), part


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "none", "there is no such directory"),
        (tmp_path, "not a run directory"),
        (save(tmp_path, b"x"), "not a directory"),
    ):
        with pytest.raises(UnreadableFile) as caught:
            RunDirectory(path)
        assert f"{says}; a folder with manifest.json and ranks/ is valid" in one_line(caught.value)


def test_manifests(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, train(Writer()))
    manifest = run_dir / layout.MANIFEST_NAME
    manifest.write_text(json.dumps({"format": "lens-run", "version": 2}))
    with pytest.raises(UnreadableFile, match="version 2; this reader knows 1"):
        RunDirectory(run_dir)
    manifest.write_bytes(b"\0\0")
    run = RunDirectory(run_dir)
    assert run.run_id == "run-1"
    assert len(run.writers[0].records()) > 0
    assert "not JSON" in one_line(run.problems[0])


def test_a_huge_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    path = save(tmp_path, GOOD)
    os.truncate(path, 1 << 40)
    for name in (layout.STRINGS_NAME, layout.WRITER_NAME, layout.LIVE_NAME):
        os.truncate(save(tmp_path, b"", name), 1 << 40)
    tracemalloc.start()
    assert len(read_segment(path).records) == 0
    for read, name in (
        (read_strings, layout.STRINGS_NAME),
        (read_writer, layout.WRITER_NAME),
        (read_live, layout.LIVE_NAME),
    ):
        with pytest.raises(UnreadableFile, match=r"1099511627776 bytes; at most \d+ are valid"):
            read(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


# --- damage at random -------------------------------------------------------------------------------------------------

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=16)), max_size=8)


def damage(data: bytes, edits: list[tuple[int, bytes]], length: int | None) -> bytes:
    changed = bytearray(data)
    for place, piece in edits:
        place %= max(1, len(changed))
        changed[place : place + len(piece)] = piece
    return bytes(changed if length is None else changed[: length % (len(changed) + 1)])


@FUZZ
@given(edits=EDITS, length=st.none() | st.integers(0, 1 << 20), in_header=st.booleans())
def test_damaged_segments(tmp_path: Path, edits: list[tuple[int, bytes]], length: int | None, in_header: bool) -> None:
    data = GOOD + train(Writer(), 8).array().tobytes()
    if in_header:
        edits = [(place % layout.SEGMENT_HEADER.size, piece) for place, piece in edits]
    try:
        segment = read_segment(save(tmp_path, damage(data, edits, length)))
    except UnreadableFile as error:
        one_line(error)
        return
    assert len(segment.records) <= 8 * 6 + 5
    assert segment.holes >= 0
    found = find_iterations(segment.records, segment.indices)
    assert np.array_equal(found.phase_ns.sum(axis=1), found.duration_ns)


@FUZZ
@given(data=st.binary(max_size=6000), magic=st.sampled_from([b"", layout.SEGMENT_MAGIC, layout.LIVE_MAGIC]))
def test_garbage(tmp_path: Path, data: bytes, magic: bytes) -> None:
    path = save(tmp_path, magic + data)
    for read in (read_segment, read_live, read_strings, read_writer):
        try:
            read(path)
        except UnreadableFile as error:
            one_line(error)


@FUZZ
@given(edits=EDITS, length=st.none() | st.integers(0, 5000))
def test_damaged_live_files(tmp_path: Path, edits: list[tuple[int, bytes]], length: int | None) -> None:
    writer = Writer(closed=False)
    writer.slots[0] = {"kind": Kind.COLLECTIVE}
    try:
        live = read_live(save(tmp_path, damage(writer.live(), edits, length)))
    except UnreadableFile as error:
        one_line(error)
    else:
        assert len(live.slots) <= layout.LIVE_SLOTS
        assert all(slot.kind_name for slot in live.slots)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@FUZZ
@given(key=st.sampled_from(sorted(Writer().info(Path("/run")))), value=JSON)
def test_damaged_writer_json(tmp_path: Path, key: str, value: Any) -> None:
    shutil.rmtree(tmp_path / "ranks", ignore_errors=True)
    writer = Writer(extra={key: value}, closed=key != "ended_ns")
    write_run(tmp_path, train(writer, 1))
    run = RunDirectory(tmp_path)
    for files in run.writers:
        files.records()
        assert files.status in Status
    for problem in run.problems:
        one_line(problem)


def test_a_rank_that_died_before_its_file_said_which_one_it_is(tmp_path: Path) -> None:
    writer = train(Writer(rank=2, world_size=3, closed=False), 1)
    writer.extra.update(rank=-1, world_size=0)
    (files,) = RunDirectory(write_run(tmp_path, writer)).writers
    assert (files.info.rank, files.info.world_size, files.status) == (2, 3, Status.DIED)
