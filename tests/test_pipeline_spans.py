"""The spans of pipelines: links, ids, names and attributes. The program is that of `test_pipelines.py`."""

from __future__ import annotations

from collections import Counter

import pytest
from launch import INSTRUMENT, PYTHON, Launcher
from records import read_spans
from test_pipelines import PROGRAM

from lens_auto import semconv
from lens_auto.export.spans import Span


@pytest.fixture(scope="module")
def spans(launch_once: Launcher) -> dict[int, list[Span]]:
    env = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_PROPAGATION": "off"}
    run = launch_once.run(*INSTRUMENT, *PYTHON, launch_once.program(PROGRAM), "told", env=env, timeout_s=90).check()
    return read_spans(run.run_dir)


@pytest.fixture(scope="module")
def iterations(spans: dict[int, list[Span]]) -> dict[bytes, int]:
    """Rank 0's iterations, by trace."""
    return {
        span.trace_id: int(str(span.attributes[semconv.DL_ITERATION]))
        for span in spans[0]
        if span.name == semconv.SPAN_ITERATION
    }


def of(spans: list[Span], name: str, group: str = "0") -> list[Span]:
    return [span for span in spans if span.name == name and span.attributes.get(semconv.DL_COMM_GROUP) == group]


def test_links_lead_to_the_spans_of_the_senders(spans: dict[int, list[Span]], iterations: dict[bytes, int]) -> None:
    everything = {(span.trace_id, span.span_id): (rank, span) for rank in spans for span in spans[rank]}
    assert len(everything) == sum(map(len, spans.values()))
    counts: Counter[tuple[str, int]] = Counter()
    for rank in range(4):
        for direction in ("forward", "backward"):
            for span in of(spans[rank], f"pipeline.recv_{direction}.linked"):
                sender, sent = everything[span.links[0].trace_id, span.links[0].span_id]
                assert sent.name == f"pipeline.send_{direction}"
                assert sent.attributes[semconv.PIPELINE_RANK] == sender == span.attributes[semconv.PIPELINE_FROM_RANK]
                assert span.attributes[semconv.PIPELINE_RANK] == rank
                for each in (semconv.PIPELINE_MICROBATCH_ID, semconv.DL_COMM_BYTES):
                    assert sent.attributes[each] == span.attributes[each]
                assert sent.trace_id == span.trace_id
                assert sent.start_ns <= span.end_ns
                first, iteration = everything[span.links[1].trace_id, span.links[1].span_id]
                assert (first, iteration.name, len(span.links)) == (0, semconv.SPAN_ITERATION, 2)
                assert semconv.DL_COMM_EXPOSED_NS in span.attributes
                assert not any(link.attributes for link in span.links)
                counts[direction, iterations[span.trace_id]] += 1
    # GPipe and 1F1B, three calls each, with an optimizer each: one training after the other.
    per_iteration = dict.fromkeys(range(6), 24)
    assert counts == {(each, n): count for each in ("forward", "backward") for n, count in per_iteration.items()}


def test_microbatches(spans: dict[int, list[Span]]) -> None:
    for rank in range(4):
        for name in (semconv.SPAN_PIPELINE_FORWARD, semconv.SPAN_PIPELINE_BACKWARD):
            found = [span for span in spans[rank] if span.name == name]
            assert {span.attributes[semconv.DL_MICROBATCH_ID] for span in found} == set(range(8))
            assert {span.attributes[semconv.DL_PIPELINE_STAGE] for span in found} >= {rank}
            assert all(span.end_ns > span.start_ns for span in found)


def test_without_hang_watch_and_communication_transfers_still_end(launch: Launcher) -> None:
    env = {"NEMO_LENS_SPAN_GROUPS": "pipeline", "NEMO_LENS_PROPAGATION": "off", "NEMO_LENS_HANG_TIMEOUT_S": "0"}
    run = launch.run(*INSTRUMENT, *PYTHON, launch.program(PROGRAM), "told", env=env, timeout_s=90).check()
    found = [span for each in read_spans(run.run_dir).values() for span in each]
    assert found
    # The transfers' lengths are those of their waits, not those of the calls that start them.
    assert max(span.end_ns - span.start_ns for span in found) > 100_000
    assert not [span for span in found if semconv.DL_COMM_END in span.attributes]
    assert {span.name.split("_")[0] for span in found} == {"pipeline.send", "pipeline.recv"}
