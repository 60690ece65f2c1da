"""What the runtime reads from the environment: values, defaults, and one clear line for each bad value."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lens_auto
from lens_auto.groups import TrainingSpanGroup
from lens_auto.settings import VARIABLES, Settings, parse_bytes, parse_window

PER_STEP = TrainingSpanGroup.resolve("per_step")


def read(**environ: str) -> Settings:
    return Settings.from_env(environ)


def test_defaults() -> None:
    settings = read()
    assert settings.disabled is False
    assert settings.groups == PER_STEP
    assert settings.hang_timeout_s == 300.0
    assert settings.spool_dir is None
    assert settings.run_dir is None
    assert settings.run_id is None
    assert settings.max_run_bytes == 1_073_741_824
    assert settings.exit_timeout_s == 5.0
    assert settings.iteration_optimizer is None
    assert settings.quiet is False
    assert settings.propagation == "broadcast"
    assert settings.export_strategy == "single_rank"
    assert settings.window == ()
    assert settings.endpoint_configured is False
    assert settings.console is False
    assert settings.problems == []
    assert {source for _, _, source in settings.describe()} == {"default"}


def test_every_variable() -> None:
    settings = read(
        NEMO_LENS_SPAN_GROUPS="communication,step",
        NEMO_LENS_HANG_TIMEOUT_S="12.5",
        NEMO_LENS_SPOOL_DIR="/fast/spool",
        NEMO_LENS_RUN_DIR="/runs/one",
        NEMO_LENS_RUN_ID=" run-7 ",
        NEMO_LENS_MAX_RUN_BYTES="3 MiB",
        NEMO_LENS_EXIT_TIMEOUT_S="0",
        NEMO_LENS_ITERATION_OPTIMIZER="AdamW",
        NEMO_LENS_QUIET="yes",
        NEMO_LENS_PROPAGATION="Derived",
        NEMO_LENS_EXPORT_STRATEGY="all_ranks",
        NEMO_LENS_WINDOW="10-19,40",
        NEMO_LENS_DEVICE_TIMES="0",
        OTEL_TRACES_EXPORTER="console",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://collector:4317",
        NEMO_LENS_ENABLED="1",
    )
    assert settings.problems == []
    assert settings.describe() == [
        ("disabled", "no", "NEMO_LENS_ENABLED"),
        ("groups", "communication, step", "NEMO_LENS_SPAN_GROUPS"),
        ("hang_timeout_s", "12.5", "NEMO_LENS_HANG_TIMEOUT_S"),
        ("spool_dir", "/fast/spool", "NEMO_LENS_SPOOL_DIR"),
        ("run_dir", "/runs/one", "NEMO_LENS_RUN_DIR"),
        ("run_id", "run-7", "NEMO_LENS_RUN_ID"),
        ("max_run_bytes", "3145728", "NEMO_LENS_MAX_RUN_BYTES"),
        ("exit_timeout_s", "0", "NEMO_LENS_EXIT_TIMEOUT_S"),
        ("iteration_optimizer", "AdamW", "NEMO_LENS_ITERATION_OPTIMIZER"),
        ("quiet", "yes", "NEMO_LENS_QUIET"),
        ("propagation", "derived", "NEMO_LENS_PROPAGATION"),
        ("export_strategy", "all_ranks", "NEMO_LENS_EXPORT_STRATEGY"),
        ("window", "10-19, 40-40", "NEMO_LENS_WINDOW"),
        ("device_times", "no", "NEMO_LENS_DEVICE_TIMES"),
        ("endpoint_configured", "yes", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("console", "yes", "OTEL_TRACES_EXPORTER"),
    ]
    assert settings.groups == {"communication", "step"}
    assert settings.hang_timeout_s == 12.5
    assert settings.max_run_bytes == 3 * 1024 * 1024
    assert settings.exit_timeout_s == 0.0
    assert settings.window == ((10, 19), (40, 40))


@pytest.mark.parametrize(
    ("environ", "disabled", "source"),
    [
        ({"NEMO_LENS_DISABLED": "1"}, True, "NEMO_LENS_DISABLED"),
        ({"NEMO_LENS_DISABLED": "On"}, True, "NEMO_LENS_DISABLED"),
        ({"NEMO_LENS_DISABLED": "0"}, False, "NEMO_LENS_DISABLED"),
        ({"NEMO_LENS_ENABLED": "0"}, True, "NEMO_LENS_ENABLED"),
        ({"NEMO_LENS_ENABLED": "no"}, True, "NEMO_LENS_ENABLED"),
        ({"NEMO_LENS_ENABLED": "true"}, False, "NEMO_LENS_ENABLED"),
        ({"OTEL_SDK_DISABLED": "TRUE"}, True, "OTEL_SDK_DISABLED"),
        ({"OTEL_SDK_DISABLED": "false"}, False, "OTEL_SDK_DISABLED"),
        ({"NEMO_LENS_DISABLED": "0", "NEMO_LENS_ENABLED": "0"}, True, "NEMO_LENS_ENABLED"),
        ({"NEMO_LENS_DISABLED": "1", "NEMO_LENS_ENABLED": "1"}, True, "NEMO_LENS_DISABLED"),
        ({"NEMO_LENS_ENABLED": "1", "OTEL_SDK_DISABLED": "true"}, True, "OTEL_SDK_DISABLED"),
        ({"NEMO_LENS_DISABLED": ""}, False, "default"),
        ({"NEMO_LENS_ENABLED": "  "}, False, "default"),
    ],
)
def test_switches(environ: dict[str, str], disabled: bool, source: str) -> None:
    settings = Settings.from_env(environ)
    assert settings.disabled is disabled
    assert settings.describe()[0] == ("disabled", "yes" if disabled else "no", source)
    assert settings.problems == []


BOOLEANS = "expected 1/0, true/false, yes/no or on/off"


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("NEMO_LENS_DISABLED", "maybe", f"NEMO_LENS_DISABLED='maybe' is not valid: {BOOLEANS}; it is ignored"),
        ("NEMO_LENS_ENABLED", "2", f"NEMO_LENS_ENABLED='2' is not valid: {BOOLEANS}; it is ignored"),
        (
            "OTEL_SDK_DISABLED",
            "1",
            "OTEL_SDK_DISABLED='1' is not valid: expected true or false; OpenTelemetry reads it as false",
        ),
        (
            "NEMO_LENS_QUIET",
            "loud",
            f"NEMO_LENS_QUIET='loud' is not valid: {BOOLEANS}; the line at the end of a run is printed",
        ),
        (
            "NEMO_LENS_HANG_TIMEOUT_S",
            "soon",
            "NEMO_LENS_HANG_TIMEOUT_S='soon' is not valid: expected seconds, 0 or more (0 turns the hang watch off); "
            "using the default, 300",
        ),
        (
            "NEMO_LENS_EXIT_TIMEOUT_S",
            "-1",
            "NEMO_LENS_EXIT_TIMEOUT_S='-1' is not valid: expected seconds, 0 or more (0 does not wait); "
            "using the default, 5",
        ),
        (
            "NEMO_LENS_MAX_RUN_BYTES",
            "1X",
            "NEMO_LENS_MAX_RUN_BYTES='1X' is not valid: expected bytes, or a number with K, M or G; "
            "using the default, 1 GiB",
        ),
        (
            "NEMO_LENS_ITERATION_OPTIMIZER",
            "torch.optim.AdamW",
            "NEMO_LENS_ITERATION_OPTIMIZER='torch.optim.AdamW' is not valid: expected first, last or the class name of "
            "an optimizer, such as AdamW; iterations are found by repetition",
        ),
        (
            "NEMO_LENS_PROPAGATION",
            "radio",
            "NEMO_LENS_PROPAGATION='radio' is not valid: expected broadcast, derived, off; "
            "using the default, broadcast",
        ),
        (
            "NEMO_LENS_WINDOW",
            "9-3",
            "NEMO_LENS_WINDOW='9-3' is not valid: expected iterations such as 10-19,40; all iterations are recorded",
        ),
        (
            "NEMO_LENS_EXPORTER",
            "jaeger",
            "NEMO_LENS_EXPORTER='jaeger' is not valid: expected otlp, console or file; the run directory is used",
        ),
        (
            "NEMO_LENS_LOGS_ENABLED",
            "perhaps",
            "NEMO_LENS_LOGS_ENABLED='perhaps' is not valid: expected 1/0, true/false, yes/no or on/off; it is ignored",
        ),
        (
            "NEMO_LENS_SPAN_GROUPS",
            "step,stepp",
            "NEMO_LENS_SPAN_GROUPS='step,stepp' is not valid: unknown span group 'stepp'; valid presets: default, "
            "per_step, per_rollout, all; valid groups: checkpoint, communication, data_loading, evaluate, "
            "forward_backward, http_client, job, load_checkpoint, microbatch, model_init, optimizer, pipeline, server, "
            "step; using the default, per_step",
        ),
    ],
)
def test_a_bad_value_makes_one_line_and_leaves_the_defaults(variable: str, value: str, problem: str) -> None:
    settings = read(**{variable: value})
    assert settings.problems == [problem]
    # What is in force is what an empty environment gives, and no source claims otherwise (the SDK's switch is false).
    expected = read().describe()
    if variable == "OTEL_SDK_DISABLED":
        expected[0] = ("disabled", "no", variable)
    assert settings.describe() == expected


def test_a_problem_is_one_line_whatever_the_value() -> None:
    settings = read(NEMO_LENS_HANG_TIMEOUT_S="3\n00" + "0" * 500 + "\x1b[31m")
    [problem] = settings.problems
    assert problem.startswith("NEMO_LENS_HANG_TIMEOUT_S='3\\n000")
    assert len(problem.splitlines()) == 1
    assert len(problem) < 250


def test_several_problems_are_all_kept() -> None:
    settings = read(NEMO_LENS_WINDOW="x", NEMO_LENS_QUIET="x", NEMO_LENS_MAX_RUN_BYTES="x")
    assert [problem.partition("=")[0] for problem in settings.problems] == [
        "NEMO_LENS_MAX_RUN_BYTES",
        "NEMO_LENS_QUIET",
        "NEMO_LENS_WINDOW",
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NEMO_LENS_SPAN_GROUP", "did you mean NEMO_LENS_SPAN_GROUPS?"),
        ("NEMO_LENS_HANG_TIMEOUT", "did you mean NEMO_LENS_HANG_TIMEOUT_S?"),
        ("NEMO_LENS_COLOUR_OF_THE_SKY", f"lens-auto reads {', '.join(VARIABLES)}"),
    ],
)
def test_a_misspelt_variable_is_told_without_its_value(name: str, meant: str) -> None:
    assert read(**{name: "s3cret"}).problems == [f"{name} is not a variable of lens-auto and is ignored; {meant}"]


def test_every_variable_that_is_read_is_known() -> None:
    """Those of Lens are put together from a prefix and a key."""
    folder = Path(lens_auto.__file__).parent
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    config = (folder / "config.py").read_text()
    keys = re.findall(r'env\.(?:boolean|text|integer|fraction)\("([A-Z_]+)"', config)
    named = set(re.findall(r'"(NEMO_LENS_[A-Z_]*[A-Z])"', source))
    assert named | {f"NEMO_LENS_{key}" for key in keys} == set(VARIABLES)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "-0.1", "5s", "0x10"])
def test_seconds_are_finite_and_not_negative(value: str) -> None:
    settings = read(NEMO_LENS_HANG_TIMEOUT_S=value)
    assert settings.hang_timeout_s == 300.0
    assert len(settings.problems) == 1


def test_zero_turns_the_hang_watch_off() -> None:
    settings = read(NEMO_LENS_HANG_TIMEOUT_S="0")
    assert settings.hang_timeout_s == 0.0
    assert settings.describe()[2] == ("hang_timeout_s", "0 (no hang watch)", "NEMO_LENS_HANG_TIMEOUT_S")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("1073741824", 1 << 30),
        ("100B", 100),
        ("4k", 4096),
        ("4K", 4096),
        ("4KB", 4096),
        ("4KiB", 4096),
        ("16M", 16 << 20),
        ("2 GiB", 2 << 30),
        (" 2g ", 2 << 30),
        ("0", None),
        ("-1", None),
        ("", None),
        ("G", None),
        ("1.5G", None),
        ("1iB", None),
        ("1T", None),
        ("9" * 5000, None),
    ],
)
def test_parse_bytes(text: str, expected: int | None) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", ((7, 7),)),
        ("10-19,40", ((10, 19), (40, 40))),
        (" 40 , 10 - 19 ,", ((10, 19), (40, 40))),
        ("0-0", ((0, 0),)),
        ("19-10", None),
        ("-5", None),
        ("5-", None),
        ("1-2-3", None),
        ("a", None),
        ("1.5", None),
        ("²", None),
        (",", None),
        ("9" * 5000, None),
    ],
)
def test_parse_window(text: str, expected: tuple[tuple[int, int], ...] | None) -> None:
    assert parse_window(text) == expected


@pytest.mark.parametrize(
    ("environ", "endpoint", "console"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c"}, True, False),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False, False),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}, False, False),
        ({"OTEL_TRACES_EXPORTER": "none"}, False, False),
        ({"OTEL_TRACES_EXPORTER": "lens_file"}, False, False),
        ({"OTEL_TRACES_EXPORTER": "console, lens_file"}, False, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, False),
        ({"OTEL_TRACES_EXPORTER": "console,otlp_proto_http"}, True, True),
        ({"NEMO_LENS_EXPORTER": "console"}, False, True),
        ({"NEMO_LENS_EXPORTER": "OTLP"}, True, False),
        ({"NEMO_LENS_EXPORTER": "file"}, False, False),
        ({"NEMO_LENS_EXPORTER": "otlp", "OTEL_TRACES_EXPORTER": "console"}, False, True),
        ({"NEMO_LENS_EXPORTER": "file", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True, False),
    ],
)
def test_where_spans_go(environ: dict[str, str], endpoint: bool, console: bool) -> None:
    settings = Settings.from_env(environ)
    assert (settings.endpoint_configured, settings.console) == (endpoint, console)
    assert settings.problems == []


@pytest.mark.parametrize(
    ("value", "expected"), [("FIRST", "first"), ("last", "last"), ("SGD", "SGD"), ("my_Opt", "my_Opt")]
)
def test_iteration_optimizer(value: str, expected: str) -> None:
    settings = read(NEMO_LENS_ITERATION_OPTIMIZER=value)
    assert settings.iteration_optimizer == expected
    assert settings.problems == []


def test_groups_can_be_none() -> None:
    assert read(NEMO_LENS_SPAN_GROUPS=",").groups == frozenset()
    assert read(NEMO_LENS_SPAN_GROUPS="").groups == PER_STEP


def test_importing_settings_imports_nothing_heavy() -> None:
    heavy = ["dataclasses", "inspect", "asyncio", "re", "logging", "opentelemetry", "wrapt", "numpy", "torch"]
    # -S: `site` and path files of the environment import what they like.
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
before = set(sys.modules)
import typing
typing_brings = set(sys.modules) - before
import lens_auto.settings, lens_auto.groups, lens_auto.state
new = set(sys.modules) - before - typing_brings
print(sorted(name for name in {heavy!r} if name in new))
"""
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
