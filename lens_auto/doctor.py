"""What `lens-auto doctor` finds out: what would be patched here, the configuration, and what is wrong with it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import os
import socket
import sys
import tempfile
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lens_auto import http_services, runtime
from lens_auto.recorder import rundir, spool
from lens_auto.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECT_TIMEOUT_S = 1.0
PACKAGES = ("nemo-lens-auto", "torch", "opentelemetry-instrumentation", "opentelemetry-sdk", "wrapt", "numpy")


def report() -> dict[str, Any]:
    """Look at this environment as a training process of it would find it.

    Returns:
        `packages` (name -> version or None), `distro` (which entry point wins), `settings` (name, value, source),
        `patched` (instrumentor -> what it patches), `places` (spool and run directory), `sends` (signal -> exporters),
        `problems` (one line each; empty: nothing is wrong), `notes` (what may be right by the time a job runs).
    """
    # No launcher of a job: what is wrong is told below, not by the runtime as well.
    os.environ.setdefault(runtime.LAUNCHER_VARIABLE, "0")
    settings = Settings.from_env(os.environ)
    problems = [*settings.problems, *http_services.advice(settings)]
    notes: list[str] = []
    patched: dict[str, list[str]] = {}
    sends: dict[str, list[str]] = {}
    if _propagators_load(problems) and not settings.disabled:
        patched = _patched(problems)
        _check_strategy(problems)
        if _sdk_loads(problems):
            sends = _sends(problems)
            _check_sdk(problems)
            notes = _nobody_listens(sends)
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "distro": _distro(problems),
        "disabled": settings.disabled,
        "settings": [{"name": n, "value": v, "source": s} for n, v, s in settings.describe()],
        "places": _places(settings, problems),
        "sends": sends,
        "patched": patched,
        "problems": problems,
        "notes": notes,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distro(problems: list[str]) -> dict[str, Any]:
    """Which distro `opentelemetry-instrument` would load: the named one, else the first that it meets."""
    found = [point.name for point in importlib.metadata.entry_points(group="opentelemetry_distro")]
    named = os.environ.get("OTEL_PYTHON_DISTRO")
    chosen = named or (found[0] if found else None)
    if named is not None and named not in found:
        problems.append(
            f"OTEL_PYTHON_DISTRO={named!r} names no installed distro; installed: {', '.join(found) or 'none'}; none is"
            " loaded"
        )
    elif chosen != "lens_auto":
        problems.append(
            f"the distro {chosen!r} is loaded before ours; set OTEL_PYTHON_DISTRO=lens_auto and"
            " OTEL_PYTHON_CONFIGURATOR=lens_auto (training is recorded all the same)"
        )
    return {"installed": found, "loaded": chosen}


def _propagators_load(problems: list[str]) -> bool:
    """Everything that makes or passes on a trace imports them."""
    try:
        importlib.import_module("opentelemetry.propagate")
    except Exception as error:
        problems.append(
            f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS', '')!r}: {error} With it opentelemetry-instrument"
            " itself cannot start, and nothing else was looked at"
        )
        return False
    return True


def _sdk_loads(problems: list[str]) -> bool:
    try:
        importlib.import_module("lens_auto.pipelines")
    except Exception as error:  # it reads the limits of spans when it is imported
        problems.append(
            f"OpenTelemetry's SDK cannot be imported ({type(error).__name__}: {error}); nothing is exported"
        )
        return False
    return True


def _places(settings: Settings, problems: list[str]) -> dict[str, Any]:
    bases = spool.spool_bases(settings.spool_dir, 1)
    refused = {base: why for base in bases if (why := _why_not_below(base)) is not None}
    usable = [base for base in bases if base not in refused]
    if settings.spool_dir in refused:
        now = f"{usable[0]!r} is used instead" if usable else "records would be dropped"
        why = refused[settings.spool_dir]
        problems.append(f"NEMO_LENS_SPOOL_DIR={settings.spool_dir!r} cannot be used ({why}); {now}")
    if not usable:
        problems.append(f"no folder for the spool can be written: {', '.join(bases)}; records would be dropped")
    run_dir = settings.run_dir or rundir.default_run_dir("RUN_ID")
    reason = _why_not_below(os.path.dirname(os.path.abspath(run_dir)))
    if reason is not None:
        problems.append(f"the run directory {run_dir!r} cannot be made ({reason}); records stay in the spool")
    return {"spool": usable[:1], "run_dir": run_dir, "bytes": settings.max_run_bytes}


def _why_not_below(folder: str) -> str | None:
    """Why nothing can be made in a folder, which may itself have to be made; None: something can.

    Tried for real: `os.access` says yes to root, also about /proc and what is mounted read-only.
    """
    there = os.path.abspath(folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".lens-auto-doctor-", dir=there))
    except OSError as error:
        return f"{there!r}: {error.strerror or error}"
    return None


def _sends(problems: list[str]) -> dict[str, list[str]]:
    """Where the spans and metrics of ranks go; what is not installed is a problem."""
    from lens_auto import pipelines
    from lens_auto.destinations import CONSOLE, FILE, METRICS, TRACES
    from lens_auto.export.exporters import exporter_names, metrics_exporter_names

    found = {TRACES: exporter_names(), METRICS: metrics_exporter_names()}
    for signal, names in found.items():
        for name in names:
            if name in (CONSOLE, FILE):
                continue
            try:
                pipelines.exporter_factory(signal, name)
            except Exception as error:
                hint = "; install nemo-lens-auto[prometheus]" if name == "prometheus" else ""
                problems.append(f"{error}{hint}; no {signal} of ranks go there")
            else:
                if name == "prometheus":
                    _check_port(problems)
    return found


def _check_port(problems: list[str]) -> None:
    from lens_auto.export import metering

    try:
        metering.look_for_port()
    except (OSError, ValueError) as error:
        port = os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", "")
        problems.append(f"OTEL_EXPORTER_PROMETHEUS_PORT={port!r} cannot be used ({error}); Prometheus gets no metrics")


def _check_strategy(problems: list[str]) -> None:
    from lens_auto.config import NemoLensConfig
    from lens_auto.strategies import get_export_strategy

    try:
        get_export_strategy(NemoLensConfig.for_strategy().export_strategy)
    except ValueError as error:
        text = str(error)
        named = "" if text.startswith("NEMO_LENS_") else "NEMO_LENS_EXPORT_STRATEGY: "
        unless = ", unless the program registers it" if named else ""
        problems.append(f"{named}{text}; no records of ranks are exported{unless}")


def _check_sdk(problems: list[str]) -> None:
    """Make of the SDK what the variables shape, as a process that uses it does."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider, sampling
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    from lens_auto.destinations import METRICS, TRACES, reason

    for signal, make in (
        (TRACES, lambda: TracerProvider(sampler=sampling.ALWAYS_OFF, shutdown_on_exit=False)),
        (TRACES, lambda: BatchSpanProcessor(SpanExporter())),
        (METRICS, lambda: MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter(io.StringIO()))])),
    ):
        try:
            make().shutdown()
        except Exception as error:
            problems.append(f"no {signal} of OpenTelemetry's own: {reason(signal, error)}")
    name = os.environ.get("OTEL_TRACES_SAMPLER", "").strip()
    known = {*sampling._KNOWN_SAMPLERS, *_names("opentelemetry_traces_sampler")}
    if name and name not in known and name.lower() not in known:
        problems.append(
            f"OTEL_TRACES_SAMPLER={name!r} is not known; there are: {', '.join(sorted(known))};"
            " parentbased_always_on is used"
        )


