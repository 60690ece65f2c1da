"""Every hook of ours, run for real on two ranks while one function of ours fails: a program for `test_faults.py`.

    fault_cases.py FOLDER bare|each|wide
    fault_cases.py FOLDER life FILE MODE...

`bare`: not instrumented. `each`: all functions that the hooks call fail, one after another; `wide`: in all hooks that
call them, and in every mode. Both ranks write what they computed, and what went wrong, to FOLDER/<rank>.json. `life`:
functions that run when a process becomes a rank, while it is one and when it ends; a pair of ranks for each, and a line
of JSON for each pair. FILE says which functions are `known` otherwise, or those which are to fail `only`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import entry_points
from types import FrameType, FunctionType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from launch import free_port
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

WORLD = 2
LIFE_S = 40.0
PACKAGES = (f"{os.sep}lens_auto{os.sep}", f"{os.sep}instrumentors{os.sep}")
Part = Callable[["Job"], list[Any]]
parts: dict[str, Part] = {}


def part(function: Part) -> Part:
    parts[function.__name__] = function
    return function


def fails(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call that must fail says."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:80]
    raise AssertionError(f"{call} did not fail")


class Job:
    """What the parts train with. Each part starts from the same state, whatever happened before it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.other = 1 - rank
        self.folder = tempfile.mkdtemp()
        torch.manual_seed(1)
        self.sharded = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for layer in self.sharded:
            fully_shard(layer)
        fully_shard(self.sharded)
        self.stage = PipelineStage(torch.nn.Linear(4, 4), rank, WORLD, torch.device("cpu"))
        self.schedule = ScheduleGPipe(self.stage, 2, loss_fn=torch.nn.MSELoss())

    def run(self, name: str) -> list[Any]:
        torch.manual_seed(7)
        for model in (self.sharded, self.stage.submod):
            for parameter in model.parameters():
                with torch.no_grad():
                    local = getattr(parameter, "_local_tensor", parameter)
                    local.copy_(torch.arange(local.numel()).reshape(local.shape) / 16)
                parameter.grad = None
        return parts[name](self)


def numbers(tensors: Any) -> list[str]:
    return [float(value).hex() for tensor in tensors for value in tensor.detach().flatten().tolist()]


def full(rank: int, size: int = 4) -> torch.Tensor:
    return torch.arange(size) / 3 + rank


# --- parts ------------------------------------------------------------------------------------------------------------


@part
def collectives(job: Job) -> list[Any]:
    x = full(job.rank)
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.broadcast(x, 0)
    gathered = torch.empty(8)
    dist.all_gather_into_tensor(gathered, x)
    pieces = [torch.empty(4), torch.empty(4)]
    dist.all_gather(pieces, full(job.rank))
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": job.rank})
    dist.barrier()
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float(job.rank)], (4,))
    dist.all_reduce(sparse)
    failed = fails(dist.all_reduce, "no tensor")
    return [*numbers([x, gathered, *pieces, sparse.to_dense()]), objects, failed]


