"""`setup_telemetry`: telemetry that a program sets up itself, in the manner of Lens, and the handle that ends it.

Under `opentelemetry-instrument` everything runs already; the call then adopts it: its settings are added to what runs,
and nothing is set up twice.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import threading
import uuid
from numbers import Real
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics, trace

from lens_auto import destinations, prefix, providers, runtime, semconv, state
from lens_auto.identity import SERVICES_DIR
from lens_auto.strategies import ExportStrategy, get_export_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.metrics import Meter
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Tracer

    from lens_auto.config import NemoLensConfig
    from lens_auto.pipelines import Pipeline, Plan

logger = logging.getLogger("lens_auto")

EXPORTERS = ("otlp", "console", "file")
DEFAULT_TIMEOUT_MS = 5000

_initialized = False
_lock = threading.Lock()


class TelemetryHandle:
    """What `setup_telemetry` gives: who makes spans and metrics, and the end of both.

    Attributes:
        tracer: Makes spans; one that does nothing where this process exports none.
        meter: Makes instruments; one that does nothing where this process exports none.
        is_exporting: Whether what this process makes goes anywhere.
    """

    def __init__(self, tracer: Tracer, meter: Meter, is_exporting: bool = False) -> None:
        self.tracer = tracer
        self.meter = meter
        self.is_exporting = is_exporting
        self._end: Callable[[float], list[str]] | None = None
        self._then = "the rest is lost"

    def shutdown(self, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> None:
        """Sends what is waiting and ends traces, metrics and logs. A second call does nothing.

        Spans that are still open are closed and marked `nemo.span.truncated`.

        Args:
            timeout_ms: After this time the call returns, whatever an exporter still waits for; one line says what was
                not sent.

        Raises:
            TypeError: `timeout_ms` is no number; telemetry runs on.
        """
        given: Any = timeout_ms
        if not isinstance(given, Real):
            raise TypeError(f"timeout_ms must be a number of milliseconds, got {given!r}")
        end, self._end = self._end, None
        if end is None:
            return
        late = end(max(0.0, float(timeout_ms)))
        if late:
            logger.warning("lens-auto: %s not all sent within %g ms; %s", " and ".join(late), timeout_ms, self._then)


def setup_telemetry(
    config: NemoLensConfig,
    rank: int = 0,
    world_size: int = 1,
    resource_attributes: Mapping[str, Any] | None = None,
    span_exporter: SpanExporter | None = None,
    metric_reader: MetricReader | None = None,
    export_strategy: ExportStrategy | None = None,
    _allow_reinit: bool = False,
) -> TelemetryHandle:
    """Sets up telemetry for this process, once.

    Args:
        config: What to record and where it goes. An empty `run_id` is filled in.
        rank: Global rank of this process.
        world_size: Number of ranks.
        resource_attributes: Added to what is found out about the process, and stronger than that. What OpenTelemetry
            cannot hold is left out with one debug line.
        span_exporter: Takes the place of `config.exporter` for spans.
        metric_reader: Takes the place of `config.exporter` for metrics.
        export_strategy: Decides whether this rank exports, in place of the one that `config` names.
        _allow_reinit: For tests: set up again, and make the new providers the global ones.

    Returns:
        The handle. On a rank that does not export no span group is on and the providers do nothing.

    Raises:
        RuntimeError: Telemetry was set up in this process before.
        ValueError: `config` names a span group, an export strategy or an exporter that there is none of; the message
            lists those there are.
    """
    global _initialized
    with _lock:
        if _initialized and config.enabled and not _allow_reinit:
            raise RuntimeError(
                "setup_telemetry was called before in this process, with telemetry enabled; call it once, at the start,"
                " and hand the handle on"
            )
        if not config.enabled:
            if not providers.installed() and not _initialized:
                state.set_enabled_span_groups(frozenset())
            return _silent()
        groups = config.resolved_span_groups
        exporter = config.exporter.strip().lower()
        if exporter not in EXPORTERS:
            raise ValueError(f"unknown exporter {config.exporter!r}; there are: {', '.join(EXPORTERS)}")
        decide = export_strategy if callable(export_strategy) else get_export_strategy(config.export_strategy)
        given = config.run_id
        config.run_id = given or _run_id(world_size)
        settled = _Settled(config, rank, world_size, groups, exporter, bool(decide(config, rank, world_size)))
        settled.layered = export_strategy is None and config.export_strategy == "sampled"
        settled.given_attributes = resource_attributes
        if providers.installed() and not _allow_reinit:
            _check_run_id(given)
            handle = _guarded(_adopt, settled, span_exporter, metric_reader)
        else:
            handle = _guarded(_set_up, settled, span_exporter, metric_reader, _allow_reinit)
        _initialized = True
        return handle


def _guarded(work: Callable[..., TelemetryHandle], *arguments: Any) -> TelemetryHandle:
    """What telemetry itself fails at is no reason for a job not to run."""
    settled: _Settled = arguments[0]
    try:
        settled.attributes = _user_attributes(settled.given_attributes)
        settled.sampler = _sampler(settled)
        return work(*arguments)
    except Exception as error:
        logger.warning("lens-auto: telemetry is not set up: %s: %s", type(error).__name__, error)
        state.set_enabled_span_groups(frozenset())
        return _silent()


class _Settled:
    """What a call of `setup_telemetry` comes down to, after its arguments were checked."""

    def __init__(
        self,
        config: NemoLensConfig,
        rank: int,
        world_size: int,
        groups: frozenset[str],
        exporter: str,
        exports: bool,
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.groups = groups
        self.exporter = exporter
        self.exports = exports
        self.layered = False
        self.given_attributes: Mapping[str, Any] | None = None
        self.attributes: dict[str, Any] = {}
        self.sampler: Sampler | None = None


def _silent() -> TelemetryHandle:
    return TelemetryHandle(trace.NoOpTracer(), metrics.NoOpMeter(semconv.INSTRUMENTATION_SCOPE))


def _user_attributes(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    if not attributes:
        return {}
    from lens_auto.pipelines import clean_attributes

    return clean_attributes(attributes, "resource attributes")


def _sampler(settled: _Settled) -> Sampler | None:
    if not settled.config.sampler_enabled or not settled.exports:
        return None
    from lens_auto.pipelines import sampler_from_environment
    from lens_auto.sampling import RankAwareSampler

    rate = settled.config.export_sample_rate
    root = sampler_from_environment()
    return RankAwareSampler(settled.rank, settled.world_size, rate, root=root, layered=settled.layered)


# --- on our own -------------------------------------------------------------------------------------------------------


def _set_up(
    settled: _Settled, span_exporter: SpanExporter | None, metric_reader: MetricReader | None, replace: bool
) -> TelemetryHandle:
    """Build providers and make them the global ones."""
    config = settled.config
    if not settled.exports or not _is_allowed():
        state.set_enabled_span_groups(frozenset())
        return _silent()
    from lens_auto import pipelines

    plan = _plan(settled, span_exporter, metric_reader)
    pipeline = pipelines.build(plan)
    pipelines.set_global(pipeline, replace)
    tracer: Tracer = trace.NoOpTracer()
    meter: Meter = metrics.NoOpMeter(semconv.INSTRUMENTATION_SCOPE)
    if pipeline.tracer_provider is not None:
        tracer = pipeline.tracer_provider.get_tracer(semconv.INSTRUMENTATION_SCOPE)
    if pipeline.meter_provider is not None:
        meter = pipeline.meter_provider.get_meter(semconv.INSTRUMENTATION_SCOPE)
    groups = settled.groups if pipeline.tracer_provider is not None else frozenset()
    state.set_enabled_span_groups(groups)
    handle = TelemetryHandle(tracer, meter, is_exporting=pipeline.is_some)
    handle._end = _ending(pipeline, groups)
    if config.logs_enabled:
        from lens_auto.logging_bridge import setup_logging_bridge

        setup_logging_bridge()
    atexit.register(handle.shutdown)  # for a program that forgets to
    providers.end_in_children(pipeline, _ending_child(pipeline))
    os.register_at_fork(after_in_child=_naming(pipeline, settled))  # after the SDK's own, which names it by a UUID
    return handle


def _ending_child(pipeline: Pipeline) -> Callable[[], None]:
    """What multiprocessing's children do at their end. Their metrics are their parent's, which are not sent twice."""
    parent = os.getpid()

    def end() -> None:
        if os.getpid() != parent:
            pipeline.shutdown(DEFAULT_TIMEOUT_MS, but=destinations.METRICS)

    return end


def _naming(pipeline: Pipeline, settled: _Settled) -> Callable[[], None]:
    """A forked child is a process of its own in what it sends, and no rank, as under `opentelemetry-instrument`."""
    from lens_auto.resources import user_attributes

    run_id, host = settled.config.run_id, os.uname().nodename
    given = {**user_attributes(), **settled.attributes}

    def name_child() -> None:
        pid = os.getpid()
        own = {semconv.PROCESS_PID: pid, semconv.SERVICE_INSTANCE_ID: f"{run_id}-{host}-{pid}"}
        pipeline.update_resource({**own, **{name: given[name] for name in own if name in given}})

    return name_child


def _is_allowed() -> bool:
    """Whether the environment lets telemetry run at all; these variables win over what a program says."""
    from lens_auto.settings import parse_bool

    off = parse_bool(os.environ.get("NEMO_LENS_DISABLED", "")) is True
    return not off and os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"


def _plan(settled: _Settled, span_exporter: SpanExporter | None, metric_reader: MetricReader | None) -> Plan:
    from lens_auto import pipelines

    config = settled.config
    names = {
        signal: _exporter_names(settled.exporter, signal) if enabled else []
        for signal, enabled in (
            (destinations.TRACES, config.traces_enabled),
            (destinations.METRICS, config.metrics_enabled),
            (destinations.LOGS, config.logs_enabled),
        )
    }
    return pipelines.Plan(
        resource=_resource(settled),
        traces=names[destinations.TRACES],
        metrics=names[destinations.METRICS],
        logs=names[destinations.LOGS],
        sampler=settled.sampler,
        span_exporter=span_exporter if config.traces_enabled else None,
        metric_reader=metric_reader if config.metrics_enabled else None,
        locate=_run_file(config.run_id, settled.rank),
    )


def _exporter_names(exporter: str, signal: str) -> list[str]:
    """What `OTEL_<SIGNAL>_EXPORTER` names; unset: `config.exporter`."""
    named = destinations.exporter_names(signal)
    if named is not None:
        return named
    return [destinations.FILE if exporter == "file" else exporter]


def _run_file(run_id: str, rank: int) -> Callable[[str], str]:
    """Files for `exporter="file"`: in the run directory, named by rank and process."""

    def locate(signal: str) -> str:
        from lens_auto.recorder import rundir, spool

        wanted = os.environ.get("NEMO_LENS_RUN_DIR", "").strip()
        found = rundir.claim(os.path.abspath(wanted) if wanted else rundir.default_run_dir(run_id), run_id)
        folder = spool.private_folder(os.path.join(found, SERVICES_DIR))
        suffix = "" if signal == "traces" else f".{signal}"
        return os.path.join(folder, f"rank{rank}-{os.getpid()}{suffix}.jsonl")

    known: dict[tuple[str, int], str] = {}

    def located(signal: str) -> str:
        key = (signal, os.getpid())
        if key not in known:
            known[key] = locate(signal)
        return known[key]

    return located


def _resource(settled: _Settled) -> dict[str, Any]:
    """What is detected, then what the configuration says, then what the user set, each stronger than the one before."""
    from lens_auto.resources import detect_local, rank_attributes, user_attributes

    config = settled.config
    attributes: dict[str, Any] = {
        **detect_local(),
        **rank_attributes(settled.rank, settled.world_size, _local_rank(), config.run_id),
        semconv.SERVICE_NAME: config.service_name,
    }
    for name, value in (
        (semconv.NEMO_USER_ID, config.user),
        (semconv.WANDB_ENTITY, config.wandb_entity),
        (semconv.WANDB_PROJECT, config.wandb_project),
    ):
        if value:
            attributes[name] = value
    return {**attributes, **user_attributes(), **settled.attributes}


def _local_rank() -> int:
    try:
        return int(os.environ["LOCAL_RANK"])
    except (KeyError, ValueError):
        return 0


def _ending(pipeline: Pipeline, groups: frozenset[str]) -> Callable[[float], list[str]]:
    """What `shutdown` does to providers of our own."""

    def end(timeout_ms: float) -> list[str]:
        if state.enabled_span_groups == groups:  # from here on a span would go nowhere
            state.set_enabled_span_groups(frozenset())
        if pipeline.logger_provider is not None:
            from lens_auto.logging_bridge import OTelLogHandler

            for handler in list(logging.getLogger().handlers):
                if isinstance(handler, OTelLogHandler):
                    logging.getLogger().removeHandler(handler)
        return pipeline.shutdown(timeout_ms)

    return end


# --- under opentelemetry-instrument -----------------------------------------------------------------------------------


def _adopt(
    settled: _Settled, span_exporter: SpanExporter | None, metric_reader: MetricReader | None
) -> TelemetryHandle:
    """Add what the call says to what runs."""
    config = settled.config
    wanted: dict[str, Any] = {
        "resource": _additional_resource(settled),
        "exports": settled.exports,
        "traces": config.traces_enabled,
        "metrics": config.metrics_enabled,
        "logs": config.logs_enabled,
    }
    if settled.exporter != type(config).exporter:
        wanted["exporter"] = settled.exporter
    if settled.sampler is not None:
        wanted["sampler"] = settled.sampler
    if span_exporter is not None and config.traces_enabled:
        wanted["span_exporter"] = span_exporter
    if metric_reader is not None and config.metrics_enabled:
        wanted["metric_reader"] = metric_reader
    if not providers.add(wanted):
        _add_late(wanted)
    # The run directory takes every rank's: the strategy decides about what leaves the node.
    if not settled.exports and not destinations.destinations(
        destinations.TRACES, prefix.environment(), wanted, lambda: False
    ):
        state.set_enabled_span_groups(frozenset())
        return _silent()
    runtime.set_groups(runtime.groups | (settled.groups if config.traces_enabled else frozenset()))
    handle = TelemetryHandle(
        trace.get_tracer(semconv.INSTRUMENTATION_SCOPE), metrics.get_meter(semconv.INSTRUMENTATION_SCOPE), True
    )
    handle._end = _flush_what_runs
    handle._then = (
        "they are tried again until the process ends; spans that are not sent by then are kept in"
        f" {_run_dir_shown()} (*unsent.jsonl), from where lens-auto recover sends them"
    )
    return handle


def _run_dir_shown() -> str:
    from lens_auto.recorder import rundir

    wanted = runtime.configure().run_dir
    return rundir.shown(wanted or rundir.default_run_dir(os.environ.get(runtime.RUN_ID_VARIABLE, "")))


def _check_run_id(given: str) -> None:
    """The run directory and the ranks' records have their run id before the program runs."""
    run_id = os.environ.get(runtime.RUN_ID_VARIABLE, "")
    if given and given != run_id:
        logger.warning(
            "lens-auto: run_id=%r of setup_telemetry is not used, this run is %r already; set %s=%s before the start",
            given,
            run_id,
            runtime.RUN_ID_VARIABLE,
            given,
        )


