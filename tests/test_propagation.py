"""What ranks tell each other: the trace a job was started from, the carrier of each iteration, switches and windows.

The programs are cases of `rank_cases.py`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import PYTHON, RUN_RANKS, SCRIPTS, Launcher, Started
from records import Row, Writer, read_run, read_spans
from test_no_harm import PROGRAM

from lens_auto.groups import TrainingSpanGroup
from lens_auto.iteration import origin
from lens_auto.iteration.carrier import CARRIER_BYTES, Switch, pack, unpack
from lens_auto.iteration.schedule import WINDOW_GROUPS, Schedule, window_switches
from lens_auto.iteration.sharing import SKEW_MESSAGES, Skew
from lens_auto.recorder import ids
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.recorder import NEVER

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STARTED_FROM = {
    "TRACEPARENT": f"00-{TRACE}-{SPAN}-01",
    "TRACESTATE": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
    "BAGGAGE": "team=vision,run=a%20b",
}
BAGGAGE = {"team": "vision", "run": "a b"}
MODES = ("broadcast", "derived", "off")


def start(launch: Launcher, *plans: dict[str, Any], env: dict[str, str] | None = None) -> Started:
    defaults = {"world": 2, "instrumented": [0, 1], "env": {}, "kill_after": -1, "limit_s": 60, "real_end": False}
    file = launch.cwd / "plan.json"
    file.write_text(json.dumps([{**defaults, **plan} for plan in plans]))
    return launch.start([*PYTHON, str(PROGRAM), str(file)], env)


def results(started: Started) -> list[dict[str, Any]]:
    """What the ranks of each case said; all of them ended well."""
    run = started.wait(90)
    assert run.code == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    for result in found:
        for end in result["ranks"].values():
            assert end["code"] == 0, end
    return found


# --- the trace that a job was started from, and the carrier of an iteration -------------------------------------------


@pytest.fixture(scope="module")
def carriers(launch_once: Launcher) -> dict[str, dict[str, Any]]:
    """Rank 0 has the variables; rank 1 has none, or others."""
    plans = []
    for mode in MODES:
        others = {"TRACEPARENT": f"00-{'1' * 32}-{'2' * 16}-01", "BAGGAGE": "team=other"} if mode == "derived" else {}
        env = {"all": {"NEMO_LENS_PROPAGATION": mode}, "0": STARTED_FROM, "1": others}
        plans.append({"case": "carriers", "env": env})
    return dict(zip(MODES, results(start(launch_once, *plans)), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_the_job_links_to_the_trace_that_rank_0_was_started_from(carriers: dict[str, Any], mode: str) -> None:
    spans = read_spans(Path(carriers[mode]["folder"]) / "run")
    assert sorted(spans) == [0, 1]
    for found in spans.values():
        (job,) = [span for span in found if span.name == "train.job"]
        assert [(link.trace_id.hex(), link.span_id.hex(), link.trace_state, link.attributes) for link in job.links] == [
            (TRACE, SPAN, STARTED_FROM["TRACESTATE"], {})
        ]


@pytest.mark.parametrize("mode", MODES)
def test_the_baggage_of_rank_0_is_on_every_rank(carriers: dict[str, Any], mode: str) -> None:
    for end in carriers[mode]["ranks"].values():
        assert [seen["baggage"] for seen in end["said"]["iterations"]] == [BAGGAGE] * 6


@pytest.mark.parametrize("mode", MODES)
def test_the_carrier_names_rank_0s_iteration(carriers: dict[str, Any], mode: str) -> None:
    for end in carriers[mode]["ranks"].values():
        seed = bytes.fromhex(end["said"]["seed"].split()[1])
        for number, seen in enumerate(end["said"]["iterations"]):
            assert seen["iteration"] == number
            if mode == "off":
                assert seen["carrier"] is None
                continue
            trace_id, span_id = ids.iteration_trace_id(seed, number).hex(), ids.iteration_span_id(seed, number, 0).hex()
            assert seen["carrier"] == {
                "traceparent": f"00-{trace_id}-{span_id}-01",
                "tracestate": STARTED_FROM["TRACESTATE"],
                "baggage": STARTED_FROM["BAGGAGE"],
            }


@pytest.mark.parametrize("mode", MODES)
def test_what_the_program_sets_as_carrier_stays(carriers: dict[str, Any], mode: str) -> None:
    for end in carriers[mode]["ranks"].values():
        assert end["said"]["own carrier"] == end["said"]["own carrier later"] == {"traceparent": "the program's own"}


def test_the_programs_own_spans_lie_in_the_iteration(carriers: dict[str, Any]) -> None:
    for mode in MODES:
        for rank, end in carriers[mode]["ranks"].items():
            seed = bytes.fromhex(end["said"]["seed"].split()[1])
            for number, seen in enumerate(end["said"]["iterations"]):
                assert seen["trace"] == ids.iteration_trace_id(seed, number).hex()
                assert seen["parent"] == ids.iteration_span_id(seed, number, int(rank)).hex()
                assert seen["inside is a child"]
                assert seen["still current"]


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        (STARTED_FROM, {"traceparent", "tracestate", "baggage"}),
        ({}, set()),
        ({**STARTED_FROM, "TRACEPARENT": "00-zz"}, {"tracestate", "baggage"}),
        ({"TRACEPARENT": f"00-{'0' * 32}-{SPAN}-01"}, set()),
        ({"TRACEPARENT": f"00-{TRACE}-{'0' * 16}-01"}, set()),
        ({"TRACEPARENT": f"ff-{TRACE}-{SPAN}-01"}, set()),
        ({"TRACEPARENT": f" 00-{TRACE}-{SPAN}-00 "}, {"traceparent"}),
        ({"TRACEPARENT": f"01-{TRACE}-{SPAN}-01-more"}, {"traceparent"}),
        ({"BAGGAGE": "a=" + "b" * 8191}, set()),
        ({"BAGGAGE": "a=b\nc=d"}, set()),
        ({"traceparent": STARTED_FROM["TRACEPARENT"]}, set()),
    ],
)
def test_headers_of_the_environment(environment: dict[str, str], kept: set[str]) -> None:
    assert set(origin.from_environment(environment)) == kept


def test_headers_that_another_process_sent() -> None:
    for nonsense in (None, [], "x", {"traceparent": 3}, {"other": "x"}):
        assert origin.clean(nonsense) == {}
        assert origin.span_of(nonsense) is None
    assert origin.span_of(origin.from_environment(STARTED_FROM)) == (
        bytes.fromhex(TRACE),
        bytes.fromhex(SPAN),
        STARTED_FROM["TRACESTATE"],
    )


# --- the message ------------------------------------------------------------------------------------------------------


def test_message_and_back() -> None:
    carrier = {name: STARTED_FROM[name.upper()] for name in ("traceparent", "tracestate", "baggage")}
    switches = [Switch(frozenset({"communication"}), 70), Switch(TrainingSpanGroup.ALL_GROUPS, 1 << 40)]
    for coming in ([], switches[:1], switches):
        message, left_out = pack(7, 9, carrier, coming)
        assert (len(message), left_out) == (CARRIER_BYTES, [])
        assert unpack(message) == (7, 9, carrier, coming)


def test_baggage_is_left_out_first() -> None:
    carrier = {"traceparent": STARTED_FROM["TRACEPARENT"], "tracestate": "t=" + "x" * 200, "baggage": "b=" + "y" * 300}
    message, left_out = pack(1, 1, carrier, [])
    assert left_out == ["baggage"]
    assert unpack(message)[2] == {name: carrier[name] for name in ("traceparent", "tracestate")}
    message, left_out = pack(1, 1, {**carrier, "tracestate": "t=" + "x" * 500}, [])
    assert left_out == ["baggage", "tracestate"]
    assert unpack(message)[2] == {"traceparent": carrier["traceparent"]}


def test_what_is_no_message_is_refused() -> None:
    message, _ = pack(1, 1, {"traceparent": "x"}, [])
    for damaged in (bytes(CARRIER_BYTES), b"\xff" + message[1:], message[:2] + b"\x09" + message[3:]):
        with pytest.raises(ValueError, match="not a carrier message"):
            unpack(damaged)


# --- ranks that drift apart -------------------------------------------------------------------------------------------


def test_skew_is_what_lasts() -> None:
    skew = Skew()
    for ahead in [5] * (SKEW_MESSAGES - 1) + [0, 5, 5, 5]:  # once level: not apart for good
        skew.add(ahead)
    assert skew.widest == 0
    for ahead in [-1] * 2 * SKEW_MESSAGES:  # in lockstep, a message late
        skew.add(ahead)
    assert skew.widest == 0
    for ahead in [-7, -3, *[-4] * SKEW_MESSAGES]:
        skew.add(ahead)
    assert skew.widest == -4
    for ahead in [9] * SKEW_MESSAGES:
        skew.add(ahead)
    assert skew.widest == 9


@pytest.mark.slow
def test_ranks_that_drift_apart_say_so(launch: Launcher) -> None:
    (result,) = results(start(launch, {"case": "drifting"}))
    spans = read_spans(Path(result["folder"]) / "run")
    skews = {
        rank: [s.attributes.get("lens.iteration.skew") for s in spans[rank] if s.name == "train.job"] for rank in spans
    }
    assert skews[0] == [None]
    (ahead,) = skews[1]
    assert isinstance(ahead, int)
    assert 10 < ahead <= 121  # 180 iterations beside 60


# --- windows and switches ---------------------------------------------------------------------------------------------

PER_ITERATION = {Kind.COLLECTIVE: 2, Kind.SEND: 3, Kind.RECV: 3}


def check_traffic(result: dict[str, Any], on: list[int]) -> dict[int, Writer]:
    """Assert that communication was recorded in some iterations, and there exactly and alike on both ranks."""
    writers = {writer.rank: writer for writer in read_run(Path(result["folder"]) / "run")}
    assert sorted(writers) == [0, 1]
    for rank, writer in writers.items():
        assert (writer.info["hooks_off"], writer.info["hook_faults"]) == ({}, 0)
        for kind in (Kind.COLLECTIVE, Kind.SEND if rank == 0 else Kind.RECV):
            rows = [row for row in _rows(writer, kind) if row.flags & Flag.SPAN]
            assert [row.iteration for row in rows] == [n for n in on for _ in range(PER_ITERATION[kind])], (rank, kind)
    sequences = [[(row.iteration, row.seq) for row in _rows(writers[rank], Kind.COLLECTIVE)] for rank in (0, 1)]
    assert sequences[0] == sequences[1]
    # The same distance between the same operations of any two iterations: what was not recorded was counted.
    first = dict(reversed(sequences[0]))
    paces = {(first[b] - first[a]) / (b - a) for a, b in itertools.pairwise(on) if a > 1}
    assert len(paces) <= 1
    sends = {}
    for row in _rows(writers[0], Kind.SEND):
        sends[_send_id(writers[0], row, 0, 1)] = 10 * row.iteration + {0: 0, 7: 1, 9: 2}[row.tag]
        assert row.seq == row.iteration
    received = result["ranks"]["1"]["said"]["received"]
    by_iteration: dict[int, list[Row]] = {}
    for row in _rows(writers[1], Kind.RECV):
        assert not row.flags & Flag.AMBIGUOUS
        by_iteration.setdefault(row.iteration, []).append(row)
    for iteration, rows in by_iteration.items():
        linked = [sends[_send_id(writers[1], row, row.peer, 1)] for row in rows]
        assert linked == received[str(iteration)]
    return writers


def _rows(writer: Writer, kind: Kind) -> list[Row]:
    """Of the program's own calls; DDP's are seen by torch's flight recorder."""
    return [
        row for row in writer.of(kind) if not row.flags & Flag.FLIGHT and row.name in ("all_reduce", "send", "recv")
    ]


