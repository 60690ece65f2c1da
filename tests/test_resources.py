"""Who emits: detection, its precedence, and the resource of a rank."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import lens_auto
from lens_auto.resources import (
    detect_kubernetes,
    detect_local,
    detect_resource,
    detect_slurm,
    detect_torchelastic,
    kubernetes,
    rank_attributes,
    user_attributes,
)
from lens_auto.resources.local import local_attributes, visible_gpus

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NAME": "pretrain",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "16",
    "SLURM_PARTITION": "batch",
    "SLURM_CLUSTER_NAME": "alps",
}
K8S = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "K8S_NAMESPACE": "train",
    "K8S_POD_NAME": "pod-0",
    "K8S_POD_UID": "uid-0",
    "K8S_NODE_NAME": "node-0",
    "K8S_CONTAINER_NAME": "main",
    "K8S_JOB_NAME": "job-0",
    "HOSTNAME": "pod-0-host",
}
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a scheduler nor Kubernetes, whatever the tests run in."""
    for variable in list(os.environ):
        if variable.startswith(("SLURM_", "K8S_", "KUBERNETES_", "OTEL_", "TORCHELASTIC_", "NEMO_LENS_", "WANDB_")):
            monkeypatch.delenv(variable)
    for variable in ("CUDA_VISIBLE_DEVICES", "DEPLOYMENT_ENV", "ENVIRONMENT", *ELASTIC):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT_DIR", str(tmp_path / "absent"))


def set_all(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)


def test_local() -> None:
    assert local_attributes({}) == {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    assert local_attributes({"CUDA_VISIBLE_DEVICES": "0,1"})["host.gpu.count"] == 2


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, None),
        ("", 0),
        (" ", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0", 1),
        ("0,1, 2,3", 4),
        ("0,-1,1", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1a", 2),
        ("MIG-4b", 1),
    ],
)
def test_visible_gpus(value: str | None, count: int | None) -> None:
    assert visible_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == count


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_nvidia_smi_counts_gpus_and_not_their_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(
        tmp_path, monkeypatch, "printf 'GPU 0: H200 (UUID: a)\\n  MIG 1g.18gb Device 0: (b)\\nGPU 1: H200\\n'"
    )
    assert detect_local()["host.gpu.count"] == 2
    assert "host.gpu.count" not in local_attributes()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert detect_local()["host.gpu.count"] == 1


@pytest.mark.parametrize("body", ["exit 9", "exec sleep 30"])
def test_an_nvidia_smi_that_fails_or_hangs_gives_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr("lens_auto.resources.local.NVIDIA_SMI_TIMEOUT_S", 0.2)
    fake_nvidia_smi(tmp_path, monkeypatch, body)
    assert detect_local() == {"host.name": socket.gethostname(), "process.pid": os.getpid()}


def test_without_nvidia_smi_there_is_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "host.gpu.count" not in detect_local()


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_slurm() == {}
    set_all(monkeypatch, SLURM)
    assert detect_slurm() == {
        "slurm.job.id": "4242",
        "slurm.job.name": "pretrain",
        "slurm.nodelist": "node[1-2]",
        "slurm.nnodes": "2",
        "slurm.ntasks": "16",
        "slurm.partition": "batch",
        "slurm.cluster.name": "alps",
    }
    monkeypatch.delenv("SLURM_JOB_ID")
    assert detect_slurm() == {}


