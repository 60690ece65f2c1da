"""Endpoints that misbehave in every way, and exporters that are killed: nothing is lost and nothing is sent twice.

Each test counts: received + kept + dropped = recorded, where kept is what is still to be made from the records that are
left, and recorded is what `lens-auto export` makes of them before anything is sent. Both protocols run side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from export_node import Ended, Exporter, Node, alive, check_sum, rank, wait_until
from receiver import PROTOCOLS, Receiver

from lens_auto.export import launch
from lens_auto.export.lane import BATCH_SPANS
from lens_auto.export.spans import Span

LINGER = "NEMO_LENS_EXPORTER_LINGER_S"
TIMEOUT = "OTEL_EXPORTER_OTLP_TIMEOUT"
START_S = 5.0  # what Python's start and end take at most on a machine that is busy


@dataclass
class Case:
    """A node of two ranks that trained, a receiver, and the spans that were recorded."""

    node: Node
    receiver: Receiver
    recorded: list[Span]
    exporter: Exporter | None = None

    def start(self, environment: Mapping[str, str] | None = None, **more: str) -> None:
        self.exporter = self.node.start({**(environment or self.receiver.environment()), **more})

    def wait(self) -> Ended:
        assert self.exporter is not None
        ended = self.exporter.wait()
        assert ended.code == 0, self.node.log()
        return ended

    def hold(self) -> None:
        """The batch on its way takes long from here on, and what was accepted before it is written down."""
        self.receiver.slow(0.02)
        self.wait_until_written()

    def wait_until_written(self) -> None:
        wait_until(lambda: sum(each.sent for each in self.node.progress()) == len(self.receiver.spans()))

    def kill(self) -> None:
        assert self.exporter is not None
        self.exporter.kill()
        self.receiver.wait_until_alone()

    def wait_for_failure(self) -> None:
        wait_until(lambda: "were not accepted" in self.node.log())

    def check(self) -> None:
        check_sum(self.node, self.receiver, self.recorded)

    def check_all_received(self) -> None:
        self.check()
        assert len(self.receiver.spans()) == len(self.recorded)
        assert self.node.kept() == 0
        assert self.node.segments() == []
        assert not self.node.run_folder.exists()  # nothing is left in the spool

    def recover(self, environment: Mapping[str, str] | None = None) -> None:
        before = len(self.receiver.spans())
        done = self.node.recover(environment or self.receiver.environment())
        assert done.returncode == 0, done.stderr
        assert f"{len(self.recorded) - before:,} spans sent" in done.stderr
        self.check_all_received()


def at_once(what: Callable[[Case], None], made: list[Case]) -> None:
    """Do something with several cases side by side."""
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(what, made))


class Maker:
    """Makes cases in a folder, one for each protocol."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def __call__(self, iterations: int = 100, *, name: str = "", **receiver: bool) -> list[Case]:
        made = []
        for protocol in PROTOCOLS:
            node = Node(self._folder / name / protocol, rank(0, iterations), rank(1, iterations))
            self._stack.callback(node.close)
            made.append(Case(node, self._stack.enter_context(Receiver(protocol, **receiver)), node.recorded()))
        return made


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[Maker]:
    with contextlib.ExitStack() as stack:
        yield Maker(tmp_path, stack)


# --- the endpoint comes back ------------------------------------------------------------------------------------------


def test_down_at_start(cases: Maker) -> None:
    made = cases(down=True)
    for case in made:
        case.start()
    for case in made:
        case.wait_for_failure()
        case.check()
        assert case.node.kept() == len(case.recorded)
        case.receiver.up()
    for case in made:
        case.wait()
        case.check_all_received()


@pytest.mark.parametrize("fault", ["down", "reset"])
def test_gone_in_the_middle(cases: Maker, fault: str) -> None:
    made = cases()
    for case in made:
        case.receiver.slow(0.001)
        case.start()

    def leave(case: Case) -> None:
        case.receiver.wait_for(1)
        getattr(case.receiver, fault)()

    at_once(leave, made)
    for case in made:
        case.wait_for_failure()
        case.check()
        assert 0 < case.node.kept() < len(case.recorded)
        case.receiver.up()
    for case in made:
        case.wait()
        case.check_all_received()


