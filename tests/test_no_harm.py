"""Ranks that disagree, die, sleep or are set up in odd ways end as they would without us; see `rank_cases.py`.

Each case runs bare and instrumented. The exit status of every rank, what it computed, what it prints and (within a
generous bound) how long it takes must be the same.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch import INSTRUMENT, PYTHON, TORCHRUN, Launcher, free_port
from records import Writer, read_run

BOTH = (0, 1)
SLOWER_S = 6.0  # an instrumented case may take so much longer: the machine may be busy
LEAVING_S = 2.0  # and so long at the end of a rank
PROGRAM = Path(__file__).with_name("rank_cases.py")

# C++ stack traces and warnings of torch differ in addresses and stamps; tracebacks (which torch marks with the rank) go
# through our hooks.
_TORCHS_OWN = re.compile(
    r"\[rank\d+\]:|\[?[WIE]\d{4} |\[Gloo\] |\[/\S*third_party/gloo/|Exception raised from |frame #\d+: "
    r"|<omitting python frames>|Traceback|  |$"
)


@dataclass
class Plan:
    """One case: who is instrumented, with what environment."""

    case: str
    world: int = 2
    instrumented: tuple[int, ...] = BOTH
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    kill_after: int = -1
    carrier: str | None = "running"  # what all instrumented ranks say of it in the middle; "" anything
    slow: bool = False
    real_end: bool = False  # through the whole end of the interpreter; those that are slow do so anyway
    more_writers: int = 0  # processes that record beside the ranks (negative: ranks that leave nothing)
    name: str = ""

    @property
    def id(self) -> str:
        return self.name or self.case

    def as_json(self, instrumented: bool) -> dict[str, Any]:
        ranks = self.instrumented if instrumented else ()
        return {**vars(self), "instrumented": ranks, "limit_s": 45, "real_end": self.real_end or self.slow}


def everywhere(**env: str) -> dict[str, dict[str, str]]:
    return {"all": env}


DERIVED = everywhere(NEMO_LENS_PROPAGATION="derived")

PLANS = [
    Plan("join", slow=True),  # bare, it hangs now and then
    Plan("never_steps"),
    Plan("first_never_steps", slow=True),
    Plan("stops_early", slow=True),
    Plan("stops_early", env=DERIVED, carrier=None, slow=True, name="stops_early derived"),
    Plan("first_stops_early", slow=True),
    Plan("first_stops_early", env=DERIVED, carrier=None, name="first_stops_early derived"),
    Plan("first_ends_while_they_meet", carrier="", real_end=True),
    Plan("first_sleeps", kill_after=1, real_end=True),
    Plan("second_sleeps", kill_after=0, slow=True),
    Plan("first_sleeps_and_second_goes_on", kill_after=1, slow=True),
    Plan("first_is_stopped", kill_after=1, slow=True),
    Plan("first_is_stopped", env=DERIVED, carrier=None, kill_after=1, name="first_is_stopped derived"),
    Plan("second_is_killed", real_end=True),
    Plan("first_is_killed", slow=True),
    Plan("first_is_killed", env=DERIVED, carrier=None, slow=True, name="first_is_killed derived"),
    Plan("second_exits_at_once", slow=True),
    Plan("second_raises", slow=True),
    Plan("plain_without_waiting", instrumented=(0,), carrier="", name="only rank 0"),
    Plan("plain_without_waiting", instrumented=(1,), carrier="", name="only rank 1"),
    Plan("twice", slow=True),
    Plan("twice_on_one_port", carrier=""),
    Plan("twice_with_one_store", carrier="", slow=True),
    Plan("sub_groups", carrier="", slow=True),
    Plan("alone", world=1, instrumented=(0,), carrier=None, slow=True),
    Plan("init_times_out", world=1, env=everywhere(WORLD_SIZE="2"), instrumented=(0,), carrier="", slow=True),
    Plan("init_fails", slow=True),
    Plan("file_store", carrier=None, slow=True),
    Plan("hash_store", world=1, instrumented=(0,), carrier="", slow=True),
    Plan("prefix_store", slow=True),
    Plan("stale_keys", slow=True),
    Plan("stale_keys", env=DERIVED, carrier=None, slow=True, name="stale_keys derived"),
    Plan("python_store", world=1, instrumented=(0,), carrier="", slow=True),
    Plan("fake_store", world=1, instrumented=(0,), carrier="", slow=True),
    Plan("no_such_interface", env=everywhere(GLOO_SOCKET_IFNAME="nosuch0"), carrier="ended"),
    Plan("plain", env=everywhere(GLOO_SOCKET_IFNAME="nosuch0"), carrier="", slow=True, name="no interface at all"),
    Plan("few_descriptors"),
    Plan("hardly_any_descriptors", carrier="ended", slow=True),
    *(
        Plan(
            "plain_without_waiting",
            env={"0": {"NEMO_LENS_PROPAGATION": first}, "1": {"NEMO_LENS_PROPAGATION": second}},
            carrier="",
            slow=(first, second) != ("broadcast", "derived"),
            name=f"{first} and {second}",
        )
        for first in ("broadcast", "derived", "off")
        for second in ("broadcast", "derived", "off")
        if first != second
    ),
    Plan("plain", env=everywhere(TORCH_DISTRIBUTED_DEBUG="DETAIL"), slow=True, name="torch's own checks on"),
    Plan("plain", env=everywhere(USE_LIBUV="0"), slow=True, name="the other kind of store server"),
    *(
        Plan("ends_anywhere", env=everywhere(SEED=str(number)), carrier="", slow=True, name=f"ends_anywhere {number}")
        for number in range(12)
    ),
    Plan("forks", slow=True),
    Plan("store_in_use", carrier="", slow=True),
    Plan("threads_that_train", slow=True),
    Plan("barrier_at_the_end", slow=True),
    Plan("aborts", slow=True),
    Plan(
        "plain",
        env={
            "0": {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_WINDOW": "3-5,9", "NEMO_LENS_HANG_TIMEOUT_S": "0"},
            "1": {
                "NEMO_LENS_SPAN_GROUPS": "job",
                "NEMO_LENS_ITERATION_OPTIMIZER": "Adam",
                "NEMO_LENS_MAX_RUN_BYTES": "1",
            },
        },
        slow=True,
        name="other settings",
    ),
    Plan(
        "plain_without_waiting",
        env={"1": {"NEMO_LENS_DISABLED": "1"}},
        more_writers=-1,
        carrier="",
        slow=True,
        name="disabled on rank 1",
    ),
]
BY_ID = {plan.id: plan for plan in PLANS}
assert len(BY_ID) == len(PLANS)


class Results:
    """Runs of the cases of one kind, bare and instrumented, from one process that imports torch once."""

    def __init__(self, launch: Launcher, plans: list[Plan]) -> None:
        file = launch.cwd / "plan.json"
        file.write_text(json.dumps([plan.as_json(on) for plan in plans for on in (False, True)]))
        run = launch.run(*PYTHON, str(PROGRAM), str(file), timeout_s=45 * len(plans))
        assert run.code == 0, run.stderr
        assert run.survivors == []
        found = [json.loads(line) for line in run.stdout.splitlines()]
        assert len(found) == 2 * len(plans)
        self.of = {plan.id: (found[2 * i], found[2 * i + 1]) for i, plan in enumerate(plans)}
        for plan in plans:
            for kind, result in zip(("bare", "lens"), self.of[plan.id], strict=True):
                for rank, end in result["ranks"].items():
                    leaving = end["leaving_s"]
                    print(
                        f"{plan.id:36} {kind:4} rank {rank}: code {end['code']:4} {end['seconds']:6.2f} s,"
                        f" leaving {'-' if leaving is None else f'{leaving:.2f} s'}, and {end['queued_s']:.2f} s"
                        f" without a CPU {end['said'].get('carrier', '')}"
                    )


@pytest.fixture(scope="module")
def fast(launch_once: Launcher) -> Results:
    return Results(launch_once, [plan for plan in PLANS if not plan.slow])


@pytest.fixture(scope="module")
def slow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Of the slow cases only those that were asked for: all of them take a quarter of an hour."""
    asked = {
        item.callspec.id
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    launcher = Launcher(tmp_path_factory.mktemp("slow"))
    yield Results(launcher, [plan for plan in PLANS if plan.slow and plan.id in asked])
    launcher.close()


def ids(slow: bool) -> list[str]:
    return [plan.id for plan in PLANS if plan.slow is slow]


@pytest.mark.parametrize("name", ids(False))
def test_ends_as_without_us(fast: Results, name: str) -> None:
    check(BY_ID[name], *fast.of[name])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ids(True))
