"""Every public name of `nemo-lens`, with the behaviour that a program written for it relies on, normal and failing.

A program that replaces `nemo.lens` by `lens_auto` in its imports. How each part works in detail is tested beside that
part; here names, signatures and outcomes are held against the interface as it is documented.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from launch import PYTHON, Launcher
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import StatusCode

import lens_auto
from lens_auto import contrib, fallbacks, instruments, resources, semconv, state, strategies

TOP_LEVEL = [
    "NemoLensConfig",
    "SpanGroup",
    "TelemetryHandle",
    "setup_telemetry",
    "span_cm",
    "managed_span",
    "trace_fn",
    "safe_set_span_attributes",
    "redact_value",
    "DEFAULT_REDACT_KEYS",
    "inject_context",
    "extract_context",
    "broadcast_trace_context",
    "create_linked_span",
    "get_tracer",
    "get_meter",
    "is_span_group_enabled",
    "set_enabled_span_groups",
    "ExportStrategy",
    "register_export_strategy",
    "registered_strategies",
    "unregister_export_strategy",
    "__version__",
]
SUBMODULES = [
    "config",
    "groups",
    "state",
    "helpers",
    "propagation",
    "distributed",
    "strategies",
    "handle",
    "semconv",
    "resources",
    "sampling",
    "fallbacks",
    "logging_bridge",
    "instruments",
    "contrib",
]

# A name, and its parameters as documented: `name`, `name=default`, `*name`, `**name`. More may follow, with defaults.
SIGNATURES = {
    "config:NemoLensConfig.from_env": "prefix='NEMO_LENS' fallback_prefix='' span_group_cls=SpanGroup",
    "handle:setup_telemetry": (
        "config rank=0 world_size=1 resource_attributes=None span_exporter=None metric_reader=None export_strategy=None"
        " _allow_reinit=False"
    ),
    "handle:TelemetryHandle.shutdown": "self timeout_ms=5000",
    "groups:SpanGroup.resolve": "spec",
    "state:is_span_group_enabled": "group",
    "state:set_enabled_span_groups": "groups",
    "state:set_pp_trace_carrier": "carrier",
    "state:get_pp_trace_carrier": "",
    "helpers:managed_span": "group name tracer=None **attributes",
    "helpers:trace_fn": "group name tracer=None",
    "helpers:span_cm": "name tracer=None record_exception=True **attributes",
    "helpers:redact_value": "key value redact_keys=DEFAULT_REDACT_KEYS",
    "helpers:safe_set_span_attributes": "span attributes redact_keys=DEFAULT_REDACT_KEYS",
    "helpers:get_tracer": "name='nemo.lens'",
    "helpers:get_meter": "name='nemo.lens'",
    "logging_bridge:setup_logging_bridge": "logger_name='' level=20",
    "propagation:inject_context": "carrier",
    "propagation:extract_context": "carrier",
    "distributed:broadcast_trace_context": "rank src_rank=0",
    "distributed:create_linked_span": "tracer name remote_context=None remote_carrier=None **attributes",
    "strategies:register_export_strategy": "name fn allow_override=False",
    "strategies:unregister_export_strategy": "name",
    "strategies:registered_strategies": "",
    "strategies:get_export_strategy": "name",
    "sampling:RankAwareSampler": "rank world_size sample_rate=1.0",
    "resources:detect_resource": "",
    "resources.local:detect_local": "",
    "resources.slurm:detect_slurm": "",
    "resources.kubernetes:detect_kubernetes": "",
    "instruments.inference:record_inference_metrics": (
        "meter request_duration_s=None model=None input_tokens=None output_tokens=None"
        " operation_name='text_completion' provider_name='nemo'"
    ),
    "instruments.rl:record_rl_metrics": (
        "meter reward_mean=None kl_divergence=None policy_loss=None value_loss=None entropy=None"
        " response_length_mean=None grad_norm=None learning_rate=None throughput_tokens_per_sec=None"
        " generation_duration_ms=None rollout_duration_ms=None"
    ),
    "instruments.gym:record_gym_metrics": (
        "meter server_request_duration_ms=None rollout_duration_ms=None verify_duration_ms=None"
        " verify_success_rate=None active_servers=None"
    ),
    "contrib.fastapi:instrument_fastapi": "app",
    "contrib.aiohttp:instrument_aiohttp_client": "",
    "contrib.ray:inject_ray_context": "",
    "contrib.ray:extract_ray_context": "carrier=None",
    "contrib.ray:traced_remote_call": "method tracer=None",
    "contrib.ray:ray_dispatch_with_context": "remote_fn *args _carrier=None **kwargs",
    "contrib.nccl:serialize_context": "",
    "contrib.nccl:deserialize_context": "data",
    "contrib.nccl:extract_nccl_context": "data",
    "fallbacks:trace_fn": "group name tracer=None",
    "fallbacks:managed_span": "group name tracer=None **attributes",
    "fallbacks:span_cm": "name tracer=None record_exception=True **attributes",
    "fallbacks:is_span_group_enabled": "group",
    "fallbacks:safe_set_span_attributes": "span attributes redact_keys=frozenset()",
}


def find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(f"lens_auto.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours or OpenTelemetry's, and the span groups as they were."""
    for name in list(os.environ):
        if re.match(r"_?NEMO_|OTEL_|SLURM_|K8S_|KUBERNETES_|WANDB_|DEPLOYMENT_ENV|ENVIRONMENT|(LOCAL_)?RANK$", name):
            monkeypatch.delenv(name)
    before = state.enabled_span_groups
    yield
    lens_auto.set_enabled_span_groups(before)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> trace.Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_name_of_the_top_level() -> None:
    for name in TOP_LEVEL:
        assert hasattr(lens_auto, name), name
    assert set(TOP_LEVEL) <= set(lens_auto.__all__)
    assert re.fullmatch(r"\d+\.\d+.*", lens_auto.__version__)
    with pytest.raises(AttributeError, match="no attribute 'setup_telemtry'"):
        _ = lens_auto.setup_telemtry


