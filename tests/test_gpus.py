"""Metrics of GPUs, by NVML, from the exporter process. The library here is a stand-in: there is no driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_node import rank
from test_metrics import Point, in_file, made

NVML = """
class NVMLError(Exception):
    pass

class NVMLError_FunctionNotFound(NVMLError):
    pass

class Of:
    def __init__(self, **known):
        vars(self).update(known)

def nvmlInit():
    pass

def nvmlDeviceGetCount():
    return 2

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlDeviceGetUUID(gpu):
    return b"GPU-%d" % gpu

def nvmlDeviceGetName(gpu):
    return "NVIDIA H100"

def nvmlDeviceGetTemperature(gpu, sensor):
    assert sensor == 0
    return 60 + gpu

def nvmlDeviceGetPowerUsage(gpu):
    if gpu == 1:
        raise NVMLError("Not Supported")
    return 350_500  # mW

def nvmlDeviceGetUtilizationRates(gpu):
    return Of(gpu=97, memory=20)

def nvmlDeviceGetMemoryInfo(gpu):
    return Of(used=1 << 30)

def nvmlDeviceGetClockInfo(gpu, clock):
    assert clock == 1
    return 1980 if gpu == 0 else 345  # MHz

def nvmlDeviceGetCurrentClocksEventReasons(gpu):
    raise NVMLError_FunctionNotFound("an old driver")

def nvmlDeviceGetCurrentClocksThrottleReasons(gpu):
    return 0x1 if gpu == 0 else 0x40 | 0x8
"""
NO_DRIVER = """
class NVMLError(Exception):
    pass

def nvmlInit():
    raise NVMLError("Driver Not Loaded")
"""


def of_gpus(folder: Path, library: str) -> tuple[list[Point], str]:
    (folder / "nvml").mkdir(parents=True)
    (folder / "nvml" / "pynvml.py").write_text(library)
    with made(folder / "node", rank(0, 10, world_size=1)) as node:
        environment = {"OTEL_METRICS_EXPORTER": "lens_file", "PYTHONPATH": str(folder / "nvml")}
        assert node.start(environment).wait().code == 0
        points = in_file(node)[-1]
        assert any(point.name == "dl.iterations" for point in points)
        return [point for point in points if point.name.startswith("hw.")], node.log()


def test_what_a_gpu_tells(tmp_path: Path) -> None:
    points, log = of_gpus(tmp_path, NVML)
    assert log == ""
    values = {
        (point.attributes["hw.id"], point.name, point.attributes.get("hw.gpu.throttle_reason", "")): point.value
        for point in points
    }
    assert len(values) == len(points)
    held = {key: value for key, value in values.items() if key[1] == "hw.gpu.throttled"}
    assert len(held) == 12
    assert {key for key, value in held.items() if value} == {
        ("GPU-1", "hw.gpu.throttled", "hw_thermal_slowdown"),
        ("GPU-1", "hw.gpu.throttled", "hw_slowdown"),
    }
    assert {key[:2]: value for key, value in values.items() if key not in held} == {
        ("GPU-0", "hw.temperature"): 60,
        ("GPU-0", "hw.power"): 350.5,
        ("GPU-0", "hw.gpu.utilization"): 0.97,
        ("GPU-0", "hw.gpu.memory.usage"): 1 << 30,
        ("GPU-0", "hw.gpu.speed"): 1.98e9,
        ("GPU-1", "hw.temperature"): 61,  # and no power: it does not tell
        ("GPU-1", "hw.gpu.utilization"): 0.97,
        ("GPU-1", "hw.gpu.memory.usage"): 1 << 30,
        ("GPU-1", "hw.gpu.speed"): 3.45e8,
    }
    assert {point.name: point.unit for point in points} == {
        "hw.temperature": "Cel",
        "hw.power": "W",
        "hw.gpu.utilization": "1",
        "hw.gpu.memory.usage": "By",
        "hw.gpu.speed": "Hz",
        "hw.gpu.throttled": "1",
    }
    assert {(point.attributes["hw.type"], point.attributes["hw.name"]) for point in points} == {("gpu", "NVIDIA H100")}
    for point in points:  # they are the node's
        assert "dl.rank" not in {**point.resource, **point.attributes}
        assert {"host.name", "nemo.run.id", "service.name"} <= point.resource.keys()


@pytest.mark.parametrize("library", [NO_DRIVER, "raise ImportError('no such library')", "raise OSError('broken')"])
def test_no_gpu_is_no_trouble(tmp_path: Path, library: str) -> None:
    assert of_gpus(tmp_path, library) == ([], "")


@pytest.mark.gpu
def test_a_real_gpu(tmp_path: Path) -> None:
    nvml = pytest.importorskip("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        pytest.skip(str(error))
    with made(tmp_path, rank(0, 10, world_size=1)) as node:
        assert node.start({"OTEL_METRICS_EXPORTER": "lens_file"}).wait().code == 0
        found = {point.name: point.value for point in in_file(node)[-1]}
    assert 0 < found["hw.temperature"] < 120
    assert 1e8 < found["hw.gpu.speed"] < 1e10
