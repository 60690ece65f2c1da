"""Megatron-core's pipeline schedules (placeholder)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from instrumentors._patch import LensInstrumentor, Patches


class MegatronInstrumentor(LensInstrumentor):
    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {}
