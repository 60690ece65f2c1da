"""Spans around a user's own code: `managed_span`, `trace_fn`, `span_cm`, and attributes that are safe to set.

With its group off, a call here costs one look into a set. With it on, our own failures are logged once and swallowed;
the exceptions of the code inside are recorded and re-raised.
"""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
from typing import TYPE_CHECKING, Any, TypeVar, cast

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.trace import Status, StatusCode

from lens_auto import state
from lens_auto.fallbacks import NO_DECORATOR
from lens_auto.semconv import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, INSTRUMENTATION_SCOPE, REDACTED
from lens_auto.values import encodable, held

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping
    from contextlib import AbstractContextManager
    from contextvars import Token
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Span, Tracer

F = TypeVar("F", bound="Callable[..., Any]")

DEFAULT_REDACT_KEYS: frozenset[str] = frozenset(
    {"prompt", "input_text", "output_text", "text", "password", "token", "secret", "key"}
)

_logger = logging.getLogger(__name__)
_failure_logged = False


def get_tracer(name: str = INSTRUMENTATION_SCOPE) -> Tracer:
    """The tracer called `name` of the global provider."""
    return trace.get_tracer(name)


def get_meter(name: str = INSTRUMENTATION_SCOPE) -> Meter:
    """The meter called `name` of the global provider."""
    return metrics.get_meter(name)


def redact_value(key: str, value: object, redact_keys: Collection[str] = DEFAULT_REDACT_KEYS) -> str:
    """`value` as text, or `[REDACTED]` where `key` (in any case) is one of `redact_keys`."""
    return REDACTED if key in redact_keys or key.lower() in redact_keys else str(value)


def safe_set_span_attributes(
    span: Span, attributes: Mapping[str, Any], redact_keys: Collection[str] = DEFAULT_REDACT_KEYS
) -> None:
    """Sets those attributes that a span can hold.

    None, and whatever is neither a scalar (bool, int of 64 bits, float, str, NumPy's scalars) nor a sequence of them,
    is left out. Strings under a key of `redact_keys` become `[REDACTED]`, also inside a sequence.
    """
    if span.is_recording():
        span.set_attributes(_clean_attributes(attributes, redact_keys))


def _clean_attributes(attributes: Mapping[str, Any], redact_keys: Collection[str]) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    left_out: list[str] = []
    for key, value in attributes.items():
        kept: Any
        if isinstance(value, (list, tuple)):
            kept = [_clean_value(key, item, redact_keys) for item in value]
            if None in kept:
                kept = None
        else:
            kept = _clean_value(key, value, redact_keys)
        if kept is not None:
            cleaned[encodable(key)] = kept
        elif value is not None:
            left_out.append(f"{key} ({type(value).__name__})")
    if left_out:
        _logger.debug("lens-auto: attributes that cannot be held and are left out: %s", ", ".join(left_out))
    return cleaned


def _clean_value(key: str, value: Any, redact_keys: Collection[str]) -> bool | int | float | str | None:
    kept = held(value)
    return encodable(redact_value(key, kept, redact_keys)) if isinstance(kept, str) else kept


def managed_span(
    group: str, name: str, tracer: Tracer | None = None, **attributes: Any
) -> AbstractContextManager[Span | None]:
    """A span around a `with` block, when `group` is on.

    Args:
        group: The span group that decides, on each call.
        name: The span's name.
        tracer: Who makes the span; None: `get_tracer()`.
        **attributes: Set at start, filtered as `safe_set_span_attributes` does.

    Returns:
        A context manager that yields the current span, or None when the group is off. An exception in the block is
        recorded with ERROR status and re-raised.
    """
    if group not in state.enabled_span_groups:
        return _NO_SPAN
    return _SpanScope(name, tracer, attributes)


