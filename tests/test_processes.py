"""Children of every kind, threads and handlers of a rank: nothing is recorded twice, lost, or printed."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from launch import INSTRUMENT, PYTHON, Launcher
from records import read_run, read_spans

from lens_auto.recorder import spool
from lens_auto.recorder.layout import Flag, Kind

PROGRAM = """
import json, multiprocessing, os, signal, subprocess, sys, threading, time

def square(x):
    import torch
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()  # a child that trains is no rank
    return x * x

def plain(x):
    return x + 1

def main():
    import torch
    import torch.distributed as dist
    from opentelemetry import trace

    ticks = []
    signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    handlers = signal.getsignal(signal.SIGALRM)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    counted = {"backward": 0, "all_reduce": 0, "spans": 0}
    lock = threading.Lock()
    tracer = trace.get_tracer("own")

    def train(times, group=None):
        for _ in range(times):
            parameter = torch.nn.Parameter(torch.ones(4))
            parameter.sum().backward()
            dist.all_reduce(parameter.grad, group=group)
            with lock:
                counted["backward"] += 1
                counted["all_reduce"] += 1

    train(3)
    said = {}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        said["fork pool"] = pool.map(square, range(6))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said["spawn pool"] = pool.map(plain, range(3))
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        said["forkserver pool"] = pool.map(plain, range(3))
    said["subprocess"] = subprocess.run([sys.executable, "-c", "print(40 + 2)"], capture_output=True, text=True).stdout
    for way in ("_exit", "exec"):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            square(1)
            if way == "exec":
                os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(8)"])
            os._exit(7)
        said[way] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    groups = [dist.new_group([0]) for _ in range(3)]
    threads = [threading.Thread(target=train, args=(20, group)) for group in groups]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for _ in range(2):
        with tracer.start_as_current_span("own"):
            train(1)
            counted["spans"] += 1
    assert signal.getsignal(signal.SIGALRM) is handlers and ticks
    signal.setitimer(signal.ITIMER_REAL, 0)
    said["handlers"] = [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    stop = threading.Event()
    def forever():  # a daemon that is still there when the process ends
        train(2)
        stop.wait()
    threading.Thread(target=forever, daemon=True).start()
    while counted["backward"] < 3 + 60 + 2 + 2:
        time.sleep(0.01)
    with open("counted.json", "w") as file:
        json.dump({"pid": os.getpid(), **counted}, file)
    print(json.dumps(said))
    sys.exit(6)

if __name__ == "__main__":
    main()
"""


@pytest.mark.timeout(300)
def test_children_threads_and_handlers(launch: Launcher) -> None:
    program = launch.program(PROGRAM)
    bare = launch.run(*PYTHON, program)
    assert (bare.code, bare.stderr) == (6, ""), bare
    env = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_QUIET": "1"}
    run = launch.run(*INSTRUMENT, *PYTHON, program, env=env)
    assert (run.code, run.stdout, run.stderr) == (6, bare.stdout, "")
    assert run.survivors == [] and run.spooled == []
    counted = json.loads((launch.cwd / "counted.json").read_text())
    (writer,) = read_run(run.run_dir)
    assert writer.pid == counted["pid"]
    assert (writer.info["hooks_off"], writer.info["hook_faults"], writer.info["dropped"]) == ({}, 0, 0)
    names = Counter(row.name for row in writer.of(Kind.COLLECTIVE))
    assert names["all_reduce"] == counted["all_reduce"]
    assert len(writer.of(Kind.BACKWARD)) == counted["backward"] == 67
    assert len({row.thread for row in writer.of(Kind.COLLECTIVE)}) == 5
    (spans,) = read_spans(run.run_dir).values()
    ids = [span.span_id for span in spans]
    assert len(ids) == len(set(ids))
    own = [json.loads(line) for path in run.run_dir.rglob("*.jsonl") for line in path.read_text().splitlines()]
    found = [
        span
        for each in own
        for resource in each["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert [span["name"] for span in found] == ["own"] * counted["spans"]
    assert not {bytes.fromhex(span["spanId"]) for span in found} & set(ids)


LIBERTIES = """
import gc, json, weakref
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
said = {"repr": repr(dist.all_reduce).split(" at ")[0]}

class Waiting(dist.Work):
    waits = 0
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def wait(self, timeout=timedelta(milliseconds=20)):
        Waiting.waits += 1
        self.inner.wait()
        return super().wait(timeout)
try:
    Waiting(dist.all_reduce(torch.ones(2), async_op=True)).wait()
except RuntimeError as error:
    said["a work's own wait"] = [Waiting.waits, str(error)]

class Captured:
    pass
def step_that_raises():
    captured = Captured()
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    def closure():
        raise MemoryError(str(captured))
    try:
        optimizer.step(closure)
    except MemoryError:
        pass
    return weakref.ref(captured), weakref.ref(optimizer)
left = step_that_raises()
gc.collect()
said["left of a step that raised"] = [each() is not None for each in left]

class Alike(torch.optim.SGD):
    def __hash__(self):
        return 1
    def __eq__(self, other):
        raise KeyboardInterrupt
parameter = torch.nn.Parameter(torch.ones(1))
several = [Alike([parameter], lr=0.1) for _ in range(3)]
for optimizer in several:
    parameter.sum().backward()
    optimizer.step()
said["optimizers that cannot be compared"] = parameter.item()

dist.destroy_process_group()
print(json.dumps(said))
"""


def test_liberties_that_a_program_may_take(launch: Launcher) -> None:
    """What a program may do with its works and optimizers, it may do with us."""
    bare = launch.run(*PYTHON, launch.program(LIBERTIES, "bare.py"))
    assert bare.code == 0, bare.stderr
    run = launch.instrumented(LIBERTIES, env={"NEMO_LENS_SPAN_GROUPS": "all"}).check()
    assert json.loads(run.stdout) == json.loads(bare.stdout)
    (writer,) = read_run(run.run_dir)
    assert writer.info["hooks_off"] == {}
    steps = writer.of(Kind.OPTIMIZER_STEP)
    assert [bool(row.flags & Flag.FAILED) for row in steps] == [True, False, False, False]
    assert len({row.a for row in steps}) == 4  # each optimizer is one of its own


def test_a_map_holds_no_descriptor(tmp_path: Path) -> None:
    """The program may close every descriptor that it finds, and open its own at the same numbers."""
    before = os.listdir("/proc/self/fd")
    buffer = spool.create_mapped(str(tmp_path / "mapped"), 3 << 20)
    assert os.listdir("/proc/self/fd") == before
    assert bytes(buffer) == bytes(3 << 20)
    buffer[-5:] = b"there"
    assert (tmp_path / "mapped").read_bytes()[-5:] == b"there"
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    buffer.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
