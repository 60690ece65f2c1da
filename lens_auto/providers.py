"""OpenTelemetry's global providers under `opentelemetry-instrument`: ordinary ones, built when they are first used.

Most processes never make a span of OpenTelemetry's own: ranks record without it, launchers and compile workers do
nothing of the kind. So no provider is set. What OpenTelemetry hands out while none is set, its proxies, are replaced by
ours: the first span builds the SDK's provider, and nothing before it imports the SDK. Because nothing is set, a program
that sets a provider of its own is never refused, before or after; from then on all tracers follow it.

See docs/providers.md.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from lens_auto import destinations as places
from lens_auto import identity, prefix, runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from opentelemetry.trace import Tracer

    from lens_auto.pipelines import Pipeline, Plan

logger = logging.getLogger("lens_auto")

locate = identity.locate  # the file of a signal
_WORDS = {"traces": "spans", "logs": "log records", "metrics": "metrics"}

_installed = False
_lock = threading.RLock()
_additions: dict[str, Any] = {}  # what `setup_telemetry` wants of providers that are not built yet
_built: dict[str, Any] = {}  # signal -> the SDK's provider, or None where the signal is off
_pipeline: Pipeline | None = None
_closed = False


def install() -> None:
    """Take the place of OpenTelemetry's proxies. Called by `LensConfigurator`, once; imports nothing of the SDK."""
    global _installed
    runtime.configure()
    prefix.use_configured()
    if runtime.configure().disabled or _installed:
        return
    _installed = True
    # The variable's default under us: programs that read it themselves (`NemoLensConfig.from_env`) find telemetry on.
    os.environ.setdefault("NEMO_LENS_ENABLED", "1")
    import wrapt

    _replace_tracer_proxy(trace)
    for hook, module in (
        (_replace_meter_proxy, "opentelemetry.metrics._internal"),
        (_replace_logger_proxy, "opentelemetry._logs._internal"),
        (_install_asgi, "opentelemetry.instrumentation.asgi"),
        (prefix.follow_gym, prefix.GYM_MODULE),
    ):
        wrapt.register_post_import_hook(_guarded(hook), module)
    if places.logs_wanted(prefix.environment(), _additions):
        _capture_logs()
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_close)  # before any function of the program's is registered: theirs still make spans and logs


def _capture_logs() -> None:
    from lens_auto import log_capture

    log_capture.install(logger_provider, lambda: _closed)


def installed() -> bool:
    """Whether the providers of this process are ours to build."""
    return _installed


