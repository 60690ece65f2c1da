"""The SDK's providers of one process: how they are built from a configuration, and how they end in bounded time.

Both ways in use it: `handle.setup_telemetry`, and `providers` when a program under `opentelemetry-instrument` makes its
first span. Needs the SDK, so neither imports it before that.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

from lens_auto import destinations, sdk_exporters
from lens_auto.destinations import CONSOLE, FILE, LOGS, METRICS, OTLP, TRACES
from lens_auto.semconv import NEMO_SPAN_TRUNCATED
from lens_auto.values import encodable, held

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import Sampler

logger = logging.getLogger("lens_auto")

FILE_VARIABLE = "NEMO_LENS_FILE"  # a file for spans in place of those in the run directory
_BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_MAX_OPEN_SPANS = 10_000
_KEPT_SHARE = 0.3  # of the time for shutdown: what is left to write down spans that could not be sent


class UnknownExporter(ValueError):
    """No installed package makes an exporter of this name; the message lists those there are."""


@dataclass
class Plan:
    """What a process is to send where.

    Attributes:
        resource: Who emits.
        traces, metrics, logs: Names of exporters; empty: the signal is off.
        sampler: The head sampler; None: the one that `OTEL_TRACES_SAMPLER` names.
        span_exporter: Takes the place of the exporters in `traces`.
        metric_reader: Takes the place of the exporters in `metrics`.
        processors: Look at every span before the exporters do.
        log_processors: Look at every log record before the exporters do.
        locate: Gives the file of a signal for the exporter `lens_file`.
        limit_bytes: How much such a file may hold.
        keep_unsent: Spans that an exporter could not send go to the file of `locate("unsent")`.
    """

    resource: Mapping[str, Any]
    traces: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    sampler: Sampler | None = None
    span_exporter: SpanExporter | None = None
    metric_reader: MetricReader | None = None
    processors: Sequence[SpanProcessor] = ()
    log_processors: Sequence[Any] = ()
    locate: Callable[[str], str] | None = None
    limit_bytes: int = 1 << 30
    keep_unsent: bool = False

    def file(self, signal: str) -> sdk_exporters.JsonLinesFile:
        """The file of a signal (`traces`, `metrics`, `logs` or `unsent`)."""
        named = os.environ.get(FILE_VARIABLE, "").strip() if signal == TRACES else ""
        if named:
            return sdk_exporters.JsonLinesFile(lambda: named, sys.maxsize)
        locate = self.locate
        if locate is None:
            raise UnknownExporter("there is no run directory to write to")
        return sdk_exporters.JsonLinesFile(lambda: locate(signal), self.limit_bytes)


class Pipeline:
    """The providers that a plan asks for; a signal that is off has none.

    Attributes:
        tracer_provider: The SDK's, or None.
        meter_provider: The SDK's, or None.
        logger_provider: The SDK's, or None.
    """

    def __init__(self) -> None:
        self.tracer_provider: TracerProvider | None = None
        self.meter_provider: MeterProvider | None = None
        self.logger_provider: LoggerProvider | None = None
        self._keepers: list[_KeepsUnsent] = []
        self._ends: list[_Call] = []
        os.register_at_fork(after_in_child=self._after_fork)

    @property
    def is_some(self) -> bool:
        """Whether any signal has a provider."""
        return any((self.tracer_provider, self.meter_provider, self.logger_provider))

    def _after_fork(self) -> None:
        for end in self._ends:
            end.after_fork()

    def add_traces(self, plan: Plan) -> None:
        """Build the tracer provider of a plan."""
        provider = TracerProvider(
            sampler=plan.sampler or sampler_from_environment(),
            resource=Resource.create(dict(plan.resource)),
            id_generator=id_generator(),
            shutdown_on_exit=False,
        )
        if plan.span_exporter is not None:
            made = [BatchSpanProcessor(plan.span_exporter)]
        else:
            made = _usable(TRACES, plan.traces, lambda name: self._span_processor(name, plan))
        if not made:
            return
        # OpenSpans first: at shutdown it ends what is open while the others still take it.
        for processor in (OpenSpans(), *plan.processors, *made):
            provider.add_span_processor(processor)
        self.tracer_provider = provider
        self._end(TRACES, provider.shutdown, plan.span_exporter is not None or _is_remote(plan.traces))

    def _span_processor(self, name: str, plan: Plan) -> SpanProcessor:
        # What goes to the console or a file goes at once: nothing of it is lost with the process.
        if name == CONSOLE:
            return SimpleSpanProcessor(sdk_exporters.ConsoleSpanExporter())
        if name == FILE:
            return SimpleSpanProcessor(sdk_exporters.FileSpanExporter(plan.file(TRACES)))
        exporter = cast("SpanExporter", make_exporter(TRACES, name))
        if not plan.keep_unsent:
            return BatchSpanProcessor(exporter)
        keeper = _KeepsUnsent(exporter, plan.file("unsent"))
        processor = BatchSpanProcessor(keeper)
        self._keepers.append(keeper)
        return processor

    def add_metrics(self, plan: Plan) -> None:
        """Build the meter provider of a plan."""
        if plan.metric_reader is not None:
            readers = [plan.metric_reader]
        else:
            readers = _usable(METRICS, plan.metrics, lambda name: metric_reader(name, plan))
        if not readers:
            return
        provider = MeterProvider(readers, Resource.create(dict(plan.resource)), shutdown_on_exit=False)
        self.meter_provider = provider
        self._end(METRICS, provider.shutdown, plan.metric_reader is not None or _is_remote(plan.metrics))

    def add_logs(self, plan: Plan) -> None:
        """Build the logger provider of a plan."""
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, SimpleLogRecordProcessor

        def make(name: str) -> Any:
            if name == CONSOLE:
                return SimpleLogRecordProcessor(sdk_exporters.ConsoleLogExporter())
            if name == FILE:
                return SimpleLogRecordProcessor(sdk_exporters.FileLogExporter(plan.file(LOGS)))
            return BatchLogRecordProcessor(make_exporter(LOGS, name))

        provider = LoggerProvider(resource=Resource.create(dict(plan.resource)), shutdown_on_exit=False)
        made = _usable(LOGS, plan.logs, make)
        if not made:
            return
        for processor in (*plan.log_processors, *made):
            provider.add_log_record_processor(processor)
        self.logger_provider = provider
        self._end(LOGS, provider.shutdown, _is_remote(plan.logs))

    def _end(self, name: str, work: Callable[[], Any], may_block: bool) -> None:
        self._ends.append(_ParkedCall(name, work) if may_block else _Call(name, work))

    def flush(self, timeout_ms: float) -> bool:
        """Export what is waiting. False where that took longer, or an exporter gave up."""
        deadline = time.monotonic() + timeout_ms / 1000
        providers = (self.tracer_provider, self.meter_provider, self.logger_provider)
        calls = [
            _ParkedCall("flush", partial(provider.force_flush, int(timeout_ms)))
            for provider in providers
            if provider is not None
        ]
        for call in calls:
            call.go()
        ended = [call.wait(deadline) for call in calls]
        return all(ended) and not any(call.result is False for call in calls)

    def shutdown(self, timeout_ms: float, but: str = "") -> list[str]:
        """End all signals (but one) at the same time: open spans are closed and marked, what is waiting is exported.

        Returns:
            The signals that had not ended when the time was up; the process need not wait for them.
        """
        began = time.monotonic()
        deadline = began + timeout_ms / 1000
        ends = [end for end in self._ends if end.name != but]
        for end in ends:
            end.go()
        if self._keepers:
            soft = began + timeout_ms / 1000 * (1 - _KEPT_SHARE)
            late = [end.name for end in ends if not end.wait(soft)]
            for keeper in self._keepers if late else ():
                keeper.give_up()
        late = [end.name for end in ends if not end.wait(deadline)]
        for keeper in self._keepers if late else ():
            keeper.keep()
        return late

    def update_resource(self, attributes: Mapping[str, Any]) -> bool:
        """Add to the resource of spans made from now on; False where this SDK cannot."""
        done = True
        for provider in (self.tracer_provider, self.meter_provider, self.logger_provider):
            if provider is None:
                continue
            # Private, in SDK 1.40 and later, for what changes with a fork.
            update = getattr(provider, "_update_resource", None)
            if update is None:
                done = False
            else:
                update(Resource(dict(attributes)))
        return done


def build(plan: Plan) -> Pipeline:
    """Build every provider that a plan asks for. A signal that cannot be built is left out, with one line."""
    pipeline = Pipeline()
    for signal, wanted, add in (
        (TRACES, plan.traces or plan.span_exporter is not None, pipeline.add_traces),
        (METRICS, plan.metrics or plan.metric_reader is not None, pipeline.add_metrics),
        (LOGS, plan.logs, pipeline.add_logs),
    ):
        if wanted:
            try:
                add(plan)
            except Exception as error:
                logger.warning(
                    "lens-auto: no %s of OpenTelemetry's own: %s", signal, destinations.reason(signal, error)
                )
    return pipeline


def _usable(signal: str, names: Sequence[str], make: Callable[[str], Any]) -> list[Any]:
    """What is made for each exporter's name; one that fails costs one line, and the others go on."""
    made = []
    for name in names:
        try:
            made.append(make(name))
        except Exception as error:
            logger.warning(
                "lens-auto: no %s go to the exporter %r: %s", signal, name, destinations.reason(signal, error)
            )
    return made


