"""Metrics of training: what the exporter process makes of records, and to whom it gives them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from export_node import Node, alive, rank, wait_until, write_many
from google.protobuf import json_format
from launch import INSTRUMENT, PYTHON, RUN_RANKS, Launcher, free_port
from receiver import Receiver
from synthetic import Writer

from lens_auto.export import metering
from lens_auto.export.exporters import metrics_exporter_names
from lens_auto.export.lane import Candidate
from lens_auto.export.metering import Metering
from lens_auto.export.metrics import Measured, measure
from lens_auto.export.stream import Stretch
from lens_auto.instruments import training
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RunDirectory, WriterFiles

DELTA, CUMULATIVE = 1, 2  # AggregationTemporality of OTLP
DURATIONS = (
    training.DATA_LOADING_DURATION,
    training.FORWARD_DURATION,
    training.BACKWARD_DURATION,
    training.OPTIMIZER_DURATION,
)


class Point(NamedTuple):
    """A data point with what it needs to be understood."""

    name: str
    unit: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    temporality: int
    data: dict[str, Any]

    @property
    def key(self) -> tuple[int, str, str]:
        """Rank, name, operation."""
        return self.attributes["dl.rank"], self.name, self.attributes.get("dl.comm.operation", "")

    @property
    def count(self) -> int:
        return int(self.data.get("count", 0))

    @property
    def value(self) -> float:
        """Sum of a histogram, value of the others."""
        for name in ("sum", "asDouble", "asInt"):
            if name in self.data:
                return float(self.data[name])
        return 0.0


def attributes_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    values = {}
    for each in found:
        ((kind, value),) = each["value"].items()
        values[each["key"]] = int(value) if kind == "intValue" else value
    return values


def points_of(message: dict[str, Any]) -> Iterator[Point]:
    """The data points of one OTLP message as JSON."""
    for part in message["resourceMetrics"]:
        resource = attributes_of(part["resource"]["attributes"])
        for scope in part["scopeMetrics"]:
            assert scope["scope"]["name"] == "nemo.lens"
            for metric in scope["metrics"]:
                ((kind, data),) = ((key, metric[key]) for key in ("histogram", "sum", "gauge") if key in metric)
                assert kind != "sum" or data["isMonotonic"]
                temporality = data.get("aggregationTemporality", 0)
                if isinstance(temporality, str):
                    temporality = DELTA if temporality.endswith("DELTA") else CUMULATIVE
                for point in data["dataPoints"]:
                    yield Point(
                        metric["name"], metric["unit"], attributes_of(point["attributes"]), resource, temporality, point
                    )


def in_file(node: Node) -> list[list[Point]]:
    """The points of each collection that `lens_file` wrote."""
    (path,) = node.run_dir.glob("metrics-*.jsonl")
    return [list(points_of(json.loads(line))) for line in path.read_bytes().splitlines()]


def received(receiver: Receiver) -> list[list[Point]]:
    """The points of each request that an endpoint got."""
    return [list(points_of(json_format.MessageToDict(request))) for request in receiver.metrics()]


@contextmanager
def made(folder: Path, *writers: Writer) -> Iterator[Node]:
    node = Node(folder, *writers)
    try:
        yield node
    finally:
        node.close()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def wait_for_scrape(port: int, what: str, timeout_s: float = 20) -> str:
    """Ask until an answer holds something, and return that answer."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = scrape(port)
        except OSError:
            found = ""
        if what in found:
            return found
        assert time.monotonic() < deadline, found[-3000:]
        time.sleep(0.05)


def uneven() -> Writer:
    """Two iterations of different length with everything in them, an evaluation, and a rank that dropped records."""
    writer = Writer(rank=3, world_size=4, seed="5eed" * 8, extra={"exports": True, "dropped": 7})
    loader = writer.loader(2)
    for fetch_ms, reduce_ms in ((2, 0.02), (300, 2_000)):
        writer.take(Kind.FETCH, fetch_ms, a=loader, c=32)
        writer.wait(3)
        start = writer.now
        writer.backward(4_000)
        writer.add(Kind.COLLECTIVE, start, start + reduce_ms, name="all_reduce", group="0", bytes=4096, seq=1)
        writer.add(Kind.COLLECTIVE, start, start + 1, Flag.SPAN | Flag.ASYNC, name="all_gather", group="0", bytes=8)
        writer.add(Kind.SEND, start, start + 1, Flag.SPAN | Flag.ENQUEUE, name="send", group="0", bytes=1 << 20)
        writer.step(ms=10)
        writer.boundary()
    evaluation = writer.loader(1)
    writer.take(Kind.FETCH, 5, a=evaluation, c=8)
    writer.exhaust(evaluation)
    writer.take(Kind.DDP, 50, name="communication", bytes=100, c=2)
    return writer


