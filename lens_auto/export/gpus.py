"""What NVIDIA's management library says of a node's GPUs, once a second: a slow GPU can be told from a slow program.

Asked by the exporter process alone, where `nvidia-ml-py` is installed (extra `gpu`) and the driver is there. Nothing of
it runs in a training process, and nothing needs a CUDA context. What a GPU does not tell is left out.
"""

from __future__ import annotations

import importlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import Gauge, Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from lens_auto import __version__, semconv
from lens_auto.export.sdk import resource_from

logger = logging.getLogger("lens_auto.export")

ASK_EVERY_S = 1.0
_SCOPE = InstrumentationScope(semconv.INSTRUMENTATION_SCOPE, __version__)
# Name: unit, description. The first four are OpenTelemetry's (hardware metrics); it has no clock of a GPU, so `speed`
# is named after `hw.cpu.speed`.
GAUGES: dict[str, tuple[str, str]] = {
    semconv.HW_TEMPERATURE: ("Cel", "Temperature of the GPU"),
    semconv.HW_POWER: ("W", "Power that the GPU draws"),
    semconv.HW_GPU_UTILIZATION: ("1", "Share of the time in which the GPU ran anything"),
    semconv.HW_GPU_MEMORY_USAGE: ("By", "Memory of the GPU in use, by all processes"),
    semconv.HW_GPU_SPEED: ("Hz", "Clock of the GPU's processors"),
    semconv.HW_GPU_THROTTLED: ("1", "1 where the clock is held down for this reason, else 0"),
}
# NVML's reasons for which a clock is held down: bits of nvmlClocksEventReasons (nvml.h). That a GPU is idle, or that
# somebody set its clocks, is none.
REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
_SM_CLOCK, _TEMPERATURE_GPU = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU

Attributes = Mapping[str, "str | int"]


class Gpus:
    """The GPUs of this node.

    Args:
        nvml: the library, initialized.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus: list[tuple[Any, dict[str, str | int]]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            known: dict[str, str | int] = {
                semconv.HW_ID: _text(nvml.nvmlDeviceGetUUID(handle)),
                semconv.HW_NAME: _text(nvml.nvmlDeviceGetName(handle)),
                semconv.HW_TYPE: "gpu",
                semconv.HW_GPU_INDEX: index,
            }
            self._gpus.append((handle, known))
        self._asked_at = -ASK_EVERY_S
        self._found: list[tuple[str, Attributes, float]] = []

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def look(self) -> bool:
        """Ask, once a second at most. True: there is something new."""
        now = time.monotonic()
        if now - self._asked_at < ASK_EVERY_S:
            return False
        self._asked_at = now
        self._found = [found for handle, known in self._gpus for found in self._ask(handle, known)]
        return bool(self._found)

    def _ask(self, handle: Any, known: dict[str, str | int]) -> Iterator[tuple[str, Attributes, float]]:
        nvml = self._nvml
        questions: dict[str, Callable[[], Any]] = {
            semconv.HW_TEMPERATURE: lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU),
            semconv.HW_POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            semconv.HW_GPU_UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            semconv.HW_GPU_MEMORY_USAGE: lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            semconv.HW_GPU_SPEED: lambda: nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK) * 1e6,
        }
        for name, question in questions.items():
            try:
                yield name, known, float(question())
            except nvml.NVMLError:  # this one does not tell, or not to us
                continue
        try:
            reasons = _reasons(nvml, handle)
        except nvml.NVMLError:
            return
        for reason, bit in REASONS.items():
            held = float(bool(reasons & bit))
            yield semconv.HW_GPU_THROTTLED, {**known, semconv.HW_GPU_THROTTLE_REASON: reason}, held

    def collect(self, resource: Mapping[str, Any]) -> ResourceMetrics:
        """What was last found, as the SDK has it.

        Args:
            resource: of a rank of this node; what is the rank's own is left out.
        """
        now_ns = time.time_ns()
        points: dict[str, list[NumberDataPoint]] = {}
        for name, attributes, value in self._found:
            points.setdefault(name, []).append(NumberDataPoint(dict(attributes), 0, now_ns, value))
        metrics = [Metric(name, GAUGES[name][1], GAUGES[name][0], Gauge(each)) for name, each in points.items()]
        own = {name: resource[name] for name in _OF_NODE if name in resource}
        own.setdefault(semconv.HOST_NAME, socket.gethostname())
        return ResourceMetrics(resource_from(own), [ScopeMetrics(_SCOPE, metrics, "")], "")


_OF_NODE = (semconv.SERVICE_NAME, semconv.NEMO_RUN_ID, semconv.HOST_NAME, semconv.DEPLOYMENT_ENVIRONMENT)


def _reasons(nvml: Any, handle: Any) -> int:
    """NVML 12.535 renamed the call; drivers before have the old one only."""
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    if ask is not None:
        try:
            return int(ask(handle))
        except nvml.NVMLError_FunctionNotFound:
            pass
    return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # bytes before 11.515


def find_gpus() -> Gpus | None:
    """The GPUs of this node; None where there is none, or nobody who can be asked."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        found = Gpus(nvml)
    except ImportError:
        logger.debug("no metrics of GPUs: nvidia-ml-py is not installed")
        return None
    except Exception as error:  # no driver, no library, no permission
        logger.debug("no metrics of GPUs: %s", error)
        return None
    return found or None