def span_cm(
    name: str, tracer: Tracer | None = None, record_exception: bool = True, **attributes: Any
) -> AbstractContextManager[Span]:
    """A span around a `with` block, whatever groups are on.

    Args:
        name: The span's name.
        tracer: Who makes the span; None: `get_tracer()`.
        record_exception: Whether an exception in the block becomes an event of the span; its status is ERROR anyway.
        **attributes: Set at start, filtered as `safe_set_span_attributes` does.
    """
    # Where making the span failed, the block gets a span that records nothing, never None.
    scope = _SpanScope(name, tracer, attributes, record_exception, trace.INVALID_SPAN)
    return cast("AbstractContextManager[Span]", scope)


def trace_fn(group: str, name: str, tracer: Tracer | None = None) -> Callable[[F], F]:
    """Decorates a function with a span around each call, when `group` is on at that call.

    Works on functions and methods, on coroutine functions (the span lasts until the coroutine ends) and on generators
    of both kinds (the span lasts from the first item to the end and is current only while the generator's own body
    runs). The decorated function stays of the kind it was, as `inspect` sees it; a classmethod or staticmethod stays
    one. What is no function (a property) is a TypeError.

    Args:
        group: The span group that decides.
        name: The span's name.
        tracer: Who makes the span; None: `get_tracer()`.
    """

    def decorate(function: F) -> F:
        if isinstance(function, (classmethod, staticmethod)):
            return cast("F", type(function)(decorate(function.__func__)))
        if not callable(function):
            raise TypeError(f"trace_fn decorates functions, got {function!r}; below @property it decorates the getter")
        for is_of_kind, wrap in _KINDS:
            if is_of_kind(function):
                from lens_auto.traced import TracedFunction

                traced = functools.wraps(function)(wrap(function, group, name, tracer))
                return cast("F", TracedFunction(function, traced, group))
        return cast("F", functools.wraps(function)(_wrap_function(function, group, name, tracer)))

    return decorate


