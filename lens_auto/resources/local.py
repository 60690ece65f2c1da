"""The process and its host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lens_auto import semconv

if TYPE_CHECKING:
    from collections.abc import Mapping

NVIDIA_SMI_TIMEOUT_S = 3.0


def local_attributes(environ: Mapping[str, str] = os.environ) -> dict[str, str | int]:
    """Host name, process id and, where CUDA_VISIBLE_DEVICES says so, the number of GPUs."""
    attributes: dict[str, str | int] = {semconv.HOST_NAME: os.uname().nodename, semconv.PROCESS_PID: os.getpid()}
    gpus = visible_gpus(environ)
    if gpus is not None:
        attributes[semconv.HOST_GPU_COUNT] = gpus
    return attributes


def detect_local() -> dict[str, str | int]:
    """As `local_attributes`; where CUDA_VISIBLE_DEVICES is unset, `nvidia-smi` is asked. No answer: no count."""
    attributes = local_attributes()
    if semconv.HOST_GPU_COUNT not in attributes:
        gpus = _gpus_by_nvidia_smi()
        if gpus is not None:
            attributes[semconv.HOST_GPU_COUNT] = gpus
    return attributes


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES lets this process see; None where it is unset and all are visible.

    CUDA stops at the first entry that names no device, so `0,-1,1` shows one GPU and `-1` none (CUDA C++ Programming
    Guide, environment variables).
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    count = 0
    for entry in value.split(","):
        device = entry.strip()
        if not (device.isdigit() or device.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def _gpus_by_nvidia_smi() -> int | None:
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listing = subprocess.run(
            [program, "--list-gpus"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    # One line per GPU; the slices of a partitioned one follow it, indented.
    return sum(line.startswith("GPU ") for line in listing.splitlines())