@pytest.mark.parametrize("name", SUBMODULES)
def test_every_submodule(name: str) -> None:
    assert importlib.import_module(f"lens_auto.{name}") is getattr(lens_auto, name)


@pytest.mark.parametrize("place", SIGNATURES)
def test_every_signature(place: str) -> None:
    """Called by position or by name as documented, it takes the same; what we added has a default."""
    parameters = list(inspect.signature(find(place)).parameters.values())
    for wanted in SIGNATURES[place].split():
        name, _, default = wanted.partition("=")
        found = parameters.pop(0)
        assert found.name == name.lstrip("*"), wanted
        if name.startswith("**"):
            assert found.kind is inspect.Parameter.VAR_KEYWORD
        elif name.startswith("*"):
            assert found.kind is inspect.Parameter.VAR_POSITIONAL
        elif not default:
            assert found.default is inspect.Parameter.empty, wanted
        elif default == "DEFAULT_REDACT_KEYS":
            assert found.default == lens_auto.DEFAULT_REDACT_KEYS
        elif default == "SpanGroup":
            assert found.default is lens_auto.SpanGroup
        else:
            assert repr(found.default) == default, wanted
    assert all(more.default is not inspect.Parameter.empty for more in parameters), parameters


def test_names_that_are_no_functions() -> None:
    assert set(strategies.BUILTIN_STRATEGIES) == {"single_rank", "all_ranks", "sampled", "first_rank_per_node"}
    assert lens_auto.ExportStrategy is strategies.ExportStrategy
    assert instruments is importlib.import_module("lens_auto.instruments")
    for name in ("fastapi", "aiohttp", "ray", "nccl"):
        assert importlib.import_module(f"lens_auto.contrib.{name}") is getattr(contrib, name)
    values = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
    assert values >= {
        *(f"dl.{name}" for name in ("rank", "world_size", "local_rank", "iteration", "microbatch_id", "loss")),
        *(f"dl.{name}" for name in ("grad_norm", "learning_rate", "batch_size", "sequence_length")),
        *(f"dl.{kind}_parallel.{what}" for kind in ("data", "tensor", "pipeline") for what in ("rank", "size")),
        *("dl.throughput_tflops", "dl.throughput_tokens_per_sec", "nemo.run.id", "nemo.user.id", "nemo.span.truncated"),
    }


