"""`NemoLensConfig`: Lens's fields, defaults and variables."""

from __future__ import annotations

import dataclasses
import os

import pytest

from lens_auto.config import NemoLensConfig
from lens_auto.groups import SpanGroup, TrainingSpanGroup

DEFAULTS = {
    "enabled": False,
    "service_name": "nemo",
    "export_strategy": "single_rank",
    "export_rank": -1,
    "export_sample_rate": 1.0,
    "sampler_enabled": False,
    "traces_enabled": True,
    "metrics_enabled": True,
    "logs_enabled": False,
    "span_groups": "default",
    "exporter": "otlp",
    "run_id": "",
    "user": "",
    "wandb_entity": "",
    "wandb_project": "",
    "span_group_cls": SpanGroup,
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith(("NEMO_LENS_", "OTEL_", "WANDB_", "MEGATRON_OTEL_")):
            monkeypatch.delenv(variable)


def as_dict(config: NemoLensConfig) -> dict[str, object]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def test_defaults() -> None:
    assert as_dict(NemoLensConfig()) == DEFAULTS
    assert as_dict(NemoLensConfig.from_env()) == DEFAULTS


def test_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "NEMO_LENS_ENABLED": "1",
        "OTEL_SERVICE_NAME": "my-run",
        "NEMO_LENS_EXPORT_STRATEGY": "sampled",
        "NEMO_LENS_EXPORT_RANK": "3",
        "NEMO_LENS_EXPORT_SAMPLE_RATE": "0.25",
        "NEMO_LENS_SAMPLER_ENABLED": "yes",
        "NEMO_LENS_TRACES_ENABLED": "off",
        "NEMO_LENS_METRICS_ENABLED": "False",
        "NEMO_LENS_LOGS_ENABLED": "TRUE",
        "NEMO_LENS_SPAN_GROUPS": "per_step",
        "NEMO_LENS_EXPORTER": "console",
        "NEMO_LENS_RUN_ID": "run-1",
        "NEMO_LENS_USER_ID": "team",
        "WANDB_ENTITY": "entity",
        "WANDB_PROJECT": "project",
    }
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert as_dict(NemoLensConfig.from_env()) == {
        "enabled": True,
        "service_name": "my-run",
        "export_strategy": "sampled",
        "export_rank": 3,
        "export_sample_rate": 0.25,
        "sampler_enabled": True,
        "traces_enabled": False,
        "metrics_enabled": False,
        "logs_enabled": True,
        "span_groups": "per_step",
        "exporter": "console",
        "run_id": "run-1",
        "user": "team",
        "wandb_entity": "entity",
        "wandb_project": "project",
        "span_group_cls": SpanGroup,
    }


def test_the_prefix_wins_over_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LENS_RUN_ID", "shared")
    monkeypatch.setenv("NEMO_LENS_USER_ID", "team")
    monkeypatch.setenv("MEGATRON_OTEL_RUN_ID", "mine")
    monkeypatch.setenv("MEGATRON_OTEL_USER_ID", "")
    config = NemoLensConfig.from_env(prefix="MEGATRON_OTEL", fallback_prefix="NEMO_LENS")
    assert (config.run_id, config.user) == ("mine", "team")
    assert NemoLensConfig.from_env(prefix="MEGATRON_OTEL").user == ""
    assert NemoLensConfig.from_env().run_id == "shared"


def test_span_groups_are_resolved_by_the_given_class() -> None:
    assert NemoLensConfig().resolved_span_groups == {"job", "checkpoint", "evaluate"}
    config = NemoLensConfig(span_groups="communication", span_group_cls=TrainingSpanGroup)
    assert config.resolved_span_groups == {"communication"}
    assert NemoLensConfig.from_env(span_group_cls=TrainingSpanGroup).resolved_span_groups == (
        TrainingSpanGroup.resolve("default")
    )
    with pytest.raises(ValueError, match="unknown span group 'communication'"):
        _ = NemoLensConfig(span_groups="communication").resolved_span_groups


@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan")])
def test_the_sample_rate_is_checked_at_construction(rate: float) -> None:
    with pytest.raises(ValueError, match=r"^export_sample_rate must lie in \[0, 1\], got "):
        NemoLensConfig(export_sample_rate=rate)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_both_ends_of_the_sample_rate_are_valid(rate: float) -> None:
    assert NemoLensConfig(export_sample_rate=rate).export_sample_rate == rate


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "NEMO_LENS_ENABLED",
            "maybe",
            "NEMO_LENS_ENABLED='maybe' is not a boolean: expected 1/0, true/false, yes/no or on/off",
        ),
        ("NEMO_LENS_EXPORT_RANK", "first", "NEMO_LENS_EXPORT_RANK='first' is not a whole number"),
        (
            "NEMO_LENS_EXPORT_SAMPLE_RATE",
            "2",
            "NEMO_LENS_EXPORT_SAMPLE_RATE='2' is not valid: expected a number from 0 to 1",
        ),
        (
            "NEMO_LENS_EXPORT_SAMPLE_RATE",
            "half",
            "NEMO_LENS_EXPORT_SAMPLE_RATE='half' is not valid: expected a number from 0 to 1",
        ),
    ],
)
def test_bad_values_name_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError) as raised:
        NemoLensConfig.from_env()
    assert str(raised.value) == message


def test_a_sample_rate_that_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"^export_sample_rate must be a number in \[0, 1\], got '0.5'$"):
        NemoLensConfig(export_sample_rate="0.5")  # type: ignore[arg-type]
