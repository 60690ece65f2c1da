"""What OpenTelemetry can hold: bools, integers of 64 bits, floats, and text that UTF-8 can encode."""

from __future__ import annotations

import sys
from typing import Any

_INT64_END = 1 << 63


def encodable(text: str) -> str:
    """`text` with question marks for lone surrogates (`os.fsdecode` makes them), which no exporter can send."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def held(value: Any) -> bool | int | float | str | None:
    """A scalar as OpenTelemetry can hold it; None where it cannot.

    NumPy's scalars become Python's. Tensors are not looked into: to read one may wait for its device.
    """
    if isinstance(value, str):
        return encodable(value)
    numpys: Any = getattr(sys.modules.get("numpy"), "generic", ())
    if isinstance(value, numpys):
        value = value.item()
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and -_INT64_END <= value < _INT64_END:
        return value
    return None
