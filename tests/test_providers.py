"""OpenTelemetry's providers under our distro: built when first used, ordinary then, and never in a program's way."""

from __future__ import annotations

import json
import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, RUN_RANKS, Launcher, Run
from receiver import Receiver
from test_otlp_json import parse

from lens_auto.sdk_exporters import JsonLinesFile

WITHOUT_SDK = """
import sys
assert not any(name.startswith("opentelemetry.sdk") for name in sys.modules)
"""


def check(run: Run) -> Run:
    """It went well."""
    assert run.code == 0, f"{run.stdout}\n{run.stderr}"
    return run


def spans_of(path: Path) -> dict[str, Any]:
    """Spans by name in a file of OTLP/JSON lines; each has its resource's attributes as `resource`."""
    found: dict[str, Any] = {}
    for line in path.read_bytes().splitlines():
        for resource_spans in parse(line).resource_spans:
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    resource = {
                        each.key: getattr(each.value, str(each.value.WhichOneof("value")))
                        for each in resource_spans.resource.attributes
                    }
                    found[span.name] = (span, resource)
    return found


def service_files(run: Run) -> list[Path]:
    return sorted(path for run_dir in run.run_dirs for path in (run_dir / "services").glob("*"))


USES_NOTHING = f"""
{WITHOUT_SDK}
from opentelemetry import trace, metrics, _logs
tracer = trace.get_tracer("t")
provider = trace.get_tracer_provider()
assert isinstance(provider, trace.ProxyTracerProvider)
assert provider.force_flush() and provider.shutdown() is None
counter = metrics.get_meter("m").create_counter("c")
counter.add(1)
_logs.get_logger("l")
{WITHOUT_SDK}
"""


def test_who_makes_no_span_pays_for_nothing_and_leaves_nothing(launch: Launcher) -> None:
    run = check(launch.instrumented(USES_NOTHING))
    assert (run.run_dirs, run.lines) == ([], [])


FIRST_SPANS = """
import os
import sys
import threading
from opentelemetry import trace
from lens_auto import managed_span
early = trace.get_tracer("early", "1.0")
barrier = threading.Barrier(4)
def work(number):
    barrier.wait()
    with early.start_as_current_span(f"thread {number}"):
        pass
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
provider = trace.get_tracer_provider()
assert provider.resource.attributes["team"] == "blue"
class Seen:
    names = []
    def on_start(self, span, parent_context=None): self.names.append(span.name)
    def _on_ending(self, span): pass
    def on_end(self, span): pass
    def shutdown(self): pass
    def force_flush(self, timeout_millis=0): return True
provider.add_span_processor(Seen())
with early.start_as_current_span("outer"), managed_span("job", "inner"):
    pass
assert Seen.names == ["outer", "inner"]
@early.start_as_current_span("decorated")
def decorated():
    return trace.get_current_span()
assert decorated().name == "decorated"
child = os.fork()
if child == 0:
    with early.start_as_current_span("forked"):
        os._exit(0)  # what has ended is written; what is open here is not the parent's to end
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    early.start_span("forked and ended").end()
    os._exit(0)
os.waitpid(child, 0)
left = early.start_span("left open")
os.environ["LEFT"] = "1"
"""


def test_the_first_span_builds_an_ordinary_provider(launch: Launcher) -> None:
    environment = {"OTEL_SERVICE_NAME": "svc", "OTEL_RESOURCE_ATTRIBUTES": "team=blue"}
    run = check(launch.instrumented(FIRST_SPANS, env=environment))
    files = service_files(run)
    assert len(files) == 2  # the parent's, and that of the child which ended a span
    assert all(re.fullmatch(r".+-\d+\.jsonl", path.name) for path in files)
    by_file = [spans_of(path) for path in files]
    (parent,) = [found for found in by_file if "outer" in found]
    (child,) = [found for found in by_file if found is not parent]
    threads = {f"thread {number}" for number in range(4)}
    assert set(parent) == {*threads, "outer", "inner", "decorated", "left open"}
    assert set(child) == {"forked and ended"}
    span, resource = parent["outer"]
    assert parent["inner"][0].parent_span_id == span.span_id
    run_id = run.run_dir.name
    assert resource["service.name"] == "svc"
    assert resource["nemo.run.id"] == run_id
    assert resource["service.instance.id"] == f"{run_id}-{resource['host.name']}-{resource['process.pid']}"
    assert "dl.rank" not in resource
    child_resource = child["forked and ended"][1]
    assert child_resource["process.pid"] != resource["process.pid"]
    assert child_resource["service.instance.id"].endswith(f"-{child_resource['process.pid']}")
    truncated = {name for name, (each, _) in parent.items() if "truncated" in str(each.attributes)}
    assert truncated == {"left open"}
    assert run.lines == [
        f"lens-auto: spans of this process are in lens-runs/{run_id}/services/{path.name}"
        for path in files
        if path.name.endswith(f"-{resource['process.pid']}.jsonl")
    ]


