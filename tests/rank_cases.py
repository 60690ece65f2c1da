"""What ranks do to each other, case by case: run as a program by `test_no_harm.py`, bare and instrumented.

One process imports torch, then forks the ranks of each case in turn. A rank leaves through the interpreter's own end,
as a program does, or (where the plan says so: it saves the seconds of taking torch down) through its `atexit` alone.
The plan names the cases; a line of JSON is printed for each.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, which takes seconds
import torch.distributed as dist
from launch import free_port
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

STEP_S = 0.01
CARRIER_S = 10.0  # a rank waits so long for the carrier: what is to be disturbed must be there

Case = Callable[[int], None]
cases: dict[str, Case] = {}
told: dict[str, Any] = {}  # what the rank says of itself


def case(function: Case) -> Case:
    cases[function.__name__] = function
    return function


# --- parts of a training program --------------------------------------------------------------------------------------


def init(backend: str = "gloo", **options: Any) -> None:
    dist.init_process_group(backend, **{"timeout": timedelta(seconds=20), **options})


def train(steps: int, group: Any = None, sync: bool = True) -> None:
    """Some iterations; with a group, or by default in the whole world, gradients are averaged."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        if sync:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
    told["weights"] = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]


def shared() -> Any:
    """What this rank shares with the others; None in a bare run."""
    runtime = sys.modules.get("lens_auto.runtime")
    keeper = None if runtime is None else runtime._housekeeper
    return None if keeper is None else keeper.sharing


def carrier_state() -> str | None:
    sharing = shared()
    return None if sharing is None or sharing.carrier is None else sharing.carrier.state


def wait_for_carrier() -> None:
    """In an instrumented run, until the carrier runs on this rank; then the ranks meet."""
    deadline = time.monotonic() + CARRIER_S
    while carrier_state() in ("unstarted", "joining", "connecting") and time.monotonic() < deadline:
        time.sleep(0.02)
    told["carrier"] = carrier_state()
    dist.barrier()


def finish() -> None:
    dist.destroy_process_group()


def finish_ddp() -> None:
    """A group that a reducer takes down while its last operation is put away can hang (torch 2.13)."""
    dist.barrier()
    finish()


# --- different numbers of iterations ----------------------------------------------------------------------------------


@case
def join(rank: int) -> None:
    """Uneven data under `Join`."""
    init()
    wait_for_carrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model]):
        for _ in range(40 if rank else 10):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
    told["weights"] = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
    finish_ddp()


@case
def never_steps(rank: int) -> None:
    """Rank 1 takes part in the collectives and has no optimizer."""
    init()
    wait_for_carrier()
    if rank:
        for _ in range(30):
            dist.all_reduce(torch.zeros(1, 4))
            dist.all_reduce(torch.zeros(1))
    else:
        train(30)
    finish()


@case
def first_never_steps(rank: int) -> None:
    """Rank 0, which sends the carriers, has no optimizer."""
    init()
    wait_for_carrier()
    if rank == 0:
        for _ in range(30):
            dist.all_reduce(torch.zeros(1, 4))
            dist.all_reduce(torch.zeros(1))
    else:
        train(30)
    finish()


@case
def stops_early(rank: int) -> None:
    """Rank 1 is gone after 5 iterations, and nobody meets any more."""
    init()
    wait_for_carrier()
    train(5 if rank else 100, sync=False)


@case
def first_stops_early(rank: int) -> None:
    """Rank 0, which hosts the store, is gone after 5 iterations."""
    init()
    wait_for_carrier()
    train(100 if rank else 5, sync=False)
    if rank:
        time.sleep(1.0)


@case
def first_ends_while_they_meet(rank: int) -> None:
    """Rank 0 takes the store away as soon as it can, where questions to the store take their time."""
    if "lens_auto" in sys.modules:
        from lens_auto.iteration.store import Client

        ask = Client._there

        def slowly(client: Client) -> Any:
            store = ask(client)
            time.sleep(0.06)
            return store

        Client._there = slowly  # type: ignore[method-assign]
    init()
    train(2)
    if rank:
        time.sleep(1.0)
    finish()


# --- ranks that sleep, stop or die ------------------------------------------------------------------------------------


