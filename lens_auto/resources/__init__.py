"""Who emits: the attributes of a rank, its host and its scheduler, as plain dictionaries.

What the user says (OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME) wins over what is detected. Nothing here needs the SDK,
so that a rank can name itself without it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lens_auto
from lens_auto import semconv
from lens_auto.resources.kubernetes import detect_kubernetes, kubernetes_attributes
from lens_auto.resources.local import detect_local, local_attributes
from lens_auto.resources.slurm import detect_slurm, slurm_attributes
from lens_auto.resources.torchelastic import detect_torchelastic, torchelastic_attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "detect_kubernetes",
    "detect_local",
    "detect_resource",
    "detect_slurm",
    "detect_torchelastic",
    "kubernetes_attributes",
    "local_attributes",
    "rank_attributes",
    "slurm_attributes",
    "torchelastic_attributes",
    "user_attributes",
]

DEFAULT_SERVICE_NAME = "nemo"


def detect_resource() -> dict[str, str | int]:
    """What can be found out about this process: local, SLURM, Kubernetes, torchelastic, and the user's own on top."""
    return {**detect_local(), **detect_slurm(), **detect_kubernetes(), **detect_torchelastic(), **user_attributes()}


def rank_attributes(
    rank: int, world_size: int, local_rank: int, run_id: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str | int]:
    """The whole resource of one rank. Reads the environment only: no process is started, no file opened.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this node.
        run_id: The id that all ranks share; None while it is not known: what is made of it is left out.
        environ: Where the variables are read.
    """
    attributes: dict[str, str | int] = {
        semconv.SERVICE_NAME: DEFAULT_SERVICE_NAME,
        semconv.SERVICE_VERSION: lens_auto.__version__,
        semconv.DL_RANK: rank,
        semconv.DL_WORLD_SIZE: world_size,
        semconv.DL_LOCAL_RANK: local_rank,
    }
    if run_id is not None:
        attributes[semconv.SERVICE_INSTANCE_ID] = f"{run_id}-rank{rank}"
        attributes[semconv.NEMO_RUN_ID] = run_id
    for attribute, variables in (
        (semconv.NEMO_USER_ID, ("NEMO_LENS_USER_ID",)),
        (semconv.DEPLOYMENT_ENVIRONMENT, ("DEPLOYMENT_ENV", "ENVIRONMENT")),
        (semconv.WANDB_ENTITY, ("WANDB_ENTITY",)),
        (semconv.WANDB_PROJECT, ("WANDB_PROJECT",)),
    ):
        for variable in variables:
            value = environ.get(variable, "").strip()
            if value:
                attributes[attribute] = value
                break
    attributes |= local_attributes(environ)
    attributes |= slurm_attributes(environ)
    attributes |= kubernetes_attributes(environ)
    attributes |= torchelastic_attributes(environ)
    attributes |= user_attributes(environ)
    return attributes


def user_attributes(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The attributes that the user set: OTEL_RESOURCE_ATTRIBUTES, and OTEL_SERVICE_NAME, which wins.

    The list is `key=value` pairs, comma-separated, values percent-encoded; an entry without `=` or key is skipped, as
    OpenTelemetry's SDK does.
    """
    attributes: dict[str, str] = {}
    for entry in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = entry.partition("=")
        if equals and key.strip():
            attributes[key.strip()] = _percent_decoded(value.strip())
    service_name = environ.get("OTEL_SERVICE_NAME", "").strip()
    if service_name:
        attributes[semconv.SERVICE_NAME] = service_name
    return attributes


def _percent_decoded(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote  # only here: it costs a rank's start several milliseconds

    return unquote(text)