# --- exporters, sampler, ids ------------------------------------------------------------------------------------------


def exporter_factory(signal: str, name: str, environ: Mapping[str, str] = os.environ) -> Callable[[], Any]:
    """What makes an exporter of a name among OpenTelemetry's entry points; `otlp` is by the protocol, else grpc.

    Raises:
        UnknownExporter: the name or protocol is not there.
    """
    wanted = name
    if name == OTLP:
        variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        found = next(((each, environ[each].strip()) for each in variables if environ.get(each, "").strip()), None)
        wanted = _BY_PROTOCOL.get(found[1] if found else "grpc", "")
        if found and not wanted:
            raise UnknownExporter(f"{found[0]}={found[1]!r} is not one of {', '.join(_BY_PROTOCOL)}")
    points = entry_points(group=f"opentelemetry_{signal}_exporter")
    for point in points:
        if point.name == wanted:
            return cast("Callable[[], Any]", point.load())
    installed = ", ".join(sorted({point.name for point in points} | {CONSOLE, FILE}))
    raise UnknownExporter(f"{signal} exporter {name!r} is not installed; there are: {installed}")


def make_exporter(signal: str, name: str) -> Any:
    """An exporter of a name. Raises UnknownExporter as `exporter_factory` does."""
    return exporter_factory(signal, name)()