def test_retry_after(cases: Maker) -> None:
    """The endpoint asks to be left alone for a second, twice; that is longer than the lane's own pause."""
    made = {status: cases(name=str(status)) for status in (429, 503)}
    for status, each in made.items():
        for case in each:
            case.receiver.status(status, retry_after_s=1, times=2)
            case.start()
    for case in (case for each in made.values() for case in each):
        case.wait()
        case.check_all_received()
        requests = case.receiver.requests()
        assert [request.outcome for request in requests[:3]] == ["refused", "refused", "accepted"]
        times_s = [request.time_ns / 1e9 for request in requests[:3]]
        waits_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
        assert all(1 <= wait_s < 2 for wait_s in waits_s), waits_s


def test_everything_is_invalid(cases: Maker) -> None:
    """An endpoint that has never taken anything is a wrong endpoint: nothing is dropped."""
    made = cases()
    for case in made:
        case.receiver.status(400, times=11)
        case.start()
    for case in made:
        case.wait()
        case.check_all_received()


def test_one_span_is_invalid(cases: Maker) -> None:
    """The batch is halved down to the one that the endpoint will not take: that is dropped, and counted."""
    made = cases(200)
    for case in made:
        case.receiver.slow(0.001)
        case.start()

    def refuse_the_second_batch(case: Case) -> None:
        case.receiver.wait_for(BATCH_SPANS)
        case.receiver.status(400, times=BATCH_SPANS.bit_length())  # all of it, its first half, and so on

    at_once(refuse_the_second_batch, made)
    for case in made:
        case.wait()
        case.check()
        assert sum(each.refused for each in case.node.progress()) == 1
        assert len(case.receiver.spans()) == len(case.recorded) - 1
        assert "is refused for good" in case.node.log()


# --- the endpoint stays away: the exporter ends in bounded time, the rest is recovered --------------------------------