def buckets(point: Point) -> dict[float, int]:
    """How many values are at or below each bound, for the bounds where that changes."""
    bounds = [*point.data["explicitBounds"], float("inf")]
    return {bound: int(count) for bound, count in zip(bounds, point.data["bucketCounts"], strict=True) if int(count)}


def by_key(points: list[Point]) -> dict[tuple[int, str, str], Point]:
    found = {point.key: point for point in points}
    assert len(found) == len(points)
    return found


# --- what is computed -------------------------------------------------------------------------------------------------


def test_every_metric_of_a_rank(tmp_path: Path) -> None:
    """Values, units, buckets and attributes, computed by hand."""
    writer = uneven()
    writer.host, writer.pid = rank().host, rank().pid
    with made(tmp_path, writer) as node:
        ended = node.start({"OTEL_METRICS_EXPORTER": "lens_file"}).wait()
        assert (ended.code, node.log()) == (0, "")
        (points,) = in_file(node)
        assert node.segments() == ["00000000.seg"]  # nothing was sent away: `lens-auto report` has it all
    found = by_key(points)
    assert {point.attributes["dl.rank"] for point in points} == {3}
    assert {point.resource["dl.rank"] for point in points} == {3}
    assert {(point.resource["nemo.run.id"], point.resource["service.name"]) for point in points} == {("run-1", "nemo")}
    assert {point.name: point.unit for point in points} == {
        "dl.iteration.duration": "s",
        "dl.data_loading.duration": "s",
        "dl.forward.duration": "s",
        "dl.backward.duration": "s",
        "dl.optimizer.duration": "s",
        "dl.comm.duration": "s",
        "dl.comm.size": "By",
        "dl.iterations": "{iteration}",
        "dl.batches": "{batch}",
        "lens.records.dropped": "{record}",
        "dl.throughput_samples_per_sec": "{sample}/s",
    }

    def histogram(name: str, operation: str = "") -> tuple[int, float, dict[float, int]]:
        point = found[3, name, operation]
        assert point.temporality == CUMULATIVE
        return point.count, pytest.approx(point.value), buckets(point)

    # Iteration 0 begins with what the loop did first; the fetches last 2 and 300 ms, forward 3, backward 4 s, step 10.
    assert histogram("dl.data_loading.duration") == (2, 0.304, {0.005: 1, 0.5: 1})
    assert histogram("dl.forward.duration") == (2, 0.006, {0.005: 2})
    assert histogram("dl.backward.duration") == (2, 8.0, {5.0: 2})
    assert histogram("dl.optimizer.duration") == (2, 0.02, {0.01: 2})
    assert histogram("dl.iteration.duration") == (2, 8.33, {5.0: 2})
    assert histogram("dl.comm.duration", "all_reduce") == (2, 2.00002, {2.5e-5: 1, 2.5: 1})
    assert histogram("dl.comm.size", "all_reduce") == (2, 8192, {4096: 2})
    # Nobody waited for it: its size is known, its end is not.
    assert (3, "dl.comm.duration", "all_gather") not in found
    assert histogram("dl.comm.size", "all_gather") == (2, 16, {256: 2})
    assert histogram("dl.comm.duration", "send") == (2, 0.002, {0.001: 2})
    assert histogram("dl.comm.duration", "ddp.communication") == (1, 0.05, {0.05: 1})
    assert {
        (point.key[2], point.attributes["lens.timing_source"]) for point in points if point.name == "dl.comm.duration"
    } == {("all_reduce", "host"), ("send", "host_enqueue"), ("ddp.communication", "ddp_logger")}
    assert found[3, "dl.iterations", ""].value == 2
    assert found[3, "dl.batches", ""].value == 3
    assert found[3, "lens.records.dropped", ""].value == 7
    assert found[3, "dl.throughput_samples_per_sec", ""].value == pytest.approx(64 / 8.33)


def test_buckets_separate_a_millisecond_from_a_hundred_seconds() -> None:
    for name in (training.ITERATION_DURATION, training.COMM_DURATION):
        bounds = training.HISTOGRAMS[name][2]
        assert bounds[0] < 0.001 and bounds[-1] > 100
        assert {0.001, 100.0} <= set(bounds)
        steps = [high / low for low, high in itertools.pairwise(bounds)]
        assert max(steps) < 3


