"""The SLURM job that a process belongs to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lens_auto import semconv

if TYPE_CHECKING:
    from collections.abc import Mapping

# The second name is the one that current SLURM documents; the first is what it keeps for older scripts.
_VARIABLES = (
    (semconv.SLURM_JOB_ID, ("SLURM_JOB_ID",)),
    (semconv.SLURM_JOB_NAME, ("SLURM_JOB_NAME",)),
    (semconv.SLURM_NODELIST, ("SLURM_NODELIST", "SLURM_JOB_NODELIST")),
    (semconv.SLURM_NNODES, ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    (semconv.SLURM_NTASKS, ("SLURM_NTASKS",)),
    (semconv.SLURM_PARTITION, ("SLURM_PARTITION", "SLURM_JOB_PARTITION")),
    (semconv.SLURM_CLUSTER_NAME, ("SLURM_CLUSTER_NAME",)),
)


def slurm_attributes(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What SLURM's variables say, as text; empty outside a job (SLURM_JOB_ID unset)."""
    attributes: dict[str, str] = {}
    if not environ.get("SLURM_JOB_ID"):
        return attributes
    for attribute, variables in _VARIABLES:
        for variable in variables:
            value = environ.get(variable)
            if value:
                attributes[attribute] = value
                break
    return attributes


def detect_slurm() -> dict[str, str]:
    """`slurm_attributes` of this process."""
    return slurm_attributes()
