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
from lens_auto import runtime
from lens_auto.settings import Settings, parse_bool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from opentelemetry.trace import Tracer

    from lens_auto.pipelines import Pipeline, Plan

logger = logging.getLogger("lens_auto")

SERVICES_DIR = "services"
_FILE_SUFFIX = {"traces": "", "metrics": ".metrics", "logs": ".logs", "unsent": ".unsent"}
_RANK_FILE = {"traces": "spans", "metrics": "metrics", "logs": "logs", "unsent": "unsent"}

_installed = False
_lock = threading.RLock()
_additions: dict[str, Any] = {}  # what `setup_telemetry` wants of providers that are not built yet
_built: dict[str, Any] = {}  # signal -> the SDK's provider, or None where the signal is off
_pipeline: Pipeline | None = None
_service_folder: tuple[int, str] | None = None
_wrote: set[str] = set()
_closed = False
_bridged = False


def install() -> None:
    """Take the place of OpenTelemetry's proxies. Called by `LensConfigurator`, once; imports nothing of the SDK."""
    global _installed
    settings = runtime.configure()
    prefix = os.environ.get("NEMO_LENS_CONFIG_PREFIX", "").strip().rstrip("_")
    if prefix:
        use_prefix(prefix)
        settings = runtime.configure()
    if settings.disabled or _installed:
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
        (_follow_gym, "nemo_gym"),
    ):
        wrapt.register_post_import_hook(_guarded(hook), module)
    if _logs_wanted():
        _bridge_logging()
    os.register_at_fork(after_in_child=_after_fork)


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
    if group == TrainingSpanGroup.SERVER and not _is_rank():
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
        if wanted.get("logs"):
            _bridge_logging()
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
                logger.warning("lens-auto: no %s of OpenTelemetry's own: %s: %s", signal, type(error).__name__, error)
        return _built[signal]


def _build(signal: str) -> Any | None:
    global _pipeline
    names = destinations(signal)
    if not names and not _additions.get({"traces": "span_exporter", "metrics": "metric_reader"}.get(signal, "")):
        return None
    from lens_auto import pipelines

    if _pipeline is None:
        _pipeline = pipelines.Pipeline()
        atexit.register(_close)
        if "multiprocessing.util" in sys.modules:  # its children end in os._exit, after its own finalizers
            sys.modules["multiprocessing.util"].Finalize(None, _close, exitpriority=-90)
    plan = _plan(signal, names)
    if signal == "traces":
        _pipeline.add_traces(plan)
        return _pipeline.tracer_provider
    if signal == "metrics":
        _pipeline.add_metrics(plan)
        return _pipeline.meter_provider
    _pipeline.add_logs(plan)
    return _pipeline.logger_provider


def _plan(signal: str, names: list[str]) -> Plan:
    from lens_auto import http_services, pipelines

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
        resource={**resource_attributes(), **_additions.get("resource", {})},
        sampler=_additions.get("sampler"),
        span_exporter=_additions.get("span_exporter"),
        metric_reader=_additions.get("metric_reader"),
        processors=[http_services.rollout_processor()] if signal == "traces" else [],
        log_processors=[_iteration_log_processor()] if signal == "logs" else [],
        locate=locate,
        limit_bytes=settings.max_run_bytes,
        keep_unsent=True,
    )
    setattr(plan, signal, list(dict.fromkeys(usable)))
    return plan