LINGERS_S, ANSWERS_S = 5.0, 1.3


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Case]]]:
    """Exporters of endpoints that stay away, all running at the same time."""
    bound = {LINGER: "1", TIMEOUT: "1"}
    with contextlib.ExitStack() as stack:
        make = Maker(tmp_path_factory.mktemp("away"), stack)
        made = {
            "hang": make(name="hang"),
            "wrong_protocol": make(name="wrong_protocol"),
            "certificate": make(name="certificate", tls=True),
            "scheme": make(name="scheme", tls=True),
            "slow": make(4, name="slow"),
        }
        for case in made["slow"]:
            case.receiver.slow(1.0)
            case.start(**{LINGER: str(LINGERS_S), TIMEOUT: str(ANSWERS_S)})
        for case in made["hang"]:
            case.receiver.hang()
            case.start(**bound)
        for case in made["wrong_protocol"]:
            case.receiver.wrong_protocol()
            case.start(**bound)
        for case in made["certificate"]:  # one that nobody trusts
            right = case.receiver.environment()
            case.start({name: value for name, value in right.items() if not name.endswith("_CERTIFICATE")}, **bound)
        for case in made["scheme"]:
            endpoint = case.receiver.endpoint.replace("https", "http")
            case.start({**case.receiver.environment(), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, **bound)
        yield made


@pytest.mark.parametrize("fault", ["hang", "wrong_protocol", "certificate", "scheme"])
def test_no_answer_to_the_end(away: dict[str, list[Case]], fault: str) -> None:
    for case in away[fault]:
        assert case.wait().took_s < 1 + 1 + START_S
        assert case.receiver.spans() == []
        assert case.node.kept() == len(case.recorded)
        case.check()
        case.receiver.ok()
    if fault == "hang":  # once is enough: what is kept is the same for all
        at_once(Case.recover, away[fault])


def test_one_span_a_second(away: dict[str, list[Case]]) -> None:
    """A batch takes longer than the time for an answer: it is made smaller until something gets through."""
    for case in away["slow"]:
        assert case.wait().took_s < LINGERS_S + ANSWERS_S + START_S
        assert 0 < len(case.receiver.spans()) < len(case.recorded)
        case.check()


# --- the exporter is killed -------------------------------------------------------------------------------------------


def test_killed_in_the_middle_of_a_batch(cases: Maker) -> None:
    """Another exporter goes on where the first stood; the batch on its way had not been taken."""
    made = cases(200)
    for case in made:
        case.receiver.slow(0.001)
        case.start()

    def kill(case: Case) -> None:
        case.receiver.wait_for(1)
        case.hold()
        case.kill()

    at_once(kill, made)
    for case in made:
        case.check()
        assert 0 < case.node.kept() < len(case.recorded)
        case.receiver.ok()
        case.start()
    for case in made:
        case.wait()
        case.check_all_received()


def test_killed_again_and_again_while_nobody_answers(cases: Maker) -> None:
    made = cases(200)

    def leave(case: Case) -> None:
        case.receiver.wait_for(len(case.receiver.spans()) + 1)
        case.receiver.hang()

    for _ in range(2):
        for case in made:
            case.receiver.slow(0.001)
            case.start()
        at_once(leave, made)
        for case in made:
            case.wait_until_written()
            case.kill()
            case.check()
            assert 0 < case.node.kept() < len(case.recorded)
    for case in made:
        case.receiver.ok()
        case.start()
    for case in made:
        case.wait()
        case.check_all_received()


def test_two_exporters_at_once(cases: Maker) -> None:
    """Whoever has the lock sends, the other one ends at once."""
    made = cases()
    for case in made:
        case.receiver.slow(0.001)
        case.start()
        wait_until(lambda case=case: launch.is_running(str(case.node.run_folder)))  # type: ignore[misc]
        second = case.node.start(case.receiver.environment()).wait()
        assert second.code == 0
        assert launch.is_running(str(case.node.run_folder))
    for case in made:
        case.wait()
        case.check_all_received()


def test_terminated_with_its_ranks(cases: Maker) -> None:
    """A scheduler sends SIGTERM to all processes of a job, and SIGKILL some time later."""
    made = cases(0)
    for case in made:
        process = subprocess.Popen(["sleep", "60"])
        writer = alive(rank(2, 100), process)
        case.node.add(writer)
        case.recorded = case.node.recorded()
        case.start()
        wait_until(lambda case=case: launch.is_running(str(case.node.run_folder)))  # type: ignore[misc]
        assert case.exporter is not None
        case.exporter.process.terminate()
        process.terminate()
        process.wait(5)
    for case in made:
        case.wait()
        case.check_all_received()


def test_a_rank_starts_another(cases: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the housekeeper of a rank does at every tick, while somebody kills its exporter."""
    monkeypatch.setattr(launch, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(launch, "START_PATIENCE_S", 2.0)
    case, _ = cases(200)
    case.receiver.slow(0.001)
    for name, value in {**case.receiver.environment(), "NEMO_LENS_EXPORT_STRATEGY": "all_ranks"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEMO_LENS_SPOOL_DIR", str(case.node.run_folder.parents[1]))
    keeper = launch.ExporterKeeper(str(case.node.run_folder), False, 0)
    killed = 0
    while launch.registered(str(case.node.run_folder)):
        keeper.look()
        (process,) = launch._started[-1:]
        if killed < 2 and len(case.receiver.spans()) > killed * BATCH_SPANS:
            case.hold()
            process.kill()
            process.wait(5)
            case.receiver.wait_until_alone()
            case.receiver.slow(0.001)
            killed += 1
        time.sleep(0.05)
    assert killed == 2
    process.wait(10)
    case.check_all_received()