OWN_PROVIDER = """
import sys
from opentelemetry import trace, metrics
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
early = trace.get_tracer("early")
counter = metrics.get_meter("m").create_counter("c")
early.start_span("before").end()
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
assert trace.get_tracer_provider() is provider
early.start_span("by an early tracer").end()
trace.get_tracer("new").start_span("by a new tracer").end()
counter.add(3)
print([span.name for span in exporter.get_finished_spans()])
print(reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics[0].data.data_points[0].value)
"""


def test_a_program_that_sets_its_own_provider_is_not_refused(launch: Launcher) -> None:
    run = check(launch.instrumented(OWN_PROVIDER))
    assert run.stdout.splitlines() == ["['by an early tracer', 'by a new tracer']", "3"]
    assert "not allowed" not in run.stderr
    assert [set(spans_of(path)) for path in service_files(run)] == [{"before"}]


ALL_SIGNALS = """
import logging
from opentelemetry import metrics, trace
logging.basicConfig(format="%(levelname)s:%(message)s")  # still prints: there is no handler of ours on the root logger
log = logging.getLogger("program")
quiet = logging.getLogger("program.quiet")
quiet.propagate = False
quiet.addHandler(logging.NullHandler())
with trace.get_tracer("t").start_as_current_span("s"):
    log.warning("inside %d", 1)
    quiet.warning("not for the root logger")
log.info("below the level")
metrics.get_meter("m").create_counter("c").add(2)
import multiprocessing
def child():
    trace.get_tracer("t").start_span("of a child that ends in os._exit").end()
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


def test_an_endpoint_gets_spans_metrics_and_logs(launch: Launcher) -> None:
    with Receiver("http") as receiver:
        environment = {**receiver.environment(), "NEMO_LENS_LOGS_ENABLED": "1"}
        run = check(launch.instrumented(ALL_SIGNALS, env=environment))
        counts = receiver.counts()
        assert (counts["spans"], counts["logs"]) == (2, 1)
        assert counts["metrics"] >= 1  # a forked child has the parent's, as the SDK does it
    assert run.lines == ["WARNING:inside 1"]
    assert run.run_dirs == []


def test_logs_go_to_the_run_directory(launch: Launcher) -> None:
    run = check(launch.instrumented(ALL_SIGNALS, env={"NEMO_LENS_LOGS_ENABLED": "1"}))
    assert "WARNING:inside 1" in run.lines
    (logs,) = [path for path in service_files(run) if ".logs." in path.name]
    (line,) = logs.read_text().splitlines()
    record = json.loads(line)["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert record["body"] == {"stringValue": "inside 1"}
    spans = spans_of(logs.with_name(logs.name.replace(".logs.", ".")))
    assert bytes.fromhex(record["spanId"]) == spans["s"][0].span_id


LOGS_OF_EVERY_MAKE = """
import atexit
import logging
logging.basicConfig(format="%(message)s", level=logging.INFO)
log = logging.getLogger("train")

class Last:
    def __del__(self):
        log.info("deleted")

last = Last()
atexit.register(lambda: log.info("at exit"))
log.handle(logging.makeLogRecord({"msg": "by hand", "levelno": 30, "levelname": "WARNING"}))
log.info("odd name of a field", extra={1: 2})
log.handle(logging.makeLogRecord({"msg": "odd place", "levelno": 20, "lineno": "?", "pathname": 3, "funcName": None}))
"""


def test_log_records_of_every_make(launch: Launcher) -> None:
    """Records that a program made by itself, and those of its end."""
    run = check(launch.instrumented(LOGS_OF_EVERY_MAKE, env={"NEMO_LENS_LOGS_ENABLED": "1"}))
    said = ["by hand", "odd name of a field", "odd place", "at exit"]
    (path,) = service_files(run)
    shown = f"lens-auto: log records of this process are in lens-runs/{run.run_dir.name}/services/{path.name}"
    assert run.lines == [*said, shown, "deleted"]
    parts = [json.loads(line)["resourceLogs"][0]["scopeLogs"] for line in path.read_text().splitlines()]
    records = [record for part in parts for scope in part for record in scope["logRecords"]]
    assert sorted(record["body"]["stringValue"] for record in records) == sorted(said)


AWKWARD_LOGS = """
import logging
import os
logging.warning("one")
logging.warning("file %s", os.fsdecode(b"caf\\xe9.txt"), extra={"file": os.fsdecode(b"caf\\xe9"), "big": 1 << 64})
logging.warning("needs %d", "x")
class Untold:
    def __str__(self):
        raise RuntimeError("no text")