def destinations(signal: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Which exporters a signal of this process goes to: what the variables name, else the run directory.

    `OTEL_<SIGNAL>_EXPORTER` first, then `NEMO_LENS_EXPORTER`, then `otlp` where an endpoint is set. Without any of them
    spans go to the run directory, and logs where they are wanted; metrics go nowhere.
    """
    environ = _environment(environ)
    switch = parse_bool(environ.get(f"NEMO_LENS_{signal.upper()}_ENABLED", ""))
    if switch is False or (switch is None and _additions.get(signal) is False and signal != "logs"):
        return []
    names = places.exporter_names(signal, environ)
    if signal == "logs" and names is None and not _logs_wanted(environ):
        return []
    if names is None:
        own = environ.get("NEMO_LENS_EXPORTER", "").strip().lower() or _additions.get("exporter", "")
        if own in ("console", "otlp", "file"):
            names = [places.FILE if own == "file" else own]
        elif places.endpoint_is_set(signal, environ):
            names = [places.OTLP]
        else:
            return [] if signal == "metrics" else [places.FILE]
    if any(name != places.FILE for name in names) and not _exports_here(environ):
        names = [name for name in names if name == places.FILE]
    return names


def _exports_here(environ: Mapping[str, str]) -> bool:
    """What the export strategy says of this process; one that is no rank always exports."""
    if "exports" in _additions:
        return bool(_additions["exports"])
    rank, world_size = _rank()
    if rank < 0:
        return True
    from lens_auto.config import NemoLensConfig
    from lens_auto.strategies import get_export_strategy

    try:
        config = NemoLensConfig.from_env()
        config.export_strategy = environ.get("NEMO_LENS_EXPORT_STRATEGY", "").strip() or config.export_strategy
        return bool(get_export_strategy(config.export_strategy)(config, rank, world_size))
    except ValueError as error:
        logger.warning("lens-auto: %s; spans of OpenTelemetry's own are exported from this rank", error)
        return True


def _rank() -> tuple[int, int]:
    """Rank and world size; rank -1 in a process that is no rank, as far as is known now."""
    recorder = runtime.recorder
    if recorder is not None and recorder.rank >= 0:
        return recorder.rank, recorder.world_size
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return -1, 0


def _is_rank() -> bool:
    return _rank()[0] >= 0


def resource_attributes() -> dict[str, str | int]:
    """The resource of this process: a rank's, or a service's, which has no rank and is named by host and process."""
    from lens_auto import semconv
    from lens_auto.resources import rank_attributes, user_attributes

    run_id = os.environ.get(runtime.RUN_ID_VARIABLE)
    rank, world_size = _rank()
    if rank >= 0:
        try:
            local_rank = int(os.environ["LOCAL_RANK"])
        except (KeyError, ValueError):
            local_rank = rank if world_size <= 1 else -1
        return rank_attributes(rank, world_size, local_rank, run_id)
    attributes = rank_attributes(0, 1, 0, run_id)
    for name in (semconv.DL_RANK, semconv.DL_WORLD_SIZE, semconv.DL_LOCAL_RANK):
        del attributes[name]
    instance = f"{attributes[semconv.HOST_NAME]}-{os.getpid()}"
    attributes[semconv.SERVICE_INSTANCE_ID] = f"{run_id}-{instance}" if run_id else instance
    return {**attributes, **user_attributes()}


def locate(signal: str) -> str:
    """The file of a signal in the run directory: a rank's folder there, else `services/<host>-<pid>.jsonl`.

    While a rank runs, its folder is in the spool; what closes the rank moves it.

    Raises:
        OSError: The run directory cannot be made.
    """
    recorder = runtime.recorder
    if recorder is not None and recorder.folder is not None:
        return os.path.join(recorder.folder, f"{_RANK_FILE[signal]}.jsonl")
    keeper = runtime._housekeeper
    if keeper is not None and keeper.run_dir and keeper.recorder.folder is not None:  # the rank has closed
        from lens_auto.recorder.layout import RANKS_DIR

        folder = os.path.join(keeper.run_dir, RANKS_DIR, os.path.basename(keeper.recorder.folder))
        return os.path.join(folder, f"{_RANK_FILE[signal]}.jsonl")
    import socket

    from lens_auto.recorder import rundir

    name = f"{rundir.safe_name(socket.gethostname())}-{os.getpid()}{_FILE_SUFFIX[signal]}.jsonl"
    path = os.path.join(_services_dir(), name)
    _wrote.add(path)
    return path


def _services_dir() -> str:
    """The folder for services in this run's directory; made when it is first needed."""
    global _service_folder
    if _service_folder is not None and _service_folder[0] == os.getpid():
        return _service_folder[1]
    from lens_auto.recorder import rundir, spool

    settings = runtime.configure()
    run_id = os.environ.get(runtime.RUN_ID_VARIABLE) or runtime._first_run_id()
    wanted = os.path.abspath(settings.run_dir) if settings.run_dir else rundir.default_run_dir(run_id)
    folder = spool.private_folder(os.path.join(rundir.claim(wanted, run_id), SERVICES_DIR))
    _service_folder = (os.getpid(), folder)
    return folder


# --- logs -------------------------------------------------------------------------------------------------------------


def _logs_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    switch = parse_bool(_environment(environ).get("NEMO_LENS_LOGS_ENABLED", ""))
    return bool(_additions.get("logs")) if switch is None else switch


def _bridge_logging() -> None:
    """Send what reaches the root logger to OpenTelemetry as well.

    Not as a handler of the root logger: `logging.basicConfig()` does nothing where there is one, and the program would
    lose its own output.
    """
    global _bridged
    if _bridged:
        return
    _bridged = True
    import wrapt

    handler: list[logging.Handler] = []
    inside = threading.local()

    def call_handlers(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        record = args[0] if args else kwargs["record"]
        if record.levelno < logging.INFO or getattr(inside, "busy", False) or not _reaches_root(instance):
            return
        inside.busy = True  # what building the provider logs must not come back here
        try:
            if not handler:
                from lens_auto.logging_bridge import OTelLogHandler

                provider = logger_provider()
                if provider is None:
                    return
                handler.append(OTelLogHandler(provider, logging.INFO))
            handler[0].handle(record)
        finally:
            inside.busy = False

    wrapt.wrap_function_wrapper(logging.Logger, "callHandlers", call_handlers)


def _reaches_root(found: logging.Logger | None) -> bool:
    while found is not None and found.parent is not None:
        if not found.propagate:
            return False
        found = found.parent
    return True


def _iteration_log_processor() -> Any:
    """Gives a log record of a rank its rank, and the iteration's trace where no span is current."""
    from opentelemetry.sdk._logs import LogRecordProcessor

    from lens_auto.semconv import DL_RANK

    class IterationLogs(LogRecordProcessor):
        def on_emit(self, log_record: Any) -> None:
            rank, _ = _rank()
            if rank < 0:
                return
            record = log_record.log_record
            record.attributes[DL_RANK] = rank
            if not record.trace_id:
                found = iteration_span_context()
                if found is not None:
                    record.trace_id, record.span_id, record.trace_flags = found

        def shutdown(self) -> None:
            pass

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return True

    return IterationLogs()


def iteration_span_context() -> tuple[int, int, Any] | None:
    """Trace id, span id and flags of the iteration that this rank is in; None before the ranks share a seed."""
    recorder, keeper = runtime.recorder, runtime._housekeeper
    seed = keeper.info.get("seed") if keeper is not None else None
    if recorder is None or not seed or recorder.rank < 0:
        return None
    from lens_auto.recorder import ids

    known = bytes.fromhex(str(seed))
    iteration = recorder.iteration
    trace_id = int.from_bytes(ids.iteration_trace_id(known, iteration), "big")
    span_id = int.from_bytes(ids.iteration_span_id(known, iteration, recorder.rank), "big")
    return trace_id, span_id, trace.TraceFlags(trace.TraceFlags.SAMPLED)


# --- variables with another prefix ------------------------------------------------------------------------------------

_prefix = ""


def use_prefix(prefix: str) -> None:
    """Let `<prefix>_<KEY>` win over `NEMO_LENS_<KEY>` in this process from now on."""
    global _prefix
    _prefix = prefix
    settings = Settings.from_env(_environment(os.environ))
    for problem in settings.problems:
        logger.warning("lens-auto: (with %s_ in front of NEMO_LENS_) %s", prefix, problem)
    runtime.settings = settings
    runtime.set_groups(frozenset() if settings.disabled else settings.groups)


def _environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    if not _prefix:
        return environ
    from lens_auto import http_services

    return http_services.effective_environment(_prefix, environ)


def _follow_gym(module: ModuleType) -> None:
    """NeMo Gym is being imported: its variables count."""
    from lens_auto import http_services

    if any(name.startswith(f"{http_services.GYM_PREFIX}_") for name in os.environ) and not _prefix:
        use_prefix(http_services.GYM_PREFIX)


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
    spans = sorted(path for path in _wrote if os.path.exists(path))
    if spans and not settings.quiet:
        shown = os.path.relpath(spans[0])
        print(
            f"lens-auto: spans of this process are in {spans[0] if shown.startswith('..') else shown}",
            file=sys.stderr,
            flush=True,
        )


def _after_fork() -> None:
    global _lock, _service_folder, _closed
    _lock = threading.RLock()
    _service_folder = None
    _closed = False
    _wrote.clear()
    if _pipeline is not None:
        from lens_auto.semconv import PROCESS_PID, SERVICE_INSTANCE_ID

        own = resource_attributes()
        _pipeline.update_resource({name: own[name] for name in (PROCESS_PID, SERVICE_INSTANCE_ID) if name in own})
