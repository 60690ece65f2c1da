"""lens-auto: OpenTelemetry traces of an unmodified PyTorch training job.

The names here are those of `nemo.lens`. Each is imported when it is first used: the package is imported at the start of
every interpreter that runs under `opentelemetry-instrument`, most of which never train anything.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lens_auto.config import NemoLensConfig
    from lens_auto.distributed import broadcast_trace_context, create_linked_span
    from lens_auto.groups import SpanGroup
    from lens_auto.handle import TelemetryHandle, setup_telemetry
    from lens_auto.helpers import (
        DEFAULT_REDACT_KEYS,
        get_meter,
        get_tracer,
        managed_span,
        redact_value,
        safe_set_span_attributes,
        span_cm,
        trace_fn,
    )
    from lens_auto.propagation import extract_context, inject_context
    from lens_auto.state import is_span_group_enabled, set_enabled_span_groups
    from lens_auto.strategies import (
        ExportStrategy,
        register_export_strategy,
        registered_strategies,
        unregister_export_strategy,
    )

__version__ = "0.1.0"

_HOMES = {
    "NemoLensConfig": "config",
    "SpanGroup": "groups",
    "TelemetryHandle": "handle",
    "setup_telemetry": "handle",
    "DEFAULT_REDACT_KEYS": "helpers",
    "get_meter": "helpers",
    "get_tracer": "helpers",
    "managed_span": "helpers",
    "redact_value": "helpers",
    "safe_set_span_attributes": "helpers",
    "span_cm": "helpers",
    "trace_fn": "helpers",
    "extract_context": "propagation",
    "inject_context": "propagation",
    "broadcast_trace_context": "distributed",
    "create_linked_span": "distributed",
    "is_span_group_enabled": "state",
    "set_enabled_span_groups": "state",
    "ExportStrategy": "strategies",
    "register_export_strategy": "strategies",
    "registered_strategies": "strategies",
    "unregister_export_strategy": "strategies",
}
_SUBMODULES = frozenset(_HOMES.values()) | {
    "contrib",
    "fallbacks",
    "instruments",
    "logging_bridge",
    "resources",
    "sampling",
    "semconv",
}

__all__ = [
    "DEFAULT_REDACT_KEYS",
    "ExportStrategy",
    "NemoLensConfig",
    "SpanGroup",
    "TelemetryHandle",
    "__version__",
    "broadcast_trace_context",
    "create_linked_span",
    "extract_context",
    "get_meter",
    "get_tracer",
    "inject_context",
    "is_span_group_enabled",
    "managed_span",
    "redact_value",
    "register_export_strategy",
    "registered_strategies",
    "safe_set_span_attributes",
    "set_enabled_span_groups",
    "setup_telemetry",
    "span_cm",
    "trace_fn",
    "unregister_export_strategy",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, name if name in _SUBMODULES else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name = f"{__name__}.{home}"
    try:
        __import__(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    module = sys.modules[module_name]
    value = getattr(module, name) if name in _HOMES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