# --- configuration ----------------------------------------------------------------------------------------------------

# Field, default, variable, a text for it, what that becomes.
FIELDS: list[tuple[str, Any, str, str, Any]] = [
    ("enabled", False, "NEMO_LENS_ENABLED", "yes", True),
    ("service_name", "nemo", "OTEL_SERVICE_NAME", "trainer", "trainer"),
    ("export_strategy", "single_rank", "NEMO_LENS_EXPORT_STRATEGY", "all_ranks", "all_ranks"),
    ("export_rank", -1, "NEMO_LENS_EXPORT_RANK", "3", 3),
    ("export_sample_rate", 1.0, "NEMO_LENS_EXPORT_SAMPLE_RATE", "0.25", 0.25),
    ("sampler_enabled", False, "NEMO_LENS_SAMPLER_ENABLED", "on", True),
    ("traces_enabled", True, "NEMO_LENS_TRACES_ENABLED", "off", False),
    ("metrics_enabled", True, "NEMO_LENS_METRICS_ENABLED", "False", False),
    ("logs_enabled", False, "NEMO_LENS_LOGS_ENABLED", "TRUE", True),
    ("span_groups", "default", "NEMO_LENS_SPAN_GROUPS", "per_step", "per_step"),
    ("exporter", "otlp", "NEMO_LENS_EXPORTER", "console", "console"),
    ("run_id", "", "NEMO_LENS_RUN_ID", "run-7", "run-7"),
    ("user", "", "NEMO_LENS_USER_ID", "kim", "kim"),
    ("wandb_entity", "", "WANDB_ENTITY", "team", "team"),
    ("wandb_project", "", "WANDB_PROJECT", "gpt", "gpt"),
]


@pytest.mark.parametrize(("field", "default", "variable", "text", "value"), FIELDS)
def test_every_field(
    monkeypatch: pytest.MonkeyPatch, field: str, default: Any, variable: str, text: str, value: Any
) -> None:
    assert getattr(lens_auto.NemoLensConfig(), field) == default
    assert getattr(lens_auto.NemoLensConfig.from_env(), field) == default
    monkeypatch.setenv(variable, text)
    assert getattr(lens_auto.NemoLensConfig.from_env(), field) == value
    assert getattr(lens_auto.NemoLensConfig(**{field: value}), field) == value
    if variable.startswith("NEMO_LENS_"):
        other = variable.replace("NEMO_LENS", "NEMO_GYM_OTEL")
        monkeypatch.delenv(variable)
        monkeypatch.setenv(other, text)
        assert getattr(lens_auto.NemoLensConfig.from_env("X", "NEMO_GYM_OTEL"), field) == value


@pytest.mark.parametrize("text", ["1", "TRUE", "Yes", "on", "0", "false", "NO", "Off"])
def test_booleans(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NEMO_LENS_ENABLED", text)
    assert lens_auto.NemoLensConfig.from_env().enabled is (text.lower() in ("1", "true", "yes", "on"))


@pytest.mark.parametrize(
    ("variable", "text"), [("ENABLED", "maybe"), ("EXPORT_RANK", "last"), ("EXPORT_SAMPLE_RATE", "1.5")]
)
def test_bad_values_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(f"NEMO_LENS_{variable}", text)
    with pytest.raises(ValueError, match=f"NEMO_LENS_{variable}='{text}'"):
        lens_auto.NemoLensConfig.from_env()


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_a_sample_rate_outside_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="export_sample_rate"):
        lens_auto.NemoLensConfig(export_sample_rate=rate)