def _send_id(writer: Writer, row: Row, source: int, target: int) -> bytes:
    seed = writer.files.info.seed
    assert seed is not None
    return ids.send_span_id(seed, row.group, row.init, source, target, row.tag, row.seq)


@pytest.mark.parametrize("hang_timeout_s", [pytest.param("300", marks=pytest.mark.slow), "0"])
def test_windows(launch: Launcher, hang_timeout_s: str) -> None:
    env = {
        "NEMO_LENS_SPAN_GROUPS": "all",
        "NEMO_LENS_WINDOW": "3-5,9,20-21",
        "NEMO_LENS_HANG_TIMEOUT_S": hang_timeout_s,
        "LIMIT": "30",
    }
    (result,) = results(start(launch, {"case": "traffic", "env": {"all": env}}))
    assert result["ranks"]["0"]["said"]["iterations"] == 31
    check_traffic(result, [3, 4, 5, 9, 20, 21])


DDP_PROGRAM = (
    RUN_RANKS
    + """
import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist

def main(rank):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # a group that is taken down while its last all-reduce is put away can hang (torch 2.13)
    dist.destroy_process_group()

run_ranks(main, 2)
"""
)


def test_a_window_holds_what_ddp_did_in_it_and_no_more(launch: Launcher) -> None:
    """DDP's logger tells of an iteration when the next one begins, torch's flight recorder whenever it is asked.

    The second window is open when the job ends.
    """
    run = launch.instrumented(DDP_PROGRAM, env={"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_WINDOW": "3-5,9-20"}).check()
    for spans in read_spans(run.run_dir).values():
        numbers = {span.trace_id: span.attributes["dl.iteration"] for span in spans if span.name == "train.iteration"}
        ids_ = {span.span_id: span.name for span in spans}
        for name in ("ddp.communication", "torch.distributed.all_reduce"):
            assert [numbers[span.trace_id] for span in spans if span.name == name] == [3, 4, 5, 9, 10, 11], name
        inner = [span for span in spans if span.name == "ddp.backward" and span.trace_id in numbers]
        assert [numbers[span.trace_id] for span in inner] == list(range(1, 12))
        # It begins where forward ends, before backward does.
        assert {ids_[span.parent_id or b""] for span in inner} == {"train.iteration"}


