"""Span groups: the names by which a user chooses what becomes a span, and the presets that combine them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

# What the zero-code path records when the user chose nothing: the boundaries of every iteration.
ZERO_CODE_PRESET = "per_step"


class SpanGroup:
    """The span groups that a library instrumented with Lens knows.

    A subclass adds groups by overriding `ALL_GROUPS` and `_PRESETS`; `resolve` then knows them.
    """

    JOB = "job"
    CHECKPOINT = "checkpoint"
    EVALUATE = "evaluate"
    MODEL_INIT = "model_init"
    LOAD_CHECKPOINT = "load_checkpoint"
    STEP = "step"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"

    ALL_GROUPS: ClassVar[frozenset[str]] = frozenset(
        {JOB, CHECKPOINT, EVALUATE, MODEL_INIT, LOAD_CHECKPOINT, STEP, FORWARD_BACKWARD, OPTIMIZER}
    )

    _PRESETS: ClassVar[Mapping[str, frozenset[str]]] = {
        "default": frozenset({JOB, CHECKPOINT, EVALUATE}),
        "per_step": frozenset(
            {JOB, CHECKPOINT, EVALUATE, MODEL_INIT, LOAD_CHECKPOINT, STEP, FORWARD_BACKWARD, OPTIMIZER}
        ),
        "all": ALL_GROUPS,
    }

    @classmethod
    def resolve(cls, spec: str) -> frozenset[str]:
        """Turns a comma-separated list of presets and groups into the set of groups it names.

        Args:
            spec: For example `"default,step"`. Case and blanks do not matter, empty entries are ignored.

        Raises:
            ValueError: An entry is neither a preset nor a group of this class; the message lists both.
        """
        resolved: set[str] = set()
        unknown: list[str] = []
        for entry in spec.split(","):
            name = entry.strip().lower()
            if name in cls._PRESETS:
                resolved |= cls._PRESETS[name]
            elif name in cls.ALL_GROUPS:
                resolved.add(name)
            elif name:
                unknown.append(entry.strip())
        if unknown:
            raise ValueError(
                f"unknown span group{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
                f"valid presets: {', '.join(cls._PRESETS)}; valid groups: {', '.join(sorted(cls.ALL_GROUPS))}"
            )
        return frozenset(resolved)


class TrainingSpanGroup(SpanGroup):
    """Lens's groups and those that instrumenting PyTorch and HTTP without code adds."""

    DATA_LOADING = "data_loading"
    COMMUNICATION = "communication"  # collectives and point to point
    PIPELINE = "pipeline"
    MICROBATCH = "microbatch"
    HTTP_CLIENT = "http_client"
    SERVER = "server"

    ALL_GROUPS: ClassVar[frozenset[str]] = SpanGroup.ALL_GROUPS | {
        DATA_LOADING,
        COMMUNICATION,
        PIPELINE,
        MICROBATCH,
        HTTP_CLIENT,
        SERVER,
    }

    # `communication` and `microbatch` have a span for every call, so only `all` holds them. `per_rollout` leaves out
    # `job`: each request of an HTTP service is the root of a small trace instead of part of one that never ends.
    _PRESETS: ClassVar[Mapping[str, frozenset[str]]] = {
        "default": SpanGroup._PRESETS["default"] | {HTTP_CLIENT, SERVER},
        "per_step": SpanGroup._PRESETS["per_step"] | {DATA_LOADING, PIPELINE, HTTP_CLIENT, SERVER},
        "per_rollout": frozenset({HTTP_CLIENT, SERVER}),
        "all": ALL_GROUPS,
    }
