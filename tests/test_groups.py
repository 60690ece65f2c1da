"""Span groups, their presets, and how a specification is resolved."""

from __future__ import annotations

import pytest

from lens_auto.groups import SpanGroup, TrainingSpanGroup

LENS_GROUPS = {
    "job",
    "checkpoint",
    "evaluate",
    "model_init",
    "load_checkpoint",
    "step",
    "forward_backward",
    "optimizer",
}


def test_the_base_class_is_lens_own() -> None:
    assert SpanGroup.ALL_GROUPS == LENS_GROUPS
    constants = (
        "JOB",
        "CHECKPOINT",
        "EVALUATE",
        "MODEL_INIT",
        "LOAD_CHECKPOINT",
        "STEP",
        "FORWARD_BACKWARD",
        "OPTIMIZER",
    )
    assert [getattr(SpanGroup, name) for name in constants] == [name.lower() for name in constants]
    assert dict(SpanGroup._PRESETS) == {
        "default": {"job", "checkpoint", "evaluate"},
        "per_step": LENS_GROUPS,
        "all": LENS_GROUPS,
    }


def test_the_presets_of_training() -> None:
    added = {"data_loading", "communication", "pipeline", "microbatch", "http_client", "server"}
    all_groups = TrainingSpanGroup.ALL_GROUPS
    assert all_groups == LENS_GROUPS | added
    assert dict(TrainingSpanGroup._PRESETS) == {
        "default": {"job", "checkpoint", "evaluate", "http_client", "server"},
        "per_step": LENS_GROUPS | {"data_loading", "pipeline", "http_client", "server"},
        "per_rollout": {"http_client", "server"},
        "all": all_groups,
    }


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("default", {"job", "checkpoint", "evaluate"}),
        ("default,step", {"job", "checkpoint", "evaluate", "step"}),
        (" Step , OPTIMIZER,,", {"step", "optimizer"}),
        ("step,step", {"step"}),
        ("", set()),
        ("all", LENS_GROUPS),
    ],
)
def test_resolve(spec: str, expected: set[str]) -> None:
    resolved = SpanGroup.resolve(spec)
    assert resolved == expected
    assert type(resolved) is frozenset


def test_an_unknown_name_lists_what_is_valid() -> None:
    with pytest.raises(ValueError) as raised:
        SpanGroup.resolve("step,communication,Foo")
    assert str(raised.value) == (
        "unknown span groups 'communication', 'Foo'; valid presets: default, per_step, all; valid groups: checkpoint, "
        "evaluate, forward_backward, job, load_checkpoint, model_init, optimizer, step"
    )
    assert TrainingSpanGroup.resolve("step,communication") == {"step", "communication"}


def test_a_subclass_adds_groups_and_presets() -> None:
    class Mine(SpanGroup):
        ROLLOUT = "rollout"
        ALL_GROUPS = SpanGroup.ALL_GROUPS | {ROLLOUT}
        _PRESETS = {**SpanGroup._PRESETS, "mine": frozenset({ROLLOUT, SpanGroup.JOB}), "all": ALL_GROUPS}  # noqa: RUF012

    assert Mine.resolve("mine") == {"rollout", "job"}
    assert Mine.resolve("all") == LENS_GROUPS | {"rollout"}
    with pytest.raises(ValueError, match="unknown span group 'rollout'"):
        SpanGroup.resolve("rollout")
