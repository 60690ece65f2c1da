"""Trace context between ranks, over real process groups; and run ids that ranks come to without a word."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from launch import TORCHRUN, Launcher, Run, free_port
from opentelemetry import trace

from lens_auto.distributed import CARRIER_BYTES, broadcast_trace_context
from lens_auto.propagation import extract_context

# Every broadcast is counted where torch has it, below our function.
BROADCASTS = """
import json, sys
import torch
import torch.distributed as dist
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from lens_auto import broadcast_trace_context, create_linked_span
from lens_auto.contrib.nccl import extract_nccl_context, serialize_context
from lens_auto.handle import _run_id

sizes = []
broadcast = dist.broadcast
def counted(tensor, **kwargs):
    sizes.append((str(tensor.device), str(tensor.dtype), tensor.numel(), kwargs["src"]))
    return broadcast(tensor, **kwargs)

reads = []
for name in ("cpu", "item", "tolist", "numpy"):
    def read(tensor, *args, name=name, method=getattr(torch.Tensor, name), **kwargs):
        reads.append(name)
        return method(tensor, *args, **kwargs)
    setattr(torch.Tensor, name, read)

found = {"before": broadcast_trace_context(0)}
found["launched"] = _run_id(2)
dist.init_process_group("gloo")
dist.broadcast = counted
rank = dist.get_rank()
found["rank"] = rank
found["stored"] = _run_id(2)
tracer = TracerProvider().get_tracer("t")

def share(name, size, src=0, current=True):
    sizes.clear(), reads.clear()
    with tracer.start_as_current_span(f"{name} {rank}") as span:
        token = context.attach(baggage.set_baggage("note", "x" * size) if size else context.get_current())
        if not current:
            context.attach(context.Context())
        carrier = broadcast_trace_context(rank, src_rank=src)
        own = f"{span.get_span_context().span_id:016x}"
    found[name] = {"carrier": carrier, "own": own, "sizes": list(sizes), "reads": list(reads)}
    return carrier

share("usual", 0)
share("fits", 400)
share("long", 3000)
share("other source", 0, src=1)
share("nothing", 0, current=False)
with torch.device("meta"):
    share("device mode", 0)
tensor = torch.full((4,), float(rank + 1))
dist.all_reduce(tensor)  # the ranks are still in step
found["sum"] = tensor.sum().item()
# A stage's activations, with the context of the stage that made them behind them in one message.
activations = torch.arange(6, dtype=torch.float32)
with tracer.start_as_current_span(f"stage {rank}") as stage:
    found["stage"] = f"{stage.get_span_context().span_id:016x}"
    if rank == 0:
        data = serialize_context()
        frame = activations.view(torch.uint8).tolist() + list(data)
        dist.send(torch.tensor([len(frame)]), 1)
        dist.send(torch.tensor(frame, dtype=torch.uint8), 1)
    else:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0)
        frame = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(frame, 0)
        assert torch.equal(frame[:24].view(torch.float32), activations)
        sent = extract_nccl_context(bytes(frame[24:].tolist()))
        found["sender"] = f"{trace.get_current_span(sent).get_span_context().span_id:016x}"
span = create_linked_span(tracer, "linked", remote_carrier=found["usual"]["carrier"], rank=rank)
found["link"] = f"{span.links[0].context.span_id:016x}"
with open(f"found-{found['rank']}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(launch_once: Launcher) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    port = str(free_port())
    command = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={port}", launch_once.program(BROADCASTS))
    return outputs(launch_once.run(*command))


def outputs(run: Run) -> list[dict[str, Any]]:
    assert run.code == 0, run.stderr
    return [json.loads((run.cwd / f"found-{rank}.json").read_text()) for rank in range(2)]


def span_id(carrier: dict[str, str]) -> str:
    return carrier["traceparent"].split("-")[2]


def test_without_a_group_there_is_none() -> None:
    assert broadcast_trace_context(0) is None
    script = "import sys; sys.modules['torch'] = None; import lens_auto; print(lens_auto.broadcast_trace_context(0))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["None"]


def test_before_init_there_is_none(ranks: list[dict[str, Any]]) -> None:
    assert [found["before"] for found in ranks] == [None, None]


@pytest.mark.parametrize(("name", "source"), [("usual", 0), ("fits", 0), ("long", 0), ("other source", 1)])
def test_all_ranks_get_the_sources_context(ranks: list[dict[str, Any]], name: str, source: int) -> None:
    carriers = [found[name]["carrier"] for found in ranks]
    assert carriers[0] == carriers[1]
    assert span_id(carriers[0]) == ranks[source][name]["own"] != ranks[1 - source][name]["own"]
    assert trace.get_current_span(extract_context(carriers[0])).get_span_context().is_valid
    size = {"fits": 400, "long": 3000}.get(name)
    assert carriers[0].get("baggage") == (None if size is None else f"note={'x' * size}")


def test_a_usual_carrier_is_one_broadcast_of_a_fixed_size(ranks: list[dict[str, Any]]) -> None:
    for name, source in (("usual", 0), ("fits", 0), ("other source", 1), ("nothing", 0), ("device mode", 0)):
        for found in ranks:
            assert found[name]["sizes"] == [["cpu", "torch.uint8", CARRIER_BYTES, source]], name
        # Nothing is read back from the device but the carrier, where it was received.
        assert ranks[source][name]["reads"] == []
        # (under a torch function mode every call of a tensor's method comes by twice)
        assert list(dict.fromkeys(ranks[1 - source][name]["reads"])) == ["cpu", "tolist"]


def test_a_long_carrier_takes_a_second_one(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        (first, second) = found["long"]["sizes"]
        assert first == ["cpu", "torch.uint8", CARRIER_BYTES, 0]
        assert second[1:] == ["torch.uint8", 4 + len(json.dumps(found["long"]["carrier"])) - CARRIER_BYTES, 0]


def test_without_a_current_span_there_is_none(ranks: list[dict[str, Any]]) -> None:
    assert [found["nothing"]["carrier"] for found in ranks] == [None, None]
    assert [found["sum"] for found in ranks] == [12.0, 12.0]


def test_a_linked_span_of_every_rank_links_to_the_source(ranks: list[dict[str, Any]]) -> None:
    assert {found["link"] for found in ranks} == {ranks[0]["usual"]["own"]}


def test_a_context_travels_with_activations(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["sender"] == ranks[0]["stage"] != ranks[1]["stage"]


def test_run_ids_are_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert len({found["launched"] for found in ranks}) == 1
    assert len({found["stored"] for found in ranks}) == 1