def test_ends_as_without_us_too(slow: Results, name: str) -> None:
    check(BY_ID[name], *slow.of[name])


def check(plan: Plan, bare: dict[str, Any], lens: dict[str, Any]) -> None:
    codes = {who: {end["code"] for end in run["ranks"].values()} for who, run in (("bare", bare), ("lens", lens))}
    if 999 in codes["bare"] and codes["lens"] == {0}:
        pytest.skip("torch hung without us: the end of DistributedDataParallel on gloo (docs/compatibility.md)")
    assert lens["store_left"] == bare["store_left"]
    for rank in bare["ranks"]:
        before, after = bare["ranks"][rank], lens["ranks"][rank]
        shown = f"rank {rank}\n{json.dumps(before, indent=1)}\n{json.dumps(after, indent=1)}\n{after['stderr']}"
        assert before["code"] != 999, f"the bare run hangs: {shown}"
        assert after["code"] == before["code"], shown
        assert after["seconds"] < before["seconds"] + SLOWER_S, shown
        if before["leaving_s"] is not None and after["code"] != -9:
            assert after["leaving_s"] < 1.5 * before["leaving_s"] + LEAVING_S, shown
        for key in ("weights", "error", "errors", "children", "stale"):
            assert after["said"].get(key) == before["said"].get(key), shown
        assert said_beside_torch(after["stderr"]) == said_beside_torch(before["stderr"]), shown
        if 0 in plan.instrumented:  # else rank 0 may take the store away in the middle of a question (docs/limits.md)
            assert ("TCPStore" in after["stderr"]) <= ("TCPStore" in before["stderr"]), shown
        if int(rank) in plan.instrumented and plan.carrier != "" and "carrier" in after["said"]:
            assert after["said"]["carrier"] == plan.carrier, shown

        assert after["said"].get("init", 1) == 1, shown
    if plan.case == "stale_keys":
        said = [end["said"] for end in lens["ranks"].values()]
        assert [each["planted"] for each in said] == [True, True]
        assert said[0]["seed"] == said[1]["seed"]
        assert said[0]["seed"].startswith("agreed ") and "5a5a" not in said[0]["seed"]
        for writer in read_run(Path(lens["folder"]) / "run"):
            assert "communication" not in writer.info["groups"]
    recorded = 0
    for path in Path(lens["folder"]).glob("run*/ranks/*/writer.json"):
        writer = json.loads(path.read_text())
        assert (writer["hooks_off"], writer["hook_faults"]) == ({}, 0), (plan, writer)
        recorded += 1
    assert recorded == len(plan.instrumented) + plan.more_writers, plan


