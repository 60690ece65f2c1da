"""Every way to launch a job gives one run directory with one writer for each rank, and leaves nothing else behind."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from launch import CLOSING, INSTRUMENT, INSTRUMENT_HERE, PYTHON, RUN_RANKS, TORCHRUN, Launcher, Run, free_port
from records import Writer, read_run

from lens_auto.recorder.housekeeper import Housekeeper
from lens_auto.recorder.layout import Flag, Kind
from lens_auto.recorder.recorder import Recorder

# Three backwards on each rank, gradients averaged by hand. No optimizer: the first one that a process makes imports
# torch._dynamo, which takes seconds.
TRAIN = """
import sys
import torch
import torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    sys.stdout.write(f"rank {dist.get_rank()} trained\\n")  # one write: ranks share the pipe
    dist.destroy_process_group()
"""
TRAINED = ["rank 0 trained", "rank 1 trained"]

ALONE = """
import sys
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(3):
    parameter.sum().backward()
    optimizer.step()
"""


def check_two_ranks(run: Run, *, iterations: int = 3) -> list[Writer]:
    """Two ranks, three backwards each, one seed that they agreed on."""
    run.check()
    assert sorted(run.stdout.splitlines()) == TRAINED
    writers = read_run(run.run_dir)
    assert [writer.rank for writer in writers] == [0, 1]
    assert [len(writer.of(Kind.BACKWARD)) for writer in writers] == [3, 3]
    assert [len(writer.iterations) for writer in writers] == [iterations] * 2
    assert [writer.iterations.mispredicted for writer in writers] == [0, 0]
    assert {writer.info["world_size"] for writer in writers} == {2}
    assert {writer.info["seed_source"] for writer in writers} == {"agreed"}
    assert len({writer.info["seed"] for writer in writers}) == 1
    assert {writer.info["end"] for writer in writers} == {"exit"}
    assert {writer.info["run_id"] for writer in writers} == {run.run_dir.name}
    assert json.loads((run.run_dir / "manifest.json").read_text())["run_id"] == run.run_dir.name
    assert [writer.info["dropped"] + writer.info["hook_faults"] for writer in writers] == [0, 0]
    return writers


def test_torchrun(launch: Launcher) -> None:
    program = launch.program(TRAIN + "train()\n")
    port = str(free_port())
    run = launch.run(*INSTRUMENT, *TORCHRUN, "--nproc-per-node=2", f"--master-port={port}", program)
    writers = check_two_ranks(run, iterations=0)
    assert [writer.info["local_rank"] for writer in writers] == [0, 1]
    assert [writer.info["resource"]["dl.rank"] for writer in writers] == [0, 1]
    assert {writer.info["resource"]["torchelastic.local_world_size"] for writer in writers} == {2}


@pytest.mark.slow  # torchrun is the same program, and has a test of its own
def test_python_m_torch_distributed_run(launch: Launcher) -> None:
    program = launch.program(TRAIN + "train()\n")
    run = launch.run(*INSTRUMENT, *PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program)
    check_two_ranks(run, iterations=0)


def test_torchrun_that_starts_opentelemetry_instrument(launch: Launcher) -> None:
    """The launcher does not run us here: the ranks have no run id in common until they agree on one."""
    program = launch.program(TRAIN + "train()\n")
    port = str(free_port())
    launcher = (*TORCHRUN, "--no-python", "--nproc-per-node=2", f"--master-port={port}")
    run = launch.run(*launcher, *INSTRUMENT, *PYTHON, program)
    check_two_ranks(run, iterations=0)


def test_multiprocessing_spawn(launch: Launcher) -> None:
    source = """
    def rank_main(rank):
        import os
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        train()

    if __name__ == "__main__":
        torch.multiprocessing.spawn(rank_main, nprocs=2)
    """
    run = launch.instrumented(TRAIN + textwrap.dedent(source))
    check_two_ranks(run, iterations=0)


def test_ranks_by_hand_without_a_common_parent(launch: Launcher) -> None:
    program = launch.program(TRAIN + "train()\n")
    world = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    started = [launch.start((*INSTRUMENT, *PYTHON, program), {**world, "RANK": rank}) for rank in "01"]
    runs = [each.wait() for each in started]
    assert runs[1].lines == []  # rank 0 alone says where the run is
    both = Run(
        max(run.code for run in runs),
        "".join(run.stdout for run in runs),
        "".join(run.stderr for run in runs),
        launch.folder,
        [command for run in runs for command in run.survivors],
    )
    check_two_ranks(both, iterations=0)


def test_one_process_without_distributed(launch: Launcher) -> None:
    run = launch.instrumented(ALONE + "sys.exit(7)\n")
    assert run.code == 7  # the program's own
    assert run.lines == [f"{CLOSING}lens-runs/{run.run_dir.name}"]
    assert run.spooled == []
    (writer,) = read_run(run.run_dir)
    assert (writer.rank, writer.info["world_size"], writer.info["local_rank"]) == (0, 1, 0)
    assert writer.info["seed_source"] == "own"
    assert len(writer.iterations) == 3
    assert [row.kind for row in writer.of(Kind.BACKWARD, Kind.OPTIMIZER_STEP)] == [
        Kind.BACKWARD,
        Kind.OPTIMIZER_STEP,
    ] * 3


def test_instrument_after_torch_was_imported(launch: Launcher) -> None:
    """Names that were bound before are ours as well, the same object under all of them."""
    bound_before = """
    import torch
    import torch._dynamo  # the first optimizer imports it, which takes seconds
    import torch.distributed as dist
    from torch.distributed import all_reduce, batch_isend_irecv, irecv
    bare = [all_reduce]
    """
    source = """
    instrument()
    assert all_reduce is dist.all_reduce is dist.distributed_c10d.all_reduce
    assert all_reduce.__wrapped__ is bare[0]

    def main(rank):
        dist.init_process_group("gloo")
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        other = 1 - rank
        for _ in range(3):
            parameter.sum().backward()
            all_reduce(parameter.grad)
            received = torch.zeros(4)
            sent = torch.full((4,), float(rank))
            # P2POp takes torch's own isend and irecv and nothing else; batch_isend_irecv compares by identity
            for work in batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(irecv, received, other)]):
                work.wait()
            assert received.tolist() == [float(other)] * 4
            optimizer.step()
        sys.stdout.write(f"rank {rank} trained\\n")
        dist.destroy_process_group()

    run_ranks(main, 2)
    """
    program = launch.program(RUN_RANKS + textwrap.dedent(bound_before) + INSTRUMENT_HERE + textwrap.dedent(source))
    run = launch.run(*PYTHON, program, env={"NEMO_LENS_SPAN_GROUPS": "all"})
    for writer in check_two_ranks(run):
        operations = [(row.name, row.peer) for row in writer.of(Kind.COLLECTIVE, Kind.SEND, Kind.RECV)]
        other = 1 - writer.rank
        assert operations == [("all_reduce", -1), ("isend", other), ("irecv", other)] * 3


def test_program_without_torch(launch: Launcher) -> None:
    source = """
    import json, logging, sys, threading
    from importlib.metadata import entry_points
    from opentelemetry.instrumentation import dependencies
    from opentelemetry.instrumentation.auto_instrumentation import _load
    from lens_auto import distro
    seen = [name for name in sys.modules if name.startswith(("torch", "numpy", "opentelemetry.sdk"))]
    instrumentors = entry_points(group="opentelemetry_instrumentor")
    print(json.dumps({
        "threads": [thread.name for thread in threading.enumerate()],
        "modules": seen,
        "put back": _load.get_dist_dependency_conflicts is dependencies.get_dist_dependency_conflicts,
        "spared": 0 < len(distro._answers) <= len(instrumentors) - 15,
    }))
    """
    run = launch.instrumented(source).check(run_dirs=0)
    assert json.loads(run.stdout) == {"threads": ["MainThread"], "modules": [], "put back": True, "spared": True}
    assert not run.spool.exists()
    assert [path.name for path in run.cwd.iterdir()] == ["program.py"]


@pytest.mark.parametrize("ways", ["fork spawn", pytest.param("fork spawn forkserver", marks=pytest.mark.slow)])
def test_dataloader_workers(launch: Launcher, ways: str) -> None:
    """Workers inherit RANK, and this dataset even trains in them: still they are no ranks."""
    source = """
    import json, os, sys, torch
    from torch.utils.data import DataLoader, Dataset

    class Trains(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            parameter = torch.nn.Parameter(torch.ones(1))
            parameter.sum().backward()
            torch.optim.SGD([parameter], lr=0.1).step()
            return os.getpid()

    if __name__ == "__main__":
        pids = {}
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.sum().backward()  # a rank from here on, before the first loader starts
        for way in sys.argv[1:]:
            loader = DataLoader(Trains(), batch_size=None, num_workers=1, multiprocessing_context=way)
            pids[way] = []
            for pid in loader:
                pids[way].append(int(pid))
                parameter.sum().backward()
                optimizer.step()
        print(json.dumps({"main": os.getpid(), "workers": pids}))
    """
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    run = launch.instrumented(source, *ways.split(), env=environment).check()
    said = json.loads(run.stdout)
    loaders = len(ways.split())
    assert {way: (len(pids), len(set(pids))) for way, pids in said["workers"].items()} == dict.fromkeys(
        ways.split(), (4, 1)
    )
    (writer,) = read_run(run.run_dir)
    assert writer.pid == said["main"]
    assert len(writer.iterations) == 4 * loaders
    assert [row.b for row in writer.of(Kind.LOADER_START)] == [1] * loaders
    fetches = writer.of(Kind.FETCH)
    assert [row.seq for row in fetches] == [0, 1, 2, 3, 4] * loaders
    assert [row.seq for row in fetches if row.flags & Flag.EXHAUSTED] == [4] * loaders


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
        ),
    ],
)
def test_torch_compile_children(launch: Launcher, backend: str) -> None:
    source = """
    import json, os, sys, torch
    from pathlib import Path
    from torch._inductor.async_compile import AsyncCompile

    def children(pid):
        found = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *children(int(child))]
        return found

    # torch starts its pool by itself only where there is Triton
    AsyncCompile.warm_pool()
    AsyncCompile.wakeup()
    AsyncCompile.wait_pool_ready()
    workers = children(os.getpid())

    @torch.compile(backend=sys.argv[1])
    def half(x):
        return (x.sin() + 1) / 2

    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            weight = half(parameter)
        (parameter * weight).sum().backward()
        optimizer.step()
    print(json.dumps({"main": os.getpid(), "workers": workers}))
    """
    inductor = {
        "TORCHINDUCTOR_CACHE_DIR": str(launch.folder / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
    }
    run = launch.instrumented(source, backend, env=inductor, timeout_s=100).check()
    said = json.loads(run.stdout)
    assert len(said["workers"]) == 3  # the pool's own process, which runs us, and two that it forks
    (writer,) = read_run(run.run_dir)
    assert writer.pid == said["main"]
    assert len(writer.iterations) == 3


@pytest.fixture
def other_distro(launch: Launcher) -> dict[str, str]:
    """A second distribution with the entry points of `opentelemetry-distro`, found before ours."""
    folder = launch.folder / "other"
    info = folder / "opentelemetry_distro-0.66b2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: opentelemetry-distro\nVersion: 0.66b2\n")
    (info / "entry_points.txt").write_text(
        "[opentelemetry_distro]\ndistro = other_distro:OtherDistro\n\n"
        "[opentelemetry_configurator]\nconfigurator = other_distro:OtherConfigurator\n"
    )
    (folder / "other_distro.py").write_text(
        textwrap.dedent("""
        import os
        from opentelemetry.instrumentation.distro import BaseDistro

        class OtherDistro(BaseDistro):
            def _configure(self, **kwargs):
                os.environ["OTHER_DISTRO"] = "configured"

        class OtherConfigurator:
            def configure(self, **kwargs):
                pass
        """)
    )
    return {"PYTHONPATH": str(folder)}


def test_another_distro_comes_first(launch: Launcher, other_distro: dict[str, str]) -> None:
    run = launch.instrumented("import os; print(os.environ['OTHER_DISTRO'])\n" + ALONE, env=other_distro)
    assert (run.code, run.stdout) == (0, "configured\n")
    ours = [line for line in run.lines if line.startswith("lens-auto: ")]
    assert len(ours) == 2
    assert "OTEL_PYTHON_DISTRO=lens_auto" in ours[0]
    assert "OTEL_PYTHON_CONFIGURATOR=lens_auto" in ours[0]
    assert ours[1] == f"{CLOSING}lens-runs/{run.run_dir.name}"
    # OpenTelemetry's own word on the configurator that it did not load.
    assert [line for line in run.lines if line not in ours] == [
        "Configuration of lens_auto not loaded, configurator already loaded"
    ]
    (writer,) = read_run(run.run_dir)
    assert len(writer.iterations) == 3


def test_another_distro_and_ours_chosen(launch: Launcher, other_distro: dict[str, str]) -> None:
    source = """
    import os
    from lens_auto.distro import LensDistro
    print(LensDistro.chosen, os.environ.get("OTHER_DISTRO"))
    """
    chosen = {"OTEL_PYTHON_DISTRO": "lens_auto", "OTEL_PYTHON_CONFIGURATOR": "lens_auto"}
    run = launch.instrumented(source, env={**other_distro, **chosen})
    assert (run.code, run.stdout) == (0, "True None\n")
    assert [line for line in run.lines if "lens-auto" in line] == []


SWITCHES = {"NEMO_LENS_DISABLED": "1", "NEMO_LENS_ENABLED": "0", "OTEL_SDK_DISABLED": "true"}


@pytest.mark.parametrize(
    "variable",
    ["NEMO_LENS_DISABLED", *(pytest.param(each, marks=pytest.mark.slow) for each in list(SWITCHES)[1:])],
)
def test_disabled(launch: Launcher, variable: str) -> None:
    source = """
    import json, os, threading, types
    import torch
    import torch.distributed as dist
    import torch.utils.data.dataloader as data
    from torch.optim import optimizer as optim
    torch.nn.Parameter(torch.ones(1)).sum().backward()
    patched = [name for module in (dist, dist.distributed_c10d, torch.autograd) for name, value in vars(module).items()
               if type(value).__module__.startswith(("wrapt", "instrumentors"))]
    print(json.dumps({
        "all_reduce": type(dist.all_reduce) is types.FunctionType,
        "fetch": type(vars(data._BaseDataLoaderIter)["__next__"]) is types.FunctionType,
        "scaler": type(vars(torch.amp.GradScaler)["step"]) is types.FunctionType,
        "hooks": len(optim._global_optimizer_pre_hooks) + len(optim._global_optimizer_post_hooks),
        "patched": patched,
        "threads": [thread.name for thread in threading.enumerate()],
        "environment": [name for name in os.environ if "NEMO_LENS" in name],
    }))
    """
    run = launch.instrumented(source, env={variable: SWITCHES[variable]})
    run.check(run_dirs=0)
    assert run.stderr == ""
    said = json.loads(run.stdout)
    assert set(said.pop("environment")) == {"NEMO_LENS_SPOOL_DIR", variable} - {"OTEL_SDK_DISABLED"}
    assert said == {
        "all_reduce": True,
        "fetch": True,
        "scaler": True,
        "hooks": 0,
        "patched": [],
        "threads": ["MainThread"],
    }
    assert not run.spool.exists()
    assert [path.name for path in run.cwd.iterdir()] == ["program.py"]


@pytest.mark.slow
def test_ended_by_a_signal(launch: Launcher) -> None:
    """The launcher finishes what a killed rank left in the spool, and the exit status stays the program's."""
    source = f"""
import os, signal
def main(rank):
    {textwrap.indent(ALONE, "    ").strip()}
    os.kill(os.getpid(), signal.SIGKILL)
run_ranks(main, 1)
"""
    source = RUN_RANKS + source
    run = launch.instrumented(source)
    assert run.code == 9
    assert run.lines == []
    assert run.spooled == []
    (writer,) = read_run(run.run_dir)
    assert writer.info["ended_ns"] is None
    assert len(writer.iterations) == 3
    assert Path(writer.info["run_dir"]) == run.run_dir


def test_facts_from_two_threads_are_kept(tmp_path: Path) -> None:
    """The program's thread says which rank it is while the housekeeper saves: neither loses what the other wrote."""
    names = ("writer", "run_id")
    numbers = ("rank", "world_size", "local_rank")
    recorder = Recorder(str(tmp_path), 1, 0, 1 << 30)
    keeper = Housekeeper(recorder, {**dict.fromkeys(names, "x"), **dict.fromkeys(numbers, -1)})
    saves = 0
    ended = threading.Event()

    def save() -> None:
        nonlocal saves
        while not ended.is_set():
            keeper.save()
            saves += 1

    thread = threading.Thread(target=save)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for rank in range(300):
            before = saves
            keeper.update(rank=rank)
            while saves < before + 2 and thread.is_alive():
                time.sleep(0)
            assert keeper.info["rank"] == rank
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join(10)
    assert json.loads((tmp_path / "writer.json").read_text())["rank"] == 299
