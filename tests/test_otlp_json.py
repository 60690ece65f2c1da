"""What leaves as OTLP/JSON is read back with OpenTelemetry's own protobuf mapping; the console form as JSON."""

from __future__ import annotations

import base64
import datetime
import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData
from synthetic import Writer, train, wall, write_run

from lens_auto.export import console, encoder, otlp_json, output
from lens_auto.export.spans import Link, Span, WriterSpans, run_spans
from lens_auto.recorder import ids
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.read import RunDirectory

ID_KEYS = {"traceId", "spanId", "parentSpanId"}


def with_base64_ids(value: Any) -> Any:
    """OTLP/JSON writes ids in hexadecimal where protobuf's JSON mapping has base64: the one documented difference."""
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode() if key in ID_KEYS else with_base64_ids(item)
            for key, item in value.items()
        }
    return [with_base64_ids(item) for item in value] if isinstance(value, list) else value


def parse(line: bytes) -> TracesData:
    return json_format.Parse(json.dumps(with_base64_ids(json.loads(line))), TracesData())


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def a_run(folder: Path, iterations: int = 400) -> RunDirectory:
    writers = [
        train(Writer(rank=rank, world_size=2, pid=4242 + rank, nonce=(rank + 5) << 40), iterations) for rank in (0, 1)
    ]
    return RunDirectory(write_run(folder, *writers))


def test_otlp_json_parses_and_has_every_span_once(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    lines = list(otlp_json.lines(run_spans(run)))
    expected = {span.span_id: span for made in run_spans(run) for span in made.spans}
    found: Counter[bytes] = Counter()
    for line, count in lines:
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        (resource_spans,) = parse(line).resource_spans
        (scope_spans,) = resource_spans.scope_spans
        assert scope_spans.scope.name == "nemo.lens"
        assert len(scope_spans.spans) == count <= 512
        rank = plain(resource_spans.resource.attributes)["dl.rank"]
        assert type(rank) is int
        for span in scope_spans.spans:
            found[span.span_id] += 1
            wanted = expected[span.span_id]
            assert span.trace_id == wanted.trace_id
            assert span.parent_span_id == (wanted.parent_id or b"")
            assert span.name == wanted.name
            assert span.kind == ProtoSpan.SPAN_KIND_INTERNAL
            assert (span.start_time_unix_nano, span.end_time_unix_nano) == (wanted.start_ns, wanted.end_ns)
            assert plain(span.attributes) == wanted.attributes
            assert [(link.trace_id, link.span_id) for link in span.links] == [
                (link.trace_id, link.span_id) for link in wanted.links
            ]
            assert span.status.code == Status.STATUS_CODE_UNSET
    assert found == Counter(dict.fromkeys(expected, 1))
    assert [count for _, count in lines[:2]] == [512, 512]


def test_the_form_on_the_wire(tmp_path: Path) -> None:
    run = a_run(tmp_path, 1)
    message = json.loads(next(iter(otlp_json.lines(run_spans(run))))[0])
    spans = message["resourceSpans"][0]["scopeSpans"][0]["spans"]
    iteration = next(span for span in spans if span["name"] == "train.iteration")
    seed = bytes(15) + b"\x07"
    assert iteration["traceId"] == ids.iteration_trace_id(seed, 0).hex()
    assert iteration["spanId"] == ids.iteration_span_id(seed, 0, 0).hex()
    assert iteration["startTimeUnixNano"] == str(wall(10))
    assert {"key": "dl.iteration", "value": {"intValue": "0"}} in iteration["attributes"]
    assert "parentSpanId" not in iteration
    assert "links" not in iteration
    assert "status" not in iteration


def made_of(span: Span) -> list[WriterSpans]:
    return [WriterSpans(None, {}, 1, iter([span]))]  # type: ignore[arg-type]


def odd_span() -> Span:
    attributes: dict[str, Any] = {
        "text": 'quote " and ünïcode \x00',
        "true": True,
        "big": (1 << 64) - 1,
        "negative": -5,
        "float": 1.5,
        "nan": math.nan,
        "infinite": -math.inf,
        "list": ["a", "b"],
        "numbers": [1, 2],
    }
    links = [Link(b"\1" * 16, b"\2" * 8, {"lens.link.exported": False})]
    return Span(b"\3" * 16, b"\4" * 8, b"\5" * 8, "odd", 1, 2, attributes, links, "Boom")


def test_odd_values_in_otlp_json() -> None:
    ((line, _),) = otlp_json.lines(made_of(odd_span()))
    span = parse(line).resource_spans[0].scope_spans[0].spans[0]
    found = plain(span.attributes)
    assert found["text"] == 'quote " and ünïcode \x00'
    assert found["true"] is True
    assert found["big"] == (1 << 63) - 1
    assert found["negative"] == -5
    assert found["float"] == 1.5
    assert math.isnan(found["nan"])
    assert found["infinite"] == -math.inf
    assert [each.string_value for each in found["list"].values] == ["a", "b"]
    assert [each.int_value for each in found["numbers"].values] == [1, 2]
    assert plain(span.links[0].attributes) == {"lens.link.exported": False}
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "Boom")