def metric_reader(name: str, plan: Plan) -> MetricReader:
    if name == CONSOLE:
        exporter: Any = sdk_exporters.console_metric_exporter()
    elif name == FILE:
        exporter = sdk_exporters.FileMetricExporter(plan.file(METRICS))
    else:
        exporter = make_exporter(METRICS, name)
    if isinstance(exporter, MetricReader):  # Prometheus's entry point is one
        return exporter
    return PeriodicExportingMetricReader(cast("MetricExporter", exporter))


def sampler_from_environment(environ: Mapping[str, str] = os.environ) -> Sampler:
    """The head sampler that `OTEL_TRACES_SAMPLER` names: the SDK's own, or one by entry point."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip()
    if name and name.lower() not in sampling._KNOWN_SAMPLERS:
        for point in entry_points(group="opentelemetry_traces_sampler"):
            if point.name == name:
                try:
                    return cast("Sampler", point.load()(environ.get("OTEL_TRACES_SAMPLER_ARG")))
                except Exception as error:
                    logger.warning("lens-auto: OTEL_TRACES_SAMPLER=%r fails (%s); all spans are kept", name, error)
                    return sampling.DEFAULT_ON
    return sampling._get_from_env_or_default()


def id_generator(environ: Mapping[str, str] = os.environ) -> IdGenerator:
    """The generator that `OTEL_PYTHON_ID_GENERATOR` names; unset (or the SDK's default, `random`): ours."""
    name = environ.get("OTEL_PYTHON_ID_GENERATOR", "").strip()
    if name and name != "random":
        for point in entry_points(group="opentelemetry_id_generator"):
            if point.name == name:
                try:
                    return cast("IdGenerator", point.load()())
                except Exception as error:
                    logger.warning("lens-auto: OTEL_PYTHON_ID_GENERATOR=%r fails (%s); ours is used", name, error)
                break
        else:
            logger.warning("lens-auto: OTEL_PYTHON_ID_GENERATOR=%r is not installed; our own is used", name)
    from lens_auto.recorder.ids import LensIdGenerator

    return cast("IdGenerator", LensIdGenerator())


# --- parts ------------------------------------------------------------------------------------------------------------


class OpenSpans(SpanProcessor):
    """Ends, at shutdown, the spans that are still open, innermost first, marked `nemo.span.truncated`."""

    def __init__(self) -> None:
        self._open: dict[int, Span] = {}  # strong: nobody else may hold a span that was never ended
        self._pid = os.getpid()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Remember a span. Beyond 10,000 the oldest is forgotten: a program that never ends its spans must not grow."""
        if self._pid != os.getpid():  # a forked child: the parent's spans are the parent's to end
            self._open = {}
            self._pid = os.getpid()
        if len(self._open) >= _MAX_OPEN_SPANS:
            try:
                self._open.pop(next(iter(self._open)), None)
            except (StopIteration, RuntimeError):  # another thread was at it
                pass
        if span.context is not None:
            self._open[span.context.span_id] = span
        if not span.name.isascii():  # one that cannot be encoded would cost its whole batch
            span.update_name(encodable(span.name))

    def on_end(self, span: ReadableSpan) -> None:
        """Forget an ended span; it is a copy of the one that started, so the id is what they share."""
        if span.context is not None:
            self._open.pop(span.context.span_id, None)

    def shutdown(self) -> None:
        """End what is open."""
        if self._pid != os.getpid():
            return
        while self._open:
            try:
                _, span = self._open.popitem()
            except KeyError:  # its own thread ended it
                return
            if span.is_recording():
                span.set_attribute(NEMO_SPAN_TRUNCATED, True)
                span.end()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing waits here."""
        return True


class _KeepsUnsent(SpanExporter):
    """An exporter whose failures are written down instead of forgotten."""

    def __init__(self, exporter: SpanExporter, file: sdk_exporters.JsonLinesFile) -> None:
        self._exporter = exporter
        self._file = file
        self._ended = False
        self._sending: Sequence[ReadableSpan] = ()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        if not self._ended:
            self._sending = spans
            try:
                result = self._exporter.export(spans)
            except Exception:
                logger.debug("lens-auto: exporting spans failed", exc_info=True)
            kept, self._sending = not self._sending, ()
            if kept:
                return SpanExportResult.SUCCESS
        if result is not SpanExportResult.SUCCESS and self._file.write(sdk_exporters.spans_line(spans)):
            return SpanExportResult.SUCCESS
        return result

    def give_up(self) -> None:
        """End retries now: what is waiting goes to the file."""
        if not self._ended:
            self._ended = True
            self._exporter.shutdown()

    def keep(self) -> None:
        """Write down what hangs in the network: the process ends now."""
        spans, self._sending = self._sending, ()
        if spans:
            self._file.write(sdk_exporters.spans_line(spans))

    def shutdown(self) -> None:
        self.give_up()
        self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Call:
    """A provider's end."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.result: Any = None
        self._work = work
        self._done = threading.Event()

    def go(self) -> None:
        """Make the call. A second one finds nothing left to do, or is refused by the provider."""
        try:
            self.result = self._work()
        except Exception:
            logger.debug("lens-auto: %s did not end well", self.name, exc_info=True)
        self._done.set()

    def wait(self, deadline: float) -> bool:
        """Whether it returned before a point of `time.monotonic()`."""
        return self._done.wait(max(0.0, deadline - time.monotonic()))

    def after_fork(self) -> None:
        """Be ready again in a forked child."""
        self._done = threading.Event()


class _ParkedCall(_Call):
    """A call made by a thread that was started long before: at an interpreter's exit Python (3.12) starts none."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        super().__init__(name, work)
        self._park()

    def _park(self) -> None:
        self._begin = threading.Event()
        threading.Thread(target=self._run, name=f"lens-end-{self.name}", daemon=True).start()

    def _run(self) -> None:
        self._begin.wait()
        super().go()

    def go(self) -> None:
        self._begin.set()

    def after_fork(self) -> None:
        super().after_fork()
        self._park()


def _is_remote(exporters: Sequence[str]) -> bool:
    return any(name not in (CONSOLE, FILE) for name in exporters)


def clean_attributes(attributes: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Those attributes that OpenTelemetry can hold; the others are left out with one debug line."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    for key, value in (attributes or {}).items():
        found = _held(value) if key else None
        if found is not None:
            kept[encodable(key)] = found
        elif value is not None:
            left_out.append(f"{key} ({type(value).__name__})")
    if left_out:
        logger.debug("lens-auto: %s that cannot be held and are left out: %s", what, ", ".join(left_out))
    return kept


def _held(value: Any) -> Any:
    if isinstance(value, Collection) and not isinstance(value, (str, Mapping, bytes)):
        items = [held(item) for item in value]
        return items if len({type(item) for item in items}) <= 1 and None not in items else None
    return held(value)


def set_global(pipeline: Pipeline, replace: bool = False) -> None:
    """Make the providers of a pipeline the global ones.

    Args:
        pipeline: Whose; a signal that it has not is left alone.
        replace: Also where a provider is set already, which OpenTelemetry refuses. For tests.
    """
    from opentelemetry import _logs, metrics

    if replace:  # opentelemetry-api 1.45: what the three `set_..._provider` fill once
        if pipeline.tracer_provider is not None:
            trace._TRACER_PROVIDER = pipeline.tracer_provider
        if pipeline.meter_provider is not None:
            metrics._internal._METER_PROVIDER = pipeline.meter_provider
        if pipeline.logger_provider is not None:
            _logs._internal._LOGGER_PROVIDER = pipeline.logger_provider
        return
    if pipeline.tracer_provider is not None:
        trace.set_tracer_provider(pipeline.tracer_provider)
    if pipeline.meter_provider is not None:
        metrics.set_meter_provider(pipeline.meter_provider)
    if pipeline.logger_provider is not None:
        _logs.set_logger_provider(pipeline.logger_provider)