def _guarded(hook: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """A post-import hook that cannot break the program's import."""

    def guarded(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception as error:
            logger.warning("lens-auto: %s is used as it is (%s: %s)", module.__name__, type(error).__name__, error)

    return guarded


# --- proxies ----------------------------------------------------------------------------------------------------------


class LensTracerProvider(trace.ProxyTracerProvider):
    """What `get_tracer_provider()` gives while the program has set none."""

    def __init__(self) -> None:
        self._tracers: dict[tuple[str, str | None, str | None], Tracer] = {}

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Any = None,
    ) -> Tracer:
        """A tracer that builds the SDK's provider at its first span."""
        key = (instrumenting_module_name, instrumenting_library_version, schema_url)
        found = self._tracers.get(key) if attributes is None else None
        if found is None:
            made = LensTracer(*key, attributes)
            found = _gated(instrumenting_module_name, made)
            if attributes is None:
                self._tracers[key] = found
        return found

    # What the SDK's provider has beyond the API's, as programs use it after `get_tracer_provider()`.

    def add_span_processor(self, span_processor: Any) -> None:
        """Builds the SDK's provider and adds to it."""
        provider = tracer_provider()
        if provider is not None:
            provider.add_span_processor(span_processor)

    @property
    def resource(self) -> Any:
        """The resource of the SDK's provider, which is built for it."""
        provider = tracer_provider()
        return provider.resource if provider is not None else None

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what is waiting."""
        provider = _built.get("traces")
        return bool(provider.force_flush(timeout_millis)) if provider is not None else True

    def shutdown(self) -> None:
        """End what was built."""
        provider = _built.get("traces")
        if provider is not None:
            provider.shutdown()


class LensTracer(trace.ProxyTracer):
    """Looks at each span which provider there is: the program's own, else the one that we build."""

    def __init__(self, name: str, version: str | None, schema_url: str | None, attributes: Any) -> None:
        super().__init__(name, version, schema_url, attributes)
        self._arguments = (name, version, schema_url, attributes)
        self._source: Any = None

    @property
    def _tracer(self) -> Tracer:  # what ProxyTracer's methods (opentelemetry-api 1.45) ask for
        provider = trace._TRACER_PROVIDER or _built.get("traces") or tracer_provider()
        if provider is None:
            return self._noop_tracer
        if provider is not self._source:
            self._real_tracer = provider.get_tracer(*self._arguments)
            self._source = provider
        return self._real_tracer or self._noop_tracer

    def get(self) -> Tracer:
        """The tracer that makes spans now."""
        return self._tracer


def _gated(name: str, tracer: LensTracer) -> Tracer:
    if not name.startswith("opentelemetry.instrumentation."):
        return tracer
    from lens_auto import http_services
    from lens_auto.groups import TrainingSpanGroup

    group = http_services.GROUP_OF_SCOPE.get(name)
    if group is None:
        return tracer
    if group == TrainingSpanGroup.SERVER and identity.rank()[0] < 0:
        tracer_provider()  # a service: now, while it starts, and not in its first request
    return http_services.GatedTracer(tracer.get, group)


def _replace_tracer_proxy(module: ModuleType) -> None:
    module._PROXY_TRACER_PROVIDER = LensTracerProvider()  # type: ignore[attr-defined]


def _replace_meter_proxy(module: ModuleType) -> None:
    """The API's own proxy; it builds the SDK's provider for the first meter, where metrics go anywhere."""

    class LensMeterProvider(module._ProxyMeterProvider):  # type: ignore[misc, name-defined]
        def get_meter(self, name: str, version: str | None = None, schema_url: str | None = None, *args: Any) -> Any:
            if self._real_meter_provider is None:
                built = meter_provider()
                if built is not None:
                    self.on_set_meter_provider(built)
            return super().get_meter(name, version, schema_url, *args)

        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            built = _built.get("metrics")
            return bool(built.force_flush(timeout_millis)) if built is not None else True

    module._PROXY_METER_PROVIDER = LensMeterProvider()  # type: ignore[attr-defined]


def _replace_logger_proxy(module: ModuleType) -> None:
    class LensLogger(module.ProxyLogger):  # type: ignore[misc, name-defined]
        @property
        def _logger(self) -> Any:
            provider = module._LOGGER_PROVIDER or logger_provider()
            if provider is None:
                return self._noop_logger
            return provider.get_logger(self._name, self._version, self._schema_url, self._attributes)

    class LensLoggerProvider(module.ProxyLoggerProvider):  # type: ignore[misc, name-defined]
        def get_logger(
            self, name: str, version: str | None = None, schema_url: str | None = None, attributes: Any = None
        ) -> Any:
            return LensLogger(name, version, schema_url, attributes)

    module._PROXY_LOGGER_PROVIDER = LensLoggerProvider()  # type: ignore[attr-defined]


def _install_asgi(module: ModuleType) -> None:
    from lens_auto import http_services

    http_services.install_asgi(module)


# --- building ---------------------------------------------------------------------------------------------------------


def tracer_provider() -> Any | None:
    """The SDK's tracer provider of this process, built now if need be; None where no span of it goes anywhere."""
    return _provider("traces")


def meter_provider() -> Any | None:
    """The SDK's meter provider of this process; None where metrics go nowhere."""
    return _provider("metrics")


def logger_provider() -> Any | None:
    """The SDK's logger provider of this process; None where logs go nowhere."""
    return _provider("logs")


def pipeline() -> Pipeline | None:
    """What was built so far; None before the first."""
    return _pipeline


def add(wanted: Mapping[str, Any]) -> bool:
    """What the program's `setup_telemetry` says about providers that are not built yet.

    Args:
        wanted: `sampler`, `span_exporter`, `metric_reader`: as in `Plan`; `resource`: added to what is detected;
            `exporter`: as `NEMO_LENS_EXPORTER`; `exports`: whether this rank exports; `traces`, `metrics`, `logs`:
            whether the signal is wanted.

    Returns:
        False where spans were made already: the caller adds to the providers what can be added.
    """
    with _lock:
        if "traces" in _built:
            return False
        _additions.update(wanted)
        if places.logs_wanted(prefix.environment(), _additions):
            _capture_logs()
        return True


def _provider(signal: str) -> Any | None:
    try:
        return _built[signal]
    except KeyError:
        pass
    if not _installed:
        return None
    with _lock:
        if signal not in _built:
            try:
                _built[signal] = _build(signal)
            except Exception as error:  # never in the program's way
                _built[signal] = None
                why = places.reason(signal, error)
                logger.warning("lens-auto: no %s of OpenTelemetry's own: %s", signal, why)
        return _built[signal]


def _build(signal: str) -> Any | None:
    global _pipeline
    names = places.destinations(signal, prefix.environment(), _additions, _exports)
    if not names and not _additions.get({"traces": "span_exporter", "metrics": "metric_reader"}.get(signal, "")):
        return None
    from lens_auto import pipelines

    if _pipeline is None:
        _pipeline = pipelines.Pipeline()
        end_in_children(_pipeline, _close)
    plan = _plan(signal, names)
    provider: Any
    if signal == "traces":
        _pipeline.add_traces(plan)
        provider = _pipeline.tracer_provider
    elif signal == "metrics":
        _pipeline.add_metrics(plan)
        provider = _pipeline.meter_provider
    else:
        _pipeline.add_logs(plan)
        provider = _pipeline.logger_provider
    os.register_at_fork(after_in_child=_name_child)  # after the SDK's own, which would have the last word
    return provider


def _plan(signal: str, names: list[str]) -> Plan:
    from lens_auto import http_services, log_capture, pipelines

    settings = runtime.configure()
    usable: list[str] = []
    for name in names:
        try:
            if name not in (places.CONSOLE, places.FILE):
                pipelines.exporter_factory(signal, name)
            usable.append(name)
        except pipelines.UnknownExporter as error:
            logger.warning("lens-auto: %s; the run directory is used instead", error)
            usable.append(places.FILE)
    plan = pipelines.Plan(
        resource={**identity.resource_attributes(), **_additions.get("resource", {})},
        sampler=_additions.get("sampler"),
        span_exporter=_additions.get("span_exporter"),
        metric_reader=_additions.get("metric_reader"),
        processors=[http_services.rollout_processor()] if signal == "traces" else [],
        log_processors=[log_capture.iteration_processor()] if signal == "logs" else [],
        locate=identity.locate,
        limit_bytes=settings.max_run_bytes,
        keep_unsent=True,
    )
    setattr(plan, signal, list(dict.fromkeys(usable)))
    return plan


def _exports() -> bool:
    """What the export strategy says of this process; one that is no rank always exports."""
    if "exports" in _additions:
        return bool(_additions["exports"])
    rank, world_size = identity.rank()
    if rank < 0:
        return True
    from lens_auto.config import NemoLensConfig
    from lens_auto.strategies import get_export_strategy

    try:
        config = NemoLensConfig.from_env()
        strategy = prefix.environment().get("NEMO_LENS_EXPORT_STRATEGY", "").strip() or config.export_strategy
        return bool(get_export_strategy(strategy)(config, rank, world_size))
    except ValueError as error:
        logger.warning("lens-auto: %s; spans of OpenTelemetry's own are exported from this rank", error)
        return True


# --- the end ----------------------------------------------------------------------------------------------------------


def _close() -> None:
    """At the process's exit: send what is waiting, bounded, and say where the spans are."""
    global _closed
    built = _pipeline
    if built is None or _closed:
        return
    _closed = True
    settings = runtime.configure()
    late = built.shutdown(settings.exit_timeout_s * 1000)
    if late:
        logger.warning(
            "lens-auto: %s not all sent within %g s at exit (NEMO_LENS_EXIT_TIMEOUT_S)",
            " and ".join(late),
            settings.exit_timeout_s,
        )
    files = identity.service_files()
    signal = next((each for each in _WORDS if each in files), None)
    if signal is not None and not settings.quiet:
        path, shown = files[signal], os.path.relpath(files[signal])
        print(
            f"lens-auto: {_WORDS[signal]} of this process are in {path if shown.startswith('..') else shown}",
            file=sys.stderr,
            flush=True,
        )


def end_in_children(pipeline: Pipeline, end: Callable[[], Any]) -> None:
    """Call `end` in children of multiprocessing too: they end in os._exit, which skips `atexit`."""

    def follow(module: ModuleType) -> None:
        def register(_: Any = None) -> None:
            module.Finalize(None, end, exitpriority=-90)

        register()
        module.register_after_fork(pipeline, register)  # a forked child forgets the finalizers

    import wrapt

    wrapt.register_post_import_hook(_guarded(follow), "multiprocessing.util")


def _after_fork() -> None:
    global _lock, _closed
    _lock = threading.RLock()
    _closed = False
    identity.after_fork()


def _name_child() -> None:
    """A forked child is a process of its own in what it sends."""
    if _pipeline is not None:
        from lens_auto.semconv import PROCESS_PID, SERVICE_INSTANCE_ID

        own = identity.resource_attributes()
        _pipeline.update_resource({name: own[name] for name in (PROCESS_PID, SERVICE_INSTANCE_ID) if name in own})
