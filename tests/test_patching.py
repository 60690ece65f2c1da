"""Wrapped functions pass for the originals, and everything comes off again by identity."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import INSTRUMENT_HERE, PYTHON, Launcher

from instrumentors._weak import ByIdentity

# Everything that we may touch is imported before the first look at it.
IMPORTS = """
import copy, functools, inspect, json, pickle, sys, types
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.utils.data.dataloader as data
from torch.distributed import distributed_c10d as c10d
from torch.optim import optimizer as optim
"""
INIT = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

# A function that torch.compile takes as one graph: the collectives in it become functional ones.
COMPILE = """
import json
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import all_reduce as bound_early

def reduced(x):
    y = x * 2
    dist.all_reduce(y)
    bound_early(y)
    gathered = torch.empty(4)
    dist.all_gather_into_tensor(gathered, y)
    return gathered.sum()

def compiled():
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(reduced, backend=backend, fullgraph=True)(torch.ones(4))
    return [float(result), graphs]
"""

PROGRAM = """
def look():
    # Every attribute of every torch module, and of every class that such a module defines.
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        seen[name] = dict(vars(module))
        for attribute, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                seen[f"{name}.{value.__qualname__}"] = dict(vars(value))
    return seen

def changed(before, after):
    found = []
    for owner, attributes in before.items():
        now = after.get(owner, {})
        for name in attributes.keys() | now.keys():
            was, is_now = attributes.get(name), now.get(name)
            # a number is a counter of torch's own
            if was is not is_now and not (isinstance(was, int) and isinstance(is_now, int)):
                found.append(f"{owner}.{name}")
    return sorted(found)

def ours():
    return sorted(
        f"{owner}.{name}" for owner, attributes in look().items() for name, value in attributes.items()
        if type(value).__module__.startswith("instrumentors")
    )

def tried(action):
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def use():
    # what makes every hook run
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for (batch,) in data.DataLoader(data.default_collate([torch.ones(1)]).unsqueeze(0)):
        scaler.scale((weight * batch).sum()).backward()
    scaler.step(optimizer)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()

said = {}
use()  # torch's own caches fill up on first use
before = look()
bare = {name: vars(c10d)[name] for name in ("all_reduce", "send", "isend", "batch_isend_irecv", "all_gather_object")}
pickled = {name: pickle.dumps(function) for name, function in bare.items()}

# --- installed --------------------------------------------------------------------------------------------------------
instrumentors = instrument()
said["wrapped"] = ours()
between = types.ModuleType("between")
exec("from torch.distributed import all_reduce, isend, send", vars(between))
sys.modules["between"] = between

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.reduce = dist.all_reduce
        self.scaler = torch.amp.GradScaler("cpu")
        self.step = self.scaler.step

passes = said["passes"] = {}
for name, function in bare.items():
    wrapped = getattr(dist, name)
    passes[name] = {
        "is wrapped": wrapped is not function,
        "same object everywhere": wrapped is getattr(c10d, name) is getattr(dist.distributed_c10d, name),
        "name": wrapped.__name__ == function.__name__ and wrapped.__qualname__ == function.__qualname__,
        "module": wrapped.__module__ == function.__module__,
        "doc": wrapped.__doc__ == function.__doc__,
        "signature": inspect.signature(wrapped) == inspect.signature(function),
        "annotations": wrapped.__annotations__ == function.__annotations__,
        "defaults": wrapped.__defaults__ == function.__defaults__,
        "is a function": inspect.isfunction(wrapped) and isinstance(wrapped, types.FunctionType) and callable(wrapped),
        "equals": wrapped == function and hash(wrapped) == hash(function) and {function: 1}.get(wrapped) == 1,
        "pickle": tried(lambda: pickle.dumps(wrapped) == pickled[name]),
        "pickle and back": tried(lambda: pickle.loads(pickle.dumps(wrapped)) is wrapped),
        "all protocols": tried(lambda: all(
            pickle.loads(pickle.dumps(wrapped, protocol)) is wrapped for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        )),
        "copy": tried(lambda: copy.copy(wrapped) is wrapped),
        "deepcopy": tried(lambda: copy.deepcopy(wrapped) is wrapped),
    }
held = said["held"] = {
    "deepcopy of a model that holds it": tried(lambda: copy.deepcopy(Model()).reduce is dist.all_reduce),
    "pickle of a list that holds it": tried(lambda: pickle.loads(pickle.dumps([dist.send]))[0] is dist.send),
    "deepcopy of a bound method": tried(lambda: callable(copy.deepcopy(torch.amp.GradScaler("cpu").step))),
    "pickle of a bound method": tried(lambda: callable(pickle.loads(pickle.dumps(torch.amp.GradScaler("cpu").step)))),
    "method of its instance": tried(lambda: (lambda s: s.step.__self__ is s)(torch.amp.GradScaler("cpu"))),
    "signature of a class": tried(lambda: "device_ids" in inspect.signature(
        torch.nn.parallel.DistributedDataParallel).parameters),
    "P2POp takes it": tried(lambda: dist.P2POp(dist.isend, torch.ones(1), 0) is not None
        and dist.P2POp(between.isend, torch.ones(1), 0) is not None),
    "P2POp refuses others": tried(lambda: dist.P2POp(dist.all_reduce, torch.ones(1), 0)),
}

class Loader(data.DataLoader):
    def __iter__(self):
        return super().__iter__()

held["a subclass calls super().__iter__"] = tried(lambda: len(list(Loader([1, 2, 3]))) == 3)

# --- taken off --------------------------------------------------------------------------------------------------------
for instrumentor in instrumentors:
    instrumentor.uninstrument()
