"""The entry points of `opentelemetry-instrument`: distro, configurator, and the hook that runs whatever distro won."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from opentelemetry.instrumentation.distro import BaseDistro  # type: ignore[attr-defined]
from opentelemetry.util._importlib_metadata import EntryPoint

from lens_auto import guard, runtime

logger = logging.getLogger("lens_auto")

ENTRY_POINT = "lens_auto"
_ours = "instrumentors."


class LensDistro(BaseDistro):  # type: ignore[misc]
    """Configures the runtime and loads instrumentors so that one that fails never stops the others."""

    chosen = False

    def _configure(self, **kwargs: Any) -> None:
        LensDistro.chosen = True
        try:
            runtime.configure()
        except Exception as error:
            _failed(error)

    def load_instrumentor(self, entry_point: EntryPoint, **kwargs: Any) -> None:
        """Load one instrumentor. Ours stay out while we are disabled; a failing one costs one line."""
        try:
            if entry_point.value.startswith(_ours) and runtime.configure().disabled:
                return
            super().load_instrumentor(entry_point, **kwargs)
        except ModuleNotFoundError:
            raise  # the loader's own word for "the library is not installed"
        except Exception as error:
            guard.tell(f"instrumentor {entry_point.name} failed ({error}) and is left out")


class LensConfigurator:
    """Sets up no SDK at interpreter start: ranks record without one, and providers are built when first used."""

    def configure(self, **kwargs: Any) -> None:
        """Called once by `opentelemetry-instrument`."""
        try:
            from lens_auto import providers

            runtime.configure()
            providers.install()
        except Exception as error:
            _failed(error)


def pre_instrument() -> None:
    """Runs before the first instrumentor, also where another distro was loaded first; says so in one line."""
    try:
        settings = runtime.configure()
        if settings.disabled:
            return
        _ask_each_distribution_once()
        if LensDistro.chosen or os.environ.get("OTEL_PYTHON_DISTRO"):
            return
        if os.environ.get(runtime.LAUNCHER_VARIABLE) == str(os.getpid()):
            logger.warning(
                "lens-auto: another OpenTelemetry distro is installed and was loaded instead of ours; training is"
                " recorded all the same; set OTEL_PYTHON_DISTRO=%s and OTEL_PYTHON_CONFIGURATOR=%s to choose lens-auto",
                ENTRY_POINT,
                ENTRY_POINT,
            )
    except Exception as error:
        _failed(error)


def post_instrument() -> None:
    """Runs after the last instrumentor."""
    try:
        if _asks is not None:
            loader, original, ours = _asks
            if loader.get_dist_dependency_conflicts is ours:
                loader.get_dist_dependency_conflicts = original
    except Exception as error:
        _failed(error)


_asks: tuple[Any, Any, Any] | None = None  # the module that asks, its own function and ours
_answers: dict[int, tuple[Any, Any]] = {}


def _ask_each_distribution_once() -> None:
    """Until the instrumentors are loaded: what its distribution requires, and what is installed of that.

    OpenTelemetry looks for each instrumentor anew: 2 ms for each of ours (torch's metadata are read), seen in 0.66.
    """
    global _asks
    loader: Any = sys.modules.get("opentelemetry.instrumentation.auto_instrumentation._load")  # it called us
    original = getattr(loader, "get_dist_dependency_conflicts", None)
    if original is not None:

        def ask(distribution: Any) -> Any:
            key = id(distribution)  # which stays its own: the distribution is kept
            if key not in _answers:
                _answers[key] = (distribution, original(distribution))
            return _answers[key][1]

        _asks = (loader, original, ask)
        loader.get_dist_dependency_conflicts = ask


def _failed(error: Exception) -> None:
    guard.tell(f"it could not be set up ({type(error).__name__}: {error}); the program runs without what is missing")