class _NoSpan:
    """The context manager of a group that is off: holds nothing, so one instance serves all threads at once."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, *_: object) -> None:
        raise TypeError(NO_DECORATOR)


_NO_SPAN = _NoSpan()


class _SpanScope:
    """One span: started, made current, and ended with the outcome of what ran inside. Used once."""

    __slots__ = ("attributes", "context", "name", "record_exception", "span", "substitute", "token", "tracer")

    def __init__(
        self,
        name: str,
        tracer: Tracer | None,
        attributes: Mapping[str, Any],
        record_exception: bool = True,
        substitute: Span | None = None,
    ) -> None:
        self.name = name
        self.tracer = tracer
        self.attributes = attributes
        self.record_exception = record_exception
        self.substitute = substitute
        self.span: Span | None = None
        self.context: Context | None = None
        self.token: Token[Context] | None = None

    def __enter__(self) -> Span | None:
        self.start()
        if self.context is None:
            return self.substitute
        self.token = otel_context.attach(self.context)
        return self.span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.token is not None:
            otel_context.detach(self.token)
        self.end(error)

    def __call__(self, *_: object) -> None:
        raise TypeError(NO_DECORATOR)

    def start(self) -> None:
        """Starts the span without making it current; `context` stays None where that failed."""
        try:
            tracer = self.tracer if self.tracer is not None else get_tracer()
            # Given at start and not set later, so that a sampler sees them.
            attributes = _clean_attributes(self.attributes, DEFAULT_REDACT_KEYS)
            self.span = tracer.start_span(encodable(self.name), attributes=attributes)
            self.context = trace.set_span_in_context(self.span)
        except Exception:
            _log_failure_once(self.name)

    def end(self, error: BaseException | None) -> None:
        """Ends the span. KeyboardInterrupt, cancellation and the like are no errors of the code inside."""
        if self.span is None:
            return
        try:
            if isinstance(error, Exception) and self.span.is_recording():
                if self.record_exception:
                    self.span.record_exception(error, _encodable_exception(error))
                self.span.set_status(Status(StatusCode.ERROR, encodable(f"{type(error).__name__}: {error}")))
        except Exception:
            _log_failure_once(self.name)
        try:
            self.span.end()
        except Exception:
            _log_failure_once(self.name)


def _encodable_exception(error: Exception) -> dict[str, str] | None:
    """What the event of an exception says instead, where its message cannot be sent as it is."""
    message = str(error)
    sent = encodable(message)
    if sent == message:
        return None
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return {EXCEPTION_MESSAGE: sent, EXCEPTION_STACKTRACE: encodable("".join(lines))}


class _Stretch:
    """Makes a generator's span current for each stretch of its body, and gives the consumer its own context back after.

    The body's context is kept from one stretch to the next: it may be inside spans of its own when it yields.
    """

    __slots__ = ("context", "token")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.token: Token[Context] | None = None

    def __enter__(self) -> None:
        self.token = otel_context.attach(self.context)

    def __exit__(self, *_: object) -> None:
        self.context = otel_context.get_current()
        if self.token is not None:
            otel_context.detach(self.token)


def _log_failure_once(name: str) -> None:
    global _failure_logged
    if not _failure_logged:
        _failure_logged = True
        _logger.warning("span %r could not be recorded; further failures are not shown", name, exc_info=True)


def _wrap_function(function: Callable[..., Any], group: str, name: str, tracer: Tracer | None) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        if group not in state.enabled_span_groups:
            return function(*args, **kwargs)
        with _SpanScope(name, tracer, {}):
            return function(*args, **kwargs)

    return traced


def _wrap_coroutine_function(
    function: Callable[..., Any], group: str, name: str, tracer: Tracer | None
) -> Callable[..., Any]:
    async def traced(*args: Any, **kwargs: Any) -> Any:
        if group not in state.enabled_span_groups:
            return await function(*args, **kwargs)
        with _SpanScope(name, tracer, {}):
            return await function(*args, **kwargs)

    return traced


def _wrap_generator_function(
    function: Callable[..., Generator[Any, Any, Any]], group: str, name: str, tracer: Tracer | None
) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        if group not in state.enabled_span_groups:
            return (yield from generator)
        scope = _SpanScope(name, tracer, {})
        scope.start()
        if scope.context is None:
            return (yield from generator)
        return (yield from _drive_generator(generator, scope, scope.context))

    return traced


def _drive_generator(
    generator: Generator[Any, Any, Any], scope: _SpanScope, context: Context
) -> Generator[Any, Any, Any]:
    """`yield from generator` with the span current only while its body runs, never in the loop that consumes it."""
    body = _Stretch(context)
    error: BaseException | None = None
    try:
        with body:
            item = next(generator)
        while True:
            try:
                sent = yield item
            except GeneratorExit:
                with body:
                    generator.close()
                raise
            except BaseException as thrown:
                with body:
                    item = generator.throw(thrown)
            else:
                with body:
                    item = generator.send(sent)
    except StopIteration as stop:
        return stop.value
    except BaseException as raised:
        error = raised
        raise
    finally:
        scope.end(error)


def _wrap_async_generator_function(
    function: Callable[..., AsyncGenerator[Any, Any]], group: str, name: str, tracer: Tracer | None
) -> Callable[..., Any]:
    async def traced(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        body: _Stretch | _NoSpan = _NO_SPAN
        scope: _SpanScope | None = None
        if group in state.enabled_span_groups:
            scope = _SpanScope(name, tracer, {})
            scope.start()
            if scope.context is not None:
                body = _Stretch(scope.context)
        # There is no `yield from` for asynchronous generators: items, values and exceptions are passed by hand.
        error: BaseException | None = None
        try:
            with body:
                item = await generator.__anext__()
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    with body:
                        await generator.aclose()
                    raise
                except BaseException as thrown:
                    with body:
                        item = await generator.athrow(thrown)
                else:
                    with body:
                        item = await generator.asend(sent)
        except StopAsyncIteration:
            return
        except BaseException as raised:
            error = raised
            raise
        finally:
            if scope is not None:
                scope.end(error)

    return traced


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[..., Callable[..., Any]]], ...] = (
    (inspect.iscoroutinefunction, _wrap_coroutine_function),
    (inspect.isasyncgenfunction, _wrap_async_generator_function),
    (inspect.isgeneratorfunction, _wrap_generator_function),
)