def test_parts_of_a_running_rank_add_up(tmp_path: Path) -> None:
    """Counted part after part, in two processes' worth of meterings: nothing twice, nothing lost."""
    writer = rank(iterations=10)
    with made(tmp_path, writer) as node:
        records = write_many(node, writer, 100_000)
        iterations = (records - 3) // 6

        def count(ended: bool, steps: int) -> tuple[dict[tuple[int, str, str], Point], int]:
            """What a metering of its own counts, and how often it had something to count."""
            metering = Metering(["lens_file"], lambda: str(node.run_dir / "metrics-here.jsonl"))
            run = RunDirectory(node.run_dir)
            folder = str(run.writers[0].folders[0])
            counted = 0
            while counted < steps and metering.step([Candidate(run.writers[0], folder, ended)]):
                counted += 1
            metering.close(5)
            file = node.run_dir / "metrics-here.jsonl"
            points = [*points_of(json.loads(file.read_bytes().splitlines()[-1]))]
            file.unlink()
            return by_key(points), counted

        first, counted = count(ended=False, steps=2)
        assert counted == 2
        second, more = count(ended=False, steps=100)
        assert more >= 2
        last, _ = count(ended=True, steps=100)
        parts = (first, second, last)
        assert all(part[0, "dl.iterations", ""].value > 0 for part in parts[:2])
        for key, total in {
            (0, "dl.iterations", ""): iterations,
            (0, "dl.batches", ""): iterations,
            (0, "lens.records.dropped", ""): 0,
        }.items():
            assert sum(part[key].value for part in parts) == total, key
        for name in DURATIONS:
            assert sum(part[0, name, ""].count for part in parts) == iterations, name
        assert sum(part[0, "dl.comm.duration", "all_reduce"].count for part in parts) == iterations
        assert sum(part[0, "dl.comm.duration", "all_reduce"].value for part in parts) == pytest.approx(
            iterations * 0.002
        )
        assert sum(part[0, "dl.backward.duration", ""].value for part in parts) == pytest.approx(iterations * 0.004)


# --- to whom ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"OTEL_METRICS_EXPORTER": "none"}, []),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, ["prometheus"]),
        ({"OTEL_METRICS_EXPORTER": "otlp, console,otlp"}, ["otlp", "console"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_METRICS_EXPORTER": "none"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "NEMO_LENS_METRICS_ENABLED": "0"}, []),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, []),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, []),
        ({"NEMO_LENS_EXPORTER": "console"}, ["console"]),
        ({"NEMO_LENS_EXPORTER": "file"}, ["lens_file"]),
    ],
)
def test_which_exporters(environ: dict[str, str], names: list[str]) -> None:
    assert metrics_exporter_names(environ) == names


@pytest.mark.parametrize(("preference", "temporality"), [("", CUMULATIVE), ("delta", DELTA)])
def test_otlp_with_spans_beside_it(tmp_path: Path, preference: str, temporality: int) -> None:
    """Both ranks in one request, each with its resource; the segments go when both signals are done with them."""
    with Receiver("grpc") as receiver, made(tmp_path, rank(0), rank(1, 40)) as node:
        recorded = len(node.recorded())
        variables = {"OTEL_METRICS_EXPORTER": "otlp"}
        if preference:
            variables["OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"] = preference
        ended = node.start(receiver.environment(), **variables).wait()
        assert (ended.code, node.log()) == (0, "")
        assert receiver.span_count == recorded
        requests = received(receiver)
        assert node.segments() == []
    assert {point.temporality for points in requests for point in points if point.data.get("count")} == {temporality}
    total: dict[tuple[int, str, str], float] = {}
    for points in requests:
        for point in points:
            assert point.resource["dl.rank"] == point.attributes["dl.rank"]
            new = point.count or point.value
            total[point.key] = total.get(point.key, 0) + new if temporality == DELTA else new
    assert [total[each, "dl.iteration.duration", ""] for each in (0, 1)] == [100, 40]
    assert [total[each, "dl.comm.size", "all_reduce"] for each in (0, 1)] == [100, 40]


def test_an_endpoint_without_metrics_takes_the_spans(tmp_path: Path) -> None:
    """Metrics are named, and nobody listens there: spans leave, the process ends in time."""
    with Receiver("http") as receiver, made(tmp_path, rank(0)) as node:
        recorded = len(node.recorded())
        nobody = {
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://127.0.0.1:{free_port()}/v1/metrics",
        }
        ended = node.start(receiver.environment(), **nobody).wait(40)
        assert ended.code == 0
        assert ended.took_s < 25
        assert receiver.span_count == recorded
        assert node.segments() == []
        assert received(receiver) == []