logging.warning(Untold())
logging.warning("last")
"""


@pytest.mark.parametrize("exporter", ["otlp", "file"])
def test_a_log_record_that_cannot_be_sent_as_it_is(launch: Launcher, exporter: str) -> None:
    """It is kept, and nothing is said about it beyond what the program says without us."""
    plain = launch.run(*PYTHON, launch.program(AWKWARD_LOGS))
    with Receiver("http") as receiver:
        environment = {**receiver.environment(), "NEMO_LENS_LOGS_ENABLED": "1", "NEMO_LENS_QUIET": "1"}
        if exporter == "file":
            environment["OTEL_LOGS_EXPORTER"] = "lens_file"
        run = check(launch.instrumented(AWKWARD_LOGS, env=environment))
        count = receiver.counts()["logs"]
    assert run.stderr.count("Traceback") == plain.stderr.count("Traceback")
    if exporter == "otlp":
        assert count == 5
        return
    (path,) = service_files(run)
    records = [
        json.loads(line)["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0] for line in path.read_text().splitlines()
    ]
    assert [record["body"]["stringValue"] for record in records] == [
        "one",
        "file caf?.txt",
        "needs %d",
        "<Untold whose text fails with RuntimeError>",
        "last",
    ]
    attributes = {each["key"]: each["value"] for each in records[1]["attributes"]}
    assert attributes["file"] == {"stringValue": "caf?"}
    assert "big" not in attributes


def test_what_a_dead_endpoint_does_not_take_is_kept(launch: Launcher) -> None:
    program = """
    from opentelemetry import trace
    for number in range(20):
        trace.get_tracer("t").start_span(f"span {number}").end()
    """
    with Receiver("grpc", down=True) as receiver:
        environment = {**receiver.environment(), "NEMO_LENS_EXIT_TIMEOUT_S": "1.5", "OTEL_METRICS_EXPORTER": "none"}
        began = time.monotonic()
        run = check(launch.instrumented(program, env=environment))
        assert time.monotonic() - began < 25  # gRPC's own retries alone take longer on a busy machine
    (path,) = service_files(run)
    assert path.name.endswith(".unsent.jsonl")
    assert set(spans_of(path)) == {f"span {number}" for number in range(20)}


def test_an_unknown_exporter_is_one_line_and_the_run_directory(launch: Launcher) -> None:
    program = "from opentelemetry import trace\ntrace.get_tracer('t').start_span('s').end()"
    run = check(launch.instrumented(program, env={"OTEL_TRACES_EXPORTER": "zipkon"}))
    assert run.lines[0].startswith("lens-auto: traces exporter 'zipkon' is not installed; there are: console, ")
    assert run.lines[0].endswith("; the run directory is used instead")
    (path,) = service_files(run)
    assert set(spans_of(path)) == {"s"}


RANKS = """
import logging
import time
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist
from opentelemetry import trace
from lens_auto import runtime, span_cm

def main(rank):
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while runtime._housekeeper.info["seed"] is None:  # until the ranks have agreed
        time.sleep(0.01)
    for number in range(2):
        with span_cm("user's", number=number):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        logging.getLogger("program").error("outside of any span")
    main.left = trace.get_tracer("t").start_span("left open")
    dist.destroy_process_group()