# --- span groups ------------------------------------------------------------------------------------------------------


def test_span_groups() -> None:
    group = lens_auto.SpanGroup
    names = ("JOB", "CHECKPOINT", "EVALUATE", "MODEL_INIT", "LOAD_CHECKPOINT", "STEP", "FORWARD_BACKWARD", "OPTIMIZER")
    assert [getattr(group, name) for name in names] == [name.lower() for name in names]
    assert {name.lower() for name in names} == group.ALL_GROUPS
    assert group._PRESETS["default"] == {"job", "checkpoint", "evaluate"}
    assert group._PRESETS["all"] == group.ALL_GROUPS
    assert {"step"} < group._PRESETS["per_step"]
    assert group.resolve(" Default, STEP ") == {"job", "checkpoint", "evaluate", "step"}
    assert lens_auto.NemoLensConfig(span_groups="job").resolved_span_groups == frozenset({"job"})
    with pytest.raises(ValueError, match=r"stepp.*checkpoint.*step"):
        group.resolve("job,stepp")

    class Ours(lens_auto.SpanGroup):
        ROLLOUT = "rollout"
        ALL_GROUPS = lens_auto.SpanGroup.ALL_GROUPS | {ROLLOUT}
        _PRESETS: ClassVar[dict[str, frozenset[str]]] = {
            **lens_auto.SpanGroup._PRESETS,
            "rl": frozenset({ROLLOUT}),
        }

    assert Ours.resolve("rl,job") == {"rollout", "job"}
    with pytest.raises(ValueError, match="rollout"):
        group.resolve("rollout")


def test_state() -> None:
    lens_auto.set_enabled_span_groups(frozenset({"step"}))
    assert (lens_auto.is_span_group_enabled("step"), lens_auto.is_span_group_enabled("job")) == (True, False)
    carrier = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    state.set_pp_trace_carrier(carrier)
    try:
        assert state.get_pp_trace_carrier() == carrier
    finally:
        state.set_pp_trace_carrier(None)
    assert state.get_pp_trace_carrier() is None


# --- primitives -------------------------------------------------------------------------------------------------------


def test_primitives_while_the_group_is_on(tracer: trace.Tracer, exporter: InMemorySpanExporter) -> None:
    lens_auto.set_enabled_span_groups(frozenset({"step"}))

    @lens_auto.trace_fn("step", "traced", tracer)
    def traced(value: int) -> int:
        assert trace.get_current_span().get_span_context().is_valid
        return value + 1

    with lens_auto.managed_span("step", "managed", tracer, loss=0.5) as span:
        assert span is trace.get_current_span()
        with lens_auto.span_cm("always", tracer, kind="x") as inner:
            lens_auto.safe_set_span_attributes(
                inner, {"none": None, "text": "a secret", "object": object(), "list": [1, 2], "nested": [[1]]}
            )
    assert traced(1) == 2
    for context in (
        lens_auto.managed_span("step", "failing", tracer),
        lens_auto.span_cm("failing quietly", tracer, record_exception=False),
    ):
        with pytest.raises(LookupError), context:
            raise LookupError("no")
    found = {each.name: each for each in exporter.get_finished_spans()}
    assert list(found) == ["always", "managed", "traced", "failing", "failing quietly"]
    assert found["managed"].attributes == {"loss": 0.5}
    assert found["always"].attributes == {"kind": "x", "text": "[REDACTED]", "list": (1, 2)}
    assert found["always"].parent is not None
    assert [found[name].status.status_code for name in ("traced", "failing", "failing quietly")] == [
        StatusCode.UNSET,
        StatusCode.ERROR,
        StatusCode.ERROR,
    ]
    assert [len(found[name].events) for name in ("failing", "failing quietly")] == [1, 0]