said["changed"] = changed(before, look())
said["between"] = [name for name in ("all_reduce", "isend", "send") if vars(between)[name] is not bare[name]]

before = look()
for instrumentor in instrumentors:
    instrumentor.instrument()
said["wrapped again"] = ours() == said["wrapped"]
use()
from lens_auto import runtime
recorder = runtime.recorder
for instrumentor in reversed(instrumentors):
    instrumentor.uninstrument()
said["changed after use"] = changed(before, look())
said["left"] = ours()
said["hooks"] = len(optim._global_optimizer_pre_hooks) + len(optim._global_optimizer_post_hooks)
count = recorder.written()
said["recorded while on"] = count
use()
said["recorded when off"] = recorder.written() - count

# --- compiled ---------------------------------------------------------------------------------------------------------
said["compiled"] = compiled()
for instrumentor in instrumentors:
    instrumentor.instrument()
said["compiled with us"] = tried(compiled)

# --- somebody else on top ---------------------------------------------------------------------------------------------
def patch(owner, name, calls):
    inner = getattr(owner, name)
    @functools.wraps(inner)
    def theirs(*args, **kwargs):
        calls.append(name)
        return inner(*args, **kwargs)
    setattr(owner, name, theirs)
    return theirs

calls = []
theirs = [patch(dist, "all_reduce", calls), patch(c10d, "broadcast", calls), patch(torch.autograd, "backward", calls)]
dist.all_reduce(torch.ones(1))
c10d.broadcast(torch.ones(1), 0)
torch.nn.Parameter(torch.ones(1)).sum().backward()
for instrumentor in instrumentors:
    instrumentor.uninstrument()
said["their patches stay"] = [dist.all_reduce, c10d.broadcast, torch.autograd.backward] == theirs
count = recorder.written()
dist.all_reduce(torch.ones(1))
c10d.broadcast(torch.ones(1), 0)
torch.nn.Parameter(torch.ones(1)).sum().backward()
said["their calls"] = calls
said["recorded under their patches"] = recorder.written() - count

dist.destroy_process_group()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(launch_once: Launcher) -> dict[str, Any]:
    """What the program found out."""
    program = launch_once.program(IMPORTS + COMPILE + INSTRUMENT_HERE + INIT + PROGRAM)
    run = launch_once.run(*PYTHON, program, env={"NEMO_LENS_SPAN_GROUPS": "all"})
    assert run.code == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_something_is_wrapped(said: dict[str, Any]) -> None:
    wrapped = set(said["wrapped"])
    assert {
        "torch.distributed.all_reduce",
        "torch.distributed.distributed_c10d.all_reduce",
        "torch.distributed.distributed_c10d.isend",
        "torch.distributed.distributed_c10d.init_process_group",
        "torch.autograd.backward",
        "torch.amp.grad_scaler.GradScaler.step",
        "torch.utils.data.dataloader.DataLoader.__iter__",
        "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
        "torch.nn.parallel.distributed.DistributedDataParallel.__init__",
        "torch.serialization.save",
        "torch.save",
    } <= wrapped


@pytest.mark.parametrize("name", ["all_reduce", "send", "isend", "batch_isend_irecv", "all_gather_object"])
def test_wrapper_passes_for_the_function(said: dict[str, Any], name: str) -> None:
    passes = said["passes"][name]
    assert len(passes) == 15
    assert passes == dict.fromkeys(passes, True)


def test_what_holds_a_wrapper(said: dict[str, Any]) -> None:
    refused = said["held"].pop("P2POp refuses others")
    assert refused.startswith("ValueError: Invalid ``op``"), refused
    assert said["held"] == dict.fromkeys(said["held"], True)


def test_uninstrument_restores_by_identity(said: dict[str, Any]) -> None:
    # torch.compile keeps the rule that it must not trace into our frames: torch has no way to take one back.
    assert set(said["changed"]) <= {"torch._dynamo.trace_rules.SKIP_DIRS_RE"}
    assert said["between"] == []  # names that were imported while we were on


def test_nothing_is_left_after_use(said: dict[str, Any]) -> None:
    assert said["wrapped again"] is True
    assert said["changed after use"] == []
    assert said["left"] == []
    assert said["hooks"] == 0
    assert said["recorded while on"] > 0
    assert said["recorded when off"] == 0


def test_a_patch_on_top_survives(said: dict[str, Any]) -> None:
    assert said["their patches stay"] is True
    assert said["their calls"] == ["all_reduce", "broadcast", "backward"] * 2
    assert said["recorded under their patches"] == 0


def test_compile_as_one_graph(said: dict[str, Any], launch_once: Launcher) -> None:
    """The same graph with and without us: instrumented late (above), and from the start."""
    result, graphs = said["compiled"]
    assert result == 8.0
    assert len(graphs) == 1
    assert graphs[0].count("all_reduce") >= 2
    assert "functional" in graphs[0]
    assert said["compiled with us"] == said["compiled"]
    source = COMPILE + INIT + "print(json.dumps(compiled()))\ndist.destroy_process_group()\n"
    run = launch_once.instrumented(source, env={"NEMO_LENS_SPAN_GROUPS": "all"})
    assert run.code == 0, run.stderr
    assert json.loads(run.stdout) == said["compiled"]


def test_facts_by_identity_go_with_their_object() -> None:
    class Alike:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise AssertionError("it was compared")

    facts: ByIdentity[int] = ByIdentity()
    one, other = Alike(), Alike()
    facts[one], facts[other] = 1, 2
    facts[one] = 3
    assert (facts.get(one), facts.get(other), facts.get(Alike()), len(facts)) == (3, 2, None, 2)
    del one
    assert (facts.get(other), len(facts)) == (2, 1)