@case
def first_sleeps(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    if rank == 0:
        time.sleep(60)


@case
def second_sleeps(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    if rank == 1:
        time.sleep(60)


@case
def first_sleeps_and_second_goes_on(rank: int) -> None:
    """The ranks no longer meet; rank 1 has more broadcasts to issue than may be outstanding."""
    init()
    wait_for_carrier()
    train(10)
    if rank == 0:
        time.sleep(60)
    train(50, sync=False)


@case
def first_is_stopped(rank: int) -> None:
    """Rank 0 does not run at all any more, and with it the store does not answer."""
    init()
    wait_for_carrier()
    train(10)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    train(20, sync=False)
    time.sleep(2.5)  # the next look at the store falls into it


@case
def second_is_killed(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(10)


@case
def first_is_killed(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    train(10)


@case
def second_exits_at_once(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    if rank == 1:
        os._exit(3)
    train(10, sync=False)


@case
def second_raises(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    if rank == 1:
        raise RuntimeError("as told")
    train(10, sync=False)


# --- what is set up in other ways -------------------------------------------------------------------------------------


@case
def plain(rank: int) -> None:
    """Nothing special: what makes it so is the environment."""
    init()
    wait_for_carrier()
    train(30)
    finish()


@case
def plain_without_waiting(rank: int) -> None:
    """For ranks of which not all share a carrier."""
    init()
    train(30)
    told["carrier"] = carrier_state()
    finish()


@case
def twice(rank: int) -> None:
    init()
    wait_for_carrier()
    train(10)
    finish()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    init()
    train(30)
    if shared() is not None:
        told["carrier_after"] = carrier_state()
        told["received_after"] = shared().carrier.received + shared().carrier.sent
    finish()


@case
def twice_on_one_port(rank: int) -> None:
    """The second store is made where the first one was: it must be a new one, without the keys of the first."""
    for _ in range(2):
        init()
        keys = dist.distributed_c10d._get_default_store()
        if rank == 0:
            told.setdefault("stale", []).append(keys.check(["mine"]))
            keys.set("mine", "")
        train(10)
        del keys
        dist.barrier()
        finish()
        time.sleep(1.0)  # both have let go of the first
    train(30, sync=False)


@case
def twice_with_one_store(rank: int) -> None:
    """The same store for both, so that the keys of the first are still there."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=20))
    for round in range(2):
        init(store=dist.PrefixStore(str(round), store), rank=rank, world_size=2)
        train(10)
        finish()
    wait = dist.PrefixStore("end", store)
    wait.set(str(rank), "")
    wait.wait([str(1 - rank)])


@case
def sub_groups(rank: int) -> None:
    """The world is made and never used."""
    init()
    groups = [dist.new_group([each], use_local_synchronization=True) for each in range(2)]
    train(30, group=groups[rank])
    told["carrier"] = carrier_state()


@case
def alone(rank: int) -> None:
    init()
    train(30)
    told["carrier"] = carrier_state()
    finish()


@case
def init_times_out(rank: int) -> None:
    """The other rank never comes."""
    try:
        init(timeout=timedelta(seconds=2))
    except Exception as error:
        told["error"] = type(error).__name__
    train(5, sync=False)


@case
def init_fails(rank: int) -> None:
    """Before the one that succeeds, and on one rank after it: it is counted as the first on both."""

    def failing(**wrong: Any) -> None:
        try:
            init(**wrong)
        except Exception as error:
            told.setdefault("errors", []).append(type(error).__name__)

    failing(init_method="nonsense://")
    init()
    wait_for_carrier()
    if rank:
        failing()
    train(10)
    if shared() is not None:
        told["init"] = sys.modules["lens_auto.runtime"].recorder.init
    finish()


@case
def file_store(rank: int) -> None:
    init(store=dist.FileStore(os.environ["STORE_FILE"], 2), rank=rank, world_size=2)
    wait_for_carrier()
    train(30)
    told["seed"] = seed()
    finish()


@case
def hash_store(rank: int) -> None:
    init(store=dist.HashStore(), rank=0, world_size=1)
    train(30)
    finish()


@case
def prefix_store(rank: int) -> None:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=20))
    init(store=dist.PrefixStore("mine", dist.PrefixStore("more", store)), rank=rank, world_size=2)
    wait_for_carrier()
    train(30)
    told["seed"] = seed()
    finish()


@case
def stale_keys(rank: int) -> None:
    """What an earlier attempt left in the store: answers to other nonces, and the word to connect."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=20))
    if rank == 0:
        go = json.dumps({"nonce": "0" * 16, "seed": "5a" * 16, "run_id": "stale", "headers": {}})
        for wrapped in ("", "0//"):
            prefix = f"p/{wrapped}lens-auto/0/1"
            for key, value in (("go/1", go), ("ack/1", "0" * 16), ("nonce/1", "1" * 16)):
                store.set(f"{prefix}/{key}", value)
            for sub in (prefix, f"{prefix}/{'5a' * 16}"):
                for key in ("carrier/go", "carrier/ready/0", "carrier/ready/1"):
                    store.set(f"{sub}/{key}", "1")
                store.set(f"{sub}/switches", json.dumps([[["communication"], 1]]))
        store.set("planted", "")
    store.wait(["planted"])
    init(store=dist.PrefixStore("p", store), rank=rank, world_size=2)
    keys = dist.distributed_c10d._get_default_store()
    told["planted"] = keys.check(["lens-auto/0/1/carrier/go"])
    wait_for_carrier()
    train(30)
    told["seed"] = seed()
    finish()
    store.set(f"end {rank}", "")
    store.wait([f"end {1 - rank}"])


@case
def python_store(rank: int) -> None:
    """A store that a program wrote itself, which cannot be cloned."""

    class Own(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.kept[key] = value if isinstance(value, bytes) else bytes(value, "utf-8")

        def get(self, key: str) -> bytes:
            return self.kept[key]

        def add(self, key: str, amount: int) -> int:
            self.kept[key] = str(int(self.kept.get(key, b"0")) + amount).encode()
            return int(self.kept[key])

        def check(self, keys: list[str]) -> bool:
            return all(key in self.kept for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            assert self.check(keys), keys

    init("fake", store=Own(), rank=0, world_size=2)
    train(30)


@case
def fake_store(rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init("fake", store=FakeStore(), rank=0, world_size=64)
    train(30)


@case
def no_such_interface(rank: int) -> None:
    """Gloo cannot be had; the program does not need it, the carrier would."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=20))
    init("fake", store=store, rank=rank, world_size=2)
    train(60)
    told["carrier"] = carrier_state()
    store.set(f"end {rank}", "")
    store.wait([f"end {1 - rank}"])


@case
def few_descriptors(rank: int) -> None:
    """A limit of 256, of which the program itself uses all that is left in the end."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    init()
    wait_for_carrier()
    train(10)
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(os.open("/dev/null", os.O_RDONLY))
    train(20)
    for each in kept:
        os.close(each)
    finish()


@case
def hardly_any_descriptors(rank: int) -> None:
    """So few are left that there is no room for a group of our own; the program needs all but a handful of them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    kept = []
    while len(os.listdir("/proc/self/fd")) < 50:
        kept.append(os.open("/dev/null", os.O_RDONLY))
    init()
    train(30)
    told["carrier"] = carrier_state()
    finish()


# --- attacks ----------------------------------------------------------------------------------------------------------


@case
def forks(rank: int) -> None:
    """A rank forks in the middle of it: a child that ends at once, and one that trains on its own."""
    init()
    wait_for_carrier()
    train(10)
    for trains in (False, True):
        child = os.fork()
        if child == 0:
            if trains:
                train(5, sync=False)
            os._exit(0)
        told.setdefault("children", []).append(os.waitpid(child, 0)[1])
    train(10)
    finish()


@case
def store_in_use(rank: int) -> None:
    """The program waits in its own client of the store, from two threads, while the ranks agree."""
    init()
    store = dist.distributed_c10d._get_default_store()
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(store.get("late")))
    if rank:
        waiting.start()
    begun = time.monotonic()
    train(20)
    if rank == 0:
        store.set("late", "value")
    if rank:
        waiting.join(20)
        assert got == [b"value"]
    told["seconds"] = time.monotonic() - begun
    finish()


@case
def threads_that_train(rank: int) -> None:
    """Two threads step two optimizers; iterations of the ranks drift apart."""
    init()
    wait_for_carrier()
    threads = [threading.Thread(target=train, args=(20 + 20 * rank,), kwargs={"sync": False}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del told["weights"]  # they share a generator
    dist.barrier()
    finish()


@case
def barrier_at_the_end(rank: int) -> None:
    """Rank 1 comes late to the last meeting; what ends rank 0 must wait for it as without us."""
    init()
    wait_for_carrier()
    train(10)
    if rank:
        time.sleep(1.5)
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    finish()


@case
def ends_anywhere(rank: int) -> None:
    """Ranks end at any moment of the agreement and of the carrier's connecting, some without destroying the group."""
    draw = random.Random(int(os.environ["SEED"]) * 2 + rank)
    init()
    deadline = time.monotonic() + draw.uniform(0.0, 0.9)
    while time.monotonic() < deadline:
        train(1, sync=False)
    del told["weights"]
    if draw.random() < 0.3:
        finish()


@case
def aborts(rank: int) -> None:
    """A collective runs into the program's own timeout."""
    init(timeout=timedelta(seconds=3))
    wait_for_carrier()
    train(10)
    if rank:
        time.sleep(6)
        return
    try:
        train(1)
    except RuntimeError as error:
        told["error"] = type(error).__name__


def seed() -> str | None:
    """The run's seed in an instrumented rank, once the ranks agreed."""
    runtime = sys.modules.get("lens_auto.runtime")
    keeper = None if runtime is None else runtime._housekeeper
    if keeper is None:
        return None
    deadline = time.monotonic() + 5
    while keeper.info["seed"] is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return f"{keeper.info['seed_source']} {keeper.info['seed']}"


# --- what ranks tell each other (`test_propagation.py`) ---------------------------------------------------------------


@case
def carriers(rank: int) -> None:
    """What OpenTelemetry's API says is current, in each iteration; each is looked at for long enough to arrive."""
    from opentelemetry import baggage, trace
    from opentelemetry.sdk.trace import TracerProvider

    from lens_auto import runtime, state

    tracer = TracerProvider().get_tracer("program")
    init()
    wait_for_carrier()
    told["seed"] = seed()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told["iterations"] = []
    for _ in range(6):
        dist.barrier()
        time.sleep(0.05)
        with tracer.start_as_current_span("mine") as span, tracer.start_as_current_span("inside") as inside:
            seen = {
                "iteration": runtime.recorder.iteration,
                "carrier": state.get_pp_trace_carrier(),
                "baggage": dict(baggage.get_all()),
                "trace": f"{span.get_span_context().trace_id:032x}",
                "parent": span.parent and f"{span.parent.span_id:016x}",
                "inside is a child": inside.parent == span.get_span_context(),
            }
            told["iterations"].append(seen)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()  # the boundary is inside of the program's spans, which it does not change
            seen["still current"] = trace.get_current_span() is inside
    state.set_pp_trace_carrier({"traceparent": "the program's own"})
    dist.barrier()
    told["own carrier"] = state.get_pp_trace_carrier()
    time.sleep(0.3)
    told["own carrier later"] = state.get_pp_trace_carrier()
    finish()


@case
def traffic(rank: int) -> None:
    """Collectives and transfers in each iteration, until a file says stop; nonces say which is which.

    Iteration n: an operation counted by torch beside ours (DDP's), two all-reduces, messages 10 n and 10 n + 1 on two
    tags, and 10 n + 2 into whatever receives.
    """
    from lens_auto import runtime

    init()
    wait_for_carrier()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told["received"] = {}
    number = 0
    while True:
        model(torch.ones(1, 1)).sum().backward()
        stop = torch.tensor([float(os.path.exists("stop") or number >= int(os.environ.get("LIMIT", "100000")))])
        dist.all_reduce(stop)
        dist.all_reduce(torch.ones(number % 3 + 1))
        for index, tag in enumerate((0, 7, 9)):
            if rank == 0:
                dist.send(torch.tensor([10.0 * number + index]), 1, tag=tag)
            else:
                got = torch.zeros(1)
                dist.recv(got, None if index == 2 else 0, tag=tag)
                told["received"].setdefault(str(number), []).append(int(got.item()))
        assert runtime.recorder.iteration == number
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if stop.item():
            break
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    told["iterations"] = number
    finish_ddp()


@case
def drifting(rank: int) -> None:
    """Rank 1 steps three times as often as rank 0."""
    init()
    wait_for_carrier()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        for _ in range(3 if rank else 1):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        dist.barrier()
        time.sleep(0.02)
    finish()


# --- running them -----------------------------------------------------------------------------------------------------


def instrument() -> None:
    for each in entry_points(group="opentelemetry_instrumentor"):
        if each.value.startswith("instrumentors."):
            each.load()().instrument()


def run(plan: dict[str, Any], folder: str) -> dict[str, Any]:
    """Fork the ranks of a case, wait for their ends.

    Args:
        plan: `case`, `world`, `instrumented` (ranks), `env` (by rank), `limit_s`, `real_end`, and `kill_after`: once
            that rank has ended, the others are killed.
        folder: for what the ranks print and say.

    Returns:
        By rank: exit status, seconds in all and at the end (less those in which it waited for a CPU that others had;
        these), what it said and printed.
    """
    begun = time.monotonic()
    ranks: dict[int, int] = {}
    for rank in range(plan["world"]):
        pid = os.fork()
        if pid == 0:
            become(rank, plan, folder)
        ranks[pid] = rank
    ends: dict[int, tuple[int, float, float]] = {}  # as `reap` returns them
    while len(ends) < len(ranks):
        for pid, rank in ranks.items():
            if rank not in ends and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                ends[rank] = reap(pid)
        late = time.monotonic() - begun > plan["limit_s"]
        if late or plan["kill_after"] in ends:
            for pid, rank in ranks.items():
                if rank not in ends:
                    os.kill(pid, signal.SIGKILL)
                    code, *rest = reap(pid)
                    ends[rank] = (999 if late else code, *rest)
        time.sleep(0.005)
    found = {}
    for rank, (code, ended, queued) in sorted(ends.items()):
        said: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError), open(f"{folder}/{rank}.json") as file:
            said = json.load(file)
        with open(f"{folder}/{rank}.err") as file:
            stderr = file.read()
        seconds = ended - begun - queued
        leaving = ended - said["over"] - (queued - said["queued_s"]) if "over" in said else None
        found[rank] = {"code": code, "seconds": seconds, "leaving_s": leaving, "queued_s": queued}
        found[rank] |= {"said": said, "stderr": stderr}
    return found


def reap(pid: int) -> tuple[int, float, float]:
    """Wait for a rank: its exit status, when it ended, and how long it was ready to run and other processes ran."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended, queued = time.monotonic(), queued_s(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ended, queued


def queued_s(pid: int | str) -> float:
    """How long the first thread of a process waited for a CPU so far; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def become(rank: int, plan: dict[str, Any], folder: str) -> None:
    """In the forked child: be a rank, and end like a program."""
    os.setsid()
    stderr = os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan["world"]))
    os.environ.update(LOCAL_WORLD_SIZE=str(plan["world"]), NEMO_LENS_RUN_DIR=f"{folder}/run", NEMO_LENS_QUIET="1")
    os.environ.update({**plan["env"].get("all", {}), **plan["env"].get(str(rank), {})})
    if rank in plan["instrumented"]:
        instrument()
    with says(f"{folder}/{rank}.json"):
        cases[plan["case"]](rank)
    if plan["real_end"]:
        sys.exit(0)
    gc.freeze()  # no reducer is freed from here on: see `finish_ddp`
    atexit._run_exitfuncs()
    os._exit(0)


@contextlib.contextmanager
def says(path: str) -> Iterator[None]:
    try:
        yield
    finally:
        told["over"], told["queued_s"] = time.monotonic(), queued_s("self")
        with open(path, "w") as file:
            json.dump(told, file)


def main() -> None:
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        plans = json.load(file)
    for number, plan in enumerate(plans):
        folder = os.path.abspath(f"{number}.{plan['case']}")
        os.mkdir(folder)
        os.environ.update(MASTER_PORT=str(free_port()), SECOND_PORT=str(free_port()), STORE_FILE=f"{folder}/store")
        found = run(plan, folder)
        left = os.path.exists(f"{folder}/store")
        sys.stdout.write(json.dumps({"folder": folder, "ranks": found, "store_left": left}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