def test_primitives_while_the_group_is_off(tracer: trace.Tracer, exporter: InMemorySpanExporter) -> None:
    lens_auto.set_enabled_span_groups(frozenset({"job"}))
    with lens_auto.managed_span("step", "managed", tracer, loss=0.5) as span:
        assert span is None
    assert lens_auto.trace_fn("step", "traced", tracer)(len)([1]) == 1
    with pytest.raises(LookupError), lens_auto.managed_span("step", "failing", tracer):
        raise LookupError("no")
    assert exporter.get_finished_spans() == ()


def test_redaction() -> None:
    keys = {"prompt", "input_text", "output_text", "text", "password", "token", "secret", "key"}
    assert set(lens_auto.DEFAULT_REDACT_KEYS) == keys
    assert {lens_auto.redact_value(key, "x") for key in keys} == {"[REDACTED]"}
    assert lens_auto.redact_value("loss", 0.5) == "0.5"
    assert lens_auto.redact_value("loss", "x", {"loss"}) == "[REDACTED]"


# --- propagation ------------------------------------------------------------------------------------------------------


def test_a_context_goes_out_and_comes_in(tracer: trace.Tracer) -> None:
    carrier: dict[str, str] = {}
    with tracer.start_as_current_span("here") as span:
        lens_auto.inject_context(carrier)
        context = span.get_span_context()
    assert carrier["traceparent"].split("-")[1] == trace.format_trace_id(context.trace_id)
    inside = trace.get_current_span(lens_auto.extract_context(carrier)).get_span_context()
    assert (inside.trace_id, inside.span_id, inside.is_remote) == (context.trace_id, context.span_id, True)
    invalid = lens_auto.extract_context({"traceparent": "nonsense"})
    assert not trace.get_current_span(invalid).get_span_context().is_valid


def test_a_linked_span(tracer: trace.Tracer, exporter: InMemorySpanExporter) -> None:
    carrier = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    lens_auto.create_linked_span(tracer, "by carrier", remote_carrier=carrier, rank=1).end()
    remote = lens_auto.extract_context(carrier)
    lens_auto.create_linked_span(tracer, "by context", remote_context=remote).end()
    lens_auto.create_linked_span(tracer, "nothing").end()
    lens_auto.create_linked_span(tracer, "damaged", remote_carrier={"traceparent": "no"}).end()
    linked = {each.name: [link.context.span_id for link in each.links] for each in exporter.get_finished_spans()}
    assert linked == {
        "by carrier": [int("2" * 16, 16)],
        "by context": [int("2" * 16, 16)],
        "nothing": [],
        "damaged": [],
    }
    assert dict(exporter.get_finished_spans()[0].attributes or {}) == {"rank": 1}


def test_a_broadcast_without_a_group_is_none() -> None:
    """With one: `test_distributed.py`, over gloo."""
    assert lens_auto.broadcast_trace_context(0) is None


# --- strategies and the sampler ---------------------------------------------------------------------------------------


def test_builtin_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    def exporting(**fields: Any) -> list[int]:
        config = lens_auto.NemoLensConfig(**fields)
        strategy = strategies.get_export_strategy(config.export_strategy)
        return [rank for rank in range(8) if strategy(config, rank, 8)]

    assert exporting() == [7]
    assert exporting(export_rank=2) == [2]
    assert exporting(export_strategy="all_ranks") == list(range(8))
    assert exporting(export_strategy="sampled", export_sample_rate=0.0) == []
    some = exporting(export_strategy="sampled", export_sample_rate=0.5)
    assert some == exporting(export_strategy="sampled", export_sample_rate=0.5)
    assert 0 < len(some) < 8
    assert exporting(export_strategy="first_rank_per_node") == list(range(8))  # no LOCAL_RANK counts as 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert exporting(export_strategy="first_rank_per_node") == []