def said_beside_torch(stderr: str) -> list[str]:
    """Lines that are no log lines and no stack traces."""
    return [line for line in stderr.splitlines() if not _TORCHS_OWN.match(line)]


# --- programs under opentelemetry-instrument --------------------------------------------------------------------------

SLEEPS = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    model(torch.ones(1, 1)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    time.sleep(0.02)
if dist.get_rank() == 0:
    time.sleep(60)
print(time.time(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("instrumented", [(0, 1), (0,), (1,)])
def test_a_rank_ends_while_rank_0_sleeps_for_a_minute(launch: Launcher, instrumented: tuple[int, ...]) -> None:
    leaving = []
    program = launch.program(SLEEPS)
    for chosen in ((), instrumented):
        world = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
        started = [
            launch.start((*(INSTRUMENT if rank in chosen else ()), *PYTHON, program), {**world, "RANK": str(rank)})
            for rank in BOTH
        ]
        second = started[1].process
        second.wait(50)
        ended = time.time()
        assert started[0].process.poll() is None
        run = started[1].wait()
        assert run.code == 0, run.stderr
        leaving.append(ended - float(run.stdout))
        assert "TCPStore" not in run.stderr
        first = started[0].wait(90)
        assert first.code == 0, first.stderr
        assert "TCPStore" not in first.stderr
    print(f"rank 1 left within {leaving[0]:.2f} s bare, {leaving[1]:.2f} s instrumented")
    assert leaving[1] < 1.5 * leaving[0] + LEAVING_S


# --- torchrun ---------------------------------------------------------------------------------------------------------

FAILS_AT_FIRST = """
import os, sys, time
import torch
import torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt:
    # torch 2.13 leaves the gloo addresses of the first attempt in the store, and the second one connects to those.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        for key in store.list_keys():
            if "//cpu//" in key:
                store.delete_key(key)
        store.set("addresses are gone", "")
    store.wait(["addresses are gone"])
dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    model(torch.ones(1, 1)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    time.sleep(0.02)
    if attempt == 0 and step == int(sys.argv[1]) and dist.get_rank() == 1:
        raise SystemExit(9)
sys.stdout.write(f"rank {dist.get_rank()} attempt {attempt} of {dist.get_world_size()} done\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("failing_step", [1, 30])
def test_a_second_attempt_of_torchrun(launch: Launcher, failing_step: int) -> None:
    """The agent's store outlives the first attempt, and with it all keys of that."""
    program = launch.program(FAILS_AT_FIRST)
    runs = []
    for instrument in ((), INSTRUMENT):
        port = str(free_port())
        torchrun = (*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", f"--master-port={port}", program)
        env = {"NEMO_LENS_RUN_ID": port}
        run = launch.run(*instrument, *torchrun, str(failing_step), env=env, timeout_s=120)
        assert run.code == 0, run.stderr
        runs.append(run)
    bare, lens = runs
    assert sorted(bare.stdout.splitlines()) == sorted(lens.stdout.splitlines())
    assert sorted(lens.stdout.splitlines()) == [f"rank {rank} attempt 1 of 2 done" for rank in BOTH]
    assert lens.survivors == []
    attempts: dict[int, list[Writer]] = {}
    for writer in read_run(launch.cwd / "lens-runs" / port):
        attempts.setdefault(writer.info["resource"]["torchelastic.restart_count"], []).append(writer)
    assert sorted(attempts) == [0, 1]
    assert sorted(writer.rank for writer in attempts[1]) == [0, 1]
    (second,) = {writer.info["seed"] for writer in attempts[1]}
    assert {writer.info["seed_source"] for writer in attempts[1]} == {"agreed"}
    assert second not in {writer.info["seed"] for writer in attempts[0]}
    assert [len(writer.iterations) for writer in attempts[1]] == [40, 40]