run_ranks(main, 2)
"""


def test_a_ranks_own_spans_and_logs_lie_in_its_folder(launch: Launcher) -> None:
    program = f"{RUN_RANKS}\n{RANKS}"
    run = check(launch.run(*INSTRUMENT, *PYTHON, launch.program(program), env={"NEMO_LENS_LOGS_ENABLED": "1"}))
    assert not (run.run_dir / "services").exists()
    assert run.spooled == []
    folders = sorted((run.run_dir / "ranks").iterdir())
    ranks = []
    for folder in folders:
        spans = spans_of(folder / "spans.jsonl")
        assert set(spans) == {"user's", "left open"}
        ranks.append(spans["user's"][1]["dl.rank"])
        (resource, *_), records = _logs(folder / "logs.jsonl")
        assert len(records) == 2
        attributes = {each["key"]: each["value"] for each in records[0]["attributes"]}
        assert attributes["dl.rank"] == {"intValue": str(ranks[-1])}
        assert {each["key"]: each["value"] for each in resource}["dl.rank"] == {"intValue": str(ranks[-1])}
        # One iteration each: the records are in different traces, those of the iterations.
        assert len({record["traceId"] for record in records}) == 2
        assert all(record["spanId"] for record in records)
    assert sorted(ranks) == [0, 1]
    traces = [[record["traceId"] for record in _logs(folder / "logs.jsonl")[1]] for folder in folders]
    assert traces[0] == traces[1]  # the same iterations' traces on both ranks


def _logs(path: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    """The resources' attributes, and the records of the program's own logger."""
    messages = [json.loads(line)["resourceLogs"][0] for line in path.read_text().splitlines()]
    scopes = [scope for message in messages for scope in message["scopeLogs"]]
    records = [record for scope in scopes if scope["scope"]["name"] == "program" for record in scope["logRecords"]]
    return [message["resource"]["attributes"] for message in messages], records


PREFIXED = """
import sys
from lens_auto import is_span_group_enabled, runtime
print(sorted(runtime.groups))
import nemo_gym
print(sorted(runtime.groups), is_span_group_enabled("server"))
"""


def test_nemo_gyms_variables_count_once_it_is_imported(launch: Launcher) -> None:
    (launch.cwd / "nemo_gym").mkdir()
    (launch.cwd / "nemo_gym" / "__init__.py").write_text("")
    environment: dict[str, str | None] = {"NEMO_LENS_SPAN_GROUPS": "job", "NEMO_GYM_OTEL_SPAN_GROUPS": "per_rollout"}
    run = check(launch.instrumented(PREFIXED, env=environment))
    assert run.stdout.splitlines() == ["['job']", "['http_client', 'server'] True"]


def test_another_prefix_wins_where_it_is_named(launch: Launcher) -> None:
    environment = {
        "NEMO_LENS_SPAN_GROUPS": "job",
        "MINE_SPAN_GROUPS": "server",
        "MINE_EXPORTER": "console",
        "MINE_QUIET": " ",
        "NEMO_LENS_CONFIG_PREFIX": "MINE",
    }
    program = """
    from opentelemetry import trace
    from lens_auto import runtime
    print(sorted(runtime.groups))
    trace.get_tracer("t").start_span("s").end()
    """
    run = check(launch.instrumented(program, env=environment))
    groups, span = run.stdout.splitlines()
    assert (groups, json.loads(span)["name"]) == ("['server']", "s")
    assert run.run_dirs == []


def test_switched_off_it_leaves_opentelemetry_alone(launch: Launcher) -> None:
    program = """
    from opentelemetry import trace
    print(type(trace.get_tracer_provider()).__name__, trace.get_tracer("t").start_span("s").is_recording())
    """
    run = check(launch.instrumented(program, env={"NEMO_LENS_DISABLED": "1"}))
    assert run.stdout.split() == ["ProxyTracerProvider", "False"]
    assert run.run_dirs == []


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_bounded_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    file = JsonLinesFile(lambda: str(tmp_path / "spans.jsonl"), limit_bytes=200)
    lines = [b"%018d\n" % number for number in range(30)]  # 19 bytes each: five in a half
    assert all(file.write(line) for line in lines)
    file.close()
    assert {path.name for path in tmp_path.iterdir()} == {"spans.jsonl", "spans.old.jsonl"}
    kept = (tmp_path / "spans.old.jsonl").read_bytes() + (tmp_path / "spans.jsonl").read_bytes()
    assert kept == b"".join(lines[20:])
    assert stat.S_IMODE((tmp_path / "spans.jsonl").stat().st_mode) == 0o600
    assert file.write(lines[0])  # opened again, and counted on
    assert (tmp_path / "spans.jsonl").read_bytes() == lines[0]


@pytest.mark.parametrize("path", ["/dev/full", "{folder}/file/spans.jsonl", "{folder}/link"])
def test_a_file_that_cannot_be_written_drops_and_says_so_once(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")  # links are not followed
    file = JsonLinesFile(lambda: path.format(folder=tmp_path), 1 << 20)
    assert [file.write(b"line\n") for _ in range(3)] == [False] * 3
    assert file.dropped_lines == 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("lens-auto: '")
    assert "cannot be written" in line
    assert (tmp_path / "target").read_bytes() == b""