def test_strategies_of_the_programs_own() -> None:
    def even(config: Any, rank: int, world_size: int) -> bool:
        return rank % 2 == 0

    before = lens_auto.registered_strategies()
    assert before == sorted(before)
    lens_auto.register_export_strategy("even", even)
    try:
        assert "even" in lens_auto.registered_strategies()
        assert strategies.get_export_strategy("even") is even
        for name in ("even", "all_ranks", ""):
            with pytest.raises(ValueError):
                lens_auto.register_export_strategy(name, even)
        lens_auto.register_export_strategy("even", even, allow_override=True)
    finally:
        lens_auto.unregister_export_strategy("even")
    assert lens_auto.registered_strategies() == before
    for name in ("even", "all_ranks"):
        with pytest.raises(ValueError):
            lens_auto.unregister_export_strategy(name)
    with pytest.raises(ValueError, match=r"every_second.*all_ranks.*single_rank"):
        strategies.get_export_strategy("every_second")


def test_the_rank_aware_sampler() -> None:
    sampler = importlib.import_module("lens_auto.sampling").RankAwareSampler
    config = lens_auto.NemoLensConfig(export_strategy="sampled", export_sample_rate=0.5)
    sampled = strategies.get_export_strategy("sampled")
    for rank in range(16):
        made = sampler(rank, 16, 0.5)
        decisions = {made.should_sample(None, trace_id, "span").decision for trace_id in (1, 1 << 100, (1 << 128) - 1)}
        kept = sampled(config, rank, 16)
        assert decisions == {Decision.RECORD_AND_SAMPLE if kept else Decision.DROP}
    assert sampler(0, 1).should_sample(None, 1, "span").decision is Decision.RECORD_AND_SAMPLE


# --- resources --------------------------------------------------------------------------------------------------------


