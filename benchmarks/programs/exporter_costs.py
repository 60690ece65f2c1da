"""What the exporter process costs: the real process, an endpoint that throws everything away, the SDK's path beside it.

Arguments: rounds, records of a run, records of the run whose memory is measured.
"""

from __future__ import annotations

import cProfile
import itertools
import json
import os
import pstats
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import leave_result, report_progress
from lens_auto.export import launch
from lens_auto.export.lane import OtherRanks
from lens_auto.export.otlp_bytes import Encoder
from lens_auto.export.spans import resource_of
from lens_auto.export.stream import Position, next_part, next_stretch
from lens_auto.groups import TrainingSpanGroup
from lens_auto.recorder.layout import RANKS_DIR, WRITER_NAME, Flag, Kind
from lens_auto.recorder.read import RunDirectory
from lens_auto.recorder.recorder import Recorder
from lens_auto.resources import rank_attributes

BATCH_SPANS = 512
RECORDS_OF_AN_ITERATION = 11
SPANS_OF_AN_ITERATION = 10  # a record each but for the boundary and the waits; the iteration and its forward
GONE_PID = 1 << 30

SINK = """
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args):
        pass
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

if sys.argv[1] == "http":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
import grpc
class Everything(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
server = grpc.server(ThreadPoolExecutor(2), handlers=[Everything()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


class Sink:
    """An endpoint in a process of its own."""

    def __init__(self, protocol: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SINK, protocol], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if protocol == "grpc" else "http/protobuf",
            "NO_PROXY": "127.0.0.1",
            "OTEL_METRICS_EXPORTER": "none",  # see `metrics_of_a_span`
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def write_rank(run_dir: Path, rank: int, records: int, world_size: int) -> str:
    """The files of a rank that trained and was killed: so many records, written by the real recorder. Its name."""
    name = f"{socket.gethostname()}-{GONE_PID + rank}-1"
    folder = run_dir / RANKS_DIR / name
    folder.mkdir(parents=True)
    nonce = 0x0123_4567_89AB_CDEF + rank * 0x1_0001_0001
    recorder = Recorder(str(folder), nonce, 1, 1 << 40)
    text = recorder.strings
    reduce, wait, group, dtype = (text.id(each) for each in ("all_reduce", "wait", "0", "torch.float32"))
    now = begun = time.monotonic_ns() - 3_600_000_000_000
    span = Flag.SPAN
    for number in range(records // RECORDS_OF_AN_ITERATION):
        recorder.record(Kind.FETCH, now, now + 900_000 + number % 777, 0, span, seq=number, a=1, b=2)
        now += 3_000_000
        recorder.record(Kind.BACKWARD, now, now + 4_000_000, 0, span)
        for each in range(5):
            start = now + each * 500_000
            flags = span | (Flag.ASYNC if each < 2 else 0)
            made = recorder.record(
                *(Kind.COLLECTIVE, start, start + 31_000 + number % 9_999, 0, flags, reduce, group, dtype),
                seq=5 * number + each,
                nbytes=4096 << each,
                group_size=world_size,
                exposed_ns=30_000 + number % 7_777,
            )
            if each < 2:
                begin = start + 100_000
                recorder.record(Kind.WAIT, begin, begin + 50_000, 0, span, wait, ref=made + 1, exposed_ns=50_000)
        now += 4_000_000
        recorder.record(Kind.OPTIMIZER_STEP, now, now + 1_000_000, 0, span, text.id("AdamW"), b=1)
        now += 1_000_000
        recorder.boundary(now, 1, 0)
    recorder.publish(0, 0)
    info = {
        "format": "lens-writer",
        "version": 1,
        "writer": name,
        "nonce": f"{nonce:016x}",
        "host": socket.gethostname(),
        "pid": GONE_PID + rank,
        "start_ticks": 1,
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "run_id": "bench",
        "run_dir": str(run_dir),
        "spool_dir": None,
        "seed": "5eed" * 8,
        "seed_source": "agreed",
        "groups": sorted(TrainingSpanGroup.ALL_GROUPS),
        "exports": True,
        "resource": rank_attributes(rank, world_size, rank, "bench", {}),
        "clock": {"monotonic_ns": begun, "wall_ns": time.time_ns() - 3_600_000_000_000},
        "started_ns": begun,
        "ended_ns": now,
        "end": "exit",
        "records": recorder.written(),
        "dropped": 0,
    }
    recorder.stop()
    (folder / WRITER_NAME).write_text(json.dumps(info))
    return name


def make_run(folder: Path, records: int, ranks: int = 1) -> tuple[Path, Path, int]:
    """A run directory and the spool's folder of its run, as an exporter finds them; and how many spans it will make."""
    run_dir, run_folder = folder / "run", folder / "spool"
    run_folder.mkdir(parents=True)
    for rank in range(ranks):
        name = write_rank(run_dir, rank, records // ranks, ranks)
        launch.register(str(run_folder), name, str(run_dir))
    return run_dir, run_folder, ranks * (records // ranks // RECORDS_OF_AN_ITERATION * SPANS_OF_AN_ITERATION + 1)


def run_exporter(run_folder: Path, environment: dict[str, str]) -> tuple[float, int]:
    """Run the exporter to its end: CPU seconds, and the most memory that was resident."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = {**os.environ, **environment, "NEMO_LENS_EXPORT_STRATEGY": "all_ranks", "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen([sys.executable, "-m", "lens_auto.export.process", str(run_folder)], env=variables)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]) * 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.02)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if launch.registered(str(run_folder)):
        raise RuntimeError("the exporter ended before all was sent")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak


def cpu_of_a_span(folder: Path, sink: Sink, records: int) -> float:
    """CPU seconds for each span: what a larger run costs more than a small one, without start and end."""
    costs, spans = [], []
    for count in (records // 10, records):
        _, run_folder, made = make_run(folder, count)
        costs.append(run_exporter(run_folder, sink.environment)[0])
        spans.append(made)
        shutil.rmtree(folder)
    return (costs[1] - costs[0]) / (spans[1] - spans[0])


def stock_path(count: int) -> tuple[float, float]:
    """CPU seconds for each span of the SDK: start and end, and its OTLP encoder."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider(resource=Resource.create({}), shutdown_on_exit=False).get_tracer("bench")
    spans: list[Any] = []
    begun = time.process_time()
    for number in range(count):
        attributes = {
            "lens.timing_source": "host",
            "dl.comm.group": "0",
            "dl.comm.group_size": 2,
            "dl.comm.seq": number,
            "dl.comm.bytes": 4096,
            "dl.comm.dtype": "torch.float32",
            "dl.comm.async": False,
        }
        span = tracer.start_span("torch.distributed.all_reduce", attributes=attributes)
        span.end()
        spans.append(span)
    made = time.process_time()
    for first in range(0, count, BATCH_SPANS):
        encode_spans(spans[first : first + BATCH_SPANS]).SerializePartialToString()
    return (made - begun) / count, (time.process_time() - made) / count


def stages(run_dir: Path) -> tuple[dict[str, float], list[str]]:
    """Where the time goes, in microseconds for each span; and the functions that take most of it."""
    (writer,) = RunDirectory(run_dir).writers
    encoder, attributes = Encoder(), resource_of(writer)
    spent = dict.fromkeys(("read and place", "make spans", "encode"), 0.0)

    def go() -> int:
        position, count = Position(), 0
        while True:
            begun = time.process_time()
            part = next_part(writer, position, OtherRanks(lambda rank: True), True)
            assert part is not None
            spans = part.spans()
            spent["read and place"] += time.process_time() - begun
            while True:
                begun = time.process_time()
                batch = list(itertools.islice(spans, BATCH_SPANS))
                made = time.process_time()
                spent["make spans"] += made - begun
                if not batch:
                    break
                encoder.request(batch, attributes)
                spent["encode"] += time.process_time() - made
                count += len(batch)
            if part.cut.last:
                return count
            position = part.after

    count = go()
    taken = {name: seconds / count * 1e6 for name, seconds in spent.items()}
    profile = cProfile.Profile()
    profile.runcall(go)
    table = pstats.Stats(profile)
    rows = sorted(table.stats.items(), key=lambda row: -row[1][2])[:12]  # type: ignore[attr-defined]
    total = sum(row[1][2] for row in table.stats.items())  # type: ignore[attr-defined]
    lines = [
        f"{own / total:5.1%}  {calls:>9,} calls  {Path(place[0]).name}:{place[1]} {place[2]}"
        for place, (_, calls, own, _, _) in rows
    ]
    return taken, lines


def metrics_of_a_span(run_dir: Path, spans: int) -> float:
    """CPU seconds for each span that metrics cost more, where an exporter for them is named."""
    from lens_auto.export.metrics import RankMetrics, measure

    (writer,) = RunDirectory(run_dir).writers
    position, made = Position(), RankMetrics(0, 0)
    begun = time.process_time()
    while True:
        stretch = next_stretch(writer, position, True)
        assert stretch is not None
        made.add(measure(writer, stretch))
        if stretch.cut.last:
            return (time.process_time() - begun) / spans
        position = stretch.after


def main(rounds: int, records: int, backlog: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lens-bench-"))
    sinks = {protocol: Sink(protocol) for protocol in ("grpc", "http")}
    costs: dict[str, list[float]] = {protocol: [] for protocol in sinks}
    stock: list[tuple[float, float]] = []
    try:
        for turn in range(rounds):
            for protocol, sink in sinks.items():
                costs[protocol].append(cpu_of_a_span(folder / "cost", sink, records))
            stock.append(stock_path(10_000))
            report_progress((turn + 1) / (rounds + 1))
        _, run_folder, _ = make_run(folder / "backlog", backlog, ranks=8)
        _, peak = run_exporter(run_folder, sinks["grpc"].environment)
        run_dir, _, made = make_run(folder / "stages", records)
        taken, lines = stages(run_dir)
        metrics_s = metrics_of_a_span(run_dir, made)
    finally:
        for sink in sinks.values():
            sink.close()
        shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {
        "rounds": rounds,
        "stock_span_us": median(span for span, _ in stock) * 1e6,
        "stock_encode_us": median(encode for _, encode in stock) * 1e6,
        "stages_us": taken,
        "metrics_us": metrics_s * 1e6,
        "profile": lines,
        "memory": {"peak_bytes": peak, "bare_bytes": bare_bytes(), "records": backlog},
    }
    for protocol, found in costs.items():
        ratios = [cost / sum(both) for cost, both in zip(found, stock, strict=True)]
        result[protocol] = {
            "ratio": median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "span_us": median(found) * 1e6,
        }
    leave_result(result)


def bare_bytes() -> int:
    """Resident memory of a Python that does nothing."""
    program = "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout) * 1024


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