def test_slurm_by_its_current_names(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(
        monkeypatch,
        {
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_PARTITION": "gpu",
        },
    )
    assert detect_slurm() == {
        "slurm.job.id": "1",
        "slurm.nodelist": "n1",
        "slurm.nnodes": "1",
        "slurm.partition": "gpu",
    }


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_kubernetes() == {}
    set_all(monkeypatch, K8S)
    assert detect_kubernetes() == {
        "k8s.namespace.name": "train",
        "k8s.pod.name": "pod-0",
        "k8s.pod.uid": "uid-0",
        "k8s.node.name": "node-0",
        "k8s.container.name": "main",
        "k8s.job.name": "job-0",
    }


def test_kubernetes_by_its_service_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOSTNAME", "pod-1")
    assert detect_kubernetes() == {}
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT_DIR", str(tmp_path))
    assert detect_kubernetes() == {"k8s.pod.name": "pod-1"}


def test_torchelastic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_torchelastic() == {}
    set_all(monkeypatch, ELASTIC)
    assert detect_torchelastic() == {
        "torchelastic.run_id": "none",
        "torchelastic.restart_count": 2,
        "torchelastic.node_rank": 1,
        "torchelastic.local_rank": 3,
        "torchelastic.local_world_size": 4,
        "torchelastic.role_name": "default",
    }
    monkeypatch.setenv("GROUP_RANK", "one")
    assert "torchelastic.node_rank" not in detect_torchelastic()


def test_the_users_attributes() -> None:
    assert user_attributes({}) == {}
    assert user_attributes(
        {"OTEL_RESOURCE_ATTRIBUTES": " team = a%20b%2Cc ,broken,=x,empty=,eq=a=b,service.name=listed"}
    ) == {"team": "a b,c", "empty": "", "eq": "a=b", "service.name": "listed"}
    assert user_attributes({"OTEL_RESOURCE_ATTRIBUTES": "service.name=listed", "OTEL_SERVICE_NAME": "named"}) == {
        "service.name": "named"
    }
    assert user_attributes({"OTEL_RESOURCE_ATTRIBUTES": "service.name=listed", "OTEL_SERVICE_NAME": ""}) == {
        "service.name": "listed"
    }


def test_the_users_attributes_parse_as_the_sdk_parses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.resources import OTELResourceDetector

    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "a=b%3Dc, d = e ,f=%C3%A9,g=h%zz")
    assert user_attributes() == dict(OTELResourceDetector().detect().attributes)


def test_detect_resource_merges_and_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SLURM | K8S | ELASTIC)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=renamed,slurm.partition=mine")
    assert detect_resource() == {
        **detect_local(),
        **detect_slurm(),
        **detect_kubernetes(),
        **detect_torchelastic(),
        "host.name": "renamed",
        "slurm.partition": "mine",
    }


def test_the_resource_of_a_rank() -> None:
    here = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    assert rank_attributes(3, 8, 1, "run-9", {}) == {
        "service.name": "nemo",
        "service.version": lens_auto.__version__,
        "service.instance.id": "run-9-rank3",
        "dl.rank": 3,
        "dl.world_size": 8,
        "dl.local_rank": 1,
        "nemo.run.id": "run-9",
        **here,
    }
    environ = {
        "NEMO_LENS_USER_ID": "team",
        "ENVIRONMENT": "staging",
        "WANDB_ENTITY": "e",
        "WANDB_PROJECT": "p",
        "CUDA_VISIBLE_DEVICES": "2",
        "SLURM_JOB_ID": "5",
        "TORCHELASTIC_RUN_ID": "x",
    }
    assert rank_attributes(0, 1, 0, None, environ) == {
        "service.name": "nemo",
        "service.version": lens_auto.__version__,
        "dl.rank": 0,
        "dl.world_size": 1,
        "dl.local_rank": 0,
        "nemo.user.id": "team",
        "deployment.environment": "staging",
        "wandb.entity": "e",
        "wandb.project": "p",
        **here,
        "host.gpu.count": 1,
        "slurm.job.id": "5",
        "torchelastic.run_id": "x",
    }
    assert rank_attributes(0, 1, 0, "r", environ | {"DEPLOYMENT_ENV": "prod"})["deployment.environment"] == "prod"


def test_the_user_wins_over_the_rank() -> None:
    attributes = rank_attributes(
        0,
        2,
        0,
        "r",
        {"OTEL_SERVICE_NAME": "gpt", "OTEL_RESOURCE_ATTRIBUTES": "host.name=h,service.version=7,dl.rank=x,extra=1"},
    )
    assert attributes["service.name"] == "gpt"
    assert attributes["host.name"] == "h"
    assert attributes["service.version"] == "7"
    assert attributes["dl.rank"] == "x"
    assert attributes["extra"] == "1"
    assert attributes["dl.world_size"] == 2


def test_a_rank_names_itself_without_the_sdk_and_without_a_process() -> None:
    script = """
import sys
from lens_auto.resources import rank_attributes
rank_attributes(0, 2, 0, "r")
print([name for name in ("opentelemetry.sdk", "torch", "subprocess", "socket", "urllib.parse") if name in sys.modules])
"""
    # -S: `site` and path files of the environment import what they like.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