def test_detected_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(resources.slurm.detect_slurm()) == {}
    assert dict(resources.kubernetes.detect_kubernetes()) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name, value in {"JOB_ID": "17", "JOB_NAME": "gpt", "NODELIST": "n[1-2]", "NNODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("K8S_NAMESPACE", "train")
    monkeypatch.setenv("K8S_POD_NAME", "gpt-0")
    found = dict(resources.detect_resource())
    assert found["host.gpu.count"] == 2
    assert found["process.pid"] == os.getpid()
    assert found["slurm.job.id"] == "17"
    assert (found["slurm.job.name"], found["slurm.nodelist"]) == ("gpt", "n[1-2]")
    assert (found["k8s.namespace.name"], found["k8s.pod.name"]) == ("train", "gpt-0")
    assert dict(resources.local.detect_local()).items() <= found.items()


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "arguments", "expected"),
    [
        (
            "instruments.inference:record_inference_metrics",
            {"request_duration_s": 0.5, "model": "m", "input_tokens": 3, "output_tokens": 4},
            {"gen_ai.server.request.duration": ("s", 1), "gen_ai.client.token.usage": ("{token}", 2)},
        ),
        (
            "instruments.rl:record_rl_metrics",
            {"reward_mean": 1.0, "throughput_tokens_per_sec": 5.0, "rollout_duration_ms": 7.0},
            {
                "rl.reward.mean": (None, 1),
                "rl.throughput.tokens_per_sec": (None, 1),
                "rl.rollout.duration_ms": ("ms", 1),
            },
        ),
        (
            "instruments.gym:record_gym_metrics",
            {"verify_success_rate": 0.5, "active_servers": 3, "server_request_duration_ms": 2.0},
            {
                "gym.verify.success_rate": (None, 1),
                "gym.servers.active": (None, 1),
                "gym.server.request_duration_ms": ("ms", 1),
            },
        ),
        ("instruments.gym:record_gym_metrics", {}, {}),
    ],
)
def test_instruments(place: str, arguments: dict[str, Any], expected: dict[str, tuple[str | None, int]]) -> None:
    """Names, units and how many points; what is not given is not recorded."""
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    find(place)(meter, **arguments)
    data = reader.get_metrics_data()
    metrics = [
        metric
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    assert {metric.name for metric in metrics} == set(expected)
    for metric in metrics:
        unit, points = expected[metric.name]
        assert len(metric.data.data_points) == points
        assert unit is None or metric.unit == unit
        if metric.name.startswith("gen_ai."):
            assert metric.data.data_points[0].attributes["gen_ai.request.model"] == "m"
            assert metric.data.data_points[0].attributes["gen_ai.operation.name"] == "text_completion"


# --- contrib and fallbacks --------------------------------------------------------------------------------------------


def test_ray_carriers(tracer: trace.Tracer, exporter: InMemorySpanExporter) -> None:
    """What goes to a task, without Ray; with a real one: `test_contrib.py`."""
    ray = contrib.ray

    class Task:
        @staticmethod
        def remote(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

    def work(value: int) -> int:
        return value + 1

    with tracer.start_as_current_span("driver") as span:
        carrier = ray.inject_ray_context()
        args, kwargs = ray.ray_dispatch_with_context(Task, 1, name="x")
        _, given = ray.ray_dispatch_with_context(Task, _carrier={"traceparent": "mine"})
        assert ray.extract_ray_context() == otel_context.get_current()
    assert (args, kwargs) == ((1,), {"name": "x", "_otel_carrier": carrier})
    assert given == {"_otel_carrier": {"traceparent": "mine"}}
    traced = ray.traced_remote_call(work, tracer)
    assert traced(1, _otel_carrier=carrier) == traced(1) == 2
    child, alone = exporter.get_finished_spans()[1:]
    assert child.name.endswith("work")
    assert child.parent is not None and child.parent.span_id == span.get_span_context().span_id
    assert alone.parent is None


def test_context_in_bytes(tracer: trace.Tracer) -> None:
    nccl = contrib.nccl
    with tracer.start_as_current_span("sender") as span:
        data = nccl.serialize_context()
    assert json.loads(data)["traceparent"] == nccl.deserialize_context(data)["traceparent"]
    received = trace.get_current_span(nccl.extract_nccl_context(data)).get_span_context()
    assert received.span_id == span.get_span_context().span_id
    for damaged in (b"", b"\xff\x00", b"[1]", data[:-5]):
        assert nccl.deserialize_context(damaged) is None
        assert nccl.extract_nccl_context(damaged) == otel_context.get_current()


def test_fastapi_and_aiohttp_can_be_instrumented_and_twice() -> None:
    """Over sockets: `test_contrib.py`; without the packages, too."""
    fastapi = pytest.importorskip("fastapi")
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.aiohttp_client")
    app = fastapi.FastAPI()
    contrib.fastapi.instrument_fastapi(app)
    contrib.fastapi.instrument_fastapi(app)
    assert app._is_instrumented_by_opentelemetry
    instrumentor = instrumentation.AioHttpClientInstrumentor()
    try:
        contrib.aiohttp.instrument_aiohttp_client()
        contrib.aiohttp.instrument_aiohttp_client()
        assert instrumentor.is_instrumented_by_opentelemetry
    finally:
        instrumentor.uninstrument()


def test_fallbacks() -> None:
    def function() -> None: ...

    assert fallbacks.trace_fn("step", "x")(function) is function
    with fallbacks.managed_span("step", "x") as one, fallbacks.span_cm("x", kind="y") as two:
        assert (one, two) == (None, None)
    assert fallbacks.is_span_group_enabled("step") is False
    assert fallbacks.safe_set_span_attributes(None, {"a": 1}) is None  # type: ignore[arg-type, func-returns-value]


# --- a whole program --------------------------------------------------------------------------------------------------

PROGRAM = """
import json, logging, sys
from lens_auto import NemoLensConfig, get_meter, get_tracer, is_span_group_enabled
from lens_auto import managed_span, setup_telemetry, trace_fn

config = NemoLensConfig.from_env()
attributes = {"team": "us", "bad": object()}
handle = setup_telemetry(config, rank=int(sys.argv[1]), world_size=2, resource_attributes=attributes)
facts = {"exporting": handle.is_exporting, "step": is_span_group_enabled("step")}
try:
    setup_telemetry(config, rank=0, world_size=2)
except RuntimeError as error:
    facts["second"] = str(error)

@trace_fn("step", "inner")
def inner():
    logging.getLogger("job").warning("from the step")

with managed_span("step", "train.step", iteration=3):
    inner()
get_meter().create_counter("steps").add(2)
get_tracer().start_span("left open")
handle.shutdown(timeout_ms=3000)
facts["after"] = is_span_group_enabled("step")
handle.shutdown()
with managed_span("step", "too late"):
    pass
print(json.dumps(facts), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run_program(launch_once: Launcher) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    program = launch_once.program(PROGRAM)

    def run(rank: int, **variables: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        environment = {
            "NEMO_LENS_ENABLED": "1",
            "NEMO_LENS_EXPORTER": "console",
            "NEMO_LENS_SPAN_GROUPS": "per_step",
            "NEMO_LENS_LOGS_ENABLED": "1",
            "NEMO_LENS_RUN_ID": "run-7",
            "NEMO_LENS_USER_ID": "kim",
            "DEPLOYMENT_ENV": "lab",
            "OTEL_SERVICE_NAME": "trainer",
            **variables,
        }
        done = launch_once.run(*PYTHON, program, str(rank), env=environment)
        assert done.code == 0, done.stderr
        return json.loads(done.lines[-1]), [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_a_whole_program(run_program: Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    """The last rank exports: traces, metrics and logs on the console, all from one resource; the end closes them."""
    facts, lines = run_program(1)
    assert facts.pop("second")
    assert facts == {"exporting": True, "step": True, "after": False}
    spans = {line["name"]: line for line in lines if "trace_id" in line and "kind" in line}
    assert set(spans) == {"train.step", "inner", "left open"}
    assert spans["inner"]["trace_id"] == spans["train.step"]["trace_id"]
    assert spans["left open"]["attributes"]["nemo.span.truncated"] is True
    assert spans["train.step"]["attributes"] == {"iteration": 3}
    attributes = spans["train.step"]["resource"]["attributes"]
    assert {
        "service.name": "trainer",
        "service.instance.id": "run-7-rank1",
        "dl.rank": 1,
        "dl.world_size": 2,
        "nemo.run.id": "run-7",
        "nemo.user.id": "kim",
        "deployment.environment": "lab",
        "team": "us",
    }.items() <= attributes.items()
    assert "bad" not in attributes
    text = "\n".join(json.dumps(line) for line in lines)
    assert '"steps"' in text
    (log,) = [line for line in lines if "from the step" in json.dumps(line)]
    assert spans["inner"]["trace_id"].removeprefix("0x") in json.dumps(log)


def test_a_rank_that_does_not_export(
    run_program: Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]],
) -> None:
    facts, lines = run_program(0)
    assert (facts["exporting"], facts["step"]) == (False, False)
    assert lines == []


def test_an_unknown_strategy_is_refused_when_telemetry_is_set_up(launch_once: Launcher) -> None:
    program = launch_once.program(PROGRAM, "again.py")
    environment = {"NEMO_LENS_ENABLED": "1", "NEMO_LENS_EXPORT_STRATEGY": "every_second"}
    done = launch_once.run(*PYTHON, program, "0", env=environment)
    assert done.code == 1
    assert re.search(r"ValueError: .*every_second.*all_ranks.*single_rank", done.stderr)


def test_the_bridge_without_a_provider_does_nothing() -> None:
    from opentelemetry import _logs
    from opentelemetry.sdk._logs import LoggerProvider

    if isinstance(_logs.get_logger_provider(), LoggerProvider):
        pytest.skip("another test of this process set one")
    logger = logging.getLogger("of-the-bridge")
    find("logging_bridge:setup_logging_bridge")("of-the-bridge")
    assert logger.handlers == []


def test_every_deliberate_difference_has_its_reason() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "migrating.md").read_text()
    table = text.partition("## Deliberate differences")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    assert rows[0] == ["what", "in Lens", "here", "why"]
    assert len(rows) > 20
    for what, in_lens, here, why in rows[2:]:
        assert what and in_lens and here and why, what
        assert in_lens != here, what
