"""What a GPU took: events without waiting, never during a capture; and what readers make of it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from launch import INSTRUMENT, RUN_RANKS, Launcher
from records import Row, read_run, read_spans
from synthetic import Writer, write_run

from lens_auto.iteration.device_times import DeviceClock, operation_times
from lens_auto.recorder import c10d, captures
from lens_auto.recorder.device import DeviceTimes
from lens_auto.recorder.flight import FlightLog
from lens_auto.recorder.layout import SEGMENT_HEADER_BYTES, DeviceTime, Flag, Kind, Phase
from lens_auto.recorder.read import RECORD_DTYPE, RunDirectory
from lens_auto.recorder.recorder import Recorder
from lens_auto.report.load import load
from lens_auto.report.summary import Summary, summarize

CLOCK, WAIT = DeviceTime.CLOCK, DeviceTime.WAIT
HERE = DeviceTime.CLOCK | DeviceTime.EXPOSED
MS = 1_000_000


class Tensor:
    """One on the fake device."""

    def get_device(self) -> int:
        return 0


class Rank:
    """A recorder whose host clock is the test's, and its device."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.recorder = Recorder(None, 1, 1, 1 << 20)
        self.recorder.span_flags(frozenset({"communication"}))
        self.device = self.recorder.device = DeviceTimes(self.recorder)
        self.written: list[dict[str, int]] = []
        self.recorder.record = self._record  # type: ignore[method-assign,assignment]
        self.host = 1000

    def _record(self, kind: int, start_ns: int, end_ns: int, thread: int, flags: int, *rest: int, **fields: int) -> int:
        self.written.append({"kind": kind, "start_ns": start_ns, "end_ns": end_ns, **fields})
        return len(self.written) - 1

    def of(self, kind: Kind) -> list[dict[str, int]]:
        return [each for each in self.written if each["kind"] == kind]

    def collective(self, number: int, ms: float, asynchronous: bool = False) -> Any:
        start, self.host = self.host, self.host + 10
        opened = self.device.open(Tensor(), asynchronous)
        if opened is not None and not asynchronous:
            self.cuda.current_stream().run(ms)
        if opened is not None:
            self.device.close(opened, (number,), start, self.host, wait=False)
        return opened

    def phase(self, phase: Phase) -> int:
        self.host += 10
        self.recorder.phase(phase, self.host)
        return self.host

    def boundary(self) -> None:
        self.recorder.boundary(self.host, 1, 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", found)
    return found


@pytest.fixture
def rank(cuda: FakeCuda) -> Rank:
    return Rank(cuda)


def test_operations_and_phases(rank: Rank, cuda: FakeCuda) -> None:
    """The device runs behind the host: durations and the clock are the device's, stamps the host's."""
    rank.boundary()  # from here on the program uses CUDA
    assert rank.phase(Phase.BACKWARD) == 1010
    cuda.current_stream().run(3)
    rank.collective(number=7, ms=2)
    cuda.memory = {"allocated": 100, "reserved": 300, "peak": 200}
    assert rank.phase(Phase.OPTIMIZER) == 1030
    cuda.current_stream().run(1)
    cuda.advance(0.5)
    rank.host += 10
    rank.boundary()
    assert rank.of(Kind.DEVICE_TIME) == []  # the device is not there yet, and nobody waited
    cuda.advance(100)
    rank.host += 10
    rank.boundary()
    (time_,) = rank.of(Kind.DEVICE_TIME)
    assert (time_["ref"], time_["a"], time_["b"]) == (8, 2 * MS, 3 * MS)
    assert (time_["start_ns"], time_["end_ns"], time_["c"]) == (1010, 1020, HERE)
    marks = [(each["start_ns"], each["a"], each["b"]) for each in rank.of(Kind.DEVICE_MARK)]
    assert marks == [
        (1000, 0, 0),
        (1010, 0, 0),
        (1030, 5 * MS, 5 * MS),
        (1040, 1 * MS, 6 * MS),
        (1050, 94.5 * MS, 100.5 * MS),
    ]
    memory = [(each["start_ns"], each["a"], each["b"], each["c"]) for each in rank.of(Kind.DEVICE_MEMORY)]
    assert memory == [(999, 0, 0, 0), (1039, 100, 300, 200), (1049, 100, 300, 200)]


def test_everything_of_an_iteration_is_written_before_its_end(rank: Rank, cuda: FakeCuda) -> None:
    """A reader that sees the end of an iteration need not wait for more."""
    rank.boundary()
    for _ in range(5):
        rank.collective(number=1, ms=2)
        rank.phase(Phase.OTHER)
        cuda.advance(1)
        rank.boundary()
    cuda.advance(100)
    rank.boundary()
    kinds = [each["kind"] for each in rank.written if each["kind"] != Kind.BOUNDARY]
    expected = [Kind.DEVICE_MARK, Kind.DEVICE_MEMORY]
    assert kinds == [*expected, *[Kind.DEVICE_TIME, *expected] * 5, Kind.DEVICE_MEMORY]


def test_an_asynchronous_operation_is_measured_by_its_wait(rank: Rank, cuda: FakeCuda) -> None:
    rank.boundary()
    opened = rank.collective(number=3, ms=0, asynchronous=True)
    assert (opened.device, opened.event) == (0, None)
    finished = cuda.now + 9 * MS  # on a stream of NCCL's own
    cuda.current_stream().run(4)  # what overlaps it
    again = rank.device.open_again(opened.device)
    assert again is not None
    cuda.current_stream().wait(finished)
    rank.device.close(again, (3, 4), 1500, 1510, wait=True)
    cuda.advance(50)
    rank.boundary()
    found = [(each["ref"], each["a"], each["c"]) for each in rank.of(Kind.DEVICE_TIME)]
    assert found == [(4, 5 * MS, WAIT | HERE), (5, 5 * MS, WAIT | HERE)]


def test_the_training_thread_is_the_one_that_steps(rank: Rank, cuda: FakeCuda) -> None:
    """Another one used the device first."""
    other = threading.Thread(target=rank.collective, args=(0, 1))
    other.start()
    other.join()
    cuda.advance(9)
    rank.host = time.monotonic_ns()
    rank.boundary()
    assert [each["ref"] for each in rank.of(Kind.DEVICE_TIME)] == [1]
    assert cuda.queried_by == {threading.get_ident()}


def test_another_stream_has_no_place_on_the_clock(rank: Rank, cuda: FakeCuda) -> None:
    rank.boundary()
    before = cuda.use_stream(cuda.new_stream())
    rank.collective(number=0, ms=2)
    cuda.use_stream(before)
    cuda.advance(50)
    rank.boundary()
    (found,) = rank.of(Kind.DEVICE_TIME)
    assert (found["a"], found["c"]) == (2 * MS, 0)


@pytest.mark.parametrize("how", ["of the current stream", "of any"])
def test_never_during_a_capture(rank: Rank, cuda: FakeCuda, how: str) -> None:
    """The stand-in raises where CUDA would break the capture."""
    rank.boundary()
    rank.collective(number=0, ms=1)
    cuda.advance(50)
    cuda.capturing = True
    if how == "of any":  # another stream is captured: only the hooks on CUDAGraph know
        cuda.is_current_stream_capturing = lambda: False  # type: ignore[method-assign]
        captures.begun()
    try:
        assert rank.collective(number=1, ms=1) is None
        assert rank.device.open_again(0) is None
        rank.phase(Phase.BACKWARD)
        rank.boundary()
        rank.device.finish()
        assert rank.of(Kind.DEVICE_TIME) == []
    finally:
        cuda.capturing = False
        if how == "of any":
            captures.ended()
    rank.boundary()
    assert [each["ref"] for each in rank.of(Kind.DEVICE_TIME)] == [1]
    assert rank.device._site.faults == 0


def test_nothing_is_asked_before_the_program_uses_cuda(rank: Rank, cuda: FakeCuda) -> None:
    cuda.initialized = False
    rank.phase(Phase.BACKWARD)
    rank.boundary()
    rank.device.finish()
    assert rank.collective(number=0, ms=1) is None
    assert (cuda.events, rank.device._site.faults) == (0, 0)


def test_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    rank = Rank(FakeCuda())
    rank.boundary()
    assert "torch.cuda" not in sys.modules


def test_events_are_used_again_and_only_the_training_thread_asks(rank: Rank, cuda: FakeCuda) -> None:
    rank.boundary()
    for _ in range(200):
        rank.collective(number=0, ms=1)
        rank.phase(Phase.OTHER)
        cuda.advance(2)
        rank.boundary()
    assert cuda.events < 12
    rank.collective(number=0, ms=1)
    cuda.advance(2)
    written = len(rank.of(Kind.DEVICE_TIME))
    other = threading.Thread(target=rank.device.boundary, args=(10**9,))
    other.start()
    other.join()
    assert len(rank.of(Kind.DEVICE_TIME)) == written
    assert cuda.queried_by == {threading.get_ident()}


def test_a_device_that_stands_still_costs_no_memory(
    rank: Rank, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lens_auto.recorder.device._MANY", 10)
    rank.boundary()
    for number in range(30):
        rank.collective(number, ms=1)
    assert rank.device.skipped == 20
    assert len(rank.device._pending) == 10
    cuda.advance(100)
    rank.boundary()
    assert [each["ref"] for each in rank.of(Kind.DEVICE_TIME)] == list(range(1, 11))


def test_a_failing_device_is_left_alone(rank: Rank, cuda: FakeCuda) -> None:
    rank.boundary()

    def broken(device: int | None = None) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda.current_stream = broken  # type: ignore[method-assign]
    rank.device._site.faults, rank.device._site.reason = 0, ""
    try:
        for _ in range(3):
            assert rank.collective(number=0, ms=1) is None
        assert rank.device._site.reason.startswith("RuntimeError: CUDA error")
        rank.boundary()
    finally:
        rank.device._site.faults, rank.device._site.reason = 0, ""
        rank.device._site.refresh()


# --- readers ----------------------------------------------------------------------------------------------------------


def records(*rows: dict[str, int]) -> Any:
    found = np.zeros(len(rows), dtype=RECORD_DTYPE)
    for index, row in enumerate(rows):
        for name, value in row.items():
            found[index][name] = value
    return found


def test_times_of_operations() -> None:
    data = records(
        {"kind": Kind.COLLECTIVE},
        {"kind": Kind.COLLECTIVE},
        {"kind": Kind.COLLECTIVE},
        {"kind": Kind.COLLECTIVE},
        {"kind": Kind.DEVICE_TIME, "ref": 1, "a": 50, "c": HERE},
        {"kind": Kind.DEVICE_TIME, "ref": 2, "a": 7, "c": WAIT | HERE},
        {"kind": Kind.DEVICE_TIME, "ref": 2, "a": 5, "c": WAIT | HERE},
        {"kind": Kind.DEVICE_TIME, "ref": 2, "a": 90, "flags": Flag.FLIGHT},
        {"kind": Kind.DEVICE_TIME, "ref": 3, "a": 40, "flags": Flag.FLIGHT},
        {"kind": Kind.DEVICE_TIME, "ref": 77, "a": 40},
        {"kind": Kind.DEVICE_TIME, "ref": 4, "a": 30},  # on another stream than the training thread's
    )
    found = operation_times(data, np.arange(len(data)), np.arange(4))
    assert found.duration_ns.tolist() == [50, 90, 40, 30]
    assert found.exposed_ns.tolist() == [50, 12, -1, -1]
    assert found.by_flight.tolist() == [False, True, True, False]


def test_the_device_clock_on_the_host() -> None:
    """A host that runs 4 ahead, and was caught up with once."""
    marks = [(100, 0), (110, 30), (120, 60), (200, 117)]
    data = records(*({"kind": Kind.DEVICE_MARK, "start_ns": host, "b": device, "c": CLOCK} for host, device in marks))
    clock = DeviceClock(data)
    assert clock.between(np.array([100, 110, 105]), np.array([120, 200, 120])).tolist() == [60, 87, -1]
    # at the start the device had nothing to do: 0 on its clock is 100 on the host's
    assert clock.translate(np.array([100, 110, 115, 120, 200])).tolist() == [100, 130, 145, 160, 217]
    assert clock.translate(np.array([50, 300])).tolist() == [50, 317]


def two_ranks(folder: Path, measured: bool) -> Summary:
    """Hosts that do the same and run ahead; the device of rank 1 takes 12 ms for backward, that of rank 0 takes 8."""
    writers = [Writer(rank=number, world_size=2, nonce=7 + number, pid=100 + number) for number in range(2)]
    for writer, backward_ms in zip(writers, (8, 12), strict=True):
        clock = 0.0

        def mark(writer: Writer, clock: float) -> None:
            if measured:
                writer.add(Kind.DEVICE_MARK, writer.now, writer.now, 0, b=round(clock * MS), c=CLOCK)

        loader = writer.loader()
        for number in range(40):
            mark(writer, clock)
            writer.fetch(loader, ms=1)
            mark(writer, clock)
            writer.wait(1)
            clock += 4
            mark(writer, clock)
            writer.backward(ms=2)
            clock += backward_ms
            mark(writer, clock)
            flags = Flag.SPAN | Flag.ENQUEUE | (Flag.MEASURED if measured else 0)
            call = {"name": "all_reduce", "group": "0", "seq": number + 1, "init": 1, "group_size": 2, "bytes": 4000}
            operation = writer.take(Kind.COLLECTIVE, 0.01, flags, **call)
            held_ms = 13 - backward_ms
            if measured:
                took = {"ref": operation + 1, "a": held_ms * MS, "b": round(clock * MS), "c": HERE}
                writer.add(Kind.DEVICE_TIME, writer.now - 0.01, writer.now, 0, **took)
            clock += held_ms
            mark(writer, clock)
            writer.step(ms=1)
            clock += 1
            writer.boundary()
        mark(writer, clock)
        writer.wait(clock - writer.now)
    run = RunDirectory(write_run(folder, *writers))
    return summarize(run, load(run))


def test_whose_device_work_is_late(tmp_path: Path) -> None:
    found = two_ranks(tmp_path / "with", measured=True)
    (worst, *_) = found.findings
    assert (worst.kind, worst.ranks, worst.cause) == ("straggler", [1], "backward")
    assert not any("enqueued on a device" in note for note in found.comparison.notes)
    waits = {each.rank: each.waiting for each in found.comparison.ranks}
    assert waits[0] == pytest.approx(4 / 18, abs=0.01) and waits[1] < 0.01
    (operation,) = found.operations
    assert operation.median_ns == 3 * MS
    assert operation.exposed_ns == 40 * 6 * MS
    # By the hosts' times alone the ranks are alike, and the report says why.
    blind = two_ranks(tmp_path / "without", measured=False)
    assert not any(each.kind == "straggler" for each in blind.findings)
    assert any("enqueued on a device" in note for note in blind.comparison.notes)
    assert blind.operations[0].exposed_ns is None


GRAPHS = """
import torch
from lens_auto.recorder import captures

class Graph:  # below torch's methods, which need a device
    def capture_begin(self, **how):
        assert captures.under_way()
        if self.fails:
            raise RuntimeError("the stream is not idle")
    def capture_end(self):
        assert captures.under_way()

class Mine(torch.cuda.CUDAGraph):
    def __new__(cls, fails):
        graph = object.__new__(cls)
        graph.fails, graph._tracker = fails, None
        return graph
    def __init__(self, fails):
        pass

torch.cuda.CUDAGraph.__bases__ = (Graph,)
graph, failing = Mine(False), Mine(True)
assert not captures.under_way()
graph.capture_begin()
assert captures.under_way()
graph.capture_end()
assert not captures.under_way()
try:
    failing.capture_begin()
except RuntimeError:
    print("raised", captures.under_way())
"""


def test_captures_are_known(launch: Launcher) -> None:
    run = launch.instrumented(GRAPHS)
    assert (run.code, run.stdout) == (0, "raised False\n"), run.stderr


# --- the flight recorder ----------------------------------------------------------------------------------------------


def test_durations_of_the_flight_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job has NCCL take times: of what a hook recorded, and of what C++ issued; some are not over yet."""
    recorder = Recorder(str(tmp_path), 1, 1, 1 << 20)
    recorder.span_flags(frozenset({"communication"}))
    recorder.init = 1
    watch = SimpleNamespace(issued=lambda: 3, own_records=0, group_size=lambda group: 2)
    keeper: Any = SimpleNamespace(recorder=recorder, watch=watch, open_segments=lambda: [recorder.segment])
    to_wall = -c10d.wall_offset_ns()
    now = time.monotonic_ns() - 10**9

    def entry(number: int, took_ms: float | None) -> dict[str, Any]:
        return {
            "record_id": number,
            "process_group": ["0", ""],
            "collective_seq_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": now + to_wall,
            "duration_ms": took_ms,
        }

    for seq in (1, 2):
        recorder.record(
            *(Kind.COLLECTIVE, now, now + 10, 0, Flag.SPAN | Flag.ASYNC | Flag.ENQUEUE),
            recorder.strings.id("all_reduce"),
            recorder.strings.id("0"),
            seq=seq,
        )
    entries = [entry(0, 1.5), entry(1, None), entry(2, 0.25)]
    monkeypatch.setattr(c10d, "flight_entries", lambda only_active=False: [dict(each) for each in entries])
    monkeypatch.setattr(c10d, "_kept", True)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
    log = FlightLog(keeper)
    log.finish()

    def times() -> dict[int, int]:
        buffer = recorder.segment.buffer
        found = np.frombuffer(buffer, RECORD_DTYPE, recorder.segment.used(), SEGMENT_HEADER_BYTES)
        timed = found[found["kind"] == Kind.DEVICE_TIME]
        assert (timed["flags"] == Flag.FLIGHT).all() and (timed["c"] == 0).all()
        return dict(zip((timed["ref"] - 1).tolist(), timed["a"].tolist(), strict=True))

    assert times() == {0: 1_500_000, 3: 250_000}  # the third is of a record of its own
    entries[1]["duration_ms"] = 7.0
    log.finish()
    assert times() == {0: 1_500_000, 3: 250_000, 1: 7_000_000}


def test_no_times_unless_the_job_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ENABLE_TIMING", raising=False)
    assert not c10d.times_operations()
    captures.begun()  # nor anything else while a graph is captured: NCCL's recorder looks at events
    try:
        assert c10d.flight_entries() == []
    finally:
        captures.ended()


# --- ranks ------------------------------------------------------------------------------------------------------------

# Real ranks on gloo whose tensors say that they are on a device, and a device that takes a real time for each call.
DEVICE_RANKS = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist
import fake_cuda

class OnDevice(torch.Tensor):
    is_cuda = property(lambda self: True)
    def get_device(self):
        return 0

class Device(fake_cuda.FakeCuda):
    begun = time.monotonic_ns()
    now = property(lambda self: time.monotonic_ns() - self.begun, lambda self, value: None)

def main(rank):
    device = Device()
    for name in ("is_initialized", "is_current_stream_capturing", "current_device", "current_stream", "Event",
                 "memory_stats_as_nested_dict"):
        setattr(torch.cuda, name, getattr(device, name))
    device.memory = {{"allocated": 5000, "reserved": 7000, "peak": 6000}}
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    stream = device.current_stream()
    for step in range(12):
        stream.run(2)
        (weight.sum() * 1.0).backward()
        stream.run(3 if rank == 0 else 6)
        gradient = weight.grad.as_subclass(OnDevice)
        # The host does not wait for what it enqueues; the device of rank 0 waits for that of rank 1.
        dist.all_reduce(gradient)
        work = dist.all_reduce(torch.ones(4).as_subclass(OnDevice), async_op=True)
        work.wait()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.012)
    dist.barrier()
    dist.destroy_process_group()

run_ranks(main, 2)
"""


def test_ranks(launch: Launcher) -> None:
    program = RUN_RANKS + DEVICE_RANKS.format(tests=str(Path(__file__).parent))
    run = launch.instrumented(program, env={"NEMO_LENS_SPAN_GROUPS": "all"})
    assert run.code == 0, run.stderr
    for writer in read_run(run.run_dir):
        assert writer.info["hooks_off"] == {} and writer.info["hook_faults"] == 0
        calls = [row for row in writer.of(Kind.COLLECTIVE) if row.name == "all_reduce"]
        assert len(calls) == 24 and all(Flag.ENQUEUE | Flag.MEASURED in row.flags for row in calls)
        times: dict[int, Row] = {row.ref - 1: row for row in writer.of(Kind.DEVICE_TIME)}
        assert len(times) >= 20  # the last iteration's may not be over
        by_wait = [bool(row.c & WAIT) for _, row in sorted(times.items())]
        assert by_wait == [Flag.ASYNC in calls[at].flags for at in range(len(by_wait))]
    spans = read_spans(run.run_dir)[1]
    backward = [span for span in spans if span.name == "train.backward"]
    # The device had 2 ms left to do when backward began, and the phase ends when it is through with what came before.
    assert len(backward) == 12 and all("dl.device_duration_ns" in span.attributes for span in backward[1:-1])
    assert all(span.attributes["lens.timing_source"] == "cuda_event" for span in backward[1:-1])
    iterations = [span for span in spans if span.name == "train.iteration"][1:-1]
    for span in iterations:
        assert span.attributes["dl.device.memory.allocated"] == 5000
        assert span.attributes["dl.device.memory.reserved"] == 7000
        assert span.attributes["dl.device.memory.peak"] == 6000
        assert int(str(span.attributes["dl.device_duration_ns"])) > 8 * MS
    calls_ = [span for span in spans if span.name == "torch.distributed.all_reduce"]
    known = [span for span in calls_ if span.attributes["lens.timing_source"] == "cuda_event"]
    assert len(known) >= 20
    for span in known:
        assert ("dl.comm.device_duration_ns" in span.attributes) is (span.attributes["dl.comm.async"] is False)
        assert "dl.comm.exposed_ns" in span.attributes


# --- a real device ----------------------------------------------------------------------------------------------------

REAL = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl", world_size=1, rank=0, store=dist.HashStore())
weight = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
inputs = torch.randn(4096, 1024, device="cuda")
graph, static = torch.cuda.CUDAGraph(), torch.ones(16, device="cuda")
for step in range(20):
    (inputs @ weight).square().mean().backward()
    dist.all_reduce(weight.grad)
    dist.all_reduce(weight.grad, async_op=True).wait()
    if step == 5:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            static.add_(1)
            dist.all_reduce(static)
    if step > 5:
        graph.replay()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_a_real_device(launch: Launcher) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run = launch.run(*INSTRUMENT, sys.executable, launch.program(REAL), env={"NEMO_LENS_SPAN_GROUPS": "all"})
    assert run.code == 0, run.stderr
    (writer,) = read_run(run.run_dir)
    assert writer.info["hooks_off"] == {} and writer.info["hook_faults"] == 0
    times = writer.of(Kind.DEVICE_TIME)
    assert len(times) >= 34 and all(0 < row.a < 10**9 for row in times if not row.c & WAIT)
    memory = writer.of(Kind.DEVICE_MEMORY)
    assert len(memory) >= 17 and all(0 < row.a <= row.c <= row.b for row in memory)
    marks = writer.of(Kind.DEVICE_MARK)
    assert [row.b for row in marks] == sorted(row.b for row in marks)
    spans = read_spans(run.run_dir)[0]
    assert sum("dl.device_duration_ns" in span.attributes for span in spans if span.name == "train.backward") >= 17
