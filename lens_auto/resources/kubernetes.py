"""The Kubernetes pod that a process runs in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lens_auto import semconv

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"

# A pod's specification fills the K8S_ variables from its own fields (the downward API); only HOSTNAME is always there.
_VARIABLES = (
    (semconv.K8S_NAMESPACE_NAME, ("K8S_NAMESPACE",)),
    (semconv.K8S_POD_NAME, ("K8S_POD_NAME", "HOSTNAME")),
    (semconv.K8S_POD_UID, ("K8S_POD_UID",)),
    (semconv.K8S_NODE_NAME, ("K8S_NODE_NAME",)),
    (semconv.K8S_CONTAINER_NAME, ("K8S_CONTAINER_NAME",)),
    (semconv.K8S_JOB_NAME, ("K8S_JOB_NAME",)),
)


def kubernetes_attributes(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the pod's variables say; empty outside Kubernetes."""
    attributes: dict[str, str] = {}
    if not (environ.get("KUBERNETES_SERVICE_HOST") or os.path.isdir(SERVICE_ACCOUNT_DIR)):
        return attributes
    for attribute, variables in _VARIABLES:
        for variable in variables:
            value = environ.get(variable)
            if value:
                attributes[attribute] = value
                break
    return attributes


def detect_kubernetes() -> dict[str, str]:
    """`kubernetes_attributes` of this process."""
    return kubernetes_attributes()