def switch_while_it_runs(launch: Launcher, mode: str, more_env: dict[str, str] | None = None) -> dict[int, Writer]:
    """Switch communication on for 6 iterations of a running job, twice."""
    env = {"NEMO_LENS_PROPAGATION": mode, "NEMO_LENS_SPAN_GROUPS": "step,job", "PAUSE_S": "0.02", **(more_env or {})}
    started = start(launch, {"case": "traffic", "env": {"all": env}})
    run_dir = launch.cwd / "0.traffic" / "run"
    until(lambda: (run_dir / "manifest.json").exists())
    time.sleep(1.0)
    for attempt in range(2):
        command = [str(SCRIPTS / "lens-auto"), "groups", str(run_dir), "communication", "--for-iterations", "6"]
        asked = launch.run(*command)
        assert asked.code == 0, asked.stderr
        time.sleep(4.0 if mode == "broadcast" else 13.0)
        assert attempt == 0 or started.process.poll() is None
    (launch.cwd / "stop").touch()
    (result,) = results(started)
    writers = {writer.rank: writer for writer in read_run(run_dir)}
    found = sorted({row.iteration for row in _rows(writers[0], Kind.COLLECTIVE) if row.flags & Flag.SPAN})
    assert len(found) == 12
    assert [each - found[0] for each in found[:6]] == list(range(6))
    assert [each - found[6] for each in found[6:]] == list(range(6))
    check_traffic(result, found)
    return writers


