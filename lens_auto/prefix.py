"""Variables of other projects: `<PREFIX>_<KEY>` in front of `NEMO_LENS_<KEY>`, as NeMo Gym has `NEMO_GYM_OTEL_<KEY>`.

`NEMO_LENS_CONFIG_PREFIX` names the prefix; NeMo Gym's counts of itself once the program imports `nemo_gym`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from lens_auto import runtime
from lens_auto.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

logger = logging.getLogger("lens_auto")

VARIABLE = "NEMO_LENS_CONFIG_PREFIX"
OWN = "NEMO_LENS"
GYM = "NEMO_GYM_OTEL"
GYM_MODULE = "nemo_gym"

_prefix = ""


def merged(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which `<prefix>_<KEY>` stands in the place of `NEMO_LENS_<KEY>`; blank counts as unset."""
    found = dict(environ)
    start = f"{prefix}_"
    for name, value in environ.items():
        if name.startswith(start) and value.strip():
            found[f"{OWN}_{name[len(start) :]}"] = value
    return found


def environment(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The environment as this process reads it."""
    return merged(_prefix, environ) if _prefix else environ


def use(prefix: str) -> None:
    """Let a prefix count in this process from now on: settings and span groups are read again."""
    global _prefix
    _prefix = prefix
    settings = Settings.from_env(environment())
    for problem in settings.problems:
        logger.warning("lens-auto: (with %s_ in front of %s_) %s", prefix, OWN, problem)
    runtime.settings = settings
    runtime.set_groups(frozenset() if settings.disabled else settings.groups)


def use_configured() -> None:
    """Let the prefix count that `NEMO_LENS_CONFIG_PREFIX` names, if it names one."""
    prefix = os.environ.get(VARIABLE, "").strip().rstrip("_")
    if prefix:
        use(prefix)


def follow_gym(module: ModuleType) -> None:
    """NeMo Gym is imported: its variables count, unless another prefix was named."""
    if not _prefix and any(name.startswith(f"{GYM}_") for name in os.environ):
        use(GYM)
