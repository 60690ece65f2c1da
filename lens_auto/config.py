"""`NemoLensConfig`: the configuration that a program builds itself, with the fields and variables of Lens.

The zero-code runtime reads `lens_auto.settings` instead, which cannot raise and imports nothing heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from lens_auto.groups import SpanGroup
from lens_auto.settings import parse_bool

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class NemoLensConfig:
    """What `setup_telemetry` needs to know.

    Attributes:
        enabled: Master switch.
        service_name: `service.name` of the resource.
        export_strategy: Which ranks export: single_rank, all_ranks, sampled, first_rank_per_node, or a registered name.
            Looked up when telemetry is set up, so that it may be registered after this is built.
        export_rank: For single_rank; -1 is the last rank.
        export_sample_rate: For sampled: the share of ranks, from 0 to 1.
        sampler_enabled: Install the rank-aware sampler.
        traces_enabled: Record spans.
        metrics_enabled: Record metrics.
        logs_enabled: Bridge `logging` to OpenTelemetry's logs.
        span_groups: Presets and groups, comma-separated; see `resolved_span_groups`.
        exporter: otlp, console (one compact JSON object a line) or file (the run directory).
        run_id: The same on all ranks. Empty: chosen when telemetry is set up.
        user: `nemo.user.id` of the resource; empty: left out.
        wandb_entity: `wandb.entity` of the resource; empty: left out.
        wandb_project: `wandb.project` of the resource; empty: left out.
        span_group_cls: The class that knows the names in `span_groups`.

    Raises:
        TypeError: `export_sample_rate` is no number.
        ValueError: `export_sample_rate` lies outside [0, 1].
    """

    enabled: bool = False
    service_name: str = "nemo"
    export_strategy: str = "single_rank"
    export_rank: int = -1
    export_sample_rate: float = 1.0
    sampler_enabled: bool = False
    traces_enabled: bool = True
    metrics_enabled: bool = True
    logs_enabled: bool = False
    span_groups: str = "default"
    exporter: str = "otlp"
    run_id: str = ""
    user: str = ""
    wandb_entity: str = ""
    wandb_project: str = ""
    span_group_cls: type[SpanGroup] = field(default=SpanGroup, repr=False, compare=False)

    def __post_init__(self) -> None:
        rate: Any = self.export_sample_rate
        if not isinstance(rate, Real):
            raise TypeError(f"export_sample_rate must be a number in [0, 1], got {rate!r}")
        if not 0.0 <= self.export_sample_rate <= 1.0:
            raise ValueError(f"export_sample_rate must lie in [0, 1], got {self.export_sample_rate!r}")

    @property
    def resolved_span_groups(self) -> frozenset[str]:
        """The groups that `span_groups` names. Raises ValueError on an unknown name, listing the valid ones."""
        return self.span_group_cls.resolve(self.span_groups)

    @classmethod
    def from_env(
        cls, prefix: str = "NEMO_LENS", fallback_prefix: str = "", span_group_cls: type[SpanGroup] = SpanGroup
    ) -> NemoLensConfig:
        """Reads the configuration from environment variables.

        Args:
            prefix: `<prefix>_<KEY>` is looked at first, for example `NEMO_LENS_SPAN_GROUPS`.
            fallback_prefix: `<fallback_prefix>_<KEY>` counts where the first is unset or blank; empty: no fallback.
            span_group_cls: The class that knows the names of the span groups.

        Raises:
            ValueError: A value is not of its kind; the message names the variable, the value and what is valid.
        """
        env = _PrefixedEnvironment(os.environ, prefix, fallback_prefix)
        return cls(
            enabled=env.boolean("ENABLED", cls.enabled),
            service_name=env.plain("OTEL_SERVICE_NAME", cls.service_name),
            export_strategy=env.text("EXPORT_STRATEGY", cls.export_strategy),
            export_rank=env.integer("EXPORT_RANK", cls.export_rank),
            export_sample_rate=env.fraction("EXPORT_SAMPLE_RATE", cls.export_sample_rate),
            sampler_enabled=env.boolean("SAMPLER_ENABLED", cls.sampler_enabled),
            traces_enabled=env.boolean("TRACES_ENABLED", cls.traces_enabled),
            metrics_enabled=env.boolean("METRICS_ENABLED", cls.metrics_enabled),
            logs_enabled=env.boolean("LOGS_ENABLED", cls.logs_enabled),
            span_groups=env.text("SPAN_GROUPS", cls.span_groups),
            exporter=env.text("EXPORTER", cls.exporter),
            run_id=env.text("RUN_ID", cls.run_id),
            user=env.text("USER_ID", cls.user),
            wandb_entity=env.plain("WANDB_ENTITY", cls.wandb_entity),
            wandb_project=env.plain("WANDB_PROJECT", cls.wandb_project),
            span_group_cls=span_group_cls,
        )

    @classmethod
    def for_strategy(cls) -> NemoLensConfig:
        """What an export strategy looks at, and nothing else: a bad value of another variable is not its business.

        Raises:
            ValueError: one of the `NEMO_LENS_EXPORT_*` values is not of its kind.
        """
        env = _PrefixedEnvironment(os.environ, "NEMO_LENS", "")
        return cls(
            enabled=True,
            export_strategy=env.text("EXPORT_STRATEGY", cls.export_strategy),
            export_rank=env.integer("EXPORT_RANK", cls.export_rank),
            export_sample_rate=env.fraction("EXPORT_SAMPLE_RATE", cls.export_sample_rate),
        )


class _PrefixedEnvironment:
    """Reads `<prefix>_<KEY>`, else `<fallback>_<KEY>`; blank counts as unset, as OpenTelemetry has it."""

    def __init__(self, environ: Mapping[str, str], prefix: str, fallback_prefix: str) -> None:
        self._environ = environ
        self._prefixes = [name for name in (prefix, fallback_prefix) if name]

    def _find(self, key: str) -> tuple[str, str] | None:
        for prefix in self._prefixes:
            variable = f"{prefix}_{key}"
            value = self._environ.get(variable, "").strip()
            if value:
                return variable, value
        return None

    def plain(self, variable: str, default: str) -> str:
        """A variable that has no prefix of ours."""
        return self._environ.get(variable, "").strip() or default

    def text(self, key: str, default: str) -> str:
        found = self._find(key)
        return found[1] if found else default

    def boolean(self, key: str, default: bool) -> bool:
        found = self._find(key)
        if found is None:
            return default
        parsed = parse_bool(found[1])
        if parsed is None:
            raise ValueError(f"{found[0]}={found[1]!r} is not a boolean: expected 1/0, true/false, yes/no or on/off")
        return parsed

    def integer(self, key: str, default: int) -> int:
        found = self._find(key)
        if found is None:
            return default
        try:
            return int(found[1])
        except ValueError:
            raise ValueError(f"{found[0]}={found[1]!r} is not a whole number") from None

    def fraction(self, key: str, default: float) -> float:
        found = self._find(key)
        if found is None:
            return default
        try:
            parsed = float(found[1])
        except ValueError:
            parsed = -1.0
        if not 0.0 <= parsed <= 1.0:
            raise ValueError(f"{found[0]}={found[1]!r} is not valid: expected a number from 0 to 1")
        return parsed