def _names(group: str) -> list[str]:
    return [point.name for point in importlib.metadata.entry_points(group=group)]


def _nobody_listens(sends: Mapping[str, list[str]]) -> list[str]:
    """One line for each OTLP endpoint that takes no connection now."""
    from lens_auto.destinations import OTLP
    from lens_auto.export.exporters import GRPC, HTTP, entry_point_name

    notes: dict[str, None] = {}
    for signal, names in sends.items():
        name = next((each for each in names if each in (OTLP, GRPC, HTTP)), None)
        if name is None:
            continue
        variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        given = next((os.environ[each].strip() for each in variables if os.environ.get(each, "").strip()), "")
        try:
            url = urlsplit(given if "://" in given else f"//{given or 'localhost'}")
            default = 443 if url.scheme == "https" else 4318 if entry_point_name(name) == HTTP else 4317
            address = (url.hostname or "localhost", url.port or default)
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            notes[f"nobody listens on {where} now ({error.strerror or error}), where OTLP is sent to"] = None
        except ValueError:
            continue  # no address, which the exporter will say
    return list(notes)


def _patched(problems: list[str]) -> dict[str, list[str]]:
    """Instrument this process for real, look at what was wrapped, and take it off again."""
    if _version("torch") is None:
        problems.append("torch is not installed in this environment; install nemo-lens-auto[instruments]")
        return {}
    runtime.configure()
    found: dict[str, list[str]] = {}
    for point in importlib.metadata.entry_points(group="opentelemetry_instrumentor"):
        if not point.value.startswith("instrumentors."):
            continue
        try:
            instrumentor = point.load()()
            instrumentor.instrument(skip_dep_check=True)
            waits_for = instrumentor.waits_for()
            if not any(importlib.util.find_spec(name.partition(".")[0]) for name in waits_for):
                instrumentor.uninstrument()
                found[point.name] = []  # the library is not installed: nothing is wrong with that
                continue
            missing = _import_all(waits_for)
            found[point.name] = instrumentor.patched()
            instrumentor.uninstrument()
        except Exception as error:
            problems.append(f"the instrumentor {point.name} fails here ({type(error).__name__}: {error})")
            continue
        if not found[point.name]:
            problems.append(f"the instrumentor {point.name} finds nothing to patch; looked in {', '.join(missing)}")
    return found


def _import_all(names: list[str]) -> list[str]:
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing
