"""HTTP services under `opentelemetry-instrument`: their span groups, and the rollout that a request belongs to.

OpenTelemetry's own instrumentations make the spans and carry the context. Here is what they lack: the groups `server`
and `http_client` decide whether there is a span, while the context is passed on in any case; a request under
`/ng-rollout/{rollout_id}/...` puts the rollout's id on every span that it causes, in this process and further on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from opentelemetry import baggage, context, trace
from opentelemetry.trace import NonRecordingSpan, SpanKind
from opentelemetry.util._decorator import _agnosticcontextmanager

from lens_auto import prefix, state
from lens_auto.groups import TrainingSpanGroup
from lens_auto.semconv import NEMO_GYM_ROLLOUT_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
    from types import ModuleType

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from lens_auto.settings import Settings

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    Application = Callable[[Scope, Receive, Send], Awaitable[None]]

ROLLOUT_PREFIX = "/ng-rollout/"
_MAX_ROLLOUT_ID = 256

# Instrumentation scopes (the names of OpenTelemetry's packages) and the group of their spans.
GROUP_OF_SCOPE: dict[str, str] = {
    "opentelemetry.instrumentation.fastapi": TrainingSpanGroup.SERVER,
    "opentelemetry.instrumentation.asgi": TrainingSpanGroup.SERVER,
    "opentelemetry.instrumentation.starlette": TrainingSpanGroup.SERVER,
    "opentelemetry.instrumentation.aiohttp_client": TrainingSpanGroup.HTTP_CLIENT,
}
# One span more for each message of a request and its answer, which says nothing that the request's span does not.
_MESSAGE_SPANS = (" http send", " http receive", " websocket send", " websocket receive")


# --- groups -----------------------------------------------------------------------------------------------------------


class GatedTracer(trace.Tracer):
    """The tracer of an HTTP instrumentation: makes a span when its group is on, and else passes the context on.

    Args:
        tracer: Gives the tracer that makes the spans, at each span.
        group: The span group that decides, at each span.
    """

    def __init__(self, tracer: Callable[[], Tracer], group: str) -> None:
        self._tracer = tracer
        self._group = group

    def start_span(
        self, name: str, context: Context | None = None, kind: SpanKind = SpanKind.INTERNAL, *args: Any, **kwargs: Any
    ) -> Span:
        """A span; with its group off, one that records nothing and stands for its parent.

        What is inside then becomes a child of the caller's span, and what is sent carries the current span on.
        """
        if self._group not in state.enabled_span_groups or (
            kind is SpanKind.INTERNAL and name.endswith(_MESSAGE_SPANS)
        ):
            return NonRecordingSpan(trace.get_current_span(context).get_span_context())
        if kind is SpanKind.CLIENT and not name.startswith("HTTP"):
            name = f"HTTP {name}"  # as NeMo Gym names them; the instrumentation's is the bare method
        return self._tracer().start_span(name, context, kind, *args, **kwargs)

    @_agnosticcontextmanager
    def start_as_current_span(
        self,
        name: str,
        *args: Any,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
        **kwargs: Any,
    ) -> Iterator[Span]:
        """As `start_span`, current inside the block."""
        span = self.start_span(name, *args, **kwargs)
        with trace.use_span(span, end_on_exit, record_exception, set_status_on_exception):
            yield span


# --- rollouts ---------------------------------------------------------------------------------------------------------


def rollout_id(path: str) -> str | None:
    """The id in a path such as `/ng-rollout/7/v1/responses`; None where the path is of another kind."""
    if not path.startswith(ROLLOUT_PREFIX):
        return None
    found, slash, _ = path[len(ROLLOUT_PREFIX) :].partition("/")
    return unquote(found)[:_MAX_ROLLOUT_ID] or None if slash else None


def current_rollout_id(parent_context: Context | None = None) -> str | None:
    """The rollout that the current request belongs to, here or where it came from."""
    found = baggage.get_baggage(NEMO_GYM_ROLLOUT_ID, parent_context)
    return found if isinstance(found, str) and found else None


class RolloutMiddleware:
    """Sits inside OpenTelemetry's ASGI middleware, where the request's span and context are current already.

    The id becomes baggage, so that it reaches the spans inside, and with the context the services that are called.
    """

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        found = rollout_id(scope.get("path") or "")
        if found is None:
            return await self.app(scope, receive, send)
        trace.get_current_span().set_attribute(NEMO_GYM_ROLLOUT_ID, found)
        token = context.attach(baggage.set_baggage(NEMO_GYM_ROLLOUT_ID, found))
        try:
            await self.app(scope, receive, send)
        finally:
            context.detach(token)
        return None


def install_asgi(module: ModuleType) -> None:
    """Put `RolloutMiddleware` into every `OpenTelemetryMiddleware` made from now on."""
    import wrapt

    def init(wrapped: Callable[..., None], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrapped(*args, **kwargs)
        if not isinstance(instance.app, RolloutMiddleware):
            instance.app = RolloutMiddleware(instance.app)

    wrapt.wrap_function_wrapper(module.OpenTelemetryMiddleware, "__init__", init)


def rollout_processor() -> Any:
    """A span processor that puts the rollout's id on every span of a request."""
    from opentelemetry.sdk.trace import SpanProcessor

    class RolloutIds(SpanProcessor):
        """See above."""

        def on_start(self, span: Any, parent_context: Context | None = None) -> None:
            found = current_rollout_id(parent_context)
            if found is not None:
                span.set_attribute(NEMO_GYM_ROLLOUT_ID, found)

    return RolloutIds()


