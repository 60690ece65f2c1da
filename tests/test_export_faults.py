"""Endpoints that misbehave in every way, and exporters that are killed: nothing is lost and nothing is sent twice.

Each test counts: received + kept + dropped = recorded, where kept is what is still to be made from the records that are
left, and recorded is what `lens-auto export` makes of them before anything is sent. Both protocols run side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from export_node import Ended, Exporter, Node, check_sum, rank, wait_until
from receiver import PROTOCOLS, Receiver

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

    def kill(self) -> None:
        assert self.exporter is not None
        self.exporter.kill()

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


Cases = Callable[..., list[Case]]


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[Cases]:
    """Makes a case for each protocol."""
    with contextlib.ExitStack() as stack:

        def make(iterations: int = 100, *, name: str = "", **receiver: bool) -> list[Case]:
            made = []
            for protocol in PROTOCOLS:
                node = Node(tmp_path / name / protocol, rank(0, iterations), rank(1, iterations))
                stack.callback(node.close)
                made.append(Case(node, stack.enter_context(Receiver(protocol, **receiver)), node.recorded()))
            return made

        yield make


# --- the endpoint comes back ------------------------------------------------------------------------------------------


def test_down_at_start(cases: Cases) -> None:
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
def test_gone_in_the_middle(cases: Cases, fault: str) -> None:
    made = cases()
    for case in made:
        case.receiver.slow(0.001)
        case.start()
    for case in made:
        case.receiver.wait_for(1)
        getattr(case.receiver, fault)()
    for case in made:
        case.wait_for_failure()
        case.check()
        assert 0 < case.node.kept() < len(case.recorded)
        case.receiver.up()
    for case in made:
        case.wait()
        case.check_all_received()


def test_retry_after(cases: Cases) -> None:
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


def test_everything_is_invalid(cases: Cases) -> None:
    """An endpoint that has never taken anything is a wrong endpoint: nothing is dropped."""
    made = cases()
    for case in made:
        case.receiver.status(400, times=11)
        case.start()
    for case in made:
        case.wait()
        case.check_all_received()


def test_one_span_is_invalid(cases: Cases) -> None:
    """The batch is halved down to the one that the endpoint will not take: that is dropped, and counted."""
    made = cases(200)
    for case in made:
        case.receiver.slow(0.001)
        case.start()
    for case in made:
        case.receiver.wait_for(BATCH_SPANS)
        case.receiver.status(400, times=BATCH_SPANS.bit_length())  # the second batch, its first half, and so on
    for case in made:
        case.wait()
        case.check()
        assert sum(each.refused for each in case.node.progress()) == 1
        assert len(case.receiver.spans()) == len(case.recorded) - 1
        assert "is refused for good" in case.node.log()


# --- the endpoint stays away: the exporter ends in bounded time, the rest is recovered --------------------------------


def test_no_answer_to_the_end(cases: Cases) -> None:
    """It hangs, speaks another protocol, has a certificate that nobody trusts, or wants TLS and is not offered it."""
    bound = {LINGER: "1", TIMEOUT: "1"}
    made = []
    for fault in ("hang", "wrong_protocol"):
        for case in cases(name=fault):
            getattr(case.receiver, fault)()
            case.start(**bound)
            made.append(case)
    for case in cases(name="certificate", tls=True):
        right = case.receiver.environment()
        case.start({name: value for name, value in right.items() if not name.endswith("_CERTIFICATE")}, **bound)
        made.append(case)
    for case in cases(name="scheme", tls=True):
        endpoint = case.receiver.endpoint.replace("https", "http")
        case.start({**case.receiver.environment(), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}, **bound)
        made.append(case)
    for case in made:
        assert case.wait().took_s < 1 + 1 + START_S, case.node.run_dir
        assert case.receiver.spans() == []
        assert case.node.kept() == len(case.recorded)
        case.check()
        case.receiver.ok()
    with ThreadPoolExecutor(2) as pool:  # a pair is enough: what is kept is the same for all
        list(pool.map(Case.recover, made[:2]))


def test_one_span_a_second(cases: Cases) -> None:
    """A batch takes longer than the time for an answer: it is made smaller until something gets through."""
    made = cases(4)
    for case in made:
        case.receiver.slow(1.0)
        case.start(**{LINGER: "5", TIMEOUT: "1.3"})
    for case in made:
        assert case.wait().took_s < 5 + 1.3 + START_S
        assert 0 < len(case.receiver.spans()) < len(case.recorded)
        case.check()


# --- the exporter is killed -------------------------------------------------------------------------------------------


def test_killed_in_the_middle_of_a_batch(cases: Cases) -> None:
    """Another exporter goes on where the first stood; the batch on its way had not been taken."""
    made = cases()
    for case in made:
        case.receiver.slow(0.002)
        case.start()
    for case in made:
        case.receiver.wait_for(1)
    time.sleep(0.3)  # what was taken is written down, the next batch takes a second
    for case in made:
        case.kill()
        case.check()
        assert 0 < case.node.kept() < len(case.recorded)
        case.receiver.ok()
        case.start()
    for case in made:
        case.wait()
        case.check_all_received()


def test_killed_again_and_again_while_nobody_answers(cases: Cases) -> None:
    made = cases()
    for _ in range(2):
        for case in made:
            case.receiver.slow(0.0005)
            case.start()
        for case in made:
            case.receiver.wait_for(len(case.receiver.spans()) + 1)
            case.receiver.hang()
        time.sleep(0.3)
        for case in made:
            case.kill()
            case.check()
            assert 0 < case.node.kept() < len(case.recorded)
    for case in made:
        case.receiver.ok()
        case.start()
    for case in made:
        case.wait()
        case.check_all_received()
