"""Frameworks from the package index, unmodified: each trains for real, bare and instrumented, and counts its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compat import child
from compat.child import PROGRAMS, Ended
from compat.environment import Environment, Environments, Prepared, Unavailable
from compat.row import Row
from lens_auto import semconv
from lens_auto.export.spans import run_spans
from lens_auto.recorder.read import RunDirectory

TORCH = "torch==2.13.0"
INSTRUMENTED = {"NEMO_LENS_SPAN_GROUPS": "all", "NEMO_LENS_QUIET": "1"}
TORCHRUN = ("torchrun", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Program:
    """A program of a framework.

    Attributes:
        name: for `--only`.
        title: in the table.
        environment: what it needs.
        distribution: whose version the table shows.
        command: `{programs}` is the folder of ours, `{site}` that of the installed packages.
        ranks: how many processes train.
        variables: added to the environment.
        timeout_s: for one run.
    """

    name: str
    title: str
    environment: Environment
    distribution: str
    command: tuple[str, ...]
    ranks: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300


_HUGGING_FACE = Environment("hugging-face", (TORCH, "transformers==5.24.0", "accelerate==1.15.0"))
_DEEPSPEED = Environment("deepspeed", (TORCH, "deepspeed==0.19.8"), build=(TORCH, "setuptools", "wheel"))
_MEGATRON = Environment("megatron", (TORCH, "megatron-core==0.16.1"))
# From 0.3 on, attention in its language models needs a CUDA device.
_TORCHTITAN = Environment("torchtitan", (TORCH, "torchtitan==0.2.2", "triton"))
LIGHTNING = Environment("lightning", (TORCH, "lightning==2.6.6"))

PROGRAMS_OF_FRAMEWORKS: tuple[Program, ...] = (
    Program(
        "transformers",
        "transformers `Trainer`",
        _HUGGING_FACE,
        "transformers",
        (*TORCHRUN, "{programs}/transformers_trainer.py"),
    ),
    Program(
        "accelerate",
        "accelerate, its `test_script.py`",
        _HUGGING_FACE,
        "accelerate",
        (*TORCHRUN, "{programs}/count_steps.py", "{site}/accelerate/test_utils/scripts/test_script.py"),
        variables={"ACCELERATE_USE_CPU": "true"},
    ),
    *(
        Program(
            f"lightning-{how}",
            f'Lightning, `strategy="{strategy}"` ({how})',
            LIGHTNING,
            "lightning",
            ("python", "{programs}/lightning_ddp.py", strategy),
        )
        for how, strategy in (("subprocess", "ddp"), ("spawn", "ddp_spawn"), ("fork", "ddp_fork"))
    ),
    *(
        Program(
            f"deepspeed-{stage}",
            f"DeepSpeed, ZeRO stage {stage} on CPU",
            _DEEPSPEED,
            "deepspeed",
            (*TORCHRUN, "{programs}/deepspeed_zero.py", stage),
            variables={"DS_ACCELERATOR": "cpu"},
            timeout_s=600,  # it compiles an extension when it first runs
        )
        for stage in ("1", "3")
    ),
    Program(
        "megatron",
        "Megatron-core, GPT in 2 pipeline stages, on CPU",
        _MEGATRON,
        "megatron-core",
        (*TORCHRUN, "{programs}/megatron_gpt.py"),
    ),
    Program(
        "torchtitan",
        "torchtitan, Llama 3 debug model, tensor parallel, on CPU",
        _TORCHTITAN,
        "torchtitan",
        (*TORCHRUN, "{programs}/torchtitan_llama.py", "2"),
    ),
)


def check(program: Program, environments: Environments, folder: Path) -> Row:
    """Run a program bare and instrumented, and hold what was found against what it reported."""
    try:
        prepared = environments.prepare(program.environment)
        version = f"torch {prepared.version('torch')}"
        if program.distribution != "torch":
            version = f"{prepared.version(program.distribution)}, {version}"
    except Unavailable as reason:
        return Row(program.title, unavailable=str(reason))
    bare = _run(program, prepared, folder / "bare", ())
    instrumented = _run(program, prepared, folder / "instrumented", ("opentelemetry-instrument",))
    reported = _reported(instrumented)
    found = _found(instrumented.run_dir) if instrumented.run_dir.exists() else []
    if all(evaluations is None for _, evaluations in reported):  # it does not count them
        found = [(steps, None) for steps, _ in found]
    return Row(
        program.title,
        version,
        _how(bare, bare),
        _how(instrumented, bare),
        _shown(reported),
        _shown(found),
        problem(program.ranks, bare, instrumented, found),
    )


def _run(program: Program, prepared: Prepared, folder: Path, before: tuple[str, ...]) -> Ended:
    (site,) = prepared.folder.glob("lib/python*/site-packages")
    places = {"programs": str(PROGRAMS), "site": str(site)}
    command = [*before, *(word.format(**places) for word in program.command)]
    variables = {**program.variables, **(INSTRUMENTED if before else {})}
    return child.run(command, prepared.bin, folder, variables, program.timeout_s)


def _reported(ended: Ended) -> list[tuple[int, int | None]]:
    """Steps and evaluations of each rank, as the program counted them."""
    return [(each["steps"], each["evaluations"]) for _, each in sorted(ended.results.items())]


def _found(run_dir: Path) -> list[tuple[int, int | None]]:
    """Iterations and evaluations of each process that recorded as a rank, by rank."""
    counted = []
    for writer in run_spans(RunDirectory(run_dir)):
        names = Counter(span.name for span in writer.spans)
        rank = writer.writer.info.rank
        counted.append((rank, names[semconv.SPAN_ITERATION], names[semconv.SPAN_EVALUATE]))
    return [(iterations, evaluations) for _, iterations, evaluations in sorted(counted)]


def problem(ranks: int, bare: Ended, instrumented: Ended, found: list[tuple[int, int | None]]) -> str:
    """What is wrong, in one line; empty where nothing is."""
    if bare.problem:
        return f"bare: {bare.problem}"
    if instrumented.problem:
        return f"instrumented: {instrumented.problem}"
    reported = _reported(instrumented)
    if len(reported) != ranks or not all(steps for steps, _ in reported):
        return f"it trained nothing, or not on {ranks} ranks: {_shown(reported)}"
    if bare.results != instrumented.results:
        return f"steps or numbers differ: bare {bare.results}, instrumented {instrumented.results}"
    return "" if found == reported else f"reported {_shown(reported)}, found {_shown(found)}"


def _how(ended: Ended, bare: Ended) -> str:
    if ended.problem:
        return ended.problem
    if ended is bare:
        return "passes"
    return "the same, bitwise" if any(each["numbers"] for each in bare.results.values()) else "passes"


def _shown(counts: list[tuple[int, int | None]]) -> str:
    if not counts:
        return "nothing"
    each = [f"{steps}" if evaluations is None else f"{steps} + {evaluations} eval" for steps, evaluations in counts]
    return f"{each[0]} on {len(each)} ranks" if len(set(each)) == 1 else "; ".join(each)