# --- what doctor says -------------------------------------------------------------------------------------------------

# Libraries that carry requests between processes: import name, OpenTelemetry's package for it.
_CARRIERS = (
    ("fastapi", "opentelemetry-instrumentation-fastapi"),
    ("aiohttp", "opentelemetry-instrumentation-aiohttp-client"),
    ("httpx", "opentelemetry-instrumentation-httpx"),
)


def advice(settings: Settings, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What in this environment breaks a trace between HTTP services, or makes it useless: one line each."""
    lines: list[str] = []
    if settings.disabled:
        lines.append(
            "lens-auto is off in this process: it neither reads the trace context of requests nor passes it on, so"
            " every service behind it starts a trace of its own"
        )
    for library, package in _CARRIERS:
        if importlib.util.find_spec(library) is not None and not _is_installed(package):
            lines.append(
                f"{library} is installed without {package}: requests by it carry no trace context, and the trace breaks"
                f" there; pip install {package}"
            )
    if environ.get("OTEL_PROPAGATORS", "").strip() and "tracecontext" not in environ["OTEL_PROPAGATORS"]:
        lines.append(
            f"OTEL_PROPAGATORS={environ['OTEL_PROPAGATORS']!r} leaves out tracecontext: services that read traceparent"
            " start traces of their own"
        )
    skipped = environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "")
    names = {name.strip() for name in skipped.split(",")}
    for name in sorted(names & {"fastapi", "aiohttp-client", "asgi", "httpx", "*"}):
        lines.append(
            f"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS names {name!r}: its requests carry no trace context; to have no"
            " spans of them and keep the context, leave http_client or server out of NEMO_LENS_SPAN_GROUPS instead"
        )
    gym = [name for name in environ if name.startswith(f"{prefix.GYM}_")]
    if (
        gym
        and importlib.util.find_spec(prefix.GYM_MODULE) is None
        and environ.get(prefix.VARIABLE, "").strip() != prefix.GYM
    ):
        lines.append(
            f"{', '.join(sorted(gym))} without {prefix.GYM_MODULE} installed: nothing reads it; set"
            f" {prefix.VARIABLE}={prefix.GYM} to have it read"
        )
    return lines


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