@part
def transfers(job: Job) -> list[Any]:
    x, y = full(job.rank), torch.zeros(4)
    if job.rank:
        dist.send(x, job.other)
        dist.recv(y, job.other)
    else:
        dist.recv(y, job.other)
        dist.send(x, job.other)
    works = [dist.isend(x, job.other), dist.irecv(z := torch.zeros(4), job.other)]
    for work in works:
        work.wait()
    operations = [dist.P2POp(dist.isend, x, job.other), dist.P2POp(dist.irecv, v := torch.zeros(4), job.other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    sender = -1
    if job.rank:
        dist.send(x, 0)
        dist.send_object_list([{"rank": 1}], 0)
    else:
        sender = dist.recv(w := torch.zeros(4))
        dist.recv_object_list(objects := [None], 1)
        z += w + objects[0]["rank"]  # type: ignore[index]
    if not job.rank:  # posted while another from any source is open
        early, late = dist.irecv(a := torch.zeros(4)), dist.irecv(b := torch.zeros(4), 1)
        early.wait(), late.wait()
        z += a + b
    else:
        dist.send(x, 0)
        dist.send(x, 0)
    failed = [
        fails(dist.send, "x", job.other),
        fails(dist.irecv, "x"),
        fails(dist.batch_isend_irecv, [operations[0], 3]),
    ]
    return [*numbers([y, z, v]), sender, failed]


@part
def functionals(job: Job) -> list[Any]:
    total = functional.all_reduce(full(job.rank), "sum", dist.group.WORLD)
    gathered = functional.all_gather_single(full(job.rank), 0, dist.group.WORLD)
    named = functional.all_reduce(full(job.rank), "max", [0, 1])
    return numbers([total + 1, gathered * 2, named + 0])


@part
def data_parallel(job: Job) -> list[Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model._set_ddp_runtime_logging_sample_rate(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses = []
    for batch in DataLoader(torch.arange(16).reshape(4, 4) / 8 + job.rank, batch_size=2):
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss)
    weights = numbers([*losses, *model.parameters()])
    del model
    return weights


@part
def steps(job: Job) -> list[Any]:
    parameter = torch.nn.Parameter(full(job.rank))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    other = torch.optim.Adam([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        other.step()

    def broken() -> torch.Tensor:
        raise KeyError("batch")

    failed = [fails(optimizer.step, broken), fails(parameter.backward, "no gradient")]
    parameter.grad = None
    parameter.sum().backward()
    optimizer.step()
    return [*numbers([parameter]), failed]


@part
def sharded(job: Job) -> list[Any]:
    loss = job.sharded(full(job.rank).reshape(1, 4)).square().mean()
    loss.backward()
    gradients = [parameter.grad._local_tensor for parameter in job.sharded.parameters()]  # type: ignore[union-attr]
    return numbers([loss, *gradients])


@part
def pipeline(job: Job) -> list[Any]:
    losses: list[torch.Tensor] = []
    keywords = {"target": torch.ones(4, 4), "losses": losses} if job.rank else {}
    job.schedule.step(*(() if job.rank else (full(0, 16).reshape(4, 4),)), **keywords)
    return numbers([*losses, *(parameter.grad for parameter in job.stage.submod.parameters())])


@part
def groups(job: Job) -> list[Any]:
    group = dist.new_group([0, 1])
    x = full(job.rank)
    dist.all_reduce(x, group=group)
    alone = dist.new_group([0])
    if not job.rank:
        dist.all_reduce(x, group=alone)
        dist.destroy_process_group(alone)
    dist.destroy_process_group(group)
    return [*numbers([x]), fails(dist.new_group, [7, 8])]


@part
def checkpoint(job: Job) -> list[Any]:
    path = f"{job.folder}/state.pt"
    torch.save({"x": full(job.rank)}, path)
    return [*numbers([torch.load(path)["x"]]), fails(torch.load, f"{job.folder}/none")[:17]]


@part
def thread(job: Job) -> list[Any]:
    """Of its own: what a thread is known by is made at its first call."""
    x = full(job.rank)

    def work() -> None:
        dist.all_reduce(x)
        with torch.enable_grad():
            y = torch.nn.Parameter(x)
            y.sum().backward()

    runs = threading.Thread(target=work)
    runs.start()
    runs.join()
    return numbers([x])


# --- functions of ours ------------------------------------------------------------------------------------------------


class Seen:
    """Functions of ours that ran, and those that others than we called."""

    def __init__(self) -> None:
        self.called: set[Any] = set()
        self.entered: set[Any] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and any(package in code.co_filename for package in PACKAGES):
            self.called.add(code)
            back = frame.f_back
            if back is None or not any(package in back.f_code.co_filename for package in PACKAGES):
                self.entered.add(code)

    def names(self) -> tuple[set[str], set[str]]:
        """Dotted names: of all, and of those that others call."""
        made = {each.__code__: each for each in gc.get_objects() if type(each) is FunctionType}
        found: dict[Any, str] = {}
        for code in self.called:
            name = getattr(code, "co_qualname", None) or getattr(made.get(code), "__qualname__", None)
            module = next(
                (
                    name
                    for name, module in list(sys.modules.items())
                    if getattr(module, "__file__", None) == code.co_filename and name != "__main__"
                ),
                None,
            )
            if name and module:
                found[code] = f"{module}.{name}"
        return set(found.values()), {found[code] for code in self.entered if code in found}


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    seen = Seen()
    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def can_fail(name: str) -> bool:
    """Comprehensions run in what they are in; module bodies and the hooks themselves are where the guard is."""
    last = name.rsplit(".", 1)[-1]
    return not last.startswith("<") and ".<locals>.<" not in name and name != "lens_auto.guard.Site.fault"


def reset() -> None:
    """As if nothing had ever failed, and nothing were known yet."""
    from instrumentors import _comm, _pipeline, ddp, point_to_point
    from lens_auto import guard

    for each in guard._sites.values():
        each.faults, each.reason = 0, ""
        each.refresh()
    guard._told = False
    point_to_point._forget()
    point_to_point.lost_since = -1
    _pipeline._lost = False
    _pipeline._numbers.clear()
    ddp._reducers.clear()
    _comm.forget_groups()
    _comm.plain.clear()


def instrument() -> None:
    for each in entry_points(group="opentelemetry_instrumentor"):
        if each.value.startswith("instrumentors."):
            each.load()().instrument()


# --- the program ------------------------------------------------------------------------------------------------------


def init() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))


def main(rank: int, folder: str, how: str) -> None:
    said: dict[str, Any] = {"problems": [], "struck": {}, "lines": {}, "off": {}}
    stderr = open(f"{folder}/{rank}.err", "w+b", buffering=0)  # noqa: SIM115
    os.dup2(stderr.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    random.seed(1)
    try:
        if how != "bare":
            instrument()
        init()
        job = Job(rank)
        for name in parts:
            job.run(name)  # torch's own first times
        expected = {name: job.run(name) for name in parts}
        said["expected"] = expected
        if how != "bare":
            with open(f"{folder}/{rank}.err", "rb") as file:
                said["before"] = file.read().decode()
            each_fails(job, expected, said, stderr.fileno(), how == "wide")
        dist.destroy_process_group()
    except BaseException:
        said["problems"].append(traceback.format_exc())
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(said, file)
    os._exit(0)


def each_fails(job: Job, expected: dict[str, list[Any]], said: dict[str, Any], stderr: int, wide: bool) -> None:
    from lens_auto import faults, guard

    reached: dict[str, list[str]] = {}
    entries: set[str] = set()
    for name in parts:
        reset()
        with watched() as seen:
            job.run(name)
        called, entered = seen.names()
        entries |= entered
        for function in called:
            reached.setdefault(function, []).append(name)
    # Both ranks make the same functions fail, in the same order, while they do the same.
    both: list[Any] = [None, None]
    reset()
    dist.all_gather_object(both, (sorted(reached), sorted(entries), reached))
    functions = sorted(set(both[0][0]) | set(both[1][0]))
    entries = set(both[0][1]) | set(both[1][1])
    said["entries"] = sorted(entries)
    for function in functions:
        if function in entries or not can_fail(function):
            continue
        where = [name for name in parts if name in (both[0][2].get(function, []) + both[1][2].get(function, []))]
        for mode in faults.MODES if wide else ("raise",):
            if mode == "sleep" and ".<locals>." in function:
                continue
            key = f"{function}:{mode}"
            reset()
            os.ftruncate(stderr, 0)
            os.lseek(stderr, 0, os.SEEK_SET)
            faults.put(function, mode)
            try:
                for name in where if wide else where[:1]:
                    for _ in range(2):
                        said["now"] = f"{key} in {name}"
                        if (found := job.run(name)) != expected[name]:
                            said["problems"].append(f"{key} changes {name}: {found} is not {expected[name]}")
            except BaseException:
                said["problems"].append(f"{said['now']}: {traceback.format_exc()}")
                raise
            finally:
                said["struck"][key] = faults.current.struck if faults.current else -1
                faults.remove()
            said["off"][key] = guard.switched_off()
            os.lseek(stderr, 0, os.SEEK_SET)
            said["lines"][key] = os.read(stderr, 1 << 16).decode()


# --- whole lives ------------------------------------------------------------------------------------------------------


def live(rank: int, path: str, function: str, mode: str, port: int) -> None:
    """In a forked child: instrument, be a rank, end. The name of no function: tell which there are."""
    stderr = os.open(f"{path}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stderr, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_PORT=str(port), NEMO_LENS_RUN_DIR=f"{path[:-2]}.run")
    from lens_auto import faults

    if function:
        faults.put(function, mode)
    said: dict[str, Any] = {}
    with contextlib.nullcontext() if function else watched() as seen:
        if mode != "bare":
            instrument()
        init()
        parameter = torch.nn.Parameter(full(rank))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(4):
            parameter.square().sum().backward()
            dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()
        said["numbers"] = numbers([parameter])
        atexit._run_exitfuncs()
    if seen is not None:
        called, entered = seen.names()
        said["functions"] = sorted(name for name in called - entered if can_fail(name))
    said["struck"] = faults.current.struck if faults.current else 0
    with open(f"{path}.json", "w") as file:
        json.dump(said, file)
    os._exit(0)


def pair(folder: str, function: str, mode: str) -> dict[str, Any]:
    """Two ranks from begin to end, and how it was."""
    begun = time.monotonic()
    path = tempfile.mkdtemp(dir=folder)
    port = free_port()
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                live(rank, f"{path}/{rank}", function, mode, port)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    codes = []
    for pid in pids:
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < begun + LIFE_S:
            time.sleep(0.01)
        if found[0] == 0:
            os.kill(pid, signal.SIGKILL)
            found = os.waitpid(pid, 0)
        codes.append(os.waitstatus_to_exitcode(found[1]))
    result: dict[str, Any] = {"function": function, "mode": mode, "codes": codes, "ranks": [], "lines": []}
    for rank in range(WORLD):
        with contextlib.suppress(FileNotFoundError), open(f"{path}/{rank}.json") as file:
            result["ranks"].append(json.load(file))
        with open(f"{path}/{rank}.err") as file:
            result["lines"].append(file.read())
    result["seconds"] = time.monotonic() - begun
    return result


def lives(folder: str, modes: list[str], known: list[str], only: list[str]) -> None:
    for each in entry_points(group="opentelemetry_instrumentor"):
        if each.value.startswith("instrumentors."):
            each.load()  # imported once for all
    from lens_auto import faults
    from lens_auto.recorder import housekeeper  # noqa: F401

    names: list[str] = []
    for mode in ("bare",) if only else ("bare", "lens"):
        found = pair(folder, "", mode)
        names = sorted({name for rank in found["ranks"] for name in rank.pop("functions")})
        print(json.dumps(found), flush=True)
    todo = [(name, mode) for name in only or names if name not in known for mode in modes]
    for name, mode in todo:
        try:
            faults.put(name, mode)
        except (LookupError, ValueError):  # made by a decorator, or of no use in this mode
            continue
        finally:
            faults.remove()
        print(json.dumps(pair(folder, name, mode)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    folder, how = sys.argv[1:3]
    if how == "life":
        with open(sys.argv[3]) as file:
            lives(folder, sys.argv[4:], **json.load(file))
        sys.exit(0)
    pids = []
    for number in range(WORLD):
        pid = os.fork()
        if pid == 0:
            main(number, folder, how)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(abs(code) for code in codes))