def test_console(tmp_path: Path) -> None:
    run = a_run(tmp_path, 2)
    lines = [json.loads(line) for line, _ in console.lines(run_spans(run))]
    assert len(lines) == sum(made.count for made in run_spans(run))
    first = next(line for line in lines if line["name"] == "train.iteration")
    assert set(first) == {
        *("trace_id", "span_id", "parent_id", "kind", "name", "start_time", "end_time"),
        *("attributes", "links", "resource"),
    }
    assert first["kind"] == "INTERNAL"
    assert first["parent_id"] is None
    assert first["start_time"] == "2023-11-14T22:13:20.010000000Z"
    assert datetime.datetime.fromisoformat(first["end_time"][:26]) > datetime.datetime(2023, 11, 14)
    assert first["resource"]["attributes"]["dl.rank"] == 0
    assert first["attributes"]["dl.iteration"] == 0
    (link,) = next(line for line in lines if line["name"] == "train.iteration" and line["links"])["links"]
    assert link["trace_id"] == first["trace_id"]
    ((odd, _),) = console.lines(made_of(odd_span()))
    assert json.loads(odd)["status"] == {"code": "ERROR", "message": "Boom"}
    assert b"\n" not in odd[:-1]


def test_failures_have_an_error_status(tmp_path: Path) -> None:
    writer = Writer()
    writer.take(Kind.BACKWARD, 1, Flag.SPAN | Flag.FAILED, detail="ValueError")
    run = RunDirectory(write_run(tmp_path, writer))
    ((line, _),) = otlp_json.lines(run_spans(run))
    codes = [span.status.code for span in parse(line).resource_spans[0].scope_spans[0].spans]
    assert codes == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]


def test_an_unknown_form() -> None:
    with pytest.raises(ValueError, match="'xml' is no form of export; valid: otlp-json, console"):
        encoder("xml")


# --- where it goes ----------------------------------------------------------------------------------------------------


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "spans.jsonl"
    with output(str(target)) as file:
        file.write(b"half")
        file.flush()
        assert not target.exists()
    assert target.read_bytes() == b"half"
    target.chmod(0o640)
    with pytest.raises(RuntimeError), output(str(target)) as file:
        file.write(b"never")
        raise RuntimeError
    assert target.read_bytes() == b"half"
    with output(str(target)) as file:
        file.write(b"new")
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["spans.jsonl"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "spans.jsonl")
    with output(str(link)) as file:
        file.write(b"x")
    assert link.is_symlink()
    assert (tmp_path / "there" / "spans.jsonl").read_bytes() == b"x"


def test_a_device_is_not_replaced() -> None:
    with output("/dev/null") as file:
        file.write(b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), output(str(tmp_path / "none" / "file")):
        pass
