"""The place that torchrun gave a worker (https://pytorch.org/docs/stable/elastic/run.html#environment-variables)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lens_auto import semconv

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS = (
    (semconv.TORCHELASTIC_RESTART_COUNT, "TORCHELASTIC_RESTART_COUNT"),
    (semconv.TORCHELASTIC_NODE_RANK, "GROUP_RANK"),
    (semconv.TORCHELASTIC_LOCAL_RANK, "LOCAL_RANK"),
    (semconv.TORCHELASTIC_LOCAL_WORLD_SIZE, "LOCAL_WORLD_SIZE"),
)


def torchelastic_attributes(environ: Mapping[str, str] = os.environ) -> dict[str, str | int]:
    """What torchrun's variables say; empty for a process it did not start (TORCHELASTIC_RUN_ID unset)."""
    attributes: dict[str, str | int] = {}
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if not run_id:
        return attributes
    attributes[semconv.TORCHELASTIC_RUN_ID] = run_id
    for attribute, variable in _NUMBERS:
        value = environ.get(variable, "")
        if value.isascii() and value.isdigit():
            attributes[attribute] = int(value)
    role = environ.get("ROLE_NAME")
    if role:
        attributes[semconv.TORCHELASTIC_ROLE_NAME] = role
    return attributes


def detect_torchelastic() -> dict[str, str | int]:
    """`torchelastic_attributes` of this process."""
    return torchelastic_attributes()
