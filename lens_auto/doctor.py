"""What `lens-auto doctor` finds out: what would be patched here, the configuration, and what is wrong with it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

from lens_auto import http_services, runtime
from lens_auto.recorder import rundir, spool
from lens_auto.settings import Settings

PACKAGES = ("nemo-lens-auto", "torch", "opentelemetry-instrumentation", "opentelemetry-sdk", "wrapt", "numpy")


def report() -> dict[str, Any]:
    """Look at this environment as a training process of it would find it.

    Returns:
        `packages` (name -> version or None), `distro` (which entry point wins), `settings` (name, value, source),
        `patched` (instrumentor -> what it patches), `places` (spool and run directory), `sends` (signal -> exporters),
        `problems` (one line each; empty: nothing is wrong).
    """
    # No launcher of a job: what is wrong is told below, not by the runtime as well.
    os.environ.setdefault(runtime.LAUNCHER_VARIABLE, "0")
    settings = Settings.from_env(os.environ)
    problems = [*settings.problems, *http_services.advice(settings)]
    patched = {} if settings.disabled else _patched(problems)
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "distro": _distro(problems),
        "disabled": settings.disabled,
        "settings": [{"name": n, "value": v, "source": s} for n, v, s in settings.describe()],
        "places": _places(settings, problems),
        "sends": {} if settings.disabled else _sends(problems),
        "patched": patched,
        "problems": problems,
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


def _places(settings: Settings, problems: list[str]) -> dict[str, Any]:
    bases = spool.spool_bases(settings.spool_dir, 1)
    usable = [base for base in bases if os.path.isdir(base) and os.access(base, os.W_OK)]
    if settings.spool_dir and settings.spool_dir not in usable and os.path.exists(settings.spool_dir):
        problems.append(f"NEMO_LENS_SPOOL_DIR={settings.spool_dir!r} cannot be written; {usable[:1]} is used instead")
    if not usable:
        problems.append(f"no folder for the spool can be written: {', '.join(bases)}; records would be dropped")
    run_dir = settings.run_dir or rundir.default_run_dir("RUN_ID")
    parent = os.path.dirname(os.path.abspath(run_dir))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        problems.append(f"the run directory {run_dir!r} cannot be made below {parent!r}; records stay in the spool")
    return {"spool": usable[:1], "run_dir": run_dir, "bytes": settings.max_run_bytes}


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
    return found


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