def test_an_endpoint_that_stays_away_is_no_flood(tmp_path: Path) -> None:
    """What the SDK's exporter says at every try is in the log once."""
    with made(tmp_path, alive(rank(iterations=10))) as node:
        write_many(node, node.writers[0], 20_000)
        variables = {
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2",
        }
        exporter = node.start(variables)
        wait_until(lambda: "opentelemetry.exporter" in node.log(), 20)
        time.sleep(2)
        exporter.kill()
        lines = [line.split(" ", 3)[3] for line in node.log().splitlines()]
    assert 1 <= len(lines) <= 4, lines


def test_a_rank_that_cannot_be_counted_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_for_rank_0(writer: WriterFiles, stretch: Stretch) -> Measured:
        if writer.info.rank == 0:
            raise ArithmeticError("no")
        return measure(writer, stretch)

    monkeypatch.setattr(metering, "measure", fails_for_rank_0)
    with made(tmp_path, rank(0), rank(1)) as node:
        counting = Metering(["lens_file"], lambda: str(node.run_dir / "metrics-here.jsonl"))
        writers = RunDirectory(node.run_dir).writers
        candidates = [Candidate(writer, str(writer.folders[0]), True) for writer in writers]
        while counting.step(candidates):
            pass
        counting.close(5)
        assert [each.finished for each in node.progress("metrics")] == [True, True]
        assert {point.key[0] for point in in_file(node)[-1]} == {1}
    assert [record.message.split(" (")[0] for record in caplog.records] == ["no more metrics are made of rank 0"]


def test_an_unknown_exporter_is_named_and_the_others_work(tmp_path: Path) -> None:
    with Receiver("http") as receiver, made(tmp_path, rank(0)) as node:
        recorded = len(node.recorded())
        node.start(receiver.environment(), OTEL_METRICS_EXPORTER="promtheus,lens_file").wait()
        assert receiver.span_count == recorded
        (line,) = node.log().splitlines()
        assert "'promtheus' cannot be made" in line and "prometheus" in line.split("there are:")[1]
        assert by_key(in_file(node)[-1])[0, "dl.iterations", ""].value == 100


def test_a_strategy_leaves_ranks_out(tmp_path: Path) -> None:
    """As with spans; what they recorded stays, because nothing is sent of it."""
    with made(tmp_path, rank(0, exports=False), rank(1)) as node:
        node.start({"OTEL_METRICS_EXPORTER": "lens_file"}).wait()
        assert {point.key[0] for point in in_file(node)[-1]} == {1}
        assert len(node.segments()) == 2


def test_a_killed_exporter_counts_nothing_twice(tmp_path: Path) -> None:
    """Its successor goes on where it was; each point says since when it counts."""
    writer = alive(rank(iterations=10))
    with made(tmp_path, writer) as node:
        iterations = (write_many(node, writer, 60_000) - 3) // 6
        port = free_port()
        variables = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(port)}
        first = node.start(variables)
        before = counted(wait_for_scrape(port, "dl_iterations_total{"))
        first.kill()
        second = node.start(variables)
        wait_until(lambda: node.progress("metrics")[0].position.top > 40_000, 20)
        time.sleep(0.5)
        after = counted(wait_for_scrape(port, "python_info"))
        assert 0 < before <= iterations
        assert before + after <= iterations
        second.kill()


def counted(scraped: str) -> int:
    """Iterations of all ranks in an answer to Prometheus."""
    lines = [line for line in scraped.splitlines() if line.startswith("dl_iterations_total{")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


# --- Prometheus -------------------------------------------------------------------------------------------------------


def test_prometheus_is_waited_for_and_ports_are_shared(tmp_path: Path) -> None:
    """A short job is over before anybody asked: the endpoint stays until then. A second job's waits for the port."""
    port = free_port()
    variables = {"OTEL_METRICS_EXPORTER": "prometheus", "OTEL_EXPORTER_PROMETHEUS_PORT": str(port)}
    variables["OTEL_EXPORTER_PROMETHEUS_HOST"] = "127.0.0.1"
    with made(tmp_path / "one", rank(0), rank(1)) as one, made(tmp_path / "two", rank(0, 7)) as two:
        first = one.start(variables)
        wait_until(lambda: all(each.finished for each in one.progress("metrics")), 20)
        second = two.start(variables)
        wait_until(lambda: "wait until it can be had" in two.log(), 20)
        assert first.process.poll() is None
        wait_for_scrape(port, "dl_iterations_total{")
        time.sleep(1.0)  # an answer may take its time: who was asked does not go at once
        found = scrape(port)
        assert first.wait().code == 0
        assert one.log() == ""
        wait_until(lambda: all(each.finished for each in two.progress("metrics")), 20)
        assert counted(wait_for_scrape(port, "dl_iterations_total{")) == 7
        assert second.wait().code == 0
    assert counted(found) == 200
    # Ranks of one process do not run into each other.
    lines = [line for line in found.splitlines() if line.startswith("dl_iteration_duration_seconds_count{")]
    assert sorted(line.split('dl_rank="')[1].split('"')[0] for line in lines) == ["0", "1"]
    assert 'dl_comm_duration_seconds_bucket{dl_comm_operation="all_reduce",dl_rank="0",le="0.0025"' in found
    assert "dl_comm_size_bytes_sum{" in found


# --- real ranks -------------------------------------------------------------------------------------------------------

TRAIN = f"""{RUN_RANKS}
import json, sys
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def main(rank):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=4):
        model(batch).sum().backward()
        dist.all_reduce(torch.ones(256))
        optimizer.step()
        optimizer.zero_grad()
    loaded = [name for name in sys.modules if name.split(".")[0] == "grpc" or name.startswith("opentelemetry.sdk")]
    sys.stdout.write(json.dumps(loaded) + "\\n")
    sys.stdout.flush()
    dist.barrier()  # a group that is taken down while its last all-reduce is put away can hang (torch 2.13)
    dist.destroy_process_group()
run_ranks(main, 2)
"""


@pytest.mark.timeout(120)
def test_real_ranks(launch: Launcher) -> None:
    """Only metrics are named: they arrive, spans stay in the run directory, and no rank imports the SDK."""
    with Receiver("grpc") as receiver:
        environment = {
            **receiver.environment(),
            "OTEL_TRACES_EXPORTER": "none",
            "NEMO_LENS_EXPORT_STRATEGY": "all_ranks",
            "NEMO_LENS_SPAN_GROUPS": "all",
            "OTEL_SERVICE_NAME": "gpt",
        }
        run = launch.run(*INSTRUMENT, *PYTHON, launch.program(TRAIN), env=environment)
        run.check()  # the closing line too: the records are all here
        assert [json.loads(line) for line in run.stdout.splitlines()] == [[], []]
        points = by_key(received(receiver)[-1])
    assert len(list(run.run_dir.rglob("*.seg"))) == 2
    for each in (0, 1):
        assert points[each, "dl.iterations", ""].value == 12
        assert points[each, "dl.batches", ""].value == 12
        assert points[each, "dl.iteration.duration", ""].count == 12
        # DistributedDataParallel's own, of 20 bytes, are told by torch's flight recorder, without their end.
        assert points[each, "dl.comm.size", "all_reduce"].data["max"] == 1024
        assert points[each, "dl.comm.duration", "all_reduce"].count == 12
        whole = points[each, "dl.iteration.duration", ""].value
        assert 0 < sum(points[each, name, ""].value for name in DURATIONS) <= whole
        rate = points[each, "dl.throughput_samples_per_sec", ""].value
        assert rate == pytest.approx(48 / whole)
        resource = points[each, "dl.iterations", ""].resource
        assert resource["service.name"] == "gpt"
        assert resource["service.instance.id"] == f"{run.run_dir.name}-rank{each}"


def test_the_console(launch: Launcher) -> None:
    """The last values are printed before the job's own process ends."""
    program = launch.program(TRAIN.replace("run_ranks(main, 2)", "run_ranks(main, 1)"))
    environment = {"OTEL_METRICS_EXPORTER": "console", "NEMO_LENS_QUIET": "1"}
    run = launch.run(*INSTRUMENT, *PYTHON, program, env=environment)
    assert (run.code, run.lines) == (0, []), run.stderr
    names = [json.loads(line) for line in run.stdout.splitlines()[1:]]
    assert names, run.stdout
    assert "dl.iteration.duration" in json.dumps(names)


def test_the_trace_path_imports_no_metrics(tmp_path: Path) -> None:
    """Where metrics are off, the exporter process has none of the SDK's code for them."""
    source = (
        "import sys\n"
        "from lens_auto.export.process import make_metering\n"
        "assert make_metering(str) == (None, [])\n"
        "import lens_auto.export.process\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk.metrics')])\n"
    )
    environment = {**Launcher(tmp_path).environment(), "OTEL_METRICS_EXPORTER": "none"}
    found = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("[]\n", "")