def _additional_resource(settled: _Settled) -> dict[str, Any]:
    """What the call says about the process that its environment does not."""
    from lens_auto.resources import user_attributes

    config = settled.config
    attributes: dict[str, Any] = {semconv.DL_RANK: settled.rank, semconv.DL_WORLD_SIZE: settled.world_size}
    if config.service_name != type(config).service_name:
        attributes[semconv.SERVICE_NAME] = config.service_name
    for name, value in (
        (semconv.NEMO_USER_ID, config.user),
        (semconv.WANDB_ENTITY, config.wandb_entity),
        (semconv.WANDB_PROJECT, config.wandb_project),
    ):
        if value:
            attributes[name] = value
    return {**attributes, **user_attributes(), **settled.attributes}


def _add_late(wanted: dict[str, Any]) -> None:
    """The program made spans before it called us: what can still be added is."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    pipeline = providers.pipeline()
    if pipeline is None:
        return
    if not pipeline.update_resource(wanted["resource"]):
        logger.debug("lens-auto: resource attributes of setup_telemetry came after the first span and are left out")
    exporter = wanted.get("span_exporter")
    if exporter is not None and pipeline.tracer_provider is not None:
        pipeline.tracer_provider.add_span_processor(BatchSpanProcessor(exporter))
    for late in ("sampler", "metric_reader", "exporter"):
        if late in wanted:
            logger.warning("lens-auto: the %s of setup_telemetry came after the first span and is not used", late)


def _flush_what_runs(timeout_ms: float) -> list[str]:
    pipeline = providers.pipeline()
    if pipeline is None or pipeline.flush(timeout_ms):
        return []
    return ["telemetry"]


# --- the run id -------------------------------------------------------------------------------------------------------


def _run_id(world_size: int) -> str:
    """A run id that all ranks come to alike, without a word between them where the environment allows that."""
    for variable in ("NEMO_LENS_RUN_ID", "SLURM_JOB_ID"):
        found = os.environ.get(variable, "").strip()
        if found:
            return found
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if elastic and elastic != "none":
        return elastic
    if world_size <= 1:
        return str(uuid.uuid4())
    return _run_id_from_store() or _run_id_from_launcher() or _own_run_id()


def _run_id_from_store() -> str | None:
    """The first rank to come sets it. One exchange with the store, and no waiting for another rank."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        # torch 2.4 to 2.13; the store is a prefix store of this init already
        store = distributed.distributed_c10d._get_default_store()
        return str(store.compare_set("lens-auto/run-id", "", str(uuid.uuid4())).decode())
    except Exception as error:
        logger.debug("lens-auto: the job's store gives no run id (%s)", error)
        return None


def _run_id_from_launcher() -> str | None:
    """Ranks that one launcher started on one host: the launcher's process names the run."""
    if os.environ.get("LOCAL_WORLD_SIZE", "") != os.environ.get("WORLD_SIZE", "-"):
        return None
    from lens_auto.recorder.finish import process_start_ticks

    parent = os.getppid()
    text = f"{os.uname().nodename} {parent} {process_start_ticks(parent)} {os.environ.get('MASTER_PORT', '')}"
    return str(uuid.UUID(bytes=hashlib.blake2b(text.encode(), digest_size=16).digest(), version=4))


def _own_run_id() -> str:
    if _is_allowed():  # else nothing carries the id
        logger.warning(
            "lens-auto: nothing names this run on all ranks, so each rank uses a run id of its own; set"
            " NEMO_LENS_RUN_ID, or call setup_telemetry after init_process_group"
        )
    return str(uuid.uuid4())


def _reset_for_tests() -> None:
    """Forget that telemetry was set up."""
    global _initialized
    _initialized = False


__all__ = ["DEFAULT_TIMEOUT_MS", "EXPORTERS", "TelemetryHandle", "setup_telemetry"]