def test_the_last_request_counts() -> None:
    some, more = frozenset({"job", "step"}), frozenset({"job", "communication"})
    groups, windows = window_switches(some, [(300, 309)])
    schedule = Schedule(windows)
    schedule.add([Switch(more, 10), Switch(some, 110)])
    schedule.add([Switch(more, 10), Switch(some, 110)])  # it is told again and again
    assert [schedule.due(each) for each in (9, 10, 11)] == [None, more, None]
    schedule.add([Switch(more, 60)])
    assert [schedule.due(each) for each in (60, 110, 200)] == [more, None, None]
    assert schedule.next_iteration == 300  # windows are no request
    assert [schedule.due(each) for each in (300, 310)] == [some | WINDOW_GROUPS, groups]
    assert schedule.next_iteration == NEVER


@pytest.mark.slow
def test_a_request_while_another_lasts(launch: Launcher) -> None:
    """The second is shorter than what is left of the first, and ends both."""
    env = {"NEMO_LENS_SPAN_GROUPS": "step,job", "PAUSE_S": "0.02"}
    started = start(launch, {"case": "traffic", "env": {"all": env}})
    run_dir = launch.cwd / "0.traffic" / "run"
    until(lambda: (run_dir / "manifest.json").exists())
    time.sleep(1.0)
    for count, pause_s in (("5000", 5.0), ("20", 5.0)):
        command = [str(SCRIPTS / "lens-auto"), "groups", str(run_dir), "communication", "--for-iterations", count]
        asked = launch.run(*command)
        assert asked.code == 0, asked.stderr
        time.sleep(pause_s)
    (launch.cwd / "stop").touch()
    (result,) = results(started)
    writers = {writer.rank: writer for writer in read_run(run_dir)}
    found = sorted({row.iteration for row in _rows(writers[0], Kind.COLLECTIVE) if row.flags & Flag.SPAN})
    assert 20 < len(found) < 5000
    assert found == list(range(found[0], found[-1] + 1))
    assert found[-1] + 10 < result["ranks"]["0"]["said"]["iterations"]
    check_traffic(result, found)


def until(condition: Callable[[], bool], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_switch_takes_effect_in_the_same_iteration_on_both_ranks(launch: Launcher) -> None:
    switch_while_it_runs(launch, "broadcast")


@pytest.mark.slow
def test_a_switch_by_way_of_the_store(launch: Launcher) -> None:
    switch_while_it_runs(launch, "derived")


@pytest.mark.slow
def test_a_switch_with_the_hang_watch_off(launch: Launcher) -> None:
    switch_while_it_runs(launch, "broadcast", {"NEMO_LENS_HANG_TIMEOUT_S": "0"})
